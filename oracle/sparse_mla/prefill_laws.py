"""Which edits of a sparse MLA prefill call have a known effect on its answer?

An edit returns fresh inputs and leaves the given ones alone; output memory is shared between them, since a run copies its
inputs anyway. `expect` turns the first answer into the one that the edited call must give.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch

from cases.memory import guarded, guarded_copy, is_vast
from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from oracle.laws import Law
from oracle.sparse_mla.prefill_call import listed, valid


def _same(first: PrefillOutputs, inputs: PrefillInputs, edited: PrefillInputs) -> PrefillOutputs:
    return first


def _without_lse(answer: PrefillOutputs) -> PrefillOutputs:
    return dataclasses.replace(answer, lse=None)


def _lists(inputs: PrefillInputs) -> list[torch.Tensor]:
    return [listed(inputs, t) for t in range(inputs.query.shape[0])]


def _relisted(inputs: PrefillInputs, lists: Sequence[torch.Tensor]) -> PrefillInputs:
    """The call with these lists, in ragged form."""
    lengths = torch.tensor([0, *(len(entries) for entries in lists)])
    return dataclasses.replace(
        inputs, indices=guarded_copy(torch.cat([torch.empty(0, dtype=torch.int64), *lists])),
        indptr=guarded_copy(lengths.cumsum(0)), dense=None, lengths=None,
    )  # fmt: skip


def _near(inputs: PrefillInputs) -> bool:
    return not any(is_vast(tensor) for tensor in (inputs.query, inputs.kv, inputs.out))


def _out_like(inputs: PrefillInputs, shape: Sequence[int]) -> torch.Tensor:
    return guarded(shape, inputs.out.dtype)


def _entries_reversed(inputs: PrefillInputs) -> PrefillInputs:
    return _relisted(inputs, [entries.flip(0) for entries in _lists(inputs)])


def _rows_permuted(inputs: PrefillInputs) -> PrefillInputs | None:
    """The rows stand in the reverse order and the valid entries follow them."""
    if not _near(inputs) or not inputs.ragged:
        return None
    lists = [torch.where((e >= 0) & (e < inputs.rows), inputs.rows - 1 - e, e) for e in _lists(inputs)]
    return dataclasses.replace(_relisted(inputs, lists), kv=guarded_copy(inputs.kv.flip(0)))


def _rows_spread(inputs: PrefillInputs) -> PrefillInputs | None:
    """Every row has a row of NaN before it, in memory with other strides."""
    if not _near(inputs) or not inputs.ragged:
        return None
    rows, _, lanes = inputs.kv.shape
    kv = guarded((2 * rows, 1, lanes), inputs.kv.dtype, gaps=(40, 0))
    kv[0::2] = math.nan
    kv[1::2] = inputs.kv
    lists = [torch.where((e >= 0) & (e < inputs.rows), 2 * e + 1, -1) for e in _lists(inputs)]
    return dataclasses.replace(_relisted(inputs, lists), kv=kv)


def _invalid_inserted(inputs: PrefillInputs) -> PrefillInputs:
    holes = torch.tensor([-1, inputs.rows, 2**31 - 1])
    # More than a tile of them in front.
    lists = [torch.cat([holes.repeat(12), e[: len(e) // 2], holes, e[len(e) // 2 :]]) for e in _lists(inputs)]
    return _relisted(inputs, lists)


def _lists_repeated(inputs: PrefillInputs) -> PrefillInputs | None:
    if inputs.sink is not None:
        return None
    return _relisted(inputs, [entries.repeat(2) for entries in _lists(inputs)])


def _lists_repeated_with_sink(inputs: PrefillInputs) -> PrefillInputs | None:
    if inputs.sink is None or not bool(torch.isfinite(inputs.sink).all()):
        return None
    doubled = _relisted(inputs, [entries.repeat(2) for entries in _lists(inputs)])
    return dataclasses.replace(doubled, sink=guarded_copy((inputs.sink.double() + math.log(2.0)).float()))


def _infinite_sink_left_out(inputs: PrefillInputs) -> PrefillInputs | None:
    if inputs.sink is None or not bool(torch.isneginf(inputs.sink).all()):
        return None
    return dataclasses.replace(inputs, sink=None)


def _sink_raised(inputs: PrefillInputs) -> PrefillInputs:
    """A sink so large that every row's share vanishes."""
    return dataclasses.replace(inputs, sink=guarded_copy(torch.full((inputs.query.shape[1],), 3e38)))


def _nothing_left(first: PrefillOutputs, inputs: PrefillInputs, edited: PrefillInputs) -> PrefillOutputs:
    return PrefillOutputs(torch.zeros_like(first.out))


def _magnitudes(answer: PrefillOutputs) -> PrefillOutputs:
    return PrefillOutputs(answer.out.abs())


