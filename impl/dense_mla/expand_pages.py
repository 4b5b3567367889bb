"""Who expands a block table into the slots of single tokens, and what can each of them not be asked?"""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.expand_pages import ExpandCase, Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons
from impl.sources import settings, vllm
from impl.sources.source_tree import source_tree
from impl.sparse_mla import indices_vllm

VLLM_MODULE = "vllm.v1.attention.backends.mla.rocm_aiter_mla"
VLLM_KERNEL = "_expand_page_indices_kernel"

_HERE = Path(__file__).parent
_EXACT = exact_but("slots")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.expand_pages_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.expand_pages_vllm").run(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: every place of the lists with its request's number beside it, all at once."""
    starts = inputs.kv_indptr.to(torch.int64)
    lengths = starts.diff()
    owner = torch.repeat_interleave(torch.arange(lengths.numel(), device=starts.device), lengths)
    token = torch.arange(owner.numel(), device=starts.device) - starts[owner]
    if inputs.clamped:
        token = token.masked_fill(token >= inputs.real_lengths[owner], 0)
    column = torch.div(token, inputs.block_size, rounding_mode="floor")
    if inputs.graphs:
        inputs.indices.fill_(-1)
    slots = inputs.block_table[owner, column] * inputs.block_size + token.remainder(inputs.block_size).to(torch.int32)
    inputs.indices.narrow(0, 0, owner.numel()).copy_(slots)
    return Outputs(inputs.indices)


@functools.cache
def _arguments(path: Path | None) -> tuple[str, ...]:
    module = source_tree(vllm.locate(path).root, "vllm").module(VLLM_MODULE)
    (binding,) = module.bindings[VLLM_KERNEL]
    assert isinstance(binding.statement, ast.FunctionDef)
    return tuple(argument.arg for argument in binding.statement.args.args)


def kernel_arguments() -> tuple[str, ...]:
    """The parameters of the kernel in the configured vLLM: it learnt to clamp lists only in the course of time."""
    return _arguments(settings.vllm_path())


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, ExpandCase)
    del execution
    reasons = indices_vllm.missing(VLLM_MODULE, VLLM_KERNEL)
    if not reasons and case.tail == "clamped" and "CLAMP_TAIL" not in kernel_arguments():
        reasons.append("tail=clamped: the kernel of this vLLM does not clamp")
    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, ExpandCase)
    return f"{case.block_size} {case.tail}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "expand_pages_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=indices_vllm.fingerprint(VLLM_MODULE),
    ),
    Impl(
        name="torch-gather",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "expand_pages.py"),
    ),
)
