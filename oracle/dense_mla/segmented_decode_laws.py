"""Which edits of a decode over segments have a known effect on its answer?

Answers are compared without what they show of their segments: how many there are may depend on the whole call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cases.dense_mla.segmented_decode import CODES, Inputs, Outputs
from cases.memory import guarded, guarded_copy, is_vast, moved
from oracle.laws import Law


def _bare(answer: Outputs) -> Outputs:
    return Outputs(answer.out, answer.lse)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _near(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit of calls whose cache fits into memory."""
    return lambda inputs: None if is_vast(inputs.cache) else edit(inputs)


def _copied(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A changed copy in memory of its own; codes are moved about as bytes."""
    if tensor.dtype in CODES:
        return guarded_copy(change(tensor.contiguous().view(torch.uint8)), fill=0xFF).view(tensor.dtype)
    return guarded_copy(change(tensor.contiguous()))


def _fresh(inputs: Inputs, **changes: Any) -> Inputs:
    return dataclasses.replace(inputs, **{"out": guarded(inputs.out.shape, inputs.out.dtype), **changes})


def _used(inputs: Inputs) -> torch.Tensor:
    """bool [rows, width]: which entries of the table are pages of a row."""
    pages = (inputs.lengths.clamp(min=0) + inputs.tile - 1) // inputs.tile
    return torch.arange(inputs.table.shape[1]) < pages[:, None]


def _pages_renamed(inputs: Inputs) -> Inputs:
    last = inputs.cache.shape[0] - 1
    table = torch.where(_used(inputs), last - inputs.table, inputs.table)
    return _fresh(inputs, cache=_copied(inputs.cache, lambda cache: cache.flip(0)), table=guarded_copy(table))


def _unread_refilled(inputs: Inputs) -> Inputs:
    """Another content for every slot that no row reads, other entries behind the pages of a row."""
    read = torch.zeros(inputs.cache.shape[:2], dtype=torch.bool)
    for row in range(inputs.lengths.shape[0]):
        place = torch.arange(max(0, int(inputs.lengths[row])))
        read[inputs.table[row, place // inputs.tile].long(), place % inputs.tile] = True

    def change(cache: torch.Tensor) -> torch.Tensor:
        fill = 0x38 if cache.dtype == torch.uint8 else 1.0
        return torch.where(read[..., None, None], cache, torch.full_like(cache, fill))

    table = torch.where(_used(inputs), inputs.table, 7)
    return _fresh(inputs, cache=_copied(inputs.cache, change), table=guarded_copy(table))


def _rows_reversed(inputs: Inputs) -> Inputs:
    return _fresh(
        inputs, query=_copied(inputs.query, lambda query: query.flip(0)), table=guarded_copy(inputs.table.flip(0)),
        lengths=guarded_copy(inputs.lengths.flip(0)),
    )  # fmt: skip


def _heads_reversed(inputs: Inputs) -> Inputs:
    return _fresh(inputs, query=_copied(inputs.query, lambda query: query.flip(1)))


def _half_pages(inputs: Inputs) -> Inputs | None:
    """Every page as two of half the size, so that segments have other ends."""
    if inputs.tile == 1:
        return None
    pages, tile, _, lanes = inputs.cache.shape
    halves = torch.stack([2 * inputs.table.long(), 2 * inputs.table.long() + 1], 2).flatten(1)
    used = _used(inputs).repeat_interleave(2, 1)
    return _fresh(
        inputs, cache=_copied(inputs.cache, lambda cache: cache.reshape(2 * pages, tile // 2, 1, lanes)),
        table=guarded_copy(torch.where(used, halves, -1).int()),
    )  # fmt: skip


def _other_machine(inputs: Inputs) -> Inputs:
    """As many compute units as ask for other segments."""
    return _fresh(inputs, compute_units=4 if inputs.compute_units > 4 else 304)


def _scale_moved(inputs: Inputs) -> Inputs | None:
    """Twice the scale of the cache under half the softmax scale: twice the answer."""
    if inputs.cache.dtype not in CODES:
        return None
    cache_scale = guarded_copy((inputs.cache_scale * 2)[None])[0]
    return _fresh(inputs, cache_scale=cache_scale, scale=inputs.scale / 2)


def _twice(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.out * 2, first.lse)


def _above_subnormals(answer: Outputs) -> Outputs:
    """Numbers so small that fp16 may round them as subnormals, as zeros, and those near its largest too."""
    size = answer.out.float().abs()
    wild = (size < 2.0**-12) | (size > 2.0**14) if answer.out.dtype == torch.float16 else size < 2.0**-100
    return Outputs(answer.out.masked_fill(wild, 0.0), answer.lse)


def _rows_repeated(inputs: Inputs) -> Inputs:
    """Every row twice: more rows may mean fewer segments."""
    return _fresh(
        inputs, query=_copied(inputs.query, lambda query: query.repeat(2, 1, 1)), table=guarded_copy(inputs.table.repeat(2, 1)),
        lengths=guarded_copy(inputs.lengths.repeat(2)),
        out=guarded((2 * inputs.out.shape[0], *inputs.out.shape[1:]), inputs.out.dtype),
    )  # fmt: skip


def _repeated(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.out.repeat(2, 1, 1), first.lse.repeat(2, 1))


def _keys_reversed(inputs: Inputs) -> Inputs | None:
    """The whole pages of each row in the reverse order, where every row fills its pages."""
    if inputs.tile > 1 and bool((inputs.lengths % inputs.tile != 0).any()):
        return None
    table = inputs.table.clone()
    for row, used in enumerate(_used(inputs).sum(1).tolist()):
        table[row, :used] = table[row, :used].flip(0)
    return _fresh(inputs, table=guarded_copy(table))


LAWS: tuple[Law, ...] = (
    Law("J6 pages renamed", "where a page lies does not matter", _near(_pages_renamed), _same, "bitwise", _bare),
    Law("J9 unread memory refilled", "what no row reads does not matter", _near(_unread_refilled), _same, "bitwise", _bare),
    Law("J8 rows reversed", "a row depends on its own keys only", _near(_rows_reversed),
        lambda first, inputs, edited: Outputs(first.out.flip(0), first.lse.flip(0)), "bitwise", _bare),
    Law("J2 heads reversed", "a head depends on its own query only", _near(_heads_reversed),
        lambda first, inputs, edited: Outputs(first.out.flip(1), first.lse.flip(1)), "budget", _bare),
    Law("J7 pages of half the size", "the size of the pages moves roundings only", _near(_half_pages), _same, "budget",
        _bare),
    Law("J5 another machine", "the number of segments moves roundings only", _near(_other_machine), _same, "budget", _bare),
    Law("J8 rows repeated", "a row's answer is its own in a larger batch", _near(_rows_repeated), _repeated, "budget",
        _bare),
    Law("J6 whole pages in another order", "the order of the keys moves roundings only", _near(_keys_reversed), _same,
        "budget", _bare),
    Law("J11 scale moved to the cache", "twice the cache's scale under half the softmax scale doubles the answer",
        _near(_scale_moved), _twice, "bitwise", _above_subnormals),
    Law("M29 same call twice", "the same call gives the same bits",
        _near(lambda inputs: _fresh(inputs, out=moved(inputs.out, inputs.out.device))), _same, "bitwise", _bare),
)  # fmt: skip
