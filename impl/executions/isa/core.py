"""The machine itself: waves of one workgroup after another, instruction by instruction, watched as hardware is not.

A compiled loop over the rows of `impl.executions.isa.encoding`. Beside every register lies what is known of it: which of its
lanes were ever written, where only a half of it was, and whether a load into it has been waited for. What would be luck on
hardware ends the run with a fault: an access outside the arguments, an unknown value as an address, as stored data or as a
condition, a result used before its wait, two waves that meet in LDS without a barrier, two workgroups that meet in one byte.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from impl.executions.isa import encoding as row
from impl.executions.isa.arithmetic import (
    MODE_FP16_OVERFLOW,
    Array,
    bits_of_f32,
    bits_of_f64,
    f32,
    f32_of,
    f64,
    f64_of,
    from_bf8,
    from_bf16,
    from_fp4,
    from_fp8,
    from_half,
    i64,
    load_u8,
    load_u32,
    store_u8,
    store_u32,
    to_bf16,
    to_half,
    trailing_zeros64,
    u32,
    u64,
)
from impl.executions.isa.encoding import Kind
from impl.executions.isa.lanes import directory

# Tells numba where compiled code is kept, before the first function asks.
directory()

quick = functools.partial(njit, _nrt=False)
"""Compiles without counting who holds an array, which is two fifths of the time else: for functions that make none."""

# Columns of a wave's own numbers.
(PC, STATUS, SCC, MODE, VM_ISSUED, VM_DONE, LGKM_ISSUED, LGKM_DONE, SMEM_OPEN, COUNT, PUBLISHED_LGKM,
 PUBLISHED_VM) = range(12)  # fmt: skip
WAVE_COLUMNS = 16
RUNNING, AT_BARRIER, ENDED = 0, 1, 2

# What a run ends with.
DONE, FAULT, GROW, LIMIT = 0, 1, 2, 3

# The run's numbers.
(GROUP, EPOCH, FREE_PAGE, STARTED, FAULT_KIND, FAULT_PC, FAULT_WAVE, FAULT_LANE, FAULT_ADDRESS, FAULT_MORE, INSTRUCTIONS,
 INSTRUCTION_LIMIT, GROUPS_X, GROUPS_Y, GROUPS_Z, LAST_REGION, GRAIN, WATCH_WRITERS, LAST_GROUP, STRICT, FREE_READ_PAGE,
 MET, IN_ORDER) = range(23)  # fmt: skip
RUN_COLUMNS = 24

# Kinds of fault.
(OUTSIDE_LOAD, OUTSIDE_STORE, OUTSIDE_ATOMIC, UNKNOWN_ADDRESS, UNKNOWN_STORED, UNKNOWN_CONDITION, MISSING_WAIT, LDS_RACE,
 WRITE_RACE, EXEC_EMPTY, LDS_OUTSIDE, SCRATCH_OUTSIDE, TRAPPED, WRONG_PC, UNKNOWN_READ, READ_OF_STORED,
 STORE_OF_READ) = range(1, 18)  # fmt: skip

# How LDS is touched.
READS, WRITES, ADDS = 0, 1, 2
# How global memory is.
STORED, CHANGED, RETURNING = 0, 1, 2
# In a mask of waves: all of them touched it by atomics alone.
_ATOMICS = 1 << 62
# Of a byte's writer: the workgroup touched it by an atomic.
_BY_ATOMIC = 1 << 30

_ALL = u64(0xFFFFFFFFFFFFFFFF)
# In M0: LDS drops what lands beyond its end, and so Triton turns off the waves that hold copies.
_NOWHERE = u32(0x7FFFFFFF)
_PAGE_BITS = 12
_PAGE = 1 << _PAGE_BITS
# SCC stands among what is known of scalar registers too; of the number that it is, one bit can be unknown.
_SCC_UNKNOWN = u32(0xFFFFFFFE)

_A, _B, _C, _E, _M, _K, _R = range(7)


class Code(NamedTuple):
    """A program: its rows, the constants that they name, the shapes of its matrix instructions."""

    rows: Array
    literals: Array
    matrices: Array


class Waves(NamedTuple):
    """All registers of a workgroup, by wave: `w` numbers of the wave's own, `v` vector registers, `s` scalar ones.

    vk: the lanes of each vector register that were ever written, half: those of its lower and upper half, which say
    something only where the lane is not in vk; sk: the bits of each scalar one. vm, vl, sl: the number of the load into a
    register that is or was in flight, by its counter.
    """

    w: Array
    v: Array
    vk: Array
    half: Array
    vm: Array
    vl: Array
    s: Array
    sk: Array
    sl: Array


class Shared(NamedTuple):
    """LDS: its bytes, which of them were ever written, who wrote them last, and by wave the number of its last read."""

    content: Array
    known: Array
    watch: Array
    reads: Array


class Private(NamedTuple):
    """Scratch of every lane of every wave, and which of its bytes were ever written."""

    content: Array
    known: Array


class Memory(NamedTuple):
    """What may be touched: first and last addresses in order; page by page, which workgroup wrote a byte and read a word."""

    low: Array
    high: Array
    page_base: Array
    page_of: Array
    pages: Array
    read_page_of: Array
    read_pages: Array


class Work(NamedTuple):
    """Room for what an instruction holds in between. places: address, bytes and argument of each lane's access."""

    buffers: Array
    addresses: Array
    numbers: Array
    numbers_at: int
    left: Array
    right: Array
    known_left: Array
    known_right: Array
    addend: Array
    addend_known: Array
    small: Array
    places: Array
    pointers: Array
    lanes: Array
    masks: Array


class Start(NamedTuple):
    """The first registers of every wave, where the workgroup's own numbers go, and MODE."""

    v: Array
    s: Array
    sk: Array
    group_at: Array
    mode: int


@intrinsic
def _pointer(context, address):
    def generate(unused, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())

    return types.CPointer(types.uint32)(types.int64), generate


@intrinsic
def _pointer64(context, address):
    def generate(unused, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.uint64)(types.int64), generate


@quick
def fault(run, kind, pc, wave, lane, address, more):
    run[FAULT_KIND], run[FAULT_PC], run[FAULT_WAVE] = kind, pc, wave
    run[FAULT_LANE], run[FAULT_ADDRESS], run[FAULT_MORE] = lane, address, more
    return FAULT


@quick
def first_lane(mask):
    return trailing_zeros64(mask)


@quick
def scalar64(s, index):
    return u64(s[index]) | u64(s[index + 1]) << u64(32)


@quick
def put_scalar64(s, index, value):
    s[index] = u32(value & u64(0xFFFFFFFF))
    s[index + 1] = u32(value >> u64(32))


@quick
def unready(w, register, marks_vm, marks_lgkm):
    """Whether a load into a vector register has not been waited for."""
    return marks_vm[register] > w[VM_DONE] or marks_lgkm[register] > w[LGKM_DONE]


@quick
def late_vector(w, register, count, marks_vm, marks_lgkm):
    """The first of some vector registers whose load has not been waited for, or -1."""
    for word in range(count):
        if unready(w, register + word, marks_vm, marks_lgkm):
            return register + word
    return i64(-1)


@quick
def late_over(w, marks, done, register, count):
    """The first of some registers over whose load one of another kind may come: those of one kind come back in order."""
    for word in range(count):
        if marks[register + word] > w[done]:
            return register + word
    return i64(-1)


@quick
def late_scalar(sl, w, index, count):
    """The source code of the first of some scalar registers whose load has not been waited for, or -1."""
    for word in range(count):
        if sl[index + word] > w[LGKM_DONE]:
            return row.SCALAR_BASE + index + word
    return i64(-1)


@quick
def late_operand(code, words, sl, w):
    """As `late_scalar`, of a scalar source, which may be a constant."""
    return i64(-1) if code >= row.LITERAL_BASE else late_scalar(sl, w, code - row.SCALAR_BASE, words)


@quick
def unknown_scalar(sk, index, count):
    """The source code of the first of some scalar registers that was not written whole, or -1."""
    for word in range(count):
        if sk[index + word] != u32(0xFFFFFFFF):
            return row.SCALAR_BASE + index + word
    return i64(-1)


@quick
def learn(vk, half, register, execute, known):
    """A register's lanes that execute are written, with what is known or what is not."""
    vk[register] = (vk[register] & ~execute) | (known & execute)
    unknown = execute & ~known
    if unknown:
        half[0, register] &= ~unknown
        half[1, register] &= ~unknown


@quick
def learn_half(vk, half, register, part, execute, known):
    """One half of a register's lanes that execute is written; the other one stays as it was."""
    other = vk[register] | half[1 - part, register]
    half[1 - part, register] = other
    half[part, register] = ((vk[register] | half[part, register]) & ~execute) | (known & execute)
    vk[register] = (vk[register] & ~execute) | (known & execute & other)


@quick
def known_half(vk, half, register, part):
    """The lanes of which this half was written."""
    return vk[register] | half[part, register]


@quick
def scalar_of(code, words, s, w, literals):
    """A scalar source's bits."""
    if code >= row.LITERAL_BASE:
        value = literals[code - row.LITERAL_BASE]
        return value if words == 2 else value & u64(0xFFFFFFFF)
    index = code - row.SCALAR_BASE
    if index == row.SCC_INDEX:
        return u64(w[SCC])
    return scalar64(s, index) if words == 2 else u64(s[index])


@quick
def scalar_known(code, words, sk):
    """Which bits of a scalar source were ever written."""
    if code >= row.LITERAL_BASE:
        return _ALL
    index = code - row.SCALAR_BASE
    return scalar64(sk, index) if words == 2 else u64(sk[index]) | u64(0xFFFFFFFF00000000)


@quick
def scc_is_known(sk):
    return sk[row.SCC_INDEX] == u32(0xFFFFFFFF)


@quick
def lane_of(kind, value, lane):
    """Where a lane reads under a lane pattern, or -1 for nowhere."""
    place = lane & 15
    if kind == 1:
        return (lane & ~3) | ((value >> (2 * (lane & 3))) & 3)
    if kind == 2:
        return lane + value if place + value < 16 else -1
    if kind == 3:
        return lane - value if place >= value else -1
    if kind == 4:
        return (lane & ~15) | ((place - value) & 15)
    if kind == 5:
        return (lane & ~15) | (15 - place)
    if kind == 6:
        return (lane & ~7) | (7 - (lane & 7))
    if kind == 7:
        if value == 15:
            return (lane & 48) - 1 if lane > 15 else -1
        return 31 if lane > 31 else -1
    return (lane & ~15) | value


@quick
def selected(bits, select):
    """The byte or half of a register that a source selector names."""
    which = select & 15
    if which == 0:
        return bits
    if which <= 4:
        found, width = (bits >> (8 * (which - 1))) & 255, 8
    else:
        found, width = (bits >> (16 * (which - 5))) & 0xFFFF, 16
    if select & row.SIGNED_SELECT:
        found = ((found << (64 - width)) >> (64 - width)) & 0xFFFFFFFF
    return found


