"""Who answers the sparse MLA forward over two packed caches, and what can each of them not be asked?

vLLM 0.33.0 has no caller of its own for it: without AITER it decodes by `rocm_sparse_attn_decode`, which reads the same
caches by the same lists, and gathers prefill rows first. `vllm-triton` is that decode. AITER's kernels for packed caches
are written in Gluon for gfx950; its generic Triton kernel reads plain rows.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.precision import Precision
from cases.sparse_mla.two_segment_forward import ForwardCase, Inputs, Outputs, decode_case
from impl.implementation import Execution, Impl, architecture, bytes_of, no_reasons, without_triton
from impl.sources import aiter, settings
from impl.sources.source_tree import source_tree
from impl.sparse_mla import decode

AITER_FORWARD = ("aiter.ops.triton.attention.sparse_mla", "sparse_mla_fwd")
"""The function that vLLM calls, with the caches' format inferred; older trees lack it."""
AITER_SPARSE = ("aiter.ops.triton.attention.pa_decode_sparse", "pa_decode_sparse")
AITER_KERNEL = "aiter.ops.triton._triton_kernels.attention.pa_decode_sparse"
AITER_GLUON_KERNEL = "aiter.ops.triton._gluon_kernels.gfx950.attention.pa_decode_sparse"

_HERE = Path(__file__).parent
_DECODE = {impl.name: impl for impl in decode.IMPLS}


def _lazily(module: str, function: str = "run") -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, getattr(importlib.import_module(f"impl.sparse_mla.{module}"), function)(inputs))

    return run


def _of_decode(name: str) -> Callable[[Case, Execution], list[str]]:
    def reasons(case: Case, execution: Execution) -> list[str]:
        assert isinstance(case, ForwardCase)
        return _DECODE[name].unsupported(decode_case(case), execution)

    return reasons


def _precision_of_decode(name: str) -> Callable[[Case, Execution], Precision]:
    def precision(case: Case, execution: Execution) -> Precision:
        assert isinstance(case, ForwardCase)
        return _DECODE[name].precision(decode_case(case), execution)

    return precision


def _key_of_decode(name: str) -> Callable[[Case], str]:
    def key(case: Case) -> str:
        assert isinstance(case, ForwardCase)
        return _DECODE[name].compile_key(decode_case(case))

    return key


@functools.cache
def _missing(path: Path | None, module: str, name: str) -> tuple[str, ...]:
    return tuple(aiter.unsupported(path, {module: [name]}))


def _parameters(path: Path | None, module: str, name: str) -> frozenset[str]:
    """The parameters of a function, from its text."""
    bound = source_tree(aiter.locate(path).root, "aiter").module(module).bindings[name][-1].statement
    if not isinstance(bound, ast.FunctionDef):
        return frozenset()
    return frozenset(arg.arg for arg in (*bound.args.posonlyargs, *bound.args.args, *bound.args.kwonlyargs))


def _entries_reasons(case: ForwardCase) -> list[str]:
    if case.entries == "any":
        return ["entries=any: AITER takes -1 for the only entry that is no slot"]
    return []


def _generic_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, ForwardCase)
    reasons = [*without_triton(), *_missing(settings.aiter_path(), *AITER_SPARSE), *_entries_reasons(case)]
    if execution == "cuda":
        reasons.append("AITER's kernels are launched with options of Triton's AMD backend")
    if case.sink == "absent":
        reasons.append("sink=absent: AITER's generic kernel always reads a sink")
    if case.splits & (case.splits - 1):
        reasons.append(f"splits={case.splits}: AITER's generic kernel merges a power of two of them")
    return reasons


def aiter_forward(path: Path | None) -> tuple[str, str] | None:
    """The module and the name of the function that reads two packed caches in this AITER; None when it has none."""
    if not _missing(path, *AITER_FORWARD):
        return AITER_FORWARD
    if not _missing(path, *AITER_SPARSE) and "extra_cache" in _parameters(path, *AITER_SPARSE):
        return AITER_SPARSE
    return None