def _scale_moved_into_query(inputs: PrefillInputs) -> PrefillInputs | None:
    small = inputs.query[inputs.query != 0].abs()
    # A factor of 4 must not leave fp16, nor lose bits of its subnormals.
    if not _near(inputs) or (small.numel() and (float(small.min()) < 2.0**-12 or float(small.max()) > 2.0**13)):
        return None
    query = guarded_copy((inputs.query.float() / 4).to(inputs.query.dtype))
    return dataclasses.replace(inputs, query=query, scale=inputs.scale * 4)


def _rows_doubled(inputs: PrefillInputs) -> PrefillInputs | None:
    """Twice every row under half the query doubles the answer."""
    small = inputs.query[inputs.query != 0].abs()
    read = torch.cat([valid(inputs, t) for t in range(inputs.query.shape[0])] or [torch.empty(0, dtype=torch.int64)])
    keys = inputs.kv[read.unique()].abs()
    lanes = keys[keys > 0]
    if not _near(inputs) or (small.numel() and float(small.min()) < 2.0**-12):
        return None
    # An answer may be far smaller than its rows: where they are small, doubling moves roundings of subnormal numbers.
    if lanes.numel() and (float(lanes.min()) < 2.0**-20 or float(lanes.max()) > 2.0**13):
        return None
    query = guarded_copy((inputs.query.float() / 2).to(inputs.query.dtype))
    return dataclasses.replace(inputs, query=query, kv=guarded_copy(inputs.kv * 2))


def _answer_doubled(first: PrefillOutputs, inputs: PrefillInputs, edited: PrefillInputs) -> PrefillOutputs:
    return PrefillOutputs(first.out * 2)


def _above_subnormals(answer: PrefillOutputs) -> PrefillOutputs:
    """Numbers that one side may have rounded as subnormals, as zeros."""
    least = 2.0**-12 if answer.out.dtype == torch.float16 else 2.0**-120
    return PrefillOutputs(torch.where(answer.out.abs() < least, 0.0, answer.out))


def _heads_reversed(inputs: PrefillInputs) -> PrefillInputs | None:
    if not _near(inputs):
        return None
    heads = inputs.query.shape[1]
    sink = None if inputs.sink is None else guarded_copy(inputs.sink[:heads].flip(0))
    return dataclasses.replace(inputs, query=guarded_copy(inputs.query.flip(1)), sink=sink)


def _answer_heads_reversed(first: PrefillOutputs, inputs: PrefillInputs, edited: PrefillInputs) -> PrefillOutputs:
    return PrefillOutputs(first.out.flip(1), None if first.lse is None else first.lse.flip(1))


def _heads_added(inputs: PrefillInputs) -> PrefillInputs | None:
    """Sixteen more heads behind the others, which ask what the first one asks."""
    if not _near(inputs):
        return None
    queries, heads, lanes = inputs.query.shape
    query = torch.cat([inputs.query, inputs.query[:, :1].expand(queries, 16, lanes)], 1)
    sink = None if inputs.sink is None else torch.cat([inputs.sink[:heads], inputs.sink[:1].expand(16)])
    return dataclasses.replace(
        inputs, query=guarded_copy(query), sink=None if sink is None else guarded_copy(sink),
        out=_out_like(inputs, (queries, heads + 16, inputs.out.shape[2])),
    )  # fmt: skip


def _with_more_heads(first: PrefillOutputs, inputs: PrefillInputs, edited: PrefillInputs) -> PrefillOutputs:
    out = torch.cat([first.out, first.out[:, :1].expand(-1, 16, -1)], 1)
    return PrefillOutputs(
        out, None if first.lse is None else torch.cat([first.lse, first.lse[:, :1].expand(-1, 16)], 1)
    )


def _queries_reversed(inputs: PrefillInputs) -> PrefillInputs | None:
    if not _near(inputs) or not inputs.ragged:
        return None
    return dataclasses.replace(_relisted(inputs, _lists(inputs)[::-1]), query=guarded_copy(inputs.query.flip(0)))


def _answer_queries_reversed(first: PrefillOutputs, inputs: PrefillInputs, edited: PrefillInputs) -> PrefillOutputs:
    return PrefillOutputs(first.out.flip(0), None if first.lse is None else first.lse.flip(0))


def _last_queries_alone(inputs: PrefillInputs) -> PrefillInputs | None:
    """The call without its first query."""
    queries, heads, _ = inputs.query.shape
    if not _near(inputs) or not inputs.ragged or queries < 2:
        return None
    return dataclasses.replace(
        _relisted(inputs, _lists(inputs)[1:]), query=guarded_copy(inputs.query[1:]),
        out=_out_like(inputs, (queries - 1, heads, inputs.out.shape[2])),
    )  # fmt: skip


