"""What do we ask of a decode over segments: rows of their own lengths over a latent cache in small pages?

Each row is one query token, as a verify block under decode context parallelism lays them out. See
`oracle.dense_mla.segmented_decode` for the formula.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int32, Shaped

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy, with_one_nan
from cases.production import Served

WRITABLE: tuple[str, ...] = ("out",)

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}  # fmt: skip
CODES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call. A row of the cache is key in all its lanes and value in the first `rank` of them.

    query: bfloat16, or 8-bit codes like the cache's; strides of rows and heads are free. cache: [pages, tile, 1, lanes],
    bfloat16 or codes, page stride free; tile is a power of two up to 128. lengths: keys of each row, none below 1. table: the
    pages of each row, key x in page x // tile; row stride free, and what stands behind a row's last page is nobody's. The
    cache may hold anything where no row's keys are. query_scale, cache_scale: what codes count; for a query in bfloat16
    None, for a cache in bfloat16 1. max_length: no row is longer. compute_units: those of the machine, for who chooses
    how many segments there are. out: [rows, heads, rank], bfloat16 or float16.
    """

    query: Shaped[torch.Tensor, "rows heads lanes"]
    cache: Shaped[torch.Tensor, "pages tile 1 lanes"]
    lengths: Int32[torch.Tensor, " rows"]
    table: Int32[torch.Tensor, "rows width"]
    max_length: int
    scale: float
    query_scale: Float32[torch.Tensor, ""] | None
    cache_scale: Float32[torch.Tensor, ""]
    rank: int
    compute_units: int
    out: Float[torch.Tensor, "rows heads rank"]

    @property
    def tile(self) -> int:
        """Tokens of a page."""
        return self.cache.shape[1]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The answer, its natural log-sum-exp, and what was left of each segment where the implementation shows it: see
    `cases.dense_mla.merge_segments`."""

    out: Float[torch.Tensor, "rows heads rank"]
    lse: Float32[torch.Tensor, "rows heads"]
    sums: Float32[torch.Tensor, "rows heads segments rank"] | None = None
    maxima: Float32[torch.Tensor, "rows heads segments"] | None = None
    masses: Float32[torch.Tensor, "rows heads segments"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentedCase(Case):
    """The axes of a decode over segments.

    length: keys of the longest row. lengths: `verify` rows of one block, each one key longer; `mixed` full, empty, one key,
    one page, in turn; `random`. cache, query: what they are stored as. cache_scale, query_scale: of codes. slack: what lies
    behind the last key of a row's last page; `loud` keys would outweigh all others. pages: `shared` lets all rows begin with
    the same pages. values: `last` makes the last key of the longest row dominate, `needle` another one.
    """

    op: ClassVar[str] = "dense_mla.segmented_decode"

    rows: int = 3
    heads: int = 3
    rank: int = 64
    rope: int = 16
    tile: int = 16
    length: int = 37
    lengths: Literal["full", "verify", "mixed", "random"] = "verify"
    cache: Literal["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"] = "bfloat16"
    query: Literal["bfloat16", "codes"] = "bfloat16"
    cache_scale: Literal["one", "half", "odd", "large"] = "one"
    query_scale: Literal["one", "odd", "large"] = "one"
    pages: Literal["own", "shared"] = "own"
    slack: Literal["nan", "loud", "zero"] = "nan"
    values: Literal["randn", "needle", "last", "uniform_exact", "onehot_exact", "wide"] = "randn"
    output: Literal["bfloat16", "float16"] = "bfloat16"
    layout: Literal["contiguous", "padded"] = "contiguous"
    units: Literal["few", "many"] = "many"
    reach: Literal["near", "far_cache"] = "near"


CASE = SegmentedCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "rows": (1, 3, 4),
    "heads": (1, 3, 16, 17),
    "rank": (64, 32, 512),
    "rope": (16, 64),
    "tile": (16, 1, 64, 128),
    "length": (0, 1, 16, 37, 64, 128, 300),
    "lengths": ("full", "verify", "mixed", "random"),
    "cache": ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    "query": ("bfloat16", "codes"),
    "cache_scale": ("one", "half", "odd", "large"),
    "query_scale": ("one", "odd", "large"),
    "pages": ("own", "shared"),
    "slack": ("nan", "loud", "zero"),
    "values": ("randn", "needle", "last", "uniform_exact", "onehot_exact", "wide"),
    "output": ("bfloat16", "float16"),
    "layout": ("contiguous", "padded"),
    "units": ("few", "many"),
    "reach": ("near",),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "rows": (1, 3, 4, 8, 16),
    "heads": (1, 3, 16, 17, 24, 96),
    "length": (0, 1, 15, 16, 17, 37, 64, 127, 128, 129, 300, 700),
}
RANDOM_CASES = 8

_BASE = SegmentedCase()
REGRESSIONS: tuple[str, ...] = (
    # Lengths about what a tile and all segments of single tiles hold.
    *(_BASE.varied(length=n, values="last", lengths="full", slack="loud").id for n in (15, 17, 127, 128, 129, 257)),
    # Rows of more than 1024 keys.
    _BASE.varied(rows=1, heads=1, tile=128, length=1100, lengths="full", values="last", slack="loud").id,
    _BASE.varied(rows=2, heads=2, rank=32, length=1057, values="needle").id,
    # A verify block whose first rows see no key at all on this rank.
    _BASE.varied(rows=4, length=2, lengths="verify").id,
    _BASE.varied(length=0, lengths="full").id,
    # The later tokens of a verify block lie in the slack of the earlier ones.
    _BASE.varied(rows=8, length=40, pages="shared", slack="loud", values="last").id,
    # Codes whose scale is no power of two: the query is rounded to bf16 behind its scale, the keys are not.
    _BASE.varied(cache="float8_e4m3fn", query="codes", cache_scale="odd", query_scale="odd", values="wide").id,
    # What a rank of eight decodes, a few rows of it.
    _BASE.varied(rows=2, heads=16, rank=512, rope=64, tile=128, length=300, values="needle").id,
    # A rounding that leans to one side shows over many rows.
    _BASE.varied(
        rows=8, heads=32, rank=512, rope=64, tile=128, length=256, lengths="full", output="float16", slack="zero"
    ).id,
    _BASE.varied(rows=8, heads=16, length=16, lengths="full", output="float16").id,
    # Pages more than 2^31 bytes apart.
    _BASE.varied(cache="float8_e4m3fn", reach="far_cache", values="needle").id,
)

_SERVED = SegmentedCase(rows=32, rank=512, rope=64, length=256, lengths="full")
PRODUCTION: tuple[Served, ...] = (
    *(
        Served(_SERVED.varied(heads=heads, tile=tile), {"cache": 1 << 16}, {"max_length": 32768})
        for heads, tile in ((16, 16), (16, 64), (128, 16), (128, 64), (64, 64))
    ),
    *(
        Served(
            _SERVED.varied(heads=heads, tile=64, cache=code, query=query), {"cache": 1 << 16}, {"max_length": 32768},
        )
        for heads in (16, 128)
        for code in ("float8_e4m3fn", "float8_e4m3fnuz")
        for query in ("bfloat16", "codes")
    ),
)  # fmt: skip


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "rows": (1, 4096), "heads": (1, 128), "rank": (16, 1024), "rope": (16, 256), "length": (0, 1 << 17),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, SegmentedCase)
    reasons = outside(case, _BOUNDS)
    for axis, size in (("rank", case.rank), ("rope", case.rope), ("tile", case.tile)):
        if size not in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            reasons.append(f"{axis}={size}: should be a power of two")
    if case.tile > 128:
        reasons.append(f"tile={case.tile}: should be at most 128")
    if case.cache == "bfloat16" and (case.query == "codes" or case.cache_scale != "one"):
        reasons.append("cache=bfloat16 has a query in bfloat16 and no scale")
    if case.query == "bfloat16" and case.query_scale != "one":
        reasons.append(f"query_scale={case.query_scale} needs a query of codes")
    if case.length < 2 and case.values in ("needle", "onehot_exact"):
        reasons.append(f"values={case.values} needs two keys")
    if case.reach == "far_cache" and case.layout != "contiguous":
        reasons.append("reach=far_cache has a layout of its own")
    if case.reach == "far_cache" and (case.length < 33 or case.tile > 16 or case.cache == "bfloat16"):
        reasons.append("reach=far_cache needs three pages of codes")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it."""
    assert isinstance(case, SegmentedCase)
    tiles = -(-case.length // case.tile) * -(-case.tile // 16)
    return case.rows * -(-case.heads // 16) * tiles * -(-case.rank // 256) > 300


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, SegmentedCase)
    draw = Draw(case.seed, case.op)
    lanes = case.rank + case.rope
    lengths = [_length(case, row, draw) for row in range(case.rows)]
    width = -(-case.length // case.tile) + 2
    table, pages = _table(case, lengths, width, draw)
    direction = draw.normal_like("direction", (lanes,))
    slots = _slots(case, table, lengths, pages, direction, draw)
    cache_scale = 1.0 if case.cache == "bfloat16" else _SCALES[case.cache_scale]
    query_scale = _SCALES[case.query_scale]
    query = _query(case, direction, draw)
    codes = DTYPES[case.cache]
    query_dtype = codes if case.query == "codes" else torch.bfloat16
    gaps = (32, 16) if case.layout == "padded" else ()
    query_memory = guarded((case.rows, case.heads, lanes), query_dtype, gaps=gaps)
    query_memory.copy_(_stored(query / query_scale if case.query == "codes" else query, query_dtype))
    far = case.reach == "far_cache"
    page_gap = far_gap(pages, case.tile * lanes) if far else 64 if case.layout == "padded" else 0
    cache = guarded((pages, case.tile, 1, lanes), codes, gaps=(page_gap, 0, 0))
    cache.copy_(_stored(slots / cache_scale, codes).view(cache.shape))
    table_memory = guarded((case.rows, width), torch.int32, gaps=(3 if case.layout == "padded" else 0,))
    table_memory.copy_(table)
    out_gaps = (64, 8) if case.layout == "padded" else ()
    return Inputs(
        query=query_memory,
        cache=cache,
        lengths=guarded_copy(torch.tensor(lengths, dtype=torch.int32)),
        table=table_memory,
        max_length=max(1, case.length),
        scale=192**-0.5 if case.rank == 512 else 0.25,
        query_scale=guarded_copy(torch.tensor([query_scale]))[0] if case.query == "codes" else None,
        cache_scale=guarded_copy(torch.tensor([cache_scale]))[0],
        rank=case.rank,
        compute_units=4 if case.units == "few" else 256,
        out=guarded((case.rows, case.heads, case.rank), DTYPES[case.output], gaps=out_gaps),
    )


_SCALES = {"one": 1.0, "half": 0.5, "odd": 0.02, "large": 3.7}


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 numbers in a dtype; codes saturate, NaN stays."""
    if dtype in CODES:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    stored = values.to(dtype)
    return stored if dtype in CODES else with_one_nan(stored)


def _length(case: SegmentedCase, row: int, draw: Draw) -> int:
    """Keys of a row."""
    if case.lengths == "verify":
        return max(0, case.length - (case.rows - 1 - row))
    if case.lengths == "mixed":
        return min(case.length, (case.length, 0, 1, case.tile)[(row + case.seed) % 4])
    if case.lengths == "random" and row:
        return int(draw.integers(f"length{row}", (1,), 0, case.length + 1))
    return case.length


def _table(case: SegmentedCase, lengths: list[int], width: int, draw: Draw) -> tuple[torch.Tensor, int]:
    """The pages of each row [rows, width], with what is no page behind them, and how many pages there are."""
    used = [-(-length // case.tile) for length in lengths]
    count = max(used) if case.pages == "shared" else sum(used)
    # Page 0 is nobody's, and so are a few others.
    pages = max(3, count + 3)
    order = draw.permutation("pages", pages - 1) + 1
    strange = torch.tensor([-1, 2**31 - 1, -(2**31), pages, 0])
    table = strange[torch.arange(case.rows * width) % 5].view(case.rows, width).to(torch.int32)
    first = 0
    for row, number in enumerate(used):
        table[row, :number] = order[first : first + number]
        first += 0 if case.pages == "shared" else number
    return table, pages


def _slots(
    case: SegmentedCase, table: torch.Tensor, lengths: list[int], pages: int, direction: torch.Tensor, draw: Draw
) -> torch.Tensor:  # fmt: skip
    """What the slots count for, fp32 [pages * tile, lanes]: keys where rows have them, garbage elsewhere."""
    lanes = case.rank + case.rope
    shape = (pages * case.tile, lanes)
    keys = draw.normal_like("keys", shape)
    if case.values == "uniform_exact":
        keys = draw.integers("small", shape, -8, 9).float() * (
            _SCALES[case.cache_scale] if case.cache != "bfloat16" else 1
        )
    if case.values == "onehot_exact":
        keys = (torch.arange(shape[0])[:, None] % lanes == torch.arange(lanes)).float()
        keys = keys * (_SCALES[case.cache_scale] if case.cache != "bfloat16" else 1)
    read = torch.zeros(shape[0], dtype=torch.bool)
    beside = torch.zeros(shape[0], dtype=torch.bool)
    longest = max(range(len(lengths)), key=lambda row: lengths[row])
    for row, length in enumerate(lengths):
        place = torch.arange(-(-length // case.tile) * case.tile)
        slot = table[row, place // case.tile].long() * case.tile + place % case.tile
        read[slot[:length]] = True
        beside[slot[length:]] = True
        if row == longest and length and case.values in ("needle", "last"):
            chosen = slot[length - 1 if case.values == "last" else length // 3]
            keys[chosen] = 2 * direction
    keys[~read] = math.nan
    filling = {"nan": torch.tensor(math.nan), "loud": 3 * direction, "zero": torch.tensor(0.0)}[case.slack]
    keys[beside & ~read] = filling
    return keys


def _query(case: SegmentedCase, direction: torch.Tensor, draw: Draw) -> torch.Tensor:
    shape = (case.rows, case.heads, direction.numel())
    query = draw.normal_like("query", shape)
    if case.values in ("uniform_exact", "onehot_exact"):
        return torch.zeros(shape)
    if case.values in ("needle", "last"):
        return 0.5 * direction + 0.25 * query
    return query * 4 if case.values == "wide" else query
