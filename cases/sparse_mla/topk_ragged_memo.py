"""What do we ask of the memo that spares layers of one index source the rebuilding of ragged top-k lists?

Some layers select keys, and the layers behind them use the selection too. Its ragged form is the same for all that
share what it is built with, so the source keeps it. A case is a script: the layers of a model, run over several steps
whose selections and batches change. See `oracle.sparse_mla.topk_ragged_memo` for what must be used.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

Part = Literal["decode", "prefill"]

# Positions that top-k rows name, and tokens that a sequence may have: compressed by 2 or 4 they no longer reach all.
_POSITIONS = 40
_MAX_MODEL_LEN = 64


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer that uses top-k lists: its number, the number of the layer that selects for it, its compressed cache."""

    number: int
    source: int
    cache: int


@dataclasses.dataclass(frozen=True)
class Cache:
    """A compressed cache: tokens per entry, its blocks, and which of a step's block tables leads into it.

    Caches of the same ratio have the same table.
    """

    ratio: int
    blocks: int
    table: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: what each source publishes, in the order of the sources, and the batch, decode tokens first.

    published: top-k positions of every token. Rows of decode tokens hold theirs in front and -1 behind; rows of prefill
    tokens hold more than exist. token_to_request, valid: per token; the request of a decode token that is not valid is
    any number. query_start, seq_lens: per request, those of the decode tokens first. tables: one for each ratio.
    """

    published: tuple[Int32[torch.Tensor, "tokens topk"], ...]
    token_to_request: Int32[torch.Tensor, " tokens"]
    valid: Bool[torch.Tensor, " tokens"]
    query_start: Int32[torch.Tensor, " starts"]
    seq_lens: Int32[torch.Tensor, " requests"]
    tables: tuple[torch.Tensor, ...]
    decode_tokens: int
    decode_requests: int


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The script: in every step the layers run in their order.

    When a source runs, its selection is written to the first rows of `buffer`, which all sources share; the other rows
    keep what they held. Then each layer asks for the decode tokens' lists, if there are such tokens, and for the
    prefill tokens'. A layer behind a later source asks only for lists that its own source's layers have asked for in
    the step. block_size: of the caches, in tokens; a compressed cache has block_size // ratio entries in a block.
    """

    layers: tuple[Layer, ...]
    caches: tuple[Cache, ...]
    steps: tuple[Step, ...]
    buffer: Int32[torch.Tensor, "rows topk"]
    block_size: int
    max_model_len: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What each layer used each time that it asked, in order, copied before the next one ran.

    lengths: the rows' lengths, which come with the lists of decode tokens; empty for prefill tokens.
    """

    flat: tuple[torch.Tensor, ...]
    indptr: tuple[torch.Tensor, ...]
    lengths: tuple[torch.Tensor, ...]


WRITABLE: tuple[str, ...] = ("buffer",)


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request for lists. publishes: the place among the sources of a layer that selects first, or None."""

    step: int
    layer: int
    part: Part
    publishes: int | None


def sources(inputs: Inputs) -> list[int]:
    """The numbers of the layers that select, in their order."""
    return [layer.number for layer in inputs.layers if layer.source == layer.number]


