"""Who merges the answers of the ranks of a sharded cache, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dcp.combine import CombineCase, Inputs, Outputs
from cases.precision import Precision
from impl.implementation import Execution, Impl, bytes_of, without_triton
from impl.sources import settings, vllm

VLLM_MODULE = "vllm.v1.attention.ops.dcp"
VLLM_FUNCTIONS = {
    "all_gather_reduce_scatter": "cp_lse_ag_out_rs",
    "all_gather_all_reduce": "cp_lse_ag_out_ar",
    "all_to_all": "dcp_a2a_lse_reduce",
}

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.dcp.{module}").run(inputs))

    return run


def ranks_reasons(ranks: str, world: int, execution: Execution) -> list[str]:
    """Why no group of this many processes can be had: between devices it takes one for each rank."""
    if ranks == "one_process" or execution == "interpreter":
        return []
    devices = torch.cuda.device_count()
    return [] if devices >= world else [f"ranks=processes: {world} ranks need a device each, and there are {devices}"]


def _torch_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, CombineCase)
    return ranks_reasons(case.ranks, case.world, execution)


def _triton_reasons(case: Case, execution: Execution) -> list[str]:
    return [*without_triton(), *_torch_reasons(case, execution)]


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, CombineCase)
    reasons = [*without_triton(), *_missing(settings.vllm_path())]
    if case.ranks == "processes":
        reasons.append("ranks=processes: vLLM's groups exist only in a server")
    if case.mode != "all_to_all" and case.world & (case.world - 1):
        reasons.append(f"world={case.world}: the kernel behind vLLM's all-gather takes a power of two of ranks")
    return reasons


@functools.cache
def _missing(path: Path | None) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {VLLM_MODULE: tuple(VLLM_FUNCTIONS.values())}))


def _vllm_source() -> bytes:
    path = settings.vllm_path()
    return b"" if _missing(path) else vllm.locate(path).fingerprint([VLLM_MODULE]).encode()


def precision(note: str) -> Callable[[Case, Execution], Precision]:
    """The rounding points of every merge here: fp32 but for what the collective rounds."""

    def declared(case: Case, execution: Execution) -> Precision:
        del case
        on_device = execution != "interpreter"
        # A device's exp is a product with log2(e) and an approximate exp2 of 2 ulps; so is its log.
        return Precision(
            probability="exact", exponential_ulps=4.0 if on_device else 2.0,
            systematic_ulps=2.0 if on_device else 0.0, flushes=on_device, note=note,
        )  # fmt: skip

    return declared


def _key(case: Case) -> str:
    assert isinstance(case, CombineCase)
    return f"{case.mode} {case.dtype} {case.world} {case.lanes} {case.base} {case.mask == 'absent'}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("combine_triton"),
        unsupported=_triton_reasons,
        precision=precision("powers of a difference of logarithms; shares rounded to the dtype, or sums in fp32"),
        compile_key=_key,
        source=bytes_of(
            *(_HERE / name for name in ("combine_triton.py", "combine_call.py", "collectives.py", "ranks.py"))
        ),
    ),
    Impl(
        name="torch-fp32",
        run=_lazily("combine_torch"),
        unsupported=_torch_reasons,
        precision=precision("weights divided by their sum; shares rounded to the dtype, or sums in fp32"),
        compile_key=lambda case: case.op,
        source=bytes_of(
            *(_HERE / name for name in ("combine_torch.py", "combine_call.py", "collectives.py", "ranks.py"))
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("combine_vllm"),
        unsupported=_vllm_reasons,
        precision=precision("powers of a difference of logarithms; shares rounded to the dtype, or sums in fp32"),
        compile_key=_key,
        source=_vllm_source,
    ),
)
