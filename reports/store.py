"""Where is a run kept, and what has become of each of its tasks?

A run directory holds `run.json` (what was asked for), `plan.jsonl` (the tasks), and what its workers wrote: for each a
file of its own in `records/`, where a start line goes before every case and its record after it. Files are only ever
created and appended to, so a killed run loses nothing but the cases in flight.
"""

import fcntl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from cases.covering import Ledger
from impl.implementation import Execution
from oracle.check import verdict_of
from reports.record import READABLE, SCHEMA, Record

T = TypeVar("T")

Key = tuple[str, str, str, str]


class StoreError(ValueError):
    """A run directory or one of its lines that cannot be used; the message names it and says what would be right."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run was asked for.

    ops, impls: empty for all. on: the executions. cases: the level. patterns: the `--case` words. failed: the run whose
    failures are asked again. deadline: seconds for a case. vllm, aiter: the trees that were pointed at. laws: whether
    laws were asked about too. ledgers: the t-way coverage of the planned cases.
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
    ledgers: tuple[Ledger, ...] = ()


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planned record: a case on an implementation on an execution; tasks of one `item` run together.

    law: the law of the op that is asked about; empty when the answer itself is judged.
    """

    case: str
    impl: str
    on: Execution
    item: str
    law: str = ""

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
    """A start without a record. `watchdog` and `trace` are what was dumped by the deadline and by a fatal signal."""

    task: Task
    stem: str
    crashed: bool
    watchdog: str
    trace: str


@dataclass(frozen=True)
class Run:
    """A run as read from its directory.

    records: the newest record of every key. pending: the starts that no record answers, the newest of each key.
    starts: how often each key was begun. notes: sentences on what was tolerated.
    """

    path: Path
    settings: Settings
    plan: tuple[Task, ...]
    records: Mapping[Key, Record]
    pending: tuple[Pending, ...]
    starts: Mapping[Key, int]
    notes: tuple[str, ...]

    @property
    def open_tasks(self) -> tuple[Task, ...]:
        """The tasks that no record answers yet."""
        return tuple(task for task in self.plan if task.key not in self.records)


def create_run(path: Path, settings: Settings, plan: Iterable[Task]) -> None:
    """Make a run directory; raises `StoreError` rather than write into a directory that holds anything."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path}: is a file, a run needs a directory of its own")
    if path.is_dir() and any(path.iterdir()):
        if (path / "run.json").exists():
            raise StoreError(f"{path}: already holds a run; continue it with --resume {path}, or give another --out")
        raise StoreError(f"{path}: is not empty; a run needs a directory of its own")
    for folder in ("records", "watchdogs", "crashes", "passes", "logs"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    _write_new(path / "plan.jsonl", b"".join(msgspec.json.encode(task) + b"\n" for task in plan))
    _write_new(path / "run.json", msgspec.json.format(msgspec.json.encode(settings)) + b"\n")


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
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


class RecordFile:
    """The file that one worker appends to; every line is flushed, so a killed worker loses at most a part of one."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("xb")

    def start(self, task: Task) -> None:
        """Say that the case is about to run."""
        self._append(msgspec.json.encode(Start(start=task, at=time.time())))

    def record(self, record: Record) -> None:
        """Keep what became of it."""
        self._append(msgspec.json.encode(record))

    def _append(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()

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
    if not path.is_file():
        raise StoreError(f"{path}: missing; a run directory holds its tasks there")
    lines = path.read_bytes().splitlines()
    return tuple(
        _decoded(line, Task, f"{path} line {n}", "a task: case, impl, on, item") for n, line in enumerate(lines, 1)
    )


def read_run(path: Path) -> Run:
    """Everything a run directory says; raises `StoreError` naming file and line of whatever cannot be right.

    Only the last line of a file may be cut off: its worker was killed while writing, and the case counts as unfinished.
    """
    settings = read_settings(path)
    plan = read_plan(path / "plan.jsonl")
    planned = {task.key for task in plan}
    records: dict[Key, Record] = {}
    begun: dict[Key, Pending] = {}
    starts: dict[Key, int] = {}
    notes: list[str] = []
    for file in sorted((path / "records").glob("*.jsonl")):
        crashed = _crashed_items(path, file.stem)
        last: Task | None = None
        for place, line in _lines(file, notes):
            if line.startswith(b'{"start"'):
                task = _decoded(line, Start, place, "a start line: start, at").start
                if task.key not in planned:
                    raise StoreError(f"{place}: starts a case that {path / 'plan.jsonl'} does not hold: {task.case}")
                starts[task.key] = starts.get(task.key, 0) + 1
                last = task
                continue
            record = read_record(line, place)
            if record.key not in planned:
                law = f", law {record.law}," if record.law else ""
                raise StoreError(
                    f"{place}: {record.case} on {record.impl} ({record.on}){law} is not in {path / 'plan.jsonl'}; a record "
                    "answers a planned task"
                )
            known = records.get(record.key)
            if known is None or record.finished >= known.finished:
                records[record.key] = record
            if last is not None and last.key == record.key:
                last = None
        if last is not None:
            begun[last.key] = Pending(
                task=last,
                stem=file.stem,
                crashed=last.item in crashed,
                watchdog=_text(path / "watchdogs" / f"{file.stem}.txt"),
                trace=_text(path / "crashes" / f"{file.stem}.txt"),
            )
    pending = tuple(found for key, found in begun.items() if key not in records)
    return Run(path, settings, plan, records, pending, starts, tuple(notes))


def read_record(line: bytes, place: str) -> Record:
    """One record from its line; raises `StoreError` naming `place`."""
    _check_schema(line, place)
    record = _decoded(line, Record, place, "a whole record as the sweep wrote it")
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
    for check in record.checks:
        if not 0 <= check.wrong <= check.count or (check.passed and check.wrong):
            return f"the check of {check.output} finds {check.wrong} of {check.count} elements wrong and uses {check.use:g}"
        if check.measure == "exact" and check.passed and check.error:
            return f"the check of {check.output} is exact and passes with an error of {check.error:g}"
    return ""


def _crashed_items(run: Path, stem: str) -> frozenset[str]:
    # Worker files are named pass-execution-worker-pid, and the session's crash list pass-execution.
    path = run / "crashes" / f"{'-'.join(stem.split('-')[:2])}.jsonl"
    if not path.is_file():
        return frozenset()
    notes: list[str] = []
    return frozenset(_decoded(line, Crash, place, "a crashed item").crashed for place, line in _lines(path, notes))


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Every line with its place; a cut-off last line is noted and left out."""
    *whole, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        yield f"{path} line {number}", line
    if rest:
        try:
            msgspec.json.decode(rest)
        except msgspec.DecodeError:
            notes.append(
                f"{path} line {len(whole) + 1} is cut off: its writer was killed while writing, "
                "the case counts as unfinished"
            )
        else:
            yield f"{path} line {len(whole) + 1}", rest


def _check_schema(raw: bytes, place: str) -> None:
    class Schema(msgspec.Struct):
        schema: int

    found = _decoded(raw, Schema, place, f"a JSON object with schema {SCHEMA}").schema
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