def asks(inputs: Inputs) -> Iterator[Ask]:
    """The script, one request after the other."""
    selecting = sources(inputs)
    for number, step in enumerate(inputs.steps):
        parts: list[Part] = ["decode"] if step.decode_tokens else []
        if step.decode_tokens < step.valid.numel():
            parts.append("prefill")
        for place, layer in enumerate(inputs.layers):
            publishes = selecting.index(layer.number) if layer.number in selecting else None
            for first, part in enumerate(parts):
                yield Ask(number, place, part, publishes if first == 0 else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoCase(Case):
    """The axes of the script.

    structure: `one_source`; `two_sources` one behind the other; `two_ratios` and `two_caches` layers of one source with
    other caches; `held` layers of the first source that run again behind the second one's. consumers: layers behind
    each source that use its selection with its own cache. phase: tokens of the steps, `decode`, `prefill`, `mixed`
    both, `alternating` decode, prefill, decode and so on. change: what is new in each step, the selection (`topk`), the
    block tables, the sequence lengths, the number of tokens, the `valid` tokens, or all of it. tokens: of each part.
    topk: columns. ratio: of the first cache. padded: tokens that are none. table: `narrowed` is a view of a wider one.
    """

    op: ClassVar[str] = "sparse_mla.topk_ragged_memo"

    structure: Literal["one_source", "two_sources", "two_ratios", "two_caches", "held"] = "one_source"
    consumers: int = 2
    steps: int = 3
    phase: Literal["decode", "prefill", "mixed", "alternating"] = "mixed"
    change: Literal["topk", "tables", "lengths", "tokens", "valid", "all"] = "all"
    requests: int = 2
    tokens: int = 5
    topk: int = 8
    ratio: int = 1
    block_size: int = 8
    padded: Literal["none", "tail", "between", "all"] = "tail"
    table: Literal["exact", "narrowed"] = "exact"


CASE = MemoCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "structure": ("one_source", "two_sources", "two_ratios", "two_caches", "held"),
    "consumers": (0, 1, 2),
    "steps": (1, 2, 4),
    "phase": ("decode", "prefill", "mixed", "alternating"),
    "change": ("topk", "tables", "lengths", "tokens", "valid", "all"),
    "requests": (1, 2, 5),
    "tokens": (1, 5, 20),
    "topk": (1, 8, 33),
    "ratio": (1, 2, 4),
    "block_size": (8, 64),
    "padded": ("none", "tail", "between", "all"),
    "table": ("exact", "narrowed"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"steps": (1, 2, 4, 7), "topk": (1, 8, 33, 512), "block_size": (8, 64, 128)}

RANDOM_CASES = 12

_BASE = MemoCase()

REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(structure="two_sources").id,
    _BASE.varied(structure="two_ratios", phase="decode").id,
    _BASE.varied(structure="two_caches", phase="prefill", tokens=20).id,
    _BASE.varied(structure="held").id,
    _BASE.varied(phase="alternating", steps=4, change="topk").id,
)

PRODUCTION: tuple[Served, ...] = (Served(CASE(steps=1, requests=16, tokens=256, topk=512, ratio=4, block_size=64)),)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "consumers": (0, 64),
    "steps": (1, 64),
    "requests": (1, 1024),
    "tokens": (1, 4096),
    "topk": (1, 4096),
    "ratio": (1, 128),
    "block_size": (1, 4096),
}


def forbid(case: MemoCase) -> list[str]:
    """Every reason why this is no question: blocks that hold no whole number of entries."""
    reasons = outside(case, _BOUNDS)
    # With two ratios, the other cache's is twice the first one's.
    if case.block_size % case.ratio or (case.structure == "two_ratios" and case.block_size % (2 * case.ratio)):
        reasons.append(f"block_size={case.block_size}: should be a multiple of every ratio")
    return reasons


