"""Which pages does each row of a verify block read on its rank?

    page size T           = min(128, largest power of two that divides K)        unless it is given
    page i of request b   = blocks[b, i // n] n + i % n        n = K / T pages in a block
    pages[b S + t, i]     = page i of request b                for every row t = 0..S-1 of the request

for blocks of K tokens; int32. All rows of a request share its pages, and only their lengths tell them apart. Pages behind
the request's last token are not used and may have any number. Each row is a query of its own, so the queries begin at 0,
1, 2 and so on. The page is the tile of the kernel that reads: a power of two, and it must not straddle blocks.
Sources: `_segmented_mla_page_size` and `_fill_dcp_verify_page_table` of vLLM's ROCm AITER MLA backend.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.dcp.verify_pages import LARGEST_TILE, Inputs, Outputs
from cases.memory import guarded, guarded_copy
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant


def tile(block_size: int) -> int:
    """The largest power of two that divides `block_size`, at most 128; raises ValueError for a block of no token."""
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: should be 1 or more")
    size = 1
    while size < LARGEST_TILE and block_size % (2 * size) == 0:
        size *= 2
    return size


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The page size and all rows; `dtype` changes nothing, since these are integers.

    Unused pages hold -1. Raises ValueError for blocks of no token, blocks of no query, a page that does not divide the
    block, an answer without a row for each query of each request, fewer table rows than requests, fewer columns than the
    pages need, and pages beyond int32.
    """
    del dtype
    size = check(inputs)
    pages = _listed(inputs, size)
    if pages.numel() and not bool(((pages >= 0) & (pages < 1 << 31) | ~_used(inputs, size)).all()):
        raise ValueError(f"block={int(inputs.blocks.max())}: its pages should fit into int32")
    return _answer(inputs, size, torch.where(_used(inputs, size), pages, -1))


