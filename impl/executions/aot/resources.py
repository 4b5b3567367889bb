"""What does a compiled kernel take of the machine, and how many of its waves fit?

Registers, spills, scratch and code size are what the backend states in its assembly text; memory of a workgroup is the
fixed part stated there and what the launch asks for besides. Occupancy is calculated here, because the backend does not
know what the launch asks for.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Machine:
    """What one compute unit has, and in which units it is given out.

    lds: bytes of memory that a workgroup can have, and that the workgroups of a compute unit share. lds_unit: bytes of
    which it is given out. registers: of 32 bits for each of 64 lanes, plain and accumulation registers in one file for each
    of `simds`, given out by `register_unit`. scalars: scalar registers of a SIMD, given out by `scalar_unit`, and
    `scalar_reserve` more to each wave for trap handlers. No SIMD holds more than `waves`.

    Source: LLVM's AMDGPU target, `AMDGPUBaseInfo.cpp` (getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU,
    getLdsDwGranularity, getTotalNumSGPRs, getSGPRAllocGranule, getOccupancyWithNumSGPRs) for gfx90a and its successors.
    """

    lds: int
    lds_unit: int
    registers: int = 512
    register_unit: int = 8
    scalars: int = 800
    scalar_unit: int = 16
    scalar_reserve: int = 16
    simds: int = 4
    waves: int = 8


MACHINES: Mapping[str, Machine] = {
    "gfx942": Machine(lds=64 << 10, lds_unit=512),
    "gfx950": Machine(lds=160 << 10, lds_unit=1280),
}
"""By architecture; what is not here cannot be judged."""


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What one compiled kernel takes.

    vgpr, agpr: plain and accumulation registers. scratch: bytes of private memory a lane. lds: bytes of a workgroup's
    memory, of which `lds_limit` is all there is. waves: how many of its waves a SIMD holds, which is less than one where a
    workgroup does not reach every SIMD; 0 where it cannot run. limit: what keeps it from more, `launch` where that asks for
    no more waves and registers are given out that nobody uses. matrix: matrix
    instructions by name. code: bytes. instructions: how many the text has.
    """

    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    lds_limit: int
    waves: float
    limit: str
    matrix: dict[str, int]
    code: int
    instructions: int

    @property
    def spills(self) -> bool:
        """Whether registers did not suffice."""
        return bool(self.vgpr_spills or self.sgpr_spills or self.scratch)


def resources_of(assembly: str, arch: str, shared: int, warps: int) -> Resources:
    """What a kernel takes, from its assembly text; `shared` bytes of memory are asked for by its launch of `warps` waves.

    Raises `ValueError` for a text that does not state its registers.
    """
    machine = MACHINES[arch]
    lds = _metadata(assembly, "group_segment_fixed_size") + shared
    # What a wave is given, which is more than it uses where the launch asks for few waves.
    given = _stated(assembly, "NumVGPRsForWavesPerEU")
    waves, limit = occupancy(machine, given, _stated(assembly, "NumSGPRsForWavesPerEU"), lds, warps)
    if limit == "vgpr" and given > _stated(assembly, "TotalNumVgprs"):
        limit = "launch"
    names = list(opcodes(assembly))
    return Resources(
        vgpr=_stated(assembly, "NumVgprs"),
        agpr=_stated(assembly, "NumAgprs"),
        sgpr=_metadata(assembly, "sgpr_count"),
        vgpr_spills=_metadata(assembly, "vgpr_spill_count"),
        sgpr_spills=_metadata(assembly, "sgpr_spill_count"),
        scratch=_metadata(assembly, "private_segment_fixed_size"),
        lds=lds,
        lds_limit=machine.lds,
        waves=waves,
        limit=limit,
        matrix=dict(sorted(Counter(name for name in names if name.startswith(("v_mfma", "v_smfmac"))).items())),
        code=_code_bytes(assembly),
        instructions=len(names),
    )


def occupancy(machine: Machine, registers: int, scalars: int, lds: int, warps: int) -> tuple[float, str]:
    """How many waves of a kernel a SIMD holds, and what keeps it from more: `vgpr`, `sgpr`, `lds` or `waves`.

    registers: plain and accumulation registers of a lane together. 0 waves where one workgroup does not fit.
    """
    given = _up(max(1, registers), machine.register_unit)
    waves = {
        "waves": machine.waves,
        "vgpr": machine.registers // given,
        "sgpr": machine.scalars // (_up(scalars, machine.scalar_unit) + machine.scalar_reserve),
    }
    limit = min(waves, key=lambda name: waves[name])
    # A workgroup's waves lie on all SIMDs in turn; they wait for one another, so all are there or none.
    groups = waves[limit] * machine.simds // warps
    if lds:
        by_memory = machine.lds // _up(lds, machine.lds_unit)
        if by_memory < groups:
            groups, limit = by_memory, "lds"
    return groups * warps / machine.simds, limit


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def opcodes(assembly: str) -> Iterator[str]:
    """The name of every instruction of the text, in its order."""
    for line in assembly.splitlines():
        if line.startswith(("\t.section", "\t.amdgpu_metadata")):
            return
        found = re.match(r"\t([a-z]\w*)", line)
        if found:
            yield found[1]


def _stated(assembly: str, name: str) -> int:
    """A number of the summary that the backend writes behind a kernel."""
    found = re.search(rf"^; {name}: (\d+)", assembly, re.MULTILINE)
    if found is None:
        raise ValueError(f"the assembly text does not state {name}; it should be the text of one kernel")
    return int(found[1])


def _metadata(assembly: str, name: str) -> int:
    """A number of the kernel's metadata, which the runtime reads."""
    found = re.search(rf"^ +(?:- )?\.{name}: +(\d+)", assembly, re.MULTILINE)
    if found is None:
        raise ValueError(f"the assembly text has no .{name}; it should be the text of one kernel")
    return int(found[1])


def _code_bytes(assembly: str) -> int:
    found = re.search(r"^; codeLenInByte = (\d+)", assembly, re.MULTILINE)
    return int(found[1]) if found else 0
