"""Is staging judged by what kernels see of it, and do our own and vLLM's keep plans apart?"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from cases.case import parse
from cases.dense_mla import staged_planner as ask
from cases.dense_mla.staged_planner import BUFFERS, COUNTED, Action, Inputs, Outputs, StagedCase, Stream, play
from cases.precision import Precision
from impl.dense_mla.staged_planner import IMPLS, StagedPlanner
from impl.sources import settings as sources
from oracle.dense_mla import staged_planner as right
from reports.laws import break_of

OURS, VLLM = IMPLS
FASTEST: list[tuple[Action, int]] = [("device", 1 << 20)]


def drawn(count: int) -> list[StagedCase]:
    choose = random.Random(2)
    found = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, StagedCase)]
    while len(found) < count:
        axes = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        found.append(StagedCase(**axes, seed=choose.randrange(99)))  # type: ignore[arg-type]
    return found


SWEEP = drawn(26)


def script(*events: tuple[Action, int], steps: int = 5) -> Inputs:
    """Plans of two numbers: step s has 10 s + b and 100 s + b in buffer b."""
    step, buffer = torch.arange(steps)[:, None], torch.arange(BUFFERS)[None, :]
    plans = torch.stack((10 * step + buffer, 100 * step + buffer), dim=2).to(torch.int32)
    return Inputs(plans, events)


def steps_seen(outputs: Outputs) -> list[list[int]]:
    """Of every launch, the step whose plan each buffer held."""
    return [(launch[:, 0] // 10).tolist() for launch in outputs.seen]


def answer_of(name: str) -> Callable[[Inputs], Outputs]:
    return next(mutant.answer for mutant in right.MUTANTS if mutant.name == name)  # type: ignore[return-value]


def sentences(inputs: Inputs, outputs: Outputs) -> list[str]:
    return [str(check) for check in right.judge(inputs, outputs, Precision()) if not check.passed]


RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run], ids=["reference", OURS.name])


@RUNS
def test_kernels_see_their_own_plan_while_the_device_stands_still(run: Any) -> None:
    outputs = run(
        script(("plan", 0), ("launch", 0), ("plan", 1), ("launch", 1), ("launch", 1), ("plan", 2), ("launch", 2))
    )
    assert steps_seen(outputs) == [[0] * 5, [1] * 5, [1] * 5, [2] * 5]
    assert outputs.parts.tolist() == [2, 102, 202]
    assert outputs.waited.tolist() == [-1, -1, -1]


def test_the_fourth_plan_waits_for_the_first_step_only() -> None:
    # Its staging area is that of the second plan, whose copies stand behind the kernels of the first step.
    events: list[tuple[Action, int]] = [(action, step) for step in range(5) for action in ("plan", "launch")]
    assert OURS.run(script(*events)).waited.tolist() == [-1, -1, -1, 0, 1]
    assert OURS.run(script(*(event for one in events for event in (one, *FASTEST)))).waited.tolist() == [-1] * 5


def test_a_planner_that_writes_to_the_device_changes_what_is_queued() -> None:
    inputs = script(("plan", 0), ("launch", 0), ("plan", 1), ("launch", 1))
    assert steps_seen(answer_of("written-to-the-device")(inputs)) == [[1] * 5, [1] * 5]
    assert sentences(inputs, answer_of("written-to-the-device")(inputs))[0].startswith(
        "seen[0, 0, 0]=10, but should be 0"
    )


def test_between_a_launchs_kernels_a_mixed_plan_is_seen() -> None:
    # The device has done five copies and the first kernel when the host writes again.
    inputs = script(("plan", 0), ("launch", 0), ("device", 1), ("plan", 1), ("launch", 1))
    assert steps_seen(answer_of("written-to-the-device")(inputs))[0] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(("fault", "seen"), [("no-wait", 2), ("one-slot", 2), ("recorded-in-front", 2)])
def test_the_third_plan_must_not_meet_the_first_ones_copies(fault: str, seen: int) -> None:
    inputs = script(("plan", 0), ("launch", 0), ("plan", 1), ("launch", 1), ("plan", 2), ("launch", 2))
    assert steps_seen(answer_of(fault)(inputs))[0] == [seen] * 5


def test_sentences_say_who_waited_for_whom() -> None:
    inputs = script(*((action, step) for step in range(4) for action in ("plan", "launch")))
    assert sentences(inputs, answer_of("everything-waited-for")(inputs))[0].startswith(
        "kernels that ran while step 1 waited to be planned, plan[1]=up to step 0, but should be none: planning is not held "
    )
    assert sentences(inputs, answer_of("one-slot-with-wait")(inputs))[0].startswith(
        "kernels that ran while step 2 waited to be planned, plan[2]=up to step 0, but should be none"
    )


def test_scripts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ValueError, match="launch of step 1: should follow its plan, and step 0 is the last one planned"
    ):
        right.reference(script(("plan", 0), ("launch", 1)))
    with pytest.raises(ValueError, match="launch of step 0: should follow its plan, and none is planned"):
        right.reference(script(("launch", 0)))


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_ours_passes_and_keeps_the_laws(case: StagedCase) -> None:
    inputs = ask.build(case)
    assert sentences(inputs, OURS.run(inputs)) == []
    for law in right.LAWS:
        checks = break_of(law, inputs, OURS.run(inputs), OURS.run, right.judge, Precision())
        assert checks is None or all(check.passed for check in checks), law.name


@pytest.mark.parametrize(
    ("law", "mutant"), [("S1", "no-wait"), ("S2", "written-to-the-device"), ("S3", "parts-of-the-other-slot")]
)
def test_a_law_is_broken_by_its_fault(law: str, mutant: str) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))
    answer = answer_of(mutant)
    inputs = ask.build(StagedCase(pace="never" if law == "S2" else "at_once"))
    checks = break_of(rule, inputs, answer(inputs), answer, right.judge, Precision())
    assert checks is not None and not all(check.passed for check in checks)


def write_step(step: int, buffers: tuple[torch.Tensor, ...]) -> None:
    for number, buffer in enumerate(buffers):
        buffer.fill_(10 * step + number)


class StagingMachine(RuleBasedStateMachine):
    """Steps planned and launched in any order of events, and a device that gets on when it likes."""

    staging: type[StagedPlanner] = StagedPlanner

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream(1)
        self.planner = self.staging(self.stream, write_step, torch.zeros(1, dtype=torch.int32))
        self.step = -1

    @rule()
    def plan(self) -> None:
        self.step += 1
        assert self.planner.plan(self.step) == 10 * self.step + COUNTED

    @precondition(lambda self: self.step >= 0)
    @rule()
    def launch(self) -> None:
        self.stream.launch(self.step)

    @rule(operations=strategies.integers(1, 9))
    def get_on(self, operations: int) -> None:
        self.stream.run(operations)
        self.look()

    def look(self) -> None:
        for step, buffers in self.stream.seen:
            assert [int(buffer[0]) for buffer in buffers] == [10 * step + number for number in range(len(buffers))]

    def teardown(self) -> None:
        self.stream.run(1 << 20)
        self.look()


MACHINE_SETTINGS = settings(max_examples=25, stateful_step_count=20, deadline=None, database=None)
TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = MACHINE_SETTINGS


class NeverWaiting(StagedPlanner):
    """Staging whose areas are written again at any time."""

    def plan(self, step: int) -> int:
        self._copied = [None] * len(self._areas)
        return super().plan(step)


class WrittenStraight(StagedPlanner):
    """A planner that is handed the device's buffers."""

    def plan(self, step: int) -> int:
        self._write(step, self._stream.memory)
        return int(self._stream.memory[COUNTED][-1])


