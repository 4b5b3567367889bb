"""What becomes of the sweep's cases when a user's own function is asked them?

Every case goes the way of the sweep (`reports.execute.attempt`), in this process; the function is the implementation.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import torch

import cases as rooms
from cases import op_module
from cases.case import Case, CaseError, parse
from cases.covering import LEVELS, Level
from cases.precision import UNIT_ROUNDOFF, Precision
from impl.executions import interpreter
from impl.implementation import EXECUTIONS, Execution, Impl, implementations
from impl.sources.execution import refuse_mismatch
from impl.sources.source_tree import SourceError
from reports.environment import default_execution, environment, unavailable
from reports.execute import Trial, attempt, device_is_dead
from reports.foreign_message import about_rounding, message
from reports.foreign_precision import could_be_rounding, rounding_that_explains
from reports.laws import spoken
from reports.plan import AGAINST, CASES_OF_A_LAW, MOST_BUILT, Selection, SelectionError, plan
from reports.record import Record

# Of how many failures it is asked whether a rounding point that nobody declared explains them; each costs judgements.
_EXPLAINED = 3

Outside = Callable[[], AbstractContextManager[None]]


class Misuse(Exception):
    """What was asked for cannot be; the message says what would be right."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """All records; the message when a case failed or none was judged; the sentence when nothing sensible can be done."""

    records: tuple[Record, ...] = ()
    message: str = ""
    misuse: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """The keywords of `reports.check`, as they were given."""

    cases: str = "smoke"
    case: str | Sequence[str] = ()
    on: str | None = None
    precision: Any = None
    unsupported: Callable[..., Any] | None = None
    laws: bool = False
    by_shape: bool = False
    most: int = 20


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked of whom.

    only: case ids, of which alone the function is asked, whatever the selection. outside: open while code of the user
    runs.
    """

    op: str
    function: Callable[[Any], Any]
    how: How
    only: tuple[str, ...]
    outside: Outside

    @property
    def name(self) -> str:
        """The function's own name, as a word."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def answer(
    op: str,
    function: Callable[[Any], Any],
    how: Mapping[str, Any],
    again: Callable[[str, str], str],
    only: tuple[str, ...],
    outside: Outside,
) -> Answer:
    """Ask every selected case, then say what came of it; see `reports.foreign.ask`."""
    known = [field.name for field in dataclasses.fields(How)]
    try:
        strangers = [name for name in how if name not in known]
        if strangers:
            raise Misuse(f"there is no keyword {strangers[0]!r}: there are {', '.join(known)}")
        return _answer(Question(op, function, How(**how), only, outside), again)
    except (Misuse, SelectionError, CaseError, rooms.UnknownOp) as mistake:
        return Answer(misuse=" ".join(str(mistake).split()))


def _answer(question: Question, again: Callable[[str, str], str]) -> Answer:
    chosen = _chosen(question)
    if not chosen:
        return Answer()
    asking = _Asking(question)
    records: list[Record] = []
    inexact: list[Trial] = []
    stopped = ""
    for case, law in _with_laws(question, chosen, records):
        trial = asking.trial(case, law)
        records.append(trial.record)
        if not law and len(inexact) < _EXPLAINED and could_be_rounding(trial.record):
            inexact.append(trial)
        if trial.record.status == "error" and device_is_dead(asking.on):
            stopped = "the device answers no more after this case, so no other was asked"
            break
    found = tuple(records)
    failed = [record for record in found if record.status in AGAINST]
    judged = [record for record in found if record.status != "unsupported"]
    if judged and not failed:
        return Answer(found)
    about = message(question.op, question.name, found, question.how.most, again, stopped)
    if inexact:
        about += "\n\n" + about_rounding(inexact, rounding_that_explains(inexact))
    return Answer(found, about)


def _chosen(question: Question) -> tuple[Case, ...]:
    """The cases to ask; none when `only` names cases of other ops alone."""
    op = question.op
    if op not in rooms.OPS:
        raise Misuse(f"unknown op {op!r}: the ops are {', '.join(rooms.OPS)}")
    if question.how.cases not in LEVELS:
        raise Misuse(f"cases={question.how.cases!r}: should be one of {', '.join(LEVELS)}")
    if isinstance(question.how.most, bool) or not isinstance(question.how.most, int) or question.how.most < 1:
        raise Misuse(f"most={question.how.most!r}: should be a number of failures to show, 1 or more")
    _takes_inputs(question)
    if question.only:
        return tuple(case for case in map(parse, question.only) if case.op == op)
    chosen = question.how.case
    if not isinstance(chosen, str | Sequence):
        raise Misuse(f"case={chosen!r}: should be a case id or axis=value|value,..., or a list of them")
    patterns = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    for text in patterns:
        if not isinstance(text, str):
            raise Misuse(f"case={text!r}: should be a case id, or axis=value|value,...")
        named, colon, _ = text.partition(":")
        if colon and named != op:
            raise Misuse(f"case={text!r}: is about {named}, but should be about {op}")
    planned = plan(
        Selection(ops=(op,), impls=(implementations(op)[0].name,), level=_level(question), patterns=patterns)
    )
    return tuple(map(parse, dict.fromkeys(task.case for task in planned.tasks)))


def _level(question: Question) -> Level:
    return next(level for level in LEVELS if level == question.how.cases)


def _takes_inputs(question: Question) -> None:
    """Raises `Misuse` for what cannot be called with one argument."""
    function = question.function
    if not callable(function):
        raise Misuse(f"{function!r} is no function: should take the inputs of {question.op} and return its outputs")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin that does not say: it is called, and what it raises is its error.
        return
    try:
        signature.bind(None)
    except TypeError:
        takes, gives = _form(question.op)
        raise Misuse(
            f"{question.name}{signature} cannot be called with one argument: should take the inputs of {question.op}, "
            f"an object with the fields {', '.join(takes)}, and return a dict of {', '.join(gives)}"
        ) from None


def _form(op: str) -> tuple[list[str], list[str]]:
    """The names of the fields of an op's inputs and outputs."""
    hints = typing.get_type_hints(op_module("oracle", op).judge)
    return tuple(  # type: ignore[return-value]
        [field.name for field in dataclasses.fields(hints[part])] if dataclasses.is_dataclass(hints[part]) else []
        for part in ("inputs", "outputs")
    )


