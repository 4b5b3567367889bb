"""How do vLLM's own kernels decode over a sharded cache, without its groups?

The attention of every rank is that of its Triton kernel over pages, a request a row, which serves as the fallback for
blocks; the merge is its own, as `impl.dcp.combine_vllm` calls it.
"""

from __future__ import annotations

import torch

from cases.dcp import combine
from cases.dcp.decode import Inputs, Outputs
from impl.dcp import combine_vllm, decode_call
from impl.dense_mla import decode_vllm


def run(inputs: Inputs) -> Outputs:
    """What vLLM's functions return on every rank; it raises what they raise."""
    world, _, own, _ = inputs.query.shape
    plan = decode_call.Plan("", "", world, inputs.mode, inputs.qlen, inputs.live, inputs.latent, inputs.scale)
    query = decode_call.all_heads(inputs.query)
    shards = decode_call.shards(inputs)
    calls = [decode_call.local_call(plan, shard, query, rank) for rank, shard in enumerate(shards)]
    parts = [decode_vllm.run(call) for call in calls]
    lses = [part.lse for part in parts if part.lse is not None]
    outs = torch.stack([part.out for part in parts])
    if world == 1:
        return Outputs(outs, torch.stack(lses))
    merged = combine_vllm.run(
        combine.Inputs(
            outs=outs,
            lses=torch.stack(lses),
            mode=inputs.mode,
            base="natural",
            local_lengths=torch.stack([call.kv_indptr.diff() for call in calls]),
            query_start=decode_call.starts(plan, shards[0]),
        )
    )
    out, lse = merged.out, merged.lse
    assert lse is not None
    if out.shape[2] > own:
        out, lse = (
            torch.stack([whole[:, rank * own : (rank + 1) * own] for rank, whole in enumerate(held)])
            for held in (out, lse)
        )
    return Outputs(out, lse)
