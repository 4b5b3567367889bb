"""How does vLLM list the slots of prefill tokens' top-k positions?"""

from __future__ import annotations

from cases.sparse_mla.prefill_topk_ragged import Inputs, Outputs
from impl.sparse_mla import indices_vllm
from impl.sparse_mla.prefill_topk_ragged import VLLM_MODULE, VLLM_NAME


def run(inputs: Inputs) -> Outputs:
    """The lists of `build_prefill_topk_ragged_indices`."""
    flat, indptr = indices_vllm.builder(VLLM_MODULE, VLLM_NAME, inputs.flat)(
        inputs.local, inputs.requests, inputs.query_start, inputs.seq_lens, inputs.valid, inputs.table,
        block_size=inputs.block_size, compress_ratio=inputs.ratio, num_compressed=inputs.num_compressed,
        token_offset=inputs.token_offset, num_rows=inputs.num_rows,
    )  # fmt: skip
    return Outputs(indices_vllm.without_leftovers(flat, indptr), indptr)
