"""Runs a few lines of assembly on registers given by hand: how one instruction is tried alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from impl.executions.isa import core, machine
from impl.executions.isa.assembly import EXEC, read_lines
from impl.executions.isa.encoding import SCC_INDEX

Array = np.ndarray[Any, Any]
_ALL = 0xFFFFFFFF


@dataclass
class Wave:
    """One wave's registers after a run: vgpr uint32 [512, 64] (256 and up accumulate), sgpr uint32 [128], scc, lds bytes."""

    vgpr: Array
    sgpr: Array
    scc: int
    lds: bytes
    known: Array


def run_lines(
    arch: str,
    lines: str,
    *,
    vgpr: Array | None = None,
    sgpr: Array | None = None,
    scc: int = 0,
    lds: bytes | None = None,
    memory: dict[int, Array] | None = None,
    known: bool = True,
) -> Wave:
    """Executes assembly lines as LLVM prints them, `s_endpgm` appended, on one wave.

    vgpr, sgpr: the registers before; EXEC is sgpr 126 and 127, all lanes where no sgpr is given. memory: addresses to
    uint8 arrays that lie there, changed in place: the key is the array's own address, `array.ctypes.data`. known: whether
    the registers count as written. A load's result may be looked at without a wait behind it: nothing uses it here.
    Raises `UnsupportedInstruction`, `MachineFault`.
    """
    kernel = machine.prepare(read_lines(arch, lines))
    state = machine.State(1, max(len(lds or b""), 4), 256, kernel.encoded.grain)
    regions = []
    for address, array in (memory or {}).items():
        if address != array.ctypes.data:
            raise ValueError(f"memory at {address:#x}: should be where the array lies, {array.ctypes.data:#x}")
        regions.append((address, address + array.nbytes))
    if vgpr is not None:
        state.waves.v[0] = vgpr
    state.waves.s[0, EXEC : EXEC + 2] = _ALL
    if sgpr is not None:
        state.waves.s[0, : len(sgpr)] = sgpr
    if lds:
        state.shared.content[: len(lds)] = np.frombuffer(lds, np.uint8)
        state.shared.known[:] = 1
    if known:
        state.waves.vk[:] = 0xFFFFFFFFFFFFFFFF
        state.waves.sk[:] = _ALL
    else:
        state.waves.sk[0, EXEC : EXEC + 2] = _ALL
        state.waves.sk[0, SCC_INDEX + 1 :] = _ALL
    state.waves.w[0, core.SCC] = scc
    state.waves.w[0, core.MODE] = machine.mode_of(arch)
    machine.resume(kernel, state, regions)
    return Wave(
        state.waves.v[0],
        state.waves.s[0, :128],
        int(state.waves.w[0, core.SCC]),
        state.shared.content.tobytes(),
        state.waves.vk[0],
    )
