"""What would a compiler have written that is wrong by one instruction?

Edits of a kernel as it is read, a kind each: every one of a kind that a program allows, so that a few may be drawn. The
program keeps its length: what is dropped becomes `s_nop`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from impl.executions.isa import encoding
from impl.executions.isa.assembly import Instruction, Operand, Program
from impl.executions.isa.encoding import BRANCHES, IDLE, Encoded
from impl.executions.isa.meaning import COMPARE, SCALAR, VECTOR
from impl.executions.isa.unsupported import UnsupportedInstruction

Value = int | str | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Edit:
    """One instruction's replacement: its number, what stands there instead, and in words what was done to it."""

    kind: str
    at: int
    instead: Instruction
    words: str


def applied(program: Program, edit: Edit) -> Program:
    """The program with the edit; the one that is given stays as it is."""
    instructions = list(program.instructions)
    instructions[edit.at] = edit.instead
    return dataclasses.replace(program, instructions=instructions)


def encoded(program: Program, edit: Edit) -> Encoded | None:
    """The edited program, or None where the edit does not change what is executed, or makes what is no instruction."""
    try:
        after = encoding.encode(applied(program, edit))
    except UnsupportedInstruction:
        return None
    before = encoding.encode(program)
    return None if _row(before, edit.at) == _row(after, edit.at) else after


def _row(found: Encoded, at: int) -> tuple[list[int], list[int]]:
    """An instruction as it is executed: its row with its constants in place, and its matrix' form."""
    r = [int(number) for number in found.rows[at]]
    for column in (encoding.SRC0, encoding.SRC1, encoding.SRC2, encoding.SRC3):
        if r[column] >= encoding.LITERAL_BASE:
            r[column] = encoding.LITERAL_BASE + int(found.literals[r[column] - encoding.LITERAL_BASE])
    number, r[encoding.MATRIX_ROW] = r[encoding.MATRIX_ROW], 0
    matrix = [int(each) for each in found.matrices[number]] if r[encoding.KIND] == encoding.Kind.MATRIX else []
    return r, matrix


def edits(program: Program, kind: str) -> list[Edit]:
    """Every edit of a kind, in the order of the program."""
    return [
        Edit(kind, at, instead, words)
        for at, instruction in enumerate(program.instructions)
        for instead, words in KINDS[kind](instruction)
    ]


Edited = Iterator[tuple[Instruction, str]]


def _nothing(at: Instruction) -> Instruction:
    return dataclasses.replace(at, mnemonic="s_nop", suffix="", operands=(Operand("constant", "0"),), modifiers={})


def _with(at: Instruction, place: int, operand: Operand) -> Instruction:
    operands = list(at.operands)
    operands[place] = operand
    return dataclasses.replace(at, operands=tuple(operands))


def _modified(at: Instruction, name: str, value: Value | None) -> Instruction:
    """With another value of a modifier, or without it."""
    modifiers = {key: old for key, old in at.modifiers.items() if key != name}
    return dataclasses.replace(at, modifiers=modifiers if value is None else {**modifiers, name: value})


# operands swapped

_SYMMETRIC = re.compile(
    r"[vs]_(pk_)?(add|mul|and|or|xor|xnor|nand|nor|max|min|add3|or3|max3|min3|med3|minimum3|maximum3|mul_lo|mul_hi|fma|fmac|mad"
    r"|and_or|xad|add_lshl|add_co|addc_co|addc|mac|absdiff|sad|cmp_(eq|ne|lg|o|u|neq|nlg))_"
)
_WHOLLY_SYMMETRIC = re.compile(r"v_(add3|or3|max3|min3|med3|minimum3|maximum3)_")


def _swapped(at: Instruction) -> Edited:
    places = _source_places(at)
    for position, first in enumerate(places):
        for second in places[position + 1 :]:
            a, b = at.operands[first], at.operands[second]
            if a.text == b.text and (a.negative, a.absolute) == (b.negative, b.absolute):
                continue
            if _commutes(at, position, places.index(second)):
                continue
            instead = _with(_with(at, first, b), second, a)
            yield instead, f"sources {a.text} and {b.text} swapped"


def _source_places(at: Instruction) -> list[int]:
    """Which operands are sources of one form, that may be exchanged."""
    name = at.mnemonic.replace("v_cmpx_", "v_cmp_", 1)
    if name in VECTOR:
        meaning = VECTOR[name]
        count = len(meaning.sources) - int(meaning.accumulates)
        first = 1 + int(bool(meaning.carry))
        return [first + place for place in range(count)]
    if name in COMPARE:
        return [len(at.operands) - 2, len(at.operands) - 1]
    if name in SCALAR and len(SCALAR[name].sources) == 2:
        first = len(at.operands) - 2
        return [first, first + 1]
    if name.startswith("v_mfma_"):
        return [1, 2]
    return [1, 2] if name.startswith("ds_write2") else []


