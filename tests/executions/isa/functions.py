"""What do the functions mean that AMD's pseudocode calls without defining? One definition each, on exact values.

`named(arch)` gives the table for `pseudocode.Run`. The documents' wording is quoted where a choice was made; "ISA" is
AMD's "CDNA4 Instruction Set Architecture Reference Guide". The eight-bit floats are OCP's on gfx950 and FNUZ on gfx942.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
from collections.abc import Callable
from fractions import Fraction

from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

from tests.executions.isa import small_floats
from tests.executions.isa.pseudocode import Run, Value, converted, floating, fused, negate, truth, whole
from tests.executions.isa.small_floats import FORMATS, NAN, Number

Function = Callable[..., Value]


def _fields(x: Value) -> tuple[int, int, int]:
    """(sign, exponent, mantissa) bits."""
    form = FORMATS[x.kind]
    return (
        x.bits >> (x.width - 1),
        (x.bits >> form.mantissa) & ((1 << form.exponent) - 1),
        x.bits & ((1 << form.mantissa) - 1),
    )


def is_nan(x: Value) -> bool:
    return x.number() == NAN


def is_quiet(x: Value) -> bool:
    return is_nan(x) and bool(_fields(x)[2] >> (FORMATS[x.kind].mantissa - 1))


def quieted(x: Value) -> Value:
    return Value(x.bits | (1 << (FORMATS[x.kind].mantissa - 1)), x.width, x.kind) if is_nan(x) else x


def _absolute(x: Value) -> Value:
    return Value(x.bits & ((1 << (x.width - 1)) - 1), x.width, x.kind)


def _rounded(how: Callable[[Fraction], int]) -> Function:
    """A rounding to a whole number that keeps zeros' signs, infinities and NaN."""

    def function(x: Value) -> Value:
        number = x.number()
        if isinstance(number, str):
            return quieted(x)
        return floating(Fraction(how(number)), x.kind, negative_zero=x.negative())

    return function


def _scaled(x: Value, by: Value) -> Value:
    number = x.number()
    if isinstance(number, str):
        return quieted(x)
    power = max(-3000, min(3000, by.integer()))
    return floating(number * Fraction(2) ** power, x.kind, negative_zero=x.negative())


def to_integer(number: Number, low: int, high: int) -> int:
    """Truncated; "out-of-range floating point values (including infinity) saturate. NAN is converted to 0" (ISA)."""
    if isinstance(number, str):
        return {NAN: 0, "inf": high, "-inf": low}[number]
    return max(low, min(high, math.trunc(number)))


def _to_integer(width: int, kind: str) -> Function:
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind == "i" else (0, (1 << width) - 1)
    return lambda x: whole(to_integer(x.number(), low, high), width, kind)


def _clamped(width: int, kind: str) -> Function:
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind == "i" else (0, (1 << width) - 1)
    return lambda x: whole(max(low, min(high, x.integer())), width, kind)


def _to_float(kind: str) -> Function:
    return lambda x: floating(Fraction(x.integer()), kind)


def _recast(kind: str) -> Function:
    return lambda x: converted(quieted(x), kind, FORMATS[kind].width)


def _nearest_integer(number: Fraction) -> int:
    return round(number)


def _normalised(scale: int, width: int, kind: str) -> Function:
    low = -scale if kind == "i" else 0
    return lambda x: whole(0 if is_nan(x) else _half_even(x.number(), scale, low), width, kind)


def _half_even(number: Number, scale: int, low: int) -> int:
    if isinstance(number, str):
        return scale if number == "inf" else low
    return max(low, min(scale, round(number * scale)))


def _sign_extended(x: Value, at: Value) -> Value:
    width = at.bits
    bits = x.bits & ((1 << width) - 1)
    return whole(bits - (1 << width) if width and bits >> (width - 1) else bits, x.width, "i")


def _from_small(small: str, kind: str) -> Function:
    """Of an E8M0 scale: "value * 2**(scale - 127)", rounded once; scale 255 is NaN (ISA 7.2)."""

    def function(x: Value, scale: Value) -> Value:
        number = small_floats.decode(x.bits, small)
        negative = bool(x.bits >> (FORMATS[small].width - 1))
        return floating(_times_power(number, scale.bits & 255, 1), kind, negative_zero=negative)

    return function


def _times_power(number: Number, scale: int, sign: int) -> Number:
    if scale == 255:
        return NAN
    return number * Fraction(2) ** (sign * (scale - 127)) if isinstance(number, Fraction) else number


