"""How does our own kernel multiply MXFP8 rows with a grouped MXFP8 weight?

A program makes one tile of the answer. It takes the lanes 32 at a time: a bf16 product of the bare codes, whose terms
are exact in fp32, then the sums times the power of two that both scale bytes make together. So no scaled operand can
leave a format, whatever the bytes. One source for gfx942, gfx950, CUDA and Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.quant.mxfp8_bmm import Inputs, Outputs
from impl.quant.mxfp8_bmm_call import checked, tile_for

_LANES = tl.constexpr(32)


@triton.jit
def _e4m3fn(codes):
    """bf16 numbers of OCP e4m3 codes given as int8; 0x7F and 0xFF are NaN."""
    # The code shifted under fp16's sign and exponent is the number divided by 2^8, subnormals included.
    bits = (codes.to(tl.int16) << 7) & -16385
    number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x3F80) == 0x3F80, float("nan"), number).to(tl.bfloat16)


@triton.jit
def _power(exponent):
    """2^exponent as fp32, for exponents -127 to 127 given as int32."""
    return tl.where(exponent == -127, 0x400000, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def product_kernel(
    a, a_row, a_scale, a_scale_row, weight, weight_row, weight_scale, weight_scale_row, out, out_row, tokens, rank, width,
    SCALE_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS tokens and COLUMNS columns of one group; grid (column tiles, row tiles).

    `a` and `weight` are int8; COLUMNS divides rank, and 32 divides width. The lanes of a tile, which divide width too, say
    nothing here: whatever their number, a step takes the 32 that share scales.
    """
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = (tl.program_id(0) * COLUMNS // rank).to(tl.int64)
    present = row < tokens
    lane = tl.arange(0, _LANES)
    a_codes = a + group * width + row[:, None] * a_row + lane[None, :]
    weight_codes = weight + column[None, :] * weight_row + lane[:, None]
    a_bytes = a_scale + group * (width // _LANES) + row * a_scale_row
    weight_bytes = weight_scale + (column // SCALE_ROWS) * weight_scale_row
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(width // _LANES):
        left = tl.load(a_codes + block * _LANES, mask=present[:, None], other=0)
        right = tl.load(weight_codes + block * _LANES)
        sums = tl.dot(_e4m3fn(left), _e4m3fn(right))
        powers = tl.load(a_bytes + block, mask=present, other=127).to(tl.int32)[:, None]
        powers += tl.load(weight_bytes + block).to(tl.int32)[None, :] - 254
        # Two steps, since 2^-254 and 2^254 are no numbers of fp32.
        half = powers >> 1
        total += sums * _power(half) * _power(powers - half)
    to = out + row[:, None] * out_row + column[None, :]
    tl.store(to, total.to(tl.bfloat16), mask=present[:, None])


def run(inputs: Inputs) -> Outputs:
    """The product, written into `inputs.out`, and the tile of the launch; raises `ValueError` or `TypeError`."""
    scale_rows = checked(inputs)
    tokens, groups = inputs.a.shape[0], inputs.groups
    tile = tile_for(tokens, groups)
    rows, columns, _, warps, stages = tile
    if tokens:
        product_kernel[(groups * inputs.rank // columns, -(-tokens // rows))](
            inputs.a.view(torch.int8), inputs.a.stride(0), inputs.a_scale, inputs.a_scale.stride(0),
            inputs.weight.view(torch.int8), inputs.weight.stride(0), inputs.weight_scale, inputs.weight_scale.stride(0),
            inputs.out, inputs.out.stride(0), tokens, inputs.rank, inputs.weight.shape[1],
            SCALE_ROWS=scale_rows, ROWS=rows, COLUMNS=columns,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return Outputs(inputs.out, torch.tensor(tile))
