"""Which ragged list of slots do decode tokens' top-k positions give?

    n_t = number of c with local[t, c] >= 0, or 0 if token t is not valid
    slot(t, v) = table[requests[t], v // B] * B + v % B
    row t = [ slot(t, v) if v >= 0 else -1   for v in local[t, :n_t] ]        where holes are kept
    row t = [ slot(t, v)   for v in local[t] if v >= 0 ], as long, or empty    where holes are removed
    lengths[t] = n_t

int32; layout in `oracle.sparse_mla.ragged`. Source: `compute_global_topk_ragged_indices_and_indptr` of vLLM's ROCm
models. Its kernels keep holes: of a row with interior holes they lose as many of the last positions, which is harmless
only if positions always come first, as its callers promise. What an attention needs is that every position be listed,
and that is the call with `removed`, for kernels that promise it. vLLM has no answer for 0 tokens; here 0 tokens give an
empty list and indptr [0].
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.memory import guarded, guarded_copy, moved
from cases.precision import Precision
from cases.sparse_mla.decode_topk_ragged import Inputs, Outputs
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant
from oracle.sparse_mla import paging, ragged

# From the call, a token's number and positions (int64, none negative) to their slots.
_Slots = Callable[[Inputs, int, torch.Tensor], torch.Tensor]


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The slots of every token, with unwritten memory behind them; `dtype` changes nothing.

    Raises ValueError for fewer requests or another number of valid flags than tokens, and for a block size below 1.
    """
    del dtype
    tokens = inputs.local.shape[0]
    if inputs.block_size < 1:
        raise ValueError(f"block_size={inputs.block_size}: should be 1 or more")
    if inputs.requests.numel() < tokens:
        raise ValueError(f"requests={inputs.requests.numel()}: should be one for each of {tokens} tokens, or more")
    if inputs.valid.numel() != tokens:
        raise ValueError(f"valid={inputs.valid.numel()}: should be one for each of {tokens} tokens")
    return _listed(inputs, lambda token: _row(inputs, token, _slots))


def _listed(inputs: Inputs, row: Callable[[int], torch.Tensor]) -> Outputs:
    """The answer whose row t is row(t)."""
    rows = [row(token) for token in range(inputs.local.shape[0])]
    flat, indptr = ragged.joined(rows, inputs.local.numel(), inputs.local.device)
    return Outputs(flat, indptr, indptr.diff())


def _row(inputs: Inputs, token: int, slots: _Slots) -> torch.Tensor:
    if not inputs.valid[token]:
        return torch.empty(0, dtype=torch.int64, device=inputs.local.device)
    positions = inputs.local[token].to(torch.int64)
    there = positions >= 0
    if inputs.holes == "removed":
        return slots(inputs, token, positions[there])
    row = torch.full_like(positions, -1)
    row[there] = slots(inputs, token, positions[there])
    return row[: int(there.sum())]


