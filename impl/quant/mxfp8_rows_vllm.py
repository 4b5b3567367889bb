"""How does vLLM quantise rows to MXFP8?"""

from __future__ import annotations

from cases.quant.mxfp8_rows import Inputs, Outputs
from impl.quant.mxfp8_rows import VLLM_DISPATCH, VLLM_MODULE, VLLM_TORCH
from impl.sparse_mla.decode import vllm_loader


def run_dispatched(inputs: Inputs) -> Outputs:
    """Through the function behind vLLM's registered operator, which takes its Triton kernel for rows on ROCm."""
    return _run(inputs, VLLM_DISPATCH)


def run_torch(inputs: Inputs) -> Outputs:
    """Through the plain torch form, which vLLM takes for stacks and on other platforms."""
    return _run(inputs, VLLM_TORCH)


def _run(inputs: Inputs, name: str) -> Outputs:
    codes, scales = vllm_loader("gfx950", inputs.rows.device).symbol(VLLM_MODULE, name)(inputs.rows)
    return Outputs(codes, scales)
