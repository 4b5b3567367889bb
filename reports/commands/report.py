"""`mla-oracle report`: a run as one page."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from reports.commands.shared import Misuse, application, console_of
from reports.store import read_settings


@application.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[Path | None, typer.Option("--out", help="Where the page goes; RUN/report.html by default.")] = None,
) -> None:
    """One HTML page about a run."""
    read_settings(run)
    page = out if out is not None else run / "report.html"
    if page.is_dir() or not page.resolve().parent.is_dir():
        raise Misuse(f"--out {page}: should name a file in a directory that exists")
    html = importlib.import_module("reports.html")
    if page.exists() and not html.is_report(page):
        raise Misuse(f"--out {page}: exists and is no report; it should be a new file or an earlier report")
    written = html.report_run(run, page)
    console_of().print(str(written))
