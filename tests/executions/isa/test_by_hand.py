"""Where the published pseudocode is a sketch: roundings, exponents, and the steps of a division, stated by exact fractions.

"ISA" is AMD's "CDNA4 Instruction Set Architecture Reference Guide". Its `floor(x + 0.5)` is read as a rounding of the exact
sum, its `exponent(x)` as C's `frexp` ("satisfies the invariant S0 = significand * 2 ** exponent"). Of the division steps
its factor `2.0F ** 32` is an erratum: the numbers fit only with 64, up or down by the third source's exponent, as in the
older GCN3 guide and as tinygrad measured on RDNA3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from impl.executions.isa.coverage import modelled
from impl.executions.isa.single import run_lines
from tests.executions.isa import lane_runs, statements
from tests.executions.isa.functions import quieted, to_integer
from tests.executions.isa.pseudocode import Value, floating, fused
from tests.executions.isa.small_floats import FORMATS, NAN, decode, encode
from tests.executions.isa.statements import ARCHS, Result, forms, instructions

Array = np.ndarray[Any, Any]
Statement = Callable[[list[Value]], Value]


def _nearest(x: Value) -> Value:
    number = x.number()
    return (
        quieted(x) if isinstance(number, str) else floating(Fraction(round(number)), x.kind, negative_zero=x.negative())
    )


def _fraction(x: Value) -> Value:
    """ "Obey round mode, result clamped to 0x3f7fffff": the largest number below one."""
    number = x.number()
    if isinstance(number, str):
        return quieted(x) if number == NAN else floating(NAN, x.kind)
    part = floating(number - math.floor(number), x.kind)
    below_one = Value(floating(Fraction(1), x.kind).bits - 1, x.width, x.kind)
    return below_one if part.number() == 1 else part


def _exponent(width: int) -> Statement:
    def function(sources: list[Value]) -> Value:
        number = sources[0].number()
        if isinstance(number, str) or number == 0:
            return Value(0, width, "i")
        power = 0
        magnitude = abs(number)
        while magnitude >= 1:
            magnitude, power = magnitude / 2, power + 1
        while magnitude < Fraction(1, 2):
            magnitude, power = magnitude * 2, power - 1
        return Value(power & ((1 << width) - 1), width, "i")

    return function


def _mantissa(sources: list[Value]) -> Value:
    (x,) = sources
    number = x.number()
    if isinstance(number, str) or number == 0:
        return quieted(x)
    power = Value(_exponent(32)(sources).bits, 32, "i").integer()
    return floating(number / Fraction(2) ** power, x.kind)


def _to_i32(how: Callable[[Fraction], int]) -> Statement:
    def function(sources: list[Value]) -> Value:
        number = sources[0].number()
        rounded = number if isinstance(number, str) else Fraction(how(number))
        return Value(to_integer(rounded, -(2**31), 2**31 - 1) & 0xFFFFFFFF, 32, "i")

    return function


BY_HAND: dict[str, Statement] = {
    **{f"V_RNDNE_F{width}": lambda sources: _nearest(sources[0]) for width in (16, 32, 64)},
    **{f"V_FRACT_F{width}": lambda sources: _fraction(sources[0]) for width in (16, 32, 64)},
    "V_CVT_FLR_I32_F32": _to_i32(math.floor),
    "V_CVT_RPI_I32_F32": _to_i32(lambda x: math.floor(x + Fraction(1, 2))),
    "V_FREXP_EXP_I32_F32": _exponent(32),
    "V_FREXP_EXP_I32_F64": _exponent(32),
    "V_FREXP_EXP_I16_F16": _exponent(16),
    **{f"V_FREXP_MANT_F{width}": _mantissa for width in (16, 32, 64)},
}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", BY_HAND)
def test_every_lane_is_as_stated(arch: str, name: str) -> None:
    if arch not in modelled().get(name.lower(), ()):
        pytest.skip("not modelled")
    found = []
    for key in (f"VOP1 {name}_E32",):
        form = forms(instructions()[key])[0]
        source, destination = form.instruction.sources[0], form.instruction.destination
        assert destination is not None
        kind = f"f{source.float_width}"

        def stated(lane: int, sources: list[int], old: int, mask: int, kind: str = kind) -> Result:
            value = BY_HAND[name]([Value(sources[0] & ((1 << FORMATS[kind].width) - 1), FORMATS[kind].width, kind)])
            nan_width = FORMATS[kind].width if value.kind == kind else 0
            return Result(value.bits, (1 << max(32, value.width)) - 1, None, nan_width)

        found += lane_runs.differences(form, arch, stated=stated)
    assert found == []


# ------------------------------------------------------------------------------------------------------ division

DIVISION = """v_div_scale_f32 v3, s[30:31], v1, v1, v0
v_rcp_f32_e32 v4, v3
v_div_scale_f32 v5, vcc, v0, v1, v0
v_fma_f32 v6, -v3, v4, 1.0
v_fmac_f32_e32 v4, v6, v4
v_mul_f32_e32 v6, v5, v4
v_fma_f32 v7, -v3, v6, v5
v_fmac_f32_e32 v6, v7, v4
v_fma_f32 v3, -v3, v6, v5
s_nop 3
v_div_fmas_f32 v3, v3, v4, v6
v_div_fixup_f32 v2, v3, v1, v0"""


DIVISION_64 = """v_div_scale_f64 v[4:5], s[30:31], v[2:3], v[2:3], v[0:1]
v_rcp_f64_e32 v[6:7], v[4:5]
v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0
v_fmac_f64_e32 v[6:7], v[6:7], v[8:9]
v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0
v_fmac_f64_e32 v[6:7], v[6:7], v[8:9]
v_div_scale_f64 v[8:9], vcc, v[0:1], v[2:3], v[0:1]
v_mul_f64 v[10:11], v[8:9], v[6:7]
v_fma_f64 v[4:5], -v[4:5], v[10:11], v[8:9]
s_nop 1
v_div_fmas_f64 v[4:5], v[4:5], v[6:7], v[10:11]
v_div_fixup_f64 v[12:13], v[4:5], v[2:3], v[0:1]"""


def quotients(numerators: Array, denominators: Array, width: int = 32) -> Array:
    """IEEE 754's, by fractions."""
    found, kind = [], f"f{width}"
    infinity, sign = encode("inf", kind), 1 << (width - 1)
    for n, d in zip(numerators.tolist(), denominators.tolist(), strict=True):
        x, y = Value(n, width, kind), Value(d, width, kind)
        a, b, negative = x.number(), y.number(), x.negative() != y.negative()
        if NAN in (a, b) or (isinstance(a, str) and isinstance(b, str)) or (a == 0 and b == 0):
            found.append(encode(NAN, kind))
        elif isinstance(a, str) or b == 0:
            found.append(infinity | sign if negative else infinity)
        elif isinstance(b, str):
            found.append(sign if negative else 0)
        else:
            found.append(encode(a / b, kind, negative_zero=negative))
    return np.array(found, np.uint32 if width == 32 else np.uint64)


