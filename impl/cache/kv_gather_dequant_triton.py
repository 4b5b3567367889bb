"""How does our own kernel gather packed key-value records into bfloat16 rows?

A grid of requests and workers; each worker takes every so many-th token. Codes are decoded by integer arithmetic in
`impl.formats.codes_triton`, scales are exponent fields put together bit by bit, and the product is exact, so that the
same source is right where FNUZ types are missing and where exp2 flushes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cases.cache.kv_gather_dequant import Inputs, Outputs
from impl.formats.codes_triton import LAYOUTS, decode_code, decode_power, round_bfloat16

_WORKERS = 64
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _gather(
    out, out_request, out_row, cache, block_size, block_stride, table, table_stride, seq_lens, gather_lens, offset,
    HAS_GATHER: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr,
    SIGNED_ZERO: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + request)
    count = length
    if HAS_GATHER:
        count = tl.load(gather_lens + request)
    group = tl.arange(0, 8)
    lane = tl.arange(0, 64)
    lanes = group[:, None] * 64 + lane[None, :]
    is_code = group < 7
    rope = tl.arange(0, 64)
    for i in range(tl.program_id(1), count, tl.num_programs(1)):
        position = length - count + i
        column = position // block_size
        place = position - column * block_size
        block = tl.load(table + request * table_stride + column).to(tl.int64)
        page = cache + block * block_stride
        data = page + place * 576
        row = out + request * out_request + (offset + i).to(tl.int64) * out_row

        codes = tl.load(data + lanes, mask=is_code[:, None], other=0).to(tl.int32)
        scales = tl.load(page + block_size * 576 + place * 8 + group, mask=is_code, other=127).to(tl.int32)
        number = decode_code(codes, 3, BIAS, 0x80, LARGEST, NAN, SIGNED_ZERO).to(tl.float32, bitcast=True)
        power = decode_power(scales, _INFINITY).to(tl.float32, bitcast=True)
        product = (number * power[:, None]).to(tl.int32, bitcast=True)
        tl.store(row + lanes, round_bfloat16(product).to(tl.int16), mask=is_code[:, None])

        tail = data + 448 + 2 * rope
        if ALIGNED:
            patterns = tl.load(tail.to(tl.pointer_type(tl.int16), bitcast=True))
        else:
            patterns = (tl.load(tail).to(tl.int32) | (tl.load(tail + 1).to(tl.int32) << 8)).to(tl.int16)
        tl.store(row + 448 + rope, patterns)


def run(inputs: Inputs) -> Outputs:
    """Gathers the rows of all requests in one launch; the hint bounds the number of workers only."""
    requests = inputs.seq_lens.numel()
    if requests:
        layout = LAYOUTS[inputs.encoding]
        stride = inputs.cache.stride(0)
        workers = _WORKERS if inputs.max_gather_len is None else max(1, min(_WORKERS, inputs.max_gather_len))
        _gather[(requests, workers)](
            inputs.out.view(torch.int16), inputs.out.stride(0), inputs.out.stride(1), inputs.cache,
            inputs.cache.shape[1], stride, inputs.table, inputs.table.stride(0), inputs.seq_lens,
            inputs.seq_lens if inputs.gather_lens is None else inputs.gather_lens, inputs.offset,
            HAS_GATHER=inputs.gather_lens is not None, BIAS=layout.bias, LARGEST=layout.largest, NAN=layout.nan,
            SIGNED_ZERO=layout.signed_zero, ALIGNED=stride % 2 == 0 and inputs.cache.data_ptr() % 2 == 0,
        )  # fmt: skip
    return Outputs(inputs.out)
