"""How do vLLM's attention layers remember ragged top-k lists?

Layer objects whose constructor did not run are given what their methods read: each other, the shared buffer, and the
step's metadata. Memo and builders are vLLM's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cases.sparse_mla.topk_ragged_memo import Ask, Inputs, Layer, Outputs
from impl.sparse_mla import layer_vllm
from impl.sparse_mla.topk_ragged_memo import Lists, play


def run(inputs: Inputs) -> Outputs:
    """The script, played by layers of vLLM's class."""
    loader = layer_vllm.loader("gfx950", inputs.buffer.device)
    layers: dict[str, Any] = {}

    def prefix(number: int) -> str:
        return f"model.layers.{number}.attn"

    def built(layer: Layer) -> Any:
        return layer_vllm.layer(
            loader,
            layer_vllm.V41,
            prefix=prefix(layer.number),
            compress_ratio=inputs.caches[layer.cache].ratio,
            compressed_cache_prefix=f"cache.{layer.cache}",
            topk_indices_buffer=inputs.buffer,
            max_model_len=inputs.max_model_len,
            _index_source_prefix=prefix(layer.source),
            _static_forward_context=layers,
            _topk_ragged_cache={},
            _prefill_topk_ragged_cache={},
        )

    for layer in inputs.layers:
        layers[prefix(layer.number)] = built(layer)

    def used(ask: Ask) -> Lists:
        layer, step = inputs.layers[ask.layer], inputs.steps[ask.step]
        cache = inputs.caches[layer.cache]
        window = SimpleNamespace(
            token_to_req_indices=step.token_to_request, is_valid_token=step.valid, query_start_loc=step.query_start,
            seq_lens=step.seq_lens, num_decode_tokens=step.decode_tokens,
            num_prefill_tokens=step.valid.numel() - step.decode_tokens,
        )  # fmt: skip
        batch = SimpleNamespace(block_table=step.tables[cache.table], block_size=inputs.block_size)
        asked = layers[prefix(layer.number)]
        if ask.part == "decode":
            flat, indptr, lengths = asked._decode_topk_ragged(window, batch, step.decode_requests, step.decode_tokens)
            return flat, indptr, lengths
        # Of the cache, its number of rows is asked for.
        rows = torch.empty((cache.blocks, inputs.block_size // cache.ratio, 0), dtype=torch.uint8)
        flat, indptr = asked._prefill_topk_ragged(window, batch, rows)
        return flat, indptr, flat.new_empty(0)

    return play(inputs, used)
