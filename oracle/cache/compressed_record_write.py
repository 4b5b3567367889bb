"""Which bytes must lie in the cache after the tokens that end a group were written as compressed records?

Token t writes if slots[t] >= 0 and (p + 1) % ratio == 0, p = positions[t]. Its record is that of the row with its last
64 lanes rotated to the group's first position, (p // ratio) * ratio, in OCP codes on every platform:

    a = max(max |x|, 1e-4),  e = the smallest integer with a <= 448 * 2^e,  scale = e + 127,  code = rne(x * 2^-e)

for each group x of 64 of the first 448 lanes, unrotated. All other bytes stay. Rotation and its allowance:
`oracle.cache.rotated_records`; layout: `oracle.cache.records`. Source: `rope_quant_insert` of vLLM's V4.1, and the last
part of the fused compressor of V4, for ratios 4 and 128.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.cache.compressed_record_write import RATIOS, Inputs, Outputs
from cases.memory import moved
from cases.precision import Precision
from oracle.cache import rotated_faults, rotated_records
from oracle.cache.rotated_records import Write
from oracle.check import Check
from oracle.laws import Honest, Law, Mutant


def call(inputs: Inputs) -> Write:
    """The call put plainly: who writes, and by which row of the table each row turns.

    Raises `ValueError` for another ratio than 1, 2, 4 and 128 and for what `rotated_records.check_form` refuses,
    `IndexError` and `ValueError` for what `rotated_records.checked` refuses.
    """
    ratio = inputs.ratio
    if ratio not in RATIOS:
        raise ValueError(f"ratio={ratio}: should be 1, 2, 4 or 128")
    rotated_records.check_form(inputs.rows, inputs.positions, inputs.cos_sin, inputs.slots)
    positions = inputs.positions[: inputs.slots.numel()]
    return rotated_records.checked(_put(inputs, (positions + 1) % ratio == 0, positions // ratio * ratio))


def _put(inputs: Inputs, ends: torch.Tensor, at: torch.Tensor) -> Write:
    """The call when those tokens write that end a group and have a slot, turned by the rows `at` of the table."""
    slots = torch.where(ends | (inputs.slots < 0), inputs.slots, -1)
    return Write(inputs.rows, slots, at, inputs.cos_sin, inputs.cache, "float8_e4m3fn", inputs.zero_nans)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The cache as it must be afterwards, a copy; the rotation is computed in `dtype`, all else is exact.

    Raises what `call` raises, and `ValueError` or `IndexError` for another form of cache and a slot beyond it.
    """
    return Outputs(rotated_records.written(call(inputs), dtype=dtype))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Codes, scales and what nobody writes bit for bit, rotated lanes within a float32 rotation's allowance."""
    return rotated_records.judge(call(inputs), outputs.cache, precision)


def _groups_of_one(inputs: Inputs) -> Inputs | None:
    if inputs.ratio == 1:
        return None
    write = call(inputs)
    positions = inputs.positions.clone()
    positions[: write.at.numel()] = write.at
    cache = moved(inputs.cache, inputs.cache.device)
    return dataclasses.replace(inputs, positions=positions, slots=write.slots, ratio=1, cache=cache)


LAWS: tuple[Law, ...] = (
    *rotated_faults.laws(call, Outputs),
    Law(
        "R8 groups of one", "the record of a group is that of its first position alone", _groups_of_one,
        lambda first, inputs, edited: first, "bitwise",
    ),
)  # fmt: skip


def _wrong(
    inputs: Inputs, ends: Callable[[torch.Tensor, int], torch.Tensor], at: Callable[[torch.Tensor, int], torch.Tensor]
) -> Outputs:
    """The answer of a writer with other ideas of which positions end a group, or of the position to turn to."""
    positions, ratio = inputs.positions[: inputs.slots.numel()], inputs.ratio
    write = _put(inputs, ends(positions, ratio), at(positions, ratio).clamp(0, inputs.cos_sin.shape[0] - 1))
    return Outputs(rotated_records.written(write))


def _ends(positions: torch.Tensor, ratio: int) -> torch.Tensor:
    return (positions + 1) % ratio == 0


def _first(positions: torch.Tensor, ratio: int) -> torch.Tensor:
    return positions // ratio * ratio


def _turned_to(at: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    return lambda inputs: _wrong(inputs, _ends, at)


def _ended_by(ends: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    return lambda inputs: _wrong(inputs, ends, _first)


def _padded_positions(inputs: Inputs) -> Outputs | None:
    extra = inputs.positions.numel() - inputs.slots.numel()
    if not extra:
        return None
    return _wrong(dataclasses.replace(inputs, positions=inputs.positions[extra:]), _ends, _first)


def _positions_in_words(inputs: Inputs) -> Outputs:
    words = inputs.positions.view(torch.int32)[: inputs.positions.numel()].long()
    return _wrong(dataclasses.replace(inputs, positions=words), _ends, _first)


def _dense_table(inputs: Inputs) -> Outputs | None:
    table = inputs.cos_sin
    if table.is_contiguous():
        return None
    dense = table.as_strided(table.shape, (table.shape[1], 1), table.storage_offset())
    return Outputs(rotated_records.written(dataclasses.replace(call(inputs), cos_sin=dense)))


MUTANTS: tuple[Mutant, ...] = (
    Mutant("turned-to-its-own-position", "a group were turned to its last position", _turned_to(lambda p, ratio: p)),
    Mutant("turned-to-the-group-number", "the group's number were the position", _turned_to(lambda p, ratio: p // ratio)),
    Mutant("turned-to-the-next-group", "a group were turned to the next one's first position",
           _turned_to(lambda p, ratio: _first(p, ratio) + ratio)),
    Mutant("every-token-writes", "a token wrote though it ends no group",
           _ended_by(lambda p, ratio: torch.ones_like(p, dtype=torch.bool))),
    Mutant("group-ended-one-late", "the first token of a group wrote", _ended_by(lambda p, ratio: p % ratio == 0)),
    Mutant("group-ended-one-early", "the last token but one of a group wrote",
           _ended_by(lambda p, ratio: (p + 2) % ratio == 0)),
    Mutant("pages-of-tokens", "a page held as many records as tokens",
           lambda inputs: Outputs(rotated_faults.paged(call(inputs), inputs.cache.shape[1] * inputs.ratio))),
    Mutant("positions-from-the-end", "the last positions were used, padding included", _padded_positions),
    Mutant("positions-in-32-bit-words", "positions were read as int32", _positions_in_words),
    Mutant("table-taken-as-dense", "the table's rows were 64 numbers apart", _dense_table),
    *rotated_faults.mutants(call, Outputs, fnuz=False, zero_nans=True),
)  # fmt: skip

HONEST: tuple[Honest, ...] = rotated_faults.honest(call, Outputs)
