"""How is sparse MLA prefill computed chunk by chunk, rightly in several ways and wrongly in many more?

`compute` is the driver: for each chunk it gathers compressed and window rows into the workspace, writes the list of every
token in workspace coordinates, and attends over plain rows (`oracle.sparse_mla.prefill_faults`). It shares the gathering
of records with the reference and nothing else: slots, lists and attention are formulated anew. Each fault is one name,
looked at in the one place where such a driver would err.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.cache.kv_record_write import LANES, Encoding
from cases.precision import Precision
from cases.sparse_mla.decode import DecodeInputs, Segment
from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from cases.sparse_mla.prefill_chunked_call import Chunk, ChunkedInputs, PagedCache, compressed_lens_of, starts_of
from oracle.cache import records
from oracle.laws import Honest, Mutant
from oracle.sparse_mla import decode_faults, prefill_faults
from oracle.sparse_mla.prefill_chunked_call import slots_read, tokens_of

ALIGNED = 128
_ROPE = 64


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of driving: how the attention computes, which part of a list comes first, and which faults the driver has."""

    attention: prefill_faults.Way = dataclasses.field(default_factory=prefill_faults.Way)
    window_first: bool = False
    faults: frozenset[str] = frozenset()

    def has(self, *faults: str) -> bool:
        """Whether one of the faults is committed."""
        return any(fault in self.faults for fault in faults)


def compute(inputs: ChunkedInputs, way: Way) -> PrefillOutputs:
    """The outputs of the call, computed this way."""
    tokens, heads, _ = inputs.query.shape
    out = torch.full(inputs.out.shape, float("nan"), dtype=inputs.out.dtype)
    lse = torch.full((tokens, heads), float("nan"))
    workspace = inputs.workspace.float()
    written = torch.zeros(workspace.shape[0], dtype=torch.bool)
    starts = starts_of(inputs)
    for number, chunk in enumerate(inputs.chunks):
        if way.has("last-chunk-lost") and number == len(inputs.chunks) - 1 > 0:
            continue
        _gather_chunk(inputs, chunk, workspace, written, way)
        low, high = starts[chunk.first], starts[chunk.last]
        lists, lengths = _combine(inputs, chunk, way)
        kv = workspace[: (chunk.last - chunk.first) * chunk.rows].clone()
        first = low + (int(inputs.query_start[inputs.decodes]) if way.has("query-rows-counted-from-the-batch") else 0)
        rows = torch.arange(first, first + high - low).clamp(max=max(tokens - 1, 0))
        answer = prefill_faults.compute(_attention(inputs, rows, kv, lists, lengths), way.attention)
        out[low:high] = answer.out
        assert answer.lse is not None
        lse[low:high] = answer.lse
    return PrefillOutputs(out, lse)


def _attention(
    inputs: ChunkedInputs, rows: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor, lengths: torch.Tensor
) -> PrefillInputs:
    query = inputs.query[rows]
    return PrefillInputs(
        query=query, kv=kv.to(torch.bfloat16)[:, None], scale=inputs.scale, sink=inputs.sink, nope_lanes=LANES - _ROPE,
        rope_lanes=_ROPE, out=torch.empty(query.shape, dtype=inputs.out.dtype), dense=lists, lengths=lengths,
    )  # fmt: skip


def _gather_chunk(
    inputs: ChunkedInputs, chunk: Chunk, workspace: torch.Tensor, written: torch.Tensor, way: Way
) -> None:
    """Write the rows that the chunk needs."""
    compressed = compressed_lens_of(inputs).tolist()
    lengths, gathers = inputs.seq_lens.tolist(), inputs.gather_lens.tolist()
    for local, request in enumerate(range(chunk.first, chunk.last)):
        base = local * chunk.rows
        measured = local if way.has("lengths-of-the-first-requests") else request
        if inputs.compressed_cache is not None and not way.has("compressed-not-gathered"):
            count = compressed[measured]
            row = _table_row(inputs, request, local, way, "compressed")
            found = _read(inputs, inputs.compressed_cache, row, torch.arange(count), way, window=False)
            _write(workspace, written, base, found, way)
        length, gather = lengths[measured], gathers[measured]
        positions = torch.arange(length - gather, length)
        if way.has("window-gathered-from-the-start"):
            positions = torch.arange(gather)
        if way.has("window-gathered-one-late"):
            positions = (positions + 1).clamp(max=max(length - 1, 0))
        at = base + (0 if way.has("window-offset-ignored") else chunk.compressed_rows)
        row = _table_row(inputs, request, local, way, "window")
        _write(workspace, written, at, _read(inputs, inputs.window_cache, row, positions, way, window=True), way)


