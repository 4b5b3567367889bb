"""Does a chunk of context come together from all ranks, without what pads it?"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from cases.case import parse
from cases.dcp import gather_context as ask
from cases.dcp.gather_context import GatherCase, Inputs
from cases.precision import Precision
from impl.dcp.gather_context import IMPLS
from impl.sources import settings
from oracle.dcp import gather_context as right

OURS, VLLM, TORCH = IMPLS
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]


def call(
    contexts: list[int], ranks: int = 2, interleave: int = 1, block_size: int = 2, share: int = 8, **changes: Any
) -> Inputs:
    """Whole contexts. A token's row says request and position, 100 r + p; a row of no token says -1."""
    span = block_size * ranks
    columns = max((-(-context // span) for context in contexts), default=0) + 2
    table = torch.arange(len(contexts) * columns, dtype=torch.int32).view(len(contexts), columns).flip(1)
    caches = []
    for rank in range(ranks):
        cache = torch.full((table.numel() + 1, block_size, 1), -1.0, dtype=torch.bfloat16)
        for request, context in enumerate(contexts):
            mine = [position for position in range(context) if position // interleave % ranks == rank]
            for index, position in enumerate(mine):
                cache[table[request, index // block_size], index % block_size] = 100 * request + position
        caches.append(cache)
    inputs = Inputs(
        contexts=tuple(contexts), starts=(0,) * len(contexts), lengths=tuple(contexts), interleave=interleave, rank=0,
        caches=tuple(caches), table=table, workspace=torch.full((share * (ranks + 1), 1), -2.0, dtype=torch.bfloat16),
    )  # fmt: skip
    return dataclasses.replace(inputs, **changes)


@pytest.mark.parametrize("run", RUNS)
def test_two_requests_of_two_ranks(run: Any) -> None:
    # Rank 0 holds 0, 2, 4 of five tokens, rank 1 the others and a row of padding; then three tokens, 2 and 1.
    answer = run(call([5, 3], rank=1))
    assert (answer.padded.tolist(), answer.local_starts.tolist()) == ([3, 2], [0, 0])
    assert answer.rows.tolist() == [0, 1, 2, 5, 6, 3, 4, 8]
    assert answer.context.flatten().tolist() == [0, 2, 4, 1, 3, 100, 102, 101]
    held = answer.workspace.flatten().tolist()
    # This rank's rows in front, from row 8 on the slabs; -1 stands where the rank holds no token.
    assert [held[row] for row in (0, 1, 3)] == [1, 3, 101]
    assert [held[row] for row in (8, 9, 10, 11, 12, 13, 14, 16)] == [0, 2, 4, 100, 102, 1, 3, 101]


@pytest.mark.parametrize("run", RUNS)
def test_turns_are_sent_whole(run: Any) -> None:
    # In turns of two, rank 0 holds 0, 1, 4 and rank 1 holds 2, 3; each sends two turns.
    answer = run(call([5], interleave=2))
    assert answer.padded.tolist() == [4]
    assert answer.rows.tolist() == [0, 1, 2, 4, 5]
    assert answer.context.flatten().tolist() == [0, 1, 4, 2, 3]


@pytest.mark.parametrize("run", RUNS)
def test_a_later_chunk_starts_behind_what_was_sent(run: Any) -> None:
    # Positions 4 to 8 of 9: rank 0 has 4, 6, 8 from its index 2 on, rank 1 has 5 and 7.
    answer = run(call([9], starts=(4,), lengths=(5,)))
    assert (answer.padded.tolist(), answer.local_starts.tolist()) == ([3], [2])
    assert answer.context.flatten().tolist() == [4, 6, 8, 5, 7]
    # Cut before the end of the context, both send two rows and no padding.
    answer = run(call([9], starts=(4,), lengths=(4,)))
    assert (answer.padded.tolist(), answer.rows.tolist()) == ([2], [0, 1, 2, 3])
    assert answer.context.flatten().tolist() == [4, 6, 5, 7]


@pytest.mark.parametrize("run", RUNS)
def test_fewer_tokens_than_ranks_and_none_at_all(run: Any) -> None:
    answer = run(call([2, 0, 1], ranks=4))
    assert (answer.padded.tolist(), answer.rows.tolist()) == ([1, 0, 1], [0, 2, 1])
    assert answer.context.flatten().tolist() == [0, 1, 200]
    answer = run(call([]))
    assert (answer.rows.numel(), answer.context.shape, answer.padded.shape) == (0, (0, 1), (0,))


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.sampled_from([1, 2, 16]),
    st.sampled_from(["whole", "first", "last"]), st.sampled_from(["short", "edges", "any"]),
)  # fmt: skip
def test_every_token_of_the_chunk_is_gathered_once(
    seed: int, ranks: int, interleave: int, chunk: str, contexts: str
) -> None:
    case = GatherCase(seed=seed, ranks=ranks, interleave=interleave, chunk=chunk, contexts=contexts, lanes=8)  # type: ignore[arg-type]
    inputs = ask.build(case)
    answer = right.reference(inputs)
    assert answer.rows.unique().numel() == answer.rows.numel() == sum(inputs.lengths)
    got = iter(answer.context.view(torch.uint8).split(list(inputs.lengths)))
    for request, (start, length) in enumerate(zip(inputs.starts, inputs.lengths, strict=True)):
        rows = []
        for position in range(start, start + length):
            turn, within = divmod(position, interleave)
            round_, rank = divmod(turn, ranks)
            index = round_ * interleave + within
            block = inputs.table[request, index // inputs.block_size]
            rows.append(inputs.caches[rank][block, index % inputs.block_size].view(torch.uint8).tolist())
        assert sorted(rows) == sorted(next(got).tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "rank=2: should be 0 to 1"),
        ({"interleave": 0}, "interleave=0: should divide block_size=2"),
        ({"interleave": 3}, "interleave=3: should divide"),
        ({"starts": (3,), "lengths": (2,)}, "start=3: should be a multiple of 2"),
        ({"starts": (4,), "lengths": (2,)}, "start=4, length=2: should lie in a context of 5"),
        ({"lengths": (3,)}, "end=3: should be a multiple of 2, or the context's 5"),
        ({"table": torch.zeros((1, 1), dtype=torch.int32)}, "table has 1 columns: should hold 5 tokens"),
        ({"workspace": torch.zeros(10, 1)}, "workspace=10 rows: should be 3 times 3 or more"),
        ({"workspace": torch.zeros(6, 1)}, "workspace=6 rows: should be 3 times 3 or more"),
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        right.reference(dataclasses.replace(call([5]), **changes))


def test_blocks_that_are_none_are_refused() -> None:
    for block in (-1, 5):
        with pytest.raises(IndexError, match=r"should be 0 to 4"):
            right.reference(call([5], table=torch.tensor([[3, block, 0]], dtype=torch.int32)))


def test_a_workspace_row_that_pads_is_not_looked_at() -> None:
    inputs = call([5])
    answer = right.reference(inputs)
    other = answer.workspace.clone()
    # Rank 1's third row is padding; its second is not.
    other[8 + 5] = 77
    judged = right.judge(inputs, dataclasses.replace(answer, workspace=other), Precision())
    assert all(check.passed for check in judged)
    other[8 + 4] = 77
    judged = right.judge(inputs, dataclasses.replace(answer, workspace=other), Precision())
    assert [check.output for check in judged if not check.passed] == ["workspace"]


def test_ours_reads_blocks_that_lie_far_apart() -> None:
    (case,) = (case for case in map(parse, ask.REGRESSIONS) if case.settings["layout"] == "far")
    inputs = ask.build(case)  # type: ignore[arg-type]
    cache = inputs.caches[0]
    assert cache.stride(0) * (cache.shape[0] - 1) >= 1 << 31
    assert all(check.passed for check in right.judge(inputs, OURS.run(inputs), Precision()))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(GatherCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
def test_vllm_gathers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for case in (GatherCase(chunk="last", ranks=3), GatherCase(interleave=16, contexts="edges", dtype="bfloat16")):
        inputs = ask.build(case)
        assert all(check.passed for check in right.judge(inputs, VLLM.run(ask.build(case)), Precision())), case.id
