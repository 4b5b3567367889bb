"""What do we ask of sparse MLA prefill?

Plain rows of bf16 or fp16, each key and value at once, of any width; each query attends over a list of rows. See
`oracle.sparse_mla.prefill` for the formula and `cases.sparse_mla.prefill_call` for the call.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.sparse_mla.prefill_call import PrefillInputs

WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCase(Case):
    """The axes of sparse MLA prefill.

    nope_lanes, rope_lanes: lanes of a row in front and behind. length: entries of the longest list. rows: `full` all
    lists that long; `ragged` any length; `mixed` full, all entries invalid, short and empty, in turn. invalid: where
    skipped entries stand; `front` the first half. form: `ragged_offset` does not start at 0 and has entries behind its
    end, `dense` has lengths and entries behind them, `overlong` lengths beyond the width and below 0, `counted` no
    lengths. integers: `wide` are int64 of which the invalid ones are valid in their low 32 bits. layouts: `padded`
    leaves gaps after rows and heads, `heads_first` swaps the two strides, `spread` uses every other lane. out_lanes:
    `nope` for the first nope_lanes only. values: `plateau` has large scores that differ little. output: the dtype of
    the answer, `same` as the query's. garbage: what lies where nobody may read. reach: whose rows lie more than 2^31
    elements apart.
    """

    op: ClassVar[str] = "sparse_mla.prefill"

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    queries: int = 3
    heads: int = 16
    nope_lanes: int = 448
    rope_lanes: int = 64
    length: int = 65
    rows: Literal["full", "ragged", "mixed"] = "full"
    invalid: Literal["none", "front", "middle", "tail", "scattered"] = "none"
    duplicates: Literal["none", "within"] = "none"
    sink: Literal["absent", "minus_infinity", "zero", "moderate", "large", "longer"] = "moderate"
    form: Literal["ragged", "ragged_offset", "dense", "overlong", "counted"] = "dense"
    integers: Literal["int32", "int64", "wide"] = "int32"
    query_layout: Literal["contiguous", "padded", "heads_first", "spread"] = "contiguous"
    kv_layout: Literal["contiguous", "padded", "spread"] = "contiguous"
    out_layout: Literal["contiguous", "padded", "heads_first", "spread"] = "contiguous"
    out_lanes: Literal["full", "nope"] = "full"
    output: Literal["same", "float32"] = "same"
    values: Literal[
        "randn", "needle", "outlier", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "ties",
        "subnormal", "wide", "plateau", "zeros",
    ] = "randn"  # fmt: skip
    garbage: Literal["nan", "huge"] = "nan"
    reach: Literal["near", "far_query", "far_kv", "far_out"] = "near"


CASE = PrefillCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "dtype": ("bfloat16", "float16"),
    "queries": (1, 2, 3, 7),
    "heads": (1, 3, 16, 17, 40),
    "nope_lanes": (448, 512, 192, 96, 5),
    "rope_lanes": (64, 0, 128),
    "length": (0, 1, 16, 33, 64, 65, 127, 192),
    "rows": ("full", "ragged", "mixed"),
    "invalid": ("none", "front", "middle", "tail", "scattered"),
    "duplicates": ("none", "within"),
    "sink": ("absent", "minus_infinity", "zero", "moderate", "large", "longer"),
    "form": ("ragged", "ragged_offset", "dense", "overlong", "counted"),
    "integers": ("int32", "int64"),
    "query_layout": ("contiguous", "padded", "heads_first", "spread"),
    "kv_layout": ("contiguous", "padded", "spread"),
    "out_layout": ("contiguous", "padded", "heads_first", "spread"),
    "out_lanes": ("full", "nope"),
    "output": ("same", "float32"),
    "values": (
        "randn", "needle", "outlier", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "ties",
        "subnormal", "wide", "plateau", "zeros",
    ),
    "garbage": ("nan", "huge"),
    "reach": ("near",),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "queries": (1, 2, 3, 7, 17, 65),
    "heads": (1, 3, 16, 17, 40, 64, 128),
    "rope_lanes": (64, 0, 128, 3),
    "length": (0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 192, 512, 640),
}
RANDOM_CASES = 20

_BASE = PrefillCase()
_FAR = _BASE.varied(queries=3, heads=2, length=17, values="needle")
REGRESSIONS: tuple[str, ...] = (
    # A call without rows returns an empty answer.
    _BASE.varied(queries=0, form="ragged").id,
    _BASE.varied(queries=0, form="dense").id,
    # Widths that no list of instantiations has: one more or less than a round number must count to its last entry.
    *(_BASE.varied(queries=1, heads=2, length=n, values="needle", output="float32").id for n in (2, 63, 512, 2048, 2176)),
    _BASE.varied(queries=1, heads=2, length=2176, values="uniform_exact", sink="absent").id,
    # What a rank of eight asks, 512 chosen rows and a window of 128, in both types.
    _BASE.varied(queries=2, length=640, form="dense").id,
    _BASE.varied(queries=2, length=640, form="dense", dtype="float16", rows="ragged").id,
    # The first tiles hold no valid entry, and others follow.
    _BASE.varied(queries=1, length=192, invalid="front", form="ragged", sink="absent").id,
    # 257 copies of a key: their number is none of bf16's, so a denominator in bf16 moves every answer by a step.
    _BASE.varied(queries=1, length=257, values="repeated", sink="absent", output="float32").id,
    # A rounding that leans to one side shows over many rows.
    _BASE.varied(queries=2, heads=64, length=512, sink="absent").id,
    _BASE.varied(queries=2, heads=64, length=512, sink="absent", dtype="float16").id,
    # Rows 2^31 elements apart, which a product of 32 bits does not reach.
    _FAR.varied(reach="far_query").id,
    _FAR.varied(reach="far_kv").id,
    _FAR.varied(reach="far_out").id,
    # Entries whose low 32 bits are rows.
    _BASE.varied(integers="wide", invalid="scattered", form="ragged").id,
    _BASE.varied(integers="wide", invalid="scattered", form="dense").id,
)  # fmt: skip

PRODUCTION: tuple[Served, ...] = (
    *(
        Served(PrefillCase(queries=64, heads=heads, length=640, form="ragged"), {"kv": 1 << 20})
        for heads in (16, 64, 128)
    ),
    Served(PrefillCase(queries=64, heads=128, length=2176, form="ragged"), {"kv": 1 << 22}),
    Served(
        PrefillCase(queries=64, heads=16, length=2048, form="dense", nope_lanes=512, rope_lanes=64, out_lanes="nope")
    ),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "queries": (0, 4096), "heads": (1, 1024), "nope_lanes": (1, 1024), "rope_lanes": (0, 512), "length": (0, 1 << 17),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, PrefillCase)
    reasons = outside(case, _BOUNDS)
    if case.duplicates == "within" and case.length < 2:
        reasons.append("duplicates=within needs two entries")
    if case.invalid in ("front", "middle", "scattered") and case.length < 3:
        reasons.append(f"invalid={case.invalid} needs three entries")
    if case.integers == "wide" and case.invalid == "none" and case.rows != "mixed":
        reasons.append("integers=wide needs invalid entries")
    if case.reach in ("far_query", "far_out") and case.queries < 3:
        reasons.append(f"reach={case.reach} needs three queries")
    if case.reach == "far_query" and case.query_layout != "contiguous":
        reasons.append("reach=far_query has a query_layout of its own")
    if case.reach == "far_kv" and case.kv_layout != "contiguous":
        reasons.append("reach=far_kv has a kv_layout of its own")
    if case.reach == "far_out" and (case.out_layout != "contiguous" or case.output != "same"):
        reasons.append("reach=far_out has an out_layout of its own, of two-byte elements")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it: tiles of 16 heads, 16 keys and 512 lanes."""
    assert isinstance(case, PrefillCase)
    lanes = case.nope_lanes + case.rope_lanes
    return case.queries * -(-case.heads // 16) * -(-case.length // 16) * -(-lanes // 512) > 160


def build(case: Case) -> PrefillInputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, PrefillCase)
    draw = Draw(case.seed, case.op)
    dtype = torch.bfloat16 if case.dtype == "bfloat16" else torch.float16
    # Row 0 is nobody's: an invalid entry that a kernel redirects there must find garbage. A few rows stay unread.
    rows = case.length + case.length // 4 + 9
    lists = [_list(case, rows, t, draw) for t in range(case.queries)]
    query = _query(case, draw)
    kv = _kv(case, rows, lists, query, draw).clamp(-_LARGEST[case.dtype], _LARGEST[case.dtype])
    read = torch.zeros(rows, dtype=torch.bool)
    for entries in lists:
        read[entries[(entries >= 0) & (entries < rows)]] = True
    kv[~read] = math.nan if case.garbage == "nan" else _LARGEST[case.dtype]
    lanes = case.nope_lanes + case.rope_lanes
    width = lanes if case.out_lanes == "full" else case.nope_lanes
    shape = (case.queries, case.heads, width)
    out_dtype = torch.float32 if case.output == "float32" else dtype
    far = case.reach
    query_memory = _memory(query.shape, dtype, case.query_layout, far == "far_query")
    kv_memory = _memory((rows, 1, lanes), dtype, case.kv_layout, far == "far_kv")
    query_memory.copy_(query)
    kv_memory.copy_(kv[:, None])
    plain = PrefillInputs(
        query=query_memory,
        kv=kv_memory,
        scale=1 / math.sqrt(lanes),
        sink=_sink(case, draw),
        nope_lanes=case.nope_lanes,
        rope_lanes=case.rope_lanes,
        out=_memory(shape, out_dtype, case.out_layout, far == "far_out"),
    )
    integer = torch.int32 if case.integers == "int32" else torch.int64
    if case.form in ("ragged", "ragged_offset"):
        return _ragged(case, plain, lists, integer, draw)
    return _dense(case, plain, lists, integer, draw)


