"""What does a kernel author read when their function failed some of the sweep's cases?"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from oracle.check import Check
from reports.execute import Trial
from reports.plan import AGAINST
from reports.record import Record
from reports.words import plural

_MOST_REASONS = 5
# One check says what a failure is; more of the same case only where they say something else.
_MOST_SENTENCES = 3


def message(
    op: str,
    name: str,
    records: Sequence[Record],
    most: int,
    again: Callable[[str, str], str],
    stopped: str = "",
) -> str:
    """The story of a call that is no pass, a headline first.

    again: writes the line that asks a case by its id again, given the function's name. stopped: why not all were asked.
    """
    failed = [record for record in records if record.status in AGAINST]
    counts: Counter[str] = Counter(record.status for record in records)
    rest = ", ".join(f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status])
    if not failed:
        lines = [
            f"{op}: none of {plural(len(records), 'case')} was judged, so this is no pass: {name} on {_where(records)}"
        ]
    else:
        about_laws = sum(bool(record.law) for record in records)
        asked = plural(len(records) - about_laws, "case")
        asked += f" and {plural(about_laws, 'question')} about laws" if about_laws else ""
        lines = [f"{op}: {len(failed)} failed of {asked}: {name} on {_where(records)}{f' ({rest})' if rest else ''}"]
    if stopped:
        lines.append(stopped)
    groups = _grouped(failed)
    shown = _shares(groups, most)
    for heading, group in groups.items():
        mine = group[: shown[heading]]
        lines += ["", f"{heading}: {len(group)} of {len(failed)}"]
        for record in mine:
            law = f" (law {record.law})" if record.law else ""
            lines += [f"  {sentence}{law}" for sentence in _sentences(record) if sentence != heading]
            lines.append(f"    again: {again(record.case, name)}")
        if len(mine) < len(group):
            lines.append(f"  and {len(group) - len(mine)} more")
    reasons = Counter(reason for record in records if record.status == "unsupported" for reason in record.reasons)
    if reasons:
        lines.append("")
    lines += [f"not answered: {reason} ({count})" for reason, count in reasons.most_common(_MOST_REASONS)]
    if len(reasons) > _MOST_REASONS:
        lines.append(f"not answered for {plural(len(reasons) - _MOST_REASONS, 'other reason')}")
    return "\n".join(lines)


_POINTS = ("score", "query", "key", "probability", "accumulate", "partial", "averaged", "output")
_WORDS = {"pass": "passed", "unsupported": "not answered"}


def _where(records: Sequence[Record]) -> str:
    return records[0].on if records else "nothing"


def _grouped(failed: Sequence[Record]) -> dict[str, list[Record]]:
    """The failures by what they have in common, the most frequent first."""
    groups: dict[str, list[Record]] = {}
    for record in failed:
        groups.setdefault(_heading(record), []).append(record)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _shares(groups: Mapping[str, Sequence[Record]], most: int) -> dict[str, int]:
    """How many of each group are shown: one of each in turn, until `most` are."""
    shares = dict.fromkeys(groups, 0)
    for heading in itertools.islice(
        (heading for turn in itertools.count() for heading in groups if turn < len(groups[heading])),
        min(most, sum(map(len, groups.values()))),
    ):
        shares[heading] += 1
    return shares


def _heading(record: Record) -> str:
    if record.diagnosis:
        return record.diagnosis[0]
    if record.law:
        return f"law {record.law} is broken"
    if record.reasons:
        return record.reasons[0] if record.status == "error" else record.status
    return "no known fault gives this answer" if record.status == "fail" else record.status


def _sentences(record: Record) -> list[str]:
    failing: list[Check] = sorted((check for check in record.checks if not check.passed), key=lambda one: -one.use)
    return [*record.reasons, *map(str, failing[:_MOST_SENTENCES])]


def about_rounding(trials: Sequence[Trial], explained: tuple[Mapping[str, object], int] | None) -> str:
    """By which rounding points answers that are too far off were judged, and which other ones would explain how many."""
    judged = trials[0].record.precision
    points = ", ".join(f"{point} {getattr(judged, point)}" for point in _POINTS)
    lines = [f"judged by the rounding points {points}; others are declared with precision={{...}} in the call"]
    if explained is not None:
        change, count = explained
        lines.append(
            f"{count} of the {len(trials)} failures looked at would pass with precision={dict(change)}: if your kernel is "
            "meant to round so, declare it; if not, this is its defect"
        )
    return "\n".join(lines)
