"""Are rows of slots judged rightly: every right row passes, and every wrong one is seen?"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies

from cases import memory
from cases.case import CaseError, parse
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import topk_to_slots as ask
from cases.sparse_mla.topk_to_slots import Inputs, Outputs, SlotsCase, Workspace
from impl.executions import memory_watch
from impl.executions.memory_watch import MemoryViolation
from impl.implementation import Impl
from impl.sources import settings as sources
from impl.sparse_mla.topk_to_slots import IMPLS
from oracle.sparse_mla import topk_to_slots as right
from reports.laws import break_of

OURS, VLLM, VLLM_ROCM, TORCH = IMPLS
Run = Callable[[Inputs], Outputs]
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]
SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, SlotsCase)]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(positions: list[list[int]], requests: list[int], **changes: Any) -> Inputs:
    """A call with blocks of 4, request 0 in blocks 10, 11, 12 and request 1 in 20, 21, 22."""
    rows = torch.tensor(positions, dtype=torch.int32)
    inputs = Inputs(
        positions=rows, requests=int32(*requests),
        table=torch.tensor([[10, 11, 12], [20, 21, 22]], dtype=torch.int32), block_size=4, block_rows=4, world_size=1,
        rank=0, interleave=1, workspace=None, form="columns", slots=memory.guarded(rows.shape, torch.int32),
        counts=memory.guarded((len(positions),), torch.int32),
    )  # fmt: skip
    return dataclasses.replace(inputs, **changes)


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


def rows_of(outputs: Outputs) -> list[list[int]]:
    """The rows in ascending order, -1 left out."""
    return [sorted(slot for slot in row if slot != -1) for row in outputs.slots.tolist()]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_rows_of_one_rank(run: Run) -> None:
    # Position 12 is beyond three blocks of 4; request 2 is no row of the table.
    positions = [[0, 3, 4, -1, 7], [5, -1, 12, 2, 11], [0, 1, 2, 3, 4]]
    right_rows = [[40, 43, 44, -1, 47], [85, -1, -1, 82, 91], [-1] * 5]
    outputs = run(call(positions, [0, 1, 2]))
    assert outputs.slots.tolist() == right_rows
    assert outputs.counts is None
    counted = run(call(positions, [0, 1, 2], form="columns_counted"))
    assert counted.slots.tolist() == right_rows
    assert counted.counts is not None and counted.counts.tolist() == [4, 3, 0]
    front = run(call(positions, [0, 1, 2], form="front"))
    assert rows_of(front) == [[40, 43, 44, 47], [82, 85, 91], []]
    assert front.slots[:, 4].tolist() == [-1, -1, -1] and front.slots[1, 3] == -1
    # Blocks 10 rows apart.
    assert run(call(positions, [0, 1, 2], block_rows=10)).slots[0].tolist() == [100, 103, 110, -1, 113]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_rows_of_several_ranks(run: Run) -> None:
    # Pairs of positions in turn: 0 1 | 2 3 | 4 5 | 6 7 belong to ranks 0, 1, 0, 1; a rank's block of 4 holds 8 of them.
    positions = [[*range(8), 23, 24]]
    first = run(call(positions, [0], world_size=2, interleave=2))
    assert first.slots.tolist() == [[40, 41, -1, -1, 42, 43, -1, -1, -1, -1]]
    second = run(call(positions, [0], world_size=2, interleave=2, rank=1))
    # Position 23 is the last of three blocks; 24 is beyond the table.
    assert second.slots.tolist() == [[-1, -1, 40, 41, -1, -1, 42, 43, 51, -1]]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_rows_of_a_workspace(run: Run) -> None:
    workspace = Workspace(requests=int32(1, -1), starts=int32(5, 9), rank_rows=100)
    # Token 0 reads prefill request 1 from row 9 on, and those of rank 1 from row 109 on; its own request is not asked.
    inputs = call([[0, 1, 2, 3, -1, 24], [0, 1, 2, 3, -1, 24]], [77, 0], world_size=2, rank=1, workspace=workspace)
    assert run(inputs).slots.tolist() == [[9, 109, 10, 110, -1, -1], [-1, 40, -1, 41, -1, -1]]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", ["columns", "columns_counted", "front"])
@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (3, 0)])
def test_nothing_gives_empty_rows(run: Run, form: str, shape: tuple[int, int]) -> None:
    empty = torch.empty(shape, dtype=torch.int32)
    changes: dict[str, Any] = {"positions": empty, "slots": empty.clone(), "form": form}
    counts = torch.full((shape[0],), 77, dtype=torch.int32)
    inputs = dataclasses.replace(call([[0]], [0] * shape[0]), counts=counts, **changes)
    outputs = run(inputs)
    assert passes(inputs, outputs)
    assert form == "columns" or (outputs.counts is not None and outputs.counts.tolist() == [0] * shape[0])


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="requests=1: should be one for each of 2 tokens"):
        right.reference(call([[1], [2]], [0]))
    with pytest.raises(ValueError, match="rank=2: should be 0 to 1"):
        right.reference(call([[1]], [0], world_size=2, rank=2))
    with pytest.raises(ValueError, match="interleave=3: should divide block_size=4"):
        right.reference(call([[1]], [0], interleave=3))


def scalar(inputs: Inputs) -> list[list[int]]:
    """The slots in their columns: every rank counts its keys by walking the sequence."""
    highest = inputs.table.shape[1] * inputs.block_size * inputs.world_size
    held = [0] * inputs.world_size
    places = []
    for position in range(highest):
        owner = position // inputs.interleave % inputs.world_size
        places.append((owner, held[owner]))
        held[owner] += 1
    found = []
    for token, positions in enumerate(inputs.positions.tolist()):
        request, space = int(inputs.requests[token]), inputs.workspace
        row = []
        for position in positions:
            slot = -1
            if 0 <= position < highest:
                owner, key = places[position]
                if space is not None and space.requests[token] >= 0:
                    slot = owner * space.rank_rows + int(space.starts[int(space.requests[token])]) + key
                elif owner == inputs.rank and 0 <= request < inputs.table.shape[0]:
                    block, place = divmod(key, inputs.block_size)
                    slot = int(inputs.table[request, block]) * inputs.block_rows + place
            row.append(slot)
        found.append(row)
    return found


@pytest.mark.parametrize("case", [case for case in SWEEP if case.tokens * case.width < 6_000], ids=str)
def test_the_reference_agrees_with_a_walk_along_the_sequence(case: SlotsCase) -> None:
    inputs = dataclasses.replace(ask.build(case), form="columns")
    assert right.reference(inputs).slots.tolist() == scalar(inputs)


@settings(max_examples=40, deadline=None)
@given(strategies.data())
def test_any_positions_are_converted_alike(data: strategies.DataObject) -> None:
    width = data.draw(strategies.integers(1, 6))
    world = data.draw(strategies.sampled_from([1, 2, 3]))
    row = strategies.lists(strategies.integers(-2, 13 * world), min_size=width, max_size=width)
    rows = data.draw(strategies.lists(row, min_size=1, max_size=4))
    requests = data.draw(strategies.lists(strategies.integers(-1, 2), min_size=len(rows), max_size=len(rows)))
    form = data.draw(strategies.sampled_from(["columns", "columns_counted", "front"]))
    inputs = call(
        rows, requests, world_size=world, rank=data.draw(strategies.integers(0, world - 1)), form=form,
        interleave=data.draw(strategies.sampled_from([1, 2, 4])), block_rows=data.draw(strategies.integers(4, 6)),
    )  # fmt: skip
    assert right.reference(dataclasses.replace(inputs, form="columns")).slots.tolist() == scalar(inputs)
    for impl in (OURS, TORCH):
        assert passes(inputs, impl.run(inputs)), impl.name


def consumed(inputs: Inputs, run: Run) -> Counter[tuple[int, int]]:
    """How often each place of the rows is a slot, over all ranks."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(inputs.world_size):
        own = dataclasses.replace(memory.on_device(inputs, "cpu"), rank=rank, form="columns")
        found.update(tuple(place) for place in (run(own).slots >= 0).nonzero().tolist())
    return found


