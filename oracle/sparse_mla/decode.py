"""What is the answer of sparse MLA decode, and how far from it may an implementation land?

For query t and head h let I be the multiset of valid slots, those entries sigma of the main list with
0 <= sigma < rows(main), and of the extra list likewise; entries outside are skipped, duplicates count. With
K_i the 512 numbers of the record (NaN lanes count as 0),

    s_i = scale * <q[t, h], K_i>
    Z   = sum_i exp(s_i) + exp(sink_h)                       (no sink: without the last term)
    o   = sum_i exp(s_i) * K_i / Z,   and 0 without a valid key

With positions, the last 64 lanes of o are rotated back at position t, pairs (a, b) of neighbouring lanes:

    a' = a cos + b sin,   b' = b cos - a sin

The MXFP8 answer quantises the rotated row in fp32 (`oracle.mxfp8`).

Source: the sparse MLA decode of vLLM's ROCm backend for DeepSeek V4 and V4.1 (`rocm_sparse_attn_decode`).

The budget. Let p_i = exp(s_i) / Z, u the unit roundoffs of the declared rounding points, z the Hoeffding factor
sqrt(2 ln(2 / 1e-12)): a sum of independent errors of mean 0 within ±b_i exceeds z * sqrt(sum b_i^2) with probability below
1e-12. Each term below is the smaller of the worst case and this.

    probability rounding    u_p * sum_i p_i |K_i|       or   z u_p sqrt(sum_i m_i (p_i K_i)^2)
    score error E           E * sqrt(V)                 or   z E sqrt(sum_i p_i^2 (K_i - o)^2)
    common score error      c * u_32 * max|s| * sqrt(V),   V = sum_i p_i (K_i - o)^2 with the sink as a key of value 0
    sums in fp32            u_32 * (z sqrt(n) + 16) * sum_i p_i |K_i|
    output rounding         half an ulp at |o| + the above

E bounds a score's accumulation error, z sqrt(512) u_32 scale sum_d |q_d K_id|, over all keys that it could make count;
where E is not small its terms grow by exp(2E), up to twice the largest key. Equal scores round equally, so copies of a
slot count as one key; m_i is how many keys have a probability in the rounding cell of key i, since these may err alike.
Where the probabilities are
powers of two by construction (a single slot, a zero query) and the sum is exact, the budget is 0: bit for bit.
"""

import dataclasses
import math

import torch

from cases.precision import UNIT_ROUNDOFF, Precision
from cases.sparse_mla.decode import LANES, NOPE, DecodeInputs, DecodeOutputs
from oracle import mxfp8
from oracle.check import Check, bounded, codes, exact, half_ulp, statistic, wrong_form
from oracle.formats import numbers
from oracle.sparse_mla.call import listed, rotate_back, rows_of, segments, turned, valid
from oracle.sparse_mla.decode_faults import HONEST, MUTANTS
from oracle.sparse_mla.decode_laws import LAWS

__all__ = ["HONEST", "LAWS", "MUTANTS", "budget", "judge", "reference"]

U32 = 2.0**-24
FALSE_ALARM = 1e-12
HOEFFDING = math.sqrt(2 * math.log(2 / FALSE_ALARM))
# The largest and the smallest distance at which a sum of the lanes of one-byte codes is still exact in fp32.
_GRAIN = 2.0**-9
_EXACT_SUM = _GRAIN * 2.0**24
# Subnormal fp32 numbers may be flushed at the operands and at the result.
_NORMAL = 2.0**-126
_FLUSHED = 4 * _NORMAL
# Half the smallest subnormal of the formats in which it matters.
_SMALLEST_HALF = {"float16": 2.0**-25, "float8_e4m3fn": 2.0**-10, "float8_e4m3fnuz": 2.0**-11}


