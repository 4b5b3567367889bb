"""How does our own kernel turn attention rows back and quantise them to MXFP8?

One program a head of a row. Products and sums are float32, and what they give is quantised as it is. Lanes that do not
turn keep their bits up to the quantisation.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.quant.inverse_rope_mxfp8_rows import Inputs, Outputs
from cases.quant.mxfp8_rows import BLOCK
from impl.formats.codes_triton import widen_bfloat16
from impl.quant.mxfp8_triton import quantise_blocks


@triton.jit
def _turn_back_and_quantise(
    rows, row_stride, head_stride, positions, position_stride, table, table_stride, codes, codes_stride, scales,
    scales_stride, blocks, STAYING: tl.constexpr, HALF: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    known = (block < blocks)[:, None]
    pair = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    source = rows + row * row_stride + head * head_stride + 2 * pair
    even_bits = widen_bfloat16(tl.load(source, mask=known, other=0))
    odd_bits = widen_bfloat16(tl.load(source + 1, mask=known, other=0))
    turns = known & (pair >= STAYING)
    angle = table + tl.load(positions + row * position_stride).to(tl.int64) * table_stride + (pair - STAYING)
    cos = tl.load(angle, mask=turns, other=1.0)
    sin = tl.load(angle + HALF, mask=turns, other=0.0)
    even = even_bits.to(tl.float32, bitcast=True)
    odd = odd_bits.to(tl.float32, bitcast=True)
    even_turned = (even * cos + odd * sin).to(tl.int32, bitcast=True)
    odd_turned = (odd * cos - even * sin).to(tl.int32, bitcast=True)
    lanes = tl.join(tl.where(turns, even_turned, even_bits), tl.where(turns, odd_turned, odd_bits))
    code, byte = quantise_blocks(tl.reshape(lanes, (BLOCKS, 32)))
    lane = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes + row * codes_stride + head * blocks * 32 + lane, code.to(tl.uint8), mask=known)
    tl.store(scales + row * scales_stride + head * blocks + block, byte.to(tl.uint8), mask=block < blocks)


def run(inputs: Inputs) -> Outputs:
    """Turns and quantises all rows behind the finished ones in one launch."""
    tokens, heads, lanes = inputs.rows.shape
    done = inputs.finished
    if tokens > done:
        half = inputs.cos_sin.shape[1] // 2
        blocks = lanes // BLOCK
        rows, positions = inputs.rows[done:].view(torch.int16), inputs.positions[done:]
        codes, scales = inputs.codes[done:].view(torch.uint8), inputs.scales[done:]
        _turn_back_and_quantise[(tokens - done, heads)](
            rows, rows.stride(0), rows.stride(1), positions, positions.stride(0), inputs.cos_sin,
            inputs.cos_sin.stride(0), codes, codes.stride(0), scales, scales.stride(0), blocks,
            STAYING=lanes // 2 - half, HALF=half, BLOCKS=triton.next_power_of_2(blocks),
        )  # fmt: skip
    return Outputs(inputs.codes, inputs.scales)
