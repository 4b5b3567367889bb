"""What do we ask of the dequantisation of an output projection's weight that is kept for later calls?

A module carries a weight, perhaps in fp8 with a scale for each block of rows and columns under one of two names. The
answer is its bfloat16 weight, made once, and its scales as exponent bytes where they can be had without rounding. See
`oracle.quant.wo_a_dequant` for the formulas.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float, Int64, Shaped, UInt8

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

# Numbers that no block scale holds: a reader of the wrong tensor is far off.
_DECOYS: Mapping[str, int] = {"float8_e8m0fnu": 140, "uint8": 140, "float32": 0}


@dataclasses.dataclass(frozen=True)
class Projection:
    """What a module carries.

    A scale tensor holds a number for each block of rows and columns: fp32, or the exponents of powers of two as
    float8_e8m0fnu or as uint8. per_block_scheme says that the block scale goes by the name `weight_scale` even where
    there is a `weight_scale_inv`.
    """

    weight: Float[torch.Tensor, "groups*rank width"]
    weight_scale_inv: Shaped[torch.Tensor, "groups*row_blocks column_blocks"] | None
    weight_scale: Shaped[torch.Tensor, "groups*row_blocks column_blocks"] | None
    per_block_scheme: bool


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Three calls: for `module`, for the same module once its weight is `changed`, and for `other`.

    The last strides are 1. Row and column blocks divide rank and width.
    """

    module: Projection
    changed: Float[torch.Tensor, "groups*rank width"]
    other: Projection
    groups: int
    rank: int
    width: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The weight of the first call, whether the second returned the very same object (1) or another (0), the weight of
    the third. Which NaN stands for a NaN is free where something was dequantised.

    powers: 1 where the module's scales are powers of two, whose bytes are `exponents`; 0 where they are not; None from an
    implementation that does not say, and without a scale.
    """

    first: BFloat16[torch.Tensor, "groups rank width"]
    kept: Int64[torch.Tensor, " 1"]
    other: BFloat16[torch.Tensor, "groups rank width"]
    powers: Int64[torch.Tensor, " 1"] | None = None
    exponents: UInt8[torch.Tensor, "groups*row_blocks column_blocks"] | None = None


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantCase(Case):
    """The axes of the dequantisation.

    groups, rank, width: the weight. block_rows, block_columns: what a scale stands for. weight, scale: dtypes; a scale
    beside a bfloat16 weight is left from before. name: `inverse` is weight_scale_inv, `plain` weight_scale; with
    `inverse_of_both` and `plain_of_both` the other name holds a decoy. scales: `ends` has the smallest and the largest
    scales among others; of fp32, `powers` are powers of two, and `powers_but_one` has one that is none, or none that a
    byte holds. values: the codes; `ties` lie half-way between bfloat16 numbers once scaled.
    layout: `strided` leaves gaps behind the rows.
    """

    op: ClassVar[str] = "quant.wo_a_dequant"

    groups: int = 2
    rank: int = 64
    width: int = 128
    block_rows: int = 32
    block_columns: int = 32
    weight: Literal["float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"] = "float8_e4m3fn"
    scale: Literal["none", "float8_e8m0fnu", "uint8", "float32"] = "uint8"
    name: Literal["inverse", "plain", "inverse_of_both", "plain_of_both"] = "inverse"
    scales: Literal["near", "ends", "powers", "powers_but_one"] = "near"
    values: Literal["random", "all_codes", "nan_codes", "ties"] = "random"
    layout: Literal["contiguous", "strided"] = "contiguous"


CASE = DequantCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "groups": (1, 2, 3),
    "rank": (32, 96, 128),
    "width": (64, 128, 384),
    "block_rows": (1, 32, 128),
    "block_columns": (32, 64, 128),
    "weight": ("float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"),
    "scale": ("none", "float8_e8m0fnu", "uint8", "float32"),
    "name": ("inverse", "plain", "inverse_of_both", "plain_of_both"),
    "scales": ("near", "ends", "powers", "powers_but_one"),
    "values": ("random", "all_codes", "nan_codes", "ties"),
    "layout": ("contiguous", "strided"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "groups": (1, 2, 3, 8),
    "rank": (32, 96, 128, 640),
    "width": (64, 128, 384, 1024),
}

RANDOM_CASES = 20

_BASE = DequantCase()
REGRESSIONS: tuple[str, ...] = (
    # The bytes 0 and 255 mean different numbers in the two forms of an exponent.
    _BASE.varied(scale="float8_e8m0fnu", scales="ends", values="all_codes").id,
    _BASE.varied(scale="uint8", scales="ends", values="all_codes").id,
    # A weight that was dequantised before keeps its scale.
    _BASE.varied(weight="bfloat16", scale="uint8", name="plain").id,
    # Each kind of number that is no power of two, or that no byte holds.
    *(_BASE.varied(scale="float32", scales="powers_but_one", seed=seed).id for seed in range(12)),
    # A product that fp32 rounds before bfloat16 does.
    _BASE.varied(scale="float32", values="ties", block_rows=1).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(groups=2, rank=1024, width=4096, block_rows=128, block_columns=128, scale="float8_e8m0fnu")),
    Served(CASE(groups=2, rank=1024, width=4096, block_rows=128, block_columns=128, scale="float32")),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "groups": (1, 64), "rank": (1, 8192), "width": (1, 1 << 15), "block_rows": (1, 8192), "block_columns": (1, 1 << 15),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists: blocks divide the weight, and only a scale has a name."""
    assert isinstance(case, DequantCase)
    reasons = outside(case, _BOUNDS)
    if reasons:
        return reasons
    if case.rank % case.block_rows:
        reasons.append(f"rank={case.rank}: should be a multiple of block_rows={case.block_rows}")
    if case.width % case.block_columns:
        reasons.append(f"width={case.width}: should be a multiple of block_columns={case.block_columns}")
    if case.scale == "none" and (case.name != "inverse" or case.scales != "near"):
        reasons.append("scale=none: there is no scale to be named or drawn")
    if case.scales in ("powers", "powers_but_one") and case.scale != "float32":
        reasons.append(f"scales={case.scales}: only scale=float32 can be anything else")
    if case.values == "ties" and case.scales in ("powers", "powers_but_one"):
        reasons.append(f"scales={case.scales}: there are no ties under powers of two")
    if case.values == "ties" and (case.scale != "float32" or case.weight == "bfloat16"):
        reasons.append("values=ties: needs codes under scale=float32")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it."""
    assert isinstance(case, DequantCase)
    return case.groups * case.rank * case.width > 1 << 22


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages."""
    assert isinstance(case, DequantCase)
    draw = Draw(case.seed, case.op)
    return Inputs(
        module=_projection(case, draw.within("module")),
        changed=_weight(case, draw.within("changed")),
        other=_projection(case, draw.within("other")),
        groups=case.groups,
        rank=case.rank,
        width=case.width,
    )


