"""What is the answer of decode over a cache that is sharded over ranks, and how far from it may an implementation land?

For row b * S + t let J = max(0, L_b - S + t + 1) tokens be seen, those at positions 0 to J - 1 of request b, wherever they
lie. With c_p the token at position p and ks the scale of the cache (1 for bf16), for every head of every rank

    s_p = sm ks <q, c_p>,   Z = sum_(p < J) exp(s_p)
    o   = ks sum_(p < J) exp(s_p) c_p[0:R] / Z,   lse = ln Z;   o = 0 and lse = -inf for J = 0

as one rank would answer that held the whole cache. Nothing else matters: not the number of ranks, nor what stands where
no request has a token. Nothing is asked of the rows of requests that do not count.

Source: decode context parallelism of vLLM's ROCm MLA backend, its causal verification of drafted blocks included.

The budget. Rank r has a share of the tokens: its answer may be off by a_r as `oracle.sparse_mla.softmax_budget` says, and
is rounded to bf16; its log-sum-exp may be off by e_r. With f_r the factors of the merge, that leaves

    sum_r f_r (a_r + half an ulp of o_r) + 1.1 sum_r f_r e_r |o_r - o|   and, of the log-sum-exp,   sum_r f_r e_r

beside the merge's own budget (`oracle.dcp.combine_budget`). A token e^-200 below the largest of its row has weight 0,
wherever it lies: where all others are so far below, the answer is that token, bit for bit.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from cases.dcp.decode import Inputs, Outputs
from cases.dense_mla.decode_call import QUANTISED
from cases.precision import Precision
from oracle.check import Check, bounded, half_ulp, wrong_form
from oracle.dcp import combine_budget
from oracle.dcp.decode_call import tokens
from oracle.dcp.decode_faults import HONEST, MUTANTS
from oracle.dcp.decode_laws import LAWS
from oracle.formats.numbers import round_to_bfloat16
from oracle.sparse_mla.softmax_budget import U32, row_budget

__all__ = ["HONEST", "LAWS", "MUTANTS", "judge", "reference"]

_UNHEARD = -200.0
# To the first order; weights move by no more than this factor beyond it.
_SLACK = 1.1


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none: `ValueError` for shapes and numbers, `TypeError` for dtypes."""
    query, caches = inputs.query, inputs.caches
    if query.dim() != 4 or not query.shape[0]:
        raise ValueError(
            f"shape of query={list(query.shape)}: should be [world, rows, heads, lanes] with a rank or more"
        )
    world, rows, _, lanes = query.shape
    if query.dtype != torch.bfloat16 or caches.dtype not in (torch.bfloat16, *QUANTISED):
        raise TypeError(
            f"query={query.dtype} and caches={caches.dtype}: should be bfloat16, and bfloat16, float8_e4m3fn or "
            "float8_e4m3fnuz"
        )
    if caches.dim() != 4 or caches.shape[0] != world or caches.shape[3] != lanes:
        raise ValueError(f"shape of caches={list(caches.shape)}: should be [{world}, blocks, page, {lanes}]")
    if inputs.qlen < 1 or rows != inputs.lengths.shape[0] * inputs.qlen:
        raise ValueError(f"rows={rows}: should be {inputs.lengths.shape[0]} requests of qlen={inputs.qlen}")
    if inputs.table.dim() != 2 or inputs.table.shape[0] != inputs.lengths.shape[0]:
        raise ValueError(f"shape of table={list(inputs.table.shape)}: should be [{inputs.lengths.shape[0]}, width]")
    if not 1 <= inputs.latent <= lanes:
        raise ValueError(f"latent={inputs.latent}: should be 1 to {lanes}")
    if not 0 <= inputs.live <= inputs.lengths.shape[0]:
        raise ValueError(f"live={inputs.live}: should be 0 to {inputs.lengths.shape[0]}, the requests")
    longest = max([0, *inputs.lengths.tolist()])
    room = inputs.table.shape[1] * caches.shape[2] * world
    if longest > room:
        raise ValueError(f"lengths={longest}: should be at most {room}, the tokens of a row of the table")


class _Row(NamedTuple):
    """A row: its number, its query over all heads [heads, lanes], and the tokens that it sees by position, [n, lanes]."""

    number: int
    query: torch.Tensor
    seen: torch.Tensor


def _rows(inputs: Inputs, dtype: torch.dtype) -> Iterator[_Row]:
    gathered = inputs.query.movedim(0, 1).flatten(1, 2).to(dtype)
    for b, length in enumerate(inputs.lengths[: inputs.live].tolist()):
        held = tokens(inputs, b, dtype)
        for t in range(inputs.qlen):
            number = b * inputs.qlen + t
            yield _Row(number, gathered[number], held[: max(0, length - inputs.qlen + t + 1)])


