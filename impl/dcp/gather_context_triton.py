"""How do our own kernels gather a chunk of context from all ranks?

One launch a rank moves what that rank sends into its slab, and into the front of the workspace where it is the rank that
asks. Another takes the context out of the slabs: a program for some rows of one request on one rank, whose first place in
the answer the host has added up.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dcp.gather_context import Inputs, Outputs
from impl.dcp.gather_context import answered, planned

_ROWS = 16
_LANES = 128


@triton.jit
def _send(
    slab, local, lanes, cache, cache_block, cache_place, block_size, table, table_row, table_column, offsets, starts,
    requests, rows, IS_OWN: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = row < rows
    # The first request whose rows end behind this one.
    low = tl.zeros((ROWS,), tl.int32)
    high = low + requests
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = inside & (low < high)
        ends = tl.load(offsets + middle + 1, mask=open_, other=0)
        low = tl.where(open_ & (ends <= row), middle + 1, low)
        high = tl.where(open_ & (ends > row), middle, high)
    index = tl.load(starts + low, mask=inside, other=0) + row - tl.load(offsets + low, mask=inside, other=0)
    where = low.to(tl.int64) * table_row + index // block_size * table_column
    block = tl.load(table + where, mask=inside, other=0).to(tl.int64)
    whole = inside[:, None] & (lane < lanes)[None, :]
    source = cache + (block * cache_block + index % block_size * cache_place)[:, None] + lane[None, :]
    value = tl.load(source, mask=whole, other=0)
    target = row[:, None] * lanes + lane[None, :]
    tl.store(slab + target, value, mask=whole)
    if IS_OWN:
        tl.store(local + target, value, mask=whole)


@triton.jit
def _take(
    rows, context, lanes, gathered, parts, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    part = parts + tl.program_id(0).to(tl.int64) * 3
    first = tl.load(part)
    place = tl.load(part + 1)
    count = tl.load(part + 2)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    inside = row < count
    whole = inside[:, None] & (lane < lanes)[None, :]
    value = tl.load(gathered + (first + row)[:, None] * lanes + lane[None, :], mask=whole, other=0)
    tl.store(context + (place + row)[:, None] * lanes + lane[None, :], value, mask=whole)
    if tl.program_id(2) == 0:
        tl.store(rows + place + row, (first + row).to(tl.int32), mask=inside)


def run(inputs: Inputs) -> Outputs:
    """All rows through the workspace of the call, in words of their own size."""
    plan = planned(inputs)
    device, lanes = inputs.workspace.device, inputs.workspace.shape[1]
    words = torch.uint8 if inputs.workspace.dtype.itemsize == 1 else torch.int16
    workspace = inputs.workspace.view(words)
    gathered = workspace[plan.share :]
    requests = len(plan.padded)
    offsets = torch.tensor([*plan.offsets, plan.slab], dtype=torch.int64, device=device)
    starts = torch.tensor(plan.local_starts, dtype=torch.int64, device=device)
    if plan.slab:
        grid = (triton.cdiv(plan.slab, _ROWS), triton.cdiv(lanes, _LANES))
        for rank, cache in enumerate(inputs.caches):
            _send[grid](
                gathered[rank * plan.slab :], workspace, lanes, cache.view(words), cache.stride(0), cache.stride(1),
                inputs.block_size, inputs.table, *inputs.table.stride(), offsets, starts, requests, plan.slab,
                IS_OWN=rank == inputs.rank, STEPS=requests.bit_length(), ROWS=_ROWS, LANES=_LANES,
            )  # fmt: skip

    parts: list[tuple[int, int, int]] = []
    total = 0
    for request in range(requests):
        for rank in range(inputs.ranks):
            count = _count(inputs, request, rank, plan.local_starts[request], plan.padded[request])
            parts.append((rank * plan.slab + plan.offsets[request], total, count))
            total += count
    rows = torch.empty(total, dtype=torch.int32, device=device)
    context = torch.empty(total, lanes, dtype=words, device=device)
    if total:
        grid_of_parts = (len(parts), triton.cdiv(max(plan.padded), _ROWS), triton.cdiv(lanes, _LANES))
        _take[grid_of_parts](
            rows, context, lanes, gathered, torch.tensor(parts, dtype=torch.int64, device=device), ROWS=_ROWS,
            LANES=_LANES,
        )  # fmt: skip
    return answered(inputs, plan, rows, context.view(inputs.workspace.dtype))


def _count(inputs: Inputs, request: int, rank: int, first: int, padded: int) -> int:
    """How many of the rows that a rank sends it holds."""
    rounds, left = divmod(inputs.contexts[request], inputs.ranks * inputs.interleave)
    held = rounds * inputs.interleave + min(max(left - rank * inputs.interleave, 0), inputs.interleave)
    return min(max(held - first, 0), padded)
