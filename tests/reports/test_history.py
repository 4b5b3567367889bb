"""Are steps and drifts of budget use seen, noise not, and is no run believed that cannot be?"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from oracle.check import OFF_THE_SCALE, Check
from reports.history import FEWEST_RUNS, LEVEL, History, Trend, fitted_level, read_history, trends
from reports.record import Environment, Record
from reports.store import RecordFile, Run, Settings, StoreError, Task, create_run

HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu", arch="x86_64")
OP = "sparse_mla.decode"


def record(number: int, use: float, seed: int = 0, **changes: Any) -> Record:
    check = Check(output="out", measure="bounded", use=use, count=64, wrong=int(use >= 1), got="1", want="2", why="why")
    known: dict[str, Any] = {
        "case": f"{OP}:heads=16,queries={number},seed={seed}", "op": OP, "impl": "ours-triton", "on": "interpreter",
        "status": "pass" if use < 1 else "fail", "checks": (check,), "environment": HERE, "fingerprint": "aa",
    }  # fmt: skip
    return Record(**{**known, **changes})


def run_of(records: Sequence[Record], number: int) -> Run:
    plan = tuple(
        Task(case=each.case, impl=each.impl, on=each.on, item="item", law=each.law)  # type: ignore[arg-type]
        for each in records
    )
    return Run(
        Path(f"run{number:02d}"),
        Settings(created=float(number)),
        plan,
        {each.key: each for each in records},
        (),
        {},
        (),
    )


# The use of a question in a run, before noise.
Shape = Callable[[int, int], float]


def runs(
    shape: Shape, many: int = 20, questions: int = 60, seed: int = 0, scatter: float = 0.1, shared: float = 0.0,
    **changes: Any,
) -> Iterator[Run]:  # fmt: skip
    """Runs in which every answer scatters by itself, and every run as a whole by `shared`."""
    draw = random.Random(seed)
    typical = [draw.uniform(0.1, 0.4) for _ in range(questions)]
    for number in range(many):
        whole = draw.lognormvariate(0, shared)
        yield run_of(
            [
                record(question, typical[question] * shape(number, question) * whole * draw.lognormvariate(0, scatter), **changes)
                for question in range(questions)
            ],
            number,
        )  # fmt: skip


def the_trend(found: History) -> Trend:
    (trend,) = found.trends
    return trend


def test_a_step_is_seen_where_it_is_with_its_size() -> None:
    trend = the_trend(trends(runs(lambda run, _: 1.3 if run >= 12 else 1.0)))
    (step,) = trend.steps
    assert trend.drifts == ()
    assert step.position == 12
    assert step.ratio == pytest.approx(1.3, abs=0.04)
    assert step.after / step.before == pytest.approx(1.3, abs=0.1)
    assert step.tail_after > step.tail_before
    assert step.up > 50 > step.down and step.p <= LEVEL
    assert "steps up at run12: the mean use is 1.3" in step.sentence


def test_a_step_down_and_a_step_without_noise_are_steps() -> None:
    (step,) = the_trend(trends(runs(lambda run, _: 0.8 if run >= 17 else 1.0, scatter=0.0))).steps
    assert (step.position, step.up, step.down) == (17, 0, 60)
    assert step.ratio == pytest.approx(0.8, abs=1e-3)


def test_the_fewest_runs_that_can_show_a_step_are_those_that_do() -> None:
    assert FEWEST_RUNS == 11

    def steps(many: int) -> int:
        return len(
            the_trend(trends(runs(lambda run, _: 4.0 if run >= many // 2 else 1.0, many=many, scatter=0.001))).steps
        )

    assert (steps(FEWEST_RUNS - 1), steps(FEWEST_RUNS)) == (0, 1)


def test_two_steps_are_two() -> None:
    trend = the_trend(trends(runs(lambda run, _: 1.0 if run < 9 else 1.3 if run < 18 else 1.7, many=27)))
    assert [step.position for step in trend.steps] == [9, 18]
    assert trend.drifts == ()


def test_a_stretch_that_went_up_and_came_back_has_two_ends() -> None:
    trend = the_trend(trends(runs(lambda run, _: 1.4 if 9 <= run < 15 else 1.0, many=24)))
    assert [step.position for step in trend.steps] == [9, 15]
    assert [step.ratio > 1 for step in trend.steps] == [True, False]
    assert [step.up > step.down for step in trend.steps] == [True, False]


@pytest.mark.parametrize("shared", [0.0, 0.02])
def test_a_drift_of_three_per_cent_a_run_is_a_drift(shared: float) -> None:
    trend = the_trend(trends(runs(lambda run, _: 1.03**run, shared=shared)))
    (drift,) = trend.drifts
    assert trend.steps == ()
    assert (drift.first, drift.last) == (0, 19)
    assert drift.per_run == pytest.approx(1.03, abs=0.005)
    assert drift.ratio == pytest.approx(1.03**19, rel=0.1)
    assert "drifts up from run00 to run19" in drift.sentence


def test_a_step_of_every_tenth_question_is_seen_though_the_median_hardly_moves() -> None:
    some = runs(lambda run, question: 2.0 if run >= 10 and question % 10 == 0 else 1.0, questions=600, scatter=0.05)
    (step,) = the_trend(trends(some)).steps
    assert step.position == 10
    assert step.after / step.before < 1.08
    assert step.ratio == pytest.approx(1.1, abs=0.02)


@pytest.mark.parametrize(("scatter", "shared"), [(0.1, 0.0), (0.02, 0.05)], ids=["of cases", "of runs"])
def test_noise_is_not_seen(scatter: float, shared: float) -> None:
    alarms = sum(
        the_trend(trends(runs(lambda run, _: 1.0, 15, 20, seed, scatter, shared))).moved for seed in range(200)
    )
    assert alarms <= 200 * LEVEL


def test_rounding_otherwise_from_some_run_on_is_no_step() -> None:
    alarms = 0
    for seed in range(100):
        draw = random.Random(seed)
        uses = [[draw.uniform(0.1, 0.4) for _ in range(60)] for _ in range(2)]
        same_bits = (run_of([record(q, uses[number >= 12][q]) for q in range(60)], number) for number in range(24))
        alarms += the_trend(trends(same_bits)).moved
    assert alarms <= 100 * LEVEL


def test_questions_that_come_and_go_are_no_step() -> None:
    found = trends(
        run_of([record(q, 0.1 if q < 30 else 0.4) for q in range(60) if q < 30 or number >= 10 or q == 59], number)
        for number in range(20)
    )
    trend = the_trend(found)
    assert not trend.moved
    assert trend.median[0] != trend.median[-1]
    assert trend.level == pytest.approx([0.25] * 20)


def test_a_step_is_seen_through_questions_that_come_and_go() -> None:
    draw = random.Random(0)
    found = trends(
        run_of(
            [record(q, (0.1 + q / 300) * (1.2 if number >= 11 else 1.0)) for q in range(90) if draw.random() < 0.6],
            number,
        )
        for number in range(22)
    )
    (step,) = the_trend(found).steps
    assert step.position == 11
    assert step.ratio == pytest.approx(1.2, abs=0.02)


def test_moved_seeds_ask_the_same_questions() -> None:
    found = trends(
        run_of([record(q, 0.2 if number < 12 else 0.3, seed=number * 1000 + q) for q in range(60)], number)
        for number in range(24)
    )
    (step,) = the_trend(found).steps
    assert (step.position, step.up) == (12, 60)


def test_the_level_is_fitted_as_by_hand() -> None:
    nan = np.nan
    assert fitted_level(np.array([[1.0, 3.0], [2.0, 4.0]])) == pytest.approx([2.0, 3.0])
    # The second question lies 2 above the first, and run two 1 above run one.
    assert fitted_level(np.array([[1.0, 3.0], [2.0, nan], [nan, 5.0]])) == pytest.approx([2.0, 3.0, 4.0])


def test_every_run_has_its_numbers_and_a_gap_where_it_holds_nothing() -> None:
    one = [record(q, use) for q, use in enumerate((0.1, 0.2, 0.3, 0.4, OFF_THE_SCALE))]
    other = [record(0, 0.5, op="dcp.combine", case="dcp.combine:ranks=2,seed=0")]
    found = trends([run_of(one, 0), run_of(other, 1), run_of([*one, *other], 2)])
    assert [(point.name, point.created, point.records) for point in found.runs] == [
        ("run00", 0.0, 5), ("run01", 1.0, 1), ("run02", 2.0, 6)
    ]  # fmt: skip
    trend = next(trend for trend in found.trends if trend.op == OP)
    assert trend.median == (0.3, None, 0.3)
    assert trend.worst == (1.0, None, 1.0)
    assert trend.count == (5, 0, 5)
    assert trend.failed == (1, 0, 1)
    assert trend.level[1] is None and trend.level[0] == pytest.approx(0.4)
    assert trend.tail[0] == pytest.approx(0.88)


def test_exact_answers_laws_and_what_was_not_judged_have_no_trend() -> None:
    exact = record(0, 0.0)
    law = record(1, 0.5, law="page-order")
    missing = record(2, 0.0, status="unsupported", checks=(), reasons=("why",), fingerprint="")
    assert trends([run_of([exact, law, missing], number) for number in range(3)]).trends == ()


def test_architectures_are_series_of_their_own_on_a_device_only() -> None:
    places = [("hip", "gfx942"), ("hip", "gfx950"), ("interpreter", "x86_64"), ("interpreter", "aarch64")]
    found = trends(
        run_of([record(0, 0.5, on=on, environment=msgspec.structs.replace(HERE, arch=arch))], number)
        for number, (on, arch) in enumerate(places)
    )
    assert {(trend.on, trend.arch, sum(trend.count)) for trend in found.trends} == {
        ("hip", "gfx942", 1), ("hip", "gfx950", 1), ("interpreter", "", 2)
    }  # fmt: skip


def test_what_moved_comes_first_and_a_history_is_json() -> None:
    quiet = list(runs(lambda run, _: 1.0, impl="a-a"))
    loud = list(runs(lambda run, _: 1.5 if run > 9 else 1.0, impl="b-b"))
    found = trends(
        run_of([*one.records.values(), *other.records.values()], number)
        for number, (one, other) in enumerate(zip(quiet, loud, strict=True))
    )
    assert [(trend.impl, trend.moved) for trend in found.trends] == [("b-b", True), ("a-a", False)]
    assert msgspec.json.decode(msgspec.json.encode(found), type=History) == found


def test_one_run_or_none_has_no_step() -> None:
    assert trends([]) == History(runs=(), trends=())
    assert not the_trend(trends([run_of([record(0, 0.5)], 0)])).moved


# Directories.


def written(path: Path, records: Sequence[Record], created: float, unanswered: Sequence[Record] = ()) -> Path:
    create_run(path, Settings(created=created, on=("interpreter",)), run_of([*records, *unanswered], 0).plan)
    file = RecordFile(path / "records" / "0001-interpreter-gw0-1.jsonl")
    for each in records:
        file.record(each)
    file.close()
    return path


def test_runs_are_read_by_creation_and_what_cannot_be_is_named(tmp_path: Path) -> None:
    written(tmp_path / "b-first", [record(0, 0.25)], 1.0)
    written(tmp_path / "a-second", [record(0, 0.5)], 2.0)
    unfinished = written(tmp_path / "c", [record(0, 0.5)], 3.0, unanswered=[record(1, 0.5)])
    broken = written(tmp_path / "d", [record(0, 0.5)], 4.0)
    (broken / "records" / "0002-interpreter-gw0-1.jsonl").write_bytes(b"nonsense\n")
    (tmp_path / "e").mkdir()
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / ".hidden").mkdir()
    found = read_history(tmp_path)
    assert [point.name for point in found.runs] == ["b-first", "a-second"]
    assert the_trend(found).median == (0.25, 0.5)
    assert len(found.left_out) == 3
    assert any(str(tmp_path / "e") in text and "holds no run.json" in text for text in found.left_out)
    assert any(f"{unfinished}: 1 of its 2 questions has no record" in text for text in found.left_out)
    assert any("0002-interpreter-gw0-1.jsonl line 1" in text for text in found.left_out)


def test_a_directory_that_is_no_history_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such directory; a history is a directory that holds run directories"):
        read_history(tmp_path / "none")
    with pytest.raises(StoreError, match="holds no finished run; a history is"):
        read_history(tmp_path)
    run = written(tmp_path / "run", [], 1.0, unanswered=[record(0, 0.5)])
    with pytest.raises(StoreError, match=r"holds no finished run, such as .*run: 1 of its 1 question has no record"):
        read_history(tmp_path)
    with pytest.raises(StoreError, match="is a run itself; a history is"):
        read_history(run)
