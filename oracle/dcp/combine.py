"""What is the merge of the answers that the ranks of a sharded cache give, and how far from it may one land?

With o_r and L_r the answer and the log-sum-exp of rank r, to the base b, over the ranks that had a key (L_r is finite,
and the lengths, where given, say so too):

    m = max_r L_r,   w_r = b^(L_r - m),   out = sum_r w_r o_r / sum_r w_r,   L = m + log_b sum_r w_r

A rank of weight 0 is left out, not multiplied: its answer may be NaN. Where no rank had a key, out is 0 and L is -inf.
Then every rank has the heads that it owns, h of world * h, or all heads after all_gather_all_reduce. One rank alone is
not touched at all. Under all_to_all a message is the answer's lanes and the bits of L_r: in one element of four bytes, or
in two of two bytes, the low half first. What it carries is what the rank holds, with minus infinity where the lengths say
that it had no key.

Source: the merges of vLLM's decode context parallelism (`cp_lse_ag_out_rs`, `cp_lse_ag_out_ar`, `dcp_a2a_lse_reduce`). The
budget is that of `oracle.dcp.combine_budget`.
"""

import math

import torch

from cases.dcp.combine import DTYPES, Inputs, Outputs
from cases.memory import map_tensors
from cases.precision import Precision
from oracle.check import Check, bounded, exact, wrong_form
from oracle.dcp import combine_budget
from oracle.dcp.combine_faults import HONEST, MUTANTS
from oracle.dcp.combine_laws import LAWS

__all__ = ["HONEST", "LAWS", "MUTANTS", "judge", "known_lses", "meaning", "message", "reference", "shared"]


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none: `ValueError` for shapes and dtypes of answers, `TypeError` for other dtypes."""
    outs, lses = inputs.outs, inputs.lses
    if outs.dim() != 4 or not outs.shape[0]:
        raise ValueError(f"shape of outs={list(outs.shape)}: should be [world, rows, heads, lanes] with a rank or more")
    world, rows, heads, _ = outs.shape
    if outs.dtype not in DTYPES.values():
        name = str(outs.dtype).removeprefix("torch.")
        raise ValueError(f"dtype of outs={name}: should be bfloat16, float16 or float32")
    if lses.dtype != torch.float32:
        raise TypeError(f"dtype of lses={str(lses.dtype).removeprefix('torch.')}: should be float32")
    if tuple(lses.shape) != (world, rows, heads):
        raise ValueError(f"shape of lses={list(lses.shape)}: should be {[world, rows, heads]}")
    if heads % world:
        raise ValueError(f"heads={heads}: should be a multiple of world={world}")
    lengths, starts = inputs.local_lengths, inputs.query_start
    if (lengths is None) != (starts is None):
        given = "local_lengths" if starts is None else "query_start"
        raise ValueError(f"{given} is given alone: local_lengths and query_start should be given together")
    if lengths is not None and starts is not None:
        if lengths.dim() != 2 or lengths.shape[0] != world:
            raise ValueError(f"shape of local_lengths={list(lengths.shape)}: should be [{world}, requests]")
        if starts.dim() != 1 or starts.shape[0] != lengths.shape[1] + 1:
            raise ValueError(f"shape of query_start={list(starts.shape)}: should be [{lengths.shape[1] + 1}]")


def known_lses(inputs: Inputs) -> torch.Tensor:
    """The log-sum-exps [world, rows, heads] as a merge takes them, fp32: -inf wherever a rank had no key."""
    lses = _sent_lses(inputs)
    return torch.where(torch.isfinite(lses), lses, -math.inf)


def _sent_lses(inputs: Inputs) -> torch.Tensor:
    """The log-sum-exps with -inf where the lengths say that a rank had no key, and otherwise as they are."""
    lses = inputs.lses.contiguous()
    lengths, starts = inputs.local_lengths, inputs.query_start
    if lengths is None or starts is None:
        return lses
    keys = torch.zeros(lses.shape[:2], dtype=lengths.dtype, device=lses.device)
    for request in range(lengths.shape[1]):
        keys[:, int(starts[request]) : int(starts[request + 1])] = lengths[:, request, None]
    bits = torch.where(keys[..., None] > 0, lses.view(torch.int32), torch.tensor(-math.inf).view(torch.int32))
    return bits.view(torch.float32)


def shared(merged: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """What every rank holds of a merge over all heads, [rows, heads, ...]: [world, rows, own heads, ...]."""
    if inputs.mode == "all_gather_all_reduce":
        return merged[None].expand(inputs.world, *merged.shape)
    runs: torch.Tensor = merged.unflatten(1, (inputs.world, -1))
    return runs.movedim(1, 0)


def message(inputs: Inputs) -> torch.Tensor:
    """The bits of all messages under all_to_all, [from, to, rows, own heads, lanes and log-sum-exp]."""
    narrow = inputs.outs.element_size() == 2
    words = torch.int16 if narrow else torch.int32
    lses = _sent_lses(inputs).view(torch.int32)
    halves = [lses & 0xFFFF, lses >> 16] if narrow else [lses]
    bits = torch.stack([((half + 0x8000) & 0xFFFF) - 0x8000 if narrow else half for half in halves], -1)
    packed = torch.cat([inputs.outs.contiguous().view(words), bits.to(words)], -1)
    runs: torch.Tensor = packed.unflatten(2, (inputs.world, -1))
    return runs.movedim(2, 1)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The merge in `dtype` (float32 or float64) before its rounding, and under all_to_all what was sent.

    out is [world, rows, own heads, lanes], lse [world, rows, own heads]; no rows give no elements. Raises `ValueError` or
    `TypeError` for what is no call: heads that the ranks cannot share, answers of a dtype that is not bfloat16, float16 or
    float32, lengths without row offsets or the other way round.
    """
    check_call(inputs)
    if inputs.world == 1:
        return Outputs(inputs.outs.to(dtype).clone(), inputs.lses.to(dtype).clone())
    power, logarithm = (torch.exp, torch.log) if inputs.base == "natural" else (torch.exp2, torch.log2)
    lses = known_lses(inputs).to(dtype)
    top = lses.amax(0).clamp(min=torch.finfo(dtype).min)
    weights = power(lses - top)
    total = weights.sum(0)
    out = torch.zeros(inputs.outs.shape[1:], dtype=dtype, device=inputs.outs.device)
    for own, weight in zip(inputs.outs, weights, strict=True):
        part = weight[..., None] * own.to(dtype)
        out += torch.where(weight[..., None] > 0, part, 0.0)
    out = torch.where(total[..., None] > 0, out / total[..., None], 0.0)
    lse = torch.where(total > 0, top + logarithm(total), -math.inf)
    sent = message(inputs) if inputs.mode == "all_to_all" else None
    return Outputs(shared(out, inputs), shared(lse, inputs), sent)


