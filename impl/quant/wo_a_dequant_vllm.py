"""How does vLLM itself make and keep an output projection's bfloat16 weight?

A plain object stands for the module. One function of theirs is replaced, the one that asks whether the module's scheme is
Quark's per-block one: that class cannot be had without vLLM's whole parameter machinery.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import torch

from cases.quant.wo_a_dequant import Inputs, Outputs
from impl.quant.wo_a_dequant import (
    VLLM_BYTES_FUNCTION,
    VLLM_BYTES_MODULE,
    VLLM_FUNCTION,
    VLLM_SCALE_FUNCTION,
    VLLM_SCALE_MODULE,
    bytes_missing,
)
from impl.quant.wo_a_dequant_call import Module, Shape, three_calls
from impl.sources import vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader


def run(inputs: Inputs) -> Outputs:
    """The three calls; they raise what they raise."""
    loader = vllm_loader("gfx950", inputs.changed.device)
    function = loader.symbol(VLLM_MODULE, VLLM_FUNCTION)
    standing_in: dict[int, types.SimpleNamespace] = {}

    def weight_of(module: Module, shape: Shape) -> torch.Tensor:
        theirs = standing_in.setdefault(id(module), types.SimpleNamespace())
        described = stand_in(module)
        vars(theirs).update(vars(described))
        weight: torch.Tensor = function(theirs, *shape)
        return weight

    # Its layer for DeepSeek V4 has the bytes, an older tree may not.
    bytes_of = None if bytes_missing() else loader.symbol(VLLM_BYTES_MODULE, VLLM_BYTES_FUNCTION)
    with known_schemes(loader):
        return three_calls(inputs, weight_of, bytes_of)


def stand_in(module: Module) -> types.SimpleNamespace:
    """An object with the parameters that a module has; those that are absent are no attributes."""
    given = {"weight_scale_inv": module.weight_scale_inv, "weight_scale": module.weight_scale}
    present = {name: scale for name, scale in given.items() if scale is not None}
    return types.SimpleNamespace(weight=module.weight, per_block_scheme=module.per_block_scheme, **present)


@contextlib.contextmanager
def known_schemes(loader: vllm.Loader) -> Iterator[None]:
    """For the duration of a `with`, the scheme of a stand-in is what it says."""

    def block_scale(layer: types.SimpleNamespace) -> torch.Tensor | None:
        name = "weight_scale" if layer.per_block_scheme else "weight_scale_inv"
        scale: torch.Tensor | None = getattr(layer, name, None)
        return scale

    with loader.replaced(VLLM_SCALE_MODULE, VLLM_SCALE_FUNCTION, block_scale):
        yield
