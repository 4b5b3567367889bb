"""Does the judge of an op catch what is wrong, pass what is right, and leave little room between?

The kill matrix: every mutant of the op on the cases of a sweep until it has been seen often enough. False alarms: right
answers with other rounding points, on as many cases as asked. Tightness: on randn cases, how many times the worst error
of a right answer fits into its budget.
"""

import itertools
import multiprocessing
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from cases import op_module
from cases.case import Case, parse
from cases.covering import Level, sweep_cases
from oracle.check import Check
from oracle.laws import Honest
from reports.laws import identical

# A mutant is looked at until it has been observable so often; its kill rate is over these.
DEPTH = 6
TIGHT = 8.0
_WAVE = 8

Outcome = Literal["same", "caught", "missed", "silent"]


class Kill(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What became of one mutant: on how many cases it could be observed and was caught, and the first case of each."""

    op: str
    mutant: str
    pitfall: str
    observable: int = 0
    caught: int = 0
    unobservable: int = 0
    caught_on: str = ""
    caught_by: str = ""
    missed_on: str = ""

    @property
    def survives(self) -> bool:
        """Whether nothing in the sweep catches it."""
        return self.caught == 0


class Alarm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A right answer that was failed."""

    case: str
    honest: str
    sentence: str


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three figures of one op.

    clean: right answers judged. looseness: budget over worst error, of every clean randn case that has an error.
    """

    op: str
    level: str
    kills: tuple[Kill, ...]
    clean: int
    alarms: tuple[Alarm, ...]
    looseness: tuple[float, ...]

    @property
    def median_looseness(self) -> float:
        """The median of budget / worst error; 0 when no case has both."""
        return statistics.median(self.looseness) if self.looseness else 0.0

    @property
    def holds(self) -> bool:
        """Whether every mutant was caught, no right answer failed, and the budget is tight."""
        return not self.alarms and self.median_looseness <= TIGHT and not any(kill.survives for kill in self.kills)


class _Seen(msgspec.Struct, frozen=True):
    mutant: int
    outcome: Outcome
    by: str = ""


def prove(
    op: str, *, level: Level = "default", clean: int = 2000, depth: int = DEPTH, seed: int = 0, workers: int = 2
) -> Proof:
    """The proof of one op over the cases of a sweep level; deterministic for a seed whatever the number of workers."""
    cases = sweep_cases(op, level, seed)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        kills = _kill_matrix(pool, op, cases, depth)
        judged = list(pool.map(_judge_clean, _clean_tasks(op, cases, clean), chunksize=4))
    return Proof(
        op=op,
        level=level,
        kills=kills,
        clean=sum(1 for found in judged if found is not None),
        alarms=tuple(found for found in judged if isinstance(found, Alarm)),
        looseness=tuple(found for found in judged if isinstance(found, float) and found > 0),
    )


def _one_thread() -> None:
    torch.set_num_threads(1)


def _kill_matrix(pool: ProcessPoolExecutor, op: str, cases: Sequence[Case], depth: int) -> tuple[Kill, ...]:
    mutants = op_module("oracle", op).MUTANTS
    kills = [Kill(op=op, mutant=mutant.name, pitfall=mutant.pitfall) for mutant in mutants]
    # Cases of all kinds early: the array's rows next to each other are alike.
    step = next(k for k in (89, 97, 101, 103) if len(cases) % k)
    order = [cases[i * step % len(cases)] for i in range(len(cases))]
    for start in range(0, len(order), _WAVE):
        wanted = [n for n, kill in enumerate(kills) if kill.caught == 0 or kill.observable < depth]
        if not wanted:
            break
        wave = [case.id for case in order[start : start + _WAVE]]
        for case_id, found in zip(wave, pool.map(_try_mutants, wave, itertools.repeat(wanted)), strict=True):
            for seen in found:
                _count(kills[seen.mutant], case_id, seen)
    return tuple(kills)


def _count(kill: Kill, case_id: str, seen: _Seen) -> None:
    if seen.outcome in ("same", "silent"):
        kill.unobservable += 1
        return
    kill.observable += 1
    if seen.outcome == "caught":
        kill.caught += 1
        if not kill.caught_on:
            kill.caught_on, kill.caught_by = case_id, seen.by
    elif not kill.missed_on:
        kill.missed_on = case_id


def _try_mutants(case_id: str, wanted: Iterable[int]) -> list[_Seen]:
    """What each of the wanted mutants shows on a case; nothing where the case's own right answer is failed."""
    case = parse(case_id)
    oracle = op_module("oracle", case.op)
    inputs = op_module("cases", case.op).build(case)
    baseline: Honest = oracle.HONEST[0]
    right = baseline.answer(inputs)
    precision = baseline.declared(inputs)
    if right is None or _broken(oracle.judge(inputs, right, precision)):
        return []
    found = []
    for number in wanted:
        wrong = oracle.MUTANTS[number].answer(inputs)
        if wrong is None:
            found.append(_Seen(number, "silent"))
        elif identical(right, wrong) and _plain(right) == _plain(wrong):
            found.append(_Seen(number, "same"))
        else:
            broken = _broken(oracle.judge(inputs, wrong, precision))
            found.append(_Seen(number, "caught" if broken else "missed", str(broken[0]) if broken else ""))
    return found


def _broken(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if not check.passed]


def _plain(answer: Any) -> dict[str, object]:
    """The fields of an answer that are no tensors."""
    fields = getattr(answer, "__dataclass_fields__", {})
    return {name: getattr(answer, name) for name in fields if isinstance(getattr(answer, name), (int, float, str))}


def _clean_tasks(op: str, cases: Sequence[Case], count: int) -> Iterator[tuple[str, int]]:
    """Case ids and numbers of honest ways: each case in turn, its seed moved each time round."""
    ways = len(op_module("oracle", op).HONEST)
    for number in range(count):
        lap, place = divmod(number, len(cases))
        case = cases[place]
        yield case.varied(seed=case.seed + 1000 * lap).id, (number + lap) % ways


def _judge_clean(task: tuple[str, int]) -> Alarm | float | None:
    """The alarm that a right answer raised, or its looseness (0 where there is none), or None when that way cannot serve."""
    case_id, number = task
    case = parse(case_id)
    oracle = op_module("oracle", case.op)
    inputs = op_module("cases", case.op).build(case)
    way: Honest = oracle.HONEST[number]
    answer = way.answer(inputs)
    if answer is None:
        return None
    precision = way.declared(inputs)
    checks = oracle.judge(inputs, answer, precision)
    broken = _broken(checks)
    if broken:
        return Alarm(case=case_id, honest=way.name, sentence=str(broken[0]))
    if case.settings.get("values") != "randn":
        return 0.0
    return max(map(_looseness, checks), default=0.0)


def _looseness(check: Check) -> float:
    return (
        check.budget / check.error if check.measure == "bounded" and check.output == "out" and check.error > 0 else 0.0
    )


def show(proof: Proof, console: Console) -> None:
    """Print the three figures: the kill matrix with the case that caught each mutant, false alarms, tightness."""
    table = Table(title=f"{proof.op}: mutants on the {proof.level} sweep", title_justify="left", header_style="bold")
    for column in ("mutant", "caught", "observable", "first caught by"):
        table.add_column(column, overflow="fold")
    for kill in sorted(proof.kills, key=lambda kill: (not kill.survives, kill.mutant)):
        rate = f"{kill.caught}" if kill.caught else "[bold red]0 SURVIVES[/]"
        why = (
            f"{kill.caught_by}\n[dim]{kill.caught_on}[/]"
            if kill.caught
            else f"as if {kill.pitfall} [dim]{kill.missed_on}[/]"
        )
        table.add_row(kill.mutant, rate, str(kill.observable), why)
    console.print(table)
    survivors = [kill.mutant for kill in proof.kills if kill.survives]
    console.print(
        f"mutants: {len(proof.kills) - len(survivors)} of {len(proof.kills)} caught"
        + (f"; never caught: {', '.join(survivors)}" if survivors else "")
    )
    console.print(f"false alarms: {len(proof.alarms)} in {proof.clean} right answers")
    for alarm in proof.alarms[:20]:
        console.print(f"  {alarm.honest}: {alarm.sentence}\n  {alarm.case}", style="red")
    if proof.looseness:
        console.print(
            f"tightness: the budget is {proof.median_looseness:.2f} times the worst error of a right answer, median of "
            f"{len(proof.looseness)} randn cases (at most {TIGHT:g})"
        )


def run(
    ops: Sequence[str], *, level: Level = "default", clean: int = 2000, depth: int = DEPTH, seed: int = 0, workers: int = 2,
    out: Path | None = None, console: Console | None = None,
) -> int:  # fmt: skip
    """Prove each op, print it, and write all proofs as JSON to `out`; 0 when every proof holds, otherwise 1."""
    console = console or Console()
    proofs = []
    for op in ops:
        proof = prove(op, level=level, clean=clean, depth=depth, seed=seed, workers=workers)
        show(proof, console)
        proofs.append(proof)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(proofs), indent=1))
    return 0 if all(proof.holds for proof in proofs) else 1
