"""What plan goes with a prefill batch, and what do the kernels do that follow one?"""

from __future__ import annotations

import torch

from cases.dense_mla import prefill_plan as plan_call
from cases.dense_mla import reduce_by_maps as reduce_call
from cases.dense_mla.fp8_prefill import Inputs
from impl.dense_mla import prefill_plan, reduce_by_maps

TILE = 256


def planned(inputs: Inputs) -> plan_call.Outputs:
    """Our own plan of the batch, on its device, in buffers that just hold it."""
    starts = inputs.query_start.cpu()
    tokens = int(starts[-1])
    plan = prefill_plan.run_ours(
        plan_call.Inputs(
            query_start=starts, decodes=0, heads=inputs.query.shape[1], value_lanes=inputs.value.shape[2],
            compute_units=inputs.compute_units, max_requests=len(starts) - 1, max_len=tokens, max_batched=tokens,
        )
    )  # fmt: skip
    device = inputs.query.device
    return plan_call.Outputs(*(getattr(plan, name).to(device) for name in plan.__dataclass_fields__))


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_start: torch.Tensor, key_start: torch.Tensor,
    slots: torch.Tensor, work_start: torch.Tensor, works: torch.Tensor, longest: int, scale: float, causal: bool,
    partial_out: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, *scales: torch.Tensor,
) -> None:  # fmt: skip
    """What AITER's prefill kernel does, in plain torch: each work by itself, whole tiles to `out`, parts to scratch."""
    del longest
    assert causal and all(float(scale_of) == 1 for scale_of in scales)
    wide = [one.float() for one in (query, key, value)]
    for request, scratch, low, high, first, last, _, heads in works[: int(work_start[-1])].tolist():
        own = slice(heads & 0xFFFF, heads >> 16)
        keys = slots[first:last].long()
        score = torch.einsum("ihl,jhl->hij", wide[0][low:high, own], wide[1][keys, own]) * scale
        place = torch.arange(first, last) - int(key_start[request])
        row = torch.arange(low, high) - int(query_start[request])
        score.masked_fill_(place[None, :] > row[:, None], -torch.inf)
        top = score.amax(2, keepdim=True)
        weight = torch.where(torch.isfinite(top), (score - top).exp(), 0.0)
        total = weight.sum(2)
        merged = torch.einsum("hij,jhl->ihl", weight, wide[2][keys, own]) / total.T[..., None]
        if scratch < 0:
            out[low:high, own] = merged.to(out.dtype)
        else:
            # A row that sees none of these keys is left NaN.
            partial_out[scratch : scratch + high - low, own] = merged
            partial_lse[scratch : scratch + high - low, own] = (top[..., 0] + total.log()).T


def reduce(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, group_start: torch.Tensor, groups: torch.Tensor,
    parts: torch.Tensor, longest: int, splits: int, out: torch.Tensor, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """What AITER's reduction does, in plain torch."""
    del longest, splits
    route = next(impl for impl in reduce_by_maps.IMPLS if impl.name == "torch-softmax")
    route.run(reduce_call.Inputs(partial_out, partial_lse, group_start, groups, parts, out, lse))
