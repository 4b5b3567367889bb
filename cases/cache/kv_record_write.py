"""What do we ask of a writer of packed key-value records?

One row of 512 bfloat16 numbers becomes one record of 584 bytes in a paged cache: 448 e4m3 codes with a power-of-two
scale for each 64 of them, and 64 bfloat16 lanes as they are. See `oracle.cache.records` for the formula and the bytes.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import BFloat16, Int64, UInt8

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import GUARD_BYTES, far_gap, guarded, guarded_copy
from cases.production import Served

Encoding = Literal["float8_e4m3fn", "float8_e4m3fnuz"]

LANES = 512
NOPE = 448
RECORD = 584
DATA_BYTES = 576
LIMIT: Mapping[str, float] = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: row t of `k` becomes the record in slot `slots[t]` = block * block_size + place, unless it is negative.

    `k` may have more rows than there are slots: padding, which nobody may use. A page's bytes are its records' data
    first, then its scales; the block stride may exceed 584 bytes a record. Slots are unique and inside the cache.
    """

    k: BFloat16[torch.Tensor, "rows 512"]
    slots: Int64[torch.Tensor, " tokens"]
    cache: UInt8[torch.Tensor, "blocks block_size 584"]
    encoding: Encoding


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The cache after the call."""

    cache: UInt8[torch.Tensor, "blocks block_size 584"]


WRITABLE: tuple[str, ...] = ("cache",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteCase(Case):
    """The axes of the record writer.

    tokens: slots. padding_rows: rows of k beyond them. block_size: records a page. block_stride: `page` the smallest
    legal one, `padded` a page more, `odd` two bytes more, `far` the last block 2^31 bytes behind the first. slots:
    `dense` one after another, `scattered` anywhere, `skipped` some -1, `negative` some other negative numbers,
    `all_skipped` -1 only. k_layout: `strided` leaves gaps between the rows. values: `amax_edge` groups whose largest
    magnitude is the format's limit times a power of two, or a bfloat16 neighbour of it; `negative_zero` zeros of both
    signs; `wide` any finite number, with NaN in the RoPE lanes; `huge` near the largest finite number; `floor` round
    1e-4; `ties` middles between codes.
    """

    op: ClassVar[str] = "cache.kv_record_write"

    tokens: int = 7
    padding_rows: int = 3
    block_size: int = 64
    block_stride: Literal["page", "padded", "odd", "far"] = "page"
    encoding: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn"
    slots: Literal["dense", "scattered", "skipped", "negative", "all_skipped"] = "scattered"
    k_layout: Literal["contiguous", "strided"] = "contiguous"
    values: Literal[
        "randn", "zeros", "outlier", "amax_edge", "subnormal", "negative_zero", "wide", "huge", "floor", "ties"
    ] = "randn"


CASE = WriteCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 7, 33),
    "padding_rows": (0, 3),
    "block_size": (1, 2, 4, 5, 64, 256),
    "block_stride": ("page", "padded", "odd"),
    "encoding": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "slots": ("dense", "scattered", "skipped", "negative", "all_skipped"),
    "k_layout": ("contiguous", "strided"),
    "values": (
        "randn", "zeros", "outlier", "amax_edge", "subnormal", "negative_zero", "wide", "huge", "floor", "ties",
    ),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"tokens": (0, 1, 7, 33, 257, 1024), "padding_rows": (0, 3, 64)}

RANDOM_CASES = 20

REGRESSIONS: tuple[str, ...] = (
    *(
        f"cache.kv_record_write:tokens={tokens},padding_rows=3,block_size={block_size},block_stride=padded,"
        f"encoding={encoding},slots={slots},k_layout=contiguous,values={values},seed=0"
        for tokens, block_size, encoding, slots, values in (
            (7, 4, "float8_e4m3fn", "scattered", "zeros"),
            (33, 5, "float8_e4m3fn", "scattered", "amax_edge"),
            (33, 4, "float8_e4m3fnuz", "scattered", "amax_edge"),
            (7, 64, "float8_e4m3fnuz", "scattered", "negative_zero"),
            (7, 4, "float8_e4m3fn", "negative", "randn"),
        )
    ),
    # The last block lies more than 2^31 bytes behind the first.
    WriteCase(tokens=33, padding_rows=0, block_size=5, block_stride="far").id,
)

_POOL = {"cache": 65536}
PRODUCTION: tuple[Served, ...] = (
    Served(CASE(tokens=256, padding_rows=0, block_size=64), _POOL),
    Served(CASE(tokens=256, padding_rows=0, block_size=256), {"cache": 8192}),
    Served(CASE(tokens=256, padding_rows=0, block_size=64, encoding="float8_e4m3fnuz"), _POOL),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"tokens": (0, 1 << 16), "padding_rows": (0, 1 << 16), "block_size": (1, 4096)}


def forbid(case: WriteCase) -> list[str]:
    """Every reason why this is no question: without a token nothing tells the kinds of slots and values apart."""
    reasons = outside(case, _BOUNDS)
    if case.tokens == 0 and case.slots not in ("scattered", "dense"):
        reasons.append(f"slots={case.slots}: should be scattered or dense where there are no tokens")
    if case.block_stride == "far" and case.slots == "negative":
        reasons.append("block_stride=far: no guard bytes before the cache catch slots=negative")
    if case.block_stride == "far" and case.tokens == 0:
        reasons.append("block_stride=far: needs a token")
    if case.slots == "all_skipped" and case.values != "randn":
        reasons.append(f"values={case.values}: should be randn where nothing is written")
    return reasons


def heavy(case: WriteCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.tokens > 100


def block_stride_bytes(block_size: int, kind: str, blocks: int = 0) -> int:
    """The bytes from one page to the next: a multiple of 576, a page more, or two bytes more.

    `far` puts the last of `blocks` pages, three or more, 2^31 bytes behind the first.
    """
    if kind == "far":
        return block_size * RECORD + far_gap(blocks, block_size * RECORD)
    page = -(-block_size * RECORD // DATA_BYTES) * DATA_BYTES
    return page + {"page": 0, "padded": page, "odd": 2}[kind]


def build(case: WriteCase) -> Inputs:
    """The inputs of a case: the cache full of drawn bytes, padding rows full of huge numbers.

    Three pages of guard bytes stand before the cache, so that a writer that takes a small negative slot for an address
    is seen without harm.
    """
    draw = Draw(case.seed, case.op)
    blocks = -(-case.tokens // case.block_size) + 2
    stride = block_stride_bytes(case.block_size, case.block_stride, blocks)
    before = 0 if case.block_stride == "far" else 3 * stride
    lead = GUARD_BYTES + -(-before // GUARD_BYTES) * GUARD_BYTES
    cache = guarded(
        (blocks, case.block_size, RECORD), torch.uint8, gaps=(stride - case.block_size * RECORD, 0), lead=lead
    )
    cache.copy_(draw.integers("before", cache.shape, 0, 256).to(torch.uint8))
    rows = torch.full((case.tokens + case.padding_rows, LANES), 3.0e38, dtype=torch.bfloat16)
    rows[: case.tokens] = _rows(case, draw)
    return Inputs(
        k=guarded_copy(rows, gaps=(24,) if case.k_layout == "strided" else ()),
        slots=guarded_copy(_slots(case, draw, blocks * case.block_size)),
        cache=cache,
        encoding=case.encoding,
    )


def _slots(case: WriteCase, draw: Draw, records: int) -> torch.Tensor:
    if case.slots == "dense":
        first = int(draw.integers("first", (1,), 0, records - case.tokens + 1))
        return torch.arange(first, first + case.tokens)
    if case.slots == "all_skipped":
        return torch.full((case.tokens,), -1)
    slots = draw.permutation("slots", records)[: case.tokens]
    if case.slots in ("skipped", "negative"):
        skipped = draw.chance("skipped", (case.tokens,), 1, 3)
        skipped[:1] = True
        other = draw.integers("negative", (case.tokens,), -2 * case.block_size - 1, -1)
        slots = torch.where(skipped, -1 if case.slots == "skipped" else other, slots)
    return slots


def _from_bits(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def _rows(case: WriteCase, draw: Draw) -> torch.Tensor:
    shape = (case.tokens, LANES)
    groups = (case.tokens, LANES // 64)
    powers = torch.ldexp(torch.ones(groups), draw.integers("power", groups, -3, 4)).repeat_interleave(64, dim=1)
    normal = (draw.normal_like("normal", shape) * powers).to(torch.bfloat16)
    signs = draw.integers("sign", shape, 0, 2)
    lane = draw.integers("lane", (*groups, 1), 0, 64)
    if case.values == "randn":
        return normal
    if case.values == "zeros":
        return torch.zeros(shape, dtype=torch.bfloat16)
    if case.values == "negative_zero":
        # Underflow of negative numbers gives -0 too: some lanes are far below the smallest code.
        tiny = torch.where(draw.chance("tiny", shape, 1, 4), -(2.0**-40), -0.0)
        rows = torch.where(signs > 0, tiny, torch.zeros(shape)).to(torch.bfloat16)
        rows[:, :64] = torch.where(signs[:, :64] > 0, -0.0, 0.0).to(torch.bfloat16)
        return rows
    if case.values == "subnormal":
        return _from_bits(draw.integers("subnormal", shape, 0, 0x90) + (signs << 15))
    if case.values == "wide":
        bits = draw.integers("wide", shape, 0, 0x7F80) + (signs << 15)
        bits[:, NOPE:] = draw.integers("rope", (case.tokens, LANES - NOPE), 0, 1 << 16)
        return _from_bits(bits)
    if case.values == "huge":
        return _from_bits(draw.integers("huge", shape, 0x7E00, 0x7F80) + (signs << 15))
    if case.values == "ties":
        # Multiples of half a step of the codes under a scale that one lane of 256 fixes.
        halves = draw.integers("halves", shape, -255, 256)
        grouped = halves.view(*groups, 64).scatter(2, lane, 256)
        return (grouped.view(shape) * powers).to(torch.bfloat16)
    # One lane of each group is far larger than the others.
    large = torch.ldexp(torch.ones(groups), draw.integers("large", groups, 6, 12))
    if case.values == "amax_edge":
        exponent = draw.integers("exponent", groups, -12, 40)
        edge = torch.ldexp(torch.full(groups, LIMIT[case.encoding]), exponent).to(torch.bfloat16).view(torch.int16)
        large = _from_bits(edge.to(torch.int64) + draw.integers("step", groups, -1, 2)).float()
    elif case.values == "floor":
        edge = torch.full(groups, 1e-4).to(torch.bfloat16).view(torch.int16)
        large = _from_bits(edge.to(torch.int64) + draw.integers("step", groups, -3, 3)).float()
    small = (normal.view(*groups, 64).float() * large[..., None] * 2.0**-7).to(torch.bfloat16)
    sign = torch.where(draw.integers("large_sign", groups, 0, 2) > 0, -1.0, 1.0)
    return small.scatter(2, lane, (large * sign)[..., None].to(torch.bfloat16)).view(shape)


def drawn_codes(draw: Draw, name: str, shape: tuple[int, ...], pool: list[int]) -> torch.Tensor:
    """uint8 codes drawn from a pool, every one as likely as any other."""
    table = torch.from_numpy(np.array(pool, dtype=np.uint8))
    return table[draw.integers(name, shape, 0, len(pool))]
