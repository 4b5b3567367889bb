"""Does every watcher of the machine see what it is there for, say where, and keep quiet otherwise?

Kernels of a few lines, written by hand; `; <<` marks the line that must be blamed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from impl.executions.isa import machine
from impl.executions.isa.assembly import read
from impl.executions.isa.machine import EndlessLaunch, MachineFault
from impl.executions.isa.single import run_lines
from impl.executions.isa.unsupported import UnsupportedInstruction
from tests.executions.isa.kernel_text import FILE, kernel_text, launched

# numba says on every call that passing compiled functions is new.
pytestmark = pytest.mark.filterwarnings("ignore:First-class function type feature")

# Memory of 1024 bytes at s[6:7]; a descriptor of its first 512 in s[12:15]; v1 is four times the lane's number among the
# workgroup's, s8 the first such number of the wave, and SCC says that the wave is not the first.
PROLOGUE = """
s_load_dwordx2 s[6:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
v_readfirstlane_b32 s8, v0
s_waitcnt lgkmcnt(0)
s_mov_b64 s[12:13], s[6:7]
s_movk_i32 s14, 0x200
s_mov_b32 s15, 0x27000
s_cmp_lg_u32 s8, 0
""".strip()
MARK = "; <<"
_LINES = len(PROLOGUE.splitlines())


@dataclass(frozen=True)
class Watched:
    """A kernel behind the prologue and how it is launched; of one that must end with a fault, what the fault says.

    says: words of the sentence. where: workgroup, wave and lane as they are told.
    """

    code: str
    kind: str = ""
    says: str = ""
    where: str = "workgroup 0, wave 0"
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The whole code."""
        return f"{PROLOGUE}\n{self.code.strip()}"

    @property
    def blamed(self) -> tuple[str, str]:
        """The marked instruction and its source line."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if line.endswith(MARK):
                return line.removesuffix(MARK).strip(), f"{FILE}:{number}"
        raise ValueError("no line is marked")


def outside(verb: str, code: str, size: int, lane: int, **how: Any) -> Watched:
    """An access outside memory."""
    article = "an" if verb == "atomic" else "a"
    where = "workgroup 0, wave 0" + (f", lane {lane}" if lane >= 0 else "")
    return Watched(
        code, f"out-of-bounds {verb}", f"{article} {verb} of {size} bytes outside every argument", where, how
    )


def unwritten(code: str, register: str, lane: int = 0, **how: Any) -> Watched:
    """An address of which a lane was never written."""
    where = "workgroup 0, wave 0" + (f", lane {lane}" if lane >= 0 else "")
    return Watched(code, "unwritten address", f"in {register}, which was never written", where, how)


def stored(code: str, register: str, lane: int = 0, **how: Any) -> Watched:
    """Stored data of which a lane was never written."""
    return Watched(code, "unwritten value stored", f"{register}, which was never written, is stored",
                   f"workgroup 0, wave 0, lane {lane}", how)  # fmt: skip


def undecided(code: str, **how: Any) -> Watched:
    """A condition that was never written."""
    return Watched(code, "unwritten condition", "a condition that depends on what was never written", how=how)


def unwaited(code: str, register: str, **how: Any) -> Watched:
    """A load's result before its wait."""
    return Watched(code, "missing wait", f"{register} is used before its load was waited for", how=how)


# The first of two workgroups goes one way, the second the other.
_SECOND = (
    "v_mov_b32_e32 v2, 0\ns_mov_b64 exec, 1\ns_cmp_eq_u32 s2, 0\ns_cbranch_scc1 .Lfirst\n{second}\ns_endpgm\n.Lfirst:\n{first}"
)  # fmt: skip
# v2's lower half is loaded, its upper one never written.
_LOW = "global_load_short_d16 v2, v1, s[6:7]\ns_waitcnt vmcnt(0)"


def read_of_stored(second: str, behind: str = "", **how: Any) -> Watched:
    """A workgroup that loads what the one before stored at v2, which is 0."""
    return Watched(
        _SECOND.format(first=f"global_store_dword v2, v0, s[6:7]{behind}", second=second),
        "read race", "workgroup 0 of the same launch stores", "workgroup 1, wave 0, lane 0", {"grid": (2, 1, 1), **how},
    )  # fmt: skip


def race(code: str, where: str, **how: Any) -> Watched:
    """Two waves that meet in LDS."""
    return Watched(
        code, "LDS race", "with no barrier between that was waited for", where, {"waves": 2, "lds": 512, **how}
    )


ALL_OF_IT = "s_brev_b32 s14, -2"  # num_records 0x7fffffff

FAULTS = {
    "a global load behind the end": outside("load", "global_load_dword v2, v1, s[6:7] offset:776 ; <<", 4, 62),
    "a global load before the start": outside("load", "global_load_dword v2, v1, s[6:7] offset:-4 ; <<", 4, 0),
    "a load that begins inside": outside("load", "global_load_dwordx2 v[2:3], v1, s[6:7] offset:768 ; <<", 8, 63),
    "a load from a full address": outside(
        "load", "v_mov_b32_e32 v2, s6\nv_mov_b32_e32 v3, s7\nglobal_load_dwordx4 v[4:7], v[2:3], off offset:1016 ; <<", 16, 0
    ),
    "a flat load": outside(
        "load", "v_mov_b32_e32 v2, s6\nv_mov_b32_e32 v3, s7\nflat_load_ubyte v4, v[2:3] offset:1024 ; <<", 1, 0
    ),
    "a global store": outside("store", "global_store_dword v1, v0, s[6:7] offset:776 ; <<", 4, 62),
    "a store of a byte": outside("store", "global_store_byte v1, v0, s[6:7] offset:773 ; <<", 1, 63),
    "a global atomic": outside("atomic", "global_atomic_add v1, v0, s[6:7] offset:776 ; <<", 4, 62),
    "a buffer load that its descriptor allows": outside(
        "load", f"{ALL_OF_IT}\nbuffer_load_dword v2, v1, s[12:15], 0 offen offset:776 ; <<", 4, 62
    ),
    "a buffer store that its descriptor allows": outside(
        "store", f"{ALL_OF_IT}\ns_movk_i32 s16, 0x308\nbuffer_store_dword v0, v1, s[12:15], s16 offen ; <<", 4, 62
    ),
    "a buffer atomic that its descriptor allows": outside(
        "atomic", f"{ALL_OF_IT}\nbuffer_atomic_add v0, v1, s[12:15], 0 offen offset:776 ; <<", 4, 62
    ),
    "a scalar offset that no descriptor checks": outside(
        "load", "s_movk_i32 s16, 0x400\nbuffer_load_dword v2, v1, s[12:15], s16 offen ; <<", 4, 0
    ),
    "a scalar load": outside("load", "s_load_dwordx2 s[16:17], s[6:7], 0x3fc ; <<", 4, -1),
    "an LDS write": Watched(
        "ds_write_b32 v1, v0 offset:4 ; <<", "out-of-bounds LDS", "byte 256 outside", "workgroup 0, wave 0, lane 63", {"lds":
        256}
    ),
    "an LDS atomic": Watched(
        "ds_add_u32 v1, v0 offset:256 ; <<", "out-of-bounds LDS", "byte 256 outside", "workgroup 0, wave 0, lane 0", {"lds":
        256}
    ),
    "a load into LDS": Watched(
        "s_movk_i32 m0, 0x80\ns_nop 0\nbuffer_load_dword v1, s[12:15], 0 offen lds ; <<",
        "out-of-bounds LDS", "byte 256 outside", "workgroup 0, wave 0, lane 32", {"lds": 256},
    ),
    "a scratch store": Watched(
        "scratch_store_dwordx2 off, v[0:1], off offset:28 ; <<",
        "out-of-bounds scratch", "byte 28 outside", "workgroup 0, wave 0, lane 0", {"scratch": 32},
    ),
    "a scratch load": Watched(
        "scratch_load_dword v2, v1, off ; <<",
        "out-of-bounds scratch", "byte 32 outside", "workgroup 0, wave 0, lane 8", {"scratch": 32},
    ),
    "an address": unwritten("global_load_dword v2, v9, s[6:7] ; <<", "v9"),
    "an address of one lane": unwritten(
        "s_mov_b64 exec, 0xff\nv_mov_b32_e32 v9, 0\ns_mov_b64 exec, -1\nglobal_store_dword v9, v0, s[6:7] ; <<", "v9", 8
    ),
    "half an address": unwritten("v_mov_b32_e32 v8, s6\nglobal_load_dword v2, v[8:9], off ; <<", "v9"),
    "a computed address": unwritten(
        "v_add_u32_e32 v9, v10, v1\nv_and_b32_e32 v9, 0xff, v9\nbuffer_load_dword v2, v9, s[12:15], 0 offen ; <<", "v9"
    ),
    "an LDS address": unwritten("ds_write_b32 v9, v0 ; <<", "v9", lds=256),
    "a scratch address": unwritten("scratch_load_dword v2, v9, off ; <<", "v9", scratch=32),
    "the lane that another is asked for": unwritten("ds_bpermute_b32 v2, v9, v0 ; <<", "v9"),
    "a scalar address": unwritten("s_load_dword s16, s[20:21], 0x0 ; <<", "s20", -1),
    "a scalar offset": unwritten("s_load_dword s16, s[6:7], s20 ; <<", "s20", -1),
    "stored data": stored("global_store_dword v1, v9, s[6:7] ; <<", "v9"),
    "stored data by a buffer": stored("buffer_store_dword v9, v1, s[12:15], 0 offen ; <<", "v9"),
    "a second word of stored data": stored(
        "v_lshlrev_b32_e32 v2, 1, v1\nv_mov_b32_e32 v8, 1\nglobal_store_dwordx2 v2, v[8:9], s[6:7] ; <<", "v9"
    ),
    "stored data of one lane": stored(
        "s_mov_b64 exec, 7\nv_mov_b32_e32 v9, 1\ns_mov_b64 exec, -1\nglobal_store_dword v1, v9, s[6:7] ; <<", "v9", 3
    ),
    "what an atomic adds": stored("global_atomic_add v1, v9, s[6:7] ; <<", "v9"),
    "a product": stored(
        "v_mov_b32_e32 v4, 0\nv_mov_b32_e32 v5, 0\ns_nop 1\nv_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[20:21], 0\ns_nop 6\n"
        "global_store_dword v1, v8, s[6:7] ; <<", "v8",
    ),
    "what lay in LDS": stored("ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v2, s[6:7] ; <<", "v2",
        lds=256),
    "what went through LDS": stored(
        "ds_write_b32 v1, v9\nds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v2, s[6:7] ; <<", "v2", lds=256
    ),
    "what lies behind the end of LDS": stored(
        "ds_read_b32 v2, v1 offset:256\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v2, s[6:7] ; <<", "v2", lds=256
    ),
    "what lay in scratch": stored(
        "scratch_load_dword v2, off, off\ns_waitcnt vmcnt(0)\nglobal_store_dword v1, v2, s[6:7] ; <<", "v2", scratch=32
    ),
    "what another lane never wrote": stored(
        "s_mov_b64 exec, 1\nv_mov_b32_e32 v9, 1\ns_mov_b64 exec, -1\ns_nop 0\n"
        "v_mov_b32_dpp v8, v9 row_newbcast:1 row_mask:0xf bank_mask:0xf\n"
        "global_store_dword v1, v8, s[6:7] ; <<", "v8",
    ),
    "SCC": undecided("s_cmp_eq_u32 s20, 0\ns_cbranch_scc1 .Lend ; <<\n.Lend:"),
    "VCC": undecided("s_cbranch_vccz .Lend ; <<\n.Lend:"),
    "a comparison": undecided("v_cmp_eq_u32_e32 vcc, v9, v0\ns_cbranch_vccnz .Lend ; <<\n.Lend:"),
    "a lane of a comparison": undecided(
        "s_mov_b64 exec, -2\nv_mov_b32_e32 v9, 0\ns_mov_b64 exec, -1\nv_cmp_eq_u32_e32 vcc, v9, v0\n"
        "s_cbranch_vccnz .Lend ; <<\n.Lend:"
    ),
    "EXEC": undecided("s_mov_b64 exec, s[20:21] ; <<"),
    "half of EXEC": undecided("s_mov_b32 exec_hi, s20 ; <<"),
    "EXEC and a mask": undecided("s_and_b64 exec, exec, s[20:21] ; <<"),
    "EXEC by a comparison": undecided("v_cmpx_gt_u32_e32 vcc, v9, v0 ; <<"),
    "EXEC saved and masked": undecided("s_and_saveexec_b64 s[16:17], s[20:21] ; <<"),
    "a global load": unwaited("global_load_dword v2, v1, s[6:7]\nv_add_u32_e32 v3, v2, v2 ; <<", "v2"),
    "a load that is stored": unwaited("global_load_dword v2, v1, s[6:7]\nglobal_store_dword v1, v2, s[6:7] ; <<", "v2"),
    "a load that is an address": unwaited("global_load_dword v2, v1, s[6:7]\nglobal_load_dword v3, v2, s[6:7] ; <<", "v2"),
    "a load that addresses LDS": unwaited("global_load_dword v2, v1, s[6:7]\nds_read_b32 v3, v2 ; <<", "v2", lds=256),
    "a load that another overwrites": unwaited("global_load_dword v2, v1, s[6:7]\nv_mov_b32_e32 v2, 0 ; <<", "v2"),
    "a load that a lane is read of": Watched(
        "global_load_dword v2, v1, s[6:7]\nv_readlane_b32 s16, v2, 5 ; <<", "missing wait", "v2 is used",
        "workgroup 0, wave 0, lane 5"
    ),
    "a load that is multiplied": unwaited(
        "global_load_dwordx2 v[4:5], v1, s[6:7]\nv_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], 0 ; <<", "v4"
    ),
    "a load that a product overwrites": unwaited(
        "global_load_dword v10, v1, s[6:7]\nv_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], 0 ; <<", "v10"
    ),
    "a second word of a load": unwaited("global_load_dwordx2 v[2:3], v1, s[6:7]\nv_mov_b32_e32 v4, v3 ; <<", "v3"),
    "an LDS read": unwaited("ds_read_b32 v2, v1\nv_mov_b32_e32 v3, v2 ; <<", "v2", lds=256),
    "a lane's exchange": unwaited("ds_bpermute_b32 v2, v1, v0\nv_mov_b32_e32 v3, v2 ; <<", "v2"),
    "a scratch load before its wait": unwaited("scratch_load_dword v2, off, off\nv_mov_b32_e32 v3, v2 ; <<", "v2", scratch=32),
    "an atomic's old value": unwaited("global_atomic_add v2, v1, v0, s[6:7] sc0\nv_mov_b32_e32 v3, v2 ; <<", "v2"),
    "a scalar load into a vector": unwaited("s_load_dword s16, s[6:7], 0x0\nv_mov_b32_e32 v2, s16 ; <<", "s16"),
    "a scalar load as an address": unwaited("s_load_dwordx2 s[16:17], s[0:1], 0x0\ns_load_dword s18, s[16:17], 0x0 ; <<",
        "s16"),
    "a wait for the wrong counter": unwaited(
        "global_load_dword v2, v1, s[6:7]\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v3, v2 ; <<", "v2"
    ),
    "the second of two loads": unwaited(
        "global_load_dword v2, v1, s[6:7]\nglobal_load_dword v3, v1, s[6:7]\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v2\n"
        "v_mov_b32_e32 v4, v3 ; <<", "v3",
    ),
    "the second of two LDS reads": unwaited(
        "ds_read_b32 v2, v1\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v4, v3 ; <<", "v3", lds=256
    ),
    "scalar loads, which come in any order": unwaited(
        "s_load_dword s16, s[6:7], 0x0\ns_load_dword s17, s[6:7], 0x4\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v2, s16 ; <<", "s16"
    ),
    "an LDS read beside a scalar load": unwaited(
        "ds_read_b32 v2, v1\ns_load_dword s16, s[6:7], 0x0\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v3, v2 ; <<", "v2", lds=256
    ),
    "a flat load by one counter": unwaited(
        "v_mov_b32_e32 v2, s6\nv_mov_b32_e32 v3, s7\nflat_load_dword v4, v[2:3]\ns_waitcnt vmcnt(0)\n"
        "v_mov_b32_e32 v5, v4 ; <<", "v4"
    ),
    "an LDS read over a global load": unwaited("global_load_dword v2, v1, s[6:7]\nds_read_b32 v2, v1 ; <<", "v2", lds=256),
    "a global load over an LDS read": unwaited("ds_read_b32 v2, v1\nglobal_load_dword v2, v1, s[6:7] ; <<", "v2", lds=256),
    "a write that another wave reads": race(
        "s_cbranch_scc1 .Lsecond\nds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\ns_endpgm\n.Lsecond:\n"
        "ds_read_b32 v2, v1 offset:-256 ; <<",
        "workgroup 0, wave 1, lane 0",
    ),
    "a read of what another wave writes": race(
        "v_mov_b32_e32 v2, 0\nv_mov_b32_e32 v3, 7\ns_cbranch_scc1 .Lsecond\nds_read_b32 v2, v2\ns_waitcnt lgkmcnt(0)\n"
        "s_endpgm\n"
        ".Lsecond:\nds_write_b32 v2, v3 ; <<",
        "workgroup 0, wave 1, lane 0",
    ),
    "two waves that write": race(
        "v_mov_b32_e32 v2, 0\nv_add_u32_e32 v3, 1, v0\ns_mov_b64 exec, 1\nds_write_b32 v2, v3 ; <<",
        "workgroup 0, wave 1, lane 0"
    ),
    "two waves that write one byte": race(
        "v_mov_b32_e32 v2, 3\nv_add_u32_e32 v3, 1, v0\ns_mov_b64 exec, 1\nds_write_b8 v2, v3 ; <<",
        "workgroup 0, wave 1, lane 0"
    ),
    "a race in a later workgroup": race(
        "s_cmp_eq_u32 s2, 2\ns_cbranch_scc0 .Lend\nv_mov_b32_e32 v2, 4\nv_add_u32_e32 v3, 1, v0\ns_mov_b64 exec, 1\n"
        "ds_write_b32 v2, v3 ; <<\n.Lend:", "workgroup 2, wave 1, lane 0", grid=(4, 1, 1),
    ),
    "a write that no wait ends before the barrier": race(
        "s_cbranch_scc1 .Lsecond\nds_write_b32 v1, v0\ns_barrier\ns_endpgm\n.Lsecond:\ns_barrier\n"
        "ds_read_b32 v2, v1 offset:-256 ; <<",
        "workgroup 0, wave 1, lane 0",
    ),
    "a write that only a wait behind the barrier ends": race(
        "s_cbranch_scc1 .Lsecond\nds_write_b32 v1, v0\ns_barrier\ns_waitcnt lgkmcnt(0)\ns_endpgm\n.Lsecond:\ns_barrier\n"
        "ds_read_b32 v2, v1 offset:-256 ; <<", "workgroup 0, wave 1, lane 0",
    ),
    "a load into LDS that no wait ends before the barrier": race(
        "s_mov_b32 m0, 0\ns_cbranch_scc1 .Lsecond\nbuffer_load_dword v1, s[12:15], 0 offen lds\ns_waitcnt lgkmcnt(0)\n"
        "s_barrier\n"
        "s_endpgm\n.Lsecond:\ns_barrier\nds_read_b32 v2, v1 offset:-256 ; <<", "workgroup 0, wave 1, lane 0",
    ),
    "two workgroups that store": Watched(
        "v_mov_b32_e32 v2, 0\nglobal_store_byte v2, v2, s[6:7] offset:5 ; <<",
        "write race", "workgroup 0 of the same launch", "workgroup 1, wave 0, lane 0", {"grid": (3, 1, 1)},
    ),
    "overlapping stores of workgroups": Watched(
        "s_lshl_b32 s16, s2, 2\nv_mov_b32_e32 v2, s16\ns_mov_b64 exec, 1\nglobal_store_dwordx2 v2, v[0:1], s[6:7] ; <<",
        "write race", "workgroup 0 of the same launch", "workgroup 1, wave 0, lane 0", {"grid": (2, 1, 1)},
    ),
    "the first lane where none executes": Watched(
        "s_mov_b64 exec, 0\nv_readfirstlane_b32 s16, v0 ; <<", "lanes off", "no lane executes", "workgroup 0, wave 0"
    ),
    "columns of which a lane is off": Watched(
        "s_mov_b64 exec, 0xff\nds_read_b64_tr_b16 v[2:3], v1 ; <<", "lanes off", "not every lane",
        "workgroup 0, wave 0, lane 8",
        {"arch": "gfx950", "lds": 512},
    ),
    "a trap": Watched("s_trap 2 ; <<", "trap", "the kernel trapped"),
    "the second wave's trap": Watched("s_cbranch_scc0 .Lend\ns_trap 2 ; <<\n.Lend:", "trap", "trapped", "workgroup 0, wave 1",
                                      {"waves": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_and_told_with_its_place(name: str) -> None:
    watched = FAULTS[name]
    with pytest.raises(MachineFault) as found:
        launched(watched.text, **watched.how)
    fault, (instruction, source) = found.value, watched.blamed
    assert (fault.kind, fault.instruction, fault.source) == (watched.kind, instruction, source)
    sentence = str(fault)
    assert watched.says in sentence
    assert sentence.startswith(f"{watched.kind} in {instruction!r} ({source}), {watched.where}: ")


# Where another register could be named in its place: a vector register of the same number, the destination, the first word.
MISNAMED = {
    "a descriptor": unwritten("buffer_load_dword v2, v1, s[16:19], 0 offen ; <<", "s16", -1),
    "the base of a global access": unwritten("global_load_dword v2, v1, s[20:21] ; <<", "s20", -1),
    "a scalar offset": unwritten("s_load_dword s16, s[6:7], s20 ; <<", "s20", -1),
    "a scalar load in a sum": unwaited("s_load_dword s16, s[6:7], 0x0\ns_add_u32 s17, s16, 1 ; <<", "s16"),
    "a scalar load in a comparison": unwaited("s_load_dword s16, s[6:7], 0x0\ns_cmp_eq_u32 s16, 0 ; <<", "s16"),
    "the upper half of a full address": unwritten("v_mov_b32_e32 v8, s6\nglobal_load_dword v2, v[8:9], off ; <<", "v9"),
}


@pytest.mark.parametrize("name", MISNAMED)
def test_a_fault_names_the_register_that_is_to_blame(name: str) -> None:
    watched = MISNAMED[name]
    with pytest.raises(MachineFault) as found:
        launched(watched.text, **watched.how)
    assert (found.value.kind, found.value.instruction) == (watched.kind, watched.blamed[0])
    assert watched.says in str(found.value)


_M0 = "s_mov_b32 m0, 0\ns_nop 0\n"
_FIRST_ONLY = "s_cbranch_scc1 .Lsecond\n{first}\ns_barrier\ns_endpgm\n.Lsecond:\ns_barrier\n{second} ; <<"

# Rarer: loads whose wait is missing, registers that nobody wrote and accesses that meet.
UNSEEN = {
    "a descriptor still being loaded": unwaited(
        "s_load_dwordx2 s[12:13], s[0:1], 0x0\nbuffer_load_dword v2, v1, s[12:15], 0 offen ; <<", "s12"
    ),
    "the base of a global access still being loaded": unwaited(
        "s_load_dwordx2 s[16:17], s[0:1], 0x0\nglobal_load_dword v2, v1, s[16:17] ; <<", "s16"
    ),
    "a buffer's scalar offset still being loaded": unwaited(
        "s_load_dword s16, s[6:7], 0x0\nbuffer_load_dword v2, v1, s[12:15], s16 offen ; <<", "s16"
    ),
    "a scalar load's offset still being loaded": unwaited(
        "s_load_dword s16, s[6:7], 0x0\ns_load_dword s17, s[6:7], s16 ; <<", "s16"
    ),
    "M0 still being loaded": unwaited(
        "s_load_dword m0, s[6:7], 0x0\nbuffer_load_dword v1, s[12:15], 0 offen lds ; <<", "m0", lds=256
    ),
    "a mask still being loaded": unwaited(
        "s_load_dwordx2 s[16:17], s[6:7], 0x0\nv_cndmask_b32_e64 v2, v0, v1, s[16:17] ; <<", "s16"
    ),
    "VCC still being loaded": unwaited("s_load_dwordx2 vcc, s[6:7], 0x0\ns_cbranch_vccz .Lend ; <<\n.Lend:", "vcc_lo"),
    "a scalar load over another, which may come first": unwaited(
        "s_load_dword s16, s[6:7], 0x0\ns_load_dword s16, s[6:7], 0x4 ; <<", "s16"
    ),
    "a comparison over a scalar load": unwaited(
        "s_load_dwordx2 s[16:17], s[6:7], 0x0\nv_cmp_eq_u32_e64 s[16:17], v0, v1 ; <<", "s16"
    ),
    "a lane read over a scalar load": unwaited("s_load_dword s16, s[6:7], 0x0\nv_readfirstlane_b32 s16, v0 ; <<", "s16"),
    "a lane's number still being loaded": unwaited("s_load_dword s16, s[6:7], 0x0\nv_readlane_b32 s17, v0, s16 ; <<", "s16"),
    "a lane's new value still being loaded": unwaited("s_load_dword s16, s[6:7], 0x0\nv_writelane_b32 v2, s16, 0 ; <<", "s16"),
    "a lane written over a load": unwaited("global_load_dword v2, v1, s[6:7]\nv_writelane_b32 v2, s8, 0 ; <<", "v2"),
    "registers swapped over a load": unwaited("global_load_dword v2, v1, s[6:7]\nv_swap_b32 v2, v0 ; <<", "v2"),
    "an exchange over a global load": unwaited("global_load_dword v2, v1, s[6:7]\nds_bpermute_b32 v2, v1, v0 ; <<", "v2"),
    "a scratch address still being loaded": unwaited(
        "global_load_dword v2, v1, s[6:7]\nscratch_load_dword v3, v2, off ; <<", "v2", scratch=32
    ),
    "a scale still being loaded": unwaited(
        "global_load_dword v2, v1, s[6:7]\nv_mfma_scale_f32_16x16x128_f8f6f4 v[8:11], v[20:27], v[28:35], 0, v2, v3 "
        "op_sel_hi:[0,0,0] ; <<", "v2", arch="gfx950",
    ),
    "a flat atomic's old value": unwaited(
        "v_mov_b32_e32 v2, s6\nv_mov_b32_e32 v3, s7\nflat_atomic_add v4, v[2:3], v0 sc0\ns_waitcnt vmcnt(0)\n"
        "v_mov_b32_e32 v5, v4 ; <<", "v4",
    ),
    "an atomic's old value over an LDS read": unwaited(
        "ds_read_b32 v2, v1\nglobal_atomic_add v2, v1, v0, s[6:7] sc0 ; <<", "v2", lds=256
    ),
    "a wave's own load into LDS": Watched(
        f"{_M0}buffer_load_dword v1, s[12:15], 0 offen lds\nds_read_b32 v2, v1 ; <<", "LDS race", "with no barrier between",
        "workgroup 0, wave 0, lane 0", {"lds": 256},
    ),
    "a wave's write over its own load into LDS": Watched(
        f"{_M0}buffer_load_dword v1, s[12:15], 0 offen lds\nds_write_b32 v1, v0 ; <<", "LDS race", "with no barrier between",
        "workgroup 0, wave 0, lane 0", {"lds": 256},
    ),
    "an atomic and a read of another wave": race(
        "v_mov_b32_e32 v2, 0\ns_cbranch_scc1 .Lsecond\nds_add_u32 v2, v0\ns_endpgm\n.Lsecond:\nds_read_b32 v3, v2 ; <<",
        "workgroup 0, wave 1, lane 0",
    ),
    "a write over what no wait ended before the barrier": race(
        "v_and_b32_e32 v1, 0xff, v1\n" + _FIRST_ONLY.format(first="ds_write_b32 v1, v0", second="ds_write_b32 v1, v0"),
        "workgroup 0, wave 1, lane 0",
    ),
    "a read that no wait ended before the barrier": race(
        "v_and_b32_e32 v1, 0xff, v1\n" + _FIRST_ONLY.format(first="ds_read_b32 v2, v1", second="ds_write_b32 v1, v0"),
        "workgroup 0, wave 1, lane 0",
    ),
    "a buffer's scalar offset": unwritten("buffer_load_dword v2, v1, s[12:15], s20 offen ; <<", "s20", -1),
    "M0": unwritten("buffer_load_dword v1, s[12:15], 0 offen lds ; <<", "m0", -1, lds=256),
    "the size of a scalar load's buffer": unwritten("s_mov_b64 s[16:17], s[6:7]\ns_buffer_load_dword s20, s[16:19], 0x0 ; <<",
        "s18", -1),
    "a scratch access's scalar offset": unwritten("scratch_store_dword off, v0, s20 ; <<", "s20", -1, scratch=32),
    "the number of a lane to read": unwritten("v_readlane_b32 s16, v0, s20 ; <<", "s20", -1),
    "the number of a lane to write": unwritten("v_writelane_b32 v0, 1, s20 ; <<", "s20", -1),
    "what an LDS atomic adds": stored(
        "ds_write_b32 v1, v0\nds_add_u32 v1, v9\nds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\n"
        "global_store_dword v1, v2, s[6:7] ; <<",
        "v2", lds=256,
    ),
    "what an LDS atomic found": stored(
        "ds_add_rtn_u32 v2, v1, v0\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v2, s[6:7] ; <<", "v2", lds=256
    ),
    "a product's scale": stored(
        "".join(f"v_mov_b32_e32 v{k}, 0\n" for k in range(20, 36))
        + "s_nop 1\nv_mfma_scale_f32_16x16x128_f8f6f4 v[8:11], v[20:27], v[28:35], 0, v2, v3 op_sel_hi:[0,0,0]\ns_nop 11\n"
        "global_store_dword v1, v8, s[6:7] ; <<", "v8", arch="gfx950",
    ),
    "a product's scale in a scalar register": stored(
        "".join(f"v_mov_b32_e32 v{k}, 0\n" for k in range(20, 36))
        + "s_nop 1\nv_mfma_scale_f32_16x16x128_f8f6f4 v[8:11], v[20:27], v[28:35], 0, s20, 1 op_sel_hi:[0,0,0]\n"
        "s_nop 15\nglobal_store_dword v1, v8, s[6:7] ; <<", "v8", arch="gfx950",
    ),
    "EXEC turned on": undecided("s_mov_b64 exec, 0\ns_or_saveexec_b64 s[16:17], s[20:21] ; <<"),
    "EXEC masked in the fourth wave": Watched(
        # What is known of EXEC is looked for before the first register of this wave, where another wave's lie.
        "s_mov_b64 s[14:15], 0\ns_mov_b64 s[16:17], 0\ns_cmpk_lg_u32 s8, 0xc0\ns_cbranch_scc1 .Lend\n"
        "s_and_saveexec_b64 s[18:19], s[20:21] ; <<\n.Lend:",
        "unwritten condition", "never written", "workgroup 0, wave 3", {"waves": 4},
    ),
    "SCC as a number": undecided("s_cmp_eq_u32 s20, 0\ns_mov_b32 s16, src_scc\ns_cmp_eq_u32 s16, 0\n"
        "s_cbranch_scc1 .Lend ; <<\n.Lend:"),
    "stores of workgroups that reach behind the buffer": Watched(
        "s_mov_b32 s14, 4\nv_mov_b32_e32 v2, 0\ns_mov_b64 exec, 1\nbuffer_store_dwordx2 v[0:1], v2, s[12:15], 0 offen ; <<",
        "write race", "workgroup 0 of the same launch", "workgroup 1, wave 0, lane 0", {"grid": (2, 1, 1)},
    ),
    "a load of what another workgroup stores": read_of_stored("global_load_dword v3, v2, s[6:7] ; <<"),
    "a load of one byte of what another workgroup stores": read_of_stored("global_load_ubyte v3, v2, s[6:7] offset:3 ; <<"),
    "a buffer load of what another workgroup stores": read_of_stored("buffer_load_dwordx2 v[4:5], v2, s[12:15], 0 offen ; <<"),
    "a load into LDS of what another workgroup stores": read_of_stored(
        "s_mov_b32 m0, 0\ns_nop 0\nbuffer_load_dword v2, s[12:15], 0 offen lds ; <<", lds=256
    ),
    "a scalar load of what another workgroup stores": Watched(
        _SECOND.format(first="global_store_dword v2, v0, s[6:7]", second="s_load_dword s16, s[6:7], 0x0 ; <<"),
        "read race", "workgroup 0 of the same launch stores", "workgroup 1, wave 0", {"grid": (2, 1, 1)},
    ),
    "a store where another workgroup loads": Watched(
        _SECOND.format(first="global_load_dwordx4 v[4:7], v2, s[6:7]", second="global_store_byte v2, v0, s[6:7] offset:13 ; <<"),
        "read race", "workgroup 0 of the same launch loads", "workgroup 1, wave 0, lane 0", {"grid": (2, 1, 1)},
    ),
    "a store where another workgroup loads scalars": Watched(
        _SECOND.format(first="s_load_dwordx2 s[16:17], s[6:7], 0x0", second="global_store_dword v2, v0, s[6:7] offset:4 ; <<"),
        "read race", "workgroup 0 of the same launch loads", "workgroup 1, wave 0, lane 0", {"grid": (2, 1, 1)},
    ),
    "a load behind an atomic that nothing follows": read_of_stored(
        "global_atomic_add v3, v2, v0, s[6:7] offset:8 sc0\ns_waitcnt vmcnt(0)\nglobal_load_dword v3, v2, s[6:7] ; <<",
        "\nglobal_atomic_add v2, v0, s[6:7] offset:8",
    ),
    "a load behind an atomic of this workgroup alone": read_of_stored(
        "global_atomic_add v3, v2, v0, s[6:7] offset:8 sc0\ns_waitcnt vmcnt(0)\nbuffer_inv sc1\n"
        "global_load_dword v3, v2, s[6:7] ; <<"
    ),
    "an atomic where another workgroup stores": Watched(
        _SECOND.format(first="global_store_dword v2, v0, s[6:7]", second="global_atomic_add v2, v1, s[6:7] ; <<"),
        "write race", "workgroup 0 of the same launch", "workgroup 1, wave 0, lane 0", {"grid": (2, 1, 1)},
    ),
    "an atomic over another wave's write": race(
        "v_mov_b32_e32 v2, 0\ns_cbranch_scc1 .Lsecond\nds_write_b32 v2, v0\ns_endpgm\n.Lsecond:\nds_add_u32 v2, v0 ; <<",
        "workgroup 0, wave 1, lane 0",
    ),
    "an atomic over another wave's read": race(
        "v_mov_b32_e32 v2, 0\ns_cbranch_scc1 .Lsecond\nds_read_b32 v3, v2\ns_endpgm\n.Lsecond:\nds_add_u32 v2, v0 ; <<",
        "workgroup 0, wave 1, lane 1",
    ),
    "a write over another wave's atomic": race(
        "v_mov_b32_e32 v2, 0\ns_cbranch_scc1 .Lsecond\nds_add_u32 v2, v0\ns_endpgm\n.Lsecond:\nds_write_b32 v2, v0 ; <<",
        "workgroup 0, wave 1, lane 0",
    ),
    "an atomic that no wait ended before the barrier": race(
        _FIRST_ONLY.format(first="ds_add_u32 v1, v0", second="ds_read_b32 v2, v1 offset:-256"), "workgroup 0, wave 1, lane 0"
    ),
    "a read of two waves of which one did not wait": race(
        "v_mov_b32_e32 v2, 0\ns_cbranch_scc1 .Lsecond\nds_read_b32 v3, v2\ns_barrier\ns_endpgm\n.Lsecond:\n"
        "ds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)\ns_cmpk_eq_i32 s8, 0x80\ns_cbranch_scc1 .Lthird\ns_barrier\ns_endpgm\n"
        ".Lthird:\ns_barrier\nds_write_b32 v2, v0 ; <<", "workgroup 0, wave 2, lane 0", waves=3,
    ),
    "a scalar compared with a constant before its wait": unwaited(
        "s_load_dword s16, s[6:7], 0x0\ns_cmpk_eq_i32 s16, 0x0 ; <<", "s16"
    ),
    "a scale in a scalar register before its wait": unwaited(
        "s_load_dword s16, s[6:7], 0x0\nv_mfma_scale_f32_16x16x128_f8f6f4 v[8:11], v[20:27], v[28:35], 0, s16, v3 "
        "op_sel_hi:[0,0,0] ; <<", "s16", arch="gfx950",
    ),
    "SCC added": undecided("s_cmp_eq_u32 s20, 0\ns_add_u32 s16, src_scc, 1\ns_cmp_eq_u32 s16, 0\n"
        "s_cbranch_scc1 .Lend ; <<\n.Lend:"),
    "SCC in lanes": stored("s_cmp_eq_u32 s20, 0\nv_mov_b32_e32 v2, src_scc\nglobal_store_dword v1, v2, s[6:7] ; <<", "v2"),
    "half a register that a load wrote": stored(f"{_LOW}\nglobal_store_dword v1, v2, s[6:7] ; <<", "v2"),
    "the half of a register that a load did not write": stored(
        f"{_LOW}\nglobal_store_short_d16_hi v1, v2, s[6:7] ; <<", "v2"
    ),
    "the lower half where a load wrote the upper one": stored(
        "global_load_short_d16_hi v2, v1, s[6:7]\ns_waitcnt vmcnt(0)\nglobal_store_short v1, v2, s[6:7] ; <<", "v2"
    ),
    "an unwritten half shifted down": stored(
        f"{_LOW}\nv_lshrrev_b32_e32 v3, 16, v2\nglobal_store_short v1, v3, s[6:7] ; <<", "v3"
    ),
    "a copied half": stored(f"{_LOW}\nv_mov_b32_e32 v3, v2\nglobal_store_short_d16_hi v1, v3, s[6:7] ; <<", "v3"),
    "an unwritten half selected": stored(
        f"{_LOW}\nv_cvt_f32_f16_sdwa v3, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1\n"
        "global_store_dword v1, v3, s[6:7] ; <<", "v3",
    ),
    "an unwritten half of a packed sum": stored(
        f"{_LOW}\nv_pk_add_f16 v3, v2, v2\nglobal_store_short_d16_hi v1, v3, s[6:7] ; <<", "v3"
    ),
    "an unwritten half permuted": stored(
        f"{_LOW}\ns_mov_b32 s16, 0x7060100\nv_perm_b32 v8, v2, v2, s16\nglobal_store_dword v1, v8, s[6:7] ; <<", "v8"
    ),
    "an unwritten half crossed over": stored(
        f"{_LOW}\nv_pk_add_f16 v3, v2, v2 op_sel:[1,1] op_sel_hi:[0,0]\nglobal_store_short v1, v3, s[6:7] ; <<", "v3"
    ),
    "an unwritten half through LDS": stored(
        f"{_LOW}\nds_write_b32 v1, v2\nds_read_u16 v3, v1 offset:2\ns_waitcnt lgkmcnt(0)\n"
        "global_store_short v1, v3, s[6:7] ; <<", "v3", lds=256,
    ),
    "an unwritten half through scratch": stored(
        f"{_LOW}\nscratch_store_dword off, v2, off\nscratch_load_ushort v3, off, off offset:2\ns_waitcnt vmcnt(0)\n"
        "global_store_short v1, v3, s[6:7] ; <<", "v3", scratch=32,
    ),
    "an unwritten half of a lane": undecided(
        f"{_LOW}\nv_readfirstlane_b32 s16, v2\ns_and_b32 s16, s16, 0x10000\ns_cbranch_scc1 .Lend ; <<\n.Lend:"
    ),
    "a half of what is written over by nothing known": stored(
        f"{_LOW}\nv_add_u32_e32 v2, v9, v9\nglobal_store_short v1, v2, s[6:7] ; <<", "v2"
    ),
    "a store and another workgroup's atomic": Watched(
        "v_mov_b32_e32 v2, 0\ns_mov_b64 exec, 1\ns_cmp_eq_u32 s2, 0\ns_cbranch_scc1 .Lfirst\n"
        "global_store_dword v2, v0, s[6:7] ; <<\n"
        "s_endpgm\n.Lfirst:\nglobal_atomic_add v2, v1, s[6:7]",
        "write race", "workgroup 0 of the same launch", "workgroup 1, wave 0, lane 0", {"grid": (2, 1, 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_a_fault_of_a_rarer_kind_is_seen(name: str) -> None:
    watched = UNSEEN[name]
    with pytest.raises(MachineFault) as found:
        launched(watched.text, **watched.how)
    assert (found.value.kind, found.value.instruction) == (watched.kind, watched.blamed[0])


# What must not be taken for a fault, each beside one that is.
FINE = {
    "lanes that are off": Watched("s_mov_b64 exec, 0xff\nglobal_load_dword v2, v1, s[6:7] offset:960\n"
        "global_store_dword v1, v0, s[6:7] offset:960"),
    "no lane at all": Watched("s_mov_b64 exec, 0\nglobal_store_dword v9, v10, s[6:7]"),
    "the last bytes": Watched("v_lshlrev_b32_e32 v2, 2, v1\nglobal_load_dwordx4 v[4:7], v2, s[6:7]"),
    "an address that lanes which are off never wrote": Watched(
        "s_mov_b64 exec, 1\nv_mov_b32_e32 v9, 0\nv_mov_b32_e32 v10, 0\nglobal_store_dword v9, v10, s[6:7]"
    ),
    "a value that nobody uses": Watched("v_add_f32_e32 v10, v9, v9\nv_mul_f32_e32 v11, v10, v0\ns_add_u32 s21, s20, s20"),
    "a high word that the low one does not need, and a carry over a source": Watched(
        "v_mov_b32_e32 v8, 0\ns_mov_b32 s14, 4\nv_mad_u64_u32 v[2:3], s[14:15], v0, s14, v[8:9]\n"
        "global_store_dword v1, v2, s[6:7]"
    ),
    "what a selection does not choose": Watched(
        "v_cmp_gt_u32_e32 vcc, 0x100, v0\ns_nop 1\nv_cndmask_b32_e32 v2, v9, v0, vcc\nglobal_store_dword v1, v2, s[6:7]"
    ),
    "masked bits of a mask": Watched(
        "s_mov_b64 exec, 1\nv_cmp_eq_u32_e64 s[16:17], v0, v0\ns_mov_b64 exec, -1\ns_and_b64 s[16:17], s[16:17], 1\n"
        "s_and_b64 s[20:21], s[20:21], 0\ns_or_b64 s[16:17], s[16:17], s[20:21]\ns_cbranch_scc1 .Lend\n.Lend:"
    ),
    "lanes of a comparison that are off": Watched(
        "s_mov_b64 exec, 1\nv_mov_b32_e32 v9, 0\nv_cmp_eq_u32_e32 vcc, v9, v0\ns_cbranch_vccnz .Lend\n.Lend:"
    ),
    "the first of two loads": Watched(
        "global_load_dword v2, v1, s[6:7]\nglobal_load_dword v3, v1, s[6:7]\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v2"
    ),
    "the first of two LDS reads": Watched(
        "ds_read_b32 v2, v1\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v4, v2", how={"lds": 256}
    ),
    "a wait that is written as a number": Watched("global_load_dword v2, v1, s[6:7]\ns_waitcnt 0x3f70\nv_mov_b32_e32 v3, v2"),
    "a load behind a store": Watched(
        "global_load_dword v2, v1, s[6:7]\nglobal_store_dword v1, v0, s[6:7] offset:256\ns_waitcnt vmcnt(1)\n"
        "v_mov_b32_e32 v3, v2"
    ),
    "a load over one of the same kind": Watched(
        "global_load_dword v2, v1, s[6:7]\nglobal_load_dword v2, v1, s[6:7] offset:4\nds_read_b32 v3, v1\n"
        "ds_read_b32 v3, v1 offset:4\n"
        "s_waitcnt vmcnt(0) lgkmcnt(0)\nv_add_u32_e32 v4, v2, v3", how={"lds": 512},
    ),
    "the registers of a store": Watched("global_store_dword v1, v0, s[6:7]\nv_mov_b32_e32 v0, 0\nv_mov_b32_e32 v1, 0"),
    "LDS that is never written": Watched("ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v3, v2", how={"lds": 256}),
    "two waves that write the same": Watched(
        "v_mov_b32_e32 v2, 0\nv_mov_b32_e32 v3, 7\nds_write_b32 v2, v3", how={"waves": 2, "lds": 256}
    ),
    "two waves that read the same": Watched("v_mov_b32_e32 v2, 0\nds_read_b32 v3, v2", how={"waves": 2, "lds": 256}),
    "a wave that reads what it wrote": Watched("ds_write_b32 v1, v0\nds_read_b32 v3, v1", how={"waves": 2, "lds": 512}),
    "a barrier between": Watched(
        "ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\ns_barrier\nv_xor_b32_e32 v2, 0x100, v1\nds_read_b32 v3, v2\n"
        "s_waitcnt lgkmcnt(0)\ns_barrier\nds_write_b32 v2, v0", how={"waves": 2, "lds": 512},
    ),
    "a load into LDS that is waited for": Watched(
        "s_lshl_b32 m0, s8, 2\ns_nop 0\nbuffer_load_dword v1, s[12:15], 0 offen lds\ns_waitcnt vmcnt(0)\ns_barrier\n"
        "v_xor_b32_e32 v2, 0x100, v1\nds_read_b32 v3, v2", how={"waves": 2, "lds": 512},
    ),
    "a load into LDS that lands nowhere": Watched(
        "s_mov_b32 m0, 0x7fffffff\ns_nop 0\nbuffer_load_dword v1, s[12:15], 0 offen lds\ns_waitcnt vmcnt(0)", how={"lds": 256}
    ),
    "LDS of the workgroup before": Watched(
        "s_cmp_eq_u32 s2, 0\ns_cbranch_scc0 .Lsecond\nds_write_b32 v1, v0\ns_endpgm\n.Lsecond:\nds_read_b32 v2, v1",
        how={"grid": (2, 1, 1), "lds": 512},
    ),
    "a barrier that a wave which ended never reaches": Watched(
        "s_cbranch_scc1 .Lend\ns_barrier\ns_barrier\n.Lend:", how={"waves": 2}
    ),
    "a workgroup's second store": Watched(
        "s_lshl_b32 s16, s2, 2\nv_mov_b32_e32 v2, s16\nglobal_store_dword v2, v0, s[6:7]\nglobal_store_dword v2, v1, s[6:7]",
        how={"grid": (3, 1, 1)},
    ),
    "atomics of workgroups": Watched("v_mov_b32_e32 v2, 0\nglobal_atomic_add v2, v0, s[6:7]", how={"grid": (3, 1, 1)}),
    "scratch that is written": Watched(
        "scratch_store_dword off, v0, off offset:28\nscratch_load_dword v2, off, off offset:28\ns_waitcnt vmcnt(0)\n"
        "global_store_dword v1, v2, s[6:7]", how={"scratch": 32},
    ),
    "atomics of two waves in LDS": Watched(
        "v_mov_b32_e32 v2, 0\nds_add_u32 v2, v0\nds_add_rtn_u32 v3, v2, v0", how={"waves": 2, "lds": 256}
    ),
    "atomics of two waves in LDS, then a read": Watched(
        "v_mov_b32_e32 v2, 0\nds_add_u32 v2, v0\ns_waitcnt lgkmcnt(0)\ns_barrier\nds_read_b32 v3, v2\n"
        "s_waitcnt lgkmcnt(0)\ns_barrier\nds_add_u32 v2, v0", how={"waves": 2, "lds": 256},
    ),
    "atomics of two waves in LDS, with a barrier that ends none": Watched(
        "v_mov_b32_e32 v2, 0\nds_add_u32 v2, v0\ns_barrier\nds_add_u32 v2, v0", how={"waves": 2, "lds": 256}
    ),
    "a read of LDS in flight over a barrier": Watched(
        "ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\ns_barrier\nv_xor_b32_e32 v2, 0x100, v1\nds_read_b32 v3, v2\ns_barrier\n"
        "ds_read_b32 v4, v2\nds_write_b32 v1, v0 offset:512\ns_waitcnt lgkmcnt(0)", how={"waves": 2, "lds": 1024},
    ),
    "LDS of a wave that ended": Watched(
        "s_cbranch_scc1 .Lsecond\nds_write_b32 v1, v0\nds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\ns_endpgm\n.Lsecond:\n"
        "s_barrier\nds_read_b32 v2, v1 offset:-256\nds_write_b32 v1, v0 offset:-256", how={"waves": 2, "lds": 512},
    ),
    "a workgroup that loads what it stored": Watched(
        "s_lshl_b32 s16, s2, 2\nv_mov_b32_e32 v2, s16\ns_mov_b64 exec, 1\nglobal_load_dword v3, v2, s[6:7]\n"
        "s_waitcnt vmcnt(0)\nglobal_store_dword v2, v0, s[6:7]\nglobal_load_dword v3, v2, s[6:7]", how={"grid": (3, 1, 1)},
    ),
    "a load of what another workgroup changes by atomics": Watched(
        _SECOND.format(first="global_atomic_add v2, v0, s[6:7]", second="global_load_dword v3, v2, s[6:7]"),
        how={"grid": (2, 1, 1)},
    ),
    "the last workgroup gathers and resets": Watched(
        "v_mov_b32_e32 v2, 0\ns_lshl_b32 s16, s2, 2\nv_mov_b32_e32 v3, s16\ns_mov_b64 exec, 1\n"
        "global_store_dword v3, v0, s[6:7] offset:64\ns_waitcnt vmcnt(0)\nbuffer_wbl2 sc1\ns_waitcnt vmcnt(0)\n"
        "v_mov_b32_e32 v4, 1\nglobal_atomic_add v4, v2, v4, s[6:7] sc0\ns_waitcnt vmcnt(0)\nbuffer_inv sc1\n"
        "v_readfirstlane_b32 s16, v4\ns_cmp_eq_u32 s16, 2\ns_cbranch_scc0 .Lend\n"
        "global_load_dwordx3 v[4:6], v2, s[6:7] offset:64\nglobal_store_dword v2, v2, s[6:7]\n.Lend:",
        how={"grid": (3, 1, 1)},
    ),
    "loads that leave a store's bytes out": Watched(
        _SECOND.format(first="global_store_byte v2, v0, s[6:7] offset:5",
                       second="global_load_dword v3, v2, s[6:7]\nglobal_load_ushort v3, v2, s[6:7] offset:6"),
        how={"grid": (2, 1, 1)},
    ),
    "SCC that is known, as a number": Watched(
        "s_cmp_eq_u32 s8, 0\ns_mov_b32 s16, src_scc\ns_cmp_eq_u32 s16, 0\ns_cbranch_scc1 .Lend\n.Lend:"
    ),
    "the bits of SCC that are none": Watched(
        "s_cmp_eq_u32 s20, 0\ns_mov_b32 s16, src_scc\ns_and_b32 s16, s16, 2\ns_cbranch_scc1 .Lend\n.Lend:"
    ),
    "two halves of a register": Watched(
        f"{_LOW}\nglobal_load_short_d16_hi v2, v1, s[6:7] offset:2\nds_read_u16_d16_hi v3, v1\n"
        "s_waitcnt vmcnt(0) lgkmcnt(0)\nglobal_store_dword v1, v2, s[6:7]\nds_write_b32 v1, v2\nds_read_u16_d16 v3, v1\n"
        "ds_read_u16_d16_hi v3, v1 offset:2\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v3, s[6:7]", how={"lds": 256},
    ),
    "the half of a register that was loaded": Watched(
        f"{_LOW}\nv_mov_b32_e32 v3, v2\nv_lshlrev_b32_e32 v4, 16, v3\nv_and_b32_e32 v5, 0xffff, v2\nv_cvt_f32_f16_e32 v6, v2\n"
        "v_add_f16_e32 v7, v2, v3\nglobal_store_dwordx4 v1, v[4:7], s[6:7]\nglobal_store_short v1, v2, s[6:7]\n"
        "s_mov_b32 s16, 0x5040100\nv_perm_b32 v8, v2, v2, s16\nglobal_store_dword v1, v8, s[6:7]",
    ),
    "the upper half of a register that was loaded": Watched(
        "global_load_short_d16_hi v2, v1, s[6:7]\ns_waitcnt vmcnt(0)\nv_lshrrev_b32_e32 v4, 16, v2\n"
        "v_cvt_f32_f16_sdwa v5, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1\nv_pk_add_f16 v6, v2, v2\n"
        "global_store_dwordx2 v1, v[4:5], s[6:7]\nglobal_store_short_d16_hi v1, v6, s[6:7]\n"
        "v_pk_add_f16 v6, v2, v2 op_sel:[1,1] op_sel_hi:[1,1]\nglobal_store_dword v1, v6, s[6:7]",
    ),
    "a half computed alone": Watched("v_fma_f16 v2, v0, v0, v0\nglobal_store_short v1, v2, s[6:7]"),
    "a half of a lane": Watched(
        f"{_LOW}\nv_readfirstlane_b32 s16, v2\ns_and_b32 s16, s16, 1\ns_cbranch_scc1 .Lend\n.Lend:"
    ),
    "a half through LDS and scratch": Watched(
        f"{_LOW}\nds_write_b32 v1, v2\nds_read_u16 v3, v1\nscratch_store_dword off, v2, off\n"
        "scratch_load_ushort v4, off, off\ns_waitcnt vmcnt(0) lgkmcnt(0)\nglobal_store_dwordx2 v1, v[3:4], s[6:7]",
        how={"lds": 256, "scratch": 32},
    ),
    "halves that change places": Watched(
        f"{_LOW}\nv_swap_b32 v2, v3\nglobal_store_short v1, v3, s[6:7]"
    ),
    "a lane read where none executes": Watched("s_mov_b64 exec, 0\nv_readlane_b32 s16, v0, 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_what_is_right_is_no_fault(name: str) -> None:
    watched = FINE[name]
    launched(watched.text, **watched.how)


def test_what_a_scalar_selection_does_not_choose_is_no_fault() -> None:
    launched(f"{PROLOGUE}\ns_cselect_b32 s16, s20, s8\ns_cmp_eq_u32 s16, 0\ns_cbranch_scc1 .Lend\n.Lend:")


def test_beyond_num_records_loads_are_zero_and_stores_and_atomics_are_dropped() -> None:
    memory = launched(
        f"""{PROLOGUE}
        v_mov_b32_e32 v2, 7
        global_store_dword v1, v2, s[6:7] offset:256
        global_store_dword v1, v2, s[6:7] offset:512
        s_waitcnt vmcnt(0)
        buffer_load_dword v3, v1, s[12:15], 0 offen offset:384
        v_bfrev_b32_e32 v4, 1
        buffer_load_dword v5, v4, s[12:15], 0 offen
        v_mov_b32_e32 v6, 9
        buffer_store_dword v6, v1, s[12:15], 0 offen offset:512
        buffer_atomic_add v6, v1, s[12:15], 0 offen offset:512
        s_waitcnt vmcnt(2)
        v_add_u32_e32 v3, v3, v5
        global_store_dword v1, v3, s[6:7]
        global_store_dword v1, v5, s[6:7] offset:768
        """
    )
    assert memory[:64].tolist() == [7] * 32 + [0] * 32
    assert memory[128:192].tolist() == [7] * 64
    assert memory[192:].tolist() == [0] * 64


def test_a_wide_load_across_num_records_keeps_its_first_words() -> None:
    memory = launched(
        f"""{PROLOGUE}
        v_add_u32_e32 v2, 1, v0
        global_store_dword v1, v2, s[6:7] offset:256
        s_waitcnt vmcnt(0)
        v_mov_b32_e32 v3, 0x1f8
        buffer_load_dwordx4 v[4:7], v3, s[12:15], 0 offen
        s_waitcnt vmcnt(0)
        s_mov_b64 exec, 1
        global_store_dwordx4 v1, v[4:7], s[6:7]
        """
    )
    assert memory[:4].tolist() == [63, 64, 0, 0]


def test_workgroups_and_lanes_are_numbered() -> None:
    memory = launched(
        """
        s_load_dwordx2 s[6:7], s[0:1], 0x0
        s_mul_i32 s8, s4, 6
        s_mul_i32 s9, s3, 2
        s_add_i32 s8, s8, s9
        s_add_i32 s8, s8, s2
        s_lshl_b32 s9, s8, 9
        v_lshlrev_b32_e32 v1, 2, v0
        v_add_u32_e32 v1, s9, v1
        s_lshl_b32 s10, s4, 16
        s_lshl_b32 s11, s3, 20
        s_or_b32 s10, s10, s11
        s_lshl_b32 s11, s2, 24
        s_or_b32 s10, s10, s11
        v_or_b32_e32 v2, s10, v0
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v2, s[6:7]
        """,
        grid=(2, 3, 2), waves=2, size=12 * 512,
    )  # fmt: skip
    wanted = [
        x << 24 | y << 20 | z << 16 | lane for z in range(2) for y in range(3) for x in range(2) for lane in range(128)
    ]
    assert memory.tolist() == wanted


def test_a_lane_s_part_of_lds_reaches_another_wave_behind_a_barrier() -> None:
    memory = launched(
        f"""{PROLOGUE}
        ds_write_b32 v1, v0
        s_waitcnt lgkmcnt(0)
        s_barrier
        v_sub_u32_e32 v2, 0x3fc, v1
        ds_read_b32 v3, v2
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v3, s[6:7]
        """,
        waves=4, shared=1024,
    )  # fmt: skip
    assert memory.tolist() == list(range(255, -1, -1))


def test_a_second_workgroup_finds_nothing_of_the_first() -> None:
    code = f"{PROLOGUE}\nv_mov_b32_e32 v9, 0\ns_cmp_eq_u32 s2, 0\n{{}}\nglobal_store_dword v9, v8, s[6:7]"
    with pytest.raises(MachineFault, match=r"workgroup 1, wave 0.*v8, which was never written"):
        launched(code.format("s_cbranch_scc0 .Lend\nv_mov_b32_e32 v8, 0\ns_endpgm\n.Lend:"), grid=(2, 1, 1))


def test_a_launch_without_an_end_is_ended() -> None:
    with pytest.raises(EndlessLaunch, match="watched ran 5000 wave-instructions without an end"):
        launched(".Lagain:\ns_branch .Lagain", limit=5000)


def test_a_launch_of_exactly_its_limit_ends() -> None:
    launched("s_nop 0\ns_nop 0", limit=3)


def test_running_out_of_the_code_is_a_fault() -> None:
    with pytest.raises(MachineFault, match=r"^runaway in .* execution ran out of the kernel's code") as found:
        launched("s_branch .Lfunc_end0")
    assert (found.value.kind, found.value.source) == ("runaway", "")


def test_no_workgroup_runs_nothing() -> None:
    launched("s_trap 2", grid=(0, 1, 1))


def test_lds_is_what_the_kernel_and_the_launch_ask_for() -> None:
    code = f"{PROLOGUE}\nds_write_b32 v1, v0 offset:{{}}"
    launched(code.format(0), lds=128, shared=128)
    with pytest.raises(MachineFault, match="out-of-bounds LDS"):
        launched(code.format(4), lds=128, shared=128)


@pytest.mark.parametrize(("arch", "limit"), [("gfx942", 65536), ("gfx950", 163840)])
def test_more_lds_than_the_architecture_has_is_refused(arch: str, limit: int) -> None:
    launched("s_nop 0", arch=arch, shared=limit)
    with pytest.raises(UnsupportedInstruction, match=f"{limit + 4} bytes of LDS: {arch} has {limit}"):
        launched("s_nop 0", arch=arch, shared=limit, lds=4)


def test_every_storage_of_a_launch_may_be_touched_and_no_byte_between_them() -> None:
    kernel = machine.prepare(read(kernel_text(
        "s_load_dwordx4 s[8:11], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\n"
        "global_store_dword v1, v0, s[8:9]\nglobal_store_dword v1, v0, s[10:11]"
    )))  # fmt: skip
    memory = np.zeros(256, np.uint32)
    start = memory.ctypes.data
    both = [("*i32", start), ("*i32", start + 512)]
    machine.launch(kernel, both, [(start + 512, start + 768), (start, start + 256)], (1, 1, 1), 1, 0)
    assert memory[:64].tolist() == memory[128:192].tolist() == list(range(64))
    with pytest.raises(MachineFault, match=r"s\[10:11\].*lane 63: a store"):
        machine.launch(kernel, both, [(start, start + 256), (start + 512, start + 764)], (1, 1, 1), 1, 0)


def test_arguments_lie_where_their_types_put_them() -> None:
    lines = [f"s_load_dword s{16 + k}, s[0:1], {4 * k}" for k in range(8)]
    lines += ["s_load_dwordx2 s[6:7], s[0:1], 32", "s_waitcnt lgkmcnt(0)", "v_mov_b32_e32 v1, 0", "s_mov_b64 exec, 1"]
    for k in range(8):
        lines += [f"v_mov_b32_e32 v2, s{16 + k}", f"global_store_dword v1, v2, s[6:7] offset:{4 * k}"]
    kernel = machine.prepare(read(kernel_text("\n".join(lines))))
    memory = np.zeros(8, np.uint32)
    at = memory.ctypes.data
    arguments: list[tuple[str, int | float]] = [
        ("i1", 1), ("i8", -2), ("i16", -3), ("i32", -4), ("u32", 2**32 - 5), ("i64", -6), ("fp16", 0.5), ("fp32", -1.5),
            ("*fp32", at)
    ]  # fmt: skip
    machine.launch(kernel, arguments, [(at, at + 32)], (1, 1, 1), 1, 0)
    assert memory.tobytes().hex(" ", 4) == "01fefdff fcffffff fbffffff 00000000 faffffff ffffffff 00380000 0000c0bf"


def test_hidden_arguments_say_how_large_the_launch_is() -> None:
    metadata = "\n".join(
        f"      - .offset: {offset}\n        .size: {size}\n        .value_kind: {kind}"
        for offset, size, kind in [
            (0, 8, "global_buffer"), (8, 4, "hidden_block_count_x"), (12, 4, "hidden_block_count_y"),
            (16, 2, "hidden_group_size_x"), (18, 2, "hidden_grid_dims"),
        ]
    )  # fmt: skip
    kernel = machine.prepare(read(kernel_text(
        "s_load_dwordx4 s[8:11], s[0:1], 0x8\ns_load_dwordx2 s[6:7], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v1, 0\n"
        "v_mov_b32_e32 v2, s8\nv_mov_b32_e32 v3, s9\nv_mov_b32_e32 v4, s10\ns_or_b32 s3, s2, s3\ns_cmp_eq_u32 s3, 0\n"
        "s_cbranch_scc0 .Lend\nglobal_store_dwordx3 v1, v[2:4], s[6:7]\n.Lend:",
        metadata=metadata,
    )))  # fmt: skip
    memory = np.zeros(3, np.uint32)
    at = memory.ctypes.data
    machine.launch(kernel, [("*i32", at)], [(at, at + 12)], (5, 3, 1), 4, 0)
    assert memory.tolist() == [5, 3, 256 | 3 << 16]


def test_an_argument_of_an_unknown_type_is_refused() -> None:
    kernel = machine.prepare(read(kernel_text("s_nop 0")))
    with pytest.raises(UnsupportedInstruction, match="an argument of type tensordesc is not modelled"):
        machine.launch(kernel, [("tensordesc", 0)], [], (1, 1, 1), 1, 0)


@pytest.mark.parametrize(
    "directive",
    ["fp16_overflow 1", "float_round_mode_32 1", "float_round_mode_16_64 3", "float_denorm_mode_32 0",
        "float_denorm_mode_16_64 0",
     "ieee_mode 0", "dx10_clamp 0"],
)  # fmt: skip
def test_a_descriptor_that_asks_for_another_mode_is_refused(directive: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=directive.split()[0]):
        launched("s_nop 0", directives=f".amdhsa_{directive}")


def test_a_mode_that_every_kernel_asks_for_is_none() -> None:
    launched(
        "s_nop 0",
        directives=".amdhsa_float_denorm_mode_32 3\n.amdhsa_ieee_mode 1\n.amdhsa_dx10_clamp 1\n.amdhsa_fp16_overflow 0",
    )


def test_pages_of_writers_grow_as_they_are_needed() -> None:
    # Each lane of each workgroup stores into a page of its own, more of them than are kept at first.
    memory = launched(
        """
        s_load_dwordx2 s[6:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 12, v0
        s_lshl_b32 s8, s2, 18
        v_add_u32_e32 v1, s8, v1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v0, s[6:7]
        """,
        grid=(12, 1, 1), size=12 << 18,
    )  # fmt: skip
    assert memory[::1024].tolist() == list(range(64)) * 12


def test_lines_alone_run_on_registers_given_by_hand() -> None:
    vgpr = np.zeros((512, 64), np.uint32)
    vgpr[1] = np.arange(64)
    wave = run_lines("gfx942", "v_add_u32_e32 v2, 5, v1\nv_readlane_b32 s4, v2, 9", vgpr=vgpr)
    assert wave.vgpr[2].tolist() == list(range(5, 69))
    assert wave.sgpr[4] == 14


def test_lines_alone_may_touch_the_memory_given_only() -> None:
    memory = np.zeros(256, np.uint8)
    vgpr = np.zeros((512, 64), np.uint32)
    vgpr[1] = 4 * np.arange(64)
    sgpr = np.zeros(128, np.uint32)
    sgpr[:2] = memory.ctypes.data & 0xFFFFFFFF, memory.ctypes.data >> 32
    sgpr[126:] = 0xFFFFFFFF
    given = {memory.ctypes.data: memory}
    run_lines("gfx942", "global_store_dword v1, v1, s[0:1]", vgpr=vgpr, sgpr=sgpr, memory=given)
    assert memory.view(np.uint32).tolist() == vgpr[1].tolist()
    with pytest.raises(MachineFault, match="lane 63: a store of 4 bytes outside every argument"):
        run_lines("gfx942", "global_store_dword v1, v1, s[0:1] offset:4", vgpr=vgpr, sgpr=sgpr, memory=given)
    with pytest.raises(ValueError, match="should be where the array lies"):
        run_lines("gfx942", "s_nop 0", memory={16: memory})


def test_lines_alone_may_find_their_registers_unwritten() -> None:
    with pytest.raises(MachineFault, match="unwritten condition"):
        run_lines("gfx942", "s_cbranch_vccz .Lend\n.Lend:", known=False)
    run_lines("gfx942", "s_cbranch_vccz .Lend\n.Lend:")
