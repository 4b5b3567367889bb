"""The helpers that the meanings of instructions are written with: bits, roundings and the small floats, for numba.

Everything here is the hardware's arithmetic on one value. Where the hardware is free within an ulp (exponential,
logarithm, reciprocal, root, sine), the correctly rounded value stands for it: computed in binary64, rounded once.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Array = np.ndarray[Any, Any]

f32, f64, u32, u64, i64 = np.float32, np.float64, np.uint32, np.uint64, np.int64

MODE_FP16_OVERFLOW = 1 << 23
"""MODE.FP16_OVFL: conversions to narrow floats clamp what overflows instead of giving infinity or NaN."""
MODE_FNUZ = 1 << 40
"""Not a bit of the register: the architecture's 8-bit floats are FNUZ (gfx942), else OCP (gfx950)."""


def _cast(source: Any, target: Any, build: Any) -> Any:
    @intrinsic
    def convert(context, value):
        def generate(unused, builder, signature, arguments):
            return build(builder, arguments[0])

        return target(source), generate

    return convert


_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
bits_of_f32 = _cast(types.float32, types.int64, lambda b, x: b.zext(b.bitcast(x, _INT32), _INT64))
f32_of = _cast(types.int64, types.float32, lambda b, x: b.bitcast(b.trunc(x, _INT32), ir.FloatType()))
bits_of_f64 = _cast(types.float64, types.uint64, lambda b, x: b.bitcast(x, _INT64))
f64_of = _cast(types.uint64, types.float64, lambda b, x: b.bitcast(x, ir.DoubleType()))
population = _cast(types.int64, types.int64, lambda b, x: b.ctpop(x))
population64 = _cast(types.uint64, types.int64, lambda b, x: b.ctpop(x))
_reverse = _cast(types.int64, types.int64, lambda b, x: b.zext(b.bitreverse(b.trunc(x, _INT32)), _INT64))
_FALSE = ir.Constant(ir.IntType(1), 0)
_leading = _cast(types.uint64, types.int64, lambda b, x: b.ctlz(x, _FALSE))
_trailing = _cast(types.uint64, types.int64, lambda b, x: b.cttz(x, _FALSE))


@intrinsic
def fma32(context, a, b, c):
    """a * b + c, rounded once."""

    def generate(unused, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def fma64(context, a, b, c):
    """a * b + c, rounded once."""

    def generate(unused, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


def _memory(bits: int) -> tuple[Any, Any]:
    plain = {8: types.uint8, 16: types.uint16, 32: types.uint32, 64: types.uint64}[bits]

    @intrinsic
    def load(context, address):
        def generate(unused, builder, signature, arguments):
            found = builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))
            found.align = 1
            return found

        return plain(types.int64), generate

    @intrinsic
    def store(context, address, value):
        def generate(unused, builder, signature, arguments):
            kept = builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))
            kept.align = 1
            return unused.get_dummy_value()

        return types.void(types.int64, plain), generate

    return load, store


load_u8, store_u8 = _memory(8)
load_u32, store_u32 = _memory(32)


@njit
def reverse_bits(a):
    return _reverse(i64(a))


@njit
def leading_zeros(a):
    """Of the 32-bit value."""
    return _leading(u64(i64(a) & 0xFFFFFFFF)) - 32


@njit
def leading_zeros64(a):
    return _leading(u64(a))


@njit
def trailing_zeros(a):
    return _trailing(u64(i64(a) & 0xFFFFFFFF))


@njit
def trailing_zeros64(a):
    return _trailing(u64(a))


@njit
def bits_of(a):
    return bits_of_f32(f32(a))


@njit
def extend(a, width):
    """The low `width` bits, as a signed number; 0 for no bits."""
    if width == 0:
        return i64(0)
    left = 64 - width
    return (i64(a) << left) >> left


@njit
def field(a, offset, width, size):
    """`width` bits of a `size`-bit value from `offset` on, signed."""
    width = min(width, size - offset) if offset < size else 0
    return extend(i64(a) >> offset, width)


@njit
def field64(a, offset, width):
    width = min(width, 64 - offset)
    if width == 0:
        return i64(0)
    left = 64 - width
    return ((i64(a) >> offset) << left) >> left


