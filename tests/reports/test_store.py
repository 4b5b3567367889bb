"""Is nothing in a run directory lost, overwritten or believed that should not be?"""

import fcntl
import gc
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cases.precision import Precision
from oracle.check import Check
from reports import store
from reports.record import LOST, SCHEMA, Attempt, Environment, Record
from reports.store import (
    Crash,
    RecordFile,
    Run,
    Settings,
    StoreError,
    Task,
    Unwritable,
    append_crash,
    create_run,
    held,
    read_run,
)

HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")
GOOD = Check(output="out", measure="exact", use=0.0, count=4)
BAD = Check(output="out", measure="exact", use=1e9, wrong=1, count=4, got="1", want="2", why="it is exact")


def task(number: int, item: str = "item") -> Task:
    return Task(case=f"op.a:rows={number},seed=0", impl="x-y", on="interpreter", item=item)


def record(of: Task, **other: Any) -> Record:
    known: dict[str, Any] = {"status": "pass", "checks": (GOOD,), "finished": 1.0}
    return Record(case=of.case, op="op.a", impl=of.impl, on=of.on, environment=HERE, **known | other)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    create_run(path, Settings(on=("interpreter",)), [task(n) for n in range(4)])
    return path


def written(run: Path, *lines: Task | Record, stem: str = "0001-interpreter-gw0-1") -> Path:
    path = run / "records" / f"{stem}.jsonl"
    file = RecordFile(path)
    for line in lines:
        file.start(line) if isinstance(line, Task) else file.record(line)
    file.close()
    return path


def test_what_was_written_is_read_back(run: Path) -> None:
    failing = record(task(1), status="fail", checks=(GOOD, BAD), reasons=("why",), diagnosis=("as if",))
    written(run, task(0), record(task(0)), task(1), failing)
    found = read_run(run)
    assert found.settings.on == ("interpreter",)
    assert found.plan == tuple(task(n) for n in range(4))
    assert found.records[task(1).key] == failing
    assert found.open_tasks == (task(2), task(3))
    assert (found.pending, found.notes) == ((), ())


def test_every_line_is_on_disk_before_the_next_step(run: Path) -> None:
    file = RecordFile(run / "records" / "0001-interpreter-gw0-1.jsonl")
    file.start(task(0))
    assert read_run(run).pending[0].task == task(0)
    file.record(record(task(0)))
    assert task(0).key in read_run(run).records


def test_a_start_without_a_record_is_pending_with_its_evidence(run: Path) -> None:
    written(run, task(0), record(task(0)), task(1), stem="0001-interpreter-gw0-1")
    written(run, task(2), stem="0001-interpreter-gw1-2")
    (run / "watchdogs" / "0001-interpreter-gw0-1.txt").write_text("Timeout!")
    append_crash(run, "0001-interpreter", Crash(crashed="item", worker="gw1"))
    first, second = sorted(read_run(run).pending, key=lambda found: found.stem)
    assert (first.task, first.watchdog, first.crashed) == (task(1), "Timeout!", True)
    assert (second.task, second.watchdog) == (task(2), "")


def test_a_crash_of_another_pass_says_nothing(run: Path) -> None:
    written(run, task(0), stem="0002-interpreter-gw0-1")
    append_crash(run, "0001-interpreter", Crash(crashed="item", worker="gw0"))
    assert not read_run(run).pending[0].crashed


def test_a_record_elsewhere_settles_an_old_start(run: Path) -> None:
    written(run, task(0))
    written(run, task(0), record(task(0)), stem="0002-interpreter-gw0-2")
    found = read_run(run)
    assert found.pending == ()
    assert found.starts[task(0).key] == 2


def test_of_two_records_the_one_that_was_asked_once_more_counts_whatever_the_clocks_say(run: Path) -> None:
    crash = Attempt(status="crash", reasons=("gone",))
    written(run, record(task(0), status="crash", checks=(), reasons=("gone",), finished=9.0), stem="0001-a-gw0-1")
    written(run, record(task(0), finished=2.0, attempts=(crash,)), stem="0002-a-gw0-1")
    written(run, record(task(1), finished=2.0, attempts=(crash,)), stem="0003-a-gw0-1")
    written(run, record(task(1), status="crash", checks=(), reasons=("gone",), finished=9.0), stem="0004-a-gw0-1")
    assert [read_run(run).records[task(n).key].status for n in (0, 1)] == ["pass", "pass"]


