"""What do we ask of the number of tokens that each row of a verify block sees on one rank?

The last `queries` tokens of every sequence are being checked; row t of them sees what stands up to itself. See
`oracle.dcp.verify_lengths` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int, Int32

from cases.case import Axis, Case, outside
from cases.dcp.local_lengths import INT32_MAX
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: `lengths` are tokens of whole sequences on all ranks, the block included, 0 for a dummy request."""

    lengths: Int[torch.Tensor, " requests"]
    queries: int
    ranks: int
    rank: int
    interleave: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Tokens that each row sees on the rank, the rows of a request one behind the other."""

    lengths: Int32[torch.Tensor, " rows"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCase(Case):
    """The axes of the row lengths.

    queries: rows of a request. rank: `first`, `last`, or `middle`, any. lengths: `short` fewer tokens than rows and about
    as many as ranks, `edges` next to ends of turns and of rounds, `any`, `huge` up to the largest of int32. dummies:
    requests at the end without a token. layout: `strided` lengths are a column of a wider matrix.
    """

    op: ClassVar[str] = "dcp.verify_lengths"

    requests: int = 7
    queries: int = 4
    ranks: int = 2
    rank: Literal["first", "middle", "last"] = "last"
    interleave: int = 1
    lengths: Literal["short", "edges", "any", "huge"] = "edges"
    length_dtype: Literal["int32", "int64"] = "int32"
    dummies: Literal["none", "one", "all"] = "none"
    layout: Literal["contiguous", "strided"] = "contiguous"


CASE = VerifyCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 7, 33),
    "queries": (1, 2, 3, 4, 5, 8),
    "ranks": (1, 2, 3, 4, 7, 8),
    "rank": ("first", "middle", "last"),
    "interleave": (1, 2, 4, 16),
    "lengths": ("short", "edges", "any", "huge"),
    "length_dtype": ("int32", "int64"),
    "dummies": ("none", "one", "all"),
    "layout": ("contiguous", "strided"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"requests": (1, 7, 130), "queries": (1, 2, 3, 4, 5, 6, 7, 8, 9)}
RANDOM_CASES = 15

_BASE = VerifyCase(requests=33)
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(queries=8, ranks=2, lengths="short").id,
    _BASE.varied(queries=8, ranks=8, lengths="short", rank="first").id,
    _BASE.varied(queries=5, ranks=3, interleave=4).id,
    _BASE.varied(lengths="huge", ranks=8, length_dtype="int64").id,
    _BASE.varied(dummies="one", queries=3).id,
    _BASE.varied(queries=1, layout="strided").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(requests=256, queries=2, ranks=8)),
    Served(CASE(requests=256, queries=4, ranks=8, interleave=16)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (0, 1 << 16), "queries": (1, 4096), "ranks": (1, 256), "interleave": (1, 4096),
}  # fmt: skip


def forbid(case: VerifyCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.ranks == 1 and case.rank != "first":
        reasons.append(f"rank={case.rank}: a single rank is the first")
    if case.requests == 0 and (case.dummies != "none" or case.lengths != "any"):
        reasons.append("requests=0: dummies and lengths say nothing")
    return reasons


def heavy(case: VerifyCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.requests * case.queries > 100_000


def build(case: VerifyCase) -> Inputs:
    """The inputs of a case."""
    draw = Draw(case.seed, case.op)
    shape = (case.requests,)
    turn, round_ = case.interleave, case.interleave * case.ranks
    if case.lengths == "short":
        lengths = draw.integers("length", shape, 0, max(case.queries, round_) + 3)
    elif case.lengths == "edges":
        ends = round_ * draw.integers("rounds", shape, 1, 40) + turn * draw.integers("turns", shape, 0, case.ranks)
        lengths = ends + draw.integers("beside", shape, -1, case.queries + 1)
    elif case.lengths == "any":
        lengths = draw.integers("length", shape, 0, 1 << 17)
    else:
        lengths = INT32_MAX - draw.integers("below", shape, 0, 2 * round_)
    if case.dummies != "none":
        lengths[-1 if case.dummies == "one" else 0 :] = 0
    dtype = torch.int32 if case.length_dtype == "int32" else torch.int64
    given = guarded_copy(lengths.to(dtype))
    if case.layout == "strided":
        wide = guarded((case.requests, 3), dtype, gaps=(2,))
        wide[:, 1] = lengths
        given = wide[:, 1]
    middle = int(draw.integers("rank", (1,), 0, case.ranks))
    return Inputs(
        lengths=given,
        queries=case.queries,
        ranks=case.ranks,
        rank={"first": 0, "middle": middle, "last": case.ranks - 1}[case.rank],
        interleave=case.interleave,
    )
