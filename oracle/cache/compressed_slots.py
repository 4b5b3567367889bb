"""Into which slot does each token write its compressed record?

    p = seq_lens[r] - (query_start[r + 1] - query_start[r]) + i        token i of request r
    q = p // (interleave * ranks) * interleave + p % interleave        p itself where there is one rank
    c = q // ratio
    slot = table[r, c // block_size] * block_size + c % block_size     if (p + 1) % ratio == 0 and token_slots != -1
    slot = -1                                                          otherwise, and in all entries of no token

int64. Source: `get_compressed_slot_mapping` of vLLM; there too the buffer's whole length is set to -1 first, so that
entries of a longer step never survive. A token whose own slot is -1 has its key in the cache already, or is another
rank's, or is padding; its position may be negative.
"""

import dataclasses
import itertools
from collections.abc import Callable

import torch

from cases.cache.compressed_slots import INT32_MAX, RATIOS, Inputs, Outputs
from cases.memory import guarded_copy
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

_PADDING = -1


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The slots as they must be; `dtype` changes nothing, since these are integers.

    Raises `ValueError` for another ratio than 1, 2, 4 and 128, for an interleave that splits a group, for lengths of
    tensors that do not fit each other, for query bounds that fall or pass `tokens`, and for a token slot below -1;
    `IndexError` for a record outside the table, a block below 0 and a position below 0 of a token that has a slot.
    """
    del dtype
    check(inputs)
    return Outputs(_mapped(inputs, *_tokens(inputs)))


def check(inputs: Inputs) -> None:
    """Raises what `reference` says of calls that are malformed in themselves."""
    ratio, bounds = inputs.ratio, inputs.query_start.tolist()
    requests = inputs.seq_lens.numel()
    if ratio not in RATIOS:
        raise ValueError(f"ratio={ratio}: should be 1, 2, 4 or 128")
    if inputs.block_size < 1 or inputs.ranks < 1:
        raise ValueError(f"block_size={inputs.block_size}, ranks={inputs.ranks}: should be positive")
    if inputs.interleave < 1 or inputs.interleave % ratio:
        raise ValueError(f"interleave={inputs.interleave}: should be a multiple of ratio={ratio}")
    if len(bounds) != requests + 1 or inputs.table.shape[0] != requests:
        raise ValueError(
            f"{len(bounds)} query bounds and {inputs.table.shape[0]} table rows: should be {requests + 1} and {requests}"
        )
    if bounds[0] != 0 or any(high < low for low, high in itertools.pairwise(bounds)):
        raise ValueError("query_start: should begin with 0 and never fall")
    if bounds[-1] > inputs.tokens:
        raise ValueError(f"query_start ends with {bounds[-1]}: should be at most tokens={inputs.tokens}")
    if inputs.token_slots.numel() < bounds[-1]:
        raise ValueError(f"token_slots has {inputs.token_slots.numel()} entries: should be {bounds[-1]} or more")
    if inputs.out is not None and inputs.out.numel() < inputs.tokens:
        raise ValueError(f"out has {inputs.out.numel()} entries: should be {inputs.tokens} or more")
    if bounds[-1] and int(inputs.token_slots[: bounds[-1]].min()) < _PADDING:
        raise ValueError(f"token slot {int(inputs.token_slots[: bounds[-1]].min())}: should be -1 or more")


def _tokens(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the position of every token that belongs to one, int64."""
    bounds = inputs.query_start.long()
    lengths = bounds[1:] - bounds[:-1]
    request = torch.repeat_interleave(torch.arange(lengths.numel(), device=bounds.device), lengths)
    index = torch.arange(request.numel(), device=bounds.device) - bounds[:-1][request]
    return request, (inputs.seq_lens.long() - lengths)[request] + index