def _to_small(small: str, overflows: bool) -> Function:
    """Divided by the scale, then rounded half to even. `overflows`: MODE.FP16_OVFL, which saturates (ISA 7.3)."""

    def function(x: Value, scale: Value) -> Value:
        number = _times_power(x.number(), scale.bits & 255, -1)
        code = small_floats.encode(number, small, negative_zero=x.negative(), saturate=overflows)
        return Value(code, FORMATS[small].width, "b")

    return function


def _ordinary_small(small: str, overflows: bool) -> Function:
    convert = _to_small(small, overflows)
    return lambda x: convert(x, whole(127, 8, "u"))


def _minimum(x: Value, y: Value, sign: int) -> Value:
    """IEEE 754-2019's minimum and maximum: a NaN wins, and -0 is below +0."""
    if is_nan(x) or is_nan(y):
        return quieted(x if is_nan(x) else y)
    a, b = ((math.inf if n == "inf" else -math.inf if n == "-inf" else n) for n in (x.number(), y.number()))
    if a == b:
        first_negative = x if x.negative() else y
        first_positive = y if x.negative() else x
        return first_negative if sign < 0 else first_positive
    return x if (a < b) == (sign < 0) else y


def _random(x: Value) -> Value:
    return whole((x.bits << 1) ^ (197 if x.bits >> 31 else 0), 32, "u")


def mended(text: str) -> str:
    """Errata of many texts: a comparison with a signed zero means that zero alone, and the mode bit has a name of its own."""
    text = text.replace("WAVE_MODE.IEEE", "IEEE")
    return re.sub(
        r"\((?:64'F\()?(S\d\.f\d\d)\)? == ([+-])0\.0\)", lambda m: f"isZero({m[1]}, {int(m[2] == '-')})", text
    )


_INSTRUCTIONS = {
    op.name.lower().removesuffix("_e64").removesuffix("_e32"): mended(text)
    for op, text in PCODE.items()
    if op.name.startswith("V_")
}


def _instruction(name: str, functions: dict[str, Function]) -> Function:
    """Pseudocode that calls another instruction by name."""

    def function(*sources: Value) -> Value:
        kind, width = sources[0].kind, sources[0].width
        names = (
            {f"S{k}": Value(x.bits, x.width, "b") for k, x in enumerate(sources)}
            | constants()
            | {"D0": Value(0, 64, "b")}
        )
        run = Run(names, functions).execute(_INSTRUCTIONS[name])
        return Value(run.names["D0"].bits & ((1 << width) - 1), width, kind)

    return function


def constants() -> dict[str, Value]:
    """Names that pseudocode uses as constants; the wave's MODE is that of a kernel descriptor as Triton writes it: IEEE on."""
    infinity = floating("inf", "f64")
    return {
        "INF": infinity, "NAN": floating(NAN, "f64"), "UNDERFLOW_F32": floating(Fraction(0), "f32"),
        "OVERFLOW_F32": floating("inf", "f32"), "UNDERFLOW_F64": floating(Fraction(0), "f64"), "OVERFLOW_F64": infinity,
        "IEEE": Value(1, 1, "u"), "ROUND_MODE": whole(0), "ROUND_NEAREST_EVEN": whole(0), "ROUND_TOWARD_ZERO": whole(3),
        "SDWA_SRC0_SEL": whole(0, 3, "b"), "BYTE1": whole(1, 3, "b"), "BYTE2": whole(2, 3, "b"), "BYTE3": whole(3, 3, "b"),
        "WORD1": whole(5, 3, "b"),
    }  # fmt: skip


