"""Are attention parts merged as worked out by hand, and does the judge tell right from wrong?"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dense_mla.merge_parts import AXES, REGRESSIONS, WRITABLE, Inputs, MergeCase, Outputs, build, forbid, heavy
from cases.memory import is_vast, on_device, trespasses
from impl.dense_mla.merge_parts import IMPLS
from impl.executions.memory_watch import watch
from impl.implementation import Impl
from impl.sources import settings as sources
from oracle.dense_mla import merge_parts as oracle

TREE = os.environ.get("MLA_ORACLE_VLLM")
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree"),
]
NAMED = {impl.name: impl for impl in IMPLS}
EVERYONE = [
    pytest.param(oracle.reference, id="reference"),
    pytest.param(NAMED["ours-triton"].run, id="ours-triton"),
    pytest.param(NAMED["torch-softmax"].run, id="torch-softmax"),
    *(pytest.param(NAMED[name].run, id=name, marks=needs_vllm) for name in ("vllm-triton", "vllm-torch")),
]
Run = Callable[[Inputs], Outputs]
BASE = MergeCase()
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _real_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(TREE) if TREE else None)


def call(values: list[float], lse: list[float]) -> Inputs:
    """One row and head of two lanes: each part holds its value, and its value times 4; in fp32."""
    lane = torch.tensor(values)
    return Inputs(
        parts=torch.stack([lane, 4 * lane], 1)[:, None, None],
        lse=torch.tensor(lse)[:, None, None],
        out=torch.full((1, 1, 2), NAN),
    )


def answer(run: Run, values: list[float], lse: list[float]) -> tuple[float, float]:
    """The merged value and log-sum-exp."""
    outputs = run(call(values, lse))
    first, second = outputs.out[0, 0].tolist()
    assert second == pytest.approx(4 * first, rel=1e-6)
    return first, float(outputs.lse[0, 0])


# Answers worked out by hand.


@pytest.mark.parametrize("run", EVERYONE)
def test_a_part_alone_is_the_answer_bit_for_bit(run: Run) -> None:
    assert answer(run, [0.1], [9.3]) == (float(torch.tensor(0.1)), float(torch.tensor(9.3)))
    assert answer(run, [INF, 0.1, NAN], [-INF, -700.0, -INF]) == (float(torch.tensor(0.1)), -700.0)


@pytest.mark.parametrize("run", EVERYONE)
def test_two_equal_parts_give_their_mean_and_ln_2_more(run: Run) -> None:
    out, lse = answer(run, [1.0, 4.0], [0.5, 0.5])
    assert out == 2.5 and lse == pytest.approx(0.5 + math.log(2.0), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_a_gap_of_1_weighs_731_to_269_in_natural_logarithms(run: Run) -> None:
    # 1 / (1 + e^-1) = 0.7310586; in base 2 it would be 0.6666667.
    out, lse = answer(run, [0.0, 1.0], [4.0, 5.0])
    assert out == pytest.approx(0.7310585786, rel=1e-6) and lse == pytest.approx(
        5 + math.log1p(math.exp(-1.0)), rel=1e-6
    )


@pytest.mark.parametrize("run", EVERYONE)
def test_parts_of_1_to_4_keys_weigh_as_many(run: Run) -> None:
    # Equal scores: part i of i keys has lse ln i. (1*1 + 2*2 + 3*3 + 4*4) / 10.
    out, lse = answer(run, [1.0, 2.0, 3.0, 4.0], [math.log(keys) for keys in (1, 2, 3, 4)])
    assert out == pytest.approx(3.0, rel=1e-6) and lse == pytest.approx(math.log(10.0), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("mark", [-INF, INF, NAN])
def test_every_mark_of_an_empty_part_leaves_it_out(run: Run, mark: float) -> None:
    out, lse = answer(run, [NAN, 3.0, INF, 5.0], [mark, 2.0, mark, 2.0])
    assert out == 4.0 and lse == pytest.approx(2 + math.log(2.0), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_without_a_part_the_answer_is_0_and_minus_infinity(run: Run) -> None:
    assert answer(run, [NAN, INF, 7.0], [-INF, NAN, INF]) == (0.0, -INF)


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("far", [10000.0, -10000.0])
def test_exponentials_that_overflow_or_vanish_do_no_harm(run: Run, far: float) -> None:
    # Where the weights are taken against the rounded log-sum-exp, its step at 10000 shows.
    out, lse = answer(run, [2.0, 6.0], [far, far])
    assert out == pytest.approx(4.0, abs=4e-3) and lse == pytest.approx(far + math.log(2.0), abs=1e-3)


@pytest.mark.parametrize("run", EVERYONE)
def test_a_nan_in_a_part_that_is_not_empty_goes_through(run: Run) -> None:
    inputs = call([1.0, 2.0], [0.0, 0.0])
    inputs.parts[1, 0, 0, 1] = NAN
    first, second = run(inputs).out[0, 0].tolist()
    assert first == 1.5 and math.isnan(second)


@pytest.mark.parametrize("run", EVERYONE[:3])
def test_no_rows_are_an_empty_answer(run: Run) -> None:
    outputs = run(build(parse(REGRESSIONS[0])))
    assert outputs.out.shape == (0, 3, 64) and outputs.lse.shape == (0, 3)


# An independent formulation.


def by_hand(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """One key a part: scalar loops in Python's own floats, without a maximum where that is possible."""
    _, rows, heads, lanes = inputs.parts.shape
    out, lse = torch.zeros(inputs.out.shape, dtype=torch.float64), torch.full((rows, heads), -INF, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            column = inputs.lse[:, row, head].double().tolist()
            live = [i for i, x in enumerate(column) if math.isfinite(x)]
            if not live:
                continue
            # Against the middle instead of the largest.
            middle = sorted(column[i] for i in live)[len(live) // 2]
            weight = {i: math.exp(column[i] - middle) for i in live}
            total = math.fsum(weight.values())
            lse[row, head] = middle + math.log(total)
            vectors = inputs.parts[:, row, head].double().tolist()
            for lane in range(lanes):
                out[row, head, lane] = math.fsum(weight[i] * vectors[i][lane] for i in live) / total
    return out, lse


@pytest.mark.parametrize(
    "changes",
    [
        {"empty": "mixed", "rows": 4, "empty_lse": "nan", "layout": "rows_first"},
        {"weights": "staircase", "parts": 33, "values": "wide", "lse_layout": "parts_last"},
        {"weights": "underflow", "empty": "some", "garbage": "infinity", "dtype": "float32", "layout": "heads_first"},
        {"weights": "hairline", "values": "cancelling", "dtype": "float16", "lse_layout": "heads_first"},
        {"values": "nan_lane", "weights": "deep"},
    ],
)
def test_reference_agrees_with_scalar_loops(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(**{"lanes": 5, "parts": 4, **changes}))
    want, lse = by_hand(inputs)
    got = oracle.reference(inputs, torch.float64)
    assert torch.allclose(got.out, want, rtol=1e-11, atol=1e-13, equal_nan=True)
    assert torch.allclose(got.lse, lse, rtol=1e-13, atol=1e-13)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_fp32_reference_and_running_merges_are_within_the_budget(data: st.DataObject) -> None:
    axes: dict[str, Any] = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    case = MergeCase(**axes | {"output": "float32"}, seed=data.draw(st.integers(0, 999)))
    if forbid(case) or heavy(case):
        return
    inputs = build(case)
    for given_answer in (oracle.reference(inputs), oracle.HONEST[1].answer(inputs)):
        checks = oracle.judge(inputs, given_answer, oracle.HONEST[0].declared(inputs))
        assert [str(check) for check in checks if not check.passed] == []


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 30, width=32), st.floats(-4, 4, width=32)), min_size=2, max_size=9),
    st.integers(1, 8),
)
def test_merging_in_two_steps_is_merging_at_once(keys: list[tuple[float, float]], cut: int) -> None:
    cut = min(cut, len(keys) - 1)

    def merged(some: list[tuple[float, float]]) -> tuple[float, float]:
        outputs = oracle.reference(call([v for _, v in some], [x for x, _ in some]), torch.float64)
        return float(outputs.lse[0, 0]), float(outputs.out[0, 0, 0])

    (left, left_value), (right, right_value) = merged(keys[:cut]), merged(keys[cut:])
    lse, value = merged(keys)
    top = max(left, right)
    a, b = math.exp(left - top), math.exp(right - top)
    assert lse == pytest.approx(top + math.log(a + b), abs=1e-11)
    assert value == pytest.approx((a * left_value + b * right_value) / (a + b), abs=1e-10)


