"""Did a kernel touch memory that it may not touch, or use memory that nobody gave it?

While ``watch`` is open, kernels on the faithful interpreter are held to three rules. Every unmasked lane of a load, a
store or an atomic lies inside the storage of a tensor argument of that launch. No two programs of a launch store to
the same byte, except atomically: on a GPU the winner would be luck. And a masked lane of a load that names no ``other``
holds poison instead of the zero that a CPU gives and no GPU promises: NaN for floats, garbage for integers.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from impl.executions.interpreter import KernelFault, install
from impl.executions.interpreter_memory import Memory, Segment

Array = np.ndarray[Any, Any]
Program = tuple[int, int, int]

_FNUZ = ("fp8e4b8", "fp8e5b16")
# Behind no segment at all: before every address, those in front of an empty tensor's included.
_NOWHERE = -(1 << 62)
# No process has memory below.
_FIRST_PAGE = 4096
# Elements of one page of the map of writers.
_PAGE = 1 << 16


class MemoryViolation(KernelFault):
    """One lane of one program broke a rule; ``str`` is the whole story in one sentence.

    ``kind`` is ``out-of-bounds load``, ``out-of-bounds store``, ``out-of-bounds atomic`` or ``write race``; ``lane`` is
    the lane's index in its block; ``offset`` counts bytes from the start of the nearest argument, ``argument``.
    """

    def __init__(
        self, kind: str, kernel: str, program: Program, lane: tuple[int, ...], address: int, argument: str,
        offset: int, detail: str,
    ) -> None:  # fmt: skip
        super().__init__(f"{kind} in {kernel}, program {program}, lane {lane}: {detail}")
        self.kind = kind
        self.kernel = kernel
        self.program = program
        self.lane = lane
        self.address = address
        self.argument = argument
        self.offset = offset


class _Writers:
    """Which program wrote what of one segment in this launch; programs count from 1.

    Kept page by page, so that a launch that writes little of a vast segment costs little.
    """

    def __init__(self, segment: Segment, grain: int) -> None:
        self.low = segment.low
        self.grain = grain
        self.pages: dict[int, Array] = {}

    def claim(self, addresses: Array, width: int, program: int) -> Array:
        """For each address the other program that wrote there before, or 0; now they all belong to ``program``."""
        offsets = addresses - self.low
        if self.grain > 1 and (width != self.grain or np.any(offsets % self.grain)):
            # Elements of another size or alignment: from here on every byte is watched by itself.
            self._refine()
        places = offsets // width if self.grain == width else offsets[:, None] + np.arange(width)
        before = self._swap(places, program)
        before[before == program] = 0
        return before if before.ndim == 1 else np.asarray(before.max(axis=1))

    def _refine(self) -> None:
        pages, grain, self.pages, self.grain = self.pages, self.grain, {}, 1
        for number, page in pages.items():
            for part, finer in enumerate(np.split(np.repeat(page, grain), grain)):
                self.pages[number * grain + part] = finer

    def _swap(self, places: Array, program: int) -> Array:
        if not places.size:
            return np.zeros(places.shape, np.int32)
        first, last = int(places.min()) // _PAGE, int(places.max()) // _PAGE
        if first == last:
            return self._swap_in(first, places - first * _PAGE, program)
        before = np.zeros(places.shape, np.int32)
        numbers = places // _PAGE
        for number in np.unique(numbers).tolist():
            here = numbers == number
            before[here] = self._swap_in(number, places[here] - number * _PAGE, program)
        return before

    def _swap_in(self, number: int, places: Array, program: int) -> Array:
        page = self.pages.get(number)
        if page is None:
            page = self.pages[number] = np.zeros(_PAGE, np.int32)
        before: Array = page[places]
        page[places] = program
        return before


class _Launch:
    """One launch under watch."""

    def __init__(self, kernel: str, memory: Memory, grid: Program) -> None:
        self.kernel = kernel
        self.memory = memory
        self.grid = grid
        self.writers: dict[int, _Writers] = {}

    def writers_of(self, segment: Segment, width: int) -> _Writers:
        found = self.writers.get(segment.low)
        if found is None:
            found = self.writers[segment.low] = _Writers(segment, width)
        return found

    def number(self, program: Program) -> int:
        x, y, z = program
        return 1 + (x * self.grid[1] + y) * self.grid[2] + z

    def program(self, number: int) -> Program:
        rest, z = divmod(number - 1, self.grid[2])
        x, y = divmod(rest, self.grid[1])
        return (x, y, z)

    def nearest(self, address: int, width: int) -> tuple[Segment | None, str]:
        """The segment closest to a forbidden access, and where the access lies from there."""

        def distance(segment: Segment) -> int:
            return max(segment.low - address, address + width - segment.high)

        if not self.memory.segments:
            return None, "the launch has no tensor argument"
        segment = min(self.memory.segments, key=distance)
        if address < _FIRST_PAGE:
            return segment, f"address {address} is near null, where an argument without elements points"
        if address < segment.low:
            return segment, f"{_bytes(segment.low - address)} before the start of argument {segment.name}"
        return segment, f"{_bytes(address + width - segment.high)} past the end of argument {segment.name}"


def _bytes(count: int) -> str:
    return f"{count} byte" if count == 1 else f"{count} bytes"


class _Watch:
    """Looks on for the interpreter, which tells it of launches and of accesses before they happen."""

    def __init__(self, races: bool, poison: bool) -> None:
        self.races = races
        self.poisons = poison
        self.launches: list[_Launch] = []

    def begin(self, kernel: str, memory: Memory, grid: Program) -> None:
        self.launches.append(_Launch(kernel, memory, grid))

    def end(self) -> None:
        self.launches.pop()

    def scattered(self, what: str, addresses: Array, mask: Array | None, width: int, program: Program) -> None:
        launch = self.launches[-1]
        chosen = addresses.reshape(-1) if mask is None else addresses[mask]
        highs = np.array([_NOWHERE, *(segment.high for segment in launch.memory.segments)], np.int64)
        at = np.searchsorted(np.array(launch.memory.lows, np.int64), chosen, side="right")
        outside = chosen > highs[at] - width
        if not outside.any():
            return
        first = int(np.flatnonzero(outside)[0])
        address = int(chosen[first])
        near, where = launch.nearest(address, width)
        name, start = (near.name, near.start) if near is not None else ("", 0)
        lane = _lane(addresses, mask, first)
        raise MemoryViolation(
            f"out-of-bounds {what}", launch.kernel, program, lane, address, name, address - start, where
        )

    def stored(
        self, segment: Segment | None, addresses: Array, mask: Array | None, width: int, program: Program
    ) -> None:
        if not self.races:
            return
        launch = self.launches[-1]
        chosen = addresses.reshape(-1) if mask is None else addresses[mask]
        number = launch.number(program)
        if segment is not None:
            foreign = launch.writers_of(segment, width).claim(chosen, width, number)
        else:
            foreign = np.zeros(chosen.size, np.int32)
            for each in launch.memory.segments:
                here = (chosen >= each.low) & (chosen < each.high)
                if here.any():
                    foreign[here] = launch.writers_of(each, width).claim(chosen[here], width, number)
        if foreign.any():
            first = int(np.flatnonzero(foreign)[0])
            self._race(_lane(addresses, mask, first), int(chosen[first]), launch.program(int(foreign[first])), program)

    def _race(self, lane: tuple[int, ...], address: int, earlier: Program, program: Program) -> None:
        launch = self.launches[-1]
        segment = launch.memory.at(address)
        assert segment is not None
        offset = address - segment.start
        detail = f"byte {offset} of argument {segment.name} was already written by program {earlier}"
        raise MemoryViolation("write race", launch.kernel, program, lane, address, segment.name, offset, detail)

    def poison(self, stored: np.dtype[Any], element: str) -> Any:
        if not self.poisons:
            return None
        if stored.kind == "f":
            return stored.type(np.nan)
        if stored.kind == "b":
            return np.True_
        if element in _FNUZ:
            return np.uint8(0x80)
        # All ones is NaN in bf16 and in the other fp8 formats. As an integer it would be -1, which kernels use as a
        # marker and so tolerate.
        pattern = 0xFF if element == "bf16" or element.startswith("fp8") else 0xA5
        return np.full(stored.itemsize, pattern, np.uint8).view(stored)[0]


def _lane(addresses: Array, mask: Array | None, chosen: int) -> tuple[int, ...]:
    """The index in its block of the ``chosen``-th lane that the mask lets through."""
    flat = chosen if mask is None else int(np.flatnonzero(mask)[chosen])
    return tuple(int(i) for i in np.unravel_index(flat, addresses.shape))


@contextlib.contextmanager
def watch(races: bool = True, poison: bool = True) -> Iterator[None]:
    """While open, a kernel that breaks a memory rule raises MemoryViolation before the access happens.

    ``races=False`` lets programs overwrite each other; ``poison=False`` leaves masked lanes at zero.
    """
    install()
    builder = importlib.import_module("impl.executions.interpreter_language").BUILDER
    before, builder.watch = builder.watch, _Watch(races, poison)
    try:
        yield
    finally:
        builder.watch = before
