"""In which slot of a paged cache does a request's position lie?

slot = table[request, v // B] * B + v % B
"""

import torch

from cases.memory import guarded_copy


def slots(blocks: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """int64 slots of positions (int64, none negative) of one request, whose table row is `blocks`."""
    return blocks.to(torch.int64)[positions // block_size] * block_size + positions % block_size


def nearest_slots(table: torch.Tensor, request: int, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """What a wrong rule finds: numbers outside the table are read at its edges, and slots wrap as int32 does."""
    blocks = table[min(max(request, 0), table.shape[0] - 1)].to(torch.int64)
    column = (positions // block_size).clamp(max=blocks.numel() - 1)
    return wrapped(blocks[column] * block_size + positions % block_size)


def wrapped(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 values, as signed numbers."""
    return values.to(torch.int32).to(torch.int64)


def halved(table: torch.Tensor) -> torch.Tensor:
    """The table of the same cache in blocks of half the size, a view of a wider one: block b becomes 2b and 2b + 1."""
    wide = table.to(torch.int64)
    halves = torch.stack((2 * wide, 2 * wide + 1), dim=-1).flatten(1)
    # A number of no block need not double.
    return guarded_copy(torch.where(halves.abs() < 2**31, halves, -1).to(torch.int32), gaps=(7,))


def without_pitch(table: torch.Tensor) -> torch.Tensor | None:
    """The table read as if its rows lay one behind the other; None where they do."""
    rows, columns = table.shape
    if rows < 2 or table.stride(0) == columns:
        return None
    return table.as_strided((rows, columns), (columns, 1))