# The judge.


def test_one_step_fails_where_the_answer_is_exact() -> None:
    for changes in ({"parts": 1}, {"parts": 4, "weights": "equal", "values": "integer_exact"}):
        inputs = build(BASE.varied(**changes))
        right = oracle.HONEST[0].answer(inputs)
        right.out.view(torch.int16)[1, 2, 3] += 1
        failing = [c for c in oracle.judge(inputs, right, oracle.HONEST[0].declared(inputs)) if not c.passed]
        assert [check.where for check in failing] == [(1, 2, 3)] and "bit for bit" in str(failing[0])


def test_three_equal_parts_are_not_held_to_bits() -> None:
    inputs = build(BASE.varied(parts=3, weights="equal", values="integer_exact", dtype="float32"))
    third = torch.tensor(1.0) / 3
    shared = (third * inputs.parts).sum(0)
    right = oracle.reference(inputs)
    assert not torch.equal(shared, right.out)
    checks = oracle.judge(inputs, dataclasses.replace(right, out=shared), oracle.HONEST[0].declared(inputs))
    assert all(check.passed for check in checks)


KILLERS = [
    BASE.varied(empty="mixed", rows=4, empty_lse=mark, garbage=garbage, parts=4, lse_layout=lse, layout=layout,
                weights="spread", output="float32", out_layout=out)
    for mark, garbage, lse, layout, out in (
        ("minus_infinity", "nan", "contiguous", "padded", "padded"), ("plus_infinity", "huge", "heads_first", "rows_first",
         "heads_first"), ("nan", "infinity", "parts_last", "heads_first", "contiguous"),
    )
]  # fmt: skip


