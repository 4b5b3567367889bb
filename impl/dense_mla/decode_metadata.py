"""Who builds the metadata of a decode batch, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.decode_metadata import Inputs, MetadataCase, Outputs
from impl.dense_mla import backend_vllm
from impl.dense_mla.batch_shape import BatchShape, least_length, shape_of
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")


def answer(
    inputs: Inputs, shape: BatchShape, qo_indptr: torch.Tensor, kernel_lens: torch.Tensor, kv_indptr: torch.Tensor,
    global_indptr: torch.Tensor,
) -> Outputs:  # fmt: skip
    """The metadata round tables that were built, with what the host knows."""
    batch = inputs.batch
    verifies = inputs.route == "gluon" and shape.query > 1
    least = least_length(kernel_lens, batch.query_lens, shape.padded) if verifies else 1
    return Outputs(
        padded_query=torch.tensor([shape.query if shape.padded else 0]),
        query=torch.tensor([shape.query]),
        uniform=torch.tensor([] if inputs.route == "gluon" else [shape.uniform], dtype=torch.int64),
        least_kv=torch.tensor([least]),
        qo_indptr=qo_indptr,
        kernel_lens=kernel_lens,
        kv_indptr=kv_indptr,
        last_page_lens=torch.ones_like(kernel_lens),
        global_indptr=global_indptr,
        global_lens=batch.global_lens if inputs.route == "round_robin" else global_indptr,
    )


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.decode_metadata_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.decode_metadata_vllm").run(inputs))


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    starts = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: masks of the dummies, and running sums."""
    batch = inputs.batch
    shape = shape_of(batch.query_lens, batch.tokens)
    kernel_lens, whole, starts = batch.seq_lens, batch.global_lens, batch.query_start
    if shape.padded:
        dummy = batch.query_start.diff() == 0
        kernel_lens = kernel_lens.masked_fill(dummy, shape.query)
        whole = whole.masked_fill(dummy, shape.query * inputs.world)
    if shape.padded or (shape.query == 1 and not inputs.graphs):
        starts = shape.query * torch.arange(starts.numel(), dtype=torch.int32, device=starts.device)
    global_indptr = _starts(whole) if inputs.route == "round_robin" else whole.new_empty(0)
    return answer(inputs, shape, starts, kernel_lens, _starts(kernel_lens), global_indptr)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, MetadataCase)
    del execution
    reasons = backend_vllm.missing(backend_vllm.BUILDER)
    if case.requests == 0:
        reasons.append("requests=0: vLLM builds no metadata for a batch that decodes nothing")
    return reasons


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "batch_tables_triton.py", _HERE / "batch_shape.py", _HERE / "decode_metadata.py"),
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
        name="torch-masks",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "decode_metadata.py", _HERE / "batch_shape.py"),
    ),
)
