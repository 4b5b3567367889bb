"""Is the run right, and where not: how does it read on one page, without a server, a network or a library?"""

import base64
import dataclasses
import gzip
import json
import math
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from markupsafe import Markup

from cases.precision import Precision
from oracle.check import OFF_THE_SCALE, Check
from reports import figures
from reports.record import Environment, Record
from reports.replaying import NO_TREES, Trees, replay_line

if TYPE_CHECKING:
    from cases.covering import Ledger

# What decides the verdict, worst first; `vacuous` could not have failed, so it settles nothing.
WRONG = ("fail", "memory", "crash", "hang", "error")
STATUSES = (*WRONG, "vacuous", "pass", "unsupported")

# Failures beyond these numbers are shown shorter, then only counted: a run in which everything fails must still open.
WITH_REPLAY = 300
LISTED = 2500
# Passing cases whose sentence the table keeps; the others keep their numbers.
WITH_SENTENCE = 10_000
NEAREST, SLOWEST, EXAMPLES = 20, 20, 6
LONGEST_TEXT = 4000
MOST_VALUES = 16

_TEMPLATES = Path(__file__).parent / "templates"

Column = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """One record as the page prints it: the axes that differ from the commonest value, and the line to see it again."""

    record: Record
    use: float | None
    differs: tuple[tuple[str, str], ...]
    hidden: int
    sentences: tuple[str, ...]
    replay: str

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all parts."""
        return seconds_of(self.record)


@dataclasses.dataclass(frozen=True)
class Group:
    """Records that went wrong in the same way: same op, implementation and status, same diagnosis or same reason."""

    status: str
    op: str
    impl: str
    on: tuple[str, ...]
    title: str
    rows: tuple[Row, ...]
    use: float | None
    shared: tuple[str, ...]
    elsewhere: tuple[str, ...]

    @property
    def also(self) -> tuple[str, ...]:
        """What the worst record's output is like besides the title."""
        return tuple(text for text in self.worst.record.diagnosis if text != self.title)

    @property
    def worst(self) -> Row:
        """The record that speaks for the group."""
        return self.rows[0]


def write_report(
    records: Sequence[Record],
    out: Path,
    *,
    title: str,
    coverage: Sequence["Ledger"] = (),
    notes: Sequence[str] = (),
    missing: int = 0,
    trees: Trees = NO_TREES,
) -> Path:
    """One self-contained HTML file about `records`, at `out`; returns `out`.

    The file is written beside its place and renamed, so that a reader sees the old report or the new one. It names no
    other file and no address. coverage: the t-way coverage of the cases. notes: sentences under the verdict. missing:
    how many planned cases have no record.
    """
    text = render(records, title=title, coverage=coverage, notes=notes, missing=missing, trees=trees)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        draft.write_bytes(text.encode("utf-8", errors="backslashreplace"))
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return out


