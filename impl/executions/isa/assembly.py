"""What does a compiled kernel's assembly text say: its instructions, labels, source lines and how it is launched?

Reads the text that LLVM prints for one ``amdgcn`` kernel (code object version 4 to 6): nothing is executed here, and
nothing is guessed: what has no place in the grammar is `UnsupportedInstruction`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Literal

from impl.executions.isa.unsupported import UnsupportedInstruction

Kind = Literal["v", "s", "constant", "off", "label", "hwreg"]

VCC, M0, EXEC = 106, 124, 126
# Behind them lie registers that have names.
_SCALARS = 102
_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1),
    "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2), "xnack_mask_lo": (104, 1), "xnack_mask_hi": (105, 1),
}  # fmt: skip
_FLOATS = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0"}
_INVERSE_2PI = "0.15915494"
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])$")
_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)$")
# Up to a remark; what stands between quotes is none.
_REMARK = re.compile(r'(?:"[^"]*"|(?!;|//).)*')
_LIST = re.compile(r"\[-?\d+(,-?\d+)*\]$")
_COUNTER = re.compile(r"(vmcnt|expcnt|lgkmcnt)\((0x[0-9a-fA-F]+|\d+)\)")
_LABEL = re.compile(r"^([.\w$]+):")
_WORD_MODIFIER = re.compile(r"^([a-z][a-z0-9_]*):(.+)$")
_FLAGS = frozenset(
    [
        "offen",
        "idxen",
        "lds",
        "glc",
        "slc",
        "sc0",
        "sc1",
        "nt",
        "clamp",
        "gds",
        "off",
        "high",
        "row_mirror",
        "row_half_mirror",
        "addr64",
        "tfe",
    ]
)


# Directives that put something else among the instructions than instructions; alignment and padding are neither.
_DATA = frozenset(
    (".long", ".byte", ".short", ".hword", ".quad", ".octa", ".word", ".int", ".float", ".double", ".ascii", ".asciz", ".string",
     ".incbin", ".rept", ".irp", ".if", ".ifdef", ".macro", ".include", ".org", ".zero", ".space")
)  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """One operand as it is written.

    index: the first register; of `v`, 256 and up are accumulation registers. count: 32-bit registers, 0 if it is no register.
    value: a constant's 32 bits as an integer, or the float it names when `is_float`.
    """

    kind: Kind
    text: str
    index: int = 0
    count: int = 0
    value: int = 0
    is_float: bool = False
    negative: bool = False
    absolute: bool = False
    sign_extended: bool = False


@dataclass(frozen=True)
class Instruction:
    """One instruction: its mnemonic without the encoding's suffix, the suffix, operands, modifiers, and where it stands."""

    mnemonic: str
    suffix: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, int | str | tuple[int, ...]]
    text: str
    line: int
    source: str


@dataclass(frozen=True)
class Argument:
    """One kernel argument by the metadata: where it lies in the argument segment and what it is."""

    offset: int
    size: int
    kind: str


@dataclass
class Program:
    """A kernel as it is read.

    targets: label to the number of the instruction behind it. directives: the ``.amdhsa_`` values. arguments: of the
    metadata. inline_assembly: lines of the text that hold some.
    """

    name: str
    arch: str
    instructions: list[Instruction] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    directives: dict[str, int] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    argument_bytes: int = 0
    inline_assembly: list[int] = field(default_factory=list)

    def directive(self, name: str, default: int = 0) -> int:
        """An ``.amdhsa_`` value, or the default where the text names none."""
        return self.directives.get(name, default)


