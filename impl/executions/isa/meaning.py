"""What does every vector and scalar instruction do, in one expression each?

The tables are the model: the executor's inner loops are generated from them (`impl.executions.isa.lanes`), and
``doctor --isa`` counts them. Sources are named ``a``, ``b``, ``c`` in the order of the assembly text. What a source or
a result is, one letter says:

====== =====================================================================================
``u``  32 bits, unsigned          ``i``  32 bits, signed
``w``  the low 16 bits, unsigned  ``s``  the low 16 bits, signed
``q``  64 bits, unsigned          ``l``  64 bits, signed
``f``  binary32                   ``h``  binary16 in the low half, computed on as binary32
``d``  binary64                   ``k``  bfloat16 in the low half, computed on as binary32
====== =====================================================================================

``m`` is this lane's bit of the mask operand, ``lane`` its number, ``mode`` the MODE register. Integers are computed in
64 bits and cut to the result's width. Meanings follow the "Vector ALU" and "Scalar ALU" chapters of AMD's "Instinct
MI300" (gfx942) and "CDNA4" (gfx950) instruction set architecture documents.
"""

from __future__ import annotations

from dataclasses import dataclass

BOTH = frozenset({"gfx942", "gfx950"})
CDNA3 = frozenset({"gfx942"})
CDNA4 = frozenset({"gfx950"})


@dataclass(frozen=True)
class Vector:
    """One vector instruction.

    sources: a letter for each of `a`, `b`, `c`. results: (letter, expression) of each 32 or 64-bit result in turn.
    carry: expression of the lane's bit of the mask result, or empty. mask: it reads a mask operand, `m`.
    accumulates: the old destination is the last source. packed: two halves a register (16) or two registers (32), each
    computed alone. half: it writes 16 bits, by op_sel the upper ones. keeps: of a 16-bit result the other half stays.
    """

    sources: str
    results: tuple[tuple[str, str], ...]
    archs: frozenset[str] = BOTH
    carry: str = ""
    mask: bool = False
    accumulates: bool = False
    packed: int = 0
    half: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class Scalar:
    """One scalar instruction: letters of its sources, letter and expression of its result, expression of SCC (`r` is the result).

    An empty `scc` leaves SCC alone, an empty `result` writes SCC only. `reads_destination`: `d` is the old destination.
    """

    sources: str
    result: str
    expression: str
    scc: str = ""
    archs: frozenset[str] = BOTH
    reads_destination: bool = False


def _same(sources: str, result: str, table: dict[str, str], **how: object) -> dict[str, Vector]:
    return {name: Vector(sources, ((result, text),), **how) for name, text in table.items()}  # type: ignore[arg-type]


_SHIFT = "& 31"

_ONE = _same("u", "u", {
    "v_mov_b32": "a",
    "v_accvgpr_read_b32": "a",
    "v_accvgpr_write_b32": "a",
    "v_accvgpr_mov_b32": "a",
    "v_not_b32": "~a",
    "v_bfrev_b32": "reverse_bits(a)",
    "v_ffbh_u32": "leading_zeros(a) if a != 0 else -1",
    "v_ffbl_b32": "trailing_zeros(a) if a != 0 else -1",
    "v_cvt_f32_ubyte0": "bits_of(f32(a & 255))",
    "v_cvt_f32_ubyte1": "bits_of(f32((a >> 8) & 255))",
    "v_cvt_f32_ubyte2": "bits_of(f32((a >> 16) & 255))",
    "v_cvt_f32_ubyte3": "bits_of(f32(a >> 24))",
}) | {
    "v_ffbh_i32": Vector("i", (("u", "leading_zeros(a if a >= 0 else ~a) if a != 0 and a != -1 else -1"),)),
    "v_cvt_f32_i32": Vector("i", (("f", "f32(a)"),)),
    "v_cvt_f32_u32": Vector("u", (("f", "f32(a)"),)),
    "v_cvt_i32_f32": Vector("f", (("i", "to_int(a, -2147483648.0, 2147483647.0)"),)),
    "v_cvt_u32_f32": Vector("f", (("u", "to_int(a, 0.0, 4294967295.0)"),)),
    "v_cvt_rpi_i32_f32": Vector("f", (("i", "to_int(floor64(f64(a) + 0.5), -2147483648.0, 2147483647.0)"),)),
    "v_cvt_flr_i32_f32": Vector("f", (("i", "to_int(floor64(f64(a)), -2147483648.0, 2147483647.0)"),)),
    "v_cvt_f32_f16": Vector("h", (("f", "quiet(a)"),)),
    "v_cvt_f16_f32": Vector("f", (("h", "a"),), half=True),
    "v_cvt_f16_u16": Vector("w", (("h", "f32(a)"),), half=True),
    "v_cvt_f16_i16": Vector("s", (("h", "f32(a)"),), half=True),
    "v_cvt_u16_f16": Vector("h", (("w", "to_int(a, 0.0, 65535.0)"),), half=True),
    "v_cvt_i16_f16": Vector("h", (("s", "to_int(a, -32768.0, 32767.0)"),), half=True),
    "v_cvt_f32_bf16": Vector("k", (("f", "a"),), archs=CDNA4),
    "v_cvt_f64_f32": Vector("f", (("d", "f64(a)"),)),
    "v_cvt_f32_f64": Vector("d", (("f", "f32(a)"),)),
    "v_cvt_f64_i32": Vector("i", (("d", "f64(a)"),)),
    "v_cvt_f64_u32": Vector("u", (("d", "f64(a)"),)),
    "v_cvt_i32_f64": Vector("d", (("i", "to_int(a, -2147483648.0, 2147483647.0)"),)),
    "v_cvt_u32_f64": Vector("d", (("u", "to_int(a, 0.0, 4294967295.0)"),)),
}  # fmt: skip

