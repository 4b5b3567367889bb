"""How does our own kernel list the cache slots of sliding windows?

One program per row, and one more per block of prefill requests for their gather lengths, in one launch. A token that is
none reads neither its request nor anything of it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import triton
import triton.language as tl

from cases.sparse_mla.window_slots import Inputs, Outputs

_GATHER_BLOCK = 128


@triton.jit
def _windows(
    slots, slots_row, lens, gather_lens, query_start, seq_lens, token_to_request, valid, table, table_row,
    replay_start, rows, prefills, first_prefill, token_offset, window, block_size, columns,
    DRAFT: tl.constexpr, BLOCK: tl.constexpr, GATHER_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= rows:
        lane = (row - rows) * GATHER_BLOCK + tl.arange(0, GATHER_BLOCK)
        asked = lane < prefills
        of = first_prefill + lane
        queries = tl.load(query_start + of + 1, mask=asked, other=0) - tl.load(query_start + of, mask=asked, other=0)
        kept = tl.load(seq_lens + of, mask=asked, other=0) - queries
        kept = tl.maximum(kept - tl.load(replay_start + of, mask=asked, other=0), 0)
        tl.store(gather_lens + lane, queries + tl.minimum(kept, window - 1), mask=asked)
    else:
        token = row + token_offset
        is_token = tl.load(valid + token)
        request = tl.load(token_to_request + token, mask=is_token, other=0)
        first = tl.load(query_start + request, mask=is_token, other=0)
        length = tl.load(seq_lens + request, mask=is_token, other=0)
        before = length - (tl.load(query_start + request + 1, mask=is_token, other=0) - first)
        if DRAFT:
            start = tl.maximum(before - window, 0)
            end = length
        else:
            end = before + token - first + 1
            start = tl.maximum(end - window, tl.load(replay_start + request, mask=is_token, other=0))
            start = tl.maximum(start, 0)
        count = tl.where(is_token, tl.maximum(end - start, 0), 0)
        column = tl.arange(0, BLOCK)
        sees = column < count
        position = tl.where(sees, start + column, 0)
        block = position // block_size
        number = tl.load(table + request.to(tl.int64) * table_row + block, mask=sees, other=0)
        slot = number * block_size + (position - block * block_size)
        tl.store(slots + row.to(tl.int64) * slots_row + column, tl.where(sees, slot, -1), mask=column < columns)
        tl.store(lens + row, count)


def run(inputs: Inputs) -> Outputs:
    """Writes everything in one launch; the length of an empty row is 0."""
    rows, columns = inputs.slots.shape
    prefills = inputs.gather_lens.numel()
    programs = rows + triton.cdiv(prefills, _GATHER_BLOCK)
    if programs:
        _windows[(programs,)](
            inputs.slots, inputs.slots.stride(0), inputs.lens, inputs.gather_lens, inputs.query_start,
            inputs.seq_lens, inputs.token_to_request, inputs.valid, inputs.table, inputs.table.stride(0),
            inputs.replay_start, rows, prefills, inputs.first_prefill, inputs.token_offset, inputs.window,
            inputs.block_size, columns, DRAFT=inputs.form == "draft", BLOCK=triton.next_power_of_2(columns),
            GATHER_BLOCK=_GATHER_BLOCK,
        )  # fmt: skip
    return Outputs(inputs.slots, inputs.lens, inputs.gather_lens)
