"""Is what a kernel takes read rightly, and how many of its waves fit?"""

import pytest

from impl.executions.aot.resources import MACHINES, occupancy, opcodes, resources_of

TEXT = """\
\t.text
kernel:
; %bb.0:
\ts_load_dwordx2 s[4:5], s[0:1], 0x0
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[4:5], v[6:7], a[0:15]
\ts_endpgm
.Lfunc_end0:
\t.section\t.AMDGPU.csdata,"",@progbits
; Kernel info:
; codeLenInByte = 1234
; NumVgprs: 130
; NumAgprs: 20
; TotalNumVgprs: 152
; NumSGPRsForWavesPerEU: 40
; NumVGPRsForWavesPerEU: 152
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     20
    .group_segment_fixed_size: 1024
    .private_segment_fixed_size: 16
    .sgpr_count:     40
    .sgpr_spill_count: 3
    .vgpr_count:     152
    .vgpr_spill_count: 4
"""


def test_what_the_text_states_is_read() -> None:
    found = resources_of(TEXT, "gfx942", shared=4096, warps=4)
    assert (found.vgpr, found.agpr, found.sgpr) == (130, 20, 40)
    assert (found.vgpr_spills, found.sgpr_spills, found.scratch, found.spills) == (4, 3, 16, True)
    assert found.lds == 5120
    assert found.matrix == {"v_mfma_f32_16x16x16_bf16": 2, "v_mfma_f32_32x32x8_bf16": 1}
    assert (found.code, found.instructions) == (1234, 5)
    # 152 of 512 registers.
    assert (found.waves, found.limit) == (3.0, "vgpr")


def test_a_launch_that_asks_for_few_waves_gets_few() -> None:
    # The backend gives out so many registers that no more than one wave fits.
    found = resources_of(TEXT.replace("NumVGPRsForWavesPerEU: 152", "NumVGPRsForWavesPerEU: 257"), "gfx942", 0, warps=4)
    assert (found.vgpr, found.agpr, found.waves, found.limit) == (130, 20, 1.0, "launch")


def test_a_text_without_its_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="group_segment_fixed_size"):
        resources_of("\tv_mov_b32 v0, v1\n", "gfx942", 0, 4)


def test_directives_and_data_are_no_instructions() -> None:
    assert list(opcodes(TEXT))[-1] == "s_endpgm"


@pytest.mark.parametrize(
    ("registers", "waves"),
    # Of 512 for a lane: 64 give eight waves, each further step of eight fewer; nobody has more than eight.
    [(0, 8), (1, 8), (64, 8), (65, 7), (72, 7), (73, 6), (128, 4), (129, 3), (256, 2), (257, 1), (512, 1)],
)
def test_vector_registers_cost_waves_in_steps(registers: int, waves: int) -> None:
    assert occupancy(MACHINES["gfx942"], registers, 16, lds=0, warps=1)[0] == waves


@pytest.mark.parametrize(("scalars", "waves"), [(80, 8), (81, 7), (96, 7), (97, 6), (106, 6)])
def test_scalar_registers_cost_a_wave(scalars: int, waves: int) -> None:
    # Of 800, in units of 16 and 16 more for each wave.
    assert occupancy(MACHINES["gfx950"], 8, scalars, lds=0, warps=1)[0] == waves


@pytest.mark.parametrize(
    ("arch", "lds", "warps", "waves"),
    [
        ("gfx942", 32768, 4, 2.0),
        # A byte more is another unit of 512, and only one group fits.
        ("gfx942", 32769, 4, 1.0),
        ("gfx942", 65536, 8, 2.0),
        ("gfx942", 65537, 4, 0.0),
        ("gfx950", 65537, 4, 2.0),
        ("gfx950", 163840, 4, 1.0),
        ("gfx950", 163841, 4, 0.0),
        # One group of one wave lies on one SIMD of four.
        ("gfx942", 65536, 1, 0.25),
        # Units of 1280: five groups of 32000 fit, a sixth does not.
        ("gfx950", 32000, 4, 5.0),
    ],
)
def test_memory_of_a_workgroup_costs_groups(arch: str, lds: int, warps: int, waves: float) -> None:
    assert occupancy(MACHINES[arch], 16, 16, lds, warps) == (waves, "lds")


def test_waves_of_a_group_are_all_there_or_none() -> None:
    # Three waves on each of four SIMDs are twelve: one group of eight, not one and a half.
    assert occupancy(MACHINES["gfx942"], 160, 16, 0, warps=8) == (2.0, "vgpr")