_INTEGERS = _same("uu", "u", {
    "v_and_b32": "a & b",
    "v_or_b32": "a | b",
    "v_xor_b32": "a ^ b",
    "v_xnor_b32": "~(a ^ b)",
    "v_add_u32": "saturate_u32(a + b, clamp)",
    "v_sub_u32": "saturate_u32(a - b, clamp)",
    "v_subrev_u32": "saturate_u32(b - a, clamp)",
    "v_lshlrev_b32": f"b << (a {_SHIFT})",
    "v_lshrrev_b32": f"b >> (a {_SHIFT})",
    "v_bfm_b32": "((1 << (a & 31)) - 1) << (b & 31)",
    "v_mul_lo_u32": "a * b",
    "v_mul_hi_u32": "high_product(a, b)",
    "v_mul_u32_u24": "(a & 0xFFFFFF) * (b & 0xFFFFFF)",
    "v_mul_hi_u32_u24": "((a & 0xFFFFFF) * (b & 0xFFFFFF)) >> 32",
    "v_min_u32": "min(a, b)",
    "v_max_u32": "max(a, b)",
    "v_bcnt_u32_b32": "population(a) + b",
    "v_mbcnt_lo_u32_b32": "population(a & ((1 << min(lane, 32)) - 1)) + b",
    "v_mbcnt_hi_u32_b32": "population(a & ((1 << max(lane - 32, 0)) - 1)) + b",
}) | _same("ii", "i", {
    "v_min_i32": "min(a, b)",
    "v_max_i32": "max(a, b)",
    "v_mul_hi_i32": "(a * b) >> 32",
    "v_mul_i32_i24": "extend(a, 24) * extend(b, 24)",
    "v_add_i32": "saturate_i32(a + b, clamp)",
    "v_sub_i32": "saturate_i32(a - b, clamp)",
}) | {
    "v_pack_b32_f16": Vector("ww", (("u", "a | b << 16"),)),
    "v_dot4_i32_i8": Vector("uui", (("i", "dot_bytes(a, b, c)"),)),
    "v_dot4c_i32_i8": Vector("uui", (("i", "dot_bytes(a, b, c)"),), accumulates=True),
    "v_dot4_u32_u8": Vector("uuu", (("u", "dot_unsigned_bytes(a, b, c)"),)),
    "v_dot2_i32_i16": Vector("uui", (("i", "dot_shorts(a, b, c)"),)),
    "v_dot2c_i32_i16": Vector("uui", (("i", "dot_shorts(a, b, c)"),), accumulates=True),
    "v_dot2_u32_u16": Vector("uuu", (("u", "dot_unsigned_shorts(a, b, c)"),)),
    "v_dot2_f32_f16": Vector("uuf", (("f", "dot_halves(a, b, c)"),)),
    "v_dot2c_f32_f16": Vector("uuf", (("f", "dot_halves(a, b, c)"),), accumulates=True),
    "v_dot2_f32_bf16": Vector("uuf", (("f", "dot_bf16(a, b, c)"),), archs=CDNA4),
    "v_dot2c_f32_bf16": Vector("uuf", (("f", "dot_bf16_onto(a, b, c)"),), archs=CDNA4, accumulates=True),
    "v_ashrrev_i32": Vector("ui", (("i", "b >> (a & 31)"),)),
    "v_add_co_u32": Vector("uu", (("u", "a + b"),), carry="(a + b) >> 32"),
    "v_sub_co_u32": Vector("uu", (("u", "a - b"),), carry="1 if a < b else 0"),
    "v_subrev_co_u32": Vector("uu", (("u", "b - a"),), carry="1 if b < a else 0"),
    "v_addc_co_u32": Vector("uu", (("u", "a + b + m"),), carry="(a + b + m) >> 32", mask=True),
    "v_subb_co_u32": Vector("uu", (("u", "a - b - m"),), carry="1 if a < b + m else 0", mask=True),
    "v_subbrev_co_u32": Vector("uu", (("u", "b - a - m"),), carry="1 if b < a + m else 0", mask=True),
    "v_cndmask_b32": Vector("uu", (("u", "b if m != 0 else a"),), mask=True),
}  # fmt: skip

