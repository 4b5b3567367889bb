"""By which table of angles are writers asked to rotate a row before they store it?"""

import torch

from cases.draw import Draw
from cases.rotation import Turns, draw_whole_table

ROTARY = 64

# A table's length is a multiple of this, and so of every number of tokens that share a record.
_TABLE_STEP = 128


def draw_angles(draw: Draw, turns: Turns, tokens: int) -> torch.Tensor:
    """float32 [length, 64]: a whole number of groups of 1, 2, 4 and 128 positions, more of them than there are tokens."""
    length = -(-(tokens + 2 * _TABLE_STEP) // _TABLE_STEP) * _TABLE_STEP
    return draw_whole_table(draw, turns, ROTARY, length)
