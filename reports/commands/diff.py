"""`mla-oracle diff`: what changed between two runs?"""

import dataclasses
import fnmatch
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

import cases as rooms
from reports.commands.shared import ImplOption, Misuse, OpOption, application, console_of
from reports.outputs.files import OutputError, outside_runs, write
from reports.replaying import Trees, replay_line
from reports.store import Run, read_run, read_settings
from reports.words import has, plural

if TYPE_CHECKING:
    from reports.diff import Change, Diff

_EXAMPLES = 20


@application.command("diff")
def show_diff(
    before: Annotated[Path, typer.Argument(metavar="RUN_A", help="The earlier run.")],
    after: Annotated[Path, typer.Argument(metavar="RUN_B", help="The later run.")],
    op: OpOption = None,
    impl: ImplOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="Keep the whole diff as JSON in this new file.")] = None,
) -> int:
    """What changed between two runs: failures, coverage, bits, error and time, each change in one class.

    1 when something got worse: a new or a changed failure, lost coverage, or budget use that grew. Other bits within budget
    and other times alone are 0.
    """
    for path in (before, after):
        read_settings(path)
    if before.resolve() == after.resolve():
        raise Misuse(f"{before} and {after} are one run; a diff needs two")
    if json is not None and (json.exists() or not json.resolve().parent.is_dir()):
        raise Misuse(f"--json {json}: should name a new file in a directory that exists")
    if json is not None:
        try:
            outside_runs("--json", json)
        except OutputError as error:
            raise Misuse(str(error)) from error
    ops = tuple(each for name in op or () for each in rooms.ops_named(name))
    runs = [_narrowed(read_run(path), ops, tuple(impl or ())) for path in (before, after)]
    if not any(run.plan for run in runs):
        raise Misuse(
            f"{before} and {after}: neither asks {', '.join((*(op or ()), *(impl or ())))}; see mla-oracle show"
        )
    if not runs[0].records:
        raise Misuse(
            f"{before}: none of its {plural(len(runs[0].plan), 'question')} has a record, so there is nothing to compare with; "
            "it should be a run with answers"
        )
    difference: Diff = importlib.import_module("reports.diff").compare(*runs)
    if json is not None:
        write(json, f"{msgspec.json.format(msgspec.json.encode(difference)).decode()}\n")
    console = console_of()
    for run in runs:
        if run.being_written:
            console.print(escape(f"{run.path}: a sweep is writing it right now"))
    print_diff(difference, runs[0], runs[1], console)
    return 1 if difference.worse else 0


def _narrowed(run: Run, ops: Sequence[str], impls: Sequence[str]) -> Run:
    """The run as if nothing else had been asked; empty selections mean all."""
    if not ops and not impls:
        return run

    def chosen(case: str, impl: str) -> bool:
        return (not ops or case.partition(":")[0] in ops) and (
            not impls or any(fnmatch.fnmatchcase(impl, name) for name in impls)
        )

    return dataclasses.replace(
        run,
        plan=tuple(task for task in run.plan if chosen(task.case, task.impl)),
        records={key: record for key, record in run.records.items() if chosen(record.case, record.impl)},
        pending=tuple(found for found in run.pending if chosen(found.task.case, found.task.impl)),
    )


def print_diff(difference: "Diff", before: Run, after: Run, console: Console) -> None:
    """The diff as people read it: what differs round it, the counts, then every class with its first examples."""
    words = importlib.import_module("reports.diff")
    console.print(escape(f"{difference.before} → {difference.after}"), style="bold")
    for differing in difference.environments:
        sides = (", ".join(value or "none" for value in side) for side in (differing.before, differing.after))
        console.print(escape(f"  {differing.field}: {' → '.join(sides)}"))
    for note in difference.notes:
        console.print(escape(f"  {note}"))
    times = [each for each in difference.times if each.seen]
    grown = sum(growth.grew for growth in difference.growths)
    shrunk = len(difference.growths) - grown
    counts = [(words.counted(kind, number), number) for kind, number in difference.counts.items()]
    counts += [
        (f"{plural(grown, 'group')} whose error grew", grown),
        (f"{plural(shrunk, 'group')} whose error shrank", shrunk),
    ]
    counts += [(f"{plural(len(times), 'group')} of another speed", len(times))]
    for said, number in counts:
        figure, _, meaning = said.partition(" ")
        console.print(f"{figure:>8} {meaning}", style="bold" if number else "dim")
    console.print(f"{difference.unchanged:8} unchanged", style="dim")
    if difference.unjudged:
        console.print(f"{difference.unjudged:8} judged by neither run", style="dim")
    if difference.incomparable:
        console.print(f"{difference.incomparable:8} not comparable", style="dim")
    for kind in words.KINDS:
        found = difference.of(kind)
        if found:
            _heading(words.MEANINGS[kind], len(found), console)
            for change in found[:_EXAMPLES]:
                _print_change(change, before, after, console)
            _more(len(found), console)
    if difference.growths:
        _heading("budget use of groups", len(difference.growths), console)
        for growth in difference.growths[:_EXAMPLES]:
            console.print(escape(f"  {growth.op} {growth.impl} {growth.on}: {growth.sentence}"))
            console.print(
                escape(
                    f"      {growth.changed:,} of {plural(growth.cases, 'answer')} {has(growth.changed)} other bits, "
                    f"such as {growth.steepest}"
                )
            )
            record = after.records.get((growth.steepest, growth.impl, growth.on, ""))
            if record is not None:
                console.print(escape(f"      see it again: {replay_line(record, Trees.of(after.settings))}"))
        _more(len(difference.growths), console)
    if times:
        _heading("times of groups", len(times), console)
        for each in times[:_EXAMPLES]:
            who = f"{each.op} {each.impl} {each.on}" if each.op else f"everything on {each.on}"
            console.print(escape(f"  {who}: {each.sentence}"))
        _more(len(times), console)


def _heading(meaning: str, number: int, console: Console) -> None:
    console.print(f"\n{meaning} ({number})", style="bold")


def _more(number: int, console: Console) -> None:
    if number > _EXAMPLES:
        console.print(f"  … and {number - _EXAMPLES} more; --json FILE keeps them all")


def _print_change(change: "Change", before: Run, after: Run, console: Console) -> None:
    law = f" law {change.law}" if change.law else ""
    console.print(escape(f"  {change.op} {change.impl} {change.on}{law}: {change.sentence}"))
    if change.after is not None:
        for line in change.after.diagnosis:
            console.print(escape(f"      {line}"))
    # What has no record any more is seen again as the earlier run asked it.
    record, run = (change.after, after) if change.after is not None else (change.before, before)
    if record is not None:
        console.print(escape(f"      see it again: {replay_line(record, Trees.of(run.settings))}"))