def heavy(case: MemoCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.steps * case.tokens * (case.consumers + 2) > 600


def build(case: MemoCase) -> Inputs:
    """The inputs of a case; the buffer's rows behind the tokens hold positions that are none."""
    draw = Draw(case.seed, case.op)
    ratios = (case.ratio, 2 * case.ratio) if case.structure == "two_ratios" else (case.ratio,)
    entries = [case.block_size // ratio for ratio in ratios]
    columns = [-(-_POSITIONS // size) + 1 for size in entries]
    requests = 2 * case.requests
    caches = [Cache(ratio, requests * columns[table] + 2, table) for table, ratio in enumerate(ratios)]
    if case.structure == "two_caches":
        # Fewer blocks than the table names: what lies beyond is no entry of this cache.
        caches.append(Cache(case.ratio, caches[0].blocks // 2, 0))
    layers = _layers(case)
    selecting = sum(layer.source == layer.number for layer in layers)
    steps = tuple(_step(case, draw, number, selecting, caches, columns) for number in range(case.steps))
    return Inputs(
        layers=layers,
        caches=tuple(caches),
        steps=steps,
        buffer=guarded((2 * case.tokens + 3, case.topk), torch.int32),
        block_size=case.block_size,
        max_model_len=_MAX_MODEL_LEN,
    )


def _layers(case: MemoCase) -> tuple[Layer, ...]:
    """The layers; their numbers leave gaps for layers that select nothing and use nothing."""
    groups = 2 if case.structure in ("two_sources", "held") else 1
    layers = []
    number = 2
    for _ in range(groups):
        source = number
        others = [0] * case.consumers
        if case.structure in ("two_ratios", "two_caches"):
            others += [1, 0, 1]
        for cache in (0, *others):
            layers.append(Layer(number, source, cache))
            number += 2
    if case.structure == "held":
        layers += [Layer(number, 2, 0), Layer(number + 1, layers[-1].source, 0)]
    return tuple(layers)


def _step(case: MemoCase, draw: Draw, number: int, selecting: int, caches: list[Cache], columns: list[int]) -> Step:
    """One step; what the case does not change is drawn as in every step."""

    def of(what: str) -> Draw:
        return draw.within(what).within(str(number) if case.change in (what, "all") else "always")

    tokens = case.tokens
    if case.change in ("tokens", "all"):
        tokens = max(1, case.tokens - 2 * (number % 3))
    phase = case.phase
    if phase == "alternating":
        phase = "prefill" if number % 2 else "decode"
    counts = (tokens if phase != "prefill" else 0, tokens if phase != "decode" else 0)
    total = sum(counts)
    # Tokens are spread over the requests of their part; some may have none.
    owners = [
        part * case.requests + torch.arange(count) * case.requests // max(1, count) for part, count in enumerate(counts)
    ]
    owner = torch.cat(owners)
    queries = torch.bincount(owner, minlength=2 * case.requests)
    seq = queries + of("lengths").integers("before", (2 * case.requests,), 0, _MAX_MODEL_LEN - case.tokens % 32)
    valid = _valid(case, of("valid"), counts)
    garbage = torch.tensor([-1, 2**31 - 1, 7777])[draw.integers("nobody", (total,), 0, 3)]
    decoded = torch.arange(total) < counts[0]
    blocks = [cache.blocks for cache in caches[: len(columns)]]
    return Step(
        published=tuple(
            guarded_copy(_topk(case, of("topk").within(str(source)), decoded).to(torch.int32))
            for source in range(selecting)
        ),
        token_to_request=guarded_copy(torch.where(valid | ~decoded, owner, garbage).to(torch.int32)),
        valid=guarded_copy(valid, fill=1),
        query_start=guarded_copy(torch.nn.functional.pad(torch.cumsum(queries, 0), (1, 0)).to(torch.int32)),
        seq_lens=guarded_copy(seq.to(torch.int32)),
        tables=tuple(
            guarded_copy(
                of("tables").permutation(str(table), count)[: 2 * case.requests * width]
                .reshape(2 * case.requests, width).to(torch.int32),
                gaps=(5,) if case.table == "narrowed" else (),
            )
            for table, (count, width) in enumerate(zip(blocks, columns, strict=True))
        ),
        decode_tokens=counts[0],
        decode_requests=case.requests if counts[0] else 0,
    )  # fmt: skip


def _valid(case: MemoCase, draw: Draw, counts: tuple[int, int]) -> torch.Tensor:
    parts = []
    for part, count in enumerate(counts):
        token = torch.arange(count)
        kinds = {
            "none": token >= 0,
            "tail": token < count - int(draw.integers(f"tail {part}", (1,), 0, 1 + (count + 1) // 2)),
            "between": ~draw.chance(f"between {part}", (count,), 1, 3),
            "all": token < 0,
        }
        parts.append(kinds[case.padded])
    return torch.cat(parts)


def _topk(case: MemoCase, draw: Draw, decoded: torch.Tensor) -> torch.Tensor:
    shape = (decoded.numel(), case.topk)
    positions = draw.integers("positions", shape, 0, _POSITIONS)
    column = torch.arange(case.topk)
    found = draw.integers("found", (decoded.numel(), 1), 0, case.topk + 1)
    # A prefill row has no end of its own; now and then nothing was found in one of its columns.
    missing = torch.where(decoded[:, None], column >= found, positions % 11 == 0)
    return torch.where(missing, -1, positions)
