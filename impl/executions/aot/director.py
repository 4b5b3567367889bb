"""What captures launches and has them compiled, in a process of its own that has Triton and no interpreter?

`python -m impl.executions.aot.director REQUEST` writes a line of JSON for everything that it begins or finds; the last one
is the whole. Should it die, the line before tells in whose wrapper.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch

from cases.production import Served, production
from impl.executions.aot.cache import load
from impl.executions.aot.capture import NotCaptured, capture, reasons
from impl.executions.aot.compile import Launch, externals, key_of
from impl.executions.aot.pool import Outcome, Pool, kept
from impl.executions.aot.report import Asked, Report, Row, Unasked
from impl.implementation import Impl, implementations
from impl.sources import settings

# Of the backend's options, those that a launch chooses.
_OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "num_ctas", "schedule_hint")
_USUAL = {"waves_per_eu": 0, "matrix_instr_nonkdim": 0, "kpack": 1, "num_ctas": 1, "schedule_hint": ""}
_VALUES = "captured from the small values of the case, because the wrapper reads values"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be compiled: implementations by op, for architectures, in so many processes at a time.

    skip: wrappers, as `op impl`, in which an earlier director died.
    """

    arches: tuple[str, ...]
    impls: tuple[tuple[str, str], ...]
    workers: int
    vllm: str = ""
    aiter: str = ""
    skip: tuple[str, ...] = ()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a director says: what it is about to capture, how far it is, or the whole report."""

    capturing: str = ""
    done: int = 0
    known: int = 0
    report: Report | None = None


@dataclass
class _Kernel:
    launch: Launch
    asked: list[Asked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcome: Outcome | None = None


class Director:
    """Captures one call after another, while earlier launches compile."""

    def __init__(self, request: Request, tell: Callable[[Event], None]) -> None:
        self._request = request
        self._tell = tell
        self._pool = Pool(request.workers)
        self._kernels: dict[str, _Kernel] = {}
        self._unasked: list[Unasked] = []
        self._compiled = 0
        self._is_warm = False

    def run(self) -> Report:
        """Everything captured and compiled."""
        started = time.perf_counter()
        try:
            for op in dict.fromkeys(op for op, _ in self._request.impls):
                self._ask_all(op, [name for other, name in self._request.impls if other == op])
            self._collect(wait=True)
        finally:
            self._pool.close()
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return Report(
            triton=str(importlib.import_module("triton").__version__), torch=str(torch.__version__), vllm=self._request.vllm,
            aiter=self._request.aiter, arches=self._request.arches,
            rows=tuple(_row(key, kernel) for key, kernel in self._kernels.items()), unasked=tuple(self._unasked),
            compiled=self._compiled, seconds=time.perf_counter() - started,
            cpu=own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
        )  # fmt: skip

    def _ask_all(self, op: str, names: Sequence[str]) -> None:
        """Every served call of an op, each of every implementation: what a call's inputs are is then made once."""
        calls, arches = production(op), self._request.arches
        impls = [impl for impl in implementations(op) if impl.name in names]
        if not calls:
            nothing = ("the cases of the op name no call as it is served, PRODUCTION",)
            self._unasked += [
                Unasked(op=op, impl=impl.name, arch=" ".join(arches), call="", reasons=nothing, broke=True)
                for impl in impls
            ]
        for served in calls:
            for impl in impls:
                self._tell(Event(capturing=f"{op} {impl.name}", done=self._compiled, known=len(self._kernels)))
                for arch in arches:
                    if served.is_for(arch):
                        self._ask(op, impl, served, arch)
                self._collect(wait=False)

    def _ask(self, op: str, impl: Impl, served: Served, arch: str) -> None:
        if f"{op} {impl.name}" in self._request.skip:
            return
        try:
            why_not = reasons(impl, served, arch)
        except Exception as error:
            sentence = f"asked what it does not support, it raised {type(error).__name__}: {error}"
            self._leave(op, impl, served, arch, (sentence,), broke=True)
            return
        if why_not:
            self._leave(op, impl, served, arch, tuple(why_not))
            return
        try:
            found = capture(impl, served, arch)
        except NotCaptured as error:
            self._leave(op, impl, served, arch, (f"its wrapper raised {error}",), broke=True)
            return
        if not found.launches:
            self._leave(op, impl, served, arch, ("this call launches no Triton kernel",))
        for position, launch in enumerate(found.launches):
            who = Asked(op=op, impl=impl.name, call=served.spelling, position=position, inputs=found.inputs)
            self._add(launch, who)

    def _leave(
        self, op: str, impl: Impl, served: Served, arch: str, why: tuple[str, ...], broke: bool = False
    ) -> None:  # fmt: skip
        self._unasked.append(
            Unasked(op=op, impl=impl.name, arch=arch, call=served.spelling, reasons=why, broke=broke)
        )  # fmt: skip

    def _add(self, launch: Launch, who: Asked) -> None:
        try:
            key = key_of(launch)
        except Exception as error:
            # The kernel's text names what its module does not have; compiling it says so better.
            key = f"{who.op} {who.impl} {who.call} {who.position} {launch.arch}"
            self._kernels[key] = _Kernel(
                launch, [who], [], Outcome(failure="source", sentence=f"{launch.name}: {error}")
            )
            return
        if key not in self._kernels:
            kernel = self._kernels[key] = _Kernel(launch, notes=externals(launch))
            kernel.outcome = load(kept(key), Outcome)
            if kernel.outcome is None:
                if not self._is_warm:
                    importlib.import_module("impl.executions.aot.warm").warm_up(launch.arch)
                    self._is_warm = True
                self._pool.submit(key, launch)
        self._kernels[key].asked.append(who)

    def _collect(self, *, wait: bool) -> None:
        for key, outcome in self._pool.finished(wait=wait):
            self._kernels[key].outcome = outcome
            self._compiled += 1
            self._tell(Event(done=self._compiled, known=len(self._kernels)))


