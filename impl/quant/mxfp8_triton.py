"""How do our own kernels quantise blocks of 32 float32 numbers to MXFP8?

By integer arithmetic on their bit patterns: no logarithm, no division, no subnormal float32 operand that a machine
might flush. The same bits on gfx942, gfx950, CUDA and in Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import triton
import triton.language as tl

from impl.formats.codes_triton import encode_code

_SMALLEST_NORMAL = tl.constexpr(0x800000)
# The fraction field of 448 = 1.75 * 2^8.
_LIMIT_FRACTION = tl.constexpr(0x600000)
_SIGN = tl.constexpr(-2147483648)


@triton.jit
def quantise_blocks(bits):
    """int32 codes of int32 patterns [..., blocks, 32] of finite float32 numbers, and the int32 scale bytes."""
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=len(bits.shape) - 1)
    # The clamp takes a subnormal maximum, whose exponent field is 0, to scale 0 as well.
    byte = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > _LIMIT_FRACTION).to(tl.int32)
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    # 2^(127 - byte) is normal for every byte, unlike 2^(byte - 127). A subnormal number is its fraction field times
    # 2^-149; where 2^(-22 - byte) would be subnormal itself, the code is that of zero whatever the power.
    each = tl.expand_dims(byte, len(bits.shape) - 1)
    power = ((254 - each) << 23).to(tl.float32, bitcast=True)
    small_power = (tl.maximum(105 - each, 1) << 23).to(tl.float32, bitcast=True)
    normal = tl.where(magnitude < _SMALLEST_NORMAL, 0, magnitude).to(tl.float32, bitcast=True) * power
    small = (magnitude & 0x7FFFFF).to(tl.float32) * small_power
    scaled = tl.where(magnitude < _SMALLEST_NORMAL, small, normal).to(tl.int32, bitcast=True)
    return encode_code(scaled | (bits & _SIGN), 3, 7, 0x80, 0x7E, 0x7F, True, "saturate"), byte
