"""How are the parts of one softmax merged, and how far from the exact merge may fp32 arithmetic land?

A part i of a row brings a value vector v_i, an exponent x_i and a mass z_i (1 where the part is already normalised). With
base b, e or 2, and m the largest exponent,

    w_i = b^(x_i - m),   Z = sum_i z_i w_i,   out = sum_i w_i v_i / Z,   lse = ln(b) * (m + log_b Z)

A part whose exponent is -inf is empty: its vector is left out, not multiplied by 0. Without a part, or with Z = 0, out
is 0 and lse is -inf.

Let u = 2^-24, n the parts that weigh anything, d_i = x_i - m, steps = min(n - 1, z sqrt(n) + 16) with the Hoeffding factor
z = sqrt(2 ln(2 / 1e-12)), a_i = w_i / Z and S = sum_i a_i |v_i|. A weight is off by e_i = u (n E + 3 |d_i|) of itself, E
being the error of the exponential in u, and by nothing where d_i = 0. Before the last rounding out may be off by

    sum_i a_i e_i |v_i - z_i out|   +   u (4 steps + 6) S   +   A u (|lse| + |ln Z| + 1) |out|   +   what underflows

where A, `systematic_ulps`, is declared by those who take weights against the rounded lse and do not divide; and lse by the
relative error of Z and the roundings of its own formula. Where one part alone weighs anything and its mass is 1, or all
weights are powers of two, Z is one and the sums are exact in fp32, the budget is 0: bit for bit.

Source: our own derivation.
"""

import dataclasses
import math

import torch

from cases.precision import Precision

U32 = 2.0**-24
HOEFFDING = math.sqrt(2 * math.log(2 / 1e-12))
LN2 = math.log(2.0)
_SMALLEST_NORMAL = 2.0**-126
_FLUSHED = 4 * _SMALLEST_NORMAL
_SMALLEST_HALF = 2.0**-150
# Natural exponents: below the first a weight may be a subnormal fp32 number, below the second it is 0.
_SUBNORMAL_BELOW = -80.0
_NOTHING_BELOW = -110.0
_FP32_DIGITS = 24


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of all rows: values [parts, rows, heads, lanes], exponents and masses [parts, rows, heads].

    An exponent of -inf marks an empty part, whose values and mass may be anything. masses None: all 1. base_two: the
    exponents count in base 2 rather than e.
    """

    values: torch.Tensor
    exponents: torch.Tensor
    masses: torch.Tensor | None = None
    base_two: bool = False


@dataclasses.dataclass(frozen=True)
class Merge:
    """The merged rows in float64 with what they may be off by before their last rounding: out and its budget
    [rows, heads, lanes], lse and its budget [rows, heads]."""

    out: torch.Tensor
    lse: torch.Tensor
    out_allowed: torch.Tensor
    lse_allowed: torch.Tensor


def merged(parts: Parts, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out [rows, heads, lanes] and natural lse [rows, heads] in `dtype`, a row at a time."""
    _, rows, heads, lanes = parts.values.shape
    out = torch.zeros((rows, heads, lanes), dtype=dtype, device=parts.values.device)
    lse = torch.full((rows, heads), -math.inf, dtype=dtype, device=parts.values.device)
    for row in range(rows if parts.values.shape[0] else 0):
        values, exponents, masses = _row(parts, row, dtype)
        top = exponents.amax(0)
        distance = torch.where(torch.isneginf(exponents), -math.inf, exponents - top)
        weight = torch.exp2(distance) if parts.base_two else torch.exp(distance)
        total = (weight * masses).sum(0)
        # A NaN is no reason to call a row empty.
        live = total != 0
        out[row] = torch.where(live[:, None], (weight[..., None] * values).sum(0) / total[:, None], 0.0)
        log = (top + total.log2()) * LN2 if parts.base_two else top + total.log()
        lse[row] = torch.where(live, log, -math.inf)
    return out, lse


def budget(parts: Parts, precision: Precision) -> Merge:
    """The exact merge and its budget for an implementation with these rounding points."""
    out, lse = merged(parts, torch.float64)
    allowed, lse_allowed = torch.zeros_like(out), torch.zeros_like(lse)
    for row in range(out.shape[0] if parts.values.shape[0] else 0):
        known, allowed[row], lse_allowed[row] = _row_budget(parts, row, out[row], lse[row], precision)
        out[row] = known
    return Merge(out, lse, allowed, lse_allowed)


