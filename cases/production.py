"""At which sizes are the ops served, so that what a server would compile can be told without a server's memory?

A served call has the axes of a case and, where a cache is too large to be drawn, more rows of some tensors than the case
would give them. Its inputs are on torch's `meta` device and hold no memory.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from cases import op_module
from cases.case import Case
from cases.memory import GUARD_BYTES, map_tensors, named_tensors

ARCHES: tuple[str, ...] = ("gfx942", "gfx950")
"""What the ops are served on."""


@dataclasses.dataclass(frozen=True)
class Served:
    """One call as a server makes it.

    rows: for the path of a tensor of the inputs, the length that its first dimension has in a server. numbers: fields of
    the inputs that follow from the sizes. arches: where such calls are made; what the case's own axes say wins.
    """

    case: Case
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    arches: tuple[str, ...] = ARCHES

    def is_for(self, arch: str) -> bool:
        """Whether such a call is made on this architecture."""
        settings = self.case.settings
        if settings.get("arch", arch) != arch:
            return False
        return arch in self.arches and (arch == "gfx942" or "float8_e4m3fnuz" not in settings.values())

    @property
    def spelling(self) -> str:
        """The id of the case, and behind it what is larger than there."""
        larger = [f"{path}[0]={count}" for path, count in self.rows.items()]
        larger += [f"{name}={number}" for name, number in self.numbers.items()]
        return f"{self.case.id}{' with ' if larger else ''}{', '.join(larger)}"


def production(op: str) -> tuple[Served, ...]:
    """The calls of an op as they are served; empty for one that names none."""
    found: tuple[Served, ...] = getattr(op_module("cases", op), "PRODUCTION", ())
    return found


def meta_inputs(served: Served, built: Any) -> Any:
    """The inputs of a served call on the `meta` device: shapes, strides and places in storages, and no memory.

    built: the inputs of its case. Raises `ValueError` where `rows` names no tensor of them.
    """
    paths: dict[int, str] = {}
    for path, tensor in named_tensors(built):
        paths.setdefault(id(tensor), path)
    unknown = sorted(set(served.rows) - set(paths.values()))
    if unknown:
        raise ValueError(
            f"{served.case.op}: rows of {unknown[0]}: should name a tensor of the inputs, one of {', '.join(paths.values())}"
        )
    inputs = map_tensors(built, lambda tensor: _meta(tensor, served.rows.get(paths.get(id(tensor), ""))))
    return dataclasses.replace(inputs, **served.numbers) if served.numbers else inputs


def served_bytes(tensor: torch.Tensor, rows: int) -> int:
    """Bytes of the storage that a tensor would lie in if it had so many rows."""
    return _elements(tensor, [rows, *tensor.shape[1:]]) * tensor.element_size()


def _meta(tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    shape = list(tensor.shape) if rows is None else [rows, *tensor.shape[1:]]
    memory = torch.empty(_elements(tensor, shape), dtype=tensor.dtype, device="meta")
    return memory.as_strided(shape, tensor.stride(), tensor.storage_offset())


def _elements(tensor: torch.Tensor, shape: list[int]) -> int:
    """How many elements the storage needs, guard bytes behind the last one included, and no fewer than it has."""
    last = sum((length - 1) * stride for length, stride in zip(shape, tensor.stride(), strict=True))
    used = 0 if not math.prod(shape) else last + 1
    own: int = tensor.untyped_storage().nbytes() // tensor.element_size()
    return max(own, int(tensor.storage_offset()) + used + GUARD_BYTES // tensor.element_size())
