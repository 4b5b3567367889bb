"""What should a vector or scalar instruction leave behind, by the published pseudocode? And in which spellings is it asked?

Instructions, the sizes and formats of their operands and their pseudocode come from `tinygrad`'s tables of AMD's CDNA
documents; the modifiers around the pseudocode (negation, `op_sel`, SDWA, clamps) are stated here, from chapters 6 and 13
of the "CDNA4 Instruction Set Architecture Reference Guide" (below: ISA). `FIXES` are errata, each with its reason.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

from tests.executions.isa import functions
from tests.executions.isa.pseudocode import Run, Value, whole
from tests.executions.isa.small_floats import FORMATS, NAN

LANES = 64
ARCHS = ("gfx942", "gfx950")

WHOLE_WAVE = re.compile(r"V_(READ|WRITE)(FIRST)?LANE|V_SWAP|V_PERMLANE")
"""Not of one lane: asked in `test_lanes.py`."""
APPROXIMATE = re.compile(r"V_(EXP|LOG|RCP|RCP_IFLAG|RSQ|SQRT|SIN|COS)_")
"""Given to an ulp, not to the bit: asked in `test_approximations.py`."""
BY_HAND = re.compile(
    r"V_(RNDNE|FRACT|CVT_RPI|CVT_FLR|FREXP|DIV_SCALE|DIV_FMAS|TRIG_PREOP|CVT_OFF|CLREXCP|NOP|ACCVGPR|MADMK|MADAK)|_SR_"
)
"""The pseudocode is a sketch (a rounding written as `floor(x + 0.5)`), or missing: asked in `test_by_hand.py` or nowhere."""

FIXES: dict[str, tuple[tuple[str, str], ...]] = {
    # The table of truth lies in other instructions' modifier bits; here it is given.
    "V_BITOP3_B16": (("TTBL = { INST.OMOD[1 : 0], INST.ABS[2 : 0], INST.NEG[2 : 0] };", ""), ("D.b16", "D0.b16")),
    "V_BITOP3_B32": (("TTBL = { INST.OMOD[1 : 0], INST.ABS[2 : 0], INST.NEG[2 : 0] };", ""), ("D.b32", "D0.b32")),
    # A 64-bit operand's upper half cannot be cut out of its 32-bit view.
    "V_PK_MOV_B32": (("S0.u32[", "S0["), ("S1.u32[", "S1[")),
    # "The Multiply-add is performed as an FMA" (ISA 6.7); LLVM calls these v_fma_mix.
    "V_MAD_MIX_F32": (("in[0] * in[1] + in[2]", "fma(in[0], in[1], in[2])"),),
    "V_MAD_MIXLO_F16": (("in[0] * in[1] + in[2]", "fma(in[0], in[1], in[2])"),),
    "V_MAD_MIXHI_F16": (("in[0] * in[1] + in[2]", "fma(in[0], in[1], in[2])"),),
    # The evaluator knows no rounding mode: this one rounds toward zero whatever the mode.
    "V_CVT_PKRTZ_F16_F32": (("f32_to_f16(", "f32_to_f16_truncated("),),
    # The bits of a NaN, written as a number.
    "V_DIV_FIXUP_F64": (("64'F(0xfff8000000000000LL)", "NAN"),),
    # These flush subnormal binary32, addend and result, whatever the mode (LLVM, in its reason for making them of `fma`s).
    "V_DOT2_F32_F16": (("tmp = S2.f32;", "tmp = flushed(S2.f32);"), ("D0.f32 = tmp", "D0.f32 = flushed(tmp)")),
    "V_DOT2C_F32_F16": (("tmp = D0.f32;", "tmp = flushed(D0.f32);"), ("D0.f32 = tmp", "D0.f32 = flushed(tmp)")),
    # The product must not be rounded to binary16's range before the multiplication.
    "V_LDEXP_F16": (("16'F(2.0F ** 32'I(S1.i16))", "2.0F ** 32'I(S1.i16)"),),
}
RENAMED = {"v_mad_mix_f32": "v_fma_mix_f32", "v_mad_mixlo_f16": "v_fma_mixlo_f16", "v_mad_mixhi_f16": "v_fma_mixhi_f16"}
BY_NAME = re.compile(r"VGPR\[laneId\]\[(VDST|SRC0)\.u32\]")


@dataclass(frozen=True)
class Source:
    """A source operand: its format's name, its width in bits, and whether it is a mask of all lanes."""

    format: str
    width: int

    @property
    def registers(self) -> int:
        return max(1, self.width // 32)

    @property
    def float_width(self) -> int:
        """16, 32 or 64 if sign modifiers may stand here, else 0."""
        match = re.fullmatch(r"(?:PK2_)?F(16|32|64)", self.format)
        return int(match[1]) if match else 0


@dataclass(frozen=True)
class Instruction:
    """One row of the tables. `kind` is the encoding's name: VOP1, VOP2, VOP3, VOP3SD, VOPC or VOP3P."""

    name: str
    kind: str
    text: str
    sources: tuple[Source, ...]
    destination: Source | None
    mask_source: bool
    mask_result: bool

    @property
    def base(self) -> str:
        return self.name.lower().removesuffix("_e32").removesuffix("_e64")

    @property
    def accumulates(self) -> bool:
        return (
            "D0.f32)" in self.text
            or "D0.f64)" in self.text
            or self.base in ("v_pk_fmac_f16",)
            or "tmp = D0" in self.text
        )

    @property
    def literal(self) -> str:
        """Where a literal stands: `mk` before, `ak` after the second source; else nothing."""
        return next((how for how in ("mk", "ak") if re.search(rf"fma{how}|mad{how}", self.base)), "")


def _short(format: Any) -> str:
    return format.name.removeprefix("FMT_").removeprefix("NUM_")


@functools.cache
def instructions() -> dict[str, Instruction]:
    """All vector instructions of one lane, by encoding and name, with their pseudocode mended."""
    found = {}
    for op, text in PCODE.items():
        kind = type(op).__name__.removesuffix("Op")
        if kind not in ("VOP1", "VOP2", "VOP3", "VOP3SD", "VOPC", "VOP3P") or "MFMA" in op.name or "SMFMAC" in op.name:
            continue
        fields = {name: Source(_short(format), size) for name, (format, size, _) in OPERANDS[op].items()}
        for old, new in FIXES.get(op.name.removesuffix("_E32").removesuffix("_E64"), ()):
            assert old in text, op.name
            text = text.replace(old, new)
        text = functions.mended(text)
        text = BY_NAME.sub(lambda match: "D0" if match[1] == "VDST" else "S0", text)
        sources = [fields[name] for name in ("src0", "vsrc1", "src1", "src2") if name in fields]
        mask_source = bool(sources) and sources[-1].format == "M64"
        found[f"{kind} {op.name}"] = Instruction(
            op.name, kind, text, tuple(sources[:-1] if mask_source else sources),
            None if kind == "VOPC" or "V_CMP" in op.name else fields.get("vdst"),
            mask_source or "CNDMASK" in op.name or "ADDC_CO" in op.name or "SUBB" in op.name,
            kind in ("VOPC", "VOP3SD") or "V_CMP" in op.name or "_CO_" in op.name,
        )  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------------ spellings


@dataclass(frozen=True)
class Form:
    """One spelling of an instruction: the line of text, and what of it the statement must know.

    constants: the bits of sources that are no registers. negated, absolute: by source. op_sel and op_sel_hi by source, the
    destination's last. sdwa: (select, sign-extends) of each source, then of the destination the select and what is unused.
    """

    instruction: Instruction
    line: str
    suffix: str
    constants: dict[int, int] = field(default_factory=dict)
    scalars: dict[int, int] = field(default_factory=dict)
    negated: tuple[int, ...] = ()
    absolute: tuple[int, ...] = ()
    op_sel: tuple[int, ...] = ()
    op_sel_hi: tuple[int, ...] = ()
    negated_hi: tuple[int, ...] = ()
    clamp: bool = False
    table: int = 0
    literal: int = 0
    sdwa: tuple[tuple[str, bool], ...] = ()
    sdwa_destination: tuple[str, str] = ("DWORD", "UNUSED_PAD")


FIRST = (8, 48, 88)
"""First VGPR of each source."""
DESTINATION = 160
MASK_IN, MASK_OUT = 20, 30
SCALAR = 40


def _registers(first: int, count: int, letter: str = "v") -> str:
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


_INLINE = {
    32: {"1.0": 0x3F800000, "-4.0": 0xC0800000, "0.15915494": 0x3E22F983},
    16: {"1.0": 0x3C00, "-4.0": 0xC400, "0.15915494": 0x3118},
    64: {"1.0": 0x3FF0000000000000, "-4.0": 0xC010000000000000},
}


def _write(ins: Instruction, suffix: str, words: list[str], tail: str = "") -> str:
    """The line: destination, mask result, sources, mask source, modifiers."""
    operands = []
    if ins.destination is not None:
        operands.append(_registers(DESTINATION, ins.destination.registers))
    implicit = suffix in ("_e32", "_sdwa", "_dpp")
    if ins.mask_result:
        operands.append(
            "vcc"
            if implicit and suffix != "_sdwa"
            else "vcc"
            if suffix in ("_sdwa", "_dpp")
            else f"s[{MASK_OUT}:{MASK_OUT + 1}]"
        )
    if ins.literal:
        words = [words[0], hex(_LITERAL), words[1]] if ins.literal == "mk" else [*words, hex(_LITERAL)]
    operands += words
    if ins.mask_source:
        operands.append("vcc" if implicit else f"s[{MASK_IN}:{MASK_IN + 1}]")
    return f"{RENAMED.get(ins.base, ins.base)}{suffix} {', '.join(operands)}{tail}"


_LITERAL = 0x3FC01234


def suffixes(ins: Instruction) -> Iterator[str]:
    """Suffixes under which LLVM prints this row: VOP3-only instructions have none."""
    names = instructions()
    if ins.kind in ("VOP1", "VOP2", "VOPC"):
        yield "_e32"
        return
    shorter = any(f"{kind} {ins.base.upper()}_E32" in names for kind in ("VOP1", "VOP2", "VOPC"))
    yield "_e64" if shorter else ""


def forms(ins: Instruction) -> list[Form]:
    """The spellings asked of a row; which of them an architecture has, its assembler says."""
    found = []
    words = [_registers(FIRST[k], source.registers) for k, source in enumerate(ins.sources)]
    for suffix in suffixes(ins):
        plain = Form(ins, _write(ins, suffix, words), suffix, literal=_LITERAL if ins.literal else 0)
        if "BITOP3" in ins.name:
            found += [
                replace(plain, line=plain.line + f" bitop3:{table:#x}", table=table)
                for table in (0x36, 0xC8, 0x1E, 0xFF, 0x80)
            ]
        else:
            found.append(plain)
        if not ins.literal and "BITOP3" not in ins.name:
            found += _constant_forms(ins, suffix, words)
            found += _scalar_forms(ins, suffix, words)
        if suffix != "_e32":
            found += _modified_forms(ins, suffix, words)
        if ins.kind == "VOP3P":
            found += _packed_forms(ins, suffix, words)
    if ins.kind in ("VOP1", "VOP2", "VOPC") and not ins.literal and all(source.width <= 32 for source in ins.sources):
        found += _sdwa_forms(ins, words)
    return found


def _constant_forms(ins: Instruction, suffix: str, words: list[str]) -> Iterator[Form]:
    if (
        not ins.sources
        or ins.kind == "VOP3P"
        or "CVT_SCALEF32" in ins.name
        or "CVT_PK_FP8" in ins.name
        or "CVT_PK_BF8" in ins.name
    ):
        return
    width = ins.sources[0].width
    if width not in (16, 32, 64) or ins.sources[0].format.startswith(("PK", "BF")):
        return
    choices = {"-16": -16 & ((1 << width) - 1), "64": 64} | _INLINE[width]
    if suffix == "_e32" and width == 32:
        choices["0x12345678"] = 0x12345678
    for text, bits in choices.items():
        # A float's name where integers are computed is its bits; compilers write it for moves and 32 bits only.
        if ins.sources[0].format in ("B16", "I16", "U16", "I64", "U64") and "." in text and "MOV" not in ins.name:
            continue
        yield Form(ins, _write(ins, suffix, [text, *words[1:]]), suffix, constants={0: bits})


def _scalar_forms(ins: Instruction, suffix: str, words: list[str]) -> Iterator[Form]:
    if ins.kind == "VOP3P" or "CVT_" in ins.name:
        return
    for k, source in enumerate(ins.sources):
        if source.width not in (16, 32, 64) or (k and (suffix == "_e32")):
            continue
        scalar = _registers(SCALAR, source.registers, "s")
        yield Form(ins, _write(ins, suffix, [*words[:k], scalar, *words[k + 1 :]]), suffix, scalars={k: SCALAR})


def _signed(word: str, negative: bool, absolute: bool) -> str:
    word = f"|{word}|" if absolute else word
    return f"-{word}" if negative else word


def _modified_forms(ins: Instruction, suffix: str, words: list[str]) -> Iterator[Form]:
    floats = [k for k, source in enumerate(ins.sources) if source.float_width and not source.format.startswith("PK")]
    if ins.kind != "VOP3P" and floats and "CVT_SCALEF32" not in ins.name:
        for negated, absolute in (((floats[0],), ()), ((), (floats[-1],)), (tuple(floats), tuple(floats))):
            signed = [_signed(word, k in negated, k in absolute) for k, word in enumerate(words)]
            yield Form(ins, _write(ins, suffix, signed), suffix, negated=negated, absolute=absolute)
    if _clamps(ins):
        yield Form(ins, _write(ins, suffix, words, " clamp"), suffix, clamp=True)
    yield from _selected_forms(ins, suffix, words)


def _clamps(ins: Instruction) -> bool:
    """Rows whose clamp is asked: sums that saturate, and float results cut to [0, 1] (ISA 6.5)."""
    return bool(
        re.fullmatch(
            r"v_(add|sub|subrev)_(u32|i32|u16|i16)|v_(add|mul|sub|max|min)_f(32|16)|v_fma_f32|v_mad_[ui]16", ins.base
        )
    )


def _selected_forms(ins: Instruction, suffix: str, words: list[str]) -> Iterator[Form]:
    """`op_sel` of 16-bit operands, and of the conversions that read or write a part of a register."""
    if ins.kind == "VOP3P" or suffix == "_e32":
        return
    count = len(ins.sources)
    choices: list[tuple[int, ...]] = []
    if re.fullmatch(r"v_cvt_(scalef32_)?pk_(fp8|bf8)_(f32|f16|bf16)", ins.base):
        choices = [(0,) * count + (1,)]
    elif re.fullmatch(r"v_cvt_scalef32_pk_fp4_(f32|f16|bf16)", ins.base):
        choices = [(0,) * (count - 1) + (low, high) for low, high in ((1, 0), (0, 1), (1, 1))] if count == 3 else []
        choices = [(0, 0, low, high) for low, high in ((1, 0), (0, 1), (1, 1))]
    elif re.fullmatch(r"v_cvt_scalef32_pk_(f32|f16|bf16)_(fp8|bf8)", ins.base):
        choices = [(1, 0, 0)]
    elif re.fullmatch(r"v_cvt_scalef32_pk_(f32|f16|bf16)_fp4", ins.base):
        choices = [(1, 0, 0), (0, 1, 0), (1, 1, 0)]
    elif (
        ins.destination is not None
        and ins.destination.width == 16
        and all(s.width == 16 for s in ins.sources)
        and count > 1
    ):
        choices = [(1,) + (0,) * count, (0,) * count + (1,), (1,) * (count + 1)]
    elif (
        count
        and all(s.width == 16 for s in ins.sources)
        and ins.mask_result is False
        and ins.kind == "VOP3"
        and count == 3
    ):
        choices = [(1, 0, 1)]
    for chosen in choices:
        yield Form(ins, _write(ins, suffix, words, f" op_sel:[{','.join(map(str, chosen))}]"), suffix, op_sel=chosen)


def _packed_forms(ins: Instruction, suffix: str, words: list[str]) -> Iterator[Form]:
    count = len(ins.sources)
    if "MIX" in ins.name:
        for low, high in (((0, 0, 0), (1, 1, 1)), ((1, 0, 1), (1, 1, 1)), ((1, 0, 0), (1, 0, 1))):
            tail = f" op_sel:{_list(low)} op_sel_hi:{_list(high)}"
            yield Form(ins, _write(ins, suffix, words, tail), suffix, op_sel=low, op_sel_hi=high)
        return
    if "PK_MOV" in ins.name:
        for low in ((1, 0), (0, 1), (1, 1)):
            yield Form(ins, _write(ins, suffix, words, f" op_sel:{_list(low)}"), suffix, op_sel=low, op_sel_hi=(1, 1))
        return
    if not ins.name.startswith("V_PK_"):
        return
    for low, high in (((1, 0, 1), (1, 1, 1)), ((0, 0, 0), (1, 0, 0)), ((0, 1, 0), (0, 1, 1)), ((1, 1, 1), (0, 0, 0))):
        tail = f" op_sel:{_list(low[:count])} op_sel_hi:{_list(high[:count])}"
        yield Form(ins, _write(ins, suffix, words, tail), suffix, op_sel=low[:count], op_sel_hi=high[:count])
    if ins.sources[0].float_width:
        low, high = (0, 1, 0)[:count], (1, 1, 1)[:count]
        tail = f" neg_lo:{_list(low)} neg_hi:{_list(high)}"
        negated, negated_hi = (tuple(k for k in range(count) if which[k]) for which in (low, high))
        yield Form(
            ins,
            _write(ins, suffix, words, tail),
            suffix,
            negated=negated,
            negated_hi=negated_hi,
            op_sel_hi=(1,) * count,
        )


def _list(items: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, items))}]"


