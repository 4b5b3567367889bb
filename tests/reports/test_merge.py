"""Is a merged run what one sweep would have made, and is everything else refused?"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oracle.check import Check
from reports import command
from reports.merge import merge, mixed_of
from reports.record import SCHEMA, Attempt, Environment, Record
from reports.shards import Shard, part_of, whole_of
from reports.store import RecordFile, Settings, StoreError, Task, create_run, held, read_run

HERE = Environment(
    machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu", aiter="1@abc in /home/one/aiter"
)
GOOD = Check(output="out", measure="exact", use=0.0, count=4)
PLAN = [
    Task(case=f"op.a:rows={n},seed=0", impl="x-y", on=on, item=f"i{n // 2}", law=law)
    for on in ("interpreter", "hip")
    for law in ("", "L1")
    for n in range(5)
]
SETTINGS = Settings(on=("interpreter", "hip"), deadline=7.0, whole=whole_of(PLAN))


def record(of: Task, **other: Any) -> Record:
    known: dict[str, Any] = {"status": "pass", "checks": (GOOD,), "finished": 1.0, "environment": HERE, "source": "s"}
    return Record(case=of.case, op="op.a", impl=of.impl, on=of.on, law=of.law, **known | other)


Change = Callable[[Task, Record], Record | None]


def shard(
    folder: Path, index: int, count: int = 3, plan: list[Task] = PLAN, change: Change | None = None, **settings: Any
) -> Path:
    """The finished run of a shard; `change` edits its records, or leaves one out."""
    path = folder / f"shard{index}"
    how = {"shard": f"{index}/{count}", "whole": whole_of(plan), "created": float(index)} | settings
    tasks = part_of(plan, Shard(index, count), None).tasks
    create_run(path, msgspec.structs.replace(SETTINGS, **how), tasks)
    file = RecordFile(path / "records" / "0001-interpreter-gw0-1.jsonl")
    for task in reversed(tasks):
        file.start(task)
        written = change(task, record(task)) if change else record(task)
        if written is not None:
            file.record(written)
    file.close()
    return path


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return [shard(tmp_path, index) for index in (1, 2, 3)]


def files(path: Path) -> dict[Path, bytes]:
    return {found: found.read_bytes() for found in path.rglob("*") if found.is_file()}


def refused(paths: list[Path], out: Path, sentence: str, **how: Any) -> None:
    before = files(out.parent)
    with pytest.raises(StoreError, match=sentence) as caught:
        merge(paths, out, **how)
    assert "\n" not in str(caught.value)
    assert files(out.parent) == before
    assert not list(out.parent.glob(".*"))


def test_a_merged_run_is_the_run_of_the_whole_plan(shards: list[Path], tmp_path: Path) -> None:
    before = files(tmp_path)
    joined = merge(shards[::-1], tmp_path / "deep" / "merged")
    assert list(joined.plan) == PLAN
    assert list(joined.records) == [task.key for task in PLAN]
    assert list(joined.records.values()) == [record(task) for task in PLAN]
    assert (joined.open_tasks, joined.pending, joined.notes, joined.state) == ((), (), (), "complete")
    assert (joined.settings.shard, joined.settings.deadline, joined.settings.created) == ("", 7.0, 1.0)
    assert joined.settings.merged == tuple(map(str, shards[::-1]))
    assert read_run(tmp_path / "deep" / "merged") == joined
    assert {path: content for path, content in files(tmp_path).items() if path in before} == before


def test_the_newest_record_of_a_shard_is_taken_and_its_attempts_stay(tmp_path: Path) -> None:
    lost = {"status": "crash", "checks": (), "reasons": ("gone",)}
    first = shard(tmp_path, 1, 2, change=lambda task, made: record(task, **lost))
    file = RecordFile(first / "records" / "0002-interpreter-gw0-1.jsonl")
    for task in read_run(first).plan:
        file.record(record(task, finished=2.0, attempts=(Attempt(status="crash", reasons=("gone",)),)))
    file.close()
    joined = merge([first, shard(tmp_path, 2, 2)], tmp_path / "merged")
    assert {made.status for made in joined.records.values()} == {"pass"}
    assert sum(len(made.attempts) for made in joined.records.values()) == 10


def test_capsules_come_along(tmp_path: Path) -> None:
    def kept(task: Task, made: Record) -> Record:
        if task.case.startswith("op.a:rows=0,") and not task.law:
            return msgspec.structs.replace(made, capsule=f"capsules/{task.on}.safetensors")
        return made

    paths = [shard(tmp_path, index, change=kept) for index in (1, 2, 3)]
    for path in paths:
        for made in read_run(path).records.values():
            if made.capsule:
                (path / made.capsule).write_bytes(made.on.encode())
    merge(paths, tmp_path / "merged")
    found = {path.name: path.read_bytes() for path in (tmp_path / "merged" / "capsules").iterdir()}
    assert found == {"interpreter.safetensors": b"interpreter", "hip.safetensors": b"hip"}


def test_a_shard_is_given_once(shards: list[Path], tmp_path: Path) -> None:
    refused([*shards, shards[0]], tmp_path / "out", "shard1: is given twice")
    shutil.copytree(shards[0], tmp_path / "copy")
    refused([*shards, tmp_path / "copy"], tmp_path / "out", "copy: is shard 1/3, and so is .*shard1")


def test_a_missing_shard_is_named(shards: list[Path], tmp_path: Path) -> None:
    refused(shards[:1], tmp_path / "out", "shard 2/3, 3/3 is missing: a merge needs every shard")


def test_a_run_that_is_no_shard_is_refused(shards: list[Path], tmp_path: Path) -> None:
    create_run(tmp_path / "other", Settings(), PLAN)
    refused([*shards, tmp_path / "other"], tmp_path / "out", "other: is no shard; merge joins runs")
    refused([*shards, tmp_path / "nowhere"], tmp_path / "out", "nowhere: no such run directory")


def test_shards_of_different_plans_are_refused(shards: list[Path], tmp_path: Path) -> None:
    other = shard(tmp_path / "other", 3, plan=PLAN[1:])
    refused(
        [*shards[:2], other], tmp_path / "out", "is a shard of another plan than .*shard1; all shards should be made"
    )
    fourth = shard(tmp_path / "fourth", 3, 4)
    refused([*shards[:2], fourth], tmp_path / "out", "is shard 3/4, but .*shard1 is shard 1/3")


@pytest.mark.parametrize(
    ("name", "value"), [("deadline", 9.0), ("retry", True), ("seed", 7), ("cases", "nightly"), ("judge", "x")]
)
def test_shards_are_asked_alike(shards: list[Path], tmp_path: Path, name: str, value: Any) -> None:
    other = shard(tmp_path / "other", 3, **{name: value})
    refused([*shards[:2], other], tmp_path / "out", f"was made with {name} {value}, but .*shard1 with")


def test_a_task_of_two_shards_is_named(shards: list[Path], tmp_path: Path) -> None:
    first, second = (read_run(path) for path in shards[:2])
    create_run(tmp_path / "more" / "shard2", second.settings, [*second.plan, first.plan[0]])
    shards[1] = tmp_path / "more" / "shard2"
    refused(shards, tmp_path / "out", r"shard2: holds op.a:rows=0,seed=0 on x-y \(interpreter\), and so does .*shard1")


def test_another_seed_is_named_before_the_plan_that_it_makes(shards: list[Path], tmp_path: Path) -> None:
    other = shard(tmp_path / "other", 3, seed=7, whole="0" * 64)
    refused([*shards[:2], other], tmp_path / "out", "shard3: was made with seed 7, but .*shard1 with 0")


def test_a_shard_whose_plan_was_edited_is_refused(shards: list[Path], tmp_path: Path) -> None:
    path = shards[1] / "plan.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    refused(shards, tmp_path / "out", r"shard2/plan.jsonl: is not the plan that .*run.json was written with")


def test_a_merged_run_has_a_digest_of_its_own(shards: list[Path], tmp_path: Path) -> None:
    joined = merge(shards, tmp_path / "merged")
    assert joined.settings.plan_digest not in {read_run(path).settings.plan_digest for path in shards}
    path = tmp_path / "merged" / "plan.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(StoreError, match="is not the plan that"):
        read_run(tmp_path / "merged")


def test_a_gap_in_the_plan_is_seen(tmp_path: Path) -> None:
    paths = [shard(tmp_path, index, whole="0" * 64) for index in (1, 2, 3)]
    refused(paths, tmp_path / "out", "holds 20 tasks, which are not the whole plan")


def test_a_task_without_a_record_is_refused_unless_allowed(tmp_path: Path) -> None:
    paths = [shard(tmp_path, 1), shard(tmp_path, 2)]
    paths.append(shard(tmp_path, 3, change=lambda task, made: None if task.case.startswith("op.a:rows=2,") else made))
    refused(paths, tmp_path / "out", r"shard3: 2 of 6 tasks have no record, such as op.a:rows=2.*sweep --resume")
    joined = merge(paths, tmp_path / "out", allow_open=True)
    assert {task.case for task in joined.open_tasks} == {"op.a:rows=2,seed=0"}
    assert joined.state == "stopped"


def test_a_shard_that_was_stopped_before_its_retries_is_refused(tmp_path: Path) -> None:
    crash = {"status": "crash", "checks": (), "reasons": ("gone",)}
    paths = [shard(tmp_path, 1, 2, retry=True, change=lambda task, made: record(task, **crash))]
    paths.append(shard(tmp_path, 2, 2, retry=True))
    refused(paths, tmp_path / "out", "shard1: 10 tasks are still to be asked once more, such as ")


def test_a_shard_that_is_being_written_is_refused(shards: list[Path], tmp_path: Path) -> None:
    with held(shards[1]):
        refused(shards, tmp_path / "out", "shard2 is still being written: .* merge it when its sweep has ended")


@pytest.mark.parametrize("name", [field for field in Environment.__struct_fields__ if field not in ("vllm", "aiter")])
def test_mixed_environments_are_refused_by_field(shards: list[Path], tmp_path: Path, name: str) -> None:
    def elsewhere(task: Task, made: Record) -> Record:
        changed = msgspec.structs.replace(HERE, **{name: "other"}) if task.on == "hip" else HERE
        return msgspec.structs.replace(made, environment=changed)

    other = shard(tmp_path / "other", 3, change=elsewhere)
    paths = [*shards[:2], other]
    refused(paths, tmp_path / "out", f"mixed environments: {name} on hip is .* in .*shard1, but 'other' in .*shard3")
    assert merge(paths, tmp_path / "out", allow_mixed=[name]).state == "complete"


def test_two_machines_may_differ_between_executions(tmp_path: Path) -> None:
    def placed(task: Task, made: Record) -> Record:
        return msgspec.structs.replace(made, environment=msgspec.structs.replace(HERE, device=task.on))

    assert merge([shard(tmp_path, index, change=placed) for index in (1, 2, 3)], tmp_path / "out").state == "complete"


@pytest.mark.parametrize(
    ("aiter", "alike"),
    [("1@abc in /home/two/aiter", True), ("1@abd in /home/one/aiter", False), ("2@abc in /home/one/aiter", False)],
)
def test_a_tree_is_its_version_and_commit_wherever_it_lies(
    shards: list[Path], tmp_path: Path, aiter: str, alike: bool
) -> None:
    there = msgspec.structs.replace(HERE, aiter=aiter)
    other = shard(tmp_path / "other", 3, change=lambda task, made: msgspec.structs.replace(made, environment=there))
    if alike:
        assert merge([*shards[:2], other], tmp_path / "out").records
    else:
        refused([*shards[:2], other], tmp_path / "out", "mixed environments: aiter on interpreter")


def test_changed_code_is_a_mixed_environment(shards: list[Path], tmp_path: Path) -> None:
    other = shard(tmp_path / "other", 3, change=lambda task, made: msgspec.structs.replace(made, source="edited"))
    refused(
        [*shards[:2], other], tmp_path / "out",
        "mixed environments: the source of op.a on x-y on interpreter is 's' in .*shard1, but 'edited' in .*shard3",
    )  # fmt: skip


def test_another_schema_is_refused(shards: list[Path], tmp_path: Path) -> None:
    (path,) = (shards[2] / "records").glob("*.jsonl")
    path.write_text(path.read_text().replace(f'{{"schema":{SCHEMA}', '{"schema":77'))
    refused(shards, tmp_path / "out", "schema 77, but this version of mla-oracle reads schemas")


def test_a_place_that_is_taken_is_left_alone(shards: list[Path], tmp_path: Path) -> None:
    refused(shards, shards[0], "already holds a run")
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "thesis.txt").write_text("years of work")
    refused(shards, tmp_path / "busy", "is not empty")
    (tmp_path / "empty").mkdir()
    assert merge(shards, tmp_path / "empty").state == "complete"


@pytest.mark.parametrize("place", ["records/m.jsonl", "merged", "of/mine"])
def test_no_run_is_made_inside_a_run(shards: list[Path], tmp_path: Path, place: str) -> None:
    other = shard(tmp_path / "other", 1)
    (tmp_path / "link").symlink_to(other)
    for run in (other, tmp_path / "link"):
        before = files(tmp_path)
        with pytest.raises(StoreError, match=r": lies in the run .*shard1; "):
            merge(shards, run / place)
        assert files(tmp_path) == before
    assert read_run(other).records


def test_what_was_allowed_to_differ_is_kept(shards: list[Path], tmp_path: Path) -> None:
    there = msgspec.structs.replace(HERE, torch="9")
    other = shard(tmp_path / "other", 3, change=lambda task, made: msgspec.structs.replace(made, environment=there))
    paths = [*shards[:2], other]
    merge(paths, tmp_path / "out", allow_mixed=["torch", "device"])
    kept = read_run(tmp_path / "out").settings
    assert len(kept.merged) == 3
    (said,) = mixed_of(kept)
    assert said.startswith("(--allow-mixed torch): torch on interpreter is '2' in ")
    assert said.endswith(f"but '9' in {other}")
    merge(shards, tmp_path / "alike", allow_mixed=["torch"])
    assert mixed_of(read_run(tmp_path / "alike").settings) == ()
    assert read_run(tmp_path / "alike").settings.merged == tuple(map(str, shards))


def test_one_task_that_is_to_be_asked_again_is_one(tmp_path: Path) -> None:
    def first(task: Task, made: Record) -> Record:
        lost = {"status": "crash", "checks": (), "reasons": ("gone",)}
        return record(task, **lost) if task == PLAN[0] else made

    paths = [shard(tmp_path, index, 2, retry=True, change=first) for index in (1, 2)]
    refused(paths, tmp_path / "out", "shard1: 1 task is still to be asked once more, such as ")
    open_tasks = tmp_path / "open"
    paths = [
        shard(open_tasks, index, 2, change=lambda task, made: None if task == PLAN[0] else made) for index in (1, 2)
    ]
    refused(paths, tmp_path / "out", "shard1: 1 of 10 tasks has no record, such as ")


def test_a_merge_that_breaks_half_way_leaves_nothing(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: RecordFile, record: Record) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordFile, "record", full)
    before = files(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        merge(shards, tmp_path / "out")
    assert files(tmp_path) == before
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_the_command_says_what_it_joined(
    shards: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(path) for path in shards]
    assert command.main(["merge", *words[:2], "--out", str(tmp_path / "out")]) == 2
    assert "shard 3/3 is missing" in capsys.readouterr().err
    assert command.main(["merge", *words, "--out", str(tmp_path / "out"), "--allow-mixed", "weather"]) == 2
    assert "--allow-mixed weather: should be one of machine, python, torch" in capsys.readouterr().err
    assert command.main(["merge", *words, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 20 records of 3 shards\n"
    assert command.main(["show", str(tmp_path / "out")]) == 0