def _commutes(at: Instruction, first: int, second: int) -> bool:
    # A lane pattern or a selector stays with its place, so that exchange matters.
    if at.suffix in ("dpp", "sdwa") or any(name in at.modifiers for name in ("op_sel", "neg_lo", "neg_hi")):
        return False
    return bool(_WHOLLY_SYMMETRIC.match(at.mnemonic)) or (
        (first, second) == (0, 1) and bool(_SYMMETRIC.match(at.mnemonic))
    )


# instructions dropped


def _dropped(at: Instruction) -> Edited:
    if at.mnemonic not in IDLE and at.mnemonic not in ("s_waitcnt", "s_barrier", "s_endpgm", "s_trap"):
        yield _nothing(at), "dropped"


# constants

_OFFSETS = {"offset": 12, "offset0": 8, "offset1": 8, "bitop3": 8}
_WITH_OFFSET = (
    "buffer_load", "buffer_store", "global_load", "global_store", "ds_read_b", "ds_write_b", "s_load",
)  # fmt: skip
_INLINE_BITS, _WORD_BITS = 6, 32


def _constants(at: Instruction) -> Edited:
    if at.mnemonic in IDLE or at.mnemonic in ("s_waitcnt", *BRANCHES):
        return
    for place, operand in enumerate(at.operands):
        if operand.kind == "constant" and not (at.mnemonic in _LANE_INDEXED and place == 2):
            for changed, words in _changed(operand):
                yield _with(at, place, changed), f"{operand.text} {words}"
    for name, bits in _OFFSETS.items():
        # An offset of 0 is not written.
        if name in at.modifiers or (name == "offset" and at.mnemonic.startswith(_WITH_OFFSET)):
            value = _number(at, name)
            for bit in range(bits):
                yield _modified(at, name, value ^ 1 << bit), f"{name}:{value} bit {bit} flipped"


def _number(at: Instruction, name: str) -> int:
    """A modifier's number, 0 where it is not written."""
    value = at.modifiers.get(name, 0)
    return value if isinstance(value, int) else 0


def _numbers(at: Instruction, name: str) -> tuple[int, ...]:
    """A modifier's list of numbers, empty where it is not written."""
    value = at.modifiers.get(name, ())
    return value if isinstance(value, tuple) else ()


def _changed(operand: Operand) -> Iterator[tuple[Operand, str]]:
    """The constant with each of its bits flipped, and one more and less."""
    if operand.is_float:
        for bit in range(_WORD_BITS):
            bits = operand.value ^ 1 << bit
            yield dataclasses.replace(operand, value=bits, is_float=False, text=hex(bits)), f"bit {bit} flipped"
        return
    inline = -16 <= operand.value <= 64
    for bit in range(_INLINE_BITS if inline else _WORD_BITS):
        value = operand.value ^ 1 << bit
        yield dataclasses.replace(operand, value=value, text=hex(value)), f"bit {bit} flipped"
    for step in (1, -1):
        yield dataclasses.replace(operand, value=operand.value + step, text=str(operand.value + step)), f"{step:+d}"


# lanes

_LANE_INDEXED = ("v_readlane_b32", "v_writelane_b32")
_PERMLANES = {"v_permlane16_swap_b32": "v_permlane32_swap_b32", "v_permlane32_swap_b32": "v_permlane16_swap_b32"}


def _lanes(at: Instruction) -> Edited:
    yield from (*_patterns(at), *_lane_indices(at))


def _patterns(at: Instruction) -> Edited:
    if at.suffix != "dpp":
        return
    quad = _numbers(at, "quad_perm")
    for place in range(len(quad)):
        other = tuple((lane + 1) % 4 if number == place else lane for number, lane in enumerate(quad))
        yield _modified(at, "quad_perm", other), f"quad_perm {list(quad)} made {list(other)}"
    for name in ("row_shl", "row_shr", "row_ror"):
        shift = _number(at, name)
        for other_shift in (shift - 1, shift + 1) if shift else ():
            if 1 <= other_shift <= 15:
                yield _modified(at, name, other_shift), f"{name}:{shift} made {name}:{other_shift}"
    for name, other_name in (("row_mirror", "row_half_mirror"), ("row_half_mirror", "row_mirror")):
        if name in at.modifiers:
            yield _modified(_modified(at, name, None), other_name, 1), f"{name} made {other_name}"
    if "row_bcast" in at.modifiers:
        lane = _number(at, "row_bcast")
        yield _modified(at, "row_bcast", 46 - lane), f"row_bcast:{lane} made row_bcast:{46 - lane}"
    for name in ("row_mask", "bank_mask"):
        mask = _number(at, name)
        for bit in range(4) if name in at.modifiers else ():
            yield _modified(at, name, mask ^ 1 << bit), f"{name}:{mask:#x} bit {bit} flipped"
    if at.modifiers.get("bound_ctrl"):
        yield _modified(at, "bound_ctrl", None), "bound_ctrl dropped"


