"""Which tokens does every row see, for whoever takes rows one by one, and which pages hold them?"""

from __future__ import annotations

import itertools

import torch

from cases.dense_mla.decode_call import DecodeInputs


def limits(inputs: DecodeInputs) -> torch.Tensor:
    """int32 [rows]: how many of its request's tokens a row sees, the first ones of its list."""
    held = inputs.kv_indptr[1:] - inputs.kv_indptr[:-1]
    token = torch.arange(inputs.qlen, dtype=torch.int32, device=held.device)
    if not inputs.causal:
        return held.repeat_interleave(inputs.qlen)
    if inputs.global_indptr is None:
        seen = held[:, None] - inputs.qlen + 1 + token
    else:
        length = inputs.global_indptr[1:] - inputs.global_indptr[:-1]
        last = length[:, None] - inputs.qlen + token
        seen = (last - inputs.rank).div(inputs.world, rounding_mode="floor") + 1
    return seen.clamp(min=0).minimum(held[:, None]).flatten().to(torch.int32)


def block_table(inputs: DecodeInputs) -> torch.Tensor:
    """int32 [requests, pages]: the pages of every request, in order; what stands behind them is 0.

    Raises ValueError for a list that no table of pages of the cache's size could have given.
    """
    page = inputs.cache.shape[1]
    offsets = inputs.kv_indptr.tolist()
    lists = [inputs.slots[low:high] for low, high in itertools.pairwise(offsets)]
    width = max([1, *(-(-len(slots) // page) for slots in lists)])
    table = torch.zeros((len(lists), width), dtype=torch.int32, device=inputs.slots.device)
    for b, slots in enumerate(lists):
        pages = slots[::page] // page
        place = torch.arange(len(slots), device=slots.device)
        if not bool((slots == pages.long()[place // page] * page + place % page).all()):
            raise ValueError(f"slots of request {b}: should follow each other within pages of {page} tokens")
        table[b, : len(pages)] = pages
    return table
