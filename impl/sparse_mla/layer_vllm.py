"""How are the methods of vLLM's sparse attention layer called without a model round it?

The class is loaded on a bare base: what its methods read is set on the instance, and what else a server would have
provided (the forward context, the workspace pool) is handed in by the caller.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from impl.sources import settings, vllm
from impl.sources.source_tree import Substitute
from impl.sparse_mla.decode import vllm_loader

V41 = ("vllm.models.deepseek_v41.amd.rocm", "DeepseekV41ROCMAiterMLAAttention")
V4 = ("vllm.models.deepseek_v4.amd.rocm", "DeepseekV4ROCMAiterMLAAttention")
WORKSPACE_MODULE = "vllm.v1.worker.workspace"
WORKSPACE_MANAGER = "WorkspaceManager"

# What the class bodies and their constructors name, and no method that is called here uses.
_BARE = (
    "DeepseekV4Attention",
    "DeepseekV41ROCMAiterMLASparseBackend",
    "DeepseekV41ROCMAiterSparseSWABackend",
    "DeepseekV41ROCMAiterSparseSWAMetadata",
    "DeepseekV41Gfx942Indexer",
    "DeepseekV41RocmMxfp4Indexer",
    "DeepseekV4ROCMAiterMLASparseBackend",
    "DeepseekV4ROCMAiterMLASparseMetadata",
    "DeepseekV4ROCMAiterSparseSWAMetadata",
    "DeepseekV4RocmMxfp4Compressor",
    "DeepseekV4RocmMxfp4Indexer",
    "DeepseekV4RocmMxfp4IndexerCache",
    "DeepseekV4FlashMLAMetadata",
    "_replace_layer_index",
)

Model = tuple[str, str]


class LayerLoader(vllm.Loader):
    """A loader of its own, whose substitutes nothing else sees. `aiter` stands for AITER's functions: whoever runs a
    layer that calls one sets it."""

    def __init__(self, source: vllm.Source, platform: vllm.Platform, execution: str) -> None:
        super().__init__(source, platform, execution)
        self._label += "_layer"
        self.aiter = SimpleNamespace()
        self._substitutes["rocm_aiter_ops"] = Substitute(lambda: self.aiter, "AITER is answered for by the caller")
        for module, _ in (V4, V41):
            for name in _BARE:
                self._substitutes[f"{module}:{name}"] = Substitute(lambda: object, "there is no model round the layer")


def missing(model: Model) -> list[str]:
    """Every reason why the configured vLLM cannot provide a model's layer or the workspace pool."""
    module, name = model
    return vllm.unsupported(settings.vllm_path(), {module: [name], WORKSPACE_MODULE: [WORKSPACE_MANAGER]})


def fingerprint(model: Model, *modules: str) -> bytes:
    """What identifies the source of a model's layer, and of further modules, in the configured vLLM."""
    return vllm.locate(settings.vllm_path()).fingerprint([model[0], *modules]).encode()


def loader(arch: vllm.Architecture, device: torch.device) -> LayerLoader:
    """What loads the layers of the configured vLLM for `arch`, to run on `device`."""
    return _loader(settings.vllm_path(), arch, vllm_loader(arch, device).execution)


@functools.cache
def _loader(path: Path | None, arch: vllm.Architecture, execution: str) -> LayerLoader:
    return LayerLoader(vllm.locate(path), vllm.Platform(arch), execution)


def layer(loader: vllm.Loader, model: Model, **attributes: object) -> Any:
    """An instance of a model's layer whose constructor did not run, with these attributes."""
    instance = object.__new__(loader.symbol(*model))
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance


class Pool:
    """vLLM's workspace pool, which notes what it is asked for and what it hands out, full of NaN."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.asked: list[tuple[tuple[tuple[int, ...], torch.dtype], ...]] = []
        self.given: list[torch.Tensor] = []

    def get_simultaneous(self, *shapes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """The views of the pool; it raises what the pool raises."""
        self.asked.append(shapes)
        self.given = self.manager.get_simultaneous(*shapes)
        for view in self.given:
            view.fill_(float("nan"))
        return self.given


@contextlib.contextmanager
def serving(loader: vllm.Loader, model: Model, device: torch.device, metadata: object) -> Iterator[Pool]:
    """For the duration of a `with`, a forward context with this metadata (None in a warm-up), and an empty pool."""
    # A machine without an accelerator has no cache to empty.
    accelerator = SimpleNamespace(empty_cache=lambda: None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(loader.environment(VLLM_DEBUG_WORKSPACE=False))
        if device.type != "cuda":
            stack.enter_context(loader.replaced(WORKSPACE_MODULE, "torch", _With(torch, accelerator=accelerator)))
        pool = Pool(loader.symbol(WORKSPACE_MODULE, WORKSPACE_MANAGER)(device))
        context = SimpleNamespace(attn_metadata=metadata)
        stack.enter_context(loader.replaced(model[0], "get_forward_context", lambda: context))
        stack.enter_context(loader.replaced(model[0], "current_workspace_manager", lambda: pool))
        yield pool


class _With:
    """A module with some of its attributes replaced."""

    def __init__(self, module: Any, **replaced: object) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
