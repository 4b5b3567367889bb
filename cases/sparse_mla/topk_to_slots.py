"""What do we ask of a kernel that turns each token's top-k positions into rows of cache slots, in place?

The indexer leaves each token a row of positions in its request's sequence, -1 where it found none. Under decode context
parallelism the sequence is spread over ranks, and each rank keeps what lies in its own cache. See
`oracle.sparse_mla.topk_to_slots`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.sparse_mla import paging

Form = Literal["columns", "columns_counted", "front"]


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Where the keys of prefill tokens have been gathered.

    Token t of prefill request p = requests[t] >= 0 reads them there instead of in the cache: `starts[p]` is the row of
    its request's first key among those of one rank, and the keys of rank n begin at row n * rank_rows. A token with a
    negative number reads the cache.
    """

    requests: Int32[torch.Tensor, " tokens"]
    starts: Int32[torch.Tensor, " prefills"]
    rank_rows: int


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: every position of a row becomes a row number of the cache, a slot, or -1.

    Position v of a sequence lies on rank (v // interleave) % world_size, as key j = v // (world_size * interleave) *
    interleave + v % interleave of that rank's part; key j of request r in slot table[r, j // block_size] * block_rows +
    j % block_size. `block_rows` is what the start of one block is from the next, block_size or more. interleave divides
    block_size. -1 are: a negative position, one of another rank (but in a workspace), one beyond the table's columns, and
    all positions of a token whose request is no row of the table (but in a workspace). All slots fit into int32.

    form: `columns` answers position by position; `columns_counted` counts the slots of each row too; `front` counts them
    and moves them to the front, in any order, with -1 behind. `slots` and `counts` are memory that an implementation may
    answer in.
    """

    positions: Int32[torch.Tensor, "tokens width"]
    requests: Int32[torch.Tensor, " tokens"]
    table: Int32[torch.Tensor, "requests columns"]
    block_size: int
    block_rows: int
    world_size: int
    rank: int
    interleave: int
    workspace: Workspace | None
    form: Form
    slots: Int32[torch.Tensor, "tokens width"]
    counts: Int32[torch.Tensor, " tokens"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Slots or -1, and how many slots each row has; no counts in the form `columns`."""

    slots: Int32[torch.Tensor, "tokens width"]
    counts: Int32[torch.Tensor, " tokens"] | None


WRITABLE: tuple[str, ...] = ("slots", "counts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotsCase(Case):
    """The axes of the conversion.

    pages: `apart` has rows of other layers between blocks. rank: the first or the last of world_size. workspace: `all`
    tokens read one, `mixed` every other one, `unused` none though there is one. entries: see
    `cases.sparse_mla.paging.position_rows`; `edges` the ends of every range, beyond the table too. strays: `none`, or
    every third token has a request that is no row of the table. table: `narrowed` is a view of a wider table, `high`
    has block numbers up to the last slot of int32. layout: of the positions; `far` has rows so far apart that the last
    starts 2^31 elements behind the first.
    """

    op: ClassVar[str] = "sparse_mla.topk_to_slots"

    tokens: int = 5
    width: int = 128
    requests: int = 3
    block_size: int = 64
    pages: Literal["adjacent", "apart"] = "adjacent"
    world_size: int = 1
    rank: Literal["first", "last"] = "first"
    interleave: int = 1
    workspace: Literal["absent", "unused", "mixed", "all"] = "absent"
    form: Literal["columns", "columns_counted", "front"] = "front"
    entries: Literal["prefix", "holes", "first_hole", "full", "empty", "edges"] = "holes"
    strays: Literal["none", "some"] = "none"
    table: Literal["exact", "narrowed", "high"] = "exact"
    layout: Literal["contiguous", "strided", "far"] = "contiguous"


CASE = SlotsCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 5, 40),
    "width": (0, 1, 6, 128, 1100),
    "requests": (1, 3),
    "block_size": (1, 2, 16, 64),
    "pages": ("adjacent", "apart"),
    "world_size": (1, 2, 3, 8),
    "rank": ("first", "last"),
    "interleave": (1, 2, 16),
    "workspace": ("absent", "unused", "mixed", "all"),
    "form": ("columns", "columns_counted", "front"),
    "entries": ("prefix", "holes", "first_hole", "full", "empty", "edges"),
    "strays": ("none", "some"),
    "table": ("exact", "narrowed", "high"),
    "layout": ("contiguous", "strided"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 5, 40, 300),
    "width": (0, 1, 6, 128, 1100, 2048, 2176),
    "world_size": (1, 2, 3, 4, 7, 8),
    "interleave": (1, 2, 4, 16, 64),
}
RANDOM_CASES = 24

