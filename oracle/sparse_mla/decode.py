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

The budget is that of `oracle.sparse_mla.softmax_budget`; a rotated pair has the budgets of its two parts.
"""

import dataclasses
import math

import torch

from cases.precision import Precision
from cases.sparse_mla.decode import LANES, NOPE, DecodeInputs, DecodeOutputs
from oracle import mxfp8, rotation
from oracle.check import Check, bounded, codes, exact, wrong_form
from oracle.formats import numbers
from oracle.sparse_mla.call import listed, rotate_back, rows_of, segments, turned, valid
from oracle.sparse_mla.decode_faults import HONEST, MUTANTS
from oracle.sparse_mla.decode_laws import LAWS
from oracle.sparse_mla.softmax_budget import FLUSHED, U32, Budget, Row, row_budget, statistics

__all__ = ["HONEST", "LAWS", "MUTANTS", "budget", "judge", "reference"]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The answer.

    out: [queries, heads, 512] after rotation. lse: [queries, heads], natural logarithm, without the sink, -inf for a row
    without a key.
    """

    out: torch.Tensor
    lse: torch.Tensor


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
        rounded = 3 * U32 * rotation.carried(out[..., NOPE:].abs(), cos_sin, 1) * inexact
        rounded = rounded + FLUSHED * precision.flushes * inexact
        allowed[..., NOPE:] = rotation.carried(allowed[..., NOPE:], cos_sin, 1) + rounded
        deviation[..., NOPE:] = rotation.carried(deviation[..., NOPE:].square(), cos_sin, 2).sqrt()
        out = rotate_back(out, cos_sin)
    return Reference(out, lse), Budget(allowed, lse_allowed, deviation, lean, tilt)


def _row(
    inputs: DecodeInputs, query: torch.Tensor, keys: torch.Tensor, copies: torch.Tensor, sink: torch.Tensor | None,
    precision: Precision,
) -> Row:  # fmt: skip
    """One query over distinct keys, before rotation."""
    return row_budget(
        query, keys, copies, sink, scale=inputs.scale, precision=precision, output=rounding_of(inputs, precision),
        plain=NOPE,
    )  # fmt: skip


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
    return [check, *statistics(out.to(truth.out.dtype), truth.out, allowed, rounding, NOPE)]


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
