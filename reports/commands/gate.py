"""`mla-oracle gate`: may this run pass?"""

import datetime
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from reports.commands.shared import Misuse, application, console_of
from reports.commands.terminal import table_of
from reports.gate import KINDS, Finding, GateResult, judge
from reports.known_failures import KnownError, read_known
from reports.outputs.escaping import printable
from reports.outputs.files import OutputError, claim, naming, outside_runs, write
from reports.outputs.gate_json import gate_json
from reports.outputs.github import annotations, append_summary, silenced, summary_place
from reports.outputs.junit import junit
from reports.outputs.sarif import sarif
from reports.outputs.summary import annotation, summary
from reports.policy import DEFAULT_TEXT, Policy, PolicyError, read_policy
from reports.store import read_run

_LISTED = 20


@application.command()
def gate(
    run: Annotated[Path | None, typer.Argument(help="A run directory.")] = None,
    baseline: Annotated[Path | None, typer.Option("--baseline", help="An earlier run, to be no worse than.")] = None,
    policy: Annotated[Path | None, typer.Option("--policy", help="What closes the gate, a TOML file.")] = None,
    known: Annotated[Path | None, typer.Option("--known", help="Known failures, a TOML file.")] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML here.")] = None,
    sarif_file: Annotated[Path | None, typer.Option("--sarif", help="Write SARIF 2.1.0 here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write JSON here.")] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Print annotations, and append to the step's summary where there is one.")
    ] = False,
    buildkite: Annotated[
        str | None, typer.Option("--buildkite", help="Write an annotation's Markdown here; - for standard output.")
    ] = None,
    write_policy: Annotated[
        Path | None, typer.Option("--write-policy", help="Only write the default policy, commented, to this new file.")
    ] = None,
    today: Annotated[str, typer.Option("--today", hidden=True)] = "",
) -> int:
    """Whether a run may pass: 0 for an open gate, 1 for a closed one."""
    files = {"--junit": junit_file, "--sarif": sarif_file, "--json": json_file}
    files["--buildkite"] = Path(buildkite) if buildkite not in (None, "", "-") else None
    if write_policy is not None:
        if run is not None or baseline or policy or known or github or buildkite is not None or any(files.values()):
            raise Misuse(f"--write-policy {write_policy}: takes nothing besides it, it only writes the default policy")
        return _write_policy(write_policy)
    if run is None:
        raise Misuse("gate needs a run directory: mla-oracle gate RUN")
    if buildkite == "":
        raise Misuse("--buildkite '': should name a file, or - for standard output")
    if github and buildkite == "-":
        raise Misuse("--github --buildkite -: both write to standard output; --buildkite should name a file")
    try:
        day = datetime.date.fromisoformat(today) if today else None
    except ValueError:
        raise Misuse(f"--today {today}: should be a day, 2026-01-31") from None
    try:
        rules = read_policy(policy) if policy is not None else Policy()
        entries = read_known(known, day) if known is not None else None
        for option, path in files.items():
            if path is not None and path.resolve() in {each.resolve() for each in (policy, known) if each is not None}:
                raise Misuse(f"{option} {path}: is what the gate reads, an output should go elsewhere")
        places = {option: claim(option, path) for option, path in files.items() if path is not None}
        if github:
            summary_place()
    except (PolicyError, KnownError, OutputError) as error:
        raise Misuse(str(error)) from error
    taken: dict[Path, str] = {}
    for option, path in places.items():
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise Misuse(f"{option} {path}: is the file of {other} already; each should have a file of its own")
    earlier = read_run(baseline) if baseline is not None else None
    if earlier is not None and not earlier.records:
        raise Misuse(
            f"--baseline {baseline}: holds no record, so nothing can be worse; it should be a run with answers"
        )
    result = judge(read_run(run), rules, entries, earlier, day)
    for option, writer in (("--junit", junit), ("--sarif", sarif), ("--json", gate_json), ("--buildkite", annotation)):
        if option in places:
            write(places[option], writer(result))
    if github:
        append_summary(result)
        for command in annotations(result):
            typer.echo(command)
    if buildkite == "-":
        typer.echo(summary(result), nl=False)
    # What goes to another program is alone on standard output.
    console = Console(stderr=True, highlight=False, soft_wrap=True, width=200) if buildkite == "-" else console_of()
    with silenced() if github else nullcontext():
        _tell(result, console)
    return 1 if result.closed else 0


def _write_policy(path: Path) -> int:
    if path.exists() or path.is_symlink() or not path.resolve().parent.is_dir():
        raise Misuse(f"--write-policy {path}: should name a new file in a directory that exists")
    try:
        outside_runs("--write-policy", path)
    except OutputError as error:
        raise Misuse(str(error)) from error
    with naming(path), path.open("x", encoding="utf-8") as file:
        file.write(DEFAULT_TEXT)
    console_of().print(escape(str(path)))
    return 0


def _tell(result: GateResult, console: Console) -> None:
    """The counts, what closes the gate, what is reported, and the verdict as the last line."""
    if result.judged:
        console.print(table_of([each.record for each in result.judged]))
    _list("closes", result.closing, console)
    _list("reported", result.reported, console)
    for note in result.notes:
        console.print(escape(printable(note)))
    console.print(escape(printable(result.sentence)), style="bold")


def _list(word: str, findings: Sequence[Finding], console: Console) -> None:
    for finding in findings[:_LISTED]:
        number = f" ({finding.count:,} cases)" if finding.count > 1 else ""
        place = f"{finding.place}: " if finding.place else ""
        status = f"{finding.status}: " if finding.status not in ("", "pass") else ""
        console.print(
            escape(printable(f"{word}, {KINDS[finding.kind]}: {place}{status}{finding.sentence}{number}")),
            soft_wrap=True,
        )
        for line in finding.details:
            console.print(escape(printable(f"  {line}")))
        if finding.replay:
            console.print(escape(printable(f"  see it again: {finding.replay}")))
    if len(findings) > _LISTED:
        console.print(f"and {len(findings) - _LISTED} more; --json FILE keeps them all")
