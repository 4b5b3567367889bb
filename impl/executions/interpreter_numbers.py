"""What is the value of a bf16 or fp8 code, and which code does a value round to?

Storage is what Triton's interpreter uses: bf16 in ``uint16``, every fp8 format in ``uint8``. Values are ``float32``, in
which all of these formats are exact. Rounding is to nearest even unless said otherwise.

Overflow follows the converts that Triton emits for AMD: a finite value beyond the largest finite code clamps to it and
NaN stays NaN. Infinity becomes the largest finite code where the format has no infinity (e4m3fn, e4m3fnuz, e5m2fnuz)
and stays infinity in e5m2: a declared choice, since what the hardware convert does with it is not documented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

BFLOAT16 = "bf16"
FP8_TYPES: dict[str, Any] = {
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e4b8": ml_dtypes.float8_e4m3fnuz,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp8e5b16": ml_dtypes.float8_e5m2fnuz,
}
PACKED = frozenset({BFLOAT16, *FP8_TYPES})

_LARGEST = {name: float(ml_dtypes.finfo(kind).max) for name, kind in FP8_TYPES.items()}
_VALUES = {name: np.arange(256, dtype=np.uint8).view(kind).astype(np.float32) for name, kind in FP8_TYPES.items()}
_FNUZ = frozenset({"fp8e4b8", "fp8e5b16"})
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E8M0 = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)


def decode(codes: Array, name: str) -> Array:
    """The float32 values of ``codes``, which are stored in the packed type that Triton calls ``name``."""
    if name == BFLOAT16:
        wide: Array = codes.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    values: Array = _VALUES[name].take(codes)
    return values


def encode(values: Array, name: str, toward_zero: bool = False) -> Array:
    """The codes of ``values`` (any float dtype, any layout) in the packed type that Triton calls ``name``."""
    if name == BFLOAT16:
        return _encode_bfloat16(values, toward_zero)
    return _encode_fp8(values, name, toward_zero)


def _encode_bfloat16(values: Array, toward_zero: bool) -> Array:
    if values.dtype == np.float64:
        values = _float64_to_odd_float32(values)
    values = np.ascontiguousarray(values, np.float32)
    if toward_zero:
        codes: Array = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        nan = np.isnan(values)
        return np.where(nan, codes | np.uint16(0x40), codes) if nan.any() else codes
    rounded: Array = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return rounded


def _float64_to_odd_float32(values: Array) -> Array:
    """float32 values that round to bf16 as the float64 ones would: truncated, the last bit saying that there was more.

    Two roundings to nearest in a row would be wrong just above a tie.
    """
    with np.errstate(over="ignore"):
        near = np.ascontiguousarray(values.astype(np.float32))
    bits = near.view(np.uint32)
    bits = bits - (np.abs(near) > np.abs(values))
    bits |= (near != values) & ~np.isnan(values)
    return bits.astype(np.uint32).view(np.float32)


def _encode_fp8(values: Array, name: str, toward_zero: bool) -> Array:
    largest = (
        values.dtype.type(_LARGEST[name]) if values.dtype != np.float16 else np.float16(min(_LARGEST[name], 65504))
    )
    clamped = np.clip(values, -largest, largest)
    if name == "fp8e5":
        infinite = np.isinf(values)
        if infinite.any():
            clamped = np.where(infinite, values, clamped)
    codes: Array = np.ascontiguousarray(clamped.astype(FP8_TYPES[name])).view(np.uint8)
    if toward_zero:
        away = np.abs(decode(codes, name)) > np.abs(clamped)
        # Codes are sign and magnitude, so one less is one step toward zero; unsigned zero has no 0x80.
        codes = np.where(away, codes - np.uint8(1), codes)
        if name in _FNUZ:
            codes = np.where(away & (codes == 0x80), np.uint8(0), codes)
    return codes


def float16_toward_zero(values: Array) -> Array:
    """``values`` as float16, truncated instead of rounded."""
    near = values.astype(np.float16)
    away = np.abs(near.astype(values.dtype)) > np.abs(values)
    toward: Array = np.nextafter(near, np.float16(0))
    return np.where(away, toward, near)


def to_integer(values: Array, dtype: np.dtype[Any]) -> Array:
    """``values`` truncated to an integer dtype as AMD's converts do: out of range saturates and NaN gives 0."""
    info = np.iinfo(dtype)
    whole = np.trunc(values.astype(np.float64))
    # float64 has no largest int64; everything from 2**63 up saturates.
    above, below = whole >= float(info.max), whole <= float(info.min)
    inside: Array = np.where(above | below | np.isnan(whole), 0.0, whole).astype(dtype)
    if above.any():
        inside = np.where(above, dtype.type(info.max), inside)
    if below.any():
        inside = np.where(below, dtype.type(info.min), inside)
    return inside


def through_float64(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """``function`` evaluated in float64 and rounded once to the dtype of its argument.

    NumPy's float32 transcendental functions depend on the vector unit of the CPU and miss exact answers (exp2 of an
    integer, log2 of a power of two) by an ulp; through float64 these are exact and the same everywhere.
    """

    def rounded_once(values: Array) -> Array:
        if values.dtype == np.float64:
            return function(values)
        return function(values.astype(np.float64)).astype(values.dtype)

    return rounded_once


exp2 = through_float64(np.exp2)
exp = through_float64(np.exp)
log2 = through_float64(np.log2)
log = through_float64(np.log)
sin = through_float64(np.sin)
cos = through_float64(np.cos)
tanh = through_float64(np.tanh)
rsqrt = through_float64(lambda x: 1.0 / np.sqrt(x))


def decode_e2m1(packed: Array, axis: int) -> Array:
    """The float32 values of 4-bit codes, two to a byte along ``axis``, low half first."""
    along = np.moveaxis(packed.view(np.uint8), axis, -1)
    values = np.empty((*along.shape[:-1], 2 * along.shape[-1]), np.float32)
    values[..., 0::2] = _E2M1[along & 15]
    values[..., 1::2] = _E2M1[along >> 4]
    return np.moveaxis(values, -1, axis)


def decode_e8m0(codes: Array) -> Array:
    """The float64 values of scale bytes: 2**(code - 127), and NaN for 255 (OCP MX)."""
    return _E8M0[codes.view(np.uint8)]