@njit
def low_ones(width):
    return ~u64(0) if width >= 64 else (u64(1) << u64(width)) - u64(1)


@njit
def whole_quads(a):
    found = u64(0)
    for quad in range(16):
        if (a >> u64(4 * quad)) & u64(15):
            found |= u64(15) << u64(4 * quad)
    return found


@njit
def high_product(a, b):
    return i64((u64(a) * u64(b)) >> u64(32))


@njit
def join(low, high):
    return u64(low) | u64(high) << u64(32)


@njit
def signed_carry(product, c):
    """Bit 64 of the sum of two signed 64-bit numbers: its sign."""
    total = product + c
    overflowed = ((product ^ total) & (c ^ total)) < 0
    return 1 if (total < 0) != overflowed else 0


@njit
def saturate_u32(value, clamp):
    if clamp != 0:
        return min(max(value, 0), 0xFFFFFFFF)
    return value


@njit
def saturate_i32(value, clamp):
    if clamp != 0:
        return min(max(value, -0x80000000), 0x7FFFFFFF)
    return value


@njit
def permute_bytes(high, low, selectors):
    """Four bytes of the eight of (high, low), or constants, as the selector bytes say."""
    both = join(low, high)
    found = i64(0)
    for place in range(4):
        chosen = (selectors >> (8 * place)) & 255
        if chosen >= 13:
            byte = i64(255)
        elif chosen == 12:
            byte = i64(0)
        elif chosen >= 8:
            # The sign of one of the four halves, over a whole byte.
            byte = i64(255) * i64((both >> u64(16 * (chosen - 8) + 15)) & u64(1))
        else:
            byte = i64((both >> u64(8 * chosen)) & u64(255))
        found |= byte << (8 * place)
    return found


@njit
def by_table(a, b, c, table):
    """Each bit of the result is the bit of `table` that the three source bits name."""
    found = i64(0)
    for index in range(8):
        if (table >> index) & 1:
            found |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return found


@njit
def dot_bytes(a, b, c):
    """The sum of the products of four signed bytes each, and c."""
    for byte in range(4):
        c += extend(a >> (8 * byte), 8) * extend(b >> (8 * byte), 8)
    return c


@njit
def dot_unsigned_bytes(a, b, c):
    for byte in range(4):
        c += ((a >> (8 * byte)) & 255) * ((b >> (8 * byte)) & 255)
    return c


@njit
def dot_shorts(a, b, c):
    return c + extend(a, 16) * extend(b, 16) + extend(a >> 16, 16) * extend(b >> 16, 16)


@njit
def dot_unsigned_shorts(a, b, c):
    return c + (a & 0xFFFF) * (b & 0xFFFF) + (a >> 16) * (b >> 16)


@njit
def dot_halves(a, b, c):
    """c and two products of halves, the products exact, each sum rounded; subnormal c and result are zero (LLVM)."""
    total = f32(flush(c) + from_half(a & 0xFFFF) * from_half(b & 0xFFFF))
    return flush(f32(total + from_half(a >> 16) * from_half(b >> 16)))


@njit
def dot_bf16(a, b, c):
    """Two products of bfloat16 are added first, then c."""
    total = f32(from_bf16(a) * from_bf16(b))
    return f32(f32(total + f32(from_bf16(a >> 16) * from_bf16(b >> 16))) + c)


@njit
def dot_bf16_onto(a, b, c):
    """c is there before the products."""
    total = f32(c + f32(from_bf16(a) * from_bf16(b)))
    return f32(total + f32(from_bf16(a >> 16) * from_bf16(b >> 16)))


@njit
def put_half(value, high, old):
    return (old & 0xFFFF) | (value << 16) if high & 1 else (old & 0xFFFF0000) | value


@njit
def put_byte(value, place, old):
    return (old & ~(255 << (8 * place))) | (value << (8 * place))


@njit
def quiet_nan():
    return f32_of(0x7FC00000)


@njit
def quieted(a):
    return f32_of(bits_of_f32(a) | 0x00400000)


