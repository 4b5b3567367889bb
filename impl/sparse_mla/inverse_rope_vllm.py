"""How does vLLM turn attention rows back?"""

from __future__ import annotations

import torch

from cases.sparse_mla.inverse_rope import Inputs, Outputs
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader
from impl.sparse_mla.inverse_rope import VLLM_IN_PLACE, VLLM_OUT_OF_PLACE


def run(inputs: Inputs) -> Outputs:
    """The answer of the function that vLLM calls for this form, given the rows and positions behind the rotated ones."""
    source = inputs.source[inputs.rotated :]
    positions = inputs.positions[inputs.rotated :]
    rotary = inputs.cos_sin.shape[-1]
    loader = vllm_loader("gfx950", source.device)
    if inputs.rows is None:
        assert inputs.out is not None
        loader.symbol(VLLM_MODULE, VLLM_IN_PLACE)(source, positions, inputs.cos_sin, rotary)
        return Outputs(inputs.out)
    turn = loader.symbol(VLLM_MODULE, VLLM_OUT_OF_PLACE)
    if inputs.out is None:
        answer: torch.Tensor = turn(source, positions, inputs.cos_sin, rotary)
        return Outputs(answer)
    turn(source, positions, inputs.cos_sin, rotary, out=inputs.out[inputs.rotated :])
    return Outputs(inputs.out)
