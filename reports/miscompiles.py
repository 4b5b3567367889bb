"""Would a kernel that the compiler got wrong by one instruction be caught?

Edits drawn at random over the machine code that implementations launch in the smoke cases of ops; each is executed in place
of the code it was made from, and judged as a sweep judges. What passes all the same is held against arguments that it
makes no difference; what none of them explains was missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import multiprocessing
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Literal

import msgspec
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cases import op_module
from cases.case import Axis, Case, impossible, parse
from cases.covering import LEVELS, Level, sweep_cases
from impl.executions.aot.compile import FUSION
from impl.executions.isa import flow, machine, miscompile, triton_launch
from impl.executions.isa.assembly import Program
from impl.executions.isa.encoding import Encoded
from impl.executions.isa.lds_order import Witness
from impl.executions.isa.miscompile import KINDS, Edit
from impl.executions.isa.stepping import Stepper
from impl.executions.isa.triton_launch import Launched, Run, looked_on, only_named
from impl.implementation import Execution, elsewhere, implementations
from impl.sources.settings import use_aiter, use_vllm
from oracle.check import Status
from reports.environment import environment
from reports.execute import answer, attempt
from reports.plan import find_impl
from reports.record import Environment, Record
from reports.replaying import NO_TREES, Trees

Outcome = Literal["caught", "dead", "equivalent", "missed"]
OUTCOMES: tuple[Outcome, ...] = ("caught", "dead", "equivalent", "missed")

ENOUGH = 0.95
"""The share of edits that must be caught or shown to make no difference."""
# How often an edit is drawn again that changes nothing, or that was drawn before.
_DRAWS = 60
# An edited launch that runs so many times longer than the longest right one has no end.
_LONGER, _AT_LEAST = 4, 100_000
# Where nothing is known of how long a right one is.
_ENDLESS = 40_000_000

# So many cases of one level are asked of one edit at most; so many near the smoke ones before it is explained, and in all;
# near so many of them; and so many are drawn for it. No more is asked once so many wave-instructions were executed for it.
_MOST_FURTHER, _NEAR, _MOST_NEAR, _STARTS, _TRIES = 80, 24, 120, 3, 300
_MOST_EXECUTED = 20_000_000

_SAME = "the outputs' bits are as without it"


class Seeded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One edit and what became of it.

    line: the instruction as it was. source: the kernel's file and line. by: the verdict and first sentence that caught it,
    or the argument that it makes no difference, or why none was found. case: where it was caught. cases: how many smoke
    cases launch the kernel. further: how many cases of other levels were asked.
    """

    op: str
    impl: str
    on: str
    kernel: str
    key: str
    kind: str
    at: int
    line: str
    source: str
    edit: str
    outcome: Outcome
    by: str
    case: str = ""
    cases: int = 0
    further: int = 0


