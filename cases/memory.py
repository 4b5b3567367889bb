"""What lies round and between the elements that a kernel may touch?

Tensors are views into larger storages. Guard bytes stand before, after and between the elements, filled with what hurts
most when it is read by mistake; after the run every byte outside an output's elements must still be what it was.

A storage may be vast: rows so far apart that offsets pass 2^31 (`far_gap`). Its pages are reserved, not filled; only the
rows and the guard bytes next to them are poisoned, copied and looked at.
"""

import contextlib
import dataclasses
import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

GUARD_BYTES = 256
# 0xFF bytes are NaN in bf16, fp16, fp32 and OCP e4m3. Integers get a value that is no valid index, row or length.
_FLOAT_POISON = 0xFF
INTEGER_POISON = 0x7B
# From this size on a storage is reserved address space, most of which is never touched.
VAST_BYTES = 1 << 30
_APART_BYTES = 1 << 20
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

T = TypeVar("T")


def poison_byte(dtype: torch.dtype) -> int:
    """The byte that fills memory of `dtype` which nobody may read: NaN, or a huge integer."""
    if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        return 0x80
    return _FLOAT_POISON if dtype.is_floating_point else INTEGER_POISON


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    gaps: Sequence[int] = (),
    fill: int | None = None,
    lead: int = GUARD_BYTES,
) -> torch.Tensor:
    """A poisoned CPU tensor inside a larger poisoned storage.

    `gaps` are unused elements after each run of a dimension, outermost first, for all dimensions but the last (whose
    stride is 1): `gaps=(8, 0)` on [T, H, D] leaves 8 elements after every row t. `lead` bytes stand in front, so that
    an odd base address can be asked for (a multiple of the item size).
    """
    if lead % dtype.itemsize:
        raise ValueError(f"lead={lead}: should be a multiple of {dtype.itemsize}, the size of {dtype}")
    fill = poison_byte(dtype) if fill is None else fill
    strides: list[int] = []
    step = 1
    padded = [*gaps, *([0] * (len(shape) - 1 - len(gaps)))]
    for position in range(len(shape) - 1, -1, -1):
        strides.insert(0, step)
        gap = padded[position - 1] if position > 0 else 0
        step = step * max(1, shape[position]) + gap
    size = lead + step * dtype.itemsize + GUARD_BYTES
    if size <= VAST_BYTES:
        storage = torch.full((size,), fill, dtype=torch.uint8)
        return as_view(storage, dtype, shape, strides, lead)
    storage = _reserved(size)
    view = as_view(storage, dtype, shape, strides, lead)
    for island in _islands(view):
        storage[island.low : island.high] = fill
    return view


