"""Which edits of a sparse MLA decode call have a known effect on its answer?

An edit returns fresh inputs and leaves the given ones alone; output memory is shared between them, since a run copies its
inputs anyway. `expect` turns the first answer into the one that the edited call must give.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.memory import as_view, guarded, guarded_copy, storage_bytes
from cases.sparse_mla.decode import (
    LANES,
    NOPE,
    RECORD,
    SCALE_BYTES,
    TOKEN_BYTES,
    DecodeInputs,
    DecodeOutputs,
    Encoding,
    Segment,
)
from oracle.laws import Law
from oracle.sparse_mla.call import listed

_Answer = Callable[[DecodeOutputs, DecodeInputs, DecodeInputs], DecodeOutputs]


def _same(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    return first


def _entries(segment: Segment, queries: int) -> list[torch.Tensor]:
    return [listed(segment, t) for t in range(queries)]


def _relisted(segment: Segment, rows: list[torch.Tensor]) -> Segment:
    """The segment with these entries, in ragged form."""
    form = segment.indices if segment.indices is not None else segment.dense
    assert form is not None
    lengths = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    indices = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    return dataclasses.replace(
        segment, indices=guarded_copy(indices.to(form.dtype)), indptr=guarded_copy(lengths.to(form.dtype)),
        dense=None, lengths=None,
    )  # fmt: skip


def _each(inputs: DecodeInputs, change: Callable[[Segment, str], Segment]) -> DecodeInputs:
    extra = None if inputs.extra is None else change(inputs.extra, "extra")
    return dataclasses.replace(inputs, main=change(inputs.main, "main"), extra=extra)


def _ragged(inputs: DecodeInputs) -> bool:
    return inputs.main.indices is not None


def _rows(inputs: DecodeInputs) -> int:
    return inputs.query.shape[0]


def _other_split_count(inputs: DecodeInputs) -> DecodeInputs | None:
    if inputs.arch == "other":
        return None
    return dataclasses.replace(inputs, splits=5 if inputs.splits != 5 else 2)


def _adaptive_switched(inputs: DecodeInputs) -> DecodeInputs | None:
    return dataclasses.replace(inputs, adaptive=not inputs.adaptive) if inputs.arch == "gfx950" else None


def _entries_reversed(inputs: DecodeInputs) -> DecodeInputs | None:
    if not _ragged(inputs):
        return None
    return _each(inputs, lambda part, _: _relisted(part, [row.flip(0) for row in _entries(part, _rows(inputs))]))


def _moved_to_extra(inputs: DecodeInputs) -> DecodeInputs | None:
    """Every other entry of the main list goes to an extra segment over the same cache."""
    if inputs.extra is not None or not _ragged(inputs) or inputs.main.encoding != "float8_e4m3fn":
        return None
    rows = _entries(inputs.main, _rows(inputs))
    main = _relisted(inputs.main, [row[0::2] for row in rows])
    return dataclasses.replace(inputs, main=main, extra=_relisted(inputs.main, [row[1::2] for row in rows]))


def _pages(segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """Data bytes [slots, 576] and scale bytes [slots, 8] of every slot."""
    cache = segment.cache
    blocks, block, _ = cache.shape
    base = cache.storage_offset()
    flat = storage_bytes(cache)
    data = flat.as_strided((blocks, block, TOKEN_BYTES), (cache.stride(0), TOKEN_BYTES, 1), base)
    scales = flat.as_strided(
        (blocks, block, SCALE_BYTES), (cache.stride(0), SCALE_BYTES, 1), base + block * TOKEN_BYTES
    )
    return data.reshape(-1, TOKEN_BYTES), scales.reshape(-1, SCALE_BYTES)


def _paged(data: torch.Tensor, scales: torch.Tensor, block: int, spare: int) -> torch.Tensor:
    """A cache with these slots in pages of `block` tokens and `spare` bytes behind each page."""
    blocks = -(-data.shape[0] // block)
    stride = -(-block * RECORD // TOKEN_BYTES) * TOKEN_BYTES + spare
    storage = torch.full((256 + blocks * stride + 256,), 0x7B, dtype=torch.uint8)
    padded = blocks * block - data.shape[0]
    data = torch.cat([data, data.new_full((padded, TOKEN_BYTES), 0x7B)])
    scales = torch.cat([scales, scales.new_full((padded, SCALE_BYTES), 140)])
    storage.as_strided((blocks, block, TOKEN_BYTES), (stride, TOKEN_BYTES, 1), 256).copy_(
        data.view(blocks, block, TOKEN_BYTES)
    )
    storage.as_strided((blocks, block, SCALE_BYTES), (stride, SCALE_BYTES, 1), 256 + block * TOKEN_BYTES).copy_(
        scales.view(blocks, block, SCALE_BYTES)
    )
    return as_view(storage, torch.uint8, (blocks, block, RECORD), (stride, RECORD, 1), 256)


def _slots_reversed(inputs: DecodeInputs) -> DecodeInputs | None:
    """Records stand in the reverse order and the entries follow them; invalid entries stay."""
    if not _ragged(inputs):
        return None

    def change(part: Segment, _: str) -> Segment:
        data, scales = _pages(part)
        cache = _paged(data.flip(0), scales.flip(0), part.cache.shape[1], 0)
        rows = [
            torch.where((row >= 0) & (row < part.rows), part.rows - 1 - row, row)
            for row in _entries(part, _rows(inputs))
        ]
        return _relisted(dataclasses.replace(part, cache=cache), rows)

    return _each(inputs, change)


def _repaged(inputs: DecodeInputs) -> DecodeInputs | None:
    """Pages of another size and a longer stride; entries stay, invalid ones become -1 since the cache may have grown."""
    if not _ragged(inputs):
        return None

    def change(part: Segment, name: str) -> Segment:
        data, scales = _pages(part)
        cache = _paged(data, scales, 16 if part.cache.shape[1] != 16 else 8, 576)
        rows = [torch.where((row >= 0) & (row < part.rows), row, -1) for row in _entries(part, _rows(inputs))]
        return _relisted(dataclasses.replace(part, cache=cache), rows)

    return _each(inputs, change)


def _invalid_inserted(inputs: DecodeInputs) -> DecodeInputs | None:
    if not _ragged(inputs):
        return None

    def change(part: Segment, _: str) -> Segment:
        holes = torch.tensor([-1, part.rows])
        rows = [
            torch.cat([holes, row[: len(row) // 2], holes, row[len(row) // 2 :]])
            for row in _entries(part, _rows(inputs))
        ]
        return _relisted(part, rows)

    return _each(inputs, change)


def _lists_repeated(inputs: DecodeInputs) -> DecodeInputs | None:
    if not _ragged(inputs) or inputs.sink is not None:
        return None
    return _each(inputs, lambda part, _: _relisted(part, [row.repeat(2) for row in _entries(part, _rows(inputs))]))


def _lists_repeated_with_sink(inputs: DecodeInputs) -> DecodeInputs | None:
    """Twice every key and a sink greater by ln 2 leave the answer."""
    if not _ragged(inputs) or inputs.sink is None or not bool(torch.isfinite(inputs.sink).all()):
        return None
    doubled = _each(inputs, lambda part, _: _relisted(part, [row.repeat(2) for row in _entries(part, _rows(inputs))]))
    sink = (inputs.sink.double() + torch.log(torch.tensor(2.0, dtype=torch.float64))).float()
    return dataclasses.replace(doubled, sink=guarded_copy(sink))


def _without_lse(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    return dataclasses.replace(first, lse=None)


def _drop_lse(answer: DecodeOutputs) -> DecodeOutputs:
    return dataclasses.replace(answer, lse=None)


def _infinite_sink_left_out(inputs: DecodeInputs) -> DecodeInputs | None:
    if inputs.sink is None or not bool(torch.isneginf(inputs.sink).all()):
        return None
    return dataclasses.replace(inputs, sink=None)


def _scale_moved_into_query(inputs: DecodeInputs) -> DecodeInputs:
    query = guarded_copy((inputs.query.float() * 4).to(torch.bfloat16))
    return dataclasses.replace(inputs, query=query, scale=inputs.scale / 4)


def _doubled_records(inputs: DecodeInputs) -> DecodeInputs | None:
    """Scale bytes one larger, rotated lanes and the inverse of the query doubled: every row doubles."""
    if inputs.out is None:
        return None
    parts = [inputs.main] if inputs.extra is None else [inputs.main, inputs.extra]
    for part in parts:
        rows = torch.cat(
            [row[(row >= 0) & (row < part.rows)] for row in _entries(part, _rows(inputs))] or [torch.empty(0)]
        )
        data, scales = _pages(part)
        read = rows.long().unique()
        tail = data[read][:, NOPE:].contiguous().view(torch.bfloat16).float().abs()
        small = tail[(tail > 0) & torch.isfinite(tail)]
        if read.numel() and (
            int(scales[read][:, :7].max()) > 200 or (small.numel() and float(small.min()) < 2.0**-100)
        ):
            return None

    def change(part: Segment, _: str) -> Segment:
        data, scales = (table.clone() for table in _pages(part))
        scales[:, :7] = (scales[:, :7].int() + 1).clamp(max=255).to(torch.uint8)
        tail = data[:, NOPE:].contiguous().view(torch.bfloat16)
        data[:, NOPE:] = (tail.float() * 2).to(torch.bfloat16).view(torch.uint8)
        cache = _paged(data, scales, part.cache.shape[1], 0)
        return dataclasses.replace(part, cache=cache)

    query = guarded_copy((inputs.query.float() / 2).to(torch.bfloat16))
    return dataclasses.replace(_each(inputs, change), query=query)


def _rows_doubled(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    assert first.out is not None
    return dataclasses.replace(first, out=(first.out.float() * 2).to(first.out.dtype))


def _above_subnormals(answer: DecodeOutputs) -> DecodeOutputs:
    """Numbers that one side may have rounded as subnormals, as zeros."""
    assert answer.out is not None
    return dataclasses.replace(answer, out=torch.where(answer.out.abs() < 2.0**-120, 0.0, answer.out), lse=None)


def _other_encoding(inputs: DecodeInputs) -> DecodeInputs | None:
    """The main cache in the other encoding: the same codes at another scale byte, where the codes mean the same."""
    main = inputs.main
    if inputs.arch != "gfx942":
        return None
    data, scales = (table.clone() for table in _pages(main))
    rows = torch.cat([row[(row >= 0) & (row < main.rows)] for row in _entries(main, _rows(inputs))] or [torch.empty(0)])
    read = rows.long().unique()
    codes = data[:, :NOPE]
    step = 1 if main.encoding == "float8_e4m3fn" else -1
    shifted = scales[:, :7].int() + step
    odd = (codes[read] == 0x7F) | (codes[read] == 0xFF)
    if step < 0:
        # FNUZ's 240 has no OCP code, and its NaN is OCP's negative zero.
        odd |= codes[read] == 0x80
    if read.numel() and (bool(odd.any()) or int(shifted[read].min()) < 0 or int(shifted[read].max()) > 254):
        return None
    if step > 0:
        codes[codes == 0x80] = 0
    scales[:, :7] = shifted.clamp(0, 255).to(torch.uint8)
    cache = _paged(data, scales, main.cache.shape[1], 0)
    encoding: Encoding = "float8_e4m3fnuz" if step > 0 else "float8_e4m3fn"
    return dataclasses.replace(inputs, main=dataclasses.replace(main, cache=cache, encoding=encoding))


def _heads_reversed(inputs: DecodeInputs) -> DecodeInputs:
    heads = inputs.query.shape[1]
    sink = None if inputs.sink is None else guarded_copy(inputs.sink[:heads].flip(0))
    return dataclasses.replace(inputs, query=guarded_copy(inputs.query.flip(1)), sink=sink)


def _answer_heads_reversed(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    queries, heads, _ = inputs.query.shape

    def flipped(flat: torch.Tensor | None) -> torch.Tensor | None:
        if flat is None:
            return None
        # Reversing bytes as bytes: float8 has no flip.
        words = flat.contiguous().view(torch.uint8) if flat.element_size() == 1 else flat
        return words.reshape(queries, heads, -1).flip(1).reshape(flat.shape).contiguous().view(flat.dtype)

    lse = None if first.lse is None else first.lse.flip(1)
    out = None if first.out is None else first.out.flip(1)
    return dataclasses.replace(first, out=out, codes=flipped(first.codes), scales=flipped(first.scales), lse=lse)


def _rows_reversed(inputs: DecodeInputs) -> DecodeInputs | None:
    if not _ragged(inputs):
        return None
    turned = _each(inputs, lambda part, _: _relisted(part, _entries(part, _rows(inputs))[::-1]))
    positions = None if inputs.positions is None else guarded_copy(inputs.positions.flip(0))
    return dataclasses.replace(turned, query=guarded_copy(inputs.query.flip(0)), positions=positions)


def _answer_rows_reversed(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    def flipped(part: torch.Tensor | None) -> torch.Tensor | None:
        if part is None:
            return None
        words = part.contiguous().view(torch.uint8) if part.element_size() == 1 else part
        return words.flip(0).contiguous().view(part.dtype)

    return dataclasses.replace(
        first, out=flipped(first.out), codes=flipped(first.codes), scales=flipped(first.scales), lse=flipped(first.lse)
    )


def _first_rows(inputs: DecodeInputs) -> DecodeInputs | None:
    """The call without its last row, at the same split count."""
    kept = _rows(inputs) - 1
    if not _ragged(inputs) or inputs.out is None or kept < 1 or not inputs.splits or inputs.adaptive:
        return None
    fewer = _each(inputs, lambda part, _: _relisted(part, _entries(part, kept)))
    positions = None if inputs.positions is None else guarded_copy(inputs.positions[:kept])
    return dataclasses.replace(
        fewer, query=guarded_copy(inputs.query[:kept]), positions=positions,
        out=guarded((kept, *inputs.out.shape[1:]), inputs.out.dtype),
    )  # fmt: skip


def _without_the_last(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    kept = edited.query.shape[0]
    assert first.out is not None
    lse = None if first.lse is None else first.lse[:kept]
    return dataclasses.replace(first, out=first.out[:kept], lse=lse, rotated_rows=min(first.rotated_rows, kept))


def _output_zeroed(inputs: DecodeInputs) -> DecodeInputs | None:
    """The same call into memory of zeros."""
    if inputs.out is None:
        return None
    return dataclasses.replace(inputs, out=guarded_copy(torch.zeros(inputs.out.shape, dtype=inputs.out.dtype)))


def _dense(inputs: DecodeInputs) -> DecodeInputs | None:
    """The ragged call as a dense one with lengths, at the same split count: invalid entries are dropped from both."""
    if not _ragged(inputs) or not inputs.splits or inputs.adaptive:
        return None

    def change(part: Segment, _: str) -> Segment:
        rows = _entries(part, _rows(inputs))
        if any(bool(((row < 0) | (row >= part.rows)).any()) for row in rows):
            raise _NotThisCall
        assert part.indices is not None
        dense = torch.full((len(rows), max((len(row) for row in rows), default=0) + 2), -1, dtype=torch.int64)
        for t, row in enumerate(rows):
            dense[t, : len(row)] = row
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return dataclasses.replace(
            part, indices=None, indptr=None, dense=guarded_copy(dense.to(part.indices.dtype)),
            lengths=guarded_copy(lengths),
        )  # fmt: skip

    try:
        return _each(inputs, change)
    except _NotThisCall:
        return None


class _NotThisCall(Exception):
    pass


def _without_rotation(inputs: DecodeInputs) -> DecodeInputs | None:
    if inputs.positions is None or inputs.out is None:
        return None
    return dataclasses.replace(inputs, positions=None, cos_sin=None)


def _unrotated_lanes(answer: DecodeOutputs) -> DecodeOutputs:
    out = None if answer.out is None else answer.out[..., :NOPE]
    return dataclasses.replace(answer, out=out, rotated_rows=0)


def _sink_raised(inputs: DecodeInputs) -> DecodeInputs | None:
    """A sink so large that every key's share vanishes."""
    if inputs.out is None:
        return None
    return dataclasses.replace(inputs, sink=guarded_copy(torch.full((inputs.query.shape[1],), 3e38)))


