"""How does vLLM pad query heads, and which of a kernel's heads does it take?

The methods that run the kernels are called with stand-ins for them, which note the queries that they are handed and
return the answer of the case.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cases.dense_mla.pad_heads import Inputs, Outputs
from impl.dense_mla import backend_vllm
from impl.dense_mla.pad_heads import answer


def run(inputs: Inputs) -> Outputs:
    """What vLLM hands to the kernel of the target, and what it makes of the answer."""
    return _prefill(inputs) if inputs.target == "prefill" else _decode(inputs)


def _decode(inputs: Inputs) -> Outputs:
    query, out = inputs.query, inputs.kernel_out
    loader = backend_vllm.loader(query.device)
    seen: list[torch.Tensor] = []

    def decode(padded: torch.Tensor, cache: torch.Tensor, output: torch.Tensor, *tables: Any, **options: Any) -> Any:
        del cache, tables, options
        output.copy_(out)
        seen.extend((padded, output))
        return None, inputs.kernel_lse

    routes = loader.symbol(backend_vllm.MODULE, "_DCPDecodeRoute")
    round_robin = inputs.target == "round_robin"
    # What the kernel would read, and what passes through on the way to it.
    unread = dict.fromkeys(
        ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "qo_indptr", "g_kv_indptr"), 0
    )
    batch = SimpleNamespace(
        **unread, use_gluon_decode=False, use_gluon_verify=False, varlen_q_rows=None, max_qo_len=4,
        has_persistent_metadata=True, attn_out_dtype=out.dtype, cp_world_size=2, cp_rank=0, mla_num_kv_splits=1,
        dcp_route=routes.CPRR if round_robin else routes.PLAIN,
        asm_decode_num_heads=inputs.kernel_heads if round_robin else 0,
    )  # fmt: skip
    layer = backend_vllm.instance(
        loader, backend_vllm.IMPLEMENTATION, num_heads=query.shape[1], dcp_world_size=_Ranks(2), scale=1.0,
        kv_lora_rank=out.shape[-1], qk_rope_head_dim=query.shape[-1] - out.shape[-1], kv_cache_dtype="auto",
    )  # fmt: skip
    metadata = SimpleNamespace(decode=batch, causal=True, work_meta_data=None)
    cache = torch.zeros((1, 1, query.shape[-1]), dtype=torch.bfloat16, device=query.device)
    with loader.replaced(backend_vllm.MODULE, "_get_aiter_mla_decode", lambda: decode):
        taken, lse = layer.forward_mqa(query, cache, metadata, SimpleNamespace(_q_scale=None, _k_scale=None))
    return answer(inputs, seen[0], taken, lse, kernel_out=seen[1])


class _Ranks(int):
    """Several ranks, whose heads are all there already: heads times ranks are the heads."""

    def __rmul__(self, heads: int) -> int:
        return heads


def _prefill(inputs: Inputs) -> Outputs:
    query, answered = inputs.query, inputs.kernel_out
    loader = backend_vllm.loader(query.device, "gfx942" if query.dtype == torch.float8_e4m3fnuz else "gfx950")
    seen: list[torch.Tensor] = []

    def attend(padded: torch.Tensor, *arguments: Any) -> None:
        # Behind the log-sum-exp of parts; the scales follow.
        arguments[-4].copy_(answered)
        seen.append(padded)

    rows, heads, _ = query.shape
    layer = backend_vllm.instance(
        loader, backend_vllm.IMPLEMENTATION, num_heads=heads, v_head_dim=answered.shape[-1], scale=1.0,
        _fp8_prefill_one_scale=None, _mla_prefill_ps_asm_fwd=attend, _mla_reduce_v1=lambda *arguments: None,
    )  # fmt: skip
    fields = ("qo_indptr", "kv_indptr", "kv_indices", "work_indptr", "work_info_set", "max_q_len", "reduce_indptr",
              "reduce_final_map", "reduce_partial_map", "num_partial_tiles")  # fmt: skip
    metadata = SimpleNamespace(**dict.fromkeys((f"fp8_prefill_{field}" for field in fields), 0))
    out = answered.new_empty((rows, heads * answered.shape[-1]))
    layer._mla_fp8_prefill_attn(query, query, query, metadata, out)
    return answer(inputs, seen[0], out.view(rows, heads, answered.shape[-1]), None, kernel_out=out)
