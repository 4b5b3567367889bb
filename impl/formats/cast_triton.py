"""How do our own kernels cast, and how do the casts of Triton's language?"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cases.formats.cast import Inputs, Outputs
from impl.formats import codes_triton
from impl.formats.codes_triton import (
    decode_code,
    decode_power,
    encode_code,
    encode_power,
    round_bfloat16,
    widen_bfloat16,
)

_BLOCK = 1024
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _encode(
    source, out, count, WIDE: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr, OVERFLOW: tl.constexpr,
    FRACTION: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr,
    SIGNED_ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    bits = tl.load(source + lane, mask=inside, other=0)
    if WIDE == "bfloat16":
        bits = widen_bfloat16(bits)
    if FORMAT == "bfloat16":
        code = round_bfloat16(bits).to(tl.int16)
    elif FORMAT == "float8_e8m0fnu":
        code = encode_power(bits, UP, OVERFLOW).to(tl.uint8)
    else:
        code = encode_code(bits, FRACTION, BIAS, SIGN, LARGEST, NAN, SIGNED_ZERO, OVERFLOW).to(tl.uint8)
    tl.store(out + lane, code, mask=inside)


@triton.jit
def _decode(
    source, out, count, WIDE: tl.constexpr, FORMAT: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    SIGN: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr, SIGNED_ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    code = tl.load(source + lane, mask=inside, other=0)
    if FORMAT == "bfloat16":
        bits = widen_bfloat16(code)
    elif FORMAT == "float8_e8m0fnu":
        bits = decode_power(code.to(tl.int32), _NAN)
    else:
        bits = decode_code(code.to(tl.int32), FRACTION, BIAS, SIGN, LARGEST, NAN, SIGNED_ZERO)
    if WIDE == "bfloat16":
        # Every number of the formats is exact in bfloat16.
        tl.store(out + lane, (bits >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(out + lane, bits, mask=inside)


@triton.jit
def _encode_by_language(source, out, count, TYPE: tl.constexpr, BITCAST: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    code = tl.load(source + lane, mask=inside, other=0.0).to(TYPE)
    if BITCAST:
        code = code.to(tl.uint8, bitcast=True)
    tl.store(out + lane, code, mask=inside)


@triton.jit
def _decode_by_language(source, out, count, TYPE: tl.constexpr, BITCAST: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    if BITCAST:
        code = tl.load(source + lane, mask=inside, other=0).to(TYPE, bitcast=True)
    else:
        code = tl.load(source + lane, mask=inside, other=0.0)
    tl.store(out + lane, code.to(out.dtype.element_ty), mask=inside)


def _patterns(tensor: torch.Tensor) -> torch.Tensor:
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.uint8: torch.uint8}
    return tensor.view(integers[tensor.dtype])


def run(inputs: Inputs) -> Outputs:
    """Casts by integer arithmetic, one program per 1024 elements."""
    count = inputs.source.numel()
    # The formats without a layout ignore it.
    layout = codes_triton.LAYOUTS.get(inputs.format, codes_triton.LAYOUTS["float8_e4m3fn"])
    fields: dict[str, Any] = {name.upper(): value for name, value in layout._asdict().items()}
    grid = (triton.cdiv(count, _BLOCK),)
    source, out = _patterns(inputs.source), _patterns(inputs.out)
    if count == 0:
        return Outputs(inputs.out)
    if inputs.direction == "encode":
        wide = "bfloat16" if inputs.source.dtype == torch.bfloat16 else "float32"
        _encode[grid](
            source, out, count, WIDE=wide, FORMAT=inputs.format, UP=inputs.rounding == "up", OVERFLOW=inputs.overflow,
            **fields, BLOCK=_BLOCK,
        )  # fmt: skip
    else:
        wide = "bfloat16" if inputs.out.dtype == torch.bfloat16 else "float32"
        _decode[grid](source, out, count, WIDE=wide, FORMAT=inputs.format, **fields, BLOCK=_BLOCK)
    return Outputs(inputs.out)


_TYPES = {"float8_e4m3fn": tl.float8e4nv, "float8_e4m3fnuz": tl.float8e4b8, "bfloat16": tl.bfloat16}


def run_language(inputs: Inputs) -> Outputs:
    """Casts by `tensor.to(type)` of Triton's language."""
    count = inputs.source.numel()
    if count:
        kernel = _encode_by_language if inputs.direction == "encode" else _decode_by_language
        kernel[(triton.cdiv(count, _BLOCK),)](
            inputs.source,
            inputs.out,
            count,
            TYPE=_TYPES[inputs.format],
            BITCAST=inputs.format != "bfloat16",
            BLOCK=_BLOCK,
        )
    return Outputs(inputs.out)