_SELECTS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")


def _sdwa_forms(ins: Instruction, words: list[str]) -> Iterator[Form]:
    draw = random.Random(ins.name)
    count = len(ins.sources)
    if any(source.format.startswith(("PK", "FP8", "BF8")) for source in ins.sources) or (
        "CVT" in ins.name and "FP8" in ins.name
    ):
        return
    for _ in range(4):
        sources = tuple(
            (draw.choice(_SELECTS), not ins.sources[k].float_width and draw.random() < 0.4) for k in range(count)
        )
        target = (draw.choice(_SELECTS), draw.choice(("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")))
        floats = tuple(k for k in range(count) if ins.sources[k].float_width and draw.random() < 0.3)
        extended = [
            f"sext({word})" if sources[k][1] else _signed(word, k in floats, False) for k, word in enumerate(words)
        ]
        tail = "" if ins.destination is None else f" dst_sel:{target[0]} dst_unused:{target[1]}"
        tail += "".join(f" src{k}_sel:{select}" for k, (select, _) in enumerate(sources))
        yield Form(
            ins, _write(ins, "_sdwa", extended, tail), "_sdwa", negated=floats, sdwa=sources, sdwa_destination=target
        )


# ------------------------------------------------------------------------------------------------------ statements


@dataclass(frozen=True)
class Result:
    """What one lane should hold: the destination's bits, which of them are stated at all, and the lane's bit of the mask.

    nan_width: the destination is floats of that width, of which any quiet NaN stands for any other; of 8 bits, `nan_format`.
    """

    bits: int
    stated: int
    mask: int | None
    nan_width: int = 0
    nan_format: str = ""


