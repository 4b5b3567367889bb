"""Which rows are left when the rotary embedding of attention rows has been undone?

    a' = rne_bf16(a * c + b * s),  b' = rne_bf16(b * c - a * s)     (a, b) = lanes (nope + 2k, nope + 2k + 1) of a head
    c = cos_sin[position, k],  s = cos_sin[position, rotary / 2 + k]     x' = rne_bf16(x) for the first `nope` lanes

for the rows from `rotated` on, with the positions of the same rows. Source: vLLM's `_fused_inverse_rope_gptj` and
`rocm_inverse_rope_rows_`, whose arithmetic is float32; a compiler may fuse a product with the sum. The lanes that stay
are exact; each lane that turns must be the rounding of some number within the bound of `oracle.rotation`.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.memory import is_vast, moved
from cases.precision import Precision
from cases.sparse_mla.inverse_rope import Inputs, Outputs
from oracle import rotation
from oracle.check import Check, bounded, exact, wrong_form
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Law, Mutant
from oracle.rotation import Factors, form


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The answer, computed in `dtype` and rounded to bfloat16; a fresh tensor, also where the call names an out.

    Raises `TypeError` for wrong dtypes and `ValueError` for shapes, strides, positions and counts that are not the op's.
    """
    _refuse(inputs)
    turned = _turned(inputs, lambda rows, cos_sin: rotation.turn(rows, cos_sin, dtype))
    return _answer(inputs, round_to_bfloat16(turned))


def _refuse(inputs: Inputs) -> None:
    """Raises on calls that have no answer; the optimised kernels look at few of these."""
    source, out = inputs.source, inputs.out
    rotation.refuse(source, inputs.positions, inputs.cos_sin, inputs.rotated)
    if out is None:
        if inputs.rotated:
            raise ValueError(f"rotated={inputs.rotated}: should be 0 without an out that holds the rows in front")
        return
    if out.dtype != torch.bfloat16:
        raise TypeError(f"out={out.dtype}: should be torch.bfloat16")
    if out.shape != source.shape:
        raise ValueError(f"out={form(out)}: should be of {list(source.shape)}, as the rows are")
    if out.stride(2) != 1:
        raise ValueError(f"lane stride of out={out.stride(2)}: should be 1")


_Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _turned(inputs: Inputs, turn: _Turn, positions: torch.Tensor | None = None) -> torch.Tensor:
    """What `turn` makes of the rows behind the rotated ones and the table rows of their positions, or of others."""
    positions = inputs.positions[inputs.rotated :] if positions is None else positions
    return turn(inputs.source[inputs.rotated :], inputs.cos_sin[positions.long()])


