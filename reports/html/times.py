"""Where did the time go: which cases were slow, and how much of running was compiling?"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from reports.html.rows import Row, Spelling, seconds_of
from reports.record import Record

_SLOWEST, _LISTED = 20, 30


def slowest(records: Sequence[Record], spelling: Spelling) -> list[Row]:
    """The records that took longest, all parts together."""
    found = sorted(records, key=seconds_of, reverse=True)[:_SLOWEST]
    return [spelling.row(record) for record in found if seconds_of(record) > 0]


def totals(records: Sequence[Record]) -> list[tuple[str, float]]:
    """Seconds of each part over all records."""
    parts = ("build", "run", "reference", "judge")
    return [(part, sum(getattr(record.seconds, part) for record in records)) for part in parts]


def compiling(records: Sequence[Record]) -> dict[str, Any]:
    """Compile time against run time, in all and for every op, implementation and execution that compiled.

    run is what is left of it without compiling. compiled: how many records compiled anything.
    """
    places: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        places[record.op, record.impl, record.on].append(record)
    lines = [{"op": op, "impl": impl, "on": on, **_sum(found)} for (op, impl, on), found in places.items()]
    compiled = [line for line in lines if line["compile"] > 0]
    compiled.sort(key=lambda line: (-line["compile"], line["op"], line["impl"], line["on"]))
    return {"all": _sum(records), "lines": compiled[:_LISTED], "left": max(0, len(compiled) - _LISTED)}


def _sum(found: Sequence[Record]) -> dict[str, Any]:
    compile_, whole = sum(record.seconds.compile for record in found), sum(record.seconds.run for record in found)
    return {
        "count": len(found),
        "compiled": sum(record.seconds.compile > 0 for record in found),
        "compile": compile_,
        "run": max(0.0, whole - compile_),
        "share": compile_ / max(whole, compile_, 1e-12),
        "most": max((record.seconds.compile for record in found), default=0.0),
    }
