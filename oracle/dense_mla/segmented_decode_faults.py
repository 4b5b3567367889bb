"""How does an implementation compute a decode over segments, rightly in several ways and wrongly in many more?

`compute` is a second formulation in fp32, shaped like the kernels: keys by pages, base-2 scores, segments, one merge. Each
fault is one name, looked at in the one place where such a kernel would err.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.dense_mla.merge_segments import active_segments
from cases.dense_mla.segmented_decode import CODES, Inputs, Outputs
from cases.memory import is_vast, moved
from cases.precision import Precision
from oracle.dense_mla.part_merge import LN2, Parts
from oracle.dense_mla.part_merge_ways import Way as MergeWay
from oracle.dense_mla.part_merge_ways import as_if_contiguous, cut, rounded
from oracle.dense_mla.part_merge_ways import compute as merge
from oracle.dense_mla.segmented_decode_call import decoded, query_of
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Mutant

_LOG2E = 1 / LN2


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of computing.

    segments: how many there are. block: keys whose scores are kept at once. probability: the format that they multiply values
    in. faults: what is done wrongly.
    """

    segments: int = 8
    block: int = 16
    probability: str = "bfloat16"
    shows_segments: bool = False
    faults: frozenset[str] = frozenset()

    def has(self, *faults: str) -> bool:
        """Whether one of the faults is committed."""
        return any(fault in self.faults for fault in faults)


def _length(inputs: Inputs, row: int, way: Way) -> int:
    length = max(0, int(inputs.lengths[row]))
    if way.has("longest-row-for-all") and length:
        return int(inputs.lengths.max())
    if way.has("length-of-the-next-row"):
        return max(0, int(inputs.lengths.roll(-1)[row]))
    if way.has("last-key-lost"):
        return max(0, length - 1)
    if way.has("partial-page-lost"):
        return length // inputs.tile * inputs.tile
    if way.has("empty-row-reads-a-key"):
        return max(1, length)
    return length


