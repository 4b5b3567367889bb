"""How does a plan that breaks a rule read in a report?"""

from collections.abc import Iterable
from typing import NamedTuple

from oracle.check import OFF_THE_SCALE, Check


class Finding(NamedTuple):
    """One breach: of what, at which place of its list, what stands there and what should."""

    what: str
    place: int
    got: str
    want: str


def plan_check(rule: str, count: int, findings: Iterable[Finding], why: str) -> Check:
    """The check of one rule over `count` things; its sentence is that of the first breach."""
    found = list(findings)
    if not found:
        return Check(output=rule, measure="plan", use=0.0, count=max(count, 1), got="kept", want="kept")
    first = found[0]
    return Check(
        output=first.what, measure="plan", use=OFF_THE_SCALE, wrong=len(found), count=max(count, len(found)),
        where=(first.place,), got=first.got, want=first.want, why=f"{why} ({rule}, {len(found)} breaches)",
    )  # fmt: skip
