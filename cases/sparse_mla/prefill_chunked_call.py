"""What is a call of sparse MLA prefill over packed caches, chunk by chunk, and when is it none?"""

import dataclasses

import torch
from jaxtyping import BFloat16, Float, Float32, Int32, UInt8

from cases.cache.kv_record_write import LANES, RECORD, Encoding


@dataclasses.dataclass(frozen=True)
class PagedCache:
    """A cache of packed records and the blocks of every request of the batch, decode requests first.

    Position p of request r is the record at table[r, p // block], place p % block. Columns that no position of the call
    needs hold anything.
    """

    cache: UInt8[torch.Tensor, "blocks block 584"]
    encoding: Encoding
    table: Int32[torch.Tensor, "batch columns"]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Prefill requests `first` to `last` - 1 and their part of the workspace: `rows` rows each, of which the first
    `compressed_rows` are for compressed positions and the others for the window."""

    first: int
    last: int
    compressed_rows: int
    rows: int


@dataclasses.dataclass(frozen=True)
class ChunkedInputs:
    """The call: a batch of decode requests, then prefill requests; the latter's tokens are answered.

    query, out: one row for each prefill token. query_start: first token of every request of the batch, and the number of
    tokens. seq_lens: tokens of each prefill request with the new ones; gather_lens: how many of the last ones the window
    needs, at least the new ones and window - 1 before them. topk: for every token of the batch, compressed positions of
    its request; of a prefill token at position p the first min((p + 1) // ratio, width) count, and what is not in
    [0, the chunk's compressed_rows) among them is skipped; none lies between the request's compressed length and that.
    ratio: tokens that a compressed record stands for, 0 without a compressed cache.
    chunks: every prefill request in order. workspace: memory to gather into, which holds anything before.
    """

    query: BFloat16[torch.Tensor, "tokens heads 512"]
    window_cache: PagedCache
    compressed_cache: PagedCache | None
    topk: Int32[torch.Tensor, "batch_tokens width"] | None
    query_start: Int32[torch.Tensor, " batch_plus_one"]
    seq_lens: Int32[torch.Tensor, " requests"]
    gather_lens: Int32[torch.Tensor, " requests"]
    decodes: int
    window: int
    ratio: int
    scale: float
    sink: Float32[torch.Tensor, " sinks"] | None
    chunks: tuple[Chunk, ...]
    workspace: BFloat16[torch.Tensor, "workspace_rows 512"]
    out: Float[torch.Tensor, "tokens heads 512"]


def starts_of(inputs: ChunkedInputs) -> list[int]:
    """The first prefill row of every prefill request, and the number of rows."""
    starts: list[int] = inputs.query_start[inputs.decodes :].tolist()
    return [start - starts[0] for start in starts]


def compressed_lens_of(inputs: ChunkedInputs) -> torch.Tensor:
    """The compressed records of each prefill request, int32."""
    if not inputs.ratio:
        return torch.zeros_like(inputs.seq_lens)
    return torch.div(inputs.seq_lens, inputs.ratio, rounding_mode="floor")


def refuse_malformed(inputs: ChunkedInputs) -> None:
    """Raise ValueError or TypeError with one sentence if the inputs are no call."""
    query, out = inputs.query, inputs.out
    if query.dim() != 3 or query.shape[2] != LANES:
        raise ValueError(f"query has the shape {list(query.shape)}: should be [tokens, heads, {LANES}]")
    if query.dtype != torch.bfloat16:
        raise TypeError(f"query is {query.dtype}: should be torch.bfloat16")
    if out.shape != query.shape:
        raise ValueError(f"out has the shape {list(out.shape)}: should have the query's {list(query.shape)}")
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"out is {out.dtype}: should be torch.bfloat16 or torch.float32")
    if inputs.sink is not None and inputs.sink.numel() < query.shape[1]:
        raise ValueError(f"sink has {inputs.sink.numel()} elements: should be at least {query.shape[1]}, one a head")
    if inputs.window < 1:
        raise ValueError(f"window={inputs.window}: should be positive")
    if inputs.ratio < 0 or bool(inputs.ratio) != (inputs.compressed_cache is not None):
        raise ValueError(f"ratio={inputs.ratio}: should be positive with a compressed cache, and 0 without one")
    if (inputs.topk is None) != (inputs.compressed_cache is None):
        raise ValueError("topk and compressed_cache: both should be given, or neither")
    _refuse_batch(inputs)
    _refuse_chunks(inputs)


def _refuse_batch(inputs: ChunkedInputs) -> None:
    requests = inputs.seq_lens.numel()
    batch = inputs.decodes + requests
    if inputs.decodes < 0 or inputs.query_start.numel() != batch + 1:
        raise ValueError(
            f"query_start has {inputs.query_start.numel()} elements: should have {batch + 1}, for {inputs.decodes} decode "
            f"and {requests} prefill requests"
        )
    starts = starts_of(inputs)
    if starts[-1] != inputs.query.shape[0]:
        raise ValueError(f"query has {inputs.query.shape[0]} rows: should have the {starts[-1]} prefill tokens")
    for cache in (inputs.window_cache, inputs.compressed_cache):
        if cache is not None and (cache.cache.dim() != 3 or cache.cache.shape[2] != RECORD):
            raise ValueError(f"cache has the shape {list(cache.cache.shape)}: should be [blocks, block, {RECORD}]")
        if cache is not None and cache.table.shape[0] != batch:
            raise ValueError(f"table has {cache.table.shape[0]} rows: should have one for each of {batch} requests")
    if inputs.topk is not None and inputs.topk.shape[0] < int(inputs.query_start[-1]):
        raise ValueError(
            f"topk has {inputs.topk.shape[0]} rows: should have {int(inputs.query_start[-1])}, one a token"
        )
    lengths, gathers = inputs.seq_lens.tolist(), inputs.gather_lens.tolist()
    for r, (length, gather) in enumerate(zip(lengths, gathers, strict=True)):
        new = starts[r + 1] - starts[r]
        needed = new + min(length - new, inputs.window - 1)
        if not 0 <= new <= length or not needed <= gather <= length:
            raise ValueError(
                f"gather_lens[{r}]={gather}: should be {needed} to {length}, for {new} new tokens of {length}"
            )


def _refuse_chunks(inputs: ChunkedInputs) -> None:
    compressed, gathers = compressed_lens_of(inputs).tolist(), inputs.gather_lens.tolist()
    at = 0
    for number, chunk in enumerate(inputs.chunks):
        if chunk.first != at or chunk.last <= at:
            raise ValueError(f"chunks[{number}] starts with request {chunk.first}: should start with {at} and hold one")
        at = chunk.last
        for r in range(chunk.first, min(chunk.last, len(gathers))):
            if compressed[r] > chunk.compressed_rows or chunk.compressed_rows + gathers[r] > chunk.rows:
                raise ValueError(
                    f"chunks[{number}] has {chunk.compressed_rows} of {chunk.rows} rows for compressed positions: should "
                    f"have room for {compressed[r]} and {gathers[r]}"
                )
        if (chunk.last - chunk.first) * chunk.rows > inputs.workspace.shape[0]:
            raise ValueError(
                f"workspace has {inputs.workspace.shape[0]} rows: should have {(chunk.last - chunk.first) * chunk.rows} "
                f"for chunks[{number}]"
            )
    if at != inputs.seq_lens.numel():
        raise ValueError(f"chunks end with request {at}: should end with {inputs.seq_lens.numel()}")
