"""Is everything modelled that Triton's compiler was seen to write, and is the rest refused by name?"""

from __future__ import annotations

import pytest

from impl.executions.isa.coverage import modelled
from impl.executions.isa.single import run_lines
from impl.executions.isa.unsupported import UnsupportedInstruction
from tests.executions.isa.statements import ARCHS, RENAMED, instructions

# Mnemonics without their encodings' suffixes: of the kernels of vLLM and AITER that Triton 3.9 compiled for both
# architectures, and of the small kernels beside this file.
SEEN = """
    buffer_atomic_add buffer_atomic_add_f32 buffer_atomic_add_f64 buffer_atomic_add_x2 buffer_atomic_and
    buffer_atomic_and_x2 buffer_atomic_cmpswap buffer_atomic_cmpswap_x2 buffer_atomic_or buffer_atomic_or_x2
    buffer_atomic_swap buffer_atomic_swap_x2 buffer_atomic_xor buffer_atomic_xor_x2 buffer_inv buffer_load_dword
    buffer_load_dwordx2 buffer_load_dwordx4 buffer_load_sshort buffer_load_ubyte buffer_load_ushort
    buffer_store_byte buffer_store_dword buffer_store_dwordx2 buffer_store_dwordx4 buffer_store_short buffer_wbl2
    ds_add_u32 ds_bpermute_b32 ds_read2st64_b32 ds_read2st64_b64 ds_read_b128 ds_read_b32 ds_read_b96 ds_read_u16
    ds_read_u8 ds_write2_b32 ds_write2st64_b32 ds_write2st64_b64 ds_write_b128 ds_write_b16 ds_write_b16_d16_hi
    ds_write_b32 ds_write_b64 ds_write_b8 global_atomic_add global_atomic_cmpswap global_atomic_pk_add_f16
    global_atomic_smax global_atomic_smax_x2 global_atomic_smin global_atomic_smin_x2 global_atomic_umax
    global_atomic_umin global_load_dword global_load_dwordx2 global_load_dwordx4 global_load_ubyte global_store_byte
    global_store_dword s_abs_i32 s_add_i32 s_add_u32 s_addc_u32 s_addk_i32 s_and_b32 s_and_b64 s_and_saveexec_b64
    s_andn2_b32 s_andn2_b64 s_ashr_i32 s_ashr_i64 s_barrier s_bcnt1_i32_b64 s_bfe_i32 s_bfe_i64 s_bfe_u32
    s_bitcmp0_b32 s_bitcmp1_b32 s_branch s_cbranch_execnz s_cbranch_execz s_cbranch_scc0 s_cbranch_scc1
    s_cbranch_vccnz s_cbranch_vccz s_cmp_eq_u32 s_cmp_ge_i32 s_cmp_ge_u32 s_cmp_gt_i32 s_cmp_le_i32 s_cmp_lg_u32
    s_cmp_lg_u64 s_cmp_lt_i32 s_cmp_lt_u32 s_cmpk_gt_i32 s_cmpk_lt_i32 s_cmpk_lt_u32 s_cselect_b32 s_cselect_b64
    s_endpgm s_load_dword s_load_dwordx2 s_load_dwordx4 s_load_dwordx8 s_lshl1_add_u32 s_lshl2_add_u32
    s_lshl3_add_u32 s_lshl4_add_u32 s_lshl_b32 s_lshl_b64 s_lshr_b32 s_lshr_b64 s_max_i32 s_min_i32 s_mov_b32
    s_mov_b64 s_movk_i32 s_mul_hi_i32 s_mul_hi_u32 s_mul_i32 s_mulk_i32 s_nop s_not_b32 s_or_b32 s_or_b64
    s_setreg_imm32_b32 s_sub_i32 s_sub_u32 s_subb_u32 s_waitcnt s_xor_b32 s_xor_b64 scratch_load_dword
    scratch_load_dwordx2 scratch_load_dwordx4 scratch_store_dword scratch_store_dwordx2 scratch_store_dwordx4
    v_accvgpr_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_add3_u32 v_add_co_u32 v_add_f16 v_add_f32
    v_add_lshl_u32 v_add_u16 v_add_u32 v_addc_co_u32 v_and_b32 v_and_or_b32 v_ashrrev_i16 v_ashrrev_i32
    v_ashrrev_i64 v_bcnt_u32_b32 v_bfe_i32 v_bfe_u32 v_bfi_b32 v_bfrev_b32 v_ceil_f32 v_cmp_class_f32 v_cmp_eq_f32
    v_cmp_eq_u32 v_cmp_eq_u64 v_cmp_ge_f32 v_cmp_ge_i32 v_cmp_ge_u32 v_cmp_gt_f32 v_cmp_gt_i32 v_cmp_gt_i64
    v_cmp_gt_u32 v_cmp_le_i32 v_cmp_le_u32 v_cmp_lg_f32 v_cmp_lt_f32 v_cmp_lt_i16 v_cmp_lt_i32 v_cmp_lt_u16
    v_cmp_lt_u32 v_cmp_ne_u16 v_cmp_ne_u32 v_cmp_ne_u64 v_cmp_neq_f32 v_cmp_ngt_f32 v_cmp_nlt_f32 v_cmp_o_f32
    v_cndmask_b32 v_cvt_f16_f32 v_cvt_f16_i16 v_cvt_f32_f16 v_cvt_f32_f64 v_cvt_f32_i32 v_cvt_f32_u32
    v_cvt_f32_ubyte0 v_cvt_f64_f32 v_cvt_i32_f32 v_cvt_u32_f32 v_div_fixup_f32 v_div_fmas_f32 v_div_scale_f32
    v_exp_f32 v_ffbh_i32 v_ffbh_u32 v_floor_f32 v_fma_f32 v_fmaak_f32 v_fmac_f32 v_fmamk_f32 v_ldexp_f32 v_log_f32
    v_lshl_add_u32 v_lshl_add_u64 v_lshl_or_b32 v_lshlrev_b16 v_lshlrev_b32 v_lshlrev_b64 v_lshrrev_b16
    v_lshrrev_b32 v_lshrrev_b64 v_mad_u64_u32 v_max3_f32 v_max3_i32 v_max_f32 v_max_i32 v_mbcnt_hi_u32_b32
    v_mbcnt_lo_u32_b32 v_med3_f32 v_med3_i32 v_mfma_f32_16x16x16_bf16 v_mfma_f32_16x16x32_bf8_bf8
    v_mfma_f32_16x16x32_bf8_fp8 v_mfma_f32_16x16x32_fp8_bf8 v_mfma_f32_16x16x32_fp8_fp8 v_mfma_f32_16x16x4_f32
    v_mfma_f32_32x32x16_bf8_bf8 v_mfma_f32_32x32x16_bf8_fp8 v_mfma_f32_32x32x16_fp8_bf8 v_mfma_f32_32x32x2_f32
    v_mfma_f64_16x16x4_f64 v_mfma_i32_16x16x32_i8 v_min_f32 v_min_i32 v_min_u32 v_mov_b32 v_mov_b64 v_mul_f32
    v_mul_hi_u32 v_mul_lo_u16 v_mul_lo_u32 v_mul_u32_u24 v_not_b32 v_or3_b32 v_or_b32 v_perm_b32 v_pk_add_f32
    v_pk_fma_f32 v_pk_mov_b32 v_pk_mul_f32 v_rcp_f32 v_rcp_iflag_f32 v_readfirstlane_b32 v_readlane_b32 v_rndne_f32
    v_rsq_f32 v_sqrt_f32 v_sub_co_u32 v_sub_f32 v_sub_u32 v_subb_co_u32 v_subbrev_co_u32 v_subrev_f32 v_subrev_u32
    v_trunc_f32 v_writelane_b32 v_xad_u32 v_xor_b32 v_cmp_class_f64 v_div_fixup_f64 v_div_fmas_f64 v_div_scale_f64
    v_dot2c_f32_f16 v_dot4c_i32_i8 v_fma_f64 v_fmac_f64 v_frexp_exp_i32_f64 v_frexp_mant_f64 v_ldexp_f64 v_mul_f64
    v_rcp_f64 v_rndne_f64 v_rsq_f64
"""
SEEN_ALONE = {
    "gfx942": """
    ds_read2_b32 ds_read2_b64 ds_read_b64 ds_write2_b64 ds_write_b8_d16_hi s_brev_b32 s_setprio v_alignbit_b32
    v_cmp_eq_u16 v_cmp_o_f16 v_cvt_pk_bf8_f32 v_cvt_pk_f32_bf8 v_cvt_pk_f32_fp8 v_cvt_pk_fp8_f32 v_max_u16 v_max_u32
    v_mfma_f32_16x16x16_f16 v_mfma_f32_32x32x16_fp8_fp8 v_mfma_f32_32x32x4_xf32 v_mfma_f32_32x32x8_bf16
    v_mfma_f32_32x32x8_f16 v_mfma_i32_32x32x16_i8 v_pk_lshlrev_b16 v_pk_max_u16
""",
    "gfx950": """
    ds_read_b64_tr_b16 ds_read_b64_tr_b8 s_andn2_saveexec_b64 s_bitset1_b32 s_cmpk_gt_u32 s_or_saveexec_b64
    v_bitop3_b16 v_bitop3_b32 v_cvt_pk_bf16_f32 v_cvt_scalef32_pk_bf16_bf8 v_cvt_scalef32_pk_bf16_fp4
    v_cvt_scalef32_pk_bf16_fp8 v_cvt_scalef32_pk_bf8_bf16 v_cvt_scalef32_pk_bf8_f32 v_cvt_scalef32_pk_f16_bf8
    v_cvt_scalef32_pk_f16_fp8 v_cvt_scalef32_pk_f32_bf8 v_cvt_scalef32_pk_f32_fp8 v_cvt_scalef32_pk_fp8_bf16
    v_cvt_scalef32_pk_fp8_f32 v_mad_u32_u24 v_maximum3_f32 v_mfma_f32_16x16x32_bf16 v_mfma_f32_16x16x32_f16
    v_mfma_f32_32x32x16_bf16 v_mfma_f32_32x32x16_f16 v_mfma_f32_32x32x64_f8f6f4 v_mfma_i32_16x16x64_i8
    v_mfma_i32_32x32x32_i8 v_mfma_scale_f32_16x16x128_f8f6f4 v_mfma_scale_f32_32x32x64_f8f6f4 v_minimum3_f32
    v_permlane16_swap_b32 v_permlane32_swap_b32 v_dot2c_f32_bf16
""",
}
# Not seen yet, but what LLVM writes for operations that Triton's language has.
PLAUSIBLE = """
    s_bfe_u64 s_bfm_b32 s_bitset0_b32 s_cmov_b32 s_ff1_i32_b32 s_ff1_i32_b64 s_flbit_i32_b32 s_max_u32 s_min_u32 s_nor_b64
    s_orn2_b64 s_sext_i32_i16 s_sext_i32_i8 s_xnor_b64 v_add_f64 v_ceil_f16 v_ceil_f64 v_cmp_class_f32 v_cmp_eq_f64
    v_cmp_lt_f64 v_cmp_lt_u64 v_cvt_f32_f16 v_cvt_f64_i32 v_cvt_f64_u32 v_cvt_i32_f64 v_cvt_u32_f64 v_exp_f16
    v_ffbl_b32 v_floor_f16 v_floor_f64 v_fma_f16 v_fma_f64 v_fmac_f64 v_fract_f32
    v_frexp_exp_i32_f32 v_frexp_mant_f32 v_ldexp_f64 v_log_f16 v_mad_i64_i32 v_max_f16 v_max_f64 v_med3_u32 v_min3_f32
    v_min3_i32 v_min3_u32 v_max3_u32 v_min_f16 v_min_f64 v_mul_f16 v_mul_f64 v_mul_hi_i32 v_mul_i32_i24 v_pack_b32_f16
    v_pk_add_f16 v_pk_add_u16 v_pk_fma_f16 v_pk_max_f16 v_pk_max_i16 v_pk_min_f16 v_pk_mul_f16 v_pk_mul_lo_u16
    v_rcp_f16 v_rcp_f64 v_rndne_f64 v_rsq_f16 v_rsq_f64 v_sin_f32 v_cos_f32 v_sqrt_f16 v_sqrt_f64 v_trunc_f64
    v_cmp_lt_i16 v_max_i16 v_min_i16 v_sub_u16 v_subrev_u16 v_sub_f16 v_cndmask_b32 v_swap_b32 v_fma_mix_f32 v_fma_mixlo_f16
    v_fma_mixhi_f16 v_dot4_i32_i8 v_mad_i32_i24 v_mad_u16 v_cvt_u16_f16 v_cvt_i16_f16 v_cvt_f16_u16
    v_cvt_pkrtz_f16_f32 v_alignbyte_b32 v_xnor_b32 v_not_b32 v_fract_f64 v_add_i32 v_sub_i32 ds_add_f32 ds_max_i32 ds_min_i32
    ds_or_b32 ds_and_b32 ds_swizzle_b32 ds_permute_b32 global_atomic_add_f32 global_atomic_add_x2 global_atomic_add_f64
    global_atomic_swap global_atomic_and global_atomic_or global_atomic_xor global_load_dwordx3 global_store_short
    flat_load_dword flat_store_dword
"""


