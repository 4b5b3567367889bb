"""What is the answer of causal prefill over FP8 casts, and how far from it may an implementation land?

With q8, k8, v8 the numbers cast to OCP e4m3, clamped to 448, for row i of a request and head h, each head for itself,

    s_j = scale * <q8[i, h], k8[j, h]>   for the rows j <= i of the same request
    o   = sum_j exp(s_j) v8[j, h] / sum_j exp(s_j)

Every row sees itself, so none is empty. Numbers beyond 448 are no inputs: what a cast without a clamp makes of them depends
on who casts.

Source: the FP8 prefill of vLLM's dense ROCm MLA backend (`mla_prefill_ps_asm_fwd` and `mla_reduce_v1` of AITER). It pads
heads for its kernel and takes the real ones out again, which must not show. Budget: `oracle.sparse_mla.softmax_budget`,
with keys that carry values in lanes of their own; a FP8 probability is among what may be declared. Merging parts adds the
budget of nothing: partial results are float32.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch

from cases.dense_mla.fp8_prefill import LARGEST, Inputs, Outputs
from cases.memory import guarded_copy, is_vast, map_tensors, moved
from cases.precision import Precision
from oracle.check import Check, bounded, wrong_form
from oracle.formats import numbers
from oracle.laws import Honest, Law, Mutant
from oracle.sparse_mla.softmax_budget import Budget, row_budget, statistics

_FORMAT = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where a prefill can go wrong; the defaults are right."""

    cast: tuple[str, str, str] = (_FORMAT, _FORMAT, _FORMAT)
    beyond: int = 0
    masked: bool = True
    separate: bool = True
    factor: float = 1.0
    lanes: int | None = None
    values_of: str = "own"
    keys_of: str = "own"
    weigh: str = "softmax"
    keys_from: int = 0
    padded: str = "no"


RIGHT = Faults()


def _cast(tensor: torch.Tensor, how: str, dtype: torch.dtype) -> torch.Tensor:
    wide = tensor.to(dtype)
    if how == "none":
        return wide
    if how == "truncated":
        exponent = torch.frexp(wide.abs().clamp(min=2.0**-6))[1]
        step = torch.ldexp(torch.ones_like(wide), exponent - 4)
        return (wide / step).trunc() * step
    return numbers.rounded(wide.clamp(-LARGEST, LARGEST), how)  # type: ignore[arg-type]


def spans(inputs: Inputs) -> Iterator[tuple[int, int]]:
    """First row and the one behind the last of every request."""
    starts = inputs.query_start.tolist()
    yield from itertools.pairwise(starts)


def _attended(inputs: Inputs, dtype: torch.dtype, faults: Faults = RIGHT) -> torch.Tensor:
    """Answers [tokens, heads, value lanes], a head of a request at a time."""
    tokens, heads, width = inputs.value.shape
    query, key, value = (
        _cast(tensor, how, dtype)
        for tensor, how in zip((inputs.query, inputs.key, inputs.value), faults.cast, strict=True)
    )
    lanes = faults.lanes or query.shape[2]
    out = torch.zeros((tokens, heads, width), dtype=dtype)
    for first, last in spans(inputs) if faults.separate else [(0, tokens)]:
        row = torch.arange(last - first)
        seen = row[None, :] <= row[:, None] + faults.beyond
        if not faults.masked:
            seen = torch.ones_like(seen)
        # A row that would see nothing sees its first key.
        seen = seen & ((row >= faults.keys_from) | (row[:, None] < faults.keys_from))
        seen[:, 0] |= ~seen.any(1)
        for head in range(heads):
            whose_key = 0 if faults.keys_of == "first" else head
            whose = {"own": head, "first": 0, "next": (head + 1) % heads}[faults.values_of]
            score = query[first:last, head, :lanes] @ key[first:last, whose_key, :lanes].T
            score = (score * (inputs.scale * faults.factor)).masked_fill(~seen, -math.inf)
            weight = (score - score.amax(1, keepdim=True)).exp()
            if faults.weigh == "average":
                weight = seen.to(dtype)
            merged = weight @ value[first:last, whose]
            out[first:last, head] = merged if faults.weigh == "not_divided" else merged / weight.sum(1, keepdim=True)
    return _through_padding(out, faults.padded)


