"""How is AITER's sparse MLA forward called, and how its generic Triton kernel, which reads plain rows?"""

from __future__ import annotations

import torch

from cases.sparse_mla.decode import LANES, NOPE, SCALE_BYTES, TOKEN_BYTES, Segment
from cases.sparse_mla.two_segment_forward import Inputs, Outputs
from impl.sources import aiter, settings
from impl.sources.execution import execution_on
from impl.sparse_mla.two_segment_forward import AITER_FORWARD, AITER_SPARSE, aiter_forward


def packed(inputs: Inputs) -> Outputs:
    """The answer of the function that reads both packed caches in place, as vLLM calls it; it raises what it raises."""
    path = settings.aiter_path()
    found = aiter_forward(path)
    assert found is not None
    execution = execution_on(inputs.query.device)
    loader = aiter.load(aiter.locate(path), aiter.Platform("gfx950", inputs.compute_units), execution)
    function = loader.symbol(*found)
    main, extra = inputs.main, inputs.extra
    splits = inputs.splits or None
    second = (None, None, None) if extra is None else (extra.cache, extra.indices, extra.indptr)
    if found == AITER_FORWARD:
        function(
            inputs.query, main.cache, main.indptr, main.indices, inputs.scale, kv_splits=splits, has_invalid=True,
            out=inputs.out, attn_sink=inputs.sink, extra_kv=second[0], extra_indices=second[1], extra_indptr=second[2],
        )  # fmt: skip
        return Outputs(inputs.out)
    answer = function(
        inputs.query, main.cache, main.indices, main.indptr, inputs.sink, inputs.scale, kv_splits=splits,
        has_invalid=True, extra_cache=second[0], extra_indices=second[1], extra_indptr=second[2],
    )  # fmt: skip
    inputs.out.copy_(answer)
    return Outputs(inputs.out)


def generic(inputs: Inputs) -> Outputs:
    """The answer of the kernel for machines other than gfx950, over the same rows: it raises what it raises.

    It reads one pool of plain bf16 rows by one list a query. Both caches are decoded into such a pool, garbage included,
    the extra one behind the main one, and each query's extra entries follow its main ones.
    """
    # gfx942 is a machine that takes the generic route.
    execution = execution_on(inputs.query.device)
    loader = aiter.load(aiter.locate(settings.aiter_path()), aiter.Platform("gfx942", inputs.compute_units), execution)
    function = loader.symbol(*AITER_SPARSE)
    parts = [part for part in (inputs.main, inputs.extra) if part is not None]
    pool = torch.cat([_rows(part.cache) for part in parts])
    indices, indptr = _one_list(parts, inputs.query.shape[0])
    answer = function(
        inputs.query, pool, indices, indptr, inputs.sink, inputs.scale, kv_splits=inputs.splits or None, has_invalid=True,
    )  # fmt: skip
    inputs.out.copy_(answer)
    return Outputs(inputs.out)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """Every record as bf16 [slots, 512], exact where a writer made it; NaN stays NaN."""
    blocks, block, _ = cache.shape
    page, start = cache.stride(0), int(cache.storage_offset())
    data = cache.as_strided((blocks, block, TOKEN_BYTES), (page, TOKEN_BYTES, 1), start)
    scales = cache.as_strided((blocks, block, SCALE_BYTES - 1), (page, SCALE_BYTES, 1), start + block * TOKEN_BYTES)
    power = torch.ldexp(torch.ones(scales.shape, device=cache.device), scales.int() - 127)
    codes = data[..., :NOPE].contiguous().view(torch.float8_e4m3fn).float().unflatten(2, (-1, 64))
    rotated = data[..., NOPE:].contiguous().view(torch.bfloat16)
    lanes = (codes * power[..., None]).flatten(2).bfloat16()
    return torch.cat([lanes, rotated], 2).view(-1, LANES)


def _one_list(parts: list[Segment], queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both lists of every query, one behind the other, as int32 entries of the common pool and their offsets."""
    first = 0
    lists: list[list[torch.Tensor]] = [[] for _ in range(queries)]
    for part in parts:
        assert part.indices is not None and part.indptr is not None
        bounds = part.indptr.tolist()
        for t in range(queries):
            entries = part.indices[bounds[t] : bounds[t + 1]]
            lists[t].append(torch.where(entries >= 0, entries + first, entries))
        first += part.rows
    rows = [torch.cat(row) for row in lists]
    device = parts[0].cache.device
    offsets = torch.tensor([0, *(len(row) for row in rows)], device=device).cumsum(0)
    flat = torch.cat(rows) if rows else torch.empty(0, device=device)
    return flat.to(torch.int32), offsets.to(torch.int32)
