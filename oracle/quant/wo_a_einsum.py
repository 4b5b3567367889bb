"""What is the product of attention rows with an output projection's weight, and how far from it may one land?

    y = bf16(inverse rotation of rows)      with inverse_rope, else the rows, which are bfloat16 then
    out[t, g, r] = bf16( sum_k y[t, g * (H / G) + k // D, k % D] * w[g, r, k] ),   k = 0..(H / G) * D - 1

Group g is heads [g * H / G, (g + 1) * H / G); w is the bfloat16 weight of `oracle.quant.wo_a_dequant`, the rotation that of
`oracle.rotation`. Operands are bfloat16, sums fp32, the last rounding is to nearest even. No rows give no products.

Source: `rocm_inv_rope_einsum` of vLLM's ROCm backend, which raises for a call without rows.

The budget before the last rounding: that of `oracle.quant.products`, and for each lane that turned what its rounding may
be off by, the larger distance to the roundings of both ends of its bound, times the weight.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

from cases.memory import guarded_copy, map_tensors
from cases.precision import Precision
from cases.quant.wo_a_dequant import Projection
from cases.quant.wo_a_einsum import Inputs, Outputs
from oracle import rotation
from oracle.check import Check, bounded
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Law, Mutant
from oracle.quant import products
from oracle.quant.wo_a_dequant import RIGHT as RIGHT_WEIGHT
from oracle.quant.wo_a_dequant import Faults as WeightFaults
from oracle.quant.wo_a_dequant import dequantised


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The product in `dtype` (float32 or float64) before its rounding to bfloat16.

    Raises `ValueError` for heads that groups do not divide, and what a rotation and a dequantisation refuse; `TypeError` for
    rows that are not turned and not bfloat16.
    """
    check_call(inputs)
    return Outputs(products.grouped(_rows(inputs, dtype).to(dtype), _weight(inputs).to(dtype)))


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none."""
    heads = inputs.rows.shape[1] if inputs.rows.dim() == 3 else 0
    if heads % inputs.groups:
        raise ValueError(f"heads={heads}: should be a multiple of {inputs.groups}, the groups")
    if inputs.inverse_rope:
        rotation.refuse(inputs.rows, inputs.positions, inputs.cos_sin, 0)
    elif inputs.rows.dtype != torch.bfloat16:
        raise TypeError(f"rows={inputs.rows.dtype}: should be torch.bfloat16, since no rotation rounds them")


def _rows(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """bfloat16 [tokens, groups, width], turned in `dtype`."""
    rows = inputs.rows
    if inputs.inverse_rope:
        rows = round_to_bfloat16(rotation.turn(rows, inputs.cos_sin[inputs.positions.long()], dtype))
    return _in_groups(inputs, rows)


def _in_groups(inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(rows.shape[0], inputs.groups, inputs.width)


def _weight(inputs: Inputs, faults: WeightFaults = RIGHT_WEIGHT) -> torch.Tensor:
    return dequantised(inputs.module, inputs.groups, inputs.rank, inputs.width, faults)


def budget(inputs: Inputs, precision: Precision) -> torch.Tensor:
    """What the sums may be off by before the last rounding, float64 [tokens, groups, rank]."""
    rows, weight = _rows(inputs, torch.float64).double(), _weight(inputs).double()
    allowed = products.budget(rows, weight, precision)
    if not inputs.inverse_rope:
        return allowed
    cos_sin = inputs.cos_sin[inputs.positions.long()]
    turned = rotation.turn(inputs.rows, cos_sin, torch.float64)
    slack = rotation.bound(inputs.rows, cos_sin, precision)
    ends = [_in_groups(inputs, round_to_bfloat16(turned + side * slack)).double() for side in (-1, 1)]
    off = torch.maximum(*[(end - rows).abs() for end in ends])
    return allowed + torch.nan_to_num(products.grouped(off, weight.abs()), nan=0.0)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The product within its budget before its rounding to bfloat16."""
    want = reference(inputs, torch.float64).out
    return (
        bounded(
            "out", outputs.out, want, budget(inputs, precision), dtype=torch.bfloat16, rounding=torch.bfloat16,
            why="outside the budget of fp32 sums of products of bfloat16 numbers",
        ),
    )  # fmt: skip


