"""What do we ask of the rules that cut the keys of sparse MLA decode into splits?

A case asks about many calls at once, its points. See `oracle.sparse_mla.decode_splits` for the rules.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray

from cases.case import Axis, Case
from cases.draw import Draw
from cases.memory import guarded, guarded_copy

Rule = Literal["decode", "adaptive", "bfloat16_cache"]
Arch = Literal["gfx942", "gfx950", "other"]

HEADS = (1, 8, 16, 17, 32, 64, 128)
_TILE = 32
_LONGEST = 8192


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The calls, a point each.

    queries, heads: the call. main_capacity, extra_capacity: entries that its index tensors hold, used or not.
    main_length, extra_length: entries of one of its queries. Which of them count is the rule's matter: `decode` asks
    for the splits that the call launches, `adaptive` for those of that one query after the kernel has chosen, and
    `bfloat16_cache` for the splits over an unquantised cache whose longest key list has main_length entries.
    `out` receives the answer.
    """

    queries: Int64[torch.Tensor, " points"]
    heads: Int64[torch.Tensor, " points"]
    main_capacity: Int64[torch.Tensor, " points"]
    extra_capacity: Int64[torch.Tensor, " points"]
    main_length: Int64[torch.Tensor, " points"]
    extra_length: Int64[torch.Tensor, " points"]
    out: Int64[torch.Tensor, " points"]
    rule: Rule
    arch: Arch
    compute_units: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The split count of every point."""

    out: Int64[torch.Tensor, " points"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitsCase(Case):
    """The axes of the split rules.

    points: calls in the case. programs: what queries times blocks of 16 heads comes to, `few` 0 to 70, `waves` next to
    fractions of the compute units, `many` up to thousands. lengths: entries per query, `absent` none, `main` and `both`
    any, `edges` next to multiples of a key tile times a split count, `fractional` averages that are no whole numbers.
    unused: `tail` has index tensors twice as long as needed and more.
    """

    op: ClassVar[str] = "sparse_mla.decode_splits"

    rule: Literal["decode", "adaptive", "bfloat16_cache"] = "decode"
    arch: Literal["gfx942", "gfx950", "other"] = "gfx950"
    compute_units: int = 256
    points: int = 193
    programs: Literal["few", "waves", "many"] = "few"
    lengths: Literal["absent", "main", "both", "edges", "fractional"] = "both"
    unused: Literal["none", "tail"] = "none"


CASE = SplitsCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "rule": ("decode", "adaptive", "bfloat16_cache"),
    "arch": ("gfx942", "gfx950", "other"),
    "compute_units": (80, 132, 256, 304),
    "points": (0, 1, 193),
    "programs": ("few", "waves", "many"),
    "lengths": ("absent", "main", "both", "edges", "fractional"),
    "unused": ("none", "tail"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "compute_units": (1, 2, 60, 80, 104, 110, 120, 132, 228, 256, 304),
    "points": (1, 1021),
}
RANDOM_CASES = 20

REGRESSIONS: tuple[str, ...] = (
    SplitsCase(arch="gfx942", compute_units=304, programs="waves", lengths="edges").id,
    SplitsCase(arch="gfx942", compute_units=304, lengths="absent").id,
    SplitsCase(arch="gfx950", compute_units=256).id,
    SplitsCase(arch="gfx950", compute_units=256, programs="waves", lengths="edges").id,
    SplitsCase(rule="adaptive", lengths="edges").id,
    SplitsCase(rule="adaptive").id,
    SplitsCase(rule="bfloat16_cache", arch="gfx942", compute_units=304, lengths="main").id,
    # A short call launches 32 splits over lists that have fewer tiles.
    SplitsCase(rule="bfloat16_cache", lengths="main").id,
)


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, SplitsCase)
    reasons = []
    for axis, low, high in (("points", 0, 100_000), ("compute_units", 1, 4096)):
        value = getattr(case, axis)
        if not low <= value <= high:
            reasons.append(f"{axis}={value} should be {low} to {high}")
    if case.seed < 0:
        reasons.append(f"seed={case.seed} should not be negative")
    if case.rule == "adaptive" and case.arch != "gfx950":
        reasons.append(f"arch={case.arch}: the adaptive split count exists on gfx950 only")
    if case.rule == "bfloat16_cache" and case.unused == "tail":
        reasons.append("unused=tail: over an unquantised cache the lists count, not the index tensor")
    return reasons


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, SplitsCase)
    return case.points > 2000


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, SplitsCase)
    draw = Draw(case.seed, case.op)
    count = case.points
    heads = np.array(HEADS)[draw.integers("heads", (count,), 0, len(HEADS)).numpy()]
    queries = _queries(case, draw, -(-heads // 16))
    main = _lengths(case, draw.within("main"))
    extra = np.zeros(count, np.int64)
    if case.lengths not in ("absent", "main"):
        extra = _lengths(case, draw.within("extra"))
    capacities = []
    for name, lengths in (("main", main), ("extra", extra)):
        own = draw.within(name)
        capacity = lengths * np.maximum(queries, 0)
        if case.lengths == "fractional":
            # Queries of different lengths: the total is no multiple of their number.
            capacity = capacity + own.integers("fraction", (count,), 0, 1 << 16).numpy() % np.maximum(queries, 1)
        if case.unused == "tail":
            capacity = 2 * capacity + own.integers("tail", (count,), 0, 4096).numpy() * (lengths > 0)
        capacities.append(capacity)
    if case.rule == "adaptive":
        # The query in question is not the average one.
        own = draw.within("own")
        main = np.minimum(_lengths(case, own.within("main")), capacities[0])
        extra = np.minimum(_lengths(case, own.within("extra")), capacities[1])

    def given(values: NDArray[np.int64]) -> torch.Tensor:
        return guarded_copy(torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)))

    return Inputs(
        queries=given(queries),
        heads=given(heads),
        main_capacity=given(capacities[0]),
        extra_capacity=given(capacities[1]),
        main_length=given(main),
        extra_length=given(extra),
        out=guarded((count,), torch.int64),
        rule=case.rule,
        arch=case.arch,
        compute_units=case.compute_units,
    )


def _queries(case: SplitsCase, draw: Draw, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    count = case.points
    if case.programs == "few":
        programs = draw.integers("programs", (count,), 0, 71).numpy()
    elif case.programs == "many":
        programs = draw.integers("programs", (count,), 0, 8 * case.compute_units + 2000).numpy()
    else:
        # Where programs * splits fills the compute units exactly, and one program beside it.
        waves = draw.integers("waves", (count,), 1, 7).numpy()
        splits = draw.integers("splits", (count,), 1, 33).numpy()
        programs = waves * case.compute_units // splits + draw.integers("beside", (count,), -1, 2).numpy()
    return np.asarray(np.maximum(programs, 0) // blocks, dtype=np.int64)


def _lengths(case: SplitsCase, draw: Draw) -> NDArray[np.int64]:
    count = case.points
    if case.lengths == "absent":
        return np.zeros(count, np.int64)
    if case.lengths == "edges":
        splits = draw.integers("splits", (count,), 1, 33).numpy()
        tiles = draw.integers("tiles", (count,), 0, 6).numpy()
        lengths = _TILE * tiles * splits + draw.integers("beside", (count,), -1, 2).numpy()
    else:
        # Short ones are where the rules differ: as many below 128 as from there to 8192.
        magnitude = draw.integers("magnitude", (count,), 0, 14).numpy()
        lengths = draw.integers("length", (count,), 0, 1 << 30).numpy() % (1 << magnitude)
    return np.asarray(np.clip(lengths, 0, _LONGEST), dtype=np.int64)