def _through_padding(out: torch.Tensor, how: str) -> torch.Tensor:
    """The heads that are taken of the answers of padded ones, when they are not those that padding put there."""
    heads = out.shape[1]
    many = -(-heads // 16) * 16
    if how == "no":
        return out
    in_turn = many % heads == 0
    source = torch.arange(many) * heads // many if in_turn else torch.arange(many) % heads
    if how == "prefix":
        return out[:, source[:heads]]
    if how == "spread":
        return out[:, source[(torch.arange(heads) * max(1, many // heads)) % many]]
    # The last heads, as if padding stood in front.
    return out[:, source[many - heads :]]


def _stored(inputs: Inputs, answers: torch.Tensor) -> Outputs:
    out = moved(inputs.out, "cpu")
    out.copy_(numbers.round_to_bfloat16(answers.flatten(1)))
    return Outputs(out)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The answer in `dtype` [tokens, heads * value lanes], not rounded; memory is bounded by one head of one request.

    Raises TypeError for a model of another type than bfloat16, which a kernel would read as bfloat16, and for starts that
    are not int32; ValueError for shapes that do not belong together, starts that do not cover the rows, and numbers beyond
    448.
    """
    _refuse(inputs)
    return Outputs(_attended(inputs, dtype).flatten(1))


def _refuse(inputs: Inputs) -> None:
    for name, tensor in (("query", inputs.query), ("key", inputs.key), ("value", inputs.value), ("out", inputs.out)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} is {tensor.dtype}: should be torch.bfloat16")
    if inputs.query_start.dtype != torch.int32:
        raise TypeError(f"query_start is {inputs.query_start.dtype}: should be torch.int32")
    tokens, heads, width = inputs.value.shape
    if inputs.query.shape != inputs.key.shape or inputs.query.shape[:2] != (tokens, heads):
        raise ValueError(
            f"query {list(inputs.query.shape)}, key {list(inputs.key.shape)}, value {list(inputs.value.shape)}: should have "
            "the same tokens and heads, and query and key the same lanes"
        )
    if inputs.out.shape != (tokens, heads * width):
        raise ValueError(f"out has shape {list(inputs.out.shape)}: should have {[tokens, heads * width]}")
    starts = inputs.query_start.tolist()
    if starts[0] != 0 or starts[-1] != tokens or sorted(starts) != starts:
        raise ValueError(f"query_start={starts}: should rise from 0 to {tokens}, counted from the first prefill token")
    for name, tensor in (("query", inputs.query), ("key", inputs.key), ("value", inputs.value)):
        if tensor.numel() and not bool((tensor.abs() <= LARGEST).all()):
            raise ValueError(f"{name} has numbers beyond {LARGEST:g}: should be within what e4m3 holds")


def budget(inputs: Inputs, precision: Precision) -> tuple[torch.Tensor, Budget]:
    """The answer in float64 [tokens, heads, value lanes] and the budget with these rounding points."""
    tokens, heads, width = inputs.value.shape
    query, key, value = (_cast(tensor, _FORMAT, torch.float64) for tensor in (inputs.query, inputs.key, inputs.value))
    out = torch.zeros((tokens, heads, width), dtype=torch.float64)
    allowed, deviation = torch.zeros_like(out), torch.full_like(out, math.nan)
    lse, lean, tilt = (torch.zeros((tokens, heads), dtype=torch.float64) for _ in range(3))
    for first, last in spans(inputs):
        for head in range(heads):
            # Values in front, where the answer is taken from; the query has zeros there.
            rows = torch.cat((value[first:last, head], key[first:last, head]), dim=1)
            alike, number = torch.unique(rows, dim=0, return_inverse=True)
            for row in range(last - first):
                counts = torch.bincount(number[: row + 1], minlength=len(alike))
                distinct, copies = alike[counts > 0], counts[counts > 0]
                asked = torch.cat((torch.zeros(width, dtype=torch.float64), query[first + row, head]))[None]
                found = row_budget(
                    asked, distinct, copies.double(), None, scale=inputs.scale, precision=precision, output=torch.bfloat16,
                    plain=width,
                )  # fmt: skip
                place = (first + row, head)
                out[place], allowed[place] = found.out[0, :width], found.allowed[0, :width]
                deviation[place] = found.deviation[0, :width]
                lean[place], tilt[place] = found.lean[0], found.tilt[0]
    return out, Budget(allowed, lse, deviation, lean, tilt)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Every element within the budget, and the statistics over rows of many keys."""
    wrong = wrong_form("out", outputs.out, inputs.out)
    if wrong is not None:
        return (wrong,)
    truth, allowed = budget(inputs, precision)
    got = outputs.out.unflatten(1, truth.shape[1:]).to(truth.device)
    return (
        bounded("out", got, truth, allowed.out, dtype=torch.bfloat16, rounding=torch.bfloat16),
        *statistics(got.double(), truth, allowed, torch.bfloat16, truth.shape[2]),
    )


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(map_tensors(inputs, lambda tensor: moved(tensor, "cpu")), **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _last_tokens(inputs: Inputs) -> list[int]:
    return [last - 1 for first, last in spans(inputs) if last - first > 1]


def _future_changed(inputs: Inputs) -> Inputs | None:
    """Other keys and values of the last token of every request."""
    if not _last_tokens(inputs):
        return None
    fresh = _edited(inputs)
    for token in _last_tokens(inputs):
        fresh.key[token] = -inputs.key[token] - 1
        fresh.value[token] = 7.0
    return fresh


def _earlier(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    """Of the last tokens of requests nothing is said."""
    del edited
    out = first.out.clone()
    out[_last_tokens(inputs)] = torch.nan
    return Outputs(out)


def _rows(inputs: Inputs, first: int, last: int, starts: list[int]) -> Inputs:
    """A call of these rows alone, whose requests start there."""
    fresh = _edited(inputs)
    rows = slice(first, last)
    return dataclasses.replace(
        fresh, query=fresh.query[rows], key=fresh.key[rows], value=fresh.value[rows],
        query_start=guarded_copy(torch.tensor(starts, dtype=torch.int32)), out=fresh.out[rows],
    )  # fmt: skip


def _first_request_only(inputs: Inputs) -> Inputs | None:
    if inputs.query_start.numel() < 3 or is_vast(inputs.value):
        return None
    count = int(inputs.query_start[1])
    return _rows(inputs, 0, count, [0, count])


def _last_request_only(inputs: Inputs) -> Inputs | None:
    if inputs.query_start.numel() < 3 or is_vast(inputs.value):
        return None
    first, last = inputs.query_start[-2:].tolist()
    return _rows(inputs, first, last, [0, last - first])


def _last_token_left_out(inputs: Inputs) -> Inputs | None:
    """The last request ends a token earlier: a prefill that another one went on with."""
    *starts, before, last = inputs.query_start.tolist()
    if last - before < 2 or is_vast(inputs.value):
        return None
    return _rows(inputs, 0, last - 1, [*starts, before, last - 1])


def _front(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    return Outputs(first.out[: edited.out.shape[0]])


def _back(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    return Outputs(first.out[-edited.out.shape[0] :])


def _heads_reversed(inputs: Inputs) -> Inputs | None:
    if inputs.query.shape[1] < 2 or is_vast(inputs.value):
        return None
    fresh = _edited(inputs)
    for name in ("query", "key", "value"):
        getattr(fresh, name).copy_(getattr(inputs, name).flip(1))
    return fresh


def _reversed_heads(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    heads = inputs.query.shape[1]
    return Outputs(first.out.unflatten(1, (heads, -1)).flip(1).flatten(1))


def _head_doubled(inputs: Inputs) -> Inputs | None:
    """The last head once more behind it, so that another number of heads is padded in another way."""
    if is_vast(inputs.value) or inputs.query.shape[1] > 12:
        return None
    grown = [torch.cat((one, one[:, -1:]), dim=1) for one in (inputs.query, inputs.key, inputs.value)]
    width = inputs.value.shape[2]
    out = torch.full((len(inputs.out), inputs.out.shape[1] + width), torch.nan, dtype=torch.bfloat16)
    return dataclasses.replace(_edited(inputs), query=grown[0], key=grown[1], value=grown[2], out=out)


def _and_again(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(torch.cat((first.out, first.out[:, -inputs.value.shape[2] :]), dim=1))


def _other_device(inputs: Inputs) -> Inputs:
    return _edited(inputs, compute_units=17)


LAWS: tuple[Law, ...] = (
    Law("F1 future changed", "a token sees nothing of those behind it", _future_changed, _earlier, "budget"),
    Law("F2 first request alone", "requests do not see each other", _first_request_only, _front, "bitwise"),
    Law("F3 heads reversed", "every head is treated alike", _heads_reversed, _reversed_heads, "bitwise"),
    Law("F4 head doubled", "another number of heads, padded in another way, changes no head", _head_doubled, _and_again,
        "bitwise", reshapes=True),
    Law("F5 another device", "a plan for another device gives the answer within the budget", _other_device, _same, "budget"),
    Law("F6 last request alone", "requests may be prefilled one by one", _last_request_only, _back, "bitwise",
        reshapes=True),
    Law("F7 last token left out", "tokens that are appended leave the earlier ones alone", _last_token_left_out, _front,
        "bitwise", reshapes=True),
)  # fmt: skip


def _mutant(name: str, pitfall: str, **faults: object) -> Mutant:
    changed = dataclasses.replace(RIGHT, **faults)  # type: ignore[arg-type]
    return Mutant(name, pitfall, lambda inputs: _stored(inputs, _attended(inputs, torch.float64, changed)))


def _answered(change: Callable[[Inputs, torch.Tensor], torch.Tensor | None]) -> Callable[[Inputs], Outputs | None]:
    def answer(inputs: Inputs) -> Outputs | None:
        found = change(inputs, _attended(inputs, torch.float64))
        return None if found is None else _stored(inputs, found)

    return answer


def _last_tile_left(inputs: Inputs, answers: torch.Tensor) -> torch.Tensor | None:
    long = [(first, last) for first, last in spans(inputs) if last - first > 256]
    for first, last in long:
        answers[first + 256 : last] = 0
    return answers if long else None


def _truncated(inputs: Inputs) -> Outputs:
    cut = _attended(inputs, torch.float64).flatten(1).float().view(torch.int32) & -65536
    out = moved(inputs.out, "cpu")
    out.copy_(cut.view(torch.float32))
    return Outputs(out)


def _wrapped(inputs: Inputs) -> Outputs | None:
    """Values whose offset passes 2^31 are read from the first row."""
    if not is_vast(inputs.value):
        return None
    lost = [token for token in range(len(inputs.value)) if token * inputs.value.stride(0) >= 1 << 31]
    value = inputs.value.clone()
    value[lost] = inputs.value[0]
    return _stored(inputs, _attended(dataclasses.replace(inputs, value=value), torch.float64))


_NARROW = "float8_e4m3fnuz"
MUTANTS: tuple[Mutant, ...] = (
    _mutant("prefix-of-heads-in-turn", "the first heads were taken where padding put copies of a head side by side",
            padded="prefix"),
    _mutant("spread-of-heads-in-blocks", "every so many-th head were taken where padding put copies behind all heads",
            padded="spread"),
    _mutant("last-heads-taken", "padding stood in front of the real heads", padded="last"),
    _mutant("next-token-seen", "a token saw the one behind it", beyond=1),
    _mutant("own-token-not-seen", "a token did not see itself", beyond=-1),
    _mutant("no-mask", "a token saw all of its request", masked=False),
    _mutant("requests-together", "a token saw the requests in front of its own", separate=False),
    _mutant("scale-of-absorbed", "scores were scaled for 576 lanes", factor=(192 / 576) ** 0.5),
    _mutant("scale-left-out-of-base-two", "scores were taken for exponents of two", factor=math.log(2)),
    _mutant("rotary-lanes-left", "the last third of the lanes did not count", lanes=32),
    _mutant("values-of-the-first-head", "all heads had the first one's values", values_of="first"),
    _mutant("values-of-the-next-head", "heads had the next one's values", values_of="next"),
    _mutant("keys-of-the-first-head", "all heads had the first one's keys", keys_of="first"),
    _mutant("plain-average", "all keys weighed alike", weigh="average"),
    _mutant("not-divided", "nobody divided by the sum of weights", weigh="not_divided"),
    _mutant("first-part-lost", "keys in front of the sixteenth did not count", keys_from=16),
    _mutant("not-cast", "nobody cast to FP8", cast=("none", "none", "none")),
    _mutant("values-not-cast", "values were not cast to FP8", cast=(_FORMAT, _FORMAT, "none")),
    _mutant("cast-by-truncation", "the cast rounded towards zero", cast=("truncated", "truncated", "truncated")),
    _mutant("cast-to-the-other-format", "the cast were to the format whose largest number is 240",
            cast=(_NARROW, _NARROW, _NARROW)),
    Mutant("last-tile-left", "rows behind the first 256 were not written", _answered(_last_tile_left)),
    Mutant("output-by-lanes", "heads of the answer stood lane by lane",
           _answered(lambda inputs, answers: answers.transpose(1, 2).reshape(answers.shape))),
    Mutant("output-by-heads", "the answer stood head by head",
           _answered(lambda inputs, answers: answers.transpose(0, 1).reshape(answers.shape))),
    Mutant("truncated", "bfloat16 were the upper half of float32", _truncated),
    Mutant("offsets-of-32-bits", "the offset of a row were a 32-bit product", _wrapped),
)  # fmt: skip


def _by_blocks(inputs: Inputs, block: int, narrow: str) -> Outputs:
    """A running maximum in float32 over blocks of keys, with probabilities rounded before they multiply values."""
    query, key, value = (_cast(tensor, _FORMAT, torch.float32) for tensor in (inputs.query, inputs.key, inputs.value))
    out = torch.zeros_like(value)
    for first, last in spans(inputs):
        for row in range(first, last):
            top = torch.full((value.shape[1],), -math.inf)
            total, merged = torch.zeros_like(top), torch.zeros_like(value[0])
            for start in range(first, row + 1, block):
                keys = slice(start, min(start + block, row + 1))
                score = torch.einsum("hl,jhl->jh", query[row], key[keys]) * inputs.scale
                higher = torch.maximum(top, score.amax(0))
                weight = (score - higher).exp()
                shrink = (top - higher).exp()
                total = total * shrink + weight.sum(0)
                used = numbers.rounded(weight, narrow)  # type: ignore[arg-type]
                merged = merged * shrink[:, None] + torch.einsum("jh,jhv->hv", used, value[keys])
                top = higher
            out[row] = merged / total[:, None]
    return _stored(inputs, out)


_EXACT = Precision(probability="exact", flushes=False, note="float64, one rounding")
HONEST: tuple[Honest, ...] = (
    Honest("exact-then-rounded", _EXACT, lambda inputs: _stored(inputs, _attended(inputs, torch.float64))),
    Honest("float32", Precision(probability="exact", note="float32"),
           lambda inputs: _stored(inputs, _attended(inputs, torch.float32))),
    Honest("blocks-of-4-in-bfloat16", Precision(probability="bfloat16", note="flash"),
           lambda inputs: _by_blocks(inputs, 4, "bfloat16")),
    Honest("blocks-of-32-in-float8", Precision(probability="float8_e4m3fn", note="flash with FP8 probabilities"),
           lambda inputs: _by_blocks(inputs, 32, "float8_e4m3fn")),
)  # fmt: skip
