"""How does vLLM answer the ops of packed key-value records?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import torch

from cases.cache import kv_gather_dequant, kv_record_write
from impl.cache import vllm_modules
from impl.sources import settings, vllm
from impl.sources.execution import execution_on


def _function(name: str, module: str, encoding: str, memory: torch.Tensor) -> Any:
    execution = execution_on(memory.device)
    return _loaded(settings.vllm_path(), name, module, encoding, execution)


@functools.cache
def _loaded(path: Path | None, name: str, module: str, encoding: str, execution: str) -> Any:
    # The writer asks whether the platform is FNUZ, so that each encoding needs an architecture that has it.
    arch: Literal["gfx942", "gfx950"] = "gfx942" if encoding == "float8_e4m3fnuz" else "gfx950"
    loader = vllm.load(vllm.locate(path), vllm.Platform(arch), execution)
    return loader.symbol(module, name)


def write(inputs: kv_record_write.Inputs, module: str) -> kv_record_write.Outputs:
    """Writes with `quantize_and_insert_k_cache` of `module`."""
    function = _function(vllm_modules.WRITE, module, inputs.encoding, inputs.cache)
    function(
        inputs.k, inputs.cache, inputs.slots, block_size=inputs.cache.shape[1],
        use_fnuz=inputs.encoding == "float8_e4m3fnuz",
    )  # fmt: skip
    return kv_record_write.Outputs(inputs.cache)


def gather(inputs: kv_gather_dequant.Inputs, module: str) -> kv_gather_dequant.Outputs:
    """Gathers with `dequantize_and_gather_k_cache` of `module`; only that of V4.1 takes the length hint."""
    function = _function(vllm_modules.GATHER, module, inputs.encoding, inputs.cache)
    hint = {"max_gather_len": inputs.max_gather_len} if module == vllm_modules.V41 else {}
    function(
        inputs.out, inputs.cache, inputs.seq_lens, inputs.gather_lens, inputs.table, inputs.cache.shape[1],
        inputs.offset, use_fnuz=inputs.encoding == "float8_e4m3fnuz", **hint,
    )  # fmt: skip
    return kv_gather_dequant.Outputs(inputs.out)
