"""Does every matrix instruction multiply the elements that the document places in its lanes, and round within its bounds?

Placement is stated by the formulas of "CDNA4 Instruction Set Architecture Reference Guide" 7.1.4 (input: lane
`i + M * (b + B * (k / K_L))`, item `k % K_L`; output: groups of four rows), and for the formats of 8 bits and fewer by the
tables of 7.1.5.1 and 7.2.1. AMD's Matrix Instruction Calculator says the same of CDNA3. Numbers small enough to be exact
in any order settle placement to the bit; of others the error of a sum in any order bounds the result: how the adders
round inside is published for neither (measured for CDNA3: arXiv 2511.10909).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from impl.executions.isa.coverage import modelled
from impl.executions.isa.single import run_lines
from impl.executions.isa.unsupported import UnsupportedInstruction
from tests.executions.isa.assembler import accepts
from tests.executions.isa.small_floats import decode, encode
from tests.executions.isa.statements import ARCHS

Array = np.ndarray[Any, Any]
A, B, C, D = 16, 48, 96, 160
SCALE_A, SCALE_B = 240, 241

SHAPES = {
    "f64": ["16x16x4", "4x4x4_4b"],
    "f32": ["32x32x1_2b", "16x16x1_4b", "4x4x1_16b", "32x32x2", "16x16x4"],
    "xf32": ["16x16x8", "32x32x4"],
    "f16": ["32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x8", "16x16x16", "16x16x32", "32x32x16"],
    "bf16": ["32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x8", "16x16x16", "16x16x32", "32x32x16"],
    "i8": ["32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x16", "16x16x32", "16x16x64", "32x32x32"],
    "fp8_fp8": ["16x16x32", "32x32x16"], "fp8_bf8": ["16x16x32", "32x32x16"],
    "bf8_fp8": ["16x16x32", "32x32x16"], "bf8_bf8": ["16x16x32", "32x32x16"],
}  # fmt: skip
WIDTHS = {
    "f64": 64,
    "f32": 32,
    "xf32": 32,
    "f16": 16,
    "bf16": 16,
    "i8": 8,
    "fp8": 8,
    "bf8": 8,
    "fp6": 6,
    "bf6": 6,
    "fp4": 4,
}


@dataclass(frozen=True)
class Shape:
    """Of one instruction: rows, columns, inner size, blocks, and the kinds of both operands and of the result."""

    m: int
    n: int
    k: int
    blocks: int
    a: str
    b: str
    result: str

    @property
    def per_lane(self) -> int:
        """Consecutive k that a lane holds: K_L."""
        return self.k * self.m * self.blocks // 64

    def registers(self, kind: str) -> int:
        return max(1, self.per_lane * WIDTHS[kind] // 32)

    @property
    def result_registers(self) -> int:
        return self.m * self.n * self.blocks // 64 * (2 if self.result == "f64" else 1)


def _shape(text: str, kinds: str) -> Shape:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:_(\d+)b)?", text)
    assert match
    a, b = kinds.split("_") if "_" in kinds else (kinds, kinds)
    result = {"f64": "f64", "i8": "i32"}.get(kinds, "f32")
    return Shape(int(match[1]), int(match[2]), int(match[3]), int(match[4] or 1), a, b, result)


def _range(first: int, count: int, letter: str = "v") -> str:
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


# ------------------------------------------------------------------------------------------------------ placement


def input_places(shape: Shape) -> Callable[[int, int, int], tuple[int, int]]:
    """(block, row or column, k) to (lane, item), ISA 7.1.4.1. Square in M and N, so one serves both operands."""
    return lambda b, i, k: (i + shape.m * (b + shape.blocks * (k // shape.per_lane)), k % shape.per_lane)


def small_places(shape: Shape, kind: str) -> Callable[[int, int, int], tuple[int, int]]:
    """The same for F8F6F4, ISA 7.1.5.1: 8-bit operands lie in two runs of 16, half of K apart; smaller ones in one of 32."""
    if WIDTHS[kind] < 8:
        return lambda b, i, k: (i + shape.m * (k // 32), k % 32)
    half = shape.k // 2
    return lambda b, i, k: (i + shape.m * (k % half // 16), k % 16 + 16 * (k // half))


def output_place(shape: Shape, b: int, i: int, j: int) -> tuple[int, int]:
    """(block, row, column) to (lane, item), ISA 7.1.4.2."""
    height = 1 if shape.result == "f64" else 4
    per_item = math.ceil(64 / (shape.n * shape.m // height))
    rows = 64 // per_item // shape.n
    groups = shape.m // (height * rows)
    item = i % height + height * (i // (height * rows) + groups * (b // per_item))
    return j + shape.n * (i // height % rows + rows * (b % per_item)), item


def pack(registers: Array, first: int, width: int, lane: int, item: int, code: int) -> None:
    """Little-endian: 6-bit items run across register borders (ISA 7.1.4)."""
    for bit in range(width):
        at = item * width + bit
        registers[first + at // 32, lane] |= np.uint32(((code >> bit) & 1) << (at % 32))


def fill(
    registers: Array, first: int, codes: Array, width: int, place: Callable[[int, int, int], tuple[int, int]]
) -> None:
    """Puts codes [block, row, k] where `place` says."""
    for b, i, k in itertools.product(*map(range, codes.shape)):
        lane, item = place(b, i, k)
        pack(registers, first, width, lane, item, int(codes[b, i, k]))


def read(registers: Array, shape: Shape, first: int) -> Array:
    """The result's codes [block, row, column]."""
    found = np.zeros((shape.blocks, shape.m, shape.n), np.uint64)
    for b, i, j in itertools.product(range(shape.blocks), range(shape.m), range(shape.n)):
        lane, item = output_place(shape, b, i, j)
        if shape.result == "f64":
            found[b, i, j] = int(registers[first + 2 * item, lane]) | int(registers[first + 2 * item + 1, lane]) << 32
        else:
            found[b, i, j] = registers[first + item, lane]
    return found


