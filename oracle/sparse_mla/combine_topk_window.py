"""Which workspace rows must the queries of a prefill chunk look at?

Request r has queries at rows qs..qe-1 (qs = query_start[r] - query_start[0]), ql = qe - qs, and its workspace rows
start at M*r. Row t of it lies at position pos = seq_lens[r] - ql + t - qs. With kk = min(top_k, columns of topk):

    n_top = 0 if ratio == 0, else max(0, min(floor((pos + 1) / ratio), kk))
    n_win = max(0, min(pos + 1, window))
    combined[t, c]         = v + M*r if 0 <= v < N else -1,  v = topk[t, c]                    c = 0..n_top-1
    combined[t, n_top + c] = M*r + N + pos - n_win + 1 + c - (seq_lens[r] - gather_lens[r])    c = 0..n_win-1
    lens[t]                = n_top + n_win;   every other column is -1

M = request_rows, N = compressed_rows. Source: the torch form of `combine_topk_swa_indices` in vLLM's ROCm code for
DeepSeek V4.1. That form divides by zero at ratio 0 and cuts 64-bit entries to 32 bits; layers without compressed
entries pass ratio 0, and an entry that no workspace row answers to selects nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cases.memory import guarded_copy, moved
from cases.precision import Precision
from cases.sparse_mla.combine_topk_window import COLUMN_MULTIPLE, Inputs, Outputs
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant


@dataclasses.dataclass(frozen=True)
class _Row:
    """One query: its row, its request, the request's first row and number of queries, and the query's position."""

    row: int
    request: int
    first: int
    queries: int
    position: int


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where the combination can be got wrong; the defaults are right."""

    entries_shift: int = 1
    ratio_of_zero: int = 0
    all_columns: bool = False
    unclamped_top: bool = False
    uncapped_by_columns: bool = False
    mask_negative: bool = True
    mask_large: bool = True
    invalid_becomes: int | None = None
    drop_invalid: bool = False
    cut_to_int32: bool = False
    full_window: bool = False
    unclamped_window: bool = False
    window_size_change: int = 0
    window_shift: int = 0
    window_over_entries: bool = False
    absolute_window: bool = False
    window_at_top_k: bool = False
    window_not_counted: bool = False
    base_kept: bool = False
    first_request: int = 0
    same_request: bool = False
    most_queries: int | None = None
    tail_unwritten: bool = False


