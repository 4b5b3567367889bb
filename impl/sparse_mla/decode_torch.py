"""How does plain torch answer sparse MLA decode with the rounding points of a kernel?

Query by query on the CPU or a GPU: products and sums in fp32, exp(score - max) rounded to bf16 before it multiplies the
values. It knows no splits and no tiles, so what a split kernel does differently from it is a matter of splitting.
"""

from __future__ import annotations

import torch

from cases.sparse_mla.decode import LANES, NOPE, SCALE_BYTES, TOKEN_BYTES, DecodeInputs, DecodeOutputs
from impl.sparse_mla.decode_call import RaggedSegment, call_of


def run(inputs: DecodeInputs) -> DecodeOutputs:
    """The answer, written into the output memory of `inputs`; raises `ValueError` or `TypeError`."""
    call = call_of(inputs)
    shape = (call.queries, call.heads)
    device = inputs.query.device
    rows = torch.zeros((*shape, LANES), dtype=torch.float32, device=device)
    lse = torch.full(shape, -float("inf"), dtype=torch.float32, device=device)
    segments = [part for part in (call.main, call.extra) if part is not None]
    sink = inputs.sink[: call.heads] if inputs.sink is not None else None
    for t in range(call.queries):
        keys = torch.cat([_keys(part, t, trusted=inputs.trust_extra and part is call.extra) for part in segments])
        if not keys.shape[0]:
            continue
        score = inputs.query[t].float() @ keys.T * inputs.scale
        top = score.amax(1)
        highest = top if sink is None else torch.maximum(top, sink)
        weight = torch.exp(score - highest[:, None])
        total = weight.sum(1)
        lse[t] = top + torch.log(torch.exp(score - top[:, None]).sum(1))
        if sink is not None:
            total = total + torch.exp(sink - highest)
        rows[t] = weight.bfloat16().float() @ keys / total[:, None]
    if inputs.positions is not None and inputs.cos_sin is not None:
        rows[..., NOPE:] = _rotated_back(rows[..., NOPE:], inputs.cos_sin[inputs.positions.long()])
    if inputs.out is not None:
        inputs.out.copy_(rows)
    elif inputs.out_codes is not None and inputs.out_scales is not None:
        codes, scales = _mxfp8(rows.view(call.queries, call.heads * LANES // 32, 32))
        inputs.out_codes.view(torch.uint8).copy_(codes.view(torch.uint8).view(inputs.out_codes.shape))
        inputs.out_scales.copy_(scales)
    return DecodeOutputs(
        out=inputs.out,
        codes=inputs.out_codes,
        scales=inputs.out_scales,
        rotated_rows=call.queries if inputs.positions is not None else 0,
        lse=lse,
    )


def _keys(segment: RaggedSegment, query: int, trusted: bool) -> torch.Tensor:
    """fp32 [valid entries of the query, 512]."""
    first, last = (int(segment.indptr[query + i]) for i in (0, 1))
    slots = segment.indices[first:last].long()
    slots = slots[(slots >= 0) & (slots < segment.rows)]
    cache, block = segment.cache, segment.block
    page, place = torch.div(slots, block, rounding_mode="floor"), torch.remainder(slots, block)
    start = page * int(cache.stride(0)) + int(cache.storage_offset())

    def gather(offset: torch.Tensor, count: int) -> torch.Tensor:
        flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        picked: torch.Tensor = flat[offset[:, None] + torch.arange(count, device=cache.device)]
        return picked

    data = gather(start + place * TOKEN_BYTES, TOKEN_BYTES)
    exponents = gather(start + block * TOKEN_BYTES + place * SCALE_BYTES, SCALE_BYTES)[:, : NOPE // 64]
    codes = data[:, :NOPE].view(torch.float8_e4m3fnuz if segment.fnuz else torch.float8_e4m3fn)
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)
    lanes = codes.float().unflatten(1, (-1, 64)) * powers[..., None]
    keys = torch.cat([lanes.flatten(1), data[:, NOPE:].contiguous().view(torch.bfloat16).float()], 1)
    return keys if trusted else torch.where(torch.isnan(keys), 0.0, keys)


def _rotated_back(lanes: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    even, odd = lanes[..., 0::2], lanes[..., 1::2]
    cos, sin = cos_sin[:, None, : even.shape[-1]], cos_sin[:, None, even.shape[-1] :]
    return torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)


def _mxfp8(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of [..., 32]: the smallest power of two that brings a block to 448 or less."""
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))
    # frexp's mantissa is in [0.5, 1), and 448 = 0.875 * 2^9.
    scales = torch.where(mantissa == 0, 0, exponent - 9 + (mantissa > 0.875).int() + 127).clamp(0, 254)
    factor = torch.ldexp(torch.ones_like(mantissa), 127 - scales)
    return (blocks * factor[..., None]).to(torch.float8_e4m3fn), scales.to(torch.uint8)
