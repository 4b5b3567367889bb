"""Where is a run kept, and what has become of each of its tasks?

A run directory holds `run.json` (what was asked for), `plan.jsonl` (the tasks), and what its workers wrote: for each a
file of its own in `records/`, where a start line goes before every case and its record after it. Files are only ever
created and appended to, so a killed run loses nothing but the cases in flight.
"""

import fcntl
import gc
import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from cases.covering import Ledger
from impl.implementation import Execution
from oracle.check import verdict_of
from reports.record import READABLE, SCHEMA, Attempt, Record, unanswered

T = TypeVar("T")

Key = tuple[str, str, str, str]
# complete: every task has its record. being written: a sweep is at it. stopped: tasks are open and nobody works on them.
State = Literal["complete", "being written", "stopped"]

_FOLDERS = ("records", "watchdogs", "crashes", "passes", "logs", "capsules")
_CAPSULE = re.compile(r"capsules/[\w.+-]+\.safetensors")


class StoreError(ValueError):
    """A run directory or one of its lines that cannot be used; the message names it and says what would be right."""


class Unwritable(StoreError):
    """What could not be written, as on a full disk; no half of a line or of a run is left."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run was asked for.

    ops, impls: empty for all. on: the executions. cases: the level. patterns: the `--case` words. failed: the run whose
    failures are asked again. deadline: seconds for a case. vllm, aiter: the trees that were pointed at. laws: whether
    laws were asked about too. capsules: how many failures of each op, implementation, execution and law a worker keeps.
    retry: whether crashes, hangs and lost devices are asked once more. ledgers: the t-way coverage of the planned cases.

    shard: `i/n` where only a part of the plan was asked; whole: SHA-256 of the whole plan. balance: the run whose times
    it was divided by. merged: the runs that this one was joined from.

    plan_digest: SHA-256 of `plan.jsonl`, which `create_run` sets, so that no task is taken away later; runs of before have
    none and are read without.

    judge: the version and the SHA-256 of what decides a verdict besides the implementations, as `reports.judge` says it;
    runs of before have none.
    """

    schema: int = SCHEMA
    created: float = 0.0
    ops: tuple[str, ...] = ()
    impls: tuple[str, ...] = ()
    on: tuple[Execution, ...] = ()
    cases: str = "default"
    patterns: tuple[str, ...] = ()
    failed: str = ""
    seed: int = 0
    workers: int = 1
    deadline: float = 300.0
    vllm: str = ""
    aiter: str = ""
    laws: bool = False
    capsules: int = 0
    retry: bool = False
    ledgers: tuple[Ledger, ...] = ()
    shard: str = ""
    whole: str = ""
    balance: str = ""
    merged: tuple[str, ...] = ()
    plan_digest: str = ""
    judge: str = ""


