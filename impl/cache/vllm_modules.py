"""Where in vLLM do the kernels of packed key-value records live, and are they there?"""

from __future__ import annotations

from impl.implementation import without_triton
from impl.sources import settings, vllm

V4 = "vllm.models.deepseek_v4.common.ops.cache_utils"
V41 = "vllm.models.deepseek_v41.common.ops.cache_utils"
WRITE = "quantize_and_insert_k_cache"
GATHER = "dequantize_and_gather_k_cache"


def missing(module: str, name: str) -> list[str]:
    """Every reason why the configured vLLM cannot provide a function, or Triton cannot run it."""
    return [*vllm.unsupported(settings.vllm_path(), {module: [name]}), *without_triton()]


def fingerprint(module: str) -> bytes:
    """What identifies the source of a module in the configured vLLM."""
    return vllm.locate(settings.vllm_path()).fingerprint([module]).encode()
