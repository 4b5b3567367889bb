"""How do our own Triton kernels merge the answers of ranks?

One kernel scales a rank's answer in place, for a sum by the collective; one packs answer and log-sum-exp into messages,
as integers, so that every bit arrives; one unpacks and merges. What a rank without keys holds is not read. One source for
gfx942, gfx950, CUDA and Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from cases.dcp.combine import Base, Inputs, Outputs
from impl.dcp import combine_call

_HEADS = 8
_NOTHING = tl.constexpr(-0x800000)


@triton.jit
def _power(exponent, NATURAL: tl.constexpr):
    return tl.exp(exponent) if NATURAL else tl.exp2(exponent)


@triton.jit
def _clean(lse):
    """-inf for every way in which a rank says that it had no key."""
    return tl.where((lse == lse) & (lse < float("inf")), lse, -float("inf"))


@triton.jit
def _all_ranks(lses, NATURAL: tl.constexpr):
    """The log-sum-exp [heads] of all ranks from clean ones [ranks, heads]; -inf where there is nothing."""
    top = tl.max(lses, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(_power(lses - top[None, :], NATURAL), 0)
    some = total > 0
    known = tl.where(some, total, 1.0)
    height = tl.log(known) if NATURAL else tl.log2(known)
    return tl.where(some, top + height, -float("inf"))


@triton.jit
def _factor(own, lse, NATURAL: tl.constexpr):
    """The factor of a rank's answer; exactly 0 where it had no key."""
    there = own > -float("inf")
    return tl.where(there, _power(tl.where(there, own - lse, 0.0), NATURAL), 0.0)


