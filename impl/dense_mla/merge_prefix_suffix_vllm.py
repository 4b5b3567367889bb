"""How are vLLM's own merges of prefix and suffix called?

Directly: the function that production calls prefers a compiled operator, and leaves these to what that does not serve.
"""

from __future__ import annotations

from typing import Any

import torch

from cases.dense_mla.merge_prefix_suffix import Inputs, Outputs
from impl.dense_mla.merge_modules import STATES, STATES_TRITON, loader
from impl.dense_mla.merge_prefix_suffix import MERGE_TORCH, MERGE_TRITON


def triton(inputs: Inputs) -> Outputs:
    """The kernel's answer, of the platform whose codes are asked for; it raises what it raises."""
    arch: Any = "gfx942" if inputs.out.dtype == torch.float8_e4m3fnuz else "gfx950"
    return _called(loader(inputs.out.device, arch).symbol(STATES_TRITON, MERGE_TRITON), inputs)


def fallback(inputs: Inputs) -> Outputs:
    """The plain torch answer; it raises what it raises."""
    return _called(loader(inputs.out.device).symbol(STATES, MERGE_TORCH), inputs)


def _called(merge: Any, inputs: Inputs) -> Outputs:
    merge(
        output=inputs.out, prefix_output=inputs.prefix, prefix_lse=inputs.prefix_lse, suffix_output=inputs.suffix,
        suffix_lse=inputs.suffix_lse, output_lse=inputs.out_lse, prefill_tokens_with_context=inputs.context,
        output_scale=inputs.out_scale,
    )  # fmt: skip
    return Outputs(inputs.out, inputs.out_lse)
