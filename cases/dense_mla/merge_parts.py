"""What do we ask of a merge of attention parts, each with its output and its log-sum-exp?

Any number of parts of the same rows, normalised within themselves; see `oracle.dense_mla.merge_parts` for the formula.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, with_one_nan
from cases.production import Served

WRITABLE: tuple[str, ...] = ("out",)

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: every stride is free, and the lanes of `parts` and `out` are neighbours.

    parts: all bfloat16, float16 or float32. lse: natural logarithm; -inf, +inf and NaN mark an empty part, whose vector
    may hold anything. out: the dtype of the parts or float32.
    """

    parts: Float[torch.Tensor, "parts rows heads lanes"]
    lse: Float32[torch.Tensor, "parts rows heads"]
    out: Float[torch.Tensor, "rows heads lanes"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The merged rows and their natural log-sum-exp, -inf where all parts are empty."""

    out: Float[torch.Tensor, "rows heads lanes"]
    lse: Float32[torch.Tensor, "rows heads"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeCase(Case):
    """The axes of a merge of parts.

    dtype: of the parts. output: the dtype of the answer, `same` as the parts'. weights: how the log-sum-exps of a row lie to
    one another; `dominant` one is 30 above, `underflow` one is 200 above, `staircase` each is 3 above the one before, `large`
    all lie near 10000 and `deep` near -10000, `hairline` two steps of fp32 apart there. empty: which parts are empty; `mixed`
    all, none, all but one and some, row by row. empty_lse: what marks an empty part. garbage: what an empty part holds.
    layout: of the parts; `rows_first` keeps the parts of a row together, `heads_first` the rows of a head. lse_layout: how
    [parts, rows, heads] lies in memory. values: `integer_exact` sums are exact, `onehot_exact` each part has a lane of its
    own, `cancelling` neighbours nearly cancel, `nan_lane` a part that is not empty has a NaN. reach: rows of which tensor lie
    beyond 2^31 elements.
    """

    op: ClassVar[str] = "dense_mla.merge_parts"

    parts: int = 3
    rows: int = 3
    heads: int = 3
    lanes: int = 64
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    output: Literal["same", "float32"] = "same"
    weights: Literal[
        "near", "equal", "spread", "dominant", "underflow", "staircase", "large", "deep", "hairline",
    ] = "near"  # fmt: skip
    empty: Literal["none", "first", "last", "some", "all_but_one", "mixed", "all"] = "none"
    empty_lse: Literal["minus_infinity", "plus_infinity", "nan"] = "minus_infinity"
    garbage: Literal["nan", "infinity", "huge"] = "nan"
    layout: Literal["contiguous", "padded", "rows_first", "heads_first"] = "contiguous"
    lse_layout: Literal["contiguous", "heads_first", "parts_last"] = "contiguous"
    out_layout: Literal["contiguous", "padded", "heads_first"] = "contiguous"
    values: Literal["randn", "integer_exact", "onehot_exact", "cancelling", "wide", "subnormal", "nan_lane"] = "randn"
    reach: Literal["near", "far_parts", "far_out"] = "near"


CASE = MergeCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "parts": (1, 2, 3, 4, 8, 33, 65),
    "rows": (1, 2, 5),
    "heads": (1, 3, 8),
    "lanes": (64, 512, 128, 5),
    "dtype": ("bfloat16", "float16", "float32"),
    "output": ("same", "float32"),
    "weights": ("near", "equal", "spread", "dominant", "underflow", "staircase", "large", "deep", "hairline"),
    "empty": ("none", "first", "last", "some", "all_but_one", "mixed", "all"),
    "empty_lse": ("minus_infinity", "plus_infinity", "nan"),
    "garbage": ("nan", "infinity", "huge"),
    "layout": ("contiguous", "padded", "rows_first", "heads_first"),
    "lse_layout": ("contiguous", "heads_first", "parts_last"),
    "out_layout": ("contiguous", "padded", "heads_first"),
    "values": ("randn", "integer_exact", "onehot_exact", "cancelling", "wide", "subnormal", "nan_lane"),
    "reach": ("near",),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "parts": (1, 2, 3, 4, 5, 8, 33, 64, 65, 256, 300),
    "rows": (1, 2, 5, 33),
    "heads": (1, 3, 8, 16, 96),
}
RANDOM_CASES = 12

_BASE = MergeCase()
REGRESSIONS: tuple[str, ...] = (
    # Nothing to merge, and no part to merge it from.
    _BASE.varied(rows=0).id,
    # A power of two of equal parts is a mean without a rounding, whatever the number of empty ones among them.
    *(_BASE.varied(parts=n, weights="equal", values="integer_exact", dtype="float32").id for n in (2, 4, 8, 64)),
    # As many parts as a large machine has compute units, and more.
    _BASE.varied(parts=256, rows=1, weights="spread", output="float32").id,
    _BASE.varied(parts=300, rows=1, weights="near", empty="some", output="float32").id,
    # What decode on eight ranks merges.
    _BASE.varied(parts=8, rows=2, heads=16, lanes=512, weights="spread", empty="mixed").id,
    # Log-sum-exps whose exponentials overflow or vanish.
    _BASE.varied(weights="large", dtype="float32").id,
    _BASE.varied(weights="deep", dtype="float32").id,
    # Parts and rows that a product of 32 bits does not reach.
    _BASE.varied(reach="far_parts").id,
    _BASE.varied(reach="far_out").id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(parts=parts, rows=16, heads=heads, lanes=512)) for parts in (2, 8) for heads in (16, 128)
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "parts": (1, 4096),
    "rows": (0, 1 << 16),
    "heads": (1, 1024),
    "lanes": (1, 1024),
}


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, MergeCase)
    reasons = outside(case, _BOUNDS)
    if case.empty in ("first", "last", "some") and case.parts < 2:
        reasons.append(f"empty={case.empty} needs two parts")
    if case.values == "cancelling" and case.parts < 2:
        reasons.append("values=cancelling needs two parts")
    if case.values == "nan_lane" and case.empty == "all":
        reasons.append("values=nan_lane needs a part that is not empty")
    if case.values == "nan_lane" and case.weights in ("dominant", "underflow", "staircase"):
        reasons.append("values=nan_lane needs parts that all weigh something")
    if case.reach == "far_parts" and (case.parts < 3 or case.layout != "contiguous" or case.dtype == "float32"):
        reasons.append("reach=far_parts needs three parts of two-byte elements and has a layout of its own")
    if case.reach == "far_out" and (case.rows < 3 or case.out_layout != "contiguous" or case.output != "same"):
        reasons.append("reach=far_out needs three rows and has an out_layout of its own")
    if case.reach == "far_out" and case.dtype == "float32":
        reasons.append("reach=far_out needs elements of two bytes")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it."""
    assert isinstance(case, MergeCase)
    return case.rows * case.heads * -(-case.parts // 16) > 400


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, MergeCase)
    draw = Draw(case.seed, case.op)
    dtype = DTYPES[case.dtype]
    empty = _empty(case, draw)
    values = _values(case, draw, dtype)
    values[empty] = {"nan": math.nan, "infinity": -math.inf, "huge": float(torch.finfo(dtype).max)}[case.garbage]
    lse = exponents(case.weights, (case.parts, case.rows, case.heads), draw)
    lse[empty] = {"minus_infinity": -math.inf, "plus_infinity": math.inf, "nan": math.nan}[case.empty_lse]
    parts = _parts_memory(case, dtype)
    parts.copy_(values)
    with_one_nan(parts)
    lse_memory = _lse_memory(case)
    lse_memory.copy_(lse)
    return Inputs(parts=parts, lse=lse_memory, out=_out_memory(case, dtype))


def exponents(weights: str, shape: Sequence[int], draw: Draw) -> torch.Tensor:
    """fp32 log-sum-exps [parts, ...] that lie to one another as the word says; see `MergeCase`."""
    count = shape[0]
    noise = draw.normal_like("exponents", shape)
    base = draw.normal_like("base", (1, *shape[1:])) * 3
    number = torch.arange(count).reshape(-1, *[1] * (len(shape) - 1))
    chosen = draw.integers("chosen", (1, *shape[1:]), 0, count)
    if weights == "equal":
        return base.expand(shape).clone()
    if weights == "spread":
        return base + noise * 8
    if weights in ("dominant", "underflow"):
        return base + noise + (number == chosen) * (30.0 if weights == "dominant" else 200.0)
    if weights == "staircase":
        return base + noise + 3.0 * number
    if weights in ("large", "deep"):
        return (10000.0 if weights == "large" else -10000.0) + noise * 2
    if weights == "hairline":
        return 10000.0 + draw.integers("step", shape, 0, 3).float() * 2.0**-10
    return base + noise


def _empty(case: MergeCase, draw: Draw) -> torch.Tensor:
    """bool [parts, rows, heads]: which parts are empty."""
    shape = (case.parts, case.rows, case.heads)
    number = torch.arange(case.parts)[:, None, None].expand(shape)
    some = draw.chance("some", shape, 1, 2)
    one = number != draw.integers("one", (1, case.rows, case.heads), 0, case.parts)
    kinds = {
        "none": torch.zeros(shape, dtype=torch.bool), "first": number < case.parts // 2,
        "last": number >= case.parts - case.parts // 2, "some": some, "all_but_one": one,
        "all": torch.ones(shape, dtype=torch.bool),
    }  # fmt: skip
    if case.empty != "mixed":
        empty = kinds[case.empty].clone()
    else:
        order = ("some", "all", "none", "all_but_one")
        empty = torch.stack([kinds[order[row % 4]][:, row] for row in range(case.rows)], 1) if case.rows else some
    if case.values == "nan_lane":
        empty[case.parts // 2] = False
    return empty


def _values(case: MergeCase, draw: Draw, dtype: torch.dtype) -> torch.Tensor:
    """The vectors [parts, rows, heads, lanes] in fp32, before they are rounded to the dtype."""
    shape = (case.parts, case.rows, case.heads, case.lanes)
    values = draw.normal_like("values", shape)
    if case.values == "integer_exact":
        return draw.integers("small", shape, -127, 128).float() / 32
    if case.values == "onehot_exact":
        lane = torch.arange(case.lanes)
        return (torch.arange(case.parts)[:, None, None, None] % case.lanes == lane).float().expand(shape).clone()
    if case.values == "cancelling":
        sign = 1.0 - 2.0 * (torch.arange(case.parts) % 2)
        return (values[:1] + values / 64) * sign[:, None, None, None]
    if case.values == "wide":
        return torch.ldexp(values, draw.integers("scale", (case.parts, 1, 1, 1), -10, 11))
    if case.values == "subnormal":
        return values * {torch.float16: 2.0**-18, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}[dtype]
    if case.values == "nan_lane":
        values[case.parts // 2, :, :, case.lanes // 2] = math.nan
    return values


def _parts_memory(case: MergeCase, dtype: torch.dtype) -> torch.Tensor:
    parts, rows, heads, lanes = case.parts, case.rows, case.heads, case.lanes
    if case.reach == "far_parts":
        return guarded((parts, rows, heads, lanes), dtype, gaps=(far_gap(parts, rows * heads * lanes), 0, 0))
    if case.layout == "padded":
        return guarded((parts, rows, heads, lanes), dtype, gaps=(64, 16, 8))
    if case.layout == "rows_first":
        return guarded((rows, parts, heads, lanes), dtype, gaps=(0, 8, 0)).transpose(0, 1)
    if case.layout == "heads_first":
        return guarded((parts, heads, rows, lanes), dtype, gaps=(0, 8, 0)).transpose(1, 2)
    return guarded((parts, rows, heads, lanes), dtype)


def _lse_memory(case: MergeCase) -> torch.Tensor:
    parts, rows, heads = case.parts, case.rows, case.heads
    if case.lse_layout == "heads_first":
        return guarded((parts, heads, rows), torch.float32, gaps=(5, 0)).transpose(1, 2)
    if case.lse_layout == "parts_last":
        return guarded((rows, heads, parts), torch.float32, gaps=(3, 1)).permute(2, 0, 1)
    return guarded((parts, rows, heads), torch.float32)


def _out_memory(case: MergeCase, dtype: torch.dtype) -> torch.Tensor:
    rows, heads, lanes = case.rows, case.heads, case.lanes
    out = torch.float32 if case.output == "float32" else dtype
    if case.reach == "far_out":
        return guarded((rows, heads, lanes), out, gaps=(far_gap(rows, heads * lanes), 0))
    if case.out_layout == "padded":
        return guarded((rows, heads, lanes), out, gaps=(64, 8))
    if case.out_layout == "heads_first":
        return guarded((heads, rows, lanes), out, gaps=(8, 0)).transpose(0, 1)
    return guarded((rows, heads, lanes), out)
