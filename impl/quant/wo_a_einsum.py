"""Who multiplies attention rows with an output projection, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.precision import Precision
from cases.quant.wo_a_einsum import EinsumCase, Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.quant.wo_a_dequant import VLLM_SCALE_FUNCTION, VLLM_SCALE_MODULE
from impl.sources import settings, vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_source

VLLM_FUNCTION = "rocm_inv_rope_einsum"

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.quant.{module}").run(inputs))

    return run


@functools.cache
def _missing(path: Path | None) -> tuple[str, ...]:
    wanted = {VLLM_MODULE: (VLLM_FUNCTION,), VLLM_SCALE_MODULE: (VLLM_SCALE_FUNCTION,)}
    return tuple(vllm.unsupported(path, wanted))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return [*without_triton(), *_missing(settings.vllm_path())]


def _precision(note: str) -> Callable[[Case, Execution], Precision]:
    return lambda case, execution: Precision(probability="exact", flushes=execution != "interpreter", note=note)


def _key(case: Case) -> str:
    assert isinstance(case, EinsumCase)
    return f"{case.rotation == 'none'} {case.dtype} {case.head_dim} {case.weight} {case.integers}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("wo_a_einsum_triton"),
        unsupported=needs_triton,
        precision=_precision("rotation fp32, to bf16; products of bf16 numbers, sums fp32"),
        compile_key=_key,
        source=bytes_of(
            _HERE / "wo_a_einsum_triton.py",
            _HERE / "wo_a_einsum_call.py",
            _HERE / "wo_a_dequant_triton.py",
            _HERE / "wo_a_dequant_call.py",
            _HERE.parent / "sparse_mla" / "inverse_rope_triton.py",
            _HERE.parent / "formats" / "codes_triton.py",
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("wo_a_einsum_vllm"),
        unsupported=_vllm_reasons,
        precision=_precision("rotation fp32, to bf16; torch's bf16 product, sums fp32"),
        compile_key=_key,
        source=vllm_source,
    ),
    Impl(
        name="torch-einsum",
        run=_lazily("wo_a_einsum_torch"),
        unsupported=no_reasons,
        precision=_precision("rotation fp32, to bf16; fp32 products without TF32"),
        compile_key=_key,
        source=bytes_of(
            _HERE / "wo_a_einsum_torch.py",
            _HERE / "wo_a_einsum_call.py",
            _HERE / "wo_a_dequant_torch.py",
            _HERE / "wo_a_dequant_call.py",
        ),
    ),
)
