"""How does vLLM multiply attention rows with an output projection?

Through the function that its layer calls; plain objects stand for the rotary embedding and the projection.
"""

from __future__ import annotations

import types

from cases.quant.wo_a_einsum import ROTARY, Inputs, Outputs
from impl.quant.wo_a_dequant_call import Module
from impl.quant.wo_a_dequant_vllm import known_schemes, stand_in
from impl.quant.wo_a_einsum import VLLM_FUNCTION
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader


def run(inputs: Inputs) -> Outputs:
    """The function's answer; it raises what it raises."""
    loader = vllm_loader("gfx950", inputs.rows.device)
    product = loader.symbol(VLLM_MODULE, VLLM_FUNCTION)
    embedding = types.SimpleNamespace(cos_sin_cache=inputs.cos_sin)
    with known_schemes(loader):
        out = product(
            embedding, inputs.rows, inputs.positions, ROTARY, inputs.groups, inputs.rank, stand_in(Module(inputs.module)),
            inverse_rope=inputs.inverse_rope,
        )  # fmt: skip
    return Outputs(out)
