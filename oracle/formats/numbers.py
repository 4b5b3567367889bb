"""What number does every code of a small format stand for, and which code does a number round to?

A code of a format with m fraction bits and bias B reads s eeee mmm:

    e == 0:  (-1)^s * mmm * 2^(1 - B - m)                   e >= 1:  (-1)^s * (1 + mmm / 2^m) * 2^(e - B)

OCP e4m3 ("e4m3fn", OCP 8-bit floating point specification): m = 3, B = 7, NaN is 0x7F and 0xFF, no infinity.
FNUZ e4m3 ("e4m3fnuz", AMD CDNA3): m = 3, B = 8, NaN is 0x80, no infinity and no negative zero.
E2M1 (OCP microscaling formats): m = 1, B = 1, four bits, no NaN. E8M0: the byte b is 2^(b - 127), 255 is NaN.
bfloat16: m = 7, B = 127, infinities and NaN as in IEEE 754.

Decoding is a table; encoding rounds to nearest, ties to the even code, in integer arithmetic on the bits of the number.
Neither uses a cast of torch to or from these formats: those are suspects.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

FormatName = Literal["float8_e4m3fn", "float8_e4m3fnuz", "float4_e2m1fn", "bfloat16"]
Encoding = Literal["float8_e4m3fn", "float8_e4m3fnuz"]
# What becomes of numbers whose rounding exceeds the largest number. `saturate`: all of them, infinity too, become the
# largest. `saturate_finite`: infinity becomes NaN. `nan`: all of them become NaN (bfloat16 has no such choice:
# infinity).
Overflow = Literal["saturate", "saturate_finite", "nan"]


@dataclass(frozen=True)
class Format:
    """The layout of a format: sign, exponent, fraction.

    bits: width of a code. fraction: fraction bits m. bias: exponent bias B. largest: the code of the largest number.
    infinity: the code of +infinity, or None. nan: every NaN code of positive or no sign, or None for a format without.
    signed_zero: whether -0 has a code.
    """

    bits: int
    fraction: int
    bias: int
    largest: int
    infinity: int | None
    nan: int | None
    signed_zero: bool

    @property
    def sign(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.bits - 1)

    @property
    def maximum(self) -> float:
        """The largest finite number."""
        return _magnitude(self, self.largest)

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal."""
        return _magnitude(self, 1)


FORMATS: dict[FormatName, Format] = {
    "float8_e4m3fn": Format(8, 3, 7, largest=0x7E, infinity=None, nan=0x7F, signed_zero=True),
    "float8_e4m3fnuz": Format(8, 3, 8, largest=0x7F, infinity=None, nan=0x80, signed_zero=False),
    "float4_e2m1fn": Format(4, 1, 1, largest=0x7, infinity=None, nan=None, signed_zero=True),
    "bfloat16": Format(16, 7, 127, largest=0x7F7F, infinity=0x7F80, nan=0x7FC0, signed_zero=True),
}

# The largest magnitude that writers of scaled data map onto: 448 is the OCP maximum; FNUZ writers use 224, not 240.
SCALED_MAXIMUM: dict[Encoding, float] = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0}

E8M0_BIAS = 127
E8M0_NAN = 255

# Sources: width of the fraction, exponent bias, dtype of the bits.
_SOURCES: dict[torch.dtype, tuple[int, int, torch.dtype]] = {
    torch.float32: (23, 127, torch.int32),
    torch.float64: (52, 1023, torch.int64),
}
_CHUNK = 1 << 20


def _magnitude(form: Format, code: int) -> float:
    exponent, fraction = code >> form.fraction, code & ((1 << form.fraction) - 1)
    if exponent == 0:
        return float(fraction) * 2.0 ** (1 - form.bias - form.fraction)
    return (1.0 + fraction / (1 << form.fraction)) * 2.0 ** (exponent - form.bias)


def is_nan_code(codes: torch.Tensor, format: FormatName) -> torch.Tensor:
    """bool: which codes (as `encode` returns them) are NaN, of either sign."""
    form = FORMATS[format]
    if form.nan is None:
        return torch.zeros_like(codes, dtype=torch.bool)
    if not form.signed_zero:
        return codes == form.nan
    magnitude = codes.to(torch.int32) & (form.sign - 1)
    return magnitude > (form.largest if form.infinity is None else form.infinity)


