"""Is the run right, and where not: how does it read on one page, without a server, a network or a library?"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases.precision import Precision
from reports.html import answers, axes, distribution, overview, times
from reports.html.block import block_of
from reports.html.compiled import compiled_of
from reports.html.failures import Group, groups_of, retried
from reports.html.overview import answer
from reports.html.page import is_report, rendered, source, write_page
from reports.html.proofs import is_large, kill_matrix
from reports.html.rows import WRONG, Place, Spelling, judged_use, spelled_counts, status_counts
from reports.prove import TIGHT
from reports.record import Record
from reports.replaying import NO_TREES, Trees, replay_line
from reports.words import plural

if TYPE_CHECKING:
    from cases.covering import Ledger
    from impl.executions.aot.report import Report
    from reports.prove import Proof
    from reports.store import Settings, State

__all__ = ["answer", "is_report", "judged_use", "render", "replay_line", "report_run", "write_report"]

# Failures beyond these numbers are shown shorter, then only counted: a run in which everything fails must still open.
WITH_REPLAY = 300
LISTED = 2500


def write_report(
    records: Sequence[Record],
    out: Path,
    *,
    title: str,
    coverage: Sequence["Ledger"] = (),
    notes: Sequence[str] = (),
    missing: int = 0,
    trees: Trees = NO_TREES,
    state: "State" = "complete",
    facts: Sequence[str] = (),
    proofs: Sequence["Proof"] = (),
    compiled: "Report | None" = None,
    run: Path | None = None,
) -> Path:
    """One self-contained HTML file about `records`, at `out`; returns `out`.

    The file is written beside its place and renamed, so that a reader sees the old report or the new one. It names no
    other file but the capsules of the run that it lies in, and no address. coverage: the t-way coverage of the cases.
    notes: sentences under the verdict. missing: how many planned cases have no record. state: whether more are to come.
    facts: sentences on how the run was made. proofs: what `mla-oracle prove` found. compiled: what `mla-oracle aot`
    found. run: the directory of the records.
    """
    place = None if run is None else Place(run, out.resolve().parent == run.resolve())
    text = render(
        records, title=title, coverage=coverage, notes=notes, missing=missing, trees=trees, state=state, proofs=proofs,
        compiled=compiled, facts=facts, place=place,
    )  # fmt: skip
    return write_page(text, out)


def render(
    records: Sequence[Record],
    *,
    title: str,
    coverage: Sequence["Ledger"] = (),
    notes: Sequence[str] = (),
    missing: int = 0,
    trees: Trees = NO_TREES,
    state: "State" = "complete",
    facts: Sequence[str] = (),
    proofs: Sequence["Proof"] = (),
    compiled: "Report | None" = None,
    place: Place | None = None,
) -> str:
    """The report as one string of HTML."""
    spelling = Spelling(((record.op, record.case) for record in records), trees, place)
    return rendered(
        "report.html.j2",
        **_page(records, spelling, missing, is_large(proofs)),
        title=title,
        notes=notes,
        missing=missing,
        planned=len(records) + missing,
        state=state,
        facts=facts,
        coverage=coverage,
        proofs=kill_matrix(proofs),
        compiled=compiled_of(compiled, records),
        tight=TIGHT,
        script=source("report.js"),
    )


def _page(records: Sequence[Record], spelling: Spelling, missing: int, crowded: bool) -> dict[str, Any]:
    groups = groups_of(records, spelling)
    wrong = [group for group in groups if group.status in WRONG]
    # Who is wrong stands first: a wide table must not hide it.
    blamed = Counter((record.impl, record.on) for record in records if record.status in WRONG)
    columns = sorted({(record.impl, record.on) for record in records}, key=lambda column: (-blamed[column], column))
    tables = axes.tables_of(records, columns, crowded=crowded)
    for number, table in enumerate(tables):
        table["anchor"] = f"op-{number}"
    return {
        "count": len(records),
        "cases": len({record.case for record in records}),
        "answer": answer(records, len(wrong), missing),
        "gpu": any(record.on in ("cuda", "hip") for record in records),
        "counts": spelled_counts(status_counts(records)),
        "executions": overview.executions_of(records),
        "environments": overview.environments_of(records),
        "finished": overview.finished_of(records),
        "matrix": overview.matrix_of(records),
        "anchors": _anchors(groups, tables),
        "wrong": [group for group in wrong if group.kind == "answer"],
        "died": [group for group in wrong if group.kind == "died"],
        "harness": [group for group in wrong if group.kind == "harness"],
        "vacuous": [group for group in groups if group.status == "vacuous"],
        "retried": retried(records, spelling),
        "with_replay": WITH_REPLAY,
        "listed": LISTED,
        "nearest": axes.nearest(records, spelling),
        "tables": tables,
        "opened": max(tables, key=axes.weight, default={"op": ""})["op"],
        "pairs": axes.telling_pairs(tables),
        "curves": distribution.curves_of(records, columns),
        "compared": answers.compared(records, spelling),
        "unsupported": answers.unsupported(records),
        "slowest": times.slowest(records, spelling),
        "seconds": times.totals(records),
        "compiling": times.compiling(records),
        "usual": spelling.usual(),
        "implementations": answers.implementations(records),
        "precision_fields": [field for field in Precision.__struct_fields__ if field != "note"],
        "data": block_of(records, spelling, {table["op"]: table["ranked"] for table in tables}),
    }


def _anchors(groups: Sequence[Group], tables: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Where a number of the overview leads to without a script: its failure, the tables of its op, or the end."""
    found = {table["op"]: table["anchor"] for table in tables if not table["flat"]}
    for group in reversed(groups):
        found[f"{group.op} {group.impl}"] = f"wrong-{group.fingerprint}"
    return found


def _facts(settings: "Settings") -> list[str]:
    """Sentences on a run that is a part of another, or was joined from others."""
    found = []
    if settings.shard:
        found.append(f"Shard {settings.shard} of a plan: the other shards hold the other cases.")
    if settings.merged:
        found.append(f"Joined from {plural(len(settings.merged), 'run')}: {', '.join(settings.merged)}.")
    if settings.failed:
        found.append(f"Asked again what failed in {settings.failed}.")
    return found


def report_run(
    run: Path, out: Path | None = None, proofs: Sequence["Proof"] = (), compiled: "Report | None" = None
) -> Path:
    """The report of a run directory, at `out` or as `report.html` inside the run; returns its path.

    Raises `reports.store.StoreError` for a directory that cannot be read.
    """
    from reports.store import read_run

    found = read_run(run)
    missing = len(found.open_tasks)
    return write_report(
        tuple(found.records.values()),
        out or run / "report.html",
        title=run.resolve().name,
        coverage=found.settings.ledgers,
        notes=found.notes,
        missing=missing,
        trees=Trees.of(found.settings),
        state=found.state,
        facts=_facts(found.settings),
        proofs=proofs,
        compiled=compiled,
        run=run,
    )
