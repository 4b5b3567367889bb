"""Does every scalar instruction do what AMD's pseudocode says to its destination, SCC and EXEC?"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

from impl.executions.isa.coverage import modelled
from impl.executions.isa.single import run_lines
from impl.executions.isa.unsupported import UnsupportedInstruction
from tests.executions.isa import functions
from tests.executions.isa.assembler import accepts
from tests.executions.isa.pseudocode import Run, Value, whole
from tests.executions.isa.statements import ARCHS

_NOT_ALONE = ("PC_", "PC", "RFE", "FORK", "JOIN", "MOVREL", "GPR_IDX", "GETREG", "SETREG", "VSKIP", "CALL")
"""Jumps, and registers that are no registers of one instruction."""
EXEC, DESTINATION, FIRST, SECOND = 126, 60, 40, 44
_HOSTILE = (0, 1, 2, 31, 32, 33, 63, 64, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE,
            0x00080004, 0x00200000, 0x0040001F, 0x007F0000)  # fmt: skip


@dataclass(frozen=True)
class Scalar:
    """A row: its name, pseudocode, and widths of what it reads and writes; `writes` 0: it writes SCC alone."""

    name: str
    text: str
    reads: tuple[int, ...]
    writes: int
    immediate: bool


def _rows() -> dict[str, Scalar]:
    found = {}
    for op, text in PCODE.items():
        kind = type(op).__name__
        if kind not in ("SOP1Op", "SOP2Op", "SOPCOp", "SOPKOp") or any(part in op.name for part in _NOT_ALONE):
            continue
        widths = {name: size for name, (_, size, _) in OPERANDS[op].items()}
        reads = tuple(widths[name] for name in ("ssrc0", "ssrc1") if name in widths)
        found[op.name.lower()] = Scalar(op.name.lower(), text, reads, widths.get("sdst", 0), "simm16" in widths)
    return found


ROWS = _rows()


def _name(first: int, width: int) -> str:
    return f"s{first}" if width <= 32 else f"s[{first}:{first + 1}]"


def _line(row: Scalar, immediate: int) -> str:
    operands = [_name(DESTINATION, row.writes)] if row.writes else []
    operands += [_name(first, width) for first, width in zip((FIRST, SECOND), row.reads, strict=False)]
    return f"{row.name} {', '.join([*operands, hex(immediate)] if row.immediate else operands)}"


@dataclass(frozen=True)
class Asked:
    """Contents before: sources, old destination, SCC, EXEC and the immediate."""

    sources: tuple[int, ...]
    old: int
    scc: int
    exec: int
    immediate: int


def _draw(row: Scalar, generator: random.Random) -> Asked:
    def register() -> int:
        return (
            generator.choice(_HOSTILE)
            if generator.random() < 0.6
            else generator.getrandbits(32) >> generator.randrange(32)
        )

    sources = tuple(register() | (register() << 32 if width > 32 else 0) for width in row.reads)
    if len(sources) == 2 and generator.random() < 0.15:
        sources = (sources[0], sources[0] & ((1 << max(32, row.reads[1])) - 1))
    masks = (0, (1 << 64) - 1, generator.getrandbits(64))
    immediate = generator.choice((0, 1, 0x7FFF, 0x8000, 0xFFFF, generator.getrandbits(16)))
    return Asked(sources, register() | register() << 32, generator.randrange(2), generator.choice(masks), immediate)


def _stated(row: Scalar, asked: Asked) -> tuple[int, int, int]:
    """(destination's 64 bits, SCC, EXEC) afterwards."""
    names = functions.constants() | {
        f"S{k}": Value(bits, max(32, row.reads[k]), "b") for k, bits in enumerate(asked.sources)
    }
    if row.immediate:
        compares = row.name.startswith("s_cmpk")
        names |= {"S0": Value(asked.old & 0xFFFFFFFF, 32, "b")} if compares else {}
        names["S1" if compares else "S0"] = whole(asked.immediate, 16, "b")
    width = max(32, row.writes)
    names |= {
        "D0": Value(asked.old & ((1 << width) - 1), width, "b"),
        "SCC": whole(asked.scc, 1, "u"),
        "EXEC": Value(asked.exec, 64, "u"),
    }
    run = Run(names, functions.named("gfx950")).execute(row.text)
    written = (1 << width) - 1 if row.writes else 0
    return (asked.old & ~written) | (run.names["D0"].bits & written), run.names["SCC"].bits & 1, run.names["EXEC"].bits


def _differences(row: Scalar, arch: str) -> list[str]:
    generator = random.Random(zlib.crc32(row.name.encode()))
    found = []
    for _ in range(50):
        asked = _draw(row, generator)
        line = _line(row, asked.immediate)
        sgpr = np.random.default_rng(7).integers(0, 1 << 32, 128, dtype=np.uint32)
        for at, bits in (
            (DESTINATION, asked.old),
            (EXEC, asked.exec),
            *zip((FIRST, SECOND), asked.sources, strict=False),
        ):
            sgpr[at], sgpr[at + 1] = bits & 0xFFFFFFFF, bits >> 32
        wave = run_lines(arch, line, sgpr=sgpr, scc=asked.scc)
        got = [int(wave.sgpr[at]) | int(wave.sgpr[at + 1]) << 32 for at in (DESTINATION, EXEC)]
        destination, scc, enabled = _stated(row, asked)
        if (got[0], wave.scc, got[1]) != (destination, scc, enabled):
            sources = [hex(bits) for bits in asked.sources]
            found.append(
                f"{line}, sources {sources}, old {asked.old:#x}, scc {asked.scc}, exec {asked.exec:#x}: "
                f"destination {got[0]:#x}, scc {wave.scc}, exec {got[1]:#x}, should be {destination:#x}, {scc}, {enabled:#x}"
            )
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [name for name in ROWS if accepts("gfx950", _line(ROWS[name], 0))])
def test_every_register_is_as_stated(arch: str, name: str) -> None:
    row = ROWS[name]
    if arch not in modelled().get(name, ()):
        with pytest.raises(UnsupportedInstruction):
            run_lines(arch, _line(row, 0))
        return
    assert _differences(row, arch) == []
