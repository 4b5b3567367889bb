"""What do we ask of dense MLA decode?

One latent row of a few hundred lanes per cached token, key as a whole and value in front; blocks of one to eight query
rows; a flat list of token slots a request. See `oracle.dense_mla.decode` for the formula and `cases.dense_mla.decode_call`
for the call.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from cases.case import Axis, Case, outside
from cases.dense_mla.decode_call import DecodeInputs
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served

WRITABLE: tuple[str, ...] = ("out",)

# That of 128 + 64 lanes before absorption, whatever the width of a latent row.
MODEL_SCALE = 192**-0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase(Case):
    """The axes of dense MLA decode.

    heads: query heads a row. requests, qlen: requests that count, and query tokens of each. mode: `causal` and `whole`
    blocks, or the `round_robin` shard of a causal one. world, shard: how many shards, and which of them this is.
    kv_len: tokens of the longest request, over all shards. lengths: `full` all requests that long; `ragged` any length;
    `edges` lengths about the block's. padding: requests behind those that count, `empty` ones without a token, or `dummy`
    ones over garbage. page: tokens a page. slots: `scattered` pages, `consecutive` ones, or `shared`, whose first half is
    the first request's. pages: `padded` leaves gaps between them. latent_lanes, rope_lanes: value lanes and the others.
    quantised_query: of the cache's type. scales: those of query and cache; bf16 has them too, to be left alone. splits:
    parts at most. layout: `strided` leaves gaps after heads and rows of query and out. values: `single` gives the first
    row of a block one token, `plateau` has large scores that differ little. future: `nan` makes the block's last token
    NaN, which the rows before do not see. garbage: what lies where nobody may read. reach: whose rows or pages lie more
    than 2^31 elements apart.
    """

    op: ClassVar[str] = "dense_mla.decode"

    heads: int = 16
    requests: int = 2
    qlen: int = 2
    mode: Literal["causal", "whole", "round_robin"] = "causal"
    world: int = 1
    shard: Literal["first", "middle", "last"] = "first"
    kv_len: int = 33
    lengths: Literal["full", "ragged", "edges"] = "full"
    padding: Literal["none", "empty", "dummy"] = "none"
    page: int = 16
    slots: Literal["scattered", "consecutive", "shared"] = "scattered"
    pages: Literal["adjacent", "padded"] = "adjacent"
    latent_lanes: int = 64
    rope_lanes: int = 16
    cache_dtype: Literal["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"] = "bfloat16"
    quantised_query: bool = False
    scales: Literal["unit", "power_of_two", "odd"] = "unit"
    splits: int = 2
    layout: Literal["contiguous", "strided"] = "contiguous"
    output: Literal["bfloat16", "float32"] = "bfloat16"
    values: Literal[
        "randn", "needle", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "plateau", "wide",
    ] = "randn"  # fmt: skip
    future: Literal["finite", "nan"] = "finite"
    garbage: Literal["nan", "huge"] = "nan"
    reach: Literal["near", "far_query", "far_cache", "far_out"] = "near"

    @property
    def rank(self) -> int:
        """The number of the shard."""
        return {"first": 0, "middle": self.world // 2, "last": self.world - 1}[self.shard]


CASE = DecodeCase

PROBES = ("needle", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated")
"""Values whose answer is known exactly, or all but exactly, where there is a token to see."""

AXES: Mapping[str, tuple[Axis, ...]] = {
    "heads": (1, 2, 4, 6, 8, 12, 16, 17, 24, 32, 40, 48, 64, 80, 96, 112, 128),
    "requests": (1, 2, 3),
    "qlen": (1, 2, 3, 4, 5, 6, 7, 8),
    "mode": ("causal", "whole", "round_robin"),
    "world": (1, 2, 4, 8),
    "shard": ("first", "middle", "last"),
    # What the array leaves open is filled with an axis's first value: one that shows something.
    "kv_len": (33, 0, 1, 2, 7, 16, 65, 130),
    "lengths": ("full", "ragged", "edges"),
    "padding": ("none", "empty", "dummy"),
    "page": (16, 1, 64, 128, 256),
    "slots": ("scattered", "consecutive", "shared"),
    "pages": ("adjacent", "padded"),
    "latent_lanes": (64, 48, 512),
    "rope_lanes": (16, 64, 0),
    "cache_dtype": ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    "quantised_query": (False, True),
    "scales": ("unit", "power_of_two", "odd"),
    "splits": (1, 2, 3, 5, 8, 16, 64),
    "layout": ("contiguous", "strided"),
    "output": ("bfloat16", "float32"),
    "values": (
        "randn", "needle", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "plateau", "wide",
    ),
    "future": ("finite", "nan"),
    "garbage": ("nan", "huge"),
    "reach": ("near",),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "heads": (1, 2, 4, 6, 8, 12, 16, 17, 24, 32, 40, 48, 64, 80, 96, 112, 128),
    "requests": (1, 2, 3, 7, 16, 33),
    "qlen": (1, 2, 3, 4, 5, 6, 7, 8),
    "kv_len": (0, 1, 2, 7, 15, 16, 17, 31, 33, 64, 65, 127, 130, 511, 1025, 2049),
    "world": (1, 2, 3, 4, 7, 8),
    "shard": ("first", "middle", "last"),
    "latent_lanes": (64, 48, 256, 448, 512),
    "rope_lanes": (16, 64, 32, 0),
}
RANDOM_CASES = 8

_BASE = DecodeCase()
_FAR = _BASE.varied(requests=3, qlen=1, heads=2, kv_len=40, values="needle")
_WIDE = {"latent_lanes": 512, "rope_lanes": 64}
REGRESSIONS: tuple[str, ...] = (
    # A call without requests returns an empty answer.
    _BASE.varied(requests=0).id,
    # One token of many must not be lost at any split boundary, nor the last one of a page.
    *(_BASE.varied(requests=1, qlen=1, kv_len=256, heads=2, splits=n, values="needle").id for n in (3, 7)),
    *(_BASE.varied(requests=1, qlen=1, kv_len=256, heads=2, splits=n, values="uniform_exact").id for n in (5, 64)),
    # What a rank of eight asks with 128, 96 and 64 heads in all, and what a gathered block asks of one.
    *(
        _BASE.varied(heads=n, requests=1, qlen=4, kv_len=65, page=64, **_WIDE).id
        for n in (8, 12, 16)
    ),
    _BASE.varied(heads=96, requests=1, qlen=1, kv_len=40, **_WIDE).id,
    _BASE.varied(
        heads=16, requests=1, qlen=4, kv_len=131, mode="round_robin", world=8, shard="last", cache_dtype="float8_e4m3fn",
        quantised_query=True, scales="odd", **_WIDE,
    ).id,
    # A shard that holds none of the tokens that the first rows of a block see.
    _BASE.varied(mode="round_robin", world=8, shard="middle", qlen=8, kv_len=3).id,
    _BASE.varied(mode="round_robin", world=8, shard="last", qlen=3, kv_len=10, lengths="edges", requests=5).id,
    # A head count that is folded into tiles of 16 with an fp8 cache, over more than one part.
    _BASE.varied(heads=32, requests=2, qlen=1, kv_len=65, cache_dtype="float8_e4m3fn", quantised_query=True).id,
    # Head counts that are padded or folded in yet another way.
    *(_BASE.varied(heads=n, requests=1, kv_len=17, splits=1).id for n in (4, 6, 24, 40, 80, 112)),
    # Probes that the covering array asks only of requests or shards without a token.
    _BASE.varied(heads=64, requests=1, kv_len=33, values="onehot_exact").id,
    _BASE.varied(heads=128, requests=1, kv_len=7, values="single").id,
    # Heads and query tokens for which tables of kernels have entries of their own, and such as lie between them.
    *(
        _BASE.varied(heads=n, qlen=s, requests=1, kv_len=17, values="wide", cache_dtype="float8_e4m3fn", quantised_query=True).id
        for n, s in ((16, 4), (32, 1), (32, 3), (32, 4), (64, 1), (64, 4), (96, 4), (128, 1), (128, 4), (8, 4))
    ),
    *(
        _BASE.varied(heads=n, qlen=s, requests=1, kv_len=17, values="wide").id
        for n, s in ((8, 2), (12, 5), (64, 4), (80, 5), (112, 7), (128, 4))
    ),
    # More parts than a merge may have been written for, of which a later one has the largest score.
    _BASE.varied(requests=1, qlen=1, heads=2, kv_len=560, splits=64).id,
    _BASE.varied(requests=1, qlen=1, heads=16, kv_len=560, splits=64, values="wide", output="float32").id,
    # Blocks whose length is no power of two, with distinct rows.
    *(_BASE.varied(qlen=n, requests=1, values="wide", kv_len=17).id for n in (3, 5, 7)),
    # 257 copies of a token: their number is none of bf16's, so a denominator in bf16 moves every answer by a step.
    _BASE.varied(requests=1, qlen=1, kv_len=257, values="repeated", output="float32").id,
    # A rounding that leans to one side shows over many rows.
    _BASE.varied(requests=2, qlen=1, heads=64, kv_len=256).id,
    _BASE.varied(requests=2, qlen=1, heads=64, kv_len=256, cache_dtype="float8_e4m3fn", scales="odd").id,
    # Pages and rows 2^31 elements behind the first: their offsets need 64 bits.
    _FAR.varied(reach="far_cache").id,
    _FAR.varied(reach="far_cache", cache_dtype="float8_e4m3fn", page=1, kv_len=5).id,
    _FAR.varied(reach="far_query").id,
    _FAR.varied(reach="far_out").id,
)  # fmt: skip

_SERVED = DecodeCase(
    requests=32, qlen=1, kv_len=256, page=64, latent_lanes=512, rope_lanes=64, splits=8, lengths="full",
)  # fmt: skip
PRODUCTION: tuple[Served, ...] = (
    *(Served(_SERVED.varied(heads=heads), {"cache": 65536}) for heads in (16, 32, 64, 128)),
    # A cache of less than 2 GiB, which 32 bits address.
    Served(_SERVED.varied(heads=128), {"cache": 8192}),
    Served(_SERVED.varied(heads=16, qlen=4, requests=8, page=1), {"cache": 1 << 22}),
    Served(_SERVED.varied(heads=128, qlen=2, requests=16, page=16, splits=16), {"cache": 1 << 18}),
    *(
        Served(_SERVED.varied(heads=heads, cache_dtype=code, quantised_query=quantised), {"cache": 65536})
        for heads in (16, 128)
        for code in ("float8_e4m3fn", "float8_e4m3fnuz")
        for quantised in (False, True)
    ),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "heads": (1, 1024), "requests": (0, 4096), "qlen": (1, 64), "world": (1, 64), "kv_len": (0, 1 << 17),
    "page": (1, 4096), "latent_lanes": (1, 1024), "rope_lanes": (0, 512), "splits": (1, 1024),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, DecodeCase)
    reasons = outside(case, _BOUNDS)
    if case.mode != "round_robin" and case.world > 1:
        reasons.append(f"mode={case.mode}: other shards are of no account, world should be 1")
    if case.world == 1 and case.shard != "first":
        reasons.append("world=1 has one shard, the first")
    if case.quantised_query and case.cache_dtype == "bfloat16":
        reasons.append("quantised_query=yes needs a cache of fp8")
    if case.future == "nan" and (case.qlen == 1 or case.mode == "whole"):
        reasons.append("future=nan needs a block with rows that do not see its last token")
    if case.reach != "near" and (case.layout == "strided" or case.pages == "padded"):
        reasons.append(f"reach={case.reach} has a layout of its own")
    if case.reach in ("far_query", "far_out") and case.requests * case.qlen < 3:
        reasons.append(f"reach={case.reach} needs three rows")
    if case.reach == "far_out" and case.output == "float32":
        reasons.append("reach=far_out needs an output of two bytes, or its address space is out of proportion")
    if case.values in PROBES and case.kv_len <= case.rank:
        reasons.append(f"values={case.values} needs a token on the shard, or there is no answer to know")
    if case.reach == "far_cache" and (case.kv_len == 0 or case.kv_len > 512):
        reasons.append("reach=far_cache needs 1 to 512 tokens, or its pages are not far apart")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than a few seconds for it: tiles of 16 heads, 32 keys and 128 lanes.

    Eight rows of 128 heads are not too much where they see few tokens, nor are 64 parts of one row.
    """
    assert isinstance(case, DecodeCase)
    rows = case.requests * case.qlen
    # Dummies are attended like others.
    attended = rows + (2 * case.qlen if case.padding == "dummy" else 0)
    tiles = max(1, -(-case.kv_len // 32))
    parts = case.splits if case.splits < tiles else tiles
    wide = 3 if case.latent_lanes > 128 else 1
    if attended * -(-case.heads // 16) * (tiles + parts) * wide > 128:
        return True
    # Some merge every part that a call allows, for every head of its own, whether a row has it or not.
    return rows * case.heads * case.splits > 12288


def build(case: Case) -> DecodeInputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, DecodeCase)
    draw = Draw(case.seed, case.op)
    extra = 0 if case.padding == "none" else 2
    whole, local = _lengths(case, extra, draw)
    lists, blocks = _lists(case, local, draw)
    rows, lanes = (case.requests + extra) * case.qlen, case.latent_lanes + case.rope_lanes
    query_scale, cache_scale = {"unit": (1.0, 1.0), "power_of_two": (0.5, 2.0), "odd": (3.7, 0.3)}[case.scales]
    query = _query(case, rows, draw)
    kv = _kv(case, blocks * case.page, lists, whole, query, draw)
    cache_dtype, query_dtype = getattr(torch, case.cache_dtype), torch.bfloat16
    if case.quantised_query:
        query_dtype, query = cache_dtype, _fitting(query / query_scale, cache_dtype)
    if case.cache_dtype != "bfloat16":
        kv = _fitting(kv / cache_scale, cache_dtype)
    # Rows that no request waits for hold anything.
    query[case.requests * case.qlen :] = math.nan
    _spoil(case, kv, lists)
    far, strided = case.reach, case.layout == "strided"
    gaps = (40, 8) if strided else (0, 0)
    shape = (rows, case.heads, case.latent_lanes)
    query_gaps = (far_gap(rows, case.heads * lanes), 0) if far == "far_query" else gaps
    out_gaps = (far_gap(rows, case.heads * case.latent_lanes), 0) if far == "far_out" else gaps
    page_gap = 3 * lanes if case.pages == "padded" else 0
    if far == "far_cache":
        page_gap = far_gap(blocks, case.page * lanes)
    # Behind the last list stands what would be a disaster as a slot, and what would be none.
    tail = torch.tensor([-1, 2**31 - 1, 0, blocks * case.page, -(2**31), 1, 2**31 - 1])
    sharded = case.mode == "round_robin"
    return DecodeInputs(
        query=guarded_copy(query.to(query_dtype), gaps=query_gaps),
        cache=guarded_copy(kv.to(cache_dtype).view(blocks, case.page, lanes), gaps=(page_gap, 0)),
        slots=guarded_copy(torch.cat([*lists, tail]).to(torch.int32)),
        kv_indptr=_offsets(local),
        qlen=case.qlen,
        causal=case.mode != "whole",
        scale=MODEL_SCALE,
        query_scale=_scalar(query_scale),
        cache_scale=_scalar(cache_scale),
        out=guarded(shape, torch.float32 if case.output == "float32" else torch.bfloat16, gaps=out_gaps),
        splits=case.splits,
        live=case.requests,
        global_indptr=_offsets(whole) if sharded else None,
        world=case.world,
        rank=case.rank,
    )


def _scalar(value: float) -> torch.Tensor:
    return guarded_copy(torch.tensor([value], dtype=torch.float32))[0]


def _offsets(lengths: list[int]) -> torch.Tensor:
    return guarded_copy(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


def _fitting(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """No larger than the type's largest number."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest)


def _lengths(case: DecodeCase, extra: int, draw: Draw) -> tuple[list[int], list[int]]:
    """Tokens of every request over all shards, and of those on this one."""
    edges = (case.kv_len, 0, case.qlen, case.qlen - 1, case.qlen + 1, 1, case.world + 1)
    lengths = [case.kv_len] * case.requests
    if case.lengths == "ragged":
        drawn = draw.integers("lengths", (case.requests,), 0, case.kv_len + 1).tolist()
        lengths = [case.kv_len if b == 0 else drawn[b] for b in range(case.requests)]
    if case.lengths == "edges":
        lengths = [edges[(b + case.seed) % len(edges)] for b in range(case.requests)]
    if case.values == "single":
        lengths = [min(length, 1 if case.mode == "whole" else case.qlen) for length in lengths]
    sharded = case.mode == "round_robin"
    local = [max(0, -(-(length - case.rank) // case.world)) if sharded else length for length in lengths]
    if case.padding == "dummy":
        # As many tokens as make every row of a dummy see one, on every shard.
        return lengths + [case.qlen * case.world] * extra, local + [case.qlen] * extra
    return lengths + [0] * extra, local + [0] * extra


def _lists(case: DecodeCase, lengths: list[int], draw: Draw) -> tuple[list[torch.Tensor], int]:
    """The slots of every request, int64, and how many blocks the cache has."""
    page = case.page
    live = lengths[: case.requests]
    counts = [-(-length // page) for length in live]
    # Block 0 is nobody's: what a kernel redirects there must find garbage. The dummies list it.
    blocks = max(3, sum(counts) + 2)
    order = torch.arange(blocks - 1) + 1
    if case.slots != "consecutive":
        order = draw.permutation("blocks", blocks - 1) + 1
    taken, tables = 0, []
    for count in counts:
        tables.append(order[taken : taken + count])
        taken += count
    if case.slots == "shared" and case.requests:
        # A page is shared only when both requests fill it.
        for b in range(1, case.requests):
            common = min(live[0], live[b]) // page
            common = min(common, -(-counts[0] // 2))
            tables[b] = torch.cat([tables[0][:common], tables[b][common:]])
    lists = []
    for b, length in enumerate(lengths):
        place = torch.arange(length)
        table = tables[b] if b < case.requests else torch.zeros(length // page + 1, dtype=torch.int64)
        lists.append(table[place // page] * page + place % page)
    return lists, blocks


def visible_tokens(case: DecodeCase, length: int, local: int, token: int) -> int:
    """How many of its tokens on this shard a row sees, by their positions: `local` of `length` lie here."""
    if case.mode == "whole":
        return local
    positions = range(case.rank, length, case.world) if case.mode == "round_robin" else range(length)
    return sum(position <= length - case.qlen + token for position in positions)


def _query(case: DecodeCase, rows: int, draw: Draw) -> torch.Tensor:
    lanes = case.latent_lanes + case.rope_lanes
    shape = (rows, case.heads, lanes)
    if case.values in ("uniform_exact", "onehot_exact"):
        return torch.zeros(shape)
    if case.values == "integer_exact":
        return draw.integers("query", shape, -1, 2).float()
    query = 2.0 * draw.normal_like("query", shape)
    if case.values == "needle":
        # All heads of a row look the same way, so that one key can dominate them all.
        query = 2.0 * draw.normal_like("direction", (rows, 1, lanes)) + 0.25 * query
    if case.values == "plateau":
        query = draw.normal_like("direction", (1, 1, lanes)) * 4 + 0.25 * query
    return query * 4.0 if case.values == "wide" else query


def _kv(
    case: DecodeCase, count: int, lists: list[torch.Tensor], whole: list[int], query: torch.Tensor, draw: Draw
) -> torch.Tensor:
    """The rows [slots, lanes] in fp32 as real numbers; exact probes as stored ones."""
    lanes = case.latent_lanes + case.rope_lanes
    shape = (count, lanes)
    scale = 1.0 if case.cache_dtype == "bfloat16" else {"unit": 1.0, "power_of_two": 2.0, "odd": 0.3}[case.scales]
    if case.values == "integer_exact":
        return draw.integers("small", shape, -8, 9).float() * scale
    if case.values == "uniform_exact":
        # Full significands on one grid: sums are exact, means have more bits than any output format.
        if case.cache_dtype == "bfloat16":
            return draw.integers("small", shape, -255, 256).float() / 32
        shift = draw.integers("shift", shape, -3, 1)
        return torch.ldexp(draw.integers("small", shape, -15, 16).float(), shift) * scale
    if case.values == "onehot_exact":
        number, lane = torch.arange(count)[:, None], torch.arange(lanes)
        return ((number % lanes == lane).float() + ((number >> (lane % 12)) & 1).float()) * scale
    kv = draw.normal_like("kv", shape)
    if case.values == "repeated":
        return kv[:1].expand(shape).clone()
    if case.values == "single":
        return torch.ldexp(kv, draw.integers("power", shape, -3, 4))
    if case.values == "wide":
        return torch.ldexp(kv, draw.integers("loud", (count, 1), 0, 4))
    if case.values == "plateau":
        return kv + draw.normal_like("direction", (1, 1, lanes))[0]
    if case.values == "needle":
        _plant_needles(case, kv, lists, whole, query)
    return kv


def _plant_needles(
    case: DecodeCase, kv: torch.Tensor, lists: list[torch.Tensor], whole: list[int], query: torch.Tensor
) -> None:
    """One dominating token a row: the last, first or middle one that it sees in turn, never shared by two rows."""
    taken: set[int] = set()
    for row in range(case.requests * case.qlen):
        b, token = divmod(row, case.qlen)
        limit = visible_tokens(case, whole[b], len(lists[b]), token)
        spots = [int(lists[b][i]) for i in (limit - 1, 0, limit // 2)] if limit else []
        free = [slot for slot in spots if slot not in taken]
        if free:
            slot = free[row % len(free)]
            taken.add(slot)
            kv[slot] = query[row, 0]


def _spoil(case: DecodeCase, kv: torch.Tensor, lists: list[torch.Tensor]) -> None:
    """Garbage where no request that counts reads, and with `future`, NaN in the last token of every block."""
    live = lists[: case.requests]
    read = torch.zeros(kv.shape[0], dtype=torch.bool)
    for slots in live:
        read[slots] = True
    largest = 1e30 if case.cache_dtype == "bfloat16" else torch.finfo(getattr(torch, case.cache_dtype)).max
    kv[~read] = math.nan if case.garbage == "nan" else largest
    if case.future == "nan":
        for slots in live:
            kv[slots[-1:]] = math.nan
