"""On which axes, and on which two of them together, does budget use depend?"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from reports.html.overview import family_of
from reports.html.rows import Column, Row, Spelling, judged_use, middle, words_of
from reports.record import Record
from reports.words import natural

_NEAREST, _OF_ONE = 20, 6
_MOST_VALUES = 16
# The first axes are tabled whatever they explain, fewer where there are many ops; the others when they explain so many
# standard deviations more than chance would.
_ALWAYS_TABLED, _ALWAYS_OF_MANY, _FEW_OPS = 4, 2, 12
_BEYOND_CHANCE = 3.0
# Cells of all tables together, so that the page stays small, and fewer beside a large kill matrix; ops with something
# wrong come first.
_MOST_CELLS, _CELLS_BESIDE = 8_000, 2_500
# Among so many axes, those that explain most by themselves, the pair for the map is looked for.
_PAIRED = 6

Judged = tuple[Column, float, dict[str, str]]


def telling_pairs(tables: Sequence[dict[str, Any]], most: int = 12) -> list[dict[str, Any]]:
    """The maps to print: of ops with something wrong first, then of those closest to their limit."""
    mapped = [table for table in tables if table["pair"] is not None]
    mapped.sort(key=lambda table: (-table["wrong"], -table["use"], table["op"]))
    return mapped[:most]


def tables_of(records: Sequence[Record], columns: Sequence[Column], *, crowded: bool = False) -> list[dict[str, Any]]:
    """Per op and axis: worst and median budget use for every value, by implementation and execution.

    The axes come in the order of how much of the spread of the logarithm of budget use they explain. An op without any
    error has nothing to table: it comes with its columns and counts alone.
    crowded: whether much else stands on the page.
    """
    judged: dict[str, list[Judged]] = defaultdict(list)
    for record in records:
        use = judged_use(record)
        if use is not None:
            judged[record.op].append(((record.impl, record.on), use, words_of(record.case)))
    tables = []
    for op in sorted(judged):
        rows = judged[op]
        answered = {column for column, _, _ in rows}
        own = [column for column in columns if column in answered]
        axes: list[dict[str, Any]] = []
        fixed: list[tuple[str, str]] = []
        loose: list[tuple[str, int]] = []
        for axis in dict.fromkeys(axis for row in rows for axis in row[2]):
            words = [row[2].get(axis, "–") for row in rows]
            if len(set(words)) == 1:
                fixed.append((axis, words[0]))
                continue
            labels = binned(words)
            if axis == "seed" or labels is None:
                loose.append((axis, len(set(words))))
                continue
            explained = _explained([row[1] for row in rows], labels)
            axes.append({"name": axis, "explained": explained, "labels": labels})
        axes.sort(key=lambda axis: -axis["explained"])
        flat = not any(use for _, use, _ in rows)
        always = _ALWAYS_TABLED if len(judged) <= _FEW_OPS else _ALWAYS_OF_MANY
        for place, found in enumerate(axes):
            tabled = not flat and (place < always or found["explained"] > _by_chance(found["labels"]))
            found["lines"] = _by_value(rows, found["labels"], own) if tabled else []
        tables.append(
            {
                "op": op,
                "family": family_of(op),
                "flat": flat,
                "columns": own,
                "axes": axes,
                "fixed": fixed,
                "loose": loose,
                "count": len(rows),
                "ranked": [axis["name"] for axis in axes],
                "wrong": sum(use >= 1 for _, use, _ in rows),
                "use": max(use for _, use, _ in rows),
                "pair": None if flat else _telling_pair(rows, axes),
                "cut": [],
            }
        )
    _cut(tables, _CELLS_BESIDE if crowded else _MOST_CELLS)
    return tables


def weight(table: dict[str, Any]) -> tuple[int, bool, int]:
    """What makes an op's table the one to see first."""
    return table["wrong"], table["use"] > 0, table["count"]


def _cut(tables: Sequence[dict[str, Any]], most: int) -> None:
    """Take away the tables for which there is no room, and name their axes."""
    cells = 0
    for table in sorted(tables, key=weight, reverse=True):
        for axis in table["axes"]:
            own = 2 * len(axis["lines"]) * len(table["columns"])
            if cells + own > most:
                axis["lines"] = []
                table["cut"].append(axis["name"])
            else:
                cells += own


