"""What grew since an earlier report, and is the machine code still the same program?

Rows are compared by who launches them, so that a changed constant or option of a kernel meets its predecessor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from impl.executions.aot.normalise import Difference, difference
from impl.executions.aot.report import Report, Row

Change = Difference | Literal["new", "gone"]


@dataclass(frozen=True)
class Growth:
    """A resource of which a kernel takes more than before; it `closes` where it costs waves, memory or spills."""

    row: Row
    resource: str
    before: float
    after: float
    closes: bool

    @property
    def sentence(self) -> str:
        """The growth in one line."""
        unit = {"scratch": " B", "lds": " B", "code": " B"}.get(self.resource, "")
        return (
            f"{self.row.place}: {self.resource} {self.before:g} to {self.after:g}{unit} "
            f"({self.after - self.before:+g}) [{self.row.configuration}]"
        )


@dataclass(frozen=True)
class Comparison:
    """What changed: growth that closes first; for every row how its program compares; rows that have no successor."""

    growths: tuple[Growth, ...]
    changes: tuple[tuple[Row, Change], ...]
    gone: tuple[Row, ...]

    @property
    def closes(self) -> bool:
        """Whether anything grew that must not."""
        return any(growth.closes for growth in self.growths)

    @property
    def counts(self) -> dict[Change, int]:
        """How many rows compare in which way."""
        found: Counter[Change] = Counter(change for _, change in self.changes)
        found.update({"gone": len(self.gone)} if self.gone else {})
        return dict(found)


# Whatever more of these is taken costs time on every machine.
_CLOSING = ("vgpr_spills", "sgpr_spills", "scratch", "lds")
_TOLD = ("vgpr", "agpr", "sgpr", "code")


def compare(before: Report, after: Report) -> Comparison:
    """Every row of a report beside the row that the same launch had in an earlier one."""
    earlier = {
        (asked.op, asked.impl, asked.call, asked.position, row.kernel, row.arch): row
        for row in before.rows
        for asked in row.asked
    }
    by_key = {row.key: row for row in before.rows}
    met: set[str] = set()
    growths: list[Growth] = []
    changes: list[tuple[Row, Change]] = []
    for row in after.rows:
        asked_by = [(asked.op, asked.impl, asked.call, asked.position, row.kernel, row.arch) for asked in row.asked]
        known = by_key.get(row.key) or next((earlier[who] for who in asked_by if who in earlier), None)
        met.update(earlier[who].key for who in asked_by if who in earlier)
        if known is None:
            changes.append((row, "new"))
            continue
        met.add(known.key)
        if known.shape is not None and row.shape is not None:
            changes.append((row, difference(known.shape, row.shape)))
        growths += _growths(known, row)
    growths.sort(key=lambda growth: not growth.closes)
    return Comparison(tuple(growths), tuple(changes), tuple(row for row in before.rows if row.key not in met))


def _growths(before: Row, after: Row) -> list[Growth]:
    if before.resources is None or after.resources is None:
        return []
    found = [
        Growth(after, name, getattr(before.resources, name), getattr(after.resources, name), closes)
        for names, closes in ((_CLOSING, True), (_TOLD, False))
        for name in names
        if getattr(after.resources, name) > getattr(before.resources, name)
    ]
    if after.resources.waves < before.resources.waves:
        # Registers and memory cost waves in steps; the step is what is felt.
        lost = Growth(after, "waves", before.resources.waves, after.resources.waves, True)
        found.insert(0, lost)
    return found
