"""Which cases of an op's space do we ask, and which combinations of axis values have then been asked?

A covering array of strength t holds every possible combination of values of any t axes. Which combinations are
possible is decided by the op's own predicates, `forbid` and `heavy`, which are opaque Python: a search runs them on
cases with open axes, and splits the values that are left of an axis whenever a predicate asks something on which they
disagree. A search that ends without a case proves that the combination is impossible; one that is cut short leaves it
undecided, and the ledger says so. The proof takes one thing for granted: `forbid` never takes back a reason.
"""

import itertools
import math
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import covertable
import numpy as np
from numpy.typing import NDArray

from cases import op_module
from cases.case import Axis, Case, CaseError, case_type, parse, read_axis, spell

Level = Literal["smoke", "default", "nightly"]
LEVELS: tuple[Level, ...] = get_args(Level)
STRENGTH: dict[Level, int] = {"smoke": 1, "default": 2, "nightly": 3}

# Random cases beside the array, in units of the op's RANDOM_CASES.
_RANDOM_SHARE: dict[Level, int] = {"smoke": 0, "default": 1, "nightly": 4}
# covertable's own running time without constraints grows to minutes at strength 3.
_GENERATOR_STRENGTH = 2
_SEEDS_APART = 100_000

# Bounds are counts, not seconds: the same array on every machine.
_QUESTIONS = (100, 100, 1_500)
_ALL_QUESTIONS = {1: 60_000, 2: 60_000, 3: 600_000}
_STARTS = {1: 1, 2: 6, 3: 2}

Row: TypeAlias = tuple[int, ...]
Tuple: TypeAlias = tuple[tuple[int, int], ...]
Outcome = Literal["possible", "impossible", "undecided"]


@dataclass(frozen=True)
class Ledger:
    """How many t-tuples of axis values exist, and what became of them.

    total: all t-tuples of values of t different axes. covered: those that a case holds. impossible: those that no case
    can hold, proven by exhausting the search. undecided: those that no case holds although the bounded search found
    neither a case nor a proof. missed: those that a case could hold and none does. `examples` spells some of the missed
    and of the undecided.
    """

    op: str
    strength: int
    total: int
    covered: int
    impossible: int
    undecided: int
    missed: int
    examples: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Covered tuples over those not proven impossible; 1 when there is nothing to cover."""
        possible = self.total - self.impossible
        return self.covered / possible if possible else 1.0

    def __str__(self) -> str:
        return (
            f"{self.op}: {self.covered} of {self.total - self.impossible} possible {self.strength}-way combinations "
            f"are covered ({self.missed} missed, {self.undecided} undecided, {self.impossible} proven impossible)"
        )


class _Fork(BaseException):
    """A predicate asked what is still open. Not an `Exception`: a predicate that catches those must not see it.

    parts: the values of the axis that are left, by answer.
    """

    def __init__(self, axis: int, parts: list[tuple[int, ...]]) -> None:
        super().__init__(axis)
        self.axis, self.parts = axis, parts


class _Refused(BaseException):
    """A reason stands on the predicate's list already: what it would go on to ask does not matter."""


class _Unknown:
    """The value of an axis of which several values are left: a comparison splits them, anything else asks for each."""

    __slots__ = ("_axis", "_search")

    def __init__(self, search: "_Search", axis: int) -> None:
        self._search, self._axis = search, axis

    def _compared(self, other: object, operation: Callable[[Any, Any], bool]) -> bool:
        if isinstance(other, _Unknown):
            return self._search.each(self._axis)
        return self._search.split(self._axis, lambda value: bool(operation(value, other)))

    def __eq__(self, other: object) -> bool:
        return self._compared(other, operator.eq)

    def __ne__(self, other: object) -> bool:
        return self._compared(other, operator.ne)

    def __lt__(self, other: object) -> bool:
        return self._compared(other, operator.lt)

    def __le__(self, other: object) -> bool:
        return self._compared(other, operator.le)

    def __gt__(self, other: object) -> bool:
        return self._compared(other, operator.gt)

    def __ge__(self, other: object) -> bool:
        return self._compared(other, operator.ge)

    def __bool__(self) -> bool:
        return self._search.split(self._axis, bool)

    def __hash__(self) -> int:
        return self._search.each(self._axis)

    @property  # type: ignore[misc]
    def __class__(self) -> NoReturn:  # type: ignore[override]
        self._search.each(self._axis)

    def __getattr__(self, name: str) -> NoReturn:
        self._search.each(self._axis)

    def _asked(self, *_: object) -> NoReturn:
        self._search.each(self._axis)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _asked
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _asked
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = _asked
    __rshift__ = __rrshift__ = __neg__ = __pos__ = __abs__ = __invert__ = __index__ = __int__ = __float__ = _asked
    __str__ = __repr__ = __format__ = __len__ = __iter__ = __getitem__ = __contains__ = _asked


