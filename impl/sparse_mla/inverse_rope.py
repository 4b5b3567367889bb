"""Who turns attention rows back, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.precision import Precision
from cases.sparse_mla.inverse_rope import Inputs, Outputs, RotateCase
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.sources import settings, vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_source

VLLM_OUT_OF_PLACE = "_fused_inverse_rope_gptj"
VLLM_IN_PLACE = "rocm_inverse_rope_rows_"

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.sparse_mla.{module}").run(inputs))

    return run


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: pairs as complex numbers times the conjugate of the table's."""
    rows = inputs.source[inputs.rotated :].float()
    half = inputs.cos_sin.shape[1] // 2
    angles = inputs.cos_sin[inputs.positions[inputs.rotated :].long()]
    turn = torch.complex(angles[:, :half], angles[:, half:]).conj()[:, None]
    nope = rows.shape[2] - 2 * half
    pairs = torch.view_as_complex(rows[..., nope:].clone().unflatten(2, (half, 2)))
    turned = torch.view_as_real(pairs * turn).flatten(2)
    answer = torch.cat((rows[..., :nope], turned), dim=2).to(torch.bfloat16)
    if inputs.out is None:
        return Outputs(answer)
    inputs.out[inputs.rotated :] = answer
    return Outputs(inputs.out)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, RotateCase)
    del execution
    name = VLLM_IN_PLACE if case.form == "in_place" else VLLM_OUT_OF_PLACE
    return [*vllm.unsupported(settings.vllm_path(), {VLLM_MODULE: [name]}), *without_triton()]


def _precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(flushes=execution != "interpreter", note="float32 products and sums, fused or not")


def _key(case: Case) -> str:
    assert isinstance(case, RotateCase)
    return f"{case.rows} {case.nope} {case.rotary} {case.form} {case.integer}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("inverse_rope_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "inverse_rope_triton.py", _HERE.parent / "formats" / "codes_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("inverse_rope_vllm"),
        unsupported=_vllm_reasons,
        precision=_precision,
        compile_key=_key,
        source=vllm_source,
    ),
    Impl(
        name="torch-complex",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "inverse_rope.py"),
    ),
)
