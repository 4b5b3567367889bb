"""Who gathers a chunk of context from all ranks, and what can each of them not be asked?

The ranks of a group run one after the other here, so whoever answers reads every rank's cache where a group would have
exchanged rows.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dcp.gather_context import GatherCase, Inputs, Outputs, padded_rows
from impl.dcp import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("rows are moved")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the host knows of a chunk: per request the rows that each rank sends, where they start on it, and where they
    begin in a slab; rows of a slab, and rows of the workspace before the gathered ones."""

    padded: list[int]
    local_starts: list[int]
    offsets: list[int]
    slab: int
    share: int


def planned(inputs: Inputs) -> Plan:
    """The plan of a call."""
    spans = list(zip(inputs.starts, inputs.lengths, strict=True))
    firsts = [padded_rows(start, inputs.ranks, inputs.interleave) for start, _ in spans]
    padded = [
        padded_rows(start + length, inputs.ranks, inputs.interleave) - first
        for (start, length), first in zip(spans, firsts, strict=True)
    ]
    offsets = list(itertools.accumulate(padded, initial=0))
    return Plan(padded, firsts, offsets[:-1], offsets[-1], inputs.workspace.shape[0] // (inputs.ranks + 1))


def answered(inputs: Inputs, plan: Plan, rows: torch.Tensor, context: torch.Tensor) -> Outputs:
    """The answer of a plan, with these rows and this context."""
    return Outputs(
        padded=torch.tensor(plan.padded, dtype=torch.int64),
        local_starts=torch.tensor(plan.local_starts, dtype=torch.int64),
        rows=rows,
        workspace=inputs.workspace,
        context=context,
    )


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.gather_context_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.gather_context_vllm").run(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: slots of every row that is sent, and the chunk's tokens sorted by their owner."""
    plan = planned(inputs)
    device, turn, ranks = inputs.workspace.device, inputs.interleave, inputs.ranks
    indices = [first + torch.arange(rows) for first, rows in zip(plan.local_starts, plan.padded, strict=True)]
    slots = [
        inputs.table[request].long()[(index // inputs.block_size).to(device)] * inputs.block_size
        + (index % inputs.block_size).to(device)
        for request, index in enumerate(indices)
    ]
    slot = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64, device=device)
    block, place = slot // inputs.block_size, slot % inputs.block_size
    gathered = inputs.workspace[plan.share :]
    for rank, cache in enumerate(inputs.caches):
        # As integers of their size: indexing moves no float8 on every device.
        words = torch.uint8 if cache.dtype.itemsize == 1 else torch.int16
        sent = cache.view(words)[block, place].view(cache.dtype)
        gathered[rank * plan.slab : (rank + 1) * plan.slab] = sent
        if rank == inputs.rank:
            inputs.workspace[: plan.slab] = sent
    order = []
    for start, length, offset, first in zip(
        inputs.starts, inputs.lengths, plan.offsets, plan.local_starts, strict=True
    ):
        position = start + torch.arange(length)
        owner = position // turn % ranks
        row = owner * plan.slab + offset + position // (turn * ranks) * turn + position % turn - first
        order.append(row[torch.argsort(owner, stable=True)])
    rows = (torch.cat(order) if order else torch.empty(0, dtype=torch.int64)).to(device)
    return answered(inputs, plan, rows.to(torch.int32), _taken(gathered, rows))


def _taken(gathered: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return gathered.view(torch.uint8)[rows].view(gathered.dtype)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    found = [
        *vllm_modules.missing(vllm_modules.CONTEXT, *vllm_modules.CONTEXT_NAMES),
        *vllm_modules.missing(vllm_modules.ROCM_CONTEXT, *vllm_modules.ROCM_CONTEXT_NAMES),
    ]
    return list(dict.fromkeys(found))


def _key(case: Case) -> str:
    assert isinstance(case, GatherCase)
    return f"{case.dtype} {case.lanes}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "gather_context_triton.py", _HERE / "gather_context.py"),
    ),
    Impl(
        name="vllm-torch",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=vllm_modules.fingerprint(vllm_modules.CONTEXT, vllm_modules.ROCM_CONTEXT),
    ),
    Impl(
        name="torch-sorted",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "gather_context.py"),
    ),
)
