"""What do we ask of decode over a cache that is sharded over ranks, from every rank's query to every rank's answer?

Position p of a request lies on rank p % world: ranks take turns of one token, since no route attends over longer turns
(`dcp.local_lengths`, `dcp.verify_lengths` and `dcp.gather_context` ask about those, `dcp.routes` that they are refused).
Every rank gathers the heads of all, attends over its own tokens, and the answers are merged. See `oracle.dcp.decode` for
the formula.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float, Float32, Int32

from cases.case import Axis, Case, outside
from cases.dcp.combine import Mode, Ranks
from cases.draw import Draw
from cases.memory import far_gap, guarded_copy, with_one_nan
from cases.production import Served

# That of 128 + 64 lanes before absorption, whatever the width of a latent row.
MODEL_SCALE = 192**-0.5


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call, of all ranks at once.

    query[r]: the heads that rank r owns; row b * qlen + t is token t of request b's block, which ends the request.
    caches[r]: what rank r stores, a token's lanes its key, the first `latent` its value. Position p of request b is place
    p // world % page of block table[b, p // (page * world)] on rank p % world; the table is everybody's. lengths[b]: tokens
    of request b over all ranks, its block's included; fewer than qlen leave the first rows nothing to see. Tokens that no
    request has, and what stands in the table behind a request's last block, may be anything. live: the first so many
    requests count, the others fill a captured graph: they ask with anything over blocks that hold anything, and their rows
    may come out as anything. scale: the model's. cache_scale: the real number of a stored 1 of fp8; it says nothing of bf16.
    """

    query: BFloat16[torch.Tensor, "world rows own_heads lanes"]
    caches: Float[torch.Tensor, "world blocks page lanes"]
    table: Int32[torch.Tensor, "requests width"]
    lengths: Int32[torch.Tensor, " requests"]
    qlen: int
    latent: int
    scale: float
    cache_scale: Float32[torch.Tensor, ""]
    mode: Mode
    live: int
    ranks: Ranks = "one_process"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.query.shape[0]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Every rank's answer for the heads that it owns, and their natural-log sums of exponentials over all tokens.

    lse is -inf for a row that sees nothing.
    """

    out: BFloat16[torch.Tensor, "world rows own_heads latent"]
    lse: Float32[torch.Tensor, "world rows own_heads"] | None


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase(Case):
    """The axes of decode over ranks.

    heads_per_rank: heads that a rank owns. requests: those that count. kv_len: tokens of the longest of them. lengths:
    `ragged` any, `edges` about the block's and the world's, and none. padding: requests behind those that count, `empty`
    ones without a token, or `dummy` ones of as many as make every row see one on every rank, over garbage. table: `wide`
    has columns behind the last block, `strided` gaps. values: `ladder` scores rise by hundreds from token to token, so that
    a row's answer is the last token that it sees, bit for bit; `flat` ones are equal, and the values tell the positions;
    `wide` few tokens count. garbage: what lies where nobody may read. reach: whose blocks lie more than 2^31 elements apart.
    """

    op: ClassVar[str] = "dcp.decode"

    mode: Mode = "all_to_all"
    ranks: Ranks = "one_process"
    world: int = 2
    heads_per_rank: int = 2
    requests: int = 2
    qlen: int = 4
    kv_len: int = 17
    lengths: Literal["full", "ragged", "edges"] = "full"
    padding: Literal["none", "empty", "dummy"] = "none"
    page: int = 4
    table: Literal["exact", "wide", "strided"] = "wide"
    latent_lanes: int = 64
    rope_lanes: int = 16
    cache_dtype: Literal["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"] = "bfloat16"
    values: Literal["randn", "ladder", "flat", "wide"] = "randn"
    garbage: Literal["nan", "huge"] = "nan"
    reach: Literal["near", "far_cache"] = "near"


CASE = DecodeCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "mode": ("all_gather_reduce_scatter", "all_gather_all_reduce", "all_to_all"),
    "ranks": ("one_process",),
    "world": (1, 2, 3, 4, 7, 8),
    "heads_per_rank": (1, 2, 3),
    "requests": (1, 3),
    "qlen": (1, 2, 3, 4, 5, 6, 7, 8),
    "kv_len": (1, 3, 8, 17, 40, 65),
    "lengths": ("full", "ragged", "edges"),
    "padding": ("none", "empty", "dummy"),
    "page": (1, 4, 16),
    "table": ("exact", "wide", "strided"),
    "latent_lanes": (32, 64),
    "rope_lanes": (16, 64),
    "cache_dtype": ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    "values": ("randn", "ladder", "flat", "wide"),
    "garbage": ("nan", "huge"),
    "reach": ("near",),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "requests": (0, 1, 3, 7),
    "kv_len": (1, 2, 3, 8, 17, 40, 65, 128),
    "latent_lanes": (32, 64, 512),
}
RANDOM_CASES = 8

_BASE = DecodeCase()
_FAR = _BASE.varied(requests=1, qlen=2, kv_len=12, page=1, reach="far_cache")
_MODES: tuple[Mode, ...] = ("all_gather_reduce_scatter", "all_gather_all_reduce", "all_to_all")
REGRESSIONS: tuple[str, ...] = (
    _BASE.varied(requests=0).id,
    # Real ranks.
    _BASE.varied(ranks="processes", world=1).id,
    *(_BASE.varied(ranks="processes", mode=mode, values="ladder").id for mode in _MODES),
    _BASE.varied(ranks="processes", world=4, mode="all_gather_reduce_scatter", kv_len=40, lengths="edges").id,
    _BASE.varied(ranks="processes", world=8, qlen=8, values="ladder", lengths="edges", requests=3).id,
    _BASE.varied(ranks="processes", world=8, qlen=1, mode="all_gather_all_reduce", kv_len=65).id,
    # Blocks whose last rows lie on another rank than their first, of lengths either side of the world.
    *(_BASE.varied(world=8, requests=1, qlen=4, kv_len=n, values="ladder", page=1).id for n in (3, 7, 8, 9, 12)),
    # As wide as a latent row is, 96 gathered heads.
    _BASE.varied(world=8, heads_per_rank=12, requests=1, qlen=1, kv_len=40, latent_lanes=512, rope_lanes=64, page=16).id,
    # Requests that fill a captured graph, among real ranks too.
    *(_BASE.varied(padding=kind, mode=mode, qlen=2).id for kind in ("empty", "dummy") for mode in _MODES),
    _BASE.varied(ranks="processes", padding="dummy", qlen=1, requests=1).id,
    # Blocks 2^31 elements behind the first: their offsets need 64 bits.
    _FAR.id,
    _FAR.varied(world=1, cache_dtype="float8_e4m3fnuz", values="flat").id,
)  # fmt: skip

PRODUCTION: tuple[Served, ...] = tuple(
    Served(
        CASE(
            world=4, heads_per_rank=heads, requests=4, qlen=2, kv_len=256, page=16, latent_lanes=512, rope_lanes=64,
        ).varied(cache_dtype=code)
    )
    for heads, code in (
        (4, "bfloat16"), (32, "bfloat16"), (32, "float8_e4m3fn"), (32, "float8_e4m3fnuz"),
    )
)  # fmt: skip


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "world": (1, 16), "heads_per_rank": (1, 128), "requests": (0, 64), "qlen": (1, 16), "kv_len": (1, 1 << 14),
    "page": (1, 1024), "latent_lanes": (16, 512), "rope_lanes": (1, 64),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, DecodeCase)
    reasons = outside(case, _BOUNDS)
    if case.latent_lanes & (case.latent_lanes - 1):
        reasons.append(f"latent_lanes={case.latent_lanes}: should be a power of two")
    if case.values == "ladder" and (case.cache_dtype != "bfloat16" or case.kv_len > 128):
        reasons.append("values=ladder: needs a bfloat16 cache and at most 128 rungs")
    if case.ranks == "processes" and case.world > 8:
        reasons.append("ranks=processes: at most eight")
    if case.reach != "near" and case.ranks == "processes":
        reasons.append("ranks=processes: a cache of gigabytes cannot be handed to a process, reach should be near")
    if case.reach != "near" and case.world > 2:
        reasons.append(
            f"world={case.world}: should be 1 or 2 with reach={case.reach}, or its address space is out of proportion"
        )
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it: every rank attends, for every row."""
    assert isinstance(case, DecodeCase)
    attended = (case.requests + (2 if case.padding == "dummy" else 0)) * case.qlen * case.world
    return attended > 64 or case.requests * case.qlen * case.world * case.kv_len > 2000


