"""Which rows do vLLM's attention layers for V4 and V4.1 turn, and what do their forward passes leave of a batch?

The layer's forward method runs as it is, with attention kernels that store nothing but the case's rows: vLLM's own code
decides who turns what, and its own Triton kernels do it. Nothing is repaired. What decode reports as turned is the word of
vLLM's decode wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from cases.sparse_mla.output_rows import LANES, ROPE, Inputs, Outputs
from impl.sparse_mla import layer_vllm
from impl.sparse_mla.decode import VLLM_MODULE
from impl.sparse_mla.output_rows import settled

_TURNS = ("rocm_inverse_rope_rows_", "rocm_inverse_rope_mxfp8_rows")
_WINDOW, _COMPRESSED = "window", "compressed"


def run(inputs: Inputs, model: str) -> Outputs:
    """What the forward pass of the layer of `V4` or `V41` leaves, and how many rows it handed to its rotations."""
    device, layer_of = inputs.rows.device, getattr(layer_vllm, model)
    loader = layer_vllm.loader(inputs.arch, device)
    metadata = None if inputs.warm_up else _metadata(inputs)
    with layer_vllm.serving(loader, layer_of, device, metadata), _attention(loader, layer_of[0]) as counted:
        layer = _layer(loader, layer_of, inputs)
        output: Any = inputs.rows
        if inputs.codes is not None:
            output = loader.symbol(layer_of[0], "QuantizedActivation")(
                data=inputs.codes, scale=inputs.scales, orig_dtype=torch.bfloat16, orig_shape=inputs.codes.shape,
                quant_key=None,
            )  # fmt: skip
        layer.forward_mqa(inputs.rows, inputs.rows, inputs.positions, output)
    return settled(inputs, sum(counted))


def _layer(loader: layer_vllm.LayerLoader, model: layer_vllm.Model, inputs: Inputs) -> Any:
    """The layer with whatever either model's methods read. V4's compressed cache has a ratio of 128, and of V4's layers
    those without one have a ratio of 1."""
    ratios = (0, 2) if model == layer_vllm.V41 else (1, 128)
    nothing = torch.empty(1, 1, dtype=torch.int32, device=inputs.rows.device)
    cache = torch.zeros(1, 1, 584, dtype=torch.uint8, device=inputs.rows.device)
    return layer_vllm.layer(
        loader, model, PREFILL_CHUNK_SIZE=4, compress_ratio=ratios[not inputs.window_only], max_model_len=64, window_size=8,
        max_num_batched_tokens=inputs.rows.shape[0] + 1, n_local_heads=inputs.heads, head_dim=LANES,
        nope_head_dim=LANES - ROPE, rope_head_dim=ROPE, scale=1.0, attn_sink=nothing[0].float(),
        rotary_emb=SimpleNamespace(cos_sin_cache=inputs.cos_sin), _use_aiter_sparse_mla=inputs.decode == "in_place",
        topk_indices_buffer=nothing, kv_cache_dtype="fp8_ds_mla", _has_kv_transfer=False,
        compressed_cache_prefix=None if inputs.window_only else _COMPRESSED, prefix=_COMPRESSED, kv_cache=cache,
        max_image_tokens=0, _wo_a_fp8_weight=nothing if inputs.turns_later else None,
        swa_cache_layer=SimpleNamespace(prefix=_WINDOW, kv_cache=cache), _compressed_kv_cache=lambda: cache,
        _decode_topk_ragged=lambda **_: (nothing[0], nothing[0], nothing[0]),
        _prefill_topk_ragged=lambda *_: (nothing[0], nothing[0]),
    )  # fmt: skip


def _metadata(inputs: Inputs) -> dict[str, object]:
    """One request per decode token; prefill in two requests, each a chunk of its own."""
    decodes, tokens = inputs.decode_tokens, inputs.rows.shape[0]
    ends = sorted({decodes + (tokens - decodes + 1) // 2, tokens} - {decodes})
    starts = torch.tensor([*range(decodes + 1), *ends])
    one = torch.ones(len(ends), dtype=torch.int32)
    table = torch.zeros(decodes + len(ends), 1, dtype=torch.int32)
    window = SimpleNamespace(
        num_decodes=decodes, num_prefills=len(ends), num_decode_tokens=decodes, num_prefill_tokens=tokens - decodes,
        prefill_seq_lens=one, prefill_seq_lens_cpu=one, prefill_gather_lens=one, query_start_loc=starts,
        query_start_loc_cpu=starts, block_table=table, block_size=64,
        get_prefill_chunk_plan=lambda **_: [(chunk, chunk + 1, 0, 1) for chunk in range(len(ends))],
        decode_swa_indices=table, decode_swa_lens=one, decode_swa_ragged_indices=one, decode_swa_ragged_indptr=one,
        prefill_swa_ragged_indices=one, prefill_swa_ragged_indptr=one, is_valid_token=starts, token_to_req_indices=one,
        seq_lens=one, prefill_left_visible=None, prefill_right_visible=None,
    )  # fmt: skip
    compressed = SimpleNamespace(
        block_table=table, block_size=128, for_cudagraph_capture=False, c128a_global_decode_topk_indices=None,
        c128a_decode_topk_lens=one, c128a_decode_topk_ragged_indices=one, c128a_decode_topk_ragged_indptr=one,
        c128a_prefill_topk_indices=table,
    )  # fmt: skip
    return {_WINDOW: window, _COMPRESSED: None if inputs.window_only else compressed}


@contextlib.contextmanager
def _attention(loader: layer_vllm.LayerLoader, module: str) -> Iterator[list[int]]:
    """For the duration of a `with`, every attention kernel answers with its query rows, which are the case's rows, and
    the rows handed to a rotation are counted."""
    counted: list[int] = []

    def prefill(*, q: torch.Tensor, output: torch.Tensor, **_: object) -> None:
        output.copy_(q)

    def decode(*, q: torch.Tensor, out: torch.Tensor | None, out_mxfp8: object = None, **_: object) -> torch.Tensor:
        # With an MXFP8 output, the case's codes and scales are what the reduction stored.
        if out is not None and out_mxfp8 is None:
            out.copy_(q)
        return q

    def in_place(q: torch.Tensor, _cache: object, output: torch.Tensor, *_: object, **__: object) -> None:
        output.copy_(q)

    def counting(turn: Any) -> Any:
        def counted_turn(rows: torch.Tensor, *arguments: object) -> None:
            counted.append(rows.shape[0])
            turn(rows, *arguments)

        return counted_turn

    with contextlib.ExitStack() as stack:
        stack.enter_context(loader.replaced(module, "dequantize_and_gather_k_cache", lambda *_, **__: None))
        stack.enter_context(loader.replaced(module, "combine_topk_swa_indices", lambda *_, **__: (None, None)))
        stack.enter_context(loader.replaced(module, "build_prefill_topk_ragged_indices", lambda *_, **__: (None, None)))
        stack.enter_context(loader.replaced(module, "rocm_sparse_attn_prefill", prefill))
        stack.enter_context(loader.replaced(VLLM_MODULE, "_rocm_sparse_attn_decode_triton", decode))
        for name in _TURNS:
            # V4's module has no MXFP8 output.
            if name in loader.tree.module(module).bindings:
                stack.enter_context(loader.replaced(module, name, counting(loader.symbol(module, name))))
        loader.aiter.triton_sparse_mla_fwd = in_place
        yield counted
