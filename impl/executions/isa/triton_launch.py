"""Triton kernels whose launches run as AMD machine code on this CPU, under host wrappers that know nothing of it.

`install` replaces what a launch does in this process, once and for good: the kernel is compiled for the architecture (no GPU is
needed for that), its assembly is executed on the tensors' own memory, and every fault ends the launch with
`impl.executions.isa.machine.MachineFault`. An autotuner takes its first configuration: nothing here can be timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from impl.executions.isa.unsupported import UnsupportedInstruction
from impl.sources.execution import execute_as

if TYPE_CHECKING:
    from impl.executions.isa.machine import Kernel

ARCHITECTURES = ("gfx942", "gfx950")

OPTIONS = "MLA_ORACLE_LAUNCH_OPTIONS"
"""The environment variable whose `num_warps=4,num_stages=1` replaces what launches ask for."""
_REPLACEABLE = ("num_warps", "num_stages")
_WAVES = (1, 2, 4, 8, 16)

Run = Callable[["Kernel", int], int]
"""Runs a program in place of a launch's, with a limit of wave-instructions (0 for the usual one); gives their number."""


@dataclasses.dataclass(frozen=True)
class Launched:
    """A launch about to run: what its compilation is known by, its program, and the waves of a workgroup."""

    key: str
    kernel: Kernel
    waves: int


Onlooker = Callable[[Launched, Run], int]
"""Runs a launch, by what it is given for that."""

_installed: str | None = None
_onlooker: Onlooker | None = None
_named: set[str] | None = None
executed = 0
"""Wave-instructions that this process has executed."""


@contextlib.contextmanager
def looked_on(onlooker: Onlooker) -> Iterator[None]:
    """While open, every launch of this process is the onlooker's to run, as it is or otherwise."""
    global _onlooker
    before, _onlooker = _onlooker, onlooker
    try:
        yield
    finally:
        _onlooker = before


@contextlib.contextmanager
def only_named() -> Iterator[set[str]]:
    """While open, no launch of this process is compiled or run; gives what their compilations are known by."""
    global _named
    before, _named = _named, set()
    try:
        yield _named
    finally:
        _named = before


def launch_options() -> dict[str, int]:
    """What replaces the options of every launch of this process, as `OPTIONS` says. Raises ValueError for what is none."""
    stated = os.environ.get(OPTIONS, "")
    found = {}
    for part in filter(None, stated.split(",")):
        match = re.fullmatch(r"(\w+)=([1-9]\d*)", part)
        if match is None or match[1] not in _REPLACEABLE:
            raise ValueError(
                f"{OPTIONS}={stated}: should be {' or '.join(_REPLACEABLE)}, each with a number, between commas"
            )
        found[match[1]] = int(match[2])
    if found.get("num_warps", 1) not in _WAVES:
        raise ValueError(f"{OPTIONS}={stated}: num_warps should be one of {', '.join(map(str, _WAVES))}")
    return found


def installed() -> str | None:
    """The architecture as which this process runs Triton kernels, or None."""
    return _installed


def unsupported(arch: str) -> list[str]:
    """Every reason why kernels cannot be executed as machine code here; empty if `install` will do or has done."""
    reasons = []
    if arch not in ARCHITECTURES:
        reasons.append(f"{arch}: machine code is executed of {' and '.join(ARCHITECTURES)}")
    if importlib.util.find_spec("numba") is None:
        reasons.append("numba is not installed: the executor of machine code needs it (the extra `isa`)")
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed")
        return reasons
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y"):
        reasons.append("TRITON_INTERPRET is set: kernels are decorated for the interpreter, not for the compiler")
    if _installed is not None and arch != _installed:
        reasons.append(f"this process executes {_installed} already")
    try:
        launch_options()
    except ValueError as error:
        reasons.append(str(error))
    if not reasons and not _has_backend():
        reasons.append("this triton has no AMD backend")
    return reasons


@functools.cache
def _has_backend() -> bool:
    # Looked for, not imported: whoever only asks what is possible here needs no kernel language.
    found = importlib.util.find_spec("triton")
    places = (found.submodule_search_locations or ()) if found is not None else ()
    return any(Path(place, "backends", "amd").is_dir() for place in places)


