"""How does an implementation compute sparse MLA decode, rightly in many ways and wrongly in many more?

`compute` is a second formulation of the op, shaped like the kernels: split over the keys, tiled, online softmax, partial
results merged by their maxima, rounding where kernels round. With no fault it is right whatever the split count, tile,
order and rounding points: those are `HONEST`. Each fault is one name, looked at in the one place where such a kernel
would err: those are `MUTANTS`. A fault that cannot show in a call answers None there.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch

from cases.memory import is_vast, storage_bytes
from cases.precision import Precision
from cases.sparse_mla.decode import (
    GROUP,
    LANES,
    NOPE,
    ROPE,
    SCALE_BYTES,
    TOKEN_BYTES,
    DecodeInputs,
    DecodeOutputs,
    Encoding,
    Segment,
)
from oracle import mxfp8
from oracle.cache import records
from oracle.formats import numbers
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Mutant
from oracle.sparse_mla.call import listed, rotate_back, segments, turned

NEVER = torch.finfo(torch.float32).min
HEADS_PER_PROGRAM = 16
LN2 = math.log(2.0)
# Widths of the extra list for which a library of compiled kernels might have one.
_LISTED_WIDTHS = (0, 64, 128, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of computing: how many splits (0 asks for 4), which tile, which rounding points, which faults."""

    splits: int = 0
    tile: int = 32
    backwards: bool = False
    base2: bool = False
    probability: str = "bfloat16"
    partial: str = "float32"
    output: str = "bfloat16"
    query: str = "exact"
    faults: frozenset[str] = frozenset()
    main_encoding: Encoding = "float8_e4m3fn"

    def has(self, fault: str) -> bool:
        """Whether the fault is committed."""
        return fault in self.faults


def _round(values: torch.Tensor, form: str) -> torch.Tensor:
    return round_to_bfloat16(values).to(values.dtype) if form == "bfloat16" else values


def _sum(values: torch.Tensor, dim: int) -> torch.Tensor:
    """A sum rounded once, so that it does not depend on how many other sums are taken beside it."""
    return values.double().sum(dim).float()


def _wrapped(offsets: torch.Tensor) -> torch.Tensor:
    """What is left of offsets in 32 bits with a sign."""
    return ((offsets + 2**31) % 2**32) - 2**31