def test_the_newest_of_two_records_without_an_answer_counts(run: Path) -> None:
    died: dict[str, Any] = {"checks": (), "reasons": ("gone",)}
    written(run, record(task(0), status="hang", finished=2.0, **died), stem="0001-interpreter-gw0-1")
    written(run, record(task(0), status="crash", finished=1.0, **died), stem="0002-interpreter-gw0-1")
    assert read_run(run).records[task(0).key].status == "hang"


CRASHED = Attempt(status="crash", reasons=("gone",))
NO_ANSWER: dict[str, Any] = {"status": "crash", "checks": (), "reasons": ("gone",)}
FAILED: dict[str, Any] = {"status": "fail", "checks": (BAD,)}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FAILED, {"finished": 2.0}),
        ({}, {"finished": 2.0}),
        (FAILED, NO_ANSWER),
        (FAILED | {"attempts": (CRASHED,)}, {"attempts": (CRASHED,)}),
        (FAILED, {"attempts": (CRASHED,)}),
    ],
)
def test_a_second_record_beside_an_answer_is_refused(
    run: Path, first: dict[str, Any], second: dict[str, Any], turned: bool
) -> None:
    pair = (second, first) if turned else (first, second)
    for number, fields in enumerate(pair, 1):
        written(run, record(task(0), **fields), stem=f"{number:04d}-interpreter-gw0-1")
    with pytest.raises(
        StoreError, match=r"0002-.* line 1: answers op\.a:rows=0,seed=0 on x-y .* a second time"
    ) as raised:
        read_run(run)
    assert "\n" not in str(raised.value)


def test_the_same_line_twice_is_one_record(run: Path) -> None:
    for number in (1, 2):
        written(run, record(task(0), **FAILED), stem=f"{number:04d}-interpreter-gw0-1")
    assert read_run(run).records[task(0).key].status == "fail"


@pytest.mark.parametrize("inside", ["records/x.jsonl", "records", "below/it/x", "linked"])
def test_no_run_is_made_inside_another(run: Path, tmp_path: Path, inside: str) -> None:
    (run / "empty").mkdir()
    (run / "linked").symlink_to(run / "empty")
    before = sorted(run.rglob("*"))
    with pytest.raises(StoreError, match=r"lies in the run .*; a run needs a directory outside of every other run"):
        create_run(run / inside, Settings(), [])
    assert sorted(run.rglob("*")) == before
    create_run(tmp_path / "beside", Settings(), [])


def test_settings_of_before_know_no_judge(run: Path) -> None:
    kept = msgspec.json.decode((run / "run.json").read_bytes())
    del kept["judge"]
    (run / "run.json").write_bytes(msgspec.json.encode(kept))
    assert read_run(run).settings.judge == ""


@pytest.mark.parametrize("keep", [1, 20, -5])
def test_a_cut_off_last_line_is_tolerated_and_said(run: Path, keep: int) -> None:
    path = written(run, task(0), record(task(0)), task(1), record(task(1)))
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:-1][:keep])
    found = read_run(run)
    assert task(1).key not in found.records
    assert found.pending[0].task == task(1)
    assert found.notes == (
        f"{path} line 4 is cut off: its writer was killed while writing, the case counts as unfinished",
    )


def test_a_whole_last_line_without_its_end_counts(run: Path) -> None:
    path = written(run, task(0), record(task(0)))
    path.write_bytes(path.read_bytes()[:-1])
    assert task(0).key in read_run(run).records


def test_records_come_in_the_order_of_the_plan(run: Path) -> None:
    written(run, record(task(3)), record(task(0)), stem="0001-interpreter-gw0-1")
    written(run, record(task(2)), record(task(1)), stem="0001-interpreter-gw1-1")
    assert list(read_run(run).records) == [task(n).key for n in range(4)]


