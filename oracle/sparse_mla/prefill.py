"""What is the answer of sparse MLA prefill, and how far from it may an implementation land?

For query t and head h let I be the multiset of the entries i of its list with 0 <= i < rows; entries outside are skipped,
duplicates count. With K_i the row i, key and value at once,

    s_i = scale * <q[t, h], K_i>
    Z   = sum_i exp(s_i) + exp(sink_h)                       (no sink: without the last term)
    o   = sum_i exp(s_i) * K_i / Z,   and 0 without a valid entry

and the answer is o or its leading lanes. Nothing is cleaned: a NaN in a row that is read is outside the contract.

Source: the sparse MLA prefill of vLLM's ROCm backend for DeepSeek V4 and V4.1 (`rocm_sparse_attn_prefill`). The budget is
that of `oracle.sparse_mla.softmax_budget`.
"""

import math

import torch

from cases.precision import Precision
from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs, refuse_malformed
from oracle.check import Check, bounded, wrong_form
from oracle.sparse_mla.prefill_call import valid
from oracle.sparse_mla.prefill_faults import HONEST, MUTANTS
from oracle.sparse_mla.prefill_laws import LAWS
from oracle.sparse_mla.softmax_budget import Budget, row_budget, statistics

__all__ = ["HONEST", "LAWS", "MUTANTS", "budget", "judge", "reference"]

_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def reference(inputs: PrefillInputs, dtype: torch.dtype = torch.float32) -> PrefillOutputs:
    """The answer in `dtype` (float32 or float64), a query at a time: memory stays bounded by one query's rows.

    out is [queries, heads, out lanes]; lse [queries, heads] is -inf where no entry is valid. Raises ValueError or TypeError
    for what is no call.
    """
    refuse_malformed(inputs)
    queries, heads, _ = inputs.query.shape
    device = inputs.query.device
    out = torch.zeros(inputs.out.shape, dtype=dtype, device=device)
    lse = torch.full((queries, heads), -math.inf, dtype=dtype, device=device)
    sink = None if inputs.sink is None else inputs.sink[:heads].to(dtype)
    for t in range(queries):
        keys = inputs.kv[valid(inputs, t), 0].to(dtype)
        if not keys.shape[0]:
            continue
        score = inputs.scale * (inputs.query[t].to(dtype) @ keys.T)
        top = score.amax(1)
        weight = (score - top[:, None]).exp()
        total = weight.sum(1)
        lse[t] = top + total.log()
        peak = top if sink is None else torch.maximum(top, sink)
        share = (top - peak).exp()
        if sink is not None:
            total = total * share + (sink - peak).exp()
        out[t] = (weight @ keys)[:, : out.shape[2]] * (share / total)[:, None]
    return PrefillOutputs(out, lse)


def budget(inputs: PrefillInputs, precision: Precision) -> tuple[PrefillOutputs, Budget]:
    """The answer in float64 and the budget of an implementation with these rounding points."""
    refuse_malformed(inputs)
    queries, heads, _ = inputs.query.shape
    width = inputs.out.shape[2]
    out = torch.zeros(inputs.out.shape, dtype=torch.float64, device=inputs.query.device)
    allowed, deviation = torch.zeros_like(out), torch.full_like(out, math.nan)
    lse = torch.full((queries, heads), -math.inf, dtype=torch.float64, device=out.device)
    lse_allowed, lean, tilt = (torch.zeros_like(lse) for _ in range(3))
    sink = None if inputs.sink is None else inputs.sink[:heads].double()
    for t in range(queries):
        entries, copies = torch.unique(valid(inputs, t), return_counts=True)
        if not entries.numel():
            continue
        row = row_budget(
            inputs.query[t].double(), inputs.kv[entries, 0].double(), copies.double(), sink, scale=inputs.scale,
            precision=precision, output=rounding_of(inputs, precision), plain=width,
        )  # fmt: skip
        out[t], allowed[t], deviation[t] = (lanes[:, :width] for lanes in (row.out, row.allowed, row.deviation))
        lse[t], lse_allowed[t], lean[t], tilt[t] = row.lse, row.lse_allowed, row.lean, row.tilt
    return PrefillOutputs(out, lse), Budget(allowed, lse_allowed, deviation, lean, tilt)


def rounding_of(inputs: PrefillInputs, precision: Precision) -> torch.dtype:
    """The dtype of the last rounding of the answer."""
    return _NARROW.get(precision.output, inputs.out.dtype)


def judge(inputs: PrefillInputs, outputs: PrefillOutputs, precision: Precision) -> tuple[Check, ...]:
    """The answer and its statistics, and the log-sum-exp where it is returned."""
    if not isinstance(outputs, PrefillOutputs):
        raise TypeError(f"outputs are {type(outputs).__name__}: should be PrefillOutputs")
    truth, allowed = budget(inputs, precision)
    rounding = rounding_of(inputs, precision)
    checks = [bounded("out", outputs.out, truth.out, allowed.out, dtype=inputs.out.dtype, rounding=rounding)]
    if wrong_form("out", outputs.out, inputs.out) is None and truth.out.numel():
        checks += statistics(outputs.out.double(), truth.out, allowed, rounding, truth.out.shape[2])
    if outputs.lse is not None:
        assert truth.lse is not None
        checks.append(
            bounded("lse", outputs.lse, truth.lse, allowed.lse, dtype=torch.float32, rounding=torch.float32,
                    why="natural-log sum of the exponentials without the sink, outside its budget")
        )  # fmt: skip
    return tuple(checks)
