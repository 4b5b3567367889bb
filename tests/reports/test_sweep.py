"""Does a sweep end with a record for every case, whatever the suspects and the world do to its processes?"""

import dataclasses
import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from oracle.check import Check
from reports import command
from reports.capsule import read_capsule
from reports.commands.terminal import asked_again
from reports.environment import environment
from reports.judge import judge
from reports.plan import Selection, plan
from reports.plugin import Session, Worker
from reports.record import LOST, Attempt, Environment, Record
from reports.store import (
    Crash,
    RecordFile,
    Run,
    Settings,
    StoreError,
    Task,
    append_crash,
    create_run,
    read_plan,
    read_run,
    read_settings,
)
from reports.sweep import _compile_executor, _items_of_pass, _Tail, exit_code, settled, sweep, worker_environment

FOUR = "standin.double:rows=4,sign=plus,wide=no,seed=0"
ONE = "standin.double:rows=1,sign=plus,wide=no,seed=0"
HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")

# A shell that starts a test run in the background has its processes ignore interrupts.
HEEDS_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


def swept(path: Path, *impls: str, patterns: tuple[str, ...] = (FOUR, ONE), **settings: Any) -> Run:
    found = plan(Selection(ops=("standin.double",), impls=impls, patterns=patterns))
    create_run(path, Settings(on=("interpreter",), **{"workers": 2, "deadline": 4.0} | settings), found.tasks)
    with (path / "console.txt").open("w") as file:
        return sweep(path, Console(file=file))


