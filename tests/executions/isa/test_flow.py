"""Is what is said of every path right: of results nobody reads, of waits and of barriers?"""

import pytest

from impl.executions.isa import encoding, flow
from impl.executions.isa.assembly import read_lines
from impl.executions.isa.encoding import Encoded


def _encoded(*lines: str) -> Encoded:
    return encoding.encode(read_lines("gfx950", "\n".join(lines)))


@pytest.mark.parametrize(
    "lines",
    [
        ("v_add_u32_e32 v1, v2, v3", "v_mov_b32_e32 v1, v4"),
        ("v_add_u32_e32 v1, v2, v3",),
        ("s_add_u32 s1, s2, s3", "s_mov_b32 s1, 0", "s_cmp_eq_u32 s1, s2"),
        ("v_cmp_lt_i32_e32 vcc, v1, v2", "v_cmp_lt_i32_e32 vcc, v1, v3", "v_cndmask_b32_e32 v1, v2, v3, vcc"),
    ],
)
def test_overwritten_result_is_unread(lines: tuple[str, ...]) -> None:
    assert flow.unread(_encoded(*lines), 0)


@pytest.mark.parametrize(
    "lines",
    [
        ("v_add_u32_e32 v1, v2, v3", "v_mov_b32_e32 v4, v1"),
        # The accumulator is a source.
        ("v_mov_b32_e32 v1, v2", "v_fmac_f32_e32 v1, v3, v4"),
        # A transposing read of 64 bits fills two registers.
        ("v_mov_b32_e32 v4, v1", "ds_read_b64_tr_b16 v[2:3], v0", "v_add_u32_e32 v5, v4, v4"),
        # Half of the register stays.
        ("v_mov_b32_e32 v1, v2", "v_mov_b32_sdwa v1, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0"),
        # Lanes without a source keep the old value.
        ("v_mov_b32_e32 v1, v2", "v_mov_b32_dpp v1, v3 row_shr:1 row_mask:0xf bank_mask:0xf"),
        # Other lanes may execute.
        ("v_mov_b32_e32 v1, v2", "s_mov_b64 exec, s[2:3]", "v_mov_b32_e32 v1, v3", "s_mov_b64 exec, -1",
         "global_store_dword v[4:5], v1, off"),
        # A condition and a store are read.
        ("s_cmp_eq_u32 s1, s2", "s_cselect_b32 s3, s4, s5"),
        ("v_mov_b32_e32 v1, v2", "ds_write_b32 v3, v1"),
        ("v_mov_b32_e32 v1, v2", "v_mfma_f32_4x4x4_16b_f16 v[4:7], v[0:1], v[2:3], 0"),
        # What executes is never nobody's.
        ("s_mov_b64 exec, s[2:3]",),
    ],
)  # fmt: skip
def test_result_that_may_be_read_is_not_unread(lines: tuple[str, ...]) -> None:
    assert not flow.unread(_encoded(*lines), 0)


def test_every_path_counts() -> None:
    lines = ("v_mov_b32_e32 v1, v2", "s_cbranch_scc0 over", "v_mov_b32_e32 v1, v3", "over:", "v_mov_b32_e32 v4, v1")
    assert not flow.unread(_encoded(*lines), 0)
    assert flow.unread(_encoded(*lines[:2], "v_nop", *lines[2:4], "v_mov_b32_e32 v1, 0"), 0)


def test_loop_reads_what_it_wrote() -> None:
    assert not flow.unread(
        _encoded("again:", "v_mov_b32_e32 v3, v1", "v_mov_b32_e32 v1, v2", "s_cbranch_scc0 again"), 1
    )


LOAD, OTHER, USE = "global_load_dword v1, v[2:3], off", "global_load_dword v4, v[2:3], off", "v_mov_b32_e32 v5, v1"


@pytest.mark.parametrize(
    ("lines", "enough"),
    [
        ((LOAD, "s_waitcnt vmcnt(0)", USE), True),
        ((LOAD, "s_nop 0", USE), False),
        ((LOAD, OTHER, "s_waitcnt vmcnt(1)", USE), True),
        ((LOAD, OTHER, "s_waitcnt vmcnt(2)", USE), False),
        ((OTHER, LOAD, "s_waitcnt vmcnt(1)", USE), False),
        ((LOAD, "s_waitcnt lgkmcnt(0)", USE), False),
        # Overwritten in order by a load of the same kind, out of order by another.
        ((LOAD, LOAD, "s_waitcnt vmcnt(0)", USE), True),
        ((LOAD, "ds_read_b32 v1, v6", "s_waitcnt vmcnt(0) lgkmcnt(0)", USE), False),
        # Scalar loads come back in any order.
        (
            (
                "s_load_dword s4, s[0:1], 0x0",
                "s_load_dword s5, s[0:1], 0x0",
                "s_waitcnt lgkmcnt(1)",
                "s_mov_b32 s6, s4",
            ),
            False,
        ),
        (("s_load_dword s4, s[0:1], 0x0", "s_waitcnt lgkmcnt(0)", "s_mov_b32 s6, s4"), True),
        (
            ("s_load_dword s4, s[0:1], 0x0", "ds_read_b32 v1, v6", "ds_read_b32 v7, v6", "s_waitcnt lgkmcnt(1)", USE),
            False,
        ),
        (("ds_read_b32 v1, v6", "ds_read_b32 v7, v6", "s_waitcnt lgkmcnt(1)", USE), True),
        # LDS is filled before the barrier.
        (("ds_write_b32 v1, v2", "s_barrier"), False),
        (("ds_write_b32 v1, v2", "s_waitcnt lgkmcnt(0)", "s_barrier"), True),
        (("buffer_load_dword v1, s[0:3], 0 offen lds", "ds_read_b32 v4, v5"), False),
        # On one path only.
        ((LOAD, "s_cbranch_scc0 over", "s_waitcnt vmcnt(0)", "over:", USE), False),
        (("again:", "s_waitcnt vmcnt(0)", USE, LOAD, "s_cbranch_scc0 again"), True),
        (("again:", USE, LOAD, "s_cbranch_scc0 again"), False),
    ],
)
def test_waits(lines: tuple[str, ...], enough: bool) -> None:
    found = _encoded(*lines)
    assert flow.waits_suffice(found, found) is enough


def test_store_that_was_waited_for_at_a_barrier_must_be() -> None:
    store = "global_store_dword v[2:3], v1, off"
    waited, not_waited = _encoded(store, "s_waitcnt vmcnt(0)", "s_barrier"), _encoded(store, "s_nop 0", "s_barrier")
    assert flow.waits_suffice(not_waited, not_waited)
    assert not flow.waits_suffice(waited, not_waited)


def test_barrier_without_memory_beside_it_orders_nothing() -> None:
    write, read = "ds_write_b32 v1, v2", "ds_read_b32 v3, v4"
    assert flow.orders_nothing(_encoded(write, "s_barrier", "v_nop", "s_barrier", read), 1)
    assert flow.orders_nothing(_encoded(write, "s_barrier", "v_nop", "s_barrier", read), 3)
    assert flow.orders_nothing(_encoded("v_nop", "s_barrier", read), 1)
    assert not flow.orders_nothing(_encoded(write, "s_barrier", read), 1)
    assert not flow.orders_nothing(_encoded("again:", read, "s_barrier", write, "s_barrier", "s_cbranch_scc0 again"), 3)
