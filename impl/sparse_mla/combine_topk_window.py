"""Who joins selected and window entries into rows of workspace indices, and what can each of them not be asked?"""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.sparse_mla.combine_topk_window import CombineCase, Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons, without_triton
from impl.sources import settings, vllm
from impl.sources.source_tree import source_tree

V41 = "vllm.models.deepseek_v41.common.ops.cache_utils"
V4 = "vllm.models.deepseek_v4.common.ops.cache_utils"
V41_ROCM = "vllm.models.deepseek_v41.amd.rocm"
V4_ROCM = "vllm.models.deepseek_v4.amd.rocm"
NAME = "combine_topk_swa_indices"

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.combine_topk_window_triton").run(inputs))


def _run_vllm(inputs: Inputs, module: str, into: bool) -> Outputs:
    routes = importlib.import_module("impl.sparse_mla.combine_topk_window_vllm")
    return cast(Outputs, routes.run(inputs, module, into))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch without a loop: each column of each row decides whether it is an entry, window or neither."""
    rows, width = inputs.combined.shape
    starts = inputs.query_start - inputs.query_start[:1]
    row = torch.arange(rows, device=starts.device, dtype=starts.dtype)
    request = torch.bucketize(row, starts[1:], right=True)
    position = inputs.seq_lens[request] - starts[1:][request] + row
    most = min(inputs.top_k, inputs.topk.shape[1])
    exist = torch.zeros_like(position)
    if inputs.ratio > 0:
        exist = torch.div(position + 1, inputs.ratio, rounding_mode="floor").clamp(0, most)
    window = (position + 1).clamp(0, inputs.window)
    first = request * inputs.request_rows
    column = torch.arange(width, device=starts.device)[None, :]
    gathered = first + inputs.compressed_rows + position - window + 1
    gathered = gathered - (inputs.seq_lens - inputs.gather_lens)[request]
    values = (gathered - exist)[:, None] + column
    if most > 0:
        entries = inputs.topk[:, :most].long()
        entries = torch.where((entries >= 0) & (entries < inputs.compressed_rows), entries + first[:, None], -1)
        values[:, :most] = torch.where(column[:, :most] < exist[:, None], entries, values[:, :most])
    ends = exist + window
    inputs.combined.copy_(torch.where(column < ends[:, None], values, -1))
    inputs.lens.copy_(ends)
    return Outputs(inputs.combined, inputs.lens)


def _vllm_reasons(case: Case, execution: Execution, module: str) -> list[str]:
    assert isinstance(case, CombineCase)
    del execution
    reasons = [*vllm.unsupported(settings.vllm_path(), {module: [NAME]}), *without_triton()]
    if module != V4_ROCM and case.window & (case.window - 1):
        reasons.append(f"window={case.window}: the kernel gives each window token a lane, a power of two of them")
    return reasons


@functools.cache
def _written_in(root: Path, module: str) -> bool:
    """Whether a module defines the function itself instead of taking it from another."""
    bindings = source_tree(root, "vllm").module(module).bindings.get(NAME, [])
    return any(isinstance(binding.statement, ast.FunctionDef) for binding in bindings)


def _torch_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    reasons = vllm.unsupported(settings.vllm_path(), {V41_ROCM: [NAME]})
    if not reasons:
        source = vllm.locate(settings.vllm_path())
        if not _written_in(source.root, V41_ROCM):
            reasons.append(f"{source}: {V41_ROCM} has no form of its own, it uses the kernel that vllm-triton runs")
    return reasons


def _fingerprint(module: str) -> bytes:
    return vllm.locate(settings.vllm_path()).fingerprint([module]).encode()


def _key(case: Case) -> str:
    assert isinstance(case, CombineCase)
    return f"{case.window} {case.ratio} {case.top_k} {case.buffer} {case.index_type}"


def _from_vllm(name: str, module: str, into: bool) -> Impl:
    return Impl(
        name=name,
        run=functools.partial(_run_vllm, module=module, into=into),
        unsupported=_torch_reasons if module == V41_ROCM else functools.partial(_vllm_reasons, module=module),
        precision=_EXACT,
        compile_key=_key,
        source=functools.partial(_fingerprint, module),
        allocates=not into,
    )


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "combine_topk_window_triton.py"),
    ),
    Impl(
        name="torch-dense",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "combine_topk_window.py"),
    ),
    _from_vllm("vllm-triton", V41, into=True),
    _from_vllm("vllm-triton-v4", V4, into=True),
    _from_vllm("vllm-triton-v4-rocm", V4_ROCM, into=False),
    _from_vllm("vllm-torch", V41_ROCM, into=False),
)
