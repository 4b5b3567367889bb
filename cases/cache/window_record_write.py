"""What do we ask of the writer of the sliding window's records, one a token?

Each token's row is rotated to its position in the last 64 lanes, rounded to bfloat16 and written as a packed record. See
`oracle.cache.window_record_write` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float32, Int64, UInt8

from cases.cache import kv_record_write, rotated_rows
from cases.cache.kv_record_write import Encoding, WriteCase
from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded_copy
from cases.production import Served


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: row t of `rows`, turned to `positions[t]`, becomes the record in slot `slots[t]`, unless it is negative.

    `rows` and `positions` may be longer than `slots`: padding, which nobody may use. Row p of `cos_sin` turns to
    position p; positions of tokens that write nothing are rows of it too. Slots that are written are unique.
    """

    rows: BFloat16[torch.Tensor, "rows 512"]
    positions: Int64[torch.Tensor, " rows"]
    cos_sin: Float32[torch.Tensor, "table 64"]
    slots: Int64[torch.Tensor, " tokens"]
    cache: UInt8[torch.Tensor, "blocks block_size 584"]
    encoding: Encoding


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The cache after the call."""

    cache: UInt8[torch.Tensor, "blocks block_size 584"]


WRITABLE: tuple[str, ...] = ("cache",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowCase(Case):
    """The axes of the window writer.

    tokens, padding_rows, block_size, block_stride, encoding, slots, values: as `cache.kv_record_write` has them.
    positions: `run` consecutive ones, `scattered` any, `ends` the first and the last one of the table by turns. Tokens
    that write nothing, and padding, stand at a position whose angles are NaN. rotation: `spread` by any angle, `quarter`
    by quarter turns.
    """

    op: ClassVar[str] = "cache.window_record_write"

    tokens: int = 7
    padding_rows: int = 3
    block_size: int = 64
    block_stride: Literal["page", "padded", "odd", "far"] = "page"
    encoding: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn"
    slots: Literal["dense", "scattered", "skipped", "negative", "all_skipped"] = "scattered"
    positions: Literal["run", "scattered", "ends"] = "scattered"
    rotation: Literal["spread", "quarter"] = "spread"
    values: Literal[
        "randn", "zeros", "outlier", "amax_edge", "subnormal", "negative_zero", "wide", "huge", "floor", "ties"
    ] = "randn"


CASE = WindowCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 7, 33),
    "padding_rows": (0, 3),
    "block_size": (1, 2, 5, 32, 64),
    "block_stride": ("page", "padded", "odd"),
    "encoding": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "slots": ("dense", "scattered", "skipped", "negative", "all_skipped"),
    "positions": ("run", "scattered", "ends"),
    "rotation": ("spread", "quarter"),
    "values": (
        "randn", "zeros", "outlier", "amax_edge", "subnormal", "negative_zero", "wide", "huge", "floor", "ties",
    ),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (0, 1, 7, 33, 257, 1024),
    "padding_rows": (0, 3, 64),
    "block_size": (1, 2, 4, 5, 32, 64, 128, 256),
}

RANDOM_CASES = 20

_BASE = WindowCase(tokens=33, block_stride="padded")

REGRESSIONS: tuple[str, ...] = (
    # An offset of 2^31 bytes and more, in both regions of the last page.
    _BASE.varied(block_stride="far").id,
    _BASE.varied(slots="negative", block_size=4).id,
    _BASE.varied(encoding="float8_e4m3fnuz", values="negative_zero").id,
    _BASE.varied(encoding="float8_e4m3fnuz", values="amax_edge").id,
    _BASE.varied(values="wide", positions="ends").id,
    _BASE.varied(values="zeros").id,
)

_POOL = {"cache": 65536}
PRODUCTION: tuple[Served, ...] = (
    Served(CASE(tokens=256, padding_rows=0), _POOL),
    Served(CASE(tokens=256, padding_rows=0), {"cache": 8192}),
    Served(CASE(tokens=256, padding_rows=0, encoding="float8_e4m3fnuz"), _POOL),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"tokens": (0, 1 << 16), "padding_rows": (0, 1 << 16), "block_size": (1, 4096)}


def forbid(case: WindowCase) -> list[str]:
    """Every reason why this is no question: without a token that writes, nothing tells the kinds of values apart."""
    reasons = outside(case, _BOUNDS)
    if case.tokens == 0 and case.slots not in ("scattered", "dense"):
        reasons.append(f"slots={case.slots}: should be scattered or dense where there are no tokens")
    if case.tokens == 0 and case.positions != "scattered":
        reasons.append(f"positions={case.positions}: should be scattered where there are no tokens")
    if case.block_stride == "far" and case.slots == "negative":
        reasons.append("block_stride=far: no guard bytes before the cache catch slots=negative")
    if case.block_stride == "far" and case.tokens == 0:
        reasons.append("block_stride=far: needs a token")
    if case.slots == "all_skipped" and case.positions != "scattered":
        reasons.append(f"positions={case.positions}: should be scattered where no token has a slot")
    if case.values != "randn" and case.slots == "all_skipped":
        reasons.append(f"values={case.values}: should be randn where nothing is written")
    return reasons


def heavy(case: WindowCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.tokens > 100


def build(case: WindowCase) -> Inputs:
    """The inputs of a case: the rows, slots and cache of the writer without rotation, and positions with their table."""
    draw = Draw(case.seed, case.op)
    plain = kv_record_write.build(
        WriteCase(
            seed=case.seed, tokens=case.tokens, padding_rows=case.padding_rows, block_size=case.block_size,
            block_stride=case.block_stride, encoding=case.encoding, slots=case.slots, values=case.values,
        )
    )  # fmt: skip
    table = rotated_rows.draw_angles(draw.within("table"), case.rotation, case.tokens)
    length = table.shape[0]
    nowhere = torch.full((1, table.shape[1]), float("nan"))
    positions = torch.full((case.tokens + case.padding_rows,), length)
    positions[: case.tokens] = torch.where(plain.slots < 0, length, _positions(case, draw, length))
    return Inputs(
        rows=plain.k,
        positions=guarded_copy(positions),
        cos_sin=guarded_copy(torch.cat([table, nowhere])),
        slots=plain.slots,
        cache=plain.cache,
        encoding=case.encoding,
    )


def _positions(case: WindowCase, draw: Draw, length: int) -> torch.Tensor:
    if case.positions == "run":
        return torch.arange(case.tokens) + int(draw.integers("start", (1,), 0, length - case.tokens + 1))
    if case.positions == "ends":
        return torch.arange(case.tokens) % 2 * (length - 1)
    return draw.integers("position", (case.tokens,), 0, length)
