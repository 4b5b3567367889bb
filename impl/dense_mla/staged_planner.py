"""Who stages plans for a device that still reads the last one, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.staged_planner import BUFFERS, COUNTED, Inputs, Mark, Outputs, Stream, play
from impl.dense_mla import backend_vllm
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")


class StagedPlanner:
    """Plans in two areas of host memory by turns, whose copies a stream orders.

    write: what makes the plan of a step in the memory that it is given.
    """

    def __init__(
        self, stream: Stream, write: Callable[[int, tuple[torch.Tensor, ...]], None], like: torch.Tensor, slots: int = 2
    ) -> None:
        self._stream, self._write = stream, write
        self._areas = [tuple(torch.zeros_like(like) for _ in range(BUFFERS)) for _ in range(slots)]
        self._copied: list[Mark | None] = [None] * slots
        self._turn = 0

    def plan(self, step: int) -> int:
        """Queues the plan of a step, and says how many parts it has."""
        place = self._turn
        self._turn = (place + 1) % len(self._areas)
        area, copied = self._areas[place], self._copied[place]
        if copied is not None:
            self._stream.wait(copied)
        self._write(step, area)
        for number, memory in enumerate(area):
            self._stream.copy(number, memory)
        self._copied[place] = self._stream.mark()
        return int(area[COUNTED][-1])


def planner_of(inputs: Inputs) -> Callable[[int, tuple[torch.Tensor, ...]], None]:
    """What writes the script's plans."""

    def write(step: int, buffers: tuple[torch.Tensor, ...]) -> None:
        for buffer, plan in zip(buffers, inputs.plans[step].cpu(), strict=True):
            buffer.copy_(plan)

    return write


def run_ours(inputs: Inputs) -> Outputs:
    """The script, by our own staging."""
    like = torch.zeros(inputs.plans.shape[2], dtype=torch.int32)
    return play(inputs, lambda stream: StagedPlanner(stream, planner_of(inputs), like).plan)


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.staged_planner_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return backend_vllm.missing(backend_vllm.BUILDER)


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "staged_planner.py"),
    ),
    Impl(
        name="vllm-host",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=backend_vllm.fingerprint,
    ),
)
