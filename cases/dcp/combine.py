"""What do we ask of the merge of the answers that the ranks of a sharded cache give?

Every rank has attended over its own keys with the heads of all ranks; what each holds is a softmax average and the
logarithm of its denominator. See `oracle.dcp.combine` for the formula.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int, Int32

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy, with_one_nan
from cases.production import Served

# How the answers travel: denominators gathered and scaled answers summed, the sum scattered by heads or left whole; or
# every answer sent to the rank that owns its heads, with its denominator in the same message.
Mode = Literal["all_gather_reduce_scatter", "all_gather_all_reduce", "all_to_all"]
# Where the ranks are: all played in this process in turn, or a process each, joined by real collectives.
Ranks = Literal["one_process", "processes"]
Base = Literal["natural", "two"]

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call, of all ranks at once; every stride is free.

    outs[r], lses[r]: what rank r holds for every row and every head of all ranks, rank-major: heads q*h to (q+1)*h-1 are
    those of rank q, h = heads / world. outs are bfloat16, float16 or float32; lses logarithms to `base`. A log-sum-exp of
    -inf, +inf or NaN says that the rank had no key, and then its answer may hold anything. Both are used up by the call.

    local_lengths[r, b] are the keys of request b on rank r, and rows query_start[b] to query_start[b+1]-1 are its rows:
    where a length is 0, and in rows behind the last request, a rank had no key whatever its log-sum-exp says. Both are
    given, or neither. ranks: where the ranks are to be.
    """

    outs: Float[torch.Tensor, "world rows heads lanes"]
    lses: Float32[torch.Tensor, "world rows heads"]
    mode: Mode
    base: Base
    ranks: Ranks = "one_process"
    local_lengths: Int32[torch.Tensor, "world requests"] | None = None
    query_start: Int32[torch.Tensor, " starts"] | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.outs.shape[0]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What every rank holds afterwards: of its own heads, or of all heads after all_gather_all_reduce.

    lse has the base of the inputs. sent[q, r] are the bits that rank q sent to rank r under all_to_all, where the
    implementation shows them: int16 or int32, as wide as the dtype, the lanes of an answer and then its log-sum-exp.
    """

    out: Float[torch.Tensor, "world rows own_heads lanes"]
    lse: Float32[torch.Tensor, "world rows own_heads"] | None
    sent: Int[torch.Tensor, "world world rows own_heads packed"] | None = None


WRITABLE: tuple[str, ...] = ("outs", "lses")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineCase(Case):
    """The axes of the merge.

    heads_per_rank: heads that a rank owns; every rank answers for world times as many. lses: `skewed` one rank has a
    hundred times the mass; `dominating` one has all that counts; `large` about 1000 and -1000; `wide` up to 90 apart;
    `halves` have 16 low bits that are NaN in a 16-bit format; `powers` of two that sum to one, in base 2. empty: where
    ranks had no key, and empty_form what they say instead. mask: lengths say so too; `padded` has rows behind the last
    request, `no_requests` no others. values: `coded` small integers; `cancelling` ranks against each other;
    `live_nan` a NaN and an infinity that count. Layouts: `heads_first` swaps strides; `spread_heads` and `spread`
    use every other head or lane; reach: rows lie more than 2^31 elements apart.
    """

    op: ClassVar[str] = "dcp.combine"

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    mode: Mode = "all_to_all"
    ranks: Ranks = "one_process"
    base: Base = "natural"
    world: int = 4
    rows: int = 3
    heads_per_rank: int = 2
    lanes: int = 64
    lses: Literal["near", "equal", "skewed", "dominating", "large", "wide", "halves", "powers"] = "near"
    empty: Literal["none", "scattered", "ranks", "rows", "all"] = "none"
    empty_form: Literal["minus_infinity", "plus_infinity", "nan", "payload"] = "minus_infinity"
    mask: Literal["absent", "given", "padded", "no_requests"] = "absent"
    values: Literal["randn", "coded", "wide", "cancelling", "subnormal", "live_nan"] = "randn"
    out_layout: Literal["contiguous", "padded", "heads_first", "spread_heads", "spread"] = "contiguous"
    lse_layout: Literal["contiguous", "padded", "heads_first", "spread"] = "contiguous"
    reach: Literal["near", "far_rows"] = "near"


CASE = CombineCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "mode": ("all_gather_reduce_scatter", "all_gather_all_reduce", "all_to_all"),
    "ranks": ("one_process",),
    "base": ("natural", "two"),
    "world": (1, 2, 3, 4, 7, 8),
    "rows": (0, 1, 3, 6),
    "heads_per_rank": (1, 2, 5),
    "lanes": (32, 64, 512),
    "lses": ("near", "equal", "skewed", "dominating", "large", "wide", "halves", "powers"),
    "empty": ("none", "scattered", "ranks", "rows", "all"),
    "empty_form": ("minus_infinity", "plus_infinity", "nan", "payload"),
    "mask": ("absent", "given", "padded", "no_requests"),
    "values": ("randn", "coded", "wide", "cancelling", "subnormal", "live_nan"),
    "out_layout": ("contiguous", "padded", "heads_first", "spread_heads", "spread"),
    "lse_layout": ("contiguous", "padded", "heads_first", "spread"),
    "reach": ("near",),
}  # fmt: skip

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "rows": (0, 1, 2, 3, 6, 33),
    "heads_per_rank": (1, 2, 5, 12, 16),
}
RANDOM_CASES = 12

_BASE = CombineCase()
_MODES: tuple[Mode, ...] = ("all_gather_reduce_scatter", "all_gather_all_reduce", "all_to_all")
REGRESSIONS: tuple[str, ...] = (
    # Real ranks: two processes agree with one to the bit, more of them sum in the order of their library.
    *(_BASE.varied(ranks="processes", world=2, mode=mode, empty="scattered", mask="padded").id for mode in _MODES),
    *(_BASE.varied(ranks="processes", world=world, mode=mode, empty="scattered", empty_form="payload", dtype=dtype).id
      for world, mode, dtype in ((4, "all_gather_reduce_scatter", "float16"), (8, "all_gather_all_reduce", "bfloat16"),
                                 (8, "all_to_all", "float16"))),
    # Exact whatever the order: powers of two, and one rank that has everything.
    _BASE.varied(ranks="processes", mode="all_gather_reduce_scatter", base="two", lses="powers", values="coded").id,
    _BASE.varied(ranks="processes", world=3, mode="all_gather_all_reduce", lses="dominating", dtype="float32").id,
    # 12 heads of a rank of 8 and 16 of another model, all lanes of a latent answer.
    _BASE.varied(world=8, rows=1, heads_per_rank=12, lanes=512, mode="all_gather_reduce_scatter").id,
    _BASE.varied(world=2, rows=2, heads_per_rank=16, lanes=512, out_layout="spread_heads", empty="ranks").id,
    # Halves of an fp16 message that are NaN: all of minus infinity, and low halves.
    _BASE.varied(dtype="float16", lses="halves", empty="scattered").id,
    # What is NaN and counts stays NaN.
    *(_BASE.varied(mode=mode, world=2, values="live_nan", empty="ranks", empty_form="nan").id for mode in _MODES),
    # Plus infinity of a rank without keys beside ranks that have some.
    *(_BASE.varied(mode=mode, empty="scattered", empty_form="plus_infinity").id for mode in _MODES),
    # Ranks with less than a millionth of the mass, in a dtype that shows them.
    _BASE.varied(mode="all_gather_reduce_scatter", dtype="float32", base="two", lses="wide", values="wide").id,
    _BASE.varied(mode="all_to_all", dtype="float32", lses="wide", values="cancelling").id,
    # What one rank says goes through as it is, plus infinity and NaN too.
    _BASE.varied(mode="all_to_all", world=1, empty="scattered", empty_form="plus_infinity").id,
    _BASE.varied(mode="all_gather_all_reduce", world=1, empty="scattered", empty_form="nan").id,
    # One rank alone with two rows, which a caller may take for an answer and a log-sum-exp.
    _BASE.varied(mode="all_gather_reduce_scatter", world=1, rows=2, heads_per_rank=1).id,
    # Rows that a product of 32 bits does not reach.
    *(_BASE.varied(mode=mode, world=2, rows=3, lanes=32, reach="far_rows").id for mode in _MODES),
)  # fmt: skip

PRODUCTION: tuple[Served, ...] = (
    *(
        Served(CASE(world=8, rows=8, heads_per_rank=16, lanes=512, mode=mode))
        for mode in ("all_gather_reduce_scatter", "all_gather_all_reduce", "all_to_all")
    ),
    Served(CASE(world=8, rows=8, heads_per_rank=2, lanes=512, mask="given")),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "world": (1, 64), "rows": (0, 1 << 14), "heads_per_rank": (1, 128), "lanes": (16, 1024),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, CombineCase)
    reasons = outside(case, _BOUNDS)
    if case.lanes & (case.lanes - 1):
        reasons.append(f"lanes={case.lanes}: should be a power of two")
    if case.empty == "none" and case.empty_form != "minus_infinity":
        reasons.append(f"empty_form={case.empty_form}: needs an empty rank")
    if case.lses == "powers" and (case.base != "two" or case.values == "wide" or case.values == "cancelling"):
        reasons.append("lses=powers: is for base=two and values that share a grid")
    if case.mask == "no_requests" and (case.empty != "none" or case.values == "live_nan"):
        reasons.append("mask=no_requests: leaves nothing else to be empty, or to count")
    if case.values == "live_nan" and (case.empty == "all" or case.empty == "rows"):
        reasons.append("values=live_nan: needs a rank that counts in every row")
    if case.ranks == "processes" and (case.reach != "near" or case.world > 8):
        reasons.append("ranks=processes: needs memory that can be sent, and at most eight ranks")
    if case.reach == "far_rows" and (case.rows < 3 or case.out_layout != "contiguous" or case.dtype == "float32"):
        reasons.append("reach=far_rows: needs three rows of two-byte elements, and has an out_layout of its own")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it: a kernel that takes a head a program decides."""
    assert isinstance(case, CombineCase)
    return case.rows * case.heads_per_rank * case.world * case.world > 700


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, CombineCase)
    draw = Draw(case.seed, case.op)
    lengths, starts, masked = _mask(case, draw)
    absent = _absent(case, draw) | masked[:, :, None]
    lses = _lses(case, absent, draw)
    outs = _outs(case, absent, lses, draw)
    # What an empty rank left behind looks like anything: a number that dwarfs the others, an infinity, a NaN.
    litter = torch.tensor([float("nan"), float("inf"), _LARGEST[case.dtype], -_LARGEST[case.dtype]])
    chosen = litter[draw.integers("litter", outs.shape, 0, len(litter))]
    outs = torch.where(absent[..., None], chosen, outs)
    words = torch.tensor([_EMPTY[case.empty_form]], dtype=torch.int64)
    if case.empty_form == "payload":
        words = torch.tensor([0x7F800001, -0x400000 + 0x1234, 0x7FFF7FFF, -1])
    words = words[draw.integers("words", lses.shape, 0, len(words))].to(torch.int32).view(torch.float32)
    # Where only the lengths say that a rank is empty, its log-sum-exp looks as if it dwarfed the others.
    loud = torch.where(masked[:, :, None], 500.0 + draw.normal_like("loud", lses.shape), words)
    lses = torch.where(absent, loud, lses)
    memory = _memory(outs.shape, DTYPES[case.dtype], case.out_layout, case.reach == "far_rows")
    memory.copy_(outs)
    with_one_nan(memory)
    return Inputs(
        outs=memory,
        lses=_lse_memory(lses, case.lse_layout),
        mode=case.mode,
        base=case.base,
        ranks=case.ranks,
        local_lengths=None if lengths is None else guarded_copy(lengths, gaps=(3,)),
        query_start=None if starts is None else guarded_copy(starts),
    )


