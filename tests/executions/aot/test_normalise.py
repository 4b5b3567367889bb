"""Are two assembly texts told apart exactly where they are different programs?"""

import pytest

from impl.executions.aot.normalise import Difference, difference, shape_of

TEXT = """\
\t.amdgcn_target "amdgpu9.42-amd-amdhsa-unknown-gfx942"
\t.text
kernel:                                 ; @kernel
.Lfunc_begin0:
\t.loc\t1 10 0 prologue_end             ; kernel.py:10:0
\ts_load_dwordx2 s[4:5], s[0:1], 0x0
\tv_lshlrev_b32_e32 v1, 2, v0
\ts_waitcnt lgkmcnt(0)
\tglobal_load_dword v2, v1, s[4:5]
\tglobal_load_dword v3, v1, s[4:5] offset:256
.Ltmp0:
\ts_waitcnt vmcnt(0)
\tv_add_f32_e32 v4, v2, v3
\tv_mul_f32_e32 v5, v2, v3
\tv_sub_f32_e32 v4, v4, v5
\tds_write_b32 v1, v4
\ts_barrier
\tds_read_b32 v6, v1 offset:8
\ts_mov_b32 s7, 0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tv_fmac_f32_e32 v4, v6, v6
\ts_add_i32 s7, s7, 1
\ts_cmp_lt_i32 s7, s6
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\tv_mul_f32_e32 v4, 0.5, v4
\tv_cmp_gt_f32_e32 vcc, 1.0, v4
\tv_cndmask_b32_e32 v4, v4, v5, vcc
\tglobal_store_dword v1, v4, s[4:5]
\ts_endpgm
.Lfunc_end0:
\t.section\t.rodata,"a",@progbits
\t.quad\t5
"""


def compared(*edits: tuple[str, str]) -> Difference:
    """The text against itself with each edit made once."""
    edited = TEXT
    for before, after in edits:
        assert before in edited
        edited = edited.replace(before, after, 1)
    return difference(shape_of(TEXT), shape_of(edited))


def everywhere(**names: str) -> Difference:
    """The text against itself with registers renamed wherever they stand."""
    edited = TEXT
    for before in names:
        edited = edited.replace(f"{before},", f"<{before}>,").replace(f"{before}\n", f"<{before}>\n")
    for before, after in names.items():
        edited = edited.replace(f"<{before}>", after)
    assert edited != TEXT
    return difference(shape_of(TEXT), shape_of(edited))


def test_a_text_is_itself() -> None:
    assert compared() == "same"


def test_registers_that_hold_values_have_no_names() -> None:
    assert everywhere(v2="v9", v3="v2", v4="v17") == "same"


def test_registers_may_be_used_again() -> None:
    # The product's register is free once the difference is taken; nobody reads v6 before the read of LDS.
    assert compared(
        ("v_add_f32_e32 v4, v2, v3", "v_add_f32_e32 v6, v2, v3"), ("v_sub_f32_e32 v4, v4, v5", "v_sub_f32_e32 v4, v6, v5")
    ) == "same"  # fmt: skip


def test_labels_comments_and_debug_lines_mean_nothing() -> None:
    assert compared(
        (".LBB0_1:                                ; =>This Inner", ".LBB7_30:  ; no"),
        ("s_cbranch_scc1 .LBB0_1", "s_cbranch_scc1 .LBB7_30"),
        (".Ltmp0:\n", ""),
        ("\t.loc\t1 10 0 prologue_end             ; kernel.py:10:0\n", "\t.loc 1 99 0\n"),
    ) == "same"  # fmt: skip


def test_independent_instructions_may_change_places() -> None:
    add, product = "\tv_add_f32_e32 v4, v2, v3\n", "\tv_mul_f32_e32 v5, v2, v3\n"
    assert compared((add + product, product + add)) == "same but scheduled"


def test_loads_may_change_places_with_their_registers() -> None:
    first, second = "\tglobal_load_dword v2, v1, s[4:5]\n", "\tglobal_load_dword v3, v1, s[4:5] offset:256\n"
    assert compared((first + second, second + first)) == "same but scheduled"


def test_waiting_elsewhere_is_scheduling() -> None:
    assert compared(("\ts_waitcnt vmcnt(0)\n", "\ts_waitcnt vmcnt(1)\n")) == "same but scheduled"


