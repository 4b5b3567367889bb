"""`mla-oracle show`: what does a run say?"""

import fnmatch
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cases.case import parse
from impl.implementation import EXECUTIONS
from reports.commands.shared import (
    RUNS,
    STATUSES,
    ImplOption,
    Misuse,
    OnOption,
    application,
    console_of,
    exists,
    one_of,
)  # fmt: skip
from reports.commands.terminal import asked_again, first_sentence, show_record, table_of
from reports.replaying import Trees
from reports.store import read_run
from reports.words import has, plural


@application.command()
def show(
    what: Annotated[str, typer.Argument(metavar="RUN|ID", help="A run directory, or a case id.")],
    where: Annotated[
        Path | None, typer.Option("--run", help="The run of the case; the newest in runs/ by default.")
    ] = None,
    impl: ImplOption = None,
    on: OnOption = None,
    status: Annotated[list[str] | None, typer.Option("--status", help="Only these; may be repeated.")] = None,
) -> None:
    """A run as a table and its records line by line, or the records of one case in full."""
    console = console_of()
    wanted = {one_of("--status", word, STATUSES) for word in status or ()}
    executions = {one_of("--on", word, EXECUTIONS) for word in on or ()}
    is_case = ":" in what and not exists(what)
    case = parse(what) if is_case else None
    run = read_run((where or newest_run()) if is_case else Path(what))
    records = [
        record
        for record in run.records.values()
        if (not wanted or record.status in wanted)
        and (not executions or record.on in executions)
        and (not impl or any(fnmatch.fnmatchcase(record.impl, name) for name in impl))
        and (case is None or record.case == case.id)
    ]
    if not run.records and run.state == "being written":
        console.print(escape(run.progress))
        return
    if not run.records and run.open_tasks:
        raise Misuse(
            f"{run.path}: {_none_of(len(run.plan))} with mla-oracle sweep --resume {shlex.quote(str(run.path))}"
        )
    if not records:
        raise Misuse(
            f"{run.path}: holds no such record; it has {len(run.records)}, `mla-oracle show {run.path}` lists them"
        )
    if case is None:
        console.print(table_of(records))
        for record in records:
            law = f" law {record.law}:" if record.law else ""
            console.print(escape(f"{record.status:11} {record.impl} {record.on}{law} {record.case}"))
            if record.status != "pass":
                console.print(escape(f"            {first_sentence(record)}"))
        for sentence in (*asked_again(records), *run.notes):
            console.print(escape(sentence))
        if run.state == "being written":
            console.print(escape(run.progress))
        elif run.open_tasks:
            lost = f"{len(run.open_tasks)} of {plural(len(run.plan), 'case')} {has(len(run.open_tasks))} no record"
            console.print(f"{lost}: mla-oracle sweep --resume {run.path}")
        elif run.retries:
            console.print(
                f"{plural(len(run.retries), 'case')} still to ask once more: mla-oracle sweep --resume {run.path}"
            )
        return
    for record in records:
        show_record(record, console, Trees.of(run.settings), run.path)


def _none_of(cases: int) -> str:
    if cases == 1:
        return "its one case has no record; answer it"
    return f"none of its {cases:,} cases has a record; answer them"


def newest_run() -> Path:
    found = sorted(
        (path for path in RUNS.glob("*") if (path / "run.json").is_file()), key=lambda path: path.stat().st_mtime
    )
    if not found:
        raise Misuse(f"there is no run in {RUNS}; name one with --run, or make one with mla-oracle sweep")
    return found[-1]
