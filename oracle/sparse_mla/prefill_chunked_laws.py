"""Which edits of a chunked sparse MLA prefill call have a known effect on its answer?

An edit returns fresh inputs and leaves the given ones alone; output memory and workspace are shared between them, since a
run copies its inputs anyway. `expect` turns the first answer into the one that the edited call must give.
"""

import dataclasses
import itertools

import torch

from cases.memory import guarded, guarded_copy, moved
from cases.sparse_mla.prefill_call import PrefillOutputs
from cases.sparse_mla.prefill_chunked_call import Chunk, ChunkedInputs, PagedCache, compressed_lens_of, starts_of
from oracle.laws import Law
from oracle.sparse_mla.prefill_chunked_call import tokens_of


def _same(first: PrefillOutputs, inputs: ChunkedInputs, edited: ChunkedInputs) -> PrefillOutputs:
    return first


def _chunked(inputs: ChunkedInputs, ends: list[int], spare: int) -> ChunkedInputs:
    """The call with chunks that end before these requests, `spare` rows to spare in each part, and fresh workspace."""
    compressed, gathers = compressed_lens_of(inputs).tolist(), inputs.gather_lens.tolist()
    chunks, first = [], 0
    for last in ends:
        above = max(compressed[first:last]) + spare
        chunks.append(Chunk(first, last, above, above + max(gathers[first:last]) + spare))
        first = last
    rows = max((chunk.last - chunk.first) * chunk.rows for chunk in chunks)
    workspace = guarded((rows, inputs.workspace.shape[1]), inputs.workspace.dtype)
    return dataclasses.replace(inputs, chunks=tuple(chunks), workspace=workspace)


def _each_alone(inputs: ChunkedInputs) -> ChunkedInputs:
    return _chunked(inputs, list(range(1, inputs.seq_lens.numel() + 1)), 0)


def _all_together(inputs: ChunkedInputs) -> ChunkedInputs:
    return _chunked(inputs, [inputs.seq_lens.numel()], 0)


def _more_room(inputs: ChunkedInputs) -> ChunkedInputs:
    return _chunked(inputs, [chunk.last for chunk in inputs.chunks], 2)


def _workspace_used(inputs: ChunkedInputs) -> ChunkedInputs:
    """A workspace full of plausible rows."""
    workspace = guarded(inputs.workspace.shape, inputs.workspace.dtype)
    workspace.copy_(torch.arange(workspace.shape[0])[:, None] % 7 - 3.0)
    return dataclasses.replace(inputs, workspace=workspace)


def _blocks_reversed(inputs: ChunkedInputs) -> ChunkedInputs:
    """The blocks of both caches in the reverse order, and the tables after them; what is no block stays."""

    def turned(paged: PagedCache) -> PagedCache:
        cache = moved(paged.cache, paged.cache.device)
        blocks, stride = cache.shape[0], cache.stride(0)
        # Whole pages, the scales behind the records included.
        pages = cache.as_strided((blocks, stride), (stride, 1), int(cache.storage_offset()))
        old = paged.cache.as_strided((blocks, stride), (stride, 1), int(cache.storage_offset()))
        pages.copy_(old.flip(0))
        real = (paged.table >= 0) & (paged.table < blocks)
        table = torch.where(real, blocks - 1 - paged.table, paged.table)
        return PagedCache(cache, paged.encoding, guarded_copy(table, gaps=(5,)))

    other = inputs.compressed_cache
    return dataclasses.replace(
        inputs, window_cache=turned(inputs.window_cache), compressed_cache=None if other is None else turned(other)
    )


def _decodes_left_out(inputs: ChunkedInputs) -> ChunkedInputs | None:
    """The batch without its decode requests."""
    if not inputs.decodes:
        return None

    def without(paged: PagedCache) -> PagedCache:
        return dataclasses.replace(paged, table=guarded_copy(paged.table[inputs.decodes :]))

    base = int(inputs.query_start[inputs.decodes])
    other = inputs.compressed_cache
    return dataclasses.replace(
        inputs, decodes=0, query_start=guarded_copy(inputs.query_start[inputs.decodes :] - base),
        window_cache=without(inputs.window_cache), compressed_cache=None if other is None else without(other),
        topk=None if inputs.topk is None else guarded_copy(inputs.topk[base:]),
    )  # fmt: skip


