"""Where do the keys of a batch of requests lie, and which of their positions do rows of top-k indices name?

A request's keys have positions 0, 1, ... of their own. Position v lies in block table[request, v // block_size], at
place v % block_size.
"""

from typing import Literal

import torch

from cases.draw import Draw

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)

Kind = Literal["prefix", "holes", "first_hole", "full", "empty"]


def block_tables(
    draw: Draw, requests: int, columns: int, block_size: int, high: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [requests, columns] block numbers, no two alike, and int64 [requests] how many columns each request has.

    Behind a request's columns stand numbers of no block. With `high`, the last slots are the last that int32 holds.
    """
    used = draw.integers("used", (requests,), 1, columns + 1)
    used[:1] = columns
    blocks = requests * columns + 3
    numbers = draw.permutation("blocks", blocks)
    if high:
        numbers = numbers + (2**31 // block_size - blocks)
    garbage = torch.tensor([-1, INT32_MAX, INT32_MIN])[draw.integers("garbage", (requests, columns), 0, 3)]
    table = numbers[: requests * columns].reshape(requests, columns)
    return torch.where(torch.arange(columns) < used[:, None], table, garbage), used


def position_rows(draw: Draw, width: int, limits: torch.Tensor, kind: Kind) -> torch.Tensor:
    """int64 [rows, width]: positions of row t from 0 to limits[t] - 1, and negative numbers where there is none.

    `prefix`: some valid ones, then none; `holes`: every third is none; `first_hole`: the first and two more are none;
    `full` and `empty`: all and none. A row of limit 0 has none.
    """
    shape = (limits.numel(), width)
    positions = draw.integers("positions", shape, 0, 1 << 31) % limits.clamp(min=1)[:, None]
    # The first and the last position are where tests for validity go wrong.
    ends = draw.integers("ends", shape, 0, 8)
    positions = torch.where(ends == 0, 0, torch.where(ends == 1, (limits - 1)[:, None], positions))
    column = torch.arange(width)
    there = torch.ones(shape, dtype=torch.bool)
    if kind == "prefix":
        there = column < draw.integers("counts", (limits.numel(), 1), 0, width + 1)
    elif kind == "holes":
        there = ~draw.chance("holes", shape, 1, 3)
    elif kind == "first_hole":
        there = ~draw.chance("holes", shape, 2, max(width, 2)) & (column > 0)
    elif kind == "empty":
        there = torch.zeros(shape, dtype=torch.bool)
    there = there & (limits > 0)[:, None]
    nothing = torch.tensor([-1, -1, -1, -2, INT32_MIN])[draw.integers("nothing", shape, 0, 5)]
    return torch.where(there, positions, nothing)


def garbage_rows(draw: Draw, rows: int, width: int) -> torch.Tensor:
    """int64 [rows, width] of what stands where nobody looks: positions of no key, valid-looking ones and none."""
    return torch.tensor([INT32_MAX, 1 << 20, 0, 1, 2, -1])[draw.integers("garbage rows", (rows, width), 0, 6)]


def stray_requests(draw: Draw, count: int, requests: int) -> torch.Tensor:
    """int64 [count] numbers that no request of the batch has."""
    return torch.tensor([requests, INT32_MAX, -1, INT32_MIN])[draw.integers("stray", (count,), 0, 4)]
