"""How does our own kernel turn attention rows back?

One program a row and eight heads. Both lanes of a pair are loaded before either is stored, so the answer may lie where
the rows do. Products and sums are float32; bfloat16 patterns are widened and rounded by integer arithmetic, and those of
the lanes that stay are copied.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.sparse_mla.inverse_rope import Inputs, Outputs
from impl.formats.codes_triton import round_bfloat16, widen_bfloat16

_HEADS = 8


@triton.jit
def _wide(pointers, mask, PATTERNS: tl.constexpr):
    """float32 numbers; PATTERNS says that bfloat16 lies there, seen as int16."""
    if PATTERNS:
        return widen_bfloat16(tl.load(pointers, mask=mask, other=0)).to(tl.float32, bitcast=True)
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _narrow(values):
    """int16 patterns of the bfloat16 numbers nearest to float32 ones."""
    return round_bfloat16(values.to(tl.int32, bitcast=True)).to(tl.int16)


@triton.jit
def _turn_back(
    rows, row_stride, head_stride, positions, position_stride, table, table_stride, out, out_row_stride,
    out_head_stride, heads, NOPE: tl.constexpr, HALF: tl.constexpr, PATTERNS: tl.constexpr, IN_PLACE: tl.constexpr,
    HEADS: tl.constexpr, STAYING: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    present = (head < heads)[:, None]
    head = head.to(tl.int64)[:, None]
    source = rows + row * row_stride + head * head_stride
    target = out + row * out_row_stride + head * out_head_stride
    if not IN_PLACE:
        lane = tl.arange(0, STAYING)[None, :]
        stays = present & (lane < NOPE)
        if PATTERNS:
            tl.store(target + lane, tl.load(source + lane, mask=stays, other=0), mask=stays)
        else:
            tl.store(target + lane, _narrow(_wide(source + lane, stays, False)), mask=stays)
    pair = tl.arange(0, PAIRS)[None, :]
    known = pair < HALF
    position = tl.load(positions + row * position_stride).to(tl.int64)
    angle = table + position * table_stride + pair
    cos = tl.load(angle, mask=known, other=1.0)
    sin = tl.load(angle + HALF, mask=known, other=0.0)
    turns = present & known
    lane = NOPE + 2 * pair
    even = _wide(source + lane, turns, PATTERNS)
    odd = _wide(source + lane + 1, turns, PATTERNS)
    tl.store(target + lane, _narrow(even * cos + odd * sin), mask=turns)
    tl.store(target + lane + 1, _narrow(odd * cos - even * sin), mask=turns)


def run(inputs: Inputs) -> Outputs:
    """Turns all rows behind the rotated ones in one launch."""
    source = inputs.source
    out = torch.empty(source.shape, dtype=torch.bfloat16, device=source.device) if inputs.out is None else inputs.out
    tokens, heads, lanes = source.shape
    half = inputs.cos_sin.shape[1] // 2
    nope = lanes - 2 * half
    if tokens > inputs.rotated:
        patterns = source.dtype == torch.bfloat16
        rows = source[inputs.rotated :]
        positions = inputs.positions[inputs.rotated :]
        target = out[inputs.rotated :].view(torch.int16)
        _turn_back[(tokens - inputs.rotated, triton.cdiv(heads, _HEADS))](
            rows.view(torch.int16) if patterns else rows, rows.stride(0), rows.stride(1), positions,
            positions.stride(0), inputs.cos_sin, inputs.cos_sin.stride(0), target, target.stride(0), target.stride(1),
            heads, NOPE=nope, HALF=half, PATTERNS=patterns, IN_PLACE=inputs.rows is None, HEADS=_HEADS,
            STAYING=triton.next_power_of_2(nope), PAIRS=triton.next_power_of_2(half),
        )  # fmt: skip
    return Outputs(out)