class Campaign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All edits of one seed. kernels: how many they were drawn over. left_out: sentences on what no edit could be made of.

    level: how far cases were asked.
    """

    seed: int
    on: tuple[str, ...]
    ops: tuple[str, ...]
    kernels: int
    edits: tuple[Seeded, ...]
    left_out: tuple[str, ...] = ()
    level: Level = "default"

    def count(self, outcome: Outcome, kind: str = "") -> int:
        """How many edits, of one kind or of all, ended so."""
        return sum(edit.outcome == outcome and kind in ("", edit.kind) for edit in self.edits)

    @property
    def rate(self) -> float:
        """Caught, of those that make a difference; 1 where none does."""
        caught, missed = self.count("caught"), self.count("missed")
        return caught / (caught + missed) if caught + missed else 1.0

    @property
    def holds(self) -> bool:
        """Whether enough edits are caught or shown to make no difference."""
        return bool(self.edits) and len(self.edits) - self.count("missed") >= ENOUGH * len(self.edits)


@dataclasses.dataclass(frozen=True)
class Target:
    """A kernel to be edited: where it is launched, its code, the cases that pass with it, the cheapest first, the waves of
    its workgroups, and the wave-instructions after which an edited launch counts as endless.

    bits: the fingerprint of the outputs of each case.
    """

    op: str
    impl: str
    on: Execution
    key: str
    program: Program
    cases: tuple[str, ...]
    waves: int
    limit: int
    bits: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Seen:
    """What a census knows of a kernel."""

    program: Program
    waves: int
    longest: int = 0
    costs: dict[str, int] = dataclasses.field(default_factory=dict)


def campaign(
    ops: Sequence[str], executions: Sequence[Execution], count: int, *, seed: int = 0, level: Level = "default",
    trees: Trees = NO_TREES, workers: int = 2,
) -> Campaign:  # fmt: skip
    """Draw and judge `count` edits; the same ones for a seed and the same compiled code, whatever the number of workers.

    level: with smoke, what passes the smoke cases is asked no more; else it is asked default cases and near ones, and with
    nightly those as well.
    """
    targets: list[Target] = []
    left_out: list[str] = []
    for on in executions:
        asked = [(op, impl.name, on) for op in ops for impl in implementations(op) if _asked(impl.name, trees)]
        with _pool(workers, trees) as pool:
            for found, notes in pool.map(census, *zip(*asked, strict=True)) if asked else ():
                targets += found
                left_out += notes
    drawn = draw(targets, count, random.Random(seed))
    edits: list[Seeded] = []
    for on in executions:
        edits += _judged([(target, edit) for target, edit in drawn if target.on == on], level, workers, trees)
    return Campaign(
        seed=seed,
        on=tuple(executions),
        ops=tuple(ops),
        kernels=len(targets),
        edits=tuple(edits),
        left_out=tuple(left_out),
        level=level,
    )


def _asked(name: str, trees: Trees) -> bool:
    patterns = ("ours-*", *(("vllm-*",) if trees.vllm else ()), *(("aiter-*",) if trees.aiter else ()))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _pool(workers: int, trees: Trees) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(trees.vllm, trees.aiter))


def _begin(vllm: Path | None, aiter: Path | None) -> None:
    torch.set_num_threads(1)
    os.environ.pop("TRITON_INTERPRET", None)
    # What is the default is said, so that no version of Triton warns of another.
    os.environ.setdefault(FUSION, "1")
    use_vllm(vllm)
    use_aiter(aiter)


@functools.cache
def _environment(on: Execution) -> Environment:
    return environment(on)


def _asked_once(case: str, impl: str, on: Execution) -> Record:
    chosen = parse(case)
    return attempt(chosen, find_impl(chosen.op, impl), on, _environment(on)).record


def census(op: str, impl: str, on: Execution) -> tuple[list[Target], list[str]]:
    """The kernels that an implementation launches in the smoke cases that pass, and a sentence where some do not."""
    kernels: dict[str, _Seen] = {}
    statuses: Counter[Status] = Counter()
    bits: dict[str, str] = {}
    said = ""
    for case in sweep_cases(op, "smoke", 0):
        spent: Counter[str] = Counter()

        def look(launched: Launched, run: Run, spent: Counter[str] = spent) -> int:
            steps = run(launched.kernel, 0)
            seen = kernels.setdefault(launched.key, _Seen(launched.kernel.program, launched.waves))
            seen.longest = max(seen.longest, steps)
            spent[launched.key] += steps
            return steps

        with looked_on(look):
            record = _asked_once(case.id, impl, on)
        statuses[record.status] += 1
        if record.status == "pass":
            bits[case.id] = record.fingerprint
            for key in spent:
                kernels[key].costs[case.id] = sum(spent.values())
        elif record.status != "unsupported" and not said:
            said = _why(record)
    targets = [
        Target(op, impl, on, key, seen.program, tuple(sorted(seen.costs, key=seen.costs.__getitem__)), seen.waves,
               _AT_LEAST + _LONGER * seen.longest, {case: bits[case] for case in seen.costs})
        for key, seen in kernels.items() if seen.costs
    ]  # fmt: skip
    notes = [f"{op} {impl} {on}: {status} on {number} smoke cases, which count for nothing here{f': {said}' if said else ''}"
             for status, number in statuses.items() if status not in ("pass", "unsupported")]  # fmt: skip
    return targets, notes


def _why(record: Record) -> str:
    broken = [str(check) for check in record.checks if not check.passed]
    return f"{record.status}: {(record.reasons or tuple(broken) or ('no reason given',))[0]}"


def draw(targets: Sequence[Target], count: int, rng: random.Random) -> list[tuple[Target, Edit]]:
    """Edits over all ops in turn: a kind, a kernel that has it, an instruction and what is done to it, each by chance."""
    of_op: dict[tuple[Execution, str], list[Target]] = {}
    for target in targets:
        of_op.setdefault((target.on, target.op), []).append(target)
    possible = _Possible()
    drawn: list[tuple[Target, Edit]] = []
    taken: set[tuple[str, int, str, str]] = set()
    places = list(of_op.values())
    for number in range(count if places else 0):
        here = places[number % len(places)]
        for _ in range(_DRAWS):
            kind = rng.choice([kind for kind in KINDS if any(possible.at(target, kind) for target in here)])
            target = rng.choice([target for target in here if possible.at(target, kind)])
            edit = rng.choice(rng.choice(list(possible.at(target, kind).values())))
            identity = (target.key, edit.at, edit.kind, edit.words)
            if identity not in taken and miscompile.encoded(target.program, edit) is not None:
                taken.add(identity)
                drawn.append((target, edit))
                break
    return drawn


class _Possible:
    """The edits of each kernel and kind, by instruction, found when they are first asked for."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Mapping[int, list[Edit]]] = {}

    def at(self, target: Target, kind: str) -> Mapping[int, list[Edit]]:
        where = (target.key, kind)
        if where not in self._found:
            by_place: dict[int, list[Edit]] = {}
            for edit in miscompile.edits(target.program, kind):
                by_place.setdefault(edit.at, []).append(edit)
            self._found[where] = by_place
        return self._found[where]


