"""Who decides whether a sparse prefill goes to AITER's OPUS kernel, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.sparse_mla.prefill_dispatch import FEWEST_QUERIES, Arch, Form, Inputs, Outputs, PrefillCall
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons
from impl.sources import settings, vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_source

VLLM_PREDICATE = "_can_use_aiter_sparse_prefill_opus"
VLLM_PREFILL = "rocm_sparse_attn_prefill"

_HERE = Path(__file__).parent
_EXACT = exact_but("a decision")
_TAKEN = {"bfloat16", "float16"}


def obstacles(call: PrefillCall, arch: Arch, whole_call: bool) -> Iterator[str]:
    """Every reason why a call cannot go to OPUS, one at a time; of a whole call, a longer sink is cut first."""
    query, heads = call.query, call.query.shape[1]
    if arch != "gfx950":
        yield f"arch={arch}"
    if whole_call and not call.opus:
        yield "AITER is off"
    if query.device == "cpu" or query.dtype not in _TAKEN or query.strides[-1] != 1 or query.shape[0] < FEWEST_QUERIES:
        yield f"query={query}"
    if call.out != query:
        yield f"out={call.out}"
    if (call.keys.dtype, call.keys.device) != (query.dtype, query.device):
        yield f"keys={call.keys}"
    if (call.keys.shape[1], call.keys.strides[1]) != (query.shape[2], 1):
        yield f"key lanes={call.keys}"
    sink: Form | None = call.sink
    if sink is None:
        yield "no sink"
        return
    logits = sink.shape
    if whole_call:
        logits = (min(heads, logits[0]), *logits[1:])
    if logits != (heads,) or (sink.dtype, sink.device) != ("float32", query.device):
        yield f"sink={sink}"


def run_ours(inputs: Inputs) -> Outputs:
    """A call goes to OPUS when nothing speaks against it."""
    whole_call = inputs.question == "call"
    decided = [next(obstacles(call, inputs.arch, whole_call), None) is None for call in inputs.calls]
    inputs.out.copy_(torch.tensor(decided, dtype=torch.bool))
    return Outputs(inputs.out)


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.prefill_dispatch_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return vllm.unsupported(settings.vllm_path(), {VLLM_MODULE: [VLLM_PREDICATE, VLLM_PREFILL]})


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "prefill_dispatch.py"),
    ),
    Impl(
        name="vllm-host",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=vllm_source,
    ),
)
