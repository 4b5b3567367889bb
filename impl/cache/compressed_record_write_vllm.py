"""How does vLLM answer the writer of compressed records?"""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any, Literal

import torch

from cases.cache.compressed_record_write import Inputs
from impl.cache.compressed_record_write import COMPRESS, INSERT, V4, V41
from impl.sources import settings, vllm
from impl.sources.execution import execution_on

# Added to the mean square of a row, 2^60 makes its reciprocal root 2^-30 whatever the row; the weights take that back.
_EPSILON = 2.0**60
_WEIGHT = 2.0**30
_LANES = 512


def _function(inputs: Inputs, module: str, name: str) -> Any:
    execution = execution_on(inputs.cache.device)
    return _loaded(settings.vllm_path(), module, name, inputs.zero_nans, execution)


@functools.cache
def _loaded(path: Path | None, module: str, name: str, zero_nans: bool, execution: str) -> Any:
    # Only on gfx950 does the writer turn NaN into 0.
    arch: Literal["gfx942", "gfx950"] = "gfx950" if zero_nans else "gfx942"
    return vllm.load(vllm.locate(path), vllm.Platform(arch), execution).symbol(module, name)


def insert(inputs: Inputs) -> torch.Tensor:
    """V4.1's `rope_quant_insert`."""
    _function(inputs, V41, INSERT)(
        inputs.rows, inputs.positions, inputs.cos_sin, inputs.cache, inputs.slots, inputs.ratio
    )
    return inputs.cache


def compress(inputs: Inputs) -> torch.Tensor:
    """V4's compressor, which pools and normalises before it writes, with both set up to give the rows of the call.

    Each token is a request of its own, whose states are one block: of the group's `ratio` states the last is the row
    and has all the weight. The normalisation divides by 2^30 and its weights multiply by it.
    """
    count, ratio, device = inputs.slots.numel(), inputs.ratio, inputs.cache.device
    states = torch.zeros((count, ratio, 2 * _LANES), device=device)
    states[:, :, _LANES:] = -float("inf")
    states[:, -1, :_LANES] = inputs.rows[:count]
    states[:, -1, _LANES:] = 0.0
    request = torch.arange(count, dtype=torch.int32, device=device)
    groups = inputs.cos_sin.shape[0] // ratio
    _function(inputs, V4, COMPRESS)(
        state_cache=states, num_actual=count, token_to_req_indices=request, positions=inputs.positions,
        slot_mapping=inputs.slots, block_table=request[:, None].expand(-1, groups).contiguous(), block_size=ratio,
        state_width=_LANES, cos_sin_cache=inputs.cos_sin, kv_cache=inputs.cache,
        k_cache_metadata=types.SimpleNamespace(slot_mapping=inputs.slots), pdl_kwargs={}, head_dim=_LANES,
        rope_head_dim=64, compress_ratio=ratio, overlap=False, use_fp4_cache=False,
        rms_norm_weight=torch.full((_LANES,), _WEIGHT, device=device), rms_norm_eps=_EPSILON, quant_block=64,
        token_stride=576, scale_dim=8,
    )  # fmt: skip
    return inputs.cache
