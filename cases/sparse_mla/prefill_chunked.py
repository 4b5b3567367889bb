"""What do we ask of sparse MLA prefill over packed caches, chunk by chunk?

The records that a chunk of requests needs are gathered into a workspace of plain rows, compressed ones first and the
window's behind, and each token attends over its chosen compressed rows and its window there. See
`oracle.sparse_mla.prefill_chunked` for the formula and `cases.sparse_mla.prefill_chunked_call` for the call.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from cases.cache.kv_record_write import DATA_BYTES, LANES, LIMIT, NOPE, RECORD, Encoding, block_stride_bytes
from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served
from cases.sparse_mla.prefill_chunked_call import Chunk, ChunkedInputs, PagedCache

ROPE = LANES - NOPE
GROUP = 64
WRITABLE: tuple[str, ...] = ("out", "workspace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedCase(Case):
    """The axes of chunked sparse MLA prefill.

    requests, decodes: prefill requests of the batch, and decode requests before them, of one or two tokens. new: tokens
    of the longest prefill. lengths: `full` all that long, `ragged` any length, `empty_between` every other one has
    none. prefix: tokens that are there already: none, fewer than the window, more, or each in turn. ratio: 0 without
    compressed records. width: compressed positions a token may choose. chosen: `holes` some of them are -1, `beyond`
    some negative or too large for any chunk. chunking: `each` request alone, `pairs`, `first_alone`, `all` in one.
    room: `loose` the workspace of a request has more rows than needed. table: `narrowed` is a view of a wider one.
    values: `slot_codes` the record's number is spelled in its lanes; `plateau` has large scores that differ little.
    output: the dtype of the answer. layout: `padded` leaves gaps after rows and heads of query, output and topk.
    garbage: what lies where nobody may read.
    """

    op: ClassVar[str] = "sparse_mla.prefill_chunked"

    requests: int = 3
    decodes: int = 1
    new: int = 5
    lengths: Literal["full", "ragged", "empty_between"] = "ragged"
    prefix: Literal["none", "short", "long", "mixed"] = "mixed"
    window: int = 8
    ratio: int = 2
    width: int = 8
    chosen: Literal["all", "holes", "beyond"] = "all"
    chunking: Literal["each", "pairs", "first_alone", "all"] = "pairs"
    room: Literal["tight", "loose"] = "tight"
    heads: int = 3
    sink: Literal["absent", "minus_infinity", "moderate", "longer"] = "moderate"
    window_block: int = 32
    compressed_block: int = 64
    block_stride: Literal["page", "padded", "odd"] = "page"
    table: Literal["exact", "narrowed"] = "exact"
    window_encoding: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn"
    layout: Literal["contiguous", "padded"] = "contiguous"
    output: Literal["bfloat16", "float32"] = "bfloat16"
    values: Literal["randn", "needle", "uniform_exact", "slot_codes", "outlier", "plateau"] = "randn"
    garbage: Literal["nan", "huge"] = "nan"


CASE = ChunkedCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (1, 2, 3, 5),
    "decodes": (0, 1, 3),
    "new": (1, 5, 12),
    "lengths": ("full", "ragged", "empty_between"),
    "prefix": ("none", "short", "long", "mixed"),
    "window": (1, 4, 8, 128),
    "ratio": (0, 1, 2, 4),
    "width": (1, 8, 40),
    "chosen": ("all", "holes", "beyond"),
    "chunking": ("each", "pairs", "first_alone", "all"),
    "room": ("tight", "loose"),
    "heads": (1, 3, 17),
    "sink": ("absent", "minus_infinity", "moderate", "longer"),
    "window_block": (1, 5, 32, 64),
    "compressed_block": (1, 2, 64),
    "block_stride": ("page", "padded", "odd"),
    "table": ("exact",),
    "window_encoding": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "layout": ("contiguous", "padded"),
    "output": ("bfloat16", "float32"),
    "values": ("randn", "needle", "uniform_exact", "slot_codes", "outlier", "plateau"),
    "garbage": ("nan", "huge"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "requests": (1, 2, 3, 5, 9),
    "new": (1, 5, 20, 130),
    "width": (1, 8, 40, 512),
    "heads": (1, 3, 16, 17, 64),
    "table": ("exact", "narrowed"),
}
RANDOM_CASES = 20

_BASE = ChunkedCase()
REGRESSIONS: tuple[str, ...] = (
    # A long chunk, then a short one in the same workspace.
    _BASE.varied(lengths="empty_between", chunking="each", new=20, values="needle", output="float32").id,
    # A rank of eight: 128 tokens of window, and more new tokens than that.
    _BASE.varied(requests=1, new=140, lengths="full", prefix="none", window=128, width=40, heads=1, chunking="all").id,
    # A layer without compressed records, whose ratio nobody may divide by.
    _BASE.varied(ratio=0, values="needle", decodes=3).id,
    # Production's encodings on gfx942.
    _BASE.varied(window_encoding="float8_e4m3fnuz", ratio=1, values="slot_codes", output="float32").id,
    # Tables that are views of wider ones.
    _BASE.varied(table="narrowed", values="slot_codes", chunking="each").id,
    _BASE.varied(table="narrowed", window_block=5, compressed_block=2, window=4, decodes=0).id,
    # No prefill token at all.
    _BASE.varied(requests=1, new=0, lengths="full", prefix="short", chunking="all").id,
)  # fmt: skip

PRODUCTION: tuple[Served, ...] = tuple(
    Served(
        CASE(
            requests=2, decodes=1, new=64, lengths="full", window=128, ratio=ratio, width=512, heads=heads, window_block=64,
            compressed_block=64 if ratio < 128 else 2,
        ).varied(window_encoding=encoding),
        {"window_cache.cache": 65536, "compressed_cache.cache": 65536},
    )
    for heads, ratio, encoding in (
        (16, 4, "float8_e4m3fn"), (128, 4, "float8_e4m3fn"), (128, 128, "float8_e4m3fn"), (128, 4, "float8_e4m3fnuz"),
    )
)  # fmt: skip


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (1, 256), "decodes": (0, 256), "new": (0, 4096), "window": (1, 4096), "ratio": (0, 256),
    "width": (1, 4096), "heads": (1, 256), "window_block": (1, 4096), "compressed_block": (1, 4096),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, ChunkedCase)
    reasons = outside(case, _BOUNDS)
    if case.requests < 2 and (case.lengths == "empty_between" or case.chunking in ("pairs", "first_alone")):
        reasons.append(f"requests={case.requests}: kinds of lengths and chunks need two requests to differ")
    if case.window < 2 and case.prefix == "short":
        reasons.append("prefix=short needs a window of two tokens")
    if case.ratio == 0 and case.chosen != "all":
        reasons.append("ratio=0 leaves nothing to choose")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it: tiles of 16 heads and 16 rows."""
    assert isinstance(case, ChunkedCase)
    rows = min(case.window, case.new + 20) + (case.width if case.ratio else 0)
    return case.requests * case.new * -(-case.heads // 16) * -(-rows // 16) > 300


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Lengths of the requests: decode tokens and lengths, then new tokens, lengths and gathered tokens of the prefills."""

    decode_new: list[int]
    decode_lengths: list[int]
    new: list[int]
    lengths: list[int]
    gathers: list[int]

    def compressed(self, ratio: int) -> list[int]:
        """Compressed records of each prefill request."""
        return [length // ratio if ratio else 0 for length in self.lengths]

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """Request and position of every prefill token."""
        return [
            (r, length - new + i)
            for r, (new, length) in enumerate(zip(self.new, self.lengths, strict=True))
            for i in range(new)
        ]


def build(case: Case) -> ChunkedInputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, ChunkedCase)
    draw = Draw(case.seed, case.op)
    batch = _batch(case, draw)
    tokens = batch.tokens
    chunks = _chunks(case, batch)
    largest = max(chunk.compressed_rows for chunk in chunks)
    query = _query(case, len(tokens), draw)
    topk = _topk(case, batch, max(largest, max(batch.compressed(case.ratio)) + 3), draw)
    window_read = [
        torch.arange(length - gather, length) for length, gather in zip(batch.lengths, batch.gathers, strict=True)
    ]
    window = _Pages(case, "window", case.window_block, case.window_encoding, draw.within("window"))
    compressed = _Pages(case, "compressed", case.compressed_block, "float8_e4m3fn", draw.within("compressed"))
    window.place(batch.decode_lengths, batch.lengths, window_read)
    decode_topk = sum(batch.decode_new)
    chosen = [
        _chosen(topk[decode_topk + t], position, case.ratio) if case.ratio else torch.empty(0, dtype=torch.int64)
        for t, (_, position) in enumerate(tokens)
    ]
    compressed_lengths = batch.compressed(case.ratio)
    read: list[list[torch.Tensor]] = [[torch.empty(0, dtype=torch.int64)] for _ in compressed_lengths]
    for (request, _), entries in zip(tokens, chosen, strict=True):
        read[request].append(entries[entries < compressed_lengths[request]])
    decode_compressed = [length // max(case.ratio, 1) for length in batch.decode_lengths]
    compressed.place(decode_compressed, compressed_lengths, [torch.cat(part).unique() for part in read])
    if case.values == "needle":
        _plant_needles(case, tokens, chosen, compressed_lengths, query, window, compressed)
    gaps = (40, 8) if case.layout == "padded" else (0, 0)
    starts = torch.tensor([0, *batch.decode_new, *batch.new]).cumsum(0)
    workspace = guarded((max((c.last - c.first) * c.rows for c in chunks) + 2, LANES), torch.bfloat16)
    if case.garbage == "huge":
        workspace.fill_(1e30)
    out_dtype = torch.float32 if case.output == "float32" else torch.bfloat16
    return ChunkedInputs(
        query=guarded_copy(query.to(torch.bfloat16), gaps=gaps),
        window_cache=window.paged(),
        compressed_cache=compressed.paged() if case.ratio else None,
        topk=guarded_copy(topk.to(torch.int32), gaps=gaps[1:]) if case.ratio else None,
        query_start=guarded_copy(starts.to(torch.int32)),
        seq_lens=guarded_copy(torch.tensor(batch.lengths, dtype=torch.int32)),
        gather_lens=guarded_copy(torch.tensor(batch.gathers, dtype=torch.int32)),
        decodes=case.decodes,
        window=case.window,
        ratio=case.ratio,
        scale=1 / math.sqrt(LANES),
        sink=_sink(case, draw),
        chunks=chunks,
        workspace=workspace,
        out=guarded((len(tokens), case.heads, LANES), out_dtype, gaps=gaps),
    )


def _batch(case: ChunkedCase, draw: Draw) -> _Batch:
    new = [case.new] * case.requests
    if case.lengths == "ragged":
        new[1:] = draw.integers("new", (case.requests - 1,), 1, max(1, case.new) + 1).tolist()
    if case.lengths == "empty_between":
        new[1::2] = [0] * len(new[1::2])
    kinds = ("long", "none", "short") if case.prefix == "mixed" else (case.prefix,)
    some = draw.integers("prefix", (case.requests,), 1, 10).tolist()
    prefixes = []
    for r in range(case.requests):
        kind = kinds[(r + case.seed) % len(kinds)]
        short = min(some[r], case.window - 1)
        prefixes.append({"none": 0, "short": short, "long": case.window + some[r]}[kind])
    lengths = [prefix + count for prefix, count in zip(prefixes, new, strict=True)]
    gathers = [count + min(prefix, case.window - 1) for prefix, count in zip(prefixes, new, strict=True)]
    decode_new = [d % 2 + 1 for d in range(case.decodes)]
    return _Batch(decode_new, [7 + 4 * d for d in range(case.decodes)], new, lengths, gathers)


def _chunks(case: ChunkedCase, batch: _Batch) -> tuple[Chunk, ...]:
    ends = {
        "each": range(1, case.requests + 1),
        "pairs": (*range(2, case.requests, 2), case.requests),
        "first_alone": (1, case.requests),
        "all": (case.requests,),
    }[case.chunking]
    spare = 3 if case.room == "loose" else 0
    compressed = batch.compressed(case.ratio)
    found, first = [], 0
    for last in ends:
        above = max(compressed[first:last]) + spare
        found.append(Chunk(first, last, above, above + max(batch.gathers[first:last]) + spare))
        first = last
    return tuple(found)


def _topk(case: ChunkedCase, batch: _Batch, beyond: int, draw: Draw) -> torch.Tensor:
    """Compressed positions for every token of the batch; `beyond` is too large for any chunk."""
    decode_tokens = sum(batch.decode_new)
    compressed = batch.compressed(case.ratio)
    # Rows of decode tokens, and what stands behind the entries that count, look like positions.
    topk = draw.integers("stale", (decode_tokens + len(batch.tokens) + 2, case.width), 0, max(1, max(compressed)))
    pool = torch.tensor([-1]) if case.chosen == "holes" else torch.tensor([beyond, -5, beyond + 1, 2**31 - 1, -(2**31)])
    for t, (_, position) in enumerate(batch.tokens):
        visible = (position + 1) // case.ratio if case.ratio else 0
        entries = draw.permutation(f"chosen{t}", visible)[: case.width]
        if case.chosen != "all":
            spots = torch.arange(len(entries))[t % 3 :: 3]
            entries[spots] = pool[spots % len(pool)]
        topk[decode_tokens + t, : len(entries)] = entries
    return topk


def _chosen(row: torch.Tensor, position: int, ratio: int) -> torch.Tensor:
    """The compressed positions that a token reads, or too large ones."""
    entries = row[: (position + 1) // ratio]
    return entries[entries >= 0]


class _Pages:
    """One cache while it is being made: where each request's positions lie, and what their records hold."""

    def __init__(self, case: ChunkedCase, name: str, block: int, encoding: Encoding, draw: Draw) -> None:
        self.case = case
        self.name = name
        self.block = block
        self.encoding = encoding
        self.draw = draw

    def place(self, decodes: Sequence[int], lengths: Sequence[int], read: Sequence[torch.Tensor]) -> None:
        """Give every request its blocks, block 0 to nobody; `read` are the positions of each prefill that are read."""
        counts = [-(-length // self.block) for length in (*decodes, *lengths)]
        blocks = sum(counts) + 3
        order = self.draw.permutation("blocks", blocks - 1) + 1
        columns = max(counts) + 2
        garbage = torch.tensor([0, -1, 2**31 - 1, -(2**31)])
        self.table = garbage[self.draw.integers("garbage", (len(counts), columns), 0, 4)]
        self.finite = torch.zeros(blocks * self.block, dtype=torch.bool)
        self.blocks = blocks
        self.decodes = len(decodes)
        start = 0
        for r, count in enumerate(counts):
            own = order[start : start + count]
            start += count
            self.table[r, :count] = own
            if r < len(decodes):
                self.finite.view(blocks, self.block)[own] = True
                continue
            positions = read[r - len(decodes)]
            self.finite[self._slots(own, positions)] = True
            if self.name == "window" and positions.numel():
                # Blocks that the window has left are given back; the null block stands for them.
                self.table[r, : int(positions[0]) // self.block] = 0
        self._fill()

    def _slots(self, own: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return own[positions // self.block] * self.block + positions % self.block

    def slot(self, request: int, position: int) -> int:
        """The slot of a prefill request's position."""
        return int(self._slots(self.table[self.decodes + request], torch.tensor(position)))

    def _fill(self) -> None:
        rows, values = self.blocks * self.block, self.case.values
        nope, rope = self.draw.normal_like("nope", (rows, NOPE)), self.draw.normal_like("rope", (rows, ROPE))
        self.scales = self.draw.integers("scales", (rows, NOPE // GROUP), 126, 129)
        if values in ("uniform_exact", "slot_codes"):
            self.scales.fill_(127)
        if values == "uniform_exact":
            # Full significands on one grid: sums are exact, means have more bits than any output format.
            shift = self.draw.integers("shift", (rows, NOPE), -3, 1)
            nope = torch.ldexp(self.draw.integers("small", (rows, NOPE), -15, 16).float(), shift)
            rope = self.draw.integers("small_rope", (rows, ROPE), -255, 256).float() / 32
        elif values == "slot_codes":
            number = torch.arange(rows)[:, None]
            nope = (number % NOPE == torch.arange(NOPE)).float()
            rope = ((number >> (torch.arange(ROPE) % 16)) & 1).float() + (1.0 if self.name == "window" else 0.0)
        elif values == "outlier":
            nope[:, 5] *= 64.0
        elif values == "plateau":
            direction = Draw(self.case.seed, self.case.op).normal_like("direction", (1, LANES))
            nope, rope = nope + direction[:, :NOPE], rope + direction[:, NOPE:]
            self.scales.fill_(127)
        self.nope, self.rope = nope, rope

    def paged(self) -> PagedCache:
        """The cache and its table, poisoned wherever nobody reads."""
        size, blocks = self.block, self.blocks
        nan = self.case.garbage == "nan"
        code, scale, tail = (
            (0x7F if self.encoding == "float8_e4m3fn" else 0x80, 255, 0x7FC0) if nan else (0x7E, 135, 0x4700)
        )
        stride = block_stride_bytes(size, self.case.block_stride)
        cache = guarded((blocks, size, RECORD), torch.uint8, gaps=(stride - size * RECORD, 0), fill=code)
        base = int(cache.storage_offset())
        data = cache.as_strided((blocks, size, DATA_BYTES), (stride, DATA_BYTES, 1), base)
        scales = cache.as_strided((blocks, size, 8), (stride, 8, 1), base + DATA_BYTES * size)
        finite = self.finite.view(blocks, size, 1)
        dtype = torch.float8_e4m3fn if self.encoding == "float8_e4m3fn" else torch.float8_e4m3fnuz
        limit = LIMIT[self.encoding]
        codes = self.nope.clamp(-limit, limit).to(dtype).view(torch.uint8).view(blocks, size, NOPE)
        rope = self.rope.to(torch.bfloat16).view(torch.uint8).view(blocks, size, 2 * ROPE)
        garbage = torch.tensor([tail], dtype=torch.int32).to(torch.int16).view(torch.uint8).repeat(ROPE)
        data[..., :NOPE] = torch.where(finite, codes, code)
        data[..., NOPE:] = torch.where(finite, rope, garbage)
        scales[..., :7] = torch.where(finite, self.scales.to(torch.uint8).view(blocks, size, 7), scale)
        gaps = (3,) if self.case.table == "narrowed" else (0,)
        # The pad byte is garbage on purpose: whoever takes it for a scale multiplies by 2^38.
        scales[..., 7] = 165
        return PagedCache(cache, self.encoding, guarded_copy(self.table.to(torch.int32), gaps=gaps))


def _plant_needles(
    case: ChunkedCase, tokens: list[tuple[int, int]], chosen: list[torch.Tensor], compressed_lengths: list[int],
    query: torch.Tensor, window: _Pages, compressed: _Pages,
) -> None:  # fmt: skip
    """One dominating record a token: first or last of its window or of its chosen ones in turn, never shared by two."""
    taken: set[tuple[str, int]] = set()
    for t, (request, position) in enumerate(tokens):
        spots = [(window, position), (window, max(0, position - case.window + 1))]
        entries = chosen[t][chosen[t] < compressed_lengths[request]].tolist()
        spots += [(compressed, entries[i]) for i in (0, -1) if entries]
        for pages, at in spots[t % len(spots) :] + spots[: t % len(spots)]:
            slot = pages.slot(request, at)
            if (pages.name, slot) not in taken:
                taken.add((pages.name, slot))
                base = query[t, 0].to(torch.bfloat16).float() * 1.5
                pages.nope[slot], pages.rope[slot], pages.scales[slot] = base[:NOPE], base[NOPE:], 127
                break


def _query(case: ChunkedCase, tokens: int, draw: Draw) -> torch.Tensor:
    shape = (tokens, case.heads, LANES)
    if case.values in ("uniform_exact", "slot_codes"):
        return torch.zeros(shape)
    query = draw.normal_like("query", shape)
    if case.values == "needle":
        # All heads of a token look the same way, so that one key can dominate them all.
        query = draw.normal_like("ways", (tokens, 1, LANES)) + 0.25 * query
    if case.values == "outlier":
        query[..., 5] *= 2.0**-4
    if case.values == "plateau":
        query = draw.normal_like("direction", (1, 1, LANES)) * 4 + 0.25 * query
    return query


def _sink(case: ChunkedCase, draw: Draw) -> torch.Tensor | None:
    if case.sink == "absent":
        return None
    if case.sink == "minus_infinity":
        return guarded_copy(torch.full((case.heads,), -math.inf))
    sink = draw.normal_like("sink", (case.heads,))
    if case.sink == "longer":
        # Heads of other ranks follow; they would swamp everything.
        sink = torch.cat([sink, torch.full((3,), 1e4)])
    return guarded_copy(sink)
