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
from reports.outputs.sarif import source_of
from reports.outputs.summary import MOST_BYTES, summary

# GitHub keeps ten of each kind of a step and drops the others without a word.
MOST = 10
SUMMARY = "GITHUB_STEP_SUMMARY"


def annotations(result: GateResult, root: Path | None = None) -> list[str]:
    """The workflow commands: an error for what closes the gate, a warning for what is reported.

    root: the checkout of the job; a source file is named only where it lies in it.
    """
    here = root if root is not None else Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    return [*_commands("error", result.closing, here), *_commands("warning", result.reported, here)]


def _commands(word: str, findings: Sequence[Finding], root: Path) -> Iterable[str]:
    shown = findings if len(findings) <= MOST else findings[: MOST - 1]
    for finding in shown:
        title = " ".join(filter(None, ("mla-oracle", _short_kind(finding), finding.status, finding.place)))
        lines = [finding.sentence, *finding.details]
        if finding.count > 1:
            lines.append(f"{finding.count:,} cases")
        if finding.replay:
            lines.append(f"see it again: {finding.replay}")
        file = source_of(finding.op, finding.impl) if finding.op else ""
        place = f"file={command_property(file)}," if file and (root / file).is_file() else ""
        message = "\n".join(" ".join(line.split("\n")) for line in lines)
        yield f"::{word} {place}title={command_property(title)}::{command_data(message)}"
    if len(findings) > len(shown):
        rest = len(findings) - len(shown)
        yield f"::{word} title=mla-oracle::{rest} more findings are in the step's summary"


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


def append_summary(result: GateResult) -> Path | None:
    """Append the summary to the file that GitHub names for the step; None where it names none."""
    name = os.environ.get(SUMMARY, "")
    if not name:
        return None
    path = Path(name)
    before = path.stat().st_size if path.exists() else 0
    page = summary(result, MOST_BYTES - before - 1)
    with path.open("ab") as file:
        file.write(("\n" * bool(before) + page).encode(errors="backslashreplace"))
    return path
