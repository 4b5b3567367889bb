"""How far from softmax attention over given keys may an implementation land, whose rounding points are declared?

    s_i = scale * <q, K_i>,   Z = sum_i exp(s_i) + exp(sink),   p_i = exp(s_i) / Z,   o = sum_i p_i K_i

Let u be the unit roundoffs of the declared rounding points, z the Hoeffding factor sqrt(2 ln(2 / 1e-12)): a sum of
independent errors of mean 0 within ±b_i exceeds z * sqrt(sum b_i^2) with probability below 1e-12. Each term below is the
smaller of the worst case and this.

    probability rounding    u_p * sum_i p_i |K_i|       or   z u_p sqrt(sum_i m_i (p_i K_i)^2)
    score error E           E * sqrt(V)                 or   z E sqrt(sum_i p_i^2 (K_i - o)^2)
    common score error      c * u_32 * max|s| * sqrt(V),   V = sum_i p_i (K_i - o)^2 with the sink as a key of value 0
    sums in fp32            u_32 * (z sqrt(n) + 16) * sum_i p_i |K_i|
    key rounding            u_k * sum_i p_i |K_i|, for equal lanes of different keys round alike
    averaged splits         u_32 * (4 |lse| + 2 e + 16) * sum_i p_i |K_i|,  e the exponential's ulps
    output rounding         half an ulp at |o| + the above

E bounds a score's accumulation error over D lanes, z sqrt(D) u_32 scale sum_d |q_d K_id|, over all keys that it could
make count; where E is not small its terms grow by exp(2E), up to twice the largest key. Equal scores round equally, so
copies of a row count as one key; m_i is how many keys have a probability in the rounding cell of key i, since these may
err alike. Where the probabilities are powers of two by construction (a single row, a zero query) and the sum is exact,
the budget is 0: bit for bit.

Source: our own derivation.
"""

import dataclasses
import math
from typing import NamedTuple

import torch

from cases.precision import UNIT_ROUNDOFF, Precision
from oracle.check import Check, half_ulp, statistic

U32 = 2.0**-24
FALSE_ALARM = 1e-12
HOEFFDING = math.sqrt(2 * math.log(2 / FALSE_ALARM))
# The largest and the smallest distance at which a sum of the lanes of one-byte codes is still exact in fp32.
_GRAIN = 2.0**-9
_EXACT_SUM = _GRAIN * 2.0**24
# Subnormal fp32 numbers may be flushed at the operands and at the result.
_NORMAL = 2.0**-126
FLUSHED = 4 * _NORMAL
# Half the smallest subnormal of the formats in which it matters.
_SMALLEST_HALF = {"float16": 2.0**-25, "float8_e4m3fn": 2.0**-10, "float8_e4m3fnuz": 2.0**-11}
# What is left of a difference of squares in float64 after it cancels, with room for the roundings of its terms.
_CANCELLED = 2.0**-48
# Where a probability this close to 1 becomes 1; bf16's unless named.
_HIDDEN = {"float16": 2.0**-13}


@dataclasses.dataclass(frozen=True)
class Budget:
    """What an implementation may be off by, before the output is rounded; of `out` and of `lse`.

    deviation: an upper bound on the standard deviation of the error per element, where the row's errors are many and
    independent; NaN where they are not. lean: the variance of the row's mean error along the sign of the answer, over its
    plain lanes in units of their deviation with the output's rounding; tilt: what systematic errors add to that mean.
    """

    out: torch.Tensor
    lse: torch.Tensor
    deviation: torch.Tensor
    lean: torch.Tensor
    tilt: torch.Tensor


class Row(NamedTuple):
    """One query's answer, its budget and deviation [heads, lanes]; the log-sum-exp without the sink, its budget, lean and
    tilt [heads]; see `Budget`."""

    out: torch.Tensor
    allowed: torch.Tensor
    deviation: torch.Tensor
    lse: torch.Tensor
    lse_allowed: torch.Tensor
    lean: torch.Tensor
    tilt: torch.Tensor


