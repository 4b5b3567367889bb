"""Which tiles of query rows does a decode kernel work on, which keys does each need, and how long are a plan's buffers?

Let h be the kernel's heads, s the query rows of a request and S their maximum. A kernel that does not know h takes
f = h / 16 heads of 16 in their place, as f requests of 16 heads each, one behind the other, over the same keys; otherwise
f = 1. With g = h / f heads and P packed rows (row times head) of a workgroup,

    T = 1 if S h <= P,   s if 2 g > P,   ceil(s g / P) otherwise              tiles of a request, ceil(s / T) rows each

Under a causal mask the last row t of a tile sees all keys of its request but the s - 1 - t behind it; otherwise it needs
all. Of a trimmed tile the reference plan leaves out as many keys as tiles follow it, which are never too many.

Buffers are reserved for B requests of S rows by a bound of their own on the tiles of a request, and for W workers,
n = B T: (B + W - 1) T works, n groups, and min(B + W - 1, 2 (W - 1)) T partial results; with a split cap c at least
n + min(W, c B) of the latter.

Source: `get_mla_metadata_info_v1` and the planner of version 1.2 in AITER.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from cases.dense_mla.decode_plan import Inputs

FOLDED_HEADS = 16
_LARGE, _SMALL = 128, 64


@dataclasses.dataclass(frozen=True)
class Tile:
    """Some query rows of a request, folded requests counted one by one, and the keys that they need.

    number, of: its place among the tiles of the request. rows: all tiles of the request but the last hold so many. Of the
    keys from first_key to last_key it needs those up to `needed`; the reference plan takes those up to `taken`.
    """

    request: int
    number: int
    of: int
    first_row: int
    last_row: int
    rows: int
    first_key: int
    last_key: int
    needed: int
    taken: int


class Sizes(NamedTuple):
    """Lengths of the buffers of a plan."""

    work_start: int
    works: int
    group_start: int
    groups: int
    parts: int


def is_native(inputs: Inputs) -> bool:
    """Whether a kernel takes so many heads as they are."""
    heads, gfx950 = inputs.heads, inputs.arch == "gfx950"
    if heads == FOLDED_HEADS:
        return True
    if inputs.query_format == inputs.cache_format == "float8":
        if heads == 64 and inputs.queries == 1:
            return True
        return heads in (32, 64, 128) if gfx950 else heads == 128
    return gfx950 and inputs.query_format == inputs.cache_format == "bfloat16"


def folds(inputs: Inputs) -> int:
    """How many requests of 16 heads stand for one request; 1 when a kernel takes its heads as they are."""
    return 1 if is_native(inputs) else inputs.heads // FOLDED_HEADS


def _is_packed_small(inputs: Inputs, heads: int, queries: int) -> bool:
    if inputs.arch != "gfx950":
        return False
    packed = heads * queries
    if inputs.query_format == inputs.cache_format == "bfloat16":
        return packed >= _SMALL and heads <= _SMALL and (packed < _LARGE or heads == 48)
    return inputs.query_format == inputs.cache_format == "float8" and heads == 32 and queries == 3


def tiles_of_request(inputs: Inputs, rows: int) -> int:
    """Tiles of a request with so many query rows, none without rows."""
    heads = inputs.heads // folds(inputs)
    packed = _SMALL if _is_packed_small(inputs, heads, inputs.queries) else _LARGE
    if inputs.queries * inputs.heads <= packed:
        return min(1, rows)
    return rows if 2 * heads > packed else -(-rows * heads // packed)


def tiles(inputs: Inputs) -> list[Tile]:
    """All tiles of the batch, request by request."""
    return list(_tiles(inputs))


def _tiles(inputs: Inputs) -> Iterator[Tile]:
    query, key = inputs.query_start.tolist(), inputs.key_start.tolist()
    ratio = folds(inputs)
    for request in range(ratio * (len(query) - 1)):
        own = request // ratio
        rows = query[own + 1] - query[own]
        first_row = query[own] * ratio + request % ratio * rows
        count = tiles_of_request(inputs, rows)
        each = -(-rows // max(1, count))
        first_key, last_key = key[own], key[own + 1]
        for number in range(count):
            end = min((number + 1) * each, rows)
            hidden = rows - end if inputs.mask == "causal" else 0
            trimmed = count - 1 - number if inputs.mask == "causal" and ratio == 1 else 0
            yield Tile(
                request=request, number=number, of=count, first_row=first_row + number * each, last_row=first_row + end,
                rows=each, first_key=first_key, last_key=last_key, needed=max(first_key, last_key - hidden),
                taken=max(first_key, last_key - trimmed),
            )  # fmt: skip


def split_budget(inputs: Inputs) -> int:
    """Workers among which the keys of the batch may be split: the cap is a budget of all requests together."""
    if inputs.split_cap is None:
        return inputs.compute_units
    requests = folds(inputs) * (inputs.query_start.numel() - 1)
    return min(inputs.compute_units, inputs.split_cap * max(1, requests))


def reserved_tiles(inputs: Inputs) -> int:
    """The bound on tiles of a request by which buffers are reserved.

    It holds for requests of exactly `capacity_queries` rows; for fewer rows it can be too small, see `reserved`.
    """
    heads, queries = inputs.heads, inputs.capacity_queries
    packed = heads * queries
    both = inputs.query_format if inputs.query_format == inputs.cache_format else "mixed"
    gfx950 = inputs.arch == "gfx950"
    if _is_packed_small(inputs, heads, queries):
        return queries if 2 * heads > _SMALL else -(-packed // _SMALL)
    known = (64, 128) if gfx950 else (128,)
    of_float8 = heads in known or (heads == 32 and queries == 4 and gfx950) or (heads == 64 and queries == 1)
    if heads == FOLDED_HEADS or (both == "float8" and of_float8):
        return -(-packed // _LARGE)
    if both == "bfloat16" and gfx950 and heads != 48 and (packed >= _LARGE or heads > _SMALL):
        return queries if 2 * heads > _LARGE else -(-packed // _LARGE)
    return -(-packed // FOLDED_HEADS)


def reserved(inputs: Inputs) -> Sizes:
    """Lengths of the buffers.

    Raises ValueError where requests of `queries` rows have more tiles than those of `capacity_queries` rows are given:
    the library's bound does not grow with the rows, and such plans do not fit.
    """
    each = reserved_tiles(inputs)
    needed = folds(inputs) * tiles_of_request(inputs, inputs.queries)
    if needed > each:
        raise ValueError(
            f"queries={inputs.queries}: {needed} tiles a request, should be {each} or fewer, as reserved for "
            f"{inputs.capacity_queries} query rows"
        )
    requests, workers = inputs.capacity_requests, inputs.compute_units
    count = requests * each
    parts = min(requests + workers - 1, 2 * (workers - 1)) * each
    if inputs.split_cap is not None:
        parts = max(parts, count + min(workers, inputs.split_cap * requests))
    return Sizes(workers + 1, (requests + workers - 1) * each, count + 1, count, parts)