class _Search:
    """Asks the predicates about many cases at once: per axis, the values that are left.

    `consulted` collects the axes whose remaining values had a say in the answer.
    """

    def __init__(self, space: "Space") -> None:
        self._space = space
        self._full = [tuple(range(len(values))) for values in space.values]
        readers = {axis: property(partial(self._read, at)) for at, axis in enumerate(space.axes)}
        kind = type(f"Open{space.kind.__name__}", (space.kind,), readers)
        self._open: Any = object.__new__(kind)
        self._open.__dict__["seed"] = 0
        self._lists: dict[CodeType, str] = {}
        self.domains = list(self._full)
        self.consulted: set[int] = set()
        self.asked = 0

    def _read(self, axis: int, _instance: object) -> object:
        left = self.domains[axis]
        if len(left) > 1:
            return _Unknown(self, axis)
        if len(self._full[axis]) > 1:
            self.consulted.add(axis)
        return self._space.values[axis][left[0]]

    def each(self, axis: int) -> NoReturn:
        """The predicate needs the value itself."""
        self._stop_if_refused()
        raise _Fork(axis, [(index,) for index in self.domains[axis]])

    def split(self, axis: int, holds: Callable[[Axis], bool]) -> bool:
        """The answer to a yes-or-no question about the axis, when all values that are left agree on it."""
        values = self._space.values[axis]
        yes = tuple(index for index in self.domains[axis] if holds(values[index]))
        if not yes or len(yes) == len(self.domains[axis]):
            # Without the narrowing the values might disagree: then the narrowing has a say.
            if len({holds(values[index]) for index in self._full[axis]}) > 1:
                self.consulted.add(axis)
            return bool(yes)
        self._stop_if_refused()
        raise _Fork(axis, [yes, tuple(index for index in self.domains[axis] if index not in yes)])

    def learn_list(self, row: Row) -> None:
        """Find the local list that `forbid` returns, by watching it on one case."""
        self.domains = [(index,) for index in row]
        returned: list[tuple[CodeType, dict[str, object], object]] = []

        def watch(frame: FrameType, event: str, answer: object) -> None:
            if event == "return" and type(answer) is list:
                returned.append((frame.f_code, dict(frame.f_locals), answer))

        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            reasons = self._space.forbid(self._open)
        finally:
            sys.setprofile(before)
        for code, names, answer in returned:
            for name, value in names.items() if answer is reasons else ():
                if value is answer:
                    self._lists[code] = name

    def _stop_if_refused(self) -> None:
        frame: FrameType | None = sys._getframe(2)
        for _ in range(8):
            if frame is None:
                return
            name = self._lists.get(frame.f_code)
            if name is not None and frame.f_locals.get(name):
                raise _Refused
            frame = frame.f_back

    def answer(self) -> "_Fork | bool":
        """Whether the predicates object to every case that is left (True) or to none (False); else where to split."""
        try:
            self.consulted = set()
            if self._space.forbid(self._open):
                return True
            self.consulted = set()
            return bool(self._space.heavy(self._open))
        except _Refused:
            return True
        except _Fork as fork:
            return fork

    def complete(self, fixed: Tuple, near: Row, limit: int) -> tuple[Outcome, Row | None]:
        """A case that holds `fixed`, as near to `near` as a depth-first search with backjumping finds one.

        At most `limit` questions; `impossible` when fewer settled that there is none.
        """
        held = dict(fixed)
        start = [(held[axis],) if axis in held else full for axis, full in enumerate(self._full)]
        self.domains = list(start)
        levels: list[_Level] = []
        for self.asked in range(limit):
            found = self.answer()
            if found is False:
                return "possible", tuple(
                    index if index in left else left[0] for index, left in zip(near, self.domains, strict=True)
                )
            if isinstance(found, _Fork):
                parts = sorted(found.parts, key=lambda part: (near[found.axis] not in part, -len(part)))
                levels.append(_Level(found.axis, self.domains[found.axis], parts[1:], set()))
                self.domains[found.axis] = parts[0]
                continue
            culprits = set(self.consulted)
            while levels:
                level = levels[-1]
                if level.axis in culprits:
                    level.culprits |= culprits
                    if level.rest:
                        self.domains[level.axis] = level.rest.pop(0)
                        break
                    culprits = level.culprits
                    if level.before == start[level.axis]:
                        culprits.discard(level.axis)
                # An innocent level is jumped over: its other values cannot help.
                self.domains[level.axis] = level.before
                levels.pop()
            else:
                return "impossible", None
        return "undecided", None


