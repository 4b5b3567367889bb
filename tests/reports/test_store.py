"""Is nothing in a run directory lost, overwritten or believed that should not be?"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from oracle.check import Check
from reports.record import SCHEMA, Environment, Record
from reports.store import (
    Crash,
    RecordFile,
    Run,
    Settings,
    StoreError,
    Task,
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


def test_the_newest_of_two_records_counts(run: Path) -> None:
    written(run, record(task(0), finished=2.0), stem="0001-interpreter-gw0-1")
    written(run, record(task(0), status="fail", checks=(BAD,), finished=1.0), stem="0002-interpreter-gw0-1")
    assert read_run(run).records[task(0).key].status == "pass"


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


def _edited(record_line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**record_line, **changes}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"status": "passed"}, "Invalid enum value 'passed'.*should be a whole record"),
        ({"status": "fail"}, "status is 'fail', but its checks say 'pass'; a record is never edited"),
        ({"checks": []}, "status is 'pass', but its checks say 'vacuous'"),
        ({"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}, but this version of mla-oracle reads schema {SCHEMA}"),
        ({"schema": None}, "Expected `int`, got `null`"),
        ({"op": "op.b"}, "does not belong to op 'op.b'"),
        ({"case": "op.a:rows=99,seed=0"}, "is not in .*plan.jsonl; a record answers a planned task"),
        ({"impl": "z"}, "is not in .*plan.jsonl"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"environment": {}}, "missing required field"),
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
