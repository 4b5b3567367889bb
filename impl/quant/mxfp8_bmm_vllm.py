"""How is vLLM's own grouped MXFP8 product called?

Through the function that vLLM registers as an operator, with the tensors as they are. It makes its own output.
"""

from __future__ import annotations

import torch

from cases.quant.mxfp8_bmm import Inputs, Outputs
from impl.quant.mxfp8_bmm import VLLM_CONFIG, VLLM_FUNCTION
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader


def run(inputs: Inputs) -> Outputs:
    """The function's answer, and what it chooses as a tile; it raises what it raises."""
    loader = vllm_loader("gfx950", inputs.a.device)
    product = loader.symbol(VLLM_MODULE, VLLM_FUNCTION)
    tile = loader.symbol(VLLM_MODULE, VLLM_CONFIG)(inputs.a.shape[0], inputs.groups)
    out = product(inputs.a, inputs.a_scale, inputs.weight, inputs.weight_scale, inputs.groups, inputs.rank)
    return Outputs(out, torch.tensor(tile))
