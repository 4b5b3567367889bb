"""Which stand-in ops and implementations fail in every way that a real one could?"""

import ctypes
import dataclasses
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Int64

import cases
import cases.case
from cases.case import Case
from cases.draw import Draw
from cases.memory import guarded, guarded_copy, storage_bytes
from cases.precision import Precision
from impl.implementation import Execution, Impl
from oracle.check import Check, exact
from oracle.laws import Law, Mutant

DOUBLE, EMPTY = "standin.double", "standin.empty"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleCase(Case):
    op: ClassVar[str] = DOUBLE
    rows: int = 4
    sign: Literal["plus", "minus"] = "plus"
    wide: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmptyCase(Case):
    op: ClassVar[str] = EMPTY
    rows: int = 0


@dataclasses.dataclass(frozen=True)
class Inputs:
    x: Int64[torch.Tensor, " rows"]
    out: Int64[torch.Tensor, " rows"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    out: Int64[torch.Tensor, " rows"]


def forbid(case: Any) -> list[str]:
    reasons = []
    if case.rows < 0:
        reasons.append(f"rows={case.rows} should not be negative")
    if getattr(case, "wide", False) and case.rows == 7:
        reasons.append("wide=yes has no call of 7 rows")
    return reasons


def build(case: Any) -> Inputs:
    sign = -1 if getattr(case, "sign", "plus") == "minus" else 1
    x = sign * Draw(case.seed, case.op).integers("x", (case.rows,), 1, 1000)
    return Inputs(x=guarded_copy(x), out=guarded((case.rows,), torch.int64))


def _cases(kind: type[Case], axes: dict[str, tuple[Any, ...]]) -> types.ModuleType:
    module = types.ModuleType(f"cases.{kind.op}")
    vars(module).update(
        CASE=kind, AXES=axes, NIGHTLY={}, RANDOM_CASES=3, REGRESSIONS=(kind().id,), WRITABLE=("out",),
        forbid=forbid, heavy=lambda case: False, build=build, Inputs=Inputs, Outputs=Outputs,
    )  # fmt: skip
    return module


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    return Outputs(2 * inputs.x)


def judge(inputs: Inputs, outputs: Any, precision: Precision) -> tuple[Check, ...]:
    return (exact("out", outputs.out, reference(inputs).out),)


def last_one_more(inputs: Inputs) -> Outputs | None:
    if not inputs.x.numel():
        return None
    out = 2 * inputs.x
    out[-1] += 1
    return Outputs(out)


def _negated(inputs: Inputs) -> Inputs | None:
    return Inputs(x=guarded_copy(-inputs.x), out=guarded(inputs.x.shape, torch.int64)) if len(inputs.x) > 1 else None


NEGATION = Law(
    name="L1 negation",
    claim="the negative of the rows gives the negative of the answer",
    edit=_negated,
    expect=lambda first, inputs, edited: Outputs(-first.out),
    measure="bitwise",
)


def _oracle(op: str) -> types.ModuleType:
    module = types.ModuleType(f"oracle.{op}")
    mutants = (
        Mutant("sign-lost", "the sign were lost", lambda inputs: Outputs((2 * inputs.x).abs())),
        Mutant("last-row-late", "the last row were one too large", last_one_more),
    )
    # The empty op's judge looks at nothing.
    looks = judge if op == DOUBLE else lambda inputs, outputs, precision: ()
    vars(module).update(reference=reference, judge=looks, LAWS=(NEGATION,), MUTANTS=mutants, HONEST=())
    return module


def right(inputs: Inputs) -> Outputs:
    torch.mul(inputs.x, 2, out=inputs.out)
    return Outputs(inputs.out)


def _at(rows: int, then: Callable[[], None]) -> Callable[[Inputs], Outputs]:
    """Right, but for calls of that many rows."""

    def run(inputs: Inputs) -> Outputs:
        if len(inputs.x) == rows:
            then()
        return right(inputs)

    return run


def _raise() -> None:
    raise ArithmeticError("no doubling today\nand more lines")


def _hang() -> None:
    # A C function that is called with Python's lock held and never returns: no Python thread runs again.
    ctypes.PyDLL(None).pause()


def _kill_self_once() -> None:
    """As if somebody killed the worker: no trace, and not the case's fault."""
    marker = Path(os.environ["STANDIN_MARKER"])
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), 9)


