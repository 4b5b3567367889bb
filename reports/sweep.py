"""How does a run get from its plan to a record for every task, whatever the suspects do to the workers?

Passes: a pytest session per execution runs the tasks without a record, until none is left or two passes in a row bring
nothing. What a dead worker left behind is settled between passes: a case whose worker died without a trace is asked once
more, and its record says so. Where the run was asked to, what ended as a crash, a hang or a lost device is asked once more
after that. `--resume` is the same loop on an older directory, by the same code in the same environment.
"""

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from impl.implementation import Execution, machine_code_of
from impl.sources.settings import use_aiter, use_vllm
from impl.sources.source_tree import SourceError
from oracle.check import Status
from reports.environment import environment
from reports.execute import HARNESS
from reports.judge import judge
from reports.merge import MIXABLE, Said, mixture, said_by, said_of
from reports.plan import AGAINST, find_impl
from reports.plugin import UNWRITABLE
from reports.record import Attempt, Record
from reports.store import Key, Pending, RecordFile, Run, Settings, StoreError, Task, Unwritable, held, read_run

_POLL_SECONDS = 0.2
_PLAIN_LINE_SECONDS = 10.0
_NOTICE_SECONDS = 0.5
_BARREN_PASSES = 2
# The executor of machine code is loaded within this, if it was compiled before.
_LOADED = 10.0
_NO_TRACE = "the worker died and left no trace: it ended itself or was killed"


def sweep(path: Path, console: Console) -> Run:
    """Run the tasks of a run directory that have no record yet, and return the run as it then stands.

    Raises `StoreError` when the directory cannot be read or written, when another sweep is writing it, or when what it
    holds was judged or answered by other code or in another environment than this process's.
    """
    with held(path) as lock:
        _check_present(read_run(path, own=True))
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
                stem = f"{number:04d}-{on.replace(':', '.')}"
                tasks = _items_of_pass([task for task in waiting if task.on == on], run.pending, number)
                if machine_code_of(on):
                    _compile_executor(on, console)
                with _writing(path):
                    _write_pass(path / "passes" / f"{stem}.jsonl", tasks)
                    ended = _session(run, stem, on, tasks, lock, show)
                before = _left(run)
                run = settled(path, f"{stem}-sweep")
                if ended == UNWRITABLE:
                    raise Unwritable(f"{path}: its workers cannot write there, as on a full disk; {_make_room(path)}")
                barren[on] = 0 if _left(run) < before else barren[on] + 1
                number += 1


