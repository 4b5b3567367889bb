"""Which tasks does a selection name, and which of them run together?"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import cases as rooms
from cases.case import Case, CaseError, matches, parse, parse_pattern, spell
from cases.covering import Ledger, Level, ledger, sweep_cases
from impl.implementation import Execution, Impl, elsewhere, implementations
from impl.sources.source_tree import SourceError
from reports.laws import spoken
from reports.store import Task, read_run

# Statuses that `--failed` asks again: everything that counts against a run.
AGAINST = ("fail", "memory", "error", "crash", "hang", "vacuous")
# Cases of one item share a worker process, and a worker that dies takes its whole item along.
_TOGETHER: Mapping[Execution, int] = {"interpreter": 50, "cuda": 1, "hip": 1, "isa:gfx942": 50, "isa:gfx950": 50}
# On how many cases each law is asked about, and how many cases are built at most to find them.
CASES_OF_A_LAW: Mapping[Level, int] = {"smoke": 1, "default": 4, "nightly": 16}
MOST_BUILT = 120
# Values of an axis that a sentence names.
_MOST_SHOWN = 24


class SelectionError(ValueError):
    """A selection that names something that does not exist, or nothing at all; says what would be right."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the user asked to run. Empty `ops`, `impls` and `patterns` mean all; `failed` is an earlier run.

    laws: ask about the laws of the ops too, each on a few of the selected cases.
    """

    ops: tuple[str, ...] = ()
    impls: tuple[str, ...] = ()
    on: tuple[Execution, ...] = ("interpreter",)
    level: Level = "default"
    patterns: tuple[str, ...] = ()
    failed: Path | None = None
    seed: int = 0
    laws: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tasks of a run in the order of the plan, and the t-way coverage of their cases, an op each."""

    tasks: tuple[Task, ...]
    ledgers: tuple[Ledger, ...]


def plan(selection: Selection) -> Plan:
    """Every task that the selection names.

    Raises `SelectionError`, `CaseError` or `cases.UnknownOp` when a part of the selection fits nothing.
    """
    if selection.failed is not None:
        return _plan_failed(selection, selection.failed)
    whole = tuple(parse(text) for text in selection.patterns if _is_id(text))
    patterns = _patterns(selection)
    ops = chosen_ops(selection)
    names = chosen_impls(ops, selection.impls)
    levels = {op: sweep_cases(op, selection.level, selection.seed) for op in ops if patterns or not whole}
    for text, pattern in patterns.items():
        _check_words(text, pattern, levels, f"{selection.level} case")
    found: list[Task] = []
    ledgers: list[Ledger] = []
    unmet = dict.fromkeys(patterns)
    for op in ops:
        cases = {case.id: case for case in whole if case.op == op}
        if op in levels:
            for case in levels[op]:
                fitting = [text for text, pattern in patterns.items() if _fits(case, text, pattern)]
                for text in fitting:
                    unmet.pop(text, None)
                if fitting or not patterns:
                    cases[case.id] = case
        impls = [impl for impl in implementations(op) if impl.name in names]
        if cases and impls:
            ledgers.append(ledger(op, selection.level, cases.values()))
        found += [task for on in selection.on for impl in impls for task in grouped(cases.values(), impl, on)]
        if selection.laws and cases and impls:
            found += _law_tasks(op, list(cases.values()), impls, selection)
    if unmet:
        raise SelectionError(
            f"case pattern {next(iter(unmet))!r}: no {selection.level} case has this combination; a whole case id asks for it "
            "by itself"
        )
    if not found:
        raise SelectionError(
            f"nothing is selected: {', '.join(ops)} hold no case on {', '.join(names) or 'any implementation'}"
        )
    return Plan(tuple(found), tuple(ledgers))


def grouped(cases: Iterable[Case], impl: Impl, on: Execution) -> list[Task]:
    """One task a case; those that share compiled code stand together, as many to an item as may die together."""
    return _grouped(((case, "") for case in cases), impl, on)


def _grouped(questions: Iterable[tuple[Case, str]], impl: Impl, on: Execution) -> list[Task]:
    """One task for each case and law, the law empty for the answer itself."""
    by_key: dict[tuple[str, bool], list[tuple[Case, str]]] = {}
    for case, law in questions:
        by_key.setdefault((impl.compile_key(case), bool(law)), []).append((case, law))
    tasks: list[Task] = []
    items = 0
    for (_, about_laws), together in by_key.items():
        for first in range(0, len(together), _TOGETHER[on]):
            item = f"{together[0][0].op}/{impl.name}/{on}/{'law-' if about_laws else ''}{items:05d}"
            items += 1
            tasks += [
                Task(case=case.id, impl=impl.name, on=on, item=item, law=law)
                for case, law in together[first : first + _TOGETHER[on]]
            ]
    return tasks


def _answers(impl: Impl, case: Case, on: Execution) -> bool:
    """Whether an implementation has no reason against a case; one whose sources cannot be read fails at the case itself."""
    try:
        return not (elsewhere(case, on) or impl.unsupported(case, on))
    except SourceError:
        return False