def test_what_records_say_alike_is_kept_once(run: Path) -> None:
    written(run, *(record(task(n), source="s" * 64, status="fail", checks=(BAD,)) for n in range(4)))
    found = list(read_run(run).records.values())
    assert list(found) == [record(task(n), source="s" * 64, status="fail", checks=(BAD,)) for n in range(4)]
    for same in (lambda r: r.environment, lambda r: r.source, lambda r: r.impl, lambda r: r.checks[0].why):
        assert len({id(same(made)) for made in found}) == 1


def test_the_collector_looks_at_nothing_of_a_record(run: Path) -> None:
    written(run, record(task(0), attempts=(Attempt(status="crash", reasons=("gone",)),), precision=Precision()))
    (found,) = read_run(run).records.values()
    parts = (found, found.environment, found.seconds, found.attempts[0], found.precision, *found.checks)
    assert not any(gc.is_tracked(part) for part in (*parts, *read_run(run).plan))


def test_reading_leaves_pythons_collector_as_it_was(run: Path) -> None:
    read_run(run)
    assert gc.isenabled()
    (run / "plan.jsonl").write_text("{")
    with pytest.raises(StoreError):
        read_run(run)
    assert gc.isenabled()


class TestState:
    """Whether a run is complete, being written or stopped, whoever looks and whenever."""

    def test_a_run_with_open_tasks_was_stopped(self, run: Path) -> None:
        written(run, *(record(task(n)) for n in range(3)))
        found = read_run(run)
        assert found.state == "stopped"
        assert found.progress == f"{run} was stopped half way: 3 of 4 tasks have a record"

    def test_a_run_with_all_its_records_is_complete(self, run: Path) -> None:
        written(run, *(record(task(n)) for n in range(4)))
        assert (read_run(run).state, read_run(run).progress) == ("complete", "")

    def test_a_run_that_is_held_is_being_written(self, run: Path) -> None:
        written(run, *(record(task(n)) for n in range(4)))
        with held(run):
            found = read_run(run)
            assert found.state == "being written"
            assert found.progress == f"{run} is still being written: 4 of 4 tasks have a record"
            assert read_run(run, own=True).state == "complete"
        assert read_run(run).state == "complete"

    def test_looking_keeps_no_sweep_away(self, run: Path) -> None:
        with held(run):
            pass
        before = sorted(path.name for path in run.iterdir())
        assert not store.is_being_written(run)
        with held(run, patience=0.0):
            assert store.is_being_written(run)
        assert sorted(path.name for path in run.iterdir()) == before

    def test_two_who_look_at_once_do_not_take_each_other_for_a_sweep(self, run: Path) -> None:
        with held(run):
            pass
        with (run / "lock").open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_SH)
            assert not store.is_being_written(run)

    def test_a_run_that_ended_while_it_was_read_is_complete(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written(run, *(record(task(n)) for n in range(4)))
        answers = iter([True, False])
        monkeypatch.setattr(store, "is_being_written", lambda path: next(answers))
        assert read_run(run).state == "complete"

    def test_a_line_that_is_being_written_is_not_called_a_killed_writers(self, run: Path) -> None:
        path = written(run, task(0))
        path.write_bytes(path.read_bytes() + b'{"schema":2,"case":"op')
        with held(run):
            found = read_run(run)
        assert found.notes == (
            f"{path} line 2 is cut off: its writer is writing it or was killed, the case counts as unfinished",
        )
        assert found.pending[0].task == task(0)

    def test_a_file_that_grows_while_it_is_read_is_read_to_where_it_stood(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = written(run, record(task(0)))
        line = msgspec.json.encode(record(task(1))) + b"\n"
        path.write_bytes(path.read_bytes() + line[:50])
        notes: list[str] = []
        lines = store._lines(path, notes)
        assert next(lines)[0] == f"{path} line 1"
        whole = msgspec.json.decode

        def slow(content: bytes) -> Any:
            with path.open("ab") as file:
                file.write(line[50:])
            return whole(content)

        monkeypatch.setattr("reports.store.msgspec.json.decode", slow)
        assert list(lines) == []
        assert len(notes) == 1


def full(path: Path, room: int, write: Any) -> str:
    """What is said when a file may not grow beyond `room` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        write()
    except Unwritable as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    raise AssertionError(f"{path} had room")


def test_a_line_without_room_is_said_and_leaves_no_part(run: Path) -> None:
    path = run / "records" / "0001-interpreter-gw0-1.jsonl"
    file = RecordFile(path)
    file.start(task(0))
    before = path.read_bytes()
    said = full(path, len(before) + 40, lambda: file.record(record(task(0))))
    assert said.startswith(f"{path}: File too large, so the record is not kept; it should be a place with room")
    assert path.read_bytes() == before
    file.record(record(task(0)))
    assert read_run(run).records[task(0).key] == record(task(0))


class TestAskedOnceMore:
    """What ended without an answer is asked once more where the run was asked to, and an answer never."""

    CRASH: dict[str, Any] = {"status": "crash", "checks": (), "reasons": ("the worker died",), "worker": "w"}  # noqa: RUF012
    ATTEMPT = Attempt(status="crash", reasons=("the worker died",), worker="w", finished=1.0)

    @pytest.fixture
    def retried(self, tmp_path: Path) -> Path:
        create_run(tmp_path / "retried", Settings(retry=True), [task(n) for n in range(4)])
        return tmp_path / "retried"

    @pytest.mark.parametrize(
        ("status", "reason", "again"),
        [
            ("crash", "the worker died", True),
            ("hang", "no answer after 7 s", True),
            ("error", f"{LOST}RuntimeError: CUDA error: unknown error", True),
            ("error", "RuntimeError: CUDA error: an illegal memory access was encountered", False),
            ("error", "ValueError: no", False),
            ("memory", "out: written outside", False),
            ("unsupported", LOST, False),
        ],
    )
    def test_only_what_has_no_answer_is_asked_again(self, retried: Path, status: str, reason: str, again: bool) -> None:
        others = [
            record(task(1)),
            record(task(2), status="fail", checks=(BAD,)),
            record(task(3), status="vacuous", checks=()),
        ]
        written(retried, record(task(0), status=status, checks=(), reasons=(reason,)), *others)
        found = read_run(retried)
        assert [each.key for each in found.retries] == ([task(0).key] if again else [])
        assert found.state == ("stopped" if again else "complete")
        assert found.records[task(0).key].infrastructure == again

    def test_nothing_is_asked_again_unless_the_run_was_asked_to(self, run: Path) -> None:
        written(run, *(record(task(n), **self.CRASH) for n in range(4)))
        assert (read_run(run).retries, read_run(run).state) == ((), "complete")

    def test_a_run_that_lacks_only_what_is_asked_once_more_says_so(self, retried: Path) -> None:
        written(retried, record(task(0), **self.CRASH), *(record(task(n)) for n in (1, 2, 3)))
        all_there = "4 of 4 tasks have a record, and 1 is still to be asked once more"
        assert read_run(retried).progress == f"{retried} was stopped half way: {all_there}"
        with held(retried):
            assert read_run(retried).progress == f"{retried} is still being written: {all_there}"

    def test_open_tasks_and_retries_are_both_said(self, retried: Path) -> None:
        written(retried, *(record(task(n), **self.CRASH) for n in (0, 1)))
        assert read_run(retried).progress.endswith("2 of 4 tasks have a record, and 2 are still to be asked once more")

    def test_a_case_is_asked_again_once(self, retried: Path) -> None:
        written(retried, *(record(task(n), **self.CRASH, attempts=(self.ATTEMPT,)) for n in range(4)))
        assert (read_run(retried).retries, read_run(retried).state) == ((), "complete")

    def test_a_second_attempt_knows_of_the_first_and_is_pending_until_its_record(self, retried: Path) -> None:
        written(retried, task(0), record(task(0), **self.CRASH), *(record(task(n)) for n in (1, 2, 3)))
        (again,) = read_run(retried).retries
        assert again.attempts == (self.ATTEMPT,)
        path = written(retried, again, stem="0002-interpreter-gw0-2")
        (pending,) = read_run(retried).pending
        assert pending.task == again
        assert read_run(retried).records[task(0).key].status == "crash"
        answer = record(task(0), attempts=again.attempts, finished=2.0)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(answer) + b"\n")
        found = read_run(retried)
        assert (found.pending, found.records[task(0).key], found.starts[task(0).key]) == ((), answer, 2)
        assert found.state == "complete"

    def test_an_answer_that_is_said_to_have_been_asked_again_is_refused(self, run: Path) -> None:
        written(run, record(task(0), attempts=(Attempt(status="fail", reasons=("wrong",)),)))
        with pytest.raises(StoreError, match="before it ended as 'fail', and an answer is never asked again"):
            read_run(run)


@pytest.mark.parametrize(
    "capsule",
    [
        "/etc/passwd",
        "capsules/a.safetensors/../../x",
        "capsules/../x.safetensors",
        "capsules/a/b.safetensors",
        "capsules/x",
        "x",
    ],
)
def test_a_capsule_lies_in_the_run(run: Path, capsule: str) -> None:
    written(run, record(task(0), capsule=capsule))
    with pytest.raises(StoreError, match="should be a file in capsules/; a record is never edited"):
        read_run(run)


def test_records_of_an_older_schema_are_read(run: Path) -> None:
    path = written(run, record(task(0)))
    line = msgspec.json.decode(path.read_bytes())
    for new in ("attempts", "capsule"):
        del line[new]
    path.write_bytes(msgspec.json.encode(line | {"schema": 1}) + b"\n")
    assert read_run(run).records[task(0).key].attempts == ()
    path.write_bytes(msgspec.json.encode({name: value for name, value in line.items() if name != "schema"}) + b"\n")
    with pytest.raises(StoreError, match="line 1: Object missing required field `schema`"):
        read_run(run)


def _edited(record_line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**record_line, **changes}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"status": "passed"}, "Invalid enum value 'passed'.*should be a whole record"),
        ({"status": "fail"}, "status is 'fail', but its checks say 'pass'; a record is never edited"),
        ({"checks": []}, "status is 'pass', but its checks say 'vacuous'"),
        ({"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}, but this version of mla-oracle reads schemas 1 and {SCHEMA}"),
        ({"schema": None}, "Expected `int`, got `null`"),
        ({"op": "op.b"}, "does not belong to op 'op.b'"),
        ({"case": "op.a:rows=99,seed=0"}, "is not in .*plan.jsonl; a record answers a planned task"),
        ({"impl": "z"}, "is not in .*plan.jsonl"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"environment": {}}, "missing required field"),
        ({"checks": [{"output": "out", "measure": "exact", "use": -5.0}]}, "the check of out uses -5 of its budget"),
        ({"checks": [{"output": "out", "measure": "rms", "use": 0.5, "use_rms": -1}]}, "the check of out uses .* -1"),
        ({"checks": [{"output": "out", "measure": "rms", "use": 0.5, "budget": -1}]}, "the check of out has a budget"),
        (
            {"checks": [{"output": "out", "measure": "rms", "use": 0.5, "error": -1}]},
            "the check of out has .* error of",
        ),
        ({"seconds": {"run": -1.0}}, "it took less than no time: .*run=-1.0"),
    ],
)
def test_an_edited_record_is_named_by_file_and_line(run: Path, changes: dict[str, Any], sentence: str) -> None:
    path = written(run, task(0), record(task(0)), task(1), record(task(1)))
    lines = path.read_bytes().splitlines()
    lines[1] = msgspec.json.encode(_edited(msgspec.json.decode(lines[1]), **changes))
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(StoreError, match=rf"0001-interpreter-gw0-1.jsonl line 2: .*{sentence}") as caught:
        read_run(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"start":{}}', b'{"start": 3}'])
def test_a_broken_line_in_the_middle_is_never_passed_over(run: Path, line: bytes) -> None:
    path = written(run, task(0), record(task(0)))
    path.write_bytes(line + b"\n" + path.read_bytes())
    with pytest.raises(StoreError, match=r"gw0-1.jsonl line 1: "):
        read_run(run)


def test_a_start_of_an_unplanned_case_is_refused(run: Path) -> None:
    written(run, task(99))
    with pytest.raises(StoreError, match=r"line 1: starts a case that .*plan.jsonl does not hold"):
        read_run(run)


@pytest.mark.parametrize(
    ("name", "sentence"), [("run.json", "holds no run.json"), ("plan.jsonl", "plan.jsonl: missing")]
)
def test_a_run_without_its_papers_is_refused(run: Path, name: str, sentence: str) -> None:
    (run / name).unlink()
    with pytest.raises(StoreError, match=sentence):
        read_run(run)


class TestPlanDigest:
    """A run asks what it was made to ask, whoever edits it."""

    def without(self, run: Path, number: int) -> None:
        """As if somebody wished that this task had never been asked."""
        for path in (run / "plan.jsonl", *(run / "records").glob("*.jsonl")):
            lines = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(line for line in lines if f"rows={number},".encode() not in line))

    def test_a_task_that_was_removed_by_hand_is_missed(self, run: Path) -> None:
        written(run, task(0), record(task(0)), task(1), record(task(1), status="fail", checks=(BAD,)))
        self.without(run, 1)
        with pytest.raises(StoreError, match=r"plan.jsonl: is not the plan that .*run.json was written with") as caught:
            read_run(run)
        assert "\n" not in str(caught.value)

    def test_a_task_that_was_added_or_moved_is_seen_too(self, run: Path) -> None:
        plan = (run / "plan.jsonl").read_bytes()
        lines = plan.splitlines(keepends=True)
        for edited in (plan + lines[0], b"".join(lines[::-1]), plan.replace(b"rows=3", b"rows=9"), b""):
            (run / "plan.jsonl").write_bytes(edited)
            with pytest.raises(StoreError, match="is not the plan"):
                read_run(run)

    def test_a_run_of_before_is_read_without(self, run: Path) -> None:
        settings = msgspec.json.decode((run / "run.json").read_bytes())
        assert len(settings.pop("plan_digest")) == 64
        (run / "run.json").write_bytes(msgspec.json.encode(settings))
        assert len(read_run(run).plan) == 4


@pytest.mark.parametrize("name", ["records/zz.jsonl", "crashes/0001-interpreter.jsonl", "records/unreadable.jsonl"])
def test_what_cannot_be_read_is_named_and_said(run: Path, name: str) -> None:
    written(run, task(0))
    if name.endswith("unreadable.jsonl"):
        (run / name).symlink_to(run / "nowhere")
    else:
        (run / name).mkdir()
    with pytest.raises(StoreError, match=rf"{name}: .*; a run directory holds files there that its sweep wrote"):
        read_run(run)


def test_a_run_that_has_no_room_is_named(tmp_path: Path) -> None:
    said = full(tmp_path, 300, lambda: create_run(tmp_path / "run", Settings(), [task(n) for n in range(9)]))
    assert said == f"{tmp_path / 'run'}: File too large; a run needs a directory that can be written, with room"
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    full(tmp_path, 300, lambda: create_run(tmp_path / "run", Settings(), [task(n) for n in range(9)]))
    assert list((tmp_path / "run").iterdir()) == []


def test_settings_of_another_schema_are_refused(run: Path) -> None:
    path = run / "run.json"
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', '"schema": 77'))
    with pytest.raises(StoreError, match=r"run.json: schema 77, but this version"):
        read_run(run)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such run directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="is no run directory"):
        read_run(tmp_path)


def test_a_run_is_never_made_where_something_is(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match="already holds a run; continue it with --resume"):
        create_run(run, Settings(), [])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="is not empty"):
        create_run(other, Settings(), [])
    with pytest.raises(StoreError, match="is a file"):
        create_run(other / "thesis.txt", Settings(), [])
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]


def test_no_two_workers_share_a_file(run: Path) -> None:
    written(run, task(0))
    with pytest.raises(FileExistsError):
        written(run, task(1))


def test_a_run_is_written_by_one_sweep_at_a_time(run: Path) -> None:
    with held(run), pytest.raises(StoreError, match="another sweep is writing this run"), held(run, patience=0.0):
        pass
    with held(run, patience=0.0):
        pass


def test_a_run_can_be_named_without_records(run: Path) -> None:
    found = read_run(run)
    assert isinstance(found, Run)
    assert len(found.open_tasks) == 4