RIGHT = Faults()


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Rows and lengths, new tensors; `dtype` changes nothing, since all is integers.

    A call without rows gives empty tensors. Raises ValueError for tensors of sizes that do not fit together, for a
    number of rows that is not the number of queries, and for fewer gathered tokens than the windows reach back.
    """
    del dtype
    _require(inputs)
    return _combined(inputs, RIGHT)


def _require(inputs: Inputs) -> None:
    requests, rows = inputs.seq_lens.numel(), inputs.topk.shape[0]
    for name, got, want in (
        ("query_start", inputs.query_start.numel(), requests + 1),
        ("gather_lens", inputs.gather_lens.numel(), requests),
    ):
        if got != want:
            raise ValueError(f"{name} has {got} entries: should be {want} for {requests} requests")
    starts = inputs.query_start.tolist()
    if rows != starts[-1] - starts[0]:
        raise ValueError(f"topk has {rows} rows: should be {starts[-1] - starts[0]}, the number of queries")
    if inputs.ratio < 0 or inputs.window < 1:
        raise ValueError(f"ratio={inputs.ratio}, window={inputs.window}: should be at least 0 and 1")
    for request, (seq, gather) in enumerate(zip(inputs.seq_lens.tolist(), inputs.gather_lens.tolist(), strict=True)):
        needed = min(seq, starts[request + 1] - starts[request] + inputs.window - 1)
        if gather < needed:
            raise ValueError(f"gather_lens[{request}]={gather}: should be at least {needed}, what the windows reach")


def _rows(inputs: Inputs) -> Iterator[_Row]:
    starts, seq = inputs.query_start.tolist(), inputs.seq_lens.tolist()
    for request, length in enumerate(seq):
        first, queries = starts[request] - starts[0], starts[request + 1] - starts[request]
        for row in range(first, first + queries):
            yield _Row(row, request, first, queries, length - queries + row - first)


def _counts(inputs: Inputs, position: int, faults: Faults = RIGHT) -> tuple[int, int]:
    """How many columns hold selected entries, and how many the window."""
    ratio = inputs.ratio or faults.ratio_of_zero
    most = min(inputs.top_k, inputs.topk.shape[1])
    if faults.uncapped_by_columns:
        most = inputs.top_k
    entries = min((position + faults.entries_shift) // ratio, most) if ratio else 0
    if faults.all_columns and ratio:
        entries = most
    window = min(position + 1, inputs.window + faults.window_size_change)
    if faults.full_window:
        window = inputs.window
    return (
        entries if faults.unclamped_top else max(0, entries),
        window if faults.unclamped_window else max(0, window),
    )


def _combined(inputs: Inputs, faults: Faults) -> Outputs:
    columns = -(-(inputs.top_k + inputs.window) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    rows = inputs.topk.shape[0]
    combined = torch.full((rows, columns), -1, dtype=torch.int64)
    if faults.tail_unwritten:
        combined = inputs.combined.to("cpu", torch.int64, copy=True)
    lens = torch.zeros(rows, dtype=torch.int64)
    topk = inputs.topk.cpu()
    gather_start = (inputs.seq_lens - inputs.gather_lens).tolist()
    for at in _rows(inputs):
        row = at.row + int(inputs.query_start[0]) if faults.base_kept else at.row
        if row >= rows or (faults.most_queries is not None and at.row - at.first >= faults.most_queries):
            continue
        n_top, n_win = _counts(inputs, at.position, faults)
        start = inputs.request_rows * (0 if faults.same_request else at.request + faults.first_request)
        values = _entries(inputs, topk[at.row, : max(0, n_top)], start, faults)
        window = start + inputs.compressed_rows - gather_start[at.request]
        if faults.window_over_entries:
            window -= inputs.compressed_rows
        if faults.absolute_window:
            window += gather_start[at.request]
        window += at.position - n_win + 1 + faults.window_shift
        line = torch.full((n_top if n_top > 0 else 0,), -1, dtype=torch.int64)
        line[: values.numel()] = values
        place = min(inputs.top_k, inputs.topk.shape[1]) if faults.window_at_top_k else line.numel()
        combined[row, : line.numel()] = line[:columns]
        reach = torch.arange(max(0, n_win))[: max(0, columns - place)]
        combined[row, place : place + reach.numel()] = window + reach
        lens[row] = n_top if faults.window_not_counted else n_top + n_win
    # What a wrong sum leaves beyond int32 wraps, as it would in a kernel.
    return Outputs(_as_int32(combined), lens.to(torch.int32))


def _as_int32(values: torch.Tensor) -> torch.Tensor:
    return ((values + 2**31) % 2**32 - 2**31).to(torch.int32)


def _entries(inputs: Inputs, values: torch.Tensor, start: int, faults: Faults) -> torch.Tensor:
    """The columns of the selected entries, int64."""
    values = values.to(torch.int64)
    if faults.cut_to_int32:
        values = _as_int32(values).to(torch.int64)
    valid = torch.ones(values.shape, dtype=torch.bool)
    if faults.mask_negative:
        valid &= values >= 0
    if faults.mask_large:
        valid &= values < inputs.compressed_rows
    if faults.drop_invalid:
        return values[valid] + start
    nothing = -1 if faults.invalid_becomes is None else start + faults.invalid_becomes
    return torch.where(valid, values + start, nothing)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Every column and every length, bit for bit."""
    del precision
    want = reference(inputs)
    return (
        exact("combined", outputs.combined, want.combined, why="a query has one row of workspace indices"),
        exact("lens", outputs.lens, want.lens, why="selected entries that may exist, and the window"),
    )


def _with(inputs: Inputs, **changes: object) -> Inputs:
    """Inputs some of which are replaced, with output memory of their own."""
    rows = inputs.topk.shape[0]
    fresh: dict[str, Any] = {"combined": moved(inputs.combined, "cpu"), "lens": moved(inputs.lens, "cpu"), **changes}
    topk = fresh.get("topk", inputs.topk)
    if topk.shape[0] != rows:
        fresh["combined"], fresh["lens"] = fresh["combined"][: topk.shape[0]], fresh["lens"][: topk.shape[0]]
    return dataclasses.replace(inputs, **fresh)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _base_moved(inputs: Inputs) -> Inputs:
    return _with(inputs, query_start=guarded_copy(inputs.query_start + 1001))


def _chosen(inputs: Inputs, requests: list[int], base: int) -> Inputs:
    """The call for some of the requests, in another order."""
    order = torch.tensor(requests, dtype=torch.int64)
    queries = (inputs.query_start[1:] - inputs.query_start[:-1])[order]
    starts = torch.nn.functional.pad(torch.cumsum(queries, 0), (1, 0)) + base
    return _with(
        inputs,
        topk=guarded_copy(inputs.topk[_row_numbers(inputs, requests)]),
        query_start=guarded_copy(starts.to(torch.int32)),
        seq_lens=guarded_copy(inputs.seq_lens[order]),
        gather_lens=guarded_copy(inputs.gather_lens[order]),
    )


