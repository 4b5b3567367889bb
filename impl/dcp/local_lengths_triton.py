"""How do our own kernels map sequences to ranks and tokens to slots?

Shares are elementwise. For slots, one program fills some entries of the buffer, behind the tokens too; each token finds
its request by bisection of the query bounds. A token's block and place come from its index on the rank.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dcp.local_lengths import Inputs, Outputs

_ENTRIES = 256


@triton.jit
def _share(
    out, lengths, count, rank, rank_pointer, ranks, interleave, ALL: tl.constexpr, LOADED: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    if ALL:
        length = tl.load(lengths + entry // ranks, mask=inside, other=0).to(tl.int64)
        own = entry % ranks
    else:
        length = tl.load(lengths + entry, mask=inside, other=0).to(tl.int64)
        own = tl.zeros((ENTRIES,), tl.int64) + (tl.load(rank_pointer) if LOADED else rank)
    rounds = length // (ranks * interleave)
    left = length - rounds * (ranks * interleave)
    share = rounds * interleave + tl.minimum(tl.maximum(left - own * interleave, 0), interleave)
    tl.store(out + entry, share.to(tl.int32), mask=inside)


@triton.jit
def _slots(
    out, entries, positions, query_start, requests, table, table_row, table_column, block_size, interleave, ranks, rank,
    STEPS: tl.constexpr, ENTRIES: tl.constexpr,
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
    position = tl.load(positions + entry, mask=used, other=0)
    mine = used & (position // interleave % ranks == rank)
    index = position // (ranks * interleave) * interleave + position % interleave
    column = index // block_size
    where = low.to(tl.int64) * table_row + column * table_column
    block = tl.load(table + where, mask=mine, other=0).to(tl.int64)
    tl.store(out + entry, tl.where(mine, block * block_size + index % block_size, -1), mask=entry < entries)


def run(inputs: Inputs) -> Outputs:
    """All shares in one launch, all slots in another."""
    lengths = inputs.lengths.contiguous()
    every = inputs.form == "all"
    shape = (*lengths.shape, inputs.ranks) if every else lengths.shape
    shares = torch.empty(shape, dtype=torch.int32, device=lengths.device)
    if shares.numel():
        _share[(triton.cdiv(shares.numel(), _ENTRIES),)](
            shares, lengths, shares.numel(), inputs.rank, inputs.rank_tensor, inputs.ranks, inputs.interleave,
            ALL=every, LOADED=inputs.form == "tensor", ENTRIES=_ENTRIES,
        )  # fmt: skip
    entries, requests = inputs.slots.numel(), inputs.table.shape[0]
    if entries:
        _slots[(triton.cdiv(entries, _ENTRIES),)](
            inputs.slots, entries, inputs.positions, inputs.query_start, requests, inputs.table, *inputs.table.stride(),
            inputs.block_size, inputs.interleave, inputs.ranks, inputs.rank, STEPS=requests.bit_length(),
            ENTRIES=_ENTRIES,
        )  # fmt: skip
    return Outputs(shares, inputs.slots)