def _records(inputs: Inputs, position: torch.Tensor) -> torch.Tensor:
    """The number of each position's record among those of this rank."""
    turn = inputs.interleave
    return (position // (turn * inputs.ranks) * turn + position % turn) // inputs.ratio


def _ends(inputs: Inputs, position: torch.Tensor) -> torch.Tensor:
    return (position + 1) % inputs.ratio == 0


def _mapped(
    inputs: Inputs, request: torch.Tensor, position: torch.Tensor, *,
    ends: Callable[[Inputs, torch.Tensor], torch.Tensor] = _ends,
    records: Callable[[Inputs, torch.Tensor], torch.Tensor] = _records,
    ignore_own: bool = False, slot_of: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None,
    block_size: int | None = None, forgiving: bool = False,
) -> torch.Tensor:  # fmt: skip
    """All entries; the arguments are what a wrong answer takes for the formula.

    A forgiving look-up stays within the table where the right one raises.
    """
    size = block_size or inputs.block_size
    writes = ends(inputs, position)
    if not ignore_own:
        writes = writes & (inputs.token_slots[: request.numel()] != _PADDING)
    number = records(inputs, position)
    row, column = request[writes], (number // size)[writes]
    if forgiving:
        column = column.clamp(0, max(inputs.table.shape[1] - 1, 0))
    else:
        outside = (column < 0) | (column >= inputs.table.shape[1])
        if bool(outside.any()):
            raise IndexError(
                f"record {int(number[writes][outside][0])} of request {int(row[outside][0])}: should be in one of the "
                f"{inputs.table.shape[1]} blocks of its row"
            )
    blocks = inputs.table[row, column].long()
    if not forgiving and bool((blocks < 0).any()):
        raise IndexError(f"block {int(blocks.min())}: should not be negative")
    place = (number % size)[writes]
    entries = inputs.tokens if inputs.out is None else inputs.out.numel()
    slots = torch.full((entries,), _PADDING, dtype=torch.int64, device=inputs.table.device)
    found = blocks * size + place if slot_of is None else slot_of(blocks, place, size)
    slots[: request.numel()][writes] = found
    return slots


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Every entry, bit for bit."""
    del precision
    why = "the last token of a group has its record's slot, every other entry is -1"
    return (exact("slots", outputs.slots, reference(inputs).slots, why=why),)


def _more_capacity(inputs: Inputs) -> Inputs | None:
    if inputs.out is None:
        return None
    longer = torch.full((inputs.out.numel() + 9,), 77, dtype=torch.int64, device=inputs.out.device)
    return dataclasses.replace(inputs, out=longer)


def _followed_by_padding(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    assert edited.out is not None
    more = first.slots.new_full((edited.out.numel() - first.slots.numel(),), _PADDING)
    return Outputs(torch.cat([first.slots, more]))


def _without_buffer(inputs: Inputs) -> Inputs | None:
    return None if inputs.out is None else dataclasses.replace(inputs, out=None)


def _blocks_raised(inputs: Inputs) -> Inputs | None:
    if bool((reference(inputs).slots >= INT32_MAX * inputs.block_size).any()):
        return None
    # What no token needs may be the largest number there is.
    return _fresh(inputs, table=inputs.table.clamp(max=INT32_MAX - 1) + 1)


def _one_block_on(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(torch.where(first.slots == _PADDING, _PADDING, first.slots + inputs.block_size))


def _own_slots_changed(inputs: Inputs) -> Inputs:
    slots = inputs.token_slots
    return _fresh(inputs, token_slots=torch.where(slots == _PADDING, slots, (slots * 7 + 1) % 1000))


def _some_skipped(inputs: Inputs) -> Inputs | None:
    if not inputs.token_slots.numel():
        return None
    slots = inputs.token_slots.clone()
    slots[::2] = _PADDING
    return _fresh(inputs, token_slots=slots)


def _those_alone_gone(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    slots = first.slots.clone()
    slots[: edited.token_slots.numel()][edited.token_slots[: slots.numel()] == _PADDING] = _PADDING
    return Outputs(slots)


def _requests_reversed(inputs: Inputs) -> Inputs | None:
    order = _token_order(inputs)
    if order is None:
        return None
    lengths = (inputs.query_start[1:] - inputs.query_start[:-1]).flip(0)
    bounds = torch.cat([inputs.query_start[:1], lengths.cumsum(0, dtype=torch.int32)])
    slots = inputs.token_slots.clone()
    slots[: order.numel()] = inputs.token_slots[order]
    return _fresh(
        inputs, query_start=bounds, seq_lens=inputs.seq_lens.flip(0), table=inputs.table.flip(0), token_slots=slots
    )


def _token_order(inputs: Inputs) -> torch.Tensor | None:
    """The tokens when the requests stand in reverse order; None where there are no two requests."""
    bounds = inputs.query_start.tolist()
    spans = [torch.arange(low, high) for low, high in itertools.pairwise(bounds)]
    return torch.cat(spans[::-1]) if len(spans) > 1 else None


def _in_that_order(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    order = _token_order(inputs)
    assert order is not None
    slots = first.slots.clone()
    slots[: order.numel()] = first.slots[order]
    return Outputs(slots)


def _fresh(inputs: Inputs, **changes: torch.Tensor) -> Inputs:
    """The same call with some tensors replaced and a buffer of its own."""
    out = None if inputs.out is None else guarded_copy(inputs.out)
    return dataclasses.replace(inputs, out=out, **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _first_tokens(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(first.slots[: inputs.tokens].clone())


LAWS: tuple[Law, ...] = (
    Law("S1 buffer longer", "a longer buffer has -1 in the rest", _more_capacity, _followed_by_padding, "bitwise"),
    Law("S2 no buffer", "without a buffer the answer is its first entries", _without_buffer, _first_tokens, "bitwise"),
    Law("S3 blocks raised", "the next block is block_size slots on", _blocks_raised, _one_block_on, "bitwise"),
    Law("S4 own slots changed", "a token's own slot counts as -1 or as another number only", _own_slots_changed, _same,
        "bitwise"),
    Law("S5 more tokens skipped", "a skipped token has -1 and no other token changes", _some_skipped,
        _those_alone_gone, "bitwise"),
    Law("S6 requests reversed", "each request is mapped by itself", _requests_reversed, _in_that_order, "bitwise"),
)  # fmt: skip


def _wrong(**belief: object) -> Callable[[Inputs], Outputs]:
    """The answer of a map that takes something else for the formula."""
    return lambda inputs: Outputs(_mapped(inputs, *_tokens(inputs), forgiving=True, **belief))  # type: ignore[arg-type]


def _elsewhere(
    request: Callable[[Inputs, torch.Tensor], torch.Tensor] = lambda inputs, request: request,
    position: Callable[[Inputs, torch.Tensor, torch.Tensor], torch.Tensor] = lambda inputs, request, position: position,
) -> Callable[[Inputs], Outputs]:
    """The answer of a map that takes another request's row of the table, or another position."""

    def answer(inputs: Inputs) -> Outputs:
        which, where = _tokens(inputs)
        return Outputs(_mapped(inputs, request(inputs, which), position(inputs, which, where), forgiving=True))

    return answer


def _chunk_index(inputs: Inputs, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return torch.arange(position.numel(), device=position.device) - inputs.query_start.long()[:-1][request]


def _in_32_bits(blocks: torch.Tensor, place: torch.Tensor, size: int) -> torch.Tensor:
    return (blocks * size + place).to(torch.int32).long()


def _dense_table(inputs: Inputs) -> Outputs | None:
    table = inputs.table
    if table.is_contiguous() or not table.numel():
        return None
    dense = table.as_strided(table.shape, (table.shape[1], 1), table.storage_offset())
    return Outputs(_mapped(dataclasses.replace(inputs, table=dense), *_tokens(inputs), forgiving=True))


def _minus_one_as_record(inputs: Inputs) -> Outputs:
    """Tokens that write nothing get the record -1: the last place of the block before the row's first."""
    request, position = _tokens(inputs)
    right, silent = _mapped(inputs, request, position, forgiving=True), ~_ends(inputs, position)
    if silent.any():
        right[: request.numel()][silent] = inputs.table[request[silent], 0].long() * inputs.block_size - 1
    return Outputs(right)


def _buffer_left(count: Callable[[Inputs], int]) -> Callable[[Inputs], Outputs | None]:
    """Entries from `count` on that nobody writes keep what was in the buffer."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.out is None:
            return None
        slots = reference(inputs).slots
        slots[count(inputs) :] = inputs.out[count(inputs) :]
        return Outputs(slots)

    return answer


def _first_tile(inputs: Inputs) -> Outputs:
    slots = reference(inputs).slots
    request, position = _tokens(inputs)
    slots[: request.numel()][_chunk_index(inputs, request, position) >= 1024] = _PADDING
    return Outputs(slots)


def _padding_mapped(inputs: Inputs) -> Outputs | None:
    """Tokens behind the last request's count as its own."""
    requests = inputs.seq_lens.numel()
    if not requests or int(inputs.query_start[-1]) == inputs.tokens:
        return None
    more = inputs.tokens - int(inputs.query_start[-1])
    request, position = _tokens(inputs)
    request = torch.cat([request, torch.full((more,), requests - 1)])
    position = torch.cat([position, int(inputs.seq_lens[-1]) + torch.arange(more)])
    return Outputs(_mapped(inputs, request, position, forgiving=True))


MUTANTS: tuple[Mutant, ...] = (
    Mutant("every-token-mapped", "a token wrote though it ends no group",
           _wrong(ends=lambda inputs, position: torch.ones_like(position, dtype=torch.bool))),
    Mutant("group-ended-one-late", "the first token of a group wrote",
           _wrong(ends=lambda inputs, position: position % inputs.ratio == 0)),
    Mutant("group-ended-one-early", "the last token but one of a group wrote",
           _wrong(ends=lambda inputs, position: (position + 2) % inputs.ratio == 0)),
    Mutant("own-slots-ignored", "tokens without a slot of their own wrote", _wrong(ignore_own=True)),
    Mutant("minus-one-as-record", "-1 were taken for a record", _minus_one_as_record),
    Mutant("position-as-record", "positions were not divided by the ratio",
           _wrong(records=lambda inputs, position: _records(inputs, position) * inputs.ratio
                  + position % inputs.ratio)),
    Mutant("record-one-on", "the group's record were the next one",
           _wrong(records=lambda inputs, position: _records(inputs, position) + 1)),
    Mutant("blocks-of-tokens", "a block held as many records as tokens",
           lambda inputs: _wrong(block_size=inputs.block_size * inputs.ratio)(inputs)),
    Mutant("block-number-as-slot", "blocks were not multiplied by their size",
           _wrong(slot_of=lambda blocks, place, size: blocks + place)),
    Mutant("blocks-of-token-slots", "a block's first slot were counted in tokens",
           lambda inputs: _wrong(slot_of=lambda blocks, place, size: blocks * size * inputs.ratio + place)(inputs)),
    Mutant("slots-of-32-bits", "slots wrapped at 2^31", _wrong(slot_of=_in_32_bits)),
    Mutant("context-ignored", "positions started at 0 in every step",
           _elsewhere(position=_chunk_index)),
    Mutant("query-length-ignored", "the first token stood at the sequence's length",
           _elsewhere(position=lambda inputs, request, position: inputs.seq_lens.long()[request]
                      + _chunk_index(inputs, request, position))),
    Mutant("positions-of-the-batch", "the index in the batch were the index in the request",
           _elsewhere(position=lambda inputs, request, position: position
                      + inputs.query_start.long()[:-1][request])),
    Mutant("row-of-the-first-request", "all requests used the first row of the table",
           _elsewhere(request=lambda inputs, request: torch.zeros_like(request))),
    Mutant("table-taken-as-dense", "rows of the table were as far apart as they are long", _dense_table),
    Mutant("ranks-ignored", "records were numbered as if there were one rank",
           _wrong(records=lambda inputs, position: position // inputs.ratio)),
    Mutant("ranks-in-turns-of-a-group", "ranks took turns group by group",
           _wrong(records=lambda inputs, position: position // inputs.ratio // inputs.ranks)),
    Mutant("tail-left", "the buffer behind the tokens kept its contents", _buffer_left(lambda inputs: inputs.tokens)),
    Mutant("padding-left", "entries behind the last request kept their contents",
           _buffer_left(lambda inputs: int(inputs.query_start[-1]))),
    Mutant("first-tile-only", "a request's tokens from the 1025th on were forgotten", _first_tile),
    Mutant("padding-mapped", "tokens behind the last request were its own", _padding_mapped),
)  # fmt: skip


def _token_by_token(inputs: Inputs) -> Outputs:
    """One token after the other, in Python's integers."""
    slots = [_PADDING] * (inputs.tokens if inputs.out is None else inputs.out.numel())
    bounds, turn = inputs.query_start.tolist(), inputs.interleave
    for request, length in enumerate(inputs.seq_lens.tolist()):
        for token in range(bounds[request], bounds[request + 1]):
            position = length - (bounds[request + 1] - token)
            if (position + 1) % inputs.ratio or int(inputs.token_slots[token]) == _PADDING:
                continue
            round_, within = divmod(position, turn * inputs.ranks)
            block, place = divmod((round_ * turn + within % turn) // inputs.ratio, inputs.block_size)
            slots[token] = int(inputs.table[request, block]) * inputs.block_size + place
    return Outputs(torch.tensor(slots, dtype=torch.int64))


_EXACTLY = Precision(probability="exact", note="integers")

HONEST: tuple[Honest, ...] = (
    Honest("vectorised", _EXACTLY, reference),
    Honest("token-by-token", _EXACTLY, _token_by_token),
)
