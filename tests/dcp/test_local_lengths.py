"""Are the shares of ranks and the slots of tokens those that counting positions gives?"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from cases.dcp import local_lengths as ask
from cases.dcp.local_lengths import Inputs, LocalCase
from impl.dcp.local_lengths import IMPLS
from impl.sources import settings
from oracle.dcp import local_lengths as right
from oracle.dcp import shards

OURS, VLLM, GROUPED, TORCH = IMPLS
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]


def call(shares_of: list[int], ranks: int = 2, rank: int = 1, interleave: int = 1, **changes: Any) -> Inputs:
    """Shares of these lengths; one request of 3 blocks of 4 per rank, whose tokens are all asked for."""
    tokens = 3 * 4 * ranks
    inputs = Inputs(
        lengths=torch.tensor(shares_of, dtype=torch.int32), ranks=ranks, rank=rank,
        rank_tensor=torch.tensor([rank], dtype=torch.int32), form="number", interleave=interleave,
        positions=torch.arange(tokens), query_start=torch.tensor([0, tokens], dtype=torch.int32),
        table=torch.tensor([[7, 2, 9]], dtype=torch.int32), block_size=4, slots=torch.full((tokens,), 99),
    )  # fmt: skip
    return dataclasses.replace(inputs, **changes)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", ["number", "tensor"])
@pytest.mark.parametrize(
    ("ranks", "rank", "interleave", "shares"),
    [
        (2, 0, 1, [0, 1, 1, 2, 2, 3]),
        (2, 1, 1, [0, 0, 1, 1, 2, 2]),
        (2, 0, 2, [0, 1, 2, 2, 2, 3, 4]),
        (2, 1, 2, [0, 0, 0, 1, 2, 2, 2]),
        (1, 0, 4, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_shares_of_short_sequences(
    run: Any, form: str, ranks: int, rank: int, interleave: int, shares: list[int]
) -> None:
    inputs = call(list(range(len(shares))), ranks, rank, interleave, form=form)
    assert run(inputs).lengths.tolist() == shares


@pytest.mark.parametrize("run", RUNS)
def test_all_ranks_stand_in_a_last_dimension(run: Any) -> None:
    inputs = call([], 3, 1, form="all", lengths=torch.tensor([[5, 0], [6, 7]], dtype=torch.int64))
    assert run(inputs).lengths.tolist() == [[[2, 2, 1], [0, 0, 0]], [[2, 2, 2], [3, 2, 2]]]


@pytest.mark.parametrize("run", RUNS)
def test_the_longest_sequence_does_not_wrap(run: Any) -> None:
    shares = run(call([ask.INT32_MAX], 8, 0, 4, form="all")).lengths
    assert shares.tolist() == [[2**28] * 7 + [2**28 - 1]]


@pytest.mark.parametrize("run", RUNS)
def test_slots_of_two_ranks(run: Any) -> None:
    # In turns of two, rank 1 holds 2, 3, 6, 7 of the first eight positions, in block 7; then block 2.
    slots = run(call([0], 2, 1, 2)).slots.tolist()
    assert slots[:12] == [-1, -1, 28, 29, -1, -1, 30, 31, -1, -1, 8, 9]
    # Token by token, rank 0 holds the even positions.
    assert run(call([0], 2, 0, 1)).slots.tolist()[:10] == [28, -1, 29, -1, 30, -1, 31, -1, 8, -1]


@pytest.mark.parametrize("run", RUNS)
def test_what_no_request_owns_has_no_slot(run: Any) -> None:
    changes = {"query_start": torch.tensor([0, 3], dtype=torch.int32), "slots": torch.full((40,), 99)}
    assert run(call([0], 2, 0, 1, **changes)).slots.tolist() == [28, -1, 29] + [-1] * 37


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("interleave", [1, 2, 4, 16])
def test_the_formulas_count_positions(ranks: int, interleave: int) -> None:
    longest = 2 * ranks * interleave + 3
    owners = [p // interleave % ranks for p in range(longest)]
    lengths = torch.arange(longest + 1)
    shares = shards.held_by_all(lengths, ranks, interleave)
    assert shares.tolist() == [[owners[:n].count(rank) for rank in range(ranks)] for n in range(longest + 1)]
    assert torch.equal(shares.sum(-1), lengths)
    positions = torch.arange(longest)
    assert shards.rank_of(positions, ranks, interleave).tolist() == owners
    assert shards.index_of(positions, ranks, interleave).tolist() == [
        owners[:p].count(owners[p]) for p in range(longest)
    ]
    for rank in range(ranks):
        held = torch.arange(owners.count(rank))
        assert shards.position_of(held, rank, ranks, interleave).tolist() == [
            p for p in range(longest) if owners[p] == rank
        ]


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    st.integers(0, 10_000), st.sampled_from([1, 2, 3, 7]), st.sampled_from([1, 2, 16]), st.sampled_from(["few", "one"])
)
def test_the_ranks_share_the_tokens_out(seed: int, ranks: int, interleave: int, queries: str) -> None:
    case = LocalCase(seed=seed, ranks=ranks, interleave=interleave, queries=queries, context="edge")  # type: ignore[arg-type]
    inputs = ask.build(case)
    # A table without garbage, since every rank looks up blocks of its own.
    table = torch.arange(inputs.table.numel(), dtype=torch.int32).view(inputs.table.shape)
    found = [right.reference(dataclasses.replace(inputs, rank=rank, table=table)).slots for rank in range(ranks)]
    owned = torch.stack(found) >= 0
    assert (owned.sum(0) == 1)[: int(inputs.query_start[-1])].all()
    for slots in found:
        assert slots[slots >= 0].unique().numel() == int((slots >= 0).sum())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks=0: should be 1 or more"),
        ({"rank": 2}, "rank=2: should be 0 to 1"),
        ({"rank": -1}, "rank=-1: should be 0 to 1"),
        ({"interleave": 0}, "interleave=0: should be 1 or more"),
        ({"interleave": 3}, "interleave=3: should divide block_size=4"),
        ({"lengths": torch.tensor([-1])}, "lengths=-1..-1: should be 0"),
        ({"lengths": torch.tensor([1 << 31])}, "should be 0 to 2\\^31 - 1"),
        ({"form": "tensor", "rank_tensor": torch.tensor([1])}, r"rank_tensor=torch.int64\[1\]: should be one int32"),
        ({"form": "tensor", "rank_tensor": torch.tensor([5], dtype=torch.int32)}, "rank=5: should be 0 to 1"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots=3: should be 24 or more"),
        ({"query_start": torch.tensor([0])}, "query_start=1: should be one more than 1 rows"),
        ({"query_start": torch.tensor([0, 25])}, "query_start ends with 25"),
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        right.reference(dataclasses.replace(call([4]), **changes))


def test_positions_outside_their_blocks_are_refused() -> None:
    with pytest.raises(IndexError, match="should be in one of 3 blocks"):
        right.reference(call([4], 2, 0, positions=torch.arange(24) + 8))
    with pytest.raises(IndexError, match="block=-1: should not be negative"):
        right.reference(call([4], 2, 0, table=torch.tensor([[7, -1, 9]], dtype=torch.int32)))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    for impl in (VLLM, GROUPED):
        assert "does not exist" in impl.unsupported(LocalCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
class TestRealVllm:
    """Facts about vLLM's own code."""

    @pytest.fixture(autouse=True)
    def _real_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))

    @pytest.mark.parametrize("impl", [VLLM, GROUPED], ids=lambda impl: impl.name)
    def test_both_kernels_agree_where_slots_fit_into_32_bits(self, impl: Any) -> None:
        for case in (LocalCase(requests=17, interleave=4, padding=5), LocalCase(ranks=7, queries="long", form="all")):
            inputs = ask.build(case)
            assert all(
                check.passed for check in right.judge(inputs, impl.run(inputs), impl.precision(case, "interpreter"))
            )

    def test_the_grouped_kernel_wraps_slots_at_31_bits(self) -> None:
        high = call([0], 1, 0, table=torch.tensor([[1 << 29, 1, 2]], dtype=torch.int32))
        assert right.reference(high).slots[0] == 1 << 31
        assert VLLM.run(high).slots[0] == 1 << 31
        assert GROUPED.run(high).slots[0] == -(1 << 31)