_THREE = _same("uuu", "u", {
    "v_add3_u32": "a + b + c",
    "v_lshl_add_u32": "(a << (b & 31)) + c",
    "v_add_lshl_u32": "((a + b) & 0xFFFFFFFF) << (c & 31)",
    "v_lshl_or_b32": "(a << (b & 31)) | c",
    "v_and_or_b32": "(a & b) | c",
    "v_or3_b32": "a | b | c",
    "v_xad_u32": "(a ^ b) + c",
    "v_bfe_u32": "(a >> (b & 31)) & ((1 << (c & 31)) - 1)",
    "v_bfi_b32": "(a & b) | (~a & c)",
    "v_perm_b32": "permute_bytes(a, b, c)",
    "v_alignbit_b32": "join(b, a) >> u64(c & 31)",
    "v_alignbyte_b32": "join(b, a) >> u64(8 * (c & 3))",
    "v_mad_u32_u24": "(a & 0xFFFFFF) * (b & 0xFFFFFF) + c",
    "v_min3_u32": "min(min(a, b), c)",
    "v_max3_u32": "max(max(a, b), c)",
    "v_med3_u32": "max(min(a, b), min(max(a, b), c))",
    "v_sad_u32": "abs(a - b) + c",
}) | _same("iii", "i", {
    "v_min3_i32": "min(min(a, b), c)",
    "v_max3_i32": "max(max(a, b), c)",
    "v_med3_i32": "max(min(a, b), min(max(a, b), c))",
    "v_mad_i32_i24": "extend(a, 24) * extend(b, 24) + c",
}) | {
    "v_bfe_i32": Vector("iuu", (("i", "extend(a >> (b & 31), c & 31)"),)),
    "v_bitop3_b32": Vector("uuu", (("u", "by_table(a, b, c, table)"),), archs=CDNA4),
    "v_bitop3_b16": Vector("www", (("w", "by_table(a, b, c, table)"),), archs=CDNA4, half=True),
}  # fmt: skip

_WIDE = {
    "v_mov_b64": Vector("q", (("q", "a"),)),
    "v_lshlrev_b64": Vector("uq", (("q", "b << u64(a & 63)"),)),
    "v_lshrrev_b64": Vector("uq", (("q", "b >> u64(a & 63)"),)),
    "v_ashrrev_i64": Vector("ul", (("l", "b >> (a & 63)"),)),
    "v_lshl_add_u64": Vector("quq", (("q", "(a << u64(b & 7)) + c"),)),
    "v_mad_u64_u32": Vector("uuq", (("q", "u64(a) * u64(b) + c"),), carry="1 if u64(a) * u64(b) + c < c else 0"),
    "v_mad_i64_i32": Vector("iil", (("l", "a * b + c"),), carry="signed_carry(a * b, c)"),
    "v_add_f64": Vector("dd", (("d", "a + b"),)),
    "v_mul_f64": Vector("dd", (("d", "a * b"),)),
    "v_fma_f64": Vector("ddd", (("d", "fma64(a, b, c)"),)),
    "v_fmac_f64": Vector("ddd", (("d", "fma64(a, b, c)"),), accumulates=True),
    "v_max_f64": Vector("dd", (("d", "larger64(a, b)"),)),
    "v_min_f64": Vector("dd", (("d", "smaller64(a, b)"),)),
    "v_ldexp_f64": Vector("di", (("d", "scale64(a, b)"),)),
    "v_rcp_f64": Vector("d", (("d", "reciprocal64(a)"),)),
    "v_rsq_f64": Vector("d", (("d", "reciprocal64(root64(a))"),)),
    "v_sqrt_f64": Vector("d", (("d", "root64(a)"),)),
    "v_fract_f64": Vector("d", (("d", "min(a - floor64(a), 0.9999999999999999)"),)),
    "v_trunc_f64": Vector("d", (("d", "truncate64(a)"),)),
    "v_floor_f64": Vector("d", (("d", "floor64(a)"),)),
    "v_ceil_f64": Vector("d", (("d", "-floor64(-a)"),)),
    "v_rndne_f64": Vector("d", (("d", "nearest64(a)"),)),
    "v_frexp_mant_f64": Vector("d", (("d", "mantissa64(a)"),)),
    "v_frexp_exp_i32_f64": Vector("d", (("i", "exponent64(a)"),)),
    "v_div_scale_f64": Vector("ddd", (("d", "scaled64(a, b, c)"),), carry="needs_scaling64(a, b, c)"),
    "v_div_fmas_f64": Vector(
        "ddd",
        (("d", "scaled_fma64(a, b, c, 128 if exponent_bits64(c) > 1023 else -128) if m != 0 else fma64(a, b, c)"),),
        mask=True,
    ),
    "v_div_fixup_f64": Vector("ddd", (("d", "fix_quotient64(a, b, c)"),)),
}

