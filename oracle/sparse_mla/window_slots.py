"""Which cache slots does each query's sliding window hold?

Row i is token a = i + token_offset of the batch; r = token_to_request[a], ql = query_start[r + 1] - query_start[r],
pos = seq_lens[r] - ql + a - query_start[r].

    causal: start = max(pos - (window - 1), 0, replay_start[r]),   end = pos + 1
    draft:  start = max(seq_lens[r] - ql - window, 0),             end = seq_lens[r]
    slots[i, c] = table[r, (start + c) // B] * B + (start + c) % B,   c = 0..end-start-1;   every other column is -1
    lens[i]     = end - start;   a token that is not valid has no slot and length 0

    gather_lens[r - first_prefill] = ql + min(max(seq_lens[r] - ql - replay_start[r], 0), window - 1)

Where end <= start the row is empty, whatever the length says. Source: the kernels of vLLM's sliding-window metadata,
`_compute_swa_indices_and_lens_kernel`, its draft-block counterpart and the one that prepares prefill; they store
end - start also where it is negative, and the builder of ragged lists takes a negative length for an empty row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cases.memory import guarded_copy, moved
from cases.precision import Precision
from cases.sparse_mla.window_slots import Inputs, Outputs
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where the windows can be got wrong; the defaults are right."""

    window_change: int = 0
    end_change: int = 0
    unclamped_start: bool = False
    replay_ignored: bool = False
    offset_ignored: bool = False
    validity_ignored: bool = False
    stale_invalid_rows: bool = False
    stale_tails: bool = False
    table_pitch: bool = False
    table_of_row: bool = False
    block_size_factor: int = 1
    place_ignored: bool = False
    block_ignored: bool = False
    draft_causal: bool = False
    draft_window_of_token: bool = False
    causal_as_draft: bool = False


