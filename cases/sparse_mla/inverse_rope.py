"""What do we ask of the rotation that undoes a rotary embedding on attention rows?

Keys are cached rotated and serve as values too, so the last lanes of an attention row come out rotated and owe one
inverse rotation at the query's position. See `oracle.sparse_mla.inverse_rope` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float, Float32, Int

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.rotation import POSITIONS, draw_positions, draw_table

_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_INTEGERS: Mapping[str, torch.dtype] = {"int32": torch.int32, "int64": torch.int64}
_PATTERNS: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: rows `rotated` and up are turned back by the angles of `cos_sin` at their positions.

    rows: bfloat16, float16 or float32 with any strides of rows and heads, lane stride 1; None when they lie in `out`
    and are turned in place. positions: row of `cos_sin` for each row. cos_sin: cosines, then sines, of the pairs that
    the last lanes form. out: where the answer goes, None for a new tensor. The first `rotated` rows have been turned
    already: nothing of `out` is written there, and a new tensor is asked for only where there are none.
    """

    rows: Float[torch.Tensor, "tokens heads head_dim"] | None
    positions: Int[torch.Tensor, " tokens"]
    cos_sin: Float32[torch.Tensor, "positions rotary"]
    out: BFloat16[torch.Tensor, "tokens heads head_dim"] | None
    rotated: int

    @property
    def source(self) -> torch.Tensor:
        """The rows before the call, wherever they lie; raises `ValueError` when there are neither rows nor an out."""
        source = self.out if self.rows is None else self.rows
        if source is None:
            raise ValueError("rows=None, out=None: should be rows, or an out that holds them")
        return source


@dataclasses.dataclass(frozen=True)
class Outputs:
    """All rows of `out` after the call, or the new tensor. Which NaN stands for NaN is free, and in the turned lanes the
    sign of zero."""

    out: BFloat16[torch.Tensor, "tokens heads head_dim"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotateCase(Case):
    """The axes of the inverse rotation.

    tokens, heads: rows and heads. nope, rotary: lanes of a head that stay, and those behind them that turn. form: a new
    tensor, a given one, or in place. rotated: rows in front that have been turned already. turns: `quarter` uses only
    quarter turns, exact in any precision; `small` angles below 2^-9. layout: how rows and heads of the source lie,
    `heads_first` being a transposed view. out_layout: the same of a given out. table: `strided` leaves gaps between
    positions. positions: `strided` ones lie two apart. reach: which of the operands has rows beyond 2^31 elements.
    values: `lanes` each lane's own number; `special` with NaN and infinity; `wide` any finite number; `huge` near the
    largest finite number; `cancelling` pairs whose even lane nearly vanishes; `ties` middles between bfloat16 numbers
    and their neighbours (of wider rows).
    """

    op: ClassVar[str] = "sparse_mla.inverse_rope"

    tokens: int = 7
    heads: int = 3
    nope: int = 448
    rotary: int = 64
    rows: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    form: Literal["new", "into", "in_place"] = "in_place"
    rotated: int = 0
    integer: Literal["int32", "int64"] = "int64"
    turns: Literal["spread", "quarter", "small"] = "spread"
    layout: Literal["contiguous", "strided_rows", "strided_heads", "heads_first"] = "contiguous"
    out_layout: Literal["contiguous", "strided_rows", "strided_heads", "heads_first"] = "contiguous"
    table: Literal["contiguous", "strided"] = "contiguous"
    positions: Literal["contiguous", "strided"] = "contiguous"
    reach: Literal["near", "far_rows", "far_out"] = "near"
    values: Literal["randn", "lanes", "negative_zero", "special", "subnormal", "wide", "huge", "cancelling", "ties"] = (
        "randn"
    )


CASE = RotateCase

_LAYOUTS = ("contiguous", "strided_rows", "strided_heads", "heads_first")

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 2, 7, 17),
    "heads": (1, 3, 8, 17),
    "nope": (448, 64, 5, 1),
    "rotary": (64, 32, 6, 2),
    "rows": ("bfloat16", "float16", "float32"),
    "form": ("new", "into", "in_place"),
    "rotated": (0, 1, 5),
    "integer": ("int32", "int64"),
    "turns": ("spread", "quarter", "small"),
    "layout": _LAYOUTS,
    "out_layout": _LAYOUTS,
    "table": ("contiguous", "strided"),
    "positions": ("contiguous",),
    "reach": ("near",),
    "values": ("randn", "lanes", "negative_zero", "special", "subnormal", "wide", "huge", "cancelling", "ties"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"tokens": (0, 1, 2, 7, 17, 129), "heads": (1, 3, 8, 17, 128)}

