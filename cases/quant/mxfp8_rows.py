"""What do we ask of a quantiser of rows to MXFP8: e4m3 codes, with a power-of-two scale for each 32 of them?

See `oracle.quant.mxfp8_rows` for the formula and for which scales are right.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded
from cases.production import Served

BLOCK = 32
_DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_PATTERNS: Mapping[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: finite bfloat16 or float32 rows of any strides, or a stack of them; lanes are a multiple of 32."""

    rows: Float[torch.Tensor, "*rows lanes"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """New tensors: codes in float8_e4m3fn, and the scale bytes of blocks of 32 lanes, in the order of the lanes."""

    codes: Float[torch.Tensor, "*rows lanes"]
    scales: UInt8[torch.Tensor, "*rows lanes/32"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantiseCase(Case):
    """The axes of the MXFP8 quantiser.

    stack: 0 for rows, else how many such arrays of rows lie in a stack. tokens: rows. lanes: numbers a row. layout:
    `transposed` rows have lanes that lie apart. reach: whether rows lie beyond 2^31 elements. values: `amax_edge` blocks
    whose largest magnitude is 448 or 224 times a power of two, or a neighbour of it; `band` blocks whose largest
    magnitude lies up to 80 float32 numbers above 448 times a power of two; `outlier` one lane of a block far larger
    than the others; `negative` the same, negative, the others positive; `ties` middles between codes; `subnormal` up to
    a little above the smallest normal number; `wide` any finite number; `huge` near the largest.
    """

    op: ClassVar[str] = "quant.mxfp8_rows"

    stack: int = 0
    tokens: int = 7
    lanes: int = 512
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    layout: Literal["contiguous", "strided", "transposed"] = "contiguous"
    reach: Literal["near", "far"] = "near"
    values: Literal[
        "randn", "zeros", "negative_zero", "amax_edge", "band", "outlier", "negative", "ties", "subnormal", "wide",
        "huge",
    ] = "randn"  # fmt: skip


CASE = QuantiseCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "stack": (0, 1, 3),
    "tokens": (0, 1, 2, 7, 65),
    "lanes": (32, 64, 96, 512, 1056),
    "dtype": ("bfloat16", "float32"),
    "layout": ("contiguous", "strided", "transposed"),
    "reach": ("near",),
    "values": (
        "randn", "zeros", "negative_zero", "amax_edge", "band", "outlier", "negative", "ties", "subnormal", "wide",
        "huge",
    ),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"tokens": (0, 1, 2, 7, 65, 129, 257), "lanes": (32, 64, 96, 512, 4096)}

RANDOM_CASES = 30

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "stack": (0, 1 << 8),
    "tokens": (0, 1 << 16),
    "lanes": (BLOCK, 1 << 16),
}

_BASE = QuantiseCase()
REGRESSIONS: tuple[str, ...] = (
    # A block of zeros, whose scale is the smallest: dividing by it is dividing by a subnormal number.
    _BASE.varied(values="zeros").id,
    _BASE.varied(values="amax_edge", tokens=65).id,
    _BASE.varied(values="amax_edge", tokens=65, dtype="float32").id,
    _BASE.varied(values="band", tokens=65, dtype="float32").id,
    _BASE.varied(values="subnormal", dtype="float32").id,
    # A stack, as of the experts' activations, and rows that no 32-bit product of row and stride reaches.
    _BASE.varied(stack=3, dtype="float32", layout="strided").id,
    _BASE.varied(tokens=3, reach="far").id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(tokens=tokens, lanes=lanes), arches=("gfx950",))
    for tokens, lanes in ((64, 4096), (256, 7168), (1, 16384))
)


