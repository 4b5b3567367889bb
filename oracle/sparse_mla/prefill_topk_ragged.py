"""Which ragged list of slots do prefill tokens' top-k positions give?

    a = t + token_offset,  r = requests[a],  p = seq_lens[r] - (query_start[r+1] - query_start[r]) + a - query_start[r]
    L_t = max(0, min(floor((p + 1) / ratio), W)), or 0 if token a is not valid
    row t = [ s for v in local[t, :L_t] if 0 <= v < num_compressed
                for s = table[r, v // B] * B + v % B if num_rows < 0 or s < num_rows ]

int32; layout in `oracle.sparse_mla.ragged`. Only floor((p + 1) / ratio) compressed keys exist at the token, and what the
row holds behind as many columns is left from another step. Source: `build_prefill_topk_ragged_indices` of vLLM's ROCm
sparse MLA backend. It has no answer for 0 rows (here: an empty list and indptr [0]), and looks up the request of a
token before it asks whether the token is valid, so that padding with a stray request reads outside the batch's tensors.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.memory import guarded, moved
from cases.precision import Precision
from cases.sparse_mla.prefill_topk_ragged import Inputs, Outputs
from oracle.check import Check
from oracle.laws import Honest, Law, Mutant
from oracle.sparse_mla import paging, ragged


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The slots of every row, with unwritten memory behind them; `dtype` changes nothing.

    Raises ValueError for a ratio or block size below 1, and for fewer requests or flags than tokens.
    """
    del dtype
    for name, value in (("ratio", inputs.ratio), ("block_size", inputs.block_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: should be 1 or more")
    tokens = inputs.token_offset + inputs.local.shape[0]
    for name, count in (("requests", inputs.requests.numel()), ("valid", inputs.valid.numel())):
        if count < tokens:
            raise ValueError(f"{name}={count}: should be one for each of {tokens} tokens, or more")
    rows = [_row(inputs, row) for row in range(inputs.local.shape[0])]
    return Outputs(*ragged.joined(rows, inputs.local.numel(), inputs.local.device))


def keys_of(inputs: Inputs, token: int) -> int:
    """Compressed keys that exist at a valid token of the batch; none where the number is negative."""
    return (position_of(inputs, token) + 1) // inputs.ratio


def position_of(inputs: Inputs, token: int) -> int:
    """The position of a valid token of the batch in its request's sequence."""
    request = int(inputs.requests[token])
    start, end = int(inputs.query_start[request]), int(inputs.query_start[request + 1])
    return int(inputs.seq_lens[request]) - (end - start) + token - start


def _row(inputs: Inputs, row: int) -> torch.Tensor:
    token = row + inputs.token_offset
    positions = inputs.local[row].to(torch.int64)
    if not inputs.valid[token]:
        return positions[:0]
    positions = positions[: max(0, keys_of(inputs, token))]
    positions = positions[(positions >= 0) & (positions < inputs.num_compressed)]
    slots = paging.slots(inputs.table[inputs.requests[token]], positions, inputs.block_size)
    return slots[slots < inputs.num_rows] if inputs.num_rows >= 0 else slots


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Row starts and used slots bit for bit, and the capacity."""
    del precision
    want = reference(inputs)
    return ragged.checks((outputs.flat, outputs.indptr), (want.flat, want.indptr))


def meaning(outputs: Outputs) -> Outputs:
    """The answer without what means nothing in it."""
    return Outputs(ragged.used(outputs.flat, outputs.indptr), outputs.indptr)


def _asked(inputs: Inputs, **changes: object) -> Inputs:
    """A call with some of its parts changed, and memory for its own answer."""
    edited = dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(
        edited, flat=guarded((edited.local.numel(),), torch.int32),
        indptr=guarded((edited.local.shape[0] + 1,), torch.int32),
    )  # fmt: skip


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _own(inputs: Inputs, values: torch.Tensor) -> torch.Tensor:
    """The part of a batch-wide tensor that belongs to the rows."""
    return values[inputs.token_offset : inputs.token_offset + inputs.local.shape[0]]


def _tails_changed(inputs: Inputs) -> Inputs:
    """Other positions behind each row's keys."""
    local = moved(inputs.local, inputs.local.device)
    for row, valid in enumerate(_own(inputs, inputs.valid).tolist()):
        keys = keys_of(inputs, row + inputs.token_offset) if valid else 0
        local[row, max(keys, 0) :] = 0
    return _asked(inputs, local=local)


def _padding_changed(inputs: Inputs) -> Inputs:
    """Other rows, and another request of the batch, for tokens that are not valid."""
    local = moved(inputs.local, inputs.local.device)
    local[~_own(inputs, inputs.valid)] = 0
    return _asked(inputs, local=local, requests=torch.where(inputs.valid, inputs.requests, 0))


def _first_row_later(inputs: Inputs) -> Inputs | None:
    """The first row left to another call."""
    if inputs.local.shape[0] < 1:
        return None
    return _asked(inputs, local=inputs.local[1:], token_offset=inputs.token_offset + 1)


def _without_first(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    rows = ragged.split(first.flat, first.indptr)[1:]
    return Outputs(*ragged.joined(rows, edited.local.numel(), first.flat.device))


def _decodes_changed(inputs: Inputs) -> Inputs | None:
    """The tokens before the rows are not valid any more, and of request 0."""
    if not inputs.token_offset:
        return None
    valid, requests = inputs.valid.clone(), inputs.requests.clone()
    valid[: inputs.token_offset] = False
    requests[: inputs.token_offset] = 0
    return _asked(inputs, valid=valid, requests=requests)


def _pages_halved(inputs: Inputs) -> Inputs | None:
    if inputs.block_size % 2:
        return None
    return _asked(inputs, table=paging.halved(inputs.table), block_size=inputs.block_size // 2)


def _limits_in_the_rows(inputs: Inputs) -> Inputs:
    """What num_compressed and the lengths leave out is negative already."""
    local = moved(inputs.local, inputs.local.device)
    local[local >= inputs.num_compressed] = -9
    return _asked(inputs, local=local)


LAWS: tuple[Law, ...] = (
    Law("P1 tails changed", "what stands behind a row's keys is not used", _tails_changed, _same, "bitwise", meaning),
    Law("P2 padding changed", "a token that is not valid has an empty row, whatever stands in it", _padding_changed,
        _same, "bitwise", meaning),
    Law("P3 first row later", "a batch may be cut into calls", _first_row_later, _without_first, "bitwise", meaning),
    Law("P4 decodes changed", "tokens before the offset play no part", _decodes_changed, _same, "bitwise", meaning),
    Law("P5 blocks halved", "smaller blocks in the same places move no slot", _pages_halved, _same, "bitwise", meaning),
    Law("P6 limits in the rows", "a position beyond the compressed keys is a hole", _limits_in_the_rows, _same,
        "bitwise", meaning),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Where a row can be got wrong; the defaults are right."""

    keys: Callable[[Inputs, int], int] = keys_of
    token: Callable[[Inputs, int], int] = lambda inputs, row: row + inputs.token_offset
    holes: Callable[[torch.Tensor], torch.Tensor] | None = None
    request_shift: int = 0
    validity: bool = True
    compressed_more: int = 0
    bound_more: int = 0
    lowest: int = 0
    blocks_larger: int = 1
    count_limits: bool = False


def _row_by(rule: _Rule, inputs: Inputs, row: int) -> torch.Tensor:
    token = rule.token(inputs, row)
    positions = inputs.local[row].to(torch.int64)
    if rule.validity and not inputs.valid[token]:
        return positions[:0]
    positions = positions[: max(0, rule.keys(inputs, token))]
    there = (positions >= rule.lowest) & (positions < inputs.num_compressed + rule.compressed_more)
    slots = torch.full_like(positions, -1)
    slots[there] = paging.nearest_slots(
        inputs.table, int(inputs.requests[token]) + rule.request_shift, positions[there],
        inputs.block_size * rule.blocks_larger,
    )  # fmt: skip
    if inputs.num_rows >= 0:
        there &= slots < inputs.num_rows + rule.bound_more
    if rule.holes is not None:
        return torch.where(there, slots, rule.holes(slots))
    if rule.count_limits:
        count = int(there.sum())
        there, slots = there[:count], slots[:count]
    return slots[there]


def _mutant(name: str, pitfall: str, rule: _Rule, shows: Callable[[Inputs], bool] = lambda inputs: True) -> Mutant:
    def answer(inputs: Inputs) -> Outputs | None:
        if not shows(inputs):
            return None
        rows = [_row_by(rule, inputs, row) for row in range(inputs.local.shape[0])]
        return Outputs(*ragged.joined(rows, inputs.local.numel(), inputs.local.device))

    return Mutant(name, pitfall, answer)


def _within(inputs: Inputs, token: int) -> tuple[int, int, int]:
    """First token, query length and sequence length of a token's request, of the last one's for a stray request."""
    request = min(max(int(inputs.requests[token]), 0), inputs.seq_lens.numel() - 1)
    start, end = int(inputs.query_start[request]), int(inputs.query_start[request + 1])
    return start, end - start, int(inputs.seq_lens[request])


def _as_if_valid(inputs: Inputs, token: int) -> int:
    start, queries, length = _within(inputs, token)
    return (length - queries + token - start + 1) // inputs.ratio


def _wrong_pitch(inputs: Inputs) -> Outputs | None:
    table = paging.without_pitch(inputs.table)
    if table is None:
        return None
    narrow = dataclasses.replace(inputs, table=table)
    rows = [paging.wrapped(_row(narrow, row)) for row in range(inputs.local.shape[0])]
    return Outputs(*ragged.joined(rows, inputs.local.numel(), inputs.local.device))


def _padded_form(inputs: Inputs) -> Outputs:
    """Every row at its place in a matrix of rows and width."""
    right = reference(inputs)
    rows, width = inputs.local.shape
    flat = torch.full((rows, width), -1, dtype=torch.int32)
    for row, slots in enumerate(ragged.split(right.flat, right.indptr)):
        flat[row, : slots.numel()] = slots
    return Outputs(flat.flatten(), (torch.arange(rows + 1) * width).to(torch.int32))


def _trimmed(inputs: Inputs) -> Outputs:
    right = reference(inputs)
    return Outputs(meaning(right).flat.clone(), right.indptr)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("stale-tails-listed", "all columns of a row counted", _Rule(keys=lambda inputs, token: 1 << 31)),
    _mutant("keys-of-tokens", "as many keys existed as tokens",
            _Rule(keys=lambda inputs, token: position_of(inputs, token) + 1)),
    _mutant("own-group-left-out", "p // ratio keys existed",
            _Rule(keys=lambda inputs, token: position_of(inputs, token) // inputs.ratio)),
    _mutant("unfinished-group-listed", "a group of tokens that is not complete had a key",
            _Rule(keys=lambda inputs, token: -(-(position_of(inputs, token) + 1) // inputs.ratio))),
    _mutant("keys-of-the-whole-request", "the keys behind the token existed already",
            _Rule(keys=lambda inputs, token: _within(inputs, token)[2] // inputs.ratio)),
    _mutant("context-ignored", "a request's tokens began at its query",
            _Rule(keys=lambda inputs, token: (token - _within(inputs, token)[0] + 1) // inputs.ratio)),
    _mutant("query-start-not-subtracted", "a token's number in the batch were its number in the query",
            _Rule(keys=lambda inputs, token: (position_of(inputs, token) + _within(inputs, token)[0] + 1) // inputs.ratio)),
    _mutant("negative-position-from-the-end", "a negative number of keys counted from the row's end",
            _Rule(keys=lambda inputs, token: keys_of(inputs, token) % (inputs.local.shape[1] + 1)
                 if keys_of(inputs, token) < 0 else keys_of(inputs, token))),
    _mutant("offset-ignored", "row t were token t of the batch",
            _Rule(token=lambda inputs, row: row, keys=_as_if_valid), lambda inputs: inputs.token_offset > 0),
    _mutant("validity-ignored", "tokens that are not valid had slots like others",
            _Rule(validity=False, keys=_as_if_valid)),
    _mutant("neighbouring-request", "tokens had the next request's table row", _Rule(request_shift=1)),
    _mutant("compressed-limit-ignored", "positions beyond the compressed keys had slots", _Rule(compressed_more=2**32)),
    _mutant("compressed-limit-off-by-one", "position num_compressed had a slot", _Rule(compressed_more=1)),
    _mutant("bound-ignored", "slots beyond the last were listed", _Rule(bound_more=2**32),
            lambda inputs: inputs.num_rows >= 0),
    _mutant("bound-off-by-one", "slot num_rows were listed", _Rule(bound_more=1), lambda inputs: inputs.num_rows >= 0),
    _mutant("position-0-dropped", "position 0 were none", _Rule(lowest=1)),
    _mutant("holes-kept", "what has no slot were listed as -1",
            _Rule(holes=lambda slots: torch.full_like(slots, -1))),
    _mutant("holes-become-slot-0", "what has no slot were slot 0",
            _Rule(holes=torch.zeros_like)),
    _mutant("count-is-a-limit", "as many columns as there are slots were taken, holes among them",
            _Rule(count_limits=True)),
    _mutant("block-size-of-tokens", "positions were divided by twice the block size, as before a ratio of 2",
            _Rule(blocks_larger=2)),
    _mutant("first-tile-only", "columns from the 1024th on were left out",
            _Rule(keys=lambda inputs, token: min(keys_of(inputs, token), 1024))),
    Mutant("table-pitch-is-its-width", "the rows of a narrowed table lay one behind the other", _wrong_pitch),
    Mutant("capacity-taken-for-count", "rows began where they do in the padded form", _padded_form),
    Mutant("capacity-lost", "the list ended with its last slot", _trimmed),
)  # fmt: skip


def _all_at_once(inputs: Inputs) -> Outputs:
    """Matrices instead of rows, and a valid-looking slot behind the last one."""
    local, valid = inputs.local.to(torch.int64), _own(inputs, inputs.valid)
    request = torch.where(valid, _own(inputs, inputs.requests).to(torch.int64), 0)
    start = inputs.query_start.to(torch.int64)
    token = torch.arange(local.shape[0]) + inputs.token_offset
    position = inputs.seq_lens[request] - start.diff()[request] + token - start[request]
    keys = torch.where(valid, torch.div(position + 1, inputs.ratio, rounding_mode="floor"), 0)
    there = (torch.arange(local.shape[1]) < keys[:, None]) & (local >= 0) & (local < inputs.num_compressed)
    block = torch.where(there, local // inputs.block_size, 0)
    table = inputs.table.to(torch.int64)
    slots = torch.where(there, table[request[:, None], block] * inputs.block_size + local % inputs.block_size, -1)
    if inputs.num_rows >= 0:
        there &= slots < inputs.num_rows
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0))).to(torch.int32)
    flat = torch.zeros(local.numel(), dtype=torch.int32)
    flat[: int(indptr[-1])] = slots[there].to(torch.int32)
    return Outputs(flat, indptr)


HONEST: tuple[Honest, ...] = (
    Honest("one-row-after-the-other", Precision(probability="exact"), reference),
    Honest("all-at-once", Precision(probability="exact"), _all_at_once),
)
