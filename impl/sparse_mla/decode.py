"""Who answers sparse MLA decode, and what can each of them not be asked?"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.precision import Precision
from cases.sparse_mla.decode import DecodeCase, DecodeInputs, DecodeOutputs
from impl.implementation import PRODUCTS, Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.sources import settings, triton_language, vllm
from impl.sources.execution import execution_on
from impl.sources.source_tree import source_tree
from impl.sparse_mla import splits as split_rules

VLLM_MODULE = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
VLLM_WRAPPER = "rocm_sparse_attn_decode"
VLLM_HEURISTICS: Mapping[str, str] = {"gfx942": "_decode_num_splits", "gfx950": "_decode_gfx950_num_splits"}

_HERE = Path(__file__).parent


def _lazily(module: str) -> Callable[[DecodeInputs], DecodeOutputs]:
    def run(inputs: DecodeInputs) -> DecodeOutputs:
        return cast(DecodeOutputs, importlib.import_module(f"impl.sparse_mla.{module}").run(inputs))

    return run


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, DecodeCase)
    path = settings.vllm_path()
    reasons = without_triton()
    forced = VLLM_HEURISTICS.get(case.arch) if case.splits else None
    reasons += _missing(path, (VLLM_WRAPPER, *([forced] if forced else [])))
    if case.extra_length >= 0 and case.extra_encoding != "float8_e4m3fn":
        reasons.append(f"extra_encoding={case.extra_encoding}: vLLM reads the extra cache as float8_e4m3fn everywhere")
    if case.main_encoding == "float8_e4m3fnuz" and execution == "cuda":
        reasons.append("main_encoding=float8_e4m3fnuz: Triton has no FNUZ types on NVIDIA devices")
    if case.arch == "gfx950" and execution == "interpreter" and not reasons:
        reasons += triton_language.interpreter_lacks("cat")
    if case.arch == "other" and case.splits > 1:
        reasons.append(f"splits={case.splits}: vLLM has no split route on arch=other")
    if not reasons:
        known = _parameters(path)
        for asked, name, axis in (
            (case.trust_extra, "extra_cache_nan_free", "trust_extra=yes"),
            (case.adaptive, "adaptive_splits", "adaptive=yes"),
            (case.rotation != "none", "inv_rope_positions", f"rotation={case.rotation}"),
            (case.output == "mxfp8", "output_mxfp8", "output=mxfp8"),
        ):
            if asked and name not in known:
                reasons.append(f"{axis}: this vLLM's {VLLM_WRAPPER} has no {name}")
    return reasons


def vllm_loader(arch: vllm.Architecture, device: torch.device) -> vllm.Loader:
    """What loads the configured vLLM for `arch`, to run on `device`: on the CPU, in Triton's interpreter."""
    execution = execution_on(device)
    return vllm.load(vllm.locate(settings.vllm_path()), vllm.Platform(arch), execution)


@functools.cache
def _missing(path: Path | None, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {VLLM_MODULE: names}))


@functools.cache
def _parameters(path: Path | None) -> frozenset[str]:
    """The parameters of the wrapper, from its text."""
    bound = source_tree(vllm.locate(path).root, "vllm").module(VLLM_MODULE).bindings[VLLM_WRAPPER][-1].statement
    if not isinstance(bound, ast.FunctionDef):
        return frozenset()
    return frozenset(arg.arg for arg in (*bound.args.posonlyargs, *bound.args.args, *bound.args.kwonlyargs))


def vllm_source() -> bytes:
    """The hash of the module that holds vLLM's wrapper, kernels and heuristics; empty without one."""
    path = settings.vllm_path()
    if _missing(path, ()):
        return b""
    return vllm.locate(path).fingerprint([VLLM_MODULE]).encode()


# CUDA's and ROCm's exp are a product with log2(e) and an approximate exp2 of 2 ulps; the product's rounding adds half
# an ulp for every unit of the exponent, and what lies far below the maximum weighs nothing.
_DEVICE_EXPONENTIAL = 8.0
_INTERPRETED_EXPONENTIAL = 1.0


def _exponential(execution: Execution) -> float:
    return _INTERPRETED_EXPONENTIAL if execution == "interpreter" else _DEVICE_EXPONENTIAL


def _ours_precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(
        exponential_ulps=_exponential(execution),
        flushes=execution != "interpreter",
        note=f"{PRODUCTS[execution]}; sums and partials fp32; exp(score - max) to bf16 for the values only",
    )


def _torch_precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(
        exponential_ulps=_exponential(execution),
        flushes=execution != "interpreter",
        note="torch fp32 products without TF32; exp(score - max) to bf16 for the values",
    )


def _vllm_precision(case: Case, execution: Execution) -> Precision:
    assert isinstance(case, DecodeCase)
    base = "exp2 of scores scaled by log2(e)" if case.arch == "gfx950" else "exp of scaled scores"
    return Precision(
        exponential_ulps=_exponential(execution),
        output="bfloat16",
        flushes=execution != "interpreter",
        note=f"{PRODUCTS[execution]}; {base}, to bf16 for the values; other outputs than MXFP8 are bf16, copied",
    )


def _splits(case: DecodeCase) -> int:
    """The split count as far as the axes tell: a ragged call's true capacity is in its data."""
    if case.splits:
        return case.splits
    load = split_rules.load_of(
        case.queries,
        case.heads,
        case.queries * case.main_length,
        case.queries * max(0, case.extra_length),
        case.compute_units,
    )
    return split_rules.split_count(case.arch, load)


def _compile_key(case: Case) -> str:
    assert isinstance(case, DecodeCase)
    parts = (
        case.arch, _splits(case), case.adaptive, case.extra_length >= 0, case.main_encoding, case.extra_encoding,
        case.trust_extra, case.sink == "absent", case.rotation != "none", case.output, case.integers, case.layout,
    )  # fmt: skip
    return "/".join(str(part) for part in parts)


def _torch_key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("decode_triton"),
        unsupported=needs_triton,
        precision=_ours_precision,
        compile_key=_compile_key,
        source=bytes_of(_HERE / "decode_triton.py", _HERE / "decode_call.py", _HERE / "splits.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("decode_vllm"),
        unsupported=_vllm_reasons,
        precision=_vllm_precision,
        compile_key=_compile_key,
        source=vllm_source,
    ),
    Impl(
        name="torch-bf16",
        run=_lazily("decode_torch"),
        unsupported=no_reasons,
        precision=_torch_precision,
        compile_key=_torch_key,
        by_shape=True,
        source=bytes_of(_HERE / "decode_torch.py", _HERE / "decode_call.py"),
    ),
)