class Task(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """One planned record: a case on an implementation on an execution; tasks of one `item` run together.

    law: the law of the op that is asked about; empty when the answer itself is judged. place: where a shard's task stands
    in the whole plan. attempts: how the case ended before, where it is asked once more.
    """

    case: str
    impl: str
    on: Execution
    item: str
    law: str = ""
    place: int = 0
    attempts: tuple[Attempt, ...] = ()

    @property
    def key(self) -> Key:
        """The key of the record that answers this task."""
        return (self.case, self.impl, self.on, self.law)


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A case that a worker is about to run."""

    start: Task
    at: float


class Crash(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item whose worker died while it ran."""

    crashed: str
    worker: str


@dataclass(frozen=True)
class Pending:
    """A start without a record. `watchdog` and `trace` are what was dumped by the deadline and by a fatal signal.

    crashed: whether a worker died in the item to which the case belongs; a stopped sweep leaves starts without it.
    """

    task: Task
    stem: str
    crashed: bool
    watchdog: str
    trace: str


@dataclass(frozen=True)
class Run:
    """A run as read from its directory.

    records: of every key the record after the most attempts, among equals the newest, in the order of the plan. pending:
    the starts that no record answers, the newest of each key. starts: how often each key was begun. notes: sentences on
    what was tolerated. being_written: whether another process held the run while it was read.
    """

    path: Path
    settings: Settings
    plan: tuple[Task, ...]
    records: Mapping[Key, Record]
    pending: tuple[Pending, ...]
    starts: Mapping[Key, int]
    notes: tuple[str, ...]
    being_written: bool = False

    @property
    def open_tasks(self) -> tuple[Task, ...]:
        """The tasks that no record answers yet."""
        return tuple(task for task in self.plan if task.key not in self.records)

    @property
    def retries(self) -> tuple[Task, ...]:
        """The tasks that are still to be asked once more, and how they ended; none unless the run was asked to."""
        if not self.settings.retry:
            return ()
        found = ((task, self.records.get(task.key)) for task in self.plan)
        return tuple(
            msgspec.structs.replace(task, attempts=(attempt_of(record),))
            for task, record in found
            if record is not None and record.infrastructure and not record.attempts
        )

    @property
    def state(self) -> State:
        """Whether more records are to come, and from whom."""
        if self.being_written:
            return "being written"
        return "stopped" if self.open_tasks or self.retries else "complete"

    @property
    def progress(self) -> str:
        """A sentence on a run that is not complete; empty for one that is."""
        if self.state == "complete":
            return ""
        answered = len(self.plan) - len(self.open_tasks)
        how = "is still being written" if self.state == "being written" else "was stopped half way"
        again = len(self.retries)
        retries = f", and {again} {'is' if again == 1 else 'are'} still to be asked once more" if again else ""
        return f"{self.path} {how}: {answered} of {len(self.plan)} tasks have a record{retries}"


def attempt_of(record: Record) -> Attempt:
    """What is kept of a record whose case is asked once more."""
    return Attempt(status=record.status, reasons=record.reasons, worker=record.worker, finished=record.finished)


def check_vacant(path: Path) -> None:
    """Raise `StoreError` unless a run can be made there: nothing, or an empty directory, and inside no other run."""
    for directory in path.resolve().parents:
        # A run.json alone may be anybody's.
        if (directory / "run.json").is_file() and (directory / "records").is_dir():
            raise StoreError(f"{path}: lies in the run {directory}; a run needs a directory outside of every other run")
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path}: is a file, a run needs a directory of its own")
    if path.is_dir() and any(path.iterdir()):
        if (path / "run.json").exists():
            raise StoreError(f"{path}: already holds a run; continue it with --resume {path}, or give another --out")
        raise StoreError(f"{path}: is not empty; a run needs a directory of its own")


def create_run(path: Path, settings: Settings, plan: Iterable[Task]) -> None:
    """Make a run directory; raises `StoreError` rather than write into a directory that holds anything.

    Raises `Unwritable`, and leaves nothing behind then, where it cannot be written.
    """
    check_vacant(path)
    tasks = b"".join(msgspec.json.encode(task) + b"\n" for task in plan)
    kept = msgspec.structs.replace(settings, plan_digest=hashlib.sha256(tasks).hexdigest())
    try:
        with ExitStack() as undo:
            for folder in (path, *(path / name for name in _FOLDERS)):
                _make(folder, undo)
            _write_new(path / "plan.jsonl", tasks, undo)
            # Last, and at once: a directory with a run.json is a whole run to whoever looks.
            _write_new(path / "run.json.part", msgspec.json.format(msgspec.json.encode(kept)) + b"\n", undo)
            (path / "run.json.part").rename(path / "run.json")
            undo.pop_all()
    except OSError as error:
        raise Unwritable(f"{path}: {error.strerror}; a run needs a directory that can be written, with room") from error


def _make(folder: Path, undo: ExitStack) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        undo.callback(_remove, folder)


def _remove(folder: Path) -> None:
    # What somebody else has put there meanwhile stays.
    with suppress(OSError):
        folder.rmdir()


def _write_new(path: Path, content: bytes, undo: ExitStack) -> None:
    with path.open("xb") as file:
        undo.callback(path.unlink, missing_ok=True)
        file.write(content)


@contextmanager
def held(path: Path, patience: float = 10.0) -> Iterator[int]:
    """Hold the run against a second sweep; the descriptor may be handed to children, who then hold it too.

    Raises `StoreError` when another process still holds it after `patience` seconds.
    """
    with (path / "lock").open("a") as file:
        waited_until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > waited_until:
                    raise StoreError(f"{path}: another sweep is writing this run; wait for it to end") from None
                time.sleep(0.1)
        yield file.fileno()


