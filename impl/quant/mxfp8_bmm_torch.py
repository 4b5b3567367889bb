"""How does plain torch multiply MXFP8 rows with a grouped MXFP8 weight?

Both operands are dequantised to float64, in which every scale byte is harmless, and multiplied group by group.
"""

from __future__ import annotations

import torch

from cases.quant.mxfp8_bmm import LANES, Inputs, Outputs
from impl.quant.mxfp8_bmm_call import checked


def run(inputs: Inputs) -> Outputs:
    """The product, written into `inputs.out`; raises `ValueError` or `TypeError`."""
    scale_rows = checked(inputs)
    weight = _dequantised(inputs.weight, inputs.weight_scale.repeat_interleave(scale_rows, 0))
    rows = _dequantised(inputs.a, inputs.a_scale)
    for group in range(inputs.groups):
        lanes = slice(group * weight.shape[1], (group + 1) * weight.shape[1])
        columns = slice(group * inputs.rank, (group + 1) * inputs.rank)
        inputs.out[:, columns] = rows[:, lanes] @ weight[columns].T
    return Outputs(inputs.out)


def _dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    factors = torch.exp2(scales.double() - 127).repeat_interleave(LANES, 1)
    return codes.float().double() * factors
