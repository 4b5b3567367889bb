"""How do our own Triton kernels answer sparse MLA decode?

A partial kernel walks one split of one query's keys for 16 heads and leaves the maximum, the sum and the un-normalised
values; a reduce kernel merges the splits, adds the sink, rotates back and rounds or quantises. One source for gfx942,
gfx950, CUDA and Triton's interpreter. Everything that the hardware disagrees on is integer arithmetic: fp8 codes are
decoded through fp16 bit patterns and encoded from fp32 ones, scales are exponents put together bit by bit.

Rounding points: the score and all sums are fp32, exp(score - max) is rounded to bf16 before it multiplies the values,
keys are exact in bf16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from cases.sparse_mla.decode import DecodeInputs, DecodeOutputs
from impl.sparse_mla import splits as split_rules
from impl.sparse_mla.decode_call import Call, RaggedSegment, call_of

LOWEST = -3.4028234663852886e38

_LOWEST = tl.constexpr(LOWEST)
_LANES = tl.constexpr(512)
_NOPE = tl.constexpr(448)
_TOKEN_BYTES = tl.constexpr(576)
# Seven groups of 64 lanes with a scale byte each, and the 64 rotated lanes with a pad byte.
_GROUPS = tl.constexpr(8)
_HEADS = tl.constexpr(split_rules.HEADS_PER_PROGRAM)

# Merging reads this many splits at a time, to bound the registers of a program.
_SPLITS_AT_ONCE = 8
# Eight hold a tile of 32 keys without spilling: four of 64 threads would need twice the registers.
_WARPS = 8


@triton.jit
def _attend(
    query, cache, indices, index_stride, first, last, rows, block, page_stride, scale, top, total, value,
    FNUZ: tl.constexpr, SCRUB: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Take the entries [first, last) of one segment into the running maximum, sum and values."""
    tile = tl.arange(0, KEYS)
    code_byte = tl.arange(0, _LANES)[None, :]
    scale_byte = tl.arange(0, _GROUPS)[None, :]
    # In units of bf16: byte 448 is the first rotated lane.
    rotated_place = tl.arange(_NOPE // 2, _NOPE // 2 + 64)[None, :]
    is_rotated = (scale_byte == 7)[:, :, None]
    scale_region = block * _TOKEN_BYTES
    for start in range(first, last, KEYS):
        entry = start + tile
        slot = tl.load(indices + entry * index_stride, mask=entry < last, other=-1).to(tl.int64)
        valid = (slot >= 0) & (slot < rows)
        seen = valid[:, None]
        # Fewer than 2^31 rows, so that the division is a 32-bit one.
        slot = tl.where(valid, slot, 0).to(tl.int32)
        page = slot // block
        place = slot - page * block
        page_start = cache + page.to(tl.int64) * page_stride
        data = (page_start + place * _TOKEN_BYTES)[:, None]
        # Group 7 reads bytes of rotated lanes as codes, and the pad byte as their scale; the rotated lanes replace it.
        codes = tl.load(data + code_byte, mask=seen, other=0).to(tl.int8, bitcast=True)
        exponent = (page_start + (scale_region + place * _GROUPS))[:, None] + scale_byte
        exponent = tl.load(exponent, mask=seen, other=127).to(tl.int32)
        power = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
        # The code shifted under fp16's sign and exponent is the same number divided by 2^8 (bias 7) or 2^7 (bias 8),
        # subnormals included: 0x7F and 0xFF become +-1.875 there, and FNUZ's 0x80 becomes -0.
        bits = tl.reshape((codes.to(tl.int16) << 7) & -16385, (KEYS, _GROUPS, 64))
        if SCRUB and not FNUZ:
            # 0x3F80 carries into the exponent's highest bit, which makes fp16's NaN of it; a mask would take two scalar
            # registers for each number.
            bits = bits | (((bits & 0x3F80) + 0x80) & 0x4000)
        key = bits.to(tl.float16, bitcast=True).to(tl.float32) * (128.0 if FNUZ else 256.0) * power[:, :, None]
        rotated = data.to(tl.pointer_type(tl.bfloat16), bitcast=True) + rotated_place
        rotated = tl.load(rotated, mask=seen, other=0.0).to(tl.float32)
        if SCRUB:
            key = tl.where(key == key, key, 0.0)
            rotated = tl.where(rotated == rotated, rotated, 0.0)
        key = tl.reshape(tl.where(is_rotated, rotated[:, None, :], key).to(tl.bfloat16), (KEYS, _LANES))
        counted = valid[None, :]
        score = tl.where(counted, tl.dot(query, tl.trans(key)) * scale, _LOWEST)
        higher = tl.maximum(top, tl.max(score, 1))
        # While nothing was valid the maximum is the sentinel and exp(0) would count every masked entry.
        weight = tl.where(counted, tl.exp(score - higher[:, None]), 0.0)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.dot(weight.to(tl.bfloat16), key, value * shrink[:, None])
        top = higher
    return top, total, value


@triton.jit
def _split_of(length, split, count):
    """The entries [first, last) that one of `count` splits takes of `length`."""
    chunk = (length + count - 1) // count
    first = tl.minimum(split * chunk, length)
    return first, tl.minimum(first + chunk, length)


@triton.jit
def partial_kernel(
    query, query_row, query_head, heads, scale,
    main_cache, main_indices, main_index_stride, main_indptr, main_rows, main_block, main_page_stride,
    extra_cache, extra_indices, extra_index_stride, extra_indptr, extra_rows, extra_block, extra_page_stride,
    part_top, part_total, part_value, one_wave,
    SPLITS: tl.constexpr, ADAPTIVE: tl.constexpr, HAS_EXTRA: tl.constexpr,
    MAIN_FNUZ: tl.constexpr, EXTRA_FNUZ: tl.constexpr, SCRUB_EXTRA: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One split of one query for 16 heads; grid (queries, splits, head blocks).

    part_top and part_total are [queries, splits, heads], part_value [queries, splits, heads, 512], contiguous fp32. A
    split without a valid key leaves the lowest finite number and 0; a split beyond the adaptive count leaves part_value
    as it was.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * _HEADS + tl.arange(0, _HEADS)
    lane = tl.arange(0, _LANES)
    present = head < heads
    main_start = tl.load(main_indptr + row).to(tl.int64)
    main_length = (tl.load(main_indptr + row + 1).to(tl.int64) - main_start).to(tl.int32)
    extra_start = main_start
    extra_length = main_length * 0
    if HAS_EXTRA:
        extra_start = tl.load(extra_indptr + row).to(tl.int64)
        extra_length = (tl.load(extra_indptr + row + 1).to(tl.int64) - extra_start).to(tl.int32)
    count = main_length * 0 + SPLITS
    if ADAPTIVE:
        tile = 32
        by_four = (main_length + 4 * tile - 1) // (4 * tile) + (extra_length + 4 * tile - 1) // (4 * tile)
        step = one_wave * tile
        by_wave = (main_length + step - 1) // step + (extra_length + step - 1) // step
        count = tl.where((one_wave > 4) & (one_wave < SPLITS) & (by_wave <= 3), one_wave, count)
        count = tl.where(by_four <= 3, 4, count)
    part = (row * SPLITS + split) * heads + head
    if split < count:
        rows_of_query = query + row * query_row + head.to(tl.int64) * query_head
        vector = tl.load(rows_of_query[:, None] + lane[None, :], mask=present[:, None], other=0.0)
        top = tl.full((_HEADS,), _LOWEST, tl.float32)
        total = tl.zeros((_HEADS,), tl.float32)
        value = tl.zeros((_HEADS, _LANES), tl.float32)
        first, last = _split_of(main_length, split, count)
        top, total, value = _attend(
            vector, main_cache, main_indices + main_start * main_index_stride, main_index_stride, first, last,
            main_rows, main_block, main_page_stride, scale, top, total, value, MAIN_FNUZ, True, KEYS,
        )  # fmt: skip
        if HAS_EXTRA:
            first, last = _split_of(extra_length, split, count)
            top, total, value = _attend(
                vector, extra_cache, extra_indices + extra_start * extra_index_stride, extra_index_stride, first, last,
                extra_rows, extra_block, extra_page_stride, scale, top, total, value, EXTRA_FNUZ, SCRUB_EXTRA, KEYS,
            )  # fmt: skip
        tl.store(part_top + part, top, mask=present)
        tl.store(part_total + part, total, mask=present)
        tl.store(part_value + part[:, None] * _LANES + lane[None, :], value, mask=present[:, None])
    else:
        tl.store(part_top + part, tl.full((_HEADS,), _LOWEST, tl.float32), mask=present)
        tl.store(part_total + part, tl.zeros((_HEADS,), tl.float32), mask=present)


@triton.jit
def _encode_e4m3fn(x):
    """The OCP e4m3 codes of fp32 numbers of magnitude up to 464, to nearest even, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The bias falls from 127 to 7; the carry of the rounding runs into the exponent, as it should.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # 2^14 has the smallest code as its last place: the addition rounds, and the low bits are the code.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def reduce_kernel(
    part_top, part_total, part_value, sink, positions, cos_sin, cos_sin_row,
    out, out_row, out_head, out_scales, scales_row, heads,
    SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, HEADS: tl.constexpr,
    HAS_SINK: tl.constexpr, ROTATE: tl.constexpr, MXFP8: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query for some heads and finish the rows; grid (queries, head blocks).

    The value of a split without a valid key is not read. With MXFP8, `out` and `out_scales` are uint8, and 32 lanes
    each share the smallest power of two that brings them to 448 or less.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, _LANES)
    present = head < heads
    split = tl.arange(0, SPLITS_PADDED)
    part = (row * SPLITS + split)[:, None] * heads + head[None, :]
    known = (split < SPLITS)[:, None] & present[None, :]
    top = tl.max(tl.load(part_top + part, mask=known, other=_LOWEST), 0)
    total = tl.zeros((HEADS,), tl.float32)
    value = tl.zeros((HEADS, _LANES), tl.float32)
    if HAS_SINK:
        logit = tl.load(sink + head, mask=present, other=_LOWEST)
        top = tl.maximum(top, logit)
        total = tl.exp(logit - top)
    for start in range(0, SPLITS, SPLITS_AT_ONCE):
        some = start + tl.arange(0, SPLITS_AT_ONCE)
        place = (row * SPLITS + some)[:, None] * heads + head[None, :]
        exists = (some < SPLITS)[:, None] & present[None, :]
        local = tl.load(part_top + place, mask=exists, other=_LOWEST)
        weight = tl.exp(local - top[None, :])
        total += tl.sum(weight * tl.load(part_total + place, mask=exists, other=0.0), 0)
        filled = exists & (local > _LOWEST)
        values = part_value + place[:, :, None] * _LANES + lane[None, None, :]
        value += tl.sum(weight[:, :, None] * tl.load(values, mask=filled[:, :, None], other=0.0), 0)
    # Correctly rounded: n times a key over n is that key.
    value = tl.where((total > 0.0)[:, None], tl.div_rn(value, tl.maximum(total, 1e-30)[:, None]), 0.0)
    if ROTATE:
        pair = tl.arange(0, _LANES // 2)
        turned = pair >= _NOPE // 2
        table = cos_sin + tl.load(positions + row).to(tl.int64) * cos_sin_row + (pair - _NOPE // 2)
        cos = tl.load(table, mask=turned, other=1.0)[None, :]
        sin = tl.load(table + 32, mask=turned, other=0.0)[None, :]
        even, odd = tl.split(tl.reshape(value, (HEADS, _LANES // 2, 2)))
        back = tl.join(even * cos + odd * sin, odd * cos - even * sin)
        # Lanes that do not turn keep their bits.
        value = tl.where((lane >= _NOPE)[None, :], tl.reshape(back, (HEADS, _LANES)), value)
    to = out + row * out_row + head[:, None].to(tl.int64) * out_head + lane[None, :]
    if MXFP8:
        blocks = tl.reshape(value, (HEADS, 16, 32))
        largest = tl.max(tl.abs(blocks), 2).to(tl.int32, bitcast=True)
        # 448 = 1.75 * 2^8. A subnormal maximum has exponent field 0, which the clamp takes to scale 0 as well.
        power = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
        power = tl.minimum(tl.maximum(power, 0), 254)
        # Multiplying by 2^(127 - power) never meets a subnormal; dividing by 2^-127 would.
        reciprocal = ((254 - power) << 23).to(tl.float32, bitcast=True)
        codes = tl.reshape(_encode_e4m3fn(blocks * reciprocal[:, :, None]), (HEADS, _LANES))
        tl.store(to, codes.to(tl.uint8), mask=present[:, None])
        column = head[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out_scales + row * scales_row + column, power.to(tl.uint8), mask=present[:, None])
    else:
        tl.store(to, value.to(out.dtype.element_ty), mask=present[:, None])


class Partials(NamedTuple):
    """What the splits left behind: top and total [queries, splits, heads], value [queries, splits, heads, 512], fp32.

    `adaptive` says that a split may have left its value undefined.
    """

    top: torch.Tensor
    total: torch.Tensor
    value: torch.Tensor
    adaptive: bool


def run(inputs: DecodeInputs) -> DecodeOutputs:
    """The answer of our kernels, written into the output memory of `inputs`; raises `ValueError` or `TypeError`."""
    call = call_of(inputs)
    if call.queries == 0:
        lse = torch.empty((0, call.heads), dtype=torch.float32, device=inputs.query.device)
        return DecodeOutputs(out=inputs.out, codes=inputs.out_codes, scales=inputs.out_scales, lse=lse)
    partials = partials_of(call)
    finish(call, partials)
    return DecodeOutputs(
        out=inputs.out,
        codes=inputs.out_codes,
        scales=inputs.out_scales,
        rotated_rows=call.queries if inputs.positions is not None else 0,
        lse=log_sum_exp(partials),
    )


def partials_of(call: Call) -> Partials:
    """Launch the partial kernel; all memory that it should fill is NaN before."""
    inputs = call.inputs
    query = inputs.query
    splits, one_wave, adaptive = call.split_plan()
    shape = (call.queries, splits, call.heads)
    nan = float("nan")
    top = torch.full(shape, nan, dtype=torch.float32, device=query.device)
    total = torch.full(shape, nan, dtype=torch.float32, device=query.device)
    value = torch.full((*shape, 512), nan, dtype=torch.float32, device=query.device)
    main = call.main
    extra = call.extra if call.extra is not None else main
    partial_kernel[(call.queries, splits, -(-call.heads // split_rules.HEADS_PER_PROGRAM))](
        query, query.stride(0), query.stride(1), call.heads, float(inputs.scale),
        *_segment_arguments(main), *_segment_arguments(extra),
        top, total, value, one_wave,
        SPLITS=splits, ADAPTIVE=adaptive, HAS_EXTRA=call.extra is not None,
        MAIN_FNUZ=main.fnuz, EXTRA_FNUZ=extra.fnuz, SCRUB_EXTRA=not inputs.trust_extra,
        KEYS=split_rules.KEYS_PER_TILE, num_warps=_WARPS, num_stages=1,
    )  # fmt: skip
    return Partials(top, total, value, adaptive)


def finish(call: Call, partials: Partials) -> None:
    """Launch the reduce kernel into the output memory of the call."""
    inputs = call.inputs
    splits = partials.top.shape[1]
    mxfp8 = inputs.out_codes is not None
    if mxfp8:
        assert inputs.out_codes is not None and inputs.out_scales is not None
        out, scales = inputs.out_codes.view(torch.uint8), inputs.out_scales
        out_row, out_head, scales_row = out.stride(0), 512, scales.stride(0)
    else:
        assert inputs.out is not None
        out = scales = inputs.out
        out_row, out_head, scales_row = out.stride(0), out.stride(1), 0
    sink = inputs.sink.contiguous() if inputs.sink is not None else partials.top
    positions, cos_sin, cos_sin_row = call.main.indptr, partials.top, 0
    if inputs.positions is not None and inputs.cos_sin is not None:
        positions, cos_sin, cos_sin_row = inputs.positions.contiguous(), inputs.cos_sin, inputs.cos_sin.stride(0)
    # A head's arithmetic does not depend on its neighbours: the interpreter likes few large programs, a GPU many small.
    interpreted = not isinstance(reduce_kernel, triton.runtime.JITFunction)
    heads = min(16, triton.next_power_of_2(call.heads)) if interpreted else 1
    padded = triton.next_power_of_2(splits)
    reduce_kernel[(call.queries, -(-call.heads // heads))](
        partials.top, partials.total, partials.value, sink, positions, cos_sin, cos_sin_row,
        out, out_row, out_head, scales, scales_row, call.heads,
        SPLITS=splits, SPLITS_PADDED=padded, SPLITS_AT_ONCE=min(padded, _SPLITS_AT_ONCE), HEADS=heads,
        HAS_SINK=inputs.sink is not None, ROTATE=inputs.positions is not None, MXFP8=mxfp8, num_warps=4,
    )  # fmt: skip


def log_sum_exp(partials: Partials) -> torch.Tensor:
    """[queries, heads] float32: the natural logarithm of the sum of exp(score) without the sink, -inf without a key."""
    top, total = partials.top.double(), partials.total.double()
    highest = top.amax(1)
    summed = (total * torch.exp(top - highest[:, None])).sum(1)
    return torch.where(summed > 0, highest + torch.log(summed), -float("inf")).float()


def _segment_arguments(segment: RaggedSegment) -> tuple[Any, ...]:
    return (
        segment.cache, segment.indices, segment.indices.stride(0), segment.indptr,
        segment.rows, segment.block, segment.cache.stride(0),
    )  # fmt: skip