def _row(key: str, kernel: _Kernel) -> Row:
    launch, outcome = kernel.launch, kernel.outcome or Outcome(failure="crash", sentence="was never compiled")
    names = [parameter.name for parameter in launch.function.params]
    constants = {
        names[path[0]] + "".join(f".{step}" for step in path[1:]): _spelled(value)
        for path, value in sorted(launch.constants.items())
    }
    options = {
        name: str(launch.options[name])
        for name in _OPTIONS
        if name in launch.options and launch.options[name] != _USUAL.get(name)
    }
    notes = [*kernel.notes, *([_VALUES] if all(who.inputs == "values" for who in kernel.asked) else [])]
    return Row(
        kernel=launch.name, module=_module(launch), arch=launch.arch, key=key, constants=constants, options=options,
        arguments=_arguments(launch, names), asked=tuple(kernel.asked), notes=tuple(notes), failure=outcome.failure,
        sentence=outcome.sentence, seconds=outcome.seconds, resources=outcome.resources, shape=outcome.shape,
    )  # fmt: skip


def _module(launch: Launch) -> str:
    """Where a kernel is defined, as its own package calls it."""
    name = str(launch.function.__module__)
    return name.split(".", 3)[-1] if name.startswith("mla_oracle_sources.") else name


def _spelled(value: Any) -> str:
    value = getattr(value, "value", value)
    text = str(getattr(value, "__name__", value))
    return text if len(text) <= 60 else text[:57] + "..."


def _arguments(launch: Launch, names: list[str]) -> str:
    words = []
    for place, name in enumerate(names):
        kind = launch.signature[name]
        if kind == "constexpr":
            continue
        facts = {fact for fact, _ in launch.attributes.get((place,), ())}
        divisible = "/16" if "tt.divisibility" in facts else ""
        words.append(f"{name}:{kind}{divisible}{'/32' if 'tt.pointer_range' in facts else ''}")
    return " ".join(words)


def main(request: Path, out: TextIO) -> None:
    """Do what a request file asks, and say it on `out`."""

    def tell(event: Event) -> None:
        out.write(msgspec.json.encode(event).decode() + "\n")
        out.flush()

    # What runs in the pool ends with this process, however it is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked = msgspec.json.decode(request.read_bytes(), type=Request)
    settings.use_vllm(Path(asked.vllm) if asked.vllm else None)
    settings.use_aiter(Path(asked.aiter) if asked.aiter else None)
    report = Director(asked, tell).run()
    tell(Event(report=report))


if __name__ == "__main__":
    # Whatever kernels and wrappers print must not come between the lines.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        main(Path(sys.argv[1]), lines)