_LARGEST = {"bfloat16": 1e30, "float16": 60000.0, "float32": 1e30}
_EMPTY = {"minus_infinity": -0x800000, "plus_infinity": 0x7F800000, "nan": 0x7FC00000, "payload": 0}


def _memory(shape: torch.Size, dtype: torch.dtype, layout: str, far: bool) -> torch.Tensor:
    """Guarded memory for [world, rows, heads, lanes]."""
    world, rows, heads, lanes = shape
    if far:
        return guarded((rows, world, heads, lanes), dtype, gaps=(far_gap(rows, world * heads * lanes),)).transpose(0, 1)
    if layout == "padded":
        return guarded(shape, dtype, gaps=(32, 24, 8))
    if layout == "heads_first":
        return guarded((world, heads, rows, lanes), dtype, gaps=(8, 0)).transpose(1, 2)
    if layout == "spread_heads":
        return guarded((world, rows, 2 * heads, lanes), dtype)[:, :, ::2]
    if layout == "spread":
        return guarded((world, rows, heads, 2 * lanes), dtype)[..., ::2]
    return guarded(shape, dtype)


def _lse_memory(lses: torch.Tensor, layout: str) -> torch.Tensor:
    world, rows, heads = lses.shape
    if layout == "padded":
        view = guarded(lses.shape, torch.float32, gaps=(5, 3))
    elif layout == "heads_first":
        view = guarded((world, heads, rows), torch.float32).transpose(1, 2)
    elif layout == "spread":
        view = guarded((world, rows, 2 * heads), torch.float32)[..., ::2]
    else:
        view = guarded(lses.shape, torch.float32)
    # As integers: the bits of a NaN must arrive.
    view.view(torch.int32).copy_(lses.contiguous().view(torch.int32))
    return view


