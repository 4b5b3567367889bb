"""Are products with an output projection judged rightly: every right one passes, and every wrong one is seen?"""

import dataclasses
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.case import parse
from cases.precision import Precision
from cases.quant import wo_a_einsum as ask
from cases.quant.wo_a_dequant import Projection
from cases.quant.wo_a_einsum import EinsumCase, Inputs, Outputs
from impl.executions import memory_watch
from impl.implementation import Impl
from impl.quant.wo_a_einsum import IMPLS
from impl.sources import settings as sources
from oracle.quant import products
from oracle.quant import wo_a_einsum as right
from reports.laws import break_of

OURS, VLLM, TORCH = IMPLS
EXACT = Precision(flushes=False)


def small_sweep(count: int) -> list[EinsumCase]:
    """The regressions, probes and some random cases of little work."""
    choose = random.Random(5)
    base = EinsumCase(groups=3, tokens=5, head_dim=96)
    cases = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, EinsumCase)]
    cases += [base.varied(values=values, layout="strided") for values in ask.AXES["values"]]
    cases += [base.varied(rotation="none", weight="float8_e4m3fn"), base.varied(rank=40, rotation="quarter")]
    while len(cases) < count:
        drawn: dict[str, Any] = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = EinsumCase(**drawn, seed=choose.randrange(99))
        work = case.tokens * case.groups * case.group_heads * case.head_dim * case.rank
        if not ask.forbid(case) and work <= 1 << 21:
            cases.append(case)
    return cases


SWEEP = small_sweep(26)


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, EXACT))


def by_hand(**changes: Any) -> Inputs:
    """Two tokens, four heads of 66 lanes in two groups, rank 1; position 1 turns the first pair by a quarter."""
    rows = torch.zeros(2, 4, 66, dtype=torch.bfloat16)
    rows[0, 0, 0], rows[0, 1, 2], rows[0, 1, 3], rows[1, 3, 65] = 3.0, 5.0, 7.0, 11.0
    cos_sin = torch.zeros(2, 64)
    cos_sin[:, :32] = 1.0
    cos_sin[1, 0], cos_sin[1, 32] = 0.0, 1.0
    weight = torch.zeros(2, 132, dtype=torch.bfloat16)
    # Group 0: lane 0 of its first head, lanes 2 and 3 of its second. Group 1: the last lane of its last head.
    weight[0, 0], weight[0, 66 + 2], weight[0, 66 + 3], weight[1, 131] = 1.0, 10.0, 100.0, 2.0
    fields: dict[str, Any] = {
        "rows": rows, "positions": torch.tensor([1, 0]), "cos_sin": cos_sin, "inverse_rope": True,
        "module": Projection(weight, None, None, False), "groups": 2, "rank": 1,
    }  # fmt: skip
    return Inputs(**{**fields, **changes})


def test_hand_worked_products() -> None:
    # The pair (5, 7) turned back by a quarter is (7, -5): 3 + 70 - 500.
    assert right.reference(by_hand()).out.tolist() == [[[-427.0], [0.0]], [[0.0], [22.0]]]
    assert right.reference(by_hand(inverse_rope=False)).out.tolist() == [[[753.0], [0.0]], [[0.0], [22.0]]]


def test_rotated_rows_are_rounded_before_the_product() -> None:
    cos_sin = by_hand().cos_sin.clone()
    cos_sin[1, 0], cos_sin[1, 32] = 0.6, 0.8
    # 5 * 0.6 + 7 * 0.8 = 8.6 and 7 * 0.6 - 5 * 0.8 = 0.2, in bfloat16 8.625 and 0.2001953125.
    want = 3.0 + 10 * 8.625 + 100 * 0.2001953125
    assert float(right.reference(by_hand(cos_sin=cos_sin)).out[0, 0, 0]) == want
    inputs = by_hand(cos_sin=cos_sin)
    got = torch.zeros(2, 2, 1, dtype=torch.bfloat16)
    got[0, 0], got[1, 1] = want, 22.0
    assert passes(inputs, Outputs(got))
    got[0, 0] += 0.5
    assert not passes(inputs, Outputs(got))


