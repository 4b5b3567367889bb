"""Which codes and scale bytes are those of rows in MXFP8?

For each block of 32 lanes, a its largest magnitude or 2^-126:

    byte = the smallest with a <= 448 * 2^(byte - 127), 0 to 254        code = rne_e4m3(x * 2^(127 - byte))

Source: the OCP Microscaling specification with the scale rule of vLLM's `mxfp8_e4m3_quantize`, which evaluates
byte = ceil(log2(a / 448)) + 127 in float32. There the quotient and its logarithm round, so that a magnitude just above
448 * 2^k may be taken for 448 * 2^k itself. Up to 64 float32 numbers above it (the formula was measured to need 39 at
most) the byte below is right too: the scaled block stays below 448.004, which rounds to 448, and no code overflows. The
codes must be those of the byte that was found. No bfloat16 number lies in such a band.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.memory import moved
from cases.precision import Precision
from cases.quant.mxfp8_rows import Inputs, Outputs
from oracle import mxfp8
from oracle.check import Check, exact, wrong_form
from oracle.formats import numbers
from oracle.laws import Honest, Law, Mutant
from oracle.mxfp8 import BLOCK

BAND_ULPS = 64.0
_SMALLEST_NORMAL = 2.0**-126


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The codes and the exact bytes; `dtype` changes nothing, since every step but the rounding to codes is exact.

    Raises `ValueError` for rows whose lanes are no multiple of 32, and `TypeError` for rows that are no wide floats.
    """
    del dtype
    _refuse(inputs)
    return _outputs(*mxfp8.quantise(inputs.rows.float()))


def _refuse(inputs: Inputs) -> None:
    rows = inputs.rows
    if rows.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"rows={rows.dtype}: should be torch.bfloat16, torch.float16 or torch.float32")
    if rows.dim() < 1 or rows.shape[-1] % BLOCK:
        raise ValueError(f"rows={list(rows.shape)}: should have a multiple of {BLOCK} lanes")


def _outputs(codes: torch.Tensor, scales: torch.Tensor) -> Outputs:
    return Outputs(codes.view(torch.float8_e4m3fn), scales)


