"""What do we ask of the plan that groups the prefill requests of a step into chunks?

A layer gathers the keys of a chunk's requests into one bfloat16 workspace before it attends over them. See
`oracle.sparse_mla.prefill_chunks` for the plan.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int, Int64

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded_copy

Integer = Literal["int32", "int64"]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The step's prefill requests in order, and what the layer reserved for them.

    seq_lens, query_lens: tokens of a request in all, and of those the ones that this step computes. ratio: tokens per
    record of the compressed cache. has_compressed: whether the layer gathers compressed records at all; None leaves
    that to the ratio, more than 1 meaning yes. chunk_size requests of the greatest length that max_len tokens, the
    window and max_batched tokens of a step allow are what the workspace was reserved for.
    """

    seq_lens: Int[torch.Tensor, " requests"]
    query_lens: Int[torch.Tensor, " requests"]
    ratio: int
    has_compressed: bool | None
    chunk_size: int
    window: int
    max_len: int
    max_batched: int

    @property
    def gathers_compressed(self) -> bool:
        """Whether compressed records are gathered."""
        return self.ratio > 1 if self.has_compressed is None else self.has_compressed


@dataclasses.dataclass(frozen=True)
class Outputs:
    """A row per chunk: first request, the one behind the last, compressed rows and all rows reserved per request."""

    chunks: Int64[torch.Tensor, "chunks 4"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunksCase(Case):
    """The axes of the plan.

    requests: prefill requests of the step. compressed: what the caller says of a compressed cache, `default` nothing.
    lengths: `short` a few tokens, `ragged` anything the limits allow, `full` all at the limits, `alternating` long and
    short in turn, `crossed` long contexts and long queries in turn, `edges` runs whose area meets the reserved one
    exactly or misses it by little, `oversized` some beyond the limits, `dummy` some with more new tokens than they have
    in all, as a dummy step has them, and some without tokens.
    """

    op: ClassVar[str] = "sparse_mla.prefill_chunks"

    requests: int = 17
    ratio: int = 4
    compressed: Literal["default", "yes", "no"] = "default"
    chunk_size: int = 4
    window: int = 128
    max_len: int = 8192
    max_batched: int = 512
    lengths: Literal["short", "ragged", "full", "alternating", "crossed", "edges", "oversized", "dummy"] = "ragged"
    integers: Literal["int32", "int64"] = "int32"


CASE = ChunksCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 2, 5, 17, 64),
    "ratio": (0, 1, 2, 4, 128),
    "compressed": ("default", "yes", "no"),
    "chunk_size": (1, 3, 4),
    "window": (1, 8, 128),
    "max_len": (1, 1000, 8191, 1 << 20),
    "max_batched": (16, 513, 8192),
    "lengths": ("short", "ragged", "full", "alternating", "crossed", "edges", "oversized", "dummy"),
    "integers": ("int32", "int64"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"requests": (0, 1, 2, 5, 17, 64, 257)}
RANDOM_CASES = 40

_BASE = ChunksCase()
REGRESSIONS: tuple[str, ...] = (
    # What is reserved is met exactly or missed by little.
    _BASE.varied(requests=64, lengths="edges").id,
    _BASE.varied(requests=64, lengths="edges", ratio=128, max_len=8191).id,
    _BASE.varied(requests=64, lengths="edges", ratio=0, compressed="no").id,
    # A compressed cache of ratio 1 exists only where the caller says so.
    _BASE.varied(requests=64, lengths="crossed", ratio=1, compressed="yes").id,
    _BASE.varied(requests=64, lengths="crossed", ratio=1).id,
    # One request after the other that fits nowhere.
    _BASE.varied(requests=5, lengths="oversized", window=1).id,
    # Prefixes shorter than the window.
    _BASE.varied(requests=64, lengths="short", max_len=1000, max_batched=16).id,
    _BASE.varied(requests=64, lengths="dummy", max_len=1000, max_batched=16, window=8).id,
)

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (0, 1 << 16), "ratio": (0, 1 << 16), "chunk_size": (1, 1024), "window": (1, 1 << 16),
    "max_len": (1, 1 << 24), "max_batched": (1, 1 << 20),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, ChunksCase)
    reasons = outside(case, _BOUNDS)
    if case.compressed == "yes" and case.ratio == 0:
        reasons.append("ratio=0: a layer with a compressed cache has a ratio of 1 or more")
    return reasons


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, ChunksCase)
    return case.requests > 4096


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, ChunksCase)
    has_compressed = {"default": None, "yes": True, "no": False}[case.compressed]
    empty = torch.empty(0, dtype=torch.int64)
    inputs = Inputs(
        empty, empty, case.ratio, has_compressed, case.chunk_size, case.window, case.max_len, case.max_batched
    )
    seq, query = _lengths(case, inputs, Draw(case.seed, case.op))
    dtype = torch.int32 if case.integers == "int32" else torch.int64
    return dataclasses.replace(inputs, seq_lens=guarded_copy(seq.to(dtype)), query_lens=guarded_copy(query.to(dtype)))


def _lengths(case: ChunksCase, inputs: Inputs, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in all and new tokens of every request."""
    count, longest, most = case.requests, case.max_len, min(case.max_batched, case.max_len)
    odd = torch.arange(count) % 2 == 1
    prefix = draw.integers("prefix", (count,), 0, longest + 1)
    query = draw.integers("query", (count,), 1, most + 1)
    if case.lengths == "short":
        prefix, query = prefix % (2 * case.window), query % 16 + 1
    elif case.lengths == "full":
        prefix, query = torch.full((count,), longest), torch.full((count,), most)
    elif case.lengths == "alternating":
        prefix, query = torch.where(odd, longest, prefix % 8), torch.where(odd, most, query % 4 + 1)
    elif case.lengths == "crossed":
        prefix, query = torch.where(odd, longest, 0), torch.where(odd, 1, most)
    elif case.lengths == "edges":
        return _edges(inputs, count, draw)
    elif case.lengths == "oversized":
        prefix = torch.where(draw.chance("beyond", (count,), 1, 2), 3 * longest + prefix, prefix)
        query = torch.where(draw.chance("more", (count,), 1, 2), 3 * case.max_batched + query, query)
        return prefix + query, query
    elif case.lengths == "dummy":
        kind = draw.integers("kind", (count,), 0, 3)
        seq = torch.where(kind == 0, query // 2, torch.where(kind == 1, 0, query))
        return seq, torch.where(kind == 1, 0, query)
    prefix = torch.minimum(prefix, longest - query).clamp(min=0)
    return prefix + query, query


def _edges(inputs: Inputs, count: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of equal requests of which some number fills the reserved area, or one row per request more or less."""
    compressed = -(-inputs.max_len // inputs.ratio) if inputs.gathers_compressed else 0
    area = inputs.chunk_size * (compressed + inputs.window + inputs.max_batched)
    run = draw.integers("run", (count,), 2, 12)
    run = run[torch.arange(count) // 11 * 11] if count else run
    width = area // run + draw.integers("beside", (count,), -1, 2)
    if not inputs.gathers_compressed:
        # All rows are gathered from the window: new tokens, and as much of the prefix as it shows.
        query = (width - inputs.window + 1).clamp(min=1)
        return query + inputs.window - 1 + draw.integers("prefix", (count,), 0, 9), query
    gathered = torch.maximum(width // 3, torch.tensor(inputs.window))
    query = gathered - inputs.window + 1
    records = width - gathered
    within = draw.integers("within", (count,), 0, inputs.ratio)
    return torch.maximum(records * inputs.ratio + within, query + inputs.window - 1), query
