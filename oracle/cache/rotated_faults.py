"""Which edits leave the answer of a writer that rotates alone, and which wrong records does such a writer write?

For the ops whose inputs have `rows`, `positions`, `cos_sin`, `slots` and `cache`, and whose calls can be put as a
`Write`. What an op has of its own, it adds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cases.memory import guarded, moved
from cases.precision import Precision
from oracle.cache import kv_record_write, records
from oracle.cache.records import DATA_BYTES, GROUPS, NOPE_LANES, RECORD_BYTES, ROPE_LANES, SCALE_BYTES
from oracle.cache.rotated_records import Turn, Write, rotated, stored, unrotated, written
from oracle.formats import numbers
from oracle.laws import Honest, Law, Mutant

HALF = ROPE_LANES // 2

Put = Callable[[Any], Write]
Answered = Callable[[torch.Tensor], Any]


def laws(put: Put, outputs: Answered) -> tuple[Law, ...]:
    """The laws of a writer, whose calls `put` puts plainly and whose answers `outputs` wraps."""

    def fresh(inputs: Any, **changes: Any) -> Any:
        return dataclasses.replace(inputs, **{"cache": moved(inputs.cache, inputs.cache.device), **changes})

    def permuted(inputs: Any) -> Any:
        count = inputs.slots.numel()
        order = torch.arange(count - 1, -1, -1, device=inputs.slots.device)
        rows, positions = inputs.rows.clone(), inputs.positions.clone()
        rows[:count], positions[:count] = inputs.rows[order], inputs.positions[order]
        return fresh(inputs, rows=rows, positions=positions, slots=inputs.slots[order])

    def other_padding(inputs: Any) -> Any | None:
        count = inputs.slots.numel()
        if inputs.rows.shape[0] == count:
            return None
        rows, positions = inputs.rows.clone(), inputs.positions.clone()
        rows[count:], positions[count:] = float("nan"), 0
        return fresh(inputs, rows=rows, positions=positions)

    def silent_dropped(inputs: Any) -> Any | None:
        taken = put(inputs).taken()
        if taken.numel() == inputs.slots.numel():
            return None
        return fresh(
            inputs, rows=inputs.rows[taken], positions=inputs.positions[taken], slots=inputs.slots[taken].clone()
        )

    def table_elsewhere(inputs: Any) -> Any:
        write = put(inputs)
        table = torch.full_like(inputs.cos_sin, float("nan"))
        needed = write.at[write.taken()]
        table[needed] = inputs.cos_sin[needed]
        return fresh(inputs, cos_sin=table)

    def wider_pages(inputs: Any) -> Any:
        blocks, block_size, width = inputs.cache.shape
        cache = guarded((blocks, block_size, width), torch.uint8, gaps=(block_size * width + 3 * 576, 0))
        cache = moved(cache, inputs.cache.device)
        cache.copy_(inputs.cache)
        return fresh(inputs, cache=cache)

    def already_written(inputs: Any) -> Any:
        return fresh(inputs, cache=written(put(inputs)))

    def doubled(inputs: Any) -> Any | None:
        taken = put(inputs).taken()
        amax = inputs.rows[taken, :NOPE_LANES].float().unflatten(1, (GROUPS, 64)).abs().amax(2)
        # Near the floor and near the largest numbers a doubled group has another code.
        if taken.numel() == 0 or float(amax.min()) < 1e-3 or float(amax.max()) > 1e30:
            return None
        rows = inputs.rows.clone()
        rows[taken, :NOPE_LANES] *= 2
        return fresh(inputs, rows=rows)

    def same(first: Any, inputs: Any, edited: Any) -> Any:
        del inputs, edited
        return first

    def scales_raised(first: Any, inputs: Any, edited: Any) -> Any:
        del edited
        write = put(inputs)
        cache = moved(first.cache, first.cache.device)
        slots, block_size = write.slots[write.taken()], cache.shape[1]
        scales = records.record_views(cache).scales
        at = (slots // block_size, slots % block_size)
        raised = scales[at]
        raised[:, :GROUPS] += 1
        scales[at] = raised
        return outputs(cache)

    return (
        Law("R1 tokens permuted", "the order of the rows does not matter", permuted, same, "bitwise"),
        Law("R2 padding changed", "what lies beyond the slots is not used", other_padding, same, "bitwise"),
        Law("R3 silent tokens dropped", "a token that writes nothing leaves no trace", silent_dropped, same, "bitwise"),
        Law("R4 other angles changed", "rows of the table for other positions are not used", table_elsewhere, same,
            "bitwise"),
        Law("R5 pages further apart", "the block stride moves pages and changes no record", wider_pages, same, "bitwise"),
        Law("R6 written twice", "what lay in the cache before does not matter", already_written, same, "bitwise"),
        Law("R7 lanes doubled", "doubled unrotated lanes have the same codes and a scale byte that is one higher", doubled,
            scales_raised, "bitwise"),
    )  # fmt: skip


def _lanes_of(write: Write) -> torch.Tensor:
    return write.rows[: write.slots.numel()]


def _with_rope(write: Write, lanes: torch.Tensor) -> torch.Tensor:
    """The cache when the writing tokens store these 64 lanes, of a dtype of two bytes, instead of the right ones."""
    rows = _lanes_of(write).clone()
    rows[write.taken(), NOPE_LANES:] = lanes.contiguous().view(torch.bfloat16)
    return kv_record_write.reference(dataclasses.replace(unrotated(write), k=rows)).cache


def _turned(turn: Turn) -> Callable[[Write], torch.Tensor]:
    return lambda write: written(write, turn)


def _first_lanes(write: Write) -> torch.Tensor:
    """The first 64 lanes rotated, the last 64 as they came."""
    taken = write.taken()
    rows = _lanes_of(write).clone()
    turned = rotated(rows[taken, :ROPE_LANES].float(), write.cos_sin[write.at[taken]])
    rows[taken, :ROPE_LANES] = numbers.round_to_bfloat16(turned)
    return kv_record_write.reference(dataclasses.replace(unrotated(write), k=rows)).cache


def _backwards(lanes: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    return rotated(lanes, torch.cat([angles[:, :HALF], -angles[:, HALF:]], 1))


def _halves(lanes: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles[:, :HALF], angles[:, HALF:]
    first, second = lanes[:, :HALF], lanes[:, HALF:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)


def _interleaved_table(lanes: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    return rotated(lanes, torch.cat([angles[:, 0::2], angles[:, 1::2]], 1))


def _even_overwritten(lanes: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles[:, :HALF], angles[:, HALF:]
    even = numbers.round_to_bfloat16(lanes[:, 0::2] * cos - lanes[:, 1::2] * sin).float()
    return torch.stack([even, lanes[:, 1::2] * cos + even * sin], -1).flatten(-2)


def _narrow_products(lanes: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles[:, :HALF], angles[:, HALF:]
    even, odd = lanes[:, 0::2], lanes[:, 1::2]
    parts = [numbers.round_to_bfloat16(p).float() for p in (even * cos, odd * sin, odd * cos, even * sin)]
    return torch.stack([parts[0] - parts[1], parts[2] + parts[3]], -1).flatten(-2)


def _toward_zero(write: Write) -> torch.Tensor:
    taken = write.taken()
    value = rotated(write.rows[taken, NOPE_LANES:].float(), write.cos_sin[write.at[taken]])
    kept = (value.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return _with_rope(write, torch.where(torch.isfinite(value), kept, stored(write)))


def _unscreened(write: Write) -> torch.Tensor:
    """NaN kept where it must become 0, and the other way round."""
    return written(dataclasses.replace(write, zero_nans=not write.zero_nans))


def _infinities_zeroed(write: Write) -> torch.Tensor:
    return _with_rope(
        write, stored(write).nan_to_num(nan=0.0 if write.zero_nans else float("nan"), posinf=0.0, neginf=0.0)
    )


def placed(
    write: Write, block: torch.Tensor, place: torch.Tensor, *, block_size: int | None = None,
    scales_of: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> torch.Tensor:  # fmt: skip
    """The cache when token t writes the right bytes to place `place[t]` of page `block[t]`, one token after the other.

    `block_size` is the writer's belief about the page, `scales_of` what it makes of the eight scale bytes. Negative
    blocks are in front of the cache; bytes outside the cache's elements are lost.
    """
    cache = moved(write.cache, write.cache.device)
    blocks, real, _ = cache.shape
    believed = block_size or real
    stride = cache.stride(0)
    pages = cache.as_strided((blocks, real * RECORD_BYTES), (stride, 1), cache.storage_offset())
    rows = unrotated(write).k
    codes, scales = records.quantise(rows, write.encoding)
    data = torch.cat([codes, rows[:, NOPE_LANES:].contiguous().view(torch.uint8)], 1)
    scales = scales_of(scales)
    for token, (page, number) in enumerate(zip(block.tolist(), place.tolist(), strict=True)):
        start = page * stride
        for first, values in (
            (start + DATA_BYTES * number, data[token]),
            (start + DATA_BYTES * believed + SCALE_BYTES * number, scales[token]),
        ):
            at = first + torch.arange(values.numel(), device=cache.device)
            index, within = at // stride, at % stride
            inside = (index >= 0) & (index < blocks) & (within < pages.shape[1])
            pages[index[inside], within[inside]] = values[inside]
    return cache


def _only(write: Write, tokens: torch.Tensor) -> Write:
    """The call of some of the tokens."""
    return dataclasses.replace(write, rows=write.rows[tokens], slots=write.slots[tokens], at=write.at[tokens])


def paged(write: Write, block_size: int | None = None, **beliefs: Any) -> torch.Tensor:
    """The cache when the writing tokens are placed by a writer that believes in pages of `block_size` records, or
    whatever else `placed` takes."""
    some = _only(write, write.taken())
    size = block_size or write.cache.shape[1]
    return placed(some, some.slots // size, some.slots % size, block_size=size, **beliefs)


def _minus_one_alone_skipped(write: Write) -> torch.Tensor:
    """Negative slots other than -1 are divided as in C, toward zero, and written in front of a page."""
    some = _only(write, (write.slots != -1).nonzero().flatten())
    some = dataclasses.replace(some, at=torch.where(some.slots < 0, 0, some.at))
    size = write.cache.shape[1]
    block = torch.div(some.slots, size, rounding_mode="trunc")
    return placed(some, block, some.slots - block * size)


def _negative_slots(write: Write, slots: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    rows = write.cache.shape[0] * write.cache.shape[1]
    negative = write.slots < 0
    moved_slots = torch.where(negative, slots(write.slots, rows), write.slots)
    some = dataclasses.replace(write, slots=moved_slots, at=torch.where(negative, 0, write.at))
    return placed(some, moved_slots // write.cache.shape[1], moved_slots % write.cache.shape[1])


def _rows_from_the_end(write: Write) -> torch.Tensor | None:
    count = write.slots.numel()
    if write.rows.shape[0] == count:
        return None
    return written(dataclasses.replace(write, rows=write.rows[write.rows.shape[0] - count :]))


def _negative_zero_dropped(write: Write) -> torch.Tensor:
    cache = written(write)
    slots, block_size = write.slots[write.taken()], cache.shape[1]
    at = (slots // block_size, slots % block_size)
    codes = records.record_views(cache).codes
    codes[at] = torch.where(codes[at] == 0x80, 0, codes[at])
    return cache


def _eighth_scale(write: Write) -> torch.Tensor:
    """Byte 7 holds the scale that the rotated lanes would have."""
    lanes = unrotated(write).k[:, NOPE_LANES:].float().nan_to_num(0.0, 0.0, 0.0)
    exponent = numbers.scale_exponent(lanes.abs().amax(1).clamp(min=records.AMAX_FLOOR), 448.0)
    eighth = (exponent + numbers.E8M0_BIAS).to(torch.uint8)[:, None]
    taken = write.taken()
    return paged(write, scales_of=lambda scales: torch.cat([scales[:, :GROUPS], eighth[taken]], 1))


def _inverted_scales(scales: torch.Tensor) -> torch.Tensor:
    return torch.cat([254 - scales[:, :GROUPS], scales[:, GROUPS:]], 1)


_Fault = Callable[[Write], torch.Tensor | None]

_FAULTS: tuple[tuple[str, str, _Fault], ...] = (
    ("rotation-missing", "the lanes were stored as they came", _turned(lambda lanes, angles: lanes)),
    ("rotated-backwards", "the lanes were rotated by the inverse", _turned(_backwards)),
    ("rotated-twice", "the lanes were rotated twice",
     _turned(lambda lanes, angles: rotated(numbers.round_to_bfloat16(rotated(lanes, angles)).float(), angles))),
    ("halves-paired", "lane k were rotated with lane k + 32", _turned(_halves)),
    ("sines-first", "the table held sines before cosines",
     _turned(lambda lanes, angles: rotated(lanes, angles.roll(HALF, 1)))),
    ("table-interleaved", "the table held cosine and sine in turn", _turned(_interleaved_table)),
    ("first-lanes-rotated", "the first 64 lanes were rotated", _first_lanes),
    ("even-lane-overwritten", "the odd lane were rotated with the new even lane", _turned(_even_overwritten)),
    ("table-in-bfloat16", "the table were rounded to bfloat16",
     _turned(lambda lanes, angles: rotated(lanes, numbers.round_to_bfloat16(angles).float()))),
    ("products-in-bfloat16", "each product were rounded to bfloat16", _turned(_narrow_products)),
    ("rotated-lanes-toward-zero", "rotated lanes were rounded toward zero", _toward_zero),
    ("infinities-zeroed", "infinities were stored as 0", _infinities_zeroed),
    ("minus-one-alone-skipped", "of the negative slots only -1 were skipped", _minus_one_alone_skipped),
    ("negative-slots-wrap", "negative slots counted from the end of the cache",
     lambda write: _negative_slots(write, lambda slots, rows: slots % rows)),
    ("skipped-into-slot-0", "tokens that write nothing were written to slot 0",
     lambda write: _negative_slots(write, lambda slots, rows: torch.zeros_like(slots))),
    ("rows-from-the-end", "the last rows were used, padding included", _rows_from_the_end),
    ("negative-zero-dropped", "-0 and negative underflow were encoded as 0x00", _negative_zero_dropped),
    ("eighth-scale-written", "the unused scale byte held the scale of the rotated lanes", _eighth_scale),
    ("scales-inverted", "the scale byte were that of the reciprocal",
     lambda write: paged(write, scales_of=_inverted_scales)),
)  # fmt: skip

# Of the writer without rotation; what happens to rows and slots has faults of its own here.
_NOT_LIFTED = ("negative-slots-wrap", "rows-from-the-end")


def mutants(put: Put, outputs: Answered, *, fnuz: bool, zero_nans: bool) -> tuple[Mutant, ...]:
    """The wrong answers that writers with a rotation share, those of the writer without one included.

    `fnuz`: whether there are calls with FNUZ codes. `zero_nans`: whether there are calls that store NaN as 0.
    """

    def wrapped(fault: _Fault) -> Callable[[Any], Any | None]:
        def answer(inputs: Any) -> Any | None:
            cache = fault(put(inputs))
            return None if cache is None else outputs(cache)

        return answer

    def lifted(mutant: Mutant) -> Callable[[Any], Any | None]:
        def answer(inputs: Any) -> Any | None:
            wrong = mutant.answer(unrotated(put(inputs)))
            return None if wrong is None else outputs(wrong.cache)

        return answer

    found = [Mutant(name, pitfall, wrapped(fault)) for name, pitfall, fault in _FAULTS]
    if zero_nans:
        pitfall = "NaN were zeroed where it is kept, and kept where it is zeroed"
        found.append(Mutant("nan-as-the-other-kind", pitfall, wrapped(_unscreened)))
    found += [
        Mutant(mutant.name, mutant.pitfall, lifted(mutant))
        for mutant in kv_record_write.MUTANTS
        if mutant.name not in _NOT_LIFTED and (fnuz or not mutant.name.startswith("fnuz"))
    ]
    return tuple(found)


def _fused(even_first: bool) -> Turn:
    """A rotation whose first or second product is not rounded before the sum."""

    def product(a: torch.Tensor, b: torch.Tensor, keep: bool) -> torch.Tensor:
        exact = a.double() * b.double()
        return exact if keep else exact.float().double()

    def turn(lanes: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        cos, sin = angles[:, :HALF], angles[:, HALF:]
        even, odd = lanes[:, 0::2], lanes[:, 1::2]
        first = product(even, cos, even_first) - product(odd, sin, not even_first)
        second = product(odd, cos, even_first) + product(even, sin, not even_first)
        return torch.stack([first, second], -1).flatten(-2).float()

    return turn


def _other_nan(write: Write) -> torch.Tensor:
    lanes = stored(write)
    return _with_rope(
        write, torch.where(torch.isnan(lanes), torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16), lanes)
    )


def honest(put: Put, outputs: Answered) -> tuple[Honest, ...]:
    """Right ways to answer: products rounded or fused with the sum either way, rounded once, other bits in NaN."""
    exactly = Precision(probability="exact", flushes=False)
    ways: tuple[tuple[str, Callable[[Write], torch.Tensor]], ...] = (
        ("products-rounded", written),
        ("first-product-fused", _turned(_fused(True))),
        ("second-product-fused", _turned(_fused(False))),
        ("rounded-once", lambda write: written(write, dtype=torch.float64)),
        ("other-nan-bits", _other_nan),
    )

    def answer(way: Callable[[Write], torch.Tensor]) -> Callable[[Any], Any]:
        return lambda inputs: outputs(way(put(inputs)))

    return tuple(Honest(name, exactly, answer(way)) for name, way in ways)