def _slots(inputs: Inputs, token: int, positions: torch.Tensor) -> torch.Tensor:
    return paging.slots(inputs.table[inputs.requests[token]], positions, inputs.block_size)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Lengths, row starts and used slots bit for bit, and the capacity."""
    del precision
    want = reference(inputs)
    return (
        exact("lengths", outputs.lengths, want.lengths, why="a length is a count"),
        *ragged.checks((outputs.flat, outputs.indptr), (want.flat, want.indptr)),
    )


def meaning(outputs: Outputs) -> Outputs:
    """The answer without what means nothing in it."""
    return dataclasses.replace(outputs, flat=ragged.used(outputs.flat, outputs.indptr))


def _asked(inputs: Inputs, **changes: object) -> Inputs:
    """A call with some of its parts changed, and memory for its own answer."""
    edited = dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]
    tokens = edited.local.shape[0]
    return dataclasses.replace(
        edited, flat=guarded((edited.local.numel(),), torch.int32), indptr=guarded((tokens + 1,), torch.int32),
        lengths=guarded((tokens,), torch.int32),
    )  # fmt: skip


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _tokens_reversed(inputs: Inputs) -> Inputs:
    tokens = inputs.local.shape[0]
    return _asked(
        inputs, local=inputs.local.flip(0), requests=inputs.requests[:tokens].flip(0), valid=inputs.valid.flip(0)
    )


def _reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    rows = ragged.split(first.flat, first.indptr)[::-1]
    flat, indptr = ragged.joined(rows, edited.local.numel(), first.flat.device)
    return Outputs(flat, indptr, first.lengths.flip(0))


def _padding_changed(inputs: Inputs) -> Inputs:
    """Other rows and requests for the tokens that are not valid, and none behind the last token."""
    tokens = inputs.local.shape[0]
    local, requests = moved(inputs.local, inputs.local.device), inputs.requests[:tokens].clone()
    local[~inputs.valid] = 0
    requests[~inputs.valid] = -1234
    return _asked(inputs, local=local, requests=requests)


def _column_added(inputs: Inputs) -> Inputs:
    nothing = torch.full_like(inputs.local[:, :1], -5) if inputs.local.shape[1] else inputs.local.new_full(
        (inputs.local.shape[0], 1), -5
    )  # fmt: skip
    return _asked(inputs, local=guarded_copy(torch.cat((inputs.local, nothing), dim=1), gaps=(3,)))


def _pages_halved(inputs: Inputs) -> Inputs | None:
    if inputs.block_size % 2:
        return None
    return _asked(inputs, table=paging.halved(inputs.table), block_size=inputs.block_size // 2)


def _requests_renamed(inputs: Inputs) -> Inputs:
    count = inputs.table.shape[0]
    known = (inputs.requests >= 0) & (inputs.requests < count)
    return _asked(
        inputs, table=guarded_copy(inputs.table.flip(0)),
        requests=torch.where(known, count - 1 - inputs.requests, inputs.requests),
    )  # fmt: skip


def _holes_named(inputs: Inputs) -> Inputs | None:
    """The other rule for holes, where no valid token has any."""
    there = inputs.local[inputs.valid] >= 0
    if bool((there[:, 1:] & ~there[:, :-1]).any()):
        return None
    return _asked(inputs, holes="removed" if inputs.holes == "kept" else "kept")


LAWS: tuple[Law, ...] = (
    Law("T1 tokens reversed", "a token's slots do not depend on its neighbours", _tokens_reversed, _reversed, "bitwise",
        meaning),
    Law("T2 padding changed", "a token that is not valid has an empty row, whatever stands in it", _padding_changed,
        _same, "bitwise", meaning),
    Law("T3 a column added", "a column without positions adds nothing", _column_added, _same, "bitwise", meaning),
    Law("T4 blocks halved", "smaller blocks in the same places move no slot", _pages_halved, _same, "bitwise", meaning),
    Law("T5 requests renamed", "a request's number means its table row only", _requests_renamed, _same, "bitwise",
        meaning),
    Law("T6 the other rule for holes", "without holes their rule does not matter", _holes_named, _same, "bitwise",
        meaning),
)  # fmt: skip


def _near(inputs: Inputs, request: int, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    return paging.nearest_slots(inputs.table, request, positions, block_size)


def _mapped(name: str, pitfall: str, slots: _Slots) -> Mutant:
    def answer(inputs: Inputs) -> Outputs:
        return _listed(inputs, lambda token: paging.wrapped(_row(inputs, token, slots)))

    return Mutant(name, pitfall, answer)


def _hole_as(name: str, pitfall: str, number: Callable[[Inputs, int], int]) -> Mutant:
    """Holes that are kept, as another number."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.holes != "kept":
            return None

        def row(token: int) -> torch.Tensor:
            right = _row(inputs, token, _slots)
            return torch.where(right == -1, number(inputs, token), right) if right.numel() else right

        return _listed(inputs, row)

    return Mutant(name, pitfall, answer)


def _other_rule(inputs: Inputs) -> Outputs:
    return reference(dataclasses.replace(inputs, holes="removed" if inputs.holes == "kept" else "kept"))


def _rule_mutant(rule: str, name: str, pitfall: str) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _other_rule(inputs) if inputs.holes == rule else None)


def _stops_at_hole(inputs: Inputs) -> Outputs:
    def row(token: int) -> torch.Tensor:
        there = inputs.local[token] >= 0
        return _row(inputs, token, _slots)[: int(there.to(torch.int64).cumprod(0).sum())]

    return _listed(inputs, row)


def _all_valid(inputs: Inputs) -> Outputs:
    """Tokens that are not valid listed too."""
    everyone = dataclasses.replace(inputs, valid=torch.ones_like(inputs.valid))

    def row(token: int) -> torch.Tensor:
        return _row(everyone, token, lambda given, t, v: _near(given, int(given.requests[t]), v, given.block_size))

    return _listed(everyone, row)


def _padding_listed(inputs: Inputs) -> Outputs:
    """Tokens that are not valid have rows of -1."""

    def row(token: int) -> torch.Tensor:
        if inputs.valid[token]:
            return _row(inputs, token, _slots)
        return torch.full((int((inputs.local[token] >= 0).sum()),), -1, dtype=torch.int64)

    return _listed(inputs, row)


def _lengths_of_padding(inputs: Inputs) -> Outputs:
    """Only the lengths forget that a token is not valid."""
    return dataclasses.replace(reference(inputs), lengths=(inputs.local >= 0).sum(1).to(torch.int32))


def _positive_only(inputs: Inputs) -> Outputs:
    return reference(dataclasses.replace(inputs, local=torch.where(inputs.local == 0, -1, inputs.local)))


def _wrong_pitch(inputs: Inputs) -> Outputs | None:
    table = paging.without_pitch(inputs.table)
    if table is None:
        return None
    narrow = dataclasses.replace(inputs, table=table)
    return _listed(narrow, lambda token: paging.wrapped(_row(narrow, token, _slots)))


def _padded_form(inputs: Inputs) -> Outputs:
    """Every row at its place in a matrix of tokens and top-k."""
    right = reference(inputs)
    tokens, topk = inputs.local.shape
    flat = torch.full((tokens, topk), -1, dtype=torch.int32)
    for token, row in enumerate(ragged.split(right.flat, right.indptr)):
        flat[token, : row.numel()] = row
    starts = (torch.arange(tokens + 1) * topk).to(torch.int32)
    return Outputs(flat.flatten(), starts, right.lengths)


