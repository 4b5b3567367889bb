"""How is AITER's own segmented decode called?

As vLLM's verify route calls it: one query token a row, its own reduction skipped, since that returns no log-sum-exp. What it
leaves of its segments is merged by vLLM's kernel, as in production, or by ours.
"""

from __future__ import annotations

import torch

from cases.dense_mla import merge_segments
from cases.dense_mla.segmented_decode import Inputs, Outputs
from impl.dense_mla import merge_segments_triton, merge_segments_vllm
from impl.dense_mla.segmented_decode import AITER_DECODE, AITER_MODULE
from impl.dense_mla.segmented_decode_call import plain_query
from impl.sources import aiter, settings
from impl.sources.execution import Architecture, execution_on


def merged_by_vllm(inputs: Inputs) -> Outputs:
    """AITER's segments, merged by vLLM; it raises what they raise."""
    segments = _segments(inputs)
    return _shown(merge_segments_vllm.run(segments), segments)


def merged_by_us(inputs: Inputs) -> Outputs:
    """AITER's segments, merged by our kernel; it raises what AITER raises."""
    segments = _segments(inputs)
    return _shown(merge_segments_triton.run(segments), segments)


def _segments(inputs: Inputs) -> merge_segments.Inputs:
    execution = execution_on(inputs.query.device)
    arch: Architecture = "gfx942" if inputs.cache.dtype == torch.float8_e4m3fnuz else "gfx950"
    platform = aiter.Platform(arch, inputs.compute_units)
    decode = aiter.load(aiter.locate(settings.aiter_path()), platform, execution).symbol(AITER_MODULE, AITER_DECODE)
    query = plain_query(inputs)
    rows, _, lanes = query.shape
    sums, maxima, masses = decode(
        query, inputs.cache, None, torch.arange(rows + 1, dtype=torch.int32, device=query.device), inputs.lengths,
        inputs.max_length, inputs.table, inputs.scale, inputs.rank, lanes - inputs.rank, causal=True, q_descale=None,
        kv_descale=inputs.cache_scale, skip_reduce=True,
    )  # fmt: skip
    return merge_segments.Inputs(sums, maxima, masses, inputs.lengths, inputs.tile, inputs.out)


def _shown(merged: merge_segments.Outputs, segments: merge_segments.Inputs) -> Outputs:
    return Outputs(merged.out, merged.lse, segments.sums, segments.maxima, segments.masses)