def install(arch: str) -> None:
    """Let every launch of this process run as `arch` machine code. Raises RuntimeError with every reason of `unsupported`."""
    global _installed
    if _installed == arch:
        return
    reasons = unsupported(arch)
    if reasons:
        raise RuntimeError("; ".join(reasons))
    jit = importlib.import_module("triton.runtime.jit")
    gluon = importlib.import_module("triton.experimental.gluon._runtime")
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:
        if warmup:
            return
        _launch(self, args, grid, keywords, arch)

    def tuned(self: Any, *args: Any, **keywords: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.prune_configs(keywords)[0]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **keywords, **config.all_kwargs()})
        return self.fn.run(*args, **{**keywords, **config.all_kwargs()})

    jit.JITFunction.run = run
    gluon.GluonJITFunction.run = run
    tuner.run = tuned
    execute_as(f"isa:{arch}")
    _installed = arch


_prepared: dict[tuple[Any, ...], tuple[str, Any, Mapping[str, Any]]] = {}


def _launch(function: Any, args: tuple[Any, ...], grid: Any, keywords: Mapping[str, Any], arch: str) -> None:
    global executed
    compiling = importlib.import_module("impl.executions.aot.compile")
    machine = importlib.import_module("impl.executions.isa.machine")
    if not function.is_gluon():
        # A Gluon kernel spells the layout of its waves itself: another number of them is another kernel.
        keywords = {**keywords, **launch_options()}
    launch, bound = compiling.bind_call(function, args, keywords, arch)
    if _named is not None:
        _named.add(compiling.key_of(launch))
        return
    key, kernel, metadata = _kernel(launch)
    values: list[tuple[str, int | float]] = []
    regions: dict[int, int] = {}
    for name, value in bound.items():
        kind = launch.signature[name]
        if kind == "constexpr":
            continue
        for part, written in _flattened(kind, value):
            values.append((part, _passed(part, written, regions)))
    sizes = grid(bound) if callable(grid) else grid
    whole = tuple(int(size) for size in sizes) + (1,) * (3 - len(sizes))

    waves, shared = int(metadata["num_warps"]), int(metadata["shared"])

    def run(program: Kernel, limit: int) -> int:
        usual = machine.DEFAULT_LIMIT
        return int(machine.launch(program, values, _apart(regions), whole, waves, shared, limit or usual))

    executed += run(kernel, 0) if _onlooker is None else _onlooker(Launched(key, kernel, waves), run)


def _flattened(kind: Any, value: Any) -> list[tuple[str, Any]]:
    if isinstance(kind, tuple):
        return [
            part
            for inner, item in zip(kind, value, strict=True)
            if inner != "constexpr"
            for part in _flattened(inner, item)
        ]
    return [(str(kind), value)]


def _passed(kind: str, value: Any, regions: dict[int, int]) -> int | float:
    """An argument as the machine takes it; the storage of a tensor becomes memory that may be touched."""
    if not kind.startswith("*"):
        if kind.startswith(("tensordesc", "nvTmaDesc")):
            raise UnsupportedInstruction(f"an argument of type {kind} is not modelled")
        return value if isinstance(value, float) else int(value)
    if value is None:
        return 0
    tensor = value if isinstance(value, torch.Tensor) else value.base
    if tensor.device.type != "cpu":
        raise UnsupportedInstruction(f"an argument lies on {tensor.device}: executed is on the memory of this process")
    storage = tensor.untyped_storage()
    if storage.nbytes():
        regions[storage.data_ptr()] = max(regions.get(storage.data_ptr(), 0), storage.data_ptr() + storage.nbytes())
    return int(value.data_ptr())


def _apart(regions: Mapping[int, int]) -> list[tuple[int, int]]:
    """Storages in the order of their addresses; those that share bytes become one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(regions.items()):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _kernel(launch: Any) -> tuple[str, Any, Mapping[str, Any]]:
    """What a launch's compilation is known by, its program, ready to run, and its metadata.

    Compiled once on this machine, read once in this process.
    """
    where = (launch.function, str(launch.signature), str(launch.constants), str(launch.attributes), str(launch.options))
    if where not in _prepared:
        cache = importlib.import_module("impl.executions.aot.cache")
        assembly = importlib.import_module("impl.executions.isa.assembly")
        machine = importlib.import_module("impl.executions.isa.machine")
        compiled = cache.compiled(launch)
        _prepared[where] = compiled.key, machine.prepare(assembly.read(compiled.assembly)), compiled.metadata
    return _prepared[where]
