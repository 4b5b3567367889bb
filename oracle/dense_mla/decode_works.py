"""Which works does the reference plan deal out, and how does a plan stand in its buffers?

Blocks of `granularity` keys are dealt out in order: with n_b keys in k_b = ceil(n_b / granularity) blocks, T_b tiles and an
overhead of 16 blocks a tile, each worker takes up to

    share = ceil(sum_b T_b (k_b + 16) / budget) + 16

blocks, a tile's overhead included, and finishes a tile when what would be left is shorter than the longest request's rows.

Source: AITER's planner of version 1.2.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from cases.dense_mla.decode_plan import Inputs, Outputs
from cases.memory import INTEGER_POISON
from oracle.dense_mla.decode_tiles import Sizes, Tile, reserved, split_budget, tiles

OVERHEAD = 16
UNDEFINED = int.from_bytes(bytes([INTEGER_POISON] * 4), "little")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A work: a tile (by its place in the batch), the worker that does it, and its keys."""

    tile: int
    worker: int
    first_key: int
    last_key: int


def planned(inputs: Inputs) -> Outputs:
    """The reference plan."""
    batch = tiles(inputs)
    return written(inputs, batch, dealt(inputs, batch))


def dealt(inputs: Inputs, batch: Sequence[Tile], costed: Sequence[Tile] | None = None) -> list[Piece]:
    """The works of the reference plan in order.

    costed: the tiles that the worker's share is computed from; a planner that computes it from others can run out of
    workers, and leaves the last tiles without work.
    """

    def blocks(tile: Tile) -> int:
        return -(-(tile.last_key - tile.first_key) // inputs.granularity)

    total = sum(blocks(tile) + OVERHEAD for tile in (batch if costed is None else costed))
    share = -(-total // split_budget(inputs)) + OVERHEAD
    worker, left = 0, share
    found: list[Piece] = []
    for place, tile in enumerate(batch):
        done, finished = 0, False
        while not finished:
            open_blocks = blocks(tile) - done
            start = tile.first_key + inputs.granularity * done
            finished = open_blocks + OVERHEAD <= left
            if not finished and left > OVERHEAD:
                end = min(start + inputs.granularity * (left - OVERHEAD), tile.taken)
                finished = tile.last_key - end < inputs.queries
                if not finished:
                    found.append(Piece(place, worker, start, end))
                    done += left - OVERHEAD
            if finished:
                found.append(Piece(place, worker, start, tile.taken))
                left -= open_blocks + OVERHEAD
            else:
                worker, left = worker + 1, share
                if worker == inputs.compute_units:
                    return found
    return found


def written(inputs: Inputs, batch: Sequence[Tile], pieces: Sequence[Piece], undefined: int = UNDEFINED) -> Outputs:
    """The buffers that hold these works, which are ordered by worker and, of a tile, by first key."""
    sizes = reserved(inputs)
    buffers = blank(sizes, undefined)
    counts = [0] * len(batch)
    for piece in pieces:
        counts[piece.tile] += 1
    scratch: list[list[int]] = [[] for _ in batch]
    row = 0
    for number, piece in enumerate(pieces):
        tile = batch[piece.tile]
        place = -1
        if counts[piece.tile] > 1:
            place, row = row, row + tile.rows
            scratch[piece.tile].append(place)
        buffers.works[number, :7] = torch.tensor(
            [tile.request, place, tile.first_row, tile.last_row, piece.first_key, piece.last_key,
             tile.last_key - piece.last_key],
            dtype=torch.int32,
        )  # fmt: skip
    workers = torch.tensor([piece.worker for piece in pieces], dtype=torch.int64)
    buffers.work_start[:] = torch.searchsorted(workers, torch.arange(sizes.work_start))
    starts = list(itertools.accumulate((len(rows) for rows in scratch), initial=0))
    buffers.group_start[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    buffers.group_start[len(starts) :] = starts[-1]
    for number, (tile, rows) in enumerate(zip(batch, scratch, strict=True)):
        if rows:
            buffers.groups[number] = torch.tensor([tile.first_row, tile.last_row], dtype=torch.int32)
    flat = [row for rows in scratch for row in rows]
    buffers.parts[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
    return buffers


def blank(sizes: Sizes, undefined: int = UNDEFINED) -> Outputs:
    """Buffers of a plan that nobody filled."""
    shapes = ((sizes.work_start,), (sizes.works, 8), (sizes.group_start,), (sizes.groups, 2), (sizes.parts,))
    return Outputs(*(torch.full(shape, undefined, dtype=torch.int32) for shape in shapes))