def _answer(inputs: Inputs, rows: torch.Tensor) -> Outputs:
    """All rows of the answer when those behind the rotated ones become `rows`, bfloat16."""
    if inputs.out is None:
        return Outputs(rows)
    return Outputs(torch.cat((inputs.out[: inputs.rotated], rows)))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Two checks: lanes that stay and rows in front, bit for bit; all lanes, within the bound of the rotation.

    `precision` says what the products and sums are kept in and whether subnormal numbers may be flushed.
    """
    want = reference(inputs, torch.float64).out
    got = outputs.out
    misshapen = wrong_form("out", got, want)
    if misshapen is not None:
        return (misshapen,)
    exactly = torch.ones(want.shape, dtype=torch.bool)
    exactly[inputs.rotated :, :, want.shape[2] - inputs.cos_sin.shape[1] :] = False
    value, budget = want.double(), torch.zeros(want.shape, dtype=torch.float64)
    value[inputs.rotated :] = _turned(inputs, lambda rows, cos_sin: rotation.turn(rows, cos_sin, torch.float64))
    budget[inputs.rotated :] = _turned(inputs, lambda rows, cos_sin: rotation.bound(rows, cos_sin, precision))
    return (
        exact(
            "out", _one_nan(got), _one_nan(want), mask=exactly,
            why="lanes in front of the pairs are only rounded, and rows that were turned before are left alone",
        ),
        bounded(
            "out", got, value, budget, dtype=torch.bfloat16, rounding=torch.bfloat16,
            why=f"no number within the bound of {precision.accumulate} products and sums rounds to this",
        ),
    )  # fmt: skip


def _one_nan(out: torch.Tensor) -> torch.Tensor:
    """`out` with every NaN replaced by the same one."""
    return torch.where(torch.isnan(out), torch.full((), float("nan"), dtype=out.dtype), out)


def _fresh(inputs: Inputs) -> Inputs:
    """The same call on memory of its own."""
    return dataclasses.replace(
        inputs,
        rows=None if inputs.rows is None else moved(inputs.rows, inputs.rows.device),
        out=None if inputs.out is None else moved(inputs.out, inputs.out.device),
    )


def _with_source(inputs: Inputs, source: torch.Tensor) -> Inputs:
    """The same call on memory of its own, where the rows are `source`."""
    fresh = _fresh(inputs)
    fresh.source.copy_(source)
    return fresh


def _rows_reversed(inputs: Inputs) -> Inputs | None:
    if inputs.rotated:
        return None
    edited = _with_source(inputs, inputs.source.flip(0))
    return dataclasses.replace(edited, positions=inputs.positions.flip(0))


def _other_nope_lanes(inputs: Inputs) -> Inputs:
    nope = inputs.source.shape[2] - inputs.cos_sin.shape[1]
    source = inputs.source.clone()
    source[inputs.rotated :, :, :nope] = torch.arange(nope) % 100 - 50.0
    return _with_source(inputs, source)


def _nope_replaced(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    out = first.out.clone()
    nope = out.shape[2] - inputs.cos_sin.shape[1]
    out[inputs.rotated :, :, :nope] = edited.source[inputs.rotated :, :, :nope].to(torch.bfloat16)
    return Outputs(out)


def _other_form(inputs: Inputs) -> Inputs | None:
    """In place where it was not; into another tensor where it was."""
    if inputs.rows is None:
        assert inputs.out is not None
        return dataclasses.replace(_fresh(inputs), rows=inputs.out.clone(), out=torch.zeros_like(inputs.out))
    if inputs.rows.dtype != torch.bfloat16:
        return None
    return dataclasses.replace(_fresh(inputs), rows=None, out=moved(inputs.rows, inputs.rows.device))


def _front_of_edited(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    """The first answer behind the rows in front, which are those that the edited call found."""
    if edited.out is None:
        return first
    return Outputs(torch.cat((edited.out[: inputs.rotated], first.out[inputs.rotated :])))


def _out_zeroed(inputs: Inputs) -> Inputs | None:
    if inputs.rows is None or inputs.out is None:
        return None
    edited = _fresh(inputs)
    assert edited.out is not None
    edited.out.zero_()
    return edited


def _other_integer(inputs: Inputs) -> Inputs:
    other = torch.int32 if inputs.positions.dtype == torch.int64 else torch.int64
    return dataclasses.replace(_fresh(inputs), positions=inputs.positions.to(other))


def _table_reversed(inputs: Inputs) -> Inputs:
    last = inputs.cos_sin.shape[0] - 1
    return dataclasses.replace(_fresh(inputs), positions=last - inputs.positions, cos_sin=inputs.cos_sin.flip(0))


def _no_turn(inputs: Inputs) -> Inputs:
    table = torch.zeros_like(inputs.cos_sin)
    table[:, : table.shape[1] // 2] = 1.0
    # An infinite partner times the zero of the sine would be NaN.
    return dataclasses.replace(_with_source(inputs, _finite(inputs.source)), cos_sin=table)


def _finite(rows: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(rows), rows, torch.ones((), dtype=rows.dtype))


def _only_rounded(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del first
    return _answer(edited, round_to_bfloat16(_finite(inputs.source[inputs.rotated :]).float()))


def _turned_forward(inputs: Inputs) -> Inputs:
    """Rows that a quarter turn forward, exact in every format, has taken to where the call finds them."""
    table = torch.zeros_like(inputs.cos_sin)
    half = table.shape[1] // 2
    table[:, half:] = torch.where(torch.arange(half) % 2 > 0, -1.0, 1.0)
    source = _finite(inputs.source)
    behind = source[inputs.rotated :]
    turns = table[:1].expand(behind.shape[0], -1)
    source[inputs.rotated :] = rotation.turn(behind, turns, torch.float64, inverse=False).to(source.dtype)
    return dataclasses.replace(_with_source(inputs, source), cos_sin=table)


def _halved(inputs: Inputs) -> Inputs | None:
    """Only where all numbers stay normal and finite."""
    size = inputs.source[inputs.rotated :].float().abs()
    if inputs.rows is not None and inputs.rows.dtype == torch.float16:
        return None
    if not bool(((size == 0) | ((size > 2.0**-60) & (size < 2.0**100))).all()):
        return None
    return _with_source(inputs, inputs.source / 2)


def _halved_answer(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    return _front_of_edited(Outputs(first.out / 2), inputs, edited)


def _heads_reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    return _front_of_edited(Outputs(first.out.flip(1)), inputs, edited)


LAWS: tuple[Law, ...] = (
    Law(
        "R1 rows reversed", "a row depends on its own lanes and position only", _rows_reversed,
        lambda first, inputs, edited: Outputs(first.out.flip(0)), "bitwise",
    ),
    Law(
        "R2 heads reversed", "all heads of a row turn alike, each by itself",
        lambda inputs: _with_source(inputs, inputs.source.flip(1)), _heads_reversed, "bitwise",
    ),
    Law(
        "R3 other lanes in front", "lanes in front of the pairs pass through and change no pair", _other_nope_lanes,
        _nope_replaced, "bitwise",
    ),
    Law("R4 another form", "in place and out of place give the same bits", _other_form, _front_of_edited, "bitwise"),
    Law("R5 other memory", "what out held before does not matter", _out_zeroed, _front_of_edited, "bitwise"),
    Law("R6 another integer", "positions may be int32 or int64", _other_integer, _front_of_edited, "bitwise"),
    Law(
        "R7 table reversed", "a position is nothing but a row of the table", _table_reversed, _front_of_edited,
        "bitwise",
    ),
    Law("R8 no turn", "an angle of zero leaves the row as it is", _no_turn, _only_rounded, "bitwise"),
    Law(
        "R9 turned forward before", "the inverse undoes a turn forward, bit for bit where it is a quarter",
        _turned_forward, _only_rounded, "bitwise",
    ),
    Law("R10 halved", "half the row gives half the answer", _halved, _halved_answer, "bitwise"),
    Law("R11 the same call again", "the answer is the same every time", _fresh, _front_of_edited, "bitwise"),
)  # fmt: skip


def _rounded_answer(inputs: Inputs, turn: _Turn, positions: torch.Tensor | None = None) -> Outputs:
    return _answer(inputs, round_to_bfloat16(_turned(inputs, turn, positions)))


def _exactly(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    return rotation.turn(rows, cos_sin, torch.float64)


def _by(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """Rows that are turned by the angles of a changed table."""
    return lambda inputs: _rounded_answer(inputs, lambda rows, cos_sin: _exactly(rows, change(cos_sin)))


def _added_by(add: Callable[[Factors, Factors], torch.Tensor], dtype: torch.dtype) -> Callable[[Inputs], Outputs]:
    """Rows whose lanes `add` makes of the factors, in `dtype`."""
    return lambda inputs: _rounded_answer(inputs, lambda rows, cos_sin: rotation.turn(rows, cos_sin, dtype, add=add))


def _in_other_lanes(inputs: Inputs, order: Callable[[int, int], torch.Tensor]) -> Outputs | None:
    """Rows whose pairs are formed by the lanes that `order` (of head_dim and rotary) puts last."""
    lanes = inputs.source.shape[2]
    permuted = order(lanes, inputs.cos_sin.shape[1])
    if permuted.unique().numel() != lanes:
        return None

    def turn(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        out = torch.empty(rows.shape, dtype=torch.float64)
        out[..., permuted] = _exactly(rows[..., permuted], cos_sin)
        return out

    return _rounded_answer(inputs, turn)


def _halves(lanes: int, rotary: int) -> torch.Tensor:
    """Pairs of a lane of the first half and one of the second."""
    first = lanes - rotary
    return torch.cat((torch.arange(first), first + torch.arange(rotary).view(2, -1).T.flatten()))


def _first_lanes(lanes: int, rotary: int) -> torch.Tensor:
    return torch.arange(lanes).roll(lanes - rotary)


def _one_lane_early(lanes: int, rotary: int) -> torch.Tensor:
    first = lanes - rotary
    return torch.cat((torch.arange(first - 1), torch.tensor([lanes - 1]), torch.arange(first - 1, lanes - 1)))


def _pairs_reversed(inputs: Inputs) -> Outputs:
    half = inputs.cos_sin.shape[1] // 2
    return _by(lambda cos_sin: torch.cat((cos_sin[..., :half].flip(-1), cos_sin[..., half:].flip(-1)), dim=-1))(inputs)


def _interleaved_table(cos_sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((cos_sin[..., 0::2], cos_sin[..., 1::2]), dim=-1)


def _swapped_table(cos_sin: torch.Tensor) -> torch.Tensor:
    return cos_sin.roll(cos_sin.shape[-1] // 2, dims=-1)


def _last_pair_left(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    out = _exactly(rows, cos_sin)
    out[..., -2:] = rows[..., -2:].double()
    return out


def _even_first(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """The even lane is stored before the odd one is computed from it."""
    out = _exactly(rows, cos_sin)
    first, half = rows.shape[-1] - cos_sin.shape[-1], cos_sin.shape[-1] // 2
    even = round_to_bfloat16(out[..., first::2]).double()
    cos, sin = cos_sin[..., None, :half].double(), cos_sin[..., None, half:].double()
    out[..., first + 1 :: 2] = rows[..., first + 1 :: 2].double() * cos - even * sin
    return out


def _copy_wins(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """A copy of the whole row is stored over the turned lanes of every other head."""
    out = _exactly(rows, cos_sin)
    out[:, ::2] = rows[:, ::2].double()
    return out


def _positions_of_the_front(inputs: Inputs) -> Outputs | None:
    if not inputs.rotated:
        return None
    return _rounded_answer(inputs, _exactly, inputs.positions[: inputs.source.shape[0] - inputs.rotated])


def _split_frozen(inputs: Inputs) -> Outputs | None:
    """The split of another batch: one more row counts as rotated."""
    if inputs.rotated >= inputs.source.shape[0] or inputs.out is None:
        return None
    out = reference(inputs, torch.float64).out
    out[inputs.rotated] = _before(inputs)[inputs.rotated]
    return Outputs(out)


def _front_turned(inputs: Inputs) -> Outputs | None:
    if not inputs.rotated or inputs.rows is not None:
        return None
    return _rounded_answer(dataclasses.replace(inputs, rotated=0), _exactly)


def _before(inputs: Inputs) -> torch.Tensor:
    """What the answer's memory holds before the call: the rows themselves in place."""
    return torch.full(inputs.source.shape, float("nan"), dtype=torch.bfloat16) if inputs.out is None else inputs.out