def _judged(drawn: Sequence[tuple[Target, Edit]], level: Level, workers: int, trees: Trees) -> list[Seeded]:
    """Every edit judged; one that ends its process is judged once more, alone, and then it is what did it."""
    found: dict[int, Seeded] = {}
    with _pool(workers, trees) as pool:
        futures: list[Future[Seeded]] = []
        for target, edit in drawn:
            try:
                futures.append(pool.submit(judge, target, edit, level))
            except BrokenProcessPool:
                break
        for number, future in enumerate(futures):
            try:
                found[number] = future.result()
            except BrokenProcessPool:
                continue
    for number, (target, edit) in enumerate(drawn):
        if number not in found:
            with _pool(1, trees) as pool:
                try:
                    found[number] = pool.submit(judge, target, edit, level).result()
                except BrokenProcessPool:
                    found[number] = _seeded(target, edit, "caught", "crash: the process died")
    return [found[number] for number in range(len(drawn))]


def judge(target: Target, edit: Edit, level: Level = "smoke") -> Seeded:
    """What becomes of an edit: caught by the first case that does not pass, explained, or missed."""
    original = machine.prepare(target.program)
    edited = machine.prepare(miscompile.applied(target.program, edit))
    changed = 0
    for case in target.cases:
        record = _asked_with(edited, target, case, target.limit)
        if record.status != "pass":
            return _seeded(target, edit, "caught", _why(record), case)
        changed += record.fingerprint != target.bits[case]
    for outcome, why in _static(target, edit, original.encoded, edited.encoded):
        return _seeded(target, edit, outcome, why)
    further = 0
    found: Seeded | None = None
    begun = triton_launch.executed
    for near in _further(target, level):
        if found is not None and triton_launch.executed - begun > _MOST_EXECUTED:
            break
        if near is None:
            # What is asked from here on is for what nothing explains.
            found = _explained(target, edit, original, edited)
            if found.outcome != "missed":
                break
            continue
        further += 1
        # The smoke cases say nothing of how long another one runs.
        record = _asked_with(edited, target, near, _ENDLESS)
        if record.status != "pass" and _is_right(target, near):
            caught = _seeded(target, edit, "caught", _why(record), near)
            return msgspec.structs.replace(caught, further=further)
    assert found is not None
    found = msgspec.structs.replace(found, further=further)
    if found.outcome != "missed":
        return found
    seen = f"within budget, other bits in {changed} of {len(target.cases)} cases" if changed else _SAME
    return msgspec.structs.replace(found, by=f"{found.by}; {seen}")


def _further(target: Target, level: Level) -> Iterator[str | None]:
    """Cases beside the smoke ones in which the compilation is launched, each once; None where explanations come in."""
    if level == "smoke":
        yield None
        return
    near = _near(target)
    parts: list[Iterable[str | None]] = [
        _launching(target, "default"), itertools.islice(near, _NEAR), (None,), itertools.islice(near, _MOST_NEAR - _NEAR)
    ]  # fmt: skip
    if level == "nightly":
        parts.append(_launching(target, "nightly"))
    asked: set[str | None] = set()
    for case in itertools.chain.from_iterable(parts):
        if case not in asked:
            asked.add(case)
            yield case