def _row(parts: Parts, row: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [parts, heads, lanes], exponents and masses [parts, heads] of a row; those of empty parts are 0, -inf and 0."""
    exponents = parts.exponents[:, row].to(dtype)
    empty = torch.isneginf(exponents)
    masses = torch.ones_like(exponents) if parts.masses is None else parts.masses[:, row].to(dtype)
    values = parts.values[:, row].to(dtype).masked_fill(empty[..., None], 0.0)
    return values, exponents, masses.masked_fill(empty, 0.0)


def _row_budget(
    parts: Parts, row: int, out: torch.Tensor, lse: torch.Tensor, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row's out as it is known best, its budget [heads, lanes] and that of its lse [heads]."""
    values, exponents, masses = _row(parts, row, torch.float64)
    top = exponents.amax(0)
    own = torch.where(torch.isneginf(exponents), -math.inf, exponents - top)
    distance = own * (LN2 if parts.base_two else 1.0)
    weight = torch.where(distance > _NOTHING_BELOW, distance.exp(), 0.0)
    if parts.base_two:
        # Whole exponents give exact weights.
        weight = torch.where(distance > _NOTHING_BELOW, torch.exp2(own), 0.0)
    total = (weight * masses).sum(0)
    live = total > 0
    count = (weight > 0).sum(0).double()
    divisor = torch.where(live, total, 1.0)
    share = weight / divisor
    steps = torch.minimum((count - 1).clamp(min=0), HOEFFDING * count.sqrt() + 16)
    exact_weight = (own == 0) | (parts.base_two & (own == own.round()) & (own > -126.0))
    error = U32 * (precision.exponential_ulps * count + 3 * distance.abs().nan_to_num(posinf=0.0))
    error = torch.where(exact_weight | (weight == 0), 0.0, error)

    size = (share[..., None] * values.abs()).sum(0)
    moved = (share * error)[..., None] * (values - masses[..., None] * out)
    allowed = moved.abs().sum(0) + U32 * (4 * steps + 6)[:, None] * size
    logarithm = divisor.log().abs().clamp(min=1.0)
    anchored = precision.systematic_ulps * U32 * (torch.where(live, lse, 0.0).abs() + logarithm)
    allowed = allowed + anchored[:, None] * out.abs()
    underflowing = (distance < _SUBNORMAL_BELOW) & ~torch.isneginf(distance)
    lost = (underflowing[..., None] * values.abs()).sum(0) + precision.flushes * count[:, None]
    allowed = allowed + (_FLUSHED * lost + _SMALLEST_HALF * (4 * steps + 6)[:, None]) / divisor[:, None].clamp(max=1.0)

    alone = (count == 1) & (masses == 1).all(0) if parts.masses is None else torch.zeros_like(live)
    summed = (weight[..., None] * values).sum(0)
    exact_sums = (
        (exact_weight | (weight == 0)).all(0) & _power_of_two(total) & _fits((weight * masses)[..., None])[:, 0]
    )
    exact = exact_sums[:, None] & _fits(weight[..., None] * values)
    known = torch.where(exact | alone[:, None], summed / divisor[:, None], out)
    tiny = (known != 0) & (known.abs() < _SMALLEST_NORMAL)
    exact = (exact & (precision.systematic_ulps == 0)) | alone[:, None]
    allowed = torch.where(exact, _FLUSHED * tiny * precision.flushes, allowed)
    allowed = torch.where(live[:, None], allowed, 0.0).nan_to_num(nan=0.0, posinf=0.0)

    relative = (share * masses * error).sum(0) + U32 * (2 * steps + (parts.masses is not None))
    lse_allowed = torch.where(alone, 0.0, relative + precision.exponential_ulps * U32 * logarithm)
    if parts.base_two:
        scale = torch.maximum(top.abs() * LN2, lse.abs())
        lse_allowed = lse_allowed + 3 * U32 * torch.where(live, scale, 0.0)
    return torch.where(live[:, None], known, 0.0), allowed, torch.where(live, lse_allowed, 0.0)


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    mantissa, _ = torch.frexp(values)
    return mantissa == 0.5


def _fits(terms: torch.Tensor) -> torch.Tensor:
    """Whether every partial sum of the terms [parts, heads, lanes] over the parts is a number of fp32, [heads, lanes]."""
    mantissa, exponent = torch.frexp(terms.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    digits = (mantissa.abs() * 2.0**53).long()
    lowest = torch.frexp((digits & -digits).double())[1] - 1
    grain = torch.where(digits > 0, exponent - 53 + lowest, 1 << 12).amin(0)
    size = terms.abs().sum(0)
    settled = (size < torch.ldexp(torch.ones_like(size), grain.clamp(max=900) + _FP32_DIGITS)) & (grain >= -126)
    return settled | (size == 0)
