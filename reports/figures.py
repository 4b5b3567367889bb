"""How does budget use look: as a number, as a step of colour, as a curve?"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from oracle.check import OFF_THE_SCALE

# Upper ends of the colour steps, a logarithmic scale that is finer towards the limit. Step 0 is an error of exactly 0,
# the last step is over the limit.
STEPS: tuple[float, ...] = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
OVER = len(STEPS) + 1

# The curves' horizontal axis; what lies outside is drawn at its ends.
_LEAST, _MOST = 1e-3, 4.0
POINTS = 160
# What is smaller is drawn at the bottom of a trend, as no error is.
_TREND_LEAST = 1e-7
_TREND_MARKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
COLOURS = 6

# matplotlib knows no CSS variable: it draws in these colours, which the page's variables then replace.
_STAND_INS = {
    "#0000a1": "var(--ink)",
    "#0000a2": "var(--soft)",
    "#0000a3": "var(--rule)",
    "#0000a4": "var(--over)",
    **{f"#0000b{number}": f"var(--curve-{number})" for number in range(COLOURS)},
}
_INK, _SOFT, _RULE, _OVER = list(_STAND_INS)[:4]


def heat(use: float | None) -> int:
    """The colour step of a budget use: 0 for no error at all, `OVER` from 1.0 on; -1 where nothing was judged."""
    if use is None:
        return -1
    if use <= 0:
        return 0
    return next((step for step, end in enumerate(STEPS, start=1) if use < end), OVER)


def legend() -> list[tuple[int, str]]:
    """Every colour step with the words that explain it."""
    ends = [f"{end:g}" for end in STEPS]
    within = [(step, f"< {end}") for step, end in enumerate(ends, start=1)]
    return [(0, "0"), *within, (OVER, "✕ ≥ 1")]


def spelled_use(use: float | None) -> str:
    """A budget use in three digits; ∞ for an error where none is allowed, a dash where nothing was judged."""
    if use is None:
        return "–"
    if use >= OFF_THE_SCALE:
        return "∞"
    if use <= 0:
        return "0"
    if use < 1e-4 or use >= 1e4:
        mantissa, exponent = f"{use:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if use >= 100:
        return f"{use:.0f}"
    # Rounding must not carry a passing use to the limit.
    return "0.999" if 0.9995 <= use < 1 else f"{use:#.3g}"


def spelled_seconds(seconds: float) -> str:
    """A duration in the unit that people would say it in."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 100:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.0f} µs" if seconds > 0 else "0"


def has_distribution(uses: Sequence[float]) -> bool:
    """Whether there is a curve to draw: exact answers are only ever 0 or off the scale."""
    return any(0 < use < OFF_THE_SCALE for use in uses)


def distribution(curves: Mapping[str, Sequence[float]], *, name: str, points: int = POINTS) -> str:
    """An inline SVG of cumulative distributions of budget use, one curve each, on a logarithmic axis.

    Its colours are the page's CSS variables; colour and dashes of a curve are what `swatch` says. `name` makes the ids
    inside unique on the page, `points` limits the corners of a curve.
    """
    from matplotlib import rc_context

    with rc_context(_settings(name)):
        figure, axes = _canvas()
        axes.set_xscale("log")
        axes.set_xlim(_LEAST, _MOST)
        axes.set_ylim(0, 1.02)
        axes.axvspan(1, _MOST, color=_OVER, alpha=0.1, linewidth=0)
        axes.axvline(1, color=_OVER, linewidth=1)
        axes.grid(True, which="major", color=_RULE, linewidth=0.6)
        axes.minorticks_off()
        axes.set_xticks([_LEAST, 0.01, 0.1, 1], [f"≤ {_LEAST:g}", "0.01", "0.1", "1"])
        axes.get_xticklabels()[0].set_horizontalalignment("left")
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
        for number, uses in enumerate(curves.values()):
            across, up = cumulated(uses, points)
            axes.step(
                across, up, where="post", linewidth=1.5, color=f"#0000b{number % COLOURS}",
                linestyle=_DASHES[number % len(_DASHES)],
            )  # fmt: skip
        return _drawn(figure, name)


