"""What do the compiled kernels take: how does it read on one page?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from impl.executions.aot.baseline import Comparison
from impl.executions.aot.report import Report, Row
from reports.html.page import rendered, write_page
from reports.words import plural


def write_aot(report: Report, compared: Comparison | None, out: Path) -> Path:
    """One self-contained HTML file about compiled kernels, at `out`; returns `out`."""
    return write_page(render_aot(report, compared), out)


def render_aot(report: Report, compared: Comparison | None) -> str:
    """The page as one string of HTML; it needs no script."""
    changes = {row.key: change for row, change in compared.changes} if compared is not None else {}
    kernels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report.rows:
        line = {"row": row, "change": changes.get(row.key, ""), "calls": _calls(row)}
        kernels.setdefault((row.kernel, row.module), []).append(line)
    return rendered(
        "aot.html.j2",
        title=f"Triton {report.triton}, {' and '.join(report.arches)}",
        answer=answer_of(report, compared),
        report=report,
        compared=compared,
        heaviest=heaviest(report.rows),
        own_spills=[row for row in report.rows if row.is_own and row.resources is not None and row.resources.spills],
        kernels=sorted(kernels.items()),
        reasons=reasons_of(report),
    )


def answer_of(report: Report, compared: Comparison | None) -> tuple[str, str, str]:
    """The status it is coloured as, the answer in a few words, and the sentence."""
    kernels = {(row.module, row.kernel) for row in report.rows}
    asked = f"{plural(len(report.rows), 'compilation')} of {plural(len(kernels), 'kernel')}"
    grown = sum(growth.closes for growth in compared.growths) if compared is not None else 0
    wrong = [
        *([f"{plural(len(report.failures), 'compilation')} failed"] if report.failures else []),
        *([f"{plural(len(report.broken), 'wrapper')} broke"] if report.broken else []),
        *([f"{plural(grown, 'resource')} grew beyond the baseline"] if grown else []),
    ]
    if not report.rows and not wrong:
        return "vacuous", "Nothing compiled.", "No implementation that was chosen launches a kernel here."
    if wrong:
        return "fail", "They do not fit." if report.failures else "It broke.", f"Of {asked}, {', '.join(wrong)}."
    return "pass", "They fit.", f"{asked[0].upper()}{asked[1:]}, none of which failed."


def heaviest(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    """Of each kernel on each architecture the configuration that takes most, and how many there are; failures first."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.kernel, row.module, row.arch), []).append(row)
    worst = [(max(same, key=_weight), len(same)) for same in found.values()]
    return sorted(worst, key=lambda line: (not line[0].failure, line[0].module, line[0].kernel, line[0].arch))


def heaviest_first(rows: Sequence[Row]) -> list[Row]:
    """The rows by what they take; failures before all others."""
    return sorted(rows, key=_weight, reverse=True)


def _weight(row: Row) -> tuple[bool, int, int, float, int]:
    taken = row.resources
    if taken is None:
        return True, 0, 0, 0.0, 0
    return (
        bool(row.failure),
        taken.scratch + taken.vgpr_spills,
        taken.sgpr_spills,
        -taken.waves,
        taken.vgpr + taken.agpr,
    )


def _calls(row: Row) -> list[str]:
    """Who asks, each implementation with its first call, and how many more."""
    found: dict[str, list[str]] = {}
    for asked in row.asked:
        found.setdefault(f"{asked.op} {asked.impl}", []).append(asked.call)
    more = {
        who: f" and {plural(len(calls) - 1, 'more call')}" if len(calls) > 1 else "" for who, calls in found.items()
    }
    return [f"{who}: {calls[0]}{more[who]}" for who, calls in found.items()]


def reasons_of(report: Report) -> list[tuple[str, str, str, int]]:
    """Why implementations were not compiled in calls: op, implementation, reasons, and in how many calls."""
    found: dict[tuple[str, str, str], int] = {}
    for each in report.unasked:
        key = each.op, each.impl, "; ".join(each.reasons)
        found[key] = found.get(key, 0) + 1
    return [(*key, count) for key, count in found.items()]
