"""How does our own kernel expand a block table into the slots of single tokens?

One program for each request and 1024 places of its list; a second launch clears what no request owns, for a captured
graph. They write different elements, so their order does not matter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.expand_pages import Inputs, Outputs

_TILE = 1024


@triton.jit
def _expand(
    indices, block_table, row_stride, column_stride, kv_indptr, real_lengths,
    BLOCK_SIZE: tl.constexpr, CLAMPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first = tl.program_id(1) * TILE
    start = tl.load(kv_indptr + request)
    length = tl.load(kv_indptr + request + 1) - start
    if first >= length:
        return
    place = first + tl.arange(0, TILE)
    there = place < length
    token = place
    if CLAMPED:
        token = tl.where(place < tl.load(real_lengths + request), place, 0)
    row = block_table + request.to(tl.int64) * row_stride
    column = (token // BLOCK_SIZE).to(tl.int64)
    block = tl.load(row + column * column_stride, mask=there, other=0)
    tl.store(indices + start.to(tl.int64) + place, block * BLOCK_SIZE + token % BLOCK_SIZE, mask=there)


@triton.jit
def _clear_rest(indices, kv_indptr, requests, capacity, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    used = tl.load(kv_indptr + requests)
    tl.store(indices + place, -1, mask=(place >= used) & (place < capacity))


def expand(
    indices: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    real_lengths: torch.Tensor,
    block_size: int,
    *,
    clamped: bool = False,
    extra: int = 0,
    clear: bool,
) -> None:
    """Writes the requests' slots; `clear` makes -1 of what no request owns.

    clamped, extra: whether places from real_lengths[b] on repeat the request's first slot, and how many tokens more than
    the table has room for a list may have.
    """
    requests, width = block_table.shape
    capacity = indices.numel()
    # The longest list that the table allows; how long the longest one is, only the device knows.
    longest = width * block_size + extra
    if requests:
        _expand[(requests, triton.cdiv(longest, _TILE))](
            indices, block_table, block_table.stride(0), block_table.stride(1), kv_indptr, real_lengths,
            BLOCK_SIZE=block_size, CLAMPED=clamped, TILE=_TILE,
        )  # fmt: skip
    if clear and capacity:
        _clear_rest[(triton.cdiv(capacity, _TILE),)](indices, kv_indptr, requests, capacity, TILE=_TILE)


def run(inputs: Inputs) -> Outputs:
    """Expands into the buffer of the call."""
    expand(
        inputs.indices, inputs.block_table, inputs.kv_indptr, inputs.real_lengths, inputs.block_size,
        clamped=inputs.clamped, extra=inputs.extra, clear=inputs.graphs,
    )  # fmt: skip
    return Outputs(inputs.indices)
