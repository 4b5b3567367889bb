"""How does an implementation compute sparse MLA prefill, rightly in many ways and wrongly in many more?

`compute` is a second formulation of the op, shaped like the kernels: entries resolved to rows, split, tiled, online
softmax, rounding where kernels round. With no fault it is right whatever the split count, tile, order and rounding
points: those are `HONEST`. Each fault is one name, looked at in the one place where such a kernel would err: those are
`MUTANTS`. A fault that cannot show in a call answers None there.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.memory import is_vast, moved, storage_bytes
from cases.precision import Precision
from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Mutant
from oracle.sparse_mla.prefill_call import listed

NEVER = torch.finfo(torch.float32).min
HEADS_PER_PROGRAM = 16
LN2 = math.log(2.0)
# List widths that a kernel was built for.
_BUILT_WIDTHS = (16, 64, 128, 512, 1024, 2048)
_LIMIT = 1 << 31


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of computing: how many splits, which tile and order, which rounding points, which faults.

    probability: `same` as the rows, `float32`, or `bfloat16`. partial: the format of a split's values.
    """

    splits: int = 1
    tile: int = 16
    backwards: bool = False
    base2: bool = False
    probability: str = "same"
    partial: str = "float32"
    faults: frozenset[str] = frozenset()

    def has(self, *faults: str) -> bool:
        """Whether one of the faults is committed."""
        return any(fault in self.faults for fault in faults)


def _narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values rounded to nearest even to a dtype, in fp32."""
    return (round_to_bfloat16(values) if dtype == torch.bfloat16 else values.to(dtype)).float()


def _truncated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values with the bits dropped that bf16 or fp16 have not, in fp32."""
    if dtype == torch.float32:
        return values
    mask = -65536 if dtype == torch.bfloat16 else -8192
    return (values.contiguous().view(torch.int32) & mask).view(torch.float32)


def _sum(values: torch.Tensor, dim: int) -> torch.Tensor:
    """A sum rounded once, so that it does not depend on how many other sums are taken beside it."""
    return values.double().sum(dim).float()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The storage behind a tensor from its first element on, in its dtype."""
    size = tensor.element_size()
    flat = storage_bytes(tensor)[tensor.storage_offset() * size :]
    return flat[: flat.numel() // size * size].view(tensor.dtype)


def _gathered(flat: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return flat[offsets.clamp(0, flat.numel() - 1)]


def _entries(inputs: PrefillInputs, t: int, way: Way) -> torch.Tensor:
    """The entries of query t as the way reads them, invalid ones included."""
    queries = inputs.query.shape[0]
    if way.has("queries-share-the-first-rows-entries"):
        t = 0
    if way.has("next-querys-entries") and t + 1 < queries:
        t += 1
    entries = _ragged(inputs, t, way) if inputs.ragged else _dense(inputs, t, way)
    if way.has("drop-last-entry"):
        entries = entries[:-1]
    if way.has("drop-first-entry"):
        entries = entries[1:]
    if way.has("last-entry-twice"):
        entries = torch.cat([entries, entries[-1:]])
    if way.has("duplicates-removed"):
        entries = torch.unique(entries)
    if way.has("topk-width-fallthrough"):
        entries = entries[: max((width for width in _BUILT_WIDTHS if width <= len(entries)), default=len(entries))]
    if way.has("entries-truncated-to-32-bits"):
        entries = entries.int().long()
    return entries


def _ragged(inputs: PrefillInputs, t: int, way: Way) -> torch.Tensor:
    assert inputs.indices is not None and inputs.indptr is not None
    ptr = inputs.indptr.long()
    if way.has("first-offset-taken-for-0"):
        ptr = ptr - ptr[0]
    end = int(ptr[t + 1])
    if way.has("capacity-taken-for-length") and t == inputs.query.shape[0] - 1:
        end = inputs.indices.shape[0]
    return inputs.indices[int(ptr[t]) : end].long()


def _dense(inputs: PrefillInputs, t: int, way: Way) -> torch.Tensor:
    dense, lengths = inputs.dense, inputs.lengths
    assert dense is not None
    row = dense[t].long()
    if way.has("tail-beyond-length-attended") or (way.has("holes-do-not-count") and lengths is None):
        return row
    if lengths is not None and way.has("length-beyond-the-width-reads-on"):
        place = t * dense.stride(0) + torch.arange(max(int(lengths[t]), 0))
        return _gathered(_flat(dense), place).long()
    if lengths is not None and way.has("negative-length-counts-from-the-end"):
        return row[: int(lengths[t])]
    if way.has("limit-ignores-holes") and lengths is None:
        last = (row >= 0).nonzero().flatten()
        return row[: int(last[-1]) + 1 if last.numel() else 0]
    return listed(inputs, t)


def _rows(inputs: PrefillInputs, entries: torch.Tensor, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp32 rows [n, lanes] behind the entries, and which of them count."""
    counts = (entries >= 0) & (entries < inputs.rows)
    rows = torch.where(counts, entries, 0)
    if way.has("upper-bound-off-by-one"):
        rows, counts = torch.where(entries == inputs.rows, inputs.rows - 1, rows), counts | (entries == inputs.rows)
    if way.has("entries-clamped-to-the-last-row"):
        rows, counts = torch.where(entries >= inputs.rows, inputs.rows - 1, rows), entries >= 0
    if way.has("negatives-wrap"):
        wraps = (entries < 0) & (entries >= -inputs.rows)
        rows, counts = torch.where(wraps, entries + inputs.rows, rows), counts | wraps
    if way.has("invalid-attended-as-row-0"):
        counts = torch.ones_like(counts)
    keys = _kv(inputs, rows, way)
    if way.has("clamp-minus1-to-slot0"):
        # The weight is 0, and 0 times NaN is not.
        return keys, counts
    return keys.masked_fill(~counts[:, None], 0.0), counts


