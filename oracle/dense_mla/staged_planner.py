"""What must the kernels of a step see, whatever the host has planned meanwhile?

The plan of their own step, all of it: the host plans step n + 1 while kernels of step n are queued or run, and there is one
set of device buffers. Therefore a plan is made in host memory, of which the copies to the device are queued behind the
kernels of the step before. Host memory can be written again once its own copies have run, so

    kernels of a step     see that step's plan in every buffer
    parts of a plan       are known to the host at once, from its own memory
    waiting for a plan    ends when the copies of the last plan but one have run, so that with two staging areas in turn it
                          never lasts until a kernel of that or a later step has

The model of the device is that of `cases.dense_mla.staged_planner`.
Source: vLLM's dense ROCm MLA backend, whose planner writes by copies that no stream orders.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from cases.dense_mla.staged_planner import BUFFERS, COUNTED, Inputs, Mark, Outputs, Stream, play
from cases.memory import map_tensors, moved
from cases.precision import Precision
from oracle.check import Check, exact, wrong_form
from oracle.dense_mla.plan_check import Finding, plan_check
from oracle.laws import Honest, Law, Mutant

# Plans a step, and says how many parts the plan has.
Plan = Callable[[int], int]


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Every launch's own plan, every plan's own parts, and no waiting; `dtype` has no say in integers.

    Raises ValueError for a launch of a step that was not the last one planned.
    """
    del dtype
    launched, planned = [], []
    for action, number in inputs.events:
        if action == "plan":
            planned.append(number)
        elif action == "launch":
            if planned[-1:] != [number]:
                last = f"step {planned[-1]} is the last one planned" if planned else "none is planned"
                raise ValueError(f"launch of step {number}: should follow its plan, and {last}")
            launched.append(number)
    return Outputs(
        inputs.plans[launched].clone(), inputs.plans[planned, COUNTED, -1].long(), torch.full((len(planned),), -1)
    )


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """What launches saw and hosts noted, exactly, and no waiting beyond the last plan but one."""
    del precision
    want = reference(inputs)
    wrong = wrong_form("waited", outputs.waited, want.waited)
    planned = [number for action, number in inputs.events if action == "plan"]
    return (
        exact("seen", outputs.seen, want.seen, why="kernels see the plan of their own step"),
        exact("parts", outputs.parts, want.parts, why="the host knows the parts of the plan that it has just made"),
        wrong
        or plan_check("waiting", len(planned), _too_long(planned, outputs.waited.tolist()),
                      "planning is not held up by kernels that read another plan"),
    )  # fmt: skip


def _too_long(planned: list[int], waited: list[int]) -> Iterator[Finding]:
    for place, (step, last) in enumerate(zip(planned, waited, strict=True)):
        # Kernels in front of the copies of the last plan but one are those of the plan before that.
        allowed = planned[place - 3] if place >= 3 else -1
        if last > allowed:
            yield Finding(f"kernels that ran while step {step} waited to be planned, plan", place, f"up to step {last}",
                          f"up to step {allowed}" if allowed >= 0 else "none")  # fmt: skip


def _written(inputs: Inputs, step: int, buffers: tuple[torch.Tensor, ...]) -> None:
    """What the planner does: it writes a plan to memory, host or device, at once."""
    for buffer, plan in zip(buffers, inputs.plans[step], strict=True):
        buffer.copy_(plan)


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where staging can be got wrong; the defaults are right."""

    slots: int = 2
    waits: str = "own_slot"
    recorded: str = "behind_copies"
    turns: str = "plans"
    straight: tuple[int, ...] = ()
    counted: str = "staging"
    copied: str = "queued"


RIGHT = Faults()


def _staging(inputs: Inputs, faults: Faults) -> Callable[[Stream], Plan]:
    def begin(stream: Stream) -> Plan:
        length = inputs.plans.shape[2]
        slots = [tuple(torch.zeros(length, dtype=torch.int32) for _ in range(BUFFERS)) for _ in range(faults.slots)]
        free: list[Mark] = [Mark(0) for _ in slots]
        turn = 0

        def plan(step: int) -> int:
            nonlocal turn
            place = (step if faults.turns == "steps" else turn) % faults.slots
            other = (place + 1) % faults.slots
            own, turn = slots[place], turn + 1
            if faults.waits == "everything":
                stream.wait(stream.mark())
            elif faults.waits in ("own_slot", "other_slot"):
                stream.wait(free[place if faults.waits == "own_slot" else other])
            if faults.recorded == "in_front":
                free[place] = stream.mark()
            _written(inputs, step, own)
            if faults.waits == "too_late":
                stream.wait(free[place])
            for number in range(BUFFERS):
                if number in faults.straight:
                    stream.memory[number].copy_(own[number])
                else:
                    stream.copy(number, own[number])
            if faults.recorded == "behind_copies" or (faults.recorded == "once" and turn <= faults.slots):
                free[place] = stream.mark()
            if faults.counted == "device":
                return int(stream.memory[COUNTED][-1])
            if faults.counted == "device_when_there":
                stream.wait(stream.mark())
                return int(stream.memory[COUNTED][-1])
            return int(slots[other if faults.counted == "other_slot" else place][COUNTED][-1])

        return plan

    return begin


def _played(inputs: Inputs, faults: Faults = RIGHT) -> Outputs:
    return play(inputs, _staging(inputs, faults))


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(map_tensors(inputs, lambda tensor: moved(tensor, "cpu")), **changes)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Content:
    """An answer without the waiting, which depends on the device's pace."""

    seen: torch.Tensor
    parts: torch.Tensor