@dataclass
class _Level:
    """A decision of the search: the axis, its values before, those not tried yet, and who was to blame so far."""

    axis: int
    before: tuple[int, ...]
    rest: list[tuple[int, ...]]
    culprits: set[int]


class Space:
    """The axis values of an op at a level, and which combinations of them are cases."""

    def __init__(self, op: str, level: Level) -> None:
        module = op_module("cases", op)
        self.op, self.level, self.strength = op, level, STRENGTH[level]
        self.kind = case_type(op)
        chosen: Mapping[str, tuple[Axis, ...]] = module.AXES
        if level == "nightly":
            chosen = {**chosen, **module.NIGHTLY}
        expected = self.kind.axes()[:-1]
        if set(chosen) != set(expected):
            raise CaseError(f"{op}: AXES names {', '.join(chosen)}, but the case has the axes {', '.join(expected)}")
        for axis, values in chosen.items():
            for value in values:
                read_axis(self.kind, axis, spell(value))
            if not values or len(set(values)) != len(values):
                raise CaseError(f"{op}: AXES[{axis!r}] is empty or repeats a value")
        self.axes = expected
        self.values: tuple[tuple[Axis, ...], ...] = tuple(tuple(chosen[axis]) for axis in expected)
        self.forbid: Callable[[Any], list[str]] = module.forbid
        self.heavy: Callable[[Any], bool] = module.heavy if level != "nightly" else (lambda case: False)
        self._spent = 0
        self._search = _Search(self)
        self._search.learn_list(tuple(0 for _ in expected))

    def case(self, row: Row, seed: int) -> Case:
        """The case at these positions of the axes' values."""
        values: dict[str, Any] = dict(zip(self.axes, self._values_of(row), strict=True))
        return self.kind(**values, seed=seed)

    def row(self, case: Case) -> Row | None:
        """The positions of the case's values; None when one of them is not among the values of this level."""
        own = case.settings
        try:
            return tuple(self.values[at].index(own[axis]) for at, axis in enumerate(self.axes))
        except ValueError:
            return None

    def _values_of(self, row: Row) -> list[Axis]:
        return [values[index] for values, index in zip(self.values, row, strict=True)]

    def admits(self, row: Row) -> bool:
        """Whether nothing objects to this combination."""
        case = object.__new__(self.kind)
        case.__dict__.update(zip(self.axes, self._values_of(row), strict=True), seed=0)
        return not self.forbid(case) and not self.heavy(case)

    def settle(self, fixed: Tuple, near: Sequence[Row], rng: random.Random) -> tuple[Outcome, Row | None]:
        """A case that holds `fixed` and is otherwise like one of `near`, or the proof that there is none.

        Undecided when neither is found within the bounds; a few quick searches from different rows go first.
        """
        for limit in _QUESTIONS if self._spent < _ALL_QUESTIONS[self.strength] else ():
            start = near[_below(len(near), rng)] if near else self.draft(rng)
            outcome, row = self._search.complete(fixed, start, limit)
            self._spent += self._search.asked
            if outcome != "undecided":
                return outcome, row
        return "undecided", None

    def draft(self, rng: random.Random) -> Row:
        """Any combination, possible or not."""
        return tuple(_below(len(values), rng) for values in self.values)

    def any_row(self, rng: random.Random) -> Row:
        """A random case: drafts are rejected, if need be the last is mended; raises `CaseError` if there is none."""
        for _ in range(100):
            draft = self.draft(rng)
            if self.admits(draft):
                return draft
        _, row = self._search.complete((), draft, _ALL_QUESTIONS[3])
        if row is None:
            raise CaseError(f"{self.op}: no combination of AXES passes forbid and heavy at level {self.level}")
        return row

    def spelled(self, fixed: Tuple) -> str:
        """`heads=16,values=ties`: a combination as a case pattern."""
        return ",".join(f"{self.axes[axis]}={spell(self.values[axis][index])}" for axis, index in fixed)


