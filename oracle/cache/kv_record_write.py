"""Which bytes must lie in the cache after rows were written as packed records?

    a = max(max |x|, 1e-4),  e = the smallest integer with a <= F * 2^e,  scale = e + 127,  code = rne(x * 2^-e)

for each group x of 64 of the first 448 lanes, F = 448 for OCP and 224 for FNUZ codes; the last 64 lanes are copied bit
for bit; byte 7 of the scales is 0. All other bytes stay. Layout and source: `oracle.cache.records`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cases.cache.kv_record_write import Inputs, Outputs
from cases.memory import guarded, guarded_copy, is_vast, moved, owned_bytes, storage_bytes
from cases.precision import Precision
from oracle.cache import records
from oracle.cache.records import DATA_BYTES, GROUPS, NOPE_LANES, RECORD_BYTES, SCALE_BYTES
from oracle.check import Check, exact
from oracle.formats import numbers
from oracle.laws import Honest, Law, Mutant


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The cache as it must be afterwards, a copy; `dtype` changes nothing, since every step is exact."""
    del dtype
    cache = moved(inputs.cache, inputs.cache.device)
    records.write(inputs.k, cache, inputs.slots, inputs.encoding)
    return Outputs(cache)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Codes, RoPE bytes and scales of every record of the cache, written or not, bit for bit: [block, place, byte]."""
    del precision
    want = reference(inputs).cache
    if outputs.cache is None or outputs.cache.shape != want.shape or outputs.cache.dtype != want.dtype:
        return (exact("cache", outputs.cache, want),)
    reasons = {
        "codes": "each lane rounds to one code under its group's scale, and other records stay as they were",
        "rope": "the bfloat16 lanes are copied, and other records stay as they were",
        "scales": "the scale is the smallest that fits the group, byte 7 is 0, and other records stay as they were",
    }
    got, right = records.record_views(outputs.cache), records.record_views(want)
    return tuple(exact(part, getattr(got, part), getattr(right, part), why=why) for part, why in reasons.items())


def _with(inputs: Inputs, **changes: torch.Tensor) -> Inputs:
    """Fresh inputs, some of them replaced, with a cache of their own."""
    fresh: dict[str, Any] = {"cache": moved(inputs.cache, inputs.cache.device), **changes}
    return dataclasses.replace(inputs, **fresh)


def _permuted(inputs: Inputs) -> Inputs:
    tokens = inputs.slots.numel()
    k = inputs.k.clone()
    k[:tokens] = inputs.k[:tokens].flip(0)
    return _with(inputs, k=k, slots=inputs.slots.flip(0).clone())


def _other_padding(inputs: Inputs) -> Inputs | None:
    tokens = inputs.slots.numel()
    if inputs.k.shape[0] == tokens:
        return None
    k = inputs.k.clone()
    k[tokens:] = float("nan")
    return _with(inputs, k=k)


def _skipped_dropped(inputs: Inputs) -> Inputs | None:
    kept = inputs.slots >= 0
    if bool(kept.all()):
        return None
    return _with(inputs, k=inputs.k[: inputs.slots.numel()][kept].clone(), slots=inputs.slots[kept].clone())


def _wider_pages(inputs: Inputs) -> Inputs:
    blocks, block_size, width = inputs.cache.shape
    cache = guarded((blocks, block_size, width), torch.uint8, gaps=(inputs.cache.stride(0) + 576, 0))
    cache.copy_(inputs.cache)
    return _with(inputs, cache=cache)


def _already_written(inputs: Inputs) -> Inputs:
    return _with(inputs, cache=reference(inputs).cache)


def _doubled(inputs: Inputs) -> Inputs | None:
    """Only where no group is near the floor or the largest numbers."""
    tokens = inputs.slots.numel()
    lanes = inputs.k[:tokens, :NOPE_LANES].float().unflatten(1, (GROUPS, 64))
    amax = lanes.abs().amax(2)
    if tokens == 0 or float(amax.min()) < 1e-3 or float(amax.max()) > 1e30:
        return None
    k = inputs.k.clone()
    k[:tokens, :NOPE_LANES] *= 2
    return _with(inputs, k=k)


def _scales_raised(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    cache = moved(first.cache, first.cache.device)
    written = inputs.slots[inputs.slots >= 0]
    block_size = cache.shape[1]
    scales = records.record_views(cache).scales
    at = (written // block_size, written % block_size)
    rows = scales[at]
    rows[:, :GROUPS] += 1
    scales[at] = rows
    return Outputs(cache)


def _already_quantised(inputs: Inputs) -> Inputs | None:
    """The numbers that the records stand for, written again; only where they are exact in bfloat16."""
    written = (inputs.slots >= 0).nonzero().flatten()
    if not written.numel():
        return None
    wide = records.dequantise(reference(inputs).cache, inputs.slots[written], inputs.encoding, torch.float64)
    rows = wide.to(torch.bfloat16)
    if not bool((rows.double() == wide)[:, :NOPE_LANES].all()):
        return None
    k = moved(inputs.k, inputs.k.device)
    k[written, :NOPE_LANES] = rows[:, :NOPE_LANES]
    return _with(inputs, k=k)


def _values(answer: Outputs) -> torch.Tensor:
    """What the codes of every record stand for, bytes that nobody wrote among them.

    Read as OCP, FNUZ codes are all twice as large; a written cache holds none of the codes in which the two differ more.
    """
    blocks, block_size, _ = answer.cache.shape
    slots = torch.arange(blocks * block_size)
    return records.dequantise(answer.cache, slots, "float8_e4m3fn", torch.float64)[:, :NOPE_LANES]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


LAWS: tuple[Law, ...] = (
    Law("W1 tokens permuted", "the order of the rows does not matter", _permuted, _same, "bitwise"),
    Law("W2 padding rows changed", "rows beyond the slots are not used", _other_padding, _same, "bitwise"),
    Law("W3 skipped rows dropped", "a row with a negative slot leaves no trace", _skipped_dropped, _same, "bitwise"),
    Law("W4 pages further apart", "the block stride moves pages and changes no record", _wider_pages, _same, "bitwise"),
    Law("W5 written twice", "what lay in the cache before does not matter", _already_written, _same, "bitwise"),
    Law(
        "W6 lanes doubled", "doubled numbers have the same codes and a scale byte that is one higher", _doubled,
        _scales_raised, "bitwise",
    ),
    Law(
        "W7 already quantised", "what a record stands for is written as the same numbers, if in other bytes",
        _already_quantised, _same, "bitwise", _values,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where a writer believes that the bytes of a record belong."""

    token_pitch: int = DATA_BYTES
    rope: int = NOPE_LANES
    scale_pitch: int = SCALE_BYTES
    scales_behind_data: bool = False
    unpadded_blocks: bool = False


