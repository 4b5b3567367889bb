"""What is a decode over segments, and how far from it may an implementation land?

Row i has n_i keys; key x lies in page table[i, x // T] of T tokens, at x % T. With c_x what is stored there, k the cache's
scale and q the query (where it is codes: bf16(bf16(q) * query_scale), rounded once),

    s_x = scale * k * <q, c_x>,   out = k * sum_x exp(s_x) c_x[:rank] / sum_x exp(s_x),   lse = ln(sum_x exp(s_x))

over the row's own keys; a row without keys is 0 with lse -inf. What lies elsewhere, in the rest of the last page too, does
not matter. Where an implementation shows its G segments, segment g holds the keys of whole tiles that
`cases.dense_mla.merge_segments` gives it, as sums k * sum_x 2^(y_x - M) c_x, maxima M = max_x y_x and masses
sum_x 2^(y_x - M) with y = s / ln 2, if it is active.

Source: the verify route under decode context parallelism of vLLM's ROCm MLA backend, which calls AITER's segmented decode.
The budget is that of `oracle.sparse_mla.softmax_budget`, for each row, and for each segment alone.
"""

import math
from typing import NamedTuple

import torch

from cases.dense_mla.merge_segments import active_segments
from cases.dense_mla.segmented_decode import Inputs, Outputs
from cases.precision import Precision
from oracle.check import Check, bounded, wrong_form
from oracle.dense_mla.segmented_decode_call import check_call, keys_of, query_of, stored
from oracle.dense_mla.segmented_decode_faults import HONEST, MUTANTS
from oracle.dense_mla.segmented_decode_laws import LAWS
from oracle.sparse_mla.softmax_budget import U32, Budget, row_budget, statistics

__all__ = ["HONEST", "LAWS", "MUTANTS", "judge", "reference"]

