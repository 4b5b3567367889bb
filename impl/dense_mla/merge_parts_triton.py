"""How does our own Triton kernel merge attention parts?

A program takes one row and head: the log-sum-exps of all parts at once, then the vectors a tile of parts at a time. One
source for gfx942, gfx950, CUDA and Triton's interpreter; every offset is 64 bits wide. The rounding points are those of fp32
weights, sums and one division.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.merge_parts import Inputs, Outputs

_TILE = 16


@triton.jit
def _exponents(lse, offset, present):
    """Log-sum-exps in which every mark of an empty part is -inf; not `present` ones are empty too."""
    exponent = tl.load(lse + offset, mask=present, other=-float("inf"))
    # A comparison with NaN is false.
    return tl.where(exponent < float("inf"), exponent, -float("inf"))


@triton.jit
def _merge(
    parts, part_step, part_row, part_head, lse, lse_step, lse_row, lse_head, out, out_row, out_head, merged, count, lanes,
    ALL: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row and head; grid (rows, heads). `merged` is contiguous [rows, heads] fp32."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, LANES)
    used = lane < lanes
    lse += row * lse_row + head * lse_head
    parts += row * part_row + head * part_head
    every = tl.arange(0, ALL)
    exponent = _exponents(lse, every.to(tl.int64) * lse_step, every < count)
    top = tl.max(exponent, 0)
    base = tl.where(top > -float("inf"), top, 0.0)
    total = tl.sum(tl.exp(exponent - base), 0)
    value = tl.zeros((LANES,), tl.float32)
    for start in range(0, count, TILE):
        part = start + tl.arange(0, TILE)
        weight = tl.exp(_exponents(lse, part.to(tl.int64) * lse_step, part < count) - base)
        heard = weight > 0.0
        tile = tl.load(
            parts + part.to(tl.int64)[:, None] * part_step + lane[None, :],
            mask=heard[:, None] & used[None, :],
            other=0.0,
        )
        value += tl.sum(tile.to(tl.float32) * weight[:, None], 0)
    some = total > 0.0
    # Correctly rounded: n times a part over n is that part.
    value = tl.div_rn(value, tl.full((LANES,), 0.0, tl.float32) + tl.where(some, total, 1.0))
    tl.store(out + row * out_row + head * out_head + lane, value.to(out.dtype.element_ty), mask=used)
    log = tl.where(some, base + tl.log(tl.where(some, total, 1.0)), -float("inf"))
    tl.store(merged + row * tl.num_programs(1) + head, log)


def run(inputs: Inputs) -> Outputs:
    """The merge of our kernel, written into the output memory of `inputs`."""
    parts, lse, out = inputs.parts, inputs.lse, inputs.out
    count, rows, heads, lanes = parts.shape
    merged = torch.empty((rows, heads), dtype=torch.float32, device=parts.device)
    if rows:
        # Few lanes are held by several threads at once. Their sums agree to the bit only if every product is rounded before
        # it is added: contracted, each thread would round its own product and not its partner's.
        _merge[(rows, heads)](
            parts, *parts.stride()[:3], lse, *lse.stride(), out, *out.stride()[:2], merged, count, lanes,
            ALL=triton.next_power_of_2(count), TILE=_TILE, LANES=triton.next_power_of_2(lanes), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return Outputs(out, merged)
