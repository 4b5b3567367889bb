"""How far from the merge of partial softmax averages may an implementation land, whose rounding points are declared?

    m = max_r L_r,  w_r = b^(L_r - m),  Z = sum_r w_r,  L = m + log_b Z,  f_r = w_r / Z,  out = sum_r f_r o_r

With u32 = 2^-24, n ranks that count, x = exponential_ulps and y = systematic_ulps + 1, in natural units d_r = ln w_r:

    error of a power              e_r = u32 (x + y |d_r|)
    error of ln Z                 z = sum_r f_r e_r + (n - 1 + x + 4 |ln Z|) u32
    error of f_r, relative        g_r = z + half an ulp of L + u32 (x + y |ln f_r|)
    gathered, then summed         sum_r (g_r |f_r o_r| + half an ulp of f_r o_r) + (n - 2) half ulps of sum_r |f_r o_r|
    all to all                    sum_r g_r |f_r o_r| + (n + 1) u32 sum_r |f_r o_r|

The ulps of the third line are those of the answers' dtype: every rank rounds its share to it, and the collective adds in
it, in an order of its own. The last rounding of all is not in the budget. A rank that weighs less than e^-150 has weight
0 in fp32 and does not count; one that weighs less than e^-86 may be flushed.

Where one rank counts, its answer is the answer: bit for bit. Where the base is 2, the logarithms are integers and Z is a
power of two, the factors are exact (a power of 2 with an integer exponent is assumed exact, and so is its logarithm);
where then all shares lie on one grid that is fine enough for their sum, the budget is 0 too.

Source: our own derivation.
"""

import dataclasses
import math

import torch

from cases.dcp.combine import Base, Mode
from cases.precision import Precision
from oracle.check import half_ulp
from oracle.sparse_mla.softmax_budget import FLUSHED, U32

LN2 = math.log(2.0)
_GONE = -150.0
_SUBNORMAL = -86.0
_NORMAL = 2.0**-126
_NO_GRAIN = 1 << 12


@dataclasses.dataclass(frozen=True)
class Merged:
    """The merge in float64 and what an implementation may be off by before its last rounding.

    out, out_allowed: [rows, heads, lanes]; lse, lse_allowed: [rows, heads], to the base of the call; factors: [world, rows,
    heads], their relative errors in `factor_errors`.
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_allowed: torch.Tensor
    lse_allowed: torch.Tensor
    factors: torch.Tensor
    factor_errors: torch.Tensor


def merged(
    outs: torch.Tensor, lses: torch.Tensor, *, base: Base, mode: Mode, dtype: torch.dtype, precision: Precision
) -> Merged:
    """The merge of [world, rows, heads, lanes] and [world, rows, heads], and its budget.

    lses are float64, -inf where a rank had no key; what `outs` holds there is not read. dtype: that of the answers.
    """
    unit = 1.0 if base == "natural" else LN2
    top = lses.amax(0)
    lses = torch.where((lses - top) * unit < _GONE, -math.inf, lses)
    counts = lses > -math.inf
    top = torch.where(counts.any(0), top, 0.0)
    depth = torch.where(counts, (lses - top) * unit, 0.0)
    weight = torch.where(counts, depth.exp(), 0.0)
    total = weight.sum(0)
    number = counts.sum(0)
    lse = top + total.log() / unit
    factor = weight / total.clamp(min=1e-300)

    x, y = precision.exponential_ulps, precision.systematic_ulps + 1
    power_error = U32 * (x + y * depth.abs()) * counts
    alone = number <= 1
    total_error = (factor * power_error).sum(0) + U32 * (number - 1 + x + 4 * total.clamp(min=1).log())
    step = half_ulp(torch.where(counts.any(0), lse.abs(), 0.0), torch.float32) * unit
    factor_depth = factor.clamp(min=1e-300).log().abs()
    factor_error = total_error + step + U32 * (x + y * factor_depth)
    exact = alone
    if base == "two":
        whole = torch.where(counts, lses, 0.0)
        powers = (torch.frexp(total)[0] == 0.5) & ((whole == whole.round()) & (whole.abs() < 1 << 20)).all(0)
        exact = exact | powers
    total_error = torch.where(exact, 0.0, total_error)
    factor_error = torch.where(exact | ~counts, 0.0, factor_error)

    shape = outs.shape[1:]
    out, size, rounding, scaled, tiny = (torch.zeros(shape, dtype=torch.float64, device=outs.device) for _ in range(5))
    grain = torch.full(shape, _NO_GRAIN, device=outs.device, dtype=torch.int64)
    for rank in range(outs.shape[0]):
        # A rank at a time, so that memory is bounded by a few of their answers.
        here = counts[rank][..., None]
        own = torch.where(here, outs[rank].double(), 0.0)
        share = factor[rank][..., None] * own
        out += share
        share = share.abs()
        size += share
        scaled += share * factor_error[rank][..., None]
        rounding += half_ulp(share * (1 + factor_error[rank][..., None]), dtype) * (share > 0)
        flushed = (depth[rank] < _SUBNORMAL)[..., None] * own.abs() * 2 * _NORMAL
        tiny += flushed + FLUSHED * precision.flushes * ((own != 0) & (own.abs() < _NORMAL))
        grain = torch.minimum(grain, _grain(share))
    some = number[..., None]
    digits = 24 if mode == "all_to_all" else round(-math.log2(torch.finfo(dtype).eps)) + 1
    lowest = round(math.log2(torch.finfo(dtype).smallest_normal)) - digits + 1
    fits = (size < torch.ldexp(torch.ones_like(size), grain + digits)) & (grain >= lowest)
    known = exact[..., None] & (alone[..., None] | fits)
    if mode == "all_to_all":
        allowed = scaled + (some + 1) * U32 * size
    else:
        allowed = scaled + rounding + (some - 2).clamp(min=0) * half_ulp(size * 1.01, dtype)
    allowed = torch.where(known, 0.0, allowed + FLUSHED * precision.flushes) + tiny
    return Merged(
        out=out, lse=lse, out_allowed=torch.nan_to_num(allowed, nan=0.0, posinf=0.0), lse_allowed=total_error / unit,
        factors=factor, factor_errors=factor_error,
    )  # fmt: skip


def _grain(share: torch.Tensor) -> torch.Tensor:
    """For every element the largest e such that it is a multiple of 2^e, to 48 digits."""
    mantissa, exponent = torch.frexp(torch.nan_to_num(share, nan=0.0, posinf=0.0, neginf=0.0))
    digits = (mantissa * 2**48).long()
    lowest_digit = torch.frexp((digits & -digits).double())[1] - 1
    return torch.where(digits > 0, exponent - 48 + lowest_digit, _NO_GRAIN)
