"""How does vLLM answer for the metadata of a decode batch?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from cases.dense_mla.batches import Batch
from cases.dense_mla.decode_metadata import Inputs, Outputs
from impl.dense_mla import backend_vllm

# Longer than any query block: whether a batch is planned at all is not asked here.
_LONGEST_QUERY = 1 << 10


def builder_attributes(world: int, rank: int, route: str, *, graphs: bool, device: torch.device) -> dict[str, Any]:
    """What the builder's constructor would have set on an instance, without its buffers.

    A planned route is that of 16 heads, Gluon's that of 8 over an unquantised cache; `segmented` is the one of other
    ranks that takes no round-robin kernel.
    """
    modes = SimpleNamespace(has_full_cudagraphs=lambda: graphs)
    return {
        "device": device,
        "compilation_config": SimpleNamespace(cudagraph_mode=modes),
        "dcp_world_size": world,
        "dcp_rank": rank,
        "cp_kv_cache_interleave_size": 1,
        "kernel_block_size": 1,
        "_decode_causal": True,
        "_varlen_decode_qlen": 0,
        "_decode_num_heads": 8 if route == "gluon" else 16,
        "_num_attention_heads": 16,
        "_kv_cache_dtype_str": "auto",
        "_kv_cache_bytes": None,
        "_mtp_decode_qlen": _LONGEST_QUERY,
        "_asm_dcp_verify": route == "round_robin",
        "_asm_dcp_verify_heads": 16,
        "_mla_max_split_per_batch": 256,
        "_supports_segmented_dcp_verify": route == "segmented",
        "_use_triton_dcp_verify": False,
        "_graph_seq_lens": None,
        "_g_kv_indptr_buf": None,
        "_dcp_verify_buffers": None,
        "decode_attn_out_dtype": torch.bfloat16,
        "_mla_q_dtype": torch.bfloat16,
        "_mla_kv_dtype": torch.bfloat16,
        **dict.fromkeys((
            "_mla_work_meta_data", "_mla_work_info_set", "_mla_work_indptr", "_mla_reduce_indptr",
            "_mla_reduce_final_map", "_mla_reduce_partial_map",
        )),
    }  # fmt: skip


@contextmanager
def serving(loader: backend_vllm.BackendLoader, planned: list[int]) -> Iterator[None]:
    """For the duration of a `with`, what a build looks up elsewhere; `planned` collects what the planner is told that
    every request has."""

    def plan(*_tables: object, uni_seqlen_qo: int, **_options: object) -> None:
        planned.append(uni_seqlen_qo)

    with ExitStack() as stack:
        stack.enter_context(loader.environment(VLLM_ROCM_AITER_MLA_ASM_PADDING="auto"))
        stack.enter_context(backend_vllm.aiter_is(get_mla_metadata_v1=plan))
        yield


def build(builder: Any, batch: Batch, table: torch.Tensor, lengths_of_all: torch.Tensor | None) -> Any:
    """One call of the builder; the tables of requests' blocks count one token in a block."""
    starts = torch.tensor([0, *batch.query_lens]).cumsum(0).to(torch.int32)
    return builder._build_decode(
        block_table_tensor=table,
        seq_lens_device=batch.seq_lens,
        max_seq_len=int(batch.seq_lens.max()),
        query_start_loc_cpu=starts,
        query_start_loc_device=batch.query_start,
        num_decode_tokens=batch.tokens,
        max_query_len=max(batch.query_lens),
        dcp_tot_seq_lens_device=lengths_of_all,
    )


class _NoLaunch:
    """Stands for the kernel that expands blocks, which is an op of its own."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **options: None


def run(inputs: Inputs) -> Outputs:
    """What vLLM's builder makes of a batch, and what it tells the planner."""
    batch, device = inputs.batch, inputs.batch.seq_lens.device
    count = len(batch.query_lens)
    loader = backend_vllm.loader(device)
    # The route of single tokens over several ranks is the plain one, whatever kernels there are.
    attributes = builder_attributes(inputs.world, 0, inputs.route, graphs=inputs.graphs, device=device)
    if inputs.route == "planned":
        # The tables of the plain route do not depend on the ranks.
        attributes["dcp_world_size"] = 1
    ones = batch.seq_lens.new_ones(count)
    memory = {
        name: batch.seq_lens.new_zeros(count + 1) for name in ("paged_kv_indptr", "qo_indptr", "_g_kv_indptr_buf")
    }
    builder = backend_vllm.instance(
        loader, backend_vllm.BUILDER, **(attributes | memory), paged_kv_last_page_len=ones,
        paged_kv_indices=batch.seq_lens.new_empty(0),
    )  # fmt: skip
    if inputs.graphs:
        builder._graph_seq_lens = batch.seq_lens.new_zeros(count)
    planned: list[int] = []
    table = batch.seq_lens.new_zeros((count, 1))
    round_robin = inputs.route == "round_robin"
    with (
        serving(loader, planned),
        loader.replaced(backend_vllm.MODULE, "_expand_page_indices_kernel", _NoLaunch()),
    ):
        made = build(builder, batch, table, batch.global_lens if round_robin else None)
    queries = torch.tensor(batch.query_lens)
    padded = builder._uniform_padded_mtp_qo_len(queries, int(queries.max()), batch.tokens)
    nothing = batch.seq_lens.new_empty(0)
    return Outputs(
        padded_query=torch.tensor([padded]),
        query=torch.tensor([int(made.max_qo_len)]),
        uniform=torch.tensor([int(value) for value in planned], dtype=torch.int64),
        least_kv=torch.tensor([made.min_kv_seq_len]),
        qo_indptr=made.qo_indptr,
        kernel_lens=made.seq_lens,
        kv_indptr=made.paged_kv_indptr,
        last_page_lens=made.paged_kv_last_page_len,
        global_indptr=made.g_kv_indptr if round_robin else nothing,
        global_lens=made.dcp_tot_seq_lens if round_robin else nothing,
    )
