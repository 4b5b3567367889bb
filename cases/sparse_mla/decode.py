"""What do we ask of sparse MLA decode?

One latent row of 512 numbers per cached token is key and value at once (448 fp8 lanes with one power-of-two scale per
64, then 64 bf16 lanes already rotated). Each query attends over two lists of slots: the main (sliding-window) cache and
the extra (compressed) cache, each with its own encoding, page size and stride. See `oracle.sparse_mla.decode` for the
formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import BFloat16, Float, Float32, Int, UInt8
from numpy.typing import NDArray

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served
from cases.rotation import draw_positions, draw_whole_table

LANES = 512
NOPE = 448
ROPE = 64
GROUP = 64
RECORD = 584
TOKEN_BYTES = 576
SCALE_BYTES = 8
PAGE_ALIGN = 576
POSITIONS = 64
MODEL_SCALE = 512**-0.5

Arch = Literal["gfx942", "gfx950", "other"]
Encoding = Literal["float8_e4m3fn", "float8_e4m3fnuz"]
Values = Literal[
    "randn", "needle", "outlier", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "ties",
    "subnormal", "wide", "nan_lanes", "zeros", "below",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Segment:
    """One cache and the slots that each query reads from it.

    cache: pages of records; a page holds its tokens' 576-byte data first, then 8 scale bytes a token. The page stride
    may exceed `block * 584`.
    Ragged form: query t reads `indices[indptr[t]:indptr[t+1]]`; `indices` may be longer than `indptr[-1]`, `indptr[0]`
    need not be 0. Dense form: query t reads the valid slots among the first `lengths[t]` columns of `dense[t]`; without
    `lengths`, the number of non-negative entries is that limit. Where both are given, the ragged form counts.
    An entry outside `[0, blocks * block)` is skipped. Duplicates count as often as they stand.
    """

    cache: UInt8[torch.Tensor, "blocks block 584"]
    encoding: Encoding
    indices: Int[torch.Tensor, " capacity"] | None = None
    indptr: Int[torch.Tensor, " queries_plus_one"] | None = None
    dense: Int[torch.Tensor, "queries width"] | None = None
    lengths: Int[torch.Tensor, " queries"] | None = None

    @property
    def rows(self) -> int:
        """Slots in the cache."""
        return self.cache.shape[0] * self.cache.shape[1]


@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """The call.

    scale multiplies the products; sink holds natural-log logits, of which the first `heads` count. positions and cos_sin
    ask for the inverse rotation of the last 64 lanes. Either `out` (bf16 or fp32) or `out_codes` with `out_scales` (MXFP8,
    one scale byte per 32 lanes) receives the answer. splits 0 leaves the split count to the heuristic, which reads
    `compute_units`. trust_extra licenses an implementation not to look for NaN in the extra cache.
    """

    query: BFloat16[torch.Tensor, "queries heads 512"]
    main: Segment
    extra: Segment | None
    scale: float
    sink: Float32[torch.Tensor, " sinks"] | None
    positions: Int[torch.Tensor, " queries"] | None
    cos_sin: Float32[torch.Tensor, "positions 64"] | None
    out: Float[torch.Tensor, "queries heads 512"] | None
    out_codes: Float[torch.Tensor, "queries heads*512"] | None
    out_scales: UInt8[torch.Tensor, "queries heads*16"] | None
    arch: Arch
    compute_units: int
    splits: int
    adaptive: bool
    trust_extra: bool


@dataclasses.dataclass(frozen=True)
class DecodeOutputs:
    """The answer: `out`, or `codes` and `scales`; how many leading rows are rotated; the log-sum-exp without the sink
    (natural logarithm, -inf or the lowest finite float for a row without a valid key) where the implementation has it."""

    out: Float[torch.Tensor, "queries heads 512"] | None = None
    codes: Float[torch.Tensor, "queries heads*512"] | None = None
    scales: UInt8[torch.Tensor, "queries heads*16"] | None = None
    rotated_rows: int = 0
    lse: Float32[torch.Tensor, "queries heads"] | None = None


WRITABLE: tuple[str, ...] = ("out", "out_codes", "out_scales")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase(Case):
    """The axes of sparse MLA decode.

    queries, heads: rows of the call and query heads a row. main_length, extra_length: entries of the longest row, -1 for
    a call without an extra segment. rows: `full` all rows that long; `ragged` any length; `mixed` both segments, one
    only, all entries invalid, and empty, in turn. invalid: where skipped entries stand. splits: 0 for the heuristic.
    values: `below` makes every score about -130, so that a maximum of 0 would leave nothing. main_block, extra_block: tokens
    per page. block_stride: `page` the smallest legal one, `padded` a page more, `odd` two
    bytes more. rotation: `quarter` uses only quarter turns, exact in any precision. garbage: what lies where nobody may
    read. layout: `strided` leaves gaps after each head and row of query and output. reach: `caches` places the pages of
    both caches, `rows` the rows of query and output, so far apart that the last one starts 2^31 elements behind the first.
    """

    op: ClassVar[str] = "sparse_mla.decode"

    arch: Literal["gfx942", "gfx950", "other"] = "gfx950"
    compute_units: int = 256
    queries: int = 3
    heads: int = 16
    main_length: int = 128
    extra_length: int = 64
    rows: Literal["full", "ragged", "mixed"] = "full"
    invalid: Literal["none", "front", "middle", "tail", "scattered"] = "none"
    duplicates: Literal["none", "within", "across"] = "none"
    splits: int = 0
    adaptive: bool = False
    sink: Literal["absent", "minus_infinity", "zero", "moderate", "large", "longer"] = "moderate"
    main_encoding: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn"
    extra_encoding: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn"
    main_block: int = 64
    extra_block: int = 64
    block_stride: Literal["page", "padded", "odd"] = "page"
    form: Literal["ragged", "ragged_offset", "dense", "dense_counted"] = "ragged"
    integers: Literal["int32", "int64"] = "int32"
    rotation: Literal["none", "spread", "quarter"] = "none"
    output: Literal["bfloat16", "float32", "mxfp8"] = "bfloat16"
    layout: Literal["contiguous", "strided"] = "contiguous"
    trust_extra: bool = False
    values: Literal[
        "randn", "needle", "outlier", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "ties",
        "subnormal", "wide", "nan_lanes", "zeros", "below",
    ] = "randn"  # fmt: skip
    garbage: Literal["nan", "huge"] = "nan"
    reach: Literal["near", "caches", "rows"] = "near"


CASE = DecodeCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "arch": ("gfx942", "gfx950", "other"),
    "compute_units": (132, 256, 304),
    "queries": (1, 2, 3, 7),
    "heads": (1, 3, 5, 8, 16, 17, 32, 64, 128),
    "main_length": (0, 1, 31, 32, 33, 127, 128),
    "extra_length": (-1, 0, 1, 31, 33, 64, 65, 512),
    "rows": ("full", "ragged", "mixed"),
    "invalid": ("none", "front", "middle", "tail", "scattered"),
    "duplicates": ("none", "within", "across"),
    "splits": (0, 1, 2, 3, 4, 5, 8, 16, 32),
    "adaptive": (False, True),
    "sink": ("absent", "minus_infinity", "zero", "moderate", "large", "longer"),
    "main_encoding": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "extra_encoding": ("float8_e4m3fn",),
    "main_block": (1, 2, 5, 32, 64, 256),
    "extra_block": (1, 2, 64, 128),
    "block_stride": ("page", "padded", "odd"),
    "form": ("ragged", "ragged_offset", "dense", "dense_counted"),
    "integers": ("int32", "int64"),
    "rotation": ("none", "spread", "quarter"),
    "output": ("bfloat16", "float32", "mxfp8"),
    "layout": ("contiguous", "strided"),
    "trust_extra": (False, True),
    "values": (
        "randn", "needle", "outlier", "uniform_exact", "onehot_exact", "integer_exact", "single", "repeated", "ties",
        "subnormal", "wide", "nan_lanes", "zeros", "below",
    ),
    "garbage": ("nan", "huge"),
    "reach": ("near",),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "queries": (1, 2, 7, 16, 17, 64, 129),
    "extra_length": (-1, 0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 192, 512, 1024, 2048, 2176),
    "extra_encoding": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "main_block": (1, 2, 4, 5, 32, 64, 128, 256),
    "extra_block": (1, 2, 4, 5, 32, 64, 128, 256),
}
RANDOM_CASES = 60

_BASE = DecodeCase()
REGRESSIONS: tuple[str, ...] = (
    # A call without rows returns an empty answer.
    _BASE.varied(queries=0, rows="ragged").id,
    _BASE.varied(queries=0, form="dense", rows="ragged").id,
    # One key of 640 must not be lost at any split boundary.
    *(_BASE.varied(queries=1, main_length=128, extra_length=512, splits=s, values="needle").id for s in (1, 3, 8)),
    *(_BASE.varied(queries=1, main_length=128, extra_length=512, splits=s, values="uniform_exact").id for s in (4, 5)),
    # The production shape of one rank of eight, both architectures, with the encodings that they use.
    _BASE.varied(heads=16, main_length=128, extra_length=512, rotation="spread", adaptive=True).id,
    _BASE.varied(
        arch="gfx942", compute_units=304, heads=16, main_length=128, extra_length=512, main_encoding="float8_e4m3fnuz",
        rotation="spread",
    ).id,
    # 257 copies of a key: their number is none of bf16's, so a denominator in bf16 moves every answer by a step.
    _BASE.varied(queries=1, main_length=0, extra_length=257, values="repeated", sink="absent").id,
    _BASE.varied(queries=1, main_length=0, extra_length=257, values="repeated", sink="absent", rotation="spread").id,
    # A rounding that leans to one side shows over many rows.
    _BASE.varied(queries=2, heads=128, extra_length=512, splits=1, sink="absent").id,
    # The MXFP8 epilogue quantises the fp32 row: equal weights over an exact sum leave no room for another rounding.
    _BASE.varied(
        extra_length=512, values="uniform_exact", sink="absent", rotation="quarter", output="mxfp8", queries=2,
    ).id,
    # The un-split route must rotate as well.
    _BASE.varied(arch="other", rotation="spread").id,
    # Sixteen workgroups and more switch the adaptive split count on.
    _BASE.varied(queries=17, heads=5, main_length=33, extra_length=33, rows="ragged", adaptive=True).id,
    _BASE.varied(queries=16, heads=1, main_length=31, extra_length=512, rows="mixed", adaptive=True).id,
    # Where nothing is valid yet, no maximum but the lowest is harmless.
    _BASE.varied(queries=2, heads=3, extra_length=-1, invalid="front", values="below", sink="absent", splits=1).id,
    # Pages and rows 2^31 elements behind the first: their offsets need 64 bits. Pages of 64 make three of them.
    _BASE.varied(queries=2, heads=1, splits=2, reach="caches", block_stride="odd").id,
    _BASE.varied(arch="gfx942", queries=2, heads=1, splits=2, reach="caches", main_encoding="float8_e4m3fnuz").id,
    _BASE.varied(queries=5, heads=3, main_length=33, extra_length=31, splits=2, reach="rows", rows="ragged").id,
    _BASE.varied(
        queries=5, heads=3, main_length=33, extra_length=31, splits=2, reach="rows", rotation="spread", output="mxfp8",
    ).id,
    # The promise of a clean extra cache says nothing about the main one.
    _BASE.varied(queries=2, heads=3, trust_extra=True, values="nan_lanes", splits=2).id,
)  # fmt: skip

_POOLS = {"main.cache": 65536, "extra.cache": 65536}
_SERVED = DecodeCase(queries=32, main_length=128, extra_length=512)
PRODUCTION: tuple[Served, ...] = (
    *(Served(_SERVED.varied(heads=heads, adaptive=True), _POOLS) for heads in (16, 64, 128)),
    # Caches of less than 2 GiB, which 32 bits address.
    Served(_SERVED.varied(heads=128, adaptive=True), {"main.cache": 8192, "extra.cache": 8192}),
    Served(_SERVED.varied(heads=128, extra_length=2048, trust_extra=True, rotation="spread"), _POOLS),
    Served(_SERVED.varied(heads=16, queries=256, rotation="spread", output="mxfp8"), _POOLS),
    Served(_SERVED.varied(heads=128, rotation="spread", output="mxfp8", adaptive=True), _POOLS),
    Served(_SERVED.varied(heads=128, extra_length=-1), {"main.cache": 65536}),
    *(
        Served(
            _SERVED.varied(
                arch="gfx942", compute_units=304, heads=heads, main_encoding="float8_e4m3fnuz", rotation=rotation
            ),
            _POOLS,
        )
        for heads, rotation in ((16, "none"), (64, "spread"), (128, "none"), (128, "spread"))
    ),
    Served(
        _SERVED.varied(arch="gfx942", compute_units=304, heads=128, extra_length=-1, main_encoding="float8_e4m3fnuz"),
        {"main.cache": 65536},
    ),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "queries": (0, 4096), "heads": (1, 1024), "main_length": (0, 1 << 17), "extra_length": (-1, 1 << 17),
    "splits": (0, 1024), "main_block": (1, 4096), "extra_block": (1, 4096), "compute_units": (1, 4096),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, DecodeCase)
    reasons = outside(case, _BOUNDS)
    has_extra = case.extra_length >= 0
    if case.arch != "gfx942" and "float8_e4m3fnuz" in (case.main_encoding, case.extra_encoding):
        reasons.append(f"arch={case.arch}: float8_e4m3fnuz caches exist on gfx942 only")
    if case.adaptive and case.arch != "gfx950":
        reasons.append(f"arch={case.arch}: the adaptive split count exists on gfx950 only")
    if case.output == "mxfp8" and (case.arch != "gfx950" or case.rotation == "none"):
        reasons.append("output=mxfp8 needs arch=gfx950 and a rotation")
    if case.trust_extra and (case.arch != "gfx950" or not has_extra):
        reasons.append("trust_extra=yes needs arch=gfx950 and an extra segment")
    if case.duplicates == "across" and (case.extra_length < 1 or case.main_length < 1):
        reasons.append("duplicates=across needs entries in both segments")
    if case.duplicates == "within" and max(case.main_length, case.extra_length) < 2:
        reasons.append("duplicates=within needs a segment of two entries")
    if case.invalid in ("front", "middle", "scattered") and max(case.main_length, case.extra_length) < 3:
        reasons.append(f"invalid={case.invalid} needs a segment of three entries")
    if case.arch == "other" and case.splits > 1:
        reasons.append("arch=other has the un-split route only: splits should be 0 or 1")
    if case.reach == "rows" and (case.queries < 5 or case.output == "float32"):
        reasons.append("reach=rows needs five rows of two bytes an element, or its address space is out of proportion")
    if case.reach == "caches" and max(case.main_length, case.extra_length) > 512:
        reasons.append("reach=caches needs lists of 512 entries or fewer, or its pages are not far apart")
    return reasons


def tiles(case: DecodeCase) -> int:
    """Key tiles of 32 that a kernel with 16 heads a program walks, a tile more for each split: the work of a case."""
    splits = case.splits or 8
    keys = -(-case.main_length // 32) + -(-max(case.extra_length, 0) // 32)
    return case.queries * -(-case.heads // 16) * (keys + splits)


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than a few seconds for it."""
    assert isinstance(case, DecodeCase)
    return tiles(case) > 240


