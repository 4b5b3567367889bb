"""What do we ask of a kernel that gathers packed key-value records into bfloat16 rows?

For each request the last `gather_lens` of its `seq_lens` tokens, found through its block table, become rows of 512
bfloat16 numbers from row `offset` of its part of the output on. See `oracle.cache.records` for the record.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Int32, UInt8

from cases.cache.kv_record_write import DATA_BYTES, RECORD, block_stride_bytes, drawn_codes
from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

Encoding = Literal["float8_e4m3fn", "float8_e4m3fnuz"]

# Scale bytes under which code times scale is exact in bfloat16, the first and one past the last.
_EXACT_SCALES: Mapping[str, tuple[int, int]] = {"float8_e4m3fn": (3, 247), "float8_e4m3fnuz": (4, 248)}
_NAN_CODES: Mapping[str, tuple[int, ...]] = {"float8_e4m3fn": (0x7F, 0xFF), "float8_e4m3fnuz": (0x80,)}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: for request b and i in 0..g-1, with g = gather_lens[b] (or seq_lens[b] when None),
    out[b, offset + i] receives the record at position seq_lens[b] - g + i; all other rows of `out` stay.

    Position p lies in block table[b, p // block_size], place p % block_size. Columns of the table beyond a request's
    last block hold anything. g <= seq_lens[b] and offset + g <= rows. `max_gather_len` is a hint for the launch and
    changes nothing. The last strides of `out` and `table` are 1, the others are free.
    """

    out: BFloat16[torch.Tensor, "requests rows 512"]
    cache: UInt8[torch.Tensor, "blocks block_size 584"]
    seq_lens: Int32[torch.Tensor, " requests"]
    gather_lens: Int32[torch.Tensor, " requests"] | None
    table: Int32[torch.Tensor, "requests columns"]
    offset: int
    encoding: Encoding
    max_gather_len: int | None


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The output rows after the call. Which NaN stands for a NaN code is free."""

    out: BFloat16[torch.Tensor, "requests rows 512"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherCase(Case):
    """The axes of the gather.

    requests: rows of the batch. length: tokens of the longest request. lengths: `full` all that long, `ragged` any
    length from 0, `empty_between` every other one empty. gather: `all` without gather_lens, `whole` with them equal to
    the lengths, `window` the last few tokens, `mixed` none, some or all. block_stride: `page` the smallest legal one,
    `padded` a page more, `odd` two bytes more, `far` the last block 2^31 bytes behind the first. table: `narrowed` is
    a view of a wider table, `shared` requests share their first block. hint: the launch hint absent, exact, far too
    small or too large. out_layout: `strided` leaves gaps after rows and requests. values: `extreme_scales` the whole
    range that is exact; `nan_codes` some codes are NaN; `lanes` a number that names the lane and its group. Records
    that nobody may read hold NaN codes and scale 255.
    """

    op: ClassVar[str] = "cache.kv_gather_dequant"

    requests: int = 3
    length: int = 65
    lengths: Literal["full", "ragged", "empty_between"] = "ragged"
    gather: Literal["all", "whole", "window", "mixed"] = "window"
    offset: int = 3
    block_size: int = 64
    block_stride: Literal["page", "padded", "odd", "far"] = "page"
    encoding: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn"
    table: Literal["exact", "narrowed", "shared"] = "exact"
    hint: Literal["absent", "exact", "small", "large"] = "absent"
    out_layout: Literal["contiguous", "strided"] = "contiguous"
    values: Literal["randn", "all_codes", "extreme_scales", "nan_codes", "negative_zero", "lanes"] = "randn"


CASE = GatherCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 5),
    "length": (1, 7, 65),
    "lengths": ("full", "ragged", "empty_between"),
    "gather": ("all", "whole", "window", "mixed"),
    "offset": (0, 3, 128),
    "block_size": (1, 2, 4, 5, 64, 256),
    "block_stride": ("page", "padded", "odd"),
    "encoding": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "table": ("exact", "narrowed", "shared"),
    "hint": ("absent", "exact", "small", "large"),
    "out_layout": ("contiguous", "strided"),
    "values": ("randn", "all_codes", "extreme_scales", "nan_codes", "negative_zero", "lanes"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"length": (1, 7, 65, 300, 1500), "requests": (0, 1, 2, 5, 17)}

RANDOM_CASES = 20

REGRESSIONS: tuple[str, ...] = (
    *(
        f"cache.kv_gather_dequant:requests={requests},length={length},lengths={lengths},gather={gather},offset={offset},"
        f"block_size={block_size},block_stride=padded,encoding={encoding},table={table},hint=absent,out_layout=strided,"
        f"values={values},seed=0"
        for requests, length, lengths, gather, offset, block_size, encoding, table, values in (
            (3, 65, "ragged", "window", 128, 4, "float8_e4m3fn", "exact", "lanes"),
            (2, 65, "full", "all", 0, 5, "float8_e4m3fnuz", "exact", "all_codes"),
            (2, 7, "full", "all", 3, 2, "float8_e4m3fn", "narrowed", "randn"),
            (1, 65, "full", "whole", 0, 64, "float8_e4m3fn", "exact", "nan_codes"),
        )
    ),
    # The last block lies more than 2^31 bytes behind the first.
    GatherCase(requests=2, lengths="full", gather="all", offset=0, block_size=5, block_stride="far").id,
)

_POOL = {"cache": 65536}
PRODUCTION: tuple[Served, ...] = (
    Served(CASE(requests=4, length=2048, gather="all", offset=0), _POOL),
    Served(CASE(requests=4, length=2048, gather="window", offset=128), {"cache": 8192}),
    Served(CASE(requests=4, length=2048, gather="all", offset=0, encoding="float8_e4m3fnuz"), _POOL),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (0, 4096),
    "length": (0, 1 << 17),
    "offset": (0, 1 << 17),
    "block_size": (1, 4096),
}


def forbid(case: GatherCase) -> list[str]:
    """Every reason why this is no question: the kinds of lengths and tables need requests to differ on."""
    reasons = outside(case, _BOUNDS)
    if case.requests < 2 and case.lengths == "empty_between":
        reasons.append("lengths=empty_between: needs two requests")
    if case.requests < 2 and case.table == "shared":
        reasons.append("table=shared: needs two requests")
    return reasons


def heavy(case: GatherCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.requests * case.length > 400


def build(case: GatherCase) -> Inputs:
    """The inputs of a case; blocks are scattered over a cache that has three more."""
    draw = Draw(case.seed, case.op)
    lengths = _lengths(case, draw)
    gathers = _gathers(case, draw, lengths)
    used = -(-lengths // case.block_size)
    columns = max(-(-case.length // case.block_size), 1) + 2
    blocks = int(used.sum()) + 3
    order = draw.permutation("blocks", blocks)
    # Behind a request's last block: huge, negative, or another block's number.
    garbage = torch.tensor([-1, 2**31 - 1, -(2**31), blocks])[draw.integers("garbage", (case.requests, columns), 0, 4)]
    starts = torch.cumsum(used, 0) - used
    column = torch.arange(columns)
    real = column[None, :] < used[:, None]
    table = torch.where(real, order[(starts[:, None] + column[None, :]).clamp(max=blocks - 1)], garbage)
    if case.table == "shared":
        first = table[int(used.argmax()), 0]
        table[:, 0] = torch.where(used > 0, first, table[:, 0])
    longest = int(gathers.max()) if case.requests else 0
    hints = {"absent": None, "exact": longest, "small": 1, "large": 4096}
    gaps = (520, 8) if case.out_layout == "strided" else ()
    return Inputs(
        out=guarded((case.requests, case.offset + longest + 2, 512), torch.bfloat16, gaps=gaps),
        cache=_cache(case, draw, blocks, table[real]),
        seq_lens=guarded_copy(lengths.to(torch.int32)),
        gather_lens=None if case.gather == "all" else guarded_copy(gathers.to(torch.int32)),
        table=guarded_copy(table.to(torch.int32), gaps=(5,) if case.table == "narrowed" else ()),
        offset=case.offset,
        encoding=case.encoding,
        max_gather_len=hints[case.hint],
    )


def _lengths(case: GatherCase, draw: Draw) -> torch.Tensor:
    lengths = torch.full((case.requests,), case.length)
    if case.lengths == "ragged":
        lengths = draw.integers("lengths", (case.requests,), 0, case.length + 1)
        lengths[:1] = case.length
    if case.lengths == "empty_between":
        lengths[1::2] = 0
    return lengths


def _gathers(case: GatherCase, draw: Draw, lengths: torch.Tensor) -> torch.Tensor:
    if case.gather in ("all", "whole"):
        return lengths.clone()
    if case.gather == "window":
        return torch.minimum(lengths, torch.tensor(max(1, case.length // 3)))
    part = draw.integers("part", (case.requests,), 0, 5)
    return torch.where(part == 4, lengths, lengths * part // 4)


def _cache(case: GatherCase, draw: Draw, blocks: int, used: torch.Tensor) -> torch.Tensor:
    """Drawn records in the used blocks; elsewhere, and in the guards, NaN codes, which are infinite scales too."""
    size = case.block_size
    stride = block_stride_bytes(size, case.block_stride, blocks)
    poison = 0x80 if case.encoding == "float8_e4m3fnuz" else 0xFF
    cache = guarded((blocks, size, RECORD), torch.uint8, gaps=(stride - size * RECORD, 0), fill=poison)
    codes = cache.as_strided((blocks, size, DATA_BYTES), (stride, DATA_BYTES, 1), int(cache.storage_offset()))
    scales = cache.as_strided((blocks, size, 8), (stride, 8, 1), int(cache.storage_offset()) + DATA_BYTES * size)
    scales.fill_(255)
    used = used.to(torch.int64).unique()
    count = (used.numel(), size)
    nan = _NAN_CODES[case.encoding]
    pool = [code for code in range(256) if code not in nan]
    low, high = (115, 131)
    if case.values == "extreme_scales":
        low, high = _EXACT_SCALES[case.encoding]
    elif case.values == "nan_codes":
        pool = [*pool[::8], *nan]
    elif case.values == "negative_zero":
        pool = [0x00, 0x01, 0x81, *([0x80] if case.encoding == "float8_e4m3fn" else [])]
    elif case.values == "randn":
        pool = [code for code in pool if 0x20 <= code & 0x7F < 0x7E]
    data = torch.empty((*count, DATA_BYTES), dtype=torch.uint8)
    data[..., :448] = drawn_codes(draw, "codes", (*count, 448), pool)
    if case.values == "all_codes":
        # Lane d of token t of a block is code d + t: every code under every lane position sooner or later.
        table = torch.tensor(pool, dtype=torch.uint8)
        data[..., :448] = table[(torch.arange(448) + 37 * torch.arange(size)[:, None]) % len(pool)]
    elif case.values == "lanes":
        data[..., :448] = (0x30 + torch.arange(448) % 64 % 37).to(torch.uint8)
    rope = draw.integers("rope", (*count, 64), 0, 0x10000 if case.values == "nan_codes" else 0x7F80)
    data[..., 448::2] = (rope & 0xFF).to(torch.uint8)
    data[..., 449::2] = (rope >> 8).to(torch.uint8)
    powers = draw.integers("scales", (*count, 8), low, high).to(torch.uint8)
    if case.values == "lanes":
        powers = (120 + torch.arange(8)).to(torch.uint8).expand(*count, 8).clone()
    powers[..., 7] = 255
    codes[used] = data
    scales[used] = powers
    return cache
