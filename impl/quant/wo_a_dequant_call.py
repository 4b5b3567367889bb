"""When is an output projection's weight made, what of it must hold, and which scale counts?"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import torch

from cases.quant.wo_a_dequant import Inputs, Outputs, Projection

Shape = tuple[int, int, int]
# From a module's weight, its scale and [groups, rank, width] to the bfloat16 weight.
Dequantise = Callable[[torch.Tensor, torch.Tensor | None, Shape], torch.Tensor]


class Module:
    """A module as a server has it: its parameters can be replaced, and it has an identity."""

    def __init__(self, projection: Projection) -> None:
        self.weight = projection.weight
        self.weight_scale_inv = projection.weight_scale_inv
        self.weight_scale = projection.weight_scale
        self.per_block_scheme = projection.per_block_scheme

    def block_scale(self) -> torch.Tensor | None:
        """The scale by its name, whether or not the weight still needs it."""
        if self.per_block_scheme or self.weight_scale_inv is None:
            return self.weight_scale
        return self.weight_scale_inv


class Kept:
    """The bfloat16 weights made so far; a weight lives as long as its module."""

    def __init__(self, dequantise: Dequantise) -> None:
        self._dequantise = dequantise
        self._weights: weakref.WeakKeyDictionary[Module, torch.Tensor] = weakref.WeakKeyDictionary()

    def weight(self, module: Module, shape: Shape) -> torch.Tensor:
        """The weight of a module, made on the first call; raises `ValueError` or `TypeError`."""
        if module not in self._weights:
            # Beside a weight that is not of one byte it was left behind.
            scale = module.block_scale() if module.weight.element_size() == 1 else None
            check(module.weight, scale, shape)
            self._weights[module] = self._dequantise(module.weight, scale, shape)
        return self._weights[module]


def check(weight: torch.Tensor, scale: torch.Tensor | None, shape: Shape) -> None:
    """Raise for a weight of another shape, and for a scale whose blocks do not divide it or whose dtype is none."""
    groups, rank, width = shape
    if tuple(weight.shape) != (groups * rank, width):
        raise ValueError(f"weight={list(weight.shape)}: should be {[groups * rank, width]}")
    if scale is None:
        return
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8, torch.float32):
        raise TypeError(f"scale={scale.dtype}: should be torch.float8_e8m0fnu, torch.uint8 or torch.float32")
    rows, columns = scale.shape
    if rows % groups or rank % (rows // groups):
        raise ValueError(f"rows of scale={rows}: should be {groups} times a divisor of {rank}")
    if width % columns:
        raise ValueError(f"columns of scale={columns}: should be a divisor of {width}")


def exponent_bytes(scale: torch.Tensor) -> torch.Tensor | None:
    """E8M0 bytes of a scale: those that it consists of, or those of fp32 powers of two; None where one is no such power."""
    if scale.dtype != torch.float32:
        return scale.view(torch.uint8).contiguous()
    bits = scale.view(torch.int32)
    # 2^-127 is a subnormal number; all other powers have an exponent field and no fraction.
    lowest = bits == 0x400000
    normal = (bits & 0x7FFFFF == 0) & (bits > 0) & (bits < 0x7F800000)
    return torch.where(lowest, 0, bits >> 23).to(torch.uint8) if bool((lowest | normal).all()) else None


def three_calls(
    inputs: Inputs,
    weight_of: Callable[[Module, Shape], torch.Tensor],
    bytes_of: Callable[[torch.Tensor], torch.Tensor | None] | None = exponent_bytes,
) -> Outputs:
    """The calls of a case, in order, and the exponent bytes unless nobody says."""
    shape = (inputs.groups, inputs.rank, inputs.width)
    module, other = Module(inputs.module), Module(inputs.other)
    first = weight_of(module, shape)
    scale = module.block_scale()
    module.weight = inputs.changed
    second = weight_of(module, shape)
    answer = Outputs(first, torch.tensor([int(second is first)]), weight_of(other, shape))
    if scale is None or bytes_of is None:
        return answer
    exponents = bytes_of(scale)
    return dataclasses.replace(answer, powers=torch.tensor([int(exponents is not None)]), exponents=exponents)