_BASE = SlotsCase()
_SPREAD = _BASE.varied(world_size=2, rank="last", entries="full")
REGRESSIONS: tuple[str, ...] = (
    # An index beyond the table's columns, and a request beyond its rows.
    _BASE.varied(entries="edges", table="narrowed").id,
    _BASE.varied(strays="some", form="columns", entries="full").id,
    _SPREAD.varied(interleave=16, entries="edges").id,
    _SPREAD.varied(form="columns").id,
    _SPREAD.varied(form="columns_counted", interleave=2).id,
    _BASE.varied(form="columns_counted").id,
    _BASE.varied(form="columns").id,
    _BASE.varied(workspace="mixed", world_size=2, interleave=2).id,
    # A row of more than one tile, in which tiles that count must agree where each begins.
    _BASE.varied(tokens=2, width=4224).id,
    _BASE.varied(layout="far", table="narrowed", pages="apart").id,
    _BASE.varied(tokens=0).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(tokens=256, width=2048, requests=64, block_size=64, form="columns")),
    Served(CASE(tokens=256, width=2048, requests=64, block_size=64, form="columns_counted")),
    Served(CASE(tokens=256, width=2048, requests=64, block_size=64)),
    Served(CASE(tokens=256, width=2048, requests=64, block_size=1, world_size=8, form="columns")),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "tokens": (0, 1 << 16),
    "width": (0, 1 << 14),
    "requests": (1, 4096),
    "block_size": (1, 4096),
    "world_size": (1, 64),
    "interleave": (1, 4096),
}


def forbid(case: SlotsCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.interleave >= 1 and case.block_size % case.interleave:
        reasons.append(f"interleave={case.interleave}: should divide block_size={case.block_size}")
    if case.world_size == 1 and case.rank == "last":
        reasons.append("rank=last: needs two ranks")
    if case.layout == "far" and (case.tokens < 3 or case.width < 1):
        reasons.append("layout=far: needs three tokens and a column")
    return reasons


def heavy(case: SlotsCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.tokens * case.width > 50_000


def build(case: SlotsCase) -> Inputs:
    """The inputs of a case; the requests' tables are scattered over one cache."""
    draw = Draw(case.seed, case.op)
    columns = max(3, -(-300 // (case.block_size * case.world_size)))
    block_rows = case.block_size + (7 if case.pages == "apart" else 0)
    table, used = paging.block_tables(draw, case.requests, columns, block_rows, high=case.table == "high")
    requests = draw.integers("requests", (case.tokens,), 0, case.requests)
    limits = used[requests] * case.block_size * case.world_size
    kind = "full" if case.entries == "edges" else case.entries
    positions = paging.position_rows(draw, case.width, limits, kind)
    if case.entries == "edges":
        reach = columns * case.block_size * case.world_size
        edges = torch.tensor([0, 1, reach, reach + 1, paging.INT32_MAX, -1, paging.INT32_MIN])
        edge = edges[draw.integers("edges", positions.shape, 0, len(edges))]
        positions = torch.where(draw.chance("is edge", positions.shape, 1, 2), edge, positions)
    token = torch.arange(case.tokens)
    if case.strays == "some":
        requests = torch.where(token % 3 == 0, paging.stray_requests(draw, case.tokens, case.requests), requests)
    gaps: tuple[int, ...] = ()
    if case.layout == "strided":
        gaps = (11,)
    elif case.layout == "far":
        gaps = (far_gap(case.tokens, case.width),)
    return Inputs(
        positions=guarded_copy(positions.to(torch.int32), gaps=gaps),
        requests=guarded_copy(requests.to(torch.int32)),
        table=guarded_copy(table.to(torch.int32), gaps=(5,) if case.table == "narrowed" else ()),
        block_size=case.block_size,
        block_rows=block_rows,
        world_size=case.world_size,
        rank=0 if case.rank == "first" else case.world_size - 1,
        interleave=case.interleave,
        workspace=_workspace(case, draw, columns * case.block_size),
        form=case.form,
        slots=guarded((case.tokens, case.width), torch.int32),
        counts=guarded((case.tokens,), torch.int32),
    )


def _workspace(case: SlotsCase, draw: Draw, keys: int) -> Workspace | None:
    """Two prefill requests of up to `keys` keys a rank, one behind the other."""
    if case.workspace == "absent":
        return None
    token = torch.arange(case.tokens)
    reads = {"unused": token < 0, "mixed": token % 2 == 1, "all": token >= 0}[case.workspace]
    return Workspace(
        requests=guarded_copy(torch.where(reads, draw.integers("prefill", token.shape, 0, 2), -1).to(torch.int32)),
        starts=guarded_copy(torch.tensor([3, 3 + keys], dtype=torch.int32)),
        rank_rows=2 * keys + 5,
    )
