"""How does vLLM turn top-k positions into slots?

Its general conversion serves one rank and gathered keys, its filter for context parallelism several ranks and rows that
are counted but not moved; the ROCm backend has a conversion of its own, which writes one stream for all tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from cases.sparse_mla.topk_to_slots import Inputs, Outputs
from impl.sparse_mla import indices_vllm
from impl.sparse_mla.topk_to_slots import VLLM_CONVERT, VLLM_FILTER, VLLM_ROCM, VLLM_SHARED

# The widest tile of columns that its wrappers have by default; the width must be a multiple of the tile.
_TILE = 128


def run(inputs: Inputs) -> Outputs:
    """The slots of the conversion or of the filter, as the backends call them."""
    width = inputs.positions.shape[1]
    common: dict[str, Any] = {
        "BLOCK_SIZE": inputs.block_size,
        "BLOCK_STRIDE_ROWS": inputs.block_rows,
        "NUM_TOPK_TOKENS": width,
        "BLOCK_N": math.gcd(width, _TILE),
        "cp_kv_cache_interleave_size": inputs.interleave,
        "dcp_size": inputs.world_size,
        "dcp_rank": inputs.rank,
        "return_valid_counts": inputs.form != "columns",
    }
    if inputs.workspace is None and (inputs.world_size > 1 or inputs.form == "columns_counted"):
        name = VLLM_FILTER
        common["compact_valid_to_front"] = inputs.form == "front"
    else:
        name = VLLM_CONVERT
    if inputs.workspace is not None:
        common["HAS_PREFILL_WORKSPACE"] = True
        common["prefill_workspace_request_ids"] = inputs.workspace.requests
        common["prefill_workspace_starts"] = inputs.workspace.starts
        common["prefill_workspace_rank_stride"] = inputs.workspace.rank_rows
    convert = indices_vllm.builder(VLLM_SHARED, name, inputs.slots)
    answer = convert(inputs.requests, inputs.table, inputs.positions, **common)
    return Outputs(*answer) if isinstance(answer, tuple) else Outputs(answer, None)


def run_rocm(inputs: Inputs) -> Outputs:
    """The stream of the ROCm backend, every token as long as its row."""
    tokens, width = inputs.positions.shape
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=inputs.slots.device) * width
    convert = indices_vllm.builder(VLLM_ROCM, VLLM_CONVERT, inputs.slots)
    convert(
        inputs.requests, inputs.table, inputs.positions, starts, inputs.slots.view(-1),
        BLOCK_STRIDE_ROWS=inputs.block_rows, BLOCK_SIZE=inputs.block_size, NUM_TOPK_TOKENS=width,
        BLOCK_N=math.gcd(width, _TILE),
    )  # fmt: skip
    return Outputs(inputs.slots, None)