RANDOM_CASES = 20

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "tokens": (0, 1 << 16),
    "heads": (1, 1 << 10),
    "nope": (1, 1 << 12),
    "rotary": (2, 1 << 10),
    "rotated": (0, 1 << 16),
}

_BASE = RotateCase()
REGRESSIONS: tuple[str, ...] = (
    # What the layer asks for: the rows behind those of decode, in place.
    _BASE.varied(rotated=3).id,
    _BASE.varied(rotated=3, turns="quarter", values="lanes").id,
    # Rows that no 32-bit product of row and stride reaches.
    _BASE.varied(tokens=3, reach="far_rows").id,
    _BASE.varied(tokens=3, reach="far_rows", form="new").id,
    _BASE.varied(tokens=3, reach="far_out", form="into").id,
    # A column of a larger array of positions.
    _BASE.varied(positions="strided").id,
    _BASE.varied(rows="float32", form="new", values="cancelling").id,
    _BASE.varied(values="subnormal").id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(tokens=64, heads=heads, form=form)) for heads in (16, 128) for form in ("in_place", "new")
)


def forbid(case: RotateCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.rotary % 2:
        reasons.append(f"rotary={case.rotary}: should be even, lanes turn in pairs")
    if case.rotated > case.tokens:
        reasons.append(f"rotated={case.rotated}: should be at most tokens={case.tokens}")
    if case.form == "new" and case.rotated:
        reasons.append(f"rotated={case.rotated}: should be 0 where the answer is a new tensor")
    if case.form == "in_place" and case.rows != "bfloat16":
        reasons.append(f"rows={case.rows}: should be bfloat16 in place, as the answer is")
    if case.form != "into" and case.out_layout != "contiguous":
        reasons.append(f"out_layout={case.out_layout}: should be contiguous where no other out is given")
    if case.values == "ties" and case.rows == "bfloat16":
        reasons.append("values=ties: should be something else for bfloat16 rows, which hold no such numbers")
    if case.tokens <= case.rotated and case.values != "randn":
        reasons.append(f"values={case.values}: should be randn where no row turns")
    if case.reach != "near":
        if case.tokens < 3:
            reasons.append(f"reach={case.reach}: should be near for fewer than 3 rows")
        if case.layout != "contiguous" or case.out_layout != "contiguous":
            reasons.append(f"reach={case.reach}: should be near for other than contiguous layouts")
        if case.reach == "far_rows" and case.rows == "float32":
            reasons.append("reach=far_rows: should be near for float32 rows, which would take 8 GiB of addresses")
        if case.reach == "far_out" and case.form != "into":
            reasons.append("reach=far_out: should be far_rows where no other out is given")
    return reasons


def heavy(case: RotateCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.tokens * case.heads > 600


def build(case: RotateCase) -> Inputs:
    """The inputs of a case: an out full of NaN, rows of the table that nobody reads as well."""
    draw = Draw(case.seed, case.op)
    shape = (case.tokens, case.heads, case.nope + case.rotary)
    dtype = _DTYPES[case.rows]
    positions = draw_positions(draw, case.tokens, _INTEGERS[case.integer])
    table = draw_table(draw.within("table"), case.turns, case.rotary, positions)
    rows = _laid_out(shape, dtype, case.layout, far=case.reach == "far_rows")
    rows.copy_(_values(case, draw.within("rows"), table[positions.long()]))
    out = _laid_out(shape, torch.bfloat16, case.out_layout, far=case.reach == "far_out")
    return Inputs(
        rows=None if case.form == "in_place" else rows,
        positions=_one_or_two_apart(positions, case.positions),
        cos_sin=guarded_copy(table, gaps=(case.rotary + 2,) if case.table == "strided" else ()),
        out={"new": None, "into": out, "in_place": rows}[case.form],
        rotated=case.rotated,
    )


def _laid_out(shape: tuple[int, int, int], dtype: torch.dtype, layout: str, *, far: bool) -> torch.Tensor:
    tokens, heads, lanes = shape
    if far:
        return guarded(shape, dtype, gaps=(far_gap(tokens, heads * lanes), 0))
    if layout == "heads_first":
        return guarded((heads, tokens, lanes), dtype, gaps=(8, 0)).transpose(0, 1)
    gaps = {"contiguous": (0, 0), "strided_rows": (2 * lanes, 0), "strided_heads": (0, 6)}[layout]
    return guarded(shape, dtype, gaps=gaps)


def _one_or_two_apart(positions: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "contiguous":
        return guarded_copy(positions)
    # The other column holds positions too: whoever reads them turns by another angle, and stays inside the table.
    column = torch.stack((positions, (positions + 1) % POSITIONS), dim=1)
    return guarded_copy(column)[:, 0]


def _values(case: RotateCase, draw: Draw, turns: torch.Tensor) -> torch.Tensor:
    """The rows; `turns` is the table row of each token."""
    shape = (case.tokens, case.heads, case.nope + case.rotary)
    dtype = _DTYPES[case.rows]
    integer = _PATTERNS[dtype]
    info = torch.finfo(dtype)
    one = int(torch.tensor(1.0, dtype=dtype).view(integer))
    largest = int(torch.tensor(info.max, dtype=dtype).view(integer))
    binade = round(1 / info.eps)
    signs = draw.integers("sign", shape, 0, 2)
    signed = torch.where(signs > 0, -1.0, 1.0)

    def patterns(bits: torch.Tensor) -> torch.Tensor:
        magnitude = bits.to(integer).view(dtype)
        return torch.where(signs > 0, -magnitude, magnitude)

    if case.values in ("randn", "cancelling"):
        powers = torch.ldexp(torch.ones(shape), draw.integers("power", shape, -3, 4))
        rows = (draw.normal_like("normal", shape) * powers).to(dtype)
        if case.values == "cancelling":
            half = case.rotary // 2
            cos, sin = turns[:, None, :half].double(), turns[:, None, half:].double()
            even = rows[..., case.nope :: 2].double()
            partner = torch.where(sin.abs() > 2.0**-6, -even * cos / sin, even)
            rows[..., case.nope + 1 :: 2] = partner.to(dtype)
        return rows
    if case.values == "lanes":
        # 7 bits for the lane within 64, so that every number is exact in bfloat16.
        lane = torch.arange(shape[2]) % 64 + 1
        return (lane * torch.ldexp(torch.ones(shape), draw.integers("power", shape[:2], -2, 3)[..., None])).to(dtype)
    if case.values == "negative_zero":
        return (torch.zeros(shape) * signed).to(dtype)
    if case.values == "special":
        pool = torch.tensor([0.0, -0.0, 1.0, -1.0, info.max, float("inf"), -float("inf"), float("nan")])
        plain = draw.normal_like("normal", shape)
        picked = pool[draw.integers("pool", shape, 0, len(pool))]
        return torch.where(draw.chance("special", shape, 1, 3), picked, plain).to(dtype)
    if case.values == "subnormal":
        return patterns(draw.integers("bits", shape, 0, binade + binade // 8))
    if case.values == "wide":
        return patterns(draw.integers("bits", shape, 0, largest + 1))
    if case.values == "huge":
        return patterns(draw.integers("bits", shape, largest + 1 - 2 * binade, largest + 1))
    # Half of bfloat16's unit in the last place, exactly or one unit of the rows' own dtype beside it.
    step = binade // 128
    kept = draw.integers("bits", shape, one // step - 4 * 128, one // step + 4 * 128) * step
    return patterns(kept + step // 2 + draw.integers("beside", shape, -1, 2))
