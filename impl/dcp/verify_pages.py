"""Who makes the page tables of verify rows, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from cases.case import Case
from cases.dcp.verify_pages import Inputs, Outputs, tile_of
from impl.dcp import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

VLLM_TILE = "_segmented_mla_page_size"

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.verify_pages_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    """The builder's own page size and table."""
    loader = vllm_modules.loader_for(inputs.out)
    size = inputs.page_size or loader.symbol(vllm_modules.BACKEND, VLLM_TILE)(inputs.block_size)
    builder = loader.symbol(vllm_modules.BACKEND, vllm_modules.BUILDER)
    builder._fill_dcp_verify_page_table(
        SimpleNamespace(kernel_block_size=inputs.block_size), inputs.out, inputs.blocks, inputs.lengths.numel(),
        inputs.queries, size,
    )  # fmt: skip
    return Outputs(torch.tensor([size]), inputs.out)


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: a view of the answer with a dimension for queries, filled from one look-up of every request."""
    size = inputs.page_size or tile_of(inputs.block_size)
    per_block = inputs.block_size // size
    requests, pages = inputs.lengths.numel(), inputs.out.shape[1]
    column = torch.arange(pages, device=inputs.out.device)
    found = inputs.blocks[:requests].index_select(1, column // per_block).mul_(per_block).add_(column % per_block)
    inputs.out.unflatten(0, (requests, inputs.queries)).copy_(found.to(torch.int32).unsqueeze(1))
    return Outputs(torch.tensor([size]), inputs.out)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return vllm_modules.missing(vllm_modules.BACKEND, vllm_modules.BUILDER, VLLM_TILE)


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "verify_pages_triton.py"),
    ),
    Impl(
        name="vllm-torch",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=vllm_modules.fingerprint(vllm_modules.BACKEND),
    ),
    Impl(
        name="torch-lookup",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "verify_pages.py"),
    ),
)
