"""Every instruction as one row of numbers, so that running it means no text, no look-up and no surprise.

All that the text may hold and the executor does not model is found here, before anything runs, and raised as
`UnsupportedInstruction` with the line.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np

from impl.executions.isa.assembly import VCC, Instruction, Operand, Program
from impl.executions.isa.lanes import plan
from impl.executions.isa.meaning import BOTH, CDNA3, CDNA4, COMPARE, SAVE_EXEC, SCALAR, VECTOR, Vector
from impl.executions.isa.operands import Place, misfit
from impl.executions.isa.unsupported import UnsupportedInstruction

Array = np.ndarray[Any, Any]


class Kind(IntEnum):
    """What the executor's outer loop tells apart."""

    VECTOR = 0
    COMPARE = 1
    READ_LANE = 2
    READ_FIRST_LANE = 3
    WRITE_LANE = 4
    SWAP_ROWS = 5
    SWAP = 6
    MATRIX = 7
    SCALAR = 8
    SAVE_EXEC = 9
    BRANCH = 10
    SCALAR_LOAD = 11
    BUFFER = 12
    GLOBAL = 13
    SCRATCH = 14
    LDS = 15
    LDS_PERMUTE = 16
    WAIT = 17
    BARRIER = 18
    END = 19
    NOTHING = 20
    SET_MODE = 21
    TRAP = 22


# Columns of a row.
(KIND, OP, DST, SRC0, SRC1, SRC2, SRC3, DST_WORDS, WORDS0, WORDS1, WORDS2, WORDS3, SOURCES, MASK, CARRY, LANES, IMMEDIATE,
 CLAMP, SELECT0, SELECT1, SELECT2, SELECT_DST, NEGATE, ABSOLUTE, SIGNS, OP_SEL, OP_SEL_HI, DPP, DPP_VALUE, DPP_MASKS, TARGET,
 OFFSET, SIZE, FLAGS, MATRIX_ROW, PLAIN, UPWARD, PARTS) = range(38)  # fmt: skip
COLUMNS = 38

CLAMP_INTEGER, CLAMP_FLOAT = 1, 2
SCALAR_BASE, LITERAL_BASE, NOTHING = 512, 1024, -1
SCC_INDEX = 128

DWORD, BYTE_0, WORD_0, SIGNED_SELECT = 0, 1, 5, 16
_SELECTS = {"DWORD": 0, "BYTE_0": 1, "BYTE_1": 2, "BYTE_2": 3, "BYTE_3": 4, "WORD_0": 5, "WORD_1": 6}
KEEP_REST, SIGN_REST = 8, 32

# The low word of the result depends on the low words of the sources alone.
UPWARD_CARRY = frozenset({"v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64", "v_lshlrev_b64", "v_mov_b64"})

_TO_ACCUMULATION = frozenset({"v_accvgpr_write_b32", "v_accvgpr_mov_b32"})
_FROM_ACCUMULATION = frozenset({"v_accvgpr_read_b32", "v_accvgpr_mov_b32"})
# Which operand can only be a constant.
_WITH_LITERAL = {"v_fmamk_f32": 2, "v_fmaak_f32": 3}
# Their sources are bits, of which the sign may be changed all the same.
_SIGNED_BITS = frozenset({"v_cndmask_b32", "v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"})
# What of a source's register is read, two bits a source: all of it, or one half alone.
LOW_PART, HIGH_PART = 1, 2
# In the same column: the result is the source as it is.
COPY = 1 << 8
# Or bytes of two sources that the third one names.
PERMUTES = 1 << 9
_COPIES = frozenset({"v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"})

# Flags of memory rows.
(STORE, ATOMIC, TO_LDS, SIGNED_LOAD, HIGH_HALF, LOW_HALF, RETURNS, TWO, TRANSPOSED, FLAT, OFFEN, IDXEN) = (
    1 << k for k in range(12)
)

BRANCHES = {"s_branch": 0, "s_cbranch_scc0": 1, "s_cbranch_scc1": 2, "s_cbranch_vccz": 3, "s_cbranch_vccnz": 4,
            "s_cbranch_execz": 5, "s_cbranch_execnz": 6}  # fmt: skip
IDLE = frozenset({"s_nop", "s_setprio", "s_sleep", "s_sched_barrier", "s_code_end", "s_clause", "s_icache_inv", "s_dcache_inv",
                      "s_dcache_wb", "buffer_wbl2", "buffer_inv", "s_inst_prefetch", "v_nop", "s_ttracedata"})  # fmt: skip
ATOMICS = {name: number for number, name in enumerate((
    "swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc", "dec", "add_f32", "pk_add_f16",
    "pk_add_bf16", "add_f64", "min_f64", "max_f64"))}  # fmt: skip
LDS_ATOMICS = {"add_u32": "add", "sub_u32": "sub", "min_i32": "smin", "max_i32": "smax", "min_u32": "umin", "max_u32": "umax",
                "and_b32": "and", "or_b32": "or", "xor_b32": "xor", "add_f32": "add_f32", "inc_u32": "inc", "dec_u32": "dec",
                "pk_add_f16": "pk_add_f16", "pk_add_bf16": "pk_add_bf16"}  # fmt: skip
# The idle ones that take a number.
_COUNTED = frozenset({"s_nop", "s_setprio", "s_sleep", "s_sched_barrier", "s_clause", "s_inst_prefetch"})
# How a value passes through the caches, which changes no value here.
_CACHING = ("sc0", "sc1", "nt", "glc", "slc")
_SIZES = {
    "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2,
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
}  # fmt: skip
_LDS_SIZES = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}

