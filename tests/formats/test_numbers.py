"""Is every code the number that its format says, and does every number round to the right code?"""

import bisect
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.formats import numbers
from oracle.formats.numbers import FormatName, Overflow

SMALL: tuple[FormatName, ...] = ("float8_e4m3fn", "float8_e4m3fnuz", "float4_e2m1fn")


@cache
def scalar_numbers(format: FormatName) -> dict[int, Fraction]:
    """Code to number for all finite codes, written from the bit strings of the specifications."""
    width, exponent_bits, bias, not_numbers = {
        "float8_e4m3fn": (8, 4, 7, {0x7F, 0xFF}),
        "float8_e4m3fnuz": (8, 4, 8, {0x80}),
        "float4_e2m1fn": (4, 2, 1, set()),
    }[format]
    table = {}
    for code in range(1 << width):
        if code in not_numbers:
            continue
        bits = f"{code:0{width}b}"
        exponent, fraction = int(bits[1 : 1 + exponent_bits], 2), bits[1 + exponent_bits :]
        number = Fraction(int(fraction, 2), 2 ** len(fraction)) + (1 if exponent else 0)
        number *= Fraction(2) ** (max(exponent, 1) - bias)
        table[code] = -number if bits[0] == "1" else number
    return table


@cache
def scalar_magnitudes(format: FormatName) -> list[tuple[Fraction, int]]:
    """The numbers of positive sign with their codes, ascending."""
    sign = 0x8 if format == "float4_e2m1fn" else 0x80
    return sorted((number, code) for code, number in scalar_numbers(format).items() if code < sign)


def scalar_encode(value: float, format: FormatName) -> int:
    """The nearer of the two codes that enclose a number: the even one when both are equally near, saturating."""
    ordered = scalar_magnitudes(format)
    negative = math.copysign(1.0, value) < 0
    if math.isinf(value) or abs(value) >= ordered[-1][0]:
        code = ordered[-1][1]
    else:
        exact = abs(Fraction(value))
        above = bisect.bisect_right(ordered, (exact, 1 << 20))
        (low, low_code), (high, high_code) = ordered[above - 1], ordered[above]
        code = min((exact - low, low_code % 2, low_code), (high - exact, high_code % 2, high_code))[2]
    if negative and not (format == "float8_e4m3fnuz" and code == 0):
        code += 0x8 if format == "float4_e2m1fn" else 0x80
    return code


def edges(format: FormatName) -> list[float]:
    """Every number and every tie between neighbours, each with the float32 numbers just below and above, both signs."""
    ordered = sorted({float(number) for number in scalar_numbers(format).values() if number >= 0})
    ordered.append(2 * ordered[-1] - ordered[-2])
    middle = [(a + b) / 2 for a, b in itertools.pairwise(ordered)]
    values: list[float] = []
    for value in np.array(ordered + middle, dtype=np.float32):
        for neighbour in (np.nextafter(value, np.float32(0)), value, np.nextafter(value, np.float32(np.inf))):
            values += [float(neighbour), -float(neighbour)]
    return values


