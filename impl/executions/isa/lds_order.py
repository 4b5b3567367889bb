"""Do waves of a workgroup meet in LDS between two barriers?

A witness beside the machine's own watch, for kernels without a barrier that they had: it looks at every access as it
happens, and judges each stretch between barriers as a whole, when it is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from impl.executions.isa import core, machine
from impl.executions.isa import encoding as row
from impl.executions.isa.assembly import EXEC
from impl.executions.isa.encoding import Kind
from impl.executions.isa.triton_launch import Launched, Run

Array = np.ndarray[Any, Any]


class _Stretch:
    """What happened to each byte of LDS since the last barrier.

    writers, readers: waves, as bits. early: waves that read before they wrote. value: what was written last. mixed: other
    values were written too. before: what was there, and whether it was ever written.
    """

    def __init__(self, lds: Array, known: Array) -> None:
        self.writers, self.readers, self.early = (np.zeros(len(lds), np.int64) for _ in range(3))
        self.value, self.mixed = np.zeros(len(lds), np.uint8), np.zeros(len(lds), np.bool_)
        self.before, self.before_known = lds.copy(), known != 0

    def read(self, wave: int, places: Array) -> None:
        own = places[(self.writers[places] >> wave) & 1 == 0]
        self.early[own] |= 1 << wave
        self.readers[places] |= 1 << wave

    def write(self, wave: int, places: Array, values: Array) -> None:
        again = self.writers[places] != 0
        self.mixed[places[again & (self.value[places] != values)]] = True
        self.value[places] = values
        # Lanes of one write that meet with other values.
        self.mixed[places[self.value[places] != values]] = True
        self.writers[places] |= 1 << wave

    def conflicts(self) -> bool:
        """Whether it could matter in which order the waves went.

        It does not where one wave alone touches a byte, where none writes it, or where all write one value and whoever reads
        it earlier than it writes it finds that value there from before.
        """
        waves = self.writers | self.readers
        several = (waves & (waves - 1)) != 0
        unchanged = self.before_known & (self.before == self.value)
        unordered = self.mixed | ((self.early != 0) & ~unchanged)
        return bool((several & (self.writers != 0) & unordered).any())


@dataclasses.dataclass
class Witness:
    """An onlooker of launches that runs a kernel in place of the one with a key, and looks at its accesses of LDS.

    stretches: how many were judged. conflicts: in how many of them waves met. refused: why the kernel cannot be looked at.
    """

    key: str
    kernel: machine.Kernel
    stretches: int = 0
    conflicts: int = 0

    def __post_init__(self) -> None:
        rows = self.kernel.encoded.rows
        kinds, flags = rows[:, row.KIND], rows[:, row.FLAGS]
        memory = (kinds == Kind.BUFFER) | (kinds == Kind.GLOBAL)
        hidden = (memory & ((flags & row.TO_LDS) != 0)) | ((kinds == Kind.LDS) & ((flags & row.ATOMIC) != 0))
        self.refused = "loads into LDS and atomics of it are not looked at" if hidden.any() else ""
        self._watched = rows.copy()
        self._watched[kinds == Kind.LDS, row.KIND] = Kind.TRAP
        self._stretch: _Stretch | None = None
        self._at = (-1, -1)

    def __call__(self, launched: Launched, run: Run) -> int:
        """Runs a launch, looking on if it is of the kernel in question."""
        if launched.key != self.key or self.refused:
            return run(launched.kernel, 0)
        with self._watching():
            encoded = dataclasses.replace(self.kernel.encoded, rows=self._watched)
            steps = run(dataclasses.replace(self.kernel, encoded=encoded), 0)
        self._judge()
        return steps

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        whole = core.run_launch

        def stopping(*arguments: Any) -> int:
            named = machine.named_state(arguments)
            numbers = named["run"]
            while True:
                ends = int(whole(*arguments))
                if ends != core.FAULT or numbers[core.FAULT_KIND] != core.TRAPPED:
                    return ends
                wave, at = int(numbers[core.FAULT_WAVE]), int(numbers[core.FAULT_PC])
                self._note(named, wave, self.kernel.encoded.rows[at])
                named["w"][wave, core.PC] = at
                whole_code = arguments[0]._replace(rows=self.kernel.encoded.rows)
                ends = machine.run_one(whole, (whole_code, *arguments[1:]))
                if ends != core.LIMIT:
                    return ends

        with machine.launching(stopping):
            yield

    def _note(self, named: dict[str, Any], wave: int, r: Array) -> None:
        """Puts down an access that is about to happen."""
        at = int(named["run"][core.GROUP]), int(named["run"][core.EPOCH])
        if at != self._at or self._stretch is None:
            self._judge()
            self._at, self._stretch = at, _Stretch(named["lds"], named["lds_known"])
        lanes = _lanes(named["s"][wave])
        size, flags = int(r[row.SIZE]), int(r[row.FLAGS])
        v = named["v"][wave]
        for part in range(2 if flags & row.TWO else 1):
            offset = int(r[row.TARGET] if part else r[row.OFFSET])
            starts = (v[r[row.SRC0], lanes].astype(np.int64) + offset) & 0xFFFFFFFF
            inside = starts + size <= len(named["lds"])
            places = (starts[inside, None] + np.arange(size)).ravel()
            if not flags & row.STORE:
                self._stretch.read(wave, places)
                continue
            first = int(r[row.SRC1] if part else r[row.DST])
            words = v[first : first + max(1, size // 4), lanes[inside]].T.astype("<u4")
            if flags & row.HIGH_HALF:
                words = words >> np.uint32(16)
            self._stretch.write(wave, places, np.ascontiguousarray(words).view(np.uint8)[:, :size].ravel())

    def _judge(self) -> None:
        if self._stretch is not None:
            self.stretches += 1
            self.conflicts += self._stretch.conflicts()
        self._stretch = None


def _lanes(scalars: Array) -> Array:
    """The numbers of the lanes that execute."""
    both = int(scalars[EXEC]) | int(scalars[EXEC + 1]) << 32
    return np.array([lane for lane in range(64) if both >> lane & 1], np.int64)