def check(inputs: Inputs) -> int:
    """The page size; raises what `reference` says of calls that are malformed in themselves."""
    size = inputs.page_size or tile(inputs.block_size)
    requests, pages = inputs.lengths.numel(), inputs.out.shape[1]
    if inputs.queries < 1:
        raise ValueError(f"queries={inputs.queries}: should be 1 or more")
    if size < 1 or inputs.block_size % size:
        raise ValueError(f"page_size={size}: should divide block_size={inputs.block_size}")
    if inputs.out.shape[0] != requests * inputs.queries:
        raise ValueError(f"out has {inputs.out.shape[0]} rows: should be {requests * inputs.queries}")
    if inputs.blocks.shape[0] < requests:
        raise ValueError(f"blocks has {inputs.blocks.shape[0]} rows: should be {requests} or more")
    needed = -(-pages * size // inputs.block_size)
    if inputs.blocks.shape[1] < needed:
        raise ValueError(f"blocks has {inputs.blocks.shape[1]} columns: should be {needed} or more for {pages} pages")
    return size


def _listed(inputs: Inputs, size: int) -> torch.Tensor:
    """Each request's pages as int64 [requests, pages], unused ones too."""
    per_block = inputs.block_size // size
    page = torch.arange(inputs.out.shape[1], device=inputs.blocks.device)
    return inputs.blocks[: inputs.lengths.numel()].long()[:, page // per_block] * per_block + page % per_block


def _used(inputs: Inputs, size: int) -> torch.Tensor:
    """Which pages hold a token of the request, bool [requests, pages]."""
    return torch.arange(inputs.out.shape[1], device=inputs.lengths.device) * size < inputs.lengths[:, None]


def _answer(inputs: Inputs, size: int, pages: torch.Tensor) -> Outputs:
    """The answer with these pages of each request on all of its rows."""
    return Outputs(torch.tensor([size]), _low_bits(pages).repeat_interleave(inputs.queries, dim=0))


def _low_bits(pages: torch.Tensor) -> torch.Tensor:
    return ((pages + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The page size, and of every row the pages that its request uses, bit for bit."""
    del precision
    want = reference(inputs)
    used = _used(inputs, int(want.page_size)).repeat_interleave(inputs.queries, dim=0)
    return (
        exact("page_size", outputs.page_size, want.page_size, why="the largest tile that the block admits"),
        exact("pages", outputs.pages, want.pages, mask=used, why="every row has all pages of its request, in order"),
    )


def _edited(inputs: Inputs, rows: int | None = None, pages: int | None = None, **changes: object) -> Inputs:
    """The call with something changed, and memory of its own for the answer."""
    shape = (inputs.out.shape[0] if rows is None else rows, inputs.out.shape[1] if pages is None else pages)
    return dataclasses.replace(inputs, out=guarded(shape, torch.int32), **changes)  # type: ignore[arg-type]


def _all_used(inputs: Inputs) -> bool:
    """Whether every page of an answer means something, so that two answers can be compared as they are."""
    return bool(_used(inputs, inputs.page_size or tile(inputs.block_size)).all())


def _blocks_raised(inputs: Inputs) -> Inputs | None:
    if not _all_used(inputs) or (inputs.blocks.numel() and int(inputs.blocks.max()) >= (1 << 23)):
        return None
    return _edited(inputs, blocks=guarded_copy(inputs.blocks + 1))


def _a_block_on(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(first.page_size, first.pages + inputs.block_size // int(first.page_size))


def _one_query_more(inputs: Inputs) -> Inputs | None:
    if not _all_used(inputs):
        return None
    return _edited(inputs, rows=inputs.lengths.numel() * (inputs.queries + 1), queries=inputs.queries + 1)


def _first_row_again(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    of_request = first.pages[:: inputs.queries]
    return Outputs(first.page_size, of_request.repeat_interleave(edited.queries, dim=0))


def _one_page_less(inputs: Inputs) -> Inputs | None:
    if not _all_used(inputs) or inputs.out.shape[1] < 2:
        return None
    size = inputs.page_size or tile(inputs.block_size)
    return _edited(inputs, pages=inputs.out.shape[1] - 1, lengths=guarded_copy(inputs.lengths - size))


def _without_the_last(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    return Outputs(first.page_size, first.pages[:, : edited.out.shape[1]].clone())


def _reversed(inputs: Inputs) -> Inputs | None:
    requests = inputs.lengths.numel()
    if not _all_used(inputs):
        return None
    return _edited(
        inputs, blocks=guarded_copy(inputs.blocks[:requests].flip(0)), lengths=guarded_copy(inputs.lengths.flip(0))
    )


def _in_that_order(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return Outputs(first.page_size, first.pages.unflatten(0, (-1, inputs.queries)).flip(0).flatten(0, 1))


def _page_given(inputs: Inputs) -> Inputs | None:
    if inputs.page_size or not _all_used(inputs):
        return None
    return _edited(inputs, page_size=tile(inputs.block_size))


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


LAWS: tuple[Law, ...] = (
    Law("P1 blocks raised", "the next block is its number of pages further on", _blocks_raised, _a_block_on, "bitwise"),
    Law("P2 another query", "every row of a request has the same pages", _one_query_more, _first_row_again, "bitwise"),
    Law("P3 one page less", "a page does not depend on those behind it", _one_page_less, _without_the_last, "bitwise"),
    Law("P4 requests reversed", "each request has pages of its own", _reversed, _in_that_order, "bitwise"),
    Law("P5 page given", "a page that is given is not found otherwise", _page_given, _same, "bitwise"),
)  # fmt: skip


def _as_used(inputs: Inputs, outputs: Outputs) -> Outputs:
    """The answer with -1 in the pages that mean nothing."""
    used = _used(inputs, check(inputs)).repeat_interleave(inputs.queries, dim=0)
    return Outputs(outputs.page_size, torch.where(used, outputs.pages, -1))


def _mutant(name: str, pitfall: str, answer: Callable[[Inputs], Outputs | None]) -> Mutant:
    def as_used(inputs: Inputs) -> Outputs | None:
        wrong = answer(inputs)
        return None if wrong is None else _as_used(inputs, wrong)

    return Mutant(name, pitfall, as_used)


def _sized(name: str, pitfall: str, rule: Callable[[int], int]) -> Mutant:
    """An answer in another page size, found by a rule of the block size."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.page_size:
            return None
        size = rule(inputs.block_size)
        page = torch.arange(inputs.out.shape[1])
        per_block = max(1, inputs.block_size // size)
        column = (page // per_block).clamp(max=inputs.blocks.shape[1] - 1)
        pages = inputs.blocks[: inputs.lengths.numel()].long()[:, column] * per_block + page % per_block
        return _answer(inputs, size, pages)

    return _mutant(name, pitfall, answer)


def _paged(name: str, pitfall: str, rule: Callable[[Inputs, int], torch.Tensor]) -> Mutant:
    """An answer with other pages of each request."""

    def answer(inputs: Inputs) -> Outputs:
        size = check(inputs)
        return _answer(inputs, size, rule(inputs, inputs.block_size // size))

    return _mutant(name, pitfall, answer)


def _table(inputs: Inputs) -> torch.Tensor:
    return inputs.blocks[: inputs.lengths.numel()].long()


def _page(inputs: Inputs) -> torch.Tensor:
    return torch.arange(inputs.out.shape[1])


def _in_bounds(inputs: Inputs, column: torch.Tensor) -> torch.Tensor:
    return column.clamp(max=inputs.blocks.shape[1] - 1)


def _subpage_backwards(inputs: Inputs, n: int) -> torch.Tensor:
    return _table(inputs)[:, _page(inputs) // n] * n + n - 1 - _page(inputs) % n


def _cycled(inputs: Inputs, n: int) -> torch.Tensor:
    """All first pages of the blocks, then all second ones."""
    width = -(-inputs.out.shape[1] // n)
    return _table(inputs)[:, _page(inputs) % width] * n + _page(inputs) // width


def _rows_first(inputs: Inputs) -> Outputs:
    """The first row of every request comes first."""
    right = reference(inputs)
    rows = right.pages.unflatten(0, (-1, inputs.queries)) if right.pages.numel() else right.pages
    return Outputs(right.page_size, rows.transpose(0, 1).flatten(0, 1) if right.pages.numel() else rows)


def _truncated(inputs: Inputs) -> Outputs:
    """Rows have the pages that they themselves see; later rows of a request see a page more now and then."""
    right = reference(inputs)
    size = int(right.page_size)
    behind = torch.arange(inputs.queries - 1, -1, -1).repeat(inputs.lengths.numel())
    seen = inputs.lengths.long().repeat_interleave(inputs.queries) - behind
    return Outputs(right.page_size, torch.where(_page(inputs) * size < seen[:, None], right.pages, 0))


def _changed(change: Callable[[Inputs, torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """The right answer with its pages changed."""

    def answer(inputs: Inputs) -> Outputs:
        right = reference(inputs)
        return Outputs(right.page_size, change(inputs, right.pages.clone()))

    return answer


def _first_row_only(inputs: Inputs, pages: torch.Tensor) -> torch.Tensor:
    written = torch.arange(pages.shape[0]) % inputs.queries == 0
    return torch.where(written[:, None], pages, inputs.out)


def _dense(inputs: Inputs, row: int | None, column: int) -> Outputs | None:
    """The answer through the table taken with other strides; None where they are its own."""
    blocks = inputs.blocks
    strides = (blocks.stride(0) if row is None else row, column)
    size, reach = check(inputs), (blocks.shape[0] - 1) * strides[0] + (blocks.shape[1] - 1) * strides[1]
    room = blocks.untyped_storage().nbytes() // 4 - blocks.storage_offset()
    if strides == blocks.stride() or not blocks.numel() or reach >= room:
        return None
    taken = blocks.as_strided(blocks.shape, strides, blocks.storage_offset())
    return _answer(inputs, size, _listed(dataclasses.replace(inputs, blocks=taken), size))


MUTANTS: tuple[Mutant, ...] = (
    _paged("units-of-blocks", "pages were numbered as if each were a block", lambda inputs, n: _table(inputs)[
        :, _page(inputs) // n] + _page(inputs) % n),
    _paged("block-for-page", "a block were one page",
           lambda inputs, n: _table(inputs)[:, _in_bounds(inputs, _page(inputs))]),
    _paged("block-for-page-scaled", "every block had only its first page in the table",
           lambda inputs, n: _table(inputs)[:, _in_bounds(inputs, _page(inputs))] * n),
    _paged("first-page-again", "all pages of a block were its first",
           lambda inputs, n: _table(inputs)[:, _page(inputs) // n] * n),
    _paged("pages-backwards", "the pages of a block stood in reverse order", _subpage_backwards),
    _paged("page-by-page", "all first pages stood before all second ones", _cycled),
    _paged("next-page", "the table began with the second page", lambda inputs, n: _listed(inputs, inputs.block_size // n)
           + 1),
    _paged("rows-of-the-first-request", "all requests had the blocks of the first",
           lambda inputs, n: _listed(inputs, inputs.block_size // n)[:1].expand(inputs.lengths.numel(), -1)),
    _sized("tile-uncapped", "a tile could have more than 128 tokens", lambda block: block & -block),
    _sized("tile-is-the-block", "the page were the whole block", lambda block: block),
    _sized("tile-at-most-128", "the page were the block, or 128 tokens of it", lambda block: min(block, LARGEST_TILE)),
    _sized("tile-power-below", "the page were the largest power of two within the block",
           lambda block: min(1 << (block.bit_length() - 1), LARGEST_TILE)),
    _sized("tile-of-one-token", "blocks that are no power of two had pages of one token",
           lambda block: min(block, LARGEST_TILE) if block & (block - 1) == 0 else 1),
    _sized("tile-of-64", "a tile had at most 64 tokens", lambda block: min(block & -block, 64)),
    _mutant("rows-before-requests", "the first rows of all requests came first", _rows_first),
    _mutant("pages-of-the-row", "a row had only the pages that it sees itself", _truncated),
    _mutant("first-row-only", "only the first row of a request were filled in", _changed(_first_row_only)),
    _mutant("table-taken-as-dense", "rows of the table were as far apart as they are long",
           lambda inputs: _dense(inputs, inputs.blocks.shape[1], 1)),
    _mutant("columns-taken-as-adjacent", "the columns of the table stood next to each other",
           lambda inputs: _dense(inputs, None, 1)),
    _mutant("last-page-lost", "the last page were left out",
           _changed(lambda inputs, pages: torch.cat((pages[:, :-1], inputs.out[:, -1:]), dim=1))),
)  # fmt: skip


def _block_by_block(inputs: Inputs) -> Outputs:
    """One block after the other, in Python's integers, and what stands behind the last token is taken along."""
    size = inputs.page_size or min(inputs.block_size & -inputs.block_size, LARGEST_TILE)
    per_block = inputs.block_size // size
    rows = []
    for blocks in inputs.blocks[: inputs.lengths.numel()].tolist():
        pages = [block * per_block + page for block in blocks for page in range(per_block)]
        rows += [pages[: inputs.out.shape[1]]] * inputs.queries
    table = torch.tensor(rows, dtype=torch.int64).reshape(inputs.out.shape)
    return Outputs(torch.tensor([size]), _low_bits(table))


_EXACTLY = Precision(probability="exact", note="integers")

HONEST: tuple[Honest, ...] = (
    Honest("pages-by-number", _EXACTLY, reference),
    Honest("block-by-block", _EXACTLY, _block_by_block),
)