def trend(
    median: Sequence[float | None], tail: Sequence[float | None], *, steps: Sequence[int],
    drifts: Sequence[tuple[int, int]], name: str,
) -> str:  # fmt: skip
    """An inline SVG of median and tail of budget use over runs, on a logarithmic axis.

    A step is a line between two runs, a drift a band over its runs. No error, and what is far over the limit, lies on the edge.
    """
    from matplotlib import rc_context

    with rc_context(_settings(name)):
        figure, axes = _canvas()
        known = [min(use, _MOST) for use in (*median, *tail) if use is not None and use > _TREND_LEAST] or [_LEAST, 1.0]
        low, high = min(known), max(known)
        axes.set_yscale("log")
        axes.set_ylim(low / 1.25, high * 1.25)
        axes.set_xlim(0.4, len(median) + 0.6)
        ends = [place for place in (1, len(median)) if median]
        axes.set_xticks(ends, [f"run {place}" for place in ends])
        for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=False):
            label.set_horizontalalignment(side)
        marks = [mark for mark in _TREND_MARKS if low / 1.25 <= mark <= high * 1.25] or sorted({low, high})
        axes.set_yticks(marks, [f"{mark:.2g}" for mark in marks])
        axes.minorticks_off()
        axes.grid(True, axis="y", which="major", color=_RULE, linewidth=0.6)
        if high * 1.25 > 1:
            axes.axhline(1, color=_OVER, linewidth=1)
        for first, last in drifts:
            axes.axvspan(first + 0.6, last + 1.4, color=_OVER, alpha=0.1, linewidth=0)
        for position in steps:
            axes.axvline(position + 0.5, color=_OVER, linewidth=1.2, linestyle=(0, (4, 2)))
        for number, values in enumerate((median, tail)):
            shown = [float("nan") if use is None else min(max(use, low), _MOST) for use in values]
            axes.plot(
                range(1, len(shown) + 1), shown, linewidth=1.3, color=f"#0000b{number}", linestyle=_DASHES[number],
                marker="o" if len(shown) <= 60 else None, markersize=2.6, markeredgewidth=0,
            )  # fmt: skip
        return _drawn(figure, name)


def interval(low: float, middle: float, high: float, elsewhere: float) -> str:
    """An inline SVG of a ratio with its interval on a logarithmic axis from a quarter to four; the mark is `elsewhere`."""

    def across(ratio: float) -> str:
        return f"{60 + 29 * math.log2(min(max(ratio, 0.25), 4.0)):.1f}"

    return (
        '<svg class="interval" viewBox="0 0 120 12" aria-hidden="true" focusable="false">'
        f'<path d="M{across(1)} 0V12" stroke="var(--rule)"/>'
        f'<path d="M{across(elsewhere)} 1V11" stroke="var(--soft)" stroke-dasharray="2 1.5"/>'
        f'<path d="M{across(low)} 6H{across(high)}" stroke="var(--link)" stroke-width="2"/>'
        f'<circle cx="{across(middle)}" cy="6" r="3" fill="var(--link)"/></svg>'
    )


def _settings(name: str) -> dict[str, object]:
    return {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "axes.edgecolor": _RULE, "axes.linewidth": 0.8,
        "xtick.color": _SOFT, "ytick.color": _SOFT, "text.color": _INK, "axes.labelcolor": _SOFT, "path.simplify": True,
    }  # fmt: skip


def _canvas() -> tuple[Any, Any]:
    """A figure and its axes, in the size and the plainness of all figures."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.4))
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0.09, 0.1, 0.895, 0.88))
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=4)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _drawn(figure: Any, name: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _inlined(out.getvalue(), name)


def swatch(number: int) -> tuple[str, str]:
    """The CSS colour and the SVG dash pattern of curve `number`."""
    style = _DASHES[number % len(_DASHES)]
    dashes = "none" if isinstance(style, str) else " ".join(f"{1.5 * length:g}" for length in style[1])
    return f"var(--curve-{number % COLOURS})", dashes


def cumulated(uses: Sequence[float], most: int = POINTS) -> tuple[list[float], list[float]]:
    """The corners of the cumulative distribution, at most `most`: budget use and the share that is at most it."""
    ordered = sorted(min(max(use, _LEAST), _MOST) for use in uses)
    count = len(ordered)
    points = min(count, most)
    kept = [place * (count - 1) // max(1, points - 1) for place in range(points)]
    across = [_LEAST, *(ordered[place] for place in kept), _MOST]
    # What is off the scale sits on the right edge and is not reached: the curve ends below 100 %.
    within = sum(use < _MOST for use in ordered)
    up = [0.0, *(min(place + 1, within) / count for place in kept), within / count]
    return across, up


def _inlined(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true" focusable="false">', svg, count=1)
    # Only what is referred to needs a name: matplotlib names every group, and turns every text by no angle.
    svg = re.sub(r'<g id="[^"]*"/>|<defs>\s*</defs>| transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r' (?:x|y|width|height)="\d+\.\d{2,}"', _rounded, svg)
    svg = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, flags=re.DOTALL)
    svg = re.sub(r'font-family: [^;"]*', "font-family: var(--sans)", svg)
    svg = re.sub(r'font: (\S+) [^;"]*', r"font: \1 var(--sans)", svg)
    svg = re.sub(r' d="[^"]*"', _rounded, svg)
    for stand_in, variable in _STAND_INS.items():
        svg = svg.replace(stand_in, variable)
    svg = svg.replace("stroke-linecap: square", "").replace('; "', '"')
    return re.sub(r"\n\s*", "\n", svg)


def _rounded(path: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", path[0]).replace("\n", "")