RIGHT = Faults()


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Slots, lengths and gather lengths, new tensors; `dtype` changes nothing, since all is integers.

    A call without rows or without prefill requests gives empty tensors. Raises ValueError for tensors of sizes that do
    not fit together, for a valid token of no request, and for rows with more slots than columns.
    """
    del dtype
    _require(inputs)
    return Outputs(*_windows(inputs, RIGHT), _gather_lens(inputs))


def _require(inputs: Inputs) -> None:
    requests, rows = inputs.seq_lens.numel(), inputs.slots.shape[0]
    for name, got, want in (
        ("query_start", inputs.query_start.numel(), requests + 1),
        ("table", inputs.table.shape[0], requests),
        ("replay_start", inputs.replay_start.numel(), requests),
        ("valid", inputs.valid.numel(), inputs.token_to_request.numel()),
        ("gather_lens", inputs.gather_lens.numel(), requests - inputs.first_prefill),
    ):
        if got != want:
            raise ValueError(f"{name} has {got} entries: should be {want}")
    tokens = inputs.token_to_request.numel()
    if rows + inputs.token_offset > tokens:
        raise ValueError(f"{rows} rows from token {inputs.token_offset} on: should be at most {tokens} tokens")
    owners = inputs.token_to_request[inputs.valid]
    if bool(((owners < 0) | (owners >= requests)).any()):
        raise ValueError(f"token_to_request of a valid token should be 0 to {requests - 1}")
    for row in range(rows):
        start, end = _span(inputs, row, RIGHT)
        if end - start > inputs.slots.shape[1]:
            raise ValueError(f"slots has {inputs.slots.shape[1]} columns: should be {end - start} for row {row}")


def _span(inputs: Inputs, row: int, faults: Faults) -> tuple[int, int]:
    """The first position that a row sees, and the one behind the last; equal where the token is not valid."""
    token = row if faults.offset_ignored else row + inputs.token_offset
    if not inputs.valid[token] and not faults.validity_ignored:
        return 0, 0
    request = _owner(inputs, token)
    first, last = int(inputs.query_start[request]), int(inputs.query_start[request + 1])
    length = int(inputs.seq_lens[request])
    position = length - (last - first) + token - first
    window = inputs.window + faults.window_change
    replay = 0 if faults.replay_ignored else int(inputs.replay_start[request])
    draft = inputs.form == "draft" and not faults.draft_window_of_token
    start = length - (last - first) - window if draft or faults.causal_as_draft else position - (window - 1)
    whole = inputs.form == "draft" and not faults.draft_causal
    end = length if whole or faults.causal_as_draft else position + 1
    if not faults.unclamped_start:
        start = max(start, 0)
    if inputs.form == "causal":
        start = max(start, replay)
    return start, end + faults.end_change


def _owner(inputs: Inputs, token: int) -> int:
    # Only a fault asks for the request of a token that is none.
    return min(max(int(inputs.token_to_request[token]), 0), max(0, inputs.seq_lens.numel() - 1))


def _windows(inputs: Inputs, faults: Faults) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = inputs.slots.shape
    slots = torch.full((rows, columns), -1, dtype=torch.int64)
    if faults.stale_tails:
        slots = inputs.slots.to("cpu", torch.int64, copy=True)
    lens = torch.zeros(rows, dtype=torch.int64)
    for row in range(rows):
        token = row if faults.offset_ignored else row + inputs.token_offset
        if not inputs.valid[token] and not faults.validity_ignored:
            if faults.stale_invalid_rows:
                slots[row] = inputs.slots[row]
            continue
        start, end = _span(inputs, row, faults)
        lens[row] = end - start
        positions = torch.arange(start, max(start, end))[:columns]
        slots[row, : positions.numel()] = _slots(inputs, row if faults.table_of_row else token, positions, faults)
    # What a wrong block number leaves beyond int32 wraps, as it would in a kernel.
    return ((slots + 2**31) % 2**32 - 2**31).to(torch.int32), lens.to(torch.int32)


def _slots(inputs: Inputs, token: int, positions: torch.Tensor, faults: Faults) -> torch.Tensor:
    size = inputs.block_size * faults.block_size_factor
    request = _owner(inputs, token)
    if faults.table_of_row:
        request = min(token, inputs.seq_lens.numel() - 1)
    requests, columns = inputs.table.shape
    line = inputs.table[request]
    if faults.table_pitch:
        line = inputs.table.as_strided((requests, columns), (columns, 1))[request]
    # A position in front of the sequence, which only a fault asks for, wraps to the end of the table.
    block = line.to(torch.int64)[torch.div(positions, size, rounding_mode="floor") % columns]
    place = positions % size
    if faults.place_ignored:
        place = torch.zeros_like(place)
    return place if faults.block_ignored else block * size + place


def _gather_lens(
    inputs: Inputs, window_change: int = 0, whole: bool = False, no_replay: bool = False, first: int | None = None
) -> torch.Tensor:
    queries = inputs.query_start[1:] - inputs.query_start[:-1]
    replay = torch.zeros_like(inputs.replay_start) if no_replay else inputs.replay_start
    before = (inputs.seq_lens - queries - replay).clamp(min=0)
    if not whole:
        before = before.clamp(max=inputs.window - 1 + window_change)
    first = inputs.first_prefill if first is None else first
    return (queries + before)[first : first + inputs.gather_lens.numel()].to(torch.int32)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Slots and gather lengths bit for bit, lengths too where the row is not empty."""
    del precision
    want = reference(inputs)
    lens = None if outputs.lens is None else outputs.lens.clamp(min=0)
    return (
        exact("slots", outputs.slots, want.slots, why="a window is a run of positions, each of which has one slot"),
        exact("lens", lens, want.lens.clamp(min=0), why="the positions that the row sees"),
        exact("gather_lens", outputs.gather_lens, want.gather_lens, why="the queries and what their windows reach"),
    )


