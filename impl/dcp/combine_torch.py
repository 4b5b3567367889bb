"""How does plain torch merge the answers of ranks?

Weights are normalised by a division, and a message is put together by views of bits: another way than the kernels'.
"""

from __future__ import annotations

import sys

import torch

from cases.dcp.combine import Base, Inputs, Outputs
from impl.dcp import combine_call


def run(inputs: Inputs) -> Outputs:
    """The merge of all ranks; raises `ValueError` for what is no call."""
    return combine_call.run(sys.modules[__name__], inputs)


def _weights(lses: torch.Tensor, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the ranks, which sum to 1 or 0, and the log-sum-exp of all."""
    lses = torch.nan_to_num(lses, nan=float("-inf"), posinf=float("-inf"), neginf=float("-inf"))
    top = lses.amax(0).clamp(min=torch.finfo(torch.float32).min)
    power, logarithm = (torch.exp, torch.log) if base == "natural" else (torch.exp2, torch.log2)
    weights = power(lses - top)
    total = weights.sum(0)
    some = total > 0
    return weights / torch.where(some, total, 1.0), torch.where(some, top + logarithm(total), float("-inf"))


def scaled(out: torch.Tensor, lses: torch.Tensor, rank: int, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share, rounded to the answer's dtype, and the log-sum-exp of all ranks."""
    weights, lse = _weights(lses, base)
    weight = weights[rank][..., None]
    return torch.where(weight > 0, out.float() * weight, 0.0).to(out.dtype), lse


def packed(out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor | None, world: int) -> torch.Tensor:
    """The messages to all ranks, in the answer's dtype."""
    words = torch.int16 if out.element_size() == 2 else torch.int32
    bits = lse.contiguous().view(torch.int32)
    if empty is not None:
        bits = bits.masked_fill(empty.bool()[:, None], -0x800000)
    # A little-endian machine holds the low half first.
    message = torch.cat([out.contiguous().view(words), bits[..., None].view(words)], -1)
    runs: torch.Tensor = message.unflatten(1, (world, -1))
    return runs.movedim(1, 0).contiguous().view(out.dtype)


def merged(received: torch.Tensor, lanes: int, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer and log-sum-exp of the own heads."""
    words = torch.int16 if received.element_size() == 2 else torch.int32
    bits = received.view(words)[..., lanes:].contiguous().view(torch.int32)[..., 0]
    weights, lse = _weights(bits.view(torch.float32), base)
    shares = torch.where(weights[..., None] > 0, received[..., :lanes].float() * weights[..., None], 0.0)
    return shares.sum(0).to(received.dtype), lse
