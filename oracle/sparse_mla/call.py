"""What does a sparse MLA call say: which slots does a query read, what stands there, how is a row turned?"""

import torch

from cases.sparse_mla.decode import DecodeInputs, Segment
from oracle import rotation
from oracle.cache import records


def listed(segment: Segment, query: int) -> torch.Tensor:
    """The entries of one query in order, int64; the ragged form counts where both are given, and keeps invalid entries."""
    if segment.indices is not None and segment.indptr is not None:
        return segment.indices[int(segment.indptr[query]) : int(segment.indptr[query + 1])].long()
    assert segment.dense is not None
    row = segment.dense[query].long()
    limit = int((row >= 0).sum()) if segment.lengths is None else int(segment.lengths[query])
    row = row[: max(limit, 0)]
    return row[(row >= 0) & (row < segment.rows)]


def valid(segment: Segment, entries: torch.Tensor) -> torch.Tensor:
    """The entries that are slots of the segment's cache."""
    return entries[(entries >= 0) & (entries < segment.rows)]


def rows_of(segment: Segment, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The records in `slots` as [n, 512], NaN lanes as 0."""
    rows = records.dequantise(segment.cache, slots, segment.encoding, dtype)
    return rows.masked_fill_(torch.isnan(rows), 0.0)


def segments(inputs: DecodeInputs) -> tuple[Segment, ...]:
    """The segments of the call, main first."""
    return (inputs.main,) if inputs.extra is None else (inputs.main, inputs.extra)


def rotate_back(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """`rows` [..., heads, 512] with the last 64 lanes rotated by the inverse of `cos_sin` [..., 64], in their own dtype."""
    return rotation.turn(rows, cos_sin, rows.dtype)


def turned(inputs: DecodeInputs) -> torch.Tensor | None:
    """The cosines and sines of every query, [queries, 64]; None for a call without rotation."""
    if inputs.positions is None:
        return None
    assert inputs.cos_sin is not None
    return inputs.cos_sin[inputs.positions.long()]
