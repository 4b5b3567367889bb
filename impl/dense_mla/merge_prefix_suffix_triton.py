"""How does our own Triton kernel merge attention over a prefix with that over a suffix?

A program takes one token and head. A side that weighs nothing is not loaded. One source for gfx942, gfx950, CUDA and
Triton's interpreter; every offset is 64 bits wide, and codes come from integer arithmetic.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.merge_prefix_suffix import Inputs, Outputs
from impl.formats.codes_triton import LAYOUTS, encode_code


@triton.jit
def _merge(
    prefix, prefix_lse, prefix_step, prefix_head, suffix, suffix_lse, suffix_step, suffix_head, step, out, out_step,
    out_lse, lse_step, lse_head, scale, context, lanes,
    LANES: tl.constexpr, HAS_LSE: tl.constexpr, CODES: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    SIGN: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """One token and head; grid (tokens, heads). `step` and `out_step` lead from head to head, across tokens too."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = token * tl.num_programs(1) + head
    lane = tl.arange(0, LANES)
    used = lane < lanes
    merged = token < context
    second = tl.load(suffix_lse + head * suffix_head + token * suffix_step)
    first = tl.load(prefix_lse + head * prefix_head + token * prefix_step, mask=merged, other=-float("inf"))
    a = tl.where(first < float("inf"), first, -float("inf"))
    b = tl.where(second < float("inf"), second, -float("inf"))
    top = tl.maximum(a, b)
    base = tl.where(top > -float("inf"), top, 0.0)
    a = tl.exp(a - base)
    b = tl.exp(b - base)
    # A copied suffix weighs 1, empty or not.
    b = tl.where(merged, b, 1.0)
    total = a + b
    divisor = tl.where(total > 0.0, total, 1.0)
    lead = tl.load(prefix + place * step + lane, mask=used & (a > 0.0), other=0.0).to(tl.float32)
    tail = tl.load(suffix + place * step + lane, mask=used & (b > 0.0), other=0.0).to(tl.float32)
    value = tl.div_rn(lead * a + tail * b, tl.full((LANES,), 0.0, tl.float32) + divisor)
    if HAS_LSE:
        log = tl.where(total > 0.0, base + tl.log(divisor), -float("inf"))
        tl.store(out_lse + head * lse_head + token * lse_step, tl.where(merged, log, second))
    if CODES:
        value = tl.div_rn(value, tl.full((LANES,), 0.0, tl.float32) + tl.load(scale))
        code = encode_code(
            value.to(tl.int32, bitcast=True), FRACTION, BIAS, SIGN, LARGEST, NAN, SIGNED_ZERO, "saturate"
        )
        tl.store(out + place * out_step + lane, code.to(tl.uint8), mask=used)
    else:
        tl.store(out + place * out_step + lane, value.to(out.dtype.element_ty), mask=used)


def run(inputs: Inputs) -> Outputs:
    """The merge of our kernel, written into the output memory of `inputs`."""
    out, out_lse = inputs.out, inputs.out_lse
    tokens, heads, lanes = out.shape
    coded = inputs.out_scale is not None
    layout = LAYOUTS["float8_e4m3fnuz" if out.dtype == torch.float8_e4m3fnuz else "float8_e4m3fn"]
    lse = inputs.prefix_lse if out_lse is None else out_lse
    if tokens:
        _merge[(tokens, heads)](
            inputs.prefix, inputs.prefix_lse, inputs.prefix_lse.stride(1), inputs.prefix_lse.stride(0),
            inputs.suffix, inputs.suffix_lse, inputs.suffix_lse.stride(1), inputs.suffix_lse.stride(0),
            _step(inputs.prefix), out.view(torch.uint8) if coded else out, _step(out), lse, lse.stride(1), lse.stride(0),
            inputs.out_scale if coded else lse, tokens if inputs.context is None else inputs.context, lanes,
            LANES=triton.next_power_of_2(lanes), HAS_LSE=out_lse is not None, CODES=coded, FRACTION=layout.fraction,
            BIAS=layout.bias, SIGN=layout.sign, LARGEST=layout.largest, NAN=layout.nan, SIGNED_ZERO=layout.signed_zero,
            num_warps=4,
        )  # fmt: skip
    return Outputs(out, out_lse)


def _step(tensor: torch.Tensor) -> int:
    """Elements from one head to the next; those from token to token where there is one head only."""
    return tensor.stride(1) if tensor.shape[1] > 1 else tensor.stride(0)
