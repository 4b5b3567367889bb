"""What do we ask of the grouped product of attention rows with an output projection's weight?

The heads of a row form groups, those of one group one behind the other, and each group meets a weight of its own. Rows
may owe an inverse rotation before. See `oracle.quant.wo_a_einsum` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float, Float32, Int

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy, with_one_nan
from cases.production import Served
from cases.quant.wo_a_dequant import Projection
from cases.rotation import draw_positions, draw_table

ROTARY = 64


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: rows that `inverse_rope` asks to be turned back by the angles of `cos_sin` at their positions first.

    The last strides of all tensors are 1, the others are free. Rows that are not turned are bfloat16. Without a rotation
    the positions name no row of the table.
    """

    rows: Float[torch.Tensor, "tokens heads head_dim"]
    positions: Int[torch.Tensor, " tokens"]
    cos_sin: Float32[torch.Tensor, "positions 64"]
    inverse_rope: bool
    module: Projection
    groups: int
    rank: int

    @property
    def width(self) -> int:
        """Lanes of one group of a row."""
        return self.rows.shape[1] // self.groups * self.rows.shape[2]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The product, in memory of its own."""

    out: BFloat16[torch.Tensor, "tokens groups rank"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EinsumCase(Case):
    """The axes of the product.

    tokens, groups, group_heads, head_dim, rank: the shape. rotation: `none`, or the angles. weight: bfloat16, or e4m3fn
    codes with an exponent byte for blocks of 32 rows and lanes. values: `integer_exact` small numbers whose sums are
    exact, `onehot_exact` one lane a row and group, `cancelling` sums far below their terms, `nan_lane` one NaN.
    layout: `strided` leaves gaps after heads and rows. reach: rows lie beyond 2^31 elements from the first.
    """

    op: ClassVar[str] = "quant.wo_a_einsum"

    tokens: int = 3
    groups: int = 2
    group_heads: int = 2
    head_dim: int = 512
    rank: int = 32
    rotation: Literal["none", "spread", "quarter", "small"] = "spread"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    integers: Literal["int32", "int64"] = "int64"
    weight: Literal["bfloat16", "float8_e4m3fn"] = "bfloat16"
    values: Literal["randn", "integer_exact", "onehot_exact", "cancelling", "nan_lane"] = "randn"
    layout: Literal["contiguous", "strided"] = "contiguous"
    reach: Literal["near", "far"] = "near"


CASE = EinsumCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 2, 7, 17),
    "groups": (1, 2, 3, 4),
    "group_heads": (1, 2, 5, 8),
    "head_dim": (96, 512),
    "rank": (16, 32, 40, 96),
    "rotation": ("none", "spread", "quarter", "small"),
    "dtype": ("bfloat16", "float32"),
    "integers": ("int32", "int64"),
    "weight": ("bfloat16", "float8_e4m3fn"),
    "values": ("randn", "integer_exact", "onehot_exact", "cancelling", "nan_lane"),
    "layout": ("contiguous", "strided"),
    "reach": ("near",),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 2, 7, 16, 17, 65),
    "groups": (1, 2, 3, 4, 8, 16),
    "rank": (1, 16, 32, 40, 96, 256),
}

RANDOM_CASES = 20

