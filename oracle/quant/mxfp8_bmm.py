"""What is the grouped product of MXFP8 rows with an MXFP8 weight, and how far from it may an implementation land?

    out[t, g * R + r] = bf16( sum_k a[t, g * K + k] * 2^(as - 127) * w[g * R + r, k] * 2^(ws - 127) )

with as = a_scale[t, (g * K + k) // 32] and ws = weight_scale[(g * R + r) // S, k // 32], where S, rows of the weight over
rows of its scale, is 32 or 1. Codes are OCP e4m3, products are exact, sums are fp32, and the last rounding is to nearest
even. A NaN code makes its element NaN. The tile depends on the work T * G alone (`cases.quant.mxfp8_bmm.TILES`).

Source: the MXFP8 output projection of vLLM's ROCm backend for DeepSeek V4.1 (`rocm_mxfp8_wo_a_bmm`).

The budget before the last rounding is that of `oracle.quant.products`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from cases.memory import guarded, guarded_copy, moved
from cases.precision import Precision
from cases.quant.mxfp8_bmm import LANES, TILES, Inputs, Outputs, tile_of
from oracle.check import Check, bounded, exact
from oracle.formats import numbers
from oracle.laws import Honest, Law, Mutant
from oracle.quant import products

# What fp32 keeps.
_DIGITS = 24


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The product in `dtype` (float32 or float64) before its rounding to bfloat16, and the tile.

    No rows give an empty product. Raises `ValueError` where slices, scale blocks or tiles do not divide the shapes, or a
    last stride is not 1, and `TypeError` for other dtypes than e4m3fn codes and uint8 scales.
    """
    check_call(inputs)
    return Outputs(_summed(inputs, dtype), _tile(inputs))


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none: `ValueError` for shapes and strides, `TypeError` for dtypes."""
    for name, wanted in (("a", torch.float8_e4m3fn), ("weight", torch.float8_e4m3fn), ("a_scale", torch.uint8),
                         ("weight_scale", torch.uint8)):  # fmt: skip
        tensor = getattr(inputs, name)
        if tensor.dtype != wanted:
            raise TypeError(f"{name}={tensor.dtype}: should be {wanted}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"last stride of {name}={tensor.stride(-1)}: should be 1")
    (tokens, columns), (rows, width) = inputs.a.shape, inputs.weight.shape
    _, tile_columns, tile_lanes, _, _ = tile_of(tokens * inputs.groups)
    scale_rows = inputs.weight_scale.shape[0]
    for wrong, sentence in (
        (columns != inputs.groups * width, f"columns of a={columns}: should be {inputs.groups} groups of {width}"),
        (rows != inputs.groups * inputs.rank, f"rows of weight={rows}: should be {inputs.groups} times {inputs.rank}"),
        (width % LANES, f"width={width}: should be a multiple of {LANES}"),
        (width % tile_lanes, f"width={width}: should be a multiple of {tile_lanes}, the lanes of a tile"),
        (inputs.rank % tile_columns, f"rank={inputs.rank}: should be a multiple of {tile_columns}, a tile's columns"),
        (
            scale_rows not in (rows, rows / LANES),
            f"rows of weight_scale={scale_rows}: should be {rows} or {rows / LANES:g}",
        ),
        (
            scale_rows != rows and inputs.rank % LANES,
            f"rank={inputs.rank}: should be a multiple of {LANES}, or a scale block lies in two groups",
        ),
        (
            tuple(inputs.a_scale.shape) != (tokens, columns // LANES),
            f"a_scale={list(inputs.a_scale.shape)}: should be {[tokens, columns // LANES]}",
        ),
        (
            inputs.weight_scale.shape[1] != width // LANES,
            f"columns of weight_scale={inputs.weight_scale.shape[1]}: should be {width // LANES}",
        ),
    ):
        if wrong:
            raise ValueError(sentence)


def _tile(inputs: Inputs) -> torch.Tensor:
    return torch.tensor(tile_of(inputs.a.shape[0] * inputs.groups))


def _summed(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """The sums of products [tokens, groups * rank], a scale block at a time."""
    tokens, groups, rank = inputs.a.shape[0], inputs.groups, inputs.rank
    a, a_power, weight, weight_power = _grouped(inputs, dtype)
    out = torch.zeros((tokens, groups, rank), dtype=dtype, device=inputs.a.device)
    for block in range(weight_power.shape[-1]):
        lanes = slice(block * LANES, (block + 1) * LANES)
        part = products.grouped(a[..., lanes], weight[..., lanes])
        out += _times_power(part, a_power[:, :, None, block] + weight_power[None, :, :, block])
    return out.flatten(1)


def _grouped(inputs: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Decoded codes [tokens, groups, width] and [groups, rank, width] with the exponents of their scales, int32
    [tokens, groups, width / 32] and [groups, rank, width / 32]."""
    groups = inputs.groups
    a = numbers.decode(inputs.a.view(torch.uint8), "float8_e4m3fn", dtype).unflatten(1, (groups, -1))
    weight = numbers.decode(inputs.weight.view(torch.uint8), "float8_e4m3fn", dtype).unflatten(0, (groups, -1))
    a_power = inputs.a_scale.int().unflatten(1, (groups, -1)) - numbers.E8M0_BIAS
    each = inputs.weight.shape[0] // max(1, inputs.weight_scale.shape[0])
    weight_power = inputs.weight_scale.int().repeat_interleave(each, 0).unflatten(0, (groups, -1)) - numbers.E8M0_BIAS
    return a, a_power, weight, weight_power


