"""Where is the memory of a launch, and how are blocks of addresses read and written without a loop over lanes?

Addresses are ``int64``. A block whose lanes all lie in the storage of one tensor argument, which is nearly every block,
is one NumPy gather or scatter in that storage; anything else goes lane by lane through Triton's own memory access.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Segment:
    """The storage behind one argument (and behind others that share it)."""

    __slots__ = ("_views", "high", "low", "name", "start")

    def __init__(self, name: str, start: int, low: int, size: int) -> None:
        self.name = name
        self.start = start
        self.low = low
        self.high = low + size
        self._views: dict[np.dtype[Any], Array] = {}

    def view(self, stored: np.dtype[Any]) -> Array:
        """The whole storage as elements of ``stored``."""
        view = self._views.get(stored)
        if view is None:
            count = (self.high - self.low) // stored.itemsize
            raw = (ctypes.c_uint8 * (count * stored.itemsize)).from_address(self.low)
            view = self._views[stored] = np.frombuffer(memoryview(raw), stored)
        return view

    def places(self, addresses: Array, width: int) -> Array | None:
        """``addresses`` as indices into ``view`` of elements ``width`` bytes wide, or None if one is not aligned."""
        offsets: Array = addresses - self.low
        if width > 1:
            if int(np.bitwise_or.reduce(offsets, axis=None)) & (width - 1):
                return None
            offsets >>= width.bit_length() - 1
        return offsets


class Memory:
    """The storages that one launch may touch."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        found: dict[int, Segment] = {}
        for name, value in arguments.items():
            for tensor in _tensors(value):
                storage = tensor.untyped_storage()
                low, size = storage.data_ptr(), storage.nbytes()
                if size and low not in found:
                    found[low] = Segment(name, tensor.data_ptr(), low, size)
        self.segments = [found[low] for low in sorted(found)]
        self.lows = [segment.low for segment in self.segments]

    def at(self, address: int) -> Segment | None:
        """The segment with the byte at ``address``."""
        index = bisect.bisect_right(self.lows, address) - 1
        return self.segments[index] if index >= 0 and address < self.segments[index].high else None

    def around(self, addresses: Array, width: int) -> Segment | None:
        """The one segment that holds all of ``width`` bytes at each of ``addresses``; there is at least one address."""
        if addresses.size == 1:
            low = high = int(addresses.item())
        else:
            low, high = int(addresses.min()), int(addresses.max())
        segment = self.at(low)
        return segment if segment is not None and high + width <= segment.high else None


def _tensors(value: Any) -> Iterator[Any]:
    """The torch tensors in a launch argument: itself, the base of a wrapper or descriptor, the items of a tuple."""
    if isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "untyped_storage"):
        yield value
    elif hasattr(value, "base"):
        yield from _tensors(value.base)
