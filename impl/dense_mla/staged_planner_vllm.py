"""How does vLLM's metadata builder stage the plans of its FP8 prefill?

A builder whose constructor did not run is given two staging areas, events and device buffers that stand for those of a
device: what it does to them is done to the model of one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from cases.dense_mla.staged_planner import BUFFERS, Inputs, Mark, Outputs, Stream, play
from impl.dense_mla import backend_vllm
from impl.dense_mla.staged_planner import planner_of

_NAMES = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


class _Buffer:
    """A buffer of the device."""

    def __init__(self, stream: Stream, number: int) -> None:
        self.memory = stream.memory[number]
        self._stream, self._number = stream, number

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        """A copy in the stream's order, for which the host waits unless it says otherwise."""
        self._stream.copy(self._number, source)
        if not non_blocking:
            self._stream.wait(self._stream.mark())


class _Event:
    """An event, which nobody waits for until it is recorded."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._mark = stream, Mark(0)

    def record(self) -> None:
        self._mark = self._stream.mark()

    def synchronize(self) -> None:
        self._stream.wait(self._mark)


def run(inputs: Inputs) -> Outputs:
    """The script, by vLLM's staging."""
    loader = backend_vllm.loader(torch.device("cpu"))
    write = planner_of(inputs)
    length = inputs.plans.shape[2]

    def staging(stream: Stream) -> Callable[[int], int]:
        outputs = tuple(_Buffer(stream, number) for number in range(BUFFERS))
        builder = backend_vllm.instance(
            loader, backend_vllm.BUILDER, num_heads=16, _fp8_ps_slot=0, fp8_ps_work_metadata=None,
            _fp8_ps_device_outputs=outputs, _fp8_ps_staging_free=[_Event(stream) for _ in range(2)],
            _fp8_ps_staging=[
                tuple(torch.zeros(length, dtype=torch.int32) for _ in range(BUFFERS)) for _ in range(2)
            ],
            **{f"fp8_ps_{name}": buffer for name, buffer in zip(_NAMES, outputs, strict=True)},
        )  # fmt: skip

        def plan(step: int) -> int:
            def planned(*arguments: Any, **named: Any) -> None:
                # Five numbers or lists and the addresses come first. Into device memory the planner writes at once.
                buffers = arguments[6:]
                del named
                write(step, tuple(one.memory if isinstance(one, _Buffer) else one for one in buffers))

            starts = torch.tensor([0, 1, 5], dtype=torch.int32)
            metadata = SimpleNamespace(
                num_decodes=1, prefill=SimpleNamespace(query_start_loc=starts[1:] - 1, max_query_len=4)
            )
            with backend_vllm.aiter_is(get_ps_metadata_v1=planned):
                builder._build_fp8_prefill_ps_metadata(metadata, SimpleNamespace(query_start_loc_cpu=starts))
            return int(metadata.fp8_prefill_num_partial_tiles)

        return plan

    return play(inputs, staging)