def read(text: str) -> Program:
    """The kernel of an assembly text. Raises `UnsupportedInstruction` for what is not LLVM's text of one kernel."""
    found = re.search(r'^\s*\.amdgcn_target\s+"[^"]*?-{1,2}(gfx\w+)[^"]*"', text, re.M)
    kernels = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.M)
    if found is None or not kernels:
        raise UnsupportedInstruction(
            "the text names no .amdgcn_target and .amdhsa_kernel: it should be LLVM's amdgcn assembly"
        )
    if len(kernels) > 1:
        raise UnsupportedInstruction(f"the text holds {len(kernels)} kernels: it should hold one")
    program = Program(kernels[0], found[1])
    version = re.search(r"^\s*\.amdhsa_code_object_version\s+(\d+)", text, re.M)
    if version is not None and int(version[1]) not in (4, 5, 6):
        raise UnsupportedInstruction(f"code object version {version[1]}: 4 to 6 are read")
    for name, value in re.findall(r"^\s*\.amdhsa_(\w+)\s+(-?\d+)\s*$", text, re.M):
        program.directives[name] = int(value)
    _read_code(program, text)
    _read_metadata(program, text)
    return program


def read_lines(arch: str, text: str) -> Program:
    """Bare instructions, without directives: for trying one of them alone. `s_endpgm` is appended."""
    program = Program("lines", arch)
    _read_code(program, "lines:\n" + "\n".join("\t" + line.strip() for line in text.splitlines()) + "\n\ts_endpgm\n")
    return program


def _read_code(program: Program, text: str) -> None:
    inside, in_text = False, True
    files: dict[str, str] = {}
    where = ""
    for number, raw in enumerate(text.splitlines(), 1):
        if raw.lstrip().startswith(";;#ASMSTART"):
            program.inline_assembly.append(number)
        line = _without_comment(raw).strip()
        if not line:
            continue
        label = _LABEL.match(line)
        if label is not None:
            inside = inside or label[1] == program.name
            if in_text:
                program.targets[label[1]] = len(program.instructions)
            line = line[label.end() :].strip()
            if not line:
                continue
        if line.startswith("."):
            word, _, rest = line.partition("\t") if "\t" in line else line.partition(" ")
            if word == ".file":
                parts = re.findall(r'"([^"]*)"', rest)
                key = rest.split()[0]
                if parts and key.isdigit():
                    files[key] = parts[-1]
            elif word == ".loc":
                at = rest.split()
                where = f"{files.get(at[0], '?')}:{at[1]}" if at[1] != "0" else where
            elif word in (".text", ".section"):
                in_text = word == ".text" or rest.strip().startswith(".text")
            elif inside and in_text and word in _DATA:
                raise UnsupportedInstruction(
                    f"line {number}, {line!r}: the directive {word} is not known among instructions"
                )
            continue
        if inside and in_text:
            program.instructions.append(_instruction(line, number, where))


def _without_comment(line: str) -> str:
    return _REMARK.match(line)[0]  # type: ignore[index]


def _instruction(line: str, number: int, where: str) -> Instruction:
    full, _, rest = line.partition(" ")
    full, _, more = full.partition("\t")
    rest = f"{more} {rest}".strip()
    suffix = re.search(r"_(e32|e64|sdwa|dpp|e64_dpp)$", full)
    mnemonic = full[: suffix.start()] if suffix else full
    operands: list[Operand] = []
    modifiers: dict[str, int | str | tuple[int, ...]] = {}
    if mnemonic == "s_waitcnt":
        modifiers = _counters(rest, line, number)
    else:
        for piece in _split(rest):
            if _is_modifier(piece):
                _add_modifier(modifiers, piece, line, number)
            else:
                operands.append(_operand(piece, line, number))
    return Instruction(mnemonic, suffix[1] if suffix else "", tuple(operands), modifiers, line, number, where)


def _counters(rest: str, line: str, number: int) -> dict[str, int | str | tuple[int, ...]]:
    """How many operations of each counter may be open; of a bare number, its `raw` bits."""
    if _NUMBER.match(rest):
        return {"raw": int(rest, 0)}
    found: dict[str, int | str | tuple[int, ...]] = {}
    for piece in re.split(r"\s*[&,]\s*|\s+", rest):
        counter = _COUNTER.fullmatch(piece)
        if counter is None:
            raise UnsupportedInstruction(f"line {number}, {line!r}: the counter {piece!r} is not known")
        found[counter[1]] = int(counter[2], 0)
    return found