def _same(got: Array, want: Array) -> Array:
    kind = np.float32 if got.dtype == np.uint32 else np.float64
    return (got == want) | (np.isnan(got.view(kind)) & np.isnan(want.view(kind)))


def _ratios(how: str, generator: np.random.Generator) -> tuple[Array, Array]:
    if how == "any":
        hostile = np.array(statements._FLOAT_CODES[32], np.uint32)
        return generator.choice(hostile, 64), generator.choice(hostile, 64)
    if how == "bits":
        return (generator.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(2))  # type: ignore[return-value]
    exponents = {
        "subnormal results": (10, 140),
        "large results": (230, 20),
        "large denominators": (200, 253),
        "subnormal sources": (0, 0),
    }
    found = []
    for exponent in exponents[how]:
        mantissas = generator.integers(0, 1 << 23, 64, dtype=np.uint32)
        found.append(mantissas | np.uint32(exponent << 23) if exponent else mantissas | 1)
    return found[0], found[1]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "how", ["any", "bits", "subnormal results", "large results", "large denominators", "subnormal sources"]
)
def test_the_compilers_division_is_correctly_rounded(arch: str, how: str) -> None:
    """The sequence that LLVM emits for an IEEE division of binary32."""
    generator = np.random.default_rng(30)
    for _ in range(6):
        numerators, denominators = _ratios(how, generator)
        registers = np.zeros((512, 64), np.uint32)
        registers[0], registers[1] = numerators, denominators
        got = run_lines(arch, DIVISION, vgpr=registers).vgpr[2]
        want = quotients(numerators, denominators)
        right = _same(got, want)
        assert right.all(), [
            f"{numerators[k]:#x} / {denominators[k]:#x} = {got[k]:#x}, should be {want[k]:#x}"
            for k in np.flatnonzero(~right)
        ][:5]


_EXPONENTS_64 = {
    "subnormal results": (200, 1250), "large results": (1900, 200), "large denominators": (1700, 2046),
    "tiny under large": (1000, 2046), "subnormal sources": (0, 0), "results at the edge": (500, 1523),
}  # fmt: skip


