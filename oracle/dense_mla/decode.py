"""What is the answer of dense MLA decode, and how far from it may an implementation land?

For row b * S + t of a request with n tokens c_0 .. c_(n-1) here, S the rows of a block, let it see the first J of them:

    J = n                                                    in a block that is not causal
    J = max(0, n - S + t + 1)                                in a causal one
    J = |{j < n : j W + r <= L - S + t}|                     in a causal one of length L of which shard r of W is here

With R the lanes of the answer, qs and ks the scales of query and cache (1 for bf16),

    s_j = sm qs ks <q, c_j>,   Z = sum_(j < J) exp(s_j)
    o   = ks sum_(j < J) exp(s_j) c_j[0:R] / Z,   lse = ln Z;   o = 0 and lse = -inf for J = 0

Tokens that a row does not see do not matter, whatever stands there. Where a row sees a number that is not finite, of a head
whose query has one, as padding has that nobody wrote, and in the rows of requests that do not count, nothing is asked.

Source: absorbed MLA decode of vLLM's ROCm backend over AITER's kernels (`mla_decode_fwd`, its round-robin variant for
decode context parallelism, and the Triton kernels behind them). The budget is that of `oracle.sparse_mla.softmax_budget`.
"""

import math

import torch

from cases.dense_mla.decode_call import DecodeInputs, DecodeOutputs, refuse_malformed
from cases.precision import Precision
from oracle.check import Check, bounded, wrong_form
from oracle.dense_mla.decode_call import listed, numbers_of, scale_of, stored, visible
from oracle.dense_mla.decode_faults import HONEST, MUTANTS
from oracle.dense_mla.decode_laws import LAWS
from oracle.sparse_mla.softmax_budget import U32, Budget, row_budget, statistics

__all__ = ["HONEST", "LAWS", "MUTANTS", "budget", "judge", "reference"]

_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def reference(inputs: DecodeInputs, dtype: torch.dtype = torch.float32) -> DecodeOutputs:
    """The answer in `dtype` (float32 or float64), a row at a time: memory stays bounded by one request's tokens.

    out is [rows, heads, latent]; lse [rows, heads]. Rows of requests that do not count are left out: 0 and -inf. Raises
    ValueError or TypeError for what is no call.
    """
    refuse_malformed(inputs)
    latent = inputs.out.shape[2]
    out = torch.zeros(inputs.out.shape, dtype=dtype, device=inputs.query.device)
    lse = torch.full(inputs.query.shape[:2], -math.inf, dtype=dtype, device=inputs.query.device)
    query_scale, cache_scale = (
        scale_of(inputs.query, inputs.query_scale),
        scale_of(inputs.cache, inputs.cache_scale),
    )
    scale = inputs.scale * query_scale * cache_scale
    for b in range(inputs.live):
        keys = numbers_of(stored(inputs, listed(inputs, b)), dtype)
        for row in range(b * inputs.qlen, (b + 1) * inputs.qlen):
            seen = keys[: visible(inputs, row)]
            if not seen.shape[0]:
                continue
            weight = (numbers_of(inputs.query[row], dtype) @ seen.T).mul_(scale)
            top = weight.amax(1)
            total = weight.sub_(top[:, None]).exp_().sum(1)
            out[row] = (weight @ seen[:, :latent]) * (cache_scale / total)[:, None]
            lse[row] = top + total.log()
    return DecodeOutputs(out, lse)


