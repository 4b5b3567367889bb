"""Who pads query heads and takes the real ones of a kernel's answer, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.pad_heads import Inputs, Outputs, PadCase
from impl.dense_mla import backend_vllm
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("bits")


def answer(
    inputs: Inputs, padded: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, kernel_out: torch.Tensor
) -> Outputs:
    """Padded queries and real heads, and how they lie in memory."""
    forms = [
        padded.is_contiguous(),
        _shares(padded, inputs.query),
        _shares(out, kernel_out),
        lse is not None and inputs.kernel_lse is not None and _shares(lse, inputs.kernel_lse),
    ]
    return Outputs(padded, out, lse, torch.tensor([int(form) for form in forms]))


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def real_heads(answered: torch.Tensor, heads: int) -> torch.Tensor:
    """The view of a kernel's answer [rows, kernel_heads, ...] that holds the real heads."""
    many = answered.shape[1]
    return answered[:, :heads] if many % heads else answered[:, :: many // heads]


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: an index of heads, and views."""
    query, many, lse = inputs.query, inputs.kernel_heads, inputs.kernel_lse
    heads = query.shape[1]
    head = torch.arange(many, device=query.device)
    source = head % heads if many % heads else torch.div(head, many // heads, rounding_mode="floor")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[query.element_size()]
    padded = query if many == heads else query.view(bits)[:, source].contiguous().view(query.dtype)
    real = None if lse is None else real_heads(lse, heads)
    return answer(inputs, padded, real_heads(inputs.kernel_out, heads), real, inputs.kernel_out)


def _run_ours(inputs: Inputs) -> Outputs:
    padded = importlib.import_module("impl.dense_mla.pad_heads_triton").pad(inputs.query, inputs.kernel_heads)
    heads, lse = inputs.query.shape[1], inputs.kernel_lse
    real = None if lse is None else real_heads(lse, heads)
    return answer(inputs, padded, real_heads(inputs.kernel_out, heads), real, inputs.kernel_out)


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.pad_heads_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, PadCase)
    del execution
    reasons = backend_vllm.missing(backend_vllm.IMPLEMENTATION, "_get_aiter_mla_decode", "_DCPDecodeRoute")
    if case.target in ("double", "odd"):
        reasons.append(f"target={case.target}: vLLM takes real heads of its own kernels only")
    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, PadCase)
    return f"{case.width} {case.dtype} {case.heads} {case.target}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "pad_heads_triton.py", _HERE / "pad_heads.py"),
    ),
    Impl(
        name="vllm-torch",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=backend_vllm.fingerprint,
    ),
    Impl(
        name="torch-index",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "pad_heads.py"),
    ),
)
