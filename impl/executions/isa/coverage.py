"""Which instructions does the executor model, and where?"""

from __future__ import annotations

from impl.executions.isa import encoding
from impl.executions.isa.meaning import BOTH, CDNA4, COMPARE, SAVE_EXEC, SCALAR, VECTOR

UNSETTLED = (
    "exp, log, rcp, rsq, sqrt, sin, cos: the correctly rounded value stands for the hardware's, which is within an ulp of it",
    "matrix instructions: exact products, one rounding a result; hardware's order is measured for gfx942 (arXiv 2511.10909) only",
    "v_dot2 of halves and bfloat16: rounded after each sum, in the order of the guide's pseudocode",
    "the sign and payload of a NaN that an operation makes, and of NaN in 8 bits",
    "infinity to FNUZ under FP16_OVFL; NaN to 4 bits",
    "a dword that straddles the end of a buffer: its first byte decides",
    "v_permlane16_swap and v_permlane32_swap while lanes are off; a lane that is off as the source of DPP reads as invalid",
)
"""What no test here can settle, and what is assumed instead: points where hardware may round or choose otherwise."""

_LANES = {"v_readfirstlane_b32": BOTH, "v_readlane_b32": BOTH, "v_writelane_b32": BOTH, "v_swap_b32": BOTH,
          "v_permlane16_swap_b32": CDNA4, "v_permlane32_swap_b32": CDNA4}  # fmt: skip


def modelled() -> dict[str, frozenset[str]]:
    """Mnemonics without the encoding's suffix, to the architectures on which they run here."""
    found: dict[str, frozenset[str]] = {name: meaning.archs for name, meaning in VECTOR.items()}
    for name in COMPARE:
        found[name] = found[name.replace("v_cmp_", "v_cmpx_", 1)] = BOTH
    found |= dict.fromkeys((*SCALAR, *SAVE_EXEC, *encoding.BRANCHES, *encoding.IDLE), BOTH)
    found |= dict.fromkeys(("s_waitcnt", "s_barrier", "s_endpgm", "s_trap", "s_setreg_imm32_b32"), BOTH)
    found |= _LANES
    found |= _memory()
    found |= encoding.matrix_instructions()
    return dict(sorted(found.items()))


def _memory() -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    sizes = ("dword", "dwordx2", "dwordx3", "dwordx4")
    loads = ("ubyte", "sbyte", "ushort", "sshort", "ubyte_d16", "ubyte_d16_hi", "sbyte_d16", "sbyte_d16_hi", "short_d16",
             "short_d16_hi", *sizes)  # fmt: skip
    stores = ("byte", "short", "byte_d16_hi", "short_d16_hi", *sizes)
    for space in ("buffer", "global", "flat", "scratch"):
        found |= {f"{space}_load_{kind}": BOTH for kind in loads} | {f"{space}_store_{kind}": BOTH for kind in stores}
    for space in ("buffer", "global", "flat"):
        for name in encoding.ATOMICS:
            found[f"{space}_atomic_{name}"] = BOTH
            if not name.endswith(("f32", "f64", "f16")):
                found[f"{space}_atomic_{name}_x2"] = BOTH
    for count in ("", "x2", "x4", "x8", "x16"):
        found[f"s_load_dword{count}"] = found[f"s_buffer_load_dword{count}"] = BOTH
    for kind in ("b32", "b64", "b96", "b128"):
        found[f"ds_read_{kind}"] = found[f"ds_write_{kind}"] = BOTH
    for kind in ("u8", "i8", "u16", "u8_d16", "u8_d16_hi", "i8_d16", "i8_d16_hi", "u16_d16", "u16_d16_hi"):
        found[f"ds_read_{kind}"] = BOTH
    for kind in ("b8", "b16", "b8_d16_hi", "b16_d16_hi"):
        found[f"ds_write_{kind}"] = BOTH
    for kind in ("2_b32", "2_b64", "2st64_b32", "2st64_b64"):
        found[f"ds_read{kind}"] = found[f"ds_write{kind}"] = BOTH
    for bits in (4, 8, 16):
        found[f"ds_read_b64_tr_b{bits}"] = CDNA4
    for name in encoding.LDS_ATOMICS:
        stem, kind = name.rsplit("_", 1)
        found[f"ds_{name}"] = found[f"ds_{stem}_rtn_{kind}"] = BOTH
    found |= dict.fromkeys(("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"), BOTH)
    return found