def _split(rest: str) -> list[str]:
    """Operands and modifiers: apart at commas and blanks, but not inside brackets or bars."""
    pieces, depth, piece, in_bars = [], 0, "", False
    for letter in rest:
        if letter in "[(":
            depth += 1
        elif letter in "])":
            depth -= 1
        elif letter == "|":
            in_bars = not in_bars
        if depth == 0 and not in_bars and letter in ", \t":
            if piece:
                pieces.append(piece)
            piece = ""
        elif letter not in " \t":
            piece += letter
    return [*pieces, piece] if piece else pieces


def _is_modifier(piece: str) -> bool:
    if piece == "off":
        return False
    if piece in _FLAGS:
        return True
    found = _WORD_MODIFIER.match(piece)
    return found is not None and _REGISTER.match(piece) is None


def _add_modifier(modifiers: dict[str, int | str | tuple[int, ...]], piece: str, line: str, number: int) -> None:
    if piece in _FLAGS:
        modifiers[piece] = 1
        return
    name, _, value = piece.partition(":")
    if name in modifiers or name in _FLAGS:
        raise UnsupportedInstruction(f"line {number}, {line!r}: the modifier {piece!r} is not known")
    if _LIST.match(value):
        modifiers[name] = tuple(int(part, 0) for part in value.strip("[]").split(","))
    elif _NUMBER.match(value):
        modifiers[name] = int(value, 0)
    elif re.fullmatch(r"[A-Z][A-Z0-9_]*", value):
        modifiers[name] = value
    else:
        raise UnsupportedInstruction(f"line {number}, {line!r}: the modifier {piece!r} is not known")


def _operand(piece: str, line: str, number: int) -> Operand:
    negative = absolute = extended = False
    text = piece
    if text.startswith("sext(") and text.endswith(")"):
        extended, text = True, text[5:-1]
    if text.startswith("neg(") and text.endswith(")"):
        negative, text = True, text[4:-1]
    if text.startswith("-") and not _NUMBER.match(text) and text not in _FLOATS:
        negative, text = True, text[1:]
    if text.startswith("abs(") and text.endswith(")"):
        absolute, text = True, text[4:-1]
    if text.startswith("|") and text.endswith("|"):
        absolute, text = True, text[1:-1]
    how = {"negative": negative, "absolute": absolute, "sign_extended": extended}
    register = _REGISTER.match(text)
    if register is not None:
        first = int(register[2] or register[3])
        count = int(register[4]) - first + 1 if register[4] else 1
        if count < 1 or first + count > (_SCALARS if register[1] == "s" else 256):
            raise UnsupportedInstruction(f"line {number}, {line!r}: there is no register {text}")
        kind: Kind = "s" if register[1] == "s" else "v"
        return Operand(kind, text, first + (256 if register[1] == "a" else 0), count, **how)
    if text in _NAMED:
        return Operand("s", text, _NAMED[text][0], _NAMED[text][1], **how)
    if text in ("off", "null"):
        return Operand("off", text)
    if text in _FLOATS or text.startswith(_INVERSE_2PI) or re.fullmatch(r"-?\d+\.\d+(e[-+]?\d+)?", text):
        bits = 0x3E22F983 if text.startswith(_INVERSE_2PI) else struct.unpack("<I", struct.pack("<f", float(text)))[0]
        return Operand("constant", text, value=bits, is_float=True, **how)
    if _NUMBER.match(text):
        return Operand("constant", text, value=int(text, 0), **how)
    if text in ("scc", "src_scc"):
        return Operand("s", text, 128, 1, **how)
    if text.startswith("hwreg("):
        return Operand("hwreg", text)
    if re.fullmatch(r"[.\w$]+(@\w+)?([+-]\d+)?", text):
        return Operand("label", text)
    raise UnsupportedInstruction(f"line {number}, {line!r}: the operand {piece!r} is not known")


def _read_metadata(program: Program, text: str) -> None:
    start = text.find(".amdgpu_metadata")
    if start < 0:
        return
    body = text[start : text.find(".end_amdgpu_metadata", start)]
    for entry in re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", body):
        program.arguments.append(Argument(int(entry[0]), int(entry[1]), entry[2]))
    size = re.search(r"\.kernarg_segment_size:\s+(\d+)", body)
    program.argument_bytes = int(size[1]) if size else 0
