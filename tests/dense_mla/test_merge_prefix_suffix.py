"""Are prefix and suffix merged as worked out by hand, and does the judge tell right from wrong?"""

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
from cases.dense_mla.merge_prefix_suffix import AXES, REGRESSIONS, WRITABLE, Inputs, Outputs, PrefixCase, build, forbid
from cases.memory import is_vast, on_device, trespasses
from impl.dense_mla.merge_prefix_suffix import IMPLS
from impl.executions.memory_watch import watch
from impl.implementation import Impl
from impl.sources import settings as sources
from oracle.dense_mla import merge_prefix_suffix as oracle
from oracle.formats import numbers

TREE = os.environ.get("MLA_ORACLE_VLLM")
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree"),
]
NAMED = {impl.name: impl for impl in IMPLS}
OURS = [pytest.param(NAMED[name].run, id=name) for name in ("ours-triton", "torch-sigmoid")]
VLLM = [pytest.param(NAMED[name].run, id=name, marks=needs_vllm) for name in ("vllm-triton", "vllm-torch")]
EVERYONE = [pytest.param(oracle.reference, id="reference"), *OURS, *VLLM]
Run = Callable[[Inputs], Outputs]
BASE = PrefixCase()
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _real_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(TREE) if TREE else None)


def call(prefix: list[float], a: list[float], suffix: list[float], b: list[float], /, **changes: Any) -> Inputs:
    """One head of two lanes: each token holds its number, and 4 times that; fp32."""

    def side(numbers: list[float]) -> torch.Tensor:
        lane = torch.tensor(numbers)
        return torch.stack([lane, 4 * lane], 1)[:, None]

    plain = Inputs(
        prefix=side(prefix), prefix_lse=torch.tensor([a]), suffix=side(suffix), suffix_lse=torch.tensor([b]), context=None,
        out=torch.full((len(a), 1, 2), NAN), out_lse=torch.full((1, len(a)), NAN), out_scale=None,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def answer(run: Run, inputs: Inputs) -> tuple[list[float], list[float]]:
    """Every token's number and log-sum-exp."""
    outputs = run(inputs)
    assert outputs.lse is not None
    return outputs.out[:, 0, 0].tolist(), outputs.lse[0].tolist()


# Answers worked out by hand.


@pytest.mark.parametrize("run", EVERYONE)
def test_a_suffix_of_50_keys_beside_a_prefix_of_150_has_a_quarter(run: Run) -> None:
    out, lse = answer(run, call([1.0], [math.log(150.0)], [5.0], [math.log(50.0)]))
    assert out == pytest.approx([2.0], rel=1e-6) and lse == pytest.approx([math.log(200.0)], rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_tokens_beyond_the_context_copy_their_suffix(run: Run) -> None:
    inputs = call([1.0, NAN, NAN], [0.0, NAN, 9.0], [3.0, 0.1, 0.2], [0.0, -7.5, 900.0], context=1)
    out, lse = answer(run, inputs)
    assert out[0] == 2.0 and out[1:] == torch.tensor([0.1, 0.2]).tolist()
    assert lse == pytest.approx([math.log(2.0), -7.5, 900.0], rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("mark", [-INF, INF])
def test_either_infinity_marks_an_empty_side(run: Run, mark: float) -> None:
    out, lse = answer(run, call([7.0, 1.0, 7.0], [mark, 2.0, mark], [3.0, 7.0, 7.0], [1.5, mark, mark]))
    assert out == [3.0, 1.0, 0.0] and lse == [1.5, 2.0, -INF]


@pytest.mark.parametrize("run", EVERYONE[:3])
def test_what_an_empty_side_holds_does_not_matter(run: Run) -> None:
    out, _ = answer(run, call([NAN, 1.0, INF], [-INF, 2.0, -INF], [3.0, INF, NAN], [1.5, -INF, -INF]))
    assert out == [3.0, 1.0, 0.0]


@pytest.mark.parametrize("run", OURS + VLLM[:1])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_codes_are_rounded_to_even_and_saturate(run: Run, dtype: torch.dtype) -> None:
    # Over 0.5: 17 and 19 lie half way between 16, 18 and 20; 1000 is beyond both formats.
    values = torch.tensor([8.5, 9.5, 500.0, -500.0])
    inputs = call(values.tolist(), [0.0] * 4, values.tolist(), [0.0] * 4, out=torch.zeros(4, 1, 2).to(dtype),
                  out_scale=torch.tensor(0.5), context=2)  # fmt: skip
    top = float(torch.finfo(dtype).max)
    assert run(inputs).out[:, 0, 0].float().tolist() == [16.0, 20.0, top, -top]


@pytest.mark.parametrize("run", EVERYONE[:3])
def test_no_tokens_are_an_empty_answer(run: Run) -> None:
    outputs = run(build(parse(REGRESSIONS[0])))
    assert outputs.out.shape == (0, 3, 128) and outputs.lse is not None and outputs.lse.shape == (3, 0)


# An independent formulation.


def by_hand(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scalar loops in Python's own floats, by the ratio of the two weights."""
    tokens, heads, lanes = inputs.out.shape
    context = tokens if inputs.context is None else inputs.context
    out, lse = torch.zeros((tokens, heads, lanes)).double(), torch.zeros((heads, tokens)).double()
    for token in range(tokens):
        for head in range(heads):
            b = float(inputs.suffix_lse[head, token])
            share, lse[head, token] = 0.0, b
            if token < context:
                a = float(inputs.prefix_lse[head, token])
                a, b = (-INF if x == INF else x for x in (a, b))
                if a == -INF and b == -INF:
                    share, lse[head, token] = NAN, -INF
                elif a == -INF or b == -INF:
                    share, lse[head, token] = float(b == -INF), max(a, b)
                else:
                    share = 1 / (1 + math.exp(b - a)) if b - a < 700 else 0.0
                    lse[head, token] = max(a, b) + math.log1p(math.exp(-abs(a - b)))
            for lane in range(lanes):
                p, s = float(inputs.prefix[token, head, lane]), float(inputs.suffix[token, head, lane])
                if math.isnan(share):
                    continue
                out[token, head, lane] = (share * p if share else 0.0) + ((1 - share) * s if share < 1 else 0.0)
    return out, lse


@pytest.mark.parametrize(
    "changes",
    [
        {"empty": "mixed", "tokens": 9, "mark": "plus_infinity", "void": "nan", "lse_layout": "transposed"},
        {"weights": "spread", "values": "wide", "lse_layout": "mixed", "context": "one"},
        {"weights": "deep", "dtype": "float32", "layout": "wide_heads", "context": "zero"},
        {"weights": "hairline", "values": "cancelling", "dtype": "float16", "lse_layout": "spread", "context": "all"},
    ],
)
def test_reference_agrees_with_scalar_loops(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(**{"lanes": 5, **changes}))
    want, lse = by_hand(inputs)
    got = oracle.reference(inputs, torch.float64)
    assert got.lse is not None
    assert torch.allclose(got.out, want, rtol=1e-11, atol=1e-11)
    assert torch.allclose(got.lse, lse, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_fp32_reference_is_within_the_budget(data: st.DataObject) -> None:
    axes: dict[str, Any] = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    case = PrefixCase(**axes | {"output": "same", "scale": "one"}, seed=data.draw(st.integers(0, 999)))
    if forbid(case):
        return
    inputs = build(case)
    plain = oracle.reference(inputs)
    rounded = (numbers.round_to_bfloat16(plain.out) if case.dtype == "bfloat16" else plain.out).to(inputs.out.dtype)
    checks = oracle.judge(inputs, dataclasses.replace(plain, out=rounded), oracle.HONEST[0].declared(inputs))
    assert [str(check) for check in checks if not check.passed] == []


@settings(max_examples=40, deadline=None)
@given(
    st.floats(-50, 50, width=32), st.floats(-50, 50, width=32), st.floats(-9, 9, width=32), st.floats(-9, 9, width=32)
)
def test_a_merge_lies_between_its_sides_and_sums_their_keys(a: float, b: float, p: float, s: float) -> None:
    outputs = oracle.reference(call([p], [a], [s], [b]), torch.float64)
    assert outputs.lse is not None
    out, lse = float(outputs.out[0, 0, 0]), float(outputs.lse[0, 0])
    assert min(p, s) - 1e-12 <= out <= max(p, s) + 1e-12
    assert math.exp(lse) == pytest.approx(math.exp(a) + math.exp(b), rel=1e-12)


# The judge.


def test_one_step_fails_where_a_token_is_copied() -> None:
    inputs = build(BASE)
    right = oracle.HONEST[0].answer(inputs)
    right.out.view(torch.int16)[4, 1, 7] += 1
    failing = [c for c in oracle.judge(inputs, right, oracle.HONEST[0].declared(inputs)) if not c.passed]
    assert [check.where for check in failing] == [(4, 1, 7)] and "bit for bit" in str(failing[0])


def test_a_code_off_by_one_step_fails() -> None:
    inputs = build(BASE.varied(output="float8_e4m3fn", scale="odd"))
    right = oracle.HONEST[0].answer(inputs)
    right.out.view(torch.uint8)[0, 1, 7] ^= 1
    assert [c.output for c in oracle.judge(inputs, right, oracle.HONEST[0].declared(inputs)) if not c.passed] == ["out"]


# What is no call.

CODED = {"out": torch.zeros(1, 1, 2).to(torch.float8_e4m3fn)}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a suffix of other tokens": ({"suffix": torch.zeros(2, 1, 2)}, ValueError, "should be one"),
    "an out of other lanes": ({"out": torch.zeros(1, 1, 3)}, ValueError, "should be one"),
    "a suffix in bf16": ({"suffix": torch.zeros(1, 1, 2).bfloat16()}, TypeError, "should be one of bfloat16"),
    "an out in bf16 of fp32 parts": ({"out": torch.zeros(1, 1, 2).bfloat16()}, TypeError, "should be torch.float32"),
    "codes without a scale": (CODED, ValueError, "codes and a scale should go together"),
    "a scale without codes": ({"out_scale": torch.tensor(1.0)}, ValueError, "codes and a scale should go together"),
    "an lse of other heads": ({"prefix_lse": torch.zeros(2, 1)}, ValueError, r"prefix_lse=\[2, 1\]: should be \[1, 1\]"),
    "an lse in fp64": ({"out_lse": torch.zeros(1, 1).double()}, TypeError, "out_lse=torch.float64"),
    "head strides that differ": (
        {**{name: torch.zeros(1, 2, 2) for name in ("prefix", "out")}, "suffix": torch.zeros(1, 2, 4)[..., :2],
         **{name: torch.zeros(2, 1) for name in ("prefix_lse", "suffix_lse", "out_lse")}}, ValueError, "head strides",
    ),
    "gaps after tokens": (
        {**{name: torch.zeros(2, 1, 2) for name in ("suffix", "out")}, "prefix": torch.zeros(2, 2, 2)[:, :1],
         **{name: torch.zeros(1, 2) for name in ("prefix_lse", "suffix_lse", "out_lse")}}, ValueError, "token stride of prefix",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(what: str) -> None:
    changes, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        oracle.reference(call([1.0], [0.0], [2.0], [0.0], **changes))


# The implementations on cases.


def judged(impl: Impl, case: PrefixCase) -> list[str]:
    """The sentences of what failed on the interpreter."""
    inputs = build(case)
    used = on_device(inputs, "cpu")
    with watch():
        outputs = impl.run(used)
    left = trespasses(inputs, used, WRITABLE)
    return left or [str(c) for c in oracle.judge(inputs, outputs, impl.precision(case, "interpreter")) if not c.passed]


def test_a_far_call_has_tokens_beyond_two_to_the_31() -> None:
    for text, names in zip(REGRESSIONS[-2:], (("prefix", "suffix"), ("out",)), strict=True):
        inputs = build(parse(text))
        for name in names:
            tensor = getattr(inputs, name)
            assert is_vast(tensor) and tensor.stride(0) < 1 << 31 <= tensor.stride(0) * (tensor.shape[0] - 1)


@pytest.mark.vllm
@pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree")
class TestVllm:
    """What vLLM's merges do at the edge."""

    @pytest.mark.parametrize("name", ["vllm-triton", "vllm-torch"])
    def test_it_multiplies_what_an_empty_side_holds_by_0(self, name: str) -> None:
        inputs = call([NAN, NAN], [-INF, -INF], [3.0, 7.0], [1.5, -INF])
        out, lse = answer(NAMED[name].run, inputs)
        # Two empty sides are cleaned.
        assert math.isnan(out[0]) and out[1] == 0.0 and lse == [1.5, -INF]

    def test_a_copied_plus_infinity_stays_in_the_kernel_and_not_in_the_fallback(self) -> None:
        inputs = call([0.0], [0.0], [3.0], [INF], context=0)
        assert answer(NAMED["vllm-triton"].run, inputs)[1] == [INF]
        assert answer(NAMED["vllm-torch"].run, inputs)[1] == [-INF]
        for name in ("vllm-triton", "vllm-torch"):
            outputs = NAMED[name].run(inputs)
            assert all(check.passed for check in oracle.judge(inputs, outputs, oracle.HONEST[0].declared(inputs)))

    @pytest.mark.parametrize("reach", ["far_parts", "far_out"])
    def test_its_token_offsets_have_32_bits(self, reach: str) -> None:
        case = next(parse(text) for text in REGRESSIONS if f"reach={reach}," in text)
        assert isinstance(case, PrefixCase)
        with pytest.raises(Exception, match="out-of-bounds"):
            judged(NAMED["vllm-triton"], case)

    def test_the_fallback_does_not_quantise(self) -> None:
        reasons = NAMED["vllm-torch"].unsupported(BASE.varied(output="float8_e4m3fn"), "interpreter")
        assert reasons == ["output=float8_e4m3fn: vLLM's fallback does not quantise"]
