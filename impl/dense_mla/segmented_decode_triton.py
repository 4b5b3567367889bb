"""How does our own Triton kernel decode over segments?

A program takes one row, 16 of its heads and one segment; a merge of the segments follows, a kernel of its own. Keys are
loaded by their own pages under a mask, so that what stands beside them is never read. One source for gfx942, gfx950, CUDA
and Triton's interpreter; codes are decoded in integer arithmetic, and every offset is 64 bits wide.

Rounding points: products of bf16 operands, fp32 sums, exp2(score - max) rounded to bf16 before it multiplies the values,
segments in fp32.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla import merge_segments
from cases.dense_mla.segmented_decode import CODES, Inputs, Outputs
from impl.dense_mla import merge_segments_triton
from impl.dense_mla.segmented_decode_call import plain_query, segments_for
from impl.formats.codes_triton import LAYOUTS, decode_code

_LOG2E = 1.4426950408889634
_HEADS = 16


@triton.jit
def _bf16(
    stored, CODED: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, LARGEST: tl.constexpr,
    NAN: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """What the cache holds in bf16, exactly."""
    value = stored
    if CODED:
        bits = decode_code(stored.to(tl.int32), FRACTION, BIAS, SIGN, LARGEST, NAN, SIGNED_ZERO)
        value = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return value


@triton.jit
def _produce(
    query, query_row, query_head, cache, page_step, slot_step, table, table_row, lengths, cache_scale, sums, maxima, masses,
    heads, scale, TILE: tl.constexpr, SEGMENTS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, CODED: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr,
    LARGEST: tl.constexpr, NAN: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """One row, HEADS heads and one segment; grid (rows, head blocks, segments). `sums`, `maxima`, `masses` are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(2)
    length = tl.load(lengths + row)
    whole = SEGMENTS * TILE
    span = tl.maximum(1, (length + whole - 1) // whole) * TILE
    first = segment * span
    last = tl.minimum(first + span, length)
    if first >= last:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    present = head < heads
    lane = tl.arange(0, RANK)
    rope = RANK + tl.arange(0, ROPE)
    at = query + row * query_row + head.to(tl.int64)[:, None] * query_head
    latent = tl.load(at + lane[None, :], mask=present[:, None], other=0.0)
    rotated = tl.load(at + rope[None, :], mask=present[:, None], other=0.0)
    k = tl.load(cache_scale)
    factor = scale * k
    top = tl.full((HEADS,), -float("inf"), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, RANK), tl.float32)
    for start in range(first, last, KEYS):
        place = start + tl.arange(0, KEYS)
        there = place < last
        page = tl.load(table + row * table_row + place // TILE, mask=there, other=0).to(tl.int64)
        slot = (page * page_step + (place % TILE) * slot_step)[:, None]
        value = _bf16(
            tl.load(cache + slot + lane[None, :], mask=there[:, None], other=0),
            CODED, FRACTION, BIAS, SIGN, LARGEST, NAN, SIGNED_ZERO,
        )  # fmt: skip
        turned = _bf16(
            tl.load(cache + slot + rope[None, :], mask=there[:, None], other=0),
            CODED, FRACTION, BIAS, SIGN, LARGEST, NAN, SIGNED_ZERO,
        )  # fmt: skip
        if CODED:
            # It is 0 there already. What depends on a key's place is decoded where it was loaded, once; else every warp
            # decodes the whole tile in the layout of a product's operand, and spills.
            value = tl.where(there[:, None], value, 0.0)
        score = tl.dot(latent, tl.trans(value))
        score = tl.dot(rotated, tl.trans(turned), score) * factor
        score = tl.where(there[None, :], score, -float("inf"))
        # The first key of a segment is there, so the maximum is finite from the first tile on.
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(weight, 1)
        total = tl.dot(weight.to(tl.bfloat16), value, total * shrink[:, None])
        top = higher
    to = (row * heads + head) * SEGMENTS + segment
    tl.store(maxima + to, top, mask=present)
    tl.store(masses + to, mass, mask=present)
    tl.store(sums + to[:, None] * RANK + lane[None, :], total * k, mask=present[:, None])


def run(inputs: Inputs) -> Outputs:
    """The answer of our kernels, written into the output memory of `inputs`, with its segments."""
    query = plain_query(inputs)
    rows, heads, lanes = query.shape
    segments, rank = segments_for(inputs), inputs.rank
    sums = torch.empty((rows, heads, segments, rank), dtype=torch.float32, device=query.device)
    maxima, masses = torch.empty_like(sums[..., 0]), torch.empty_like(sums[..., 0])
    coded = inputs.cache.dtype in CODES
    layout = LAYOUTS["float8_e4m3fnuz" if inputs.cache.dtype == torch.float8_e4m3fnuz else "float8_e4m3fn"]
    _produce[(rows, -(-heads // _HEADS), segments)](
        query, *query.stride()[:2], inputs.cache.view(torch.uint8) if coded else inputs.cache, *inputs.cache.stride()[:2],
        inputs.table, inputs.table.stride(0), inputs.lengths, inputs.cache_scale, sums, maxima, masses, heads,
        float(inputs.scale * _LOG2E), TILE=inputs.tile, SEGMENTS=segments, RANK=rank, ROPE=lanes - rank, HEADS=_HEADS,
        KEYS=16 if rank >= 512 else 32, CODED=coded, FRACTION=layout.fraction, BIAS=layout.bias, SIGN=layout.sign,
        LARGEST=layout.largest, NAN=layout.nan, SIGNED_ZERO=layout.signed_zero, num_warps=8 if rank >= 512 else 4,
        num_stages=1,
    )  # fmt: skip
    merged = merge_segments_triton.run(
        merge_segments.Inputs(sums, maxima, masses, inputs.lengths, inputs.tile, inputs.out)
    )
    return Outputs(merged.out, merged.lse, sums, maxima, masses)
