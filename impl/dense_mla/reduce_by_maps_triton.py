"""How does our own kernel merge partial attention results by the maps of a plan?

A program per group, block of heads, and share of the group's rows. It goes through the parts of a row once, with a running
maximum, sum and merge in float32, and reads of a part without a key only that it has none.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.reduce_by_maps import Inputs, Outputs

# Programs that share the rows of a group on a GPU.
_SHARES = 16
_LANES_AT_ONCE = 1024


@triton.jit
def merge_kernel(
    partial_out, partial_lse, group_start, groups, parts, out, out_row, out_head, lse, lse_row, heads, lanes, shares,
    MAPPED: tl.constexpr, WITH_LSE: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Merges the parts of a group; grid (groups, head blocks, shares)."""
    group = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    present = head < heads
    inside = present[:, None] & (lane < lanes)[None, :]
    begin = tl.load(group_start + group)
    count = tl.load(group_start + group + 1) - begin
    if count > 1:
        if MAPPED:
            first = tl.load(groups + 2 * group)
            last = tl.load(groups + 2 * group + 1)
        else:
            rows = tl.load(parts + begin + 1) - tl.load(parts + begin)
            first = group * rows
            last = first + rows
        for row in range(first + tl.program_id(2), last, shares):
            top = tl.full((HEADS,), -float("inf"), tl.float32)
            total = tl.zeros((HEADS,), tl.float32)
            merged = tl.zeros((HEADS, LANES), tl.float32)
            for part in range(begin, begin + count):
                scratch = (tl.load(parts + part) + row - first).to(tl.int64) * heads + head
                own = tl.load(partial_lse + scratch, mask=present, other=-float("inf"))
                # False for NaN too.
                live = (own > -float("inf")) & (own < float("inf"))
                higher = tl.maximum(top, tl.where(live, own, -float("inf")))
                # Before the first live part there is nothing to shrink, and no difference of infinities to take.
                shrink = tl.where(top > -float("inf"), tl.exp(top - higher), 0.0)
                weight = tl.where(live, tl.exp(own - higher), 0.0)
                values = partial_out + scratch[:, None] * lanes + lane[None, :]
                value = tl.load(values, mask=inside & live[:, None], other=0.0)
                merged = merged * shrink[:, None] + weight[:, None] * value
                total = total * shrink + weight
                top = higher
            found = total > 0.0
            merged = tl.where(found[:, None], tl.div_rn(merged, tl.where(found, total, 1.0)[:, None]), 0.0)
            place = tl.cast(row, tl.int64)
            to = out + place * out_row + head.to(tl.int64)[:, None] * out_head + lane[None, :]
            tl.store(to, merged.to(out.dtype.element_ty), mask=inside)
            if WITH_LSE:
                tl.store(lse + place * lse_row + head, top + tl.log(total), mask=present)


def run(inputs: Inputs) -> Outputs:
    """Merges all groups in one launch."""
    groups = inputs.group_start.numel() - 1
    _, heads, lanes = inputs.out.shape
    # A head's arithmetic does not depend on its neighbours: the interpreter likes few large programs, a GPU many small.
    interpreted = not isinstance(merge_kernel, triton.runtime.JITFunction)
    padded = triton.next_power_of_2(lanes)
    block = min(triton.next_power_of_2(heads), 16 if interpreted else max(1, _LANES_AT_ONCE // padded))
    shares = 1 if interpreted else _SHARES
    map_of_rows: torch.Tensor = inputs.parts if inputs.groups is None else inputs.groups
    lse = inputs.partial_lse if inputs.lse is None else inputs.lse
    if groups:
        merge_kernel[(groups, -(-heads // block), shares)](
            inputs.partial_out, inputs.partial_lse, inputs.group_start, map_of_rows, inputs.parts,
            inputs.out, inputs.out.stride(0), inputs.out.stride(1), lse, lse.stride(0), heads, lanes, shares,
            MAPPED=inputs.groups is not None, WITH_LSE=inputs.lse is not None, HEADS=block, LANES=padded, num_warps=4,
        )  # fmt: skip
    return Outputs(inputs.out, inputs.lse)
