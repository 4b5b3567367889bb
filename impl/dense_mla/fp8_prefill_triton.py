"""How does our own kernel answer causal prefill over FP8 casts?

A program per tile of query rows, request and head: it walks the keys of its request up to its last row. Casts are integer
arithmetic, and what they give is kept in bfloat16, which holds it exactly; scores and sums are float32, and weights are
rounded to bfloat16 before they multiply values. No head is padded.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.dense_mla.fp8_prefill import Inputs, Outputs
from impl.formats.codes_triton import decode_code, encode_code, widen_bfloat16

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = 1.4426950408889634
_ROWS, _KEYS = 32, 32


@triton.jit
def _cast(patterns):
    """bf16 numbers that OCP e4m3 holds, nearest to those of int16 bfloat16 patterns."""
    codes = encode_code(widen_bfloat16(patterns), 3, 7, 0x80, 0x7E, 0x7F, True, "saturate")
    return decode_code(codes, 3, 7, 0x80, 0x7E, 0x7F, True).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def prefill_kernel(
    query, query_row, query_head, key, key_row, key_head, value, value_row, value_head, query_start, out, out_row,
    scale, lanes, value_lanes,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, VALUE_LANES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a request for one head; grid (tiles, requests, heads)."""
    request = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    start = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - start
    first = tl.program_id(0) * ROWS
    if first < length:
        row = first + tl.arange(0, ROWS)
        lane = tl.arange(0, LANES)
        value_lane = tl.arange(0, VALUE_LANES)
        present = (row < length)[:, None]
        base = start.to(tl.int64)
        from_query = query + (base + row)[:, None] * query_row + head * query_head + lane[None, :]
        vector = _cast(tl.load(from_query, mask=present & (lane < lanes)[None, :], other=0))
        top = tl.full((ROWS,), _LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        merged = tl.zeros((ROWS, VALUE_LANES), tl.float32)
        for begin in range(0, tl.minimum(first + ROWS, length), KEYS):
            place = begin + tl.arange(0, KEYS)
            here = (place < length)[:, None]
            at = (base + place)[:, None]
            keys = _cast(
                tl.load(
                    key + at * key_row + head * key_head + lane[None, :], mask=here & (lane < lanes)[None, :], other=0
                )
            )
            values = _cast(
                tl.load(
                    value + at * value_row + head * value_head + value_lane[None, :],
                    mask=here & (value_lane < value_lanes)[None, :], other=0,
                )
            )  # fmt: skip
            seen = place[None, :] <= row[:, None]
            score = tl.where(seen, tl.dot(vector, tl.trans(keys)) * scale, _LOWEST)
            higher = tl.maximum(top, tl.max(score, 1))
            weight = tl.where(seen, tl.exp2(score - higher[:, None]), 0.0)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(weight, 1)
            merged = tl.dot(weight.to(tl.bfloat16), values, merged * shrink[:, None])
            top = higher
        # Correctly rounded: n times a value over n is that value. Rows behind the request's last one see all of it.
        merged = tl.div_rn(merged, total[:, None])
        to = out + (base + row)[:, None] * out_row + head * value_lanes + value_lane[None, :]
        tl.store(to, merged.to(out.dtype.element_ty), mask=present & (value_lane < value_lanes)[None, :])


def run(inputs: Inputs) -> Outputs:
    """The whole batch in one launch."""
    tokens, heads, width = inputs.value.shape
    lanes = inputs.query.shape[2]
    query, key, value = (one.view(torch.int16) for one in (inputs.query, inputs.key, inputs.value))
    requests = inputs.query_start.numel() - 1
    if tokens and requests:
        prefill_kernel[(-(-tokens // _ROWS), requests, heads)](
            query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1), value, value.stride(0),
            value.stride(1), inputs.query_start, inputs.out, inputs.out.stride(0), inputs.scale * _LOG2_E, lanes, width,
            ROWS=_ROWS, KEYS=_KEYS, LANES=max(16, triton.next_power_of_2(lanes)),
            VALUE_LANES=max(16, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip
    return Outputs(inputs.out)
