"""Are two assembly texts of a kernel the same program, and if not, how far apart are they?

An instruction is told by its name, its modifiers, its constants, its place among the basic blocks, and by where its
operands come from: the instructions that may have written the registers it reads, told in the same way. Which registers
hold the values between them, labels, comments, debug lines and the order within a block do not enter. Two programs with
the same instructions in every block are the same up to scheduling; the order of memory accesses is told by the barriers
between them only.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

Difference = Literal["same", "same but scheduled", "changed constants", "changed"]

Register = tuple[str, int]

# Values go round a loop once more in each pass; what differs shows at its own instruction in the first.
_PASSES = 3

_REGISTER = re.compile(
    r"(?<![\w.])(?:([vsa])\[(\d+):(\d+)\]|([vsa])(\d+)|(vcc|exec|flat_scratch|xnack_mask)(?:_lo|_hi)?|(m0|scc))(?![\w\[])"
)
_LABEL = re.compile(r"\.?\bL?BB\w+")
_CONSTANT = re.compile(
    r"(?<=\s)-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?=\s*(?:,|\s|$))|(?<=offset:)\d+|(?<=offset[01]:)\d+"
)
_TIMING = ("s_waitcnt", "s_nop", "s_sleep", "s_setprio", "s_sched", "s_clause", "s_delay", "s_wait_")
_NO_RESULT = (
    "s_cmp", "s_bitcmp", "s_cbranch", "s_branch", "s_barrier", "s_endpgm", "s_setreg", "s_store", "s_dcache", "s_icache",
    "s_trap", "s_sendmsg", "s_setpc", "s_set_gpr", "buffer_store", "global_store", "flat_store", "scratch_store", "ds_write",
    "ds_store", "buffer_wb", "buffer_inv", "global_load_lds", *_TIMING,
)  # fmt: skip
_TWO_RESULTS = (
    "v_add_co_", "v_sub_co_", "v_subrev_co_", "v_addc_co_", "v_subb_co_", "v_subbrev_co_", "v_div_scale", "v_mad_u64_u32",
    "v_mad_i64_i32",
)  # fmt: skip
_SWAPS = ("v_swap_", "v_permlane32_swap", "v_permlane16_swap")
_READ_RESULT = (
    "v_fmac",
    "v_pk_fmac",
    "v_mac_",
    "v_dot2c",
    "v_dot4c",
    "v_dot8c",
    "v_writelane",
    "s_cmov",
    "s_addk",
    "s_mulk",
    "s_bitset",
)
_WRITE_SCC = (
    "s_cmp", "s_bitcmp", "s_add", "s_sub", "s_min", "s_max", "s_and", "s_or", "s_xor", "s_nand", "s_nor", "s_xnor", "s_lshl",
    "s_lshr", "s_ashr", "s_bfe", "s_abs", "s_not", "s_wqm", "s_bcnt", "s_quadmask",
)  # fmt: skip
_READ_SCC = ("s_cselect", "s_addc", "s_subb", "s_cbranch_scc", "s_cmov")
_LANES = ("v_", "ds_", "buffer_", "global_", "flat_", "scratch_")
_MEMORY = ("ds_", "buffer_", "global_", "flat_", "scratch_", "s_load", "s_buffer_load")
_ENDS = ("s_branch", "s_cbranch", "s_endpgm", "s_setpc")


class Shape(msgspec.Struct, frozen=True):
    """What is left of an assembly text: hashes of its instructions in their order, of those of each block without it, and
    of those without constants."""

    ordered: str
    scheduled: str
    masked: str


@dataclass
class _Instruction:
    name: str
    template: str
    masked: str
    reads: list[Register]
    writes: list[Register]
    targets: tuple[str, ...]
    block: int = 0
    epoch: int = 0
    sources: list[tuple[tuple[int, int], ...]] = field(default_factory=list)

    @property
    def is_timing(self) -> bool:
        return self.name.startswith(_TIMING)


def difference(before: Shape, after: Shape) -> Difference:
    """How far apart two programs are.

    same: the same instructions in the same order. same but scheduled: in every block the same instructions with the same
    operands. changed constants: so, but for numbers in them.
    """
    if before.ordered == after.ordered:
        return "same"
    if before.scheduled == after.scheduled:
        return "same but scheduled"
    return "changed constants" if before.masked == after.masked else "changed"


def shape_of(assembly: str) -> Shape:
    """What is left of a kernel's assembly text once everything that means nothing is taken away."""
    instructions, blocks = _program(assembly)
    _trace(instructions, blocks)
    exact, masked = _told(instructions, blocks, masked=False), _told(instructions, blocks, masked=True)
    ordered = [told if told else item.template for told, item in zip(exact, instructions, strict=True)]
    return Shape(_hash(ordered), _hash(sorted(exact)), _hash(sorted(masked)))


