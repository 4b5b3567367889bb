"""How are the methods of vLLM's AITER MLA backend called without a server round it?

Its classes are loaded on bare bases: what their methods read is set on the instance. AITER's functions, which they import
where they call them, are handed in by the caller for the duration of the call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from impl.sources import settings, vllm
from impl.sources.execution import execution_on
from impl.sources.source_tree import Substitute

MODULE = "vllm.v1.attention.backends.mla.rocm_aiter_mla"
HELPER = "AiterMLAHelper"
BUILDER = "AiterMLAMetadataBuilder"
IMPLEMENTATION = "AiterMLAImpl"

# Bases of the classes, and what they name and no method that is called here uses.
_BARE = ("MLACommonBackend", "MLACommonImpl", "MLACommonMetadata", "MLACommonMetadataBuilder", "VllmConfig")


class _Bare:
    """A base class without anything, generic or not."""

    def __class_getitem__(cls, item: object) -> type:
        return cls


class BackendLoader(vllm.Loader):
    """A loader of its own, whose substitutes nothing else sees."""

    def __init__(self, source: vllm.Source, platform: vllm.Platform, execution: str) -> None:
        super().__init__(source, platform, execution)
        self._label += "_dense_mla"
        for name in _BARE:
            self._substitutes[f"{MODULE}:{name}"] = Substitute(lambda: _Bare, "there is no server round the backend")
        self._substitutes["gpu_sync_allowed"] = Substitute(
            lambda: contextlib.nullcontext, "it belongs to a debugging aid of a server"
        )


def missing(*names: str) -> list[str]:
    """Every reason why the configured vLLM cannot provide these names of the backend's module."""
    return list(_missing(settings.vllm_path(), names))


@functools.cache
def _missing(path: Path | None, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {MODULE: names}))


def fingerprint() -> bytes:
    """What identifies the source of the backend in the configured vLLM."""
    return vllm.locate(settings.vllm_path()).fingerprint([MODULE]).encode()


def loader(device: torch.device, arch: vllm.Architecture = "gfx950") -> BackendLoader:
    """What loads the configured vLLM's backend for `arch`, to run on `device`."""
    return _loader(settings.vllm_path(), arch, execution_on(device))


@functools.cache
def _loader(path: Path | None, arch: vllm.Architecture, execution: str) -> BackendLoader:
    return BackendLoader(vllm.locate(path), vllm.Platform(arch), execution)


def instance(loader: vllm.Loader, name: str, **attributes: object) -> Any:
    """An instance of a class of the backend whose constructor did not run, with these attributes."""
    made = object.__new__(loader.symbol(MODULE, name))
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


@contextlib.contextmanager
def aiter_is(**functions: object) -> Iterator[None]:
    """For the duration of a `with`, what `from aiter import ...` finds, installed or not."""
    stand_in = ModuleType("aiter")
    vars(stand_in).update(functions)
    before = sys.modules.get("aiter")
    sys.modules["aiter"] = stand_in
    try:
        yield
    finally:
        if before is None:
            del sys.modules["aiter"]
        else:
            sys.modules["aiter"] = before
