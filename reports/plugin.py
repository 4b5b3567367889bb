"""What does one pytest session do with the tasks of one pass?

Loaded with `-p reports.plugin` by the sweep. The session's only argument is the pass file; each item of it becomes one
pytest item, and the worker that runs it writes start lines and records. pytest's own outcomes mean nothing here.
"""

import dataclasses
import faulthandler
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cases.case import parse
from cases.memory import new_memory_poisoned
from impl.sources.settings import use_aiter, use_vllm
from reports.capsule import kept_capsule
from reports.environment import environment
from reports.execute import Trial, attempt, device_is_dead, of_lost_device
from reports.plan import AGAINST, find_impl
from reports.record import Record
from reports.store import Crash, RecordFile, Settings, Task, Unwritable, append_crash, read_plan, read_settings

# How a worker ends after its device died: xdist replaces it, and its record is already written.
_DEVICE_DIED = 70
_LEFT_ALONE = 75
_STILLBORN = 76
# How a session ends when its workers cannot write what they find.
UNWRITABLE = 77
# Workers in a row that die before they are ready, for no case's fault: then none ever will be.
_MOST_STILLBORN = 4
_PARENT_SECONDS = 0.2
_CANNOT_WRITE = "mla-oracle cannot write: "


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that the sweep starts its sessions with."""
    group = parser.getgroup("mla-oracle")
    group.addoption("--mla-run", type=Path, help="the run directory")
    group.addoption("--mla-lifeline", type=int, help="a descriptor that reads as closed once the sweep is gone")


def pytest_configure(config: pytest.Config) -> None:
    """Tell the session from its workers: it notes crashes, they run cases."""
    run: Path | None = config.getoption("--mla-run")
    if run is None:
        raise pytest.UsageError("-p reports.plugin serves `mla-oracle sweep`, which names a run with --mla-run")
    workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
    stem = Path(config.args[0]).stem
    if workerinput is not None:
        config.pluginmanager.register(Worker(run, stem, workerinput["workerid"]), "mla-worker")
        return
    config.pluginmanager.register(Session(run, stem), "mla-session")
    lifeline: int | None = config.getoption("--mla-lifeline")
    if lifeline is not None:
        threading.Thread(target=_end_with_sweep, args=(lifeline,), daemon=True).start()


def _end_with_sweep(lifeline: int) -> None:
    # Nobody ever writes into this pipe: the read returns when the last writer, the sweep, is gone.
    os.read(lifeline, 1)
    os._exit(_LEFT_ALONE)


def _end_with_parent(parent: int) -> None:
    # execnet lets a worker finish its item when the session is gone; by then the run may have been resumed.
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(_LEFT_ALONE)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The pass file is the only thing collected."""
    if file_path.suffix == ".jsonl":
        collected: PassFile = PassFile.from_parent(parent, path=file_path)
        return collected
    return None


class PassFile(pytest.File):
    """The tasks of a pass; those that share an item name make one pytest item."""

    def collect(self) -> Iterator[pytest.Item]:
        """One item per item name, in the order of the file."""
        items: dict[str, list[Task]] = {}
        for task in read_plan(self.path):
            items.setdefault(task.item, []).append(task)
        for name, tasks in items.items():
            yield CaseGroup.from_parent(self, name=name, tasks=tuple(tasks))


class CaseGroup(pytest.Item):
    """Cases that one worker runs one after another, each with its own record."""

    def __init__(self, *, tasks: tuple[Task, ...], **known: Any) -> None:
        super().__init__(**known)
        self.tasks = tasks

    def runtest(self) -> None:
        """Run the cases in this worker."""
        worker: Worker | None = self.config.pluginmanager.get_plugin("mla-worker")
        if worker is None:
            raise pytest.UsageError("cases run in xdist workers only, where they may die: start pytest with -n")
        for task in self.tasks:
            worker.run_task(task)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """What pytest is told of a failing item; that nothing can be written is for the session to hear."""
        if isinstance(excinfo.value, Unwritable):
            return f"{_CANNOT_WRITE}{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the item stands in pytest's own words."""
        return self.path, 0, self.name


