"""How do our own kernels list the slots of decode tokens' top-k positions?

Three launches: every token's number of positions, one program that turns the numbers into row starts, and the slots.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.sparse_mla.decode_topk_ragged import Inputs, Outputs
from impl.sparse_mla.paging_triton import slot_of
from impl.sparse_mla.ragged_triton import sum_up, tile_of


@triton.jit
def _positions(local, row_stride, valid, token, column, tokens, topk):
    """The positions of a tile, -1 where there is none or the token is not valid."""
    live = tl.load(valid + token, mask=token < tokens, other=0) != 0
    there = live[:, None] & (column < topk)[None, :]
    return tl.load(local + token.to(tl.int64)[:, None] * row_stride + column[None, :], mask=there, other=-1)


@triton.jit
def _count(lengths, indptr, local, row_stride, valid, tokens, topk, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    count = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, topk, COLUMNS):
        position = _positions(local, row_stride, valid, token, first + tl.arange(0, COLUMNS), tokens, topk)
        count += tl.sum((position >= 0).to(tl.int32), axis=1)
    tl.store(lengths + token, count, mask=token < tokens)
    tl.store(indptr + 1 + token, count, mask=token < tokens)


@triton.jit
def _list(
    flat, indptr, requests, table, table_stride, block_size, local, row_stride, valid, tokens, topk,
    KEEP_HOLES: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.load(indptr + token, mask=token < tokens, other=0)
    count = tl.load(indptr + token + 1, mask=token < tokens, other=0) - start
    # A token that lists nothing may name any request.
    request = tl.load(requests + token, mask=(token < tokens) & (count > 0), other=0).to(tl.int64)
    for first in range(0, topk, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        position = _positions(local, row_stride, valid, token, column, tokens, topk)
        there = position >= 0
        if KEEP_HOLES:
            taken = column[None, :] < count[:, None]
            there = there & taken
            place = tl.broadcast_to(column[None, :], (TOKENS, COLUMNS))
        else:
            taken = there
            place = tl.cumsum(there.to(tl.int32), axis=1) - 1
        slot = slot_of(position, there, table + request[:, None] * table_stride, block_size)
        tl.store(flat + start[:, None] + place, slot, mask=taken)
        if not KEEP_HOLES:
            start += tl.sum(there.to(tl.int32), axis=1)


def run(inputs: Inputs) -> Outputs:
    """Lists the slots in the memory of the call."""
    tokens, topk = inputs.local.shape
    tile, columns = tile_of(topk)
    grid = (triton.cdiv(tokens, tile),)
    rows = (inputs.local, inputs.local.stride(0), inputs.valid.view(torch.uint8), tokens, topk)
    if tokens:
        _count[grid](inputs.lengths, inputs.indptr, *rows, TOKENS=tile, COLUMNS=columns)
    sum_up(inputs.indptr)
    if tokens and topk:
        _list[grid](
            inputs.flat, inputs.indptr, inputs.requests, inputs.table, inputs.table.stride(0), inputs.block_size, *rows,
            KEEP_HOLES=inputs.holes == "kept", TOKENS=tile, COLUMNS=columns,
        )  # fmt: skip
    return Outputs(inputs.flat, inputs.indptr, inputs.lengths)
