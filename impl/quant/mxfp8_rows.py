"""Who quantises rows to MXFP8, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.precision import Precision
from cases.quant.mxfp8_rows import BLOCK, Inputs, Outputs, QuantiseCase
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.sources import settings, vllm

VLLM_MODULE = "vllm.model_executor.layers.quantization.utils.mxfp8_utils"
VLLM_DISPATCH = "_mxfp8_e4m3_quantize_impl"
VLLM_TRITON = "_mxfp8_e4m3_quantize_triton"
VLLM_TORCH = "_mxfp8_e4m3_quantize_torch"

_HERE = Path(__file__).parent


def _lazily(module: str, name: str = "run") -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, getattr(importlib.import_module(f"impl.quant.{module}"), name)(inputs))

    return run


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: the exponent by frexp, the scaling by ldexp, torch's own fp8 cast."""
    blocks = inputs.rows.float().unflatten(-1, (-1, BLOCK))
    # a = fraction * 2^exponent with fraction in [0.5, 1), and 448 = 0.875 * 2^9.
    fraction, exponent = torch.frexp(blocks.abs().amax(-1).clamp(min=2.0**-126))
    byte = (exponent - 9 + (fraction > 0.875).int() + 127).clamp(0, 254)
    codes = torch.ldexp(blocks, (127 - byte)[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    return Outputs(codes, byte.to(torch.uint8))


def _missing(name: str) -> list[str]:
    return vllm.unsupported(settings.vllm_path(), {VLLM_MODULE: [name]})


def _dispatched_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, QuantiseCase)
    del execution
    reasons = [*_missing(VLLM_DISPATCH), *without_triton()]
    if not reasons:
        reasons += _missing(VLLM_TRITON)
    if case.stack:
        reasons.append(f"stack={case.stack}: vLLM's Triton kernel takes rows, its torch form (vllm-torch) takes stacks")
    return reasons


def _torch_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return _missing(VLLM_TORCH)


def _vllm_source() -> bytes:
    path = settings.vllm_path()
    return b"" if _missing(VLLM_TORCH) else vllm.locate(path).fingerprint([VLLM_MODULE]).encode()


def _exactly(case: Case, execution: Execution) -> Precision:
    del case, execution
    return Precision(flushes=False, note="integer arithmetic, and products that are exact or round to zero codes")


def _in_float32(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(flushes=execution != "interpreter", note="products with powers of two, in float32")


def _key(case: Case) -> str:
    assert isinstance(case, QuantiseCase)
    return case.dtype


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("mxfp8_rows_triton"),
        unsupported=needs_triton,
        precision=_exactly,
        compile_key=_key,
        source=bytes_of(
            _HERE / "mxfp8_rows_triton.py", _HERE / "mxfp8_triton.py", _HERE.parent / "formats" / "codes_triton.py"
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("mxfp8_rows_vllm", "run_dispatched"),
        unsupported=_dispatched_reasons,
        precision=_in_float32,
        compile_key=_key,
        source=_vllm_source,
    ),
    Impl(
        name="vllm-torch",
        run=_lazily("mxfp8_rows_vllm", "run_torch"),
        unsupported=_torch_reasons,
        precision=_in_float32,
        compile_key=_key,
        source=_vllm_source,
    ),
    Impl(
        name="torch-frexp",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_in_float32,
        compile_key=_key,
        source=bytes_of(_HERE / "mxfp8_rows.py"),
    ),
)
