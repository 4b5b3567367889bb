"""How is AITER's planner of version 1.2 asked for a plan?

As vLLM's metadata builder asks it: buffers by the library's own sizes, one page per key, and the split cap and the
round-robin flag passed only where there is one.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from cases.dense_mla.decode_plan import Inputs, Outputs


def run(inputs: Inputs) -> Outputs:
    """The planner's answer; it raises what it raises."""
    aiter = importlib.import_module("aiter")
    formats = {"bfloat16": aiter.dtypes.bf16, "float8": aiter.dtypes.fp8}
    query, cache = formats[inputs.query_format], formats[inputs.cache_format]
    device = inputs.query_start.device
    cap: dict[str, Any] = {} if inputs.split_cap is None else {"max_split_per_batch": inputs.split_cap}
    described = aiter.get_mla_metadata_info_v1(
        inputs.capacity_requests,
        inputs.capacity_queries,
        inputs.heads,
        query,
        cache,
        is_sparse=False,
        fast_mode=True,
        **cap,
    )
    addresses, work_start, works, group_start, groups, parts = (
        torch.empty(shape, dtype=dtype, device=device) for shape, dtype in described
    )
    round_robin = {"is_cp_round_robin": True} if inputs.mask == "round_robin" else {}
    requests = inputs.key_start.numel() - 1
    aiter.get_mla_metadata_v1(
        inputs.query_start, inputs.key_start, torch.ones(requests, dtype=torch.int32, device=device), inputs.heads, 1,
        inputs.mask == "causal", addresses, works, work_start, group_start, groups, parts, page_size=1,
        kv_granularity=inputs.granularity, max_seqlen_qo=inputs.queries,
        uni_seqlen_qo=inputs.queries if inputs.told else -1, fast_mode=True, dtype_q=query, dtype_kv=cache, **cap,
        **round_robin,
    )  # fmt: skip
    return Outputs(work_start, works, group_start, groups, parts)
