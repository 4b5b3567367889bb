"""Who lists the slots of prefill tokens' top-k positions, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.sparse_mla.prefill_topk_ragged import Inputs, Outputs, PrefillTopkCase
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons
from impl.sparse_mla import indices_vllm

VLLM_MODULE = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
VLLM_NAME = "build_prefill_topk_ragged_indices"

_HERE = Path(__file__).parent
_EXACT = exact_but("indices")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.prefill_topk_ragged_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.prefill_topk_ragged_vllm").run(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: slots by `gather` on each token's table row, rows by a mask."""
    batch = slice(inputs.token_offset, inputs.token_offset + inputs.local.shape[0])
    valid = inputs.valid[batch]
    request = inputs.requests[batch].long() * valid
    token = torch.arange(batch.start, batch.stop, device=valid.device)
    keys = (inputs.seq_lens[request] - inputs.query_start[request + 1] + token + 1).clamp(min=0) // inputs.ratio
    column = torch.arange(inputs.local.shape[1], device=valid.device)
    there = valid[:, None] & (column < keys[:, None]) & (inputs.local >= 0) & (inputs.local < inputs.num_compressed)
    position = inputs.local * there
    blocks = inputs.table[request].gather(1, (position // inputs.block_size).long())
    slots = blocks * inputs.block_size + position % inputs.block_size
    if inputs.num_rows >= 0:
        there = there & (slots < inputs.num_rows)
    listed = slots[there]
    inputs.flat[: listed.numel()] = listed
    inputs.indptr[:1] = 0
    torch.cumsum(there.sum(dim=1, dtype=torch.int32), 0, out=inputs.indptr[1:])
    return Outputs(inputs.flat, inputs.indptr)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return indices_vllm.missing(VLLM_MODULE, VLLM_NAME)


def _key(case: Case) -> str:
    assert isinstance(case, PrefillTopkCase)
    return f"{case.width} {case.block_size} {case.ratio}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(
            _HERE / "prefill_topk_ragged_triton.py", _HERE / "ragged_triton.py", _HERE / "paging_triton.py"
        ),
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
        name="torch-gather",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "prefill_topk_ragged.py"),
    ),
)