def _owned(merged: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """[rows, all heads, ...] as every rank's own: [world, rows, own heads, ...]."""
    runs: torch.Tensor = merged.unflatten(1, (inputs.world, -1))
    return runs.movedim(1, 0)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The answer in `dtype` (float32 or float64), as of one rank that holds all tokens; a row at a time.

    out is [world, rows, own heads, latent], 0 for rows that see nothing, and lse [world, rows, own heads] -inf. Raises
    ValueError or TypeError for what is no call.
    """
    check_call(inputs)
    rows, heads = inputs.query.shape[1], inputs.query.shape[0] * inputs.query.shape[2]
    out = torch.zeros((rows, heads, inputs.latent), dtype=dtype, device=inputs.query.device)
    lse = torch.full((rows, heads), -math.inf, dtype=dtype, device=out.device)
    for row in _rows(inputs, dtype):
        if row.seen.shape[0]:
            score = inputs.scale * (row.query @ row.seen.T)
            lse[row.number] = score.logsumexp(1)
            out[row.number] = score.softmax(1) @ row.seen[:, : inputs.latent]
    return Outputs(_owned(out, inputs), _owned(lse, inputs))


def budget(inputs: Inputs, precision: Precision) -> tuple[Outputs, Outputs]:
    """The answer in float64, and what an implementation with these rounding points may be off by."""
    check_call(inputs)
    world, rows, own, _ = inputs.query.shape
    shape = (world, rows, world * own, inputs.latent)
    parts, parts_allowed = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    lses = torch.full(shape[:3], -math.inf, dtype=torch.float64)
    lses_allowed = torch.zeros_like(lses)
    for row in _rows(inputs, torch.float64):
        if not row.seen.shape[0]:
            continue
        score = inputs.scale * (row.query @ row.seen.T)
        heard = (score >= score.amax(1, keepdim=True) + _UNHEARD).any(0)
        for rank in range(world):
            mine = row.seen[rank::world][heard[rank::world]]
            if not mine.shape[0]:
                continue
            distinct, copies = torch.unique(mine, dim=0, return_counts=True)
            found = row_budget(
                row.query, distinct, copies.double(), None, scale=inputs.scale, precision=precision,
                output=torch.bfloat16, plain=inputs.latent,
            )  # fmt: skip
            place = (rank, row.number)
            parts[place], parts_allowed[place] = found.out[:, : inputs.latent], found.allowed[:, : inputs.latent]
            lses[place], lses_allowed[place] = found.lse, found.lse_allowed
    # A factor that is no power of two rounds, and so does a quotient in its place.
    if inputs.caches.dtype != torch.bfloat16:
        parts_allowed += 4 * U32 * parts.abs()
    if world == 1:
        return (
            Outputs(_owned(parts[0], inputs), _owned(lses[0], inputs)),
            Outputs(_owned(parts_allowed[0], inputs), _owned(lses_allowed[0], inputs)),
        )
    merged = combine_budget.merged(
        parts, lses, base="natural", mode=inputs.mode, dtype=torch.bfloat16, precision=precision
    )
    known = (parts_allowed == 0) & (round_to_bfloat16(parts) == parts)
    rounded = parts_allowed + torch.where(known, 0.0, half_ulp(parts.abs() + parts_allowed, torch.bfloat16))
    height = torch.where(lses > -math.inf, lses, 0.0).abs()
    moved = torch.where(merged.factors > 0, lses_allowed + half_ulp(height, torch.float32), 0.0)
    factors = merged.factors[..., None]
    out_allowed = (factors * rounded).sum(0) + merged.out_allowed
    out_allowed += _SLACK * (factors * moved[..., None] * (parts - merged.out).abs()).sum(0)
    lse_allowed = (merged.factors * moved).sum(0) + merged.lse_allowed
    return (
        Outputs(_owned(merged.out, inputs), _owned(merged.lse, inputs)),
        Outputs(_owned(out_allowed, inputs), _owned(lse_allowed, inputs)),
    )


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The answers and log-sum-exps of all ranks, in the rows of requests that count."""
    if not isinstance(outputs, Outputs):
        raise TypeError(f"outputs are {type(outputs).__name__}: should be Outputs")
    truth, allowed = budget(inputs, precision)
    assert truth.lse is not None and allowed.lse is not None
    forms = (
        wrong_form("out", outputs.out, torch.empty(truth.out.shape, dtype=torch.bfloat16, device="meta")),
        wrong_form("lse", outputs.lse, torch.empty(truth.lse.shape, dtype=torch.float32, device="meta")),
    )
    wrong = tuple(form for form in forms if form is not None)
    if wrong:
        return wrong
    assert outputs.lse is not None
    count = slice(0, inputs.live * inputs.qlen)
    return (
        bounded("out", outputs.out[:, count], truth.out[:, count], allowed.out[:, count],
                dtype=torch.bfloat16, rounding=torch.bfloat16),
        bounded("lse", outputs.lse[:, count], truth.lse[:, count], allowed.lse[:, count],
                dtype=torch.float32, rounding=torch.float32,
                why="natural-log sum of the exponentials over all ranks' tokens, outside its budget"),
    )  # fmt: skip
