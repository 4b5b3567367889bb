"""Is the packing of padded index rows judged rightly: every right list passes, and every wrong one is seen?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies

from cases import memory
from cases.case import CaseError, parse
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import ragged_from_dense as ask
from cases.sparse_mla.ragged_from_dense import Inputs, Outputs, RaggedCase
from impl.sparse_mla.ragged_from_dense import IMPLS
from oracle.sparse_mla import ragged
from oracle.sparse_mla import ragged_from_dense as right
from reports.laws import break_of

OURS, VLLM, TORCH = IMPLS
SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, RaggedCase)]


def call(indices: object, lengths: list[int], num_rows: int = -1, dtype: torch.dtype = torch.int32) -> Inputs:
    """A call with the given rows."""
    rows = torch.tensor(indices, dtype=dtype)
    return Inputs(
        rows, torch.tensor(lengths), num_rows, memory.guarded((rows.numel(),), torch.int32),
        memory.guarded((len(lengths) + 1,), torch.int32),
    )  # fmt: skip


def lists(outputs: Outputs) -> list[list[int]]:
    return [row.tolist() for row in ragged.split(outputs.flat, outputs.indptr)]


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


Run = Callable[[Inputs], Outputs]
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_lists(run: Run) -> None:
    rows = [[4, -1, 7, 9], [-1, -1, 5, 6], [1, 2, 3, 4], [8, 8, -5, 8]]
    inputs = call(rows, [4, 3, 0, 99])
    outputs = run(inputs)
    assert outputs.indptr.tolist() == [0, 3, 4, 4, 7]
    assert outputs.flat[:7].tolist() == [4, 7, 9, 5, 8, 8, 8]
    assert outputs.flat.shape == (16,)
    # 8 slots: 0 to 7. A negative length is an empty row.
    assert lists(run(call(rows, [4, 4, -2, 2], num_rows=8))) == [[4, 7], [5, 6], [], []]
    assert lists(run(call(rows, [4, 4, 4, 4], num_rows=0))) == [[], [], [], []]


@pytest.mark.parametrize("run", RUNS)
def test_wide_numbers_count_as_what_they_are(run: Run) -> None:
    rows = [[2**33, 3, -(2**32) + 5, 2], [7, 1, 2**31, 2**32 + 1]]
    outputs = run(call(rows, [4, 2**32 + 1], num_rows=100, dtype=torch.int64))
    assert lists(outputs) == [[3, 2], [7, 1]]
    assert lists(run(call(rows, [-(2**32) + 2, 2], num_rows=-1, dtype=torch.int64))) == [[], [7, 1]]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (0, 2, 3), (3, 0), (3, 1, 0)])
def test_nothing_gives_empty_rows(run: Run, shape: tuple[int, ...]) -> None:
    inputs = Inputs(
        torch.empty(shape, dtype=torch.int32), torch.full((shape[0],), 4), -1, torch.empty(0, dtype=torch.int32),
        torch.full((shape[0] + 1,), 77, dtype=torch.int32),
    )  # fmt: skip
    outputs = run(inputs)
    assert outputs.indptr.tolist() == [0] * (shape[0] + 1)
    assert outputs.flat.shape == (0,)
    assert passes(inputs, outputs)


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths=1: should be one for each of 2 rows"):
        right.reference(call([[1, 2], [3, 4]], [1]))
    with pytest.raises(ValueError, match=r"index=8589934592: should fit into int32"):
        right.reference(call([[1, 2**33]], [2], dtype=torch.int64))


def scalar(inputs: Inputs) -> list[list[int]]:
    """The rows, entry by entry."""
    found = []
    for row, length in zip(inputs.indices.tolist(), inputs.lengths.tolist(), strict=True):
        while row and isinstance(row[0], list):
            row = [entry for part in row for entry in part]
        kept = []
        for column, entry in enumerate(row):
            if column < length and entry >= 0 and not 0 <= inputs.num_rows <= entry:
                kept.append(entry)
        found.append(kept)
    return found


@pytest.mark.parametrize("case", [case for case in SWEEP if 0 < case.rows * case.width <= 10_000], ids=str)
def test_the_reference_agrees_with_scalar_loops(case: RaggedCase) -> None:
    inputs = ask.build(case)
    assert lists(right.reference(inputs)) == scalar(inputs)


@settings(max_examples=40, deadline=None)
@given(strategies.data())
def test_any_rows_are_packed_alike(data: strategies.DataObject) -> None:
    width = data.draw(strategies.integers(1, 5))
    entry = strategies.integers(-(2**40), 2**31 - 1)
    rows = data.draw(strategies.lists(strategies.lists(entry, min_size=width, max_size=width), min_size=1, max_size=4))
    lengths = data.draw(strategies.lists(strategies.integers(-(2**40), 2**40), min_size=len(rows), max_size=len(rows)))
    inputs = call(rows, lengths, data.draw(strategies.sampled_from([-1, 0, 1, 50])), torch.int64)
    want = right.reference(inputs)
    assert lists(want) == scalar(inputs)
    for impl in (OURS, TORCH):
        assert passes(inputs, impl.run(inputs)), impl.name


def answer_of(name: str, inputs: Inputs) -> Outputs:
    """The mutant's answer, or the right one where the fault cannot show."""
    mutant = next(mutant for mutant in right.MUTANTS if mutant.name == name)
    return mutant.answer(inputs) or right.reference(inputs)


