"""How does plain torch merge the splits of a decode without a plan?

Every row's slots at once: those that were not filled get the log-sum-exp of nothing, and torch's softmax the shares.
"""

from __future__ import annotations

import torch

from cases.dense_mla.split_stage2 import Inputs, Outputs


def run(inputs: Inputs) -> Outputs:
    """The merge, written into the output memory of `inputs`."""
    rows, splits, heads, lanes = inputs.partials.shape
    if inputs.answer_packed:
        answer = inputs.partials.view(inputs.out.dtype).flatten()[: rows * heads * lanes]
        inputs.out.copy_(answer.view(rows, heads, lanes))
        return Outputs(inputs.out, inputs.lse[:, 0, :, 0].clone())
    filled = torch.minimum(
        inputs.split_starts.diff(), (inputs.key_starts.diff() + inputs.granularity - 1) // inputs.granularity
    )
    if inputs.exported is not None:
        filled = torch.minimum(filled, inputs.exported)
    filled = filled.repeat_interleave(inputs.query_starts.diff().long())
    void = torch.arange(splits, device=filled.device) >= filled[:, None]
    lse = inputs.lse[..., 0].masked_fill(void[..., None], -torch.inf)
    share = torch.softmax(lse, 1).nan_to_num(nan=0.0)[..., None]
    inputs.out.copy_(torch.where(share == 0, 0.0, share * inputs.partials).sum(1))
    return Outputs(inputs.out, torch.logsumexp(lse, 1))
