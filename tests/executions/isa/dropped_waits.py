"""Of the `s_nop` that LLVM put into small kernels, which are not missed when they are gone? A process of its own: prints JSON.

`python -m tests.executions.isa.dropped_waits gfx942` compiles the kernels of `micro_kernels` and runs none of them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from impl.executions.isa import encoding as row
from impl.executions.isa import flow, hazards
from impl.executions.isa.assembly import Program
from impl.executions.isa.encoding import Encoded, Kind

_LOADS = frozenset((Kind.BUFFER, Kind.GLOBAL, Kind.SCRATCH, Kind.SCALAR_LOAD))


def without(program: Program, at: int) -> Program:
    """The program without one instruction."""
    instructions = [*program.instructions[:at], *program.instructions[at + 1 :]]
    targets = {label: number - (number > at) for label, number in program.targets.items()}
    return Program(program.name, program.arch, instructions, targets, program.directives)


def reason(program: Program, encoded: Encoded, at: int) -> str:
    """Why LLVM keeps a wait that is no hazard of the table; empty where nothing is known.

    It breaks up runs of loads that may have to be repeated (XNACK); takes a packed instruction's `op_sel_hi` for a result's
    `op_sel`; waits between the registers of a spilled tuple, before DPP behind loads too, and for a vector instruction's scalar
    result though a scalar one has overwritten it.
    """
    before = program.instructions[at - 1]
    kinds = [int(encoded.rows[place][row.KIND]) for place in (at - 1, at + 1)]
    if kinds[0] in _LOADS and kinds[1] in _LOADS:
        return "repeated loads"
    if before.mnemonic.startswith(("v_pk_", "v_fma_mix")):
        return "packed"
    around = program.instructions[max(0, at - 4) : at]
    if kinds[1] == Kind.WRITE_LANE and any(one.mnemonic == "v_writelane_b32" for one in around):
        return "spilled"
    effects = flow.effects(encoded)
    reads = effects[at + 1].reads
    if encoded.rows[at + 1][row.DPP] and any(_last(effects, encoded, at, one) in _LOADS | {Kind.LDS} for one in reads):
        return "loaded before DPP"
    if any(
        _last(effects, encoded, at, one) in (Kind.SCALAR, Kind.SAVE_EXEC) for one in reads if one >= row.SCALAR_BASE
    ):
        return "overwritten by a scalar instruction"
    return ""


def _last(effects: list[flow.Effect], encoded: Encoded, at: int, register: int) -> int:
    """The kind of the last of the instructions before that wrote a register."""
    for place in range(at - 1, max(-1, at - 8), -1):
        if register in effects[place].writes:
            return int(encoded.rows[place][row.KIND])
    return Kind.NOTHING


def dropped(program: Program) -> dict[str, list[str]]:
    """Of each `s_nop`: `found` if its loss is seen, else why LLVM put it, with the lines round it."""
    told: dict[str, list[str]] = {}
    encoded = row.encode(program)
    for at, instruction in enumerate(program.instructions):
        if instruction.mnemonic != "s_nop":
            continue
        shorter = without(program, at)
        lines = " / ".join(one.text for one in program.instructions[max(0, at - 3) : at + 2])
        why = "found" if hazards.missing(shorter, row.encode(shorter)) else reason(program, encoded, at)
        told.setdefault(why, []).append(lines)
    return told


def main() -> None:
    """Looks at every kernel that is launched, once."""
    from impl.executions.isa import triton_launch
    from tests.executions.isa import micro_kernels

    triton_launch.install(sys.argv[1])
    seen: set[str] = set()
    told: dict[str, list[str]] = {}

    def look(launched: triton_launch.Launched, run: Any) -> int:
        if launched.key not in seen:
            seen.add(launched.key)
            for why, lines in dropped(launched.kernel.program).items():
                told.setdefault(why, []).extend(lines)
        return 0

    with triton_launch.looked_on(look):
        for _ in micro_kernels.results(sys.argv[1], ""):
            pass
    sys.stdout.write(json.dumps({"kernels": len(seen), "told": told}))


if __name__ == "__main__":
    main()
