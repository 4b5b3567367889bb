"""How is a case spelled, read back and matched?"""

import dataclasses
import re
import types
import typing
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

from cases import OPS, op_module

Axis: typing.TypeAlias = int | str | bool

_WORD = re.compile(r"[A-Za-z0-9_.+-]+")


class CaseError(ValueError):
    """A case id or pattern that cannot be read; the message says what is wrong and what would be right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One question to an op: a value for every axis, and the seed that every random draw derives from.

    A subclass per op declares the axes as fields annotated `int`, `bool` or a `Literal` of words. The id spells all of
    them, defaults too, so that a changed default never changes what an old record means.
    """

    op: ClassVar[str]
    seed: int = 0

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        """The names of the fields in the order of the id: the op's own axes, then `seed`."""
        own = [field.name for field in dataclasses.fields(cls) if field.name != "seed"]
        return (*own, "seed")

    @property
    def settings(self) -> dict[str, Axis]:
        """Axis name to value, in the order of the id."""
        return {axis: getattr(self, axis) for axis in self.axes()}

    @property
    def id(self) -> str:
        """The complete, shell-safe spelling, `sparse_mla.decode:heads=128,...,seed=3`; `parse` gives the case back."""
        return f"{self.op}:" + ",".join(f"{axis}={spell(value)}" for axis, value in self.settings.items())

    def __str__(self) -> str:
        return self.id

    def varied(self, **changes: Axis) -> Self:
        """The same case with some axes changed; raises `CaseError` for an unknown axis or a value outside its type."""
        unknown = sorted(set(changes) - set(self.axes()))
        if unknown:
            raise CaseError(f"{self.op} has no axis {unknown[0]!r}: its axes are {', '.join(self.axes())}")
        for axis, value in changes.items():
            read_axis(type(self), axis, spell(value))
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def spell(value: Axis) -> str:
    """One axis value as a shell-safe word: booleans are `yes` and `no`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


@lru_cache(None)
def _annotations(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def read_axis(kind: type[Case], axis: str, word: str) -> Axis:
    """The value that `word` spells on `axis` of the op; raises `CaseError` with the words that would be right."""
    own: Any = kind
    annotation = _annotations(own)[axis]
    if annotation is int:
        if re.fullmatch(r"0|-?[1-9][0-9]{0,17}", word):
            return int(word)
        if re.fullmatch(r"-?[1-9][0-9]+", word):
            raise CaseError(f"{kind.op}: {axis}={word} is too large, should have at most 18 digits")
        raise CaseError(f"{kind.op}: {axis}={word} is not an integer without leading zeros")
    if annotation is bool:
        if word in ("yes", "no"):
            return word == "yes"
        raise CaseError(f"{kind.op}: {axis}={word} should be yes or no")
    if typing.get_origin(annotation) is Literal:
        for option in typing.get_args(annotation):
            if spell(option) == word:
                return typing.cast(Axis, option)
        raise CaseError(
            f"{kind.op}: {axis}={word} should be one of {', '.join(spell(option) for option in typing.get_args(annotation))}"
        )
    raise TypeError(f"{kind.__name__}.{axis}: an axis is an int, a bool or a Literal, not {annotation}")


def case_type(op: str) -> type[Case]:
    """The `Case` subclass of `op`; raises `cases.UnknownOp`."""
    return typing.cast(type[Case], op_module("cases", op).CASE)


def parse(text: str) -> Case:
    """The case that an id spells.

    Raises `CaseError` when the op is unknown, an axis is missing, repeated, unknown or has an impossible value, and when
    the op's own constraints forbid the combination.
    """
    op, colon, rest = text.strip().partition(":")
    if not colon or op not in OPS:
        raise CaseError(
            f"not a case id: {_quoted(text)}; an id reads op:axis=value,...,seed=0 and the ops are {', '.join(OPS)}"
        )
    kind = case_type(op)
    words = _pairs(rest, what=f"case id of {op}")
    unknown = [axis for axis in words if axis not in kind.axes()]
    if unknown:
        raise CaseError(f"{op} has no axis {unknown[0]!r}: its axes are {', '.join(kind.axes())}")
    missing = [axis for axis in kind.axes() if axis not in words]
    if missing:
        raise CaseError(f"{op}: the id lacks {', '.join(missing)}; an id spells every axis")
    case = kind(**{axis: read_axis(kind, axis, word) for axis, word in words.items()})  # type: ignore[arg-type]
    reasons = impossible(case)
    if reasons:
        raise CaseError(f"{op}: impossible case: {'; '.join(reasons)}")
    return case


def impossible(case: Case) -> list[str]:
    """Every reason why the op's constraints forbid this combination of axis values; empty when it is a real question."""
    reasons = ["seed should not be negative"] if case.seed < 0 else []
    return [*reasons, *op_module("cases", case.op).forbid(case)]


def outside(case: Case, bounds: typing.Mapping[str, tuple[int, int]]) -> list[str]:
    """A reason for every axis whose number is not within its bounds, both ends included; for an op's `forbid`."""
    reasons = []
    for axis, (low, high) in bounds.items():
        value = getattr(case, axis)
        if not low <= value <= high:
            reasons.append(f"{axis}={spell(value)} should be {low} to {high}")
    return reasons


def parse_pattern(text: str) -> dict[str, tuple[str, ...]]:
    """`heads=128|16,values=needle` as axis to the accepted words; raises `CaseError`. An id without its op matches too."""
    _, colon, rest = text.partition(":")
    return {axis: tuple(word.split("|")) for axis, word in _pairs(rest if colon else text, what="case pattern").items()}


def matches(case: Case, pattern: typing.Mapping[str, tuple[str, ...]]) -> bool:
    """Whether every axis of the pattern is one of the case's and has one of the accepted words."""
    settings = case.settings
    return all(axis in settings and spell(settings[axis]) in words for axis, words in pattern.items())


def _pairs(text: str, what: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(","):
        axis, equals, word = part.strip().partition("=")
        if not equals or not axis.isidentifier() or not all(_WORD.fullmatch(w) for w in word.split("|")):
            raise CaseError(f"{what}: {_quoted(part)} is not axis=value")
        if axis in pairs:
            raise CaseError(f"{what}: {axis} is given twice")
        pairs[axis] = word
    return pairs


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def is_optional(annotation: object) -> bool:
    """Whether a field's annotation admits None."""
    return typing.get_origin(annotation) in (types.UnionType, typing.Union) and type(None) in typing.get_args(
        annotation
    )
