"""Does an answer have the form of its op's outputs: the type, and a tensor in every field that wants one?

Shapes, dtypes and numbers are the judge's to look at. What is asked here is only what it takes for granted.
"""

import dataclasses
import functools
import types
import typing
from typing import Any

import torch

from cases import op_module


def misfit(op: str, outputs: Any) -> str:
    """What is wrong with the form of an answer to `op`, as a sentence; empty when a judge can look at it."""
    wanted = _outputs(op)
    if not isinstance(outputs, wanted):
        return f"run returned {_named(type(outputs))}, but should return {_named(wanted)}"
    for field, hint in _hints(wanted).items():
        wrong = _wrong(getattr(outputs, field), hint)
        if wrong:
            return f"{field}={wrong}"
    return ""


@functools.cache
def _outputs(op: str) -> type:
    """What the reference returns."""
    wanted: type = typing.get_type_hints(op_module("oracle", op).reference)["return"]
    return wanted


@functools.cache
def _hints(outputs: type) -> dict[str, Any]:
    return typing.get_type_hints(outputs)


def _wrong(value: Any, hint: Any) -> str:
    """`list, but should be a tensor`, or nothing."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        found = [_wrong(value, each) for each in typing.get_args(hint)]
        return "" if "" in found else found[0]
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return f"{type(value).__name__}, but should be a tuple"
        return next((wrong for each in value if (wrong := _wrong(each, typing.get_args(hint)[0]))), "")
    if hint is type(None):
        return "" if value is None else f"{type(value).__name__}, but should be None"
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, typing.cast(type, hint)):
            return f"{type(value).__name__}, but should be {_named(typing.cast(type, hint))}"
        inner = _hints(typing.cast(type, hint))
        return next((f"{name}={wrong}" for name in inner if (wrong := _wrong(getattr(value, name), inner[name]))), "")
    if isinstance(value, torch.Tensor) or not (hint is torch.Tensor or hasattr(hint, "array_type")):
        return ""
    return f"{type(value).__name__}, but should be a tensor"


def _named(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
