"""Which tasks of a plan are a shard's, so that all shards take equally long and every task is somebody's?

The division follows from the plan, the number of shards and the times of an earlier run alone: machines that know these
three need not talk to each other.
"""

import bisect
import dataclasses
import hashlib
import heapq
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from reports.plan import SelectionError
from reports.store import Key, Run, Task

# Seconds of a task whatever it does: it is handed out, and its record written.
_LEAST_SECONDS = 1e-3
# Tasks are moved between shards until the fullest has no more than this above its share, or nothing helps.
_GOOD_ENOUGH = 0.01
_MOST_MOVES = 200


@dataclasses.dataclass(frozen=True)
class Shard:
    """One part of a plan: the `index`-th, from 1, of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclasses.dataclass(frozen=True)
class Part:
    """A shard's tasks in the order of the plan, and what they and all tasks are thought to take.

    known: how many of all tasks have a time of their own. imbalance: what the fullest shard has above the mean.
    """

    tasks: tuple[Task, ...]
    seconds: float
    whole_seconds: float
    known: int
    imbalance: float


def shard_of(text: str) -> Shard:
    """The shard that `i/n` names; raises `SelectionError`."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise SelectionError(f"--shard {text}: should be i/n with i from 1 to n, such as 1/4")
    return Shard(int(found[1]), int(found[2]))


def part_of(tasks: Sequence[Task], shard: Shard, balance: Run | None) -> Part:
    """The shard's part of a plan, divided by the recorded seconds of the run `balance`, or else by count.

    Raises `SelectionError` when there are more shards than tasks.
    """
    if shard.count > len(tasks):
        raise SelectionError(
            f"--shard {shard}: the plan holds {len(tasks)} tasks, which make {len(tasks)} shards at most"
        )
    known = seconds_of(balance) if balance is not None else {}
    expected = expected_seconds(tasks, known)
    shards = divide(expected, shard.count)
    own = [n for n, of in enumerate(shards) if of == shard.index - 1]
    return Part(
        tasks=tuple(msgspec.structs.replace(tasks[n], place=n) for n in own),
        seconds=sum(expected[n] for n in own),
        whole_seconds=sum(expected),
        known=sum(task.key in known for task in tasks),
        imbalance=imbalance(expected, shards, shard.count),
    )


def seconds_of(run: Run) -> dict[Key, float]:
    """What each case of a run took; one that hung took its deadline, and of a crash nobody knows."""
    found = {}
    for key, record in run.records.items():
        if record.status == "hang":
            found[key] = run.settings.deadline
        elif record.status != "crash":
            spent = record.seconds
            found[key] = max(_LEAST_SECONDS, spent.build + spent.run + spent.reference + spent.judge)
    return found


def expected_seconds(tasks: Iterable[Task], known: Mapping[Key, float]) -> list[float]:
    """The seconds of each task: its own; else the median of its op, implementation and execution; else of all; else 1."""
    alike: dict[tuple[str, str, str], list[float]] = {}
    for (case, impl, on, _), seconds in known.items():
        alike.setdefault((case.partition(":")[0], impl, on), []).append(seconds)
    medians = {group: statistics.median(found) for group, found in alike.items()}
    otherwise = statistics.median(known.values()) if known else 1.0
    return [
        known.get(task.key, medians.get((task.case.partition(":")[0], task.impl, task.on), otherwise)) for task in tasks
    ]


def divide(weights: Sequence[float], count: int) -> list[int]:
    """For each weight the part that it goes to, 0 to count - 1, the sums of the parts as equal as they can be made.

    The longest goes first, each to the part with the least so far; then single weights are moved or exchanged while that
    makes the fullest part smaller. As long as no weight is more than a tenth of a part's mean, the fullest part is at most
    a tenth above it.
    """
    of = [0] * len(weights)
    sums = [(0.0, part) for part in range(count)]
    for n in sorted(range(len(weights)), key=lambda n: (-weights[n], n)):
        least, part = heapq.heappop(sums)
        of[n] = part
        heapq.heappush(sums, (least + weights[n], part))
    for _ in range(_MOST_MOVES):
        if imbalance(weights, of, count) <= _GOOD_ENOUGH or not _exchange(weights, of, count):
            break
    return of


def imbalance(weights: Sequence[float], of: Sequence[int], count: int) -> float:
    """How far the fullest part lies above the mean of the parts: 0.1 is a tenth."""
    sums = _sums(weights, of, count)
    mean = sum(sums) / count
    return max(sums) / mean - 1 if mean else 0.0


def _sums(weights: Sequence[float], of: Sequence[int], count: int) -> list[float]:
    sums = [0.0] * count
    for weight, part in zip(weights, of, strict=True):
        sums[part] += weight
    return sums


def _exchange(weights: Sequence[float], of: list[int], count: int) -> bool:
    """Move a weight from the fullest part, or exchange it for a smaller one, where that evens two parts out the most."""
    sums = _sums(weights, of, count)
    fullest = max(range(count), key=lambda part: (sums[part], -part))
    ours = [n for n in range(len(of)) if of[n] == fullest]
    best: tuple[float, int, int | None, int] | None = None
    for part in range(count):
        if part == fullest:
            continue
        gap = sums[fullest] - sums[part]
        theirs = sorted((weights[n], n) for n in range(len(of)) if of[n] == part)
        for n in ours:
            # Nothing in return, or the weight that leaves half of the gap, the one below it and the one above.
            wanted = bisect.bisect(theirs, (weights[n] - gap / 2, -1))
            for taken in (None, *theirs[max(0, wanted - 1) : wanted + 1]):
                moved = weights[n] - (taken[0] if taken else 0.0)
                fuller = sums[fullest] - min(moved, gap - moved)
                if 0 < moved < gap and fuller < sums[fullest] and (best is None or fuller < best[0]):
                    best = (fuller, n, taken[1] if taken else None, part)
    if best is None:
        return False
    _, ours_to_go, theirs_to_come, part = best
    of[ours_to_go] = part
    if theirs_to_come is not None:
        of[theirs_to_come] = fullest
    return True


def whole_of(tasks: Iterable[Task]) -> str:
    """SHA-256 over the keys of a whole plan in alphabetical order: shards of one plan have it in common."""
    digest = hashlib.sha256()
    for key in sorted(task.key for task in tasks):
        digest.update(msgspec.json.encode(key) + b"\n")
    return digest.hexdigest()