@pytest.mark.parametrize(
    ("law", "fault", "shows"),
    [
        ("R1", "last-row-to-the-end", lambda inputs: True),
        ("R2", "count-is-a-limit", lambda inputs: True),
        ("R3", "row-pitch-is-its-width", lambda inputs: True),
        ("R4", "negative-length-from-the-end", lambda inputs: True),
        ("R5", "length-ignored", lambda inputs: True),
        ("R6", "rows-sorted", lambda inputs: inputs.num_rows == -1),
        ("R7", "rows-sorted", lambda inputs: inputs.indices.dtype == torch.int32),
    ],
)
def test_every_law_can_be_broken(law: str, fault: str, shows: Callable[[Inputs], bool]) -> None:
    lengths = "ragged" if law == "R2" else "hostile"
    inputs = ask.build(RaggedCase(rows=9, width=6, lengths=lengths, layout="strided"))

    def run(asked: Inputs) -> Outputs:
        return answer_of(fault, asked) if shows(asked) else right.reference(asked)

    (named,) = [each for each in right.LAWS if each.name.startswith(law)]
    broken = break_of(named, inputs, run(inputs), run, right.judge, Precision())
    assert broken is not None and not all(check.passed for check in broken)


def test_what_stands_behind_the_last_entry_is_free_and_the_capacity_is_not() -> None:
    inputs = call([[4, -1, 7], [1, 2, 3]], [3, 1])
    want = right.reference(inputs)
    assert passes(inputs, Outputs(ragged.with_tail(want.flat, want.indptr, 0), want.indptr))
    assert not passes(inputs, Outputs(want.flat[:3], want.indptr))
    wrong = ragged.with_tail(want.flat, want.indptr, 0)
    wrong[2] = 3
    failed = [str(check) for check in right.judge(inputs, Outputs(wrong, want.indptr), Precision()) if not check.passed]
    assert len(failed) == 1 and failed[0].startswith("flat[2]=3, but should be 1: ")


def test_impossible_cases_are_named() -> None:
    reasons = ask.forbid(RaggedCase(rows=2, width=3, form="split", layout="far", indices="int64"))
    assert [reason.split(":")[0] for reason in reasons] == ["width=3", "rows=2", "layout=far", "indices=int64"]
    with pytest.raises(CaseError, match="should be 0 to"):
        parse(RaggedCase(rows=-1).id)


@pytest.mark.vllm
def test_vllm_packs_rows_of_32_bits_and_cuts_wider_ones() -> None:
    for case in (RaggedCase(), RaggedCase(width=1500, rows=3, bound="tight", layout="strided", lengths="hostile")):
        inputs = ask.build(case)
        assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu"))), case.id
    wide = call([[2**33, 3], [2**32 + 9, -(2**32) + 5]], [2, 2], num_rows=100, dtype=torch.int64)
    assert lists(VLLM.run(wide)) == [[0, 3], [9, 5]]
    assert lists(VLLM.run(call([[7, 8]], [2**32 + 1]))) == [[7]]


@pytest.mark.vllm
def test_vllm_has_no_answer_for_no_rows() -> None:
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        VLLM.run(ask.build(RaggedCase(rows=0)))
