"""Which slots must the expansion of a block table give?

    indices[kv_indptr[b] + j] = block_table[b, j // K] * K + j % K          0 <= j < kv_indptr[b + 1] - kv_indptr[b]

with blocks of K tokens. Where lists are clamped, j stands for 0 from j = real_lengths[b] on. Behind kv_indptr[B] the
buffer becomes -1 if it belongs to captured graphs, and keeps what it held if not; no other element is written. Only the
columns that a request's tokens need are read. Source: `_expand_page_indices_kernel` and `_build_decode` of vLLM's AITER
MLA backend, which check nothing: a list longer than the table allows stays partly unwritten there, and a slot beyond int32
wraps.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch

from cases.dense_mla.expand_pages import Inputs, Outputs
from cases.memory import INTEGER_POISON, guarded_copy, moved, storage_bytes
from cases.precision import Precision
from cases.sparse_mla.paging import INT32_MAX
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

_TILE = 1024


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The buffer after the expansion, a new tensor; `dtype` changes nothing, since all is integers.

    Raises ValueError for row starts that do not fit the table and the buffer, for a list that is longer than its row of
    the table allows, and for a block, needed by a token, whose slots are not all int32 from 0 on.
    """
    del dtype
    _refuse(inputs)
    return _written(inputs, ((b, _slots(inputs, b, _tokens(inputs, b))) for b in range(_requests(inputs))))


