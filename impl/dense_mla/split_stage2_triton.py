"""How does our own Triton kernel merge the splits of a decode without a plan?

A program takes one request and head, and its rows one after the other, each a running merge of the filled splits. One
source for gfx942, gfx950, CUDA and Triton's interpreter; offsets are 64 bits wide.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.split_stage2 import Inputs, Outputs


@triton.jit
def _stage2(
    partials, packed, lse, query_starts, key_starts, split_starts, exported, out, out_row, out_head, merged, splits, lanes,
    granularity, LANES: tl.constexpr, HAS_EXPORTED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One request and head; grid (requests, heads). All but `out` are contiguous."""
    request = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1).to(tl.int64)
    lane = tl.arange(0, LANES)
    used = lane < lanes
    length = tl.load(key_starts + request + 1) - tl.load(key_starts + request)
    filled = tl.load(split_starts + request + 1) - tl.load(split_starts + request)
    filled = tl.minimum(filled, (length + granularity - 1) // granularity)
    if HAS_EXPORTED:
        filled = tl.minimum(filled, tl.load(exported + request))
    last = tl.load(query_starts + request + 1)
    for number in range(tl.load(query_starts + request), last):
        row = tl.cast(number, tl.int64)
        place = row * heads + head
        to = out + row * out_row + head * out_head + lane
        if PACKED:
            tl.store(to, tl.load(packed + place * lanes + lane, mask=used, other=0.0), mask=used)
            tl.store(merged + place, tl.load(lse + place))
        else:
            top = -float("inf")
            total = 0.0
            value = tl.zeros((LANES,), tl.float32)
            for split in range(filled):
                slot = (row * splits + split) * heads + head
                exponent = tl.load(lse + slot)
                top_now = tl.maximum(top, exponent)
                base = tl.where(top_now > -float("inf"), top_now, 0.0)
                shrink = tl.exp(top - base)
                weight = tl.exp(exponent - base)
                part = tl.load(partials + slot * lanes + lane, mask=used & (weight > 0.0), other=0.0)
                value = value * shrink + part * weight
                total = total * shrink + weight
                top = top_now
            some = total > 0.0
            divisor = tl.where(some, total, 1.0)
            value = tl.div_rn(value, tl.full((LANES,), 0.0, tl.float32) + divisor)
            tl.store(to, value.to(out.dtype.element_ty), mask=used)
            tl.store(merged + place, tl.where(some, top + tl.log(divisor), -float("inf")))


def run(inputs: Inputs) -> Outputs:
    """The merge of our kernel, written into the output memory of `inputs`."""
    rows, splits, heads, lanes = inputs.partials.shape
    merged = torch.empty((rows, heads), dtype=torch.float32, device=inputs.out.device)
    _stage2[(inputs.query_starts.shape[0] - 1, heads)](
        inputs.partials, inputs.partials.view(inputs.out.dtype), inputs.lse, inputs.query_starts, inputs.key_starts,
        inputs.split_starts, inputs.split_starts if inputs.exported is None else inputs.exported, inputs.out,
        *inputs.out.stride()[:2], merged, splits, lanes, inputs.granularity, LANES=triton.next_power_of_2(lanes),
        HAS_EXPORTED=inputs.exported is not None, PACKED=inputs.answer_packed, num_warps=1,
    )  # fmt: skip
    return Outputs(inputs.out, merged)