@pytest.fixture(scope="module")
def whole(standins: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One sweep over every stand-in: twenty-six tasks, six of which end their worker."""
    return swept(tmp_path_factory.mktemp("sweep") / "run")


STATUSES = {
    "standin-right": ("pass", "pass"),
    "standin-wrong": ("fail", "fail"),
    "standin-own-wrong": ("fail", "fail"),
    "standin-raises": ("error", "pass"),
    "standin-aborts": ("crash", "pass"),
    "standin-exits": ("crash", "pass"),
    "standin-killed": ("pass", "pass"),
    "standin-hangs": ("hang", "pass"),
    "standin-writes-outside": ("memory", "memory"),
    "standin-writes-input": ("memory", "memory"),
    "standin-returns-nothing": ("error", "error"),
    "standin-declines": ("unsupported", "unsupported"),
    "standin-naps": ("pass", "pass"),
}


def test_every_case_has_its_record_and_its_status(whole: Run) -> None:
    assert whole.open_tasks == ()
    assert {
        name: tuple(whole.records[case, name, "interpreter", ""].status for case in (FOUR, ONE)) for name in STATUSES
    } == STATUSES


@pytest.mark.parametrize(
    ("impl", "sentence"),
    [
        ("standin-aborts", "the worker died: Fatal Python error: Aborted in standin_ops.py:"),
        ("standin-exits", "the worker died twice in this case and left no trace: it ended itself or was killed"),
        ("standin-hangs", "no answer after 4 s, the worker was ended in standin_ops.py:"),
    ],
)
def test_a_dead_worker_is_described(whole: Run, impl: str, sentence: str) -> None:
    record = whole.records[FOUR, impl, "interpreter", ""]
    assert record.reasons[0].startswith(sentence)
    assert record.environment.torch


def test_a_worker_that_was_killed_is_told_by_the_record_of_the_second_answer(whole: Run) -> None:
    killed = whole.records[FOUR, "standin-killed", "interpreter", ""]
    exits = whole.records[FOUR, "standin-exits", "interpreter", ""]
    assert [attempt.status for attempt in killed.attempts] == ["crash"]
    assert killed.attempts[0].reasons == ("the worker died and left no trace: it ended itself or was killed",)
    assert killed.attempts[0].worker.startswith("0001-interpreter-gw")
    assert (exits.status, exits.attempts[0].reasons) == ("crash", killed.attempts[0].reasons)
    assert {key for key, record in whole.records.items() if record.attempts} == {killed.key, exits.key}
    said = Console(record=True, width=1000, file=io.StringIO())
    said.print(*asked_again(list(whole.records.values())))
    assert said.export_text() == "2 cases asked once more after 2 crash: 1 crash, 1 pass\n"


def test_a_case_whose_worker_was_killed_from_outside_is_asked_again(whole: Run) -> None:
    assert whole.starts[FOUR, "standin-killed", "interpreter", ""] == 2
    assert whole.starts[FOUR, "standin-hangs", "interpreter", ""] == 1
    assert whole.starts[FOUR, "standin-right", "interpreter", ""] == 1


def test_workers_write_files_of_their_own_with_one_thread_each(whole: Run) -> None:
    names = [path.stem for path in (whole.path / "records").glob("*.jsonl")]
    assert len(names) == len(set(names)) >= 5
    assert worker_environment("interpreter")["OMP_NUM_THREADS"] == "1"


def test_the_exit_code_is_that_of_the_records(whole: Run) -> None:
    assert exit_code(whole) == 1
    right = [key for key in whole.records if key[1] in ("standin-right", "standin-declines")]
    kept = dataclasses.replace(
        whole, records={key: whole.records[key] for key in right}, plan=tuple(t for t in whole.plan if t.key in right)
    )
    assert exit_code(kept) == 0


def test_records_come_in_the_order_of_the_plan_and_the_last_line_counts_them_all(whole: Run) -> None:
    assert list(whole.records) == [task.key for task in whole.plan]
    assert whole.state == "complete"
    last = (whole.path / "console.txt").read_text().splitlines()[-1]
    assert last.startswith("26 of 26 cases: 2 crash, 3 error, 4 fail, 1 hang, 4 memory, 10 pass, 2 unsupported, ")


def test_a_finished_run_is_resumed_without_a_session(whole: Run) -> None:
    before = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    again = sweep(whole.path, Console(quiet=True))
    assert again.records == whole.records
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == before


def test_a_killed_sweep_takes_its_workers_along_and_is_resumed_where_it_was(
    standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_NAP", "0.4")
    path = tmp_path / "run"
    arguments = ["sweep", "--op", "standin.double", "--impl", "standin-naps", "--workers", "2", "--out", str(path)]
    script = f"{HEEDS_INTERRUPTS}; import standin_plugin; from reports.command import main; raise SystemExit(main({arguments!r}))"
    quiet = subprocess.DEVNULL
    killed = subprocess.Popen(
        [sys.executable, "-c", script], env=worker_environment("interpreter"), stdout=quiet, stderr=quiet
    )
    wait_until(lambda: (path / "run.json").exists() and len(read_run(path).records) >= 2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    workers = [int(file.stem.rsplit("-", 1)[1]) for file in (path / "records").glob("*.jsonl")]
    wait_until(lambda: not any(alive(pid) for pid in workers))
    before = {file: file.read_bytes() for file in (path / "records").glob("*.jsonl")}
    interrupted = read_run(path)
    assert interrupted.open_tasks
    done = sweep(path, Console(quiet=True))
    assert done.open_tasks == ()
    assert all(record.status == "pass" for record in done.records.values())
    assert all(file.read_bytes() == content for file, content in before.items())
    assert all(done.records[key] == record for key, record in interrupted.records.items())
    assert sum(count - 1 for count in done.starts.values()) <= 2


def test_a_worker_that_was_killed_just_before_an_interrupt_is_still_told(
    standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "killed"
    monkeypatch.setenv("STANDIN_MARKER", str(marker))
    path = tmp_path / "run"
    arguments = ["sweep", "--op", "standin.double", "--impl", "standin-killed", "--case", FOUR, "--out", str(path)]
    script = f"{HEEDS_INTERRUPTS}; import standin_plugin; from reports.command import main; raise SystemExit(main({arguments!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=worker_environment("interpreter"), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    began = time.monotonic()
    while not marker.exists() and time.monotonic() - began < 60:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1].startswith("mla-oracle: interrupted")
    (record,) = sweep(path, Console(quiet=True)).records.values()
    assert (record.status, len(record.attempts)) == ("pass", 1)


def test_an_interrupt_is_for_the_sweep_alone_and_loses_and_blames_nothing(
    standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_NAP", "0.4")
    path = tmp_path / "run"
    arguments = ["sweep", "--op", "standin.double", "--impl", "standin-naps", "--workers", "2", "--out", str(path)]
    script = f"{HEEDS_INTERRUPTS}; import standin_plugin; from reports.command import main; raise SystemExit(main({arguments!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=worker_environment("interpreter"), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: (path / "run.json").exists() and len(read_run(path).records) >= 2)
    workers = [int(file.stem.rsplit("-", 1)[1]) for file in (path / "records").glob("*.jsonl")]
    assert workers
    assert all(os.getpgid(pid) != process.pid for pid in workers if alive(pid))
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said == f"mla-oracle: interrupted; continue with: mla-oracle sweep --resume {path}\n"
    wait_until(lambda: not any(alive(pid) for pid in workers))
    interrupted = read_run(path)
    assert interrupted.state == "stopped"
    assert not any(found.crashed for found in interrupted.pending)
    done = sweep(path, Console(quiet=True))
    assert done.state == "complete"
    assert {(record.status, record.attempts) for record in done.records.values()} == {("pass", ())}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to that")


def test_a_session_that_cannot_start_ends_the_sweep_and_is_the_harness_fault(
    standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin_anywhere")
    monkeypatch.setattr("reports.sweep._BARREN_PASSES", 1)
    run = swept(tmp_path / "run", "standin-right")
    assert len(run.open_tasks) == 2
    assert exit_code(run) == 3
    assert exit_code(run, allow_unjudged=True) == 3
    assert "no_such_plugin_anywhere" in (tmp_path / "run" / "logs" / "0001-interpreter.txt").read_text()


def test_workers_that_die_before_they_are_ready_end_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def left(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", left)
    nodes = [SimpleNamespace(gateway=SimpleNamespace(id=f"gw{n}")) for n in range(40)]
    session = Session(tmp_path, "0001-interpreter")
    for node in nodes[:20]:
        session.pytest_testnodeready(node)
        session.pytest_testnodedown(node, "killed by a case")
    for node in nodes[20:23]:
        session.pytest_testnodedown(node, "stillborn")
    session.pytest_testnodedown(nodes[23], None)
    with pytest.raises(SystemExit):
        session.pytest_testnodedown(nodes[24], "stillborn")
    assert "4 workers in a row died before they were ready: stillborn" in capfd.readouterr().out


@pytest.fixture(scope="module")
def retried(standins: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A sweep that asks once more; one worker, so that capsules can be counted."""
    folder = tmp_path_factory.mktemp("retried")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_ABORTED", str(folder / "aborted"))
        names = ("standin-aborts", "standin-hangs", "standin-wrong", "standin-raises", "standin-declines")
        return swept(folder / "run", *names, workers=1, deadline=2.0, retry=True, capsules=1)


def test_a_crash_and_a_hang_are_asked_once_more_visibly(retried: Run) -> None:
    aborts = retried.records[FOUR, "standin-aborts", "interpreter", ""]
    hangs = retried.records[FOUR, "standin-hangs", "interpreter", ""]
    assert (aborts.status, [attempt.status for attempt in aborts.attempts]) == ("pass", ["crash"])
    assert aborts.attempts[0].reasons[0].startswith("the worker died: Fatal Python error: Aborted")
    assert (hangs.status, [attempt.status for attempt in hangs.attempts]) == ("hang", ["hang"])
    assert retried.state == "complete"
    last = (retried.path / "console.txt").read_text().splitlines()[-1]
    assert last.startswith("10 of 10 cases: 1 error, 2 fail, 1 hang, 4 pass, 2 unsupported")


def test_an_answer_is_never_asked_again(retried: Run) -> None:
    again = {key for key, record in retried.records.items() if record.attempts}
    assert again == {(FOUR, "standin-aborts", "interpreter", ""), (FOUR, "standin-hangs", "interpreter", "")}
    assert {key: count for key, count in retried.starts.items() if count > 1} == dict.fromkeys(again, 2)


def test_what_is_asked_once_more_stands_alone_in_a_later_pass(retried: Run) -> None:
    passes = sorted((retried.path / "passes").glob("*.jsonl"))
    tasks = [read_plan(path) for path in passes]
    first = next(n for n, found in enumerate(tasks) if any(task.attempts for task in found))
    assert not any(task.attempts for found in tasks[:first] for task in found)
    assert all(task.attempts for task in tasks[first])
    assert len({task.item for task in tasks[first]}) == len(tasks[first]) == 2


def test_the_first_failures_of_a_kind_are_kept_as_capsules(retried: Run) -> None:
    kept = {key: record for key, record in retried.records.items() if record.capsule}
    assert sorted((impl, status) for (_, impl, _, _), status in ((key, kept[key].status) for key in kept)) == [
        ("standin-raises", "error"),
        ("standin-wrong", "fail"),
    ]
    assert len(list((retried.path / "capsules").iterdir())) == 2
    for record in kept.values():
        inside, inputs = read_capsule(retried.path / record.capsule)
        assert inside == msgspec.structs.replace(record, capsule="")
        assert len(inputs.x) in (1, 4)


def test_a_run_without_capsules_keeps_none(whole: Run) -> None:
    assert not any(record.capsule for record in whole.records.values())
    assert list((whole.path / "capsules").iterdir()) == []


def test_a_full_disk_ends_the_sweep_with_a_sentence_and_loses_nothing(
    standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    monkeypatch.setenv("STANDIN_ROOM", "500")
    with pytest.raises(
        StoreError, match=r"cannot write there, as on a full disk; make room, then: mla-oracle sweep --re"
    ):
        swept(path, "standin-right", workers=1)
    stopped = read_run(path)
    assert (stopped.state, len(stopped.open_tasks), stopped.notes) == ("stopped", 2, ())
    monkeypatch.delenv("STANDIN_ROOM")
    assert sweep(path, Console(quiet=True)).state == "complete"


def test_a_sweep_that_cannot_write_its_pass_says_so(
    standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tasks: object) -> None:
        raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(
            StoreError,
            match=r"run: the sweep cannot write there: No space left on device; make room, then: mla-oracle sw",
        ),
    ):
        patch.setattr("reports.sweep._write_pass", full)
        swept(tmp_path / "run", "standin-right")
    assert read_run(tmp_path / "run").state == "stopped"


class TestWorker:
    """What a worker writes about a case after which its device is dead; no device is needed to tell."""

    class Left(BaseException):
        pass

    @pytest.fixture
    def ask(self, standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
        def left(code: int) -> None:
            raise self.Left

        silent = SimpleNamespace(**dict.fromkeys(("enable", "dump_traceback_later"), lambda *a, **k: None))
        silent.cancel_dump_traceback_later = lambda: None
        monkeypatch.setattr("reports.plugin.faulthandler", silent)
        monkeypatch.setattr("reports.plugin.threading", SimpleNamespace(Thread=lambda **k: SimpleNamespace(start=int)))
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(os, "_exit", left)

        def asked(impl: str, dead: bool = True, attempts: tuple[Attempt, ...] = (), **settings: Any) -> Record:
            monkeypatch.setattr("reports.plugin.device_is_dead", lambda on: dead)
            task = Task(case=FOUR, impl=impl, on="interpreter", item="item", attempts=attempts)
            path = tmp_path / "run"
            create_run(path, Settings(on=("interpreter",), **settings), [msgspec.structs.replace(task, attempts=())])
            try:
                Worker(path, "0001-interpreter", "gw0").run_task(task)
            except self.Left:
                assert dead
            (record,) = read_run(path).records.values()
            return record

        return asked

    def test_an_error_that_takes_the_device_along_says_so_first(self, ask: Callable[..., Record]) -> None:
        record = ask("standin-raises")
        assert (record.status, record.infrastructure) == ("error", True)
        assert record.reasons[0].startswith(f"{LOST}ArithmeticError: no doubling today")

    def test_an_error_on_a_living_device_is_an_error(self, ask: Callable[..., Record]) -> None:
        record = ask("standin-raises", dead=False)
        assert record.reasons[0].startswith("ArithmeticError: no doubling today")
        assert not record.infrastructure

    def test_a_second_attempt_writes_down_the_first(self, ask: Callable[..., Record]) -> None:
        before = Attempt(status="crash", reasons=("gone",))
        record = ask("standin-right", dead=False, attempts=(before,))
        assert (record.status, record.attempts) == ("pass", (before,))

    @pytest.mark.parametrize("broken", ["write_capsule", "shutil.disk_usage", "too large"])
    def test_a_capsule_that_cannot_be_written_costs_no_record(
        self, ask: Callable[..., Record], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
    ) -> None:
        def full(path: Path, *_: object) -> None:
            if isinstance(path, Path) and path.suffix == ".part":
                path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        if broken == "too large":
            monkeypatch.setattr("reports.capsule._size", lambda trial: 33 * 2**20)
        else:
            monkeypatch.setattr(f"reports.capsule.{broken}", full)
        record = ask("standin-wrong", capsules=1)
        assert (record.status, record.capsule) == ("fail", "")
        assert list((tmp_path / "run" / "capsules").iterdir()) == []


class TestSettling:
    """What a start without a record is taken for; no process is needed to tell."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        path = tmp_path / "run"
        create_run(path, Settings(on=("interpreter",), deadline=7.0), [self.task])
        return path

    task = Task(case="op.a:rows=1,seed=0", impl="x-y", on="interpreter", item="item")

    def begun(
        self, run: Path, number: int = 1, watchdog: str = "", trace: str = "", crashed: bool = True,
        task: Task = task,
    ) -> None:  # fmt: skip
        stem = f"{number:04d}-interpreter-gw0-{number}"
        file = RecordFile(run / "records" / f"{stem}.jsonl")
        file.start(task)
        file.close()
        (run / "watchdogs" / f"{stem}.txt").write_text(watchdog)
        (run / "crashes" / f"{stem}.txt").write_text(trace)
        if crashed:
            append_crash(run, f"{number:04d}-interpreter", Crash(crashed=task.item, worker="gw0"))

    def status(self, run: Path) -> str | None:
        found = settled(run, "0009-interpreter-sweep").records.get(self.task.key)
        return None if found is None else found.status

    def test_a_watchdog_that_barked_means_hang(self, run: Path) -> None:
        self.begun(run, watchdog="Timeout (0:00:07)!\n", trace="Fatal Python error: Aborted\n")
        assert self.status(run) == "hang"

    def test_a_trace_means_crash_at_once(self, run: Path) -> None:
        self.begun(run, trace="Fatal Python error: Segmentation fault\n")
        assert self.status(run) == "crash"

    def again(self, run: Path, number: int) -> Task:
        """The task as the next pass asks it."""
        found = read_run(run)
        (task,) = _items_of_pass(found.open_tasks or found.retries, found.pending, number)
        return task

    def test_no_trace_is_an_attempt_once_and_a_crash_twice(self, run: Path) -> None:
        self.begun(run)
        assert self.status(run) is None
        again = self.again(run, 2)
        (first,) = again.attempts
        assert (first.status, first.worker) == ("crash", "0001-interpreter-gw0-1")
        self.begun(run, number=2, task=again)
        assert self.status(run) == "crash"
        record = read_run(run).records[self.task.key]
        assert record.reasons == (
            "the worker died twice in this case and left no trace: it ended itself or was killed",
        )
        assert record.attempts == (first,)

    def test_a_stop_between_two_ends_without_a_trace_forgets_neither(self, run: Path) -> None:
        self.begun(run)
        first = self.again(run, 2)
        self.begun(run, number=2, crashed=False, task=first)
        assert self.status(run) is None
        assert self.again(run, 3).attempts == first.attempts
        self.begun(run, number=3, task=self.again(run, 3))
        assert self.status(run) == "crash"

    def test_a_stop_before_an_end_without_a_trace_counts_for_none(self, run: Path) -> None:
        self.begun(run, crashed=False)
        assert self.again(run, 2).attempts == ()
        self.begun(run, number=2)
        assert self.status(run) is None
        assert len(self.again(run, 3).attempts) == 1

    def test_a_trace_on_the_second_time_keeps_the_first(self, run: Path) -> None:
        self.begun(run)
        again = self.again(run, 2)
        assert len(again.attempts) == 1
        self.begun(run, number=2, trace="Fatal Python error: Segmentation fault\n", task=again)
        assert self.status(run) == "crash"
        assert read_run(run).records[self.task.key].attempts == again.attempts

    def test_what_was_not_begun_when_another_case_of_its_item_died_is_not_blamed(self, run: Path) -> None:
        other = msgspec.structs.replace(self.task, case="op.a:rows=2,seed=0")
        create_run(run.with_name("two"), Settings(on=("interpreter",)), [self.task, other])
        self.begun(run.with_name("two"))
        found = read_run(run.with_name("two"))
        again = _items_of_pass(found.open_tasks, found.pending, 2)
        assert [len(task.attempts) for task in again] == [1, 0]
        assert len({task.item for task in again}) == 2

    def test_a_stop_of_the_whole_session_is_never_a_crash(self, run: Path) -> None:
        for number in range(1, 5):
            self.begun(run, number=number, crashed=False)
            assert self.status(run) is None

    def test_settling_twice_writes_once(self, run: Path) -> None:
        self.begun(run, watchdog="Timeout")
        assert self.status(run) == self.status(run) == "hang"
        assert len(list((run / "records").glob("*-sweep*.jsonl"))) == 1

    def test_a_retry_without_a_trace_is_asked_again_before_it_is_a_crash(self, run: Path) -> None:
        (run / "run.json").write_bytes(msgspec.json.encode(Settings(on=("interpreter",), deadline=7.0, retry=True)))
        self.begun(run, watchdog="Timeout")
        settled(run, "0002-interpreter-sweep")
        for number in (3, 4):
            again = self.again(run, number)
            assert [attempt.status for attempt in again.attempts] == ["hang", "crash"][: number - 2]
            self.begun(run, number=number, task=again)
            found = settled(run, f"{number + 5:04d}-interpreter-sweep")
            record = found.records[self.task.key]
            assert (record.status, len(record.attempts)) == (("hang", 0) if number == 3 else ("crash", 2))
        assert record.attempts == again.attempts
        assert (found.retries, found.state) == ((), "complete")

    def test_the_innermost_frame_is_that_of_the_case(self, run: Path) -> None:
        dump = (
            'Timeout (0:00:07)!\nThread 0x1 (most recent call first):\n  File "/p/threading.py", line 1 in wait\n\n'
            'Thread 0x2 (most recent call first):\n  File "/k/decode_triton.py", line 31 in run\n'
            '  File "/h/reports/execute.py", line 9 in attempt\n'
        )
        self.begun(run, watchdog=dump)
        record = settled(run, "0009-interpreter-sweep").records[self.task.key]
        assert record.reasons == ("no answer after 7 s, the worker was ended in decode_triton.py:31 run",)


def test_the_count_of_a_running_sweep_takes_each_task_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    one, two = (Task(case=f"op.a:rows={n},seed=0", impl="x-y", on="interpreter", item="i") for n in (1, 2))
    create_run(path, Settings(), [one, two])
    tail = _Tail(path)
    file = RecordFile(path / "records" / "0001-interpreter-gw0-1.jsonl")
    lost = Attempt(status="crash", reasons=("no trace",))
    known: dict[str, Any] = {"op": "op.a", "impl": "x-y", "on": "interpreter", "environment": HERE}
    # The end without a trace had no record of its own, the crash of the other one had.
    file.record(Record(case=one.case, status="pass", checks=(), attempts=(lost,), **known))
    file.record(Record(case=two.case, status="crash", reasons=("trace",), **known))
    tail.update()
    assert (str(tail), tail.done) == ("1 crash, 1 pass", 2)
    file.record(Record(case=two.case, status="pass", checks=(), attempts=(lost,), **known))
    tail.update()
    assert (str(tail), tail.done) == ("2 pass", 2)
    file.close()


class TestResumed:
    """A run has one source and one environment, however often it was stopped."""

    @pytest.fixture
    def stopped(self, standins: ModuleType, tmp_path: Path) -> Path:
        """A run with one of two records, as this process would make it."""
        path = tmp_path / "run"
        found = plan(Selection(ops=("standin.double",), impls=("standin-right",), patterns=(FOUR, ONE)))
        create_run(path, Settings(on=("interpreter",), workers=1, deadline=9.0), found.tasks)
        self.answered(path, found.tasks[0])
        return path

    def answered(self, path: Path, task: Task, source: str = "standin-right", **elsewhere: str) -> None:
        here = msgspec.structs.replace(environment("interpreter"), **elsewhere)
        for old in (path / "records").glob("*.jsonl"):
            old.unlink()
        file = RecordFile(path / "records" / "0001-interpreter-gw0-1.jsonl")
        file.record(
            Record(
                case=task.case, op="standin.double", impl=task.impl, on=task.on, status="unsupported", environment=here,
                reasons=("no",), source=hashlib.sha256(source.encode()).hexdigest(),
            )
        )  # fmt: skip
        file.close()

    @pytest.mark.parametrize("name", ["commit", "torch", "device", "triton", "vllm"])
    def test_another_environment_is_named_and_refused(
        self, stopped: Path, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.answered(stopped, read_run(stopped).plan[0], **{name: "of yesterday"})
        before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.name != "lock"}
        assert command.main(["sweep", "--resume", str(stopped)]) == 2
        said = capsys.readouterr().err
        assert f"{stopped}: {name} on interpreter is 'of yesterday' in its records, but '" in said
        assert said.count("\n") == 1
        after = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.name != "lock"}
        assert after == before
        assert len(read_run(stopped).records) == 1

    def test_another_source_is_named_and_refused(self, stopped: Path) -> None:
        self.answered(stopped, read_run(stopped).plan[0], source="edited since")
        with pytest.raises(StoreError, match=r"the source of standin\.double on standin-right on interpreter is '"):
            sweep(stopped, Console(quiet=True))

    def test_another_judge_is_named_and_refused(self, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = stopped / "run.json"
        kept = read_settings(stopped)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(kept, judge="0.0.9 of-yesterday")))
        assert command.main(["sweep", "--resume", str(stopped)]) == 2
        said = capsys.readouterr().err
        assert f"{stopped}: was begun with the cases and the judge '0.0.9 of-yesterday', but they are '" in said
        assert said.count("\n") == 1
        assert len(read_run(stopped).records) == 1
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(kept, judge=judge())))
        assert sweep(stopped, Console(quiet=True)).state == "complete"

    def test_every_new_run_keeps_its_judge(
        self, standins: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = [
            "--op",
            "standin.double",
            "--impl",
            "standin-right",
            "--case",
            FOUR,
            "--out",
            str(tmp_path / "new"),
        ]
        assert command.main(["sweep", *arguments]) == 0
        assert read_settings(tmp_path / "new").judge == judge()
        assert "No Triton kernel was judged: none was asked." in capsys.readouterr().out

    @pytest.mark.parametrize(
        "name", ["cases/cache/op.py", "oracle/check.py", "impl/executions/interpreter.py", "reports/execute.py"]
    )
    def test_what_decides_a_verdict_decides_the_judge(self, tmp_path: Path, name: str) -> None:
        for file in (name, "reports/html/page.py", "impl/cache/op.py"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("A = 1\n")
        (tmp_path / "pyproject.toml").write_text('[project]\nname = "mla-oracle"\nversion = "9.9"\n')
        before = judge(tmp_path)
        assert re.fullmatch("9[.]9 [0-9a-f]{64}", before)
        (tmp_path / "reports/html/page.py").write_text("A = 2\n")
        (tmp_path / "impl/cache/op.py").write_text("A = 2\n")
        assert judge(tmp_path) == before
        (tmp_path / name).write_text("A = 2\n")
        changed = judge(tmp_path)
        assert changed != before
        (tmp_path / name).rename((tmp_path / name).with_name("laws.py"))
        assert judge(tmp_path) != changed

    def test_the_same_is_resumed_wherever_its_tree_lies(self, stopped: Path) -> None:
        done = sweep(stopped, Console(quiet=True))
        assert sorted(record.status for record in done.records.values()) == ["pass", "unsupported"]

    def test_what_is_complete_asks_nothing_and_is_read_anywhere(self, whole: Run, tmp_path: Path) -> None:
        shutil.copytree(whole.path, tmp_path / "copy")
        for path in (tmp_path / "copy" / "records").glob("*.jsonl"):
            path.write_text(re.sub('"torch":"[^"]*"', '"torch":"of yesterday"', path.read_text()))
        assert sweep(tmp_path / "copy", Console(quiet=True)).state == "complete"


class TestExitCode:
    def run_of(self, *statuses: Any, reasons: tuple[str, ...] = (), unanswered: int = 0) -> Run:
        count = len(statuses) + unanswered
        common: dict[str, Any] = {
            "op": "o.p",
            "impl": "x",
            "on": "interpreter",
            "reasons": reasons,
            "environment": HERE,
        }
        tasks = [Task(case=f"o.p:rows={n}", impl="x", on="interpreter", item="i") for n in range(count)]
        records = {
            task.key: Record(case=task.case, status=status, **common)
            for task, status in zip(tasks, statuses, strict=False)
        }
        return Run(Path(), Settings(), tuple(tasks), records, (), {}, ())

    @pytest.mark.parametrize("status", ["fail", "memory", "error", "crash", "hang", "vacuous"])
    def test_one_bad_record_among_good_ones_counts(self, status: str) -> None:
        assert exit_code(self.run_of("pass", status, "pass")) == 1
        assert exit_code(self.run_of("pass", status), allow_unjudged=True) == 1

    def test_passes_and_declared_reasons_are_fine(self) -> None:
        assert exit_code(self.run_of("pass", "unsupported")) == 0

    def test_nothing_judged_is_not_fine_unless_allowed(self) -> None:
        assert exit_code(self.run_of("unsupported", "unsupported")) == 1
        assert exit_code(self.run_of("unsupported"), allow_unjudged=True) == 0

    def test_the_harness_is_never_a_finding(self) -> None:
        assert exit_code(self.run_of("pass", unanswered=1)) == 3
        assert exit_code(self.run_of("error", reasons=("the harness itself broke in judging: KeyError: 'x'",))) == 3


def test_the_files_of_a_run_are_json_lines(whole: Run) -> None:
    for path in (*(whole.path / "records").glob("*.jsonl"), whole.path / "plan.jsonl"):
        for line in path.read_bytes().splitlines():
            assert isinstance(msgspec.json.decode(line), dict)
    assert all(isinstance(check, Check) for record in whole.records.values() for check in record.checks)


def test_an_executor_that_does_not_start_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for the interpreter.
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback >&2\necho 'OSError: no [room]' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    said = io.StringIO()
    _compile_executor("isa:gfx950", Console(file=said, width=200))
    assert said.getvalue() == "the executor of machine code does not start: OSError: no [room]\n"


def test_an_interrupt_ends_the_compilation_of_the_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for the interpreter, and an interrupt just when the wait is told.
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    python.chmod(0o755)

    def interrupted(_self: Console, *_said: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("reports.sweep._LOADED", 1.0)
    monkeypatch.setattr(Console, "print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _compile_executor("isa:gfx950", Console())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
