"""`mla-oracle merge`: one run from the runs of a plan's shards."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from reports.commands.shared import application, console_of, one_of
from reports.merge import MIXABLE, merge, mixed_of
from reports.words import plural


@application.command("merge")
def merge_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The runs of all shards, in any order.")],
    out: Annotated[Path, typer.Option("--out", help="The new run directory.")],
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Join them even if tasks have no record; these stay open.")
    ] = False,
    allow_mixed: Annotated[
        list[str] | None,
        typer.Option("--allow-mixed", help="Join them even if this differs, such as device; may be repeated."),
    ] = None,
) -> None:
    """Join the runs of `sweep --shard 1/n` to `n/n`; every shard once, complete, and answered alike."""
    mixed = [one_of("--allow-mixed", name, MIXABLE) for name in allow_mixed or ()]
    joined = merge(runs, out, allow_open, mixed)
    console = console_of()
    console.print(f"{out}: {plural(len(joined.records), 'record')} of {plural(len(runs), 'shard')}", soft_wrap=True)
    for said in mixed_of(joined.settings):
        console.print(escape(f"they differ {said}"), soft_wrap=True)
    if joined.open_tasks:
        console.print(f"{joined.progress}", soft_wrap=True)
