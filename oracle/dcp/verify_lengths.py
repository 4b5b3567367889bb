"""How many tokens does each row of a verify block see on one rank?

    visible(b, t) = max(0, L_b - S + t + 1)              what stands up to row t, counted over all ranks
    length(b S + t) = tokens that the rank holds of the first visible(b, t)      as in `oracle.dcp.shards`

for sequences of L_b tokens, of which the last S are the block, t = 0..S-1; int32. The bound of causality is put in global
positions first and mapped to the rank then: the tokens that a row must not see lie on different ranks, so the rank's own
length tells nothing about them. Over all ranks the lengths of a row add up to what is visible; of two neighbouring rows
exactly one rank sees one token more, unless nothing is visible. Source: `dcp_local_verify_row_lens` of vLLM's ROCm AITER
MLA backend.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.dcp.local_lengths import INT32_MAX
from cases.dcp.verify_lengths import Inputs, Outputs
from cases.memory import guarded_copy
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.dcp.shards import check_ranks, held, rank_of
from oracle.laws import Honest, Law, Mutant


def visible(lengths: torch.Tensor, queries: int) -> torch.Tensor:
    """Tokens up to each row over all ranks, int64 [requests, queries]."""
    return (lengths.long()[:, None] - queries + 1 + torch.arange(queries, device=lengths.device)).clamp(min=0)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The lengths of all rows; `dtype` changes nothing, since these are integers.

    Raises ValueError for blocks of no query, ranks, a rank or turns out of range, and lengths that are negative or
    beyond int32.
    """
    del dtype
    check_ranks(inputs.ranks, inputs.rank, inputs.interleave)
    if inputs.queries < 1:
        raise ValueError(f"queries={inputs.queries}: should be 1 or more")
    if inputs.lengths.numel() and not 0 <= int(inputs.lengths.min()) <= int(inputs.lengths.max()) <= INT32_MAX:
        raise ValueError(f"lengths={int(inputs.lengths.min())}..{int(inputs.lengths.max())}: should be 0 to 2^31 - 1")
    return _rows(_held(inputs, visible(inputs.lengths, inputs.queries)))


def _held(inputs: Inputs, length: torch.Tensor) -> torch.Tensor:
    return held(length, inputs.rank, inputs.ranks, inputs.interleave)


def _rows(lengths: torch.Tensor) -> Outputs:
    return Outputs(lengths.to(torch.int32).flatten())


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Every row's length, bit for bit; the sentence names the request and the row."""
    del precision
    want = reference(inputs).lengths
    check = exact("lengths", outputs.lengths, want)
    if check.passed or len(check.where) != 1:
        return (check,)
    request, row = divmod(check.where[0], inputs.queries)
    total = int(inputs.lengths[request])
    seen = int(visible(inputs.lengths, inputs.queries)[request, row])
    why = f"row {row} of a sequence of {total} sees {seen} on all ranks, and rank {inputs.rank} of {inputs.ranks} holds those"
    return (exact("lengths", outputs.lengths, want, why=why),)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _last_rows(inputs: Inputs) -> Inputs | None:
    return dataclasses.replace(inputs, queries=inputs.queries - 1) if inputs.queries > 1 else None


