"""What changed between two runs?

**Records.** A question is a case on an implementation on an execution, perhaps about a law. Each side has one state for
it: what its record says, `no record` when it was planned and has none, `not asked` when it was not planned. A question is
*judged* when its state is `pass` or one of `reports.plan.AGAINST`. Two states that differ are filed once, in the first
class that fits:

| class | before | after |
|---|---|---|
| `new_failure` | anything that was no failure | a failure |
| `changed_failure` | a failure | a failure with another status, other bits, diagnosis or reasons |
| `lost_coverage` | judged | unsupported, no record or not asked |
| `lost_coverage` | judged | pass with a check less, or with one that is no longer exact |
| `fixed` | a failure | pass |
| `new_coverage` | unsupported, no record or not asked | pass |
| `changed_reasons` | unsupported | unsupported, for other reasons; their order means nothing |
| `bit_change` | pass | pass with other output bits |
| `rejudged` | pass | pass with the same bits and another budget use: a reference, a budget or a rounding point moved |

What is left is unchanged, was judged by neither run, or is not comparable: it passes in the later run, and the earlier one
was not asked it because it is a single shard or was asked for something else. Of two failures without an answer, numbers in
the reasons are not compared: line numbers, addresses and sizes move by themselves.

**Groups.** How error and time move is a property of many records, so both are listed beside the classes and file no
record: a record stands in its class whether or not its group grew.

* `Growth`, of an op on an implementation on an execution, over the questions that pass in both runs. Same bits have the
  same error, so only pairs whose bits changed can have moved, and a use that reads the same in three digits has not. Two
  exact tests that assume no distribution, both two-sided. If nothing but rounding changed, either of the two answers is
  as likely to use more of its budget. The median: of the pairs that moved, how many went up (sign test). The tail: of
  the pairs of which one answer alone reaches the upper twentieth of all answers of the group, in how many it is the later
  (McNemar). Asked of every group and of every value of every axis in it. A value is listed if the growth lives there:
  it is seen among the cases of the value, and not among the others of the group.
* `Slowdown`, of the same groups over the seconds of `run` without those of compiling: the median of the pairs' ratios
  with its exact interval from order statistics. Only pairs of one device, architecture and machine are compared. A
  machine that was busy slows everything, so there is one for each execution as a whole, and a group is seen when its
  interval excludes 1 and does not meet that of the rest of the execution, unless the load while it ran may explain that
  (`reports.speed` says how it is told).

All tests of growth together raise a false alarm with a probability of at most `LEVEL`, and so do all intervals of time
(Holm's and Bonferroni's correction; a group whose numbers could not reach significance whatever they did is not counted,
which is Tarone's). What makes things worse is a new or changed failure, lost coverage, and a growth; bits and times alone
do not.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from operator import itemgetter
from typing import Literal, get_args

import msgspec

from reports.growth import LEVEL, Group, Growth, Move, Uses, growths, shown
from reports.plan import AGAINST
from reports.record import Environment, Record
from reports.speed import Slowdown, Times, slowdowns
from reports.store import Key, Run, Settings
from reports.words import plural, without_record

__all__ = [
    "KINDS", "LEVEL", "MEANINGS", "NOT_ASKED", "NO_RECORD", "WORSE", "Change", "Diff", "Differing", "Growth", "Kind", "Move",
    "Slowdown", "answer", "compare", "counted",
]  # fmt: skip

Kind = Literal[
    "new_failure", "changed_failure", "fixed", "lost_coverage", "new_coverage", "changed_reasons", "bit_change", "rejudged"
]  # fmt: skip
# In the order in which they are told.
KINDS: tuple[Kind, ...] = get_args(Kind)
# What a reader should not accept without a look.
WORSE: tuple[Kind, ...] = ("new_failure", "changed_failure", "lost_coverage")
# What a class means, for a heading.
MEANINGS: dict[Kind, str] = {
    "new_failure": "new failures",
    "changed_failure": "failures that changed",
    "fixed": "fixed",
    "lost_coverage": "lost coverage",
    "new_coverage": "new coverage",
    "changed_reasons": "unsupported for other reasons",
    "bit_change": "other bits, within budget both times",
    "rejudged": "same bits, judged otherwise",
}
# How those classes are counted whose headings are plurals: one of them, and several.
_COUNTED: dict[Kind, tuple[str, str]] = {
    "new_failure": ("new failure", "new failures"),
    "changed_failure": ("failure that changed", "failures that changed"),
}
NOT_ASKED = "not asked"
NO_RECORD = "no record"


def counted(kind: Kind, number: int) -> str:
    """`1 new failure`, `2 new failures`, `2 fixed`."""
    one, several = _COUNTED.get(kind, (MEANINGS[kind], MEANINGS[kind]))
    return f"{number:,} {one if number == 1 else several}"


class Change(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One question whose two states differ.

    was, now: the states, a status, `no record` or `not asked`. before, after: the records, where there are. sentence:
    what changed, ending with what[where]=got of the record that matters.
    """

    kind: Kind
    case: str
    op: str
    impl: str
    on: str
    law: str
    was: str
    now: str
    before: Record | None
    after: Record | None
    sentence: str

    @property
    def key(self) -> Key:
        """What identifies the question, as in `Run.records`."""
        return (self.case, self.impl, self.on, self.law)

    @property
    def worse(self) -> bool:
        """Whether the change counts against the later run."""
        return self.kind in WORSE


