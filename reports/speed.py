"""Which groups of questions take longer than before, or less long?

A machine is seldom busy for a whole run, and the cases of a group stand together in time, so a load that comes and goes
slows some groups and leaves others alone. The pairs of a group are then no independent witnesses against its kernel, and a
group is seen only where the load does not explain it:

* Each case brings a witness of its own: the seconds that the harness spent on building and judging it, a moment before and
  after. What these moved beyond what they moved on the execution as a whole, in the median of a case and its neighbours in
  time, is the load of the case. A change must outlast taking it off twice, since a load need not slow a kernel exactly as
  it slows the harness.
* That everything on an execution moved is said only if nearly all stretches of both runs did.

Both only take findings away, so single answers that scatter by themselves still raise a false alarm with at most the
probability that is declared. What it costs: a change of which a load as large as half of it was the company the whole time
is not seen, nor one that came with a slower harness. What nobody here witnesses is another program on the same device,
which the harness, on the processor, does not feel: give each run a device of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from oracle.check import OFF_THE_SCALE
from reports.chance import Floats, countable, least, median_interval
from reports.growth import Group
from reports.record import Environment, Record

# The probability that any interval of a diff misses.
LEVEL = 0.01
_MACHINE = ("device", "arch", "machine")
# How often the load that the harness felt is taken off.
_TWICE = 2.0
# Into how many stretches of time a run is divided.
_STRETCHES = 16
# How many neighbours in time on either side say with a case what its load was.
_NEIGHBOURS = 3


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer (ratio above 1) or shorter the calls of a group take.

    op, impl: empty for everything on the execution. before, after: median seconds of a case. ratio: the median of the
    pairs' ratios; low, high: its interval, corrected for all groups of the diff. noise: how many times longer or shorter
    a pair commonly is than the median (from the median absolute deviation). elsewhere: the ratio of everything else on
    the execution, 1 where there is nothing else. load: how many times longer than in the execution as a whole the harness
    took for the same cases, 1 where nobody measured it. seen: the interval excludes 1 and what everything else did, and
    load is no explanation.
    """

    op: str
    impl: str
    on: str
    cases: int
    before: float
    after: float
    ratio: float
    low: float
    high: float
    noise: float
    elsewhere: float
    load: float = 1.0
    seen: bool
    sentence: str


@dataclass
class Times:
    """The running times of one group's questions that pass in both runs, side by side.

    seconds: of the call, before and after. harness: of building and judging. finished: when. incomparable: the pairs of
    machines whose times say nothing about each other.
    """

    seconds: list[tuple[float, float]] = field(default_factory=list)
    harness: list[tuple[float, float]] = field(default_factory=list)
    finished: list[tuple[float, float]] = field(default_factory=list)
    incomparable: dict[str, None] = field(default_factory=dict)

    def add(self, old: Record, new: Record) -> None:
        """A pair, without what was spent on compiling."""
        then, now = old.environment, new.environment
        if (
            then.device != now.device
            or then.machine != now.machine
            or (then.arch and now.arch and then.arch != now.arch)
        ):
            self.incomparable[_apart(then, now)] = None
            return
        before, after = old.seconds.run, new.seconds.run
        # Records of schema 1 do not know the time of compiling.
        if old.schema > 1 and new.schema > 1:
            before, after = before - old.seconds.compile, after - new.seconds.compile
        if before > 0 and after > 0:
            self.seconds.append((before, after))
            self.harness.append((_harness(old), _harness(new)))
            self.finished.append((old.finished, new.finished))


def _harness(record: Record) -> float:
    """The seconds of a case in which its kernel had no part."""
    spent = record.seconds
    return spent.build + spent.reference + spent.judge


def _apart(then: Environment, now: Environment) -> str:
    return ", ".join(
        f"{name} {getattr(then, name) or 'unknown'} then, {getattr(now, name) or 'unknown'} now"
        for name in _MACHINE
        if getattr(then, name) != getattr(now, name)
    )


@dataclass(frozen=True)
class _Execution:
    """All pairs of one execution: logs of their ratios, the load of each (NaN where unknown), when they ended, whose."""

    on: str
    seconds: Floats
    logs: Floats
    loads: Floats
    finished: Floats
    owners: NDArray[np.intp]

    @classmethod
    def of(cls, on: str, members: Sequence[Group], groups: Mapping[Group, Times]) -> "_Execution":
        held = [groups[member] for member in members]
        seconds, harness, finished = (
            np.concatenate([np.asarray(getattr(each, name)) for each in held])
            for name in ("seconds", "harness", "finished")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            loads = np.log(harness[:, 1]) - np.log(harness[:, 0])
        loads[~np.isfinite(loads)] = np.nan
        known = np.nonzero(~np.isnan(loads))[0]
        if len(known):
            order = known[np.argsort(finished[known, 1], kind="stable")]
            loads[order] = _running_median(loads[order])
        owners = np.repeat(np.arange(len(members)), [len(each.seconds) for each in held])
        return cls(on, seconds, np.log(seconds[:, 1] / seconds[:, 0]), loads, finished, owners)

    def felt(self, own: NDArray[np.bool_]) -> Floats:
        """The load of each pair of a group beyond that of everything else, which moved everything else as well."""
        return self.loads[own] - _median(self.loads[~own])

    def stretches(self, side: int) -> Floats:
        """The medians of the logs of stretches of one of the runs, sorted."""
        ordered = self.logs[np.argsort(self.finished[:, side], kind="stable")]
        parts = np.array_split(ordered, min(_STRETCHES, len(ordered)))
        return np.sort(np.asarray([float(np.median(part)) for part in parts]))


def _running_median(values: Floats) -> Floats:
    """Of each value and its neighbours."""
    padded = np.pad(values, _NEIGHBOURS, mode="edge")
    found: Floats = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEIGHBOURS + 1), axis=1)
    return found


