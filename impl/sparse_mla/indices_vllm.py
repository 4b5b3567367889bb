"""How are vLLM's builders of sparse MLA indices called, and is the configured vLLM one that has them?

Every builder is called as its model calls it, with the tensors of the case as they are; what it makes of them is its
own affair, and so is the memory of its answer, but for one thing: behind the used entries of a ragged list it holds
what the allocator left there, and that is replaced, so that the records of two runs can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cases.memory import INTEGER_POISON
from impl.implementation import without_triton
from impl.sources import settings, vllm
from impl.sources.execution import execution_on


def missing(module: str, *names: str) -> list[str]:
    """Every reason why the configured vLLM cannot provide these names, or Triton cannot run them."""
    return [*_missing(settings.vllm_path(), module, names), *without_triton()]


@functools.cache
def _missing(path: Path | None, module: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {module: names}))


def fingerprint(*modules: str) -> Callable[[], bytes]:
    """The `source` of an implementation that these modules of the configured vLLM decide."""
    return lambda: vllm.locate(settings.vllm_path()).fingerprint(modules).encode()


def loader_for(memory: torch.Tensor, arch: vllm.Architecture = "gfx950") -> vllm.Loader:
    """What loads the configured vLLM for `arch`, to run where `memory` lies: on the CPU, in Triton's interpreter."""
    execution = execution_on(memory.device)
    return vllm.load(vllm.locate(settings.vllm_path()), vllm.Platform(arch), execution)


def builder(module: str, name: str, memory: torch.Tensor, arch: vllm.Architecture = "gfx950") -> Callable[..., Any]:
    """The function `name` of `module`, to run where `memory` lies."""
    function: Callable[..., Any] = loader_for(memory, arch).symbol(module, name)
    return function


def without_leftovers(flat: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """`flat` with what stands behind indptr[-1] replaced, in place, by what unwritten memory of a case holds."""
    if 0 <= int(indptr[-1]) < flat.numel():
        flat[int(indptr[-1]) :].view(torch.uint8).fill_(INTEGER_POISON)
    return flat
