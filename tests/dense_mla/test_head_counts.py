"""Are the numbers of heads judged rightly, and do our own rules give those worked out by hand?"""

import os
from pathlib import Path

import pytest
import torch

from cases.case import parse
from cases.dense_mla import head_counts as ask
from cases.dense_mla.head_counts import HeadCountsCase, Inputs, Outputs
from cases.precision import Precision
from impl.dense_mla import backend_vllm
from impl.dense_mla.head_counts import IMPLS
from impl.sources import settings as sources
from oracle.dense_mla import head_counts as right

OURS, VLLM = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run], ids=["reference", OURS.name])


def asked(*heads: int, reducer_24: bool = False, planner_24: bool = False) -> Inputs:
    return Inputs(torch.tensor(heads), reducer_24, planner_24)


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@RUNS
def test_hand_worked_numbers(run: object) -> None:
    outputs = run(asked(1, 12, 16, 17, 24, 65, 96, 128, 129, 144))  # type: ignore[operator]
    assert outputs.supported.tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 0, 1]
    assert outputs.decode.tolist() == [16, 16, 16, 32, 32, 80, 96, 128, 144, 144]
    assert outputs.prefill.tolist() == outputs.decode.tolist()
    assert outputs.round_robin.tolist() == [16, 16, 16, 32, 32, 128, 128, 128, 0, 0]
    assert outputs.two_tokens.tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 0, 0]


@RUNS
def test_no_heads_and_fewer_are_not_supported(run: object) -> None:
    assert run(asked(-16, -1, 0)).supported.tolist() == [0, 0, 0]  # type: ignore[operator]


@RUNS
@pytest.mark.parametrize("reducer", [False, True])
@pytest.mark.parametrize("planner", [False, True])
def test_24_heads_need_both_parts_and_concern_decode_only(run: object, reducer: bool, planner: bool) -> None:
    outputs = run(asked(23, 24, 25, reducer_24=reducer, planner_24=planner))  # type: ignore[operator]
    native = reducer and planner
    assert outputs.decode.tolist() == [32, 24 if native else 32, 32]
    assert outputs.prefill.tolist() == outputs.round_robin.tolist() == [32, 32, 32]
    assert outputs.two_tokens.tolist() == [1, 0 if native else 1, 1]


@RUNS
def test_two_tokens_without_a_causal_mask_are_decoded_in_four_ranges(run: object) -> None:
    outputs = run(asked(*range(1, 129)))  # type: ignore[operator]
    served = {heads for heads, one in zip(range(1, 129), outputs.two_tokens.tolist(), strict=True) if one}
    assert served == {*range(17, 33), *range(49, 65), *range(81, 97), *range(113, 129)}


def test_numbers_below_one_are_judged_by_whether_they_can_be_alone() -> None:
    inputs = asked(0, 12)
    outputs = right.reference(inputs)
    for part in (outputs.decode, outputs.prefill, outputs.round_robin, outputs.two_tokens):
        part[0] = 5
    assert passes(inputs, outputs)
    outputs.supported[0] = 1
    assert not passes(inputs, outputs)


def test_a_wrong_number_is_named_with_its_heads() -> None:
    inputs = asked(12, 96)
    outputs = right.reference(inputs)
    outputs.round_robin[1] = 96
    (failed,) = (check for check in right.judge(inputs, outputs, Precision()) if not check.passed)
    assert str(failed).startswith(
        "round_robin[1]=96, but should be 128: 96 heads: the least of 16, 32, 64 and 128, or 0"
    )


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_numbers_are_told_from_right_ones(mutant: right.Mutant) -> None:
    inputs = [ask.build(parse(case)) for case in ask.REGRESSIONS]  # type: ignore[arg-type]
    assert any(not passes(one, mutant.answer(one)) for one in inputs)  # type: ignore[arg-type]


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("case", ask.REGRESSIONS)
def test_vllm_runs_with_the_same_heads(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    inputs = ask.build(parse(case))  # type: ignore[arg-type]
    assert passes(inputs, VLLM.run(inputs))


@pytest.mark.vllm
@needs_vllm
def test_vllm_refuses_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    loader = backend_vllm.loader(torch.device("cpu"))
    check = loader.symbol(backend_vllm.MODULE, backend_vllm.HELPER).check_num_heads_validity
    for heads in (1, 128, 144):
        check(heads)
    for heads in (-1, 0, 129, 136):
        with pytest.raises(AssertionError, match="positive multiple of 16 heads"):
            check(heads)


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    assert "is not a vLLM tree" in VLLM.unsupported(HeadCountsCase(), "interpreter")[0]
