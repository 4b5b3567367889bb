"""What can be said of an instruction on every path: is its result read, is a wait or a barrier needed?

Works on encoded rows. Each answer is sound one way only: what is told holds for every input, what is not told may hold all
the same. Nothing here asks the executor, so that it can be a witness about what the executor does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from impl.executions.isa import encoding as row
from impl.executions.isa.assembly import EXEC, M0, VCC
from impl.executions.isa.encoding import Encoded, Kind

SCC = row.SCALAR_BASE + row.SCC_INDEX
_EXECS = (row.SCALAR_BASE + EXEC, row.SCALAR_BASE + EXEC + 1)
_FAR = 64

Registers = frozenset[int]


@dataclass(frozen=True)
class Effect:
    """What an instruction does with registers: numbers as sources are encoded, vector registers first, then scalar ones.

    kills: the written ones of which nothing old stays in the lanes that execute. whole: they are written whatever lanes
    execute. outside: it does something besides, to memory, to the order of waves or to where the wave goes on.
    """

    reads: Registers
    writes: Registers
    kills: Registers
    whole: bool = False
    outside: bool = False


def _span(first: int, count: int) -> range:
    return range(first, first + count)


def _sources(r: Any) -> set[int]:
    """The registers of a vector or scalar instruction's sources."""
    found: set[int] = set()
    for place in range(int(r[row.SOURCES])):
        code = int(r[row.SRC0 + place])
        if 0 <= code < row.LITERAL_BASE:
            found.update(_span(code, 1 if code == SCC else int(r[row.WORDS0 + place])))
    return found


def _scalar(first: int, count: int) -> set[int]:
    return set(_span(row.SCALAR_BASE + first, count)) if first >= 0 else set()


def _register(code: int, count: int = 1) -> set[int]:
    return set(_span(code, count)) if 0 <= code < row.LITERAL_BASE else set()


def effects(encoded: Encoded) -> list[Effect]:
    """The effect of each instruction."""
    return [_effect(r, encoded) for r in encoded.rows.tolist()]


def _effect(r: Any, encoded: Encoded) -> Effect:
    kind = Kind(int(r[row.KIND]))
    if kind in (Kind.VECTOR, Kind.COMPARE):
        return _vector(r, kind)
    if kind in (Kind.SCALAR, Kind.SAVE_EXEC):
        return _of_scalars(r, kind)
    if kind in (Kind.BUFFER, Kind.GLOBAL, Kind.SCRATCH, Kind.LDS):
        return _memory(r, kind)
    if kind == Kind.MATRIX:
        return _matrix(r, encoded.matrices[int(r[row.MATRIX_ROW])])
    if kind == Kind.SCALAR_LOAD:
        reads = _scalar(int(r[row.SRC0]), 4 if r[row.FLAGS] & 1 else 2) | _scalar(int(r[row.SRC1]), 1)
        written = frozenset(_scalar(int(r[row.DST]), int(r[row.SIZE])))
        return Effect(frozenset(reads), written, written, whole=True)
    if kind == Kind.LDS_PERMUTE:
        reads = _register(int(r[row.SRC0])) | (_register(int(r[row.SRC1])) if r[row.OP] < 2 else set())
        written = frozenset(_register(int(r[row.DST])))
        return Effect(frozenset({*reads, *_EXECS}), written, written)
    if kind in (Kind.READ_LANE, Kind.READ_FIRST_LANE):
        reads = _register(int(r[row.SRC0])) | (_register(int(r[row.SRC1])) if kind == Kind.READ_LANE else set(_EXECS))
        written = frozenset(_scalar(int(r[row.DST]), 1))
        return Effect(frozenset(reads), written, written, whole=True)
    if kind == Kind.WRITE_LANE:
        reads = _register(int(r[row.SRC0])) | _register(int(r[row.SRC1]))
        return Effect(frozenset(reads), frozenset(_register(int(r[row.DST]))), frozenset())
    if kind in (Kind.SWAP, Kind.SWAP_ROWS):
        both = frozenset(_register(int(r[row.DST])) | _register(int(r[row.SRC0])))
        return Effect(both | frozenset(_EXECS), both, frozenset())
    if kind == Kind.BRANCH:
        return Effect(frozenset(_condition(int(r[row.OP]))), frozenset(), frozenset(), outside=True)
    return Effect(frozenset(), frozenset(), frozenset(), outside=kind != Kind.NOTHING)


def _condition(op: int) -> set[int]:
    if op in (1, 2):
        return {SCC}
    return _scalar(VCC, 2) if op in (3, 4) else set(_EXECS) if op >= 5 else set()


def _vector(r: Any, kind: Kind) -> Effect:
    reads = _sources(r)
    reads.update(_EXECS, _scalar(int(r[row.MASK]), 2))
    destination = _register(int(r[row.DST]), int(r[row.DST_WORDS])) if kind == Kind.VECTOR else set()
    carry = _scalar(int(r[row.CARRY]), 2)
    partial = bool(r[row.SELECT_DST] & row.KEEP_REST) or bool(r[row.DPP])
    if partial:
        reads |= destination
    executes = set(_EXECS) if kind == Kind.COMPARE and r[row.FLAGS] else set()
    writes = frozenset(destination | carry | executes if carry or executes else destination)
    return Effect(frozenset(reads), writes, frozenset(carry) if partial else writes)