def _near(target: Target) -> Iterator[str]:
    """Cases near the smoke ones that launch the same compilation: one axis elsewhere, then several and other numbers."""
    rng = random.Random(target.key)
    module = op_module("cases", target.op)
    known = set(target.cases)

    def is_new(case: Case) -> bool:
        if case.id in known or impossible(case) or module.heavy(case):
            return False
        known.add(case.id)
        return target.key in _keys(case, target.impl, target.on)

    starts = [parse(case) for case in target.cases[:_STARTS]]
    free: list[dict[str, list[Axis]]] = []
    for start in starts:
        moves = [(axis, value) for axis, values in module.AXES.items() for value in values]
        rng.shuffle(moves)
        free.append({})
        for axis, value in moves:
            case = start.varied(**{axis: value})
            if is_new(case):
                free[-1].setdefault(axis, []).append(value)
                yield case.id
    for _ in range(_TRIES):
        place = rng.randrange(len(starts))
        axes = [axis for axis in free[place] if rng.random() < 0.5]
        changes = {axis: rng.choice(free[place][axis]) for axis in axes}
        case = starts[place].varied(**changes, seed=rng.randrange(1000))
        if is_new(case):
            yield case.id


def _is_right(target: Target, case: str) -> bool:
    """Whether a case passes with the right code, far from what counts as endless; else its answer is no edit's fault."""
    before = triton_launch.executed
    passed = _asked_once(case, target.impl, target.on).status == "pass"
    return passed and _LONGER * (triton_launch.executed - before) < _ENDLESS


def _asked_with(edited: machine.Kernel, target: Target, case: str, limit: int) -> Record:
    """The answer to a case where the edited code stands for what it was made from."""

    def instead(launched: Launched, run: Run) -> int:
        return run(edited, limit) if launched.key == target.key else run(launched.kernel, 0)

    with looked_on(instead):
        return _asked_once(case, target.impl, target.on)


def _launching(target: Target, level: Level) -> Iterator[str]:
    """The first cases of a level, and of none below it, in which an implementation launches a compilation."""
    below = LEVELS[: LEVELS.index(level)]
    known = {case.id for lower in below for case in sweep_cases(target.op, lower, 0)}
    found = (
        case.id
        for case in sweep_cases(target.op, level, 0)
        if case.id not in known and target.key in _keys(case, target.impl, target.on)
    )
    yield from itertools.islice(found, _MOST_FURTHER)


@functools.cache
def _keys(case: Case, impl: str, on: Execution) -> frozenset[str]:
    """What the compilations are known by that an implementation launches in a case; none of them is run."""
    chosen = find_impl(case.op, impl)
    if elsewhere(case, on) or chosen.unsupported(case, on):
        return frozenset()
    inputs = op_module("cases", case.op).build(case)
    # Behind launches that did not run a wrapper may well fail: what it launched until then is known.
    with only_named() as found, contextlib.suppress(Exception):
        answer(chosen, case.op, inputs, on)
    return frozenset(found)


def _seeded(target: Target, edit: Edit, outcome: Outcome, by: str, case: str = "") -> Seeded:
    was = target.program.instructions[edit.at]
    return Seeded(
        op=target.op, impl=target.impl, on=target.on, kernel=target.program.name, key=target.key, kind=edit.kind, at=edit.at,
        line=was.text, source=was.source, edit=edit.words, outcome=outcome, by=by, case=case, cases=len(target.cases),
    )  # fmt: skip


def _explained(target: Target, edit: Edit, original: machine.Kernel, edited: machine.Kernel) -> Seeded:
    """An edit with which every case passes: whether it makes no difference where it was executed."""
    if edit.kind == "barrier dropped":
        return _without_barrier(target, edit, edited)
    stepper = Stepper(target.key, edit.at, original, edited)
    for case in target.cases:
        with looked_on(stepper):
            record = _asked_once(case, target.impl, target.on)
        if record.status != "pass":
            return _seeded(target, edit, "missed", stepper.undecided or f"its result is used: {_why(record)}", case)
    if not stepper.steps:
        return _seeded(target, edit, "dead", "executed in no case")
    if not stepper.differing:
        return _seeded(target, edit, "equivalent", f"the same result bit for bit in all {stepper.steps} executions")
    why = (
        f"what differs in {stepper.differing} of {stepper.steps} executions is never stored, an address or a condition"
    )
    return _seeded(target, edit, "dead", why)