def _with_laws(question: Question, chosen: Sequence[Case], records: Sequence[Record]) -> Iterator[tuple[Case, str]]:
    """Every case, then every law on a few of those that were answered."""
    for case in chosen:
        yield case, ""
    if not question.how.laws:
        return
    silent = {record.case for record in records if record.status == "unsupported"}
    answered = [case for case in chosen if case.id not in silent]
    if answered:
        for case, laws in spoken(question.op, answered, CASES_OF_A_LAW[_level(question)], MOST_BUILT):
            for law in laws:
                yield case, law


class _Asking:
    """Puts cases to the function."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self.on = _execution(question.how.on)
        self._watched, self._refused = _interpreting(self.on)
        self._environment = environment(self.on)
        self._source = _source_of(question.function)
        hint = typing.get_type_hints(op_module("oracle", question.op).judge).get("outputs")
        self._outputs: Any = hint if dataclasses.is_dataclass(hint) else None

    def trial(self, case: Case, law: str) -> Trial:
        """One case, or one law on it, the way of the sweep."""
        reasons = [*self._refused, *self._reasons(case)]
        declared = self._precision(case) if not reasons else Precision()
        said: list[str] = []
        answering = Impl(
            name=self._question.name,
            run=lambda inputs: self._run(inputs, said),
            unsupported=lambda case, on: reasons,
            precision=lambda case, on: declared,
            compile_key=lambda case: "",
            source=lambda: self._source,
            by_shape=self._question.how.by_shape,
            interpreted=self._watched,
            # A wrapper that a user writes for a test may hand over what its library allocates.
            allocates=True,
        )
        trial = attempt(case, answering, self.on, self._environment, law=law)
        if not said:
            return trial
        # The sentence names what the user did; the exception, only that this module noticed.
        return dataclasses.replace(trial, record=msgspec.structs.replace(trial.record, reasons=tuple(said)))

    def _run(self, inputs: Any, said: list[str]) -> Any:
        function = self._question.function
        try:
            with self._question.outside():
                returned = function(inputs)
        except Exception as error:
            kernel = _compiled_kernel(error) if self.on == "interpreter" else None
            if kernel is not None:
                said.append(
                    f"{self._question.name} launched the compiled Triton kernel {kernel} on the CPU, without a device: "
                    "Triton's interpreter needs TRITON_INTERPRET=1 in the environment before the kernel is decorated; "
                    "pytest sets it with --oracle-on interpreter"
                )
            raise
        outputs, mistake = _as_outputs(returned, self._outputs)
        if mistake:
            said.append(f"{self._question.name} returned {mistake}")
            raise TypeError(mistake)
        return outputs

    def _reasons(self, case: Case) -> list[str]:
        declared = self._question.how.unsupported
        if declared is None:
            return []
        if not callable(declared):
            raise Misuse(f"unsupported={declared!r}: should be a function of a case that returns a list of reasons")
        found = self._asked_of_user("unsupported", declared, case)
        if found is None:
            return []
        if isinstance(found, str) or not isinstance(found, Sequence) or not all(isinstance(one, str) for one in found):
            raise Misuse(f"unsupported returned {found!r}: should be a list of reasons, empty where there is none")
        return list(found)

    def _precision(self, case: Case) -> Precision:
        declared = self._question.how.precision
        own = implementations(case.op)[0].precision(case, self.on)
        if callable(declared) and not isinstance(declared, msgspec.Struct):
            declared = self._asked_of_user("precision", declared, case)
        if declared is None:
            return own
        if isinstance(declared, msgspec.Struct):
            declared = msgspec.structs.asdict(declared)
        if not isinstance(declared, Mapping):
            raise Misuse(
                f"precision={declared!r}: should be a dict of rounding points, such as {{'query': 'bfloat16'}}"
            )
        points = msgspec.structs.asdict(own)
        unknown = [name for name in declared if name not in points]
        if unknown:
            raise Misuse(f"precision has no rounding point {unknown[0]!r}: there are {', '.join(points)}")
        try:
            return msgspec.convert({**points, "note": "", **declared}, Precision)
        except msgspec.ValidationError as error:
            raise Misuse(
                f"precision={dict(declared)!r}: {error}; a format is one of {', '.join(UNIT_ROUNDOFF)}"
            ) from None

    def _asked_of_user(self, what: str, function: Callable[..., Any], case: Case) -> Any:
        try:
            with self._question.outside():
                return function(case)
        except Exception as error:
            raise Misuse(
                f"{what} raised {type(error).__name__} for {case.id}: {str(error).partition(chr(10))[0]}; "
                "it should take a case, whose axes are its attributes"
            ) from error


def _execution(word: str | None) -> Execution:
    if word is None:
        return "interpreter" if _interpret_is_set() else default_execution()
    found = next((each for each in EXECUTIONS if each == word), None)
    if found is None:
        raise Misuse(f"on={word!r}: should be one of {', '.join(EXECUTIONS)}")
    if found == "interpreter":
        return found
    reasons = unavailable(found)
    if reasons:
        raise Misuse(f"on={word!r}: {'; '.join(reasons)}")
    try:
        refuse_mismatch(found)
    except SourceError as error:
        raise Misuse(str(error).replace("execution=", "on=", 1)) from error
    return found


def _interpret_is_set() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _interpreting(on: Execution) -> tuple[bool, list[str]]:
    """Whether kernels run watched in the repaired interpreter, and why nothing may run in one that cannot be repaired."""
    if on != "interpreter" or importlib.util.find_spec("triton") is None:
        return False, []
    if "triton" not in sys.modules:
        # Nothing is decorated yet, and without a device nothing else could run.
        os.environ["TRITON_INTERPRET"] = "1"
    reasons = interpreter.unsupported()
    if not reasons:
        return True, []
    return False, reasons if _decorated_for_interpreting() else []


def _decorated_for_interpreting() -> bool:
    standard = sys.modules.get("triton.language.standard")
    return type(getattr(standard, "cdiv", None)).__name__ == "InterpretedFunction"


def _compiled_kernel(error: BaseException) -> str | None:
    """The name of the compiled kernel in whose launch an exception rose, if it was one."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "run" and frame.f_globals.get("__name__") == "triton.runtime.jit":
            return str(getattr(frame.f_locals.get("self"), "__name__", "of that launch"))
    return None


