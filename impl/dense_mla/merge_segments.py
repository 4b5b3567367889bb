"""Who merges the segments of a decode, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.dense_mla.merge_segments import Inputs, Outputs, SegmentCase
from cases.precision import Precision
from impl.dense_mla.merge_modules import SEGMENTS, exponential_ulps, fingerprint, missing
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons

MERGE = "merge_mla_segments_triton"

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.dense_mla.{module}").run(inputs))

    return run


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return missing(SEGMENTS, MERGE)


def _precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(
        probability="exact",
        exponential_ulps=exponential_ulps(execution),
        systematic_ulps=0.0,
        flushes=execution != "interpreter",
        note="fp32 weights, sums and one division",
    )


def _key(case: Case) -> str:
    assert isinstance(case, SegmentCase)
    return f"{case.segments} {case.rank} {case.tile} {case.heads} {case.output}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("merge_segments_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "merge_segments_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("merge_segments_vllm"),
        unsupported=_vllm_reasons,
        precision=_precision,
        compile_key=_key,
        source=lambda: fingerprint(SEGMENTS),
        allocates=True,
    ),
    Impl(
        name="torch-means",
        run=_lazily("merge_segments_torch"),
        unsupported=no_reasons,
        precision=_precision,
        compile_key=lambda case: case.op,
        source=bytes_of(_HERE / "merge_segments_torch.py"),
    ),
)