def _trimmed(inputs: Inputs) -> Outputs:
    right = reference(inputs)
    return dataclasses.replace(right, flat=meaning(right).flat.clone())


def _whole_rows_counted(inputs: Inputs) -> Outputs:
    """Holes count in the lengths."""
    right = reference(inputs)
    return dataclasses.replace(right, lengths=torch.where(inputs.valid, inputs.local.shape[1], 0).to(torch.int32))


def _limited(name: str, pitfall: str, tokens: int = 1 << 31, columns: int = 1 << 31) -> Mutant:
    """Only the first tokens, or the first columns, are looked at."""

    def answer(inputs: Inputs) -> Outputs:
        local = inputs.local.clone()
        local[:, columns:] = -1
        valid = inputs.valid & (torch.arange(inputs.valid.numel()) < tokens)
        return reference(dataclasses.replace(inputs, local=local, valid=valid))

    return Mutant(name, pitfall, answer)


MUTANTS: tuple[Mutant, ...] = (
    _rule_mutant("removed", "count-is-a-limit", "as many columns as there are positions were taken, holes among them"),
    _rule_mutant("kept", "holes-closed-up", "holes were removed where they should be kept"),
    Mutant("count-ends-at-a-hole", "positions behind the first hole did not count", _stops_at_hole),
    Mutant("validity-ignored", "tokens that are not valid had slots like others", _all_valid),
    Mutant("padding-has-empty-slots", "tokens that are not valid had rows of -1", _padding_listed),
    Mutant("padding-has-length", "the lengths counted tokens that are not valid", _lengths_of_padding),
    Mutant("lengths-are-top-k", "the lengths counted every column", _whole_rows_counted),
    Mutant("position-0-dropped", "position 0 were none", _positive_only),
    _mapped("block-size-of-tokens", "positions were divided by twice the block size, as before a ratio of 2",
            lambda inputs, t, v: _near(inputs, int(inputs.requests[t]), v, 2 * inputs.block_size)),
    _mapped("block-size-of-another-cache", "blocks of the table were as large as another cache's",
            lambda inputs, t, v: _slots(inputs, t, v) // inputs.block_size * (inputs.block_size + 1)
            + v % inputs.block_size),
    _mapped("token-for-request", "a token's number named its table row",
            lambda inputs, t, v: _near(inputs, t, v, inputs.block_size)),
    _mapped("first-request-for-all", "all tokens belonged to request 0",
            lambda inputs, t, v: _near(inputs, 0, v, inputs.block_size)),
    _mapped("neighbouring-request", "tokens had the next request's table row",
            lambda inputs, t, v: _near(inputs, int(inputs.requests[t]) + 1, v, inputs.block_size)),
    _mapped("positions-not-mapped", "positions were slots", lambda inputs, t, v: v),
    _mapped("place-lost", "every position were the first of its block",
            lambda inputs, t, v: _slots(inputs, t, v) - v % inputs.block_size),
    _hole_as("hole-before-the-first-block", "a hole were the slot before the request's first block",
             lambda inputs, t: int(inputs.table[inputs.requests[t], 0]) * inputs.block_size - 1),
    _hole_as("hole-becomes-slot-0", "a hole were slot 0", lambda inputs, t: 0),
    Mutant("table-pitch-is-its-width", "the rows of a narrowed table lay one behind the other", _wrong_pitch),
    Mutant("capacity-taken-for-count", "rows began where they do in the padded form", _padded_form),
    Mutant("capacity-lost", "the list ended with its last slot", _trimmed),
    _limited("sixteen-tokens-only", "tokens from the 17th on had empty rows", tokens=16),
    _limited("first-tile-only", "columns from the 1024th on were left out", columns=1024),
)  # fmt: skip


def _all_at_once(inputs: Inputs) -> Outputs:
    """Matrices instead of rows, and a valid-looking slot behind the last one."""
    local = inputs.local.to(torch.int64)
    there = (local >= 0) & inputs.valid[:, None]
    count = there.sum(1)
    request = torch.where(inputs.valid, inputs.requests[: local.shape[0]].to(torch.int64), 0)
    block = torch.where(there, local // inputs.block_size, 0)
    table = inputs.table.to(torch.int64)
    slots = torch.where(there, table[request[:, None], block] * inputs.block_size + local % inputs.block_size, -1)
    taken = there if inputs.holes == "removed" else torch.arange(local.shape[1]) < count[:, None]
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), count.cumsum(0))).to(torch.int32)
    flat = torch.zeros(local.numel(), dtype=torch.int32)
    flat[: int(taken.sum())] = slots[taken].to(torch.int32)
    return Outputs(flat, indptr, count.to(torch.int32))


HONEST: tuple[Honest, ...] = (
    Honest("one-token-after-the-other", Precision(probability="exact"), reference),
    Honest("all-at-once", Precision(probability="exact"), _all_at_once),
)
