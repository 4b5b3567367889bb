"""What does this Triton's language lack that the kernels of others use, and what stands in for it?

Kernels are written for the Triton of their release. On a device, a missing function is supplied as one written in the
language itself; in the interpreter, which patches Triton's own functions, it is a reason.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from types import ModuleType
from typing import Any


def lacking() -> list[str]:
    """The names that this Triton's `triton.language` lacks or has in a poorer form."""
    language = importlib.import_module("triton.language")
    return [] if "dim" in inspect.signature(language.cat).parameters else ["cat"]


def interpreter_lacks(name: str) -> list[str]:
    """Why a kernel that calls `name` cannot be interpreted here; empty when it can."""
    if importlib.util.find_spec("triton") is None or name not in lacking():
        return []
    return [f"triton {importlib.metadata.version('triton')}: its tl.{name} has no dim, which this kernel asks for"]


def complete() -> ModuleType:
    """`triton.language`, or on a device where it lacks something, a copy of it that has everything."""
    language = importlib.import_module("triton.language")
    if os.environ.get("TRITON_INTERPRET") == "1" or not lacking():
        return language
    supplied: Any = ModuleType(language.__name__, language.__doc__)
    supplied.__dict__.update(language.__dict__)
    supplied.cat = importlib.import_module("impl.sources.triton_cat").cat
    return supplied  # type: ignore[no-any-return]