def _ratios_64(how: str, generator: np.random.Generator) -> tuple[Array, Array]:
    if how == "any":
        hostile = np.array(statements._FLOAT_CODES[64], np.uint64)
        return generator.choice(hostile, 64), generator.choice(hostile, 64)
    if how == "bits":
        return (generator.integers(0, 1 << 64, 64, dtype=np.uint64) for _ in range(2))  # type: ignore[return-value]
    found = []
    for exponent in _EXPONENTS_64[how]:
        mantissas = generator.integers(0, 1 << 52, 64, dtype=np.uint64)
        # Short ones beside long ones: their quotients lie halfway between two numbers, or nearly so.
        mantissas &= generator.choice(np.array([0, 1 << 51, 7 << 49, (1 << 52) - 1], np.uint64), 64)
        powers = np.uint64(exponent) + generator.integers(0, 4, 64, dtype=np.uint64) if exponent else np.uint64(0)
        found.append(mantissas | powers << np.uint64(52) if exponent else mantissas | np.uint64(1))
    return found[0], found[1] & np.uint64(0x7FEFFFFFFFFFFFFF)


def _pairs(words: Array) -> list[Array]:
    return [(words & np.uint64(0xFFFFFFFF)).astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", ["any", "bits", *_EXPONENTS_64])
def test_the_compilers_division_of_doubles_is_correctly_rounded(arch: str, how: str) -> None:
    """The sequence that LLVM emits for an IEEE division of binary64."""
    generator = np.random.default_rng(31)
    for _ in range(6):
        numerators, denominators = _ratios_64(how, generator)
        registers = np.zeros((512, 64), np.uint32)
        registers[:2], registers[2:4] = _pairs(numerators), _pairs(denominators)
        after = run_lines(arch, DIVISION_64, vgpr=registers).vgpr.astype(np.uint64)
        got, want = after[12] | after[13] << np.uint64(32), quotients(numerators, denominators, 64)
        right = _same(got, want)
        assert right.all(), [
            f"{numerators[k]:#x} / {denominators[k]:#x} = {got[k]:#x}, should be {want[k]:#x}"
            for k in np.flatnonzero(~right)
        ][:5]


@pytest.mark.parametrize("arch", ARCHS)
def test_div_fmas_of_doubles_scales_by_2_to_the_128_and_rounds_once(arch: str) -> None:
    """Up by a third source of two or more; down, where many sums lie beside the middle of two subnormal numbers."""
    generator = np.random.default_rng(32)
    first = np.ldexp(generator.integers(1 << 52, 1 << 53, 64).astype(np.float64), -1062)
    second = generator.choice([-1.0, 1.0, 2.0**-60], 64)
    third = np.ldexp(generator.integers(1 << 30, 1 << 31, 64) + 0.5, -946)
    first[:16], third[:16] = generator.uniform(-1, 1, 16), generator.choice([1.5, 3.0], 16)
    registers = np.zeros((512, 64), np.uint32)
    for place, numbers in enumerate((first, second, third)):
        registers[2 * place : 2 * place + 2] = _pairs(numbers.view(np.uint64))
    sgpr = np.zeros(128, np.uint32)
    sgpr[[106, 107, 126, 127]] = 0xFFFFFFFF
    after = run_lines(arch, "v_div_fmas_f64 v[6:7], v[0:1], v[2:3], v[4:5]", vgpr=registers, sgpr=sgpr).vgpr
    got = after[6].astype(np.uint64) | after[7].astype(np.uint64) << np.uint64(32)
    sums = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(first, second, third, strict=True)]
    powers = [128 if c >= 2 else -128 for c in third.tolist()]
    want = [encode(x * Fraction(2) ** power, "f64") for x, power in zip(sums, powers, strict=True)]
    twice = [encode(Fraction(float(x)) * Fraction(2) ** power, "f64") for x, power in zip(sums, powers, strict=True)]
    assert twice != want
    assert got.tolist() == want


