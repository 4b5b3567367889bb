"""Is the inverse rotation judged rightly: every right answer passes, every wrong one is seen, and do ours give it?"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases import memory
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import inverse_rope as ask
from cases.sparse_mla.inverse_rope import Inputs, Outputs, RotateCase
from impl.executions import memory_watch
from impl.implementation import Impl
from impl.sparse_mla.inverse_rope import IMPLS
from oracle import rotation
from oracle.check import Check
from oracle.sparse_mla import inverse_rope as right
from reports.laws import break_of

SWEEP = [case for case in sweep_cases("sparse_mla.inverse_rope", "default") if isinstance(case, RotateCase)]
OURS, VLLM, _ = IMPLS
Watched = Callable[[Impl, Inputs], Outputs]
EXACT = right.HONEST[0].precision
FLOAT32 = Precision(flushes=False)


def call(rows: torch.Tensor, table: list[list[float]], positions: list[int], rotated: int = 0) -> Inputs:
    """An in-place call on bfloat16 rows."""
    return Inputs(
        rows=None,
        positions=torch.tensor(positions),
        cos_sin=torch.tensor(table),
        out=rows.to(torch.bfloat16),
        rotated=rotated,
    )


def broken(inputs: Inputs, outputs: Outputs, precision: Precision = EXACT) -> list[Check]:
    return [check for check in right.judge(inputs, outputs, precision) if not check.passed]


QUARTERS = [[1.0, 1.0, 0.0, 0.0], [0.0, -1.0, 1.0, 0.0], [0.0, 1.0, -1.0, 0.0]]
ROW = torch.tensor([9.0, 3.0, 4.0, 5.0, 6.0])


@pytest.mark.parametrize(
    ("position", "want"),
    [(0, [9.0, 3.0, 4.0, 5.0, 6.0]), (1, [9.0, 4.0, -3.0, -5.0, -6.0]), (2, [9.0, -4.0, 3.0, 5.0, 6.0])],
)
def test_hand_worked_quarter_turns(position: int, want: list[float]) -> None:
    inputs = call(ROW.expand(1, 2, 5).clone(), QUARTERS, [position])
    assert right.reference(inputs).out.tolist() == [[want, want]]


def test_a_hand_worked_angle_rounds_once() -> None:
    # 3 * 0.6 + 4 * 0.8 = 5 and 4 * 0.6 - 3 * 0.8 = 0 but for the rounding of the table.
    inputs = call(torch.tensor([[[1.0, 3.0, 4.0]]]), [[0.6, 0.8]], [0])
    out = right.reference(inputs, torch.float64).out[0, 0]
    assert out[:2].tolist() == [1.0, 5.0] and 0 < abs(float(out[2])) < 2.0**-22


def test_rows_in_front_keep_their_bits_and_the_others_their_positions() -> None:
    rows = ROW.expand(3, 1, 5).clone()
    rows[0] = float("nan")
    out = right.reference(call(rows, QUARTERS, [2, 0, 1], rotated=1)).out
    assert bool(torch.isnan(out[0]).all())
    assert out[1:, 0].tolist() == [[9.0, 3.0, 4.0, 5.0, 6.0], [9.0, 4.0, -3.0, -5.0, -6.0]]


@pytest.mark.parametrize("case", SWEEP[::4], ids=str)
def test_the_reference_agrees_with_complex_numbers_one_pair_at_a_time(case: RotateCase) -> None:
    inputs = ask.build(case)
    got = right.reference(inputs, torch.float64).out[case.rotated :].double().numpy()
    rows = inputs.source[case.rotated :].double().numpy()
    table, positions = inputs.cos_sin.double().numpy(), inputs.positions[case.rotated :].tolist()
    half = case.rotary // 2
    for t, position in enumerate(positions[:3]):
        for pair in {0, half // 2, half - 1}:
            lane = case.nope + 2 * pair
            point = complex(rows[t, -1, lane], rows[t, -1, lane + 1])
            turned = point * complex(table[position, pair], -table[position, half + pair])
            with np.errstate(all="ignore"):
                want = torch.tensor([turned.real, turned.imag], dtype=torch.float64)
            there = torch.from_numpy(got[t, -1, lane : lane + 2])
            error = (there - want).abs() / (want.abs() + 2.0**-126)
            alike = (there == want) | (torch.isnan(there) & torch.isnan(want)) | torch.isinf(there)
            assert bool((alike | (error <= 2.0**-8)).all())


def round_float32(value: Fraction) -> Fraction:
    """To nearest even on the grid of float32, in exact arithmetic."""
    if value == 0:
        return value
    exponent = 0
    size = abs(value)
    while size >= 2 ** (exponent + 1):
        exponent += 1
    while size < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(value / step) * step


@given(
    st.integers(-(2**15), 2**15), st.integers(-(2**15), 2**15), st.integers(0, 2**20), st.sampled_from([0, -60, -130])
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_the_bound_holds_every_way_of_rounding_and_no_more_than_three(a: int, b: int, t: int, power: int) -> None:
    scale = 2.0**power
    row = torch.tensor([[[1.0, a * scale, b * scale]]], dtype=torch.float64).float()
    tangent = t / 2**20
    table = torch.tensor([[(1 - tangent**2) / (1 + tangent**2), 2 * tangent / (1 + tangent**2)]])
    budget = rotation.bound(row, table, FLOAT32)[0, 0, 1:].tolist()
    x, y = (Fraction(float(v)) for v in row[0, 0, 1:])
    c, s = (Fraction(float(v)) for v in table[0])
    for lane, (p, q) in enumerate(((x * c, y * s), (y * c, -x * s))):
        exact = p + q
        ways = {
            round_float32(round_float32(p) + round_float32(q)),
            round_float32(p + round_float32(q)),
            round_float32(round_float32(p) + q),
        }
        assert all(abs(way - exact) <= Fraction(budget[lane]) for way in ways)
        most = 3 * Fraction(2) ** -24 * (abs(p) + abs(q)) + Fraction(2) ** -148
        assert Fraction(budget[lane]) <= most
        if ways == {exact} and round_float32(p) == p and round_float32(q) == q:
            assert budget[lane] == 0.0


def test_flushing_may_lose_subnormal_numbers_and_nothing_else() -> None:
    tiny = 2.0**-127
    rows = torch.tensor([[[1.0, tiny, 0.0, 1.0, 2.0]]])
    table = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    strict = rotation.bound(rows, table, FLOAT32)
    lenient = rotation.bound(rows, table, Precision())
    assert not strict.any()
    assert lenient[0, 0].tolist()[3:] == [0.0, 0.0] and float(lenient[0, 0, 2]) >= tiny and lenient[0, 0, 0] == 0
    flushed = right.reference(Inputs(rows, torch.tensor([0]), table, None, 0))
    flushed.out[0, 0, 2] = 0.0
    inputs = Inputs(rows, torch.tensor([0]), table, None, 0)
    assert broken(inputs, flushed, FLOAT32) and not broken(inputs, flushed, Precision())


@given(st.integers(0, 10**6), st.sampled_from(["spread", "small"]))
@hypothesis_settings(max_examples=15, deadline=None)
def test_the_inverse_undoes_the_forward_rotation_and_keeps_norms(watched: Watched, seed: int, turns: str) -> None:
    case = RotateCase(seed=seed, turns=turns, heads=2, nope=64)  # type: ignore[arg-type]
    inputs = ask.build(case)
    rows = inputs.source.clone()
    angles = inputs.cos_sin[inputs.positions]
    norm = rows[..., 64:].double().unflatten(2, (-1, 2)).norm(dim=3)
    forward = rotation.turn(rows, angles, torch.float64, inverse=False)
    assert torch.allclose(forward[..., 64:].unflatten(2, (-1, 2)).norm(dim=3), norm, rtol=1e-6)
    back = rotation.turn(forward, angles, torch.float64)
    assert torch.allclose(back, rows.double(), rtol=0, atol=1e-6 * float(norm.max()))
    stored = dataclasses.replace(inputs, out=forward.to(torch.bfloat16))
    for answer in (right.reference(stored).out, watched(OURS, stored).out):
        off = (answer.double() - rows.double())[..., 64:].abs().unflatten(2, (-1, 2)).amax(3)
        assert bool((off <= 2.0**-7 * norm * 1.01 + 1e-30).all())


@pytest.mark.parametrize(
    ("law", "crooked"),
    [
        ("R1", "first-position-for-all"),
        ("R2", "copy-over-turned-lanes"),
        ("R3", "pairs-one-lane-early"),
        ("R4", "even-lane-stored-first"),
        ("R5", "lanes-in-front-forgotten"),
        ("R6", "positions-as-32-bit-words"),
        ("R7", "position-one-more"),
        ("R8", "cosines-for-sines"),
        ("R9", "turned-forward"),
    ],
)
def test_each_law_is_broken_by_a_fault_that_it_speaks_of(law: str, crooked: str) -> None:
    (spoken,) = [one for one in right.LAWS if one.name.startswith(f"{law} ")]
    answer = next(mutant.answer for mutant in right.MUTANTS if mutant.name == crooked)
    form = "into" if law == "R5" else "in_place"
    inputs = ask.build(RotateCase(heads=4, form=form, values="lanes"))  # type: ignore[arg-type]

    def run_or_right(asked: Inputs) -> Outputs:
        return answer(asked) or right.reference(asked, torch.float64)

    checks = break_of(spoken, inputs, run_or_right(inputs), run_or_right, right.judge, FLOAT32)
    assert checks is not None and not all(check.passed for check in checks)


def test_halving_and_repeating_see_what_depends_on_size_or_history() -> None:
    inputs = ask.build(RotateCase(values="lanes"))
    calls: list[int] = []

    def drifting(asked: Inputs) -> Outputs:
        calls.append(0)
        return Outputs((right.reference(asked).out + len(calls) * 2.0**-3).to(torch.bfloat16))

    for law in right.LAWS[-2:]:
        checks = break_of(law, inputs, drifting(inputs), drifting, right.judge, FLOAT32)
        assert checks is not None and not all(check.passed for check in checks)


def changed(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"rows": torch.zeros(7, 15)}, ValueError, r"rows=float32\[7, 15\]: should be floats of"),
        ({"rows": torch.zeros(7, 3, 10)[..., ::2]}, ValueError, "lane stride of rows=2: should be 1"),
        ({"rows": torch.zeros(7, 3, 4)}, ValueError, "rotary=4: should be less than head_dim=4"),
        ({"rows": None, "out": None}, ValueError, "rows=None, out=None: should be rows"),
        ({"cos_sin": torch.zeros(3, 3)}, ValueError, "rotary=3: should be even and positive"),
        ({"cos_sin": torch.zeros(3, 0)}, ValueError, "rotary=0: should be even and positive"),
        ({"cos_sin": torch.zeros(3, 4).double()}, TypeError, r"cos_sin=float64\[3, 4\]: should be float32"),
        ({"cos_sin": torch.zeros(4, 3).T}, ValueError, "lane stride of cos_sin=3: should be 1"),
        ({"positions": torch.zeros(6, dtype=torch.int64)}, ValueError, r"positions=int64\[6\]: should be int32 or"),
        ({"positions": torch.zeros(7)}, ValueError, r"positions=float32\[7\]: should be int32 or int64 of \[7\]"),
        ({"positions": torch.tensor([0, 1, 2, 3, 0, 0, 0])}, ValueError, "positions=0 to 3: should be 0 to 2"),
        ({"positions": torch.tensor([0, 1, -1, 2, 0, 0, 0])}, ValueError, "positions=-1 to 2: should be 0 to 2"),
        ({"rotated": 8}, ValueError, "first row to turn=8: should be 0 to 7"),
        ({"rotated": 1, "out": None}, ValueError, "rotated=1: should be 0 without an out"),
        ({"out": torch.zeros(7, 3, 5)}, TypeError, "out=torch.float32: should be torch.bfloat16"),
        ({"out": torch.zeros(7, 3, 6).bfloat16()}, ValueError, r"out=bfloat16\[7, 3, 6\]: should be of \[7, 3, 5\]"),
        ({"out": torch.zeros(7, 5, 3).bfloat16().transpose(1, 2)}, ValueError, "lane stride of out=3: should be 1"),
    ],
)
def test_a_call_without_an_answer_says_why(changes: dict[str, object], error: type[Exception], sentence: str) -> None:
    good = Inputs(
        rows=torch.zeros(7, 3, 5),
        positions=torch.tensor([0, 1, 2, 0, 1, 2, 0]),
        cos_sin=torch.zeros(3, 4),
        out=torch.zeros(7, 3, 5).bfloat16(),
        rotated=0,
    )
    assert right.reference(good).out.shape == (7, 3, 5)
    with pytest.raises(error, match=sentence):
        right.reference(changed(good, **changes))


def test_positions_of_rows_that_were_turned_before_are_not_looked_at() -> None:
    inputs = call(ROW.expand(2, 1, 5).clone(), QUARTERS, [99, 1], rotated=1)
    assert right.reference(inputs).out[1, 0].tolist() == [9.0, 4.0, -3.0, -5.0, -6.0]


def test_failures_name_the_lane() -> None:
    inputs = call(ROW.expand(2, 1, 5).clone(), QUARTERS, [1, 2])
    for lane, begins in (
        (0, "out[1, 0, 0]=8, but should be 9: lanes in front of the pairs are only rounded"),
        (3, "out[1, 0, 3]=8, but should be 5 bit for bit: no number within the bound of float32 products"),
    ):
        outputs = right.reference(inputs)
        outputs.out[1, 0, lane] = 8.0
        assert str(broken(inputs, outputs, FLOAT32)[0]).startswith(begins)
    (form,) = broken(inputs, Outputs(right.reference(inputs).out[:1]))
    assert str(form) == "out=bfloat16[1, 1, 5], but should be bfloat16[2, 1, 5]: another shape or dtype than the op's"


def test_a_number_that_rightly_becomes_infinite_hides_no_fault_elsewhere() -> None:
    rows = torch.tensor([[[1.0, 3.4e38, 3.0], [1.0, 2.0, 4.0]]])
    inputs = Inputs(rows, torch.tensor([0]), torch.tensor([[1.0, 0.0]]), None, 0)
    outputs = right.reference(inputs)
    assert outputs.out[0, 0, 1] == float("inf")
    assert [check.use for check in right.judge(inputs, outputs, FLOAT32)] == [0.0, 0.0]
    outputs.out[0, 1, 1] = 8.0
    (failed,) = broken(inputs, outputs, FLOAT32)
    assert failed.wrong == 1 and failed.where == (0, 1, 1)


def test_table_rows_that_nobody_reads_are_nan_and_both_ends_are_read() -> None:
    for case in SWEEP[::5]:
        inputs = ask.build(case)
        read = torch.zeros(inputs.cos_sin.shape[0], dtype=torch.bool)
        read[inputs.positions.long()] = True
        assert torch.equal(~torch.isnan(inputs.cos_sin).any(1), read)
        assert case.tokens < 3 or {0, ask.POSITIONS - 1} <= set(inputs.positions.tolist())


def test_cancelling_pairs_nearly_vanish() -> None:
    inputs = ask.build(RotateCase(rows="float32", form="new", values="cancelling"))
    even = right.reference(inputs, torch.float64).out[..., 448::2].double().abs()
    assert float((even < 1e-6).double().mean()) > 0.5


@pytest.mark.vllm
def test_vllm_turns_back_wherever_32_bits_reach_and_positions_lie_side_by_side(
    verdict: Callable[..., tuple[str, list[str]]],
) -> None:
    asked = [case for case in SWEEP[::4] if case.reach == "near" and case.positions != "strided"]
    assert len(asked) > 10
    for case in asked:
        assert verdict(case, VLLM) == ("pass", []), case.id


@pytest.mark.vllm
@pytest.mark.parametrize("form", ["new", "in_place"])
def test_vllm_multiplies_row_and_stride_in_32_bits(form: str) -> None:
    inputs = ask.build(RotateCase(tokens=3, reach="far_rows", form=form))  # type: ignore[arg-type]
    with pytest.raises(Exception) as raised, memory_watch.watch():
        VLLM.run(memory.on_device(inputs, "cpu"))
    cause = raised.value.__cause__ or raised.value
    assert "out-of-bounds load" in str(cause) and "before the start of argument o_ptr" in str(cause)


@pytest.mark.vllm
def test_vllm_takes_positions_for_contiguous(watched: Watched) -> None:
    inputs = ask.build(RotateCase(positions="strided"))
    outputs = watched(VLLM, inputs)
    assert broken(inputs, outputs, FLOAT32)
    side_by_side = inputs.positions.as_strided((7,), (1,), int(inputs.positions.storage_offset()))
    assert broken(changed(inputs, positions=side_by_side), outputs, FLOAT32) == []


@pytest.mark.vllm
def test_vllm_refuses_what_it_cannot_turn_and_only_that() -> None:
    good = ask.build(RotateCase(form="into"))
    for changes, sentence in (
        ({"rows": torch.zeros(7, 3, 1024).bfloat16()[..., ::2]}, "contiguous last dim"),
        ({"out": torch.zeros(7, 3, 512)}, "inverse RoPE writes bf16"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            VLLM.run(changed(good, **changes))
    # A lane stride of the answer is not looked at: lanes lie where the neighbours should be.
    strided = torch.zeros(7, 3, 1024, dtype=torch.bfloat16)[..., ::2]
    answer = VLLM.run(changed(good, out=strided)).out
    assert broken(good, Outputs(answer.contiguous()), FLOAT32)