def _below(count: int, rng: random.Random) -> int:
    """Uniform in 0..count-1 from `random()` alone, whose stream Python promises to keep."""
    return int(rng.random() * count)


def _shuffled(items: Iterable[int], rng: random.Random) -> list[int]:
    ordered = list(items)
    for position in range(len(ordered) - 1, 0, -1):
        other = _below(position + 1, rng)
        ordered[position], ordered[other] = ordered[other], ordered[position]
    return ordered


class _Coverage:
    """Which t-tuples no row holds yet, one bit a tuple, and which of them cannot be held."""

    def __init__(self, levels: Sequence[int], strength: int) -> None:
        self.columns = np.array(list(itertools.combinations(range(len(levels)), strength)), dtype=np.int64)
        sizes = np.array(levels, dtype=np.int64)[self.columns]
        self._strides = np.ones_like(sizes)
        for position in range(strength - 2, -1, -1):
            self._strides[:, position] = self._strides[:, position + 1] * sizes[:, position + 1]
        counts = sizes.prod(axis=1)
        self._base = np.concatenate(([0], np.cumsum(counts)[:-1]))
        self.total = int(counts.sum())
        self.open = np.ones(self.total, dtype=bool)
        self._with = [np.nonzero((self.columns == axis).any(axis=1))[0] for axis in range(len(levels))]
        self._step = [self._strides[self.columns == axis] for axis in range(len(levels))]
        self._levels = levels
        self.outcome: dict[Tuple, Outcome] = {}

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        chosen = rows[:, self.columns]
        return np.asarray((chosen * self._strides).sum(axis=2) + self._base, dtype=np.int64)

    def gains(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """New tuples that each row would cover."""
        return np.asarray(self.open[self.ids(rows)].sum(axis=1), dtype=np.int64)

    def gains_along(self, row: Sequence[int], axis: int) -> NDArray[np.int64]:
        """New tuples with this axis in them, for each of its values in place of the row's."""
        combinations = self._with[axis]
        chosen = np.array(row, dtype=np.int64)[self.columns[combinations]]
        numbers = (chosen * self._strides[combinations]).sum(axis=1) + self._base[combinations]
        numbers = numbers - row[axis] * self._step[axis]
        variants = numbers[None, :] + np.arange(self._levels[axis])[:, None] * self._step[axis][None, :]
        return np.asarray(self.open[variants].sum(axis=1), dtype=np.int64)

    def cover(self, row: Row) -> None:
        self.open[self.ids(np.array([row], dtype=np.int64))[0]] = False

    def tuple_at(self, number: int) -> Tuple:
        combination = int(np.searchsorted(self._base, number, side="right")) - 1
        rest = number - int(self._base[combination])
        pairs = []
        for axis, stride in zip(self.columns[combination], self._strides[combination], strict=True):
            pairs.append((int(axis), rest // int(stride)))
            rest %= int(stride)
        return tuple(pairs)

    def close(self, number: int, outcome: Outcome) -> None:
        self.open[number] = False
        self.outcome[self.tuple_at(number)] = outcome

    def inherit(self, smaller: "_Coverage") -> None:
        """What a part of a tuple cannot, the whole cannot: close every tuple that holds a closed smaller one."""
        for part, outcome in smaller.outcome.items():
            wanted = dict(part)
            for combination, columns in enumerate(self.columns):
                if not wanted.keys() <= set(columns.tolist()):
                    continue
                spans = [
                    (wanted[int(axis)],) if int(axis) in wanted else range(self._size(combination, place))
                    for place, axis in enumerate(columns)
                ]
                for choice in itertools.product(*spans):
                    number = int(self._base[combination]) + int(np.dot(choice, self._strides[combination]))
                    if self.open[number] or outcome == "impossible":
                        self.close(number, outcome)

    def _size(self, combination: int, place: int) -> int:
        stride = int(self._strides[combination, place])
        end = int(self._base[combination + 1]) if combination + 1 < len(self._base) else self.total
        above = int(self._strides[combination, place - 1]) if place else end - int(self._base[combination])
        return above // stride


@dataclass(frozen=True)
class CoveringArray:
    """The rows of a covering array, and what was decided about the tuples that no row holds."""

    rows: tuple[Row, ...]
    outcomes: Mapping[Tuple, Outcome]


@cache
def _array(op: str, level: Level) -> tuple[Space, CoveringArray]:
    space = Space(op, level)
    strength = min(space.strength, len(space.axes))
    levels = [len(values) for values in space.values]
    rng = random.Random(f"{op} {level}")
    space.any_row(rng)
    rows: list[Row] = []
    pool: list[Row] = []
    coverage = _Coverage(levels, 1)
    for size in range(1, strength + 1):
        smaller, coverage = coverage, _Coverage(levels, size)
        if size > 1:
            coverage.inherit(smaller)
        for row in pool if size < strength else ():
            coverage.cover(row)
        if size == strength:
            for row in _generated(space, strength, rng):
                if coverage.gains(np.array([row], dtype=np.int64))[0]:
                    rows.append(row)
                    coverage.cover(row)
            pool.extend(rows)
            _fill(space, coverage, rows, pool, rng)
        else:
            _fill(space, coverage, [], pool, rng)
    return space, CoveringArray(tuple(rows), coverage.outcome)


def _generated(space: Space, strength: int, rng: random.Random) -> Iterator[Row]:
    """covertable's array without the constraints, each row repaired until nothing objects to it."""
    if strength != _GENERATOR_STRENGTH:
        return
    factors = {axis: list(range(len(values))) for axis, values in zip(space.axes, space.values, strict=True)}
    for found in covertable.make(factors, strength=strength):
        _, row = space.settle((), (tuple(found[axis] for axis in space.axes),), rng)
        if row is not None:
            yield row


def _fill(space: Space, coverage: _Coverage, rows: list[Row], pool: list[Row], rng: random.Random) -> None:
    """Append rows, each climbing from an uncovered tuple to many, until no tuple is open."""
    while True:
        candidates: list[Row] = []
        while len(candidates) < _STARTS[len(coverage.columns[0])]:
            unmet = np.flatnonzero(coverage.open)
            if not len(unmet):
                break
            number = int(unmet[_below(len(unmet), rng)])
            fixed = coverage.tuple_at(number)
            outcome, row = space.settle(fixed, pool, rng)
            if row is None:
                coverage.close(number, outcome)
            else:
                candidates.append(_climbed(space, coverage, row, fixed, rng))
        if not candidates:
            return
        gains = coverage.gains(np.array(candidates, dtype=np.int64))
        best = candidates[int(gains.argmax())]
        coverage.cover(best)
        rows.append(best)
        pool.append(best)


def _climbed(space: Space, coverage: _Coverage, row: Row, fixed: Tuple, rng: random.Random) -> Row:
    """The row after changing one axis at a time, `fixed` apart, as long as it covers more tuples that way."""
    held = {axis for axis, _ in fixed}
    current = list(row)
    improved = True
    while improved:
        improved = False
        for axis in _shuffled((axis for axis in range(len(row)) if axis not in held), rng):
            gains = coverage.gains_along(current, axis)
            for index in np.argsort(-gains, kind="stable").tolist():
                if gains[index] <= gains[current[axis]]:
                    break
                if space.admits((*current[:axis], index, *current[axis + 1 :])):
                    current[axis] = index
                    improved = True
                    break
    return tuple(current)


def covering_cases(op: str, level: Level, seed: int = 0) -> tuple[Case, ...]:
    """A covering array of the level's strength over the op's axes, the same on every machine.

    The cases differ in their own seed too, counted from `seed` times 100000.
    """
    space, array = _array(op, level)
    return tuple(space.case(row, seed * _SEEDS_APART + number) for number, row in enumerate(array.rows))


def random_cases(op: str, count: int, seed: int, level: Level = "default") -> tuple[Case, ...]:
    """`count` cases drawn independently from the level's axis values, rejected until nothing objects."""
    space = Space(op, level)
    rng = random.Random(f"{op} {level} {seed} random")
    found: list[Case] = []
    while len(found) < count:
        found.append(space.case(space.any_row(rng), _below(1_000_000, rng)))
    return tuple(found)


def regressions(op: str) -> tuple[Case, ...]:
    """The op's cases that once failed, asked for ever; raises `CaseError` for an id that can no longer be read."""
    return tuple(parse(text) for text in op_module("cases", op).REGRESSIONS)


def sweep_cases(op: str, level: Level, seed: int = 0) -> tuple[Case, ...]:
    """Everything asked of an op at a level: regressions, the covering array, and seeded random cases; no id twice."""
    share = _RANDOM_SHARE[level] * op_module("cases", op).RANDOM_CASES
    every = (*regressions(op), *covering_cases(op, level, seed), *random_cases(op, share, seed, level))
    return tuple({case.id: case for case in every}.values())


def ledger(op: str, level: Level, cases: Iterable[Case], strength: int | None = None) -> Ledger:
    """Count the t-way combinations that `cases` hold; t is the level's unless given.

    An own count, by sets of values, that knows nothing of how the cases were made; only the proofs that a tuple is
    impossible are shared with the array.
    """
    space, array = _array(op, level)
    strength = min(space.strength if strength is None else strength, len(space.axes))
    rows = [row for case in cases if (row := space.row(case)) is not None]
    known = array.outcomes if strength == space.strength else {}
    rng = random.Random(f"{op} {level} ledger")
    covered = impossible = undecided = missed = 0
    examples: dict[str, list[str]] = {"missed": [], "undecided": []}
    for columns in itertools.combinations(range(len(space.axes)), strength):
        held = {tuple(row[axis] for axis in columns) for row in rows}
        covered += len(held)
        for choice in itertools.product(*(range(len(space.values[axis])) for axis in columns)):
            if choice in held:
                continue
            fixed = tuple(zip(columns, choice, strict=True))
            outcome = known.get(fixed)
            if outcome is None and any(_holds(row, fixed) for row in array.rows):
                outcome = "possible"
            if outcome is None:
                outcome, _ = space.settle(fixed, array.rows, rng)
            impossible += outcome == "impossible"
            undecided += outcome == "undecided"
            missed += outcome == "possible"
            if outcome != "impossible":
                examples["missed" if outcome == "possible" else "undecided"].append(space.spelled(fixed))
    total = sum(
        math.prod(len(space.values[axis]) for axis in columns)
        for columns in itertools.combinations(range(len(space.axes)), strength)
    )
    shown = (
        *(f"missed: {text}" for text in examples["missed"][:8]),
        *(f"undecided: {text}" for text in examples["undecided"][:8]),
    )
    return Ledger(op, strength, total, covered, impossible, undecided, missed, shown)


def _holds(row: Row, fixed: Tuple) -> bool:
    return all(row[axis] == index for axis, index in fixed)