LN2 = math.log(2.0)
_NEARLY_ALL = math.log(1 - 2.0**-5)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The answer in `dtype` (float32 or float64), a row at a time; without segments.

    Raises `ValueError` or `TypeError` for what is no call.
    """
    check_call(inputs)
    rows, heads, _ = inputs.query.shape
    out = torch.zeros((rows, heads, inputs.rank), dtype=dtype)
    lse = torch.full((rows, heads), -math.inf, dtype=dtype)
    factor = inputs.cache_scale.to(dtype)
    for row in range(rows):
        keys = stored(inputs, keys_of(inputs, row), dtype)
        if not keys.shape[0]:
            continue
        score = inputs.scale * factor * (query_of(inputs, row, dtype) @ keys.T)
        top = score.amax(1)
        weight = (score - top[:, None]).exp()
        total = weight.sum(1)
        out[row] = factor * (weight @ keys[:, : inputs.rank]) / total[:, None]
        lse[row] = top + total.log()
    return Outputs(out, lse)


class _Known(NamedTuple):
    """An answer in float64 with its budget, both [heads, rank], and its log-sum-exp with its own [heads]; and what
    `statistics` wants."""

    out: torch.Tensor
    allowed: torch.Tensor
    lse: torch.Tensor
    lse_allowed: torch.Tensor
    deviation: torch.Tensor
    lean: torch.Tensor
    tilt: torch.Tensor


def _over(inputs: Inputs, row: int, slots: torch.Tensor, precision: Precision, output: torch.dtype) -> _Known:
    """One row's attention over the keys in some slots, at least one."""
    distinct, copies = torch.unique(slots, return_counts=True)
    factor = inputs.cache_scale.double()
    known = row_budget(
        query_of(inputs, row, torch.float64), stored(inputs, distinct, torch.float64) * factor, copies.double(), None,
        scale=inputs.scale, precision=precision, output=output, plain=inputs.rank,
    )  # fmt: skip
    lanes = slice(0, inputs.rank)
    # The scale of the cache multiplies the sums, and a sum times it need not be a number of fp32.
    mantissa, _ = torch.frexp(factor)
    scaled = 0.0 if float(mantissa) == 0.5 else 3 * U32
    allowed = known.allowed[:, lanes] + scaled * known.out[:, lanes].abs()
    # Next to a key with nearly all the weight an answer lies just below a number that the output's format has, in every
    # head alike: these last roundings are not independent.
    score = inputs.scale * factor * (query_of(inputs, row, torch.float64) @ stored(inputs, distinct, torch.float64).T)
    alone = (score + copies.log()).amax(1) - known.lse > _NEARLY_ALL
    deviation = known.deviation[:, lanes].masked_fill(alone[:, None], math.nan)
    return _Known(known.out[:, lanes], allowed, known.lse, known.lse_allowed, deviation, known.lean, known.tilt)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The answer and its statistics, the log-sum-exp, and each active segment where segments are shown."""
    check_call(inputs)
    rows, heads, _ = inputs.query.shape
    form = inputs.out.dtype
    out = torch.zeros(inputs.out.shape, dtype=torch.float64)
    allowed, deviation = torch.zeros_like(out), torch.full_like(out, math.nan)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    lse_allowed, lean, tilt = (torch.zeros_like(lse) for _ in range(3))
    for row in range(rows):
        slots = keys_of(inputs, row)
        if slots.numel():
            known = _over(inputs, row, slots, precision, form)
            out[row], allowed[row], lse[row], lse_allowed[row] = known.out, known.allowed, known.lse, known.lse_allowed
            deviation[row], lean[row], tilt[row] = known.deviation, known.lean, known.tilt
    checks = [bounded("out", outputs.out, out, allowed, dtype=form, rounding=form)]
    if wrong_form("out", outputs.out, inputs.out) is None and out.numel():
        budget = Budget(allowed, lse_allowed, deviation, lean, tilt)
        checks += statistics(outputs.out.double(), out, budget, form, inputs.rank)
    checks.append(
        bounded("lse", outputs.lse, lse, lse_allowed, dtype=torch.float32, rounding=torch.float32,
                why="outside the budget of a natural log-sum-exp")
    )  # fmt: skip
    if outputs.sums is not None:
        checks += _segments(inputs, outputs, precision)
    return tuple(checks)


def _segments(inputs: Inputs, outputs: Outputs, precision: Precision) -> list[Check]:
    """What every active segment holds, as the attention over its own keys."""
    sums, maxima, masses = outputs.sums, outputs.maxima, outputs.masses
    rows, heads, _ = inputs.query.shape
    assert sums is not None
    count = sums.shape[2] if sums.dim() == 4 else 1
    shape = (rows, heads, count)
    forms = (("sums", sums, (*shape, inputs.rank)), ("maxima", maxima, shape), ("masses", masses, shape))
    for name, tensor, form in forms:
        wrong = wrong_form(name, tensor, torch.empty(form, device="meta"))
        if wrong is not None:
            return [wrong]
    assert maxima is not None and masses is not None
    found: list[tuple[torch.Tensor, ...]] = []
    for row in range(rows):
        slots = keys_of(inputs, row)
        active = active_segments(slots.numel(), count, inputs.tile)
        span = max(1, -(-slots.numel() // (count * inputs.tile))) * inputs.tile
        for segment in range(active):
            known = _over(inputs, row, slots[segment * span : (segment + 1) * span], precision, torch.float32)
            some = (
                stored(inputs, slots[segment * span : (segment + 1) * span], torch.float64)
                * inputs.cache_scale.double()
            )
            top = (inputs.scale * (query_of(inputs, row, torch.float64) @ some.T)).amax(1) / LN2
            mass, peak = masses[row, :, segment].double(), maxima[row, :, segment].double()
            mean = sums[row, :, segment].double() / mass[:, None]
            log = (peak + mass.log2()) * LN2
            # A quotient of two rounded numbers, and a sum of two.
            spare = 4 * U32 * known.out.abs()
            near = 4 * U32 * (peak.abs() + 1)
            found.append((mean, known.out, known.allowed + spare, log, known.lse, known.lse_allowed + near, peak, top))
    if not found:
        return []
    mean, want, allowed, log, lse, lse_allowed, peak, top = (torch.stack(each) for each in zip(*found, strict=True))
    why = "a segment is not the attention over its own keys"
    return [
        bounded("sums over masses", mean, want, _open(allowed), dtype=torch.float64, why=why),
        bounded("maxima and masses", log, lse, _open(lse_allowed), dtype=torch.float64, why=why),
        bounded(
            "maxima", peak, top, _open(lse_allowed / LN2), dtype=torch.float64, why="not the largest score in base 2"
        ),
    ]


def _open(allowed: torch.Tensor) -> torch.Tensor:
    """A budget that an error of none is always within, and that float64 itself does not exhaust."""
    return allowed + 1e-12
