"""What went wrong, and which records went wrong in the same way?"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

from reports.alike import complaint, failure_fingerprint, without_numbers
from reports.execute import HARNESS
from reports.html.rows import STATUSES, WRONG, Column, Row, Spelling, judged_use
from reports.record import Record
from reports.words import plural

# Whom a failure speaks of: the suspect's answer, the process or the device it ran in, or this harness.
Kind = Literal["answer", "died", "harness"]


@dataclasses.dataclass(frozen=True)
class Group:
    """Records that went wrong in the same way: same op, implementation and status, same diagnosis or same reason.

    fingerprint: the same for the same kind of failure in every run.
    """

    kind: Kind
    status: str
    op: str
    impl: str
    on: tuple[str, ...]
    title: str
    fingerprint: str
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

    @property
    def retried(self) -> int:
        """How many of the records were asked once more before they ended so."""
        return sum(bool(row.record.attempts) for row in self.rows)


def kind_of(record: Record) -> Kind:
    """Whom a record that went wrong speaks of."""
    if any(reason.startswith(HARNESS) for reason in record.reasons):
        return "harness"
    return "died" if record.infrastructure else "answer"


def retried(records: Sequence[Record], spelling: Spelling) -> list[Row]:
    """Every record that was asked once more, those that then passed first: they show it nowhere else."""
    found = [record for record in records if record.attempts]
    found.sort(key=lambda record: (record.status in WRONG, record.op, record.impl, record.on, record.case))
    return [spelling.row(record) for record in found]


def groups_of(records: Sequence[Record], spelling: Spelling) -> list[Group]:
    """The groups of all that is wrong or vacuous, worst status first, then most records first."""
    members: dict[tuple[Kind, str, str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.status in WRONG or record.status == "vacuous":
            alike = without_numbers(complaint(record))
            members[kind_of(record), record.status, record.op, record.impl, alike].append(record)
    asked: dict[str, list[Record]] = defaultdict(list)
    answers: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.status != "unsupported":
            asked[f"{record.op} {record.impl}"].append(record)
            answers[record.case, record.law].append(record)
    groups = []
    for (kind, status, op, impl, _), found in members.items():
        found.sort(key=lambda record: (-_use_of(record), len(record.case), record.case, record.on, record.law))
        groups.append(
            Group(
                kind=kind,
                status=status,
                op=op,
                impl=impl,
                on=tuple(sorted({record.on for record in found})),
                title=complaint(found[0]),
                fingerprint=failure_fingerprint(found[0]),
                rows=tuple(spelling.row(record) for record in found),
                use=judged_use(found[0]),
                shared=_shared(found, asked[f"{op} {impl}"], spelling),
                elsewhere=_elsewhere(found, answers),
            )
        )
    groups.sort(key=lambda group: (STATUSES.index(group.status), -len(group.rows), group.op, group.impl, group.title))
    return groups


def _use_of(record: Record) -> float:
    return judged_use(record) or 0.0


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
        shared.append((len(alike), f"{axis}={word}", f"asked {plural(len(alike), 'time')}, {fate}"))
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
        sentences.append(f"{impl} on {on}, {plural(asked[impl, on], 'case')} of these: {spelled}")
    return tuple(sentences)
