"""How do the proofs of the judges read: which mutants are caught, how often, and where first?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from reports.html.rows import Spelling
from reports.prove import TIGHT, Kill, Proof
from reports.words import short

_ALARMS, _LONGEST_SENTENCE = 20, 600
# Where there are more mutants, those that are caught everywhere are told by a few axes of the case that caught them first,
# so that the page stays small.
_TOLD, _AXES = 400, 6


class ProofsError(ValueError):
    """A file that holds no proofs; the message says what would be right."""


def read_proofs(path: Path) -> tuple[Proof, ...]:
    """The proofs that `mla-oracle prove --out` wrote; raises `ProofsError` for any other file."""
    right = "it should be a file that `mla-oracle prove --out` wrote"
    try:
        proofs = msgspec.json.decode(path.read_bytes(), type=tuple[Proof, ...])
    except OSError as error:
        raise ProofsError(f"{path}: {error.strerror or error}; {right}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProofsError(f"{path}: {error}; {right}") from None
    twice = [proof.op for number, proof in enumerate(proofs) if proof.op in [other.op for other in proofs[:number]]]
    if twice:
        raise ProofsError(f"{path}: {twice[0]} is proven twice; {right}")
    return proofs


def is_large(proofs: Sequence[Proof]) -> bool:
    """Whether there are so many mutants that the page must save room."""
    return sum(len(proof.kills) for proof in proofs) > _TOLD


def kill_matrix(proofs: Sequence[Proof]) -> list[dict[str, Any]]:
    """A line for each op with the lines of its mutants, survivors and ops that do not hold first."""
    told = not is_large(proofs)
    lines = []
    for proof in sorted(proofs, key=lambda proof: (proof.holds, proof.op)):
        cases = [case for kill in proof.kills for case in (kill.caught_on, kill.missed_on) if case]
        cases += [alarm.case for alarm in proof.alarms]
        spelling = Spelling((proof.op, case) for case in cases)
        kills = sorted(proof.kills, key=lambda kill: (not kill.survives, kill.caught == kill.observable, kill.mutant))
        lines.append(
            {
                "op": proof.op,
                "level": proof.level,
                "holds": proof.holds,
                "kills": [_kill(kill, spelling, told) for kill in kills],
                "caught": sum(not kill.survives for kill in proof.kills),
                "survivors": [kill.mutant for kill in kills if kill.survives],
                "clean": proof.clean,
                "alarms": [(alarm, _case(alarm.case, proof.op, spelling)) for alarm in proof.alarms[:_ALARMS]],
                "alarmed": len(proof.alarms),
                "looseness": proof.median_looseness,
                "judged": len(proof.looseness),
                "loose": proof.median_looseness > TIGHT,
                "usual": dict(spelling.usual()).get(proof.op, []),
            }
        )
    return lines


def _kill(kill: Kill, spelling: Spelling, told: bool) -> dict[str, Any]:
    told = told or kill.survives or kill.caught < kill.observable
    return {
        "mutant": kill.mutant,
        "pitfall": kill.pitfall if told else "",
        "survives": kill.survives,
        "caught": kill.caught,
        "observable": kill.observable,
        "unobservable": kill.unobservable,
        "by": short(kill.caught_by, _LONGEST_SENTENCE) if told else "",
        "first": _case(kill.caught_on, kill.op, spelling, None if told else _AXES),
        "missed": _case(kill.missed_on, kill.op, spelling),
    }


def _case(case: str, op: str, spelling: Spelling, most: int | None = None) -> dict[str, Any] | None:
    if not case:
        return None
    differs = spelling.differs(op, case)
    left = differs[most:] if most is not None else ()
    shown = differs[: len(differs) - len(left)]
    return {"differs": shown, "hidden": len(spelling.words[case]) - len(differs), "law": "", "left": len(left)}
