"""How does our own kernel map tokens to the slots of their compressed records?

One program for some entries of the buffer, behind the tokens too, so that no fill goes before. Each token finds its
request by bisection of the query bounds: a long request is spread over programs, and empty ones cost nothing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.cache.compressed_slots import Inputs, Outputs

_ENTRIES = 256


@triton.jit
def _map(
    out, entries, token_slots, query_start, seq_lens, requests, table, table_stride, block_size, interleave, period,
    RATIO: tl.constexpr, STEPS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    used = entry < tl.load(query_start + requests)
    # The first request that ends behind the entry.
    low = tl.zeros((ENTRIES,), tl.int32)
    high = low + requests
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = used & (low < high)
        ends = tl.load(query_start + middle + 1, mask=open_, other=0)
        low = tl.where(open_ & (ends <= entry), middle + 1, low)
        high = tl.where(open_ & (ends > entry), middle, high)
    length = tl.load(seq_lens + low, mask=used, other=0).to(tl.int64)
    position = length - tl.load(query_start + low + 1, mask=used, other=0) + entry
    own = tl.load(token_slots + entry, mask=used, other=-1)
    writes = used & (own >= 0) & ((position + 1) % RATIO == 0)

    record = (position // period * interleave + position % interleave) // RATIO
    column = record // block_size
    place = record - column * block_size
    block = tl.load(table + low.to(tl.int64) * table_stride + column, mask=writes, other=0).to(tl.int64)
    tl.store(out + entry, tl.where(writes, block * block_size + place, -1), mask=entry < entries)


def run(inputs: Inputs) -> Outputs:
    """Maps all tokens in one launch."""
    out = inputs.out
    if out is None:
        out = torch.empty(inputs.tokens, dtype=torch.int64, device=inputs.table.device)
    entries, requests = out.numel(), inputs.seq_lens.numel()
    if entries:
        _map[(triton.cdiv(entries, _ENTRIES),)](
            out, entries, inputs.token_slots, inputs.query_start, inputs.seq_lens, requests, inputs.table,
            inputs.table.stride(0), inputs.block_size, inputs.interleave, inputs.interleave * inputs.ranks,
            RATIO=inputs.ratio, STEPS=requests.bit_length(), ENTRIES=_ENTRIES,
        )  # fmt: skip
    return Outputs(out)