def _without_barrier(target: Target, edit: Edit, edited: machine.Kernel) -> Seeded:
    """A dropped barrier: whether waves meet in LDS without it, by a witness of its own."""
    witness = Witness(target.key, edited)
    for case in target.cases:
        with looked_on(witness):
            record = _asked_once(case, target.impl, target.on)
        if record.status != "pass" or witness.refused or witness.conflicts:
            met = f"waves meet in LDS in {witness.conflicts} of {witness.stretches} stretches between barriers"
            return _seeded(
                target, edit, "missed", witness.refused or (met if witness.conflicts else _why(record)), case
            )
    why = f"without it no two waves meet in LDS in any of {witness.stretches} stretches between barriers"
    return _seeded(target, edit, "equivalent", why)


def _static(target: Target, edit: Edit, before: Encoded, after: Encoded) -> Iterator[tuple[Outcome, str]]:
    """The arguments that hold for every input."""
    if edit.kind == "wait weakened":
        if flow.waits_suffice(before, after):
            yield "equivalent", "on every path another wait covers what it waited for"
    elif edit.kind == "barrier dropped":
        if target.waves == 1:
            yield "equivalent", "a workgroup is one wave"
        elif flow.orders_nothing(before, edit.at):
            yield "equivalent", "no memory is touched between it and a neighbouring barrier"
    elif flow.unread(before, edit.at) and flow.unread(after, edit.at):
        yield "dead", "its result is overwritten before it is read on every path"


def show(found: Campaign, console: Console) -> None:
    """Print the table by kind, what was missed, line by line, and the figure."""
    table = Table(title="synthetic miscompiles", title_justify="left", header_style="bold")
    for column in ("kind", "seeded", *OUTCOMES):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind in (*KINDS, ""):
        counts = [found.count(outcome, kind) for outcome in OUTCOMES]
        if sum(counts):
            table.add_row(kind or "all", str(sum(counts)), *map(str, counts))
    console.print(table)
    unseen = sum(edit.by.endswith(_SAME) for edit in found.edits if edit.outcome == "missed")
    for title, outcomes in (("missed", ("missed",)), ("dead or equivalent", ("dead", "equivalent"))):
        chosen = [edit for edit in found.edits if edit.outcome in outcomes]
        if chosen:
            console.print(f"{title}:")
        for edit in chosen:
            console.print(escape(f"  {_line(edit)}"))
    for note in found.left_out:
        console.print(escape(note))
    arguments = Counter(re.sub(r"\d+", "…", edit.by) for edit in found.edits if edit.outcome in ("dead", "equivalent"))
    for argument, number in arguments.most_common():
        console.print(f"{number} make no difference: {argument}")
    if unseen:
        console.print(
            f"{unseen} of {found.count('missed')} missed edits leave every bit of every output as it is in these cases"
        )
    verdicts = Counter(edit.by.partition(":")[0] for edit in found.edits if edit.outcome == "caught")
    console.print("caught by: " + (", ".join(f"{count} {name}" for name, count in verdicts.most_common()) or "nothing"))
    console.print(
        f"caught {found.count('caught')} of {found.count('caught') + found.count('missed')} that make a difference "
        f"({found.rate:.1%}); {len(found.edits)} edits of {found.kernels} kernels, seed {found.seed}"
    )


def _line(edit: Seeded) -> str:
    place = f"{edit.op} {edit.on} {edit.kernel}+{edit.at}"
    return f"{place} `{edit.line}` ({edit.source or 'no source line'}): {edit.edit}: {edit.by}"


def run(
    ops: Sequence[str], executions: Sequence[Execution], count: int, *, seed: int = 0, level: Level = "default",
    trees: Trees = NO_TREES, workers: int = 2, out: Path | None = None, console: Console | None = None,
) -> int:  # fmt: skip
    """Make a campaign, print it, and write it as JSON to `out`; 0 when enough edits are caught or explained, otherwise 1."""
    found = campaign(ops, executions, count, seed=seed, level=level, trees=trees, workers=workers)
    show(found, console or Console())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 0 if found.holds else 1