def _compile_executor(on: Execution, console: Console) -> None:
    """Once for all workers, before a deadline runs: the executor of machine code is itself compiled on first use."""
    line = [sys.executable, "-m", "impl.executions.isa.warm"]
    started = time.monotonic()
    with subprocess.Popen(
        line, env=worker_environment(on), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as warming:
        try:
            try:
                _, said = warming.communicate(timeout=_LOADED)
            except subprocess.TimeoutExpired:
                console.print("compiling the executor of machine code, which takes a minute or more and is kept")
                _, said = warming.communicate()
        except BaseException:
            warming.kill()
            raise
    spent = time.monotonic() - started
    if warming.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        console.print(escape(f"the executor of machine code does not start: {last[0]}"))
    elif spent > _LOADED:
        console.print(f"compiled the executor of machine code in {spent:.0f} s; it is kept for the next time")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Whatever the system refuses meanwhile is a sentence."""
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{path}: the sweep cannot write there: {error.strerror}; {_make_room(path)}") from error


def _make_room(path: Path) -> str:
    return f"make room, then: mla-oracle sweep --resume {shlex.quote(str(path))}"


def _check_present(run: Run) -> None:
    """Raise unless all records come from the judge, the code and the environment that would answer the rest."""
    if not (run.open_tasks or run.retries):
        return
    begun = run.settings.judge
    if begun and begun != (here := judge()):
        raise StoreError(
            f"{run.path}: was begun with the cases and the judge {begun!r}, but they are {here!r} now; a run has one judge, "
            "so what is left should be asked by that one, or everything anew with sweep --out"
        )
    if not run.records:
        return
    now = dict(_now(run))
    for name in MIXABLE:
        differs = mixture(name, [*said_by(run, name, "in its records"), *((*said, "now") for said in now[name])])
        if differs:
            raise StoreError(
                f"{run.path}: {differs}; a run has one source and one environment, so what is left should be asked there, "
                "or everything anew with sweep --out"
            )


def _now(run: Run) -> Iterator[tuple[str, list[Said]]]:
    """What this process would say in records of this run, by name of what may be mixed."""
    trees = _trees(run.settings)
    use_vllm(trees[0])
    use_aiter(trees[1])
    here = [(on, environment(on, *trees)) for on in dict.fromkeys(task.on for task in run.plan)]
    for name in MIXABLE:
        if name != "source":
            yield name, [said_of(name, on, found) for on, found in here]
    asked = dict.fromkeys((record.op, record.impl, record.on) for record in run.records.values() if record.source)
    yield "source", [(place, _source(*place[:2])) for place in asked]


def _source(op: str, impl: str) -> str:
    """The hash of an implementation's code as it is now, or why there is none."""
    try:
        return hashlib.sha256(find_impl(op, impl).source()).hexdigest()
    except (SourceError, OSError) as error:
        return str(error)


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
    # A worker that somebody killed leaves no trace either: the case is asked once more, alone, and its record says so.
    if _left_no_trace_before(found.task):
        return "crash", _NO_TRACE.replace("died", "died twice in this case")
    return None


def _left_no_trace_before(task: Task) -> bool:
    return bool(task.attempts) and task.attempts[-1].reasons == (_NO_TRACE,)


def _attempts(found: Pending) -> tuple[Attempt, ...]:
    """How the case of a start without a record ended so far, this time too if its worker died without a trace.

    A worker runs one case at a time, so that it died in the case of its last start and in no other one of its item.
    """
    if not found.crashed:
        return found.task.attempts
    unexplained = Attempt(status="crash", reasons=(_NO_TRACE,), worker=found.stem, finished=time.time())
    return (*found.task.attempts, unexplained)


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
    attempts = {found.task.key: _attempts(found) for found in pending}
    items = {found.task.item.partition("#")[0] for found in pending}
    return [
        msgspec.structs.replace(
            task, item=f"{task.item}#{number}.{position}", attempts=attempts.get(task.key, task.attempts)
        )
        if task.attempts or task.key in attempts or task.item in items
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
            # In a process group of its own: an interrupt from a terminal is for the sweep, which takes its workers along,
            # and would look like a crash of the cases in flight if it reached the workers first.
            session = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=worker_environment(on),
                pass_fds=(reading, lock), process_group=0,
            )  # fmt: skip
        os.close(reading)
        while session.poll() is None:
            show()
            time.sleep(_POLL_SECONDS)
        show()
        return session.returncode
    except KeyboardInterrupt:
        # A worker that died just before is known to the session in a moment, and to nobody once that has ended.
        time.sleep(_NOTICE_SECONDS)
        raise
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


class _Answered(msgspec.Struct, gc=False):
    """What the count of a running sweep reads of a record."""

    case: str
    impl: str
    on: str
    status: str
    law: str = ""


class _Tail:
    """Counts the statuses of a run's records as its workers write them."""

    def __init__(self, path: Path) -> None:
        self._folder = path / "records"
        self._read: dict[Path, int] = {}
        self._statuses: dict[Key, str] = {}
        self._decode = msgspec.json.Decoder(_Answered).decode
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
                # What is no record is for the reader of the run to say.
                with suppress(msgspec.DecodeError):
                    found = self._decode(line)
                    # A record of a case that was asked once more takes the place of the one before.
                    self._statuses[found.case, found.impl, found.on, found.law] = found.status
        self.counts = Counter(self._statuses.values())

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