def _by_chance(labels: Sequence[str]) -> float:
    """The share of the spread that an axis without influence explains rarely: its deviation is that of a chi-square."""
    return _BEYOND_CHANCE * math.sqrt(2 * max(1, len(set(labels)) - 1)) / len(labels)


def _telling_pair(rows: Sequence[Judged], axes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The map of the two axes that explain most together, on the implementation that is wrong most often, else on all."""
    blamed = Counter(column for column, use, _ in rows if use >= 1).most_common(1)
    column = blamed[0][0] if blamed else None
    kept = [place for place, row in enumerate(rows) if column is None or row[0] == column]
    uses = [rows[place][1] for place in kept]
    candidates = []
    for axis in axes[:_PAIRED]:
        labels = [axis["labels"][place] for place in kept]
        if 2 <= len(set(labels)) <= _MOST_VALUES:
            candidates.append((axis["name"], labels))
    best: tuple[float, int, int] | None = None
    for one, other in combinations(range(len(candidates)), 2):
        joint = [f"{a}\0{b}" for a, b in zip(candidates[one][1], candidates[other][1], strict=True)]
        share = _explained(uses, joint)
        if best is None or share > best[0]:
            best = (share, one, other)
    if best is None:
        return None
    (down, left), (across, top) = candidates[best[1]], candidates[best[2]]
    if len(set(top)) > len(set(left)):
        (down, left), (across, top) = (across, top), (down, left)
    worst: dict[tuple[str, str], float] = {}
    for a, b, use in zip(left, top, uses, strict=True):
        worst[a, b] = max(use, worst.get((a, b), 0.0))
    values = sorted(set(top), key=natural)
    lines = [(a, [worst.get((a, b)) for b in values]) for a in sorted(set(left), key=natural)]
    return {"down": down, "across": across, "values": values, "lines": lines, "by": column, "explained": best[0]}


def _by_value(rows: Sequence[Judged], labels: Sequence[str], columns: Sequence[Column]) -> list[dict[str, Any]]:
    found: dict[str, dict[Column, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (column, use, _), label in zip(rows, labels, strict=True):
        found[label][column].append(use)
    table = []
    for label in sorted(found, key=natural):
        cells: list[tuple[float | None, float | None]] = []
        for column in columns:
            uses = found[label].get(column)
            cells.append((max(uses), middle(uses)) if uses else (None, None))
        everyone = [use for uses in found[label].values() for use in uses]
        wrong = sum(use >= 1 for use in everyone)
        table.append({"value": label, "count": len(everyone), "wrong": wrong, "cells": cells})
    return table


def binned(words: Sequence[str]) -> list[str] | None:
    """The words, or for many integers the powers of two between which they lie; None for many different words."""
    if len(set(words)) <= _MOST_VALUES:
        return list(words)
    if not all(re.fullmatch(r"[0-9]{1,18}", word) for word in words):
        return None
    labels = []
    for word in words:
        power = max(0, int(word) - 1).bit_length()
        low, high = (1 << power >> 1) + 1, 1 << power
        labels.append(f"{min(low, high)}–{high}" if low < high else str(int(word)))
    return labels if len(set(labels)) <= 2 * _MOST_VALUES else None


def _explained(uses: Sequence[float], labels: Sequence[str]) -> float:
    """The share of the variance of log10(use) that lies between the labels, less what chance would give."""
    scores = [math.log10(min(max(use, 1e-4), 10.0)) for use in uses]
    mean = sum(scores) / len(scores)
    total = sum((score - mean) ** 2 for score in scores)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for score, label in zip(scores, labels, strict=True):
        sums[label][0] += score
        sums[label][1] += 1
    if total <= 1e-12 or len(scores) <= len(sums):
        return 0.0
    between = sum(number * (amount / number - mean) ** 2 for amount, number in sums.values())
    return max(0.0, between / total - (len(sums) - 1) / (len(scores) - 1))


def nearest(records: Sequence[Record], spelling: Spelling) -> list[Row]:
    """The passing records closest to their limit, a few per op and implementation so that one cannot fill the list."""
    taken: Counter[tuple[str, str, str]] = Counter()
    found = []
    for record in sorted((r for r in records if r.status == "pass" and r.use > 0), key=lambda r: r.use, reverse=True):
        place = (record.op, record.impl, record.on)
        taken[place] += 1
        if taken[place] <= _OF_ONE:
            found.append(spelling.row(record))
        if len(found) == _NEAREST:
            break
    return found
