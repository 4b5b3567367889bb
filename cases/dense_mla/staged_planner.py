"""What do we ask of the staging that brings a plan made on the host into device buffers that kernels still read?

A case is a script: the host plans steps and launches their kernels, and the device follows at a pace of its own. Here is
the device as a model: one stream that does things in order, and memory that anybody can write to at any time. See
`oracle.dense_mla.staged_planner` for what kernels must see.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Int64

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded_copy

# Buffers of a plan, as `cases.dense_mla.prefill_plan.Outputs` has them. Attention reads the first two, the reduction the
# others; the last number of the third is how many parts the plan has.
BUFFERS = 5
_ATTENTION = range(2)
_REDUCTION = range(2, BUFFERS)
COUNTED = 2

Action = Literal["plan", "launch", "device"]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The script. plans: the buffers of every step that plans. events: `plan` and `launch` name a step, `device` how many
    operations the device gets done meanwhile; at the end it finishes."""

    plans: Int32[torch.Tensor, "steps 5 length"]
    events: tuple[tuple[Action, int], ...]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What the kernels of every launch saw, in order.

    parts: of every plan, as the host took note of it when it planned. waited: for every plan, the last step of whose
    kernels any ran while the host waited; -1 when none did.
    """

    seen: Int32[torch.Tensor, "launches 5 length"]
    parts: Int64[torch.Tensor, " plans"]
    waited: Int64[torch.Tensor, " plans"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedCase(Case):
    """The axes of the script.

    layers: launches of a step. pace: `never` the device does nothing unless the host waits, `at_once` all that is there,
    `behind` what had been there at the plan before, `operations` one, `random` a few at any time. skipped: steps without
    prefill, which neither plan nor launch; `idle` steps plan and do not launch. plans: `alike` ones differ in few numbers.
    """

    op: ClassVar[str] = "dense_mla.staged_planner"

    steps: int = 6
    layers: int = 2
    pace: Literal["never", "at_once", "behind", "operations", "random"] = "random"
    skipped: Literal["none", "some", "idle"] = "none"
    length: int = 5
    plans: Literal["distinct", "alike"] = "distinct"


CASE = StagedCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "steps": (1, 2, 3, 4, 7, 12),
    "layers": (1, 2, 5),
    "pace": ("never", "at_once", "behind", "operations", "random"),
    "skipped": ("none", "some", "idle"),
    "length": (1, 5, 33),
    "plans": ("distinct", "alike"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"steps": (1, 2, 3, 4, 7, 12, 40)}
RANDOM_CASES = 20

_BASE = StagedCase()
REGRESSIONS: tuple[str, ...] = (
    # Three plans in a row while the device stands still: the third must wait for the first one's copies, and no longer.
    _BASE.varied(steps=3, pace="never").id,
    _BASE.varied(steps=12, pace="never", layers=1).id,
    _BASE.varied(steps=12, pace="operations").id,
    _BASE.varied(steps=12, pace="behind", skipped="some").id,
    _BASE.varied(steps=7, pace="never", skipped="idle").id,
    _BASE.varied(steps=12, pace="random", length=33).id,
)

_BOUNDS: Mapping[str, tuple[int, int]] = {"steps": (1, 256), "layers": (1, 128), "length": (1, 4096)}


def forbid(case: Case) -> list[str]:
    """Every reason why there is no such script."""
    return outside(case, _BOUNDS)


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, StagedCase)
    return case.steps * case.layers > 4096


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, StagedCase)
    draw = Draw(case.seed, case.op)
    shape = (case.steps, BUFFERS, case.length)
    plans = draw.integers("plans", shape, 0, 1 << 20)
    if case.plans == "alike":
        plans = plans[:1].repeat(case.steps, 1, 1)
        plans[:, :, -1] += torch.arange(case.steps)[:, None]
    left_out = draw.chance("left out", (case.steps,), 1, 3) & (case.skipped != "none")
    left_out[-1] = False
    some = draw.integers("some", (case.steps, case.layers + 1), 0, 2 * BUFFERS).tolist()
    events: list[tuple[Action, int]] = []
    for step in range(case.steps):
        if left_out[step] and case.skipped == "some":
            continue
        events.append(("plan", step))
        launches = 0 if left_out[step] else case.layers
        if case.pace == "random":
            events.append(("device", some[step][-1]))
        for layer in range(launches):
            events.append(("launch", step))
            if case.pace == "random":
                events.append(("device", some[step][layer] // 3))
        # A launch is two operations, and the copies of a plan are one for each buffer.
        count = {"at_once": 1 << 20, "behind": BUFFERS + 2 * launches - (BUFFERS + 2) * (step == 0), "operations": 1}
        if case.pace in count:
            events.append(("device", max(0, count[case.pace])))
    return Inputs(plans=guarded_copy(plans.to(torch.int32)), events=tuple(events))


@dataclasses.dataclass
class Mark:
    """A point of a stream: done once the device has got to it."""

    operations: int


class Stream:
    """A device that does what is queued in order, when it gets to it.

    memory: the plan's buffers on the device; whoever writes to them does so at once, whatever is queued.
    """

    def __init__(self, length: int) -> None:
        self.memory = tuple(torch.full((length,), -(1 << 30), dtype=torch.int32) for _ in range(BUFFERS))
        self.seen: list[tuple[int, list[torch.Tensor]]] = []
        self._queue: collections.deque[Callable[[], int]] = collections.deque()
        self._queued = self._done = 0
        self._waited = -1

    def _add(self, operation: Callable[[], int]) -> None:
        self._queue.append(operation)
        self._queued += 1

    def copy(self, buffer: int, host: torch.Tensor) -> None:
        """Queues the copy of host memory to a buffer; what it reads is there when the device gets to it."""

        def operation() -> int:
            self.memory[buffer].copy_(host)
            return -1

        self._add(operation)

    def launch(self, step: int) -> None:
        """Queues the two kernels of a layer, each of which reads its buffers when it runs."""
        found: list[torch.Tensor] = []
        self.seen.append((step, found))
        for buffers in (_ATTENTION, _REDUCTION):

            def operation(own: range = buffers) -> int:
                found.extend(self.memory[number].clone() for number in own)
                return step

            self._add(operation)

    def mark(self) -> Mark:
        """The point behind everything that is queued now."""
        return Mark(self._queued)

    def run(self, operations: int) -> None:
        """The device does so many of what is queued, or all."""
        for _ in range(min(operations, len(self._queue))):
            self._one()

    def _one(self) -> int:
        step = self._queue.popleft()()
        self._done += 1
        return step

    def wait(self, mark: Mark) -> None:
        """The host does nothing until the device has got to the mark."""
        while self._done < mark.operations:
            self._waited = max(self._waited, self._one())

    def waited(self) -> int:
        """The last step of whose kernels any ran while the host waited, since this was asked before; -1 without."""
        found, self._waited = self._waited, -1
        return found


def play(inputs: Inputs, staging: Callable[[Stream], Callable[[int], int]]) -> Outputs:
    """The script. `staging` is given the stream, and gives what plans a step and says how many parts the plan has."""
    stream = Stream(inputs.plans.shape[2])
    plan = staging(stream)
    parts, waited = [], []
    for action, number in inputs.events:
        if action == "plan":
            parts.append(plan(number))
            waited.append(stream.waited())
        elif action == "launch":
            stream.launch(number)
        else:
            stream.run(number)
    stream.wait(stream.mark())
    seen = torch.zeros((len(stream.seen), *inputs.plans.shape[1:]), dtype=torch.int32)
    for place, (_, buffers) in enumerate(stream.seen):
        seen[place] = torch.stack(buffers)
    return Outputs(seen, *(torch.tensor(numbers, dtype=torch.int64) for numbers in (parts, waited)))
