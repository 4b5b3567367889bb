"""How is AITER's host planner of persistent prefill asked for a plan?

As vLLM's metadata builder asks it: one key head per query head, keys where the queries are, units of 128 keys, one key a
page. The planner copies between host and device by itself; its outputs may lie on either.
"""

from __future__ import annotations

import dataclasses
import importlib

import torch

from cases.dense_mla.prefill_plan import Inputs, Outputs
from impl.dense_mla.prefill_plan import blank, kernel_heads, regions


def run(inputs: Inputs) -> Outputs:
    """The planner's answer; it raises what it raises. The scratch memory is ours."""
    aiter = importlib.import_module("aiter")
    described = aiter.get_ps_metadata_info_v1(
        batch_size=inputs.max_requests, num_head_k=kernel_heads(inputs), max_qlen=min(inputs.max_len, inputs.max_batched),
        qlen_granularity=256,
    )  # fmt: skip
    plan = blank(inputs)
    addresses, work_start, works, group_start, groups, parts = (
        torch.empty(shape, dtype=dtype) for shape, dtype in described
    )
    aiter.get_ps_metadata_v1(
        plan.rows, plan.rows.clone(), plan.rows.diff(), 1, kernel_heads(inputs), addresses, work_start, works, group_start,
        groups, parts, qhead_granularity=1, qlen_granularity=256, kvlen_granularity=128, block_size=1, is_causal=True,
    )  # fmt: skip
    used = torch.tensor(regions(inputs, int(group_start[-1]), int(plan.rows[-1])))
    return dataclasses.replace(
        plan, work_start=work_start, works=works, group_start=group_start, groups=groups, parts=parts, used=used
    )
