"""How does our own kernel mask the rows to which a rank has nothing to add?

One program for some rows and heads. A row finds its request by bisection of the bounds; only empty rows are stored, and
nothing is loaded, so that kept rows keep their bits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import triton
import triton.language as tl

from cases.dcp.mask_empty_shards import Inputs, Outputs

_ROWS = 32
_HEADS = 32


@triton.jit
def _mask(
    lse, lse_row, lse_head, rows, heads, lengths, query_start, requests, STEPS: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    owned = row < tl.load(query_start + requests)
    # The first request that ends behind the row.
    low = tl.zeros((ROWS,), tl.int32)
    high = low + requests
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = owned & (low < high)
        ends = tl.load(query_start + middle + 1, mask=open_, other=0)
        low = tl.where(open_ & (ends <= row), middle + 1, low)
        high = tl.where(open_ & (ends > row), middle, high)
    empty = tl.load(lengths + low, mask=owned, other=0) == 0
    where = row[:, None] * lse_row + head[None, :] * lse_head
    nothing = tl.full((ROWS, HEADS), -float("inf"), tl.float32)
    tl.store(lse + where, nothing, mask=(empty & (row < rows))[:, None] & (head < heads)[None, :])


def run(inputs: Inputs) -> Outputs:
    """Masks in one launch."""
    lse, lengths, bounds = inputs.lse, inputs.lengths, inputs.query_start
    rows, heads = lse.shape
    if lengths is not None and bounds is not None and lse.numel():
        _mask[(triton.cdiv(rows, _ROWS), triton.cdiv(heads, _HEADS))](
            lse, *lse.stride(), rows, heads, lengths, bounds, lengths.numel(), STEPS=lengths.numel().bit_length(),
            ROWS=_ROWS, HEADS=_HEADS,
        )  # fmt: skip
    return Outputs(lse)
