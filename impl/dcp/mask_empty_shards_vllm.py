"""How does vLLM mask the rows to which a rank has nothing to add?"""

from __future__ import annotations

import torch

from cases.dcp.mask_empty_shards import Inputs, Outputs
from impl.dcp import vllm_modules
from impl.dcp.mask_empty_shards import VLLM_MASK, VLLM_PACK

# The packed rows carry an attention output too, of which nothing is asked here.
_LANES = 16


def run(inputs: Inputs) -> Outputs:
    """The function that masks before a gather."""
    mask = vllm_modules.loader_for(inputs.lse).symbol(vllm_modules.COLLECTIVES, VLLM_MASK)
    mask(inputs.lse, inputs.lengths, inputs.query_start)
    return Outputs(inputs.lse)


def run_packed(inputs: Inputs) -> Outputs:
    """What the kernel that packs for an all-to-all sends: two halves of a log-sum-exp behind each row of 16-bit numbers."""
    rows, heads = inputs.lse.shape
    output = torch.zeros(rows, heads, _LANES, dtype=torch.bfloat16, device=inputs.lse.device)
    sent = torch.zeros(1, rows, heads, _LANES + 2, dtype=torch.bfloat16, device=inputs.lse.device)
    pack = vllm_modules.loader_for(inputs.lse).symbol(vllm_modules.COLLECTIVES, VLLM_PACK)
    pack(output, inputs.lse, sent, 1, heads, _LANES, 2, inputs.lengths, inputs.query_start)
    bits = sent[0, :, :, _LANES:].contiguous().view(torch.int32).squeeze(-1)
    inputs.lse.view(torch.int32).copy_(bits)
    return Outputs(inputs.lse)
