"""Who lists the slots of decode tokens' top-k positions, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.sparse_mla.decode_topk_ragged import DecodeTopkCase, Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons
from impl.sparse_mla import indices_vllm

VLLM_V4 = "vllm.models.deepseek_v4.amd.rocm"
VLLM_V41 = "vllm.models.deepseek_v41.amd.rocm"
VLLM_ONE_LAUNCH = "vllm.models.deepseek_v41.amd.ops.topk_pack"
VLLM_NAME = "compute_global_topk_ragged_indices_and_indptr"

# More tokens than these take the several launches, switch or no switch.
_ONE_LAUNCH_TOKENS = 16

_HERE = Path(__file__).parent
_EXACT = exact_but("indices")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.decode_topk_ragged_triton").run(inputs))


def _run_vllm(inputs: Inputs, module: str, one_launch: bool) -> Outputs:
    run = importlib.import_module("impl.sparse_mla.decode_topk_ragged_vllm").run
    return cast(Outputs, run(inputs, module, one_launch))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: slots by `gather` on each token's table row, rows by a mask."""
    tokens = inputs.local.shape[0]
    there = (inputs.local >= 0) & inputs.valid[:, None]
    torch.sum(there, dim=1, dtype=torch.int32, out=inputs.lengths)
    inputs.indptr[:1] = 0
    torch.cumsum(inputs.lengths, 0, out=inputs.indptr[1:])
    position = inputs.local.clamp(min=0) * there
    blocks = inputs.table[inputs.requests[:tokens].long() * inputs.valid].gather(
        1, (position // inputs.block_size).long()
    )
    slots = torch.where(there, blocks * inputs.block_size + position % inputs.block_size, -1)
    taken = there
    if inputs.holes == "kept":
        taken = torch.arange(slots.shape[1], device=slots.device) < inputs.lengths[:, None]
    listed = slots[taken]
    inputs.flat[: listed.numel()] = listed
    return Outputs(inputs.flat, inputs.indptr, inputs.lengths)


def _vllm_reasons(case: Case, execution: Execution, module: str, one_launch: bool) -> list[str]:
    assert isinstance(case, DecodeTopkCase)
    del execution
    reasons = indices_vllm.missing(module, VLLM_NAME)
    if case.holes == "removed" and case.entries in ("holes", "first_hole"):
        reasons.append(
            f"holes=removed: vLLM promises rows whose positions come first, not those of entries={case.entries}"
        )
    if one_launch:
        reasons += indices_vllm.missing(VLLM_ONE_LAUNCH, "pack", "enabled")
        if case.tokens > _ONE_LAUNCH_TOKENS:
            reasons.append(f"tokens={case.tokens}: one launch takes at most {_ONE_LAUNCH_TOKENS}")
    return list(dict.fromkeys(reasons))


def _key(case: Case) -> str:
    assert isinstance(case, DecodeTopkCase)
    return f"{case.topk} {case.block_size} {case.holes}"


def _from_vllm(name: str, module: str, one_launch: bool = False) -> Impl:
    return Impl(
        name=name,
        run=functools.partial(_run_vllm, module=module, one_launch=one_launch),
        unsupported=functools.partial(_vllm_reasons, module=module, one_launch=one_launch),
        precision=_EXACT,
        compile_key=_key,
        source=indices_vllm.fingerprint(module, *((VLLM_ONE_LAUNCH,) if one_launch else ())),
        allocates=True,
    )


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "decode_topk_ragged_triton.py", _HERE / "ragged_triton.py", _HERE / "paging_triton.py"),
    ),
    _from_vllm("vllm-triton", VLLM_V41),
    _from_vllm("vllm-triton-v4", VLLM_V4),
    _from_vllm("vllm-triton-one-launch", VLLM_V41, one_launch=True),
    Impl(
        name="torch-gather",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "decode_topk_ragged.py"),
    ),
)
