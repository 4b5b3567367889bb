"""How does plain torch answer dense MLA decode with the rounding points of a kernel?

All rows of a slice at once: what each sees padded to a rectangle, the tokens gathered into one tensor, two batched
products, exp(score - max) rounded to bf16 before the second. It knows neither parts nor tiles.
"""

from __future__ import annotations

import torch

from cases.dense_mla.decode_call import QUANTISED, DecodeInputs, DecodeOutputs, refuse_malformed
from impl.dense_mla.decode_rows import limits

# Elements of the gathered tokens of one slice of rows.
_SLICE_ELEMENTS = 1 << 24


def run(inputs: DecodeInputs) -> DecodeOutputs:
    """The answer, written into the output memory of `inputs`; raises `ValueError` or `TypeError`."""
    refuse_malformed(inputs)
    rows, heads, lanes = inputs.query.shape
    lse = torch.empty((rows, heads), dtype=torch.float32, device=inputs.query.device)
    seen = limits(inputs)
    first = inputs.kv_indptr[:-1].repeat_interleave(inputs.qlen)
    widest = int(seen.max()) if rows else 0
    step = max(1, _SLICE_ELEMENTS // max(1, widest * lanes))
    column = torch.arange(widest, device=seen.device)
    for low in range(0, rows, step):
        some = slice(low, low + step)
        counted = column < seen[some, None]
        place = torch.where(counted, first[some, None] + column, 0)
        slots = torch.where(counted, inputs.slots[place], 0)
        inputs.out[some], lse[some] = _attended(inputs, inputs.query[some], slots, counted)
    return DecodeOutputs(inputs.out, lse)


def _attended(
    inputs: DecodeInputs, query: torch.Tensor, slots: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer [rows, heads, latent] and log-sum-exp [rows, heads] over the slots [rows, width] that count."""
    page = inputs.cache.shape[1]
    keys = inputs.cache[slots // page, slots % page].float().masked_fill(~counted[..., None], 0.0)
    factor, value_factor = inputs.scale, 1.0
    if inputs.cache.dtype in QUANTISED:
        value_factor = float(inputs.cache_scale)
        factor *= value_factor
    if query.dtype in QUANTISED:
        factor *= float(inputs.query_scale)
    score = (query.float() @ keys.transpose(1, 2) * factor).masked_fill(~counted[:, None], -float("inf"))
    top = score.amax(2) if score.shape[2] else torch.full(score.shape[:2], -float("inf"), device=score.device)
    floor = top.clamp(min=torch.finfo(torch.float32).min)
    weight = torch.exp(score - floor[..., None])
    total = weight.sum(2)
    values = weight.bfloat16().float() @ keys[..., : inputs.out.shape[2]]
    answer = torch.where(total[..., None] > 0, values / total[..., None], 0.0) * value_factor
    return answer.to(inputs.out.dtype), torch.where(torch.isneginf(top), top, floor + torch.log(total))
