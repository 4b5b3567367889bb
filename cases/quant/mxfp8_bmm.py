"""What do we ask of a grouped product of MXFP8 rows with an MXFP8 weight?

Each row holds `groups` slices of `width` lanes; slice g meets the `rank` weight rows of group g. Every 32 lanes of a row
share a scale byte, and so do 32 lanes of one weight row or of 32. See `oracle.quant.mxfp8_bmm` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float8e4m3fn, Int64, UInt8

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded
from cases.production import Served

LANES = 32

# Up to this much work, tokens times groups: rows, columns and lanes of a tile, warps, stages. None: any more work.
TILES: tuple[tuple[int | None, tuple[int, int, int, int, int]], ...] = (
    (64, (16, 16, 1024, 2, 3)),
    (128, (32, 16, 1024, 2, 3)),
    (256, (32, 32, 512, 2, 3)),
    (512, (64, 32, 512, 2, 3)),
    (1024, (64, 64, 512, 4, 2)),
    (2048, (64, 64, 256, 4, 2)),
    (3072, (64, 64, 256, 2, 1)),
    (4096, (128, 128, 256, 8, 2)),
    (None, (128, 128, 128, 4, 2)),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call.

    A weight scale stands for 32 rows of the weight (rows / 32 scale rows) or for one (as many scale rows as weight rows).
    The last strides are 1, the others are free. width = a's columns / groups. No scale byte is 255. `out` receives the
    answer where an implementation writes into memory of the caller.
    """

    a: Float8e4m3fn[torch.Tensor, "tokens groups*width"]
    a_scale: UInt8[torch.Tensor, "tokens groups*width//32"]
    weight: Float8e4m3fn[torch.Tensor, "groups*rank width"]
    weight_scale: UInt8[torch.Tensor, "scale_rows width//32"]
    groups: int
    rank: int
    out: BFloat16[torch.Tensor, "tokens groups*rank"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The product, and the tile that the call would be or was launched with, where the implementation tells."""

    out: BFloat16[torch.Tensor, "tokens groups*rank"]
    tile: Int64[torch.Tensor, " 5"] | None = None


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BmmCase(Case):
    """The axes of the grouped product.

    tokens, groups, rank, width: the shape. form: `block` one weight scale for 32 rows, `row` one for each. scales: `one`
    is 127 everywhere; `near` some powers about it; `wide` forty either way; `extreme` bytes 0 to 254 that meet their
    opposites, so that the products are ordinary. layout: `strided` leaves gaps behind every row of every tensor. values:
    `randn` as a quantiser rounds them; small `integer_exact` numbers whose sums are exact; `onehot_exact` one lane a row
    and group; `powers` of two; `cancelling` sums far below their terms; `all_codes`; `nan_codes` one NaN in a row and one in a
    weight row; `zero_rows` with scale byte 0, as a quantiser leaves them. reach: rows of one tensor lie beyond 2^31.
    """

    op: ClassVar[str] = "quant.mxfp8_bmm"

    tokens: int = 17
    groups: int = 2
    rank: int = 32
    width: int = 1024
    form: Literal["block", "row"] = "block"
    scales: Literal["one", "near", "wide", "extreme"] = "near"
    layout: Literal["contiguous", "strided"] = "contiguous"
    values: Literal[
        "randn", "integer_exact", "onehot_exact", "powers", "cancelling", "all_codes", "nan_codes", "zero_rows",
    ] = "randn"  # fmt: skip
    reach: Literal["near", "far_rows", "far_weight", "far_out"] = "near"


CASE = BmmCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 3, 17, 64, 130, 520, 1000),
    "groups": (1, 2, 4, 8),
    "rank": (16, 32, 64, 128, 384),
    "width": (256, 512, 1024, 2048),
    "form": ("block", "row"),
    "scales": ("one", "near", "wide", "extreme"),
    "layout": ("contiguous", "strided"),
    "values": (
        "randn", "integer_exact", "onehot_exact", "powers", "cancelling", "all_codes", "nan_codes", "zero_rows",
    ),
    "reach": ("near",),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 2, 7, 16, 17, 33, 64, 65, 129, 257, 513, 1000),
    "groups": (1, 2, 3, 4, 8, 16),
    "width": (128, 256, 384, 512, 1024, 2048, 4096),
}

RANDOM_CASES = 12

_BASE = BmmCase()
REGRESSIONS: tuple[str, ...] = (
    # Either side of every edge of the tile table, with a weight that is just large enough.
    *(
        _BASE.varied(tokens=work, groups=1, rank=rank, width=width, layout="strided", values="integer_exact", scales="one").id
        for works, rank, width in (
            ((64, 65, 128), 32, 1024), ((129, 256, 257, 512), 32, 1024), ((513, 1024), 64, 512),
            ((1025, 2048, 2049, 3072), 64, 256), ((3073, 4096, 4097), 128, 256),
        )
        for work in works
    ),
    # The production shape of one rank of eight, a few tokens.
    _BASE.varied(tokens=6, groups=2, rank=128, width=4096, form="block", values="randn").id,
    _BASE.varied(tokens=6, groups=2, rank=128, width=4096, form="row", values="cancelling").id,
    # Rows beyond 2^31 elements from the first.
    _BASE.varied(tokens=17, groups=1, reach="far_rows").id,
    _BASE.varied(tokens=3, groups=1, reach="far_weight", form="row").id,
    _BASE.varied(tokens=17, groups=1, reach="far_out").id,
)  # fmt: skip

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(tokens=tokens, groups=2, rank=1024, width=4096).varied(form=form), arches=("gfx950",))
    for tokens, form in ((1, "block"), (64, "block"), (1000, "block"), (64, "row"), (1000, "row"))
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "tokens": (0, 1 << 17), "groups": (1, 64), "rank": (1, 8192), "width": (1, 1 << 15),
}  # fmt: skip


def tile_of(work: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and lanes of a tile, warps and stages for tokens times groups of work."""
    return next(tile for most, tile in TILES if most is None or work <= most)


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists: a tile spans whole groups of columns and lanes, a scale block one group."""
    assert isinstance(case, BmmCase)
    reasons = outside(case, _BOUNDS)
    _, columns, lanes, _, _ = tile_of(case.tokens * case.groups)
    if case.rank % columns:
        reasons.append(f"rank={case.rank}: should be a multiple of {columns}, the columns of a tile")
    if case.width % lanes:
        reasons.append(f"width={case.width}: should be a multiple of {lanes}, the lanes of a tile")
    if case.form == "block" and case.rank % LANES:
        reasons.append(f"form=block: needs rank={case.rank} to be a multiple of {LANES}")
    if case.values == "cancelling" and case.width % (2 * LANES):
        reasons.append("values=cancelling: needs two halves of whole scale blocks")
    if case.reach in ("far_rows", "far_out") and case.tokens < 3:
        reasons.append(f"reach={case.reach}: needs three tokens")
    if case.reach != "near" and case.layout == "strided":
        reasons.append(f"reach={case.reach}: says what lies between the rows, as layout=strided does")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it."""
    assert isinstance(case, BmmCase)
    return case.tokens * case.groups * case.rank * case.width > 1 << 26


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages whose unread codes are NaN and unread scales 255."""
    assert isinstance(case, BmmCase)
    draw = Draw(case.seed, case.op)
    rows = case.groups * case.rank
    a = _codes(case, draw.within("a"), (case.tokens, case.groups * case.width))
    weight = _codes(case, draw.within("weight"), (rows, case.width))
    if case.values == "cancelling":
        _cancel(case, draw, a, weight)
    a_scale, weight_scale = _scales(case, draw)
    if case.values == "onehot_exact":
        chosen = draw.integers("lane", (case.tokens, case.groups, 1), 0, case.width)
        a = torch.where(torch.arange(case.width) == chosen, a.unflatten(1, (case.groups, -1)), 0).flatten(1)
    elif case.values == "nan_codes":
        a[case.tokens // 2 :, case.width // 3][:1] = 0x7F
        weight[rows // 2, -1] = 0xFF
    elif case.values == "zero_rows":
        a[::2] &= 0x80
        a_scale[::2] = 0
        weight[::3] &= 0x80
        if case.form == "row":
            weight_scale[::3] = 0
    gap = 48 if case.layout == "strided" else 0
    row_gap = far_gap(case.tokens, a.shape[1]) if case.reach == "far_rows" else gap
    weight_gap = far_gap(rows, case.width) if case.reach == "far_weight" else gap
    out_gap = far_gap(case.tokens, rows) if case.reach == "far_out" else gap
    return Inputs(
        a=_stored(a, torch.float8_e4m3fn, row_gap),
        a_scale=_stored(a_scale, torch.uint8, gap // 4),
        weight=_stored(weight, torch.float8_e4m3fn, weight_gap),
        weight_scale=_stored(weight_scale, torch.uint8, gap // 4),
        groups=case.groups,
        rank=case.rank,
        out=guarded((case.tokens, rows), torch.bfloat16, gaps=(out_gap,)),
    )


def _stored(codes: torch.Tensor, dtype: torch.dtype, gap: int) -> torch.Tensor:
    view = guarded(codes.shape, dtype, gaps=(gap,), fill=0xFF)
    view.view(torch.uint8).copy_(codes)
    return view


def _codes(case: BmmCase, draw: Draw, shape: tuple[int, int]) -> torch.Tensor:
    """Codes as integers 0 to 255."""
    sign = draw.integers("sign", shape, 0, 2) << 7
    if case.values == "integer_exact":
        # 0 to 4.
        return torch.tensor([0x00, 0x38, 0x40, 0x44, 0x48])[draw.integers("number", shape, 0, 5)] | sign
    if case.values == "powers":
        return (draw.integers("power", shape, 1, 16) << 3) | sign
    if case.values == "all_codes":
        number = (torch.arange(shape[1]) + 37 * torch.arange(shape[0])[:, None]) % 254
        # 0x7F and 0xFF are left out.
        return number + (number >= 0x7F)
    if case.values == "randn":
        return (draw.normal_like("normal", shape) * 100).to(torch.float8_e4m3fn).view(torch.uint8).long()
    return draw.integers("code", shape, 0x20, 0x7E) | sign


def _cancel(case: BmmCase, draw: Draw, a: torch.Tensor, weight: torch.Tensor) -> None:
    """The second half of each slice repeats the first, a few lanes one code higher, and the weight turns the sign."""
    rows = a.unflatten(1, (case.groups, 2, case.width // 2))
    rows[:, :, 1] = rows[:, :, 0] + draw.chance("higher", rows[:, :, 0].shape, 1, 64)
    halves = weight.unflatten(1, (2, case.width // 2))
    halves[:, 1] = halves[:, 0] ^ 0x80


def _scales(case: BmmCase, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes of the rows and of the weight."""
    blocks = case.width // LANES
    group_rows = case.rank // LANES if case.form == "block" else case.rank
    a_shape, weight_shape = (case.tokens, case.groups, blocks), (case.groups, group_rows, blocks)
    if case.scales == "one":
        a, weight = torch.full(a_shape, 127), torch.full(weight_shape, 127)
    elif case.scales == "extreme":
        ends = torch.tensor([-127, -126, -64, 0, 64, 126, 127])
        power = ends[draw.integers("power", (case.groups, blocks), 0, len(ends))]
        a = (127 + power + draw.integers("a", a_shape, -1, 2)).clamp(0, 254)
        weight = (127 - power[:, None] + draw.integers("weight", weight_shape, -1, 2)).clamp(0, 254)
    else:
        reach = 40 if case.scales == "wide" else 5
        a = draw.integers("a", a_shape, 127 - reach, 128 + reach)
        weight = draw.integers("weight", weight_shape, 127 - reach, 128 + reach)
    if case.values == "cancelling":
        a[..., blocks // 2 :] = a[..., : blocks // 2]
        weight[..., blocks // 2 :] = weight[..., : blocks // 2]
    return a.flatten(1), weight.flatten(0, 1)