def write(registers: Array, shape: Shape, first: int, codes: Array) -> None:
    for b, i, j in itertools.product(range(shape.blocks), range(shape.m), range(shape.n)):
        lane, item = output_place(shape, b, i, j)
        if shape.result == "f64":
            registers[first + 2 * item, lane] = int(codes[b, i, j]) & 0xFFFFFFFF
            registers[first + 2 * item + 1, lane] = int(codes[b, i, j]) >> 32
        else:
            registers[first + item, lane] = int(codes[b, i, j])


# ------------------------------------------------------------------------------------------------------ numbers


def _format(kind: str, arch: str) -> str:
    if kind == "xf32":
        return "f32"
    return kind + "_fnuz" if kind in ("fp8", "bf8") and arch == "gfx942" else kind


def _table(kind: str, arch: str) -> Array:
    """Numbers of all codes of a format of at most 16 bits, as doubles."""
    name, numbers = _format(kind, arch), []
    for code in range(1 << WIDTHS[kind]):
        number = decode(code, name)
        numbers.append(float(number))
    return np.array(numbers)


_TABLES: dict[tuple[str, str], Array] = {}


def numbers_of(codes: Array, kind: str, arch: str) -> Array:
    """Codes as exact doubles."""
    if kind == "i8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float64).reshape(codes.shape)
    if WIDTHS[kind] <= 16:
        if (kind, arch) not in _TABLES:
            _TABLES[kind, arch] = _table(kind, arch)
        return _TABLES[kind, arch][codes.astype(np.int64)]
    if kind == "f64":
        return codes.astype(np.uint64).view(np.float64)
    bits = codes.astype(np.uint32)
    return (bits & np.uint32(0xFFFFE000) if kind == "xf32" else bits).view(np.float32).astype(np.float64)


def codes_of(numbers: Array, kind: str, arch: str) -> Array:
    """Codes of numbers that the format holds exactly."""
    if kind == "i8":
        return numbers.astype(np.int64) & 255
    if kind in ("f32", "xf32"):
        return numbers.astype(np.float32).view(np.uint32)
    if kind == "f64":
        return numbers.astype(np.float64).view(np.uint64)
    return np.vectorize(lambda x: encode(Fraction(float(x)), _format(kind, arch)))(numbers)


