"""What do we ask of a merge of segments, as a segmented decode kernel leaves them: un-normalised sums and base-2 maxima?

See `oracle.dense_mla.merge_segments` for the formula and `active_segments` for which of them were written.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int32

from cases.case import Axis, Case, outside
from cases.dense_mla.merge_parts import exponents
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

WRITABLE: tuple[str, ...] = ("out",)

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: `segments` and `rank` are powers of two, and the sums, maxima and masses are contiguous.

    sums: sum of 2^(x - maximum) times the key's value over the keys of a segment. maxima: the largest score x in base 2.
    masses: sum of 2^(x - maximum). lengths: keys of each row; below 1 there are none. tile: keys of a tile of the kernel
    that wrote the segments. Of segments that are not active anything may be left in memory. out: bfloat16, float16 or
    float32, neighbouring lanes.
    """

    sums: Float32[torch.Tensor, "rows heads segments rank"]
    maxima: Float32[torch.Tensor, "rows heads segments"]
    masses: Float32[torch.Tensor, "rows heads segments"]
    lengths: Int32[torch.Tensor, " rows"]
    tile: int
    out: Float[torch.Tensor, "rows heads rank"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The merged rows and their natural log-sum-exp, -inf where a row has no key."""

    out: Float[torch.Tensor, "rows heads rank"]
    lse: Float32[torch.Tensor, "rows heads"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentCase(Case):
    """The axes of a merge of segments.

    lengths: `edges` about whole tiles and segments, `full` every segment active, `uneven` a few tokens over what single
    tiles hold, `random` any, `below` rows of length 0 and less among others, `empty` no keys at all. weights: how the maxima
    lie to one another, see `cases.dense_mla.merge_parts`. masses: `any`, `one`, or `zero` in every other row, whose sums are 0
    too. values: `integer_exact` small whole sums. garbage: what inactive segments hold; `stale` is what an earlier batch may
    have left, and outweighs what counts.
    """

    op: ClassVar[str] = "dense_mla.merge_segments"

    rows: int = 3
    heads: int = 3
    segments: int = 8
    rank: int = 64
    tile: int = 16
    output: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    lengths: Literal["edges", "full", "uneven", "random", "below", "empty"] = "edges"
    weights: Literal[
        "near", "equal", "spread", "dominant", "underflow", "staircase", "large", "deep",
    ] = "near"  # fmt: skip
    masses: Literal["any", "one", "zero"] = "any"
    values: Literal["randn", "integer_exact", "onehot_exact", "cancelling", "wide"] = "randn"
    garbage: Literal["nan", "huge", "stale"] = "nan"
    out_layout: Literal["contiguous", "padded", "heads_first"] = "contiguous"


CASE = SegmentCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "rows": (1, 2, 6),
    "heads": (1, 3, 8),
    "segments": (8, 16, 32, 128),
    "rank": (64, 32, 512),
    "tile": (1, 16, 64, 128),
    "output": ("bfloat16", "float16", "float32"),
    "lengths": ("edges", "full", "uneven", "random", "below", "empty"),
    "weights": ("near", "equal", "spread", "dominant", "underflow", "staircase", "large", "deep"),
    "masses": ("any", "one", "zero"),
    "values": ("randn", "integer_exact", "onehot_exact", "cancelling", "wide"),
    "garbage": ("nan", "huge", "stale"),
    "out_layout": ("contiguous", "padded", "heads_first"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "rows": (1, 2, 6, 23),
    "heads": (1, 3, 8, 16, 96),
    "segments": (1, 2, 4, 8, 16, 32, 64, 128),
}
RANDOM_CASES = 12

_BASE = SegmentCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.varied(rows=0).id,
    # The smallest merge there is, and one segment only.
    _BASE.varied(segments=2, tile=1, lengths="full", masses="one", values="integer_exact").id,
    _BASE.varied(segments=1).id,
    # Every length about the edges, with one tile a segment and with several.
    *(_BASE.varied(rows=23, heads=1, tile=tile, output="float32", garbage="stale").id for tile in (1, 16)),
    # A power of two of equal segments: a mean without a rounding.
    _BASE.varied(weights="equal", masses="one", values="integer_exact", lengths="full", output="float32").id,
    # What a verify block of four rows and 96 heads leaves on a large machine.
    _BASE.varied(rows=4, heads=12, segments=32, rank=512, tile=128, lengths="random").id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(rows=8, heads=heads, segments=segments, rank=512, tile=64))
    for heads, segments in ((16, 8), (16, 128), (128, 16))
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "rows": (0, 1 << 16), "heads": (1, 1024), "segments": (1, 128), "rank": (1, 1024), "tile": (1, 128),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, SegmentCase)
    reasons = outside(case, _BOUNDS)
    if case.segments not in (1, 2, 4, 8, 16, 32, 64, 128):
        reasons.append(f"segments={case.segments}: should be a power of two")
    if case.rank not in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        reasons.append(f"rank={case.rank}: should be a power of two")
    if case.tile not in (1, 2, 4, 8, 16, 32, 64, 128):
        reasons.append(f"tile={case.tile}: should be a power of two")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it."""
    assert isinstance(case, SegmentCase)
    return case.rows * case.heads * case.segments * case.rank > 1 << 22


def active_segments(length: int, segments: int, tile: int) -> int:
    """How many segments a kernel writes for a row: each spans as few whole tiles as `segments` of them need."""
    if length < 1:
        return 0
    tiles = max(1, -(-length // (segments * tile)))
    return -(-length // (tiles * tile))


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, SegmentCase)
    draw = Draw(case.seed, case.op)
    lengths = torch.tensor([_length(case, row, draw) for row in range(case.rows)], dtype=torch.int32)
    active = torch.tensor([active_segments(int(n), case.segments, case.tile) for n in lengths], dtype=torch.int64)
    written = (torch.arange(case.segments) < active[:, None])[:, None].expand(case.rows, case.heads, case.segments)
    shape = (case.segments, case.rows, case.heads)
    maxima = exponents(case.weights, shape, draw).permute(1, 2, 0)
    masses = 1 + draw.integers("masses", (case.rows, case.heads, case.segments), 0, 1 << 12).float() / 1024
    if case.masses == "one":
        masses = torch.ones_like(masses)
    if case.values == "integer_exact":
        maxima = maxima.round()
        masses = torch.ldexp(torch.ones_like(masses), draw.integers("powers", masses.shape, 0, 3))
        masses = torch.ones_like(masses) if case.masses == "one" else masses
    sums = _sums(case, draw, masses)
    if case.masses == "zero":
        masses[::2], sums[::2] = 0.0, 0.0
    for tensor, stale in ((maxima, 300.0), (masses, 3.0), (sums, 5.0)):
        content = {"nan": math.nan, "huge": 3e38, "stale": stale}[case.garbage]
        tensor[~written] = content
    return Inputs(
        sums=guarded_copy(sums),
        maxima=guarded_copy(maxima),
        masses=guarded_copy(masses),
        lengths=guarded_copy(lengths),
        tile=case.tile,
        out=_out(case),
    )


def _length(case: SegmentCase, row: int, draw: Draw) -> int:
    """Keys of a row."""
    whole = case.segments * case.tile
    edges = (
        whole, whole + 1, 1, case.tile, case.tile + 1, whole - 1, 2 * whole, 2 * whole + 1, 3 * whole - 1, 3 * whole + case.tile,
        0, case.tile - 1, whole - case.tile, whole - case.tile + 1, 2 * whole - 1, 5 * whole + 1, 2, 3 * case.tile,
        2 * whole - case.tile, 2 * whole - 2 * case.tile, 2 * whole - 2 * case.tile + 1, 7 * whole, 1000 * whole + 1,
    )  # fmt: skip
    if case.lengths == "edges":
        return edges[(row + case.seed) % len(edges)]
    if case.lengths == "full":
        return whole * (1 + row % 3)
    if case.lengths == "uneven":
        return whole * (1 + row % 3) + 1 + int(draw.integers(f"over{row}", (1,), 0, whole))
    if case.lengths == "below":
        return (0, whole + 1, -1, case.tile, -(2**31))[(row + case.seed) % 5]
    if case.lengths == "empty":
        return 0
    return int(draw.integers(f"length{row}", (1,), 1, 4 * whole + 1))


def _sums(case: SegmentCase, draw: Draw, masses: torch.Tensor) -> torch.Tensor:
    """The un-normalised sums [rows, heads, segments, rank]: masses times what a normalised segment would hold."""
    shape = (case.rows, case.heads, case.segments, case.rank)
    if case.values == "integer_exact":
        return draw.integers("small", shape, -64, 65).float()
    number = torch.arange(case.segments)
    if case.values == "onehot_exact":
        lane = torch.arange(case.rank)
        return (number[:, None] % case.rank == lane).float() * masses[..., None]
    values = draw.normal_like("values", shape)
    if case.values == "cancelling":
        values = (values[:, :, :1] + values / 64) * (1.0 - 2.0 * (number % 2))[:, None]
    if case.values == "wide":
        values = torch.ldexp(values, draw.integers("scale", (case.segments, 1), -10, 11))
    return values * masses[..., None]


def _out(case: SegmentCase) -> torch.Tensor:
    rows, heads, rank = case.rows, case.heads, case.rank
    dtype = DTYPES[case.output]
    if case.out_layout == "padded":
        return guarded((rows, heads, rank), dtype, gaps=(64, 8))
    if case.out_layout == "heads_first":
        return guarded((heads, rows, rank), dtype, gaps=(8, 0)).transpose(0, 1)
    return guarded((rows, heads, rank), dtype)
