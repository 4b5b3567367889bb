"""How many tokens of a sequence lie on a rank, and in which slot does the rank write each token?

    lengths = (L // I // W) I + clip(L - (L // I // W) I W - r I, 0, I)                    int32
    slots   = table[request, p // (K W)] K + (o // (W I)) I + o % I,  o = p % (K W)        int64
              where rank r holds position p, (p // I) % W == r; -1 elsewhere and behind the last token

for W ranks in turns of I tokens and blocks of K tokens on every rank, the same block number on each. I divides K, so a
slot is that of the token's index on its rank. `oracle.dcp.shards` has the maps. Sources: `get_dcp_local_seq_lens` and
the slot mapping kernels of vLLM's block tables.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.dcp.local_lengths import INT32_MAX, Inputs, Outputs
from cases.memory import guarded, guarded_copy
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.dcp.shards import check_ranks, held, held_by_all, index_of, rank_of
from oracle.laws import Honest, Law, Mutant

_PADDING = -1


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Shares and slots as they must be; `dtype` changes nothing, since these are integers.

    Raises ValueError for ranks, a rank or turns out of range, negative lengths or lengths beyond int32, a rank tensor
    that is not one int32, an interleave that does not divide the block size, bounds that do not fit the table or the
    positions, a buffer shorter than the positions; IndexError for a position outside its request's blocks and a negative
    block.
    """
    del dtype
    check(inputs)
    return Outputs(_shares(inputs), _slots(inputs))


def check(inputs: Inputs) -> None:
    """Raises what `reference` says of calls that are malformed in themselves."""
    check_ranks(inputs.ranks, inputs.rank, inputs.interleave)
    given = inputs.rank_tensor
    if inputs.form == "tensor" and (given.dtype != torch.int32 or given.numel() != 1):
        raise ValueError(f"rank_tensor={given.dtype}{list(given.shape)}: should be one int32")
    if inputs.form == "tensor":
        check_ranks(inputs.ranks, int(given), inputs.interleave)
    if inputs.lengths.numel() and not 0 <= int(inputs.lengths.min()) <= int(inputs.lengths.max()) <= INT32_MAX:
        raise ValueError(f"lengths={int(inputs.lengths.min())}..{int(inputs.lengths.max())}: should be 0 to 2^31 - 1")
    if inputs.block_size < 1 or inputs.block_size % inputs.interleave:
        raise ValueError(f"interleave={inputs.interleave}: should divide block_size={inputs.block_size}")
    if inputs.query_start.numel() != inputs.table.shape[0] + 1:
        raise ValueError(
            f"query_start={inputs.query_start.numel()}: should be one more than {inputs.table.shape[0]} rows"
        )
    if int(inputs.query_start[-1]) > inputs.positions.numel():
        raise ValueError(f"query_start ends with {int(inputs.query_start[-1])}: should be in the positions")
    if inputs.slots.numel() < inputs.positions.numel():
        raise ValueError(f"slots={inputs.slots.numel()}: should be {inputs.positions.numel()} or more")


def _shares(inputs: Inputs) -> torch.Tensor:
    if inputs.form == "all":
        return held_by_all(inputs.lengths, inputs.ranks, inputs.interleave).to(torch.int32)
    rank = int(inputs.rank_tensor) if inputs.form == "tensor" else inputs.rank
    return held(inputs.lengths, rank, inputs.ranks, inputs.interleave).to(torch.int32)


