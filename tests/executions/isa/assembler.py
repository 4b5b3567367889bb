"""Does LLVM's assembler take a line for an architecture? The one inside Triton is asked."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """LLVM writes its complaints to the process's own standard error."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@functools.cache
def _assembler() -> Any:
    """Triton's function, whose arguments differ between versions."""
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    if "arg3" in (amd.assemble_amdgcn.__doc__ or "arg3"):
        return lambda text, arch: amd.assemble_amdgcn(text, "amdgcn-amd-amdhsa", arch, "")
    return lambda text, arch: amd.assemble_amdgcn(text, arch, "")


@functools.cache
def accepts(arch: str, line: str) -> bool:
    """Whether the line is an instruction of the architecture."""
    with _silence():
        try:
            return bool(_assembler()(line + "\n", arch))
        except RuntimeError:
            return False
