"""Would answers that failed have passed with a rounding point that their function has not declared?"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from cases import op_module
from cases.precision import UNIT_ROUNDOFF, Precision
from oracle.check import OFF_THE_SCALE, verdict_of
from oracle.laws import Honest
from reports.execute import Trial
from reports.record import Record

# Where kernels round, the most frequent first, and to what.
_POINTS = ("probability", "query", "key", "partial", "output", "score", "accumulate")
_FORMATS = ("bfloat16", "float8_e4m3fn")
_SECONDS = 20.0

Change = dict[str, Any]


def could_be_rounding(record: Record) -> bool:
    """Whether a failure is one of numbers that lie too far off, and no known fault gives the very same ones."""
    failing = [check for check in record.checks if not check.passed]
    return (
        bool(failing)
        and all(check.measure in ("bounded", "rms", "bias") and check.use < OFF_THE_SCALE for check in failing)
        and not any(line.startswith("as if ") for line in record.diagnosis)
    )


def rounding_that_explains(trials: Sequence[Trial]) -> tuple[Change, int] | None:
    """The change of the declared rounding points within whose budget the most of these failed answers lie, and how many.

    What the op's own right ways of computing declare is tried first, then one coarser point each; bounded in time.
    """
    began = time.monotonic()
    best: tuple[Change, int] | None = None
    for change in _changes(trials):
        if time.monotonic() - began > _SECONDS:
            break
        count = sum(_passes(trial, change) for trial in trials)
        if count > (best[1] if best is not None else 0):
            best = (change, count)
        if count == len(trials):
            break
    return best


def _passes(trial: Trial, change: Change) -> bool:
    declared = trial.record.precision
    assert declared is not None
    precision = msgspec.structs.replace(declared, **change)
    try:
        return (
            verdict_of(tuple(op_module("oracle", trial.record.op).judge(trial.inputs, trial.outputs, precision)))
            == "pass"
        )
    except ValueError:
        # A rounding point that this op's budget has no formula for.
        return False


def _changes(trials: Sequence[Trial]) -> list[Change]:
    """The changes that make a budget wider, without those that another says again."""
    found: list[Change] = []
    for trial in trials[:1]:
        declared = trial.record.precision
        assert declared is not None
        ways: Sequence[Honest] = op_module("oracle", trial.record.op).HONEST
        wider = [_coarser(declared, way.declared(trial.inputs)) for way in ways]
        found += [{point: change[point]} for change in wider for point in change]
        found += wider
        found += [{point: name} for name in _FORMATS for point in _POINTS if _is_coarser(declared, point, name)]
    return [change for place, change in enumerate(found) if change and change not in found[:place]]


def _coarser(declared: Precision, other: Precision) -> Change:
    """The points at which another way of computing rounds more coarsely than what is declared."""
    points = {point: getattr(other, point) for point in _POINTS}
    change: Change = {point: name for point, name in points.items() if _is_coarser(declared, point, name)}
    return {**change, "averaged": True} if other.averaged and not declared.averaged else change


def _is_coarser(declared: Precision, point: str, name: str) -> bool:
    return UNIT_ROUNDOFF[name] > UNIT_ROUNDOFF[getattr(declared, point)]
