"""Which edits of a decode over ranks have a known effect on its answer?

An edit returns fresh inputs and leaves the given ones alone. `expect` turns the first answer into the one that the edited
call must give.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch

from cases.dcp.decode import Inputs, Outputs
from cases.memory import guarded_copy
from oracle.laws import Law


def _live(inputs: Inputs) -> Inputs:
    """The call without the requests that do not count."""
    if inputs.live == inputs.lengths.shape[0]:
        return inputs
    return dataclasses.replace(
        inputs, query=guarded_copy(inputs.query[:, : inputs.live * inputs.qlen]),
        table=guarded_copy(inputs.table[: inputs.live]), lengths=guarded_copy(inputs.lengths[: inputs.live]),
    )  # fmt: skip


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    """The rows of the requests that count."""
    count = slice(0, inputs.live * inputs.qlen)
    return Outputs(first.out[:, count], None if first.lse is None else first.lse[:, count])


def _free_order(inputs: Inputs) -> bool:
    """Whether a library sums in an order of its own, which may depend on an element's place."""
    return inputs.ranks == "processes" and inputs.world > 2 and inputs.mode != "all_to_all"


def _counts(inputs: Inputs) -> list[int]:
    """Blocks of every request."""
    run = inputs.caches.shape[2] * inputs.world
    return [-(-length // run) for length in inputs.lengths.tolist()]


def _blocks_reversed(inputs: Inputs) -> Inputs:
    """Every rank's blocks lie in the reverse order, and the table follows."""
    table = guarded_copy(inputs.table)
    for row, count in zip(table, _counts(inputs), strict=True):
        row[:count] = inputs.caches.shape[1] - 1 - row[:count]
    return dataclasses.replace(inputs, caches=_stored(inputs.caches.flip(1)), table=table)


def _stored(caches: torch.Tensor) -> torch.Tensor:
    return guarded_copy(caches.contiguous(), gaps=(caches.shape[3], 0, 0))


def _table_narrowed(inputs: Inputs) -> Inputs:
    """No columns behind the longest request's last block, and nothing there behind shorter ones."""
    counts = _counts(inputs)
    table = inputs.table[:, : max([1, *counts])].clone()
    for row, count in zip(table, counts, strict=True):
        row[count:] = 0
    return dataclasses.replace(inputs, table=guarded_copy(table))


def _rest_littered(inputs: Inputs) -> Inputs:
    """Other garbage where no request has a token."""
    page, world = inputs.caches.shape[2], inputs.world
    used = torch.zeros(inputs.caches.shape[:3], dtype=torch.bool)
    for b, length in enumerate(inputs.lengths.tolist()):
        position = torch.arange(length)
        used[position % world, inputs.table[b, position // (page * world)].long(), position // world % page] = True
    litter = torch.full(inputs.caches.shape, -7.0).to(inputs.caches.dtype)
    bits = torch.uint8 if inputs.caches.element_size() == 1 else torch.int16
    kept = torch.where(used[..., None], inputs.caches.view(bits), litter.view(bits)).view(inputs.caches.dtype)
    return dataclasses.replace(inputs, caches=_stored(kept))


def _requests_reversed(inputs: Inputs) -> Inputs | None:
    if _free_order(inputs):
        return None
    query = inputs.query.unflatten(1, (-1, inputs.qlen)).flip(1).flatten(1, 2)
    return dataclasses.replace(
        inputs, query=guarded_copy(query), table=guarded_copy(inputs.table.flip(0)),
        lengths=guarded_copy(inputs.lengths.flip(0)),
    )  # fmt: skip


def _turned(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    def turned(held: torch.Tensor) -> torch.Tensor:
        blocks: torch.Tensor = held.unflatten(1, (-1, inputs.qlen))
        return blocks.flip(1).flatten(1, 2)

    return Outputs(turned(first.out), None if first.lse is None else turned(first.lse))


def _resharded(inputs: Inputs, world: int) -> Inputs:
    """The same tokens on another number of ranks, with as many heads in all; blocks are those of the old ranks' tokens."""
    # Place j of rank r is position j * world + r of a block.
    positions = inputs.caches.movedim(0, 2).flatten(1, 2)
    caches = positions.unflatten(1, (-1, world)).movedim(2, 0)
    query = inputs.query.movedim(0, 1).flatten(1, 2).unflatten(1, (world, -1)).movedim(1, 0)
    return dataclasses.replace(inputs, caches=_stored(caches), query=guarded_copy(query))


def _one_rank(inputs: Inputs) -> Inputs | None:
    return None if inputs.world == 1 else _resharded(inputs, 1)


def _half_the_ranks(inputs: Inputs) -> Inputs | None:
    return None if inputs.world % 2 or inputs.world == 2 else _resharded(inputs, inputs.world // 2)


def _row_by_row(inputs: Inputs) -> Inputs | None:
    """Every row is a request of its own, as long as what it sees."""
    if inputs.qlen == 1:
        return None
    lengths = inputs.lengths[:, None] - inputs.qlen + 1 + torch.arange(inputs.qlen, dtype=torch.int32)
    return dataclasses.replace(
        inputs, qlen=1, lengths=guarded_copy(lengths.clamp(min=0).flatten()), live=inputs.live * inputs.qlen,
        table=guarded_copy(inputs.table.repeat_interleave(inputs.qlen, 0)),
    )  # fmt: skip


def _in_one_process(inputs: Inputs) -> Inputs | None:
    if inputs.ranks == "one_process" or _free_order(inputs):
        return None
    return dataclasses.replace(inputs, ranks="one_process")


def _padding_dropped(inputs: Inputs) -> Inputs | None:
    return None if inputs.live == inputs.lengths.shape[0] or _free_order(inputs) else _live(inputs)


def _law(
    name: str, claim: str, edit: Callable[[Inputs], Inputs | None],
    expect: Callable[[Outputs, Inputs, Inputs], Outputs] = _same, measure: Literal["bitwise", "budget"] = "bitwise",
) -> Law:  # fmt: skip
    """A law of the requests that count.

    The others are left out of the edited call, which then has another shape: a bitwise law speaks of calls without them
    only, and D9 of the others.
    """

    def edited(inputs: Inputs) -> Inputs | None:
        return edit(_live(inputs)) if measure == "budget" or inputs.live == inputs.lengths.shape[0] else None

    return Law(name, claim, edited, expect, measure)


LAWS: tuple[Law, ...] = (
    _law("D1 blocks reversed", "where a block lies does not matter", _blocks_reversed),
    _law("D2 table narrowed", "what stands behind a request's last block is not used", _table_narrowed),
    _law("D3 rest littered", "what no request has is not used", _rest_littered),
    _law("D4 requests reversed", "requests do not see each other", _requests_reversed, _turned),
    _law("D5 one rank", "one rank that holds everything answers the same", _one_rank, measure="budget"),
    _law("D6 half the ranks", "half as many ranks answer the same", _half_the_ranks, measure="budget"),
    _law("D7 row by row", "a row sees as much alone as in its block", _row_by_row, measure="budget"),
    _law("D8 ranks in one process", "where nobody chooses an order, real ranks answer as one process does",
         _in_one_process),
    Law("D9 padding", "requests that do not count change nothing for the others", _padding_dropped, _same, "bitwise",
        reshapes=True),
)  # fmt: skip
