"""How does vLLM expand a block table into the slots of single tokens?"""

from __future__ import annotations

from typing import Any

from cases.dense_mla.expand_pages import Inputs, Outputs
from impl.dense_mla.expand_pages import VLLM_KERNEL, VLLM_MODULE, kernel_arguments
from impl.sparse_mla import indices_vllm

_TILE = 1024


def run(inputs: Inputs) -> Outputs:
    """The launch of vLLM's metadata builder: the tiles of the longest list that the table allows, for every request."""
    kernel: Any = indices_vllm.builder(VLLM_MODULE, VLLM_KERNEL, inputs.indices)
    table = inputs.block_table
    longest = table.shape[1] * inputs.block_size + inputs.extra
    arguments: list[Any] = [inputs.indices, table, table.stride(0), table.stride(1), inputs.kv_indptr]
    options: dict[str, Any] = {"KERNEL_BLOCK_SIZE": inputs.block_size, "BLOCK_SIZE": _TILE}
    if "CLAMP_TAIL" in kernel_arguments():
        arguments.append(inputs.real_lengths)
        options["CLAMP_TAIL"] = inputs.clamped
    if inputs.graphs:
        inputs.indices.fill_(-1)
    if table.shape[0]:
        kernel[(table.shape[0], max(1, -(-longest // _TILE)))](*arguments, **options)
    return Outputs(inputs.indices)