# Transcendentals are the correctly rounded value: the hardware's is within an ulp of it. Subnormal inputs and results
# are zero for exp, log, rcp and rsq, which is why compilers scale around them.
_FLOATS = _same("f", "f", {
    "v_exp_f32": "flush(exp2(flush(a)))",
    "v_log_f32": "log2(flush(a))",
    "v_rcp_f32": "flush(reciprocal(flush(a)))",
    "v_rcp_iflag_f32": "flush(reciprocal(flush(a)))",
    "v_rsq_f32": "reciprocal_root(flush(a))",
    "v_sqrt_f32": "f32(root64(f64(flush(a))))",
    "v_ceil_f32": "-floor32(-a)",
    "v_floor_f32": "floor32(a)",
    "v_trunc_f32": "truncate32(a)",
    "v_rndne_f32": "nearest32(a)",
    "v_fract_f32": "min(a - floor32(a), f32(0.99999994))",
    "v_sin_f32": "sine(a)",
    "v_cos_f32": "cosine(a)",
    "v_frexp_mant_f32": "mantissa(a)",
}) | _same("ff", "f", {
    "v_add_f32": "a + b",
    "v_sub_f32": "a - b",
    "v_subrev_f32": "b - a",
    "v_mul_f32": "a * b",
    "v_mul_legacy_f32": "f32(0.0) if a == 0 or b == 0 else a * b",
    "v_max_f32": "larger(a, b)",
    "v_min_f32": "smaller(a, b)",
}) | _same("fff", "f", {
    "v_fma_f32": "fma32(a, b, c)",
    "v_max3_f32": "larger(larger(a, b), c)",
    "v_min3_f32": "smaller(smaller(a, b), c)",
    "v_med3_f32": "middle(a, b, c)",
    "v_div_fixup_f32": "fix_quotient(a, b, c)",
}) | {
    # The immediate says which sources are halves.
    "v_fma_mix_f32": Vector("uuu", (("f", "fma32(mixed(a, table, 0), mixed(b, table, 1), mixed(c, table, 2))"),)),
    "v_fma_mixlo_f16": Vector("uuu", (("h", "fma32(mixed(a, table, 0), mixed(b, table, 1), mixed(c, table, 2))"),), half=True, keeps=True),
    "v_fma_mixhi_f16": Vector("uuu", (("h", "fma32(mixed(a, table, 0), mixed(b, table, 1), mixed(c, table, 2))"),), half=True, keeps=True),
    "v_maximum3_f32": Vector("fff", (("f", "maximum(maximum(a, b), c)"),), archs=CDNA4),
    "v_minimum3_f32": Vector("fff", (("f", "minimum(minimum(a, b), c)"),), archs=CDNA4),
    "v_fmac_f32": Vector("fff", (("f", "fma32(a, b, c)"),), accumulates=True),
    "v_fmamk_f32": Vector("fff", (("f", "fma32(a, b, c)"),)),
    "v_fmaak_f32": Vector("fff", (("f", "fma32(a, b, c)"),)),
    "v_ldexp_f32": Vector("fi", (("f", "scale32(a, b)"),)),
    "v_frexp_exp_i32_f32": Vector("f", (("i", "exponent(a)"),)),
    "v_div_scale_f32": Vector("fff", (("f", "scaled(a, b, c)"),), carry="needs_scaling(a, b, c)"),
    "v_div_fmas_f32": Vector("fff", (("f", "scaled_fma(a, b, c, 64 if exponent_bits(c) > 127 else -64) if m != 0 else fma32(a, b, c)"),), mask=True),
}  # fmt: skip

_HALVES = _same("ww", "w", {
    "v_add_u16": "a + b",
    "v_sub_u16": "a - b",
    "v_subrev_u16": "b - a",
    "v_mul_lo_u16": "a * b",
    "v_lshlrev_b16": "b << (a & 15)",
    "v_lshrrev_b16": "b >> (a & 15)",
    "v_max_u16": "max(a, b)",
    "v_min_u16": "min(a, b)",
}, half=True) | _same("ss", "s", {
    "v_max_i16": "max(a, b)",
    "v_min_i16": "min(a, b)",
}, half=True) | {
    "v_ashrrev_i16": Vector("ws", (("s", "b >> (a & 15)"),), half=True),
    "v_mad_u16": Vector("www", (("w", "a * b + c"),), half=True),
    "v_mad_legacy_u16": Vector("www", (("w", "a * b + c"),), half=True),
} | _same("hh", "h", {
    "v_add_f16": "a + b",
    "v_sub_f16": "a - b",
    "v_subrev_f16": "b - a",
    "v_mul_f16": "a * b",
    "v_max_f16": "larger(a, b)",
    "v_min_f16": "smaller(a, b)",
}, half=True) | {
    "v_fma_f16": Vector("hhh", (("h", "f64(a) * f64(b) + f64(c)"),), half=True, keeps=True),
    "v_ldexp_f16": Vector("hs", (("h", "scale64(f64(a), b)"),), half=True),
    "v_rcp_f16": Vector("h", (("h", "1.0 / f64(a) if a != 0 else math.copysign(math.inf, a)"),), half=True),
    "v_log_f16": Vector("h", (("h", "logarithm64(f64(a))"),), half=True),
    "v_rsq_f16": Vector("h", (("h", "reciprocal64(root64(f64(a)))"),), half=True),
    "v_sqrt_f16": Vector("h", (("h", "root64(f64(a))"),), half=True),
    "v_exp_f16": Vector("h", (("h", "math.pow(2.0, f64(a))"),), half=True),
    "v_rndne_f16": Vector("h", (("h", "nearest32(a)"),), half=True),
    "v_floor_f16": Vector("h", (("h", "floor32(a)"),), half=True),
    "v_ceil_f16": Vector("h", (("h", "-floor32(-a)"),), half=True),
    "v_trunc_f16": Vector("h", (("h", "truncate32(a)"),), half=True),
}  # fmt: skip


