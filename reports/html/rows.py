"""How does one record read in a row: by which axes of its case, by which budget use, by which sentences?"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from oracle.check import OFF_THE_SCALE
from reports.record import Record
from reports.replaying import NO_TREES, Trees, replay_line
from reports.words import short

# What decides the verdict, worst first; `vacuous` could not have failed, so it settles nothing.
WRONG = ("fail", "memory", "crash", "hang", "error")
STATUSES = (*WRONG, "vacuous", "pass", "unsupported")

Column = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """One record as the page prints it: the axes that differ from the commonest value, and the line to see it again.

    capsule: where the trial is kept; link: how the page leads there, empty when it cannot.
    """

    record: Record
    use: float | None
    differs: tuple[tuple[str, str], ...]
    hidden: int
    sentences: tuple[str, ...]
    replay: str
    capsule: str = ""
    link: str = ""

    @property
    def law(self) -> str:
        """The law that was asked about; empty when the answer itself was."""
        return self.record.law

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all parts."""
        return seconds_of(self.record)


def seconds_of(record: Record) -> float:
    """Wall-clock seconds of all parts of a record."""
    seconds = record.seconds
    return seconds.build + seconds.run + seconds.reference + seconds.judge


def judged_use(record: Record) -> float | None:
    """The budget use that the page colours by: None where nothing was judged, off the scale where no number says it.

    A crash has no check and a caught access may have passing ones; neither may look like a small error.
    """
    if record.status in WRONG:
        return record.use if record.use >= 1 else OFF_THE_SCALE
    return record.use if record.status == "pass" else None


def middle(uses: Sequence[float]) -> float:
    """The median; where half is off the scale, so is the middle: no number lies between."""
    high = statistics.median_high(uses)
    return high if high >= OFF_THE_SCALE else statistics.median(uses)


def status_counts(records: Iterable[Record]) -> Counter[str]:
    """How many records have each status."""
    return Counter(record.status for record in records)


def spelled_counts(counts: Counter[str]) -> list[tuple[str, int]]:
    """The statuses that there are with their numbers, worst first."""
    return [(status, counts[status]) for status in STATUSES if counts[status]]


def words_of(case: str) -> dict[str, str]:
    """Axis to word as the id spells them; no op's module is asked, so that a report of an old run still reads."""
    _, colon, rest = case.partition(":")
    words = {}
    for part in (rest if colon else case).split(","):
        axis, equals, word = part.partition("=")
        words[axis if equals else "case"] = word if equals else part
    return words


def sentences_of(record: Record) -> tuple[str, ...]:
    """What there is to read about a record: its failing checks, worst first, or its worst check; then the reasons."""
    ordered = sorted(record.checks, key=lambda check: check.use, reverse=True)
    failing = [check for check in ordered if not check.passed]
    # A check of nothing is the reason why a case is vacuous.
    empty = [check for check in ordered if check.count == 0] if record.status == "vacuous" else []
    shown = failing or empty or ([] if record.status in WRONG else ordered[:1])
    return tuple(short(text) for text in (*map(str, shown), *record.reasons))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the run lies, and whether the page lies in it, so that relative links lead to the run's files."""

    run: Path
    inside: bool

    def capsule(self, name: str) -> tuple[str, str]:
        """What to print for a capsule of the run, and the link to it; no link where there is no such file."""
        path = PurePosixPath(name)
        own = not path.is_absolute() and ".." not in path.parts and ":" not in name
        if not own or not (self.run / name).is_file():
            return f"{name}, which is not in the run's directory", ""
        return (name, quote(name)) if self.inside else (str(self.run / name), "")


class Spelling:
    """Which axes of a case are worth printing: those where it differs from the commonest value of its op on the page.

    asked: op and case id, as often as they come.
    """

    def __init__(self, asked: Iterable[tuple[str, str]], trees: Trees = NO_TREES, place: Place | None = None) -> None:
        self.trees = trees
        self._place = place
        self.words: dict[str, dict[str, str]] = {}
        self.axes: dict[str, list[str]] = {}
        self.cases: dict[str, list[str]] = {}
        seen: dict[str, dict[str, Counter[str]]] = {}
        for op, case in dict.fromkeys(asked):
            words = self.words.setdefault(case, words_of(case))
            self.cases.setdefault(op, []).append(case)
            of_op = seen.setdefault(op, {})
            for axis, word in words.items():
                of_op.setdefault(axis, Counter())[word] += 1
        for op, of_op in seen.items():
            self.axes[op] = list(of_op)
        self.common = {
            op: {axis: words.most_common(1)[0][0] for axis, words in of_op.items()} for op, of_op in seen.items()
        }

    def differs(self, op: str, case: str) -> tuple[tuple[str, str], ...]:
        """Axis and word where the case is not the commonest; all of them where the op has only this case."""
        words = self.words[case]
        if len(self.cases[op]) == 1:
            return tuple(words.items())
        common = self.common[op]
        return tuple((axis, word) for axis, word in words.items() if word != common[axis])

    def usual(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """For every op of more than one case, the commonest word of every axis."""
        return [(op, list(self.common[op].items())) for op in sorted(self.common) if len(self.cases[op]) > 1]

    def row(self, record: Record) -> Row:
        """The record as the page prints it."""
        differs = self.differs(record.op, record.case)
        capsule, link = "", ""
        if record.capsule:
            capsule, link = self._place.capsule(record.capsule) if self._place else (record.capsule, "")
        return Row(
            record=record,
            use=judged_use(record),
            differs=differs,
            hidden=len(self.words[record.case]) - len(differs),
            sentences=sentences_of(record),
            replay=replay_line(record, self.trees),
            capsule=capsule,
            link=link,
        )