def statement(form: Form, arch: str, lane: int, sources: list[int], old: int, mask: int) -> Result:
    """What the pseudocode leaves in a lane. sources: whole register contents, as wide as the operand, at least 32 bits."""
    ins = form.instruction
    prepared = [_prepared(form, k, bits) for k, bits in enumerate(sources)]
    names = functions.constants() | {
        f"S{k}": Value(bits, max(32, ins.sources[k].width), "b") for k, bits in enumerate(prepared)
    }
    width = 64 if ins.destination is None else max(32, ins.destination.width)
    low, _, high = _destination_part(form)
    names |= {
        "D0": Value(0 if ins.destination is None else old >> low if _shifts(form) else old, width, "b"),
        "D1": Value(0, 64, "b"), "VCC": Value(mask << lane, 64, "b"), "EXEC": Value(0, 64, "b"), "laneId": whole(lane),
        "OPSEL": Value(sum(bit << k for k, bit in enumerate(_four(form))), 4, "b"), "TTBL": whole(form.table, 8, "u"),
        "OPSEL_HI": Value(sum(bit << k for k, bit in enumerate(form.op_sel_hi)), 3, "b"), "SIMM32": Value(form.literal, 32, "b"),
    }  # fmt: skip
    run = Run(names, functions.named(arch), arrays={"S": [names[f"S{k}"] for k in range(len(prepared))]})
    run.execute(ins.text)
    taken = _mask_result(ins, run, lane)
    if ins.destination is None:
        return Result(0, 0, taken)
    bits, written = run.names["D0"].bits & ((1 << width) - 1), run.written.get("D0", 0) & ((1 << width) - 1)
    if form.clamp:
        bits = _clamped(form, bits, prepared)
    result = _placed(form, bits, written, old, low, high)
    if small := re.search(r"pk_(fp8|bf8|fp4)_", ins.base):
        return _of_small_floats(form, arch, small[1], prepared, replace(result, mask=taken))
    return replace(result, mask=taken)


