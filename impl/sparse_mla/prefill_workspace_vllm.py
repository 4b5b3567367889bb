"""What does vLLM's sparse attention layer ask of its workspace pool, in the warm-up and in steps?

The layer's own methods run, on tensors without memory; the kernels between them do nothing, since only what is asked of
the pool is of interest. Nothing is repaired: what a locked pool refuses, it refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from cases.sparse_mla.prefill_workspace import Inputs, Outputs
from impl.sources import vllm
from impl.sparse_mla import layer_vllm
from impl.sparse_mla.prefill_workspace import Ask, answer_of

_META = torch.device("meta")
_MODEL = layer_vllm.V41
_KERNELS = ("dequantize_and_gather_k_cache", "rocm_sparse_attn_prefill", "rocm_inverse_rope_mxfp8_rows")
_MARK = 256


def run(inputs: Inputs) -> Outputs:
    """The pool's life with vLLM's layers and vLLM's pool."""
    loader = layer_vllm.loader(inputs.arch, inputs.ratios.device)
    calls: list[Ask] = []
    starts: list[list[int]] = []
    needed: list[int] = []
    granted: list[bool] = []
    with layer_vllm.serving(loader, _MODEL, _META, None) as pool, _idle(loader):
        layers = [_layer(loader, inputs, ratio) for ratio in inputs.ratios.tolist()]

        def ask(call: Any, *arguments: object) -> None:
            pool.asked, pool.given = [], []
            try:
                call(*arguments)
                granted.append(True)
            except AssertionError as error:
                if "locked" not in str(error):
                    raise
                granted.append(False)
            shapes = [shape for shape, _ in pool.asked[0]] if pool.asked else []
            views = pool.given if granted[-1] else []
            calls.append(_named(inputs, shapes))
            starts.append(_starts(inputs, views))
            needed.append(sum(-(-_bytes(shape, dtype) // _MARK) * _MARK for shape, dtype in sum(pool.asked, ())))

        for layer in layers:
            query = _query(inputs, inputs.max_batched)
            ask(layer.forward_mqa, query, query, None, _output(loader, inputs, inputs.max_batched))
        pool.manager.lock()
        for number, tokens in zip(inputs.layers.tolist(), inputs.tokens.tolist(), strict=True):
            ask(_step, layers[number], _query(inputs, tokens), inputs.arch == "gfx950")
    return answer_of(calls, starts, needed, granted)


def _layer(loader: vllm.Loader, inputs: Inputs, ratio: int) -> Any:
    return layer_vllm.layer(
        loader, _MODEL, PREFILL_CHUNK_SIZE=inputs.chunk_size, compress_ratio=ratio, max_model_len=inputs.max_len,
        window_size=inputs.window, max_num_batched_tokens=inputs.max_batched, n_local_heads=inputs.heads,
        head_dim=inputs.lanes, nope_head_dim=inputs.lanes, rope_head_dim=0, scale=1.0, attn_sink=None,
        rotary_emb=SimpleNamespace(cos_sin_cache=None), _use_aiter_sparse_mla=not inputs.gathers,
        topk_indices_buffer=torch.empty(1, 1, dtype=torch.int32, device=_META),
    )  # fmt: skip


@contextlib.contextmanager
def _idle(loader: vllm.Loader) -> Iterator[None]:
    """For the duration of a `with`, the layer's kernels do nothing."""
    with contextlib.ExitStack() as stack:
        for name in _KERNELS:
            stack.enter_context(loader.replaced(_MODEL[0], name, lambda *_, **__: None))
        stack.enter_context(loader.replaced(_MODEL[0], "combine_topk_swa_indices", lambda *_: (None, None)))
        yield


def _step(layer: Any, query: torch.Tensor, quantised: bool) -> None:
    """The prefill of a step: one chunk of one request, or no chunk where the layer gathers nothing."""
    tokens, window_only = query.shape[0], layer.compress_ratio == 0
    if layer._use_aiter_sparse_mla:
        layer._mxfp8_bf16_rows(tokens, query)
        return
    one = torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    window = SimpleNamespace(
        num_prefill_tokens=tokens, num_decodes=0, num_decode_tokens=0, prefill_seq_lens=one, prefill_seq_lens_cpu=one,
        prefill_gather_lens=one, query_start_loc=torch.tensor([0, tokens]), query_start_loc_cpu=torch.tensor([0, tokens]),
        block_table=table, block_size=64, get_prefill_chunk_plan=lambda **_: [(0, 1, 0, 1)],
    )  # fmt: skip
    compressed = None if window_only else SimpleNamespace(block_table=table, block_size=128)
    layer._forward_prefill(
        q=query, positions=torch.empty(tokens, device=_META), compressed_k_cache=None if window_only else query,
        swa_k_cache=query, output=None if quantised else torch.empty_like(query), attn_metadata=compressed,
        swa_metadata=window, mxfp8_out=(query, query) if quantised else None,
    )  # fmt: skip


def _query(inputs: Inputs, tokens: int) -> torch.Tensor:
    return torch.empty(tokens, inputs.heads, inputs.lanes, dtype=torch.bfloat16, device=_META)


def _output(loader: vllm.Loader, inputs: Inputs, tokens: int) -> Any:
    """What the layer's answer goes to: on gfx950 an MXFP8 activation."""
    if inputs.arch != "gfx950":
        return _query(inputs, tokens)
    width = inputs.heads * inputs.lanes
    quantised = loader.symbol(_MODEL[0], "QuantizedActivation")
    data = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=_META)
    return quantised(
        data=data, scale=torch.empty(tokens, width // 32, dtype=torch.uint8, device=_META),
        orig_dtype=torch.bfloat16, orig_shape=data.shape, quant_key=None,
    )  # fmt: skip


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _named(inputs: Inputs, shapes: list[tuple[int, ...]]) -> Ask:
    """Which of the shapes is which: the gather buffer comes first where there is one."""
    rest = list(shapes)
    gathered = rest.pop(0) if inputs.gathers and rest else None
    return Ask(gathered, rest[0] if rest else None)


def _starts(inputs: Inputs, views: list[torch.Tensor]) -> list[int]:
    starts = [int(view.storage_offset()) * view.element_size() for view in views]
    gathered = starts.pop(0) if inputs.gathers and starts else -1
    return [gathered, starts[0] if starts else -1]
