"""Which attention rows does the layer still turn back, so that each of them has been turned exactly once?

Of a batch of D decode rows and P prefill rows behind them, attention has turned

    the first D rows    where decode's reduction was asked to and did (`fused`)
    none                where it was asked and stored without (`unsplit`), was not asked (`plain`), or reads the caches in
                        place; prefill never turns

and this step turns all the others: bfloat16 rows in place, with the positions of those very rows; with an MXFP8 output the
row is turned in float32 and quantised from there (`oracle.rotation`, `oracle.mxfp8`), and what a fused decode stored as
codes and scales stays. Where the projection turns rows itself, none is turned here. Heads beyond the layer's stay as they
are. A warm-up without a batch turns nothing and leaves zeros: all heads of the rows, or codes and scales.
Sources: `forward_mqa` of vLLM's DeepSeek V4.1 layer for ROCm and of its V4 layer, `rocm_inverse_rope_rows_` and
`rocm_inverse_rope_mxfp8_rows`.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.memory import is_vast, map_tensors, moved
from cases.precision import Precision
from cases.sparse_mla.output_rows import BLOCK, LANES, Inputs, Outputs
from oracle import mxfp8, rotation
from oracle.check import Check, bounded, codes, exact, wrong_form
from oracle.formats import numbers
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Law, Mutant
from oracle.quant.mxfp8_rows import scale_range
from oracle.rotation import Factors

_Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def first_owed(inputs: Inputs) -> int:
    """The number of leading rows that owe no rotation."""
    if inputs.turns_later:
        return inputs.rows.shape[0]
    return inputs.decode_tokens if inputs.decode == "fused" else 0


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The rows with what was owed settled, in `dtype` before the last rounding.

    Raises ValueError for more decode rows than rows, more heads than the buffer has, codes without scales, an MXFP8 output
    off gfx950, and one whose decode rows or projection do not fit it.
    """
    _refuse(inputs)
    return _settled(inputs, turn=lambda rows, cos_sin: rotation.turn(rows, cos_sin, dtype))


def _refuse(inputs: Inputs) -> None:
    tokens, buffer_heads = inputs.rows.shape[:2]
    if not 0 <= inputs.decode_tokens <= tokens:
        raise ValueError(f"decode_tokens={inputs.decode_tokens}: should be 0 to {tokens}")
    if not 0 < inputs.heads <= buffer_heads:
        raise ValueError(f"heads={inputs.heads}: should be 1 to {buffer_heads}")
    if inputs.positions.shape != (tokens,):
        raise ValueError(f"positions have shape {list(inputs.positions.shape)}: should have [{tokens}], one a row")
    if (inputs.codes is None) != (inputs.scales is None):
        raise ValueError("codes without scales, or scales without codes: should be both or neither")
    if inputs.codes is not None and inputs.arch != "gfx950":
        raise ValueError(f"arch={inputs.arch}: should be gfx950 for an MXFP8 output")
    if inputs.codes is not None and (inputs.decode == "plain" or inputs.turns_later):
        raise ValueError("an MXFP8 output: should have rows that decode or this step turns")


