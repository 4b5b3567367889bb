"""How does our own kernel count the tokens that rows of a verify block see on one rank?"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dcp.verify_lengths import Inputs, Outputs

_ROWS = 128


@triton.jit
def _count(out, lengths, length_stride, rows, queries, rank, ranks, interleave, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    request = row // queries
    length = tl.load(lengths + request * length_stride, mask=inside, other=0).to(tl.int64)
    visible = tl.maximum(length - queries + 1 + row % queries, 0)
    rounds = visible // (ranks * interleave)
    left = visible - rounds * (ranks * interleave)
    own = tl.minimum(tl.maximum(left - rank * interleave, 0), interleave)
    tl.store(out + row, (rounds * interleave + own).to(tl.int32), mask=inside)


def run(inputs: Inputs) -> Outputs:
    """All rows in one launch."""
    rows = inputs.lengths.numel() * inputs.queries
    out = torch.empty(rows, dtype=torch.int32, device=inputs.lengths.device)
    if rows:
        _count[(triton.cdiv(rows, _ROWS),)](
            out, inputs.lengths, inputs.lengths.stride(0), rows, inputs.queries, inputs.rank, inputs.ranks,
            inputs.interleave, ROWS=_ROWS,
        )  # fmt: skip
    return Outputs(out)
