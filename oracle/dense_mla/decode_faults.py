"""How does an implementation compute dense MLA decode, rightly in many ways and wrongly in many more?

`compute` is a second formulation of the op, shaped like the kernels: a limit per row, parts, tiles, online softmax, a
merge of the parts, rounding where kernels round. With no fault it is right whatever the part count, tile, order and
rounding points: those are `HONEST`. Each fault is one name, looked at in the one place where such a kernel would err:
those are `MUTANTS`. A fault that cannot show in a call answers None there.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.dense_mla.decode_call import QUANTISED, DecodeInputs, DecodeOutputs
from cases.memory import is_vast, moved, storage_bytes
from cases.precision import Precision
from oracle.dense_mla.decode_call import listed, numbers_of, scale_of, stored
from oracle.formats import numbers
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Mutant

NEVER = torch.finfo(torch.float32).min
TILE_HEADS = 16
LN2 = math.log(2.0)
_LIMIT = 1 << 31


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of computing: how many parts (0 asks for what the call allows), which tile and order, which rounding
    points, which faults.

    probability, key, partial: formats by torch name; `key` of "bfloat16" scales a key of fp8 before it is used. averaged:
    a part is stored as its average and log-sum-exp.
    """

    parts: int = 0
    tile: int = 16
    backwards: bool = False
    base2: bool = False
    probability: str = "bfloat16"
    key: str = "exact"
    partial: str = "float32"
    averaged: bool = False
    faults: frozenset[str] = frozenset()

    def has(self, *faults: str) -> bool:
        """Whether one of the faults is committed."""
        return any(fault in self.faults for fault in faults)


def _narrow(values: torch.Tensor, form: str) -> torch.Tensor:
    """fp32 values rounded to nearest even to a format, in fp32."""
    if form in ("float8_e4m3fn", "float8_e4m3fnuz"):
        encoding: numbers.Encoding = "float8_e4m3fn" if form == "float8_e4m3fn" else "float8_e4m3fnuz"
        return numbers.rounded(values, encoding)
    return round_to_bfloat16(values).float() if form == "bfloat16" else values


def _truncated(values: torch.Tensor) -> torch.Tensor:
    """fp32 values without the bits that bf16 has not."""
    return (values.contiguous().view(torch.int32) & -65536).view(torch.float32)


