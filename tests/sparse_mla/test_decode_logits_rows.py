"""Is the bound on decode rows neither too small for a locked pool nor as large as the batch?"""

import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.case import parse
from cases.memory import on_device, trespasses
from cases.precision import Precision
from cases.sparse_mla import decode_logits_rows as ask
from cases.sparse_mla.decode_logits_rows import (
    LOOKUP_FAILS,
    MISSING,
    NO_CONFIG,
    NO_DRAFTER,
    NO_SCHEDULER,
    SERVED,
    Inputs,
    Outputs,
    RowsCase,
)
from impl.sources import settings
from impl.sparse_mla.decode_logits_rows import IMPLS
from oracle.sparse_mla import decode_logits_rows as right
from reports.laws import break_of

OURS, VLLM = IMPLS


def small_sweep(count: int) -> list[RowsCase]:
    """The regressions and some random cases."""
    choose = random.Random(7)
    cases = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, RowsCase)]
    while len(cases) < count:
        cases.append(
            RowsCase(**{axis: choose.choice(values) for axis, values in ask.AXES.items()}, seed=choose.randrange(99))  # type: ignore[arg-type]
        )
    return cases


SWEEP = small_sweep(24)
# Batched tokens, config, sequences, drafted tokens, and the rows.
POINTS = [
    (16384, SERVED, 32, 5, 192),
    (16384, SERVED, 32, 0, 32),
    (16384, SERVED, 32, MISSING, 32),
    (16384, SERVED, 32, NO_DRAFTER, 32),
    (191, SERVED, 32, 5, 191),
    (192, SERVED, 32, 5, 192),
    (193, SERVED, 32, 5, 192),
    (16384, SERVED, 0, 5, 16384),
    (16384, SERVED, MISSING, 5, 16384),
    (16384, NO_SCHEDULER, 32, 5, 16384),
    (16384, NO_CONFIG, 32, 5, 16384),
    (16384, LOOKUP_FAILS, 32, 5, 16384),
    (0, SERVED, 32, 5, 0),
]


def asked(points: list[tuple[int, ...]]) -> Inputs:
    columns = [torch.tensor([point[i] for point in points], dtype=torch.int64) for i in range(4)]
    return Inputs(*columns, out=torch.full((len(points),), -7))


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@pytest.mark.parametrize("run", [right.reference, OURS.run], ids=["reference", "ours-host"])
def test_hand_worked_points(run: object) -> None:
    assert run(asked(POINTS)).out.tolist() == [point[4] for point in POINTS]  # type: ignore[operator]


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 40),
    st.sampled_from([LOOKUP_FAILS, NO_CONFIG, NO_SCHEDULER, SERVED]),
    st.integers(-1, 12),
    st.integers(-2, 4),
)
def test_the_rows_are_those_that_a_step_can_hold(tokens: int, config: int, sequences: int, drafted: int) -> None:
    # Fill a batch sequence by sequence until its tokens, or the sequences, are used up.
    filled = 0
    if config == SERVED and sequences > 0:
        for _ in range(sequences):
            for _ in range(1 + max(drafted, 0)):
                filled += filled < tokens
    else:
        filled = tokens
    inputs = asked([(tokens, config, sequences, drafted)])
    assert right.reference(inputs).out.tolist() == [filled]
    assert OURS.run(inputs).out.tolist() == [filled]


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_right_answers_pass_and_keep_the_laws(case: RowsCase) -> None:
    inputs = ask.build(case)
    used = on_device(inputs, "cpu")
    answers = [OURS.run(used), right.reference(inputs), *(honest.answer(inputs) for honest in right.HONEST)]
    assert trespasses(inputs, used, ask.WRITABLE) == []
    assert all(passes(inputs, answer) for answer in answers)
    for law in right.LAWS:
        first = right.reference(inputs)
        for run in (right.reference, OURS.run):
            checks = break_of(law, inputs, first, run, right.judge, Precision())
            assert checks is None or all(check.passed for check in checks), law.name


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught(mutant: right.Mutant) -> None:
    assert any(not passes(inputs, mutant.answer(inputs)) for inputs in map(ask.build, SWEEP))


@pytest.mark.parametrize(
    ("law", "mutant"),
    [("R1", "drafts-ignored"), ("R2", "silent-drafter-drafts"), ("R3", "unknown-is-nothing")],
)
def test_a_law_is_broken_by_its_fault(law: str, mutant: str) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))
    answer = next(wrong for wrong in right.MUTANTS if wrong.name == mutant).answer

    def broken(inputs: Inputs) -> bool:
        checks = break_of(rule, inputs, answer(inputs), answer, right.judge, Precision())
        return checks is not None and not all(check.passed for check in checks)

    assert any(map(broken, map(ask.build, SWEEP)))


def test_a_bound_that_minds_its_neighbours_breaks_their_law() -> None:
    def running(inputs: Inputs) -> Outputs:
        return Outputs(right.reference(inputs).out.cummax(dim=0).values)

    rule = next(rule for rule in right.LAWS if rule.name.startswith("R4"))
    inputs = ask.build(RowsCase())
    checks = break_of(rule, inputs, running(inputs), running, right.judge, Precision())
    assert checks is not None and not all(check.passed for check in checks)


def test_a_wrong_bound_says_which_way_it_is_off() -> None:
    inputs = asked(POINTS[:2])
    (check,) = right.judge(inputs, Outputs(torch.tensor([192, 16384])), Precision())
    assert str(check).startswith("rows[1]=16384, but should be 32: nobody can decode that many rows at once")
    (check,) = right.judge(inputs, Outputs(torch.tensor([32, 32])), Precision())
    assert str(check).startswith("rows[0]=32, but should be 192: a locked pool refuses the missing rows")


def test_calls_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batched_tokens=-1: should not be negative"):
        right.reference(asked([(-1, SERVED, 1, 1)]))
    with pytest.raises(ValueError, match=r"config=\[4\]: should be 0 to 3"):
        right.reference(asked([(1, 4, 1, 1)]))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(RowsCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
def test_vllm_has_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    assert VLLM.unsupported(RowsCase(), "interpreter") == []
    assert VLLM.run(asked(POINTS)).out.tolist() == [point[4] for point in POINTS]
