"""Where do the tokens of a request lie on the ranks of a sharded cache, and what do they mean?"""

import torch

from cases.dcp.decode import Inputs
from cases.dense_mla.decode_call import QUANTISED
from oracle.dense_mla.decode_call import numbers_of


def tokens(inputs: Inputs, request: int, dtype: torch.dtype) -> torch.Tensor:
    """The tokens of a request by position, [length, lanes], as real numbers in float32 or float64.

    Raises ValueError for a block that the caches have not.
    """
    blocks, page = inputs.caches.shape[1:3]
    position = torch.arange(int(inputs.lengths[request]), device=inputs.caches.device)
    block = inputs.table[request, position // (page * inputs.world)].long()
    wrong = (block < 0) | (block >= blocks)
    if bool(wrong.any()):
        first = int(position[wrong][0])
        raise ValueError(
            f"block of position {first} of request {request}={int(block[first])}: should be 0 to {blocks - 1}"
        )
    return real(inputs, inputs.caches[position % inputs.world, block, position // inputs.world % page], dtype)


def real(inputs: Inputs, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stored rows as real numbers; the codes of fp8 are decoded by table and scaled."""
    scale = inputs.cache_scale.to(dtype) if stored.dtype in QUANTISED else 1.0
    return numbers_of(stored, dtype) * scale
