"""Is LLVM's text read to the letter, and is what has no place in it refused in one sentence that names the line?"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from impl.executions.isa import encoding, machine
from impl.executions.isa.assembly import Operand, Program, read, read_lines
from impl.executions.isa.encoding import encode
from impl.executions.isa.single import run_lines
from impl.executions.isa.unsupported import UnsupportedInstruction
from tests.executions.isa.assembler import accepts
from tests.executions.isa.kernel_text import FILE, kernel_text, launched

# numba says on every call that passing compiled functions is new.
pytestmark = pytest.mark.filterwarnings("ignore:First-class function type feature")


def operands(line: str) -> tuple[Operand, ...]:
    """The operands of a line."""
    return read_lines("gfx950", line).instructions[0].operands


def modifiers(line: str) -> dict[str, Any]:
    """The modifiers of a line."""
    return read_lines("gfx950", line).instructions[0].modifiers


def row(line: str, arch: str = "gfx950") -> Any:
    """The line as the executor gets it."""
    return encode(read_lines(arch, line)).rows[0]


def constant(line: str, place: int = encoding.SRC0) -> int:
    """The 64 bits of a constant source of a line."""
    encoded = encode(read_lines("gfx950", line))
    return int(encoded.literals[encoded.rows[0][place] - encoding.LITERAL_BASE])


# registers: (text, kind, first register, registers)
REGISTERS = [
    ("v0", "v", 0, 1), ("v255", "v", 255, 1), ("v[4:7]", "v", 4, 4), ("v[16:31]", "v", 16, 16), ("a3", "v", 259, 1),
    ("a[0:3]", "v", 256, 4), ("s101", "s", 101, 1), ("s[2:3]", "s", 2, 2), ("vcc", "s", 106, 2), ("vcc_lo", "s", 106, 1),
    ("vcc_hi", "s", 107, 1), ("exec", "s", 126, 2), ("exec_hi", "s", 127, 1), ("m0", "s", 124, 1), ("flat_scratch", "s", 102,
        2),
    ("xnack_mask_hi", "s", 105, 1), ("src_scc", "s", 128, 1), ("off", "off", 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "index", "count"), REGISTERS)
def test_a_register_is_read(text: str, kind: str, index: int, count: int) -> None:
    found = operands(f"v_some {text}")[0]
    assert (found.kind, found.index, found.count) == (kind, index, count)


@pytest.mark.parametrize(
    ("text", "negative", "absolute", "extended"),
    [
        ("v1", False, False, False), ("-v1", True, False, False), ("|v1|", False, True, False), ("-|v1|", True, True, False),
        ("neg(v1)", True, False, False), ("abs(v1)", False, True, False), ("-s[2:3]", True, False, False),
        ("sext(v1)", False, False, True), ("-|s1|", True, True, False),
    ],
)  # fmt: skip
def test_what_changes_a_source_s_sign_is_read(text: str, negative: bool, absolute: bool, extended: bool) -> None:
    found = operands(f"v_some v0, {text}, v2")[1]
    assert (found.negative, found.absolute, found.sign_extended) == (negative, absolute, extended)
    assert found.index in (1, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("64", 64), ("-16", -16), ("0x27000", 0x27000), ("0xffffffff", 2**32 - 1), ("-0x10", -16)],
)
def test_a_whole_number_is_read(text: str, value: int) -> None:
    assert (operands(f"s_some s0, {text}")[1].kind, operands(f"s_some s0, {text}")[1].value) == ("constant", value)


@pytest.mark.parametrize(
    ("text", "f32", "f16"),
    [
        ("0.5", 0x3F000000, 0x3800), ("-0.5", 0xBF000000, 0xB800), ("1.0", 0x3F800000, 0x3C00), ("-1.0", 0xBF800000, 0xBC00),
        ("2.0", 0x40000000, 0x4000), ("-2.0", 0xC0000000, 0xC000), ("4.0", 0x40800000, 0x4400), ("-4.0", 0xC0800000, 0xC400),
        ("0.15915494", 0x3E22F983, 0x3118),
    ],
)  # fmt: skip
def test_an_inline_float_has_the_width_of_its_instruction(text: str, f32: int, f16: int) -> None:
    assert constant(f"v_add_f32_e32 v0, {text}, v1") == f32
    assert constant(f"v_add_f16_e32 v0, {text}, v1") == f16
    assert constant(f"v_and_b32_e32 v0, {text}, v1") == f32
    assert constant(f"s_mov_b32 s0, {text}") == f32


@pytest.mark.parametrize(
    ("text", "bits"), [("1.0", 0x3FF0000000000000), ("-4.0", 0xC010000000000000), ("0.5", 0x3FE0000000000000)]
)
def test_an_inline_float_of_64_bits_is_a_double(text: str, bits: int) -> None:
    assert constant(f"v_add_f64 v[0:1], {text}, v[2:3]") == bits


@pytest.mark.parametrize(
    "line", ["s_mov_b64 s[0:1], 1.0", "v_mov_b64_e32 v[0:1], 1.0", "s_and_b64 s[0:1], 1.0, s[2:3]"]
)
def test_an_inline_float_of_64_bits_is_a_double_for_integers_too(line: str) -> None:
    assert constant(line) == 0x3FF0000000000000


def test_the_inverse_of_two_pi_is_spelt_longer_in_64_bits() -> None:
    assert constant("v_add_f64 v[0:1], 0.15915494309189532, v[2:3]") == 0x3FC45F306DC9C882


@pytest.mark.parametrize(
    ("line", "bits"),
    [
        ("v_add_f64 v[0:1], 0x40080000, v[2:3]", 0x40080000_00000000),
        ("v_add_f64 v[0:1], 3, v[2:3]", 3),
        ("s_mov_b64 s[0:1], -1", 2**64 - 1),
        ("s_mov_b64 s[0:1], 0xffffffff", 2**32 - 1),
        ("v_ashrrev_i64 v[0:1], 3, 0x80000000", 2**64 - 2**31),
        ("v_pk_fma_f32 v[0:1], 1.0, v[2:3], v[4:5] op_sel_hi:[0,1,1]", 0x3F800000_3F800000),
        ("v_pk_mul_f32 v[0:1], 0x3fb8aa3b, v[2:3] op_sel_hi:[0,1]", 0x3FB8AA3B_3FB8AA3B),
        ("v_pk_add_f16 v0, 1.0, v1 op_sel_hi:[0,1]", 0x3C00),
    ],
)
def test_a_constant_of_64_bits_or_two_halves_is_widened(line: str, bits: int) -> None:
    assert constant(line, encoding.SRC1 if "ashrrev" in line else encoding.SRC0) == bits


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ds_read2_b32 v[0:1], v2 offset0:4 offset1:255", {"offset0": 4, "offset1": 255}),
        ("buffer_load_dword v0, v1, s[4:7], 0 offen offset:4095 sc0 nt", {"offen": 1, "offset": 4095, "sc0": 1, "nt": 1}),
        ("buffer_load_dword v1, s[4:7], 0 offen lds", {"offen": 1, "lds": 1}),
        ("global_load_dword v0, v1, s[0:1] offset:-8", {"offset": -8}),
        ("v_pk_fma_f16 v0, v1, v2, v3 op_sel:[0,0,1] op_sel_hi:[1,0,1] neg_lo:[1,0,0] neg_hi:[0,1,0]",
         {"op_sel": (0, 0, 1), "op_sel_hi": (1, 0, 1), "neg_lo": (1, 0, 0), "neg_hi": (0, 1, 0)}),
        ("v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xa bound_ctrl:1",
         {"quad_perm": (1, 0, 3, 2), "row_mask": 15, "bank_mask": 10, "bound_ctrl": 1}),
        ("v_max_f32_dpp v0, v1, v2 row_half_mirror row_mask:0xf bank_mask:0xf", {"row_half_mirror": 1, "row_mask": 15,
            "bank_mask": 15}),
        ("v_lshlrev_b32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1",
         {"dst_sel": "DWORD", "dst_unused": "UNUSED_PAD", "src0_sel": "BYTE_1", "src1_sel": "WORD_1"}),
        ("v_bitop3_b32 v0, v1, v2, v3 bitop3:0x6c", {"bitop3": 0x6C}),
        ("v_sub_u32_e64 v0, v1, v2 clamp", {"clamp": 1}),
        ("s_waitcnt vmcnt(3) lgkmcnt(1)", {"vmcnt": 3, "lgkmcnt": 1}),
        ("s_waitcnt vmcnt(0) & expcnt(0) & lgkmcnt(0)", {"vmcnt": 0, "expcnt": 0, "lgkmcnt": 0}),
        ("s_waitcnt 0xc07f", {"raw": 0xC07F}),
    ],
)  # fmt: skip
def test_modifiers_are_read(line: str, found: dict[str, Any]) -> None:
    assert modifiers(line) == found


@pytest.mark.parametrize(
    ("text", "mnemonic", "suffix"),
    [("v_mov_b32_e32", "v_mov_b32", "e32"), ("v_add_f32_e64", "v_add_f32", "e64"), ("v_add_u16_sdwa", "v_add_u16", "sdwa"),
     ("v_mov_b32_dpp", "v_mov_b32", "dpp"), ("v_add_f32_e64_dpp", "v_add_f32", "e64_dpp"), ("v_fma_f32", "v_fma_f32", ""),
     ("s_mov_b32", "s_mov_b32", "")],
)  # fmt: skip
def test_the_encoding_s_suffix_is_no_part_of_the_mnemonic(text: str, mnemonic: str, suffix: str) -> None:
    found = read_lines("gfx942", f"{text} v0, v1").instructions[0]
    assert (found.mnemonic, found.suffix) == (mnemonic, suffix)


@pytest.mark.parametrize(
    ("line", "vm", "lgkm"),
    [("s_waitcnt vmcnt(5)", 5, 15), ("s_waitcnt lgkmcnt(2)", 63, 2), ("s_waitcnt vmcnt(40) lgkmcnt(0)", 40, 0),
     ("s_waitcnt 0", 0, 0), ("s_waitcnt 0xc07f", 63, 0), ("s_waitcnt 0x3f70", 0, 15), ("s_waitcnt 0xcf7f", 63, 15)],
)  # fmt: skip
def test_a_wait_says_how_many_may_be_open(line: str, vm: int, lgkm: int) -> None:
    assert row(line)[[encoding.OP, encoding.IMMEDIATE]].tolist() == [vm, lgkm]


def test_sdwa_is_encoded() -> None:
    found = row(
        "v_add_u32_sdwa v0, sext(v1), v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:DWORD"
    )
    assert found[encoding.SELECT0] == encoding.SIGNED_SELECT | encoding.BYTE_0 + 3
    assert found[encoding.SELECT1] == encoding.DWORD - encoding.DWORD
    assert found[encoding.SELECT_DST] == encoding.WORD_0 + 1 | encoding.KEEP_REST


def test_dpp_is_encoded() -> None:
    found = row("v_mov_b32_dpp v0, v1 quad_perm:[3,0,1,2] row_mask:0x5 bank_mask:0xc bound_ctrl:1")
    assert found[[encoding.DPP, encoding.DPP_VALUE]].tolist() == [1, 3 | 0 << 2 | 1 << 4 | 2 << 6]
    assert found[encoding.DPP_MASKS] == 0x5 | 0xC << 4 | 1 << 8


def test_labels_lead_to_the_instruction_behind_them() -> None:
    program = read(kernel_text("s_nop 0\n.LBB0_1:\ns_nop 1\ns_cbranch_scc1 .LBB0_1\ns_branch .LBB0_3\n.LBB0_3:"))
    assert program.targets[".LBB0_1"] == 1
    assert program.targets[".LBB0_3"] == 4
    assert [str(at.text).split()[0] for at in program.instructions] == [
        "s_nop", "s_nop", "s_cbranch_scc1", "s_branch", "s_endpgm"
    ]  # fmt: skip


def test_a_kernel_s_text_is_read() -> None:
    text = kernel_text(
        "s_nop 0  ; a remark\n// another\nv_mov_b32_e32 v0, 1 // and one more", lds=512, scratch=16,
        metadata="      - .offset: 0\n        .size: 8\n        .value_kind: global_buffer\n    .kernarg_segment_size: 24",
    )  # fmt: skip
    program = read(text)
    assert (program.name, program.arch) == ("watched", "gfx942")
    assert program.directive("group_segment_fixed_size") == 512
    assert program.directive("private_segment_fixed_size") == 16
    assert program.directive("no_such", 7) == 7
    assert [(argument.offset, argument.size, argument.kind) for argument in program.arguments] == [
        (0, 8, "global_buffer")
    ]
    assert program.argument_bytes == 24
    first, second = program.instructions[0], program.instructions[1]
    assert (first.text, first.source) == ("s_nop 0", f"{FILE}:1")
    assert (second.text, second.source) == ("v_mov_b32_e32 v0, 1", f"{FILE}:3")
    assert text.splitlines()[second.line - 1].strip().startswith("v_mov_b32_e32")


def test_a_line_zero_is_the_line_before() -> None:
    program = read(kernel_text("s_nop 0\n.loc\t1 0 0 is_stmt 0\ns_nop 1").replace("\t.loc\t1 3 5\n", ""))
    assert [at.source for at in program.instructions[:2]] == [f"{FILE}:1", f"{FILE}:2"]


@pytest.mark.parametrize(
    "file", ['"/kernels//attention" "watched.py"', '"https://example.org" "watched.py"', '"/a;b" "watched.py"']
)
def test_a_source_file_s_name_may_look_like_a_remark(file: str) -> None:
    program = read(kernel_text("s_nop 0").replace(f'"/kernels" "{FILE}"', file))
    assert program.instructions[0].source == "watched.py:1"


@pytest.mark.parametrize(
    "target",
    ["amdgcn-amd-amdhsa--gfx942", "amdgpu9.42-amd-amdhsa-unknown-gfx942", "amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-"],
)
def test_the_architecture_is_the_target_s(target: str) -> None:
    assert read(kernel_text("s_nop 0").replace("amdgcn-amd-amdhsa--gfx942", target)).arch == "gfx942"


PTX = ".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry add(.param .u64 p)\n{\n\tret;\n}\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the text names no .amdgcn_target and .amdhsa_kernel: it should be LLVM's amdgcn assembly"),
        (PTX, "the text names no .amdgcn_target and .amdhsa_kernel: it should be LLVM's amdgcn assembly"),
        (kernel_text("s_nop 0").replace(".amdgcn_target", ".target"),
         "the text names no .amdgcn_target and .amdhsa_kernel: it should be LLVM's amdgcn assembly"),
        (kernel_text("s_nop 0") + kernel_text("s_nop 0").replace("watched", "second"),
            "the text holds 2 kernels: it should hold one"),
        (kernel_text("s_nop 0").replace("version 5", "version 3"), "code object version 3: 4 to 6 are read"),
    ],
)  # fmt: skip
def test_another_text_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UnsupportedInstruction) as found:
        read(text)
    assert str(found.value) == sentence


@pytest.mark.parametrize("arch", ["gfx90a", "gfx908", "gfx1100", "gfx940"])
def test_another_architecture_is_refused(arch: str) -> None:
    with pytest.raises(UnsupportedInstruction) as found:
        machine.prepare(read(kernel_text("s_nop 0", arch)))
    assert str(found.value) == f"{arch} is not modelled: gfx942 and gfx950 are"


REFUSED = {
    "v_no_such_f32 v0, v1": "v_no_such_f32 is not modelled",
    "s_no_such s0": "s_no_such is not modelled",
    "ds_no_such v0, v1": "ds_no_such is not modelled",
    "global_load_no_such v0, v[1:2], off": "global_load_no_such is not modelled",
    "buffer_atomic_no_such v0, v1, s[4:7], 0 offen": "buffer_atomic_no_such is not modelled",
    "v_add_f32_e64 v0, v1, v2 mul:2": "the modifier 'mul' is not known on v_add_f32",
    "v_add_f32_e64 v0, v1, v2 no_such:3": "the modifier 'no_such' is not known on v_add_f32",
    "v_add_f32_e64 v0, v1, v2 no_such:three": "the modifier 'no_such:three' is not known",
    "v_add_f32_e64 v0, v1, v2 glc": "the modifier 'glc' is not known on v_add_f32",
    "global_load_dword v0, v[1:2], off tfe": "the modifier 'tfe' is not known on global_load_dword",
    "buffer_load_dword v0, v1, s[4:7], 0 idxen": "idxen is not modelled",
    "ds_read_b32 v0, v1 gds": "the modifier 'gds' is not known on ds_read_b32",
    "v_add_f16_e64 v0, v1, v2 clamp": "clamp is not modelled on v_add_f16",
    "v_add_f32_e32 v0, v1, no_such": "'no_such' cannot be read here",
    "v_add_f32_e32 v0, v1, src_shared_base": "'src_shared_base' cannot be read here",
    "v_add_f32_e32 v0, v1, {v2}": "the operand '{v2}' is not known",
    "v_add_f32_e32 s0, v1, v2": "'s0' cannot be written here",
    "v_add_f32_e32 v0, v1": "it has 1 sources: 2 are known",
    "v_add_f32_e32 v0, v1, v2, v3": "it has 3 sources: 2 are known",
    "s_add_u32 v0, s1, s2": "'v0' cannot be written here",
    "s_add_u32 s0, s1, v2": "'v2' cannot be read here",
    "s_mov_b32 src_scc, 0": "'src_scc' cannot be written here",
    "s_add_u32 s0, s1": "it has 1 sources: 2 are known",
    "v_mov_b32_dpp v0, v1 wave_shl:1 row_mask:0xf bank_mask:0xf": "its lane pattern is not known",
    "v_mov_b32_dpp v0, v1 row_bcast:7 row_mask:0xf bank_mask:0xf": "row_bcast:7 is not known",
    "v_mov_b32_sdwa v0, v1 dst_sel:BYTE_7 dst_unused:UNUSED_PAD src0_sel:DWORD":
        "dst_sel:BYTE_7 dst_unused:UNUSED_PAD is not known",
    "v_mov_b32_sdwa v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_2": "src0_sel:WORD_2 is not known",
    "v_mfma_f32_16x16x16_f16 v[0:3], v[4:7], v[8:9], 0": "v[4:7] should be 2 vector or accumulation registers",
    "v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], 0 cbsz:1":
        "the modifier 'cbsz' is not modelled on v_mfma_f32_32x32x8_f16",
    "v_smfmac_f32_16x16x32_f16 v[0:3], v[4:5], v[8:11], v1": "v_smfmac_f32_16x16x32_f16 is not modelled",
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3":
        "of the MODE register only FP16_OVFL (bit 23) is modelled, not bits 0 to 3",
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 0":
        "of the MODE register only FP16_OVFL (bit 23) is modelled, not bits 4 to 7",
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 2), 1":
        "of the MODE register only FP16_OVFL (bit 23) is modelled, not bits 23 to 24",
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE), 1": "setting hwreg(HW_REG_MODE) is not modelled",
    "s_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS, 23, 1), 1": "setting hwreg(HW_REG_TRAPSTS,23,1) is not modelled",
    "s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s0": "s_setreg_b32 is not modelled",
    "s_getreg_b32 s0, hwreg(HW_REG_MODE)": "s_getreg_b32 is not modelled",
    "s_getpc_b64 s[4:5]": "s_getpc_b64 is not modelled",
    "s_swappc_b64 s[30:31], s[4:5]": "s_swappc_b64 is not modelled",
    "s_setpc_b64 s[30:31]": "s_setpc_b64 is not modelled",
    "s_branch .Lelsewhere": "the label .Lelsewhere is not in the kernel",
    "s_memtime s[4:5]": "s_memtime is not modelled",
    "ds_swizzle_b32 v0, v1 offset:0xe000": "this swizzle pattern is not modelled",
    "v_div_scale_f32 v0, vcc, v1, v2": "it has 2 sources: 3 are known",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_modelled_is_named_with_its_line(line: str) -> None:
    with pytest.raises(UnsupportedInstruction) as found:
        encode(read_lines("gfx942", f"s_nop 0\n{line}"))
    assert str(found.value) == f"line 3, {line!r}: {REFUSED[line]}"


ONE_ARCHITECTURE = {
    "gfx942": [
        "v_mfma_f32_16x16x8_xf32 v[0:3], v[4:5], v[6:7], 0",
        "v_mfma_f32_32x32x4_xf32 v[0:15], v[16:17], v[18:19], 0",
    ],
    "gfx950": [
        "v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0",
        "v_mfma_f32_32x32x16_f16 v[0:15], v[16:19], v[20:23], 0",
        "v_mfma_i32_16x16x64_i8 v[0:3], v[4:7], v[8:11], 0",
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0",
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0, v20, v21 op_sel_hi:[0,0,0]",
        "v_cvt_pk_bf16_f32 v0, v1, v2", "v_cvt_scalef32_pk_f32_fp8 v[0:1], v2, v3", "v_cvt_f32_bf16_e32 v0, v1",
        "v_permlane16_swap_b32_e32 v0, v1", "v_permlane32_swap_b32_e32 v0, v1", "ds_read_b64_tr_b16 v[0:1], v2",
        "ds_read_b64_tr_b8 v[0:1], v2", "buffer_load_dwordx4 v0, s[4:7], 0 offen lds",
        "v_bitop3_b16 v0, v1, v2, v3 bitop3:0x6c",
    ],
}  # fmt: skip
OTHER = {"gfx942": "gfx950", "gfx950": "gfx942"}


@pytest.mark.parametrize(("arch", "line"), [(arch, line) for arch, lines in ONE_ARCHITECTURE.items() for line in lines])
def test_an_instruction_of_one_architecture_is_refused_on_the_other(arch: str, line: str) -> None:
    encode(read_lines(arch, line))
    with pytest.raises(
        UnsupportedInstruction, match=f"^line 2, {re.escape(repr(line))}: .* (on|not exist on) {OTHER[arch]}$"
    ):
        encode(read_lines(OTHER[arch], line))


def test_an_instruction_of_gfx950_that_is_not_modelled_is_refused_on_both() -> None:
    for arch in OTHER:
        with pytest.raises(UnsupportedInstruction, match="v_pk_minimum3_f16 is not modelled"):
            encode(read_lines(arch, "v_pk_minimum3_f16 v0, v1, v2, v3"))


@pytest.mark.parametrize(
    "line",
    ["v_bitop3_b32 v0, v1, v2, v3 bitop3:0x6c", "v_maximum3_f32 v0, v1, v2, v3", "v_minimum3_f32 v0, v1, v2, v3",
     "global_load_lds_dwordx4 v[0:1], off", "global_load_lds_dwordx3 v[0:1], off"],
)  # fmt: skip
def test_an_instruction_that_came_with_gfx950_is_refused_on_gfx942(line: str) -> None:
    encode(read_lines("gfx950", line))
    with pytest.raises(UnsupportedInstruction):
        encode(read_lines("gfx942", line))


@pytest.mark.parametrize("size", ["dwordx2"])
@pytest.mark.parametrize("access", ["buffer_load_{} v0, s[4:7], 0 offen lds", "global_load_lds_{} v[0:1], off"])
def test_no_architecture_loads_eight_bytes_into_lds(access: str, size: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        encode(read_lines("gfx950", access.format(size)))


# Text that no compiler writes.
MALFORMED = [
    "v_mov_b32_dpp v0, v1 row_shl:1 quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf",
    "v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,4] row_mask:0xf bank_mask:0xf",
    "v_mov_b32_dpp v0, v1 row_shl:16 row_mask:0xf bank_mask:0xf",
    "v_mov_b32_e32 v0, s102", "s_mov_b32 s106, 0", "s_movk_i32 s0, 0x12345", "s_waitcnt vmcnt(64)", "s_waitcnt vmcnt(0) lgkmcnt",
    "s_waitcnt", "v_add_u32_e64 v0, -v1, v2", "v_add_u32_e64 v0, sext(v1), v2", "s_and_b32 s0, -s1, s2", "s_and_b32 scc, s1, s2",
    "v_readfirstlane_b32 src_scc, v0", "v_fmaak_f32 v0, v1, v2, v3", "v_add_f32_e32 a0, v1, v2", "v_and_b32_e32 v0, a1, v2",
    "v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], v[4:19]", "v_mfma_f32_32x32x8_f16 a[0:15], a[16:17], a[18:19], a[4:19]",
    "v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], v[0:15] op_sel_hi:[0,0,0]", "v_add_f32_e64 v0, v1, v2 clamp:1",
    "v_add_f32_e64 v0, v1, v2 op_sel_hi:[0,0]", "v_pk_add_f16 v0, v1, v2 op_sel:[2,0]", "v_pk_add_f16 v0, v1, v2 op_sel:[a,0]",
    "ds_read2_b32 v[0:1], v2 offset0:256", "ds_read_b32 v0, v1 offset0:1", "v_cndmask_b32_e32 v0, v1, v2, s[0:1]",
    "v_add_co_u32_e32 v0, s[0:1], v1, v2", "v_add_f32_e64 v0, v1, v2 src0_sel:WORD_1", "s_barrier s0", "buffer_inv v0",
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), s0", "s_trap s0", "buffer_load_dword v0, v1, s[4:7], 0",
    "buffer_load_dword v0, off, s[4:7], 0 offen", "global_load_dword v0, v[2:3], s[4:5]", "flat_load_dword v0, v[2:3], off",
    "global_load_dword no_such, v[2:3], off", "global_load_dword s5, v[2:3], off", "global_load_dwordx4 v5, v[2:3], off",
    "global_load_dword v5, v2, off", "global_store_dwordx2 v1, v5, s[0:1]", "ds_read_b32 s1, v0", "ds_read_b64 v1, v0",
    "ds_write_b32 v0, 5", "v_readlane_b32 ttmp0, v1, 0", "v_readfirstlane_b32 v1, v2", "v_writelane_b32 s1, 0, 0",
    "buffer_load_dword v1, v0, v[4:7], 0 offen", "s_load_dword v1, s[0:1], 0x0", "s_load_dwordx2 s5, s[0:1], 0x0",
    "v_cmp_eq_u32_e64 v[0:1], v2, v3", "v_cndmask_b32_e64 v0, v1, v2, v[4:5]", "v_add_f64 v0, v[2:3], v[4:5]",
    "s_mov_b32 s[0:1], s2", "s_mov_b64 s0, s[2:3]", "v_mov_b32_e32 v[0:1], v2", "v_permlane32_swap_b32_e32 v0, s1",
    "v_swap_b32 v0, 1",
    "s_mov_b32 s200, 0", "v_mov_b32_e32 v600, 0", "v_mov_b32_e32 v256, 0",
    "v_mfma_f32_32x32x8_f16 a[250:265], v[0:1], v[2:3], 0",
    "v_mfma_f32_16x16x16_f16 v[0:1], v[4:5], v[8:9], 0", "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[8:9], v[0:1]",
    "s_waitcnt vmcount(0)", "s_waitcnt no_such", "s_add_u32 s0, s1, s2 no_such:3", "s_branch .Lend no_such:1",
    "s_nop 0 no_such:1",
    "s_load_dword s0, s[2:3], 0x0 no_such:1", "v_readlane_b32 s0, v1, 0 no_such:1",
    "global_load_dword v1, v[2:3], off offset:HERE",
    "ds_read_b32 v1, v0 offset:HERE", "v_bitop3_b32 v0, v1, v2, v3 bitop3:HERE", "global_load_dword v1", "global_load_dword",
    "s_branch",
    "s_mov_b32", "v_mov_b32_e32", "ds_read_b32 v1", "v_readlane_b32 s0", "v_mfma_f32_16x16x16_f16 v[0:3]", "s_load_dword s0",
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1)", "v_cmp_eq_u32_e32 s[0:1], v2, v3",
]  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED)
def test_operands_that_do_not_fit_are_refused(line: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        encode(read_lines("gfx950", f"{line}\n.Lend:"))


# One line of each kind of operands, all of which LLVM's assembler takes.
WELL_FORMED = [
    "v_add_f32_e64 v5, -v6, |s7|", "v_add_f64 v[4:5], v[6:7], s[8:9]", "v_mad_u64_u32 v[4:5], s[6:7], v8, v9, v[10:11]",
    "v_lshlrev_b64 v[4:5], v6, v[8:9]", "v_cndmask_b32_e64 v4, v5, v6, s[8:9]", "v_addc_co_u32_e64 v4, s[6:7], v8, v9, s[10:11]",
    "v_cmp_lt_u64_e64 s[4:5], v[6:7], v[8:9]", "v_cmp_lt_u32_e32 vcc, v6, v8", "v_pk_fma_f32 v[4:5], v[6:7], s[8:9], v[10:11]",
    "v_pk_add_f16 v4, v5, v6", "v_cvt_f32_f64_e32 v4, v[6:7]", "v_cvt_pk_f32_fp8_e32 v[4:5], v6", "v_fmac_f32_e32 v4, v5, v6",
    "v_cvt_scalef32_pk_f32_fp8 v[4:5], v6, v7", "v_accvgpr_write_b32 a4, v5", "v_accvgpr_read_b32 v4, a5",
    "v_div_scale_f32 v4, vcc, v5, v5, v6", "v_mov_b32_dpp v4, v5 row_shl:1 row_mask:0xf bank_mask:0xf",
    "v_add_u32_sdwa v4, v5, v6 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
    "v_readfirstlane_b32 s4, v5", "v_readlane_b32 s4, v5, s6", "v_writelane_b32 v4, s5, 6", "v_swap_b32 v4, v5",
    "v_permlane16_swap_b32_e32 v4, v5", "s_mov_b64 s[4:5], s[6:7]", "s_add_u32 s4, s5, s6", "s_lshl_b64 s[4:5], s[6:7], s8",
    "s_cmp_eq_u64 s[4:5], s[6:7]", "s_bitset1_b32 s4, s5", "s_cmpk_lt_i32 s4, 0x7", "s_and_saveexec_b64 s[4:5], s[6:7]",
    "s_movk_i32 s4, 0x7", "s_load_dwordx4 s[4:7], s[8:9], 0x10", "s_buffer_load_dwordx2 s[4:5], s[8:11], s12",
    "buffer_load_dwordx4 v[4:7], v8, s[8:11], s12 offen offset:16", "buffer_load_dword v5, s[8:11], 0 offen lds",
    "buffer_store_dwordx3 v[4:6], off, s[8:11], 0", "buffer_load_ushort v4, v5, s[8:11], 0 offen",
    "buffer_atomic_cmpswap_x2 v[4:7], v8, s[8:11], 0 offen sc0", "global_load_dwordx2 v[4:5], v[6:7], off",
    "global_load_dword v4, v5, s[6:7]", "global_store_dwordx4 v4, v[8:11], s[6:7]", "global_load_lds_dword v4, s[6:7]",
    "global_atomic_cmpswap v4, v[6:7], v[8:9], off sc0", "global_atomic_add_f32 v4, v5, s[6:7]", "flat_load_dword v4, v[6:7]",
    "flat_store_dwordx2 v[4:5], v[6:7]", "scratch_load_dwordx2 v[4:5], v6, s7", "scratch_store_dword off, v4, s5",
    "ds_read_b128 v[4:7], v8", "ds_read2_b64 v[4:7], v8 offset1:1", "ds_write2_b32 v4, v5, v6 offset1:1",
    "ds_write_b64 v4, v[6:7]",
    "ds_read_u16_d16_hi v4, v5", "ds_add_rtn_u32 v4, v5, v6", "ds_max_i32 v4, v5", "ds_bpermute_b32 v4, v5, v6",
    "ds_swizzle_b32 v4, v5 offset:7", "ds_read_b64_tr_b16 v[4:5], v6",
    "v_mfma_f32_32x32x8_f16 a[0:15], v[16:17], v[18:19], a[0:15]", "v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]",
    "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:15], v[0:3], v20, v21 op_sel_hi:[0,0,0] blgp:4",
    "s_nop 3", "s_barrier", "s_branch .Lend", "s_waitcnt vmcnt(0)",
]  # fmt: skip


def refused(line: str) -> bool:
    """Whether a line is no instruction."""
    try:
        encode(read_lines("gfx950", f"{line}\n.Lend:"))
    except UnsupportedInstruction as why:
        assert repr(line) in str(why)
        return True
    return False


def spelled(line: str, place: int, text: str) -> str:
    """The line with another operand."""
    old = read_lines("gfx950", line).instructions[0].operands[place].text
    head, *rest = re.split(rf"(?<![\w\[]){re.escape(old)}(?![\w\]])", line)
    before = [operand.text for operand in operands(line)[:place]].count(old)
    return old.join([head, *rest[:before]]) + text + old.join(rest[before:])


def registers(file: str, first: int, count: int) -> str:
    """A tuple of registers as LLVM writes it."""
    return f"{file}{first}" if count == 1 else f"{file}[{first}:{first + count - 1}]"


@pytest.mark.parametrize("line", WELL_FORMED)
def test_a_register_more_or_less_is_refused(line: str) -> None:
    assert not refused(line)
    for place, operand in enumerate(operands(line)):
        if not operand.count or operand.text == "vcc":
            continue
        first = operand.index - (256 if operand.index >= 256 else 0)
        for count in {operand.count + 1, operand.count - 1, 2 * operand.count} - {0}:
            other = spelled(line, place, registers(operand.text[0], first, count))
            assert refused(other), other


@pytest.mark.parametrize("line", WELL_FORMED)
def test_an_operand_more_or_less_or_of_no_kind_is_refused(line: str) -> None:
    for place, operand in enumerate(operands(line)):
        assert refused(spelled(line, place, "ttmp0")), operand
        assert refused(spelled(line, place, f"{operand.text}, v9")), operand
    if operands(line) and not line.startswith(("v_cmp_lt_u32_e32", "s_load", "s_buffer_load")):
        shorter = spelled(line, 0, "").replace(" ,", "", 1).strip()
        assert refused(shorter), shorter


@pytest.mark.parametrize("line", WELL_FORMED)
@pytest.mark.parametrize("modifier", ["no_such:1", "tfe", "mul:2", "offset2:1", "op_sel:3", "op_sel_hi:[0,2]", "sc0:1"])
def test_a_modifier_of_no_instruction_is_refused(line: str, modifier: str) -> None:
    assert refused(f"{line} {modifier}")


@pytest.mark.parametrize("line", WELL_FORMED)
def test_a_sign_is_refused_where_no_float_is_read(line: str) -> None:
    for place, operand in enumerate(operands(line)):
        if operand.count and not re.match(r"v_(add_f32|add_f64|cndmask|cvt_f32_f64|fmac|div_scale|cvt_scalef32)", line):
            assert refused(spelled(line, place, f"-{operand.text}")), operand
            assert refused(spelled(line, place, f"|{operand.text}|")), operand


@pytest.mark.machine
@pytest.mark.parametrize("line", WELL_FORMED)
def test_what_is_well_formed_here_llvm_takes(line: str) -> None:
    assert accepts("gfx950", f"{line}\n.Lend:")


def inline(*lines: str) -> str:
    """A kernel that moves what inline assembly leaves in v3 into memory."""
    return "\n".join([
        "s_load_dwordx2 s[6:7], s[0:1], 0x0", "v_lshlrev_b32_e32 v1, 2, v0", ";;#ASMSTART", *lines, ";;#ASMEND",
        "s_waitcnt lgkmcnt(0)",
        "global_store_dword v1, v3, s[6:7]",
    ])  # fmt: skip


def test_inline_assembly_runs_as_what_it_says() -> None:
    code = inline("v_lshlrev_b32 v3, 1, v0", "v_add_u32 v3, 1, v3")
    assert launched(code)[:64].tolist() == list(range(1, 129, 2))
    text = kernel_text(code)
    assert [text.splitlines()[number - 1].strip() for number in read(text).inline_assembly] == [";;#ASMSTART"]


def test_inline_assembly_with_another_instruction_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedInstruction, match=r"^line \d+, 'v_msad_u8 v3, v0, v0, v1': v_msad_u8 is not modelled$"
    ):
        machine.prepare(read(kernel_text(inline("v_msad_u8 v3, v0, v0, v1"))))


@pytest.mark.parametrize(
    "lines", [(".long 0x7e060280",), (".rept 3", "v_add_u32 v3, 1, v3", ".endr"), (".if 1", "v_mov_b32 v3, 1", ".endif"),
              (".macro set", "v_mov_b32 v3, 1", ".endm"), (".byte 0, 0, 0, 0",)],
)  # fmt: skip
def test_a_directive_that_makes_code_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedInstruction, match=re.escape(lines[0].split()[0])):
        machine.prepare(read(kernel_text(inline("v_mov_b32 v3, 0", *lines))))


def test_a_call_is_refused_where_it_begins() -> None:
    code = (
        "s_getpc_b64 s[4:5]\ns_add_u32 s4, s4, __ockl_printf@rel32@lo+4\ns_addc_u32 s5, s5, __ockl_printf@rel32@hi+12\n"
        "s_swappc_b64 s[30:31], s[4:5]"
    )
    with pytest.raises(UnsupportedInstruction, match=r"^line \d+, .*s_getpc_b64|__ockl_printf"):
        machine.prepare(read(kernel_text(code)))


@pytest.mark.parametrize("value", [0, 1])
def test_fp16_overflow_may_be_set_and_cleared(value: int) -> None:
    vgpr = np.zeros((512, 64), np.uint32)
    vgpr[1] = 0x7F000000
    lines = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    lines += f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {value}\nv_cvt_f16_f32_e32 v0, v1"
    assert run_lines("gfx942", lines, vgpr=vgpr).vgpr[0, 0] == (0x7BFF if value else 0x7C00)


def test_every_constant_of_a_program_is_kept_once() -> None:
    program: Program = read_lines(
        "gfx942", "v_mov_b32_e32 v0, 7\nv_mov_b32_e32 v1, 7\nv_mov_b32_e32 v2, 0x7\nv_mov_b32_e32 v3, 8"
    )
    assert encode(program).literals.tolist() == [7, 8]
