"""How does vLLM turn attention rows back and quantise them to MXFP8?"""

from __future__ import annotations

from cases.quant.inverse_rope_mxfp8_rows import Inputs, Outputs
from impl.quant.inverse_rope_mxfp8_rows import VLLM_FUNCTION
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader


def run(inputs: Inputs) -> Outputs:
    """The answer of vLLM's function, given everything behind the finished rows."""
    done = inputs.finished
    function = vllm_loader("gfx950", inputs.rows.device).symbol(VLLM_MODULE, VLLM_FUNCTION)
    function(
        inputs.rows[done:], inputs.positions[done:], inputs.cos_sin, inputs.cos_sin.shape[1], inputs.codes[done:],
        inputs.scales[done:],
    )  # fmt: skip
    return Outputs(inputs.codes, inputs.scales)