def _truncate(values: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16 by dropping bits."""
    return (values.contiguous().view(torch.int32) & -65536).view(torch.float32)


def _records(segment: Segment, slots: torch.Tensor, way: Way, *, extra: bool) -> torch.Tensor:
    """fp32 [n, 512] of slots as the way decodes them."""
    flip: dict[Encoding, Encoding] = {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e4m3fnuz": "float8_e4m3fn"}
    if (way.has("main-in-the-other-encoding") and not extra) or (way.has("extra-in-the-other-encoding") and extra):
        segment = dataclasses.replace(segment, encoding=flip[segment.encoding])
    if way.has("one-encoding-for-both-caches") and extra:
        segment = dataclasses.replace(segment, encoding=way.main_encoding)
    if any(way.has(fault) for fault in _LAYOUT_FAULTS):
        rows = _misread(segment, slots, way)
    else:
        rows = records.dequantise(segment.cache, slots, segment.encoding)
    keep = torch.isnan(rows)
    if way.has("nan-not-scrubbed") or (way.has("nan-not-scrubbed-in-extra") and extra):
        keep = torch.zeros_like(keep)
    if way.has("nan-scrubbed-in-scores-only"):
        keep = torch.zeros_like(keep)
    if (way.has("nan-not-scrubbed-in-main") or way.has("trust-reaches-the-main-cache")) and not extra:
        keep = torch.zeros_like(keep)
    if way.has("nan-not-scrubbed-in-rope"):
        keep[:, NOPE:] = False
    return rows.masked_fill(keep, 0.0)


_LAYOUT_FAULTS = (
    "token-pitch-584", "scales-interleaved", "scale-pitch-7", "scale-per-32-lanes", "scale-per-128-lanes",
    "pad-byte-scales-rope", "page-stride-unpadded", "rope-as-float16", "rope-after-512-bytes", "scale-bias-128",
    "scale-index-shifted", "rope-bytes-swapped", "page-offset-in-32-bits", "page-stride-of-the-smallest-page",
)  # fmt: skip


def _misread(segment: Segment, slots: torch.Tensor, way: Way) -> torch.Tensor:
    cache = segment.cache
    block = cache.shape[1]
    stride = block * 584 if way.has("page-stride-unpadded") else cache.stride(0)
    if way.has("page-stride-of-the-smallest-page"):
        stride = records.page_bytes(block)
    page = (slots // block) * stride
    if way.has("page-offset-in-32-bits"):
        page = _wrapped(page)
    page = page + int(cache.storage_offset())
    place = slots % block
    pitch = 584 if way.has("token-pitch-584") else TOKEN_BYTES
    flat = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    last = flat.numel() - 1

    def read(offsets: torch.Tensor) -> torch.Tensor:
        return flat[offsets.clamp(0, last)]

    data = page + place * pitch
    scales = page + block * TOKEN_BYTES + place * (7 if way.has("scale-pitch-7") else SCALE_BYTES)
    if way.has("scales-interleaved"):
        scales = page + place * 584 + TOKEN_BYTES
    lane = torch.arange(NOPE)
    group = lane // GROUP
    if way.has("scale-per-32-lanes"):
        group = (lane // 32).clamp(max=7)
    if way.has("scale-per-128-lanes"):
        group = lane // 128
    if way.has("scale-index-shifted"):
        group = (group + 1).clamp(max=6)
    nope = numbers.decode(read(data[:, None] + lane), segment.encoding)
    exponent = numbers.e8m0_decode(read(scales[:, None] + group), all_ones="infinity")
    if way.has("scale-bias-128"):
        exponent = exponent * 0.5
    rope_at = data + (512 if way.has("rope-after-512-bytes") else NOPE)
    raw = read(rope_at[:, None] + (torch.arange(2 * ROPE) ^ int(way.has("rope-bytes-swapped")))).contiguous()
    rope = raw.view(torch.float16 if way.has("rope-as-float16") else torch.bfloat16).float()
    if way.has("pad-byte-scales-rope"):
        rope = rope * numbers.e8m0_decode(read(scales + 7), all_ones="infinity")[:, None]
    return torch.cat([nope * exponent, rope], 1)


def _entries(inputs: DecodeInputs, t: int, way: Way) -> list[torch.Tensor]:
    """The entries of each segment for query t as the way reads them, invalid ones included."""
    found = []
    for part in segments(inputs):
        if way.has("holes-do-not-count") and part.dense is not None and part.lengths is None:
            row = part.dense[t].long()
            entries = row[(row >= 0) & (row < part.rows)]
        elif part.indices is not None and part.indptr is not None:
            ptr = part.indptr.long() - (part.indptr[0].long() if way.has("first-offset-taken-for-0") else 0)
            end = int(ptr[t + 1])
            if way.has("capacity-taken-for-length") and t == part.indptr.shape[0] - 2:
                end = part.indices.shape[0]
            entries = part.indices[int(ptr[t]) : end].long()
        elif way.has("tail-beyond-length-attended") and part.dense is not None:
            entries = part.dense[t].long()
        else:
            entries = listed(part, t)
        if way.has("drop-last-entry"):
            entries = entries[:-1]
        if way.has("drop-first-entry"):
            entries = entries[1:]
        if way.has("last-entry-twice") and len(entries):
            entries = torch.cat([entries, entries[-1:]])
        if way.has("duplicates-removed"):
            entries = torch.unique(entries)
        found.append(entries)
    if way.has("duplicates-across-removed") and len(found) == 2:
        found[1] = found[1][~torch.isin(found[1], found[0])]
    if way.has("extra-ignored") and len(found) == 2:
        found[1] = found[1][:0]
    if way.has("width-rounded-down-to-a-compiled-one") and len(found) == 2:
        found[1] = found[1][: max(width for width in _LISTED_WIDTHS if width <= len(found[1]))]
    if way.has("next-querys-entries") and t + 1 < inputs.query.shape[0]:
        return _entries(inputs, t + 1, Way())
    return found


def _resolve(inputs: DecodeInputs, entries: torch.Tensor, part: Segment, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots to read and whether each counts."""
    bound = part.rows
    if way.has("bound-of-the-other-cache") and inputs.extra is not None:
        other = inputs.main if part is inputs.extra else inputs.extra
        bound = other.rows
    counts = (entries >= 0) & (entries < bound)
    if way.has("upper-bound-off-by-one"):
        counts |= entries == part.rows
    if way.has("beyond-attended-as-the-last-slot"):
        counts |= entries >= part.rows
    if way.has("invalid-attended-as-slot-0"):
        counts = torch.ones_like(counts)
    if way.has("negatives-wrap"):
        counts |= (entries < 0) & (entries >= -part.rows)
    inside = (entries >= 0) & (entries < part.rows)
    slots = torch.where(inside, entries, 0)
    slots = torch.where(counts & (entries >= part.rows), part.rows - 1, slots)
    if way.has("negatives-wrap"):
        slots = torch.where((entries < 0) & counts, entries + part.rows, slots)
    return slots, counts


def _block_size_mixed_up(slots: torch.Tensor, part: Segment, other: Segment) -> torch.Tensor:
    """Page and place by the other cache's page size."""
    block = other.cache.shape[1]
    return ((slots // block) * part.cache.shape[1] + slots % block).clamp(max=part.rows - 1)


def _chunks(length: int, splits: int, way: Way) -> Iterator[tuple[int, int]]:
    size = length // splits if way.has("chunk-rounded-down") else -(-length // splits)
    for z in range(splits):
        low = z * size
        high = min(low + size, length)
        if way.has("split-boundary-entry-lost") and z:
            low += 1
        if way.has("split-boundary-entry-twice") and z and low < length:
            low -= 1
        yield low, max(low, high)


def _tail_tile_lost(low: int, high: int, tile: int, way: Way) -> int:
    return low + (high - low) // tile * tile if way.has("ragged-tile-lost") else high


def compute(inputs: DecodeInputs, way: Way) -> DecodeOutputs:
    """The outputs of the call, computed this way."""
    queries, heads, _ = inputs.query.shape
    way = dataclasses.replace(way, main_encoding=inputs.main.encoding)
    rows = torch.zeros((queries, heads, LANES))
    lse = torch.full((queries, heads), -math.inf)
    sink = None if inputs.sink is None else inputs.sink[:heads].float()
    if sink is not None and inputs.sink is not None and way.has("sink-of-other-heads"):
        sink = inputs.sink[inputs.sink.shape[0] - heads :].float()
    if way.has("sink-ignored"):
        sink = None
    for t in range(queries):
        rows[t], lse[t] = _query(inputs, t, sink, way)
    rows = _reorder(rows, inputs, way)
    rows, turned_rows = _turn(rows, inputs, way)
    if inputs.out is None:
        return _quantised(rows, turned_rows, way)
    if way.has("output-truncated"):
        narrow = _truncate(rows)
    else:
        narrow = rows if way.output == "float32" == _name(inputs.out) else round_to_bfloat16(rows)
    return DecodeOutputs(out=narrow.to(inputs.out.dtype), rotated_rows=turned_rows, lse=lse)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _score_scale(inputs: DecodeInputs, way: Way) -> float:
    wrong = {
        "scale-1-percent-high": inputs.scale * 1.01, "scale-1-percent-low": inputs.scale * 0.99,
        "scale-of-448-lanes": NOPE**-0.5, "scale-of-64-lanes": ROPE**-0.5, "scale-left-out": 1.0,
        "scale-twice": inputs.scale**2, "scale-of-576-lanes": 576**-0.5,
    }  # fmt: skip
    return next((value for fault, value in wrong.items() if way.has(fault)), inputs.scale)


def _query(inputs: DecodeInputs, t: int, sink: torch.Tensor | None, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """One query: fp32 rows [heads, 512] before rotation and the log-sum-exp [heads]."""
    query = _query_rows(inputs, t, way)
    found = _entries(inputs, t, way)
    parts = segments(inputs)
    splits = way.splits or inputs.splits or 4
    if way.has("queries-share-the-first-rows-entries"):
        found = _entries(inputs, 0, Way())
    if way.has("straddling-tile-reads-main") and len(found) == 2:
        tail = len(found[0]) % way.tile
        if tail:
            moved = way.tile - tail
            found = [torch.cat([found[0], found[1][:moved]]), found[1][moved:]]
    maxima, sums, sums_of_values = [], [], []
    chunks = [list(_chunks(len(entries), splits, way)) for entries in found]
    if way.has("main-chunk-taken-for-both") and len(found) == 2:
        size = -(-len(found[0]) // splits)
        chunks[1] = [(min(z * size, len(found[1])), min((z + 1) * size, len(found[1]))) for z in range(splits)]
    keys = [
        _keys(inputs, part, entries, way, extra=number == 1)
        for number, (part, entries) in enumerate(zip(parts, found, strict=True))
    ]
    for z in range(splits):
        state = _State(query.shape[0], way)
        for (rows, counts), bounds in zip(keys, chunks, strict=True):
            low, high = bounds[z]
            high = _tail_tile_lost(low, high, way.tile, way)
            starts = range(low, high, way.tile)
            for start in reversed(starts) if way.backwards else starts:
                tile = slice(start, min(start + way.tile, high))
                state.add(query, rows[tile], counts[tile], _score_scale(inputs, way))
        maxima.append(state.top)
        sums.append(state.total)
        sums_of_values.append(_round(state.values, way.partial))
    if way.has("chunks-of-inactive-splits-lost"):
        maxima, sums, sums_of_values = maxima[:4], sums[:4], sums_of_values[:4]
    if way.has("unwritten-partial-read"):
        for splits_of in (maxima, sums, sums_of_values):
            splits_of.append(torch.full_like(splits_of[0], math.nan))
    if way.has("stale-partial-read") and t:
        # What the workspace holds behind this query's splits was left by the query before.
        before = _partials_of_the_first_split(inputs, t - 1)
        for splits_of, left in zip((maxima, sums, sums_of_values), before, strict=True):
            splits_of.append(left)
    return _merge(torch.stack(maxima), torch.stack(sums), torch.stack(sums_of_values), sink, inputs, way)


def _partials_of_the_first_split(inputs: DecodeInputs, t: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum, sum and values of all keys of query t, as if it were not split."""
    way = Way(main_encoding=inputs.main.encoding)
    state = _State(inputs.query.shape[1], way)
    for number, (part, entries) in enumerate(zip(segments(inputs), _entries(inputs, t, way), strict=True)):
        rows, counts = _keys(inputs, part, entries, way, extra=number == 1)
        state.add(_query_rows(inputs, t, way), rows, counts, inputs.scale)
    return state.top, state.total, state.values


def _query_rows(inputs: DecodeInputs, t: int, way: Way) -> torch.Tensor:
    """The query's heads as the way finds them, fp32 [heads, 512]."""
    query = inputs.query
    heads = query.shape[1]
    row, head = query.stride(0), query.stride(1)
    if way.has("query-strides-ignored"):
        row, head = heads * LANES, LANES
    if way.has("query-rows-of-576-lanes"):
        row, head = heads * 576, 576
    start = t * row
    if way.has("query-offset-in-32-bits"):
        start = int(_wrapped(torch.tensor(start)))
    flat = torch.empty(0, dtype=query.dtype).set_(query.untyped_storage())
    offsets = int(query.storage_offset()) + start + torch.arange(heads)[:, None] * head + torch.arange(LANES)
    return flat[offsets.clamp(0, flat.numel() - 1)].float()


def _keys(
    inputs: DecodeInputs, part: Segment, entries: torch.Tensor, way: Way, *, extra: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [n, 512] behind the entries of one segment, and which of them count."""
    slots, counts = _resolve(inputs, entries, part, way)
    if way.has("main-page-size-for-extra") and extra:
        slots = _block_size_mixed_up(slots, part, inputs.main)
    rows = _records(part, slots, way, extra=extra)
    if way.has("redirected-key-weighs-nan"):
        return torch.where(counts[:, None], rows, records.dequantise(part.cache, slots, part.encoding)), counts
    return rows.masked_fill(~counts[:, None], 0.0), counts


class _State:
    """The running maximum, sum and weighted values of one split."""

    def __init__(self, heads: int, way: Way) -> None:
        start = 0.0 if way.has("maximum-starts-at-0") else -math.inf if way.has("empty-maximum-is-infinite") else NEVER
        self.way = way
        self.top = torch.full((heads,), start)
        self.total = torch.zeros(heads)
        self.values = torch.zeros(heads, LANES)

    def add(self, query: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, scale: float) -> None:
        """One tile of keys."""
        way = self.way
        if not len(counts):
            return
        seen = keys.masked_fill(keys.isnan(), 0.0) if way.has("nan-scrubbed-in-scores-only") else keys
        # Products in fp64, rounded once: a key's score does not depend on where it stands or on its neighbours.
        score = (query.double() @ seen.double().T).float() * scale
        if way.query == "bfloat16" or way.has("scaled-query-in-bfloat16"):
            folded = _round(query * (scale / LN2), "bfloat16")
            score = (folded.double() @ seen.double().T).float() * LN2
        if way.has("scores-in-float16"):
            score = score.half().float()
        if way.has("keys-far-below-the-maximum-dropped"):
            counts = counts & (score >= score.amax(1, keepdim=True) - 4).any(0)
        score = torch.where(counts[None, :], score, -math.inf if way.has("empty-maximum-is-infinite") else NEVER)
        top = torch.maximum(self.top, score.amax(1))
        if way.has("invalid-tile-sets-the-maximum-to-0"):
            top = torch.where(top == NEVER, 0.0, top)
        if way.base2:
            factor = torch.tensor(1 / LN2, dtype=torch.float32)
            shrink, p = torch.exp2((self.top - top) * factor), torch.exp2((score - top[:, None]) * factor)
        else:
            shrink, p = torch.exp(self.top - top), torch.exp(score - top[:, None])
        if way.has("rescale-forgotten"):
            shrink = torch.ones_like(shrink)
        if not way.has("invalid-weigh-exp-of-minus-max"):
            p = torch.where(counts[None, :], p, 0.0)
        else:
            p = torch.where(counts[None, :], p, torch.exp(-top.clamp(min=-80))[:, None])
        narrow = _truncate(p) if way.has("probability-truncated") else _round(p, way.probability)
        summed = narrow if way.has("sum-of-rounded-probabilities") else p
        self.total = self.total * shrink + _sum(summed, 1)
        self.values = self.values * shrink[:, None] + (narrow.double() @ keys.double()).float()
        if way.has("accumulated-in-bfloat16"):
            self.values = _round(self.values, "bfloat16")
        self.top = top


def _merge(
    maxima: torch.Tensor, sums: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None, inputs: DecodeInputs,
    way: Way,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Partials [splits, heads] and [splits, heads, 512] to rows and log-sum-exp."""
    splits = maxima.shape[0]
    if way.has("partial-maximum-in-base-2"):
        maxima = torch.where(maxima > NEVER, maxima / LN2, maxima)
    if way.has("last-split-lost") and splits > 1:
        maxima, sums, values = maxima[:-1], sums[:-1], values[:-1]
    if way.has("padded-split-repeats-the-last") and splits & (splits - 1):
        maxima, sums, values = (torch.cat([part, part[-1:]]) for part in (maxima, sums, values))
    if way.has("splits-weighted-equally"):
        weight = (sums > 0).float()
    elif way.has("split-weights-in-base-2"):
        weight = torch.exp2(maxima - maxima.amax(0))
    if sink is not None and way.has("sink-times-scale"):
        sink = sink * inputs.scale
    if sink is not None and way.has("sink-taken-for-base-2"):
        sink = sink * LN2
    if sink is not None and way.has("sink-scaled-to-base-2"):
        sink = sink / LN2
    top = maxima.amax(0)
    peak = top if sink is None else torch.maximum(top, sink)
    if not (way.has("splits-weighted-equally") or way.has("split-weights-in-base-2")):
        weight = torch.exp(maxima - peak)
    elif sink is not None:
        weight = weight * torch.exp(top - peak)
    total = _sum(weight * sums, 0)
    if way.has("inactive-split-read-as-nan"):
        weighed = torch.where(sums[..., None] > 0, values, math.nan) * weight[..., None]
    else:
        weighed = values * weight[..., None]
    rows = _sum(weighed, 0)
    alone = _sum(torch.exp(maxima - top) * sums, 0)
    lse = torch.where(alone > 0, top + alone.log(), -math.inf)
    if sink is not None:
        drain = torch.exp(sink - peak)
        if way.has("sink-once-per-split"):
            drain = drain * splits
        total = total + drain
        if way.has("sink-has-a-value"):
            rows = rows + drain[:, None]
    if way.has("denominator-in-bfloat16"):
        total = _round(total, "bfloat16")
    if way.has("empty-row-divides-by-0"):
        rows = rows / total[:, None]
    else:
        rows = torch.where(total[:, None] > 0, rows / total.clamp(min=1e-30)[:, None], 0.0)
    if way.has("log-sum-exp-in-base-2"):
        lse = lse / LN2
    return rows, lse


def _reorder(rows: torch.Tensor, inputs: DecodeInputs, way: Way) -> torch.Tensor:
    heads = rows.shape[1]
    whole = heads // HEADS_PER_PROGRAM * HEADS_PER_PROGRAM
    if way.has("ragged-head-tile-left-out") and whole < heads:
        rows = rows.clone()
        rows[:, whole:] = math.nan
    if way.has("heads-folded-to-8") and heads > 8:
        rows = rows[:, torch.arange(heads) % 8]
    if way.has("head-pairs-swapped") and heads > 1:
        order = torch.arange(heads)
        order[: heads // 2 * 2] ^= 1
        rows = rows[:, order]
    if way.has("heads-reversed"):
        rows = rows.flip(1)
    if way.has("value-without-rope-lanes"):
        rows = rows.clone()
        rows[..., NOPE:] = 0.0
    if way.has("output-offset-in-32-bits"):
        target = inputs.out if inputs.out is not None else inputs.out_codes
        assert target is not None
        offsets = torch.arange(rows.shape[0]) * target.stride(0)
        rows = torch.where((offsets == _wrapped(offsets))[:, None, None], rows, math.nan)
    if way.has("output-strides-ignored") and inputs.out is not None:
        flat = torch.full((storage_bytes(inputs.out).numel() // inputs.out.element_size(),), math.nan)
        flat[: rows.numel()] = rows.flatten()
        rows = flat.as_strided(rows.shape, inputs.out.stride()).clone()
    return rows


def _turn(rows: torch.Tensor, inputs: DecodeInputs, way: Way) -> tuple[torch.Tensor, int]:
    cos_sin = turned(inputs)
    queries = rows.shape[0]
    if cos_sin is None:
        return rows, queries if way.has("says-rotated") else 0
    assert inputs.cos_sin is not None and inputs.positions is not None
    if way.has("rows-left-unrotated"):
        return rows, queries
    if way.has("rotated-but-not-said"):
        return rotate_back(rows, cos_sin), 0
    half = cos_sin.shape[-1] // 2
    if way.has("angles-in-bfloat16"):
        cos_sin = _round(cos_sin, "bfloat16")
    if way.has("rotated-from-bfloat16"):
        rows = _round(rows, "bfloat16")
    if way.has("position-of-the-next-row"):
        cos_sin = inputs.cos_sin[inputs.positions.long().roll(-1)]
    if way.has("positions-from-0"):
        cos_sin = inputs.cos_sin[torch.arange(queries)]
    if way.has("rotated-forward"):
        cos_sin = torch.cat([cos_sin[:, :half], -cos_sin[:, half:]], 1)
    if way.has("cos-and-sin-swapped"):
        cos_sin = torch.cat([cos_sin[:, half:], cos_sin[:, :half]], 1)
    if way.has("rotated-twice"):
        return rotate_back(rotate_back(rows, cos_sin), cos_sin), queries
    if way.has("first-lanes-rotated"):
        moved = rotate_back(rows.roll(-ROPE, -1), cos_sin)
        return moved.roll(ROPE, -1), queries
    if way.has("halves-paired"):
        order = torch.arange(LANES)
        order[NOPE:] = NOPE + torch.arange(ROPE).view(2, half).T.flatten()
        back = torch.argsort(order)
        return rotate_back(rows[..., order], cos_sin)[..., back], queries
    if way.has("even-lane-stored-before-odd-reads"):
        once = rotate_back(rows, cos_sin)
        again = rows.clone()
        again[..., NOPE::2] = once[..., NOPE::2]
        again[..., NOPE + 1 :: 2] = rotate_back(again, cos_sin)[..., NOPE + 1 :: 2]
        return again, queries
    return rotate_back(rows, cos_sin), queries


def _quantised(rows: torch.Tensor, turned_rows: int, way: Way) -> DecodeOutputs:
    queries = rows.shape[0]
    if way.has("quantised-from-bfloat16"):
        rows = _round(rows, "bfloat16")
    block = {"scale-over-16-lanes": 16, "scale-over-64-lanes": 64}
    width = next((lanes for fault, lanes in block.items() if way.has(fault)), mxfp8.BLOCK)
    amax = rows.unflatten(-1, (-1, width)).abs().amax(-1)
    if width == 64:
        amax = amax.repeat_interleave(2, -1)
    elif width == 16:
        amax = amax[..., ::2]
    amax = torch.nan_to_num(amax, nan=1.0)
    scales = mxfp8.scale_bytes(amax)
    if way.has("scale-byte-for-the-number-above"):
        scales = (scales.int() + 1).clamp(max=254).to(torch.uint8)
    if way.has("scale-exponent-rounded-down"):
        scales = (scales.int() - 1).clamp(min=0).to(torch.uint8)
    codes = numbers.encode(mxfp8.scaled(rows, scales).clamp(-448, 448), "float8_e4m3fn")
    if way.has("divided-by-a-flushed-scale"):
        empty = (scales == 0).repeat_interleave(mxfp8.BLOCK, -1)
        codes = torch.where(empty, 0x7F, codes)
    if way.has("scales-ordered-by-block"):
        scales = scales.transpose(1, 2)
    return DecodeOutputs(
        codes=codes.reshape(queries, -1).view(torch.float8_e4m3fn), scales=scales.reshape(queries, -1).contiguous(),
        rotated_rows=turned_rows,
    )  # fmt: skip


_RIGHT = Way()


def _bare(inputs: DecodeInputs, way: Way) -> DecodeOutputs:
    """The answer as most implementations give it, without a log-sum-exp: a fault must show in what everybody returns."""
    return dataclasses.replace(compute(inputs, way), lse=None)


# Faults of the log-sum-exp. A denominator of rounded probabilities belongs here: numerator and denominator then carry the
# same roundings, so the answer itself is no worse than with the declared ones, and only the log-sum-exp is biased.
_SEEN_IN_LSE = ("log-sum-exp-in-base-2", "sum-of-rounded-probabilities")


def _mutant(name: str, pitfall: str, when: Callable[[DecodeInputs], bool] | None = None, **ways: object) -> Mutant:
    way = dataclasses.replace(_RIGHT, faults=frozenset({name}), **ways)  # type: ignore[arg-type]

    def answer(inputs: DecodeInputs) -> DecodeOutputs | None:
        if when is not None and not when(inputs):
            return None
        return compute(inputs, way) if name in _SEEN_IN_LSE else _bare(inputs, way)

    return Mutant(name=name, pitfall=pitfall, answer=answer)


def _extra(inputs: DecodeInputs) -> bool:
    return inputs.extra is not None


def _sunk(inputs: DecodeInputs) -> bool:
    return inputs.sink is not None


def _rotates(inputs: DecodeInputs) -> bool:
    return inputs.positions is not None


def _mxfp8(inputs: DecodeInputs) -> bool:
    return inputs.out_codes is not None


def _rounds(inputs: DecodeInputs) -> bool:
    return inputs.out is not None


def _trusts(inputs: DecodeInputs) -> bool:
    return inputs.trust_extra


def _chooses(inputs: DecodeInputs) -> bool:
    return inputs.adaptive


def _far_pages(inputs: DecodeInputs) -> bool:
    return any(is_vast(part.cache) for part in segments(inputs))


def _far_rows(inputs: DecodeInputs) -> bool:
    return is_vast(inputs.query)


def _apart(inputs: DecodeInputs) -> bool:
    return inputs.out is not None and not inputs.out.is_contiguous() and not is_vast(inputs.out)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("main-in-the-other-encoding", "the main cache were decoded in the other e4m3 encoding"),
    _mutant("extra-in-the-other-encoding", "the extra cache were decoded in the other e4m3 encoding", _extra),
    _mutant("one-encoding-for-both-caches", "both caches were decoded in the main cache's encoding", _extra),
    _mutant("token-pitch-584", "tokens of a page lay 584 bytes apart"),
    _mutant("scales-interleaved", "a token's scales followed its data"),
    _mutant("scale-pitch-7", "scales lay 7 bytes apart, without the pad byte"),
    _mutant("scale-per-32-lanes", "a scale covered 32 lanes"),
    _mutant("scale-per-128-lanes", "a scale covered 128 lanes"),
    _mutant("scale-index-shifted", "each group of lanes used the next group's scale"),
    _mutant("scale-bias-128", "scale bytes had bias 128"),
    _mutant("pad-byte-scales-rope", "the pad byte scaled the rotated lanes"),
    _mutant("page-stride-unpadded", "pages followed each other without padding"),
    _mutant("page-stride-of-the-smallest-page", "pages had the smallest legal stride, whatever the tensor's is"),
    _mutant("page-offset-in-32-bits", "the offset of a page were a 32-bit number", _far_pages),
    _mutant("main-page-size-for-extra", "the extra cache had the main cache's page size", _extra),
    _mutant("rope-as-float16", "the rotated lanes were float16"),
    _mutant("rope-bytes-swapped", "the rotated lanes were big-endian"),
    _mutant("rope-after-512-bytes", "the rotated lanes began at byte 512"),
    _mutant("nan-not-scrubbed", "NaN lanes were used as they are"),
    _mutant("nan-not-scrubbed-in-main", "NaN lanes of the main cache were used as they are"),
    _mutant("nan-not-scrubbed-in-extra", "NaN lanes of the extra cache were used as they are", _extra),
    _mutant("nan-not-scrubbed-in-rope", "NaN in rotated lanes were used as they are"),
    _mutant("nan-scrubbed-in-scores-only", "NaN lanes were 0 in the scores and NaN in the values"),
    _mutant("trust-reaches-the-main-cache", "the promise of a clean extra cache held for the main one", _trusts),
    _mutant("holes-do-not-count", "a row without lengths kept all its valid entries, not those before the count"),
    _mutant("first-offset-taken-for-0", "the first offset of the ragged rows were 0"),
    _mutant("capacity-taken-for-length", "the last row reached to the end of the index tensor"),
    _mutant("tail-beyond-length-attended", "a dense row were attended beyond its length"),
    _mutant("drop-last-entry", "the last entry of each list were dropped"),
    _mutant("drop-first-entry", "the first entry of each list were dropped"),
    _mutant("last-entry-twice", "the last entry of each list were used twice"),
    _mutant("duplicates-removed", "duplicates within a list were removed"),
    _mutant("duplicates-across-removed", "slot numbers present in both lists were used once", _extra),
    _mutant("extra-ignored", "the extra segment were ignored", _extra),
    _mutant(
        "width-rounded-down-to-a-compiled-one", "the extra list ended at the next smaller width that has a kernel", _extra,
    ),
    _mutant("next-querys-entries", "each query used the next one's entries"),
    _mutant("queries-share-the-first-rows-entries", "all queries used the first one's entries"),
    _mutant("bound-of-the-other-cache", "entries were checked against the other cache's size", _extra),
    _mutant("upper-bound-off-by-one", "the entry one past the last slot were valid"),
    _mutant("invalid-attended-as-slot-0", "invalid entries were attended as slot 0"),
    _mutant("beyond-attended-as-the-last-slot", "entries beyond the cache were attended as its last slot"),
    _mutant("negatives-wrap", "negative entries counted from the end"),
    _mutant("redirected-key-weighs-nan", "an invalid entry loaded slot 0 and gave it weight 0"),
    _mutant("invalid-weigh-exp-of-minus-max", "invalid entries had score 0 instead of none"),
    _mutant("chunk-rounded-down", "the entries of a split were the length over the split count, rounded down"),
    _mutant("main-chunk-taken-for-both", "the extra segment were cut by the main segment's chunk", _extra),
    _mutant("straddling-tile-reads-main", "a tile across both segments read the main cache", _extra),
    _mutant("split-boundary-entry-lost", "the first entry of every split but the first were lost"),
    _mutant("split-boundary-entry-twice", "every split repeated the last entry of the one before"),
    _mutant("ragged-tile-lost", "a tile that is not full were left out"),
    _mutant("last-split-lost", "the merge left out the last split"),
    _mutant("padded-split-repeats-the-last", "the merge read past the split count", splits=3),
    _mutant("inactive-split-read-as-nan", "the merge read the values of splits without a key"),
    _mutant("unwritten-partial-read", "the merge read one split more than was written"),
    _mutant("stale-partial-read", "the merge read one split more, which the query before had written"),
    _mutant("chunks-of-inactive-splits-lost", "a query ran 4 splits of the chunks of all that were launched", _chooses,
            splits=8),
    _mutant("partial-maximum-in-base-2", "partial maxima were in base 2 and merged in base e"),
    _mutant("split-weights-in-base-2", "splits were merged with powers of two"),
    _mutant("splits-weighted-equally", "splits were merged without their maxima"),
    _mutant("rescale-forgotten", "the running sums were not rescaled when the maximum grew"),
    _mutant("maximum-starts-at-0", "the running maximum started at 0"),
    _mutant("invalid-tile-sets-the-maximum-to-0", "a tile without a valid key set the maximum to 0", splits=1),
    _mutant("empty-maximum-is-infinite", "the maximum of no keys were minus infinity"),
    _mutant("empty-row-divides-by-0", "a row without keys were divided by its sum"),
    _mutant("sink-ignored", "the sink were left out", _sunk),
    _mutant("sink-times-scale", "the sink were multiplied by the softmax scale", _sunk),
    _mutant("sink-taken-for-base-2", "the sink were a base-2 logit", _sunk),
    _mutant("sink-scaled-to-base-2", "the sink were scaled to base 2 and used in base e", _sunk),
    _mutant("sink-once-per-split", "every split added the sink", _sunk),
    _mutant("sink-has-a-value", "the sink had a value of ones", _sunk),
    _mutant("sink-of-other-heads", "the last sinks were used in place of the first", _sunk),
    _mutant("scale-1-percent-high", "the softmax scale were 1 % too large"),
    _mutant("scale-1-percent-low", "the softmax scale were 1 % too small"),
    _mutant("scale-of-448-lanes", "the softmax scale were that of 448 lanes"),
    _mutant("scale-of-576-lanes", "the softmax scale were that of 576 lanes"),
    _mutant("scale-of-64-lanes", "the softmax scale were that of 64 lanes"),
    _mutant("scale-left-out", "the softmax scale were left out"),
    _mutant("scale-twice", "the softmax scale were applied twice"),
    _mutant("sum-of-rounded-probabilities", "the denominator summed the rounded probabilities", _rounds),
    _mutant("probability-truncated", "probabilities were truncated to bf16"),
    _mutant("scaled-query-in-bfloat16", "the scale were folded into the query, which is rounded to bf16 again"),
    _mutant("partials-in-bfloat16", "the splits' values were stored in bf16", partial="bfloat16"),
    _mutant("scores-in-float16", "scores were rounded to fp16"),
    _mutant("keys-far-below-the-maximum-dropped", "keys 4 below a tile's maximum in every head were dropped"),
    _mutant("denominator-in-bfloat16", "the denominator were rounded to bf16"),
    _mutant("accumulated-in-bfloat16", "values were accumulated in bf16"),
    _mutant("output-truncated", "the output were truncated to bf16", _rounds),
    _mutant("query-strides-ignored", "the query were contiguous"),
    _mutant("query-rows-of-576-lanes", "the query's heads lay 576 lanes apart, whatever the strides are"),
    _mutant("query-offset-in-32-bits", "the offset of a query's row were a 32-bit number", _far_rows),
    _mutant("output-strides-ignored", "the output were contiguous", _apart),
    _mutant("output-offset-in-32-bits", "the offset of an output row were a 32-bit number", _far_rows),
    _mutant("ragged-head-tile-left-out", "heads beyond the last multiple of 16 were left out"),
    _mutant("heads-folded-to-8", "all heads repeated the first eight"),
    _mutant("head-pairs-swapped", "neighbouring heads were swapped"),
    _mutant("heads-reversed", "the heads were in reverse order"),
    _mutant("value-without-rope-lanes", "the values had no rotated lanes"),
    _mutant("rows-left-unrotated", "the rows were reported as rotated without being so", _rotates),
    _mutant("says-rotated", "rows were reported as rotated that nobody asked to rotate"),
    _mutant("rotated-but-not-said", "the rows were rotated and reported as not", _rotates),
    _mutant("position-of-the-next-row", "each row were rotated by the next row's position", _rotates),
    _mutant("positions-from-0", "the rows were rotated by their numbers", _rotates),
    _mutant("rotated-forward", "the rotation went forward", _rotates),
    _mutant("rotated-twice", "the rows were rotated twice", _rotates),
    _mutant("angles-in-bfloat16", "cosines and sines were rounded to bf16", _rotates),
    _mutant("rotated-from-bfloat16", "the rows were rounded to bf16 before the rotation", _rotates),
    _mutant("cos-and-sin-swapped", "cosines and sines were swapped", _rotates),
    _mutant("first-lanes-rotated", "the first 64 lanes were rotated", _rotates),
    _mutant("halves-paired", "lanes 32 apart were rotated as pairs", _rotates),
    _mutant("even-lane-stored-before-odd-reads", "the odd lane were rotated with the even lane's new value", _rotates),
    _mutant("quantised-from-bfloat16", "the row were rounded to bf16 before it is quantised", _mxfp8),
    _mutant("scale-over-16-lanes", "a block's scale covered its first 16 lanes", _mxfp8),
    _mutant("scale-over-64-lanes", "a block's scale covered 64 lanes", _mxfp8),
    _mutant("scale-byte-for-the-number-above", "the scale byte were one too large", _mxfp8),
    _mutant("scale-exponent-rounded-down", "the scale byte were one too small", _mxfp8),
    _mutant("divided-by-a-flushed-scale", "a block of zeros were divided by a scale of 0", _mxfp8),
    _mutant("scales-ordered-by-block", "scale bytes were ordered by block and then by head", _mxfp8),
    _mutant("log-sum-exp-in-base-2", "the log-sum-exp were in base 2", _rounds),
)  # fmt: skip


def _honest(name: str, precision: Precision, **ways: object) -> Honest:
    way = dataclasses.replace(_RIGHT, **ways)  # type: ignore[arg-type]
    return Honest(name=name, precision=precision, answer=lambda inputs: compute(inputs, way))


_BF16 = Precision(probability="bfloat16", output="bfloat16")
_FP32 = Precision(probability="float32", output="bfloat16")

HONEST: tuple[Honest, ...] = (
    Honest(name="as-asked", precision=_BF16, answer=lambda inputs: _bare(inputs, _RIGHT)),
    _honest("one-split", _BF16, splits=1),
    _honest("two-splits", _BF16, splits=2),
    _honest("three-splits-base-2", _BF16, splits=3, base2=True),
    _honest("five-splits-backwards", _BF16, splits=5, backwards=True),
    _honest("eight-splits-tile-16", _BF16, splits=8, tile=16),
    _honest("sixteen-splits-tile-64", _BF16, splits=16, tile=64),
    _honest("thirty-two-splits", _BF16, splits=32),
    _honest("one-split-tile-128-backwards", _BF16, splits=1, tile=128, backwards=True),
    _honest("fp32-probabilities", _FP32, splits=1, probability="float32"),
    _honest("fp32-probabilities-seven-splits", _FP32, splits=7, probability="float32", base2=True),
    _honest("fp32-probabilities-tile-16-backwards", _FP32, splits=2, tile=16, probability="float32", backwards=True),
    _honest(
        "fp32-throughout-tile-1", Precision(probability="float32", output="float32"), splits=1, tile=1,
        probability="float32", output="float32",
    ),
    _honest(
        "fp32-throughout-base-2", Precision(probability="float32", output="float32"), splits=4, base2=True,
        probability="float32", output="float32",
    ),
    _honest(
        "fp32-probabilities-bf16-partials",
        Precision(probability="float32", output="float32", partial="bfloat16"), splits=3, probability="float32",
        partial="bfloat16", output="float32",
    ),
    _honest(
        "scaled-query-in-bf16", Precision(probability="bfloat16", output="bfloat16", query="bfloat16"), splits=2, base2=True,
        query="bfloat16",
    ),
    _honest(
        "bf16-partials", Precision(probability="bfloat16", output="bfloat16", partial="bfloat16"), splits=4,
        partial="bfloat16",
    ),
)  # fmt: skip