def _of_small_floats(form: Form, arch: str, small: str, sources: list[int], result: Result) -> Result:
    """Of eight bits any NaN stands for any other; what a NaN becomes in four bits, no document says."""
    if small != "fp4":
        return replace(result, nan_format=small + ("_fnuz" if arch == "gfx942" else ""), nan_width=0)
    kinds = [source.format.removeprefix("PK2_").lower() for source in form.instruction.sources]
    for kind, bits, source in zip(kinds, sources, form.instruction.sources, strict=True):
        width = FORMATS[kind].width
        for at in range(0, source.width, width):
            if Value((bits >> at) & ((1 << width) - 1), width, kind).number() == NAN:
                return replace(result, stated=0)
    return replace(result, stated=0) if (sources[-1] >> 23) & 255 == 255 else result


def _four(form: Form) -> tuple[int, ...]:
    """The four `op_sel` bits of a VOP3 conversion, the destination's last."""
    bits = form.op_sel
    if form.instruction.kind == "VOP3P" or len(bits) == 4:
        return bits
    return (
        (*bits, *(0,) * (4 - len(bits)))
        if "FP4" in form.instruction.name or _reads_part(form)
        else (*bits[:-1], *(0,) * (4 - len(bits)), bits[-1])
        if bits
        else ()
    )