def _packed() -> dict[str, Vector]:
    found = {}
    for name, of in {
        "v_pk_add_f32": "v_add_f32",
        "v_pk_mul_f32": "v_mul_f32",
        "v_pk_fma_f32": "v_fma_f32",
    }.items():
        plain = VECTOR_PLAIN[of]
        found[name] = Vector(plain.sources, plain.results, packed=32)
    for name, of in {
        "v_pk_add_u16": "v_add_u16",
        "v_pk_sub_u16": "v_sub_u16",
        "v_pk_sub_i16": "v_sub_u16",
        "v_pk_add_i16": "v_add_u16",
        "v_pk_mul_lo_u16": "v_mul_lo_u16",
        "v_pk_lshlrev_b16": "v_lshlrev_b16",
        "v_pk_lshrrev_b16": "v_lshrrev_b16",
        "v_pk_ashrrev_i16": "v_ashrrev_i16",
        "v_pk_max_u16": "v_max_u16",
        "v_pk_min_u16": "v_min_u16",
        "v_pk_max_i16": "v_max_i16",
        "v_pk_min_i16": "v_min_i16",
        "v_pk_mad_u16": "v_mad_u16",
        "v_pk_add_f16": "v_add_f16",
        "v_pk_mul_f16": "v_mul_f16",
        "v_pk_max_f16": "v_max_f16",
        "v_pk_min_f16": "v_min_f16",
        "v_pk_fma_f16": "v_fma_f16",
    }.items():
        plain = VECTOR_PLAIN[of]
        found[name] = Vector(plain.sources, plain.results, packed=16)
    # The low result is of the first source, the high one of the second; op_sel alone says which half of each.
    found["v_pk_mov_b32"] = Vector("uu", (("u", "a if lane < 64 else b"),), packed=32)
    return found


