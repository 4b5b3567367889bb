"""What do we ask of the sparse MLA forward that reads two packed caches in place, prefill and decode alike?

The question of `cases.sparse_mla.decode` with less around it: ragged lists only, OCP codes in both caches, no rotation,
no quantised output, a sink of exactly one logit a head. Selected records hold no NaN: implementations differ in whether
they look for it, so there is no right answer with one.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import BFloat16, Float32

from cases.case import Axis, Case, outside
from cases.memory import guarded_copy
from cases.production import Served
from cases.sparse_mla import decode
from cases.sparse_mla.decode import DecodeCase, DecodeInputs, Segment


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call.

    Both segments are in ragged form with OCP codes. An entry that is no slot of its cache is skipped; AITER documents -1
    only. scale multiplies the products; sink holds one natural-log logit a head. `out` receives the answer in bf16.
    splits 0 leaves the split count to the implementation, which may read `compute_units`.
    """

    query: BFloat16[torch.Tensor, "queries heads 512"]
    main: Segment
    extra: Segment | None
    scale: float
    sink: Float32[torch.Tensor, " heads"] | None
    out: BFloat16[torch.Tensor, "queries heads 512"]
    compute_units: int
    splits: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The answer, unrotated: a row without a valid key is 0, with or without a sink."""

    out: BFloat16[torch.Tensor, "queries heads 512"] | None


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardCase(Case):
    """The axes of the forward; those that decode has too mean the same there (`cases.sparse_mla.decode`).

    entries: `negative` skips -1 only, `any` also what lies beyond the cache and at the ends of the integers.
    """

    op: ClassVar[str] = "sparse_mla.two_segment_forward"

    compute_units: int = 256
    queries: int = 3
    heads: int = 16
    main_length: int = 128
    extra_length: int = 64
    rows: Literal["full", "ragged", "mixed"] = "full"
    invalid: Literal["none", "front", "middle", "tail", "scattered"] = "none"
    entries: Literal["negative", "any"] = "negative"
    duplicates: Literal["none", "within", "across"] = "none"
    splits: int = 0
    sink: Literal["absent", "minus_infinity", "zero", "moderate", "large"] = "moderate"
    main_block: int = 64
    extra_block: int = 64
    block_stride: Literal["page", "padded", "odd"] = "page"
    form: Literal["ragged", "ragged_offset"] = "ragged"
    integers: Literal["int32", "int64"] = "int32"
    layout: Literal["contiguous", "strided"] = "contiguous"
    values: Literal[
        "randn", "needle", "outlier", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "ties",
        "subnormal", "wide", "zeros", "below",
    ] = "randn"  # fmt: skip
    garbage: Literal["nan", "huge"] = "nan"
    reach: Literal["near", "caches", "rows"] = "near"


CASE = ForwardCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "compute_units": (132, 256),
    "queries": (1, 2, 5),
    "heads": (1, 3, 8, 16, 17, 64, 128),
    "main_length": (0, 1, 31, 64, 65, 128),
    "extra_length": (-1, 0, 1, 33, 64, 65, 512),
    "rows": ("full", "ragged", "mixed"),
    "invalid": ("none", "front", "middle", "tail", "scattered"),
    "entries": ("negative", "any"),
    "duplicates": ("none", "within", "across"),
    "splits": (0, 1, 2, 3, 4, 5, 8),
    "sink": ("absent", "minus_infinity", "zero", "moderate", "large"),
    "main_block": (1, 5, 32, 64, 128, 256),
    "extra_block": (1, 2, 64, 128),
    "block_stride": ("page", "padded", "odd"),
    "form": ("ragged", "ragged_offset"),
    "integers": ("int32", "int64"),
    "layout": ("contiguous", "strided"),
    "values": (
        "randn", "needle", "outlier", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "ties",
        "subnormal", "wide", "zeros", "below",
    ),
    "garbage": ("nan", "huge"),
    "reach": ("near",),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "queries": (1, 2, 7, 16, 17, 64, 129),
    "main_length": (0, 1, 31, 32, 33, 63, 64, 65, 127, 128),
    "extra_length": (-1, 0, 1, 2, 31, 33, 63, 64, 65, 127, 192, 512, 1024, 2048, 2176),
    "main_block": (1, 2, 4, 5, 32, 64, 128, 256),
    "extra_block": (1, 2, 4, 5, 32, 64, 128, 256),
}
RANDOM_CASES = 12

_BASE = ForwardCase()
REGRESSIONS: tuple[str, ...] = (
    # A call without rows returns an empty answer.
    _BASE.varied(queries=0, rows="ragged").id,
    # An empty row is 0 without a sink too, and so is one whose entries are all invalid.
    _BASE.varied(queries=5, heads=3, rows="mixed", sink="absent", splits=1).id,
    _BASE.varied(queries=5, heads=3, rows="mixed", sink="moderate", splits=4).id,
    # Tiles without a valid key stand in front of keys whose scores are all far below 0.
    _BASE.varied(queries=2, heads=3, extra_length=512, invalid="front", values="below", sink="absent", splits=1).id,
    # One key of 640 must not be lost, wherever an implementation cuts.
    *(_BASE.varied(queries=1, heads=3, extra_length=512, splits=s, values="needle").id for s in (1, 3, 8)),
    _BASE.varied(queries=2, heads=3, extra_length=512, splits=5, values="uniform_exact", sink="absent").id,
    # What is added up in splits is kept in fp32 between them.
    _BASE.varied(queries=1, heads=3, main_length=0, extra_length=257, values="repeated", sink="absent").id,
    # A lane that outweighs the others shows a query that was rounded again after the scale was folded into it.
    _BASE.varied(queries=2, heads=16, values="outlier", sink="absent", splits=2).id,
    # A minus infinity for a sink is no sink.
    _BASE.varied(queries=1, heads=3, sink="minus_infinity", splits=1).id,
    # Pages and rows 2^31 elements behind the first: their offsets need 64 bits.
    _BASE.varied(queries=2, heads=1, splits=2, reach="caches", block_stride="odd").id,
    _BASE.varied(queries=5, heads=3, main_length=33, extra_length=31, splits=2, reach="rows", rows="ragged").id,
)  # fmt: skip

_POOLS = {"main.cache": 65536, "extra.cache": 65536}
PRODUCTION: tuple[Served, ...] = (
    *(
        Served(CASE(queries=32, heads=heads, main_length=128, extra_length=extra), _POOLS)
        for heads, extra in ((16, 512), (64, 512), (128, 512), (128, 2048))
    ),
    Served(CASE(queries=32, heads=128, main_length=128, extra_length=512), {"main.cache": 8192, "extra.cache": 8192}),
    Served(CASE(queries=32, heads=128, main_length=128, extra_length=-1), {"main.cache": 65536}),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "queries": (0, 4096), "heads": (1, 1024), "main_length": (0, 1 << 17), "extra_length": (-1, 1 << 17),
    "splits": (0, 1024), "main_block": (1, 4096), "extra_block": (1, 4096), "compute_units": (1, 4096),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, ForwardCase)
    reasons = outside(case, _BOUNDS)
    if case.duplicates == "across" and (case.extra_length < 1 or case.main_length < 1):
        reasons.append("duplicates=across needs entries in both segments")
    if case.duplicates == "within" and max(case.main_length, case.extra_length) < 2:
        reasons.append("duplicates=within needs a segment of two entries")
    if case.invalid in ("front", "middle", "scattered") and max(case.main_length, case.extra_length) < 3:
        reasons.append(f"invalid={case.invalid} needs a segment of three entries")
    if case.reach == "rows" and case.queries < 5:
        reasons.append("reach=rows needs five rows, or its address space is out of proportion")
    if case.reach == "caches" and max(case.main_length, case.extra_length) > 512:
        reasons.append("reach=caches needs lists of 512 entries or fewer, or its pages are not far apart")
    return reasons


def decode_case(case: ForwardCase) -> DecodeCase:
    """The case of decode on gfx950 that asks the same, without rotation, into bf16."""
    shared = {
        field.name: getattr(case, field.name)
        for field in dataclasses.fields(case)
        if field.name not in ("op", "entries")
    }
    return DecodeCase(**shared, arch="gfx950")


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than a few seconds for it."""
    assert isinstance(case, ForwardCase)
    return decode.tiles(decode_case(case)) > 48


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, ForwardCase)
    inputs = of_decode(decode.build(decode_case(case)))
    return inputs if case.entries == "any" else _only_minus_one(inputs)


