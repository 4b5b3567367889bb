"""What do we ask of the page table through which rows of a verify block read their rank's cache?

A kernel that walks the cache in pages smaller than its blocks needs the blocks' numbers in its own unit, a row of them
for every query. See `oracle.dcp.verify_pages` for the formulas.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Int64

from cases.case import Axis, Case, outside
from cases.dcp.local_lengths import INT32_MAX
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served

LARGEST_TILE = 128


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: `blocks` has a row for each request, and may have more, in any strides.

    page_size: tokens of a page, or 0 for the largest tile that the block admits. lengths: tokens that the longest row of
    each request sees on this rank; pages behind the last of them may have any number, whatever the blocks there.
    out: memory for the answer.
    """

    blocks: Int32[torch.Tensor, "table_rows columns"]
    lengths: Int32[torch.Tensor, " requests"]
    queries: int
    block_size: int
    page_size: int
    out: Int32[torch.Tensor, "rows pages"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Tokens of a page, and the page numbers of every row, the rows of a request one behind the other."""

    page_size: Int64[torch.Tensor, " one"]
    pages: Int32[torch.Tensor, "rows pages"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagesCase(Case):
    """The axes of the page table.

    pages: columns of the answer. page: `tile` is found, `half` of it, or a whole `block`. lengths: `full` every page is
    used, `ragged`, `empty`. width: `exact` the fewest columns that will do, `wide` three more. layout: of the blocks,
    `strided` with gaps, `transposed` columns apart, `far` rows 2 GiB apart. numbers: `high` up to what fits into int32.
    spare: further rows of the table. out: `strided` leaves gaps between its rows.
    """

    op: ClassVar[str] = "dcp.verify_pages"

    requests: int = 3
    queries: int = 4
    block_size: int = 256
    pages: int = 9
    page: Literal["tile", "half", "block"] = "tile"
    lengths: Literal["full", "ragged", "empty"] = "ragged"
    width: Literal["exact", "wide"] = "wide"
    layout: Literal["contiguous", "strided", "transposed", "far"] = "strided"
    numbers: Literal["low", "high"] = "low"
    spare: int = 0
    out: Literal["contiguous", "strided"] = "contiguous"


CASE = PagesCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 3, 17),
    "queries": (1, 2, 4, 5, 8),
    "block_size": (1, 3, 16, 48, 96, 128, 256, 1536),
    "pages": (1, 2, 9, 24, 130),
    "page": ("tile", "half", "block"),
    "lengths": ("full", "ragged", "empty"),
    "width": ("exact", "wide"),
    "layout": ("contiguous", "strided", "transposed"),
    "numbers": ("low", "high"),
    "spare": (0, 2),
    "out": ("contiguous", "strided"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 3, 17, 64),
    "block_size": (1, 3, 16, 32, 48, 64, 96, 128, 256, 1536),
    "pages": (1, 2, 9, 24, 130, 1100),
}
RANDOM_CASES = 12

_BASE = PagesCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(block_size=1536, pages=24, lengths="full").id,
    _BASE.varied(block_size=48, pages=130, layout="transposed").id,
    _BASE.varied(block_size=96, numbers="high").id,
    _BASE.varied(page="block", out="strided").id,
    _BASE.varied(page="half", spare=2, width="exact", lengths="full").id,
    _BASE.varied(layout="far", lengths="full").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(requests=64, queries=4, block_size=64, pages=512)),
    Served(CASE(requests=64, queries=2, block_size=1536, pages=24)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (0, 4096), "queries": (1, 64), "block_size": (1, 1 << 16), "pages": (1, 1 << 16), "spare": (0, 4096),
}  # fmt: skip


def tile_of(block_size: int) -> int:
    """The largest power of two that divides the block, at most `LARGEST_TILE`."""
    return min(block_size & -block_size, LARGEST_TILE)


def forbid(case: PagesCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.page == "half" and case.block_size % 2:
        reasons.append(f"page=half: block_size={case.block_size} has no tile of two tokens")
    if case.layout == "far" and case.requests < 3:
        reasons.append(f"requests={case.requests}: layout=far needs three rows")
    if case.requests == 0 and case.lengths != "full":
        reasons.append("requests=0: lengths says nothing")
    return reasons


def heavy(case: PagesCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.requests * case.queries * case.pages > 100_000


def build(case: PagesCase) -> Inputs:
    """The inputs of a case: blocks behind a request's last page, and spare rows, are garbage."""
    draw = Draw(case.seed, case.op)
    tile = tile_of(case.block_size)
    size = {"tile": tile, "half": tile // 2, "block": case.block_size}[case.page]
    per_block = case.block_size // size
    columns = -(-case.pages // per_block) + 3 * (case.width == "wide")
    rows = case.requests + case.spare

    bound = case.pages * size
    lengths = draw.integers("length", (case.requests,), 0, bound + 1)
    if case.lengths == "full":
        lengths = torch.full((case.requests,), bound)
    elif case.lengths == "empty":
        lengths = torch.zeros(case.requests, dtype=torch.int64)
    else:
        # Next to the end of a page as often as anywhere.
        beside = (lengths // size * size + draw.integers("beside", lengths.shape, -1, 2)).clamp(0, bound)
        lengths = torch.where(draw.chance("edge", lengths.shape, 1, 2), beside, lengths)

    numbers = draw.permutation("blocks", rows * columns).view(rows, columns)
    if case.numbers == "high":
        numbers = (1 << 31) // per_block - 1 - numbers
    needed = torch.zeros((rows, columns), dtype=torch.bool)
    needed[: case.requests] = torch.arange(columns) * case.block_size < lengths[:, None]
    garbage = torch.tensor([-1, -(1 << 31), INT32_MAX, -7])[draw.integers("garbage", numbers.shape, 0, 4)]
    blocks = torch.where(needed, numbers, garbage).to(torch.int32)
    if case.layout == "transposed":
        given = guarded_copy(blocks.T, gaps=(3,)).T
    else:
        gap = far_gap(rows, columns, limit=1 << 29) if case.layout == "far" else 5 * (case.layout == "strided")
        given = guarded_copy(blocks, gaps=(gap,))
    return Inputs(
        blocks=given,
        lengths=guarded_copy(lengths.to(torch.int32)),
        queries=case.queries,
        block_size=case.block_size,
        page_size=0 if case.page == "tile" else size,
        out=guarded(
            (case.requests * case.queries, case.pages), torch.int32, gaps=(7,) if case.out == "strided" else ()
        ),
    )
