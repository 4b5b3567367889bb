"""Where in vLLM do the merges of attention parts live, are they there, and how exact is an exponential?"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from impl.implementation import Execution, without_triton
from impl.sources import settings, vllm
from impl.sources.execution import execution_on

DCP = "vllm.v1.attention.ops.dcp"
SEGMENTS = "vllm.v1.attention.ops.rocm_aiter_mla_merge"
STATES = "vllm.v1.attention.ops.merge_attn_states"
STATES_TRITON = "vllm.v1.attention.ops.triton_merge_attn_states"
DECODE = "vllm.v1.attention.ops.triton_decode_attention"


def missing(module: str, name: str, *, triton: bool = True) -> list[str]:
    """Every reason why the configured vLLM cannot provide a function, or Triton, where it is needed, cannot run it."""
    return [*_missing(settings.vllm_path(), module, name), *(without_triton() if triton else [])]


@functools.cache
def _missing(path: Path | None, module: str, name: str) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {module: [name]}))


def fingerprint(module: str) -> bytes:
    """What identifies the source of a module in the configured vLLM; empty without one."""
    path = settings.vllm_path()
    if vllm.unsupported(path, {module: []}):
        return b""
    return vllm.locate(path).fingerprint([module]).encode()


def loader(device: torch.device, arch: vllm.Architecture = "gfx950") -> vllm.Loader:
    """What loads the configured vLLM for `arch`, to run on `device`: on the CPU, in Triton's interpreter."""
    execution = execution_on(device)
    return vllm.load(vllm.locate(settings.vllm_path()), vllm.Platform(arch), execution)


def exponential_ulps(execution: Execution) -> float:
    """The error of exp, exp2, log and log2 in units of 2^-24: a device's are approximate, and exp is exp2 of a product."""
    return 2.0 if execution == "interpreter" else 8.0