@pytest.mark.parametrize(
    ("before", "after"),
    [("0.5, v4", "0.25, v4"), ("offset:256", "offset:512"), ("s_mov_b32 s7, 0", "s_mov_b32 s7, 1"), ("v1, 2, v0", "v1, 0x3, v0")],
)  # fmt: skip
def test_numbers_are_constants(before: str, after: str) -> None:
    assert compared((before, after)) == "changed constants"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("v_sub_f32_e32", "v_add_f32_e32"),
        # Operands the wrong way round, and another value in one's place.
        ("v_sub_f32_e32 v4, v4, v5", "v_sub_f32_e32 v4, v5, v4"),
        ("v_sub_f32_e32 v4, v4, v5", "v_sub_f32_e32 v4, v4, v2"),
        ("v_mul_f32_e32 v5, v2, v3", "v_mul_f32_e32 v5, v2, v2"),
        ("global_store_dword v1, v4,", "global_store_dword v1, v5,"),
        # A pair of scalars the call does not hand over at the same place.
        ("s_load_dwordx2 s[4:5], s[0:1]", "s_load_dwordx2 s[4:5], s[2:3]"),
        # The loop adds to something else; the condition is another value's.
        ("v_fmac_f32_e32 v4, v6, v6", "v_fmac_f32_e32 v5, v6, v6"),
        ("s_cmp_lt_i32 s7, s6", "s_cmp_lt_i32 s6, s7"),
        ("v4, v4, v5, vcc", "v4, v5, v4, vcc"),
        ("\ts_barrier\n", ""),
        ("s_cbranch_scc1", "s_cbranch_scc0"),
        # Out of the loop.
        ("; %bb.2:\n\tv_mul", "\tv_add_f32_e32 v4, v4, v6\n; %bb.2:\n\tv_mul"),
    ],
)
def test_another_program_is_changed(before: str, after: str) -> None:
    assert compared((before, after)) == "changed"


def test_an_access_that_crosses_a_barrier_is_changed() -> None:
    write, barrier = "\tds_write_b32 v1, v4\n", "\ts_barrier\n"
    assert compared((write + barrier, barrier + write)) == "changed"


def test_an_instruction_in_another_block_is_changed() -> None:
    move = "\ts_mov_b32 s7, 0\n"
    assert compared((move, ""), ("\tv_fmac_f32_e32", move + "\tv_fmac_f32_e32")) == "changed"


def test_what_goes_round_a_loop_is_followed() -> None:
    # In the loop, the counter that is compared is the one of the last time round instead of this one.
    add, test = "\ts_add_i32 s7, s7, 1\n", "\ts_cmp_lt_i32 s7, s6\n"
    assert compared((add + test, test + "\ts_add_i32 s8, s7, 1\n\ts_mov_b32 s7, s8\n")) == "changed"


def between(before: str, after: str) -> Difference:
    """Two kernels of these instructions, one a line."""
    first, second = (
        "kernel:\n" + "".join(f"\t{line.strip()}\n" for line in text.split(";")) for text in (before, after)
    )
    return difference(shape_of(first), shape_of(second))


def test_a_condition_is_that_of_the_comparison_before() -> None:
    less, equal = "s_cmp_lt_i32 s6, s7", "s_cmp_eq_u32 s6, s7"
    first, second = "s_cselect_b32 s8, s2, s3", "s_cselect_b32 s9, s3, s2"
    assert between(f"{less};{first};{equal};{second}", f"{equal};{second};{less};{first}") == "same but scheduled"
    assert between(f"{less};{first};{equal};{second}", f"{equal};{first};{less};{second}") == "changed"


def test_what_is_added_to_is_read() -> None:
    start = "v_mul_f32 v4, v0, v0;v_exp_f32 v5, v0;"
    end = "v_fmac_f32 v{0}, v1, v1;v_fmac_f32 v{1}, v2, v2;"
    end += "global_store_dword v0, v{0}, s[2:3];global_store_dword v1, v{1}, s[2:3]"
    assert between(start + end.format(4, 5), start.replace("v4", "v6") + end.format(6, 5)) == "same"
    assert between(start + end.format(4, 5), start + end.format(5, 4)) == "changed"


def test_a_value_from_the_last_time_round_is_followed() -> None:
    # Whether the move's result comes round again shows at its reader only: which register it goes to has no name.
    loop = ".LBB0_1:\n\tv_fmac_f32 v4, v8, v8\n\tv_mov_b32 {}, v2\n\ts_cmp_lt_i32 s7, s6\n\ts_cbranch_scc1 .LBB0_1\n"
    start = "kernel:\n\tv_mov_b32 v8, v3\n"
    assert difference(shape_of(start + loop.format("v8")), shape_of(start + loop.format("v9"))) == "changed"


def test_instructions_stay_in_their_blocks() -> None:
    one, two = "\tv_exp_f32 v4, v0\n", "\ts_cbranch_vccz .LBB0_1\n.LBB0_1:\n"
    assert difference(shape_of(f"k:\n{one}{two}"), shape_of(f"k:\n{two}{one}")) == "changed"
