"""Does a selection name the tasks that its words say, and nothing when they say nothing?"""

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cases import UnknownOp
from cases.case import CaseError, parse
from cases.covering import sweep_cases
from oracle.check import Check
from reports.plan import Selection, SelectionError, grouped, plan
from reports.record import Environment, Record
from reports.store import RecordFile, Settings, StoreError, create_run

OP = "standin.double"
HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")


@pytest.fixture(autouse=True)
def _placed(standins: ModuleType) -> None:
    pass


def selected(**words: Any) -> Selection:
    return Selection(**{"ops": (OP,), "impls": ("standin-right",)} | words)


def ids(**words: Any) -> set[str]:
    return {task.case for task in plan(selected(**words)).tasks}


def test_a_pattern_names_several_implementations() -> None:
    names = {task.impl for task in plan(Selection(ops=("standin.double",), impls=("standin-w*",))).tasks}
    assert names == {"standin-wrong", "standin-writes-outside", "standin-writes-input"}
    with pytest.raises(SelectionError, match="unknown implementation 'nobody-\\*'"):
        plan(Selection(ops=("standin.double",), impls=("nobody-*",)))


def test_everything_asked_of_an_op_is_planned_once_per_implementation() -> None:
    found = plan(selected(impls=("standin-right", "standin-wrong")))
    asked = [case.id for case in sweep_cases(OP, "default")]
    assert Counter(task.impl for task in found.tasks) == {"standin-right": len(asked), "standin-wrong": len(asked)}
    assert [task.case for task in found.tasks if task.impl == "standin-wrong"] == asked
    assert len({task.key for task in found.tasks}) == len(found.tasks)


def test_a_family_names_its_ops_and_no_implementation_means_all() -> None:
    found = plan(Selection(ops=("standin",), level="smoke"))
    assert {task.case.partition(":")[0] for task in found.tasks} == {OP, "standin.empty"}
    assert len({task.impl for task in found.tasks}) == 13


def test_the_plan_states_the_coverage_of_its_cases() -> None:
    (whole,) = plan(selected()).ledgers
    assert (whole.strength, whole.missed) == (2, 0)
    (part,) = plan(selected(patterns=("rows=4",))).ledgers
    assert part.missed > 0


def test_patterns_are_alternatives_and_their_parts_all_hold() -> None:
    assert ids(patterns=("rows=4,sign=minus",)) == {text for text in ids() if "rows=4,sign=minus" in text}
    assert ids(patterns=("rows=4|5",)) == ids(patterns=("rows=4", "rows=5"))
    assert ids(patterns=(f"{OP}:rows=7",)) == ids(patterns=("rows=7",))


def test_a_value_that_only_one_of_the_ops_has_is_a_value() -> None:
    found = plan(Selection(ops=(OP, "standin.empty"), impls=("standin-right",), patterns=("rows=0|4",)))
    assert {task.case.partition(":")[0] for task in found.tasks} == {OP, "standin.empty"}


def test_a_whole_id_is_asked_even_if_no_sweep_would() -> None:
    text = f"{OP}:rows=123,sign=plus,wide=no,seed=42"
    assert ids(patterns=(text,)) == {text}
    assert {task.case for task in plan(Selection(impls=("standin-right",), patterns=(text,))).tasks} == {text}
    assert ids(patterns=(text, "rows=7")) == ids(patterns=("rows=7",)) | {text}