def _program(assembly: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The instructions with the number of their block, and the block that each label begins."""
    lines = list(_lines(assembly))
    targets = {label for line in lines for label in _LABEL.findall(line) if not line.endswith(":")}
    found: list[_Instruction] = []
    blocks: dict[str, int] = {}
    block = epoch = 0
    is_fresh = True
    for line in lines:
        if line.endswith(":"):
            if line[:-1] in targets:
                block, epoch = (block, 0) if is_fresh else (block + 1, 0)
                blocks[line[:-1]] = block
                is_fresh = True
            continue
        item = _read(line)
        item.block, item.epoch = block, epoch
        found.append(item)
        is_fresh = False
        epoch += item.name == "s_barrier"
        if item.name.startswith(_ENDS):
            block, epoch, is_fresh = block + 1, 0, True
    return found, blocks


def _lines(assembly: str) -> Iterator[str]:
    """Instructions and labels, without comments and directives."""
    for line in assembly.splitlines():
        if line.startswith(("\t.section", "\t.amdgpu_metadata")):
            return
        text = line.partition(";")[0].partition("//")[0].strip()
        is_directive = text.startswith(".") and not text.endswith(":")
        if text and not is_directive:
            yield text


def _read(line: str) -> _Instruction:
    name, _, rest = line.partition(" ")
    if "\t" in name:
        name, _, more = name.partition("\t")
        rest = f"{more} {rest}"
    rest = " " + " ".join(rest.split())
    targets = tuple(_LABEL.findall(rest))
    rest = _LABEL.sub("@", rest)
    operands = [list(_registers(part)) for part in rest.split(",")]
    everything = [register for part in operands for register in part]
    results = _results(name, rest)
    writes = [register for part in operands[:results] for register in part]
    keeps = _keeps_result(name, rest)
    reads = everything if keeps else [register for part in operands[results:] for register in part]
    template = _REGISTER.sub(_spelled, rest)
    scc, lanes = ("scc", 0), ("exec", 0)
    if name.startswith(_READ_SCC):
        reads = [*reads, scc]
    if name.startswith(_WRITE_SCC):
        writes = [*writes, scc]
    if name.startswith(_LANES) or name.startswith("s_cbranch_exec"):
        reads = [*reads, lanes]
    if "saveexec" in name or name.startswith("v_cmpx"):
        reads, writes = [*reads, lanes], [*writes, lanes]
    if name.startswith(("s_cbranch_vcc", "v_div_fmas")):
        reads = [*reads, ("vcc", 0)]
    return _Instruction(name, template, _CONSTANT.sub("#", template), reads, writes, targets)


def _registers(text: str) -> Iterator[Register]:
    for kind, low, high, single, number, named, other in _REGISTER.findall(text):
        if kind:
            yield from ((kind, place) for place in range(int(low), int(high) + 1))
        elif single:
            yield single, int(number)
        else:
            yield named or other, 0


def _spelled(found: re.Match[str]) -> str:
    """A register without its number: its kind, and of how many it is one."""
    kind, low, high, single, _, named, other = found.groups()
    if kind:
        return f"{kind}x{int(high) - int(low) + 1}"
    return str(single or named or other)


def _results(name: str, rest: str) -> int:
    """How many of the operands in front are written."""
    if name.startswith(_NO_RESULT) or rest.endswith(" lds"):
        return 0
    if "atomic" in name or name.startswith(("ds_add", "ds_sub", "ds_min", "ds_max", "ds_and", "ds_or", "ds_xor")):
        return int("_rtn" in name or " sc0" in rest or " glc" in rest)
    return 2 if name.startswith(_TWO_RESULTS) or name.startswith(_SWAPS) else 1


def _keeps_result(name: str, rest: str) -> bool:
    """Whether what the written registers held before enters the result."""
    if name.startswith(_READ_RESULT) or name.startswith(_SWAPS):
        return True
    return name.endswith("_dpp") or "_d16" in name or "UNUSED_PRESERVE" in rest


def _trace(instructions: Sequence[_Instruction], blocks: Mapping[str, int]) -> None:
    """Fill in, for every register read, which instructions may have written it: number and place in what it writes.

    Where the register comes from before the kernel, it is told by its own name, which its caller decides.
    """
    by_block: dict[int, list[int]] = {}
    for number, item in enumerate(instructions):
        by_block.setdefault(item.block, []).append(number)
    order = sorted(by_block)
    following = {block: _following(instructions, by_block, block, blocks, order) for block in order}
    entry: dict[int, dict[Register, frozenset[tuple[int, int]]]] = {block: {} for block in order}
    pending = list(order)
    while pending:
        block = pending.pop(0)
        leaving = dict(entry[block])
        for number in by_block[block]:
            leaving.update(_written(instructions[number], number))
        for successor in following[block]:
            grown = False
            for register, writers in leaving.items():
                known = entry[successor].get(register, frozenset())
                if not writers <= known:
                    entry[successor][register] = known | writers
                    grown = True
            if grown and successor not in pending:
                pending.append(successor)
    for block in order:
        now = dict(entry[block])
        for number in by_block[block]:
            item = instructions[number]
            item.sources = [
                tuple(sorted(now.get(register, frozenset({(-1, _number(register))})))) for register in item.reads
            ]
            now.update(_written(item, number))


def _written(item: _Instruction, number: int) -> dict[Register, frozenset[tuple[int, int]]]:
    return {register: frozenset({(number, place)}) for place, register in enumerate(item.writes)}


def _following(
    instructions: Sequence[_Instruction],
    by_block: Mapping[int, Sequence[int]],
    block: int,
    blocks: Mapping[str, int],
    order: Sequence[int],
) -> list[int]:
    last = instructions[by_block[block][-1]]
    found = [blocks[label] for label in last.targets if label in blocks]
    if not last.name.startswith(("s_branch", "s_endpgm", "s_setpc")):
        found += [later for later in order if later > block][:1]
    return [successor for successor in found if successor in by_block]


def _number(register: Register) -> int:
    kind, number = register
    return int.from_bytes(kind.encode(), "big") * 1024 + number


def _told(instructions: Sequence[_Instruction], blocks: Mapping[str, int], *, masked: bool) -> list[str]:
    """A word for every instruction that it shares with no other one; empty for what only keeps time."""
    own = [
        ""
        if item.is_timing
        else _hash(
            (
                item.name, item.masked if masked else item.template, item.block,
                item.epoch if item.name.startswith(_MEMORY) else 0, [blocks.get(label, -1) for label in item.targets],
            )
        )
        for item in instructions
    ]  # fmt: skip
    told = list(own)
    for _ in range(_PASSES):
        for number, item in enumerate(instructions):
            if own[number]:
                told[number] = _hash((own[number], [_origin(told, writers) for writers in item.sources]))
    return told


def _origin(told: Sequence[str], writers: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
    return sorted((told[number] if number >= 0 else "before", place) for number, place in writers)


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=12).hexdigest()