def _reads_part(form: Form) -> bool:
    return bool(re.search(r"pk_(f32|f16|bf16)_(fp8|bf8|fp4)", form.instruction.base))


def _half_operands(ins: Instruction) -> bool:
    return ins.kind in ("VOP3", "VOP3SD") and "CVT_SCALEF32" not in ins.name and "CVT_PK" not in ins.name


def _prepared(form: Form, k: int, bits: int) -> int:
    """A source after selection and sign modifiers."""
    ins, source = form.instruction, form.instruction.sources[k]
    if form.sdwa:
        bits = _selected(bits, *form.sdwa[k])
    if ins.kind == "VOP3P":
        return _packed_source(form, k, bits)
    if form.op_sel and source.width == 16 and _half_operands(ins) and form.op_sel[k]:
        bits >>= 16
    width = source.float_width
    if width and not source.format.startswith("PK"):
        if k in form.absolute:
            bits &= ~(1 << (width - 1))
        if k in form.negated:
            bits ^= 1 << (width - 1)
    return bits


def _packed_source(form: Form, k: int, bits: int) -> int:
    """Both halves as `op_sel` and `op_sel_hi` choose them, each with its sign. MIX and MOV choose in their pseudocode."""
    ins, source = form.instruction, form.instruction.sources[k]
    if "MIX" in ins.name or "PK_MOV" in ins.name or not ins.name.startswith("V_PK_"):
        return bits
    half = 32 if source.width == 64 else 16
    low = form.op_sel[k] if form.op_sel else 0
    high = form.op_sel_hi[k] if form.op_sel_hi else 1
    parts = [(bits >> (half * chosen)) & ((1 << half) - 1) for chosen in (low, high)]
    if k in form.negated:
        parts[0] ^= 1 << (half - 1)
    if k in form.negated_hi:
        parts[1] ^= 1 << (half - 1)
    return parts[0] | parts[1] << half