@pytest.mark.parametrize("broken", [NeverWaiting, WrittenStraight], ids=lambda kind: kind.__name__)
def test_the_machine_finds_staging_that_is_wrong(broken: type[StagedPlanner]) -> None:
    machine = type("Broken", (StagingMachine,), {"staging": broken})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine, settings=settings(MACHINE_SETTINGS, max_examples=200, report_multiple_bugs=False)
        )


def test_three_areas_wait_less_than_two() -> None:
    inputs = script(*((action, step) for step in range(5) for action in ("plan", "launch")))
    like = torch.zeros(2, dtype=torch.int32)

    def write(step: int, buffers: tuple[torch.Tensor, ...]) -> None:
        for buffer, plan in zip(buffers, inputs.plans[step], strict=True):
            buffer.copy_(plan)

    outputs = play(inputs, lambda stream: StagedPlanner(stream, write, like, slots=3).plan)
    assert outputs.waited.tolist() == [-1, -1, -1, -1, 0]
    assert sentences(inputs, outputs) == []


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    assert "is not a vLLM tree" in VLLM.unsupported(StagedCase(), "interpreter")[0]


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
def test_vllm_keeps_plans_apart_and_waits_as_late_as_two_areas_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for case in SWEEP:
        assert VLLM.unsupported(case, "interpreter") == []
        inputs = ask.build(case)
        outputs = VLLM.run(inputs)
        assert sentences(inputs, outputs) == [], case.id
        assert torch.equal(outputs.waited, OURS.run(inputs).waited), case.id


@pytest.mark.vllm
@needs_vllm
def test_a_builder_that_copies_without_an_order_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    monkeypatch.setattr(Stream, "copy", lambda self, number, host: self.memory[number].copy_(host))
    inputs = script(("plan", 0), ("launch", 0), ("plan", 1), ("launch", 1))
    assert steps_seen(VLLM.run(inputs)) == [[1] * 5, [1] * 5]
