"""What do partial attention results become that the maps of a plan put together?

For every group g of two parts or more, with first scratch rows b of its entries in `parts`, and every query row q of
[first_g, last_g), with i = q - first_g:

    live  = the parts whose l_b = partial_lse[b + i] is finite
    m     = max over live of l_b
    out_q = sum over live of exp(l_b - m) o_b / sum over live of exp(l_b - m),   o_b = partial_out[b + i]
    lse_q = m + ln sum over live of exp(l_b - m)

per head; 0 and minus infinity where no part is live. What is not live is not read: its o_b may be anything. All other rows
of out and lse stay: groups of one part or none are tiles that were not split, whose rows are there already. Without a map,
a group has parts[1] - parts[0] rows, its own two first ones, and group g ends in the g-th run of so many rows.

The budget of an element before its last rounding, with x_b = l_b - m, p_b the weights and n the parts:

    u_32 (ulps + (2 + common) max over live of |x_b| p_b-weighted + |lse_q| + |m| + 3 n + 8) * sum_b p_b |o_b|

that is, an error of each weight from the rounding of its exponent, its exponential and every sum; exponents may be taken
from lse_q, whose own rounding is an error of all weights. A row with one live part, or whose other parts have no weight in
float32, is that part bit for bit. Of the log-sum-exp: u_32 (2 |m| + 2 |lse_q| + ulps + common + n + 8).

Source: `mla_reduce_v1` of AITER. It gives plus infinity and NaN for rows without a live part, which is wrong here.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from cases.dense_mla.reduce_by_maps import Inputs, Outputs
from cases.memory import is_vast, map_tensors, moved
from cases.precision import Precision
from oracle.check import Check, bounded, exact, wrong_form
from oracle.laws import Honest, Law, Mutant

U32 = 2.0**-24
_FLUSHED = 4 * 2.0**-126
# exp of less than this is zero in float32.
_WEIGHTLESS = -104.0

# Partial outputs and log-sum-exps [parts, rows, heads(, lanes)] to merged rows.
Merge = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Group(NamedTuple):
    """Query rows that a group ends in, and the first scratch row of each of its parts."""

    first: int
    last: int
    bases: list[int]


def groups_of(inputs: Inputs) -> Iterator[Group]:
    """The groups that are merged."""
    starts, parts = inputs.group_start.tolist(), inputs.parts.tolist()
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        bases = parts[begin:end]
        if len(bases) < 2:
            continue
        if inputs.groups is None:
            rows = bases[1] - bases[0]
            yield Group(number * rows, (number + 1) * rows, bases)
        else:
            first, last = inputs.groups[number].tolist()
            yield Group(first, last, bases)


def merge(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge of parts, in the dtype of the values."""
    live = torch.isfinite(lse)
    known = torch.where(live, lse, -torch.inf)
    top = known.amax(0)
    weight = torch.where(live, (known - torch.where(torch.isfinite(top), top, 0.0)).exp(), 0.0)
    total = weight.sum(0)
    share = torch.where(total > 0, weight / total, 0.0)
    merged = (share[..., None] * torch.where(live[..., None], values, 0.0)).sum(0)
    return merged, top + total.log()


