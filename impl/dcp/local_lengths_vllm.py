"""How does vLLM map sequences to ranks and tokens to slots?

Shares come from the function that every backend uses; slots from the kernel of the block table, of which there are two:
one for a single group of caches, and one for all groups at once, which is asked about one group here.
"""

from __future__ import annotations

from typing import Any

import torch

from cases.dcp.local_lengths import Inputs, Outputs
from impl.dcp import vllm_modules

_PADDING = -1


def _shares(inputs: Inputs) -> torch.Tensor:
    local = vllm_modules.loader_for(inputs.slots).symbol(vllm_modules.UTILS, vllm_modules.LENGTHS)
    rank: Any = {"number": inputs.rank, "tensor": inputs.rank_tensor, "all": None}[inputs.form]
    shares: torch.Tensor = local(inputs.lengths, inputs.ranks, rank, inputs.interleave)
    return shares


def run(inputs: Inputs) -> Outputs:
    """The shares, and the slots of the kernel for one group."""
    kernel = vllm_modules.loader_for(inputs.slots).symbol(vllm_modules.SLOTS, vllm_modules.SLOT_KERNEL)
    slots = inputs.slots
    kernel.kernel[(inputs.table.shape[0] + 1,)](
        int(inputs.query_start[-1]), slots.numel(), inputs.query_start, inputs.positions,
        inputs.table, inputs.table.stride(0), slots, KV_CACHE_BLOCK_SIZE=inputs.block_size,
        TOTAL_CP_WORLD_SIZE=inputs.ranks, TOTAL_CP_RANK=inputs.rank, CP_KV_CACHE_INTERLEAVE_SIZE=inputs.interleave,
        PAD_ID=_PADDING, BLOCK_SIZE=kernel.triton_block_size,
    )  # fmt: skip
    return Outputs(_shares(inputs), slots)


def run_grouped(inputs: Inputs) -> Outputs:
    """The shares, and the slots of the kernel for all groups."""
    kernel = vllm_modules.loader_for(inputs.slots).symbol(vllm_modules.GROUPED_SLOTS, vllm_modules.GROUPED_SLOT_KERNEL)
    device = inputs.slots.device

    def of_group(value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    requests = inputs.table.shape[0]
    kernel[(1, requests + 1)](
        inputs.slots.numel(), torch.arange(requests, dtype=torch.int32, device=device), inputs.query_start,
        inputs.positions, of_group(inputs.table.data_ptr(), torch.uint64),
        of_group(inputs.table.stride(0), torch.int64), of_group(inputs.block_size, torch.int32),
        of_group(True, torch.bool), of_group(True, torch.bool), inputs.slots, inputs.slots.numel(), inputs.rank,
        CP_SIZE=inputs.ranks, CP_INTERLEAVE=inputs.interleave, PAD_ID=_PADDING, TRITON_BLOCK_SIZE=1024,
    )  # fmt: skip
    return Outputs(_shares(inputs), inputs.slots)
