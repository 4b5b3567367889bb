"""Which prefills does vLLM's dense MLA backend hand to its FP8 kernels?

Its metadata builder and its layer are constructed on stand-ins for their bases, with as much of AITER as the case says that
there is. Whether the builder plans work is noted where it would begin; a prefill on the ordinary route ends in the layer's
base, and one over FP8 casts asks for the projection of its latents first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cases.dense_mla.prefill_route import ROUTES, Inputs, Outputs, Prefill
from impl.dense_mla import backend_vllm
from impl.sources import settings, vllm
from impl.sources.source_tree import Substitute

_METADATA = "AiterMLAMetadata"


class _Ended(Exception):
    """Where a prefill ended: the route's name."""


class _Builder:
    """What a base of metadata builders takes from a configuration, and the metadata that the caller holds."""

    reorder_batch_threshold = 1

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __init__(self, spec: object, layers: object, config: Any, *_: object, **__: object) -> None:
        del spec, layers
        self.num_heads, self.dcp_world_size = config.heads, 1
        self.q_data_type = config.model_config.dtype
        self.mla_dims = SimpleNamespace(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)

    def build(self, prefix: object, batch: Any, fast: bool) -> Any:
        """The metadata without anything of the backend's own."""
        del prefix, fast
        return batch.metadata


class _Layer:
    """What a base of layers takes, and its own prefill."""

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __init__(self, num_heads: int, *_: object, **__: object) -> None:
        self.num_heads, self.dcp_world_size = num_heads, 1
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 128, 64, 128

    def forward_mha(self, *_: object) -> None:
        """The ordinary route."""
        raise _Ended("ordinary")

    def kv_b_proj(self, latents: object) -> None:
        """What the other route begins with."""
        del latents
        raise _Ended("float8")


class _Loader(backend_vllm.BackendLoader):
    """The backend on these bases."""

    def __init__(self, source: vllm.Source, platform: vllm.Platform, execution: str) -> None:
        super().__init__(source, platform, execution)
        self._label += "_prefill_route"
        alone = "there is no server round the backend"
        self._substitutes[f"{backend_vllm.MODULE}:MLACommonMetadataBuilder"] = Substitute(lambda: _Builder, alone)
        self._substitutes[f"{backend_vllm.MODULE}:MLACommonImpl"] = Substitute(lambda: _Layer, alone)
        self._substitutes["rocm_aiter_ops"] = Substitute(
            lambda: SimpleNamespace(is_enabled=lambda: False), "one launch for several is not asked about"
        )


@functools.cache
def _loader(path: Path | None, arch: vllm.Architecture) -> _Loader:
    return _Loader(vllm.locate(path), vllm.Platform(arch), "interpreter")


def run(inputs: Inputs) -> Outputs:
    """The builder's and the layer's decisions on all batches."""
    loader = _loader(settings.vllm_path(), inputs.arch)
    with _serving(loader, inputs):
        for point, batch in enumerate(inputs.batches):
            inputs.out[point] = torch.tensor(_decided(loader, inputs, batch))
    return Outputs(inputs.out)


@contextlib.contextmanager
def _serving(loader: _Loader, inputs: Inputs) -> Iterator[None]:
    """For the duration of a `with`, as much of AITER as there is; the builder's plans are marks on the metadata."""
    # Whether AITER can be found is asked while the module is loaded, before the stand-in is there.
    builder = loader.symbol(backend_vllm.MODULE, backend_vllm.BUILDER)
    kernels: dict[str, object] = {"flash_attn_varlen_func": None}
    if inputs.attends:
        kernels["mla_prefill_ps_asm_fwd"] = None
    if inputs.reduces:
        kernels["mla_reduce_v1"] = None

    def marked(self: object, metadata: Any, batch: object) -> None:
        del self, batch
        metadata.fp8_prefill_qo_indptr = torch.zeros(2, dtype=torch.int32)

    with contextlib.ExitStack() as stack:
        stack.enter_context(loader.environment(VLLM_ROCM_AITER_MLA_ASM_PADDING="auto"))
        stack.enter_context(mock.patch.object(builder, "_init_fp8_prefill_ps_buffers", lambda *_: None))
        stack.enter_context(mock.patch.object(builder, "_build_fp8_prefill_ps_metadata", marked))
        stack.enter_context(
            backend_vllm.aiter_is(
                dtypes=SimpleNamespace(fp8="fp8", fp16="fp16", bf16="bf16"),
                get_mla_metadata_info_v1=lambda *_, **__: ((1, torch.int32),) * 6, **kernels,
            )
        )  # fmt: skip
        yield


def _decided(loader: _Loader, inputs: Inputs, batch: Prefill) -> tuple[int, int]:
    metadata = object.__new__(loader.symbol(backend_vllm.MODULE, _METADATA))
    metadata.decode = None
    metadata.prefill = SimpleNamespace(chunked_context=object() if batch.context else None) if batch.tokens else None
    builder = _built(loader, inputs, batch.heads)
    builder.build(0, SimpleNamespace(causal=True, metadata=metadata))
    planned = int(metadata.fp8_prefill_qo_indptr is not None)
    if not batch.tokens:
        return planned, ROUTES.index("ordinary")
    layer = loader.symbol(backend_vllm.MODULE, backend_vllm.IMPLEMENTATION)(
        batch.heads, 576, 1.0, 1, None, None, inputs.cache, None, "decoder", None
    )
    nothing = torch.empty(0)
    try:
        layer.forward_mha(*[nothing] * 4, metadata, *[nothing] * 2, nothing if batch.scaled else None)
    except _Ended as ended:
        return planned, ROUTES.index(str(ended))
    except AssertionError:
        return planned, ROUTES.index("refused")
    raise RuntimeError("the prefill ended nowhere: should be in a route of its own, or refused")


def _built(loader: _Loader, inputs: Inputs, heads: int) -> Any:
    """The builder of a layer with these heads."""
    dtype = getattr(torch, inputs.model)
    spec = SimpleNamespace(block_size=16, dtype=dtype, page_size_bytes=1 << 16, cache_dtype_str=inputs.cache)
    config = SimpleNamespace(
        heads=heads,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1),
        speculative_config=None,
        model_config=SimpleNamespace(dtype=dtype, max_model_len=512),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=512),
        cache_config=SimpleNamespace(cache_dtype=inputs.cache, num_gpu_blocks=100),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)),
    )
    return loader.symbol(backend_vllm.MODULE, backend_vllm.BUILDER)(spec, ["layer"], config, torch.device("cpu"))