def _law_tasks(op: str, cases: list[Case], impls: Sequence[Impl], selection: Selection) -> list[Task]:
    """Each law of the op on a few cases that every implementation able to answer them is asked about."""
    answered = [case for case in cases if any(_answers(impl, case, on) for impl in impls for on in selection.on)]
    if not answered:
        return []
    chosen = list(spoken(op, answered, CASES_OF_A_LAW[selection.level], MOST_BUILT))
    return [
        task
        for on in selection.on
        for impl in impls
        for task in _grouped(
            ((case, law) for case, laws in chosen for law in laws if _answers(impl, case, on)), impl, on
        )
    ]


def chosen_ops(selection: Selection) -> tuple[str, ...]:
    """The selected ops in the order of `cases.OPS`; those of whole case ids count as selected."""
    if selection.ops:
        named = {op for name in selection.ops for op in rooms.ops_named(name)}
    elif selection.patterns and all(_is_id(text) for text in selection.patterns):
        named = {text.partition(":")[0] for text in selection.patterns}
    else:
        named = set(rooms.OPS)
    return tuple(op for op in rooms.OPS if op in named)


def chosen_impls(ops: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The names of the selected implementations of these ops, `vllm-*` for all that begin so.

    Raises `SelectionError` for one that none of them has.
    """
    known = tuple(dict.fromkeys(impl.name for op in ops for impl in implementations(op)))
    for name in wanted:
        if not any(fnmatch.fnmatchcase(each, name) for each in known):
            raise SelectionError(
                f"unknown implementation {name!r}: {', '.join(ops)} have {', '.join(known) or 'no implementation'}"
            )
    return tuple(each for each in known if not wanted or any(fnmatch.fnmatchcase(each, name) for name in wanted))


def find_impl(op: str, name: str) -> Impl:
    """The implementation of an op by its name; raises `SelectionError` with the names that there are."""
    chosen_impls((op,), (name,))
    return next(impl for impl in implementations(op) if impl.name == name)


def _plan_failed(selection: Selection, failed: Path) -> Plan:
    run = read_run(failed)
    ops = chosen_ops(selection)
    patterns = _patterns(selection)
    whole = {parse(text).id for text in selection.patterns if _is_id(text)}
    impls = set(selection.impls)
    executions = set(selection.on)
    if patterns:
        asked: dict[str, list[Case]] = {op: [] for op in ops}
        for case in map(parse, dict.fromkeys(task.case for task in run.plan)):
            if case.op in asked:
                asked[case.op].append(case)
        for text, pattern in patterns.items():
            _check_words(text, pattern, asked, f"case of {failed}")
    by_place: dict[tuple[str, str, Execution], list[tuple[Case, str]]] = {}
    for task in run.plan:
        record = run.records.get(task.key)
        if record is None or record.status not in AGAINST or record.op not in ops or task.on not in executions:
            continue
        if impls and not any(fnmatch.fnmatchcase(task.impl, name) for name in impls):
            continue
        case = parse(task.case)
        fitting = case.id in whole or any(_fits(case, text, pattern) for text, pattern in patterns.items())
        if selection.patterns and not fitting:
            continue
        by_place.setdefault((record.op, task.impl, task.on), []).append((case, task.law))
    if not by_place:
        raise SelectionError(
            f"nothing is selected: {failed} holds no failure of this selection on {', '.join(selection.on)}; "
            "a failure is " + ", ".join(AGAINST)
        )
    tasks = [task for (op, impl, on), asked in by_place.items() for task in _grouped(asked, find_impl(op, impl), on)]
    return Plan(tuple(tasks), ())


def _is_id(text: str) -> bool:
    """Whether the text means one case: an op, a colon and its seed; anything less is a pattern."""
    op, colon, rest = text.partition(":")
    if not colon:
        return False
    if op not in rooms.OPS:
        raise CaseError(f"unknown op {op!r} in {text!r}: the ops are {', '.join(rooms.OPS)}")
    return any(part.strip().startswith("seed=") for part in rest.split(",")) and "|" not in rest


def _patterns(selection: Selection) -> dict[str, Mapping[str, tuple[str, ...]]]:
    return {text: parse_pattern(text) for text in selection.patterns if not _is_id(text)}


def _fits(case: Case, text: str, pattern: Mapping[str, tuple[str, ...]]) -> bool:
    op, colon, _ = text.partition(":")
    return (not colon or case.op == op) and matches(case, pattern)


def _check_words(
    text: str, pattern: Mapping[str, tuple[str, ...]], asked: Mapping[str, Iterable[Case]], kind: str
) -> None:
    """Raise for an axis of a pattern that no op has, and for a value of it, among others or alone, that no case has.

    asked: the cases of the selected ops that it chooses among. kind: what they are, for the sentence.
    """
    op, colon, _ = text.partition(":")
    if colon and op not in asked:
        raise SelectionError(f"case pattern {text!r}: {op} is not selected, only {', '.join(asked)}")
    considered = [op] if colon else list(asked)
    seen: dict[str, dict[str, None]] = {}
    for name in considered:
        for case in asked[name]:
            for axis, value in case.settings.items():
                seen.setdefault(axis, {})[spell(value)] = None
    for axis, words in pattern.items():
        if axis not in seen:
            raise SelectionError(
                f"case pattern {text!r}: no axis {axis!r} in {', '.join(considered)}; the axes are {', '.join(seen)}"
            )
        for word in words:
            if word not in seen[axis]:
                shown = ", ".join(list(seen[axis])[:_MOST_SHOWN])
                raise SelectionError(f"case pattern {text!r}: no {kind} has {axis}={word}; there are {shown}")