@triton.jit
def scale_kernel(
    out, out_row, out_head, out_lane, lses, lses_rank, lses_row, lses_head, lse, lse_row, rank, heads,
    WORLD: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Scale some heads of a row of this rank's answer; grid (rows, head tiles). RANKS is a power of two from WORLD on."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    present = head < heads
    place = lses + row * lses_row + head * lses_head
    each = tl.arange(0, RANKS).to(tl.int64)
    seen = (each[:, None] < WORLD) & present[None, :]
    all_lses = tl.load(place[None, :] + each[:, None] * lses_rank, mask=seen, other=-float("inf"))
    merged = _all_ranks(_clean(all_lses), NATURAL)
    own = _clean(tl.load(place + rank * lses_rank, mask=present, other=-float("inf")))
    factor = _factor(own, merged, NATURAL)
    tl.store(lse + row * lse_row + head, merged, mask=present)
    lane = tl.arange(0, LANES)
    at = out + row * out_row + head[:, None] * out_head + lane[None, :] * out_lane
    value = tl.load(at, mask=(factor > 0)[:, None], other=0.0).to(tl.float32) * factor[:, None]
    tl.store(at, value.to(out.dtype.element_ty), mask=present[:, None])


@triton.jit
def pack_kernel(
    out, out_row, out_head, out_lane, lse, lse_row, lse_head, empty, sent, sent_rank, sent_row, sent_head, own_heads,
    LANES: tl.constexpr, HEADS: tl.constexpr, HALVES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Put some heads of a row into the message to their rank; grid (rows, head tiles, ranks). All tensors are integers."""
    row = tl.program_id(0).to(tl.int64)
    own = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    present = own < own_heads
    to = tl.program_id(2).to(tl.int64)
    head = to * own_heads + own
    lane = tl.arange(0, LANES)
    bits = tl.load(out + row * out_row + head[:, None] * out_head + lane[None, :] * out_lane, mask=present[:, None])
    message = sent + to * sent_rank + row * sent_row + own * sent_head
    tl.store(message[:, None] + lane[None, :], bits, mask=present[:, None])
    word = tl.load(lse + row * lse_row + head * lse_head, mask=present)
    if MASKED:
        word = tl.where(tl.load(empty + row) != 0, _NOTHING, word)
    if HALVES:
        tl.store(message + LANES, word.to(tl.int16), mask=present)
        tl.store(message + LANES + 1, (word >> 16).to(tl.int16), mask=present)
    else:
        tl.store(message + LANES, word, mask=present)


@triton.jit
def _arrived(words, place, seen, LANES: tl.constexpr, HALVES: tl.constexpr):
    """The log-sum-exps behind the lanes of messages, clean."""
    if HALVES:
        low = tl.load(words + place + LANES, mask=seen, other=0).to(tl.int32) & 0xFFFF
        high = tl.load(words + place + LANES + 1, mask=seen, other=-128).to(tl.int32) << 16
        bits = low | high
    else:
        bits = tl.load(words + place + LANES, mask=seen, other=_NOTHING)
    return _clean(bits.to(tl.float32, bitcast=True))


@triton.jit
def merge_kernel(
    received, words, received_rank, received_row, received_head, out, out_row, out_head, lse, lse_row, heads,
    WORLD: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, NATURAL: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Merge some heads of a row; grid (rows, head tiles). `words` are the bits of `received`."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    present = head < heads
    each = tl.arange(0, RANKS).to(tl.int64)
    place = row * received_row + head * received_head
    seen = (each[:, None] < WORLD) & present[None, :]
    merged = _all_ranks(_arrived(words, place[None, :] + each[:, None] * received_rank, seen, LANES, HALVES), NATURAL)
    tl.store(lse + row * lse_row + head, merged, mask=present)
    lane = tl.arange(0, LANES)
    total = tl.zeros((HEADS, LANES), tl.float32)
    for rank in tl.static_range(WORLD):
        here = place + rank * received_rank
        factor = _factor(_arrived(words, here, present, LANES, HALVES), merged, NATURAL)
        at = received + here[:, None] + lane[None, :]
        total += tl.load(at, mask=(factor > 0)[:, None], other=0.0).to(tl.float32) * factor[:, None]
    at = out + row * out_row + head[:, None] * out_head + lane[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=present[:, None])


def run(inputs: Inputs) -> Outputs:
    """The merge of all ranks; raises `ValueError` for what is no call."""
    return combine_call.run(sys.modules[__name__], inputs)


def _tiles(heads: int) -> int:
    return -(-heads // _HEADS)


def scaled(out: torch.Tensor, lses: torch.Tensor, rank: int, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's answer, scaled in place, and the log-sum-exp of all ranks."""
    rows, heads, lanes = out.shape
    lse = torch.empty((rows, heads), dtype=torch.float32, device=out.device)
    if rows:
        scale_kernel[(rows, _tiles(heads))](
            out, *out.stride(), lses, *lses.stride(), lse, lse.stride(0), rank, heads,
            WORLD=lses.shape[0], RANKS=triton.next_power_of_2(lses.shape[0]), LANES=lanes, HEADS=_HEADS,
            NATURAL=base == "natural",
        )  # fmt: skip
    return out, lse


def packed(out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor | None, world: int) -> torch.Tensor:
    """The messages to all ranks, in the answer's dtype."""
    rows, heads, lanes = out.shape
    own = heads // world
    halves = out.element_size() == 2
    words = torch.int16 if halves else torch.int32
    sent = torch.empty((world, rows, own, lanes + 1 + halves), dtype=words, device=out.device)
    if rows:
        pack_kernel[(rows, _tiles(own), world)](
            out.view(words), *out.stride(), lse.view(torch.int32), *lse.stride(), lse if empty is None else empty,
            sent, *sent.stride()[:3], own,
            LANES=lanes, HEADS=_HEADS, HALVES=halves, MASKED=empty is not None,
        )  # fmt: skip
    return sent.view(out.dtype)


def merged(received: torch.Tensor, lanes: int, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer and log-sum-exp of the own heads."""
    world, rows, heads, _ = received.shape
    halves = received.element_size() == 2
    out = torch.empty((rows, heads, lanes), dtype=received.dtype, device=received.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=received.device)
    if rows:
        merge_kernel[(rows, _tiles(heads))](
            received, received.view(torch.int16 if halves else torch.int32), *received.stride()[:3],
            out, *out.stride()[:2], lse, lse.stride(0), heads,
            WORLD=world, RANKS=triton.next_power_of_2(world), LANES=lanes, HEADS=_HEADS, NATURAL=base == "natural",
            HALVES=halves,
        )  # fmt: skip
    return out, lse
