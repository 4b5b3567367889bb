"""How does our own kernel make the page tables of verify rows?

One program for some pages of one request: it looks them up once and stores them on all rows of the request. Pages behind
the request's last token are not looked up; their places hold -1.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dcp.verify_pages import LARGEST_TILE, Inputs, Outputs

_PAGES = 128


@triton.jit
def _fill(
    out, out_row, blocks, blocks_row, blocks_column, lengths, queries, pages, page_size, per_block, PAGES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1).to(tl.int64) * PAGES + tl.arange(0, PAGES)
    used = (page < pages) & (page * page_size < tl.load(lengths + request))
    block = tl.load(blocks + request * blocks_row + page // per_block * blocks_column, mask=used, other=0)
    number = tl.where(used, block * per_block + (page % per_block).to(tl.int32), -1)
    for query in range(queries):
        tl.store(out + (request * queries + query) * out_row + page, number, mask=page < pages)


def run(inputs: Inputs) -> Outputs:
    """All requests in one launch."""
    size = inputs.page_size or min(inputs.block_size & -inputs.block_size, LARGEST_TILE)
    requests, pages = inputs.lengths.numel(), inputs.out.shape[1]
    if requests and pages:
        _fill[(requests, triton.cdiv(pages, _PAGES))](
            inputs.out, inputs.out.stride(0), inputs.blocks, *inputs.blocks.stride(), inputs.lengths, inputs.queries,
            pages, size, inputs.block_size // size, PAGES=_PAGES,
        )  # fmt: skip
    return Outputs(torch.tensor([size]), inputs.out)
