"""What is the merge of the segments of a decode, and how far from it may an implementation land?

A row of n keys in G segments, in tiles of T: each segment spans t = max(1, ceil(n / (G T))) tiles, and the first
ceil(n / (t T)) segments are active (none where n < 1). Over those, with sums A_g, base-2 maxima M_g and masses E_g,

    M = max_g M_g,   w_g = 2^(M_g - M),   Z = sum_g w_g E_g,   out = sum_g w_g A_g / Z,   lse = ln(2) * (M + log2 Z)

and a row without an active segment, or with Z = 0, is 0 with lse -inf. Other segments were never written: they are not
read, whatever they hold.

Source: the segmented MLA decode that vLLM's ROCm backend takes for verify blocks under decode context parallelism
(`merge_mla_segments_triton`, behind AITER's `mla_decode_fwd`). The budget is that of `oracle.dense_mla.part_merge`.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.dense_mla.merge_segments import DTYPES, Inputs, Outputs, active_segments
from cases.memory import guarded, guarded_copy, moved
from cases.precision import Precision
from oracle.check import Check, bounded
from oracle.dense_mla.part_merge import Parts, budget, merged
from oracle.dense_mla.part_merge_ways import FAULTS, Way, as_if_contiguous, compute, cut, rounded, way_of
from oracle.laws import Honest, Law, Mutant


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The merge in `dtype` (float32 or float64), a row at a time; a row without keys is 0 with lse -inf.

    Raises `ValueError` or `TypeError` for what is no call.
    """
    check_call(inputs)
    return Outputs(*merged(parts_of(inputs), dtype))


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none: `ValueError` for shapes and the tile, `TypeError` for dtypes."""
    sums, lengths = inputs.sums, inputs.lengths
    if sums.dim() != 4:
        raise ValueError(f"sums={list(sums.shape)}: should be [rows, heads, segments, rank]")
    rows, heads, segments, rank = sums.shape
    for name, count in (("segments", segments), ("rank", rank), ("tile", inputs.tile)):
        if count < 1 or count & (count - 1):
            raise ValueError(f"{name}={count}: should be a power of two")
    for name in ("sums", "maxima", "masses"):
        tensor = getattr(inputs, name)
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}={tensor.dtype}: should be torch.float32")
        if tensor.shape[:3] != sums.shape[:3] or tensor.dim() != 3 + (name == "sums"):
            raise ValueError(f"{name}={list(tensor.shape)}: should be {list(sums.shape[:3])}")
        if not tensor.is_contiguous():
            raise ValueError(f"strides of {name}={tensor.stride()}: should be those of contiguous memory")
    if lengths.dtype != torch.int32:
        raise TypeError(f"lengths={lengths.dtype}: should be torch.int32")
    if lengths.shape != (rows,):
        raise ValueError(f"lengths={list(lengths.shape)}: should be {[rows]}")
    if inputs.out.shape != (rows, heads, rank):
        raise ValueError(f"out={list(inputs.out.shape)}: should be {[rows, heads, rank]}")
    if inputs.out.dtype not in DTYPES.values():
        raise TypeError(f"out={inputs.out.dtype}: should be bfloat16, float16 or float32")


def active(inputs: Inputs) -> torch.Tensor:
    """Active segments of every row, int64 [rows]."""
    segments = inputs.sums.shape[2]
    counts = [active_segments(int(length), segments, inputs.tile) for length in inputs.lengths]
    return torch.tensor(counts, dtype=torch.int64, device=inputs.sums.device)


def parts_of(inputs: Inputs, counts: torch.Tensor | None = None) -> Parts:
    """The first `counts` segments of every row as parts, all others empty; by default the active ones."""
    segments = inputs.sums.shape[2]
    counts = active(inputs) if counts is None else counts
    written = torch.arange(segments, device=counts.device) < counts[:, None]
    exponents = torch.where(written[:, None], inputs.maxima, -math.inf)
    return Parts(
        values=inputs.sums.permute(2, 0, 1, 3), exponents=exponents.permute(2, 0, 1),
        masses=inputs.masses.permute(2, 0, 1), base_two=True,
    )  # fmt: skip


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The merged rows and their log-sum-exp, each within its budget before its last rounding."""
    check_call(inputs)
    truth = budget(parts_of(inputs), precision)
    form = inputs.out.dtype
    return (
        bounded("out", outputs.out, truth.out, truth.out_allowed, dtype=form, rounding=form,
                why="outside the budget of a merge in fp32"),
        bounded("lse", outputs.lse, truth.lse, truth.lse_allowed, dtype=torch.float32, rounding=torch.float32,
                why="outside the budget of a natural log-sum-exp in fp32"),
    )  # fmt: skip