def _fresh(inputs: Inputs, **changes: Any) -> Inputs:
    return dataclasses.replace(inputs, **changes)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _rows_reversed(inputs: Inputs) -> Inputs:
    return _fresh(inputs, rows=guarded_copy(inputs.rows.flip(0)), positions=guarded_copy(inputs.positions.flip(0)))


def _turned_before(inputs: Inputs) -> Inputs | None:
    """Rows that were turned before, where every step of the rotation is exact."""
    if not inputs.inverse_rope:
        return None
    cos_sin = inputs.cos_sin[inputs.positions.long()]
    if bool(rotation.bound(inputs.rows, cos_sin, Precision()).any()):
        return None
    turned = round_to_bfloat16(rotation.turn(inputs.rows, cos_sin, torch.float32))
    return _fresh(inputs, rows=guarded_copy(turned), inverse_rope=False)


def _dequantised_before(inputs: Inputs) -> Inputs | None:
    if inputs.module.weight.element_size() != 1:
        return None
    weight = guarded_copy(_weight(inputs).flatten(0, 1))
    return _fresh(inputs, module=dataclasses.replace(inputs.module, weight=weight))


def _doubled(inputs: Inputs) -> Inputs:
    return _fresh(inputs, rows=guarded_copy(inputs.rows * 2))


def _positions_changed(inputs: Inputs) -> Inputs | None:
    return None if inputs.inverse_rope else _fresh(inputs, positions=torch.zeros_like(inputs.positions))


