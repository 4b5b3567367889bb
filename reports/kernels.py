"""Was any Triton kernel judged, and if not, why?"""

from collections import Counter
from collections.abc import Sequence

from reports.record import Record

# Gluon is Triton's too. An implementation is named for the language of its kernels.
_LANGUAGES = frozenset({"triton", "gluon"})
_NO_TRITON = "triton is not installed"


def is_triton(impl: str) -> bool:
    """Whether an implementation of this name launches Triton kernels: `<library>-triton...`."""
    return not _LANGUAGES.isdisjoint(impl.split("-"))


def judges_kernels(records: Sequence[Record]) -> bool:
    """Whether one of the records is the answer of a Triton kernel."""
    return any(record.status != "unsupported" and is_triton(record.impl) for record in records)


def no_kernel_judged(records: Sequence[Record]) -> str:
    """`No Triton kernel was judged: ...`, and why; empty where one was, or where none was asked but a device's others."""
    if not records or judges_kernels(records):
        return ""
    silent = [record for record in records if is_triton(record.impl)]
    if not silent and any(record.on != "interpreter" for record in records):
        return ""
    return f"No Triton kernel was judged: {_why(silent)}."


def _why(silent: Sequence[Record]) -> str:
    """That there is no Triton, if one of them says so, for it is the reader's to change; else what most of them say."""
    if not silent:
        return "none was asked"
    if any(_NO_TRITON in record.reasons for record in silent):
        return _NO_TRITON
    reasons = Counter(reason for record in silent for reason in record.reasons[:1])
    (reason, _), *_ = reasons.most_common(1) or [("no reason was given", 0)]
    return reason.rstrip(".")
