"""Does one instruction, or another in its place, make a difference wherever a launch executes it?

A launch is stopped before every execution of the instruction; both are tried on the same registers and memories, and what
only the other one writes is marked as never written. The machine itself then says whether any of it is stored, addresses
memory or decides a branch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from impl.executions.isa import core, machine
from impl.executions.isa import encoding as row
from impl.executions.isa.assembly import EXEC, M0
from impl.executions.isa.encoding import Kind
from impl.executions.isa.triton_launch import Launched, Run

Array = np.ndarray[Any, Any]

MOST_STEPS = 30_000
"""Executions after which no more are looked at."""

_COMPARABLE = frozenset({
    Kind.VECTOR, Kind.COMPARE, Kind.READ_LANE, Kind.READ_FIRST_LANE, Kind.WRITE_LANE, Kind.SWAP, Kind.SWAP_ROWS, Kind.MATRIX,
    Kind.SCALAR, Kind.SAVE_EXEC, Kind.BRANCH, Kind.SCALAR_LOAD, Kind.LDS, Kind.LDS_PERMUTE, Kind.BUFFER, Kind.GLOBAL,
    Kind.SET_MODE,
})  # fmt: skip
_OF_WAVES = core.Waves._fields
_SHARED = ("lds", "lds_known", "watch", "reads")


class Undecided(Exception):
    """The two instructions differ in what is not followed, or are of a kind that is not compared; `str` says what."""


@dataclasses.dataclass
class Stepper:
    """An onlooker of launches that compares two programs, apart in one instruction, wherever that one is executed.

    steps: executions so far. differing: those in which the two left something different. undecided: what ended a launch with
    `Undecided`.
    """

    key: str
    at: int
    original: machine.Kernel
    edited: machine.Kernel
    steps: int = 0
    differing: int = 0
    undecided: str = ""

    def __post_init__(self) -> None:
        rows = self.original.encoded.rows.copy()
        rows[self.at, row.KIND] = Kind.TRAP
        encoded = dataclasses.replace(self.original.encoded, rows=rows)
        self._stopped = dataclasses.replace(self.original, encoded=encoded)

    def __call__(self, launched: Launched, run: Run) -> int:
        """Runs a launch, stopping at the instruction if it is of the kernel in question."""
        if launched.key != self.key:
            return run(launched.kernel, 0)
        with self._stepping():
            return run(self._stopped, 0)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        whole = core.run_launch

        def stopping(*arguments: Any) -> int:
            named = machine.named_state(arguments)
            numbers = named["run"]
            while True:
                ends = int(whole(*arguments))
                if ends != core.FAULT:
                    return ends
                if (numbers[core.FAULT_KIND], numbers[core.FAULT_PC]) == (core.TRAPPED, self.at):
                    self._step(whole, named, arguments[1:])
                elif not self._read_anywhere(whole, named, arguments):
                    return ends

        with machine.launching(stopping):
            yield

    def _step(self, whole: Any, named: dict[str, Any], rest: tuple[Any, ...]) -> None:
        """Executes the instruction the wave is at both ways, and goes on behind the edited one."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise self._undecided(f"executed more than {MOST_STEPS} times")
        numbers = named["run"]
        wave = int(numbers[core.FAULT_WAVE])
        named["w"][wave, core.PC] = self.at
        numbers[core.INSTRUCTIONS] -= 1
        self._check_comparable()
        before = self._snapshot(named, wave)
        right = self._after(self.original, whole, named, rest, wave)
        self._restore(named, wave, before)
        wrong = self._after(self.edited, whole, named, rest, wave)
        if self._mark(named, wave, right, wrong):
            self.differing += 1

    def _read_anywhere(self, whole: Any, named: dict[str, Any], arguments: tuple[Any, ...]) -> bool:
        """Goes on behind a `ds_bpermute` whose lane numbers are unknown: it reads no memory, and what it gives is as unknown."""
        numbers = named["run"]
        at, wave = int(numbers[core.FAULT_PC]), int(numbers[core.FAULT_WAVE])
        r = self.original.encoded.rows[at]
        if numbers[core.FAULT_KIND] != core.UNKNOWN_ADDRESS or (r[row.KIND], r[row.OP]) != (Kind.LDS_PERMUTE, 0):
            return False
        known, lanes = named["vk"][wave], _executing(named["s"][wave])
        own = known[r[row.SRC0]]
        known[r[row.SRC0]] = ~np.uint64(0)
        named["w"][wave, core.PC] = at
        machine.run_one(whole, arguments)
        given = known[r[row.DST]]
        known[r[row.SRC0]] = own
        # The destination may be the register of the lane numbers.
        old = own if r[row.SRC0] == r[row.DST] else given
        known[r[row.DST]] = (given & own & lanes) | (old & ~lanes)
        return True

    def _undecided(self, why: str) -> Undecided:
        self.undecided = why
        return Undecided(why)

    def _check_comparable(self) -> None:
        for kernel in (self.original, self.edited):
            r = kernel.encoded.rows[self.at]
            kind, flags = Kind(int(r[row.KIND])), int(r[row.FLAGS])
            in_memory = kind in (Kind.BUFFER, Kind.GLOBAL, Kind.LDS) and flags & (row.STORE | row.ATOMIC | row.TO_LDS)
            if kind != Kind.NOTHING and (kind not in _COMPARABLE or in_memory):
                raise self._undecided("executed, and of a kind that is not compared")

    def _snapshot(self, named: dict[str, Any], wave: int) -> dict[str, Array]:
        found = {name: named[name][wave].copy() for name in _OF_WAVES}
        found |= {name: named[name].copy() for name in _SHARED} if self._touches_lds() else {}
        return found | {"run": named["run"].copy()}

    def _touches_lds(self) -> bool:
        return any(kernel.encoded.rows[self.at, row.KIND] == Kind.LDS for kernel in (self.original, self.edited))

    @staticmethod
    def _restore(named: dict[str, Any], wave: int, before: dict[str, Array]) -> None:
        for name, values in before.items():
            (named[name][wave] if name in _OF_WAVES else named[name])[:] = values

    def _after(
        self, kernel: machine.Kernel, whole: Any, named: dict[str, Any], rest: tuple[Any, ...], wave: int
    ) -> dict[str, Array]:
        """The state behind one execution of the instruction as it stands in a program."""
        found = kernel.encoded
        ends = machine.run_one(whole, (core.Code(found.rows, found.literals, found.matrices), *rest))
        if ends != core.LIMIT:
            raise self._undecided("one of the two ends in a fault")
        return self._snapshot(named, wave)

    def _mark(self, named: dict[str, Any], wave: int, right: dict[str, Array], wrong: dict[str, Array]) -> bool:
        """Marks as never written what the two left different; whether there was any."""
        vectors = right["v"] != wrong["v"]
        scalars = right["s"] ^ wrong["s"]
        condition = right["w"][core.SCC] != wrong["w"][core.SCC]
        others = np.delete(right["w"] != wrong["w"], core.SCC)
        lanes = (vectors.astype(np.uint64) << np.arange(64, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        for part in range(2):
            known = [after["vk"] | after["half"][part] for after in (right, wrong)]
            lanes |= known[0] ^ known[1]
        scalars |= right["sk"] ^ wrong["sk"]
        waits = any((right[name] != wrong[name]).any() for name in ("vm", "vl", "sl"))
        if not (lanes.any() or scalars.any() or condition or others.any() or waits):
            return False
        if others.any() or waits or scalars[[M0, EXEC, EXEC + 1]].any():
            raise self._undecided(
                "they differ in where the wave goes on, in which lanes execute or in what is waited for"
            )
        named["vk"][wave] &= ~lanes
        named["half"][wave] &= ~lanes
        named["sk"][wave] &= ~scalars
        if condition:
            named["sk"][wave, row.SCC_INDEX] &= ~np.uint32(1)
        return True


def _executing(scalars: Array) -> np.uint64:
    return np.uint64(scalars[EXEC]) | np.uint64(scalars[EXEC + 1]) << np.uint64(32)
