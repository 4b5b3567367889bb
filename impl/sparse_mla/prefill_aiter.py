"""How is AITER's OPUS kernel asked for sparse MLA prefill?

As vLLM's wrapper asks it: the list as its first range of rows, and an empty second one. Dense lists are first reduced to
their valid entries, because the kernel takes every entry for a row.
"""

from __future__ import annotations

import importlib

import torch

from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from impl.sparse_mla.prefill_call import ragged_of

MODULE = "aiter.ops.pa_sparse_prefill_opus"


def run(inputs: PrefillInputs) -> PrefillOutputs:
    """The kernel's answer; it raises what it raises."""
    attend = importlib.import_module(MODULE).pa_sparse_prefill_opus
    indices, indptr = (tensor.to(torch.int32).contiguous() for tensor in ragged_of(inputs))
    kv = inputs.kv[:, 0]
    assert inputs.sink is not None
    sink = inputs.sink[: inputs.query.shape[1]].contiguous()
    attend(
        inputs.query, kv, indices, indptr, kv[:1], indices[:0], torch.zeros_like(indptr), sink, float(inputs.scale),
        out=inputs.out,
    )  # fmt: skip
    return PrefillOutputs(inputs.out)