def _of_scalars(r: Any, kind: Kind) -> Effect:
    reads, writes = _sources(r), _scalar(int(r[row.DST]), int(r[row.DST_WORDS]))
    if r[row.FLAGS] & 1:
        reads |= _scalar(int(r[row.DST]), max(1, int(r[row.DST_WORDS])))
    if r[row.FLAGS] & 2:
        reads.add(SCC)
    if r[row.FLAGS] & 4:
        writes.add(SCC)
    if kind == Kind.SAVE_EXEC:
        reads |= set(_EXECS)
        writes |= {SCC, *_EXECS}
    return Effect(frozenset(reads), frozenset(writes), frozenset(writes), whole=True)


def _memory(r: Any, kind: Kind) -> Effect:
    flags, words = int(r[row.FLAGS]), max(1, int(r[row.SIZE]) // 4)
    store, atomic, to_lds = flags & row.STORE, flags & row.ATOMIC, flags & row.TO_LDS
    reads = set(_EXECS)
    if kind == Kind.BUFFER:
        reads |= _register(int(r[row.SRC0])) if flags & row.OFFEN else set()
        reads |= _scalar(int(r[row.SRC1]), 4) | _register(int(r[row.SRC2]))
    elif kind == Kind.LDS:
        reads |= _register(int(r[row.SRC0]))
    else:
        base = _scalar(int(r[row.SRC1]), 1 if kind == Kind.SCRATCH else 2)
        reads |= base | _register(int(r[row.SRC0]), 1 if base or kind == Kind.SCRATCH else 2)
    if to_lds:
        return Effect(frozenset({*reads, row.SCALAR_BASE + M0}), frozenset(), frozenset(), outside=True)
    if store or atomic:
        compare = 2 if atomic and r[row.OP] == 1 else 1
        reads |= _register(int(r[row.DST]), words * compare)
        if kind == Kind.LDS and flags & row.TWO:
            reads |= _register(int(r[row.SRC1]), words)
        into = int(r[row.DST] if kind == Kind.BUFFER else r[row.SRC3])
        written = frozenset(_register(into, words) if atomic and flags & row.RETURNS else ())
        return Effect(frozenset(reads), written, written, outside=True)
    parts = 2 if kind == Kind.LDS and flags & row.TWO else 1
    written = frozenset(_register(int(r[row.DST]), words * parts))
    half = flags & (row.HIGH_HALF | row.LOW_HALF)
    return Effect(frozenset(reads | written if half else reads), written, frozenset() if half else written)


def _matrix(r: Any, m: Any) -> Effect:
    reads = _register(int(r[row.SRC0]), int(m[row.WORDS_A])) | _register(int(r[row.SRC1]), int(m[row.WORDS_B]))
    addend = int(r[row.SRC2])
    reads |= _register(addend, int(m[row.WORDS_D]) if addend < row.SCALAR_BASE else 2)
    if m[row.SCALED]:
        reads |= _register(int(r[row.SRC3])) | _register(int(r[row.TARGET]))
    written = frozenset(_register(int(r[row.DST]), int(m[row.WORDS_D])))
    return Effect(frozenset(reads), written, written, whole=True)


def successors(encoded: Encoded, at: int) -> tuple[int, ...]:
    """Where a wave may go on behind an instruction."""
    r = encoded.rows[at]
    kind = int(r[row.KIND])
    if kind in (Kind.END, Kind.TRAP):
        return ()
    if kind == Kind.BRANCH:
        target = int(r[row.TARGET])
        return (target,) if r[row.OP] == 0 else (target, at + 1)
    return (at + 1,)


def unread(encoded: Encoded, at: int) -> bool:
    """Whether on every path what the instruction writes is overwritten before it is read, and it does nothing else.

    A write of the lanes that execute covers an earlier one while EXEC is as it was.
    """
    known = effects(encoded)
    if known[at].outside or not known[at].writes or known[at].writes & set(_EXECS):
        return False
    # (instruction, register, whether EXEC was written since)
    waiting = [(after, register, False) for after in successors(encoded, at) for register in known[at].writes]
    seen = set(waiting)
    while waiting:
        here, register, moved = waiting.pop()
        if here >= len(known) or register in known[here].reads:
            return False
        effect = known[here]
        if register in effect.kills and (effect.whole or not moved or register >= row.SCALAR_BASE):
            continue
        moved = moved or bool(effect.writes & set(_EXECS))
        for after in successors(encoded, here):
            if (after, register, moved) not in seen:
                seen.add((after, register, moved))
                waiting.append((after, register, moved))
    return True


Outstanding = dict[tuple[str, int], int]
"""What was not waited for: (counter, register) to how many of the counter's operations were issued since, the fewest.

Registers of scalar loads stand under `smem`, which come back in any order; -1 is LDS that a load or a write still fills,
-2 memory that a store still fills.
"""
_LDS, _STORED = -1, -2


def waits_suffice(before: Encoded, after: Encoded) -> bool:
    """Whether, on every path, a program with a weaker wait still waits for a load's result before a register of it is touched.

    And for what fills LDS before the next barrier and, where a load fills it, before it is read; and for stores at every
    barrier and atomic at which the program `before` did.
    """
    first, second = _unwaited_stores(before), _unwaited_stores(after)
    return first is not None and second is not None and second <= first


def _unwaited_stores(encoded: Encoded) -> frozenset[int] | None:
    """The barriers and atomics at which a store may be outstanding; None where a load's result is touched too early."""
    known = effects(encoded)
    found: set[int] = set()
    before: dict[int, Outstanding] = {0: {}}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        if at >= len(known):
            return None
        r = encoded.rows[at]
        if _publishes(r) and ("vm", _STORED) in before[at]:
            found.add(at)
        after = _issued(r, known[at], before[at])
        if after is None:
            return None
        for target in successors(encoded, at):
            joined = _joined(before.get(target), after)
            if joined != before.get(target):
                before[target] = joined
                waiting.append(target)
    return frozenset(found)


def _publishes(r: Any) -> bool:
    return r[row.KIND] == Kind.BARRIER or bool(r[row.KIND] in (Kind.BUFFER, Kind.GLOBAL) and r[row.FLAGS] & row.ATOMIC)


def _joined(first: Outstanding | None, second: Outstanding) -> Outstanding:
    if first is None:
        return second
    return {key: min(first.get(key, _FAR), second.get(key, _FAR)) for key in first.keys() | second.keys()}


def _issued(r: Any, effect: Effect, before: Outstanding) -> Outstanding | None:
    """What is outstanding behind an instruction, or None where it touches what it may not."""
    kind, flags = Kind(int(r[row.KIND])), int(r[row.FLAGS])
    if kind == Kind.WAIT:
        return _waited(int(r[row.OP]), int(r[row.IMMEDIATE]), before)
    if kind == Kind.BARRIER:
        return None if any(register == _LDS for _, register in before) else before
    counter = _counter(kind)
    touched = {(name, register) for name, register in before if register in effect.reads | effect.writes}
    if counter and not flags & row.STORE:
        # Loads of one kind come back in the order in which they were issued.
        touched -= {(counter, register) for register in effect.writes - effect.reads}
    reads_lds = kind == Kind.LDS and not flags & row.STORE and ("vm", _LDS) in before
    if touched or reads_lds or (flags & row.FLAT and kind == Kind.GLOBAL):
        return None
    if not counter:
        return before
    after = {
        (name, register): min(since + (name == counter or (name == "smem" and counter == "lgkm")), _FAR)
        for (name, register), since in before.items()
    }
    after |= {(counter, register): 0 for register in effect.writes}
    if kind in (Kind.BUFFER, Kind.GLOBAL) and flags & row.TO_LDS:
        after["vm", _LDS] = 0
    elif kind == Kind.LDS and flags & (row.STORE | row.ATOMIC):
        after["lgkm", _LDS] = 0
    elif kind in (Kind.BUFFER, Kind.GLOBAL) and flags & (row.STORE | row.ATOMIC):
        after["vm", _STORED] = 0
    return after


def _counter(kind: Kind) -> str:
    if kind in (Kind.BUFFER, Kind.GLOBAL, Kind.SCRATCH):
        return "vm"
    if kind in (Kind.LDS, Kind.LDS_PERMUTE):
        return "lgkm"
    return "smem" if kind == Kind.SCALAR_LOAD else ""


def _waited(vm: int, lgkm: int, before: Outstanding) -> Outstanding:
    """What a wait leaves outstanding. While a scalar load is, only a wait for nothing says anything of its counter."""
    limits = {"vm": vm, "lgkm": lgkm, "smem": 0 if lgkm == 0 else _FAR + 1}
    if lgkm and any(name == "smem" for name, _ in before):
        limits["lgkm"] = _FAR + 1
    return {key: since for key, since in before.items() if since < limits[key[0]]}


def orders_nothing(encoded: Encoded, barrier: int) -> bool:
    """Whether between a barrier and the next one (or the end), on every path, or the last one before it, no memory is touched."""
    rows = encoded.rows
    touches = [int(r[row.KIND]) in (Kind.BUFFER, Kind.GLOBAL, Kind.LDS) for r in rows]
    behind = {at: successors(encoded, at) for at in range(len(rows))}
    ahead: dict[int, list[int]] = {}
    for at, targets in behind.items():
        for target in targets:
            ahead.setdefault(target, []).append(at)
    return any(
        not _reached(barrier, lambda at, edges=edges: edges.get(at, ()), touches, rows) for edges in (behind, ahead)
    )


def _reached(start: int, edges: Any, touches: list[bool], rows: Any) -> bool:
    """Whether an instruction that touches memory is met before the next barrier."""
    waiting, seen = list(edges(start)), set()
    while waiting:
        at = waiting.pop()
        if at in seen or at >= len(rows):
            continue
        seen.add(at)
        if touches[at]:
            return True
        if int(rows[at][row.KIND]) != Kind.BARRIER:
            waiting += edges(at)
    return False
