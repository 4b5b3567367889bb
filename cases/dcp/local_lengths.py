"""What do we ask of the map from a sequence to the rank, and the slot there, that holds each of its tokens?

Ranks take turns of `interleave` tokens. See `oracle.dcp.local_lengths` for the formulas.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int, Int32, Int64

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

INT32_MAX = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call of rank `rank` of `ranks`.

    lengths: tokens of whole sequences, any shape and strides. form: how the rank is given where shares are asked for, as
    a `number`, as `rank_tensor`, or not at all (`all` ranks). positions: of the tokens of request r, from query_start[r]
    to query_start[r + 1]; those behind the last request's are garbage. A row of `table` names a request's blocks, the
    same on every rank: block c holds positions c * block_size * ranks on, block_size of them on each rank.
    slots: memory for the answer, as long as `positions` or longer.
    """

    lengths: Int[torch.Tensor, "..."]
    ranks: int
    rank: int
    rank_tensor: Int32[torch.Tensor, "..."]
    form: Literal["number", "tensor", "all"]
    interleave: int
    positions: Int64[torch.Tensor, " tokens"]
    query_start: Int32[torch.Tensor, " bounds"]
    table: Int32[torch.Tensor, "requests columns"]
    block_size: int
    slots: Int64[torch.Tensor, " capacity"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Tokens of each sequence on the rank, with a last dimension of all ranks in the form `all`; and the whole buffer of
    slots, -1 where another rank holds the token and where there is none."""

    lengths: Int32[torch.Tensor, "..."]
    slots: Int64[torch.Tensor, " capacity"]


WRITABLE: tuple[str, ...] = ("slots",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCase(Case):
    """The axes of the shard map.

    form: how the rank is given. shape: of the lengths, `column` one of a wider matrix. lengths: `short` some ranks hold
    nothing, `turns` next to ends of turns and of rounds, `any`, `huge` up to the largest of int32. queries: tokens a
    request, `one`, `few` (0 to 9), `long` (one request beyond 1024). context: tokens before them, `none`, `some`, `edge`
    next to the end of a block. padding: tokens behind the last request's. blocks: `high` numbers up to the largest of
    int32. table_layout: `strided` is a view into a wider table.
    """

    op: ClassVar[str] = "dcp.local_lengths"

    ranks: int = 4
    interleave: int = 1
    form: Literal["number", "tensor", "all"] = "number"
    shape: Literal["none", "scalar", "vector", "column", "matrix"] = "vector"
    lengths: Literal["short", "turns", "any", "huge"] = "turns"
    length_dtype: Literal["int32", "int64"] = "int32"
    requests: int = 3
    queries: Literal["one", "few", "long"] = "few"
    context: Literal["none", "some", "edge"] = "some"
    block_size: int = 16
    padding: int = 0
    blocks: Literal["low", "high"] = "low"
    table_layout: Literal["contiguous", "strided"] = "contiguous"


CASE = LocalCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "ranks": (1, 2, 3, 4, 7, 8),
    "interleave": (1, 2, 4, 16),
    "form": ("number", "tensor", "all"),
    "shape": ("none", "scalar", "vector", "column", "matrix"),
    "lengths": ("short", "turns", "any", "huge"),
    "length_dtype": ("int32", "int64"),
    "requests": (0, 1, 3, 17),
    "queries": ("one", "few", "long"),
    "context": ("none", "some", "edge"),
    "block_size": (1, 16, 48, 128),
    "padding": (0, 5),
    "blocks": ("low", "high"),
    "table_layout": ("contiguous", "strided"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "interleave": (1, 2, 4, 16, 64),
    "requests": (0, 1, 3, 17, 130),
    "block_size": (1, 16, 48, 64, 128, 256, 1536),
}
RANDOM_CASES = 15

_BASE = LocalCase(requests=17)
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(form="all", interleave=4, shape="matrix").id,
    _BASE.varied(form="tensor", ranks=7, interleave=16, lengths="huge", length_dtype="int64").id,
    _BASE.varied(ranks=8, lengths="short", context="none", queries="one").id,
    _BASE.varied(queries="long", interleave=16, block_size=48, padding=5).id,
    _BASE.varied(blocks="high", block_size=128).id,
    _BASE.varied(ranks=1, form="all", table_layout="strided").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(ranks=8, requests=256, block_size=64)),
    Served(CASE(ranks=8, requests=256, block_size=64, form="tensor")),
    Served(CASE(ranks=8, requests=256, block_size=64, form="all", interleave=16)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "ranks": (1, 256), "interleave": (1, 4096), "requests": (0, 4096), "block_size": (1, 4096), "padding": (0, 4096),
}  # fmt: skip


def forbid(case: LocalCase) -> list[str]:
    """Every reason why no such call exists: a turn fits into a block a whole number of times."""
    reasons = outside(case, _BOUNDS)
    if reasons:
        return reasons
    if case.block_size % case.interleave:
        reasons.append(f"interleave={case.interleave}: should divide block_size={case.block_size}")
    if case.requests == 0 and (case.queries != "few" or case.context != "some" or case.blocks != "low"):
        reasons.append("requests=0: queries, context and blocks say nothing")
    return reasons


def heavy(case: LocalCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.requests > 100


def build(case: LocalCase) -> Inputs:
    """The inputs of a case: entries of the table that this rank needs for no token are garbage."""
    draw = Draw(case.seed, case.op)
    rank = int(draw.integers("rank", (1,), 0, case.ranks))
    counts, befores = _tokens(case, draw)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    used = int(starts[-1])
    request = torch.repeat_interleave(torch.arange(case.requests), counts)
    position = befores[request] + torch.arange(used) - starts[request]

    span = case.block_size * case.ranks
    columns = int(position.max()) // span + 3 if used else 3
    needed = torch.zeros((case.requests, columns), dtype=torch.bool)
    own = position // case.interleave % case.ranks == rank
    needed[request[own], position[own] // span] = True
    numbers = draw.permutation("blocks", case.requests * columns).view(case.requests, columns)
    if case.blocks == "high":
        numbers = INT32_MAX - numbers
    garbage = torch.tensor([-1, -(1 << 31), INT32_MAX, -7])[draw.integers("garbage", needed.shape, 0, 4)]
    nobody = torch.tensor([-1, 7, 1 << 40, -(1 << 40)])[draw.integers("nobody", (case.padding,), 0, 4)]
    return Inputs(
        lengths=_lengths(case, draw),
        ranks=case.ranks,
        rank=rank,
        rank_tensor=guarded_copy(torch.tensor(rank if case.shape == "scalar" else [rank], dtype=torch.int32)),
        form=case.form,
        interleave=case.interleave,
        positions=guarded_copy(torch.cat([position, nobody])),
        query_start=guarded_copy(starts.to(torch.int32)),
        table=guarded_copy(
            torch.where(needed, numbers, garbage).to(torch.int32), gaps=(5,) if case.table_layout == "strided" else ()
        ),
        block_size=case.block_size,
        slots=guarded((used + 2 * case.padding,), torch.int64),
    )


def _lengths(case: LocalCase, draw: Draw) -> torch.Tensor:
    shape = {"none": (0,), "scalar": (), "vector": (61,), "column": (61,), "matrix": (7, 9)}[case.shape]
    turn, round_ = case.interleave, case.interleave * case.ranks
    if case.lengths == "short":
        lengths = draw.integers("length", shape, 0, round_ + 1)
    elif case.lengths == "turns":
        ends = round_ * draw.integers("rounds", shape, 0, 9) + turn * draw.integers("turns", shape, 0, case.ranks + 1)
        lengths = (ends + draw.integers("beside", shape, -1, 2)).clamp(min=0)
    elif case.lengths == "any":
        lengths = draw.integers("length", shape, 0, 1 << 17)
    else:
        lengths = INT32_MAX - draw.integers("below", shape, 0, 2 * round_)
    dtype = torch.int32 if case.length_dtype == "int32" else torch.int64
    if case.shape == "column":
        wide = guarded((61, 5), dtype, gaps=(3,))
        wide[:, 2] = lengths
        return wide[:, 2]
    return guarded_copy(lengths.to(dtype), gaps=(4,) if case.shape == "matrix" else ())


def _tokens(case: LocalCase, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens each request has, and how many stand before them."""
    count = case.requests
    counts = torch.ones(count, dtype=torch.int64) if case.queries == "one" else draw.integers("count", (count,), 0, 10)
    if case.queries == "long":
        counts[count // 2] = 1024 + int(draw.integers("long", (1,), 1, 200))
    if case.context == "none":
        return counts, torch.zeros(count, dtype=torch.int64)
    if case.context == "some":
        return counts, draw.integers("before", (count,), 0, 3000)
    span = case.block_size * case.ranks
    ends = (counts + span) // span * span + draw.integers("beside", (count,), -1, 2)
    return counts, (ends - counts).clamp(min=0)
