"""Which entries does each query of a sparse MLA prefill call read, in the one form that our kernels take?"""

from __future__ import annotations

import torch

from cases.sparse_mla.prefill_call import PrefillInputs, refuse_malformed
from impl.sparse_mla.decode_call import ragged_from_dense


def ragged_of(inputs: PrefillInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`indices` and `indptr`, contiguous, of their own integer type; raises `ValueError` or `TypeError` for no call."""
    refuse_malformed(inputs)
    if inputs.indices is not None and inputs.indptr is not None:
        return inputs.indices.contiguous(), inputs.indptr.contiguous()
    assert inputs.dense is not None
    return ragged_from_dense(inputs.dense, inputs.lengths, inputs.rows)
