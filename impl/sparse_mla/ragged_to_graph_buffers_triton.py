"""How does our own kernel copy ragged lists into the buffers of a captured graph?

One launch for entries and starts: whoever replays the graph on the same stream sees both of a step or neither.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from impl.sparse_mla.ragged_to_graph_buffers import bounds

_BLOCK = 1024


@triton.jit
def _copy(indices, indptr, index_buffer, indptr_buffer, entries, starts, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(index_buffer + at, tl.load(indices + at, mask=at < entries, other=0), mask=at < entries)
    tl.store(indptr_buffer + at, tl.load(indptr + at, mask=at < starts, other=0), mask=at < starts)


def copy(
    indices: torch.Tensor, indptr: torch.Tensor, index_buffer: torch.Tensor, indptr_buffer: torch.Tensor, rows: int,
    per_row: int, arch: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One step's lists in their buffers; raises ValueError where they do not fit."""
    length = bounds(indices, index_buffer, indptr_buffer, rows, per_row)
    entries, starts = indices.numel(), rows + 1
    programs = triton.cdiv(max(entries, starts), _BLOCK)
    _copy[(programs,)](indices, indptr, index_buffer, indptr_buffer, entries, starts, BLOCK=_BLOCK)
    return index_buffer[: max(entries, 1) if arch == "gfx950" else length], indptr_buffer[:starts]
