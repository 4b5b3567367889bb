"""What do we ask of the builder that joins selected and window entries into rows of workspace indices?

Prefill gathers the keys of a few requests into one workspace. Each query gets a row of indices into it: the compressed
entries that were selected for it, then its sliding window. See `oracle.sparse_mla.combine_topk_window` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Shaped

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served

COLUMN_MULTIPLE = 128
_INT32_MAX = 2**31 - 1
# Far rows pass 2^31 bytes from the first, which is where 32-bit byte offsets end.


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call, for the requests of a chunk.

    topk: for every query the request-local numbers of selected compressed entries; int32 or int64. Of a row only the
    first few count; in those, a number below 0 or not below `compressed_rows` selects nothing and keeps its column.
    query_start: where each request's queries start in the batch; the first one need not be 0. Their number is the
    number of rows. seq_lens: tokens of each request, its queries included; fewer than queries in a warm-up batch.
    gather_lens: how many of its last tokens lie in the workspace, at least min(seq_len, queries + window - 1).
    window, ratio, top_k: tokens a query sees in its window, tokens per compressed entry (0: there are none), and
    entries that may be selected. request_rows: workspace rows per request, of which the first `compressed_rows` hold
    compressed entries and the following ones the gathered tokens.
    combined, lens: output memory; the columns are top_k + window, rounded up to a multiple of 128. Whoever makes its
    own output tensors leaves it alone.
    """

    combined: Int32[torch.Tensor, "queries columns"]
    lens: Int32[torch.Tensor, " queries"]
    topk: Shaped[torch.Tensor, "queries topk_columns"]
    query_start: Int32[torch.Tensor, " starts"]
    seq_lens: Int32[torch.Tensor, " requests"]
    gather_lens: Int32[torch.Tensor, " requests"]
    window: int
    ratio: int
    top_k: int
    request_rows: int
    compressed_rows: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Rows of workspace indices filled up with -1, and how many columns of each row count."""

    combined: Int32[torch.Tensor, "queries columns"]
    lens: Int32[torch.Tensor, " queries"]


WRITABLE: tuple[str, ...] = ("combined", "lens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineCase(Case):
    """The axes of the combination.

    requests: of the chunk. queries: of the longest request. lengths: `full` all that many, `ragged` any number from 0,
    `empty_between` every other request without queries. prefix: tokens before the queries, `none`, `short` fewer than
    the window, `long` at least the window, `warm_up` fewer tokens than queries, `mixed` each request another kind.
    gather: `exact` the fewest tokens that the windows need, `more`, `whole` all. top_k, buffer: entries that may be
    selected, and columns of the index tensor, as many, more or fewer. base: the first query_start. room: `tight` no
    workspace row to spare, `roomy` some, `huge` indices up to the last int32. invalid: where among the entries that
    count those stand that select nothing. reach: `far` puts the rows of topk and combined beyond 2^31 bytes.
    """

    op: ClassVar[str] = "sparse_mla.combine_topk_window"

    requests: int = 3
    queries: int = 7
    lengths: Literal["full", "ragged", "empty_between"] = "ragged"
    prefix: Literal["none", "short", "long", "warm_up", "mixed"] = "mixed"
    gather: Literal["exact", "more", "whole"] = "exact"
    window: int = 8
    ratio: int = 2
    top_k: int = 8
    buffer: Literal["exact", "wider", "narrower"] = "exact"
    base: int = 13
    room: Literal["tight", "roomy", "huge"] = "tight"
    invalid: Literal["none", "front", "middle", "tail", "all"] = "middle"
    index_type: Literal["int32", "int64"] = "int32"
    layout: Literal["contiguous", "strided"] = "contiguous"
    reach: Literal["near", "far"] = "near"


CASE = CombineCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (1, 2, 5),
    "queries": (1, 7, 130),
    "lengths": ("full", "ragged", "empty_between"),
    "prefix": ("none", "short", "long", "warm_up", "mixed"),
    "gather": ("exact", "more", "whole"),
    "window": (1, 5, 8, 128),
    "ratio": (0, 1, 2, 4),
    "top_k": (0, 1, 8, 512),
    "buffer": ("exact", "wider", "narrower"),
    "base": (0, 13, 1 << 30),
    "room": ("tight", "roomy", "huge"),
    "invalid": ("none", "front", "middle", "tail", "all"),
    "index_type": ("int32", "int64"),
    "layout": ("contiguous", "strided"),
    "reach": ("near",),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "queries": (1, 2, 7, 129, 257),
    "requests": (1, 2, 4, 17),
    "ratio": (0, 1, 2, 4, 128),
    "top_k": (0, 1, 8, 512, 2048),
}

RANDOM_CASES = 20

_BASE = CombineCase()

REGRESSIONS: tuple[str, ...] = (
    _BASE.varied(requests=5).id,
    _BASE.varied(requests=0).id,
    _BASE.varied(queries=0, prefix="long").id,
    _BASE.varied(requests=4, queries=130, window=128, top_k=512, prefix="long", gather="more", buffer="wider").id,
    _BASE.varied(ratio=0, prefix="long").id,
    _BASE.varied(ratio=0, top_k=0, buffer="wider", invalid="none", prefix="long", room="roomy").id,
    _BASE.varied(prefix="warm_up", ratio=1, lengths="full").id,
    _BASE.varied(buffer="narrower", prefix="long", ratio=1).id,
    _BASE.varied(index_type="int64", invalid="all", ratio=1, prefix="long").id,
    _BASE.varied(reach="far", lengths="full", prefix="long", ratio=1).id,
    _BASE.varied(reach="far", lengths="full", layout="strided", prefix="long", requests=1).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(requests=8, queries=256, window=128, ratio=4, top_k=512, base=0)),
    Served(CASE(requests=8, queries=256, window=128, ratio=4, top_k=2048, base=0)),
    Served(CASE(requests=8, queries=256, window=128, ratio=128, top_k=1024, base=0)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (0, 1024),
    "queries": (0, 1 << 14),
    "window": (1, 4096),
    "ratio": (0, 4096),
    "top_k": (0, 1 << 14),
    "base": (0, 1 << 30),
}


def forbid(case: CombineCase) -> list[str]:
    """Every reason why this is no question: kinds that need more requests, tokens or columns to differ on."""
    reasons = outside(case, _BOUNDS)
    if case.lengths == "empty_between" and case.requests < 2:
        reasons.append("lengths=empty_between: needs two requests")
    if case.prefix == "short" and case.window < 2:
        reasons.append("prefix=short: needs a window of two")
    if case.prefix == "warm_up" and case.queries == 0:
        reasons.append("prefix=warm_up: needs queries")
    if case.buffer == "narrower" and case.top_k < 2:
        reasons.append("buffer=narrower: needs two entries to select")
    if case.invalid != "none" and case.top_k == 0:
        reasons.append(f"invalid={case.invalid}: needs entries to select")
    if case.reach == "far" and (case.requests == 0 or case.queries < 3 or case.lengths != "full" or case.top_k == 0):
        reasons.append("reach=far: needs three rows of entries")
    return reasons


def heavy(case: CombineCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.requests * case.queries > 700


def build(case: CombineCase) -> Inputs:
    """The inputs of a case; columns that do not count hold numbers that would be valid, or not."""
    draw = Draw(case.seed, case.op)
    queries = _queries(case, draw)
    prefix = _prefixes(case, draw, queries)
    seq = queries + prefix
    gather = queries + prefix.clamp(0, case.window - 1)
    if case.gather == "more":
        gather += (seq - gather).clamp(min=0) // 2
    elif case.gather == "whole":
        gather = seq
    slack = 0 if case.room == "tight" else 5
    compressed = (int((seq // case.ratio).max()) if case.ratio and case.requests else 0) + slack
    needed = compressed + (int(gather.max()) if case.requests else 0) + slack
    request_rows = _INT32_MAX // max(1, case.requests) if case.room == "huge" else needed
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), torch.cumsum(queries, 0)))
    rows = int(starts[-1])
    request = torch.repeat_interleave(torch.arange(case.requests), queries)
    position = prefix[request] + torch.arange(rows) - starts[request]
    topk = _topk(case, draw, position, compressed)
    columns = -(-(case.top_k + case.window) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    topk_gap, combined_gap = (11, 24) if case.layout == "strided" else (0, 0)
    if case.reach == "far":
        topk_gap += far_gap(rows, topk.shape[1])
        combined_gap += far_gap(rows, columns)
    return Inputs(
        combined=guarded((rows, columns), torch.int32, gaps=(combined_gap,)),
        lens=guarded((rows,), torch.int32),
        topk=guarded_copy(topk, gaps=(topk_gap,)),
        query_start=guarded_copy((case.base + starts).to(torch.int32)),
        seq_lens=guarded_copy(seq.to(torch.int32)),
        gather_lens=guarded_copy(gather.to(torch.int32)),
        window=case.window,
        ratio=case.ratio,
        top_k=case.top_k,
        request_rows=request_rows,
        compressed_rows=compressed,
    )


def _queries(case: CombineCase, draw: Draw) -> torch.Tensor:
    queries = torch.full((case.requests,), case.queries)
    if case.lengths == "ragged":
        queries = draw.integers("queries", (case.requests,), 0, case.queries + 1)
        queries[:1] = case.queries
    elif case.lengths == "empty_between":
        queries[1::2] = 0
    return queries


def _prefixes(case: CombineCase, draw: Draw, queries: torch.Tensor) -> torch.Tensor:
    """Tokens before the queries of each request; negative where it has fewer tokens than queries."""
    count = (case.requests,)
    kinds = {
        "none": torch.zeros(count, dtype=torch.int64),
        "short": draw.integers("short", count, 1, max(2, case.window)).clamp(max=case.window - 1),
        "long": draw.integers("long", count, case.window, 2 * case.window + 40),
        "warm_up": -torch.minimum(draw.integers("fewer", count, 1, max(2, case.queries + 1)), queries),
    }
    if case.prefix != "mixed":
        return kinds[case.prefix]
    choice = (torch.arange(case.requests) + case.seed) % len(kinds)
    return torch.stack(list(kinds.values()))[choice, torch.arange(case.requests)]


def _topk(case: CombineCase, draw: Draw, position: torch.Tensor, compressed: int) -> torch.Tensor:
    """Selected entries; those that count exist at the query's position, or are no entries at all."""
    width = {"exact": case.top_k, "wider": case.top_k + 37, "narrower": case.top_k // 2}[case.buffer]
    shape = (position.numel(), width)
    column = torch.arange(width)
    exist = ((position + 1) // case.ratio if case.ratio else torch.zeros_like(position)).clamp(min=0)
    count = exist.clamp(max=min(case.top_k, width))[:, None]
    drawn = draw.integers("entries", shape, 0, 1 << 30)
    nothing = [-1, compressed, compressed + 1, _INT32_MAX, -(2**31)]
    if case.index_type == "int64":
        # Cut to 32 bits, these are 0 and the first window row.
        nothing += [2**33, 2**40 + compressed]
    wrong = torch.tensor(nothing)[draw.integers("wrong", shape, 0, len(nothing))]
    chosen = {
        "none": torch.zeros(shape, dtype=torch.bool),
        "front": (column < 1) & (count > 0),
        "middle": (column == count // 2) & (count > 2),
        "tail": column == count - 1,
        "all": torch.ones(shape, dtype=torch.bool),
    }[case.invalid]
    topk = torch.where(chosen, wrong, drawn % exist[:, None].clamp(min=1))
    # Behind what counts: stale entries, which would be as good as any, with some of the others among them.
    stale = torch.where(drawn % 4 == 0, wrong, drawn % max(1, compressed))
    return torch.where(column < count, topk, stale).to(getattr(torch, case.index_type))
