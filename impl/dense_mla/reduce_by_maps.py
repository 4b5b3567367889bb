"""Who merges partial attention results by the maps of a plan, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.reduce_by_maps import Inputs, Outputs, ReduceCase
from cases.precision import Precision
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons

_HERE = Path(__file__).parent

# Heads for which AITER's reduction is compiled, by lanes.
AITER_HEADS = {
    64: (64,),
    128: (1, 2, 4, 8, 10, 16, 32, 40, 48, 64, 96, 128),
    512: (8, 16, 24, 32, 48, 64, 80, 96, 112, 128),
}


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.dense_mla.{module}").run(inputs))

    return run


def _run_torch(inputs: Inputs) -> Outputs:
    """A group at a time, by torch's softmax and logsumexp over its parts."""
    starts = inputs.group_start.tolist()
    for number in range(len(starts) - 1):
        bases = inputs.parts[starts[number] : starts[number + 1]].long()
        if len(bases) < 2:
            continue
        if inputs.groups is None:
            count = int(bases[1] - bases[0])
            span = slice(number * count, (number + 1) * count)
        else:
            span = slice(*inputs.groups[number].tolist())
        rows = bases[:, None] + torch.arange(span.stop - span.start, device=bases.device)
        live = torch.isfinite(inputs.partial_lse[rows])
        lse = inputs.partial_lse[rows].masked_fill(~live, -torch.inf)
        # Where nothing is live, softmax over minus infinities is NaN.
        weight = torch.softmax(lse, 0).masked_fill(~live, 0.0)
        values = inputs.partial_out[rows].masked_fill(~live[..., None], 0.0)
        inputs.out[span] = torch.einsum("prh,prhl->rhl", weight, values).to(inputs.out.dtype)
        if inputs.lse is not None:
            inputs.lse[span] = torch.logsumexp(lse, 0)
    return Outputs(inputs.out, inputs.lse)


def _aiter_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, ReduceCase)
    reasons = []
    if execution != "hip":
        reasons.append(f"execution={execution}: AITER's reduction is a compiled HIP kernel and needs an AMD device")
    if importlib.util.find_spec("aiter") is None:
        reasons.append("aiter is not installed")
    if case.heads not in AITER_HEADS.get(case.lanes, ()):
        known = ", ".join(map(str, AITER_HEADS.get(case.lanes, ()))) or "none"
        reasons.append(f"heads={case.heads} lanes={case.lanes}: AITER's reduction is compiled for {known} heads")
    return reasons


def _precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(probability="exact", flushes=execution != "interpreter", note="float32 weights and sums")


def _key(case: Case) -> str:
    assert isinstance(case, ReduceCase)
    return f"{case.lanes} {case.dtype} {case.with_lse} {case.mapped}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("reduce_by_maps_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "reduce_by_maps_triton.py"),
    ),
    Impl(
        name="torch-softmax",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "reduce_by_maps.py"),
    ),
    Impl(
        name="aiter-hip",
        run=_lazily("reduce_by_maps_aiter"),
        unsupported=_aiter_reasons,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "reduce_by_maps_aiter.py"),
    ),
)
