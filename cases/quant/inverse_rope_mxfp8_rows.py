"""What do we ask of the rotation that undoes a rotary embedding on attention rows and quantises them to MXFP8?

For rows of a layer whose output projection takes MXFP8 and which no kernel rotated and quantised in its epilogue. See
`oracle.quant.inverse_rope_mxfp8_rows` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float, Float32, Int, UInt8

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.quant.mxfp8_rows import BLOCK, values_of
from cases.rotation import POSITIONS, draw_positions, draw_table

_INTEGERS: Mapping[str, torch.dtype] = {"int32": torch.int32, "int64": torch.int64}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: rows `finished` and up are turned back, and their codes and scales written behind those of the others.

    rows: any strides of rows and heads, lane stride 1. positions: row of `cos_sin` for each row. cos_sin: cosines,
    then sines, of the pairs that the last lanes form. codes: head after head. scales: 32 lanes each, in the order of
    the codes. Both are parts of wider buffers, so that only their lane stride is 1. What the first `finished` rows of
    them hold stays.
    """

    rows: BFloat16[torch.Tensor, "tokens heads head_dim"]
    positions: Int[torch.Tensor, " tokens"]
    cos_sin: Float32[torch.Tensor, "positions rotary"]
    codes: Float[torch.Tensor, "tokens heads*head_dim"]
    scales: UInt8[torch.Tensor, "tokens heads*head_dim/32"]
    finished: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Codes, float8_e4m3fn, and scale bytes after the call. The sign of a zero code is free."""

    codes: Float[torch.Tensor, "tokens heads*head_dim"]
    scales: UInt8[torch.Tensor, "tokens heads*head_dim/32"]


WRITABLE: tuple[str, ...] = ("codes", "scales")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotateQuantiseCase(Case):
    """The axes of the rotation with quantisation.

    tokens, heads: rows and heads. head_dim, rotary: lanes of a head, and those at its end that turn; 512 and 64 in
    production. finished: rows in front that have codes already. turns: `quarter` uses only quarter turns, exact in any
    precision; `small` angles below 2^-9. layout: how rows and heads of the source lie, `heads_first` being a transposed
    view. codes_layout, scales_layout: `sliced` rows are parts of wider ones. table: `strided` leaves gaps between
    positions. positions: `strided` ones lie two apart. reach: which operand has rows beyond 2^31 elements. values: as
    of `cases.quant.mxfp8_rows`, drawn before the rotation; `lanes` each lane's own number.
    """

    op: ClassVar[str] = "quant.inverse_rope_mxfp8_rows"

    tokens: int = 7
    heads: int = 3
    head_dim: int = 512
    rotary: int = 64
    finished: int = 0
    integer: Literal["int32", "int64"] = "int64"
    turns: Literal["spread", "quarter", "small"] = "spread"
    layout: Literal["contiguous", "strided_rows", "strided_heads", "heads_first"] = "contiguous"
    codes_layout: Literal["contiguous", "sliced"] = "contiguous"
    scales_layout: Literal["contiguous", "sliced"] = "contiguous"
    table: Literal["contiguous", "strided"] = "contiguous"
    positions: Literal["contiguous", "strided"] = "contiguous"
    reach: Literal["near", "far_rows", "far_codes", "far_scales"] = "near"
    values: Literal[
        "randn", "lanes", "zeros", "negative_zero", "amax_edge", "outlier", "negative", "ties", "subnormal", "wide"
    ] = "randn"


CASE = RotateQuantiseCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 2, 7),
    "heads": (1, 3, 8, 17),
    "head_dim": (512, 128, 64),
    "rotary": (64, 32, 6, 2),
    "finished": (0, 1, 5),
    "integer": ("int32", "int64"),
    "turns": ("spread", "quarter", "small"),
    "layout": ("contiguous", "strided_rows", "strided_heads", "heads_first"),
    "codes_layout": ("contiguous", "sliced"),
    "scales_layout": ("contiguous", "sliced"),
    "table": ("contiguous", "strided"),
    "positions": ("contiguous",),
    "reach": ("near",),
    "values": (
        "randn", "lanes", "zeros", "negative_zero", "amax_edge", "outlier", "negative", "ties", "subnormal", "wide",
    ),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"tokens": (0, 1, 2, 7, 17, 129), "heads": (1, 3, 8, 17, 128)}

RANDOM_CASES = 20

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "tokens": (0, 1 << 16),
    "heads": (1, 1 << 10),
    "head_dim": (BLOCK, 1 << 12),
    "rotary": (2, 1 << 10),
    "finished": (0, 1 << 16),
}

_BASE = RotateQuantiseCase()
REGRESSIONS: tuple[str, ...] = (
    # What the layer asks for: the rows of prefill behind those of decode, into one buffer.
    _BASE.varied(finished=3, codes_layout="sliced", scales_layout="sliced").id,
    # Rows of zeros, as padding has.
    _BASE.varied(values="zeros").id,
    _BASE.varied(values="amax_edge", turns="quarter", tokens=17).id,
    # Rows that no 32-bit product of row and stride reaches.
    _BASE.varied(tokens=3, reach="far_rows").id,
    _BASE.varied(tokens=3, reach="far_codes").id,
    _BASE.varied(tokens=3, reach="far_scales").id,
    # A column of a larger array of positions.
    _BASE.varied(positions="strided").id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(tokens=64, heads=heads, head_dim=512), arches=("gfx950",)) for heads in (16, 64, 128)
)


def forbid(case: RotateQuantiseCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.rotary % 2:
        reasons.append(f"rotary={case.rotary}: should be even, lanes turn in pairs")
    if case.head_dim % BLOCK:
        reasons.append(f"head_dim={case.head_dim}: should be a multiple of {BLOCK}")
    if case.rotary >= case.head_dim:
        reasons.append(f"rotary={case.rotary}: should be less than head_dim={case.head_dim}")
    if case.finished > case.tokens:
        reasons.append(f"finished={case.finished}: should be at most tokens={case.tokens}")
    if case.tokens <= case.finished and case.values != "randn":
        reasons.append(f"values={case.values}: should be randn where no row turns")
    if case.reach != "near":
        if case.tokens < 3:
            reasons.append(f"reach={case.reach}: should be near for fewer than 3 rows")
        if case.layout != "contiguous" or case.codes_layout != "contiguous" or case.scales_layout != "contiguous":
            reasons.append(f"reach={case.reach}: should be near for other than contiguous layouts")
    return reasons


def heavy(case: RotateQuantiseCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.tokens * case.heads > 600


def build(case: RotateQuantiseCase) -> Inputs:
    """The inputs of a case: rows of the table that nobody reads are NaN."""
    draw = Draw(case.seed, case.op)
    tokens, heads, lanes = case.tokens, case.heads, case.head_dim
    positions = draw_positions(draw, tokens, _INTEGERS[case.integer])
    table = draw_table(draw.within("table"), case.turns, case.rotary, positions)
    if case.reach == "far_rows":
        rows = guarded((tokens, heads, lanes), torch.bfloat16, gaps=(far_gap(tokens, heads * lanes), 0))
    elif case.layout == "heads_first":
        rows = guarded((heads, tokens, lanes), torch.bfloat16, gaps=(8, 0)).transpose(0, 1)
    else:
        gaps = {"contiguous": (0, 0), "strided_rows": (2 * lanes, 0), "strided_heads": (0, 6)}[case.layout]
        rows = guarded((tokens, heads, lanes), torch.bfloat16, gaps=gaps)
    rows.copy_(_values(case, draw.within("rows")))
    column = torch.stack((positions, (positions + 1) % POSITIONS), dim=1)
    return Inputs(
        rows=rows,
        # The other column holds positions too: whoever reads them turns by another angle.
        positions=guarded_copy(positions) if case.positions == "contiguous" else guarded_copy(column)[:, 0],
        cos_sin=guarded_copy(table, gaps=(case.rotary + 2,) if case.table == "strided" else ()),
        codes=_buffer(case, heads * lanes, torch.float8_e4m3fn, case.codes_layout, case.reach == "far_codes"),
        scales=_buffer(case, heads * lanes // BLOCK, torch.uint8, case.scales_layout, case.reach == "far_scales"),
        finished=case.finished,
    )


def _buffer(case: RotateQuantiseCase, width: int, dtype: torch.dtype, layout: str, far: bool) -> torch.Tensor:
    gap = far_gap(case.tokens, width) if far else {"contiguous": 0, "sliced": width + 16}[layout]
    return guarded((case.tokens, width), dtype, gaps=(gap,))


def _values(case: RotateQuantiseCase, draw: Draw) -> torch.Tensor:
    blocks = (case.tokens, case.heads, case.head_dim // BLOCK)
    if case.values == "lanes":
        # 7 bits for the lane within 64, so that every number is exact in bfloat16.
        lane = torch.arange(case.head_dim) % 64 + 1
        power = torch.ldexp(torch.ones(*blocks[:2], 1), draw.integers("power", (*blocks[:2], 1), -2, 3))
        return (lane * power).to(torch.bfloat16)
    rows = values_of(case.values, draw, blocks, torch.bfloat16)
    # Where a pair's lanes are near the largest number, their sum would be infinite.
    return rows.clamp(-1.6e38, 1.6e38)