def _row_numbers(inputs: Inputs, requests: list[int]) -> torch.Tensor:
    owners = _owners(inputs)
    return torch.cat(
        [torch.zeros(0, dtype=torch.int64), *((owners == request).nonzero()[:, 0] for request in requests)]
    )


def _owners(inputs: Inputs) -> torch.Tensor:
    return torch.tensor([at.request for at in _rows(inputs)], dtype=torch.int64)


def _moved_rows(first: Outputs, inputs: Inputs, requests: list[int]) -> Outputs:
    """The rows of some requests, their indices moved to where the requests now stand."""
    rows = _row_numbers(inputs, requests)
    new = torch.tensor([requests.index(int(owner)) for owner in _owners(inputs)[rows]], dtype=torch.int64)
    shift = (new - _owners(inputs)[rows]) * inputs.request_rows
    combined = first.combined[rows].to(torch.int64)
    combined = torch.where(combined >= 0, combined + shift[:, None], combined)
    return Outputs(combined.to(torch.int32), first.lens[rows])


def _backwards(inputs: Inputs) -> list[int]:
    return list(range(inputs.seq_lens.numel()))[::-1]


def _second_half(inputs: Inputs) -> list[int]:
    return list(range(inputs.seq_lens.numel() // 2, inputs.seq_lens.numel()))


def _reversed(inputs: Inputs) -> Inputs | None:
    return _chosen(inputs, _backwards(inputs), int(inputs.query_start[0])) if inputs.seq_lens.numel() > 1 else None


def _chunked(inputs: Inputs) -> Inputs | None:
    if inputs.seq_lens.numel() < 2:
        return None
    chosen = _second_half(inputs)
    return _chosen(inputs, chosen, int(inputs.query_start[chosen[0]]))


def _rows_added(inputs: Inputs) -> Inputs | None:
    # Where indices reach up to the last int32 there is no room.
    if inputs.request_rows * inputs.seq_lens.numel() > 2**30:
        return None
    return _with(inputs, request_rows=inputs.request_rows + 77)


def _rows_further(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    shift = _owners(inputs) * (edited.request_rows - inputs.request_rows)
    combined = torch.where(first.combined >= 0, first.combined + shift[:, None], first.combined)
    return Outputs(combined.to(torch.int32), first.lens)


def _gathered_more(inputs: Inputs) -> Inputs | None:
    if inputs.request_rows * inputs.seq_lens.numel() > 2**30:
        return None
    return _with(inputs, gather_lens=guarded_copy(inputs.gather_lens + 3))


def _window_further(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    combined = first.combined.clone()
    for at in _rows(inputs):
        n_top, n_win = _counts(inputs, at.position)
        combined[at.row, n_top : n_top + n_win] += 3
    return Outputs(combined, first.lens)


def _counted(inputs: Inputs) -> torch.Tensor:
    """bool over topk: True where an entry counts."""
    counts = torch.tensor([_counts(inputs, at.position)[0] for at in _rows(inputs)], dtype=torch.int64)
    return torch.arange(inputs.topk.shape[1])[None, :] < counts[:, None]


def _tails_changed(inputs: Inputs) -> Inputs:
    return _with(inputs, topk=guarded_copy(torch.where(_counted(inputs), inputs.topk, 0)))


def _invalid_exchanged(inputs: Inputs) -> Inputs:
    large = inputs.topk >= inputs.compressed_rows
    topk = torch.where(large, -1, torch.where(inputs.topk < 0, inputs.compressed_rows, inputs.topk))
    return _with(inputs, topk=guarded_copy(topk.to(inputs.topk.dtype)))


LAWS: tuple[Law, ...] = (
    Law("M26 query_start moved", "only differences of query_start count", _base_moved, _same, "bitwise"),
    Law(
        "M14 requests reversed", "a request's rows depend on the request and on where its workspace rows start",
        _reversed, lambda first, inputs, edited: _moved_rows(first, inputs, _backwards(inputs)), "bitwise",
    ),
    Law(
        "M19 chunk of its own", "the later requests as a chunk of their own get the same rows",
        _chunked, lambda first, inputs, edited: _moved_rows(first, inputs, _second_half(inputs)), "bitwise",
    ),
    Law("C1 requests further apart", "indices move with the request's first row", _rows_added, _rows_further, "bitwise"),
    Law("C2 more gathered", "three more gathered tokens move the window by three", _gathered_more, _window_further,
        "bitwise"),
    Law("C3 tails changed", "columns beyond the entries that exist are not used", _tails_changed, _same, "bitwise"),
    Law("C4 other invalid entries", "every number that is no entry selects nothing", _invalid_exchanged, _same,
        "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, when: Callable[[Inputs], bool] = lambda inputs: True, **faults: Any) -> Mutant:
    def answer(inputs: Inputs) -> Outputs | None:
        return _combined(inputs, Faults(**faults)) if when(inputs) else None

    return Mutant(name, pitfall, answer)


def _unrounded(inputs: Inputs) -> Outputs:
    right = reference(inputs)
    return Outputs(right.combined[:, : inputs.top_k + inputs.window], right.lens)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("window-over-compressed-rows", "the gathered tokens started at the request's first row",
            window_over_entries=True),
    _mutant("gather-start-ignored", "the whole sequence had been gathered", absolute_window=True),
    _mutant("invalid-shifted", "-1 were moved like an entry, to the previous request's last row", mask_negative=False),
    _mutant("invalid-becomes-first-row", "an entry that selects nothing selected the request's first row",
            invalid_becomes=0),
    _mutant("beyond-compressed-kept", "entries beyond the compressed rows were kept, and hit window rows",
            mask_large=False),
    _mutant("nothing-masked", "every number were moved like an entry", mask_negative=False, mask_large=False),
    _mutant("holes-closed", "entries that select nothing gave up their columns", drop_invalid=True),
    _mutant("entries-cut-to-32-bits", "64-bit entries were cut to 32 bits before they were looked at",
            cut_to_int32=True),
    _mutant("base-not-subtracted", "query_start began at 0", base_kept=True),
    _mutant("ratio-zero-is-one", "a layer without compressed entries had one per token", ratio_of_zero=1),
    _mutant("first-128-queries", "each request had at most 128 queries, one for each worker", most_queries=128),
    _mutant("window-always-full", "the first queries of a sequence had a full window", full_window=True),
    _mutant("negative-window", "a negative position gave a negative window", unclamped_window=True),
    _mutant("negative-entries", "a negative position gave a negative number of entries", unclamped_top=True),
    _mutant("request-of-the-batch", "requests were counted from another one than the chunk's first", first_request=1),
    _mutant("request-start-ignored", "all requests had the first one's workspace rows", same_request=True),
    _mutant("stale-entries", "all columns of topk counted, wherever the query stands", all_columns=True),
    _mutant("entries-before-the-query", "entries existed up to the query's position, without it", entries_shift=0),
    _mutant("entries-one-token-early", "an entry existed one token before it is complete", entries_shift=2),
    _mutant("columns-ignored", "topk had top_k columns", lambda inputs: inputs.topk.shape[1] < inputs.top_k,
            uncapped_by_columns=True),
    _mutant("window-one-short", "the window left out its first token", window_size_change=-1),
    _mutant("window-one-long", "the window had one token more", window_size_change=1),
    _mutant("window-without-the-query", "the window ended before the query's own token", window_shift=-1),
    _mutant("window-at-a-fixed-column", "the window stood behind all columns of topk", window_at_top_k=True),
    _mutant("window-not-counted", "the length counted selected entries only", window_not_counted=True),
    _mutant("tail-not-filled", "the columns behind the window were left as they were", tail_unwritten=True),
    Mutant("columns-not-rounded", "the columns were not rounded up to a multiple of 128", _unrounded),
)  # fmt: skip


def _by_columns(inputs: Inputs) -> Outputs:
    """Column by column for all rows at once."""
    queries = inputs.query_start[1:] - inputs.query_start[:-1]
    owner = torch.repeat_interleave(torch.arange(queries.numel()), queries.to(torch.int64))
    ends = (inputs.query_start[1:] - inputs.query_start[0])[owner]
    position = inputs.seq_lens[owner] - ends + torch.arange(owner.numel())
    most = min(inputs.top_k, inputs.topk.shape[1])
    n_top = torch.zeros_like(position)
    if inputs.ratio:
        n_top = torch.div(position + 1, inputs.ratio, rounding_mode="floor").clamp(0, most)
    n_win = (position + 1).clamp(0, inputs.window)
    start = owner * inputs.request_rows
    combined = torch.full(inputs.combined.shape, -1, dtype=torch.int32)
    ahead = inputs.compressed_rows + (inputs.gather_lens - inputs.seq_lens)[owner] + position - n_win + 1 - n_top
    for column in range(combined.shape[1]):
        value = start + ahead + column
        if column < most:
            entry = inputs.topk[:, column].to(torch.int64)
            entry = torch.where((entry >= 0) & (entry < inputs.compressed_rows), entry + start, -1)
            value = torch.where(column < n_top, entry, value)
        combined[:, column] = torch.where(column < n_top + n_win, value, -1).to(torch.int32)
    return Outputs(combined, (n_top + n_win).to(torch.int32))


HONEST: tuple[Honest, ...] = (
    Honest("by-rows", Precision(), lambda inputs: _combined(inputs, RIGHT)),
    Honest("by-columns", Precision(), _by_columns),
)