def _nothing_left(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    assert first.out is not None
    return dataclasses.replace(first, out=torch.zeros_like(first.out), lse=None)


def _magnitudes(answer: DecodeOutputs) -> DecodeOutputs:
    out = None if answer.out is None else answer.out.abs()
    return dataclasses.replace(answer, out=out, lse=None)


def _heads_added(inputs: DecodeInputs) -> DecodeInputs | None:
    """Sixteen more heads behind the others."""
    if inputs.out is None or inputs.splits == 0:
        return None
    queries, heads, _ = inputs.query.shape
    more = inputs.query[:, :1].expand(queries, 16, LANES)
    query = torch.cat([inputs.query, more], 1)
    sink = None if inputs.sink is None else torch.cat([inputs.sink[:heads], inputs.sink[:1].expand(16)])
    return dataclasses.replace(
        inputs, query=guarded_copy(query), sink=None if sink is None else guarded_copy(sink),
        out=guarded((queries, heads + 16, LANES), inputs.out.dtype),
    )  # fmt: skip


def _with_more_heads(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    """The added heads ask what the first one asks."""
    assert first.out is not None
    out = torch.cat([first.out, first.out[:, :1].expand(-1, 16, -1)], 1)
    lse = None if first.lse is None else torch.cat([first.lse, first.lse[:, :1].expand(-1, 16)], 1)
    return dataclasses.replace(first, out=out, lse=lse)


def _untouched(inputs: DecodeInputs) -> DecodeInputs:
    return dataclasses.replace(inputs)


LAWS: tuple[Law, ...] = (
    Law("M1 split count", "the split count moves rounding points only", _other_split_count, _same, "budget"),
    Law("M2 adaptive splits", "adaptive splitting moves rounding points only", _adaptive_switched, _same, "budget"),
    Law("M3 entry order", "the order of a list's entries does not matter", _entries_reversed, _same, "budget"),
    Law("M4 entries in the other segment", "it does not matter which list a key stands in", _moved_to_extra, _same, "budget"),
    Law("M5 slot order", "records may stand anywhere in the cache", _slots_reversed, _same, "bitwise"),
    Law("M6 page size", "page size, stride and padding do not matter", _repaged, _same, "bitwise"),
    Law("M7 invalid entries", "invalid entries do not count", _invalid_inserted, _same, "budget"),
    Law("M8 lists repeated", "twice every key leaves the answer", _lists_repeated, _without_lse, "budget", _drop_lse),
    Law("M8 lists repeated, sink + ln 2", "twice every key and twice the sink leave the answer", _lists_repeated_with_sink,
        _without_lse, "budget", _drop_lse),
    Law("M9 infinite sink", "a sink of minus infinity is no sink", _infinite_sink_left_out, _same, "bitwise"),
    Law("M9 vanishing shares", "a sink far above every score leaves nothing", _sink_raised, _nothing_left, "bitwise",
        _magnitudes),
    Law("M10 scale and query", "a power of two may move from the scale to the query", _scale_moved_into_query, _same,
        "bitwise"),
    Law("M11 doubled records", "doubled records under a halved query double the answer", _doubled_records, _rows_doubled,
        "bitwise", _above_subnormals),
    Law("M12 other encoding", "an OCP code means twice the FNUZ code, either way", _other_encoding, _same, "bitwise"),
    Law("M13 head order", "heads do not see each other", _heads_reversed, _answer_heads_reversed, "bitwise"),
    Law("M13 more heads", "added heads change nothing for the others", _heads_added, _with_more_heads, "bitwise", reshapes=True),
    Law("M14 row order", "rows do not see each other", _rows_reversed, _answer_rows_reversed, "bitwise"),
    Law("M14 fewer rows", "a row's answer does not depend on the others", _first_rows, _without_the_last, "bitwise",
        reshapes=True),
    Law("M15 dense form", "both forms of the call ask the same", _dense, _same, "bitwise"),
    Law("M16 fused rotation", "rotation leaves the unrotated lanes alone", _without_rotation, _same, "bitwise",
        _unrotated_lanes),
    Law("M29 output memory", "what stood in the output's memory does not matter", _output_zeroed, _same, "bitwise"),
    Law("M29 same call twice", "the same call gives the same bits", _untouched, _same, "bitwise"),
)  # fmt: skip