def once(inputs: Inputs) -> Counter[tuple[int, int]]:
    """Every position that the sequence has, once."""
    return Counter(tuple(place) for place in (inputs.positions >= 0).nonzero().tolist())


SPREAD = [
    SlotsCase(world_size=world_size, interleave=interleave, block_size=16, width=40, entries="holes", seed=world_size)
    for world_size in (1, 2, 3, 7, 8)
    for interleave in (1, 4, 16)
]


@pytest.mark.parametrize("run", RUNS)
def test_over_all_ranks_every_position_is_consumed_once(run: Run) -> None:
    for case in SPREAD:
        inputs = ask.build(case)
        assert consumed(inputs, run) == once(inputs), case.id


@pytest.mark.parametrize("name", ["no-owner-filter", "one-rank-for-all", "position-for-key"])
def test_a_fault_in_ownership_consumes_a_position_twice_or_never(name: str) -> None:
    mutant = next(mutant for mutant in right.MUTANTS if mutant.name == name)
    inputs = ask.build(SlotsCase(world_size=3, interleave=4, block_size=16, width=40, entries="full"))
    assert consumed(inputs, mutant.answer) != once(inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("S1", "token-for-request"),
        ("S2", "first-tile-only"),
        ("S3", "no-owner-filter"),
        ("S4", "first-request-for-all"),
        ("S5", "position-0-dropped"),
        ("S6", "positions-counted"),
        ("S7", "workspace-for-all"),
    ],
)
def test_every_law_can_be_broken(law: str, fault: str) -> None:
    case = SlotsCase(tokens=5, width=1100, block_size=16, world_size=2, interleave=2, entries="full", table="narrowed")
    inputs = ask.build(case)
    mutant = next(mutant for mutant in right.MUTANTS if mutant.name == fault)

    def run(asked: Inputs) -> Outputs:
        # Faults that show in one of the two calls only.
        shows = {"S5": asked.block_size == 16, "S6": asked.form == "front"}.get(law, True)
        return (mutant.answer(asked) if shows else None) or right.reference(asked)

    (named,) = [each for each in right.LAWS if each.name.startswith(law)]
    broken = break_of(named, inputs, run(inputs), run, right.judge, Precision())
    assert broken is not None and not all(check.passed for check in broken)