_Bytes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _placed(inputs: Inputs, parts: _Bytes, layout: _Layout | None = None, slots: torch.Tensor | None = None) -> Outputs:
    """The cache after each token's codes, RoPE bytes and scales went where `layout` says, one token after the other.

    Bytes that fall outside the cache's elements are lost.
    """
    layout = layout or _Layout()
    if is_vast(inputs.cache):
        # The same fault on pages that lie together, carried over to where they lie.
        near = _placed(dataclasses.replace(inputs, cache=guarded_copy(inputs.cache)), parts, layout, slots)
        cache = moved(inputs.cache, inputs.cache.device)
        cache.copy_(near.cache)
        return Outputs(cache)
    cache = moved(inputs.cache, inputs.cache.device)
    block_size = cache.shape[1]
    stride = RECORD_BYTES * block_size if layout.unpadded_blocks else cache.stride(0)
    flat = storage_bytes(cache)
    before = flat.clone()
    base = int(cache.storage_offset())
    for token, slot in enumerate((inputs.slots if slots is None else slots).tolist()):
        if slot < 0:
            continue
        page, place = base + slot // block_size * stride, slot % block_size
        scales = page + DATA_BYTES * block_size + layout.scale_pitch * place
        if layout.scales_behind_data:
            scales = page + DATA_BYTES * place + DATA_BYTES
        at = page + layout.token_pitch * place
        for start, values in zip((at, at + layout.rope, scales), parts, strict=True):
            flat[start : start + values.shape[1]] = values[token][: max(0, flat.numel() - start)]
    outside = ~owned_bytes(cache)
    flat[outside] = before[outside]
    return Outputs(cache)


def _right_bytes(inputs: Inputs) -> _Bytes:
    rows = inputs.k[: inputs.slots.numel()]
    codes, scales = records.quantise(rows, inputs.encoding)
    return codes, rows[:, NOPE_LANES:].contiguous().view(torch.uint8), scales


def _misplaced(layout: _Layout) -> Callable[[Inputs], Outputs | None]:
    return lambda inputs: _placed(inputs, _right_bytes(inputs), layout)


