"""Does the page of a diff say what the diff says, each class with examples, in one file and without a script?"""

import re
from pathlib import Path
from typing import Any

import pytest

from oracle.check import OFF_THE_SCALE, Check
from reports.commands import run as command
from reports.diff import KINDS, MEANINGS, Change, Diff, Differing, Growth, Kind, Move, Slowdown
from reports.html.difference import answer_of, report_difference, write_diff
from reports.record import Environment, Record
from reports.replaying import Trees
from reports.store import RecordFile, Settings, StoreError, Task, create_run

HERE = Environment(machine="m", python="3", torch="2.13.0", triton="3.8", numpy="2", device="cpu")
OP = "sparse_mla.decode"
STATES: dict[Kind, tuple[str, str]] = {
    "new_failure": ("pass", "fail"),
    "changed_failure": ("fail", "fail"),
    "fixed": ("fail", "pass"),
    "lost_coverage": ("pass", "unsupported"),
    "new_coverage": ("not asked", "pass"),
    "changed_reasons": ("unsupported", "unsupported"),
    "bit_change": ("pass", "pass"),
    "rejudged": ("pass", "pass"),
}


def case_id(number: int) -> str:
    return f"{OP}:heads=16,queries={number},seed=0"


def record(number: int, status: str, use: float = 0.25) -> Record:
    use = OFF_THE_SCALE if status == "fail" else use
    check = Check(output="out", measure="bounded", use=use, wrong=int(use >= 1), count=64, got="1", want="2", why="far")
    fields: dict[str, Any] = {"checks": (check,)} if status in ("pass", "fail") else {"reasons": ("no HIP device",)}
    return Record(
        case=case_id(number), op=OP, impl="ours-triton", on="interpreter", status=status, environment=HERE, **fields
    )  # type: ignore[arg-type]


def change(kind: Kind, number: int = 0) -> Change:
    was, now = STATES[kind]
    sides = [None if state == "not asked" else record(number, state) for state in (was, now)]
    return Change(
        kind=kind, case=case_id(number), op=OP, impl="ours-triton", on="interpreter", law="", was=was, now=now,
        before=sides[0], after=sides[1], sentence=f"{kind} number {number}",
    )  # fmt: skip


STILL = Move(before=0.5, after=0.5, ratio=1.0, up=1, down=1, p=1.0)
UP = Move(before=0.2, after=0.31, ratio=1.55, up=48, down=2, p=1e-9)
DOWN = Move(before=0.31, after=0.2, ratio=0.65, up=2, down=48, p=1e-9)


def growth(median: Move, **changes: Any) -> Growth:
    fields: dict[str, Any] = {
        "op": OP, "impl": "ours-triton", "on": "interpreter", "cases": 60, "changed": 50, "median": median, "tail": STILL,
        "steepest": case_id(7), "sentence": "the median moved",
    }  # fmt: skip
    return Growth(**{**fields, **changes})


def slowdown(ratio: float, seen: bool, op: str = OP) -> Slowdown:
    return Slowdown(
        op=op, impl="ours-triton", on="interpreter", cases=50, before=0.2, after=0.2 * ratio, ratio=ratio,
        low=ratio / 1.1, high=ratio * 1.1, noise=1.3, elsewhere=1.02, seen=seen, sentence="",
    )  # fmt: skip


def diff(**changes: Any) -> Diff:
    fields: dict[str, Any] = {
        "before": "/runs/monday", "after": "/runs/tuesday", "environments": (), "changes": (), "growths": (), "times": (),
        "unchanged": 40, "unjudged": 0,
    }  # fmt: skip
    return Diff(**{**fields, **changes})


def words_of(page: str) -> str:
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<(?!wbr|/?b>|/?i>)[^>]*>", " ", page).replace("<wbr>", "")).replace(
        "&#39;", "'"
    )


def written(tmp_path: Path, found: Diff, trees: Trees | None = None) -> str:
    return write_diff(found, tmp_path / "diff.html", trees=trees or Trees()).read_text(encoding="utf-8")


def test_every_class_has_its_count_its_examples_and_their_two_states(tmp_path: Path) -> None:
    changes = tuple(change(kind, number) for kind in KINDS for number in range(4))
    words = words_of(written(tmp_path, diff(changes=changes)))
    for kind in KINDS:
        assert f"{MEANINGS[kind].capitalize()}: 4" in words
        for number in range(4):
            assert f"{kind} number {number}" in words
    assert "The other 1" in words
    assert (
        "Worse. 4 new failures, 4 failures that changed and 4 questions are judged no more; 40 questions have the same answer."
        in words
    )
    assert "not asked → pass" in words


