"""Which groups of questions use more of their budgets than before, or less?

A group is an op on an implementation on an execution, or those of its cases that have one value of one axis.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec
import numpy as np
from numpy.typing import NDArray

from oracle.check import OFF_THE_SCALE
from reports.chance import Floats, coin, corrected, least
from reports.record import Record
from reports.words import plural

# op, implementation, execution.
Group = tuple[str, str, str]

# The probability of any false alarm among all growths of a diff.
LEVEL = 0.01
_TAIL = 0.95


def shown(use: float) -> float:
    """A budget use in the three digits in which it is read; what does not show there has not moved."""
    return float(f"{use:.3g}")


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """How one statistic of a group's budget use moved.

    before, after: the median or the 95 % quantile of the group. ratio: how many times the use of the pairs that tell (see
    `up`) became, in the median. up, down: the pairs that tell, by direction. p: corrected for all tests of the diff.
    """

    before: float
    after: float
    ratio: float
    up: int
    down: int
    p: float

    @property
    def seen(self) -> bool:
        """Whether chance is no explanation at `LEVEL`."""
        return self.p <= LEVEL

    @property
    def grew(self) -> bool:
        """Whether it is seen to have moved up."""
        return self.seen and self.up > self.down


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose budget use moved, up or down.

    axis, value: empty for all cases of op, impl and on; else the growth lives in the cases with this value. cases: pairs
    that pass in both runs; changed: those with other bits. steepest: the case whose use rose most (fell, when it shrank).
    """

    op: str
    impl: str
    on: str
    axis: str = ""
    value: str = ""
    cases: int
    changed: int
    median: Move
    tail: Move
    steepest: str
    sentence: str

    @property
    def grew(self) -> bool:
        """Whether median or tail is seen to have gone up, which is worse; the others shrank."""
        return self.median.grew or self.tail.grew


@dataclass
class Uses:
    """The budget uses of one group's questions that pass in both runs, side by side."""

    cases: list[str] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    # Which pairs have other bits.
    others: list[int] = field(default_factory=list)

    def add(self, old: Record, new: Record) -> None:
        """A pair. Same bits have the same error: then the later judgement stands for both."""
        use = new.use
        # Bits that nobody kept may have changed.
        if old.fingerprint != new.fingerprint or not new.fingerprint:
            self.others.append(len(self.cases))
            use = shown(use)
            self.before.append(shown(old.use))
        else:
            self.before.append(use)
        self.after.append(use)
        self.cases.append(new.case)


