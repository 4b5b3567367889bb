"""Do a kernel's executions agree: interpreted, as machine code of each architecture, with whatever launch options?

The same questions are swept once for each way of running them, a run directory each, and may be held against runs made
elsewhere, as on a GPU. Every answer is judged against the same reference within the budget of its own rounding points, so
that two answers that pass differ by no more than both budgets together; what is left to find is a question that one way
answers rightly and another does not, and an answer without any budget whose bits are not everywhere the same.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from impl.executions.isa.triton_launch import OPTIONS
from impl.implementation import Execution, machine_code_of
from reports.plan import AGAINST, Plan
from reports.record import Record
from reports.store import Run, Settings, create_run
from reports.sweep import sweep
from reports.words import plural

Question = tuple[str, str]
"""A case and an implementation."""

FindingKind = Literal["verdict", "bits"]
_BITWISE = frozenset({"exact", "codes", "plan", "ranking"})
_LISTED = 40


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way of running kernels: an execution, and what replaces the options of their launches (0 leaves them alone)."""

    on: Execution
    warps: int = 0
    stages: int = 0

    @property
    def options(self) -> str:
        """As `triton_launch.OPTIONS` spells them."""
        parts = (("num_warps", self.warps), ("num_stages", self.stages))
        return ",".join(f"{name}={number}" for name, number in parts if number)

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return f"{self.on} {self.options}".strip()

    @property
    def stem(self) -> str:
        """What its run directory is called."""
        return self.name.replace(":", ".").replace(" ", "-").replace("=", "").replace(",", "-")


def ways(executions: Sequence[Execution], warps: Sequence[int], stages: Sequence[int]) -> list[Way]:
    """Every execution as kernels ask for it, and machine code with every combination of the options given as well."""
    found = []
    for on in executions:
        found.append(Way(on=on))
        if machine_code_of(on):
            combinations = itertools.product(warps or (0,), stages or (0,))
            found += [Way(on=on, warps=few, stages=many) for few, many in combinations if few or many]
    return found


def ask(way: Way, path: Path, plan: Plan, settings: Settings, console: Console) -> Run:
    """Sweep a plan in one way, into a new run directory."""
    create_run(path, settings, plan.tasks)
    with _launch_options(way.options):
        return sweep(path, console)


@contextlib.contextmanager
def _launch_options(stated: str) -> Iterator[None]:
    """Sessions are started with this process's environment, and records tell what stands there."""
    before = os.environ.pop(OPTIONS, None)
    if stated:
        os.environ[OPTIONS] = stated
    try:
        yield
    finally:
        os.environ.pop(OPTIONS, None)
        if before is not None:
            os.environ[OPTIONS] = before


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One question that is not answered alike. answers: by way, the status and the first eight digits of the bits."""

    kind: FindingKind
    case: str
    impl: str
    answers: dict[str, str]
    sentence: str


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Two ways, on one op and implementation: how many questions both answer rightly, and on how many of them bit for bit."""

    op: str
    impl: str
    first: str
    second: str
    compared: int
    identical: int


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """What the ways say of all questions. compared: questions that at least two of them judged."""

    ways: tuple[str, ...]
    compared: int
    findings: tuple[Finding, ...]
    agreements: tuple[Agreement, ...]


def compare(answers: Mapping[str, Iterable[Record]]) -> Differences:
    """Hold the records of each way, by its name, against those of the others; answers about laws are left out."""
    by_question: dict[Question, dict[str, Record]] = {}
    for name, records in answers.items():
        for record in records:
            if not record.law and (record.status == "pass" or record.status in AGAINST):
                by_question.setdefault((record.case, record.impl), {})[name] = record
    judged = {question: found for question, found in by_question.items() if len(found) > 1}
    findings = [finding for question, found in judged.items() for finding in _findings(question, found)]
    return Differences(
        ways=tuple(answers),
        compared=len(judged),
        findings=tuple(findings),
        agreements=tuple(_agreements(judged.values())),
    )


def _findings(question: Question, found: Mapping[str, Record]) -> Iterator[Finding]:
    passed = {name: record for name, record in found.items() if record.status == "pass"}
    told = {name: f"{record.status} {record.fingerprint[:8]}".strip() for name, record in found.items()}
    if passed and len(passed) < len(found):
        failed = {name: record for name, record in found.items() if record.status != "pass"}
        sentence = f"{', '.join(passed)} pass; {', '.join(failed)}: {_why(next(iter(failed.values())))}"
        yield Finding(kind="verdict", case=question[0], impl=question[1], answers=told, sentence=sentence)
    if len({record.fingerprint for record in passed.values()}) > 1 and all(map(_is_bitwise, passed.values())):
        sides: dict[str, list[str]] = {}
        for name, record in passed.items():
            sides.setdefault(record.fingerprint, []).append(name)
        sentence = "other bits where none may differ: " + " | ".join(", ".join(names) for names in sides.values())
        yield Finding(kind="bits", case=question[0], impl=question[1], answers=told, sentence=sentence)


def _is_bitwise(record: Record) -> bool:
    """Whether nothing in an answer is judged within a budget."""
    return bool(record.checks) and all(check.measure in _BITWISE for check in record.checks)


def _why(record: Record) -> str:
    broken = [str(check) for check in record.checks if not check.passed]
    return f"{record.status}: {(record.reasons or tuple(broken) or ('no reason given',))[0]}"


def _agreements(judged: Iterable[Mapping[str, Record]]) -> Iterator[Agreement]:
    compared: Counter[tuple[str, str, str, str]] = Counter()
    identical: Counter[tuple[str, str, str, str]] = Counter()
    for found in judged:
        passed = [(name, record) for name, record in found.items() if record.status == "pass"]
        for (first, one), (second, other) in itertools.combinations(passed, 2):
            place = one.op, one.impl, first, second
            compared[place] += 1
            identical[place] += one.fingerprint == other.fingerprint
    for place, number in sorted(compared.items()):
        op, impl, first, second = place
        yield Agreement(op=op, impl=impl, first=first, second=second, compared=number, identical=identical[place])


def show(found: Differences, console: Console) -> None:
    """Print which ways agree, bit for bit or within both budgets, and every finding."""
    table = Table("op", "implementation", "one", "other", "both pass", "same bits", "within both budgets", box=None)
    for pair in found.agreements:
        other_bits = pair.compared - pair.identical
        table.add_row(
            pair.op, pair.impl, pair.first, pair.second, str(pair.compared), str(pair.identical), str(other_bits or ".")
        )
    console.print(table)
    for finding in found.findings[:_LISTED]:
        console.print(escape(f"{finding.kind}: {finding.impl} {finding.case}\n  {finding.sentence}"))
    more = len(found.findings) - _LISTED
    if more > 0:
        console.print(f"and {plural(more, 'more finding')}")
    asked = f"{plural(found.compared, 'question')} answered in at least two of {len(found.ways)} ways"
    console.print(f"{asked}: {plural(len(found.findings), 'finding')}")
    if not found.compared:
        console.print("nothing was compared, so this is no agreement", style="bold")
