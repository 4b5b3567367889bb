"""How does vLLM gather a chunk of context from all ranks?

The chunk's metadata come from the function that plans chunks, which is given this chunk instead of a plan of its own;
each rank's rows are gathered by the function that keeps them compressed. The gather from a cache is part of vLLM's
compiled extension and is done by torch here, and so is the exchange between ranks: the first pass over the ranks notes
what each one sends.
"""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import torch

from cases.dcp.gather_context import Inputs, Outputs
from impl.dcp import vllm_modules
from impl.sources import vllm


def run(inputs: Inputs) -> Outputs:
    """The answer of vLLM's functions; where no request has a context it plans nothing, and there is nothing to gather."""
    loader = vllm_modules.loader_for(inputs.workspace)
    chunk = _chunk(loader, inputs)
    if chunk is None:
        requests = len(inputs.contexts)
        none = torch.zeros(requests, dtype=torch.int64)
        rows = torch.empty(0, dtype=torch.int32, device=inputs.workspace.device)
        return Outputs(none, none.clone(), rows, inputs.workspace, inputs.workspace[:0].clone())
    sent = [_sent(loader, inputs, chunk, cache) for cache in inputs.caches]
    with contextlib.ExitStack() as stack:
        ops = SimpleNamespace(cp_gather_cache=_gather_from_cache)
        stack.enter_context(loader.replaced(vllm_modules.ROCM_CONTEXT, "ops", ops))
        gathered = _symbol(loader, "gather_compressed_context")(
            inputs.caches[inputs.rank], inputs.workspace, inputs.table, chunk,
            lambda whole, own: whole.copy_(torch.cat(sent)), inputs.workspace.dtype,
        )  # fmt: skip
        rows = _symbol(loader, "context_row_indices")(chunk, inputs.workspace.device)
    # The latent part and the rotated part of a row: any cut will do.
    latent = inputs.workspace.shape[1] // 2
    parts = loader.symbol(vllm_modules.CONTEXT, "reorg_kvcache")(
        *gathered.unsqueeze(1).split([latent, inputs.workspace.shape[1] - latent], dim=-1),
        padded_local_chunk_seq_lens_lst=chunk.padded_local_seq_lens,
        local_context_lens_allranks=chunk.local_context_lens_allranks,
        local_starts=chunk.local_starts,
        sum_seq_len=chunk.num_context_tokens,
        max_seq_len=chunk.max_seq_len,
        toks=chunk.num_local_context_tokens,
    )
    return Outputs(
        padded=torch.tensor(chunk.padded_local_seq_lens, dtype=torch.int64),
        local_starts=torch.tensor(chunk.local_starts, dtype=torch.int64),
        rows=rows,
        workspace=inputs.workspace,
        context=torch.cat(parts, dim=-1).squeeze(1),
    )


def _symbol(loader: vllm.Loader, name: str) -> Any:
    return loader.symbol(vllm_modules.ROCM_CONTEXT, name)


def _chunk(loader: vllm.Loader, inputs: Inputs) -> Any:
    """The metadata of the chunk, or None where no request has a context."""
    plan = loader.symbol(vllm_modules.CONTEXT, "_ContextChunkPlan")(
        request_start=0, request_end=len(inputs.contexts), starts=list(inputs.starts), seq_lens=list(inputs.lengths),
        is_continuation=any(inputs.starts),
    )  # fmt: skip
    queries = list(itertools.accumulate([1] * len(inputs.contexts), initial=0))
    capacity = inputs.workspace.shape[0] // (inputs.ranks + 1) * inputs.ranks
    with loader.replaced(vllm_modules.CONTEXT, "plan_mla_context_chunks", lambda *_: [plan]):
        metadata = loader.symbol(vllm_modules.CONTEXT, "build_mla_chunked_context_metadata")(
            context_lens_cpu=torch.tensor(inputs.contexts, dtype=torch.int32),
            prefill_query_start_loc_cpu=torch.tensor(queries, dtype=torch.int32),
            chunked_prefill_workspace=inputs.workspace,
            chunked_prefill_workspace_size=capacity,
            block_size=inputs.block_size,
            align_chunk_to_block=True,
            device=inputs.workspace.device,
            dcp_world_size=inputs.ranks,
            dcp_local_block_size=inputs.interleave,
            dcp_virtual_block_size=inputs.interleave * inputs.ranks,
        )
    return None if metadata is None else metadata.chunks[0]


def _sent(loader: vllm.Loader, inputs: Inputs, chunk: Any, cache: torch.Tensor) -> torch.Tensor:
    """What one rank sends, as bytes."""
    ops = SimpleNamespace(cp_gather_cache=_gather_from_cache)
    own: list[torch.Tensor] = []
    with loader.replaced(vllm_modules.ROCM_CONTEXT, "ops", ops):
        _symbol(loader, "gather_compressed_context")(
            cache, torch.empty_like(inputs.workspace), inputs.table, chunk,
            lambda whole, local: own.append(local.clone()), inputs.workspace.dtype,
        )  # fmt: skip
    return own[0]


def _gather_from_cache(
    cache: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    bounds: torch.Tensor,
    requests: int,
    starts: torch.Tensor,
) -> None:
    """Rows bounds[r] to bounds[r + 1] of `out` become the rows of request r from starts[r] on."""
    for request in range(requests):
        first, end = int(bounds[request]), int(bounds[request + 1])
        index = int(starts[request]) + torch.arange(end - first, device=cache.device)
        block = table[request].long()[index // cache.shape[1]]
        out[first:end] = cache[block, index % cache.shape[1]]
