"""How does a script read a gate: JSON, with a schema number?"""

import json

import msgspec

from reports.gate import Finding, GateResult
from reports.known_failures import Use
from reports.policy import Policy
from reports.record import Environment

SCHEMA = 1
# Case ids that a finding keeps; `count` has them all.
MOST_CASES = 1000


class FoundCase(msgspec.Struct, frozen=True, kw_only=True):
    """A finding as it is kept."""

    rule: str
    closes: bool
    kind: str
    title: str
    sentence: str
    fingerprint: str
    status: str
    op: str
    impl: str
    on: str
    count: int
    cases: tuple[str, ...]
    details: tuple[str, ...]
    replay: str
    known: str


class KnownUse(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an entry of the known failures."""

    place: str
    state: str
    impl: str
    op: str
    case: str
    owner: str
    issue: str
    expires: str
    excused: int
    otherwise: int
    outlived: int
    passing: int


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """A gate as it is kept in a file. statuses, outcomes: how many records of each."""

    kind: str = "mla-oracle gate"
    schema: int = SCHEMA
    gate: str
    sentence: str
    run: str
    baseline: str
    statuses: dict[str, int]
    outcomes: dict[str, int]
    unanswered: int
    findings: tuple[FoundCase, ...]
    known: tuple[KnownUse, ...]
    notes: tuple[str, ...]
    policy: Policy
    environments: tuple[Environment, ...]


def gate_json(result: GateResult) -> str:
    """The document, as text."""
    report = GateReport(
        gate="closed" if result.closed else "open",
        sentence=result.sentence,
        run=result.run,
        baseline=result.baseline,
        statuses=dict(sorted(result.statuses.items())),
        outcomes=dict(sorted(result.outcomes.items())),
        unanswered=len(result.unanswered),
        findings=tuple(_found(finding) for finding in result.findings),
        known=tuple(_use(use) for use in result.uses),
        notes=result.notes,
        policy=result.policy,
        environments=result.environments,
    )
    text = json.dumps(msgspec.to_builtins(report), indent=2, ensure_ascii=False) + "\n"
    # A path that is no UTF-8 holds lone surrogates, and JSON has none.
    return text.encode("utf-8", errors="replace").decode()


def _found(finding: Finding) -> FoundCase:
    return FoundCase(
        rule=finding.rule, closes=finding.closes, kind=finding.kind, title=finding.title, sentence=finding.sentence,
        fingerprint=finding.fingerprint, status=finding.status, op=finding.op, impl=finding.impl, on=finding.on,
        count=finding.count, cases=finding.cases[:MOST_CASES], details=finding.details, replay=finding.replay,
        known=finding.entry.place if finding.entry is not None else "",
    )  # fmt: skip


def _use(use: Use) -> KnownUse:
    known = use.entry.known
    return KnownUse(
        place=use.entry.place, state=use.state, impl=known.impl, op=known.op, case=known.case, owner=known.owner,
        issue=known.issue, expires=known.expires.isoformat(), excused=len(use.excused), otherwise=len(use.otherwise),
        outlived=len(use.outlived), passing=use.passing,
    )  # fmt: skip