def meaning(outputs: Outputs) -> Content:
    """What an answer says of plans."""
    return Content(outputs.seen, outputs.parts)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _standing_still(inputs: Inputs) -> Inputs:
    return _edited(inputs, events=tuple(event for event in inputs.events if event[0] != "device"))


def _keeping_up(inputs: Inputs) -> Inputs:
    return _edited(inputs, events=tuple(more for event in inputs.events for more in (event, ("device", 1 << 20))))


def _first_left_out(inputs: Inputs) -> Inputs | None:
    first = inputs.events[0][1]
    later = [place for place, event in enumerate(inputs.events) if event[0] == "plan" and event[1] != first]
    return _edited(inputs, events=inputs.events[later[0] :]) if later else None


def _later(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    launches, plans = (
        sum(event[0] == action for event in edited.events) for action in ("launch", "plan")
    )  # fmt: skip
    return Outputs(
        first.seen[len(first.seen) - launches :], first.parts[len(first.parts) - plans :],
        first.waited[len(first.waited) - plans :],
    )  # fmt: skip


LAWS: tuple[Law, ...] = (
    Law("S1 device standing still", "what kernels see does not depend on the device's pace", _standing_still, _same,
        "bitwise", view=meaning),
    Law("S2 device keeping up", "what kernels see does not depend on the device's pace", _keeping_up, _same, "bitwise",
        view=meaning),
    Law("S3 first step left out", "a step's kernels do not depend on the steps before it", _first_left_out, _later,
        "bitwise", view=meaning),
)  # fmt: skip


def _mutant(name: str, pitfall: str, faults: Faults) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _played(inputs, faults))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("written-to-the-device", "the planner wrote into the buffers that kernels read",
            Faults(straight=tuple(range(BUFFERS)))),
    _mutant("maps-written-to-the-device", "only works were staged", Faults(straight=(2, 3, 4))),
    _mutant("works-written-to-the-device", "only the maps were staged", Faults(straight=(0, 1))),
    _mutant("no-wait", "a staging area were written again without a look at its copies", Faults(waits="never")),
    _mutant("wait-too-late", "the wait came behind the writing", Faults(waits="too_late")),
    _mutant("one-slot", "there were one staging area and no wait", Faults(slots=1, waits="never")),
    _mutant("one-slot-with-wait", "there were one staging area, so that every plan waits for the one before",
            Faults(slots=1)),
    _mutant("other-slot-waited-for", "the wait were for the other staging area", Faults(waits="other_slot")),
    _mutant("recorded-in-front", "the event were recorded in front of the copies", Faults(recorded="in_front")),
    _mutant("recorded-once", "the event were recorded the first time only", Faults(recorded="once")),
    _mutant("slots-by-step", "staging areas took turns by step, although some steps plan nothing", Faults(turns="steps")),
    _mutant("everything-waited-for", "the host waited for the device before it planned", Faults(waits="everything")),
    _mutant("parts-from-the-device", "parts were read from the device before the plan was there", Faults(counted="device")),
    _mutant("parts-waited-for", "the host waited for the plan to arrive to read its parts",
            Faults(counted="device_when_there")),
    _mutant("parts-of-the-other-slot", "parts were read from the plan before", Faults(counted="other_slot")),
)  # fmt: skip


def _fresh_memory(inputs: Inputs) -> Outputs:
    """A staging area of its own for every plan: nobody waits for anything."""

    def begin(stream: Stream) -> Plan:
        def plan(step: int) -> int:
            own = inputs.plans[step].clone()
            for number in range(BUFFERS):
                stream.copy(number, own[number])
            return int(own[COUNTED, -1])

        return plan

    return play(inputs, begin)


_EXACT = Precision(probability="exact", note="integers")
HONEST: tuple[Honest, ...] = (
    Honest("two-slots", _EXACT, _played),
    Honest("three-slots", _EXACT, lambda inputs: _played(inputs, Faults(slots=3))),
    Honest("fresh-memory", _EXACT, _fresh_memory),
)
