"""Which code does a number round to, and which number is a code?

    encode: the code whose number is nearest, of two equally near the even one; E8M0: |x| to a power of two, see below
    decode: the number of the code, exactly

with the layouts, the overflow rules and the rounding of E8M0 of `oracle.formats.numbers` (sources there). A NaN may be
any NaN of the format; everything else is exact, the sign of zero included.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.formats.cast import Inputs, Outputs
from cases.memory import moved
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.formats import numbers
from oracle.formats.numbers import FormatName
from oracle.laws import Honest, Law, Mutant


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The right codes or numbers; `dtype` changes nothing, since nothing is accumulated."""
    del dtype
    return Outputs(_encoded(inputs, inputs.source) if inputs.direction == "encode" else _decoded(inputs, inputs.source))


def _encoded(inputs: Inputs, values: torch.Tensor) -> torch.Tensor:
    if inputs.format == "float8_e8m0fnu":
        return numbers.e8m0_encode(values, inputs.rounding, inputs.overflow)
    codes = numbers.encode(values, _float_format(inputs), inputs.overflow)
    return codes.view(torch.bfloat16) if inputs.format == "bfloat16" else codes


def _decoded(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    e8m0 = inputs.format == "float8_e8m0fnu"
    values = numbers.e8m0_decode(codes) if e8m0 else numbers.decode(codes, _float_format(inputs))
    return values if inputs.out.dtype == torch.float32 else numbers.round_to_bfloat16(values)


def _float_format(inputs: Inputs) -> FormatName:
    """The format, known to have a sign and a fraction."""
    if inputs.format == "float8_e8m0fnu":
        raise ValueError("float8_e8m0fnu has neither a sign nor a fraction")
    return inputs.format


def one_nan(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """`out` with every NaN replaced by the same one, so that two answers can be compared by their bits."""
    if out.dtype.is_floating_point:
        return torch.where(torch.isnan(out), torch.full_like(out, float("nan")), out)
    if inputs.format == "float8_e8m0fnu":
        return out
    name = _float_format(inputs)
    nan = numbers.FORMATS[name].nan
    return out if nan is None else torch.where(numbers.is_nan_code(out, name), nan, out).to(out.dtype)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """One check, bit for bit but for the choice of NaN; `precision` has no say in a cast."""
    del precision
    want = reference(inputs).out
    got = outputs.out
    if got is not None and got.dtype == want.dtype:
        got, want = one_nan(got, inputs), one_nan(want, inputs)
    what = "a number rounds to one code" if inputs.direction == "encode" else "a code is one number"
    return (exact("out", got, want, why=f"{inputs.format} {inputs.direction}: {what}, bit for bit"),)


def _with_source(inputs: Inputs, source: torch.Tensor) -> Inputs:
    """Fresh inputs with other elements in the same places."""
    fresh = moved(inputs.source, inputs.source.device)
    fresh.copy_(source)
    return dataclasses.replace(inputs, source=fresh, out=moved(inputs.out, inputs.out.device))


def _sign_flipped(inputs: Inputs) -> Inputs | None:
    if inputs.direction != "encode" or inputs.format == "float8_e8m0fnu":
        return None
    return _with_source(inputs, -inputs.source)


def _flipped_answer(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    if inputs.format == "bfloat16":
        return Outputs(-first.out)
    form = numbers.FORMATS[_float_format(inputs)]
    codes = first.out ^ form.sign
    if not form.signed_zero:
        codes = torch.where(first.out & 0x7F == 0, first.out, codes)
    return Outputs(codes)


def _already_rounded(inputs: Inputs) -> Inputs | None:
    """Numbers that have codes, those that the numbers round to."""
    if inputs.direction != "encode" or inputs.source.dtype != torch.float32:
        return None
    return _with_source(inputs, _decoded(dataclasses.replace(inputs, out=inputs.source), reference(inputs).out))


def _unchanged(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


LAWS: tuple[Law, ...] = (
    Law(
        name="C1 elements reversed",
        claim="a code depends on its own number only",
        edit=lambda inputs: _with_source(inputs, inputs.source.flip(0)),
        expect=lambda first, inputs, edited: Outputs(first.out.flip(0)),
        measure="bitwise",
    ),
    Law(
        name="C2 signs flipped",
        claim="rounding to nearest even is odd: the code of -x is the code of x with the sign flipped",
        edit=_sign_flipped,
        expect=_flipped_answer,
        measure="bitwise",
    ),
    Law(
        name="C3 already rounded",
        claim="a number that has a code is encoded as that code",
        edit=_already_rounded,
        expect=_unchanged,
        measure="bitwise",
    ),
)


def _encode_as(
    change: Callable[[Inputs, torch.Tensor], torch.Tensor], *formats: str
) -> Callable[[Inputs], Outputs | None]:
    """A wrong encoder that casts changed numbers."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.direction != "encode" or inputs.format not in formats:
            return None
        return Outputs(_encoded(inputs, change(inputs, inputs.source.float())))

    return answer


def _codes_as(
    change: Callable[[Inputs, torch.Tensor], torch.Tensor], *formats: str
) -> Callable[[Inputs], Outputs | None]:
    """A wrong encoder whose right codes are changed afterwards."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.direction != "encode" or inputs.format not in formats:
            return None
        right = reference(inputs).out
        codes = right.view(torch.int16) if inputs.format == "bfloat16" else right
        return Outputs(change(inputs, codes).to(codes.dtype).view(right.dtype))

    return answer


def _decode_as(
    change: Callable[[Inputs, torch.Tensor], torch.Tensor], *formats: str
) -> Callable[[Inputs], Outputs | None]:
    """A wrong decoder: float32 numbers from codes."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.direction != "decode" or inputs.format not in formats:
            return None
        values = change(inputs, inputs.source)
        return Outputs(values if inputs.out.dtype == torch.float32 else numbers.round_to_bfloat16(values))

    return answer


_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
_FLOATS: tuple[str, ...] = (*_FP8, "float4_e2m1fn", "bfloat16")


def _number(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    return numbers.decode(codes, _float_format(inputs), torch.float64)


def _toward_zero(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    """One code less where rounding went outwards."""
    outward = _number(inputs, codes).abs() > inputs.source.double().abs()
    return torch.where(outward, codes - 1, codes)


def _away_on_ties(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    """One code more where a tie went inwards."""
    source = inputs.source.double()
    magnitude = codes.to(torch.int32) & (numbers.FORMATS[_float_format(inputs)].sign - 1)
    finite = magnitude < numbers.FORMATS[_float_format(inputs)].largest
    beyond = _number(inputs, torch.where(finite, codes + 1, codes).to(codes.dtype))
    tie = (source - _number(inputs, codes)).abs() == (beyond - source).abs()
    return torch.where(tie & finite & (source.abs() > _number(inputs, codes).abs()), codes + 1, codes)


def _carry_lost(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    """The fraction rounds up to 8, and its low three bits are kept under the old exponent."""
    outward = _number(inputs, codes).abs() > inputs.source.double().abs()
    return torch.where(outward & (codes & 7 == 0) & (codes & 0x7F >= 0x10), codes - 8, codes)


def _top_binade_saturated(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    form = numbers.FORMATS[_float_format(inputs)]
    top = (codes & 0x7F >= form.largest & 0x78) & ~numbers.is_nan_code(codes, _float_format(inputs))
    return torch.where(top, codes & 0x80 | form.largest, codes)


def _subnormals_flushed(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    form = numbers.FORMATS[_float_format(inputs)]
    small = (codes.to(torch.int32) & (form.sign - 1)) < (1 << form.fraction)
    zero = codes.to(torch.int32) & form.sign if form.signed_zero else torch.zeros_like(codes, dtype=torch.int32)
    nan = numbers.is_nan_code(codes, _float_format(inputs))
    return torch.where(small & ~nan, zero, codes.to(torch.int32))


def _negative_zero_kept(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    negative = torch.signbit(inputs.source.float()) & ~torch.isnan(inputs.source)
    return torch.where((codes == 0) & negative, 0x80, codes)


def _sign_of_zero_lost(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    form = numbers.FORMATS[_float_format(inputs)]
    return torch.where((codes.to(torch.int32) & (form.sign - 1)) == 0, 0, codes)


def _other_overflow(inputs: Inputs) -> Outputs | None:
    if inputs.direction != "encode" or inputs.format in ("bfloat16", "float4_e2m1fn"):
        return None
    return reference(dataclasses.replace(inputs, overflow="nan" if inputs.overflow == "saturate" else "saturate"))


def _writer_limit(inputs: Inputs, values: torch.Tensor) -> torch.Tensor:
    """Clamped to 224: right for a writer of scaled data, wrong for a cast."""
    del inputs
    return torch.where(torch.isfinite(values), values.clamp(-224.0, 224.0), values)


def _other_e4m3(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    other: FormatName = "float8_e4m3fnuz" if inputs.format == "float8_e4m3fn" else "float8_e4m3fn"
    return numbers.decode(codes, other)


def _nan_is_a_number(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    values = numbers.decode(codes, _float_format(inputs))
    number = 480.0 if inputs.format == "float8_e4m3fn" else 0.0
    return torch.where(torch.isnan(values), torch.where(codes == 0xFF, -number, number), values)


def _truncated_power(inputs: Inputs) -> Outputs | None:
    if inputs.format != "float8_e8m0fnu" or inputs.direction != "encode":
        return None
    _, exponent = torch.frexp(inputs.source.double())
    byte = (exponent - 1 + numbers.E8M0_BIAS).clamp(0, 254).to(torch.uint8)
    special = (inputs.source == 0) | ~torch.isfinite(inputs.source)
    return Outputs(torch.where(special, reference(inputs).out, byte))


def _other_power_rounding(inputs: Inputs) -> Outputs | None:
    if inputs.format != "float8_e8m0fnu" or inputs.direction != "encode":
        return None
    return reference(dataclasses.replace(inputs, rounding="up" if inputs.rounding == "nearest" else "nearest"))


def _smallest_power_flushed(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    del inputs
    return torch.where(codes == 0, 0.0, numbers.e8m0_decode(codes))


MUTANTS: tuple[Mutant, ...] = (
    Mutant("rounded-toward-zero", "the dropped bits were ignored", _codes_as(_toward_zero, *_FLOATS)),
    Mutant(
        "ties-away-from-zero",
        "ties went to the larger code instead of the even one",
        _codes_as(_away_on_ties, *_FLOATS),
    ),
    Mutant(
        "carry-lost",
        "the carry of a fraction that rounds up to the next binade were lost",
        _codes_as(_carry_lost, *_FP8),
    ),
    Mutant(
        "top-binade-saturated",
        "everything in the highest binade became the largest number",
        _codes_as(_top_binade_saturated, *_FP8),
    ),
    Mutant(
        "subnormals-flushed",
        "results below the smallest normal number became zero",
        _codes_as(_subnormals_flushed, *_FLOATS),
    ),
    Mutant(
        "fnuz-negative-zero-is-nan",
        "-0 and negative underflow were encoded as 0x80, which is NaN in FNUZ",
        _codes_as(_negative_zero_kept, "float8_e4m3fnuz"),
    ),
    Mutant(
        "sign-of-zero-lost",
        "-0 and negative underflow became +0",
        _codes_as(_sign_of_zero_lost, "float8_e4m3fn", "float4_e2m1fn", "bfloat16"),
    ),
    Mutant("other-overflow-rule", "numbers beyond the largest followed another overflow rule", _other_overflow),
    Mutant(
        "writer-limit-in-a-cast",
        "numbers were clamped to 224 before a FNUZ cast",
        _encode_as(_writer_limit, "float8_e4m3fnuz"),
    ),
    Mutant(
        "rounded-twice-through-float16",
        "numbers were rounded to float16 first",
        _encode_as(lambda inputs, values: values.to(torch.float16).float(), *_FP8),
    ),
    Mutant(
        "rounded-twice-through-bfloat16",
        "numbers were rounded to bfloat16 first",
        _encode_as(lambda inputs, values: numbers.round_to_bfloat16(values).float(), *_FP8, "float4_e2m1fn"),
    ),
    Mutant("other-e4m3", "codes were decoded as the other e4m3 format", _decode_as(_other_e4m3, *_FP8)),
    Mutant(
        "nan-code-is-a-number",
        "the NaN codes were decoded by the formula of the other codes",
        _decode_as(_nan_is_a_number, *_FP8),
    ),
    Mutant(
        "scale-byte-is-a-number",
        "the E8M0 byte were taken for its own value",
        _decode_as(lambda inputs, codes: codes.float(), "float8_e8m0fnu"),
    ),
    Mutant(
        "scale-bias-128",
        "the E8M0 bias were 128",
        _decode_as(lambda inputs, codes: numbers.e8m0_decode(codes) / 2, "float8_e8m0fnu"),
    ),
    Mutant(
        "smallest-scale-flushed",
        "the E8M0 byte 0 were 0 instead of 2^-127",
        _decode_as(_smallest_power_flushed, "float8_e8m0fnu"),
    ),
    Mutant(
        "scale-255-is-infinity",
        "the E8M0 byte 255 were infinity instead of NaN",
        _decode_as(lambda inputs, codes: numbers.e8m0_decode(codes, all_ones="infinity"), "float8_e8m0fnu"),
    ),
    Mutant("power-rounded-down", "a scale were rounded down to a power of two", _truncated_power),
    Mutant(
        "other-power-rounding",
        "a scale were rounded to nearest instead of up, or up instead of to nearest",
        _other_power_rounding,
    ),
    Mutant(
        "sign-bit-ignored",
        "four-bit codes were decoded without their sign",
        _decode_as(lambda inputs, codes: numbers.decode(codes & 7, "float4_e2m1fn"), "float4_e2m1fn"),
    ),
)


def _another_nan(inputs: Inputs) -> Outputs | None:
    """Every NaN with the other sign or another payload."""
    right = reference(inputs).out
    if right.dtype == torch.bfloat16:
        return Outputs(torch.where(torch.isnan(right), torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16), right))
    if right.dtype == torch.float32:
        return Outputs(torch.where(torch.isnan(right), torch.tensor(-1, dtype=torch.int32).view(torch.float32), right))
    if inputs.format != "float8_e4m3fn":
        return None
    return Outputs(torch.where(numbers.is_nan_code(right, _float_format(inputs)), right ^ 0x80, right))


HONEST: tuple[Honest, ...] = (
    Honest("as-asked", Precision(), reference),
    Honest("another-nan", Precision(), _another_nan),
)
