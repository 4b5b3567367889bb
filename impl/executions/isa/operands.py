"""What may stand in an operand's place: which registers, how many of them, or what else?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from impl.executions.isa.assembly import Operand

_FIRST_ACCUMULATION = 256
_LETTERS = {"s": "s", "constant": "c", "off": "o", "label": "l", "hwreg": "h"}
_FILES = {"v": "vector", "a": "accumulation", "s": "scalar"}
_OTHERS = {"c": "a constant", "o": "off", "l": "a label", "h": "a hardware register"}


@dataclass(frozen=True)
class Place:
    """A place in an instruction's list of operands.

    takes: a letter of each kind: `v`, `a`, `s` a vector, accumulation or scalar register, `c` a constant, `o` ``off``, `l` a
    label, `h` a hardware register. words: how many registers. only: the one name that may stand here. written: it is a result.
    signed, extended: of a source the sign may be changed, or it may be widened by its sign. limits: of a constant, the smallest
    and the largest.
    """

    takes: str
    words: int = 1
    only: str = ""
    written: bool = False
    signed: bool = False
    extended: bool = False
    limits: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.only:
            return self.only
        files = [name for letter, name in _FILES.items() if letter in self.takes]
        kinds = []
        if files:
            number = f"{self.words} " if self.words > 1 else "an " if files[0][0] == "a" else "a "
            kinds.append(f"{number}{' or '.join(files)} register{'s' if self.words > 1 else ''}")
        return " or ".join([*kinds, *(text for letter, text in _OTHERS.items() if letter in self.takes)])


def misfit(found: Sequence[Operand], places: Sequence[Place]) -> str:
    """Why operands are not those of an instruction, in one sentence; empty if they are."""
    if len(found) != len(places):
        return f"it has {len(found)} operand{'s' * (len(found) != 1)}: {len(places)} are known"
    return next((why for operand, place in zip(found, places, strict=True) if (why := _misfit(operand, place))), "")


def _misfit(operand: Operand, place: Place) -> str:
    letter = _letter(operand)
    if letter not in place.takes or (operand.count and operand.count != place.words):
        return f"{operand.text} should be {place}"
    if place.only and operand.text != place.only:
        return f"{operand.text} should be {place}"
    if place.written and operand.text in ("scc", "src_scc"):
        return f"{operand.text!r} cannot be written here"
    if (operand.negative or operand.absolute) and not place.signed:
        return f"the sign of {operand.text} cannot be changed here"
    if operand.sign_extended and not place.extended:
        return f"{operand.text} cannot be widened by its sign here"
    if place.limits is not None and letter == "c" and not place.limits[0] <= operand.value <= place.limits[1]:
        return f"{operand.text} should be between {place.limits[0]} and {place.limits[1]}"
    return ""


def _letter(operand: Operand) -> str:
    if operand.kind == "v":
        return "a" if operand.index >= _FIRST_ACCUMULATION else "v"
    return _LETTERS[operand.kind]
