"""May this run pass, and if not, what closes the gate?

`judge` files every record of a run under one outcome and gathers what speaks against it as findings, one for all records
that went wrong in the same way. Everything that is printed or written about a gate is made from its `GateResult`.
"""

import dataclasses
import datetime
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from oracle.check import Check
from reports.alike import complaint, failure_fingerprint, fingerprint, without_numbers
from reports.diff import Change, Diff, Growth, compare, counted
from reports.execute import HARNESS
from reports.known_failures import Application, Entry, Overlap, Use, apply, counted_as
from reports.merge import mixed_of
from reports.plan import AGAINST
from reports.policy import KEYS, Policy
from reports.record import Environment, Record
from reports.replaying import Trees, replay_line
from reports.store import Key, Run, Task
from reports.words import plural, was

# Whom a finding speaks of: an answer, the process or the device that gave none, this harness, the difference to the
# baseline, the file of known failures, or the run as a whole.
Kind = Literal["answer", "infrastructure", "harness", "baseline", "known", "run"]
KINDS: Mapping[Kind, str] = {
    "harness": "the harness itself broke",
    "answer": "what the kernels got wrong",
    "infrastructure": "infrastructure: crashed, hung or lost the device",
    "baseline": "worse than the baseline",
    "run": "the run as a whole",
    "known": "known failures",
}
# What became of one record: passed; excused by a known failure; skipped, since it is unsupported; reported, where the
# policy lets its status be; closes.
Outcome = Literal["passed", "known", "skipped", "reported", "closes"]

_SAID: tuple[tuple[Outcome, str], ...] = (
    ("passed", "passed"),
    ("closes", "failed"),
    ("reported", "failed and let be by the policy"),
    ("known", "known to fail"),
    ("skipped", "unsupported"),
)
_BASELINE_RULES = (
    "coverage_lost", "unsupported_where_supported", "error_growth", "environment_changed", "changed_known",
    "newly_failing_known",
)  # fmt: skip
_KNOWN_RULES = ("expired_known", "passing_known", "unmatched_known", "overlapping_known")
_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One thing that closes the gate or is reported.

    rule: the key of the policy, or `harness`. title: in a few words; sentence: with what was found and what should be.
    fingerprint: with `on`, the same for the same finding
    in every run, and on the page of the run. records: those it speaks of, the worst first. count: how many
    cases it speaks of. details: further sentences, such as the diagnosis. replay: the line that shows the worst again.
    """

    rule: str
    closes: bool
    kind: Kind
    title: str
    sentence: str
    fingerprint: str
    status: str = ""
    op: str = ""
    impl: str = ""
    on: str = ""
    count: int = 1
    records: tuple[Record, ...] = ()
    cases: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    replay: str = ""
    entry: Entry | None = None

    @property
    def place(self) -> str:
        """`sparse_mla.decode vllm-triton on hip`; empty for a finding about no op."""
        return f"{self.op} {self.impl} on {self.on}" if self.op else ""


@dataclass(frozen=True)
class Judged:
    """One record that the policy looks at, and what became of it. entry: the known failure that excuses it."""

    record: Record
    outcome: Outcome
    kind: Kind
    entry: Entry | None = None


@dataclass(frozen=True)
class GateResult:
    """Everything about one gate.

    run, baseline: the directories, the latter empty without one. closing findings stand before those that are only
    reported. unanswered: the planned cases without a record. notes: what a reader must know besides. trees: the source
    trees that the run was pointed at.
    """

    run: str
    baseline: str
    policy: Policy
    judged: tuple[Judged, ...]
    unanswered: tuple[Task, ...]
    findings: tuple[Finding, ...]
    uses: tuple[Use, ...]
    notes: tuple[str, ...]
    environments: tuple[Environment, ...]
    trees: Trees = field(default_factory=Trees)

    @property
    def closed(self) -> bool:
        """Whether anything closes the gate."""
        return any(finding.closes for finding in self.findings)

    @property
    def closing(self) -> tuple[Finding, ...]:
        """What closes the gate."""
        return tuple(finding for finding in self.findings if finding.closes)

    @property
    def reported(self) -> tuple[Finding, ...]:
        """What is only said."""
        return tuple(finding for finding in self.findings if not finding.closes)

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How many records have which outcome."""
        return Counter(each.outcome for each in self.judged)

    @property
    def statuses(self) -> Counter[str]:
        """How many records have which status."""
        return Counter(each.record.status for each in self.judged)

    @property
    def sentence(self) -> str:
        """The gate in one sentence."""
        said = self.outcomes
        counts = [f"{said[outcome]:,} {word}" for outcome, word in _SAID if said[outcome]]
        if self.unanswered:
            counts.append(f"{len(self.unanswered):,} without an answer")
        head = f"closed by {plural(len(self.closing), 'finding')}" if self.closed else "open"
        off = self.policy.switched_off
        are = "is" if len(off) == 1 else "are"
        lenient = f"; {plural(len(off), 'check')} {are} switched off by the policy: {', '.join(off)}" if off else ""
        return f"the gate is {head}: {', '.join(counts) or 'no record'}{lenient}"