def small_numbers(generator: np.random.Generator, size: tuple[int, ...], kind: str) -> Array:
    """Whole numbers that every format holds and whose products sum exactly in any order."""
    choices = {"fp4": [0, 1, 2, 3, 4, 6], "fp6": [0, 1, 2, 3, 4, 5, 6, 7]}.get(kind, [0, 1, 2, 3, 4, 5, 6, 7])
    return generator.choice(choices, size) * generator.choice([-1.0, 1.0], size)


def result_codes(numbers: Array, kind: str) -> Array:
    if kind == "i32":
        return numbers.astype(np.int64).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    return (
        numbers.astype(np.float32).view(np.uint32).astype(np.uint64)
        if kind == "f32"
        else numbers.astype(np.float64).view(np.uint64)
    )


def result_numbers(codes: Array, kind: str) -> Array:
    if kind == "i32":
        return codes.astype(np.uint32).view(np.int32).astype(np.float64)
    return codes.astype(np.uint32).view(np.float32).astype(np.float64) if kind == "f32" else codes.view(np.float64)


# ------------------------------------------------------------------------------------------------------ runs

NAMES = {f"v_mfma_{'i32' if kinds == 'i8' else 'f64' if kinds == 'f64' else 'f32'}_{text}_{kinds}": (text, kinds)
         for kinds, texts in SHAPES.items() for text in texts}  # fmt: skip


def _line(name: str, shape: Shape, letter: str = "v", c: str | None = None, tail: str = "") -> str:
    accumulator = _range(C, shape.result_registers, letter)
    return (
        f"{name} {_range(D, shape.result_registers, letter)}, {_range(A, shape.registers(shape.a))}, "
        f"{_range(B, shape.registers(shape.b))}, {accumulator if c is None else c}{tail}"
    )


def multiply(
    arch: str,
    line: str,
    shape: Shape,
    a: Array,
    b: Array,
    c: Array,
    *,
    exec_mask: int = (1 << 64) - 1,
    accumulates: bool = False,
) -> Array:
    """Runs one line on codes. accumulates: C and D are accumulation registers."""
    registers = np.zeros((512, 64), np.uint32)
    base = 256 if accumulates else 0
    fill(registers, A, a, WIDTHS[shape.a], input_places(shape))
    fill(registers, B, b, WIDTHS[shape.b], input_places(shape))
    write(registers, shape, base + C, c)
    sgpr = np.zeros(128, np.uint32)
    sgpr[126], sgpr[127] = exec_mask & 0xFFFFFFFF, exec_mask >> 32
    wave = run_lines(arch, line, vgpr=registers, sgpr=sgpr)
    return read(wave.vgpr, shape, base + D)


def _items() -> list[tuple[str, str]]:
    return [
        (arch, name)
        for name, (text, kinds) in NAMES.items()
        for arch in ARCHS
        if accepts(arch, _line(name, _shape(text, kinds)))
    ]


def _skip_unmodelled(arch: str, name: str, line: str) -> bool:
    if arch in modelled().get(name, ()):
        return False
    with pytest.raises(UnsupportedInstruction):
        run_lines(arch, line)
    return True


@pytest.mark.parametrize(("arch", "name"), _items())
def test_exact_products_lie_where_the_document_places_them(arch: str, name: str) -> None:
    shape = _shape(*NAMES[name])
    line = _line(name, shape)
    if _skip_unmodelled(arch, name, line):
        return
    generator = np.random.default_rng(3)
    a = small_numbers(generator, (shape.blocks, shape.m, shape.k), shape.a)
    b = small_numbers(generator, (shape.blocks, shape.n, shape.k), shape.b)
    c = generator.integers(-50, 50, (shape.blocks, shape.m, shape.n)).astype(np.float64)
    want = result_codes(np.einsum("bik,bjk->bij", a, b) + c, shape.result)
    codes = codes_of(a, shape.a, arch), codes_of(b, shape.b, arch), result_codes(c, shape.result)
    got = multiply(arch, line, shape, *codes)
    assert np.array_equal(got, want), _first(got, want)
    # Disabled lanes multiply as well: "ignores exec mask ... and forces it to 1 for all threads" (ISA 7.1.2).
    got = multiply(arch, line, shape, *codes, exec_mask=0x00FF00FF0F0F3333)
    assert np.array_equal(got, want), _first(got, want)