@pytest.mark.parametrize(
    ("words", "kind", "sentence"),
    [
        ({"ops": ("nope",)}, UnknownOp, "unknown op 'nope': known ops are .*standin.double"),
        ({"impls": ("nope",)}, SelectionError, "unknown implementation 'nope': standin.double have standin-right, "),
        (
            {"patterns": ("hats=1",)},
            SelectionError,
            "no axis 'hats' in standin.double; the axes are rows, sign, wide, seed",
        ),
        (
            {"patterns": ("rows=3",)},
            SelectionError,
            "no default case has rows=3; there are 4, 1|no default case has rows=3",
        ),
        ({"patterns": ("rows=7,wide=yes",)}, SelectionError, "no default case has this combination"),
        ({"patterns": ("rows=4", "rows=3")}, SelectionError, "rows=3"),
        (
            {"patterns": ("rows=4|banana",)},
            SelectionError,
            r"case pattern 'rows=4\|banana': no default case has rows=banana; there are (4|1)",
        ),
        ({"patterns": (f"{OP}:sign=plus|minus|times",)}, SelectionError, "has sign=times; there are (plus|minus), "),
        ({"patterns": ("standin.empty:rows=0",)}, SelectionError, "standin.empty is not selected, only standin.double"),
        ({"patterns": ("rows",)}, CaseError, "is not axis=value"),
        ({"patterns": ("no.op:rows=1",)}, CaseError, "unknown op 'no.op'"),
        ({"patterns": (f"{OP}:rows=7,sign=plus,wide=yes,seed=0",)}, CaseError, "impossible case: wide=yes has no call"),
        ({"patterns": (f"{OP}:rows=7,seed=0",)}, CaseError, "the id lacks sign, wide"),
        ({"failed": Path("nowhere")}, StoreError, "nowhere: no such run directory"),
    ],
)
def test_a_selection_of_nothing_says_what_there_is(words: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        plan(selected(**words))


def test_cases_that_share_code_stand_together_fifty_at_most(standins: ModuleType) -> None:
    cases = [standins.DoubleCase(rows=rows) for rows in range(120)]
    odd = next(impl for impl in standins.IMPLS if impl.name == "standin-right")
    tasks = grouped(cases, odd, "interpreter")
    assert sorted(Counter(task.item for task in tasks).values()) == [20, 50, 50]
    keyed = odd.__class__(**{**vars(odd), "compile_key": lambda case: str(case.rows % 2)})
    items: dict[str, set[int]] = {}
    for task in grouped(cases, keyed, "interpreter"):
        case: Any = parse(task.case)
        items.setdefault(task.item, set()).add(case.rows % 2)
    assert all(len(parities) == 1 for parities in items.values())


@pytest.mark.parametrize("on", ["cuda", "hip"])
def test_a_case_that_may_kill_its_device_stands_alone(standins: ModuleType, on: Any) -> None:
    tasks = grouped([standins.DoubleCase(rows=rows) for rows in range(9)], standins.IMPLS[0], on)
    assert len({task.item for task in tasks}) == 9


def test_failures_of_a_run_are_asked_again_where_they_failed(tmp_path: Path) -> None:
    before = plan(selected(impls=("standin-right", "standin-wrong"), level="smoke"))
    run = tmp_path / "run"
    create_run(run, Settings(on=("interpreter",)), before.tasks)
    file = RecordFile(run / "records" / "0001-interpreter-gw0-1.jsonl")
    bad = Check(output="out", measure="exact", use=1e9, wrong=1, count=1)
    for number, task in enumerate(before.tasks):
        against = task.impl == "standin-wrong" and number % 2 == 0
        file.record(
            Record(
                case=task.case, op=OP, impl=task.impl, on=task.on, status="fail" if against else "unsupported",
                reasons=() if against else ("not here",),
                checks=(bad,) if against else (), environment=HERE,
            )
        )  # fmt: skip
    wanted = {task.key for n, task in enumerate(before.tasks) if task.impl == "standin-wrong" and n % 2 == 0}
    again = plan(Selection(failed=run))
    assert {task.key for task in again.tasks} == wanted
    some = parse(next(iter(wanted))[0])
    only = plan(Selection(failed=run, patterns=(some.id,)))
    assert {task.case for task in only.tasks} == {some.id}
    for text, sentence in (
        ("rows=4|77", f"no case of {run} has rows=77; there are "),
        ("hats=1", "no axis 'hats'"),
    ):
        with pytest.raises(SelectionError, match=sentence):
            plan(Selection(failed=run, patterns=(text,)))
    for nothing in ({"impls": ("standin-right",)}, {"on": ("cuda",)}, {"ops": ("standin.empty",)}):
        with pytest.raises(SelectionError, match="holds no failure of this selection"):
            plan(Selection(failed=run, **nothing))