def _selected(bits: int, select: str, extends: bool) -> int:
    if select == "DWORD":
        return bits & 0xFFFFFFFF
    width, at = (8, int(select[-1]) * 8) if select.startswith("BYTE") else (16, int(select[-1]) * 16)
    bits = (bits >> at) & ((1 << width) - 1)
    return (bits - (1 << width)) & 0xFFFFFFFF if extends and bits >> (width - 1) else bits


def _shifts(form: Form) -> bool:
    """Whether `op_sel`'s last bit moves the whole 16-bit result up; conversions do that in their pseudocode."""
    return (
        bool(form.op_sel)
        and _half_operands(form.instruction)
        and form.instruction.destination is not None
        and form.op_sel[-1] == 1
    )


def _destination_part(form: Form) -> tuple[int, str, int]:
    return (16 if _shifts(form) else 0), "", 16


def _placed(form: Form, bits: int, written: int, old: int, low: int, high: int) -> Result:
    ins = form.instruction
    assert ins.destination is not None
    width = max(32, ins.destination.width)
    nan_width = _nan_width(ins)
    if form.sdwa:
        # A part of a NaN is not stated: nobody says which NaN it is.
        whole_word = form.sdwa_destination[0] == "DWORD"
        stated = 0xFFFFFFFF if whole_word or not _is_nan(bits, nan_width) else 0
        return Result(_sdwa_placed(form, bits, written, old), stated, None, nan_width if whole_word else 0)
    if written == (1 << width) - 1:
        return Result(bits, written, None, nan_width)
    if ins.kind == "VOP3P" or ("CVT" in ins.name and re.search(r"FP8|BF8|FP4", ins.name)):
        return Result((bits & written) | (old & ~written), (1 << width) - 1, None, nan_width)
    if _shifts(form):
        return Result((old & 0xFFFF) | (bits & 0xFFFF) << 16, 0xFFFFFFFF, None, nan_width)
    # 16 bits written: those that have a short encoding clear the rest (LLVM, zeroesHigh16BitsOfDest); of the others no
    # document says.
    short = ins.kind in ("VOP1", "VOP2") or form.suffix == "_e64"
    return Result(bits & written, 0xFFFFFFFF if short else written, None, nan_width)


