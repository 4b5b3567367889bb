"""What does a decode batch look like to those who build its tables?

Captured graphs run at the numbers of requests and tokens that they were captured with. A smaller batch is padded: its
last requests are dummies without tokens of their own, and its query buffer is filled up.
"""

import dataclasses
from typing import Literal

import torch
from jaxtyping import Int32

from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.sparse_mla.paging import INT32_MAX

Kind = Literal[
    "uniform", "padded", "all_dummies", "ragged", "hole", "short", "longer", "uneven", "unpadded", "stretched"
]
Dummies = Literal["few", "most"]
Lengths = Literal["ragged", "edges", "short", "long"]
Layout = Literal["contiguous", "strided"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The requests of a batch.

    query_lens: query tokens of every request, known to the host. query_start: where they begin, and where the last one's
    end, on the device. seq_lens: tokens of every request that this rank's cache holds. global_lens: tokens that the
    caches of all ranks hold. tokens: rows of the query buffer.
    """

    query_lens: tuple[int, ...]
    query_start: Int32[torch.Tensor, " starts"]
    seq_lens: Int32[torch.Tensor, " requests"]
    global_lens: Int32[torch.Tensor, " requests"]
    tokens: int


def query_lengths(kind: Kind, requests: int, query: int, dummies: Dummies, draw: Draw) -> tuple[list[int], int]:
    """Query tokens of every request, and rows of the query buffer.

    `uniform`: `query` each. `padded`: so for the first ones, none for the others, and rows as if all had them.
    `all_dummies`: the same without the first ones. `ragged`: any number up to `query`. The others look like padded ones,
    but a request with tokens follows one without (`hole`), one has fewer tokens (`short`), all have one more (`longer`),
    the rows do not divide (`uneven`), there are no more rows than tokens (`unpadded`), no request is without tokens
    (`stretched`).
    """
    live = max(1, requests // 4) if dummies == "most" else requests - 1
    lens = [query] * live + [0] * (requests - live)
    tokens = requests * query
    if kind in ("uniform", "stretched"):
        return [query] * requests, tokens + (requests if kind == "stretched" else 0)
    if kind == "all_dummies":
        return [0] * requests, tokens
    if kind == "ragged":
        lens = [query, *draw.integers("query", (max(0, requests - 1),), 1, query + 1).tolist()][:requests]
        return lens, sum(lens)
    if kind == "hole":
        return (lens[::-1] if live * 2 < requests else [query, 0, *lens[2:-1], query][-requests:]), tokens
    if kind == "short":
        lens[live - 1] -= 1
    if kind == "longer":
        lens = [query + 1 if one else 0 for one in lens]
    if kind == "uneven":
        tokens += 1
    return lens, sum(lens) if kind == "unpadded" else tokens


def draw_batch(
    draw: Draw,
    lens: list[int],
    tokens: int,
    lengths: Lengths,
    world: int,
    rank: int,
    layout: Layout,
    limit: int = INT32_MAX,
) -> Batch:
    """A batch with these query lengths; requests without tokens have lengths that an earlier batch left behind.

    No request has more than `limit` keys on all ranks together.
    """
    count = len(lens)
    longest = max(lens, default=1)
    most = {"ragged": 5000, "edges": 0, "short": world * (longest + 2), "long": INT32_MAX // max(1, count) - 64}[
        lengths
    ]
    if lengths == "edges":
        ends = torch.tensor([
            0, 1, longest - 1, longest, longest + 1, world - 1, world, world + 1, 127, 128, 129, 2047, 2048, 2049
        ])  # fmt: skip
        whole = ends[draw.integers("edges", (count,), 0, len(ends))].clamp(min=0)
    else:
        whole = draw.integers("lengths", (count,), 0, min(most, limit) + 1)
    whole = torch.where(torch.tensor(lens, dtype=torch.int64) > 0, whole, draw.integers("stale", (count,), 0, 40))
    whole = whole.clamp(max=limit)
    local = (whole + world - 1 - rank) // world
    starts = torch.tensor([0, *lens]).cumsum(0)
    return Batch(
        query_lens=tuple(lens),
        query_start=_laid_out(starts, layout),
        seq_lens=_laid_out(local, layout),
        global_lens=_laid_out(whole, layout),
        tokens=tokens,
    )


def _laid_out(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    # One element has no stride that could be got wrong.
    if layout == "contiguous" or values.numel() < 2:
        return guarded_copy(values.to(torch.int32))
    column = guarded((values.numel(), 3), torch.int32)[:, 1]
    column.copy_(values)
    return column
