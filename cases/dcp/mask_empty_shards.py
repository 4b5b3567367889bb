"""What do we ask of the mask that keeps a rank without tokens of a request out of the merge over ranks?

A kernel need not write the log-sum-exp of a request of which its rank holds nothing. See `oracle.dcp.mask_empty_shards`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float32, Int, Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: `lse` is masked in place.

    lengths: tokens of each request on this rank. query_start: the rows of request r are query_start[r] to
    query_start[r + 1]; rows behind the last request's are nobody's. Both are given, or neither where nothing is to be
    masked.
    """

    lse: Float32[torch.Tensor, "rows heads"]
    lengths: Int[torch.Tensor, " requests"] | None
    query_start: Int32[torch.Tensor, " bounds"] | None


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The log-sum-exps after the call."""

    lse: Float32[torch.Tensor, "rows heads"]


WRITABLE: tuple[str, ...] = ("lse",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskCase(Case):
    """The axes of the mask.

    queries: rows of a request, `one`, `four`, `ragged` 0 to 6, `flat_tail` four, but none for the requests at the end,
    as a captured graph has. padding: rows behind the last request's. empty: requests of which the rank holds nothing.
    given: whether lengths and bounds are. values: what kept rows hold, `specials` infinities, NaN of many bits, zeros of
    both signs and subnormals. layout: of the log-sum-exps, `far` rows 2 GiB apart, `heads_first` the transpose of a
    dense tensor.
    """

    op: ClassVar[str] = "dcp.mask_empty_shards"

    requests: int = 7
    heads: int = 16
    queries: Literal["one", "four", "ragged", "flat_tail"] = "ragged"
    padding: int = 0
    empty: Literal["none", "some", "ends", "all"] = "some"
    given: bool = True
    length_dtype: Literal["int32", "int64"] = "int32"
    values: Literal["finite", "specials"] = "specials"
    layout: Literal["contiguous", "strided", "heads_first", "far"] = "contiguous"


CASE = MaskCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 7, 16, 17),
    "heads": (1, 3, 16, 24),
    "queries": ("one", "four", "ragged", "flat_tail"),
    "padding": (0, 1, 5),
    "empty": ("none", "some", "ends", "all"),
    "given": (True, False),
    "length_dtype": ("int32", "int64"),
    "values": ("finite", "specials"),
    "layout": ("contiguous", "strided", "heads_first"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"requests": (0, 1, 2, 7, 33, 130), "heads": (1, 3, 16, 24, 128)}
RANDOM_CASES = 12

_BASE = MaskCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(requests=130, queries="one").id,
    _BASE.varied(requests=0, padding=5, empty="none").id,
    _BASE.varied(queries="flat_tail", padding=5, empty="none").id,
    _BASE.varied(empty="ends", layout="strided", values="finite").id,
    _BASE.varied(given=False).id,
    _BASE.varied(requests=3, heads=128, padding=1).id,
    _BASE.varied(heads=3, padding=5, layout="far").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(requests=64, heads=128)),
    Served(CASE(requests=64, heads=16, queries="four")),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"requests": (0, 1 << 14), "heads": (1, 1024), "padding": (0, 1 << 14)}


def forbid(case: MaskCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.requests == 0 and (case.queries != "ragged" or case.empty != "none"):
        reasons.append("requests=0: queries and empty say nothing")
    if not case.given and case.empty != "some":
        reasons.append(f"empty={case.empty}: says nothing where lengths are not given")
    if case.layout == "far" and case.padding < 3:
        reasons.append(f"padding={case.padding}: layout=far needs three rows")
    return reasons


def heavy(case: MaskCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.requests * case.heads > 1000


def build(case: MaskCase) -> Inputs:
    """The inputs of a case: rows that are to be masked look no different from the others."""
    draw = Draw(case.seed, case.op)
    counts = _counts(case, draw)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    rows = int(starts[-1]) + case.padding
    lse = draw.normal_like("lse", (rows, case.heads)) * 4
    if case.values == "specials":
        bits = torch.tensor(
            [0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, -1, 0x7FABCDEF, 0, -(1 << 31), 1, 0x7F7FFFFF]
        ).to(torch.int32)
        special = bits[draw.integers("special", lse.shape, 0, len(bits))].view(torch.float32)
        lse = torch.where(draw.chance("is special", lse.shape, 1, 2), special, lse)
    if case.layout == "heads_first":
        given = guarded_copy(lse.T, gaps=(3,)).T
    else:
        gaps = (
            (far_gap(rows, case.heads, limit=1 << 29),) if case.layout == "far" else (5 * (case.layout == "strided"),)
        )
        given = guarded(lse.shape, torch.float32, gaps=gaps)
        # As bits, so that no conversion touches a NaN.
        given.view(torch.int32).copy_(lse.contiguous().view(torch.int32))
    lengths = draw.integers("length", (case.requests,), 1, 5000)
    lengths[draw.chance("one token", lengths.shape, 1, 4)] = 1
    lengths[_empty(case, draw)] = 0
    dtype = torch.int32 if case.length_dtype == "int32" else torch.int64
    return Inputs(
        lse=given,
        lengths=guarded_copy(lengths.to(dtype)) if case.given else None,
        query_start=guarded_copy(starts.to(torch.int32)) if case.given else None,
    )


def _counts(case: MaskCase, draw: Draw) -> torch.Tensor:
    shape = (case.requests,)
    if case.queries == "one":
        return torch.ones(shape, dtype=torch.int64)
    if case.queries == "ragged":
        return draw.integers("count", shape, 0, 7) * ~draw.chance("no row", shape, 1, 4)
    counts = torch.full(shape, 4)
    if case.queries == "flat_tail":
        counts[case.requests - case.requests // 3 :] = 0
    return counts


def _empty(case: MaskCase, draw: Draw) -> torch.Tensor:
    request = torch.arange(case.requests)
    if case.empty == "some":
        return draw.chance("empty", (case.requests,), 1, 3)
    if case.empty == "ends":
        return (request == 0) | (request == case.requests - 1)
    return request >= (0 if case.empty == "all" else case.requests)