def judge(
    run: Run,
    policy: Policy,
    known: Sequence[Entry] | None = None,
    baseline: Run | None = None,
    today: datetime.date | None = None,
) -> GateResult:
    """What the policy makes of a run, with what is known to fail and what was measured before.

    known, baseline: None where none was given; the rules about them are then said to be not applied. today: the day by
    which entries expire, in UTC.
    """
    today = today or datetime.datetime.now(datetime.UTC).date()
    looks = _Scope(policy)
    trees = Trees.of(run.settings)
    # A harness that broke has judged nothing there, wherever that was.
    records = [
        record for record in run.records.values() if looks.at(record.op, record.impl) or kind_of(record) == "harness"
    ]
    passed = _passed(baseline)
    applied = _applied(known or (), run, policy, passed, today)
    judged = tuple(_judged(record, policy, applied) for record in records)
    unanswered = tuple(task for task in run.open_tasks if looks.at(task.case.partition(":")[0], task.impl))
    notes = [*run.notes, *_mixtures(run)]
    findings = [
        *_about_records(judged, trees),
        *_about_retries(judged, policy, trees),
        *_about_the_run(run, policy, judged, unanswered, looks),
        *_about_known(applied, policy),
        *_about_outlived(applied, policy, [each for each in records if looks.at(each.op, each.impl)], passed),
    ]
    if baseline is None:
        notes.append(f"no baseline was given: {', '.join(_BASELINE_RULES)} were not applied")
    else:
        diff = compare(baseline, run)
        findings += _about_baseline(diff, policy, looks, applied, trees)
        notes += [*_mixtures(baseline), *diff.notes]
        changed = [counted(kind, number) for kind, number in diff.counts.items() if number]
        if diff.incomparable:
            changed.append(f"{diff.incomparable:,} not comparable")
        notes.append(f"against {baseline.path}: {', '.join(changed) or 'nothing changed'}")
        if diff.environments:
            notes.append(_environment(diff))
    if known is None:
        notes.append(f"no known failures were given: {', '.join(_KNOWN_RULES)} were not applied")
    outside = len(run.records) - len(records)
    if outside:
        notes.append(
            f"{plural(outside, 'record')} outside the policy's implementations and ops {was(outside)} not judged"
        )
    elsewhere = sum(use.state == "elsewhere" for use in applied.uses)
    if elsewhere:
        notes.append(f"known failures about what this run did not ask: {elsewhere:,}")
    kinds = list(KINDS)
    rules = ("harness", *KEYS)
    findings.sort(
        key=lambda each: (not each.closes, kinds.index(each.kind), rules.index(each.rule), -each.count, each.title)
    )
    return GateResult(
        run=str(run.path),
        baseline=str(baseline.path) if baseline is not None else "",
        policy=policy,
        judged=judged,
        unanswered=unanswered,
        findings=tuple(findings),
        uses=applied.uses,
        notes=tuple(dict.fromkeys(notes)),
        environments=tuple(dict.fromkeys(record.environment for record in records)),
        trees=trees,
    )


