"""Does the repaired interpreter give the numbers that a GPU gives, and does it refuse where it cannot?"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.errors import InterpreterError

from impl.executions import interpreter
from impl.executions import interpreter_numbers as numbers

ROOT = Path(__file__).resolve().parents[2]


@triton.jit
def cast_kernel(source, out, N: tl.constexpr, TO: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(source + lanes).to(TO))


@triton.jit
def multiply_kernel(a, b, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(a + lanes) * tl.load(b + lanes))


@triton.jit
def logic_kernel(a, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    x = tl.load(a + lanes)
    tl.store(out + lanes, tl.where(not (x > 0) and x > -3, x, 100))


@triton.jit
def dot_kernel(a, b, out, N: tl.constexpr):
    n = tl.arange(0, N)
    square = n[:, None] * N + n[None, :]
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square)))


@triton.jit
def program_kernel(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + place, x * 100 + y * 10 + z)


@triton.jit
def double(x):
    return x + x


@triton.jit
def calling_kernel(a, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, double(tl.load(a + lanes)))


@triton.jit
def overflowing_kernel(out, stride):
    tl.store(out, tl.program_id(0) * stride)


@triton.jit
def failing_kernel(out, N: tl.constexpr):
    tl.static_assert(N == 4, "N must be 4")
    tl.store(out, 1)


@triton.jit
def division_kernel(a, b, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(a + lanes) // tl.load(b + lanes))
    tl.store(out + N + lanes, tl.load(a + lanes) % tl.load(b + lanes))


@triton.jit
def minus_zero_kernel(out):
    tl.store(out, 0.0)
    tl.store(out + 1, -0.0)


def cast(values: list[float], to: torch.dtype, triton_type: object) -> torch.Tensor:
    out = torch.zeros(len(values), dtype=to)
    cast_kernel[(1,)](torch.tensor(values), out, len(values), triton_type)
    return out


def run_python(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_division_by_zero_is_no_zero(dtype: torch.dtype) -> None:
    out = torch.zeros(8, dtype=dtype)
    division_kernel[(1,)](torch.tensor([7, 7, -7, 0], dtype=dtype), torch.tensor([2, 0, 0, 0], dtype=dtype), out, 4)
    # What an NVIDIA H200 gives for int32; no machine promises it.
    assert out.tolist() == [3, -1, -1, -1, 1, -1, -1, -1]


def test_fp32_to_bf16_rounds_ties_to_even() -> None:
    # 1 + 2**-8 lies halfway between 1 and 1 + 2**-7, 1 + 3 * 2**-8 halfway between 1 + 2**-7 and 1 + 2**-6.
    got = cast([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8], torch.bfloat16, tl.bfloat16)
    assert got.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]


def test_fp32_to_e4m3fn_carries_into_the_next_binade() -> None:
    got = cast([31.6, 464.0, 2**-10, 1.5 * 2**-9], torch.float8_e4m3fn, tl.float8e4nv)
    assert got.view(torch.uint8).tolist() == [0x60, 0x7E, 0x00, 0x02]


def test_finite_overflow_clamps_and_nan_stays() -> None:
    got = cast([1e6, -1e6, math.nan, math.inf], torch.float8_e4m3fn, tl.float8e4nv).float()
    assert got[:2].tolist() == [448.0, -448.0]
    assert got[2].isnan()
    assert got[3].item() == 448.0


def test_e4m3fnuz_has_no_negative_zero() -> None:
    got = cast([-0.0, -(2.0**-12), -(2.0**-10), 232.0], torch.float8_e4m3fnuz, tl.float8e4b8)
    assert got.view(torch.uint8).tolist() == [0x00, 0x00, 0x81, 0x7E]


def test_zero_is_not_confused_with_minus_zero() -> None:
    out = torch.ones(2)
    for _ in range(2):
        minus_zero_kernel[(1,)](out)
        # What becomes of the minus sign differs between Triton versions; the plus sign never changes.
        assert out.tolist() == [0.0, 0.0]
        assert not out[0].signbit()


def test_bf16_products_round_once() -> None:
    x = torch.tensor([1.0078125, 3.0, -1.5, math.nan]).bfloat16()
    out = torch.zeros(4, dtype=torch.bfloat16)
    multiply_kernel[(1,)](x, x, out, 4)
    # 1.0078125**2 = 1.01568603515625 lies between 1.015625 and 1.0234375.
    assert out[:3].tolist() == [1.015625, 9.0, 2.25]
    assert out[3].isnan()


def test_not_and_and_apply_lane_by_lane() -> None:
    x = torch.tensor([-4, -2, 0, 3], dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.int32)
    logic_kernel[(1,)](x, out, 4)
    assert out.tolist() == [100, -2, 0, 100]


def test_bf16_dot_accumulates_in_fp32() -> None:
    a, b = torch.ones(16, 16).bfloat16(), torch.full((16, 16), 1 + 2**-7).bfloat16()
    out = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, out, 16)
    assert (out == 16 * (1 + 2**-7)).all()


def test_programs_see_their_place_in_the_grid() -> None:
    out = torch.zeros(2, 3, 4, dtype=torch.int32)
    program_kernel[(2, 3, 4)](out)
    want = [[[x * 100 + y * 10 + z for z in range(4)] for y in range(3)] for x in range(2)]
    assert out.tolist() == want


def test_a_grid_may_be_a_list_a_callable_or_empty() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    program_kernel[lambda meta: (4,)](out)
    assert out.tolist() == [0, 100, 200, 300]
    program_kernel[(0,)](out.zero_())
    assert out.tolist() == [0, 0, 0, 0]


def test_strided_and_offset_views_are_read_where_they_lie() -> None:
    base = torch.arange(16, dtype=torch.float32)
    out = torch.zeros(4)
    calling_kernel[(1,)](base[3:], out, 4)
    assert out.tolist() == [6.0, 8.0, 10.0, 12.0]


def test_overflow_is_an_error_only_when_asked() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    overflowing_kernel[(3,)](out, 2**30)
    assert out.item() == -(2**31)
    with interpreter.overflow_checks(), pytest.raises(interpreter.KernelFault) as caught:
        overflowing_kernel[(3,)](out, 2**30)
    assert str(caught.value) == ("int32 overflow in mul, program (2, 0, 0), lane (0,): the exact result is 2147483648")
    overflowing_kernel[(3,)](out, 2**30)


def test_a_failing_kernel_names_itself_and_its_program() -> None:
    with pytest.raises(InterpreterError, match=r"failing_kernel, program \(0, 0, 0\).*N must be 4"):
        failing_kernel[(1,)](torch.zeros(1, dtype=torch.int32), 8)


@given(st.floats(width=32, allow_nan=False))
def test_encode_bf16_agrees_with_torch(value: float) -> None:
    code = numbers.encode(np.array([value], np.float32), "bf16")
    assert code.view(np.int16).item() == torch.tensor([value]).bfloat16().view(torch.int16).item()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_encode_bf16_from_fp64_rounds_once(value: float) -> None:
    code = numbers.encode(np.array([value]), "bf16")
    got = float(numbers.decode(code, "bf16")[0])
    below, above = (np.nextafter(np.array(got, ml_dtypes.bfloat16), np.array(side, ml_dtypes.bfloat16))
                    for side in (-math.inf, math.inf))  # fmt: skip
    if math.isfinite(got):
        assert all(abs(value - got) <= abs(value - float(other)) for other in (below, above))


def test_powers_of_two_are_exact() -> None:
    exponents = np.arange(-149, 128).astype(np.float32)
    powers = np.ldexp(np.float32(1), exponents.astype(int))
    assert np.array_equal(numbers.exp2(exponents), powers)
    assert np.array_equal(numbers.log2(powers), exponents)


def test_integers_saturate_and_nan_gives_zero() -> None:
    got = numbers.to_integer(np.array([1e20, -1e20, np.nan, 7.9, -7.9], np.float32), np.dtype(np.int64))
    assert got.tolist() == [2**63 - 1, -(2**63), 0, 7, -7]


BLOCKS = {
    "int1": ((4,), np.array([0, 1, 1, 0], np.bool_)),
    "int8": ((4,), np.array([1, -2, 3, -128], np.int8)),
    "int32": ((2, 4), np.array([[1, -2, 3, 4], [5, 6, -7, 2**31 - 1]], np.int32)),
    "uint32": ((4,), np.array([1, 2, 3, 2**32 - 1], np.uint32)),
    "int64": ((2, 1), np.array([[5], [-(2**40)]], np.int64)),
    "fp16": ((4,), np.array([0.5, -1.5, 3.25, 100], np.float16)),
    "fp32": ((2, 4), np.array([[0.1, -2.5, 3, 4], [5, 1e30, -7, 8]], np.float32)),
    "bf16": ((4,), np.array([0x3F80, 0xBFC0, 0x4049, 0x7FC0], np.uint16)),
    "scalar": ((), np.array([3], np.int32)),
}
NUMBERS: list[float] = [2, 3, 0.5, True]
OPERATORS = {
    "__add__": ("add", True), "__sub__": ("sub", True), "__mul__": ("mul", True), "__truediv__": ("truediv",),
    "__and__": ("and_",), "__xor__": ("xor_",), "__lt__": ("less_than",), "__eq__": ("equal",),
    "__ne__": ("not_equal",),
}  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("left", BLOCKS)
def test_short_cuts_agree_with_tritons_own_semantics(operator: str, left: str) -> None:
    from triton.language.semantic import TritonSemantic

    from impl.executions.interpreter_builder import Handle
    from impl.executions.interpreter_language import BUILDER, typed

    spellings = {"scalar": "i32", "int1": "i1", "int8": "i8", "int32": "i32", "uint32": "u32", "int64": "i64"}

    def block(name: str) -> Any:
        dims, data = BLOCKS[name]
        dtype = tl.str_to_ty(spellings.get(name, name), None)
        return tl.tensor(Handle(data, dtype), typed(dtype, dims))

    def outcome(compute: Callable[[], Any]) -> object:
        with np.errstate(all="ignore"):
            try:
                result = compute()
            except Exception as error:
                return type(error)
        data = result.handle.data
        return str(result.type), str(data.dtype), data.shape, data.tobytes()

    x = block(left)
    method, *flags = OPERATORS[operator]
    theirs = getattr(TritonSemantic(BUILDER), method)
    computed = 0
    # Older Tritons compare with a number as if it were a tensor of its own type, so only plain ones are asked about.
    beyond = [] if method in ("less_than", "equal", "not_equal") else [-3, 2**40]
    for right in [*map(block, BLOCKS), *NUMBERS, *beyond]:
        ours = outcome(lambda right=right: getattr(x, operator)(right))
        assert ours == outcome(lambda right=right: theirs(x, right, *flags)), right
        computed += isinstance(ours, tuple)
    assert computed or (operator, left) in {("__and__", "fp16"), ("__and__", "bf16"), ("__and__", "fp32"),
                                            ("__xor__", "fp16"), ("__xor__", "bf16"), ("__xor__", "fp32")}  # fmt: skip


def test_a_kernel_reads_names_of_the_function_round_it() -> None:
    import triton.language as language

    step = tl.constexpr(3)

    @triton.jit
    def enclosed_kernel(out, N: language.constexpr):
        lanes = language.arange(0, N)
        language.store(out + lanes, lanes * step)

    out = torch.zeros(4, dtype=torch.int32)
    enclosed_kernel[(1,)](out, N=4)
    assert out.tolist() == [0, 3, 6, 9]


def test_install_twice_is_harmless() -> None:
    interpreter.install()
    assert interpreter.installed()
    assert interpreter.unsupported() == []


def test_importing_the_module_imports_no_triton() -> None:
    code = "import sys, impl.executions.interpreter as i, impl.executions.memory_watch; print('triton' in sys.modules)"
    assert run_python(code) == "False"


def test_kernels_decorated_for_the_compiler_are_a_reason() -> None:
    code = "import impl.executions.interpreter as i; print(i.unsupported())"
    assert "TRITON_INTERPRET was not set" in run_python(code)
    assert run_python(code, TRITON_INTERPRET="1") == "[]"


def test_install_raises_with_the_reasons() -> None:
    code = (
        "import impl.executions.interpreter as i\n"
        "try: i.install()\n"
        "except RuntimeError as error: print(error, i.installed())"
    )
    assert run_python(code).endswith("decorated for the compiler False")


def test_another_version_is_a_reason() -> None:
    code = (
        "import triton; triton.__version__ = '3.3.0'; import impl.executions.interpreter as i; print(i.unsupported())"
    )
    assert run_python(code, TRITON_INTERPRET="1") == "['triton 3.3.0: the faithful interpreter covers 3.6 to 3.9']"


def test_a_changed_internal_is_a_reason() -> None:
    code = (
        "from triton.runtime import interpreter as stock\n"
        "import impl.executions.interpreter as i\n"
        "stock.InterpreterBuilder.create_dot = lambda self, a, b: None\n"
        "del stock.GridExecutor._restore_args_dev\n"
        "print('\\n'.join(i.unsupported()))"
    )
    lines = run_python(code, TRITON_INTERPRET="1").splitlines()
    assert len(lines) == 2
    assert lines[0] == "triton.runtime.interpreter.GridExecutor._restore_args_dev: gone from this triton"
    assert lines[1].startswith("triton.runtime.interpreter.InterpreterBuilder.create_dot takes (self, a, b)")


def test_a_missing_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_installed", False)
    monkeypatch.setattr(interpreter.importlib, "util", types.SimpleNamespace(find_spec=lambda name: None))
    assert interpreter.unsupported() == ["triton is not installed"]