def budget(inputs: DecodeInputs, precision: Precision) -> tuple[DecodeOutputs, Budget, torch.Tensor]:
    """The answer in float64, the budget of an implementation with these rounding points, and which heads of which rows are
    asked, [rows, heads]."""
    refuse_malformed(inputs)
    latent = inputs.out.shape[2]
    out = torch.zeros(inputs.out.shape, dtype=torch.float64, device=inputs.query.device)
    allowed, deviation = torch.zeros_like(out), torch.full_like(out, math.nan)
    lse = torch.full(inputs.query.shape[:2], -math.inf, dtype=torch.float64, device=out.device)
    lse_allowed, lean, tilt = (torch.zeros_like(lse) for _ in range(3))
    asked = torch.zeros_like(lse, dtype=torch.bool)
    cache_scale = scale_of(inputs.cache, inputs.cache_scale)
    scale = inputs.scale * scale_of(inputs.query, inputs.query_scale)
    # A factor that is no power of two rounds, and so does a quotient in its place.
    scaled = 0.0 if math.frexp(cache_scale)[0] == 0.5 else 4 * U32
    for b in range(inputs.live):
        keys = numbers_of(stored(inputs, listed(inputs, b)), torch.float64) * cache_scale
        for row in range(b * inputs.qlen, (b + 1) * inputs.qlen):
            seen = keys[: visible(inputs, row)]
            if not bool(torch.isfinite(seen).all()):
                continue
            query = numbers_of(inputs.query[row], torch.float64)
            known = torch.isfinite(query).all(1)
            asked[row] = known
            if not seen.shape[0]:
                continue
            distinct, copies = torch.unique(seen, dim=0, return_counts=True)
            found = row_budget(
                query[known], distinct, copies.double(), None, scale=scale, precision=precision,
                output=rounding_of(inputs, precision), plain=latent,
            )  # fmt: skip
            out[row, known], allowed[row, known], deviation[row, known] = (
                lanes[:, :latent] for lanes in (found.out, found.allowed, found.deviation)
            )
            allowed[row] += scaled * out[row].abs()
            lse[row, known], lse_allowed[row, known] = found.lse, found.lse_allowed
            lean[row, known], tilt[row, known] = found.lean, found.tilt
    return DecodeOutputs(out, lse), Budget(allowed, lse_allowed, deviation, lean, tilt), asked


def rounding_of(inputs: DecodeInputs, precision: Precision) -> torch.dtype:
    """The dtype of the last rounding of the answer."""
    return _NARROW.get(precision.output, inputs.out.dtype)


def judge(inputs: DecodeInputs, outputs: DecodeOutputs, precision: Precision) -> tuple[Check, ...]:
    """The rows that see something and their statistics, the rows that see nothing, and the log-sum-exp where it is
    returned or, of a shard, must be."""
    if not isinstance(outputs, DecodeOutputs):
        raise TypeError(f"outputs are {type(outputs).__name__}: should be DecodeOutputs")
    truth, allowed, asked = budget(inputs, precision)
    form = wrong_form("out", outputs.out, inputs.out)
    if form is not None:
        return (form,)
    assert truth.lse is not None
    rounding = rounding_of(inputs, precision)
    empty = asked & torch.isneginf(truth.lse)
    got = outputs.out.to(truth.out.device)
    full = got.masked_fill(~(asked & ~empty)[..., None], 0.0)
    checks = [bounded("out", full, truth.out, allowed.out, dtype=inputs.out.dtype, rounding=rounding)]
    if got.numel():
        checks += statistics(full.double(), truth.out, allowed, rounding, truth.out.shape[2])
    if bool(empty.any()):
        zero = torch.zeros_like(truth.out)
        checks.append(
            bounded("out of rows that see nothing", got.masked_fill(~empty[..., None], 0.0), zero, zero,
                    dtype=inputs.out.dtype, rounding=rounding, why="a row that sees nothing is 0")
        )  # fmt: skip
    if outputs.lse is not None:
        lse = outputs.lse.to(truth.lse.device)
        if lse.shape == truth.lse.shape:
            lse = lse.masked_fill(~asked, -math.inf)
        checks.append(
            bounded("lse", lse, truth.lse, allowed.lse, dtype=torch.float32, rounding=torch.float32,
                    why="natural-log sum of the exponentials, outside its budget")
        )  # fmt: skip
    elif inputs.world > 1:
        missing = wrong_form("lse", None, truth.lse.float())
        assert missing is not None
        checks.append(missing)
    return tuple(checks)