class Session:
    """The pytest process that hands out items; it hears from xdist which item a dead worker was running."""

    def __init__(self, run: Path, stem: str) -> None:
        self._run, self._stem = run, stem
        self._ready: set[str] = set()
        self._stillborn = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        """A worker that got this far can run cases."""
        self._ready.add(node.gateway.id)
        self._stillborn = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """End the session when its workers cannot even start, rather than restart them for ever."""
        if error and node.gateway.id not in self._ready:
            self._stillborn += 1
            if self._stillborn >= _MOST_STILLBORN:
                os.write(1, f"{_MOST_STILLBORN} workers in a row died before they were ready: {error}\n".encode())
                os._exit(_STILLBORN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """End the session once a worker cannot write: cases would be run, and nothing of them be kept."""
        said = str(report.longrepr or "")
        if report.failed and said.startswith(_CANNOT_WRITE):
            os.write(1, f"{said}\n".encode())
            os._exit(UNWRITABLE)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Keep the name of the item for the sweep, which alone decides what it means."""
        worker = getattr(getattr(report, "node", None), "gateway", None)
        append_crash(
            self._run, self._stem, Crash(crashed=crashitem.partition("::")[2], worker=getattr(worker, "id", ""))
        )


class Worker:
    """The process that runs cases, and may die of it: everything it knows is in its file before and after each case."""

    def __init__(self, run: Path, stem: str, name: str) -> None:
        self._run = run
        self._stem = f"{stem}-{name}-{os.getpid()}"
        self._settings: Settings = read_settings(run)
        self._records: RecordFile | None = None
        self._kept: Counter[tuple[str, str, str, str]] = Counter()

    def _open(self) -> RecordFile:
        torch.set_num_threads(1)
        # torch imports seconds' worth when it is first asked for this, which is no time of a case.
        with new_memory_poisoned():
            pass
        self._trees = tuple(Path(text) if text else None for text in (self._settings.vllm, self._settings.aiter))
        use_vllm(self._trees[0])
        use_aiter(self._trees[1])
        # Files of their own: a fatal signal must not look like a passed deadline.
        self._watchdog = (self._run / "watchdogs" / f"{self._stem}.txt").open("x")
        self._trace = (self._run / "crashes" / f"{self._stem}.txt").open("x")
        faulthandler.enable(self._trace)
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        return RecordFile(self._run / "records" / f"{self._stem}.jsonl")

    def run_task(self, task: Task) -> None:
        """Start line, case, record; ends the process when the device died of the case."""
        if self._records is None:
            try:
                self._records = self._open()
            except OSError as error:
                raise Unwritable(f"{error.filename or self._run}: {error.strerror}") from error
            self._environment = environment(task.on, *self._trees)
        self._records.start(task)
        faulthandler.dump_traceback_later(self._settings.deadline, exit=True, file=self._watchdog)
        try:
            case = parse(task.case)
            trial = attempt(case, find_impl(case.op, task.impl), task.on, self._environment, self._stem, law=task.law)
            died = trial.record.status == "error" and device_is_dead(task.on)
        finally:
            faulthandler.cancel_dump_traceback_later()
        record = of_lost_device(trial.record) if died else trial.record
        record = msgspec.structs.replace(record, attempts=task.attempts)
        # Before the record, which names it: a worker that is killed in between has its case asked again.
        self._records.record(self._with_capsule(record, trial))
        if died:
            os._exit(_DEVICE_DIED)

    def _with_capsule(self, record: Record, trial: Trial) -> Record:
        """The record, naming the capsule if this is among the first failures of its kind and one could be kept."""
        group = (record.op, record.impl, record.on, record.law)
        if record.status not in AGAINST or self._kept[group] >= self._settings.capsules:
            return record
        digest = hashlib.sha256(repr(record.key).encode()).hexdigest()[:16]
        name = f"{record.op}-{record.impl}-{record.on.replace(':', '.')}-{digest}"
        path = self._run / "capsules" / f"{name}.safetensors"
        if not kept_capsule(path, dataclasses.replace(trial, record=record)):
            return record
        self._kept[group] += 1
        return msgspec.structs.replace(record, capsule=f"capsules/{path.name}")
