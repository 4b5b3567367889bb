"""How does vLLM list the cache slots of sliding windows?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from cases.sparse_mla.window_slots import Inputs, Outputs
from impl.sources import settings, vllm
from impl.sources.execution import execution_on
from impl.sparse_mla.window_slots import GATHER, KERNELS, LAUNCH, ONE_LAUNCH, WINDOWS


def _symbol(memory: torch.Tensor, module: str, name: str) -> Any:
    execution = execution_on(memory.device)
    return _loaded(settings.vllm_path(), module, name, execution)


@functools.cache
def _loaded(path: Path | None, module: str, name: str, execution: str) -> Any:
    return vllm.load(vllm.locate(path), vllm.Platform("gfx942"), execution).symbol(module, name)


def _gather(inputs: Inputs) -> None:
    """Gather lengths; the kernel's caller leaves it out of batches without prefill."""
    prefills = inputs.gather_lens.numel()
    if prefills:
        _symbol(inputs.slots, WINDOWS, GATHER)(
            inputs.gather_lens, inputs.seq_lens, inputs.query_start, inputs.replay_start, prefills,
            inputs.first_prefill, inputs.window,
        )  # fmt: skip


def run(inputs: Inputs) -> Outputs:
    """The kernels of vLLM's sliding-window metadata: one for the rows, one for gather lengths."""
    rows, columns = inputs.slots.shape
    unused = (inputs.lens, inputs.lens) if inputs.form == "causal" else ()
    replay = (inputs.replay_start,) if inputs.form == "causal" else ()
    _symbol(inputs.slots, WINDOWS, KERNELS[inputs.form])(
        inputs.slots, inputs.lens, inputs.window, columns, *unused, inputs.query_start, inputs.seq_lens,
        inputs.token_to_request, inputs.valid, inputs.table, inputs.block_size, *replay, num_tokens=rows,
        token_offset=inputs.token_offset,
    )  # fmt: skip
    _gather(inputs)
    return Outputs(inputs.slots, inputs.lens, inputs.gather_lens)


def run_one_launch(inputs: Inputs) -> Outputs:
    """The form that builds a decode batch's whole metadata in one launch; its ragged lists are another op's matter."""
    rows, columns = inputs.slots.shape
    device = inputs.slots.device
    # It asks for slots of the tokens, of which the sign counts.
    slot_mapping = torch.where(inputs.valid, 0, -1)
    _symbol(inputs.slots, ONE_LAUNCH, LAUNCH)(
        slot_mapping, torch.empty_like(inputs.valid), inputs.slots, inputs.lens,
        torch.empty(rows * columns, dtype=torch.int32, device=device),
        torch.empty(rows + 1, dtype=torch.int32, device=device), inputs.query_start, inputs.seq_lens,
        inputs.token_to_request, inputs.table, inputs.replay_start, rows, inputs.window, inputs.block_size,
        noncausal=inputs.form == "draft",
    )  # fmt: skip
    _gather(inputs)
    return Outputs(inputs.slots, inputs.lens, inputs.gather_lens)
