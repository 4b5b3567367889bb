"""How does vLLM build the tables that captured graphs read?"""

from __future__ import annotations

from cases.dense_mla.graph_tables import Inputs, Outputs, Step
from impl.dense_mla import backend_vllm
from impl.dense_mla.decode_metadata_vllm import build, builder_attributes, serving
from impl.dense_mla.graph_tables import Returned, play


def run(inputs: Inputs) -> Outputs:
    """One builder of vLLM's, batch after batch, with the buffers of the call for those that its constructor makes."""
    buffers = inputs.buffers
    device = buffers.seq_lens.device
    loader = backend_vllm.loader(device)
    attributes = builder_attributes(inputs.world, inputs.rank, "planned", graphs=True, device=device)
    builder = backend_vllm.instance(loader, backend_vllm.BUILDER, **attributes)
    builder.kernel_block_size = inputs.block_size
    builder.paged_kv_indices, builder.paged_kv_indptr = buffers.indices, buffers.kv_indptr
    builder.paged_kv_last_page_len = buffers.seq_lens.new_ones(buffers.seq_lens.numel() + 1)
    builder.qo_indptr, builder._graph_seq_lens = buffers.qo_indptr, buffers.seq_lens
    builder._asm_dcp_verify = inputs.kernels in ("round_robin", "both")
    builder._supports_segmented_dcp_verify = inputs.kernels in ("segmented", "both")
    if builder._asm_dcp_verify:
        builder._g_kv_indptr_buf = buffers.global_indptr
    # Both names that the page size has had.
    builder._segmented_page_size = builder._dcp_verify_page_size = inputs.page_size
    if builder._supports_segmented_dcp_verify:
        builder._dcp_verify_buffers = loader.symbol(backend_vllm.MODULE, "AiterMLADCPVerifyMetadata")(
            row_lens=buffers.row_lens,
            block_table=buffers.row_pages,
            qo_indptr=buffers.row_lens.new_empty(buffers.row_lens.numel() + 1),
            page_size=inputs.page_size,
            max_kv_seq_len=buffers.row_pages.shape[1] * inputs.page_size,
        )

    def update(step: Step) -> Returned:
        several_ranks = step.batch.global_lens if inputs.world > 1 else None
        with serving(loader, []):
            made = build(builder, step.batch, step.block_table, several_ranks)
        verify = made.dcp_verify
        returned = {
            "qo_indptr": made.qo_indptr,
            "kv_indptr": made.paged_kv_indptr,
            "global_indptr": made.g_kv_indptr,
            "seq_lens": made.seq_lens,
            "indices": made.paged_kv_indices,
            "row_lens": None if verify is None else verify.row_lens,
            "row_pages": None if verify is None else verify.block_table,
        }
        return {name: tensor for name, tensor in returned.items() if tensor is not None}

    return play(inputs, update)
