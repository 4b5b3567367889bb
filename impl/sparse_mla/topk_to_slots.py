"""Who turns top-k positions into slots, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.sparse_mla.topk_to_slots import Inputs, Outputs, SlotsCase
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons
from impl.sparse_mla import indices_vllm

VLLM_SHARED = "vllm.v1.attention.backends.mla.sparse_utils"
VLLM_ROCM = "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse"
VLLM_CONVERT = "triton_convert_req_index_to_global_index"
VLLM_FILTER = "triton_filter_and_convert_dcp_index"

_HERE = Path(__file__).parent
_EXACT = exact_but("indices")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.topk_to_slots_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.topk_to_slots_vllm").run(inputs))


def _run_vllm_rocm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.topk_to_slots_vllm").run_rocm(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: ranks as two dimensions that a position unravels into, slots by `gather` on table rows."""
    rows, columns = inputs.table.shape
    position = inputs.positions.clamp(min=0)
    turn, place = position // inputs.interleave, position % inputs.interleave
    owner, key = turn % inputs.world_size, turn // inputs.world_size * inputs.interleave + place
    column = key // inputs.block_size
    there = (inputs.positions >= 0) & (column < columns)
    known = (inputs.requests >= 0) & (inputs.requests < rows)
    blocks = inputs.table[inputs.requests.where(known, 0).long()].gather(1, column.clamp(max=columns - 1).long())
    slots = blocks * inputs.block_rows + key % inputs.block_size
    found = there & (owner == inputs.rank) & known[:, None]
    if inputs.workspace is not None:
        prefill = inputs.workspace.requests[:, None]
        start = inputs.workspace.starts[prefill.clamp(min=0).long()]
        slots = torch.where(prefill >= 0, owner * inputs.workspace.rank_rows + start + key, slots)
        found = torch.where(prefill >= 0, there, found)
    slots = slots.where(found, -1)
    if inputs.form == "columns":
        return Outputs(inputs.slots.copy_(slots), None)
    torch.sum(found, dim=1, dtype=torch.int32, out=inputs.counts)
    if inputs.form == "front":
        slots = slots.sort(dim=1, descending=True).values
    return Outputs(inputs.slots.copy_(slots), inputs.counts)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, SlotsCase)
    del execution
    reasons = indices_vllm.missing(VLLM_SHARED, VLLM_CONVERT, VLLM_FILTER)
    if case.workspace != "absent" and case.form == "columns_counted":
        reasons.append(f"form=columns_counted: with workspace={case.workspace} vLLM moves what it counts to the front")
    return reasons


def _rocm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, SlotsCase)
    del execution
    reasons = indices_vllm.missing(VLLM_ROCM, VLLM_CONVERT)
    if case.world_size > 1:
        reasons.append(f"world_size={case.world_size}: the ROCm backend knows one rank")
    if case.workspace != "absent":
        reasons.append(f"workspace={case.workspace}: the ROCm backend has none")
    if case.form != "columns":
        reasons.append(f"form={case.form}: the ROCm backend counts nothing")
    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, SlotsCase)
    return f"{case.form} {case.workspace == 'absent'} {case.width} {case.block_size} {case.world_size}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "topk_to_slots_triton.py", _HERE / "ragged_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=indices_vllm.fingerprint(VLLM_SHARED),
        allocates=True,
    ),
    Impl(
        name="vllm-triton-rocm",
        run=_run_vllm_rocm,
        unsupported=_rocm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=indices_vllm.fingerprint(VLLM_ROCM),
        allocates=True,
    ),
    Impl(
        name="torch-gather",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "topk_to_slots.py"),
    ),
)