def scale_range(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and the highest byte, int32, that are right for blocks whose largest magnitude is `amax` (float64)."""
    high = mxfp8.scale_bytes(amax).int()
    limit = torch.ldexp(torch.full_like(amax, 448.0), (high - 128).double())
    # The unit in the last place of 448 * 2^k in float32 is 2^(k - 15).
    band = torch.ldexp(torch.full_like(amax, BAND_ULPS), (high - 128 - 15).double())
    return torch.where((high > 0) & (amax - limit <= band), high - 1, high), high


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Two checks: each scale byte is a right one, and the codes are those of the bytes found, bit for bit.

    Where a byte is wrong, the codes are those of the exact one. Where `precision` flushes, the code of a subnormal
    number may be that of zero.
    """
    want = reference(inputs)
    for name in ("codes", "scales"):
        form = wrong_form(name, getattr(outputs, name), getattr(want, name))
        if form is not None:
            return (form,)
    rows = inputs.rows.float()
    low, high = scale_range(_amax(rows).double())
    found = outputs.scales.int()
    right = (found >= low) & (found <= high)
    settled = torch.where(right, found, high).to(torch.uint8)
    codes = numbers.encode(mxfp8.scaled(rows, settled), "float8_e4m3fn")
    got = outputs.codes.view(torch.uint8)
    if precision.flushes:
        lost = (rows != 0) & (rows.abs() < _SMALLEST_NORMAL) & (got & 0x7F == 0)
        codes = torch.where(lost, got, codes)
    return (
        exact(
            "scales", outputs.scales, torch.where(right, outputs.scales, want.scales),
            why="the scale is the smallest that takes the block's largest magnitude to 448 or less",
        ),
        exact("codes", got, codes, why="each lane rounds to one code under the scale of its block"),
    )  # fmt: skip


def _amax(rows: torch.Tensor) -> torch.Tensor:
    return _in_blocks(rows).abs().amax(-1)


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    blocks: torch.Tensor = rows.unflatten(-1, (-1, BLOCK))
    return blocks


def _with(inputs: Inputs, rows: torch.Tensor) -> Inputs:
    """The same call on memory of its own, where the rows are `rows`."""
    fresh = moved(inputs.rows, inputs.rows.device)
    fresh.copy_(rows)
    return dataclasses.replace(inputs, rows=fresh)


def _widened(inputs: Inputs) -> Inputs | None:
    return None if inputs.rows.dtype == torch.float32 else Inputs(inputs.rows.float())


def _doubled(inputs: Inputs) -> Inputs | None:
    """Only where no block is near the smallest or the largest scale."""
    amax = _amax(inputs.rows.float())
    if amax.numel() == 0 or float(amax.min()) < 2.0**-100 or float(amax.max()) > 2.0**120:
        return None
    # Of numbers that twice are normal nothing is lost; the others have the code of zero under such scales.
    return _with(inputs, inputs.rows * 2)


def _already_quantised(inputs: Inputs) -> Inputs | None:
    """Rows that codes and scales stand for; only where the row's dtype holds them."""
    values = dequantised(reference(inputs))
    rows = values.to(inputs.rows.dtype)
    return _with(inputs, rows) if torch.equal(rows.double(), values) else None


def dequantised(outputs: Outputs) -> torch.Tensor:
    """The numbers, float64, that codes and scales stand for."""
    codes = numbers.decode(outputs.codes.view(torch.uint8), "float8_e4m3fn", torch.float64)
    powers = numbers.e8m0_decode(outputs.scales, torch.float64)
    return (_in_blocks(codes) * powers[..., None]).flatten(-2)


@dataclasses.dataclass(frozen=True)
class _Values:
    """What an answer stands for."""

    values: torch.Tensor


def _rearranged(
    edit: Callable[[torch.Tensor], torch.Tensor], scales: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Callable[[Inputs], Inputs], Callable[[Outputs, Inputs, Inputs], Outputs]]:
    """An edit of the blocks [..., blocks, 32], and the answer when the codes follow it and the scales `scales`."""

    def edited(inputs: Inputs) -> Inputs:
        return _with(inputs, edit(_in_blocks(inputs.rows)).flatten(-2))

    def expected(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
        del inputs, edited
        codes = edit(_in_blocks(first.codes.view(torch.uint8))).flatten(-2)
        return _outputs(codes, scales(first.scales))

    return edited, expected


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _first_dimension_reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return _outputs(first.codes.view(torch.uint8).flip(0), first.scales.flip(0))


def _signs_flipped(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return _outputs(first.codes.view(torch.uint8) ^ 0x80, first.scales)


def _scales_raised(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.codes, first.scales + 1)


LAWS: tuple[Law, ...] = (
    Law(
        "X1 rows reversed", "a row depends on itself only", lambda inputs: _with(inputs, inputs.rows.flip(0)),
        _first_dimension_reversed, "bitwise",
    ),
    Law(
        "X2 blocks reversed", "a block depends on itself only",
        *_rearranged(lambda blocks: blocks.flip(-2), lambda scales: scales.flip(-1)), "bitwise",
    ),
    Law(
        "X3 lanes of a block rotated", "the scale is that of the whole block, wherever its largest lane stands",
        *_rearranged(lambda blocks: blocks.roll(11, -1), lambda scales: scales), "bitwise",
    ),
    Law(
        "X4 signs flipped", "the scale has no sign, and rounding is odd", lambda inputs: _with(inputs, -inputs.rows),
        _signs_flipped, "bitwise",
    ),
    Law("X5 widened", "bfloat16 rows and their float32 copies are the same numbers", _widened, _same, "bitwise"),
    Law(
        "X6 doubled", "doubled rows have the same codes and scale bytes that are one higher", _doubled, _scales_raised,
        "bitwise",
    ),
    Law(
        "X7 already quantised", "numbers that codes and scales stand for are quantised to themselves",
        _already_quantised, _same, "bitwise", lambda answer: _Values(dequantised(answer)),
    ),
    Law(
        "X8 the same call again", "the answer is the same every time",
        lambda inputs: _with(inputs, inputs.rows), _same, "bitwise",
    ),
)  # fmt: skip


def _coded(rows: torch.Tensor, scales: torch.Tensor) -> Outputs:
    """Rows under given scale bytes."""
    return _outputs(numbers.encode(mxfp8.scaled(rows, scales), "float8_e4m3fn"), scales)


def _scaled_by(rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """A quantiser whose byte is what `rule` makes of the largest magnitudes (float64, at least 2^-126)."""

    def answer(inputs: Inputs) -> Outputs:
        rows = inputs.rows.float()
        byte = rule(_amax(rows).double().clamp(min=_SMALLEST_NORMAL))
        return _coded(rows, byte.clamp(0, 254).to(torch.uint8))

    return answer


def _fitting(amax: torch.Tensor, limit: float) -> torch.Tensor:
    return numbers.scale_exponent(amax, limit) + 127


def _rounded_down(amax: torch.Tensor) -> torch.Tensor:
    byte = _fitting(amax, 448.0)
    fits = torch.ldexp(torch.full_like(amax, 448.0), (byte - 127).double()) == amax
    return torch.where(fits, byte, byte - 1)


def _to_nearest(amax: torch.Tensor) -> torch.Tensor:
    return torch.log2(amax / 448.0).round() + 127


def _one_high_at_the_limit(amax: torch.Tensor) -> torch.Tensor:
    return _rounded_down(amax) + 1


def _power_of_the_largest(amax: torch.Tensor) -> torch.Tensor:
    _, exponent = torch.frexp(amax)
    return exponent - 1 - 8 + 127


def _amax_over(lanes: int) -> Callable[[Inputs], Outputs | None]:
    """Scales of groups of another size than 32; of smaller groups the first one's serves the block."""

    def answer(inputs: Inputs) -> Outputs | None:
        rows = inputs.rows.float()
        if rows.shape[-1] % lanes:
            return None
        grouped = rows.unflatten(-1, (-1, lanes)).abs().amax(-1)
        amax = grouped.repeat_interleave(lanes // BLOCK, -1) if lanes > BLOCK else grouped[..., :: BLOCK // lanes]
        scales = mxfp8.scale_bytes(amax)
        scaled = mxfp8.scaled(rows, scales)
        return _outputs(numbers.encode(scaled, "float8_e4m3fn"), scales)

    return answer


def _amax_of_all_rows(inputs: Inputs) -> Outputs | None:
    rows = inputs.rows.float()
    if rows.shape[-2] < 2:
        return None
    amax = _amax(rows).amax(-2, keepdim=True).expand(*rows.shape[:-1], -1)
    return _coded(rows, mxfp8.scale_bytes(amax))


def _signed_maximum(inputs: Inputs) -> Outputs:
    rows = inputs.rows.float()
    return _coded(rows, mxfp8.scale_bytes(_in_blocks(rows).amax(-1).clamp(min=0)))


def _divisor_flushed(inputs: Inputs) -> Outputs:
    """2^-127 is subnormal; where it is zero, every lane is divided by zero."""
    right = reference(inputs)
    rows, codes = inputs.rows.float(), right.codes.view(torch.uint8)
    divided = torch.where(rows == 0, 0x7F, torch.where(rows < 0, 0xFE, 0x7E)).to(torch.uint8)
    flushed = (right.scales == 0).repeat_interleave(BLOCK, -1)
    return _outputs(torch.where(flushed, divided, codes), right.scales)


def _byte_is_a_number(inputs: Inputs) -> Outputs:
    """Lanes are divided by the scale byte itself."""
    right = reference(inputs)
    divisor = right.scales.double().clamp(min=1.0).repeat_interleave(BLOCK, -1)
    return _outputs(numbers.encode(inputs.rows.double() / divisor, "float8_e4m3fn"), right.scales)


def _codes_as(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """Right codes that `change` (of the scaled rows and the codes) changes afterwards."""

    def answer(inputs: Inputs) -> Outputs:
        right = reference(inputs)
        scaled = mxfp8.scaled(inputs.rows.float(), right.scales)
        return _outputs(change(scaled, right.codes.view(torch.uint8)).to(torch.uint8), right.scales)

    return answer


def _toward_zero(scaled: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    outward = numbers.decode(codes, "float8_e4m3fn", torch.float64).abs() > scaled.abs()
    return torch.where(outward, codes - 1, codes)


def _away_on_ties(scaled: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    inner = numbers.decode(codes, "float8_e4m3fn", torch.float64).abs()
    outer = numbers.decode(torch.where(codes & 0x7F < 0x7E, codes + 1, codes), "float8_e4m3fn", torch.float64).abs()
    tie = (scaled.abs() > inner) & (scaled.abs() * 2 == inner + outer)
    return torch.where(tie, codes + 1, codes)


def _scales_in_other_order(inputs: Inputs) -> Outputs | None:
    """Scales lie block by block instead of row by row."""
    right = reference(inputs)
    if right.scales.shape[-2] < 2:
        return None
    return Outputs(right.codes, right.scales.mT.reshape(right.scales.shape))


def _neighbours_scale(inputs: Inputs) -> Outputs | None:
    """Codes are right, and the scale that is stored is the next block's."""
    right = reference(inputs)
    return Outputs(right.codes, right.scales.roll(-1, -1)) if right.scales.shape[-1] > 1 else None


def _last_rows_left(inputs: Inputs) -> Outputs | None:
    """The rows behind the last full tile of 64 are not written."""
    right = reference(inputs)
    rest = right.scales.shape[-2] % 64
    if rest == 0:
        return None
    codes, scales = right.codes.view(torch.uint8).clone(), right.scales.clone()
    codes[..., -rest:, :], scales[..., -rest:, :] = 0xFF, 0x7B
    return _outputs(codes, scales)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("scale-rounded-down", "the exponent of the scale were rounded down", _scaled_by(_rounded_down)),
    Mutant("scale-to-nearest", "the exponent of the scale were rounded to nearest", _scaled_by(_to_nearest)),
    Mutant(
        "one-high-at-the-limit", "a block that just fits took the next scale", _scaled_by(_one_high_at_the_limit)
    ),
    Mutant(
        "power-of-the-largest", "the scale were the power of two below the largest magnitude, over 2^8",
        _scaled_by(_power_of_the_largest),
    ),
    Mutant(
        "scaled-to-1", "the largest magnitude went to 1 instead of 448", _scaled_by(lambda amax: _fitting(amax, 1.0))
    ),
    Mutant("scaled-to-256", "blocks were scaled to 256", _scaled_by(lambda amax: _fitting(amax, 256.0))),
    Mutant("scaled-to-240", "blocks were scaled to 240", _scaled_by(lambda amax: _fitting(amax, 240.0))),
    Mutant("scaled-to-464", "blocks were scaled to 464", _scaled_by(lambda amax: _fitting(amax, 464.0))),
    Mutant("scale-bias-128", "the bias of the scale were 128", _scaled_by(lambda amax: _fitting(amax, 448.0) + 1)),
    Mutant(
        "scale-of-at-least-1e-4", "blocks had a floor of 1e-4, as those of packed cache records have",
        _scaled_by(lambda amax: _fitting(amax.clamp(min=1e-4), 448.0)),
    ),
    Mutant("smallest-scale-flushed", "dividing by 2^-127 were dividing by zero", _divisor_flushed),
    Mutant("scale-byte-is-a-number", "lanes were divided by the scale byte itself", _byte_is_a_number),
    Mutant("amax-of-16-lanes", "the scale looked at the first 16 lanes of a block", _amax_over(16)),
    Mutant("amax-of-64-lanes", "two blocks shared the scale of both", _amax_over(64)),
    Mutant("amax-of-all-rows", "all rows shared the scale of the largest", _amax_of_all_rows),
    Mutant("maximum-with-sign", "the scale ignored negative lanes", _signed_maximum),
    Mutant("codes-toward-zero", "codes were rounded toward zero", _codes_as(_toward_zero)),
    Mutant("ties-away-from-zero", "ties went to the larger code", _codes_as(_away_on_ties)),
    Mutant(
        "subnormal-codes-flushed", "codes below the smallest normal number became zero",
        _codes_as(lambda scaled, codes: torch.where(codes & 0x7F < 8, codes & 0x80, codes)),
    ),
    Mutant(
        "sign-of-zero-lost", "-0 and negative underflow became +0",
        _codes_as(lambda scaled, codes: torch.where(codes == 0x80, 0, codes)),
    ),
    Mutant(
        "top-binade-saturated", "everything in the highest binade became the largest code",
        _codes_as(lambda scaled, codes: torch.where(codes & 0x78 == 0x78, codes & 0x80 | 0x7E, codes)),
    ),
    Mutant(
        "largest-is-nan", "the largest code were NaN",
        _codes_as(lambda scaled, codes: torch.where(codes & 0x7F == 0x7E, codes | 1, codes)),
    ),
    Mutant(
        "other-e4m3", "the codes were FNUZ ones",
        _codes_as(lambda scaled, codes: numbers.encode(scaled, "float8_e4m3fnuz")),
    ),
    Mutant(
        "rounded-to-bfloat16-first", "float32 rows were rounded to bfloat16 before they were quantised",
        lambda inputs: reference(Inputs(numbers.round_to_bfloat16(inputs.rows.float()))),
    ),
    Mutant("scales-by-column", "scales lay block by block instead of row by row", _scales_in_other_order),
    Mutant("scale-of-the-next-block", "each block had the scale of the next one", _neighbours_scale),
    Mutant("last-rows-left", "the rows behind the last full tile were not written", _last_rows_left),
)  # fmt: skip


def _by_logarithm(inputs: Inputs) -> Outputs:
    """The formula in float32."""
    rows = inputs.rows.float()
    byte = torch.ceil(torch.log2(_amax(rows).clamp(min=_SMALLEST_NORMAL) / 448.0)) + 127.0
    return _coded(rows, byte.clamp(0, 254).to(torch.uint8))


def _lowest_of_the_band(inputs: Inputs) -> Outputs:
    rows = inputs.rows.float()
    low, _ = scale_range(_amax(rows).double())
    return _coded(rows, low.to(torch.uint8))


def _subnormals_flushed(inputs: Inputs) -> Outputs:
    rows = inputs.rows.float()
    return reference(Inputs(torch.where(rows.abs() < _SMALLEST_NORMAL, rows * 0, rows)))


_EXACT = Precision(flushes=False)

HONEST: tuple[Honest, ...] = (
    Honest("exact", _EXACT, reference),
    Honest("scale-by-logarithm", _EXACT, _by_logarithm),
    Honest("lowest-of-the-band", _EXACT, _lowest_of_the_band),
    Honest("subnormals-flushed", Precision(note="subnormal lanes are zero"), _subnormals_flushed),
)