class Differing(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the environment whose values are not the same in the two runs; each side lists all that its records say."""

    field: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from one run to another.

    before, after: the runs' directories. changes: in the order of `KINDS`; within a kind the gravest of each group first.
    growths: those seen, the whole groups first. times: every group that could be compared; `seen` marks the findings.
    unchanged: questions with the same answer or reasons. unjudged: those that neither run judged, because at least one did
    not ask or has no record. incomparable: what passes now and was not asked before, where `before` is a single shard or the
    runs were not asked for the same.
    notes: sentences on what a reader must know: unfinished runs, times that are not comparable, cut-off lines.
    """

    before: str
    after: str
    environments: tuple[Differing, ...]
    changes: tuple[Change, ...]
    growths: tuple[Growth, ...]
    times: tuple[Slowdown, ...]
    unchanged: int
    unjudged: int
    incomparable: int = 0
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[Kind, int]:
        """How many changes of each kind, all kinds in their order."""
        found = dict.fromkeys(KINDS, 0)
        for change in self.changes:
            found[change.kind] += 1
        return found

    @property
    def worse(self) -> bool:
        """Whether anything should not be accepted without a look: a change of `WORSE`, or a growth."""
        return any(change.worse for change in self.changes) or any(growth.grew for growth in self.growths)

    def of(self, kind: Kind) -> tuple[Change, ...]:
        """The changes of one kind."""
        return tuple(change for change in self.changes if change.kind == kind)


def compare(before: Run, after: Run) -> Diff:
    """Everything that changed from one run to another; the same for the same two runs."""
    changes: list[tuple[float, Change]] = []
    uses: defaultdict[Group, Uses] = defaultdict(Uses)
    times: defaultdict[Group, Times] = defaultdict(Times)
    unchanged = 0
    for key, old in before.records.items():
        new = after.records.get(key)
        if new is None:
            continue
        if old.status == new.status == "pass" and not new.law:
            group = (new.op, new.impl, new.on)
            uses[group].add(old, new)
            times[group].add(old, new)
        kind = _kind(old, new)
        if kind is None:
            unchanged += 1
        else:
            changes.append(_change(kind, key, old.status, new.status, old, new))
    open_before, open_after = ({task.key for task in run.open_tasks} for run in (before, after))
    unjudged = {key for key in open_before | open_after if key not in before.records and key not in after.records}
    for key, old in before.records.items():
        if key in after.records:
            continue
        if old.status == "unsupported":
            unjudged.add(key)
        else:
            now = NO_RECORD if key in open_after else NOT_ASKED
            changes.append(_change("lost_coverage", key, old.status, now, old, None))
    partial = bool(before.settings.shard or _asked_otherwise(before, after))
    unasked = 0
    for key, new in after.records.items():
        if key in before.records:
            continue
        if new.status == "unsupported":
            unjudged.add(key)
        elif partial and new.status == "pass" and key not in open_before:
            unasked += 1
        else:
            was = NO_RECORD if key in open_before else NOT_ASKED
            kind = "new_coverage" if new.status == "pass" else "new_failure"
            changes.append(_change(kind, key, was, new.status, None, new))
    machines = dict.fromkeys(text for held in times.values() for text in held.incomparable)
    notes = [*_notes(before, after)]
    if unasked:
        notes.append(
            f"coverage is not comparable: {before.path} was not asked for {plural(unasked, 'answer')} of {after.path}"
        )
    if machines:
        notes.append(f"times are not compared where the machines differ: {'; '.join(machines)}")
    return Diff(
        before=str(before.path),
        after=str(after.path),
        environments=_environments(before, after),
        changes=_ordered(changes),
        growths=growths(uses),
        times=slowdowns(times),
        unchanged=unchanged,
        unjudged=len(unjudged),
        incomparable=unasked,
        notes=tuple(notes),
    )


def _kind(old: Record, new: Record) -> Kind | None:
    """The class of a question that both runs answered; None when nothing changed."""
    was, now = old.status, new.status
    if now in AGAINST:
        if was not in AGAINST:
            return "new_failure"
        return "changed_failure" if _other_failure(old, new) else None
    if now == "pass":
        # A failure that passes because it is no longer looked at is not mended.
        if _checks_lost(old, new):
            return "lost_coverage"
        if was != "pass":
            return "fixed" if was in AGAINST else "new_coverage"
        if old.fingerprint != new.fingerprint:
            return "bit_change"
        use, then = new.use, old.use
        return "rejudged" if use != then and shown(use) != shown(then) else None
    if was != "unsupported":
        return "lost_coverage"
    return "changed_reasons" if set(old.reasons) != set(new.reasons) else None


def _checks_lost(old: Record, new: Record) -> list[str]:
    """The checks of an answer that are no longer made, or are no longer exact, as `lse (bounded)`."""
    if old.checks == new.checks:
        return []
    lost = Counter(check.output for check in old.checks) - Counter(check.output for check in new.checks)
    # A rule of a plan is named by what broke it, and by itself where it holds.
    kept = Counter(check.output for check in new.checks if check.measure == "plan")
    renamed = (kept - Counter(check.output for check in old.checks)).total()
    for check in old.checks:
        if check.measure == "plan" and not check.passed and lost[check.output] and renamed:
            lost[check.output] -= 1
            renamed -= 1
    lost = +lost
    # An answer of another form fails as one that is not exact, at no element, whatever its measure is.
    exact = Counter(check.output for check in old.checks if check.measure == "exact" and (check.passed or check.where))
    lost |= exact - Counter(check.output for check in new.checks if check.measure == "exact")
    return list(dict.fromkeys(f"{check.output} ({check.measure})" for check in old.checks if check.output in lost))


def _other_failure(old: Record, new: Record) -> bool:
    """Whether two failures of one question are not the same."""
    if old.status != new.status or set(old.diagnosis) != set(new.diagnosis) or old.fingerprint != new.fingerprint:
        return True
    return {_NUMBER.sub("#", text) for text in old.reasons} != {_NUMBER.sub("#", text) for text in new.reasons}


# Addresses, line numbers and sizes of a reason, which move by themselves.
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def _change(kind: Kind, key: Key, was: str, now: str, old: Record | None, new: Record | None) -> tuple[float, Change]:
    """The change, behind its gravity: how much more of its budget it uses; of failures, how much they use."""
    case, impl, on, law = key
    then, use = (record.use if record is not None else 0.0 for record in (old, new))
    found = Change(
        kind=kind, case=case, op=case.partition(":")[0], impl=impl, on=on, law=law, was=was, now=now, before=old, after=new,
        sentence=_sentence(kind, was, now, old, new, then, use),
    )  # fmt: skip
    return use - then if kind in ("bit_change", "rejudged") else max(then, use), found


def _sentence(kind: Kind, was: str, now: str, old: Record | None, new: Record | None, then: float, use: float) -> str:
    if old is not None and new is not None:
        if kind == "lost_coverage" and now == "pass":
            return f"was {was}, now {now} with less judged, no longer checked: {', '.join(_checks_lost(old, new))}; {answer(new)}"
        if kind in ("bit_change", "rejudged"):
            source = "" if old.source == new.source else ", and its source is another"
            what = f"other bits{source}" if kind == "bit_change" else "the same bits"
            return f"{what}, budget use {then:.3g} then, {use:.3g} now: {answer(new)}"
        if kind == "changed_failure" and was == now:
            before, after = answer(old), answer(new)
            both = after if before == after else f"was {before}; now {after}"
            same = set(old.diagnosis) == set(new.diagnosis)
            diagnosis = "" if same else f" ({'; '.join(new.diagnosis) or 'no diagnosis'})"
            return f"still {now}, but another one{diagnosis}: {both}"
        if kind in ("changed_reasons", "new_coverage"):
            return f"was {_state(was, old)}; now {_state(now, new)}"
    return f"was {was}, now {_state(now, new)}"


def _state(state: str, record: Record | None) -> str:
    return state if record is None else f"{state}: {answer(record)}"


def answer(record: Record) -> str:
    """What a record says in one sentence: its worst check that fails, or else its reasons, or else its worst check."""
    failing = [check for check in record.checks if not check.passed]
    if not failing and record.reasons:
        return "; ".join(record.reasons)
    worst = max(failing or record.checks, key=lambda check: check.use, default=None)
    return str(worst) if worst is not None else record.case


def _ordered(changes: Iterable[tuple[float, Change]]) -> tuple[Change, ...]:
    """By kind; within a kind the gravest of every group first, so that the first few show every group."""
    by_kind: dict[Kind, dict[tuple[str, str, str, bool], list[tuple[float, Key, Change]]]] = {
        kind: {} for kind in KINDS
    }
    for gravity, change in changes:
        group = (change.op, change.impl, change.on, bool(change.law))
        by_kind[change.kind].setdefault(group, []).append((-gravity, change.key, change))
    found: list[Change] = []
    for groups in by_kind.values():
        for together in groups.values():
            together.sort(key=itemgetter(0, 1))
        for rank in zip_longest(*groups.values()):
            found += [entry[2] for entry in rank if entry is not None]
    return tuple(found)


def _environments(before: Run, after: Run) -> tuple[Differing, ...]:
    def seen(run: Run) -> Mapping[str, tuple[str, ...]]:
        # Records come by the thousand with equal environments.
        environments: list[Environment] = []
        for record in run.records.values():
            if not environments or record.environment != environments[-1]:
                environments.append(record.environment)
        return {
            name: tuple(sorted({getattr(each, name) for each in environments}))
            for name in Environment.__struct_fields__
        }

    old, new = seen(before), seen(after)
    return tuple(
        Differing(field=name, before=old[name], after=new[name])
        for name in Environment.__struct_fields__
        if old[name] != new[name] and old[name] and new[name]
    )


# What a run was asked for, where another answer changes which questions there are.
_ASKED = ("ops", "impls", "on", "cases", "patterns", "failed", "seed", "laws", "shard")


def _asked_otherwise(before: Run, after: Run) -> list[str]:
    """The names of `_ASKED` in which the two runs differ."""
    return [name for name in _ASKED if getattr(before.settings, name) != getattr(after.settings, name)]


def _notes(before: Run, after: Run) -> Iterator[str]:
    for run in (before, after):
        yield from run.notes
        if run.settings.shard:
            yield (
                f"{run.path} holds only shard {run.settings.shard} of its plan: what the other shards were asked cannot be "
                "compared"
            )
        if run.open_tasks:
            yield (
                f"{run.path}: {without_record(len(run.open_tasks), len(run.plan))}, it is still being written or was killed "
                "half way; what is there is compared"
            )
        repeated = sum(bool(record.attempts) for record in run.records.values())
        if repeated:
            they = "it was" if repeated == 1 else "they were"
            yield f"{run.path}: {repeated:,} of its answers came only when {they} asked once more"
    if before.records and after.records and not before.records.keys() & after.records.keys():
        yield "the two runs have no question in common"
    judges = before.settings.judge, after.settings.judge
    if all(judges) and judges[0] != judges[1]:
        yield f"the cases and the judge are not the same: {judges[0]!r} then, {judges[1]!r} now"
    asked = [
        f"{name} {_setting(before.settings, name)} then, {_setting(after.settings, name)} now"
        for name in _asked_otherwise(before, after)
    ]
    if asked:
        yield f"the runs were not asked for the same: {'; '.join(asked)}"


def _setting(settings: Settings, name: str) -> str:
    value = getattr(settings, name)
    if isinstance(value, tuple):
        return ", ".join(value) or "all"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "none"
