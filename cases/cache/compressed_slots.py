"""What do we ask of the map from tokens to the slots of their compressed records?

Several tokens share a record; the last of each group writes it, into the slot that the block table names. See
`oracle.cache.compressed_slots` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Int64

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

RATIOS = (1, 2, 4, 128)
INT32_MAX = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: request r has the tokens query_start[r] to query_start[r + 1], the last of them at seq_lens[r] - 1.

    `tokens` entries are asked for; those behind the last request's belong to nobody. `token_slots` are the tokens' own
    slots, -1 where a token's key is not to be written, otherwise not negative. A row of `table` names the blocks of a
    request, `block_size` records each. `out`, where given, holds the answer in its first entries and -1 in all others.
    Of `ranks` ranks that take turns of `interleave` tokens, this one's records are asked for: other tokens have slot -1,
    and `table` numbers this rank's records alone.
    """

    tokens: int
    token_slots: Int64[torch.Tensor, " tokens"]
    query_start: Int32[torch.Tensor, " bounds"]
    seq_lens: Int32[torch.Tensor, " requests"]
    table: Int32[torch.Tensor, "requests columns"]
    block_size: int
    ratio: int
    out: Int64[torch.Tensor, " capacity"] | None
    ranks: int
    interleave: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The whole buffer after the call, or where none was given the new tensor of `tokens` entries."""

    slots: Int64[torch.Tensor, " entries"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotsCase(Case):
    """The axes of the slot map.

    requests: how many. queries: tokens a request, `one`, `few` (0 to 9), `long` (one request beyond 1024, others few).
    context: tokens before them, `none`, `some`, `edge` (the last token stands at the end of a block, or one off).
    ratio: tokens a record. block_size: records a block. skipped: which tokens have slot -1. warmup: the first request
    has tokens but no length, and no slots. padding_tokens: tokens behind the last request's. buffer: `longer` has more
    entries than there are tokens. table_layout: `strided` is a view into a wider table. blocks: `high` numbers up to the
    largest of int32. ranks: how many share the records. turns: groups of tokens that a rank takes in turn.
    """

    op: ClassVar[str] = "cache.compressed_slots"

    requests: int = 3
    queries: Literal["one", "few", "long"] = "few"
    context: Literal["none", "some", "edge"] = "some"
    ratio: int = 2
    block_size: int = 32
    skipped: Literal["none", "some", "all"] = "none"
    warmup: bool = False
    padding_tokens: int = 0
    buffer: Literal["absent", "exact", "longer"] = "absent"
    table_layout: Literal["contiguous", "strided"] = "contiguous"
    blocks: Literal["low", "high"] = "low"
    ranks: int = 1
    turns: int = 1


CASE = SlotsCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 3, 17),
    "queries": ("one", "few", "long"),
    "context": ("none", "some", "edge"),
    "ratio": RATIOS,
    "block_size": (1, 2, 32, 64),
    "skipped": ("none", "some", "all"),
    "warmup": (False, True),
    "padding_tokens": (0, 3),
    "buffer": ("absent", "exact", "longer"),
    "table_layout": ("contiguous", "strided"),
    "blocks": ("low", "high"),
    "ranks": (1, 2, 3),
    "turns": (1, 8),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"requests": (0, 1, 3, 17, 130), "block_size": (1, 2, 5, 32, 64, 128, 256)}

RANDOM_CASES = 30

_BASE = SlotsCase(requests=17, buffer="longer")

REGRESSIONS: tuple[str, ...] = (
    _BASE.varied(queries="long", ratio=4, context="none").id,
    _BASE.varied(blocks="high", block_size=64).id,
    _BASE.varied(warmup=True, ratio=1, padding_tokens=3).id,
    _BASE.varied(skipped="some", context="edge").id,
    _BASE.varied(ranks=3, turns=8, queries="long").id,
    _BASE.varied(table_layout="strided", buffer="absent", block_size=1).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(requests=256, queries="one", ratio=4, block_size=64)),
    Served(CASE(requests=16, queries="long", ratio=4, block_size=64)),
    Served(CASE(requests=256, queries="one", ratio=128, block_size=2)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (0, 4096), "block_size": (1, 4096), "padding_tokens": (0, 4096), "ranks": (1, 64), "turns": (1, 4096),
}  # fmt: skip


def forbid(case: SlotsCase) -> list[str]:
    """Every reason why this is no question: without requests there is nothing to choose, without ranks no turns."""
    reasons = outside(case, _BOUNDS)
    if case.ratio not in RATIOS:
        reasons.append(f"ratio={case.ratio}: should be 1, 2, 4 or 128")
    if case.requests == 0:
        if case.queries != "few" or case.context != "some" or case.skipped != "none" or case.warmup:
            reasons.append("requests=0: queries, context, skipped and warmup say nothing")
        if case.blocks != "low" or case.ranks != 1:
            reasons.append("requests=0: blocks and ranks say nothing")
    if case.ranks == 1 and case.turns != 1:
        reasons.append(f"turns={case.turns}: a single rank takes no turns")
    if case.skipped == "all" and (case.blocks != "low" or case.ranks != 1 or case.context != "some"):
        reasons.append("skipped=all: blocks, ranks and context say nothing")
    return reasons


def heavy(case: SlotsCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.requests > 100


def build(case: SlotsCase) -> Inputs:
    """The inputs of a case: entries of the table that no record needs are garbage, and the buffer is poisoned."""
    draw = Draw(case.seed, case.op)
    lengths, befores = _lengths(case, draw)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    used = int(starts[-1])
    tokens = used + case.padding_tokens
    request = torch.repeat_interleave(torch.arange(case.requests), lengths)
    position = befores[request] + torch.arange(used) - starts[request]
    interleave = case.ratio * case.turns

    slots = draw.integers("slot", (tokens,), 0, 1 << 20)
    if case.skipped != "none":
        gone = draw.chance("skipped", (tokens,), 1, 3)
        slots[gone | (case.skipped == "all")] = -1
    # The ranks take turns; tokens of the others are not this one's to write.
    own = position // interleave % case.ranks == int(draw.integers("rank", (1,), 0, case.ranks))
    slots[:used][~own | (position < 0)] = -1

    record = (position // (interleave * case.ranks) * interleave + position % interleave) // case.ratio
    columns = int((record // case.block_size).max()) + 3 if used else 3
    table = guarded((case.requests, columns), torch.int32, gaps=(5,) if case.table_layout == "strided" else ())
    table.copy_(_blocks(case, draw, columns))
    out = None if case.buffer == "absent" else guarded((tokens + 4 * (case.buffer == "longer"),), torch.int64)
    needed = torch.zeros(table.shape, dtype=torch.bool)
    writes = (slots[:used] >= 0) & ((position + 1) % case.ratio == 0)
    needed[request[writes], record[writes] // case.block_size] = True
    garbage = torch.tensor([-1, -(1 << 31), INT32_MAX, -7], dtype=torch.int32)
    stray = garbage[draw.integers("stray", table.shape, 0, garbage.numel())]
    table.copy_(torch.where(needed, table, stray))
    return Inputs(
        tokens=tokens,
        token_slots=guarded_copy(slots),
        query_start=guarded_copy(starts.to(torch.int32)),
        seq_lens=guarded_copy((befores + lengths).to(torch.int32)),
        table=table,
        block_size=case.block_size,
        ratio=case.ratio,
        out=out,
        ranks=case.ranks,
        interleave=interleave,
    )


def _lengths(case: SlotsCase, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens each request has, and how many stand before them (negative: warm-up)."""
    count = case.requests
    if case.queries == "one":
        lengths = torch.ones(count, dtype=torch.int64)
    else:
        lengths = draw.integers("length", (count,), 0, 10)
        if case.queries == "long":
            lengths[count // 2] = 1024 + int(draw.integers("long", (1,), 1, 200))
    if case.context == "none":
        befores = torch.zeros(count, dtype=torch.int64)
    elif case.context == "some":
        befores = draw.integers("before", (count,), 0, 700)
    else:
        block = case.ratio * case.block_size
        ends = (lengths + 1 + block) // block * block + draw.integers("off", (count,), -1, 2)
        befores = ends - lengths
    if case.warmup:
        lengths[:1] = lengths[:1].clamp(min=4)
        befores[:1] = -lengths[:1]
    return lengths, befores


def _blocks(case: SlotsCase, draw: Draw, columns: int) -> torch.Tensor:
    """Distinct block numbers, so that no two records share a slot."""
    numbers = draw.permutation("blocks", case.requests * columns).view(case.requests, columns)
    return (INT32_MAX - numbers if case.blocks == "high" else numbers).to(torch.int32)
