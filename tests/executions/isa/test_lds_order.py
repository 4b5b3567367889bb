"""Are waves that meet in LDS between two barriers seen, and those that do not let be?"""

import numpy as np
import pytest

from impl.executions.isa import machine
from impl.executions.isa.assembly import EXEC, read_lines
from impl.executions.isa.lds_order import Witness, _Stretch
from impl.executions.isa.machine import Kernel, MachineFault, State
from impl.executions.isa.triton_launch import Launched

WAITED = "s_waitcnt lgkmcnt(0)"


def _witnessed(*lines: str) -> Witness:
    """The lines in two waves: v0 = 4 * lane, v1 = v0 + 256 * wave, v2 = the other wave's v1, v3 = 7, v4 = wave."""
    kernel = machine.prepare(read_lines("gfx950", "\n".join(lines)))

    def run(program: Kernel, limit: int) -> int:
        state = State(2, 1024, 256, program.encoded.grain)
        for wave in range(2):
            state.waves.v[wave, 0] = 4 * np.arange(64)
            state.waves.v[wave, 1] = state.waves.v[wave, 0] + 256 * wave
            state.waves.v[wave, 2] = state.waves.v[wave, 0] + 256 * (1 - wave)
            state.waves.v[wave, 3], state.waves.v[wave, 4] = 7, wave
        state.waves.s[:, EXEC : EXEC + 2] = 0xFFFFFFFF
        state.waves.vk[:, :5] = ~np.uint64(0)
        state.waves.sk[:] = 0xFFFFFFFF
        return machine.resume(program, state, [])

    witness = Witness("this", kernel)
    witness(Launched("this", kernel, 2), run)
    return witness


@pytest.mark.parametrize(
    ("lines", "stretches"),
    [
        # Each its own bytes.
        (("ds_write_b32 v1, v4", "ds_read_b32 v5, v1"), 1),
        # The barrier between.
        (("ds_write_b32 v1, v4", WAITED, "s_barrier", "ds_read_b32 v5, v2", WAITED), 2),
        # All write one value, and read what they wrote.
        (("ds_write_b32 v0, v3", "ds_read_b32 v5, v0"), 1),
    ],
)
def test_waves_that_do_not_meet(lines: tuple[str, ...], stretches: int) -> None:
    found = _witnessed(*lines)
    assert (found.stretches, found.conflicts, found.refused) == (stretches, 0, "")


@pytest.mark.parametrize(
    "lines",
    [
        ("ds_write_b32 v1, v4", "ds_read_b32 v5, v2"),
        ("ds_read_b32 v5, v2", "ds_write_b32 v1, v4"),
        ("ds_write_b32 v0, v4",),
        ("ds_write2_b32 v0, v4, v3 offset0:0 offset1:64",),
        ("ds_write_b8 v0, v4",),
    ],
)
def test_waves_that_meet(lines: tuple[str, ...]) -> None:
    """The machine's own watch ends most of these; what it lets pass is judged as well."""
    try:
        found = _witnessed(*lines)
    except MachineFault as fault:
        assert fault.kind == "LDS race"
    else:
        assert found.conflicts > 0


def test_early_read_of_another_value_is_a_conflict() -> None:
    places = np.arange(4)
    for before, known, met in ((7, 1, False), (6, 1, True), (7, 0, True)):
        stretch = _Stretch(np.full(4, before, np.uint8), np.full(4, known, np.uint8))
        stretch.read(0, places)
        stretch.write(1, places, np.full(4, 7, np.uint8))
        assert stretch.conflicts() is met
    alone = _Stretch(np.zeros(4, np.uint8), np.zeros(4, np.uint8))
    alone.read(1, places)
    alone.write(1, places, np.full(4, 7, np.uint8))
    alone.write(1, places, np.full(4, 8, np.uint8))
    assert not alone.conflicts()
    alone.write(0, places, np.full(4, 8, np.uint8))
    assert alone.conflicts()


def test_loads_into_lds_are_not_looked_at() -> None:
    kernel = machine.prepare(read_lines("gfx950", "ds_add_u32 v0, v3"))
    assert "not looked at" in Witness("this", kernel).refused