def _quantised(
    inputs: Inputs,
    *,
    limit: float | None = None,
    floor: float = records.AMAX_FLOOR,
    exponent_of: Callable[[torch.Tensor, float], torch.Tensor] = numbers.scale_exponent,
    lanes_per_scale: int = 64,
    encoding: numbers.Encoding | None = None,
    signed_maximum: bool = False,
) -> _Bytes:
    """The bytes of a writer that departs from the formula where the arguments say."""
    _, rope, scales = _right_bytes(inputs)
    encoding = encoding or inputs.encoding
    top = numbers.SCALED_MAXIMUM[encoding] if limit is None else limit
    lanes = inputs.k[: inputs.slots.numel(), :NOPE_LANES].double()
    size = lanes if signed_maximum else lanes.abs()
    amax = size.unflatten(1, (-1, lanes_per_scale)).amax(2).clamp(min=floor)
    empty = amax == 0
    exponent = exponent_of(torch.where(empty, 1.0, amax).float(), top).double()
    exponent = exponent.repeat_interleave(lanes_per_scale, dim=1)
    scaled = torch.ldexp(lanes, -exponent).clamp(-top, top)
    # A scale of 2^-infinity is zero, and zero over zero no number.
    scaled = torch.where(empty.repeat_interleave(lanes_per_scale, dim=1), float("nan"), scaled)
    byte = (exponent[:, ::64] + numbers.E8M0_BIAS).clamp(0, 255)
    scales[:, :GROUPS] = torch.where(empty.repeat_interleave(lanes_per_scale, 1)[:, ::64], 0, byte).to(torch.uint8)
    return numbers.encode(scaled, encoding), rope, scales


def _floor_exponent(amax: torch.Tensor, limit: float) -> torch.Tensor:
    exponent = numbers.scale_exponent(amax, limit)
    exactly = torch.ldexp(torch.full_like(amax, limit, dtype=torch.float64), exponent.double()) == amax
    return torch.where(exactly, exponent, exponent - 1)