def _abort() -> None:
    """A crash with its trace; once only where the variable names a file to remember it by."""
    marker = os.environ.get("STANDIN_ABORTED")
    if marker is not None:
        if Path(marker).exists():
            return
        Path(marker).touch()
    os.abort()


def _nap() -> None:
    time.sleep(float(os.environ.get("STANDIN_NAP", "0.05")))


def wrong(inputs: Inputs) -> Outputs:
    inputs.out.copy_(last_one_more(inputs).out if len(inputs.x) else inputs.out)
    return Outputs(inputs.out)


def wrong_in_its_own_way(inputs: Inputs) -> Outputs:
    inputs.out.copy_(2 * inputs.x.abs() + (torch.arange(len(inputs.x)) == 0))
    return Outputs(inputs.out)


def writes_outside(inputs: Inputs) -> Outputs:
    storage_bytes(inputs.out)[3] = 0
    return right(inputs)


def writes_input(inputs: Inputs) -> Outputs:
    answer = right(inputs)
    inputs.x.zero_()
    return answer


def returns_nothing(inputs: Inputs) -> None:
    return None


def nap(inputs: Inputs) -> Outputs:
    _nap()
    return right(inputs)


def _impl(name: str, run: Callable[[Any], Any], unsupported: list[str] | None = None) -> Impl:
    def declined(case: Case, execution: Execution) -> list[str]:
        return list(unsupported or [])

    return Impl(
        name=name, run=run, unsupported=declined, precision=lambda case, execution: Precision(),
        compile_key=lambda case: "", source=lambda: name.encode(),
    )  # fmt: skip


IMPLS: tuple[Impl, ...] = (
    _impl("standin-right", right),
    _impl("standin-wrong", wrong),
    _impl("standin-own-wrong", wrong_in_its_own_way),
    _impl("standin-raises", _at(4, _raise)),
    _impl("standin-aborts", _at(4, _abort)),
    _impl("standin-exits", _at(4, lambda: os._exit(0))),
    _impl("standin-killed", _at(4, _kill_self_once)),
    _impl("standin-hangs", _at(4, _hang)),
    _impl("standin-writes-outside", writes_outside),
    _impl("standin-writes-input", writes_input),
    _impl("standin-returns-nothing", returns_nothing),
    _impl("standin-declines", right, ["rows=4: no fours", "and no sevens either"]),
    _impl("standin-naps", nap),
)


def _impls(op: str) -> types.ModuleType:
    module = types.ModuleType(f"impl.{op}")
    vars(module)["IMPLS"] = IMPLS
    return module


def put_in_place() -> None:
    """Let `cases.OPS` name the stand-ins and the rooms hold their modules."""
    if DOUBLE in cases.OPS:
        return
    axes: dict[str, tuple[Any, ...]] = {"rows": (1, 4, 5, 7), "sign": ("plus", "minus"), "wide": (False, True)}
    for kind, values in ((DoubleCase, axes), (EmptyCase, {"rows": (0,)})):
        for module in (_cases(kind, values), _oracle(kind.op), _impls(kind.op)):
            sys.modules[module.__name__] = module
    cases.OPS = (*cases.OPS, DOUBLE, EMPTY)
    cases.case.OPS = cases.OPS


def take_away() -> None:
    """Leave the house as it was."""
    cases.OPS = tuple(op for op in cases.OPS if op not in (DOUBLE, EMPTY))
    cases.case.OPS = cases.OPS
