"""How does our own kernel build the tables of a decode batch?

One launch of one program: it walks the tables in tiles and carries the sums along, so that a captured graph's buffers
change together. Elements behind the batch count as requests without queries and keys, which makes every tail flat.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.batches import Batch

_TILE = 1024


@triton.jit
def _tables(
    qo_indptr, kv_indptr, kernel_lens, global_indptr,
    query_start, query_stride, seq_lens, seq_stride, global_lens, global_stride,
    requests, room, query, world,
    PADDED: tl.constexpr, UNIFORM: tl.constexpr, GLOBAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    keys = 0
    all_keys = 0
    tl.store(kv_indptr, 0)
    tl.store(qo_indptr, 0)
    if GLOBAL:
        tl.store(global_indptr, 0)
    for first in range(0, room, TILE):
        at = first + tl.arange(0, TILE)
        there = at < requests
        end = tl.load(query_start + (at + 1).to(tl.int64) * query_stride, mask=there, other=0)
        begin = tl.load(query_start + at.to(tl.int64) * query_stride, mask=there, other=0)
        length = tl.load(seq_lens + at.to(tl.int64) * seq_stride, mask=there, other=0)
        if PADDED:
            length = tl.where(there & (end == begin), query, length)
        tl.store(kernel_lens + at, length, mask=there)
        tl.store(kv_indptr + 1 + at, keys + tl.cumsum(length, axis=0), mask=at < room)
        keys += tl.sum(length, axis=0)
        last = tl.minimum(at + 1, requests)
        starts = last * query
        if not UNIFORM:
            starts = tl.load(query_start + last.to(tl.int64) * query_stride)
        tl.store(qo_indptr + 1 + at, starts, mask=at < room)
        if GLOBAL:
            whole = tl.load(global_lens + at.to(tl.int64) * global_stride, mask=there, other=0)
            if PADDED:
                whole = tl.where(there & (end == begin), query * world, whole)
            tl.store(global_indptr + 1 + at, all_keys + tl.cumsum(whole, axis=0), mask=at < room)
            all_keys += tl.sum(whole, axis=0)


def fill(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kernel_lens: torch.Tensor,
    global_indptr: torch.Tensor | None,
    batch: Batch,
    query: int,
    world: int,
    *,
    padded: bool,
    uniform: bool,
) -> None:
    """Writes all of the row starts, which have the same room, and the first lengths.

    padded: requests without queries get `query` keys. uniform: every request has `query` queries.
    """
    room = kv_indptr.numel() - 1
    _tables[(1,)](
        qo_indptr, kv_indptr, kernel_lens, kv_indptr if global_indptr is None else global_indptr,
        batch.query_start, batch.query_start.stride(0), batch.seq_lens, batch.seq_lens.stride(0),
        batch.global_lens, batch.global_lens.stride(0),
        len(batch.query_lens), room, query, world,
        PADDED=padded, UNIFORM=uniform, GLOBAL=global_indptr is not None,
        TILE=min(_TILE, triton.next_power_of_2(max(1, room))),
    )  # fmt: skip