def _without_the_first(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(first.lengths.unflatten(0, (-1, inputs.queries))[:, 1:].flatten())


def _rows_before(inputs: Inputs) -> Inputs | None:
    """The block ends a token earlier: its rows are those before."""
    if inputs.queries < 2 or not inputs.lengths.numel() or int(inputs.lengths.min()) < 1:
        return None
    return dataclasses.replace(inputs, lengths=inputs.lengths - 1, queries=inputs.queries - 1)


def _without_the_last(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(first.lengths.unflatten(0, (-1, inputs.queries))[:, :-1].flatten())


def _another_round(inputs: Inputs) -> Inputs | None:
    """A turn of every rank stands before every row that sees anything."""
    more = inputs.ranks * inputs.interleave
    if not inputs.lengths.numel() or int(inputs.lengths.min()) < inputs.queries:
        return None
    return dataclasses.replace(inputs, lengths=inputs.lengths + more) if _fits(inputs, more) else None


def _fits(inputs: Inputs, more: int) -> bool:
    return int(inputs.lengths.max()) <= INT32_MAX - more


def _a_turn_more(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(first.lengths + inputs.interleave)


def _next_rank(inputs: Inputs) -> Inputs | None:
    """The rank behind, and a turn in front of every sequence: the same tokens, counted from another rank on."""
    if inputs.rank + 1 == inputs.ranks or not inputs.lengths.numel() or not _fits(inputs, inputs.interleave):
        return None
    return dataclasses.replace(inputs, lengths=inputs.lengths + inputs.interleave, rank=inputs.rank + 1)


def _reversed(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, lengths=guarded_copy(inputs.lengths.flip(0)))


def _in_that_order(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(first.lengths.unflatten(0, (-1, inputs.queries)).flip(0).flatten())


def _other_dtype(inputs: Inputs) -> Inputs:
    other = torch.int32 if inputs.lengths.dtype == torch.int64 else torch.int64
    return dataclasses.replace(inputs, lengths=guarded_copy(inputs.lengths.to(other)))


LAWS: tuple[Law, ...] = (
    Law("V1 first row left out", "a shorter block has the last rows", _last_rows, _without_the_first, "bitwise"),
    Law("V2 last row left out", "a row sees nothing of those behind it", _rows_before, _without_the_last, "bitwise"),
    Law("V3 another round", "a turn of every rank before the rows adds one to each", _another_round, _a_turn_more,
        "bitwise"),
    Law("V4 requests reversed", "each sequence counts by itself", _reversed, _in_that_order, "bitwise"),
    Law("V5 other dtype", "lengths count as they are", _other_dtype, _same, "bitwise"),
    Law("V6 the next rank", "the next rank sees what comes a turn later", _next_rank, _same, "bitwise"),
)  # fmt: skip


def _wrong(name: str, pitfall: str, rule: Callable[[Inputs], torch.Tensor | None]) -> Mutant:
    """An answer of lengths [requests, queries]."""

    def answer(inputs: Inputs) -> Outputs | None:
        lengths = rule(inputs)
        return None if lengths is None else _rows(lengths.expand(inputs.lengths.numel(), inputs.queries))

    return Mutant(name, pitfall, answer)


def _behind(inputs: Inputs) -> torch.Tensor:
    """How many rows of the block stand behind each, [queries]."""
    return torch.arange(inputs.queries - 1, -1, -1)


def _whole(inputs: Inputs) -> torch.Tensor:
    return _held(inputs, inputs.lengths)[:, None]


def _unclamped(inputs: Inputs) -> torch.Tensor:
    """Whole turns are counted below zero too."""
    length = inputs.lengths.long()[:, None] - _behind(inputs)
    turn, ranks = inputs.interleave, inputs.ranks
    base = length // turn // ranks * turn
    return base + (length - base * ranks - inputs.rank * turn).clamp(0, turn)


def _share_of_the_block(inputs: Inputs) -> torch.Tensor:
    """The rank's length before the block, and of the block as much as if it began with rank 0's turn."""
    before = (inputs.lengths.long() - inputs.queries).clamp(min=0)
    return _held(inputs, before)[:, None] + _held(inputs, torch.arange(1, inputs.queries + 1))


def _owner_of_row(inputs: Inputs) -> torch.Tensor:
    """Only the rank that holds a row's own token counts the block's tokens at all."""
    position = inputs.lengths.long()[:, None] - 1 - _behind(inputs)
    before = _held(inputs, (inputs.lengths.long() - inputs.queries).clamp(min=0))[:, None]
    mine = rank_of(position, inputs.ranks, inputs.interleave) == inputs.rank
    return torch.where(mine, _held(inputs, position.clamp(min=-1) + 1), before)


def _dummies_filled(inputs: Inputs) -> torch.Tensor | None:
    if inputs.lengths.numel() == 0 or bool((inputs.lengths > 0).all()):
        return None
    filled = torch.where(inputs.lengths > 0, inputs.lengths.long(), inputs.queries * inputs.ranks)
    return _held(inputs, visible(filled, inputs.queries))


def _by_rows(inputs: Inputs) -> Outputs:
    return _rows(_held(inputs, visible(inputs.lengths, inputs.queries)).T)


MUTANTS: tuple[Mutant, ...] = (
    _wrong("expand-after-localise", "rows behind were taken from the rank's own length",
           lambda inputs: (_whole(inputs) - _behind(inputs)).clamp(min=0)),
    _wrong("expand-after-localise-unclamped", "rows behind were taken from the rank's own length, below zero too",
           lambda inputs: _whole(inputs) - _behind(inputs)),
    _wrong("committed-prefix-only", "no row saw the block at all",
           lambda inputs: _held(inputs, (inputs.lengths.long() - inputs.queries).clamp(min=0))[:, None]),
    _wrong("visible-below-zero", "a row that sees nothing saw a negative number", _unclamped),
    _wrong("verify-full-length", "every row saw the whole block", _whole),
    _wrong("own-token-unseen", "a row did not see its own token",
           lambda inputs: _held(inputs, (visible(inputs.lengths, inputs.queries) - 1).clamp(min=0))),
    _wrong("next-token-seen", "a row saw the token behind its own",
           lambda inputs: _held(inputs, (visible(inputs.lengths, inputs.queries) + 1)
                                .minimum(inputs.lengths.long()[:, None]))),
    _wrong("rows-backwards", "the first row of a block were its last",
           lambda inputs: _held(inputs, visible(inputs.lengths, inputs.queries)).flip(1)),
    Mutant("rows-before-requests", "the first rows of all requests came first", _by_rows),
    _wrong("block-from-rank-0", "every block began with the turn of rank 0", _share_of_the_block),
    _wrong("block-of-the-owner", "a row saw of the block only what lies on its own token's rank", _owner_of_row),
    _wrong("not-sharded", "the rank held every token",
           lambda inputs: visible(inputs.lengths, inputs.queries)),
    _wrong("rank-0-everywhere", "every rank were the first",
           lambda inputs: held(visible(inputs.lengths, inputs.queries), 0, inputs.ranks, inputs.interleave)),
    _wrong("next-ranks-share", "a rank counted the next one's tokens",
           lambda inputs: held(visible(inputs.lengths, inputs.queries), (inputs.rank + 1) % inputs.ranks, inputs.ranks,
                               inputs.interleave)),
    _wrong("interleave-of-one", "ranks took turns token by token",
           lambda inputs: held(visible(inputs.lengths, inputs.queries), inputs.rank, inputs.ranks, 1)),
    _wrong("dummies-filled", "a request without a token had as many as its rows on every rank", _dummies_filled),
    _wrong("length-without-block", "lengths did not include the block",
           lambda inputs: _held(inputs, visible(inputs.lengths.long() + inputs.queries, inputs.queries))),
)  # fmt: skip


def _row_by_row(inputs: Inputs) -> Outputs:
    """From the last row back: each row loses the one token behind it, if that lies on the rank."""
    rows: list[int] = []
    for length in inputs.lengths.tolist():
        rounds, left = divmod(length, inputs.ranks * inputs.interleave)
        own = range(left)[inputs.rank * inputs.interleave : (inputs.rank + 1) * inputs.interleave]
        count, block = rounds * inputs.interleave + len(own), []
        for position in range(length - 1, length - 1 - inputs.queries, -1):
            block.append(count)
            count -= position >= 0 and position // inputs.interleave % inputs.ranks == inputs.rank
        rows += block[::-1]
    return Outputs(torch.tensor(rows, dtype=torch.int32))


_EXACTLY = Precision(probability="exact", note="integers")

HONEST: tuple[Honest, ...] = (
    Honest("global-bound-first", _EXACTLY, reference),
    Honest("row-by-row", _EXACTLY, _row_by_row),
)
