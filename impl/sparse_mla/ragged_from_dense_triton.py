"""How does our own kernel answer the packing of padded index rows?"""

from __future__ import annotations

from cases.sparse_mla.ragged_from_dense import Inputs, Outputs
from impl.sparse_mla import ragged_triton


def run(inputs: Inputs) -> Outputs:
    """Packs the rows into the memory of the call."""
    indices = inputs.indices.flatten(1)
    if indices.shape[1] > 1 and indices.stride(1) != 1:
        indices = indices.contiguous()
    ragged_triton.pack(inputs.flat, inputs.indptr, indices, inputs.lengths.contiguous(), inputs.num_rows)
    return Outputs(inputs.flat, inputs.indptr)