def _is_nan(bits: int, width: int) -> bool:
    return width in (16, 32) and Value(bits & ((1 << width) - 1), width, f"f{width}").number() == NAN


def _sdwa_placed(form: Form, bits: int, written: int, old: int) -> int:
    """Where SDWA puts a result: "0 = pad with zeros, 1 = sign extend upper / zero lower, 2 = preserve" (ISA, table 91)."""
    bits &= written
    select, unused = form.sdwa_destination
    if select == "DWORD":
        return bits
    width, at = (8, int(select[-1]) * 8) if select.startswith("BYTE") else (16, int(select[-1]) * 16)
    part = (bits & ((1 << width) - 1)) << at
    if unused == "UNUSED_PAD":
        return part
    if unused == "UNUSED_PRESERVE":
        return (old & ~(((1 << width) - 1) << at) & 0xFFFFFFFF) | part
    sign = (bits >> (width - 1)) & 1
    return (part | (0xFFFFFFFF << (at + width) if sign else 0)) & 0xFFFFFFFF


def _nan_width(ins: Instruction) -> int:
    destination = ins.destination
    if destination is None or re.fullmatch(r"v_(mov|cndmask|pk_mov|perm).*", ins.base):
        return 0
    match = re.search(r"(?:PK\d+_)?(BF16|F16|F32|F64)$", destination.format)
    return {"BF16": -16, "F16": 16, "F32": 32, "F64": 64}[match[1]] if match else 0


