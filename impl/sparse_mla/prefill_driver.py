"""How does a layer drive sparse MLA prefill chunk by chunk, whoever gathers and attends?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cases.cache import kv_gather_dequant
from cases.cache.kv_record_write import LANES, NOPE
from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from cases.sparse_mla.prefill_chunked_call import (
    Chunk,
    ChunkedInputs,
    compressed_lens_of,
    refuse_malformed,
    starts_of,
)

Gather = Callable[[kv_gather_dequant.Inputs], object]
Attend = Callable[[PrefillInputs], PrefillOutputs]
# Lists are as wide as a multiple of this, so that kernels meet few widths.
_ALIGNED = 128


def drive(inputs: ChunkedInputs, gather: Gather, attend: Attend) -> PrefillOutputs:
    """The answer, written into the output memory of `inputs`; raises `ValueError` or `TypeError` for what is no call."""
    refuse_malformed(inputs)
    starts = starts_of(inputs)
    lse = torch.empty(inputs.query.shape[:2], dtype=torch.float32, device=inputs.query.device)
    for chunk in inputs.chunks:
        rows = slice(starts[chunk.first], starts[chunk.last])
        for call in gathers_of(inputs, chunk):
            gather(call)
        lists, lengths = combined(inputs, chunk)
        answer = attend(
            PrefillInputs(
                query=inputs.query[rows],
                kv=workspace_of(inputs, chunk).flatten(0, 1)[:, None],
                scale=inputs.scale,
                sink=inputs.sink,
                nope_lanes=NOPE,
                rope_lanes=LANES - NOPE,
                out=inputs.out[rows],
                dense=lists,
                lengths=lengths,
            )
        )
        if answer.lse is not None:
            lse[rows] = answer.lse
    return PrefillOutputs(inputs.out, lse)


def workspace_of(inputs: ChunkedInputs, chunk: Chunk) -> torch.Tensor:
    """The chunk's part of the workspace, [requests, rows, 512]."""
    count = chunk.last - chunk.first
    return inputs.workspace[: count * chunk.rows].view(count, chunk.rows, LANES)


def gathers_of(inputs: ChunkedInputs, chunk: Chunk) -> list[kv_gather_dequant.Inputs]:
    """The gathers of a chunk: compressed records to the front of each request's rows, the window's behind them."""
    own = slice(chunk.first, chunk.last)
    batch = slice(inputs.decodes + chunk.first, inputs.decodes + chunk.last)
    out = workspace_of(inputs, chunk)
    calls = []
    if inputs.compressed_cache is not None:
        calls.append(
            kv_gather_dequant.Inputs(
                out=out, cache=inputs.compressed_cache.cache, seq_lens=compressed_lens_of(inputs)[own], gather_lens=None,
                table=inputs.compressed_cache.table[batch], offset=0, encoding=inputs.compressed_cache.encoding,
                max_gather_len=chunk.compressed_rows,
            )
        )  # fmt: skip
    calls.append(
        kv_gather_dequant.Inputs(
            out=out, cache=inputs.window_cache.cache, seq_lens=inputs.seq_lens[own], gather_lens=inputs.gather_lens[own],
            table=inputs.window_cache.table[batch], offset=chunk.compressed_rows, encoding=inputs.window_cache.encoding,
            max_gather_len=chunk.rows - chunk.compressed_rows,
        )
    )  # fmt: skip
    return calls


def combined(inputs: ChunkedInputs, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token's rows of the workspace, int32 [tokens, width] with -1 where there is none, and how many columns count.

    First the chosen compressed positions, holes included, then the window.
    """
    device = inputs.query.device
    starts = inputs.query_start[inputs.decodes + chunk.first : inputs.decodes + chunk.last + 1].long()
    sizes = starts[1:] - starts[:-1]
    request = torch.repeat_interleave(torch.arange(sizes.numel(), device=device), sizes)
    token = torch.arange(request.numel(), device=device) + starts[0]
    length = inputs.seq_lens[chunk.first : chunk.last].long()
    position = (length - sizes - starts[:-1])[request] + token
    base = request * chunk.rows
    width = inputs.topk.shape[1] if inputs.topk is not None else 0
    chosen = torch.zeros_like(position)
    lists = torch.full(
        (request.numel(), -(-(width + inputs.window) // _ALIGNED) * _ALIGNED), -1, dtype=torch.int64, device=device
    )
    column = torch.arange(lists.shape[1], device=device)
    if inputs.topk is not None:
        chosen = torch.clamp((position + 1) // inputs.ratio, 0, width)
        entries = inputs.topk[token].long()
        counts = (column[:width] < chosen[:, None]) & (entries >= 0) & (entries < chunk.compressed_rows)
        lists[:, :width] = torch.where(counts, entries + base[:, None], -1)
    seen = torch.clamp(position + 1, 0, inputs.window)
    gathered_from = (length - inputs.gather_lens[chunk.first : chunk.last].long())[request]
    first = base + chunk.compressed_rows + position + 1 - seen - gathered_from
    step = column - chosen[:, None]
    lists = torch.where((step >= 0) & (step < seen[:, None]), first[:, None] + step, lists)
    return lists.to(torch.int32), (chosen + seen).to(torch.int32)
