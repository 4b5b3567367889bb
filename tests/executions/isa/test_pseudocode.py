"""Is the evaluator of AMD's pseudocode right where it can be worked out by hand, and do small floats agree with other tables?"""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.executions.isa import functions, lane_runs, statements
from tests.executions.isa.pseudocode import Run, Value, floating, parse, whole
from tests.executions.isa.small_floats import FORMATS, NAN, decode, encode, largest_code
from tests.executions.isa.statements import Result


def run(text: str, **names: Value) -> Run:
    return Run({"D0": Value(0, 64, "b"), **names}, functions.named("gfx950")).execute(text)


def result(text: str, **sources: int) -> int:
    return run(text, **{name: Value(bits, 64, "b") for name, bits in sources.items()}).names["D0"].bits


@pytest.mark.parametrize(
    ("text", "sources", "want"),
    [
        ("D0.u32 = S0.u32 + S1.u32", {"S0": 0xFFFFFFFF, "S1": 2}, 1),
        ("D0.i32 = (S1.i32 >> S0[4 : 0].u32)", {"S0": 33, "S1": 0x80000000}, 0xC0000000),
        ("D0.u32 = 32'U((64'U(S0.u32) * 64'U(S1.u32)) >> 32U)", {"S0": 0xFFFFFFFF, "S1": 0xFFFFFFFF}, 0xFFFFFFFE),
        ("D0.u32[31 : 0] = S0.u32[0 : 31]", {"S0": 1}, 0x80000000),
        ("D0 = { S1[15 : 0].u16, S0[31 : 16].u16 }", {"S0": 0xAAAABBBB, "S1": 0xCCCCDDDD}, 0xDDDDAAAA),
        ("D0.f32 = S0.f32 * 2.0F ** S1.i32", {"S0": 0x3F800000, "S1": 0xFFFFFF6B}, 1),
        ("D0.f32 = fma(S0.f32, S0.f32, S1.f32)", {"S0": 0x3F800001, "S1": 0xBF800002}, 0x28800000),
        ("if S0.i32 < 0 then\nD0.i32 = -1\nelsif S0.i32 == 0 then\nD0.i32 = 5\nelse\nD0.i32 = 1\nendif", {"S0": 0}, 5),
        (
            "D0.i32 = -1;\nfor i in 0 : 31 do\nif S0.u32[i] == 1'1U then\nD0.i32 = i;\nbreak\nendif\nendfor",
            {"S0": 0x50},
            4,
        ),
        ("F = lambda(x, y) (\nx > y ? x - y : y - x);\nD0.u32 = F(S0.u32, S1.u32)", {"S0": 3, "S1": 10}, 7),
        ("{ D1.u1, D0.u64 } = 65'B(65'U(S0.u32) + 65'U(S1.u64))", {"S0": 1, "S1": 2**64 - 1}, 0),
    ],
)
def test_worked_by_hand(text: str, sources: dict[str, int], want: int) -> None:
    assert result(text, **sources, D1=0) & 0xFFFFFFFF == want


def test_what_was_written_is_known_by_the_bit() -> None:
    done = run("D0[31 : 16].u16 = S0.u16", S0=whole(0x1234))
    assert done.names["D0"].bits == 0x12340000 and done.written["D0"] == 0xFFFF0000


def test_signalling_nans_survive_a_change_of_format() -> None:
    assert result("D0.u32 = isSignalNAN(64'F(S0.f32)) ? 1U : 0U", S0=0x7F800001) == 1
    assert result("D0.f32 = 32'F(cvtToQuietNAN(64'F(S0.f32)))", S0=0xFF800001) == 0xFFC00001


def test_what_is_no_pseudocode_is_refused() -> None:
    for text in ("D0.u32 = ", "if S0 then", "D0.u32 = S0.u32 )"):
        with pytest.raises(SyntaxError):
            parse(text)


_TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2,
          "fp8_fnuz": ml_dtypes.float8_e4m3fnuz, "bf8_fnuz": ml_dtypes.float8_e5m2fnuz, "fp6": ml_dtypes.float6_e2m3fn,
          "bf6": ml_dtypes.float6_e3m2fn, "fp4": ml_dtypes.float4_e2m1fn}  # fmt: skip


@pytest.mark.parametrize("name", _TYPES)
def test_codes_are_those_of_ml_dtypes(name: str) -> None:
    width = FORMATS[name].width
    codes = np.arange(1 << width).astype(np.uint8 if width <= 8 else np.uint16)
    for code, other in enumerate(codes.view(_TYPES[name]).astype(np.float64).tolist()):
        number = decode(code, name)
        assert (number == NAN and np.isnan(other)) or (float(number) == other)


@pytest.mark.parametrize("name", _TYPES)
def test_roundings_are_those_of_ml_dtypes(name: str) -> None:
    top = float(Fraction(decode(largest_code(name), name)))
    numbers = np.random.default_rng(0).normal(size=2000) * top / 4
    numbers = np.concatenate([numbers[np.abs(numbers) < top], [0.0, top, -top]])
    for number, other in zip(numbers.tolist(), numbers.astype(_TYPES[name]).astype(np.float64).tolist(), strict=True):
        assert float(Fraction(decode(encode(Fraction(number), name, negative_zero=False), name))) == other


@pytest.mark.parametrize("number", [0.1, 1 / 3, 1e-40, 3.4e38, 2.0**-149, 2.0**-150, 1.5 * 2.0**-149])
def test_binary32_is_numpys(number: float) -> None:
    assert encode(Fraction(number), "f32") == int(np.array([number]).astype(np.float32).view(np.uint32)[0])


def test_any_quiet_nan_stands_for_another_but_for_no_number() -> None:
    stated = Result(0x7FC00000, 0xFFFFFFFF, None, 32)
    assert lane_runs.agrees(0xFFC00001, stated)
    assert not lane_runs.agrees(0x7F800001, stated)
    assert not lane_runs.agrees(0x7F800000, stated)
    assert not lane_runs.agrees(0x3F800000, stated)
    assert lane_runs.agrees(0x7FC00001, Result(0x7F800001, 0xFFFFFFFF, None, 32))
    assert not lane_runs.agrees(0x7FC00001, Result(0x7FC00000, 0xFFFFFFFF, None, 0))


def test_a_wrong_statement_is_noticed() -> None:
    ins = statements.instructions()["VOP2 V_ADD_U32_E32"]
    form = statements.forms(ins)[0]
    found = lane_runs.differences(
        form,
        "gfx950",
        stated=lambda lane, sources, old, mask: Result(sum(sources) + (lane == 7) & 0xFFFFFFFF, 0xFFFFFFFF, None),
    )
    assert len(found) == 1 and found[0].startswith("lane 7")


def test_sums_keep_the_sign_of_zero() -> None:
    assert result("D0.f32 = S0.f32 + S1.f32", S0=0x80000000, S1=0x80000000) == 0x80000000
    assert result("D0.f32 = S0.f32 - S1.f32", S0=0x3F800000, S1=0x3F800000) == 0
    assert floating(Fraction(-1, 10**60), "f32").bits == 0x80000000
