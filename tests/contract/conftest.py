"""Starts this directory's kernels on the faithful interpreter, and spares what is the same for many answers.

Triton reads the variable when it is imported.
"""

import inspect
import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cases import op_module
from cases.case import Case, CaseError
from cases.covering import sweep_cases
from cases.memory import map_tensors
from cases.precision import Precision
from impl.executions import interpreter
from oracle.check import Check

interpreter.install()

Some = Callable[[str, int], list[Case]]
# How the judges' modules call what they hold an answer against.
_TRUTHS = ("reference", "budget")


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


def exactly(answer: Any) -> Any:
    """An answer with the dtype, the shape and the bytes of every tensor in its place: equal where nothing differs."""

    def bits(tensor: torch.Tensor) -> Any:
        return (
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )

    return map_tensors(answer, bits)


class Bench:
    """The judge of an op at one call, which works out once what is the same for many answers.

    That is what they are held against, and the verdict on answers that are the same bit for bit. Those who answer work
    out what they need themselves. That the judge leaves what it knows as it was is asserted at the end of the block.
    """

    def __init__(self, op: str, inputs: Any) -> None:
        self._oracle, self._inputs = op_module("oracle", op), inputs
        self._truths: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._judged: list[tuple[Precision, Any, tuple[Check, ...]]] = []

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        changed = [asked for asked, (truth, first) in self._truths.items() if exactly(truth) != first]
        assert changed == []

    def judge(self, outputs: Any, precision: Precision) -> tuple[Check, ...]:
        """What the op's judge says of an answer to the call."""
        said = exactly(outputs)
        for known, other, checks in self._judged:
            if known == precision and other == said:
                return checks
        with pytest.MonkeyPatch.context() as patch:
            for name in _TRUTHS:
                if hasattr(self._oracle, name):
                    patch.setattr(self._oracle, name, self._once(getattr(self._oracle, name)))
            found: tuple[Check, ...] = self._oracle.judge(self._inputs, outputs, precision)
        self._judged.append((precision, said, found))
        return found

    def _once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def known(inputs: Any, *more: Any) -> Any:
            if inputs is not self._inputs:
                return function(inputs, *more)
            if (function, *more) not in self._truths:
                truth = function(inputs, *more)
                self._truths[function, *more] = truth, exactly(truth)
            return self._truths[function, *more][0]

        return known


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Any, Any], bool]:
    """Whether two answers are the same in every bit."""
    return lambda one, other: exactly(one) == exactly(other)


@pytest.fixture(scope="session")
def bench() -> type[Bench]:
    """The judge of an op at one call: `with bench(op, inputs) as judging: judging.judge(outputs, precision)`."""
    return Bench


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
