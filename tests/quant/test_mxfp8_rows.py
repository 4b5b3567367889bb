"""Are MXFP8 quantisers judged rightly: every right answer passes, every wrong one is seen, and do ours give it?"""

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.covering import sweep_cases
from cases.precision import Precision
from cases.quant import mxfp8_rows as ask
from cases.quant.mxfp8_rows import Inputs, Outputs, QuantiseCase
from impl.implementation import Impl
from impl.quant.mxfp8_rows import IMPLS
from impl.sources import settings
from oracle.check import Check
from oracle.quant import mxfp8_rows as right
from reports.laws import break_of

SWEEP = [case for case in sweep_cases("quant.mxfp8_rows", "default") if isinstance(case, QuantiseCase)]
OURS, VLLM, VLLM_TORCH, _ = IMPLS
Watched = Callable[[Impl, Inputs], Outputs]
STRICT = Precision(flushes=False)


def row_of(amax: float, others: float = 0.0) -> torch.Tensor:
    """One block whose largest magnitude is `amax`, as float32."""
    row = torch.full((1, 32), others)
    row[0, 5] = amax
    return row


def broken(inputs: Inputs, outputs: Outputs, precision: Precision = STRICT) -> list[Check]:
    return [check for check in right.judge(inputs, outputs, precision) if not check.passed]


ULP_AT_448 = 2.0**-15


@pytest.mark.parametrize(
    ("amax", "byte", "code"),
    [
        (0.0, 0, 0x00),
        (-0.0, 0, 0x80),
        (2.0**-126, 0, 0x40),
        (2.0**-149, 0, 0x00),
        (2.0**-127, 0, 0x38),
        (448.0 * 2.0**-127, 0, 0x7E),
        (1.0, 119, 0x78),
        (-1.0, 119, 0xF8),
        (224.0, 126, 0x7E),
        (225.0, 127, 0x76),
        (240.0, 127, 0x77),
        (448.0, 127, 0x7E),
        (448.0 - ULP_AT_448, 127, 0x7E),
        (448.0 + ULP_AT_448, 128, 0x76),
        (449.0, 128, 0x76),
        (3.3e38, 247, 0x78),
    ],
)
def test_hand_worked_blocks(amax: float, byte: int, code: int, watched: Watched) -> None:
    for impl_answer in (right.reference(Inputs(row_of(amax))), watched(OURS, Inputs(row_of(amax)))):
        assert impl_answer.scales.tolist() == [[byte]]
        assert impl_answer.codes.view(torch.uint8)[0, 5].item() == code
        assert impl_answer.codes.view(torch.uint8)[0, 6:].count_nonzero() == 0


def test_blocks_stand_in_the_order_of_their_lanes() -> None:
    rows = torch.cat((row_of(448.0), row_of(1.0), row_of(0.0)), dim=1).expand(2, -1) * torch.tensor([[1.0], [2.0]])
    answer = right.reference(Inputs(rows))
    assert answer.scales.tolist() == [[127, 119, 0], [128, 120, 0]]
    assert answer.codes.dtype == torch.float8_e4m3fn and answer.codes.shape == (2, 96)


def scalar_block(lanes: list[float]) -> tuple[int, list[int]]:
    """One block by exact fractions, looking at every byte and every code."""
    numbers = [
        (Fraction(code & 7, 8) + (1 if code >> 3 else 0)) * Fraction(2) ** (max(code >> 3, 1) - 7)
        for code in range(0x7F)
    ]
    amax = max(Fraction(2) ** -126, *(abs(Fraction(lane)) for lane in lanes))
    byte = next(byte for byte in range(255) if amax <= 448 * Fraction(2) ** (byte - 127))
    codes = []
    for lane in lanes:
        exact = abs(Fraction(lane)) * Fraction(2) ** (127 - byte)
        code = min(range(0x7F), key=lambda c, exact=exact: (abs(numbers[c] - exact), c % 2))  # type: ignore[misc]
        codes.append(code | (0x80 if math.copysign(1.0, lane) < 0 else 0))
    return byte, codes


@pytest.mark.parametrize("values", ask.AXES["values"])
def test_the_reference_agrees_with_exact_fractions(values: str) -> None:
    inputs = ask.build(QuantiseCase(tokens=2, lanes=96, dtype="float32", values=values))  # type: ignore[arg-type]
    answer = right.reference(inputs)
    for block in range(3):
        byte, codes = scalar_block(inputs.rows[1, 32 * block : 32 * block + 32].tolist())
        assert answer.scales[1, block].item() == byte
        assert answer.codes.view(torch.uint8)[1, 32 * block : 32 * block + 32].tolist() == codes


