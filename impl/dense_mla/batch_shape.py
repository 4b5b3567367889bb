"""What does the host decide about a decode batch, before any table is built?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class BatchShape(NamedTuple):
    """query: tokens of the longest request. padded: whether every request is padded to them. uniform: what the planner
    is told that every request has, or -1."""

    query: int
    padded: bool
    uniform: int


def shape_of(query_lens: Sequence[int], tokens: int) -> BatchShape:
    """The shape of a batch whose query buffer has `tokens` rows.

    It is padded if its requests fall into two parts, of `tokens` / requests tokens each and of none, neither of more
    than the last part being empty: equal tokens are more than one, and at least one request has none.
    """
    count = len(query_lens)
    each = tokens // count if count else 0
    live = sum(length > 0 for length in query_lens)
    if (
        each > 1
        and live < count
        and list(query_lens) == [each] * live + [0] * (count - live)
        and each * count == tokens
    ):
        return BatchShape(each, True, each)
    longest = max(query_lens, default=0)
    return BatchShape(longest, False, longest if all(length == longest for length in query_lens) else -1)


def least_length(kernel_lens: torch.Tensor, query_lens: Sequence[int], padded: bool) -> int:
    """The shortest kernel length of a verify batch, of requests with tokens only if it is padded; 1 if there is none."""
    live = [place for place, length in enumerate(query_lens) if length > 0 or not padded]
    return int(kernel_lens[live].min()) if live else 1
