"""How does our own kernel rotate rows and write them as packed records?

One program a token. As in `impl.cache.kv_record_write_triton` the row is handled as bit patterns; only the rotation
multiplies and adds, in float32, and what the compiler fuses it may fuse.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from impl.formats.codes_triton import LAYOUTS, encode_code, round_bfloat16, widen_bfloat16

# float32 bit patterns: 1e-4 (rounded), and the fraction fields of 448 = 1.75 * 2^8 and 224 = 1.75 * 2^7.
_FLOOR = tl.constexpr(0x38D1B717)
_LIMIT_FRACTION = tl.constexpr(0x600000)


@triton.jit
def _write(
    rows, row_stride, positions, cos_sin, cos_sin_stride, slots, cache, block_size, block_stride, RATIO: tl.constexpr,
    ZERO_NANS: tl.constexpr, LIMIT_EXPONENT: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
    NAN: tl.constexpr, SIGNED_ZERO: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        position = tl.load(positions + token)
        if (position + 1) % RATIO == 0:
            block = slot // block_size
            place = slot - block * block_size
            page = cache + block * block_stride
            data = page + place * 576
            row = rows + token * row_stride

            group = tl.arange(0, 8)
            is_code = group < 7
            lanes = group[:, None] * 64 + tl.arange(0, 64)[None, :]
            bits = widen_bfloat16(tl.load(row + lanes, mask=is_code[:, None], other=0))
            amax = tl.maximum(tl.max(bits & 0x7FFFFFFF, axis=1), _FLOOR)
            exponent = (amax >> 23) - 127 - LIMIT_EXPONENT
            exponent += ((amax & 0x7FFFFF) > _LIMIT_FRACTION).to(tl.int32)
            power = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
            scaled = (bits.to(tl.float32, bitcast=True) * power[:, None]).to(tl.int32, bitcast=True)
            codes = encode_code(scaled, 3, BIAS, 0x80, LARGEST, NAN, SIGNED_ZERO, "saturate")
            tl.store(data + lanes, codes.to(tl.uint8), mask=is_code[:, None])
            scales = tl.where(is_code, exponent + 127, 0)
            tl.store(page + block_size * 576 + place * 8 + group, scales.to(tl.uint8))

            pair = tl.arange(0, 32)
            even = widen_bfloat16(tl.load(row + 448 + 2 * pair)).to(tl.float32, bitcast=True)
            odd = widen_bfloat16(tl.load(row + 449 + 2 * pair)).to(tl.float32, bitcast=True)
            angle = cos_sin + position // RATIO * RATIO * cos_sin_stride + pair
            cos = tl.load(angle)
            sin = tl.load(angle + 32)
            _store_lane(data + 448 + 4 * pair, even * cos - odd * sin, ZERO_NANS, ALIGNED)
            _store_lane(data + 450 + 4 * pair, odd * cos + even * sin, ZERO_NANS, ALIGNED)


@triton.jit
def _store_lane(at, value, ZERO_NANS: tl.constexpr, ALIGNED: tl.constexpr):
    bits = value.to(tl.int32, bitcast=True)
    if ZERO_NANS:
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0, bits)
    pattern = round_bfloat16(bits)
    if ALIGNED:
        tl.store(at.to(tl.pointer_type(tl.int16), bitcast=True), pattern.to(tl.int16))
    else:
        tl.store(at, (pattern & 0xFF).to(tl.uint8))
        tl.store(at + 1, (pattern >> 8).to(tl.uint8))


def write(
    rows: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor,
    encoding: str, ratio: int, zero_nans: bool,
) -> None:  # fmt: skip
    """Writes the records of all tokens that end a group of `ratio` and have a slot, in one launch."""
    tokens = slots.numel()
    if tokens:
        layout = LAYOUTS[encoding]
        stride = cache.stride(0)
        _write[(tokens,)](
            rows.view(torch.int16), rows.stride(0), positions, cos_sin, cos_sin.stride(0), slots, cache, cache.shape[1],
            stride, RATIO=ratio, ZERO_NANS=zero_nans, LIMIT_EXPONENT=8 if encoding == "float8_e4m3fn" else 7,
            BIAS=layout.bias, LARGEST=layout.largest, NAN=layout.nan, SIGNED_ZERO=layout.signed_zero,
            ALIGNED=stride % 2 == 0 and cache.data_ptr() % 2 == 0,
        )  # fmt: skip
