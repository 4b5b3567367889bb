"""Which codes and scale bytes are those of attention rows whose rotary embedding has been undone?

    y = the inverse rotation of the row, in float32        codes, scales = MXFP8 of y, blocks of 32 lanes of a head

with the rotation of `oracle.rotation` and the quantisation of `oracle.quant.mxfp8_rows`; y is not rounded to bfloat16
in between. Block j of head h has scale column h * head_dim / 32 + j. Source: vLLM's `rocm_inverse_rope_mxfp8_rows`.

The judge. Each lane of y lies within the bound of the rotation. A scale byte is right when some largest magnitude within
these bounds has it (see `oracle.quant.mxfp8_rows` for those just above a limit), and each code must then lie between the
codes, under the byte found, of the two ends of its lane's bound: lanes that do not turn are exact.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.memory import guarded_copy, is_vast, moved, storage_bytes
from cases.precision import Precision
from cases.quant import mxfp8_rows as quantising
from cases.quant.inverse_rope_mxfp8_rows import Inputs, Outputs
from oracle import mxfp8, rotation
from oracle.check import Check, codes, exact, wrong_form
from oracle.formats import numbers
from oracle.laws import Honest, Law, Mutant
from oracle.mxfp8 import BLOCK
from oracle.quant import mxfp8_rows
from oracle.quant.mxfp8_rows import scale_range
from oracle.rotation import Factors, form

_SMALLEST_NORMAL = 2.0**-126


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The answer with a rotation in `dtype`; fresh tensors, whose first `finished` rows are those of the call.

    A call without rows is answered before anything is looked at. Raises `TypeError` for wrong dtypes and `ValueError`
    for shapes, strides, positions and counts that are not the op's.
    """
    if inputs.rows.shape[0] == 0:
        return Outputs(inputs.codes.clone(), inputs.scales.clone())
    _refuse(inputs)
    return _quantised(inputs, _turned(inputs, lambda rows, cos_sin: rotation.turn(rows, cos_sin, dtype)))


