"""Who decodes over a sharded cache, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.dcp.decode import DecodeCase, Inputs, Outputs
from cases.precision import Precision
from impl.dcp.combine import VLLM_FUNCTIONS, VLLM_MODULE, ranks_reasons
from impl.dense_mla import decode as attention
from impl.implementation import Execution, Impl, bytes_of, without_triton
from impl.sources import settings, vllm

_HERE = Path(__file__).parent
_MODULES = {VLLM_MODULE: tuple(VLLM_FUNCTIONS.values()), attention.VLLM_MODULE: (attention.ATTEND,)}


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.dcp.{module}").run(inputs))

    return run


def _torch_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, DecodeCase)
    return ranks_reasons(case.ranks, case.world, execution)


def _triton_reasons(case: Case, execution: Execution) -> list[str]:
    return [*without_triton(), *_torch_reasons(case, execution)]


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, DecodeCase)
    reasons = [*without_triton(), *_missing(settings.vllm_path())]
    if case.cache_dtype == "float8_e4m3fnuz" and execution == "cuda":
        reasons.append("cache_dtype=float8_e4m3fnuz: Triton has no FNUZ types on NVIDIA devices")
    if case.ranks == "processes":
        reasons.append("ranks=processes: vLLM's groups exist only in a server")
    if case.mode != "all_to_all" and case.world & (case.world - 1):
        reasons.append(f"world={case.world}: the kernel behind vLLM's all-gather takes a power of two of ranks")
    return reasons


@functools.cache
def _missing(path: Path | None) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, _MODULES))


def _vllm_source() -> bytes:
    path = settings.vllm_path()
    return b"" if _missing(path) else vllm.locate(path).fingerprint(list(_MODULES)).encode()


def _precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(
        # A device's exp is a product with log2(e) and an approximate exp2 of 2 ulps.
        exponential_ulps=2.0 if execution == "interpreter" else 8.0,
        flushes=execution != "interpreter",
        note="sums fp32; exp(score - max) to bf16 for the values only; every rank's answer, and its share, to bf16",
    )


def _vllm_precision(case: Case, execution: Execution) -> Precision:
    assert isinstance(case, DecodeCase)
    plain = _precision(case, execution)
    scaled = case.cache_dtype != "bfloat16"
    if case.world * case.heads_per_rank == 1:
        # One head a program, without matrix products: each product of two lanes is rounded before the sum.
        return Precision(
            probability="float32", query="bfloat16", key="bfloat16" if scaled else "exact",
            exponential_ulps=plain.exponential_ulps, flushes=plain.flushes, note="a head at a time; products to bf16",
        )  # fmt: skip
    return Precision(
        key="bfloat16" if scaled else "exact", exponential_ulps=plain.exponential_ulps, flushes=plain.flushes,
        note=f"scaled keys to bf16; {plain.note}",
    )  # fmt: skip


def _key(case: Case) -> str:
    assert isinstance(case, DecodeCase)
    return f"{case.latent_lanes} {case.rope_lanes} {case.cache_dtype} {case.page} {case.world} {case.mode} {case.reach}"


_SHARED = ("decode_call.py", "combine_call.py", "collectives.py", "ranks.py")
_ATTENTION = _HERE.parent / "dense_mla"

IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("decode_triton"),
        unsupported=_triton_reasons,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(*(_HERE / name for name in ("combine_triton.py", *_SHARED)), _ATTENTION / "decode_triton.py"),
    ),
    Impl(
        name="torch-bf16",
        run=_lazily("decode_torch"),
        unsupported=_torch_reasons,
        precision=_precision,
        compile_key=lambda case: case.op,
        by_shape=True,
        source=bytes_of(*(_HERE / name for name in ("combine_torch.py", *_SHARED)), _ATTENTION / "decode_torch.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("decode_vllm"),
        unsupported=_vllm_reasons,
        precision=_vllm_precision,
        compile_key=_key,
        source=_vllm_source,
    ),
)