@njit
def flush(a):
    """Zero of the same sign for a subnormal."""
    return f32_of(bits_of_f32(a) & 0x80000000) if abs(a) < f32(1.17549435e-38) else a


@njit
def exp2(a):
    return f32(math.pow(2.0, f64(a)))


@njit
def log2(a):
    if a != a:
        return quieted(a)
    if a < 0:
        return quiet_nan()
    if a == 0:
        return f32(-math.inf)
    return f32(math.log2(f64(a)))


@njit
def reciprocal(a):
    return f32(1.0 / f64(a)) if a != 0 else f32(math.copysign(math.inf, f64(a)))


@njit
def logarithm64(a):
    """Base 2."""
    if a != a:
        return a
    if a < 0:
        return math.nan
    return math.log2(a) if a != 0 else -math.inf


@njit
def reciprocal64(a):
    return 1.0 / a if a != 0 else math.copysign(math.inf, a)


@njit
def root64(a):
    return math.sqrt(a) if a >= 0 or a != a else math.nan


@njit
def reciprocal_root(a):
    if a == 0:
        return f32(math.copysign(math.inf, f64(a)))
    if a < 0:
        return quiet_nan()
    return f32(1.0 / math.sqrt(f64(a)))


@njit
def sine(a):
    return f32(math.sin(2.0 * math.pi * (f64(a) - math.floor(f64(a))))) if math.isfinite(a) else quiet_nan()


@njit
def cosine(a):
    return f32(math.cos(2.0 * math.pi * (f64(a) - math.floor(f64(a))))) if math.isfinite(a) else quiet_nan()


@njit
def truncate32(a):
    if not abs(a) < f32(8388608.0):
        return quiet(a)
    return f32(math.copysign(f64(i64(a)), f64(a)))


@njit
def floor32(a):
    whole = truncate32(a)
    return whole - f32(1.0) if whole > a else whole


@njit
def truncate64(a):
    if not abs(a) < 4503599627370496.0:
        return quiet64(a)
    return math.copysign(f64(i64(a)), a)


@njit
def floor64(a):
    if not abs(a) < 4503599627370496.0:
        return quiet64(a)
    whole = math.copysign(f64(i64(a)), a)
    return whole - 1.0 if whole > a else whole


@njit
def nearest32(a):
    """The nearest whole number, the even one of two."""
    if not abs(a) < f32(8388608.0):
        return quiet(a)
    sign = f32(math.copysign(8388608.0, f64(a)))
    return f32(math.copysign(f64((a + sign) - sign), f64(a)))


@njit
def nearest64(a):
    if not abs(a) < 4503599627370496.0:
        return quiet64(a)
    sign = math.copysign(4503599627370496.0, a)
    return math.copysign((a + sign) - sign, a)


@njit
def to_int(a, lowest, highest):
    """Toward zero, clamped; NaN is 0."""
    wide = f64(a)
    if wide != wide:
        return i64(0)
    return i64(min(max(wide, lowest), highest))


@njit
def is_signaling(a):
    bits = bits_of_f32(a)
    return a != a and (bits & 0x00400000) == 0


@njit
def number_of(a, b):
    """What IEEE mode makes of two values of which one is NaN at least."""
    if is_signaling(a):
        return quieted(a)
    if is_signaling(b):
        return quieted(b)
    return b if a != a else a


@njit
def number_of64(a, b):
    for value in (a, b):
        if value != value and (bits_of_f64(value) & u64(1 << 51)) == u64(0):
            return f64_of(bits_of_f64(value) | u64(1 << 51))
    return b if a != a else a


@njit
def quiet64(a):
    """A signaling NaN made quiet; everything else as it is."""
    return f64_of(bits_of_f64(a) | u64(1 << 51)) if a != a else a


@njit
def quiet(a):
    """A signaling NaN made quiet; everything else as it is."""
    return quieted(a) if a != a else a


@njit
def larger(a, b):
    """maxNum of IEEE mode: the number of a number and a quiet NaN, a signaling one made quiet, +0 above -0."""
    if a != a or b != b:
        return number_of(a, b)
    if a == b:
        return a if math.copysign(1.0, f64(a)) > 0 else b
    return a if a > b else b


