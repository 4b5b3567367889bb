"""How does a list of rows of different lengths lie in one flat list, and when is such a list right?

    row t = flat[indptr[t] : indptr[t+1]],  indptr[0] = 0

`flat` has room for all rows at full width. Its capacity is part of the answer, since readers take average lengths from
it, but what stands behind indptr[-1] is not.
"""

import itertools
from collections.abc import Sequence

import torch

from cases.memory import INTEGER_POISON
from oracle.check import Check, exact

# What memory that nobody has written holds, as int32.
UNWRITTEN = int.from_bytes([INTEGER_POISON] * 4, "little")
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def joined(rows: Sequence[torch.Tensor], capacity: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` one behind the other in int32 [capacity], and int32 [len(rows) + 1] where each begins.

    Behind the last row stands `UNWRITTEN`. Raises ValueError for an entry that int32 cannot hold.
    """
    flat = torch.full((capacity,), UNWRITTEN, dtype=torch.int32, device=device)
    starts = [0]
    for row in rows:
        wide = row[(row > INT32_MAX) | (row < INT32_MIN)]
        if wide.numel():
            raise ValueError(f"index={int(wide[0])}: should fit into int32")
        flat[starts[-1] : starts[-1] + row.numel()] = row.to(torch.int32)
        starts.append(starts[-1] + row.numel())
    return flat, torch.tensor(starts, dtype=torch.int32, device=device)


def split(flat: torch.Tensor, indptr: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a ragged list."""
    bounds = indptr.tolist()
    return [flat[start:end] for start, end in itertools.pairwise(bounds)]


def used(flat: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """What means something of `flat`."""
    return flat[: int(indptr[-1])]


def with_tail(flat: torch.Tensor, indptr: torch.Tensor, fill: int) -> torch.Tensor:
    """`flat` with other content where it means nothing."""
    other = torch.full_like(flat, fill)
    other[: int(indptr[-1])] = used(flat, indptr)
    return other


def checks(
    got: tuple[torch.Tensor | None, torch.Tensor | None], want: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Check, ...]:
    """The two checks of a ragged list, `flat` and `indptr`: all of indptr, and of flat what is used, bit for bit."""
    flat, indptr = want
    meaning = torch.arange(flat.numel(), device=flat.device) < indptr[-1]
    return (
        exact("indptr", got[1], indptr, why="row starts are sums of whole numbers"),
        exact("flat", got[0], flat, mask=meaning, why="entries are taken over, or found through a table, in order"),
    )