def _lanes_in_front_forgotten(inputs: Inputs) -> Outputs:
    nope = inputs.source.shape[2] - inputs.cos_sin.shape[1]
    out = reference(inputs, torch.float64).out
    out[inputs.rotated :, :, :nope] = _before(inputs)[inputs.rotated :, :, :nope]
    return Outputs(out)


def _offsets_wrapped(inputs: Inputs) -> Outputs | None:
    """Offsets of 32 bits: far rows are read from before the tensor, and written there."""
    if not any(operand is not None and is_vast(operand) for operand in (inputs.rows, inputs.out)):
        return None
    out = reference(inputs, torch.float64).out
    before = _before(inputs)
    for operand, lost in ((inputs.source, torch.full_like(out, float("nan"))), (inputs.out, before)):
        if operand is None or not is_vast(operand):
            continue
        # A kernel is handed the rows from the first that it turns.
        far = (torch.arange(operand.shape[0]) - inputs.rotated) * operand.stride(0) >= 1 << 31
        out[far] = lost[far]
    return Outputs(out)


def _head_stride_ignored(inputs: Inputs) -> Outputs | None:
    """Heads are taken to lie head_dim apart."""
    source = inputs.source
    if source.stride(1) == source.shape[2] or is_vast(source):
        return None
    storage = source.as_strided((source.untyped_storage().nbytes() // source.element_size(),), (1,), 0)
    rows = torch.arange(source.shape[0])[:, None] * source.stride(0)
    heads = torch.arange(source.shape[1])[None, :] * source.shape[2]
    starts = (int(source.storage_offset()) + rows + heads)[..., None] + torch.arange(source.shape[2])
    # What lies beyond the memory faults; here it reads as NaN.
    read = storage[starts.clamp(max=storage.numel() - 1)].masked_fill(starts >= storage.numel(), float("nan"))
    return _answer(inputs, round_to_bfloat16(_turned(dataclasses.replace(inputs, rows=read), _exactly)))


def _positions_stride_ignored(inputs: Inputs) -> Outputs | None:
    positions = inputs.positions
    if positions.stride(0) == 1 or positions.numel() < 2:
        return None
    read = positions.as_strided(positions.shape, (1,), int(positions.storage_offset()))
    return _rounded_answer(inputs, _exactly, read[inputs.rotated :])


def _table_stride_ignored(inputs: Inputs) -> Outputs | None:
    table = inputs.cos_sin
    if table.stride(0) == table.shape[1]:
        return None
    read = table.as_strided(table.shape, (table.shape[1], 1), int(table.storage_offset()))
    return _rounded_answer(dataclasses.replace(inputs, cos_sin=read), _exactly)


def _words_of_positions(inputs: Inputs) -> Outputs | None:
    """64-bit positions are read as twice as many of 32 bits."""
    if inputs.positions.dtype != torch.int64:
        return None
    words = inputs.positions[inputs.rotated :].contiguous().view(torch.int32)
    return _rounded_answer(inputs, _exactly, words[: words.numel() // 2])


def _shifted_positions(inputs: Inputs, shift: int) -> Outputs:
    positions = inputs.positions[inputs.rotated :].long() + shift
    return _rounded_answer(inputs, _exactly, positions.clamp(0, inputs.cos_sin.shape[0] - 1))


def _truncated(inputs: Inputs) -> Outputs:
    turned = _turned(inputs, _exactly).float()
    bits = turned.view(torch.int32) & -65536
    return _answer(inputs, bits.view(torch.float32).to(torch.bfloat16))


def _in_bfloat16(left: Factors, right: Factors) -> torch.Tensor:
    """Every product is rounded to bfloat16 before the sum."""
    return round_to_bfloat16(left[0] * left[1]).double() + round_to_bfloat16(right[0] * right[1]).double()


def _first_position_for_all(inputs: Inputs) -> Outputs:
    positions = inputs.positions[inputs.rotated :]
    return _rounded_answer(inputs, _exactly, positions[:1].expand(positions.shape))


def _positions_by_head(inputs: Inputs) -> Outputs | None:
    """The position of row h turns head h of every row."""
    tokens, heads = inputs.source.shape[:2]
    if inputs.rotated or tokens == 0:
        return None
    positions = inputs.positions[torch.arange(heads) % tokens].long()
    turned = _exactly(inputs.source.transpose(0, 1), inputs.cos_sin[positions])
    return _answer(inputs, round_to_bfloat16(turned.transpose(0, 1)))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "turned-twice", "rows were turned back twice",
        lambda inputs: _rounded_answer(
            inputs, lambda rows, cos_sin: _exactly(round_to_bfloat16(_exactly(rows, cos_sin)), cos_sin)
        ),
    ),
    Mutant(
        "rotation-missing", "rows were only rounded",
        lambda inputs: _rounded_answer(inputs, lambda rows, cos_sin: rows.double()),
    ),
    Mutant("front-rows-turned", "rows that had been turned were turned once more", _front_turned),
    Mutant("split-of-another-batch", "one row too many counted as turned", _split_frozen),
    Mutant(
        "positions-of-the-front", "the rows behind the turned ones took the positions of the first rows",
        _positions_of_the_front,
    ),
    Mutant(
        "turned-forward", "rows were turned forward",
        lambda inputs: _rounded_answer(
            inputs, lambda rows, cos_sin: rotation.turn(rows, cos_sin, torch.float64, inverse=False)
        ),
    ),
    Mutant(
        "halves-paired", "lane k were paired with lane k + rotary / 2",
        lambda inputs: _in_other_lanes(inputs, _halves),
    ),
    Mutant(
        "first-lanes-turned", "the first lanes of a head were turned instead of the last",
        lambda inputs: _in_other_lanes(inputs, _first_lanes),
    ),
    Mutant(
        "pairs-one-lane-early", "the pairs began one lane early",
        lambda inputs: _in_other_lanes(inputs, _one_lane_early),
    ),
    Mutant("pairs-reversed", "the angles of the pairs came in reverse order", _pairs_reversed),
    Mutant("cosines-for-sines", "sines stood in front of cosines", _by(_swapped_table)),
    Mutant("table-interleaved", "the table held a cosine and a sine in turn", _by(_interleaved_table)),
    Mutant(
        "table-in-bfloat16", "cosines and sines were rounded to bfloat16",
        _by(lambda cos_sin: round_to_bfloat16(cos_sin).float()),
    ),
    Mutant(
        "last-pair-left", "the last pair were left as it was",
        lambda inputs: _rounded_answer(inputs, _last_pair_left),
    ),
    Mutant(
        "even-lane-stored-first", "the odd lane were computed from the even lane's answer",
        lambda inputs: _rounded_answer(inputs, _even_first) if inputs.rows is None else None,
    ),
    Mutant(
        "copy-over-turned-lanes", "a copy of the row were stored over the turned lanes of some heads",
        lambda inputs: _rounded_answer(inputs, _copy_wins),
    ),
    Mutant("lanes-in-front-forgotten", "the lanes in front of the pairs were not written", _lanes_in_front_forgotten),
    Mutant("offsets-of-32-bits", "the offset of a row were a 32-bit product", _offsets_wrapped),
    Mutant("head-stride-ignored", "heads lay head_dim apart", _head_stride_ignored),
    Mutant("positions-stride-ignored", "positions lay one apart", _positions_stride_ignored),
    Mutant("table-stride-ignored", "positions lay rotary numbers apart in the table", _table_stride_ignored),
    Mutant("positions-as-32-bit-words", "64-bit positions were read as 32-bit ones", _words_of_positions),
    Mutant("position-one-less", "each row were turned by the position before its own",
           lambda inputs: _shifted_positions(inputs, -1)),
    Mutant("position-one-more", "each row were turned by the position after its own",
           lambda inputs: _shifted_positions(inputs, 1)),
    Mutant("first-position-for-all", "all rows had the position of the first", _first_position_for_all),
    Mutant("positions-by-head", "positions counted heads instead of rows", _positions_by_head),
    Mutant("rounded-toward-zero", "bfloat16 numbers were rounded toward zero", _truncated),
    Mutant(
        "products-in-bfloat16", "products were rounded to bfloat16 before they were added",
        _added_by(_in_bfloat16, torch.float64),
    ),
    Mutant(
        "rows-rounded-first", "wider rows were rounded to bfloat16 before they were turned",
        lambda inputs: _rounded_answer(
            inputs, lambda rows, cos_sin: _exactly(round_to_bfloat16(rows.float()), cos_sin)
        ),
    ),
)  # fmt: skip


_EXACT = Precision(accumulate="exact", flushes=False, note="float64, one rounding")
_SINGLE = Precision(flushes=False, note="float32 products and sums")


def _first_fused(left: Factors, right: Factors) -> torch.Tensor:
    """The first product enters the float32 sum unrounded."""
    return (left[0] * left[1] + (right[0] * right[1]).float().double()).float().double()


def _flushed(left: Factors, right: Factors) -> torch.Tensor:
    """Float32 arithmetic without subnormal numbers: none as operand, product or sum."""
    products = [_normal(_normal(one) * _normal(other)) for one, other in (left, right)]
    return _normal(products[0] + products[1])


def _normal(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < 2.0**-126, 0.0, values)


def _another_nan(inputs: Inputs) -> Outputs:
    """NaN of another payload, and every zero of a turned lane positive."""
    out = reference(inputs, torch.float64).out.clone()
    behind = out[inputs.rotated :]
    behind[torch.isnan(behind)] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
    lanes = behind[..., out.shape[2] - inputs.cos_sin.shape[1] :]
    lanes[lanes == 0] = 0.0
    return Outputs(out)


HONEST: tuple[Honest, ...] = (
    Honest("exact-then-rounded", _EXACT, lambda inputs: _rounded_answer(inputs, _exactly)),
    Honest("float32", _SINGLE, _added_by(rotation.sum_of_products, torch.float32)),
    Honest("first-product-fused", _SINGLE, _added_by(_first_fused, torch.float64)),
    Honest(
        "second-product-fused",
        _SINGLE,
        _added_by(lambda left, right: _first_fused(right, left), torch.float64),
    ),
    Honest(
        "subnormals-flushed",
        Precision(note="float32 that flushes subnormal numbers"),
        _added_by(_flushed, torch.float32),
    ),
    Honest("another-nan", _EXACT, _another_nan),
)