def _mixtures(run: Run) -> Iterable[str]:
    """What the shards of a merged run were allowed to differ in."""
    return (f"{run.path} was joined from runs that differ {said}" for said in mixed_of(run.settings))


def _passed(baseline: Run | None) -> Mapping[Key, datetime.date]:
    """The days, in UTC, on which the cases passed that passed in the baseline."""
    if baseline is None:
        return {}
    created = baseline.settings.created
    return {
        key: datetime.datetime.fromtimestamp(record.finished or created, datetime.UTC).date()
        for key, record in baseline.records.items()
        if record.status == "pass"
    }


def _applied(
    known: Sequence[Entry], run: Run, policy: Policy, passed: Mapping[Key, datetime.date], today: datetime.date
) -> Application:
    """The known failures as the policy has them: one that only reports lets older entries excuse what passed before."""
    found = apply(known, run.records.values(), today, passed)
    if policy.action("newly_failing_known") == "close" or not found.outlived:
        return found
    return dataclasses.replace(apply(known, run.records.values(), today), outlived=found.outlived)


class _Scope:
    """Which implementations and ops the policy looks at."""

    def __init__(self, policy: Policy) -> None:
        self._patterns = (policy.ops, policy.implementations)
        self._known: dict[tuple[str, str], bool] = {}

    def at(self, op: str, impl: str) -> bool:
        """Whether the policy looks at this implementation of this op."""
        if (op, impl) not in self._known:
            self._known[op, impl] = all(
                any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
                for name, patterns in zip((op, impl), self._patterns, strict=True)
            )
        return self._known[op, impl]


def kind_of(record: Record) -> Kind:
    """Whom a record speaks of."""
    if record.status == "pass":
        return "answer"
    if any(reason.startswith(HARNESS) for reason in record.reasons):
        return "harness"
    return "infrastructure" if record.infrastructure else "answer"


def _judged(record: Record, policy: Policy, applied: Application) -> Judged:
    kind, entry = kind_of(record), applied.excuses.get(record.key)
    outcome: Outcome
    if kind == "harness":
        outcome = "closes"
    elif record.status in AGAINST:
        outcome = "known" if entry else "closes" if counted_as(record) in policy.statuses else "reported"
    else:
        outcome = "skipped" if record.status == "unsupported" else "passed"
    return Judged(record, outcome, kind, entry if outcome == "known" else None)


def sentence_of(record: Record) -> str:
    """The sentence that a reader needs of a record: its worst check, or its reasons."""
    failing = [check for check in record.checks if not check.passed] or list(record.checks)
    worst: Check | None = max(failing, key=lambda check: check.use, default=None)
    if record.reasons and (worst is None or worst.passed):
        return "; ".join(record.reasons)
    return str(worst) if worst is not None else "; ".join(record.reasons) or complaint(record)


