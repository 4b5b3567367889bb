"""What lies round and between the elements that a kernel may touch?

Tensors are views into larger storages. Guard bytes stand before, after and between the elements, filled with what hurts
most when it is read by mistake; after the run every byte outside an output's elements must still be what it was.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

GUARD_BYTES = 256
# 0xFF bytes are NaN in bf16, fp16, fp32 and OCP e4m3. Integers get a value that is no valid index, row or length.
_FLOAT_POISON = 0xFF
INTEGER_POISON = 0x7B

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
    extent = step * dtype.itemsize
    storage = torch.full((lead + extent + GUARD_BYTES,), fill, dtype=torch.uint8)
    return as_view(storage, dtype, shape, strides, lead)


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


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind `tensor` as flat uint8, guard bytes included; no copy."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def owned_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """bool over the storage of `tensor`: True at the bytes of its elements."""
    owned = torch.zeros(storage_bytes(tensor).numel(), dtype=torch.bool)
    size = tensor.element_size()
    owned.as_strided(
        (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1), tensor.storage_offset() * size
    ).fill_(True)
    return owned


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The same view of a fresh copy of the whole storage on `device`: guards, gaps and strides travel along."""
    flat = storage_bytes(tensor).to(device, copy=True)
    return as_view(
        flat, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()) * tensor.element_size()
    )


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


def trespasses(before: object, after: object, writable: Sequence[str]) -> list[str]:
    """One sentence for every tensor of the inputs that the run changed where it may not.

    `before` and `after` are the inputs built from the same case, `after` having been handed to the suspect. Tensors
    whose path is in `writable` may change at their elements only, all others nowhere.
    """
    sentences = []
    for (path, old), (_, new) in zip(named_tensors(before), named_tensors(after), strict=True):
        old_bytes, new_bytes = storage_bytes(old), storage_bytes(new).cpu()
        changed = old_bytes != new_bytes
        if path in writable:
            changed &= ~owned_bytes(old)
        spots = changed.nonzero()
        if spots.numel():
            first = int(spots[0]) - old.storage_offset() * old.element_size()
            where = "outside its elements" if path in writable else "though it is an input"
            sentences.append(
                f"{path}: {spots.numel()} bytes were written {where}, the first at byte {first} from its first element"
            )
    return sentences