def _sum(values: torch.Tensor, dim: int) -> torch.Tensor:
    """A sum rounded once, so that it does not depend on how many other sums are taken beside it."""
    return values.double().sum(dim).float()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The storage behind a tensor from its first element on, in its dtype."""
    size = tensor.element_size()
    flat = storage_bytes(tensor)[int(tensor.storage_offset()) * size :]
    return flat[: flat.numel() // size * size].view(tensor.dtype)


def _gathered(flat: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return flat[offsets.clamp(0, flat.numel() - 1)]


def _other(dtype: torch.dtype) -> torch.dtype:
    """The other e4m3 encoding."""
    return torch.float8_e4m3fnuz if dtype == torch.float8_e4m3fn else torch.float8_e4m3fn


def _slots(inputs: DecodeInputs, request: int, way: Way) -> torch.Tensor:
    """The slots of a request as the way lists them."""
    last = inputs.requests - 1
    if way.has("requests-share-the-first-list"):
        request = 0
    if way.has("next-requests-list"):
        request = min(request + 1, last)
    if way.has("batch-of-folded-heads-not-divided"):
        request = min(request * (inputs.query.shape[1] // TILE_HEADS), last)
    slots = listed(inputs, request)
    if way.has("capacity-taken-for-length") and request == last:
        slots = inputs.slots[int(inputs.kv_indptr[request]) :].long().clamp(0, inputs.capacity - 1)
    if way.has("drop-first-token"):
        slots = slots[1:]
    if way.has("drop-last-token"):
        slots = slots[:-1]
    if way.has("last-token-twice"):
        slots = torch.cat([slots, slots[-1:]])
    if way.has("token-0-of-the-page-for-all"):
        slots = slots // inputs.cache.shape[1] * inputs.cache.shape[1]
    if way.has("slots-taken-for-pages"):
        slots = (slots * inputs.cache.shape[1]).clamp(max=inputs.capacity - 1)
    if way.has("pages-in-the-order-of-memory"):
        slots = slots.sort().values
    return slots


def _keys(inputs: DecodeInputs, slots: torch.Tensor, way: Way) -> torch.Tensor:
    """The fp32 rows [n, lanes] in the slots, without their scale."""
    cache = inputs.cache
    page, lanes = cache.shape[1:]
    if way.has("page-ends-one-token-early"):
        number, place = (slots + 1) // page, slots % page
        rows = cache[number.clamp(max=cache.shape[0] - 1), place]
    elif way.has("gaps-between-pages-ignored"):
        rows = _gathered(_flat(cache), slots[:, None] * lanes + torch.arange(lanes))
    elif way.has("page-of-16-whatever-the-cache-has"):
        place = slots // 16 * cache.stride(0) + slots % 16 * cache.stride(1)
        rows = _gathered(_flat(cache), place[:, None] + torch.arange(lanes))
    else:
        rows = stored(inputs, slots)
    if rows.dtype in QUANTISED and way.has("cache-in-the-other-encoding"):
        rows = rows.view(_other(rows.dtype))
    keys = numbers_of(rows, torch.float32)
    if way.has("cache-offset-in-32-bits"):
        far = slots // page * cache.stride(0) + slots % page * cache.stride(1) >= _LIMIT
        keys = keys.masked_fill(far[:, None], math.nan)
    return keys


def _query(inputs: DecodeInputs, row: int, way: Way) -> torch.Tensor:
    heads, lanes = inputs.query.shape[1:]
    query = inputs.query[row]
    if way.has("rows-ordered-by-token"):
        b, t = divmod(row, inputs.qlen)
        query = inputs.query[t * inputs.requests + b]
    if way.has("row-0-of-a-block-for-all") and inputs.qlen & (inputs.qlen - 1):
        query = inputs.query[row // inputs.qlen * inputs.qlen]
    if way.has("query-strides-ignored"):
        query = _flat(inputs.query)[row * heads * lanes :][: heads * lanes].view(heads, lanes)
    if query.dtype in QUANTISED and way.has("query-in-the-other-encoding"):
        query = query.view(_other(query.dtype))
    values = numbers_of(query, torch.float32)
    if way.has("query-offset-in-32-bits") and row * inputs.query.stride(0) >= _LIMIT:
        values = torch.full_like(values, math.nan)
    rope = lanes - inputs.out.shape[2]
    if way.has("rope-lanes-left-out-of-the-scores"):
        values = values.clone()
        values[:, inputs.out.shape[2] :] = 0.0
    if way.has("rope-lanes-of-the-query-in-front"):
        values = values.roll(rope, 1)
    return values


def _limit(inputs: DecodeInputs, row: int, held: int, way: Way) -> int:
    """How many of the `held` tokens of its request the row sees, as the way counts."""
    qlen, world, rank = inputs.qlen, inputs.world, inputs.rank
    request, token = divmod(row, qlen)
    if way.has("whole-block-masked"):
        return max(0, held - qlen + token + 1)
    if way.has("future-of-the-block-attended"):
        return held
    if way.has("few-heads-attend-the-future") and inputs.query.shape[1] < TILE_HEADS:
        return held
    if way.has("block-taken-for-one-token-of-more-heads") and inputs.query.shape[1] * qlen in (64, 128):
        return held
    if way.has("own-block-left-out"):
        return max(0, held - qlen)
    if inputs.global_indptr is not None:
        length = int(inputs.global_indptr[request + 1] - inputs.global_indptr[request])
        if way.has("staircase-of-local-indices"):
            return max(0, held - qlen + token + 1)
        if way.has("local-length-taken-for-global"):
            length = held
        if way.has("global-lengths-of-the-next-request"):
            request = min(request + 1, inputs.requests - 1)
            length = int(inputs.global_indptr[request + 1] - inputs.global_indptr[request])
        if way.has("offset-taken-for-the-global-length"):
            length = int(inputs.global_indptr[request + 1])
        last = length - qlen + token
        first = (rank + 1) % world if way.has("next-rank") else 0 if way.has("rank-left-out") else rank
        steps = (last - first) // world
        if way.has("division-rounds-towards-zero"):
            steps = int((last - first) / world)
        if way.has("world-left-out"):
            steps = last - first
        return min(held, max(0, steps + 1))
    if not inputs.causal:
        return held
    seen = max(0, held - qlen + token + 1)
    if way.has("window-ends-one-token-late"):
        return min(held, seen + 1)
    if way.has("window-ends-one-token-early"):
        return max(0, seen - 1)
    if way.has("staircase-in-reverse"):
        return max(0, held - token)
    return seen


def _factors(inputs: DecodeInputs, way: Way) -> tuple[float, float]:
    """What scores and values are multiplied by."""
    query, cache = scale_of(inputs.query, inputs.query_scale), scale_of(inputs.cache, inputs.cache_scale)
    value = cache
    if way.has("scales-applied-to-bf16"):
        query, cache = float(inputs.query_scale), float(inputs.cache_scale)
        value = cache
    if way.has("query-scale-left-out"):
        query = 1.0
    if way.has("query-scale-twice"):
        query *= query
    if way.has("query-scale-divides"):
        query = 1 / query
    if way.has("cache-scale-left-out-of-the-scores"):
        cache = 1.0
    if way.has("cache-scale-left-out-of-the-values"):
        value = 1.0
    if way.has("cache-scale-twice-on-the-values"):
        value *= value
    if way.has("query-scale-on-the-values"):
        value = query
    wrong = {
        "scale-1-percent-high": inputs.scale * 1.01, "scale-1-percent-low": inputs.scale * 0.99,
        "scale-of-the-latent-row": inputs.query.shape[2] ** -0.5, "scale-of-576-lanes": 576**-0.5,
        "scale-of-the-value-lanes": inputs.out.shape[2] ** -0.5, "scale-left-out": 1.0, "scale-twice": inputs.scale**2,
        "log2-e-left-out": inputs.scale * LN2, "log2-e-twice": inputs.scale / LN2,
    }  # fmt: skip
    scale = next((value for fault, value in wrong.items() if way.has(fault)), inputs.scale)
    return scale * query * cache, value


def compute(inputs: DecodeInputs, way: Way) -> DecodeOutputs:
    """The outputs of the call, computed this way."""
    rows, heads, _ = inputs.query.shape
    latent = inputs.out.shape[2]
    answer, lse = torch.zeros((rows, heads, latent)), torch.full((rows, heads), -math.inf)
    for row in range(inputs.live * inputs.qlen):
        answer[row], lse[row] = _one(inputs, row, way)
    answer, lse = _rearranged(answer, lse, inputs, way)
    if way.has("output-truncated"):
        answer = _truncated(answer)
    out = round_to_bfloat16(answer) if inputs.out.dtype == torch.bfloat16 else answer
    if way.has("out-strides-ignored"):
        memory = moved(inputs.out, inputs.out.device)
        _flat(memory)[: out.numel()] = out.flatten()
        out = memory.contiguous()
    if way.has("out-offset-in-32-bits"):
        late = torch.arange(rows) * inputs.out.stride(0) >= _LIMIT
        out = out.masked_fill(late[:, None, None], math.nan)
    return DecodeOutputs(out=out, lse=lse)


def _bounds(length: int, way: Way, parts: int) -> list[tuple[int, int]]:
    """The tokens from and to which the parts go."""
    size = length // parts if way.has("part-length-rounded-down") else -(-length // parts)
    found = []
    for z in range(parts):
        low, high = min(z * size, length), min((z + 1) * size, length)
        if way.has("part-boundary-token-lost") and z:
            low += 1
        if way.has("part-boundary-token-twice") and 0 < low < length:
            low -= 1
        if way.has("ragged-tile-lost"):
            high = low + (high - low) // way.tile * way.tile
        found.append((low, max(low, high)))
    return found


def _one(inputs: DecodeInputs, row: int, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """A row: fp32 values [heads, latent] and the log-sum-exp [heads]."""
    slots = _slots(inputs, row // inputs.qlen, way)
    limit = _limit(inputs, row, len(slots), way)
    if way.has("empty-row-reads-one-token") and limit == 0:
        # A row that sees nothing reads whatever the first slot number leads to.
        slots, limit = torch.zeros(1, dtype=torch.long), 1
    if way.has("unmasked-tile-behind-the-limit"):
        # What follows the last token in its page, as far as a tile goes.
        page = inputs.cache.shape[1]
        rest = [int(slot) for slot in slots[-1:] for slot in range(slot + 1, (slot // page + 1) * page)]
        slots = torch.cat([slots, torch.tensor(rest[: -len(slots) % way.tile], dtype=torch.long)])
    if way.has("tokens-beyond-512-lost"):
        limit = min(limit, 512)
    keys = _keys(inputs, slots, way)
    factor, value_factor = _factors(inputs, way)
    if way.key == "bfloat16":
        keys = _narrow(keys * value_factor, "bfloat16")
        factor, value_factor = inputs.scale * scale_of(inputs.query, inputs.query_scale), 1.0
    query = _query(inputs, row, way)
    parts = way.parts or inputs.splits
    # The parts of a block may be cut before it is known what a row sees of them.
    cut = len(slots) if way.has("part-without-a-seen-token-is-nan", "unmasked-tile-behind-the-limit") else limit
    found = []
    for low, high in _bounds(cut, way, parts):
        state = _State(query.shape[0], inputs.out.shape[2], way)
        starts = range(low, high, way.tile)
        for start in reversed(starts) if way.backwards else starts:
            tile = slice(start, min(start + way.tile, high))
            counts = torch.arange(tile.start, tile.stop) < limit
            state.add(query, keys[tile], counts, factor)
        if way.averaged and bool((state.total > 0).all()):
            state.values = state.values / state.total[:, None]
            state.top, state.total = state.top + state.total.log(), torch.ones_like(state.total)
        found.append((state.top, state.total, _narrow(state.values, way.partial)))
        if way.has("part-without-a-seen-token-is-nan") and low < high and low >= limit:
            found[-1] = (torch.zeros_like(state.top), state.total, torch.full_like(state.values, math.nan))
    values, lse = _merged(found, way)
    values = values * value_factor
    if way.has("empty-row-not-stored") and limit == 0:
        values = torch.full_like(values, math.nan)
    if way.has("last-row-of-a-block-not-stored") and inputs.qlen > 1 and row % inputs.qlen == inputs.qlen - 1:
        values = torch.full_like(values, math.nan)
    return values, lse


class _State:
    """The running maximum, sum and weighted values of one part."""

    def __init__(self, heads: int, latent: int, way: Way) -> None:
        self.way = way
        self.top = torch.full((heads,), 0.0 if way.has("maximum-starts-at-0") else NEVER)
        self.total = torch.zeros(heads)
        self.values = torch.zeros((heads, latent))

    def add(self, query: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, factor: float) -> None:
        """One tile of rows, of which some count."""
        way = self.way
        # Products in fp64, rounded once: a row's score does not depend on where it stands or on its neighbours.
        score = (query.double() @ keys.double().T).float() * factor
        if way.has("scores-in-float16"):
            score = score.half().float()
        if way.has("tokens-far-below-the-maximum-dropped"):
            counts = counts & (score >= score.amax(1, keepdim=True) - 4).any(0)
        score = torch.where(counts[None, :], score, NEVER)
        top = torch.maximum(self.top, score.amax(1))
        if way.base2:
            unit = torch.tensor(1 / LN2, dtype=torch.float32)
            shrink, p = torch.exp2((self.top - top) * unit), torch.exp2((score - top[:, None]) * unit)
        else:
            shrink, p = torch.exp(self.top - top), torch.exp(score - top[:, None])
        if way.has("rescale-forgotten"):
            shrink = torch.ones_like(shrink)
        p = torch.where(counts[None, :], p, 0.0)
        latent = self.values.shape[1]
        values = keys[:, -latent:] if way.has("value-of-the-last-lanes") else keys[:, :latent]
        if not way.has("unmasked-tile-behind-the-limit"):
            values = torch.where(counts[:, None], values, 0.0)
        narrow = _truncated(p) if way.has("probability-truncated") else _narrow(p, way.probability)
        self.total = self.total * shrink + _sum(narrow if way.has("sum-of-rounded-probabilities") else p, 1)
        self.values = self.values * shrink[:, None] + (narrow.double() @ values.double()).float()
        if way.has("accumulated-in-bf16"):
            self.values = _narrow(self.values, "bfloat16")
        self.top = top


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _merged(parts: list[_Part], way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and log-sum-exp from the maxima, sums and values of the parts."""
    written = sum(bool((part[1] > 0).any()) for part in parts)
    if way.has("last-part-lost"):
        parts = parts[:-1]
    if way.has("parts-beyond-the-sixteenth-lost"):
        parts = parts[:16]
    if way.has("last-part-twice"):
        parts = [*parts, parts[-1]]
    if way.has("unwritten-part-read") or (way.has("lone-part-merged-with-a-second") and written == 1):
        parts = [*parts, tuple(torch.full_like(each, math.nan) for each in parts[0])]  # type: ignore[list-item]
    if way.has("lone-part-left-unmerged") and written == 1:
        parts = [tuple(torch.full_like(each, math.nan) for each in parts[0])]  # type: ignore[list-item]
    maxima, sums, values = (torch.stack(part) for part in zip(*parts, strict=True))
    if way.has("empty-part-log-sum-exp-is-infinite"):
        maxima = torch.where(sums > 0, maxima, math.inf)
    if way.has("partial-maximum-in-base-2"):
        maxima = torch.where(maxima > NEVER, maxima / LN2, maxima)
    top = maxima.amax(0)
    weight = torch.exp(maxima - top)
    if way.has("parts-weighted-equally"):
        weight = (sums > 0).float()
    if way.has("empty-part-multiplied-by-0"):
        values = torch.where(sums[..., None] > 0, values, math.nan)
    total = _sum(weight * sums, 0)
    if way.has("denominator-in-bf16"):
        total = _narrow(total, "bfloat16")
    rows = _sum(values * weight[..., None], 0)
    lse = top + total.log()
    if way.has("log-sum-exp-in-base-2"):
        lse = lse / LN2
    if way.has("log-sum-exp-without-the-maximum"):
        lse = total.log()
    if way.has("empty-row-divides-by-0"):
        return rows / total[:, None], torch.where(total > 0, lse, -math.inf)
    if way.has("empty-row-log-sum-exp-is-infinite"):
        lse = torch.where(total == 0, math.inf, lse)
    elif way.has("empty-row-log-sum-exp-is-0"):
        lse = torch.where(total == 0, 0.0, lse)
    else:
        lse = torch.where(total == 0, -math.inf, lse)
    return torch.where(total[:, None] != 0, rows / total[:, None], 0.0), lse


