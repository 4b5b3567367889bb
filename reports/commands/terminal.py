"""How do a run and its records read in a terminal?"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reports.commands.shared import STATUSES
from reports.record import Attempt, Record
from reports.replaying import Trees, replay_line
from reports.words import plural


def table_of(records: Sequence[Record]) -> Table:
    rows: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        asked = f"{record.op} laws" if record.law else record.op
        rows.setdefault((asked, record.impl, record.on), []).append(record)
    statuses = [status for status in STATUSES if any(record.status == status for record in records)]
    table = Table("op", "implementation", "on", *statuses, "worst use", box=None)
    for (asked, impl, on), found in rows.items():
        counts = Counter(record.status for record in found)
        judged = [record.use for record in found if record.status in ("pass", "fail")]
        numbers = [str(counts[status] or ".") for status in statuses]
        table.add_row(asked, impl, on, *numbers, f"{max(judged):.3g}" if judged else "")
    return table


def asked_again(records: Sequence[Record]) -> list[str]:
    """The sentence on the cases that were asked once more; none where none was."""
    again = [record for record in records if record.attempts]
    if not again:
        return []
    before = Counter(attempt_name(attempt) for record in again for attempt in record.attempts)
    after = Counter(record.status for record in again)
    spelled = (", ".join(f"{count} {name}" for name, count in counts.items()) for counts in (before, after))
    return [f"{plural(len(again), 'case')} asked once more after {next(spelled)}: {next(spelled)}"]


def attempt_name(attempt: Attempt) -> str:
    """How an attempt ended, in a word or two."""
    return "lost device" if attempt.status == "error" else attempt.status


def first_sentence(record: Record) -> str:
    failing = [check for check in record.checks if not check.passed] or list(record.checks)
    worst = max(failing, key=lambda check: check.use, default=None)
    return str(worst) if worst is not None else "; ".join(record.reasons) or record.case


def show_record(record: Record, console: Console, trees: Trees, run: Path | None = None) -> None:
    """A record in full; `run` is the directory that keeps its capsule, if one does."""
    used = record.environment
    law = f", law {record.law}" if record.law else ""
    console.print(escape(f"{record.case}\n{record.status} by {record.impl} on {record.on}{law}"), style="bold")
    for attempt in record.attempts:
        console.print(escape(f"  asked once more after {attempt_name(attempt)}: {'; '.join(attempt.reasons)}"))
    for sentence in (*record.reasons, *map(str, record.checks), *record.diagnosis):
        console.print(escape(f"  {sentence}"))
    if record.precision is not None:
        console.print(escape(f"  declared: {record.precision}"))
    versions = {
        "torch": used.torch,
        "triton": used.triton,
        "vllm": used.vllm,
        "aiter": used.aiter,
        "commit": used.commit,
    }
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    console.print(escape(f"  on {used.device}, {used.machine}, python {used.python}, {said}"))
    spent = record.seconds
    compiled = f" ({spent.compile:.3f} s of it to compile)" if spent.compile else ""
    console.print(f"  {spent.build:.3f} s to build, {spent.run:.3f} s to run{compiled}, {spent.judge:.3f} s to judge")
    if record.fingerprint:
        console.print(f"  outputs {record.fingerprint[:16]}, source {record.source[:16]}")
    console.print(escape(f"  see it again: {replay_line(record, trees)}"))
    if record.capsule and run is not None:
        console.print(escape(f"  kept: {run / record.capsule}"))
