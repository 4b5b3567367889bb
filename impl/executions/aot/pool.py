"""How are launches compiled side by side, when the compiler may take its process with it?

Each compilation runs in a process of its own, forked from the one that captured the launch: JIT functions cannot be sent
to another one. What ends such a process is told of the launch that it was for, and ends nothing else.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from impl.executions.aot.cache import cache_directory, compiled, hash_of, keep
from impl.executions.aot.compile import CompileError, Launch
from impl.executions.aot.normalise import Shape, shape_of
from impl.executions.aot.report import Failure
from impl.executions.aot.resources import Resources, resources_of

DEADLINE = 600.0
"""Seconds after which a compilation counts as hung."""

_FORK = multiprocessing.get_context("fork")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a launch: its resources and what is left of its text, or who refused and why."""

    failure: Failure = ""
    sentence: str = ""
    seconds: float = 0.0
    resources: Resources | None = None
    shape: Shape | None = None


def outcome_of(launch: Launch) -> Outcome:
    """Compile a launch in this process and look at what came out; never raises `CompileError`."""
    try:
        done = compiled(launch)
    except CompileError as error:
        return Outcome(failure=error.stage, sentence=str(error))
    shared = int(done.metadata.get("shared") or 0)
    found = resources_of(done.assembly, launch.arch, shared, int(launch.options["num_warps"]))
    made = Outcome(seconds=done.seconds, resources=found, shape=shape_of(done.assembly))
    if found.lds <= found.lds_limit:
        return made
    sentence = f"{launch.name}: lds={found.lds}, but should be at most {found.lds_limit}: {launch.arch} has no more"
    return msgspec.structs.replace(made, failure="lds", sentence=sentence)


@functools.cache
def _readers() -> str:
    """The hash of what derives an outcome from a text: older outcomes must not be met by newer readers."""
    here = Path(__file__).parent
    return hash_of(here / "resources.py", here / "normalise.py", here / "pool.py")[:12]


def kept(key: str) -> Path:
    """Where the cache holds the outcome of a launch."""
    return cache_directory() / f"{key}.{_readers()}.outcome"


@dataclass
class _Job:
    key: str
    launch: Launch
    process: Any
    receiver: Any
    log: Path
    started: float = field(default_factory=time.monotonic)


class Pool:
    """At most `workers` compilations at a time; `work` is what each process does with its launch."""

    def __init__(
        self, workers: int, work: Callable[[Launch], Outcome] = outcome_of, deadline: float = DEADLINE
    ) -> None:
        self._workers = workers
        self._work = work
        self._deadline = deadline
        self._waiting: deque[tuple[str, Launch]] = deque()
        self._running: list[_Job] = []
        self._directory = tempfile.TemporaryDirectory(prefix="mla-oracle-aot-")

    def submit(self, key: str, launch: Launch) -> None:
        """Have a launch compiled when a worker is free."""
        self._waiting.append((key, launch))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is waiting or running."""
        return not self._waiting and not self._running

    def finished(self, *, wait: bool) -> Iterator[tuple[str, Outcome]]:
        """What has ended by now, each with its key; with `wait`, until all has."""
        while True:
            self._start()
            yield from self._collect(0.2 if wait and self._running else 0.0)
            self._start()
            if not wait or self.is_idle:
                return

    def close(self) -> None:
        """End what is running, and forget what is waiting."""
        self._waiting.clear()
        for job in self._running:
            job.process.kill()
            job.process.join()
        self._running.clear()
        self._directory.cleanup()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._workers:
            key, launch = self._waiting.popleft()
            log = Path(self._directory.name) / f"{key}.log"
            receiver, sender = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_compile, args=(self._work, key, launch, sender, log), daemon=True)
            process.start()
            sender.close()
            self._running.append(_Job(key, launch, process, receiver, log))

    def _collect(self, patience: float) -> Iterator[tuple[str, Outcome]]:
        if not self._running:
            return
        multiprocessing.connection.wait([job.receiver for job in self._running], timeout=patience)
        for job in list(self._running):
            outcome = self._look(job)
            if outcome is not None:
                self._running.remove(job)
                job.receiver.close()
                yield job.key, outcome

    def _look(self, job: _Job) -> Outcome | None:
        """What became of a job; None while it runs."""
        if job.receiver.poll():
            try:
                told = msgspec.msgpack.decode(job.receiver.recv_bytes(), type=Outcome)
                job.process.join()
                return told
            except EOFError:
                job.process.join()
                return _died(job)
        if time.monotonic() - job.started > self._deadline:
            job.process.kill()
            job.process.join()
            return Outcome(
                failure="hang", sentence=f"{job.launch.name}: the compiler had not ended after {self._deadline:g} s"
            )
        return None


def _compile(work: Callable[[Launch], Outcome], key: str, launch: Launch, sender: Any, log: Path) -> None:
    """In a process of its own: compile, tell, and keep what is worth keeping."""
    # Its own group, so that an interrupt of the command meets the one that started it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    outcome = work(launch)
    if outcome.failure in ("", "lds"):
        keep(kept(key), outcome)
    sender.send_bytes(msgspec.msgpack.encode(outcome))
    sender.close()


def _died(job: _Job) -> Outcome:
    """The sentence on a process that ended without a word, with the last that the compiler said."""
    code = job.process.exitcode or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    said = (
        [line.strip() for line in job.log.read_text("utf-8", "replace").splitlines() if line.strip()]
        if job.log.is_file()
        else []
    )
    telling = next(
        (line for line in said if "error" in line.lower() or "assert" in line.lower()), said[-1] if said else ""
    )
    return Outcome(
        failure="crash",
        sentence=f"{job.launch.name}: the compiler's process died with {how}{': ' + telling[:300] if telling else ''}",
    )