def _exactly(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    return rotation.turn(rows, cos_sin, torch.float64)


def _settled(
    inputs: Inputs,
    *,
    start: int | None = None,
    stop: int | None = None,
    positions_from: int | None = None,
    heads: int | None = None,
    turn: _Turn = _exactly,
    quantise: _Quantise = mxfp8.quantise,
) -> Outputs:
    """The answer when rows `start` to `stop` are turned, by the positions from `positions_from` on."""
    if inputs.warm_up:
        return _zeroed(inputs)
    start = first_owed(inputs) if start is None else start
    stop = inputs.rows.shape[0] if stop is None else max(stop, start)
    begin = start if positions_from is None else positions_from
    heads = inputs.heads if heads is None else heads
    at = inputs.positions[begin : begin + stop - start].long()
    turned = turn(inputs.rows[start:stop, :heads], inputs.cos_sin[at])
    count = torch.tensor([stop - start])
    if inputs.codes is None or inputs.scales is None:
        rows = inputs.rows.clone()
        rows[start:stop, :heads] = round_to_bfloat16(turned)
        return Outputs(rows, None, None, count)
    stored, scales = inputs.codes.view(torch.uint8).clone(), inputs.scales.clone()
    found, bytes_found = quantise(turned)
    stored[start:stop], scales[start:stop] = found.flatten(1), bytes_found.flatten(1)
    return Outputs(None, stored.view(torch.float8_e4m3fn), scales, count)


def _zeroed(inputs: Inputs) -> Outputs:
    none = torch.zeros(1, dtype=torch.int64)
    if inputs.codes is None or inputs.scales is None:
        return Outputs(torch.zeros(inputs.rows.shape, dtype=torch.bfloat16), None, None, none)
    zeros = [torch.zeros(tensor.shape, dtype=torch.uint8) for tensor in (inputs.codes, inputs.scales)]
    return Outputs(None, zeros[0].view(torch.float8_e4m3fn), zeros[1], none)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """How many rows were turned; what must stay, bit for bit; what was turned, within the bound of the rotation.

    `precision` says what products and sums are kept in and whether subnormal numbers may be flushed.
    """
    want = reference(inputs, torch.float64)
    counted = exact("turned", outputs.turned, want.turned, why="each row is turned once in all, so the number is exact")
    for name in ("rows", "codes", "scales"):
        expected, got = getattr(want, name), getattr(outputs, name)
        form = None if expected is None else wrong_form(name, got, expected)
        if form is not None:
            return (counted, form)
    if inputs.warm_up:
        return (counted, *_judge_zeros(outputs, want))
    start = first_owed(inputs)
    cos_sin = inputs.cos_sin[inputs.positions[start:].long()]
    owed = inputs.rows[start:, : inputs.heads]
    value, budget = _exactly(owed, cos_sin), rotation.bound(owed, cos_sin, precision)
    if want.rows is not None:
        return (counted, *_judge_rows(inputs, outputs, want, value, budget, precision))
    return (counted, *_judge_mxfp8(outputs, want, start, value, budget))


def _judge_zeros(outputs: Outputs, want: Outputs) -> tuple[Check, ...]:
    why = "a warm-up leaves zeros"
    checks = []
    if want.rows is not None:
        checks.append(exact("rows", outputs.rows, want.rows, why=why))
    if want.codes is not None and want.scales is not None:
        checks += [
            exact("codes", outputs.codes, want.codes, why=why),
            exact("scales", outputs.scales, want.scales, why=why),
        ]
    return tuple(checks)


def _judge_rows(
    inputs: Inputs, outputs: Outputs, want: Outputs, value: torch.Tensor, budget: torch.Tensor, precision: Precision
) -> tuple[Check, ...]:
    assert outputs.rows is not None and want.rows is not None
    start, nope = first_owed(inputs), LANES - inputs.cos_sin.shape[1]
    turned = torch.zeros(want.rows.shape, dtype=torch.bool)
    turned[start:, : inputs.heads, nope:] = True
    return (
        exact("rows", outputs.rows, want.rows, mask=~turned,
              why="lanes in front of the pairs, rows that came turned and heads beyond the layer's stay as they are"),
        bounded("turned rows", outputs.rows[start:, : inputs.heads, nope:].contiguous(), value[..., nope:],
                budget[..., nope:], dtype=torch.bfloat16, rounding=torch.bfloat16,
                why=f"no number within the bound of {precision.accumulate} products and sums rounds to this"),
    )  # fmt: skip


def _judge_mxfp8(
    outputs: Outputs, want: Outputs, start: int, value: torch.Tensor, budget: torch.Tensor
) -> tuple[Check, ...]:
    assert (
        outputs.codes is not None and want.codes is not None and outputs.scales is not None and want.scales is not None
    )
    stored, scales = outputs.codes.view(torch.uint8), outputs.scales
    blocks = value.abs().unflatten(-1, (-1, BLOCK))
    slack = budget.unflatten(-1, (-1, BLOCK))
    lowest, _ = scale_range((blocks - slack).clamp(min=0).amax(-1))
    _, highest = scale_range((blocks + slack).amax(-1))
    found = scales[start:].unflatten(-1, lowest.shape[1:])
    ends = [
        numbers.rounded(mxfp8.scaled(value + side * budget, found), "float8_e4m3fn").float().flatten(1)
        for side in (-1, 1)
    ]
    decoded = numbers.decode(stored[start:], "float8_e4m3fn")
    return (
        exact("codes", stored[:start], want.codes.view(torch.uint8)[:start], why="what decode stored stays"),
        exact("scales", scales[:start], want.scales[:start], why="what decode stored stays"),
        codes("turned scales", found.float(), lowest.float(), highest.float(), dtype=torch.float32,
              why="the scale is the smallest that takes the block's largest magnitude to 448 or less"),
        codes("turned codes", decoded, ends[0], ends[1], dtype=torch.float32,
              why="no number within the bound of the rotation has this code under the scale of its block"),
    )  # fmt: skip


def _fresh(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(map_tensors(inputs, lambda tensor: moved(tensor, "cpu")), **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _decode_as_prefill(inputs: Inputs) -> Inputs | None:
    if inputs.decode == "fused" or inputs.warm_up:
        return None
    return _fresh(inputs, decode_tokens=0)


def _other_caches(inputs: Inputs) -> Inputs:
    return _fresh(inputs, window_only=not inputs.window_only)


def _unread_changed(inputs: Inputs) -> Inputs | None:
    """Other numbers where nobody may read: scratch rows of a fused decode, everything in a warm-up."""
    if not inputs.warm_up and (inputs.codes is None or inputs.decode != "fused"):
        return None
    fresh = _fresh(inputs)
    fresh.rows[: None if inputs.warm_up else inputs.decode_tokens] = 7.0
    return fresh


def _heads_reversed(inputs: Inputs) -> Inputs | None:
    if inputs.warm_up or is_vast(inputs.rows) or (inputs.codes is not None and inputs.decode == "fused"):
        return None
    fresh = _fresh(inputs)
    fresh.rows[:, : inputs.heads] = inputs.rows[:, : inputs.heads].flip(1)
    return fresh


def _reversed_heads(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    heads = inputs.heads
    if first.rows is not None:
        rows = torch.cat((first.rows[:, :heads].flip(1), first.rows[:, heads:]), dim=1)
        return dataclasses.replace(first, rows=rows)
    assert first.codes is not None and first.scales is not None
    flipped = [
        tensor.view(torch.uint8).unflatten(1, (heads, -1)).flip(1).flatten(1) for tensor in (first.codes, first.scales)
    ]
    return dataclasses.replace(first, codes=flipped[0].view(torch.float8_e4m3fn), scales=flipped[1])


def _rows_doubled(inputs: Inputs) -> Inputs | None:
    if inputs.warm_up or inputs.codes is not None:
        return None
    fresh = _fresh(inputs)
    fresh.rows.mul_(2)
    return fresh


def _doubled(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    assert first.rows is not None
    return dataclasses.replace(first, rows=first.rows * 2)


LAWS: tuple[Law, ...] = (
    Law("S1 decode as prefill", "rows that came unturned are treated alike, decode or prefill", _decode_as_prefill, _same,
        "bitwise"),
    Law("S2 other caches", "what a layer attends over does not decide who turns its rows", _other_caches, _same, "bitwise"),
    Law("S3 unread rows changed", "scratch rows of a fused decode, and all of a warm-up, are not read", _unread_changed,
        _same, "bitwise"),
    Law("S4 heads reversed", "every head is turned alike", _heads_reversed, _reversed_heads, "bitwise"),
    Law("S5 rows doubled", "twice the row gives twice the answer", _rows_doubled, _doubled, "bitwise"),
)  # fmt: skip


def _when(applies: Callable[[Inputs], bool], answer: Callable[[Inputs], Outputs]) -> Callable[[Inputs], Outputs | None]:
    return lambda inputs: answer(inputs) if applies(inputs) else None


def _serving(inputs: Inputs) -> bool:
    return not inputs.warm_up


def _is_mxfp8(inputs: Inputs) -> bool:
    return inputs.codes is not None and not inputs.warm_up


def _decoded_by(*routes: str) -> Callable[[Inputs], bool]:
    return lambda inputs: not inputs.warm_up and inputs.decode in routes and not inputs.turns_later


def _fused_turned_again(inputs: Inputs) -> Outputs:
    """All rows are turned, those of a fused decode too; scratch rows that nobody wrote read as zero."""

    def turn(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(_exactly(rows, cos_sin), nan=0.0)

    return _settled(inputs, start=0, turn=turn)


def _prefill_left(inputs: Inputs) -> Outputs:
    return _settled(inputs, stop=inputs.decode_tokens)


def _reported_turned(inputs: Inputs) -> Outputs:
    return _settled(inputs, start=inputs.decode_tokens)


def _last_left(inputs: Inputs) -> Outputs:
    return _settled(inputs, stop=inputs.rows.shape[0] - 1)


def _first_left(inputs: Inputs) -> Outputs:
    return _settled(inputs, start=min(first_owed(inputs) + 1, inputs.rows.shape[0]))


def _spare_heads_turned(inputs: Inputs) -> Outputs:
    return _settled(inputs, heads=inputs.rows.shape[1])


def _written_to_the_front(inputs: Inputs) -> Outputs:
    """Turned rows are stored from row 0 on."""
    right, start = _settled(inputs), first_owed(inputs)

    def front(tensor: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or before is None:
            return None
        moved_rows, old = tensor.view(torch.uint8).clone(), before.view(torch.uint8)
        moved_rows[start:] = old[start:]
        moved_rows[: tensor.shape[0] - start] = tensor.view(torch.uint8)[start:]
        return moved_rows.view(tensor.dtype)

    return dataclasses.replace(right, codes=front(right.codes, inputs.codes), scales=front(right.scales, inputs.scales))


def _offsets_wrapped(inputs: Inputs) -> Outputs | None:
    """Offsets of 32 bits: far rows are never reached."""
    operand = inputs.rows if inputs.codes is None else inputs.codes
    if inputs.warm_up or not is_vast(operand):
        return None
    right, start = _settled(inputs), first_owed(inputs)
    far = (torch.arange(operand.shape[0]) - start) * operand.stride(0) >= 1 << 31
    if right.rows is not None:
        right.rows[far] = inputs.rows[far]
    if right.codes is not None and inputs.codes is not None:
        right.codes.view(torch.uint8)[far] = inputs.codes.view(torch.uint8)[far]
    return right


def _even_first(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """The even lane is stored before the odd one is computed from it."""
    out = _exactly(rows, cos_sin)
    first, half = rows.shape[-1] - cos_sin.shape[-1], cos_sin.shape[-1] // 2
    even = round_to_bfloat16(out[..., first::2]).double()
    cos, sin = cos_sin[..., None, :half].double(), cos_sin[..., None, half:].double()
    out[..., first + 1 :: 2] = rows[..., first + 1 :: 2].double() * cos - even * sin
    return out


def _halves_paired(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    first, half = rows.shape[-1] - cos_sin.shape[-1], cos_sin.shape[-1] // 2
    order = torch.cat((torch.arange(first), first + torch.arange(2 * half).view(2, half).T.flatten()))
    out = torch.empty(rows.shape, dtype=torch.float64)
    out[..., order] = _exactly(rows[..., order], cos_sin)
    return out


def _not_at_all(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    del cos_sin
    return rows.double()


def _by_bytes(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> _Quantise:
    """Scale bytes that `change` makes of the right ones and the rows, and the codes under them."""

    def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = change(mxfp8.quantise(rows)[1], rows)
        return numbers.encode(mxfp8.scaled(rows, scales), "float8_e4m3fn"), scales

    return quantise


def _at_the_limit(scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    amax = rows.unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    raised: torch.Tensor = amax == torch.ldexp(torch.full_like(amax, 448.0), scales.double() - 127)
    return scales + raised.to(torch.uint8)


def _over_blocks(scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    del rows
    larger: torch.Tensor = scales.unflatten(-1, (-1, 2)).amax(-1)
    return larger.repeat_interleave(2, dim=-1)


def _over_heads(scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    del rows
    return scales.amax(1, keepdim=True).expand(scales.shape) if scales.numel() else scales


def _nan_in_empty_blocks(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found, scales = mxfp8.quantise(rows)
    return torch.where(scales.repeat_interleave(BLOCK, dim=-1) == 0, 0x7F, found).to(torch.uint8), scales


def _blocks_before_heads(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found, scales = mxfp8.quantise(rows)
    return found, scales.transpose(1, 2).contiguous().view(scales.shape)


def _from_bfloat16(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mxfp8.quantise(round_to_bfloat16(rows).double())


def _warm_up_left(inputs: Inputs) -> Outputs:
    none = torch.zeros(1, dtype=torch.int64)
    if inputs.codes is None or inputs.scales is None:
        return Outputs(inputs.rows.clone(), None, None, none)
    return Outputs(None, inputs.codes.view(torch.uint8).clone().view(inputs.codes.dtype), inputs.scales.clone(), none)


def _scales_left(inputs: Inputs) -> Outputs:
    assert inputs.scales is not None
    return dataclasses.replace(_zeroed(inputs), scales=inputs.scales.clone())


def _spare_heads_left(inputs: Inputs) -> Outputs:
    right = _zeroed(inputs)
    assert right.rows is not None
    right.rows[:, inputs.heads :] = inputs.rows[:, inputs.heads :]
    return right


def _counted_all(inputs: Inputs) -> Outputs:
    return dataclasses.replace(_settled(inputs), turned=torch.tensor([inputs.rows.shape[0]]))


MUTANTS: tuple[Mutant, ...] = (
    Mutant("fused-decode-turned-again", "rows that came turned were turned once more",
           _when(_decoded_by("fused"), _fused_turned_again)),
    Mutant("prefill-left", "prefill rows were left as attention stored them", _when(_serving, _prefill_left)),
    Mutant("in-place-decode-reported-turned", "the kernel that reads the caches in place had turned its rows",
           _when(_decoded_by("in_place"), _reported_turned)),
    Mutant("unsplit-decode-reported-turned", "the route without splits had turned its rows, as it was asked to",
           _when(_decoded_by("unsplit"), _reported_turned)),
    Mutant("plain-decode-reported-turned", "decode turned its rows unasked", _when(_decoded_by("plain"), _reported_turned)),
    Mutant("turned-here-and-later", "rows were turned here although the projection turns them",
           _when(lambda inputs: inputs.turns_later and not inputs.warm_up, lambda inputs: _settled(inputs, start=0))),
    Mutant("never-turned", "nobody turned what is owed",
           _when(_serving, lambda inputs: _settled(inputs, turn=_not_at_all))),
    Mutant("one-row-more-frozen", "the number of turned rows were that of a batch with one decode row more",
           _when(_serving, _first_left)),
    Mutant("one-row-less-frozen", "the number of turned rows were that of a batch with one decode row less",
           _when(lambda inputs: _serving(inputs) and first_owed(inputs) > 0 and not inputs.turns_later,
                 lambda inputs: _settled(inputs, start=first_owed(inputs) - 1,
                                         turn=lambda rows, cos_sin: torch.nan_to_num(_exactly(rows, cos_sin), nan=0.0)))),
    Mutant("last-row-left", "the last row were not covered", _when(_serving, _last_left)),
    Mutant("positions-of-the-front", "the rows took the positions of the first rows",
           _when(_serving, lambda inputs: _settled(inputs, positions_from=0))),
    Mutant("turned-forward", "rows were turned forward",
           lambda inputs: _settled(
               inputs, turn=lambda rows, cos_sin: rotation.turn(rows, cos_sin, torch.float64, inverse=False))),
    Mutant("halves-paired", "lane k were paired with lane k + 32", lambda inputs: _settled(inputs, turn=_halves_paired)),
    Mutant("even-lane-stored-first", "the odd lane were computed from the even lane's answer",
           _when(lambda inputs: inputs.codes is None, lambda inputs: _settled(inputs, turn=_even_first))),
    Mutant("spare-heads-turned", "heads beyond the layer's were turned too",
           _when(lambda inputs: inputs.codes is None, _spare_heads_turned)),
    Mutant("window-layers-left", "layers without a compressed cache turned nothing",
           _when(lambda inputs: inputs.window_only and _serving(inputs),
                 lambda inputs: _settled(inputs, turn=_not_at_all))),
    Mutant("offsets-of-32-bits", "the offset of a row were a 32-bit product", _offsets_wrapped),
    Mutant("turned-rows-counted-wrongly", "all rows counted as turned here", _counted_all),
    Mutant("stored-from-row-0", "turned rows were stored in front of the decode rows",
           _when(_is_mxfp8, _written_to_the_front)),
    Mutant("quantised-from-bfloat16", "rows were rounded to bfloat16 before they were quantised",
           _when(_is_mxfp8, lambda inputs: _settled(inputs, quantise=_from_bfloat16))),
    Mutant("nan-in-empty-blocks", "blocks of zeros were divided by a scale that flushes to zero",
           _when(_is_mxfp8, lambda inputs: _settled(inputs, quantise=_nan_in_empty_blocks))),
    Mutant("scale-up-at-the-limit", "a block whose largest magnitude is 448 took the next scale",
           _when(_is_mxfp8, lambda inputs: _settled(inputs, quantise=_by_bytes(_at_the_limit)))),
    Mutant("scale-of-64-lanes", "64 lanes shared a scale",
           _when(_is_mxfp8, lambda inputs: _settled(inputs, quantise=_by_bytes(_over_blocks)))),
    Mutant("scale-of-all-heads", "all heads shared their scales",
           _when(_is_mxfp8, lambda inputs: _settled(inputs, quantise=_by_bytes(_over_heads)))),
    Mutant("scales-block-by-block", "scales were stored block by block, not head by head",
           _when(_is_mxfp8, lambda inputs: _settled(inputs, quantise=_blocks_before_heads))),
    Mutant("warm-up-leaves-garbage", "a warm-up left the output as it found it",
           _when(lambda inputs: inputs.warm_up, _warm_up_left)),
    Mutant("warm-up-leaves-scales", "a warm-up cleared the codes and not the scales",
           _when(lambda inputs: inputs.warm_up and inputs.codes is not None, _scales_left)),
    Mutant("warm-up-leaves-spare-heads", "a warm-up cleared the layer's heads only",
           _when(lambda inputs: inputs.warm_up and inputs.codes is None, _spare_heads_left)),
)  # fmt: skip


def _added_by(add: Callable[[Factors, Factors], torch.Tensor], dtype: torch.dtype) -> Callable[[Inputs], Outputs]:
    return lambda inputs: _settled(inputs, turn=lambda rows, cos_sin: rotation.turn(rows, cos_sin, dtype, add=add))


def _first_fused(left: Factors, right: Factors) -> torch.Tensor:
    """The first product enters the float32 sum unrounded."""
    return (left[0] * left[1] + (right[0] * right[1]).float().double()).float().double()


_SINGLE = Precision(flushes=False, note="float32 products and sums")
HONEST: tuple[Honest, ...] = (
    Honest("exact-then-rounded", Precision(accumulate="exact", flushes=False, note="float64, one rounding"), _settled),
    Honest("float32", _SINGLE, _added_by(rotation.sum_of_products, torch.float32)),
    Honest("first-product-fused", _SINGLE, _added_by(_first_fused, torch.float64)),
)
