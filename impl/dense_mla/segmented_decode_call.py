"""What do those who answer a decode over segments share: the query that kernels read, and how many segments there are?"""

from __future__ import annotations

import torch

from cases.dense_mla.segmented_decode import Inputs

_MOST = 128
_FEWEST = 8


def plain_query(inputs: Inputs) -> torch.Tensor:
    """The query in bfloat16: codes times their scale, rounded once, as vLLM's layer hands it on."""
    if inputs.query_scale is None:
        return inputs.query
    # A scale without dimensions does not widen the product.
    # A device rounds a scale of its own to bfloat16 where it meets one: the product is taken in fp32.
    return (inputs.query.to(torch.bfloat16).float() * inputs.query_scale).to(torch.bfloat16)


def segments_for(inputs: Inputs) -> int:
    """Segments enough to keep every compute unit busy with four programs, in powers of two from 8 to 128."""
    rows, heads, _ = inputs.query.shape
    programs = rows * -(-heads // 16)
    most = min(_MOST, -(-inputs.max_length // inputs.tile))
    wanted = min(most, 2 * -(-4 * inputs.compute_units // programs))
    return min(_MOST, max(_FEWEST, 1 << (wanted - 1).bit_length()))
