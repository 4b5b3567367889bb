"""Are the tables of captured graphs judged rightly, and do our own routes leave behind what was worked out by hand?"""

import dataclasses
import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.case import parse
from cases.dense_mla import graph_tables as ask
from cases.dense_mla.batches import Batch
from cases.dense_mla.graph_tables import BUFFERS, Buffers, GraphTablesCase, Inputs, Outputs, Step
from cases.precision import Precision
from impl.dense_mla import graph_tables as routes
from impl.dense_mla.graph_tables import IMPLS
from impl.sources import settings as sources
from oracle.dense_mla import graph_tables as right

OURS, VLLM, TORCH = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run, TORCH.run], ids=["reference", OURS.name, TORCH.name])


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(query_lens: list[int], tokens: int, whole: list[int], table: list[list[int]], world: int = 1) -> Step:
    """A batch as rank 0 of `world` sees it."""
    local = [-(-length // world) for length in whole]
    starts = [0, *itertools.accumulate(query_lens)]
    return Step(Batch(tuple(query_lens), int32(starts), int32(local), int32(whole), tokens), int32(table))


def large_then_small(**changes: object) -> Inputs:
    """Three requests of two tokens, the last one a dummy; then one request of one token, in blocks of two tokens."""
    inputs = Inputs(
        steps=(
            step([2, 2, 0], 6, [3, 2, 0], [[7, 9], [4, 99], [5, 99]]),
            step([1], 1, [4], [[8, 6]]),
        ),
        buffers=Buffers(
            qo_indptr=int32([-7] * 5),
            kv_indptr=int32([-7] * 5),
            global_indptr=int32([0] + [-7] * 4),
            seq_lens=int32([-7] * 4),
            indices=int32([-7] * 9),
            row_lens=int32([-7] * 8),
            row_pages=int32([[-7, -7]] * 8),
        ),
        kernels="plain",
        world=1,
        rank=0,
        block_size=2,
        page_size=2,
    )
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


def over_two_ranks(**changes: object) -> Inputs:
    """A verify batch of three tokens with a dummy, then a smaller one of two tokens, as the first of two ranks."""
    steps = (
        step([3, 0], 6, [5, 0], [[7, 9], [4, 99]], world=2),
        step([2], 2, [4], [[8, 99]], world=2),
    )
    return large_then_small(**{"steps": steps, "kernels": "both", "world": 2, "page_size": 1} | changes)


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@RUNS
def test_hand_worked_plain_batches(run: object) -> None:
    outputs = run(large_then_small())  # type: ignore[operator]
    first, second = outputs.held
    assert first.qo_indptr.tolist() == [0, 2, 4, 6, 6] and first.kv_indptr.tolist() == [0, 3, 5, 7, 7]
    assert first.seq_lens.tolist() == [3, 2, 2, -7]
    assert first.indices.tolist() == [14, 15, 18, 8, 9, 10, 11, -1, -1]
    assert second.qo_indptr.tolist() == [0, 1, 1, 1, 1] and second.kv_indptr.tolist() == [0, 4, 4, 4, 4]
    assert second.seq_lens.tolist() == [4, 2, 2, -7]
    assert second.indices.tolist() == [16, 17, 12, 13, -1, -1, -1, -1, -1]
    assert second.global_indptr.tolist() == [0, -7, -7, -7, -7] and second.row_lens.tolist() == [-7] * 8
    # Starts of queries, keys and all ranks' keys, lengths, slots, rows' lengths and rows' pages.
    assert outputs.places[1].tolist() == [[0, 2], [0, 2], [-2, 0], [0, 1], [0, 9], [-2, 0], [-2, 0]]
    assert outputs.raised.tolist() == [0, 0]


@RUNS
def test_hand_worked_batches_over_two_ranks(run: object) -> None:
    outputs = run(over_two_ranks())  # type: ignore[operator]
    first, second = outputs.held
    # Three tokens: round-robin kernels. The dummy has three keys here and six on both ranks.
    assert first.kv_indptr.tolist() == [0, 3, 6, 6, 6] and first.global_indptr.tolist() == [0, 5, 11, 11, 11]
    assert first.indices.tolist() == [14, 15, 18, 8, 9, 198, -1, -1, -1]
    # Two tokens: segmented kernels, for which slots and global starts stay. The tokens see three and four keys, of which
    # this rank has two each.
    assert second.indices.tolist() == first.indices.tolist()
    assert second.global_indptr.tolist() == first.global_indptr.tolist()
    assert second.row_lens.tolist() == [2, 2] + [-7] * 6
    assert second.row_pages.tolist() == [[16, 17]] * 2 + [[-7, -7]] * 6
    assert outputs.places[0].tolist() == [[0, 3], [0, 3], [0, 3], [0, 2], [0, 9], [-2, 0], [-2, 0]]
    assert outputs.places[1].tolist() == [[0, 2], [0, 2], [-2, 0], [0, 1], [-2, 0], [0, 2], [0, 2]]


@RUNS
def test_a_dummys_rows_have_no_keys(run: object) -> None:
    outputs = run(over_two_ranks(kernels="segmented"))  # type: ignore[operator]
    # The request's tokens see 3, 4 and 5 keys.
    assert outputs.held[0].row_lens.tolist()[:6] == [2, 2, 3, 0, 0, 0]
    assert outputs.held[0].seq_lens.tolist()[:2] == [3, 3]


@RUNS
def test_batches_that_do_not_fit_raise(run: object) -> None:
    batch = step([1] * 5, 5, [1] * 5, [[1, 2]] * 5)
    assert run(large_then_small(steps=(*large_then_small().steps, batch))).raised.tolist() == [0, 0, 1]  # type: ignore[operator]
    rows = step([3] * 3, 9, [6] * 3, [[1, 2]] * 3, world=2)
    assert run(over_two_ranks(kernels="segmented", steps=(rows,))).raised.tolist() == [1]  # type: ignore[operator]


def test_refusals_name_what_does_not_fit() -> None:
    inputs = large_then_small(steps=(step([1] * 5, 5, [1] * 5, [[1, 2]] * 5),))
    with pytest.raises(ValueError, match="5 requests: should be at most 4"):
        routes.refuse(inputs, inputs.steps[0])
    inputs = over_two_ranks(kernels="segmented", steps=(step([3] * 3, 9, [6] * 3, [[1, 2]] * 3, world=2),))
    with pytest.raises(ValueError, match="9 rows: should be at most 8"):
        routes.refuse(inputs, inputs.steps[0])


def test_malformed_calls_are_named() -> None:
    with pytest.raises(ValueError, match="page_size=3: should divide the block size, 2"):
        right.reference(large_then_small(page_size=3))
    with pytest.raises(ValueError, match="length of request 0=5: should be at most 4"):
        right.reference(large_then_small(steps=(step([1], 1, [5], [[1, 2]]),)))
    with pytest.raises(ValueError, match="should rise from 0 to at most 9, the buffer's end"):
        right.reference(large_then_small(steps=(step([1] * 3, 3, [4] * 3, [[1, 2]] * 3),)))
    for find in (right.reference, lambda inputs: routes.refuse(inputs, inputs.steps[1])):
        with pytest.raises(RuntimeError, match="2 query tokens over 2 ranks should have a kernel"):
            find(over_two_ranks(kernels="round_robin"))  # type: ignore[no-untyped-call]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_lies_behind_a_batch_counts_no_queries_and_no_keys(batches: list[list[int]]) -> None:
    steps = tuple(step([1] * len(keys), len(keys), keys, [[1, 2]] * len(keys)) for keys in batches)
    inputs = large_then_small(steps=steps)
    inputs = dataclasses.replace(inputs, buffers=dataclasses.replace(inputs.buffers, indices=int32([-7] * 16)))
    for outputs in (right.reference(inputs), OURS.run(memory.on_device(inputs, "cpu"))):
        for keys, held in zip(batches, outputs.held, strict=True):
            behind = [0] * (4 - len(keys))
            assert held.kv_indptr.diff().tolist() == keys + behind
            assert held.qo_indptr.diff().tolist() == [1] * len(keys) + behind
            assert held.indices.tolist() == [2 + n for k in keys for n in range(k)] + [-1] * (16 - sum(keys))


@pytest.mark.parametrize("name", BUFFERS)
def test_every_element_of_a_buffer_is_judged(name: str) -> None:
    inputs = over_two_ranks()
    for place in range(getattr(inputs.buffers, name).shape[0]):
        outputs = right.reference(inputs)
        getattr(outputs.held[1], name)[place] += 1
        assert not passes(inputs, outputs), place


def test_what_is_returned_is_judged() -> None:
    inputs = over_two_ranks()
    for place in itertools.product(range(2), range(7), range(2)):
        outputs = right.reference(inputs)
        outputs.places[place] += 1
        assert not passes(inputs, outputs), place
    outputs = right.reference(inputs)
    assert not passes(inputs, dataclasses.replace(outputs, held=outputs.held[:1]))


def test_pages_that_no_key_reaches_are_free() -> None:
    inputs = over_two_ranks(steps=(step([2], 2, [2], [[8, 99]], world=2),))
    outputs = right.reference(inputs)
    assert outputs.held[0].row_lens.tolist()[:2] == [1, 1]
    outputs.held[0].row_pages[:2, 1] = 5
    assert passes(inputs, outputs)
    outputs.held[0].row_pages[1, 0] = 5
    assert not passes(inputs, outputs)


@pytest.mark.parametrize("case", ask.REGRESSIONS)
def test_our_tables_are_right(case: str) -> None:
    inputs = ask.build(parse(case))  # type: ignore[arg-type]
    assert passes(inputs, OURS.run(memory.on_device(inputs, "cpu")))


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_tables_are_told_from_right_ones(mutant: right.Mutant) -> None:
    cases = [parse(case) for case in ask.REGRESSIONS[:7]]
    cases.append(GraphTablesCase(kernels="segmented", world=2, kind="padded", block_size=256, pattern="alternating"))
    cases.append(GraphTablesCase(kind="uniform", capacity=3, keys=2100))
    for case in cases:
        inputs = ask.build(case)  # type: ignore[arg-type]
        answer = mutant.answer(inputs)
        if answer is not None and not passes(inputs, answer):
            return
    pytest.fail("no case tells it from the right answer")


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
def test_vllm_leaves_the_tables_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for inputs in (large_then_small(), over_two_ranks(), over_two_ranks(kernels="segmented")):
        assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu")))


@pytest.mark.vllm
@needs_vllm
def test_in_vllm_keys_beyond_the_slots_memory_are_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    inputs = large_then_small(steps=(step([1] * 3, 3, [4] * 3, [[1, 2]] * 3),))
    memory_of_more = int32([-7] * 12)
    buffers = dataclasses.replace(inputs.buffers, indices=memory_of_more[:9])
    outputs = VLLM.run(dataclasses.replace(inputs, buffers=buffers))
    assert outputs.raised.tolist() == [0]
    assert memory_of_more.tolist()[9:] == [3, 4, 5]


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    assert "is not a vLLM tree" in VLLM.unsupported(GraphTablesCase(), "interpreter")[0]