def _with(inputs: Inputs, **changes: object) -> Inputs:
    """Inputs some of which are replaced, with output memory of their own."""
    fresh: dict[str, Any] = {
        name: moved(getattr(inputs, name), "cpu") for name in ("slots", "lens", "gather_lens")
    } | changes
    return dataclasses.replace(inputs, **fresh)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _reached(inputs: Inputs) -> torch.Tensor:
    """bool over the table: True where a row's window reaches."""
    reached = torch.zeros(inputs.table.shape, dtype=torch.bool)
    for row in range(inputs.slots.shape[0]):
        start, end = _span(inputs, row, RIGHT)
        if end > start:
            request = _owner(inputs, row + inputs.token_offset)
            reached[request, start // inputs.block_size : (end - 1) // inputs.block_size + 1] = True
    return reached


def _blocks_changed(inputs: Inputs) -> Inputs:
    return _with(inputs, table=_table_like(inputs, torch.where(_reached(inputs), inputs.table, 77)))


def _table_like(inputs: Inputs, table: torch.Tensor) -> torch.Tensor:
    copy = moved(inputs.table, "cpu")
    copy.copy_(table)
    return copy


def _blocks_renumbered(inputs: Inputs) -> Inputs:
    # Flipping the lowest bit stays inside int32 and is its own inverse.
    return _with(inputs, table=_table_like(inputs, torch.where(_reached(inputs), inputs.table ^ 1, inputs.table)))


def _slots_renumbered(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    size = inputs.block_size
    moved_to = ((first.slots // size) ^ 1) * size + first.slots % size
    return dataclasses.replace(first, slots=torch.where(first.slots >= 0, moved_to, first.slots))


def _half_blocks(inputs: Inputs) -> Inputs | None:
    if inputs.block_size % 2:
        return None
    table = torch.where(_reached(inputs), inputs.table, 0)
    halves = torch.stack((2 * table, 2 * table + 1), dim=2).flatten(1)
    return _with(inputs, table=guarded_copy(halves), block_size=inputs.block_size // 2)


def _later_rows(inputs: Inputs) -> Inputs | None:
    half = inputs.slots.shape[0] // 2
    if not half:
        return None
    return _with(
        inputs, slots=moved(inputs.slots, "cpu")[half:], lens=moved(inputs.lens, "cpu")[half:],
        token_offset=inputs.token_offset + half,
    )  # fmt: skip


def _later_half(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    half = inputs.slots.shape[0] // 2
    return Outputs(first.slots[half:], first.lens[half:], first.gather_lens)


def _padded(inputs: Inputs) -> Inputs | None:
    # Only behind the batch's last token can there be more of them.
    if inputs.token_offset + inputs.slots.shape[0] != inputs.token_to_request.numel():
        return None
    rows, columns = inputs.slots.shape
    return _with(
        inputs,
        slots=torch.full((rows + 2, columns), 5, dtype=torch.int32),
        lens=torch.full((rows + 2,), 5, dtype=torch.int32),
        token_to_request=guarded_copy(
            torch.cat((inputs.token_to_request, torch.full((2,), 2**31 - 1))).to(torch.int32)
        ),
        valid=guarded_copy(torch.cat((inputs.valid, torch.zeros(2, dtype=torch.bool)))),
    )


def _two_more_rows(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    pad = torch.nn.functional.pad
    return Outputs(pad(first.slots, (0, 0, 0, 2), value=-1), pad(first.lens, (0, 2)), first.gather_lens)


def _reversed(inputs: Inputs) -> Inputs | None:
    """The requests of the rows in reverse order, where the batch has no others."""
    if inputs.token_offset or inputs.slots.shape[0] != int(inputs.query_start[-1]) or inputs.seq_lens.numel() < 2:
        return None
    order = _reversed_rows(inputs)
    queries = (inputs.query_start[1:] - inputs.query_start[:-1]).flip(0)
    owner = torch.where(inputs.valid, inputs.seq_lens.numel() - 1 - inputs.token_to_request, -5)
    return _with(
        inputs,
        query_start=guarded_copy(torch.nn.functional.pad(torch.cumsum(queries, 0), (1, 0)).to(torch.int32)),
        seq_lens=guarded_copy(inputs.seq_lens.flip(0)),
        replay_start=guarded_copy(inputs.replay_start.flip(0)),
        table=guarded_copy(inputs.table.flip(0)),
        token_to_request=guarded_copy(owner[order].to(torch.int32)),
        valid=guarded_copy(inputs.valid[order]),
        first_prefill=0,
        gather_lens=torch.zeros(inputs.seq_lens.numel(), dtype=torch.int32),
    )


def _reversed_rows(inputs: Inputs) -> torch.Tensor:
    starts = inputs.query_start.tolist()
    runs = [torch.arange(starts[r], starts[r + 1]) for r in range(len(starts) - 1)]
    return torch.cat(runs[::-1])


def _rows_reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    order = _reversed_rows(inputs)
    return Outputs(first.slots[order], first.lens[order], reference(edited).gather_lens)


def _rows_only(outputs: Outputs) -> Outputs:
    # The law speaks of the rows; the edited call asks for other requests' gather lengths.
    return Outputs(outputs.slots, outputs.lens, outputs.gather_lens[:0])


LAWS: tuple[Law, ...] = (
    Law("M5 blocks renumbered", "a block's number is where its slots begin, and nothing else", _blocks_renumbered,
        _slots_renumbered, "bitwise"),
    Law("M6 half blocks", "blocks cut in half hold the same slots", _half_blocks, _same, "bitwise"),
    Law("M14 requests reversed", "a row depends on its own request only", _reversed, _rows_reversed, "bitwise",
        _rows_only),
    Law("M19 later rows on their own", "the later tokens as a call of their own get the same rows", _later_rows,
        _later_half, "bitwise"),
    Law("M25 padding added", "tokens that are none get empty rows and change no other", _padded, _two_more_rows,
        "bitwise"),
    Law("W1 other blocks out of reach", "blocks that no window reaches do not matter", _blocks_changed, _same,
        "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, when: Callable[[Inputs], bool] = lambda inputs: True, **faults: Any) -> Mutant:
    def answer(inputs: Inputs) -> Outputs | None:
        return Outputs(*_windows(inputs, Faults(**faults)), _gather_lens(inputs)) if when(inputs) else None

    return Mutant(name, pitfall, answer)


def _gather_mutant(name: str, pitfall: str, lens: Callable[[Inputs], torch.Tensor]) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: Outputs(*_windows(inputs, RIGHT), lens(inputs)))


def _is_draft(inputs: Inputs) -> bool:
    return inputs.form == "draft"


def _is_causal(inputs: Inputs) -> bool:
    return inputs.form == "causal"


def _is_narrowed(inputs: Inputs) -> bool:
    return inputs.table.shape[0] > 1 and inputs.table.stride(0) > inputs.table.shape[1]


def _first_requests(inputs: Inputs) -> torch.Tensor:
    return _gather_lens(inputs, first=0)


def _unclamped_gather(inputs: Inputs) -> torch.Tensor:
    queries = inputs.query_start[1:] - inputs.query_start[:-1]
    before = (inputs.seq_lens - queries - inputs.replay_start).clamp(max=inputs.window - 1)
    return (queries + before)[inputs.first_prefill :].to(torch.int32)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("window-one-short", "the window left out its first token", window_change=-1),
    _mutant("window-one-long", "the window had one token more", window_change=1),
    _mutant("window-without-the-query", "the window ended before the query's own token", end_change=-1),
    _mutant("window-with-the-next-token", "the window ended behind the query's own token", end_change=1),
    _mutant("start-not-clamped", "the window began before the sequence does", unclamped_start=True),
    _mutant("replay-start-ignored", "keys had been kept from the first token on", _is_causal, replay_ignored=True),
    _mutant("offset-ignored", "row i were token i of the batch", lambda inputs: inputs.token_offset > 0,
            offset_ignored=True),
    _mutant("padding-attended", "every token were valid", validity_ignored=True),
    _mutant("padded-rows-stale", "the rows of tokens that are none were left as they were", stale_invalid_rows=True),
    _mutant("tails-stale", "the columns behind a window were left as they were", stale_tails=True),
    _mutant("table-pitch-is-its-width", "the rows of a narrowed block table lay one behind the other", _is_narrowed,
            table_pitch=True),
    _mutant("table-row-of-the-row", "the block table had a row for each row", table_of_row=True),
    _mutant("other-block-size", "positions were divided by twice the block size", block_size_factor=2),
    _mutant("place-ignored", "every position were the first of its block", place_ignored=True),
    _mutant("block-ignored", "every block were the first one", block_ignored=True),
    _mutant("draft-block-causal", "a draft token did not see the later ones of its block", _is_draft,
            draft_causal=True),
    _mutant("draft-window-of-the-token", "a draft token's window began that far before itself, not before the block",
            _is_draft, draft_window_of_token=True),
    _mutant("causal-as-draft", "a query saw all tokens of its request in the batch", _is_causal, causal_as_draft=True),
    _gather_mutant("gather-one-long", "a window reached back its whole width", lambda i: _gather_lens(i, 1)),
    _gather_mutant("gather-one-short", "a window reached back two tokens less than its width",
                   lambda i: _gather_lens(i, -1)),
    _gather_mutant("gather-everything", "the whole sequence were gathered", lambda i: _gather_lens(i, whole=True)),
    _gather_mutant("gather-replay-ignored", "keys had been kept from the first token on",
                   lambda i: _gather_lens(i, no_replay=True)),
    _gather_mutant("gather-negative-prefix", "a request with fewer tokens than queries gathered its tokens only",
                   _unclamped_gather),
    _gather_mutant("gather-of-the-first-requests", "the gather lengths were those of the batch's first requests",
                   _first_requests),
)  # fmt: skip


def _by_positions(inputs: Inputs) -> Outputs:
    """Position by position, and the lengths of empty rows all -9."""
    rows = [[-1] * inputs.slots.shape[1] for _ in range(inputs.slots.shape[0])]
    lens = []
    for row, line in enumerate(rows):
        start, end = _span(inputs, row, RIGHT)
        lens.append(end - start if end > start else -9)
        for position in range(start, end):
            block = int(inputs.table[_owner(inputs, row + inputs.token_offset), position // inputs.block_size])
            line[position - start] = block * inputs.block_size + position % inputs.block_size
    slots = torch.tensor(rows, dtype=torch.int32).reshape(inputs.slots.shape)
    return Outputs(slots, torch.tensor(lens, dtype=torch.int32), _gather_lens(inputs))


HONEST: tuple[Honest, ...] = (
    Honest("lengths-as-differences", Precision(), reference),
    Honest("empty-rows-far-below-zero", Precision(), _by_positions),
)
