"""How do our own kernels multiply attention rows with an output projection?

The rows are turned by our rotation into bfloat16 rows of their own, the weight is dequantised by our kernel, and a third
multiplies: a program makes one tile of one group, with fp32 sums. One source for gfx942, gfx950, CUDA and Triton's
interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.quant.wo_a_einsum import Inputs, Outputs
from cases.sparse_mla import inverse_rope
from impl.quant import wo_a_dequant_triton
from impl.quant.wo_a_dequant_call import Kept, Module
from impl.quant.wo_a_einsum_call import check
from impl.sparse_mla import inverse_rope_triton

_ROWS = 16
_COLUMNS = 32
_LANES = 128


@triton.jit
def product_kernel(
    rows, row_stride, head_stride, weight, out, tokens, rank, head_dim, group_heads,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One tile of one group; grid (column tiles, row tiles, groups).

    weight [groups, rank, group_heads * head_dim] and out [tokens, groups, rank] are contiguous bf16.
    """
    group = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    row_present, column_present = row < tokens, column < rank
    width = group_heads * head_dim
    weight_rows = weight + (group * rank + column)[None, :] * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for head in range(group_heads):
        source = rows + row.to(tl.int64)[:, None] * row_stride + (group * group_heads + head) * head_stride
        for first in range(0, head_dim, LANES):
            at = first + lane
            known = at < head_dim
            left = tl.load(source + at[None, :], mask=row_present[:, None] & known[None, :], other=0.0)
            right = weight_rows + head * head_dim + at[:, None]
            right = tl.load(right, mask=known[:, None] & column_present[None, :], other=0.0)
            total = tl.dot(left, right, total)
    to = out + (row.to(tl.int64)[:, None] * tl.num_programs(2) + group) * rank + column[None, :]
    tl.store(to, total.to(tl.bfloat16), mask=row_present[:, None] & column_present[None, :])


def run(inputs: Inputs) -> Outputs:
    """The product in a new tensor; raises `ValueError` or `TypeError`."""
    check(inputs)
    rows, groups, rank = inputs.rows, inputs.groups, inputs.rank
    weight = Kept(wo_a_dequant_triton.dequantise).weight(Module(inputs.module), (groups, rank, inputs.width))
    out = torch.empty((rows.shape[0], groups, rank), dtype=torch.bfloat16, device=rows.device)
    if not rows.shape[0]:
        return Outputs(out)
    if inputs.inverse_rope:
        rows = inverse_rope_triton.run(inverse_rope.Inputs(rows, inputs.positions, inputs.cos_sin, None, 0)).out
    tokens, heads, head_dim = rows.shape
    product_kernel[(-(-rank // _COLUMNS), -(-tokens // _ROWS), groups)](
        rows, rows.stride(0), rows.stride(1), weight, out, tokens, rank, head_dim, heads // groups,
        ROWS=_ROWS, COLUMNS=_COLUMNS, LANES=_LANES, num_warps=4,
    )  # fmt: skip
    return Outputs(out)
