"""Who decides whether a prefill of dense MLA runs over FP8 casts, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.prefill_route import ROUTES, Inputs, Outputs, Prefill
from impl.dense_mla import backend_vllm
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("decisions")


def obstacles(inputs: Inputs, batch: Prefill) -> Iterator[str]:
    """Every reason why a batch cannot run over FP8 casts, one at a time."""
    if inputs.arch != "gfx950":
        yield f"arch={inputs.arch}"
    if not (inputs.attends and inputs.reduces):
        yield f"attends={inputs.attends}, reduces={inputs.reduces}"
    if inputs.cache not in {"fp8", "fp8_e4m3", "fp8_e5m2"}:
        yield f"cache={inputs.cache}"
    if inputs.model != "bfloat16":
        yield f"model={inputs.model}"
    if batch.heads > 128 and batch.heads % 16:
        yield f"heads={batch.heads}"
    if not batch.tokens or batch.context:
        yield f"tokens={batch.tokens}, context={batch.context}"


def _run_ours(inputs: Inputs) -> Outputs:
    """A batch runs over FP8 casts when nothing speaks against it."""
    for point, batch in enumerate(inputs.batches):
        taken = next(obstacles(inputs, batch), None) is None
        route = "ordinary" if not taken else "refused" if batch.scaled else "float8"
        inputs.out[point] = torch.tensor((int(taken), ROUTES.index(route)))
    return Outputs(inputs.out)


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.prefill_route_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return backend_vllm.missing(backend_vllm.BUILDER, backend_vllm.IMPLEMENTATION, backend_vllm.HELPER)


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=_run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "prefill_route.py"),
    ),
    Impl(
        name="vllm-host",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=backend_vllm.fingerprint,
    ),
)
