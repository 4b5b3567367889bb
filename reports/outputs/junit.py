"""How does a gate read in a viewer of test results: JUnit XML?

A test suite for each op and a test case for each record, with the implementation, execution and law in the class name. A
numeric failure is a `failure`; a crash, a hang, a lost device and a broken harness are an `error`, with the word in its
type. Runs of more than `LISTED` records have a test case for each group of records instead. What speaks of no record,
such as lost coverage or an expired known failure, is a test case of the suite `gate`.
"""

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

from reports.gate import KINDS, Finding, GateResult, Judged, sentence_of
from reports.outputs.escaping import printable
from reports.record import Record
from reports.replaying import Trees, replay_line
from reports.words import plural

LISTED = 10_000
_SHOWN = 20
# Findings that a record's own test case says already.
_OF_RECORDS = ("statuses", "harness", "retried")

Names = dict[str, str]


def junit(result: GateResult) -> str:
    """The document; viewers read its counts, so they are those of its test cases."""
    suites: dict[str, list[_Test]] = {}
    by_record = len(result.judged) + len(result.unanswered) <= LISTED
    for test in _each(result) if by_record else _grouped(result):
        suites.setdefault(test.suite, []).append(test)
    suites["gate"] = [_of_finding(finding) for finding in result.findings if finding.rule not in _OF_RECORDS]
    notes = {f"note {number}": note for number, note in enumerate(result.notes, 1)}
    suites["gate"].append(_Test("gate", "gate", result.run, "", properties={"sentence": result.sentence, **notes}))
    every = [test for tests in suites.values() for test in tests]
    said = " ".join(filter(None, (result.run, f"against {result.baseline}" if result.baseline else "")))
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        _tag("testsuites", {"name": f"mla-oracle gate {said}", **_counts(every)}),
    ]
    for suite, tests in suites.items():
        lines.append("  " + _tag("testsuite", {"name": suite, **_counts(tests)}))
        lines += [f"    {test}" for test in tests]
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>", ""])


class _Test:
    """One test case: `kind` is failure, error, skipped, or empty when it passed."""

    def __init__(
        self, suite: str, group: str, name: str, kind: str, message: str = "", type: str = "", text: Sequence[str] = (),
        seconds: float = 0.0, properties: Names | None = None,
    ) -> None:  # fmt: skip
        self.suite, self.kind, self.seconds = suite, kind, seconds
        self._words = {"classname": group, "name": name, "time": f"{seconds:.3f}"}
        self._said = {"message": message, **({"type": type} if type else {})} if kind else {}
        self._text, self._properties = text, properties or {}

    def __str__(self) -> str:
        inside = ""
        if self._properties:
            each = "".join(
                _tag("property", {"name": key, "value": word}, "/") for key, word in self._properties.items()
            )
            inside += f"<properties>{each}</properties>"
        if self.kind:
            text = "\n".join(printable(line) for line in self._text)
            inside += f"{_tag(self.kind, self._said)}{escape(text)}</{self.kind}>"
        return f"{_tag('testcase', self._words)}{inside}</testcase>" if inside else _tag("testcase", self._words, "/")


def _tag(name: str, words: Names, end: str = "") -> str:
    return f"<{name}{''.join(f' {key}={quoteattr(printable(word))}' for key, word in words.items())}{end}>"