@njit
def smaller(a, b):
    """minNum of IEEE mode, -0 below +0."""
    if a != a or b != b:
        return number_of(a, b)
    if a == b:
        return a if math.copysign(1.0, f64(a)) < 0 else b
    return a if a < b else b


@njit
def larger64(a, b):
    if a != a or b != b:
        return number_of64(a, b)
    if a == b:
        return a if math.copysign(1.0, a) > 0 else b
    return a if a > b else b


@njit
def smaller64(a, b):
    if a != a or b != b:
        return number_of64(a, b)
    if a == b:
        return a if math.copysign(1.0, a) < 0 else b
    return a if a < b else b


@njit
def maximum(a, b):
    """NaN of any NaN."""
    if a != a:
        return quieted(a)
    if b != b:
        return quieted(b)
    return larger(a, b)


@njit
def minimum(a, b):
    if a != a:
        return quieted(a)
    if b != b:
        return quieted(b)
    return smaller(a, b)


@njit
def middle(a, b, c):
    if a != a or b != b or c != c:
        return smaller(smaller(a, b), c)
    top = larger(larger(a, b), c)
    if top == a:
        return larger(b, c)
    if top == b:
        return larger(a, c)
    return larger(a, b)


@njit
def exponent_bits(a):
    return (bits_of_f32(a) >> 23) & 255


@njit
def scale64(a, power):
    if a == 0 or not math.isfinite(a):
        return quiet64(a)
    return math.ldexp(a, min(max(power, -4000), 4000))


@njit
def scale32(a, power):
    return f32(scale64(f64(a), power)) if a == a else quieted(a)


@njit
def odd_sum(a, b):
    """a + b in binary64, rounded to odd: rounding it once more, to fewer bits, is rounding the sum itself."""
    total = a + b
    if not math.isfinite(total):
        return total
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    bits = bits_of_f64(total)
    if error == 0 or bits & u64(1):
        return total
    return f64_of(bits + u64(1) if (error > 0) == (total > 0) else bits - u64(1))


@njit
def scaled_fma(a, b, c, power):
    """(a * b + c) * 2^power, rounded once."""
    return f32(scale64(odd_sum(f64(a) * f64(b), f64(c)), power))


@njit
def exponent(a):
    """Of frexp: a = mantissa * 2^exponent with the mantissa in [0.5, 1); 0 where there is none."""
    if a == 0 or not math.isfinite(a):
        return i64(0)
    return i64(math.frexp(f64(a))[1])


@njit
def mantissa(a):
    if a == 0 or not math.isfinite(a):
        return quiet(a)
    return f32(math.frexp(f64(a))[0])


@njit
def _is_subnormal(a):
    return a != 0 and abs(a) < 1.17549435082228750797e-38


@njit
def needs_scaling(a, denominator, numerator):
    """The mask bit of v_div_scale: the quotient was scaled, so that v_div_fmas scales back."""
    if numerator == 0 or denominator == 0:
        return 0
    if exponent_bits(numerator) - exponent_bits(denominator) >= 96:
        return 1
    if _is_subnormal(f64(denominator)):
        return 0
    return 1 if _is_subnormal(f64(numerator) / f64(denominator)) else 0


@njit
def scaled(a, denominator, numerator):
    """v_div_scale: `a`, which is the denominator or the numerator, moved by 2^64 so that the division stays normal."""
    if numerator == 0 or denominator == 0:
        return quiet_nan()
    same_as_denominator = bits_of_f32(a) == bits_of_f32(denominator)
    same_as_numerator = bits_of_f32(a) == bits_of_f32(numerator)
    if exponent_bits(numerator) - exponent_bits(denominator) >= 96:
        return scale32(a, 64) if same_as_denominator else a
    if _is_subnormal(f64(denominator)):
        return scale32(a, 64)
    tiny_reciprocal = _is_subnormal(1.0 / f64(denominator))
    tiny_quotient = _is_subnormal(f64(numerator) / f64(denominator))
    if tiny_reciprocal and tiny_quotient:
        # The published text scales up here, with which the quotient of two such numbers would come out wrong.
        return scale32(a, -64) if same_as_denominator else a
    if tiny_reciprocal:
        return scale32(a, -64)
    if tiny_quotient:
        return scale32(a, 64) if same_as_numerator else a
    if exponent_bits(numerator) <= 23:
        return scale32(a, 64)
    return a


