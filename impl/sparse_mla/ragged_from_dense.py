"""Who packs padded index rows into a ragged list, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.sparse_mla.ragged_from_dense import Inputs, Outputs, RaggedCase
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons
from impl.sparse_mla import indices_vllm

VLLM_MODULE = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
VLLM_NAME = "build_ragged_indices_from_dense"

_HERE = Path(__file__).parent
_EXACT = exact_but("indices")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.ragged_from_dense_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.ragged_from_dense_vllm").run(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: one mask over all rows, and a selection by it."""
    indices = inputs.indices.flatten(1)
    column = torch.arange(indices.shape[1], device=indices.device)
    keep = (column < inputs.lengths[:, None]) & (indices >= 0)
    if inputs.num_rows >= 0:
        keep &= indices < inputs.num_rows
    kept = torch.masked_select(indices, keep)
    inputs.flat[: kept.numel()] = kept.to(torch.int32)
    inputs.indptr[:1] = 0
    torch.cumsum(keep.sum(dim=1, dtype=torch.int32), 0, out=inputs.indptr[1:])
    return Outputs(inputs.flat, inputs.indptr)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return indices_vllm.missing(VLLM_MODULE, VLLM_NAME)


def _key(case: Case) -> str:
    assert isinstance(case, RaggedCase)
    return f"{case.width} {case.indices == 'int32'} {case.length_dtype}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "ragged_from_dense_triton.py", _HERE / "ragged_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=indices_vllm.fingerprint(VLLM_MODULE),
        allocates=True,
    ),
    Impl(
        name="torch-masked",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "ragged_from_dense.py"),
    ),
)
