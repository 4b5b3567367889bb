"""Which questions do we ask: every op by name, its case space, and the inputs of each case.

An op is a name `family.what`; the rooms `cases`, `oracle` and `impl` hold a module of that name each, found by
`op_module`. Listing ops and cases imports no kernel and no kernel language.
"""

import importlib
from types import ModuleType
from typing import Literal

OPS: tuple[str, ...] = (
    "formats.cast",
    "cache.kv_record_write",
    "cache.window_record_write",
    "cache.compressed_record_write",
    "cache.compressed_slots",
    "cache.kv_gather_dequant",
    "sparse_mla.ragged_from_dense",
    "sparse_mla.decode_topk_ragged",
    "sparse_mla.prefill_topk_ragged",
    "sparse_mla.topk_to_slots",
    "sparse_mla.combine_topk_window",
    "sparse_mla.window_slots",
    "sparse_mla.ragged_to_graph_buffers",
    "sparse_mla.topk_ragged_memo",
    "sparse_mla.prefill_chunks",
    "sparse_mla.prefill_workspace",
    "sparse_mla.decode_logits_rows",
    "sparse_mla.decode_splits",
    "sparse_mla.decode",
    "sparse_mla.prefill_dispatch",
    "sparse_mla.prefill",
    "sparse_mla.prefill_chunked",
    "sparse_mla.two_segment_forward",
    "sparse_mla.inverse_rope",
    "sparse_mla.output_rows",
    "quant.mxfp8_rows",
    "quant.inverse_rope_mxfp8_rows",
    "quant.wo_a_dequant",
    "quant.wo_a_einsum",
    "quant.mxfp8_bmm",
    "dense_mla.head_counts",
    "dense_mla.pad_heads",
    "dense_mla.fold_rows",
    "dense_mla.decode_metadata",
    "dense_mla.expand_pages",
    "dense_mla.graph_tables",
    "dcp.local_lengths",
    "dcp.verify_lengths",
    "dcp.verify_pages",
    "dcp.routes",
    "dense_mla.decode",
    "dense_mla.segmented_decode",
    "dense_mla.merge_parts",
    "dense_mla.reduce_by_maps",
    "dense_mla.split_stage2",
    "dense_mla.merge_segments",
    "dense_mla.merge_prefix_suffix",
    "dcp.mask_empty_shards",
    "dcp.combine",
    "dcp.decode",
    "dense_mla.decode_plan",
    "dense_mla.prefill_plan",
    "dense_mla.staged_planner",
    "dense_mla.prefill_route",
    "dense_mla.fp8_prefill",
    "dcp.gather_context",
)


class UnknownOp(ValueError):
    """An op name that `OPS` does not hold; the message lists the names that it does."""


def op_module(room: Literal["cases", "oracle", "impl"], op: str) -> ModuleType:
    """The module of `op` in `room`; raises `UnknownOp` for a name that is not in `OPS`."""
    if op not in OPS:
        raise UnknownOp(f"unknown op {op!r}: known ops are {', '.join(OPS)}")
    return importlib.import_module(f"{room}.{op}")


def ops_named(name: str) -> tuple[str, ...]:
    """The ops that `name` selects: an op itself, or all ops of a family; raises `UnknownOp` when there is none."""
    chosen = tuple(op for op in OPS if name in (op, op.partition(".")[0]))
    if not chosen:
        families = sorted({op.partition(".")[0] for op in OPS})
        raise UnknownOp(
            f"unknown op {name!r}: known ops are {', '.join(OPS)}; known families are {', '.join(families)}"
        )
    return chosen
