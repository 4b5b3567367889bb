"""Is it judged rightly which prefills run over FP8 casts, and do our own rules and vLLM's find them?"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.case import parse
from cases.dense_mla import prefill_route as ask
from cases.dense_mla.prefill_route import Inputs, Outputs, Prefill, PrefillRouteCase
from cases.precision import Precision
from impl.dense_mla.prefill_route import IMPLS
from impl.sources import settings as sources
from oracle.dense_mla import prefill_route as right

OURS, VLLM = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run], ids=["reference", OURS.name])
REGRESSIONS = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, PrefillRouteCase)]
PLAIN = Prefill(heads=16, tokens=True, context=False, scaled=False)
ORDINARY, FLOAT8, REFUSED = (0, 0), (1, 1), (1, 2)


def asked(batch: Prefill = PLAIN, **changes: Any) -> Inputs:
    inputs = Inputs("gfx950", True, True, "fp8", "bfloat16", (batch,), torch.full((1, 2), 99))
    return dataclasses.replace(inputs, **changes)


def of(run: Any, inputs: Inputs) -> tuple[int, ...]:
    """Plan and route of a batch."""
    return tuple(run(inputs).out[0].tolist())


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@RUNS
@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "gfx942"}, {"arch": "other"}, {"attends": False}, {"reduces": False}, {"cache": "auto"},
        {"cache": "bfloat16"}, {"model": "float16"},
    ],
    ids=str,
)  # fmt: skip
def test_a_prefill_runs_over_fp8_casts_only_if_all_of_the_configuration_does(run: Any, changes: Any) -> None:
    assert of(run, asked()) == FLOAT8
    assert of(run, asked(**changes)) == ORDINARY


@RUNS
def test_all_spellings_of_a_float8_cache_are_one(run: Any) -> None:
    assert [of(run, asked(cache=cache)) for cache in ("fp8", "fp8_e4m3", "fp8_e5m2")] == [FLOAT8] * 3


@RUNS
def test_every_layer_that_can_be_padded_takes_part(run: Any) -> None:
    for heads in (1, 12, 24, 72, 127, 128, 144):
        assert of(run, asked(dataclasses.replace(PLAIN, heads=heads))) == FLOAT8


@RUNS
@pytest.mark.parametrize("scaled", [False, True])
def test_tokens_with_a_context_take_the_ordinary_route(run: Any, scaled: bool) -> None:
    assert of(run, asked(dataclasses.replace(PLAIN, context=True, scaled=scaled))) == ORDINARY


@RUNS
def test_nothing_is_planned_without_prefill_tokens(run: Any) -> None:
    assert of(run, asked(dataclasses.replace(PLAIN, tokens=False))) == ORDINARY


@RUNS
def test_a_scaled_output_is_refused_where_only_the_ordinary_route_knows_one(run: Any) -> None:
    scaled = dataclasses.replace(PLAIN, scaled=True)
    assert of(run, asked(scaled)) == REFUSED
    assert of(run, asked(scaled, model="float16")) == ORDINARY


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_decisions_are_told_from_right_ones(mutant: right.Mutant) -> None:
    inputs = [ask.build(case) for case in REGRESSIONS]
    assert any(not passes(one, mutant.answer(one)) for one in inputs)


def test_a_wrong_decision_names_what_the_batch_breaks() -> None:
    inputs = asked(dataclasses.replace(PLAIN, context=True), model="float16")
    plan, route = right.judge(inputs, Outputs(torch.tensor([[1, 1]])), Precision())
    assert str(plan).startswith("planned[0]=1, but should be 0: 16 heads, without: bfloat16 model, no context")
    assert str(route).startswith(
        "route[0]=1, but should be 0: 16 heads, without: bfloat16 model, no context (ordinary)"
    )
    (plan, route) = right.judge(asked(), Outputs(torch.tensor([[1, 0]])), Precision())
    assert plan.passed
    assert str(route).startswith("route[0]=0, but should be 1: 16 heads, all conditions hold (float8)")


@pytest.mark.parametrize("heads", [0, -16, 129, 136])
def test_layers_that_there_are_not_are_refused(heads: int) -> None:
    with pytest.raises(ValueError, match=f"heads={heads}: should be 1 to 128, or a multiple of 16"):
        right.reference(asked(dataclasses.replace(PLAIN, heads=heads)))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    assert "is not a vLLM tree" in VLLM.unsupported(PrefillRouteCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
@pytest.mark.parametrize("case", REGRESSIONS, ids=str)
def test_vllm_decides_the_same(case: PrefillRouteCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    assert VLLM.unsupported(case, "interpreter") == []
    inputs = ask.build(case)
    outputs = VLLM.run(inputs)
    assert passes(inputs, outputs)
    # A route that nobody takes would pass for one that nobody may take.
    takes = (case.arch, case.kernels, case.model) == ("gfx950", "both", "bfloat16") and case.cache.startswith("fp8")
    assert set(outputs.out[:, 1].tolist()) == ({0, 1, 2} if takes else {0})
