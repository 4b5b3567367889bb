"""Is this a product of attention rows with an output projection that can be answered?"""

from __future__ import annotations

import torch

from cases.quant.wo_a_einsum import Inputs


def check(inputs: Inputs) -> None:
    """Raise `ValueError` or `TypeError` for rows that cannot be grouped, turned or multiplied as they are."""
    rows, cos_sin, positions = inputs.rows, inputs.cos_sin, inputs.positions
    if rows.dim() != 3 or rows.stride(2) != 1:
        raise ValueError(f"rows={list(rows.shape)}: should be [tokens, heads, head_dim] with lane stride 1")
    if rows.shape[1] % inputs.groups:
        raise ValueError(f"heads={rows.shape[1]}: should be a multiple of {inputs.groups}, the groups")
    if not inputs.inverse_rope:
        if rows.dtype != torch.bfloat16:
            raise TypeError(f"rows={rows.dtype}: should be torch.bfloat16, since no rotation rounds them")
        return
    rotary = cos_sin.shape[-1]
    if cos_sin.dtype != torch.float32 or cos_sin.stride(-1) != 1:
        raise TypeError(f"cos_sin={cos_sin.dtype}: should be torch.float32 with lane stride 1")
    if rotary <= 0 or rotary % 2:
        raise ValueError(f"rotary={rotary}: should be even and positive")
    if rotary >= rows.shape[2]:
        raise ValueError(f"rotary={rotary}: should be less than head_dim={rows.shape[2]}")
    if tuple(positions.shape) != tuple(rows.shape[:1]):
        raise ValueError(f"positions={list(positions.shape)}: should be [{rows.shape[0]}]")
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= cos_sin.shape[0]):
        raise ValueError(
            f"positions={int(positions.min())} to {int(positions.max())}: should be 0 to {cos_sin.shape[0] - 1}"
        )
