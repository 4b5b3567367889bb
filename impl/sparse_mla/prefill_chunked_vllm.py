"""How does vLLM prefill chunk by chunk?

Its layer needs a server round it; what it does for a chunk is three public functions, called here with the layer's
arguments: gather compressed records, gather the window's, combine the indices, attend. Nothing is repaired between them.
"""

from __future__ import annotations

from typing import Any

from cases.cache.kv_record_write import LANES, NOPE
from cases.sparse_mla.prefill_call import PrefillOutputs
from cases.sparse_mla.prefill_chunked_call import Chunk, ChunkedInputs, compressed_lens_of, starts_of
from impl.cache import vllm_modules
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader
from impl.sparse_mla.prefill import VLLM_PREFILL
from impl.sparse_mla.prefill_chunked import VLLM_COMBINE
from impl.sparse_mla.prefill_driver import workspace_of


def run(inputs: ChunkedInputs) -> PrefillOutputs:
    """The functions' answer; they raise what they raise."""
    # The encodings are arguments, so that one platform serves both; on gfx942 the attention is always the Triton kernel.
    loader = vllm_loader("gfx942", inputs.query.device)
    gather = loader.symbol(vllm_modules.V41, vllm_modules.GATHER)
    combine = loader.symbol(vllm_modules.V41, VLLM_COMBINE)
    attend = loader.symbol(VLLM_MODULE, VLLM_PREFILL)
    base = int(inputs.query_start[inputs.decodes])
    topk = inputs.topk[base:] if inputs.topk is not None else inputs.query_start.new_zeros((inputs.query.shape[0], 1))
    starts = starts_of(inputs)
    for chunk in inputs.chunks:
        rows = slice(starts[chunk.first], starts[chunk.last])
        own = slice(chunk.first, chunk.last)
        _gather(inputs, chunk, gather)
        indices, lengths = combine(
            topk[rows],
            inputs.query_start[inputs.decodes + chunk.first : inputs.decodes + chunk.last + 1],
            inputs.seq_lens[own],
            inputs.gather_lens[own],
            inputs.window,
            inputs.ratio,
            topk.shape[1] if inputs.topk is not None else 0,
            chunk.rows,
            chunk.compressed_rows,
        )
        attend(
            q=inputs.query[rows], kv=workspace_of(inputs, chunk).flatten(0, 1)[:, None], indices=indices,
            topk_length=lengths, scale=inputs.scale, head_dim=LANES, nope_head_dim=NOPE, rope_head_dim=LANES - NOPE,
            attn_sink=inputs.sink, output=inputs.out[rows],
        )  # fmt: skip
    return PrefillOutputs(inputs.out)


def _gather(inputs: ChunkedInputs, chunk: Chunk, gather: Any) -> None:
    own = slice(chunk.first, chunk.last)
    batch = slice(inputs.decodes + chunk.first, inputs.decodes + chunk.last)
    out = workspace_of(inputs, chunk)
    if inputs.compressed_cache is not None:
        compressed = inputs.compressed_cache
        gather(
            out, compressed.cache, seq_lens=compressed_lens_of(inputs)[own], gather_lens=None,
            block_table=compressed.table[batch], block_size=compressed.cache.shape[1], offset=0,
            use_fnuz=compressed.encoding == "float8_e4m3fnuz", max_gather_len=chunk.compressed_rows,
        )  # fmt: skip
    window = inputs.window_cache
    gather(
        out, window.cache, seq_lens=inputs.seq_lens[own], gather_lens=inputs.gather_lens[own],
        block_table=window.table[batch], block_size=window.cache.shape[1], offset=chunk.compressed_rows,
        use_fnuz=window.encoding == "float8_e4m3fnuz",
    )  # fmt: skip