def _gluon_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, ForwardCase)
    path = settings.aiter_path()
    reasons = [*without_triton(), *_entries_reasons(case)]
    if aiter_forward(path) is None:
        missing = _missing(path, *AITER_SPARSE)
        reasons += missing or [f"{aiter.locate(path)}: {AITER_SPARSE[1]} takes no second cache"]
    if execution == "interpreter":
        reasons.append("AITER reads packed caches by a Gluon kernel, which Triton's interpreter cannot run")
    elif execution == "cuda":
        reasons.append("AITER reads packed caches on gfx950 only")
    elif "gfx950" not in (name := architecture(execution)):
        reasons.append(f"AITER reads packed caches on gfx950 only, the device is {name}")
    return reasons


def _generic_precision(case: Case, execution: Execution) -> Precision:
    assert isinstance(case, ForwardCase)
    ours = _DECODE["ours-triton"].precision(decode_case(case), execution)
    return Precision(
        query="bfloat16", exponential_ulps=ours.exponential_ulps, output="bfloat16", flushes=ours.flushes,
        note="scale * log2(e) is folded into the query, which is rounded to bf16 again; exp2; partials fp32",
    )  # fmt: skip


def _gluon_precision(case: Case, execution: Execution) -> Precision:
    assert isinstance(case, ForwardCase)
    ours = _DECODE["ours-triton"].precision(decode_case(case), execution)
    # The function that came with a module of its own keeps split sums in bf16, its forerunner kept them in fp32.
    newer = aiter_forward(settings.aiter_path()) == AITER_FORWARD
    return Precision(
        exponential_ulps=ours.exponential_ulps, output="bfloat16", flushes=ours.flushes,
        partial="bfloat16" if newer else "float32",
        note=f"exp2 of scores scaled after the product; partials {'bf16' if newer else 'fp32'}",
    )  # fmt: skip


def _generic_key(case: Case) -> str:
    assert isinstance(case, ForwardCase)
    return f"{case.heads}/{case.splits}/{case.layout}/{case.reach}"


def _aiter_source(*kernels: str) -> Callable[[], bytes]:
    def source() -> bytes:
        path = settings.aiter_path()
        if _missing(path, *AITER_SPARSE):
            return b""
        found = aiter.locate(path)
        tree = source_tree(found.root, "aiter")
        modules = [AITER_FORWARD[0], AITER_SPARSE[0], *kernels]
        return found.fingerprint([module for module in modules if tree.has(module)]).encode()

    return source


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("two_segment_forward_routes", "ours"),
        unsupported=_of_decode("ours-triton"),
        precision=_precision_of_decode("ours-triton"),
        compile_key=_key_of_decode("ours-triton"),
        source=bytes_of(
            _HERE / "two_segment_forward_routes.py",
            _HERE / "decode_triton.py",
            _HERE / "decode_call.py",
            _HERE / "splits.py",
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_lazily("two_segment_forward_routes", "vllm"),
        unsupported=_of_decode("vllm-triton"),
        precision=_precision_of_decode("vllm-triton"),
        compile_key=_key_of_decode("vllm-triton"),
        source=_DECODE["vllm-triton"].source,
    ),
    Impl(
        name="aiter-triton",
        run=_lazily("two_segment_forward_aiter", "generic"),
        unsupported=_generic_reasons,
        precision=_generic_precision,
        compile_key=_generic_key,
        source=_aiter_source(AITER_KERNEL),
    ),
    Impl(
        name="aiter-gluon",
        run=_lazily("two_segment_forward_aiter", "packed"),
        unsupported=_gluon_reasons,
        precision=_gluon_precision,
        compile_key=_generic_key,
        source=_aiter_source(AITER_GLUON_KERNEL),
    ),
    Impl(
        name="torch-bf16",
        run=_lazily("two_segment_forward_routes", "plain"),
        unsupported=no_reasons,
        precision=_precision_of_decode("torch-bf16"),
        compile_key=_key_of_decode("torch-bf16"),
        by_shape=True,
        source=bytes_of(_HERE / "two_segment_forward_routes.py", _HERE / "decode_torch.py", _HERE / "decode_call.py"),
    ),
)
