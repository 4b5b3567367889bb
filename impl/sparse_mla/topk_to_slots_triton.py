"""How does our own kernel turn top-k positions into slots?

A program takes some tokens and walks their rows in tiles, so that it knows how many slots stand before a tile: no
atomics, whatever the width.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import triton
import triton.language as tl

from cases.sparse_mla.topk_to_slots import Inputs, Outputs
from impl.sparse_mla.ragged_triton import tile_of


@triton.jit
def _convert(
    slots, slots_stride, counts, positions, positions_stride, requests, table, table_stride, table_rows, table_columns,
    block_size, block_rows, world_size, rank, interleave, space_requests, space_starts, space_rank_rows, tokens, width,
    HAS_SPACE: tl.constexpr, COUNTED: tl.constexpr, FRONT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_batch = token < tokens
    request = tl.load(requests + token, mask=in_batch, other=-1).to(tl.int64)
    known = (request >= 0) & (request < table_rows)
    blocks = table + tl.where(known, request, 0)[:, None] * table_stride
    if HAS_SPACE:
        prefill = tl.load(space_requests + token, mask=in_batch, other=-1)
        gathered = prefill >= 0
        start = tl.load(space_starts + prefill, mask=gathered, other=0)
    count = tl.zeros((TOKENS,), tl.int32)
    row = slots + token.to(tl.int64)[:, None] * slots_stride
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = in_batch[:, None] & (column < width)[None, :]
        place = positions + token.to(tl.int64)[:, None] * positions_stride + column[None, :]
        position = tl.load(place, mask=inside, other=-1)
        there = position >= 0
        position = tl.where(there, position, 0)
        group = position // interleave
        owner = group % world_size
        key = group // world_size * interleave + position % interleave
        block = key // block_size
        there = there & (block < table_columns)
        cached = there & (owner == rank) & known[:, None]
        if HAS_SPACE:
            cached = cached & ~gathered[:, None]
        base = tl.load(blocks + block, mask=cached, other=0)
        slot = tl.where(cached, base * block_rows + (key - block * block_size), -1)
        if HAS_SPACE:
            slot = tl.where(there & gathered[:, None], owner * space_rank_rows + start[:, None] + key, slot)
        valid = (slot >= 0).to(tl.int32)
        if FRONT:
            tl.store(row + count[:, None] + tl.cumsum(valid, axis=1) - 1, slot, mask=valid != 0)
        else:
            tl.store(row + column[None, :], slot, mask=inside)
        count += tl.sum(valid, axis=1)
    if FRONT:
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            behind = in_batch[:, None] & (column < width)[None, :] & (column[None, :] >= count[:, None])
            tl.store(row + column[None, :], -1, mask=behind)
    if COUNTED:
        tl.store(counts + token, count, mask=in_batch)


def run(inputs: Inputs) -> Outputs:
    """Converts all rows in one launch, into the memory of the call."""
    tokens, width = inputs.positions.shape
    tile, columns = tile_of(width)
    space = inputs.workspace
    if tokens:
        _convert[(triton.cdiv(tokens, tile),)](
            inputs.slots, inputs.slots.stride(0), inputs.counts, inputs.positions, inputs.positions.stride(0),
            inputs.requests, inputs.table, inputs.table.stride(0), *inputs.table.shape, inputs.block_size,
            inputs.block_rows, inputs.world_size, inputs.rank, inputs.interleave,
            inputs.requests if space is None else space.requests, inputs.requests if space is None else space.starts,
            0 if space is None else space.rank_rows, tokens, width, HAS_SPACE=space is not None,
            COUNTED=inputs.form != "columns", FRONT=inputs.form == "front", TOKENS=tile, COLUMNS=columns,
        )  # fmt: skip
    return Outputs(inputs.slots, None if inputs.form == "columns" else inputs.counts)
