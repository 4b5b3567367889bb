"""One launch of one program on arguments in this process's memory: what goes in, and what a fault says.

The address space is the process's own: an argument's address is where its storage lies, so that the compiled code computes
with real pointers, and every access is checked against the storages that the launch was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numba import NumbaExperimentalFeatureWarning

from impl.executions.isa import core, encoding, hazards
from impl.executions.isa.arithmetic import MODE_FNUZ
from impl.executions.isa.assembly import EXEC, Program, read_lines
from impl.executions.isa.encoding import Encoded
from impl.executions.isa.lanes import compiled, directory, forget
from impl.executions.isa.unsupported import UnsupportedInstruction

Array = np.ndarray[Any, Any]

LDS_LIMIT: Mapping[str, int] = {"gfx942": 65536, "gfx950": 163840}
"""Bytes of LDS of a workgroup."""
MOST_WAVES = 16
"""Waves of a workgroup."""
DEFAULT_LIMIT = 2_000_000_000
"""Wave-instructions after which a launch counts as endless."""

# How a kernel asks to be started, where there is a choice: as Triton's compiler asks.
_DIRECTIVES = {
    "ieee_mode": 1,
    "dx10_clamp": 1,
    "fp16_overflow": 0,
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 3,
    "float_denorm_mode_16_64": 3,
}
# IEEE_MODE, DX10_CLAMP and subnormals kept, as every kernel descriptor here asks.
_MODE = 0x3F0

_SENTENCES = {
    core.OUTSIDE_LOAD: "a load of {more} bytes outside every argument",
    core.OUTSIDE_STORE: "a store of {more} bytes outside every argument",
    core.OUTSIDE_ATOMIC: "an atomic of {more} bytes outside every argument",
    core.UNKNOWN_ADDRESS: "an address or descriptor in {register}, which was never written",
    core.UNKNOWN_STORED: "{register}, which was never written, is stored",
    core.UNKNOWN_CONDITION: "a condition that depends on what was never written",
    core.MISSING_WAIT: "{register} is used before its load was waited for",
    core.LDS_RACE: "LDS byte {address} {race}, with no barrier between that was waited for",
    core.WRITE_RACE: "a byte that workgroup {more} of the same launch wrote too",
    core.READ_OF_STORED: "a byte that workgroup {more} of the same launch stores, with nothing that orders the two",
    core.STORE_OF_READ: "a byte that workgroup {more} of the same launch loads, with nothing that orders the two",
    core.EXEC_EMPTY: "no lane executes, or not every lane where all must",
    core.LDS_OUTSIDE: "an LDS access at byte {address} outside the workgroup's LDS",
    core.SCRATCH_OUTSIDE: "a scratch access at byte {address} outside the lane's scratch",
    core.TRAPPED: "the kernel trapped",
    core.UNKNOWN_READ: "{register}, which was never written, is read",
    core.WRONG_PC: "execution ran out of the kernel's code",
}
_KINDS = {
    core.OUTSIDE_LOAD: "out-of-bounds load",
    core.OUTSIDE_STORE: "out-of-bounds store",
    core.OUTSIDE_ATOMIC: "out-of-bounds atomic",
    core.UNKNOWN_ADDRESS: "unwritten address",
    core.UNKNOWN_STORED: "unwritten value stored",
    core.UNKNOWN_CONDITION: "unwritten condition",
    core.MISSING_WAIT: "missing wait",
    core.LDS_RACE: "LDS race",
    core.WRITE_RACE: "write race",
    core.READ_OF_STORED: "read race",
    core.STORE_OF_READ: "read race",
    core.EXEC_EMPTY: "lanes off",
    core.LDS_OUTSIDE: "out-of-bounds LDS",
    core.SCRATCH_OUTSIDE: "out-of-bounds scratch",
    core.TRAPPED: "trap",
    core.WRONG_PC: "runaway",
    core.UNKNOWN_READ: "unwritten value read",
}


_RACES = {
    core.READS: "is read where another wave wrote it",
    core.WRITES: "is overwritten with another value than another wave wrote or read",
    core.ADDS: "is changed by an atomic where another wave wrote or read it",
}


class MachineFault(Exception):
    """What hardware would not forgive, or would forgive by luck; ``str`` is the whole story in one sentence.

    kind: such as ``missing wait``. instruction: its text. wave, lane: lane is -1 where no single one is to blame. source:
    file and line of the kernel, or empty.
    """

    def __init__(
        self, kind: str, sentence: str, instruction: str, wave: int, lane: int, group: int, source: str
    ) -> None:
        where = f"workgroup {group}, wave {wave}" + (f", lane {lane}" if lane >= 0 else "")
        super().__init__(f"{kind} in {instruction!r}{f' ({source})' if source else ''}, {where}: {sentence}")
        self.kind = kind
        self.instruction = instruction
        self.wave = wave
        self.lane = lane
        self.group = group
        self.source = source


class EndlessLaunch(Exception):
    """A launch executed more instructions than its limit."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A program ready to run. missing: where it first waits too little for what hardware does not wait for itself."""

    program: Program
    encoded: Encoded
    missing: hazards.Missing | None


