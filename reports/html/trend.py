"""How did budget use move over many runs: how does it read on one page?"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from reports import figures
from reports.history import FEWEST_RUNS, LEVEL, History, Trend, read_history
from reports.html.overview import family_of
from reports.html.page import rendered, write_page
from reports.words import has, plural

# Series beyond this number have their line of numbers and no chart.
_CHARTS = 120


def write_history(history: History, out: Path, *, title: str) -> Path:
    """One self-contained HTML file about the history of many runs, at `out`; returns `out`."""
    return write_page(render_history(history, title=title), out)


def report_history(directory: Path, out: Path) -> Path:
    """The page of the runs that lie in a directory, at `out`; returns `out`.

    Raises `reports.store.StoreError` when there is no run.
    """
    return write_history(read_history(directory), out, title=directory.resolve().name)


def render_history(history: History, *, title: str) -> str:
    """The page of a history as one string of HTML; it needs no script."""
    moved = [trend for trend in history.trends if trend.moved]
    steady = [trend for trend in history.trends if not trend.moved]
    room = max(0, _CHARTS - len(moved))
    return rendered(
        "history.html.j2",
        title=title,
        answer=answer_of(history),
        runs=[_run(number, point.name, point.created, point.records) for number, point in enumerate(history.runs, 1)],
        left_out=history.left_out,
        events=_events(history),
        moved=[_line(trend, f"m{place}", place < _CHARTS) for place, trend in enumerate(moved)],
        steady=[_line(trend, f"s{place}", place < room) for place, trend in enumerate(steady)],
        level=LEVEL,
        fewest=FEWEST_RUNS,
        marks=(figures.swatch(0), figures.swatch(1)),
    )


def answer_of(history: History) -> tuple[str, str, str]:
    """Whether budget use moved: the status it is coloured as, the answer in a few words, and the sentence."""
    steps = [step for trend in history.trends for step in trend.steps]
    drifts = [drift for trend in history.trends for drift in trend.drifts]
    asked = f"{plural(len(history.trends), 'series')} over {plural(len(history.runs), 'run')}".replace(
        "seriess", "series"
    )
    if not history.runs:
        return "vacuous", "No runs.", "There is no finished run to read a history from."
    if not history.trends:
        return "vacuous", "Nothing to follow.", f"No answer of {plural(len(history.runs), 'run')} had any error."
    ratios = [step.ratio for step in steps] + [drift.ratio for drift in drifts]
    rose = sum(ratio > 1 for ratio in ratios)
    if steps or drifts:
        said = f"{plural(len(steps), 'step')} and {plural(len(drifts), 'drift')} in {asked}, {rose} of them upwards."
        return ("fail", "It rose.", said) if rose else ("pass", "It fell.", said)
    told = sum(_runs(trend) >= FEWEST_RUNS for trend in history.trends)
    if not told:
        return "vacuous", "Too few runs to tell.", f"No step can be seen in fewer than {FEWEST_RUNS} runs: {asked}."
    untold = len(history.trends) - told
    lack = f" {untold:,} of these {has(untold)} fewer than {FEWEST_RUNS} runs, too few to tell." if untold else ""
    return "pass", "Steady.", f"No step and no drift is seen in {asked}.{lack}"


def _runs(trend: Trend) -> int:
    """In how many runs the series is."""
    return sum(count > 0 for count in trend.count)


def _run(number: int, name: str, created: float, records: int) -> dict[str, Any]:
    return {"number": number, "name": name, "created": _date(created), "records": records}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC") if seconds > 0 else "–"


def _events(history: History) -> list[dict[str, Any]]:
    """Every step and drift as a line, those that rose most first."""
    found: list[dict[str, Any]] = []
    for place, trend in enumerate(trend for trend in history.trends if trend.moved):
        who = {"op": trend.op, "impl": trend.impl, "on": _where(trend), "anchor": f"series-m{place}"}
        for step in trend.steps:
            point = history.runs[step.position]
            when = f"run {step.position + 1}, {point.name}"
            found.append(
                {**who, "kind": "step", "when": when, "event": step, "tail": (step.tail_before, step.tail_after)}
            )
        for drift in trend.drifts:
            when = f"runs {drift.first + 1} to {drift.last + 1}"
            found.append({**who, "kind": "drift", "when": when, "event": drift, "tail": None})
    found.sort(key=lambda line: -line["event"].ratio)
    return found


def _where(trend: Trend) -> str:
    return f"{trend.on}, {trend.arch}" if trend.arch and trend.on != "interpreter" else trend.on


def _line(trend: Trend, name: str, drawn: bool) -> dict[str, Any]:
    """A series with its chart and its numbers."""
    chart = None
    if drawn:
        steps = [step.position for step in trend.steps]
        drifts = [(drift.first, drift.last) for drift in trend.drifts]
        chart = Markup(figures.trend(trend.median, trend.tail, steps=steps, drifts=drifts, name=name))
    rows = []
    for label, values in (("median", trend.median), ("95 %", trend.tail), ("worst", trend.worst)):
        known = [value for value in values if value is not None]
        if known:
            rows.append({"label": label, "first": known[0], "last": known[-1], "low": min(known), "high": max(known)})
    return {
        "op": trend.op,
        "family": family_of(trend.op),
        "impl": trend.impl,
        "on": _where(trend),
        "anchor": f"series-{name}",
        "chart": chart,
        "rows": rows,
        "runs": _runs(trend),
        "failed": sum(trend.failed),
        "sentences": [step.sentence for step in trend.steps] + [drift.sentence for drift in trend.drifts],
    }
