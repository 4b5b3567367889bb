"""Who answers causal prefill over FP8 casts, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.fp8_prefill import LARGEST, Inputs, Outputs, PrefillCase
from cases.precision import Precision
from impl.dense_mla import backend_vllm
from impl.dense_mla.reduce_by_maps import AITER_HEADS
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.dense_mla.{module}").run(inputs))

    return run


def _run_torch(inputs: Inputs) -> Outputs:
    """All heads of a request at a time, by batched products over torch's own cast."""
    query, key, value = (
        one.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() for one in (inputs.query, inputs.key, inputs.value)
    )
    out = inputs.out.unflatten(1, value.shape[1:])
    starts = inputs.query_start.tolist()
    for number in range(len(starts) - 1):
        rows = slice(starts[number], starts[number + 1])
        score = torch.baddbmm(
            torch.full((1, 1, 1), 0.0, device=query.device), query[rows].transpose(0, 1), key[rows].permute(1, 2, 0),
            beta=0, alpha=inputs.scale,
        )  # fmt: skip
        score.masked_fill_(torch.ones_like(score[0], dtype=torch.bool).triu_(1), -torch.inf)
        weight = (score - score.amax(2, keepdim=True)).exp_()
        merged = torch.bmm(weight, value[rows].transpose(0, 1)) / weight.sum(2, keepdim=True)
        out[rows] = merged.transpose(0, 1).to(out.dtype)
    return Outputs(inputs.out)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case
    reasons = backend_vllm.missing(backend_vllm.IMPLEMENTATION, backend_vllm.HELPER)
    if execution != "interpreter":
        reasons.append(f"execution={execution}: stand-ins for AITER's kernels run on the CPU")
    return reasons


def _aiter_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, PrefillCase)
    reasons = []
    if execution != "hip" or not torch.cuda.get_device_properties(0).gcnArchName.startswith("gfx950"):
        reasons.append(f"execution={execution}: AITER's FP8 prefill kernel is assembly for gfx950")
    if importlib.util.find_spec("aiter") is None:
        reasons.append("aiter is not installed")
    if case.width != "model":
        reasons.append(f"width={case.width}: AITER's kernel has 192 lanes of queries and 128 of values")
    heads = -(-case.heads // 16) * 16
    if heads not in AITER_HEADS[128]:
        reasons.append(f"heads={case.heads}: AITER's reduction is not compiled for {heads} heads of 128 lanes")
    return reasons


def _single(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(probability="exact", flushes=execution != "interpreter", note="float32 weights and sums")


def _planned(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(
        probability="exact", averaged=True, flushes=execution != "interpreter",
        note="float32 weights and sums; parts of a row are merged by their log-sum-exps",
    )  # fmt: skip


def _flash(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(flushes=execution != "interpreter", note="weights rounded to bfloat16 before they multiply values")


def _assembly(case: Case, execution: Execution) -> Precision:
    del case, execution
    return Precision(
        probability="float8_e4m3fn", averaged=True, note="assumed: the kernel is assembly, and its values are FP8"
    )


def _key(case: Case) -> str:
    assert isinstance(case, PrefillCase)
    return case.width


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("fp8_prefill_triton"),
        unsupported=needs_triton,
        precision=_flash,
        compile_key=_key,
        source=bytes_of(_HERE / "fp8_prefill_triton.py", _HERE.parent / "formats" / "codes_triton.py"),
    ),
    Impl(
        name="torch-bmm",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_single,
        compile_key=_key,
        by_shape=True,
        source=bytes_of(_HERE / "fp8_prefill.py"),
    ),
    Impl(
        name="vllm-host",
        run=_lazily("fp8_prefill_vllm"),
        unsupported=_vllm_reasons,
        precision=_planned,
        compile_key=_key,
        source=backend_vllm.fingerprint,
    ),
    Impl(
        name="aiter-asm",
        run=_lazily("fp8_prefill_aiter"),
        unsupported=_aiter_reasons,
        precision=_assembly,
        compile_key=_key,
        source=bytes_of(_HERE / "fp8_prefill_aiter.py"),
    ),
)
