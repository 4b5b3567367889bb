"""How does plain torch merge attention parts?

By its own softmax over the parts: shares that sum to 1, then one weighted sum.
"""

from __future__ import annotations

import torch

from cases.dense_mla.merge_parts import Inputs, Outputs


def run(inputs: Inputs) -> Outputs:
    """The merge, written into the output memory of `inputs`."""
    lse = torch.where(torch.isfinite(inputs.lse), inputs.lse, -torch.inf)
    # A row without a part has shares of NaN.
    share = torch.softmax(lse, 0).nan_to_num(nan=0.0)[..., None]
    inputs.out.copy_(torch.where(share == 0, 0.0, share * inputs.parts.float()).sum(0))
    return Outputs(inputs.out, torch.logsumexp(lse, 0))