def test_every_bfloat16_magnitude_has_the_byte_of_the_formula() -> None:
    magnitudes = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16)
    rows = torch.zeros(0x7F80, 32, dtype=torch.bfloat16)
    rows[:, 3] = magnitudes
    scales = right.reference(Inputs(rows)).scales[:, 0]
    formula = torch.ceil(torch.log2(magnitudes.float().clamp(min=2.0**-126) / 448.0)) + 127
    assert torch.equal(scales, formula.clamp(0, 254).to(torch.uint8))
    low, high = right.scale_range(magnitudes.double())
    assert torch.equal(low, high)


@given(st.integers(-127, 119), st.integers(-3, 200))
@hypothesis_settings(max_examples=80, deadline=None)
def test_the_lower_byte_is_right_up_to_64_float32_numbers_above_the_limit(k: int, steps: int) -> None:
    edge = np.float32(448.0 * 2.0**k).view(np.int32) + np.int32(steps)
    amax = torch.tensor([float(edge.view(np.float32))], dtype=torch.float64)
    low, high = right.scale_range(amax)
    exact = k + 127 + (steps > 0)
    assert high.item() == exact
    assert low.item() == (exact - 1 if 0 < steps <= 64 else exact)
    inputs = Inputs(row_of(float(amax)))
    for byte in (exact - 1, exact, exact + 1):
        if not 0 <= byte <= 254:
            continue
        answer = right._coded(inputs.rows, torch.tensor([[byte]], dtype=torch.uint8))
        assert (broken(inputs, answer) == []) == (int(low) <= byte <= exact)


@given(st.integers(0, 10**6), st.sampled_from(ask.AXES["values"]), st.sampled_from(["bfloat16", "float32"]))
@hypothesis_settings(max_examples=25, deadline=None)
def test_dequantised_rows_are_near_the_rows(seed: int, values: str, dtype: str) -> None:
    case = QuantiseCase(tokens=2, lanes=64, seed=seed, values=values, dtype=dtype)  # type: ignore[arg-type]
    if ask.forbid(case):
        return
    inputs = ask.build(case)
    answer = right.reference(inputs)
    step = torch.ldexp(torch.ones(()).double(), answer.scales.double() - 127).repeat_interleave(32, -1)
    rows = inputs.rows.double()
    assert bool(((right.dequantised(answer) - rows).abs() <= 2.0**-4 * rows.abs() + 2.0**-10 * step).all())
    assert bool((answer.codes.view(torch.uint8) & 0x7F != 0x7F).all())


@pytest.mark.parametrize(
    ("law", "crooked", "values"),
    [
        ("X1", "last-rows-left", "randn"),
        ("X2", "scale-of-the-next-block", "outlier"),
        ("X3", "amax-of-16-lanes", "outlier"),
        ("X4", "maximum-with-sign", "negative"),
        ("X6", "scale-of-at-least-1e-4", "amax_edge"),
        ("X7", "codes-toward-zero", "outlier"),
    ],
)
def test_laws_are_broken_by_faults_that_they_speak_of(law: str, crooked: str, values: str) -> None:
    (spoken,) = [one for one in right.LAWS if one.name.startswith(f"{law} ")]
    answer = next(mutant.answer for mutant in right.MUTANTS if mutant.name == crooked)

    def answered(asked: Inputs) -> Outputs:
        found: Outputs = answer(asked)  # type: ignore[assignment]
        return found

    broke = False
    for seed in range(6):
        inputs = ask.build(QuantiseCase(tokens=65, lanes=96, values=values, seed=seed))  # type: ignore[arg-type]
        inputs = Inputs(inputs.rows.clamp(-1e30, 1e30).where(inputs.rows.abs() > 1e-28, 1e-28))
        checks = break_of(spoken, inputs, answered(inputs), answered, right.judge, STRICT)
        broke = broke or (checks is not None and not all(check.passed for check in checks))
    assert broke


def test_widening_and_repeating_see_what_depends_on_the_dtype_or_on_history() -> None:
    inputs = ask.build(QuantiseCase())
    calls: list[int] = []

    def drifting(asked: Inputs) -> Outputs:
        calls.append(0)
        answer = right.reference(asked)
        return Outputs(answer.codes, (answer.scales + len(calls) % 2).to(torch.uint8))

    for law in right.LAWS:
        if law.name[:2] in ("X5", "X8"):
            checks = break_of(law, inputs, drifting(inputs), drifting, right.judge, STRICT)
            assert checks is not None and not all(check.passed for check in checks)


