"""What do we ask of a kernel that turns decode tokens' top-k positions into one ragged list of cache slots?

The indexer leaves each token a row of positions within its request's compressed keys, negative where it found none.
See `oracle.sparse_mla.decode_topk_ragged`.
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

Holes = Literal["kept", "removed"]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: row t lists the slots of the n_t positions of local[t] that are not negative; n_t is 0 unless valid[t].

    Position v of request r has the slot table[r, v // block_size] * block_size + v % block_size. `block_size` is that of
    the compressed cache. Token t belongs to request requests[t]; entries beyond the tokens, and those of tokens that are
    not valid, are any numbers, and so are the positions of such tokens. Positions of valid tokens lie within the table;
    all slots fit into int32.

    Where a negative position stands before others, `holes` decides: `kept` takes the first n_t columns as they come,
    with -1 for a hole, so that what stands behind them is lost; `removed` lists every position. Where the positions come
    first, the two are the same. `flat`, `indptr` and `lengths` are memory that an implementation may answer in.
    """

    local: Int32[torch.Tensor, "tokens topk"]
    requests: Int32[torch.Tensor, " tokens_or_more"]
    table: Int32[torch.Tensor, "requests columns"]
    block_size: int
    valid: Bool[torch.Tensor, " tokens"]
    holes: Holes
    flat: Int32[torch.Tensor, " capacity"]
    indptr: Int32[torch.Tensor, " tokens_plus_one"]
    lengths: Int32[torch.Tensor, " tokens"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The ragged list of slots with room for tokens * topk, where each row begins, and each row's length.

    What `flat` holds from indptr[-1] on means nothing.
    """

    flat: Int32[torch.Tensor, " capacity"]
    indptr: Int32[torch.Tensor, " tokens_plus_one"]
    lengths: Int32[torch.Tensor, " tokens"]


WRITABLE: tuple[str, ...] = ("flat", "indptr", "lengths")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTopkCase(Case):
    """The axes of the decode builder.

    entries: see `cases.sparse_mla.paging.position_rows`. padded: which tokens are not valid, every other one for
    `between`. table: `narrowed` is a view of a wider table, `high` has block numbers up to the last slot of int32.
    layout: of the positions; `strided` leaves a gap after every row, `far` has rows so far apart that the last starts
    2^31 elements behind the first.
    """

    op: ClassVar[str] = "sparse_mla.decode_topk_ragged"

    tokens: int = 5
    topk: int = 128
    requests: int = 3
    block_size: int = 64
    entries: Literal["prefix", "holes", "first_hole", "full", "empty"] = "prefix"
    holes: Literal["kept", "removed"] = "kept"
    padded: Literal["none", "tail", "between", "all"] = "tail"
    table: Literal["exact", "narrowed", "high"] = "exact"
    layout: Literal["contiguous", "strided", "far"] = "contiguous"


CASE = DecodeTopkCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 5, 16, 17, 40),
    "topk": (0, 1, 5, 128, 1100),
    "requests": (1, 3),
    "block_size": (1, 2, 5, 64),
    "entries": ("prefix", "holes", "first_hole", "full", "empty"),
    "holes": ("kept", "removed"),
    "padded": ("none", "tail", "between", "all"),
    "table": ("exact", "narrowed", "high"),
    "layout": ("contiguous", "strided"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 5, 16, 17, 40, 300, 1100),
    "topk": (0, 1, 5, 128, 512, 1024, 1100, 2048),
}
RANDOM_CASES = 12

_BASE = DecodeTopkCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.varied(tokens=1100, topk=5, padded="between").id,
    _BASE.varied(topk=1100, layout="strided", table="narrowed").id,
    _BASE.varied(layout="far").id,
    _BASE.varied(entries="holes").id,
    _BASE.varied(entries="holes", holes="removed").id,
    _BASE.varied(entries="full", block_size=1, table="high", padded="none").id,
    _BASE.varied(tokens=0).id,
    _BASE.varied(tokens=16, topk=1).id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(tokens=tokens, topk=topk, requests=64, block_size=block))
    for tokens, topk, block in ((64, 512, 64), (256, 2048, 64), (64, 1024, 2))
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "tokens": (0, 1 << 16),
    "topk": (0, 1 << 14),
    "requests": (1, 4096),
    "block_size": (1, 4096),
}


def forbid(case: DecodeTopkCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.layout == "far" and (case.tokens < 3 or case.topk < 1):
        reasons.append("layout=far: needs three tokens and a column")
    return reasons


def heavy(case: DecodeTopkCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.tokens * case.topk > 50_000


def build(case: DecodeTopkCase) -> Inputs:
    """The inputs of a case; the requests' tables are scattered over one cache."""
    draw = Draw(case.seed, case.op)
    columns = max(3, -(-300 // case.block_size))
    table, used = paging.block_tables(draw, case.requests, columns, case.block_size, high=case.table == "high")
    requests = draw.integers("requests", (case.tokens,), 0, case.requests)
    local = paging.position_rows(draw, case.topk, used[requests] * case.block_size, case.entries)
    token = torch.arange(case.tokens)
    valid = {
        "none": torch.ones(case.tokens, dtype=torch.bool),
        "tail": token < case.tokens - case.tokens // 3,
        "between": token % 2 == 0,
        "all": torch.zeros(case.tokens, dtype=torch.bool),
    }[case.padded]
    stray = paging.stray_requests(draw, case.tokens + 3, case.requests)
    requests = torch.cat((torch.where(valid, requests, stray[:-3]), stray[-3:]))
    local = torch.where(valid[:, None], local, paging.garbage_rows(draw, case.tokens, case.topk))
    gaps: tuple[int, ...] = ()
    if case.layout == "strided":
        gaps = (11,)
    elif case.layout == "far":
        gaps = (far_gap(case.tokens, case.topk),)
    return Inputs(
        local=guarded_copy(local.to(torch.int32), gaps=gaps),
        requests=guarded_copy(requests.to(torch.int32)),
        table=guarded_copy(table.to(torch.int32), gaps=(5,) if case.table == "narrowed" else ()),
        block_size=case.block_size,
        valid=guarded_copy(valid, fill=1),
        holes=case.holes,
        flat=guarded((case.tokens * case.topk,), torch.int32),
        indptr=guarded((case.tokens + 1,), torch.int32),
        lengths=guarded((case.tokens,), torch.int32),
    )