@cache
def _table(format: FormatName, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    form = FORMATS[format]
    numbers = [_magnitude(form, code) for code in range(form.sign)]
    if form.nan is not None and form.signed_zero:
        numbers[form.largest + 1 :] = [float("nan")] * (form.sign - form.largest - 1)
    negative = [-number for number in numbers]
    if not form.signed_zero:
        negative[0] = float("nan")
    # A byte decodes whatever its unused high bits: four-bit codes repeat.
    repeats = 256 >> form.bits
    return torch.tensor((numbers + negative) * repeats, dtype=dtype, device=device)


def decode(codes: torch.Tensor, format: FormatName, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that `codes` stand for, exactly, in float32 or float64.

    `codes` is uint8 (of four-bit codes the low half counts), or for bfloat16 the int16 bit patterns or a bfloat16
    tensor. NaN codes give NaN. Any device and stride; the result is contiguous. Raises `TypeError` for other dtypes.
    """
    if dtype not in _SOURCES:
        raise TypeError(f"decode to {dtype}: the numbers come in torch.float32 or torch.float64")
    if format == "bfloat16":
        bits = codes.view(torch.int16) if codes.dtype == torch.bfloat16 else codes
        if bits.dtype != torch.int16:
            raise TypeError(f"bfloat16 codes are torch.bfloat16 or torch.int16, not {codes.dtype}")
        return (bits.to(torch.int32) << 16).view(torch.float32).to(dtype)
    if codes.dtype != torch.uint8:
        raise TypeError(f"{format} codes are torch.uint8, not {codes.dtype}: view the bytes")
    table = _table(format, dtype, codes.device)
    if codes.numel() <= _CHUNK:
        return torch.index_select(table, 0, codes.to(torch.int32).reshape(-1)).view(codes.shape)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    flat, wide = codes.reshape(-1), out.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        index = flat[start : start + _CHUNK].to(torch.int32)
        torch.index_select(table, 0, index, out=wide[start : start + _CHUNK])
    return out


def encode(values: torch.Tensor, format: FormatName, overflow: Overflow = "saturate") -> torch.Tensor:
    """The codes that `values` round to: nearest, ties to the even code, one rounding whatever the source dtype.

    Subnormal results are kept. `values` is float32, float64, bfloat16 or float16, with NaN and infinity; the result is
    uint8, or int16 bit patterns for bfloat16. -0 and negative underflow keep their sign where the format has a -0 and
    give +0 where not. NaN becomes the NaN code with the sign of the source (bfloat16: 0x7FC0, sign dropped); for E2M1,
    which has none, the largest number of its sign. Infinity and numbers whose rounding exceeds the largest follow
    `overflow`, bfloat16 excepted, where they become infinity. E2M1 always saturates. Raises `TypeError` for other
    dtypes.
    """
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.to(torch.float32)
    if values.dtype not in _SOURCES:
        raise TypeError(f"encode from {values.dtype}: values are float32, float64, bfloat16 or float16")
    out = torch.empty(values.shape, dtype=torch.int16 if format == "bfloat16" else torch.uint8, device=values.device)
    flat, narrow = values.reshape(-1), out.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        narrow[start : start + _CHUNK] = _encode(flat[start : start + _CHUNK], FORMATS[format], overflow)
    return out


def _encode(values: torch.Tensor, form: Format, overflow: Overflow) -> torch.Tensor:
    fraction_bits, bias, integers = _SOURCES[values.dtype]
    bits = values.view(integers)
    magnitude = bits & ((1 << (8 * values.element_size() - 1)) - 1)
    infinity = ((2 * bias + 1) << fraction_bits) if values.dtype == torch.float64 else 0x7F800000
    biased = magnitude >> fraction_bits
    significand = (magnitude & ((1 << fraction_bits) - 1)) | (biased.clamp(max=1) << fraction_bits)
    exponent = biased.clamp(min=1) - bias

    # value = significand * 2^(exponent - fraction_bits). Below the smallest normal number of the target the unit in the
    # last place stops shrinking; one place beyond the significand everything rounds to 0.
    lowest = 1 - form.bias
    drop = (fraction_bits - form.fraction + (lowest - exponent).clamp(min=0)).clamp(max=fraction_bits + 2)
    quotient = significand >> drop
    half = torch.ones_like(drop) << (drop - 1)
    quotient = (significand + (half - 1) + (quotient & 1)) >> drop
    # A carry into the next binade is the next code: exponent and fraction are one integer.
    code = quotient + ((exponent.clamp(min=lowest) - lowest) << form.fraction)

    special = magnitude >= infinity
    nan = magnitude > infinity
    if form.infinity is not None:
        assert form.nan is not None
        code = torch.where(special | (code > form.largest), form.infinity, code)
        code = torch.where(bits < 0, code | form.sign, code)
        return torch.where(nan, form.nan, code).to(torch.int16)

    beyond = special | (code > form.largest)
    code = torch.where(beyond, form.largest, code)
    invalid = nan
    if overflow == "nan":
        invalid = beyond
    elif overflow == "saturate_finite":
        invalid = special
    if form.signed_zero:
        if form.nan is not None:
            code = torch.where(invalid, form.nan, code)
        code = torch.where(bits < 0, code | form.sign, code)
    else:
        assert form.nan is not None
        code = torch.where((bits < 0) & (code > 0), code | form.sign, code)
        code = torch.where(invalid, form.nan, code)
    return code.to(torch.uint8)


def rounded(values: torch.Tensor, format: FormatName, overflow: Overflow = "saturate") -> torch.Tensor:
    """`values` rounded to the numbers of a format, in the dtype of `values` (float32 or float64)."""
    return decode(encode(values, format, overflow), format, values.dtype)


def round_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """`values` (float32 or float64) as bfloat16, to nearest, ties to even, in one rounding; every NaN is 0x7FC0."""
    if values.dtype != torch.float32:
        return encode(values, "bfloat16").view(torch.bfloat16)
    # float32 and bfloat16 share the exponent: the kept half of the bits grows by one when the dropped half says so.
    bits = values.contiguous().view(torch.int32)
    kept = ((bits >> 16) & 1).add_(0x7FFF).add_(bits).bitwise_right_shift_(16).to(torch.int16)
    return kept.masked_fill_(torch.isnan(values), 0x7FC0).view(torch.bfloat16)


def e8m0_decode(
    codes: torch.Tensor, dtype: torch.dtype = torch.float32, all_ones: Literal["nan", "infinity"] = "nan"
) -> torch.Tensor:
    """2^(b - 127) for the bytes b = 0..254, exactly, in float32 or float64; 255 is NaN.

    2^-127 is a float32 subnormal and is kept. `all_ones="infinity"` is what decoders that compute exp2(b - 127) in
    float32 make of 255, those of packed KV records among them. Raises `TypeError` for codes that are not uint8.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"e8m0 codes are torch.uint8, not {codes.dtype}: view the bytes")
    table = _e8m0_table(dtype, all_ones, codes.device)
    return torch.index_select(table, 0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@cache
def _e8m0_table(dtype: torch.dtype, all_ones: Literal["nan", "infinity"], device: torch.device) -> torch.Tensor:
    top = float("nan") if all_ones == "nan" else float("inf")
    return torch.tensor([2.0 ** (b - E8M0_BIAS) for b in range(255)] + [top], dtype=dtype, device=device)


def scale_exponent(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    """The smallest integer e with amax <= maximum * 2^e, in exact integer arithmetic, as int32.

    `amax` is float32 or float64, positive and finite, subnormal numbers included; `maximum` is a positive number that
    float32 holds exactly. ceil(log2(amax / maximum)) in floating point may differ just above maximum * 2^e.
    """
    fraction_bits, bias, integers = _SOURCES[amax.dtype]
    # Subnormal numbers: normalise by an exact multiplication with a power of two.
    tiny = amax < torch.finfo(amax.dtype).smallest_normal
    bits = torch.where(tiny, amax * 2.0 ** (fraction_bits + 1), amax).view(integers)
    exponent = (bits >> fraction_bits) - bias - tiny.to(integers) * (fraction_bits + 1)
    reference = torch.tensor(maximum, dtype=amax.dtype).view(integers).item()
    mask = (1 << fraction_bits) - 1
    above = (bits & mask) > (int(reference) & mask)
    return (exponent - ((int(reference) >> fraction_bits) - bias) + above.to(integers)).to(torch.int32)


def e8m0_encode(
    values: torch.Tensor, rounding: Literal["up", "nearest"] = "up", overflow: Overflow = "saturate"
) -> torch.Tensor:
    """The byte of the power of two that |value| rounds to, uint8; values are float32 or float64.

    `up`: the smallest power that is at least |value|, as scales need. `nearest`: the middle of two powers, 1.5 * 2^k,
    goes up (1.1 in binary rounds to the even significand 10). Below 2^-127 lies nothing: zero and all smaller numbers
    give byte 0. Beyond 2^127: 254 when `overflow` saturates (infinity is NaN under `saturate_finite`), else NaN. NaN
    gives 255.
    """
    wide = values.to(torch.float64).abs()
    bits = wide.view(torch.int64)
    # Powers of two are the numbers without fraction: adding just under one unit of the exponent, or half of it, rounds.
    unit = 1 << 52
    exponent = (bits + (unit - 1 if rounding == "up" else unit // 2)) >> 52
    byte = exponent - 1023 + E8M0_BIAS
    beyond = (byte > 254) | torch.isinf(wide)
    invalid = torch.isnan(wide)
    if overflow == "nan":
        invalid |= beyond
    elif overflow == "saturate_finite":
        invalid |= torch.isinf(wide)
    return torch.where(invalid, E8M0_NAN, byte.clamp(0, 254)).to(torch.uint8)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes [..., n] in pairs, uint8 [..., n / 2]: element 2i lies in the low half of byte i."""
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} codes in the last dimension: an even number packs into bytes")
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_e2m1`: bytes uint8 [..., n / 2] to four-bit codes uint8 [..., n]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
