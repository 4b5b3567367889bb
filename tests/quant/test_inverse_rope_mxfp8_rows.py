"""Are rows that are turned back and quantised judged rightly, and do ours give them?"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases import memory
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.quant import inverse_rope_mxfp8_rows as ask
from cases.quant import mxfp8_rows as quantising
from cases.quant.inverse_rope_mxfp8_rows import Inputs, Outputs, RotateQuantiseCase
from impl.executions import memory_watch
from impl.implementation import Impl, implementations
from impl.quant.inverse_rope_mxfp8_rows import IMPLS
from impl.sources import settings
from oracle import mxfp8, rotation
from oracle.check import Check
from oracle.formats import numbers
from oracle.quant import inverse_rope_mxfp8_rows as right
from reports.laws import break_of

SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, RotateQuantiseCase)]
OURS, VLLM, TORCH = IMPLS
Watched = Callable[[Impl, Inputs], Outputs]
EXACT = right.HONEST[0].precision
FLOAT32 = Precision(flushes=False)


def broken(inputs: Inputs, outputs: Outputs, precision: Precision = EXACT) -> list[Check]:
    return [check for check in right.judge(inputs, outputs, precision) if not check.passed]


def codes_of(outputs: Outputs) -> torch.Tensor:
    return outputs.codes.view(torch.uint8)


def call(rows: torch.Tensor, table: list[list[float]], positions: list[int], finished: int = 0) -> Inputs:
    tokens, heads, lanes = rows.shape
    return Inputs(
        rows=rows.to(torch.bfloat16),
        positions=torch.tensor(positions),
        cos_sin=torch.tensor(table),
        codes=torch.full((tokens, heads * lanes), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn),
        scales=torch.full((tokens, heads * lanes // 32), 0x7B, dtype=torch.uint8),
        finished=finished,
    )


QUARTERS = [[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]


def test_hand_worked_rows(watched: Watched) -> None:
    # Two heads of two blocks; the last pair of each head turns by a quarter: (1, 448) becomes (448, -1).
    rows = torch.zeros(1, 2, 64)
    rows[0, :, 62:] = torch.tensor([1.0, 448.0])
    rows[0, 1, 0] = 1.0
    for answer in (right.reference(call(rows, QUARTERS, [1])), watched(OURS, call(rows, QUARTERS, [1]))):
        assert answer.scales.tolist() == [[0, 127, 119, 127]]
        written = codes_of(answer)[0]
        assert written[62:64].tolist() == [0x7E, 0xB8] and written[126:128].tolist() == [0x7E, 0xB8]
        assert written[64].item() == 0x78
        assert int((written & 0x7F).count_nonzero()) == 5


def test_finished_rows_keep_their_bytes_and_the_others_their_positions() -> None:
    rows = torch.zeros(3, 1, 64)
    rows[:, 0, 62] = 1.0
    answer = right.reference(call(rows, QUARTERS, [2, 0, 1], finished=1))
    assert codes_of(answer)[0].unique().tolist() == [0xFF] and answer.scales[0].tolist() == [0x7B, 0x7B]
    assert codes_of(answer)[1, 62:].tolist() == [0x78, 0x00] and codes_of(answer)[2, 62:].tolist() == [0x00, 0xF8]


def test_rows_of_zeros_have_the_smallest_scale_and_no_nan(watched: Watched) -> None:
    inputs = ask.build(RotateQuantiseCase(values="zeros"))
    for answer in (right.reference(inputs), watched(OURS, inputs), watched(TORCH, inputs)):
        assert not answer.scales.any() and not (codes_of(answer) & 0x7F).any()


@pytest.mark.parametrize("case", SWEEP[::4], ids=str)
def test_the_reference_agrees_with_complex_numbers_and_fractions_of_scales(case: RotateQuantiseCase) -> None:
    inputs = ask.build(case)
    answer = right.reference(inputs, torch.float64)
    half, first = case.rotary // 2, case.head_dim - case.rotary
    per_head = case.head_dim // 32
    for t in range(case.finished, case.tokens)[:2]:
        head = case.heads - 1
        row = inputs.rows[t, head].double().tolist()
        angles = inputs.cos_sin[int(inputs.positions[t])].double().tolist()
        for pair in range(half):
            at = first + 2 * pair
            turned = complex(row[at], row[at + 1]) * complex(angles[pair], -angles[half + pair])
            row[at], row[at + 1] = turned.real, turned.imag
        for block in {0, per_head - 1}:
            lanes = row[32 * block : 32 * block + 32]
            scale = answer.scales[t, head * per_head + block].item()
            amax = max(2.0**-126, *map(abs, lanes))
            assert amax <= 448 * 2.0 ** (scale - 127) * (1 + 1e-15)
            assert scale == 0 or amax * (1 + 1e-15) > 448 * 2.0 ** (scale - 128)
            start = head * case.head_dim + 32 * block
            there = numbers.decode(codes_of(answer)[t, start : start + 32], "float8_e4m3fn", torch.float64)
            for got, lane in zip(there.tolist(), lanes, strict=True):
                exact = lane * 2.0 ** (127 - scale)
                assert abs(got - exact) <= max(abs(exact) * 2.0**-4, 2.0**-10) * (1 + 1e-12)


@given(st.integers(0, 10**6), st.sampled_from(["randn", "amax_edge", "ties", "outlier"]))
@hypothesis_settings(max_examples=12, deadline=None)
def test_the_answer_is_the_quantised_float32_rotation_bit_for_bit(watched: Watched, seed: int, values: str) -> None:
    case = RotateQuantiseCase(tokens=2, heads=2, head_dim=128, seed=seed, values=values)  # type: ignore[arg-type]
    inputs = ask.build(case)
    turned = rotation.turn(inputs.rows, inputs.cos_sin[inputs.positions], torch.float32).flatten(1)
    codes, scales = mxfp8.quantise(turned)
    quantiser = next(impl for impl in implementations("quant.mxfp8_rows") if impl.name == "ours-triton")
    apart = quantiser.run(quantising.Inputs(turned))
    for answer in (right.reference(inputs), watched(OURS, inputs), apart):
        assert torch.equal(answer.scales, scales)
        assert torch.equal(codes_of(answer), codes)


@pytest.mark.parametrize(
    ("law", "crooked"),
    [
        ("Y1", "first-position-for-all"),
        ("Y2", "scales-by-block"),
        ("Y4", "codes-pitch-ignored"),
        ("Y6", "position-one-less"),
        ("Y7", "cosines-for-sines"),
        ("Y8", "turned-forward"),
        ("Y9", "scale-byte-is-a-number"),
    ],
)
def test_laws_are_broken_by_faults_that_they_speak_of(law: str, crooked: str) -> None:
    (spoken,) = [one for one in right.LAWS if one.name.startswith(f"{law} ")]
    mutate = next(mutant.answer for mutant in right.MUTANTS if mutant.name == crooked)

    def answered(asked: Inputs) -> Outputs:
        return mutate(asked) or right.reference(asked)

    inputs = ask.build(RotateQuantiseCase(values="lanes"))
    checks = break_of(spoken, inputs, answered(inputs), answered, right.judge, FLOAT32)
    assert checks is not None and not all(check.passed for check in checks)


def test_the_other_laws_see_what_depends_on_memory_history_or_the_integer() -> None:
    inputs = ask.build(RotateQuantiseCase())
    calls: list[int] = []

    def drifting(asked: Inputs) -> Outputs:
        calls.append(0)
        answer = right.reference(asked)
        return Outputs(answer.codes, (answer.scales + len(calls) % 2).to(torch.uint8))

    for law in right.LAWS:
        if law.name.split()[0] in ("Y3", "Y5", "Y10"):
            checks = break_of(law, inputs, drifting(inputs), drifting, right.judge, FLOAT32)
            assert checks is not None and not all(check.passed for check in checks)


def test_ours_takes_heads_whose_blocks_are_no_power_of_two(watched: Watched) -> None:
    inputs = ask.build(RotateQuantiseCase(head_dim=96, tokens=2))
    assert broken(inputs, watched(OURS, inputs), FLOAT32) == []


def test_a_code_may_differ_only_where_a_tie_lies_within_the_bound() -> None:
    # 1.0625 lies halfway between the codes of 1 and 1.125 under the scale that 448 sets.
    rows = torch.zeros(1, 1, 64)
    rows[0, 0, 32], rows[0, 0, 62] = 448.0, 1.0625
    for angle, free in (([1.0, 0.0], False), ([1.0 - 2.0**-24, 0.0], True)):
        inputs = call(rows, [angle], [0])
        answer = right.reference(inputs, torch.float64)
        step = codes_of(answer)[0, 62].item()
        codes_of(answer)[0, 62] = {0x38: 0x39, 0x39: 0x38}[step]
        assert (broken(inputs, answer, FLOAT32) == []) == free
        assert broken(inputs, answer, EXACT)


def test_a_scale_may_differ_only_where_the_limit_lies_within_the_bound() -> None:
    rows = torch.zeros(1, 1, 64)
    rows[0, 0, 62] = 512.0
    for cos, least, most in ((448 / 512, 127, 127), (448 / 512 * (1 + 2.0**-23), 127, 128), (0.876, 128, 128)):
        inputs = call(rows, [[cos, 0.0]], [0])
        turned = rotation.turn(inputs.rows, inputs.cos_sin[[0]], torch.float64).flatten(1)
        for byte in (126, 127, 128, 129):
            scales = torch.tensor([[0, byte]], dtype=torch.uint8)
            codes = numbers.encode(mxfp8.scaled(turned, scales), "float8_e4m3fn")
            answer = Outputs(codes.view(torch.float8_e4m3fn), scales)
            assert (broken(inputs, answer, FLOAT32) == []) == (least <= byte <= most), (cos, byte)


def changed(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"rows": torch.zeros(2, 64).bfloat16()}, ValueError, r"rows=bfloat16\[2, 64\]: should be floats of"),
        ({"rows": torch.zeros(2, 1, 128).bfloat16()[..., ::2]}, ValueError, "lane stride of rows=2: should be 1"),
        ({"rows": torch.zeros(2, 1, 48).bfloat16()}, ValueError, "head_dim=48: should be a multiple of 32"),
        ({"cos_sin": torch.zeros(3, 64)}, ValueError, "rotary=64: should be less than head_dim=64"),
        ({"positions": torch.tensor([0, 3])}, ValueError, "positions=0 to 3: should be 0 to 2"),
        ({"finished": 3}, ValueError, "first row to turn=3: should be 0 to 2"),
        (
            {"codes": torch.zeros(2, 64, dtype=torch.uint8)},
            TypeError,
            "codes=torch.uint8: should be torch.float8_e4m3fn",
        ),
        ({"codes": torch.zeros(2, 32).to(E4M3)}, ValueError, r"codes=float8_e4m3fn\[2, 32\]: should be of \[2, 64\]"),
        ({"codes": torch.zeros(64, 2).to(E4M3).T}, ValueError, "lane stride of codes=2: should be 1"),
        ({"scales": torch.zeros(2, 2)}, TypeError, "scales=torch.float32: should be torch.uint8"),
        ({"scales": torch.zeros(2, 3, dtype=torch.uint8)}, ValueError, r"scales=uint8\[2, 3\]: should be of \[2, 2\]"),
        ({"scales": torch.zeros(2, 2, dtype=torch.uint8).T}, ValueError, "lane stride of scales=2: should be 1"),
    ],
)
def test_a_call_without_an_answer_says_why(changes: dict[str, object], error: type[Exception], sentence: str) -> None:
    good = call(torch.zeros(2, 1, 64), QUARTERS, [0, 1])
    right.reference(good)
    with pytest.raises(error, match=sentence):
        right.reference(changed(good, **changes))


def test_a_call_without_rows_is_answered_before_anything_is_looked_at() -> None:
    empty = changed(call(torch.zeros(0, 1, 64), QUARTERS, []), cos_sin=torch.zeros(3, 5))
    assert right.reference(empty).codes.shape == (0, 64)


def test_failures_name_the_row_and_the_column() -> None:
    rows = torch.zeros(2, 1, 64)
    rows[:, 0, 62] = 1.0
    inputs = call(rows, QUARTERS, [0, 0], finished=1)
    for change, begins in (
        ((0, 3), "codes[0, 3]=0 (0x00), but should be 255 (0xFF): rows that were finished before are left alone"),
        ((1, 3), "turned codes[0, 3]=1, but should be 0: no turned lane within its bound rounds to this code"),
    ):
        outputs = right.reference(inputs)
        codes_of(outputs)[change] = 0x38 if change[0] else 0
        assert str(broken(inputs, outputs)[0]).startswith(begins)
    outputs = right.reference(inputs)
    outputs.scales[1, 1] = 120
    assert str(broken(inputs, outputs)[0]).startswith("scales[1, 1]=120 (0x78), but should be 119 (0x77)")


def test_rows_are_finite() -> None:
    for case in SWEEP:
        assert bool(torch.isfinite(ask.build(case).rows).all()), case.id


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path)
    first, *others = VLLM.unsupported(RotateQuantiseCase(head_dim=96), "interpreter")
    assert "is not a vLLM tree" in first
    assert others == ["head_dim=96: vLLM's kernel takes a power of two"]


@pytest.mark.vllm
def test_vllm_turns_back_and_quantises_wherever_32_bits_reach(
    verdict: Callable[..., tuple[str, list[str]]],
) -> None:
    asked = [case for case in SWEEP[::5] if case.reach == "near" and case.positions != "strided"]
    assert len(asked) > 10
    for case in asked:
        assert verdict(case, VLLM) == ("pass", []), case.id


@pytest.mark.vllm
@pytest.mark.parametrize("reach", ["far_rows", "far_codes", "far_scales"])
def test_vllm_multiplies_row_and_stride_in_32_bits(reach: str) -> None:
    inputs = ask.build(RotateQuantiseCase(tokens=3, reach=reach))  # type: ignore[arg-type]
    with pytest.raises(Exception) as raised, memory_watch.watch():
        VLLM.run(memory.on_device(inputs, "cpu"))
    assert "before the start of argument" in str(raised.value.__cause__ or raised.value)


@pytest.mark.vllm
def test_vllm_quantises_the_rotation_in_float32_not_its_bfloat16(watched: Watched) -> None:
    inputs = ask.build(RotateQuantiseCase(tokens=2))
    answer, want = watched(VLLM, inputs), right.reference(inputs)
    assert torch.equal(answer.scales, want.scales)
    rounded = next(mutant.answer for mutant in right.MUTANTS if mutant.name == "rounded-to-bfloat16-first")(inputs)
    assert rounded is not None and bool((codes_of(answer) != codes_of(rounded)).any())
    assert int((codes_of(answer) != codes_of(want)).sum()) == 0


@pytest.mark.vllm
def test_vllm_looks_at_nothing_in_a_call_without_rows() -> None:
    empty = changed(call(torch.zeros(0, 1, 64), QUARTERS, []), cos_sin=torch.zeros(3, 5))
    assert VLLM.run(empty).codes.shape == (0, 64)
    for changes in ({"codes": torch.zeros(2, 32).to(E4M3)}, {"scales": torch.zeros(2, 2, dtype=torch.uint8).T}):
        with pytest.raises(AssertionError):
            VLLM.run(changed(call(torch.zeros(2, 1, 64), QUARTERS, [0, 1]), **changes))
