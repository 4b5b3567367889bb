"""How does our own kernel fold query rows, and unfold a kernel's answer?

One program copies 16 heads of one row, whose places in both forms follow from its number.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.fold_rows import Inputs, Outputs

_HEADS = 16


@triton.jit
def _move(
    target, source, row_stride, head_stride, tokens, width,
    FOLD: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, group, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    request, token = row // tokens, row % tokens
    folded = ((request * groups + group) * tokens + token).to(tl.int64)
    whole = row.to(tl.int64)
    head = tl.arange(0, HEADS)
    if FOLD:
        read = source + whole * row_stride + (group * HEADS + head).to(tl.int64) * head_stride
        write = target + (folded * HEADS + head) * width
    else:
        read = source + folded * row_stride + head.to(tl.int64) * head_stride
        write = target + (whole * groups * HEADS + group * HEADS + head) * width
    for first in range(0, width, TILE):
        element = first + tl.arange(0, TILE)
        there = (element < width)[None, :] & (head < HEADS)[:, None]
        tl.store(write[:, None] + element[None, :], tl.load(read[:, None] + element[None, :], mask=there), mask=there)


def _moved(source: torch.Tensor, rows: int, groups: int, tokens: int, *, fold: bool) -> torch.Tensor:
    """[rows, heads, width] from or to [rows * groups, 16, width], packed; bits are moved, not numbers."""
    width = source.shape[2]
    shape = (rows * groups, _HEADS, width) if fold else (rows, groups * _HEADS, width)
    target = torch.empty(shape, dtype=source.dtype, device=source.device)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[source.element_size()]
    if rows:
        _move[(rows, groups)](
            target.view(bits), source.view(bits), source.stride(0), source.stride(1), tokens, width, FOLD=fold,
            HEADS=_HEADS, TILE=min(128, triton.next_power_of_2(width)),
        )  # fmt: skip
    return target


def run(inputs: Inputs) -> Outputs:
    """Three launches: the queries there, output and log-sum-exp back."""
    rows, heads, _ = inputs.query.shape
    sizes = (rows, heads // _HEADS, inputs.query_tokens)
    return Outputs(
        folded=_moved(inputs.query, *sizes, fold=True),
        out=_moved(inputs.folded_out, *sizes, fold=False),
        lse=_moved(inputs.folded_lse[..., None], *sizes, fold=False)[..., 0],
    )
