"""What do we ask of causal MLA prefill over keys and values that are cast to FP8?

Queries, keys and values have heads of their own, several requests lie behind one another, and each of their tokens sees the
tokens of its request up to itself. See `oracle.dense_mla.fp8_prefill`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded
from cases.production import Served

LARGEST = 448.0


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A prefill batch.

    query, key: their leading lanes are turned or not, which does not matter here. Lanes have stride 1, rows and heads any.
    query_start: first row of every request, and one more at the end. All numbers are within what OCP e4m3 holds. out: the
    heads of a row one behind the other. compute_units: of the device that a plan is made for; it must not matter.
    """

    query: BFloat16[torch.Tensor, "tokens heads lanes"]
    key: BFloat16[torch.Tensor, "tokens heads lanes"]
    value: BFloat16[torch.Tensor, "tokens heads value_lanes"]
    query_start: Int32[torch.Tensor, " starts"]
    scale: float
    out: BFloat16[torch.Tensor, "tokens heads*value_lanes"]
    compute_units: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The memory of `out`."""

    out: BFloat16[torch.Tensor, "tokens heads*value_lanes"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCase(Case):
    """The axes of the batch.

    width: lanes of a query and of a value, `model` 192 and 128, `small` 48 and 32. lengths: tokens of requests, `single`
    one each, `short` up to 9, `blocks` next to 16 and 32, `equal`; of `tiles` the first request is a token or two longer
    than a tile of 256 rows, and of 511, 513 and 600 it has so many tokens, in two tiles and in three. layout: `split` keys
    and values are parts of wider rows, as a projection leaves them. reach: `far` places values so far apart that offsets
    pass 2^31. scale: `model` is one over the root of 192 lanes, which bfloat16 does not hold. values: `onehot` a value names
    its token by one lane; `needle` one key of each query stands out; `uniform` all keys weigh alike and values are small
    integers; `limits` values up to the largest that OCP e4m3 holds; `fine` numbers between those that it holds.
    """

    op: ClassVar[str] = "dense_mla.fp8_prefill"

    heads: int = 2
    width: Literal["model", "small"] = "small"
    requests: int = 2
    lengths: Literal["single", "short", "blocks", "tiles", "511", "513", "600", "equal"] = "short"
    layout: Literal["contiguous", "split"] = "contiguous"
    reach: Literal["near", "far"] = "near"
    compute_units: int = 80
    scale: Literal["eighth", "three_eighths", "model"] = "eighth"
    values: Literal["randn", "onehot", "needle", "uniform", "limits", "fine"] = "randn"


CASE = PrefillCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "heads": (1, 2, 4, 6, 8, 12, 24),
    "width": ("model", "small"),
    "requests": (1, 2, 3),
    "lengths": ("single", "short", "blocks", "equal"),
    "layout": ("contiguous", "split"),
    "reach": ("near",),
    "compute_units": (8, 80, 256, 304),
    "scale": ("eighth", "three_eighths", "model"),
    "values": ("randn", "onehot", "needle", "uniform", "limits", "fine"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "heads": (1, 2, 4, 8, 12, 16, 24, 48, 96), "requests": (1, 2, 3, 8),
    "lengths": ("single", "short", "blocks", "tiles", "511", "513", "600", "equal"),
}  # fmt: skip
RANDOM_CASES = 4

_BASE = PrefillCase()
REGRESSIONS: tuple[str, ...] = (
    # Heads that are padded in turn, and heads that are padded one behind the other.
    _BASE.varied(heads=2).id,
    _BASE.varied(heads=4, values="onehot").id,
    _BASE.varied(heads=8, width="model").id,
    _BASE.varied(heads=12, values="onehot").id,
    _BASE.varied(heads=6).id,
    _BASE.varied(heads=24, requests=1).id,
    # Tiles of 256 rows that several workers share, and one of a row.
    _BASE.varied(heads=1, requests=1, lengths="tiles", values="onehot").id,
    _BASE.varied(heads=1, requests=2, lengths="tiles", compute_units=304).id,
    # Three tiles, the last one of a row, and two that lack a row.
    _BASE.varied(heads=1, requests=1, lengths="511", values="onehot").id,
    _BASE.varied(heads=1, requests=2, lengths="513", values="onehot", compute_units=304).id,
    _BASE.varied(heads=1, requests=1, lengths="600", scale="model").id,
    _BASE.varied(heads=1, requests=1, lengths="600", values="uniform", layout="split").id,
    _BASE.varied(requests=1, lengths="blocks", values="needle", width="model").id,
    _BASE.varied(heads=16, requests=1, lengths="equal", reach="far").id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(heads=heads, width="model", requests=2, lengths="blocks", compute_units=304)) for heads in (8, 16, 24)
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "heads": (1, 128), "requests": (1, 64), "compute_units": (1, 1024),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, PrefillCase)
    reasons = outside(case, _BOUNDS)
    if case.reach == "far" and (case.layout != "contiguous" or case.lengths != "equal"):
        reasons.append("reach=far: needs three rows and more, contiguous in themselves")
    return reasons


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, PrefillCase)
    most = {"single": 72, "short": 24, "equal": 24, "blocks": 4, "tiles": 2, "511": 2, "513": 2, "600": 1}
    return case.requests * case.heads > most[case.lengths]


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, PrefillCase)
    draw = Draw(case.seed, case.op)
    lanes, value_lanes = (192, 128) if case.width == "model" else (48, 32)
    lengths = _lengths(case, draw)
    tokens = int(lengths.sum())
    query, key, value = _numbers(case, draw, lengths, lanes, value_lanes)
    split = case.layout == "split"
    gap = (value_lanes if split else 0, (value_lanes if split else 0))
    wide = far_gap(tokens, case.heads * value_lanes) if case.reach == "far" else gap[0]
    starts = guarded((case.requests + 1,), torch.int32)
    starts.copy_(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    return Inputs(
        query=_stored(query, (0, 0)), key=_stored(key, gap), value=_stored(value, (wide, gap[1])), query_start=starts,
        scale=_scale(case),
        out=guarded((tokens, case.heads * value_lanes), torch.bfloat16), compute_units=case.compute_units,
    )  # fmt: skip


def _scale(case: PrefillCase) -> float:
    if case.scale == "model":
        return 1 / math.sqrt(192)
    return {"eighth": 0.125, "three_eighths": 0.375}[case.scale] * (0.5 if case.width == "model" else 1.0)


def _stored(numbers: torch.Tensor, gaps: tuple[int, int]) -> torch.Tensor:
    memory = guarded(tuple(numbers.shape), torch.bfloat16, gaps=gaps)
    memory.copy_(numbers)
    return memory


def _lengths(case: PrefillCase, draw: Draw) -> torch.Tensor:
    shape = (case.requests,)
    short = draw.integers("short", shape, 1, 10)
    if case.lengths == "single":
        return torch.ones(shape, dtype=torch.int64)
    if case.lengths == "equal":
        return torch.full(shape, 8)
    if case.lengths == "blocks":
        return draw.integers("blocks", shape, 1, 3) * 16 + draw.integers("beside", shape, -1, 2)
    if case.lengths in ("tiles", "511", "513", "600"):
        beyond = 256 + draw.integers("beside", shape, 1, 3)
        first = beyond if case.lengths == "tiles" else torch.full(shape, int(case.lengths))
        return torch.where(torch.arange(case.requests) == 0, first, short)
    return short


def _numbers(
    case: PrefillCase, draw: Draw, lengths: torch.Tensor, lanes: int, value_lanes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = int(lengths.sum())
    shape = (tokens, case.heads)
    # Numbers that OCP e4m3 holds: multiples of 1/4 up to 3.75.
    query, key, value = (
        (draw.normal_like(name, (*shape, width)) * 4).round() / 4
        for name, width in (("query", lanes), ("key", lanes), ("value", value_lanes))
    )
    token = torch.arange(tokens)
    if case.values == "fine":
        return draw.normal_like("query", (*shape, lanes)), draw.normal_like("key", (*shape, lanes)) * 1.3, draw.normal_like(
            "value", (*shape, value_lanes)
        )  # fmt: skip
    if case.values == "onehot":
        lane = (token[:, None] * 3 + torch.arange(case.heads)) % value_lanes
        value = torch.where(torch.arange(value_lanes) == lane[..., None], 64.0, 0.0)
        query, key = query / 4, key / 2
    elif case.values == "needle":
        # The key two tokens back, or the first one, points where the query does.
        first = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        code = draw.integers("code", (tokens, case.heads, lanes), 0, 2) * 2.0 - 1
        key = code * 2
        query = code[torch.maximum(token - 2, first)] * 4
    elif case.values == "uniform":
        query = torch.zeros_like(query)
        value = draw.integers("value", (*shape, value_lanes), -8, 9) * 1.0
    elif case.values == "limits":
        value = torch.where(draw.chance("high", value.shape, 1, 4), LARGEST, 1.0) * value.sign()
        query = query / 8
    return query, key, value