def build(case: Case) -> DecodeInputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, DecodeCase)
    draw = Draw(case.seed, case.op)
    integer = torch.int32 if case.integers == "int32" else torch.int64
    main = _SegmentPlan.of(case, "main", draw.within("main"))
    extra = _SegmentPlan.of(case, "extra", draw.within("extra")) if case.extra_length >= 0 else None
    plans = [main] if extra is None else [main, extra]
    _arrange(case, plans, draw)
    query = _query(case, draw)
    for plan in plans:
        plan.fill_records(case, query, draw)
    shape = (case.queries, case.heads, LANES)
    gaps = (24, 8) if case.layout == "strided" else (0, 0)
    row_gap = (48,) if case.layout == "strided" else (0,)
    scale_gap = row_gap
    if case.reach == "rows":
        row = case.heads * (LANES + gaps[1])
        gaps = (far_gap(case.queries, row), gaps[1])
        row_gap = (far_gap(case.queries, case.heads * LANES),)
    positions = cos_sin = None
    if case.rotation != "none":
        positions = guarded_copy(draw_positions(draw, case.queries, integer, POSITIONS))
        cos_sin = guarded_copy(draw_whole_table(draw, case.rotation, ROPE, POSITIONS))
    mxfp8 = case.output == "mxfp8"
    out_dtype = torch.float32 if case.output == "float32" else torch.bfloat16
    return DecodeInputs(
        query=guarded_copy(query, gaps=gaps),
        main=main.segment(case, integer),
        extra=None if extra is None else extra.segment(case, integer),
        scale=MODEL_SCALE,
        sink=_sink(case, draw),
        positions=positions,
        cos_sin=cos_sin,
        out=None if mxfp8 else guarded(shape, out_dtype, gaps=gaps),
        out_codes=guarded((case.queries, case.heads * LANES), torch.float8_e4m3fn, gaps=row_gap) if mxfp8 else None,
        out_scales=guarded((case.queries, case.heads * 16), torch.uint8, gaps=scale_gap) if mxfp8 else None,
        arch=case.arch,
        compute_units=case.compute_units,
        splits=case.splits,
        adaptive=case.adaptive,
        trust_extra=case.trust_extra,
    )