# Eight-bit floats: E4M3 and E5M2 in the encoding of the architecture: FNUZ on gfx942, OCP on gfx950.
_EIGHT = {
    "v_cvt_pk_bf16_f32": Vector("ff", (("u", "to_bf16(a) | to_bf16(b) << 16"),), archs=CDNA4),
    "v_cvt_pk_f16_f32": Vector("ff", (("u", "to_half(f64(a)) | to_half(f64(b)) << 16"),), archs=CDNA4),
    "v_cvt_pkrtz_f16_f32": Vector("ff", (("u", "to_half_toward_zero(a) | to_half_toward_zero(b) << 16"),)),
    "v_cvt_pk_u8_f32": Vector("fuu", (("u", "put_byte(to_int(nearest32(a), 0.0, 255.0), b & 3, c)"),)),
    "v_cvt_pk_fp8_f32": Vector("ffu", (("u", "put_half(to_fp8(a, mode) | to_fp8(b, mode) << 8, high, c)"),), accumulates=True),
    "v_cvt_pk_bf8_f32": Vector("ffu", (("u", "put_half(to_bf8(a, mode) | to_bf8(b, mode) << 8, high, c)"),), accumulates=True),
    "v_cvt_pk_f32_fp8": Vector("u", (("f", "from_fp8(a & 255, mode)"), ("f", "from_fp8((a >> 8) & 255, mode)"))),
    "v_cvt_pk_f32_bf8": Vector("u", (("f", "from_bf8(a & 255, mode)"), ("f", "from_bf8((a >> 8) & 255, mode)"))),
    "v_cvt_f32_fp8": Vector("u", (("f", "from_fp8(a & 255, mode)"),)),
    "v_cvt_f32_bf8": Vector("u", (("f", "from_bf8(a & 255, mode)"),)),
    "v_cvt_scalef32_pk_f32_fp8": Vector("uf", (("f", "scale_up(from_fp8(a & 255, mode), b)"), ("f", "scale_up(from_fp8((a >> 8) & 255, mode), b)")), archs=CDNA4),
    "v_cvt_scalef32_pk_f32_bf8": Vector("uf", (("f", "scale_up(from_bf8(a & 255, mode), b)"), ("f", "scale_up(from_bf8((a >> 8) & 255, mode), b)")), archs=CDNA4),
    "v_cvt_scalef32_pk_f32_fp4": Vector("uf", (("f", "scale_up(from_fp4(a & 15), b)"), ("f", "scale_up(from_fp4((a >> 4) & 15), b)")), archs=CDNA4),
    "v_cvt_scalef32_pk_bf16_fp8": Vector("uf", (("u", "to_bf16(scale_up(from_fp8(a & 255, mode), b)) | to_bf16(scale_up(from_fp8((a >> 8) & 255, mode), b)) << 16"),), archs=CDNA4),
    "v_cvt_scalef32_pk_bf16_bf8": Vector("uf", (("u", "to_bf16(scale_up(from_bf8(a & 255, mode), b)) | to_bf16(scale_up(from_bf8((a >> 8) & 255, mode), b)) << 16"),), archs=CDNA4),
    "v_cvt_scalef32_pk_bf16_fp4": Vector("uf", (("u", "to_bf16(scale_up(from_fp4(a & 15), b)) | to_bf16(scale_up(from_fp4((a >> 4) & 15), b)) << 16"),), archs=CDNA4),
    "v_cvt_scalef32_pk_f16_fp8": Vector("uf", (("u", "to_half(f64(scale_up(from_fp8(a & 255, mode), b))) | to_half(f64(scale_up(from_fp8((a >> 8) & 255, mode), b))) << 16"),), archs=CDNA4),
    "v_cvt_scalef32_pk_f16_bf8": Vector("uf", (("u", "to_half(f64(scale_up(from_bf8(a & 255, mode), b))) | to_half(f64(scale_up(from_bf8((a >> 8) & 255, mode), b))) << 16"),), archs=CDNA4),
    "v_cvt_scalef32_pk_f16_fp4": Vector("uf", (("u", "to_half(f64(scale_up(from_fp4(a & 15), b))) | to_half(f64(scale_up(from_fp4((a >> 4) & 15), b))) << 16"),), archs=CDNA4),
    "v_cvt_scalef32_pk_fp8_f32": Vector("fffu", (("u", "put_half(to_fp8(scale_down(a, c), mode) | to_fp8(scale_down(b, c), mode) << 8, high, e)"),), archs=CDNA4, accumulates=True),
    "v_cvt_scalef32_pk_bf8_f32": Vector("fffu", (("u", "put_half(to_bf8(scale_down(a, c), mode) | to_bf8(scale_down(b, c), mode) << 8, high, e)"),), archs=CDNA4, accumulates=True),
    "v_cvt_scalef32_pk_fp4_f32": Vector("fffu", (("u", "put_byte(to_fp4(scale_down(a, c)) | to_fp4(scale_down(b, c)) << 4, high, e)"),), archs=CDNA4, accumulates=True),
    "v_cvt_scalef32_pk_fp8_bf16": Vector("ufu", (("u", "put_half(to_fp8(scale_down(from_bf16(a), b), mode) | to_fp8(scale_down(from_bf16(a >> 16), b), mode) << 8, high, c)"),), archs=CDNA4, accumulates=True),
    "v_cvt_scalef32_pk_bf8_bf16": Vector("ufu", (("u", "put_half(to_bf8(scale_down(from_bf16(a), b), mode) | to_bf8(scale_down(from_bf16(a >> 16), b), mode) << 8, high, c)"),), archs=CDNA4, accumulates=True),
    "v_cvt_scalef32_pk_fp4_bf16": Vector("ufu", (("u", "put_byte(to_fp4(scale_down(from_bf16(a), b)) | to_fp4(scale_down(from_bf16(a >> 16), b)) << 4, high, c)"),), archs=CDNA4, accumulates=True),
}  # fmt: skip

VECTOR_PLAIN: dict[str, Vector] = _ONE | _INTEGERS | _THREE | _WIDE | _FLOATS | _HALVES | _EIGHT
VECTOR: dict[str, Vector] = VECTOR_PLAIN | _packed()