def _source_of(function: Callable[..., Any]) -> bytes:
    """The bytes of the function's module, or what else is known of its code."""
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    try:
        return Path(inspect.getfile(inspect.unwrap(plain))).read_bytes()
    except (OSError, TypeError):
        code = getattr(plain, "__code__", None)
        return code.co_code if isinstance(code, types.CodeType) else repr(type(plain)).encode()


def _as_outputs(returned: Any, kind: Any) -> tuple[Any, str]:
    """The op's outputs that a returned value means; or what it is and should be."""
    if kind is None:
        return returned, ""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    needed = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    free = [name for name in fields if name not in needed]
    right = f"should be {kind.__name__}, or a dict of {', '.join(needed) or 'some of ' + ', '.join(free)}"
    if needed and free:
        right += f", and of {', '.join(free)} as it has them"
    if isinstance(returned, Mapping):
        given = dict(returned)
    elif isinstance(returned, torch.Tensor) and len(needed) == 1:
        given = {needed[0]: returned}
    elif dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        given = {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    else:
        return None, f"{type(returned).__name__}, but {right}"
    strangers, missing = [name for name in given if name not in fields], [name for name in needed if name not in given]
    if strangers or missing:
        said = f"an unknown output {strangers[0]!r}" if strangers else f"no output {missing[0]!r}"
        return None, f"{said}, but {right}"
    hints = typing.get_type_hints(kind)
    for name, value in given.items():
        want = _misfit(value, hints[name])
        if want:
            return None, f"{name}={type(value).__name__}, but {name} should be {want}"
    return returned if isinstance(returned, kind) else kind(**given), ""


def _misfit(value: Any, hint: Any) -> str:
    """What a value should be, when it is nothing of the sort; shapes and dtypes are the judge's."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = [getattr(option, "array_type", typing.get_origin(option) or option) for option in options]
    if not all(isinstance(kind, type) for kind in kinds):
        return ""
    fits = any(isinstance(value, (kind, int) if kind is float else kind) for kind in kinds)
    return "" if fits else " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
