"""How does an implementation merge the answers of ranks, rightly in several ways and wrongly in many more?

`compute` is a second formulation of the op, shaped like the collectives: lengths turned into empty rows, messages of bits,
factors, shares rounded where ranks round them, a sum in some order, heads handed out. With no fault it is right whatever
the order and the form of the factor: those are `HONEST`. Each fault is one name, looked at in the one place where such
code would err: those are `MUTANTS`. A fault that cannot show in a call answers None there.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import torch

from cases.dcp.combine import Inputs, Outputs
from cases.memory import storage_bytes
from cases.precision import Precision
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Mutant

LN2 = math.log(2.0)
_LIMIT = 1 << 31
_HEADS_PER_PROGRAM = 4
# The heads that the kernels of one library need to return a log-sum-exp.
_FEWEST_HEADS = 16


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of computing: the order of the sum, where it is rounded, the form of the factor, which faults.

    order: of the ranks in the sum; `ring` another first rank for every head, `pairs` a tree. collective: the sum of shares
    is rounded after every addition, or (`float32`) once. normalised: weights divided by their sum, not powers of a
    difference. by_product: powers of e by way of powers of 2, and the other way round.
    """

    order: Literal["forward", "backward", "ring", "pairs"] = "forward"
    collective: Literal["same", "float32"] = "same"
    normalised: bool = False
    by_product: bool = False
    faults: frozenset[str] = frozenset()

    def has(self, *faults: str) -> bool:
        """Whether one of the faults is committed."""
        return any(fault in self.faults for fault in faults)


def _narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values rounded to nearest even to a dtype, in fp32."""
    return (round_to_bfloat16(values) if dtype == torch.bfloat16 else values.to(dtype)).float()


def _truncated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values with the bits dropped that bf16 or fp16 have not, in fp32."""
    mask = {torch.bfloat16: -65536, torch.float16: -8192, torch.float32: -1}[dtype]
    return (values.contiguous().view(torch.int32) & mask).view(torch.float32)


def _from_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape read as if it were contiguous from its first element on."""
    size = tensor.element_size()
    flat = storage_bytes(tensor)[tensor.storage_offset() * size :]
    flat = flat[: flat.numel() // size * size].view(tensor.dtype)
    return flat[torch.arange(tensor.numel()).clamp(max=flat.numel() - 1)].view(tensor.shape)


def _answers(inputs: Inputs, way: Way) -> torch.Tensor:
    """Every rank's answer as the way reads it, in the dtype of the call."""
    outs = inputs.outs
    if way.has("answer-strides-ignored"):
        return torch.stack([_from_storage(own) for own in outs])
    if way.has("lane-stride-ignored"):
        lanes = torch.arange(outs.shape[-1]) // max(1, outs.stride(-1))
        return outs[..., lanes]
    if way.has("row-offsets-of-32-bits"):
        late = torch.arange(outs.shape[1]) * outs.stride(1) >= _LIMIT
        return outs.masked_fill(late[:, None, None], math.nan)
    return outs.contiguous()


def _empty_rows(inputs: Inputs, way: Way) -> torch.Tensor | None:
    """bool [world, rows]: where the lengths say that a rank had no key; None without lengths."""
    lengths, starts = inputs.local_lengths, inputs.query_start
    if lengths is None or starts is None or way.has("lengths-ignored"):
        return None
    rows, requests = inputs.outs.shape[1], lengths.shape[1]
    row = torch.arange(rows)
    if not requests:
        return torch.full((inputs.world, rows), not way.has("no-requests-empty-nothing"))
    if way.has("lengths-of-all-ranks"):
        lengths = lengths.sum(0, keepdim=True).expand_as(lengths)
    if way.has("lengths-of-the-next-rank"):
        lengths = lengths.roll(-1, 0)
    if way.has("row-number-taken-for-the-request"):
        request = row
    elif way.has("boundary-row-is-the-request-before"):
        request = (starts[1:, None] < row).sum(0)
    else:
        request = (starts[1:, None] <= row).sum(0)
    empty = lengths[:, request.clamp(max=requests - 1)] == 0
    if way.has("empty-is-a-negative-length"):
        empty = torch.zeros_like(empty)
    padding = row >= starts[-1]
    return empty & ~padding if way.has("padding-rows-not-empty") else empty | padding


