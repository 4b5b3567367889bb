"""What do we ask of a cast between a wide number and the code of a small format?

`encode` rounds float32 or bfloat16 numbers to codes, to nearest with ties to even (E8M0 has no fraction: the middle of
two powers goes up; with rounding `up` everything between two powers does). `decode` gives the numbers of codes. Codes
are bytes, one a code; bfloat16 is its own code. See `oracle.formats.cast` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import GUARD_BYTES, guarded, guarded_copy
from cases.production import Served

Format = Literal["float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn", "bfloat16"]
Direction = Literal["encode", "decode"]
Overflow = Literal["saturate", "saturate_finite", "nan"]
RoundingRule = Literal["nearest", "up"]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: `out` receives the codes of `source`, or the numbers that the codes in `source` stand for.

    Codes are uint8 (of four-bit codes the low half counts and the high half is 0), or bfloat16. Numbers are float32 or
    bfloat16. `overflow` says what a number becomes whose rounding exceeds the largest: the largest, the largest unless
    it is infinite (then NaN), or NaN. E2M1 always saturates, bfloat16 goes to infinity.
    """

    source: Shaped[torch.Tensor, " count"]
    out: Shaped[torch.Tensor, " count"]
    format: Format
    direction: Direction
    overflow: Overflow
    rounding: RoundingRule


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The answer. Which NaN stands for NaN is free."""

    out: Shaped[torch.Tensor, " count"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastCase(Case):
    """The axes of a cast.

    count: elements. wide: the dtype of the numbers. values: `codes` exactly representable ones, or all codes; `ties`
    every middle between neighbouring codes with the wide numbers next to it; `subnormal` below the smallest normal
    number; `special` zeros of both signs, infinities and NaN; `beyond` round and past the largest; `wide` any bits but
    NaN and infinity. alignment: `odd` starts one element past an aligned address.
    """

    op: ClassVar[str] = "formats.cast"

    format: Literal["float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn", "bfloat16"] = "float8_e4m3fn"
    direction: Literal["encode", "decode"] = "encode"
    wide: Literal["float32", "bfloat16"] = "float32"
    overflow: Literal["saturate", "saturate_finite", "nan"] = "saturate"
    rounding: Literal["nearest", "up"] = "nearest"
    count: int = 1600
    values: Literal["randn", "codes", "ties", "subnormal", "special", "beyond", "wide"] = "ties"
    alignment: Literal["aligned", "odd"] = "aligned"


CASE = CastCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "format": ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn", "bfloat16"),
    "direction": ("encode", "decode"),
    "wide": ("float32", "bfloat16"),
    "overflow": ("saturate", "saturate_finite", "nan"),
    "rounding": ("nearest", "up"),
    "count": (0, 1, 7, 256, 1600),
    "values": ("randn", "codes", "ties", "subnormal", "special", "beyond", "wide"),
    "alignment": ("aligned", "odd"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"count": (0, 1, 7, 256, 1600, 65537, 400000)}

RANDOM_CASES = 30

REGRESSIONS: tuple[str, ...] = tuple(
    f"formats.cast:format={form},direction={direction},wide={wide},overflow=saturate,rounding={rounding},count={count},"
    f"values={values},alignment=aligned,seed=0"
    for form, direction, wide, rounding, count, values in (
        # Every tie of the two e4m3 formats, and every code of all formats.
        ("float8_e4m3fn", "encode", "float32", "nearest", 1600, "ties"),
        ("float8_e4m3fnuz", "encode", "float32", "nearest", 1600, "ties"),
        ("float8_e4m3fn", "encode", "bfloat16", "nearest", 1600, "ties"),
        ("float8_e4m3fn", "decode", "float32", "nearest", 256, "codes"),
        ("float8_e4m3fnuz", "decode", "float32", "nearest", 256, "codes"),
        ("float8_e8m0fnu", "decode", "float32", "nearest", 256, "codes"),
        ("float8_e8m0fnu", "encode", "float32", "up", 1600, "ties"),
        ("bfloat16", "encode", "float32", "nearest", 1600, "ties"),
    )
)

# Fraction bits, exponent bias, code of the largest number.

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CastCase(format=code, direction=direction, wide=wide, count=1 << 16, values="codes"))
    for code in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn", "bfloat16")
    for direction in ("encode", "decode")
    for wide in ("float32", "bfloat16")
    if not (code == "bfloat16" and wide == "bfloat16")
)

_LAYOUTS: Mapping[str, tuple[int, int, int]] = {
    "float8_e4m3fn": (3, 7, 0x7E),
    "float8_e4m3fnuz": (3, 8, 0x7F),
    "float4_e2m1fn": (1, 1, 0x7),
    "bfloat16": (7, 127, 0x7F7F),
}
_WIDE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


_BOUNDS: Mapping[str, tuple[int, int]] = {"count": (0, 1 << 24)}


def forbid(case: CastCase) -> list[str]:
    """Every reason why this is no question: a rule that the format does not have, or a cast that changes nothing."""
    reasons = outside(case, _BOUNDS)
    if case.format == "bfloat16" and case.wide == "bfloat16":
        reasons.append("format=bfloat16: wide should be float32, or nothing is cast")
    if case.rounding == "up" and (case.format != "float8_e8m0fnu" or case.direction != "encode"):
        reasons.append("rounding=up: only float8_e8m0fnu is encoded upwards")
    if case.overflow != "saturate" and (case.format in ("float4_e2m1fn", "bfloat16") or case.direction == "decode"):
        reasons.append(f"overflow={case.overflow}: should be saturate where the rule is fixed or nothing can overflow")
    if case.direction == "decode" and case.values not in ("codes", "special"):
        reasons.append(f"values={case.values}: codes are decoded from values=codes or special")
    return reasons


def heavy(case: CastCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.count > 100_000


def build(case: CastCase) -> Inputs:
    """The inputs of a case; numbers for E8M0 have no sign, and E2M1 is not asked for NaN, which it lacks."""
    draw = Draw(case.seed, case.op)
    code_dtype = torch.bfloat16 if case.format == "bfloat16" else torch.uint8
    if case.direction == "decode":
        codes = _codes(case, draw)
        source = (
            torch.from_numpy(codes.astype(np.int16)).view(torch.bfloat16)
            if case.format == "bfloat16"
            else torch.from_numpy(codes.astype(np.uint8))
        )
        out_dtype = _WIDE[case.wide]
    else:
        source = _numbers(case, draw)
        out_dtype = code_dtype
    shift = 1 if case.alignment == "odd" else 0
    return Inputs(
        source=guarded_copy(source, lead=GUARD_BYTES + shift * source.element_size()),
        out=guarded((case.count,), out_dtype, lead=GUARD_BYTES + shift * out_dtype.itemsize),
        format=case.format,
        direction=case.direction,
        overflow=case.overflow,
        rounding=case.rounding,
    )


def _chosen(pool: NDArray[np.int64], count: int, draw: Draw) -> NDArray[np.int64]:
    """`count` of the pool in drawn order; all of them, and again, when there are fewer."""
    order = draw.permutation("order", len(pool)).numpy()
    chosen: NDArray[np.int64] = pool[order][np.arange(count) % max(len(pool), 1)]
    return chosen


def _codes(case: CastCase, draw: Draw) -> NDArray[np.int64]:
    if case.format == "bfloat16":
        special = [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF]
        pool = np.arange(1 << 16) if case.values == "codes" else np.array(special)
        return _chosen(pool, case.count, draw)
    if case.values == "codes":
        return _chosen(np.arange(16 if case.format == "float4_e2m1fn" else 256), case.count, draw)
    if case.format == "float4_e2m1fn":
        return _chosen(np.array([0, 8, 1, 7, 15]), case.count, draw)
    return _chosen(np.array([0, 0x80, 0x7F, 0xFF, 0x7E, 0xFE, 1, 0x81, 8, 0x88]), case.count, draw)


def _bits(values: NDArray[np.float64], wide: str) -> NDArray[np.int64]:
    """The bit patterns of numbers that are exact in the wide dtype."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return bits >> 16 if wide == "bfloat16" else bits


