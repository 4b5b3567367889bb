"""Does every row of a verify block see what a rank holds of the tokens up to the row's own?"""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from cases.dcp.local_lengths import INT32_MAX
from cases.dcp.verify_lengths import Inputs, Outputs, VerifyCase
from cases.precision import Precision
from impl.dcp.verify_lengths import IMPLS
from impl.sources import settings
from oracle.dcp import verify_lengths as right

OURS, VLLM, TORCH = IMPLS
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]


def call(lengths: list[int], queries: int, ranks: int, rank: int, interleave: int = 1) -> Inputs:
    return Inputs(torch.tensor(lengths, dtype=torch.int32), queries, ranks, rank, interleave)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("lengths", "queries", "ranks", "rows"),
    [
        ([10, 12], 4, 2, {0: [4, 4, 5, 5, 5, 5, 6, 6], 1: [3, 4, 4, 5, 4, 5, 5, 6]}),
        # Fewer tokens than rows: the first five rows see nothing.
        ([3], 8, 2, {0: [0, 0, 0, 0, 0, 1, 1, 2], 1: [0, 0, 0, 0, 0, 0, 1, 1]}),
        ([1000], 3, 8, {0: [125, 125, 125], 7: [124, 124, 125]}),
        # As many tokens as rows and ranks: no row is empty on any rank.
        ([32], 4, 8, {**{rank: [4, 4, 4, 4] for rank in range(5)}, 5: [3, 4, 4, 4], 6: [3, 3, 4, 4], 7: [3, 3, 3, 4]}),
        ([10], 3, 2, {1: [4, 4, 5]}),
        # A request without tokens has rows that see nothing.
        ([0, 5], 2, 2, {0: [0, 0, 2, 3], 1: [0, 0, 2, 2]}),
        ([], 4, 2, {1: []}),
    ],
)
def test_rows_see_what_the_rank_holds_up_to_them(
    run: Any, lengths: list[int], queries: int, ranks: int, rows: dict[int, list[int]]
) -> None:
    for rank, expected in rows.items():
        assert run(call(lengths, queries, ranks, rank)).lengths.tolist() == expected


@pytest.mark.parametrize("run", RUNS)
def test_turns_of_more_than_one_token(run: Any) -> None:
    # Rank 0 holds 0, 1, 4, 5, 8; rank 1 the others of nine.
    assert run(call([9], 5, 2, 0, 2)).lengths.tolist() == [3, 4, 4, 4, 5]
    assert run(call([9], 5, 2, 1, 2)).lengths.tolist() == [2, 2, 3, 4, 4]


@pytest.mark.parametrize("run", RUNS)
def test_the_longest_sequence_does_not_wrap(run: Any) -> None:
    assert run(call([INT32_MAX], 2, 4, 3)).lengths.tolist() == [2**29 - 1, 2**29 - 1]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 70), max_size=4), st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 7, 8]),
    st.sampled_from([1, 2, 4, 16]),
)  # fmt: skip
def test_every_visible_token_is_on_one_rank(lengths: list[int], queries: int, ranks: int, interleave: int) -> None:
    found = [right.reference(call(lengths, queries, ranks, rank, interleave)).lengths.tolist() for rank in range(ranks)]
    rows = list(itertools.product(lengths, range(queries)))
    for number, (length, row) in enumerate(rows):
        bound = max(0, length - queries + row + 1)
        owners = [position // interleave % ranks for position in range(bound)]
        assert [rows_of_rank[number] for rows_of_rank in found] == [owners.count(rank) for rank in range(ranks)]


def test_the_ranks_own_length_does_not_tell_its_rows() -> None:
    (local,) = (mutant for mutant in right.MUTANTS if mutant.name == "expand-after-localise")
    wrong = total = 0
    for length, queries, ranks in itertools.product(range(1, 40), range(1, 9), (2, 3, 4, 8)):
        for rank in range(ranks):
            inputs = call([length], queries, ranks, rank)
            answer = local.answer(inputs)
            total += 1
            wrong += answer is not None and not torch.equal(answer.lengths, right.reference(inputs).lengths)
    # Three in four, or so.
    assert 0.6 < wrong / total < 0.9


def test_a_wrong_row_names_the_sequence() -> None:
    outputs = Outputs(torch.tensor([4, 4, 5, 6], dtype=torch.int32))
    (check,) = right.judge(call([10], 4, 2, 0), outputs, Precision())
    assert str(check).startswith(
        "lengths[3]=6, but should be 5: row 3 of a sequence of 10 sees 10 on all ranks, and rank 0 of 2 holds those"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": 0}, "queries=0: should be 1 or more"),
        ({"rank": 2}, "rank=2: should be 0 to 1"),
        ({"ranks": 0}, "ranks=0: should be 1 or more"),
        ({"interleave": 0}, "interleave=0: should be 1 or more"),
        ({"lengths": torch.tensor([5, -1])}, "lengths=-1..5: should be 0"),
        ({"lengths": torch.tensor([1 << 31])}, "should be 0 to 2\\^31 - 1"),
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        right.reference(dataclasses.replace(call([10], 4, 2, 1), **changes))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(VerifyCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
def test_vllm_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for queries, ranks, interleave in itertools.product((1, 4, 8), (1, 2, 8), (1, 4)):
        inputs = call(list(range(40)), queries, ranks, ranks - 1, interleave)
        assert torch.equal(VLLM.run(inputs).lengths, right.reference(inputs).lengths)
    # It does not refuse a rank that is none: it counts a share of its own making.
    assert VLLM.run(call([10], 2, 2, 2)).lengths.tolist() == [4, 5]
