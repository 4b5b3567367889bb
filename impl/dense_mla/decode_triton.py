"""How do our own Triton kernels answer dense MLA decode?

Whatever the kind of block, a row sees the first so many tokens of its request's list: a kernel counts them and walks one
part of them for 16 heads, leaving the maximum, the sum and the un-normalised values; a second kernel merges the parts that
the row has. How a row is cut depends on what it sees and on the part count only, so that its answer does not depend on its
neighbours. One source for gfx942, gfx950, CUDA and Triton's interpreter; codes of fp8 are decoded in integer arithmetic,
into bf16, which holds them exactly; every offset is 64 bits wide; no token behind a row's limit is loaded.

Rounding points: scores, with all scales in one factor, and all sums are fp32; exp2(score - max) is rounded to bf16 before
it multiplies the values; the cache's scale multiplies the quotient.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cases.dense_mla.decode_call import QUANTISED, DecodeInputs, DecodeOutputs, refuse_malformed

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
_HEADS = 16
# Tokens of a tile: of wide rows, as many as a program of gfx950 holds without spilling.
_KEYS, _WIDE_KEYS = 32, 16
# Merging reads this many parts at a time, to bound the registers of a program.
_PARTS_AT_ONCE = 4


@triton.jit
def _numbers(stored, CODES: tl.constexpr):
    """bf16 numbers of what was loaded: bf16 itself, or the codes of an encoding as int8."""
    if CODES == "none":
        return stored
    # The code shifted under fp16's sign and exponent is the same number divided by 2^8 (bias 7) or 2^7 (bias 8),
    # subnormals included.
    pattern = (stored.to(tl.int16) << 7) & -16385
    number = pattern.to(tl.float16, bitcast=True).to(tl.float32) * (128.0 if CODES == "float8_e4m3fnuz" else 256.0)
    is_nan = (stored == -128) if CODES == "float8_e4m3fnuz" else ((pattern & 0x3F80) == 0x3F80)
    return tl.where(is_nan, float("nan"), number).to(tl.bfloat16)


@triton.jit
def _seen(row, kv_indptr, global_indptr, qlen, world, rank, CAUSAL: tl.constexpr, SHARD: tl.constexpr):
    """Where the tokens of a row's request begin in the list, and how many of them the row sees."""
    request = row // qlen
    token = (row - request * qlen).to(tl.int32)
    first = tl.load(kv_indptr + request)
    held = tl.load(kv_indptr + request + 1) - first
    limit = held
    if SHARD:
        length = tl.load(global_indptr + request + 1) - tl.load(global_indptr + request)
        away = length - qlen + token - rank
        # Division rounds towards zero: before the shard's first token lies none.
        limit = tl.where(away < 0, 0, tl.maximum(away, 0) // world + 1)
    elif CAUSAL:
        limit = held - qlen + token + 1
    return first.to(tl.int64), tl.minimum(tl.maximum(limit, 0), held)


@triton.jit
def _part_length(limit, parts, KEYS: tl.constexpr):
    """Tokens of a part: whole tiles, and as many parts as are needed; at least one tile."""
    tiles = (limit + KEYS - 1) // KEYS
    return tl.maximum((tiles + parts - 1) // parts, 1) * KEYS


@triton.jit
def partial_kernel(
    query, query_row, query_head, cache, cache_page, cache_token, page, slots, kv_indptr, global_indptr,
    query_scale, cache_scale, scale, part_top, part_total, part_value, heads, latent, rope, parts, qlen, world, rank,
    CAUSAL: tl.constexpr, SHARD: tl.constexpr, QUERY_CODES: tl.constexpr, CACHE_CODES: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """One part of one row for HEADS heads; grid (rows, parts, head blocks).

    part_top and part_total are [rows, parts, heads], part_value [rows, parts, heads, latent], contiguous fp32. Of a part
    that the row does not have nothing is written.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    first, limit = _seen(row, kv_indptr, global_indptr, qlen, world, rank, CAUSAL, SHARD)
    size = _part_length(limit, parts, KEYS)
    low = part * size
    high = tl.minimum(low + size, limit)
    if low >= high:
        return
    factor = scale
    if QUERY_CODES != "none":
        factor = factor * tl.load(query_scale)
    if CACHE_CODES != "none":
        factor = factor * tl.load(cache_scale)
    lane = tl.arange(0, LATENT)
    rope_lane = tl.arange(0, ROPE)
    present = (head < heads)[:, None]
    is_latent = (lane < latent)[None, :]
    is_rope = (rope_lane < rope)[None, :]
    from_query = query + row * query_row + head[:, None].to(tl.int64) * query_head
    vector = _numbers(tl.load(from_query + lane[None, :], mask=present & is_latent, other=0), QUERY_CODES)
    tail = _numbers(tl.load(from_query + latent + rope_lane[None, :], mask=present & is_rope, other=0), QUERY_CODES)
    top = tl.full((HEADS,), _LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    value = tl.zeros((HEADS, LATENT), tl.float32)
    for start in range(low, high, KEYS):
        place = start + tl.arange(0, KEYS)
        counted = place < high
        slot = tl.load(slots + first + place, mask=counted, other=0)
        number = slot // page
        token = cache + number.to(tl.int64) * cache_page + (slot - number * page).to(tl.int64) * cache_token
        key = _numbers(tl.load(token[:, None] + lane[None, :], mask=counted[:, None] & is_latent, other=0), CACHE_CODES)
        if CACHE_CODES != "none":
            # It is 0 there already. What depends on a token's place is decoded where it was loaded, once; else every warp
            # decodes the whole tile in the layout of a product's operand, and spills.
            key = tl.where(counted[:, None], key, 0.0)
        key_tail = _numbers(
            tl.load(token[:, None] + latent + rope_lane[None, :], mask=counted[:, None] & is_rope, other=0), CACHE_CODES
        )
        score = tl.dot(tail, tl.trans(key_tail), tl.dot(vector, tl.trans(key))) * factor
        score = tl.where(counted[None, :], score, _LOWEST)
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.where(counted[None, :], tl.exp2(score - higher[:, None]), 0.0)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.dot(weight.to(tl.bfloat16), key, value * shrink[:, None])
        top = higher
    to = (row * parts + part) * heads + head
    tl.store(part_top + to, top, mask=head < heads)
    tl.store(part_total + to, total, mask=head < heads)
    tl.store(part_value + to[:, None] * latent + lane[None, :], value, mask=present & is_latent)


@triton.jit
def merge_kernel(
    part_top, part_total, part_value, out, out_row, out_head, lse, kv_indptr, global_indptr, cache_scale,
    heads, latent, parts, qlen, world, rank,
    CAUSAL: tl.constexpr, SHARD: tl.constexpr, SCALED: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    LATENT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row for HEADS heads; grid (rows, head blocks). `lse` is contiguous [rows, heads] fp32."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    limit = _seen(row, kv_indptr, global_indptr, qlen, world, rank, CAUSAL, SHARD)[1]
    size = _part_length(limit, parts, KEYS)
    count = (limit + size - 1) // size
    lane = tl.arange(0, LATENT)
    present = (head < heads)[None, :]
    top = tl.full((HEADS,), _LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    value = tl.zeros((HEADS, LATENT), tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        place = (row * parts + part)[:, None] * heads + head[None, :]
        exists = (part < count)[:, None] & present
        local = tl.load(part_top + place, mask=exists, other=_LOWEST)
        higher = tl.maximum(top, tl.max(local, 0))
        weight = tl.where(exists, tl.exp2(local - higher[None, :]), 0.0)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight * tl.load(part_total + place, mask=exists, other=0.0), 0)
        seen = exists[:, :, None] & (lane < latent)[None, None, :]
        values = tl.load(part_value + place[:, :, None] * latent + lane[None, None, :], mask=seen, other=0.0)
        value = value * shrink[:, None] + tl.sum(weight[:, :, None] * values, 0)
        top = higher
    # A token that is NaN makes a sum that is none of 0.
    some = total != 0.0
    known = tl.where(some, total, 1.0)
    # Correctly rounded: n times a token over n is that token.
    value = tl.where(some[:, None], tl.div_rn(value, known[:, None]), 0.0)
    if SCALED:
        value = value * tl.load(cache_scale)
    tl.store(lse + row * heads + head, tl.where(some, (top + tl.log2(known)) * _LN_2, -float("inf")), mask=head < heads)
    to = out + row * out_row + head[:, None].to(tl.int64) * out_head + lane[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=(head < heads)[:, None] & (lane < latent)[None, :])


def run(inputs: DecodeInputs) -> DecodeOutputs:
    """The answer of our kernels, written into the output memory of `inputs`; raises `ValueError` or `TypeError`."""
    refuse_malformed(inputs)
    query, out = inputs.query, inputs.out
    rows, heads, lanes = query.shape
    latent = out.shape[2]
    lse = torch.empty((rows, heads), dtype=torch.float32, device=query.device)
    if rows == 0 or heads == 0:
        return DecodeOutputs(out, lse)
    padded = max(16, triton.next_power_of_2(latent))
    keys = _WIDE_KEYS if padded >= 512 else _KEYS
    # No request is longer than all slots together, and a part is a tile at least.
    parts = min(inputs.splits, max(1, -(-inputs.slots.numel() // keys)))
    part_top, part_total = (
        torch.empty((rows, parts, heads), dtype=torch.float32, device=query.device) for _ in range(2)
    )
    part_value = torch.empty((rows, parts, heads, latent), dtype=torch.float32, device=query.device)
    shard = inputs.global_indptr is not None
    whole = inputs.global_indptr if inputs.global_indptr is not None else inputs.kv_indptr
    block: dict[str, Any] = {"CAUSAL": inputs.causal, "SHARD": shard, "KEYS": keys}
    partial_kernel[(rows, parts, -(-heads // _HEADS))](
        _bits(query), query.stride(0), query.stride(1), _bits(inputs.cache), inputs.cache.stride(0),
        inputs.cache.stride(1), inputs.cache.shape[1], inputs.slots, inputs.kv_indptr, whole,
        inputs.query_scale, inputs.cache_scale, inputs.scale * _LOG2_E, part_top, part_total, part_value,
        heads, latent, lanes - latent, parts, inputs.qlen, inputs.world, inputs.rank,
        QUERY_CODES=_codes(query), CACHE_CODES=_codes(inputs.cache), HEADS=_HEADS, LATENT=padded,
        ROPE=max(16, triton.next_power_of_2(lanes - latent)), **block, num_warps=8 if padded >= 512 else 4, num_stages=1,
    )  # fmt: skip
    # A head's arithmetic does not depend on its neighbours: the interpreter likes few large programs, a GPU many small.
    interpreted = not isinstance(merge_kernel, triton.runtime.JITFunction)
    together = min(16, triton.next_power_of_2(heads)) if interpreted else 1
    merge_kernel[(rows, -(-heads // together))](
        part_top, part_total, part_value, out, out.stride(0), out.stride(1), lse, inputs.kv_indptr, whole,
        inputs.cache_scale, heads, latent, parts, inputs.qlen, inputs.world, inputs.rank,
        SCALED=inputs.cache.dtype in QUANTISED, HEADS=together, LATENT=padded,
        PARTS=min(_PARTS_AT_ONCE, triton.next_power_of_2(parts)), **block, num_warps=4,
    )  # fmt: skip
    return DecodeOutputs(out, lse)


def _codes(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.") if tensor.dtype in QUANTISED else "none"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The codes of fp8 as bytes: a backend may lack the type."""
    return tensor.view(torch.int8) if tensor.dtype in QUANTISED else tensor