def _rearranged(
    rows: torch.Tensor, lse: torch.Tensor, inputs: DecodeInputs, way: Way
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = rows.shape[1]
    order = torch.arange(heads)
    if way.has("heads-folded-to-8"):
        order %= 8
    if way.has("heads-folded-to-16"):
        order %= TILE_HEADS
    if way.has("padded-heads-interleaved-and-sliced-in-front"):
        order //= TILE_HEADS // heads
    if way.has("padded-heads-tiled-and-sliced-by-stride"):
        order = order * (TILE_HEADS // heads) % heads
    if way.has("folded-heads-unfolded-by-the-other-axis"):
        order = order.view(-1, TILE_HEADS).T.flatten()
    if way.has("heads-of-the-next-rank"):
        order = order.roll(-max(1, heads // 2))
    if way.has("head-pairs-swapped"):
        order[: heads // 2 * 2] ^= 1
    if way.has("heads-reversed"):
        order = order.flip(0)
    if way.has("log-sum-exp-of-folded-heads-not-unfolded"):
        return rows, lse[:, order.view(-1, TILE_HEADS).T.flatten()]
    rows, lse = rows[:, order], lse[:, order]
    if way.has("ragged-head-tile-left-out"):
        rows[:, heads // TILE_HEADS * TILE_HEADS :] = math.nan
    if way.has("only-the-first-head-tile"):
        rows[:, TILE_HEADS:] = math.nan
    if way.has("rows-reversed"):
        live = inputs.live * inputs.qlen
        rows[:live], lse[:live] = rows[:live].flip(0), lse[:live].flip(0)
    if way.has("rows-of-a-block-reversed"):
        rows, lse = (each.unflatten(0, (-1, inputs.qlen)).flip(1).flatten(0, 1) for each in (rows, lse))
    return rows, lse


_RIGHT = Way()


def _bare(inputs: DecodeInputs, way: Way) -> DecodeOutputs:
    """The answer as most implementations give it, with a log-sum-exp only where it must be: a fault must show in what
    everybody returns."""
    answer = compute(inputs, way)
    return answer if inputs.world > 1 else dataclasses.replace(answer, lse=None)


# A denominator of rounded probabilities belongs here: numerator and denominator then carry the same roundings, so only the
# log-sum-exp is biased.
_SEEN_IN_LSE = (
    "log-sum-exp-in-base-2", "log-sum-exp-without-the-maximum", "sum-of-rounded-probabilities",
    "empty-row-log-sum-exp-is-infinite", "empty-row-log-sum-exp-is-0", "log-sum-exp-of-folded-heads-not-unfolded",
)  # fmt: skip
_When = Callable[[DecodeInputs], bool]


def _mutant(name: str, pitfall: str, when: _When | None = None, **ways: object) -> Mutant:
    way = dataclasses.replace(_RIGHT, faults=frozenset({name}), **ways)  # type: ignore[arg-type]

    def answer(inputs: DecodeInputs) -> DecodeOutputs | None:
        if when is not None and not when(inputs):
            return None
        return compute(inputs, way) if name in _SEEN_IN_LSE else _bare(inputs, way)

    return Mutant(name=name, pitfall=pitfall, answer=answer)


def _far(name: str) -> _When:
    return lambda inputs: is_vast(getattr(inputs, name))


def _not_far(inputs: DecodeInputs) -> bool:
    return not any(is_vast(tensor) for tensor in (inputs.query, inputs.cache, inputs.out))


def _heads(*counts: int) -> _When:
    return lambda inputs: inputs.query.shape[1] in counts


def _folds(inputs: DecodeInputs) -> bool:
    heads = inputs.query.shape[1]
    return heads > TILE_HEADS and heads % TILE_HEADS == 0


def _quantised(inputs: DecodeInputs) -> bool:
    return inputs.cache.dtype in QUANTISED


def _quantised_query(inputs: DecodeInputs) -> bool:
    return inputs.query.dtype in QUANTISED


def _plain(inputs: DecodeInputs) -> bool:
    return inputs.cache.dtype == torch.bfloat16


def _staircase(inputs: DecodeInputs) -> bool:
    return inputs.causal and inputs.qlen > 1


def _whole(inputs: DecodeInputs) -> bool:
    return not inputs.causal and inputs.qlen > 1


def _shard(inputs: DecodeInputs) -> bool:
    return inputs.global_indptr is not None


def _has_rope(inputs: DecodeInputs) -> bool:
    return inputs.query.shape[2] > inputs.out.shape[2]


# Reports of the faults that have been seen: vllm-project/vllm#46952 (folded-heads-unfolded-by-the-other-axis,
# batch-of-folded-heads-not-divided), ROCm/aiter#2720 (row-0-of-a-block-for-all), ROCm/aiter#5679
# (block-taken-for-one-token-of-more-heads), vllm-project/vllm#50476 (few-heads-attend-the-future), sgl-project/sglang#14936
# (only-the-first-head-tile), ROCm/aiter#4474 (cache-offset-in-32-bits), sgl-project/sglang#20389 (query-offset-in-32-bits),
# vllm-project/vllm#37054 (query-scale-on-the-values, scales-applied-to-bf16), vllm-project/vllm#40705
# (value-of-the-last-lanes), vllm-project/vllm#37442 (empty-row-not-stored), ROCm/triton#960
# (unmasked-tile-behind-the-limit).
MUTANTS: tuple[Mutant, ...] = (
    _mutant("drop-first-token", "the first token of each request were dropped"),
    _mutant("drop-last-token", "the last token of each request were dropped"),
    _mutant("last-token-twice", "the last token of each request were used twice"),
    _mutant("next-requests-list", "each request used the next one's tokens"),
    _mutant("requests-share-the-first-list", "all requests used the first one's tokens"),
    _mutant("capacity-taken-for-length", "the last request reached to the end of the slots"),
    _mutant("token-0-of-the-page-for-all", "every slot were the first of its page"),
    _mutant("slots-taken-for-pages", "slots were page numbers"),
    _mutant("pages-in-the-order-of-memory", "tokens came in the order of memory, which the limit of a row then cuts"),
    _mutant("page-ends-one-token-early", "the last token of a page belonged to the next one"),
    _mutant("page-of-16-whatever-the-cache-has", "pages had 16 tokens", _not_far),
    _mutant("gaps-between-pages-ignored", "pages followed each other without a gap", _not_far),
    _mutant("cache-offset-in-32-bits", "a token's offset had 32 bits, and what lies there were NaN", _far("cache")),
    _mutant("query-offset-in-32-bits", "a row's offset had 32 bits, and what lies there were NaN", _far("query")),
    _mutant("out-offset-in-32-bits", "an answer's offset had 32 bits, so that late rows were not written", _far("out")),
    _mutant("query-strides-ignored", "the query were contiguous", _not_far),
    _mutant("out-strides-ignored", "the output were contiguous", _not_far),
    _mutant("future-of-the-block-attended", "every row of a block saw all of its request's tokens", _staircase),
    _mutant("few-heads-attend-the-future", "rows of fewer than 16 heads saw all of their request's tokens", _staircase),
    _mutant("block-taken-for-one-token-of-more-heads", "a block were served as one token of more heads", _staircase),
    _mutant("own-block-left-out", "a row saw the tokens before its block only", _staircase),
    _mutant("whole-block-masked", "a block that is not causal were masked", _whole),
    _mutant("window-ends-one-token-late", "a row saw one token more", _staircase),
    _mutant("window-ends-one-token-early", "a row did not see itself", _staircase),
    _mutant("staircase-in-reverse", "the first row of a block saw most", _staircase),
    _mutant("staircase-of-local-indices", "a shard counted backwards from its own length", _shard),
    _mutant("local-length-taken-for-global", "a shard took its own length for the request's", _shard),
    _mutant("global-lengths-of-the-next-request", "each request had the next one's global length", _shard),
    _mutant("offset-taken-for-the-global-length", "a global offset were a length", _shard),
    _mutant("next-rank", "a shard were the next one", _shard),
    _mutant("rank-left-out", "a shard were the first one", _shard),
    _mutant("world-left-out", "a shard counted positions as its tokens", _shard),
    _mutant("division-rounds-towards-zero", "a row before a shard's first token saw it", _shard),
    _mutant("rows-ordered-by-token", "rows were ordered by token first, by request second"),
    _mutant("row-0-of-a-block-for-all", "all rows of a block whose length is no power of two were its first"),
    _mutant("rows-reversed", "the rows were in reverse order"),
    _mutant("rows-of-a-block-reversed", "the rows of each block were in reverse order"),
    _mutant("last-row-of-a-block-not-stored", "the last row of each block kept what the memory held"),
    _mutant("ragged-head-tile-left-out", "heads beyond the last multiple of 16 were left out"),
    _mutant("only-the-first-head-tile", "only the first 16 heads were computed"),
    _mutant("heads-folded-to-8", "all heads repeated the first eight"),
    _mutant("heads-folded-to-16", "all heads repeated the first sixteen"),
    _mutant("padded-heads-interleaved-and-sliced-in-front", "heads repeated for padding came back as if in a row",
            _heads(1, 2, 4, 8)),
    _mutant("padded-heads-tiled-and-sliced-by-stride", "heads padded in a row came back by a stride",
            _heads(3, 5, 6, 7)),
    _mutant("folded-heads-unfolded-by-the-other-axis", "heads folded into tiles came back transposed", _folds),
    _mutant("batch-of-folded-heads-not-divided", "the tiles of folded heads counted as requests", _folds),
    _mutant("log-sum-exp-of-folded-heads-not-unfolded", "the log-sum-exp of folded heads came back transposed", _folds),
    _mutant("heads-of-the-next-rank", "gathered heads began with the next rank's"),
    _mutant("head-pairs-swapped", "neighbouring heads were swapped"),
    _mutant("heads-reversed", "the heads were in reverse order"),
    _mutant("ragged-tile-lost", "a tile that is not full were left out"),
    _mutant("unmasked-tile-behind-the-limit", "tokens behind a row's limit were loaded and weighed with 0"),
    _mutant("part-length-rounded-down", "the length of a part were rounded down", parts=4),
    _mutant("part-boundary-token-lost", "the first token of every part but the first were lost", parts=4),
    _mutant("part-boundary-token-twice", "every part repeated the last token of the one before", parts=4),
    _mutant("part-without-a-seen-token-is-nan", "a part of which a row sees nothing were divided by 0", parts=8, tile=4),
    _mutant("last-part-lost", "the merge left out the last part", parts=4),
    _mutant("parts-beyond-the-sixteenth-lost", "the merge read 16 parts at most", parts=64),
    _mutant("tokens-beyond-512-lost", "a row's list held 512 tokens at most"),
    _mutant("last-part-twice", "the merge read past the parts", parts=3),
    _mutant("unwritten-part-read", "the merge read one part more than was written"),
    _mutant("lone-part-merged-with-a-second", "a row of one part were merged with a second", parts=1),
    _mutant("lone-part-left-unmerged", "a row of one part were left to whoever merges", parts=1),
    _mutant("empty-part-multiplied-by-0", "the merge weighed the values of parts without a token with 0", parts=16),
    _mutant("empty-part-log-sum-exp-is-infinite", "a part without a token had an infinite log-sum-exp", parts=16),
    _mutant("partial-maximum-in-base-2", "partial maxima were in base 2 and merged in base e", parts=4),
    _mutant("parts-weighted-equally", "parts were merged without their maxima", parts=4),
    _mutant("empty-row-divides-by-0", "a row that sees nothing were divided by its sum"),
    _mutant("empty-row-not-stored", "a row that sees nothing kept what the memory held"),
    _mutant("empty-row-reads-one-token", "a row that sees nothing saw slot 0"),
    _mutant("empty-row-log-sum-exp-is-infinite", "the log-sum-exp of a row that sees nothing were infinite"),
    _mutant("empty-row-log-sum-exp-is-0", "the log-sum-exp of a row that sees nothing were 0"),
    _mutant("maximum-starts-at-0", "the running maximum started at 0"),
    _mutant("rescale-forgotten", "the running sums were not rescaled when the maximum grew"),
    _mutant("query-scale-left-out", "the query's scale were left out", _quantised_query),
    _mutant("query-scale-twice", "the query's scale were applied twice", _quantised_query),
    _mutant("query-scale-divides", "scores were divided by the query's scale", _quantised_query),
    _mutant("cache-scale-left-out-of-the-scores", "the cache's scale applied to the values only", _quantised),
    _mutant("cache-scale-left-out-of-the-values", "the cache's scale applied to the scores only", _quantised),
    _mutant("cache-scale-twice-on-the-values", "the cache's scale were applied to the values twice", _quantised),
    _mutant("query-scale-on-the-values", "the values had the query's scale", _quantised_query),
    _mutant("scales-applied-to-bf16", "a cache of bf16 were scaled", _plain),
    _mutant("cache-in-the-other-encoding", "the cache were decoded in the other e4m3 encoding", _quantised),
    _mutant("query-in-the-other-encoding", "the query were decoded in the other e4m3 encoding", _quantised_query),
    _mutant("scale-1-percent-high", "the softmax scale were 1 % too large"),
    _mutant("scale-1-percent-low", "the softmax scale were 1 % too small"),
    _mutant("scale-of-the-latent-row", "the softmax scale were that of the latent row"),
    _mutant("scale-of-576-lanes", "the softmax scale were that of 576 lanes, whatever the width"),
    _mutant("scale-of-the-value-lanes", "the softmax scale were that of the value lanes"),
    _mutant("scale-left-out", "the softmax scale were left out"),
    _mutant("scale-twice", "the softmax scale were applied twice"),
    _mutant("log2-e-left-out", "scores were raised to base 2 as they are"),
    _mutant("log2-e-twice", "scores were scaled to base 2 and raised to base e"),
    _mutant("rope-lanes-left-out-of-the-scores", "the rope lanes did not score", _has_rope),
    _mutant("rope-lanes-of-the-query-in-front", "the query's rope lanes came first", _has_rope),
    _mutant("value-of-the-last-lanes", "the values were the last lanes of a token", _has_rope),
    _mutant("sum-of-rounded-probabilities", "the denominator summed the rounded probabilities"),
    _mutant("probability-truncated", "probabilities were truncated to bf16"),
    _mutant("scores-in-float16", "scores were rounded to fp16"),
    _mutant("tokens-far-below-the-maximum-dropped", "tokens 4 below a tile's maximum in every head were dropped"),
    _mutant("denominator-in-bf16", "the denominator were rounded to bf16"),
    _mutant("accumulated-in-bf16", "values were accumulated in bf16"),
    _mutant("output-truncated", "the output were truncated to bf16"),
    _mutant("log-sum-exp-in-base-2", "the log-sum-exp were in base 2"),
    _mutant("log-sum-exp-without-the-maximum", "the log-sum-exp left the maximum out"),
)  # fmt: skip


_Declared = Precision | Callable[[DecodeInputs], Precision]


def _honest(name: str, precision: _Declared, **ways: object) -> Honest:
    way = dataclasses.replace(_RIGHT, **ways)  # type: ignore[arg-type]
    return Honest(name=name, precision=precision, answer=lambda inputs: compute(inputs, way))


_BF16 = Precision(probability="bfloat16")
_FP32 = Precision(probability="float32")

HONEST: tuple[Honest, ...] = (
    Honest(name="as-asked", precision=_BF16, answer=lambda inputs: _bare(inputs, _RIGHT)),
    _honest("one-part-tile-32-backwards", _BF16, parts=1, tile=32, backwards=True),
    _honest("five-parts-base-2", _BF16, parts=5, base2=True),
    _honest("sixty-four-parts", _BF16, parts=64),
    _honest("three-parts-tile-64", _BF16, parts=3, tile=64),
    _honest("fp32-probabilities", _FP32, probability="float32", parts=1),
    _honest("fp32-probabilities-tile-1", _FP32, probability="float32", tile=1, parts=1),
    _honest("fp32-probabilities-seven-parts", _FP32, probability="float32", parts=7, base2=True, backwards=True),
    _honest("fp8-probabilities", Precision(probability="float8_e4m3fn"), probability="float8_e4m3fn", parts=1),
    _honest("fnuz-probabilities-four-parts", Precision(probability="float8_e4m3fnuz"), probability="float8_e4m3fnuz",
            parts=4, tile=32),
    _honest("keys-scaled-in-bf16", Precision(probability="bfloat16", key="bfloat16"), key="bfloat16", parts=2),
    _honest("five-parts-averaged", Precision(probability="bfloat16", averaged=True), averaged=True, parts=5),
    _honest("bf16-partials", Precision(probability="bfloat16", partial="bfloat16"), parts=4, partial="bfloat16"),
)  # fmt: skip
