"""How does one ask whether a function is right that is no implementation of this house?

    from reports import check

    check("sparse_mla.decode", my_kernel)

Imports neither torch nor the rooms before it is called, and works whatever packages named `cases`, `oracle`, `impl` or
`reports` the caller's project has.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reports.house import sides_of

if TYPE_CHECKING:
    from cases.precision import Precision
    from impl.implementation import Execution
    from reports.record import Record

HOUSE = Path(__file__).resolve().parent.parent


class CheckFailed(AssertionError):
    """Some cases failed, or none was judged; `str` says which and how to run them again, `records` holds all answers."""

    def __init__(self, message: str, records: tuple[Record, ...]) -> None:
        super().__init__(message)
        self.records = records


class CheckMisuse(ValueError):
    """What was asked for cannot be; one sentence says what is wrong and what would be right."""


def check(
    op: str,
    function: Callable[[Any], Any],
    *,
    cases: Literal["smoke", "default", "nightly"] = "smoke",
    case: str | Sequence[str] = (),
    on: Execution | None = None,
    precision: Precision | Mapping[str, Any] | Callable[..., Precision | Mapping[str, Any]] | None = None,
    unsupported: Callable[..., Sequence[str] | None] | None = None,
    laws: bool = False,
    by_shape: bool = False,
    most: int = 20,
) -> tuple[Record, ...]:
    """Ask `function` the sweep's cases of an op, judge its answers, and return their records.

    function: takes the op's inputs and returns its outputs, or a dict of their fields.
    cases, case: the level, and case ids or patterns that choose among its cases, as in `mla-oracle sweep`.
    on: where it runs; by default the device that torch sees, or the interpreter where TRITON_INTERPRET is set or there
    is no device.
    precision: the rounding points that the function declares; a dict changes some of those of the house's own kernel,
    which hold without it. A callable gets the case.
    unsupported: for a case, the reasons why the function does not answer it; such cases are counted, not judged.
    laws: ask about every law of the op too. by_shape: the function's libraries choose kernels by the shape of the call.
    most: failures that the message shows.

    Raises `CheckFailed` when a case failed or none was judged, and `CheckMisuse` when there is nothing sensible to do.
    """
    __tracebackhide__ = True
    how = {
        "cases": cases, "case": case, "on": on, "precision": precision, "unsupported": unsupported, "laws": laws,
        "by_shape": by_shape, "most": most,
    }  # fmt: skip
    sides = sides_of(HOUSE)
    with sides.inside():
        answer = importlib.import_module("reports.foreign_cases").answer(
            op, function, how, lambda case_id, name: f"check({op!r}, {name}, case={case_id!r})", (), sides.outside
        )
    if answer.misuse:
        raise CheckMisuse(answer.misuse)
    if answer.message:
        raise CheckFailed(answer.message, answer.records)
    records: tuple[Record, ...] = answer.records
    return records