def _groups_reversed(inputs: Inputs) -> Inputs | None:
    if inputs.groups == 1:
        return None

    def turned(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        bytes_ = tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
        parts = bytes_.unflatten(dimension, (inputs.groups, -1)).flip(dimension).flatten(dimension, dimension + 1)
        return guarded_copy(parts).view(tensor.dtype)

    module: Projection = map_tensors(inputs.module, lambda tensor: turned(tensor, 0))
    return _fresh(inputs, rows=turned(inputs.rows, 1), module=module)


def _with_tokens(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit of calls that have rows: of an empty product no law says anything."""
    return lambda inputs: edit(inputs) if inputs.rows.shape[0] else None


LAWS: tuple[Law, ...] = (
    Law(
        "M14 rows reversed", "a row's product depends on that row and its position only", _with_tokens(_rows_reversed),
        lambda first, inputs, edited: Outputs(first.out.flip(0)), "budget",
    ),
    Law("E1 turned before", "rows may be turned before the call", _with_tokens(_turned_before), _same, "bitwise"),
    Law(
        "E2 dequantised before", "the weight may be dequantised before", _with_tokens(_dequantised_before), _same,
        "bitwise",
    ),
    Law(
        "E3 positions changed", "without a rotation positions mean nothing", _with_tokens(_positions_changed), _same,
        "bitwise",
    ),
    Law(
        "M11 rows doubled", "twice the rows give twice the product", _with_tokens(_doubled),
        lambda first, inputs, edited: Outputs(first.out * 2), "bitwise",
    ),
    Law(
        "B1 groups reversed", "a group's product depends on its heads and its weight only", _with_tokens(_groups_reversed),
        lambda first, inputs, edited: Outputs(first.out.flip(1)), "budget",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Fault:
    """What a product does wrong; the defaults are right."""

    turn: Literal["own", "absent", "forward", "twice", "always", "halves", "swapped", "first_lanes", "unrounded"] = (
        "own"
    )
    positions: Literal["own", "next", "first"] = "own"
    heads: Literal["own", "interleaved", "groups_turned", "lanes_first"] = "own"
    lost: int = 0
    weight: WeightFaults = RIGHT_WEIGHT


def _faulty_rows(inputs: Inputs, fault: _Fault) -> torch.Tensor:
    """float64 [tokens, groups, width] as the fault reads the rows."""
    rows, positions = inputs.rows, inputs.positions
    if fault.turn == "always" and not inputs.inverse_rope:
        # Any row of the table that holds numbers will do.
        known = (~inputs.cos_sin.isnan().any(1)).nonzero().flatten()
        positions = known[torch.arange(positions.numel()) % known.numel()]
    elif fault.positions == "next":
        positions = positions.roll(-1)
    elif fault.positions == "first":
        positions = positions[:1].expand(positions.shape)
    turned = rows.double()
    if fault.turn == "always" or (inputs.inverse_rope and fault.turn != "absent"):
        turned = _turned(rows, inputs.cos_sin[positions.long()], fault)
    turned = turned if fault.turn == "unrounded" else round_to_bfloat16(turned).double()
    tokens, heads, lanes = turned.shape
    each = heads // inputs.groups
    if fault.heads == "interleaved":
        turned = turned.view(tokens, each, inputs.groups, lanes).transpose(1, 2)
    elif fault.heads == "groups_turned":
        turned = turned.view(tokens, inputs.groups, each, lanes).flip(1)
    elif fault.heads == "lanes_first":
        turned = turned.view(tokens, inputs.groups, each, lanes).transpose(2, 3)
    return turned.reshape(tokens, inputs.groups, each * lanes)


def _turned(rows: torch.Tensor, cos_sin: torch.Tensor, fault: _Fault) -> torch.Tensor:
    wide, rotary = torch.float64, cos_sin.shape[-1]
    if fault.turn == "forward":
        return rotation.turn(rows, cos_sin, wide, inverse=False)
    if fault.turn == "twice":
        once = round_to_bfloat16(rotation.turn(rows, cos_sin, wide))
        return rotation.turn(once, cos_sin, wide)
    if fault.turn == "swapped":
        return rotation.turn(rows, cos_sin.roll(rotary // 2, -1), wide)
    if fault.turn == "first_lanes":
        return rotation.turn(rows.roll(-rotary, -1), cos_sin, wide).roll(rotary, -1)
    if fault.turn == "halves":
        # Lane k of the last ones forms a pair with lane k + rotary / 2.
        order = torch.arange(rotary).view(2, -1).T.flatten()
        paired = rows.clone()
        paired[..., -rotary:] = rows[..., -rotary:][..., order]
        turned = rotation.turn(paired, cos_sin, wide)
        turned[..., -rotary:] = turned[..., -rotary:][..., order.argsort()]
        return turned
    return rotation.turn(rows, cos_sin, wide)


def _operands(inputs: Inputs, fault: _Fault) -> tuple[torch.Tensor, torch.Tensor]:
    kept = inputs.width - fault.lost
    return _faulty_rows(inputs, fault)[..., :kept], _weight(inputs, fault.weight).double()[..., :kept]


def _multiplied(fault: _Fault) -> Callable[[Inputs], Outputs]:
    """The answer with a fault in what is multiplied, otherwise exact."""
    return lambda inputs: Outputs(round_to_bfloat16(products.grouped(*_operands(inputs, fault))))


def _accumulated(step: Callable[[torch.Tensor], torch.Tensor], lanes: int) -> Callable[[Inputs], Outputs]:
    """The answer whose running sum takes a step after every so many lanes, in fp32."""

    def answer(inputs: Inputs) -> Outputs:
        rows, weight = _operands(inputs, _Fault())
        total = torch.zeros(rows.shape[0], inputs.groups, inputs.rank)
        for start in range(0, inputs.width, lanes):
            part = slice(start, start + lanes)
            total = step(total.double() + products.grouped(rows[..., part], weight[..., part])).float()
        return Outputs(round_to_bfloat16(total))

    return answer


def _cut(values: torch.Tensor) -> torch.Tensor:
    """Towards zero to the 24 digits of fp32."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2.0**24).trunc(), exponent - 24)


def _finished(change: Callable[[torch.Tensor, Inputs], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    return lambda inputs: Outputs(change(products.grouped(*_operands(inputs, _Fault())), inputs))


def _truncated(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    del inputs
    return (out.float().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _last_row_lost(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    del inputs
    answer = round_to_bfloat16(out)
    answer[-1:] = 0
    return answer


def _columns_unwritten(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Columns beside whole tiles of 32 are not written."""
    answer = round_to_bfloat16(out)
    answer[..., inputs.rank // 32 * 32 :] = float("nan")
    return answer


def _mutant(name: str, pitfall: str, **fault: Any) -> Mutant:
    return Mutant(name, pitfall, _multiplied(_Fault(**fault)))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("not-turned", "the rotation were left out", turn="absent"),
    _mutant("turned-forward", "rows were turned forward", turn="forward"),
    _mutant("turned-twice", "rows were turned back twice", turn="twice"),
    _mutant("turned-unasked", "rows were turned though the call says no", turn="always"),
    _mutant("pairs-of-halves", "lanes k and k + 32 formed the pairs", turn="halves"),
    _mutant("cosine-sine-swapped", "the halves of the table were swapped", turn="swapped"),
    _mutant("first-lanes-turned", "the first 64 lanes were turned", turn="first_lanes"),
    _mutant("rotated-rows-unrounded", "rotated rows were not rounded to bfloat16", turn="unrounded"),
    _mutant("positions-of-the-next-row", "a row had the position of the next", positions="next"),
    _mutant("one-position-for-all", "all rows had the position of the first", positions="first"),
    _mutant("heads-interleaved", "the heads of a group stood a number of groups apart", heads="interleaved"),
    _mutant("groups-turned", "the groups of a row stood in reversed order", heads="groups_turned"),
    _mutant("lanes-before-heads", "lanes counted before the heads of a group", heads="lanes_first"),
    _mutant("last-lanes-lost", "the last 64 lanes of a group were left out", lost=64),
    _mutant("last-lane-lost", "the last lane of a group were left out", lost=1),
    _mutant("dequantised-twice", "the scale beside a bfloat16 weight were applied",
            weight=WeightFaults(retained_applied=True)),
    _mutant("scale-ignored", "codes were the weights", weight=WeightFaults(choose="none")),
    _mutant("scales-of-the-first-group", "every group had the scales of the first",
            weight=WeightFaults(group_of_scale="first")),
    _mutant("weight-rank-major", "the weight's rows were ordered by rank, then group",
            weight=WeightFaults(order="rank_major")),
    Mutant("accumulated-in-bfloat16", "the running sum were bfloat16", _accumulated(round_to_bfloat16, 32)),
    Mutant("heads-summed-in-bfloat16", "the sum of each 96 lanes were added in bfloat16",
           _accumulated(round_to_bfloat16, 96)),
    Mutant("accumulated-in-float16", "the running sum were float16", _accumulated(lambda sums: sums.half(), 32)),
    Mutant("truncated", "the answer were cut to bfloat16", _finished(_truncated)),
    Mutant("last-row-lost", "the last row were 0", _finished(_last_row_lost)),
    Mutant("columns-unwritten", "columns beside whole tiles of 32 were not written", _finished(_columns_unwritten)),
    Mutant("ranks-before-groups", "the answer were ordered by rank, then group",
           _finished(lambda out, inputs: round_to_bfloat16(out.transpose(1, 2).reshape(out.shape)))),
)  # fmt: skip


def _in_fp32(inputs: Inputs) -> Outputs:
    """The rotation and the sums in fp32."""
    return Outputs(round_to_bfloat16(reference(inputs).out))


def _fused_rotation(inputs: Inputs) -> Outputs:
    """Sums in fp32 of rows whose rotation rounds only once, as a fused multiply-add does."""

    def fused(left: rotation.Factors, right: rotation.Factors) -> torch.Tensor:
        exact = left[0].double() * left[1].double() + right[0].double() * right[1].double()
        return exact.float()

    if not inputs.inverse_rope:
        return _in_fp32(inputs)
    turned = rotation.turn(inputs.rows, inputs.cos_sin[inputs.positions.long()], torch.float32, add=fused)
    rows = _in_groups(inputs, round_to_bfloat16(turned)).float()
    return Outputs(round_to_bfloat16(products.grouped(rows, _weight(inputs).float())))


_FP32 = Precision(flushes=False)

HONEST: tuple[Honest, ...] = (
    Honest("exact-sums", _FP32, _multiplied(_Fault())),
    Honest("fp32", _FP32, _in_fp32),
    Honest("fused-rotation", _FP32, _fused_rotation),
    Honest("sums-cut-to-24-digits", _FP32, _accumulated(_cut, 16)),
)