class _Tells(msgspec.Struct, frozen=True):
    """How many pairs tell of a move up or down, in the median and in the tail."""

    median: tuple[int, int]
    tail: tuple[int, int]

    @property
    def both(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return self.median, self.tail


@dataclass(frozen=True)
class _Asked:
    """A group of which growth is asked; `codes == code` are its cases."""

    group: Group
    axis: str
    value: str
    codes: NDArray[np.intp]
    code: int
    tells: _Tells


def growths(groups: Mapping[Group, Uses]) -> tuple[Growth, ...]:
    """The groups whose budget use is seen to have moved: whole groups first, what grew before what shrank."""
    arrays: dict[Group, tuple[Floats, Floats]] = {}
    asked: list[_Asked] = []
    for group, uses in groups.items():
        before, after = np.asarray(uses.before), np.asarray(uses.after)
        if (before != after).any():
            arrays[group] = before, after
            asked += _asked(group, uses.cases, before, after)
    tells = [pair for each in asked for pair in each.tells.both]
    chances = corrected([coin(*pair) for pair in tells], [least(sum(pair)) for pair in tells], LEVEL)
    found: list[Growth] = []
    for place, each in enumerate(asked):
        both = chances[2 * place], chances[2 * place + 1]
        if min(both) <= LEVEL:
            before, after = arrays[each.group]
            inside = each.codes == each.code
            if not each.axis or _lives_here(each.tells, both, before[~inside], after[~inside]):
                found.append(_growth(each, both, groups[each.group], before, after))
    return tuple(sorted(found, key=lambda growth: (bool(growth.axis), not growth.grew, -_size(growth))))


def _asked(group: Group, cases: Sequence[str], before: Floats, after: Floats) -> Iterator[_Asked]:
    """The group itself and every value of every axis that some of its cases have and some have not."""
    order = np.argsort(np.concatenate([before, after]), kind="stable")
    alone = np.zeros(len(before), dtype=np.intp)
    yield _Asked(group, "", "", alone, 0, next(_tells(before, after, alone, 1, order)))
    for words, codes in _axes(cases):
        if len(words) == 1:
            continue
        for code, tells in enumerate(_tells(before, after, codes, len(words), order)):
            # Too few to be seen whatever they did, as are most values of a fine axis.
            if least(sum(tells.median)) <= LEVEL:
                axis, _, value = words[code].partition("=")
                yield _Asked(group, axis, value, codes, code, tells)


def _axes(cases: Sequence[str]) -> Iterator[tuple[list[str], NDArray[np.intp]]]:
    """For every axis its words, `heads=16`, and which of them each case has; the seed is no axis here."""
    # Cases of one op have the same axes in the same order.
    for column in zip_longest(*(case.partition(":")[2].split(",") for case in cases), fillvalue=""):
        if not column[0].startswith("seed="):
            known: dict[str, int] = {}
            codes = [known.setdefault(word, len(known)) for word in column]
            yield list(known), np.asarray(codes, dtype=np.intp)


def _tells(
    before: Floats, after: Floats, codes: NDArray[np.intp], many: int, order: NDArray[np.intp]
) -> Iterator[_Tells]:
    """What tells in each of the groups that `codes` name; `order` sorts the earlier and the later uses together."""
    twice = np.concatenate([codes, codes])[order]
    ends = _ends(np.concatenate([before, after])[order][np.argsort(twice, kind="stable")], np.bincount(twice))
    reached_before, reached_after = before >= ends[codes], after >= ends[codes]
    counts = (
        np.bincount(codes[which], minlength=many)
        for which in (after > before, after < before, reached_after & ~reached_before, reached_before & ~reached_after)
    )
    for up, down, tail_up, tail_down in zip(*(each.tolist() for each in counts), strict=True):
        yield _Tells((up, down), (tail_up, tail_down))


def _ends(values: Floats, sizes: NDArray[np.intp]) -> Floats:
    """Where the upper twentieth begins in each of the sorted stretches that `values` consist of."""
    begins = np.cumsum(sizes) - sizes
    found: Floats = values[begins + np.ceil(_TAIL * (sizes - 1)).astype(np.intp)]
    return found


def _lives_here(tells: _Tells, chances: Sequence[float], before: Floats, after: Floats) -> bool:
    """Whether what is seen among the cases of a value is not seen among the others, whose uses these are."""
    order = np.argsort(np.concatenate([before, after]), kind="stable")
    others = next(_tells(before, after, np.zeros(len(before), dtype=np.intp), 1, order))
    return any(
        chance <= LEVEL and not (coin(*other) <= LEVEL and (own[0] > own[1]) == (other[0] > other[1]))
        for own, other, chance in zip(tells.both, others.both, chances, strict=True)
    )


def _growth(each: _Asked, chances: tuple[float, float], uses: Uses, before: Floats, after: Floats) -> Growth:
    op, impl, on = each.group
    (places,) = np.nonzero(each.codes == each.code)
    old, new = before[places], after[places]
    end = float(_ends(np.sort(np.concatenate([old, new])), np.asarray([2 * len(old)]))[0])
    median = _move(old, new, old != new, 0.5, each.tells.median, chances[0])
    tail = _move(old, new, (old >= end) != (new >= end), _TAIL, each.tells.tail, chances[1])
    grew = median.grew or tail.grew
    steepest = int(places[int(np.argmax(new - old) if grew else np.argmin(new - old))])
    said = []
    if median.seen:
        said.append(
            f"{median.up:,} of the {plural(median.up + median.down, 'case')} that moved {'uses' if median.up == 1 else 'use'} "
            f"more of the budget, "
            f"{median.ratio:.3g} times as much in the median; the median use was {median.before:.3g} and is {median.after:.3g}"
        )
    if tail.seen:
        said.append(
            f"{plural(tail.up, 'case')} came into the upper twentieth and {tail.down:,} left it; "
            f"the 95 % quantile was {tail.before:.3g} and is {tail.after:.3g}"
        )
    where = f" where {each.axis}={each.value}" if each.axis else ""
    return Growth(
        op=op, impl=impl, on=on, axis=each.axis, value=each.value, cases=len(places),
        changed=int(np.isin(places, uses.others).sum()), median=median, tail=tail, steepest=uses.cases[steepest],
        sentence=f"budget use {'grew' if grew else 'shrank'}{where}: {'; '.join(said)}",
    )  # fmt: skip


def _move(
    before: Floats, after: Floats, telling: NDArray[np.bool_], quantile: float, tells: tuple[int, int], p: float
) -> Move:
    ratio = 1.0
    if telling.any():
        with np.errstate(divide="ignore"):
            ratio = float(np.exp(np.median(np.log(after[telling]) - np.log(before[telling]))))
    up, down = tells
    return Move(
        before=float(np.quantile(before, quantile)), after=float(np.quantile(after, quantile)),
        ratio=min(ratio, OFF_THE_SCALE), up=up, down=down, p=p,
    )  # fmt: skip


def _size(growth: Growth) -> float:
    """How far the part that is seen went, in either direction."""
    return max(abs(math.log(max(move.ratio, 1e-9))) for move in (growth.median, growth.tail) if move.seen)
