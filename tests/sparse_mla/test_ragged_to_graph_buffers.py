"""Are copies into a captured graph's buffers judged rightly, and do our own routes copy them?"""

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import ragged_to_graph_buffers as ask
from cases.sparse_mla.ragged_to_graph_buffers import Arch, GraphBuffersCase, Inputs, Outputs, Step
from impl.implementation import Impl
from impl.sparse_mla import ragged_to_graph_buffers as routes
from impl.sparse_mla.ragged_to_graph_buffers import IMPLS
from oracle.sparse_mla import ragged_to_graph_buffers as right
from reports.laws import break_of


def drawn(choose: random.Random) -> GraphBuffersCase:
    while True:
        axes = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = GraphBuffersCase(**axes, seed=choose.randrange(99))  # type: ignore[arg-type]
        if not ask.forbid(case):
            return case


OURS, TORCH, VLLM, VLLM_V4 = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run, TORCH.run], ids=["reference", OURS.name, TORCH.name])


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def three_steps(arch: Arch = "gfx942", **changes: object) -> Inputs:
    """Two rows, one row, no row; at most two entries each."""
    inputs = Inputs(
        steps=(
            Step(int32([5, 6, 7]), int32([0, 2, 3]), 2),
            Step(int32([8]), int32([0, 1]), 1),
            Step(int32([]), int32([0]), 0),
        ),
        index_buffer=torch.full((9,), -7, dtype=torch.int32),
        indptr_buffer=torch.full((4,), -7, dtype=torch.int32),
        per_row=2,
        arch=arch,
    )
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


@RUNS
@pytest.mark.parametrize(("arch", "lengths"), [("gfx942", [4, 2, 1]), ("gfx950", [3, 1, 1]), ("other", [4, 2, 1])])
def test_hand_worked_steps(run: object, arch: Arch, lengths: list[int]) -> None:
    outputs = run(three_steps(arch))  # type: ignore[operator]
    assert [one.numel() for one in outputs.indices] == lengths
    assert outputs.indices[0].tolist()[:3] == [5, 6, 7]
    assert outputs.indices[1].tolist()[:1] == [8]
    assert [one.tolist() for one in outputs.indptr] == [[0, 2, 3], [0, 1], [0]]
    assert outputs.addresses.tolist() == [[0, 0]] * 3 and outputs.raised.tolist() == [0, 0, 0]


@RUNS
def test_what_does_not_fit_raises_and_the_next_step_goes_on(run: object) -> None:
    too_many = Step(int32([1, 2, 3, 4, 5]), int32([0, 2, 4]), 2)
    steps = (too_many, *three_steps().steps)
    outputs = run(three_steps(steps=steps))  # type: ignore[operator]
    assert outputs.raised.tolist() == [1, 0, 0, 0]
    assert outputs.indices[0].numel() == 0 and outputs.indices[1].tolist()[:3] == [5, 6, 7]
    outputs = run(three_steps(indptr_buffer=int32([0, 0])))  # type: ignore[operator]
    assert outputs.raised.tolist() == [1, 0, 0]


@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_refusals_name_what_does_not_fit(impl: Impl, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    whole = routes.bounds

    def noted(*call: object) -> int:
        try:
            return whole(*call)  # type: ignore[arg-type]
        except ValueError as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(routes, "bounds", noted)
    monkeypatch.setattr("impl.sparse_mla.ragged_to_graph_buffers_triton.bounds", noted)
    impl.run(three_steps(per_row=1))
    impl.run(three_steps(indptr_buffer=int32([0, 0])))
    assert refused == ["3 entries: should be at most 2", "3 starts: should be at most 2"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_reference_agrees_with_lists(seed: int) -> None:
    inputs = ask.build(drawn(random.Random(seed)))
    outputs = right.reference(inputs)
    for number, step in enumerate(inputs.steps):
        room = step.rows * inputs.per_row or 1
        fits = len(step.indices) <= room and step.rows < len(inputs.indptr_buffer)
        assert bool(outputs.raised[number]) is not fits
        if fits:
            assert outputs.indptr[number].tolist() == step.indptr.tolist()
            assert outputs.indices[number].tolist()[: len(step.indices)] == step.indices.tolist()
            trimmed = inputs.arch == "gfx950"
            assert outputs.indices[number].numel() == (len(step.indices) or 1 if trimmed else room)


def test_every_law_can_be_broken() -> None:
    mutants = {mutant.name: mutant for mutant in right.MUTANTS}
    wrong = {
        "G1": "plan-update-late",
        "G2": "one-step-behind",
        "G3": "plan-update-late",
        "G4": "whole-buffer-returned",
    }
    inputs = ask.build(GraphBuffersCase(fill="full"))
    for law in right.LAWS:
        answer = mutants[wrong[law.name.split()[0]]].answer
        broken = break_of(law, inputs, answer(inputs), answer, right.judge, Precision())
        assert broken is not None and not all(check.passed for check in broken), law.name


def test_entries_behind_the_last_row_are_free_and_missing_steps_are_not() -> None:
    inputs = three_steps()
    outputs = right.reference(inputs)
    outputs.indices[0][3] = 1234
    assert passes(inputs, outputs)
    outputs.indices[0][2] = 1234
    failed = [str(check) for check in right.judge(inputs, outputs, Precision()) if not check.passed]
    assert failed == ["step 0 indices[2]=1234, but should be 7: the step's own entries; 1 of 3 elements differ"]
    outputs = right.reference(inputs)
    assert not passes(inputs, dataclasses.replace(outputs, indices=outputs.indices[:2]))


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (Step(int32([1]), int32([0]), 1), "step 0 has 1 starts: should be 2"),
        (Step(int32([1]), int32([0, 2]), 1), "step 0: indptr ends at 2, but should end in 1 entries"),
    ],
)
def test_malformed_steps_are_named(step: Step, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        right.reference(three_steps(steps=(step,)))


def test_new_memory_and_other_places_are_seen() -> None:
    def moved_copy(*call: object) -> tuple[torch.Tensor, torch.Tensor]:
        indices, indptr, index_buffer, indptr_buffer, rows, _ = call
        assert isinstance(indices, torch.Tensor) and isinstance(indptr, torch.Tensor)
        assert isinstance(index_buffer, torch.Tensor) and isinstance(indptr_buffer, torch.Tensor)
        assert isinstance(rows, int)
        index_buffer[2 : 2 + indices.numel()] = indices
        return index_buffer[2 : 2 + max(2 * rows, 1)], indptr.clone()

    outputs = routes.play(three_steps(), moved_copy)
    assert outputs.addresses.tolist() == [[8, -1]] * 3
    assert not passes(three_steps(), outputs)


def test_a_fault_of_another_kind_is_no_refusal() -> None:
    class DeviceError(RuntimeError):
        pass

    def broken(*call: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise DeviceError("illegal access")

    with pytest.raises(DeviceError):
        routes.play(three_steps(), broken)


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_V4], ids=lambda impl: impl.name)
def test_vllm_copies_every_step(impl: Impl, verdict: Callable[..., tuple[str, list[str]]]) -> None:
    for case in sweep_cases(ask.CASE.op, "default")[::2]:
        assert verdict(case, impl) == ("pass", []), case.id


@pytest.mark.vllm
def test_vllm_repeats_a_single_start_for_all_rows() -> None:
    outputs = VLLM.run(three_steps(steps=(Step(int32([1]), int32([0]), 2),)))
    assert outputs.raised.tolist() == [0] and outputs.indptr[0].tolist() == [0, 0, 0]