def row_budget(
    query: torch.Tensor, keys: torch.Tensor, copies: torch.Tensor, sink: torch.Tensor | None, *, scale: float,
    precision: Precision, output: torch.dtype, plain: int,
) -> Row:  # fmt: skip
    """One query [heads, lanes] over distinct keys [n, lanes], n > 0, in float64.

    copies: how often each key stands in the list. sink: [heads] or None. output: the dtype of the last rounding of the
    answer. plain: the leading lanes over which the mean error of a row is taken.
    """
    count, lanes = keys.shape
    sizes, squares = keys.abs(), keys.square()
    total_count = float(copies.sum())
    score = (query @ keys.T) * scale
    reach = (query.abs() @ sizes.T) * abs(scale)
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
    # The difference cancels where one key has nearly all the weight; what another may gain by an error must not.
    spread = torch.maximum(square - out.square(), _CANCELLED * square)
    p2 = p.square()
    centred = p2 @ squares - 2 * out * (p2 @ keys) + out.square() * p2.sum(1, keepdim=True)
    centred = torch.maximum(centred, _CANCELLED * (p2 @ squares))

    # Equal scores: the probabilities are the same power of two, or share one rounding when the sink sets the maximum.
    level = top == lowest
    u_p = UNIT_ROUNDOFF[precision.probability]
    hidden = _HIDDEN.get(precision.probability, 2.0**-10)
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
    u_k = UNIT_ROUNDOFF[precision.key]
    per_score = HOEFFDING * math.sqrt(lanes) * UNIT_ROUNDOFF[precision.score] + u_q + u_k
    errors = reach * per_score
    # A key counts if some error of the scores could make it count.
    margin = errors + errors.gather(1, score.argmax(1, keepdim=True))
    heard = (score - top[:, None]) + copies.log() + margin > math.log(2.0**-60) + (lse - top)[:, None]
    error = (errors * heard).amax(1, keepdim=True)
    shifted = above[:, None] | (error > hidden)
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
    # A split's weight is the exponential of a logarithm, which is as large as the scores are.
    reweighed = U32 * (4 * lse.abs() + 2 * precision.exponential_ulps + 16) * precision.averaged
    handed_on = (u_k + reweighed[:, None]) * size
    allowed = rounding + scored + shared + summed + handed_on + FLUSHED * precision.flushes

    alone_counts = torch.ones_like(level) if sink is None else torch.isinf(sink)
    fits = bool((sizes * copies[:, None]).sum(0).max() < _EXACT_SUM and ((keys / _GRAIN).frac() == 0).all())
    if precision.partial == precision.accumulate == "float32" and (count == 1 or fits):
        # Equal scores without a sink leave a mean. Its sum is exact, and so is its division by a power of two.
        known = (copies @ keys) / total_count
        whole = total_count == 2.0 ** round(math.log2(total_count))
        # Copies of a key score alike up to the order of summation; a narrow probability hides that where it is small.
        apart = torch.zeros_like(error) if total_count == 1 else error
        narrow = torch.where(apart > hidden, u_p, 0.0)
        slack = (narrow + 2 * apart + (0.0 if whole else 4 * U32)) * known.abs() + handed_on
        tiny = (((keys != 0) & (sizes < _NORMAL)).any(0)) | ((known != 0) & (known.abs() < _NORMAL))
        slack = slack + FLUSHED * tiny * precision.flushes
        equal = (level & alone_counts)[:, None]
        out, allowed = torch.where(equal, known, out), torch.where(equal, slack, allowed)

    lse_allowed = error[:, 0] + precision.systematic_ulps * U32 * loudest[:, 0]
    lse_allowed = lse_allowed + U32 * (HOEFFDING * math.sqrt(total_count) + 16 + precision.exponential_ulps)
    lse_allowed = lse_allowed + reweighed
    many = ((1 / crowd).sum(1) >= 16) & ~level & (count >= 32) & (error[:, 0] < 0.25)
    # What need not be independent enters with its worst case.
    common = shared + summed + handed_on + FLUSHED * precision.flushes
    variance = u_p**2 / 3 * norm + (error / HOEFFDING).square() * centred + common.square()
    deviation = torch.where(many[:, None], variance.sqrt(), math.nan)
    # The mean error of a row along the sign of the answer is a sum over keys too: key i moves it by p_i c_i.
    step = half_ulp(out.abs(), output)
    size_of_error = (variance + step.square() / 3).sqrt().clamp(min=1e-300)
    along = (out.sign() / size_of_error)[:, :plain] @ keys[:, :plain].T / plain
    lean = (u_p**2 / 3 + (error[:, 0] / HOEFFDING).square()) * (crowded * along.square()).sum(1)
    lean = lean + (step / size_of_error)[:, :plain].square().mean(1) / 3 / plain
    tilt = (common / size_of_error)[:, :plain].mean(1)
    return Row(out, allowed, deviation, lse, lse_allowed, lean, tilt)


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


def statistics(
    got: torch.Tensor, want: torch.Tensor, allowed: Budget, rounding: torch.dtype, plain: int
) -> list[Check]:
    """The mean square and the mean of the error over its deviation, on the rows whose errors are many and independent.

    With R such rows, the mean over rows of a row's mean square is at most 1 in expectation and varies by at most 2 / R even
    if all lanes of a row moved together; its limit is 1 + z sqrt(2 / R). The bias is the mean of the error along the sign
    of the answer over the first `plain` lanes; its limit is z standard deviations of that mean and what systematic errors add.
    """
    live = ~torch.isnan(allowed.deviation).any(-1)
    count = int(live.sum())
    if not count:
        return []
    want, got = want[live], got[live]
    scale = (allowed.deviation[live].square() + half_ulp(want.abs(), rounding).square() / 3).sqrt()
    error = torch.nan_to_num((got - want) / scale, nan=math.inf)
    rms = float(error.square().mean().sqrt())
    bias = float((error * want.sign())[:, :plain].mean())
    limit = HOEFFDING * float(allowed.lean[live].sum().sqrt()) / count + float(allowed.tilt[live].mean())
    return [
        statistic("out", "rms", rms, math.sqrt(1 + HOEFFDING * math.sqrt(2 / count)), error.numel(),
                  why=f"the errors of {count} rows together are larger than independent roundings leave"),
        statistic("out", "bias", bias, limit, count * plain,
                  why=f"the errors of {count} rows lean to one side: a rounding that is not to nearest, or a wrong factor"),
    ]  # fmt: skip
