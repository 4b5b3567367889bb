"""How does an implementation decode over ranks, rightly in several ways and wrongly in many more?

`compute` is a second formulation of the op, shaped like what ranks do: heads gathered, local lengths, local tokens through
the table, a limit for every row, a partial answer, a merge. With no fault it is right whatever the order of the merge and
the rounding of probabilities: those are `HONEST`. Each fault is one name, looked at in the one place where such code would
err: those are `MUTANTS`; faults of the merge are those of `oracle.dcp.combine_faults`.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.dcp import combine
from cases.dcp.decode import Inputs, Outputs
from cases.dense_mla.decode_call import QUANTISED
from cases.memory import is_vast
from cases.precision import Precision
from oracle.dcp import combine_faults
from oracle.dcp.decode_call import real
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Mutant

_FEWEST_HEADS = 16
_LIMIT = 1 << 31
_OTHER = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
# What stands in memory that nobody wrote.
_UNWRITTEN = 3.0


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of computing: how probabilities are rounded, how the merge goes, which faults."""

    narrow: bool = True
    merge: combine_faults.Way = combine_faults.FORWARD
    faults: frozenset[str] = frozenset()

    def has(self, *faults: str) -> bool:
        """Whether one of the faults is committed."""
        return any(fault in self.faults for fault in faults)


def _padded(inputs: Inputs) -> int:
    """How many requests do not count."""
    return inputs.lengths.shape[0] - inputs.live


def _asked(inputs: Inputs, b: int, way: Way) -> int:
    """The request whose tokens a request is shown."""
    if way.has("last-request-answered-from-the-padding") and b == inputs.live - 1:
        return b + 1
    return b


def _place(inputs: Inputs, rank: int, way: Way) -> int:
    """The number that a rank takes for its own."""
    if way.has("place-of-the-next-rank"):
        return (rank + 1) % inputs.world
    if way.has("places-in-reverse"):
        return inputs.world - 1 - rank
    return rank


