"""Which groups of questions take longer than before, or less long?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from oracle.check import OFF_THE_SCALE
from reports.chance import Floats, countable, least, median_interval
from reports.growth import Group
from reports.record import Environment, Record

# The probability that any interval of a diff misses.
LEVEL = 0.01
_MACHINE = ("device", "arch", "machine")


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer (ratio above 1) or shorter the calls of a group take.

    op, impl: empty for everything on the execution. before, after: median seconds of a case. ratio: the median of the
    pairs' ratios; low, high: its interval, corrected for all groups of the diff. noise: how many times longer or shorter
    a pair commonly is than the median (from the median absolute deviation). elsewhere: the ratio of everything else on
    the execution, 1 where there is nothing else. seen: the interval excludes 1 and what everything else did.
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
    seen: bool
    sentence: str


@dataclass
class Times:
    """The running times of one group's questions that pass in both runs, side by side.

    incomparable: the pairs of machines whose times say nothing about each other.
    """

    seconds: list[tuple[float, float]] = field(default_factory=list)
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


def _apart(then: Environment, now: Environment) -> str:
    return ", ".join(
        f"{name} {getattr(then, name) or 'unknown'} then, {getattr(now, name) or 'unknown'} now"
        for name in _MACHINE
        if getattr(then, name) != getattr(now, name)
    )


def slowdowns(groups: Mapping[Group, Times]) -> tuple[Slowdown, ...]:
    """How the times of every group moved, those that are seen first; each execution as a whole before its groups."""
    timed = {group: np.asarray(held.seconds).reshape(-1, 2) for group, held in groups.items() if held.seconds}
    executions: dict[str, list[Group]] = {}
    for group in timed:
        executions.setdefault(group[2], []).append(group)
    sizes = [len(seconds) for seconds in timed.values()]
    sizes += [sum(len(timed[each]) for each in members) for members in executions.values() if len(members) > 1]
    level = LEVEL / countable([least(size) for size in sizes], LEVEL)
    found: list[Slowdown] = []
    for on, members in executions.items():
        whole = np.concatenate([timed[each] for each in members])
        # Sorted once; what is left of the execution without a group stays sorted.
        logs = np.log(whole[:, 1] / whole[:, 0])
        order = np.argsort(logs, kind="stable")
        logs, owners = logs[order], np.repeat(np.arange(len(members)), [len(timed[each]) for each in members])[order]
        rests = []
        for number, (op, impl, _) in enumerate(members):
            own = owners == number
            found.append(_slowdown(op, impl, on, timed[members[number]], logs[own], logs[~own], level))
            rests.append(median_interval(logs[~own], level))
        if len(members) > 1:
            found.append(_whole(on, whole, logs, rests, level))
    return tuple(sorted(found, key=lambda each: (not each.seen, bool(each.op), -abs(math.log(each.ratio)))))


def _whole(on: str, seconds: Floats, logs: Floats, rests: Sequence[tuple[float, float]], level: float) -> Slowdown:
    """Everything on an execution; seen only where it is not one group alone that took longer. `rests`: all but each group."""
    whole = _slowdown("", "", on, seconds, logs, np.zeros(0), level)
    longer = whole.ratio > 1
    shared = all((low > 0 if longer else high < 0) for low, high in rests)
    return msgspec.structs.replace(whole, seen=whole.seen and shared)


def _slowdown(op: str, impl: str, on: str, seconds: Floats, logs: Floats, others: Floats, level: float) -> Slowdown:
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
    sure = f" ({ends[0]:.3g} to {ends[1]:.3g})" if not math.isinf(low) else " (too few cases to be sure)"
    return Slowdown(
        op=op, impl=impl, on=on, cases=len(logs), before=before, after=after, ratio=ratio, low=ends[0], high=ends[1],
        noise=noise, elsewhere=elsewhere, seen=(low > 0 or high < 0) and apart,
        sentence=(
            f"takes {ratio:.3g} times as long{sure}{rest}; the median case took {before:.3g} s and takes {after:.3g} s, "
            f"single cases scatter {noise:.3g} times"
        ),
    )  # fmt: skip