def _narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers in a dtype."""
    narrow = values.to(dtype)
    return with_one_nan(narrow) if dtype == torch.bfloat16 else narrow


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, DecodeCase)
    draw = Draw(case.seed, case.op)
    lengths = _lengths(case, draw)
    # With so many tokens every row of a block sees one on every rank.
    padding = {"none": [], "empty": [0, 0], "dummy": [case.qlen * case.world] * 2}[case.padding]
    run = case.page * case.world
    counts = [-(-length // run) for length in lengths]
    blocks = sum(counts) + 2
    # Block 0 is nobody's: what a kernel redirects there must find garbage. Dummies list nothing else.
    order = draw.permutation("blocks", blocks - 1) + 1
    gap = lanes = case.latent_lanes + case.rope_lanes
    if case.reach == "far_cache":
        gap, order = far_gap(blocks, case.page * lanes), torch.arange(blocks - 1, 0, -1)
    width = max([1, *counts, *(-(-length // run) for length in padding)]) + (0 if case.table == "exact" else 2)
    rows = case.requests + len(padding)
    table = torch.tensor([-1, 2**31 - 1, 0, blocks, -(2**31)])[draw.integers("tail", (rows, width), 0, 5)]
    for b, length in enumerate(padding, case.requests):
        table[b, : -(-length // run)] = 0
    stored = torch.full((case.world, blocks, case.page, lanes), _GARBAGE[case.cache_dtype][case.garbage])
    taken = 0
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count] = order[taken : taken + count]
        taken += count
        position = torch.arange(length)
        block = table[b, position // run]
        stored[position % case.world, block, position // case.world % case.page] = _tokens(case, length, b, draw)
    query = torch.full((case.world, rows * case.qlen, case.heads_per_rank, lanes), math.nan)
    query[:, : case.requests * case.qlen] = _query(case, draw)
    return Inputs(
        query=guarded_copy(_narrowed(query, torch.bfloat16), gaps=(16, 24, 8)),
        caches=guarded_copy(_narrowed(stored, getattr(torch, case.cache_dtype)), gaps=(3 * lanes, gap, 0)),
        table=guarded_copy(table.to(torch.int32), gaps=(5 if case.table == "strided" else 0,)),
        lengths=guarded_copy(torch.tensor([*lengths, *padding], dtype=torch.int32)),
        qlen=case.qlen,
        latent=case.latent_lanes,
        scale=MODEL_SCALE,
        cache_scale=guarded_copy(torch.tensor([0.3 if case.cache_dtype != "bfloat16" else 1.0]))[0],
        mode=case.mode,
        live=case.requests,
        ranks=case.ranks,
    )


_GARBAGE = {
    "bfloat16": {"nan": math.nan, "huge": 1e30},
    "float8_e4m3fn": {"nan": math.nan, "huge": 448.0},
    "float8_e4m3fnuz": {"nan": math.nan, "huge": 240.0},
}


def _lengths(case: DecodeCase, draw: Draw) -> list[int]:
    """Tokens of every request; the first is the longest."""
    edges = (case.kv_len, 0, case.world, case.qlen - 1, case.world - 1, case.qlen, 1, case.world + 1, case.qlen + 1)
    if case.lengths == "edges":
        chosen = [edges[(b + case.seed) % len(edges)] for b in range(case.requests)]
        return [min(length, case.kv_len) for length in chosen]
    if case.lengths == "ragged":
        drawn = draw.integers("lengths", (case.requests,), 0, case.kv_len + 1).tolist()
        return [case.kv_len if b == 0 else drawn[b] for b in range(case.requests)]
    return [case.kv_len] * case.requests


def _query(case: DecodeCase, draw: Draw) -> torch.Tensor:
    lanes = case.latent_lanes + case.rope_lanes
    query = draw.normal_like("query", (case.world, case.requests * case.qlen, case.heads_per_rank, lanes))
    if case.values == "flat":
        return torch.zeros_like(query)
    if case.values == "ladder":
        query[:] = 0.0
        query[..., case.latent_lanes] = 64.0
    return query * 6 if case.values == "wide" else query


def _tokens(case: DecodeCase, length: int, request: int, draw: Draw) -> torch.Tensor:
    """The stored rows [length, lanes] of a request, in the order of their positions, in fp32."""
    lanes = case.latent_lanes + case.rope_lanes
    rows = draw.normal_like(f"tokens{request}", (length, lanes))
    position, lane = torch.arange(length)[:, None], torch.arange(lanes)
    if case.values == "flat":
        # What a mean of these is tells which of them it is of.
        return (position % lanes == lane).float() + ((position >> (lane % 7)) & 1).float() + request
    if case.values == "ladder":
        rows[:, case.latent_lanes] = 64.0 * torch.arange(length)
    return rows