@dataclasses.dataclass(frozen=True)
class Reference:
    """The answer.

    out: [queries, heads, 512] after rotation. lse: [queries, heads], natural logarithm, without the sink, -inf for a row
    without a key.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Budget:
    """What an implementation may be off by, before the output is rounded; of `out` and of `lse`.

    deviation: an upper bound on the standard deviation of the error per element, where the row's errors are many and
    independent; NaN where they are not. lean: the variance of the row's mean error along the sign of the answer, over its
    unrotated lanes in units of their deviation with the output's rounding; tilt: what systematic errors add to that mean.
    """

    out: torch.Tensor
    lse: torch.Tensor
    deviation: torch.Tensor
    lean: torch.Tensor
    tilt: torch.Tensor


def reference(inputs: DecodeInputs, dtype: torch.dtype = torch.float32) -> Reference:
    """The answer in `dtype` (float32 or float64) on the device of the inputs, a query at a time: memory stays bounded by
    one query's keys and the answer itself."""
    queries, heads, _ = inputs.query.shape
    device = inputs.query.device
    out = torch.zeros((queries, heads, LANES), dtype=dtype, device=device)
    lse = torch.full((queries, heads), -math.inf, dtype=dtype, device=device)
    sink = _sink(inputs, heads, dtype)
    for t in range(queries):
        keys = torch.cat([rows_of(part, valid(part, listed(part, t)), dtype) for part in segments(inputs)])
        if not keys.shape[0]:
            continue
        score = (inputs.query[t].to(dtype) * inputs.scale) @ keys.T
        top = score.amax(1)
        weight = score.sub_(top[:, None]).exp_()
        total = weight.sum(1)
        lse[t] = top + total.log()
        share = 1 / total
        if sink is not None:
            peak = torch.maximum(top, sink)
            share = (top - peak).exp() / (total * (top - peak).exp() + (sink - peak).exp())
        torch.mm(weight, keys, out=out[t])
        out[t] *= share[:, None]
    cos_sin = turned(inputs)
    return Reference(out if cos_sin is None else rotate_back(out, cos_sin), lse)


def _sink(inputs: DecodeInputs, heads: int, dtype: torch.dtype) -> torch.Tensor | None:
    if inputs.sink is None:
        return None
    if inputs.sink.shape[0] < heads:
        raise ValueError(f"sink has {inputs.sink.shape[0]} elements: should be at least {heads}, one a head")
    return inputs.sink[:heads].to(dtype)


