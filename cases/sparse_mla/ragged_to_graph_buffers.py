"""What do we ask of the copy of ragged lists into the buffers of a captured graph?

A graph replays the addresses that it was captured with, so every step's lists must come to lie in the same memory. A
case is a sequence of steps over the same buffers. See `oracle.sparse_mla.ragged_to_graph_buffers`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Int64

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

Arch = Literal["gfx942", "gfx950", "other"]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step's lists: row t holds indices[indptr[t] : indptr[t + 1]]; entries from indptr[rows] on are unused room."""

    indices: Int32[torch.Tensor, " entries"]
    indptr: Int32[torch.Tensor, " starts"]
    rows: int


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The steps, in their order, and the buffers that all of them write.

    A step may fill max(rows * per_row, 1) entries of `index_buffer`, and rows + 1 of `indptr_buffer`. One with more
    entries, or with more starts than the buffer has, must raise; what it leaves in the buffers is free.
    """

    steps: tuple[Step, ...]
    index_buffer: Int32[torch.Tensor, " index_room"]
    indptr_buffer: Int32[torch.Tensor, " indptr_room"]
    per_row: int
    arch: Arch


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What each step returned, copied before the next one ran.

    indices, indptr: the returned tensors; both empty for a step that raised. Entries from indptr[rows] on are free.
    addresses: where they begin, in bytes from the beginning of their buffers; -1 for memory that is not the buffer's.
    raised: 1 for a step that raised.
    """

    indices: tuple[torch.Tensor, ...]
    indptr: tuple[torch.Tensor, ...]
    addresses: Int64[torch.Tensor, "steps 2"]
    raised: Int64[torch.Tensor, " steps"]


WRITABLE: tuple[str, ...] = ("index_buffer", "indptr_buffer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphBuffersCase(Case):
    """The axes of the sequence.

    steps: how many. rows: of the largest one. pattern: how their rows change, `same`, `growing`, `shrinking`,
    `alternating` between all and one, `emptied` every other step without rows. per_row: entries a row may have. fill:
    entries that it has, `full`, `part`, `none`, or `mixed` each step another way. room: `exact` index tensors end with
    the last entry, `some` leave some room behind it, `all` are as long as the rows may need. overflow: one step has too
    many `entries`, or the largest ones have too many starts for the buffer (`indptr`). buffers: `oversized` ones are
    longer than any step.
    """

    op: ClassVar[str] = "sparse_mla.ragged_to_graph_buffers"

    steps: int = 3
    rows: int = 7
    pattern: Literal["same", "growing", "shrinking", "alternating", "emptied"] = "shrinking"
    per_row: int = 8
    fill: Literal["full", "part", "none", "mixed"] = "part"
    room: Literal["exact", "some", "all"] = "all"
    overflow: Literal["none", "entries", "indptr"] = "none"
    buffers: Literal["exact", "oversized"] = "oversized"
    arch: Literal["gfx942", "gfx950", "other"] = "gfx950"


CASE = GraphBuffersCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "steps": (1, 2, 3, 5),
    "rows": (1, 7, 33),
    "pattern": ("same", "growing", "shrinking", "alternating", "emptied"),
    "per_row": (0, 1, 8, 128),
    "fill": ("full", "part", "none", "mixed"),
    "room": ("exact", "some", "all"),
    "overflow": ("none", "entries", "indptr"),
    "buffers": ("exact", "oversized"),
    "arch": ("gfx942", "gfx950", "other"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"rows": (1, 2, 7, 33, 257), "steps": (1, 2, 3, 5, 9)}

RANDOM_CASES = 20

_BASE = GraphBuffersCase()

REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(arch="gfx942").id,
    _BASE.varied(arch="other", pattern="emptied", steps=5).id,
    _BASE.varied(room="exact", fill="mixed", steps=5, pattern="alternating").id,
    _BASE.varied(room="exact", fill="none", pattern="same").id,
    _BASE.varied(room="some", pattern="alternating", per_row=128).id,
    _BASE.varied(overflow="entries").id,
    _BASE.varied(overflow="indptr", pattern="growing", buffers="exact").id,
    _BASE.varied(rows=0).id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(steps=1, rows=256, per_row=512)),
    Served(CASE(steps=1, rows=256, per_row=512, arch="gfx942")),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "steps": (1, 64),
    "rows": (0, 1 << 16),
    "per_row": (0, 1 << 14),
}


def forbid(case: GraphBuffersCase) -> list[str]:
    """Every reason why this is no question: too many starts there are only where there are rows."""
    reasons = outside(case, _BOUNDS)
    if case.overflow == "indptr" and case.rows == 0:
        reasons.append("overflow=indptr: needs rows")
    return reasons


def heavy(case: GraphBuffersCase) -> bool:
    """Whether the case takes more than about a second on a CPU."""
    return case.steps * case.rows * max(1, case.per_row) > 200_000


def build(case: GraphBuffersCase) -> Inputs:
    """The inputs of a case; buffers full of numbers that are no entries, unused room of numbers that could be."""
    draw = Draw(case.seed, case.op)
    rows = [_rows(case, step) for step in range(case.steps)]
    steps = tuple(_step(case, draw.within(str(step)), step, count) for step, count in enumerate(rows))
    spare = 50 if case.buffers == "oversized" else 0
    starts = max(rows) if case.overflow == "indptr" else max(rows) + 1 + spare
    return Inputs(
        steps=steps,
        index_buffer=guarded((max(max(rows) * case.per_row, 1) + spare,), torch.int32),
        indptr_buffer=guarded((starts,), torch.int32),
        per_row=case.per_row,
        arch=case.arch,
    )


def _rows(case: GraphBuffersCase, step: int) -> int:
    shares = {
        "same": case.rows,
        "growing": -(-case.rows * (step + 1) // case.steps),
        "shrinking": -(-case.rows * (case.steps - step) // case.steps),
        "alternating": min(1, case.rows) if step % 2 else case.rows,
        "emptied": 0 if step % 2 else case.rows,
    }
    return shares[case.pattern]


def _step(case: GraphBuffersCase, draw: Draw, step: int, rows: int) -> Step:
    fill = ("full", "none", "part")[step % 3] if case.fill == "mixed" else case.fill
    counts = {
        "full": torch.full((rows,), case.per_row),
        "part": draw.integers("counts", (rows,), 0, case.per_row + 1),
        "none": torch.zeros(rows, dtype=torch.int64),
    }[fill]
    indptr = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0))
    used, whole = int(indptr[-1]), rows * case.per_row
    some = int(draw.integers("room", (1,), used, whole + 1))
    entries = {"exact": used, "some": some, "all": whole}[case.room]
    if case.overflow == "entries" and step == case.seed % case.steps:
        entries = max(rows * case.per_row, 1) + 1 + step
    return Step(
        indices=guarded_copy(draw.integers("entries", (entries,), 0, 1 << 30).to(torch.int32)),
        indptr=guarded_copy(indptr.to(torch.int32)),
        rows=rows,
    )
