"""What do we ask of the step that merges partial attention results as the maps of a plan say?

A row of partial results is the attention over some of a query row's keys, with the logarithm of what its weights sum to.
See `oracle.dense_mla.reduce_by_maps` for the merge.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Partial results, the maps, and the rows that they end in.

    partial_out, partial_lse: scratch rows, contiguous; the log-sum-exp is natural, and an infinity or NaN where a part has
    no key for the row. group_start: first entry in `parts` of every group. groups: first query row of every group and the
    one behind the last, whatever a group of one part or none has there; None when they follow from the parts, see the
    oracle. parts: first scratch row of every part. out, lse: what the kernels in front have left, which stays but for the
    rows of groups of two parts and more.
    """

    partial_out: Float32[torch.Tensor, "scratch heads lanes"]
    partial_lse: Float32[torch.Tensor, "scratch heads"]
    group_start: Int32[torch.Tensor, " starts"]
    groups: Int32[torch.Tensor, "groups 2"] | None
    parts: Int32[torch.Tensor, " parts"]
    out: Float[torch.Tensor, "rows heads lanes"]
    lse: Float32[torch.Tensor, "rows heads"] | None


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The memory of `out`, and of `lse` where there is one."""

    out: Float[torch.Tensor, "rows heads lanes"]
    lse: Float32[torch.Tensor, "rows heads"] | None


WRITABLE: tuple[str, ...] = ("out", "lse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceCase(Case):
    """The axes of the merge.

    split: parts of a group, `mixed` from none to nine, `few` one, none and two in turn, `many` more than a wave has lanes in
    the first group, `most` more than 256. rows: of a group at most; `ragged` groups have fewer. mapped: whether the rows of
    groups are given. unsplit: what a map has for groups of one part or none, whose entries no planner writes: `garbage` of
    fresh memory, or the `rows` of their tile, as an earlier step left them. scratch: `dense` one part behind the other,
    `scattered` in any order with unused rows between. holes: rows of parts without a key, by what their log-sum-exp is,
    `rows` all parts of some rows. layout: `heads` has a gap behind each head, `strided` behind each row too.
    reach: `far` places output rows so far apart that offsets pass 2^31. values: `dominating` one part of each row has all
    the weight, `equal` parts weigh alike, `wide` log-sum-exps from very small to very large, `lanes` numbers that name part,
    row and lane.
    """

    op: ClassVar[str] = "dense_mla.reduce_by_maps"

    heads: int = 4
    lanes: int = 64
    groups: int = 3
    split: Literal["two", "three", "four", "mixed", "few", "many", "most"] = "mixed"
    rows: int = 3
    ragged: bool = True
    mapped: bool = True
    unsplit: Literal["garbage", "rows"] = "rows"
    scratch: Literal["dense", "scattered"] = "scattered"
    holes: Literal["none", "minus_infinity", "plus_infinity", "nan", "rows"] = "none"
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    with_lse: bool = True
    layout: Literal["contiguous", "heads", "strided"] = "contiguous"
    reach: Literal["near", "far"] = "near"
    values: Literal["randn", "dominating", "equal", "wide", "lanes"] = "randn"


CASE = ReduceCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "heads": (1, 3, 8, 16),
    "lanes": (16, 64, 128, 512),
    "groups": (0, 1, 3, 7),
    "split": ("two", "three", "four", "mixed", "few", "many"),
    "rows": (1, 3, 5),
    "ragged": (False, True),
    "mapped": (False, True),
    "unsplit": ("garbage", "rows"),
    "scratch": ("dense", "scattered"),
    "holes": ("none", "minus_infinity", "plus_infinity", "nan", "rows"),
    "dtype": ("bfloat16", "float16"),
    "with_lse": (False, True),
    "layout": ("contiguous", "heads", "strided"),
    "reach": ("near",),
    "values": ("randn", "dominating", "equal", "wide", "lanes"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"heads": (1, 3, 8, 16, 80, 128), "rows": (1, 3, 5, 256)}
RANDOM_CASES = 24

_BASE = ReduceCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    # A part without a key for some rows, as a causal tile has them, whose log-sum-exp is NaN.
    _BASE.varied(holes="nan", split="three").id,
    _BASE.varied(holes="minus_infinity", split="four").id,
    _BASE.varied(holes="plus_infinity", split="three").id,
    _BASE.varied(holes="rows").id,
    # Tiles of one part and of none, whose rows are there already: some beside a split one, and nothing but them.
    *(
        _BASE.varied(split="few", lanes=lanes, heads=heads).id
        for lanes, heads in ((16, 1), (64, 3), (128, 8), (512, 16))
    ),
    _BASE.varied(split="few", groups=2, lanes=128, heads=8).id,
    # More parts than a wave has lanes, and than fit four waves.
    _BASE.varied(split="many", groups=1, rows=1, heads=1).id,
    *(
        _BASE.varied(split="most", groups=1, rows=1, heads=1, lanes=16, values=values).id
        for values in ("randn", "equal")
    ),
    # Rows that follow from the parts.
    _BASE.varied(mapped=False, ragged=False, split="four", scratch="dense").id,
    # Heads of a padded prefill that no compiled reduction knows.
    _BASE.varied(heads=80, lanes=128, groups=1, rows=1, split="two").id,
    _BASE.varied(groups=2, rows=2, ragged=False, mapped=False, split="two", scratch="dense", reach="far").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(heads=16, lanes=512, groups=8, rows=4)),
    Served(CASE(heads=128, lanes=512, groups=8, rows=2)),
    Served(CASE(heads=16, lanes=128, groups=8, rows=16, with_lse=False)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"heads": (1, 1024), "lanes": (1, 1024), "groups": (0, 1024), "rows": (1, 256)}


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, ReduceCase)
    reasons = outside(case, _BOUNDS)
    if not case.mapped:
        if case.ragged:
            reasons.append("ragged=yes: without a map all groups have equally many rows")
        if case.split in ("mixed", "few"):
            reasons.append(f"split={case.split}: without a map every group needs two parts")
        if case.unsplit == "garbage":
            reasons.append("unsplit=garbage: needs a map")
        if case.scratch == "scattered":
            reasons.append("scratch=scattered: without a map, rows follow from parts that stand behind one another")
    if case.reach == "far":
        if case.groups * case.rows < 3 or case.ragged:
            reasons.append("reach=far: needs three rows")
        if case.layout != "contiguous":
            reasons.append("reach=far: needs rows that are contiguous in themselves")
    return reasons


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, ReduceCase)
    return case.groups * case.rows * case.heads > 400


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, ReduceCase)
    draw = Draw(case.seed, case.op)
    counts = _counts(case, draw)
    rows = [case.rows] * case.groups
    if case.ragged:
        rows = draw.integers("rows", (case.groups,), 1, case.rows + 1).tolist()
    # Parts take as many scratch rows as the longest group has, as the tiles of a plan do.
    total = sum(counts)
    step = case.rows + (2 if case.scratch == "scattered" else 0)
    place = draw.permutation("place", total) if case.scratch == "scattered" else torch.arange(total)
    bases = place * step
    scratch = max(1, total * step) + 3
    partial_out = guarded((scratch, case.heads, case.lanes), torch.float32)
    partial_lse = guarded((scratch, case.heads), torch.float32)
    part = 0
    for group, count in enumerate(counts):
        bounds = slice(part, part + count)
        values, lse = _values(case, draw.within(f"group {group}"), count, rows[group])
        for base, own, own_lse in zip(bases[bounds].tolist(), values, lse, strict=True):
            partial_out[base : base + rows[group]] = own
            partial_lse[base : base + rows[group]] = own_lse
        part += count
    # Query rows between groups belong to tiles that were not split.
    between = draw.integers("between", (case.groups + 1,), 0, 3) * int(case.mapped)
    starts = [int(between[: group + 1].sum()) + sum(rows[:group]) for group in range(case.groups)]
    height = sum(rows) + int(between.sum())
    groups = None
    if case.mapped:
        spans = torch.tensor([[start, start + own] for start, own in zip(starts, rows, strict=True)]).reshape(-1, 2)
        if case.unsplit == "garbage":
            spans[torch.tensor(counts, dtype=torch.int64).reshape(-1) < 2] = 0x7B7B7B7B
        groups = guarded_copy(spans.to(torch.int32))
    dtype = torch.bfloat16 if case.dtype == "bfloat16" else torch.float16
    width = case.heads * case.lanes
    gaps = {"contiguous": (0, 0), "heads": (0, 24), "strided": (40, 8)}[case.layout]
    if case.reach == "far":
        gaps = (far_gap(height, width), 0)
    parts = torch.cat((bases, torch.tensor([0x7B7B7B7B, -1])))
    return Inputs(
        partial_out=partial_out, partial_lse=partial_lse,
        group_start=guarded_copy(torch.tensor([0, *counts]).cumsum(0).to(torch.int32)), groups=groups,
        parts=guarded_copy(parts.to(torch.int32)), out=guarded((height, case.heads, case.lanes), dtype, gaps=gaps),
        lse=guarded((height, case.heads), torch.float32) if case.with_lse else None,
    )  # fmt: skip


def _counts(case: ReduceCase, draw: Draw) -> list[int]:
    if case.split == "mixed":
        return [int(count) for count in draw.integers("counts", (case.groups,), 0, 10)]
    if case.split == "few":
        return [(1, 0, 2)[group % 3] for group in range(case.groups)]
    fixed = {"two": 2, "three": 3, "four": 4, "many": 5, "most": 2}[case.split]
    counts = [fixed] * case.groups
    if case.split in ("many", "most") and counts:
        counts[0] = 70 if case.split == "many" else 300
    return counts


def _values(case: ReduceCase, draw: Draw, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results [parts, rows, heads, lanes] and their log-sum-exps [parts, rows, heads]."""
    shape = (count, rows, case.heads)
    lse = draw.normal_like("lse", shape)
    values = draw.normal_like("out", (*shape, case.lanes))
    if case.values == "dominating":
        winner = draw.integers("winner", shape[1:], 0, max(1, count))
        lse = torch.where(torch.arange(count)[:, None, None] == winner, 150.0, lse)
    elif case.values == "equal":
        # All lie on multiples of 1/4, so that sums of few are exact.
        lse = torch.full(shape, 3.0)
        values = draw.integers("out", (*shape, case.lanes), -16, 17) / 4
    elif case.values == "wide":
        lse = lse * 40 + torch.where(draw.chance("low", shape[1:], 1, 2), -300.0, 300.0)
    elif case.values == "lanes":
        row = torch.arange(rows)[:, None, None]
        lane = torch.arange(case.lanes)
        values = (torch.arange(count)[:, None, None, None] % 8 * 16 + row % 4 * 4 + lane % 4).expand(values.shape) * 1.0
    if case.holes in ("minus_infinity", "plus_infinity", "nan") and count:
        # In front, as of a causal tile: the last part may see nothing of the first rows.
        hole = draw.chance("hole", shape, 1, 3)
        hole[draw.integers("kept", (1,), 0, count)] = False
        empty = {"nan": float("nan"), "plus_infinity": float("inf")}.get(case.holes, -float("inf"))
        lse = torch.where(hole, empty, lse)
        values = torch.where(hole[..., None], float("nan"), values)
    elif case.holes == "rows":
        hole = draw.chance("hole", shape[1:], 1, 2).expand(shape)
        lse = torch.where(hole, -float("inf"), lse)
        values = torch.where(hole[..., None], float("nan"), values)
    return values, lse