def _typed(bits: NDArray[np.int64], wide: str) -> torch.Tensor:
    if wide == "bfloat16":
        return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def _magnitudes(case: CastCase) -> NDArray[np.float64]:
    """All non-negative numbers of the format, ascending; of E8M0, the powers of two that float32 holds."""
    if case.format == "float8_e8m0fnu":
        return np.ldexp(np.ones(254), np.arange(-126, 128))
    fraction, bias, largest = _LAYOUTS[case.format]
    codes = np.arange(largest + 1)
    exponent, part = codes >> fraction, codes & ((1 << fraction) - 1)
    magnitudes: NDArray[np.float64] = np.ldexp(
        part + (exponent > 0) * float(1 << fraction), np.maximum(exponent, 1) - bias - fraction
    )
    return magnitudes


def _middles(magnitudes: NDArray[np.float64]) -> NDArray[np.float64]:
    middles: NDArray[np.float64] = (magnitudes[:-1] + magnitudes[1:]) / 2
    return middles


def _numbers(case: CastCase, draw: Draw) -> torch.Tensor:
    magnitudes = _magnitudes(case)
    largest = float(magnitudes[-1])
    top_bits = 0x7F7F if case.wide == "bfloat16" else 0x7F7FFFFF
    infinity = 0x7F80 if case.wide == "bfloat16" else 0x7F800000
    sign = infinity + (1 << (7 if case.wide == "bfloat16" else 23))
    signed = case.format != "float8_e8m0fnu"
    if case.values == "randn":
        normal = draw.normal_like("normal", (case.count,))
        scale = 64.0 if case.format in ("float8_e4m3fn", "float8_e4m3fnuz") else 1.0
        values = (normal * scale).to(_WIDE[case.wide])
        return values if signed else values.abs()
    if case.values == "wide":
        pool = draw.integers("bits", (case.count,), 0, top_bits + 1).numpy()
    elif case.values == "special":
        nan = [] if case.format == "float4_e2m1fn" else [infinity + 1, sign - 1]
        one = int(_bits(np.array([1.0]), case.wide)[0])
        pool = _chosen(np.array([0, 1, one, top_bits, infinity, *nan]), case.count, draw)
    else:
        if case.values == "codes":
            exact = magnitudes
        elif case.values == "ties":
            exact = np.concatenate((magnitudes, _middles(magnitudes)))
        elif case.values == "subnormal":
            fraction, bias, _ = _LAYOUTS.get(case.format, (0, 127, 0))
            small = magnitudes[magnitudes < 2.0 ** (2 - bias)]
            exact = np.concatenate((small, _middles(small), small[1:] / 4, [2.0**-126, 2.0**-130, 0.0]))
            del fraction
        else:
            step = largest - float(magnitudes[-2])
            top = np.array(
                [largest - step / 2, largest, largest + step / 4, largest + step / 2, largest + step, largest * 2]
            )
            limit = float(np.finfo(np.float32).max)
            exact = np.minimum(np.concatenate((top, largest * 2.0 ** np.arange(2, 40))), limit)
        if case.wide == "bfloat16":
            exact = exact[_exact_in_bfloat16(exact)]
        bits = _bits(exact, case.wide)
        if case.values != "codes":
            bits = np.concatenate((bits - 1, bits, bits + 1))
            bits = bits[(bits >= 0) & (bits <= top_bits)]
        pool = _chosen(bits, case.count, draw)
    if signed:
        pool = pool + sign * draw.integers("sign", (case.count,), 0, 2).numpy()
    return _typed(pool, case.wide)


def _exact_in_bfloat16(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    single = values.astype(np.float32)
    exact: NDArray[np.bool_] = (single.view(np.uint32) & 0xFFFF) == 0
    return exact
