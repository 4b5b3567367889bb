"""Who copies ragged lists into the buffers of a captured graph, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from cases.case import Case
from cases.sparse_mla.ragged_to_graph_buffers import Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons
from impl.sources import settings, vllm
from impl.sources.execution import execution_on

V41 = "vllm.models.deepseek_v41.amd.rocm"
V4 = "vllm.models.deepseek_v4.amd.rocm"
NAME = "_copy_ragged_to_graph_buffers"

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")

# Entries, starts, both buffers, rows and entries per row to the returned entries and starts.
Copy: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]
]


def play(inputs: Inputs, copy: Copy) -> Outputs:
    """Every step in its order; what it returned is looked at before the next one runs."""
    indices, indptr, addresses, raised = [], [], [], []
    for step in inputs.steps:
        try:
            answer = copy(
                step.indices, step.indptr, inputs.index_buffer, inputs.indptr_buffer, step.rows, inputs.per_row
            )
        except (ValueError, RuntimeError) as error:
            # Faults of the memory watch and of a device are RuntimeErrors of their own kinds, and no refusal.
            if type(error) not in (ValueError, RuntimeError):
                raise
            answer = inputs.index_buffer[:0], inputs.indptr_buffer[:0]
            raised.append(1)
        else:
            raised.append(0)
        indices.append(answer[0].clone())
        indptr.append(answer[1].clone())
        addresses.append([
            _place(one, buffer) for one, buffer in zip(answer, (inputs.index_buffer, inputs.indptr_buffer), strict=True)
        ])  # fmt: skip
    return Outputs(tuple(indices), tuple(indptr), torch.tensor(addresses), torch.tensor(raised))


def _place(tensor: torch.Tensor, buffer: torch.Tensor) -> int:
    """Bytes from the beginning of the buffer; -1 for other memory."""
    if tensor.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
        return -1
    return int(tensor.storage_offset() - buffer.storage_offset()) * buffer.element_size()


def bounds(
    indices: torch.Tensor, index_buffer: torch.Tensor, indptr_buffer: torch.Tensor, rows: int, per_row: int
) -> int:
    """The entries that the rows may need; raises ValueError where a step does not fit into its buffers."""
    capacity = max(rows * per_row, 1)
    if indices.numel() > min(capacity, index_buffer.numel()):
        raise ValueError(f"{indices.numel()} entries: should be at most {min(capacity, index_buffer.numel())}")
    if rows + 1 > indptr_buffer.numel():
        raise ValueError(f"{rows + 1} starts: should be at most {indptr_buffer.numel()}")
    return capacity


def _torch_copy(arch: str) -> Copy:
    """Plain torch: two copies into slices of the buffers."""

    def copy(
        indices: torch.Tensor, indptr: torch.Tensor, index_buffer: torch.Tensor, indptr_buffer: torch.Tensor,
        rows: int, per_row: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        length = bounds(indices, index_buffer, indptr_buffer, rows, per_row)
        index_buffer.narrow(0, 0, indices.numel()).copy_(indices)
        starts = indptr_buffer.narrow(0, 0, rows + 1)
        starts.copy_(indptr)
        if arch == "gfx950":
            length = max(indices.numel(), 1)
        return index_buffer.narrow(0, 0, length), starts

    return copy


def _run_torch(inputs: Inputs) -> Outputs:
    return play(inputs, _torch_copy(inputs.arch))


def _run_ours(inputs: Inputs) -> Outputs:
    routes = importlib.import_module("impl.sparse_mla.ragged_to_graph_buffers_triton")
    return play(inputs, functools.partial(routes.copy, arch=inputs.arch))


def _run_vllm(inputs: Inputs, module: str) -> Outputs:
    memory = inputs.index_buffer
    execution = execution_on(memory.device)
    return play(inputs, _loaded(settings.vllm_path(), module, inputs.arch, execution))


@functools.cache
def _loaded(path: Path | None, module: str, arch: Any, execution: str) -> Copy:
    copy: Copy = vllm.load(vllm.locate(path), vllm.Platform(arch), execution).symbol(module, NAME)
    return copy


def _vllm_reasons(case: Case, execution: Execution, module: str) -> list[str]:
    del case, execution
    return vllm.unsupported(settings.vllm_path(), {module: [NAME]})


def _fingerprint(module: str) -> bytes:
    return vllm.locate(settings.vllm_path()).fingerprint([module]).encode()


def _key(case: Case) -> str:
    return case.op


def _from_vllm(name: str, module: str) -> Impl:
    return Impl(
        name=name,
        run=functools.partial(_run_vllm, module=module),
        unsupported=functools.partial(_vllm_reasons, module=module),
        precision=_EXACT,
        compile_key=_key,
        source=functools.partial(_fingerprint, module),
    )


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "ragged_to_graph_buffers_triton.py", _HERE / "ragged_to_graph_buffers.py"),
    ),
    Impl(
        name="torch-copy",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "ragged_to_graph_buffers.py"),
    ),
    _from_vllm("vllm-torch", V41),
    _from_vllm("vllm-torch-v4", V4),
)
