"""What do we ask of the decisions by which a batch of dense MLA decode finds its kernel?

Decisions depend on a configuration and the form of a batch, never on what tensors hold. A case is a configuration; its
points are all batches that differ in heads, queries and causality. See `oracle.dcp.routes` for the rules.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int64

from cases.case import Axis, Case, outside
from cases.memory import guarded

Arch = Literal["gfx942", "gfx950", "other"]
Rules = Literal["selector", "automatic"]
Cache = Literal["bfloat16", "float16", "float8"]

COLUMNS = (
    "refused", "most_queries", "route", "page_size", "row_bound", "gluon", "plan", "plan_heads", "plan_causal",
    "plan_round_robin", "plan_split_cap", "call_heads", "call_split_cap",
)  # fmt: skip
"""What is answered, a column each; 0 where a column says nothing.

refused: a code of `REFUSALS`; then no other column means anything, as nothing is decided. most_queries: of a request
that decodes. route: a code of `ROUTES`. page_size, row_bound: of the routes that give each query a row of its own, the
tokens of a page and the longest row that the kernel is told of. gluon: 1 the kernel for one query, 2 the one for several.
plan: whether work is planned ahead. plan_heads, plan_causal, plan_round_robin, plan_split_cap: what the planner is told.
call_heads, call_split_cap: what the round-robin kernel is told.
"""
ROUTES = ("plain", "segmented", "round_robin", "generic")
REFUSALS = ("none", "no kernel for the heads", "no route for several queries", "no kernel for two queries without mask")

MOST_REQUESTS = 4


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch: query heads over all ranks, queries of every request, and whether the block is causal."""

    heads: int
    queries: int
    causal: bool


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What is fixed for a server.

    rules: `selector` is the older set, where a setting chooses between the two routes of a causal block; `automatic` the
    newer one, which needs none and knows a third. mode: the setting for fewer than 16 heads, any spelling, or None.
    segmented: whether the kernel that gives each query a row can be imported. drafted: tokens that a drafter proposes, 0
    without one; parallel: a drafter that may add as many again. blocks: of a layer's cache, None before it is known, and
    block_bytes of each; `layers` of them. graphs: whether whole steps are captured.
    """

    rules: Rules
    selector: str
    arch: Arch
    mode: str | None
    cache: Cache
    ranks: int
    interleave: int
    segmented: bool
    drafted: int
    parallel: bool
    blocks: int | None
    block_bytes: int
    block_size: int
    layers: int
    graphs: bool
    longest_model: int
    compute_units: int


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The batches, a point each, all of requests with these lengths over all ranks; rank 0 is asked. `out` receives the
    answer."""

    configuration: Configuration
    lengths: tuple[int, ...]
    batches: tuple[Batch, ...]
    out: Int64[torch.Tensor, "points columns"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The decisions, in the order of `COLUMNS`."""

    out: Int64[torch.Tensor, "points columns"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutesCase(Case):
    """The axes of the decisions.

    heads: of a rank, 1 to 15 or 16 to 128. drafting: how many tokens are proposed. size: of a layer's cache, next to the
    2 GiB up to which its rows can be read with a bound, or small with many layers. lengths: `none` all requests are
    dummies. longest: tokens of a request that the model allows.
    """

    op: ClassVar[str] = "dcp.routes"

    rules: Literal["selector", "automatic"] = "automatic"
    selector: Literal["asm", "segmented"] = "asm"
    arch: Literal["gfx942", "gfx950", "other"] = "gfx950"
    mode: Literal["auto", "gluon", "asm", "absent", "GLUON", "Asm"] = "auto"
    cache: Literal["bfloat16", "float16", "float8"] = "bfloat16"
    ranks: int = 2
    interleave: int = 1
    segmented: bool = True
    drafting: Literal["none", "one", "three", "seven", "parallel"] = "seven"
    size: Literal["unknown", "small", "below", "at", "above"] = "small"
    block_size: int = 16
    heads: Literal["few", "many"] = "few"
    graphs: bool = False
    lengths: Literal["some", "none"] = "some"
    longest: int = 1000


CASE = RoutesCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "rules": ("selector", "automatic"),
    "selector": ("asm", "segmented"),
    "arch": ("gfx942", "gfx950", "other"),
    "mode": ("auto", "gluon", "asm", "absent", "GLUON", "Asm"),
    "cache": ("bfloat16", "float16", "float8"),
    "ranks": (1, 2, 3, 8),
    "interleave": (1, 16),
    "segmented": (True, False),
    "drafting": ("none", "one", "three", "seven", "parallel"),
    "size": ("unknown", "small", "below", "at", "above"),
    "block_size": (16, 96, 1536),
    "heads": ("few", "many"),
    "graphs": (False, True),
    "lengths": ("some", "none"),
    "longest": (1000, 1001, 4099),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"ranks": (1, 2, 3, 4, 8, 16), "block_size": (1, 16, 64, 96, 128, 1536)}
RANDOM_CASES = 20

_BASE = RoutesCase()
_ONE_RANK = _BASE.varied(ranks=1)
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(heads="many").id,
    _BASE.varied(rules="selector", heads="many").id,
    _BASE.varied(rules="selector", selector="segmented").id,
    _BASE.varied(arch="gfx942", heads="many", cache="float8").id,
    _BASE.varied(arch="gfx942", heads="many", block_size=1536).id,
    _BASE.varied(arch="other", graphs=True, lengths="none").id,
    _BASE.varied(heads="many", segmented=False, ranks=8).id,
    # A longest model that its ranks do not share evenly.
    _BASE.varied(arch="other", graphs=True, longest=1001).id,
    _BASE.varied(arch="other", graphs=True, longest=4099, ranks=8, heads="many", block_size=96).id,
    _BASE.varied(arch="gfx942", graphs=True, ranks=3, heads="many", block_size=1536).id,
    _BASE.varied(interleave=16).id,
    _BASE.varied(lengths="none", drafting="one").id,
    _BASE.varied(lengths="none", arch="other", ranks=8).id,
    _ONE_RANK.id,
    _ONE_RANK.varied(heads="many").id,
    _ONE_RANK.varied(mode="absent").id,
    _ONE_RANK.varied(mode="Asm").id,
    _ONE_RANK.varied(mode="GLUON", drafting="one").id,
    _ONE_RANK.varied(size="at").id,
    _ONE_RANK.varied(size="at", mode="gluon", cache="float16", drafting="one").id,
    _ONE_RANK.varied(size="below", mode="gluon", drafting="three").id,
    _ONE_RANK.varied(size="above", mode="gluon").id,
    _ONE_RANK.varied(cache="float8", mode="gluon").id,
    _ONE_RANK.varied(arch="gfx942").id,
    _ONE_RANK.varied(mode="gluon", drafting="parallel").id,
    _ONE_RANK.varied(heads="many", cache="float8", drafting="one").id,
)

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "ranks": (1, 64), "interleave": (1, 4096), "block_size": (1, 4096), "longest": (301, 1 << 20),
}  # fmt: skip
_FEW, _MANY = (1, 2, 3, 4, 5, 6, 7, 8, 12, 15), (16, 17, 24, 32, 48, 64, 80, 96, 112, 128)
_QUERIES = range(1, 10)
_SIZES: Mapping[str, tuple[int | None, int]] = {
    "unknown": (None, 1 << 16),
    "small": (1 << 10, 1 << 16),
    "below": ((1 << 31) - 1, 1),
    "at": (1 << 15, 1 << 16),
    "above": ((1 << 31) + 1, 1),
}
_DRAFTED: Mapping[str, int] = {"none": 0, "one": 1, "three": 3, "seven": 7, "parallel": 3}


def forbid(case: RoutesCase) -> list[str]:
    """Every reason why no such configuration exists."""
    reasons = outside(case, _BOUNDS)
    if case.rules == "automatic" and case.selector != "asm":
        reasons.append("selector=segmented: rules=automatic knows no selector")
    return reasons


def heavy(case: RoutesCase) -> bool:
    """Whether it takes more than a few seconds on two CPU cores: no case does."""
    del case
    return False


def served(heads: int) -> bool:
    """Whether a number of heads is one that the backend takes at all."""
    return heads > 0 and (heads <= 128 or heads % 16 == 0)


def most_queries_of(drafted: int, parallel: bool) -> int:
    """The longest block of one request that still decodes: its own token, and what the drafter adds."""
    return 1 + drafted * (2 if parallel else 1)


def build(case: RoutesCase) -> Inputs:
    """The inputs of a case: every batch that the configuration can meet."""
    blocks, block_bytes = _SIZES[case.size]
    configuration = Configuration(
        rules=case.rules, selector=case.selector, arch=case.arch, mode=None if case.mode == "absent" else case.mode,
        cache=case.cache, ranks=case.ranks, interleave=case.interleave, segmented=case.segmented,
        drafted=_DRAFTED[case.drafting], parallel=case.drafting == "parallel", blocks=blocks, block_bytes=block_bytes,
        block_size=case.block_size, layers=61, graphs=case.graphs, longest_model=case.longest,
        compute_units=256,
    )  # fmt: skip
    most = most_queries_of(configuration.drafted, configuration.parallel)
    gathered = [heads * case.ranks for heads in (_FEW if case.heads == "few" else _MANY)]
    # Captured graphs have memory for blocks of that many queries, and for no longer ones.
    batches = tuple(
        Batch(heads, queries, causal)
        for heads in gathered if served(heads)
        for queries in _QUERIES if queries <= most or not case.graphs
        for causal in (True, False)
    )  # fmt: skip
    return Inputs(
        configuration=configuration,
        lengths=(301, 77) if case.lengths == "some" else (0, 0),
        batches=batches,
        out=guarded((len(batches), len(COLUMNS)), torch.int64),
    )