@njit
def fix_quotient(quotient, denominator, numerator):
    """v_div_fixup: the quotient with the right sign, or what zeros, infinities and NaN make of it."""
    if numerator != numerator:
        return quieted(numerator)
    if denominator != denominator:
        return quieted(denominator)
    sign = (bits_of_f32(denominator) ^ bits_of_f32(numerator)) & 0x80000000
    if (denominator == 0 and numerator == 0) or (math.isinf(denominator) and math.isinf(numerator)):
        return f32_of(0xFFC00000)
    if denominator == 0 or math.isinf(numerator):
        return f32_of(sign | 0x7F800000)
    if math.isinf(denominator) or numerator == 0:
        return f32_of(sign)
    if exponent_bits(numerator) - exponent_bits(denominator) < -150:
        return f32_of(sign)
    if quotient != quotient:
        return f32_of(sign | 0x7F800000)
    return f32_of((bits_of_f32(quotient) & 0x7FFFFFFF) | sign)


@njit
def exponent_bits64(a):
    return i64((bits_of_f64(a) >> u64(52)) & u64(2047))


@njit
def _is_subnormal64(a):
    return a != 0 and abs(a) < 2.2250738585072014e-308


@njit
def _is_tiny_quotient(numerator, denominator):
    """Below the normal numbers: it may have become zero already."""
    return numerator != 0 and abs(numerator / denominator) < 2.2250738585072014e-308


@njit
def needs_scaling64(a, denominator, numerator):
    if numerator == 0 or denominator == 0:
        return 0
    if exponent_bits64(numerator) - exponent_bits64(denominator) >= 768:
        return 1
    if _is_subnormal64(denominator):
        return 0
    return 1 if _is_tiny_quotient(numerator, denominator) else 0


@njit
def scaled64(a, denominator, numerator):
    """v_div_scale of binary64: as `scaled`, by 2^128."""
    if numerator == 0 or denominator == 0:
        return math.nan
    same_as_denominator = bits_of_f64(a) == bits_of_f64(denominator)
    same_as_numerator = bits_of_f64(a) == bits_of_f64(numerator)
    if exponent_bits64(numerator) - exponent_bits64(denominator) >= 768:
        return scale64(a, 128) if same_as_denominator else a
    if _is_subnormal64(denominator):
        return scale64(a, 128)
    tiny_reciprocal = _is_subnormal64(1.0 / denominator)
    tiny_quotient = _is_tiny_quotient(numerator, denominator)
    if tiny_reciprocal and tiny_quotient:
        # As in binary32, the published text scales up here.
        return scale64(a, -128) if same_as_denominator else a
    if tiny_reciprocal:
        return scale64(a, -128)
    if tiny_quotient:
        return scale64(a, 128) if same_as_numerator else a
    if exponent_bits64(numerator) <= 53:
        return scale64(a, 128)
    return a


@njit
def _error_of_fma(a, b, c, result):
    """a * b + c less what it was rounded to; right in its sign, and zero only if it is."""
    product = a * b
    low = fma64(a, b, -product)
    first = c + low
    part = first - c
    rest = (c - (first - part)) + (low - part)
    second = product + first
    part = second - product
    left = (product - (second - part)) + (first - part)
    error = (second - result) + left
    return error + rest


@njit
def scaled_fma64(a, b, c, power):
    """(a * b + c) * 2^power, rounded once."""
    once = fma64(a, b, c)
    twice = scale64(once, power)
    if not math.isfinite(once) or not abs(twice) < 2.2250738585072014e-308:
        return twice
    # Rounded again below the normal numbers: wrong only where the first result lies halfway between two of the second.
    cut = once - scale64(twice, -power)
    if abs(cut) != math.ldexp(1.0, -1075 - power):
        return twice
    error = _error_of_fma(a, b, c, once)
    if error == 0 or (error > 0) != (cut > 0):
        return twice
    return twice + math.copysign(5e-324, cut)