# Plausible, seen in no kernel so far, and not modelled: refused by name.
REFUSED = ("v_trig_preop_f64 v[0:1], v[2:3], v4", "v_smfmac_f32_16x16x32_f16 v[0:3], v[4:5], v[6:9], v10")


def _missing(arch: str, names: str) -> list[str]:
    return [name for name in names.split() if arch not in modelled().get(name, ())]


@pytest.mark.parametrize("arch", ARCHS)
def test_what_was_seen_is_modelled(arch: str) -> None:
    assert _missing(arch, SEEN + SEEN_ALONE[arch]) == []


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_plausible_is_modelled(arch: str) -> None:
    assert _missing(arch, PLAUSIBLE) == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("line", ["v_frobnicate_b32 v0, v1", "v_add_f32_e32 v0, v1, v2 mul:3", "s_add_u32 s0, s1, s2 clamp",
                                  "global_load_dword v0, v1, s[2:3] frob:1", "v_interp_p1_f32 v0, v1, attr0.x",
                                  *REFUSED])  # fmt: skip
def test_what_is_not_known_is_refused_by_name(arch: str, line: str) -> None:
    with pytest.raises(UnsupportedInstruction) as refused:
        run_lines(arch, line)
    assert line.split()[0].removesuffix("_e32") in str(refused.value)


# Of no statement of their own in the document, and asked elsewhere: as moves and as nothing.
STATED_APART = frozenset(("v_accvgpr_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_nop"))


def test_no_vector_instruction_is_modelled_without_a_statement() -> None:
    stated = {key.split()[1].lower().removesuffix("_e32").removesuffix("_e64") for key in instructions()}
    stated = {RENAMED.get(name, name) for name in stated}
    vectors = {name for name in modelled() if name.startswith("v_") and not name.startswith("v_mfma_")}
    assert vectors - stated == STATED_APART