def far_gap(rows: int, row_elements: int, limit: int = 1 << 31) -> int:
    """Unused elements after each of `rows` rows, so that the last row starts `limit` elements or more behind the first.

    The pitch itself stays below `limit`: a kernel is handed a 32-bit stride, and only its product with the row number
    needs more. Raises ValueError for fewer than three rows, whose pitch would not.
    """
    if rows < 3:
        raise ValueError(f"rows={rows}: should be 3 or more, so that the pitch stays below {limit}")
    pitch = -(-limit // (rows - 1))
    return -(-pitch // 64) * 64 - row_elements


def is_vast(tensor: torch.Tensor) -> bool:
    """Whether the storage behind `tensor` is mostly untouched address space."""
    return bool(tensor.untyped_storage().nbytes() > VAST_BYTES)


@dataclasses.dataclass(frozen=True)
class _Island:
    """A run of a vast storage that is in use: bytes `low` to `high`, guards included; the elements start at `start`."""

    low: int
    high: int
    start: int


def _reserved(size: int) -> torch.Tensor:
    """Flat uint8 zeros that cost memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def _near(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Dimensions whose elements lie far apart, and the others."""
    apart = [d for d in range(tensor.ndim) if tensor.stride(d) * tensor.element_size() >= _APART_BYTES]
    return apart, [d for d in range(tensor.ndim) if d not in apart]


def _islands(tensor: torch.Tensor) -> list[_Island]:
    """The parts of a vast storage that hold elements of `tensor`, with the guard bytes next to them."""
    size = tensor.element_size()
    apart, near = _near(tensor)
    extent = (1 + sum((tensor.shape[d] - 1) * tensor.stride(d) for d in near)) * size if tensor.numel() else 0
    total = tensor.untyped_storage().nbytes()
    found = []
    for index in itertools.product(*(range(tensor.shape[d]) for d in apart)):
        away = sum(i * tensor.stride(d) for i, d in zip(index, apart, strict=True))
        start = (int(tensor.storage_offset()) + away) * size
        found.append(_Island(max(0, start - GUARD_BYTES), min(total, start + extent + GUARD_BYTES), start))
    found.sort(key=lambda island: island.low)
    if any(one.high > two.low for one, two in itertools.pairwise(found)):
        raise ValueError(
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()}: rows of a vast tensor must not touch"
        )
    return found


def as_view(
    storage: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], byte_offset: int
) -> torch.Tensor:
    """The typed strided view of a flat uint8 tensor that starts `byte_offset` bytes in."""
    usable = (storage.numel() // dtype.itemsize) * dtype.itemsize
    typed = storage[:usable].view(dtype)
    return typed.as_strided(tuple(shape), tuple(strides), byte_offset // dtype.itemsize)


def guarded_copy(
    tensor: torch.Tensor, *, gaps: Sequence[int] = (), fill: int | None = None, lead: int = GUARD_BYTES
) -> torch.Tensor:
    """The same values in a guarded storage of their own."""
    view = guarded(tensor.shape, tensor.dtype, gaps=gaps, fill=fill, lead=lead)
    view.copy_(tensor)
    return view


def with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` after each of its NaN became the same one, in place: which NaN a conversion gives depends on the processor."""
    tensor[torch.isnan(tensor)] = torch.full((), float("nan"), dtype=tensor.dtype)
    return tensor


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind `tensor` as flat uint8, guard bytes included; no copy."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements of `tensor` in their order, flat uint8; a copy."""
    # `contiguous` hands back what has one element or none as it is, whatever its strides.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def owned_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """bool over the storage of `tensor`: True at the bytes of its elements."""
    return _owned(tensor, list(range(tensor.ndim)), storage_bytes(tensor).numel(), int(tensor.storage_offset()))


def _owned(tensor: torch.Tensor, dimensions: Sequence[int], count: int, offset: int) -> torch.Tensor:
    """bool over `count` bytes: True at the elements along `dimensions` whose first one is number `offset`."""
    owned = torch.zeros(count, dtype=torch.bool)
    size = tensor.element_size()
    shape = [tensor.shape[d] for d in dimensions]
    strides = [tensor.stride(d) * size for d in dimensions]
    owned.as_strided((*shape, size), (*strides, 1), offset * size).fill_(True)
    return owned


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The same view of a fresh copy of the whole storage on `device`: guards, gaps and strides travel along."""
    vast = is_vast(tensor)
    flat = _moved_islands(tensor, torch.device(device)) if vast else storage_bytes(tensor).to(device, copy=True)
    return as_view(
        flat, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()) * tensor.element_size()
    )


def _moved_islands(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    old = storage_bytes(tensor)
    if device.type == "cpu":
        new = _reserved(old.numel())
    else:
        new = torch.full((old.numel(),), poison_byte(tensor.dtype), dtype=torch.uint8, device=device)
    for island in _islands(tensor):
        new[island.low : island.high] = old[island.low : island.high].to(device)
    return new


def map_tensors(value: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """`value` with every tensor in it replaced; dataclasses and tuples are walked, shared tensors stay shared."""
    seen: dict[int, torch.Tensor] = {}

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in seen:
                seen[id(item)] = change(item)
            return seen[id(item)]
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.replace(
                item,
                **{field.name: walk(getattr(item, field.name)) for field in dataclasses.fields(item) if field.init},
            )
        if isinstance(item, tuple):
            return tuple(walk(part) for part in item)
        return item

    return walk(value)  # type: ignore[no-any-return]


def named_tensors(value: object, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a dataclass with its path, `main.cache`, in field order."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
    elif isinstance(value, tuple):
        for position, part in enumerate(value):
            yield from named_tensors(part, f"{prefix}[{position}]")


def on_device(inputs: T, device: torch.device | str) -> T:
    """A private copy of all inputs on `device`, guard bytes and strides included."""
    return map_tensors(inputs, lambda tensor: moved(tensor, device))


@contextlib.contextmanager
def new_memory_poisoned() -> Iterator[None]:
    """While open, torch's new tensors hold NaN and the largest integers until they are written: what is left out shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def trespasses(before: object, after: object, writable: Sequence[str]) -> list[str]:
    """One sentence for every tensor of the inputs that the run changed where it may not.

    `before` and `after` are the inputs built from the same case, `after` having been handed to the suspect. Tensors
    whose path is in `writable` may change at their elements only, all others nowhere.
    """
    sentences = []
    for (path, old), (_, new) in zip(named_tensors(before), named_tensors(after), strict=True):
        spots = _changed(old, new, elements_too=path not in writable)
        if spots:
            first = spots[0] - old.storage_offset() * old.element_size()
            where = "outside its elements" if path in writable else "though it is an input"
            sentences.append(
                f"{path}: {len(spots)} bytes were written {where}, the first at byte {first} from its first element"
            )
    return sentences


def _changed(old: torch.Tensor, new: torch.Tensor, elements_too: bool) -> list[int]:
    """The bytes of the storage that differ, at elements only where `elements_too`; of a vast one those in use."""
    old_bytes, new_bytes = storage_bytes(old), storage_bytes(new)
    if not is_vast(old):
        changed = old_bytes != new_bytes.cpu()
        if not elements_too:
            changed &= ~owned_bytes(old)
        return [int(spot) for spot in changed.nonzero()]
    found = []
    _, near = _near(old)
    for island in _islands(old):
        changed = old_bytes[island.low : island.high] != new_bytes[island.low : island.high].cpu()
        if not elements_too:
            inner = _owned(old, near, 2 * GUARD_BYTES + island.high - island.start, 0)
            changed[island.start - island.low :] &= ~inner[: island.high - island.start]
        found += [island.low + int(spot) for spot in changed.nonzero()]
    return found
