"""Which number does a code of a small float stand for, and which code does a number round to? By table and exact fractions.

Formats by name: sign, exponent bits, mantissa bits, bias, and what the top codes mean. Everything else (rounding,
subnormals, saturation) follows from the list of a format's numbers, so that no bit trick is shared with an executor.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass
from fractions import Fraction

NAN = "nan"
INFINITE = "inf"
Number = Fraction | str
"""A number, or the word `nan`, `inf` or `-inf`."""


@dataclass(frozen=True)
class Format:
    """A float format. `top` says what the codes of the largest exponent are: `ieee`, `nan` (only all ones), `fnuz`, `finite`."""

    exponent: int
    mantissa: int
    bias: int
    top: str

    @property
    def width(self) -> int:
        return 1 + self.exponent + self.mantissa


FORMATS = {
    "f64": Format(11, 52, 1023, "ieee"),
    "f32": Format(8, 23, 127, "ieee"),
    "f16": Format(5, 10, 15, "ieee"),
    "bf16": Format(8, 7, 127, "ieee"),
    "fp8": Format(4, 3, 7, "nan"),
    "bf8": Format(5, 2, 15, "ieee"),
    "fp8_fnuz": Format(4, 3, 8, "fnuz"),
    "bf8_fnuz": Format(5, 2, 16, "fnuz"),
    "fp6": Format(2, 3, 1, "finite"),
    "bf6": Format(3, 2, 3, "finite"),
    "fp4": Format(2, 1, 1, "finite"),
}


def decode(code: int, name: str) -> Number:
    """The number that a code stands for; a zero loses its sign."""
    form = FORMATS[name]
    sign, magnitude = code >> (form.width - 1), code & ((1 << (form.width - 1)) - 1)
    exponent, mantissa = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    if form.top == "fnuz" and sign and magnitude == 0:
        return NAN
    if form.top == "ieee" and exponent == (1 << form.exponent) - 1:
        return NAN if mantissa else ("-" if sign else "") + INFINITE
    if form.top == "nan" and magnitude == (1 << (form.width - 1)) - 1:
        return NAN
    if exponent:
        mantissa, exponent = mantissa + (1 << form.mantissa), exponent - 1
    number = Fraction(mantissa) * Fraction(2) ** (exponent + 1 - form.bias - form.mantissa)
    return -number if sign else number


@functools.cache
def largest_code(name: str) -> int:
    """Code of the largest finite number of a format."""
    form = FORMATS[name]
    codes = 1 << (form.width - 1)
    return codes - {"ieee": (1 << form.mantissa) + 1, "nan": 2, "fnuz": 1, "finite": 1}[form.top]


@functools.cache
def _numbers(name: str) -> list[Fraction]:
    """All non-negative finite numbers of a format of at most 16 bits, in order: index is code."""
    codes = range(1 << (FORMATS[name].width - 1))
    return [number for code in codes if isinstance(number := decode(code, name), Fraction)]


def _nearest(number: Fraction, name: str) -> int:
    """Code of the non-negative number nearest to `number`, ties to the even code; one past the largest when it overflows."""
    form = FORMATS[name]
    if form.width <= 16:
        ladder = _numbers(name)
        step = ladder[-1] - ladder[-2]
        above = bisect.bisect_left(ladder, number)
        if above == len(ladder):
            return (
                len(ladder)
                if number - ladder[-1] > step / 2 or (number - ladder[-1] == step / 2 and len(ladder) % 2 == 0)
                else len(ladder) - 1
            )
        if ladder[above] == number:
            return above
        under, over = number - ladder[above - 1], ladder[above] - number
        return above if over < under or (over == under and above % 2 == 0) else above - 1
    low = 1 - form.bias - form.mantissa
    power = max(
        low,
        math.frexp(number)[1] - 1 - form.mantissa if 2**-1000 < number < 2**1000 else _power_of(number) - form.mantissa,
    )
    units = round(number / Fraction(2) ** power)  # Python rounds a Fraction half to even
    if units >> (form.mantissa + 1):
        power, units = power + 1, units >> 1
    if units >> form.mantissa == 0:
        return units
    return ((power - low + 1) << form.mantissa) + (units - (1 << form.mantissa))


def _power_of(number: Fraction) -> int:
    """The largest e with 2**e <= number."""
    guess = number.numerator.bit_length() - number.denominator.bit_length()
    return guess if Fraction(2) ** guess <= number else guess - 1


def encode(number: Number, name: str, *, negative_zero: bool = False, saturate: bool = False) -> int:
    """Code that a number rounds to, half to even. A finite number or infinity beyond the largest becomes that largest under
    `saturate`, else infinity, or NaN where the format has none; formats of `top` "finite" always saturate."""
    form = FORMATS[name]
    sign_bit = 1 << (form.width - 1)
    if number == NAN:
        return {
            "fnuz": sign_bit,
            "nan": sign_bit - 1,
            "ieee": sign_bit - (1 << (form.mantissa - 1)),
            "finite": sign_bit - 1,
        }[form.top]
    saturate = saturate or form.top == "finite"
    if isinstance(number, str):
        negative, code = number.startswith("-"), None
    else:
        negative = number < 0 or (number == 0 and negative_zero)
        code = _nearest(abs(number), name) if number else 0
    top = largest_code(name)
    if code is None or code > top:
        code = top if saturate else {"fnuz": sign_bit, "nan": sign_bit - 1, "ieee": top + 1, "finite": top}[form.top]
    if form.top == "fnuz" and code in (0, sign_bit):
        return code
    return code | (sign_bit if negative else 0)
