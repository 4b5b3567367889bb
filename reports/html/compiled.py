"""What do the kernels take where they were compiled for GPUs that are not here: how does it stand in the page of a run?"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from impl.executions.aot.report import Report, ReportError, Row, read_report
from reports.html.aot import answer_of, heaviest, heaviest_first, reasons_of
from reports.record import Record

NAME = "aot.json"
"""What `mla-oracle aot --out RUN` writes into a run, from where its page takes it without being asked."""


def read_compiled(path: Path) -> Report:
    """What `mla-oracle aot --out` found; raises `ReportError` for any other file."""
    try:
        return read_report(path)
    except RecursionError:
        raise ReportError(f"{path}: is nested too deeply; it should be the aot.json of an earlier --out") from None


def compiled_of(report: Report | None, records: Iterable[Record]) -> dict[str, Any] | None:
    """What the section of compiled kernels says; None without a report.

    Each kernel has a line for its heaviest configuration on each architecture, and a list of all of them, the heaviest
    first, that differ in what is printed of each.
    """
    if report is None:
        return None
    listed: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        listed.setdefault((row.kernel, row.module), []).append(row)
    kernels = [_kernel(rows, f"compiled-{number}") for number, (_, rows) in enumerate(sorted(listed.items()))]
    anchors = {(each["kernel"], each["module"]): each["anchor"] for each in kernels}
    return {
        "report": report,
        "answer": answer_of(report, None),
        "wrong": len(report.failures) + len(report.broken),
        "elsewhere": _elsewhere(report, records),
        "heaviest": [(row, count, anchors[row.kernel, row.module]) for row, count in heaviest(report.rows)],
        "kernels": kernels,
        "reasons": reasons_of(report),
    }


def _kernel(rows: Sequence[Row], anchor: str) -> dict[str, Any]:
    """One kernel with all its configurations: what they share once, what differs with each."""
    settings = [_settings(row) for row in rows]
    shared = {what: word for what, word in settings[0].items() if all(each.get(what) == word for each in settings)}
    alike = Counter((row.arch, row.configuration) for row in rows)
    lines = []
    for row in heaviest_first(rows):
        # Constants and options tell most configurations apart; the others differ in the types of their arguments.
        marks = "=:" if alike[row.arch, row.configuration] > 1 else "="
        differs = [
            (*what, word) for what, word in _settings(row).items() if what not in shared and what[1] in marks
        ]  # fmt: skip
        lines.append({"row": row, "differs": differs})
    return {
        "kernel": rows[0].kernel,
        "module": rows[0].module,
        "anchor": anchor,
        "failed": sum(bool(row.failure) for row in rows),
        "asked": list(dict.fromkeys(f"{asked.op} {asked.impl}" for row in rows for asked in row.asked)),
        "shared": [(*what, word) for what, word in shared.items() if what[1] == "="],
        "notes": list(dict.fromkeys(note for row in rows for note in row.notes)),
        "lines": lines,
    }


def _settings(row: Row) -> dict[tuple[str, str], str]:
    """What sets a configuration apart: constants and options, `name=`, and types of arguments, `name:`."""
    types = (word.partition(":") for word in row.arguments.split())
    return {
        **{(name, "="): word for name, word in (*row.constants.items(), *row.options.items())},
        **{(name, ":"): word for name, _, word in types},
    }


def _elsewhere(report: Report, records: Iterable[Record]) -> list[str]:
    """The versions of Triton with which the records were made, where they are not the one that compiled."""
    asked = {record.environment.triton for record in records if record.status != "unsupported"}
    return sorted(asked - {"", report.triton})
