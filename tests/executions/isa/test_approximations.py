"""Are the functions that the hardware approximates within their stated error, and exact where the document is exact?

"CDNA4 Instruction Set Architecture Reference Guide" 12.8: exp, log, rcp, rsq and sqrt of binary32 have "1ULP accuracy,
denormals are flushed", those of binary16 1 ULP with denormals; of binary64 2**29 ULP. Its functional examples are asked
to the bit.
"""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from impl.executions.isa.coverage import modelled
from impl.executions.isa.single import run_lines
from tests.executions.isa import statements
from tests.executions.isa.statements import ARCHS

Array = np.ndarray[Any, Any]
mpmath.mp.prec = 120

EXAMPLES = {
    "v_exp_f32": {0xFF800000: 0, 0x80000000: 0x3F800000, 0x7F800000: 0x7F800000},
    "v_log_f32": {0xFF800000: None, 0xBF800000: None, 0x80000000: 0xFF800000, 0: 0xFF800000, 0x3F800000: 0,
                  0x7F800000: 0x7F800000},
    "v_rcp_f32": {0xFF800000: 0x80000000, 0xC0000000: 0xBF000000, 0x80000000: 0xFF800000, 0: 0x7F800000, 0x7F800000: 0},
    "v_rcp_iflag_f32": {0xC0000000: 0xBF000000, 0: 0x7F800000},
    "v_rsq_f32": {0xFF800000: None, 0x80000000: 0xFF800000, 0: 0x7F800000, 0x40800000: 0x3F000000, 0x7F800000: 0},
    "v_sqrt_f32": {0xFF800000: None, 0x80000000: 0x80000000, 0: 0, 0x40800000: 0x40000000, 0x7F800000: 0x7F800000},
    "v_sin_f32": {0xFF800000: None, 0x80000000: 0x80000000, 0x3E800000: 0x3F800000, 0x7F800000: None},
    "v_cos_f32": {0xFF800000: None, 0x80000000: 0x3F800000, 0x7F800000: None},
    "v_rcp_f16": {0xFC00: 0x8000, 0xC000: 0xB800, 0x8000: 0xFC00, 0: 0x7C00, 0x7C00: 0},
    "v_sqrt_f16": {0xFC00: None, 0x8000: 0x8000, 0: 0, 0x4400: 0x4000, 0x7C00: 0x7C00},
    "v_rsq_f16": {0xFC00: None, 0x8000: 0xFC00, 0: 0x7C00, 0x4400: 0x3800, 0x7C00: 0},
    "v_log_f16": {0xFC00: None, 0xBC00: None, 0x8000: 0xFC00, 0: 0xFC00, 0x3C00: 0, 0x7C00: 0x7C00},
    "v_exp_f16": {0xFC00: 0, 0x8000: 0x3C00, 0x7C00: 0x7C00},
}  # fmt: skip
EXACT = {
    "exp": lambda x: mpmath.power(2, x),
    "log": lambda x: mpmath.log(x, 2),
    "rcp": lambda x: 1 / x,
    "rcp_iflag": lambda x: 1 / x,
    "rsq": lambda x: 1 / mpmath.sqrt(x),
    "sqrt": mpmath.sqrt,
    "sin": lambda x: mpmath.sin(2 * mpmath.pi * x),
    "cos": lambda x: mpmath.cos(2 * mpmath.pi * x),
}


def _skip(arch: str, name: str) -> None:
    if arch not in modelled().get(name, ()):
        pytest.skip("not modelled")


def _run(arch: str, name: str, codes: Array) -> Array:
    registers = np.zeros((512, 64), np.uint32)
    registers[0, : len(codes)] = codes
    return run_lines(arch, f"{name}_e32 v1, v0", vgpr=registers).vgpr[1, : len(codes)]