def is_being_written(path: Path) -> bool:
    """Whether another process holds the run now; it is not disturbed."""
    try:
        with (path / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # Nobody ever held it, or this file system knows no locks.
        return False
    return False


class RecordFile:
    """The file that one worker appends to; every line goes out at once, so a killed worker loses at most a part of one.

    A line that cannot be written raises `Unwritable`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._length = 0

    def start(self, task: Task) -> None:
        """Say that the case is about to run."""
        self._append(msgspec.json.encode(Start(start=task, at=time.time())))

    def record(self, record: Record) -> None:
        """Keep what became of it."""
        self._append(msgspec.json.encode(record))

    def _append(self, line: bytes) -> None:
        content = line + b"\n"
        try:
            rest = content
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                # Half a line in front of a later one would be taken for an edited record.
                self._file.truncate(self._length)
                self._file.seek(self._length)
            raise Unwritable(
                f"{self._path}: {error.strerror}, so the record is not kept; it should be a place with room to write"
            ) from error
        self._length += len(content)

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def append_crash(run: Path, stem: str, crash: Crash) -> None:
    """Note that xdist named this item when its worker died."""
    with (run / "crashes" / f"{stem}.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(crash) + b"\n")


def read_settings(run: Path) -> Settings:
    """What the run was asked for; raises `StoreError` for a directory that is no run."""
    path = run / "run.json"
    if not run.is_dir():
        raise StoreError(f"{run}: no such run directory; `mla-oracle sweep --out {run}` would make it")
    if not path.is_file():
        raise StoreError(f"{run}: is no run directory, it holds no run.json")
    raw = path.read_bytes()
    _check_schema(raw, f"{path}")
    return _decoded(raw, Settings, f"{path}", "the settings of a run as `mla-oracle sweep` writes them")


def read_plan(path: Path) -> tuple[Task, ...]:
    """The tasks of a plan or of a pass; raises `StoreError`."""
    return _tasks(path, _bytes_of_plan(path))


def _bytes_of_plan(path: Path) -> bytes:
    if not path.is_file():
        raise StoreError(f"{path}: missing; a run directory holds its tasks there")
    return path.read_bytes()


def _tasks(path: Path, content: bytes) -> tuple[Task, ...]:
    kept: dict[Any, Any] = {}
    tasks = []
    for number, line in enumerate(content.splitlines(), 1):
        task = _decoded(line, Task, f"{path} line {number}", "a task: case, impl, on, item")
        _share(task, ("case", "impl", "on", "item", "law"), kept)
        tasks.append(task)
    return tuple(tasks)


def _own_plan(run: Path, settings: Settings) -> tuple[Task, ...]:
    """The plan that the run was made with; raises `StoreError` when it is another one now."""
    path = run / "plan.jsonl"
    content = _bytes_of_plan(path)
    tasks = _tasks(path, content)
    if settings.plan_digest and hashlib.sha256(content).hexdigest() != settings.plan_digest:
        raise StoreError(
            f"{path}: is not the plan that {run / 'run.json'} was written with; a plan is never edited, a selection of its "
            "tasks is a run of its own"
        )
    return tasks


def read_run(path: Path, own: bool = False) -> Run:
    """Everything a run directory says; raises `StoreError` naming file and line of whatever cannot be right.

    A run may be read while a sweep writes it, and after one was killed: only the last line of a file may be cut off, and
    its case counts as unfinished. own: this process is the one that holds the run.
    """
    settings = read_settings(path)
    being_written = not own and is_being_written(path)
    with _collector_paused():
        run = _read(path, settings, being_written)
    if being_written and not run.open_tasks:
        # The sweep may have ended meanwhile, and then nothing of it is missing.
        return replace(run, being_written=is_being_written(path))
    return run


def _read(path: Path, settings: Settings, being_written: bool) -> Run:
    plan = _own_plan(path, settings)
    planned = {task.key: task for task in plan}
    reader = _RecordReader()
    records: dict[Key, Record] = {}
    begun: dict[Key, Pending] = {}
    starts: dict[Key, int] = {}
    notes: list[str] = []
    for file in sorted((path / "records").glob("*.jsonl")):
        last: Task | None = None
        for place, line in _lines(file, notes, being_written):
            if line.startswith(b'{"start"'):
                task = _decoded(line, Start, place, "a start line: start, at").start
                key = task.key
                if key not in planned:
                    raise StoreError(f"{place}: starts a case that {path / 'plan.jsonl'} does not hold: {task.case}")
                starts[key] = starts.get(key, 0) + 1
                last = task
                continue
            record = reader.read(line, place)
            key = record.key
            asked = planned.get(key)
            if asked is None:
                law = f", law {record.law}," if record.law else ""
                raise StoreError(
                    f"{place}: {record.case} on {record.impl} ({record.on}){law} is not in {path / 'plan.jsonl'}; a record "
                    "answers a planned task"
                )
            msgspec.structs.force_setattr(record, "case", asked.case)
            known = records.get(key)
            if known is not None:
                _check_one_answer(known, record, place)
            if known is None or _later(record, known):
                records[key] = record
            if last is not None and last.key == key:
                last = None
        if last is not None:
            begun[last.key] = Pending(
                task=last,
                stem=file.stem,
                crashed=last.item in _crashed_items(path, file.stem),
                watchdog=_text(path / "watchdogs" / f"{file.stem}.txt"),
                trace=_text(path / "crashes" / f"{file.stem}.txt"),
            )
    pending = tuple(found for key, found in begun.items() if _unsettled(found.task, records.get(key)))
    ordered = {key: records[key] for key in planned if key in records}
    return Run(path, settings, plan, ordered, pending, starts, tuple(notes), being_written)


def _later(record: Record, known: Record) -> bool:
    """Whether a record takes the place of another one: asked once more is later, whatever the machines' clocks say."""
    return (len(record.attempts), record.finished) >= (len(known.attempts), known.finished)


def _check_one_answer(known: Record, record: Record, place: str) -> None:
    """Raise unless of two records of a question the earlier one has no answer, or they are the same line.

    Only a question without an answer is asked again, and the record of that counts how often.
    """
    fewer = min(len(known.attempts), len(record.attempts))
    if record != known and any(len(one.attempts) == fewer and not one.infrastructure for one in (known, record)):
        law = f", law {record.law}," if record.law else ""
        raise StoreError(
            f"{place}: answers {record.case} on {record.impl} ({record.on}){law} a second time, {record.status!r} beside "
            f"{known.status!r}; a question that has its answer is never asked again"
        )


def _unsettled(task: Task, record: Record | None) -> bool:
    """Whether a start is answered by no record, or only by the one that it was to do better than."""
    return record is None or len(record.attempts) < len(task.attempts)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's collector would look through all that was read so far again and again, and find nothing to free."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


_RECORDS = msgspec.json.Decoder(Record)
# What is the same object anyway, such as a status or an empty tuple, is not looked up.
_SAID_ALIKE = ("op", "impl", "on", "source", "worker", "environment", "precision")
_SENTENCES = ("reasons", "diagnosis")
_CHECKED_ALIKE = ("output", "why")


class _RecordReader:
    """Decodes the records of one run; what many of them say alike is kept in memory once."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def read(self, line: bytes, place: str) -> Record:
        record = read_record(line, place)
        _share(record, _SAID_ALIKE, self._kept)
        if record.reasons or record.diagnosis:
            _share(record, _SENTENCES, self._kept)
        for check in record.checks:
            _share(check, _CHECKED_ALIKE, self._kept)
        return record


def _share(found: msgspec.Struct, names: Iterable[str], kept: dict[Any, Any]) -> None:
    """Let these fields of a struct that nobody else has seen yet be objects that equal structs hold too."""
    for name in names:
        value = getattr(found, name)
        known = kept.setdefault(value, value)
        if known is not value:
            msgspec.structs.force_setattr(found, name, known)


def read_record(line: bytes, place: str) -> Record:
    """One record from its line; raises `StoreError` naming `place`."""
    try:
        record = _RECORDS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # A record of another schema is told so, rather than what its lines have that these do not.
        _check_schema(line, place)
        raise StoreError(f"{place}: {error}; it should be a whole record as the sweep wrote it") from None
    if record.schema not in READABLE or not line.startswith(b'{"schema":'):
        _check_schema(line, place)
    if not record.case.startswith(f"{record.op}:"):
        raise StoreError(f"{place}: case {record.case!r} does not belong to op {record.op!r}; a record is never edited")
    if record.status in ("pass", "fail", "vacuous") and verdict_of(record.checks) != record.status:
        raise StoreError(
            f"{place}: status is {record.status!r}, but its checks say {verdict_of(record.checks)!r}; "
            "a record is never edited"
        )
    broken = _contradiction(record)
    if broken:
        raise StoreError(f"{place}: {broken}; a record is never edited")
    return record


def _contradiction(record: Record) -> str:
    """What cannot be true of a record that the sweep wrote; empty when nothing is seen."""
    if record.status in ("unsupported", "error", "memory", "crash", "hang"):
        if not record.reasons:
            return f"status is {record.status!r} without a reason"
        if record.status == "unsupported" and (record.checks or record.fingerprint):
            return "status is 'unsupported', but there is an answer"
    for attempt in record.attempts:
        if not unanswered(attempt.status, attempt.reasons):
            return f"an attempt before it ended as {attempt.status!r}, and an answer is never asked again"
    spent = record.seconds
    if spent.build < 0 or spent.run < 0 or spent.reference < 0 or spent.judge < 0 or spent.compile < 0:
        return f"it took less than no time: {spent}"
    if record.capsule and not _CAPSULE.fullmatch(record.capsule):
        return f"its capsule {record.capsule!r} should be a file in capsules/"
    for check in record.checks:
        if not 0 <= check.wrong <= check.count or (check.passed and check.wrong):
            return f"the check of {check.output} finds {check.wrong} of {check.count} elements wrong and uses {check.use:g}"
        if check.use < 0 or check.use_rms < 0:
            return f"the check of {check.output} uses {check.use:g} of its budget, {check.use_rms:g} rms"
        if check.error < 0 or check.budget < 0:
            return f"the check of {check.output} has a budget of {check.budget:g} and an error of {check.error:g}"
        if check.measure == "exact" and check.passed and check.error:
            return f"the check of {check.output} is exact and passes with an error of {check.error:g}"
    return ""


def _crashed_items(run: Path, stem: str) -> frozenset[str]:
    # Worker files are named pass-execution-worker-pid, and the session's crash list pass-execution.
    path = run / "crashes" / f"{'-'.join(stem.split('-')[:2])}.jsonl"
    if not path.exists():
        return frozenset()
    notes: list[str] = []
    return frozenset(_decoded(line, Crash, place, "a crashed item").crashed for place, line in _lines(path, notes))


def _lines(path: Path, notes: list[str], being_written: bool = False) -> Iterator[tuple[str, bytes]]:
    """Every line with its place; a cut-off last line is noted and left out."""
    try:
        opened = path.open("rb")
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror}; a run directory holds files there that its sweep wrote, and nothing else"
        ) from None
    with opened as file:
        for number, line in enumerate(file, 1):
            place = f"{path} line {number}"
            if line.endswith(b"\n"):
                yield place, line[:-1]
                continue
            try:
                msgspec.json.decode(line)
            except msgspec.DecodeError:
                why = "is writing it or was killed" if being_written else "was killed while writing"
                notes.append(f"{place} is cut off: its writer {why}, the case counts as unfinished")
            else:
                yield place, line
            # More may have been appended meanwhile, and would look like a line of its own.
            return


class _Schema(msgspec.Struct):
    schema: int


def _check_schema(raw: bytes, place: str) -> None:
    found = _decoded(raw, _Schema, place, f"a JSON object with schema {SCHEMA}").schema
    if found not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise StoreError(f"{place}: schema {found}, but this version of mla-oracle reads schemas {known}")


def _decoded(raw: bytes, kind: type[T], place: str, right: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{place}: {error}; it should be {right}") from None


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