def _mask(case: CombineCase, draw: Draw) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Local lengths, row offsets, and which rows of which rank they make empty."""
    masked = torch.zeros((case.world, case.rows), dtype=torch.bool)
    if case.mask == "absent":
        return None, None, masked
    if case.mask == "no_requests":
        return (
            torch.zeros((case.world, 0), dtype=torch.int32), torch.zeros(1, dtype=torch.int32), ~masked,
        )  # fmt: skip
    live = case.rows - case.rows // 3 if case.mask == "padded" else case.rows
    requests = 2 + live // 2
    # A request without rows, somewhere; it may have keys.
    cuts = draw.integers("cuts", (requests - 1,), 0, live + 1).sort().values
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([live])])
    lengths = draw.integers("lengths", (case.world, requests), 1, 40)
    gone = draw.chance("gone", lengths.shape, 1, 3)
    if case.values == "live_nan":
        gone[0] = False
    lengths[gone] = 0
    row = torch.arange(case.rows)
    request = (starts[1:, None] <= row).sum(0).clamp(max=requests - 1)
    masked = (lengths[:, request] == 0) | (row >= live)
    return lengths.int(), starts.int(), masked


def _absent(case: CombineCase, draw: Draw) -> torch.Tensor:
    """bool [world, rows, heads]: where a rank says itself that it had no key."""
    shape = (case.world, case.rows, case.world * case.heads_per_rank)
    absent = torch.zeros(shape, dtype=torch.bool)
    if case.empty == "all":
        absent[:] = True
    elif case.empty == "rows":
        absent[:, ::2] = True
    elif case.empty == "ranks":
        absent[torch.arange(case.world) % 3 == 1] = True
    elif case.empty == "scattered":
        absent = draw.chance("absent", shape, 1, 3)
    if case.values == "live_nan":
        absent[0] = False
    return absent


def _lses(case: CombineCase, absent: torch.Tensor, draw: Draw) -> torch.Tensor:
    shape = (case.world, case.rows, case.world * case.heads_per_rank)
    lses = 4.0 + 2.0 * draw.normal_like("lse", shape)
    rank = torch.arange(case.world)[:, None, None]
    # Another rank for every row and head.
    first = (torch.arange(case.rows)[:, None] + 2 * torch.arange(shape[2]) + case.seed) % case.world
    if case.lses == "equal":
        lses = lses[:1].expand(shape).clone()
    elif case.lses == "skewed":
        lses = lses[:1] + torch.where(rank == first, 4.6, 0.0)
    elif case.lses == "dominating":
        lses = torch.where(rank == first, 290.0, 0.0) + lses
    elif case.lses == "large":
        lses = lses + torch.where(torch.arange(case.rows) % 2 == 0, 1000.0, -1000.0)[:, None]
    elif case.lses == "wide":
        lses = lses - draw.integers("gap", shape, 0, 90).float()
    elif case.lses == "halves":
        lows = torch.tensor([0x7FFF, 0x7F81, 0x7C01, 0xFFC1])[draw.integers("low", shape, 0, 4)]
        lses = ((lses.view(torch.int32).long() & ~0xFFFF) | lows).to(torch.int32).view(torch.float32)
    elif case.lses == "powers":
        # The ranks that are left have 1, 1, 2, 4 and so on parts of a power of two.
        place = (~absent).long().cumsum(0) - 1
        lses = (place - 1).clamp(min=0) + draw.integers("level", (1, *shape[1:]), -9, 10).float()
    if case.values == "live_nan":
        # The rank with the NaN counts.
        lses[0] = lses.amax(0)
    return lses.float()


def _outs(case: CombineCase, absent: torch.Tensor, lses: torch.Tensor, draw: Draw) -> torch.Tensor:
    shape = (*lses.shape, case.lanes)
    if case.values == "coded":
        # Multiples of 64 with two bits: a 128th part of each and all their averages have eight.
        return draw.integers("code", shape, -1, 3).float() * 64
    outs = draw.normal_like("out", shape)
    if case.values == "wide":
        outs = torch.ldexp(outs, draw.integers("power", (*shape[:3], 1), -9, 10))
    elif case.values == "subnormal":
        outs = outs * (2.0**-18 if case.dtype == "float16" else 2.0**-127)
    elif case.values == "cancelling":
        side = 1.0 - 2.0 * (torch.arange(case.world) % 2)
        outs = (outs[:1] + 2.0**-6 * outs) * side[:, None, None, None]
    elif case.values == "live_nan" and case.rows:
        outs[0, -1, 0, case.lanes // 2] = float("nan")
        outs[0, 0, -1, 0] = -float("inf")
    return outs