@njit
def fix_quotient64(quotient, denominator, numerator):
    """v_div_fixup of binary64."""
    if numerator != numerator:
        return quiet64(numerator)
    if denominator != denominator:
        return quiet64(denominator)
    sign = (bits_of_f64(denominator) ^ bits_of_f64(numerator)) & u64(1 << 63)
    if (denominator == 0 and numerator == 0) or (math.isinf(denominator) and math.isinf(numerator)):
        return f64_of(u64(0xFFF8000000000000))
    if denominator == 0 or math.isinf(numerator):
        return f64_of(sign | u64(0x7FF0000000000000))
    if math.isinf(denominator) or numerator == 0:
        return f64_of(sign)
    if exponent_bits64(numerator) - exponent_bits64(denominator) < -1075:
        return f64_of(sign)
    if quotient != quotient:
        return f64_of(sign | u64(0x7FF0000000000000))
    return f64_of((bits_of_f64(quotient) & u64(0x7FFFFFFFFFFFFFFF)) | sign)


@njit
def exponent64(a):
    if a == 0 or not math.isfinite(a):
        return i64(0)
    return i64(math.frexp(a)[1])


@njit
def mantissa64(a):
    if a == 0 or not math.isfinite(a):
        return quiet64(a)
    return math.frexp(a)[0]


@njit
def class_of64(a):
    bits = bits_of_f64(a)
    negative = (bits >> u64(63)) != u64(0)
    if a != a:
        return 2 if (bits >> u64(51)) & u64(1) else 1
    if math.isinf(a):
        return 4 if negative else 512
    if a == 0:
        return 32 if negative else 64
    if _is_subnormal64(a):
        return 16 if negative else 128
    return 8 if negative else 256


@njit
def class_of(a):
    """The one bit that v_cmp_class tests for this value."""
    bits = bits_of_f32(f32(a))
    negative = (bits >> 31) & 1
    if a != a:
        return 1 if is_signaling(a) else 2
    if math.isinf(a):
        return 4 if negative else 512
    if a == 0:
        return 32 if negative else 64
    if (bits & 0x7F800000) == 0:
        return 16 if negative else 128
    return 8 if negative else 256


@njit
def from_bf16(a):
    return f32_of((a & 0xFFFF) << 16)


@njit
def to_bf16(a):
    """Nearest, ties to even."""
    bits = bits_of_f32(a)
    if a != a:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@njit
def from_half(a):
    sign, power, fraction = (a >> 15) & 1, (a >> 10) & 31, a & 1023
    if power == 31:
        return f32_of((sign << 31) | 0x7F800000 | (fraction << 13))
    if power == 0:
        value = f32(fraction) * f32(5.9604644775390625e-08)
        return -value if sign else value
    return f32_of((sign << 31) | ((power + 112) << 23) | (fraction << 13))


@njit
def mixed(bits, halves, place):
    """A source of v_fma_mix: a half, which is widened, or a binary32."""
    return from_half(bits & 0xFFFF) if (halves >> place) & 1 else f32_of(bits)


@njit
def _narrow(magnitude, fraction_bits, smallest_power):
    """A positive finite binary64 as a whole number of the format's steps there, ties to even, and the step's power."""
    power = max(i64(math.frexp(magnitude)[1]) - 1, smallest_power)
    steps = math.ldexp(magnitude, fraction_bits - power)
    return i64(nearest64(steps)), power


@njit
def to_half(a):
    """The binary16 code nearest to a binary64, ties to even."""
    sign = 0x8000 if math.copysign(1.0, a) < 0 else 0
    if a != a:
        return sign | 0x7E00
    if math.isinf(a) or abs(a) >= 65520.0:
        return sign | 0x7C00
    if a == 0:
        return sign
    steps, power = _narrow(abs(a), 10, -14)
    return sign | (((power + 14) << 10) + steps)