def _lane_indices(at: Instruction) -> Edited:
    if at.mnemonic in _PERMLANES:
        yield dataclasses.replace(at, mnemonic=_PERMLANES[at.mnemonic]), f"made {_PERMLANES[at.mnemonic]}"
    if at.mnemonic in ("ds_bpermute_b32", "ds_permute_b32"):
        offset = _number(at, "offset")
        for lanes in (1, 4, 16, 32):
            yield _modified(at, "offset", offset + 4 * lanes), f"offset {lanes} lanes further"
    if at.mnemonic == "ds_swizzle_b32":
        offset = _number(at, "offset")
        for bit in range(15):
            yield _modified(at, "offset", offset ^ 1 << bit), f"swizzle pattern bit {bit} flipped"
    if at.mnemonic in _LANE_INDEXED and at.operands[2].kind == "constant":
        index = at.operands[2]
        for lane in ((index.value + 1) & 63, index.value ^ 32):
            yield (
                _with(at, 2, dataclasses.replace(index, value=lane, text=str(lane))),
                f"lane {index.value} made {lane}",
            )


# waits and barriers

_MOST = {"vmcnt": 63, "lgkmcnt": 15}


def _waits(at: Instruction) -> Edited:
    if at.mnemonic != "s_waitcnt":
        return
    yield _nothing(at), "dropped"
    for name, most in _MOST.items():
        count = at.modifiers.get(name)
        if isinstance(count, int) and count < most:
            yield _modified(at, name, count + 1), f"{name}({count}) raised to {count + 1}"


def _barriers(at: Instruction) -> Edited:
    if at.mnemonic == "s_barrier":
        yield _nothing(at), "dropped"


# comparisons

_RELATION = re.compile(r"^(v_cmpx?_|s_cmpk?_)(\w+?)(_[fiu]\d\d)$")
_OTHERS = {
    "lt": ("le", "gt"), "le": ("lt", "ge"), "gt": ("ge", "lt"), "ge": ("gt", "le"), "eq": ("ne", "lg", "le"), "ne": ("eq", "gt"),
    "lg": ("eq", "gt"), "neq": ("eq", "nle"), "nlt": ("nle", "lt"), "nle": ("nlt", "le"), "ngt": ("nge", "gt"),
    "nge": ("ngt", "ge"), "nlg": ("lg",), "o": ("u",), "u": ("o",),
}  # fmt: skip


def _relations(at: Instruction) -> Edited:
    found = _RELATION.match(at.mnemonic)
    for relation in _OTHERS.get(found[2], ()) if found else ():
        assert found is not None
        name = f"{found[1]}{relation}{found[3]}"
        if name.replace("v_cmpx_", "v_cmp_", 1) in COMPARE or name in SCALAR:
            yield dataclasses.replace(at, mnemonic=name), f"made {name}"


# op_sel and modifiers

_SELECTS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1")


def _selections(at: Instruction) -> Edited:
    for name in ("op_sel", "op_sel_hi"):
        bits = _numbers(at, name)
        if name not in at.modifiers and at.mnemonic in VECTOR and VECTOR[at.mnemonic].packed:
            # The usual choice is not written: the low half for the low result, the high one for the high result.
            bits = (int(name == "op_sel_hi"),) * len(VECTOR[at.mnemonic].sources)
        for place in range(len(bits)):
            other = tuple(bit ^ (number == place) for number, bit in enumerate(bits))
            yield _modified(at, name, other), f"{name}:{list(bits)} made {list(other)}"
    for name in ("src0_sel", "src1_sel", "dst_sel"):
        chosen = at.modifiers.get(name)
        if chosen in _SELECTS:
            near = {"BYTE": _SELECTS[:4], "WORD": _SELECTS[4:]}[str(chosen)[:4]]
            following = near[(near.index(str(chosen)) + 1) % len(near)]
            yield _modified(at, name, following), f"{name}:{chosen} made {following}"


def _signs(at: Instruction) -> Edited:
    for place, operand in enumerate(at.operands):
        for was, plain, words in (
            (operand.negative, dataclasses.replace(operand, negative=False), "negation"),
            (operand.absolute, dataclasses.replace(operand, absolute=False), "absolute value"),
            (operand.sign_extended, dataclasses.replace(operand, sign_extended=False), "sext"),
        ):
            if was:
                yield _with(at, place, plain), f"{words} of {operand.text} dropped"
    for name in ("neg_lo", "neg_hi"):
        bits = _numbers(at, name)
        for place, bit in enumerate(bits):
            if bit:
                other = tuple(0 if number == place else old for number, old in enumerate(bits))
                yield _modified(at, name, other), f"{name} of source {place} dropped"
    if "clamp" in at.modifiers:
        yield _modified(at, "clamp", None), "clamp dropped"


KINDS: dict[str, Callable[[Instruction], Edited]] = {
    "operands swapped": _swapped,
    "instruction dropped": _dropped,
    "constant changed": _constants,
    "lanes changed": _lanes,
    "wait weakened": _waits,
    "barrier dropped": _barriers,
    "relation changed": _relations,
    "op_sel changed": _selections,
    "modifier dropped": _signs,
}
"""What is done to an instruction, by the name of the kind."""
