"""How far may a machine land from the sums of a grouped product whose terms are exact?

    out[t, g, r] = sum_k left[t, g, k] * right[g, r, k]

With S = sum_k |left_k right_k|, n products that are not zero, u the unit roundoff of the accumulator and z the Hoeffding
factor sqrt(2 ln(2 / 1e-12)), n - 1 additions leave

    min(n - 1, z sqrt(n) + 16) * u * S

whatever their order; matrix units that truncate add many products before each of their roundings. Where all products of
an element are multiples of some 2^e >= 2^-126 with S < 2^(e + 24), every partial sum is a number of fp32 and the budget
is 0: bit for bit. So it is for a single product.
"""

import math

import torch

from cases.precision import UNIT_ROUNDOFF, Precision

HOEFFDING = math.sqrt(2 * math.log(2 / 1e-12))
_NORMAL_EXPONENT = -126
_FLUSHED = 4 * 2.0**_NORMAL_EXPONENT
_FP32_DIGITS = 24
# Wide enough for every operand here: a bfloat16 number, or an e4m3 code times a power of two, has 8 digits at most.
_OPERAND_DIGITS = 8
_NO_GRAIN = 1 << 12


def grouped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[tokens, groups, width] times [groups, rank, width] over the width: [tokens, groups, rank]."""
    return torch.einsum("tgk,grk->tgr", left, right)


def budget(left: torch.Tensor, right: torch.Tensor, precision: Precision) -> torch.Tensor:
    """What the sums may be off by before the last rounding, float64; 0 where an operand is NaN, since that decides.

    The operands are float64 with at most 8 significant digits.
    """
    size = grouped(left.abs(), right.abs())
    count = grouped((left != 0).double(), (right != 0).double())
    additions = (count - 1).clamp(min=0)
    steps = torch.minimum(additions, HOEFFDING * count.sqrt() + 16)
    allowed = steps * UNIT_ROUNDOFF[precision.accumulate] * size + _FLUSHED * precision.flushes
    grain = _grain(left)[:, :, None] + _grain(right)[None]
    fits = (size < torch.ldexp(torch.ones_like(size), grain + _FP32_DIGITS)) & (grain >= _NORMAL_EXPONENT)
    settled = (fits & (precision.accumulate == "float32")) | (additions == 0)
    known = settled & ((size == 0) | (size >= _FLUSHED))
    return torch.where(known | ~torch.isfinite(size), 0.0, allowed)


def _grain(operand: torch.Tensor) -> torch.Tensor:
    """For each row the largest e such that all its finite numbers are multiples of 2^e."""
    mantissa, exponent = torch.frexp(torch.nan_to_num(operand, nan=0.0, posinf=0.0, neginf=0.0))
    digits = (mantissa.abs() * 2**_OPERAND_DIGITS).long()
    lowest_digit = torch.frexp((digits & -digits).double())[1] - 1
    return torch.where(digits > 0, exponent - _OPERAND_DIGITS + lowest_digit, _NO_GRAIN).amin(-1)
