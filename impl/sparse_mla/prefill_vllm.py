"""How is vLLM's own sparse MLA prefill called?

Through the wrapper that production calls, `rocm_sparse_attn_prefill`, with the tensors of the case as they are. It is
loaded as gfx942's, whose route is always the Triton kernel: on gfx950 the wrapper hands large calls to AITER, which is an
implementation of its own here.
"""

from __future__ import annotations

from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader
from impl.sparse_mla.prefill import VLLM_PREFILL


def run(inputs: PrefillInputs) -> PrefillOutputs:
    """The wrapper's answer; it raises what it raises."""
    prefill = vllm_loader("gfx942", inputs.query.device).symbol(VLLM_MODULE, VLLM_PREFILL)
    prefill(
        q=inputs.query,
        kv=inputs.kv,
        indices=inputs.dense,
        topk_length=inputs.lengths,
        scale=inputs.scale,
        head_dim=inputs.nope_lanes + inputs.rope_lanes,
        nope_head_dim=inputs.nope_lanes,
        rope_head_dim=inputs.rope_lanes,
        attn_sink=inputs.sink,
        output=inputs.out,
        ragged_indices=inputs.indices,
        ragged_indptr=inputs.indptr,
    )
    return PrefillOutputs(inputs.out)