def scalar_product(inputs: Inputs, token: int, group: int, column: int) -> float:
    """One element in Python floats, from rows that are turned lane by lane."""
    heads = inputs.rows.shape[1] // inputs.groups
    lanes = []
    for head in range(group * heads, (group + 1) * heads):
        row = [float(x) for x in inputs.rows[token, head]]
        if inputs.inverse_rope:
            table = inputs.cos_sin[int(inputs.positions[token])].tolist()
            first = len(row) - 64
            for k in range(32):
                a, b, c, s = row[first + 2 * k], row[first + 2 * k + 1], table[k], table[32 + k]
                row[first + 2 * k], row[first + 2 * k + 1] = a * c + b * s, b * c - a * s
        lanes += torch.tensor(row, dtype=torch.float32).bfloat16().tolist()
    number = group * inputs.rank + column
    weight = inputs.module.weight[number].float()
    scale = inputs.module.weight_scale_inv
    if scale is not None:
        weight = weight * torch.exp2(scale[number // 32].float() - 127).repeat_interleave(32)
    terms = [x * w for x, w in zip(lanes, weight.bfloat16().tolist(), strict=True)]
    return math.nan if any(map(math.isnan, terms)) else math.fsum(terms)


@pytest.mark.parametrize("case", [case for case in SWEEP if case.tokens][::2], ids=str)
def test_the_reference_agrees_with_lane_by_lane_arithmetic(case: EinsumCase) -> None:
    inputs = ask.build(case)
    wide, narrow = right.reference(inputs, torch.float64).out, right.reference(inputs).out
    budget = right.budget(inputs, EXACT)
    choose = random.Random(case.seed)
    for _ in range(5):
        place = (choose.randrange(case.tokens), choose.randrange(case.groups), choose.randrange(case.rank))
        want = scalar_product(inputs, *place)
        if math.isnan(want):
            assert math.isnan(float(wide[place]))
            continue
        # Python turns in float64 and rounds by way of fp32, so a lane may lie on the other side of a tie.
        assert abs(float(wide[place]) - want) <= float(budget[place]) + 1e-12 * abs(want)
        assert abs(float(narrow[place]) - want) <= 2 * float(budget[place]) + 1e-12 * abs(want)


def test_probes_are_judged_bit_for_bit() -> None:
    for case in (
        EinsumCase(values="integer_exact", rotation="quarter"),
        EinsumCase(values="integer_exact", rotation="none", weight="float8_e4m3fn"),
        EinsumCase(values="onehot_exact", rotation="none"),
    ):
        assert not right.budget(ask.build(case), EXACT).any(), case.id


def test_the_budget_of_a_lane_near_a_tie_is_its_step() -> None:
    # cos = 1 + 2^-8 turns 1 into half-way between two bfloat16 numbers.
    cos_sin = by_hand().cos_sin.clone()
    cos_sin[1, 0], cos_sin[1, 32] = 1 + 2.0**-8, 0.0
    rows = torch.zeros(2, 4, 66, dtype=torch.bfloat16)
    rows[0, 1, 2] = 1.0
    exactly = by_hand(cos_sin=cos_sin, rows=rows)
    assert not right.budget(exactly, EXACT).any()
    rows[0, 1, 3], cos_sin[1, 32] = 1.0, 2.0**-26
    beside = right.budget(by_hand(cos_sin=cos_sin, rows=rows), EXACT)
    # So do both lanes of the pair, under the weights 10 and 100.
    assert 110 * 2.0**-7 <= float(beside[0, 0, 0]) < 110.1 * 2.0**-7


def test_the_budget_of_products() -> None:
    left = torch.tensor([[[1.0, 2.0**-30, 0.0]]], dtype=torch.float64)
    right_ = torch.tensor([[[1.0, 1.0, 5.0], [1.0, 0.0, 7.0], [2.0**-20, float("nan"), 0.0]]], dtype=torch.float64)
    # Two products on a grid of 2^-30 need 31 digits and one addition; one product none; NaN decides.
    assert products.budget(left, right_, EXACT).tolist() == [[[2.0**-24 * (1 + 2.0**-30), 0.0, 0.0]]]


def test_every_law_can_be_broken() -> None:
    base = EinsumCase(tokens=4, groups=3, head_dim=96)
    wrong = {
        "M14 rows reversed": (base, "positions-of-the-next-row"),
        "E1 turned before": (base.varied(rotation="quarter"), "turned-forward"),
        "E2 dequantised before": (base.varied(weight="float8_e4m3fn"), "scale-ignored"),
        "E3 positions changed": (base.varied(rotation="none"), "turned-by-position"),
        "M11 rows doubled": (base, "last-row-repeats"),
        "B1 groups reversed": (base, "scales-of-the-first-group"),
    }
    answers = {mutant.name: mutant.answer for mutant in right.MUTANTS}
    answers["turned-by-position"] = lambda inputs: (
        answers["turned-unasked"](inputs) if int(inputs.positions[0]) >= 0 else right.HONEST[0].answer(inputs)
    )

    def last_row_repeats(inputs: Inputs) -> Outputs:
        answer = right.HONEST[0].answer(inputs)
        assert answer is not None
        return Outputs(answer.out.index_fill(0, torch.tensor([3]), 1.0))

    answers["last-row-repeats"] = last_row_repeats
    for law in right.LAWS:
        case, name = wrong[law.name]
        if law.name.startswith("B1"):
            case = case.varied(weight="float8_e4m3fn")
        inputs = ask.build(case)
        checks = break_of(law, inputs, answers[name](inputs), answers[name], right.judge, EXACT)
        assert checks is not None and not all(check.passed for check in checks), law.name


@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_implementations_multiply_rightly(impl: Impl) -> None:
    for case in SWEEP[:18]:
        pristine = ask.build(case)
        used = memory.on_device(pristine, "cpu")
        with memory_watch.watch():
            outputs = impl.run(used)
        assert memory.trespasses(pristine, used, ask.WRITABLE) == [], case.id
        checks = right.judge(pristine, outputs, impl.precision(case, "interpreter"))
        assert all(check.passed for check in checks), (case.id, [str(check) for check in checks])


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(0, 5), groups=st.integers(1, 3), group_heads=st.integers(1, 3), head_dim=st.integers(66, 140),
    rank=st.integers(1, 40), rotation=st.sampled_from(ask.AXES["rotation"]), values=st.sampled_from(ask.AXES["values"]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_ours_is_right_on_odd_shapes(**axes: Any) -> None:
    case = EinsumCase(layout="strided", **axes)
    if ask.forbid(case):
        return
    inputs = ask.build(case)
    assert passes(inputs, OURS.run(inputs)), case.id


def test_no_tokens_give_an_empty_product() -> None:
    for inverse_rope in (False, True):
        inputs = by_hand(
            rows=torch.zeros(0, 4, 66, dtype=torch.bfloat16), positions=torch.zeros(0, dtype=torch.int64),
            inverse_rope=inverse_rope,
        )  # fmt: skip
        for answer in (OURS.run(inputs), TORCH.run(inputs), right.HONEST[0].answer(inputs)):
            assert answer is not None and answer.out.shape == (0, 2, 1)
            assert passes(inputs, answer)


BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"groups": 3}, ValueError, "heads=4: should be a multiple of 3"),
    ({"rows": torch.zeros(2, 4, 66), "inverse_rope": False}, TypeError, "rows=torch.float32: should be torch.bfloat16"),
    ({"rank": 2}, ValueError, r"weight=\[2, 132\]: should be \[4, 132\]"),
    ({"positions": torch.tensor([2, 0])}, ValueError, "positions=0 to 2: should be 0 to 1"),
    ({"positions": torch.tensor([-1, 0])}, ValueError, "positions=-1 to 0: should be 0 to 1"),
    ({"positions": torch.tensor([0])}, ValueError, r"positions=.*\[1\]: should be"),
    ({"cos_sin": torch.zeros(2, 63)}, ValueError, "rotary=63: should be even"),
    ({"cos_sin": torch.zeros(2, 66)}, ValueError, "rotary=66: should be less than head_dim=66"),
    ({"cos_sin": torch.zeros(2, 64, dtype=torch.float64)}, TypeError, "cos_sin=.*float64.*: should be"),
    ({"rows": torch.zeros(2, 4, 132, dtype=torch.bfloat16)[..., ::2]}, ValueError, "stride"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_CALLS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("answer", [right.reference, OURS.run, TORCH.run], ids=["reference", "ours", "torch"])
def test_malformed_calls_raise(answer: Any, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        answer(by_hand(**changes))


def test_the_wrong_form_fails() -> None:
    inputs = ask.build(EinsumCase())
    out = right.reference(inputs).out
    assert not passes(inputs, Outputs(out))
    assert passes(inputs, Outputs(out.bfloat16()))
    assert not passes(inputs, Outputs(out.bfloat16().flatten(1)))


def test_positions_that_turn_nothing_are_negative() -> None:
    for case in SWEEP[:8]:
        assert case.rotation != "none" or not case.tokens or int(ask.build(case).positions.max()) < 0


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    (reason, *_) = VLLM.unsupported(EinsumCase(), "interpreter")
    assert "is not a vLLM tree" in reason


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Impl:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    return VLLM


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
def test_vllm_multiplies_rightly(vllm: Impl) -> None:
    for case in SWEEP[:16]:
        if case.tokens and case.reach == "near":
            inputs = ask.build(case)
            assert passes(inputs, vllm.run(inputs)), case.id


@pytest.mark.vllm
@needs_vllm
def test_vllm_raises_for_a_call_without_rows(vllm: Impl) -> None:
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        vllm.run(ask.build(EinsumCase(tokens=0)))


@pytest.mark.vllm
@needs_vllm
def test_vllm_counts_rows_in_32_bits(vllm: Impl) -> None:
    far = dataclasses.replace(EinsumCase(), reach="far")
    with pytest.raises(Exception, match="out-of-bounds load in _inverse_rope_gptj_kernel"), memory_watch.watch():
        vllm.run(ask.build(far))