@quick
def gather(r, place, v, s, w, literals, buffer, execute):
    """A vector instruction's source with everything that modifies it, into a buffer. Gives the lanes that count, for DPP."""
    code, words = r[row.SRC0 + place], r[row.WORDS0 + place]
    valid = _ALL
    negate, absolute = (r[row.NEGATE] >> place) & 1, (r[row.ABSOLUTE] >> place) & 1
    packed = r[row.FLAGS]
    if r[row.LANES] == 128:
        for plane in range(2):
            chosen = ((r[row.OP_SEL] if plane == 0 else r[row.OP_SEL_HI]) >> place) & 1
            flip = negate if plane == 0 else absolute
            at = plane * 64
            if packed == 32:
                sign = u32(0x80000000) if flip else u32(0)
                if code < row.SCALAR_BASE:
                    for lane in range(64):
                        buffer[at + lane] = v[code + chosen, lane] ^ sign
                else:
                    both = scalar_of(code, 2, s, w, literals)
                    one = u32((both >> u64(32 * chosen)) & u64(0xFFFFFFFF)) ^ sign
                    for lane in range(64):
                        buffer[at + lane] = one
            else:
                sign = u32(0x8000) if flip else u32(0)
                shift = u32(16 * chosen)
                if code < row.SCALAR_BASE:
                    for lane in range(64):
                        buffer[at + lane] = ((v[code, lane] >> shift) & u32(0xFFFF)) ^ sign
                else:
                    one = ((u32(scalar_of(code, 1, s, w, literals)) >> shift) & u32(0xFFFF)) ^ sign
                    for lane in range(64):
                        buffer[at + lane] = one
        return valid
    if code < row.SCALAR_BASE:
        for word in range(words):
            for lane in range(64):
                buffer[word * 64 + lane] = v[code + word, lane]
    else:
        value = scalar_of(code, words, s, w, literals)
        low, high = u32(value & u64(0xFFFFFFFF)), u32(value >> u64(32))
        for lane in range(64):
            buffer[lane] = low
            buffer[64 + lane] = high
    if place == 0 and r[row.DPP]:
        valid = across(r, buffer, words, execute)
    select = r[row.SELECT0 + place] if place < 3 else 0
    if select:
        for lane in range(64):
            buffer[lane] = u32(selected(i64(buffer[lane]), select))
    if negate or absolute:
        sign_at = (r[row.SIGNS] >> (2 * place)) & 3
        base = 64 if sign_at == 2 else 0
        bit = u32(0x8000) if sign_at == 1 else u32(0x80000000)
        for lane in range(64):
            value32 = buffer[base + lane]
            if absolute:
                value32 &= ~bit
            if negate:
                value32 ^= bit
            buffer[base + lane] = value32
    return valid


