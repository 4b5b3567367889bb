"""Starts this directory's kernels on the faithful interpreter; Triton reads the variable when it is imported."""

import inspect
import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from typing import Any

import pytest

from cases import op_module
from cases.case import Case, CaseError
from cases.covering import sweep_cases
from impl.executions import interpreter

interpreter.install()

Some = Callable[[str, int], list[Case]]


@pytest.fixture(scope="session")
def some() -> Some:
    """Cases of an op's default sweep, at most so many, none of them heavy; those that come first are unlike."""

    def chosen(op: str, count: int) -> list[Case]:
        heavy = op_module("cases", op).heavy
        light = [case for case in sweep_cases(op, "default") if not heavy(case)]
        # Neighbours in the array are alike; a stride that shares no factor with its length meets every case once.
        stride = next(prime for prime in (89, 97, 101, 103) if len(light) % prime)
        return [light[place * stride % len(light)] for place in range(min(count, len(light)))]

    return chosen


@pytest.fixture
def fails_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Asserts that a check that an op passes fails once something in one of the op's modules is broken."""

    def asserted(check: Callable[..., None], room: Any, op: str, name: str, broken: object) -> None:
        needed = [parameter for parameter in inspect.signature(check).parameters if parameter != "op"]
        arguments = {parameter: request.getfixturevalue(parameter) for parameter in needed}
        check(op, **arguments)
        monkeypatch.setattr(op_module(room, op), name, broken)
        with pytest.raises((AssertionError, CaseError)):
            check(op, **arguments)

    return asserted
