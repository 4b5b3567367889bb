"""What is the answer of sparse MLA prefill over packed caches, whatever the chunks?

Token t of request r stands at position p. It reads the records of its window, positions max(0, p - window + 1) to p, and
of its compressed positions c in topk[t, :min((p + 1) // ratio, width)] with 0 <= c < seq // ratio; position x of a cache
lies in block table[r, x // block], place x % block. Over these records K_i, as numbers,

    s_i = scale * <q[t, h], K_i>,   Z = sum_i exp(s_i) + exp(sink_h),   o = sum_i exp(s_i) * K_i / Z

which is the formula of sparse MLA decode without rotation. Chunks and workspace do not occur in it: they are how the
records reach a kernel that takes plain rows. No record that is read holds a NaN.

Source: the prefill of vLLM's ROCm attention layer for DeepSeek V4.1 (`_forward_prefill`), which gathers, combines and
attends chunk by chunk. The budget is that of `oracle.sparse_mla.softmax_budget`; gathering is exact in bf16.
"""

import math

import torch

from cases.precision import Precision
from cases.sparse_mla.prefill_call import PrefillOutputs
from cases.sparse_mla.prefill_chunked_call import ChunkedInputs, refuse_malformed
from oracle.check import Check, bounded, wrong_form
from oracle.sparse_mla.prefill_chunked_call import rows_of, slots_read, tokens_of
from oracle.sparse_mla.prefill_chunked_faults import HONEST, MUTANTS
from oracle.sparse_mla.prefill_chunked_laws import LAWS
from oracle.sparse_mla.softmax_budget import Budget, row_budget, statistics

__all__ = ["HONEST", "LAWS", "MUTANTS", "budget", "judge", "reference"]


def reference(inputs: ChunkedInputs, dtype: torch.dtype = torch.float32) -> PrefillOutputs:
    """The answer in `dtype` (float32 or float64), a token at a time; raises ValueError or TypeError for what is no call."""
    refuse_malformed(inputs)
    tokens, heads, _ = inputs.query.shape
    out = torch.zeros(inputs.out.shape, dtype=dtype, device=inputs.query.device)
    lse = torch.zeros((tokens, heads), dtype=dtype, device=out.device)
    sink = None if inputs.sink is None else inputs.sink[:heads].to(dtype)
    for t, (request, position) in enumerate(tokens_of(inputs)):
        keys = rows_of(inputs, *slots_read(inputs, t, request, position), dtype)
        score = inputs.scale * (inputs.query[t].to(dtype) @ keys.T)
        top = score.amax(1)
        weight = (score - top[:, None]).exp()
        total = weight.sum(1)
        lse[t] = top + total.log()
        peak = top if sink is None else torch.maximum(top, sink)
        share = (top - peak).exp()
        if sink is not None:
            total = total * share + (sink - peak).exp()
        out[t] = (weight @ keys) * (share / total)[:, None]
    return PrefillOutputs(out, lse)


def budget(inputs: ChunkedInputs, precision: Precision) -> tuple[PrefillOutputs, Budget]:
    """The answer in float64 and the budget of an implementation with these rounding points."""
    refuse_malformed(inputs)
    tokens, heads, _ = inputs.query.shape
    out = torch.zeros(inputs.out.shape, dtype=torch.float64, device=inputs.query.device)
    allowed, deviation = torch.zeros_like(out), torch.full_like(out, math.nan)
    lse = torch.zeros((tokens, heads), dtype=torch.float64, device=out.device)
    lse_allowed, lean, tilt = (torch.zeros_like(lse) for _ in range(3))
    sink = None if inputs.sink is None else inputs.sink[:heads].double()
    for t, (request, position) in enumerate(tokens_of(inputs)):
        window, compressed = slots_read(inputs, t, request, position)
        compressed, copies = torch.unique(compressed, return_counts=True)
        keys = rows_of(inputs, window, compressed, torch.float64)
        copies = torch.cat([copies, torch.ones_like(window)]).double()
        row = row_budget(
            inputs.query[t].double(), keys, copies, sink, scale=inputs.scale, precision=precision,
            output=rounding_of(inputs, precision), plain=out.shape[2],
        )  # fmt: skip
        out[t], allowed[t], deviation[t] = row.out, row.allowed, row.deviation
        lse[t], lse_allowed[t], lean[t], tilt[t] = row.lse, row.lse_allowed, row.lean, row.tilt
    return PrefillOutputs(out, lse), Budget(allowed, lse_allowed, deviation, lean, tilt)


def rounding_of(inputs: ChunkedInputs, precision: Precision) -> torch.dtype:
    """The dtype of the last rounding of the answer."""
    return torch.bfloat16 if precision.output == "bfloat16" else inputs.out.dtype


def judge(inputs: ChunkedInputs, outputs: PrefillOutputs, precision: Precision) -> tuple[Check, ...]:
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
