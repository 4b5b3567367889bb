"""Who answers sparse MLA prefill, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.precision import Precision
from cases.sparse_mla.prefill import PrefillCase
from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from impl.implementation import (
    PRODUCTS,
    Execution,
    Impl,
    architecture,
    bytes_of,
    needs_triton,
    no_reasons,
    without_triton,
)
from impl.sources import settings, vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_source

VLLM_PREFILL = "rocm_sparse_attn_prefill"

_HERE = Path(__file__).parent
_OPUS_LANES = 512


def _lazily(module: str) -> Callable[[PrefillInputs], PrefillOutputs]:
    def run(inputs: PrefillInputs) -> PrefillOutputs:
        return cast(PrefillOutputs, importlib.import_module(f"impl.sparse_mla.{module}").run(inputs))

    return run


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return [*without_triton(), *vllm.unsupported(settings.vllm_path(), {VLLM_MODULE: [VLLM_PREFILL]})]


def _opus_reasons(case: Case, execution: Execution) -> list[str]:
    """What the kernel's own interface excludes. That vLLM asks it from 1024 queries on is a matter of speed."""
    assert isinstance(case, PrefillCase)
    reasons = []
    if execution != "hip":
        reasons.append(f"on={execution}: OPUS is machine code for gfx950")
    elif not (name := architecture()).startswith("gfx950"):
        reasons.append(f"{name}: OPUS is machine code for gfx950")
    if importlib.util.find_spec("aiter") is None:
        reasons.append("aiter is not installed")
    if case.nope_lanes + case.rope_lanes != _OPUS_LANES:
        reasons.append(f"{case.nope_lanes}+{case.rope_lanes} lanes: OPUS is built for {_OPUS_LANES}")
    if case.out_lanes == "nope" and case.rope_lanes:
        reasons.append("out_lanes=nope: OPUS writes whole rows")
    if case.output == "float32":
        reasons.append("output=float32: OPUS writes the query's type")
    if case.sink == "absent":
        reasons.append("sink=absent: OPUS always adds a sink")
    if "spread" in (case.query_layout, case.kv_layout, case.out_layout):
        reasons.append("layout=spread: OPUS needs neighbouring lanes")
    if case.query_layout != case.out_layout or case.reach in ("far_query", "far_out"):
        reasons.append("OPUS uses the query's strides for the output, and theirs differ")
    if case.form.startswith("ragged") and (case.invalid != "none" or case.rows == "mixed" or case.integers == "wide"):
        reasons.append(f"form={case.form}: OPUS takes every entry for a row, and this list has others")
    return reasons


def _precision(case: Case, execution: Execution) -> Precision:
    """The rounding points of every implementation here: they differ in tiles only."""
    assert isinstance(case, PrefillCase)
    return Precision(
        probability=case.dtype,
        # A device's exp is a product with log2(e) and an approximate exp2 of 2 ulps.
        exponential_ulps=1.0 if execution == "interpreter" else 8.0,
        flushes=execution != "interpreter",
        note=f"{PRODUCTS[execution]}; sums fp32; exp(score - max) to {case.dtype} for the values only",
    )


def _compile_key(case: Case) -> str:
    assert isinstance(case, PrefillCase)
    parts = (
        case.dtype, case.nope_lanes + case.rope_lanes, case.sink == "absent", case.integers, case.output,
        case.query_layout, case.kv_layout, case.out_layout, case.reach,
    )  # fmt: skip
    return "/".join(str(part) for part in parts)


def _torch_key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("prefill_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_compile_key,
        source=bytes_of(_HERE / "prefill_triton.py", _HERE / "prefill_call.py", _HERE / "decode_call.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("prefill_vllm"),
        unsupported=_vllm_reasons,
        precision=_precision,
        compile_key=_compile_key,
        source=vllm_source,
    ),
    Impl(
        name="aiter-opus",
        run=_lazily("prefill_aiter"),
        unsupported=_opus_reasons,
        precision=_precision,
        compile_key=_compile_key,
        source=bytes_of(_HERE / "prefill_aiter.py"),
    ),
    Impl(
        name="torch-gathered",
        run=_lazily("prefill_torch"),
        unsupported=no_reasons,
        precision=_precision,
        compile_key=_torch_key,
        by_shape=True,
        source=bytes_of(_HERE / "prefill_torch.py", _HERE / "prefill_call.py", _HERE / "decode_call.py"),
    ),
)