def disagreements(format: FormatName, encoder: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """How many edges an encoder rounds differently from the scalar formulation."""
    values = edges(format)
    got = encoder(torch.tensor(values, dtype=torch.float32)).tolist()
    return sum(code != scalar_encode(value, format) for code, value in zip(got, values, strict=True))


@pytest.mark.parametrize(
    ("format", "code", "number"),
    [
        ("float8_e4m3fn", 0x01, 2**-9), ("float8_e4m3fn", 0x08, 2**-6), ("float8_e4m3fn", 0x7E, 448.0),
        ("float8_e4m3fn", 0xFE, -448.0), ("float8_e4m3fn", 0x38, 1.0), ("float8_e4m3fnuz", 0x01, 2**-10),
        ("float8_e4m3fnuz", 0x7E, 224.0), ("float8_e4m3fnuz", 0x7F, 240.0), ("float8_e4m3fnuz", 0xFF, -240.0),
        ("float8_e4m3fnuz", 0x40, 1.0), ("float4_e2m1fn", 0x1, 0.5), ("float4_e2m1fn", 0x7, 6.0),
        ("float4_e2m1fn", 0xF, -6.0),
    ],
)  # fmt: skip
def test_known_codes_are_known_numbers(format: FormatName, code: int, number: float) -> None:
    assert numbers.decode(torch.tensor([code], dtype=torch.uint8), format).item() == number


@pytest.mark.parametrize(
    ("format", "value", "code"),
    [
        ("float8_e4m3fn", 2**-10, 0x00), ("float8_e4m3fn", 1.5 * 2**-9, 0x02), ("float8_e4m3fn", 464.0, 0x7E),
        ("float8_e4m3fn", -0.0, 0x80), ("float8_e4m3fn", -(2**-11), 0x80), ("float8_e4m3fnuz", -(2**-11), 0x00),
        ("float8_e4m3fnuz", -(2**-10), 0x81), ("float8_e4m3fnuz", 232.0, 0x7E), ("float8_e4m3fnuz", -0.0, 0x00),
        ("float8_e4m3fn", 31.6, 0x60), ("float4_e2m1fn", 0.25, 0), ("float4_e2m1fn", 0.75, 2),
        ("float4_e2m1fn", 1.25, 2), ("float4_e2m1fn", 1.75, 4), ("float4_e2m1fn", 2.5, 4),
        ("float4_e2m1fn", 3.5, 6), ("float4_e2m1fn", 5.0, 6),
        ("float4_e2m1fn", -0.0, 8),
    ],
)  # fmt: skip
def test_known_ties_round_to_known_codes(format: FormatName, value: float, code: int) -> None:
    assert numbers.encode(torch.tensor([value]), format).item() == code
    assert scalar_encode(value, format) == code


@pytest.mark.parametrize("format", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_code_decodes_as_the_bit_strings_say(format: FormatName, dtype: torch.dtype) -> None:
    table = scalar_numbers(format)
    width = numbers.FORMATS[format].bits
    got = numbers.decode(torch.arange(256).to(torch.uint8), format, dtype).tolist()
    for code, value in enumerate(got):
        code %= 1 << width
        if code in table:
            assert Fraction(value) == table[code]
            assert math.copysign(1, value) == (-1 if code >> (width - 1) else 1)
        else:
            assert math.isnan(value)


def test_codes_of_the_two_e4m3_formats_differ_by_a_factor_of_two() -> None:
    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0x80, 0xFF)], dtype=torch.uint8)
    assert torch.equal(numbers.decode(codes, "float8_e4m3fn"), 2 * numbers.decode(codes, "float8_e4m3fnuz"))


@pytest.mark.parametrize("format", SMALL)
def test_every_tie_and_its_neighbours_round_as_the_scalar_formulation(format: FormatName) -> None:
    assert disagreements(format, lambda values: numbers.encode(values, format)) == 0
    assert disagreements(format, lambda values: numbers.encode(values.double(), format)) == 0


@pytest.mark.parametrize("format", SMALL)
def test_truncation_and_ties_away_from_zero_are_seen_at_the_edges(format: FormatName) -> None:
    def truncated(values: torch.Tensor) -> torch.Tensor:
        nearest = numbers.encode(values, format)
        outward = numbers.decode(nearest, format).abs() > values.abs()
        return torch.where(outward, nearest - 1, nearest)

    assert disagreements(format, truncated) >= 20
    assert disagreements(format, lambda values: numbers.encode(values * (1 + 2**-22), format)) > 4


@pytest.mark.parametrize("format", SMALL)
def test_encoding_undoes_decoding(format: FormatName) -> None:
    codes = torch.tensor([*scalar_numbers(format)], dtype=torch.uint8)
    assert torch.equal(numbers.encode(numbers.decode(codes, format), format), codes)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8), st.sampled_from(SMALL))
def test_any_float32_rounds_as_the_scalar_formulation(values: list[float], format: FormatName) -> None:
    got = numbers.encode(torch.tensor(values, dtype=torch.float32), format).tolist()
    assert got == [scalar_encode(value, format) for value in values]


@settings(max_examples=200, deadline=None)
@given(st.floats(-500, 500), st.sampled_from(SMALL))
def test_any_float64_is_rounded_once(value: float, format: FormatName) -> None:
    assert numbers.encode(torch.tensor([value], dtype=torch.float64), format).item() == scalar_encode(value, format)


