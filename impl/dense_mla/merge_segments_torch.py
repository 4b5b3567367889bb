"""How does plain torch merge the segments of a decode?

It shifts every sum and mass to the row's maximum by a power of two, and divides the totals.
"""

from __future__ import annotations

import math

import torch

from cases.dense_mla.merge_segments import Inputs, Outputs


def run(inputs: Inputs) -> Outputs:
    """The merge, written into the output memory of `inputs`."""
    segments = inputs.sums.shape[2]
    length = inputs.lengths.long().clamp(min=0)
    whole = segments * inputs.tile
    span = ((length + whole - 1) // whole).clamp(min=1) * inputs.tile
    active = (length + span - 1) // span
    absent = (torch.arange(segments, device=length.device) >= active[:, None])[:, None]
    maxima = inputs.maxima.masked_fill(absent, -torch.inf)
    top = maxima.amax(2, keepdim=True)
    weight = torch.exp2(maxima - torch.where(torch.isneginf(top), 0.0, top))
    total = (inputs.masses.masked_fill(absent, 0.0) * weight).sum(2)
    values = (inputs.sums.masked_fill(absent[..., None], 0.0) * weight[..., None]).sum(2)
    inputs.out.copy_(torch.where(total[..., None] != 0, values / total[..., None], 0.0))
    return Outputs(inputs.out, torch.where(total != 0, (top[..., 0] + total.log2()) * math.log(2.0), -torch.inf))