MATRIX_TYPES = {
    "f32": 0,
    "xf32": 1,
    "f16": 2,
    "bf16": 3,
    "fp8": 4,
    "bf8": 5,
    "i8": 6,
    "f64": 7,
    "fp6": 8,
    "bf6": 9,
    "fp4": 10,
}
_F8F6F4 = ("fp8", "bf8", "fp6", "bf6", "fp4")
_BITS = {
    "f32": 32,
    "xf32": 32,
    "f16": 16,
    "bf16": 16,
    "fp8": 8,
    "bf8": 8,
    "i8": 8,
    "f64": 64,
    "fp6": 6,
    "bf6": 6,
    "fp4": 4,
}
# Of a modifier that is a number, the smallest and the largest.
_LIMITS = {
    "offset": (-(1 << 20), (1 << 20) - 1), "offset0": (0, 255), "offset1": (0, 255), "bitop3": (0, 255),
    "row_shl": (1, 15), "row_shr": (1, 15), "row_ror": (1, 15), "row_bcast": (0, 31), "row_newbcast": (0, 15),
    "row_mask": (0, 15), "bank_mask": (0, 15), "bound_ctrl": (0, 1), "vmcnt": (0, 63), "expcnt": (0, 7), "lgkmcnt": (0, 15),
}  # fmt: skip
_ALONE = {"s_barrier": Kind.BARRIER, "s_endpgm": Kind.END, "s_trap": Kind.TRAP, "s_sethalt": Kind.TRAP}
_LANES = {
    "v_readfirstlane_b32": (Place("s", written=True), Place("v")),
    "v_readlane_b32": (Place("s", written=True), Place("v"), Place("sc")),
    "v_writelane_b32": (Place("v", written=True), Place("sc"), Place("sc")),
}
# Columns of a row of the matrix table.
(M, N, K, BLOCKS, TYPE_A, TYPE_B, WORDS_A, WORDS_B, WORDS_D, SCALED, SPLIT, OUTPUT, GROUP) = range(13)


@dataclass(frozen=True)
class Encoded:
    """A program as numbers. matrices: one row for each matrix instruction; grain: bytes that one LDS write covers at least."""

    rows: Array
    literals: Array
    matrices: Array
    grain: int
    scratch: bool


def _refuse(instruction: Instruction, why: str) -> NoReturn:
    raise UnsupportedInstruction(f"line {instruction.line}, {instruction.text!r}: {why}")


def _takes(at: Instruction, *places: Place) -> None:
    """Refuses operands of another kind or number than the places."""
    why = misfit(at.operands, places)
    if why:
        _refuse(at, why)


_CONSTANT, _ADDRESS = Place("c"), Place("v")


# Memory and matrices know both files of vector registers.
@functools.cache
def _data(words: int) -> Place:
    return Place("va", words)


@functools.cache
def _loaded(words: int) -> Place:
    return Place("va", words, written=True)


def _mask(name: str, suffix: str, written: bool = False) -> Place:
    """A bit of every lane: in the short encodings it is VCC, but for a comparison's result under SDWA."""
    free = suffix in ("", "e64") or (suffix == "sdwa" and name in COMPARE)
    return Place("s", 2, only="" if free else "vcc", written=written)


@functools.cache
def _lane_places(name: str, suffix: str, operands: int) -> tuple[Place, ...]:
    """The operands of a vector instruction. A short comparison may leave VCC unsaid, and has one operand less then."""
    meaning = COMPARE[name] if name in COMPARE else VECTOR[name]
    places = []
    if name not in COMPARE:
        places.append(Place("a" if name in _TO_ACCUMULATION else "v", _result_words(meaning), written=True))
    if meaning.carry and not (name in COMPARE and suffix in ("", "e32") and operands == 2):
        places.append(_mask(name, suffix, written=True))
    kinds = "a" if name in _FROM_ACCUMULATION else "v" if "dpp" in suffix else "vsc"
    for letter in meaning.sources[: len(meaning.sources) - int(meaning.accumulates)]:
        is_float = letter in "fhkd" or name in _SIGNED_BITS
        signed, extended = is_float and not meaning.packed, suffix == "sdwa" and not is_float
        places.append(Place(kinds, _words(letter, meaning), signed=signed, extended=extended))
    if name in _WITH_LITERAL:
        places[_WITH_LITERAL[name]] = _CONSTANT
    if meaning.mask and not name.startswith("v_div_fmas"):
        places.append(_mask(name, suffix))
    return tuple(places)


@functools.cache
def _scalar_places(name: str) -> tuple[Place, ...]:
    """The operands of a scalar instruction; the short ones take a number of 16 bits alone."""
    meaning = SCALAR.get(name) or SAVE_EXEC[name]
    written = Place("s", 2 if (meaning.result or "u") in "ql" else 1, written=bool(meaning.result))
    immediate = (-0x8000, 0xFFFF) if set(meaning.sources) & set("sw") else None
    kinds = "c" if immediate else "sc"
    read = [Place(kinds, 2 if letter in "ql" else 1, limits=immediate) for letter in meaning.sources]
    return (*([written] if meaning.result or meaning.reads_destination else []), *read)


