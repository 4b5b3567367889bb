"""What do we ask of a kernel that turns prefill tokens' top-k positions into one ragged list of cache slots?

The indexer leaves each prefill token a row of positions within its request's compressed keys, of which only those before
the token exist. See `oracle.sparse_mla.prefill_topk_ragged`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.sparse_mla import paging


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: row t belongs to token a = t + token_offset of the batch; all tensors but `local` are the batch's.

    Request r owns the tokens query_start[r] to query_start[r + 1] - 1, the last of its seq_lens[r] tokens; so token a
    stands at position p = seq_lens[r] - (query_start[r + 1] - query_start[r]) + a - query_start[r], and (p + 1) // ratio
    compressed keys exist for it. Row t lists the slots of the positions in its first so many columns that are neither
    negative nor num_compressed or more; unless num_rows is negative, slots from num_rows on are left out. A token that
    is not valid has an empty row, and its request is any number; so has one at a position below 0.

    Compressed position v has the slot table[r, v // block_size] * block_size + v % block_size, `block_size` in
    compressed keys; the table reaches num_compressed. Columns beyond a row's keys hold anything. `flat` and `indptr` are
    memory that an implementation may answer in.
    """

    local: Int32[torch.Tensor, "rows width"]
    requests: Int32[torch.Tensor, " tokens"]
    query_start: Int32[torch.Tensor, " requests_plus_one"]
    seq_lens: Int32[torch.Tensor, " requests"]
    valid: Bool[torch.Tensor, " tokens"]
    table: Int32[torch.Tensor, "requests columns"]
    block_size: int
    ratio: int
    num_compressed: int
    token_offset: int
    num_rows: int
    flat: Int32[torch.Tensor, " capacity"]
    indptr: Int32[torch.Tensor, " rows_plus_one"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The ragged list of slots with room for rows * width, and where each row begins.

    What `flat` holds from indptr[-1] on means nothing.
    """

    flat: Int32[torch.Tensor, " capacity"]
    indptr: Int32[torch.Tensor, " rows_plus_one"]


WRITABLE: tuple[str, ...] = ("flat", "indptr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTopkCase(Case):
    """The axes of the prefill builder.

    rows: prefill tokens. token_offset: decode tokens before them. requests: that own the rows, some perhaps none.
    context: tokens before a request's query, `some` fewer than a row is wide, `long` more; `warmup` has sequences
    shorter than their queries. entries: `holes` every third negative, `edges` the ends of every range. tails: what
    stands beyond a row's keys, `stale` positions of earlier steps or `none`. compressed: num_compressed, `all` that the
    table reaches or `tight` among the positions. bound: num_rows, `absent` or `tight` among the slots. padded: which
    rows are not valid; padding: their requests, `stale` of the batch or `stray` of none. table, layout: as in decode.
    """

    op: ClassVar[str] = "sparse_mla.prefill_topk_ragged"

    rows: int = 33
    width: int = 16
    token_offset: int = 3
    requests: int = 3
    ratio: int = 2
    block_size: int = 64
    context: Literal["none", "some", "long", "warmup"] = "some"
    entries: Literal["full", "holes", "edges", "empty"] = "full"
    tails: Literal["stale", "none"] = "stale"
    compressed: Literal["all", "tight"] = "all"
    bound: Literal["absent", "tight"] = "absent"
    padded: Literal["none", "tail", "between", "all"] = "none"
    padding: Literal["stale", "stray"] = "stale"
    table: Literal["exact", "narrowed"] = "exact"
    layout: Literal["contiguous", "strided", "far"] = "contiguous"


CASE = PrefillTopkCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "rows": (0, 1, 7, 33, 70),
    "width": (0, 1, 16, 128, 1100),
    "token_offset": (0, 3, 40),
    "requests": (1, 3),
    "ratio": (1, 2, 4),
    "block_size": (1, 2, 64),
    "context": ("none", "some", "long", "warmup"),
    "entries": ("full", "holes", "edges", "empty"),
    "tails": ("stale", "none"),
    "compressed": ("all", "tight"),
    "bound": ("absent", "tight"),
    "padded": ("none", "tail", "between", "all"),
    "padding": ("stale", "stray"),
    "table": ("exact", "narrowed"),
    "layout": ("contiguous", "strided"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"rows": (0, 1, 7, 33, 70, 500), "ratio": (1, 2, 4, 128)}
RANDOM_CASES = 12

_BASE = PrefillTopkCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.varied(context="none").id,
    _BASE.varied(context="warmup", ratio=4).id,
    _BASE.varied(rows=7, width=1100, context="long", layout="strided", table="narrowed").id,
    _BASE.varied(rows=7, width=128, layout="far", context="long").id,
    _BASE.varied(entries="edges", compressed="tight", bound="tight", context="long").id,
    _BASE.varied(entries="holes", token_offset=40, padded="between").id,
    _BASE.varied(padded="tail", padding="stray").id,
    _BASE.varied(rows=0).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(rows=2048, width=512, requests=8, ratio=4, block_size=64)),
    Served(CASE(rows=512, width=2048, requests=8, ratio=4, block_size=64, token_offset=0)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "rows": (0, 1 << 14),
    "width": (0, 1 << 14),
    "token_offset": (0, 1 << 14),
    "requests": (1, 1024),
    "ratio": (1, 1024),
    "block_size": (1, 4096),
}


def forbid(case: PrefillTopkCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.layout == "far" and (case.rows < 3 or case.width < 1):
        reasons.append("layout=far: needs three rows and a column")
    if case.padded == "none" and case.padding == "stray":
        reasons.append("padding=stray: needs padded rows")
    return reasons


def heavy(case: PrefillTopkCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.rows * case.width > 50_000


def build(case: PrefillTopkCase) -> Inputs:
    """The inputs of a case: decode requests of some tokens each, then the prefill requests."""
    draw = Draw(case.seed, case.op)
    query_lens = _query_lens(case, draw)
    requests = query_lens.numel()
    query_start = torch.cat((torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)))
    seq_lens = _seq_lens(case, draw, query_lens)
    # Every position that a row may name lies in the table.
    reach = max(int(seq_lens.max()) // case.ratio, 1)
    table, used = paging.block_tables(draw, requests, -(-reach // case.block_size) + 1, case.block_size)
    table = torch.where(torch.arange(table.shape[1]) < used[:, None], table, 0)
    num_compressed = table.shape[1] * case.block_size
    if case.compressed == "tight":
        num_compressed = max(1, reach // 2)
    owner = torch.repeat_interleave(torch.arange(requests), query_lens)
    token = torch.arange(case.token_offset, case.token_offset + case.rows)
    own = owner[token]
    position = seq_lens[own] - query_lens[own] + token - query_start[own]
    local = _local(case, draw, ((position + 1) // case.ratio).clamp(min=0), num_compressed, table.shape[1])
    valid = torch.ones(case.token_offset + case.rows, dtype=torch.bool)
    row = torch.arange(case.rows)
    valid[case.token_offset :] = {
        "none": row >= 0,
        "tail": row < case.rows - case.rows // 3,
        "between": row % 2 == 0,
        "all": row < 0,
    }[case.padded]
    if case.padding == "stray":
        owner = torch.where(valid, owner, paging.stray_requests(draw, owner.numel(), requests))
    else:
        owner = torch.where(valid, owner, draw.integers("stale", (owner.numel(),), 0, requests))
    gaps: tuple[int, ...] = ()
    if case.layout == "strided":
        gaps = (11,)
    elif case.layout == "far":
        gaps = (far_gap(case.rows, case.width),)
    # A slot that stands in the middle of those that the rows name.
    live = local[(local >= 0) & (local < num_compressed)]
    middle = int(live.sort().values[live.numel() // 2]) if live.numel() else 0
    num_rows = int(table[-1, middle // case.block_size]) * case.block_size + middle % case.block_size
    return Inputs(
        local=guarded_copy(local.to(torch.int32), gaps=gaps),
        requests=guarded_copy(owner.to(torch.int32)),
        query_start=guarded_copy(query_start.to(torch.int32)),
        seq_lens=guarded_copy(seq_lens.to(torch.int32)),
        valid=guarded_copy(valid, fill=1),
        table=guarded_copy(table.to(torch.int32), gaps=(5,) if case.table == "narrowed" else ()),
        block_size=case.block_size,
        ratio=case.ratio,
        num_compressed=num_compressed,
        token_offset=case.token_offset,
        num_rows=-1 if case.bound == "absent" else num_rows,
        flat=guarded((case.rows * case.width,), torch.int32),
        indptr=guarded((case.rows + 1,), torch.int32),
    )


def _query_lens(case: PrefillTopkCase, draw: Draw) -> torch.Tensor:
    """Tokens of each request; those of the decode requests come to the offset, the others to the rows."""
    decodes = torch.full((-(-case.token_offset // 8),), 8)
    decodes[-1:] -= -case.token_offset % 8
    cuts = draw.integers("cuts", (case.requests - 1,), 0, case.rows + 1).sort().values
    bounds = torch.cat((torch.tensor([0]), cuts, torch.tensor([case.rows])))
    return torch.cat((decodes, bounds.diff()))


def _seq_lens(case: PrefillTopkCase, draw: Draw, query_lens: torch.Tensor) -> torch.Tensor:
    context = torch.zeros_like(query_lens)
    if case.context == "some":
        context = draw.integers("context", query_lens.shape, 0, max(2, case.width * case.ratio))
    elif case.context == "long":
        context = draw.integers("context", query_lens.shape, 1, 3) * case.width * case.ratio + 5
    elif case.context == "warmup":
        return (query_lens - draw.integers("context", query_lens.shape, 0, 12)).clamp(min=0)
    return query_lens + context


def _local(case: PrefillTopkCase, draw: Draw, keys: torch.Tensor, num_compressed: int, columns: int) -> torch.Tensor:
    """int64 [rows, width]: positions among each row's keys in as many columns, and what stands behind them."""
    shape = (case.rows, case.width)
    kind = {"full": "full", "holes": "holes", "edges": "full", "empty": "empty"}[case.entries]
    local = paging.position_rows(draw, case.width, keys, kind)  # type: ignore[arg-type]
    if case.entries == "edges":
        edges = [0, num_compressed - 1, num_compressed, paging.INT32_MAX, -1, paging.INT32_MIN]
        local = torch.tensor(edges)[draw.integers("edges", shape, 0, len(edges))]
    behind = torch.full(shape, -1)
    if case.tails == "stale":
        behind = draw.integers("behind", shape, 0, columns * case.block_size)
    return torch.where(torch.arange(case.width) < keys[:, None], local, behind)