@pytest.mark.parametrize("arch", ARCHS)
def test_division_steps_without_scaling_pass_values_on(arch: str) -> None:
    registers = np.zeros((512, 64), np.uint32)
    registers[0] = (np.arange(64, dtype=np.float32) + 1).view(np.uint32)
    registers[1] = np.full(64, 3.0, np.float32).view(np.uint32)
    wave = run_lines(arch, "v_div_scale_f32 v3, vcc, v1, v1, v0\nv_div_scale_f32 v5, vcc, v0, v1, v0", vgpr=registers)
    assert np.array_equal(wave.vgpr[3], registers[1]) and np.array_equal(wave.vgpr[5], registers[0])
    assert wave.sgpr[106] == wave.sgpr[107] == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_div_fmas_scales_by_2_to_the_64_where_vcc_is_set(arch: str) -> None:
    registers = np.zeros((512, 64), np.uint32)
    a, b = np.float32(1.5), np.float32(1.25)
    registers[0], registers[1] = np.full(64, a).view(np.uint32), np.full(64, b).view(np.uint32)
    registers[2] = np.where(np.arange(64) % 2 == 0, np.float32(3.0), np.float32(1.0)).astype(np.float32).view(np.uint32)
    sgpr = np.zeros(128, np.uint32)
    sgpr[106], sgpr[107], sgpr[126], sgpr[127] = 0xFF, 0, 0xFFFFFFFF, 0xFFFFFFFF
    got = run_lines(arch, "v_div_fmas_f32 v3, v0, v1, v2", vgpr=registers, sgpr=sgpr).vgpr[3].view(np.float32)
    plain = a * b + registers[2].view(np.float32)
    factor = np.where(np.arange(64) < 8, np.where(np.arange(64) % 2 == 0, 2.0**64, 2.0**-64), 1.0)
    assert np.array_equal(got, (plain * factor).astype(np.float32))
    assert fused(*(floating(Fraction(x), "f32") for x in (1, 2, 3))).number() == 5


# ------------------------------------------------------------------------------------------------------ MODE.FP16_OVFL

OVERFLOWS = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("small", ["fp8", "bf8"])
@pytest.mark.parametrize("on", [False, True])
def test_conversion_to_eight_bits_saturates_by_the_mode(arch: str, small: str, on: bool) -> None:
    """ISA 7.3: NaN stays; with FP16_OVFL infinity and overflow become the largest, without it NaN, or infinity in OCP's E5M2."""
    kind = small + ("_fnuz" if arch == "gfx942" else "")
    codes = np.array(
        statements._FLOAT_CODES[32]
        + [0x43E7FFFF, 0x43E80001, 0x43F80000, 0x43780000, 0x47700000, 0x476FFFFF, 0x47600000, 0x47680000],
        np.uint32,
    )
    codes = np.concatenate([codes, codes ^ np.uint32(0x80000000)])[:64]
    registers = np.zeros((512, 64), np.uint32)
    registers[0, : len(codes)] = codes
    registers[5] = 0xDEADBEEF
    line = f"v_cvt_pk_{small}_f32 v5, v0, v0 op_sel:[0,0,1]"
    got = run_lines(arch, (OVERFLOWS if on else "") + line, vgpr=registers).vgpr[5]
    assert ((got & 0xFFFF) == 0xBEEF).all()
    for lane, bits in enumerate(registers[0].tolist()):
        value = Value(bits, 32, "f32")
        want = encode(value.number(), kind, negative_zero=value.negative(), saturate=on)
        if arch == "gfx942" and isinstance(value.number(), str):
            continue  # of infinity in the FNUZ encodings no document at hand speaks: NaN and the largest are both defensible
        if value.number() == NAN or want == encode(NAN, kind):
            assert isinstance(decode(int(got[lane]) >> 24, kind), str), hex(bits)
        else:
            assert int(got[lane]) >> 16 == want | want << 8, (
                f"{bits:#x}: {int(got[lane]) >> 16:#x}, should be {want | want << 8:#x}"
            )


@pytest.mark.parametrize("arch", ARCHS)
def test_halves_saturate_by_the_mode_but_infinities_stay(arch: str) -> None:
    """MODE, FP16_OVFL: "an overflowed FP16 result is clamped to +/- MAX_FP16, ... while still preserving true INF values"."""
    registers = np.zeros((512, 64), np.uint32)
    registers[0, :5] = np.array([1e6, -1e6, np.inf, -np.inf, 65504], np.float32).view(np.uint32)
    registers[1, :4] = [0x7BFF, 0xFBFF, 0x7C00, 0x3C00]
    lines = "v_cvt_f16_f32_e32 v5, v0\nv_add_f16_e32 v6, v1, v1\nv_mul_f16_e32 v7, v1, v1"
    plain = run_lines(arch, lines, vgpr=registers).vgpr
    assert plain[5, :5].tolist() == [0x7C00, 0xFC00, 0x7C00, 0xFC00, 0x7BFF]
    assert plain[6, :4].tolist() == [0x7C00, 0xFC00, 0x7C00, 0x4000]
    clamped = run_lines(arch, OVERFLOWS + lines, vgpr=registers).vgpr
    assert clamped[5, :5].tolist() == [0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7BFF]
    assert clamped[6, :4].tolist() == [0x7BFF, 0xFBFF, 0x7C00, 0x4000]
    assert clamped[7, :4].tolist() == [0x7BFF, 0x7BFF, 0x7C00, 0x3C00]
