"""How does vLLM list the slots of decode tokens' top-k positions?"""

from __future__ import annotations

import contextlib

from cases.sparse_mla.decode_topk_ragged import Inputs, Outputs
from impl.sparse_mla import indices_vllm
from impl.sparse_mla.decode_topk_ragged import VLLM_NAME, VLLM_ONE_LAUNCH, VLLM_V41


def run(inputs: Inputs, module: str, one_launch: bool) -> Outputs:
    """The lists of the model in `module`; with `one_launch`, where its switch for small batches is on."""
    loader = indices_vllm.loader_for(inputs.flat, "gfx942")
    switched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if module == VLLM_V41:
        switched = loader.replaced(VLLM_ONE_LAUNCH, "enabled", lambda: one_launch)
    with switched:
        flat, indptr, lengths = loader.symbol(module, VLLM_NAME)(
            inputs.local, inputs.requests, inputs.table, inputs.block_size, inputs.valid
        )
    return Outputs(indices_vllm.without_leftovers(flat, indptr), indptr, lengths)