def _projection(case: DequantCase, draw: Draw) -> Projection:
    scale = None if case.scale == "none" else _scale(case, draw)
    decoy = None
    if scale is not None and case.name in ("inverse_of_both", "plain_of_both"):
        number = _DECOYS[case.scale]
        decoy = guarded(scale.shape, scale.dtype)
        (decoy if case.scale == "float32" else decoy.view(torch.uint8)).fill_(number)
    inverse = case.name in ("inverse", "inverse_of_both")
    return Projection(
        weight=_weight(case, draw),
        weight_scale_inv=scale if inverse else decoy,
        weight_scale=decoy if inverse else scale,
        per_block_scheme=case.name == "plain_of_both",
    )


def _weight(case: DequantCase, draw: Draw) -> torch.Tensor:
    shape = (case.groups * case.rank, case.width)
    gaps = (24,) if case.layout == "strided" else ()
    if case.weight == "bfloat16":
        patterns = draw.integers("patterns", shape, -0x8000, 0x8000)
        if case.values != "nan_codes":
            # The exponents of numbers, not of infinities and NaN.
            patterns = torch.where(patterns & 0x7F80 == 0x7F80, patterns ^ 0x4000, patterns)
        view = guarded(shape, torch.bfloat16, gaps=gaps)
        view.view(torch.int16).copy_(patterns)
        return view
    nan = (0x80,) if case.weight == "float8_e4m3fnuz" else (0x7F, 0xFF)
    pool = torch.tensor([code for code in range(256) if code not in nan or case.values == "nan_codes"])
    if case.values == "ties":
        # 1, 1.125, 1.25 and their negatives, of either bias.
        pool = torch.tensor([0x38, 0x39, 0x3A, 0xB8, 0xB9, 0xBA])
    codes = pool[draw.integers("codes", shape, 0, len(pool))]
    if case.values == "all_codes":
        codes = pool[(torch.arange(shape[1]) + 37 * torch.arange(shape[0])[:, None]) % len(pool)]
    view = guarded(shape, getattr(torch, case.weight), gaps=gaps)
    view.view(torch.uint8).copy_(codes)
    return view


def _scale(case: DequantCase, draw: Draw) -> torch.Tensor:
    shape = (case.groups * case.rank // case.block_rows, case.width // case.block_columns)
    gaps = (7,) if case.layout == "strided" else ()
    number = draw.integers("number", shape, 0, 1 << 23)
    if case.scale == "float32":
        if case.values == "ties":
            # Times 1.125, the mantissa comes within an fp32 step of half-way between two bfloat16 numbers.
            middle = (2 * draw.integers("middle", shape, 145, 255) + 1) << 15
            number = (8 * middle + 4) // 9 - (1 << 23)
        exponent = draw.integers("exponent", shape, 110, 140)
        if case.scales == "ends":
            exponent = torch.tensor([0, 1, 127, 254])[draw.integers("end", shape, 0, 4)]
        if case.scales in ("powers", "powers_but_one"):
            return guarded_copy(_powers(case, draw, shape), gaps=gaps)
        bits = number | exponent << 23 | draw.integers("sign", shape, 0, 2) << 31
        return guarded_copy(bits.to(torch.int32), gaps=gaps, fill=0xFF).view(torch.float32)
    bytes_ = draw.integers("byte", shape, 115, 135)
    if case.scales == "ends":
        bytes_ = torch.tensor([0, 1, 2, 9, 127, 246, 253, 254, 255])[draw.integers("end", shape, 0, 9)]
    return guarded_copy(bytes_.to(torch.uint8), gaps=gaps, fill=0xFF).view(getattr(torch, case.scale))


def _powers(case: DequantCase, draw: Draw, shape: tuple[int, int]) -> torch.Tensor:
    """Powers of two from 2^-127, a subnormal number, to 2^127; with `powers_but_one`, one number of another kind."""
    exponent = draw.integers("power", shape, -127, 128)
    ends = draw.integers("place", (2,), 0, exponent.numel())
    exponent.view(-1)[ends] = torch.tensor([-127, 127])
    numbers = torch.ldexp(torch.ones(shape, dtype=torch.float64), exponent).float()
    if case.scales == "powers_but_one":
        # Beside a power on either side, below all of them, no positive number, no number.
        others = [1 + 2.0**-23, 1 - 2.0**-24, 2.0**-128, 2.0**-149, 0.0, -1.0, float("inf"), float("nan")]
        numbers.view(-1)[ends[0]] = others[int(draw.integers("other", (1,), 0, len(others)))]
    return numbers
