"""Is an edit told apart that changes a result from one that changes none, or one that nobody uses?"""

import numpy as np
import pytest

from impl.executions.isa import machine, miscompile
from impl.executions.isa.assembly import EXEC, Program, read_lines
from impl.executions.isa.machine import Kernel, MachineFault, State
from impl.executions.isa.miscompile import Edit
from impl.executions.isa.stepping import Stepper, Undecided
from impl.executions.isa.triton_launch import Launched


def _edit(program: Program, kind: str, words: str) -> Edit:
    return next(edit for edit in miscompile.edits(program, kind) if edit.words == words)


def _stepped(lines: str, kind: str, words: str, out: np.ndarray | None = None) -> Stepper:
    """The lines on v0 = lane, v1 = 2 * lane, v2 = 7, v[8:9] = where each lane may store; s[4:5] = 3."""
    program = read_lines("gfx950", lines)
    edit = _edit(program, kind, words)
    original = machine.prepare(program)
    stepper = Stepper("this", edit.at, original, machine.prepare(miscompile.applied(program, edit)))
    memory = np.zeros(64, np.uint32) if out is None else out

    def run(kernel: Kernel, limit: int) -> int:
        state = State(1, 1024, 256, kernel.encoded.grain)
        lanes = np.arange(64, dtype=np.uint64)
        state.waves.v[0, 0], state.waves.v[0, 1], state.waves.v[0, 2] = lanes, 2 * lanes, 7
        addresses = memory.ctypes.data + 4 * lanes
        state.waves.v[0, 8], state.waves.v[0, 9] = addresses & np.uint64(0xFFFFFFFF), addresses >> np.uint64(32)
        state.waves.s[0, 4:6], state.waves.s[0, EXEC : EXEC + 2] = 3, 0xFFFFFFFF
        state.waves.vk[0, [0, 1, 2, 8, 9]] = ~np.uint64(0)
        state.waves.sk[:] = 0xFFFFFFFF
        return machine.resume(kernel, state, [(memory.ctypes.data, memory.ctypes.data + memory.nbytes)])

    stepper(Launched("this", original, 1), run)
    return stepper


STORE = "global_store_dword v[8:9], v3, off"


def test_equal_results_are_told() -> None:
    out = np.zeros(64, np.uint32)
    stepper = _stepped(
        f"v_sub_u32_e32 v3, v2, v2\nv_max_u32_e32 v3, v2, v0\n{STORE}", "instruction dropped", "dropped", out
    )
    assert (stepper.steps, stepper.differing) == (1, 1)
    stepper = _stepped(f"v_cmp_lt_u32_e32 vcc, 64, v0\nv_cndmask_b32_e32 v3, v1, v2, vcc\n{STORE}", "relation changed",
                       "made v_cmp_le_u32", out)  # fmt: skip
    assert (stepper.steps, stepper.differing) == (1, 0)
    assert (out == 2 * np.arange(64)).all()


def test_used_difference_is_a_fault() -> None:
    with pytest.raises(MachineFault, match="never written, is stored"):
        _stepped(f"v_sub_u32_e32 v3, v0, v2\n{STORE}", "operands swapped", "sources v0 and v2 swapped")


def test_difference_in_a_lane_nobody_uses_is_none() -> None:
    lines = f"""v_sub_u32_e64 v4, v0, 1 clamp
    v_lshlrev_b32_e32 v4, 2, v4
    ds_bpermute_b32 v5, v4, v1
    s_waitcnt lgkmcnt(0)
    v_cmp_lt_u32_e32 vcc, 0, v0
    v_cndmask_b32_e32 v3, v2, v5, vcc
    {STORE}"""
    out = np.zeros(64, np.uint32)
    stepper = _stepped(lines, "modifier dropped", "clamp dropped", out)
    assert (stepper.steps, stepper.differing) == (1, 1)
    assert (out == [7, *(2 * lane for lane in range(63))]).all()
    with pytest.raises(MachineFault, match="never written, is stored"):
        _stepped(
            lines.replace("v_cndmask_b32_e32 v3, v2, v5, vcc", "v_mov_b32_e32 v3, v5"),
            "modifier dropped",
            "clamp dropped",
        )


def test_what_is_not_executed_has_no_steps() -> None:
    lines = f"v_mov_b32_e32 v3, v0\ns_cmp_eq_u32 s4, 3\ns_cbranch_scc1 over\nv_sub_u32_e32 v3, v0, v2\nover:\n{STORE}"
    assert _stepped(lines, "operands swapped", "sources v0 and v2 swapped").steps == 0


def test_every_execution_of_a_loop_counts() -> None:
    lines = f"""v_mov_b32_e32 v3, v0
    again:
    v_sub_u32_e64 v3, v3, 0 clamp
    s_sub_u32 s4, s4, 1
    s_cmp_lg_u32 s4, 0
    s_cbranch_scc1 again
    {STORE}"""
    stepper = _stepped(lines, "modifier dropped", "clamp dropped")
    assert (stepper.steps, stepper.differing) == (3, 0)


@pytest.mark.parametrize(
    ("lines", "kind", "words", "why"),
    [
        (f"v_mov_b32_e32 v3, v0\n{STORE}", "constant changed", "offset:0 bit 2 flipped", "not compared"),
        ("s_waitcnt vmcnt(0)", "wait weakened", "dropped", "not compared"),
        ("s_mov_b64 exec, 1", "constant changed", "1 bit 1 flipped", "lanes execute"),
        ("s_branch over\nv_nop\nover:\nv_nop", "instruction dropped", "dropped", "where the wave goes on"),
    ],
)
def test_what_cannot_be_compared_is_undecided(lines: str, kind: str, words: str, why: str) -> None:
    with pytest.raises(Undecided, match=why):
        _stepped(lines, kind, words)
