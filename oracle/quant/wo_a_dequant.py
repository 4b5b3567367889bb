"""Which bfloat16 weight must an output projection have, and when is it made?

    w[g, r, k] = bf16( fp32(weight[g * R + r, k]) * scale[g, r // br, k // bc] )       for one-byte weights with a scale
    w[g, r, k] = bf16(weight[g * R + r, k])                                            otherwise

with br = R / row blocks of a group and bc = K / column blocks. The scale is `weight_scale_inv`, or `weight_scale` under
the per-block scheme; where that is absent, `weight_scale`. A scale beside a weight of another size is left from before
and is ignored. Scale numbers:

    float8_e8m0fnu   the byte as fp32's exponent field: 0 is 0.0, 255 is infinity, b is 2^(b - 127)
    uint8            2^(b - 127), never the number b: 0 is 2^-127, 255 (2^128) is infinity
    float            as it is

The product is fp32 and is rounded to nearest even. It is made on the first call and kept by the module: later calls return
the same object though the weight has changed, and another module has its own.

The scales as bytes: the bytes of both exponent dtypes as they are; e + 127 of fp32 numbers if every one is a power 2^e with
-127 <= e <= 127; otherwise there are none, since nothing may be rounded.

Source: `_get_cached_wo_a_bf16` of vLLM's ROCm backend, and `_wo_a_block_scale_to_e8m0` for the bytes. The former guesses
blocks that do not divide the weight; here they must.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

from cases.memory import guarded_copy
from cases.precision import Precision
from cases.quant.wo_a_dequant import Inputs, Outputs, Projection
from oracle.check import Check, exact, wrong_form
from oracle.formats import numbers
from oracle.laws import Honest, Law, Mutant

_ENCODINGS: dict[torch.dtype, numbers.Encoding] = {
    torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e4m3fnuz: "float8_e4m3fnuz",
}  # fmt: skip
_SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8, torch.float32)


@dataclasses.dataclass(frozen=True)
class Faults:
    """What a dequantisation does wrong; the defaults are right."""

    choose: Literal["right", "inverse_only", "plain_first", "none"] = "right"
    retained_applied: bool = False
    bias: int = 127
    byte_as_number: bool = False
    zero_byte: Literal["own", "zero", "power"] = "own"
    top_byte: Literal["infinity", "nan"] = "infinity"
    divided: bool = False
    group_of_scale: Literal["own", "first", "interleaved"] = "own"
    blocks: Literal["own", "32", "128", "one_more", "turned"] = "own"
    other_encoding: bool = False
    scale_rounded: bool = False
    truncated: bool = False
    once: bool = False
    order: Literal["own", "rank_major", "width_major"] = "own"
    bytes_of: Literal[
        "own", "nearest", "upwards", "sizes", "one_more", "normal_only", "numbers", "all_ones_refused", "zero_is_0"
    ] = "own"


RIGHT = Faults()


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The weights of the first and the third call, and that the second returns the first; `dtype` changes nothing.

    Raises `ValueError` where groups, rank and width are not those of the weight or blocks do not divide it, and
    `TypeError` for a scale of another dtype.
    """
    del dtype
    return _answer(inputs, RIGHT)


def dequantised(module: Projection, groups: int, rank: int, width: int, faults: Faults = RIGHT) -> torch.Tensor:
    """The bfloat16 weight [groups, rank, width] of a module; raises as `reference` does."""
    weight = module.weight
    if tuple(weight.shape) != (groups * rank, width):
        raise ValueError(f"weight={list(weight.shape)}: should be {[groups * rank, width]}")
    scale = _chosen(module, faults)
    one_byte = weight.element_size() == 1
    if scale is not None and (one_byte or faults.retained_applied):
        out = _scaled(weight, scale, groups, rank, width, faults)
    elif one_byte:
        out = numbers.round_to_bfloat16(_numbers(weight, faults))
    else:
        out = weight.to(torch.bfloat16, copy=True)
    if faults.order == "rank_major":
        return out.reshape(rank, groups, width).transpose(0, 1)
    if faults.order == "width_major":
        return out.reshape(groups, width, rank).transpose(1, 2)
    return out.reshape(groups, rank, width)


