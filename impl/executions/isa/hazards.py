"""Does an instruction come too soon behind one for whose result hardware does not wait?

Compilers keep a number of wait states between the two: one for each instruction, N + 1 for ``s_nop N``. How many, is stated by
AMD's "AMD Instinct MI300 Instruction Set Architecture Reference Guide" (tables 11, 12 and 37) and by LLVM's
``GCNHazardRecognizer.cpp``, which alone speaks of gfx950's longer matrix instructions; where they differ, the larger number
stands. Every path of a program is looked at, none is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from impl.executions.isa import encoding as row
from impl.executions.isa import flow
from impl.executions.isa.assembly import EXEC, M0, VCC, Instruction, Program
from impl.executions.isa.encoding import Encoded, Kind
from impl.executions.isa.meaning import CDNA4, VECTOR

VMEM_READS_SCALAR = 5
DPP_UNDER_EXEC = 5
LANE_SELECT = 4
LANE_UNDER_EXEC = 4
MATRIX_UNDER_EXEC = 4
SWAP_UNDER_EXEC = 4
DIVISION_READS_VCC = 4
DOT = 3
VALU_READS_SCALAR = 2
DPP_READS = 2
MATRIX_READS = 2
SWAP_READS = 2
STORED_OVERWRITTEN = 2
MODE_SET = 2
DOUBLE_BEHIND_MATRIX = 2
READ_LANE_READS = 1
TRANSCENDENTAL = 1
MOVED_WITHIN = 1
LDS_LOAD_READS_M0 = 1

_LONGEST = 20

TRANSCENDENTALS = frozenset(
    f"v_{name}" for name in (
        "exp_f32", "log_f32", "rcp_f32", "rcp_iflag_f32", "rsq_f32", "sqrt_f32", "sin_f32", "cos_f32", "rcp_f64", "rsq_f64",
        "sqrt_f64", "rcp_f16", "sqrt_f16", "rsq_f16", "log_f16", "exp_f16", "sin_f16", "cos_f16",
    )
)  # fmt: skip
_VALU = frozenset(
    (Kind.VECTOR, Kind.COMPARE, Kind.READ_LANE, Kind.READ_FIRST_LANE, Kind.WRITE_LANE, Kind.SWAP, Kind.SWAP_ROWS)
)
_SALU = frozenset((Kind.SCALAR, Kind.SAVE_EXEC))
_VMEM = frozenset((Kind.BUFFER, Kind.GLOBAL, Kind.SCRATCH))
_MEMORY = _VMEM | {Kind.LDS, Kind.LDS_PERMUTE}
_LANES = frozenset((Kind.READ_LANE, Kind.READ_FIRST_LANE, Kind.WRITE_LANE))
_EXEC_LOW, _EXEC_HIGH = row.SCALAR_BASE + EXEC, row.SCALAR_BASE + EXEC + 1
_EXECS = frozenset((_EXEC_LOW, _EXEC_HIGH))
_VCCS = frozenset((row.SCALAR_BASE + VCC, row.SCALAR_BASE + VCC + 1))
_M0 = row.SCALAR_BASE + M0
# Behind the registers: those that a matrix instruction reads as its addend, those that a store reads, and two events.
_ADDENDS, _STORED = 4096, 8192
_DOUBLES, _MODE = -1, -2


@dataclass(frozen=True)
class Missing:
    """Too few wait states: the numbers of both instructions, the register as sources are encoded (-1: none), and how many.

    `states` lie between them on some path, `needed` should.
    """

    at: int
    behind: int
    register: int
    states: int
    needed: int


State = dict[int, tuple[tuple[int, int], ...]]
"""What was done to a register (or an event) last: when, and by which instruction; more than one where paths meet."""


def first_missing(program: Program, encoded: Encoded) -> Missing | None:
    """The first instruction that comes too soon, if there is one."""
    return min(missing(program, encoded), key=lambda found: (found.at, found.behind, found.register), default=None)


def missing(program: Program, encoded: Encoded) -> set[Missing]:
    """Every instruction that comes too soon on some path, for each register and each instruction that it should wait for."""
    return _Walk(program, encoded).found()


def passes(m: Any, arch: str) -> int:
    """Passes of four cycles of a matrix instruction, of its row in the table of matrices."""
    rows, blocks, kinds = int(m[row.M]), int(m[row.BLOCKS]), {int(m[row.TYPE_A]), int(m[row.TYPE_B])}
    if row.MATRIX_TYPES["f64"] in kinds:
        return 4 if rows == 4 else 16 if arch in CDNA4 else 8
    if rows == 4:
        return 2
    short = 4 if rows == 16 else 8
    doubled = blocks > 1 or row.MATRIX_TYPES["f32"] in kinds
    if m[row.SPLIT]:
        doubled = bool(kinds & {row.MATRIX_TYPES["fp8"], row.MATRIX_TYPES["bf8"]})
    return 2 * short if doubled else short


@dataclass(frozen=True)
class _Matrix:
    """A matrix instruction: its passes, registers of its result and of its addend, and which of three sorts it is."""

    passes: int
    result: tuple[int, int]
    addend: tuple[int, int]
    is_double: bool
    is_single: bool

    @property
    def is_short(self) -> bool:
        """Operands narrower than 32 bits, or xf32."""
        return not self.is_double and not self.is_single


class _Walk:
    def __init__(self, program: Program, encoded: Encoded) -> None:
        self.newer = program.arch in CDNA4
        self.instructions = program.instructions
        self.encoded = encoded
        self.rows = encoded.rows.tolist()
        self.effects = flow.effects(encoded)
        self.kinds = [r[row.KIND] for r in self.rows]
        self.matrices = {
            at: self._matrix(r, program.arch) for at, r in enumerate(self.rows) if r[row.KIND] == Kind.MATRIX
        }
        self.states = [_states(at) for at in self.instructions]
        # What is asked of every pair of neighbours, asked of each instruction once.
        self.dots = [at.mnemonic.startswith("v_dot") for at in self.instructions]
        self.moves = [_moves_within(at) for at in self.instructions]
        self.slow = [at.mnemonic in TRANSCENDENTALS for at in self.instructions]
        self.reads = [self._before_vector_read(at) for at in range(len(self.rows))]
        self.reach = [self._reach(at) for at in range(len(self.rows))]
        stores = any(self._stored(at)[1] for at, kind in enumerate(self.kinds) if kind in _VMEM)
        self.places = [0, *([_ADDENDS] if self.matrices else ()), *([_STORED] if stores else ())]
        self.missing: set[Missing] = set()

    def _matrix(self, r: Any, arch: str) -> _Matrix:
        m = self.encoded.matrices[r[row.MATRIX_ROW]]
        kinds = {int(m[row.TYPE_A]), int(m[row.TYPE_B])}
        words = int(m[row.WORDS_D])
        return _Matrix(
            passes(m, arch), (r[row.DST], words), (r[row.SRC2], words),
            row.MATRIX_TYPES["f64"] in kinds, row.MATRIX_TYPES["f32"] in kinds,
        )  # fmt: skip

    def _reach(self, at: int) -> int:
        """How long what an instruction does can be too near."""
        kind = self.kinds[at]
        if kind == Kind.MATRIX:
            return _LONGEST
        if kind in _VALU:
            if any(register >= row.SCALAR_BASE for register in self.effects[at].writes):
                return VMEM_READS_SCALAR
            return DOT if self.dots[at] else MATRIX_READS
        if kind in _SALU:
            return LDS_LOAD_READS_M0 if _M0 in self.effects[at].writes else 0
        return STORED_OVERWRITTEN if kind in _VMEM or kind == Kind.SET_MODE else 0

    def found(self) -> set[Missing]:
        """Walks every block, and again the head of each whose entry comes to hold more than it did."""
        starts = self._starts()
        ends = dict(zip(starts, [*starts[1:], len(self.rows)], strict=True))
        entries: dict[int, State] = {0: {}}
        exits: dict[int, State] = {}
        waiting = [0]
        while waiting:
            start = waiting.pop()
            left = self._block(start, ends[start], entries[start], start in exits)
            if left is not None:
                exits[start] = left
            for target in flow.successors(self.encoded, ends[start] - 1):
                if target >= len(self.rows):
                    continue
                joined = _joined(entries.get(target), exits[start])
                if joined != entries.get(target):
                    entries[target] = joined
                    waiting.append(target)
        return self.missing

    def _starts(self) -> list[int]:
        starts = {0}
        for at, r in enumerate(self.rows):
            if r[row.KIND] == Kind.BRANCH:
                starts |= {at + 1, r[row.TARGET]}
            elif r[row.KIND] in (Kind.END, Kind.TRAP):
                starts.add(at + 1)
        return sorted(start for start in starts if start < len(self.rows))

    def _block(self, start: int, end: int, entry: State, again: bool) -> State | None:
        """What a block leaves behind; nothing where it was walked before and its head alone was to be looked at again."""
        state, now = dict(entry), 0
        for at in range(start, end):
            if again and now > _LONGEST:
                return None
            self._check(at, state, now)
            now += self.states[at]
            self._note(at, state, now)
        return {
            key: kept
            for key, events in state.items()
            if (kept := tuple((since - now, by) for since, by in events if now - since < self.reach[by]))
        }

    def _check(self, at: int, state: State, now: int) -> None:
        effect, kind = self.effects[at], self.kinds[at]
        for register in effect.reads:
            for since, by in state.get(register, ()):
                if now - since < self.reach[by]:
                    self._compare(at, by, register, now - since, self._before_read(by, at, register))
        if kind == Kind.MATRIX or kind in _LANES:
            for since, by in state.get(_EXEC_LOW, ()):
                needed = MATRIX_UNDER_EXEC if kind == Kind.MATRIX else LANE_UNDER_EXEC
                self._compare(at, by, _EXEC_LOW, now - since, needed)
        if kind in _MEMORY or kind in _VALU or kind == Kind.MATRIX:
            for register in effect.writes:
                for place in self.places:
                    for since, by in state.get(register + place, ()):
                        if now - since < self.reach[by]:
                            self._compare(at, by, register, now - since, self._before_write(by, at, place))
        if kind == Kind.SET_MODE:
            for since, by in state.get(_MODE, ()):
                self._compare(at, by, -1, now - since, MODE_SET)
        if _DOUBLES in state and self.instructions[at].mnemonic in ("v_fma_f64", "v_fmac_f64"):
            for since, by in state[_DOUBLES]:
                self._compare(at, by, -1, now - since, DOUBLE_BEHIND_MATRIX)

    def _compare(self, at: int, by: int, register: int, states: int, needed: int) -> None:
        if states < needed:
            self.missing.add(Missing(at, by, register, states, needed))

    def _note(self, at: int, state: State, now: int) -> None:
        """Puts into the state what an instruction does; `now` is the time behind it."""
        effect, event = self.effects[at], ((now, at),)
        if self.reach[at] and self.kinds[at] not in _VMEM:
            state.update(dict.fromkeys(effect.writes, event))
        else:
            for register in effect.writes:
                state.pop(register, None)
        if self.kinds[at] == Kind.MATRIX:
            matrix = self.matrices[at]
            if matrix.is_double:
                state[_DOUBLES] = event
            if matrix.is_short and matrix.addend[0] < row.SCALAR_BASE:
                state.update(dict.fromkeys(range(matrix.addend[0] + _ADDENDS, sum(matrix.addend) + _ADDENDS), event))
        elif self.kinds[at] in _VMEM:
            first, words = self._stored(at)
            state.update(dict.fromkeys(range(first + _STORED, first + words + _STORED), event))
        elif self.kinds[at] == Kind.SET_MODE:
            state[_MODE] = event

    def _stored(self, at: int) -> tuple[int, int]:
        """The registers of which hardware still reads more than two behind a store or an atomic."""
        r = self.rows[at]
        flags = r[row.FLAGS]
        words = r[row.SIZE] // 4 * (2 if flags & row.ATOMIC and r[row.OP] == row.ATOMICS["cmpswap"] else 1)
        by_register = r[row.KIND] == Kind.BUFFER and row.SCALAR_BASE <= r[row.SRC2] < row.LITERAL_BASE
        if flags & row.TO_LDS or not flags & (row.STORE | row.ATOMIC) or words <= 2 or by_register:
            return 0, 0
        return r[row.DST], words

    # how many states are needed

    def _before_read(self, by: int, at: int, register: int) -> int:
        if self.kinds[by] in _SALU:
            return LDS_LOAD_READS_M0 if register == _M0 and self.rows[at][row.FLAGS] & row.TO_LDS else 0
        if register >= row.SCALAR_BASE:
            return self._before_scalar_read(at, register)
        if self.kinds[by] == Kind.MATRIX:
            return self._behind_matrix(self.matrices[by], at, register)
        needed = self.reads[at]
        if self.dots[by] and not self._accumulates(by, at, register):
            needed = max(needed, DOT)
        if self.kinds[at] in _VALU or self.kinds[at] == Kind.MATRIX:
            if self.slow[by] and not self.slow[at]:
                needed = max(needed, TRANSCENDENTAL)
            if self.moves[by]:
                needed = max(needed, MOVED_WITHIN)
        return needed

    def _before_vector_read(self, at: int) -> int:
        """How far behind any vector instruction's result an instruction may read it."""
        kind = self.kinds[at]
        if kind in _VALU and self.rows[at][row.DPP]:
            return DPP_READS
        if kind in (Kind.READ_LANE, Kind.READ_FIRST_LANE):
            return READ_LANE_READS
        return MATRIX_READS if kind == Kind.MATRIX else SWAP_READS if kind == Kind.SWAP_ROWS else 0

    def _accumulates(self, by: int, at: int, register: int) -> bool:
        """Whether a sum of products reads a register as what is added to alone, behind one of the same name."""
        r = self.rows[at]
        return (
            self.instructions[by].mnemonic == self.instructions[at].mnemonic
            and register not in (r[row.SRC0], r[row.SRC1])
        )  # fmt: skip

    def _before_scalar_read(self, at: int, register: int) -> int:
        """Behind a vector instruction that writes a scalar register."""
        r, kind = self.rows[at], self.kinds[at]
        if register in _EXECS:
            if kind not in _VALU:
                return 0
            if r[row.DPP]:
                return DPP_UNDER_EXEC
            if kind == Kind.SWAP_ROWS:
                return SWAP_UNDER_EXEC
            return VALU_READS_SCALAR if register in r[row.SRC0 : row.SRC3 + 1] else 0
        if kind in _VMEM:
            return VMEM_READS_SCALAR
        if kind in (Kind.READ_LANE, Kind.WRITE_LANE) and r[row.SRC1] == register:
            return LANE_SELECT
        if register in _VCCS and self.instructions[at].mnemonic.startswith("v_div_fmas"):
            return DIVISION_READS_VCC
        return VALU_READS_SCALAR if kind in _VALU or kind == Kind.MATRIX else 0

    def _behind_matrix(self, first: _Matrix, at: int, register: int) -> int:
        """Before the result of a matrix instruction is read."""
        if self.kinds[at] == Kind.MATRIX:
            second = self.matrices[at]
            if self._is_factor(at, register):
                return self._until_written(first)
            return self._until_added_to(first, second)
        if self.kinds[at] in _MEMORY and first.is_double:
            return 9 if first.passes == 4 else 18
        return self._until_written(first) if self.kinds[at] in _MEMORY or self.kinds[at] in _VALU else 0

    def _is_factor(self, at: int, register: int) -> bool:
        """Whether a matrix instruction reads a register otherwise than as what it adds to."""
        r = self.rows[at]
        m = self.encoded.matrices[r[row.MATRIX_ROW]]
        spans = [(r[row.SRC0], m[row.WORDS_A]), (r[row.SRC1], m[row.WORDS_B])]
        if m[row.SCALED]:
            spans += [(r[row.SRC3], 1), (r[row.TARGET], 1)]
        return any(first <= register < first + words for first, words in spans)

    def _until_written(self, first: _Matrix, overwritten: bool = False) -> int:
        if first.is_double:
            short = 6 if first.passes == 4 else 11
            return 19 if first.passes == 16 and not overwritten else short
        if first.is_single:
            return first.passes + 2
        return first.passes + 3 + (self.newer and first.passes != 2)

    def _until_added_to(self, first: _Matrix, second: _Matrix) -> int:
        if first.result == second.addend and first.passes == second.passes:
            if first.is_double:
                return 4 if first.passes == 4 and second.is_double else 0
            return 2 if first.passes == 2 else 0
        if not first.is_short:
            if second.is_short:
                return 0
            return first.passes + (1 if first.is_double and first.passes > 4 else 0)
        return first.passes + 1 + (self.newer and (second.is_short or first.passes != 2))

    def _before_write(self, by: int, at: int, place: int) -> int:
        if place == _STORED:
            return STORED_OVERWRITTEN if self.kinds[at] not in _MEMORY else 0
        if self.kinds[at] == Kind.MATRIX:
            return 0
        if place == _ADDENDS:
            return self.matrices[by].passes - 1
        if self.kinds[by] == Kind.MATRIX:
            return self._until_written(self.matrices[by], overwritten=True)
        if self.dots[by] and self.instructions[by].mnemonic != self.instructions[at].mnemonic:
            return DOT
        return MOVED_WITHIN if self.moves[by] and self.kinds[at] in _VALU else 0


def _joined(first: State | None, second: State) -> State:
    if first is None:
        return second
    both: State = {}
    for key in first.keys() | second.keys():
        latest: dict[int, int] = {}
        for since, by in (*first.get(key, ()), *second.get(key, ())):
            latest[by] = max(since, latest.get(by, since))
        both[key] = tuple(sorted((since, by) for by, since in latest.items()))
    return both


def _states(at: Instruction) -> int:
    return (at.operands[0].value & 15) + 1 if at.mnemonic == "s_nop" else 1


def _moves_within(at: Instruction) -> bool:
    """Whether a vector instruction puts its result elsewhere in the register than it computes it."""
    if at.suffix == "sdwa":
        return at.modifiers.get("dst_sel", "DWORD") != "DWORD" and not at.mnemonic.startswith("v_cmp")
    if at.mnemonic.startswith("v_cvt_scalef32_pk_fp4"):
        return True
    op_sel, meaning = at.modifiers.get("op_sel"), VECTOR.get(at.mnemonic)
    if not isinstance(op_sel, tuple) or meaning is None or meaning.packed or at.mnemonic.startswith("v_fma_mix"):
        return False
    return len(op_sel) > len(meaning.sources) - int(meaning.accumulates) and op_sel[-1] == 1
