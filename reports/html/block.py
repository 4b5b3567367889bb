"""How do all rows travel inside the page, for the table and the maps that the browser makes?"""

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from oracle.check import OFF_THE_SCALE, Check
from reports import figures
from reports.html.axes import binned
from reports.html.rows import STATUSES, WRONG, Spelling, judged_use, seconds_of, sentences_of
from reports.record import Attempt, Record
from reports.words import short

# Passing cases whose sentence the table keeps; the others keep their numbers.
WITH_SENTENCE = 10_000
_LONGEST_SENTENCE = 1200


def block_of(records: Sequence[Record], spelling: Spelling, ranked: Mapping[str, list[str]]) -> str:
    """All rows as JSON by columns, gzipped, in base64: what the page's table and map of two axes are made from."""
    texts: dict[str, int] = {}
    names: dict[str, dict[str, int]] = {"impls": {}, "ons": {}, "laws": {}, "outputs": {}}
    ops, place_of = [], {}
    for number, (op, cases) in enumerate(spelling.cases.items()):
        axes = spelling.axes[op]
        words: list[dict[str, int]] = [{} for _ in axes]
        cells: list[list[int]] = [[] for _ in axes]
        odd = {}
        for place, case in enumerate(cases):
            place_of[op, case] = (number, place)
            own = spelling.words[case]
            for axis, known, column in zip(axes, words, cells, strict=True):
                column.append(_interned(known, own[axis]) if axis in own else -1)
            if f"{op}:" + ",".join(f"{axis}={own[axis]}" for axis in axes if axis in own) != case:
                odd[place] = case
        labels = [binned(list(known)) if len(known) > 1 else None for known in words]
        common = [known[spelling.common[op][axis]] for axis, known in zip(axes, words, strict=True)]
        ops.append(
            {
                "name": op,
                "axes": axes,
                "words": [list(known) for known in words],
                "cells": cells,
                # An axis of many integers is mapped by the ranges in which they lie.
                "bins": [
                    None if own is None or own == list(known) else own for own, known in zip(labels, words, strict=True)
                ],
                "common": common,
                "odd": odd,
                "alone": len(cases) == 1,
                "ranked": [axes.index(axis) for axis in ranked.get(op, [])],
            }
        )
    passing = sorted((r.use for r in records if r.status == "pass"), reverse=True)
    quiet_below = passing[WITH_SENTENCE] if len(passing) > WITH_SENTENCE else -1.0
    rows: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        op_number, place = place_of[record.op, record.case]
        worst: Check | None = max(record.checks, key=lambda check: check.use, default=None)
        quiet = record.status == "pass" and record.use <= quiet_below
        rows["op"].append(op_number)
        rows["case"].append(place)
        rows["impl"].append(_interned(names["impls"], record.impl))
        rows["on"].append(_interned(names["ons"], record.on))
        rows["law"].append(_interned(names["laws"], record.law))
        rows["status"].append(STATUSES.index(record.status))
        use = judged_use(record)
        rows["use"].append(None if use is None else _rounded(use))
        rows["output"].append(_interned(names["outputs"], "" if worst is None else f"{worst.output} {worst.measure}"))
        rows["seconds"].append(_rounded(seconds_of(record)))
        said = [*(() if quiet else sentences_of(record)), *map(_told, record.attempts)]
        rows["texts"].append([_interned(texts, short(text, _LONGEST_SENTENCE)) for text in said])
        rows["diagnosis"].append([_interned(texts, short(text, _LONGEST_SENTENCE)) for text in record.diagnosis])
    block = {
        "ops": ops,
        "statuses": STATUSES,
        "wrong": len(WRONG),
        "off": OFF_THE_SCALE,
        "steps": figures.STEPS,
        "trees": spelling.trees.words,
        "rows": rows,
        "texts": list(texts),
        **{name: list(known) for name, known in names.items()},
    }
    packed = gzip.compress(json.dumps(block, separators=(",", ":")).encode("utf-8"), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _told(attempt: Attempt) -> str:
    return f"{attempt.status} before: {'; '.join(attempt.reasons)}"


def _interned(known: dict[str, int], text: str) -> int:
    return known.setdefault(text, len(known))


def _rounded(value: float) -> float:
    if value >= OFF_THE_SCALE:
        return OFF_THE_SCALE
    short = float(f"{value:.3g}")
    return 0.999 if value < 1 <= short else short
