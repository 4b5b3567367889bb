"""Who merges attention parts, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.dense_mla.merge_parts import Inputs, MergeCase, Outputs
from cases.precision import Precision
from impl.dense_mla.merge_modules import DCP, exponential_ulps, fingerprint, missing
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons

COMBINE = "_lse_weighted_combine"
UNPACK_COMBINE = "_dcp_a2a_unpack_combine"

_HERE = Path(__file__).parent


def _lazily(module: str, function: str = "run") -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, getattr(importlib.import_module(f"impl.dense_mla.{module}"), function)(inputs))

    return run


def _torch_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return missing(DCP, COMBINE, triton=False)


def _triton_reasons(case: Case, execution: Execution) -> list[str]:
    """What the receiving side of the exchange between ranks cannot be sent."""
    del execution
    assert isinstance(case, MergeCase)
    reasons = missing(DCP, UNPACK_COMBINE)
    if case.lanes & (case.lanes - 1):
        reasons.append(f"lanes={case.lanes}: vLLM's combine needs a power of two")
    if case.output == "float32" and case.dtype != "float32":
        reasons.append(f"output=float32: vLLM's combine writes the parts' {case.dtype}")
    return reasons


def _precision(note: str, anchored: bool = False) -> Callable[[Case, Execution], Precision]:
    """A merge in fp32; `anchored` weights are taken against the rounded log-sum-exp."""

    def precision(case: Case, execution: Execution) -> Precision:
        del case
        return Precision(
            probability="exact",
            exponential_ulps=exponential_ulps(execution),
            # The rounding of the log-sum-exp, and the error of the logarithm in it.
            systematic_ulps=1.0 + exponential_ulps(execution) if anchored else 0.0,
            flushes=execution != "interpreter",
            note=note,
        )

    return precision


def _key(case: Case) -> str:
    assert isinstance(case, MergeCase)
    return f"{case.parts} {case.lanes} {case.dtype} {case.output}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("merge_parts_triton"),
        unsupported=needs_triton,
        precision=_precision("fp32 weights, sums and one division"),
        compile_key=_key,
        source=bytes_of(_HERE / "merge_parts_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("merge_parts_vllm", "unpacked"),
        unsupported=_triton_reasons,
        precision=_precision("fp32 weights against the rounded log-sum-exp, fp32 sums", anchored=True),
        compile_key=_key,
        source=lambda: fingerprint(DCP),
    ),
    Impl(
        name="vllm-torch",
        run=_lazily("merge_parts_vllm", "combined"),
        unsupported=_torch_reasons,
        precision=_precision("fp32 weights divided by their sum, fp32 sums"),
        compile_key=lambda case: case.op,
        source=lambda: fingerprint(DCP),
    ),
    Impl(
        name="torch-softmax",
        run=_lazily("merge_parts_torch"),
        unsupported=no_reasons,
        precision=_precision("torch's softmax and logsumexp in fp32"),
        compile_key=lambda case: case.op,
        source=bytes_of(_HERE / "merge_parts_torch.py"),
    ),
)
