"""What do we ask of the metadata of a dense MLA decode batch?

Row starts of queries and keys, lengths, and the numbers that kernels and their planner are told. See
`oracle.dense_mla.decode_metadata`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Int64

from cases.case import Axis, Case, outside
from cases.dense_mla.batches import Batch, draw_batch, query_lengths
from cases.draw import Draw
from cases.production import Served

Route = Literal["planned", "gluon", "round_robin"]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The batch, and who will decode it.

    route: `planned` kernels follow a plan; `gluon` ones divide the keys by a lower bound of their number; `round_robin`
    ones follow a plan and mask by the lengths of all `world` ranks. graphs: whether captured graphs are in use.
    """

    batch: Batch
    route: Route
    world: int
    graphs: bool


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The metadata.

    padded_query: query tokens that every request is padded to, or 0. query: those of the longest request. uniform: what
    the planner is told that every request has, or -1; empty without a planner. least_kv: the lower bound of the numbers
    of keys. global_indptr, global_lens: row starts over, and lengths of, the keys of all ranks; empty but for
    `round_robin`.
    """

    padded_query: Int64[torch.Tensor, " one"]
    query: Int64[torch.Tensor, " one"]
    uniform: Int64[torch.Tensor, " at_most_one"]
    least_kv: Int64[torch.Tensor, " one"]
    qo_indptr: Int32[torch.Tensor, " starts"]
    kernel_lens: Int32[torch.Tensor, " requests"]
    kv_indptr: Int32[torch.Tensor, " starts"]
    last_page_lens: Int32[torch.Tensor, " requests"]
    global_indptr: Int32[torch.Tensor, " global_starts"]
    global_lens: Int32[torch.Tensor, " global_requests"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetadataCase(Case):
    """The axes of the batch.

    kind, query, dummies: query tokens, as `cases.dense_mla.batches.query_lengths` has them. lengths: `edges` next to 0,
    the query, the ranks, pages and 2048; `short` requests that leave ranks without keys; `long` as many keys as int32
    row starts can count. rank: the last one, or the first one. layout: `strided` lengths are columns of a table.
    """

    op: ClassVar[str] = "dense_mla.decode_metadata"

    kind: Literal[
        "uniform", "padded", "all_dummies", "ragged", "hole", "short", "longer", "uneven", "unpadded", "stretched"
    ] = "padded"
    requests: int = 7
    query: int = 4
    dummies: Literal["few", "most"] = "few"
    lengths: Literal["ragged", "edges", "short", "long"] = "ragged"
    route: Literal["planned", "gluon", "round_robin"] = "planned"
    world: int = 1
    rank: Literal["first", "last"] = "first"
    graphs: bool = True
    layout: Literal["contiguous", "strided"] = "contiguous"


CASE = MetadataCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "kind": (
        "uniform", "padded", "all_dummies", "ragged", "hole", "short", "longer", "uneven", "unpadded", "stretched",
    ),
    "requests": (0, 1, 2, 7, 33, 64),
    "query": (1, 2, 3, 4, 8),
    "dummies": ("few", "most"),
    "lengths": ("ragged", "edges", "short", "long"),
    "route": ("planned", "gluon", "round_robin"),
    "world": (1, 2, 8),
    "rank": ("first", "last"),
    "graphs": (True, False),
    "layout": ("contiguous", "strided"),
}  # fmt: skip
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 3, 7, 16, 31, 33, 64, 1030),
    "query": (1, 2, 3, 4, 5, 8, 9),
    "world": (1, 2, 3, 7, 8),
}
RANDOM_CASES = 30

_BASE = MetadataCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(kind="all_dummies").id,
    _BASE.varied(kind="hole").id,
    _BASE.varied(kind="short").id,
    _BASE.varied(kind="padded", query=1).id,
    _BASE.varied(kind="unpadded", query=1, graphs=False).id,
    _BASE.varied(route="gluon", dummies="most").id,
    _BASE.varied(route="gluon", kind="all_dummies").id,
    _BASE.varied(route="round_robin", world=8, lengths="short", rank="last").id,
    _BASE.varied(route="round_robin", world=2, kind="ragged", lengths="long", layout="strided").id,
    _BASE.varied(kind="uniform", requests=1030, query=2).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(requests=64, query=1, lengths="long")),
    Served(CASE(requests=64, query=4, lengths="long")),
    Served(CASE(requests=64, query=4, lengths="long", route="round_robin", world=8)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"requests": (0, 1 << 14), "query": (1, 64), "world": (1, 64)}


def forbid(case: MetadataCase) -> list[str]:
    """Every reason why this is no batch."""
    reasons = outside(case, _BOUNDS)
    if case.requests < 2 and case.kind not in ("uniform", "all_dummies", "ragged", "stretched"):
        reasons.append(f"requests={case.requests}: kind={case.kind} needs two")
    if case.requests < 1 and case.kind != "uniform":
        reasons.append(f"requests={case.requests}: a batch without requests is uniform")
    if case.requests < 1 and case.route != "planned":
        reasons.append("requests=0: no kernel runs")
    if case.query < 2 and case.kind in ("all_dummies", "short"):
        reasons.append(f"query={case.query}: kind={case.kind} needs two tokens")
    if case.route == "gluon" and case.world > 1:
        reasons.append("route=gluon: knows nothing of other ranks")
    if case.route == "gluon" and case.query < 2:
        reasons.append("route=gluon: needs two query tokens")
    if case.route == "gluon" and case.kind == "short" and case.query < 3:
        reasons.append("route=gluon: needs a request of two tokens")
    if case.route == "round_robin" and case.world < 2:
        reasons.append("route=round_robin: needs two ranks")
    if case.route == "round_robin" and (case.query < 3 or (case.kind == "short" and case.query < 4)):
        reasons.append("route=round_robin: needs three query tokens")
    return reasons


def heavy(case: MetadataCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.requests > 5000


def build(case: MetadataCase) -> Inputs:
    """The inputs of a case."""
    draw = Draw(case.seed, case.op)
    lens, tokens = query_lengths(case.kind, case.requests, case.query, case.dummies, draw)
    rank = case.world - 1 if case.rank == "last" else 0
    return Inputs(
        batch=draw_batch(draw, lens, tokens, case.lengths, case.world, rank, case.layout),
        route=case.route,
        world=case.world,
        graphs=case.graphs,
    )