def test_a_line_runs_the_later_case_again_on_the_trees_of_the_later_run(tmp_path: Path) -> None:
    page = written(tmp_path, diff(changes=(change("new_failure", 3),)), Trees(vllm=Path("/new/vllm")))
    assert f"mla-oracle replay {case_id(3)} --impl ours-triton --on interpreter --vllm /new/vllm" in words_of(page)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (diff(changes=(change("new_failure"),)), "Worse."),
        (diff(changes=(change("lost_coverage"),)), "Worse."),
        (diff(growths=(growth(UP),)), "Worse."),
        (diff(growths=(growth(DOWN),)), "Nothing changed."),
        (diff(changes=(change("fixed"), change("bit_change", 1))), "Not worse."),
        (diff(times=(slowdown(3.0, True),)), "Nothing changed."),
        (diff(), "Nothing changed."),
        (diff(unchanged=0), "Nothing to compare."),
    ],
)
def test_only_what_makes_a_run_worse_is_called_worse(found: Diff, word: str) -> None:
    assert answer_of(found)[1] == word
    assert found.worse == (word == "Worse.")


def test_growth_is_told_for_an_op_and_for_the_value_it_lives_in(tmp_path: Path) -> None:
    found = diff(growths=(growth(UP), growth(UP, axis="values", value="randn"), growth(DOWN, op="dcp.decode")))
    words = words_of(written(tmp_path, found))
    assert "all cases 60 50 0.200 → 0.310 48 up, 2 down <b>× 1.55</b> 0.500 → 0.500 1 up, 1 down not seen" in words
    assert "values=<b>randn</b>" in words and case_id(7) in words
    assert words.index("It grew") < words.index("It fell") < words.index("dcp.decode")


def test_times_are_told_with_their_interval_and_what_is_within_the_noise_apart(tmp_path: Path) -> None:
    page = written(tmp_path, diff(times=(slowdown(1.1, False, "dcp.decode"), slowdown(2.0, True))))
    words = words_of(page)
    assert "200 ms 400 ms <b>× 2</b> 1.82 to 2.2 × 1.02 × 1.3" in words
    assert words.index("× 2</b>") < words.index("1 group within the noise") < words.index("× 1.1 ")
    assert page.count('class="interval"') == 2


def test_what_differs_in_the_environment_and_what_a_reader_must_know_stand_there(tmp_path: Path) -> None:
    fields = (Differing(field="triton", before=("3.8.0",), after=("3.9.0", "3.9.1")),)
    words = words_of(written(tmp_path, diff(environments=fields, notes=("monday was stopped half way",))))
    assert "triton 3.8.0 3.9.0 3.9.1" in words and "monday was stopped half way" in words
    assert "The records of both runs name the same environment." in words_of(written(tmp_path, diff()))


def test_ten_thousand_changes_fit_and_say_what_is_only_counted(tmp_path: Path) -> None:
    changes = tuple(change(kind, number) for kind in KINDS for number in range(1250))
    page = written(tmp_path, diff(changes=changes))
    assert len(page.encode()) < 2_000_000
    words = words_of(page)
    assert "of this group are counted only" in words
    # The classes that come later are not crowded out by the first, and each example has its line.
    for kind in KINDS:
        part = words_of(page[page.index(f'<section id="{kind}"') :])
        assert f"{kind} number 0" in part and f"replay {case_id(0)} " in part[: part.index(f"{kind} number 0")]


def test_the_page_names_nothing_outside_itself_and_has_no_script(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x>"
    found = diff(
        before=hostile, changes=tuple(change(kind) for kind in KINDS), notes=(hostile,), growths=(growth(UP, sentence=hostile),),
        environments=(Differing(field="vllm", before=(hostile,), after=()),), times=(slowdown(2.0, True),),
    )  # fmt: skip
    page = written(tmp_path, found)
    assert "<script" not in page and "<img" not in page
    assert not re.search(r"url\((?!#)|@import|https?://|href=\"(?!#)|<[^>]*src=", page)
    targets = set(re.findall(r'href="#([^"]+)"', page))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert targets <= set(ids) and len(ids) == len(set(ids))


def run_of(path: Path, statuses: dict[int, str]) -> Path:
    tasks = [Task(case=case_id(number), impl="ours-triton", on="interpreter", item="a") for number in statuses]
    create_run(path, Settings(on=("interpreter",)), tasks)
    file = RecordFile(path / "records" / "gw0.jsonl")
    for number, status in statuses.items():
        if status:
            file.record(record(number, status))
    file.close()
    return path


def test_two_run_directories_become_a_page(tmp_path: Path) -> None:
    before = run_of(tmp_path / "monday", {0: "pass", 1: "pass", 2: "fail"})
    after = run_of(tmp_path / "tuesday", {0: "pass", 1: "fail", 2: "pass"})
    assert command(["report", str(after), "--against", str(before)]) == 0
    words = words_of((after / "diff.html").read_text())
    assert "monday → tuesday" in words and "Worse. 1 new failure;" in words and "Fixed: 1" in words


def test_a_run_without_records_is_nothing_to_compare_with(tmp_path: Path) -> None:
    empty, full = run_of(tmp_path / "empty", {0: ""}), run_of(tmp_path / "full", {0: "pass"})
    with pytest.raises(StoreError, match="none of its 1 question has a record"):
        report_difference(empty, full, tmp_path / "diff.html")
    assert not (tmp_path / "diff.html").exists()
