"""What does each subcommand of `mla-oracle` do? A module each; `run` picks the one that the user names."""

from collections.abc import Sequence

import typer

import cases as rooms
from cases.case import CaseError
from reports.capsule import CapsuleError
from reports.commands import aot, diff, differ, doctor, gate, listing, merge, prove, replay, report, show, sweep
from reports.commands.shared import Misuse, application
from reports.execute import sentence as sentence_of
from reports.plan import SelectionError
from reports.store import StoreError

__all__ = [
    "aot",
    "diff",
    "differ",
    "doctor",
    "gate",
    "listing",
    "merge",
    "prove",
    "replay",
    "report",
    "run",
    "show",
    "sweep",
]


def run(arguments: Sequence[str]) -> int:
    """The exit code of the command line; every misuse is one sentence on stderr and 2."""
    try:
        code = application(list(arguments), prog_name="mla-oracle", standalone_mode=False)
        return int(code or 0)
    except (Misuse, SelectionError, CaseError, StoreError, CapsuleError, rooms.UnknownOp) as error:
        return _misused(str(error))
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("mla-oracle: interrupted", err=True)
        return 130
    except Exception as error:
        if hasattr(error, "format_message"):
            # What typer's own parser could not read.
            return _misused(str(error.format_message()))
        if isinstance(error, OSError):
            return _misused(
                f"{error.filename or 'a file'}: {error.strerror or error}; it should be a place to write to"
            )
        typer.echo(f"mla-oracle: the harness itself broke: {sentence_of(error)}", err=True)
        return 3


def _misused(sentence: str) -> int:
    typer.echo(f"mla-oracle: {' '.join(sentence.split())}", err=True)
    return 2