# What is no call.

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "three dimensions": ({"parts": torch.zeros(2, 1, 2)}, ValueError, "with a part"),
    "no part": ({"parts": torch.zeros(0, 1, 1, 2), "lse": torch.zeros(0, 1, 1)}, ValueError, "with a part"),
    "fp64 parts": ({"parts": torch.zeros(2, 1, 1, 2).double()}, TypeError, "should be bfloat16, float16 or float32"),
    "an lse of other heads": ({"lse": torch.zeros(2, 1, 3)}, ValueError, r"should be \[2, 1, 1\]"),
    "an lse in bf16": ({"lse": torch.zeros(2, 1, 1).bfloat16()}, TypeError, "should be torch.float32"),
    "an out of other lanes": ({"out": torch.zeros(1, 1, 3)}, ValueError, r"should be \[1, 1, 2\]"),
    "an out narrower than the parts": ({"out": torch.zeros(1, 1, 2).half()}, TypeError, "should be torch.float32"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(what: str) -> None:
    changes, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        oracle.reference(dataclasses.replace(call([1.0, 2.0], [0.0, 0.0]), **changes))


# The implementations on cases.


def judged(impl: Impl, case: MergeCase) -> list[str]:
    """The sentences of what failed on the interpreter."""
    inputs = build(case)
    used = on_device(inputs, "cpu")
    with watch():
        outputs = impl.run(used)
    left = trespasses(inputs, used, WRITABLE)
    return left or [str(c) for c in oracle.judge(inputs, outputs, impl.precision(case, "interpreter")) if not c.passed]


def test_a_far_call_has_parts_and_rows_beyond_two_to_the_31() -> None:
    for text, name in zip(REGRESSIONS[-2:], ("parts", "out"), strict=True):
        tensor = getattr(build(parse(text)), name)
        assert is_vast(tensor) and tensor.stride(0) < 1 << 31 <= tensor.stride(0) * (tensor.shape[0] - 1)


@pytest.mark.vllm
@pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree")
class TestVllm:
    """What vLLM's merges do at the edge."""

    @pytest.mark.parametrize("case", KILLERS[:2], ids=["minus infinity", "plus infinity"])
    def test_both_leave_out_what_an_empty_part_holds(self, case: MergeCase) -> None:
        assert judged(NAMED["vllm-torch"], case) == []
        assert judged(NAMED["vllm-triton"], case.varied(dtype="float32")) == []

    def test_the_kernel_takes_lanes_in_powers_of_two_only(self) -> None:
        reasons = NAMED["vllm-triton"].unsupported(BASE.varied(lanes=5, output="float32"), "interpreter")
        assert [reason.split(":")[0] for reason in reasons] == ["lanes=5", "output=float32"]
