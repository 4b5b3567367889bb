"""How does our own Triton kernel merge the segments of a decode?

A program takes one row and head: maxima and masses of all its segments at once, then their sums a tile at a time. One
source for gfx942, gfx950, CUDA and Triton's interpreter; offsets are 64 bits wide.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.merge_segments import Inputs, Outputs

_TILE = 16
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merge_kernel(
    sums, maxima, masses, lengths, out, out_row, out_head, lse,
    TILE_TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row and head; grid (rows, heads). All but `out` are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = row * tl.num_programs(1) + head
    length = tl.load(lengths + row)
    # Quotients first: a length near 2^31 must not grow.
    whole = SEGMENTS * TILE_TOKENS
    tiles = tl.maximum(1, length // whole + (length % whole != 0).to(tl.int32))
    span = tiles * TILE_TOKENS
    active = tl.where(length > 0, length // span + (length % span != 0).to(tl.int32), 0)
    segment = tl.arange(0, SEGMENTS)
    written = segment < active
    maximum = tl.load(maxima + place * SEGMENTS + segment, mask=written, other=-float("inf"))
    mass = tl.load(masses + place * SEGMENTS + segment, mask=written, other=0.0)
    top = tl.max(maximum, 0)
    base = tl.where(top > -float("inf"), top, 0.0)
    total = tl.sum(mass * tl.exp2(maximum - base), 0)
    lane = tl.arange(0, RANK)
    value = tl.zeros((RANK,), tl.float32)
    for start in range(0, active, TILE):
        some = start + tl.arange(0, TILE)
        there = some < active
        weight = tl.exp2(tl.load(maxima + place * SEGMENTS + some, mask=there, other=-float("inf")) - base)
        at = (place * SEGMENTS + some)[:, None] * RANK + lane[None, :]
        value += tl.sum(tl.load(sums + at, mask=there[:, None], other=0.0) * weight[:, None], 0)
    # A NaN is no reason to call a row empty.
    any_mass = total != 0.0
    divisor = tl.where(any_mass, total, 1.0)
    value = tl.where(any_mass, tl.div_rn(value, tl.full((RANK,), 0.0, tl.float32) + divisor), 0.0)
    tl.store(out + row * out_row + head * out_head + lane, value.to(out.dtype.element_ty))
    tl.store(lse + place, tl.where(any_mass, (base + tl.log2(divisor)) * _LN2, -float("inf")))


def run(inputs: Inputs) -> Outputs:
    """The merge of our kernel, written into the output memory of `inputs`."""
    rows, heads, segments, rank = inputs.sums.shape
    lse = torch.empty((rows, heads), dtype=torch.float32, device=inputs.sums.device)
    if rows:
        merge_kernel[(rows, heads)](
            inputs.sums, inputs.maxima, inputs.masses, inputs.lengths, inputs.out, *inputs.out.stride()[:2], lse,
            TILE_TOKENS=inputs.tile, SEGMENTS=segments, RANK=rank, TILE=min(_TILE, segments), num_warps=4,
        )  # fmt: skip
    return Outputs(inputs.out, lse)
