"""Which ragged list must the packing of padded index rows give?

    row t = [ x for x in indices[t, :min(W, max(0, lengths[t]))] if x >= 0 and (num_rows < 0 or x < num_rows) ]

in column order, W the width of a row, all numbers compared as they are, whatever their dtype. The list is int32: an
entry that would be kept and does not fit is an error. Layout in `oracle.sparse_mla.ragged`. Source: the function
`build_ragged_indices_from_dense` of vLLM's ROCm sparse MLA backend, which narrows indices and lengths to int32 first
and has no answer for 0 rows; here 0 rows give an empty list and indptr [0].
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.memory import guarded, guarded_copy, moved
from cases.precision import Precision
from cases.sparse_mla.ragged_from_dense import Inputs, Outputs
from oracle.check import Check
from oracle.laws import Honest, Law, Mutant
from oracle.sparse_mla import ragged


def matrix(inputs: Inputs) -> torch.Tensor:
    """The index rows as int64 [rows, width]."""
    return inputs.indices.reshape(inputs.indices.shape[0], _width(inputs)).to(torch.int64)


def _width(inputs: Inputs) -> int:
    return math.prod(inputs.indices.shape[1:])


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The packed rows, and unwritten memory behind them; `dtype` changes nothing.

    Raises ValueError where lengths and rows differ in number, and for a kept index beyond int32.
    """
    del dtype
    return _packed(inputs, lambda row, length: _kept(row[: max(length, 0)], inputs.num_rows))


def _kept(row: torch.Tensor, num_rows: int) -> torch.Tensor:
    valid = row >= 0
    if num_rows >= 0:
        valid &= row < num_rows
    return row[valid]


def _packed(inputs: Inputs, keep: Callable[[torch.Tensor, int], torch.Tensor]) -> Outputs:
    """The rows that `keep` makes of each index row and its length."""
    if inputs.lengths.numel() != inputs.indices.shape[0]:
        raise ValueError(f"lengths={inputs.lengths.numel()}: should be one for each of {inputs.indices.shape[0]} rows")
    rows = [keep(row, length) for row, length in zip(matrix(inputs), inputs.lengths.tolist(), strict=True)]
    return Outputs(*ragged.joined(rows, inputs.indices.numel(), inputs.indices.device))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Row starts and used entries bit for bit, and the capacity."""
    del precision
    want = reference(inputs)
    return ragged.checks((outputs.flat, outputs.indptr), (want.flat, want.indptr))


def meaning(outputs: Outputs) -> Outputs:
    """The answer without what means nothing in it."""
    return Outputs(ragged.used(outputs.flat, outputs.indptr), outputs.indptr)


def _asked(inputs: Inputs, **changes: object) -> Inputs:
    """A call with some tensors changed, and memory for its own answer."""
    edited = dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]
    rows = edited.indices.shape[0]
    return dataclasses.replace(
        edited, flat=guarded((edited.indices.numel(),), torch.int32), indptr=guarded((rows + 1,), torch.int32)
    )


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _rows_reversed(inputs: Inputs) -> Inputs:
    return _asked(inputs, indices=inputs.indices.flip(0), lengths=inputs.lengths.flip(0))


def _reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    rows = ragged.split(first.flat, first.indptr)[::-1]
    return Outputs(*ragged.joined(rows, edited.indices.numel(), first.flat.device))


def _padded(inputs: Inputs) -> Inputs | None:
    """Every column is followed by an invalid one, and lengths double."""
    lengths = inputs.lengths
    if bool(((lengths > 2**29) | (lengths < -(2**29))).any()):
        return None
    spread = torch.stack((inputs.indices, torch.full_like(inputs.indices, -1)), dim=-1).flatten(-2)
    return _asked(inputs, indices=guarded_copy(spread, gaps=(5,)), lengths=lengths * 2)


def _one_dimension_more(inputs: Inputs) -> Inputs:
    return _asked(inputs, indices=inputs.indices[:, None])


def _lengths_clamped(inputs: Inputs) -> Inputs:
    return _asked(inputs, lengths=inputs.lengths.clamp(0, _width(inputs)))


def _stale_tails(inputs: Inputs) -> Inputs:
    """Behind each row's length stands one and the same valid entry."""
    indices = moved(inputs.indices, inputs.indices.device)
    place = torch.arange(_width(inputs)).reshape(indices.shape[1:])
    beyond = place >= inputs.lengths.reshape(-1, *([1] * (indices.ndim - 1)))
    indices.masked_fill_(beyond, 0)
    return _asked(inputs, indices=indices)


