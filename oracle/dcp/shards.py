"""Which rank holds which token of a sequence, and where does it stand there?

W ranks take turns of I tokens, rank 0 first:

    rank of position p             (p // I) % W
    its index on that rank         (p // (W I)) I + p % I
    position of index j on rank r  (j // I) W I + r I + j % I
    tokens of L on rank r          (L // I // W) I + clip(L - (L // I // W) I W - r I, 0, I)

The last is the number of positions below L that rank r holds. Local order is the order of positions. Source: vLLM's
sharding of the key-value cache for decode context parallelism.
"""

import torch


def check_ranks(ranks: int, rank: int | None, interleave: int) -> None:
    """Raises ValueError for fewer than one rank, a rank that is none of them, and turns of no token."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: should be 1 or more")
    if rank is not None and not 0 <= rank < ranks:
        raise ValueError(f"rank={rank}: should be 0 to {ranks - 1}")
    if interleave < 1:
        raise ValueError(f"interleave={interleave}: should be 1 or more")


def rank_of(position: torch.Tensor, ranks: int, interleave: int) -> torch.Tensor:
    """The rank that holds each position."""
    return position // interleave % ranks


def index_of(position: torch.Tensor, ranks: int, interleave: int) -> torch.Tensor:
    """Where each position stands on the rank that holds it."""
    return position // (ranks * interleave) * interleave + position % interleave


def position_of(index: torch.Tensor, rank: int, ranks: int, interleave: int) -> torch.Tensor:
    """The position of each index on `rank`."""
    return index // interleave * ranks * interleave + rank * interleave + index % interleave


def held(length: torch.Tensor, rank: int | torch.Tensor, ranks: int, interleave: int) -> torch.Tensor:
    """How many of the first `length` positions `rank` holds, int64; lengths and ranks broadcast."""
    length = length.to(torch.int64)
    base = length // interleave // ranks * interleave
    return base + (length - base * ranks - rank * interleave).clamp(0, interleave)


def held_by_all(length: torch.Tensor, ranks: int, interleave: int) -> torch.Tensor:
    """`held` with a last dimension of all ranks."""
    return held(length[..., None], torch.arange(ranks, device=length.device), ranks, interleave)
