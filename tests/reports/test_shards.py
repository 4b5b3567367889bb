"""Are shards of a plan disjoint, whole, alike on every machine, and equally long?"""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import shards
from reports.plan import SelectionError
from reports.record import Environment, Record, Seconds
from reports.shards import Shard, divide, expected_seconds, imbalance, part_of, seconds_of, shard_of, whole_of
from reports.store import Run, Settings, Task

HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")
WEIGHTS = st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=60)


def task(number: int, **other: Any) -> Task:
    known: dict[str, Any] = {"case": f"op.a:rows={number},seed=0", "impl": "x-y", "on": "interpreter", "item": "i"}
    return Task(**known | other)


def timed(*seconds: float | str, deadline: float = 300.0) -> Run:
    """A run whose tasks took so many seconds, or ended with a status that says nothing about them."""
    tasks = [task(n) for n in range(len(seconds))]
    records = {}
    for one, spent in zip(tasks, seconds, strict=True):
        how: dict[str, Any] = {"status": spent, "reasons": ("gone",)} if isinstance(spent, str) else {"status": "pass"}
        took = Seconds() if isinstance(spent, str) else Seconds(build=spent / 4, run=spent / 2, judge=spent / 4)
        records[one.key] = Record(
            case=one.case, op="op.a", impl=one.impl, on=one.on, environment=HERE, seconds=took, **how
        )
    return Run(Path(), Settings(deadline=deadline), tuple(tasks), records, (), {}, ())


def loads(weights: list[float], of: list[int], count: int) -> list[float]:
    return [sum(weight for weight, part in zip(weights, of, strict=True) if part == n) for n in range(count)]


def test_equal_tasks_are_dealt_out_evenly() -> None:
    assert sorted(divide([1.0] * 10, 4).count(part) for part in range(4)) == [2, 2, 3, 3]
    assert divide([1.0] * 4, 2) == [0, 1, 0, 1]


def test_the_longest_tasks_are_no_trap() -> None:
    # The longest first alone gives 7 and 5.
    assert sorted(loads([3, 3, 2, 2, 2], divide([3, 3, 2, 2, 2], 2), 2)) == [6, 6]


def test_the_longest_task_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MOST_MOVES", 0)
    assert sorted(loads([1, 1, 1, 1, 4], divide([1, 1, 1, 1, 4], 2), 2)) == [4, 4]


def test_an_exchange_gives_and_takes() -> None:
    of = [0, 0, 0, 1, 1]
    assert shards._exchange([3, 2, 2, 3, 2], of, 2)
    assert loads([3, 2, 2, 3, 2], of, 2) == [6, 6]
    assert not shards._exchange([3, 2, 2, 3, 2], of, 2)


@given(WEIGHTS, st.integers(1, 12))
def test_every_task_is_in_one_part_and_always_the_same(weights: list[float], count: int) -> None:
    of = divide(weights, count)
    assert len(of) == len(weights)
    assert set(of) <= set(range(count))
    assert divide(list(weights), count) == of
    if len(weights) >= count:
        assert set(of) == set(range(count))


@given(st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=7), st.integers(2, 3))
def test_no_division_is_much_better(weights: list[float], count: int) -> None:
    best = min(max(loads(weights, list(of), count)) for of in itertools.product(range(count), repeat=len(weights)))
    assert max(loads(weights, divide(weights, count), count)) <= best * 4 / 3 + 1e-9


@given(st.lists(st.floats(0.1, 1.0), min_size=40, max_size=200), st.integers(1, 4), st.floats(1e-3, 1e3))
def test_parts_differ_by_a_tenth_at_most_where_no_task_is_long(weights: list[float], count: int, scale: float) -> None:
    scaled = [weight * scale for weight in weights]
    # Fillers, so that no task is more than a tenth of a part's mean.
    while max(scaled) > sum(scaled) / count / 10:
        scaled += [max(scaled) / 2] * 20
    assert imbalance(scaled, divide(scaled, count), count) <= 0.1


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("count", [2, 4, 8])
def test_heavy_tails_are_balanced_as_long_as_no_task_exceeds_a_share(seed: int, count: int) -> None:
    dice = random.Random(seed)
    weights = [0.01 * dice.paretovariate((1.05, 1.2, 1.5)[seed % 3]) for _ in range(300)]
    # What no division could help.
    weights = [min(weight, sum(weights) / count / 4) for weight in weights]
    assert imbalance(weights, divide(weights, count), count) <= 0.1


def test_a_tasks_time_is_its_own_or_that_of_its_like() -> None:
    known = seconds_of(timed(2.0, 4.0, 8.0))
    assert known[task(2).key] == pytest.approx(8.0)
    other = task(0, case="op.b:rows=0,seed=0")
    law = task(1, law="L1")
    assert expected_seconds([task(0), task(9), law, other], known) == pytest.approx([2.0, 4.0, 4.0, 4.0])
    slow = {("op.b:rows=7,seed=0", "x-y", "interpreter", ""): 100.0}
    assert expected_seconds([other, task(9, on="hip")], known | slow) == pytest.approx([100.0, 6.0])
    assert expected_seconds([task(0), other], {}) == [1.0, 1.0]


def test_a_hang_takes_its_deadline_and_a_crash_nobody_knows_how_long() -> None:
    known = seconds_of(timed("hang", "crash", 1.0, "unsupported", deadline=7.0))
    assert known[task(0).key] == 7.0
    assert task(1).key not in known
    assert 0 < known[task(3).key] < 0.01


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_shards_of_a_plan_are_the_plan(count: int) -> None:
    plan = [task(n, law=law, item=f"i{n // 4}") for law in ("", "L1") for n in range(10)]
    times = timed(*(float(1 + n % 7) for n in range(10)))
    for balance in (None, times):
        parts = [part_of(plan, Shard(index, count), balance) for index in range(1, count + 1)]
        found = [one for part in parts for one in part.tasks]
        assert sorted(one.place for one in found) == list(range(20))
        assert all(one.key == plan[one.place].key and one.item == plan[one.place].item for one in found)
        assert all(list(part.tasks) == sorted(part.tasks, key=lambda one: one.place) for part in parts)
        assert sum(part.seconds for part in parts) == pytest.approx(parts[0].whole_seconds)
        assert len({part.imbalance for part in parts}) == 1
        assert whole_of(found) == whole_of(plan)
        assert part_of(plan, Shard(1, count), balance) == parts[0]


def test_another_plan_is_another_whole() -> None:
    plan = [task(n) for n in range(4)]
    assert whole_of(plan) == whole_of(plan[::-1])
    assert len({whole_of(plan), whole_of(plan[1:]), whole_of([*plan[1:], task(0, law="L1")])}) == 3


@pytest.mark.parametrize(
    "text", ["0/4", "5/4", "a/b", "1", "", "1/", "/2", "-1/4", "1/0", "1/2/3", "1.5/2", " 1/2", "²/3", "１/２", "١/٢"]
)
def test_what_is_no_shard_is_said(text: str) -> None:
    with pytest.raises(SelectionError, match=r"should be i/n with i from 1 to n, such as 1/4"):
        shard_of(text)


def test_no_shard_is_empty() -> None:
    assert str(shard_of("3/3")) == "3/3"
    assert part_of([task(n) for n in range(3)], Shard(3, 3), None).tasks
    with pytest.raises(SelectionError, match="the plan holds 3 tasks, which make 3 shards at most"):
        part_of([task(n) for n in range(3)], Shard(1, 4), None)
