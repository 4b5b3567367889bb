"""How does a gate read in GitHub Actions: annotations of a step, and its summary?

Annotations are workflow commands on standard output. Whatever else is printed there goes between `silenced` lines, so that
no text of a kernel can give a command.
"""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from reports.gate import Finding, GateResult
from reports.outputs.escaping import command_data, command_property
from reports.outputs.files import OutputError, naming, outside_runs
from reports.outputs.sarif import source_of
from reports.outputs.summary import MOST_BYTES, summary

# GitHub keeps ten of each kind of a step and drops the others without a word.
MOST = 10
SUMMARY = "GITHUB_STEP_SUMMARY"


def annotations(result: GateResult, root: Path | None = None) -> list[str]:
    """The workflow commands: an error for what closes the gate, a warning for what is reported, a notice for each note.

    root: the checkout of the job; a source file is named only where it lies in it.
    """
    here = root if root is not None else Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    said = (f"::notice title=mla-oracle::{_line(note)}" for note in (result.sentence, *result.notes))
    return [
        *_limited("error", [_command("error", finding, here) for finding in result.closing], "findings"),
        *_limited("warning", [_command("warning", finding, here) for finding in result.reported], "findings"),
        *_limited("notice", list(said), "notes"),
    ]


def _limited(word: str, commands: Sequence[str], noun: str) -> Iterable[str]:
    """As many as GitHub keeps, the last of them the number of the others."""
    if len(commands) <= MOST:
        return commands
    rest = len(commands) - MOST + 1
    return [*commands[: MOST - 1], f"::{word} title=mla-oracle::{rest} more {noun} are in the step's summary"]


def _command(word: str, finding: Finding, root: Path) -> str:
    title = " ".join(filter(None, ("mla-oracle", _short_kind(finding), finding.status, finding.place)))
    lines = [finding.sentence, *finding.details]
    if finding.count > 1:
        lines.append(f"{finding.count:,} cases")
    if finding.replay:
        lines.append(f"see it again: {finding.replay}")
    file = source_of(finding.op, finding.impl) if finding.op else ""
    place = f"file={command_property(file)}," if file and (root / file).is_file() else ""
    return f"::{word} {place}title={command_property(title)}::{'%0A'.join(_line(line) for line in lines)}"


def _line(text: str) -> str:
    """A text in one line of a message."""
    return command_data(" ".join(text.split("\n")))


def _short_kind(finding: Finding) -> str:
    return "" if finding.kind == "answer" else finding.kind


@contextmanager
def silenced() -> Iterator[None]:
    """Standard output in between holds no commands, whatever is printed."""
    word = f"mla-oracle-{secrets.token_hex(16)}"
    typer.echo(f"::stop-commands::{word}")
    try:
        yield
    finally:
        typer.echo(f"::{word}::")


def summary_place() -> Path | None:
    """The file that GitHub names for the step's summary, None where it names none; raises `OutputError` for no such place."""
    name = os.environ.get(SUMMARY, "")
    if not name:
        return None
    path = Path(name)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise OutputError(f"{SUMMARY} {path}: should name a file in a directory that exists")
    outside_runs(SUMMARY, path)
    return path


def append_summary(result: GateResult) -> Path | None:
    """Append the summary to the file that GitHub names for the step; None where it names none."""
    path = summary_place()
    if path is None:
        return None
    before = path.stat().st_size if path.exists() else 0
    page = summary(result, MOST_BYTES - before - 1)
    with naming(path), path.open("ab") as file:
        file.write(("\n" * bool(before) + page).encode(errors="backslashreplace"))
    return path