_KV_FAULTS = ("row576-ignore-stride", "row-pitch-is-the-width", "kv-lane-stride-ignored")


def _kv(inputs: PrefillInputs, rows: torch.Tensor, way: Way) -> torch.Tensor:
    kv = inputs.kv
    lanes = torch.arange(kv.shape[2])
    if way.has(*_KV_FAULTS):
        pitch = 576 if way.has("row576-ignore-stride") else kv.stride(0)
        if way.has("row-pitch-is-the-width"):
            pitch = kv.shape[2]
        step = 1 if way.has("kv-lane-stride-ignored") else kv.stride(2)
        keys = _gathered(_flat(kv), rows[:, None] * pitch + lanes * step)
    else:
        keys = kv[rows, 0]
    if way.has("kv-row-i32"):
        keys = keys.masked_fill((rows * kv.stride(0) >= _LIMIT)[:, None], math.nan)
    if way.has("types-confused"):
        keys = keys.view(torch.float16 if keys.dtype == torch.bfloat16 else torch.bfloat16)
    keys = keys.float()
    if way.has("ragged-lane-tile-lost"):
        keys[:, keys.shape[1] // 64 * 64 :] = 0.0
    if way.has("lanes-beyond-512-ignored"):
        keys[:, 512:] = 0.0
    return keys


def _query(inputs: PrefillInputs, t: int, way: Way) -> torch.Tensor:
    query = inputs.query[t]
    heads, lanes = query.shape
    if way.has("query-strides-ignored"):
        return _flat(inputs.query)[t * heads * lanes :][: heads * lanes].view(heads, lanes).float()
    if way.has("query-lane-stride-ignored"):
        head, lane = torch.arange(heads)[:, None], torch.arange(lanes)
        return _gathered(_flat(query), head * query.stride(0) + lane).float()
    if way.has("sparse-qrow-i32") and t * inputs.query.stride(0) >= _LIMIT:
        return torch.full_like(query, math.nan).float()
    return query.float()


def _scale(inputs: PrefillInputs, way: Way) -> float:
    lanes = inputs.query.shape[2]
    wrong = {
        "scale-1-percent-high": inputs.scale * 1.01, "scale-1-percent-low": inputs.scale * 0.99,
        "scale-of-nope-lanes": inputs.nope_lanes**-0.5, "scale-of-rope-lanes": max(inputs.rope_lanes, 1) ** -0.5,
        "scale-of-512-lanes": 512**-0.5, "scale-of-576-lanes": 576**-0.5, "scale-left-out": 1.0,
        "scale-twice": inputs.scale**2, "scale-of-padded-lanes": (1 << (lanes - 1).bit_length()) ** -0.5,
    }  # fmt: skip
    return next((value for fault, value in wrong.items() if way.has(fault)), inputs.scale)


def compute(inputs: PrefillInputs, way: Way) -> PrefillOutputs:
    """The outputs of the call, computed this way."""
    queries, heads, lanes = inputs.query.shape
    rows = torch.zeros((queries, heads, lanes))
    lse = torch.full((queries, heads), -math.inf)
    sink = _sink(inputs, way)
    for t in range(queries):
        rows[t], lse[t] = _one(inputs, t, sink, way)
    rows = _rearranged(rows, inputs, way)
    width = inputs.out.shape[2]
    rows = rows[..., -width:] if way.has("last-lanes-returned") else rows[..., :width]
    if way.has("output-truncated"):
        rows = _truncated(rows, inputs.out.dtype)
    if way.has("output-by-way-of-bfloat16"):
        rows = _narrow(rows, torch.bfloat16)
    out = round_to_bfloat16(rows) if inputs.out.dtype == torch.bfloat16 else rows.to(inputs.out.dtype)
    if way.has("out-strides-ignored"):
        memory = moved(inputs.out, inputs.out.device)
        _flat(memory)[: out.numel()] = out.flatten()
        out = memory.contiguous()
    if way.has("out-row-i32"):
        late = torch.arange(queries) * inputs.out.stride(0) >= _LIMIT
        out = out.masked_fill(late[:, None, None], math.nan)
    return PrefillOutputs(out=out, lse=lse)


def _sink(inputs: PrefillInputs, way: Way) -> torch.Tensor | None:
    heads = inputs.query.shape[1]
    sink = inputs.sink
    if sink is None or way.has("sink-ignored"):
        return None
    chosen = sink[sink.shape[0] - heads :] if way.has("sink-of-other-heads") else sink[:heads]
    if way.has("sink-of-the-first-head"):
        chosen = sink[:1].expand(heads)
    if way.has("sink-times-scale"):
        chosen = chosen * inputs.scale
    if way.has("sink-taken-for-base-2"):
        chosen = chosen * LN2
    if way.has("sink-scaled-to-base-2"):
        chosen = chosen / LN2
    return chosen


def _chunks(length: int, way: Way) -> list[tuple[int, int]]:
    size = length // way.splits if way.has("chunk-rounded-down") else -(-length // way.splits)
    found = []
    for z in range(way.splits):
        low, high = min(z * size, length), min((z + 1) * size, length)
        if way.has("split-boundary-entry-lost") and z:
            low += 1
        if way.has("split-boundary-entry-twice") and 0 < low < length:
            low -= 1
        if way.has("ragged-tile-lost"):
            high = low + (high - low) // way.tile * way.tile
        found.append((low, max(low, high)))
    return found


def _one(inputs: PrefillInputs, t: int, sink: torch.Tensor | None, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Query t: fp32 rows [heads, lanes] and the log-sum-exp [heads]."""
    query = _query(inputs, t, way)
    keys, counts = _rows(inputs, _entries(inputs, t, way), way)
    parts = []
    for low, high in _chunks(len(counts), way):
        state = _State(query.shape, inputs.kv.dtype, way)
        starts = range(low, high, way.tile)
        for start in reversed(starts) if way.backwards else starts:
            tile = slice(start, min(start + way.tile, high))
            state.add(query, keys[tile], counts[tile], _scale(inputs, way))
        parts.append((state.top, state.total, _narrow(state.values, getattr(torch, way.partial))))
    return _merged(parts, sink, way, inputs)


class _State:
    """The running maximum, sum and weighted values of one split."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, way: Way) -> None:
        self.dtype = dtype
        self.way = way
        self.lowest = -math.inf if way.has("neg-inf-running-max") else NEVER
        self.top = torch.full(shape[:1], 0.0 if way.has("maximum-starts-at-0") else self.lowest)
        self.total = torch.zeros(shape[0])
        self.values = torch.zeros(shape)

    def add(self, query: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, scale: float) -> None:
        """One tile of rows."""
        way = self.way
        # Products in fp64, rounded once: a row's score does not depend on where it stands or on its neighbours.
        score = (query.double() @ keys.double().T).float() * scale
        if way.has("scores-in-float16"):
            score = score.half().float()
        if way.has("rows-far-below-the-maximum-dropped"):
            counts = counts & (score >= score.amax(1, keepdim=True) - 4).any(0)
        score = torch.where(counts[None, :], score, self.lowest)
        top = torch.maximum(self.top, score.amax(1))
        if way.base2:
            factor = torch.tensor(1 / LN2, dtype=torch.float32)
            shrink, p = torch.exp2((self.top - top) * factor), torch.exp2((score - top[:, None]) * factor)
        else:
            shrink, p = torch.exp(self.top - top), torch.exp(score - top[:, None])
        if way.has("rescale-forgotten"):
            shrink = torch.ones_like(shrink)
        absent = torch.exp(-top.clamp(min=-80))[:, None] if way.has("invalid-weigh-exp-of-minus-max") else 0.0
        p = torch.where(counts[None, :], p, absent)
        narrow = self._probability(p)
        self.total = self.total * shrink + _sum(narrow if way.has("sum-of-rounded-probabilities") else p, 1)
        self.values = self.values * shrink[:, None] + (narrow.double() @ keys.double()).float()
        if way.has("accumulated-in-the-rows-type"):
            self.values = _narrow(self.values, self.dtype)
        self.top = top

    def _probability(self, p: torch.Tensor) -> torch.Tensor:
        form = self.dtype if self.way.probability == "same" else getattr(torch, self.way.probability)
        return _truncated(p, form) if self.way.has("probability-truncated") else _narrow(p, form)


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _merged(
    parts: list[_Part], sink: torch.Tensor | None, way: Way, inputs: PrefillInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and log-sum-exp from the maxima, sums and values of the splits."""
    if way.has("last-split-lost"):
        parts = parts[:-1]
    if way.has("padded-split-repeats-the-last"):
        parts = [*parts, parts[-1]]
    if way.has("read-unwritten-partial"):
        unwritten = tuple(torch.full_like(part, math.nan) for part in parts[0])
        parts = [*parts, (unwritten[0], unwritten[1], unwritten[2])]
    maxima, sums, values = (torch.stack(part) for part in zip(*parts, strict=True))
    if way.has("partial-maximum-in-base-2"):
        maxima = torch.where(maxima > NEVER, maxima / LN2, maxima)
    top = maxima.amax(0)
    peak = top if sink is None else torch.maximum(top, sink)
    weight = torch.exp(maxima - peak)
    if way.has("splits-weighted-equally"):
        weight = (sums > 0).float() * torch.exp(top - peak)
    total = _sum(weight * sums, 0)
    if way.has("empty-split-read-as-nan"):
        values = torch.where(sums[..., None] > 0, values, math.nan)
    rows = _sum(values * weight[..., None], 0)
    alone = _sum(torch.exp(maxima - top) * sums, 0)
    lse = torch.where(alone > 0, top + alone.log(), -math.inf)
    if sink is not None:
        drain = torch.exp(sink - peak) * (way.splits if way.has("sink-once-per-split") else 1)
        total = total + drain
        if way.has("sink-has-a-value"):
            rows = rows + drain[:, None]
    if way.has("denominator-in-the-rows-type"):
        total = _narrow(total, inputs.kv.dtype)
    if way.has("log-sum-exp-in-base-2"):
        lse = lse / LN2
    if way.has("empty-row-divides-by-0", "neg-inf-running-max"):
        return rows / total[:, None], lse
    return torch.where(total[:, None] != 0, rows / total[:, None], 0.0), lse


def _rearranged(rows: torch.Tensor, inputs: PrefillInputs, way: Way) -> torch.Tensor:
    heads = rows.shape[1]
    whole = heads // HEADS_PER_PROGRAM * HEADS_PER_PROGRAM
    if way.has("ragged-head-tile-left-out"):
        rows[:, whole:] = math.nan
    if way.has("heads-folded-to-8"):
        rows = rows[:, torch.arange(heads) % 8]
    if way.has("head-pairs-swapped"):
        order = torch.arange(heads)
        order[: heads // 2 * 2] ^= 1
        rows = rows[:, order]
    if way.has("heads-reversed"):
        rows = rows.flip(1)
    if way.has("rows-reversed"):
        rows = rows.flip(0)
    if way.has("value-without-rope-lanes"):
        rows[..., inputs.nope_lanes :] = 0.0
    return rows


_RIGHT = Way()


def _bare(inputs: PrefillInputs, way: Way) -> PrefillOutputs:
    """The answer as most implementations give it, without a log-sum-exp: a fault must show in what everybody returns."""
    return dataclasses.replace(compute(inputs, way), lse=None)


# A denominator of rounded probabilities belongs here: numerator and denominator then carry the same roundings, so only the
# log-sum-exp is biased.
_SEEN_IN_LSE = ("log-sum-exp-in-base-2", "sum-of-rounded-probabilities")
_When = Callable[[PrefillInputs], bool]


def _mutant(name: str, pitfall: str, when: _When | None = None, **ways: object) -> Mutant:
    way = dataclasses.replace(_RIGHT, faults=frozenset({name}), **ways)  # type: ignore[arg-type]

    def answer(inputs: PrefillInputs) -> PrefillOutputs | None:
        if when is not None and not when(inputs):
            return None
        return compute(inputs, way) if name in _SEEN_IN_LSE else _bare(inputs, way)

    return Mutant(name=name, pitfall=pitfall, answer=answer)


def _sunk(inputs: PrefillInputs) -> bool:
    return inputs.sink is not None


def _ragged_form(inputs: PrefillInputs) -> bool:
    return inputs.ragged


def _dense_form(inputs: PrefillInputs) -> bool:
    return not inputs.ragged


def _far(*names: str) -> _When:
    return lambda inputs: any(is_vast(getattr(inputs, name)) for name in names)


def _not_far(inputs: PrefillInputs) -> bool:
    return not any(is_vast(tensor) for tensor in (inputs.query, inputs.kv, inputs.out))


def _half(inputs: PrefillInputs) -> bool:
    return inputs.query.dtype == torch.float16


# Reports of the faults that have been seen: vllm-project/vllm#48364 (neg-inf-running-max), #57156 (clamp-minus1-to-slot0),
# #56314 (row576-ignore-stride), #57134 (sparse-qrow-i32), flashinfer-ai/flashinfer#4541 (topk-width-fallthrough),
# ROCm/aiter#4350 (read-unwritten-partial).
MUTANTS: tuple[Mutant, ...] = (
    _mutant("first-offset-taken-for-0", "the first offset of the ragged lists were 0", _ragged_form),
    _mutant("capacity-taken-for-length", "the last list reached to the end of the index tensor", _ragged_form),
    _mutant("tail-beyond-length-attended", "a dense list were attended beyond its length", _dense_form),
    _mutant("length-beyond-the-width-reads-on", "a length beyond the width went on into the next row", _dense_form),
    _mutant("negative-length-counts-from-the-end", "a negative length counted from the end of the row", _dense_form),
    _mutant("holes-do-not-count", "a dense list without lengths kept all its valid entries", _dense_form),
    _mutant("limit-ignores-holes", "a dense list without lengths ended behind its last valid entry", _dense_form),
    _mutant("drop-last-entry", "the last entry of each list were dropped"),
    _mutant("drop-first-entry", "the first entry of each list were dropped"),
    _mutant("last-entry-twice", "the last entry of each list were used twice"),
    _mutant("duplicates-removed", "duplicates within a list were removed"),
    _mutant("topk-width-fallthrough", "a list had the width of the largest kernel that is not wider"),
    _mutant("next-querys-entries", "each query used the next one's list"),
    _mutant("queries-share-the-first-rows-entries", "all queries used the first one's list"),
    _mutant("entries-truncated-to-32-bits", "only the low 32 bits of an entry counted"),
    _mutant("upper-bound-off-by-one", "the entry one past the last row were valid"),
    _mutant("entries-clamped-to-the-last-row", "entries past the last row were clamped to it"),
    _mutant("invalid-attended-as-row-0", "invalid entries were attended as row 0"),
    _mutant("negatives-wrap", "negative entries counted from the end"),
    _mutant("clamp-minus1-to-slot0", "an invalid entry loaded row 0 and gave it weight 0"),
    _mutant("invalid-weigh-exp-of-minus-max", "invalid entries had score 0 instead of none"),
    _mutant("neg-inf-running-max", "the running maximum started at minus infinity without a guard"),
    _mutant("maximum-starts-at-0", "the running maximum started at 0"),
    _mutant("rescale-forgotten", "the running sums were not rescaled when the maximum grew"),
    _mutant("ragged-tile-lost", "a tile that is not full were left out"),
    _mutant("chunk-rounded-down", "the entries of a split were the length over the split count, rounded down", splits=4),
    _mutant("split-boundary-entry-lost", "the first entry of every split but the first were lost", splits=4),
    _mutant("split-boundary-entry-twice", "every split repeated the last entry of the one before", splits=4),
    _mutant("last-split-lost", "the merge left out the last split", splits=4),
    _mutant("padded-split-repeats-the-last", "the merge read past the split count", splits=3),
    _mutant("read-unwritten-partial", "the merge read one partial result more than was written", splits=16),
    _mutant("empty-split-read-as-nan", "the merge read the values of splits without a key", splits=16),
    _mutant("partial-maximum-in-base-2", "partial maxima were in base 2 and merged in base e", splits=4),
    _mutant("splits-weighted-equally", "splits were merged without their maxima", splits=4),
    _mutant("empty-row-divides-by-0", "a row without a valid entry were divided by its sum"),
    _mutant("sink-ignored", "the sink were left out", _sunk),
    _mutant("sink-times-scale", "the sink were multiplied by the softmax scale", _sunk),
    _mutant("sink-taken-for-base-2", "the sink were a base-2 logit", _sunk),
    _mutant("sink-scaled-to-base-2", "the sink were scaled to base 2 and used in base e", _sunk),
    _mutant("sink-once-per-split", "every split added the sink", _sunk, splits=4),
    _mutant("sink-has-a-value", "the sink had a value of ones", _sunk),
    _mutant("sink-of-other-heads", "the last sinks were used in place of the first", _sunk),
    _mutant("sink-of-the-first-head", "all heads had the first one's sink", _sunk),
    _mutant("scale-1-percent-high", "the softmax scale were 1 % too large"),
    _mutant("scale-1-percent-low", "the softmax scale were 1 % too small"),
    _mutant("scale-of-nope-lanes", "the softmax scale were that of the leading lanes"),
    _mutant("scale-of-rope-lanes", "the softmax scale were that of the lanes behind"),
    _mutant("scale-of-512-lanes", "the softmax scale were that of 512 lanes, whatever the width"),
    _mutant("scale-of-576-lanes", "the softmax scale were that of 576 lanes, whatever the width"),
    _mutant("scale-of-padded-lanes", "the softmax scale were that of the width rounded up to a power of two"),
    _mutant("scale-left-out", "the softmax scale were left out"),
    _mutant("scale-twice", "the softmax scale were applied twice"),
    _mutant("sum-of-rounded-probabilities", "the denominator summed the rounded probabilities"),
    _mutant("probability-truncated", "probabilities were truncated"),
    _mutant("bf16-probabilities-of-fp16-rows", "the probabilities of fp16 rows were rounded to bf16", _half,
            probability="bfloat16"),
    _mutant("scores-in-float16", "scores were rounded to fp16"),
    _mutant("rows-far-below-the-maximum-dropped", "rows 4 below a tile's maximum in every head were dropped"),
    _mutant("denominator-in-the-rows-type", "the denominator were rounded to the rows' type"),
    _mutant("accumulated-in-the-rows-type", "values were accumulated in the rows' type"),
    _mutant("output-truncated", "the output were truncated"),
    _mutant("output-by-way-of-bfloat16", "the output were rounded to bf16 on its way to fp16", _half),
    _mutant("types-confused", "bf16 rows were read as fp16, or fp16 ones as bf16"),
    _mutant("row576-ignore-stride", "rows lay 576 elements apart, whatever their stride", _not_far),
    _mutant("row-pitch-is-the-width", "rows lay as far apart as they are wide", _not_far),
    _mutant("kv-lane-stride-ignored", "the lanes of a row were neighbours", _not_far),
    _mutant("query-strides-ignored", "the query were contiguous", _not_far),
    _mutant("query-lane-stride-ignored", "the lanes of the query were neighbours", _not_far),
    _mutant("out-strides-ignored", "the output were contiguous", _not_far),
    _mutant("sparse-qrow-i32", "the query's row offset had 32 bits, and what lies there were NaN", _far("query")),
    _mutant("kv-row-i32", "the row offset had 32 bits, and what lies there were NaN", _far("kv")),
    _mutant("out-row-i32", "the output's row offset had 32 bits, so that late rows were not written", _far("out")),
    _mutant("ragged-lane-tile-lost", "lanes beyond the last multiple of 64 counted as zeros"),
    _mutant("lanes-beyond-512-ignored", "lanes beyond the 512th counted as zeros"),
    _mutant("value-without-rope-lanes", "the values had only the leading lanes"),
    _mutant("last-lanes-returned", "the last lanes were returned in place of the first"),
    _mutant("ragged-head-tile-left-out", "heads beyond the last multiple of 16 were left out"),
    _mutant("heads-folded-to-8", "all heads repeated the first eight"),
    _mutant("head-pairs-swapped", "neighbouring heads were swapped"),
    _mutant("heads-reversed", "the heads were in reverse order"),
    _mutant("rows-reversed", "the queries were in reverse order"),
    _mutant("log-sum-exp-in-base-2", "the log-sum-exp were in base 2"),
)  # fmt: skip


def _honest(name: str, precision: Precision | Callable[[PrefillInputs], Precision], **ways: object) -> Honest:
    way = dataclasses.replace(_RIGHT, **ways)  # type: ignore[arg-type]
    return Honest(name=name, precision=precision, answer=lambda inputs: compute(inputs, way))


def _as_the_rows(inputs: PrefillInputs) -> Precision:
    """Probabilities in the rows' type."""
    return Precision(probability="float16" if _half(inputs) else "bfloat16")


_FP32 = Precision(probability="float32")

HONEST: tuple[Honest, ...] = (
    Honest(name="as-asked", precision=_as_the_rows, answer=lambda inputs: _bare(inputs, _RIGHT)),
    _honest("tile-32-backwards", _as_the_rows, tile=32, backwards=True),
    _honest("five-splits-base-2", _as_the_rows, splits=5, base2=True),
    _honest("sixteen-splits", _as_the_rows, splits=16),
    _honest("bf16-probabilities", Precision(probability="bfloat16"), probability="bfloat16", tile=64),
    _honest("three-splits-base-2", _as_the_rows, splits=3, tile=32, base2=True),
    _honest("fp32-probabilities", _FP32, probability="float32"),
    _honest("fp32-probabilities-tile-1", _FP32, probability="float32", tile=1),
    _honest("fp32-probabilities-seven-splits", _FP32, probability="float32", splits=7, base2=True, backwards=True),
    _honest(
        "bf16-partials", Precision(probability="bfloat16", partial="bfloat16"), splits=4, partial="bfloat16",
    ),
)  # fmt: skip
