"""How does our own kernel join selected and window entries into rows of workspace indices?

One program per query. It finds the request that owns the row by bisection, so that no number of queries and no empty
request needs a second pass, and writes the whole row, the tail included.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import triton
import triton.language as tl

from cases.sparse_mla.combine_topk_window import Inputs, Outputs


@triton.jit
def _combine(
    combined, combined_row, lens, topk, topk_row, query_start, seq_lens, gather_lens, requests, window, ratio, most,
    request_rows, compressed_rows, width, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = tl.load(query_start)
    # The last request that starts at or before the row; requests without queries start where the next one does.
    low = row * 0
    high = low + requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.load(query_start + middle) - base <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    length = tl.load(seq_lens + low)
    end = tl.load(query_start + low + 1) - base
    # Tokens up to the query, itself included; none where a warm-up batch has fewer tokens than queries.
    tokens = tl.maximum(length - end + row + 1, 0)
    entries = tl.minimum(tokens // ratio, most)
    seen = tl.minimum(tokens, window)
    first = low * request_rows
    column = tl.arange(0, BLOCK)
    entry = tl.load(topk + row.to(tl.int64) * topk_row + column, mask=column < entries, other=-1)
    selects = (entry >= 0) & (entry < compressed_rows)
    selected = tl.where(selects, first + tl.where(selects, entry, 0).to(tl.int32), -1)
    gathered = first + compressed_rows + (tokens - seen - (length - tl.load(gather_lens + low))) + (column - entries)
    value = tl.where(column < entries, selected, tl.where(column < entries + seen, gathered, -1))
    tl.store(combined + row.to(tl.int64) * combined_row + column, value, mask=column < width)
    tl.store(lens + row, entries + seen)


def run(inputs: Inputs) -> Outputs:
    """Writes all rows in one launch; without compressed entries the ratio is left out of the division."""
    rows, width = inputs.combined.shape
    if rows:
        _combine[(rows,)](
            inputs.combined, inputs.combined.stride(0), inputs.lens, inputs.topk, inputs.topk.stride(0),
            inputs.query_start, inputs.seq_lens, inputs.gather_lens, inputs.seq_lens.numel(), inputs.window,
            max(1, inputs.ratio), min(inputs.top_k, inputs.topk.shape[1]) if inputs.ratio else 0,
            inputs.request_rows, inputs.compressed_rows, width, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
    return Outputs(inputs.combined, inputs.lens)
