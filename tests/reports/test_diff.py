"""Is every difference of two runs told, once, in the class where it belongs, and nothing that is none?"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.check import OFF_THE_SCALE, Check, Status
from reports.chance import coin, corrected, countable, least, median_interval, one_sided
from reports.commands import run as command
from reports.diff import KINDS, LEVEL, WORSE, Change, Diff, compare
from reports.growth import Group
from reports.plan import AGAINST
from reports.record import Attempt, Environment, Record, Seconds
from reports.speed import LEVEL as TIME_LEVEL
from reports.speed import Times, slowdowns
from reports.store import Key, RecordFile, Run, Settings, Task, create_run, held, read_run

HERE = Environment(machine="m", python="3", torch="2.13.0", triton="3.8", numpy="2", device="cpu", arch="x86_64")
OP = "sparse_mla.decode"


def case_id(number: int, op: str = OP, **axes: object) -> str:
    words = {"heads": 16, "queries": number, **axes, "seed": 0}
    return f"{op}:" + ",".join(f"{axis}={word}" for axis, word in words.items())


def within(use: float = 0.25) -> Check:
    return Check(
        output="out", measure="bounded", use=use, use_rms=use / 4, count=64, where=(2, 0), got="0.25", want="0.24 ±0.1"
    )


def beyond(use: float = 7.0, got: str = "0.73") -> Check:
    return Check(
        output="out", measure="bounded", use=use, wrong=3, count=64, where=(3, 1), got=got, want="0.36 ±0.001",
        why="outside the budget",
    )  # fmt: skip


def record(number: int = 0, status: Status = "pass", **changes: Any) -> Record:
    """A record as the sweep makes them; `op`, `impl`, `on` and `axes` place it."""
    op, axes = changes.pop("op", OP), changes.pop("axes", {})
    known: dict[str, Any] = {
        "case": case_id(number, op, **axes), "op": op, "impl": "ours-triton", "on": "interpreter", "status": status,
        "environment": HERE, "seconds": Seconds(run=1.0), "finished": 1.0, "source": "5e",
    }  # fmt: skip
    use, bits = changes.pop("use", 0.25 if status == "pass" else 7.0), changes.pop("bits", "aa")
    if status == "pass":
        known |= {"checks": (within(use),), "fingerprint": bits}
    elif status == "fail":
        known |= {"checks": (beyond(use),), "fingerprint": bits}
    elif status == "vacuous":
        known |= {"fingerprint": bits}
    else:
        known |= {"reasons": (f"why it is {status}",)}
    return Record(**{**known, **changes})


def run_of(records: Sequence[Record], name: str = "run", unanswered: Sequence[Record] = (), **asked: Any) -> Run:
    """A run that planned and answered `records`, and planned `unanswered` too."""
    plan = tuple(
        Task(case=each.case, impl=each.impl, on=each.on, item="item", law=each.law)  # type: ignore[arg-type]
        for each in (*records, *unanswered)
    )
    return Run(Path(name), Settings(**asked), plan, {each.key: each for each in records}, (), {}, ())


def kinds(difference: Diff) -> dict[Key, str]:
    found = {change.key: change.kind for change in difference.changes}
    assert len(found) == len(difference.changes), "a question is filed twice"
    return found


# What a question was and is. None: not asked. "open": asked, without a record.
Side = dict[str, Any] | str | None
PASS: Side = {}
OTHER_BITS: Side = {"bits": "bb"}
FAIL: Side = {"status": "fail", "bits": "cc", "diagnosis": ("as if a page were dropped (page)",)}
UNSUPPORTED: Side = {"status": "unsupported", "reasons": ("heads=16: needs 32", "page=1: needs 64")}
KNOWN: tuple[tuple[str, Side, Side, str | None], ...] = (
    ("pass to fail", PASS, FAIL, "new_failure"),
    ("pass to fail of the same bits", PASS, {"status": "fail", "bits": "aa"}, "new_failure"),
    ("pass to memory", PASS, {"status": "memory"}, "new_failure"),
    ("pass to error", PASS, {"status": "error"}, "new_failure"),
    ("pass to crash", PASS, {"status": "crash"}, "new_failure"),
    ("pass to hang", PASS, {"status": "hang"}, "new_failure"),
    ("pass to vacuous", PASS, {"status": "vacuous"}, "new_failure"),
    ("slow pass to fail", {"seconds": Seconds(run=9.0)}, FAIL, "new_failure"),
    ("unsupported to fail", UNSUPPORTED, FAIL, "new_failure"),
    ("absent to fail", None, FAIL, "new_failure"),
    ("absent to hang", None, {"status": "hang"}, "new_failure"),
    ("open to crash", "open", {"status": "crash"}, "new_failure"),
    ("fail to hang", FAIL, {"status": "hang"}, "changed_failure"),
    ("hang to fail", {"status": "hang"}, FAIL, "changed_failure"),
    ("crash to memory", {"status": "crash"}, {"status": "memory"}, "changed_failure"),
    ("fail to fail of other bits", FAIL, {**FAIL, "bits": "dd"}, "changed_failure"),
    ("fail to fail of another diagnosis", FAIL, {**FAIL, "diagnosis": ("as if b (b)",)}, "changed_failure"),
    ("fail to fail without a diagnosis", FAIL, {**FAIL, "diagnosis": ()}, "changed_failure"),
    ("error to another error", {"status": "error", "reasons": ("a",)}, {"status": "error", "reasons": ("b",)},
     "changed_failure"),
    ("vacuous to fail", {"status": "vacuous"}, FAIL, "changed_failure"),
    ("fail to pass", FAIL, PASS, "fixed"),
    ("hang to pass", {"status": "hang"}, PASS, "fixed"),
    ("memory to pass", {"status": "memory"}, PASS, "fixed"),
    ("vacuous to pass", {"status": "vacuous"}, PASS, "fixed"),
    ("fail to pass of the same bits", {"status": "fail", "bits": "aa"}, PASS, "fixed"),
    ("pass to unsupported", PASS, UNSUPPORTED, "lost_coverage"),
    ("pass to absent", PASS, None, "lost_coverage"),
    ("pass to open", PASS, "open", "lost_coverage"),
    ("fail to unsupported", FAIL, UNSUPPORTED, "lost_coverage"),
    ("fail to absent", FAIL, None, "lost_coverage"),
    ("crash to open", {"status": "crash"}, "open", "lost_coverage"),
    ("unsupported to pass", UNSUPPORTED, PASS, "new_coverage"),
    ("absent to pass", None, PASS, "new_coverage"),
    ("open to pass", "open", PASS, "new_coverage"),
    ("another reason", UNSUPPORTED, {"status": "unsupported", "reasons": ("no aiter",)}, "changed_reasons"),
    ("a reason more", UNSUPPORTED, {"status": "unsupported", "reasons": ("heads=16: needs 32", "page=1: needs 64", "c")},
     "changed_reasons"),
    ("a reason less", UNSUPPORTED, {"status": "unsupported", "reasons": ("page=1: needs 64",)}, "changed_reasons"),
    ("another number in a reason", UNSUPPORTED, {"status": "unsupported", "reasons": ("heads=16: needs 64",)},
     "changed_reasons"),
    ("other bits", PASS, OTHER_BITS, "bit_change"),
    ("other bits and more use", PASS, {"bits": "bb", "use": 0.9}, "bit_change"),
    ("other bits and less use", PASS, {"bits": "bb", "use": 0.01}, "bit_change"),
    ("other bits and more time", PASS, {"bits": "bb", "seconds": Seconds(run=40.0)}, "bit_change"),
    ("other bits and another source", PASS, {"bits": "bb", "source": "50"}, "bit_change"),
    ("same bits, judged otherwise", PASS, {"use": 0.5}, "rejudged"),
    ("reasons reordered", UNSUPPORTED, {"status": "unsupported", "reasons": ("page=1: needs 64", "heads=16: needs 32")},
     None),
    ("only time", PASS, {"seconds": Seconds(run=40.0)}, None),
    ("only another source", PASS, {"source": "50"}, None),
    ("use that reads the same", {"use": 0.25}, {"use": 0.25 * (1 + 1e-6)}, None),
    ("an error at another line", {"status": "error", "reasons": ("ValueError: x (decode.py:41)",)},
     {"status": "error", "reasons": ("ValueError: x (decode.py:43)",)}, None),
    ("unsupported to absent", UNSUPPORTED, None, None),
)  # fmt: skip


def placed(side: Side, number: int, **where: Any) -> Record | None:
    return record(number, **{**side, **where}) if isinstance(side, dict) else None


def sides(
    table: Sequence[tuple[Side, Side]], where: Callable[[int], dict[str, Any]] = lambda number: {}
) -> tuple[Run, Run]:
    """Two runs in which question `number` goes from the first to the second of its entry."""
    runs = []
    for name, side in (("a", 0), ("b", 1)):
        asked = [(entry[side], number) for number, entry in enumerate(table) if entry[side] is not None]
        answered = [found for each, number in asked if (found := placed(each, number, **where(number))) is not None]
        unanswered = [record(number, **where(number)) for each, number in asked if each == "open"]
        runs.append(run_of(answered, name, unanswered))
    return runs[0], runs[1]


def test_fifty_known_differences_among_five_hundred_questions_are_filed_without_a_mistake() -> None:
    assert len(KNOWN) == 50
    assert {kind for *_, kind in KNOWN} == {*KINDS, None}
    for seed in range(5):
        draw = random.Random(seed)
        numbers = draw.sample(range(500), len(KNOWN))
        table: list[tuple[Side, Side]] = [
            draw.choice([(PASS, PASS), (FAIL, FAIL), (UNSUPPORTED, UNSUPPORTED)]) for _ in range(500)
        ]
        for number, (_, old, new, _) in zip(numbers, KNOWN, strict=True):
            table[number] = old, new
        homes = [
            {"op": op, "impl": impl, "law": law}
            for op, impl, law in product((OP, "dcp.combine"), ("ours-triton", "vllm-triton"), ("", "page-order"))
        ]
        where = [draw.choice(homes) for _ in range(500)]
        difference = compare(*sides(table, where.__getitem__))
        found = {int(key[0].split("queries=")[1].split(",")[0]): kind for key, kind in kinds(difference).items()}
        wanted = {number: kind for number, (*_, kind) in zip(numbers, KNOWN, strict=True) if kind is not None}
        named = {number: name for number, (name, *_) in zip(numbers, KNOWN, strict=True)}
        wrong = {named.get(number, "nothing"): (found.get(number), wanted.get(number)) for number in found | wanted
                 if found.get(number) != wanted.get(number)}  # fmt: skip
        assert wrong == {}
        assert difference.unchanged + difference.unjudged + len(difference.changes) == 500
        assert difference.unjudged == 1


@pytest.mark.parametrize(("name", "old", "new", "kind"), KNOWN, ids=[name for name, *_ in KNOWN])
def test_a_difference_says_what_was_and_what_is(name: str, old: Side, new: Side, kind: str | None) -> None:
    found = compare(*sides([(old, new), (PASS, PASS)])).changes
    if kind is None:
        assert found == ()
        return
    (change,) = found
    said = change.sentence
    assert "\n" not in said
    assert change.was == {None: "not asked", "open": "no record"}.get(
        old if not isinstance(old, dict) else "", change.was
    )
    if kind in ("new_failure", "fixed", "lost_coverage"):
        assert said.startswith(f"was {change.was}, now {change.now}")
    if change.after is not None and change.after.status == "fail":
        assert "out[3, 1]=0.73, but should be 0.36 ±0.001: outside the budget" in said
    for reason in change.after.reasons if change.after is not None else ():
        assert reason in said
    if kind == "bit_change":
        assert "other bits" in said
        assert ("its source is another" in said) == ("source" in name)


@pytest.mark.parametrize("bits", ["aa", "bb"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ((within(), msgspec.structs.replace(within(0.1), output="lse")), (within(),), "lse (bounded)"),
        ((Check(output="n", measure="exact", use=0.0, count=4), within()),
         (Check(output="n", measure="bounded", use=0.0, count=4), within()), "n (exact)"),
        ((within(), within()), (within(),), "out (bounded)"),
    ],
)  # fmt: skip
def test_a_check_that_is_dropped_or_loosened_is_lost_coverage(
    old: tuple[Check, ...], new: tuple[Check, ...], said: str, bits: str
) -> None:
    there = compare(*sides([({"checks": old}, {"checks": new, "bits": bits})]))
    (change,) = there.changes
    assert (change.kind, change.was, change.now, there.worse) == ("lost_coverage", "pass", "pass", True)
    assert f"no longer checked: {said}" in change.sentence
    back = compare(*sides([({"checks": new}, {"checks": old})]))
    assert not back.worse


LSE = msgspec.structs.replace(beyond(), output="lse")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # What failed is no longer judged.
        ((within(), LSE), (within(),), "lse (bounded)"),
        # What failed is right, and another check was dropped on the way.
        ((beyond(), msgspec.structs.replace(within(), output="lse")), (within(),), "lse (bounded)"),
        # Exact elements were wrong, and now they need not be exact.
        ((Check(output="n", measure="exact", use=1e9, where=(3,), wrong=1, count=4),),
         (Check(output="n", measure="bounded", use=0.5, count=4),), "n (exact)"),
        # A plan of two rules that keeps the one that is left.
        ((Check(output="size of group", measure="plan", use=1e9, where=(0,)), Check(output="tiles", measure="plan", use=0)),
         (Check(output="tiles", measure="plan", use=0),), "size of group (plan)"),
    ],
)  # fmt: skip
def test_a_failure_that_passes_with_less_judged_is_not_fixed(
    old: tuple[Check, ...], new: tuple[Check, ...], said: str
) -> None:
    found = compare(*sides([({"status": "fail", "checks": old}, {"checks": new})]))
    (change,) = found.changes
    assert (change.kind, change.was, change.now, found.worse) == ("lost_coverage", "fail", "pass", True)
    assert f"was fail, now pass with less judged, no longer checked: {said}; " in change.sentence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # An answer of another form is told as one that is not exact, and ends the judging.
        ((Check(output="out", measure="exact", use=1e9, wrong=1, count=1, got="nothing"),), (within(), LSE)),
        # A rule of a plan is named by what broke it.
        ((Check(output="size of group", measure="plan", use=1e9, where=(0,)), Check(output="tiles", measure="plan", use=0)),
         (Check(output="groups", measure="plan", use=0), Check(output="tiles", measure="plan", use=0))),
    ],
)  # fmt: skip
def test_a_failure_whose_checks_are_named_otherwise_once_they_hold_is_fixed(
    old: tuple[Check, ...], new: tuple[Check, ...]
) -> None:
    found = compare(
        *sides([({"status": "fail", "checks": old}, {"checks": tuple(within() if c is LSE else c for c in new)})])
    )
    assert [change.kind for change in found.changes] == ["fixed"]


def test_what_a_shard_was_not_asked_is_not_comparable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = run_of([record(0), record(1), record(2, "fail")], "b")
    found = compare(run_of([record(0)], "a", shard="1/5"), after)
    assert (found.incomparable, found.unchanged, [each.kind for each in found.changes]) == (1, 1, ["new_failure"])
    assert any(note.startswith("a holds only shard 1/5 of its plan") for note in found.notes)
    assert "the runs were not asked for the same: shard 1/5 then, none now" in found.notes
    assert compare(run_of([record(0)], "a", impls=("ours-triton",)), after).incomparable == 1
    whole = compare(run_of([record(0)], "a"), after)
    assert (whole.incomparable, len(whole.of("new_coverage"))) == (0, 1)
    # What it was asked, and has no record of, it can still be compared with.
    unfinished = compare(run_of([record(0)], "a", [record(1)], shard="1/5"), after)
    assert (unfinished.incomparable, len(unfinished.of("new_coverage"))) == (0, 1)


def test_the_command_counts_what_is_not_comparable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "a"
    create_run(old, Settings(on=("interpreter",), shard="1/5"), run_of([record(0)]).plan)
    file = RecordFile(old / "records" / "0001-interpreter-gw0-1.jsonl")
    file.record(record(0))
    file.close()
    code, out, _ = diff(capsys, old, written(tmp_path / "b", [record(0), record(1)]))
    assert code == 0
    assert "       1 not comparable" in out


def test_another_judge_is_said() -> None:
    old, new = run_of([record(0)], "a", judge="0.1 aa"), run_of([record(0)], "b", judge="0.2 bb")
    assert "the cases and the judge are not the same: '0.1 aa' then, '0.2 bb' now" in compare(old, new).notes
    for one, other in ((old, old), (run_of([record(0)], "a"), new)):
        assert not any("judge" in note for note in compare(one, other).notes)


# Any state of a question, by hypothesis.
def _states() -> st.SearchStrategy[Side]:
    reasons = st.permutations(["a", "b", "c"]).flatmap(
        lambda order: st.integers(1, 3).map(lambda many: tuple(order[:many]))
    )
    passing = st.fixed_dictionaries({"bits": st.sampled_from("ab"), "use": st.floats(0, 0.99)})
    failing = st.fixed_dictionaries(
        {"status": st.just("fail"), "bits": st.sampled_from("ab"), "diagnosis": st.sampled_from([(), ("as if",)])}
    )
    other = st.fixed_dictionaries(
        {"status": st.sampled_from([each for each in get_args(Status) if each not in ("pass", "fail", "vacuous")]),
         "reasons": reasons}
    )  # fmt: skip
    vacuous = st.just({"status": "vacuous"})
    return st.one_of(st.none(), st.just("open"), passing, passing, failing, other, vacuous)  # type: ignore[return-value]


TABLES = st.lists(st.tuples(_states(), _states()), max_size=30)


def test_every_pair_of_states_that_differ_is_in_exactly_one_class_or_judged_by_neither() -> None:
    some: list[Side] = [None, "open", PASS, UNSUPPORTED, *({"status": status} for status in AGAINST)]
    for old, new in product(some, some):
        difference = compare(*sides([(old, new), (PASS, PASS)]))
        judged = [side for side in (old, new) if isinstance(side, dict) and side.get("status") != "unsupported"]
        assert len(difference.changes) == (1 if judged and old != new else 0)


@settings(deadline=None, max_examples=60)
@given(TABLES)
def test_a_run_does_not_differ_from_itself(table: list[tuple[Side, Side]]) -> None:
    run, _ = sides(table)
    difference = compare(run, run)
    assert (difference.changes, difference.growths, difference.environments) == ((), (), ())
    assert not any(each.seen for each in difference.times)
    assert not difference.worse


@settings(deadline=None, max_examples=100)
@given(TABLES)
def test_what_is_new_one_way_is_gone_the_other_way(table: list[tuple[Side, Side]]) -> None:
    before, after = sides(table)
    there, back = compare(before, after), compare(after, before)

    def keys(found: Sequence[Change]) -> set[Key]:
        return {change.key for change in found}

    failed_from_pass = [change for change in there.of("new_failure") if change.was == "pass"]
    assert keys(failed_from_pass) == keys(back.of("fixed"))
    gained = [
        change for change in there.changes if change.was not in ("pass", *AGAINST) and change.kind != "changed_reasons"
    ]
    assert keys(gained) == keys(back.of("lost_coverage"))
    for kind in ("changed_failure", "changed_reasons", "bit_change", "rejudged"):
        assert keys(there.of(kind)) == keys(back.of(kind))
    assert (there.unchanged, there.unjudged) == (back.unchanged, back.unjudged)
    assert there.unchanged + there.unjudged + len(there.changes) == len(
        {*kinds(there)} | _asked(before) | _asked(after)
    )


def _asked(run: Run) -> set[Key]:
    return {task.key for task in run.plan}


def test_the_first_changes_of_a_kind_show_every_group_with_its_gravest_first() -> None:
    table: list[tuple[Side, Side]] = [(PASS, {"status": "fail", "use": 2.0 + number}) for number in range(30)]
    found = compare(*sides(table, lambda number: {"impl": "a-a" if number % 10 else "b-b"})).of("new_failure")
    assert [(change.impl, change.after.use) for change in found[:4] if change.after] == [
        ("b-b", 22.0), ("a-a", 31.0), ("b-b", 12.0), ("a-a", 30.0)
    ]  # fmt: skip


# Groups.


def grown(
    factor: Callable[[int, random.Random], float], many: int = 300, seed: int = 0, **more: Any
) -> tuple[Run, Run]:
    """Two runs of passing questions: use is drawn, and rounds otherwise in the second, times `factor`."""
    draw = random.Random(seed)
    old, new = [], []
    for number in range(many):
        axes = {"heads": 128 if number % 2 else 16, "values": ("randn", "needle", "ties")[number // 2 % 3]}
        typical = draw.uniform(0.1, 0.3)
        uses = [typical * draw.lognormvariate(0, 0.1) for _ in range(2)]
        old.append(record(number, axes=axes, use=uses[0], bits="aa", **more))
        new.append(record(number, axes=axes, use=uses[1] * factor(number, draw), bits="bb", **more))
    return run_of(old, "a"), run_of(new, "b")


def test_rounding_otherwise_is_no_growth_however_often() -> None:
    alarms = sum(bool(compare(*grown(lambda number, draw: 1.0, 100, seed)).growths) for seed in range(200))
    assert alarms <= 200 * LEVEL


def test_growth_of_a_few_per_cent_is_seen_with_its_size() -> None:
    (growth,) = compare(*grown(lambda number, draw: 1.08)).growths
    assert (growth.axis, growth.cases, growth.changed, growth.grew) == ("", 300, 300, True)
    assert growth.median.seen and growth.median.ratio == pytest.approx(1.08, abs=0.03)
    assert growth.median.up > growth.median.down
    before, after = grown(lambda number, draw: 1.08)
    rises = {key[0]: after.records[key].use - old.use for key, old in before.records.items()}
    assert growth.steepest == max(rises, key=rises.__getitem__)
    assert "budget use grew" in growth.sentence


def test_growth_the_other_way_shrinks_and_is_no_worse() -> None:
    before, after = grown(lambda number, draw: 1.08)
    difference = compare(after, before)
    (growth,) = difference.growths
    assert not growth.grew
    assert not difference.worse
    assert growth.median.ratio == pytest.approx(1 / 1.08, abs=0.03)


def test_growth_of_one_axis_value_is_said_to_live_there_and_nowhere_else() -> None:
    growths = compare(*grown(lambda number, draw: 1.3 if number % 2 else 1.0, many=600)).growths
    assert {(growth.axis, growth.value) for growth in growths if growth.axis} == {("heads", "128")}


def test_a_growing_tail_is_seen_where_the_median_stays() -> None:
    (growth, *_) = compare(*grown(lambda number, draw: 3.0 if draw.random() < 0.06 else 1.0, many=1000)).growths
    assert growth.tail.grew and not growth.median.seen
    assert growth.tail.ratio > 2
    assert "came into the upper twentieth" in growth.sentence


def test_a_judge_that_changed_is_no_growth_of_the_error() -> None:
    old = [record(number, use=0.2) for number in range(300)]
    new = [record(number, use=0.4) for number in range(300)]
    difference = compare(run_of(old), run_of(new))
    assert difference.growths == ()
    assert len(difference.of("rejudged")) == 300
    assert not difference.worse


def test_differences_beyond_the_third_digit_are_no_growth() -> None:
    old = [record(number, use=0.1 + number / 1000) for number in range(300)]
    new = [record(number, use=(0.1 + number / 1000) * (1 + 1e-7), bits="bb") for number in range(300)]
    assert compare(run_of(old), run_of(new)).growths == ()


def test_growth_from_no_error_at_all_has_a_number_that_json_can_hold() -> None:
    old = [record(number, use=0.0) for number in range(50)]
    new = [record(number, use=0.1, bits="bb") for number in range(50)]
    difference = compare(run_of(old), run_of(new))
    assert difference.growths[0].median.ratio == OFF_THE_SCALE
    assert msgspec.json.decode(msgspec.json.encode(difference), type=Diff) == difference


def timed(factors: Mapping[str, float], many: int = 200, seed: int = 0, **later: Any) -> tuple[Run, Run]:
    draw = random.Random(seed)
    old, new = [], []
    for impl, factor in factors.items():
        for number in range(many):
            typical = draw.uniform(0.01, 1.0)
            then, now = (typical * draw.lognormvariate(0, 0.2) for _ in range(2))
            old.append(record(number, impl=impl, seconds=Seconds(run=then)))
            new.append(record(number, impl=impl, seconds=Seconds(run=now * factor), **later))
    return run_of(old, "a"), run_of(new, "b")


def test_noise_of_time_is_no_finding_and_its_size_is_told() -> None:
    seen = 0
    for seed in range(100):
        times = compare(*timed({"a-a": 1.0, "b-b": 1.0, "c-c": 1.0}, 60, seed)).times
        seen += any(each.seen for each in times)
        assert all(each.low <= each.ratio <= each.high and 1.1 < each.noise < 1.8 for each in times)
    assert seen <= 100 * LEVEL


def test_one_slower_implementation_is_seen_and_does_not_make_a_run_worse() -> None:
    difference = compare(*timed({"a-a": 1.5, "b-b": 1.0, "c-c": 1.0}))
    (slow,) = [each for each in difference.times if each.seen]
    assert (slow.impl, slow.cases) == ("a-a", 200)
    assert slow.low < 1.5 < slow.high and slow.low > 1
    assert not difference.worse and difference.changes == ()


def test_a_busy_machine_is_one_finding_of_the_whole_execution() -> None:
    (slow,) = [each for each in compare(*timed({"a-a": 1.5, "b-b": 1.5, "c-c": 1.5})).times if each.seen]
    assert (slow.op, slow.impl, slow.on) == ("", "", "interpreter")


@pytest.mark.parametrize("name", ["device", "arch", "machine"])
def test_times_of_other_machines_are_not_compared_and_that_is_said(name: str) -> None:
    there = msgspec.structs.replace(HERE, **{name: "another"})
    difference = compare(*timed({"a-a": 2.0}, environment=there))
    assert difference.times == ()
    here = getattr(HERE, name)
    assert f"times are not compared where the machines differ: {name} {here} then, another now" in difference.notes
    assert [(each.field, each.before, each.after) for each in difference.environments] == [
        (name, (here,), ("another",))
    ]


def test_an_older_record_that_knows_no_architecture_is_compared() -> None:
    there = msgspec.structs.replace(HERE, arch="")
    assert len(compare(*timed({"a-a": 2.0}, environment=there)).times) == 1


# When a load began and ended, and how many times longer everything took meanwhile.
Burst = tuple[float, float, float]


def bursts(draw: random.Random, length: float) -> list[Burst]:
    """Loads that come and go over about a third of the time."""
    typical, now = length * draw.uniform(0.02, 0.12), 0.0
    found = []
    while now < length:
        begin = now + draw.expovariate(0.5 / typical)
        now = begin + draw.expovariate(1 / typical)
        found.append((begin, now, draw.uniform(1.3, 3.0)))
    return found


def loaded(seed: int, slow: float = 1.0, power: float = 1.0, quiet: bool = False) -> dict[Group, Times]:
    """The times of two runs of six groups by two workers; the calls of `i-1` take `slow` times as long in the later one.

    power: a load that slows the harness twice slows the calls 2 ** power times.
    """
    draw = random.Random(seed)
    typical = [(draw.uniform(0.05, 1.0), draw.uniform(0.05, 0.6)) for _ in range(480)]
    sides: list[list[Record]] = []
    for later in (False, True):
        loads = [] if quiet else bursts(draw, sum(map(sum, typical)) / 2)
        clocks, found = [0.0, 0.0], []
        for number, (call, harness) in enumerate(typical):
            worker = clocks.index(min(clocks))
            load = next((times for begin, end, times in loads if begin <= clocks[worker] < end), 1.0)
            group = number // 80
            run = call * draw.lognormvariate(0, 0.2) * load**power * (slow if later and group == 1 else 1.0)
            judge = harness * draw.lognormvariate(0, 0.2) * load
            clocks[worker] += run + judge
            spent = Seconds(build=judge / 4, run=run, judge=judge * 3 / 4)
            found.append(record(number, impl=f"i-{group}", seconds=spent, finished=clocks[worker]))
        sides.append(found)
    times: dict[Group, Times] = {}
    for old, new in zip(*sides, strict=True):
        times.setdefault((new.op, new.impl, new.on), Times()).add(old, new)
    return times


@pytest.mark.parametrize("power", [0.7, 1.0, 1.4])
def test_a_load_that_comes_and_goes_raises_no_more_false_alarms_than_declared(power: float) -> None:
    found = [slowdowns(loaded(seed, power=power)) for seed in range(200)]
    assert sum(any(each.seen for each in times) for times in found) <= 200 * TIME_LEVEL


def test_a_kernel_that_takes_half_as_long_again_is_seen_in_quiet_and_mostly_under_load() -> None:
    def seen(seed: int, quiet: bool) -> bool:
        return any(
            each.seen and each.impl == "i-1" and each.ratio > 1.2 for each in slowdowns(loaded(seed, 1.5, quiet=quiet))
        )

    assert sum(seen(seed, quiet=True) for seed in range(50)) >= 48
    assert sum(seen(seed, quiet=False) for seed in range(100)) > 50


def slowed(loads: Sequence[float], calls: Sequence[float], groups: Sequence[int]) -> tuple[Run, Run]:
    """Runs of whose groups everything takes `loads` times as long in the later one, the calls `calls` times more."""
    old = [
        record(n, impl=f"i-{group}", finished=float(n), seconds=Seconds(run=1 + n % 7, judge=2.0))
        for n, group in enumerate(group for group, many in enumerate(groups) for _ in range(many))
    ]
    new = []
    for each in old:
        group = int(each.impl.removeprefix("i-"))
        spent = Seconds(run=each.seconds.run * loads[group] * calls[group], judge=2.0 * loads[group])
        new.append(msgspec.structs.replace(each, seconds=spent))
    return run_of(old, "a"), run_of(new, "b")


def test_a_group_that_ran_under_a_load_says_so() -> None:
    times = compare(*slowed([2.0, 1.0, 1.0, 1.0], [1.0] * 4, [60] * 4)).times
    assert not any(each.seen for each in times)
    (slow,) = (each for each in times if each.impl == "i-0")
    assert slow.load == pytest.approx(2.0)
    assert "the harness at the same cases 2 times" in slow.sentence
    assert slow.sentence.endswith("a load while it ran may explain that")


def test_a_load_on_the_only_group_is_none_of_its_kernel() -> None:
    (loaded_only,) = compare(*slowed([2.0], [1.0], [60])).times
    (slower,) = compare(*slowed([1.0], [1.5], [60])).times
    assert (loaded_only.seen, slower.seen) == (False, True)


@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_a_load_of_the_whole_run_hides_no_group(load: float, factor: float) -> None:
    times = compare(*slowed([load] * 3, [1.0, factor, 1.0], [60] * 3)).times
    assert [each.impl for each in times if each.seen and each.op] == ["i-1"]


def test_compiling_is_no_running_time() -> None:
    old = [record(number, seconds=Seconds(run=1.0)) for number in range(50)]
    new = [record(number, seconds=Seconds(run=5.0, compile=4.0)) for number in range(50)]
    assert not any(each.seen for each in compare(run_of(old), run_of(new)).times)


def test_unfinished_runs_repeated_questions_and_other_settings_are_said() -> None:
    again = record(1, attempts=(Attempt(status="crash", reasons=("the worker died",)),))
    before = run_of([record(0), record(1)], "a", cases="smoke")
    after = run_of([again], "b", unanswered=[record(0)], cases="nightly")
    notes = compare(before, after).notes
    assert notes == (
        "b: 1 of its 2 questions has no record, it is still being written or was killed half way; what is there is compared",
        "b: 1 of its answers came only when it was asked once more",
        "the runs were not asked for the same: cases smoke then, nightly now",
    )  # fmt: skip


# Chance.


def test_coins_fall_as_counted_by_hand() -> None:
    assert coin(0, 0) == coin(5, 5) == coin(5, 6) == 1.0
    assert coin(5, 0) == coin(0, 5) == pytest.approx(2 / 32)
    assert coin(7, 1) == pytest.approx(2 * (1 + 8) / 256)
    assert coin(60000, 40000) == 0.0 or coin(60000, 40000) < 1e-300
    assert coin(520, 480) == pytest.approx(0.2174, abs=2e-4)
    assert least(5) == coin(5, 0)


def test_moves_that_add_up_are_bounded_and_never_understated() -> None:
    assert one_sided(np.zeros(3)) == one_sided(np.array([1.0, -1.0])) == 1.0
    assert one_sided(np.ones(50)) == pytest.approx(2 * np.exp(-25))
    # Of all 1024 signs of these sizes, the share that adds up to as much is at most the bound.
    moves = np.array(list(product((-1.0, 1.0), repeat=10))) * np.arange(1.0, 11.0)
    sums = np.abs(moves.sum(axis=1))
    for each, total in zip(moves, sums, strict=True):
        assert (sums >= total).mean() <= one_sided(each)


def test_correction_is_holm_among_those_that_could_be_seen() -> None:
    assert corrected([0.001, 0.004, 0.5], [0.0, 0.0, 0.0], 0.01) == pytest.approx([0.003, 0.008, 0.5])
    # Ninety-seven tests that could never be seen cost nothing.
    many = corrected([0.001, 0.004, 0.5] + [0.25] * 97, [0.0, 0.0, 0.0] + [0.25] * 97, 0.01)
    assert many[:3] == pytest.approx([0.003, 0.008, 0.5])
    assert many[3:] == [1.0] * 97
    assert corrected([], [], 0.01) == []
    assert countable([0.0] * 3 + [0.5] * 97, 0.01) == 3


def test_the_interval_of_a_median_lies_between_order_statistics() -> None:
    # Of ten values the extremes miss the median with 2/1024, the next inner ones with 22/1024.
    ordered = np.arange(10, dtype=np.float64)
    assert median_interval(ordered, 0.01) == median_interval(ordered, 0.02) == (0.0, 9.0)
    assert median_interval(ordered, 0.03) == (1.0, 8.0)
    assert median_interval(ordered[:3], 0.01) == (-np.inf, np.inf)
    assert median_interval(ordered[:0], 0.01) == (-np.inf, np.inf)


# The command.


def written(path: Path, records: Sequence[Record], unanswered: Sequence[Record] = ()) -> Path:
    run = run_of(records, unanswered=unanswered)
    create_run(path, Settings(on=("interpreter",), vllm="/trees/vllm new"), run.plan)
    file = RecordFile(path / "records" / "0001-interpreter-gw0-1.jsonl")
    for each in records:
        file.record(each)
    file.close()
    return path


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = command(["diff", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_tells_counts_examples_and_how_to_see_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(tmp_path / "old", [record(number) for number in range(30)])
    new = written(
        tmp_path / "new",
        [record(number, "fail", bits="cc", diagnosis=("as if a page were dropped (page)",)) for number in range(25)]
        + [record(number, bits="bb") for number in range(25, 30)],
    )
    code, out, err = diff(capsys, old, new)
    assert (code, err) == (1, "")
    assert "      25 new failures" in out
    assert "       5 other bits, within budget both times" in out
    assert "       0 fixed" in out
    assert out.count("was pass, now fail: out[3, 1]=0.73, but should be 0.36 ±0.001: outside the budget") == 20
    assert out.count("as if a page were dropped (page)") == 20
    assert "… and 5 more" in out
    assert f"mla-oracle replay {case_id(0)} --impl ours-triton --on interpreter --vllm '/trees/vllm new'" in out


@pytest.mark.parametrize(
    ("later", "code"),
    [
        ([record(0)], 0),
        ([record(0, bits="bb")], 0),
        ([record(0, seconds=Seconds(run=99.0))], 0),
        ([record(0), record(1)], 0),
        ([record(0, "fail")], 1),
        ([record(0, "unsupported")], 1),
        ([record(1)], 1),
    ],
)
def test_the_exit_code_says_whether_anything_got_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], later: list[Record], code: int
) -> None:
    assert diff(capsys, written(tmp_path / "a", [record(0)]), written(tmp_path / "b", later))[0] == code


def test_growth_alone_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = grown(lambda number, draw: 1.3)
    paths = [written(tmp_path / run.path.name, list(run.records.values())) for run in (before, after)]
    code, out, _ = diff(capsys, *paths)
    assert code == 1
    assert "       1 group whose error grew" in out
    assert "budget use grew: " in out
    assert "300 of 300 answers have other bits" in out
    assert diff(capsys, *reversed(paths))[0] == 0


def test_the_whole_diff_is_kept_as_json_in_a_new_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = written(tmp_path / "a", [record(0)]), written(tmp_path / "b", [record(0, "hang")])
    kept = tmp_path / "diff.json"
    assert diff(capsys, old, new, "--json", kept)[0] == 1
    assert msgspec.json.decode(kept.read_bytes(), type=Diff) == compare(read_run(old), read_run(new))
    before = kept.read_bytes()
    code, out, err = diff(capsys, old, new, "--json", kept)
    assert (code, out) == (2, "")
    assert "should name a new file" in err
    assert kept.read_bytes() == before


def test_a_diff_that_cannot_be_kept_names_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    old, new = written(tmp_path / "a", [record(0)]), written(tmp_path / "b", [record(0)])
    monkeypatch.setattr(Path, "write_bytes", full)
    code, _, err = diff(capsys, old, new, "--json", tmp_path / "diff.json")
    assert code == 2
    assert f"{tmp_path / 'diff.json'}: No space left on device" in err
    assert not (tmp_path / "diff.json").exists()


def test_an_op_can_be_looked_at_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "a", [record(0), record(0, op="dcp.combine")])
    new = written(tmp_path / "b", [record(0), record(0, "fail", op="dcp.combine")])
    assert diff(capsys, old, new, "--op", "sparse_mla")[0] == 0
    assert diff(capsys, old, new, "--op", "dcp.combine")[0] == 1
    assert diff(capsys, old, new, "--impl", "ours-*")[0] == 1
    code, _, err = diff(capsys, old, new, "--op", "formats.cast")
    assert code == 2 and "neither asks formats.cast" in err


@pytest.mark.parametrize("number", [0, 1, 2])
def test_counts_agree_with_their_words(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    old = written(tmp_path / "old", [record(each) for each in range(5)])
    new = written(tmp_path / "new", [record(each, "fail" if each < number else "pass") for each in range(5)])
    _, out, _ = diff(capsys, old, new)
    assert f"{number:8} new failure{'' if number == 1 else 's'}\n" in out
    assert f"{0:8} groups whose error grew\n" in out


def test_the_diff_is_not_kept_among_what_a_sweep_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = written(tmp_path / "a", [record(0)]), written(tmp_path / "b", [record(0)])
    code, out, err = diff(capsys, old, new, "--json", new / "records" / "diff.json")
    assert (code, out) == (2, "")
    assert "belongs to the run" in err and err.count("\n") == 1
    assert not (new / "records" / "diff.json").exists()
    assert command(["report", str(new), "--out", str(new / "records" / "x.html")]) == 2
    assert not (new / "records" / "x.html").exists()


def test_misuse_is_one_sentence_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "a", [record(0)])
    empty = written(tmp_path / "empty", [], unanswered=[record(0)])
    broken = written(tmp_path / "broken", [record(0)])
    (broken / "records" / "0002-interpreter-gw0-1.jsonl").write_bytes(b"{}\n")
    kept = tmp_path / "diff.json"
    for arguments, sentence in (
        ((run, run), "are one run; a diff needs two"),
        ((run, tmp_path / "none"), "no such run directory"),
        ((tmp_path, run), "holds no run.json"),
        ((empty, run), "none of its 1 question has a record"),
        ((run, broken), "0002-interpreter-gw0-1.jsonl line 1"),
        ((run, empty, "--op", "no.such"), "no.such"),
        ((run,), "RUN_B"),
    ):
        code, out, err = diff(capsys, *arguments, "--json", kept)
        assert (code, out) == (2, ""), arguments
        assert sentence in err and err.count("\n") == 1
        assert not kept.exists()


def test_a_run_that_is_still_written_or_was_killed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "a", [record(0), record(1)])
    new = written(tmp_path / "b", [record(0)], unanswered=[record(1)])
    code, out, _ = diff(capsys, old, new)
    assert code == 1
    assert f"{new}: 1 of its 2 questions has no record" in out
    assert "was pass, now no record" in out
    assert "a sweep is writing it" not in out
    with held(new):
        _, out, _ = diff(capsys, old, new)
    assert f"{new}: a sweep is writing it right now" in out


def test_only_failures_lost_coverage_and_growth_are_worse() -> None:
    assert set(WORSE) == {"new_failure", "changed_failure", "lost_coverage"}
