"""How do our own kernels turn the attention rows that still owe their rotation?

A program per row and head. In place, the 32 pairs of a head are loaded before any is stored. With an MXFP8 output the whole
head is loaded as pairs, those in front of the rotary lanes pass unchanged, and the float32 numbers are quantised at once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.sparse_mla.output_rows import Inputs, Outputs
from impl.formats.codes_triton import round_bfloat16, widen_bfloat16
from impl.quant.mxfp8_triton import quantise_blocks
from impl.sparse_mla.output_rows import settled, turned_by_attention, zeroed

_PAIRS = tl.constexpr(256)
_STAYING = tl.constexpr(224)


@triton.jit
def _pairs(rows, row_stride, head_stride, pair, positions, table, table_stride, turns):
    """float32 even and odd lanes of a head's pairs, turned back where `turns` says so."""
    row = tl.program_id(0).to(tl.int64)
    lane = rows + row * row_stride + tl.program_id(1).to(tl.int64) * head_stride + 2 * pair
    even = widen_bfloat16(tl.load(lane)).to(tl.float32, bitcast=True)
    odd = widen_bfloat16(tl.load(lane + 1)).to(tl.float32, bitcast=True)
    angle = table + tl.load(positions + row).to(tl.int64) * table_stride + pair - _STAYING
    cos = tl.load(angle, mask=turns, other=1.0)
    sin = tl.load(angle + _PAIRS - _STAYING, mask=turns, other=0.0)
    # Where nothing turns, even 0 * infinity must not.
    return tl.where(turns, even * cos + odd * sin, even), tl.where(turns, odd * cos - even * sin, odd)


@triton.jit
def _turn_in_place(rows, row_stride, head_stride, positions, table, table_stride):
    pair = _STAYING + tl.arange(0, 32)
    even, odd = _pairs(rows, row_stride, head_stride, pair, positions, table, table_stride, pair >= _STAYING)
    lane = rows + tl.program_id(0).to(tl.int64) * row_stride + tl.program_id(1).to(tl.int64) * head_stride + 2 * pair
    tl.store(lane, round_bfloat16(even.to(tl.int32, bitcast=True)).to(tl.int16))
    tl.store(lane + 1, round_bfloat16(odd.to(tl.int32, bitcast=True)).to(tl.int16))


@triton.jit
def _turn_and_quantise(
    rows, row_stride, head_stride, positions, table, table_stride, codes, codes_stride, scales, scales_stride
):
    pair = tl.arange(0, _PAIRS)
    even, odd = _pairs(rows, row_stride, head_stride, pair, positions, table, table_stride, pair >= _STAYING)
    lanes = tl.reshape(tl.join(even, odd), (16, 32)).to(tl.int32, bitcast=True)
    code, byte = quantise_blocks(lanes)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.arange(0, 16)
    lane = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes + row * codes_stride + head * 512 + lane, code.to(tl.uint8))
    tl.store(scales + row * scales_stride + head * 16 + block, byte.to(tl.uint8))


def run(inputs: Inputs) -> Outputs:
    """Turns every owed row in one launch."""
    if inputs.warm_up:
        return zeroed(inputs)
    start = turned_by_attention(inputs)
    rows, positions, table = inputs.rows[start:].view(torch.int16), inputs.positions[start:], inputs.cos_sin
    owed = rows.shape[0]
    source = (rows, rows.stride(0), rows.stride(1), positions, table, table.stride(0))
    if owed and (inputs.codes is None or inputs.scales is None):
        _turn_in_place[(owed, inputs.heads)](*source)
    elif owed:
        assert inputs.codes is not None and inputs.scales is not None
        codes, scales = inputs.codes[start:].view(torch.uint8), inputs.scales[start:]
        _turn_and_quantise[(owed, inputs.heads)](*source, codes, codes.stride(0), scales, scales.stride(0))
    return settled(inputs, owed)