def slowdowns(groups: Mapping[Group, Times]) -> tuple[Slowdown, ...]:
    """How the times of every group moved, those that are seen first; each execution as a whole before its groups."""
    timed = {group: held for group, held in groups.items() if held.seconds}
    executions: dict[str, list[Group]] = {}
    for group in timed:
        executions.setdefault(group[2], []).append(group)
    sizes = [len(held.seconds) for held in timed.values()]
    sizes += [sum(len(timed[each].seconds) for each in members) for members in executions.values() if len(members) > 1]
    level = LEVEL / countable([least(size) for size in sizes], LEVEL)
    found: list[Slowdown] = []
    for on, members in executions.items():
        execution = _Execution.of(on, members, timed)
        # Sorted once; what is left of the execution without a group stays sorted.
        order = np.argsort(execution.logs, kind="stable")
        logs, owners = execution.logs[order], execution.owners[order]
        rests = []
        for number, (op, impl, _) in enumerate(members):
            own = execution.owners == number
            logs_own, others = logs[owners == number], logs[owners != number]
            load = math.exp(_median(execution.felt(own)))
            told = _slowdown(op, impl, on, execution.seconds[own], logs_own, others, load, level)
            if told.seen and _may_be_load(execution, own, level):
                sentence = f"{told.sentence}; a load while it ran may explain that"
                told = msgspec.structs.replace(told, seen=False, sentence=sentence)
            found.append(told)
            rests.append(median_interval(others, level))
        if len(members) > 1:
            found.append(_whole(execution, logs, rests, level))
    return tuple(sorted(found, key=lambda each: (not each.seen, bool(each.op), -abs(math.log(each.ratio)))))


def _median(values: Floats) -> float:
    """The median of what is known, 0 where nothing is."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else 0.0


def _may_be_load(execution: _Execution, own: NDArray[np.bool_], level: float) -> bool:
    """Whether the load that a group was under may explain how it moved beyond everything else on the execution."""
    moved = execution.logs[own] - _median(execution.logs[~own])
    left = moved - _TWICE * execution.felt(own)
    left = np.sort(left[~np.isnan(left)])
    low, high = median_interval(left, level)
    return len(left) > 0 and not (low > 0 if np.median(moved) > 0 else high < 0)


def _whole(execution: _Execution, logs: Floats, rests: Sequence[tuple[float, float]], level: float) -> Slowdown:
    """Everything on an execution; seen only where it is neither one group alone nor a part of the run that moved.

    `rests`: the intervals of all but each group.
    """
    whole = _slowdown("", "", execution.on, execution.seconds, logs, np.zeros(0), 1.0, level)
    longer = whole.ratio > 1
    rests = [*rests, *(median_interval(execution.stretches(side), level) for side in (0, 1))]
    shared = all((low > 0 if longer else high < 0) for low, high in rests)
    return msgspec.structs.replace(whole, seen=whole.seen and shared)


def _slowdown(
    op: str, impl: str, on: str, seconds: Floats, logs: Floats, others: Floats, load: float, level: float
) -> Slowdown:
    """One group; `logs` of its ratios and `others` of the rest of the execution, both sorted."""
    low, high = median_interval(logs, level)
    rest_low, rest_high = median_interval(others, level)
    apart = math.isinf(rest_low) or low > rest_high or high < rest_low
    middle = float(np.median(logs))
    elsewhere = math.exp(float(np.median(others))) if len(others) else 1.0
    ratio, noise = math.exp(middle), math.exp(1.4826 * float(np.median(np.abs(logs - middle))))
    before, after = (float(number) for number in np.median(seconds, axis=0))
    # JSON has no infinity.
    ends = tuple(min(max(math.exp(min(end, 30.0)), 1 / OFF_THE_SCALE), OFF_THE_SCALE) for end in (low, high))
    rest = f"; everything else on {on} takes {elsewhere:.3g} times" if len(others) else ""
    felt = f", the harness at the same cases {load:.3g} times" if load != 1.0 else ""
    sure = f" ({ends[0]:.3g} to {ends[1]:.3g})" if not math.isinf(low) else " (too few cases to be sure)"
    return Slowdown(
        op=op, impl=impl, on=on, cases=len(logs), before=before, after=after, ratio=ratio, low=ends[0], high=ends[1],
        noise=noise, elsewhere=elsewhere, load=load, seen=(low > 0 or high < 0) and apart,
        sentence=(
            f"takes {ratio:.3g} times as long{sure}{rest}{felt}; the median case took {before:.3g} s and takes {after:.3g} s, "
            f"single cases scatter {noise:.3g} times"
        ),
    )  # fmt: skip