def forbid(case: QuantiseCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.lanes % BLOCK:
        reasons.append(f"lanes={case.lanes}: should be a multiple of {BLOCK}")
    if case.values == "band" and case.dtype == "bfloat16":
        reasons.append("values=band: should be something else for bfloat16, which has no such numbers")
    if case.tokens == 0 and case.values != "randn":
        reasons.append(f"values={case.values}: should be randn where there are no rows")
    if case.reach == "far":
        if case.tokens < 3:
            reasons.append("reach=far: should be near for fewer than 3 rows")
        if case.stack or case.layout != "contiguous" or case.dtype == "float32":
            reasons.append("reach=far: should be near but for contiguous bfloat16 rows without a stack")
    return reasons


def heavy(case: QuantiseCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return max(1, case.stack) * case.tokens * case.lanes > 300_000


def build(case: QuantiseCase) -> Inputs:
    """The inputs of a case."""
    draw = Draw(case.seed, case.op)
    dtype = _DTYPES[case.dtype]
    shape = (case.tokens, case.lanes) if case.stack == 0 else (case.stack, case.tokens, case.lanes)
    if case.reach == "far":
        rows = guarded(shape, dtype, gaps=(far_gap(case.tokens, case.lanes),))
    elif case.layout == "transposed":
        rows = guarded((*shape[:-2], case.lanes, case.tokens), dtype, gaps=(4,) * (len(shape) - 1)).mT
    else:
        gap = 24 if case.layout == "strided" else 0
        rows = guarded(shape, dtype, gaps=(gap,) * (len(shape) - 1))
    rows.copy_(values_of(case.values, draw.within("rows"), (*shape[:-1], case.lanes // BLOCK), dtype))
    return Inputs(rows)


def values_of(values: str, draw: Draw, blocks: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of bfloat16 or float32 in blocks of 32 lanes, of one of the kinds that `QuantiseCase` names."""
    shape = (*blocks, BLOCK)
    signs = draw.integers("sign", shape, 0, 2)
    powers = torch.ldexp(torch.ones(blocks), draw.integers("power", blocks, -6, 7))[..., None]
    normal = draw.normal_like("normal", shape)
    lane = draw.integers("lane", (*blocks, 1), 0, BLOCK)
    largest_sign = torch.where(draw.integers("largest_sign", (*blocks, 1), 0, 2) > 0, -1.0, 1.0)
    integer = _PATTERNS[dtype]
    top = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(integer))
    fraction = round(1 / torch.finfo(dtype).eps)

    def patterns(bits: torch.Tensor) -> torch.Tensor:
        magnitude = bits.to(integer).view(dtype)
        return torch.where(signs > 0, -magnitude, magnitude).flatten(-2)

    if values == "zeros":
        return torch.zeros(shape, dtype=dtype).flatten(-2)
    if values == "negative_zero":
        # Some lanes are so small that they underflow to zero under the scale of one that is not.
        tiny = torch.where(draw.chance("tiny", shape, 1, 4), 2.0**-60, 0.0)
        rows = torch.where(signs > 0, -tiny, tiny)
        rows[..., 0] = torch.where(draw.chance("not_tiny", blocks, 1, 2), 1.0, rows[..., 0])
        return rows.to(dtype).flatten(-2)
    if values == "subnormal":
        return patterns(draw.integers("bits", shape, 0, fraction + fraction // 8))
    if values == "wide":
        return patterns(draw.integers("bits", shape, 0, top + 1))
    if values == "huge":
        return patterns(draw.integers("bits", shape, top + 1 - 2 * fraction, top + 1))
    if values == "ties":
        halves = draw.integers("halves", shape, -255, 256)
        return (halves.scatter(-1, lane, 256) * powers).to(dtype).flatten(-2)
    if values in ("amax_edge", "band"):
        exponent = draw.integers("exponent", (*blocks, 1), -133, 120)
        limit = torch.where(draw.chance("half", (*blocks, 1), 1, 4), 224.0, 448.0)
        steps = draw.integers("step", (*blocks, 1), -2, 3)
        if values == "band":
            limit = torch.full_like(limit, 448.0)
            steps = draw.integers("step", (*blocks, 1), 0, 81)
        edge = torch.from_numpy(np.ldexp(limit.double().numpy(), exponent.numpy())).to(dtype).view(integer).long()
        largest = (edge + steps).to(integer).view(dtype).double()
        small = (normal.double() * largest * 2.0**-7).to(dtype)
        return small.scatter(-1, lane, (largest * largest_sign).to(dtype)).flatten(-2)
    if values == "outlier":
        return (normal * powers).to(dtype).scatter(-1, lane, (2.0**10 * powers * largest_sign).to(dtype)).flatten(-2)
    if values == "negative":
        others = (normal.abs() * powers).to(dtype)
        return others.scatter(-1, lane, (-(normal[..., :1].abs() + 4.0) * powers).to(dtype)).flatten(-2)
    return (normal * powers).to(dtype).flatten(-2)