def _gathered(inputs: Inputs, group: Group, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tensor(group.bases)[:, None] + torch.arange(group.last - group.first)
    return inputs.partial_out[rows].to(dtype), inputs.partial_lse[rows].to(dtype)


def _merged(inputs: Inputs, dtype: torch.dtype, how: Merge = merge, chosen: Iterator[Group] | None = None) -> Outputs:
    out, lse = moved(inputs.out, "cpu"), None if inputs.lse is None else moved(inputs.lse, "cpu")
    for group in groups_of(inputs) if chosen is None else chosen:
        merged, total = how(*_gathered(inputs, group, dtype))
        out[group.first : group.last] = _rounded(merged, out.dtype)
        if lse is not None:
            lse[group.first : group.last] = total.to(torch.float32)
    return Outputs(out, lse)


def _rounded(merged: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return merged.to(torch.float32).to(dtype)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The rows after the merge in `dtype`, rounded to the output's; a copy.

    Raises TypeError for partial results that are not float32, an output that is neither bfloat16 nor float16, or maps that
    are not int32; ValueError for partial results that are not contiguous, shapes that do not belong together, and groups
    whose rows lie outside the output or whose parts lie outside the scratch rows.
    """
    _refuse(inputs)
    return _merged(inputs, dtype)


def _refuse(inputs: Inputs) -> None:
    for name, tensor, allowed in (
        ("partial_out", inputs.partial_out, (torch.float32,)), ("partial_lse", inputs.partial_lse, (torch.float32,)),
        ("out", inputs.out, (torch.bfloat16, torch.float16)), ("group_start", inputs.group_start, (torch.int32,)),
        ("parts", inputs.parts, (torch.int32,)), ("lse", inputs.lse, (torch.float32,)),
        ("groups", inputs.groups, (torch.int32,)),
    ):  # fmt: skip
        if tensor is not None and tensor.dtype not in allowed:
            raise TypeError(f"{name} is {tensor.dtype}: should be {' or '.join(map(str, allowed))}")
    scratch, heads, lanes = inputs.partial_out.shape
    if not (inputs.partial_out.is_contiguous() and inputs.partial_lse.is_contiguous()):
        raise ValueError("partial results are strided: should be contiguous")
    if inputs.partial_lse.shape != (scratch, heads):
        raise ValueError(f"partial_lse has shape {list(inputs.partial_lse.shape)}: should have {[scratch, heads]}")
    if inputs.out.shape[1:] != (heads, lanes):
        raise ValueError(f"out has rows of {list(inputs.out.shape[1:])}: should have {[heads, lanes]}")
    if inputs.groups is not None and inputs.groups.shape != (inputs.group_start.numel() - 1, 2):
        raise ValueError(f"groups has {len(inputs.groups)} rows: should have {inputs.group_start.numel() - 1}")
    for group in groups_of(inputs):
        if not 0 <= group.first <= group.last <= inputs.out.shape[0]:
            raise ValueError(f"a group of rows {group.first}..{group.last}: should lie in 0..{inputs.out.shape[0]}")
        if min(group.bases) < 0 or max(group.bases) + group.last - group.first > scratch:
            raise ValueError(f"a group of parts at {group.bases}: should lie in 0..{scratch}")


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Merged rows within the budget, all others bit for bit."""
    for name, got, form in (("out", outputs.out, inputs.out), ("lse", outputs.lse, inputs.lse)):
        wrong = None if form is None else wrong_form(name, got, form)
        if wrong is not None:
            return (wrong,)
    merged = torch.zeros(inputs.out.shape[0], dtype=torch.bool)
    found = []
    for group in groups_of(inputs):
        merged[group.first : group.last] = True
        rows = torch.arange(group.first, group.last)
        found.append((rows, *_judged(*_gathered(inputs, group, torch.float64), precision)))
    checks = [exact("rows of no group", _rows(outputs.out, ~merged), _rows(inputs.out, ~merged),
                    why="a tile that was not split is there already")]  # fmt: skip
    rows, want, allowed, lse, lse_allowed = (
        (torch.cat(parts) for parts in zip(*found, strict=True)) if found else _nothing(inputs)
    )
    dtype = inputs.out.dtype
    checks.append(bounded("out", _rows(outputs.out, rows), want, allowed, dtype=dtype, rounding=dtype))
    if inputs.lse is not None and outputs.lse is not None:
        checks.append(exact("lse of no group", _rows(outputs.lse, ~merged), _rows(inputs.lse, ~merged),
                            why="nobody writes the log-sum-exp of a tile that was not split"))  # fmt: skip
        checks.append(
            bounded("lse", _rows(outputs.lse, rows), lse, lse_allowed, dtype=torch.float32, rounding=torch.float32)
        )
    return tuple(checks)


def _rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return tensor[rows.to(tensor.device)]


def _nothing(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    _, heads, lanes = inputs.out.shape
    out, lse = torch.zeros((0, heads, lanes), dtype=torch.float64), torch.zeros((0, heads), dtype=torch.float64)
    return torch.zeros(0, dtype=torch.int64), out, out, lse, lse


def _judged(values: torch.Tensor, lse: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, ...]:
    """Answer and budget of a group's rows, and those of their log-sum-exps."""
    want, total = merge(values, lse)
    live = torch.isfinite(lse)
    values = torch.where(live[..., None], values, 0.0)
    top = torch.where(live, lse, -torch.inf).amax(0)
    known = torch.isfinite(top)
    below = torch.where(live, lse - torch.where(known, top, 0.0), 0.0)
    share = torch.where(live, (lse - torch.where(known, total, 0.0)).exp(), 0.0)
    count, ulps, common = len(lse), precision.exponential_ulps, precision.systematic_ulps
    size = torch.where(known, top.abs() + total.abs(), 0.0)
    steps = ulps + (2 + common) * below.abs() + size + 3 * count + 8
    allowed = U32 * ((share * steps)[..., None] * values.abs()).sum(0)
    # One part has all the weight in float32.
    alone = (live & (below > _WEIGHTLESS)).sum(0) == 1
    winner = torch.where(live, lse, -torch.inf).argmax(0, keepdim=True)
    chosen = values.gather(0, winner[..., None].expand(1, *values.shape[1:]))[0]
    want = torch.where(alone[..., None], chosen, want)
    allowed = torch.where(alone[..., None], 0.0, allowed + _FLUSHED * precision.flushes * (allowed > 0))
    lse_allowed = U32 * torch.where(known, 2 * size + ulps + common + count + 8, 0.0)
    return want, allowed, torch.where(known, total, -torch.inf), lse_allowed


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(map_tensors(inputs, lambda tensor: moved(tensor, "cpu")), **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _parts_reversed(inputs: Inputs) -> Inputs | None:
    if inputs.groups is None or not list(groups_of(inputs)):
        return None
    fresh = _edited(inputs)
    starts = inputs.group_start.tolist()
    for begin, end in itertools.pairwise(starts):
        fresh.parts[begin:end] = inputs.parts[begin:end].flip(0)
    return fresh


def _groups_reversed(inputs: Inputs) -> Inputs | None:
    if inputs.groups is None:
        return None
    fresh = _edited(inputs)
    assert fresh.groups is not None
    starts = inputs.group_start.tolist()
    spans = [inputs.parts[begin:end] for begin, end in itertools.pairwise(starts)][::-1]
    fresh.groups.copy_(inputs.groups.flip(0))
    fresh.group_start[1:] = torch.tensor([len(span) for span in spans], dtype=torch.int32).cumsum(0)
    if spans:
        fresh.parts[: starts[-1]] = torch.cat(spans)
    return fresh


def _unread_changed(inputs: Inputs) -> Inputs:
    """Other numbers in scratch rows that no part covers, in parts that are not live, and behind the maps."""
    fresh = _edited(inputs)
    read = torch.zeros(len(inputs.partial_lse), dtype=torch.bool)
    for group in groups_of(inputs):
        for base in group.bases:
            read[base : base + group.last - group.first] = True
    live = read[:, None] & torch.isfinite(inputs.partial_lse)
    fresh.partial_out.copy_(torch.where(live[..., None], inputs.partial_out, 12345.0))
    fresh.partial_lse.copy_(torch.where(read[:, None], inputs.partial_lse, 678.0))
    fresh.parts[int(inputs.group_start[-1]) :] = 1
    return fresh


def _heads_reversed(inputs: Inputs) -> Inputs | None:
    if is_vast(inputs.out):
        return None
    fresh = _edited(inputs)
    fresh.partial_out.copy_(inputs.partial_out.flip(1))
    fresh.partial_lse.copy_(inputs.partial_lse.flip(1))
    return fresh


def _reversed_heads(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    """Only merged rows hold heads; the poison of others is the same everywhere."""
    del inputs, edited
    return Outputs(first.out.flip(1), None if first.lse is None else first.lse.flip(1))


def _larger_by_a_power(inputs: Inputs) -> Inputs:
    fresh = _edited(inputs)
    fresh.partial_out.mul_(4)
    return fresh


def _four_times(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    out = first.out.clone()
    for group in groups_of(inputs):
        out[group.first : group.last] *= 4
    return dataclasses.replace(first, out=out)


LAWS: tuple[Law, ...] = (
    Law("R1 parts reversed", "parts may stand in any order", _parts_reversed, _same, "budget"),
    Law("R2 groups reversed", "groups may stand in any order", _groups_reversed, _same, "bitwise"),
    Law("R3 unread changed", "what no part covers, and what has no key, is not read", _unread_changed, _same, "bitwise"),
    Law("R4 heads reversed", "every head is merged alike", _heads_reversed, _reversed_heads, "bitwise"),
    Law("R5 four times as large", "the merge is linear in the partial outputs", _larger_by_a_power, _four_times, "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, how: Merge) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _merged(inputs, torch.float64, how))


def _grouped(name: str, pitfall: str, change: Callable[[Inputs, int, list[int]], Group | None]) -> Mutant:
    """Groups by number and parts, those of one and none too, otherwise than they should be; None for no merge."""

    def answer(inputs: Inputs) -> Outputs | None:
        starts, parts = inputs.group_start.tolist(), inputs.parts.tolist()
        found = [
            change(inputs, number, parts[begin:end]) for number, (begin, end) in enumerate(itertools.pairwise(starts))
        ]
        fits = [group for group in found if group is not None and _fits(inputs, group)]
        return _merged(inputs, torch.float64, chosen=iter(fits))

    return Mutant(name, pitfall, answer)


def _fits(inputs: Inputs, group: Group) -> bool:
    inside = 0 <= group.first <= group.last <= inputs.out.shape[0]
    return inside and all(0 <= base <= len(inputs.partial_lse) - (group.last - group.first) for base in group.bases)


def _span(inputs: Inputs, number: int, bases: list[int]) -> tuple[int, int]:
    if inputs.groups is None:
        rows = bases[1] - bases[0] if len(bases) > 1 else 0
        return number * rows, (number + 1) * rows
    first, last = inputs.groups[number].tolist()
    return first, last


def _chosen(bases: Callable[[list[int]], list[int]]) -> Callable[[Inputs, int, list[int]], Group | None]:
    def change(inputs: Inputs, number: int, parts: list[int]) -> Group | None:
        return Group(*_span(inputs, number, parts), bases(parts)) if len(parts) > 1 else None

    return change


def _shifted(first: int, last: int) -> Callable[[Inputs, int, list[int]], Group | None]:
    def change(inputs: Inputs, number: int, parts: list[int]) -> Group | None:
        begin, end = _span(inputs, number, parts)
        return Group(begin + first, end + last, parts) if len(parts) > 1 else None

    return change


def _one_part_more(inputs: Inputs, number: int, parts: list[int]) -> Group | None:
    if len(parts) < 2:
        return None
    begin, end = _span(inputs, number, parts)
    following = int(inputs.parts[int(inputs.group_start[number + 1])])
    last = len(inputs.partial_lse) - (end - begin)
    return Group(begin, end, [*parts, min(max(following, 0), last)])


def _uniform(inputs: Inputs, number: int, parts: list[int]) -> Group | None:
    """Rows by the distance of the first two parts, though there is a map."""
    rows = parts[1] - parts[0] if len(parts) > 1 else 0
    return Group(number * rows, (number + 1) * rows, parts) if inputs.groups is not None and rows > 0 else None


def _neighbours(inputs: Inputs, number: int, parts: list[int]) -> Group | None:
    """Parts taken to stand behind the first one."""
    if len(parts) < 2:
        return None
    begin, end = _span(inputs, number, parts)
    return Group(begin, end, [parts[0] + place * (end - begin) for place in range(len(parts))])


def _one_row(inputs: Inputs, number: int, parts: list[int]) -> Group | None:
    begin, end = _span(inputs, number, parts)
    return Group(begin, min(begin + 1, end), parts) if len(parts) > 1 else None


def _alone(inputs: Inputs, number: int, parts: list[int]) -> Group | None:
    """A group of one part merged too, where the map has rows for it."""
    return Group(*_span(inputs, number, parts), parts) if parts else None


def _unsplit_rows(inputs: Inputs, parts: int) -> list[slice]:
    """The rows that a map has for groups of so many parts, as far as they are rows."""
    if inputs.groups is None:
        return []
    sizes = inputs.group_start.diff().tolist()
    spans = [span for span, size in zip(inputs.groups.tolist(), sizes, strict=True) if size == parts]
    return [slice(first, last) for first, last in spans if 0 <= first <= last <= inputs.out.shape[0]]


def _nothing_merged(inputs: Inputs) -> Outputs:
    """A group of no part taken for one whose parts have no key."""
    answer = _merged(inputs, torch.float64)
    for rows in _unsplit_rows(inputs, 0):
        answer.out[rows] = 0
        if answer.lse is not None:
            answer.lse[rows] = -torch.inf
    return answer


def _lse_of_one(inputs: Inputs) -> Outputs | None:
    """The log-sum-exp alone of a group of one part, whose rows another kernel wrote."""
    answer = _merged(inputs, torch.float64)
    if answer.lse is None:
        return None
    starts, parts = inputs.group_start.tolist(), inputs.parts.tolist()
    bases = [parts[begin] for begin, end in itertools.pairwise(starts) if end - begin == 1]
    for rows, base in zip(_unsplit_rows(inputs, 1), bases, strict=False):
        answer.lse[rows] = inputs.partial_lse[base : base + rows.stop - rows.start]
    return answer


def _cleared(inputs: Inputs) -> Outputs | None:
    merged = torch.zeros(inputs.out.shape[0], dtype=torch.bool)
    for group in groups_of(inputs):
        merged[group.first : group.last] = True
    answer = _merged(inputs, torch.float64)
    answer.out[~merged] = 0
    return answer


def _each_row_by_its_first(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return merge(values[:, :1].expand_as(values), lse[:, :1].expand_as(lse))


def _all_heads_by_the_first(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    merged, _ = merge(values, lse[..., :1].expand_as(lse))
    return merged, merge(values, lse)[1]


def _nan_kept(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    spoiled = torch.isnan(lse).any(0)
    merged, total = merge(values, lse)
    return torch.where(spoiled[..., None], torch.nan, merged), torch.where(spoiled, torch.nan, total)


def _multiplied(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    live = torch.isfinite(lse)
    spoiled = (torch.isnan(values) & ~live[..., None]).any(0)
    merged, total = merge(values, lse)
    return torch.where(spoiled, torch.nan, merged), total


def _plus_infinity_kept(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    spoiled = torch.isposinf(lse).any(0)
    merged, total = merge(values, lse)
    return torch.where(spoiled[..., None], torch.nan, merged), torch.where(spoiled, torch.inf, total)


def _empty_weighs_one(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    live = torch.isfinite(lse)
    return merge(torch.where(live[..., None], values, 0.0), torch.where(live, lse, 0.0))


def _unguarded(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    merged, total = merge(values, lse)
    empty = ~torch.isfinite(lse).any(0)
    return torch.where(empty[..., None], torch.nan, merged), torch.where(empty, torch.inf, total)


def _based(weigh: float, end: float) -> Merge:
    def how(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        merged, total = merge(values, lse * weigh)
        return merged, total / weigh * end

    return how


def _average(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return merge(values, torch.where(torch.isfinite(lse), 0.0, lse))[0], merge(values, lse)[1]


def _not_divided(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    merged, total = merge(values, lse)
    top = torch.where(torch.isfinite(lse), lse, -torch.inf).amax(0)
    return merged * torch.where(torch.isfinite(top), (total - top).exp(), 0.0)[..., None], total


def _single(change: Callable[[torch.Tensor], torch.Tensor]) -> Merge:
    """Weights in float32 from log-sum-exps less some other number than their maximum."""

    def how(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        live = torch.isfinite(lse)
        less = change(torch.where(live, lse, -torch.inf))
        weight = torch.where(live, (lse - less).float().exp(), 0.0)
        total = weight.sum(0)
        merged = (weight[..., None] * torch.where(live[..., None], values, 0.0).float()).sum(0) / total[..., None]
        return merged, less + total.log()

    return how


def _rounded_before(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return merge(values.float().bfloat16().to(values.dtype), lse)


def _largest_only(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return merge(values, lse)[0], torch.where(torch.isfinite(lse), lse, -torch.inf).amax(0)


def _lse_left(inputs: Inputs) -> Outputs | None:
    return dataclasses.replace(_merged(inputs, torch.float64), lse=inputs.lse)


def _truncated(inputs: Inputs) -> Outputs | None:
    """bfloat16 by cutting off the lower half of float32."""
    answer = _merged(inputs, torch.float64)
    if answer.out.dtype != torch.bfloat16:
        return None
    for group in groups_of(inputs):
        merged, _ = merge(*_gathered(inputs, group, torch.float64))
        cut = merged.float().view(torch.int32) & -65536
        answer.out[group.first : group.last] = cut.view(torch.float32).to(torch.bfloat16)
    return answer


def _packed(inputs: Inputs) -> Outputs | None:
    """Heads stored as if a row had no gaps."""
    if inputs.out.stride(1) == inputs.out.shape[2]:
        return None
    answer = _merged(inputs, torch.float64)
    right = [(group, answer.out[group.first : group.last].clone()) for group in groups_of(inputs)]
    fresh = moved(inputs.out, "cpu")
    _, heads, lanes = fresh.shape
    for group, rows in right:
        for place, row in enumerate(rows):
            at = fresh[group.first + place]
            at.as_strided((heads, lanes), (lanes, 1), at.storage_offset()).copy_(row)
    return dataclasses.replace(answer, out=fresh)


def _wrapped(inputs: Inputs) -> Outputs | None:
    """Rows whose offset passes 2^31 land somewhere else, so that they stay as they were."""
    if not is_vast(inputs.out):
        return None
    answer = _merged(inputs, torch.float64)
    lost = [row for row in range(inputs.out.shape[0]) if row * inputs.out.stride(0) >= 1 << 31]
    answer.out[lost] = inputs.out[lost]
    return answer


MUTANTS: tuple[Mutant, ...] = (
    _mutant("nan-kept", "NaN for the log-sum-exp of no key were a number", _nan_kept),
    _mutant("plus-infinity-kept", "plus infinity for the log-sum-exp of no key were a number", _plus_infinity_kept),
    _mutant("empty-multiplied", "what a part without a key holds were multiplied by zero", _multiplied),
    _mutant("empty-weighs-one", "the log-sum-exp of no key were zero", _empty_weighs_one),
    _mutant("empty-rows-unguarded", "rows without a key were divided by zero", _unguarded),
    _mutant("weights-of-base-two", "log-sum-exps were to base two", _based(0.6931471805599453, 1.0)),
    _mutant("result-of-base-two", "the merged log-sum-exp were to base two", _based(1.0, 1.4426950408889634)),
    _mutant("plain-average", "all parts weighed alike", _average),
    _mutant("not-divided", "nobody divided by the sum of weights", _not_divided),
    _mutant("maximum-not-subtracted", "weights were exponentials of log-sum-exps", _single(lambda lse: torch.zeros_like(lse[0]))),
    _mutant("maximum-from-zero", "the running maximum began with zero", _single(lambda lse: lse.amax(0).clamp(min=0))),
    _mutant("rounded-before", "partial results were kept in bfloat16", _rounded_before),
    _mutant("rows-of-the-first", "all rows of a group were its first scratch rows", _each_row_by_its_first),
    _mutant("weights-of-the-first-head", "the first head's log-sum-exps weighed all heads", _all_heads_by_the_first),
    _mutant("largest-lse", "the log-sum-exp were the largest one", _largest_only),
    Mutant("lse-not-written", "nobody wrote the merged log-sum-exp", _lse_left),
    Mutant("truncated", "bfloat16 were the upper half of float32", _truncated),
    _grouped("first-part-missing", "the first part were left out", _chosen(lambda bases: bases[1:])),
    _grouped("last-part-missing", "the last part were left out", _chosen(lambda bases: bases[:-1])),
    _grouped("first-part-only", "only the first part counted", _chosen(lambda bases: bases[:1])),
    _grouped("parts-beyond-three-left", "no more than three parts were merged", _chosen(lambda bases: bases[:3])),
    _grouped("parts-beyond-a-wave-left", "no more than 64 parts were merged", _chosen(lambda bases: bases[:64])),
    _grouped("parts-beyond-four-waves-left", "no more than 256 parts were merged", _chosen(lambda bases: bases[:256])),
    _grouped("one-part-more", "a part were read that belongs to the next group", _one_part_more),
    _grouped("parts-by-number", "maps named parts, not scratch rows", _chosen(lambda bases: list(range(len(bases))))),
    _grouped("parts-behind-the-first", "parts stood behind the first one", _neighbours),
    _grouped("last-row-left", "the last row of a group were not its own", _shifted(0, -1)),
    _grouped("one-row-only", "a group had one row", _one_row),
    _grouped("rows-one-further", "rows began behind the first one", _shifted(1, 1)),
    _grouped("map-ignored", "rows followed from the parts although there is a map", _uniform),
    _grouped("groups-of-one-merged", "a single part were merged with nothing", _alone),
    Mutant("groups-of-one-lse-written", "the log-sum-exp of a single part were written", _lse_of_one),
    Mutant("groups-of-none-emptied", "a group of no part were rows without a key", _nothing_merged),
    Mutant("other-rows-cleared", "rows of tiles that were not split were cleared", _cleared),
    Mutant("packed-heads", "heads were stored without their gaps", _packed),
    Mutant("offsets-of-32-bits", "the offset of a row were a 32-bit product", _wrapped),
)  # fmt: skip


def _one_after_the_other(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A running maximum and sum in float32."""
    values, lse = values.float(), lse.float()
    top = torch.full_like(lse[0], -torch.inf)
    total, merged = torch.zeros_like(top), torch.zeros_like(values[0])
    for own, own_lse in zip(values, lse, strict=True):
        live = torch.isfinite(own_lse)
        higher = torch.where(live, torch.maximum(top, own_lse), top)
        shrink = torch.where(torch.isfinite(top), (top - higher).exp(), 0.0)
        weight = torch.where(live, (own_lse - higher).exp(), 0.0)
        merged = merged * shrink[..., None] + weight[..., None] * torch.where(live[..., None], own, 0.0)
        total, top = total * shrink + weight, higher
    return torch.where((total > 0)[..., None], merged / total.clamp(min=2.0**-126)[..., None], 0.0), top + total.log()


def _weights_from_the_sum(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32, with weights exp(l - lse) that nobody divides."""
    values, lse = values.float(), lse.float()
    live = torch.isfinite(lse)
    top = torch.where(live, lse, -torch.inf).amax(0)
    total = torch.where(live, (lse - top).exp(), 0.0).sum(0)
    whole = torch.where(total > 0, top + total.log(), -torch.inf)
    weight = torch.where(live, (lse - whole).exp(), 0.0)
    return (weight[..., None] * torch.where(live[..., None], values, 0.0)).sum(0), whole


def _by_powers_of_two(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32, by exponentials to base two of log-sum-exps converted first."""
    values, lse = values.float(), lse.float() * 1.4426950408889634
    live = torch.isfinite(lse)
    top = torch.where(live, lse, -torch.inf).amax(0)
    weight = torch.where(live, (lse - torch.where(torch.isfinite(top), top, 0.0)).exp2(), 0.0)
    total = weight.sum(0)
    merged = (weight[..., None] * torch.where(live[..., None], values, 0.0)).sum(0)
    merged = torch.where((total > 0)[..., None], merged / total.clamp(min=2.0**-126)[..., None], 0.0)
    return merged, (top + total.log2()) * 0.6931471805599453


def _honest(how: Merge) -> Callable[[Inputs], Outputs]:
    return lambda inputs: _merged(inputs, torch.float32, how)


_SINGLE = Precision(probability="exact", note="float32 weights and sums")
HONEST: tuple[Honest, ...] = (
    Honest("exact-then-rounded", Precision(probability="exact", flushes=False, note="float64, one rounding"),
           lambda inputs: _merged(inputs, torch.float64)),
    Honest("one-after-the-other", _SINGLE, _honest(_one_after_the_other)),
    Honest("weights-from-the-sum", _SINGLE, _honest(_weights_from_the_sum)),
    Honest("by-powers-of-two", Precision(probability="exact", systematic_ulps=16.0, note="base two"), _honest(_by_powers_of_two)),
)  # fmt: skip
