"""How does plain torch dequantise an output projection's weight?"""

from __future__ import annotations

import torch

from cases.quant.wo_a_dequant import Inputs, Outputs
from impl.quant.wo_a_dequant_call import Kept, Shape, three_calls


def dequantise(weight: torch.Tensor, scale: torch.Tensor | None, shape: Shape) -> torch.Tensor:
    """The bfloat16 weight [groups, rank, width], by torch's casts and a view of the weight in blocks."""
    if scale is None:
        return weight.to(torch.bfloat16, copy=True).view(shape)
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    elif scale.dtype == torch.float8_e8m0fnu:
        scale = (scale.view(torch.uint8).int() << 23).view(torch.float32)
    rows, columns = scale.shape
    blocks = weight.float().reshape(rows, weight.shape[0] // rows, columns, weight.shape[1] // columns)
    return (blocks * scale[:, None, :, None]).to(torch.bfloat16).reshape(shape)


def run(inputs: Inputs) -> Outputs:
    """The three calls; raises `ValueError` or `TypeError`."""
    return three_calls(inputs, Kept(dequantise).weight)