@functools.cache
def _executor() -> tuple[Any, Any]:
    module = compiled()
    return module.VECTORS, module.scalar


@functools.cache
def warm() -> None:
    """Compiles the executor, or loads what was compiled before; of several processes one compiles and the others wait."""
    with (directory() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _run_nothing()
        except Exception:
            # What was kept may not be what was written, as behind a full disk: it is compiled once more.
            forget()
            _executor.cache_clear()
            _run_nothing()


def _run_nothing() -> None:
    kernel = prepare(read_lines("gfx942", "s_nop 0"))
    run(kernel, State(1, 4, 4, kernel.encoded.grain), [], (1, 1, 1), *_unset())


def prepare(program: Program) -> Kernel:
    """Encodes a program. Raises `UnsupportedInstruction` for what is not modelled."""
    if program.arch not in LDS_LIMIT:
        raise UnsupportedInstruction(f"{program.arch} is not modelled: {' and '.join(LDS_LIMIT)} are")
    for name, value in _DIRECTIVES.items():
        if program.directive(name, value) != value:
            raise UnsupportedInstruction(f".amdhsa_{name} {program.directive(name)}: only {value} is modelled")
    encoded = encoding.encode(program)
    return Kernel(program, encoded, hazards.first_missing(program, encoded))


class State:
    """All registers and memories of one workgroup."""

    def __init__(self, waves: int, lds_bytes: int, scratch_bytes: int, grain: int) -> None:
        self.waves = core.Waves(
            w=np.zeros((waves, core.WAVE_COLUMNS), np.int64),
            v=np.zeros((waves, 512, 64), np.uint32),
            vk=np.zeros((waves, 512), np.uint64),
            half=np.zeros((waves, 2, 512), np.uint64),
            vm=np.zeros((waves, 512), np.int64),
            vl=np.zeros((waves, 512), np.int64),
            s=np.zeros((waves, 132), np.uint32),
            sk=np.zeros((waves, 132), np.uint32),
            sl=np.zeros((waves, 132), np.int64),
        )
        units = lds_bytes // grain + 1
        self.shared = core.Shared(
            np.zeros(lds_bytes, np.uint8),
            np.zeros(lds_bytes, np.uint8),
            np.zeros((6, units), np.int64),
            np.zeros((waves, units), np.int32),
        )
        scratch = (waves, 64, scratch_bytes)
        self.private = core.Private(np.zeros(scratch, np.uint8), np.zeros(scratch, np.uint8))


def run(
    kernel: Kernel,
    state: State,
    regions: Sequence[tuple[int, int]],
    grid: tuple[int, int, int],
    first_v: Array,
    first_s: Array,
    first_sk: Array,
    group_at: Array,
    limit: int = DEFAULT_LIMIT,
    watch_writers: bool = True,
    started: bool = False,
    strict: bool = False,
) -> int:
    """Runs a grid of workgroups over memory; the number of wave-instructions.

    regions: (first address, address behind the last byte) of everything that may be touched, apart from one another.
    started: the state holds the first workgroup's registers already. strict: reading what was never written is a fault in
    itself, not only where it decides something; compilers do read such registers, so that it is a question to ask.
    """
    rows = kernel.encoded.rows
    ordered = sorted(regions) or [(0, 0)]
    low = np.array([start for start, _ in ordered], np.int64)
    high = np.array([end for _, end in ordered], np.int64)
    sizes = (high - low // 4096 * 4096) // 4096 + 1
    page_base = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    page_of = np.zeros(int(sizes.sum()), np.int32)
    pages = np.zeros((512, 4096), np.int32)
    read_page_of, read_pages = np.zeros_like(page_of), np.zeros((512, 1024), np.int32)
    numbers = np.zeros(core.RUN_COLUMNS, np.int64)
    numbers[core.LAST_GROUP] = grid[0] * grid[1] * grid[2]
    numbers[[core.GROUPS_X, core.GROUPS_Y, core.GROUPS_Z]] = grid
    numbers[core.INSTRUCTION_LIMIT] = limit
    numbers[core.FREE_PAGE] = numbers[core.FREE_READ_PAGE] = 1
    numbers[core.STARTED], numbers[core.EPOCH] = int(started), int(started)
    # A workgroup alone meets no other.
    numbers[core.GRAIN] = kernel.encoded.grain
    numbers[core.WATCH_WRITERS] = int(watch_writers and numbers[core.LAST_GROUP] > 1)
    numbers[core.STRICT] = int(strict)
    buffers = np.zeros((7, 256), np.uint32)
    addresses = np.array([buffers[place].ctypes.data for place in range(7)], np.int64)
    scalars = np.zeros(8, np.uint64)
    table = kernel.encoded.matrices
    blocks, m, n, k = (
        max(1, int(table[:, column].max())) for column in (encoding.BLOCKS, encoding.M, encoding.N, encoding.K)
    )
    left, right = np.zeros((blocks, m, k)), np.zeros((blocks, n, k))
    known_left, known_right = np.zeros((blocks, m), np.bool_), np.zeros((blocks, n), np.bool_)
    addend, addend_known = np.zeros((32, 64), np.uint32), np.zeros(32, np.uint64)
    small = np.zeros(16, np.uint8)
    vectors, scalar = _executor()
    mode = mode_of(kernel.program.arch)
    code = core.Code(rows, kernel.encoded.literals, table)
    start = core.Start(first_v, first_s, first_sk, group_at, mode)
    work = core.Work(
        buffers,
        addresses,
        scalars,
        scalars.ctypes.data,
        left,
        right,
        known_left,
        known_right,
        addend,
        addend_known,
        small,
        np.zeros((3, 64), np.int64),
        addresses.copy(),
        np.zeros((2, 64), np.uint32),
        np.zeros(4, np.uint64),
    )
    while True:
        memory = core.Memory(low, high, page_base, page_of, pages, read_page_of, read_pages)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)
            ends = core.run_launch(
                code, state.waves, state.shared, state.private, memory, numbers, work, vectors, scalar, start
            )
        if ends != core.GROW:
            break
        if len(pages) - numbers[core.FREE_PAGE] < 160:
            pages = np.concatenate([pages, np.zeros_like(pages)])
        else:
            read_pages = np.concatenate([read_pages, np.zeros_like(read_pages)])
    if ends == core.FAULT:
        raise _fault(kernel, numbers)
    if ends == core.LIMIT:
        raise EndlessLaunch(f"{kernel.program.name} ran {limit} wave-instructions without an end")
    return int(numbers[core.INSTRUCTIONS])


def named_state(arguments: Sequence[Any]) -> dict[str, Array]:
    """What a call of `core.run_launch` changes, by name: registers of all waves by theirs, LDS and who touched it, `run`."""
    _, waves, shared, _, _, numbers, *_ = arguments
    return {**waves._asdict(), "lds": shared.content, "lds_known": shared.known, "watch": shared.watch,
            "reads": shared.reads, "run": numbers}  # fmt: skip


def run_one(whole: Callable[..., int], arguments: Sequence[Any]) -> int:
    """Lets a call of `core.run_launch` execute one instruction; what it ended with, `core.LIMIT` if nothing was wrong."""
    numbers = named_state(arguments)["run"]
    limit = int(numbers[core.INSTRUCTION_LIMIT])
    numbers[core.INSTRUCTION_LIMIT] = numbers[core.INSTRUCTIONS] + 1
    ends = int(whole(*arguments))
    numbers[core.INSTRUCTION_LIMIT] = limit
    return ends


@contextlib.contextmanager
def launching(by: Callable[..., int]) -> Iterator[None]:
    """While open, `by` stands for `core.run_launch`."""
    whole, core.run_launch = core.run_launch, by
    try:
        yield
    finally:
        core.run_launch = whole


def mode_of(arch: str) -> int:
    """The MODE register as kernels start, and the architecture's 8-bit floats."""
    return _MODE | (MODE_FNUZ if arch == "gfx942" else 0)


def resume(kernel: Kernel, state: State, regions: Sequence[tuple[int, int]]) -> int:
    """Runs one workgroup whose registers are set by hand."""
    warm()
    return run(kernel, state, regions, (1, 1, 1), *_unset(), started=True)


def _unset() -> tuple[Array, Array, Array, Array]:
    """First registers of a workgroup that a launch sets none of."""
    return np.zeros((1, 0, 64), np.uint32), np.zeros(132, np.uint32), np.zeros(132, np.uint32), np.full(3, -1, np.int64)


def _fault(kernel: Kernel, numbers: Array) -> MachineFault:
    kind, pc = int(numbers[core.FAULT_KIND]), int(numbers[core.FAULT_PC])
    instructions = kernel.program.instructions
    at = instructions[pc] if 0 <= pc < len(instructions) else None
    more = int(numbers[core.FAULT_MORE])
    sentence = _SENTENCES[kind].format(
        register=_register(more),
        more=more,
        address=int(numbers[core.FAULT_ADDRESS]),
        race=_RACES.get(more, ""),
    )
    return MachineFault(
        _KINDS[kind], sentence, at.text if at else "?", int(numbers[core.FAULT_WAVE]), int(numbers[core.FAULT_LANE]),
        int(numbers[core.GROUP]), at.source if at else "",
    )  # fmt: skip


def _too_soon(kernel: Kernel, found: hazards.Missing) -> MachineFault:
    at, behind = kernel.program.instructions[found.at], kernel.program.instructions[found.behind]
    used = f"{_register(found.register)} is used" if found.register >= 0 else "it runs"
    states = f"{found.states} wait state{'s' * (found.states != 1)}"
    sentence = f"{used} {states} behind {behind.text!r} of line {behind.line}, and {found.needed} are needed"
    return MachineFault("missing wait states", sentence, at.text, 0, -1, 0, at.source)


def _register(code: int) -> str:
    if code >= encoding.LITERAL_BASE:
        return "a constant"
    if code >= encoding.SCALAR_BASE:
        names = {106: "vcc_lo", 107: "vcc_hi", 124: "m0", EXEC: "exec_lo", EXEC + 1: "exec_hi"}
        return names.get(code - encoding.SCALAR_BASE, f"s{code - encoding.SCALAR_BASE}")
    return f"a{code - 256}" if code >= 256 else f"v{code}"


def launch(
    kernel: Kernel,
    arguments: Sequence[tuple[str, int | float]],
    regions: Sequence[tuple[int, int]],
    grid: tuple[int, int, int],
    waves: int,
    shared: int,
    limit: int = DEFAULT_LIMIT,
    watch_writers: bool = True,
    strict: bool = False,
) -> int:
    """A launch as the driver would do it; the number of wave-instructions.

    arguments: (type, value) of each in order: ``i32``, ``fp32``, ..., pointers as ``*`` with an address. shared: bytes of
    dynamic LDS. Raises `MachineFault`, `EndlessLaunch`.
    """
    if kernel.missing is not None:
        raise _too_soon(kernel, kernel.missing)
    if waves > MOST_WAVES:
        raise UnsupportedInstruction(
            f"{waves} waves in a workgroup: it has {MOST_WAVES} at most, which are 1,024 lanes"
        )
    program = kernel.program
    segment = _arguments(program, arguments, grid, waves)
    lds = shared + program.directive("group_segment_fixed_size")
    if lds > LDS_LIMIT[program.arch]:
        raise UnsupportedInstruction(f"{lds} bytes of LDS: {program.arch} has {LDS_LIMIT[program.arch]}")
    state = State(waves, max(lds, 4), max(program.directive("private_segment_fixed_size"), 4), kernel.encoded.grain)
    first_v = np.zeros((waves, 1, 64), np.uint32)
    for wave in range(waves):
        first_v[wave, 0] = 64 * wave + np.arange(64, dtype=np.uint32)
    first_s = np.zeros(132, np.uint32)
    first_sk = np.zeros(132, np.uint32)
    group_at = _first_scalars(program, segment.ctypes.data, first_s, first_sk)
    own = (segment.ctypes.data, segment.ctypes.data + segment.nbytes)
    warm()
    return run(
        kernel, state, [*regions, own], grid, first_v, first_s, first_sk, group_at, limit, watch_writers, strict=strict
    )


def _first_scalars(program: Program, segment: int, first_s: Array, first_sk: Array) -> Array:
    """Puts the argument segment's address where the descriptor wants it; where the workgroup's numbers go."""
    place = 0
    for name, size in (
        ("user_sgpr_private_segment_buffer", 4), ("user_sgpr_dispatch_ptr", 2), ("user_sgpr_queue_ptr", 2),
        ("user_sgpr_kernarg_segment_ptr", 2), ("user_sgpr_dispatch_id", 2), ("user_sgpr_flat_scratch_init", 2),
        ("user_sgpr_private_segment_size", 1),
    ):  # fmt: skip
        if not program.directive(name, int(name == "user_sgpr_kernarg_segment_ptr")):
            continue
        if name == "user_sgpr_kernarg_segment_ptr":
            first_s[place : place + 2] = segment & 0xFFFFFFFF, segment >> 32
            first_sk[place : place + 2] = 0xFFFFFFFF
        place += size
    place = program.directive("user_sgpr_count", place)
    group_at = np.full(3, -1, np.int64)
    for axis, letter in enumerate("xyz"):
        if program.directive(f"system_sgpr_workgroup_id_{letter}", int(letter == "x")):
            group_at[axis] = place
            place += 1
    return group_at


_FORMATS = {"i1": "<B", "u1": "<B", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q",
            "u64": "<Q", "fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}  # fmt: skip


def _arguments(
    program: Program, arguments: Sequence[tuple[str, int | float]], grid: tuple[int, int, int], waves: int
) -> Array:
    """The argument segment: the kernel's own arguments in order, then what the compiler's hidden ones ask for."""
    data = bytearray()
    for kind, value in arguments:
        form = "<Q" if kind.startswith("*") else _FORMATS.get(kind)
        if form is None:
            raise UnsupportedInstruction(f"an argument of type {kind} is not modelled")
        size = struct.calcsize(form)
        data += bytes(-len(data) % size)
        data += struct.pack(form, _wrapped(form, value))
    data += bytes(max(program.argument_bytes, program.directive("kernarg_size"), len(data)) + 64 - len(data))
    hidden = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)}
    hidden |= {
        "hidden_group_size_x": 64 * waves,
        "hidden_group_size_y": 1,
        "hidden_group_size_z": 1,
        "hidden_grid_dims": 3,
    }
    for argument in program.arguments:
        if argument.kind in hidden:
            data[argument.offset : argument.offset + argument.size] = hidden[argument.kind].to_bytes(
                argument.size, "little"
            )
    return np.frombuffer(bytes(data), np.uint8).copy()


def _wrapped(form: str, value: int | float) -> int | float:
    if form in ("<f", "<e", "<d"):
        return float(value)
    size = struct.calcsize(form)
    whole = int(value) & ((1 << (8 * size)) - 1)
    return whole - (1 << (8 * size)) if form[1].islower() and whole >> (8 * size - 1) else whole