def _halves(lses: torch.Tensor, dtype: torch.dtype, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """The low and the high half of fp32 numbers, as integers 0 to 65535."""
    bits = lses.view(torch.int32).long()
    low, high = bits & 0xFFFF, (bits >> 16) & 0xFFFF
    if way.has("halves-swapped"):
        return high, low
    if way.has("low-half-lost"):
        low = torch.zeros_like(low)
    if way.has("nan-halves-made-canonical"):
        infinity = 0x7F80 if dtype == torch.bfloat16 else 0x7C00
        canonical = 0x7FC0 if dtype == torch.bfloat16 else 0x7E00
        low, high = (torch.where((half & 0x7FFF) > infinity, canonical, half) for half in (low, high))
    return low, high


def _messages(outs: torch.Tensor, lses: torch.Tensor, inputs: Inputs, way: Way) -> torch.Tensor:
    """The bits that every rank packs, [world, rows, heads, lanes and log-sum-exp], in integers of the dtype's width."""
    dtype = outs.dtype
    if dtype == torch.float32:
        return torch.cat([outs.view(torch.int32), lses.view(torch.int32)[..., None]], -1)
    if way.has("log-sum-exp-cast-to-the-dtype"):
        cast = lses.to(dtype).view(torch.int16)[..., None]
        return torch.cat([outs.view(torch.int16), cast, cast], -1)
    halves = torch.stack(_halves(lses, dtype, way), -1)
    return torch.cat([outs.view(torch.int16), (((halves + 0x8000) & 0xFFFF) - 0x8000).to(torch.int16)], -1)


def _unpacked(messages: torch.Tensor, dtype: torch.dtype, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    lanes = messages.shape[-1] - (1 if dtype == torch.float32 else 2)
    outs = messages[..., :lanes].contiguous().view(dtype)
    if dtype == torch.float32:
        return outs, messages[..., -1].contiguous().view(torch.float32)
    if way.has("log-sum-exp-cast-to-the-dtype"):
        return outs, messages[..., lanes].contiguous().view(dtype).float()
    halves = messages[..., lanes:].long() & 0xFFFF
    bits = halves[..., 0] | (halves[..., 1] << 16)
    return outs, (((bits + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).to(torch.int32).view(torch.float32)


def _sanitised(lses: torch.Tensor, way: Way) -> torch.Tensor:
    nothing = -math.inf
    if way.has("empty-weighs-as-log-sum-exp-0"):
        nothing = 0.0
    if way.has("lowest-number-for-minus-infinity"):
        nothing = torch.finfo(torch.float32).min
    lses = torch.where(torch.isneginf(lses), nothing, lses)
    if not way.has("plus-infinity-kept"):
        lses = torch.where(torch.isposinf(lses), nothing, lses)
    if not way.has("nan-kept"):
        lses = torch.where(torch.isnan(lses), nothing, lses)
    return lses


def _power(exponent: torch.Tensor, natural: bool, way: Way) -> torch.Tensor:
    if way.has("base-confused"):
        natural = not natural
    if way.has("base-always-e"):
        natural = True
    if way.has("base-always-2"):
        natural = False
    if way.by_product:
        return torch.exp2(exponent * (1 / LN2)) if natural else torch.exp(exponent * LN2)
    return torch.exp(exponent) if natural else torch.exp2(exponent)


def _logarithm(value: torch.Tensor, natural: bool, way: Way) -> torch.Tensor:
    if way.has("base-confused"):
        natural = not natural
    if way.has("base-always-e"):
        natural = True
    if way.has("base-always-2"):
        natural = False
    return torch.log(value) if natural else torch.log2(value)


def _factors(lses: torch.Tensor, inputs: Inputs, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of every rank's answer, [world, rows, heads], and the log-sum-exp of all, in fp32."""
    natural = inputs.base == "natural"
    if way.has("first-rank-left-out"):
        lses = torch.cat([torch.full_like(lses[:1], -math.inf), lses[1:]])
    if way.has("last-rank-left-out"):
        lses = torch.cat([lses[:-1], torch.full_like(lses[:1], -math.inf)])
    if way.has("ranks-cut-to-a-power-of-two"):
        kept = 1 << (inputs.world.bit_length() - 1)
        lses = torch.cat([lses[:kept], torch.full_like(lses[kept:], -math.inf)])
    top = lses.amax(0)
    if not way.has("maximum-of-nothing-kept"):
        top = torch.where(torch.isneginf(top), 0.0, top)
    if way.has("maximum-not-subtracted"):
        top = torch.zeros_like(top)
    weights = _power(lses - top, natural, way)
    if way.has("all-ranks-weigh-the-same"):
        weights = (weights > 0).float()
    total = weights.sum(0)
    lse = top + _logarithm(total, natural, way)
    if way.has("log-sum-exp-of-the-largest"):
        return weights / total.clamp(min=1e-30), top
    if way.normalised:
        factors = weights / torch.where(total > 0, total, 1.0)
    elif way.has("not-normalised"):
        factors = weights
    else:
        # Nothing less nothing is no number, and no weight.
        factors = torch.where(torch.isneginf(lses), 0.0, _power(lses - lse, natural, way))
    if way.has("sum-of-nothing-divides"):
        factors = weights / total
    if way.has("small-factors-dropped"):
        factors = torch.where(factors < 1e-6, 0.0, factors)
    if way.has("factor-of-the-next-rank"):
        factors = factors.roll(-1, 0)
    if way.has("factor-of-the-first-rank"):
        factors = factors[:1].expand_as(factors)
    if way.has("factor-of-the-first-head"):
        factors = factors[..., :1].expand_as(factors)
    if way.has("factor-in-the-dtype"):
        factors = _narrow(factors, inputs.outs.dtype)
    if way.has("log-sum-exp-of-this-rank"):
        lse = lses[0]
    if way.has("log-sum-exp-in-the-other-base"):
        lse = lse / LN2 if natural else lse * LN2
    if way.has("nothing-is-plus-infinity"):
        lse = torch.where(torch.isneginf(lse), math.inf, lse)
    if way.has("log-sum-exp-in-the-dtype"):
        lse = _narrow(lse, inputs.outs.dtype)
    return factors, lse


def _shares(outs: torch.Tensor, factors: torch.Tensor, way: Way) -> torch.Tensor:
    """What every rank adds, fp32."""
    values = outs.float()
    if way.has("nan-taken-for-0"):
        values = torch.nan_to_num(values, nan=0.0)
    shares = values * factors[..., None]
    if way.has("weight-0-multiplied"):
        return shares
    return torch.where(factors[..., None] == 0, 0.0, shares)


def _summed(shares: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor], way: Way) -> torch.Tensor:
    """The sum over the first dimension, rounded after every addition."""
    world = shares.shape[0]
    if way.order == "pairs":
        parts: list[torch.Tensor] = list(shares)
        while len(parts) > 1:
            pairs = [torch.stack(parts[i : i + 2]).sum(0) for i in range(0, len(parts), 2)]
            parts = [rounded(pair) for pair in pairs]
        return parts[0]
    first = torch.zeros(shares.shape[2], dtype=torch.long)
    if way.order == "ring":
        first = torch.arange(shares.shape[2])
    step = -1 if way.order == "backward" else 1
    head = torch.arange(shares.shape[2])
    total = torch.zeros(shares.shape[1:])
    for i in range(world):
        total = rounded(total + shares[(first + step * i) % world, :, head].movedim(0, 1))
    return total


def compute(inputs: Inputs, way: Way) -> Outputs:
    """The outputs of the call, computed this way."""
    dtype = inputs.outs.dtype
    if inputs.world == 1:
        return Outputs(inputs.outs.clone(), inputs.lses.clone())
    outs = _answers(inputs, way)
    lses = inputs.lses.contiguous()
    if way.has("log-sum-exp-strides-ignored"):
        lses = torch.stack([_from_storage(own) for own in inputs.lses])
    empty = _empty_rows(inputs, way)
    if empty is not None:
        nothing = torch.tensor(-math.inf).view(torch.int32)
        lses = torch.where(empty[..., None], nothing, lses.view(torch.int32)).view(torch.float32)
    sent = None
    if inputs.mode == "all_to_all":
        packed = _messages(outs, lses, inputs, way)
        sent = packed.unflatten(2, (inputs.world, -1)).movedim(2, 1)
        outs, lses = _unpacked(packed, dtype, way)
    factors, lse = _factors(_sanitised(lses, way), inputs, way)
    shares = _shares(outs, factors, way)
    if inputs.mode == "all_to_all":
        one_by_one = way.has("summed-in-the-dtype")
        out = _summed(shares, (lambda total: _narrow(total, dtype)) if one_by_one else (lambda total: total), way)
    else:
        shares = _truncated(shares, dtype) if way.has("shares-truncated") else _narrow(shares, dtype)
        in_steps = way.collective == "same"
        out = _summed(shares, (lambda total: _narrow(total, dtype)) if in_steps else (lambda total: total), way)
    if way.has("sum-taken-twice"):
        out = out * 2
    if way.has("last-rank-added-twice"):
        out = out + shares[-1]
    if way.has("mean-of-the-shares"):
        out = out / inputs.world
    out = _truncated(out, dtype) if way.has("answer-truncated") else _narrow(out, dtype)
    if way.has("last-heads-left-out"):
        out[:, out.shape[1] // _HEADS_PER_PROGRAM * _HEADS_PER_PROGRAM :] = math.nan
    held = _handed_out(out.to(dtype), inputs, way)
    if inputs.mode == "all_gather_all_reduce" and way.has("sum-on-the-first-rank-only"):
        held = torch.cat([held[:1], shares[1:].to(dtype)])
    own_lse: torch.Tensor | None = _handed_out(lse, inputs, way)
    if way.has("no-log-sum-exp-below-16-heads") and lse.shape[1] < _FEWEST_HEADS:
        own_lse = None
    return Outputs(held, own_lse, sent)


def _handed_out(merged: torch.Tensor, inputs: Inputs, way: Way) -> torch.Tensor:
    """What every rank holds of what stands here for all heads, [world, rows, own heads, ...]."""
    world = inputs.world
    if inputs.mode == "all_gather_all_reduce":
        return merged[None].expand(world, *merged.shape).clone()
    if way.has("heads-dealt-in-turn"):
        return torch.stack([merged[:, rank::world] for rank in range(world)])
    slices: torch.Tensor = merged.unflatten(1, (world, -1)).movedim(1, 0)
    if way.has("slice-of-the-next-rank"):
        slices = slices.roll(-1, 0)
    if way.has("ranks-in-reverse"):
        slices = slices.flip(0)
    if way.has("slice-of-the-first-rank"):
        slices = slices[:1].expand_as(slices)
    return slices.contiguous()


def shared_heads(held: torch.Tensor) -> torch.Tensor:
    """Of what every rank holds for all heads, [world, rows, heads, ...], its own run of them."""
    return torch.stack([own.chunk(held.shape[0], dim=1)[rank] for rank, own in enumerate(held)])


FORWARD = Way()
_EXACT = Precision(probability="exact", exponential_ulps=2.0, systematic_ulps=0.0, flushes=False)
_When = Callable[[Inputs], bool]


def _mutant(name: str, pitfall: str, when: _When = lambda inputs: True) -> Mutant:
    way = dataclasses.replace(FORWARD, faults=frozenset({name}))

    def answer(inputs: Inputs) -> Outputs | None:
        return compute(inputs, way) if inputs.world > 1 and when(inputs) else None

    return Mutant(name, pitfall, answer)


def _lone_rank_sanitised(inputs: Inputs) -> Outputs | None:
    return Outputs(inputs.outs.clone(), _sanitised(inputs.lses.clone(), FORWARD)) if inputs.world == 1 else None


def _gathers(inputs: Inputs) -> bool:
    return inputs.mode != "all_to_all"


def _sends(inputs: Inputs) -> bool:
    return inputs.mode == "all_to_all"


def _sends_halves(inputs: Inputs) -> bool:
    return inputs.mode == "all_to_all" and inputs.outs.element_size() == 2


def _has_lengths(inputs: Inputs) -> bool:
    return inputs.local_lengths is not None


MUTANTS: tuple[Mutant, ...] = (
    _mutant("base-confused", "logarithms to one base were merged as those to the other"),
    _mutant("base-always-e", "all logarithms were natural", lambda inputs: inputs.base == "two"),
    _mutant("base-always-2", "all logarithms were to base 2", lambda inputs: inputs.base == "natural"),
    _mutant("log-sum-exp-in-the-other-base", "the log-sum-exp of all ranks were returned in the other base"),
    _mutant("plus-infinity-kept", "the +inf of an empty rank were a log-sum-exp"),
    _mutant("nan-kept", "the NaN of an empty rank were a log-sum-exp"),
    _mutant("weight-0-multiplied", "an answer of weight 0 were multiplied, not left out"),
    _mutant("empty-weighs-as-log-sum-exp-0", "an empty rank had the log-sum-exp 0"),
    _mutant("lowest-number-for-minus-infinity", "an empty rank had the lowest number for a log-sum-exp"),
    _mutant("lengths-ignored", "a rank without keys were believed its log-sum-exp", _has_lengths),
    _mutant("padding-rows-not-empty", "rows behind the last request belonged to it", _has_lengths),
    _mutant("no-requests-empty-nothing", "without requests all rows counted", _has_lengths),
    _mutant("lengths-of-all-ranks", "a rank were empty where all ranks are", _has_lengths),
    _mutant("lengths-of-the-next-rank", "a rank used the lengths of the next", _has_lengths),
    _mutant("row-number-taken-for-the-request", "every request had one row", _has_lengths),
    _mutant("boundary-row-is-the-request-before", "the first row of a request belonged to the one before", _has_lengths),
    _mutant("empty-is-a-negative-length", "only lengths below 0 meant that a rank is empty", _has_lengths),
    _mutant("maximum-of-nothing-kept", "rows empty everywhere subtracted -inf from -inf"),
    _mutant("sum-of-nothing-divides", "rows empty everywhere divided by 0"),
    _mutant("nothing-is-plus-infinity", "rows empty everywhere had the log-sum-exp +inf"),
    _mutant("maximum-not-subtracted", "powers were taken without subtracting the maximum"),
    Mutant("lone-rank-sanitised", "what one rank alone says of having no key became minus infinity", _lone_rank_sanitised),
    _mutant("small-factors-dropped", "a rank with less than a millionth of the mass counted for nothing"),
    _mutant("nan-taken-for-0", "a NaN in an answer that counts were 0"),
    _mutant("not-normalised", "weights were not divided by their sum"),
    _mutant("all-ranks-weigh-the-same", "all ranks that are not empty weighed the same"),
    _mutant("mean-of-the-shares", "the sum of the shares were divided by the number of ranks"),
    _mutant("sum-taken-twice", "the sum were taken of shares that are sums already"),
    _mutant("last-rank-added-twice", "the last rank's share were added twice"),
    _mutant("first-rank-left-out", "the first rank were left out"),
    _mutant("last-rank-left-out", "the last rank were left out"),
    _mutant("ranks-cut-to-a-power-of-two", "ranks beyond a power of two were left out"),
    _mutant("factor-of-the-next-rank", "a rank scaled its answer with the next one's factor"),
    _mutant("factor-of-the-first-rank", "all ranks scaled their answers with the first one's factor"),
    _mutant("factor-of-the-first-head", "all heads had the factors of the first"),
    _mutant("factor-in-the-dtype", "factors were rounded to the answers' dtype", _sends),
    _mutant("log-sum-exp-of-the-largest", "the log-sum-exp of all ranks were that of the largest"),
    _mutant("log-sum-exp-of-this-rank", "a rank returned its own log-sum-exp"),
    _mutant("log-sum-exp-in-the-dtype", "the log-sum-exp were rounded to the answers' dtype"),
    _mutant("no-log-sum-exp-below-16-heads", "there were no log-sum-exp below 16 heads"),
    _mutant("log-sum-exp-cast-to-the-dtype", "a message carried the log-sum-exp rounded to its dtype", _sends_halves),
    _mutant("halves-swapped", "the high half of a log-sum-exp came first", _sends_halves),
    _mutant("low-half-lost", "the low half of a log-sum-exp were 0", _sends_halves),
    _mutant("nan-halves-made-canonical", "a half that is NaN in the dtype were another NaN on arrival", _sends_halves),
    _mutant("summed-in-the-dtype", "received answers were added in their dtype", _sends),
    _mutant("answer-truncated", "the answer were cut to its dtype", _sends),
    _mutant("shares-truncated", "every rank's share were cut to the dtype", _gathers),
    _mutant("sum-on-the-first-rank-only", "only the first rank had the sum",
            lambda inputs: inputs.mode == "all_gather_all_reduce"),
    _mutant("heads-dealt-in-turn", "heads were dealt to the ranks in turn, not in runs"),
    _mutant("slice-of-the-next-rank", "every rank held the next one's heads"),
    _mutant("slice-of-the-first-rank", "every rank held the first one's heads"),
    _mutant("ranks-in-reverse", "the heads were handed out in the reverse order of the ranks"),
    _mutant("last-heads-left-out", "heads beside whole tiles were not written"),
    _mutant("answer-strides-ignored", "answers were contiguous"),
    _mutant("lane-stride-ignored", "lanes were neighbours"),
    _mutant("log-sum-exp-strides-ignored", "log-sum-exps were contiguous"),
    _mutant("row-offsets-of-32-bits", "rows beyond 2^31 elements were out of reach"),
)  # fmt: skip


def _honest(name: str, way: Way) -> Honest:
    return Honest(name, _EXACT, lambda inputs: compute(inputs, way))


HONEST: tuple[Honest, ...] = (
    _honest("forward", FORWARD),
    _honest("backward-normalised", Way(order="backward", normalised=True)),
    _honest("ring", Way(order="ring")),
    _honest("pairs", Way(order="pairs", normalised=True)),
    _honest("collective-in-float32", Way(collective="float32")),
    Honest(
        "powers-by-way-of-the-other-base", Precision(probability="exact", systematic_ulps=2.0, flushes=False),
        lambda inputs: compute(inputs, Way(by_product=True)),
    ),
)  # fmt: skip