def test_ours_is_the_reference_bit_for_bit_in_the_band_too(watched: Watched) -> None:
    for case in SWEEP:
        if case.values == "band" and case.tokens <= 7:
            inputs = ask.build(case)
            got, want = watched(OURS, inputs), right.reference(inputs)
            assert torch.equal(got.scales, want.scales)
            assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))


def test_the_code_of_a_subnormal_may_be_lost_only_where_that_is_declared() -> None:
    inputs = Inputs(row_of(2.0**-127, others=1.0e-20))
    right_answer = right.reference(inputs)
    assert right_answer.codes.view(torch.uint8)[0, 5].item() == 0
    small = Inputs(row_of(2.0**-127))
    flushed = right.reference(small)
    flushed.codes.view(torch.uint8)[0, 5] = 0
    assert broken(small, flushed, STRICT) and not broken(small, flushed, Precision())
    normal = Inputs(row_of(2.0**-126))
    lost = right.reference(normal)
    lost.codes.view(torch.uint8)[0, 5] = 0
    assert broken(normal, lost, Precision())


@pytest.mark.parametrize(
    ("rows", "error", "sentence"),
    [
        (torch.zeros(2, 33), ValueError, r"rows=\[2, 33\]: should have a multiple of 32 lanes"),
        (torch.zeros(()), ValueError, r"rows=\[\]: should have a multiple of 32 lanes"),
        (torch.zeros(2, 32).double(), TypeError, "rows=torch.float64: should be torch.bfloat16, torch.float16 or"),
        (torch.zeros(2, 32).int(), TypeError, "rows=torch.int32: should be torch.bfloat16"),
    ],
)
def test_a_call_without_an_answer_says_why(rows: torch.Tensor, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        right.reference(Inputs(rows))


def test_failures_name_the_block_and_the_lane() -> None:
    inputs = Inputs(torch.cat((row_of(448.0), row_of(1.0)), dim=1))
    wrong = right.reference(inputs)
    wrong.scales[0, 1] = 120
    sentences = [str(check) for check in broken(inputs, wrong)]
    assert len(sentences) == 1
    assert sentences[0].startswith("scales[0, 1]=120 (0x78), but should be 119 (0x77): the scale is the smallest")
    lane = right.reference(inputs)
    lane.codes.view(torch.uint8)[0, 5] = 0x7F
    assert str(broken(inputs, lane)[0]).startswith("codes[0, 5]=127 (0x7F), but should be 126 (0x7E): each lane rounds")
    assert "but should be uint8[1, 2]" in str(broken(inputs, Outputs(lane.codes, lane.scales[:, :1]))[0])


def test_rows_are_finite() -> None:
    for case in SWEEP:
        assert bool(torch.isfinite(ask.build(case).rows).all()), case.id


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path)
    first, *others = VLLM.unsupported(QuantiseCase(stack=3), "interpreter")
    assert "is not a vLLM tree" in first
    assert others == ["stack=3: vLLM's Triton kernel takes rows, its torch form (vllm-torch) takes stacks"]
    assert VLLM_TORCH.unsupported(QuantiseCase(stack=3), "interpreter") == [first]


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_TORCH], ids=lambda impl: impl.name)
def test_vllm_quantises_rightly(impl: Impl, verdict: Callable[..., tuple[str, list[str]]]) -> None:
    asked = [case for case in SWEEP[::4] if case.tokens and not impl.unsupported(case, "interpreter")]
    assert len(asked) > 8
    for case in asked:
        assert verdict(case, impl) == ("pass", []), case.id


@pytest.mark.vllm
def test_vllms_torch_form_cannot_take_zero_rows() -> None:
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        VLLM_TORCH.run(ask.build(QuantiseCase(tokens=0)))
    assert VLLM.run(ask.build(QuantiseCase(tokens=0))).scales.shape == (0, 16)


@pytest.mark.vllm
def test_vllms_formula_takes_the_lower_byte_just_above_a_limit(watched: Watched) -> None:
    rows = torch.cat([row_of(float(np.nextafter(np.float32(448.0 * 2.0**70), np.float32(np.inf))))] * 2)
    assert right.reference(Inputs(rows)).scales.tolist() == [[198], [198]]
    for impl in (VLLM, VLLM_TORCH):
        answer = watched(impl, Inputs(rows))
        assert answer.scales.tolist() == [[197], [197]] and broken(Inputs(rows), answer) == []
