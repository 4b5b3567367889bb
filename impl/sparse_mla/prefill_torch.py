"""How does plain torch answer sparse MLA prefill with the rounding points of a kernel?

All queries of a slice at once: their lists padded to a rectangle, the rows gathered into one tensor, two batched
products, exp(score - max) rounded to the rows' type before the second. It knows no tiles.
"""

from __future__ import annotations

import torch

from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from impl.sparse_mla.prefill_call import ragged_of

# Elements of the gathered rows of one slice of queries.
_SLICE_ELEMENTS = 1 << 24


def run(inputs: PrefillInputs) -> PrefillOutputs:
    """The answer, written into the output memory of `inputs`; raises `ValueError` or `TypeError`."""
    indices, indptr = ragged_of(inputs)
    queries, heads, lanes = inputs.query.shape
    lse = torch.empty((queries, heads), dtype=torch.float32, device=inputs.query.device)
    starts = indptr.long()
    lengths = starts[1:] - starts[:-1]
    widest = int(lengths.max()) if queries else 0
    step = max(1, _SLICE_ELEMENTS // max(1, widest * lanes))
    column = torch.arange(widest, device=indices.device)
    for low in range(0, queries, step):
        some = slice(low, low + step)
        listed = column < lengths[some, None]
        place = torch.where(listed, starts[:-1][some, None] + column, 0)
        entries = torch.where(listed, indices[place].long(), -1) if widest else listed.long()
        inputs.out[some], lse[some] = _attended(inputs, inputs.query[some], entries)
    return PrefillOutputs(inputs.out, lse)


def _attended(inputs: PrefillInputs, query: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer [queries, heads, out lanes] and log-sum-exp [queries, heads] over the entries [queries, width]."""
    heads = query.shape[1]
    counted = (entries >= 0) & (entries < inputs.rows)
    rows = inputs.kv[torch.where(counted, entries, 0), 0].float().masked_fill(~counted[..., None], 0.0)
    score = (query.float() @ rows.transpose(1, 2) * inputs.scale).masked_fill(~counted[:, None], -float("inf"))
    top = score.amax(2) if score.shape[2] else torch.full(score.shape[:2], -float("inf"), device=score.device)
    floor = top.clamp(min=torch.finfo(torch.float32).min)
    weight = torch.exp(score - floor[..., None])
    total = weight.sum(2)
    lse = floor + torch.log(total)
    values = weight.to(inputs.kv.dtype).float() @ rows[..., : inputs.out.shape[2]]
    if inputs.sink is not None:
        highest = torch.maximum(floor, inputs.sink[:heads])
        shrink = torch.exp(floor - highest)
        total = total * shrink + torch.exp(inputs.sink[:heads] - highest)
        values = values * shrink[..., None]
    answer = torch.where(total[..., None] > 0, values / total[..., None], 0.0)
    return answer.to(inputs.out.dtype), torch.where(torch.isneginf(top), top, lse)
