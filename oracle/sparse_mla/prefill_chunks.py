"""Which prefill requests of a step share a chunk, and how many workspace rows does each of them get?

    comp_i = floor(seq_i / ratio) with a compressed cache, otherwise 0        records to gather
    gath_i = query_i + min(max(seq_i - query_i, 0), window - 1)               window rows to gather
    area   = chunk_size * ([compressed] ceil(max_len / ratio) + window + max_batched)

A chunk of requests s..e-1 takes (e - s) * (N + G) rows, N = max comp_i and G = max gath_i over its requests. Chunks are
made greedily in order: each takes requests as long as their area does not exceed `area`, and one in any case. The plan
names (s, e, N, N + G). Without a compressed cache the ratio is not used, so it may be 0.
Source: `DeepseekSparseSWAMetadata.get_prefill_chunk_plan` of vLLM.
"""

import dataclasses
from collections.abc import Iterator

import torch

from cases.memory import map_tensors, moved
from cases.precision import Precision
from cases.sparse_mla.prefill_chunks import Inputs, Outputs
from oracle.check import OFF_THE_SCALE, Check, exact
from oracle.laws import Honest, Law, Mutant


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where a planner can go wrong; the defaults are right."""

    area_of_tokens: bool = False
    area_by_floor: bool = False
    area_without_window: bool = False
    area_without_batch: bool = False
    area_of_one: bool = False
    members_before: bool = False
    refuse_equal: bool = False
    widths_added: bool = False
    widest_request: bool = False
    fixed_chunks: bool = False
    whole_window: bool = False
    whole_prefix: bool = False
    negative_prefix: bool = False
    records_rounded_up: bool = False
    gather_in_records: bool = False
    compressed_from: int = 2
    flag_ignored: bool = False
    maxima_carried: bool = False
    refused_counted: bool = False
    reserved_records: bool = False
    oversized_dropped: bool = False


RIGHT = Faults()


def reserved_area(inputs: Inputs, faults: Faults = RIGHT) -> int:
    """Rows of the workspace that the layer reserved."""
    records = 0
    if _compressed(inputs, faults):
        records = inputs.max_len // inputs.ratio if faults.area_by_floor else -(-inputs.max_len // inputs.ratio)
        if faults.area_of_tokens:
            records = inputs.max_len
    window = 0 if faults.area_without_window else inputs.window
    batch = 0 if faults.area_without_batch else inputs.max_batched
    return (1 if faults.area_of_one else inputs.chunk_size) * (records + window + batch)


def _compressed(inputs: Inputs, faults: Faults) -> bool:
    if faults.flag_ignored or inputs.has_compressed is None:
        return inputs.ratio >= faults.compressed_from
    return inputs.has_compressed


def request_rows(inputs: Inputs, faults: Faults = RIGHT) -> list[tuple[int, int]]:
    """Compressed records and window rows of every request."""
    rows = []
    for seq, query in zip(inputs.seq_lens.tolist(), inputs.query_lens.tolist(), strict=True):
        records = 0
        if _compressed(inputs, faults):
            records = -(-seq // inputs.ratio) if faults.records_rounded_up else seq // inputs.ratio
        prefix = seq - query if faults.negative_prefix else max(seq - query, 0)
        if not faults.whole_prefix:
            prefix = min(prefix, inputs.window if faults.whole_window else inputs.window - 1)
        gathered = query + prefix
        if faults.gather_in_records and records:
            gathered = -(-gathered // inputs.ratio)
        rows.append((records, gathered))
    return rows


def planned(inputs: Inputs, faults: Faults = RIGHT) -> list[tuple[int, int, int, int]]:
    """The chunks in order."""
    rows, area = request_rows(inputs, faults), reserved_area(inputs, faults)
    chunks = []
    start, carried = 0, (0, 0)
    while start < len(rows):
        end, widest, members = start + 1, rows[start], [rows[start]]
        if faults.maxima_carried:
            widest = (max(widest[0], carried[0]), max(widest[1], carried[1]))
        while end < len(rows):
            wider = (max(widest[0], rows[end][0]), max(widest[1], rows[end][1]))
            needed = (end - start if faults.members_before else end - start + 1) * sum(wider)
            if faults.widths_added:
                needed = sum(map(sum, [*members, rows[end]]))
            elif faults.widest_request:
                needed = (end - start + 1) * max(map(sum, [*members, rows[end]]))
            refused = needed >= area if faults.refuse_equal else needed > area
            if faults.fixed_chunks:
                refused = end - start >= inputs.chunk_size
            if refused:
                if faults.refused_counted:
                    widest = wider
                break
            widest, end = wider, end + 1
            members.append(rows[end - 1])
        if not (faults.oversized_dropped and end == start + 1 and sum(widest) > area):
            records = widest[0]
            if faults.reserved_records and records:
                records = -(-inputs.max_len // inputs.ratio)
            chunks.append((start, end, records, records + widest[1]))
        start, carried = end, widest
    return chunks


def _answer(inputs: Inputs, faults: Faults = RIGHT) -> Outputs:
    return Outputs(torch.tensor(planned(inputs, faults), dtype=torch.int64).reshape(-1, 4))


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The plan, a row per chunk, none without requests; `dtype` has no say in integers.

    Raises ValueError for a compressed cache of ratio 0, for a window or a chunk size below 1, and for lists of lengths
    that differ in length.
    """
    del dtype
    if inputs.gathers_compressed and inputs.ratio < 1:
        raise ValueError(f"ratio={inputs.ratio}: should be 1 or more for a layer with a compressed cache")
    for name, value in (("window", inputs.window), ("chunk_size", inputs.chunk_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: should be 1 or more")
    if inputs.seq_lens.shape != inputs.query_lens.shape:
        raise ValueError(
            f"query_lens has {inputs.query_lens.numel()} requests: should have {inputs.seq_lens.numel()} as seq_lens"
        )
    return _answer(inputs)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """What a workspace needs of any plan, then the plan itself, which the greedy rule leaves no choice."""
    del precision
    want = reference(inputs).chunks
    got = outputs.chunks
    if got.ndim != 2 or got.shape[1] != 4 or got.dtype != torch.int64:
        return (exact("chunks", got, want),)
    chunks = [tuple(chunk) for chunk in got.tolist()]
    return (
        _plan_check("order", len(chunks), _out_of_order(chunks, inputs.seq_lens.numel())),
        _plan_check("rows", len(chunks), _too_few_rows(chunks, request_rows(inputs))),
        _plan_check("area", len(chunks), _too_much(chunks, reserved_area(inputs))),
        exact("chunks", got, want, why="the greedy plan has one answer"),
    )


def _plan_check(output: str, count: int, faults: Iterator[tuple[int, str, str]]) -> Check:
    found = list(faults)
    if not found:
        return Check(output=output, measure="plan", use=0.0, count=max(count, 1), got="kept", want="kept")
    chunk, got, want = found[0]
    return Check(
        output=f"{output} of chunk", measure="plan", use=OFF_THE_SCALE, wrong=len(found), count=max(count, 1),
        where=(chunk,), got=got, want=want, why="no workspace can be used by such a plan",
    )  # fmt: skip


def _out_of_order(chunks: list[tuple[int, ...]], requests: int) -> Iterator[tuple[int, str, str]]:
    """Every request lies in exactly one chunk, in order, and no chunk is empty."""
    expected = 0
    for number, (start, end, _, _) in enumerate(chunks):
        if start != expected or end <= start:
            yield number, f"requests {start} to {end}", f"from {expected} on, one request or more"
        expected = end
    if expected != requests:
        yield len(chunks), f"requests up to {expected}", f"up to {requests}"


def _too_few_rows(chunks: list[tuple[int, ...]], rows: list[tuple[int, int]]) -> Iterator[tuple[int, str, str]]:
    """Every request of a chunk finds room for its records in front of N, and for its window rows between N and M."""
    for number, (start, end, records, width) in enumerate(chunks):
        for own, gathered in rows[max(start, 0) : max(end, 0)]:
            if own > records or gathered > width - records:
                yield number, f"{records} + {width - records} rows", f"{own} + {gathered} or more"
                break


def _too_much(chunks: list[tuple[int, ...]], area: int) -> Iterator[tuple[int, str, str]]:
    """A chunk of several requests stays within what is reserved."""
    for number, (start, end, _, width) in enumerate(chunks):
        if end - start > 1 and (end - start) * width > area:
            yield number, f"{end - start} * {width} rows", f"{area} rows or fewer"


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    fresh = map_tensors(inputs, lambda tensor: moved(tensor, "cpu"))
    return dataclasses.replace(fresh, **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _other_integers(inputs: Inputs) -> Inputs:
    dtype = torch.int64 if inputs.seq_lens.dtype == torch.int32 else torch.int32
    return _edited(inputs, seq_lens=inputs.seq_lens.to(dtype), query_lens=inputs.query_lens.to(dtype))


def _first_chunk_gone(inputs: Inputs) -> Inputs | None:
    chunks = planned(inputs)
    if not chunks:
        return None
    rest = slice(chunks[0][1], None)
    return _edited(inputs, seq_lens=inputs.seq_lens[rest].clone(), query_lens=inputs.query_lens[rest].clone())


def _without_first(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    gone = inputs.seq_lens.numel() - edited.seq_lens.numel()
    return Outputs(first.chunks[1:] - torch.tensor([gone, gone, 0, 0]))


def _other_ratio(inputs: Inputs) -> Inputs | None:
    if inputs.gathers_compressed:
        return None
    return _edited(inputs, ratio=7, has_compressed=False)


def _named(inputs: Inputs) -> Inputs | None:
    return None if inputs.has_compressed is not None else _edited(inputs, has_compressed=inputs.ratio > 1)


def _groups_filled(inputs: Inputs) -> Inputs | None:
    """Contexts that the window does not show grow to the last token of their record."""
    if not inputs.gathers_compressed or not inputs.seq_lens.numel():
        return None
    hidden = inputs.seq_lens - inputs.query_lens >= inputs.window - 1
    filled = inputs.seq_lens + inputs.ratio - 1 - inputs.seq_lens % inputs.ratio
    return _edited(inputs, seq_lens=torch.where(hidden, filled, inputs.seq_lens))


def _giant_appended(inputs: Inputs) -> Inputs:
    more = inputs.query_lens.new_tensor([reserved_area(inputs) + 1])
    return _edited(inputs, seq_lens=torch.cat((inputs.seq_lens, more)), query_lens=torch.cat((inputs.query_lens, more)))


def _with_giant(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    count, length = inputs.seq_lens.numel(), int(edited.seq_lens[-1])
    records = length // inputs.ratio if inputs.gathers_compressed else 0
    return Outputs(torch.cat((first.chunks, torch.tensor([[count, count + 1, records, records + length]]))))


def _requests_in_order(answer: Outputs) -> torch.Tensor:
    """The requests that the chunks name, one after the other."""
    named = [torch.arange(start, max(start, end)) for start, end, _, _ in answer.chunks.tolist()]
    return torch.cat(named) if named else torch.empty(0, dtype=torch.int64)


def _each_alone(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del first, edited
    number = torch.arange(inputs.seq_lens.numel())
    return Outputs(torch.stack((number, number + 1, torch.zeros_like(number), torch.zeros_like(number)), dim=1))


LAWS: tuple[Law, ...] = (
    Law("C1 each request once", "every request is in exactly one chunk, in order", _edited, _each_alone, "bitwise",
        view=_requests_in_order),
    Law("C2 first chunk gone", "a chunk does not depend on those before it", _first_chunk_gone, _without_first,
        "bitwise"),
    Law("C3 oversized request appended", "a request that fits nowhere gets a chunk of its own and moves no other",
        _giant_appended, _with_giant, "bitwise"),
    Law("C4 another ratio", "without a compressed cache the ratio is not used", _other_ratio, _same, "bitwise"),
    Law("C5 default named", "a caller that says nothing means ratio > 1", _named, _same, "bitwise"),
    Law("C6 records filled up", "tokens that fill up a record behind the window add no row", _groups_filled, _same,
        "bitwise"),
    Law("C7 other integers", "int32 and int64 lengths are the same lengths", _other_integers, _same, "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, faults: Faults) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _answer(inputs, faults))


def _last_lost(inputs: Inputs) -> Outputs | None:
    if not inputs.seq_lens.numel():
        return None
    return _answer(dataclasses.replace(inputs, seq_lens=inputs.seq_lens[:-1], query_lens=inputs.query_lens[:-1]))


def _window_rows_only(inputs: Inputs) -> Outputs:
    chunks = _answer(inputs).chunks
    chunks[:, 3] -= chunks[:, 2]
    return Outputs(chunks)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("area-of-tokens", "the area counted tokens where the cache holds one record per ratio",
            Faults(area_of_tokens=True)),
    _mutant("area-by-floor", "the last record of the longest context, not full, had no room", Faults(area_by_floor=True)),
    _mutant("area-without-window", "the area left the window out", Faults(area_without_window=True)),
    _mutant("area-without-batch", "the area left the new tokens out", Faults(area_without_batch=True)),
    _mutant("area-of-one-request", "one request's rows were reserved for all", Faults(area_of_one=True)),
    _mutant("request-not-counted", "a request's rows were not counted before it was let in",
            Faults(members_before=True)),
    _mutant("full-area-refused", "a chunk that fills the area exactly did not fit", Faults(refuse_equal=True)),
    _mutant("widths-added", "every request took its own rows only", Faults(widths_added=True)),
    _mutant("widest-request", "the widest request decided, not the most records and the most window rows",
            Faults(widest_request=True)),
    _mutant("chunks-of-fixed-size", "chunks held that many requests, whatever their length", Faults(fixed_chunks=True)),
    _mutant("window-of-one-more", "a query saw a whole window before it", Faults(whole_window=True)),
    _mutant("prefix-not-clamped", "the whole prefix were gathered", Faults(whole_prefix=True)),
    _mutant("negative-prefix", "a prefix below zero were subtracted", Faults(negative_prefix=True)),
    _mutant("records-rounded-up", "a record that is not full were there", Faults(records_rounded_up=True)),
    _mutant("gather-in-records", "window rows were counted in records", Faults(gather_in_records=True)),
    _mutant("compressed-from-ratio-1", "a caller that says nothing meant ratio > 0", Faults(compressed_from=1)),
    _mutant("flag-ignored", "the ratio decided in spite of what the caller says", Faults(flag_ignored=True)),
    _mutant("maxima-carried", "a chunk started with the rows of the one before", Faults(maxima_carried=True)),
    _mutant("refused-counted", "the request that did not fit had already widened the chunk",
            Faults(refused_counted=True)),
    _mutant("reserved-records", "every chunk got the records of the longest context", Faults(reserved_records=True)),
    _mutant("oversized-dropped", "a request that exceeds the area alone were refused", Faults(oversized_dropped=True)),
    Mutant("last-request-lost", "the last request had no chunk", _last_lost),
    Mutant("width-without-records", "a request's rows did not include its records", _window_rows_only),
)  # fmt: skip


def _by_running_maxima(inputs: Inputs) -> Outputs:
    """Each chunk's end from the first excess among running maxima, without growing it step by step."""
    rows = torch.tensor(request_rows(inputs), dtype=torch.int64).reshape(-1, 2)
    chunks: list[list[int]] = []
    start = 0
    while start < len(rows):
        most = rows[start:].cummax(dim=0).values
        excess = (torch.arange(1, len(most) + 1) * most.sum(dim=1) > reserved_area(inputs)).nonzero()
        count = max(1, int(excess[0]) if len(excess) else len(most))
        records, gathered = most[count - 1].tolist()
        chunks.append([start, start + count, records, records + gathered])
        start += count
    return Outputs(torch.tensor(chunks, dtype=torch.int64).reshape(-1, 4))


HONEST: tuple[Honest, ...] = (
    Honest("greedy", Precision(probability="exact", note="integers"), reference),
    Honest("running-maxima", Precision(probability="exact", note="integers"), _by_running_maxima),
)
