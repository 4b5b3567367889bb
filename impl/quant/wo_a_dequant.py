"""Who dequantises an output projection's weight and keeps it, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.quant.wo_a_dequant import DequantCase, Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons
from impl.sources import settings, vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_source

VLLM_FUNCTION = "_get_cached_wo_a_bf16"
VLLM_SCALE_MODULE = "vllm.model_executor.layers.quantization.utils.fp8_utils"
VLLM_SCALE_FUNCTION = "get_fp8_block_weight_scale"
VLLM_BYTES_MODULE = "vllm.models.deepseek_v4.amd.rocm"
VLLM_BYTES_FUNCTION = "_wo_a_block_scale_to_e8m0"

_HERE = Path(__file__).parent
_EXACT = exact_but("an fp32 product, rounded to bfloat16")


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.quant.{module}").run(inputs))

    return run


@functools.cache
def _missing(path: Path | None) -> tuple[str, ...]:
    wanted = {VLLM_MODULE: (VLLM_FUNCTION,), VLLM_SCALE_MODULE: (VLLM_SCALE_FUNCTION,)}
    return tuple(vllm.unsupported(path, wanted))


def bytes_missing() -> bool:
    """Whether the configured vLLM has no function for exponent bytes."""
    return bool(_bytes_missing(settings.vllm_path()))


@functools.cache
def _bytes_missing(path: Path | None) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {VLLM_BYTES_MODULE: (VLLM_BYTES_FUNCTION,)}))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return list(_missing(settings.vllm_path()))


def _key(case: Case) -> str:
    assert isinstance(case, DequantCase)
    return f"{case.weight} {case.scale}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("wo_a_dequant_triton"),
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(
            _HERE / "wo_a_dequant_triton.py",
            _HERE / "wo_a_dequant_call.py",
            _HERE.parent / "formats" / "codes_triton.py",
        ),
    ),
    Impl(
        name="vllm-host",
        run=_lazily("wo_a_dequant_vllm"),
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=vllm_source,
    ),
    Impl(
        name="torch-blocks",
        run=_lazily("wo_a_dequant_torch"),
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "wo_a_dequant_torch.py", _HERE / "wo_a_dequant_call.py"),
    ),
)
