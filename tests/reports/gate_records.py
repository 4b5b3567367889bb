"""Which records and runs do the tests of the gate and of its outputs judge?"""

import datetime
from pathlib import Path
from typing import Any

from oracle.check import Check
from reports.record import Environment, Record
from reports.store import Run, Settings, Task

HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="d", arch="gfx950")
GOOD = Check(output="out", measure="bounded", use=0.25, use_rms=0.1, count=4, got="1", want="1")
BAD = Check(
    output="out", measure="bounded", use=3.0, wrong=1, count=4, where=(1, 2), got="1", want="2 ±0.1", error=0.3, budget=0.1,
    why="outside the budget, 3 times; 1 of 4 elements are out",
)  # fmt: skip
TODAY = datetime.date(2026, 6, 15)
OP = "sparse_mla.decode"


def record(number: int, status: str = "pass", impl: str = "ours-triton", op: str = OP, **other: Any) -> Record:
    """The record of case `number`, whole as a sweep writes it."""
    checks = {"pass": (GOOD,), "fail": (BAD,)}.get(status, ())
    known: dict[str, Any] = {
        "case": f"{op}:rows={number},seed=0", "op": op, "impl": impl, "on": "hip", "status": status, "checks": checks,
        "environment": HERE, "finished": 1.0, "fingerprint": "f" if checks else "",
        "reasons": () if checks else (f"why {status}",),
    }  # fmt: skip
    return Record(**known | other)


def run_of(*records: Record, more: int = 0, name: str = "run", notes: tuple[str, ...] = (), **settings: Any) -> Run:
    """A run that holds these records, and `more` tasks without one."""
    tasks = [Task(case=each.case, impl=each.impl, on=each.on, item="i", law=each.law) for each in records]  # type: ignore[arg-type]
    tasks += [Task(case=f"{OP}:rows={900 + n},seed=0", impl="ours-triton", on="hip", item="i") for n in range(more)]
    by_key = {each.key: each for each in records}
    return Run(Path(name), Settings(on=("hip",), **settings), tuple(tasks), by_key, (), {}, notes)
