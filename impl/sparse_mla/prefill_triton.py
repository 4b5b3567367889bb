"""How does our own Triton kernel answer sparse MLA prefill?

A program takes one query and 16 of its heads, walks the query's list a tile of rows at a time, and keeps the running
maximum, sum and values in registers. One source for gfx942, gfx950, CUDA and Triton's interpreter; rows of any width, in
one or two tiles of lanes of which the last may be partly empty; every offset is 64 bits wide.

Rounding points: the score and all sums are fp32, exp(score - max) is rounded to the rows' type before it multiplies the
values.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from impl.sparse_mla.prefill_call import ragged_of

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_HEADS = 16
# Of a matrix product.
_LEAST_LANES = 16


@triton.jit
def _finished(value, total):
    """The quotient; 0 where nothing was counted."""
    # Correctly rounded: n times a row over n is that row.
    return tl.where((total > 0.0)[:, None], tl.div_rn(value, tl.maximum(total, 1e-30)[:, None]), 0.0)


@triton.jit
def _prefill(
    query, query_row, query_head, query_lane, kv, kv_row, kv_lane, rows, indices, indptr, sink,
    out, out_row, out_head, out_lane, lse, heads, lanes, out_lanes, scale,
    HAS_SINK: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One query for HEADS heads; grid (queries, head blocks). `lse` is contiguous [queries, heads] fp32.

    A row has `lanes` lanes: LANES in the first tile and REST, which may be 0, in the second.
    """
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    lane = tl.arange(0, LANES).to(tl.int64)
    tile = tl.arange(0, KEYS)
    present = head < heads
    used = (lane < lanes)[None, :]
    from_query = query + row * query_row + head[:, None] * query_head
    vector = tl.load(from_query + lane[None, :] * query_lane, mask=present[:, None] & used, other=0.0)
    if REST:
        behind = LANES + tl.arange(0, REST).to(tl.int64)
        used_behind = (behind < lanes)[None, :]
        tail = tl.load(
            from_query + behind[None, :] * query_lane, mask=present[:, None] & used_behind, other=0.0
        )  # fmt: skip
        value_behind = tl.zeros((HEADS, REST), tl.float32)
    first = tl.load(indptr + row).to(tl.int64)
    length = (tl.load(indptr + row + 1).to(tl.int64) - first).to(tl.int32)
    top = tl.full((HEADS,), _LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    value = tl.zeros((HEADS, LANES), tl.float32)
    for start in range(0, length, KEYS):
        place = start + tile
        entry = tl.load(indices + first + place, mask=place < length, other=-1).to(tl.int64)
        valid = (entry >= 0) & (entry < rows)
        from_kv = kv + entry[:, None] * kv_row
        key = tl.load(from_kv + lane[None, :] * kv_lane, mask=valid[:, None] & used, other=0.0)
        score = tl.dot(vector, tl.trans(key))
        if REST:
            key_behind = tl.load(from_kv + behind[None, :] * kv_lane, mask=valid[:, None] & used_behind, other=0.0)
            score = tl.dot(tail, tl.trans(key_behind), score)
        counted = valid[None, :]
        score = tl.where(counted, score * scale, _LOWEST)
        higher = tl.maximum(top, tl.max(score, 1))
        # While nothing was valid the maximum is the sentinel and exp(0) would count every masked entry.
        weight = tl.where(counted, tl.exp(score - higher[:, None]), 0.0)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.dot(weight.to(key.dtype), key, value * shrink[:, None])
        if REST:
            value_behind = tl.dot(weight.to(key.dtype), key_behind, value_behind * shrink[:, None])
        top = higher
    tl.store(lse + row * heads + head, tl.where(total > 0.0, top + tl.log(total), -float("inf")), mask=present)
    shrink = tl.full((HEADS,), 1.0, tl.float32)
    if HAS_SINK:
        logit = tl.load(sink + head, mask=present, other=_LOWEST)
        higher = tl.maximum(top, logit)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.exp(logit - higher)
    to = out + row * out_row + head[:, None] * out_head
    value = _finished(value * shrink[:, None], total).to(out.dtype.element_ty)
    tl.store(to + lane[None, :] * out_lane, value, mask=present[:, None] & (lane < out_lanes)[None, :])
    if REST:
        value = _finished(value_behind * shrink[:, None], total).to(out.dtype.element_ty)
        tl.store(to + behind[None, :] * out_lane, value, mask=present[:, None] & (behind < out_lanes)[None, :])


def _tiles(lanes: int) -> tuple[int, int]:
    """The lanes of a program's first and second tile, powers of two; one tile where two would hold as many.

    A row of 512 + 64 lanes in one tile takes registers for 1024.
    """
    whole = max(_LEAST_LANES, triton.next_power_of_2(lanes))
    half = whole // 2
    if half < _LEAST_LANES or lanes > half + half // 2:
        return whole, 0
    return half, max(_LEAST_LANES, triton.next_power_of_2(lanes - half))


def run(inputs: PrefillInputs) -> PrefillOutputs:
    """The answer of our kernel, written into the output memory of `inputs`; raises `ValueError` or `TypeError`."""
    indices, indptr = ragged_of(inputs)
    query, kv, out = inputs.query, inputs.kv, inputs.out
    queries, heads, lanes = query.shape
    lse = torch.empty((queries, heads), dtype=torch.float32, device=query.device)
    first, rest = _tiles(lanes)
    wide = first + rest >= 512
    if queries:
        _prefill[(queries, -(-heads // _HEADS))](
            query, *query.stride(), kv, kv.stride(0), kv.stride(2), inputs.rows, indices, indptr,
            lse if inputs.sink is None else inputs.sink.contiguous(), out, *out.stride(), lse,
            heads, lanes, out.shape[2], float(inputs.scale),
            HAS_SINK=inputs.sink is not None, HEADS=_HEADS, KEYS=16 if wide else 32, LANES=first, REST=rest,
            num_warps=8 if wide else 4, num_stages=1,
        )  # fmt: skip
    return PrefillOutputs(out, lse)
