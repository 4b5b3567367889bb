"""What changed between two runs: how does it read on one page?"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from reports import figures
from reports.diff import KINDS, LEVEL, MEANINGS, WORSE, Change, Diff, Kind, Slowdown, compare
from reports.html.page import rendered, write_page
from reports.html.rows import Spelling
from reports.record import Record
from reports.replaying import NO_TREES, Trees, replay_line
from reports.store import StoreError, read_run
from reports.words import plural, short

# Of each group so many changes stand open, one where there are many groups. Others can be opened, until the page has so
# many, each class its share; then they are only counted. Of those, the first have a line that runs them again.
_EXAMPLES, _MANY_GROUPS = 3, 200
_LISTED = 2000
_WITH_REPLAY = 300
_LONGEST_SENTENCE = 600

# What a change of each class means for whoever reads it, under its heading.
_LEADS: Mapping[Kind, str] = {
    "new_failure": "These fail now and did not before: they passed, were unsupported, or were not asked.",
    "changed_failure": "These failed before and fail now, but otherwise: another status, other bits, another diagnosis.",
    "fixed": "These failed before and pass now.",
    "lost_coverage": "These were judged before and are not now. A kernel nobody asks about cannot be seen to break.",
    "new_coverage": "These were not judged before and pass now.",
    "changed_reasons": "Unsupported both times, for other reasons.",
    "bit_change": "The outputs differ in their bits and stay within their budget both times.",
    "rejudged": "The same bits use another share of their budget: a reference, a budget or a rounding point moved.",
}


def write_diff(diff: Diff, out: Path, *, trees: Trees = NO_TREES) -> Path:
    """One self-contained HTML file about a diff, at `out`; returns `out`. trees: those of the later run, for its lines."""
    return write_page(render_diff(diff, trees=trees), out)


def report_difference(before: Path, after: Path, out: Path) -> Path:
    """The page of what changed from one run directory to another, at `out`; returns `out`.

    Raises `reports.store.StoreError` for a directory that cannot be read.
    """
    runs = read_run(before), read_run(after)
    if not runs[0].records:
        asked = plural(len(runs[0].plan), "question")
        raise StoreError(f"{before}: none of its {asked} has a record, so there is nothing to compare with")
    return write_diff(compare(*runs), out, trees=Trees.of(runs[1].settings))


def render_diff(diff: Diff, *, trees: Trees = NO_TREES) -> str:
    """The page of a diff as one string of HTML; it needs no script."""
    spelling = Spelling(((change.op, change.case) for change in diff.changes), trees)
    writer = _Writer(diff, spelling)
    counts = diff.counts
    return rendered(
        "diff.html.j2",
        diff=diff,
        names=_names(diff),
        answer=answer_of(diff),
        counts=[(kind, MEANINGS[kind], counts[kind], kind in WORSE) for kind in KINDS if counts[kind]],
        sections=[
            {
                "kind": kind,
                "title": MEANINGS[kind],
                "lead": _LEADS[kind],
                "count": counts[kind],
                "worse": kind in WORSE,
                "groups": writer.groups(diff.of(kind)),
            }
            for kind in KINDS
            if counts[kind]
        ],
        growths=[growth for growth in diff.growths if growth.grew],
        shrunk=[growth for growth in diff.growths if not growth.grew],
        times=[_time(found) for found in sorted(diff.times, key=_slowest_first) if found.seen],
        steady=[_time(found) for found in diff.times if not found.seen],
        level=LEVEL,
        usual=spelling.usual(),
    )


# How the classes read that count against a run, one of them and several.
_COUNTED: Mapping[Kind, tuple[str, str]] = {
    "new_failure": ("new failure", "new failures"),
    "changed_failure": ("failure that changed", "failures that changed"),
    "lost_coverage": ("question is judged no more", "questions are judged no more"),
}


def answer_of(diff: Diff) -> tuple[str, str, str]:
    """Whether the later run is worse: the status it is coloured as, the answer in a few words, and the sentence."""
    counts = diff.counts
    grown = [growth for growth in diff.growths if growth.grew]
    told = [f"{counts[kind]:,} {_COUNTED[kind][counts[kind] > 1]}" for kind in WORSE if counts[kind]]
    if grown:
        told.append(f"budget use grew in {plural(len(grown), 'place')}")
    same = f"{plural(diff.unchanged, 'question')} {'has' if diff.unchanged == 1 else 'have'} the same answer"
    if told:
        return "fail", "Worse.", f"{_listed(told)}; {same}."
    others = [f"{counts[kind]:,} {MEANINGS[kind]}" for kind in KINDS if counts[kind]]
    if others:
        return "pass", "Not worse.", f"{_listed(others)}; {same}."
    if not diff.unchanged:
        return "vacuous", "Nothing to compare.", "The two runs share no question that either of them judged."
    return "pass", "Nothing changed.", f"{same[0].upper()}{same[1:]}."


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _names(diff: Diff) -> tuple[str, str]:
    """The runs' own names, or their paths where the names are alike."""
    before, after = Path(diff.before).name, Path(diff.after).name
    return (before, after) if before != after else (diff.before, diff.after)


class _Writer:
    """What the page writes out of the changes, and how much it has written so far."""

    def __init__(self, diff: Diff, spelling: Spelling) -> None:
        kinds = {change.kind for change in diff.changes}
        groups = {(change.kind, change.op, change.impl, change.on) for change in diff.changes}
        self._spelling = spelling
        self._examples = _EXAMPLES if len(groups) <= _MANY_GROUPS else 1
        self._share = _LISTED // max(1, len(kinds))
        self._opened = 0

    def groups(self, changes: Iterable[Change]) -> list[dict[str, Any]]:
        """The changes of a class by op, implementation and execution, most first; each group's gravest stand in front."""
        found: dict[tuple[str, str, str], list[Change]] = defaultdict(list)
        for change in changes:
            found[change.op, change.impl, change.on].append(change)
        groups = []
        room = self._share
        for (op, impl, on), members in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
            more = members[self._examples :][:room]
            room -= len(more)
            groups.append(
                {
                    "op": op,
                    "impl": impl,
                    "on": on,
                    "count": len(members),
                    "rows": [self._row(change, replayed=True) for change in members[: self._examples]],
                    "more": [self._row(change, replayed=self._replayed()) for change in more],
                    "left": max(0, len(members) - self._examples) - len(more),
                }
            )
        return groups

    def _replayed(self) -> bool:
        self._opened += 1
        return self._opened <= _WITH_REPLAY

    def _row(self, change: Change, *, replayed: bool) -> dict[str, Any]:
        differs = self._spelling.differs(change.op, change.case)
        record = change.after or change.before
        return {
            "was": change.was,
            "now": change.now,
            "differs": differs,
            "hidden": len(self._spelling.words[change.case]) - len(differs),
            "law": change.law,
            "sentence": short(change.sentence, _LONGEST_SENTENCE),
            "uses": (_use(change.before), _use(change.after)),
            "replay": replay_line(record, self._spelling.trees) if record and replayed else "",
        }


def _use(record: Record | None) -> float | None:
    return record.use if record is not None and record.checks else None


def _slowest_first(found: Slowdown) -> tuple[bool, float]:
    return found.op != "", -found.ratio


def _time(found: Slowdown) -> dict[str, Any]:
    drawn = Markup(figures.interval(found.low, found.ratio, found.high, found.elsewhere))
    return {"found": found, "drawn": drawn}
