"""What goes between lanes: does every lane read the lane that the document names, and does nothing move where it may not?

DPP is stated from table 94 of "CDNA4 Instruction Set Architecture Reference Guide" (ISA), SDWA beside the pseudocode in
`statements`. That a lane switched off by EXEC is no valid source is the older GCN3 guide's word and what LLVM's
`llvm.amdgcn.update.dpp` assumes; the CDNA guides are silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from impl.executions.isa.machine import MachineFault
from impl.executions.isa.single import run_lines
from impl.executions.isa.unsupported import UnsupportedInstruction
from tests.executions.isa.assembler import accepts
from tests.executions.isa.statements import ARCHS

Array = np.ndarray[Any, Any]
ALL = (1 << 64) - 1
MASKS = [ALL, 0x123456789ABCDEF0, 0xFFFF0000FFFF0000, 0x8000000000000001, 0]

CONTROLS: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[1,0,3,2]": lambda n: (n & ~3) + (1, 0, 3, 2)[n & 3],
    "quad_perm:[2,3,0,1]": lambda n: (n & ~3) + (2, 3, 0, 1)[n & 3],
    "quad_perm:[3,3,0,1]": lambda n: (n & ~3) + (3, 3, 0, 1)[n & 3],
    "row_shl:1": lambda n: n + 1 if n % 16 < 15 else None,
    "row_shl:9": lambda n: n + 9 if n % 16 < 7 else None,
    "row_shr:1": lambda n: n - 1 if n % 16 >= 1 else None,
    "row_shr:8": lambda n: n - 8 if n % 16 >= 8 else None,
    "row_shr:15": lambda n: n - 15 if n % 16 >= 15 else None,
    "row_ror:1": lambda n: n // 16 * 16 + (n - 1) % 16,
    "row_ror:8": lambda n: n // 16 * 16 + (n - 8) % 16,
    "wave_shl:1": lambda n: n + 1 if n < 63 else None,
    "wave_rol:1": lambda n: (n + 1) % 64,
    "wave_shr:1": lambda n: n - 1 if n > 0 else None,
    "wave_ror:1": lambda n: (n - 1) % 64,
    "row_mirror": lambda n: n // 16 * 16 + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "row_bcast:15": lambda n: n // 16 * 16 - 1 if n > 15 else None,
    "row_bcast:31": lambda n: 31 if n > 31 else None,
    "row_newbcast:5": lambda n: n // 16 * 16 + 5,
}  # fmt: skip


def registers(seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 32, (512, 64), dtype=np.uint32)


def scalars(enabled: int, **others: int) -> Array:
    """SGPRs with EXEC, and others by `s7=...`."""
    found = np.random.default_rng(2).integers(0, 1 << 32, 128, dtype=np.uint32)
    found[126], found[127] = enabled & 0xFFFFFFFF, enabled >> 32
    for name, bits in others.items():
        found[int(name[1:])] = bits
    return found


def on(mask: int, lane: int) -> bool:
    return bool((mask >> lane) & 1)


def moved(source: Array, enabled: int, control: str, rows: int, banks: int, bounded: bool) -> list[tuple[int, int]]:
    """Of each lane the value that reaches the operation, and whether the lane is written, by table 94."""
    found = []
    for lane in range(64):
        writes = on(enabled, lane) and on(rows, lane // 16) and on(banks, lane % 16 // 4)
        at = CONTROLS[control](lane)
        valid = at is not None and on(enabled, at)
        value = int(source[at]) if valid and at is not None else 0
        found.append((value, int(writes and (valid or bounded))))
    return found


def _control(control: str, rows: int, banks: int, bounded: bool) -> str:
    return f" {control} row_mask:{rows:#x} bank_mask:{banks:#x}{' bound_ctrl:1' if bounded else ''}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("control", CONTROLS)
def test_dpp_reads_the_lane_that_the_table_names(arch: str, control: str) -> None:
    before = registers(11)
    for enabled in MASKS:
        for rows, banks, bounded in ((15, 15, True), (15, 15, False), (10, 15, False), (5, 3, True), (15, 9, False)):
            line = "v_mov_b32_dpp v5, v6" + _control(control, rows, banks, bounded)
            assert accepts(arch, line)
            try:
                after = run_lines(arch, line, vgpr=before, sgpr=scalars(enabled)).vgpr
            except UnsupportedInstruction:
                assert control.startswith("wave_")  # compilers for these architectures do not write them
                continue
            steps = moved(before[6], enabled, control, rows, banks, bounded)
            want = [value if writes else int(before[5, lane]) for lane, (value, writes) in enumerate(steps)]
            assert after[5].tolist() == want, f"{line}, exec {enabled:#x}"
            assert np.array_equal(np.delete(after, 5, 0), np.delete(before, 5, 0))


@pytest.mark.parametrize("arch", ARCHS)
def test_dpp_moves_the_first_source_only_and_skips_the_whole_lane(arch: str) -> None:
    before = registers(12)
    line = "v_add_u32_dpp v5, v6, v7" + _control("row_shr:1", 15, 15, False)
    after = run_lines(arch, line, vgpr=before, sgpr=scalars(ALL)).vgpr
    steps = moved(before[6], ALL, "row_shr:1", 15, 15, False)
    want = [
        (v + int(before[7, n])) & 0xFFFFFFFF if writes else int(before[5, n]) for n, (v, writes) in enumerate(steps)
    ]
    assert after[5].tolist() == want


@pytest.mark.parametrize("arch", ARCHS)
def test_dpp_into_its_own_source_reads_all_lanes_first(arch: str) -> None:
    before = registers(13)
    line = "v_mov_b32_dpp v6, v6" + _control("row_ror:1", 15, 15, True)
    after = run_lines(arch, line, vgpr=before, sgpr=scalars(ALL)).vgpr
    assert after[6].tolist() == [int(before[6, n // 16 * 16 + (n - 1) % 16]) for n in range(64)]


@pytest.mark.parametrize("arch", ARCHS)
def test_dpp_signs_are_of_the_moved_value(arch: str) -> None:
    before = registers(14)
    before[6] = (np.arange(64, dtype=np.float32) + 1).view(np.uint32)
    before[7] = np.zeros(64, np.uint32)
    line = "v_add_f32_dpp v5, -v6, v7" + _control("quad_perm:[1,0,3,2]", 15, 15, True)
    after = run_lines(arch, line, vgpr=before, sgpr=scalars(ALL)).vgpr
    assert after[5].view(np.float32).tolist() == [-((n ^ 1) + 1.0) for n in range(64)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("enabled", "lane"), [(ALL, 0), (0xFFF0, 4), (1 << 63, 63)])
def test_readfirstlane_reads_the_first_enabled_lane(arch: str, enabled: int, lane: int) -> None:
    before = registers(15)
    wave = run_lines(arch, "v_readfirstlane_b32 s5, v6", vgpr=before, sgpr=scalars(enabled))
    assert wave.sgpr[5] == before[6, lane]


@pytest.mark.parametrize("arch", ARCHS)
def test_readfirstlane_of_no_lane_is_a_fault(arch: str) -> None:
    # The guide reads lane 0; no compiler means that.
    with pytest.raises(MachineFault, match="no lane executes"):
        run_lines(arch, "v_readfirstlane_b32 s5, v6", vgpr=registers(15), sgpr=scalars(0))


@pytest.mark.parametrize("arch", ARCHS)
def test_readlane_and_writelane_do_not_ask_exec_and_take_six_bits_of_lane(arch: str) -> None:
    before = registers(16)
    wave = run_lines(arch, "v_readlane_b32 s5, v6, 37", vgpr=before, sgpr=scalars(0))
    assert wave.sgpr[5] == before[6, 37]
    wave = run_lines(arch, "v_readlane_b32 s5, v6, s9", vgpr=before, sgpr=scalars(0, s9=64 + 3))
    assert wave.sgpr[5] == before[6, 3]
    wave = run_lines(arch, "v_writelane_b32 v6, s8, s9", vgpr=before, sgpr=scalars(0, s8=77, s9=0xFFFFFFFF))
    want = before[6].copy()
    want[63] = 77
    assert np.array_equal(wave.vgpr[6], want)


def test_permlane_swaps_exchange_rows() -> None:
    before = registers(17)
    after = run_lines("gfx950", "v_permlane32_swap_b32_e32 v5, v6", vgpr=before).vgpr
    assert np.array_equal(after[5], np.concatenate([before[5, :32], before[6, :32]]))
    assert np.array_equal(after[6], np.concatenate([before[5, 32:], before[6, 32:]]))
    after = run_lines("gfx950", "v_permlane16_swap_b32_e32 v5, v6", vgpr=before).vgpr
    for first in (0, 32):
        assert np.array_equal(
            after[5, first : first + 32], np.concatenate([before[5, first : first + 16], before[6, first : first + 16]])
        )
        assert np.array_equal(
            after[6, first : first + 32],
            np.concatenate([before[5, first + 16 : first + 32], before[6, first + 16 : first + 32]]),
        )


def test_gfx942_has_no_permlane_swaps() -> None:
    for line in ("v_permlane32_swap_b32_e32 v5, v6", "v_permlane16_swap_b32_e32 v5, v6"):
        assert not accepts("gfx942", line)
        with pytest.raises(UnsupportedInstruction):
            run_lines("gfx942", line)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("enabled", MASKS)
def test_bpermute_pulls_and_gets_0_from_a_lane_that_is_off(arch: str, enabled: int) -> None:
    before = registers(18)
    before[7] = np.random.default_rng(1).integers(0, 64, 64) * 4 + np.random.default_rng(3).integers(0, 4, 64)
    before[7, 5] = 0xFFFFFFF0  # only bits 7 to 2 count
    for offset in (0, 8):
        line = f"ds_bpermute_b32 v5, v7, v6 offset:{offset}" if offset else "ds_bpermute_b32 v5, v7, v6"
        after = run_lines(arch, line + "\ns_waitcnt lgkmcnt(0)", vgpr=before, sgpr=scalars(enabled)).vgpr
        for lane in range(64):
            at = (int(before[7, lane]) + offset) // 4 % 64
            pulled = int(before[6, at]) if on(enabled, at) else 0
            assert after[5, lane] == (pulled if on(enabled, lane) else before[5, lane]), (line, lane)


@pytest.mark.parametrize("arch", ARCHS)
def test_permute_pushes_and_the_last_lane_wins(arch: str) -> None:
    before = registers(19)
    before[7] = np.random.default_rng(1).integers(0, 64, 64) * 4
    enabled = 0xFFFF0FFFFFFFFF0F
    after = run_lines(arch, "ds_permute_b32 v5, v7, v6\ns_waitcnt lgkmcnt(0)", vgpr=before, sgpr=scalars(enabled)).vgpr
    want = [0] * 64
    for lane in range(64):
        if on(enabled, lane):
            want[int(before[7, lane]) // 4 % 64] = int(before[6, lane])
    assert after[5].tolist() == [value if on(enabled, n) else int(before[5, n]) for n, value in enumerate(want)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "offset", [0x8000 | 0b10_11_00_01, 0x1F | 1 << 10, 0x1F | 0x10 << 10, 0x18 | 4 << 5 | 3 << 10, 0x041F]
)
def test_swizzle_permutes_quads_or_masks_lane_numbers(arch: str, offset: int) -> None:
    """Bit 15: quads by two bits a lane; else of 32 lanes, ((n & and) | or) ^ xor."""
    before = registers(20)
    for enabled in (ALL, 0x00FFFFFFFFFF00FF):
        line = f"ds_swizzle_b32 v5, v6 offset:{offset}\ns_waitcnt lgkmcnt(0)"
        after = run_lines(arch, line, vgpr=before, sgpr=scalars(enabled)).vgpr
        for lane in range(64):
            if offset >> 15:
                at = (lane & ~3) + ((offset >> (2 * (lane & 3))) & 3)
            else:
                at = (lane & 32) + ((((lane & 31) & (offset & 31)) | ((offset >> 5) & 31)) ^ ((offset >> 10) & 31))
            pulled = int(before[6, at]) if on(enabled, at) else 0
            assert after[5, lane] == (pulled if on(enabled, lane) else before[5, lane]), (line, lane)


@pytest.mark.parametrize("arch", ARCHS)
def test_compares_into_exec_and_masks_of_lanes_that_are_off(arch: str) -> None:
    before = registers(21)
    enabled = 0x0F0F0F0FF0F0F0F0
    wave = run_lines(arch, "v_cmpx_lt_u32_e32 vcc, v5, v6", vgpr=before, sgpr=scalars(enabled))
    want = sum(int(before[5, n] < before[6, n] and on(enabled, n)) << n for n in range(64))
    assert int(wave.sgpr[126]) | int(wave.sgpr[127]) << 32 == want == int(wave.sgpr[106]) | int(wave.sgpr[107]) << 32


@pytest.mark.parametrize("arch", ARCHS)
def test_accumulation_registers_move(arch: str) -> None:
    before = registers(22)
    lines = "v_accvgpr_write_b32 a3, v6\nv_accvgpr_read_b32 v7, a9\nv_accvgpr_mov_b32 a4, a10"
    after = run_lines(arch, lines, vgpr=before, sgpr=scalars(ALL)).vgpr
    assert np.array_equal(after[256 + 3], before[6])
    assert np.array_equal(after[7], before[256 + 9])
    assert np.array_equal(after[256 + 4], before[256 + 10])


@pytest.mark.parametrize("arch", ARCHS)
def test_without_lanes_nothing_moves(arch: str) -> None:
    before = registers(23)
    lines = "v_add_u32_e32 v5, v6, v7\nv_mov_b32_e32 v8, v9\nv_cmp_lt_u32_e32 vcc, v5, v6\nv_fma_f32 v3, v4, v5, v6"
    wave = run_lines(arch, lines, vgpr=before, sgpr=scalars(0))
    assert np.array_equal(wave.vgpr, before)
    assert wave.sgpr[106] == wave.sgpr[107] == 0