def _requests_reversed(inputs: ChunkedInputs) -> ChunkedInputs:
    """The prefill requests in the reverse order, all in one chunk."""
    decodes = inputs.decodes

    def turned(paged: PagedCache) -> PagedCache:
        table = torch.cat([paged.table[:decodes], paged.table[decodes:].flip(0)])
        return dataclasses.replace(paged, table=guarded_copy(table))

    base = int(inputs.query_start[decodes])
    order = _reversed_rows(inputs)
    sizes = (inputs.query_start[1:] - inputs.query_start[:-1])[decodes:].flip(0)
    starts = torch.cat([inputs.query_start[: decodes + 1], base + sizes.cumsum(0)]).to(torch.int32)
    other = inputs.compressed_cache
    topk = None
    if inputs.topk is not None:
        topk = guarded_copy(torch.cat([inputs.topk[:base], inputs.topk[base:][order]]))
    edited = dataclasses.replace(
        inputs, query=guarded_copy(inputs.query[order]), query_start=guarded_copy(starts), topk=topk,
        seq_lens=guarded_copy(inputs.seq_lens.flip(0)), gather_lens=guarded_copy(inputs.gather_lens.flip(0)),
        window_cache=turned(inputs.window_cache), compressed_cache=None if other is None else turned(other),
    )  # fmt: skip
    return _all_together(edited)


def _reversed_rows(inputs: ChunkedInputs) -> torch.Tensor:
    """The prefill rows by request in the reverse order."""
    starts = starts_of(inputs)
    parts = [torch.arange(low, high) for low, high in itertools.pairwise(starts)]
    return torch.cat(parts[::-1])


def _answer_reversed(first: PrefillOutputs, inputs: ChunkedInputs, edited: ChunkedInputs) -> PrefillOutputs:
    order = _reversed_rows(inputs)
    return PrefillOutputs(first.out[order], None if first.lse is None else first.lse[order])


def _other_stale_tails(inputs: ChunkedInputs) -> ChunkedInputs | None:
    """Other numbers behind the chosen positions that count, and in the rows of decode tokens."""
    if inputs.topk is None:
        return None
    topk = torch.zeros_like(inputs.topk)
    base = int(inputs.query_start[inputs.decodes])
    for t, (_, position) in enumerate(tokens_of(inputs)):
        count = (position + 1) // inputs.ratio
        topk[base + t, :count] = inputs.topk[base + t, :count]
    return dataclasses.replace(inputs, topk=guarded_copy(topk))


def _heads_reversed(inputs: ChunkedInputs) -> ChunkedInputs:
    heads = inputs.query.shape[1]
    sink = None if inputs.sink is None else guarded_copy(inputs.sink[:heads].flip(0))
    return dataclasses.replace(inputs, query=guarded_copy(inputs.query.flip(1)), sink=sink)


def _answer_heads_reversed(first: PrefillOutputs, inputs: ChunkedInputs, edited: ChunkedInputs) -> PrefillOutputs:
    return PrefillOutputs(first.out.flip(1), None if first.lse is None else first.lse.flip(1))


def _infinite_sink_left_out(inputs: ChunkedInputs) -> ChunkedInputs | None:
    if inputs.sink is None or not bool(torch.isneginf(inputs.sink).all()):
        return None
    return dataclasses.replace(inputs, sink=None)


def _scale_moved_into_query(inputs: ChunkedInputs) -> ChunkedInputs:
    query = guarded_copy((inputs.query.float() * 4).to(inputs.query.dtype))
    return dataclasses.replace(inputs, query=query, scale=inputs.scale / 4)


def _untouched(inputs: ChunkedInputs) -> ChunkedInputs:
    return dataclasses.replace(inputs)


LAWS: tuple[Law, ...] = (
    Law("M5 block order", "blocks may stand anywhere in the caches", _blocks_reversed, _same, "bitwise"),
    Law("M9 infinite sink", "a sink of minus infinity is no sink", _infinite_sink_left_out, _same, "bitwise"),
    Law("M10 scale and query", "a power of two may move from the scale to the query", _scale_moved_into_query, _same,
        "bitwise"),
    Law("M13 head order", "heads do not see each other", _heads_reversed, _answer_heads_reversed, "bitwise"),
    Law("M14 request order", "requests do not see each other", _requests_reversed, _answer_reversed, "bitwise"),
    Law("M14 decode requests", "decode requests in front do not matter", _decodes_left_out, _same, "bitwise", reshapes=True),
    Law("M19 each alone", "every request may be a chunk", _each_alone, _same, "bitwise", reshapes=True),
    Law("M19 all together", "all requests may be one chunk", _all_together, _same, "bitwise", reshapes=True),
    Law("M19 more room", "spare rows of the workspace do not matter", _more_room, _same, "bitwise"),
    Law("M19 used workspace", "what the workspace held before does not matter", _workspace_used, _same, "bitwise"),
    Law("P1 stale tails", "what stands behind the chosen positions does not matter", _other_stale_tails, _same,
        "bitwise"),
    Law("M29 same call twice", "the same call gives the same bits", _untouched, _same, "bitwise"),
)  # fmt: skip
