"""How do the ranks of a group exchange tensors: all of them in this process, or a process each?

What a rank does is a generator: it yields a `Request` and is resumed with what the collective gives it, until it returns
its answer. `in_this_process` resumes all ranks in turn and does the collective's work itself; `of_this_rank` stands in one
of several processes and asks torch.distributed. So the algebra of a rank is written once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as distributed

Collective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]


class Request(NamedTuple):
    """What a rank asks of its group.

    all_gather: every rank's tensor, stacked. all_reduce: the sum of all. reduce_scatter: this rank's run of dimension 1 of
    the sum. all_to_all: entry q of the tensor goes to rank q, and what the others sent here comes back, stacked. Sums have
    the tensors' dtype and are rounded to it after every addition; their order is that of the ranks in this process, and
    the library's own between processes.
    """

    collective: Collective
    tensor: torch.Tensor


T = TypeVar("T")
Rank = Generator[Request, torch.Tensor, T]


def in_this_process(ranks: Sequence[Rank[T]]) -> list[T]:
    """What every rank returns; all of them ask for the same collectives in the same order."""
    answers: list[T] = []
    given: list[torch.Tensor | None] = [None] * len(ranks)
    while not answers:
        asked: list[Request] = []
        for rank, value in zip(ranks, given, strict=True):
            try:
                asked.append(next(rank) if value is None else rank.send(value))
            except StopIteration as stop:
                answers.append(cast(T, stop.value))
        if (asked and answers) or len({request.collective for request in asked}) > 1:
            raise RuntimeError("the ranks of a group did not ask for the same collectives")
        if asked:
            given = list(_exchanged(asked))
    return answers


def _exchanged(asked: Sequence[Request]) -> Sequence[torch.Tensor]:
    tensors = [request.tensor for request in asked]
    world = len(tensors)
    collective = asked[0].collective
    if collective == "all_gather":
        return [torch.stack(tensors)] * world
    if collective == "all_to_all":
        return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(world)]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    if collective == "all_reduce":
        return [total.clone() for _ in tensors]
    return list(total.chunk(world, dim=1))


def of_this_rank(rank: Rank[T]) -> T:
    """What the rank of this process returns; the default group of torch.distributed is the group."""
    given: torch.Tensor | None = None
    while True:
        try:
            request = next(rank) if given is None else rank.send(given)
        except StopIteration as stop:
            return cast(T, stop.value)
        given = _collected(request)


def _collected(request: Request) -> torch.Tensor:
    tensor, world = request.tensor.contiguous(), distributed.get_world_size()
    # A collective of no elements has nothing to say, and some libraries refuse it.
    if request.collective == "all_gather":
        stacked = tensor.new_empty((world, *tensor.shape))
        if tensor.numel():
            distributed.all_gather(list(stacked.unbind()), tensor)
        return stacked
    if request.collective == "all_to_all":
        received = torch.empty_like(tensor)
        if tensor.numel():
            distributed.all_to_all_single(received, tensor)
        return received
    if request.collective == "all_reduce":
        total = tensor.clone()
        if tensor.numel():
            distributed.all_reduce(total)
        return total
    runs = tensor.movedim(1, 0).contiguous()
    own = runs.new_empty((runs.shape[0] // world, *runs.shape[1:]))
    if tensor.numel():
        _reduce_scatter()(own, runs)
    return own.movedim(0, 1).contiguous()


def _reduce_scatter() -> Any:
    """torch's own, under the name that it has in this version."""
    return getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