# Every finite value within them stays finite when it is rounded; `huge` is as large as that.
_LARGEST = {"bfloat16": 1e30, "float16": 60000.0}


def _memory(shape: Sequence[int], dtype: torch.dtype, layout: str, far: bool) -> torch.Tensor:
    """Guarded, poisoned memory of a shape in three dimensions."""
    first, second, lanes = shape
    if far:
        return guarded(shape, dtype, gaps=(far_gap(first, second * lanes), 0))
    if layout == "padded":
        return guarded(shape, dtype, gaps=(64, 8 if second > 1 else 0))
    if layout == "heads_first":
        return guarded((second, first, lanes), dtype, gaps=(8, 0)).transpose(0, 1)
    if layout == "spread":
        return guarded((first, second, 2 * lanes), dtype)[..., ::2]
    return guarded(shape, dtype)


def _list(case: PrefillCase, rows: int, t: int, draw: Draw) -> torch.Tensor:
    """The entries of query t, int64."""
    kind = ("full", "invalid", "short", "empty")[(t + case.seed) % 4] if case.rows == "mixed" else "full"
    length = case.length
    if case.rows == "ragged" and t > 0:
        length = int(draw.integers(f"length{t}", (1,), 0, case.length + 1))
    if kind in ("short", "empty"):
        length = min(length, 5 if kind == "short" else 0)
    if kind == "invalid":
        return _outside(case, rows, length)
    entries = draw.permutation(f"rows{t}", rows - 1)[:length] + 1
    if case.duplicates == "within" and length > 1:
        entries[length - length // 3 - 1 :] = entries[: length // 3 + 1].clone()
    if t == 0 and length:
        # The last row of all: what is read behind it is not the pool's.
        entries[length // 2] = rows - 1
    spots = _spots(case, length, t, draw)
    entries[spots] = _outside(case, rows, spots.numel())
    return _thinned(case, entries, rows, t, draw)


def _outside(case: PrefillCase, rows: int, count: int) -> torch.Tensor:
    """`count` entries that are no rows, by one, by much, and at both ends of the integers."""
    pool = [-1, -7, -(2**31), rows, rows + 1, 2**31 - 1]
    if case.integers == "wide":
        pool = [-1, 2**32 + 1, 2**33, -(2**32) + 2, 2**63 - rows]
    return torch.tensor([pool[i % len(pool)] for i in range(count)], dtype=torch.int64)


def _spots(case: PrefillCase, length: int, t: int, draw: Draw) -> torch.Tensor:
    """Where invalid entries stand."""
    if case.invalid == "none" or length < (1 if case.invalid == "tail" else 3):
        return torch.empty(0, dtype=torch.int64)
    count = max(1, length // 4)
    if case.invalid == "front":
        return torch.arange(length // 2)
    if case.invalid == "middle":
        return torch.arange(length // 3, length // 3 + count)
    if case.invalid == "tail":
        return torch.arange(length - count, length)
    return draw.permutation(f"holes{t}", length)[:count]


def _thinned(case: PrefillCase, entries: torch.Tensor, rows: int, t: int, draw: Draw) -> torch.Tensor:
    """For probes with an exact answer: one valid entry, copies of one row, or a power of two of entries."""
    valid = ((entries >= 0) & (entries < rows)).nonzero().flatten()
    if case.values not in ("single", "repeated", "uniform_exact", "onehot_exact") or not valid.numel():
        return entries
    if case.values == "repeated":
        entries[valid] = entries[valid[0]].clone()
        return entries
    keep = 1 if case.values == "single" else 1 << (valid.numel().bit_length() - 1)
    order = draw.permutation(f"keep{t}", valid.numel())
    entries[valid[order[keep:]]] = -1
    return entries


def _query(case: PrefillCase, draw: Draw) -> torch.Tensor:
    lanes = case.nope_lanes + case.rope_lanes
    shape = (case.queries, case.heads, lanes)
    if case.values in ("uniform_exact", "onehot_exact"):
        return torch.zeros(shape)
    if case.values == "integer_exact":
        return draw.integers("query", shape, -1, 2).float()
    query = draw.normal_like("query", shape)
    if case.values == "needle":
        # All heads of a query look the same way, so that one key can dominate them all.
        query = draw.normal_like("direction", (case.queries, 1, lanes)) + 0.25 * query
    if case.values == "outlier":
        query[..., lanes // 3] *= 2.0**-4
    if case.values == "plateau":
        query = draw.normal_like("direction", (1, 1, lanes)) * 4 + 0.25 * query
    return query * 8.0 if case.values == "wide" else query


def _kv(case: PrefillCase, rows: int, lists: list[torch.Tensor], query: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The rows [rows, lanes] in fp32, before they are rounded to the case's dtype."""
    lanes = case.nope_lanes + case.rope_lanes
    shape = (rows, lanes)
    kv = draw.normal_like("kv", shape)
    if case.values == "integer_exact":
        return draw.integers("small", shape, -8, 9).float()
    if case.values == "uniform_exact":
        # Eight significant bits on one grid: sums are exact, means have more bits than any output format.
        return draw.integers("small", shape, -255, 256).float() / 32
    if case.values == "onehot_exact":
        number = torch.arange(rows)[:, None]
        return (number % lanes == torch.arange(lanes)).float() + ((number >> (torch.arange(lanes) % 12)) & 1).float()
    if case.values == "zeros":
        return -torch.zeros(shape)
    if case.values == "outlier":
        kv[:, lanes // 3] *= 64.0
    elif case.values == "single":
        kv = torch.ldexp(kv, draw.integers("power", shape, -9, 10))
    elif case.values == "ties":
        kv = kv[torch.arange(rows) % 4]
    elif case.values == "subnormal":
        kv *= 2.0**-126 if case.dtype == "bfloat16" else 2.0**-18
    elif case.values == "wide":
        kv *= torch.ldexp(torch.ones(rows, 1), draw.integers("loud", (rows, 1), 0, 9))
    elif case.values == "plateau":
        kv = kv + draw.normal_like("direction", (1, 1, lanes))[0]
    elif case.values == "needle":
        _plant_needles(kv, lists, query)
    return kv


def _plant_needles(kv: torch.Tensor, lists: list[torch.Tensor], query: torch.Tensor) -> None:
    """One dominating row a query: the last, first or middle entry of its list in turn, never shared by two queries."""
    taken: set[int] = set()
    for t, entries in enumerate(lists):
        valid = entries[(entries >= 0) & (entries < kv.shape[0])].tolist()
        spots = [valid[i] for i in (len(valid) - 1, 0, len(valid) // 2)] if valid else []
        free = [row for row in spots if row not in taken]
        if free:
            row = free[t % len(free)]
            taken.add(row)
            kv[row] = query[t, 0] * 1.5


def _sink(case: PrefillCase, draw: Draw) -> torch.Tensor | None:
    heads = case.heads
    if case.sink == "absent":
        return None
    if case.sink == "minus_infinity":
        sink = torch.full((heads,), -math.inf)
    elif case.sink == "zero":
        sink = torch.zeros(heads)
    elif case.sink == "large":
        sink = 20.0 - 40.0 * (torch.arange(heads) % 2)
    else:
        sink = draw.normal_like("sink", (heads,))
    if case.sink == "longer":
        # Heads of other ranks follow; they would swamp everything.
        sink = torch.cat([sink, torch.full((3,), 1e4)])
    return guarded_copy(sink.float())


def _ragged(
    case: PrefillCase, plain: PrefillInputs, lists: list[torch.Tensor], integer: torch.dtype, draw: Draw
) -> PrefillInputs:
    start = 5 if case.form == "ragged_offset" else 0
    # What stands before indptr[0] and after indptr[-1] looks like rows, and nobody may read it.
    decoys = draw.integers("decoys", (start + 11,), 0, plain.rows)
    tail = decoys[start:] if start else decoys[:0]
    indices = torch.cat([decoys[:start], *lists, tail])
    counts = torch.tensor([start, *(len(entries) for entries in lists)])
    return dataclasses.replace(
        plain, indices=guarded_copy(indices.to(integer)), indptr=guarded_copy(counts.cumsum(0).to(integer))
    )


def _dense(
    case: PrefillCase, plain: PrefillInputs, lists: list[torch.Tensor], integer: torch.dtype, draw: Draw
) -> PrefillInputs:
    longest = max((len(entries) for entries in lists), default=0)
    width = longest + (3 if case.form == "dense" else 0)
    # With lengths, what stands beyond a row's length looks like rows; without, -1 ends the row.
    if case.form == "counted":
        dense = torch.full((len(lists), width), -1, dtype=torch.int64)
    else:
        dense = draw.integers("decoys", (len(lists), width), 0, plain.rows)
    for t, entries in enumerate(lists):
        dense[t, : len(entries)] = entries
    lengths = torch.tensor([len(entries) for entries in lists], dtype=torch.int32)
    if case.form == "overlong":
        lengths = torch.where(lengths == width, width + 7, torch.where(lengths == 0, -3, lengths)).to(torch.int32)
    return dataclasses.replace(
        plain, dense=guarded_copy(dense.to(integer), gaps=(4,)),
        lengths=None if case.form == "counted" else guarded_copy(lengths),
    )  # fmt: skip
