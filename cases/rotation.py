"""By which angles do we ask rows to be turned: tables of cosines and sines, positions in them, and what is unread?"""

from typing import Literal

import numpy as np
import torch

from cases.draw import Draw

Turns = Literal["spread", "quarter", "small"]

# Rows of a table, where nothing else decides it.
POSITIONS = 37


def draw_positions(draw: Draw, count: int, integer: torch.dtype, length: int = POSITIONS) -> torch.Tensor:
    """`count` rows of a table of `length`, position 0 and the last among them where there is room."""
    positions = draw.integers("positions", (count,), 0, length)
    if count > 1:
        positions[-1] = length - 1
    if count > 2:
        positions[1] = 0
    return positions.to(integer)


def draw_whole_table(draw: Draw, turns: Turns, rotary: int, length: int) -> torch.Tensor:
    """float32 [length, rotary]: of each row the cosines of rotary / 2 pairs, then their sines.

    Rational points of the circle, so no transcendental is needed; position 0 is the identity. `quarter`: quarter turns,
    exact in any precision. `small`: angles below 2^-9.
    """
    shape = (length, rotary // 2)
    quarter = draw.integers("quarter", shape, 0, 4).numpy()
    if turns == "quarter":
        cos, sin = np.array([1.0, 0.0, -1.0, 0.0])[quarter], np.array([0.0, 1.0, 0.0, -1.0])[quarter]
    else:
        tangent = draw.integers("tangent", shape, 0, 1 << 20).numpy() / float(1 << 20)
        if turns == "small":
            tangent = tangent / 1024.0
            quarter = np.zeros_like(quarter)
        square = tangent * tangent
        cos, sin = (1 - square) / (1 + square), 2 * tangent / (1 + square)
        cos, sin = np.choose(quarter, [cos, -sin, -cos, sin]), np.choose(quarter, [sin, cos, -sin, -cos])
    cos[0], sin[0] = 1.0, 0.0
    return torch.from_numpy(np.concatenate([cos, sin], axis=1).astype(np.float32))


def draw_table(draw: Draw, turns: Turns, rotary: int, positions: torch.Tensor) -> torch.Tensor:
    """A table of POSITIONS rows in which those that no position names are NaN."""
    table = draw_whole_table(draw, turns, rotary, POSITIONS)
    unread = torch.ones(POSITIONS, dtype=torch.bool)
    unread[positions.long()] = False
    table[unread] = float("nan")
    return table
