"""Who answers differently where, who does not answer and why, and on which rounding points do the answers rest?"""

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec

from cases.precision import Precision
from reports.html.rows import Spelling
from reports.record import Record
from reports.words import natural, short

_EXAMPLES = 6


def compared(records: Sequence[Record], spelling: Spelling) -> list[dict[str, Any]]:
    """Where one implementation answered a case on two executions: same bytes, same verdict, and examples where not."""
    answers: dict[tuple[str, str, str, str], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record.status not in ("unsupported", "vacuous"):
            answers[record.op, record.impl, record.case, record.law][record.on] = record
    pairs: dict[tuple[str, str, str, str], list[tuple[Record, Record]]] = defaultdict(list)
    for (op, impl, _, _), by_execution in answers.items():
        for one, other in combinations(sorted(by_execution), 2):
            pairs[op, impl, one, other].append((by_execution[one], by_execution[other]))
    lines: list[dict[str, Any]] = []
    for (op, impl, one, other), found in sorted(pairs.items()):
        apart = [pair for pair in found if pair[0].status != pair[1].status]
        printed = [pair for pair in found if pair[0].fingerprint and pair[1].fingerprint]
        shown = apart[:_EXAMPLES]
        lines.append(
            {
                "op": op,
                "impl": impl,
                "one": one,
                "other": other,
                "count": len(found),
                "printed": len(printed),
                "same": sum(a.fingerprint == b.fingerprint for a, b in printed),
                "apart": len(apart),
                "examples": [(a.status, b.status, spelling.row(b if a.status == "pass" else a)) for a, b in shown],
            }
        )
    return lines


def unsupported(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every declared reason with its counts; those that differ only in the value of their axis are one."""
    found: dict[tuple[str, str, str], list[tuple[str, Record]]] = defaultdict(list)
    for record in records:
        if record.status == "unsupported":
            for reason in record.reasons or ("no reason given",):
                named = re.match(r"(\w+)=(\S+): (.+)$", reason)
                axis, value, why = named.groups() if named else ("", "", reason)
                found[record.impl, axis, short(why, 400)].append((value, record))
    reasons: list[dict[str, Any]] = []
    for (impl, axis, why), members in found.items():
        values = sorted({value for value, _ in members if value}, key=natural)
        shown = "|".join(values[:8]) + ("|…" if len(values) > 8 else "")
        reasons.append(
            {
                "impl": impl,
                "why": f"{axis}={shown}: {why}" if axis else why,
                "count": len(members),
                "ops": sorted({record.op for _, record in members}),
                "on": sorted({record.on for _, record in members}),
            }
        )
    reasons.sort(key=lambda reason: (-reason["count"], reason["impl"], reason["why"]))
    return reasons


def implementations(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every implementation and execution with the rounding points it declares; ops that declare the same are one."""
    found: dict[tuple[str, str, Precision | None], set[str]] = defaultdict(set)
    sources: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for record in records:
        if record.precision is not None or record.status not in ("unsupported", "crash", "hang"):
            found[record.impl, record.on, record.precision].add(record.op)
        if record.source:
            sources[record.impl, record.on, record.op].add(record.source)
    lines: list[dict[str, Any]] = []
    for (impl, on, precision), ops in found.items():
        declared = {} if precision is None else msgspec.structs.asdict(precision)
        changed = [op for op in sorted(ops) if len(sources[impl, on, op]) > 1]
        lines.append({"impl": impl, "on": on, "precision": declared, "ops": sorted(ops), "changed": changed})
    lines.sort(key=lambda line: (line["impl"], line["on"], line["ops"]))
    return lines