@functools.cache
def named(arch: str, overflows: bool = False) -> dict[str, Function]:
    """The table of functions. overflows: MODE.FP16_OVFL."""
    suffix = "_fnuz" if arch == "gfx942" else ""
    table: dict[str, Function] = {
        "isNAN": lambda x: truth(is_nan(x)),
        "isSignalNAN": lambda x: truth(is_nan(x) and not is_quiet(x)),
        "isQuietNAN": lambda x: truth(is_quiet(x)),
        "isZero": lambda x, sign: truth(x.number() == 0 and x.negative() == sign.truth()),
        "cvtToQuietNAN": quieted,
        "flushed": lambda x: Value(x.bits & 1 << (x.width - 1), x.width, x.kind) if _fields(x)[1] == 0 else x,
        "exponent": lambda x: whole(_fields(x)[1]),
        "sign": lambda x: whole(_fields(x)[0], 32, "u"),
        "abs": _absolute,
        "fma": fused,
        "floor": _rounded(math.floor),
        "trunc": _rounded(math.trunc),
        "ldexp": _scaled,
        "signext": lambda x: whole(x.integer(), max(32, x.width), "i"),
        "signext_from_bit": _sign_extended,
        "v_prng_b32": _random,
        "v_minimum_f32": lambda x, y: _minimum(x, y, -1),
        "v_maximum_f32": lambda x, y: _minimum(x, y, 1),
        "v_minimum3_f16": lambda x, y, z: _minimum(_minimum(x, y, -1), z, -1),
        "v_maximum3_f16": lambda x, y, z: _minimum(_minimum(x, y, 1), z, 1),
        "f32_to_f16": lambda x: _half(x, overflows),
        "f32_to_f16_truncated": _half_truncated,
        "f16_to_f32": _recast("f32"),
        "f32_to_f64": _recast("f64"),
        "f64_to_f32": _recast("f32"),
        "bf16_to_f32": _recast("f32"),
        "f32_to_bf16": _recast("bf16"),
        "f32_to_u8": lambda x: whole(_to_byte(x), 8, "u"),
        "f32_to_snorm": _normalised(32767, 16, "i"),
        "f16_to_snorm": _normalised(32767, 16, "i"),
        "f32_to_unorm": _normalised(65535, 16, "u"),
        "f16_to_unorm": _normalised(65535, 16, "u"),
        "i32_to_i16": _clamped(16, "i"),
        "u32_to_u16": _clamped(16, "u"),
        "negate": negate,
    }  # fmt: skip
    for source in ("f64", "f32", "f16"):
        for width in (32, 16):
            table[f"{source}_to_i{width}"], table[f"{source}_to_u{width}"] = (
                _to_integer(width, "i"),
                _to_integer(width, "u"),
            )
    for source in ("i32", "u32", "i16", "u16"):
        for kind in ("f64", "f32", "f16"):
            table[f"{source}_to_{kind}"] = _to_float(kind)
    for bits in (4, 8, 16):
        table[f"i{bits}_to_i32"] = lambda x, bits=bits: whole(Value(x.bits, bits, "i").integer())
        table[f"u{bits}_to_u32"] = lambda x: whole(x.bits, 32, "u")
    for small in ("fp8", "bf8", "fp6", "bf6", "fp4"):
        form = small + suffix if small in ("fp8", "bf8") else small
        for kind in ("f32", "f16", "bf16"):
            table[f"{small}_to_{kind}_scale"] = _from_small(form, kind)
            table[f"{kind}_to_{small}_scale"] = _to_small(form, overflows)
        table[f"f32_to_{small}"] = _ordinary_small(form, overflows)
        table[f"{small}_to_f32"] = lambda x, form=form: _from_small(form, "f32")(x, whole(127, 8, "u"))
    for name in ("min", "max"):
        for kind in ("f32", "f16", "i32", "u32", "i16", "u16"):
            table[f"v_{name}_{kind}"] = _instruction(f"v_{name}_{kind}", table)
            table[f"v_{name}3_{kind}"] = _instruction(f"v_{name}3_{kind}", table)
    for name in ("v_sad_u8", "v_msad_u8"):
        table[name] = _instruction(name, table)
    return table


def _half(x: Value, overflows: bool) -> Value:
    """FP16_OVFL: "an overflowed FP16 result is clamped to +/- MAX_FP16, ... while still preserving true INF values"."""
    number = x.number()
    if number == NAN:
        return converted(quieted(x), "f16", 16)
    saturate = overflows and isinstance(number, Fraction)
    return Value(small_floats.encode(number, "f16", negative_zero=x.negative(), saturate=saturate), 16, "f16")


def _to_byte(x: Value) -> int:
    number = x.number()
    if isinstance(number, str):
        return 255 if number == "inf" else 0
    return max(0, min(255, _nearest_integer(number)))


def _half_truncated(x: Value) -> Value:
    """Toward zero: the largest half not beyond it; infinity stays."""
    number = x.number()
    if not isinstance(number, Fraction):
        return _half(x, False)
    code = bisect.bisect_right(_HALVES, abs(number)) - 1
    return Value(code | (0x8000 if x.negative() else 0), 16, "f16")


_HALVES = [Fraction(small_floats.decode(code, "f16")) for code in range(0x7C00)]
