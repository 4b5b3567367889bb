"""How does our own kernel quantise rows to MXFP8? One program a row and 16 blocks of 32 lanes."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.quant.mxfp8_rows import BLOCK, Inputs, Outputs
from impl.formats.codes_triton import widen_bfloat16
from impl.quant.mxfp8_triton import quantise_blocks

_BLOCKS = 16
_PATTERNS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@triton.jit
def _quantise(
    rows, stack_stride, row_stride, lane_stride, tokens, blocks, codes, scales, WIDEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    known = block < blocks
    lane = block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    stack = number // tokens
    source = rows + stack * stack_stride + (number - stack * tokens) * row_stride + lane * lane_stride
    bits = tl.load(source, mask=known[:, None], other=0)
    if WIDEN:
        bits = widen_bfloat16(bits)
    code, byte = quantise_blocks(bits)
    tl.store(codes + number * blocks * 32 + lane, code.to(tl.uint8), mask=known[:, None])
    tl.store(scales + number * blocks + block, byte.to(tl.uint8), mask=known)


def run(inputs: Inputs) -> Outputs:
    """Quantises all rows in one launch, wherever they lie."""
    rows = inputs.rows
    blocks = rows.shape[-1] // BLOCK
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((*rows.shape[:-1], blocks), dtype=torch.uint8, device=rows.device)
    stack = rows if rows.dim() == 3 else rows[None]
    if rows.numel():
        _quantise[(stack.shape[0] * stack.shape[1], triton.cdiv(blocks, _BLOCKS))](
            stack.view(_PATTERNS[rows.dtype]), stack.stride(0), stack.stride(1), stack.stride(2), stack.shape[1],
            blocks, codes.view(torch.uint8), scales, WIDEN=rows.dtype == torch.bfloat16, BLOCKS=_BLOCKS,
        )  # fmt: skip
    return Outputs(codes, scales)
