"""What do we ask of the builder that lists the cache slots of every query's sliding window?

See `oracle.sparse_mla.window_slots` for the formula. A draft block is the other form: its tokens all see the window
before the block and the whole block.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served

Form = Literal["causal", "draft"]

DRAFT_MULTIPLE = 64


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: row i is token i + token_offset of the batch.

    query_start: where each request's tokens start in the batch, from 0. seq_lens: tokens of each request, those in the
    batch included; fewer than those in a warm-up batch. token_to_request, valid: of every token of the batch; of a
    token that is not valid the request is any number. table: position p of a request lies in block
    table[request, p // block_size]; only blocks that a window reaches are meaningful. replay_start: per request the
    position below which no key was kept; the draft form does not ask for it. slots, lens, gather_lens: output memory;
    `slots` may have more columns than a row can use, `gather_lens` an entry for each request from `first_prefill` on.
    """

    slots: Int32[torch.Tensor, "rows columns"]
    lens: Int32[torch.Tensor, " rows"]
    gather_lens: Int32[torch.Tensor, " prefills"]
    query_start: Int32[torch.Tensor, " starts"]
    seq_lens: Int32[torch.Tensor, " requests"]
    token_to_request: Int32[torch.Tensor, " tokens"]
    valid: Bool[torch.Tensor, " tokens"]
    table: Int32[torch.Tensor, "requests blocks"]
    replay_start: Int32[torch.Tensor, " requests"]
    token_offset: int
    first_prefill: int
    window: int
    block_size: int
    form: Form


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Slots filled up with -1, their number in each row, and how many tokens a prefill request must gather.

    A length of 0 or below says that the row is empty; how far below is free.
    """

    slots: Int32[torch.Tensor, "rows columns"]
    lens: Int32[torch.Tensor, " rows"]
    gather_lens: Int32[torch.Tensor, " prefills"]


WRITABLE: tuple[str, ...] = ("slots", "lens", "gather_lens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowCase(Case):
    """The axes of the window builder.

    form: `causal` each token sees a window up to itself, `draft` the window before the block and the whole block. part:
    the rows are those of the batch's first requests (`decode`) or of its last ones (`prefill`); the prefill requests
    get gather lengths. requests: of the rows. others: requests of the other part. queries: tokens of the longest
    request. lengths: `full`, `ragged` any number from 0, `empty_between`. prefix: tokens before those, `none`, `short`
    fewer than the window, `long` at least the window, `warm_up` fewer tokens than queries, `mixed`. invalid: tokens
    that are no tokens, `padding` behind the last one, `scattered`, `all`. width: columns, as many as a row can use or
    `wider`. table: `narrowed` is a view of a wider table. slots: `huge` ones reach up to the last int32. replay: where
    keys were kept from, `zero`, `inside` a window, or `late` behind some queries. reach: `far` puts the rows of slots
    and table beyond 2^31 bytes.
    """

    op: ClassVar[str] = "sparse_mla.window_slots"

    form: Literal["causal", "draft"] = "causal"
    part: Literal["decode", "prefill"] = "prefill"
    requests: int = 3
    others: int = 2
    queries: int = 7
    lengths: Literal["full", "ragged", "empty_between"] = "ragged"
    prefix: Literal["none", "short", "long", "warm_up", "mixed"] = "mixed"
    window: int = 8
    block_size: int = 4
    invalid: Literal["none", "padding", "scattered", "all"] = "scattered"
    width: Literal["exact", "wider"] = "exact"
    table: Literal["exact", "narrowed"] = "exact"
    slots: Literal["small", "huge"] = "small"
    replay: Literal["zero", "inside", "late"] = "zero"
    reach: Literal["near", "far"] = "near"


CASE = WindowCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "form": ("causal", "draft"),
    "part": ("decode", "prefill"),
    "requests": (1, 2, 5),
    "others": (0, 2),
    "queries": (1, 2, 7, 40),
    "lengths": ("full", "ragged", "empty_between"),
    "prefix": ("none", "short", "long", "warm_up", "mixed"),
    "window": (1, 5, 8, 128),
    "block_size": (1, 4, 32, 64, 256),
    "invalid": ("none", "padding", "scattered", "all"),
    "width": ("exact", "wider"),
    "table": ("exact", "narrowed"),
    "slots": ("small", "huge"),
    "replay": ("zero", "inside", "late"),
    "reach": ("near",),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "requests": (1, 2, 5, 17),
    "queries": (1, 2, 7, 40, 300),
    "block_size": (1, 2, 5, 4, 32, 64, 128, 256),
}

RANDOM_CASES = 20

_BASE = WindowCase()

REGRESSIONS: tuple[str, ...] = (
    _BASE.varied(requests=5).id,
    _BASE.varied(form="draft", requests=5).id,
    _BASE.varied(part="decode", others=0, queries=2, window=128, block_size=64, invalid="padding").id,
    _BASE.varied(part="decode", requests=0, others=2).id,
    _BASE.varied(requests=0, others=0, invalid="none").id,
    _BASE.varied(queries=0, prefix="long", invalid="none").id,
    _BASE.varied(prefix="warm_up", invalid="none", lengths="full").id,
    _BASE.varied(replay="inside", prefix="long", invalid="none", lengths="full").id,
    _BASE.varied(table="narrowed", prefix="long", requests=5).id,
    _BASE.varied(window=1100, queries=2, prefix="long", block_size=64).id,
    _BASE.varied(reach="far", prefix="long", lengths="full").id,
    _BASE.varied(reach="far", prefix="long", lengths="full", form="draft", table="narrowed").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(part="decode", requests=64, others=0, queries=1, window=128, block_size=64)),
    Served(CASE(part="decode", requests=64, others=2, queries=4, window=128, block_size=64)),
    Served(CASE(part="prefill", requests=8, others=64, queries=512, window=128, block_size=64)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (0, 1024),
    "others": (0, 1024),
    "queries": (0, 1 << 14),
    "window": (1, 4096),
    "block_size": (1, 4096),
}


def forbid(case: WindowCase) -> list[str]:
    """Every reason why this is no question: kinds that need more requests or tokens to differ on."""
    reasons = outside(case, _BOUNDS)
    if case.lengths == "empty_between" and case.requests < 2:
        reasons.append("lengths=empty_between: needs two requests")
    if case.prefix == "short" and case.window < 2:
        reasons.append("prefix=short: needs a window of two")
    if case.prefix == "warm_up" and case.queries == 0:
        reasons.append("prefix=warm_up: needs queries")
    if case.invalid == "padding" and case.part == "decode" and case.others > 0:
        reasons.append("invalid=padding: it follows the batch's last request")
    if case.reach == "far" and (case.requests < 3 or case.queries == 0 or case.lengths != "full"):
        reasons.append("reach=far: needs three rows of slots and of the table")
    return reasons


def heavy(case: WindowCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.requests * case.queries > 250


def build(case: WindowCase) -> Inputs:
    """The inputs of a case; blocks that no window reaches have numbers that are none."""
    draw = Draw(case.seed, case.op)
    asked = _Requests.of(case, draw.within("asked"), case.requests)
    other = _Requests.of(case, draw.within("others"), case.others)
    parts = (asked, other) if case.part == "decode" else (other, asked)
    queries = torch.cat([part.queries for part in parts])
    prefix = torch.cat([part.prefix for part in parts])
    starts = torch.nn.functional.pad(torch.cumsum(queries, 0), (1, 0))
    offset = 0 if case.part == "decode" else int(other.queries.sum())
    rows = int(asked.queries.sum()) + (3 if case.invalid == "padding" else 0)
    token_to_request = torch.repeat_interleave(torch.arange(queries.numel()), queries)
    token_to_request = torch.nn.functional.pad(token_to_request, (0, max(0, offset + rows - token_to_request.numel())))
    valid = _valid(case, draw, token_to_request.numel(), int(starts[-1]))
    nowhere = torch.tensor([2**31 - 1, -(2**31), -1, queries.numel()])
    garbage = nowhere[draw.integers("nowhere", token_to_request.shape, 0, 4)]
    replay = _replay(case, draw, prefix)
    # A draft block of that many tokens and its window, in whole tiles.
    columns = case.window
    if case.form == "draft":
        columns = -(-(case.window + case.queries) // DRAFT_MULTIPLE) * DRAFT_MULTIPLE
    columns += 70 if case.width == "wider" else 0
    table = _table(case, draw, prefix, queries)
    slots_gap, table_gap = 0, 5 if case.table == "narrowed" else 0
    if case.reach == "far":
        slots_gap = far_gap(rows, columns)
        table_gap += far_gap(table.shape[0], table.shape[1])
    first_prefill = case.requests if case.part == "decode" else case.others
    return Inputs(
        slots=guarded((rows, columns), torch.int32, gaps=(slots_gap,)),
        lens=guarded((rows,), torch.int32),
        gather_lens=guarded((queries.numel() - first_prefill,), torch.int32),
        query_start=guarded_copy(starts.to(torch.int32)),
        seq_lens=guarded_copy((queries + prefix).to(torch.int32)),
        token_to_request=guarded_copy(torch.where(valid, token_to_request, garbage).to(torch.int32)),
        valid=guarded_copy(valid, fill=1),
        table=guarded_copy(table.to(torch.int32), gaps=(table_gap,)),
        replay_start=guarded_copy(replay.to(torch.int32)),
        token_offset=offset,
        first_prefill=first_prefill,
        window=case.window,
        block_size=case.block_size,
        form=case.form,
    )


@dataclasses.dataclass(frozen=True)
class _Requests:
    """Tokens of some requests in the batch, and before it."""

    queries: torch.Tensor
    prefix: torch.Tensor

    @classmethod
    def of(cls, case: WindowCase, draw: Draw, count: int) -> "_Requests":
        queries = torch.full((count,), case.queries)
        if case.lengths == "ragged":
            queries = draw.integers("queries", (count,), 0, case.queries + 1)
            queries[:1] = case.queries
        elif case.lengths == "empty_between":
            queries[1::2] = 0
        shape = (count,)
        kinds = {
            "none": torch.zeros(shape, dtype=torch.int64),
            "short": draw.integers("short", shape, 1, max(2, case.window)).clamp(max=case.window - 1),
            "long": draw.integers("long", shape, case.window, 2 * case.window + 40),
            "warm_up": -torch.minimum(draw.integers("fewer", shape, 1, max(2, case.queries + 1)), queries),
        }
        if case.prefix != "mixed":
            return cls(queries, kinds[case.prefix])
        choice = (torch.arange(count) + case.seed) % len(kinds)
        return cls(queries, torch.stack(list(kinds.values()))[choice, torch.arange(count)])


def _valid(case: WindowCase, draw: Draw, tokens: int, real: int) -> torch.Tensor:
    if case.invalid == "all":
        return torch.zeros(tokens, dtype=torch.bool)
    valid = torch.arange(tokens) < real
    if case.invalid == "scattered":
        valid &= ~draw.chance("invalid", (tokens,), 1, 3)
    return valid


def _replay(case: WindowCase, draw: Draw, prefix: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(prefix)
    if case.replay == "zero":
        return zero
    back = draw.integers("replay", prefix.shape, 1, max(2, case.window))
    if case.replay == "inside":
        return (prefix - back).clamp(min=0)
    return (prefix + back).clamp(min=0)


def _table(case: WindowCase, draw: Draw, prefix: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Block numbers where a window may reach, and numbers that are none elsewhere."""
    seq = (prefix + queries).clamp(min=0)
    requests = seq.numel()
    columns = (int(seq.max()) if requests else 0) // case.block_size + 3
    column = torch.arange(columns)
    lowest = (prefix - case.window).clamp(min=0) // case.block_size
    real = (column >= lowest[:, None]) & (column < -(-seq // case.block_size)[:, None])
    drawn = draw.permutation("blocks", requests * columns).reshape(requests, columns)
    if case.slots == "huge":
        drawn = 2**31 // case.block_size - 1 - drawn
    nothing = torch.tensor([-1, 2**31 - 1, -(2**31), 0])[draw.integers("nothing", (requests, columns), 0, 4)]
    return torch.where(real, drawn, nothing)