def _only_minus_one(inputs: Inputs) -> Inputs:
    def change(part: Segment) -> Segment:
        assert part.indices is not None
        inside = (part.indices >= 0) & (part.indices < part.rows)
        return dataclasses.replace(part, indices=guarded_copy(torch.where(inside, part.indices, -1)))

    extra = None if inputs.extra is None else change(inputs.extra)
    return dataclasses.replace(inputs, main=change(inputs.main), extra=extra)


def of_decode(call: DecodeInputs) -> Inputs:
    """The forward that a decode call without rotation asks for."""
    assert call.out is not None and call.positions is None
    return Inputs(
        query=call.query, main=call.main, extra=call.extra, scale=call.scale, sink=call.sink, out=call.out,
        compute_units=call.compute_units, splits=call.splits,
    )  # fmt: skip


def as_decode(inputs: Inputs) -> DecodeInputs:
    """The decode call on gfx950 that asks the same."""
    return DecodeInputs(
        query=inputs.query, main=inputs.main, extra=inputs.extra, scale=inputs.scale, sink=inputs.sink, positions=None,
        cos_sin=None, out=inputs.out, out_codes=None, out_scales=None, arch="gfx950", compute_units=inputs.compute_units,
        splits=inputs.splits, adaptive=False, trust_extra=False,
    )  # fmt: skip
