"""How does a run get from its plan to a record for every task, whatever the suspects do to the workers?

Passes: a pytest session per execution runs the tasks without a record, until none is left or two passes in a row bring
nothing. What a dead worker left behind is settled between passes. Where the run was asked to, what ended as a crash, a
hang or a lost device is asked once more after that. `--resume` is the same loop on an older directory.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from impl.implementation import Execution
from oracle.check import Status
from reports.environment import environment
from reports.execute import HARNESS
from reports.plan import AGAINST
from reports.plugin import UNWRITABLE
from reports.record import Record
from reports.store import Pending, RecordFile, Run, Settings, StoreError, Task, held, read_run

_POLL_SECONDS = 0.2
_PLAIN_LINE_SECONDS = 10.0
_BARREN_PASSES = 2


def sweep(path: Path, console: Console) -> Run:
    """Run the tasks of a run directory that have no record yet, and return the run as it then stands.

    Raises `StoreError` when the directory cannot be read or written, or another sweep is writing it.
    """
    with held(path) as lock:
        run = settled(path, "0000-resumed")
        number = 1 + max((int(file.name[:4]) for file in (path / "passes").glob("*.jsonl")), default=0)
        barren: Counter[Execution] = Counter()
        with _progress(run, console) as show:
            while True:
                waiting = _waiting(run, barren)
                if not waiting:
                    show(run)
                    return run
                on = waiting[0].on
                stem = f"{number:04d}-{on}"
                tasks = _items_of_pass([task for task in waiting if task.on == on], run.pending, number)
                _write_pass(path / "passes" / f"{stem}.jsonl", tasks)
                ended = _session(run, stem, on, tasks, lock, show)
                before = _left(run)
                run = settled(path, f"{stem}-sweep")
                if ended == UNWRITABLE:
                    again = f"mla-oracle sweep --resume {shlex.quote(str(path))}"
                    raise StoreError(
                        f"{path}: its workers cannot write there, as on a full disk; make room, then: {again}"
                    )
                barren[on] = 0 if _left(run) < before else barren[on] + 1
                number += 1


def _waiting(run: Run, barren: Mapping[Execution, int]) -> list[Task]:
    """The tasks of the next pass: what is asked once more waits until everything was asked once."""
    for tasks in (run.open_tasks, run.retries):
        waiting = [task for task in tasks if barren[task.on] < _BARREN_PASSES]
        if waiting:
            return waiting
    return []


def _left(run: Run) -> tuple[int, int]:
    return len(run.open_tasks), len(run.retries)


def settled(path: Path, stem: str) -> Run:
    """The run after every start without a record that is a hang or a crash got its record, in a file named `stem`."""
    run = read_run(path, own=True)
    verdicts = [(found, *verdict) for found in run.pending if (verdict := _death(run, found)) is not None]
    if not verdicts:
        return run
    file = RecordFile(_unused(path / "records", stem))
    for found, status, reason in verdicts:
        file.record(
            Record(
                case=found.task.case,
                op=found.task.case.partition(":")[0],
                impl=found.task.impl,
                on=found.task.on,
                law=found.task.law,
                status=status,
                reasons=(reason,),
                environment=environment(found.task.on, *_trees(run.settings)),
                worker=found.stem,
                finished=time.time(),
                attempts=found.task.attempts,
            )
        )
    file.close()
    return read_run(path, own=True)


def _trees(settings: Settings) -> tuple[Path | None, Path | None]:
    """The vLLM and the AITER that the run was pointed at."""
    return Path(settings.vllm) if settings.vllm else None, Path(settings.aiter) if settings.aiter else None


def _death(run: Run, found: Pending) -> tuple[Status, str] | None:
    """What a start without a record means; None when the case was only in flight, and runs again alone."""
    if found.watchdog:
        return "hang", f"no answer after {run.settings.deadline:g} s, the worker was ended{_innermost(found.watchdog)}"
    if not found.crashed:
        return None
    if found.trace:
        return "crash", f"the worker died: {found.trace.strip().splitlines()[0]}{_innermost(found.trace)}"
    # A worker that somebody killed leaves no trace either: the case is asked once more, alone.
    if found.times >= 2:
        return "crash", "the worker died twice in this case and left no trace: it ended itself or was killed"
    return None


def _innermost(dump: str) -> str:
    """` in file.py:12 name`: the innermost frame of the thread that ran the case, from a dump of faulthandler."""
    for thread in re.split(r"\n(?=(?:Current thread|Thread) )", dump):
        if "execute.py" in thread or " in run_task" in thread:
            frame = re.search(r'File "([^"]*)", line (\d+) in (\S+)', thread)
            if frame:
                return f" in {Path(frame[1]).name}:{frame[2]} {frame[3]}"
    return ""


def _unused(folder: Path, stem: str) -> Path:
    for number in range(10_000):
        path = folder / (f"{stem}.jsonl" if not number else f"{stem}-{number}.jsonl")
        if not path.exists():
            return path
    raise FileExistsError(f"{folder / stem}: ten thousand files of this name")


def _items_of_pass(tasks: Iterable[Task], pending: Iterable[Pending], number: int) -> list[Task]:
    """The tasks again, each as an item of its own where it is asked once more, or a worker died or was stopped in it."""
    suspicious = {found.task.key for found in pending}
    items = {found.task.item.partition("#")[0] for found in pending}
    return [
        msgspec.structs.replace(task, item=f"{task.item}#{number}.{position}")
        if task.attempts or task.key in suspicious or task.item in items
        else task
        for position, task in enumerate(tasks)
    ]


def _write_pass(path: Path, tasks: Iterable[Task]) -> None:
    with path.open("xb") as file:
        file.writelines(msgspec.json.encode(task) + b"\n" for task in tasks)


def _session(run: Run, stem: str, on: Execution, tasks: list[Task], lock: int, show: Callable[..., None]) -> int:
    """The exit code of one pytest session over one pass; it ends early when this process dies."""
    workers = max(1, min(run.settings.workers, len({task.item for task in tasks})))
    configuration = run.path / "passes" / "pytest.ini"
    if not configuration.exists():
        configuration.write_text("[pytest]\n")
    reading, writing = os.pipe()
    # fmt: off
    command = [
        sys.executable, "-m", "pytest", "-c", str(configuration), "--rootdir", str(run.path),
        "-p", "xdist", "-p", "reports.plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler",
        "-n", str(workers), "--dist", "load", "--maxschedchunk", "1", "--max-worker-restart", "1000000",
        "--import-mode", "importlib", "-q", "--no-header", "--tb", "short",
        "--mla-run", str(run.path), "--mla-lifeline", str(reading), str(run.path / "passes" / f"{stem}.jsonl"),
    ]
    # fmt: on
    try:
        with (run.path / "logs" / f"{stem}.txt").open("xb") as log:
            session = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=worker_environment(on),
                pass_fds=(reading, lock),
            )  # fmt: skip
        os.close(reading)
        while session.poll() is None:
            show()
            time.sleep(_POLL_SECONDS)
        show()
        return session.returncode
    finally:
        os.close(writing)
        if "session" in locals():
            session.wait()


def worker_environment(on: Execution) -> dict[str, str]:
    """The environment that a session and its workers start with, for one execution."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "TRITON_INTERPRET")}
    house = str(Path(__file__).resolve().parent.parent)
    return {
        **kept,
        **({"TRITON_INTERPRET": "1"} if on == "interpreter" else {}),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # The four rooms come from where this file lies, not from the directory that the user stands in.
        "PYTHONPATH": os.pathsep.join(part for part in (house, os.environ.get("PYTHONPATH", "")) if part),
        "PYTHONSAFEPATH": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


class _Tail:
    """Counts the statuses of a run's records as its workers write them."""

    def __init__(self, path: Path) -> None:
        self._folder = path / "records"
        self._read: dict[Path, int] = {}
        self.counts: Counter[str] = Counter()

    def update(self) -> None:
        for file in self._folder.glob("*.jsonl"):
            offset = self._read.get(file, 0)
            with file.open("rb") as lines:
                lines.seek(offset)
                content = lines.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[file] = offset + len(whole)
            for line in whole.splitlines():
                if line.startswith(b'{"start"'):
                    continue
                status = re.search(rb'"status":"([a-z]+)"', line)
                if status:
                    self.counts[status[1].decode()] += 1
                before = re.search(rb'"attempts":\[\{"status":"([a-z]+)"', line)
                if before:
                    # It takes the place of the record of the attempt before.
                    self.counts[before[1].decode()] -= 1

    def become(self, run: Run) -> None:
        """What the run says now that nobody writes it."""
        self.counts = Counter(record.status for record in run.records.values())

    @property
    def done(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        return ", ".join(f"{count} {status}" for status, count in sorted(self.counts.items()) if count) or "none yet"


@contextmanager
def _progress(run: Run, console: Console) -> Iterator[Callable[..., None]]:
    """A function to call often, and with the run at its end: a live bar on a terminal, now and then a line elsewhere."""
    tail = _Tail(run.path)
    tail.update()
    total = len(run.plan)
    began, first = time.monotonic(), tail.done
    if console.is_terminal:
        columns = (
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[counts]}"), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("cases", total=total, counts="", rate="")

            def live(ended: Run | None = None) -> None:
                tail.update() if ended is None else tail.become(ended)
                rate = (tail.done - first) / max(time.monotonic() - began, 1e-3)
                progress.update(bar, completed=min(tail.done, total), counts=str(tail), rate=f"{rate:.1f} cases/s")

            yield live
        return
    last = [began]

    def plain(ended: Run | None = None) -> None:
        now = time.monotonic()
        if ended is None and now - last[0] < _PLAIN_LINE_SECONDS:
            return
        last[0] = now
        tail.update() if ended is None else tail.become(ended)
        rate = (tail.done - first) / max(now - began, 1e-3)
        speed = f", {rate:.1f} cases/s" if rate > 0 else ""
        left = f", {(total - tail.done) / rate:.0f} s left" if rate > 0 and total > tail.done else ""
        console.print(f"{tail.done} of {total} cases: {tail}{speed}{left}", highlight=False, soft_wrap=True)

    yield plain


def exit_code(run: Run, allow_unjudged: bool = False) -> int:
    """0 when every judged record passed; 1 when one did not, or none was judged; 3 when the harness itself broke."""
    statuses = Counter(record.status for record in run.records.values())
    if run.open_tasks or any(broken(record) for record in run.records.values()):
        return 3
    if any(record.status in AGAINST for record in run.records.values()):
        return 1
    judged = sum(statuses.values()) - statuses["unsupported"]
    return 0 if judged or allow_unjudged else 1


def broken(record: Record) -> bool:
    """Whether the record says that the harness, not the suspect, went wrong."""
    return any(reason.startswith(HARNESS) for reason in record.reasons)