def _tokens(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the position of every token that belongs to one."""
    bounds = inputs.query_start.long()
    request = torch.repeat_interleave(torch.arange(bounds.numel() - 1, device=bounds.device), bounds.diff())
    return request, inputs.positions[: request.numel()]


def _own(inputs: Inputs, position: torch.Tensor) -> torch.Tensor:
    return rank_of(position, inputs.ranks, inputs.interleave) == inputs.rank


def _place(inputs: Inputs, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of the table and the place in the block."""
    span = inputs.block_size * inputs.ranks
    return position // span, index_of(position % span, inputs.ranks, inputs.interleave)


def _slots(
    inputs: Inputs, *, own: Callable[[Inputs, torch.Tensor], torch.Tensor] = _own,
    place: Callable[[Inputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = _place, forgiving: bool = False,
    first_row: bool = False,
) -> torch.Tensor:  # fmt: skip
    """All entries of the buffer; the arguments are what a wrong answer takes for the formula.

    A forgiving look-up stays within the table where the right one raises.
    """
    request, position = _tokens(inputs)
    mine = own(inputs, position)
    column, inside = place(inputs, position)
    row, column = (torch.zeros_like(request) if first_row else request)[mine], column[mine]
    if forgiving:
        column = column.clamp(0, inputs.table.shape[1] - 1)
    elif bool(((column < 0) | (column >= inputs.table.shape[1])).any()):
        raise IndexError(f"position={int(position[mine].max())}: should be in one of {inputs.table.shape[1]} blocks")
    block = inputs.table[row, column].long()
    if not forgiving and bool((block < 0).any()):
        raise IndexError(f"block={int(block.min())}: should not be negative")
    slots = torch.full(inputs.slots.shape, _PADDING, device=inputs.table.device)
    slots[: request.numel()][mine] = block * inputs.block_size + inside[mine]
    return slots


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Shares and the whole buffer of slots, bit for bit."""
    del precision
    want = reference(inputs)
    return (
        exact("lengths", outputs.lengths, want.lengths, why="a rank holds a whole number of tokens"),
        exact("slots", outputs.slots, want.slots, why="a token has one slot on one rank"),
    )


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    """The call with something changed, and memory of its own for the answer."""
    return dataclasses.replace(inputs, slots=guarded(inputs.slots.shape, torch.int64), **changes)  # type: ignore[arg-type]


def _other_form(inputs: Inputs) -> Inputs | None:
    return None if inputs.form == "all" else _edited(inputs, form="tensor" if inputs.form == "number" else "number")


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _one_of_all(inputs: Inputs) -> Inputs | None:
    return _edited(inputs, form="number") if inputs.form == "all" else None


def _its_share(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    share = first.lengths[..., edited.rank].clone(memory_format=torch.contiguous_format)
    return Outputs(share, first.slots)


def _alone(inputs: Inputs) -> Inputs | None:
    """One rank instead of several: its share is the whole, and so is the sum of the shares."""
    if inputs.form != "all":
        return None
    return _edited(
        inputs,
        ranks=1,
        rank=0,
        rank_tensor=guarded_copy(torch.zeros_like(inputs.rank_tensor)),
        query_start=inputs.query_start * 0,
    )


def _summed(answer: Outputs) -> Outputs:
    return Outputs(answer.lengths.sum(-1, dtype=torch.int64), answer.slots[:0])


def _another_round(inputs: Inputs) -> Inputs | None:
    """Every sequence is longer by one turn of every rank."""
    more = inputs.ranks * inputs.interleave
    if inputs.lengths.numel() and int(inputs.lengths.max()) > INT32_MAX - more:
        return None
    return _edited(inputs, lengths=inputs.lengths + more)


def _a_turn_more(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(first.lengths + inputs.interleave, first.slots)


def _next_rank(inputs: Inputs) -> Inputs | None:
    """Every position is a turn later, and the next rank is asked."""
    if inputs.rank + 1 >= inputs.ranks or inputs.form == "all":
        return None
    if inputs.lengths.numel() and int(inputs.lengths.max()) > INT32_MAX - inputs.interleave:
        return None
    rank = inputs.rank + 1
    return _edited(
        inputs, rank=rank, rank_tensor=guarded_copy(torch.full_like(inputs.rank_tensor, rank)),
        positions=guarded_copy(inputs.positions + inputs.interleave), lengths=inputs.lengths + inputs.interleave,
    )  # fmt: skip


def _blocks_lowered(inputs: Inputs) -> Inputs:
    """Every block number is one lower."""
    return _edited(inputs, table=guarded_copy(torch.where(inputs.table > 0, inputs.table - 1, inputs.table)))


def _one_block_back(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    slots = first.slots
    return Outputs(first.lengths, torch.where(slots >= inputs.block_size, slots - inputs.block_size, slots))


def _without_padding(inputs: Inputs) -> Inputs:
    used = int(inputs.query_start[-1])
    return dataclasses.replace(
        inputs, positions=guarded_copy(inputs.positions[:used]), slots=guarded((used,), torch.int64)
    )


def _tokens_only(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    return Outputs(first.lengths, first.slots[: edited.slots.numel()])


LAWS: tuple[Law, ...] = (
    Law("S1 rank given otherwise", "a number and a tensor name the same rank", _other_form, _same, "bitwise"),
    Law("S2 one rank of all", "a rank's share stands at its place among those of all", _one_of_all, _its_share,
        "bitwise"),
    Law("S3 one rank alone", "the shares of all ranks make up the sequence", _alone, _same, "bitwise", _summed),
    Law("S4 another round", "a turn of every rank adds one to every share", _another_round, _a_turn_more, "bitwise"),
    Law("S5 the next rank", "the next rank holds what comes a turn later, in the same slots", _next_rank, _same,
        "bitwise"),
    Law("S6 blocks lowered", "the block before lies block_size slots before", _blocks_lowered, _one_block_back, "bitwise"),
    Law("S7 without padding", "what stands behind the tokens changes none", _without_padding, _tokens_only, "bitwise"),
)  # fmt: skip


def _shares_of(rule: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """The answer whose shares come from another rule of length, rank, ranks and interleave."""

    def answer(inputs: Inputs) -> Outputs:
        length = inputs.lengths.long()
        rank = torch.tensor(inputs.rank)
        if inputs.form == "all":
            length, rank = length[..., None], torch.arange(inputs.ranks)
        shares = rule(length, rank, inputs.ranks, inputs.interleave).expand(
            torch.broadcast_shapes(length.shape, rank.shape)
        )
        return Outputs(shares.to(torch.int32), _slots(inputs))

    return answer


def _remainder(length: torch.Tensor, ranks: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = length // turn // ranks * turn
    return base, length - base * ranks


def _contiguous(length: torch.Tensor, rank: torch.Tensor, ranks: int, turn: int) -> torch.Tensor:
    """Each rank holds one run of positions."""
    run = -(-length // ranks)
    return (length - rank * run).clamp(min=0).minimum(run)


def _wrapped(length: torch.Tensor, rank: torch.Tensor, ranks: int, turn: int) -> torch.Tensor:
    """The count as a quotient rounded up, whose numerator is added up in 32 bits."""
    full = (length + (ranks - rank) * turn).to(torch.int32).long()
    rest = (full - turn * (full // (turn * ranks)) * ranks).clamp(0, turn)
    return full // (turn * ranks) * turn - turn + rest


def _ranks_first(inputs: Inputs) -> Outputs | None:
    if inputs.form != "all":
        return None
    right = reference(inputs)
    return Outputs(right.lengths.movedim(-1, 0), right.slots)


def _slots_of(**belief: object) -> Callable[[Inputs], Outputs]:
    """The answer whose slots come from something else than the formula."""
    return lambda inputs: Outputs(_shares(inputs), _slots(inputs, forgiving=True, **belief))  # type: ignore[arg-type]


def _changed(change: Callable[[Inputs, torch.Tensor], torch.Tensor | None]) -> Callable[[Inputs], Outputs | None]:
    """The right answer with its slots changed."""

    def answer(inputs: Inputs) -> Outputs | None:
        right = reference(inputs)
        slots = change(inputs, right.slots.clone())
        return None if slots is None else Outputs(right.lengths, slots)

    return answer


def _tail_left(inputs: Inputs, slots: torch.Tensor) -> torch.Tensor:
    used = int(inputs.query_start[-1])
    slots[used:] = inputs.slots[used:]
    return slots


def _in_32_bits(inputs: Inputs, slots: torch.Tensor) -> torch.Tensor:
    return slots.to(torch.int32).long()


def _dense_table(inputs: Inputs) -> Outputs | None:
    table = inputs.table
    if table.is_contiguous() or not table.numel():
        return None
    dense = table.as_strided(table.shape, (table.shape[1], 1), table.storage_offset())
    return Outputs(_shares(inputs), _slots(dataclasses.replace(inputs, table=dense), forgiving=True))


def _by_blocks(inputs: Inputs, position: torch.Tensor) -> torch.Tensor:
    return position // inputs.block_size % inputs.ranks == inputs.rank


MUTANTS: tuple[Mutant, ...] = (
    Mutant("shares-rounded-up", "every rank held as much as the first",
           _shares_of(lambda length, rank, ranks, turn: held(length, 0, ranks, turn))),
    Mutant("shares-rounded-down", "the last, partial round were nobody's",
           _shares_of(lambda length, rank, ranks, turn: _remainder(length, ranks, turn)[0])),
    Mutant("shares-padded", "every rank held a whole turn of the last round",
           _shares_of(lambda length, rank, ranks, turn: -(-length // (turn * ranks)) * turn)),
    Mutant("interleave-of-one", "ranks took turns token by token",
           _shares_of(lambda length, rank, ranks, turn: held(length, rank, ranks, 1))),
    Mutant("turn-not-bounded", "all that is left of the last round were each rank's",
           _shares_of(lambda length, rank, ranks, turn: _remainder(length, ranks, turn)[0]
                      + (_remainder(length, ranks, turn)[1] - rank * turn).clamp(min=0))),
    Mutant("share-below-its-rounds", "ranks that the last round does not reach lost tokens for it",
           _shares_of(lambda length, rank, ranks, turn: _remainder(length, ranks, turn)[0]
                      + (_remainder(length, ranks, turn)[1] - rank * turn).clamp(max=turn))),
    Mutant("last-rank-first", "the last rank took the first turn",
           _shares_of(lambda length, rank, ranks, turn: held(length, ranks - 1 - rank, ranks, turn))),
    Mutant("one-run-a-rank", "each rank held one run of positions", _shares_of(_contiguous)),
    Mutant("sum-in-32-bits", "a length next to 2^31 were rounded up in 32 bits", _shares_of(_wrapped)),
    Mutant("whole-length", "every rank held the whole sequence", _shares_of(lambda length, rank, ranks, turn: length)),
    Mutant("ranks-first", "the ranks were the first dimension of the shares", _ranks_first),
    Mutant("every-token-owned", "tokens of other ranks had slots here",
           _slots_of(own=lambda inputs, position: torch.ones_like(position, dtype=torch.bool))),
    Mutant("owner-token-by-token", "the owner were found with turns of one token",
           _slots_of(own=lambda inputs, position: rank_of(position, inputs.ranks, 1) == inputs.rank)),
    Mutant("owner-block-by-block", "ranks took turns block by block", _slots_of(own=_by_blocks)),
    Mutant("owner-one-on", "a rank held the next rank's tokens",
           _slots_of(own=lambda inputs, position: rank_of(position, inputs.ranks, inputs.interleave)
                     == (inputs.rank + 1) % inputs.ranks)),
    Mutant("column-of-one-rank", "a block held block_size positions of the sequence",
           _slots_of(place=lambda inputs, position: (position // inputs.block_size, _place(inputs, position)[1]))),
    Mutant("place-of-one-rank", "a token stood where it would with one rank",
           _slots_of(place=lambda inputs, position: (_place(inputs, position)[0], position % inputs.block_size))),
    Mutant("place-token-by-token", "a token's place were found with turns of one token",
           _slots_of(place=lambda inputs, position: (
               _place(inputs, position)[0], index_of(position % (inputs.block_size * inputs.ranks), inputs.ranks, 1)))),
    Mutant("round-not-widened", "each round took one place instead of a turn",
           _slots_of(place=lambda inputs, position: (
               _place(inputs, position)[0],
               position % (inputs.block_size * inputs.ranks) // (inputs.ranks * inputs.interleave)
               + position % inputs.interleave))),
    Mutant("row-of-the-first-request", "all requests used the first row of the table", _slots_of(first_row=True)),
    Mutant("table-taken-as-dense", "rows of the table were as far apart as they are long", _dense_table),
    Mutant("slots-of-32-bits", "slots wrapped at 2^31", _changed(_in_32_bits)),
    Mutant("tail-left", "entries behind the tokens kept what was there", _changed(_tail_left)),
    Mutant("other-ranks-left", "tokens of other ranks kept what was in the buffer",
           _changed(lambda inputs, slots: torch.where(slots == _PADDING, inputs.slots, slots))),
    Mutant("other-ranks-to-slot-0", "tokens of other ranks were written to slot 0",
           _changed(lambda inputs, slots: slots.clamp(min=0))),
)  # fmt: skip


def _position_by_position(inputs: Inputs) -> Outputs:
    """Whole rounds and what is left, by division with rest, in Python's integers; one token after the other."""

    def share(length: int, rank: int) -> int:
        rounds, left = divmod(length, inputs.ranks * inputs.interleave)
        return rounds * inputs.interleave + len(range(left)[rank * inputs.interleave : (rank + 1) * inputs.interleave])

    asked = range(inputs.ranks) if inputs.form == "all" else [inputs.rank]
    shares = torch.tensor(
        [share(length, rank) for length in inputs.lengths.flatten().tolist() for rank in asked], dtype=torch.int32
    ).reshape(*inputs.lengths.shape, len(asked))
    slots = [_PADDING] * inputs.slots.numel()
    bounds = inputs.query_start.tolist()
    for request in range(len(bounds) - 1):
        for token in range(bounds[request], bounds[request + 1]):
            turn, within = divmod(int(inputs.positions[token]), inputs.interleave)
            round_, rank = divmod(turn, inputs.ranks)
            if rank == inputs.rank:
                block, place = divmod(round_ * inputs.interleave + within, inputs.block_size)
                slots[token] = int(inputs.table[request, block]) * inputs.block_size + place
    return Outputs(shares if inputs.form == "all" else shares[..., 0], torch.tensor(slots, dtype=torch.int64))


_EXACTLY = Precision(probability="exact", note="integers")

HONEST: tuple[Honest, ...] = (
    Honest("vectorised", _EXACTLY, reference),
    Honest("position-by-position", _EXACTLY, _position_by_position),
)