def test_a_float64_just_above_a_tie_is_not_rounded_through_float32() -> None:
    above = 1.0625 + 2**-40
    assert numbers.encode(torch.tensor([above], dtype=torch.float64), "float8_e4m3fn").item() == 0x39
    assert numbers.encode(torch.tensor([above], dtype=torch.float32), "float8_e4m3fn").item() == 0x38


@pytest.mark.parametrize(
    ("format", "overflow", "codes"),
    [
        ("float8_e4m3fn", "saturate", [0x7E, 0x7E, 0x7E, 0xFE, 0x7F]),
        ("float8_e4m3fn", "saturate_finite", [0x7E, 0x7E, 0x7F, 0xFF, 0x7F]),
        ("float8_e4m3fn", "nan", [0x7E, 0x7F, 0x7F, 0xFF, 0x7F]),
        ("float8_e4m3fnuz", "saturate", [0x7F, 0x7F, 0x7F, 0xFF, 0x80]),
        ("float8_e4m3fnuz", "saturate_finite", [0x7F, 0x7F, 0x80, 0x80, 0x80]),
        ("float8_e4m3fnuz", "nan", [0x80, 0x80, 0x80, 0x80, 0x80]),
        ("float4_e2m1fn", "saturate", [7, 7, 7, 15, 7]),
        ("float4_e2m1fn", "nan", [7, 7, 7, 15, 7]),
    ],
)
def test_overflow_follows_its_rule(format: FormatName, overflow: Overflow, codes: list[int]) -> None:
    values = torch.tensor([464.0, 1e6, math.inf, -math.inf, math.nan])
    assert numbers.encode(values, format, overflow).tolist() == codes


def test_fnuz_numbers_between_240_and_the_tie_at_248_round_down_under_every_rule() -> None:
    values = torch.tensor([247.99, 248.0])
    assert numbers.encode(values, "float8_e4m3fnuz", "nan").tolist() == [0x7F, 0x80]


def bfloat16_patterns() -> Iterator[int]:
    yield from range(1 << 16)


def test_every_bfloat16_decodes_as_ieee_says() -> None:
    patterns = torch.tensor(list(bfloat16_patterns())).to(torch.int16)
    got = numbers.decode(patterns, "bfloat16").numpy()
    want = np.array([struct.unpack("<f", struct.pack("<HH", 0, bits))[0] for bits in bfloat16_patterns()], np.float32)
    assert np.array_equal(got.view(np.uint32)[~np.isnan(want)], want.view(np.uint32)[~np.isnan(want)])
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert numbers.decode(patterns.view(torch.bfloat16), "bfloat16", torch.float64).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_bfloat16_tie_and_its_neighbours_round_to_even(dtype: torch.dtype) -> None:
    low = np.arange(0x7F80, dtype=np.uint32)
    bottom = (low << 16).view(np.float32)
    tie = ((low << 16) + 0x8000).view(np.float32)
    below, above = np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf))
    for values, want in ((bottom, low), (tie, low + low % 2), (below, low), (above, low + 1)):
        for sign in (0, 0x8000):
            signed = torch.from_numpy(-values if sign else values).to(dtype)
            expected = (want | sign).astype(np.uint16)
            assert np.array_equal(numbers.encode(signed, "bfloat16").numpy().view(np.uint16), expected)
            assert np.array_equal(numbers.round_to_bfloat16(signed).view(torch.int16).numpy().view(np.uint16), expected)


