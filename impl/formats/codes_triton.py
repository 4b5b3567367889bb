"""How do our own kernels turn numbers into codes of small formats and back?

Integer arithmetic and exact float32 operations only: no machine's converts, no type that a backend may lack (FNUZ on
NVIDIA), no subnormal float32 operand or result that a machine might flush. The same bits on gfx942, gfx950, CUDA and in
Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Layout(NamedTuple):
    """Fraction bits, exponent bias, sign bit, code of the largest number, NaN code (0: none), whether -0 exists."""

    fraction: int
    bias: int
    sign: int
    largest: int
    nan: int
    signed_zero: bool


LAYOUTS = {
    "float8_e4m3fn": Layout(3, 7, 0x80, 0x7E, 0x7F, True),
    "float8_e4m3fnuz": Layout(3, 8, 0x80, 0x7F, 0x80, False),
    "float4_e2m1fn": Layout(1, 1, 0x8, 0x7, 0, True),
}

_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def encode_code(
    bits, FRACTION: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr,
    SIGNED_ZERO: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """int32 codes of float32 patterns (int32), to nearest even; OVERFLOW is `saturate`, `saturate_finite` or `nan`."""
    DROP: tl.constexpr = 23 - FRACTION
    LOWEST: tl.constexpr = (128 - BIAS) << 23
    # A sum with this holds the number of smallest steps, rounded to even, in its low bits: one is its last place.
    MAGIC: tl.constexpr = (151 - BIAS - FRACTION) << 23
    magnitude = tl.minimum(bits & 0x7FFFFFFF, _INFINITY)
    normal = (magnitude + ((1 << (DROP - 1)) - 1) + ((magnitude >> DROP) & 1)) >> DROP
    normal = normal - ((127 - BIAS) << FRACTION)
    magic = tl.full(bits.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    small = (tl.where(magnitude < LOWEST, magnitude, 0).to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True)
    code = tl.where(magnitude < LOWEST, small - MAGIC, normal)
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    beyond = code > LARGEST
    code = tl.minimum(code, LARGEST)
    negative = bits < 0
    if not SIGNED_ZERO:
        negative = negative & (code > 0)
    code = tl.where(negative, code | SIGN, code)
    if NAN != 0:
        if OVERFLOW == "nan":
            nan = nan | beyond
        elif OVERFLOW == "saturate_finite":
            nan = nan | (magnitude == _INFINITY)
        code = tl.where(nan, NAN, code)
    return code


@triton.jit
def decode_code(
    code, FRACTION: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """float32 bit patterns (int32) of int32 codes, whose high bits are clear."""
    magnitude = code & (SIGN - 1)
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS - FRACTION)
    small = (magnitude.to(tl.float32) * SMALLEST).to(tl.int32, bitcast=True)
    normal = (magnitude << (23 - FRACTION)) + ((127 - BIAS) << 23)
    bits = tl.where(magnitude < (1 << FRACTION), small, normal)
    bits = tl.where((code & SIGN) != 0, bits | -2147483648, bits)
    if NAN != 0:
        # With a signed zero the NaN code stands above the largest number, in both signs; else it is minus zero itself.
        nan = magnitude > LARGEST if SIGNED_ZERO else code == NAN
        bits = tl.where(nan, 0x7FC00000, bits)
    return bits


@triton.jit
def round_bfloat16(bits):
    """int32 bfloat16 patterns of float32 bit patterns, to nearest even; infinity stays, every NaN is 0x7FC0."""
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    magnitude = tl.minimum(bits & 0x7FFFFFFF, _INFINITY)
    code = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    code = tl.where(bits < 0, code | 0x8000, code)
    return tl.where(nan, 0x7FC0, code)


@triton.jit
def widen_bfloat16(patterns):
    """float32 bit patterns (int32) of int16 bfloat16 patterns."""
    return patterns.to(tl.int32) << 16


@triton.jit
def encode_power(bits, UP: tl.constexpr, OVERFLOW: tl.constexpr):
    """int32 E8M0 bytes of the magnitudes of float32 patterns: the next power of two, or the nearest (the middle up)."""
    magnitude = tl.minimum(bits & 0x7FFFFFFF, _INFINITY)
    if UP:
        byte = (magnitude + 0x7FFFFF) >> 23
        byte = tl.where(magnitude < 0x800000, (magnitude > 0x400000).to(tl.int32), byte)
    else:
        byte = (magnitude + 0x400000) >> 23
        byte = tl.where(magnitude < 0x800000, (magnitude >= 0x600000).to(tl.int32), byte)
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    if OVERFLOW == "nan":
        nan = nan | (byte > 254)
    elif OVERFLOW == "saturate_finite":
        nan = nan | (magnitude == _INFINITY)
    return tl.where(nan, 255, tl.minimum(byte, 254))


@triton.jit
def decode_power(byte, TOP: tl.constexpr):
    """float32 bit patterns (int32) of int32 E8M0 bytes; 255 becomes the pattern TOP."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where(byte == 255, TOP, bits)