def budget(inputs: DecodeInputs, precision: Precision) -> tuple[Reference, Budget]:
    """The answer in float64 and the budget of an implementation with these rounding points."""
    dtype = torch.float64
    queries, heads, _ = inputs.query.shape
    device = inputs.query.device
    shape = (queries, heads, LANES)
    out, allowed = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    deviation = torch.full(shape, math.nan, dtype=dtype, device=device)
    lse = torch.full((queries, heads), -math.inf, dtype=dtype, device=device)
    lse_allowed, lean, tilt = (torch.zeros((queries, heads), dtype=dtype, device=device) for _ in range(3))
    sink = _sink(inputs, heads, dtype)
    for t in range(queries):
        found = [torch.unique(valid(part, listed(part, t)), return_counts=True) for part in segments(inputs)]
        keys = torch.cat(
            [rows_of(part, slots, dtype) for part, (slots, _) in zip(segments(inputs), found, strict=True)]
        )
        if not keys.shape[0]:
            continue
        copies = torch.cat([count for _, count in found]).to(dtype)
        row = _row(inputs, inputs.query[t].to(dtype), keys, copies, sink, precision)
        out[t], allowed[t], deviation[t], lse[t], lse_allowed[t], lean[t], tilt[t] = row
    cos_sin = turned(inputs)
    if cos_sin is not None:
        # A pair's error is that of its two parts; unless it turns by a quarter, two products, a sum and the table round.
        inexact = ((cos_sin != 0) & (cos_sin.abs() != 1))[:, None, : cos_sin.shape[-1] // 2].repeat_interleave(2, -1)
        rounded = 3 * U32 * _pairs(out[..., NOPE:].abs(), cos_sin, 1) * inexact
        rounded = rounded + _FLUSHED * precision.flushes * inexact
        allowed[..., NOPE:] = _pairs(allowed[..., NOPE:], cos_sin, 1) + rounded
        deviation[..., NOPE:] = _pairs(deviation[..., NOPE:].square(), cos_sin, 2).sqrt()
        out = rotate_back(out, cos_sin)
    return Reference(out, lse), Budget(allowed, lse_allowed, deviation, lean, tilt)


def _pairs(lanes: torch.Tensor, cos_sin: torch.Tensor, power: int) -> torch.Tensor:
    """|cos|^n a + |sin|^n b and its partner |cos|^n b + |sin|^n a over the 64 rotated lanes."""
    half = cos_sin.shape[-1] // 2
    cos, sin = (part[:, None, :].to(lanes.dtype).abs() ** power for part in (cos_sin[:, :half], cos_sin[:, half:]))
    even, odd = lanes[..., 0::2], lanes[..., 1::2]
    return torch.stack([cos * even + sin * odd, cos * odd + sin * even], -1).flatten(-2)


def _row(
    inputs: DecodeInputs, query: torch.Tensor, keys: torch.Tensor, copies: torch.Tensor, sink: torch.Tensor | None,
    precision: Precision,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """One query over distinct keys: answer, budget and deviation [heads, 512]; log-sum-exp and its budget, lean and tilt
    [heads]."""
    count = keys.shape[0]
    sizes, squares = keys.abs(), keys.square()
    total_count = float(copies.sum())
    score = (query @ keys.T) * inputs.scale
    reach = (query.abs() @ sizes.T) * abs(inputs.scale)
    top, lowest = score.amax(1), score.amin(1)
    peak = top if sink is None else torch.maximum(top, sink)
    alone = (score - top[:, None]).exp() * copies
    lse = top + alone.sum(1).log()
    weight = alone * (top - peak).exp()[:, None]
    total = weight.sum(1)
    above = torch.zeros_like(top, dtype=torch.bool)
    if sink is not None:
        total = total + (sink - peak).exp()
        above = sink > top
    p = weight / total[:, None]
    out, size, square = p @ keys, p @ sizes, p @ squares
    spread = (square - out.square()).clamp(min=0)
    p2 = p.square()
    centred = (p2 @ squares - 2 * out * (p2 @ keys) + out.square() * p2.sum(1, keepdim=True)).clamp(min=0)

    # Equal scores: the probabilities are the same power of two, or share one rounding when the sink sets the maximum.
    level = top == lowest
    u_p = UNIT_ROUNDOFF[precision.probability]
    worst = u_p * size
    # Keys whose probabilities share a rounding cell may err alike: a key weighs as many times as its cell has keys.
    cell = torch.floor((score - top[:, None]) / (2 * max(u_p, U32))).clamp(min=-(2.0**40))
    crowd = _crowd(cell)
    crowded = p2 * crowd
    norm = crowded @ squares
    rounding = torch.minimum(worst, HOEFFDING * u_p * norm.sqrt())
    # Below the normal numbers of a narrow format an error is absolute.
    share = (top - peak).exp() / total
    rounding = rounding + _SMALLEST_HALF.get(precision.probability, 0.0) * share[:, None] * (copies @ sizes)
    u_q = UNIT_ROUNDOFF[precision.query]
    per_score = HOEFFDING * math.sqrt(LANES) * UNIT_ROUNDOFF[precision.score] + u_q
    errors = reach * per_score
    # A key counts if some error of the scores could make it count.
    margin = errors + errors.gather(1, score.argmax(1, keepdim=True))
    heard = (score - top[:, None]) + copies.log() + margin > math.log(2.0**-60) + (lse - top)[:, None]
    error = (errors * heard).amax(1, keepdim=True)
    shifted = above[:, None] | (error > 2.0**-10)
    rounding = torch.where(level[:, None], torch.where(shifted, u_p * out.abs(), 0.0), rounding)
    # Beyond the first order the weights move by exp(2E); however they move, the answer stays among the keys.
    scored = error * (2 * error).clamp(max=50).exp() * torch.minimum(spread.sqrt(), HOEFFDING * centred.sqrt())
    scored = torch.minimum(scored, 2 * sizes.amax(0))
    loudest = torch.where(heard, score.abs(), 0.0).amax(1, keepdim=True)
    if sink is not None:
        loudest = torch.maximum(loudest, torch.where(torch.isinf(sink), 0.0, sink.abs())[:, None])
    shared = (precision.systematic_ulps * loudest + precision.exponential_ulps) * U32 * spread.sqrt()
    u_sum = UNIT_ROUNDOFF[precision.accumulate]
    summed = u_sum * (HOEFFDING * math.sqrt(total_count) + 16) * size
    summed = summed + UNIT_ROUNDOFF[precision.partial] * size * (precision.partial != "float32")
    allowed = rounding + scored + shared + summed + _FLUSHED * precision.flushes

    alone_counts = torch.ones_like(level) if sink is None else torch.isinf(sink)
    fits = bool((sizes * copies[:, None]).sum(0).max() < _EXACT_SUM and ((keys / _GRAIN).frac() == 0).all())
    if precision.partial == precision.accumulate == "float32" and (count == 1 or fits):
        # Equal scores without a sink leave a mean. Its sum is exact, and so is its division by a power of two.
        known = (copies @ keys) / total_count
        whole = total_count == 2.0 ** round(math.log2(total_count))
        # Copies of a key score alike up to the order of summation; a bf16 probability hides that where it is small.
        apart = torch.zeros_like(error) if total_count == 1 else error
        narrow = torch.where(apart > 2.0**-10, u_p, 0.0)
        slack = (narrow + 2 * apart + (0.0 if whole else 4 * U32)) * known.abs()
        tiny = (((keys != 0) & (sizes < _NORMAL)).any(0)) | ((known != 0) & (known.abs() < _NORMAL))
        slack = slack + _FLUSHED * tiny * precision.flushes
        equal = (level & alone_counts)[:, None]
        out, allowed = torch.where(equal, known, out), torch.where(equal, slack, allowed)

    lse_allowed = error[:, 0] + precision.systematic_ulps * U32 * loudest[:, 0]
    lse_allowed = lse_allowed + U32 * (HOEFFDING * math.sqrt(total_count) + 16 + precision.exponential_ulps)
    many = ((1 / crowd).sum(1) >= 16) & ~level & (count >= 32) & (error[:, 0] < 0.25)
    # What need not be independent enters with its worst case.
    common = shared + summed + _FLUSHED * precision.flushes
    variance = u_p**2 / 3 * norm + (error / HOEFFDING).square() * centred + common.square()
    deviation = torch.where(many[:, None], variance.sqrt(), math.nan)
    # The mean error of a row along the sign of the answer is a sum over keys too: key i moves it by p_i c_i.
    step = half_ulp(out.abs(), rounding_of(inputs, precision))
    scale = (variance + step.square() / 3).sqrt().clamp(min=1e-300)
    along = (out.sign() / scale)[:, :NOPE] @ keys[:, :NOPE].T / NOPE
    lean = (u_p**2 / 3 + (error[:, 0] / HOEFFDING).square()) * (crowded * along.square()).sum(1)
    lean = lean + (step / scale)[:, :NOPE].square().mean(1) / 3 / NOPE
    tilt = (common / scale)[:, :NOPE].mean(1)
    return out, allowed, deviation, lse, lse_allowed, lean, tilt


def _crowd(cell: torch.Tensor) -> torch.Tensor:
    """For every key of every head [heads, n], how many keys share its cell."""
    order = cell.argsort(1)
    sorted_cells = cell.gather(1, order)
    fresh = torch.ones_like(sorted_cells, dtype=torch.long)
    fresh[:, 1:] = (sorted_cells[:, 1:] != sorted_cells[:, :-1]).long()
    number = fresh.cumsum(1) - 1
    counts = torch.zeros_like(number).scatter_add_(1, number, torch.ones_like(number))
    crowd = torch.empty_like(cell)
    return crowd.scatter_(1, order, counts.gather(1, number).to(cell.dtype))


def rounding_of(inputs: DecodeInputs, precision: Precision) -> torch.dtype:
    """The dtype of the last rounding of the answer."""
    if inputs.out is None:
        return torch.float32
    return torch.bfloat16 if precision.output == "bfloat16" else inputs.out.dtype


def judge(inputs: DecodeInputs, outputs: DecodeOutputs, precision: Precision) -> tuple[Check, ...]:
    """Every output of the call against the reference: rotated rows, the answer in the form asked for, its statistics, and
    the log-sum-exp where it is returned."""
    if not isinstance(outputs, DecodeOutputs):
        raise TypeError(f"outputs are {type(outputs).__name__}: should be DecodeOutputs")
    truth, allowed = budget(inputs, precision)
    queries = inputs.query.shape[0]
    rows = queries if inputs.positions is not None else 0
    checks = [
        exact(
            "rotated_rows", torch.tensor(outputs.rotated_rows), torch.tensor(rows),
            why="the caller rotates the other rows, so this number is exact",
        )
    ]  # fmt: skip
    if inputs.out is not None:
        checks += _judge_rows(inputs, outputs.out, truth, allowed, precision)
    else:
        checks += _judge_mxfp8(inputs, outputs, truth, allowed)
    if outputs.lse is not None:
        lowest = torch.finfo(torch.float32).min
        lse = torch.where(outputs.lse == lowest, -math.inf, outputs.lse)
        checks.append(
            bounded("lse", lse, truth.lse, allowed.lse, dtype=torch.float32, rounding=torch.float32,
                    why="natural-log sum of the exponentials without the sink, outside its budget")
        )  # fmt: skip
    return tuple(checks)


def _judge_rows(
    inputs: DecodeInputs, out: torch.Tensor | None, truth: Reference, allowed: Budget, precision: Precision
) -> list[Check]:
    assert inputs.out is not None
    dtype = inputs.out.dtype
    rounding = rounding_of(inputs, precision)
    check = bounded("out", out, truth.out, allowed.out, dtype=dtype, rounding=rounding)
    if out is None or wrong_form("out", out, inputs.out) is not None or not truth.out.numel():
        return [check]
    return [check, *_statistics(out.to(truth.out.dtype), truth.out, allowed, rounding)]


def _statistics(got: torch.Tensor, want: torch.Tensor, allowed: Budget, rounding: torch.dtype) -> list[Check]:
    """The mean square and the mean of the error over its deviation, on the rows whose errors are many and independent.

    With R such rows, the mean over rows of a row's mean square is at most 1 in expectation and varies by at most 2 / R even
    if all lanes of a row moved together; its limit is 1 + z sqrt(2 / R). The bias is the mean of the error along the sign
    of the answer over the unrotated lanes; its limit is z standard deviations of that mean and what systematic errors add.
    """
    live = ~torch.isnan(allowed.deviation).any(-1)
    count = int(live.sum())
    if not count:
        return []
    want, got = want[live], got[live]
    scale = (allowed.deviation[live].square() + half_ulp(want.abs(), rounding).square() / 3).sqrt()
    error = torch.nan_to_num((got - want) / scale, nan=math.inf)
    rms = float(error.square().mean().sqrt())
    bias = float((error * want.sign())[:, :NOPE].mean())
    limit = HOEFFDING * float(allowed.lean[live].sum().sqrt()) / count + float(allowed.tilt[live].mean())
    return [
        statistic("out", "rms", rms, math.sqrt(1 + HOEFFDING * math.sqrt(2 / count)), error.numel(),
                  why=f"the errors of {count} rows together are larger than independent roundings leave"),
        statistic("out", "bias", bias, limit, count * NOPE,
                  why=f"the errors of {count} rows lean to one side: a rounding that is not to nearest, or a wrong factor"),
    ]  # fmt: skip


def _judge_mxfp8(inputs: DecodeInputs, outputs: DecodeOutputs, truth: Reference, allowed: Budget) -> list[Check]:
    """Scale bytes between those of the smallest and the largest row within the budget, codes likewise at the scale found."""
    assert inputs.out_codes is not None and inputs.out_scales is not None
    for name, got, form in (
        ("codes", outputs.codes, inputs.out_codes), ("scales", outputs.scales, inputs.out_scales),
    ):  # fmt: skip
        wrong = wrong_form(name, got, form)
        if wrong is not None:
            return [wrong]
    assert outputs.codes is not None and outputs.scales is not None
    queries = truth.out.shape[0]
    flat, slack = truth.out.reshape(queries, -1), allowed.out.reshape(queries, -1)
    if not flat.numel():
        return [exact("scales", outputs.scales, inputs.out_scales)]
    near = (flat.abs() - slack).clamp(min=0).unflatten(-1, (-1, mxfp8.BLOCK)).amax(-1)
    far = (flat.abs() + slack).unflatten(-1, (-1, mxfp8.BLOCK)).amax(-1)
    low, high = mxfp8.scale_bytes(near).float(), mxfp8.scale_bytes(far).float()
    scales = codes(
        "scales", outputs.scales, low, high, dtype=torch.uint8,
        why="no row within the budget has this scale byte",
    )  # fmt: skip
    if not scales.passed:
        return [scales]
    ends = [
        numbers.rounded(mxfp8.scaled(end, outputs.scales), "float8_e4m3fn").float()
        for end in (flat - slack, flat + slack)
    ]
    decoded = numbers.decode(outputs.codes.view(torch.uint8), "float8_e4m3fn")
    return [scales, codes("codes", decoded, *ends, dtype=torch.float32)]