def _answer_of_the_last_queries(first: PrefillOutputs, inputs: PrefillInputs, edited: PrefillInputs) -> PrefillOutputs:
    return PrefillOutputs(first.out[1:], None if first.lse is None else first.lse[1:])


def _dense(inputs: PrefillInputs) -> PrefillInputs | None:
    """The ragged call as a dense one with lengths, where it has no invalid entry to be dropped."""
    lists = _lists(inputs)
    if not inputs.ragged or any(bool(((entries < 0) | (entries >= inputs.rows)).any()) for entries in lists):
        return None
    dense = torch.full((len(lists), max((len(entries) for entries in lists), default=0) + 2), -1, dtype=torch.int64)
    for t, entries in enumerate(lists):
        dense[t, : len(entries)] = entries
    lengths = torch.tensor([len(entries) for entries in lists], dtype=torch.int32)
    return dataclasses.replace(
        inputs, indices=None, indptr=None, dense=guarded_copy(dense), lengths=guarded_copy(lengths)
    )


def _leading_lanes_asked(inputs: PrefillInputs) -> PrefillInputs | None:
    """The leading lanes of an answer of which the whole width was asked."""
    queries, heads, lanes = inputs.query.shape
    if inputs.rope_lanes == 0 or inputs.out.shape[2] != lanes:
        return None
    return dataclasses.replace(inputs, out=_out_like(inputs, (queries, heads, inputs.nope_lanes)))


def _cut(first: PrefillOutputs, inputs: PrefillInputs, edited: PrefillInputs) -> PrefillOutputs:
    return PrefillOutputs(first.out[..., : edited.out.shape[2]], first.lse)


def _moved(inputs: PrefillInputs) -> PrefillInputs | None:
    """Everything with other strides: heads before queries, every other lane."""
    if not _near(inputs):
        return None
    queries, heads, lanes = inputs.query.shape
    query = guarded((heads, queries, lanes), inputs.query.dtype, gaps=(24, 8)).transpose(0, 1)
    kv = guarded((inputs.rows, 1, 2 * lanes), inputs.kv.dtype, gaps=(16, 0))[..., 1::2]
    query.copy_(inputs.query)
    kv.copy_(inputs.kv)
    out = guarded((queries, heads, 2 * inputs.out.shape[2]), inputs.out.dtype, gaps=(8, 8))[..., ::2]
    return dataclasses.replace(inputs, query=query, kv=kv, out=out)


def _untouched(inputs: PrefillInputs) -> PrefillInputs:
    return dataclasses.replace(inputs)


LAWS: tuple[Law, ...] = (
    Law("M3 entry order", "the order of a list's entries does not matter", _entries_reversed, _same, "budget"),
    Law("M5 row order", "rows may stand anywhere", _rows_permuted, _same, "bitwise"),
    Law("M5 unread rows", "rows that no list names do not matter", _rows_spread, _same, "bitwise"),
    Law("M6 strides", "strides, gaps and the order of dimensions in memory do not matter", _moved, _same, "bitwise"),
    Law("M7 invalid entries", "invalid entries do not count", _invalid_inserted, _same, "budget"),
    Law("M8 lists repeated", "twice every entry leaves the answer", _lists_repeated, _same, "budget", _without_lse),
    Law("M8 lists repeated, sink + ln 2", "twice every entry and twice the sink leave the answer",
        _lists_repeated_with_sink, _same, "budget", _without_lse),
    Law("M9 infinite sink", "a sink of minus infinity is no sink", _infinite_sink_left_out, _same, "bitwise"),
    Law("M9 vanishing shares", "a sink far above every score leaves nothing", _sink_raised, _nothing_left, "bitwise",
        _magnitudes),
    Law("M10 scale and query", "a power of two may move from the query to the scale", _scale_moved_into_query, _same,
        "bitwise"),
    Law("M11 doubled rows", "doubled rows under a halved query double the answer", _rows_doubled, _answer_doubled,
        "bitwise", _above_subnormals),
    Law("M13 head order", "heads do not see each other", _heads_reversed, _answer_heads_reversed, "bitwise"),
    Law("M13 more heads", "added heads change nothing for the others", _heads_added, _with_more_heads, "bitwise",
        reshapes=True),
    Law("M14 query order", "queries do not see each other", _queries_reversed, _answer_queries_reversed, "bitwise"),
    Law("M14 fewer queries", "a call may be cut into several", _last_queries_alone, _answer_of_the_last_queries,
        "bitwise", reshapes=True),
    Law("M15 dense form", "both forms of the call ask the same", _dense, _same, "bitwise"),
    Law("P1 leading lanes", "leading lanes are those of the whole answer", _leading_lanes_asked, _cut, "bitwise"),
    Law("M29 same call twice", "the same call gives the same bits", _untouched, _same, "bitwise"),
)  # fmt: skip
