"""What do we ask of the plan that spreads the keys of a decode batch over the workers of a persistent kernel?

The plan's buffers are reserved once, for the largest batch, and filled for every step. See `oracle.dense_mla.decode_plan`
for what they must hold.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded_copy

Arch = Literal["gfx942", "gfx950"]
Format = Literal["bfloat16", "float8"]
Mask = Literal["causal", "none", "round_robin"]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A decode batch, the kernel that will serve it, and the largest batch that buffers are reserved for.

    query_start, key_start: the first query row of every request and the first place of its keys in the list of slots; one
    more at the end. heads: of the kernel. queries: rows of a request at most; told: that all requests have so many, as the
    caller says. mask: `round_robin` where each rank holds every so many-th key and the kernel masks by global positions.
    split_cap: None without one. granularity: keys per block, the unit in which keys are dealt out. capacity_requests,
    capacity_queries: what the buffers are reserved for.
    """

    query_start: Int32[torch.Tensor, " starts"]
    key_start: Int32[torch.Tensor, " starts"]
    heads: int
    arch: Arch
    query_format: Format
    cache_format: Format
    queries: int
    told: bool
    mask: Mask
    split_cap: int | None
    granularity: int
    compute_units: int
    capacity_requests: int
    capacity_queries: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The buffers of a plan, as long as they were reserved; what lies behind their used part means nothing.

    work_start: first work of every worker. works: request, scratch row or -1, first query row, the one behind the last,
    first key, the one behind the last, keys of the request behind that, nothing. group_start: first entry in `parts` of
    every group of partial results; groups: the query rows that a group ends in; parts: scratch rows.
    """

    work_start: Int32[torch.Tensor, " workers"]
    works: Int32[torch.Tensor, "works 8"]
    group_start: Int32[torch.Tensor, " groups_and_one"]
    groups: Int32[torch.Tensor, "groups 2"]
    parts: Int32[torch.Tensor, " parts"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCase(Case):
    """The axes of the plan.

    formats: of queries and cache, `mixed` a bfloat16 query over a float8 cache. rows: `uniform` requests of equally many
    query rows, of which the planner is told; `untold` the same, and it is not; `ragged` from none to the most. split_cap: 0
    without one. lengths: keys per request, `short` hardly more than query rows, `equal`, `ragged`, `skewed` one long
    request among short ones, `edges` next to multiples of a block, `gaps` some requests without keys, `empty` all without.
    """

    op: ClassVar[str] = "dense_mla.decode_plan"

    heads: int = 16
    arch: Literal["gfx942", "gfx950"] = "gfx950"
    formats: Literal["bfloat16", "float8", "mixed"] = "float8"
    requests: int = 5
    queries: int = 1
    rows: Literal["uniform", "untold", "ragged"] = "uniform"
    mask: Literal["causal", "none", "round_robin"] = "causal"
    lengths: Literal["short", "equal", "ragged", "skewed", "edges", "gaps", "empty"] = "ragged"
    split_cap: int = 0
    granularity: int = 16
    compute_units: int = 80
    spare_requests: int = 0
    spare_queries: int = 0


CASE = PlanCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "heads": (16, 24, 32, 48, 64, 96, 128),
    "arch": ("gfx942", "gfx950"),
    "formats": ("bfloat16", "float8", "mixed"),
    "requests": (0, 1, 2, 5, 9),
    "queries": (1, 2, 3, 4, 5, 8, 9),
    "rows": ("uniform", "untold", "ragged"),
    "mask": ("causal", "none", "round_robin"),
    "lengths": ("short", "equal", "ragged", "skewed", "edges", "gaps", "empty"),
    "split_cap": (0, 1, 4, 80),
    "granularity": (16, 32),
    "compute_units": (1, 4, 80, 256),
    "spare_requests": (0, 3),
    "spare_queries": (0, 1, 3),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 5, 9, 64, 200),
    "queries": (1, 2, 3, 4, 5, 6, 7, 8, 9, 16),
}
RANDOM_CASES = 30

_BASE = PlanCase()
REGRESSIONS: tuple[str, ...] = (
    # Ragged rows in several tiles each, where the cost of a request depends on its own rows.
    _BASE.varied(heads=128, queries=4, rows="ragged", compute_units=4).id,
    _BASE.varied(heads=64, queries=5, rows="untold", formats="bfloat16").id,
    # Folded heads whose rows nobody told, and folded heads in more than one tile.
    _BASE.varied(heads=48, queries=2, rows="untold").id,
    _BASE.varied(heads=32, arch="gfx942", queries=9, lengths="short").id,
    _BASE.varied(heads=32, arch="gfx942", queries=16, lengths="short", compute_units=4).id,
    # Tiles of several rows, of which the last request's tile holds fewer.
    _BASE.varied(heads=32, queries=5, lengths="short").id,
    _BASE.varied(heads=32, queries=9, compute_units=256, lengths="skewed").id,
    # Requests without keys between others, where the parallel planner leaves some without work.
    _BASE.varied(requests=9, lengths="gaps", compute_units=4).id,
    _BASE.varied(requests=9, lengths="gaps", compute_units=80).id,
    # Buffers for more tokens than the step has.
    _BASE.varied(heads=16, queries=3, spare_queries=5, spare_requests=3).id,
    # The cap as a budget of the whole batch.
    _BASE.varied(requests=4, split_cap=4, lengths="skewed", compute_units=256).id,
    _BASE.varied(requests=9, split_cap=4, lengths="equal", compute_units=4).id,
)  # fmt: skip

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "heads": (16, 128), "requests": (0, 4096), "queries": (1, 16), "split_cap": (0, 1024), "granularity": (1, 1024),
    "compute_units": (1, 1024), "spare_requests": (0, 4096), "spare_queries": (0, 16),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, PlanCase)
    reasons = outside(case, _BOUNDS)
    native = case.arch == "gfx950" and case.formats == "bfloat16"
    if case.heads % 16 and not (case.heads == 24 and native):
        reasons.append(f"heads={case.heads}: should be a multiple of 16, or 24 in bfloat16 on gfx950")
    if case.granularity & (case.granularity - 1):
        reasons.append(f"granularity={case.granularity}: should be a power of two")
    if case.requests + case.spare_requests < 1:
        reasons.append("requests=0: buffers are reserved for one request or more")
    if case.rows == "ragged":
        if case.queries == 1:
            reasons.append("queries=1: ragged rows need two or more")
        if case.mask == "none":
            reasons.append("mask=none: a block without causal mask has equally many rows in every request")
        # Of folded heads there is no order of rows unless all requests have equally many.
        known = case.formats == "float8" and (case.heads == 128 or (case.arch == "gfx950" and case.heads in (32, 64)))
        if case.heads != 16 and not native and not known:
            reasons.append(f"heads={case.heads}: folded heads need equally many rows in every request")
    # What is reserved for a certain number of tokens is less than some smaller number needs.
    reserved_for, alike = case.queries + case.spare_queries, case.arch == "gfx950" and case.formats != "mixed"
    if native and case.heads == 16 and reserved_for == 8 and case.queries in (5, 6, 7):
        reasons.append(f"queries={case.queries}: needs two tiles a request, and buffers for 8 hold one")
    if alike and case.heads == 32 and reserved_for == 4 and case.queries == 3:
        reasons.append("queries=3: needs two tiles a request, and buffers for 4 hold one")
    return reasons


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, PlanCase)
    return case.requests * case.queries > 8192


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, PlanCase)
    draw = Draw(case.seed, case.op)
    rows = torch.full((case.requests,), case.queries)
    if case.rows == "ragged":
        rows = draw.integers("rows", (case.requests,), 0, case.queries + 1)
    keys = _keys(case, rows, draw)
    if case.mask == "causal":
        # Every query row has a key of its own, unless a request has no keys at all.
        keys = torch.where((keys > 0) & (keys < rows), rows, keys)
    return Inputs(
        query_start=_starts(rows), key_start=_starts(keys), heads=case.heads, arch=case.arch,
        query_format="float8" if case.formats == "float8" else "bfloat16",
        cache_format="bfloat16" if case.formats == "bfloat16" else "float8",
        queries=case.queries, told=case.rows == "uniform", mask=case.mask, split_cap=case.split_cap or None,
        granularity=case.granularity, compute_units=case.compute_units,
        capacity_requests=case.requests + case.spare_requests, capacity_queries=case.queries + case.spare_queries,
    )  # fmt: skip


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return guarded_copy(torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32))


def _keys(case: PlanCase, rows: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Keys of every request."""
    count = case.requests
    short = rows + draw.integers("short", (count,), 0, 4)
    if case.lengths == "short":
        return short
    if case.lengths == "equal":
        return torch.full((count,), 1000)
    if case.lengths == "edges":
        blocks = draw.integers("blocks", (count,), 1, 40) * case.granularity
        return blocks + draw.integers("beside", (count,), -1, 2)
    if case.lengths == "empty":
        return torch.zeros_like(short)
    ragged = draw.integers("ragged", (count,), 1, 3000)
    if case.lengths == "skewed":
        longest = draw.integers("longest", (1,), 0, max(count, 1))
        return torch.where(torch.arange(count) == longest, 131072, short)
    if case.lengths == "gaps":
        return torch.where(draw.chance("none", (count,), 1, 2), 0, ragged)
    return ragged