def _other_absence(inputs: Inputs) -> Inputs | None:
    return _asked(inputs, num_rows=-(2**31)) if inputs.num_rows < 0 else None


def _widened(inputs: Inputs) -> Inputs | None:
    return _asked(inputs, indices=inputs.indices.to(torch.int64)) if inputs.indices.dtype == torch.int32 else None


LAWS: tuple[Law, ...] = (
    Law("R1 rows reversed", "a row's entries do not depend on its neighbours", _rows_reversed, _reversed, "bitwise",
        meaning),
    Law("R2 rows padded", "invalid entries change nothing, wherever they stand", _padded, _same, "bitwise", meaning),
    Law("R3 one dimension more", "only the first dimension counts", _one_dimension_more, _same, "bitwise", meaning),
    Law("R4 lengths clamped", "a length beyond the row is the row's width, below 0 it is 0", _lengths_clamped, _same,
        "bitwise", meaning),
    Law("R5 other tails", "entries behind a row's length are not used", _stale_tails, _same, "bitwise", meaning),
    Law("R6 another absent bound", "every negative num_rows means no bound", _other_absence, _same, "bitwise", meaning),
    Law("R7 wider indices", "the dtype of the indices does not matter", _widened, _same, "bitwise", meaning),
)  # fmt: skip


def _mutant(
    name: str, pitfall: str, keep: Callable[[Inputs], Callable[[torch.Tensor, int], torch.Tensor] | None]
) -> Mutant:
    def answer(inputs: Inputs) -> Outputs | None:
        rule = keep(inputs)
        # What is wrongly kept and does not fit is stored as far as it fits.
        return None if rule is None else _packed(inputs, lambda row, length: _low_bits(rule(row, length)))

    return Mutant(name, pitfall, answer)


def _limited(row: torch.Tensor, length: int, bound: int) -> torch.Tensor:
    """The columns up to the row's count of kept entries, and of those the kept ones."""
    count = _kept(row[: max(length, 0)], bound).numel()
    return _kept(row[:count], bound)


def _below(row: torch.Tensor, num_rows: int) -> torch.Tensor:
    return row[row < num_rows] if num_rows >= 0 else row


def _unrepeated(row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(dict.fromkeys(row.tolist())), dtype=row.dtype)


def _low(value: int) -> int:
    """The low 32 bits of a number as int32."""
    return (value + 2**31) % 2**32 - 2**31


def _low_bits(row: torch.Tensor) -> torch.Tensor:
    return row.to(torch.int32).to(torch.int64)


def _holes_to_zero(inputs: Inputs) -> Callable[[torch.Tensor, int], torch.Tensor]:
    def keep(row: torch.Tensor, length: int) -> torch.Tensor:
        row = row[: max(length, 0)]
        return torch.where((row >= 0) & ((row < inputs.num_rows) | (inputs.num_rows < 0)), row, 0)

    return keep


def _first_tile(inputs: Inputs) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda row, length: _kept(row[: min(max(length, 0), 1024)], inputs.num_rows)


def _pitch_is_width(inputs: Inputs) -> Outputs | None:
    """Rows one behind the other, whatever lies between."""
    indices = inputs.indices
    if indices.ndim != 2 or indices.shape[0] < 2 or indices.stride(0) == indices.shape[1]:
        return None
    return reference(dataclasses.replace(inputs, indices=indices.as_strided(indices.shape, (indices.shape[1], 1))))


def _padded_starts(inputs: Inputs) -> Outputs:
    """Every row at its place in the padded rows, invalid entries and all."""
    rows = matrix(inputs)
    starts = torch.arange(rows.shape[0] + 1, dtype=torch.int32) * rows.shape[1]
    return Outputs(rows.to(torch.int32).flatten(), starts.to(torch.int32))


def _trimmed(inputs: Inputs) -> Outputs:
    right = reference(inputs)
    return Outputs(ragged.used(right.flat, right.indptr).clone(), right.indptr)


def _restarted(inputs: Inputs) -> Outputs | None:
    """The row starts begin anew at every 1024th row."""
    if inputs.indices.shape[0] <= 1024:
        return None
    right = reference(inputs)
    starts = right.indptr.clone()
    starts[1025:] -= right.indptr[1024]
    return Outputs(right.flat, starts)


def _ends_for_starts(inputs: Inputs) -> Outputs:
    right = reference(inputs)
    return Outputs(right.flat, torch.cat((right.indptr[1:], right.indptr[-1:])))


