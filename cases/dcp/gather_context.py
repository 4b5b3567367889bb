"""What do we ask of the gathering of a chunk of context from all ranks before a prefill?

Every rank holds some tokens of the context; all of them are brought together, and padding taken out. See
`oracle.dcp.gather_context` for the layout.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Int64

from cases.case import Axis, Case, outside
from cases.dcp.local_lengths import INT32_MAX
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call of rank `rank`: of request r, positions starts[r] to starts[r] + lengths[r] of its contexts[r].

    A chunk starts at a multiple of the block and of a round of all ranks, and ends at such a multiple or with the
    context. caches: what each rank holds, of one dtype and shape, any strides but for adjacent lanes. A row of `table`
    names a request's blocks, the same on every rank, and the blocks of padding rows among them. workspace: C rows, and
    C / ranks before them, that an implementation answers in.
    """

    contexts: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    interleave: int
    rank: int
    caches: tuple[torch.Tensor, ...]
    table: Int32[torch.Tensor, "requests columns"]
    workspace: torch.Tensor

    @property
    def ranks(self) -> int:
        """How many ranks share the contexts."""
        return len(self.caches)

    @property
    def block_size(self) -> int:
        """Tokens that a block holds on each rank."""
        return int(self.caches[0].shape[1])


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What was planned, and what was gathered.

    padded, local_starts: rows that every rank sends for each request, and where they start on the rank. rows: where in
    the gathered rows each row of the chunk stands. workspace: the whole of it. context: the chunk's rows, those of a
    request behind each other, rank after rank.
    """

    padded: Int64[torch.Tensor, " requests"]
    local_starts: Int64[torch.Tensor, " requests"]
    rows: Int32[torch.Tensor, " tokens"]
    workspace: torch.Tensor
    context: torch.Tensor


WRITABLE: tuple[str, ...] = ("workspace",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherCase(Case):
    """The axes of the gathering.

    contexts: `short` some ranks hold nothing, `edges` next to whole rounds and blocks, `any`. chunk: `whole` contexts,
    `first` part of the last one, `last` part of the first one, `middle` part of the only one. without: a request in the
    middle has no context. capacity: of the workspace, `exact` or with `room`. layout: of the caches, `far` blocks 2 GiB
    apart.
    """

    op: ClassVar[str] = "dcp.gather_context"

    requests: int = 3
    ranks: int = 2
    interleave: int = 1
    block_size: int = 16
    contexts: Literal["short", "edges", "any"] = "any"
    chunk: Literal["whole", "first", "last", "middle"] = "whole"
    without: bool = False
    dtype: Literal["bfloat16", "float8_e4m3fn"] = "float8_e4m3fn"
    lanes: int = 40
    capacity: Literal["exact", "room"] = "room"
    layout: Literal["contiguous", "strided", "far"] = "contiguous"


CASE = GatherCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 3, 7),
    "ranks": (2, 3, 4, 8),
    "interleave": (1, 2, 16),
    "block_size": (1, 16, 48, 64),
    "contexts": ("short", "edges", "any"),
    "chunk": ("whole", "first", "last", "middle"),
    "without": (False, True),
    "dtype": ("bfloat16", "float8_e4m3fn"),
    "lanes": (40, 576),
    "capacity": ("exact", "room"),
    "layout": ("contiguous", "strided"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"requests": (0, 1, 3, 7, 20), "ranks": (2, 3, 4, 7, 8)}
RANDOM_CASES = 10

_BASE = GatherCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(chunk="last", ranks=4, interleave=2).id,
    _BASE.varied(chunk="first", contexts="edges", dtype="bfloat16", lanes=576).id,
    _BASE.varied(chunk="middle", requests=1, ranks=3).id,
    _BASE.varied(contexts="short", ranks=8, without=True, requests=7).id,
    _BASE.varied(requests=7, interleave=16, ranks=8, capacity="exact").id,
    _BASE.varied(layout="far", requests=1, contexts="short", block_size=1).id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(requests=4, ranks=8, block_size=block, lanes=576).varied(dtype=code))
    for block, code in ((16, "bfloat16"), (64, "float8_e4m3fn"))
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (0, 256), "ranks": (2, 64), "interleave": (1, 256), "block_size": (1, 1024), "lanes": (1, 4096),
}  # fmt: skip


def forbid(case: GatherCase) -> list[str]:
    """Every reason why no such call exists: a turn fits into a block a whole number of times."""
    reasons = outside(case, _BOUNDS)
    if reasons:
        return reasons
    if case.block_size % case.interleave:
        reasons.append(f"interleave={case.interleave}: should divide block_size={case.block_size}")
    if case.chunk == "middle" and case.requests != 1:
        reasons.append(f"requests={case.requests}: chunk=middle is of one request")
    if case.requests == 0 and (case.chunk != "whole" or case.contexts != "any"):
        reasons.append("requests=0: chunk and contexts say nothing")
    if case.without and case.requests < 3:
        reasons.append(f"requests={case.requests}: without needs a request in the middle")
    if case.layout == "far" and (case.dtype != "float8_e4m3fn" or case.ranks != 2 or case.chunk != "whole"):
        reasons.append("layout=far: needs whole contexts of two ranks in float8_e4m3fn")
    return reasons


def heavy(case: GatherCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.requests * case.lanes > 8000


def alignment(ranks: int, interleave: int, block_size: int) -> int:
    """Positions at which a chunk may start, and end before its context does."""
    return math.lcm(block_size, ranks * interleave)


def padded_rows(tokens: int, ranks: int, interleave: int) -> int:
    """Rows that each rank sends for so many tokens: its turn of every round, whole."""
    return -(-tokens // (ranks * interleave)) * interleave


def build(case: GatherCase) -> Inputs:
    """The inputs of a case: what no token's row holds, in the caches and in the workspace, is NaN."""
    draw = Draw(case.seed, case.op)
    step, round_ = alignment(case.ranks, case.interleave, case.block_size), case.ranks * case.interleave
    contexts, starts, lengths = _chunk(case, draw, step, round_)
    span = case.block_size * case.ranks
    columns = [-(-context // span) for context in contexts]
    width = max(columns, default=0) + 2
    total = sum(columns)
    blocks = max(total + 3, 3)
    numbers = draw.permutation("blocks", blocks)[:total]
    garbage = torch.tensor([-1, -(1 << 31), INT32_MAX, -7])[draw.integers("garbage", (case.requests, width), 0, 4)]
    used = torch.arange(width) < torch.tensor(columns, dtype=torch.int64).reshape(-1, 1)
    table = garbage.masked_scatter(used, numbers)

    dtype = getattr(torch, case.dtype)
    rows = sum(
        padded_rows(start + length, case.ranks, case.interleave) - padded_rows(start, case.ranks, case.interleave)
        for start, length in zip(starts, lengths, strict=True)
    )
    # A workspace holds at least the smallest chunk that could be cut.
    share = max(rows, -(-step // case.ranks)) + 5 * (case.capacity == "room")
    return Inputs(
        contexts=contexts,
        starts=starts,
        lengths=lengths,
        interleave=case.interleave,
        rank=int(draw.integers("rank", (1,), 0, case.ranks)),
        caches=tuple(
            _cache(case, draw.within(str(rank)), rank, contexts, table, blocks, dtype) for rank in range(case.ranks)
        ),
        table=guarded_copy(table.to(torch.int32), gaps=(3,) if case.layout == "strided" else ()),
        workspace=guarded((share * (case.ranks + 1), case.lanes), dtype),
    )


def _chunk(
    case: GatherCase, draw: Draw, step: int, round_: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Contexts, and where the chunk's part of each starts and how long it is."""
    shape = (case.requests,)
    if case.contexts == "short":
        tokens = draw.integers("context", shape, 1, round_ + 2)
    elif case.contexts == "edges":
        unit = torch.tensor([round_, step])[draw.integers("unit", shape, 0, 2)]
        tokens = unit * draw.integers("units", shape, 1, 4) + draw.integers("beside", shape, -1, 2)
    else:
        tokens = draw.integers("context", shape, 1, 150)
    lengths = tokens.clamp(min=1).tolist()
    starts = [0] * case.requests
    if case.without:
        lengths[1] = 0
    contexts = list(lengths)
    pieces = 1 + int(draw.integers("pieces", (1,), 0, 2))
    # What is not gathered lies before the chunk or behind it, in whole steps.
    if case.chunk in ("last", "middle"):
        starts[0] = pieces * step
        contexts[0] += starts[0]
    if case.chunk in ("first", "middle"):
        contexts[-1] += step
        lengths[-1] = -(-lengths[-1] // step) * step
        contexts[-1] = max(contexts[-1], starts[-1] + lengths[-1] + 1)
    return tuple(contexts), tuple(starts), tuple(lengths)


def _cache(
    case: GatherCase, draw: Draw, rank: int, contexts: tuple[int, ...], table: torch.Tensor, blocks: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """One rank's cache with random bytes in the rows of its tokens."""
    shape = (blocks, case.block_size, case.lanes)
    gaps: tuple[int, ...] = (7, 3) if case.layout == "strided" else ()
    if case.layout == "far":
        gaps = (far_gap(blocks, case.block_size * case.lanes),)
    cache = guarded(shape, dtype, gaps=gaps)
    size = dtype.itemsize
    span = case.block_size * case.ranks
    for request, context in enumerate(contexts):
        position = torch.arange(context)
        position = position[position // case.interleave % case.ranks == rank]
        index = position // (case.ranks * case.interleave) * case.interleave + position % case.interleave
        data = draw.integers(f"rows {request}", (len(position), case.lanes * size), 0, 256).to(torch.uint8)
        block = table[request, position // span]
        # Row by row: writing at once through indices would touch the whole of a vast storage.
        for at, row in zip(zip(block.tolist(), (index % case.block_size).tolist(), strict=True), data, strict=True):
            cache[at].view(torch.uint8).copy_(row)
    return cache
