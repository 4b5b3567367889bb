"""How are vLLM's own merges of attention parts called?

A part is what one rank of context-parallel decode holds. `_lse_weighted_combine` takes the parts as they are;
`_dcp_a2a_unpack_combine` takes them as they arrive from the exchange between ranks, each vector followed by the bits of its
log-sum-exp.
"""

from __future__ import annotations

import torch

from cases.dense_mla.merge_parts import Inputs, Outputs
from impl.dense_mla.merge_modules import DCP, loader
from impl.dense_mla.merge_parts import COMBINE, UNPACK_COMBINE


def combined(inputs: Inputs) -> Outputs:
    """The plain torch combine."""
    out, lse = loader(inputs.parts.device).symbol(DCP, COMBINE)(inputs.parts, inputs.lse, return_lse=True)
    inputs.out.copy_(out)
    return Outputs(inputs.out, lse)


def unpacked(inputs: Inputs) -> Outputs:
    """The kernel that unpacks and combines; its answer is copied into the output memory of `inputs`."""
    parts = inputs.parts
    lanes = parts.shape[3]
    # fp32's 4 bytes are two lanes of a two-byte dtype, low half first.
    extra = 4 // parts.element_size()
    received = torch.empty((*parts.shape[:3], lanes + extra), dtype=parts.dtype, device=parts.device)
    received[..., :lanes] = parts
    bits = inputs.lse.reshape(*parts.shape[:3], 1).clone(memory_format=torch.contiguous_format)
    received.view(torch.int16 if extra == 2 else torch.int32)[..., lanes:] = bits.view(
        torch.int16 if extra == 2 else torch.int32
    )
    out, lse = loader(parts.device).symbol(DCP, UNPACK_COMBINE)(
        received, head_dim=lanes, lse_pack_dim=extra, return_lse=True, is_lse_base_on_e=True
    )
    inputs.out.copy_(out)
    return Outputs(inputs.out, lse)
