"""What do we ask of the folding of many query heads into more rows of 16 heads, and of the way back?

A decode kernel of 16 heads serves a multiple of them when every 16 heads of a request become a request of their own over
the same keys. See `oracle.dense_mla.fold_rows`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Shaped

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served

HEADS = 16

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}
# Width of a query head and of an output head.
_WIDTHS = {"small": (48, 32), "latent": (576, 512), "odd": (27, 19)}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Both ways of one call: queries on their way to a kernel of 16 heads, and what it returned.

    query: rows of every request's tokens, request by request; any strides but for the last one, which is 1.
    folded_out, folded_lse: a kernel's answer for the folded rows. query_tokens: of every request.
    """

    query: Shaped[torch.Tensor, "rows heads width"]
    folded_out: Float[torch.Tensor, "folded_rows 16 out_width"]
    folded_lse: Float32[torch.Tensor, "folded_rows 16"]
    query_tokens: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The folded queries, and the kernel's answer in the order of the queries."""

    folded: Shaped[torch.Tensor, "folded_rows 16 width"]
    out: Float[torch.Tensor, "rows heads out_width"]
    lse: Float32[torch.Tensor, "rows heads"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldCase(Case):
    """The axes of the folding.

    groups: of 16 heads. query_tokens: of a request. width: of the heads. layout: of the queries, `row_gaps` and
    `head_gaps` memory between rows and heads, `far` rows 2^31 elements apart in all. answer: the kernel's, `packed` or
    with memory between its rows.
    """

    op: ClassVar[str] = "dense_mla.fold_rows"

    requests: int = 3
    groups: int = 2
    query_tokens: int = 4
    width: Literal["small", "latent", "odd"] = "small"
    dtype: Literal["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"] = "bfloat16"
    layout: Literal["contiguous", "row_gaps", "head_gaps", "far"] = "contiguous"
    answer: Literal["packed", "row_gaps"] = "packed"


CASE = FoldCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 7),
    "groups": (1, 2, 3, 4, 5, 6, 7, 8),
    "query_tokens": (1, 2, 3, 4, 5),
    "width": ("small", "latent", "odd"),
    "dtype": ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    "layout": ("contiguous", "row_gaps", "head_gaps"),
    "answer": ("packed", "row_gaps"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 3, 7, 33),
    "query_tokens": (1, 2, 3, 4, 5, 8),
}
RANDOM_CASES = 8

_BASE = FoldCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(query_tokens=1, groups=8).id,
    _BASE.varied(groups=6, query_tokens=2, dtype="float8_e4m3fn").id,
    _BASE.varied(requests=2, query_tokens=2, layout="far").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(FoldCase(requests=32, groups=2, query_tokens=4, width="latent")),
    Served(FoldCase(requests=32, groups=8, query_tokens=1, width="latent", dtype="float8_e4m3fn")),
    Served(FoldCase(requests=32, groups=8, query_tokens=1, width="latent", dtype="float8_e4m3fnuz")),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"requests": (0, 1 << 12), "groups": (1, 8), "query_tokens": (1, 64)}


def forbid(case: FoldCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.layout == "far" and case.requests * case.query_tokens < 3:
        reasons.append("layout=far: needs three rows")
    return reasons


def heavy(case: FoldCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.requests * case.query_tokens * case.groups > 2_000


def build(case: FoldCase) -> Inputs:
    """The inputs of a case; every element is any bit pattern, NaN codes and infinities among them."""
    draw = Draw(case.seed, case.op)
    rows, heads = case.requests * case.query_tokens, case.groups * HEADS
    width, out_width = _WIDTHS[case.width]
    gaps: tuple[int, ...] = {"contiguous": (), "row_gaps": (24,), "head_gaps": (0, 5), "far": ()}[case.layout]
    if case.layout == "far":
        gaps = (far_gap(rows, heads * width),)
    behind = (8,) if case.answer == "row_gaps" else ()
    folded_rows = rows * case.groups
    return Inputs(
        query=_bits(draw, "query", (rows, heads, width), _DTYPES[case.dtype], gaps),
        folded_out=_bits(draw, "out", (folded_rows, HEADS, out_width), torch.bfloat16, behind),
        folded_lse=_bits(draw, "lse", (folded_rows, HEADS), torch.float32, behind),
        query_tokens=case.query_tokens,
    )


def _bits(
    draw: Draw, name: str, shape: tuple[int, ...], dtype: torch.dtype, gaps: tuple[int, ...]
) -> torch.Tensor:  # fmt: skip
    if 0 in shape:
        return guarded(shape, dtype, gaps=gaps)
    codes = draw.integers(name, (*shape[:-1], shape[-1] * dtype.itemsize), 0, 256).to(torch.uint8)
    return guarded_copy(codes.view(dtype), gaps=gaps)