def render(
    records: Sequence[Record],
    *,
    title: str,
    coverage: Sequence["Ledger"] = (),
    notes: Sequence[str] = (),
    missing: int = 0,
    trees: Trees = NO_TREES,
) -> str:
    """The report as one string of HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "use": figures.spelled_use, "heat": figures.heat, "seconds": figures.spelled_seconds, "number": _number,
        "percent": _percent, "breakable": _breakable,
    }  # fmt: skip
    page = _page(records, coverage, missing, trees)
    return environment.get_template("report.html.j2").render(
        **page, title=title, notes=notes,
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
    )  # fmt: skip


def _page(
    records: Sequence[Record], coverage: Sequence["Ledger"], missing: int, trees: Trees = NO_TREES
) -> dict[str, Any]:
    spelling = Spelling(records, trees)
    counts = status_counts(records)
    groups = _groups(records, spelling)
    # Who is wrong stands first: a wide matrix must not hide it.
    blamed = Counter((record.impl, record.on) for record in records if record.status in WRONG)
    columns = sorted({(record.impl, record.on) for record in records}, key=lambda column: (-blamed[column], column))
    tables = _tables(records, columns)
    return {
        "count": len(records),
        "cases": len({record.case for record in records}),
        "answer": answer(records, sum(group.status in WRONG for group in groups), missing),
        "gpu": any(record.on in ("cuda", "hip") for record in records),
        "counts": [(status, counts[status]) for status in STATUSES if counts[status]],
        "executions": _executions(records),
        "environments": _environments(records),
        "finished": _finished(records),
        "matrix": _matrix(records, columns),
        "groups": [group for group in groups if group.status in WRONG],
        "vacuous": [group for group in groups if group.status == "vacuous"],
        "with_replay": WITH_REPLAY,
        "listed": LISTED,
        "nearest": _nearest(records, spelling),
        "tables": tables,
        "opened": max(tables, key=_weight, default={"op": ""})["op"],
        "legend": figures.legend(),
        "curves": _curves(records, columns),
        "compared": _compared(records, spelling),
        "unsupported": _unsupported(records),
        "slowest": [spelling.row(record) for record in _slowest(records)],
        "seconds": {
            "build": sum(record.seconds.build for record in records),
            "run": sum(record.seconds.run for record in records),
            "reference": sum(record.seconds.reference for record in records),
            "judge": sum(record.seconds.judge for record in records),
        },
        "coverage": coverage,
        "usual": spelling.usual(),
        "implementations": _implementations(records),
        "precision_fields": [field for field in Precision.__struct_fields__ if field != "note"],
        "data": _block(records, spelling, {table["op"]: table["ranked"] for table in tables}),
    }


def seconds_of(record: Record) -> float:
    """Wall-clock seconds of all parts of a record."""
    seconds = record.seconds
    return seconds.build + seconds.run + seconds.reference + seconds.judge


def _slowest(records: Sequence[Record]) -> list[Record]:
    return [record for record in sorted(records, key=seconds_of, reverse=True)[:SLOWEST] if seconds_of(record) > 0]


def _weight(table: dict[str, Any]) -> tuple[int, bool, int]:
    """What makes an op's table the one to see first."""
    return table["wrong"], table["use"] > 0, table["count"]


def judged_use(record: Record) -> float | None:
    """The budget use that the page colours by: None where nothing was judged, off the scale where no number says it.

    A crash has no check and a caught access may have passing ones; neither may look like a small error.
    """
    if record.status in WRONG:
        return record.use if record.use >= 1 else OFF_THE_SCALE
    return record.use if record.status == "pass" else None


def answer(records: Sequence[Record], ways: int, missing: int = 0) -> tuple[str, str, str]:
    """Whether the run is right: the status it is coloured as, the answer in a few words, and the sentence.

    ways: the groups of what is wrong. missing: planned cases without a record; with any, nothing is called right.
    """
    counts = status_counts(records)
    wrong = sum(counts[status] for status in WRONG)
    judged = wrong + counts["pass"] + counts["vacuous"]
    late = f" {_plural(missing, 'planned case')} {_has(missing)} no record yet." if missing else ""
    if not records:
        return "vacuous", "Nothing was run.", f"There is no record, so this page says nothing about any kernel.{late}"
    if not judged:
        said = f"{_all(len(records), 'case')} {_was(len(records))} unsupported; the reasons are below."
        return "vacuous", "Nothing was judged.", said + late
    if wrong:
        said = f"{wrong:,} of {_plural(judged, 'judged case')} {'is' if wrong == 1 else 'are'} wrong"
        return "fail", "No.", f"{said}, in {_plural(ways, 'way')}.{late}"
    if counts["vacuous"]:
        said = f"{_plural(counts['vacuous'], 'case')} could not have failed; {_plural(counts['pass'], 'case')} passed."
        return "vacuous", "Not settled.", said + late
    worst = max(record.use for record in records if record.status == "pass")
    close = f"the closest to its limit used {figures.spelled_use(worst)} of its budget" if worst else "no error at all"
    said = f"{_all(judged, 'judged case')} passed; {close}."
    return ("vacuous", "Not finished.", said + late) if missing else ("pass", "Yes, as far as it was asked.", said)


