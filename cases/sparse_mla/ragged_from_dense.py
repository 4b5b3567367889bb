"""What do we ask of a kernel that packs the valid entries of padded index rows into one ragged list?

Sparse MLA attention reads its slots from a ragged list; window and top-k builders write padded rows. Packing drops
what lies beyond a row's length and every entry that names no slot. See `oracle.sparse_mla.ragged_from_dense`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int, Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.sparse_mla.paging import INT32_MAX, INT32_MIN


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: row t keeps, in order, the entries of its first lengths[t] columns that are not negative and, unless
    num_rows is negative, below num_rows.

    All dimensions of `indices` behind the first make up a row; any strides. Lengths below 0 and above the row's width
    are legal. `flat` (as many places as `indices`) and `indptr` are memory that an implementation may answer in.
    """

    indices: Int[torch.Tensor, "rows ..."]
    lengths: Int[torch.Tensor, " rows"]
    num_rows: int
    flat: Int32[torch.Tensor, " capacity"]
    indptr: Int32[torch.Tensor, " rows_plus_one"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The packed entries and where each row's begin: row t is flat[indptr[t]:indptr[t+1]], indptr[0] is 0.

    `flat` keeps the capacity of the padded rows; what it holds from indptr[-1] on means nothing.
    """

    flat: Int32[torch.Tensor, " capacity"]
    indptr: Int32[torch.Tensor, " rows_plus_one"]


WRITABLE: tuple[str, ...] = ("flat", "indptr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedCase(Case):
    """The axes of the packing.

    form: `single` and `split` have three dimensions, of which the second has 1 or 2 places. indices: `int64_wide` holds
    entries whose low 32 bits look like a slot. lengths: `hostile` negative, huge and next to the width (beyond 32 bits
    too where they are int64), `empty` all 0. bound: num_rows `absent` -1, `negative` another negative number, `zero`,
    `tight` among the entries. entries: `holes` every fourth invalid, `edges` the ends of every range. layout: `strided`
    leaves gaps after every dimension; `far` has rows so far apart that the last starts 2^31 elements behind the first.
    """

    op: ClassVar[str] = "sparse_mla.ragged_from_dense"

    rows: int = 7
    width: int = 128
    form: Literal["matrix", "single", "split"] = "matrix"
    indices: Literal["int32", "int64", "int64_wide"] = "int32"
    lengths: Literal["full", "ragged", "hostile", "empty"] = "ragged"
    length_dtype: Literal["int32", "int64"] = "int32"
    bound: Literal["absent", "negative", "zero", "tight"] = "absent"
    entries: Literal["valid", "holes", "invalid", "duplicates", "edges"] = "holes"
    layout: Literal["contiguous", "strided", "far"] = "contiguous"


CASE = RaggedCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "rows": (0, 1, 2, 7, 33, 130),
    "width": (0, 1, 6, 128, 1024, 1500),
    "form": ("matrix", "single", "split"),
    "indices": ("int32", "int64", "int64_wide"),
    "lengths": ("full", "ragged", "hostile", "empty"),
    "length_dtype": ("int32", "int64"),
    "bound": ("absent", "negative", "zero", "tight"),
    "entries": ("valid", "holes", "invalid", "duplicates", "edges"),
    "layout": ("contiguous", "strided"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "rows": (0, 1, 2, 7, 33, 130, 1030),
    "width": (0, 1, 6, 128, 640, 1024, 1500, 2176),
}
RANDOM_CASES = 12

_BASE = RaggedCase()
REGRESSIONS: tuple[str, ...] = (
    # More rows than one tile of a scan.
    _BASE.varied(rows=1030, width=6).id,
    _BASE.varied(rows=3, width=1500, lengths="hostile", bound="tight", layout="strided").id,
    _BASE.varied(rows=3, width=128, bound="tight", layout="far").id,
    _BASE.varied(indices="int64_wide", bound="tight").id,
    _BASE.varied(lengths="hostile", length_dtype="int64").id,
    _BASE.varied(rows=0).id,
    _BASE.varied(entries="duplicates", lengths="full").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(CASE(rows=256, width=640)),
    Served(CASE(rows=256, width=2176)),
    Served(CASE(rows=1, width=640)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"rows": (0, 1 << 16), "width": (0, 1 << 14)}


def forbid(case: RaggedCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.form == "split" and case.width % 2:
        reasons.append(f"width={case.width}: form=split needs an even width")
    if case.layout == "far" and case.rows < 3:
        reasons.append(f"rows={case.rows}: layout=far needs three rows")
    if case.layout == "far" and (case.form != "matrix" or case.width < 1):
        reasons.append("layout=far: needs a matrix with columns")
    if case.layout == "far" and case.indices != "int32":
        reasons.append(f"indices={case.indices}: layout=far needs int32")
    return reasons


def heavy(case: RaggedCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.rows * case.width > 100_000


def build(case: RaggedCase) -> Inputs:
    """The inputs of a case; entries below a tight bound and above it, and lengths of every kind."""
    draw = Draw(case.seed, case.op)
    num_rows = {"absent": -1, "negative": -7, "zero": 0, "tight": 1000}[case.bound]
    lengths = _lengths(case, draw)
    entries = _entries(case, draw, num_rows, lengths)
    shape: tuple[int, ...] = (case.rows, case.width)
    if case.form == "single":
        shape = (case.rows, 1, case.width)
    if case.form == "split":
        shape = (case.rows, 2, case.width // 2)
    gaps: tuple[int, ...] = ()
    if case.layout == "strided":
        gaps = (13, 3)[: len(shape) - 1]
    if case.layout == "far":
        gaps = (far_gap(case.rows, case.width),)
    index_dtype = torch.int32 if case.indices == "int32" else torch.int64
    return Inputs(
        indices=guarded_copy(entries.reshape(shape).to(index_dtype), gaps=gaps),
        lengths=guarded_copy(lengths.to(torch.int32 if case.length_dtype == "int32" else torch.int64)),
        num_rows=num_rows,
        flat=guarded((case.rows * case.width,), torch.int32),
        indptr=guarded((case.rows + 1,), torch.int32),
    )


def _lengths(case: RaggedCase, draw: Draw) -> torch.Tensor:
    if case.lengths == "full":
        return torch.full((case.rows,), case.width)
    if case.lengths == "ragged":
        return draw.integers("lengths", (case.rows,), 0, case.width + 1)
    if case.lengths == "empty":
        return torch.zeros(case.rows, dtype=torch.int64)
    kinds = [case.width - 1, INT32_MAX, INT32_MIN, -1, case.width + 1, case.width // 2, 0, 1, -3]
    if case.length_dtype == "int64":
        # Their low 32 bits alone would be 1, 3 and the width.
        kinds[:3] = [2**32 + 1, -(2**32) + 3, -(2**33) + case.width]
    return torch.tensor(kinds)[(torch.arange(case.rows) + draw.integers("kind", (1,), 0, 2)) % len(kinds)]


def _entries(case: RaggedCase, draw: Draw, num_rows: int, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [rows, width]; behind a row's length as many valid ones as before it."""
    shape = (case.rows, case.width)
    values = draw.integers("entries", shape, 0, 1100)
    if case.entries == "duplicates":
        values = draw.integers("entries", shape, 0, 3)
    if case.entries == "edges":
        edges = torch.tensor([0, 1, 999, 1000, INT32_MAX, -1, INT32_MIN])
        values = edges[draw.integers("entries", shape, 0, len(edges))]
    invalid = torch.tensor([-1, INT32_MIN, -7])[draw.integers("invalid", shape, 0, 3)]
    if case.entries == "invalid":
        values = invalid
    if case.entries == "holes":
        values = torch.where(draw.chance("hole", shape, 1, 4), invalid, values)
    if case.indices == "int64_wide":
        wide = draw.integers("wide", shape, 0, 1000) + 2**32 * draw.integers("high", shape, -3, 4)
        # An entry above 32 bits that counted could not be answered: without a bound they stand behind the length only.
        counts = (torch.arange(case.width) < lengths[:, None]) & (num_rows < 0)
        values = torch.where(draw.chance("is wide", shape, 1, 3) & ~(counts & (wide > INT32_MAX)), wide, values)
    return values