def _slots(inputs: Inputs, row: int, way: Way) -> tuple[torch.Tensor, int]:
    """The slots that are loaded, whole pages, and how many of them count."""
    length = _length(inputs, row, way)
    tile = inputs.tile
    beyond = length + 1 if way.has("one-key-too-many") else length
    count = min(inputs.table.shape[1], -(-beyond // tile)) * tile
    place = torch.arange(count)
    table = inputs.table[0 if way.has("rows-share-the-first-ones-pages") else row]
    if way.has("table-row-stride-ignored"):
        table = as_if_contiguous(inputs.table)[row]
    column = place // tile
    if way.has("pages-in-reverse-order"):
        column = column.flip(0)
    page = table[column].long()
    if way.has("table-entries-are-tokens"):
        return page.clamp(0, inputs.cache.shape[0] * tile - 1), beyond
    offset = torch.zeros_like(place) if way.has("place-in-the-page-lost") else place % tile
    page = page.clamp(0, inputs.cache.shape[0] - 1)
    return page * tile + offset, min(beyond, count)


def _keys(inputs: Inputs, slots: torch.Tensor, way: Way) -> torch.Tensor:
    cache = inputs.cache
    page, place = slots // inputs.tile, slots % inputs.tile
    if way.has("page-stride-ignored"):
        cache = as_if_contiguous(cache)
    keys = cache[page, place, 0]
    if way.has("codes-of-the-other-format"):
        other = torch.float8_e4m3fnuz if keys.dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
        keys = keys.contiguous().view(torch.uint8).view(other)
    values = decoded(keys, torch.float32)
    if way.has("kv-offset-i32"):
        values = values.masked_fill((page * cache.stride(0) >= 1 << 31)[:, None], math.nan)
    if way.has("keys-scaled-and-rounded"):
        # What another kernel does with the same cache: the scale is gone into the keys, rounded.
        values = round_to_bfloat16(values * inputs.cache_scale).float() / inputs.cache_scale
    return values


def _query(inputs: Inputs, row: int, way: Way) -> torch.Tensor:
    query = query_of(inputs, row, torch.float32)
    if way.has("query-strides-ignored"):
        flat = dataclasses.replace(inputs, query=as_if_contiguous(inputs.query))
        query = query_of(flat, row, torch.float32)
    if inputs.query_scale is not None:
        if way.has("query-scale-left-out"):
            query = decoded(inputs.query[row], torch.float32)
        if way.has("query-scale-twice"):
            query = query * inputs.query_scale
        if way.has("query-not-rounded-behind-its-scale"):
            query = decoded(inputs.query[row], torch.float32) * inputs.query_scale
    if way.has("query-of-the-first-row"):
        query = query_of(inputs, 0, torch.float32)
    return query


def _factor(inputs: Inputs, way: Way) -> float:
    lanes = inputs.query.shape[2]
    factor = inputs.scale
    if way.has("scale-of-the-lanes"):
        factor = lanes**-0.5
    if way.has("scale-of-576-lanes"):
        factor = 576**-0.5
    if way.has("scale-1-percent-high"):
        factor *= 1.01
    if not way.has("cache-scale-left-out-of-scores"):
        factor *= float(inputs.cache_scale)
    return factor if way.has("scores-not-turned-to-base-2") else factor * _LOG2E


def compute(inputs: Inputs, way: Way) -> Outputs:
    """The outputs of the call, computed this way."""
    rows, heads, _ = inputs.query.shape
    shape = (rows, heads, way.segments)
    sums, maxima = torch.full((*shape, inputs.rank), math.nan), torch.full(shape, math.nan)
    masses, counts = torch.full(shape, math.nan), torch.zeros(rows, dtype=torch.int64)
    for row in range(rows):
        slots, length = _slots(inputs, row, way)
        query, keys = _query(inputs, row, way), _keys(inputs, slots, way)
        # Products in fp64, rounded once: a score does not depend on what stands beside it.
        wide = keys.double()
        if way.has("rope-left-out"):
            wide = torch.cat([wide[:, : inputs.rank], torch.zeros_like(wide[:, inputs.rank :])], 1)
        score = _scores(inputs, query, wide, length, way)
        values = keys[:, -inputs.rank :] if way.has("values-are-the-last-lanes") else keys[:, : inputs.rank]
        if not way.has("slack-multiplied-by-0"):
            values = values.clone()
            values[length:] = 0.0
        counts[row] = active_segments(length, way.segments, inputs.tile)
        span = max(1, -(-length // (way.segments * inputs.tile))) * inputs.tile
        for segment in range(int(counts[row])):
            part = slice(segment * span, (segment + 1) * span)
            if way.has("answer-over-the-query") and segment == 1:
                # What the first segment has found lies where the query was.
                found = sums[row, :, 0] / masses[row, :, 0, None]
                score = _scores(inputs, torch.cat([found, query[:, inputs.rank :]], 1), wide, length, way)
            state = _segment(score[:, part], values[part], way)
            maxima[row, :, segment], masses[row, :, segment], total = state
            sums[row, :, segment] = total * _value_scale(inputs, way)
    counts = _recounted(inputs, counts, way)
    out, lse = _merged(inputs, sums, maxima, masses, counts, way)
    shown = (sums, maxima, masses) if way.shows_segments else (None, None, None)
    return Outputs(out, lse, *shown)


def _scores(inputs: Inputs, query: torch.Tensor, keys: torch.Tensor, length: int, way: Way) -> torch.Tensor:
    """fp32 scores [heads, keys], those of keys that do not count -inf."""
    score = (query.double() @ keys.T).float() * _factor(inputs, way)
    score[:, length:] = -math.inf
    return score


def _value_scale(inputs: Inputs, way: Way) -> float:
    scale = float(inputs.cache_scale)
    if way.has("cache-scale-left-out-of-values"):
        return 1.0
    return scale * scale if way.has("cache-scale-twice-on-values") else scale


def _segment(
    score: torch.Tensor, values: torch.Tensor, way: Way
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Maximum [heads], mass [heads] and sums [heads, rank] of one segment, a block of keys at a time."""
    heads = score.shape[0]
    top = torch.full((heads,), 0.0 if way.has("maximum-starts-at-0") else -math.inf)
    mass, total = torch.zeros(heads), torch.zeros((heads, values.shape[1]))
    for start in range(0, score.shape[1], way.block):
        block = slice(start, start + way.block)
        higher = torch.maximum(top, score[:, block].amax(1))
        base = torch.where(torch.isneginf(higher), 0.0, higher)
        weight = torch.exp2(score[:, block] - base[:, None])
        shrink = torch.exp2(top - base)
        if way.has("rescale-forgotten"):
            shrink = torch.ones_like(shrink)
        narrow = _narrow(weight, way)
        mass = mass * shrink + (narrow if way.has("mass-of-rounded-weights") else weight).double().sum(1).float()
        total = total * shrink[:, None] + (narrow.double() @ values[block].double()).float()
        if way.has("sums-in-bfloat16"):
            total = round_to_bfloat16(total).float()
        top = higher
    return top, mass, total


def _narrow(weight: torch.Tensor, way: Way) -> torch.Tensor:
    if way.has("weights-truncated"):
        return cut(weight, torch.bfloat16).float()
    if way.has("weights-in-float8"):
        return weight.to(torch.float8_e4m3fn).float()
    return weight if way.probability == "float32" else round_to_bfloat16(weight).float()


def _recounted(inputs: Inputs, counts: torch.Tensor, way: Way) -> torch.Tensor:
    """The segments that the merge takes for active."""
    lengths = inputs.lengths.tolist()
    if way.has("merge-reads-all-segments"):
        return torch.where(counts > 0, way.segments, 0)
    if way.has("merge-of-a-tile-half-as-large"):
        return torch.tensor([active_segments(2 * n, way.segments, inputs.tile) if n > 0 else 0 for n in lengths])
    if way.has("merge-of-half-as-many-segments"):
        return torch.tensor([active_segments(n, way.segments // 2, inputs.tile) for n in lengths])
    if way.has("last-segment-lost"):
        return torch.where(counts > 1, counts - 1, counts)
    return counts


def _merged(
    inputs: Inputs, sums: torch.Tensor, maxima: torch.Tensor, masses: torch.Tensor, counts: torch.Tensor, way: Way
) -> tuple[torch.Tensor, torch.Tensor]:
    written = torch.arange(way.segments) < counts[:, None]
    exponents = torch.where(written[:, None], maxima, -math.inf)
    parts = Parts(sums.permute(2, 0, 1, 3), exponents.permute(2, 0, 1), masses.permute(2, 0, 1), base_two=True)
    faults = way.faults & {"exponents-taken-for-the-other-base", "lse-in-base-2", "both-neg-inf"}
    if way.has("masses-left-out"):
        parts = dataclasses.replace(parts, masses=torch.ones_like(parts.exponents))
    out, lse = merge(parts, MergeWay(faults=frozenset(faults)))
    if way.has("heads-beyond-16-lost"):
        out[:, 16:] = math.nan
    if way.has("heads-reversed"):
        out, lse = out.flip(1), lse.flip(1)
    if way.has("rank-beyond-the-first-half-lost"):
        out[..., inputs.rank // 2 :] = 0.0
    if way.has("output-truncated"):
        return cut(out, inputs.out.dtype), lse
    return rounded(out, inputs.out.dtype), lse


_When = Callable[[Inputs], bool]


def _near(inputs: Inputs) -> bool:
    return not is_vast(inputs.cache)


def _far(inputs: Inputs) -> bool:
    return is_vast(inputs.cache)


def _coded(inputs: Inputs) -> bool:
    return inputs.cache.dtype in CODES


def _scaled(inputs: Inputs) -> bool:
    return inputs.query_scale is not None


def _mutant(name: str, pitfall: str, when: _When | None = None) -> Mutant:
    way = Way(faults=frozenset({name}))
    return Mutant(name, pitfall, lambda inputs: compute(inputs, way) if when is None or when(inputs) else None)


def _out_strides_ignored(inputs: Inputs) -> Outputs | None:
    if inputs.out.is_contiguous():
        return None
    memory = moved(inputs.out, inputs.out.device)
    right = compute(inputs, Way())
    as_if_contiguous(memory).copy_(right.out)
    return Outputs(memory.contiguous(), right.lse)


def _skipped_on_empty(inputs: Inputs) -> Outputs:
    right = compute(inputs, Way())
    empty = torch.isneginf(right.lse)
    return Outputs(torch.where(empty[..., None], moved(inputs.out, "cpu"), right.out), right.lse)


def _shown(change: Callable[[Outputs], Outputs]) -> Callable[[Inputs], Outputs]:
    """The right answer with segments that are shown wrongly."""
    return lambda inputs: change(compute(inputs, Way(shows_segments=True)))


def _means_shown(outputs: Outputs) -> Outputs:
    assert outputs.sums is not None and outputs.masses is not None
    return dataclasses.replace(outputs, sums=outputs.sums / outputs.masses[..., None])


def _natural_maxima_shown(outputs: Outputs) -> Outputs:
    assert outputs.maxima is not None
    return dataclasses.replace(outputs, maxima=outputs.maxima * LN2)


def _segments_shifted(outputs: Outputs) -> Outputs:
    assert outputs.sums is not None and outputs.maxima is not None and outputs.masses is not None
    return dataclasses.replace(
        outputs, sums=outputs.sums.roll(1, 2), maxima=outputs.maxima.roll(1, 2), masses=outputs.masses.roll(1, 2)
    )


# Reports of faults that have been seen: vllm-project/vllm#50476 (longest-row-for-all), ROCm/aiter#4474 (kv-offset-i32),
# vllm-project/vllm#37054 (the cache's scale), #40705 (values-are-the-last-lanes), #37442 (store-skipped-where-empty),
# sgl-project/sglang#14936 (heads-beyond-16-lost), vllm-project/vllm#42893 (codes-of-the-other-format), ROCm/aiter#4350
# (merge-reads-all-segments), vllm-project/vllm#47079 (lse-in-base-2).
MUTANTS: tuple[Mutant, ...] = (
    _mutant("longest-row-for-all", "every row that has keys were as long as the longest, so that it sees later tokens"),
    _mutant("length-of-the-next-row", "every row had the length of the one behind it"),
    _mutant("last-key-lost", "the last key of every row were lost"),
    _mutant("one-key-too-many", "the key behind the last one counted"),
    _mutant("partial-page-lost", "a page that is not full were left out"),
    _mutant("empty-row-reads-a-key", "a row without keys read its first page"),
    _mutant("slack-multiplied-by-0", "the rest of the last page were loaded and weighed 0"),
    _mutant("rows-share-the-first-ones-pages", "all rows had the first one's pages"),
    _mutant("table-row-stride-ignored", "rows of the page table were as far apart as they are wide"),
    _mutant("pages-in-reverse-order", "the pages of a row were read from the last to the first"),
    _mutant("table-entries-are-tokens", "the page table held tokens"),
    _mutant("place-in-the-page-lost", "every key were the first of its page"),
    _mutant("page-stride-ignored", "pages lay as far apart as they are large", _near),
    _mutant("kv-offset-i32", "the offset of a page had 32 bits, and what lies there were NaN", _far),
    _mutant("codes-of-the-other-format", "codes were those of the other 8-bit format", _coded),
    _mutant("keys-scaled-and-rounded", "keys were rounded to bf16 behind their scale", _coded),
    _mutant("query-strides-ignored", "the query were contiguous"),
    _mutant("query-of-the-first-row", "all rows had the first one's query"),
    _mutant("answer-over-the-query", "the answer were kept where the query is, before all segments had read it"),
    _mutant("query-scale-left-out", "the scale of the query were left out", _scaled),
    _mutant("query-scale-twice", "the scale of the query were applied twice", _scaled),
    _mutant("query-not-rounded-behind-its-scale", "the query were not rounded to bf16 behind its scale", _scaled),
    _mutant("cache-scale-left-out-of-scores", "the scale of the cache were left out of the scores", _coded),
    _mutant("cache-scale-left-out-of-values", "the scale of the cache were left out of the values", _coded),
    _mutant("cache-scale-twice-on-values", "the scale of the cache were applied to the values twice", _coded),
    _mutant("scale-of-the-lanes", "the softmax scale were that of the lanes of a key"),
    _mutant("scale-of-576-lanes", "the softmax scale were that of 576 lanes"),
    _mutant("scale-1-percent-high", "the softmax scale were 1 % too large"),
    _mutant("scores-not-turned-to-base-2", "scores in base e were exponentiated in base 2"),
    _mutant("rope-left-out", "the last lanes did not enter the scores"),
    _mutant("values-are-the-last-lanes", "the values were the last lanes of a key"),
    _mutant("maximum-starts-at-0", "the running maximum started at 0"),
    _mutant("rescale-forgotten", "the running sums were not rescaled when the maximum grew"),
    _mutant("mass-of-rounded-weights", "the masses summed the rounded weights"),
    _mutant("weights-truncated", "weights were cut off to bf16"),
    _mutant("weights-in-float8", "weights were rounded to e4m3"),
    _mutant("sums-in-bfloat16", "values were summed in bf16"),
    _mutant("merge-reads-all-segments", "the merge read segments that nobody wrote"),
    _mutant("merge-of-a-tile-half-as-large", "the merge counted segments by half the tile"),
    _mutant("merge-of-half-as-many-segments", "the merge counted segments as if there were half as many"),
    _mutant("last-segment-lost", "the merge left out the last segment"),
    _mutant("masses-left-out", "the merge gave every segment the mass 1"),
    _mutant("exponents-taken-for-the-other-base", "the merge took maxima for natural ones"),
    _mutant("lse-in-base-2", "the log-sum-exp were returned in base 2"),
    _mutant("both-neg-inf", "a row without keys divided 0 by 0"),
    _mutant("heads-beyond-16-lost", "heads beyond the 16th were not written"),
    _mutant("heads-reversed", "the heads were in reverse order"),
    _mutant("rank-beyond-the-first-half-lost", "the second half of the values were left out"),
    _mutant("output-truncated", "the output were cut off instead of rounded"),
    Mutant("out-strides-ignored", "the output were contiguous", _out_strides_ignored),
    Mutant("store-skipped-where-empty", "a row without keys were not stored", _skipped_on_empty),
    Mutant("lse-none", "no log-sum-exp were returned",
           lambda inputs: Outputs(compute(inputs, Way()).out, None)),  # type: ignore[arg-type]
    Mutant("means-shown-for-sums", "the sums of segments were normalised", _shown(_means_shown)),
    Mutant("natural-maxima-shown", "the maxima of segments were natural", _shown(_natural_maxima_shown)),
    Mutant("segments-shown-shifted", "every segment stood one place too far", _shown(_segments_shifted)),
)  # fmt: skip

_BF16 = Precision(probability="bfloat16", exponential_ulps=2.0, flushes=False)
_FP32 = Precision(probability="float32", exponential_ulps=2.0, flushes=False)


def _honest(name: str, precision: Precision, way: Way) -> Honest:
    return Honest(name, precision, lambda inputs: compute(inputs, way))


HONEST: tuple[Honest, ...] = (
    _honest("eight-segments", _BF16, Way()),
    _honest("eight-segments-shown", _BF16, Way(shows_segments=True)),
    _honest("one-segment-block-64", _BF16, Way(segments=1, block=64)),
    _honest("32-segments-block-1", _BF16, Way(segments=32, block=1, shows_segments=True)),
    _honest("fp32-weights", _FP32, Way(probability="float32", segments=16, shows_segments=True)),
)
