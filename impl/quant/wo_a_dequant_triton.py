"""How does our own kernel dequantise an output projection's weight?

A program makes some columns of some rows, every element with the scale of its block. Codes are decoded by integer
arithmetic in `impl.formats.codes_triton`, exponents become fp32 bit by bit, and only the product is floating point.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.quant.wo_a_dequant import Inputs, Outputs
from impl.formats.codes_triton import LAYOUTS, decode_code, decode_power, round_bfloat16
from impl.quant.wo_a_dequant_call import Kept, Shape, three_calls

_INFINITY = tl.constexpr(0x7F800000)
_ROWS = 16
_COLUMNS = 128


@triton.jit
def dequantise_kernel(
    out, weight, weight_row, scale, scale_row, rows, width, block_rows, block_columns,
    SCALE: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`out` is int16 [rows, width], contiguous, `weight` uint8; `scale` is uint8, or fp32 as int32; grid (rows, columns)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    present = (row < rows)[:, None] & (column < width)[None, :]
    codes = tl.load(weight + row[:, None].to(tl.int64) * weight_row + column[None, :], mask=present, other=0).to(
        tl.int32
    )
    bits = decode_code(codes, 3, BIAS, 0x80, LARGEST, NAN, SIGNED_ZERO)
    if SCALE != "none":
        block = (row // block_rows)[:, None].to(tl.int64) * scale_row + (column // block_columns)[None, :]
        factor = tl.load(scale + block, mask=present, other=0).to(tl.int32)
        if SCALE == "uint8":
            factor = decode_power(factor, _INFINITY)
        elif SCALE == "float8_e8m0fnu":
            factor = factor << 23
        bits = (bits.to(tl.float32, bitcast=True) * factor.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    to = out + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(to, round_bfloat16(bits).to(tl.int16), mask=present)


def dequantise(weight: torch.Tensor, scale: torch.Tensor | None, shape: Shape) -> torch.Tensor:
    """The bfloat16 weight [groups, rank, width]; a weight that is bfloat16 is copied."""
    if weight.element_size() != 1:
        return weight.to(torch.bfloat16, copy=True).view(shape)
    rows, width = weight.shape
    layout = LAYOUTS[str(weight.dtype).removeprefix("torch.")]
    out = torch.empty((rows, width), dtype=torch.bfloat16, device=weight.device)
    codes = weight.view(torch.uint8)
    scales = codes if scale is None else scale.view(torch.int32 if scale.dtype == torch.float32 else torch.uint8)
    dequantise_kernel[(-(-rows // _ROWS), -(-width // _COLUMNS))](
        out.view(torch.int16), codes, codes.stride(0), scales, scales.stride(0), rows, width,
        rows // scales.shape[0], width // scales.shape[1],
        SCALE="none" if scale is None else str(scale.dtype).removeprefix("torch."),
        BIAS=layout.bias, LARGEST=layout.largest, NAN=layout.nan, SIGNED_ZERO=layout.signed_zero,
        ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out.view(shape)


def run(inputs: Inputs) -> Outputs:
    """The three calls; raises `ValueError` or `TypeError`."""
    return three_calls(inputs, Kept(dequantise).weight)