class _Encoder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.vectors, self.scalars = plan()
        self.rows = np.zeros((len(program.instructions), COLUMNS), np.int64)
        self.rows[:, SRC0 : SRC3 + 1] = NOTHING
        self.rows[:, [DST, MASK, CARRY]] = NOTHING
        self.literals: dict[int, int] = {}
        self.matrices: list[list[int]] = []
        self.grain = 4
        self.scratch = False

    def encode(self) -> Encoded:
        for number, instruction in enumerate(self.program.instructions):
            self._one(self.rows[number], instruction)
        literals = np.array(list(self.literals) or [0], np.uint64)
        matrices = np.array(self.matrices or [[0] * 13], np.int64)
        return Encoded(self.rows, literals, matrices, self.grain, self.scratch)

    def _one(self, row: Array, at: Instruction) -> None:
        for name, value in at.modifiers.items():
            if name in _LIMITS and not (isinstance(value, int) and _LIMITS[name][0] <= value <= _LIMITS[name][1]):
                _refuse(at, f"{name}:{value} should be between {_LIMITS[name][0]} and {_LIMITS[name][1]}")
        try:
            self._encode(row, at)
        except (IndexError, ValueError, TypeError, KeyError):
            _refuse(at, f"its operands are not those of {at.mnemonic}")

    def _encode(self, row: Array, at: Instruction) -> None:
        name = at.mnemonic
        if name.startswith("v_cmpx_"):
            name = "v_cmp_" + name[7:]
        if name in VECTOR or name in COMPARE:
            self._vector(row, at, name)
        elif name in SCALAR or name in SAVE_EXEC:
            self._scalar(row, at)
        elif name.startswith(("v_mfma_", "v_smfmac_")):
            self._matrix(row, at)
        elif name.startswith(("buffer_load", "buffer_store", "buffer_atomic")):
            self._buffer(row, at)
        elif name.startswith(("global_", "flat_", "scratch_")):
            self._flat(row, at)
        elif name.startswith("ds_"):
            self._lds(row, at)
        elif name.startswith(("s_load_dword", "s_buffer_load_dword")):
            self._scalar_load(row, at)
        else:
            self._other(row, at)

    # operands

    def _literal(self, value: int) -> int:
        value &= (1 << 64) - 1
        return LITERAL_BASE + self.literals.setdefault(value, len(self.literals))

    def _source(self, at: Instruction, operand: Operand, letter: str, packed: int = 0) -> int:
        if operand.kind == "v":
            return operand.index
        if operand.kind == "s":
            return SCALAR_BASE + operand.index
        if operand.kind != "constant":
            _refuse(at, f"{operand.text!r} cannot be read here")
        return self._literal(_constant(operand, letter, packed))

    # vector instructions

    def _vector(self, row: Array, at: Instruction, name: str) -> None:
        compare = name in COMPARE
        meaning = COMPARE[name] if compare else VECTOR[name]
        if self.program.arch not in meaning.archs:
            _refuse(at, f"{at.mnemonic} does not exist on {self.program.arch}")
        row[KIND] = Kind.COMPARE if compare else Kind.VECTOR
        row[OP] = self.vectors[name]
        operands = list(at.operands)
        if compare:
            self._compared(row, at, operands)
        else:
            destination = operands.pop(0)
            if destination.kind != "v":
                _refuse(at, f"{destination.text!r} cannot be written here")
            row[DST] = destination.index
            row[DST_WORDS] = _result_words(meaning)
            if meaning.carry:
                row[CARRY] = operands.pop(0).index
        if meaning.mask:
            row[MASK] = VCC if name.startswith("v_div_fmas") else operands.pop().index
        letters = meaning.sources
        expected = len(letters) - (1 if meaning.accumulates else 0)
        if len(operands) != expected:
            _refuse(at, f"it has {len(operands)} sources: {expected} are known")
        row[SOURCES] = len(letters)
        for place, (letter, operand) in enumerate(zip(letters, operands, strict=False)):
            row[SRC0 + place] = self._source(at, operand, letter, meaning.packed)
            row[WORDS0 + place] = _words(letter, meaning)
            row[SIGNS] |= {"h": 1, "k": 1, "w": 1, "s": 1, "d": 2}.get(letter, 0) << (2 * place)
            row[NEGATE] |= int(operand.negative) << place
            row[ABSOLUTE] |= int(operand.absolute) << place
            if operand.sign_extended:
                row[SELECT0 + place] |= SIGNED_SELECT
        if meaning.accumulates:
            row[SRC0 + expected] = row[DST]
            row[WORDS0 + expected] = 2 if letters[-1] in "qld" else 1
        row[UPWARD] = int(meaning.packed == 32 or name in UPWARD_CARRY)
        row[LANES] = 128 if meaning.packed else 64
        if "clamp" in at.modifiers:
            row[CLAMP] = self._clamp(at, meaning)
        self._modifiers(row, at, meaning, name)
        _takes(at, *_lane_places(name, at.suffix, len(at.operands)))
        plain = not (row[NEGATE] or row[ABSOLUTE] or row[SELECT0] or row[SELECT1] or row[SELECT2] or row[DPP])
        row[PLAIN] = int(plain and not meaning.packed)
        row[PARTS] = self._parts(row, name, letters, operands)
        if plain and name in _COPIES:
            row[PARTS] |= COPY
        if name == "v_perm_b32":
            row[PARTS] |= PERMUTES

    def _parts(self, row: Array, name: str, letters: str, operands: list[Operand]) -> int:
        """Of each source, the half of its register that the result depends on, if it is one alone."""
        found = [0, 0, 0, 0]
        for place, letter in enumerate(letters):
            select = int(row[SELECT0 + place]) & 15 if place < 3 else 0
            if select:
                found[place] = LOW_PART if select in (1, 2, 5) else HIGH_PART
            elif letter in "hkws":
                found[place] = LOW_PART
        constants = [operand.value if operand.kind == "constant" else None for operand in operands]
        if name == "v_and_b32" and not row[DPP]:
            for place, mask in ((0, constants[1]), (1, constants[0])):
                if mask is not None and not found[place]:
                    found[place] = LOW_PART if mask & 0xFFFF0000 == 0 else HIGH_PART if mask & 0xFFFF == 0 else 0
        elif name in ("v_lshlrev_b32", "v_lshrrev_b32", "v_ashrrev_i32") and not found[1]:
            if constants[0] is not None and constants[0] & 31 >= 16:
                found[1] = LOW_PART if name == "v_lshlrev_b32" else HIGH_PART
        elif name.startswith("v_cvt_f32_ubyte") and not found[0]:
            found[0] = LOW_PART if name[-1] in "01" else HIGH_PART
        return sum(part << (2 * place) for place, part in enumerate(found))

    def _clamp(self, at: Instruction, meaning: Vector) -> int:
        letters = {letter for letter, _ in meaning.results}
        if letters == {"f"}:
            return CLAMP_FLOAT
        if any("clamp" in expression for _, expression in meaning.results):
            return CLAMP_INTEGER
        _refuse(at, f"clamp is not modelled on {at.mnemonic}")

    def _compared(self, row: Array, at: Instruction, operands: list[Operand]) -> None:
        writes_exec = at.mnemonic.startswith("v_cmpx_")
        row[CARRY] = VCC
        if len(operands) == 3:
            row[CARRY] = operands.pop(0).index
        row[FLAGS] = int(writes_exec)

    def _modifiers(self, row: Array, at: Instruction, meaning: Vector, name: str) -> None:
        modifiers = dict(at.modifiers)
        modifiers.pop("clamp", None)
        op_sel = _list(modifiers.pop("op_sel", ()))
        op_sel_hi = modifiers.pop("op_sel_hi", None) if meaning.packed or name.startswith("v_fma_mix") else None
        if meaning.packed:
            count = len(meaning.sources)
            hi = _list(op_sel_hi) if op_sel_hi is not None else (1,) * count
            row[OP_SEL] = _bits(op_sel)
            row[OP_SEL_HI] = _bits(hi)
            row[NEGATE] = _bits(_list(modifiers.pop("neg_lo", ())))
            row[ABSOLUTE] = _bits(_list(modifiers.pop("neg_hi", ())))
            row[FLAGS] = meaning.packed
            if name == "v_pk_mov_b32":
                row[OP_SEL_HI] = row[OP_SEL]
        elif name.startswith("v_fma_mix"):
            self._mix(row, name, op_sel, _list(op_sel_hi or ()))
        elif op_sel:
            self._select(row, at, meaning, name, op_sel)
        elif meaning.keeps:
            row[SELECT_DST] = WORD_0 | KEEP_REST
        if name.startswith("v_bitop3"):
            row[IMMEDIATE] = modifiers.pop("bitop3", 0)
        if at.suffix in ("", "sdwa"):
            self._selected(row, at, len(meaning.sources), modifiers)
        self._cross_lane(row, at, modifiers)
        if modifiers:
            _refuse(at, f"the modifier {next(iter(modifiers))!r} is not known on {at.mnemonic}")

    def _selected(self, row: Array, at: Instruction, sources: int, modifiers: dict[str, Any]) -> None:
        """Parts of registers as SDWA names them."""
        for place in range(min(2, sources)):
            select = modifiers.pop(f"src{place}_sel", "DWORD")
            if select not in _SELECTS:
                _refuse(at, f"src{place}_sel:{select} is not known")
            row[SELECT0 + place] |= _SELECTS[str(select)]
        select, unused = modifiers.pop("dst_sel", "DWORD"), modifiers.pop("dst_unused", "UNUSED_PAD")
        if select not in _SELECTS or unused not in ("UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"):
            _refuse(at, f"dst_sel:{select} dst_unused:{unused} is not known")
        if select != "DWORD":
            row[SELECT_DST] = _SELECTS[str(select)]
            row[SELECT_DST] |= {"UNUSED_PAD": 0, "UNUSED_PRESERVE": KEEP_REST, "UNUSED_SEXT": SIGN_REST}[str(unused)]

    def _mix(self, row: Array, name: str, op_sel: tuple[int, ...], halves: tuple[int, ...]) -> None:
        """Of each source: is it a half (op_sel_hi), and which one of its register (op_sel)?"""
        row[IMMEDIATE] = _bits(halves)
        for place, is_half in enumerate(halves):
            if is_half:
                row[SELECT0 + place] |= WORD_0 + (op_sel[place] if place < len(op_sel) else 0)
                row[SIGNS] |= 1 << (2 * place)
        if name != "v_fma_mix_f32":
            row[SELECT_DST] = (WORD_0 + int(name == "v_fma_mixhi_f16")) | KEEP_REST

    def _select(self, row: Array, at: Instruction, meaning: Vector, name: str, op_sel: tuple[int, ...]) -> None:
        if name.startswith(("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")) or (
            name.startswith("v_cvt_scalef32_pk_") and "pk_f" not in name[18:21] and name.split("_")[4] in ("fp8", "bf8")
        ):
            row[IMMEDIATE] = op_sel[-1]
        elif name.startswith("v_cvt_scalef32_pk_fp4"):
            row[IMMEDIATE] = op_sel[-2] + 2 * op_sel[-1]
        elif name.startswith("v_cvt_pk_f32_") or (
            name.startswith("v_cvt_scalef32_pk_") and name.endswith(("fp8", "bf8"))
        ):
            row[SELECT0] = WORD_0 + op_sel[0]
        elif name.startswith(("v_cvt_f32_fp8", "v_cvt_f32_bf8")) or name.endswith("_fp4"):
            row[SELECT0] = BYTE_0 + op_sel[0] + 2 * op_sel[1]
        elif meaning.half or set(meaning.sources) & set("hws"):
            for place in range(len(meaning.sources)):
                if place < len(op_sel) and op_sel[place]:
                    row[SELECT0 + place] = WORD_0 + 1
            if len(op_sel) > len(meaning.sources) - int(meaning.accumulates) and op_sel[-1]:
                row[SELECT_DST] = (WORD_0 + 1) | KEEP_REST
            elif meaning.keeps:
                row[SELECT_DST] = WORD_0 | KEEP_REST
        elif any(op_sel):
            _refuse(at, f"op_sel is not known on {at.mnemonic}")

    def _cross_lane(self, row: Array, at: Instruction, modifiers: dict[str, Any]) -> None:
        if "dpp" not in at.suffix:
            return
        for number, word in enumerate(("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror",
                                       "row_bcast", "row_newbcast"), 1):  # fmt: skip
            if word in modifiers:
                if row[DPP]:
                    _refuse(at, f"{word} is a second lane pattern")
                row[DPP] = number
                value = modifiers.pop(word)
                if word == "quad_perm":
                    if not isinstance(value, tuple) or len(value) != 4 or not set(value) <= {0, 1, 2, 3}:
                        _refuse(at, f"{word}:{value} is not known")
                    value = sum(lane << (2 * place) for place, lane in enumerate(value))
                if word == "row_bcast" and value not in (15, 31):
                    _refuse(at, f"row_bcast:{value} is not known")
                row[DPP_VALUE] = value
        if not row[DPP]:
            _refuse(at, "its lane pattern is not known")
        row[DPP_MASKS] = modifiers.pop("row_mask", 15) | modifiers.pop("bank_mask", 15) << 4
        row[DPP_MASKS] |= (1 if modifiers.pop("bound_ctrl", 0) else 0) << 8

    # scalar instructions

    def _scalar(self, row: Array, at: Instruction) -> None:
        name = at.mnemonic
        self._known_modifiers(at)
        meaning = SCALAR.get(name) or SAVE_EXEC[name]
        row[KIND] = Kind.SAVE_EXEC if name in SAVE_EXEC else Kind.SCALAR
        row[OP] = self.scalars[name]
        operands = list(at.operands)
        if meaning.result or meaning.reads_destination:
            destination = operands.pop(0)
            if destination.kind != "s" or destination.index == SCC_INDEX:
                _refuse(at, f"{destination.text!r} cannot be written here")
            row[DST] = destination.index
            row[DST_WORDS] = 0 if not meaning.result else 2 if meaning.result in "ql" else 1
        if len(operands) != len(meaning.sources):
            _refuse(at, f"it has {len(operands)} sources: {len(meaning.sources)} are known")
        for place, (letter, operand) in enumerate(zip(meaning.sources, operands, strict=True)):
            if operand.kind == "v":
                _refuse(at, f"{operand.text!r} cannot be read here")
            row[SRC0 + place] = self._source(at, operand, letter)
            row[WORDS0 + place] = 2 if letter in "ql" else 1
        row[SOURCES] = len(operands)
        _takes(at, *_scalar_places(name))
        # Which unknown bits stay: 1 for a bitwise and, 2 for or, 3 for xor, 4 for and-not, 5 for moves.
        row[FLAGS] = (
            int(meaning.reads_destination) | int("scc" in meaning.expression) << 1 | int(bool(meaning.scc)) << 2
        )
        stem = name[2:].split("_")[0]
        row[IMMEDIATE] = (
            {"and": 1, "or": 2, "xor": 3, "andn2": 4, "mov": 5, "not": 5, "cselect": 6}.get(stem, 0)
            if name[-3:] in ("b32", "b64")
            else 0
        )

    def _scalar_load(self, row: Array, at: Instruction) -> None:
        found = re.fullmatch(r"s_(buffer_)?load_dword(?:x(2|4|8|16))?", at.mnemonic)
        if found is None:
            _refuse(at, f"{at.mnemonic} is not known")
        self._known_modifiers(at, "glc", "offset")
        row[KIND] = Kind.SCALAR_LOAD
        row[SIZE] = int(found[2] or 1)
        row[FLAGS] = int(found[1] is not None)
        row[DST], row[SRC0] = at.operands[0].index, at.operands[1].index
        offset = at.operands[2] if len(at.operands) > 2 else None
        if offset is not None and offset.kind == "constant":
            row[OFFSET] = offset.value
        elif offset is not None and offset.kind == "s":
            row[SRC1] = offset.index
        row[OFFSET] += at.modifiers.get("offset", 0)
        base = Place("s", 4 if found[1] else 2)
        _takes(at, Place("s", int(row[SIZE]), written=True), base, *([] if offset is None else [Place("sc")]))

    def _other(self, row: Array, at: Instruction) -> None:
        name = at.mnemonic
        if name in BRANCHES:
            self._known_modifiers(at)
            _takes(at, Place("l"))
            label = at.operands[0].text
            if label not in self.program.targets:
                _refuse(at, f"the label {label} is not in the kernel")
            row[KIND], row[OP], row[TARGET] = Kind.BRANCH, BRANCHES[name], self.program.targets[label]
        elif name == "s_waitcnt":
            row[KIND] = Kind.WAIT
            raw = at.modifiers.get("raw")
            vm = at.modifiers.get("vmcnt", 63) if raw is None else (int(raw) & 15) | (int(raw) >> 14 & 3) << 4  # type: ignore[arg-type]
            lgkm = at.modifiers.get("lgkmcnt", 15) if raw is None else int(raw) >> 8 & 15  # type: ignore[arg-type]
            row[OP], row[IMMEDIATE] = vm, lgkm
        elif name in _ALONE:
            row[KIND] = _ALONE[name]
            self._known_modifiers(at)
            _takes(at, *([_CONSTANT] if row[KIND] == Kind.TRAP or (row[KIND] == Kind.END and at.operands) else []))
        elif name == "s_setreg_imm32_b32":
            self._set_mode(row, at)
        elif name in ("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32"):
            self._lane(row, at)
        elif name in ("v_permlane16_swap_b32", "v_permlane32_swap_b32", "v_swap_b32"):
            if name != "v_swap_b32" and self.program.arch not in CDNA4:
                _refuse(at, f"{name} does not exist on {self.program.arch}")
            row[KIND] = Kind.SWAP if name == "v_swap_b32" else Kind.SWAP_ROWS
            row[OP] = 16 if "16" in name else 32
            row[DST], row[SRC0] = at.operands[0].index, at.operands[1].index
            self._known_modifiers(at)
            _takes(at, Place("v", written=True), Place("v", written=True))
        elif name in IDLE:
            row[KIND] = Kind.NOTHING
            self._known_modifiers(at, *(_CACHING if name.startswith("buffer_") else ()))
            _takes(at, *([_CONSTANT] if name in _COUNTED else []))
            row[OP] = int(name == "buffer_inv" and "sc1" in at.modifiers)
        else:
            _refuse(at, f"{name} is not modelled")

    def _lane(self, row: Array, at: Instruction) -> None:
        name = at.mnemonic
        self._known_modifiers(at)
        _takes(at, *_LANES[name])
        row[DST] = at.operands[0].index
        if name == "v_readfirstlane_b32":
            row[KIND] = Kind.READ_FIRST_LANE
            row[SRC0] = self._source(at, at.operands[1], "u")
        elif name == "v_readlane_b32":
            row[KIND] = Kind.READ_LANE
            row[SRC0] = at.operands[1].index
            row[SRC1] = self._source(at, at.operands[2], "u")
        else:
            row[KIND] = Kind.WRITE_LANE
            row[SRC0] = self._source(at, at.operands[1], "u")
            row[SRC1] = self._source(at, at.operands[2], "u")

    def _set_mode(self, row: Array, at: Instruction) -> None:
        found = re.fullmatch(r"hwreg\((?:HW_REG_)?(\w+),(\d+),(\d+)\)", at.operands[0].text.replace(" ", ""))
        if found is None or found[1] not in ("MODE", "1"):
            _refuse(at, f"setting {at.operands[0].text} is not modelled")
        first, width, value = int(found[2]), int(found[3]), at.operands[1].value
        if (first, width) != (23, 1):
            _refuse(
                at, f"of the MODE register only FP16_OVFL (bit 23) is modelled, not bits {first} to {first + width - 1}"
            )
        row[KIND], row[IMMEDIATE], row[OFFSET] = Kind.SET_MODE, value, first
        self._known_modifiers(at)
        _takes(at, Place("h"), _CONSTANT)

    # memory

    def _access(self, row: Array, at: Instruction, verb: str, kind: str) -> None:
        if verb == "atomic":
            returns = "sc0" in at.modifiers or "glc" in at.modifiers
            wide = kind.endswith("_x2")
            stem = kind.removesuffix("_x2")
            if stem not in ATOMICS:
                _refuse(at, f"{at.mnemonic} is not modelled")
            row[OP] = ATOMICS[stem]
            row[SIZE] = 8 if wide or stem.endswith("f64") else 4
            row[FLAGS] |= ATOMIC | (RETURNS if returns else 0)
            return
        half = HIGH_HALF if kind.endswith("_d16_hi") else LOW_HALF if kind.endswith("_d16") else 0
        stem = kind.removesuffix("_hi").removesuffix("_d16")
        if stem not in _SIZES:
            _refuse(at, f"{at.mnemonic} is not modelled")
        row[SIZE] = _SIZES[stem]
        row[FLAGS] |= half | (STORE if verb == "store" else 0) | (SIGNED_LOAD if stem in ("sbyte", "sshort") else 0)

    def _known_modifiers(self, at: Instruction, *names: str) -> None:
        for name in at.modifiers:
            if name not in names:
                _refuse(at, f"the modifier {name!r} is not known on {at.mnemonic}")

    def _buffer(self, row: Array, at: Instruction) -> None:
        _, verb, kind = at.mnemonic.split("_", 2)
        self._known_modifiers(at, *_CACHING, "offset", "offen", "idxen", "lds")
        row[KIND] = Kind.BUFFER
        self._access(row, at, verb, kind)
        operands = list(at.operands)
        if "lds" in at.modifiers:
            row[FLAGS] |= TO_LDS
            if row[SIZE] == 8:
                _refuse(at, "there is no load of 8 bytes a lane into LDS")
            if row[SIZE] > 4 and self.program.arch not in CDNA4:
                _refuse(at, f"loading {row[SIZE]} bytes a lane into LDS does not exist on {self.program.arch}")
        else:
            row[DST] = operands.pop(0).index
        address = operands.pop(0)
        if "idxen" in at.modifiers:
            _refuse(at, "idxen is not modelled")
        if "offen" in at.modifiers:
            row[FLAGS] |= OFFEN
            row[SRC0] = address.index
        row[SRC1] = operands.pop(0).index
        row[SRC2] = self._source(at, operands.pop(0), "u")
        row[OFFSET] = at.modifiers.get("offset", 0)
        data = [] if row[FLAGS] & TO_LDS else [_stored(row) if verb != "load" else _loaded(_data_words(row))]
        _takes(at, *data, _ADDRESS if row[FLAGS] & OFFEN else Place("o"), Place("s", 4), Place("sc"))

    def _flat(self, row: Array, at: Instruction) -> None:
        space, verb, kind = at.mnemonic.split("_", 2)
        self._known_modifiers(at, *_CACHING, "offset")
        row[KIND] = Kind.SCRATCH if space == "scratch" else Kind.GLOBAL
        self.scratch = self.scratch or space == "scratch"
        if space == "flat":
            row[FLAGS] |= FLAT
        if kind.startswith("lds_"):
            row[FLAGS] |= TO_LDS
            kind = kind.removeprefix("lds_")
            if kind == "dwordx2" or (kind in ("dwordx3", "dwordx4") and self.program.arch not in CDNA4):
                _refuse(at, f"{at.mnemonic} does not exist on {self.program.arch}")
        self._access(row, at, verb, kind)
        operands = list(at.operands)
        if verb == "load" and not row[FLAGS] & TO_LDS:
            row[DST] = operands.pop(0).index
        elif verb == "atomic" and row[FLAGS] & RETURNS:
            row[SRC3] = operands.pop(0).index
        address = operands.pop(0)
        if verb in ("store", "atomic"):
            row[DST] = operands.pop(0).index
        row[SRC0] = address.index if address.kind == "v" else NOTHING
        if address.kind == "s":
            row[SRC1] = address.index
        if operands and operands[0].kind == "s":
            row[SRC1] = operands[0].index
        row[OFFSET] = at.modifiers.get("offset", 0)
        _takes(at, *self._placed(row, at, space, verb))

    def _placed(self, row: Array, at: Instruction, space: str, verb: str) -> Iterator[Place]:
        """Operands of an access by address: the result, the address, what is stored, the base if there may be one."""
        if verb == "load" and not row[FLAGS] & TO_LDS:
            yield _loaded(_data_words(row))
        elif verb == "atomic" and row[FLAGS] & RETURNS:
            yield _loaded(int(row[SIZE]) // 4)
        if space == "scratch":
            yield Place("vo")
        else:
            yield Place("v", 2 if space == "flat" or at.operands[-1].kind == "off" else 1)
        if verb != "load":
            yield _stored(row)
        if space != "flat":
            yield Place("so", 1 if space == "scratch" else 2)

    def _lds(self, row: Array, at: Instruction) -> None:
        name = at.mnemonic
        self._known_modifiers(
            at, *(("offset0", "offset1") if name[3:].startswith(("read2", "write2")) else ("offset",))
        )
        if name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
            row[KIND] = Kind.LDS_PERMUTE
            row[OP] = ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32").index(name)
            row[DST], row[SRC0] = at.operands[0].index, at.operands[1].index
            if row[OP] < 2:
                row[SRC1] = at.operands[2].index
            elif not isinstance(at.modifiers.get("offset"), int) or int(at.modifiers["offset"]) >= 0xC000:  # type: ignore[arg-type]
                _refuse(at, "this swizzle pattern is not modelled")
            row[OFFSET] = at.modifiers.get("offset", 0)
            _takes(at, _loaded(1), _ADDRESS, *([_data(1)] if row[OP] < 2 else []))
            return
        row[KIND] = Kind.LDS
        atomic = re.fullmatch(r"ds_(\w+?)(_rtn)?_([a-z]+\d+)", name)
        plain = re.fullmatch(r"ds_(read|write)(2)?(st64)?_(\w+?)(?:_(d16_hi|d16|tr_b\d+))?", name)
        if plain is not None and plain[4] in _LDS_SIZES:
            self._plain_lds(row, at, plain)
        elif atomic is not None and f"{atomic[1]}_{atomic[3]}" in LDS_ATOMICS:
            row[OP] = ATOMICS[LDS_ATOMICS[f"{atomic[1]}_{atomic[3]}"]]
            row[SIZE], row[FLAGS] = 4, ATOMIC | (RETURNS if atomic[2] else 0)
            operands = list(at.operands)
            if atomic[2]:
                row[SRC3] = operands.pop(0).index
            row[SRC0], row[DST] = operands[0].index, operands[1].index
            row[OFFSET] = at.modifiers.get("offset", 0)
            _takes(at, *([_loaded(1)] if atomic[2] else []), _ADDRESS, _data(1))
        else:
            _refuse(at, f"{name} is not modelled")

    def _plain_lds(self, row: Array, at: Instruction, found: re.Match[str]) -> None:
        verb, two, strided, kind, extra = found.groups()
        size = row[SIZE] = _LDS_SIZES[kind]
        row[FLAGS] = (
            (STORE if verb == "write" else 0) | (TWO if two else 0) | (SIGNED_LOAD if kind in ("i8", "i16") else 0)
        )
        if extra in ("d16", "d16_hi"):
            row[FLAGS] |= HIGH_HALF if extra == "d16_hi" else LOW_HALF
        elif extra:
            if self.program.arch not in CDNA4 or (kind, extra) not in (
                ("b64", "tr_b16"),
                ("b64", "tr_b8"),
                ("b64", "tr_b4"),
            ):
                _refuse(at, f"{at.mnemonic} is not modelled on {self.program.arch}")
            row[FLAGS] |= TRANSPOSED
            row[IMMEDIATE] = int(extra[4:])
        if verb == "write":
            row[SRC0], row[DST] = at.operands[0].index, at.operands[1].index
            if two:
                row[SRC1] = at.operands[2].index
            self.grain = min(self.grain, size)
            _takes(at, _ADDRESS, *[_data(_data_words(row))] * (2 if two else 1))
        else:
            row[DST], row[SRC0] = at.operands[0].index, at.operands[1].index
            _takes(at, _loaded(_data_words(row) * (2 if two else 1)), _ADDRESS)
        step = size * (64 if strided else 1)
        if two:
            row[OFFSET] = int(at.modifiers.get("offset0", 0)) * step  # type: ignore[arg-type]
            row[TARGET] = int(at.modifiers.get("offset1", 0)) * step  # type: ignore[arg-type]
        else:
            row[OFFSET] = at.modifiers.get("offset", 0)

    # matrix instructions

    def _matrix(self, row: Array, at: Instruction) -> None:
        found = re.fullmatch(r"v_mfma_(scale_)?(f32|i32|f64)_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_?(\w+)", at.mnemonic)
        if found is None:
            _refuse(at, f"{at.mnemonic} is not modelled")
        scaled, output, m, n, k, blocks, kinds = found.groups()
        kinds = kinds.removesuffix("_1k")
        modifiers = dict(at.modifiers)
        if kinds == "f8f6f4":
            formats = int(modifiers.pop("cbsz", 0)), int(modifiers.pop("blgp", 0))  # type: ignore[arg-type]
            if max(formats) >= len(_F8F6F4):
                _refuse(at, f"the formats cbsz:{formats[0]} blgp:{formats[1]} do not exist")
            a, b = _F8F6F4[formats[0]], _F8F6F4[formats[1]]
        else:
            a, b = kinds.split("_") if "_" in kinds else (kinds, kinds)
        if a not in MATRIX_TYPES or b not in MATRIX_TYPES:
            _refuse(at, f"{at.mnemonic} is not modelled")
        self._exists(at, a, kinds, int(m), int(k))
        op_sel = _list(modifiers.pop("op_sel", ())) if scaled else ()
        high = _list(modifiers.pop("op_sel_hi", (1, 1, 1))) if scaled else ()
        if modifiers:
            _refuse(at, f"the modifier {next(iter(modifiers))!r} is not modelled on {at.mnemonic}")
        count = int(blocks or 1)
        rows, columns, depth = int(m), int(n), int(k)
        per_lane = max(1, rows * depth * count // 64)
        words = [per_lane * _BITS[kind] // 32 for kind in (a, b)]
        results = rows * columns * count // 64 * (2 if output == "f64" else 1)
        row[KIND] = Kind.MATRIX
        row[DST] = at.operands[0].index
        row[DST_WORDS] = results
        row[SRC0], row[SRC1] = at.operands[1].index, at.operands[2].index
        scales = [Place("vsc")] * 2 if scaled else []
        _takes(at, _loaded(results), *map(_data, words), Place("vac", results), *scales)
        row[SRC2] = self._source(at, at.operands[3], "d" if output == "f64" else "f")
        if results > 4 and 0 < abs(int(row[SRC2] - row[DST])) < results:
            _refuse(at, f"{at.operands[3].text} and {at.operands[0].text} should be the same registers or others")
        row[MATRIX_ROW] = len(self.matrices)
        if scaled:
            for place in range(2):
                operand = at.operands[4 + place]
                row[(SRC3, TARGET)[place]] = self._source(at, operand, "u")
                byte = (op_sel[place] if place < len(op_sel) else 0) + 2 * high[place]
                row[SELECT0 + place] = byte
        split = int(kinds == "f8f6f4")
        self.matrices.append(
            [rows, columns, depth, count, MATRIX_TYPES[a], MATRIX_TYPES[b], *words, results, int(bool(scaled)), split,
             {"f32": 0, "i32": 1, "f64": 2}[output], per_lane]
        )  # fmt: skip

    def _exists(self, at: Instruction, a: str, kinds: str, rows: int, depth: int) -> None:
        arch = self.program.arch
        newer = kinds == "f8f6f4" or (kinds in ("f16", "bf16") and (rows, depth) in ((16, 32), (32, 16)))
        newer = newer or (kinds == "i8" and (rows, depth) in ((16, 64), (32, 32)))
        archs = CDNA4 if newer else CDNA3 if a == "xf32" else BOTH
        if arch not in archs:
            _refuse(at, f"{at.mnemonic} does not exist on {arch}")


def matrix_instructions() -> dict[str, frozenset[str]]:
    """Every matrix instruction that is modelled, and where it exists."""
    shapes = {
        "f32": "32x32x1_2b 16x16x1_4b 4x4x1_16b 32x32x2 16x16x4",
        "f16": "32x32x4_2b 16x16x4_4b 4x4x4_16b 32x32x8 16x16x16 32x32x16 16x16x32",
        "bf16": "32x32x4_2b 16x16x4_4b 4x4x4_16b 32x32x8 16x16x16 32x32x16 16x16x32",
        "xf32": "16x16x8 32x32x4",
        "f8f6f4": "16x16x128 32x32x64",
    }
    found: dict[str, frozenset[str]] = {}
    for kind, names in shapes.items():
        for shape in names.split():
            newer = kind == "f8f6f4" or (kind in ("f16", "bf16") and shape in ("32x32x16", "16x16x32"))
            found[f"v_mfma_f32_{shape}_{kind}"] = CDNA4 if newer else CDNA3 if kind == "xf32" else BOTH
            if kind == "f8f6f4":
                found[f"v_mfma_scale_f32_{shape}_{kind}"] = CDNA4
    for shape in ("16x16x32", "32x32x16"):
        for a in ("fp8", "bf8"):
            for b in ("fp8", "bf8"):
                found[f"v_mfma_f32_{shape}_{a}_{b}"] = BOTH
    for shape in ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x16", "16x16x32"):
        found[f"v_mfma_i32_{shape}_i8"] = BOTH
    for shape in ("32x32x32", "16x16x64"):
        found[f"v_mfma_i32_{shape}_i8"] = CDNA4
    found |= {"v_mfma_f64_16x16x4_f64": BOTH, "v_mfma_f64_4x4x4_4b_f64": BOTH}
    return found


def _data_words(row: Array) -> int:
    return max(1, int(row[SIZE]) // 4)


def _stored(row: Array) -> Place:
    """What a store or an atomic takes from registers: of a compare and swap, both values."""
    return _data(_data_words(row) * (2 if row[FLAGS] & ATOMIC and row[OP] == ATOMICS["cmpswap"] else 1))


def _list(value: Any) -> tuple[int, ...]:
    """A modifier's bits. Raises `ValueError` for what is no list of at most four of them."""
    if not isinstance(value, tuple) or len(value) > 4 or not set(value) <= {0, 1}:
        raise ValueError
    return value


def _bits(values: tuple[int, ...]) -> int:
    return sum(bit << place for place, bit in enumerate(values))


def _words(letter: str, meaning: Vector) -> int:
    return 2 if letter in "qld" or meaning.packed == 32 else 1


def _result_words(meaning: Vector) -> int:
    if meaning.packed:
        return 2 if meaning.packed == 32 else 1
    return sum(2 if letter in "qld" else 1 for letter, _ in meaning.results)


def _constant(operand: Operand, letter: str, packed: int) -> int:
    """A constant's 64 bits as the instruction sees it."""
    value = operand.value
    if operand.is_float:
        number = struct.unpack("<f", struct.pack("<I", value))[0]
        if letter in "dql":
            bits = (
                0x3FC45F306DC9C882
                if operand.text.startswith("0.15915494")
                else struct.unpack("<Q", struct.pack("<d", number))[0]
            )
        elif letter in "hws":
            bits = (
                0x3118 if operand.text.startswith("0.15915494") else struct.unpack("<H", struct.pack("<e", number))[0]
            )
        else:
            bits = value
        return int(bits) | (int(bits) << 32 if packed == 32 else 0)
    if packed == 32:
        return (value & 0xFFFFFFFF) | (value & 0xFFFFFFFF) << 32
    if letter == "d":
        return value if -16 <= value <= 64 else (value & 0xFFFFFFFF) << 32
    if letter == "l" and value > 0x7FFFFFFF:
        return value - (1 << 32) if value < (1 << 32) else value
    return value


def encode(program: Program) -> Encoded:
    """The program's rows. Raises `UnsupportedInstruction` for the first thing that is not modelled."""
    return _Encoder(program).encode()
