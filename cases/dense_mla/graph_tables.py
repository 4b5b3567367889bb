"""What do we ask of the tables that captured graphs of dense MLA decode read, batch after batch?

A graph replays the addresses and the number of requests that it was captured with, so every batch's tables must come to
lie in the same memory, and what lies behind a smaller batch must do no harm. A case is a sequence of batches over the same
buffers. See `oracle.dense_mla.graph_tables`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Int64

from cases.case import Axis, Case, outside
from cases.dense_mla.batches import Batch, draw_batch, query_lengths
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served
from cases.sparse_mla.paging import INT32_MAX, INT32_MIN

Kernels = Literal["plain", "round_robin", "segmented", "both"]


@dataclasses.dataclass(frozen=True)
class Step:
    """One batch, and the blocks of its requests' keys; columns that no key needs hold anything."""

    batch: Batch
    block_table: Int32[torch.Tensor, "requests width"]


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The memory that graphs read; room for `capacity` requests.

    qo_indptr, kv_indptr, global_indptr: row starts of queries, of keys, and of keys on all ranks, whose first element is
    0 from the start. seq_lens: keys of every request. indices: a slot for every key. row_lens, row_pages: keys, and pages
    of keys, of every query token.
    """

    qo_indptr: Int32[torch.Tensor, " starts"]
    kv_indptr: Int32[torch.Tensor, " starts"]
    global_indptr: Int32[torch.Tensor, " starts"]
    seq_lens: Int32[torch.Tensor, " capacity"]
    indices: Int32[torch.Tensor, " room"]
    row_lens: Int32[torch.Tensor, " rows"]
    row_pages: Int32[torch.Tensor, "rows pages"]


BUFFERS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Buffers))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The batches, in their order, and the buffers that all of them write.

    kernels: what decodes several query tokens where a cache is spread over ranks, `plain` nothing of the kind.
    page_size: tokens of a page of `row_pages`; it divides block_size.
    """

    steps: tuple[Step, ...]
    buffers: Buffers
    kernels: Kernels
    world: int
    rank: int
    block_size: int
    page_size: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What each step left behind and returned.

    held: copies of all buffers after every step, whatever a step that raised left there. places: of what each step
    returned for every buffer, the elements between the beginning of the buffer and its own, and how many elements (rows,
    where there are rows) it has; -1 and 0 for memory that is not the buffer's, -2 and 0 for nothing. raised: 1 for a
    step that raised.
    """

    held: tuple[Buffers, ...]
    places: Int64[torch.Tensor, "steps buffers 2"]
    raised: Int64[torch.Tensor, " steps"]


WRITABLE: tuple[str, ...] = tuple(f"buffers.{name}" for name in BUFFERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphTablesCase(Case):
    """The axes of the sequence.

    capacity: requests that the buffers have room for. pattern: how the numbers of requests change, `alternating` between
    all and one. kind, query: query tokens, as `cases.dense_mla.batches.query_lengths` has them; `mixed` each step another
    way. queries: `alternating` every other step has single tokens. keys: of a request on one rank, at most, rounded up to
    whole blocks. table: `strided` rows with gaps. overflow: the last
    step has more requests than the buffers have room for, or more query tokens (`rows`).
    """

    op: ClassVar[str] = "dense_mla.graph_tables"

    steps: int = 3
    capacity: int = 7
    pattern: Literal["same", "growing", "shrinking", "alternating"] = "shrinking"
    kind: Literal["uniform", "padded", "all_dummies", "ragged", "mixed"] = "mixed"
    query: int = 4
    queries: Literal["same", "alternating"] = "same"
    kernels: Literal["plain", "round_robin", "segmented", "both"] = "plain"
    world: int = 1
    rank: Literal["first", "last"] = "first"
    lengths: Literal["ragged", "edges", "short"] = "ragged"
    keys: int = 70
    block_size: int = 16
    table: Literal["contiguous", "strided"] = "contiguous"
    overflow: Literal["none", "requests", "rows"] = "none"


CASE = GraphTablesCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "steps": (1, 2, 3, 5),
    "capacity": (2, 7, 33),
    "pattern": ("same", "growing", "shrinking", "alternating"),
    "kind": ("uniform", "padded", "all_dummies", "ragged", "mixed"),
    "query": (1, 2, 4),
    "queries": ("same", "alternating"),
    "kernels": ("plain", "round_robin", "segmented", "both"),
    "world": (1, 2, 8),
    "rank": ("first", "last"),
    "lengths": ("ragged", "edges", "short"),
    "keys": (70,),
    "block_size": (1, 16, 48, 256),
    "table": ("contiguous", "strided"),
    "overflow": ("none", "requests", "rows"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "steps": (1, 2, 3, 5, 9),
    "query": (1, 2, 3, 4, 8),
    "world": (1, 2, 3, 7, 8),
    "block_size": (1, 16, 48, 64, 128, 256, 1536),
}
RANDOM_CASES = 20

_BASE = GraphTablesCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(kernels="round_robin", world=8, steps=5, pattern="alternating").id,
    _BASE.varied(kernels="segmented", world=2, steps=5, queries="alternating").id,
    _BASE.varied(kernels="both", world=2, steps=5, query=2, kind="padded").id,
    _BASE.varied(kernels="both", world=8, queries="alternating", rank="last", lengths="short").id,
    _BASE.varied(overflow="requests").id,
    _BASE.varied(kernels="segmented", world=2, overflow="rows", kind="uniform").id,
    _BASE.varied(capacity=1030, steps=2, kind="uniform", query=2).id,
    # Lists of more than 1024 tokens.
    _BASE.varied(capacity=3, steps=2, kind="uniform", keys=2100).id,
    _BASE.varied(capacity=4, steps=2, kind="uniform", keys=3000, kernels="round_robin", world=2, block_size=48).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(steps=1, capacity=256, keys=4096, block_size=16)),
    Served(CASE(steps=1, capacity=256, keys=4096, block_size=64, kernels="both", world=8)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "steps": (1, 64),
    "capacity": (1, 1 << 12),
    "query": (1, 32),
    "world": (1, 64),
    "keys": (1, 1 << 16),
    "block_size": (1, 1 << 12),
}


def forbid(case: GraphTablesCase) -> list[str]:
    """Every reason why there is no such sequence."""
    reasons = outside(case, _BOUNDS)
    if case.world == 1 and case.kernels != "plain":
        reasons.append(f"kernels={case.kernels}: needs two ranks")
    if case.world > 1 and case.kernels == "plain" and case.query > 1:
        reasons.append("kernels=plain: several query tokens over several ranks have no kernel")
    if case.kernels == "round_robin" and case.query < 3:
        reasons.append("kernels=round_robin: needs three query tokens")
    if case.query < 2 and case.kind == "all_dummies":
        reasons.append("kind=all_dummies: needs two query tokens")
    if case.overflow == "rows" and case.kernels != "segmented":
        reasons.append("overflow=rows: only segmented kernels have rows of query tokens")
    if case.overflow == "rows" and case.query < 2:
        reasons.append("overflow=rows: needs two query tokens")
    if case.capacity < 2 and case.kind in ("padded", "mixed"):
        reasons.append(f"capacity={case.capacity}: kind={case.kind} needs two requests")
    return reasons


def heavy(case: GraphTablesCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.steps * case.capacity * case.query > 20_000


def build(case: GraphTablesCase) -> Inputs:
    """The inputs of a case; buffers full of numbers that are neither starts nor slots."""
    draw = Draw(case.seed, case.op)
    width = -(-case.keys // case.block_size) + 1
    # The largest power of two up to 128 that divides a block.
    page_size = min(128, case.block_size & -case.block_size)
    steps = tuple(_step(case, draw.within(str(number)), number, width) for number in range(case.steps))
    global_indptr = guarded((case.capacity + 1,), torch.int32)
    global_indptr[0] = 0
    rows = case.capacity * case.query
    return Inputs(
        steps=steps,
        buffers=Buffers(
            qo_indptr=guarded((case.capacity + 1,), torch.int32),
            kv_indptr=guarded((case.capacity + 1,), torch.int32),
            global_indptr=global_indptr,
            seq_lens=guarded((case.capacity,), torch.int32),
            indices=guarded((case.capacity * width * case.block_size,), torch.int32),
            row_lens=guarded((rows,), torch.int32),
            row_pages=guarded((rows, width * case.block_size // page_size), torch.int32),
        ),
        kernels=case.kernels,
        world=case.world,
        rank=case.world - 1 if case.rank == "last" else 0,
        block_size=case.block_size,
        page_size=page_size,
    )


def _step(case: GraphTablesCase, draw: Draw, number: int, width: int) -> Step:
    shares = {
        "same": case.capacity,
        "growing": -(-case.capacity * (number + 1) // case.steps),
        "shrinking": -(-case.capacity * (case.steps - number) // case.steps),
        "alternating": 1 if number % 2 else case.capacity,
    }
    requests = shares[case.pattern]
    query = 1 if case.queries == "alternating" and number % 2 else case.query
    kind = ("padded", "uniform", "ragged", "all_dummies")[number % 4] if case.kind == "mixed" else case.kind
    if (kind == "padded" and requests < 2) or (kind == "all_dummies" and query < 2):
        kind = "uniform"
    if case.overflow != "none" and number == case.steps - 1:
        requests = case.capacity + (1 if case.overflow == "requests" else 0)
        query = case.query + (1 if case.overflow == "rows" else 0)
        kind = "uniform"
    lens, tokens = query_lengths(kind, requests, query, "few" if number % 3 else "most", draw)
    rank = case.world - 1 if case.rank == "last" else 0
    limit = width * case.block_size * case.world
    batch = draw_batch(draw, lens, tokens, case.lengths, case.world, rank, "contiguous", limit)
    blocks = draw.integers("blocks", (requests, width), 0, 5000)
    # A dummy of a padded batch has as many keys as queries.
    keys = batch.seq_lens.to(torch.int64).clamp(min=query)
    needed = torch.arange(width) * case.block_size < keys[:, None]
    nothing = torch.tensor([-1, INT32_MIN, INT32_MAX, 3])[draw.integers("nothing", (requests, width), 0, 4)]
    table = torch.where(needed, blocks, nothing).to(torch.int32)
    return Step(batch=batch, block_table=guarded_copy(table, gaps=(9,) if case.table == "strided" else ()))
