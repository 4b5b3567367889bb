"""Is every pair of instructions known that must be kept apart, at the distance stated, on every path?

The numbers are those of AMD's "AMD Instinct MI300 Instruction Set Architecture Reference Guide" (G: of table 11 the row, T: table
12, M: table 37) and of LLVM's hazard recognizer (L).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from impl.executions.isa import encoding, hazards, machine
from impl.executions.isa.assembly import read_lines
from impl.executions.isa.hazards import Missing
from impl.executions.isa.machine import MachineFault
from tests.executions.isa.kernel_text import FILE, launched

BOTH = ("gfx942", "gfx950")
OLD, NEW = ("gfx942",), ("gfx950",)

# (source, architectures, the first instruction, the second, the register between them, states needed)
APART: list[tuple[str, tuple[str, ...], str, str, str, int]] = [
    # Scalar registers that vector instructions write.
    ("G9 L", BOTH, "v_readfirstlane_b32 s4, v0", "buffer_load_dword v1, v2, s[4:7], 0 offen", "s4", 5),
    ("G9 L", BOTH, "v_readfirstlane_b32 s8, v0", "buffer_load_dword v1, v2, s[4:7], s8 offen", "s8", 5),
    ("G9 L", BOTH, "v_readlane_b32 s5, v0, 3", "global_store_dword v1, v2, s[4:5]", "s5", 5),
    ("G9 L", BOTH, "v_cmp_lt_i32_e64 s[4:5], v0, v1", "global_load_dword v1, v2, s[4:5]", "s4", 5),
    ("G9 L", BOTH, "v_readfirstlane_b32 s4, v0", "scratch_load_dword v1, off, s4", "s4", 5),
    ("G9 L", BOTH, "v_readfirstlane_b32 m0, v0", "buffer_load_dword v2, s[4:7], 0 offen lds", "m0", 5),
    ("G5 L", BOTH, "v_readfirstlane_b32 s4, v0", "v_readlane_b32 s5, v1, s4", "s4", 4),
    ("G5 L", BOTH, "v_readfirstlane_b32 s4, v0", "v_writelane_b32 v1, 7, s4", "s4", 4),
    ("G6 L", BOTH, "v_div_scale_f32 v0, vcc, v1, v1, v2", "v_div_fmas_f32 v3, v4, v5, v6", "vcc_lo", 4),
    ("G16 L", BOTH, "v_readfirstlane_b32 s4, v0", "v_add_u32_e32 v1, s4, v2", "s4", 2),
    ("G16 L", BOTH, "v_readfirstlane_b32 s4, v0", "v_writelane_b32 v1, s4, 7", "s4", 2),
    ("G16 L", BOTH, "v_cmp_lt_i32_e64 s[4:5], v0, v1", "v_mov_b64_e32 v[2:3], s[4:5]", "s4", 2),
    ("L", BOTH, "v_cmp_lt_i32_e32 vcc, v0, v1", "v_cndmask_b32_e32 v2, v3, v4, vcc", "vcc_lo", 2),
    ("L", BOTH, "v_cmp_lt_i32_e64 s[4:5], v0, v1", "v_cndmask_b32_e64 v2, v3, v4, s[4:5]", "s4", 2),
    ("L", BOTH, "v_add_co_u32_e32 v0, vcc, v1, v2", "v_addc_co_u32_e32 v3, vcc, v4, v5, vcc", "vcc_lo", 2),
    # EXEC that vector instructions write.
    ("G12 L", BOTH, "v_cmpx_lt_i32_e32 vcc, v0, v1", "v_mov_b32_dpp v2, v3 row_shl:1 row_mask:0xf bank_mask:0xf", "exec_lo", 5),
    ("G16 L", BOTH, "v_cmpx_lt_i32_e32 vcc, v0, v1", "v_readfirstlane_b32 s0, v2", "exec_lo", 4),
    ("G16 L", BOTH, "v_cmpx_lt_i32_e32 vcc, v0, v1", "v_readlane_b32 s0, v2, 0", "exec_lo", 4),
    ("G16 L", BOTH, "v_cmpx_lt_i32_e32 vcc, v0, v1", "v_writelane_b32 v2, 0, 0", "exec_lo", 4),
    ("G16", BOTH, "v_cmpx_lt_i32_e32 vcc, v0, v1", "v_mov_b64_e32 v[2:3], exec", "exec_lo", 2),
    ("L", BOTH, "v_cmpx_lt_i32_e32 vcc, v0, v1", "v_mfma_f32_16x16x16_f16 v[4:7], v[8:9], v[10:11], 0", "exec_lo", 4),
    ("L", NEW, "v_cmpx_lt_i32_e32 vcc, v0, v1", "v_permlane32_swap_b32_e32 v2, v3", "exec_lo", 4),
    # Vector registers that vector instructions write.
    ("G11 L", BOTH, "v_mov_b32_e32 v0, v1", "v_mov_b32_dpp v2, v0 row_shl:1 row_mask:0xf bank_mask:0xf", "v0", 2),
    ("G11 L", BOTH, "v_mov_b32_e32 v0, v1", "v_add_f32_dpp v2, v3, v0 row_shl:1 row_mask:0xf bank_mask:0xf", "v0", 2),
    ("L", BOTH, "v_mov_b32_e32 v0, v1", "v_mov_b32_dpp v0, v2 row_shl:1 row_mask:0xf bank_mask:0xf", "v0", 2),
    ("G17 L", BOTH, "v_mov_b32_e32 v0, v1", "v_readlane_b32 s4, v0, 3", "v0", 1),
    ("G17 L", BOTH, "v_mov_b32_e32 v0, v1", "v_readfirstlane_b32 s4, v0", "v0", 1),
    ("L", NEW, "v_mov_b32_e32 v0, v1", "v_permlane16_swap_b32_e32 v2, v0", "v0", 2),
    ("L", NEW, "v_mov_b32_e32 v0, v1", "v_permlane32_swap_b32_e32 v0, v2", "v0", 2),
    ("M0 L", BOTH, "v_mov_b32_e32 v0, v1", "v_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[2:3], 0", "v0", 2),
    ("M0 L", BOTH, "v_mov_b32_e32 v3, v1", "v_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[2:3], 0", "v3", 2),
    ("M0 L", BOTH, "v_accvgpr_write_b32 a5, v1", "v_mfma_f32_16x16x16_f16 a[4:7], v[0:1], v[2:3], a[4:7]", "a5", 2),
    ("M0 L", NEW, "v_mov_b32_e32 v20, v30",
     "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0, v20, v21 op_sel_hi:[0,0,0]", "v20", 2),
    ("G18 L", BOTH, "v_mov_b32_sdwa v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD", "v_mov_b32_e32 v2, v0", "v0", 1),
    ("G18 L", BOTH, "v_add_f16_e64 v0, v1, v2 op_sel:[0,0,1]", "v_mov_b32_e32 v2, v0", "v0", 1),
    ("G18 L", BOTH, "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", "v_mov_b32_e32 v2, v0", "v0", 1),
    ("L", NEW, "v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3", "v_mov_b32_e32 v2, v0", "v0", 1),
    ("L", BOTH, "v_add_f16_e64 v0, v1, v2 op_sel:[0,0,1]", "v_mov_b32_e32 v0, v2", "v0", 1),
    *[("G19 T L", BOTH, f"v_{name}_e32 v0, v2", "v_add_f32_e32 v4, v5, v0", "v0", 1)
      for name in ("exp_f32", "log_f32", "rcp_f32", "rcp_iflag_f32", "rsq_f32", "sqrt_f32", "sin_f32", "cos_f32", "exp_f16",
                   "log_f16", "rcp_f16", "rsq_f16", "sqrt_f16")],
    *[("G19 T L", BOTH, f"v_{name}_e32 v[0:1], v[2:3]", "v_add_f64 v[4:5], v[6:7], v[0:1]", "v0", 1)
      for name in ("rcp_f64", "rsq_f64", "sqrt_f64")],
    ("M1 L", BOTH, "v_dot4_i32_i8 v0, v1, v2, v3", "v_mov_b32_e32 v4, v0", "v0", 3),
    ("M1 L", BOTH, "v_dot4_i32_i8 v0, v1, v2, v3", "v_dot4_i32_i8 v4, v0, v2, v3", "v0", 3),
    ("M1 L", BOTH, "v_dot4_i32_i8 v0, v1, v2, v3", "v_mov_b32_e32 v0, v4", "v0", 3),
    ("M1 L", BOTH, "v_dot4_i32_i8 v0, v1, v2, v3", "ds_write_b32 v4, v0", "v0", 3),
    ("M1", BOTH, "v_dot4_i32_i8 v0, v1, v2, v3", "v_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[2:3], 0", "v0", 3),
    # What stores still read, M0 and MODE.
    ("G8 L", BOTH, "global_store_dwordx3 v[4:5], v[0:2], off", "v_mov_b32_e32 v2, v6", "v2", 2),
    ("G8 L", BOTH, "buffer_store_dwordx4 v[0:3], v4, s[4:7], 0 offen", "v_mov_b32_e32 v3, v6", "v3", 2),
    ("G8 L", BOTH, "scratch_store_dwordx4 off, v[0:3], off", "v_mov_b64_e32 v[0:1], v[6:7]", "v0", 2),
    ("G8 L", BOTH, "flat_atomic_cmpswap_x2 v[4:5], v[0:3]", "v_mov_b32_e32 v3, v6", "v3", 2),
    ("L", BOTH, "global_store_dwordx4 v[4:5], v[0:3], off", "v_mfma_f32_16x16x16_f16 v[0:3], v[6:7], v[8:9], 0", "v0", 2),
    ("G14 L", BOTH, "s_mov_b32 m0, s0", "buffer_load_dword v2, s[4:7], 0 offen lds", "m0", 1),
    ("G14 L", BOTH, "s_add_u32 m0, s0, s1", "global_load_lds_dword v2, s[4:5]", "m0", 1),
    ("G2 L", BOTH, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0", "", 2),
]  # fmt: skip

# Matrix instructions by their passes: (architectures, passes, words of A and B, name).
SHORT = [
    (BOTH, 2, 2, "4x4x4_16b_f16"), (BOTH, 4, 2, "16x16x16_f16"), (BOTH, 8, 2, "16x16x4_4b_f16"), (BOTH, 8, 2, "32x32x8_bf16"),
    (BOTH, 16, 2, "32x32x4_2b_bf16"), (BOTH, 4, 2, "16x16x32_fp8_bf8"), (BOTH, 8, 2, "32x32x16_fp8_fp8"),
    (OLD, 4, 2, "16x16x8_xf32"),
    (OLD, 8, 2, "32x32x4_xf32"), (NEW, 4, 4, "16x16x32_bf16"), (NEW, 8, 4, "32x32x16_f16"), (NEW, 8, 8, "16x16x128_f8f6f4"),
    (NEW, 16, 8, "32x32x64_f8f6f4"),
]  # fmt: skip
SINGLE = [(BOTH, 2, 1, "4x4x1_16b_f32"), (BOTH, 8, 1, "16x16x4_f32"), (BOTH, 16, 1, "32x32x2_f32"),
          (BOTH, 8, 1, "16x16x1_4b_f32"), (BOTH, 16, 1, "32x32x1_2b_f32")]  # fmt: skip


def _results(name: str) -> int:
    rows, columns, *_ = (int(part) for part in name.split("_")[0].split("x"))
    blocks = next((int(part[:-1]) for part in name.split("_") if part[:-1].isdigit() and part[-1] == "b"), 1)
    return rows * columns * blocks // 64


def _matrix(name: str, words: int, addend: str = "0", result: int = 0) -> str:
    a, b = (f"v{first}" if words == 1 else f"v[{first}:{first + words - 1}]" for first in (100, 110))
    return f"v_mfma_f32_{name} v[{result}:{result + _results(name) - 1}], {a}, {b}, {addend}"


def _behind_matrices() -> list[tuple[str, tuple[str, ...], str, str, str, int]]:
    found = []
    for archs, passes, words, name in SHORT:
        for arch in archs:
            first = _matrix(name, words)
            more = int(arch == "gfx950")
            read = passes + 3 + (more if passes != 2 else 0)
            found += [
                ("M6 L", (arch,), first, "v_add_f32_e32 v90, v91, v2", "v2", read),
                ("M6 L", (arch,), first, "v_mov_b32_e32 v2, v91", "v2", read),
                ("M6 L", (arch,), first, "global_store_dword v[90:91], v3, off", "v3", read),
                ("M6 L", (arch,), first, "ds_write_b32 v90, v3", "v3", read),
                ("L", (arch,), first, "ds_read_b32 v1, v90", "v1", read),
                ("M5 L", (arch,), first, "v_mfma_f32_16x16x16_f16 v[90:93], v[2:3], v[96:97], 0", "v2", read),
                ("M5 L", (arch,), first, "v_mfma_f32_16x16x16_f16 v[90:93], v[96:97], v[2:3], 0", "v2", read),
                ("M4 L", (arch,), first, "v_mfma_f32_32x32x2_f32 v[68:83], v90, v91, v[2:17]", "v2",
                 passes + 1 + (more if passes != 2 else 0)),
                ("M3 L", (arch,), first, "v_mfma_f32_32x32x8_f16 v[68:83], v[96:97], v[98:99], v[2:17]", "v2", passes + 1 + more),
            ]  # fmt: skip
            last = _results(name) - 1
            if passes == 2:
                found.append(("M2 L", (arch,), first, _matrix(name, words, "v[0:3]"), "v0", 2))
            earlier = _matrix(name, words, f"v[40:{40 + last}]", 0)
            found.append(("L", (arch,), earlier, "v_mov_b32_e32 v40, v90", "v40", passes - 1))
    for archs, passes, words, name in SINGLE:
        first = _matrix(name, words)
        found += [
            ("M11 L", archs, first, "v_add_f32_e32 v90, v91, v2", "v2", passes + 2),
            ("M11 L", archs, first, "v_mov_b32_e32 v2, v91", "v2", passes + 2),
            ("M11 L", archs, first, "ds_write_b32 v90, v3", "v3", passes + 2),
            ("M10 L", archs, first, "v_mfma_f32_16x16x16_f16 v[90:93], v[2:3], v[96:97], 0", "v2", passes + 2),
            ("M9 L", archs, first, "v_mfma_f32_32x32x2_f32 v[68:83], v90, v91, v[2:17]", "v2", passes),
        ]
    wide, narrow = (
        "v_mfma_f64_16x16x4_f64 v[0:7], v[90:91], v[92:93], 0",
        "v_mfma_f64_4x4x4_4b_f64 v[0:1], v[90:91], v[92:93], 0",
    )
    for archs, first, added, factor, read, stored, written in (
        (OLD, wide, 9, 11, 11, 18, 11), (NEW, wide, 17, 19, 19, 18, 11), (BOTH, narrow, 4, 6, 6, 9, 6),
    ):  # fmt: skip
        found += [
            ("M L", archs, first, "v_mfma_f32_16x16x4_f32 v[94:97], v98, v99, v[1:4]", "v1", added),
            ("M L", archs, first, "v_mfma_f64_4x4x4_4b_f64 v[94:95], v[0:1], v[92:93], 0", "v0", factor),
            ("M L", archs, first, "v_mov_b32_e32 v94, v1", "v1", read),
            ("M L", archs, first, "ds_write_b32 v94, v1", "v1", stored),
            ("M L", archs, first, "v_mov_b32_e32 v1, v94", "v1", written),
            ("L", archs, first, "v_fma_f64 v[94:95], v[96:97], v[98:99], v[80:81]", "", 2),
        ]
    other = "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[90:91], v[92:93], v[0:3]"
    for arch, needed in (("gfx942", 5), ("gfx950", 6)):
        found.append(("M2", (arch,), _matrix("16x16x16_f16", 2), other, "v0", needed))
    found.append(("M L", BOTH, narrow, "v_mfma_f64_4x4x4_4b_f64 v[0:1], v[90:91], v[92:93], v[0:1]", "v0", 4))
    return found


PAIRS = [(arch, *rest) for _, archs, *rest in APART + _behind_matrices() for arch in archs]


def found(arch: str, *lines: str) -> list[Missing]:
    """What is missing in lines."""
    program = read_lines(arch, "\n".join(lines))
    return sorted(
        hazards.missing(program, encoding.encode(program)), key=lambda one: (one.at, one.behind, one.register)
    )


def waits(states: int) -> list[str]:
    """Lines of so many wait states that touch nothing."""
    return [f"s_nop {min(states - before, 16) - 1}" for before in range(0, states, 16)]


@pytest.mark.parametrize(("arch", "first", "second", "register", "needed"), PAIRS)
def test_a_state_too_few_is_found_and_enough_are_not(
    arch: str, first: str, second: str, register: str, needed: int
) -> None:
    assert found(arch, first, *waits(needed), second) == []
    missing = found(arch, first, *waits(needed - 1), second)
    assert {(one.at, one.behind, one.states, one.needed) for one in missing} == {
        (1 + len(waits(needed - 1)), 0, needed - 1, needed)
    }
    names = {machine._register(one.register) if one.register >= 0 else "" for one in missing}
    assert register in names


@pytest.mark.parametrize(("arch", "first", "second", "register", "needed"), PAIRS)
def test_every_instruction_between_counts_as_one(
    arch: str, first: str, second: str, register: str, needed: int
) -> None:
    assert found(arch, first, *["s_add_u32 s90, s91, s92"] * needed, second) == []
    assert len(found(arch, first, *["s_waitcnt vmcnt(0)"] * (needed - 1), second)) > 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s_mov_b32 s4, s0", "buffer_load_dword v1, v2, s[4:7], 0 offen"),
        ("v_readfirstlane_b32 s4, v0", "s_add_u32 s5, s4, s4"),
        ("v_readfirstlane_b32 s4, v0", "s_load_dword s6, s[4:5], 0x0"),
        ("s_mov_b64 exec, s[2:3]", "v_mov_b32_dpp v2, v3 row_shl:1 row_mask:0xf bank_mask:0xf"),
        ("s_mov_b64 vcc, s[2:3]", "v_cndmask_b32_e32 v2, v3, v4, vcc"),
        ("v_mov_b32_e32 v0, v1", "v_add_f32_e32 v2, v0, v0"),
        ("v_mov_b32_e32 v0, v1", "ds_write_b32 v0, v0"),
        ("v_exp_f32_e32 v0, v1", "v_log_f32_e32 v2, v0"),
        ("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", "v_add_f32_e32 v2, v0, v1"),
        ("v_add_f16_e64 v0, v1, v2 op_sel:[1,1,0]", "v_mov_b32_e32 v2, v0"),
        ("v_mov_b32_sdwa v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1", "v_mov_b32_e32 v2, v0"),
        ("v_dot4_i32_i8 v0, v1, v2, v3", "v_dot4_i32_i8 v0, v4, v5, v0"),
        ("global_store_dwordx2 v[4:5], v[0:1], off", "v_mov_b32_e32 v1, v6"),
        ("buffer_store_dwordx4 v[0:3], v4, s[4:7], s8 offen", "v_mov_b32_e32 v3, v6"),
        ("ds_write_b128 v4, v[0:3]", "v_mov_b32_e32 v3, v6"),
        ("s_mov_b32 m0, s0", "buffer_load_dword v0, v2, s[4:7], 0 offen"),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], 0", "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]"),
        ("v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, 0", "v_mfma_f32_32x32x8_f16 v[16:31], v[4:5], v[6:7], v[0:15]"),
        ("v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, v[8:11]", "v_mov_b32_e32 v8, v6"),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], 0", "v_mov_b32_e32 v4, v8"),
    ],
)
def test_what_hardware_waits_for_itself_is_nothing(first: str, second: str) -> None:
    assert found("gfx942", first, second) == []


def test_a_register_written_again_is_another_one() -> None:
    lines = ["v_readfirstlane_b32 s4, v0", "s_mov_b32 s4, 0", "buffer_load_dword v1, v2, s[4:7], 0 offen"]
    assert found("gfx942", *lines) == []


EXP, READ = "v_exp_f32_e32 v0, v1", "v_add_f32_e32 v2, v0, v0"


def test_a_branch_counts_and_leads_to_its_label() -> None:
    first = "v_readfirstlane_b32 s4, v0"
    lines = [first, "s_branch over", "s_nop 7", "over:", "v_add_u32_e32 v1, s4, v2"]
    assert found("gfx942", *lines) == [Missing(3, 0, encoding.SCALAR_BASE + 4, 1, 2)]
    assert found("gfx942", first, "s_nop 0", *lines[1:]) == []


def test_one_short_path_is_enough() -> None:
    lines = [EXP, "s_cbranch_scc0 over", "s_nop 7", "over:", "v_readfirstlane_b32 s4, v3", "s_cbranch_scc1 there",
             "s_nop 7", "there:", "v_mov_b32_e32 v5, s4"]  # fmt: skip
    assert found("gfx942", *lines) == [Missing(6, 3, encoding.SCALAR_BASE + 4, 1, 2)]


def test_the_end_of_a_loop_lies_before_its_beginning() -> None:
    loop = ["again:", "v_mov_b32_e32 v5, s4", "s_nop 3", "v_readfirstlane_b32 s4, v3", "s_cbranch_scc1 again"]
    assert found("gfx942", *loop) == [Missing(0, 2, encoding.SCALAR_BASE + 4, 1, 2)]
    assert found("gfx942", *loop[:-1], "s_nop 0", loop[-1]) == []


def test_both_paths_are_remembered_where_they_meet() -> None:
    lines = ["s_cbranch_scc0 other", "v_mfma_f32_32x32x8_f16 v[0:15], v[20:21], v[22:23], 0", "s_branch met", "other:",
             "v_mfma_f32_16x16x16_f16 v[0:3], v[20:21], v[22:23], 0", "s_nop 3", "met:", "s_nop 2",
             "v_mov_b32_e32 v30, v0"]  # fmt: skip
    assert found("gfx942", *lines) == [Missing(6, 1, 0, 4, 11)]
    lines[5] = "s_nop 0"
    assert [(one.behind, one.states) for one in found("gfx942", *lines)] == [(1, 4), (3, 4)]


def test_many_short_blocks_are_walked_through() -> None:
    blocks = [line for number in range(9) for line in ("s_cbranch_scc0 end", f"block{number}:")]
    first, last = "v_mfma_f32_32x32x8_f16 v[0:15], v[20:21], v[22:23], 0", "v_mov_b32_e32 v30, v15"
    assert found("gfx942", first, *blocks, last, "end:") == [Missing(10, 0, 15, 9, 11)]
    assert found("gfx942", first, *blocks, "s_nop 1", last, "end:") == []


def test_what_is_never_reached_is_not_asked() -> None:
    assert found("gfx942", "s_branch end", EXP, READ, "end:") == []


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("v_mfma_i32_4x4x4_16b_i8 v[0:3], v4, v5, 0", 2), ("v_mfma_i32_16x16x4_4b_i8 v[0:15], v20, v21, 0", 8),
        ("v_mfma_i32_16x16x32_i8 v[0:3], v[4:5], v[6:7], 0", 4), ("v_mfma_i32_32x32x16_i8 v[0:15], v[20:21], v[22:23], 0", 8),
        ("v_mfma_i32_16x16x64_i8 v[0:3], v[4:7], v[8:11], 0", 4), ("v_mfma_i32_32x32x32_i8 v[0:15], v[20:23], v[24:27], 0", 8),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0 cbsz:4 blgp:4", 4),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:9], v[10:15], 0 cbsz:2 blgp:3", 4),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:15], 0 cbsz:1 blgp:4", 8),
        ("v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[20:23], v[24:27], 0 cbsz:4 blgp:4", 8),
        ("v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[20:23], v[24:31], 0 cbsz:4", 16),
        ("v_mfma_scale_f32_32x32x64_f8f6f4 v[0:15], v[20:27], v[28:35], 0, v40, v41 op_sel_hi:[0,0,0]", 16),
    ],
)  # fmt: skip
def test_passes_follow_the_shape_and_the_formats(line: str, passes: int) -> None:
    assert hazards.passes(encoding.encode(read_lines("gfx950", line)).matrices[0], "gfx950") == passes


KERNEL = """s_load_dwordx2 s[6:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
v_cvt_f32_u32_e32 v2, v0
v_exp_f32_e32 v2, v2
{}
v_add_f32_e32 v3, v2, v2
s_waitcnt lgkmcnt(0)
global_store_dword v1, v3, s[6:7]"""


def test_a_launch_ends_with_the_two_lines_and_the_numbers() -> None:
    with pytest.raises(MachineFault) as fault:
        launched(KERNEL.format(""))
    assert str(fault.value) == (
        f"missing wait states in 'v_add_f32_e32 v3, v2, v2' ({FILE}:6), workgroup 0, wave 0: v2 is used 0 wait states behind "
        "'v_exp_f32_e32 v2, v2' of line 19, and 1 are needed"
    )
    assert (fault.value.kind, fault.value.wave, fault.value.lane) == ("missing wait states", 0, -1)
    launched(KERNEL.format("s_nop 0"))


@pytest.mark.machine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", BOTH)
def test_a_wait_that_a_compiler_put_is_missed_when_it_is_gone(arch: str) -> None:
    root = Path(__file__).parents[3]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.executions.isa.dropped_waits", arch]
    done = subprocess.run(command, cwd=root, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["kernels"] > 100
    assert len(told["told"]["found"]) > 200
    assert "" not in told["told"], told["told"][""][:3]
