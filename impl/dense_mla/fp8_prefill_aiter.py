"""How are AITER's assembly prefill and its reduction asked, by a plan of our own?"""

from __future__ import annotations

import importlib

import torch

from cases.dense_mla.fp8_prefill import LARGEST, Inputs, Outputs
from impl.dense_mla.fp8_prefill_call import TILE, planned


def run(inputs: Inputs) -> Outputs:
    """The kernels' answer; it raises what it raises. Heads are padded one behind the other, and the first ones taken."""
    aiter = importlib.import_module("aiter")
    plan, device = planned(inputs), inputs.query.device
    tokens, heads, width = inputs.value.shape
    many = -(-heads // 16) * 16
    source = torch.arange(many, device=device) % heads
    query, key, value = (
        one[:, source].clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).contiguous()
        for one in (inputs.query, inputs.key, inputs.value)
    )
    rows = int(plan.group_start[-1]) * TILE
    partial_out = torch.empty((rows, many, width), dtype=torch.float32, device=device)
    partial_lse, lse = (torch.empty((count, many), dtype=torch.float32, device=device) for count in (rows, tokens))
    out = torch.empty((tokens, many, width), dtype=inputs.out.dtype, device=device)
    slots = torch.arange(tokens, dtype=torch.int32, device=device)
    one = torch.ones((), dtype=torch.float32, device=device)
    aiter.mla_prefill_ps_asm_fwd(
        query, key, value, plan.rows, plan.rows, slots, plan.work_start, plan.works, int(plan.rows.diff().max()),
        inputs.scale, True, partial_out, partial_lse, out, one, one, one,
    )  # fmt: skip
    aiter.mla_reduce_v1(
        partial_out, partial_lse, plan.group_start, plan.groups, plan.parts, TILE, 0, out, lse
    )  # fmt: skip
    inputs.out.unflatten(1, (heads, width)).copy_(out[:, :heads])
    return Outputs(inputs.out)
