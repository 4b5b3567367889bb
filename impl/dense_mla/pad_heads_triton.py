"""How does our own kernel pad query heads?"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _pad(padded, query, row_stride, head_stride, heads, width, REPEATS: tl.constexpr, TILE: tl.constexpr):
    row, head, many = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    source = head % heads if REPEATS == 0 else head // REPEATS
    target = padded + (row.to(tl.int64) * many + head) * width
    place = query + row.to(tl.int64) * row_stride + source.to(tl.int64) * head_stride
    for first in range(0, width, TILE):
        element = first + tl.arange(0, TILE)
        tl.store(target + element, tl.load(place + element, mask=element < width), mask=element < width)


def pad(query: torch.Tensor, kernel_heads: int) -> torch.Tensor:
    """Queries [rows, kernel_heads, width], packed; the given ones where there is nothing to pad."""
    rows, heads, width = query.shape
    if heads == kernel_heads:
        return query
    padded = torch.empty((rows, kernel_heads, width), dtype=query.dtype, device=query.device)
    # Bits are moved, not numbers: the codes of NaN stay as they are.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[query.element_size()]
    repeats = 0 if kernel_heads % heads else kernel_heads // heads
    if rows:
        _pad[(rows, kernel_heads)](
            padded.view(bits), query.view(bits), query.stride(0), query.stride(1), heads, width, REPEATS=repeats,
            TILE=min(1024, triton.next_power_of_2(width)),
        )  # fmt: skip
    return padded