def _first(got: Array, want: Array) -> str:
    where = tuple(int(x) for x in np.argwhere(got != want)[0])
    wrong = int((got != want).sum())
    return f"[block, row, column] {where}: {int(got[where]):#x}, should be {int(want[where]):#x}; {wrong} differ"


@pytest.mark.parametrize(("arch", "name"), _items())
def test_accumulation_registers_and_constants_serve_as_c(arch: str, name: str) -> None:
    shape = _shape(*NAMES[name])
    if arch not in modelled().get(name, ()):
        return
    generator = np.random.default_rng(4)
    a = small_numbers(generator, (shape.blocks, shape.m, shape.k), shape.a)
    b = small_numbers(generator, (shape.blocks, shape.n, shape.k), shape.b)
    c = generator.integers(-50, 50, (shape.blocks, shape.m, shape.n)).astype(np.float64)
    codes = codes_of(a, shape.a, arch), codes_of(b, shape.b, arch), result_codes(c, shape.result)
    product = np.einsum("bik,bjk->bij", a, b)
    got = multiply(arch, _line(name, shape, "a"), shape, *codes, accumulates=True)
    assert np.array_equal(got, want := result_codes(product + c, shape.result)), _first(got, want)
    got = multiply(arch, _line(name, shape, c="0"), shape, *codes)
    assert np.array_equal(got, want := result_codes(product, shape.result)), _first(got, want)
    if shape.result == "f32":
        got = multiply(arch, _line(name, shape, c="1.0"), shape, *codes)
        assert np.array_equal(got, want := result_codes(product + 1, shape.result)), _first(got, want)


@pytest.mark.parametrize(("arch", "name"), [item for item in _items() if "_i32_" not in item[1]])
def test_rounding_stays_within_the_error_of_a_sum(arch: str, name: str) -> None:
    shape = _shape(*NAMES[name])
    if arch not in modelled().get(name, ()):
        return
    generator = np.random.default_rng(5)
    a = _random_codes(generator, (shape.blocks, shape.m, shape.k), shape.a)
    b = _random_codes(generator, (shape.blocks, shape.n, shape.k), shape.b)
    c = generator.normal(size=(shape.blocks, shape.m, shape.n)) * 8
    c_codes = result_codes(c, shape.result)
    x, y, z = numbers_of(a, shape.a, arch), numbers_of(b, shape.b, arch), result_numbers(c_codes, shape.result)
    got = result_numbers(multiply(arch, _line(name, shape), shape, a, b, c_codes), shape.result)
    want = np.einsum("bik,bjk->bij", x, y) + z
    # Aligned to the largest term and cut below 2**-24 of it, once a term, then rounded: (K + 2) units of the largest.
    largest = np.maximum(np.abs(x[:, :, None, :] * y[:, None, :, :]).max(-1), np.abs(z))
    largest = np.maximum(largest, np.abs(want))
    unit = 2.0**-51 if shape.result == "f64" else 2.0**-23
    assert (np.abs(got - want) <= (shape.k + 2) * unit * largest).all()


