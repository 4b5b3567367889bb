"""Is the bound on decode rows neither too small for a locked pool nor as large as the batch?"""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.covering import sweep_cases
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
from impl.sparse_mla.decode_logits_rows import IMPLS
from oracle.sparse_mla import decode_logits_rows as right
from reports.laws import break_of

OURS, VLLM = IMPLS


SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, RowsCase)]
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


@pytest.mark.vllm
def test_vllm_has_the_same_bound() -> None:
    assert VLLM.unsupported(RowsCase(), "interpreter") == []
    assert VLLM.run(asked(POINTS)).out.tolist() == [point[4] for point in POINTS]