def status_counts(records: Iterable[Record]) -> Counter[str]:
    """How many records have each status."""
    return Counter(record.status for record in records)


class Spelling:
    """Which axes of a case are worth printing: those where it differs from the commonest value of its op in the run."""

    def __init__(self, records: Iterable[Record], trees: Trees = NO_TREES) -> None:
        self.trees = trees
        self.words: dict[str, dict[str, str]] = {}
        self.axes: dict[str, list[str]] = {}
        self.cases: dict[str, list[str]] = {}
        seen: dict[str, dict[str, Counter[str]]] = {}
        known: set[tuple[str, str]] = set()
        for record in records:
            if (record.op, record.case) in known:
                continue
            known.add((record.op, record.case))
            words = self.words.setdefault(record.case, _words(record.case))
            self.cases.setdefault(record.op, []).append(record.case)
            of_op = seen.setdefault(record.op, {})
            for axis, word in words.items():
                of_op.setdefault(axis, Counter())[word] += 1
        self.counts = seen
        for op, of_op in seen.items():
            self.axes[op] = list(of_op)
        self.common = {
            op: {axis: words.most_common(1)[0][0] for axis, words in of_op.items()} for op, of_op in seen.items()
        }

    def differs(self, record: Record) -> tuple[tuple[str, str], ...]:
        """Axis and word where the record's case is not the commonest."""
        common = self.common[record.op]
        return tuple((axis, word) for axis, word in self.words[record.case].items() if word != common[axis])

    def usual(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """For every op of more than one case, the commonest word of every axis."""
        return [(op, list(self.common[op].items())) for op in sorted(self.common) if len(self.cases[op]) > 1]

    def row(self, record: Record) -> Row:
        """The record as the page prints it."""
        alone = len(self.cases[record.op]) == 1
        words = self.words[record.case]
        differs = tuple(words.items()) if alone else self.differs(record)
        return Row(
            record,
            judged_use(record),
            differs,
            len(words) - len(differs),
            _sentences(record),
            replay_line(record, self.trees),
        )


def _sentences(record: Record) -> tuple[str, ...]:
    """What there is to read about a record: its failing checks, worst first, or its worst check; then the reasons."""
    ordered = sorted(record.checks, key=lambda check: check.use, reverse=True)
    failing = [check for check in ordered if not check.passed]
    # A check of nothing is the reason why a case is vacuous.
    empty = [check for check in ordered if check.count == 0] if record.status == "vacuous" else []
    shown = failing or empty or ([] if record.status in WRONG else ordered[:1])
    return tuple(_short(text) for text in (*map(str, shown), *record.reasons))


def _groups(records: Sequence[Record], spelling: Spelling) -> list[Group]:
    members: dict[tuple[str, str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.status in WRONG or record.status == "vacuous":
            members[record.status, record.op, record.impl, _without_numbers(_complaint(record))].append(record)
    asked: dict[str, list[Record]] = defaultdict(list)
    answers: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.status != "unsupported":
            asked[f"{record.op} {record.impl}"].append(record)
            answers[record.case, record.law].append(record)
    groups = []
    for (status, op, impl, _), found in members.items():
        found.sort(key=lambda record: (-_use_of(record), len(record.case), record.case, record.on, record.law))
        executions = tuple(sorted({record.on for record in found}))
        groups.append(
            Group(
                status,
                op,
                impl,
                executions,
                _complaint(found[0]),
                tuple(spelling.row(record) for record in found),
                judged_use(found[0]),
                _shared(found, asked[f"{op} {impl}"], spelling),
                _elsewhere(found, answers),
            )
        )
    groups.sort(key=lambda group: (STATUSES.index(group.status), -len(group.rows), group.op, group.impl, group.title))
    return groups


def _use_of(record: Record) -> float:
    return judged_use(record) or 0.0


def _complaint(record: Record) -> str:
    """What went wrong in the fewest words: the diagnosis, or the reason of the worst check, or the first reason."""
    if record.diagnosis and "as if " in record.diagnosis[0]:
        return _short(record.diagnosis[0], 400)
    worst: Check | None = max(record.checks, key=lambda check: check.use, default=None)
    if worst is not None and not worst.passed:
        return _short(f"{worst.output}: {worst.why}", 400)
    if record.reasons:
        lines = record.reasons[0].strip().splitlines()
        return _short(lines[0], 400) if lines else "no reason given"
    if record.status == "vacuous" and worst is not None:
        return str(worst) if worst.count == 0 else "no mutant of the op would have been caught on this case"
    return "no reason given"


def _without_numbers(text: str) -> str:
    """The text with numbers replaced, so that two elements of one fault read alike; names such as M3 stay."""
    return re.sub(r"0x[0-9a-fA-F]+|(?<![\w.])[-+±]?\d[\d.,]*(?:e[-+]?\d+)?(?![A-Za-z_])", "#", text)


def _shared(found: Sequence[Record], asked: Sequence[Record], spelling: Spelling) -> tuple[str, ...]:
    """The axes on which all of the group agree although others were asked otherwise, rarest first."""
    if len({record.case for record in found}) < 2:
        return ()
    shared = []
    for axis in spelling.axes[found[0].op]:
        words = {spelling.words[record.case].get(axis) for record in found}
        if len(words) != 1:
            continue
        word = words.pop()
        alike = [record for record in asked if spelling.words[record.case].get(axis) == word]
        # What most were asked says nothing.
        if word is None or 2 * len(alike) > len(asked):
            continue
        passing = sum(record.status == "pass" for record in alike)
        fate = "none of those passes" if not passing else f"{passing:,} of those {'passes' if passing == 1 else 'pass'}"
        shared.append((len(alike), f"{axis}={word}", f"asked {_plural(len(alike), 'time')}, {fate}"))
    shared.sort()
    return tuple(f"{pair} ({fate})" for _, pair, fate in shared[:5])


def _elsewhere(found: Sequence[Record], answers: dict[tuple[str, str], list[Record]]) -> tuple[str, ...]:
    """How other implementations and executions answer the same cases."""
    own = {(record.impl, record.on) for record in found}
    outcomes: dict[Column, Counter[str]] = defaultdict(Counter)
    asked: Counter[Column] = Counter()
    for record in found:
        for other in answers[record.case, record.law]:
            column = (other.impl, other.on)
            if column == (record.impl, record.on):
                continue
            same = bool(record.fingerprint) and other.fingerprint == record.fingerprint
            if column in own and not same:
                continue
            asked[column] += 1
            outcomes[column]["same bytes" if same else other.status] += 1
    sentences = []
    for (impl, on), tally in sorted(outcomes.items()):
        spelled = ", ".join(f"{outcome} {number:,}" for outcome, number in tally.most_common())
        sentences.append(f"{impl} on {on}, {_plural(asked[impl, on], 'case')} of these: {spelled}")
    return tuple(sentences)


def _executions(records: Sequence[Record]) -> list[tuple[str, int, str]]:
    """Each execution, its records, and what it says about a GPU."""
    said = []
    for on, number in sorted(Counter(record.on for record in records).items()):
        devices = sorted({record.environment.device for record in records if record.on == on})
        if on == "interpreter":
            words = (
                "no GPU ran. The kernels were interpreted on the CPU: their arithmetic and addressing are judged, "
                "the machine code of a GPU is not."
            )
        elif on.startswith("isa:"):
            chip = on.removeprefix("isa:")
            words = f"no GPU ran. Machine code for {chip} was executed on the CPU, instruction by instruction."
        else:
            words = f"ran on {', '.join(devices)}."
        said.append((on, number, words))
    return said


def _environments(records: Sequence[Record]) -> dict[str, Any]:
    """The distinct environments as columns, most records first, and the fields in which they differ."""
    tally = Counter(record.environment for record in records)
    found = [environment for environment, _ in tally.most_common()]
    fields = []
    for field in Environment.__struct_fields__:
        words = [str(getattr(environment, field)) for environment in found]
        if any(words):
            fields.append((field, words, len(set(words)) > 1))
    on = [sorted({record.on for record in records if record.environment == environment}) for environment in found]
    return {"records": [tally[environment] for environment in found], "on": on, "fields": fields}


def _finished(records: Sequence[Record]) -> str:
    last = max((record.finished for record in records), default=0.0)
    return datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC") if last > 0 else ""


def _matrix(records: Sequence[Record], columns: Sequence[Column]) -> dict[str, Any]:
    cells: dict[str, dict[Column, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        cells[record.op][record.impl, record.on].append(record)
    rows = []
    for op in sorted(cells):
        row = []
        for column in columns:
            found = cells[op].get(column, [])
            counts = status_counts(found)
            uses = [use for use in map(judged_use, found) if use is not None]
            row.append(
                {
                    "counts": [(status, counts[status]) for status in STATUSES if counts[status]],
                    "count": len(found),
                    "use": max(uses, default=None),
                    "op": op,
                    "impl": column[0],
                    "on": column[1],
                    "wrong": sum(counts[status] for status in WRONG),
                }
            )
        rows.append((op, row))
    return {"columns": columns, "rows": rows}


def _nearest(records: Sequence[Record], spelling: Spelling) -> list[Row]:
    """The passing records closest to their limit, a few per op and implementation so that one cannot fill the list."""
    taken: Counter[tuple[str, str, str]] = Counter()
    nearest = []
    for record in sorted((r for r in records if r.status == "pass" and r.use > 0), key=lambda r: r.use, reverse=True):
        place = (record.op, record.impl, record.on)
        taken[place] += 1
        if taken[place] <= EXAMPLES:
            nearest.append(spelling.row(record))
        if len(nearest) == NEAREST:
            break
    return nearest


def _tables(records: Sequence[Record], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Per op and axis: worst and median budget use for every value, by implementation and execution.

    The axes come in the order of how much of the spread of the logarithm of budget use they explain.
    """
    judged: dict[str, list[tuple[Column, float, dict[str, str]]]] = defaultdict(list)
    for record in records:
        use = judged_use(record)
        if use is not None:
            judged[record.op].append(((record.impl, record.on), use, _words(record.case)))
    tables = []
    for op in sorted(judged):
        rows = judged[op]
        own = [column for column in columns if any(row[0] == column for row in rows)]
        axes: list[dict[str, Any]] = []
        fixed: list[tuple[str, str]] = []
        loose: list[tuple[str, int]] = []
        for axis in dict.fromkeys(axis for row in rows for axis in row[2]):
            words = [row[2].get(axis, "–") for row in rows]
            if len(set(words)) == 1:
                fixed.append((axis, words[0]))
                continue
            labels = _binned(words)
            if axis == "seed" or labels is None:
                loose.append((axis, len(set(words))))
                continue
            explained = _explained([row[1] for row in rows], labels)
            axes.append({"name": axis, "explained": explained, "lines": _by_value(rows, labels, own)})
        axes.sort(key=lambda axis: -axis["explained"])
        tables.append(
            {
                "op": op,
                "columns": own,
                "axes": axes,
                "fixed": fixed,
                "loose": loose,
                "count": len(rows),
                "ranked": [axis["name"] for axis in axes],
                "wrong": sum(use >= 1 for _, use, _ in rows),
                "use": max(use for _, use, _ in rows),
            }
        )
    return tables


def _by_value(
    rows: Sequence[tuple[Column, float, dict[str, str]]], labels: Sequence[str], columns: Sequence[Column]
) -> list[dict[str, Any]]:
    found: dict[str, dict[Column, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (column, use, _), label in zip(rows, labels, strict=True):
        found[label][column].append(use)
    table = []
    for label in sorted(found, key=_natural):
        cells: list[tuple[float | None, float | None]] = []
        for column in columns:
            uses = found[label].get(column)
            cells.append((max(uses), statistics.median(uses)) if uses else (None, None))
        everyone = [use for uses in found[label].values() for use in uses]
        wrong = sum(use >= 1 for use in everyone)
        table.append({"value": label, "count": len(everyone), "wrong": wrong, "cells": cells})
    return table


def _binned(words: Sequence[str]) -> list[str] | None:
    """The words, or for many integers the powers of two between which they lie; None for many different words."""
    if len(set(words)) <= MOST_VALUES:
        return list(words)
    if not all(re.fullmatch(r"[0-9]{1,18}", word) for word in words):
        return None
    labels = []
    for word in words:
        power = max(0, int(word) - 1).bit_length()
        low, high = (1 << power >> 1) + 1, 1 << power
        labels.append(f"{min(low, high)}–{high}" if low < high else str(int(word)))
    return labels if len(set(labels)) <= 2 * MOST_VALUES else None


def _explained(uses: Sequence[float], labels: Sequence[str]) -> float:
    """The share of the variance of log10(use) that lies between the labels, less what chance would give."""
    scores = [math.log10(min(max(use, 1e-4), 10.0)) for use in uses]
    mean = sum(scores) / len(scores)
    total = sum((score - mean) ** 2 for score in scores)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for score, label in zip(scores, labels, strict=True):
        sums[label][0] += score
        sums[label][1] += 1
    if total <= 1e-12 or len(scores) <= len(sums):
        return 0.0
    between = sum(number * (amount / number - mean) ** 2 for amount, number in sums.values())
    return max(0.0, between / total - (len(sums) - 1) / (len(scores) - 1))


def _natural(word: str) -> tuple[int, float, str]:
    """Numbers before words, numbers by size."""
    number = re.match(r"-?\d+", word)
    return (0, float(number[0]), word) if number else (1, 0.0, word)


def _curves(records: Sequence[Record], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Per op the distribution of budget use: a curve and a line of numbers for every implementation and execution."""
    found: dict[str, dict[Column, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        use = judged_use(record)
        if use is not None:
            found[record.op][record.impl, record.on].append(use)
    drawn = []
    for number, op in enumerate(sorted(found)):
        uses = {column: found[op][column] for column in columns if column in found[op]}
        svg = None
        if any(map(figures.has_distribution, uses.values())):
            names = {f"{impl} {on}": values for (impl, on), values in uses.items()}
            svg = Markup(figures.distribution(names, name=f"f{number}"))
        lines = []
        for place, ((impl, on), values) in enumerate(uses.items()):
            values = sorted(values)
            lines.append(
                {
                    "impl": impl,
                    "on": on,
                    "mark": figures.swatch(place),
                    "count": len(values),
                    "median": statistics.median(values),
                    "high": values[math.ceil(0.99 * len(values)) - 1],
                    "worst": values[-1],
                    "over": sum(value >= 1 for value in values),
                }
            )
        drawn.append({"op": op, "svg": svg, "lines": lines})
    return drawn


def _compared(records: Sequence[Record], spelling: Spelling) -> list[dict[str, Any]]:
    """Where one implementation answered a case on two executions: same bytes, same verdict, and examples where not."""
    answers: dict[tuple[str, str, str, str], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record.status not in ("unsupported", "vacuous"):
            answers[record.op, record.impl, record.case, record.law][record.on] = record
    pairs: dict[tuple[str, str, str, str], list[tuple[Record, Record]]] = defaultdict(list)
    for (op, impl, _, _), by_execution in answers.items():
        for one, other in combinations(sorted(by_execution), 2):
            pairs[op, impl, one, other].append((by_execution[one], by_execution[other]))
    compared = []
    for (op, impl, one, other), found in sorted(pairs.items()):
        apart = [pair for pair in found if pair[0].status != pair[1].status]
        printed = [pair for pair in found if pair[0].fingerprint and pair[1].fingerprint]
        shown = apart[:EXAMPLES]
        compared.append(
            {
                "op": op,
                "impl": impl,
                "one": one,
                "other": other,
                "count": len(found),
                "printed": len(printed),
                "same": sum(a.fingerprint == b.fingerprint for a, b in printed),
                "apart": len(apart),
                "examples": [(a.status, b.status, spelling.row(b if a.status == "pass" else a)) for a, b in shown],
            }
        )
    return compared


def _unsupported(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every declared reason with its counts; those that differ only in the value of their axis are one."""
    found: dict[tuple[str, str, str], list[tuple[str, Record]]] = defaultdict(list)
    for record in records:
        if record.status == "unsupported":
            for reason in record.reasons or ("no reason given",):
                named = re.match(r"(\w+)=(\S+): (.+)$", reason)
                axis, value, why = named.groups() if named else ("", "", reason)
                found[record.impl, axis, _short(why, 400)].append((value, record))
    reasons: list[dict[str, Any]] = []
    for (impl, axis, why), members in found.items():
        values = sorted({value for value, _ in members if value}, key=_natural)
        shown = "|".join(values[:8]) + ("|…" if len(values) > 8 else "")
        reasons.append(
            {
                "impl": impl,
                "why": f"{axis}={shown}: {why}" if axis else why,
                "count": len(members),
                "ops": sorted({record.op for _, record in members}),
                "on": sorted({record.on for _, record in members}),
            }
        )
    reasons.sort(key=lambda reason: (-reason["count"], reason["impl"], reason["why"]))
    return reasons


def _implementations(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every implementation and execution with the rounding points it declares; ops that declare the same are one."""
    found: dict[tuple[str, str, Precision | None], set[str]] = defaultdict(set)
    sources: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for record in records:
        if record.precision is not None or record.status not in ("unsupported", "crash", "hang"):
            found[record.impl, record.on, record.precision].add(record.op)
        if record.source:
            sources[record.impl, record.on, record.op].add(record.source)
    lines: list[dict[str, Any]] = []
    for (impl, on, precision), ops in found.items():
        declared = {} if precision is None else msgspec.structs.asdict(precision)
        changed = [op for op in sorted(ops) if len(sources[impl, on, op]) > 1]
        lines.append({"impl": impl, "on": on, "precision": declared, "ops": sorted(ops), "changed": changed})
    lines.sort(key=lambda line: (line["impl"], line["on"], line["ops"]))
    return lines


def _words(case: str) -> dict[str, str]:
    """Axis to word as the id spells them; no op's module is asked, so that a report of an old run still reads."""
    _, colon, rest = case.partition(":")
    words = {}
    for part in (rest if colon else case).split(","):
        axis, equals, word = part.partition("=")
        words[axis if equals else "case"] = word if equals else part
    return words


def _block(records: Sequence[Record], spelling: Spelling, ranked: dict[str, list[str]]) -> str:
    """All rows as JSON by columns, gzipped, in base64: what the page's table and map of two axes are made from."""
    texts: dict[str, int] = {}
    names: dict[str, dict[str, int]] = {"impls": {}, "ons": {}, "laws": {}, "outputs": {}}
    ops, place_of = [], {}
    for number, (op, cases) in enumerate(spelling.cases.items()):
        axes = spelling.axes[op]
        words: list[dict[str, int]] = [{} for _ in axes]
        cells: list[list[int]] = [[] for _ in axes]
        odd = {}
        for place, case in enumerate(cases):
            place_of[op, case] = (number, place)
            own = spelling.words[case]
            for axis, known, column in zip(axes, words, cells, strict=True):
                column.append(_interned(known, own[axis]) if axis in own else -1)
            if f"{op}:" + ",".join(f"{axis}={own[axis]}" for axis in axes if axis in own) != case:
                odd[place] = case
        common = [known[spelling.common[op][axis]] for axis, known in zip(axes, words, strict=True)]
        ops.append(
            {
                "name": op,
                "axes": axes,
                "words": [list(known) for known in words],
                "cells": cells,
                "common": common,
                "odd": odd,
                "alone": len(cases) == 1,
                "ranked": [axes.index(axis) for axis in ranked.get(op, [])],
            }
        )
    passing = sorted((r.use for r in records if r.status == "pass"), reverse=True)
    quiet_below = passing[WITH_SENTENCE] if len(passing) > WITH_SENTENCE else -1.0
    rows: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        op_number, place = place_of[record.op, record.case]
        worst: Check | None = max(record.checks, key=lambda check: check.use, default=None)
        quiet = record.status == "pass" and record.use <= quiet_below
        rows["op"].append(op_number)
        rows["case"].append(place)
        rows["impl"].append(_interned(names["impls"], record.impl))
        rows["on"].append(_interned(names["ons"], record.on))
        rows["law"].append(_interned(names["laws"], record.law))
        rows["status"].append(STATUSES.index(record.status))
        use = judged_use(record)
        rows["use"].append(None if use is None else _rounded(use))
        rows["output"].append(_interned(names["outputs"], "" if worst is None else f"{worst.output} {worst.measure}"))
        rows["seconds"].append(_rounded(seconds_of(record)))
        rows["texts"].append([] if quiet else [_interned(texts, _short(text, 1200)) for text in _sentences(record)])
        rows["diagnosis"].append([_interned(texts, _short(text, 1200)) for text in record.diagnosis])
    block = {
        "ops": ops,
        "statuses": STATUSES,
        "wrong": len(WRONG),
        "off": OFF_THE_SCALE,
        "steps": figures.STEPS,
        "rows": rows,
        "texts": list(texts),
        **{name: list(known) for name, known in names.items()},
    }
    packed = gzip.compress(json.dumps(block, separators=(",", ":")).encode("utf-8"), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _interned(known: dict[str, int], text: str) -> int:
    return known.setdefault(text, len(known))


def _rounded(value: float) -> float:
    if value >= OFF_THE_SCALE:
        return OFF_THE_SCALE
    short = float(f"{value:.3g}")
    return 0.999 if value < 1 <= short else short


def _short(text: str, longest: int = LONGEST_TEXT) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … {len(text) - longest:,} more characters in the record"


def _number(value: float) -> str:
    return f"{value:,}"


def _breakable(line: str, after: str = ",") -> Markup:
    """The escaped line, which may break after those characters; what is copied stays the line."""
    return Markup("<wbr>").join(re.split(f"(?<=[{re.escape(after)}])", line))


def _percent(share: float) -> str:
    """A share in percent; what is not all never reads as 100, and what is not nothing never as 0."""
    percent = 100 * share
    if 99.9 < percent < 100:
        return f"{math.floor(percent * 100) / 100:.2f} %"
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.{0 if percent in (0, 100) else 1 if percent >= 1 else 2}f} %"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _all(number: int, noun: str) -> str:
    return f"The one {noun}" if number == 1 else f"All {number:,} {noun}s"


def _has(number: int) -> str:
    return "has" if number == 1 else "have"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


_MARK = b'name="generator" content="mla-oracle report"'


def is_report(path: Path) -> bool:
    """Whether a file is a page that `write_report` wrote, which alone it may replace."""
    with path.open("rb") as file:
        return _MARK in file.read(4096)


def report_run(run: Path, out: Path | None = None) -> Path:
    """The report of a run directory, at `out` or as `report.html` inside the run; returns its path.

    Raises `reports.store.StoreError` for a directory that cannot be read.
    """
    from reports.store import read_run

    found = read_run(run)
    return write_report(
        tuple(found.records.values()),
        out or run / "report.html",
        title=run.resolve().name,
        coverage=found.settings.ledgers,
        notes=found.notes,
        missing=len(found.open_tasks),
        trees=Trees.of(found.settings),
    )
