"""Who answers dense MLA decode, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.decode import DecodeCase
from cases.dense_mla.decode_call import DecodeInputs, DecodeOutputs
from cases.precision import Precision, Rounding
from impl.implementation import (
    PRODUCTS,
    Execution,
    Impl,
    bytes_of,
    machine_code_of,
    needs_triton,
    no_reasons,
    without_triton,
)
from impl.sources import aiter, settings, vllm

VLLM_MODULE = "vllm.v1.attention.ops.triton_decode_attention"
AITER_MODULE = "aiter.ops.triton.attention.mla_decode"
ATTEND = "decode_attention_fwd"
"""The function over pages of tokens, one row of a batch after the other; AITER's comes from vLLM's."""
AITER_GLUON = ("aiter.ops.triton.gluon.mla_gluon", "mla_gluon")

_HERE = Path(__file__).parent
_LANES = (512, 64)


def _lazily(module: str, function: str = "run") -> Callable[[DecodeInputs], DecodeOutputs]:
    def run(inputs: DecodeInputs) -> DecodeOutputs:
        return cast(DecodeOutputs, getattr(importlib.import_module(f"impl.dense_mla.{module}"), function)(inputs))

    return run


@functools.cache
def _missing_vllm(path: Path | None) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {VLLM_MODULE: [ATTEND]}))


@functools.cache
def _missing_aiter(path: Path | None, module: str, name: str) -> tuple[str, ...]:
    return tuple(aiter.unsupported(path, {module: [name]}))


def _paged_reasons(case: DecodeCase, execution: Execution) -> list[str]:
    """What the function of pages excludes, vLLM's and AITER's alike."""
    reasons = []
    if case.quantised_query:
        reasons.append("quantised_query=yes: the kernel decodes the cache into the query's type, which has to hold it")
    if case.cache_dtype == "float8_e4m3fnuz" and execution == "cuda":
        reasons.append("cache_dtype=float8_e4m3fnuz: Triton has no FNUZ types on NVIDIA devices")
    return reasons


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, DecodeCase)
    return [*without_triton(), *_missing_vllm(settings.vllm_path()), *_paged_reasons(case, execution)]


def _aiter_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, DecodeCase)
    reasons = [*without_triton(), *_missing_aiter(settings.aiter_path(), AITER_MODULE, ATTEND)]
    if execution == "cuda":
        reasons.append("AITER's kernels are launched with options of Triton's AMD backend")
    return [*reasons, *_paged_reasons(case, execution)]


def kernel_heads(heads: int) -> int:
    """The heads of the assembly kernel that serves so many: the next multiple of 16."""
    return -(-heads // 16) * 16


def _architecture(execution: Execution) -> str:
    """The architecture whose machine code an execution runs, without features; empty where it is none of AMD's."""
    if execution == "hip":
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    return machine_code_of(execution)


def _asm_reasons(case: Case, execution: Execution) -> list[str]:
    """What the kernels are built for, and what a call of them without a plan leaves out."""
    assert isinstance(case, DecodeCase)
    reasons = []
    arch = _architecture(execution)
    if arch not in ("gfx942", "gfx950"):
        reasons.append(f"on={execution}: AITER's MLA decode is machine code for gfx942 and gfx950")
    if importlib.util.find_spec("aiter") is None:
        reasons.append("aiter is not installed")
    if (case.latent_lanes, case.rope_lanes) != _LANES:
        reasons.append(f"{case.latent_lanes}+{case.rope_lanes} lanes: the kernels are built for 512+64")
    if case.heads > 128 and case.heads % 16:
        reasons.append(f"heads={case.heads}: AITER asm needs at most 128, or a multiple of 16")
    if case.output == "float32":
        reasons.append("output=float32: the kernels write bfloat16")
    if case.pages == "padded" or case.reach == "far_cache":
        reasons.append("the kernels read one flat cache without gaps between pages")
    encoding = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}.get(arch, case.cache_dtype)
    if case.cache_dtype not in ("bfloat16", encoding):
        reasons.append(f"cache_dtype={case.cache_dtype}: fp8 on {arch} is {encoding}")
    if case.mode == "round_robin":
        reasons.append(
            "mode=round_robin: the kernels need a plan with round-robin tiles, which this call does not make"
        )
    if case.mode == "whole" and case.qlen > 1:
        if arch == "gfx942":
            reasons.append("mode=whole: kernels for blocks that are not causal exist on gfx950 only")
        if case.qlen == 2 and case.cache_dtype != "bfloat16" and kernel_heads(case.heads) not in (32, 64, 96, 128):
            reasons.append(f"heads={case.heads}: fp8 blocks of two that are not causal need 32, 64, 96 or 128 heads")
    return reasons


def _gluon_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, DecodeCase)
    reasons = [*without_triton(), *_missing_aiter(settings.aiter_path(), *AITER_GLUON)]
    if execution == "interpreter":
        reasons.append("it is a Gluon kernel, which Triton's interpreter cannot run")
    elif _architecture(execution) != "gfx950":
        reasons.append(f"on={execution}: the Gluon kernel is for gfx950 only")
    if (case.latent_lanes, case.rope_lanes) != _LANES:
        reasons.append(f"{case.latent_lanes}+{case.rope_lanes} lanes: the Gluon kernel is built for 512+64")
    if case.quantised_query:
        reasons.append("quantised_query=yes: the Gluon kernel takes queries of bfloat16")
    if case.cache_dtype == "float8_e4m3fnuz":
        reasons.append("cache_dtype=float8_e4m3fnuz: the Gluon kernel takes bfloat16 and float8_e4m3fn")
    if case.mode == "round_robin" or (case.mode == "whole" and case.qlen > 1):
        reasons.append(f"mode={case.mode}: the Gluon kernel masks blocks by their own causal order")
    if case.page > 1 and (case.pages == "padded" or case.reach == "far_cache"):
        reasons.append("the Gluon kernel reads one flat cache without gaps between pages")
    if case.heads in (64, 128):
        requests = case.requests + (0 if case.padding == "none" else 2)
        if requests % 64 or case.cache_dtype != "bfloat16":
            reasons.append(f"heads={case.heads}: the Gluon kernel takes multiples of 64 requests over bfloat16")
    elif case.heads > 96:
        reasons.append(f"heads={case.heads}: the Gluon kernel takes up to 96, or 128")
    return reasons