_RELATIONS = {
    "f": "0",
    "lt": "a < b",
    "eq": "a == b",
    "le": "a <= b",
    "gt": "a > b",
    "ne": "a != b",
    "lg": "a < b or a > b",
    "ge": "a >= b",
    "o": "a == a and b == b",
    "u": "a != a or b != b",
    "nge": "not a >= b",
    "nlg": "not (a < b or a > b)",
    "ngt": "not a > b",
    "nle": "not a <= b",
    "neq": "not a == b",
    "nlt": "not a < b",
    "t": "1",
    "tru": "1",
}
_FLOAT_ONLY = {"lg", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru"}
_INTEGER_ONLY = {"ne", "t"}


def _compares() -> dict[str, Vector]:
    kinds = {"f32": "f", "f16": "h", "f64": "d", "i32": "i", "u32": "u", "i16": "s", "u16": "w", "i64": "l", "u64": "q"}
    found = {}
    for kind, letter in kinds.items():
        is_float = kind[0] == "f"
        for relation, expression in _RELATIONS.items():
            if relation in (_INTEGER_ONLY if is_float else _FLOAT_ONLY):
                continue
            found[f"v_cmp_{relation}_{kind}"] = Vector(letter * 2, (), carry=f"1 if ({expression}) else 0")
    found["v_cmp_class_f32"] = Vector("fu", (), carry="1 if (class_of(a) & b) != 0 else 0")
    found["v_cmp_class_f64"] = Vector("du", (), carry="1 if (class_of64(a) & b) != 0 else 0")
    return found


COMPARE: dict[str, Vector] = _compares()
"""The comparisons; each `v_cmp_…` stands for its `v_cmpx_…` too, which writes EXEC besides."""

_NOT_ZERO = "r != 0"
SCALAR: dict[str, Scalar] = {
    "s_mov_b32": Scalar("u", "u", "a"),
    "s_mov_b64": Scalar("q", "q", "a"),
    "s_cmov_b32": Scalar("u", "u", "a if scc else d", reads_destination=True),
    "s_cmov_b64": Scalar("q", "q", "a if scc else d", reads_destination=True),
    "s_movk_i32": Scalar("s", "i", "a"),
    "s_cmovk_i32": Scalar("s", "i", "a if scc else d", reads_destination=True),
    "s_not_b32": Scalar("u", "u", "~a", "(r & 0xFFFFFFFF) != 0"),
    "s_not_b64": Scalar("q", "q", "~a", _NOT_ZERO),
    "s_wqm_b64": Scalar("q", "q", "whole_quads(a)", _NOT_ZERO),
    "s_brev_b32": Scalar("u", "u", "reverse_bits(a)"),
    "s_bcnt0_i32_b32": Scalar("u", "u", "32 - population(a)", _NOT_ZERO),
    "s_bcnt1_i32_b32": Scalar("u", "u", "population(a)", _NOT_ZERO),
    "s_bcnt1_i32_b64": Scalar("q", "u", "population64(a)", _NOT_ZERO),
    "s_bcnt0_i32_b64": Scalar("q", "u", "64 - population64(a)", _NOT_ZERO),
    "s_ff0_i32_b32": Scalar("u", "i", "trailing_zeros(~a & 0xFFFFFFFF) if a != 0xFFFFFFFF else -1"),
    "s_ff1_i32_b32": Scalar("u", "i", "trailing_zeros(a) if a != 0 else -1"),
    "s_ff1_i32_b64": Scalar("q", "i", "trailing_zeros64(a) if a != 0 else -1"),
    "s_flbit_i32_b32": Scalar("u", "i", "leading_zeros(a) if a != 0 else -1"),
    "s_flbit_i32_b64": Scalar("q", "i", "leading_zeros64(a) if a != 0 else -1"),
    "s_flbit_i32": Scalar("i", "i", "leading_zeros(a if a >= 0 else ~a) if a != 0 and a != -1 else -1"),
    "s_sext_i32_i8": Scalar("u", "i", "extend(a & 255, 8)"),
    "s_sext_i32_i16": Scalar("u", "i", "extend(a & 0xFFFF, 16)"),
    "s_abs_i32": Scalar("i", "u", "abs(a)", "(r & 0xFFFFFFFF) != 0"),
    "s_bitset0_b32": Scalar("u", "u", "d & ~(1 << (a & 31))", reads_destination=True),
    "s_bitset1_b32": Scalar("u", "u", "d | (1 << (a & 31))", reads_destination=True),
    "s_add_u32": Scalar("uu", "u", "a + b", "(r >> 32) != 0"),
    "s_sub_u32": Scalar("uu", "u", "a - b", "a < b"),
    "s_add_i32": Scalar("ii", "i", "a + b", "r != extend(r & 0xFFFFFFFF, 32)"),
    "s_sub_i32": Scalar("ii", "i", "a - b", "r != extend(r & 0xFFFFFFFF, 32)"),
    "s_addc_u32": Scalar("uu", "u", "a + b + scc", "(r >> 32) != 0"),
    "s_subb_u32": Scalar("uu", "u", "a - b - scc", "r < 0"),
    "s_addk_i32": Scalar("s", "i", "d + a", "r != extend(r & 0xFFFFFFFF, 32)", reads_destination=True),
    "s_mulk_i32": Scalar("s", "i", "d * a", reads_destination=True),
    "s_mul_i32": Scalar("ii", "i", "a * b"),
    "s_mul_hi_u32": Scalar("uu", "u", "high_product(a, b)"),
    "s_mul_hi_i32": Scalar("ii", "i", "(a * b) >> 32"),
    "s_min_i32": Scalar("ii", "i", "min(a, b)", "a < b"),
    "s_max_i32": Scalar("ii", "i", "max(a, b)", "a >= b"),
    "s_min_u32": Scalar("uu", "u", "min(a, b)", "a < b"),
    "s_max_u32": Scalar("uu", "u", "max(a, b)", "a >= b"),
    "s_cselect_b32": Scalar("uu", "u", "a if scc else b"),
    "s_cselect_b64": Scalar("qq", "q", "a if scc else b"),
    "s_absdiff_i32": Scalar("ii", "u", "abs(extend(a - b, 32))", "(r & 0xFFFFFFFF) != 0"),
    "s_bfm_b32": Scalar("uu", "u", "((1 << (a & 31)) - 1) << (b & 31)"),
    "s_bfm_b64": Scalar("uu", "q", "((u64(1) << u64(a & 63)) - u64(1)) << u64(b & 63)"),
    "s_bfe_u32": Scalar("uu", "u", "(a >> (b & 31)) & ((1 << min((b >> 16) & 127, 32)) - 1)", _NOT_ZERO),
    "s_bfe_i32": Scalar("uu", "i", "field(a, b & 31, (b >> 16) & 127, 32)", _NOT_ZERO),
    "s_bfe_u64": Scalar("qu", "q", "(a >> u64(b & 63)) & low_ones((b >> 16) & 127)", _NOT_ZERO),
    "s_bfe_i64": Scalar("lu", "l", "field64(a, b & 63, (b >> 16) & 127)", _NOT_ZERO),
    "s_lshl_b32": Scalar("uu", "u", "a << (b & 31)", "(r & 0xFFFFFFFF) != 0"),
    "s_lshr_b32": Scalar("uu", "u", "a >> (b & 31)", _NOT_ZERO),
    "s_ashr_i32": Scalar("iu", "i", "a >> (b & 31)", _NOT_ZERO),
    "s_lshl_b64": Scalar("qu", "q", "a << u64(b & 63)", _NOT_ZERO),
    "s_lshr_b64": Scalar("qu", "q", "a >> u64(b & 63)", _NOT_ZERO),
    "s_ashr_i64": Scalar("lu", "l", "a >> (b & 63)", _NOT_ZERO),
    "s_pack_ll_b32_b16": Scalar("uu", "u", "(a & 0xFFFF) | (b & 0xFFFF) << 16"),
    "s_pack_lh_b32_b16": Scalar("uu", "u", "(a & 0xFFFF) | (b >> 16) << 16"),
    "s_pack_hh_b32_b16": Scalar("uu", "u", "(a >> 16) | (b >> 16) << 16"),
}  # fmt: skip
for _width, _letter, _zero in (("b32", "u", "(r & 0xFFFFFFFF) != 0"), ("b64", "q", _NOT_ZERO)):
    SCALAR |= {
        f"s_and_{_width}": Scalar(_letter * 2, _letter, "a & b", _zero),
        f"s_or_{_width}": Scalar(_letter * 2, _letter, "a | b", _zero),
        f"s_xor_{_width}": Scalar(_letter * 2, _letter, "a ^ b", _zero),
        f"s_andn2_{_width}": Scalar(_letter * 2, _letter, "a & ~b", _zero),
        f"s_orn2_{_width}": Scalar(_letter * 2, _letter, "a | ~b", _zero),
        f"s_nand_{_width}": Scalar(_letter * 2, _letter, "~(a & b)", _zero),
        f"s_nor_{_width}": Scalar(_letter * 2, _letter, "~(a | b)", _zero),
        f"s_xnor_{_width}": Scalar(_letter * 2, _letter, "~(a ^ b)", _zero),
    }
for _shift in (1, 2, 3, 4):
    SCALAR[f"s_lshl{_shift}_add_u32"] = Scalar("uu", "u", f"(a << {_shift}) + b", "(r >> 32) != 0")
for _name, _sign in {"eq": "==", "lg": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items():
    SCALAR[f"s_cmp_{_name}_i32"] = Scalar("ii", "", "0", f"a {_sign} b")
    SCALAR[f"s_cmp_{_name}_u32"] = Scalar("uu", "", "0", f"a {_sign} b")
    SCALAR[f"s_cmpk_{_name}_i32"] = Scalar("s", "", "0", f"d {_sign} a", reads_destination=True)
    SCALAR[f"s_cmpk_{_name}_u32"] = Scalar("w", "", "0", f"d {_sign} a", reads_destination=True)
    if _name in ("eq", "lg"):
        SCALAR[f"s_cmp_{_name}_u64"] = Scalar("qq", "", "0", f"a {_sign} b")
for _bit in (0, 1):
    SCALAR[f"s_bitcmp{_bit}_b32"] = Scalar("uu", "", "0", f"((a >> (b & 31)) & 1) == {_bit}")
    SCALAR[f"s_bitcmp{_bit}_b64"] = Scalar("qu", "", "0", f"((a >> u64(b & 63)) & u64(1)) == u64({_bit})")
_SAVED = {
    "and": "a & x", "or": "a | x", "xor": "a ^ x", "andn2": "a & ~x", "orn2": "a | ~x", "nand": "~(a & x)",
    "nor": "~(a | x)", "xnor": "~(a ^ x)", "andn1": "~a & x", "orn1": "~a | x",
}  # fmt: skip
SAVE_EXEC: dict[str, Scalar] = {
    f"s_{_name}_saveexec_b64": Scalar("q", "q", _expression, _NOT_ZERO) for _name, _expression in _SAVED.items()
}
