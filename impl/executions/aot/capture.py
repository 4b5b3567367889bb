"""Which kernels does a host wrapper launch, and with what, when it is called as a server calls it?

The wrapper runs, its launches do not: each is bound for an architecture and kept. Inputs lie on the `meta` device, so
that sizes are a server's and hold no memory. Where a wrapper reads values (a length on which a grid depends, a check),
the same call is made once more with the small values of the case, whose pointers are said to reach as far as a server's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch

from cases import op_module
from cases.case import Case
from cases.memory import named_tensors, on_device
from cases.production import Served, meta_inputs, served_bytes
from impl.executions.aot.compile import Launch, bind
from impl.implementation import Impl
from impl.sources import aiter, vllm
from impl.sources.execution import Platform
from impl.sources.source_tree import SourceError

Kind = Literal["meta", "values"]


@dataclass(frozen=True)
class Captured:
    """The launches of one call, in their order, and whether its inputs were `meta` or had values."""

    launches: tuple[Launch, ...]
    inputs: Kind
    why: str = ""


class NotCaptured(Exception):
    """A wrapper that raised even where its inputs have values; the message is one sentence."""


class _Large:
    """Stands for a tensor whose storage is as large as a server's: Triton asks how far a pointer reaches."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.dtype = tensor.dtype

    def data_ptr(self) -> int:
        """The address, for its alignment."""
        return int(self._tensor.data_ptr())

    def ptr_range(self) -> int:
        """Bytes behind the first of the storage that offsets may reach."""
        return 1 << 32


@dataclass
class _Recorder:
    arch: str
    large: frozenset[int] = frozenset()
    launches: list[Launch] = field(default_factory=list)

    def launched(self, function: Any, *args: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:
        """Stands for the launch of a JIT function."""
        del grid, warmup
        served = {name: self._as_served(value) for name, value in keywords.items()}
        self.launches.append(bind(function, tuple(map(self._as_served, args)), served, self.arch))

    def _as_served(self, value: Any) -> Any:
        if self.large and isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.large:
            return _Large(value)
        return value

    def tuned(self, tuner: Any, *args: Any, **keywords: Any) -> None:
        """Stands for an autotuner: every configuration is launched once, none is timed."""
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(keywords):
            tuner.fn.run(*args, **{**keywords, **config.all_kwargs()})


@contextlib.contextmanager
def recording(arch: str, large: frozenset[int] = frozenset()) -> Iterator[list[Launch]]:
    """While open, launches of JIT functions are bound for `arch` and listed; none runs.

    large: addresses of storages that reach further than 32 bits where the call is served.
    """
    recorder = _Recorder(arch, large)
    jit = importlib.import_module("triton.runtime.jit")
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    with (
        mock.patch.object(jit.JITFunction, "run", _method(recorder.launched)),
        mock.patch.object(tuner, "run", _method(recorder.tuned)),
    ):
        yield recorder.launches


def reasons(impl: Impl, served: Served, arch: str) -> list[str]:
    """Why an implementation cannot be asked a served call on an architecture, as if this machine had it."""
    with _machine_of(arch):
        try:
            return impl.unsupported(served.case, "hip")
        except SourceError as error:
            # A tree that is not there, or not what it should be.
            return [str(error)]


def capture(impl: Impl, served: Served, arch: str) -> Captured:
    """What an implementation launches for a served call on an architecture; raises `NotCaptured`."""
    why = "without values it launches nothing"
    try:
        launches = _launches(impl, served, arch, "meta")
        if launches:
            return Captured(launches, "meta")
    except (Exception, SystemExit) as error:
        # Torch has no one exception for "this needs a value": whatever it was, a call with values tells.
        why = _sentence(error)
    try:
        return Captured(_launches(impl, served, arch, "values"), "values", why)
    except (Exception, SystemExit) as error:
        raise NotCaptured(_sentence(error)) from error


def _launches(impl: Impl, served: Served, arch: str, kind: Kind) -> tuple[Launch, ...]:
    large: frozenset[int] = frozenset()
    if kind == "meta":
        inputs = meta_inputs(served, _built(served.case))
    else:
        inputs = on_device(_built(served.case), "cpu")
        large = frozenset(
            tensor.untyped_storage().data_ptr()
            for path, tensor in named_tensors(inputs)
            if path in served.rows and served_bytes(tensor, served.rows[path]) >= 1 << 31
        )
    with recording(arch, large) as launches, _sources_for(kind), _machine_of(arch), torch.no_grad():
        impl.run(inputs)
    return tuple(launches)


@functools.lru_cache(maxsize=1)
def _built(case: Case) -> object:
    """The inputs of a case; all implementations are asked about it before the next one, and none may change it."""
    built: object = op_module("cases", case.op).build(case)
    return built


@contextlib.contextmanager
def _sources_for(kind: Kind) -> Iterator[None]:
    """While open, other people's kernels are loaded to be compiled, wherever the inputs of a call happen to lie."""

    def loading(module: Any) -> Callable[..., Any]:
        load = module.load

        def for_compilation(source: Any, platform: Any, execution: str) -> Any:
            del execution
            return load(source, platform, "aot" if kind == "meta" else "aot:values")

        return for_compilation

    with mock.patch.object(vllm, "load", loading(vllm)), mock.patch.object(aiter, "load", loading(aiter)):
        yield


@contextlib.contextmanager
def _machine_of(arch: str) -> Iterator[None]:
    """While open, torch tells of a ROCm machine of this architecture, to whoever asks which one it is."""
    properties = types.SimpleNamespace(
        gcnArchName=arch, name=arch, multi_processor_count=Platform("gfx942" if arch == "gfx942" else "gfx950").compute_units
    )  # fmt: skip
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        mock.patch.object(torch.version, "hip", "0.0"),
    ):
        yield


def _method(function: Callable[..., None]) -> Any:
    """A function that stands for a method, its first argument being the object."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **keywords: Any) -> None:
        return function(self, *args, **keywords)

    return method


def _sentence(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said if len(said) <= 300 else said[:297] + '...'}"
