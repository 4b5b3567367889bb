"""Who decodes over segments, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.dense_mla.segmented_decode import Inputs, Outputs, SegmentedCase
from cases.precision import Precision
from impl.dense_mla.merge_modules import SEGMENTS, exponential_ulps, fingerprint, missing
from impl.dense_mla.merge_segments import MERGE
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.sources import aiter, settings

AITER_MODULE = "aiter.ops.triton.attention.mla"
AITER_DECODE = "mla_decode_fwd"
AITER_KERNELS = "aiter.ops.triton._triton_kernels.attention.mla"

_HERE = Path(__file__).parent
_LEAST_DOT = 16


def _lazily(module: str, function: str = "run") -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, getattr(importlib.import_module(f"impl.dense_mla.{module}"), function)(inputs))

    return run


@functools.cache
def _missing(path: Path | None) -> tuple[str, ...]:
    return tuple(aiter.unsupported(path, {AITER_MODULE: [AITER_DECODE]}))


def _aiter_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, SegmentedCase)
    reasons = [*without_triton(), *_missing(settings.aiter_path())]
    if execution == "cuda":
        reasons.append("on=cuda: AITER's launches carry options of Triton's AMD backend")
    if execution != "interpreter" and case.tile < _LEAST_DOT:
        reasons.append(
            f"tile={case.tile}: AITER multiplies whole pages, and matrix units take {_LEAST_DOT} keys at least"
        )
    return reasons


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    return [*_aiter_reasons(case, execution), *missing(SEGMENTS, MERGE, triton=False)]


def _aiter_source() -> bytes:
    path = settings.aiter_path()
    return b"" if _missing(path) else aiter.locate(path).fingerprint([AITER_MODULE, AITER_KERNELS]).encode()


def _precision(case: Case, execution: Execution) -> Precision:
    """The rounding points of every implementation here: they differ in tiles and segments only."""
    del case
    return Precision(
        probability="bfloat16",
        exponential_ulps=exponential_ulps(execution),
        flushes=execution != "interpreter",
        note="products of bf16 operands, sums fp32; exp2(score - max) to bf16 for the values only; segments fp32",
    )


def _key(case: Case) -> str:
    assert isinstance(case, SegmentedCase)
    return f"{case.rank} {case.rope} {case.tile} {case.cache} {case.output} {case.heads}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("segmented_decode_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(
            *(_HERE / f"{name}.py" for name in (
                "segmented_decode_triton", "segmented_decode_call", "merge_segments_triton",
            )), _HERE.parent / "formats" / "codes_triton.py",
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("segmented_decode_aiter", "merged_by_vllm"),
        unsupported=_vllm_reasons,
        precision=_precision,
        compile_key=_key,
        source=lambda: _aiter_source() + fingerprint(SEGMENTS),
    ),
    Impl(
        name="aiter-triton",
        run=_lazily("segmented_decode_aiter", "merged_by_us"),
        unsupported=_aiter_reasons,
        precision=_precision,
        compile_key=_key,
        source=_aiter_source,
    ),
    Impl(
        name="torch-gathered",
        run=_lazily("segmented_decode_torch"),
        unsupported=no_reasons,
        precision=_precision,
        compile_key=lambda case: case.op,
        by_shape=True,
        source=bytes_of(_HERE / "segmented_decode_torch.py", _HERE / "segmented_decode_call.py"),
    ),
)  # fmt: skip
