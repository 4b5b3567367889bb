"""Who merges the splits of a decode without a plan, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.dense_mla.split_stage2 import Inputs, Outputs, StageCase
from cases.precision import Precision
from impl.dense_mla.merge_modules import exponential_ulps
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.sources import aiter, settings

AITER_MODULE = "aiter.mla"
AITER_KERNEL = "_fwd_kernel_stage2_asm"

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.dense_mla.{module}").run(inputs))

    return run


@functools.cache
def _missing(path: Path | None) -> tuple[str, ...]:
    return tuple(aiter.unsupported(path, {AITER_MODULE: [AITER_KERNEL]}))


def _aiter_reasons(case: Case, execution: Execution) -> list[str]:
    del case
    reasons = [*without_triton(), *_missing(settings.aiter_path())]
    if execution == "cuda":
        reasons.append("on=cuda: AITER's launches carry options of Triton's AMD backend")
    return reasons


def _aiter_source() -> bytes:
    path = settings.aiter_path()
    return b"" if _missing(path) else aiter.locate(path).fingerprint([AITER_MODULE]).encode()


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
    assert isinstance(case, StageCase)
    return f"{case.lanes} {case.output} {case.exported == 'absent'} {case.splits == 1}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("split_stage2_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "split_stage2_triton.py"),
    ),
    Impl(
        name="aiter-triton",
        run=_lazily("split_stage2_aiter"),
        unsupported=_aiter_reasons,
        precision=_precision,
        compile_key=_key,
        source=_aiter_source,
    ),
    Impl(
        name="torch-rows",
        run=_lazily("split_stage2_torch"),
        unsupported=no_reasons,
        precision=_precision,
        compile_key=lambda case: case.op,
        source=bytes_of(_HERE / "split_stage2_torch.py"),
    ),
)
