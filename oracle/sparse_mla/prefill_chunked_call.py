"""Which records does a token of chunked sparse MLA prefill read?"""

import torch

from cases.sparse_mla.prefill_chunked_call import ChunkedInputs, PagedCache, compressed_lens_of, starts_of
from oracle.cache import records


def tokens_of(inputs: ChunkedInputs) -> list[tuple[int, int]]:
    """Prefill request and position in it of every prefill token."""
    starts, lengths = starts_of(inputs), inputs.seq_lens.tolist()
    return [
        (r, length - (starts[r + 1] - starts[r]) + i)
        for r, length in enumerate(lengths)
        for i in range(starts[r + 1] - starts[r])
    ]


def slots_of(paged: PagedCache, row: int, positions: torch.Tensor) -> torch.Tensor:
    """The slots of positions of one request of the batch."""
    block = paged.cache.shape[1]
    return paged.table[row].long()[positions // block] * block + positions % block


def window_positions(inputs: ChunkedInputs, position: int) -> torch.Tensor:
    """The positions in the window of a token at `position`, itself the last."""
    return torch.arange(max(0, position - inputs.window + 1), position + 1)


def chosen_positions(inputs: ChunkedInputs, token: int, request: int, position: int) -> torch.Tensor:
    """The compressed positions that a token reads, in order."""
    if inputs.topk is None:
        return torch.empty(0, dtype=torch.int64)
    row = inputs.topk[int(inputs.query_start[inputs.decodes]) + token].long()
    row = row[: max(0, (position + 1) // inputs.ratio)]
    return row[(row >= 0) & (row < int(compressed_lens_of(inputs)[request]))]


def slots_read(inputs: ChunkedInputs, token: int, request: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots that a token reads in the window cache, and those in the compressed cache."""
    row = inputs.decodes + request
    window = slots_of(inputs.window_cache, row, window_positions(inputs, position))
    if inputs.compressed_cache is None:
        return window, window[:0]
    return window, slots_of(inputs.compressed_cache, row, chosen_positions(inputs, token, request, position))


def rows_of(inputs: ChunkedInputs, window: torch.Tensor, compressed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows [n, 512] of slots of the compressed cache, then of slots of the window cache."""
    own, other = inputs.window_cache, inputs.compressed_cache
    rows = records.dequantise(own.cache, window, own.encoding, dtype)
    if other is None:
        return rows
    return torch.cat([records.dequantise(other.cache, compressed, other.encoding, dtype), rows])