@quick
def across(r, buffer, words, execute):
    """Moves lanes as the DPP pattern says. Gives the lanes whose result is written."""
    written = u64(0)
    masks = r[row.DPP_MASKS]
    for word in range(words):
        written = u64(0)
        # An operand has two words at most: behind them there is room.
        for lane in range(64):
            buffer[128 + lane] = buffer[word * 64 + lane]
        for lane in range(64):
            source = lane_of(r[row.DPP], r[row.DPP_VALUE], lane)
            valid = source >= 0 and (execute >> u64(source)) & u64(1) != u64(0)
            buffer[word * 64 + lane] = buffer[128 + source] if valid else u32(0)
            gated = (masks >> (lane // 16)) & 1 and (masks >> (4 + (lane & 15) // 4)) & 1
            if gated and (valid or masks & 256):
                written |= u64(1) << u64(lane)
    return written


@quick
def known_of(r, place, vk, sk, execute, low_only):
    """The lanes of a vector instruction's source that were ever written, DPP applied; of its low word only if asked."""
    code, words = r[row.SRC0 + place], 1 if low_only else r[row.WORDS0 + place]
    if r[row.LANES] == 128 and r[row.FLAGS] == 32:
        # Packed: each result has a register of its own to read.
        chosen = ((r[row.OP_SEL] if low_only else r[row.OP_SEL_HI]) >> place) & 1
        if code < row.SCALAR_BASE:
            return vk[code + chosen]
        if code < row.LITERAL_BASE:
            return _ALL if sk[code - row.SCALAR_BASE + chosen] == u32(0xFFFFFFFF) else u64(0)
    if code < row.SCALAR_BASE:
        known = vk[code]
        for word in range(1, words):
            known &= vk[code + word]
        return known_across(r, known, execute) if place == 0 and r[row.DPP] else known
    return _ALL if scalar_known(code, words, sk) == _ALL else u64(0)


@quick
def known_across(r, known, execute):
    """What is known of a source, moved as its DPP pattern says."""
    moved = u64(0)
    for lane in range(64):
        source = lane_of(r[row.DPP], r[row.DPP_VALUE], lane)
        valid = source >= 0 and (execute >> u64(source)) & u64(1) != u64(0)
        if not valid or (known >> u64(source)) & u64(1) != u64(0):
            moved |= u64(1) << u64(lane)
    return moved


@quick
def known_by_halves(r, vk, half, s, sk, w, literals, execute, low_half):
    """The lanes of a result that are known where only halves of the sources are; of two halves in one, the lower if asked."""
    if r[row.PARTS] & row.PERMUTES:
        return known_permuted(r, vk, half, s, sk, w, literals)
    known = _ALL
    for place in range(r[row.SOURCES]):
        code = r[row.SRC0 + place]
        part = (r[row.PARTS] >> (2 * place)) & 3
        if r[row.LANES] == 128:
            part = 1 + (((r[row.OP_SEL] if low_half else r[row.OP_SEL_HI]) >> place) & 1)
        if part == 0 or code >= row.SCALAR_BASE:
            known &= known_of(r, place, vk, sk, execute, False)
            continue
        of_source = known_half(vk, half, code, part - 1)
        known &= known_across(r, of_source, execute) if place == 0 and r[row.DPP] else of_source
    return known


@quick
def note_written(r, vk, half, written, known_low, known):
    """What is known of a vector instruction's result where it is not all of it, or where a part of the register stays."""
    register, select = r[row.DST], r[row.SELECT_DST]
    if r[row.LANES] == 128 and r[row.FLAGS] == 16:
        learn_half(vk, half, register, 0, written, known_low)
        learn_half(vk, half, register, 1, written, known)
    elif select & row.KEEP_REST and select & 7 > 4:
        learn_half(vk, half, register, (select & 7) - 5, written, known)
    elif select & row.KEEP_REST:
        learn(vk, half, register, written, known & vk[register])
    elif r[row.PARTS] & row.COPY and r[row.SRC0] < row.SCALAR_BASE:
        low, high = known_half(vk, half, r[row.SRC0], 0), known_half(vk, half, r[row.SRC0], 1)
        learn_half(vk, half, register, 0, written, low)
        learn_half(vk, half, register, 1, written, high)
    else:
        for word in range(r[row.DST_WORDS]):
            learn(vk, half, register + word, written, known if word else known_low)


@quick
def known_permuted(r, vk, half, s, sk, w, literals):
    """The lanes of v_perm_b32's result that are known, by the halves that its bytes come from, if it names them by a scalar."""
    code = r[row.SRC2]
    if code < row.SCALAR_BASE or scalar_known(code, 1, sk) != _ALL:
        return u64(0)
    selectors = i64(scalar_of(code, 1, s, w, literals))
    known = _ALL
    for place in range(4):
        chosen = (selectors >> (8 * place)) & 255
        if chosen >= 12:
            continue
        # Bytes 0 to 3 are of the second source, 4 to 7 of the first; 8 to 11 are the signs of their halves.
        at = chosen // 2 if chosen < 8 else chosen - 8
        source = r[row.SRC1] if at < 2 else r[row.SRC0]
        if source < row.SCALAR_BASE:
            known &= known_half(vk, half, source, at & 1)
        elif scalar_known(source, 1, sk) != _ALL:
            known = u64(0)
    return known


@quick
def late_source(r, place, w, vm, vl, sl):
    """Of a vector instruction's source, the first register whose load has not been waited for, or -1."""
    code, words = r[row.SRC0 + place], r[row.WORDS0 + place]
    if r[row.LANES] == 128 and r[row.FLAGS] == 32 and code < row.LITERAL_BASE:
        # Packed: what no result chooses is not read.
        for chosen in range(2):
            read = (r[row.OP_SEL] >> place) & 1 == chosen or (r[row.OP_SEL_HI] >> place) & 1 == chosen
            if read and (
                unready(w, code + chosen, vm, vl)
                if code < row.SCALAR_BASE
                else sl[code - row.SCALAR_BASE + chosen] > w[LGKM_DONE]
            ):
                return code + chosen
        return i64(-1)
    if code >= row.SCALAR_BASE:
        return late_operand(code, words, sl, w)
    return late_vector(w, code, words, vm, vl)


@quick
def write_lanes(v, register, values, at, execute, select):
    """A result's word into a register: the lanes that execute, the byte or half that the selector names."""
    if select == 0:
        if execute == _ALL:
            for lane in range(64):
                v[register, lane] = values[at + lane]
        else:
            for lane in range(64):
                if (execute >> u64(lane)) & u64(1):
                    v[register, lane] = values[at + lane]
    else:
        which = select & 7
        width, shift = (8, 8 * (which - 1)) if which <= 4 else (16, 16 * (which - 5))
        mask = ((i64(1) << width) - 1) << shift
        for lane in range(64):
            if (execute >> u64(lane)) & u64(1):
                value = (i64(values[at + lane]) << shift) & mask
                if select & row.KEEP_REST:
                    value |= i64(v[register, lane]) & ~mask
                elif select & row.SIGN_REST:
                    top = (i64(values[at + lane]) << (64 - width)) >> (64 - width)
                    value = (top << shift) & 0xFFFFFFFF
                v[register, lane] = u32(value)


@quick
def region_of(address, size, low, high, run):
    """The argument in which all bytes of an access lie, or -1."""
    last = run[LAST_REGION]
    if low[last] <= address and address + size <= high[last]:
        return last
    left, right = 0, low.shape[0] - 1
    while left < right:
        middle = (left + right + 1) // 2
        if low[middle] <= address:
            left = middle
        else:
            right = middle - 1
    if low[left] <= address and address + size <= high[left]:
        run[LAST_REGION] = left
        return left
    return -1


@quick
def slot_of(address, region, low, page_base):
    """Where a page of an argument stands in the tables of pages."""
    return page_base[region] + (address >> _PAGE_BITS) - (low[region] >> _PAGE_BITS)


@quick
def claim(places, how, memory, run):
    """Marks what the lanes write as written by this workgroup, or touched by its atomic: (kind of fault, lane, other workgroup).

    A store meets what another workgroup of this launch stored, changed by an atomic or loaded; an atomic what another stored.
    Behind an atomic that found another workgroup's there, and what follows it in order, only two stores meet.
    """
    _, _, page_base, page_of, pages, read_page_of, read_pages = memory
    low = memory.low
    group = run[GROUP] + 1
    in_order = run[IN_ORDER] != 0
    for lane in range(64):
        address, region = places[0, lane], places[2, lane]
        page, read_page = i64(0), i64(0)
        for byte in range(places[1, lane]):
            here = (address + byte) & (_PAGE - 1)
            if byte == 0 or here == 0:
                slot = slot_of(address + byte, region, low, page_base)
                page = i64(page_of[slot])
                if page == 0:
                    page = run[FREE_PAGE]
                    run[FREE_PAGE] += 1
                    page_of[slot] = page
                read_page = i64(read_page_of[slot])
            before = i64(pages[page, here])
            if how != STORED:
                if before == 0:
                    pages[page, here] = group | _BY_ATOMIC
                elif before & _BY_ATOMIC:
                    if how == RETURNING and before != group | _BY_ATOMIC:
                        run[MET] = 1
                elif before != group and not in_order:
                    return WRITE_RACE, lane, before - 1
                continue
            if before != 0 and before != group:
                if before & _BY_ATOMIC == 0:
                    return WRITE_RACE, lane, before - 1
                if before != group | _BY_ATOMIC and not in_order:
                    return WRITE_RACE, lane, (before & ~_BY_ATOMIC) - 1
            if read_page and (byte == 0 or here & 3 == 0):
                reader = i64(read_pages[read_page, here >> 2])
                if reader != 0 and reader != group and not in_order:
                    return STORE_OF_READ, lane, reader - 1
            pages[page, here] = group
    return 0, i64(0), i64(0)


@quick
def overlook(places, memory, run):
    """Marks the whole words that the lanes load as read by this workgroup: (kind of fault, lane, other workgroup).

    A load meets what another workgroup of this launch stored. The first reader of a word is kept: workgroups run one after
    another, so that it differs from whoever stores there later if any does.
    """
    _, _, page_base, page_of, pages, read_page_of, read_pages = memory
    low = memory.low
    group = run[GROUP] + 1
    in_order = run[IN_ORDER] != 0
    for lane in range(64):
        address, size, region = places[0, lane], places[1, lane], places[2, lane]
        if size == 0:
            continue
        slot = slot_of(address, region, low, page_base)
        last = slot_of(address + size - 1, region, low, page_base)
        if (page_of[slot] != 0 or page_of[last] != 0) and not in_order:
            for byte in range(size):
                page = page_of[slot_of(address + byte, region, low, page_base)]
                writer = i64(pages[page, (address + byte) & (_PAGE - 1)]) if page else i64(0)
                if writer != 0 and writer != group and writer & _BY_ATOMIC == 0:
                    return READ_OF_STORED, lane, writer - 1
        for place in range((address + 3) & ~3, (address + size) & ~3, 4):
            if place >> _PAGE_BITS != address >> _PAGE_BITS:
                slot = last
            page = i64(read_page_of[slot])
            if page == 0:
                page = run[FREE_READ_PAGE]
                run[FREE_READ_PAGE] += 1
                read_page_of[slot] = page
            word = (place & (_PAGE - 1)) >> 2
            if read_pages[page, word] == 0:
                read_pages[page, word] = group
    return 0, i64(0), i64(0)


@quick
def put_loaded(v, r, register, lane, address):
    """The bytes of one lane from memory into its registers."""
    size, flags = r[row.SIZE], r[row.FLAGS]
    if size >= 4:
        for word in range(size // 4):
            v[register + word, lane] = load_u32(address + 4 * word)
        return
    value = i64(load_u8(address))
    if size == 2:
        value |= i64(load_u8(address + 1)) << 8
    put_narrow(v, register, lane, value, size, flags)


@quick
def put_narrow(v, register, lane, value, size, flags):
    if flags & row.SIGNED_LOAD:
        value = ((value << (64 - 8 * size)) >> (64 - 8 * size)) & 0xFFFFFFFF
    if flags & row.HIGH_HALF:
        value = (i64(v[register, lane]) & 0xFFFF) | ((value & 0xFFFF) << 16)
    elif flags & row.LOW_HALF:
        value = (i64(v[register, lane]) & 0xFFFF0000) | (value & 0xFFFF)
    v[register, lane] = u32(value)


@quick
def store_from(v, r, register, lane, address):
    size = r[row.SIZE]
    if size >= 4:
        for word in range(size // 4):
            store_u32(address + 4 * word, v[register + word, lane])
        return
    value = v[register, lane]
    if r[row.FLAGS] & row.HIGH_HALF:
        value >>= u32(16)
    store_u8(address, np.uint8(value & u32(255)))
    if size == 2:
        store_u8(address + 1, np.uint8((value >> u32(8)) & u32(255)))


@quick
def atomic_result(op, old, new, compare):
    """The 32-bit value that an atomic leaves in memory."""
    a, b = i64(old), i64(new)
    signed_a, signed_b = i64(np.int32(old)), i64(np.int32(new))
    if op == 0:
        return new
    if op == 1:
        return new if old == compare else old
    if op == 2:
        return u32(a + b)
    if op == 3:
        return u32(a - b)
    if op == 4:
        return u32(min(signed_a, signed_b))
    if op == 5:
        return u32(min(a, b))
    if op == 6:
        return u32(max(signed_a, signed_b))
    if op == 7:
        return u32(max(a, b))
    if op == 8:
        return old & new
    if op == 9:
        return old | new
    if op == 10:
        return old ^ new
    if op == 11:
        return u32(0) if a >= b else u32(a + 1)
    if op == 12:
        return u32(b) if a == 0 or a > b else u32(a - 1)
    if op == 13:
        return u32(bits_of_f32(f32_of(a) + f32_of(b)))
    if op == 14:
        low = to_half(f64(from_half(a & 0xFFFF)) + f64(from_half(b & 0xFFFF)))
        return u32(low | to_half(f64(from_half(a >> 16)) + f64(from_half(b >> 16))) << 16)
    low = to_bf16(from_bf16(a) + from_bf16(b))
    return u32(low | to_bf16(from_bf16(a >> 16) + from_bf16(b >> 16)) << 16)


@quick
def atomic_result64(op, old, new, compare):
    if op == 0:
        return new
    if op == 1:
        return new if old == compare else old
    if op == 2:
        return old + new
    if op == 3:
        return old - new
    if op == 4:
        return u64(min(i64(old), i64(new)))
    if op == 5:
        return min(old, new)
    if op == 6:
        return u64(max(i64(old), i64(new)))
    if op == 7:
        return max(old, new)
    if op == 8:
        return old & new
    if op == 9:
        return old | new
    if op == 10:
        return old ^ new
    if op == 11:
        return u64(0) if old >= new else old + u64(1)
    if op == 12:
        return new if old == u64(0) or old > new else old - u64(1)
    if op == 16:
        return bits_of_f64(f64_of(old) + f64_of(new))
    if op == 17:
        return bits_of_f64(min(f64_of(old), f64_of(new)))
    return bits_of_f64(max(f64_of(old), f64_of(new)))


@quick
def atomic_at(address, r, v, lane, data):
    """One lane's atomic in memory; gives the value before, as 64 bits."""
    op = r[row.OP]
    if r[row.SIZE] == 8:
        old = u64(load_u32(address)) | u64(load_u32(address + 4)) << u64(32)
        new = u64(v[data, lane]) | u64(v[data + 1, lane]) << u64(32)
        compare = u64(v[data + 2, lane]) | u64(v[data + 3, lane]) << u64(32) if op == 1 else u64(0)
        left = atomic_result64(op, old, new, compare)
        store_u32(address, u32(left & u64(0xFFFFFFFF)))
        store_u32(address + 4, u32(left >> u64(32)))
        return old
    before = load_u32(address)
    compare32 = v[data + 1, lane] if op == 1 else u32(0)
    store_u32(address, atomic_result(op, before, v[data, lane], compare32))
    return u64(before)


@quick
def lane_bit(mask, lane):
    return (mask >> u64(lane)) & u64(1) != u64(0)


@quick
def element(v, base, item, lane, kind, mode):
    """Item number `item` of a matrix operand in a lane, as a number."""
    if kind == 0:
        return f64(f32_of(i64(v[base + item, lane])))
    if kind == 1:
        return f64(f32_of(i64(v[base + item, lane]) & 0xFFFFE000))
    if kind == 2:
        return f64(from_half((i64(v[base + item // 2, lane]) >> (16 * (item & 1))) & 0xFFFF))
    if kind == 3:
        return f64(from_bf16(i64(v[base + item // 2, lane]) >> (16 * (item & 1))))
    if kind == 4:
        return f64(from_fp8((i64(v[base + item // 4, lane]) >> (8 * (item & 3))) & 255, mode))
    if kind == 5:
        return f64(from_bf8((i64(v[base + item // 4, lane]) >> (8 * (item & 3))) & 255, mode))
    if kind == 6:
        byte = (i64(v[base + item // 4, lane]) >> (8 * (item & 3))) & 255
        return f64((byte ^ 128) - 128)
    if kind == 7:
        return f64_of(u64(v[base + 2 * item, lane]) | u64(v[base + 2 * item + 1, lane]) << u64(32))
    if kind == 10:
        return f64(from_fp4((i64(v[base + item // 8, lane]) >> (4 * (item & 7))) & 15))
    return f64(six_bit(v, base, item, lane, kind))


@quick
def six_bit(v, base, item, lane, kind):
    """E2M3 (kind 8) or E3M2 (kind 9), packed without gaps."""
    first = 6 * item
    both = u64(v[base + first // 32, lane])
    if first % 32 > 26:
        both |= u64(v[base + first // 32 + 1, lane]) << u64(32)
    code = i64((both >> u64(first % 32)) & u64(63))
    if kind == 8:
        power, fraction, bits, bias = (code >> 3) & 3, code & 7, 3, 1
    else:
        power, fraction, bits, bias = (code >> 2) & 7, code & 3, 2, 3
    size = (
        math.ldexp(f64(fraction), 1 - bias - bits)
        if power == 0
        else math.ldexp(f64(fraction + (1 << bits)), power - bias - bits)
    )
    return -size if code & 32 else size


@quick
def depth_of(item, group, per_lane, depth, split):
    """Which k an item of a lane holds; `group` numbers the lanes that share a row. Split: 8-bit operands of f8f6f4."""
    if split:
        return 16 * group + item if item < 16 else depth // 2 + 16 * group + item - 16
    return group * per_lane + item


@quick
def scale_factor(code):
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


@quick
def read_operand(v, vk, base, words, kind, per_lane, wide, blocks, depth, split, mode, numbers, known):
    """A matrix operand from its registers into numbers[block, line, k]; known[block, line] says whether all of a line is."""
    known[:blocks, :wide] = True
    for lane in range(64):
        line = lane % wide
        rest = lane // wide
        block, group = rest % blocks, rest // blocks
        first = group * per_lane
        if kind == 3:
            for word in range(words):
                both = i64(v[base + word, lane])
                numbers[block, line, first + 2 * word] = f64(f32_of((both & 0xFFFF) << 16))
                numbers[block, line, first + 2 * word + 1] = f64(f32_of(both & 0xFFFF0000))
        elif kind == 4 and not split:
            for word in range(words):
                four = i64(v[base + word, lane])
                for byte in range(4):
                    numbers[block, line, first + 4 * word + byte] = f64(from_fp8((four >> (8 * byte)) & 255, mode))
        else:
            for item in range(per_lane):
                k = depth_of(item, group, per_lane, depth, split)
                numbers[block, line, k] = element(v, base, item, lane, kind, mode)
        for word in range(words):
            if not lane_bit(vk[base + word], lane):
                known[block, line] = False


@quick
def apply_scales(r, side, v, vk, s, sk, w, literals, wide, depth, numbers, known):
    """Multiplies each 32 numbers along k by the power of two of the lane that owns them."""
    code = r[row.SRC3] if side == 0 else r[row.TARGET]
    shift = 8 * r[row.SELECT0 + side]
    for line in range(wide):
        for part in range(depth // 32):
            if code < row.SCALAR_BASE:
                bits = i64(v[code, line + wide * part])
                written = lane_bit(vk[code], line + wide * part)
            else:
                bits = i64(scalar_of(code, 1, s, w, literals))
                written = scalar_known(code, 1, sk) == _ALL
            if not written:
                known[0, line] = False
            factor = scale_factor((bits >> shift) & 255)
            for k in range(32 * part, 32 * part + 32):
                numbers[0, line, k] *= factor


@quick
def matrix(r, m, v, vk, half, s, sk, w, literals, left, right, known_left, known_right, addend, addend_known):
    """D = A B + C. Products are exact; a result is rounded once (docs/isa.md says what hardware does instead)."""
    rows, columns, depth, blocks = m[row.M], m[row.N], m[row.K], m[row.BLOCKS]
    per_lane, results, output, mode = m[row.GROUP], m[row.WORDS_D], m[row.OUTPUT], w[MODE]
    d, a, b, c = r[row.DST], r[row.SRC0], r[row.SRC1], r[row.SRC2]
    eight_left, eight_right = 4 <= m[row.TYPE_A] <= 5, 4 <= m[row.TYPE_B] <= 5
    split = m[row.SPLIT] != 0
    read_operand(
        v,
        vk,
        a,
        m[row.WORDS_A],
        m[row.TYPE_A],
        per_lane,
        rows,
        blocks,
        depth,
        split and eight_left,
        mode,
        left,
        known_left,
    )
    read_operand(
        v,
        vk,
        b,
        m[row.WORDS_B],
        m[row.TYPE_B],
        per_lane,
        columns,
        blocks,
        depth,
        split and eight_right,
        mode,
        right,
        known_right,
    )
    if m[row.SCALED]:
        apply_scales(r, 0, v, vk, s, sk, w, literals, rows, depth, left, known_left)
        apply_scales(r, 1, v, vk, s, sk, w, literals, columns, depth, right, known_right)
    # C is read before any of D is written: they may overlap.
    for item in range(results):
        if c < row.SCALAR_BASE:
            for lane in range(64):
                addend[item, lane] = v[c + item, lane]
            addend_known[item] = vk[c + item]
        else:
            value = scalar_of(c, 2 if output == 2 else 1, s, w, literals)
            addend[item, :] = u32(value >> u64(32)) if output == 2 and item & 1 else u32(value & u64(0xFFFFFFFF))
            addend_known[item] = _ALL
    for item in range(results):
        vk[d + item] = half[0, d + item] = half[1, d + item] = u64(0)
    high = 1 if output == 2 else 4
    quads = columns * rows // high
    in_rows = -(-64 // quads) if quads < 64 else 1
    row_groups = (64 // in_rows) // columns
    groups = rows // (high * row_groups)
    for block in range(blocks):
        for line in range(rows):
            item = (line % high) + high * (line // (high * row_groups) + groups * (block // in_rows))
            first_lane_of_row = columns * ((line // high) % row_groups + row_groups * (block % in_rows))
            for column in range(columns):
                total = 0.0
                for k in range(depth):
                    total += left[block, line, k] * right[block, column, k]
                lane = first_lane_of_row + column
                known = known_left[block, line] and known_right[block, column]
                finish(v, vk, output, d, item, lane, total, known, mode, addend, addend_known)


@quick
def finish(v, vk, output, d, item, lane, total, known, mode, addend, addend_known):
    """Adds C and writes one item of D."""
    bit = u64(1) << u64(lane)
    if output == 2:
        before = f64_of(u64(addend[2 * item, lane]) | u64(addend[2 * item + 1, lane]) << u64(32))
        bits = bits_of_f64(total + before)
        v[d + 2 * item, lane] = u32(bits & u64(0xFFFFFFFF))
        v[d + 2 * item + 1, lane] = u32(bits >> u64(32))
        if known and lane_bit(addend_known[2 * item] & addend_known[2 * item + 1], lane):
            vk[d + 2 * item] |= bit
            vk[d + 2 * item + 1] |= bit
        return
    before32 = i64(addend[item, lane])
    if output == 1:
        v[d + item, lane] = u32(i64(total) + before32)
    else:
        value = f32(total + f64(f32_of(before32)))
        if mode & MODE_FP16_OVERFLOW and math.isinf(value) and math.isfinite(total) and math.isfinite(f32_of(before32)):
            value = f32(math.copysign(3.4028234663852886e38, f64(value)))
        v[d + item, lane] = u32(bits_of_f32(value))
    if known and lane_bit(addend_known[item], lane):
        vk[d + item] |= bit


@quick
def overtakes(watch, unit, epoch, wave, w_all):
    """Whether another wave wrote here before the last barrier and did not wait for it there."""
    if watch[0, unit] == 0 or watch[0, unit] >= epoch or watch[4, unit] == wave:
        return False
    last = w_all[watch[4, unit]]
    if watch[5, unit] >= 0:
        return watch[5, unit] > last[PUBLISHED_LGKM]
    return -watch[5, unit] > last[PUBLISHED_VM]


@quick
def lds_touch(how, first, count, wave, sequence, run, w_all, lds, new_at, watch, reads):
    """Notes an access of LDS and says whether it meets another wave's without a barrier between them.

    watch: per unit the epoch and mask of writers, and the last writer's wave and its counter. reads: per wave and unit the
    counter of its last read: what the last barrier did not publish is in order with nothing of another wave. Waves that write
    what is there already do not disturb each other, nor do atomics.
    """
    grain = run[GRAIN]
    bit = i64(1) << wave
    epoch = run[EPOCH]
    for unit in range(first // grain, (first + count - 1) // grain + 1):
        written = watch[0, unit]
        if written != 0 and watch[4, unit] == wave and watch[5, unit] < 0 and -watch[5, unit] > w_all[wave, VM_DONE]:
            # Its own load into LDS has not been waited for; those come back in order among themselves.
            if how != WRITES or sequence >= 0:
                return True
        writers = watch[1, unit] if written == epoch else i64(0)
        by_atomics = writers & _ATOMICS
        others = writers & ~bit & ~_ATOMICS
        if how == READS:
            if others != 0 and (writers & bit == 0 or by_atomics != 0):
                return True
            if overtakes(watch, unit, epoch, wave, w_all):
                return True
            reads[wave, unit] = sequence
            continue
        adds = how == ADDS
        if not (adds and watch[1, unit] & _ATOMICS) and overtakes(watch, unit, epoch, wave, w_all):
            return True
        changes = False
        for byte in range(max(first, unit * grain), min(first + count, (unit + 1) * grain)):
            if lds[byte] != new_at[byte - first]:
                changes = True
        if changes:
            if others != 0 and not (adds and by_atomics != 0):
                return True
            for other in range(reads.shape[0]):
                if other != wave and reads[other, unit] > w_all[other, PUBLISHED_LGKM]:
                    return True
        if adds:
            alone = _ATOMICS if writers == 0 or by_atomics != 0 else i64(0)
            watch[1, unit] = writers | bit | alone
        else:
            watch[1, unit] = bit if changes else writers | bit
        watch[0, unit] = epoch
        watch[4, unit], watch[5, unit] = wave, sequence
    return False


@quick
def set_known_scalar(sk, index, words, known):
    sk[index] = u32(known & u64(0xFFFFFFFF))
    if words == 2:
        sk[index + 1] = u32(known >> u64(32))


@quick
def step_vector(r, w, v, vk, half, s, sk, literals, buffers, addresses, pointers, vectors):
    """A vector instruction or a comparison. Gives a kind of fault, or 0."""
    execute = scalar64(s, 126)
    written = execute
    known = _ALL
    for place in range(r[row.SOURCES]):
        known &= known_of(r, place, vk, sk, execute, False)
        code = r[row.SRC0 + place]
        if r[row.PLAIN] and code < row.SCALAR_BASE:
            pointers[place] = v.ctypes.data + code * 256
        else:
            pointers[place] = addresses[place]
            written &= gather(r, place, v, s, w, literals, buffers[place], execute)
    if r[row.MASK] >= 0:
        mask = scalar64(s, r[row.MASK])
        mask_known = scalar64(sk, r[row.MASK])
        for lane in range(64):
            buffers[_M, lane] = u32((mask >> u64(lane)) & u64(1))
        if r[row.CARRY] < 0 and r[row.SOURCES] == 2:
            # A selection: only the chosen source need be known.
            first, second = known_of(r, 0, vk, sk, execute, False), known_of(r, 1, vk, sk, execute, False)
            known = (mask & second) | (~mask & first)
        known &= mask_known
    packed_halves = r[row.LANES] == 128 and r[row.FLAGS] == 16
    known_low = known
    if (known & written) != written and r[row.MASK] < 0 and (r[row.PARTS] or packed_halves):
        known = known_by_halves(r, vk, half, s, sk, w, literals, execute, False)
        known_low = known_by_halves(r, vk, half, s, sk, w, literals, execute, True) if packed_halves else known
    if r[row.UPWARD]:
        # The low word of the result knows nothing of the high words. A carry may lie over a source.
        known_low = _ALL
        for place in range(r[row.SOURCES]):
            known_low &= known_of(r, place, vk, sk, execute, True)
    mode = w[MODE]
    op = r[row.OP]
    vectors[op >> 5](
        op, r[row.LANES], mode, r[row.IMMEDIATE], r[row.CLAMP], _pointer(pointers[_A]), _pointer(pointers[_B]),
        _pointer(pointers[_C]), _pointer(pointers[_E]), _pointer(addresses[_M]), _pointer(addresses[_K]), _pointer(addresses[_R]),
    )  # fmt: skip
    if r[row.CARRY] >= 0:
        mask = u64(0)
        for lane in range(64):
            mask |= u64(buffers[_K, lane] & u32(1)) << u64(lane)
        mask &= written
        put_scalar64(s, r[row.CARRY], mask)
        set_known_scalar(sk, r[row.CARRY], 2, known | ~written)
        if r[row.KIND] == Kind.COMPARE and r[row.FLAGS]:
            put_scalar64(s, 126, mask)
            if (known | ~written) != _ALL:
                return UNKNOWN_CONDITION
    if r[row.KIND] == Kind.COMPARE:
        return 0
    result = buffers[_R]
    if packed_halves:
        for lane in range(64):
            result[lane] = (result[lane] & u32(0xFFFF)) | (result[64 + lane] << u32(16))
    if r[row.CLAMP] == row.CLAMP_FLOAT:
        clamp_floats(r, result)
    whole = (known & known_low & written) == written and r[row.SELECT_DST] & row.KEEP_REST == 0
    for word in range(r[row.DST_WORDS]):
        write_lanes(v, r[row.DST] + word, result, word * 64, written, r[row.SELECT_DST])
        if whole:
            vk[r[row.DST] + word] |= written
    if not whole:
        note_written(r, vk, half, written, known_low, known)
    return 0


@quick
def clamp_floats(r, result):
    """To [0, 1]; NaN is 0. Integers saturate in their own meaning."""
    for lane in range(64 * max(1, r[row.DST_WORDS])):
        value = f32_of(i64(result[lane]))
        result[lane] = u32(bits_of_f32(min(value, f32(1.0)))) if value > 0 else u32(0)


@quick
def late_for_scalar(r, w, sl):
    """Of a scalar instruction, the first register whose load has not been waited for, or -1."""
    for place in range(r[row.SOURCES]):
        late = late_operand(r[row.SRC0 + place], r[row.WORDS0 + place], sl, w)
        if late >= 0:
            return late
    if r[row.DST] < 0:
        return i64(-1)
    return late_scalar(sl, w, r[row.DST], max(1, r[row.DST_WORDS]))


@quick
def step_scalar(r, w, s, sk, literals, numbers, numbers_at, scalar):
    """A scalar instruction. Gives a kind of fault, or 0."""
    known = _ALL
    for place in range(r[row.SOURCES]):
        code, words = r[row.SRC0 + place], r[row.WORDS0 + place]
        numbers[place] = scalar_of(code, words, s, w, literals)
        known &= scalar_known(code, words, sk)
    words = r[row.DST_WORDS]
    numbers[3] = u64(w[SCC])
    saves = r[row.KIND] == Kind.SAVE_EXEC
    if saves:
        numbers[2] = scalar64(s, 126)
    elif r[row.FLAGS] & 1:
        numbers[2] = scalar64(s, r[row.DST]) if words == 2 else u64(s[r[row.DST]])
        known &= scalar64(sk, r[row.DST]) if words == 2 else u64(sk[r[row.DST]]) | u64(0xFFFFFFFF00000000)
    if r[row.FLAGS] & 2 and not scc_is_known(sk):
        known = u64(0)
    if known != _ALL:
        known = kept_bits(r, s, sk, w, literals)
    scalar(r[row.OP], i64(0), _pointer64(numbers_at))
    if r[row.FLAGS] & 4:
        w[SCC] = i64(numbers[3])
        sk[row.SCC_INDEX] = u32(0xFFFFFFFF) if known == _ALL else _SCC_UNKNOWN
    if saves:
        put_scalar64(s, r[row.DST], numbers[2])
        set_known_scalar(sk, r[row.DST], 2, _ALL)
        put_scalar64(s, 126, numbers[4])
        return 0 if known == _ALL else UNKNOWN_CONDITION
    if words:
        if words == 2:
            put_scalar64(s, r[row.DST], numbers[4])
        else:
            s[r[row.DST]] = u32(numbers[4] & u64(0xFFFFFFFF))
            known |= u64(0xFFFFFFFF00000000)
        set_known_scalar(sk, r[row.DST], words, known)
        if r[row.DST] >= 126 and known != _ALL:
            return UNKNOWN_CONDITION
    return 0


@quick
def kept_bits(r, s, sk, w, literals):
    """Which bits of a scalar result are known although not all of its sources' are."""
    how = r[row.IMMEDIATE]
    if how == 0:
        return u64(0)
    if how == 6:
        # A selection: only the chosen source need be known.
        if not scc_is_known(sk):
            return u64(0)
        chosen = 0 if w[SCC] else 1
        return scalar_known(r[row.SRC0 + chosen], r[row.WORDS0 + chosen], sk)
    first = scalar_of(r[row.SRC0], r[row.WORDS0], s, w, literals)
    known = scalar_known(r[row.SRC0], r[row.WORDS0], sk)
    if how == 5:
        return known
    if r[row.KIND] == Kind.SAVE_EXEC:
        second, known_second = scalar64(s, 126), _ALL
    else:
        second = scalar_of(r[row.SRC1], r[row.WORDS1], s, w, literals)
        known_second = scalar_known(r[row.SRC1], r[row.WORDS1], sk)
    both = known & known_second
    if how == 1:
        return both | (known & ~first) | (known_second & ~second)
    if how == 2:
        return both | (known & first) | (known_second & second)
    if how == 4:
        return both | (known & ~first) | (known_second & second)
    return both


@quick
def step_branch(r, w, s, sk):
    """Where the wave goes on, or -1 for a condition that nobody knows."""
    op = r[row.OP]
    taken = True
    if op == 1 or op == 2:
        if not scc_is_known(sk):
            return i64(-1)
        taken = (w[SCC] != 0) == (op == 2)
    elif op == 3 or op == 4:
        vcc = scalar64(s, 106)
        if scalar64(sk, 106) != _ALL:
            return i64(-1)
        taken = (vcc == u64(0)) == (op == 3)
    elif op >= 5:
        taken = (scalar64(s, 126) == u64(0)) == (op == 5)
    return r[row.TARGET] if taken else w[PC]


@quick
def swap_bits(masks, a, b, in_a, in_b):
    """Two registers' lanes, one of each, change places in what is known of them."""
    bit_a, bit_b = u64(1) << u64(in_a), u64(1) << u64(in_b)
    was_a, was_b = (masks[a] & bit_a) != u64(0), (masks[b] & bit_b) != u64(0)
    masks[a] = masks[a] | bit_a if was_b else masks[a] & ~bit_a
    masks[b] = masks[b] | bit_b if was_a else masks[b] & ~bit_b


@quick
def swap_rows(r, v, vk, half):
    """v_permlane16_swap and v_permlane32_swap: halves or rows of two registers change places."""
    a, b, width = r[row.DST], r[row.SRC0], r[row.OP]
    all_known = vk[a] & vk[b] == _ALL
    for start in range(0, 64, 2 * width):
        for lane in range(width):
            high, low = start + width + lane, start + lane
            v[a, high], v[b, low] = v[b, low], v[a, high]
            if not all_known:
                swap_bits(vk, a, b, high, low)
                for part in range(2):
                    swap_bits(half[part], a, b, high, low)


@quick
def swap(v, vk, half, a, b, execute):
    for lane in range(64):
        if lane_bit(execute, lane):
            v[a, lane], v[b, lane] = v[b, lane], v[a, lane]
    for masks in (vk, half[0], half[1]):
        masks[a], masks[b] = (masks[a] & ~execute) | (masks[b] & execute), (masks[b] & ~execute) | (masks[a] & execute)


@quick
def step_memory(r, wave, own, literals, shared, memory, run, w_all, small, places):
    """A buffer, global or flat access of all lanes that execute."""
    w, v, vk, half, vm, vl, s, sk, sl = own
    lds, lds_known = shared.content, shared.known
    regions_low, regions_high = memory.low, memory.high
    execute = scalar64(s, 126)
    flags, size, pc = r[row.FLAGS], r[row.SIZE], w[PC] - 1
    is_buffer = r[row.KIND] == Kind.BUFFER
    register, words = r[row.DST], max(1, size // 4)
    store, atomic, to_lds = flags & row.STORE, flags & row.ATOMIC, flags & row.TO_LDS
    base, limit, soffset = i64(0), i64(0), i64(0)
    if is_buffer:
        at = r[row.SRC1]
        late = late_scalar(sl, w, at, 4)
        if late < 0:
            late = late_operand(r[row.SRC2], 1, sl, w)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
        if scalar_known(r[row.SRC2], 1, sk) != _ALL:
            return fault(run, UNKNOWN_ADDRESS, pc, wave, -1, 0, r[row.SRC2])
        unknown = unknown_scalar(sk, at, 4)
        if unknown >= 0:
            return fault(run, UNKNOWN_ADDRESS, pc, wave, -1, 0, unknown)
        base = i64(s[at]) | (i64(s[at + 1]) & 0xFFFF) << 32
        base = (base << 16) >> 16
        limit = i64(s[at + 2])
        soffset = i64(scalar_of(r[row.SRC2], 1, s, w, literals))
    elif r[row.SRC1] >= 0:
        late = late_scalar(sl, w, r[row.SRC1], 2)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
        base = i64(scalar64(s, r[row.SRC1]))
        unknown = unknown_scalar(sk, r[row.SRC1], 2)
        if unknown >= 0:
            return fault(run, UNKNOWN_ADDRESS, pc, wave, -1, 0, unknown)
    if to_lds:
        late = late_scalar(sl, w, 124, 1)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
        if sk[124] != u32(0xFFFFFFFF):
            return fault(run, UNKNOWN_ADDRESS, pc, wave, -1, 0, row.SCALAR_BASE + 124)
    offset_register = r[row.SRC0] if (not is_buffer or flags & row.OFFEN) else i64(-1)
    address_words = 0 if offset_register < 0 else 1 if (is_buffer or r[row.SRC1] >= 0) else 2
    for word in range(address_words):
        if unready(w, offset_register + word, vm, vl):
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, offset_register + word)
        missing = execute & ~vk[offset_register + word]
        if missing:
            return fault(run, UNKNOWN_ADDRESS, pc, wave, first_lane(missing), 0, offset_register + word)
    data_words = words * (2 if atomic and r[row.OP] == 1 else 1)
    if not to_lds:
        late = (
            late_vector(w, register, data_words, vm, vl)
            if store or atomic
            else late_over(w, vl, LGKM_DONE, register, data_words)
        )
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
    watched = run[WATCH_WRITERS] != 0
    # A lane touches two pages at most.
    free = (
        memory.pages.shape[0] - run[FREE_PAGE] if store or atomic else memory.read_pages.shape[0] - run[FREE_READ_PAGE]
    )
    if watched and free < 160:
        return GROW
    into = r[row.SRC3] if not is_buffer else register
    if atomic and flags & row.RETURNS:
        late = late_over(w, vl, LGKM_DONE, into, words)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
    w[VM_ISSUED] += 1
    if flags & row.FLAT:
        w[LGKM_ISSUED] += 1
    for lane in range(64):
        if not lane_bit(execute, lane):
            places[1, lane] = 0
            continue
        inside_words = words
        if is_buffer:
            part = r[row.OFFSET] + (i64(v[offset_register, lane]) if offset_register >= 0 else 0)
            inside_words = 0
            if size <= 4:
                inside_words = 1 if part < limit else 0
            else:
                for word in range(words):
                    if part + 4 * word < limit:
                        inside_words += 1
            address = base + soffset + part
        elif address_words == 2:
            address = i64(u64(v[offset_register, lane]) | u64(v[offset_register + 1, lane]) << u64(32)) + r[row.OFFSET]
        else:
            address = base + r[row.OFFSET] + (i64(v[offset_register, lane]) if offset_register >= 0 else 0)
        whole = inside_words == words
        touched = size if whole else 4 * inside_words
        if atomic and not whole:
            touched = 0
        region = i64(0)
        if touched:
            region = region_of(address, touched, regions_low, regions_high, run)
            if region < 0:
                kind = OUTSIDE_STORE if store else OUTSIDE_ATOMIC if atomic else OUTSIDE_LOAD
                return fault(run, kind, pc, wave, lane, address, touched)
        if touched and (store or atomic):
            # Lanes whose store goes nowhere may hold anything.
            for word in range(data_words):
                if not lane_bit(vk[register + word], lane):
                    if size < 4 and lane_bit(half[1 if flags & row.HIGH_HALF else 0, register], lane):
                        continue
                    return fault(run, UNKNOWN_STORED, pc, wave, lane, address, register + word)
        places[0, lane], places[1, lane], places[2, lane] = address, touched, region
        if store:
            if touched and whole:
                store_from(v, r, register, lane, address)
            elif touched:
                for word in range(inside_words):
                    store_u32(address + 4 * word, v[register + word, lane])
        elif atomic:
            old = atomic_at(address, r, v, lane, register) if touched else u64(0)
            if flags & row.RETURNS:
                v[into, lane] = u32(old & u64(0xFFFFFFFF))
                if size == 8:
                    v[into + 1, lane] = u32(old >> u64(32))
        elif to_lds:
            if s[124] == _NOWHERE:
                continue
            step = 4 if size <= 4 else 16
            place = i64(s[124]) + r[row.OFFSET] + lane * step
            if place + max(size, 4) > lds.shape[0]:
                return fault(run, LDS_OUTSIDE, pc, wave, lane, place, size)
            count = max(size, 4)
            for byte in range(count):
                small[byte] = load_u8(address + byte) if byte < touched else np.uint8(0)
            if lds_touch(WRITES, place, count, wave, -w[VM_ISSUED], run, w_all, lds, small, shared.watch, shared.reads):
                return fault(run, LDS_RACE, pc, wave, lane, place, WRITES)
            for byte in range(count):
                lds[place + byte] = small[byte]
                lds_known[place + byte] = 1
        elif whole:
            put_loaded(v, r, register, lane, address)
        elif size < 4:
            put_narrow(v, register, lane, i64(0), size, flags)
        else:
            for word in range(words):
                v[register + word, lane] = load_u32(address + 4 * word) if word < inside_words else u32(0)
    if watched:
        how = RETURNING if flags & row.RETURNS else CHANGED if atomic else STORED
        kind, lane, other = claim(places, how, memory, run) if store or atomic else overlook(places, memory, run)
        if kind:
            return fault(run, kind, pc, wave, lane, places[0, lane], other)
    if not store and not to_lds and not (atomic and not flags & row.RETURNS):
        for word in range(words):
            if flags & (row.HIGH_HALF | row.LOW_HALF):
                learn_half(vk, half, register, 1 if flags & row.HIGH_HALF else 0, execute, _ALL)
            else:
                vk[into + word if atomic else register + word] |= execute
            vm[into + word if atomic else register + word] = w[VM_ISSUED]
            if flags & row.FLAT:
                vl[into + word if atomic else register + word] = w[LGKM_ISSUED]
    return DONE


@quick
def step_scratch(r, wave, registers, scratch, scratch_known, run, masks):
    """A lane's private memory."""
    w, v, vk, half, vm, vl, s, sk, sl = registers
    execute = scalar64(s, 126)
    flags, size, pc = r[row.FLAGS], r[row.SIZE], w[PC] - 1
    register, words = r[row.DST], max(1, size // 4)
    late = (
        late_vector(w, register, words, vm, vl) if flags & row.STORE else late_over(w, vl, LGKM_DONE, register, words)
    )
    if late >= 0:
        return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
    base = r[row.OFFSET] + (i64(s[r[row.SRC1]]) if r[row.SRC1] >= 0 else 0)
    own = r[row.SRC0]
    if r[row.SRC1] >= 0:
        late = late_scalar(sl, w, r[row.SRC1], 1)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
        if sk[r[row.SRC1]] != u32(0xFFFFFFFF):
            return fault(run, UNKNOWN_ADDRESS, pc, wave, -1, 0, row.SCALAR_BASE + r[row.SRC1])
    if own >= 0 and unready(w, own, vm, vl):
        return fault(run, MISSING_WAIT, pc, wave, -1, 0, own)
    if own >= 0 and (vk[own] & execute) != execute:
        return fault(run, UNKNOWN_ADDRESS, pc, wave, first_lane(execute & ~vk[own]), 0, own)
    w[VM_ISSUED] += 1
    unknown = masks
    unknown[:] = u64(0)
    for lane in range(64):
        if not lane_bit(execute, lane):
            continue
        place = base + (i64(np.int32(v[own, lane])) if own >= 0 else 0)
        if place < 0 or place + size > scratch.shape[1]:
            return fault(run, SCRATCH_OUTSIDE, pc, wave, lane, place, size)
        for byte in range(size):
            word, shift = byte // 4, u32(8 * (byte % 4) + (16 if flags & row.HIGH_HALF else 0))
            bit = u64(1) << u64(lane)
            if flags & row.STORE:
                scratch[lane, place + byte] = np.uint8((v[register + word, lane] >> shift) & u32(255))
                known = known_half(vk, half, register + word, shift // 16) & bit
                scratch_known[lane, place + byte] = 1 if known else 0
            else:
                if scratch_known[lane, place + byte] == 0:
                    unknown[word] |= bit
        if not flags & row.STORE:
            if size >= 4:
                for word in range(words):
                    value = u32(0)
                    for byte in range(4):
                        value |= u32(scratch[lane, place + 4 * word + byte]) << u32(8 * byte)
                    v[register + word, lane] = value
            else:
                narrow = i64(scratch[lane, place])
                if size == 2:
                    narrow |= i64(scratch[lane, place + 1]) << 8
                put_narrow(v, register, lane, narrow, size, flags)
    if not flags & row.STORE:
        for word in range(words):
            if flags & (row.HIGH_HALF | row.LOW_HALF):
                learn_half(vk, half, register, 1 if flags & row.HIGH_HALF else 0, execute, ~unknown[0])
            else:
                learn(vk, half, register + word, execute, ~unknown[word])
            vm[register + word] = w[VM_ISSUED]
    return DONE


@quick
def step_lds(r, wave, registers, shared, w_all, run, small, lanes, masks):
    """Reads, writes and atomics of the workgroup's shared memory."""
    w, v, vk, half, vm, vl, s, _, _ = registers
    lds, lds_known = shared.content, shared.known
    execute = scalar64(s, 126)
    flags, size, pc = r[row.FLAGS], r[row.SIZE], w[PC] - 1
    own, register, words = r[row.SRC0], r[row.DST], max(1, size // 4)
    store, atomic = flags & row.STORE, flags & row.ATOMIC
    if unready(w, own, vm, vl):
        return fault(run, MISSING_WAIT, pc, wave, -1, 0, own)
    if (vk[own] & execute) != execute:
        return fault(run, UNKNOWN_ADDRESS, pc, wave, first_lane(execute & ~vk[own]), 0, own)
    parts = 2 if flags & row.TWO else 1
    for part in range(parts):
        first = (r[row.SRC1] if part else register) if store else register + part * words
        late = late_vector(w, first, words, vm, vl) if store or atomic else late_over(w, vm, VM_DONE, first, words)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
    if flags & row.TRANSPOSED:
        return read_transposed(r, w, v, vk, half, vl, s, wave, shared, w_all, run, small, lanes)
    w[LGKM_ISSUED] += 1
    # The first part may overwrite the addresses of the second.
    starts = lanes[0]
    for lane in range(64):
        starts[lane] = v[own, lane]
    for part in range(parts):
        first = (r[row.SRC1] if part else register) if store else register + part * words
        offset = r[row.TARGET] if part else r[row.OFFSET]
        known_all = masks
        known_all[:] = u64(0)
        for lane in range(64):
            if not lane_bit(execute, lane):
                continue
            bit = u64(1) << u64(lane)
            place = (i64(starts[lane]) + offset) & 0xFFFFFFFF
            if place + size > lds.shape[0]:
                if store or atomic:
                    return fault(run, LDS_OUTSIDE, pc, wave, lane, place, size)
                for word in range(words):
                    if size >= 4:
                        v[first + word, lane] = u32(0)
                    else:
                        put_narrow(v, first, lane, i64(0), size, flags)
                continue
            if store:
                for byte in range(size):
                    word, shift = byte // 4, u32(8 * (byte % 4) + (16 if flags & row.HIGH_HALF else 0))
                    small[byte] = np.uint8((v[first + word, lane] >> shift) & u32(255))
                if lds_touch(
                    WRITES, place, size, wave, w[LGKM_ISSUED], run, w_all, lds, small, shared.watch, shared.reads
                ):
                    return fault(run, LDS_RACE, pc, wave, lane, place, WRITES)
                for byte in range(size):
                    lds[place + byte] = small[byte]
                    part = 1 if flags & row.HIGH_HALF else byte % 4 // 2
                    lds_known[place + byte] = 1 if known_half(vk, half, first + byte // 4, part) & bit else 0
                continue
            if atomic:
                old = u32(0)
                for byte in range(4):
                    old |= u32(lds[place + byte]) << u32(8 * byte)
                left = atomic_result(r[row.OP], old, v[register, lane], u32(0))
                for byte in range(4):
                    small[byte] = np.uint8((left >> u32(8 * byte)) & u32(255))
                if lds_touch(ADDS, place, 4, wave, w[LGKM_ISSUED], run, w_all, lds, small, shared.watch, shared.reads):
                    return fault(run, LDS_RACE, pc, wave, lane, place, ADDS)
                fine = lane_bit(vk[register], lane)
                for byte in range(4):
                    fine = fine and lds_known[place + byte] != 0
                for byte in range(4):
                    lds_known[place + byte] = 1 if fine else 0
                    lds[place + byte] = small[byte]
                if flags & row.RETURNS:
                    v[r[row.SRC3], lane] = old
                    if fine:
                        known_all[0] |= bit
                continue
            if lds_touch(READS, place, size, wave, w[LGKM_ISSUED], run, w_all, lds, small, shared.watch, shared.reads):
                return fault(run, LDS_RACE, pc, wave, lane, place, READS)
            if size >= 4:
                for word in range(words):
                    value = u32(0)
                    fine = True
                    for byte in range(4):
                        value |= u32(lds[place + 4 * word + byte]) << u32(8 * byte)
                        fine = fine and lds_known[place + 4 * word + byte] != 0
                    v[first + word, lane] = value
                    if fine:
                        known_all[word] |= bit
            else:
                narrow = i64(lds[place])
                fine = lds_known[place] != 0
                if size == 2:
                    narrow |= i64(lds[place + 1]) << 8
                    fine = fine and lds_known[place + 1] != 0
                put_narrow(v, first, lane, narrow, size, flags)
                if fine:
                    known_all[0] |= bit
        if atomic:
            if flags & row.RETURNS:
                learn(vk, half, r[row.SRC3], execute, known_all[0])
                vl[r[row.SRC3]] = w[LGKM_ISSUED]
        elif not store:
            for word in range(words):
                if flags & (row.HIGH_HALF | row.LOW_HALF):
                    learn_half(vk, half, first, 1 if flags & row.HIGH_HALF else 0, execute, known_all[0])
                else:
                    learn(vk, half, first + word, execute, known_all[word])
                vl[first + word] = w[LGKM_ISSUED]
    return DONE


@quick
def read_transposed(r, w, v, vk, half, vl, s, wave, shared, w_all, run, small, lanes):
    """ds_read_b64_tr: in each sixteen lanes, what they read together is a matrix, and each gets a column of it."""
    execute = scalar64(s, 126)
    lds, lds_known = shared.content, shared.known
    pc = w[PC] - 1
    own, register, bits = r[row.SRC0], r[row.DST], r[row.IMMEDIATE]
    if execute != _ALL:
        return fault(run, EXEC_EMPTY, pc, wave, first_lane(~execute), 0, 1)
    w[LGKM_ISSUED] += 1
    lanes[:] = u32(0)
    fine = u64(0)
    for lane in range(64):
        place = (i64(v[own, lane]) + r[row.OFFSET]) & 0xFFFFFFFF
        if place + 8 > lds.shape[0]:
            continue
        if lds_touch(READS, place, 8, wave, w[LGKM_ISSUED], run, w_all, lds, small, shared.watch, shared.reads):
            return fault(run, LDS_RACE, pc, wave, lane, place, READS)
        known = True
        for byte in range(8):
            lanes[byte // 4, lane] |= u32(lds[place + byte]) << u32(8 * (byte % 4))
            known = known and lds_known[place + byte] != 0
        if known:
            fine |= u64(1) << u64(lane)
    items = 64 // bits
    mask = u64((1 << bits) - 1)
    known_out = u64(0)
    for lane in range(64):
        group, column = lane & ~15, lane & 15
        value = u64(0)
        known = True
        for line in range(items):
            index = 16 * line + column
            source, item = group + index // items, index % items
            both = u64(lanes[0, source]) | u64(lanes[1, source]) << u64(32)
            value |= ((both >> u64(bits * item)) & mask) << u64(bits * line)
            known = known and lane_bit(fine, source)
        v[register, lane] = u32(value & u64(0xFFFFFFFF))
        v[register + 1, lane] = u32(value >> u64(32))
        if known:
            known_out |= u64(1) << u64(lane)
    for word in range(2):
        learn(vk, half, register + word, _ALL, known_out)
        vl[register + word] = w[LGKM_ISSUED]
    return DONE


@quick
def step_permute(r, w, v, vk, half, vl, s, wave, run, found):
    """ds_bpermute (0), ds_permute (1), ds_swizzle (2): lanes exchange a register through the LDS hardware."""
    execute = scalar64(s, 126)
    op, offset = r[row.OP], r[row.OFFSET]
    if op < 2 and (vk[r[row.SRC0]] & execute) != execute:
        return fault(run, UNKNOWN_ADDRESS, w[PC] - 1, wave, first_lane(execute & ~vk[r[row.SRC0]]), 0, r[row.SRC0])
    w[LGKM_ISSUED] += 1
    data = r[row.SRC1] if op < 2 else r[row.SRC0]
    found[:] = u32(0)
    known = u64(0) if op != 1 else _ALL
    for lane in range(64):
        if not lane_bit(execute, lane):
            continue
        if op == 1:
            target = ((i64(v[r[row.SRC0], lane]) + offset) >> 2) & 63
            found[target] = v[data, lane]
            if not lane_bit(vk[data], lane):
                known &= ~(u64(1) << u64(target))
            continue
        if op == 0:
            source = ((i64(v[r[row.SRC0], lane]) + offset) >> 2) & 63
        elif offset & 0x8000:
            source = (lane & ~3) | ((offset >> (2 * (lane & 3))) & 3)
        else:
            source = (lane & 32) | ((((lane & 31) & (offset & 31)) | ((offset >> 5) & 31)) ^ ((offset >> 10) & 31))
        if lane_bit(execute, source):
            found[lane] = v[data, source]
        if not lane_bit(execute, source) or lane_bit(vk[data], source):
            known |= u64(1) << u64(lane)
    for lane in range(64):
        if lane_bit(execute, lane):
            v[r[row.DST], lane] = found[lane]
    learn(vk, half, r[row.DST], execute, known)
    vl[r[row.DST]] = w[LGKM_ISSUED]
    return DONE


@quick
def step_scalar_load(r, w, s, sk, sl, wave, memory, run, places):
    pc = w[PC] - 1
    at, by, buffer = r[row.SRC0], r[row.SRC1], r[row.FLAGS] & 1
    base = scalar64(s, at)
    own = 3 if buffer else 2
    late = late_scalar(sl, w, at, own)
    if late < 0 and by >= 0:
        late = late_scalar(sl, w, by, 1)
    if late < 0:
        # Scalar loads come back in any order: one over another in flight may be the one that stays.
        late = late_scalar(sl, w, r[row.DST], r[row.SIZE])
    if late >= 0:
        return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
    unknown = unknown_scalar(sk, at, own)
    if unknown < 0 and by >= 0:
        unknown = unknown_scalar(sk, by, 1)
    if unknown >= 0:
        return fault(run, UNKNOWN_ADDRESS, pc, wave, -1, 0, unknown)
    watched = run[WATCH_WRITERS] != 0
    if watched and memory.read_pages.shape[0] - run[FREE_READ_PAGE] < 160:
        return GROW
    offset = r[row.OFFSET] + (i64(s[r[row.SRC1]]) if r[row.SRC1] >= 0 else 0)
    address = i64(base & u64(0xFFFFFFFFFFFF)) if buffer else i64(base)
    address = (address + offset) & ~3
    limit = i64(s[r[row.SRC0] + 2]) if buffer else i64(0)
    w[LGKM_ISSUED] += 1
    w[SMEM_OPEN] = w[LGKM_ISSUED]
    for word in range(r[row.SIZE]):
        inside = not buffer or offset + 4 * word < limit
        if inside:
            region = region_of(address + 4 * word, 4, memory.low, memory.high, run)
            if region < 0:
                return fault(run, OUTSIDE_LOAD, pc, wave, -1, address + 4 * word, 4)
            if watched:
                places[1, :] = 0
                places[0, 0], places[1, 0], places[2, 0] = address + 4 * word, 4, region
                kind, _, other = overlook(places, memory, run)
                if kind:
                    return fault(run, kind, pc, wave, -1, address + 4 * word, other)
        s[r[row.DST] + word] = load_u32(address + 4 * word) if inside else u32(0)
        sk[r[row.DST] + word] = u32(0xFFFFFFFF)
        sl[r[row.DST] + word] = w[LGKM_ISSUED]
    return DONE


@quick
def step_lane(r, w, v, vk, half, vm, vl, s, sk, sl, wave, run, literals):
    """v_readlane, v_readfirstlane, v_writelane. Gives what a run ends with."""
    kind, pc = r[row.KIND], w[PC] - 1
    if kind != Kind.READ_FIRST_LANE:
        late = late_operand(r[row.SRC1], 1, sl, w)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
        if scalar_known(r[row.SRC1], 1, sk) != _ALL:
            return fault(run, UNKNOWN_ADDRESS, pc, wave, -1, 0, r[row.SRC1])
    if kind == Kind.WRITE_LANE:
        late = late_operand(r[row.SRC0], 1, sl, w)
        if late < 0:
            late = late_vector(w, r[row.DST], 1, vm, vl)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
        lane = i64(scalar_of(r[row.SRC1], 1, s, w, literals)) & 63
        v[r[row.DST], lane] = u32(scalar_of(r[row.SRC0], 1, s, w, literals) & u64(0xFFFFFFFF))
        bit = u64(1) << u64(lane)
        known = scalar_known(r[row.SRC0], 1, sk) == _ALL
        learn(vk, half, r[row.DST], bit, bit if known else u64(0))
        return DONE
    late = late_scalar(sl, w, r[row.DST], 1)
    if late >= 0:
        return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
    lane = i64(0)
    if kind == Kind.READ_LANE:
        lane = i64(scalar_of(r[row.SRC1], 1, s, w, literals)) & 63
    elif scalar64(s, 126) == u64(0):
        return fault(run, EXEC_EMPTY, pc, wave, -1, 0, 0)
    else:
        lane = first_lane(scalar64(s, 126))
    code = r[row.SRC0]
    if code >= row.SCALAR_BASE:
        late = late_operand(code, 1, sl, w)
        if late >= 0:
            return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
        s[r[row.DST]] = u32(scalar_of(code, 1, s, w, literals) & u64(0xFFFFFFFF))
        sk[r[row.DST]] = u32(scalar_known(code, 1, sk) & u64(0xFFFFFFFF))
        return DONE
    if unready(w, code, vm, vl):
        return fault(run, MISSING_WAIT, pc, wave, lane, 0, code)
    s[r[row.DST]] = v[code, lane]
    low = u32(0xFFFF) if lane_bit(known_half(vk, half, code, 0), lane) else u32(0)
    high = u32(0xFFFF0000) if lane_bit(known_half(vk, half, code, 1), lane) else u32(0)
    sk[r[row.DST]] = low | high
    return DONE


@quick
def run_wave(wave, code, waves, shared, private, memory, run, work, vectors, scalar):
    """Runs one wave until its barrier, its end or a fault."""
    w_all = waves.w
    own = Waves(
        w_all[wave],
        waves.v[wave],
        waves.vk[wave],
        waves.half[wave],
        waves.vm[wave],
        waves.vl[wave],
        waves.s[wave],
        waves.sk[wave],
        waves.sl[wave],
    )
    w, v, vk, half, vm, vl, s, sk, sl = own
    rows, literals, matrices = code
    (
        buffers,
        addresses,
        numbers,
        numbers_at,
        left,
        right,
        known_left,
        known_right,
        addend,
        addend_known,
        small,
        places,
        pointers,
        lanes,
        masks,
    ) = work
    count = rows.shape[0]
    while True:
        pc = w[PC]
        if pc < 0 or pc >= count:
            return fault(run, WRONG_PC, pc, wave, -1, 0, 0)
        if run[INSTRUCTIONS] >= run[INSTRUCTION_LIMIT]:
            return LIMIT
        run[INSTRUCTIONS] += 1
        r = rows[pc]
        w[PC] = pc + 1
        kind = r[row.KIND]
        ends = DONE
        if kind <= Kind.COMPARE:
            late = i64(-1)
            for mask in (r[row.MASK], r[row.CARRY]):
                if mask >= 0 and late < 0:
                    late = late_scalar(sl, w, mask, 2)
            for place in range(r[row.SOURCES]):
                if late < 0:
                    late = late_source(r, place, w, vm, vl, sl)
            if late < 0:
                late = late_vector(w, r[row.DST], r[row.DST_WORDS], vm, vl)
            if late >= 0:
                return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
            if run[STRICT]:
                execute = scalar64(s, 126)
                for place in range(r[row.SOURCES]):
                    known = known_of(r, place, vk, sk, execute, r[row.UPWARD] != 0)
                    if r[row.MASK] < 0 and (known & execute) != execute:
                        return fault(run, UNKNOWN_READ, pc, wave, -1, 0, r[row.SRC0 + place])
            bad = step_vector(r, w, v, vk, half, s, sk, literals, buffers, addresses, pointers, vectors)
            if bad:
                return fault(run, bad, pc, wave, -1, 0, 0)
        elif kind == Kind.SCALAR or kind == Kind.SAVE_EXEC:
            late = late_for_scalar(r, w, sl)
            if late >= 0:
                return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
            bad = step_scalar(r, w, s, sk, literals, numbers, numbers_at, scalar)
            if bad:
                return fault(run, bad, pc, wave, -1, 0, row.SCALAR_BASE + r[row.DST])
        elif kind == Kind.BRANCH:
            late = late_scalar(sl, w, 106, 2) if 3 <= r[row.OP] <= 4 else i64(-1)
            if late >= 0:
                return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
            target = step_branch(r, w, s, sk)
            if target < 0:
                return fault(run, UNKNOWN_CONDITION, pc, wave, -1, 0, 0)
            w[PC] = target
        elif kind == Kind.WAIT:
            if w[VM_ISSUED] - r[row.OP] > w[VM_DONE]:
                w[VM_DONE] = w[VM_ISSUED] - r[row.OP]
            # Scalar loads come back in any order: while one is open, only a wait for zero says anything.
            if w[SMEM_OPEN] <= w[LGKM_DONE] or r[row.IMMEDIATE] == 0:
                if w[LGKM_ISSUED] - r[row.IMMEDIATE] > w[LGKM_DONE]:
                    w[LGKM_DONE] = w[LGKM_ISSUED] - r[row.IMMEDIATE]
        elif kind == Kind.BUFFER or kind == Kind.GLOBAL:
            ends = step_memory(r, wave, own, literals, shared, memory, run, w_all, small, places)
        elif kind == Kind.LDS:
            ends = step_lds(r, wave, own, shared, w_all, run, small, lanes, masks)
        elif kind == Kind.MATRIX:
            m = matrices[r[row.MATRIX_ROW]]
            late = late_vector(w, r[row.SRC0], m[row.WORDS_A], vm, vl)
            if late < 0:
                late = late_vector(w, r[row.SRC1], m[row.WORDS_B], vm, vl)
            if late < 0 and r[row.SRC2] < row.SCALAR_BASE:
                late = late_vector(w, r[row.SRC2], m[row.WORDS_D], vm, vl)
            if late < 0:
                late = late_vector(w, r[row.DST], m[row.WORDS_D], vm, vl)
            if m[row.SCALED]:
                for scale in (r[row.SRC3], r[row.TARGET]):
                    if late < 0:
                        late = (
                            late_vector(w, scale, 1, vm, vl)
                            if scale < row.SCALAR_BASE
                            else late_operand(scale, 1, sl, w)
                        )
            if late >= 0:
                return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
            if run[STRICT]:
                for side in range(3):
                    base, words = (
                        (r[row.SRC0], m[row.WORDS_A])
                        if side == 0
                        else (r[row.SRC1], m[row.WORDS_B])
                        if side == 1
                        else (r[row.SRC2], m[row.WORDS_D])
                    )
                    for word in range(words):
                        if base < row.SCALAR_BASE and vk[base + word] != _ALL:
                            return fault(run, UNKNOWN_READ, pc, wave, first_lane(~vk[base + word]), 0, base + word)
            matrix(r, m, v, vk, half, s, sk, w, literals, left, right, known_left, known_right, addend, addend_known)
        elif kind == Kind.SCALAR_LOAD:
            ends = step_scalar_load(r, w, s, sk, sl, wave, memory, run, places)
        elif kind == Kind.SCRATCH:
            ends = step_scratch(r, wave, own, private.content[wave], private.known[wave], run, masks)
        elif kind <= Kind.WRITE_LANE:
            ends = step_lane(r, w, v, vk, half, vm, vl, s, sk, sl, wave, run, literals)
        elif kind == Kind.LDS_PERMUTE:
            late = late_vector(w, r[row.SRC0], 1, vm, vl)
            if late < 0 and r[row.OP] < 2:
                late = late_vector(w, r[row.SRC1], 1, vm, vl)
            if late < 0:
                late = late_over(w, vm, VM_DONE, r[row.DST], 1)
            if late >= 0:
                return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
            ends = step_permute(r, w, v, vk, half, vl, s, wave, run, lanes[0])
        elif kind == Kind.SWAP_ROWS or kind == Kind.SWAP:
            late = late_vector(w, r[row.DST], 1, vm, vl)
            if late < 0:
                late = late_vector(w, r[row.SRC0], 1, vm, vl)
            if late >= 0:
                return fault(run, MISSING_WAIT, pc, wave, -1, 0, late)
            if kind == Kind.SWAP:
                swap(v, vk, half, r[row.DST], r[row.SRC0], scalar64(s, 126))
            else:
                swap_rows(r, v, vk, half)
        elif kind == Kind.BARRIER:
            w[STATUS] = AT_BARRIER
            w[PUBLISHED_LGKM], w[PUBLISHED_VM] = w[LGKM_DONE], w[VM_DONE]
            return DONE
        elif kind == Kind.END:
            w[STATUS] = ENDED
            return DONE
        elif kind == Kind.SET_MODE:
            bit = i64(1) << r[row.OFFSET]
            w[MODE] = (w[MODE] & ~bit) | (bit if r[row.IMMEDIATE] & 1 else 0)
        elif kind == Kind.NOTHING:
            # Behind an atomic that found another workgroup's, what that one did before is seen.
            if r[row.OP] and run[MET]:
                run[IN_ORDER] = 1
        elif kind == Kind.TRAP:
            return fault(run, TRAPPED, pc, wave, -1, 0, 0)
        if ends != DONE:
            if ends == GROW:
                w[PC] = pc
                run[INSTRUCTIONS] -= 1
            return ends


@njit(cache=True)
def run_launch(code, waves, shared, private, memory, run, work, vectors, scalar, start):
    """Every workgroup of a launch, in order. May end with GROW and be called again, and goes on where it was."""
    count = waves.w.shape[0]
    while run[GROUP] < run[LAST_GROUP]:
        if run[STARTED] == 0:
            start_group(waves, shared, private, run, start)
            run[STARTED] = 1
        going = True
        while going:
            for wave in range(count):
                if waves.w[wave, STATUS] == RUNNING:
                    ends = run_wave(wave, code, waves, shared, private, memory, run, work, vectors, scalar)
                    if ends != DONE:
                        return ends
            going = False
            for wave in range(count):
                if waves.w[wave, STATUS] == AT_BARRIER:
                    waves.w[wave, STATUS] = RUNNING
                    going = True
                elif waves.w[wave, STATUS] == ENDED:
                    # No barrier waits for it any more: what it had waited for comes before what is behind this one.
                    waves.w[wave, PUBLISHED_LGKM] = waves.w[wave, LGKM_DONE]
                    waves.w[wave, PUBLISHED_VM] = waves.w[wave, VM_DONE]
            run[EPOCH] += 1
        run[GROUP] += 1
        run[STARTED] = 0
    return DONE


@njit
def start_group(waves, shared, private, run, start):
    """Registers as a workgroup finds them; nothing else is known."""
    group = run[GROUP]
    x = group % run[GROUPS_X]
    y = (group // run[GROUPS_X]) % run[GROUPS_Y]
    z = group // (run[GROUPS_X] * run[GROUPS_Y])
    run[EPOCH] += 1
    shared.known[:] = 0
    shared.watch[0, :] = 0
    shared.reads[:] = 0
    run[MET] = run[IN_ORDER] = 0
    private.known[:] = 0
    for wave in range(waves.w.shape[0]):
        waves.w[wave, :] = 0
        waves.w[wave, MODE] = start.mode
        waves.vk[wave, :] = u64(0)
        waves.half[wave, :] = u64(0)
        waves.vm[wave, :] = 0
        waves.vl[wave, :] = 0
        waves.sl[wave, :] = 0
        waves.s[wave, :] = start.s
        waves.sk[wave, :] = start.sk
        # SCC starts known; its upper bits, and what lies beside it, always are.
        waves.sk[wave, row.SCC_INDEX :] = u32(0xFFFFFFFF)
        for place in range(start.v.shape[1]):
            waves.v[wave, place, :] = start.v[wave, place]
            waves.vk[wave, place] = _ALL
        for axis in range(3):
            if start.group_at[axis] >= 0:
                waves.s[wave, start.group_at[axis]] = u32(x if axis == 0 else y if axis == 1 else z)
                waves.sk[wave, start.group_at[axis]] = u32(0xFFFFFFFF)
        put_scalar64(waves.s[wave], 126, _ALL)
        set_known_scalar(waves.sk[wave], 126, 2, _ALL)
