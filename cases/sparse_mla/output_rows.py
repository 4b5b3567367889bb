"""What do we ask of the step that settles which attention rows still owe their inverse rotation?

Decode rows come first in a batch, prefill rows behind them. What attention leaves depends on the route that each of them
took; see `oracle.sparse_mla.output_rows` for what is owed.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float, Float32, Int, Int64, UInt8

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.rotation import draw_positions, draw_table

Arch = Literal["gfx942", "gfx950", "other"]
Decode = Literal["fused", "unsplit", "plain", "in_place"]

LANES = 512
ROPE = 64
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch after its attention.

    rows: bfloat16 rows as attention left them, decode_tokens rows of decode, then those of prefill; only the first
    `heads` heads are the layer's. They are turned in place, or with codes and scales (MXFP8, a scale byte per 32 lanes)
    they are the scratch memory from which those are made. decode: what became of the decode rows. `fused`: they came
    turned, and in MXFP8 they were stored as codes and scales, so that their scratch rows are nobody's. `unsplit`: the
    route without splits was asked to turn them and did not. `plain`: nobody asked. `in_place`: by a kernel that reads the
    caches in place and never turns. turns_later: what takes the rows turns them itself. warm_up: there is no batch; all of
    the output becomes zero.
    """

    rows: BFloat16[torch.Tensor, "tokens buffer_heads 512"]
    codes: Float[torch.Tensor, "tokens heads*512"] | None
    scales: UInt8[torch.Tensor, "tokens heads*16"] | None
    positions: Int[torch.Tensor, " tokens"]
    cos_sin: Float32[torch.Tensor, "positions 64"]
    heads: int
    decode_tokens: int
    decode: Decode
    window_only: bool
    turns_later: bool
    warm_up: bool
    arch: Arch


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The rows, or codes and scales, as the output projection gets them, and how many rows this step turned."""

    rows: BFloat16[torch.Tensor, "tokens buffer_heads 512"] | None
    codes: Float[torch.Tensor, "tokens heads*512"] | None
    scales: UInt8[torch.Tensor, "tokens heads*16"] | None
    turned: Int64[torch.Tensor, " 1"]


WRITABLE: tuple[str, ...] = ("rows", "codes", "scales")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputCase(Case):
    """The axes of the batch.

    spare_heads: heads of the buffer beyond the layer's. turns: `quarter` uses only quarter turns, exact in any precision.
    reach: `far` places rows, or codes and scales, so far apart that offsets pass 2^31. values: `lanes` a number that names
    the lane; `limits` the largest lane of each block of 32 at 448 times a power of two; `empty` some blocks all zero.
    """

    op: ClassVar[str] = "sparse_mla.output_rows"

    arch: Literal["gfx942", "gfx950", "other"] = "gfx950"
    output: Literal["bfloat16", "mxfp8"] = "bfloat16"
    decode: Literal["fused", "unsplit", "plain", "in_place"] = "fused"
    decode_tokens: int = 3
    prefill_tokens: int = 5
    heads: int = 3
    spare_heads: int = 0
    window_only: bool = False
    turns_later: bool = False
    warm_up: bool = False
    integers: Literal["int32", "int64"] = "int64"
    turns: Literal["spread", "quarter", "small"] = "spread"
    layout: Literal["contiguous", "strided"] = "contiguous"
    reach: Literal["near", "far"] = "near"
    values: Literal["randn", "lanes", "limits", "empty"] = "randn"


CASE = OutputCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "arch": ("gfx942", "gfx950", "other"),
    "output": ("bfloat16", "mxfp8"),
    "decode": ("fused", "unsplit", "plain", "in_place"),
    "decode_tokens": (0, 1, 3),
    "prefill_tokens": (0, 1, 5),
    "heads": (1, 3, 8),
    "spare_heads": (0, 2),
    "window_only": (False, True),
    "turns_later": (False, True),
    "warm_up": (False, True),
    "integers": ("int32", "int64"),
    "turns": ("spread", "quarter", "small"),
    "layout": ("contiguous", "strided"),
    "reach": ("near",),
    "values": ("randn", "lanes", "limits", "empty"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"heads": (1, 3, 8, 16, 128), "prefill_tokens": (0, 1, 5, 33)}
RANDOM_CASES = 30

_BASE = OutputCase()
_MXFP8 = _BASE.varied(output="mxfp8")
REGRESSIONS: tuple[str, ...] = (
    # Each route of decode in front of prefill.
    _BASE.id,
    _BASE.varied(arch="other", decode="unsplit").id,
    _BASE.varied(decode="in_place").id,
    _BASE.varied(decode="plain", turns_later=True).id,
    _BASE.varied(decode="in_place", prefill_tokens=0, window_only=True).id,
    _MXFP8.id,
    _MXFP8.varied(decode="in_place", window_only=True).id,
    _MXFP8.varied(values="limits", turns="quarter").id,
    _MXFP8.varied(values="empty").id,
    _BASE.varied(spare_heads=2, warm_up=True).id,
    _MXFP8.varied(warm_up=True).id,
    # Rows that no 32-bit product of row and stride reaches.
    _BASE.varied(decode_tokens=0, prefill_tokens=3, reach="far").id,
    _MXFP8.varied(decode_tokens=0, prefill_tokens=3, reach="far").id,
)

PRODUCTION: tuple[Served, ...] = (
    *(Served(CASE(decode_tokens=32, prefill_tokens=64, heads=heads)) for heads in (16, 128)),
    *(Served(CASE(decode_tokens=32, prefill_tokens=64, heads=heads, output="mxfp8")) for heads in (16, 128)),
    *(Served(CASE(decode_tokens=32, prefill_tokens=64, heads=heads, arch="gfx942")) for heads in (16, 128)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "decode_tokens": (0, 4096), "prefill_tokens": (0, 1 << 16), "heads": (1, 1024), "spare_heads": (0, 1024),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such batch exists."""
    assert isinstance(case, OutputCase)
    reasons = outside(case, _BOUNDS)
    if case.output == "mxfp8":
        if case.arch != "gfx950":
            reasons.append(f"arch={case.arch}: an MXFP8 output exists on gfx950 only")
        if case.decode == "plain":
            reasons.append("decode=plain: decode stores MXFP8 only when it turns the rows as well")
        if case.spare_heads:
            reasons.append(f"spare_heads={case.spare_heads}: an MXFP8 output has the layer's heads only")
        if case.turns_later:
            reasons.append("turns_later=yes: what takes MXFP8 rows cannot turn them")
    if (case.decode == "unsplit") != (case.arch == "other") and case.decode in ("fused", "unsplit"):
        reasons.append(f"decode={case.decode}: the route without splits is that of arch=other, and only that")
    if case.decode == "in_place" and case.arch != "gfx950":
        reasons.append(f"arch={case.arch}: the kernel that reads the caches in place is for gfx950")
    if case.turns_later and case.decode in ("fused", "unsplit"):
        reasons.append(f"decode={case.decode}: nobody asks decode to turn what is turned later")
    if case.reach == "far" and (case.decode_tokens + case.prefill_tokens < 3 or case.layout != "contiguous"):
        reasons.append("reach=far: needs three rows, contiguous in themselves")
    return reasons


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, OutputCase)
    return (case.decode_tokens + case.prefill_tokens) * (case.heads + case.spare_heads) > 1500


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, OutputCase)
    draw = Draw(case.seed, case.op)
    tokens, heads = case.decode_tokens + case.prefill_tokens, case.heads + case.spare_heads
    mxfp8, far, strided = case.output == "mxfp8", case.reach == "far", case.layout == "strided"
    positions = draw_positions(draw, tokens, torch.int32 if case.integers == "int32" else torch.int64)
    gaps = (24, 8) if strided else (far_gap(tokens, heads * LANES) if far and not mxfp8 else 0, 0)
    rows = guarded((tokens, heads, LANES), torch.bfloat16, gaps=gaps)
    rows.copy_(_values(case, draw, (tokens, heads, LANES)))
    codes = scales = None
    if mxfp8:
        width = case.heads * LANES
        gap = 48 if strided else far_gap(tokens, width) if far else 0
        codes = guarded((tokens, width), torch.float8_e4m3fn, gaps=(gap,))
        scales = guarded((tokens, width // BLOCK), torch.uint8, gaps=(48 if strided else 0,))
        if case.decode == "fused" and not case.warm_up:
            front = case.decode_tokens
            drawn = draw.integers("codes", (front, width), 0, 0x7F).to(torch.uint8)
            codes[:front] = drawn.view(torch.float8_e4m3fn)
            scales[:front] = draw.integers("scales", (front, width // BLOCK), 100, 140).to(torch.uint8)
            rows[:front] = float("nan")
    if case.warm_up:
        rows.fill_(float("nan"))
    return Inputs(
        rows=rows, codes=codes, scales=scales, positions=guarded_copy(positions),
        cos_sin=guarded_copy(draw_table(draw.within("table"), case.turns, ROPE, positions), gaps=(2,) if strided else ()),
        heads=case.heads, decode_tokens=case.decode_tokens, decode=case.decode, window_only=case.window_only,
        turns_later=case.turns_later, warm_up=case.warm_up, arch=case.arch,
    )  # fmt: skip


def _values(case: OutputCase, draw: Draw, shape: tuple[int, int, int]) -> torch.Tensor:
    blocks = (*shape[:2], LANES // BLOCK)
    powers = torch.ldexp(torch.ones(blocks), draw.integers("power", blocks, -9, 10)).repeat_interleave(BLOCK, dim=2)
    if case.values == "lanes":
        return (torch.arange(LANES) % 127 + 1) * powers
    rows = draw.normal_like("normal", shape) * powers
    if case.values == "limits":
        # normal_like stays below 3.5, so that 7/2 times the power is the largest of its block: 448 = 7 * 2^6.
        largest = draw.integers("largest", blocks, 0, BLOCK)
        where = torch.arange(BLOCK) == largest[..., None]
        signed = torch.where(draw.chance("sign", blocks, 1, 2), -3.5, 3.5).repeat_interleave(BLOCK, dim=2)
        rows = torch.where(where.flatten(2), signed * powers, rows)
    if case.values == "empty":
        kept = draw.chance("kept", blocks, 1, 2).repeat_interleave(BLOCK, dim=2)
        rows = torch.where(kept, rows, 0.0)
    return rows