def _capacity_last(inputs: Inputs) -> Outputs:
    """The last row reaches to the end of the list."""
    right = reference(inputs)
    starts = right.indptr.clone()
    if inputs.indices.shape[0]:
        starts[-1] = right.flat.numel()
    return Outputs(right.flat, starts)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("length-ignored", "entries behind a row's length were kept",
            lambda inputs: lambda row, length: _kept(row, inputs.num_rows)),
    _mutant("length-off-by-one", "the last column of a row's length were left out",
            lambda inputs: lambda row, length: _kept(row[: max(min(length, row.numel()) - 1, 0)], inputs.num_rows)),
    _mutant("negative-length-from-the-end", "a negative length counted from the row's end",
            lambda inputs: lambda row, length: _kept(row[:length], inputs.num_rows)),
    _mutant("holes-kept", "negative entries were kept",
            lambda inputs: lambda row, length: _below(row[: max(length, 0)], inputs.num_rows)),
    _mutant("holes-become-slot-0", "entries that name no slot became slot 0", _holes_to_zero),
    _mutant("count-is-a-limit", "as many columns as a row has valid entries were looked at, holes among them",
            lambda inputs: lambda row, length: _limited(row, length, inputs.num_rows)),
    _mutant("bound-ignored", "entries beyond the last slot were kept",
            lambda inputs: (lambda row, length: _kept(row[: max(length, 0)], -1)) if inputs.num_rows >= 0 else None),
    _mutant("bound-off-by-one", "the slot behind the last one were a slot",
            lambda inputs: (lambda row, length: _kept(row[: max(length, 0)], inputs.num_rows + 1))
            if inputs.num_rows >= 0 else None),
    _mutant("bound-of-zero-is-none", "num_rows 0 meant no bound",
            lambda inputs: (lambda row, length: _kept(row[: max(length, 0)], -1)) if inputs.num_rows == 0 else None),
    _mutant("slot-0-dropped", "slot 0 were no slot",
            lambda inputs: lambda row, length: _kept(row[: max(length, 0)][row[: max(length, 0)] != 0], inputs.num_rows)),
    _mutant("duplicates-removed", "an entry that stands twice were kept once",
            lambda inputs: lambda row, length: _unrepeated(_kept(row[: max(length, 0)], inputs.num_rows))),
    _mutant("rows-sorted", "a row's entries were put in order",
            lambda inputs: lambda row, length: _kept(row[: max(length, 0)], inputs.num_rows).sort().values),
    _mutant("indices-cut-to-32-bits", "only the low 32 bits of an index counted",
            lambda inputs: lambda row, length: _kept(_low_bits(row[: max(length, 0)]), inputs.num_rows)),
    _mutant("lengths-cut-to-32-bits", "only the low 32 bits of a length counted",
            lambda inputs: lambda row, length: _kept(row[: max(_low(length), 0)], inputs.num_rows)),
    _mutant("first-tile-only", "columns from the 1024th on were left out", _first_tile),
    Mutant("row-pitch-is-its-width", "the rows of a strided matrix lay one behind the other", _pitch_is_width),
    Mutant("capacity-taken-for-count", "rows began where they do in the padded form", _padded_starts),
    Mutant("last-row-to-the-end", "the last row reached to the end of the list", _capacity_last),
    Mutant("capacity-lost", "the list ended with its last entry", _trimmed),
    Mutant("starts-restart", "the row starts began anew with the 1024th row", _restarted),
    Mutant("ends-for-starts", "indptr held where each row ends", _ends_for_starts),
)  # fmt: skip


def _by_sorting(inputs: Inputs) -> Outputs:
    """All rows at once, by a stable sort that brings kept entries to the front; something that looks valid behind them."""
    indices = matrix(inputs)
    column = torch.arange(indices.shape[1])
    keep = (column < inputs.lengths.to(torch.int64)[:, None]) & (indices >= 0)
    if inputs.num_rows >= 0:
        keep &= indices < inputs.num_rows
    order = torch.argsort((~keep).flatten().to(torch.uint8), stable=True)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0))).to(torch.int32)
    return Outputs(ragged.with_tail(indices.flatten()[order].to(torch.int32), indptr, 1), indptr)


HONEST: tuple[Honest, ...] = (
    Honest("one-row-after-the-other", Precision(probability="exact"), reference),
    Honest("by-sorting", Precision(probability="exact"), _by_sorting),
)