def _mask_result(ins: Instruction, run: Run, lane: int) -> int | None:
    if not ins.mask_result:
        return None
    if "MAD_U64" in ins.name or "MAD_I64" in ins.name:
        return run.names["D1"].bits & 1
    name = "D0" if ins.destination is None else "VCC"
    return (run.names[name].bits >> lane) & 1


_SATURATED = {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1), "u16": (0, 65535), "i16": (-32768, 32767)}


def _clamped(form: Form, bits: int, sources: list[int]) -> int:
    base = form.instruction.base
    kind = base.rsplit("_", 1)[1]
    if kind in _SATURATED:
        low, high = _SATURATED[kind]
        width = int(kind[1:])
        numbers = [Value(source & ((1 << width) - 1), width, kind[0]).integer() for source in sources]
        if base.startswith("v_mad"):
            total = numbers[0] * numbers[1] + numbers[2]
        elif base.startswith("v_add"):
            total = numbers[0] + numbers[1]
        else:
            total = numbers[1] - numbers[0] if "rev" in base else numbers[0] - numbers[1]
        return max(low, min(high, total)) & ((1 << width) - 1)
    width = int(kind[1:])
    value = Value(bits & ((1 << width) - 1), width, kind)
    number = value.number()
    if isinstance(number, str):
        number = Fraction(1) if number == "inf" else Fraction(0)  # MODE.DX10_CLAMP: "clamp NaN to zero"
    one = Value(_INLINE[width]["1.0"], width, kind)
    if number >= 1:
        return one.bits
    return bits if number > 0 else 0


# ------------------------------------------------------------------------------------------------------ inputs

_FLOAT_CODES = {
    32: [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F000000, 0x7F7FFFFF, 0xFF7FFFFF,
         0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFA00000, 0x4B000001, 0xCB7FFFFF, 0x4F000000,
         0x4EFFFFFF, 0xCF000000, 0x4F800000, 0x477FF000, 0x477FEFFF, 0x43E80000, 0x43E80001, 0x43700000, 0x33800000,
         0x387FC000, 0x38800000, 0x7E800001, 0x00ffffff],
    16: [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0x6400],
    64: [0, 1 << 63, 1, 0x000FFFFFFFFFFFFF, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000,
         0xFFF0000000000000, 0x7FF8000000000000, 0x7FF0000000000001, 0x41E0000000000000, 0x3810000000000000,
         0x47EFFFFFF0000000, 0x36A0000000000001],
}  # fmt: skip
_INTEGERS = [0, 1, 2, 7, 8, 15, 16, 24, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x800000,
             0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE]  # fmt: skip


def draw_source(source: Source, generator: random.Random) -> int:
    """A register's worth of input, hostile about half of the time."""
    width = max(32, source.width)
    float_width = source.float_width or (
        16 if "BF16" in source.format else 32 if "F32" in source.format else 16 if "F16" in source.format else 0
    )
    bits = 0
    for at in range(0, width, float_width or 32):
        bits |= _draw_float(float_width, generator) << at if float_width else _draw_integer(generator) << at
    return bits


def _draw_integer(generator: random.Random) -> int:
    how = generator.random()
    if how < 0.45:
        return generator.choice(_INTEGERS)
    return generator.getrandbits(32) >> (generator.randrange(32) if how < 0.7 else 0)


def _draw_float(width: int, generator: random.Random) -> int:
    how = generator.random()
    if how < 0.4:
        return generator.choice(_FLOAT_CODES[width])
    if how < 0.6:
        return generator.getrandbits(width)
    form = FORMATS[f"f{width}"]
    exponent = form.bias + generator.randrange(-20, 21) if width > 16 else generator.randrange(5, 26)
    return generator.getrandbits(1) << (width - 1) | exponent << form.mantissa | generator.getrandbits(form.mantissa)
