"""What does every rank do in a merge, whoever computes: which collectives, in which order, with what in between?"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Protocol

import torch

from cases.dcp.combine import Base, Inputs, Mode, Outputs
from impl.dcp import collectives, ranks
from impl.dcp.collectives import Rank, Request


class Steps(Protocol):
    """What an implementation computes on a rank; the modules of the routes are such.

    empty: uint8 [rows], 1 where the lengths say that this rank had no key, or None.
    """

    def scaled(self, out: torch.Tensor, lses: torch.Tensor, rank: int, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share [rows, heads, lanes] and the log-sum-exp of all ranks, from all ranks' [world, rows, heads]."""

    def packed(self, out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor | None, world: int) -> torch.Tensor:
        """The messages [world, rows, own heads, lanes and log-sum-exp] in the answer's dtype."""

    def merged(self, received: torch.Tensor, lanes: int, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
        """Answer and log-sum-exp of the own heads, from the messages of all ranks."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one rank holds: its answer for all heads, the log-sum-exps, its local lengths and the row offsets."""

    out: torch.Tensor
    lse: torch.Tensor
    lengths: torch.Tensor | None
    starts: torch.Tensor | None


Answer = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def run(steps: Any, inputs: Inputs) -> Outputs:
    """The merge with the steps of a route, in this process or in one for each rank."""
    shards = [
        Shard(out, lse, None if inputs.local_lengths is None else inputs.local_lengths[rank], inputs.query_start)
        for rank, (out, lse) in enumerate(zip(inputs.outs, inputs.lses, strict=True))
    ]
    refuse_malformed(inputs)
    world = inputs.world
    if inputs.ranks == "processes":
        calls = [
            ranks.Call(__name__, "run_rank", (steps.__name__, shard, rank, world, inputs.mode, inputs.base))
            for rank, shard in enumerate(shards)
        ]
        answers: list[Answer] = ranks.answers(calls, inputs.outs.device.type)
    else:
        answers = collectives.in_this_process(
            [program(steps, shard, rank, world, inputs.mode, inputs.base) for rank, shard in enumerate(shards)]
        )
    outs, lses, sent = zip(*answers, strict=True)
    messages = [message for message in sent if message is not None]
    return Outputs(torch.stack(outs), torch.stack(lses), torch.stack(messages) if messages else None)


def run_rank(steps: str, shard: Shard, rank: int, world: int, mode: Mode, base: Base) -> Answer:
    """The same for the one rank of this process."""
    return collectives.of_this_rank(program(importlib.import_module(steps), shard, rank, world, mode, base))


def program(steps: Steps, shard: Shard, rank: int, world: int, mode: Mode, base: Base) -> Rank[Answer]:
    """What a rank does; it returns its answer, its log-sum-exp and the bits that it sent, if any."""
    if world == 1:
        return shard.out, shard.lse, None
    rows, heads, lanes = shard.out.shape
    empty = empty_rows(rows, shard.lengths, shard.starts)
    if mode == "all_to_all":
        sent = steps.packed(shard.out, shard.lse, empty, world)
        received = yield Request("all_to_all", sent)
        out, lse = steps.merged(received, lanes, base)
        return out, lse, sent.view(torch.int16 if sent.element_size() == 2 else torch.int32)
    lse = shard.lse
    if empty is not None:
        lse = lse.masked_fill(empty.bool()[:, None], float("-inf"))
    gathered = yield Request("all_gather", lse)
    share, lse = steps.scaled(shard.out, gathered, rank, base)
    if mode == "all_gather_all_reduce":
        out = yield Request("all_reduce", share)
        return out, lse, None
    out = yield Request("reduce_scatter", share)
    own = heads // world
    return out, lse[:, rank * own : (rank + 1) * own], None


def empty_rows(rows: int, lengths: torch.Tensor | None, starts: torch.Tensor | None) -> torch.Tensor | None:
    """uint8 [rows]: 1 where a rank with these local lengths has no key, and behind the last request."""
    if lengths is None or starts is None:
        return None
    if not lengths.numel():
        return torch.ones(rows, dtype=torch.uint8, device=starts.device)
    row = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    request = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=lengths.numel() - 1)
    return ((lengths[request] == 0) | (row >= starts[-1])).to(torch.uint8)


def refuse_malformed(inputs: Inputs) -> None:
    """Raise `ValueError` for heads that the ranks cannot share, a dtype that no message has, or lengths without offsets."""
    world, heads = inputs.world, inputs.outs.shape[2]
    if heads % world:
        raise ValueError(f"heads={heads}: should be a multiple of world={world}")
    if inputs.outs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype of outs={inputs.outs.dtype}: should be bfloat16, float16 or float32")
    if (inputs.local_lengths is None) != (inputs.query_start is None):
        raise ValueError("local_lengths and query_start should be given together")
