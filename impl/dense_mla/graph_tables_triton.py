"""How do our own kernels build the tables that captured graphs read?

Two launches a batch: one for the row starts and lengths, one for the slots of the keys or the rows of the query tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import triton
import triton.language as tl

from cases.dense_mla.graph_tables import Inputs, Outputs, Step
from impl.dense_mla import batch_tables_triton, expand_pages_triton
from impl.dense_mla.graph_tables import Returned, handed_on, play, refuse


@triton.jit
def _rows(
    row_lens, row_pages, pages_stride, block_table, row_stride, column_stride, global_lens, global_stride,
    query, world, rank, pages, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request = (row // query).to(tl.int64)
    length = tl.load(global_lens + request * global_stride)
    # The keys that the query token sees on all ranks together, its own included.
    seen = tl.maximum(length - query + row % query + 1, 0)
    tl.store(row_lens + row, (seen + world - 1 - rank) // world)
    for first in range(0, pages, TILE):
        page = first + tl.arange(0, TILE)
        column = (page // PARTS).to(tl.int64)
        block = tl.load(block_table + request * row_stride + column * column_stride, mask=page < pages, other=0)
        tl.store(row_pages + row.to(tl.int64) * pages_stride + page, block * PARTS + page % PARTS, mask=page < pages)


def run(inputs: Inputs) -> Outputs:
    """Every batch's tables in the buffers of the call."""
    buffers = inputs.buffers

    def update(step: Step) -> Returned:
        shape, route = refuse(inputs, step)
        requests, table = len(step.batch.query_lens), step.block_table
        global_indptr = buffers.global_indptr if route == "round_robin" else None
        batch_tables_triton.fill(
            buffers.qo_indptr, buffers.kv_indptr, buffers.seq_lens, global_indptr, step.batch, shape.query,
            inputs.world, padded=shape.padded, uniform=shape.padded,
        )  # fmt: skip
        if route == "segmented":
            pages = buffers.row_pages.shape[1]
            _rows[(requests * shape.query,)](
                buffers.row_lens, buffers.row_pages, buffers.row_pages.stride(0), table, table.stride(0),
                table.stride(1), step.batch.global_lens, step.batch.global_lens.stride(0), shape.query, inputs.world,
                inputs.rank, pages, PARTS=inputs.block_size // inputs.page_size,
                TILE=min(1024, triton.next_power_of_2(pages)),
            )  # fmt: skip
        else:
            expand_pages_triton.expand(
                buffers.indices, table, buffers.kv_indptr, step.batch.seq_lens, inputs.block_size, clear=True
            )
        return handed_on(inputs, shape, route, requests)

    return play(inputs, update)
