"""How do the runs of a plan's shards become one run, and when must they not?

Nothing is written before everything was looked at, and then into a directory beside the new one, which takes its name
when it is whole.
"""

import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from reports.record import Environment
from reports.shards import shard_of, whole_of
from reports.store import Key, RecordFile, Run, Settings, StoreError, Task, check_vacant, create_run, read_run
from reports.words import has, plural

# What may be allowed to differ: the fields of the environment, and the implementations' own code.
MIXABLE = (*Environment.__struct_fields__, "source")
_SAME_SETTINGS = ("cases", "seed", "deadline", "retry", "judge")
# Who says something, and what: an execution, or an implementation of an op on one.
Said = tuple[tuple[str, ...], str]


class MergeError(StoreError):
    """Runs that are not the shards of one plan, each once and complete; the message names what is wrong with which."""


def merge(paths: Sequence[Path], out: Path, allow_open: bool = False, allow_mixed: Collection[str] = ()) -> Run:
    """Join the runs of all shards of one plan in a new run directory, and return it as it is read from there.

    allow_open: tasks without a record stay open. allow_mixed: names of `MIXABLE` that may differ between the records of
    one execution. Raises `StoreError`, and leaves nothing behind then.
    """
    check_vacant(out)
    runs = _read(paths)
    whole = _one_plan(runs)
    tasks = _joined_plan(runs, whole)
    for run in runs:
        _check_complete(run, allow_open)
    for name in (name for name in MIXABLE if name not in allow_mixed):
        _check_alike(runs, name)
    settings = msgspec.structs.replace(
        runs[0].settings, created=min(run.settings.created for run in runs), shard="",
        merged=_joined_from(runs, allow_mixed),
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        create_run(part, settings, tasks)
        for run in runs:
            _copy(run, part)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return read_run(out)


# Between the last of the runs in `Settings.merged` and each thing that they were allowed to differ in.
_DIFFER = ", although they differ "


def _joined_from(runs: Sequence[Run], allow_mixed: Collection[str]) -> tuple[str, ...]:
    """The runs that are joined, the last with what they do not agree in and need not."""
    mixed = (
        f"{_DIFFER}(--allow-mixed {name}): {differs}"
        for name in MIXABLE
        if name in allow_mixed and (differs := _differing(runs, name))
    )
    *others, last = (str(run.path) for run in runs)
    return (*others, last + "".join(mixed))


def mixed_of(settings: Settings) -> tuple[str, ...]:
    """What the shards of a merged run were allowed to differ in, and do: `(--allow-mixed torch): torch on hip is ...`."""
    return tuple(settings.merged[-1].split(_DIFFER)[1:]) if settings.merged else ()


def _read(paths: Sequence[Path]) -> list[Run]:
    seen: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in seen:
            raise MergeError(f"{path}: is given twice; each shard should be given once")
        seen[path.resolve()] = path
    runs = []
    for path in paths:
        run = read_run(path)
        if run.state == "being written":
            raise MergeError(f"{run.progress}; merge it when its sweep has ended")
        if not run.settings.shard or not run.settings.whole:
            raise MergeError(f"{path}: is no shard; merge joins runs that were made with sweep --shard i/n")
        runs.append(run)
    return runs


def _one_plan(runs: Sequence[Run]) -> str:
    """The hash of the plan that all runs are shards of, every shard once."""
    first = runs[0]
    count = shard_of(first.settings.shard).count
    by_index: dict[int, Run] = {}
    for run in runs:
        shard = shard_of(run.settings.shard)
        if shard.count != count:
            raise MergeError(
                f"{run.path}: is shard {shard}, but {first.path} is shard {first.settings.shard}; shards of one plan have "
                "the same number behind the stroke"
            )
        for name in _SAME_SETTINGS:
            ours, theirs = getattr(run.settings, name), getattr(first.settings, name)
            if ours != theirs:
                raise MergeError(f"{run.path}: was made with {name} {ours}, but {first.path} with {theirs}")
        if run.settings.whole != first.settings.whole:
            raise MergeError(
                f"{run.path}: is a shard of another plan than {first.path}; all shards should be made with the same "
                "selection, seed, trees and version of mla-oracle"
            )
        if shard.index in by_index:
            raise MergeError(
                f"{run.path}: is shard {shard}, and so is {by_index[shard.index].path}; each shard is given once"
            )
        by_index[shard.index] = run
    missing = [f"{index}/{count}" for index in range(1, count + 1) if index not in by_index]
    if missing:
        raise MergeError(f"shard {', '.join(missing)} is missing: a merge needs every shard of the plan")
    return first.settings.whole


def _joined_plan(runs: Sequence[Run], whole: str) -> list[Task]:
    """All tasks in the order of the whole plan."""
    owners: dict[Key, Run] = {}
    for run in runs:
        for task in run.plan:
            other = owners.setdefault(task.key, run)
            if other is not run:
                raise MergeError(
                    f"{run.path}: holds {_named(task)}, and so does {other.path}; shards of one plan share no task when "
                    "all are made with the same --balance run"
                )
    tasks = [task for run in runs for task in run.plan]
    if whole_of(tasks) != whole:
        raise MergeError(
            f"{runs[0].path}: with the other shards it holds {plural(len(tasks), 'task')}, which are not the whole plan; all "
            "shards should be made with the same --balance run, or none"
        )
    return [msgspec.structs.replace(task, place=0) for task in sorted(tasks, key=lambda task: task.place)]


def _named(task: Task) -> str:
    law = f", law {task.law}" if task.law else ""
    return f"{task.case} on {task.impl} ({task.on}){law}"


def _check_complete(run: Run, allow_open: bool) -> None:
    open_tasks = run.open_tasks
    if allow_open or not (open_tasks or run.retries):
        return
    what = (
        f"{len(open_tasks):,} of {plural(len(run.plan), 'task')} {has(len(open_tasks))} no record, such as "
        f"{_named(open_tasks[0])}"
        if open_tasks
        else f"{plural(len(run.retries), 'task')} {'is' if len(run.retries) == 1 else 'are'} still to be asked once more, "
        f"such as {_named(run.retries[0])}"
    )
    raise MergeError(
        f"{run.path}: {what}; finish it with mla-oracle sweep --resume {shlex.quote(str(run.path))}, or take it as it is "
        "with --allow-open"
    )


def _check_alike(runs: Sequence[Run], name: str) -> None:
    """Raise when the records of one execution do not agree in a field of the environment, or in their code."""
    differs = _differing(runs, name)
    if differs:
        raise MergeError(
            f"mixed environments: {differs}; shards should be answered alike, or be joined with --allow-mixed {name}"
        )


def _differing(runs: Sequence[Run], name: str) -> str:
    return mixture(name, (said for run in runs for said in said_by(run, name, f"in {run.path}")))


def mixture(name: str, said: Iterable[tuple[tuple[str, ...], str, str]]) -> str:
    """The first two who should say the same of a name of `MIXABLE` and do not; empty when all agree.

    said: who says what, and where it stands, as in `in its records`.
    """
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    for who, value, place in said:
        known, there = first.setdefault(who, (value, place))
        if value != known:
            what = f"{name} on {who[0]}" if name != "source" else f"the source of {' on '.join(who)}"
            return f"{what} is {known!r} {there}, but {value!r} {place}"
    return ""


def said_by(run: Run, name: str, place: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """What the records of a run say of a name of `MIXABLE`."""
    for record in run.records.values():
        if name != "source":
            yield (*said_of(name, record.on, record.environment), place)
        elif record.source:
            yield (record.op, record.impl, record.on), record.source, place


def said_of(name: str, on: str, environment: Environment) -> Said:
    """What an environment says of one of its fields; where a tree lies differs between machines, and changes nothing."""
    value = str(getattr(environment, name))
    return (on,), re.sub(r" in /.*", "", value) if name in ("vllm", "aiter") else value


def _copy(run: Run, out: Path) -> None:
    """The newest record of every task, and the capsules that these name."""
    file = RecordFile(out / "records" / f"0000-shard-{run.settings.shard.replace('/', 'of')}.jsonl")
    try:
        for record in run.records.values():
            file.record(record)
            if record.capsule and (run.path / record.capsule).is_file():
                shutil.copyfile(run.path / record.capsule, out / record.capsule)
    finally:
        file.close()
