"""How does plain torch multiply attention rows with an output projection?

The rotation as complex numbers in fp32, rounded to bfloat16, and one fp32 product for each group.
"""

from __future__ import annotations

import torch

from cases.quant.wo_a_einsum import Inputs, Outputs
from impl.quant import wo_a_dequant_torch
from impl.quant.wo_a_dequant_call import Kept, Module
from impl.quant.wo_a_einsum_call import check


def run(inputs: Inputs) -> Outputs:
    """The product in a new tensor; raises `ValueError` or `TypeError`."""
    check(inputs)
    weight = Kept(wo_a_dequant_torch.dequantise).weight(
        Module(inputs.module), (inputs.groups, inputs.rank, inputs.width)
    )
    rows = _turned_back(inputs) if inputs.inverse_rope else inputs.rows
    slices = rows.reshape(rows.shape[0], inputs.groups, inputs.width).float()
    out = torch.bmm(slices.transpose(0, 1), weight.float().transpose(1, 2))
    return Outputs(out.transpose(0, 1).to(torch.bfloat16))


def _turned_back(inputs: Inputs) -> torch.Tensor:
    table = inputs.cos_sin[inputs.positions.long()]
    half = table.shape[1] // 2
    angles = torch.complex(table[:, :half], -table[:, half:])[:, None]
    rows = inputs.rows.float()
    pairs = rows[..., -2 * half :].unflatten(2, (half, 2)).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * angles).flatten(2)
    return torch.cat([rows[..., : -2 * half], turned], 2).bfloat16()