def _fresh(inputs: Inputs, **changes: torch.Tensor) -> Inputs:
    """The call with some tensors replaced, in memory of its own."""
    given = {name: changes.get(name, getattr(inputs, name)) for name in ("sums", "maxima", "masses", "lengths")}
    rows, heads, _, rank = given["sums"].shape
    return Inputs(
        sums=guarded_copy(given["sums"]),
        maxima=guarded_copy(given["maxima"]),
        masses=guarded_copy(given["masses"]),
        lengths=guarded_copy(given["lengths"]),
        tile=inputs.tile,
        out=guarded((rows, heads, rank), inputs.out.dtype),
    )


def _with_rows(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    return lambda inputs: edit(inputs) if inputs.sums.shape[0] else None


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _written(inputs: Inputs) -> torch.Tensor:
    return ~torch.isneginf(parts_of(inputs).exponents).permute(1, 2, 0)


def _refilled(inputs: Inputs) -> Inputs | None:
    written = _written(inputs)
    if bool(written.all()):
        return None
    # What would weigh more than everything that counts.
    changes = {"sums": 1.0, "maxima": 1e30, "masses": 1.0}
    return _fresh(
        inputs,
        **{
            name: torch.where(written[..., None] if name == "sums" else written, getattr(inputs, name), fill)
            for name, fill in changes.items()
        },
    )


def _as_long_as_possible(inputs: Inputs) -> Inputs:
    """Every row as long as it can be without another segment or another tile in one."""
    segments, tile = inputs.sums.shape[2], inputs.tile
    lengths = []
    for length in inputs.lengths.tolist():
        tiles = max(1, -(-length // (segments * tile)))
        lengths.append(active_segments(length, segments, tile) * tiles * tile)
    return _fresh(inputs, lengths=torch.tensor(lengths, dtype=torch.int32))


def _maxima_moved(inputs: Inputs) -> Inputs:
    """Maxima lower by 1 under sums and masses twice as large: the same segments, written otherwise."""
    odd = (torch.arange(inputs.sums.shape[2]) % 2).bool()
    return _fresh(
        inputs, sums=torch.where(odd[:, None], inputs.sums * 2, inputs.sums),
        masses=torch.where(odd, inputs.masses * 2, inputs.masses),
        maxima=torch.where(odd, inputs.maxima - 1, inputs.maxima),
    )  # fmt: skip


def _maxima_halved(inputs: Inputs) -> Inputs | None:
    """`_maxima_moved` where the maxima are small enough for 1 to be subtracted without a rounding that matters."""
    known = inputs.maxima[_written(inputs)].abs()
    return _maxima_moved(inputs) if not known.numel() or float(known.max()) < 64 else None


def _raised(inputs: Inputs) -> Inputs | None:
    known = inputs.maxima[_written(inputs)]
    if not bool(((known + 4 - known == 4) & (known + 4 - 4 == known)).all()):
        return None
    return _fresh(inputs, maxima=inputs.maxima + 4)


def _doubled(inputs: Inputs) -> Inputs | None:
    size = inputs.sums[_written(inputs)].abs()
    if size.numel() and float(size.max()) > 2.0**12:
        return None
    return _fresh(inputs, sums=inputs.sums * 2)


def _above_subnormals(answer: Outputs) -> Outputs:
    """Numbers that cancellation left so small that fp16 rounds them as subnormals, as zeros."""
    least = 2.0**-12 if answer.out.dtype == torch.float16 else 2.0**-80
    return Outputs(torch.where(answer.out.abs() < least, 0.0, answer.out), answer.lse)


def _flipped(inputs: Inputs, dimension: int) -> Inputs:
    changes = {name: getattr(inputs, name).flip(dimension) for name in ("sums", "maxima", "masses")}
    if dimension == 0:
        changes["lengths"] = inputs.lengths.flip(0)
    return _fresh(inputs, **changes)


LAWS: tuple[Law, ...] = (
    Law("J9 unwritten segments refilled", "what was never written does not matter", _with_rows(_refilled), _same, "bitwise"),
    Law("J5 rows as long as possible", "a length says no more than which segments are active",
        _with_rows(_as_long_as_possible), _same, "bitwise"),
    Law("J5 maxima lowered", "a power of two may stand in the maximum or in sum and mass", _with_rows(_maxima_halved),
        _same, "budget"),
    Law("J12 maxima raised", "4 more in all maxima is 4 ln 2 more in the log-sum-exp", _with_rows(_raised),
        lambda first, inputs, edited: Outputs(first.out, first.lse + 4 * math.log(2.0)), "budget"),
    Law("J11 sums doubled", "twice the sums give twice the answer", _with_rows(_doubled),
        lambda first, inputs, edited: Outputs(first.out * 2, first.lse), "bitwise", _above_subnormals),
    Law("J8 rows reversed", "a row depends on its own segments only", _with_rows(lambda inputs: _flipped(inputs, 0)),
        lambda first, inputs, edited: Outputs(first.out.flip(0), first.lse.flip(0)), "bitwise"),
    Law("J2 heads reversed", "a head depends on its own segments only", _with_rows(lambda inputs: _flipped(inputs, 1)),
        lambda first, inputs, edited: Outputs(first.out.flip(1), first.lse.flip(1)), "bitwise"),
    Law("M29 same call twice", "the same call gives the same bits", _with_rows(lambda inputs: _fresh(inputs)),
        _same, "bitwise"),
)  # fmt: skip


def _finished(inputs: Inputs, parts: Parts, way: Way) -> Outputs:
    out, lse = compute(parts, way)
    return Outputs(rounded(out, inputs.out.dtype), lse)


def _answer(way: Way) -> Callable[[Inputs], Outputs]:
    return lambda inputs: _finished(inputs, parts_of(inputs), way)


_RIGHT = _answer(Way())


def _counted(count: Callable[[int, int, int], int]) -> Callable[[Inputs], Outputs]:
    """The answer whose active segments are counted otherwise, from length, segments and tile."""

    def answer(inputs: Inputs) -> Outputs:
        segments = inputs.sums.shape[2]
        counts = [min(segments, max(0, count(int(n), segments, inputs.tile))) for n in inputs.lengths]
        return _finished(inputs, parts_of(inputs, torch.tensor(counts, dtype=torch.int64)), Way())

    return answer


def _up(number: int, by: int) -> int:
    return -(-number // by)


def _rounded_down(length: int, segments: int, tile: int) -> int:
    return _up(length, max(1, length // (segments * tile)) * tile) if length > 0 else 0


def _without_floor(length: int, segments: int, tile: int) -> int:
    """Without the least of one tile, a row without keys divides by 0, which machines answer with all ones."""
    return active_segments(length, segments, tile) if length > 0 else segments


def _last_cut(length: int, segments: int, tile: int) -> int:
    return length // (max(1, _up(length, segments * tile)) * tile)


def _single_tiles(length: int, segments: int, tile: int) -> int:
    return _up(length, tile)


def _changed(change: Callable[[Parts, Inputs], Parts]) -> Callable[[Inputs], Outputs]:
    return lambda inputs: _finished(inputs, change(parts_of(inputs), inputs), Way())


def _other_rows_lengths(inputs: Inputs, lengths: torch.Tensor) -> Outputs:
    return _finished(inputs, parts_of(inputs, active(dataclasses.replace(inputs, lengths=lengths))), Way())


def _heads_inside(parts: Parts, inputs: Inputs) -> Parts:
    """Maxima and masses [heads, segments] read as [segments, heads]."""

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        rows, heads, segments = tensor.shape
        return tensor.reshape(rows, segments, heads).permute(1, 0, 2)

    exponents = turned(inputs.maxima).masked_fill(torch.isneginf(parts.exponents), -math.inf)
    return dataclasses.replace(parts, exponents=exponents, masses=turned(inputs.masses))


def _out_strides_ignored(inputs: Inputs) -> Outputs | None:
    if inputs.out.is_contiguous():
        return None
    memory = moved(inputs.out, inputs.out.device)
    right = _RIGHT(inputs)
    as_if_contiguous(memory).copy_(right.out)
    return Outputs(memory.contiguous(), right.lse)


def _truncated(inputs: Inputs) -> Outputs | None:
    if inputs.out.dtype == torch.float32:
        return None
    out, lse = compute(parts_of(inputs), Way())
    return Outputs(cut(out, inputs.out.dtype), lse)


# Reports of faults that have been seen: vllm-project/vllm#47079 (lse-in-base-2), ROCm/aiter#4350 (all-segments-read),
# ROCm/aiter#3641 (empty-split-nonzero), vllm-project/vllm#54639 (lse-none).
MUTANTS: tuple[Mutant, ...] = (
    # No segment that counts holds a NaN, so only that one fault cannot show.
    *(
        Mutant(name, pitfall, _answer(way_of(name)))
        for name, pitfall in FAULTS.items()
        if name != "nan-to-num-everywhere"
    ),
    Mutant("all-segments-read", "segments were active that nobody wrote", _counted(lambda n, g, t: g if n > 0 else 0)),
    Mutant("one-segment-too-many", "one segment more were active", _counted(lambda n, g, t: active_segments(n, g, t) + 1)),
    Mutant("last-segment-lost", "one segment less were active", _counted(lambda n, g, t: active_segments(n, g, t) - 1)),
    Mutant("tiles-of-a-segment-rounded-down", "the tiles of a segment were rounded down", _counted(_rounded_down)),
    Mutant("no-least-of-one-tile", "a row without keys had segments of 0 tiles", _counted(_without_floor)),
    Mutant("active-segments-rounded-down", "a segment that is not full were inactive", _counted(_last_cut)),
    Mutant("one-tile-a-segment", "every segment spanned one tile, however long the row", _counted(_single_tiles)),
    Mutant("tile-twice-as-large", "the tile were twice that of the kernel before",
           _counted(lambda n, g, t: active_segments(n, g, 2 * t))),
    Mutant("tile-half-as-large", "the tile were half that of the kernel before",
           _counted(lambda n, g, t: active_segments(2 * n, g, t) if n > 0 else 0)),
    Mutant("half-as-many-segments", "the kernel before had half as many segments",
           _counted(lambda n, g, t: active_segments(n, max(1, g // 2), t))),
    Mutant("negative-length-counts", "a negative length counted as a positive one",
           _counted(lambda n, g, t: active_segments(abs(n), g, t))),
    Mutant("length-of-the-next-row", "every row had the length of the one behind it",
           lambda inputs: _other_rows_lengths(inputs, inputs.lengths.roll(-1))),
    Mutant("longest-row-for-all", "every row with keys were as long as the longest",
           lambda inputs: _other_rows_lengths(
               inputs, torch.where(inputs.lengths > 0, inputs.lengths.amax(), inputs.lengths)
           ) if inputs.lengths.numel() else None),
    Mutant("masses-left-out", "every segment had the mass 1",
           _changed(lambda parts, inputs: dataclasses.replace(parts, masses=torch.ones_like(parts.exponents)))),
    Mutant("sums-taken-for-normalised", "sums were means, to be multiplied by their masses",
           _changed(lambda parts, inputs: Parts(
               parts.values * inputs.masses.permute(2, 0, 1)[..., None], parts.exponents, parts.masses, True))),
    Mutant("heads-inside-segments", "maxima and masses were [segments, heads]", _changed(_heads_inside)),
    Mutant("out-strides-ignored", "the output were contiguous", _out_strides_ignored),
    Mutant("output-truncated", "the output were cut off instead of rounded", _truncated),
    Mutant("lse-none", "no log-sum-exp were returned", lambda inputs: Outputs(_RIGHT(inputs).out, None)),  # type: ignore[arg-type]
)  # fmt: skip

_PLAIN = Precision(probability="exact", systematic_ulps=0.0, exponential_ulps=2.0, flushes=False)

HONEST: tuple[Honest, ...] = (
    Honest("two-passes", _PLAIN, _RIGHT),
    Honest("running-and-rescaled", _PLAIN, _answer(Way(order="running"))),
    Honest("running-backwards", _PLAIN, _answer(Way(order="running", backwards=True))),
    Honest("weights-divided-first", _PLAIN, _answer(Way(order="shared_first"))),
)
