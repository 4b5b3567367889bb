"""`mla-oracle report`: a run, what changed between two, or many over time, as one page."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from impl.executions.aot.report import Report, ReportError
from reports.commands.shared import Misuse, application, console_of
from reports.outputs.files import OutputError, outside_runs
from reports.store import read_settings


@application.command()
def report(
    run: Annotated[Path | None, typer.Argument(help="A run directory; none with --history.")] = None,
    against: Annotated[Path | None, typer.Option("--against", help="An earlier run: what changed since.")] = None,
    history: Annotated[Path | None, typer.Option("--history", help="A directory of runs: how they moved.")] = None,
    proofs: Annotated[
        Path | None, typer.Option("--proofs", help="What `prove --out` wrote, for the kill matrix.")
    ] = None,
    compiled: Annotated[
        Path | None,
        typer.Option(
            "--compiled", help="The aot.json that `aot --out` wrote; RUN/aot.json without it, where there is one."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Where the page goes; RUN/report.html, RUN/diff.html or DIR/history.html by default."
        ),
    ] = None,
) -> None:
    """One HTML page about a run, about what changed since another, or about many."""
    if history is not None:
        if any(each is not None for each in (run, against, proofs, compiled)):
            raise Misuse(
                "--history: is a page of its own, so it takes no RUN, no --against, no --proofs and no --compiled"
            )
        page = _history(history, out)
    elif run is None:
        raise Misuse("report: should name a run directory, or --history and a directory of runs")
    elif against is not None:
        for option, given in (("--proofs", proofs), ("--compiled", compiled)):
            if given is not None:
                raise Misuse(f"{option}: belongs on the page of a run, so it goes without --against")
        page = _difference(against, run, out)
    else:
        page = _run(run, proofs, compiled, out)
    console_of().print(str(page))


def _run(run: Path, proofs: Path | None, compiled: Path | None, out: Path | None) -> Path:
    read_settings(run)
    page = _place(out, run / "report.html")
    html = importlib.import_module("reports.html")
    proven = importlib.import_module("reports.html.proofs")
    try:
        found = proven.read_proofs(proofs) if proofs is not None else ()
    except proven.ProofsError as error:
        raise Misuse(f"--proofs {error}") from error
    written: Path = html.report_run(run, page, found, _compiled(run, compiled))
    return written


def _compiled(run: Path, stated: Path | None) -> Report | None:
    """What was compiled, from the file that the user states, or from the run, where `aot --out` put it."""
    reading = importlib.import_module("reports.html.compiled")
    path = stated if stated is not None else run / reading.NAME
    if stated is None and not path.exists():
        return None
    try:
        found: Report = reading.read_compiled(path)
    except ReportError as error:
        raise Misuse(f"--compiled {error}" if stated is not None else str(error)) from error
    return found


def _difference(before: Path, after: Path, out: Path | None) -> Path:
    for run in (before, after):
        read_settings(run)
    if before.resolve() == after.resolve():
        raise Misuse(f"--against {before}: is the run itself; it should be another")
    page = _place(out, after / "diff.html")
    html = importlib.import_module("reports.html.difference")
    written: Path = html.report_difference(before, after, page)
    return written


def _history(directory: Path, out: Path | None) -> Path:
    if not directory.is_dir():
        raise Misuse(f"--history {directory}: should be a directory that holds runs")
    page = _place(out, directory / "history.html")
    html = importlib.import_module("reports.html.trend")
    written: Path = html.report_history(directory, page)
    return written


def _place(out: Path | None, usual: Path) -> Path:
    """Where the page goes; `Misuse` where that is no place for it."""
    page = out if out is not None else usual
    if page.is_dir() or not page.resolve().parent.is_dir():
        raise Misuse(f"--out {page}: should name a file in a directory that exists")
    try:
        outside_runs("--out", page)
    except OutputError as error:
        raise Misuse(str(error)) from error
    if page.exists() and not importlib.import_module("reports.html").is_report(page):
        raise Misuse(f"--out {page}: exists and is no report; it should be a new file or an earlier report")
    return page
