"""Are the slot lists of decode tokens judged rightly: every right list passes, and every wrong one is seen?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies

from cases import memory
from cases.case import CaseError, parse
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import decode_topk_ragged as ask
from cases.sparse_mla import ragged_from_dense as packing
from cases.sparse_mla.decode_topk_ragged import DecodeTopkCase, Inputs, Outputs
from impl.implementation import Impl
from impl.sparse_mla.decode_topk_ragged import IMPLS
from oracle.sparse_mla import decode_topk_ragged as right
from oracle.sparse_mla import ragged, ragged_from_dense
from reports.laws import break_of

OURS, VLLM, VLLM_V4, ONE_LAUNCH, TORCH = IMPLS
Run = Callable[[Inputs], Outputs]
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]
SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, DecodeTopkCase)]


def call(
    local: list[list[int]], requests: list[int], valid: list[bool], holes: Literal["kept", "removed"] = "kept"
) -> Inputs:
    """A call with blocks of 4, request 0 in blocks 10, 11, 12 and request 1 in 20, 21, 22."""
    rows = torch.tensor(local, dtype=torch.int32)
    return Inputs(
        local=rows, requests=torch.tensor(requests, dtype=torch.int32),
        table=torch.tensor([[10, 11, 12], [20, 21, 22]], dtype=torch.int32), block_size=4, valid=torch.tensor(valid),
        holes=holes, flat=memory.guarded((rows.numel(),), torch.int32),
        indptr=memory.guarded((len(local) + 1,), torch.int32), lengths=memory.guarded((len(local),), torch.int32),
    )  # fmt: skip


def lists(outputs: Outputs) -> list[list[int]]:
    return [row.tolist() for row in ragged.split(outputs.flat, outputs.indptr)]


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


ROWS = [[0, 3, 4, -1, 7], [5, -1, 8, 2, -1], [9, 9, 9, 9, 9], [-1, -1, -1, -1, -1]]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_lists(run: Run) -> None:
    kept = run(call(ROWS, [0, 1, 77, 0], [True, True, False, True]))
    # Four positions: the first four columns, so that position 7 is lost.
    assert kept.flat[:7].tolist() == [40, 43, 44, -1, 85, -1, 88]
    assert kept.indptr.tolist() == [0, 4, 7, 7, 7]
    assert kept.lengths.tolist() == [4, 3, 0, 0]
    assert kept.flat.shape == (20,)
    removed = run(call(ROWS, [0, 1, 77, 0, 5], [True, True, False, True], holes="removed"))
    assert lists(removed) == [[40, 43, 44, 47], [85, 88, 82], [], []]
    assert removed.indptr.tolist() == [0, 4, 7, 7, 7]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (3, 0)])
def test_nothing_gives_empty_rows(run: Run, shape: tuple[int, int]) -> None:
    tokens = shape[0]
    inputs = dataclasses.replace(
        call([[0]], [0, 1, 1], [True]), local=torch.empty(shape, dtype=torch.int32),
        valid=torch.ones(tokens, dtype=torch.bool), flat=torch.empty(0, dtype=torch.int32),
        indptr=torch.full((tokens + 1,), 77, dtype=torch.int32), lengths=torch.full((tokens,), 77, dtype=torch.int32),
    )  # fmt: skip
    outputs = run(inputs)
    assert outputs.indptr.tolist() == [0] * (tokens + 1)
    assert outputs.lengths.tolist() == [0] * tokens
    assert passes(inputs, outputs)


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="requests=1: should be one for each of 2 tokens, or more"):
        right.reference(call([[1], [2]], [0], [True, True]))
    with pytest.raises(ValueError, match="valid=1: should be one for each of 2 tokens"):
        right.reference(call([[1], [2]], [0, 0], [True]))
    with pytest.raises(ValueError, match="block_size=0: should be 1 or more"):
        right.reference(dataclasses.replace(call([[1]], [0], [True]), block_size=0))


def scalar(inputs: Inputs) -> list[list[int]]:
    """The slots, position by position."""
    found = []
    for token, positions in enumerate(inputs.local.tolist()):
        slots = []
        for position in positions if inputs.valid[token] else ():
            if position >= 0:
                block, place = divmod(position, inputs.block_size)
                slots.append(int(inputs.table[int(inputs.requests[token]), block]) * inputs.block_size + place)
            elif inputs.holes == "kept":
                slots.append(-1)
        count = sum(position >= 0 for position in positions)
        found.append(slots[:count])
    return found


@pytest.mark.parametrize("case", [case for case in SWEEP if case.tokens * case.topk < 10_000], ids=str)
def test_the_reference_agrees_with_scalar_loops(case: DecodeTopkCase) -> None:
    inputs = ask.build(case)
    assert lists(right.reference(inputs)) == scalar(inputs)


@settings(max_examples=40, deadline=None)
@given(strategies.data())
def test_any_positions_are_listed_alike(data: strategies.DataObject) -> None:
    topk = data.draw(strategies.integers(1, 5))
    row = strategies.lists(strategies.integers(-3, 11), min_size=topk, max_size=topk)
    rows = data.draw(strategies.lists(row, min_size=1, max_size=4))
    count = len(rows)
    requests = data.draw(strategies.lists(strategies.integers(0, 1), min_size=count, max_size=count))
    valid = data.draw(strategies.lists(strategies.booleans(), min_size=count, max_size=count))
    inputs = call(rows, requests, valid, data.draw(strategies.sampled_from(["kept", "removed"])))
    assert lists(right.reference(inputs)) == scalar(inputs)
    for impl in (OURS, TORCH):
        assert passes(inputs, impl.run(inputs)), impl.name


@pytest.mark.parametrize("case", [case for case in SWEEP if case.entries in ("prefix", "full", "empty")], ids=str)
def test_positions_that_come_first_are_packed_as_their_slots_would_be(case: DecodeTopkCase) -> None:
    inputs = ask.build(case)
    listed = right.reference(inputs)
    dense = torch.full(inputs.local.shape, 7, dtype=torch.int32)
    for token, slots in enumerate(ragged.split(listed.flat, listed.indptr)):
        dense[token, : slots.numel()] = slots
    packed = ragged_from_dense.reference(packing.Inputs(dense, listed.lengths, -1, listed.flat, listed.indptr))
    assert torch.equal(packed.indptr, listed.indptr)
    assert torch.equal(packed.flat, listed.flat)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("T1", "token-for-request"),
        ("T2", "padding-has-length"),
        ("T3", "lengths-are-top-k"),
        ("T4", "block-size-of-another-cache"),
        ("T5", "first-request-for-all"),
        ("T6", "hole-becomes-slot-0"),
    ],
)
def test_every_law_can_be_broken(law: str, fault: str) -> None:
    inputs = ask.build(DecodeTopkCase(tokens=9, topk=5, entries="prefix", block_size=2, padded="between"))
    mutant = next(mutant for mutant in right.MUTANTS if mutant.name == fault)

    def run(asked: Inputs) -> Outputs:
        if law == "T6" and asked.holes == "removed":
            # No fault that looks at holes shows where there are none: here another one, in one of the two rules only.
            return next(each for each in right.MUTANTS if each.name == "place-lost").answer(asked)  # type: ignore[return-value]
        return mutant.answer(asked) or right.reference(asked)

    (named,) = [each for each in right.LAWS if each.name.startswith(law)]
    broken = break_of(named, inputs, run(inputs), run, right.judge, Precision())
    assert broken is not None and not all(check.passed for check in broken)


def test_what_stands_behind_the_last_slot_is_free() -> None:
    inputs = call(ROWS, [0, 1, 77, 0], [True, True, False, True])
    want = right.reference(inputs)
    other = dataclasses.replace(want, flat=ragged.with_tail(want.flat, want.indptr, 5))
    assert passes(inputs, other)
    other.flat[3] = 47
    failed = [str(check) for check in right.judge(inputs, other, Precision()) if not check.passed]
    assert len(failed) == 1 and failed[0].startswith("flat[3]=47, but should be -1: ")


def test_positions_lie_in_the_table() -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        assert case.table != "narrowed" or inputs.table.stride(0) > inputs.table.shape[1]
        positions = inputs.local[inputs.valid]
        assert not positions.numel() or int(positions.max()) < inputs.table.shape[1] * case.block_size


def test_impossible_cases_are_named() -> None:
    assert ask.forbid(DecodeTopkCase(tokens=2, layout="far")) == ["layout=far: needs three tokens and a column"]
    with pytest.raises(CaseError, match="should be 1 to"):
        parse(DecodeTopkCase(block_size=0).id)


def test_one_launch_takes_few_tokens() -> None:
    assert "tokens=17: one launch takes at most 16" in ONE_LAUNCH.unsupported(DecodeTopkCase(tokens=17), "interpreter")


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_V4, ONE_LAUNCH], ids=lambda impl: impl.name)
def test_vllm_keeps_holes_and_so_loses_positions(impl: Impl) -> None:
    for case in (DecodeTopkCase(tokens=16, padded="between", table="narrowed"), DecodeTopkCase(entries="holes")):
        inputs = ask.build(case)
        assert passes(inputs, impl.run(memory.on_device(inputs, "cpu"))), case.id
    rows = [True, True, False, True]
    assert lists(impl.run(call(ROWS, [0, 1, 0, 0], rows, holes="removed")))[0] == [40, 43, 44, -1]


@pytest.mark.vllm
def test_only_the_one_launch_of_vllm_launches_once() -> None:
    from impl.sparse_mla import indices_vllm
    from impl.sparse_mla.decode_topk_ragged import VLLM_ONE_LAUNCH

    inputs = ask.build(DecodeTopkCase())
    loader = indices_vllm.loader_for(inputs.flat, "gfx942")
    launch = loader.symbol(VLLM_ONE_LAUNCH, "launch")
    launched = []

    def counted(*arguments: object) -> object:
        launched.append(len(arguments))
        return launch(*arguments)

    with loader.replaced(VLLM_ONE_LAUNCH, "launch", counted):
        VLLM.run(inputs)
        assert launched == []
        ONE_LAUNCH.run(inputs)
        assert launched == [5]


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_V4, ONE_LAUNCH], ids=lambda impl: impl.name)
def test_vllm_has_no_answer_for_no_tokens(impl: Impl) -> None:
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        impl.run(ask.build(DecodeTopkCase(tokens=0)))
