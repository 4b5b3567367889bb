"""Who merges attention over a prefix with that over a suffix, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.dense_mla.merge_prefix_suffix import Inputs, Outputs, PrefixCase
from cases.precision import Precision
from impl.dense_mla.merge_modules import STATES, STATES_TRITON, exponential_ulps, fingerprint, missing
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons

MERGE_TRITON = "merge_attn_states"
MERGE_TORCH = "_merge_attn_states_torch"

_HERE = Path(__file__).parent


def _lazily(module: str, function: str = "run") -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, getattr(importlib.import_module(f"impl.dense_mla.{module}"), function)(inputs))

    return run


def _triton_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, PrefixCase)
    reasons = missing(STATES_TRITON, MERGE_TRITON)
    if case.output == "float8_e4m3fnuz" and execution == "cuda":
        reasons.append("output=float8_e4m3fnuz: Triton has no FNUZ types on NVIDIA devices")
    return reasons


def _torch_reasons(case: Case, execution: Execution) -> list[str]:
    del execution
    assert isinstance(case, PrefixCase)
    reasons = missing(STATES, MERGE_TORCH, triton=False)
    if case.output != "same":
        reasons.append(f"output={case.output}: vLLM's fallback does not quantise")
    return reasons


def _precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(
        probability="exact",
        exponential_ulps=exponential_ulps(execution),
        systematic_ulps=0.0,
        flushes=execution != "interpreter",
        note="fp32 weights and sums",
    )


def _key(case: Case) -> str:
    assert isinstance(case, PrefixCase)
    return f"{case.lanes} {case.dtype} {case.output} {case.out_lse == 'absent'}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("merge_prefix_suffix_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "merge_prefix_suffix_triton.py", _HERE.parent / "formats" / "codes_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("merge_prefix_suffix_vllm", "triton"),
        unsupported=_triton_reasons,
        precision=_precision,
        compile_key=_key,
        source=lambda: fingerprint(STATES_TRITON),
    ),
    Impl(
        name="vllm-torch",
        run=_lazily("merge_prefix_suffix_vllm", "fallback"),
        unsupported=_torch_reasons,
        precision=_precision,
        compile_key=lambda case: case.op,
        source=lambda: fingerprint(STATES),
    ),
    Impl(
        name="torch-sigmoid",
        run=_lazily("merge_prefix_suffix_torch"),
        unsupported=no_reasons,
        precision=_precision,
        compile_key=lambda case: case.op,
        source=bytes_of(_HERE / "merge_prefix_suffix_torch.py"),
    ),
)
