"""Which failures are the same failure?"""

import hashlib
import re
from collections.abc import Iterable

from oracle.check import Check
from reports.record import Record
from reports.words import short

_LONGEST = 400


def complaint(record: Record) -> str:
    """What went wrong in the fewest words: the diagnosis, or the reason of the worst check, or the first reason."""
    if record.diagnosis and "as if " in record.diagnosis[0]:
        return short(record.diagnosis[0], _LONGEST)
    worst: Check | None = max(record.checks, key=lambda check: check.use, default=None)
    if worst is not None and not worst.passed:
        return short(f"{worst.output}: {worst.why}", _LONGEST)
    if record.reasons:
        lines = record.reasons[0].strip().splitlines()
        return short(lines[0], _LONGEST) if lines else "no reason given"
    if record.status == "vacuous" and worst is not None:
        return str(worst) if worst.count == 0 else "no mutant of the op would have been caught on this case"
    return "no reason given"


def without_numbers(text: str) -> str:
    """The text with numbers replaced, so that two elements of one fault read alike; names such as M3 stay."""
    return re.sub(r"0x[0-9a-fA-F]+|(?<![\w.])[-+±]?\d[\d.,]*(?:e[-+]?\d+)?(?![A-Za-z_])", "#", text)


def fingerprint(words: Iterable[str]) -> str:
    """Eight characters that are the same for the same words in every run."""
    return hashlib.sha256("\n".join(words).encode(errors="replace")).hexdigest()[:8]


def failure_fingerprint(record: Record) -> str:
    """The same for the same kind of failure of an op and implementation, whatever the case and the run."""
    return fingerprint((record.status, record.op, record.impl, without_numbers(complaint(record))))
