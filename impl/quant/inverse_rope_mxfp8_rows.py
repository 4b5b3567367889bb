"""Who turns attention rows back and quantises them to MXFP8, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.precision import Precision
from cases.quant.inverse_rope_mxfp8_rows import Inputs, Outputs, RotateQuantiseCase
from cases.quant.mxfp8_rows import BLOCK
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.sources import settings, vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_source

VLLM_FUNCTION = "rocm_inverse_rope_mxfp8_rows"

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.quant.{module}").run(inputs))

    return run


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: every angle repeated for both lanes of its pair, the lanes of a pair swapped, a logarithm."""
    done = inputs.finished
    rows = inputs.rows[done:].float()
    angles = inputs.cos_sin[inputs.positions[done:].long()].unflatten(1, (2, -1))[:, None]
    cos, sin = angles.repeat_interleave(2, dim=3).unbind(2)
    staying, turning = rows.tensor_split([rows.shape[2] - inputs.cos_sin.shape[1]], dim=2)
    swapped = turning.unflatten(2, (-1, 2)).flip(3) * torch.tensor([1.0, -1.0], device=rows.device)
    turned = torch.cat((staying, turning * cos + swapped.flatten(2) * sin), dim=2)
    blocks = turned.flatten(1).unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(2).clamp(min=2.0**-126)
    byte = (torch.ceil(torch.log2(amax / 448.0)) + 127.0).clamp(0, 254)
    inputs.codes[done:] = (blocks * torch.exp2(127.0 - byte)[..., None]).flatten(1).to(torch.float8_e4m3fn)
    inputs.scales[done:] = byte.to(torch.uint8)
    return Outputs(inputs.codes, inputs.scales)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, RotateQuantiseCase)
    del execution
    reasons = [*vllm.unsupported(settings.vllm_path(), {VLLM_MODULE: [VLLM_FUNCTION]}), *without_triton()]
    if case.head_dim & (case.head_dim - 1):
        reasons.append(f"head_dim={case.head_dim}: vLLM's kernel takes a power of two")
    return reasons


def _precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(flushes=execution != "interpreter", note="float32 products and sums, fused or not")


def _key(case: Case) -> str:
    assert isinstance(case, RotateQuantiseCase)
    return f"{case.head_dim} {case.rotary} {case.integer}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("inverse_rope_mxfp8_rows_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(
            _HERE / "inverse_rope_mxfp8_rows_triton.py",
            _HERE / "mxfp8_triton.py",
            _HERE.parent / "formats" / "codes_triton.py",
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("inverse_rope_mxfp8_rows_vllm"),
        unsupported=_vllm_reasons,
        precision=_precision,
        compile_key=_key,
        source=vllm_source,
    ),
    Impl(
        name="torch-repeated",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "inverse_rope_mxfp8_rows.py"),
    ),
)
