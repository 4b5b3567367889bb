"""What do we ask of the writer of compressed records, of which several tokens share one?

The last token of each group of `ratio` tokens writes the group's row: 448 lanes as OCP e4m3 codes, 64 lanes rotated to
the position of the group's first token. See `oracle.cache.compressed_record_write` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float32, Int64, UInt8

from cases.cache import kv_record_write, rotated_rows
from cases.cache.kv_record_write import WriteCase
from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded_copy
from cases.production import Served

# V4.1 compresses 1 or 2 tokens into a record, V4 4 or 128.
RATIOS = (1, 2, 4, 128)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: row t of `rows` becomes the record in slot `slots[t]`, if that is not negative and token t ends a group.

    `positions[t]` is the absolute position of token t; position p ends a group if p + 1 is a multiple of `ratio`.
    `rows` and `positions` may be longer than `slots`: padding, which nobody may use. Row p of `cos_sin` turns to
    position p. Slots that are written are unique. `zero_nans`: whether a NaN that the rotation gives is stored as 0.
    """

    rows: BFloat16[torch.Tensor, "rows 512"]
    positions: Int64[torch.Tensor, " rows"]
    cos_sin: Float32[torch.Tensor, "table 64"]
    slots: Int64[torch.Tensor, " tokens"]
    cache: UInt8[torch.Tensor, "blocks block_size 584"]
    ratio: int
    zero_nans: bool


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The cache after the call."""

    cache: UInt8[torch.Tensor, "blocks block_size 584"]


WRITABLE: tuple[str, ...] = ("cache",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedCase(Case):
    """The axes of the compressed writer.

    tokens, padding_rows, block_size (records a page), block_stride, slots, values: as `cache.kv_record_write` has them;
    values other than `wide`, whose rotated lanes hold any pattern, are finite. ratio: tokens a record. positions: `run`
    consecutive ones, one of which ends a group; `closing` each ends a group; `between` none does; `edges` on both sides
    of the ends; `last` the last ones of the table. Positions of tokens without a slot are garbage. table_layout:
    `strided` leaves gaps between the table's rows. rotation: `spread` by any angle, `quarter` by quarter turns.
    zero_nans: whether NaN is stored as 0.
    """

    op: ClassVar[str] = "cache.compressed_record_write"

    tokens: int = 7
    padding_rows: int = 3
    block_size: int = 64
    block_stride: Literal["page", "padded", "odd", "far"] = "page"
    ratio: int = 2
    slots: Literal["dense", "scattered", "skipped", "negative", "all_skipped"] = "scattered"
    positions: Literal["run", "closing", "between", "edges", "last"] = "closing"
    table_layout: Literal["contiguous", "strided"] = "contiguous"
    rotation: Literal["spread", "quarter"] = "spread"
    values: Literal[
        "randn", "zeros", "outlier", "amax_edge", "subnormal", "negative_zero", "wide", "huge", "floor", "ties"
    ] = "randn"
    zero_nans: bool = False


CASE = CompressedCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 7, 33),
    "padding_rows": (0, 3),
    "block_size": (1, 2, 5, 32, 64),
    "block_stride": ("page", "padded", "odd"),
    "ratio": RATIOS,
    "slots": ("dense", "scattered", "skipped", "negative", "all_skipped"),
    "positions": ("run", "closing", "between", "edges", "last"),
    "table_layout": ("contiguous", "strided"),
    "rotation": ("spread", "quarter"),
    "values": (
        "randn", "zeros", "outlier", "amax_edge", "subnormal", "negative_zero", "wide", "huge", "floor", "ties",
    ),
    "zero_nans": (False, True),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 7, 33, 257, 1024),
    "padding_rows": (0, 3, 64),
    "block_size": (1, 2, 4, 5, 32, 64, 128, 256),
}

RANDOM_CASES = 20

_BASE = CompressedCase(tokens=33, block_stride="padded")

REGRESSIONS: tuple[str, ...] = (
    # An offset of 2^31 bytes and more, in both regions of the last page.
    _BASE.varied(block_stride="far").id,
    _BASE.varied(block_stride="far", block_size=32, ratio=4).id,
    _BASE.varied(slots="negative", block_size=4, ratio=1).id,
    _BASE.varied(ratio=4, positions="edges").id,
    _BASE.varied(ratio=128, positions="last", slots="dense").id,
    _BASE.varied(values="wide", zero_nans=True).id,
    _BASE.varied(values="wide", zero_nans=False).id,
    _BASE.varied(values="amax_edge", ratio=1).id,
)

_POOL = {"cache": 65536}
PRODUCTION: tuple[Served, ...] = (
    Served(CASE(tokens=256, padding_rows=0, ratio=2), _POOL),
    Served(CASE(tokens=256, padding_rows=0, ratio=4), _POOL),
    Served(CASE(tokens=256, padding_rows=0, ratio=128), {"cache": 8192}),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"tokens": (0, 1 << 16), "padding_rows": (0, 1 << 16), "block_size": (1, 4096)}


def forbid(case: CompressedCase) -> list[str]:
    """Every reason why this is no question: without a token that writes, nothing tells the kinds of values apart."""
    reasons = outside(case, _BOUNDS)
    if case.ratio not in RATIOS:
        reasons.append(f"ratio={case.ratio}: should be 1, 2, 4 or 128")
    if case.tokens == 0 and case.slots not in ("scattered", "dense"):
        reasons.append(f"slots={case.slots}: should be scattered or dense where there are no tokens")
    if case.tokens == 0 and case.positions != "closing":
        reasons.append(f"positions={case.positions}: should be closing where there are no tokens")
    if case.block_stride == "far" and case.slots == "negative":
        reasons.append("block_stride=far: no guard bytes before the cache catch slots=negative")
    if case.block_stride == "far" and case.tokens == 0:
        reasons.append("block_stride=far: needs a token")
    if case.ratio == 1 and case.positions == "between":
        reasons.append("positions=between: each token ends a group of 1")
    if case.slots == "all_skipped" and case.positions != "closing":
        reasons.append(f"positions={case.positions}: should be closing where no token has a slot")
    if case.values != "randn" and (case.slots == "all_skipped" or case.positions == "between"):
        reasons.append(f"values={case.values}: should be randn where nothing is written")
    return reasons


def heavy(case: CompressedCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.tokens > 100


def build(case: CompressedCase) -> Inputs:
    """The inputs of a case: the rows, slots and cache of the writer without rotation, and positions with their table."""
    draw = Draw(case.seed, case.op)
    plain = kv_record_write.build(
        WriteCase(
            seed=case.seed, tokens=case.tokens, padding_rows=case.padding_rows, block_size=case.block_size,
            block_stride=case.block_stride, encoding="float8_e4m3fn", slots=case.slots, values=case.values,
        ),
    )  # fmt: skip
    table = rotated_rows.draw_angles(draw.within("table"), case.rotation, case.tokens)
    length = table.shape[0]
    return Inputs(
        rows=plain.k,
        positions=guarded_copy(_positions(case, draw, length, plain.slots)),
        cos_sin=guarded_copy(table, gaps=(8,) if case.table_layout == "strided" else ()),
        slots=plain.slots,
        cache=plain.cache,
        ratio=case.ratio,
        zero_nans=case.zero_nans,
    )


def _positions(case: CompressedCase, draw: Draw, length: int, slots: torch.Tensor) -> torch.Tensor:
    count, ratio = case.tokens, case.ratio
    groups = length // ratio
    closing = draw.integers("group", (count,), 0, groups) * ratio + ratio - 1
    if case.positions == "closing":
        found = closing
    elif case.positions == "last":
        found = torch.arange(length - count, length)
    elif case.positions == "run":
        start = int(draw.integers("closer", (1,), 0, groups)) * ratio + ratio - 1
        start -= int(draw.integers("before", (1,), 0, count))
        found = torch.arange(count) + min(max(start, 0), length - count)
    elif case.positions == "between":
        found = closing - draw.integers("short", (count,), 1, ratio)
    else:
        found = (closing + draw.integers("step", (count,), -1, 3)).clamp(0, length - 1)
        found[:1] = ratio - 1
    garbage = torch.tensor([-1, length, -(1 << 63), (1 << 63) - 1, 1 << 32, -ratio])
    stray = garbage[draw.integers("stray", (count + case.padding_rows,), 0, garbage.numel())]
    stray[:count] = torch.where(slots < 0, stray[:count], found)
    return stray
