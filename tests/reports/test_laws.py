"""Are the laws of an op asked about in a sweep, kept as records, and seen to be broken?"""

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest

from cases.case import parse
from cases.precision import Precision
from reports import command
from reports.environment import environment
from reports.execute import attempt
from reports.laws import kept
from reports.plan import Selection, plan
from reports.record import Record
from reports.store import read_run

OP = "standin.double"
LAW = "L1 negation"
CLAIM = "the negative of the rows gives the negative of the answer"
FOUR = f"{OP}:rows=4,sign=plus,wide=no,seed=0"
ONE = f"{OP}:rows=1,sign=plus,wide=no,seed=0"


@pytest.fixture(autouse=True)
def _placed(standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def asked(standins: ModuleType, name: str, case: str = FOUR) -> Record:
    impl = next(impl for impl in standins.IMPLS if impl.name == name)
    return attempt(parse(case), impl, "interpreter", environment("interpreter"), law=LAW).record


def test_a_law_that_is_kept_passes_and_one_that_is_broken_fails_by_name(standins: ModuleType) -> None:
    kept, broken = asked(standins, "standin-right"), asked(standins, "standin-own-wrong")
    assert (kept.law, kept.status) == (LAW, "pass")
    assert (broken.law, broken.status) == (LAW, "fail")
    (check,) = [check for check in broken.checks if not check.passed]
    assert f"law {LAW}: {CLAIM}" in str(check)


def test_a_law_that_says_nothing_about_a_case_is_no_pass(standins: ModuleType) -> None:
    record = asked(standins, "standin-right", ONE)
    assert record.status == "unsupported"
    assert record.reasons == (f"the law {LAW} says nothing about this case",)


@pytest.mark.parametrize(("name", "status"), [("standin-raises", "error"), ("standin-writes-input", "memory")])
def test_what_the_suspect_does_when_asked_about_a_law_counts(standins: ModuleType, name: str, status: str) -> None:
    record = asked(standins, name)
    assert (record.law, record.status) == (LAW, status)


def test_laws_are_planned_only_when_asked_for_and_on_cases_that_they_speak_of() -> None:
    assert not any(task.law for task in plan(Selection(ops=(OP,), impls=("standin-right",))).tasks)
    tasks = [task for task in plan(Selection(ops=(OP,), impls=("standin-right",), laws=True)).tasks if task.law]
    assert len(tasks) == 4
    assert {task.law for task in tasks} == {LAW}
    assert not any("rows=1," in task.case for task in tasks)


def test_laws_are_not_asked_of_who_cannot_answer() -> None:
    tasks = plan(Selection(ops=(OP,), impls=("standin-declines",), laws=True)).tasks
    assert tasks
    assert not any(task.law for task in tasks)


def test_a_sweep_keeps_a_record_of_every_law_and_asks_the_broken_ones_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["sweep", "--op", OP, "--impl", "standin-own-wrong", "--on", "interpreter", "--workers", "1"]
    assert command.main([*words, "--laws", "--case", "rows=4", "--out", "run"]) == 1
    about = [record for record in read_run(Path("run")).records.values() if record.law]
    assert about
    assert {record.status for record in about} == {"fail"}
    said = capsys.readouterr().out
    assert f"{OP} laws" in said
    assert f"--law '{LAW}'" in said
    assert command.main(["sweep", "--failed", "run", "--on", "interpreter", "--workers", "1", "--out", "again"]) == 1
    assert {record.key for record in about} <= set(read_run(Path("again")).records)
    assert command.main(["report", "run"]) == 0
    assert f"law: {LAW}" in Path("run/report.html").read_text()


def test_a_replay_asks_about_the_law_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", FOUR, "--on", "interpreter", "--law", LAW, "--impl"]
    assert command.main([*words, "standin-right"]) == 0
    assert command.main([*words, "standin-own-wrong"]) == 1
    assert f"law {LAW}: {CLAIM}" in capsys.readouterr().out


def test_an_unknown_law_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["replay", FOUR, "--on", "interpreter", "--law", "M99"]) == 2
    assert f"--law M99: {OP} has the laws {LAW}" in capsys.readouterr().err


def test_laws_cannot_be_chosen_for_a_run_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["sweep", "--failed", "run", "--laws", "--on", "interpreter"]) == 2
    assert "--laws --failed: what failed is asked again" in capsys.readouterr().err


def test_a_law_that_changes_shapes_holds_within_the_budget_where_libraries_go_by_shape(standins: ModuleType) -> None:
    law = dataclasses.replace(standins.NEGATION, reshapes=True)
    inputs = standins.build(standins.DoubleCase())
    edited = law.edit(inputs)
    # A right answer to the edited call, beside a first answer that the law contradicts.
    first, second = standins.wrong_in_its_own_way(inputs), standins.right(edited)
    checks = {
        by_shape: kept(law, inputs, first, edited, second, standins.judge, Precision(), by_shape)
        for by_shape in (False, True)
    }
    assert [check.passed for check in checks[False]] == [False]
    assert [check.passed for check in checks[True]] == [True]
