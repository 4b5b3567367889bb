"""Which machine is loaded code told that it runs on, and does this process decorate its kernels for where they shall run?"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from impl.sources.package import Source
from impl.sources.source_tree import SourceError

Architecture = Literal["gfx942", "gfx950", "other"]

# What a value of the compiled-in architecture name looks like where no tuned path exists.
_NAMES = {"gfx942": "gfx942", "gfx950": "gfx950", "other": "gfx90a"}
_COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256, "other": 256}


_machine = ""


def execute_as(execution: str) -> None:
    """From now on kernels that are given tensors on the CPU run as machine code on this execution, `isa:gfx942` for one."""
    global _machine
    _machine = execution


def execution_on(device: torch.device) -> str:
    """Where kernels run that are given tensors on a device of this process."""
    if device.type == "cpu":
        return _machine or "interpreter"
    return "hip" if torch.version.hip is not None else "cuda"


@dataclass(frozen=True)
class Platform:
    """The machine that loaded code is told it runs on: always ROCm, whatever it really runs on.

    `other` is an architecture without kernels of its own, so that code takes its general path; it answers as gfx90a.
    `compute_units` 0 means as many as the architecture's production part has (304 for gfx942, otherwise 256).
    """

    arch: Architecture
    compute_units: int = 0

    def __post_init__(self) -> None:
        if self.arch not in _NAMES:
            raise ValueError(f"arch={self.arch!r}: should be one of {', '.join(_NAMES)}")
        if self.compute_units < 0:
            raise ValueError(f"compute_units={self.compute_units}: should be positive, or 0 for the architecture's own")
        if self.compute_units == 0:
            object.__setattr__(self, "compute_units", _COMPUTE_UNITS[self.arch])

    @property
    def name(self) -> str:
        """The architecture as its driver spells it."""
        return _NAMES[self.arch]

    @property
    def fnuz(self) -> bool:
        """Whether the platform's own FP8 is FNUZ (bias 8, no infinities, no negative zero) rather than OCP."""
        return self.arch == "gfx942"

    @property
    def needs_fnuz(self) -> bool:
        """Whether kernels loaded for the platform may compute with FNUZ types, which NVIDIA devices do not have."""
        return self.fnuz


class Logger:
    """Swallows log lines. It answers no question, so nothing can depend on it."""

    def _swallow(self, *_args: object, **_kwargs: object) -> None:
        pass

    debug = info = warning = error = exception = critical = _swallow
    debug_once = info_once = warning_once = error_once = _swallow


def namespace(source: Source, platform: Platform, execution: str) -> str:
    """The package name under which what is loaded for a platform and an execution stands, apart from everything else."""
    tag = hashlib.sha256(str(source.root).encode()).hexdigest()[:8]
    return f"mla_oracle_sources.{tag}.{platform.arch}_{platform.compute_units}_{execution.replace(':', '_')}"


def refuse_mismatch(execution: str) -> None:
    """Raises `SourceError` if kernels decorated now would not run on an execution.

    That is if Triton's interpreter is on without being asked for, or asked for without being on: Triton decides when a
    kernel is decorated, from TRITON_INTERPRET.
    """
    wrong = _mismatch(execution)
    if wrong is not None:
        raise SourceError(wrong)


def _mismatch(execution: str) -> str | None:
    """The sentence that says why kernels decorated now would not run on an execution, or None."""
    asked = execution == "interpreter"
    is_set = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if asked and not is_set:
        return "execution=interpreter: TRITON_INTERPRET=1 should be in the environment before triton is imported"
    if not asked and is_set:
        return f"execution={execution}: TRITON_INTERPRET should not be set, it makes every kernel an interpreted one"
    # Triton's own library functions are kernels, decorated when triton was imported.
    library = sys.modules.get("triton.language.standard")
    if library is not None and (type(library.cdiv).__name__ == "InterpretedFunction") != asked:
        state = "without" if asked else "with"
        return f"execution={execution}: this process imported triton {state} TRITON_INTERPRET=1; use another process"
    return None
