"""How is a row turned, and how far off may a machine be that turns it in a narrower format?

The last lanes of a row form pairs of neighbours, a = x[2k] and b = x[2k + 1] counted from the first lane that turns,
and each pair turns in its plane by an angle of its own, of which a table holds the cosine c and the sine s:

    forward:  a' = a * c - b * s,  b' = b * c + a * s        inverse:  a' = a * c + b * s,  b' = b * c - a * s

Source: rotary embeddings in the interleaved pairing of GPT-J, tables as vLLM lays them out: all cosines, then all sines.

The bound. A result is p + q, two products. Each product may be rounded once or, in a fused operation, not at all, and
the sum is rounded once: with u the unit roundoff, |error| <= e_p + e_q + u * (|p + q| + e_p + e_q), where e_p is 0 for a
product that the format holds, else the larger of u * |p| and half the smallest subnormal number; a sum of exact
products that the format holds is exact. A machine that flushes subnormal numbers may lose a subnormal operand, product
or sum altogether.
"""

from collections.abc import Callable

import torch

from cases.precision import UNIT_ROUNDOFF, Precision

Factors = tuple[torch.Tensor, torch.Tensor]


def sum_of_products(left: Factors, right: Factors) -> torch.Tensor:
    """Every product and the sum are rounded once."""
    return left[0] * left[1] + right[0] * right[1]


def turn(
    rows: torch.Tensor,
    cos_sin: torch.Tensor,
    dtype: torch.dtype,
    *,
    inverse: bool = True,
    add: Callable[[Factors, Factors], torch.Tensor] = sum_of_products,
) -> torch.Tensor:
    """`rows` [..., heads, lanes] in `dtype` with the last lanes turned by `cos_sin` [..., rotary]; a new tensor.

    `dtype` is float32 or float64; `add` makes a lane of the factors of its two products.
    """
    out = rows.to(dtype, copy=True)
    first = rows.shape[-1] - cos_sin.shape[-1]
    for lane, (left, right) in enumerate(_terms(rows, cos_sin, dtype, inverse)):
        out[..., first + lane :: 2] = add(left, right)
    return out


def bound(rows: torch.Tensor, cos_sin: torch.Tensor, precision: Precision, *, inverse: bool = True) -> torch.Tensor:
    """How far from `turn` in float64 a machine with these rounding points may be: float64 [..., heads, lanes].

    `accumulate` is the format of products and sums. 0 in the lanes that stay, and where every step is exact.
    """
    budget = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    if precision.accumulate != "exact":
        first = rows.shape[-1] - cos_sin.shape[-1]
        for lane, (left, right) in enumerate(_terms(rows, cos_sin, torch.float64, inverse)):
            budget[..., first + lane :: 2] = _sum_error(left, right, precision)
    return budget


def carried(spread: torch.Tensor, cos_sin: torch.Tensor, power: int) -> torch.Tensor:
    """What the pairs' own errors become when they turn: |c|^n a + |s|^n b, and |c|^n b + |s|^n a for its partner.

    `spread` [..., heads, rotary] holds largest errors where `power` n is 1, variances where it is 2; `cos_sin` [..., rotary].
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = (
        part[..., None, :].to(spread.dtype).abs() ** power for part in (cos_sin[..., :half], cos_sin[..., half:])
    )
    even, odd = spread[..., 0::2], spread[..., 1::2]
    return torch.stack([cos * even + sin * odd, cos * odd + sin * even], -1).flatten(-2)


def refuse(rows: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, first: int) -> None:
    """Raises unless `rows` [tokens, heads, head_dim] can be turned from row `first` on by the table at `positions`.

    `TypeError` for another dtype of the table; `ValueError` for shapes, strides of lanes, counts, and positions outside
    the table.
    """
    if rows.dim() != 3 or not rows.is_floating_point():
        raise ValueError(f"rows={form(rows)}: should be floats of [tokens, heads, head_dim]")
    if rows.stride(2) != 1:
        raise ValueError(f"lane stride of rows={rows.stride(2)}: should be 1")
    rotary = cos_sin.shape[-1]
    if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32:
        raise TypeError(f"cos_sin={form(cos_sin)}: should be float32 of [positions, rotary]")
    if rotary <= 0 or rotary % 2:
        raise ValueError(f"rotary={rotary}: should be even and positive")
    if rotary >= rows.shape[2]:
        raise ValueError(f"rotary={rotary}: should be less than head_dim={rows.shape[2]}")
    if cos_sin.stride(1) != 1:
        raise ValueError(f"lane stride of cos_sin={cos_sin.stride(1)}: should be 1")
    if positions.dtype not in (torch.int32, torch.int64) or tuple(positions.shape) != tuple(rows.shape[:1]):
        raise ValueError(f"positions={form(positions)}: should be int32 or int64 of [{rows.shape[0]}]")
    if not 0 <= first <= rows.shape[0]:
        raise ValueError(f"first row to turn={first}: should be 0 to {rows.shape[0]}")
    used = positions[first:]
    if used.numel() and (int(used.min()) < 0 or int(used.max()) >= cos_sin.shape[0]):
        raise ValueError(f"positions={int(used.min())} to {int(used.max())}: should be 0 to {cos_sin.shape[0] - 1}")


def form(tensor: torch.Tensor) -> str:
    """Dtype and shape as messages spell them, `bfloat16[7, 3, 512]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _terms(
    rows: torch.Tensor, cos_sin: torch.Tensor, dtype: torch.dtype, inverse: bool
) -> tuple[tuple[Factors, Factors], tuple[Factors, Factors]]:
    """The factors of the two products whose sum is the even lane of each pair, and of those of the odd lane."""
    first, half = rows.shape[-1] - cos_sin.shape[-1], cos_sin.shape[-1] // 2
    even, odd = rows[..., first::2].to(dtype), rows[..., first + 1 :: 2].to(dtype)
    cos, sin = cos_sin[..., None, :half].to(dtype), cos_sin[..., None, half:].to(dtype)
    if not inverse:
        sin = -sin
    return ((even, cos), (odd, sin)), ((odd, cos), (-even, sin))


def _sum_error(left: Factors, right: Factors, precision: Precision) -> torch.Tensor:
    """The bound of left[0] * left[1] + right[0] * right[1]; float64 holds the products of float32 numbers exactly."""
    kept: torch.dtype = getattr(torch, precision.accumulate)
    unit = UNIT_ROUNDOFF[precision.accumulate]
    normal = torch.finfo(kept).smallest_normal if precision.flushes else 0.0
    errors = _product_error(left, kept, unit, normal) + _product_error(right, kept, unit, normal)
    total = sum_of_products(left, right)
    # The sum in float64 is itself rounded, by no more than a 2^-29th of a rounding of float32.
    rounded = (errors > 0) | ~_held(total, kept)
    errors = errors + torch.where(rounded, unit * (1 + 2.0**-28) * (total.abs() + errors), 0.0)
    lost = torch.where((total.abs() - errors < normal) & (total != 0), normal, 0.0)
    return torch.nan_to_num(errors + lost, nan=0.0, posinf=0.0)


def _product_error(factors: Factors, kept: torch.dtype, unit: float, normal: float) -> torch.Tensor:
    one, other = factors
    product = one * other
    size = product.abs()
    half_subnormal = torch.finfo(kept).smallest_normal * unit
    error = torch.where(_held(product, kept), 0.0, (unit * size).clamp(min=half_subnormal))
    tiny = (one.abs() < normal) | (other.abs() < normal) | (size <= normal)
    return torch.where(tiny & (normal > 0.0), torch.maximum(error, size), error)


def _held(value: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    return value.to(kept).double() == value
