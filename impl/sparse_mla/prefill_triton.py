"""How does our own Triton kernel answer sparse MLA prefill?

A program takes one query and 16 of its heads, walks the query's list a tile of rows at a time, and keeps the running
maximum, sum and values in registers. One source for gfx942, gfx950, CUDA and Triton's interpreter; rows of any width, of
which the last tile of lanes may be partly empty; every offset is 64 bits wide.

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


@triton.jit
def _prefill(
    query, query_row, query_head, query_lane, kv, kv_row, kv_lane, rows, indices, indptr, sink,
    out, out_row, out_head, out_lane, lse, heads, lanes, out_lanes, scale,
    HAS_SINK: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One query for HEADS heads; grid (queries, head blocks). `lse` is contiguous [queries, heads] fp32."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    lane = tl.arange(0, LANES).to(tl.int64)
    tile = tl.arange(0, KEYS)
    present = head < heads
    used = (lane < lanes)[None, :]
    vector = tl.load(
        query + row * query_row + head[:, None] * query_head + lane[None, :] * query_lane,
        mask=present[:, None] & used, other=0.0,
    )  # fmt: skip
    first = tl.load(indptr + row).to(tl.int64)
    length = (tl.load(indptr + row + 1).to(tl.int64) - first).to(tl.int32)
    top = tl.full((HEADS,), _LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    value = tl.zeros((HEADS, LANES), tl.float32)
    for start in range(0, length, KEYS):
        place = start + tile
        entry = tl.load(indices + first + place, mask=place < length, other=-1).to(tl.int64)
        valid = (entry >= 0) & (entry < rows)
        key = tl.load(kv + entry[:, None] * kv_row + lane[None, :] * kv_lane, mask=valid[:, None] & used, other=0.0)
        counted = valid[None, :]
        score = tl.where(counted, tl.dot(vector, tl.trans(key)) * scale, _LOWEST)
        higher = tl.maximum(top, tl.max(score, 1))
        # While nothing was valid the maximum is the sentinel and exp(0) would count every masked entry.
        weight = tl.where(counted, tl.exp(score - higher[:, None]), 0.0)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.dot(weight.to(key.dtype), key, value * shrink[:, None])
        top = higher
    tl.store(lse + row * heads + head, tl.where(total > 0.0, top + tl.log(total), -float("inf")), mask=present)
    if HAS_SINK:
        logit = tl.load(sink + head, mask=present, other=_LOWEST)
        higher = tl.maximum(top, logit)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.exp(logit - higher)
        value = value * shrink[:, None]
    # Correctly rounded: n times a row over n is that row.
    value = tl.where((total > 0.0)[:, None], tl.div_rn(value, tl.maximum(total, 1e-30)[:, None]), 0.0)
    to = out + row * out_row + head[:, None] * out_head + lane[None, :] * out_lane
    tl.store(to, value.to(out.dtype.element_ty), mask=present[:, None] & (lane < out_lanes)[None, :])


def run(inputs: PrefillInputs) -> PrefillOutputs:
    """The answer of our kernel, written into the output memory of `inputs`; raises `ValueError` or `TypeError`."""
    indices, indptr = ragged_of(inputs)
    query, kv, out = inputs.query, inputs.kv, inputs.out
    queries, heads, lanes = query.shape
    lse = torch.empty((queries, heads), dtype=torch.float32, device=query.device)
    padded = max(16, triton.next_power_of_2(lanes))
    if queries:
        _prefill[(queries, -(-heads // _HEADS))](
            query, *query.stride(), kv, kv.stride(0), kv.stride(2), inputs.rows, indices, indptr,
            lse if inputs.sink is None else inputs.sink.contiguous(), out, *out.stride(), lse,
            heads, lanes, out.shape[2], float(inputs.scale),
            HAS_SINK=inputs.sink is not None, HEADS=_HEADS, KEYS=32 if padded < 512 else 16, LANES=padded,
            num_warps=8 if padded >= 512 else 4, num_stages=1,
        )  # fmt: skip
    return PrefillOutputs(out, lse)
