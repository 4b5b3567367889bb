"""Where in vLLM does the code of decode context parallelism live, and how is it called without a server round it?

Methods of the metadata builder are called with a stand-in for the builder that has what they read: the class itself is
loaded on a bare base.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from impl.implementation import without_triton
from impl.sources import settings, vllm
from impl.sources.execution import execution_on
from impl.sources.source_tree import Substitute

UTILS = "vllm.v1.attention.backends.utils"
LENGTHS = "get_dcp_local_seq_lens"
SLOTS = "vllm.v1.worker.block_table"
SLOT_KERNEL = "ComputeSlotMappingKernel"
GROUPED_SLOTS = "vllm.v1.worker.gpu.block_table"
GROUPED_SLOT_KERNEL = "_compute_slot_mappings_kernel"
BACKEND = "vllm.v1.attention.backends.mla.rocm_aiter_mla"
BUILDER = "AiterMLAMetadataBuilder"
HELPER = "AiterMLAHelper"
COLLECTIVES = "vllm.v1.attention.ops.dcp"
CONTEXT = "vllm.model_executor.layers.attention.mla_attention"
CONTEXT_NAMES = ("build_mla_chunked_context_metadata", "reorg_kvcache")
ROCM_CONTEXT = "vllm.v1.attention.ops.rocm_aiter_mla_prefill"
ROCM_CONTEXT_NAMES = ("context_row_indices", "gather_compressed_context")

_BACKEND_BASES = "vllm.v1.attention.backend"
_BARE = "there is no server round the code"


def missing(module: str, *names: str) -> list[str]:
    """Every reason why the configured vLLM cannot provide these names, or Triton cannot run them."""
    return [*_missing(settings.vllm_path(), module, names), *without_triton()]


@functools.cache
def _missing(path: Path | None, module: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {module: names}))


def fingerprint(*modules: str) -> Callable[[], bytes]:
    """The `source` of an implementation that these modules of the configured vLLM decide."""
    return lambda: vllm.locate(settings.vllm_path()).fingerprint(modules).encode()


class _Bare:
    """Stands for a base class; its parameters say nothing here."""

    def __class_getitem__(cls, parameters: object) -> type:
        return cls


class DcpLoader(vllm.Loader):
    """A loader of its own, in which classes that only a server can fill stand on bare bases."""

    def __init__(self, source: vllm.Source, platform: vllm.Platform, execution: str) -> None:
        super().__init__(source, platform, execution)
        self._label += "_dcp"
        # vLLM's own default: synchronisations are not looked for.
        self._environment["VLLM_GPU_SYNC_CHECK"] = None
        self._substitutes["PIN_MEMORY"] = Substitute(lambda: False, "only a server's copies need pinned memory")
        for name in (
            f"{SLOTS}:VllmTritonJitKernel",
            f"{COLLECTIVES}:VllmTritonJitKernel",
            f"{BACKEND}:MLACommonDecodeMetadata",
            f"{BACKEND}:MLACommonMetadata",
        ):
            self._substitutes[name] = Substitute(lambda: _Bare, _BARE)
        self._substitutes[f"{BACKEND}:MLACommonMetadataBuilder"] = Substitute(self._builder_base, _BARE)
        self._substitutes[f"{SLOTS}:kernel_launcher"] = Substitute(lambda: lambda function: function, _BARE)

    def _builder_base(self) -> type:
        """A base of metadata builders that takes from a configuration what the builder reads, and nothing else.

        How long a block may be and still decode is found by the function of vLLM's own base.
        """
        loader = self

        class Base(_Bare):
            def __init__(
                self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: torch.device, metadata: Any,
                supports_dcp_with_varlen: bool,
            ) -> None:  # fmt: skip
                parallel = vllm_config.parallel_config
                self.vllm_config, self.device = vllm_config, device
                self.num_heads = vllm_config.heads_of_a_rank
                self.dcp_world_size = parallel.decode_context_parallel_size
                self.cp_kv_cache_interleave_size = parallel.cp_kv_cache_interleave_size
                self.q_data_type = vllm_config.model_config.dtype
                # No model's own: a context that is expanded by a fused kernel is not asked about.
                self.mla_dims = SimpleNamespace(kv_lora_rank=0, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0)
                base = loader.symbol(_BACKEND_BASES, "AttentionMetadataBuilder")
                base._init_reorder_batch_threshold(self, 1, True, supports_dcp_with_varlen)

        return Base


def loader_for(memory: torch.Tensor, arch: vllm.Architecture = "gfx950") -> vllm.Loader:
    """What loads the configured vLLM for `arch`, to run where `memory` lies: on the CPU, in Triton's interpreter."""
    return _loader(settings.vllm_path(), arch, execution_on(memory.device))


@functools.cache
def _loader(path: Path | None, arch: vllm.Architecture, execution: str) -> DcpLoader:
    return DcpLoader(vllm.locate(path), vllm.Platform(arch), execution)
