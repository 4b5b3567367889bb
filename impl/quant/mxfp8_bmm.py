"""Who multiplies MXFP8 rows with a grouped MXFP8 weight, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.precision import Precision
from cases.quant.mxfp8_bmm import BmmCase, Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.quant.mxfp8_bmm_call import tile_for
from impl.sources import settings, vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_source

VLLM_FUNCTION = "_rocm_mxfp8_wo_a_bmm_impl"
VLLM_CONFIG = "_mxfp8_wo_a_bmm_config"

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.quant.{module}").run(inputs))

    return run


@functools.cache
def _missing(path: Path | None) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {VLLM_MODULE: (VLLM_FUNCTION, VLLM_CONFIG)}))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return [*without_triton(), *_missing(settings.vllm_path())]


def _precision(note: str) -> Callable[[Case, Execution], Precision]:
    return lambda case, execution: Precision(probability="exact", flushes=execution != "interpreter", note=note)


def _float64(case: Case, execution: Execution) -> Precision:
    del case, execution
    return Precision(probability="exact", flushes=False, note="float64 sums, rounded to float32 and then to bfloat16")


def _key(case: Case) -> str:
    assert isinstance(case, BmmCase)
    return f"{tile_for(case.tokens, case.groups)} {case.form} {case.rank} {case.width}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("mxfp8_bmm_triton"),
        unsupported=needs_triton,
        precision=_precision("bf16 products of codes, block sums and their sums in fp32"),
        compile_key=_key,
        source=bytes_of(_HERE / "mxfp8_bmm_triton.py", _HERE / "mxfp8_bmm_call.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("mxfp8_bmm_vllm"),
        unsupported=_vllm_reasons,
        precision=_precision("dot_scaled of e4m3 codes and E8M0 bytes, fp32 sums of a tile's lanes"),
        compile_key=_key,
        source=vllm_source,
        allocates=True,
    ),
    Impl(
        name="torch-float64",
        run=_lazily("mxfp8_bmm_torch"),
        unsupported=no_reasons,
        precision=_float64,
        compile_key=lambda case: case.op,
        source=bytes_of(_HERE / "mxfp8_bmm_torch.py", _HERE / "mxfp8_bmm_call.py"),
    ),
)
