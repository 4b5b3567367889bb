"""How does vLLM's FP8 prefill answer, when AITER's kernels are stand-ins that follow a plan?

What is judged is what the method does itself: padding heads, casting, scratch memory, and taking the real heads out.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from cases.dense_mla.fp8_prefill import Inputs, Outputs
from impl.dense_mla import backend_vllm
from impl.dense_mla.fp8_prefill_call import attend, planned, reduce


def run(inputs: Inputs) -> Outputs:
    """The method's answer on gfx950; it raises what it raises."""
    loader = backend_vllm.loader(inputs.query.device)
    plan = planned(inputs)
    heads, width = inputs.value.shape[1:]
    implementation = backend_vllm.instance(
        loader, backend_vllm.IMPLEMENTATION, num_heads=heads, v_head_dim=width, scale=inputs.scale,
        _fp8_prefill_one_scale=None, _mla_prefill_ps_asm_fwd=attend, _mla_reduce_v1=reduce,
    )  # fmt: skip
    metadata = SimpleNamespace(
        fp8_prefill_qo_indptr=plan.rows, fp8_prefill_kv_indptr=plan.rows,
        fp8_prefill_kv_indices=torch.arange(len(inputs.query), dtype=torch.int32, device=inputs.query.device),
        fp8_prefill_work_indptr=plan.work_start, fp8_prefill_work_info_set=plan.works,
        fp8_prefill_reduce_indptr=plan.group_start, fp8_prefill_reduce_final_map=plan.groups,
        fp8_prefill_reduce_partial_map=plan.parts, fp8_prefill_max_q_len=int(plan.rows.diff().max()),
        fp8_prefill_num_partial_tiles=int(plan.group_start[-1]),
    )  # fmt: skip
    implementation._mla_fp8_prefill_attn(inputs.query, inputs.key, inputs.value, metadata, inputs.out)
    return Outputs(inputs.out)
