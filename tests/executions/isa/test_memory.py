"""Do loads, stores and atomics touch the bytes that the document names, and nothing when they are out of range or off?

"ISA" is AMD's "CDNA4 Instruction Set Architecture Reference Guide": buffers 9.1.5, loads into LDS 9.1.9, float atomics 9.2,
flat and global 10.3, LDS 11.3, transposing reads 11.4. The atomics' meaning is the published pseudocode.
"""

from __future__ import annotations

import random
import re
import struct
from typing import Any

import numpy as np
import pytest
from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

from impl.executions.isa.coverage import modelled
from impl.executions.isa.single import run_lines
from tests.executions.isa import functions, lane_runs
from tests.executions.isa.assembler import accepts
from tests.executions.isa.pseudocode import Run, Value, whole
from tests.executions.isa.statements import ARCHS, Result
from tests.executions.isa.test_lanes import on, scalars

Array = np.ndarray[Any, Any]
ALL = (1 << 64) - 1
SOME = 0x7FFFF00F0FF0FFFE
LDS_WAIT, MEMORY_WAIT = "\ns_waitcnt lgkmcnt(0)", "\ns_waitcnt vmcnt(0)"
ADDRESS, DATA, SECOND, DESTINATION = 4, 8, 16, 24

KINDS = {"ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True), "dword": (4, False),
         "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False)}  # fmt: skip


def noise(seed: int, count: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def registers(seed: int = 50) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 32, (512, 64), dtype=np.uint32)


def wide(first: int, count: int) -> str:
    return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"


def number(data: bytes, signed: bool = False) -> int:
    return int.from_bytes(data, "little", signed=signed)


def lane_bits(vgpr: Array, first: int, lane: int, count: int) -> bytes:
    return b"".join(int(vgpr[first + k, lane]).to_bytes(4, "little") for k in range(count))


def put64(vgpr: Array, first: int, values: list[int]) -> None:
    for lane, value in enumerate(values):
        vgpr[first, lane], vgpr[first + 1, lane] = value & 0xFFFFFFFF, value >> 32


# ------------------------------------------------------------------------------------------------------ LDS

LDS_KINDS = {"u8": (1, False), "i8": (1, True), "u16": (2, False), "i16": (2, True), "b32": (4, False), "b64": (8, False),
             "b96": (12, False), "b128": (16, False)}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", LDS_KINDS)
def test_lds_reads(arch: str, kind: str) -> None:
    size, signed = LDS_KINDS[kind]
    if arch not in modelled().get(f"ds_read_{kind}", ()):
        pytest.skip("not modelled")
    memory, before = noise(51, 8192), registers()
    before[ADDRESS] = np.random.default_rng(52).permutation(256)[:64] * 16
    count = max(1, size // 4)
    for offset, enabled in ((0, ALL), (4016, SOME)):
        line = f"ds_read_{kind} {wide(DESTINATION, count)}, v{ADDRESS}{f' offset:{offset}' if offset else ''}"
        after = run_lines(arch, line + LDS_WAIT, vgpr=before, sgpr=scalars(enabled), lds=memory.tobytes()).vgpr
        for lane in range(64):
            at = int(before[ADDRESS, lane]) + offset
            value = number(memory[at : at + size].tobytes(), signed) & ((1 << (32 * count)) - 1)
            want = value if on(enabled, lane) else number(lane_bits(before, DESTINATION, lane, count))
            assert number(lane_bits(after, DESTINATION, lane, count)) == want, (line, lane)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("kind", "size", "shift"), [("b8", 1, 0), ("b16", 2, 0), ("b8_d16_hi", 1, 16), ("b16_d16_hi", 2, 16),
                                                     ("b32", 4, 0), ("b64", 8, 0), ("b96", 12, 0), ("b128", 16, 0)])  # fmt: skip
def test_lds_writes(arch: str, kind: str, size: int, shift: int) -> None:
    memory, before = noise(53, 8192), registers()
    before[ADDRESS] = np.random.default_rng(54).permutation(256)[:64] * 16
    count = max(1, size // 4)
    line = f"ds_write_{kind} v{ADDRESS}, {wide(DATA, count)} offset:32"
    after = run_lines(arch, line + LDS_WAIT, vgpr=before, sgpr=scalars(SOME), lds=memory.tobytes()).lds
    want = bytearray(memory.tobytes())
    for lane in range(64):
        if on(SOME, lane):
            at = int(before[ADDRESS, lane]) + 32
            want[at : at + size] = (number(lane_bits(before, DATA, lane, count)) >> shift).to_bytes(16, "little")[:size]
    assert after[: len(want)] == bytes(want)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("kind", "size"), [("2_b32", 4), ("2_b64", 8), ("2st64_b32", 4), ("2st64_b64", 8)])
def test_lds_pairs_count_offsets_in_elements_or_64_of_them(arch: str, kind: str, size: int) -> None:
    memory, before = noise(55, 65536), registers()
    before[ADDRESS] = np.random.default_rng(56).permutation(64) * 8
    step, count = size * (64 if "st64" in kind else 1), size // 4
    first, second = (3, 9) if "st64" in kind else (100, 255)
    line = f"ds_read{kind} {wide(DESTINATION, 2 * count)}, v{ADDRESS} offset0:{first} offset1:{second}"
    after = run_lines(arch, line + LDS_WAIT, vgpr=before, sgpr=scalars(SOME), lds=memory.tobytes()).vgpr
    for lane in range(64):
        base = int(before[ADDRESS, lane])
        parts = [memory[base + step * offset :][:size].tobytes() for offset in (first, second)]
        want = b"".join(parts) if on(SOME, lane) else lane_bits(before, DESTINATION, lane, 2 * count)
        assert lane_bits(after, DESTINATION, lane, 2 * count) == want
    # Lanes apart, so that no two write the same bytes.
    before[ADDRESS] = np.arange(64) * (2 * size)
    line = f"ds_write{kind} v{ADDRESS}, {wide(DATA, count)}, {wide(SECOND, count)} offset0:0 offset1:1"
    if "st64" in kind:
        before[ADDRESS] = np.arange(64) * size
    changed = run_lines(arch, line + LDS_WAIT, vgpr=before, sgpr=scalars(SOME), lds=memory.tobytes()).lds
    want_memory = bytearray(memory.tobytes())
    for lane in range(64):
        if on(SOME, lane):
            for data, offset in ((DATA, 0), (SECOND, 1)):
                at = int(before[ADDRESS, lane]) + step * offset
                want_memory[at : at + size] = lane_bits(before, data, lane, count)
    assert changed[: len(want_memory)] == bytes(want_memory)


@pytest.mark.parametrize(
    ("kind", "width", "count"), [("tr_b16", 16, 2), ("tr_b8", 8, 2), ("tr_b4", 4, 2), ("b96_tr_b6", 6, 3)]
)
def test_transposing_reads_give_each_lane_a_column_of_its_sixteen_lanes(kind: str, width: int, count: int) -> None:
    """The bits that sixteen lanes address, read on as rows of sixteen elements; lane c of them gets column c (ISA 11.4)."""
    name = f"ds_read_{kind}" if kind.startswith("b96") else f"ds_read_b64_{kind}"
    if "gfx950" not in modelled().get(name, ()):
        pytest.skip("not modelled")
    memory, before = noise(57, 16384), registers()
    bytes_each = 4 * count
    before[ADDRESS] = np.random.default_rng(58).permutation(512)[:64] * 16
    line = f"{name} {wide(DESTINATION, count)}, v{ADDRESS} offset:64"
    assert accepts("gfx950", line)
    after = run_lines("gfx950", line + LDS_WAIT, vgpr=before, sgpr=scalars(ALL), lds=memory.tobytes()).vgpr
    for group in range(0, 64, 16):
        stream = 0
        for k in range(16):
            at = int(before[ADDRESS, group + k]) + 64
            stream |= number(memory[at : at + bytes_each].tobytes()) << (8 * bytes_each * k)
        rows = bytes_each * 8 // width
        for column in range(16):
            want = sum(
                ((stream >> (width * (16 * row + column))) & ((1 << width) - 1)) << (width * row) for row in range(rows)
            )
            assert number(lane_bits(after, DESTINATION, group + column, count)) == want, (group, column)


@pytest.mark.parametrize("arch", ARCHS)
def test_lds_out_of_range_is_reported_or_reads_nothing(arch: str) -> None:
    """ISA 3.6.1: "Writes out-of-range are discarded; reads return the value zero". No correct program relies on it."""
    before = registers()
    before[ADDRESS] = 1 << 20
    try:
        wave = run_lines(arch, f"ds_read_b32 v{DESTINATION}, v{ADDRESS}" + LDS_WAIT, vgpr=before, lds=bytes(64))
    except Exception as fault:
        assert "MachineFault" in type(fault).__name__
    else:
        assert (wave.vgpr[DESTINATION] == 0).all()


# ------------------------------------------------------------------------------------------------------ LDS atomics


def _lds_atomics() -> dict[str, Any]:
    found = {}
    for op, text in PCODE.items():
        name = op.name.lower()
        if (
            type(op).__name__ != "DSOp"
            or "RETURN_DATA" not in text
            or re.search(r"read|write|wrxchg2|permute|swizzle|append|condxchg|wrap", name)
        ):
            continue
        found[name] = (op, text)
    return found


ATOMICS = _lds_atomics()


def _atomic_line(name: str) -> str:
    op, _ = ATOMICS[name]
    fields = OPERANDS[op]
    count = fields["data0"][1] // 32
    operands = [wide(DESTINATION, count)] if "vdst" in fields else []
    operands += [f"v{ADDRESS}", wide(DATA, count)] + ([wide(SECOND, count)] if "data1" in fields else [])
    return f"{name} {', '.join(operands)} offset:8"


def _stated_atomic(text: str, name: str, data: int, data2: int, old: int, width: int) -> tuple[int, int]:
    """(memory afterwards, returned) by the pseudocode."""
    text = re.sub(r"addr = CalcDsAddr\([^)]*\);", "", text).replace("MEM[addr]", "MEM[ADDR]")
    names = functions.constants() | {
        "ADDR": whole(0, 32, "u"), "DATA": Value(data, width, "b"), "DATA2": Value(data2, width, "b"),
        "RETURN_DATA": Value(0, width, "b"),
    }  # fmt: skip
    text = re.sub(r"MEM\[ADDR\](?!\.)", f"MEM[ADDR].b{width}", text)
    run = Run(names, functions.named("gfx950"), memory={k: (old >> (8 * k)) & 255 for k in range(width // 8)}).execute(
        text
    )
    assert run.memory is not None
    return sum(byte << (8 * k) for k, byte in run.memory.items()), run.names["RETURN_DATA"].bits


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ATOMICS)
def test_lds_atomics(arch: str, name: str) -> None:
    line = _atomic_line(name)
    if arch not in modelled().get(name, ()):
        pytest.skip("not modelled")
    assert accepts(arch, line)
    op, text = ATOMICS[name]
    width = OPERANDS[op]["data0"][1]
    count, floats = width // 32, re.search(r"_f(32|64)$", name)
    generator = random.Random(name)

    def drawn() -> int:
        if floats:
            return number(
                struct.pack(
                    "<f" if width == 32 else "<d",
                    generator.choice([0.0, -0.0, 1.5, -2.25, 1e30, generator.gauss(0, 10)]),
                )
            )
        return generator.choice([0, 1, 5, (1 << width) - 1, 1 << (width - 1), generator.getrandbits(width)])

    before, memory = registers(), bytearray(2048)
    before[ADDRESS] = np.arange(64) * 16
    rows = [(drawn(), drawn(), drawn()) for _ in range(64)]
    for lane, (data, data2, old) in enumerate(rows):
        data = old if "cmpst" in name and lane % 2 else data
        rows[lane] = (data, data2, old)
        for first, bits in ((DATA, data), (SECOND, data2)):
            for k in range(count):
                before[first + k, lane] = (bits >> (32 * k)) & 0xFFFFFFFF
        memory[16 * lane + 8 : 16 * lane + 8 + width // 8] = old.to_bytes(width // 8, "little")
    wave = run_lines(arch, line + LDS_WAIT, vgpr=before, sgpr=scalars(SOME), lds=bytes(memory))
    for lane, (data, data2, old) in enumerate(rows):
        left, returned = _stated_atomic(text, name, data, data2, old, width)
        got = number(wave.lds[16 * lane + 8 : 16 * lane + 8 + width // 8])
        want = left if on(SOME, lane) else old
        nan_width = -16 if name.endswith("_bf16") else 16 if name.endswith("_f16") else width if floats else 0
        assert lane_runs.agrees(got, Result(want, (1 << width) - 1, None, nan_width)), (
            f"{line}, lane {lane}: {rows[lane]}: {got:#x}, should be {want:#x}"
        )
        if "_rtn" in name and on(SOME, lane):
            assert number(lane_bits(wave.vgpr, DESTINATION, lane, count)) == returned == old


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics_of_lanes_with_one_address_all_count(arch: str) -> None:
    before = registers()
    before[ADDRESS] = 16
    before[DATA] = np.arange(64) + 1
    wave = run_lines(arch, f"ds_add_u32 v{ADDRESS}, v{DATA}" + LDS_WAIT, vgpr=before, lds=bytes(64))
    assert number(wave.lds[16:20]) == 64 * 65 // 2


# ------------------------------------------------------------------------------------------------------ memory


def aligned(count: int, seed: int) -> Array:
    return np.ascontiguousarray(noise(seed, count + 64))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", ["global", "flat"])
def test_loads_by_address(arch: str, kind: str, space: str) -> None:
    size, signed = KINDS[kind]
    memory, before = aligned(4096, 60), registers()
    base, count = memory.ctypes.data, max(1, size // 4)
    offsets = [int(x) * 16 + 128 for x in np.random.default_rng(61).permutation(200)[:64]]
    put64(before, ADDRESS, [base + offset for offset in offsets])
    tail = ", off offset:-96" if space == "global" else " offset:32"
    shift = -96 if space == "global" else 32
    line = f"{space}_load_{kind} {wide(DESTINATION, count)}, v[{ADDRESS}:{ADDRESS + 1}]{tail}"
    wait = MEMORY_WAIT + (" lgkmcnt(0)" if space == "flat" else "")
    after = run_lines(arch, line + wait, vgpr=before, sgpr=scalars(SOME), memory={base: memory}).vgpr
    for lane, offset in enumerate(offsets):
        value = number(memory[offset + shift :][:size].tobytes(), signed) & ((1 << (32 * count)) - 1)
        want = value if on(SOME, lane) else number(lane_bits(before, DESTINATION, lane, count))
        assert number(lane_bits(after, DESTINATION, lane, count)) == want, (line, lane)


@pytest.mark.parametrize("arch", ARCHS)
def test_global_addresses_from_a_scalar_base_take_32_unsigned_bits_of_offset(arch: str) -> None:
    memory, before = aligned(4096, 62), registers()
    base = memory.ctypes.data
    before[ADDRESS] = np.random.default_rng(63).permutation(1000)[:64] * 4
    low = base - 0x80000000  # the offset's top bit is no sign
    before[ADDRESS] += np.uint32(0x80000000)
    # Below zero where the memory lies low: addresses wrap.
    sgpr = scalars(SOME, s8=low & 0xFFFFFFFF, s9=low >> 32 & 0xFFFFFFFF)
    line = f"global_load_dword v{DESTINATION}, v{ADDRESS}, s[8:9] offset:16"
    after = run_lines(arch, line + MEMORY_WAIT, vgpr=before, sgpr=sgpr, memory={base: memory}).vgpr
    for lane in range(64):
        at = int(before[ADDRESS, lane]) - 0x80000000 + 16
        assert after[DESTINATION, lane] == (
            number(memory[at : at + 4].tobytes()) if on(SOME, lane) else before[DESTINATION, lane]
        )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("kind", "size", "shift"),
    [("byte", 1, 0), ("short", 2, 0), ("byte_d16_hi", 1, 16), ("short_d16_hi", 2, 16), ("dword", 4, 0), ("dwordx2", 8, 0),
     ("dwordx3", 12, 0), ("dwordx4", 16, 0)],
)  # fmt: skip
@pytest.mark.parametrize("space", ["global", "buffer"])
def test_stores(arch: str, kind: str, size: int, shift: int, space: str) -> None:
    memory, before = aligned(4096, 64), registers()
    original, base, count = memory.tobytes(), memory.ctypes.data, max(1, size // 4)
    before[ADDRESS] = np.random.default_rng(65).permutation(250)[:64] * 16
    where = (
        f"v{ADDRESS}, {wide(DATA, count)}, s[8:9]"
        if space == "global"
        else f"{wide(DATA, count)}, v{ADDRESS}, s[8:11], 0 offen"
    )
    sgpr = scalars(SOME, s8=base & 0xFFFFFFFF, s9=base >> 32, s10=0x7FFFFFFE, s11=0x27000)
    run_lines(
        arch, f"{space}_store_{kind} {where} offset:16" + MEMORY_WAIT, vgpr=before, sgpr=sgpr, memory={base: memory}
    )
    want = bytearray(original)
    for lane in range(64):
        if on(SOME, lane):
            at = int(before[ADDRESS, lane]) + 16
            want[at : at + size] = (number(lane_bits(before, DATA, lane, count)) >> shift).to_bytes(16, "little")[:size]
    assert memory.tobytes() == bytes(want)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", KINDS)
def test_buffer_loads_check_each_dword_without_the_scalar_offset(arch: str, kind: str) -> None:
    """ "Out of Range if: (InstOffset + (OffEN ? vgpr_offset : 0)) >= NumRecords ... Load/store-Dword-x{2,3,4} and range-check
    per component ... reads return zero" (ISA 9.1.5.1); `sgpr_offset` moves the address and is not checked."""
    size, signed = KINDS[kind]
    memory, before = aligned(8192, 66), registers()
    base, count, records, scalar = memory.ctypes.data, max(1, size // 4), 2000, 1024
    offsets = [int(x) * 4 for x in np.random.default_rng(67).integers(0, 520, 58)] + [
        1984,
        1988,
        1992,
        1996,
        0x80000000,
        0xFFFFFF00,
    ]
    before[ADDRESS] = np.array(offsets, np.uint32)
    sgpr = scalars(SOME, s8=base & 0xFFFFFFFF, s9=base >> 32, s10=records, s11=0x27000, s12=scalar)
    line = f"buffer_load_{kind} {wide(DESTINATION, count)}, v{ADDRESS}, s[8:11], s12 offen offset:4"
    after = run_lines(arch, line + MEMORY_WAIT, vgpr=before, sgpr=sgpr, memory={base: memory}).vgpr
    for lane, offset in enumerate(offsets):
        if not on(SOME, lane):
            assert lane_bits(after, DESTINATION, lane, count) == lane_bits(before, DESTINATION, lane, count)
            continue
        parts = []
        for k in range(count):
            at = offset + 4 + 4 * k
            data = memory[scalar + at :][: min(size, 4)].tobytes() if at < records else bytes(min(size, 4))
            parts.append((number(data, signed) & 0xFFFFFFFF).to_bytes(4, "little"))
        assert lane_bits(after, DESTINATION, lane, count) == b"".join(parts), f"{line}, offset {offset}"


@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_stores_out_of_range_are_dropped_by_dword(arch: str) -> None:
    memory, before = aligned(4096, 68), registers()
    original, base, records = memory.tobytes(), memory.ctypes.data, 1000
    before[ADDRESS] = np.arange(64) * 16 + 12
    before[ADDRESS, 63] = 0x80000000
    sgpr = scalars(ALL, s8=base & 0xFFFFFFFF, s9=base >> 32, s10=records, s11=0x27000)
    run_lines(
        arch,
        f"buffer_store_dwordx4 {wide(DATA, 4)}, v{ADDRESS}, s[8:11], 0 offen" + MEMORY_WAIT,
        vgpr=before,
        sgpr=sgpr,
        memory={base: memory},
    )
    want = bytearray(original)
    for lane in range(63):
        for k in range(4):
            at = int(before[ADDRESS, lane]) + 4 * k
            if at < records:
                want[at : at + 4] = int(before[DATA + k, lane]).to_bytes(4, "little")
    assert memory.tobytes() == bytes(want)


@pytest.mark.parametrize(
    ("arch", "kind", "size"),
    [("gfx942", "dword", 4), ("gfx950", "dword", 4), ("gfx950", "dwordx3", 12), ("gfx950", "dwordx4", 16)],
)
def test_buffer_loads_into_lds_lie_lane_by_lane_from_m0(arch: str, kind: str, size: int) -> None:
    """ "LDS_offset = M0 ... TIDinWave * 4"; "for data-size of 3 or 4 dwords ... TIDinWave * 16 ... LOAD_DWORDX3 writes 3 dwords
    and skips the 4th" (ISA 9.1.9); out of range, zero is written."""
    memory, before = aligned(8192, 69), registers()
    lds, base = noise(70, 4096), memory.ctypes.data
    before[ADDRESS] = np.random.default_rng(71).permutation(400)[:64] * 16
    before[ADDRESS, 5] = 0x80000000
    line = f"buffer_load_{kind} v{ADDRESS}, s[8:11], s12 offen offset:32 lds"
    assert accepts(arch, line)
    sgpr = scalars(SOME, s8=base & 0xFFFFFFFF, s9=base >> 32, s10=0x7FFFFFFE, s11=0x27000, s12=16)
    sgpr[124] = 512
    got = run_lines(
        arch, "s_nop 0\n" + line + MEMORY_WAIT, vgpr=before, sgpr=sgpr, lds=lds.tobytes(), memory={base: memory}
    ).lds
    want, step = bytearray(lds.tobytes()), 4 if size == 4 else 16
    for lane in range(64):
        if on(SOME, lane):
            at, to = int(before[ADDRESS, lane]) + 32 + 16, 512 + 32 + lane * step
            want[to : to + size] = bytes(size) if lane == 5 else memory[at : at + size].tobytes()
    assert got[: len(want)] == bytes(want)


GLOBAL_ATOMICS = {"add": "u", "sub": "u", "smin": "i", "umin": "u", "smax": "i", "umax": "u", "and": "u", "or": "u", "xor": "u",
                  "inc": "u", "dec": "u", "swap": "u", "cmpswap": "u"}  # fmt: skip


def _atomic(name: str, old: int, data: int, compare: int, width: int) -> int:
    mask = (1 << width) - 1

    def signed(x: int) -> int:
        return x - (1 << width) if x >> (width - 1) else x

    return {
        "add": old + data, "sub": old - data, "smin": min(old, data, key=signed), "umin": min(old, data),
        "smax": max(old, data, key=signed), "umax": max(old, data), "and": old & data, "or": old | data,
        "xor": old ^ data, "inc": 0 if old >= data else old + 1,
        "dec": data if old == 0 or old > data else old - 1, "swap": data, "cmpswap": data if old == compare else old,
    }[name] & mask  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", GLOBAL_ATOMICS)
@pytest.mark.parametrize("space", ["global", "buffer"])
def test_memory_atomics(arch: str, name: str, width: int, returns: bool, space: str) -> None:
    """`sc0` returns the value before. Of cmpswap the first half of the data is the new value, the second what to compare with."""
    memory, before = aligned(4096, 72), registers()
    base, count = memory.ctypes.data, width // 32
    generator = random.Random(f"{name}{width}")
    before[ADDRESS] = np.arange(64) * 16
    rows = []
    for lane in range(64):
        old, data, compare = (
            generator.choice([0, 1, (1 << width) - 1, 1 << (width - 1), generator.getrandbits(width)]) for _ in range(3)
        )
        compare = old if lane % 2 else compare
        rows.append((old, data, compare))
        memory[16 * lane : 16 * lane + width // 8] = np.frombuffer(old.to_bytes(width // 8, "little"), np.uint8)
        for k in range(count):
            before[DATA + k, lane] = (data >> (32 * k)) & 0xFFFFFFFF
            before[DATA + count + k, lane] = (compare >> (32 * k)) & 0xFFFFFFFF
    taken = wide(DATA, count * (2 if name == "cmpswap" else 1))
    where = f"v{ADDRESS}, {taken}, s[8:9]" if space == "global" else f"{taken}, v{ADDRESS}, s[8:11], 0 offen"
    result = f"{wide(DESTINATION, count)}, " if returns and space == "global" else ""
    line = f"{space}_atomic_{name}{'_x2' if width == 64 else ''} {result}{where}{' sc0' if returns else ''}"
    assert accepts(arch, line)
    sgpr = scalars(SOME, s8=base & 0xFFFFFFFF, s9=base >> 32, s10=0x7FFFFFFE, s11=0x27000)
    after = run_lines(arch, line + MEMORY_WAIT, vgpr=before, sgpr=sgpr, memory={base: memory}).vgpr
    for lane, (old, data, compare) in enumerate(rows):
        want = _atomic(name, old, data, compare, width) if on(SOME, lane) else old
        assert number(memory[16 * lane : 16 * lane + width // 8].tobytes()) == want, (line, lane, rows[lane])
        if returns and on(SOME, lane):
            assert number(lane_bits(after, DESTINATION if space == "global" else DATA, lane, count)) == old


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("add_f32", np.float32),
        ("add_f64", np.float64),
        ("min_f64", np.float64),
        ("max_f64", np.float64),
        ("pk_add_f16", np.float16),
    ],
)
@pytest.mark.parametrize("space", ["global", "buffer"])
def test_float_atomics(arch: str, name: str, dtype: Any, space: str) -> None:
    if arch not in modelled().get(f"{space}_atomic_{name}", ()):
        pytest.skip("not modelled")
    memory, before = aligned(4096, 73), registers()
    base, size = memory.ctypes.data, 8 if dtype is np.float64 else 4
    generator = np.random.default_rng(74)
    old, data = (generator.normal(size=(64, size // np.dtype(dtype).itemsize)).astype(dtype) * 8 for _ in range(2))
    before[ADDRESS] = np.arange(64) * 16
    for lane in range(64):
        memory[16 * lane : 16 * lane + size] = old[lane].view(np.uint8)
        before[DATA : DATA + size // 4, lane] = data[lane].view(np.uint32)
    taken = wide(DATA, size // 4)
    where = f"v{ADDRESS}, {taken}, s[8:9]" if space == "global" else f"{taken}, v{ADDRESS}, s[8:11], 0 offen"
    sgpr = scalars(SOME, s8=base & 0xFFFFFFFF, s9=base >> 32, s10=0x7FFFFFFE, s11=0x27000)
    run_lines(arch, f"{space}_atomic_{name} {where}" + MEMORY_WAIT, vgpr=before, sgpr=sgpr, memory={base: memory})
    operation = {"min": np.minimum, "max": np.maximum}.get(name.split("_")[0], np.add)
    for lane in range(64):
        want = operation(old[lane], data[lane]) if on(SOME, lane) else old[lane]
        assert memory[16 * lane : 16 * lane + size].tobytes() == want.astype(dtype).tobytes()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("kind", "count"), [("dword", 1), ("dwordx2", 2), ("dwordx4", 4), ("dwordx8", 8), ("dwordx16", 16)]
)
def test_scalar_loads(arch: str, kind: str, count: int) -> None:
    memory = aligned(4096, 75)
    base = memory.ctypes.data
    assert base % 4 == 0
    destination = "s16" if count == 1 else f"s[16:{16 + count - 1}]"
    for tail, offset in (("0x40", 0x40), ("s10", 256)):
        sgpr = scalars(0, s8=base & 0xFFFFFFFF, s9=base >> 32, s10=256)
        wave = run_lines(
            arch, f"s_load_{kind} {destination}, s[8:9], {tail}" + LDS_WAIT, sgpr=sgpr, memory={base: memory}
        )
        assert wave.sgpr[16 : 16 + count].tobytes() == memory[offset : offset + 4 * count].tobytes()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "size", "signed", "high"), [
    ("ubyte_d16", 1, False, False), ("ubyte_d16_hi", 1, False, True), ("sbyte_d16", 1, True, False),
    ("sbyte_d16_hi", 1, True, True), ("short_d16", 2, False, False), ("short_d16_hi", 2, False, True),
])  # fmt: skip
def test_half_register_loads_fill_their_half(arch: str, name: str, size: int, signed: bool, high: bool) -> None:
    """The other half: kept, or zero where memory has ECC (ISA 9.1.6). Compilers for these architectures rely on neither."""
    memory, before = aligned(1024, 76), registers()
    base = memory.ctypes.data
    before[ADDRESS] = np.arange(64) * 4
    sgpr = scalars(ALL, s8=base & 0xFFFFFFFF, s9=base >> 32)
    after = run_lines(
        arch,
        f"global_load_{name} v{DESTINATION}, v{ADDRESS}, s[8:9]" + MEMORY_WAIT,
        vgpr=before,
        sgpr=sgpr,
        memory={base: memory},
    ).vgpr
    for lane in range(64):
        want = number(memory[4 * lane : 4 * lane + size].tobytes(), signed) & 0xFFFF
        got = int(after[DESTINATION, lane])
        other, kept = (
            (got & 0xFFFF, int(before[DESTINATION, lane]) & 0xFFFF)
            if high
            else (got >> 16, int(before[DESTINATION, lane]) >> 16)
        )
        assert (got >> 16 if high else got & 0xFFFF) == want and other in (0, kept)
