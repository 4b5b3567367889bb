"""How does plain torch decode over pages, with the rounding points of a kernel?

All rows at once: their keys gathered into one rectangle, two batched products, exp(score - max) rounded to bf16 before the
second. It knows no segments.
"""

from __future__ import annotations

import torch

from cases.dense_mla.segmented_decode import Inputs, Outputs
from impl.dense_mla.segmented_decode_call import plain_query


def run(inputs: Inputs) -> Outputs:
    """The answer, written into the output memory of `inputs`."""
    tile, rank = inputs.tile, inputs.rank
    longest = max(0, int(inputs.lengths.max()))
    place = torch.arange(longest, device=inputs.lengths.device)
    absent = place >= inputs.lengths[:, None]
    page = inputs.table.long()[:, place // tile].masked_fill(absent, 0)
    keys = inputs.cache[page, place % tile, 0].float().masked_fill(absent[..., None], 0.0)
    score = plain_query(inputs).float() @ keys.transpose(1, 2) * (inputs.scale * inputs.cache_scale)
    score = score.masked_fill(absent[:, None], -torch.inf)
    lse = torch.logsumexp(score, 2)
    top = score.amax(2, keepdim=True) if longest else torch.full_like(lse, -torch.inf)[..., None]
    weight = torch.exp(score - torch.where(torch.isneginf(top), 0.0, top))
    values = weight.bfloat16().float() @ keys[..., :rank] * inputs.cache_scale
    total = weight.sum(2, keepdim=True)
    inputs.out.copy_(torch.where(total > 0, values / total, 0.0))
    return Outputs(inputs.out, lse)
