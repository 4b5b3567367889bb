"""Which edits of a dense MLA decode call have a known effect on its answer?

An edit returns fresh inputs and leaves the given ones alone; output memory is shared between them, since a run copies its
inputs anyway. `expect` turns the first answer into the one that the edited call must give.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from cases.dense_mla.decode_call import QUANTISED, DecodeInputs, DecodeOutputs
from cases.memory import guarded, guarded_copy, is_vast
from oracle.dense_mla.decode_call import listed, numbers_of, visible
from oracle.laws import Law

# Heads that a kernel takes at a time.
TILE = 16


def _live(inputs: DecodeInputs) -> DecodeInputs:
    """The call without the requests that do not count."""
    if inputs.live == inputs.requests:
        return inputs
    rows, offsets = inputs.live * inputs.qlen, inputs.live + 1
    whole = inputs.global_indptr
    return dataclasses.replace(
        inputs, query=inputs.query[:rows], out=inputs.out[:rows], kv_indptr=inputs.kv_indptr[:offsets],
        global_indptr=None if whole is None else whole[:offsets],
    )  # fmt: skip


def _asked(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    """The rows of the requests that count."""
    return _rows(first, slice(0, inputs.live * inputs.qlen))


def _rows(answer: DecodeOutputs, rows: slice | torch.Tensor) -> DecodeOutputs:
    return DecodeOutputs(answer.out[rows], None if answer.lse is None else answer.lse[rows])


def _heads(answer: DecodeOutputs, heads: torch.Tensor) -> DecodeOutputs:
    return DecodeOutputs(answer.out[:, heads], None if answer.lse is None else answer.lse[:, heads])


def _near(inputs: DecodeInputs) -> bool:
    return not any(is_vast(tensor) for tensor in (inputs.query, inputs.cache, inputs.out))


def _finite(inputs: DecodeInputs) -> bool:
    """Whether every token that a request lists is a number."""
    page = inputs.cache.shape[1]
    slots = torch.cat([torch.empty(0, dtype=torch.long), *(listed(inputs, b) for b in range(inputs.live))])
    rows = inputs.cache[slots // page, slots % page]
    return bool(torch.isfinite(numbers_of(rows, torch.float32)).all())


def _length(inputs: DecodeInputs, request: int) -> int:
    offsets = inputs.kv_indptr if inputs.global_indptr is None else inputs.global_indptr
    return int(offsets[request + 1]) - int(offsets[request])


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return guarded_copy(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


def _relisted(inputs: DecodeInputs, lists: Sequence[torch.Tensor], lengths: Sequence[int]) -> DecodeInputs:
    """The call with these slots and, of a shard, these global lengths: all of its requests count."""
    slots = torch.cat([torch.empty(0, dtype=torch.long), *lists])
    return dataclasses.replace(
        inputs, slots=guarded_copy(slots.to(torch.int32)), kv_indptr=_offsets([len(each) for each in lists]),
        global_indptr=None if inputs.global_indptr is None else _offsets(lengths), live=len(lists),
    )  # fmt: skip


def _lists(inputs: DecodeInputs) -> list[torch.Tensor]:
    return [listed(inputs, b) for b in range(inputs.live)]


def _lengths(inputs: DecodeInputs) -> list[int]:
    return [_length(inputs, b) for b in range(inputs.live)]


def _out_like(inputs: DecodeInputs, rows: int, heads: int) -> torch.Tensor:
    return guarded((rows, heads, inputs.out.shape[2]), inputs.out.dtype)


def _query_of(inputs: DecodeInputs, query: torch.Tensor) -> DecodeInputs:
    """The call with other query rows, and an answer to fit."""
    return dataclasses.replace(inputs, query=guarded_copy(query), out=_out_like(inputs, *query.shape[:2]))


# Heads.


_UNWRITTEN = 3


def _heads_added(inputs: DecodeInputs) -> DecodeInputs | None:
    """Heads behind the others as a caller pads them: repeated from the front, and then memory that nobody has written."""
    if not _near(inputs):
        return None
    heads = inputs.query.shape[1]
    repeated = inputs.query[:, torch.arange(heads, heads + TILE) % heads]
    unwritten = torch.full(repeated[:, :_UNWRITTEN].shape, math.nan).to(inputs.query.dtype)
    return _query_of(inputs, torch.cat([inputs.query, repeated, unwritten], 1))


def _with_more_heads(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    heads = inputs.query.shape[1]
    return _heads(_asked(first, inputs, edited), torch.arange(heads + TILE + _UNWRITTEN) % heads)


def _written_heads(answer: DecodeOutputs) -> DecodeOutputs:
    return _heads(answer, torch.arange(answer.out.shape[1] - _UNWRITTEN))


def _heads_interleaved(inputs: DecodeInputs) -> DecodeInputs | None:
    """Every head twice, next to itself."""
    if not _near(inputs):
        return None
    return _query_of(inputs, inputs.query.repeat_interleave(2, 1))


def _each_head_twice(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    return _heads(_asked(first, inputs, edited), torch.arange(2 * inputs.query.shape[1]) // 2)


def _heads_reversed(inputs: DecodeInputs) -> DecodeInputs | None:
    return _query_of(inputs, inputs.query.flip(1)) if _near(inputs) else None


def _answer_heads_reversed(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    return _heads(_asked(first, inputs, edited), torch.arange(inputs.query.shape[1]).flip(0))


# Parts, pages and memory.


def _other_parts(inputs: DecodeInputs) -> DecodeInputs:
    return dataclasses.replace(inputs, splits=inputs.splits % 5 + 3)


def _pages_moved(inputs: DecodeInputs) -> DecodeInputs | None:
    """The pages stand in reverse order with gaps between them, and the slots follow them."""
    if not _near(inputs):
        return None
    blocks, page, lanes = inputs.cache.shape
    lists = [(blocks - 1 - slots // page) * page + slots % page for slots in _lists(inputs)]
    cache = guarded_copy(inputs.cache.flip(0), gaps=(5 * lanes, 0))
    return dataclasses.replace(_relisted(inputs, lists, _lengths(inputs)), cache=cache)


def _other_page_size(inputs: DecodeInputs) -> DecodeInputs | None:
    """The same tokens in pages of another size."""
    if not _near(inputs):
        return None
    lanes = inputs.cache.shape[2]
    flat = inputs.cache.reshape(-1, lanes)
    page = 7 if inputs.cache.shape[1] == 1 else 1
    blank = torch.full((-flat.shape[0] % page, lanes), math.nan).to(flat.dtype)
    return dataclasses.replace(inputs, cache=guarded_copy(torch.cat([flat, blank]).view(-1, page, lanes)))


def _tokens_reversed(inputs: DecodeInputs) -> DecodeInputs | None:
    """The tokens of requests whose rows see them all in reverse order, in pages of one token."""
    if not _near(inputs) or (inputs.causal and (inputs.qlen > 1 or inputs.global_indptr is not None)):
        return None
    lanes = inputs.cache.shape[2]
    flat = dataclasses.replace(inputs, cache=guarded_copy(inputs.cache.reshape(-1, 1, lanes)))
    return _relisted(flat, [slots.flip(0) for slots in _lists(inputs)], _lengths(inputs))


def _unread_memory_filled(inputs: DecodeInputs) -> DecodeInputs | None:
    """Numbers in place of what stood where nobody reads, and slots in place of what stood behind the last list."""
    if not _near(inputs):
        return None
    page = inputs.cache.shape[1]
    cache = torch.ones_like(inputs.cache.float()).to(inputs.cache.dtype)
    slots = torch.cat([torch.empty(0, dtype=torch.long), *_lists(inputs)])
    cache[slots // page, slots % page] = inputs.cache[slots // page, slots % page]
    listed_slots = torch.cat([slots, torch.zeros(9, dtype=torch.long)]).to(torch.int32)
    return dataclasses.replace(inputs, cache=guarded_copy(cache), slots=guarded_copy(listed_slots))


def _moved(inputs: DecodeInputs) -> DecodeInputs | None:
    """Query and output with other strides: heads before rows."""
    if not _near(inputs):
        return None
    rows, heads, lanes = inputs.query.shape
    query = guarded((heads, rows, lanes), inputs.query.dtype, gaps=(24, 8)).transpose(0, 1)
    query.copy_(inputs.query)
    out = guarded((heads, rows, inputs.out.shape[2]), inputs.out.dtype, gaps=(24, 8)).transpose(0, 1)
    return dataclasses.replace(inputs, query=query, out=out)


# Requests and rows.


def _requests_reversed(inputs: DecodeInputs) -> DecodeInputs | None:
    if not _near(inputs) or inputs.live < 2:
        return None
    query = inputs.query.unflatten(0, (-1, inputs.qlen)).flip(0).flatten(0, 1)
    return _relisted(_query_of(inputs, query), _lists(inputs)[::-1], _lengths(inputs)[::-1])


def _answer_requests_reversed(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    rows = torch.arange(inputs.live * inputs.qlen).view(-1, inputs.qlen).flip(0).flatten()
    return _rows(first, rows)


def _last_request_alone(inputs: DecodeInputs) -> DecodeInputs | None:
    if not _near(inputs) or inputs.live < 2:
        return None
    query = inputs.query[-inputs.qlen :]
    return _relisted(_query_of(inputs, query), _lists(inputs)[-1:], _lengths(inputs)[-1:])


def _answer_of_the_last_request(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    rows = inputs.live * inputs.qlen
    return _rows(first, slice(rows - inputs.qlen, rows))


def _one_row_a_request(inputs: DecodeInputs) -> DecodeInputs | None:
    """Every row of a block as a request of its own, which lists what the row sees."""
    if not _near(inputs) or inputs.qlen == 1:
        return None
    rows = range(inputs.live * inputs.qlen)
    lists = [listed(inputs, row // inputs.qlen)[: visible(inputs, row)] for row in rows]
    single = dataclasses.replace(inputs, qlen=1, global_indptr=None, causal=True)
    return _relisted(single, lists, [len(each) for each in lists])


def _rows_of_a_block_alike(inputs: DecodeInputs) -> DecodeInputs | None:
    """The rows of a block that is not causal all ask what its first row asks."""
    if not _near(inputs) or inputs.causal or inputs.qlen == 1:
        return None
    first = torch.arange(inputs.query.shape[0]) // inputs.qlen * inputs.qlen
    return _query_of(inputs, inputs.query[first])


def _first_row_for_all(first: DecodeOutputs, inputs: DecodeInputs, edited: DecodeInputs) -> DecodeOutputs:
    return _rows(first, torch.arange(inputs.live * inputs.qlen) // inputs.qlen * inputs.qlen)


def _later_tokens_spoilt(inputs: DecodeInputs) -> DecodeInputs | None:
    """NaN in the last token of every block, which no row but the last of all sees."""
    if not _near(inputs) or not inputs.causal or inputs.qlen == 1 or not _finite(inputs):
        return None
    page = inputs.cache.shape[1]
    lists = _lists(inputs)
    last = torch.cat([torch.empty(0, dtype=torch.long), *(slots[-1:] for slots in lists)])
    if last.unique().numel() < last.numel() or not last.numel():
        return None
    others = torch.cat([slots[:-1] for slots in lists])
    if bool(torch.isin(last, others).any()):
        return None
    cache = inputs.cache.clone()
    cache[last // page, last % page] = torch.full((1,), math.nan).to(cache.dtype)
    return dataclasses.replace(inputs, cache=guarded_copy(cache))


def _as_a_shard_of_one(inputs: DecodeInputs) -> DecodeInputs | None:
    """A causal block as the only shard of its requests, or the only shard as a causal block."""
    if not inputs.causal or inputs.world > 1:
        return None
    if inputs.global_indptr is not None:
        return dataclasses.replace(inputs, global_indptr=None)
    return dataclasses.replace(inputs, global_indptr=guarded_copy(inputs.kv_indptr))


# Scales.


def _scale_moved(inputs: DecodeInputs) -> DecodeInputs | None:
    """A factor of two moves from the model's scale to the query's, or into a query of bf16."""
    if inputs.query.dtype in QUANTISED:
        return dataclasses.replace(
            inputs, scale=inputs.scale / 2, query_scale=guarded_copy(inputs.query_scale[None] * 2)[0]
        )
    small = inputs.query[(inputs.query != 0) & ~inputs.query.isnan()].abs()
    if not _near(inputs) or (small.numel() and float(small.min()) < 2.0**-100):
        return None
    return dataclasses.replace(inputs, scale=inputs.scale / 2, query=guarded_copy(inputs.query * 2))


def _cache_halved(inputs: DecodeInputs) -> DecodeInputs | None:
    """Half of every stored number of fp8 at twice the scale, where no number is so small that it would round."""
    if not _near(inputs) or inputs.cache.dtype not in QUANTISED:
        return None
    page = inputs.cache.shape[1]
    slots = torch.cat([torch.empty(0, dtype=torch.long), *_lists(inputs)])
    values = numbers_of(inputs.cache[slots // page, slots % page], torch.float32)
    normal = float(torch.finfo(inputs.cache.dtype).smallest_normal)
    if bool(((values != 0) & (values.abs() < 2 * normal)).any()):
        return None
    cache = inputs.cache.clone()
    cache[slots // page, slots % page] = (values / 2).to(cache.dtype)
    return dataclasses.replace(
        inputs, cache=guarded_copy(cache), cache_scale=guarded_copy(inputs.cache_scale[None] * 2)[0]
    )


def _constant_added_to_rope_lanes(inputs: DecodeInputs) -> DecodeInputs | None:
    """The same number more in every rope lane of every token, where bf16 holds both exactly."""
    latent = inputs.out.shape[2]
    if not _near(inputs) or inputs.cache.dtype != torch.bfloat16 or inputs.query.shape[2] == latent:
        return None
    slots = torch.cat(_lists(inputs)).unique()
    page = inputs.cache.shape[1]
    rope = inputs.cache[slots // page, slots % page, latent:].float()
    if bool(((rope.frac() != 0) | (rope.abs() > 64)).any()):
        return None
    cache = inputs.cache.clone()
    cache[slots // page, slots % page, latent:] = (rope + 3).bfloat16()
    return dataclasses.replace(inputs, cache=guarded_copy(cache))


def _untouched(inputs: DecodeInputs) -> DecodeInputs:
    return dataclasses.replace(inputs)


_Edit = Callable[[DecodeInputs], DecodeInputs | None]
_Expect = Callable[[DecodeOutputs, DecodeInputs, DecodeInputs], DecodeOutputs]


def _law(
    name: str, claim: str, edit: _Edit, expect: _Expect = _asked, measure: Literal["bitwise", "budget"] = "bitwise",
    view: Callable[[DecodeOutputs], DecodeOutputs] = lambda answer: answer, reshapes: bool = False,
) -> Law:  # fmt: skip
    """A law of the requests that count.

    Requests that do not count are left out of the edited call, which then has another shape: a bitwise law that does not
    say so speaks of calls without such requests only, and J15 of the others.
    """
    shaped = measure == "budget" or reshapes

    def edited(inputs: DecodeInputs) -> DecodeInputs | None:
        return edit(_live(inputs)) if inputs.live and (shaped or inputs.live == inputs.requests) else None

    return Law(name, claim, edited, expect, measure, view, reshapes)


LAWS: tuple[Law, ...] = (
    _law("J1 padding heads", "added heads change nothing for the others", _heads_added, _with_more_heads,
         view=_written_heads, reshapes=True),
    _law("J2 head order", "heads do not see each other", _heads_reversed, _answer_heads_reversed),
    _law("J2 every head twice", "heads that ask the same get the same", _heads_interleaved, _each_head_twice,
         reshapes=True),
    _law("J5 part count", "it does not matter into how many parts a row is cut", _other_parts, measure="budget"),
    _law("J6 page order", "pages may stand anywhere", _pages_moved),
    _law("J6 token order", "the order of tokens that are all seen does not matter", _tokens_reversed, measure="budget"),
    _law("J7 page size", "it does not matter how the tokens are cut into pages", _other_page_size),
    _law("J8 request order", "requests do not see each other", _requests_reversed, _answer_requests_reversed),
    _law("J8 a request alone", "a call may be cut into several", _last_request_alone, _answer_of_the_last_request,
         reshapes=True),
    _law("J9 unread memory", "what stands where nobody reads does not matter", _unread_memory_filled),
    _law("J9 later tokens", "what a row does not see does not matter", _later_tokens_spoilt, measure="budget"),
    _law("J11 scale and query", "a power of two may move from the model's scale to the query", _scale_moved),
    _law("J11 scale and cache", "a power of two may move from the cache to its scale", _cache_halved),
    _law("J12 rope lanes", "the same addition to every token's rope lanes moves the log-sum-exp only",
         _constant_added_to_rope_lanes, measure="budget"),
    _law("J13 rows alone", "a row of a block is a block of one row over what it sees", _one_row_a_request,
         measure="budget"),
    _law("J14 rows alike", "rows that see and ask the same get the same", _rows_of_a_block_alike, _first_row_for_all),
    Law("J15 padding", "requests that do not count change nothing for the others",
        lambda inputs: _live(inputs) if inputs.live < inputs.requests else None, _asked, "bitwise", reshapes=True),
    _law("J16 a shard of one", "the only shard of a causal block is that block", _as_a_shard_of_one),
    _law("D1 strides", "strides, gaps and the order of dimensions in memory do not matter", _moved),
    _law("M29 same call twice", "the same call gives the same bits", _untouched),
)  # fmt: skip