def _times_power(values: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """values * 2^exponent in two steps, since 2^exponent alone may be beyond the format."""
    half = exponent // 2
    return torch.ldexp(torch.ldexp(values, half), exponent - half)


def budget(inputs: Inputs, precision: Precision) -> torch.Tensor:
    """What the sums may be off by before the last rounding, float64 [tokens, groups * rank]."""
    return products.budget(*_operands(inputs, _RIGHT), precision).flatten(1)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The product within its budget before its rounding to bfloat16; the tile, where it is told, exactly."""
    want = reference(inputs, torch.float64).out
    checks = [
        bounded(
            "out", outputs.out, want, budget(inputs, precision), dtype=torch.bfloat16, rounding=torch.bfloat16,
            why="outside the budget of fp32 sums of exact products",
        )
    ]  # fmt: skip
    if outputs.tile is not None:
        checks.append(exact("tile", outputs.tile, _tile(inputs), why="the tile is a function of tokens times groups"))
    return tuple(checks)


def _fresh(inputs: Inputs, **changes: object) -> Inputs:
    """Inputs some of which are replaced, with output memory of their own."""
    fresh: dict[str, Any] = {"out": moved(inputs.out, inputs.out.device), **changes}
    return dataclasses.replace(inputs, **fresh)


def _with_rows(inputs: Inputs, order: torch.Tensor) -> Inputs:
    """The rows of the call in another order, or some of them, or several times."""
    return _fresh(
        inputs, a=_picked(inputs.a, order), a_scale=_picked(inputs.a_scale, order),
        out=guarded((order.numel(), inputs.out.shape[1]), torch.bfloat16),
    )  # fmt: skip


def _picked(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return guarded_copy(tensor.view(torch.uint8)[order], fill=0xFF).view(tensor.dtype)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _scales_repeated(inputs: Inputs) -> Inputs | None:
    """A scale for each row instead of for 32."""
    if inputs.weight_scale.shape[0] == inputs.weight.shape[0]:
        return None
    return _fresh(inputs, weight_scale=guarded_copy(inputs.weight_scale.repeat_interleave(LANES, 0), fill=0xFF))


def _rows_reversed(inputs: Inputs) -> Inputs:
    return _with_rows(inputs, torch.arange(inputs.a.shape[0]).flip(0))


def _another_tile(inputs: Inputs) -> Inputs | None:
    """The rows several times, as often as the next tile that fits the shape asks for."""
    tokens, groups = inputs.a.shape[0], inputs.groups
    own = tile_of(tokens * groups)
    for most, tile in TILES:
        fits = inputs.rank % tile[1] == 0 and inputs.weight.shape[1] % tile[2] == 0
        if fits and tile != own and most is not None and tokens * groups < most <= 512:
            return _with_rows(inputs, torch.arange(most // groups) % tokens)
    return None


def _repeated(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    return Outputs(first.out[torch.arange(edited.a.shape[0]) % inputs.a.shape[0]])


def _powers_traded(inputs: Inputs) -> Inputs | None:
    """Row scales twice as large, weight scales half as large."""
    return _shifted(inputs, 1, -1)


def _doubled(inputs: Inputs) -> Inputs | None:
    return _shifted(inputs, 1, 0)


def _shifted(inputs: Inputs, a_by: int, weight_by: int) -> Inputs | None:
    changed = {}
    for name, by in (("a_scale", a_by), ("weight_scale", weight_by)):
        bytes_ = getattr(inputs, name).int()
        if by and not bool(((bytes_ > 0) & (bytes_ < 254)).all()):
            return None
        changed[name] = guarded_copy((bytes_ + by).to(torch.uint8), fill=0xFF)
    return _fresh(inputs, **changed)


def _groups_reversed(inputs: Inputs) -> Inputs | None:
    def turned(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        parts = tensor.view(torch.uint8).unflatten(dimension, (inputs.groups, -1)).flip(dimension)
        return guarded_copy(parts.flatten(dimension, dimension + 1), fill=0xFF).view(tensor.dtype)

    if inputs.groups == 1:
        return None
    return _fresh(
        inputs, a=turned(inputs.a, 1), a_scale=turned(inputs.a_scale, 1), weight=turned(inputs.weight, 0),
        weight_scale=turned(inputs.weight_scale, 0),
    )  # fmt: skip


def _with_tokens(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit of calls that have rows: of an empty product no law says anything."""
    return lambda inputs: edit(inputs) if inputs.a.shape[0] else None


LAWS: tuple[Law, ...] = (
    Law(
        "M24 scales repeated", "a block's scale is the scale of each of its 32 rows",
        _with_tokens(_scales_repeated), _same, "bitwise",
    ),
    Law(
        "M14 rows reversed", "a row's product depends on that row only", _with_tokens(_rows_reversed),
        lambda first, inputs, edited: Outputs(first.out.flip(0), first.tile), "bitwise",
    ),
    Law("M28 another tile", "the tile moves no more than roundings", _with_tokens(_another_tile), _repeated, "budget"),
    Law(
        "M29 output memory zeroed", "what lay in the output memory does not matter",
        _with_tokens(lambda inputs: _fresh(inputs, out=torch.zeros_like(inputs.out))), _same, "bitwise",
    ),
    Law(
        "M10 powers traded", "a power of two may stand in either scale", _with_tokens(_powers_traded), _same, "bitwise"
    ),
    Law(
        "M11 rows doubled", "twice the rows give twice the product", _with_tokens(_doubled),
        lambda first, inputs, edited: Outputs(first.out * 2, first.tile), "bitwise",
    ),
    Law(
        "B1 groups reversed", "a group's columns depend on its slice and its weight only", _with_tokens(_groups_reversed),
        lambda first, inputs, edited: Outputs(
            first.out.unflatten(1, (inputs.groups, -1)).flip(1).flatten(1), first.tile
        ), "bitwise",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Fault:
    """What a product does wrong; the defaults are right."""

    a_bias: int = 127
    weight_bias: int = 127
    numeric: Literal["", "a", "weight"] = ""
    zero_byte: float = 2.0**-127
    lanes_per_scale: int = LANES
    scale_rows: Literal["own", "swapped", "first_group", "later"] = "own"
    slices: Literal["own", "first", "turned"] = "own"
    a_scale_group: Literal["own", "first"] = "own"
    encoding: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn"
    nan_as: float | None = None
    lanes_lost: Literal["none", "block", "tile", "first_tile"] = "none"
    signless: bool = False
    rows_and_ranks: Literal["own", "rank_major"] = "own"


_RIGHT = _Fault()


def _operands(inputs: Inputs, fault: _Fault) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, groups, width] and weight [groups, rank, width] in float64 as the fault reads them."""
    groups, width = inputs.groups, inputs.weight.shape[1]
    values = []
    for codes in (inputs.a, inputs.weight):
        decoded = numbers.decode(codes.view(torch.uint8), fault.encoding, torch.float64)
        if fault.nan_as is not None:
            decoded = decoded.nan_to_num(fault.nan_as)
        values.append(decoded.abs() if fault.signless else decoded)
    lane = torch.arange(width)
    scale_lane = (lane // fault.lanes_per_scale).clamp(max=width // LANES - 1)
    a_factor = _factor(inputs.a_scale, fault.a_bias, fault.numeric == "a", fault)
    a_factor = a_factor.unflatten(1, (groups, -1))[..., scale_lane]
    if fault.a_scale_group == "first":
        a_factor = a_factor[:, :1]
    a = values[0].unflatten(1, (groups, -1)) * a_factor
    weight_factor = _factor(inputs.weight_scale, fault.weight_bias, fault.numeric == "weight", fault)
    weight = values[1] * weight_factor[_scale_row(inputs, fault)][:, scale_lane]
    weight = weight.unflatten(0, (groups, -1))
    if fault.slices == "first":
        a = a[:, :1].expand(a.shape)
    elif fault.slices == "turned":
        a = a.flip(1)
    steps = {"block": LANES, "tile": tile_of(a.shape[0] * groups)[2], "none": 0, "first_tile": 0}
    kept = width - steps[fault.lanes_lost]
    if fault.lanes_lost == "first_tile":
        kept = width // TILES[0][1][2] * TILES[0][1][2]
    return a[..., :kept], weight[..., :kept]


def _factor(scales: torch.Tensor, bias: int, numeric: bool, fault: _Fault) -> torch.Tensor:
    if numeric:
        return scales.double()
    power = torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.int() - bias)
    return torch.where(scales == 0, fault.zero_byte * 2.0 ** (127 - bias), power)


def _scale_row(inputs: Inputs, fault: _Fault) -> torch.Tensor:
    """The scale row of every row of the weight."""
    rows, scale_rows = inputs.weight.shape[0], inputs.weight_scale.shape[0]
    row = torch.arange(rows)
    each = rows // scale_rows
    if fault.scale_rows == "first_group":
        row = row % inputs.rank
    elif fault.scale_rows == "later":
        row = row + LANES // 2
    elif fault.scale_rows == "swapped":
        each = LANES if each == 1 else 1
    return (row // each).clamp(max=scale_rows - 1)


def _multiplied(fault: _Fault) -> Callable[[Inputs], Outputs]:
    """The answer with a fault in what is multiplied, otherwise exact."""

    def answer(inputs: Inputs) -> Outputs:
        out = products.grouped(*_operands(inputs, fault))
        if fault.rows_and_ranks == "rank_major":
            out = out.transpose(1, 2)
        return Outputs(numbers.round_to_bfloat16(out.flatten(1)), _tile(inputs))

    return answer


def _accumulated(step: Callable[[torch.Tensor], torch.Tensor], lanes: int = LANES) -> Callable[[Inputs], Outputs]:
    """The answer whose running sum takes a step after every so many lanes, in fp32."""

    def answer(inputs: Inputs) -> Outputs:
        a, weight = _operands(inputs, _RIGHT)
        total = torch.zeros((*a.shape[:2], weight.shape[1]))
        for start in range(0, a.shape[-1], lanes):
            part = slice(start, start + lanes)
            total = step(total.double() + products.grouped(a[..., part], weight[..., part])).float()
        return Outputs(numbers.round_to_bfloat16(total.flatten(1)), _tile(inputs))

    return answer


def _cut(digits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Towards zero to so many significant digits."""

    def step(values: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(values)
        return torch.ldexp((mantissa * 2.0**digits).trunc(), exponent - digits)

    return step


def _finished(change: Callable[[torch.Tensor, Inputs], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """The right sums in float64, finished in a wrong way."""

    def answer(inputs: Inputs) -> Outputs:
        out = products.grouped(*_operands(inputs, _RIGHT)).flatten(1)
        return Outputs(change(out, inputs), _tile(inputs))

    return answer


def _truncated(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    del inputs
    bits = out.float().view(torch.int32) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


def _unwritten(out: torch.Tensor, inputs: Inputs, side: Literal["columns", "rows"]) -> torch.Tensor:
    """The last tile of columns, or what is left of the rows beside whole tiles, keeps what lay there."""
    rows, columns, *_ = tile_of(inputs.a.shape[0] * inputs.groups)
    answer = numbers.round_to_bfloat16(out)
    old = moved(inputs.out, inputs.out.device)
    if side == "columns":
        answer[:, -columns:] = old[:, -columns:]
    else:
        start = answer.shape[0] // rows * rows
        answer[start:] = old[start:]
    return answer


def _frozen_columns(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Written as with tiles of a thousand tokens: columns beyond whole tiles of theirs stay."""
    columns = tile_of(4097)[1]
    answer = numbers.round_to_bfloat16(out)
    start = answer.shape[1] // columns * columns
    answer[:, start:] = moved(inputs.out, inputs.out.device)[:, start:]
    return answer


def _wrapped_scale_rows(inputs: Inputs) -> Outputs | None:
    """Rows of a sliced scale buffer read one behind the other."""
    scale = inputs.a_scale
    if scale.stride(0) == scale.shape[1] or scale.shape[0] < 2:
        return None
    packed = scale.as_strided(scale.shape, (scale.shape[1], 1))
    return _multiplied(_RIGHT)(_fresh(inputs, a_scale=packed.clone()))


def _with_tile(work: Callable[[Inputs], int], fewer: bool = False) -> Callable[[Inputs], Outputs]:
    """The right product launched with the tile of other work."""

    def answer(inputs: Inputs) -> Outputs:
        tile = tile_of(work(inputs))
        if fewer:
            tile = next(t for most, t in TILES if most is None or work(inputs) < most)
        return Outputs(_multiplied(_RIGHT)(inputs).out, torch.tensor(tile))

    return answer


def _mutant(name: str, pitfall: str, **fault: Any) -> Mutant:
    return Mutant(name, pitfall, _multiplied(_Fault(**fault)))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("row-scale-bias-126", "the rows' scales had bias 126", a_bias=126),
    _mutant("row-scale-bias-128", "the rows' scales had bias 128", a_bias=128),
    _mutant("weight-scale-bias-126", "the weight's scales had bias 126", weight_bias=126),
    _mutant("weight-scale-bias-128", "the weight's scales had bias 128", weight_bias=128),
    _mutant("row-scale-as-number", "the rows' scale bytes were numbers", numeric="a"),
    _mutant("weight-scale-as-number", "the weight's scale bytes were numbers", numeric="weight"),
    _mutant("scale-byte-0-is-0", "scale byte 0 were 0, not 2^-127", zero_byte=0.0),
    _mutant("scale-of-16-lanes", "a scale's number were the lane's divided by 16", lanes_per_scale=16),
    _mutant("scale-of-64-lanes", "a scale's number were the lane's divided by 64", lanes_per_scale=64),
    _mutant("scale-rows-confused", "row scales were block scales, or the other way round", scale_rows="swapped"),
    _mutant("scales-of-the-first-group", "every group had the weight scales of the first", scale_rows="first_group"),
    _mutant("scale-rows-straddle", "scale blocks of the weight began 16 rows late", scale_rows="later"),
    _mutant("first-slice-for-all", "every group multiplied the first slice of a row", slices="first"),
    _mutant("slices-turned", "the slices of a row stood in reversed order", slices="turned"),
    _mutant("row-scales-of-first-slice", "every slice had the scales of the first", a_scale_group="first"),
    _mutant("columns-rank-major", "the answer's columns were ordered by rank, then group", rows_and_ranks="rank_major"),
    _mutant("fnuz-codes", "the codes were FNUZ", encoding="float8_e4m3fnuz"),
    _mutant("nan-is-zero", "a NaN code were 0", nan_as=0.0),
    _mutant("nan-is-480", "a NaN code were the next number after 448", nan_as=480.0),
    _mutant("signs-lost", "codes had no sign", signless=True),
    _mutant("last-block-dropped", "the last 32 lanes were left out", lanes_lost="block"),
    _mutant("last-tile-dropped", "the last tile of lanes were left out", lanes_lost="tile"),
    _mutant("lanes-tail-dropped", "the tile were that of one token, and the lanes beyond whole tiles left out",
            lanes_lost="first_tile"),
    Mutant("accumulated-in-bfloat16", "the running sum were bfloat16", _accumulated(numbers.round_to_bfloat16)),
    Mutant("accumulated-in-float16", "the running sum were float16", _accumulated(lambda sums: sums.half())),
    Mutant("accumulated-in-14-digits", "the running sum had 14 digits, as FP8 tensor cores keep", _accumulated(_cut(14))),
    Mutant("tiles-summed-in-bfloat16", "sums of 128 lanes were rounded to bfloat16",
           _accumulated(numbers.round_to_bfloat16, 128)),
    Mutant("truncated", "the answer were cut to bfloat16", _finished(_truncated)),
    Mutant("rounded-by-way-of-float16", "the answer were float16 first",
           _finished(lambda out, inputs: numbers.round_to_bfloat16(out.half().double()))),
    Mutant("columns-unwritten", "the last tile of columns were not written", _finished(partial(_unwritten, side="columns"))),
    Mutant("rows-unwritten", "rows beside whole tiles were not written", _finished(partial(_unwritten, side="rows"))),
    Mutant("columns-of-a-frozen-tile", "the tile were that of thousands of tokens", _finished(_frozen_columns)),
    Mutant("scale-pitch-is-its-width", "the rows of a sliced scale buffer lay one behind the other", _wrapped_scale_rows),
    Mutant("tile-of-the-tokens", "the tile depended on tokens alone", _with_tile(lambda inputs: inputs.a.shape[0])),
    Mutant("tile-edge-below", "work equal to an edge belonged to the next tile",
           _with_tile(lambda inputs: inputs.a.shape[0] * inputs.groups, fewer=True)),
    Mutant("tile-edge-above", "work just above an edge belonged to the tile before",
           _with_tile(lambda inputs: max(0, inputs.a.shape[0] * inputs.groups - 1))),
    Mutant("tile-frozen", "the tile were that of one token", _with_tile(lambda inputs: inputs.groups)),
)  # fmt: skip


def _tensor_core(inputs: Inputs) -> Outputs:
    """Sums of 16 products cut to 24 digits, as matrix units do."""
    return _accumulated(_cut(_DIGITS), 16)(inputs)


def _backwards(inputs: Inputs) -> Outputs:
    """fp32 sums from the last block to the first."""
    a, weight = _operands(inputs, _RIGHT)
    total = torch.zeros((*a.shape[:2], weight.shape[1]))
    for start in reversed(range(0, a.shape[-1], LANES)):
        part = slice(start, start + LANES)
        total += products.grouped(a[..., part], weight[..., part]).float()
    return Outputs(numbers.round_to_bfloat16(total.flatten(1)))


HONEST: tuple[Honest, ...] = (
    Honest("exact-sums", Precision(flushes=False), _multiplied(_RIGHT)),
    Honest("block-sums-in-fp32", Precision(flushes=False), lambda inputs: _accumulated(lambda sums: sums)(inputs)),
    Honest("sums-cut-to-24-digits", Precision(flushes=False), _tensor_core),
    Honest("from-the-last-block", Precision(flushes=False), _backwards),
)
