"""How does our own kernel write packed key-value records?

One program a token. The row is handled as bit patterns: the largest magnitude is an integer maximum, the exponent an
integer rule, the scale an exponent field, the codes come from `impl.formats.codes_triton`. No logarithm, no division.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.cache.kv_record_write import Inputs, Outputs
from impl.formats.codes_triton import LAYOUTS, encode_code, widen_bfloat16

# float32 bit patterns: 1e-4 (rounded), and the fraction fields of 448 = 1.75 * 2^8 and 224 = 1.75 * 2^7.
_FLOOR = tl.constexpr(0x38D1B717)
_LIMIT_FRACTION = tl.constexpr(0x600000)


@triton.jit
def _write(
    k, k_stride, slots, cache, block_size, block_stride, LIMIT_EXPONENT: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, NAN: tl.constexpr, SIGNED_ZERO: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        group = tl.arange(0, 8)
        lane = tl.arange(0, 64)
        lanes = group[:, None] * 64 + lane[None, :]
        patterns = tl.load(k + token * k_stride + lanes)
        bits = widen_bfloat16(patterns)

        amax = tl.maximum(tl.max(bits & 0x7FFFFFFF, axis=1), _FLOOR)
        exponent = (amax >> 23) - 127 - LIMIT_EXPONENT
        exponent += ((amax & 0x7FFFFF) > _LIMIT_FRACTION).to(tl.int32)
        power = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = (bits.to(tl.float32, bitcast=True) * power[:, None]).to(tl.int32, bitcast=True)
        codes = encode_code(scaled, 3, BIAS, 0x80, LARGEST, NAN, SIGNED_ZERO, "saturate")

        block = slot // block_size
        place = slot - block * block_size
        page = cache + block * block_stride
        data = page + place * 576
        is_code = group < 7
        tl.store(data + lanes, codes.to(tl.uint8), mask=is_code[:, None])
        rope = data + 448 + 2 * lane[None, :] + 0 * group[:, None]
        if ALIGNED:
            tl.store(rope.to(tl.pointer_type(tl.int16), bitcast=True), patterns, mask=(group == 7)[:, None])
        else:
            tl.store(rope, patterns.to(tl.uint8), mask=(group == 7)[:, None])
            tl.store(rope + 1, (patterns >> 8).to(tl.uint8), mask=(group == 7)[:, None])
        scales = tl.where(is_code, exponent + 127, 0)
        tl.store(page + block_size * 576 + place * 8 + group, scales.to(tl.uint8))


def run(inputs: Inputs) -> Outputs:
    """Writes the records of all tokens in one launch."""
    tokens = inputs.slots.numel()
    if tokens:
        layout = LAYOUTS[inputs.encoding]
        stride = inputs.cache.stride(0)
        _write[(tokens,)](
            inputs.k.view(torch.int16), inputs.k.stride(0), inputs.slots, inputs.cache, inputs.cache.shape[1], stride,
            LIMIT_EXPONENT=8 if inputs.encoding == "float8_e4m3fn" else 7, BIAS=layout.bias, LARGEST=layout.largest,
            NAN=layout.nan, SIGNED_ZERO=layout.signed_zero,
            ALIGNED=stride % 2 == 0 and inputs.cache.data_ptr() % 2 == 0,
        )  # fmt: skip
    return Outputs(inputs.cache)