def _nearest_exponent(amax: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.log2(amax.double() / limit).round().to(torch.int32)


def _group_of_128(inputs: Inputs) -> Outputs:
    """One scale for 128 lanes; the last group stands alone."""
    rows = inputs.k[: inputs.slots.numel()].float()
    pairs = rows.abs().unflatten(1, (4, 128)).clone()
    pairs[:, 3, 64:] = 0
    shared = pairs.amax(2, keepdim=True).expand(-1, -1, 128).flatten(1)[:, :NOPE_LANES:64]
    _, rope, scales = _right_bytes(inputs)
    exponent = numbers.scale_exponent(shared.clamp(min=records.AMAX_FLOOR), numbers.SCALED_MAXIMUM[inputs.encoding])
    scaled = torch.ldexp(rows[:, :NOPE_LANES].double(), -exponent.double().repeat_interleave(64, dim=1))
    scales[:, :GROUPS] = (exponent + numbers.E8M0_BIAS).to(torch.uint8)
    return _placed(inputs, (numbers.encode(scaled, inputs.encoding), rope, scales))


def _changed_codes(change: Callable[[Inputs, torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    def answer(inputs: Inputs) -> Outputs:
        codes, rope, scales = _right_bytes(inputs)
        return _placed(inputs, (change(inputs, codes), rope, scales))

    return answer


def _negative_zero(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    negative = torch.signbit(inputs.k[: inputs.slots.numel(), :NOPE_LANES].float())
    return torch.where((codes == 0) & negative, 0x80, codes).to(torch.uint8)


def _truncated(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    _, _, scales = _right_bytes(inputs)
    power = numbers.e8m0_decode(scales[:, :GROUPS], torch.float64).repeat_interleave(64, dim=1)
    value = numbers.decode(codes, inputs.encoding, torch.float64) * power
    outward = value.abs() > inputs.k[: inputs.slots.numel(), :NOPE_LANES].double().abs()
    return torch.where(outward, codes - 1, codes)


def _top_saturated(inputs: Inputs, codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes & 0x78 == 0x78, codes & 0x80 | 0x7E, codes)


def _rope(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    def answer(inputs: Inputs) -> Outputs:
        codes, _, scales = _right_bytes(inputs)
        lanes = inputs.k[: inputs.slots.numel(), NOPE_LANES:].contiguous()
        return _placed(inputs, (codes, change(lanes).contiguous().view(torch.uint8), scales))

    return answer


def _pad_byte_left(inputs: Inputs) -> Outputs:
    codes, rope, scales = _right_bytes(inputs)
    return _placed(inputs, (codes, rope, scales[:, :GROUPS]))


def _negative_slots_wrap(inputs: Inputs) -> Outputs:
    rows = inputs.cache.shape[0] * inputs.cache.shape[1]
    return _placed(inputs, _right_bytes(inputs), slots=torch.where(inputs.slots < 0, inputs.slots % rows, inputs.slots))


def _rows_from_the_end(inputs: Inputs) -> Outputs | None:
    tokens = inputs.slots.numel()
    if inputs.k.shape[0] == tokens:
        return None
    return _placed(inputs, _right_bytes(dataclasses.replace(inputs, k=inputs.k[inputs.k.shape[0] - tokens :])))


def _offsets_of_32_bits(inputs: Inputs) -> Outputs | None:
    """Records whose block starts beyond 2^31 bytes land in front of the cache."""
    block = inputs.slots // inputs.cache.shape[1]
    lost = block * inputs.cache.stride(0) >= 1 << 31
    if not lost.any():
        return None
    return _placed(inputs, _right_bytes(inputs), slots=torch.where(lost, -1, inputs.slots))


def _other_encoding(inputs: Inputs) -> Outputs:
    other: numbers.Encoding = "float8_e4m3fn" if inputs.encoding == "float8_e4m3fnuz" else "float8_e4m3fnuz"
    return _placed(inputs, _quantised(inputs, encoding=other))


MUTANTS: tuple[Mutant, ...] = (
    Mutant("token-pitch-584", "records lay 584 bytes apart", _misplaced(_Layout(token_pitch=RECORD_BYTES))),
    Mutant(
        "scales-behind-data",
        "the scales stood behind their own record's data",
        _misplaced(_Layout(scales_behind_data=True)),
    ),
    Mutant("scale-pitch-7", "the scales of a record took 7 bytes", _misplaced(_Layout(scale_pitch=7))),
    Mutant("unpadded-block-stride", "blocks lay 584 bytes a record apart", _misplaced(_Layout(unpadded_blocks=True))),
    Mutant("rope-at-512", "the RoPE lanes started at byte 512", _misplaced(_Layout(rope=512))),
    Mutant(
        "rope-big-endian",
        "the RoPE lanes were written high byte first",
        _rope(lambda lanes: lanes.view(torch.uint8).unflatten(1, (64, 2)).flip(2).flatten(1)),
    ),
    Mutant("rope-as-float16", "the RoPE lanes were written as float16", _rope(lambda lanes: lanes.to(torch.float16))),
    Mutant(
        "scale-of-128-lanes",
        "one scale served 128 lanes",
        _group_of_128,
    ),
    Mutant(
        "scale-of-maximum-without-sign",
        "the scale ignored negative lanes",
        lambda inputs: _placed(inputs, _quantised(inputs, signed_maximum=True)),
    ),
    Mutant(
        "fnuz-negative-zero-is-nan",
        "-0 and negative underflow were encoded as 0x80 in FNUZ",
        lambda inputs: _changed_codes(_negative_zero)(inputs) if inputs.encoding == "float8_e4m3fnuz" else None,
    ),
    Mutant(
        "fnuz-limit-240",
        "FNUZ groups were scaled to 240 instead of 224",
        lambda inputs: (
            _placed(inputs, _quantised(inputs, limit=240.0)) if inputs.encoding == "float8_e4m3fnuz" else None
        ),
    ),
    Mutant(
        "amax-floor-missing",
        "the floor of 1e-4 were missing",
        lambda inputs: _placed(inputs, _quantised(inputs, floor=0.0)),
    ),
    Mutant(
        "exponent-floored",
        "the exponent were rounded down",
        lambda inputs: _placed(inputs, _quantised(inputs, exponent_of=_floor_exponent)),
    ),
    Mutant(
        "exponent-to-nearest",
        "the exponent were rounded to nearest",
        lambda inputs: _placed(inputs, _quantised(inputs, exponent_of=_nearest_exponent)),
    ),
    Mutant(
        "exponent-one-high-at-the-limit",
        "a group that just fits took the next scale",
        lambda inputs: _placed(
            inputs, _quantised(inputs, exponent_of=lambda amax, limit: _floor_exponent(amax, limit) + 1)
        ),
    ),
    Mutant("other-encoding", "the codes were of the other e4m3 format", _other_encoding),
    Mutant("codes-toward-zero", "codes were rounded toward zero", _changed_codes(_truncated)),
    Mutant(
        "top-binade-saturated",
        "everything in the highest binade became the largest code",
        _changed_codes(_top_saturated),
    ),
    Mutant("pad-byte-left", "the unused scale byte were not cleared", _pad_byte_left),
    Mutant("negative-slots-wrap", "negative slots counted from the end of the cache", _negative_slots_wrap),
    Mutant("offsets-of-32-bits", "block offsets wrapped at 2^31 bytes", _offsets_of_32_bits),
    Mutant("rows-from-the-end", "the last rows of k were used, padding included", _rows_from_the_end),
)


def _by_logarithm(inputs: Inputs) -> Outputs:
    """ceil(log2(a * (1 / F))) in float32, as kernels evaluate it: the same integer for every bfloat16 magnitude."""

    def exponent(amax: torch.Tensor, limit: float) -> torch.Tensor:
        return torch.ceil(torch.log2(amax * torch.tensor(1.0 / limit))).to(torch.int32)

    return _placed(inputs, _quantised(inputs, exponent_of=exponent))


HONEST: tuple[Honest, ...] = (Honest("exponent-by-logarithm", Precision(), _by_logarithm),)