_BASE = EinsumCase()
REGRESSIONS: tuple[str, ...] = (
    # A call without rows returns an empty product.
    _BASE.varied(tokens=0).id,
    _BASE.varied(tokens=0, rotation="none").id,
    # The production shape of a group.
    _BASE.varied(group_heads=8, rank=96, tokens=7).id,
    _BASE.varied(group_heads=8, rank=96, tokens=7, weight="float8_e4m3fn", rotation="none", values="cancelling").id,
    # Rows beyond 2^31 elements from the first.
    _BASE.varied(reach="far").id,
    _BASE.varied(reach="far", rotation="none").id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(tokens=tokens, groups=2, group_heads=8, head_dim=512, rank=1024, weight=weight))
    for tokens in (1, 64)
    for weight in ("bfloat16", "float8_e4m3fn")
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "tokens": (0, 1 << 16), "groups": (1, 64), "group_heads": (1, 128), "head_dim": (ROTARY + 2, 4096), "rank": (1, 8192),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, EinsumCase)
    reasons = outside(case, _BOUNDS)
    if case.dtype == "float32" and case.rotation == "none":
        reasons.append("dtype=float32: rows that are not turned should be bfloat16")
    if case.weight == "float8_e4m3fn" and (case.rank % 32 or case.head_dim % 32):
        reasons.append("weight=float8_e4m3fn: needs rank and head_dim to be multiples of 32, as its blocks")
    if case.values == "cancelling" and case.group_heads % 2 and case.head_dim % 2:
        reasons.append("values=cancelling: needs pairs of lanes")
    if case.reach == "far" and (case.tokens < 3 or case.dtype == "float32" or case.layout == "strided"):
        reasons.append("reach=far: needs three tokens of bfloat16, and says what lies between them")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it."""
    assert isinstance(case, EinsumCase)
    return case.tokens * case.groups * case.group_heads * case.head_dim * case.rank > 1 << 25


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages whose unread floats are NaN."""
    assert isinstance(case, EinsumCase)
    draw = Draw(case.seed, case.op)
    rows, weight = _numbers(case, draw)
    integer = torch.int32 if case.integers == "int32" else torch.int64
    positions = draw_positions(draw, case.tokens, integer)
    turns = "spread" if case.rotation == "none" else case.rotation
    table = draw_table(draw, turns, ROTARY, positions)
    if case.rotation == "none":
        positions = torch.full_like(positions, -(1 << 31))
    heads = case.groups * case.group_heads
    gaps: tuple[int, ...] = (40, 8) if case.layout == "strided" else ()
    if case.reach == "far":
        gaps = (far_gap(case.tokens, heads * case.head_dim),)
    stored = guarded((case.tokens, heads, case.head_dim), getattr(torch, case.dtype), gaps=gaps)
    stored.copy_(rows.view(stored.shape))
    with_one_nan(stored)
    return Inputs(
        rows=stored,
        positions=guarded_copy(positions),
        cos_sin=guarded_copy(table, gaps=(6,) if case.layout == "strided" else ()),
        inverse_rope=case.rotation != "none",
        module=_module(case, draw, weight),
        groups=case.groups,
        rank=case.rank,
    )


def _numbers(case: EinsumCase, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, groups, width] and weight [groups * rank, width] in fp32; e4m3 holds the weight where it must."""
    width = case.group_heads * case.head_dim
    row_shape, weight_shape = (case.tokens, case.groups, width), (case.groups * case.rank, width)
    if case.values == "integer_exact":
        return draw.integers("rows", row_shape, -4, 5).float(), draw.integers("weight", weight_shape, -4, 5).float()
    rows = draw.normal_like("rows", row_shape)
    weight = draw.normal_like("weight", weight_shape)
    if case.values == "onehot_exact":
        lane = draw.integers("lane", (case.tokens, case.groups, 1), 0, width)
        rows = torch.where(torch.arange(width) == lane, rows, 0.0)
    elif case.values == "cancelling":
        # Neighbouring lanes of weight and row repeat; those of the weight change sign, those of a row almost agree.
        rows[..., 1::2] = rows[..., 0::2] * (1 + draw.integers("off", (width // 2,), -1, 2) * 2.0**-6)
        weight[:, 1::2] = -weight[:, 0::2]
    elif case.values == "nan_lane" and case.tokens:
        rows[case.tokens // 2, -1, width // 3] = float("nan")
    if case.weight == "float8_e4m3fn":
        weight = weight.to(torch.float8_e4m3fn).float()
    return rows, weight


def _module(case: EinsumCase, draw: Draw, weight: torch.Tensor) -> Projection:
    gaps = (24,) if case.layout == "strided" else ()
    if case.weight == "bfloat16":
        # A scale that was left behind when the weight was dequantised.
        left = guarded((case.groups, 1), torch.uint8)
        left.fill_(131)
        return Projection(guarded_copy(weight.to(torch.bfloat16), gaps=gaps), None, left, False)
    codes = guarded(weight.shape, torch.float8_e4m3fn, gaps=gaps)
    codes.copy_(weight.to(torch.float8_e4m3fn))
    shape = (weight.shape[0] // 32, weight.shape[1] // 32)
    exponents = torch.full(shape, 127) if case.values == "integer_exact" else draw.integers("scale", shape, 121, 130)
    return Projection(codes, guarded_copy(exponents.to(torch.uint8), fill=0xFF), None, False)
