"""How do our own kernels pack rows of indices into one ragged list?

Three launches: every row's number of kept entries, one program that turns the numbers into row starts, and the copies.
Rows and columns are walked in tiles, so neither number has a limit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _kept(indices, row_stride, lengths, bound, row, column, rows, width):
    """The indices of a tile as int64, and which of them are kept."""
    there = (row < rows)[:, None] & (column < width)[None, :]
    length = tl.load(lengths + row, mask=row < rows, other=0).to(tl.int64)
    index = tl.load(indices + row.to(tl.int64)[:, None] * row_stride + column[None, :], mask=there, other=-1)
    index = index.to(tl.int64)
    return index, there & (column[None, :] < length[:, None]) & (index >= 0) & ((bound < 0) | (index < bound))


@triton.jit
def _count(indptr, indices, row_stride, lengths, bound, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.zeros((ROWS,), tl.int32)
    for first in range(0, width, COLUMNS):
        _, keep = _kept(indices, row_stride, lengths, bound, row, first + tl.arange(0, COLUMNS), rows, width)
        count += tl.sum(keep.to(tl.int32), axis=1)
    tl.store(indptr + 1 + row, count, mask=row < rows)


@triton.jit
def _copy(flat, indptr, indices, row_stride, lengths, bound, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.load(indptr + row, mask=row < rows, other=0)
    for first in range(0, width, COLUMNS):
        index, keep = _kept(indices, row_stride, lengths, bound, row, first + tl.arange(0, COLUMNS), rows, width)
        rank = tl.cumsum(keep.to(tl.int32), axis=1)
        tl.store(flat + start[:, None] + rank - 1, index.to(tl.int32), mask=keep)
        start += tl.sum(keep.to(tl.int32), axis=1)


@triton.jit
def _sum_up(indptr, rows, TILE: tl.constexpr):
    tl.store(indptr, 0)
    total = 0
    for first in range(0, rows, TILE):
        row = first + tl.arange(0, TILE)
        count = tl.load(indptr + 1 + row, mask=row < rows, other=0)
        tl.store(indptr + 1 + row, total + tl.cumsum(count, axis=0), mask=row < rows)
        total += tl.sum(count, axis=0)


def tile_of(width: int) -> tuple[int, int]:
    """Rows and columns of a tile for rows of `width` entries."""
    columns = min(_TILE, triton.next_power_of_2(max(1, width)))
    return max(1, _TILE // (8 * columns)), columns


def sum_up(indptr: torch.Tensor) -> None:
    """Turns the counts in indptr[1:] into row starts, in place; indptr[0] becomes 0."""
    rows = indptr.numel() - 1
    _sum_up[(1,)](indptr, rows, TILE=min(_TILE, triton.next_power_of_2(max(1, rows))))


def pack(flat: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, bound: int) -> None:
    """Packs the kept entries of `indices` [rows, width], whose last stride is 1, into `flat` and `indptr`."""
    rows, width = indices.shape
    tile_rows, columns = tile_of(width)
    grid = (triton.cdiv(rows, tile_rows),)
    arguments = (indices, indices.stride(0), lengths, bound, rows, width)
    if rows:
        _count[grid](indptr, *arguments, ROWS=tile_rows, COLUMNS=columns)
    sum_up(indptr)
    if rows and width:
        _copy[grid](flat, indptr, *arguments, ROWS=tile_rows, COLUMNS=columns)