def test_bfloat16_keeps_infinity_and_makes_every_nan_the_quiet_one() -> None:
    bits = torch.tensor([0x7F800000, -0x800000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for values in (bits, bits.double()):
        assert numbers.encode(values, "bfloat16").tolist() == [0x7F80, 0xFF80 - 65536, 0x7FC0, 0x7FC0, 0x7FC0]
        assert torch.equal(numbers.round_to_bfloat16(values).view(torch.int16), numbers.encode(values, "bfloat16"))


def test_e8m0_bytes_are_powers_of_two_down_to_a_subnormal() -> None:
    codes = torch.arange(256).to(torch.uint8)
    got = numbers.e8m0_decode(codes, torch.float64).tolist()
    assert got[:255] == [2.0 ** (byte - 127) for byte in range(255)] and math.isnan(got[255])
    single = numbers.e8m0_decode(codes)
    assert single[0].item() == 2.0**-127
    assert single[:255].double().tolist() == got[:255]
    assert numbers.e8m0_decode(codes[255:], all_ones="infinity").item() == math.inf


def test_e8m0_rounds_up_to_the_next_power_or_to_the_nearest() -> None:
    small = [0.0, 2.0**-149, 2.0**-127, 1.0, 1.0 + 2**-23, 1.4999999, 1.5, 2.0]
    values = torch.tensor([*small, 2.0**127, 3e38, math.inf, math.nan])
    up, nearest = numbers.e8m0_encode(values), numbers.e8m0_encode(values, "nearest")
    assert up.tolist() == [0, 0, 0, 127, 128, 128, 128, 128, 254, 254, 254, 255]
    assert nearest.tolist() == [0, 0, 0, 127, 127, 127, 128, 128, 254, 254, 254, 255]
    assert numbers.e8m0_encode(values, "nearest", "nan").tolist()[-3:] == [255, 255, 255]
    assert numbers.e8m0_encode(-values, "up").tolist() == up.tolist()


def test_e8m0_encoding_undoes_decoding() -> None:
    codes = torch.arange(255).to(torch.uint8)
    for rounding in ("up", "nearest"):
        assert torch.equal(numbers.e8m0_encode(numbers.e8m0_decode(codes), rounding), codes)


@pytest.mark.parametrize("maximum", [448.0, 224.0, 6.0, 1.0])
def test_scale_exponent_is_the_smallest_for_every_positive_bfloat16(maximum: float) -> None:
    patterns = torch.arange(1, 0x7F80).to(torch.int16)
    amax = numbers.decode(patterns, "bfloat16")
    exponent = numbers.scale_exponent(amax, maximum).tolist()
    assert numbers.scale_exponent(amax.double(), maximum).tolist() == exponent
    # Products of a few bits and a power of two: exact in float64.
    for value, e in zip(amax.double().tolist(), exponent, strict=True):
        assert math.ldexp(maximum, e - 1) < value <= math.ldexp(maximum, e)


def test_scale_exponent_turns_exactly_above_448() -> None:
    powers = torch.arange(-130, 119).double()
    limit = torch.ldexp(torch.full_like(powers, 448.0), powers).float()
    for exact in (limit, limit.double()):
        assert numbers.scale_exponent(exact, 448.0).tolist() == powers.int().tolist()
        above = torch.nextafter(exact, torch.full_like(exact, math.inf))
        assert numbers.scale_exponent(above, 448.0).tolist() == (powers.int() + 1).tolist()


def test_four_bit_codes_pack_low_half_first() -> None:
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert numbers.pack_e2m1(codes).tolist() == [[0x21, 0x8F]]
    assert torch.equal(numbers.unpack_e2m1(numbers.pack_e2m1(codes)), codes)
    with pytest.raises(ValueError, match="even number"):
        numbers.pack_e2m1(codes[:, :3])


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="view the bytes"):
        numbers.decode(torch.zeros(3), "float8_e4m3fn")
    with pytest.raises(TypeError, match=r"float32 or torch\.float64"):
        numbers.decode(torch.zeros(3, dtype=torch.uint8), "float8_e4m3fn", torch.bfloat16)
    with pytest.raises(TypeError, match="values are float32"):
        numbers.encode(torch.zeros(3, dtype=torch.int32), "float8_e4m3fn")
    with pytest.raises(TypeError, match="view the bytes"):
        numbers.e8m0_decode(torch.zeros(3))


def test_strided_and_large_tensors_decode_as_small_ones() -> None:
    codes = torch.arange(256).to(torch.uint8).repeat(3, 5000)[:, ::3]
    table = numbers.decode(torch.arange(256).to(torch.uint8), "float8_e4m3fnuz")
    assert torch.equal(numbers.decode(codes, "float8_e4m3fnuz").nan_to_num(1e9), table[codes.long()].nan_to_num(1e9))
    values = table[codes.long()].nan_to_num(0.0)
    assert torch.equal(numbers.rounded(values, "float8_e4m3fnuz"), values)
