"""How does vLLM answer the packing of padded index rows?"""

from __future__ import annotations

from cases.sparse_mla.ragged_from_dense import Inputs, Outputs
from impl.sparse_mla import indices_vllm
from impl.sparse_mla.ragged_from_dense import VLLM_MODULE, VLLM_NAME


def run(inputs: Inputs) -> Outputs:
    """The lists of `build_ragged_indices_from_dense`."""
    build = indices_vllm.builder(VLLM_MODULE, VLLM_NAME, inputs.flat)
    flat, indptr = build(inputs.indices, inputs.lengths, num_rows=inputs.num_rows)
    return Outputs(indices_vllm.without_leftovers(flat, indptr), indptr)