def meaning(outputs: Outputs) -> Outputs:
    """What means something of an answer whether or not its messages are shown."""
    return Outputs(outputs.out, outputs.lse)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The answers and log-sum-exps of all ranks, that all have the same after an all-reduce, and messages where shown."""
    if not isinstance(outputs, Outputs):
        raise TypeError(f"outputs are {type(outputs).__name__}: should be Outputs")
    check_call(inputs)
    dtype = inputs.outs.dtype
    if inputs.world == 1:
        why = "one rank alone keeps what it holds, bit for bit"
        return (exact("out", outputs.out, inputs.outs, why=why), exact("lse", outputs.lse, inputs.lses, why=why))
    truth = combine_budget.merged(
        inputs.outs, known_lses(inputs).double(), base=inputs.base, mode=inputs.mode, dtype=dtype, precision=precision
    )
    out, out_allowed, lse, lse_allowed = (
        shared(part, inputs) for part in (truth.out, truth.out_allowed, truth.lse, truth.lse_allowed)
    )
    checks = [
        bounded("out", outputs.out, out, out_allowed, dtype=dtype, rounding=dtype),
        bounded("lse", outputs.lse, lse, lse_allowed, dtype=torch.float32, rounding=torch.float32,
                why=f"logarithm of the sum of all ranks to base {inputs.base}, outside its budget"),
    ]  # fmt: skip
    if inputs.mode == "all_gather_all_reduce" and wrong_form("out", outputs.out, out.to(dtype)) is None:
        # A NaN may have other bits on another rank.
        numbers = map_tensors(outputs, lambda held: torch.where(torch.isnan(held), 0.0, held))
        checks.append(
            exact("out of other ranks", numbers.out, numbers.out[:1].expand(out.shape),
                  why="after an all-reduce every rank holds the same bits")
        )  # fmt: skip
    if outputs.sent is not None and inputs.mode == "all_to_all":
        checks.append(exact("sent", outputs.sent, message(inputs), why="a message is moved bits"))
    return tuple(checks)