def _random_codes(generator: np.random.Generator, size: tuple[int, ...], kind: str) -> Array:
    """Numbers around one, in any format; whole bit patterns but for the largest exponents."""
    if kind in ("f64", "f32", "xf32"):
        numbers = generator.normal(size=size)
        return numbers.astype(np.float32).view(np.uint32) if kind != "f64" else numbers.view(np.uint64)
    if kind == "f16":
        return generator.normal(size=size).astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return (generator.normal(size=size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint32)
    # No zero with a sign, which is NaN in the FNUZ encodings, and none of the largest exponent.
    return generator.integers(1, 0x60, size) | generator.choice([0, 0x80], size)


@pytest.mark.parametrize(("arch", "name"), [item for item in _items() if item[1].endswith(("_f16", "_bf16", "_f32"))])
def test_subnormals_are_kept_and_specials_spread(arch: str, name: str) -> None:
    """ "keep Input/Output Denorms" (ISA 7.1.2); infinities and NaN follow IEEE 754."""
    shape = _shape(*NAMES[name])
    if arch not in modelled().get(name, ()):
        return
    kind = shape.a
    one = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}[kind]
    special = {"f16": (0x7C00, 0x7E00), "bf16": (0x7F80, 0x7FC0), "f32": (0x7F800000, 0x7FC00000)}[kind]
    a, b = np.zeros((shape.blocks, shape.m, shape.k), np.int64), np.zeros((shape.blocks, shape.n, shape.k), np.int64)
    a[:, 0, 0], a[:, 1, 0], a[:, 2, 0] = 1, special[0], special[1]  # the smallest subnormal, infinity, NaN
    b[:, 0, 0] = one
    c = np.zeros((shape.blocks, shape.m, shape.n))
    got = result_numbers(multiply(arch, _line(name, shape), shape, a, b, result_codes(c, "f32")), "f32")
    smallest = float(decode(1, kind))  # type: ignore[arg-type]
    assert (got[:, 0, 0] == smallest).all()
    assert (got[:, 1, 0] == np.inf).all() and np.isnan(got[:, 1, 1]).all()
    assert np.isnan(got[:, 2, :]).all()
    c_codes = np.full(c.shape, 1, np.uint64)  # the smallest subnormal of binary32
    assert np.array_equal(multiply(arch, _line(name, shape), shape, a[:, 3:4].repeat(shape.m, 1), b, c_codes), c_codes)


@pytest.mark.parametrize("arch", ARCHS)
def test_integers_wrap(arch: str) -> None:
    name = "v_mfma_i32_32x32x16_i8"
    shape = _shape(*NAMES[name])
    if _skip_unmodelled(arch, name, _line(name, shape)):
        return
    a = np.full((1, 32, 16), 0x80)
    c = np.full((1, 32, 32), 0x7FFFFFF0, np.uint64)
    got = multiply(arch, _line(name, shape), shape, a, a, c)
    assert (got == (0x7FFFFFF0 + 16 * 128 * 128) % 2**32).all()


# ------------------------------------------------------------------------------------------------------ scaled

FORMATS = ("fp8", "bf8", "fp6", "bf6", "fp4")
_SCALED = [(shape, a, b) for shape in ("16x16x128", "32x32x64") for a in FORMATS for b in FORMATS]


def _scaled_line(
    text: str, a: str, b: str, scaled: bool, op_sel: tuple[int, int] = (0, 0), hi: tuple[int, int] = (0, 0)
) -> str:
    shape = _shape(text, f"{a}_{b}")
    count = {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}
    operands = [
        _range(D, shape.result_registers),
        _range(A, count[a]),
        _range(B, count[b]),
        _range(C, shape.result_registers),
    ]
    tail = "".join(f" {word}:{FORMATS.index(kind)}" for word, kind in (("cbsz", a), ("blgp", b)) if FORMATS.index(kind))
    if not scaled:
        return f"v_mfma_f32_{text}_f8f6f4 {', '.join(operands)}{tail}"
    selects = f" op_sel:[{op_sel[0]},{op_sel[1]},0] op_sel_hi:[{hi[0]},{hi[1]},0]"
    return f"v_mfma_scale_f32_{text}_f8f6f4 {', '.join([*operands, f'v{SCALE_A}', f'v{SCALE_B}'])}{selects}{tail}"