def _about_records(judged: Iterable[Judged], trees: Trees) -> Iterable[Finding]:
    """What went wrong, one finding for all that went wrong in the same way at the same place."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    for each in judged:
        record = each.record
        if each.outcome in ("closes", "reported"):
            alike = without_numbers(complaint(record))
            words = (each.outcome, each.kind, counted_as(record), record.op, record.impl, record.on, alike)
            groups.setdefault(words, []).append(each)
    for (outcome, _, status, op, impl, on, _), found in groups.items():
        records = sorted((each.record for each in found), key=lambda record: (-record.use, record.case, record.law))
        worst, kind = records[0], found[0].kind
        attempts = tuple(
            f"asked again: it ended before as {attempt.status}, {'; '.join(attempt.reasons)}"
            for attempt in worst.attempts
        )
        law = f"law {worst.law}: " if worst.law else ""
        yield Finding(
            rule="harness" if kind == "harness" else "statuses",
            closes=outcome == "closes",
            kind=kind,
            title=complaint(worst),
            sentence=law + sentence_of(worst),
            fingerprint=failure_fingerprint(worst),
            status=status,
            op=op,
            impl=impl,
            on=on,
            count=len(records),
            records=tuple(records),
            cases=tuple(record.case for record in records),
            details=(*worst.diagnosis, *attempts),
            replay=replay_line(worst, trees),
        )


def _about_retries(judged: Iterable[Judged], policy: Policy, trees: Trees) -> Iterable[Finding]:
    """Cases that had no answer at first and were asked once more, however that ended."""
    groups: dict[tuple[str, str, str, str, str], list[Record]] = {}
    for each in judged:
        record = each.record
        if record.attempts:
            words = (record.op, record.impl, record.on, record.attempts[0].status, record.status)
            groups.setdefault(words, []).append(record)
    for (op, impl, on, first, last), records in groups.items():
        end = "passed" if last == "pass" else last
        before = ", then ".join(f"as {each.status}: {'; '.join(each.reasons)}" for each in records[0].attempts)
        yield Finding(
            rule="retried",
            closes=policy.action("retried") == "close",
            kind="infrastructure",
            title=f"{first} at first, {end} when asked again",
            sentence=f"{end} when asked again; it ended before {before}",
            fingerprint=fingerprint(("retried", op, impl, on, first, *(() if last == "pass" else (last,)))),
            op=op,
            impl=impl,
            on=on,
            count=len(records),
            records=tuple(records),
            cases=tuple(record.case for record in records),
            replay=replay_line(records[0], trees),
        )


def _about_the_run(
    run: Run, policy: Policy, judged: Sequence[Judged], unanswered: Sequence[Task], looks: _Scope
) -> Iterable[Finding]:
    closes = policy.action("unfinished") == "close"
    if unanswered or run.progress:
        sentence = run.progress or f"{run.path} lacks records"
        yield _of_the_run(
            "unfinished", closes, "the run is not finished",
            f"{sentence}; it should be finished: mla-oracle sweep --resume {run.path}", len(unanswered) or 1,
            tuple(task.case for task in unanswered),
        )  # fmt: skip
    shard = run.settings.shard
    if shard:
        yield _of_the_run(
            "unfinished", closes, f"only shard {shard} of the run",
            f"{run.path} holds shard {shard} of its plan; it should be the whole: mla-oracle merge joins the shards",
        )  # fmt: skip
    unmatched = [
        f"{key} {pattern!r}"
        for key, place in (("implementations", 1), ("ops", 0))
        for pattern in getattr(policy, key)
        if pattern != "*"
        and not any(fnmatch.fnmatchcase((task.case.partition(":")[0], task.impl)[place], pattern) for task in run.plan)
    ]
    if not any(each.outcome in ("passed", "known", "closes", "reported") for each in judged):
        why = (
            f"the policy's {', '.join(unmatched)} fit nothing in it" if unmatched
            else "its only record is unsupported" if len(judged) == 1
            else f"all {len(judged):,} records are unsupported" if judged
            else "it holds no record that the policy looks at"
        )  # fmt: skip
        yield _of_the_run(
            "nothing_judged", policy.action("nothing_judged") == "close", "nothing was judged",
            f"{run.path}: nothing was judged, and that is no pass: {why}",
        )  # fmt: skip
    elif unmatched:
        yield _of_the_run(
            "nothing_judged", False, "a pattern of the policy fits nothing",
            f"the policy's {', '.join(unmatched)} fit nothing in {run.path}; the names are shown by mla-oracle list",
        )  # fmt: skip


def _of_the_run(
    rule: str, closes: bool, title: str, sentence: str, count: int = 1, cases: tuple[str, ...] = ()
) -> Finding:
    return Finding(
        rule=rule, closes=closes, kind="run", title=title, sentence=sentence, fingerprint=fingerprint((rule, title)),
        count=count, cases=cases,
    )  # fmt: skip


def _about_known(applied: Application, policy: Policy) -> Iterable[Finding]:
    for use in applied.uses:
        told = _told(use)
        if told is not None:
            rule, title, sentence = told
            yield _of_an_entry(rule, policy.action(rule) == "close", title, sentence, use.entry, use.excused)
    for overlap in applied.overlaps:
        yield _of_an_entry(
            "overlapping_known", policy.action("overlapping_known") == "close",
            "the same known failure twice" if overlap.duplicate else "known failures overlap",
            _overlapping(overlap), overlap.second,
        )  # fmt: skip


def _about_outlived(
    applied: Application, policy: Policy, records: Iterable[Record], passed: Mapping[Key, datetime.date]
) -> Iterable[Finding]:
    """What passed in the baseline and is spoken of only by entries that are older than that."""
    groups: dict[Entry, list[Record]] = {}
    for record in records:
        entry = applied.outlived.get(record.key)
        if entry is not None and (record.status == "unsupported" or counted_as(record) in policy.statuses):
            groups.setdefault(entry, []).append(record)
    for entry, found in groups.items():
        day = max(passed[record.key] for record in found)
        does = "does" if len(found) == 1 else "do"
        yield _of_an_entry(
            "newly_failing_known", policy.action("newly_failing_known") == "close",
            "a known failure is newly failing",
            f"{entry.place}: {len(found):,} of its cases passed on {day}, after it began on {entry.known.since}, and no "
            f"longer {does}: {entry}; mend it, or give it an entry that begins on {day} or later",
            entry, tuple(found),
        )  # fmt: skip


def _told(use: Use) -> tuple[str, str, str] | None:
    """Rule, title and sentence of an entry that a reader must act on; None for one that is in order."""
    entry, known = use.entry, use.entry.known
    if use.state == "expired":
        still = "fails" if len(use.excused) == 1 else "fail"
        held = f"{len(use.excused):,} of its cases still {still}" if use.excused else "none of its cases fails"
        sentence = (
            f"{entry.place}: expired on {known.expires}, {held}: {entry}; mend it, delete it, or agree on another day"
        )
        return "expired_known", "a known failure has expired", sentence
    if use.state == "passing":
        number = "its only case passes" if use.passing == 1 else f"all {use.passing:,} of its cases pass"
        return "passing_known", "a known failure now passes", f"{entry.place}: {number}: {entry}; delete it"
    if use.state == "failing":
        how = Counter(counted_as(record) for record in use.otherwise)
        said = ", ".join(f"{number:,} {status}" for status, number in how.items())
        return (
            "unmatched_known", "a known failure excuses nothing",
            f"{entry.place}: its cases fail otherwise than it says ({said}): {entry}; it should name what it excuses",
        )  # fmt: skip
    if use.state == "unmatched":
        return (
            "unmatched_known", "a known failure matches nothing",
            f"{entry.place}: matches no judged case of this run: {entry}; correct its patterns, or delete it",
        )  # fmt: skip
    return None


def _overlapping(overlap: Overlap) -> str:
    first, second = overlap.first, overlap.second
    if overlap.duplicate:
        return f"{second.place}: says the same as {first.place}: {second}; one of them should go"
    both = f"speaks of {plural(overlap.shared, 'case')} that {first.place} speaks of too"
    return f"{second.place}: {both}: {second}; one of them should go"


def _of_an_entry(
    rule: str, closes: bool, title: str, sentence: str, entry: Entry, records: tuple[Record, ...] = ()
) -> Finding:
    known = entry.known
    return Finding(
        rule=rule, closes=closes, kind="known", title=title, sentence=sentence,
        fingerprint=fingerprint((rule, known.impl, known.op, known.case, known.on, known.arch, known.law, known.issue)),
        count=len(records) or 1, records=records, cases=tuple(record.case for record in records), entry=entry,
    )  # fmt: skip


def _about_baseline(diff: Diff, policy: Policy, looks: _Scope, applied: Application, trees: Trees) -> Iterable[Finding]:
    """What is worse than before, apart from failures, which speak for themselves."""
    groups: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in diff.changes:
        if change.kind == "lost_coverage" and looks.at(change.op, change.impl):
            lost = {"unsupported": "unsupported_where_supported", "pass": "checks_lost"}.get(
                change.now, "coverage_lost"
            )
            if lost != "unsupported_where_supported" or change.key not in applied.excuses:
                groups.setdefault((lost, change.op, change.impl, change.on), []).append(change)
        elif change.kind == "changed_failure" and change.key in applied.excuses and looks.at(change.op, change.impl):
            groups.setdefault(("changed_known", change.op, change.impl, change.on), []).append(change)
    for (what, op, impl, on), changes in groups.items():
        yield _of_changes(what, policy, op, impl, on, changes, trees)
    if diff.environments and policy.action("environment_changed") == "close":
        sentence = _environment(diff)
        yield Finding(
            rule="environment_changed", closes=True, kind="baseline", title="another environment than the baseline's",
            sentence=sentence, fingerprint=fingerprint(("environment_changed", sentence)),
        )  # fmt: skip
    for growth in diff.growths:
        if growth.grew and looks.at(growth.op, growth.impl):
            yield _of_growth(growth, policy)


def _environment(diff: Diff) -> str:
    """What differs round the two runs; whatever else changed may come from it."""
    each = (
        f"{found.field} {', '.join(word or 'none' for word in found.before)} then, "
        f"{', '.join(word or 'none' for word in found.after)} now"
        for found in diff.environments
    )
    return f"the environment is not the baseline's: {'; '.join(each)}"


# By the key of the policy; `checks_lost` is a part of `coverage_lost`.
_CHANGED: Mapping[str, tuple[str, Callable[[int], str]]] = {
    "checks_lost": ("no longer checked as before", lambda n: f"{n:,} checked in the baseline for more than here"),
    "unsupported_where_supported": ("no longer supported", lambda n: f"{n:,} judged in the baseline, unsupported here"),
    "coverage_lost": ("no longer asked", lambda n: f"{n:,} judged in the baseline, without a record here"),
    "changed_known": (
        "a known failure fails in another way",
        lambda n: f"{plural(n, 'known failure')} {'fails' if n == 1 else 'fail'} otherwise than in the baseline",
    ),
}


def _of_changes(
    what: str, policy: Policy, op: str, impl: str, on: str, changes: Sequence[Change], trees: Trees
) -> Finding:
    title, spell = _CHANGED[what]
    rule = "coverage_lost" if what == "checks_lost" else what
    records = tuple(change.after for change in changes if change.after is not None)
    before = next((change.before for change in changes if change.before is not None), None)
    shown = records[0] if records else before
    return Finding(
        rule=rule,
        closes=policy.action(rule) == "close",
        kind="baseline",
        title=title,
        sentence=f"{spell(len(changes))}, such as {changes[0].case}: {changes[0].sentence}",
        fingerprint=fingerprint((what, op, impl, on)),
        op=op,
        impl=impl,
        on=on,
        count=len(changes),
        records=records,
        cases=tuple(change.case for change in changes),
        details=tuple(f"{change.case}: {change.sentence}" for change in changes[1:_NAMED]),
        replay=replay_line(shown, trees) if shown is not None else "",
    )


def _of_growth(growth: Growth, policy: Policy) -> Finding:
    ratios = [move.ratio for move in (growth.median, growth.tail) if move.grew]
    ratio, allowed = max(ratios), policy.error_growth
    within = isinstance(allowed, float) and ratio <= allowed
    limit = f"; the policy allows {allowed:g} times" if isinstance(allowed, float) else ""
    where = f", {growth.axis}={growth.value}" if growth.axis else ""
    return Finding(
        rule="error_growth",
        closes=policy.action("error_growth") == "close" and not within,
        kind="baseline",
        title=f"budget use grew {ratio:.3g} times{where}",
        sentence=f"{growth.sentence}{limit}",
        fingerprint=fingerprint(("error_growth", growth.op, growth.impl, growth.on, growth.axis, growth.value)),
        op=growth.op,
        impl=growth.impl,
        on=growth.on,
        count=growth.changed,
        cases=(growth.steepest,),
    )