def _chosen(module: Projection, faults: Faults) -> torch.Tensor | None:
    inverse, plain = module.weight_scale_inv, module.weight_scale
    if faults.choose == "none":
        return None
    if faults.choose == "inverse_only":
        return inverse
    if faults.choose == "plain_first":
        return inverse if plain is None else plain
    if module.per_block_scheme:
        return plain
    return plain if inverse is None else inverse


def _numbers(weight: torch.Tensor, faults: Faults) -> torch.Tensor:
    if weight.dtype not in _ENCODINGS:
        return weight.float()
    encoding = _ENCODINGS[weight.dtype]
    if faults.other_encoding:
        encoding = "float8_e4m3fn" if encoding == "float8_e4m3fnuz" else "float8_e4m3fnuz"
    return numbers.decode(weight.view(torch.uint8), encoding)


def _scaled(
    weight: torch.Tensor, scale: torch.Tensor, groups: int, rank: int, width: int, faults: Faults
) -> torch.Tensor:
    rows, columns = scale.shape
    if rows % groups or rank % (rows // groups):
        raise ValueError(f"rows of scale={rows}: should be {groups} times a divisor of {rank}")
    if width % columns:
        raise ValueError(f"columns of scale={columns}: should be a divisor of {width}")
    per_row, per_column = groups * rank // rows, width // columns
    row, column = torch.arange(groups * rank), torch.arange(width)
    if faults.blocks in ("32", "128"):
        per_row = per_column = int(faults.blocks)
    elif faults.blocks == "one_more":
        per_row += 1
    elif faults.blocks == "turned":
        per_row, per_column = per_column, per_row
    scale_row = row // per_row
    if faults.group_of_scale == "first":
        scale_row = row % rank // per_row
    elif faults.group_of_scale == "interleaved":
        scale_row = row % rank // per_row * groups + row // rank
    scale_row, scale_column = scale_row.clamp(max=rows - 1), (column // per_column).clamp(max=columns - 1)
    factor = _scale_numbers(scale, faults)[scale_row][:, scale_column]
    number = _numbers(weight, faults)
    if faults.divided:
        return numbers.round_to_bfloat16(number / factor)
    if faults.once:
        return numbers.round_to_bfloat16(number.double() * factor.double())
    if faults.truncated:
        return ((number * factor).view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return numbers.round_to_bfloat16(number * factor)


def _scale_numbers(scale: torch.Tensor, faults: Faults) -> torch.Tensor:
    """The scales as fp32."""
    if scale.dtype not in _SCALE_DTYPES:
        raise TypeError(f"scale={scale.dtype}: should be one of {', '.join(map(str, _SCALE_DTYPES))}")
    if scale.dtype == torch.float32:
        return numbers.round_to_bfloat16(scale).float() if faults.scale_rounded else scale
    bytes_ = scale.view(torch.uint8)
    if faults.byte_as_number:
        return bytes_.float()
    number = numbers.e8m0_decode(bytes_, all_ones=faults.top_byte)
    zero = faults.zero_byte
    if zero == "own":
        zero = "zero" if scale.dtype == torch.float8_e8m0fnu else "power"
    if zero == "zero":
        number = torch.where(bytes_ == 0, 0.0, number)
    return torch.ldexp(number.double(), torch.tensor(127 - faults.bias)).float() if faults.bias != 127 else number


def exponent_bytes(scale: torch.Tensor, faults: Faults = RIGHT) -> torch.Tensor | None:
    """The exponent bytes of a scale, uint8 of its shape; None where there are none without rounding."""
    fault = faults.bytes_of
    if scale.dtype != torch.float32:
        bytes_ = scale.view(torch.uint8)
        if fault == "numbers":
            return numbers.e8m0_encode(bytes_.float(), rounding="nearest")
        return None if fault == "all_ones_refused" and bool((bytes_ == 255).any()) else bytes_.clone()
    size = scale.abs() if fault == "sizes" else scale
    if fault in ("nearest", "upwards"):
        return numbers.e8m0_encode(size, rounding="nearest" if fault == "nearest" else "up")
    mantissa, exponent = torch.frexp(size.double())
    byte = exponent - 1 + numbers.E8M0_BIAS
    lowest = 1 if fault == "normal_only" else 0
    fits = (mantissa == 0.5) & (byte >= lowest) & (byte <= 254)
    if fault == "zero_is_0":
        byte, fits = torch.where(size == 0, 0, byte), fits | (size == 0)
    return (byte + (fault == "one_more")).to(torch.uint8) if bool(fits.all()) else None


def _answer(inputs: Inputs, faults: Faults) -> Outputs:
    shape = (inputs.groups, inputs.rank, inputs.width)
    scale = _chosen(inputs.module, faults)
    exponents = None if scale is None else exponent_bytes(scale, faults)
    return Outputs(
        first=dequantised(inputs.module, *shape, faults),
        kept=torch.tensor([1]),
        other=dequantised(inputs.other, *shape, faults),
        powers=None if scale is None else torch.tensor([int(exponents is not None)]),
        exponents=exponents,
    )


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Both weights bit for bit but for the choice of NaN in a dequantised one, whether the first was kept, and the
    exponent bytes where the implementation says whether there are any."""
    del precision
    want = reference(inputs)
    one_byte = inputs.module.weight.element_size() == 1
    checks: tuple[Check, ...] = (
        _same_weight("first", outputs.first, want.first, one_byte, "the weight of the first call is exact"),
        exact("kept", outputs.kept, want.kept, why="the second call returns the object of the first"),
        _same_weight("other", outputs.other, want.other, one_byte, "another module has a weight of its own"),
    )
    if outputs.powers is None or want.powers is None:
        return checks
    checks += (exact("powers", outputs.powers, want.powers, why="1 where every scale is a power of two, 0 otherwise"),)
    if want.exponents is None:
        return checks
    return (*checks, exact("exponents", outputs.exponents, want.exponents, why="a byte is its scale's exponent"))


def _same_weight(name: str, got: torch.Tensor | None, want: torch.Tensor, free_nan: bool, why: str) -> Check:
    form = wrong_form(name, got, want)
    if form is not None or got is None:
        return form or exact(name, got, want)
    if free_nan:
        nan = torch.full((), float("nan"), dtype=want.dtype, device=want.device)
        got, want = torch.where(torch.isnan(got), nan, got), torch.where(torch.isnan(want), nan, want)
    return exact(name, got, want, why=why)


def _of_modules(inputs: Inputs, change: Callable[[Projection], Projection | None]) -> Inputs | None:
    """The call with both modules changed; None where the change says nothing about one."""
    module, other = change(inputs.module), change(inputs.other)
    return None if module is None or other is None else dataclasses.replace(inputs, module=module, other=other)


def _of_scales(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Inputs | None:
    """The call with every scale tensor changed."""

    def edit(module: Projection) -> Projection | None:
        fields: dict[str, Any] = {}
        for name in ("weight_scale_inv", "weight_scale"):
            scale = getattr(module, name)
            if scale is not None:
                fields[name] = change(scale)
        return dataclasses.replace(module, **fields) if fields and None not in fields.values() else None

    return _of_modules(inputs, edit)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _weights(outputs: Outputs) -> Outputs:
    """The answer without the exponent bytes."""
    return Outputs(outputs.first, outputs.kept, outputs.other)


def _stored(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return guarded_copy(scale.contiguous().view(torch.uint8), fill=0xFF).view(dtype)


def _finer_rows(inputs: Inputs) -> Inputs | None:
    def finer(scale: torch.Tensor) -> torch.Tensor | None:
        each = inputs.groups * inputs.rank // scale.shape[0]
        return _stored(scale.view(_bytes_of(scale)).repeat_interleave(each, 0), scale.dtype) if each > 1 else None

    return _of_scales(inputs, finer)


def _bytes_of(scale: torch.Tensor) -> torch.dtype:
    return torch.int32 if scale.dtype == torch.float32 else torch.uint8


def _other_exponents(inputs: Inputs) -> Inputs | None:
    """uint8 exponents as float8_e8m0fnu and back, where both mean the same."""

    def turned(scale: torch.Tensor) -> torch.Tensor | None:
        if scale.dtype == torch.float32 or bool((scale.view(torch.uint8) == 0).any()):
            return None
        return _stored(scale, torch.uint8 if scale.dtype == torch.float8_e8m0fnu else torch.float8_e8m0fnu)

    return _of_scales(inputs, turned)


def _exponents_as_numbers(inputs: Inputs) -> Inputs | None:
    """The powers of two themselves, in fp32."""

    def widened(scale: torch.Tensor) -> torch.Tensor | None:
        return None if scale.dtype == torch.float32 else _stored(_scale_numbers(scale, RIGHT), torch.float32)

    return _of_scales(inputs, widened)


def _renamed(inputs: Inputs) -> Inputs | None:
    """The scale alone, under the other name."""

    def edit(module: Projection) -> Projection | None:
        if (module.weight_scale is None) == (module.weight_scale_inv is None):
            return None
        return dataclasses.replace(module, weight_scale=module.weight_scale_inv, weight_scale_inv=module.weight_scale)

    return _of_modules(inputs, edit)


def _one_group(inputs: Inputs) -> Inputs | None:
    if inputs.groups == 1:
        return None
    return dataclasses.replace(inputs, groups=1, rank=inputs.groups * inputs.rank)


def _joined(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return dataclasses.replace(first, first=first.first.flatten(0, 1)[None], other=first.other.flatten(0, 1)[None])


def _scale_left_behind(inputs: Inputs) -> Inputs | None:
    """A bfloat16 weight that never had a scale."""

    def edit(module: Projection) -> Projection | None:
        if module.weight.element_size() == 1 or (module.weight_scale is None and module.weight_scale_inv is None):
            return None
        return dataclasses.replace(module, weight_scale=None, weight_scale_inv=None)

    return _of_modules(inputs, edit)


LAWS: tuple[Law, ...] = (
    Law(
        "D1 a scale for each row",
        "a block's scale is that of each of its rows",
        _finer_rows,
        _same,
        "bitwise",
        _weights,
    ),
    Law("D2 exponents as another dtype", "exponents mean the same in both dtypes", _other_exponents, _same, "bitwise"),
    Law("D3 exponents as numbers", "an exponent is a power of two", _exponents_as_numbers, _same, "bitwise", _weights),
    Law("D4 scale renamed", "a scale that is alone counts under either name", _renamed, _same, "bitwise"),
    Law("D5 groups joined", "groups are rows one behind the other", _one_group, _joined, "bitwise"),
    Law("D6 scale left behind", "a bfloat16 weight has no scale", _scale_left_behind, _same, "bitwise", _weights),
)


def _mutant(name: str, pitfall: str, **faults: Any) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _answer(inputs, Faults(**faults)))


def _rebuilt(inputs: Inputs) -> Outputs:
    return dataclasses.replace(reference(inputs), kept=torch.tensor([0]))


def _refreshed(inputs: Inputs) -> Outputs:
    """The kept weight overwritten with that of the changed weight."""
    changed = dataclasses.replace(inputs, module=dataclasses.replace(inputs.module, weight=inputs.changed))
    return reference(changed)


def _shared(inputs: Inputs) -> Outputs:
    answer = reference(inputs)
    return dataclasses.replace(answer, other=answer.first)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("dequantised-twice", "a scale left beside a bfloat16 weight were applied", retained_applied=True),
    _mutant("plain-name-unknown", "the name weight_scale were not looked for", choose="inverse_only"),
    _mutant("plain-name-first", "weight_scale counted before weight_scale_inv", choose="plain_first"),
    _mutant("scale-ignored", "the codes were the weights", choose="none"),
    _mutant("exponent-as-number", "exponent bytes were numbers", byte_as_number=True),
    _mutant("bias-126", "exponents had bias 126", bias=126),
    _mutant("bias-128", "exponents had bias 128", bias=128),
    _mutant("byte-0-is-0", "the exponent byte 0 were 0 in both dtypes", zero_byte="zero"),
    _mutant("byte-0-is-a-power", "the exponent byte 0 were 2^-127 in both dtypes", zero_byte="power"),
    _mutant("byte-255-is-nan", "the exponent byte 255 were NaN", top_byte="nan"),
    _mutant("divided", "the weight were divided by its scale", divided=True),
    _mutant("scales-of-the-first-group", "every group had the scales of the first", group_of_scale="first"),
    _mutant("scale-groups-interleaved", "the rows of the scale were ordered by block, then group",
            group_of_scale="interleaved"),
    _mutant("blocks-of-32", "blocks were always 32 by 32", blocks="32"),
    _mutant("blocks-of-128", "blocks were always 128 by 128", blocks="128"),
    _mutant("blocks-one-row-more", "a block had one row more", blocks="one_more"),
    _mutant("blocks-turned", "the rows of a block were its columns", blocks="turned"),
    _mutant("other-encoding", "the codes were those of the other e4m3 format", other_encoding=True),
    _mutant("scale-in-bfloat16", "the scale were rounded to bfloat16 first", scale_rounded=True),
    _mutant("truncated", "the product were cut to bfloat16", truncated=True),
    _mutant("rounded-once", "the exact product were rounded to bfloat16, without fp32 between", once=True),
    _mutant("rows-rank-major", "the rows were ordered by rank, then group", order="rank_major"),
    _mutant("columns-before-rows", "a group's weight were stored column by column", order="width_major"),
    _mutant("exponents-nearest", "a scale were rounded to the nearest power of two", bytes_of="nearest"),
    _mutant("exponents-upwards", "a scale were rounded up to a power of two", bytes_of="upwards"),
    _mutant("exponents-of-sizes", "the exponent of a negative scale were taken", bytes_of="sizes"),
    _mutant("exponents-one-more", "the exponents had bias 128", bytes_of="one_more"),
    _mutant("exponents-of-normal-numbers", "2^-127 had no byte", bytes_of="normal_only"),
    _mutant("exponents-of-bytes", "exponent bytes were taken for numbers", bytes_of="numbers"),
    _mutant("byte-255-refused", "the byte 255 were no exponent byte", bytes_of="all_ones_refused"),
    _mutant("zero-has-byte-0", "a scale of 0 had the byte 0", bytes_of="zero_is_0"),
    Mutant("made-anew", "the weight were made anew on every call", _rebuilt),
    Mutant("refreshed", "the kept weight were overwritten when the weight changes", _refreshed),
    Mutant("shared-between-modules", "all modules shared one kept weight", _shared),
)  # fmt: skip


def _block_by_block(inputs: Inputs) -> Outputs:
    """Block by block, and with other NaN than the reference's."""

    def weight_of(module: Projection) -> torch.Tensor:
        right = dequantised(module, inputs.groups, inputs.rank, inputs.width)
        scale = _chosen(module, RIGHT)
        if scale is None or module.weight.element_size() != 1:
            return right
        out = torch.empty(module.weight.shape, dtype=torch.bfloat16)
        high, wide = out.shape[0] // scale.shape[0], out.shape[1] // scale.shape[1]
        factor = _scale_numbers(scale, RIGHT)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                out[part] = (_numbers(module.weight[part], RIGHT) * factor[i, j]).bfloat16()
        out[torch.isnan(out)] = torch.tensor([-1], dtype=torch.int16).view(torch.bfloat16)
        return out.view(right.shape)

    return Outputs(weight_of(inputs.module), torch.tensor([1]), weight_of(inputs.other))


HONEST: tuple[Honest, ...] = (
    Honest("formula", Precision(), reference),
    Honest("block-by-block", Precision(), _block_by_block),
)