def test_the_order_in_front_is_free_and_what_stands_behind_is_not() -> None:
    inputs = call([[0, -1, 4, 7]], [0], form="front")
    assert passes(inputs, Outputs(torch.tensor([[44, 40, 47, -1]], dtype=torch.int32), int32(3)))
    assert not passes(inputs, Outputs(torch.tensor([[44, 40, 40, -1]], dtype=torch.int32), int32(3)))
    assert not passes(inputs, Outputs(torch.tensor([[40, 44, 47, 47]], dtype=torch.int32), int32(3)))
    assert not passes(inputs, Outputs(torch.tensor([[40, -1, 44, 47]], dtype=torch.int32), int32(3)))
    assert not passes(inputs, Outputs(torch.tensor([[40, 44, 47, -1]], dtype=torch.int32), int32(4)))
    assert not passes(inputs, Outputs(torch.tensor([[40, 44, 47, -1]], dtype=torch.int32), None))
    columns = call([[0, -1, 4, 7]], [0])
    wrong = Outputs(torch.tensor([[40, 44, 47, -1]], dtype=torch.int32), None)
    failed = [str(check) for check in right.judge(columns, wrong, Precision())]
    assert len(failed) == 1 and failed[0].startswith("slots[0, 1]=44, but should be -1: ")


def test_narrowed_tables_and_stray_requests_are_what_they_say() -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        assert case.table != "narrowed" or inputs.table.stride(0) > inputs.table.shape[1]
        assert case.strays == "none" or not case.tokens or not 0 <= int(inputs.requests[0]) < case.requests


def test_impossible_cases_are_named() -> None:
    reasons = ask.forbid(SlotsCase(interleave=48, rank="last", layout="far", width=0))
    assert [reason.split(":")[0] for reason in reasons] == ["interleave=48", "rank=last", "layout=far"]
    with pytest.raises(CaseError, match="should be 1 to"):
        parse(SlotsCase(world_size=0).id)


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    case = SlotsCase(form="columns_counted", workspace="all", world_size=2)
    reasons = VLLM.unsupported(case, "interpreter")
    assert "is not a vLLM tree" in reasons[0] and reasons[1].startswith("form=columns_counted: ")
    rocm = VLLM_ROCM.unsupported(case, "interpreter")
    assert [reason.split(":")[0] for reason in rocm[1:]] == ["world_size=2", "workspace=all", "form=columns_counted"]


@pytest.mark.vllm
def test_vllm_consumes_every_position_once_over_all_ranks() -> None:
    for case in SPREAD[::4]:
        inputs = ask.build(case)
        assert consumed(inputs, VLLM.run) == once(inputs), case.id


@pytest.mark.vllm
def test_vllm_finds_the_right_slots_of_known_requests() -> None:
    workspace = SlotsCase(workspace="mixed", world_size=2, interleave=2)
    for case in (
        SlotsCase(entries="edges", table="narrowed", pages="apart"),
        workspace,
        SlotsCase(tokens=2, width=4224),
    ):
        inputs = ask.build(case)
        assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu"))), case.id


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_ROCM], ids=lambda impl: impl.name)
def test_vllm_reads_outside_the_table_for_a_stray_request(impl: Impl) -> None:
    inputs = call([[0, 1, 2, 3]], [2**30])
    with memory_watch.watch(), pytest.raises(Exception) as raised:
        impl.run(inputs)
    cause: BaseException | None = raised.value
    while cause is not None and not isinstance(cause, MemoryViolation):
        cause = cause.__cause__
    assert cause is not None and "out-of-bounds load" in str(cause)


@pytest.mark.vllm
def test_the_rocm_backend_of_vllm_has_slot_0_where_there_is_none() -> None:
    inputs = call([[0, -1, 12, 7]], [1])
    assert VLLM_ROCM.run(inputs).slots.tolist() == [[80, 0, 0, 87]]


@pytest.mark.vllm
def test_the_filter_of_vllm_moves_counted_slots_of_one_rank_though_it_is_told_not_to() -> None:
    answer = VLLM.run(call([[-1, 4, -1, 7]], [0], form="columns_counted"))
    assert answer.slots.tolist() == [[44, 47, -1, -1]]
    spread = VLLM.run(call([[-1, 4, -1, 6]], [0], form="columns_counted", world_size=2))
    assert spread.slots.tolist() == [[-1, 42, -1, 43]]
