"""How do our own kernels list the slots of prefill tokens' top-k positions?

One launch finds a slot for every place of the rows, or -1; then the rows are packed as any padded rows are.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.sparse_mla.prefill_topk_ragged import Inputs, Outputs
from impl.sparse_mla import ragged_triton
from impl.sparse_mla.paging_triton import slot_of


@triton.jit
def _find(
    slots, lengths, local, row_stride, requests, query_start, seq_lens, valid, table, table_stride, block_size, ratio,
    num_compressed, token_offset, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row + token_offset
    live = tl.load(valid + token, mask=row < rows, other=0) != 0
    # A token that is not valid may name any request: nothing is read for it.
    request = tl.load(requests + token, mask=live, other=0).to(tl.int64)
    end = tl.load(query_start + request + 1, mask=live, other=0)
    # The first token of the query cancels out: its place is counted from there, and the query's length too.
    existing = tl.load(seq_lens + request, mask=live, other=0) - end + token + 1
    # Division rounds towards 0; a negative number of keys and 0 are the same.
    keys = tl.where(live, tl.maximum(existing, 0) // ratio, 0)
    tl.store(lengths + row, keys, mask=row < rows)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        there = (column[None, :] < keys[:, None]) & (column < width)[None, :]
        position = tl.load(local + row.to(tl.int64)[:, None] * row_stride + column[None, :], mask=there, other=-1)
        wanted = there & (position >= 0) & (position < num_compressed)
        slot = slot_of(position, wanted, table + request[:, None] * table_stride, block_size)
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(slots + place, slot, mask=(row < rows)[:, None] & (column < width)[None, :])


def run(inputs: Inputs) -> Outputs:
    """Lists the slots in the memory of the call."""
    rows, width = inputs.local.shape
    slots = torch.empty((rows, width), dtype=torch.int32, device=inputs.local.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=inputs.local.device)
    tile, columns = ragged_triton.tile_of(width)
    if rows:
        _find[(triton.cdiv(rows, tile),)](
            slots, lengths, inputs.local, inputs.local.stride(0), inputs.requests, inputs.query_start, inputs.seq_lens,
            inputs.valid.view(torch.uint8), inputs.table, inputs.table.stride(0), inputs.block_size, inputs.ratio,
            inputs.num_compressed, inputs.token_offset, rows, width, ROWS=tile, COLUMNS=columns,
        )  # fmt: skip
    ragged_triton.pack(inputs.flat, inputs.indptr, slots, lengths, inputs.num_rows)
    return Outputs(inputs.flat, inputs.indptr)
