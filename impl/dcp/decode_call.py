"""What does every rank do in a decode over a sharded cache, whoever attends and whoever merges?"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch

from cases.dcp.combine import Mode
from cases.dcp.decode import Inputs, Outputs
from cases.dense_mla.decode_call import DecodeInputs, DecodeOutputs
from impl.dcp import collectives, combine_call, ranks
from impl.dcp.collectives import Rank, Request

# Into how many parts a rank may cut its tokens.
_SPLITS = 2

Attend = Callable[[DecodeInputs], DecodeOutputs]
Answer = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one rank holds: the queries of its heads and its part of the cache; and what all ranks know."""

    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    cache_scale: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all ranks agree on: by which modules they attend and merge, the block's length, how many requests count, and
    the rest of the call."""

    attend: str
    steps: str
    world: int
    mode: Mode
    qlen: int
    live: int
    latent: int
    scale: float


def run(attend: str, steps: str, inputs: Inputs) -> Outputs:
    """The decode, attended by `run` of one module and merged with the steps of another; a module is given by its name."""
    refuse_malformed(inputs)
    plan = Plan(attend, steps, inputs.world, inputs.mode, inputs.qlen, inputs.live, inputs.latent, inputs.scale)
    held = shards(inputs)
    if inputs.ranks == "processes":
        calls = [ranks.Call(__name__, "run_rank", (plan, shard, rank)) for rank, shard in enumerate(held)]
        answers: list[Answer] = ranks.answers(calls, inputs.query.device.type)
    else:
        answers = collectives.in_this_process([program(plan, shard, rank) for rank, shard in enumerate(held)])
    outs, lses = zip(*answers, strict=True)
    return Outputs(torch.stack(outs), torch.stack(lses))


def refuse_malformed(inputs: Inputs) -> None:
    """Raise `ValueError` for rows that are no blocks, or caches of another number of ranks."""
    rows, requests = inputs.query.shape[1], inputs.lengths.shape[0]
    if inputs.qlen < 1 or rows != requests * inputs.qlen:
        raise ValueError(f"rows={rows}: should be {requests} requests of qlen={inputs.qlen}")
    if inputs.caches.shape[0] != inputs.world:
        raise ValueError(f"caches of {inputs.caches.shape[0]} ranks: should be of {inputs.world}, as the queries are")


def shards(inputs: Inputs) -> list[Shard]:
    """What every rank holds."""
    return [
        Shard(query, cache, inputs.table, inputs.lengths, inputs.cache_scale)
        for query, cache in zip(inputs.query, inputs.caches, strict=True)
    ]


def run_rank(plan: Plan, shard: Shard, rank: int) -> Answer:
    """The same for the one rank of this process."""
    return collectives.of_this_rank(program(plan, shard, rank))


def program(plan: Plan, shard: Shard, rank: int) -> Rank[Answer]:
    """What a rank does; it returns answer and log-sum-exp of its own heads."""
    attend: Attend = importlib.import_module(plan.attend).run
    steps: Any = importlib.import_module(plan.steps)
    query = shard.query
    if plan.world > 1:
        gathered = yield Request("all_gather", query)
        query = all_heads(gathered)
    call = local_call(plan, shard, query, rank)
    part = attend(call)
    if part.lse is None:
        raise ValueError(f"{plan.attend} returned no log-sum-exp: should return one, or ranks cannot be merged")
    mine = combine_call.Shard(part.out, part.lse, call.kv_indptr.diff(), starts(plan, shard))
    out, lse, _ = yield from combine_call.program(steps, mine, rank, plan.world, plan.mode, "natural")
    own = shard.query.shape[1]
    if out.shape[1] > own:
        # After a sum that all ranks have, a rank goes on with its own heads.
        out, lse = (held[:, rank * own : (rank + 1) * own] for held in (out, lse))
    return out, lse


def starts(plan: Plan, shard: Shard) -> torch.Tensor:
    """Where the rows of every request start, and end: requests that do not count have none, so a merge leaves them out."""
    number = torch.arange(shard.lengths.shape[0] + 1, dtype=torch.int32, device=shard.lengths.device)
    return number.clamp(max=plan.live) * plan.qlen


def all_heads(gathered: torch.Tensor) -> torch.Tensor:
    """[rows, heads of all ranks, lanes], rank by rank, of all ranks' [world, rows, own heads, lanes]."""
    return gathered.movedim(0, 1).flatten(1, 2)


def local_call(plan: Plan, shard: Shard, query: torch.Tensor, rank: int) -> DecodeInputs:
    """The attention over what this rank holds: its tokens' slots, their number, and the global lengths for the block's
    order."""
    held = ((shard.lengths + plan.world - 1 - rank) // plan.world).to(torch.int32)
    page = shard.cache.shape[1]
    number = torch.arange(int(held.max()) if held.numel() else 0, device=held.device)
    counted = number < held[:, None]
    column = (number // page).clamp(max=shard.table.shape[1] - 1)
    slots = torch.where(counted, shard.table[:, column] * page + number % page, 0)
    rows, heads, _ = query.shape
    return DecodeInputs(
        query=query,
        cache=shard.cache,
        slots=slots[counted].to(torch.int32),
        kv_indptr=_offsets(held),
        qlen=plan.qlen,
        causal=True,
        scale=plan.scale,
        query_scale=torch.ones((), device=query.device),
        cache_scale=shard.cache_scale,
        out=torch.empty((rows, heads, plan.latent), dtype=torch.bfloat16, device=query.device),
        splits=_SPLITS,
        live=plan.live,
        global_indptr=_offsets(shard.lengths),
        world=plan.world,
        rank=rank,
    )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
