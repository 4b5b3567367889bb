"""How do our own kernels find the cache slot of a request's position?"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_of(position, wanted, blocks, block_size):
    """The slots of a tile of positions where `wanted`, -1 elsewhere; `blocks` points to each one's table row."""
    position = tl.where(wanted, position, 0)
    column = position // block_size
    block = tl.load(blocks + column, mask=wanted, other=0)
    return tl.where(wanted, block * block_size + (position - column * block_size), -1)
