"""How does plain torch merge attention over a prefix with that over a suffix?

The share of a side is the logistic function of the difference of the log-sum-exps.
"""

from __future__ import annotations

import torch

from cases.dense_mla.merge_prefix_suffix import Inputs, Outputs


def run(inputs: Inputs) -> Outputs:
    """The merge, written into the output memory of `inputs`."""
    count = inputs.out.shape[0] if inputs.context is None else inputs.context
    prefix, suffix = (
        torch.where(torch.isposinf(lse), -torch.inf, lse).T for lse in (inputs.prefix_lse, inputs.suffix_lse)
    )
    prefix, suffix = prefix[:count], suffix[:count]
    # Two empty sides differ by NaN, and have no share.
    apart = (prefix - suffix)[..., None]
    first = torch.where(prefix[..., None] > -torch.inf, torch.sigmoid(apart), 0.0)
    second = torch.where(suffix[..., None] > -torch.inf, torch.sigmoid(-apart), 0.0)
    merged = torch.where(first == 0, 0.0, first * inputs.prefix[:count].float())
    merged = merged + torch.where(second == 0, 0.0, second * inputs.suffix[:count].float())
    _store(inputs.out[:count], merged, inputs.out_scale)
    _store(inputs.out[count:], inputs.suffix[count:], inputs.out_scale)
    if inputs.out_lse is not None:
        inputs.out_lse[:, :count] = torch.logaddexp(prefix, suffix).T
        inputs.out_lse[:, count:] = inputs.suffix_lse[:, count:]
    return Outputs(inputs.out, inputs.out_lse)


def _store(out: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None) -> None:
    if scale is not None:
        largest = torch.finfo(out.dtype).max
        values = (values.float() / scale).clamp(-largest, largest)
    out.copy_(values.to(out.dtype))