def _scaled_run(
    text: str,
    a_kind: str,
    b_kind: str,
    line: str,
    scales: tuple[Array, Array] | None,
    shifts: tuple[int, int],
    seed: int,
) -> tuple[Array, Array]:
    """(got, want): scales [row, block of 32 k] are put into the byte `shifts` says, the other bytes are noise."""
    shape = _shape(text, f"{a_kind}_{b_kind}")
    generator = np.random.default_rng(seed)
    a, b = (
        small_numbers(generator, (1, shape.m, shape.k), a_kind),
        small_numbers(generator, (1, shape.n, shape.k), b_kind),
    )
    a[np.abs(a) > largest_whole(a_kind)] = 1
    b[np.abs(b) > largest_whole(b_kind)] = 1
    registers = generator.integers(0, 1 << 32, (512, 64), dtype=np.uint32)
    registers[A : D + 32] = 0
    fill(registers, A, codes_of(a, a_kind, "gfx950"), WIDTHS[a_kind], small_places(shape, a_kind))
    fill(registers, B, codes_of(b, b_kind, "gfx950"), WIDTHS[b_kind], small_places(shape, b_kind))
    c = generator.integers(-50, 50, (1, shape.m, shape.n)).astype(np.float64)
    write(registers, shape, C, result_codes(c, "f32"))
    if scales is not None:
        for register, values, byte in zip((SCALE_A, SCALE_B), scales, shifts, strict=True):
            for lane in range(64):
                # "Lane 0: M=0, K=0..31 ... Lane 16: M=0, K=32..63" whatever the format (ISA 7.2.1)
                code = np.uint32(int(values[lane % shape.m, lane // shape.m]) << (8 * byte))
                registers[register, lane] = (registers[register, lane] & ~np.uint32(255 << (8 * byte))) | code
        a = a * np.exp2(scales[0].astype(np.float64) - 127).repeat(32, 1)[None]
        b = b * np.exp2(scales[1].astype(np.float64) - 127).repeat(32, 1)[None]
    wave = run_lines("gfx950", line, vgpr=registers)
    return read(wave.vgpr, shape, D), result_codes(np.einsum("bik,bjk->bij", a, b) + c, "f32")


def largest_whole(kind: str) -> int:
    return {"fp4": 6, "fp6": 7}.get(kind, 7)


@pytest.mark.parametrize(("text", "a", "b"), _SCALED)
def test_formats_of_8_bits_and_fewer_lie_where_the_tables_say(text: str, a: str, b: str) -> None:
    line = _scaled_line(text, a, b, scaled=False)
    assert accepts("gfx950", line)
    got, want = _scaled_run(text, a, b, line, None, (0, 0), 6)
    assert np.array_equal(got, want), _first(got, want)


@pytest.mark.parametrize(("text", "a", "b"), _SCALED)
def test_each_lane_scales_its_own_block_of_32(text: str, a: str, b: str) -> None:
    shape = _shape(text, "fp8_fp8")
    generator = np.random.default_rng(8)
    scales = (
        generator.integers(125, 130, (shape.m, shape.k // 32)),
        generator.integers(125, 130, (shape.n, shape.k // 32)),
    )
    for byte_a, byte_b in ((0, 0), (1, 2), (3, 1), (2, 3)):
        line = _scaled_line(text, a, b, True, (byte_a & 1, byte_b & 1), (byte_a >> 1, byte_b >> 1))
        assert accepts("gfx950", line)
        got, want = _scaled_run(text, a, b, line, scales, (byte_a, byte_b), 9)
        assert np.array_equal(got, want), f"bytes {byte_a}, {byte_b}: {_first(got, want)}"


def test_a_scale_of_all_ones_is_nan() -> None:
    scales = np.full((16, 4), 127), np.full((16, 4), 127)
    scales[0][3, 1] = 255
    got, want = _scaled_run(
        "16x16x128", "fp8", "fp8", _scaled_line("16x16x128", "fp8", "fp8", True), scales, (0, 0), 10
    )
    numbers = result_numbers(got, "f32")
    assert np.isnan(numbers[0, 3]).all() and not np.isnan(np.delete(numbers, 3, 1)).any()
    assert np.array_equal(np.delete(got, 3, 1), np.delete(want, 3, 1))


def test_gfx942_has_neither_scaled_nor_wide_instructions() -> None:
    for line in (_scaled_line("16x16x128", "fp8", "fp8", True), _scaled_line("32x32x64", "fp8", "fp8", False)):
        assert not accepts("gfx942", line)
        with pytest.raises(UnsupportedInstruction):
            run_lines("gfx942", line)
