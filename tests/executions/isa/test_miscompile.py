"""Do the edits change what they say, and nothing where nothing would change?"""

import pytest

from impl.executions.isa import encoding, miscompile
from impl.executions.isa.assembly import read_lines
from impl.executions.isa.miscompile import KINDS


def _words(line: str, kind: str, arch: str = "gfx950") -> list[str]:
    program = read_lines(arch, line)
    return [
        edit.words
        for edit in miscompile.edits(program, kind)
        if edit.at == 0 and miscompile.encoded(program, edit) is not None
    ]


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("v_sub_f32_e32 v1, v2, v3", "operands swapped", ["sources v2 and v3 swapped"]),
        ("v_add_f32_e32 v1, v2, v3", "operands swapped", []),
        ("v_sub_f32_e32 v1, v2, v2", "operands swapped", []),
        ("v_add_f32_dpp v1, v2, v3 row_shr:1 row_mask:0xf bank_mask:0xf", "operands swapped", ["sources v2 and v3 swapped"]),
        ("v_fma_f32 v1, v2, v3, v4", "operands swapped", ["sources v2 and v4 swapped", "sources v3 and v4 swapped"]),
        ("v_cndmask_b32_e32 v1, v2, v3, vcc", "operands swapped", ["sources v2 and v3 swapped"]),
        ("v_add_co_u32_e32 v1, vcc, v2, v3", "operands swapped", []),
        ("v_cmp_lt_i32_e32 vcc, v2, v3", "operands swapped", ["sources v2 and v3 swapped"]),
        ("s_cselect_b32 s1, s2, s3", "operands swapped", ["sources s2 and s3 swapped"]),
        ("v_mfma_f32_4x4x4_16b_f16 v[4:7], v[0:1], v[2:3], 0", "operands swapped", ["sources v[0:1] and v[2:3] swapped"]),
        ("v_exp_f32_e32 v1, v2", "instruction dropped", ["dropped"]),
        ("s_setprio 1", "instruction dropped", []),
        ("s_waitcnt vmcnt(0)", "instruction dropped", []),
        ("s_waitcnt vmcnt(0) lgkmcnt(3)", "wait weakened",
         ["dropped", "vmcnt(0) raised to 1", "lgkmcnt(3) raised to 4"]),
        ("s_barrier", "barrier dropped", ["dropped"]),
        ("v_cmp_lt_i32_e32 vcc, v2, v3", "relation changed", ["made v_cmp_le_i32", "made v_cmp_gt_i32"]),
        ("s_cmp_lg_u64 s[0:1], 0", "relation changed", ["made s_cmp_eq_u64"]),
        ("v_readlane_b32 s1, v2, 63", "lanes changed", ["lane 63 made 0", "lane 63 made 31"]),
        ("v_permlane32_swap_b32_e32 v1, v2", "lanes changed", ["made v_permlane16_swap_b32"]),
        ("v_mov_b32_dpp v1, v2 row_bcast:15 row_mask:0xa bank_mask:0xf bound_ctrl:1", "lanes changed",
         ["row_bcast:15 made row_bcast:31", *(f"row_mask:0xa bit {bit} flipped" for bit in range(4)),
          *(f"bank_mask:0xf bit {bit} flipped" for bit in range(4)), "bound_ctrl dropped"]),
        ("v_mul_f32_e64 v1, -v2, |v3|", "modifier dropped", ["negation of v2 dropped", "absolute value of v3 dropped"]),
        ("v_sub_u32_e64 v1, v2, 1 clamp", "modifier dropped", ["clamp dropped"]),
        ("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] neg_lo:[0,0,1] neg_hi:[0,0,1]", "modifier dropped",
         ["neg_lo of source 2 dropped", "neg_hi of source 2 dropped"]),
        ("v_cvt_f32_u32_sdwa v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3", "op_sel changed",
         ["src0_sel:BYTE_3 made BYTE_0"]),
    ],
)  # fmt: skip
def test_edits_of_a_line(line: str, kind: str, words: list[str]) -> None:
    assert _words(line, kind) == words


def test_constants_change_by_a_bit_or_by_one() -> None:
    assert _words("v_add_u32_e32 v1, 0x1000, v2", "constant changed") == [
        *(f"0x1000 bit {bit} flipped" for bit in range(32)), "0x1000 +1", "0x1000 -1",
    ]  # fmt: skip
    assert "1.0 bit 23 flipped" in _words("v_mul_f32_e32 v1, 1.0, v2", "constant changed")
    assert "offset:0 bit 2 flipped" in _words("ds_read_b32 v1, v2", "constant changed")


def test_packed_choice_that_is_not_written_can_change() -> None:
    words = _words("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", "op_sel changed")
    assert words == [
        "op_sel:[0, 0] made [1, 0]", "op_sel:[0, 0] made [0, 1]", "op_sel_hi:[1, 1] made [0, 1]", "op_sel_hi:[1, 1] made [1, 0]",
    ]  # fmt: skip


def test_edit_that_changes_nothing_executed_is_none() -> None:
    # Its two results read what op_sel alone says.
    words = _words("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[0,1] op_sel_hi:[1,1]", "op_sel changed")
    assert words == ["op_sel:[0, 1] made [1, 1]", "op_sel:[0, 1] made [0, 0]"]


def test_edit_replaces_one_instruction_and_keeps_labels() -> None:
    program = read_lines("gfx950", "v_mov_b32_e32 v1, v2\nover:\nv_exp_f32_e32 v1, v1\ns_cbranch_scc0 over")
    edit = miscompile.edits(program, "instruction dropped")[1]
    edited = miscompile.applied(program, edit)
    assert [each.mnemonic for each in edited.instructions] == ["v_mov_b32", "s_nop", "s_cbranch_scc0", "s_endpgm"]
    assert edited.targets == program.targets
    assert [each.mnemonic for each in program.instructions][1] == "v_exp_f32"
    before, after = encoding.encode(program).rows, encoding.encode(edited).rows
    assert [number for number in range(4) if (before[number] != after[number]).any()] == [1]


def test_every_kind_is_found_somewhere() -> None:
    lines = """v_sub_f32_dpp v1, -v2, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
    s_waitcnt vmcnt(0)
    s_barrier
    v_cmp_lt_i32_e32 vcc, 7, v3
    v_pk_add_f16 v1, v2, v3"""
    program = read_lines("gfx950", lines)
    assert {kind for kind in KINDS if miscompile.edits(program, kind)} == set(KINDS)
