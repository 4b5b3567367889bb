"""How does vLLM write the records of the sliding window?

Both routes prepare the queries of the same tokens in the same launch; they are given queries of zeros.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from cases.cache.window_record_write import Inputs
from impl.cache.window_record_write import COMPILED, INSERT, XPU, extensions
from impl.sources import settings, vllm
from impl.sources.execution import execution_on

_EPSILON = 1e-6
# The compiled operator is built for padded head counts only, and this is the smallest of them.
_HEADS = 64


@functools.cache
def _loaded(path: Path | None, execution: str) -> Any:
    return vllm.load(vllm.locate(path), vllm.Platform("gfx950"), execution).symbol(XPU, INSERT)


def _queries(inputs: Inputs, heads: int) -> torch.Tensor:
    return torch.zeros((inputs.rows.shape[0], heads, 512), dtype=torch.bfloat16, device=inputs.rows.device)


def insert_by_triton(inputs: Inputs) -> torch.Tensor:
    """The Triton route that vLLM takes on XPU: a rotation into a tensor of its own, then the writer without rotation."""
    execution = execution_on(inputs.cache.device)
    _loaded(settings.vllm_path(), execution)(
        _queries(inputs, 1), inputs.rows, inputs.cache, inputs.slots, inputs.positions, inputs.cos_sin, _EPSILON,
        inputs.cache.shape[1],
    )  # fmt: skip
    return inputs.cache


def insert_compiled(inputs: Inputs) -> torch.Tensor:
    """The operator of the compiled extension; loading it imports nothing of vLLM's."""
    for path in extensions():
        torch.ops.load_library(str(path))
    operator = getattr(torch.ops._C, COMPILED)
    pages = inputs.cache.view(inputs.cache.shape[0], -1)
    operator(
        _queries(inputs, _HEADS), inputs.rows, pages, inputs.slots, inputs.positions, inputs.cos_sin, _HEADS, _EPSILON,
        inputs.cache.shape[1],
    )  # fmt: skip
    return inputs.cache