def _write(workspace: torch.Tensor, written: torch.Tensor, at: int, rows: torch.Tensor, way: Way) -> None:
    rows = rows[: max(0, workspace.shape[0] - at)]
    places = torch.arange(at, at + rows.shape[0])
    if way.has("stale-workspace"):
        # What an earlier chunk left stays.
        fresh = ~written[places]
        places, rows = places[fresh], rows[fresh]
    workspace[places] = rows
    written[places] = True


def _table_row(inputs: ChunkedInputs, request: int, local: int, way: Way, cache: str) -> int:
    row = inputs.decodes + (local if way.has("tables-by-the-chunks-own-numbers") else request)
    if way.has(f"{cache}-table-from-the-first-decode"):
        row = request
    return row


def _read(
    inputs: ChunkedInputs, paged: PagedCache, row: int, positions: torch.Tensor, way: Way, *, window: bool
) -> torch.Tensor:
    """The rows of positions; blocks that do not exist are read as block 0."""
    cache, table = paged.cache, paged.table
    block = cache.shape[1]
    if way.has("block-size-of-the-other-cache") and inputs.compressed_cache is not None:
        block = (inputs.compressed_cache if window else inputs.window_cache).cache.shape[1]
    columns = (positions // block).clamp(max=table.shape[1] - 1)
    blocks = table[row].long()[columns]
    if way.has("table-pitch-is-its-width"):
        flat = torch.cat([table.long().flatten(), table.new_zeros(table.shape[1]).long()])
        pitch = table.stride(0)
        # The gap behind a row holds no block: reading on from the tight pitch lands in an earlier row.
        place = row * table.shape[1] + columns
        inside = place % pitch < table.shape[1]
        blocks = torch.where(inside, flat[place // pitch * table.shape[1] + place % pitch], 0)
    blocks = torch.where((blocks >= 0) & (blocks < cache.shape[0]), blocks, 0)
    slots = (blocks * cache.shape[1] + positions % block).clamp(max=cache.shape[0] * cache.shape[1] - 1)
    encoding = paged.encoding
    flip: dict[Encoding, Encoding] = {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e4m3fnuz": "float8_e4m3fn"}
    if way.has("window-in-the-other-encoding") and window:
        encoding = flip[encoding]
    if way.has("compressed-in-the-windows-encoding") and not window:
        encoding = inputs.window_cache.encoding
    return records.dequantise(cache, slots, encoding)


def _combine(inputs: ChunkedInputs, chunk: Chunk, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists [tokens of the chunk, width] in workspace coordinates, int64, and their lengths."""
    starts, lengths, gathers = starts_of(inputs), inputs.seq_lens.tolist(), inputs.gather_lens.tolist()
    low, high = starts[chunk.first], starts[chunk.last]
    choices = inputs.topk.shape[1] if inputs.topk is not None else 0
    width = -(-(choices + inputs.window + 2) // ALIGNED) * ALIGNED
    if way.has("list-width-not-rounded"):
        width = max(1, (choices + inputs.window) // ALIGNED * ALIGNED or choices)
    lists = torch.full((high - low, width), -1)
    counts = torch.zeros(high - low, dtype=torch.int32)
    for request in range(chunk.first, chunk.last):
        local = request - chunk.first
        base = chunk.rows * (request if way.has("batch-number-in-the-workspace") else local)
        new = starts[request + 1] - starts[request]
        for i in range(new):
            t = starts[request] + i
            place = t - (0 if way.has("query-base-not-subtracted") else low)
            if place >= high - low:
                continue
            position = lengths[request] - new + i
            if way.has("positions-from-0"):
                position = i
            chosen = _compressed(inputs, chunk, t, position, base, way)
            window = _window(inputs, chunk, position, lengths[request] - gathers[request], base, way)
            entries = torch.cat([window, chosen] if way.window_first else [chosen, window])[:width]
            if way.has("rows-behind-the-window-attended") and len(entries):
                behind = int(entries[-1]) + 1 + torch.arange(-len(entries) % 16)
                entries = torch.cat([entries, behind[behind < base + chunk.rows]])[:width]
            lists[place, : len(entries)] = entries
            counts[place] = len(entries)
    return lists, counts


def _compressed(inputs: ChunkedInputs, chunk: Chunk, t: int, position: int, base: int, way: Way) -> torch.Tensor:
    if inputs.topk is None or way.has("compressed-ignored"):
        return torch.empty(0, dtype=torch.int64)
    row = t + (0 if way.has("topk-from-the-first-decode") else int(inputs.query_start[inputs.decodes]))
    entries = inputs.topk[row].long()
    seen = position + (0 if way.has("own-token-not-counted") else 1)
    if way.has("count-rounded-up"):
        seen += inputs.ratio - 1
    if not way.has("stale-tail-attended"):
        entries = entries[: max(0, seen // inputs.ratio)]
    if way.has("last-choice-lost"):
        entries = entries[:-1]
    if way.has("holes-end-the-list"):
        holes = (entries < 0).nonzero().flatten()
        entries = entries[: int(holes[0])] if holes.numel() else entries
    inside = (entries >= 0) & (entries < chunk.compressed_rows)
    if way.has("too-large-not-masked"):
        inside = entries >= 0
    if way.has("negatives-not-masked"):
        inside = entries < chunk.compressed_rows
    return torch.where(inside, entries + base, -1)


def _window(
    inputs: ChunkedInputs, chunk: Chunk, position: int, gathered_from: int, base: int, way: Way
) -> torch.Tensor:
    window = inputs.window + way.has("window-one-longer") - way.has("window-one-shorter")
    if way.has("window-ignored"):
        return torch.empty(0, dtype=torch.int64)
    first = position - window + 1
    if not way.has("window-before-the-start"):
        first = max(0, first)
    positions = torch.arange(first, position + 1)
    if way.has("window-without-its-own-token"):
        positions = positions[:-1]
    if way.has("window-from-position-0"):
        gathered_from = 0
    return base + chunk.compressed_rows + positions - gathered_from


_RIGHT = Way()


def _bare(inputs: ChunkedInputs, way: Way) -> PrefillOutputs:
    """The answer as most implementations give it, without a log-sum-exp."""
    return dataclasses.replace(compute(inputs, way), lse=None)


_When = Callable[[ChunkedInputs], bool]


def _mutant(name: str, pitfall: str, when: _When | None = None) -> Mutant:
    way = Way(faults=frozenset({name}))

    def answer(inputs: ChunkedInputs) -> PrefillOutputs | None:
        return None if when is not None and not when(inputs) else _bare(inputs, way)

    return Mutant(name=name, pitfall=pitfall, answer=answer)


def _in_attention(name: str, pitfall: str, **ways: object) -> Mutant:
    attention = dataclasses.replace(prefill_faults.Way(), faults=frozenset({name}), **ways)  # type: ignore[arg-type]
    return Mutant(name=name, pitfall=pitfall, answer=lambda inputs: _bare(inputs, Way(attention=attention)))


def _compresses(inputs: ChunkedInputs) -> bool:
    return inputs.compressed_cache is not None


def _mixed(inputs: ChunkedInputs) -> bool:
    return inputs.decodes > 0


def _several(inputs: ChunkedInputs) -> bool:
    return len(inputs.chunks) > 1


# A workspace that was not written anew has been seen: vllm-project/vllm#42893 (stale-workspace).
MUTANTS: tuple[Mutant, ...] = (
    _mutant("stale-workspace", "rows that an earlier chunk had written were not written again", _several),
    _mutant("rows-behind-the-window-attended", "a list went on behind the window to a multiple of 16 rows"),
    _mutant("last-chunk-lost", "the last chunk were left out", _several),
    _mutant("window-gathered-from-the-start", "the first tokens of a request were gathered for its window"),
    _mutant("window-gathered-one-late", "the window's rows were gathered from one position later on"),
    _mutant("window-offset-ignored", "the window's rows overwrote the compressed ones", _compresses),
    _mutant("compressed-not-gathered", "the compressed rows were not gathered", _compresses),
    _mutant("table-pitch-is-its-width", "the rows of a narrowed block table lay one behind the other"),
    _mutant("lengths-of-the-first-requests", "a later chunk had the lengths of the first requests", _several),
    _mutant("tables-by-the-chunks-own-numbers", "a later chunk used the tables of the first requests", _several),
    _mutant("window-table-from-the-first-decode", "the window's tables began with the decode requests", _mixed),
    _mutant("compressed-table-from-the-first-decode", "the compressed tables began with the decode requests", _mixed),
    _mutant("topk-from-the-first-decode", "the chosen positions began with the decode tokens", _mixed),
    _mutant("query-rows-counted-from-the-batch", "the query's rows were counted from the batch's first token", _mixed),
    _mutant("query-base-not-subtracted", "the rows of a chunk's lists were counted from the first prefill", _several),
    _mutant("batch-number-in-the-workspace", "a request's part of the workspace went by its number in the batch"),
    _mutant("block-size-of-the-other-cache", "both caches had the other one's block size", _compresses),
    _mutant("window-in-the-other-encoding", "the window cache were decoded in the other e4m3 encoding"),
    _mutant("compressed-in-the-windows-encoding", "both caches had the window's encoding", _compresses),
    _mutant("list-width-not-rounded", "the lists were cut at a multiple of 128 below their width"),
    _mutant("positions-from-0", "the tokens' positions began at 0, without the prefix"),
    _mutant("compressed-ignored", "the compressed rows were not attended", _compresses),
    _mutant("own-token-not-counted", "a compressed row that the token itself completes were hidden", _compresses),
    _mutant("count-rounded-up", "a compressed row that is not complete were visible", _compresses),
    _mutant("stale-tail-attended", "the whole row of chosen positions counted", _compresses),
    _mutant("last-choice-lost", "the last chosen position were dropped", _compresses),
    _mutant("holes-end-the-list", "the first hole ended the chosen positions", _compresses),
    _mutant("too-large-not-masked", "positions beyond the compressed rows were rows of the window", _compresses),
    _mutant("negatives-not-masked", "negative positions were rows before the request's", _compresses),
    _mutant("window-one-longer", "the window were one token longer"),
    _mutant("window-one-shorter", "the window were one token shorter"),
    _mutant("window-before-the-start", "the window went on before the first token"),
    _mutant("window-without-its-own-token", "a token did not see itself"),
    _mutant("window-from-position-0", "the gathered window began with position 0"),
    _mutant("window-ignored", "the window were not attended"),
    _in_attention("sink-ignored", "the sink were left out"),
    _in_attention("sink-of-other-heads", "the last sinks were used in place of the first"),
    _in_attention("scale-of-nope-lanes", "the softmax scale were that of the leading lanes"),
    _in_attention("value-without-rope-lanes", "the values had only the leading lanes"),
)  # fmt: skip


def _split_up(inputs: ChunkedInputs) -> PrefillOutputs:
    """Every request in a chunk of its own."""
    rows = [
        Chunk(r, r + 1, above, above + gather)
        for r, (above, gather) in enumerate(
            zip(compressed_lens_of(inputs).tolist(), inputs.gather_lens.tolist(), strict=True)
        )
    ]
    return compute(dataclasses.replace(inputs, chunks=tuple(rows)), Way(attention=prefill_faults.Way(tile=32)))


def _as_decode(inputs: ChunkedInputs) -> PrefillOutputs:
    """As sparse MLA decode over the same slots: no workspace, the window's records first."""
    slots = [slots_read(inputs, t, request, position) for t, (request, position) in enumerate(tokens_of(inputs))]

    def segment(paged: PagedCache, lists: list[torch.Tensor]) -> Segment:
        ends = torch.tensor([0, *(len(entries) for entries in lists)]).cumsum(0)
        indices = torch.cat([torch.empty(0, dtype=torch.int64), *lists])
        return Segment(cache=paged.cache, encoding=paged.encoding, indices=indices, indptr=ends)

    extra = inputs.compressed_cache
    call = DecodeInputs(
        query=inputs.query, main=segment(inputs.window_cache, [window for window, _ in slots]),
        extra=None if extra is None else segment(extra, [compressed for _, compressed in slots]),
        scale=inputs.scale, sink=inputs.sink, positions=None, cos_sin=None, out=inputs.out, out_codes=None,
        out_scales=None, arch="gfx942", compute_units=304, splits=3, adaptive=False, trust_extra=False,
    )  # fmt: skip
    answer = decode_faults.compute(call, decode_faults.Way(output="float32"))
    assert answer.out is not None
    return PrefillOutputs(answer.out, answer.lse)


_BF16 = Precision(probability="bfloat16")
_FP32 = prefill_faults.Way(probability="float32", tile=1)

HONEST: tuple[Honest, ...] = (
    Honest(name="as-asked", precision=_BF16, answer=lambda inputs: _bare(inputs, _RIGHT)),
    Honest(name="each-request-alone", precision=_BF16, answer=_split_up),
    Honest(name="window-first", precision=_BF16, answer=lambda inputs: compute(
        inputs, Way(window_first=True))),
    Honest(name="as-decode", precision=_BF16, answer=_as_decode),
    Honest(name="fp32-probabilities", precision=Precision(probability="float32"), answer=lambda inputs: compute(
        inputs, Way(attention=_FP32))),
)  # fmt: skip
