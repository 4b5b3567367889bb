"""Does the page of a history show where budget use stepped or drifted, and which runs it could not read?"""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reports import figures
from reports.history import FEWEST_RUNS, Drift, History, Point, Step, Trend
from reports.html.trend import answer_of, write_history

STEP = Step(
    position=12, before=0.1, after=0.16, tail_before=0.4, tail_after=0.64, ratio=1.6, up=80, down=3, p=0.0004,
    sentence="the level rose 1.6 times with run-12",
)  # fmt: skip
DRIFT = Drift(
    first=2, last=19, before=0.1, after=0.17, ratio=1.7, per_run=1.03, up=90, down=1, p=0.002, sentence="it drifted up"
)
RUNS = 24


def trend(op: str = "sparse_mla.decode", **changes: Any) -> Trend:
    uses = tuple(None if number == 3 else 0.1 + 0.001 * number for number in range(RUNS))
    fields: dict[str, Any] = {
        "op": op, "impl": "ours-triton", "on": "interpreter", "arch": "x86_64", "median": uses, "tail": uses, "worst": uses,
        "level": uses, "count": tuple(0 if use is None else 50 for use in uses), "failed": (0,) * RUNS, "steps": (),
        "drifts": (),
    }  # fmt: skip
    return Trend(**{**fields, **changes})


def history(*trends: Trend, **changes: Any) -> History:
    runs = tuple(Point(name=f"run-{number}", created=1.79e9 + 86400 * number, records=400) for number in range(RUNS))
    return History(**{"runs": runs, "trends": trends, "left_out": (), **changes})


def words_of(page: str) -> str:
    page = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def written(tmp_path: Path, found: History) -> str:
    return write_history(found, tmp_path / "history.html", title="nightly").read_text(encoding="utf-8")


def test_steps_and_drifts_stand_first_those_that_rose_most_before_the_others(tmp_path: Path) -> None:
    words = words_of(
        written(tmp_path, history(trend("a.step", steps=(STEP,)), trend("a.drift", drifts=(DRIFT,)), trend()))
    )
    assert "It rose. 1 step and 1 drift in 3 series over 24 runs, 2 of them upwards." in words
    assert "step run 13, run-12 × 1.6 0.100 → 0.160 0.400 → 0.640 80 up, 3 down 0.0004" in words
    assert "drift runs 3 to 20 × 1.7 0.100 → 0.170 – 90 up, 1 down 0.002" in words
    words = words[words.index("Where the level") :]
    assert words.index("× 1.7") < words.index("× 1.6") < words.index("Steady")


def test_every_series_has_a_chart_and_its_numbers(tmp_path: Path) -> None:
    page = written(tmp_path, history(trend("a.step", steps=(STEP,)), trend(failed=(0, 2, *[0] * (RUNS - 2)))))
    assert len(re.findall(r"<figure.*?<svg viewBox.*?</figure>", page, re.DOTALL)) == 2
    words = words_of(page)
    assert "median 0.100 0.123 0.100 0.123" in words and "2 failing answers" in words and "in 23 runs" in words


def test_steps_are_marked_in_the_chart() -> None:
    flat = (0.1,) * RUNS
    plain = figures.trend(flat, flat, steps=(), drifts=(), name="a")
    stepped = figures.trend(flat, flat, steps=(12,), drifts=(), name="a")
    drifted = figures.trend(flat, flat, steps=(), drifts=((2, 9),), name="a")
    assert stepped.count("var(--over)") == plain.count("var(--over)") + 1
    assert drifted.count("var(--over)") == plain.count("var(--over)") + 1


@pytest.mark.parametrize(
    "uses", [(0.0,) * 4, (None, None, 0.2, None), (1e9, 0.0, 1e-12, None), (1e-5, 2e-5, 1.5e-5, 1e-5)]
)
def test_any_numbers_make_a_chart(uses: tuple[float | None, ...]) -> None:
    assert figures.trend(uses, uses, steps=(2,), drifts=((0, 3),), name="a").startswith("<svg viewBox")


def test_runs_that_could_not_be_read_are_named(tmp_path: Path) -> None:
    words = words_of(written(tmp_path, history(left_out=("run-9 is still being written: 1 of 4 tasks have a record",))))
    assert "Left out: run-9 is still being written" in words


def short(trend: Trend, runs: int) -> Trend:
    """The series in its first runs alone."""
    return msgspec.structs.replace(trend, count=tuple(50 * (number < runs) for number in range(RUNS)))


def test_few_runs_are_not_called_steady(tmp_path: Path) -> None:
    few = history(short(trend(), FEWEST_RUNS - 1))
    assert answer_of(few) == (
        "vacuous", "Too few runs to tell.", f"No step can be seen in fewer than {FEWEST_RUNS} runs: 1 series over 24 runs.",
    )  # fmt: skip
    assert answer_of(history(short(trend(), FEWEST_RUNS)))[1] == "Steady."
    mixed = answer_of(history(trend(), short(trend("a.b"), 4), short(trend("a.c"), 5)))
    assert mixed[1:] == (
        "Steady.",
        f"No step and no drift is seen in 3 series over 24 runs. 2 of these have fewer than {FEWEST_RUNS} runs, too few to tell.",
    )
    assert answer_of(history(short(trend(drifts=(DRIFT,)), 8)))[1] == "It rose."
    words = words_of(written(tmp_path, few))
    assert f"fewer than {FEWEST_RUNS} cannot show a step whatever they hold" in words
    assert "nine" not in words


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (history(runs=()), "No runs."),
        (history(), "Nothing to follow."),
        (history(trend()), "Steady."),
        (history(trend(steps=(STEP,))), "It rose."),
        (history(trend(drifts=(DRIFT,))), "It rose."),
    ],
)
def test_the_answer_is_what_moved(found: History, word: str) -> None:
    assert answer_of(found)[1] == word


def test_two_hundred_series_fit_in_one_page_that_names_nothing_outside_itself(tmp_path: Path) -> None:
    page = written(
        tmp_path, history(*(trend(f"family.op{number}", steps=(STEP,) * (number < 3)) for number in range(200)))
    )
    assert len(page.encode()) < 2_000_000
    assert "<script" not in page and not re.search(r"url\((?!#)|@import|https?://|href=\"(?!#)|<[^>]*src=", page)
    targets = set(re.findall(r'href="#([^"]+)"', page))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert targets <= set(ids) and len(ids) == len(set(ids))