@njit
def clamped_half(a, mode):
    """As `to_half`, but a finite value that overflows is the largest half under MODE.FP16_OVFL."""
    if mode & MODE_FP16_OVERFLOW and math.isfinite(a) and abs(a) >= 65520.0:
        return 0xFBFF if a < 0 else 0x7BFF
    return to_half(a)


@njit
def to_half_toward_zero(a):
    sign = 0x8000 if math.copysign(1.0, f64(a)) < 0 else 0
    if a != a:
        return sign | 0x7E00
    if math.isinf(a):
        return sign | 0x7C00
    if abs(a) >= f32(65504.0):
        return sign | 0x7BFF
    if a == 0:
        return sign
    power = max(i64(math.frexp(f64(abs(a)))[1]) - 1, -14)
    steps = i64(math.floor(math.ldexp(f64(abs(a)), 10 - power)))
    return sign | (((power + 14) << 10) + steps)


def _decoded(kind: str) -> Array:
    codes = np.arange(256, dtype=np.uint8)
    return codes.view(getattr(ml_dtypes, kind)).astype(np.float32)


_FP8 = np.stack([_decoded("float8_e4m3fn"), _decoded("float8_e4m3fnuz")])
_BF8 = np.stack([_decoded("float8_e5m2"), _decoded("float8_e5m2fnuz")])
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@njit
def from_fp8(code, mode):
    return _FP8[1 if mode & MODE_FNUZ else 0, code]


@njit
def from_bf8(code, mode):
    return _BF8[1 if mode & MODE_FNUZ else 0, code]


@njit
def from_fp4(code):
    return _FP4[code]


@njit
def _to_eight(a, mode, fraction_bits, bias, largest_ocp, largest_fnuz, infinity, not_a_number):
    """An 8-bit float. Overflow clamps under MODE.FP16_OVFL; else it is the format's infinity, or NaN without one."""
    fnuz = (mode & MODE_FNUZ) != 0
    clamps = (mode & MODE_FP16_OVERFLOW) != 0
    sign = 128 if math.copysign(1.0, f64(a)) < 0 else 0
    if a != a:
        return i64(128) if fnuz else i64(sign | not_a_number)
    largest = largest_fnuz if fnuz else largest_ocp
    if fnuz:
        bias += 1
    magnitude = f64(abs(a))
    if math.isinf(a):
        if fnuz:
            return i64(128)
        if clamps:
            return _code(largest, fraction_bits, bias) | sign
        return i64(sign | infinity)
    if magnitude == 0:
        return i64(0) if fnuz else i64(sign)
    code = _code(magnitude, fraction_bits, bias)
    top = _code(largest, fraction_bits, bias)
    if code > top:
        if clamps:
            return top | sign
        return i64(128) if fnuz else i64(sign | infinity)
    if code == 0:
        return i64(0) if fnuz else i64(sign)
    return code | sign


@njit
def _code(magnitude, fraction_bits, bias):
    steps, power = _narrow(magnitude, fraction_bits, 1 - bias)
    return ((power + bias - 1) << fraction_bits) + steps


@njit
def to_fp8(a, mode):
    return _to_eight(a, mode, 3, 7, 448.0, 240.0, 0x7F, 0x7F)


@njit
def to_bf8(a, mode):
    return _to_eight(a, mode, 2, 15, 57344.0, 57344.0, 0x7C, 0x7F)


@njit
def to_fp4(a):
    """Clamped to 6; NaN is 6 too, as the format has none."""
    sign = 8 if math.copysign(1.0, f64(a)) < 0 else 0
    if a != a or abs(a) >= f32(6.0):
        return i64(sign | 7)
    if a == 0:
        return i64(sign)
    steps, power = _narrow(f64(abs(a)), 1, 0)
    return i64(sign) | ((power << 1) + steps)


@njit
def _power_of(scale):
    return exponent_bits(scale) - 127


@njit
def scale_up(a, scale):
    """a * 2^(exponent of scale): the fraction of the scale is not looked at; its NaN code gives NaN."""
    if exponent_bits(scale) == 255:
        return quiet_nan()
    return scale32(a, _power_of(scale))


@njit
def scale_down(a, scale):
    if exponent_bits(scale) == 255:
        return quiet_nan()
    return scale32(a, -_power_of(scale))