@dataclasses.dataclass
class _SegmentPlan:
    """One segment while it is being made: which slots each query reads, and what their records hold."""

    name: str
    length: int
    block: int
    encoding: Encoding
    draw: Draw
    blocks: int = 0
    entries: list[NDArray[np.int64]] = dataclasses.field(default_factory=list)
    nope: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    scales: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    rope: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    needles: dict[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, case: DecodeCase, name: Literal["main", "extra"], draw: Draw) -> "_SegmentPlan":
        length = case.main_length if name == "main" else case.extra_length
        block = case.main_block if name == "main" else case.extra_block
        encoding = case.main_encoding if name == "main" else case.extra_encoding
        plan = cls(name=name, length=length, block=block, encoding=encoding, draw=draw)
        # Slot 0 is nobody's: an invalid entry that a kernel redirects there must find garbage. A few slots stay unread.
        plan.blocks = max(3 if case.reach == "caches" else 2, -(-(length + length // 4 + 9) // block))
        return plan

    @property
    def rows(self) -> int:
        return self.blocks * self.block

    def fresh(self, name: str, count: int) -> NDArray[np.int64]:
        """`count` distinct slots, never slot 0."""
        return (self.draw.permutation(name, self.rows - 1)[:count] + 1).numpy().astype(np.int64)

    def used(self) -> torch.Tensor:
        """bool per slot: some query reads it."""
        used = torch.zeros(self.rows, dtype=torch.bool)
        for entries in self.entries:
            inside = entries[(entries >= 0) & (entries < self.rows)]
            used[torch.from_numpy(inside)] = True
        return used

    def fill_records(self, case: DecodeCase, query: torch.Tensor, draw: Draw) -> None:
        """Lane values, scale bytes and rotated lanes of every slot, before encoding."""
        rows, values, own = self.rows, case.values, self.draw
        nope = own.normal_like("nope", (rows, NOPE))
        rope = own.normal_like("rope", (rows, ROPE))
        scales = own.integers("scales", (rows, NOPE // GROUP), 126, 129)
        if values == "integer_exact":
            nope = own.integers("small", (rows, NOPE), -8, 9).float()
            rope = own.integers("small_rope", (rows, ROPE), -8, 9).float()
            scales = torch.full_like(scales, 127)
        elif values == "uniform_exact":
            # Full significands on one grid: sums are exact, means have more bits than any output format.
            shift = own.integers("small_shift", (rows, NOPE), -3, 1)
            nope = torch.ldexp(own.integers("small", (rows, NOPE), -15, 16).float(), shift)
            rope = own.integers("small_rope", (rows, ROPE), -255, 256).float() / 32
            scales = torch.full_like(scales, 127)
        elif values == "onehot_exact":
            slots = torch.arange(rows)
            nope = (slots[:, None] % NOPE == torch.arange(NOPE)[None, :]).float()
            rope = ((slots[:, None] >> (torch.arange(ROPE)[None, :] % 24)) & 1).float()
            scales = torch.full_like(scales, 127)
        elif values == "zeros":
            nope, rope = torch.zeros_like(nope), -torch.zeros_like(rope)
        elif values == "outlier":
            scales = own.integers("scales_wide", scales.shape, 119, 132)
            nope[:, 5] *= 64.0
        elif values == "single":
            scales = own.integers("scales_wide", scales.shape, 112, 140)
            nope *= 64.0
        elif values == "ties":
            four = torch.arange(rows) % 4
            nope, rope, scales = nope[four], rope[four], scales[four]
        elif values == "subnormal":
            scales = own.integers("scales_low", scales.shape, 105, 109)
            rope *= 2.0**-126
        elif values == "wide":
            loud = own.integers("loud", (rows, 1), 0, 9)
            scales = scales + loud
            rope *= torch.ldexp(torch.ones(rows, 1), loud)
        elif values == "below":
            away = -1.5 * draw.normal_like("direction", (LANES,))
            nope, rope = away[:NOPE] + 0.25 * nope, 4.0 * (away[NOPE:] + 0.25 * rope)
            scales = torch.full_like(scales, 129)
        self.nope, self.scales, self.rope = nope, scales, rope
        if values == "needle":
            self._plant_needles(query)

    def _plant_needles(self, query: torch.Tensor) -> None:
        for t, slot in self.needles.items():
            base = query[t, 0].float() * 1.5
            self.nope[slot] = base[:NOPE]
            self.scales[slot] = 127
            self.rope[slot] = base[NOPE:]

    def _codes(self) -> torch.Tensor:
        """uint8 codes of the lane values at scale 1: the values are drawn on the scaled grid already."""
        dtype, top = (
            (torch.float8_e4m3fn, 448.0) if self.encoding == "float8_e4m3fn" else (torch.float8_e4m3fnuz, 224.0)
        )
        return self.nope.clamp(-top, top).to(dtype).view(torch.uint8)

    def segment(self, case: DecodeCase, integer: torch.dtype) -> Segment:
        cache = self._cache(case)
        if case.form.startswith("ragged"):
            indices, indptr = self._ragged(case, integer)
            return Segment(cache=cache, encoding=self.encoding, indices=indices, indptr=indptr)
        dense, lengths = self._dense(case, integer)
        return Segment(cache=cache, encoding=self.encoding, dense=dense, lengths=lengths)

    def _cache(self, case: DecodeCase) -> torch.Tensor:
        size = self.block * RECORD
        page = -(-size // PAGE_ALIGN) * PAGE_ALIGN
        if case.reach == "caches":
            page = size + far_gap(self.blocks, size)
        stride = page + {"page": 0, "padded": PAGE_ALIGN, "odd": 2}[case.block_stride]
        clean = case.trust_extra and self.name == "extra"
        nan = case.garbage == "nan" and not clean
        nan_code = 0x7F if self.encoding == "float8_e4m3fn" else 0x80
        code, scale = (nan_code, 255) if nan else (0x7E, 135)
        tail = 0x7FC0 if nan else 0x4700
        pages = guarded((self.blocks, size), torch.uint8, gaps=(stride - size,), fill=code)
        data = pages[:, : self.block * TOKEN_BYTES].view(self.blocks, self.block, TOKEN_BYTES)
        scale_region = pages[:, self.block * TOKEN_BYTES :].view(self.blocks, self.block, SCALE_BYTES)
        used = self.used().view(self.blocks, self.block)
        codes = self._codes().view(self.blocks, self.block, NOPE)
        rope = self.rope.to(torch.bfloat16).view(torch.uint8).view(self.blocks, self.block, 2 * ROPE)
        if case.values == "nan_lanes" and not clean:
            hit = self.draw.chance("nan_codes", codes.shape, 1, 50)
            codes = torch.where(hit, nan_code, codes)
            nan_tail = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.uint8)
            hit = self.draw.chance("nan_rope", (self.blocks, self.block, ROPE), 1, 30)
            rope = torch.where(hit[..., None], nan_tail, rope.view(self.blocks, self.block, ROPE, 2)).reshape(
                rope.shape
            )
        data[..., :NOPE] = torch.where(used[..., None], codes, code)
        garbage_tail = torch.tensor([tail], dtype=torch.int32).to(torch.int16).view(torch.uint8).repeat(ROPE)
        data[..., NOPE:] = torch.where(used[..., None], rope, garbage_tail)
        bytes_ = self.scales.to(torch.uint8).view(self.blocks, self.block, NOPE // GROUP)
        scale_region[..., :7] = torch.where(used[..., None], bytes_, scale)
        # The pad byte is garbage on purpose: whoever takes it for a scale multiplies by 2^38.
        scale_region[..., 7] = 165
        return pages.view(self.blocks, self.block, RECORD)

    def _ragged(self, case: DecodeCase, integer: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        start = 5 if case.form == "ragged_offset" else 0
        # What stands before indptr[0] and after indptr[-1] looks like slots, and nobody may read it.
        decoys = self.draw.integers("decoys", (start + 11,), 0, self.rows)
        counts = [len(entries) for entries in self.entries]
        listed = np.concatenate([np.asarray(entries) for entries in self.entries] or [np.empty(0, np.int64)])
        tail = decoys[start:] if case.form == "ragged_offset" else decoys[:0]
        indices = torch.cat([decoys[:start], torch.from_numpy(listed.astype(np.int64)), tail])
        indptr = torch.tensor([start, *(start + np.cumsum(counts, dtype=np.int64)).tolist()], dtype=torch.int64)
        return guarded_copy(indices.to(integer)), guarded_copy(indptr.to(integer))

    def _dense(self, case: DecodeCase, integer: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        width = max([len(entries) for entries in self.entries] or [0]) + (3 if case.form == "dense" else 0)
        # With lengths, what stands beyond a row's length looks like slots; without, -1 ends the row.
        dense = (
            self.draw.integers("decoys", (len(self.entries), width), 0, self.rows)
            if case.form == "dense"
            else torch.full((len(self.entries), width), -1, dtype=torch.int64)
        )
        for t, entries in enumerate(self.entries):
            dense[t, : len(entries)] = torch.from_numpy(entries)
        lengths = torch.tensor([len(entries) for entries in self.entries], dtype=torch.int32)
        return (
            guarded_copy(dense.to(integer), gaps=(4,) if case.layout == "strided" else (0,)),
            guarded_copy(lengths) if case.form == "dense" else None,
        )


_BELOW = (-1, -7, -(2**31))
_ABOVE = 2**31 - 1


def _arrange(case: DecodeCase, plans: list[_SegmentPlan], draw: Draw) -> None:
    """Decide the entries of every row of every segment: lengths, slots, duplicates, invalid entries, needles."""
    kinds = ("both", "main", "extra", "invalid", "empty")
    for t in range(case.queries):
        kind = kinds[(t + case.seed) % len(kinds)] if case.rows == "mixed" else "both"
        rows: list[NDArray[np.int64]] = []
        for plan in plans:
            length = plan.length
            if case.rows == "ragged" and t > 0:
                length = int(plan.draw.integers(f"length{t}", (1,), 0, plan.length + 1))
            if (
                kind == "empty"
                or (kind == "main" and plan.name == "extra")
                or (kind == "extra" and plan.name == "main")
            ):
                length = 0
            entries = plan.fresh(f"slots{t}", length)
            if case.duplicates == "within" and length > 1:
                entries[length - length // 3 - 1 :] = entries[: length // 3 + 1]
            if case.duplicates == "across" and rows:
                shared = rows[0][(rows[0] < plan.rows) & (rows[0] > 0)][: max(1, length // 2)]
                entries[: len(shared)] = shared[:length]
            rows.append(entries)
        if kind == "invalid":
            rows = [_outside(plan, len(entries)) for plan, entries in zip(plans, rows, strict=True)]
        else:
            rows = [_with_invalid(case, plan, entries, t) for plan, entries in zip(plans, rows, strict=True)]
            rows = _thin_out(case, plans, rows, t)
        for plan, entries in zip(plans, rows, strict=True):
            plan.entries.append(entries)
    if case.values == "needle":
        _choose_needles(plans)


def _outside(plan: _SegmentPlan, count: int) -> NDArray[np.int64]:
    """`count` entries that are no slots of the cache, by one, by much, and at both ends of the integers."""
    pool = (*_BELOW, plan.rows, plan.rows + 1, _ABOVE)
    return np.array([pool[i % len(pool)] for i in range(count)], dtype=np.int64)


def _with_invalid(case: DecodeCase, plan: _SegmentPlan, entries: NDArray[np.int64], t: int) -> NDArray[np.int64]:
    length = len(entries)
    if case.invalid == "none" or length < (1 if case.invalid == "tail" else 3):
        return entries
    count = max(1, length // 4)
    spots = {
        "front": np.arange(count),
        "middle": np.arange(length // 3, length // 3 + count),
        "tail": np.arange(length - count, length),
        "scattered": plan.draw.permutation(f"holes{t}", length)[:count].numpy(),
    }[case.invalid]
    entries = entries.copy()
    entries[spots] = _outside(plan, count)
    return entries


def _thin_out(
    case: DecodeCase, plans: list[_SegmentPlan], rows: list[NDArray[np.int64]], t: int
) -> list[NDArray[np.int64]]:
    """For probes with an exact answer: one valid key, copies of one key, or a power of two of them."""
    if case.values not in ("single", "repeated", "uniform_exact", "onehot_exact"):
        return rows
    spots = [
        (part, i)
        for part, (plan, entries) in enumerate(zip(plans, rows, strict=True))
        for i in np.flatnonzero((entries >= 0) & (entries < plan.rows))
    ]
    if not spots:
        return rows
    rows = [entries.copy() for entries in rows]
    if case.values == "repeated":
        # One slot of one segment, in all its places; the other segment's entries become invalid.
        part = t % len(plans) if any(p == t % len(plans) for p, _ in spots) else spots[0][0]
        slot = next(rows[p][i] for p, i in spots if p == part)
        for p, i in spots:
            rows[p][i] = slot if p == part else -1
        return rows
    keep = 1 if case.values == "single" else 1 << (len(spots).bit_length() - 1)
    order = plans[0].draw.permutation(f"keep{t}", len(spots))[:keep].tolist()
    kept = {spots[i] for i in order}
    for p, i in spots:
        if (p, i) not in kept:
            rows[p][i] = -1
    return rows


def _choose_needles(plans: list[_SegmentPlan]) -> None:
    """One dominating key a query: first, last or middle entry of either segment in turn, never shared by two queries."""
    taken: set[tuple[int, int]] = set()
    for t in range(len(plans[0].entries)):
        spots = [
            (part, int(entries[i]))
            for part, plan in enumerate(plans)
            for entries in [plan.entries[t]]
            for i in (len(entries) - 1, 0, len(entries) // 2)
            if len(entries) and 0 <= entries[i] < plan.rows
        ]
        free = [spot for spot in spots if spot not in taken]
        if free:
            part, slot = free[-1 - t % len(free)]
            taken.add((part, slot))
            plans[part].needles[t] = slot


def _query(case: DecodeCase, draw: Draw) -> torch.Tensor:
    shape = (case.queries, case.heads, LANES)
    if case.values in ("uniform_exact", "onehot_exact"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if case.values == "integer_exact":
        return draw.integers("query", shape, -1, 2).to(torch.bfloat16)
    query = draw.normal_like("query", shape)
    if case.values == "needle":
        # All heads of a query look the same way, so that one key can dominate them all.
        query = draw.normal_like("direction", (case.queries, 1, LANES)) + 0.25 * query
    if case.values == "below":
        query = draw.normal_like("direction", (LANES,)) + 0.25 * query
    if case.values == "outlier":
        query[..., 5] *= 2.0**-4
    if case.values == "wide":
        query *= 8.0
    return query.to(torch.bfloat16)


def _sink(case: DecodeCase, draw: Draw) -> torch.Tensor | None:
    heads = case.heads
    if case.sink == "absent":
        return None
    if case.sink == "minus_infinity":
        sink = torch.full((heads,), -float("inf"))
    elif case.sink == "zero":
        sink = torch.zeros(heads)
    elif case.sink == "large":
        sink = 20.0 - 40.0 * (torch.arange(heads) % 2)
    else:
        sink = draw.normal_like("sink", (heads,))
    if case.sink == "longer":
        # Heads of other ranks follow; they would swamp everything.
        sink = torch.cat([sink, torch.full((3,), 1e4)])
    return guarded_copy(sink.float())