def _counts(tests: Sequence[_Test]) -> Names:
    kinds = [test.kind for test in tests]
    return {
        "tests": str(len(tests)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
        "time": f"{sum(test.seconds for test in tests):.3f}",
    }


def _each(result: GateResult) -> Iterable[_Test]:
    retried_closes = result.policy.action("retried") == "close"
    for each in result.judged:
        yield _of_record(each, result.trees, retried_closes)
    for task in result.unanswered:
        op, _, case = task.case.partition(":")
        closes = result.policy.action("unfinished") == "close"
        yield _Test(
            op, _group(op, task.impl, task.on, task.law), case, "error" if closes else "skipped",
            "no record: the run is not finished", "unfinished",
        )  # fmt: skip


def _group(op: str, impl: str, on: str, law: str) -> str:
    return f"{op}.{impl}.{on}{f'.law.{law}' if law else ''}"


def _of_record(each: Judged, trees: Trees, retried_closes: bool) -> _Test:
    record = each.record
    kind, message, type = _fate(each)
    properties: Names = {"status": record.status}
    if record.checks:
        properties["budget use"] = f"{record.use:.4g}"
    for number, attempt in enumerate(record.attempts, 1):
        properties[f"attempt {number}"] = f"{attempt.status}: {'; '.join(attempt.reasons)}"
    text = _text_of(record, trees) if each.outcome in ("closes", "reported", "known") else ()
    if record.attempts and each.outcome != "closes" and retried_closes:
        kind, message, type = "error", f"{record.status} only when asked again", "infrastructure: retried"
        text = _text_of(record, trees)
    spent = record.seconds
    return _Test(
        record.op, _group(record.op, record.impl, record.on, record.law), record.case.partition(":")[2], kind, message,
        type, text, spent.build + spent.run + spent.reference + spent.judge, properties,
    )  # fmt: skip


def _fate(each: Judged) -> tuple[str, str, str]:
    """Element, message and type of what became of a record."""
    record, sentence = each.record, sentence_of(each.record)
    if each.outcome == "closes":
        return ("failure", sentence, record.status) if each.kind == "answer" else ("error", sentence, _type(each))
    if each.outcome == "known" and each.entry is not None:
        known = each.entry.known
        return "skipped", f"known failure until {known.expires}, {known.owner}, {known.issue}: {sentence}", ""
    if each.outcome == "reported":
        return "skipped", f"{record.status}, which the policy lets be: {sentence}", ""
    return ("skipped", f"unsupported: {sentence}", "") if each.outcome == "skipped" else ("", "", "")


def _type(each: Judged) -> str:
    return f"{each.kind}: {each.record.status}"


def _text_of(record: Record, trees: Trees) -> tuple[str, ...]:
    return (
        record.case, *(str(check) for check in record.checks if not check.passed), *record.reasons, *record.diagnosis,
        *(f"asked again: it ended before as {a.status}, {'; '.join(a.reasons)}" for a in record.attempts),
        *((f"capsule: {record.capsule}",) if record.capsule else ()),
        f"see it again: {replay_line(record, trees)}",
    )  # fmt: skip


def _grouped(result: GateResult) -> Iterable[_Test]:
    """A test case for all records of an implementation that passed, were skipped or are known, and for each finding."""
    groups: dict[tuple[str, str, str, str], list[Judged]] = {}
    for each in result.judged:
        if each.outcome in ("passed", "skipped", "known"):
            record = each.record
            groups.setdefault((record.op, record.impl, record.on, each.outcome), []).append(each)
    for (op, impl, on, outcome), found in groups.items():
        kind, message, _ = _fate(found[0])
        spent = sum(each.record.seconds.run for each in found)
        yield _Test(
            op, _group(op, impl, on, ""), f"{plural(len(found), 'case')} {outcome}", kind, message, "", (), spent
        )
    for finding in result.findings:
        if finding.rule in _OF_RECORDS:
            yield _of_finding(finding)


def _of_finding(finding: Finding) -> _Test:
    group = _group(finding.op, finding.impl, finding.on, "") if finding.op else "gate"
    number = f", {finding.count} cases" if finding.count > 1 else ""
    kind = (
        "skipped" if not finding.closes else "failure" if finding.kind in ("answer", "baseline", "known") else "error"
    )
    type = (
        "" if kind == "skipped" else finding.status if finding.kind == "answer" else f"{finding.kind}: {finding.rule}"
    )
    if kind == "error" and finding.status:
        type = f"{finding.kind}: {finding.status}"
    text = (
        KINDS[finding.kind], finding.sentence, *finding.details, *finding.cases[:_SHOWN],
        *((f"and {len(finding.cases) - _SHOWN} more",) if len(finding.cases) > _SHOWN else ()),
        *((f"see it again: {finding.replay}",) if finding.replay else ()),
    )  # fmt: skip
    name = f"{finding.rule}: {finding.title}{number} ({finding.fingerprint})"
    return _Test(finding.op or "gate", group, name, kind, finding.sentence, type, text)