def _refuse(inputs: Inputs) -> None:
    rotation.refuse(inputs.rows, inputs.positions, inputs.cos_sin, inputs.finished)
    tokens, heads, lanes = inputs.rows.shape
    if lanes % BLOCK:
        raise ValueError(f"head_dim={lanes}: should be a multiple of {BLOCK}")
    wanted = (
        ("codes", inputs.codes, torch.float8_e4m3fn, heads * lanes),
        ("scales", inputs.scales, torch.uint8, heads * lanes // BLOCK),
    )
    for name, tensor, dtype, width in wanted:
        if tensor.dtype != dtype:
            raise TypeError(f"{name}={tensor.dtype}: should be {dtype}")
        if tuple(tensor.shape) != (tokens, width):
            raise ValueError(f"{name}={form(tensor)}: should be of [{tokens}, {width}]")
        if tensor.stride(1) != 1:
            raise ValueError(f"lane stride of {name}={tensor.stride(1)}: should be 1")


_Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _turned(inputs: Inputs, turn: _Turn, positions: torch.Tensor | None = None) -> torch.Tensor:
    """What `turn` makes of the rows behind the finished ones and the table rows of their positions, or of others."""
    positions = inputs.positions[inputs.finished :] if positions is None else positions
    return turn(inputs.rows[inputs.finished :], inputs.cos_sin[positions.long()])


def _quantised(inputs: Inputs, rows: torch.Tensor) -> Outputs:
    """The answer when the rows behind the finished ones become `rows`, float32 or float64, and are quantised."""
    return _behind(inputs, *mxfp8.quantise(rows.flatten(1)))


def _behind(inputs: Inputs, codes: torch.Tensor, scales: torch.Tensor) -> Outputs:
    """Codes (uint8) and scales behind those of the finished rows."""
    done = inputs.finished
    return Outputs(
        torch.cat((inputs.codes.view(torch.uint8)[:done], codes)).view(torch.float8_e4m3fn),
        torch.cat((inputs.scales[:done], scales)),
    )


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Three checks: the bytes of the finished rows, the scales, and the codes under the scales found.

    `precision` says what the products and sums of the rotation are kept in and whether subnormal numbers may be flushed.
    """
    want = reference(inputs, torch.float64)
    for name in ("codes", "scales"):
        misshapen = wrong_form(name, getattr(outputs, name), getattr(want, name))
        if misshapen is not None:
            return (misshapen,)
    done = inputs.finished
    value = _turned(inputs, lambda rows, cos_sin: rotation.turn(rows, cos_sin, torch.float64)).flatten(1)
    budget = _turned(inputs, lambda rows, cos_sin: rotation.bound(rows, cos_sin, precision)).flatten(1)
    least, most = value - budget, value + budget
    if precision.flushes:
        lost = value.abs() - budget < _SMALLEST_NORMAL
        least, most = torch.where(lost, least.clamp(max=0), least), torch.where(lost, most.clamp(min=0), most)
    nearest = torch.where((least <= 0) & (most >= 0), 0.0, torch.minimum(least.abs(), most.abs()))
    low, _ = scale_range(_amax(nearest))
    _, high = scale_range(_amax(torch.maximum(least.abs(), most.abs())))
    found = outputs.scales[done:].int()
    right = (found >= low) & (found <= high)
    settled = torch.where(right, found, want.scales[done:].int()).to(torch.uint8)
    front = torch.zeros(want.codes.shape, dtype=torch.bool)
    front[:done] = True
    return (
        exact(
            "codes", outputs.codes.view(torch.uint8), want.codes.view(torch.uint8), mask=front,
            why="rows that were finished before are left alone",
        ),
        exact(
            "scales", outputs.scales, torch.cat((want.scales[:done], settled)),
            why="the scale is the smallest that takes the turned block's largest magnitude to 448 or less, and rows that "
            "were finished before are left alone",
        ),
        codes(
            "turned codes", outputs.codes[done:], _rounded(least, settled), _rounded(most, settled),
            dtype=torch.float8_e4m3fn, why="no turned lane within its bound rounds to this code under the block's scale",
        ),
    )  # fmt: skip


def _amax(rows: torch.Tensor) -> torch.Tensor:
    amax: torch.Tensor = rows.unflatten(1, (-1, BLOCK)).amax(2)
    return amax


def _rounded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers that the codes of `rows` under `scales` stand for, float32, before the scale."""
    return numbers.decode(numbers.encode(mxfp8.scaled(rows, scales), "float8_e4m3fn"), "float8_e4m3fn")


def _fresh(inputs: Inputs, **changes: torch.Tensor) -> Inputs:
    """The same call on memory of its own, some of its tensors replaced."""
    fresh = {name: moved(getattr(inputs, name), inputs.rows.device) for name in ("codes", "scales")}
    return dataclasses.replace(inputs, **{**fresh, **changes})  # type: ignore[arg-type]


def _with_rows(inputs: Inputs, rows: torch.Tensor) -> Inputs:
    fresh = moved(inputs.rows, inputs.rows.device)
    fresh.copy_(rows)
    return _fresh(inputs, rows=fresh)


def _rows_reversed(inputs: Inputs) -> Inputs | None:
    if inputs.finished:
        return None
    return dataclasses.replace(_with_rows(inputs, inputs.rows.flip(0)), positions=inputs.positions.flip(0))


def _reversed_answer(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.codes.view(torch.uint8).flip(0).view(torch.float8_e4m3fn), first.scales.flip(0))


def _heads_reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    heads = inputs.rows.shape[1]
    codes, scales = (
        part[inputs.finished :].unflatten(1, (heads, -1)).flip(1).flatten(1)
        for part in (first.codes.view(torch.uint8), first.scales)
    )
    return _behind(edited, codes, scales)


def _front_of_edited(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    """The first answer behind the finished rows, which are those that the edited call found."""
    done = inputs.finished
    return _behind(edited, first.codes.view(torch.uint8)[done:], first.scales[done:])


def _other_memory(inputs: Inputs) -> Inputs:
    codes = torch.zeros(inputs.codes.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return dataclasses.replace(inputs, codes=codes, scales=torch.zeros_like(inputs.scales))


def _wider_buffers(inputs: Inputs) -> Inputs | None:
    if is_vast(inputs.codes) or is_vast(inputs.scales):
        return None
    return dataclasses.replace(
        inputs, codes=guarded_copy(inputs.codes, gaps=(48,)), scales=guarded_copy(inputs.scales, gaps=(7,))
    )


def _other_integer(inputs: Inputs) -> Inputs:
    other = torch.int32 if inputs.positions.dtype == torch.int64 else torch.int64
    return _fresh(inputs, positions=inputs.positions.to(other))


def _table_reversed(inputs: Inputs) -> Inputs:
    return _fresh(
        inputs, positions=inputs.cos_sin.shape[0] - 1 - inputs.positions, cos_sin=inputs.cos_sin.flip(0).contiguous()
    )


def _no_turn(inputs: Inputs) -> Inputs:
    table = torch.zeros_like(inputs.cos_sin)
    table[:, : table.shape[1] // 2] = 1.0
    return _fresh(inputs, cos_sin=table)


def _only_quantised(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del first
    return _quantised(edited, inputs.rows[inputs.finished :].float())


def _turned_forward(inputs: Inputs) -> Inputs:
    """Rows that a quarter turn forward, exact in every format, has taken to where the call finds them."""
    table = torch.zeros_like(inputs.cos_sin)
    half = table.shape[1] // 2
    table[:, half:] = torch.where(torch.arange(half) % 2 > 0, -1.0, 1.0)
    rows = inputs.rows.clone()
    behind = rows[inputs.finished :]
    turns = table[:1].expand(behind.shape[0], -1)
    rows[inputs.finished :] = rotation.turn(behind, turns, torch.float64, inverse=False).to(rows.dtype)
    return dataclasses.replace(_with_rows(inputs, rows), cos_sin=table)


def _doubled(inputs: Inputs) -> Inputs | None:
    """Only where no scale is near its ends and every number, twice and once, is normal or zero."""
    size = inputs.rows[inputs.finished :].float().abs()
    if size.numel() == 0 or not bool(((size == 0) | ((size > 2.0**-60) & (size < 2.0**100))).all()):
        return None
    if bool((reference(inputs).scales[inputs.finished :] == 0).any()):
        return None
    return _with_rows(inputs, inputs.rows * 2)


def _scales_raised(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    done = inputs.finished
    return _behind(edited, first.codes.view(torch.uint8)[done:], first.scales[done:] + 1)


def _without_signs_of_zero(answer: Outputs) -> Outputs:
    codes = answer.codes.view(torch.uint8)
    return Outputs(torch.where(codes == 0x80, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn), answer.scales)


def _law(
    name: str,
    claim: str,
    edit: Callable[[Inputs], Inputs | None],
    expect: Callable[[Outputs, Inputs, Inputs], Outputs] = _front_of_edited,
) -> Law:
    return Law(name, claim, edit, expect, "bitwise", _without_signs_of_zero)


LAWS: tuple[Law, ...] = (
    _law("Y1 rows reversed", "a row depends on its lanes and position only", _rows_reversed, _reversed_answer),
    _law(
        "Y2 heads reversed", "all heads of a row turn alike, each with scales of its own",
        lambda inputs: _with_rows(inputs, inputs.rows.flip(1)), _heads_reversed,
    ),
    _law("Y3 other memory", "what codes and scales held before does not matter", _other_memory),
    _law("Y4 wider buffers", "codes and scales may be parts of wider rows", _wider_buffers),
    _law("Y5 another integer", "positions may be int32 or int64", _other_integer),
    _law("Y6 table reversed", "a position is nothing but a row of the table", _table_reversed),
    _law("Y7 no turn", "an angle of zero leaves rows that are only quantised", _no_turn, _only_quantised),
    _law(
        "Y8 turned forward before", "the inverse undoes a quarter turn forward, bit for bit", _turned_forward,
        _only_quantised,
    ),
    _law("Y9 doubled", "doubled rows have the same codes and scales that are one higher", _doubled, _scales_raised),
    _law("Y10 the same call again", "the answer is the same every time", _fresh),
)  # fmt: skip


def _exactly(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    return rotation.turn(rows, cos_sin, torch.float64)


def _by(turn: _Turn) -> Callable[[Inputs], Outputs]:
    """Rows that `turn` turns."""
    return lambda inputs: _quantised(inputs, _turned(inputs, turn))


def _at(positions: Callable[[Inputs], torch.Tensor | None]) -> Callable[[Inputs], Outputs | None]:
    """Rows that are turned by other positions of the rows behind the finished ones."""

    def answer(inputs: Inputs) -> Outputs | None:
        other = positions(inputs)
        return None if other is None else _quantised(inputs, _turned(inputs, _exactly, other))

    return answer


def _front_positions(inputs: Inputs) -> torch.Tensor | None:
    return inputs.positions[: inputs.rows.shape[0] - inputs.finished] if inputs.finished else None


def _positions_one_apart(inputs: Inputs) -> torch.Tensor | None:
    positions = inputs.positions
    if positions.numel() < 2 or positions.stride(0) == 1:
        return None
    return positions.as_strided(positions.shape, (1,), int(positions.storage_offset()))[inputs.finished :]


def _with_halves(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Lane k of the last lanes is paired with lane k + rotary / 2."""
    first, rotary = rows.shape[-1] - cos_sin.shape[-1], cos_sin.shape[-1]
    order = torch.cat((torch.arange(first), first + torch.arange(rotary).view(2, -1).T.flatten()))
    out = torch.empty(rows.shape, dtype=torch.float64)
    out[..., order] = _exactly(rows[..., order], cos_sin)
    return out


def _first_lanes(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    rotary = cos_sin.shape[-1]
    return _exactly(rows.roll(-rotary, -1), cos_sin).roll(rotary, -1)


def _all_pairs(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Lanes in front of the pairs turn too, by the angle of the first pair."""
    half, pairs = cos_sin.shape[-1] // 2, rows.shape[-1] // 2
    spread = torch.cat(
        [
            torch.cat((angles[..., :1].expand(*angles.shape[:-1], pairs - half), angles), dim=-1)
            for angles in (cos_sin[..., :half], cos_sin[..., half:])
        ],
        dim=-1,
    )
    return _exactly(rows, spread)


def _offsets_wrapped(inputs: Inputs) -> Outputs | None:
    """Offsets of 32 bits: far rows are read from before the tensor, and written there."""
    if not any(map(is_vast, (inputs.rows, inputs.codes, inputs.scales))):
        return None
    right = reference(inputs, torch.float64)
    codes, scales = right.codes.view(torch.uint8).clone(), right.scales.clone()
    number = torch.arange(inputs.rows.shape[0]) - inputs.finished
    behind = number >= 0
    for operand, target, lost in (
        (inputs.rows, codes, torch.full_like(codes, 0x7F)),
        (inputs.codes, codes, inputs.codes.view(torch.uint8)),
        (inputs.scales, scales, inputs.scales),
    ):
        if is_vast(operand):
            far = behind & (number * operand.stride(0) >= 1 << 31)
            target[far] = lost[far]
    return Outputs(codes.view(torch.float8_e4m3fn), scales)


def _pitch_ignored(name: str) -> Callable[[Inputs], Outputs | None]:
    """Rows of `name` are stored as if nothing lay between them."""

    def answer(inputs: Inputs) -> Outputs | None:
        target: torch.Tensor = getattr(inputs, name)
        if target.stride(0) == target.shape[1] or is_vast(target) or target.shape[0] == inputs.finished:
            return None
        stored = moved(target, target.device)
        base = int(stored.storage_offset()) + inputs.finished * stored.stride(0)
        rows = getattr(reference(inputs, torch.float64), name)[inputs.finished :].view(torch.uint8)
        storage_bytes(stored)[base : base + rows.numel()] = rows.flatten()
        return dataclasses.replace(reference(inputs, torch.float64), **{name: stored.clone()})

    return answer


def _finished_rows_redone(inputs: Inputs) -> Outputs | None:
    if not inputs.finished:
        return None
    all_rows = dataclasses.replace(inputs, finished=0)
    return _quantised(all_rows, _turned(all_rows, _exactly))


def _split_of_another_batch(inputs: Inputs) -> Outputs | None:
    """One row too many counts as finished."""
    if inputs.finished >= inputs.rows.shape[0]:
        return None
    right = reference(inputs, torch.float64)
    codes, scales = right.codes.view(torch.uint8).clone(), right.scales.clone()
    codes[inputs.finished] = inputs.codes.view(torch.uint8)[inputs.finished]
    scales[inputs.finished] = inputs.scales[inputs.finished]
    return Outputs(codes.view(torch.float8_e4m3fn), scales)


def _amax_across_heads(inputs: Inputs) -> Outputs | None:
    heads = inputs.rows.shape[1]
    if heads == 1:
        return None
    turned = _turned(inputs, _exactly)
    amax = turned.unflatten(2, (-1, BLOCK)).abs().amax(3).amax(1, keepdim=True)
    scales = mxfp8.scale_bytes(amax.expand(-1, heads, -1).flatten(1))
    return _behind(inputs, numbers.encode(mxfp8.scaled(turned.flatten(1), scales), "float8_e4m3fn"), scales)


def _reordered(columns: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """Right codes with scales in another order; `columns` rearranges [tokens, heads, blocks]."""

    def answer(inputs: Inputs) -> Outputs:
        right = reference(inputs, torch.float64)
        scales = right.scales[inputs.finished :].unflatten(1, (inputs.rows.shape[1], -1))
        codes = right.codes.view(torch.uint8)[inputs.finished :]
        return _behind(inputs, codes, columns(scales).flatten(1))

    return answer


def _quantised_by(
    answer: Callable[[quantising.Inputs], quantising.Outputs | None],
) -> Callable[[Inputs], Outputs | None]:
    """Rows that are turned rightly, in float32, and quantised by another quantiser."""

    def composed(inputs: Inputs) -> Outputs | None:
        rows = _turned(inputs, lambda rows, cos_sin: rotation.turn(rows, cos_sin, torch.float32)).flatten(1)
        found = answer(quantising.Inputs(rows))
        return None if found is None else _behind(inputs, found.codes.view(torch.uint8), found.scales)

    return composed


# Faults of a quantiser that matter here too; those of signs of zero and of tiles of rows are another kernel's.
_QUANTISER_FAULTS = tuple(
    Mutant(mutant.name, mutant.pitfall, _quantised_by(mutant.answer))
    for mutant in mxfp8_rows.MUTANTS
    if mutant.name not in ("sign-of-zero-lost", "last-rows-left", "scales-by-column", "rounded-to-bfloat16-first")
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant("rotation-missing", "rows were only quantised", _by(lambda rows, cos_sin: rows.double())),
    Mutant(
        "turned-twice", "rows were turned back twice",
        _by(lambda rows, cos_sin: _exactly(_exactly(rows, cos_sin).float(), cos_sin)),
    ),
    Mutant(
        "turned-forward", "rows were turned forward",
        _by(lambda rows, cos_sin: rotation.turn(rows, cos_sin, torch.float64, inverse=False)),
    ),
    Mutant("halves-paired", "lane k were paired with lane k + rotary / 2", _by(_with_halves)),
    Mutant("first-lanes-turned", "the first lanes of a head were turned instead of the last", _by(_first_lanes)),
    Mutant("all-lanes-turned", "lanes in front of the pairs turned by the angle of the first pair", _by(_all_pairs)),
    Mutant(
        "cosines-for-sines", "sines stood in front of cosines",
        _by(lambda rows, cos_sin: _exactly(rows, cos_sin.roll(cos_sin.shape[-1] // 2, -1))),
    ),
    Mutant(
        "table-interleaved", "the table held a cosine and a sine in turn",
        _by(lambda rows, cos_sin: _exactly(rows, torch.cat((cos_sin[..., 0::2], cos_sin[..., 1::2]), -1))),
    ),
    Mutant(
        "rounded-to-bfloat16-first", "turned rows were rounded to bfloat16 before they were quantised",
        _by(lambda rows, cos_sin: numbers.round_to_bfloat16(_exactly(rows, cos_sin)).float()),
    ),
    Mutant("positions-of-the-front", "rows took the positions of the first rows", _at(_front_positions)),
    Mutant(
        "first-position-for-all", "all rows had the position of the first",
        _at(lambda inputs: inputs.positions[inputs.finished :][:1].expand(inputs.rows.shape[0] - inputs.finished)),
    ),
    Mutant(
        "position-one-less", "each row were turned by the position before its own",
        _at(lambda inputs: (inputs.positions[inputs.finished :] - 1).clamp(min=0)),
    ),
    Mutant("positions-stride-ignored", "positions lay one apart", _at(_positions_one_apart)),
    Mutant("finished-rows-redone", "rows that had been finished were written again", _finished_rows_redone),
    Mutant("split-of-another-batch", "one row too many counted as finished", _split_of_another_batch),
    Mutant("offsets-of-32-bits", "the offset of a row were a 32-bit product", _offsets_wrapped),
    Mutant("codes-pitch-ignored", "rows of codes lay heads * head_dim apart", _pitch_ignored("codes")),
    Mutant("scales-pitch-ignored", "rows of scales lay heads * head_dim / 32 apart", _pitch_ignored("scales")),
    Mutant("amax-across-heads", "the same block of all heads shared a scale", _amax_across_heads),
    Mutant("scales-by-block", "scale columns counted blocks before heads", _reordered(lambda scales: scales.mT)),
    *_QUANTISER_FAULTS,
)  # fmt: skip


def _added_by(add: Callable[[Factors, Factors], torch.Tensor], dtype: torch.dtype) -> Callable[[Inputs], Outputs]:
    """Rows whose turned lanes `add` makes of the factors, in `dtype`."""
    return _by(lambda rows, cos_sin: rotation.turn(rows, cos_sin, dtype, add=add))


def _first_fused(left: Factors, right: Factors) -> torch.Tensor:
    """The first product enters the float32 sum unrounded."""
    return (left[0] * left[1] + (right[0] * right[1]).float().double()).float().double()


def _flushed(inputs: Inputs) -> Outputs:
    """Float32 arithmetic without subnormal numbers, in lanes that turn and in those that do not."""

    def add(left: Factors, right: Factors) -> torch.Tensor:
        products = [_normal(_normal(one) * _normal(other)) for one, other in (left, right)]
        return _normal(products[0] + products[1])

    return _by(lambda rows, cos_sin: _normal(rotation.turn(rows, cos_sin, torch.float32, add=add)))(inputs)


def _normal(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < _SMALLEST_NORMAL, 0.0, values)


def _zeros_negative(inputs: Inputs) -> Outputs:
    """Every zero code behind the finished rows is that of -0."""
    right = reference(inputs, torch.float64)
    codes = right.codes.view(torch.uint8)[inputs.finished :]
    return _behind(inputs, torch.where(codes == 0, 0x80, codes).to(torch.uint8), right.scales[inputs.finished :])


_EXACT = Precision(accumulate="exact", flushes=False, note="float64")
_SINGLE = Precision(flushes=False, note="float32 products and sums")
_LOGARITHM = next(way for way in mxfp8_rows.HONEST if way.name == "scale-by-logarithm")

HONEST: tuple[Honest, ...] = (
    Honest("exact", _EXACT, _by(_exactly)),
    Honest("float32", _SINGLE, _added_by(rotation.sum_of_products, torch.float32)),
    Honest("first-product-fused", _SINGLE, _added_by(_first_fused, torch.float64)),
    Honest(
        "second-product-fused", _SINGLE, _added_by(lambda left, right: _first_fused(right, left), torch.float64)
    ),
    Honest("scale-by-logarithm", _SINGLE, _quantised_by(_LOGARITHM.answer)),
    Honest("subnormals-flushed", Precision(note="float32 that flushes subnormal numbers"), _flushed),
    Honest("zeros-negative", _EXACT, _zeros_negative),
)  # fmt: skip
