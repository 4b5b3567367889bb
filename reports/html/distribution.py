"""How is the budget use of an op distributed?"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from reports import figures
from reports.html.overview import family_of
from reports.html.rows import Column, judged_use, middle
from reports.record import Record

# Where there are more ops, curves have fewer corners, so that the page stays small.
_FEW_OPS = 12


def curves_of(records: Sequence[Record], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Per op the distribution of budget use: a curve and a line of numbers for every implementation and execution."""
    found: dict[str, dict[Column, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        use = judged_use(record)
        if use is not None:
            found[record.op][record.impl, record.on].append(use)
    points = figures.POINTS if len(found) <= _FEW_OPS else figures.POINTS // 5
    drawn = []
    for number, op in enumerate(sorted(found)):
        uses = {column: found[op][column] for column in columns if column in found[op]}
        # More curves than colours cannot be told apart: those that come closest to the limit or over it are drawn.
        drawable = sorted(
            filter(lambda column: figures.has_distribution(uses[column]), uses), key=lambda one: -max(uses[one])
        )
        chosen = [column for column in uses if column in drawable[: figures.COLOURS] or len(uses) <= figures.COLOURS]
        svg = None
        if drawable:
            names = {f"{impl} {on}": uses[impl, on] for impl, on in chosen}
            svg = Markup(figures.distribution(names, name=f"f{number}", points=points))
        lines: list[dict[str, Any]] = []
        for (impl, on), values in uses.items():
            values = sorted(values)
            lines.append(
                {
                    "impl": impl,
                    "on": on,
                    "mark": figures.swatch(chosen.index((impl, on))) if (impl, on) in chosen else None,
                    "count": len(values),
                    "median": middle(values),
                    "high": values[math.ceil(0.99 * len(values)) - 1],
                    "worst": values[-1],
                    "over": sum(value >= 1 for value in values),
                }
            )
        drawn.append(
            {"op": op, "family": family_of(op), "svg": svg, "lines": lines, "over": sum(line["over"] for line in lines)}
        )
    return drawn