def _refuse(inputs: Inputs) -> None:
    starts = inputs.kv_indptr.tolist()
    rows, width = inputs.block_table.shape
    if len(starts) != rows + 1:
        raise ValueError(f"kv_indptr={len(starts)} starts: should be {rows + 1} for {rows} rows of the block table")
    if starts[0] != 0 or sorted(starts) != starts or starts[-1] > inputs.indices.numel():
        raise ValueError(
            f"kv_indptr={starts}: should rise from 0 to at most {inputs.indices.numel()}, the buffer's end"
        )
    room = width * inputs.block_size
    last = (INT32_MAX + 1) // inputs.block_size - 1
    for b in range(rows):
        length = starts[b + 1] - starts[b]
        if length > room + inputs.extra:
            raise ValueError(f"length of request {b}={length}: should be at most {room + inputs.extra}")
        if inputs.clamped and int(inputs.real_lengths[b]) > room:
            raise ValueError(f"real_lengths[{b}]={int(inputs.real_lengths[b])}: should be at most {room}")
        blocks = inputs.block_table[b, (_tokens(inputs, b) // inputs.block_size).unique()]
        wrong = blocks[(blocks < 0) | (blocks > last)]
        if wrong.numel():
            raise ValueError(f"block of request {b}={int(wrong[0])}: should be 0 to {last}, whose slots are int32")


def _requests(inputs: Inputs) -> int:
    return int(inputs.block_table.shape[0])


def _length(inputs: Inputs, b: int) -> int:
    return int(inputs.kv_indptr[b + 1] - inputs.kv_indptr[b])


def _tokens(inputs: Inputs, b: int) -> torch.Tensor:
    """The token that each place of a request's list stands for."""
    place = torch.arange(_length(inputs, b))
    return torch.where(place < inputs.real_lengths[b].cpu(), place, 0) if inputs.clamped else place


def _slots(inputs: Inputs, b: int, tokens: torch.Tensor) -> torch.Tensor:
    blocks = inputs.block_table[b].cpu().to(torch.int64)
    return blocks[tokens // inputs.block_size] * inputs.block_size + tokens % inputs.block_size


def _written(
    inputs: Inputs, lists: Iterable[tuple[int, torch.Tensor]], *, cleared: bool | None = None, late: bool = False
) -> Outputs:
    """The buffer after these requests' lists were written from their starts on, one after the other, as far as it goes.

    cleared: whether the rest of the buffer became -1. late: whether it did so after the lists had been written.
    """
    buffer = inputs.indices.clone().cpu()
    cleared = inputs.graphs if cleared is None else cleared
    if cleared:
        buffer.fill_(-1)
    for b, slots in lists:
        start = int(inputs.kv_indptr[b])
        room = buffer[start : start + slots.numel()]
        room.copy_(_low_bits(slots[: room.numel()]))
    if late:
        buffer[int(inputs.kv_indptr[-1]) :] = -1
    return Outputs(buffer)


def _low_bits(values: torch.Tensor) -> torch.Tensor:
    return ((values + 2**31) % 2**32 - 2**31).to(torch.int32)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The lists and the rest of the buffer, bit for bit."""
    del precision
    want = reference(inputs).indices
    used = torch.arange(want.numel()) < int(inputs.kv_indptr[-1])
    rest = (
        "what no request owns is -1 for a captured graph" if inputs.graphs else "what no request owns stays as it was"
    )
    return (
        exact("slots", outputs.indices, want, mask=used, why="the slots of the requests' tokens"),
        exact("rest of the buffer", outputs.indices, want, mask=~used, why=rest),
    )


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    fresh: dict[str, object] = {"indices": moved(inputs.indices, inputs.indices.device)}
    return dataclasses.replace(inputs, **(fresh | changes))  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _needed(inputs: Inputs) -> torch.Tensor:
    """bool [requests, width]: the columns that tokens need."""
    needed = torch.zeros(inputs.block_table.shape, dtype=torch.bool)
    for b in range(_requests(inputs)):
        needed[b, _tokens(inputs, b) // inputs.block_size] = True
    return needed


def _blocks_moved(inputs: Inputs) -> Inputs | None:
    table, needed = inputs.block_table, _needed(inputs)
    if not bool(needed.any()) or int(table[needed].min()) < 7:
        return None
    return _edited(inputs, block_table=guarded_copy(torch.where(needed, table - 7, table)))


def _slots_moved(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    indices = first.indices.clone()
    indices[: int(inputs.kv_indptr[-1])] -= 7 * inputs.block_size
    return Outputs(indices)


def _halved(inputs: Inputs) -> Inputs | None:
    """The same tokens in blocks of half the size."""
    if inputs.block_size % 2:
        return None
    needed = _needed(inputs)
    halves = torch.where(needed, inputs.block_table, 0)[:, :, None] * 2 + torch.arange(2)
    halves = torch.where(needed[:, :, None], halves, -1).flatten(1)
    return _edited(inputs, block_table=guarded_copy(halves.to(torch.int32)), block_size=inputs.block_size // 2)


def _gathered(inputs: Inputs) -> Inputs:
    return _edited(inputs, block_table=guarded_copy(inputs.block_table))


def _scattered(inputs: Inputs) -> Inputs:
    return _edited(inputs, block_table=guarded_copy(inputs.block_table.t(), gaps=(2,)).t())


def _other_garbage(inputs: Inputs) -> Inputs:
    table = torch.where(_needed(inputs), inputs.block_table, INTEGER_POISON)
    return _edited(inputs, block_table=guarded_copy(table))


def _empty_requests(inputs: Inputs) -> Inputs:
    """An empty request before every one."""
    rows = _requests(inputs)
    twice = torch.arange(rows).repeat_interleave(2)
    lengths = torch.stack((torch.zeros(rows, dtype=torch.int64), inputs.kv_indptr.diff().to(torch.int64)), 1).flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    nothing = torch.arange(2 * rows) % 2 == 0
    table = torch.where(nothing[:, None], -1, inputs.block_table[twice])
    return _edited(
        inputs,
        block_table=guarded_copy(table.to(torch.int32)),
        kv_indptr=guarded_copy(starts),
        real_lengths=guarded_copy(inputs.real_lengths[twice]),
    )


def _other_earlier_content(inputs: Inputs) -> Inputs | None:
    return _edited(inputs, indices=guarded_copy(torch.full_like(inputs.indices, 3))) if inputs.graphs else None


def _unclamped(inputs: Inputs) -> Inputs | None:
    """Lengths that no list reaches clamp nothing."""
    if inputs.clamped:
        return None
    return _edited(inputs, clamped=True, real_lengths=guarded_copy(inputs.kv_indptr.diff()))


LAWS: tuple[Law, ...] = (
    Law("J6 blocks relabelled", "blocks 7 lower have slots 7 blocks lower", _blocks_moved, _slots_moved, "bitwise"),
    Law("J7 blocks halved", "the same tokens in smaller blocks have the same slots", _halved, _same, "bitwise"),
    Law("E1 table gathered", "the strides of the table do not matter", _gathered, _same, "bitwise"),
    Law("E2 table transposed", "a column stride other than 1 does not matter", _scattered, _same, "bitwise"),
    Law("J9 other garbage", "columns that no token needs do not matter", _other_garbage, _same, "bitwise"),
    Law("J15 empty requests", "requests without tokens change nothing", _empty_requests, _same, "bitwise"),
    Law("J10 other earlier content", "a graph's buffer does not depend on what it held", _other_earlier_content, _same,
        "bitwise"),
    Law("E3 clamped at the end", "a list that ends with its request is not clamped", _unclamped, _same, "bitwise"),
)  # fmt: skip


def _each(rule: Callable[[Inputs, int], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """An answer that follows `rule` for every request."""
    return lambda inputs: _written(inputs, ((b, rule(inputs, b)) for b in range(_requests(inputs))))


def _right(inputs: Inputs, b: int) -> torch.Tensor:
    return _slots(inputs, b, _tokens(inputs, b))


def _table_as(inputs: Inputs, strides: tuple[int, int]) -> Outputs | None:
    """The table read with other strides; what lies outside its storage reads as poison."""
    table = inputs.block_table
    if tuple(table.stride()) == strides or table.numel() < 2:
        return None
    flat = storage_bytes(table).view(torch.int32)
    place = torch.arange(table.shape[0])[:, None] * strides[0] + torch.arange(table.shape[1]) * strides[1]
    place = (place + int(table.storage_offset())).clamp(max=flat.numel() - 1)
    return _each(_right)(dataclasses.replace(inputs, block_table=flat[place]))


def _unit_columns(inputs: Inputs) -> Outputs | None:
    return _table_as(inputs, (inputs.block_table.stride(0), 1))


def _packed_rows(inputs: Inputs) -> Outputs | None:
    return _table_as(inputs, (inputs.block_table.shape[1], inputs.block_table.stride(1)))


def _swapped_strides(inputs: Inputs) -> Outputs | None:
    return _table_as(inputs, (inputs.block_table.stride(1), inputs.block_table.stride(0)))


def _short_offsets(inputs: Inputs) -> Outputs | None:
    """Rows whose byte offset does not fit into 31 bits hold nothing."""
    table = inputs.block_table
    lost = torch.arange(table.shape[0]) * table.stride(0) * table.element_size() >= 1 << 31
    if not bool(lost.any()):
        return None
    nothing = int.from_bytes(bytes([INTEGER_POISON] * 4), "little")
    return _each(_right)(dataclasses.replace(inputs, block_table=torch.where(lost[:, None], nothing, table)))


def _within(limit: Callable[[Inputs], int]) -> Callable[[Inputs], Outputs]:
    """The places of every list below a limit; the others stay as they were."""
    return _each(lambda inputs, b: _right(inputs, b)[: limit(inputs)])


def _average(inputs: Inputs) -> int:
    """The places that tiles cover if there are as many as the average list needs."""
    average = int(inputs.kv_indptr[-1]) / max(1, _requests(inputs))
    return max(1, -(-int(average) // _TILE)) * _TILE


def _block_per_token(inputs: Inputs, b: int) -> torch.Tensor:
    columns = _tokens(inputs, b).clamp(max=inputs.block_table.shape[1] - 1)
    return inputs.block_table[b].to(torch.int64)[columns]


def _power_of_two(inputs: Inputs, b: int) -> torch.Tensor:
    size = 1 << (inputs.block_size - 1).bit_length()
    return _slots(dataclasses.replace(inputs, block_size=size), b, _tokens(inputs, b))


def _through_floats(inputs: Inputs, b: int) -> torch.Tensor:
    return _right(inputs, b).to(torch.float32).to(torch.int64)


def _short_ids(inputs: Inputs, b: int) -> torch.Tensor:
    return _slots(dataclasses.replace(inputs, block_table=inputs.block_table & 0xFFFFFF), b, _tokens(inputs, b))


def _next_row(inputs: Inputs, b: int) -> torch.Tensor:
    return _slots(inputs, (b + 1) % _requests(inputs), _tokens(inputs, b))


def _at_least_one(inputs: Inputs) -> Outputs | None:
    """Requests without tokens write one slot all the same, after everybody else."""
    empty = [b for b in range(_requests(inputs)) if not _length(inputs, b)]
    others = [b for b in range(_requests(inputs)) if _length(inputs, b)]
    one = torch.zeros(1, dtype=torch.int64)
    rows = [(b, _right(inputs, b)) for b in others] + [(b, _slots(inputs, b, one)) for b in empty]
    return _written(inputs, rows) if empty else None


def _whole_blocks(inputs: Inputs) -> Outputs:
    """Lists filled up to the end of their last block; requests in the order in which they end."""
    size = inputs.block_size

    def filled(b: int) -> torch.Tensor:
        tokens = torch.arange(-(-_length(inputs, b) // size) * size)
        return _slots(inputs, b, tokens.clamp(max=inputs.block_table.shape[1] * size - 1))

    return _written(inputs, ((b, filled(b)) for b in range(_requests(inputs))))


def _padded_starts(inputs: Inputs) -> Outputs:
    """Lists that begin where they would if all were as long as the table allows."""
    room = inputs.block_table.shape[1] * inputs.block_size
    starts = torch.arange(_requests(inputs) + 1) * room
    buffer = _written(inputs, ()).indices
    for b in range(_requests(inputs)):
        part = buffer[int(starts[b]) : int(starts[b]) + _length(inputs, b)]
        part.copy_(_low_bits(_right(inputs, b)[: part.numel()]))
    return Outputs(buffer)


def _clamped_to(token: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Inputs], Outputs | None]:
    """Lists whose places stand for other tokens, where they are clamped."""

    def slots(inputs: Inputs, b: int) -> torch.Tensor:
        room = inputs.block_table.shape[1] * inputs.block_size
        tokens = token(torch.arange(_length(inputs, b)), int(inputs.real_lengths[b]))
        return _slots(inputs, b, tokens.clamp(0, room - 1))

    return lambda inputs: _each(slots)(inputs) if inputs.clamped else None


def _tail_clamped_always(inputs: Inputs) -> Outputs | None:
    return None if inputs.clamped else _each(_right)(dataclasses.replace(inputs, clamped=True))


MUTANTS: tuple[Mutant, ...] = (
    Mutant("unit-column-stride", "the blocks of a row lay one behind the other", _unit_columns),
    Mutant("rows-packed", "the rows of the table lay one behind the other", _packed_rows),
    Mutant("strides-swapped", "the strides of the table were the other way round", _swapped_strides),
    Mutant("row-offset-in-32-bits", "a row of the table more than 2 GiB away could not be reached", _short_offsets),
    Mutant("first-tile-only", "tokens of a request from the 1024th on stayed as they were",
           _within(lambda inputs: _TILE)),
    Mutant("long-lists-cut", "tokens of a request from the 32768th on stayed as they were",
           _within(lambda inputs: 1 << 15)),
    Mutant("tiles-for-the-average", "tokens beyond the tiles that an average request needs stayed as they were",
           _within(_average)),
    Mutant("block-size-ignored", "every token had a block of its own", _each(_block_per_token)),
    Mutant("offset-in-block-omitted", "every token were the first of its block",
           _each(lambda inputs, b: _slots(inputs, b, _tokens(inputs, b) // inputs.block_size * inputs.block_size))),
    Mutant("block-size-rounded-up", "the block size were the next power of two", _each(_power_of_two)),
    Mutant("block-number-kept", "a block number were the number of its first slot",
           _each(lambda inputs, b: _right(inputs, b) - _right(inputs, b) // inputs.block_size * (inputs.block_size - 1))),
    Mutant("slots-through-float32", "slots were computed in float32", _each(_through_floats)),
    Mutant("ids-in-24-bits", "only the low 24 bits of a block number counted", _each(_short_ids)),
    Mutant("empty-request-writes-a-slot", "a request without tokens had one", _at_least_one),
    Mutant("whole-blocks-written", "lists were filled up to the end of their last block", _whole_blocks),
    Mutant("partial-block-dropped", "tokens of a block that is not full were left out",
           _each(lambda inputs, b: _right(inputs, b)[: _length(inputs, b) // inputs.block_size * inputs.block_size])),
    Mutant("last-token-left-out", "the last token of a request were none of its tokens",
           _each(lambda inputs, b: _right(inputs, b)[:-1])),
    Mutant("one-token-late", "every list began with its second token",
           _each(lambda inputs, b: _right(inputs, b).roll(-1))),
    Mutant("neighbours-row", "a request used the next one's row of the table", _each(_next_row)),
    Mutant("lists-at-padded-places", "lists began where the table's rows do", _padded_starts),
    Mutant("rest-left-stale", "a graph's buffer kept the slots of an earlier batch",
           lambda inputs: _written(inputs, [(b, _right(inputs, b)) for b in range(_requests(inputs))], cleared=False)
           if inputs.graphs else None),
    Mutant("rest-cleared-to-0", "the rest of a graph's buffer named slot 0",
           lambda inputs: Outputs(torch.where(reference(inputs).indices == -1, 0, reference(inputs).indices))
           if inputs.graphs else None),
    Mutant("rest-cleared-without-graphs", "the rest of the buffer became -1 although no graph reads it",
           lambda inputs: _written(inputs, [(b, _right(inputs, b)) for b in range(_requests(inputs))], late=True)
           if not inputs.graphs else None),
    Mutant("cleared-afterwards", "the buffer became -1 after the lists had been written",
           lambda inputs: _written(inputs, ()) if inputs.graphs else None),
    Mutant("tail-not-clamped", "places behind a request's last token stood for further tokens",
           _clamped_to(lambda place, real: place)),
    Mutant("tail-clamped-to-the-last", "places behind a request's last token stood for that token",
           _clamped_to(lambda place, real: place.clamp(max=max(real - 1, 0)))),
    Mutant("tail-clamped-one-late", "the place behind a request's last token stood for a further token",
           _clamped_to(lambda place, real: torch.where(place <= real, place, 0))),
    Mutant("clamped-where-nobody-asked", "lists were clamped although they are not to be", _tail_clamped_always),
)  # fmt: skip


def _from_every_place(inputs: Inputs) -> Outputs:
    """Every place of the buffer finds its request by searching the starts."""
    buffer = torch.where(torch.tensor(inputs.graphs), -1, inputs.indices.cpu())
    place = torch.arange(int(inputs.kv_indptr[-1]), dtype=torch.int32)
    owner = torch.searchsorted(inputs.kv_indptr, place, right=True) - 1
    token = place - inputs.kv_indptr[owner]
    if inputs.clamped:
        token = torch.where(token < inputs.real_lengths[owner], token, 0)
    column = torch.div(token, inputs.block_size, rounding_mode="floor")
    buffer[: place.numel()] = inputs.block_table[owner, column] * inputs.block_size + token % inputs.block_size
    return Outputs(buffer)


HONEST: tuple[Honest, ...] = (
    Honest("one-request-after-the-other", Precision(probability="exact"), reference),
    Honest("from-every-place", Precision(probability="exact"), _from_every_place),
)