def _float(codes: Array, name: str) -> Array:
    return (
        codes.astype(np.uint16).view(np.float16).astype(np.float64)
        if name.endswith("16")
        else codes.view(np.float32).astype(np.float64)
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documents_examples(arch: str, name: str) -> None:
    _skip(arch, name)
    sources = np.array(list(EXAMPLES[name]), np.uint32)
    for source, want, got in zip(
        EXAMPLES[name], EXAMPLES[name].values(), _run(arch, name, sources).tolist(), strict=True
    ):
        if want is None:
            assert np.isnan(_float(np.array([got], np.uint32), name)[0]), (
                f"{name} of {source:#x}: {got:#x}, should be NaN"
            )
        else:
            assert got == want, f"{name} of {source:#x}: {got:#x}, should be {want:#x}"


def _drawn(name: str, generator: np.random.Generator) -> Array:
    kind = name.split("_", 1)[1].rsplit("_", 1)[0]
    if name.endswith("16"):
        codes = generator.integers(0, 0x7C00, 64).astype(np.uint32)
        return codes | 0x8000 * generator.integers(0, 2, 64).astype(np.uint32) if kind in ("exp", "rcp") else codes
    if kind in ("exp", "sin", "cos"):
        scale = {"exp": 120.0, "sin": 200.0, "cos": 200.0}[kind]
        return (
            (generator.uniform(-scale, scale, 64) * generator.choice([1, 1e-3, 1e-6], 64))
            .astype(np.float32)
            .view(np.uint32)
        )
    codes = generator.integers(0x00800000, 0x7F800000, 64, dtype=np.uint32)
    return codes | generator.choice([0, 0x80000000], 64).astype(np.uint32) if kind.startswith("rcp") else codes


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_within_an_ulp_and_subnormal_results_are_flushed(arch: str, name: str) -> None:
    _skip(arch, name)
    kind, half = name.split("_", 1)[1].rsplit("_", 1)[0], name.endswith("16")
    digits, lowest = (10, -14) if half else (23, -126)
    generator = np.random.default_rng(40)
    for _ in range(3):
        codes = _drawn(name, generator)
        for source, code, got in zip(_float(codes, name), codes, _float(_run(arch, name, codes), name), strict=True):
            exact = EXACT[kind](mpmath.mpf(float(source)))
            if not half and abs(exact) < mpmath.mpf(2) ** lowest and kind not in ("sin", "cos", "log"):
                assert got == 0 or abs(got) == 2.0**lowest, f"{name} of {code:#x}: {got}, should be flushed"
                continue
            if abs(exact) >= mpmath.mpf(2) ** (16 if half else 128):
                assert np.isinf(got)
                continue
            power = max(int(mpmath.floor(mpmath.log(abs(exact), 2))), lowest) if exact else lowest
            unit = mpmath.mpf(2) ** (power - digits)
            if kind in ("sin", "cos"):  # no error is stated: an absolute one is asked
                unit = mpmath.mpf(2) ** -20
            assert abs(exact - mpmath.mpf(float(got))) <= unit, (
                f"{name} of {code:#x}: {got}, should be {mpmath.nstr(exact, 12)}"
            )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "positive", "negative"),
    [("v_exp_f32", 0x3F800000, 0x3F800000), ("v_log_f32", 0xFF800000, 0xFF800000), ("v_rcp_f32", 0x7F800000, 0xFF800000),
     ("v_rcp_iflag_f32", 0x7F800000, 0xFF800000), ("v_rsq_f32", 0x7F800000, 0xFF800000), ("v_sqrt_f32", 0, 0x80000000)],
)  # fmt: skip
def test_subnormal_sources_are_flushed(arch: str, name: str, positive: int, negative: int) -> None:
    _skip(arch, name)
    codes = np.array([1, 0x7FFFFF, 0x400000, 0x80000001, 0x807FFFFF], np.uint32)
    assert _run(arch, name, codes).tolist() == [positive] * 3 + [negative] * 2


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_nan_in_nan_out(arch: str, name: str) -> None:
    _skip(arch, name)
    codes = np.array(
        [0x7E00, 0xFE01, 0x7C01] if name.endswith("16") else [0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32
    )
    assert np.isnan(_float(_run(arch, name, codes), name)).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["rcp", "rsq", "sqrt"])
def test_doubles_are_within_the_stated_error(arch: str, kind: str) -> None:
    name = f"v_{kind}_f64"
    _skip(arch, name)
    values = np.random.default_rng(41).uniform(0.01, 1e6, 64)
    registers = np.zeros((512, 64), np.uint32)
    registers[0], registers[1] = values.view(np.uint32)[::2], values.view(np.uint32)[1::2]
    after = run_lines(arch, f"{name}_e32 v[2:3], v[0:1]", vgpr=registers).vgpr
    got = (after[2].astype(np.uint64) | after[3].astype(np.uint64) << np.uint64(32)).view(np.float64)
    want = np.array([float(EXACT[kind](mpmath.mpf(float(x)))) for x in values])
    assert (np.abs(got - want) <= np.abs(want) * 2.0 ** (29 - 52)).all()


def test_all_approximate_rows_are_asked_here() -> None:
    names = {ins.base for ins in statements.instructions().values() if statements.APPROXIMATE.match(ins.name)}
    asked = set(EXAMPLES) | {f"v_{kind}_f64" for kind in ("rcp", "rsq", "sqrt")}
    assert names - asked <= {"v_sin_f16", "v_cos_f16", "v_exp_legacy_f32", "v_log_legacy_f32"}
