"""Which AITER is meant, and how do its Triton kernels and their host code run without AITER being installed or imported?

Importing AITER builds its compiled operators and asks the drivers of the machine. Its Triton modules need neither: they
are loaded name by name, and the machine is a parameter.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

from impl.sources.execution import Logger, Platform, namespace, refuse_mismatch
from impl.sources.package import Package, Source, Stated
from impl.sources.source_tree import MissingNameError, Refusal, SourceError, Substitute, TreeLoader, source_tree

__all__ = [
    "EXECUTIONS",
    "Loader",
    "MissingNameError",
    "Platform",
    "Source",
    "SourceError",
    "load",
    "locate",
    "unsupported",
]

EXECUTIONS = ("interpreter", "isa:gfx942", "isa:gfx950", "aot", "aot:values", "hip")
"""Where loaded kernels may run; `aot` compiles launches that were captured on meta tensors, `aot:values` on CPU ones.

Their launches carry options of Triton's AMD backend, which another device refuses."""


def _stated(path: Path) -> Stated:
    """The version that AITER's generated version file states; it is read, not executed."""
    text = path.read_text("utf-8") if path.is_file() else ""
    stated = re.search(r"^(?:__version__|version)\b.*?= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return stated[1] if stated else None, None


# PyPI has another package of this name, for asynchronous iterators; it has no kernels.
PACKAGE = Package(
    name="aiter", title="AITER", article="an", sources="ops/triton", distributions="(?:amd_)?aiter", stated=_stated
)
locate = PACKAGE.locate
unsupported = PACKAGE.unsupported


@functools.cache
def load(source: Source, platform: Platform, execution: str) -> Loader:
    """The loader of a tree for a platform and an execution; the same arguments give the same loader.

    Raises `SourceError` if Triton's interpreter is on without being asked for, or asked for without being on: Triton
    decides when a kernel is decorated, from TRITON_INTERPRET.
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution={execution!r}: should be one of {', '.join(EXECUTIONS)}")
    refuse_mismatch(execution)
    return Loader(source, platform, execution)


class Loader(TreeLoader):
    """Loads AITER's functions and kernels for one platform and one execution.

    `dropped_guards` lists the device assertions left out (never on `hip`), `loaded_modules` the modules that anything
    came from.
    """

    def __init__(self, source: Source, platform: Platform, execution: str) -> None:
        self.source = source
        self.platform = platform
        self.execution = execution
        super().__init__(
            source_tree(source.root, "aiter"),
            namespace(source, platform, execution),
            _substitutes(platform),
            drop_guards=execution != "hip",
        )


def _substitutes(platform: Platform) -> dict[str, Substitute]:
    """Everything that loaded code is given instead of AITER's own, each with the reason why AITER's own will not do."""
    asks = "the platform is a parameter; AITER's own asks the drivers of this machine"
    answers: dict[str, tuple[Callable[[], object], str]] = {
        "get_arch": (lambda: lambda: platform.name, asks),
        "_CACHED_ARCH": (lambda: platform.name, asks),
        "get_gfx": (lambda: lambda: platform.name, asks),
        "get_num_sms": (lambda: lambda: platform.compute_units, asks),
        "get_cu_num": (lambda: lambda: platform.compute_units, asks),
        "AiterTritonLogger": (lambda: Logger, "its level comes from the environment of this process"),
        "logger": (Logger, "AITER's logging is set up when the package is imported"),
    }
    compiled = "it builds and loads AITER's compiled operators"
    table = {name: Substitute(make, reason) for name, (make, reason) in answers.items()}
    for name in ("compile_ops", "get_module", "build_module"):
        table[name] = Substitute(functools.partial(Refusal, name, compiled), compiled)
    return table