def _declared(
    execution: Execution, note: str, *, probability: Rounding = "bfloat16", query: Rounding = "exact",
    key: Rounding = "exact", partial: Rounding = "float32", averaged: bool = True,
) -> Precision:  # fmt: skip
    return Precision(
        probability=probability, query=query, key=key, partial=partial, averaged=averaged,
        # A device's exp is a product with log2(e) and an approximate exp2 of 2 ulps.
        exponential_ulps=1.0 if execution == "interpreter" else 8.0,
        flushes=execution != "interpreter",
        note=f"{PRODUCTS[execution]}; {note}",
    )  # fmt: skip


def _precision(case: Case, execution: Execution) -> Precision:
    del case
    return _declared(
        execution, "keys exact in bf16; sums and partials fp32; exp(score - max) to bf16 for the values only"
    )


def _key_rounding(case: DecodeCase) -> Rounding:
    """How a key is rounded that is scaled into bf16: a power of two leaves it exact."""
    return "bfloat16" if case.cache_dtype != "bfloat16" and case.scales == "odd" else "exact"


def _vllm_precision(case: Case, execution: Execution) -> Precision:
    assert isinstance(case, DecodeCase)
    if case.heads == 1:
        return _by_head(case, execution)
    return _declared(execution, "scaled keys to bf16; exp(score - max) to bf16; partials fp32", key=_key_rounding(case))


def _aiter_precision(case: Case, execution: Execution) -> Precision:
    assert isinstance(case, DecodeCase)
    if case.heads == 1 or case.latent_lanes + case.rope_lanes >= sum(_LANES):
        return _by_head(case, execution)
    return _declared(execution, "scaled keys to bf16; exp(score - max) to bf16; partials fp32", key=_key_rounding(case))


def _by_head(case: DecodeCase, execution: Execution) -> Precision:
    """One head a program, without matrix products: each product of two bf16 lanes is rounded to bf16 before the sum.

    That the kernel goes on to keep the sum in bf16 too is nothing that anyone has declared: large scores fail.
    """
    return _declared(
        execution, "a head at a time; every product of a score to bf16, the values in fp32", probability="float32",
        query="bfloat16", key=_key_rounding(case),
    )  # fmt: skip


def _asm_precision(case: Case, execution: Execution) -> Precision:
    assert isinstance(case, DecodeCase)
    probability: Rounding = case.cache_dtype if case.quantised_query else "bfloat16"
    return _declared(execution, f"exp(score - max) taken to be rounded to {probability}", probability=probability)


def _gluon_precision(case: Case, execution: Execution) -> Precision:
    assert isinstance(case, DecodeCase)
    return _declared(execution, f"partials in the output's {case.output}", partial=case.output)


def _compile_key(case: Case) -> str:
    assert isinstance(case, DecodeCase)
    parts = (
        case.mode, case.latent_lanes, case.rope_lanes, case.cache_dtype, case.quantised_query, case.output, case.layout,
        case.splits, case.reach,
    )  # fmt: skip
    return "/".join(str(part) for part in parts)


def _paged_key(case: Case) -> str:
    assert isinstance(case, DecodeCase)
    return f"{case.heads}/{case.page}/{_compile_key(case)}"


def _torch_key(case: Case) -> str:
    return case.op


def _vllm_source() -> bytes:
    path = settings.vllm_path()
    return b"" if _missing_vllm(path) else vllm.locate(path).fingerprint([VLLM_MODULE]).encode()


def _aiter_source(module: str, name: str) -> Callable[[], bytes]:
    def source() -> bytes:
        path = settings.aiter_path()
        return b"" if _missing_aiter(path, module, name) else aiter.locate(path).fingerprint([module]).encode()

    return source


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("decode_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_compile_key,
        source=bytes_of(_HERE / "decode_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("decode_vllm"),
        unsupported=_vllm_reasons,
        precision=_vllm_precision,
        compile_key=_paged_key,
        source=_vllm_source,
    ),
    Impl(
        name="aiter-triton",
        run=_lazily("decode_aiter", "paged"),
        unsupported=_aiter_reasons,
        precision=_aiter_precision,
        compile_key=_paged_key,
        source=_aiter_source(AITER_MODULE, ATTEND),
    ),
    Impl(
        name="aiter-asm",
        run=_lazily("decode_aiter", "assembly"),
        unsupported=_asm_reasons,
        precision=_asm_precision,
        compile_key=_paged_key,
        source=bytes_of(_HERE / "decode_aiter.py"),
    ),
    Impl(
        name="aiter-gluon",
        run=_lazily("decode_aiter", "gluon"),
        unsupported=_gluon_reasons,
        precision=_gluon_precision,
        compile_key=_paged_key,
        source=_aiter_source(*AITER_GLUON),
    ),
    Impl(
        name="torch-bf16",
        run=_lazily("decode_torch"),
        unsupported=no_reasons,
        precision=_precision,
        compile_key=_torch_key,
        by_shape=True,
        source=bytes_of(_HERE / "decode_torch.py", _HERE / "decode_rows.py"),
    ),
)