def _held(length: int, place: int, inputs: Inputs, way: Way) -> int:
    """How many tokens of a request a rank believes to hold."""
    world = inputs.world
    if way.has("lengths-rounded-up-everywhere"):
        return -(-length // world)
    if way.has("lengths-rounded-down-everywhere"):
        return length // world
    if way.has("interleaved-by-2"):
        run, rest = divmod(length, 2 * world)
        return 2 * run + min(max(rest - 2 * place, 0), 2)
    return (length + world - 1 - place) // world


def _limit(length: int, t: int, place: int, inputs: Inputs, way: Way) -> int:
    """How many of its tokens of a request a rank shows to row t of the block."""
    world, qlen = inputs.world, inputs.qlen
    held = _held(length, place, inputs, way)
    seen = length - qlen + t + 1
    if way.has("block-masked-by-local-numbers"):
        return max(0, held - qlen + t + 1)
    if way.has("block-not-seen"):
        seen = length - qlen
    if way.has("whole-block-seen"):
        seen = length
    if way.has("own-token-not-seen"):
        seen -= 1
    if way.has("next-token-seen"):
        seen = min(length, seen + 1)
    if way.has("first-rows-limit-for-all"):
        seen = length - qlen + 1
    if way.has("division-towards-0") and seen <= place:
        return min(held, int((seen - 1 - place) / world) + 1)
    if way.has("negative-limit-is-no-limit") and seen < 0:
        return held
    return min(held, _held(max(0, seen), place, inputs, way))


def _local(inputs: Inputs, rank: int, b: int, count: int, way: Way) -> torch.Tensor:
    """The first tokens of a request on a rank, [count, lanes], as real numbers in fp32."""
    blocks, page = inputs.caches.shape[1:3]
    number = torch.arange(count)
    column = number // page
    if way.has("table-column-of-the-position"):
        column = (number * inputs.world + rank) // page
    if way.has("table-of-the-first-request"):
        b = 0
    block = inputs.table[b, column.clamp(max=inputs.table.shape[1] - 1)].long().clamp(0, blocks - 1)
    offset = number % page
    if way.has("place-in-the-page-of-the-position"):
        offset = (number * inputs.world + rank) % page
    cache = inputs.caches[0 if way.has("cache-of-the-first-rank") else rank]
    stored = cache[block, offset]
    if stored.dtype in QUANTISED and way.has("cache-in-the-other-encoding"):
        stored = stored.view(_OTHER[stored.dtype])
    keys = real(inputs, stored, torch.float32)
    if way.has("block-offset-in-32-bits"):
        far = block * cache.stride(0) + offset * cache.stride(1) >= _LIMIT
        keys = keys.masked_fill(far[:, None], math.nan)
    return keys


def _partial(query: torch.Tensor, keys: torch.Tensor, inputs: Inputs, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer [heads, latent] over keys, in fp32, and the log-sum-exp."""
    if not keys.shape[0]:
        nothing = 0.0 if way.has("empty-rank-says-0") else -math.inf
        # What a merge leaves out may be anything; without a merge it is the answer.
        rest = math.nan if inputs.world > 1 else 0.0
        return torch.full((query.shape[0], inputs.latent), rest), torch.full(query.shape[:1], nothing)
    scale = inputs.scale
    if way.has("scale-of-a-latent-row"):
        scale = query.shape[1] ** -0.5
    if way.has("scale-left-out"):
        scale = 1.0
    # Products in fp64, rounded once: a score does not depend on its neighbours.
    scored = keys / inputs.cache_scale if way.has("cache-scale-left-out-of-scores") else keys
    score = (query.double() @ scored.double().T).float() * scale
    if way.has("rope-lanes-left-out"):
        latent = inputs.latent
        score = (query[:, :latent].double() @ keys[:, :latent].double().T).float() * scale
    top = score.amax(1)
    weight = torch.exp(score - top[:, None])
    total = weight.double().sum(1).float()
    values = keys[:, -inputs.latent :] if way.has("value-is-the-last-lanes") else keys[:, : inputs.latent]
    narrow = round_to_bfloat16(weight) if way.narrow else weight
    out = (narrow.double() @ values.double()).float() / total[:, None]
    if way.has("cache-scale-left-out-of-values"):
        out = out / inputs.cache_scale
    if way.has("cache-scale-twice"):
        out = out * inputs.cache_scale
    lse = top + total.log()
    if way.has("log-sum-exp-without-the-maximum"):
        lse = total.log()
    if way.has("log-sum-exp-to-base-2"):
        lse = lse / combine_faults.LN2
    if way.has("log-sum-exp-is-the-maximum"):
        lse = top
    return out, lse


def _gathered(inputs: Inputs, rank: int, way: Way) -> torch.Tensor:
    """The queries of all heads as a rank has them, [rows, heads, lanes]."""
    query = inputs.query
    if way.has("own-heads-for-all-ranks"):
        query = query[rank : rank + 1].expand_as(query)
    if way.has("heads-gathered-in-turn"):
        return query.movedim(0, 2).flatten(1, 2)
    return query.movedim(0, 1).flatten(1, 2)


def compute(inputs: Inputs, way: Way) -> Outputs:
    """The outputs of the call, computed this way."""
    world, rows, own, _ = inputs.query.shape
    requests = inputs.lengths.shape[0]
    outs = torch.zeros((world, rows, world * own, inputs.latent))
    lses = torch.full((world, rows, world * own), -math.inf)
    lengths = inputs.lengths.tolist()
    counts = torch.zeros((world, requests), dtype=torch.int32)
    for rank in range(world):
        query = _gathered(inputs, rank, way)
        place = _place(inputs, rank, way)
        for b, length in enumerate(lengths):
            counts[rank, b] = _held(length, place, inputs, way)
            shown = _asked(inputs, b, way)
            for t in range(inputs.qlen if b < inputs.live else 0):
                row = b * inputs.qlen + t
                limit = max(0, _limit(lengths[shown], t, place, inputs, way))
                keys = _local(inputs, rank, shown, limit, way)
                if way.has("block-on-every-rank") and length >= inputs.qlen:
                    keys = torch.cat([keys, _block(inputs, b, length, t, rank)])
                outs[rank, row], lses[rank, row] = _partial(query[row], keys, inputs, way)
                if not keys.shape[0] and not counts[rank, b] and world > 1:
                    # A kernel may write nothing for a request of which it has no token: lengths must say so.
                    lses[rank, row] = _UNWRITTEN
                if way.has("rest-of-the-page-multiplied") and limit % inputs.caches.shape[2]:
                    page = inputs.caches.shape[2]
                    rest = _local(inputs, rank, b, -(-limit // page) * page, way)[limit:, : inputs.latent]
                    outs[rank, row] += (0.0 * rest).sum(0)
    whole = way.has("lengths-of-all-ranks")
    counted = inputs.live - way.has("last-request-taken-for-padding")
    starts = torch.arange(requests + 1, dtype=torch.int32).clamp(max=counted) * inputs.qlen
    if way.has("padding-in-front"):
        starts = (torch.arange(requests + 1, dtype=torch.int32) - _padded(inputs)).clamp(min=0) * inputs.qlen
    call = combine.Inputs(
        outs=round_to_bfloat16(outs), lses=lses, mode=inputs.mode, base="natural",
        local_lengths=counts if not whole else counts.sum(0, keepdim=True).expand_as(counts).contiguous(),
        query_start=starts,
    )  # fmt: skip
    if way.has("not-merged"):
        merged = combine.Outputs(combine_faults.shared_heads(call.outs), combine_faults.shared_heads(lses))
    else:
        merged = combine_faults.compute(call, dataclasses.replace(way.merge, faults=way.faults))
    out, lse = merged.out, merged.lse
    if inputs.mode == "all_gather_all_reduce" and world > 1 and not way.has("not-merged"):
        out = combine_faults.shared_heads(out)
        lse = combine_faults.shared_heads(lse) if lse is not None else None
        if way.has("slice-of-the-next-rank"):
            out = out.roll(-1, 0)
    if way.has("no-log-sum-exp-below-16-heads") and world * own < _FEWEST_HEADS:
        lse = None
    return Outputs(out, lse)


def _block(inputs: Inputs, b: int, length: int, t: int, rank: int) -> torch.Tensor:
    """The block's tokens up to row t that lie on other ranks."""
    page, world = inputs.caches.shape[2], inputs.world
    position = torch.arange(length - inputs.qlen, length - inputs.qlen + t + 1)
    position = position[position % world != rank]
    block = inputs.table[b, position // (page * world)].long()
    return real(inputs, inputs.caches[position % world, block, position // world % page], torch.float32)


_RIGHT = Way()
_EXACT = Precision(probability="float32", exponential_ulps=2.0, flushes=False)
_NARROW = Precision(exponential_ulps=2.0, flushes=False)
_When = Callable[[Inputs], bool]


def _mutant(name: str, pitfall: str, when: _When = lambda inputs: True) -> Mutant:
    way = dataclasses.replace(_RIGHT, faults=frozenset({name}))
    return Mutant(name, pitfall, lambda inputs: compute(inputs, way) if when(inputs) else None)


def _shards(inputs: Inputs) -> bool:
    return inputs.world > 1


def _codes(inputs: Inputs) -> bool:
    return inputs.caches.dtype != torch.bfloat16


def _far(inputs: Inputs) -> bool:
    return is_vast(inputs.caches)


def _has_padding(inputs: Inputs) -> bool:
    return _padded(inputs) > 0 and inputs.live > 0


MUTANTS: tuple[Mutant, ...] = (
    _mutant("place-of-the-next-rank", "a rank took itself for the next one", _shards),
    _mutant("places-in-reverse", "positions were dealt from the last rank on", _shards),
    _mutant("lengths-rounded-up-everywhere", "all ranks held as many tokens as the first", _shards),
    _mutant("lengths-rounded-down-everywhere", "all ranks held as many tokens as the last", _shards),
    _mutant("interleaved-by-2", "positions were dealt two at a time", _shards),
    _mutant("block-masked-by-local-numbers", "a block's order were that of the tokens on one rank", _shards),
    _mutant("block-not-seen", "no row saw the block"),
    _mutant("whole-block-seen", "every row saw the whole block"),
    _mutant("own-token-not-seen", "a row did not see its own token"),
    _mutant("next-token-seen", "a row saw the token behind its own"),
    _mutant("first-rows-limit-for-all", "all rows of a block saw what the first one sees"),
    _mutant("division-towards-0", "positions before a rank's first token were rounded towards it"),
    _mutant("negative-limit-is-no-limit", "a row before the first token saw all"),
    _mutant("block-on-every-rank", "the block's tokens lay on every rank", _shards),
    _mutant("rest-of-the-page-multiplied", "tokens behind a row's last were multiplied by 0"),
    _mutant("table-column-of-the-position", "a block held as many positions as it has places", _shards),
    _mutant("place-in-the-page-of-the-position", "a token's place in its page were that of its position", _shards),
    _mutant("table-of-the-first-request", "all requests had the first one's blocks"),
    _mutant("cache-of-the-first-rank", "all ranks read the first one's cache", _shards),
    _mutant("heads-gathered-in-turn", "gathered heads were ordered by head, then rank", _shards),
    _mutant("own-heads-for-all-ranks", "a rank answered for others with its own queries", _shards),
    _mutant("scale-of-a-latent-row", "the scale were that of a latent row's lanes"),
    _mutant("scale-left-out", "scores were not scaled"),
    _mutant("rope-lanes-left-out", "scores were of the latent lanes only"),
    _mutant("value-is-the-last-lanes", "the value were the last lanes of a token"),
    _mutant("cache-scale-left-out-of-scores", "scores were of stored numbers", _codes),
    _mutant("cache-scale-left-out-of-values", "values were stored numbers", _codes),
    _mutant("cache-scale-twice", "values were scaled twice", _codes),
    _mutant("cache-in-the-other-encoding", "caches were decoded in the other e4m3 encoding", _codes),
    _mutant("block-offset-in-32-bits", "a token's offset had 32 bits, and what lies there were NaN", _far),
    _mutant("last-request-answered-from-the-padding", "the last request that counts saw the tokens of the one behind it",
            _has_padding),
    _mutant("last-request-taken-for-padding", "the last request that counts were one that fills a graph",
            lambda inputs: _has_padding(inputs) and _shards(inputs)),
    _mutant("padding-in-front", "the lengths of requests that fill a graph came before those that count",
            lambda inputs: _has_padding(inputs) and _shards(inputs)),
    _mutant("log-sum-exp-to-base-2", "ranks handed over logarithms to base 2", _shards),
    _mutant("log-sum-exp-without-the-maximum", "ranks handed over sums relative to their own maximum"),
    _mutant("log-sum-exp-is-the-maximum", "ranks handed over their maximum"),
    _mutant("empty-rank-says-0", "a rank that shows a row nothing had the log-sum-exp 0", _shards),
    _mutant("lengths-of-all-ranks", "a rank were empty where all ranks are", _shards),
    _mutant("not-merged", "every rank kept its own partial answer", _shards),
    _mutant("all-ranks-weigh-the-same", "all ranks weighed the same", _shards),
    _mutant("not-normalised", "weights were not divided by their sum", _shards),
    _mutant("maximum-of-nothing-kept", "rows that see nothing subtracted -inf from -inf", _shards),
    _mutant("weight-0-multiplied", "an answer of weight 0 were multiplied, not left out", _shards),
    _mutant("first-rank-left-out", "the first rank were left out", _shards),
    _mutant("last-rank-left-out", "the last rank were left out", _shards),
    _mutant("slice-of-the-next-rank", "every rank held the next one's heads", _shards),
    _mutant("no-log-sum-exp-below-16-heads", "there were no log-sum-exp below 16 heads"),
)  # fmt: skip


def _honest(name: str, precision: Precision, way: Way) -> Honest:
    return Honest(name, precision, lambda inputs: compute(inputs, way))


HONEST: tuple[Honest, ...] = (
    _honest("probabilities-in-bfloat16", _NARROW, _RIGHT),
    _honest("probabilities-in-float32", _EXACT, Way(narrow=False)),
    _honest("merged-backwards", _NARROW, Way(merge=combine_faults.Way(order="backward", normalised=True))),
    _honest("merged-in-a-ring", _EXACT, Way(narrow=False, merge=combine_faults.Way(order="ring"))),
)
