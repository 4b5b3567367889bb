"""What do we ask of the expansion of a block table into the slots of single tokens?

The decode kernels see the cache as pages of one token each, so the blocks of every request become a flat list of slots.
See `oracle.dense_mla.expand_pages`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.sparse_mla.paging import INT32_MAX, INT32_MIN


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: request b owns `indices[kv_indptr[b] : kv_indptr[b + 1]]`, one slot for each token of its list.

    block_table: block ids, any strides in both dimensions; columns behind a request's tokens hold anything.
    real_lengths, clamped: where `clamped`, tokens from real_lengths[b] on repeat the request's first slot, and a list may
    have `extra` tokens more than the table has room for. Otherwise real_lengths means nothing.
    graphs: the buffer belongs to captured graphs, so that what no request owns becomes -1; otherwise it is left alone.
    """

    block_table: Int32[torch.Tensor, "requests width"]
    kv_indptr: Int32[torch.Tensor, " starts"]
    real_lengths: Int32[torch.Tensor, " requests"]
    indices: Int32[torch.Tensor, " capacity"]
    block_size: int
    clamped: bool
    extra: int
    graphs: bool


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The whole buffer afterwards."""

    indices: Int32[torch.Tensor, " capacity"]


WRITABLE: tuple[str, ...] = ("indices",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpandCase(Case):
    """The axes of the expansion.

    width: blocks per row of the table. block_size: tokens per block. lengths: `edges` next to the ends of blocks, of
    tiles of 1024 tokens and of the table; `lonely` the last request alone has tokens. ids: `high` the last slots that
    int32 can name, `shared` requests begin with the same blocks. table: `row_gaps` and `column_gaps` unused memory
    behind every row and element, `transposed` rows lie next to each other, `one_row` all requests have the same row,
    `far` rows 1 GiB apart and more. tail: `clamped` lists longer than their requests. buffer: `roomy` ends behind the
    last list.
    """

    op: ClassVar[str] = "dense_mla.expand_pages"

    requests: int = 7
    width: int = 9
    block_size: int = 16
    lengths: Literal["full", "ragged", "edges", "empty", "lonely"] = "ragged"
    ids: Literal["any", "high", "shared"] = "any"
    table: Literal["contiguous", "row_gaps", "column_gaps", "transposed", "one_row", "far"] = "contiguous"
    tail: Literal["plain", "clamped"] = "plain"
    buffer: Literal["exact", "roomy"] = "roomy"
    graphs: bool = True


CASE = ExpandCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 7, 33),
    "width": (1, 3, 9, 40),
    "block_size": (1, 2, 16, 48, 128, 1536),
    "lengths": ("full", "ragged", "edges", "empty", "lonely"),
    "ids": ("any", "high", "shared"),
    "table": ("contiguous", "row_gaps", "column_gaps", "transposed", "one_row"),
    "tail": ("plain", "clamped"),
    "buffer": ("exact", "roomy"),
    "graphs": (True, False),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 3, 7, 33, 130),
    "block_size": (1, 2, 3, 16, 32, 48, 64, 128, 256, 1536),
}
RANDOM_CASES = 20

_BASE = ExpandCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(requests=3, table="far").id,
    _BASE.varied(requests=3, width=3, block_size=1536, lengths="full", table="column_gaps").id,
    _BASE.varied(requests=2, width=40, block_size=128, lengths="lonely", graphs=False).id,
    # A list of more than 32768 tokens, alone and behind another one.
    _BASE.varied(requests=1, width=40, block_size=1536, lengths="full", graphs=False).id,
    _BASE.varied(requests=2, width=300, block_size=128, lengths="full", tail="clamped", buffer="exact").id,
    _BASE.varied(block_size=48, lengths="full", ids="high").id,
    _BASE.varied(requests=7, lengths="edges", table="transposed", tail="clamped").id,
    _BASE.varied(requests=0).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(requests=64, width=512, block_size=16)),
    Served(CASE(requests=64, width=512, block_size=64, tail="clamped")),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"requests": (0, 1 << 12), "width": (1, 1 << 12), "block_size": (1, 1 << 12)}
_EXTRA = 5


def forbid(case: ExpandCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.table == "far" and case.requests < 3:
        reasons.append(f"requests={case.requests}: table=far needs three")
    if case.table == "far" and case.width > 1024:
        reasons.append(f"width={case.width}: table=far needs short rows")
    return reasons


def heavy(case: ExpandCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.requests * case.width * case.block_size > 400_000


def build(case: ExpandCase) -> Inputs:
    """The inputs of a case; the buffer holds slots of an earlier batch, and columns that nobody needs hold no blocks."""
    draw = Draw(case.seed, case.op)
    room = case.width * case.block_size
    real = _lengths(case, draw, room)
    clamped = case.tail == "clamped"
    lengths = real + draw.integers("padding", (case.requests,), 0, _EXTRA + 1) if clamped else real
    indptr = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
    spare = 77 if case.buffer == "roomy" else 0
    stale = draw.integers("stale", (int(indptr[-1]) + spare,), 0, 1 << 20)
    # Without clamping this is the length of nothing.
    nobody = draw.integers("nobody", (case.requests,), 0, 3)
    return Inputs(
        block_table=_laid_out(case, _table(case, draw, lengths)),
        kv_indptr=guarded_copy(indptr.to(torch.int32)),
        real_lengths=guarded_copy((real if clamped else nobody).to(torch.int32)),
        indices=guarded_copy(stale.to(torch.int32)),
        block_size=case.block_size,
        clamped=clamped,
        extra=_EXTRA if clamped else 0,
        graphs=case.graphs,
    )


def _lengths(case: ExpandCase, draw: Draw, room: int) -> torch.Tensor:
    """Tokens of every request, at most `room`."""
    count = case.requests
    if case.lengths == "full":
        return torch.full((count,), room)
    if case.lengths == "ragged":
        return draw.integers("lengths", (count,), 0, room + 1)
    if case.lengths == "edges":
        ends = torch.tensor([0, 1023, 1024, 1025, room - 1, room, 1, case.block_size - 1, case.block_size + 1])
        kinds = (torch.arange(count) + draw.integers("kind", (1,), 0, len(ends))) % len(ends)
        return ends[kinds].clamp(0, room)
    lengths = torch.zeros(count, dtype=torch.int64)
    if case.lengths == "lonely":
        lengths[-1:] = room
    return lengths


def _table(case: ExpandCase, draw: Draw, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [requests, width]: blocks where tokens need them, elsewhere numbers that are none, and some that are."""
    shape = (case.requests, case.width)
    # The highest block whose last slot is an int32.
    last = (INT32_MAX + 1) // case.block_size - 1
    low = last - 1000 if case.ids == "high" else 0
    blocks = draw.integers("blocks", shape, low, last + 1 if case.ids == "high" else 5000)
    if case.ids == "shared" and case.requests:
        blocks[:, : (case.width + 1) // 2] = blocks[:1, : (case.width + 1) // 2].clone()
    if case.table == "one_row" and case.requests:
        blocks[:] = blocks[:1].clone()
        lengths = lengths.max().expand(case.requests)
    needed = torch.arange(case.width) * case.block_size < lengths[:, None]
    nothing = torch.tensor([-1, INT32_MIN, INT32_MAX, 3])[torch.arange(case.width) % 4]
    return torch.where(needed, blocks, nothing)


def _laid_out(case: ExpandCase, table: torch.Tensor) -> torch.Tensor:
    table = table.to(torch.int32)
    if case.table == "transposed":
        return guarded_copy(table.t(), gaps=(3,)).t()
    if case.table == "column_gaps":
        wide = guarded((case.requests, case.width, 3), torch.int32, gaps=(5,))[:, :, 1]
        wide.copy_(table)
        return wide
    if case.table == "one_row" and case.requests:
        return guarded_copy(table[:1]).expand(table.shape)
    gaps: tuple[int, ...] = (11,) if case.table == "row_gaps" else ()
    if case.table == "far":
        gaps = (far_gap(case.requests, case.width, limit=1 << 29),)
    return guarded_copy(table, gaps=gaps)
