"""Who masks the rows to which a rank has nothing to add, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dcp.mask_empty_shards import Inputs, MaskCase, Outputs
from impl.dcp import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

VLLM_MASK = "mask_dcp_empty_shards_"
VLLM_PACK = "_dcp_a2a_pack_send"

_HERE = Path(__file__).parent
_EXACT = exact_but("bits are kept")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.mask_empty_shards_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.mask_empty_shards_vllm").run(inputs))


def _run_packed(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.mask_empty_shards_vllm").run_packed(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: each request marks where its rows begin and end, and a running sum tells which are marked."""
    lse, lengths, bounds = inputs.lse, inputs.lengths, inputs.query_start
    if lengths is None or bounds is None:
        return Outputs(lse)
    rows = lse.shape[0]
    full = (lengths != 0).to(torch.int32)
    marks = torch.zeros(rows + 1, dtype=torch.int32, device=lse.device)
    marks.index_add_(0, bounds[:-1].long(), full).index_add_(0, bounds[1:].long(), -full)
    lse[marks.cumsum(0)[:rows] == 0] = -float("inf")
    return Outputs(lse)


def _vllm_reasons(name: str) -> Callable[[Case, Execution], list[str]]:
    def reasons(case: Case, execution: Execution) -> list[str]:
        del case, execution
        return vllm_modules.missing(vllm_modules.COLLECTIVES, name)

    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, MaskCase)
    return f"{case.length_dtype} {case.given}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "mask_empty_shards_triton.py"),
    ),
    Impl(
        name="vllm-torch",
        run=_run_vllm,
        unsupported=_vllm_reasons(VLLM_MASK),
        precision=_EXACT,
        compile_key=_key,
        source=vllm_modules.fingerprint(vllm_modules.COLLECTIVES),
    ),
    Impl(
        name="vllm-triton-packed",
        run=_run_packed,
        unsupported=_vllm_reasons(VLLM_PACK),
        precision=_EXACT,
        compile_key=_key,
        source=vllm_modules.fingerprint(vllm_modules.COLLECTIVES),
    ),
    Impl(
        name="torch-marks",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "mask_empty_shards.py"),
    ),
)
