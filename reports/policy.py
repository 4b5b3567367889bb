"""What closes the gate, and where is that written down?"""

import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from oracle.check import OFF_THE_SCALE

# What a rule does once it applies: the gate closes, or the finding is only said.
Action = Literal["close", "report"]
# The statuses that can count against a run.
Against = Literal["fail", "memory", "error", "crash", "hang", "vacuous"]
AGAINST: tuple[Against, ...] = get_args(Against)


class PolicyError(ValueError):
    """A policy file that cannot be used; the message says which key is wrong and what would be right."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What closes the gate; `DEFAULT_TEXT` says what each key means.

    error_growth: "close", "report", or the largest ratio of budget use to the baseline's that leaves the gate open.
    """

    implementations: tuple[str, ...] = ("*",)
    ops: tuple[str, ...] = ("*",)
    statuses: tuple[Against, ...] = AGAINST
    unfinished: Action = "close"
    nothing_judged: Action = "close"
    retried: Action = "report"
    coverage_lost: Action = "close"
    unsupported_where_supported: Action = "close"
    error_growth: Action | float = "close"
    environment_changed: Action = "report"
    expired_known: Action = "close"
    passing_known: Action = "report"
    unmatched_known: Action = "report"
    overlapping_known: Action = "report"
    changed_known: Action = "report"
    newly_failing_known: Action = "close"

    def action(self, rule: str) -> Action:
        """Whether a rule closes the gate; `statuses` closes for those that it names, a ratio of `error_growth` closes."""
        chosen = getattr(self, rule)
        return "report" if chosen == "report" else "close"

    @property
    def switched_off(self) -> tuple[str, ...]:
        """What closes the gate by default and does not here, or never can, `status hang` for a status."""
        lenient = (f"status {status}" for status in Policy().statuses if status not in self.statuses)
        silent = (key for key in KEYS if getattr(self, key) == "report" != getattr(Policy(), key))
        # No growth has a larger ratio than this.
        growth = self.error_growth
        return (
            *lenient,
            *silent,
            *(["error_growth"] if not isinstance(growth, str) and growth >= OFF_THE_SCALE else []),
        )


KEYS = tuple(field.name for field in msgspec.structs.fields(Policy))

DEFAULT_TEXT = """\
# What closes the gate: mla-oracle gate RUN --policy gate.toml
# A key that is left out has the value that stands here. "close" closes the gate, "report" only says it. What closes it here
# and is switched off in a policy is named with the outcome.

# Whom and what the gate looks at. Shell patterns: ["ours-*", "vllm-*"], ["sparse_mla.*"]. Records outside are not judged.
implementations = ["*"]
ops = ["*"]

# The statuses that close the gate. One that is left out is reported and lets the gate open. A lost device counts as crash.
statuses = ["fail", "memory", "error", "crash", "hang", "vacuous"]

# A planned case without a record: the run is still being written, or was killed.
unfinished = "close"

# No case was judged: everything was unsupported, or no implementation or op fits the patterns above.
nothing_judged = "close"

# A crash, a hang or a lost device that was asked once more, however it ended then. A numeric failure is never asked again.
retried = "report"

# These four compare with --baseline RUN, and are said to be not applied without one.

# A case of the baseline was judged there and was not asked here, or passes here with a check less or one no longer exact.
coverage_lost = "close"

# A case was judged in the baseline, and here the implementation says that it is unsupported.
unsupported_where_supported = "close"

# Budget use moved, median or tail, per op and implementation. "close": any growth that the test of `mla-oracle diff`
# finds. A number, such as 1.5: a growth that the test finds closes only beyond this ratio, and is reported below it. A ratio of
# 1e9 or more, which no growth can have, is this check switched off.
error_growth = "close"

# Another torch, triton, architecture, device, driver, vLLM, AITER or mla-oracle than in the baseline. It is a note in every
# output unless it closes.
environment_changed = "report"

# These speak of the entries of --known known.toml.

# An entry that has expired. It excuses nothing any more, whatever stands here.
expired_known = "close"

# An entry of which every case now passes: delete it.
passing_known = "report"

# An entry that matches no case of the run.
unmatched_known = "report"

# Two entries that speak of the same case.
overlapping_known = "report"

# A known failure that fails otherwise than it did in the baseline: it may hide another one.
changed_known = "report"

# A known failure whose case passed in the baseline: a new failure, which an entry does not excuse that is older than the day
# on which the case passed. "report": it is excused, and said.
newly_failing_known = "close"
"""


def read_policy(path: Path) -> Policy:
    """The policy of a TOML file; raises `PolicyError`, in one sentence that names line and key where there is one."""
    text, raw = read_toml(path, PolicyError, "a policy as `mla-oracle gate --write-policy FILE` writes it")
    for key in raw:
        if key not in KEYS:
            raise PolicyError(f"{line_of(path, text, key)}: unknown key {key!r}; the keys are {', '.join(KEYS)}")
    try:
        policy = msgspec.convert(raw, Policy)
    except msgspec.ValidationError as error:
        sentence, _, place = str(error).partition(" - at `$.")
        key = re.split(r"[.\[`]", place)[0]
        raise PolicyError(f"{line_of(path, text, key)}: {key}: {sentence}; it should be {_right(key)}") from None
    for key in ("implementations", "ops", "statuses"):
        if not getattr(policy, key):
            raise PolicyError(f"{line_of(path, text, key)}: {key} is empty; it should be {_right(key)}")
        if "" in getattr(policy, key):
            raise PolicyError(f"{line_of(path, text, key)}: {key} holds an empty word; it should be {_right(key)}")
    growth = policy.error_growth
    if isinstance(growth, float) and not (math.isfinite(growth) and growth >= 1):
        raise PolicyError(
            f"{line_of(path, text, 'error_growth')}: error_growth: {growth:g}; it should be {_right('error_growth')}"
        )
    return policy


def _right(key: str) -> str:
    """What a key should hold."""
    if key == "statuses":
        return f"a list out of {', '.join(AGAINST)}"
    if key in ("implementations", "ops"):
        return 'a list of names or patterns, such as ["ours-*"]'
    if key == "error_growth":
        return '"close", "report", or a ratio of 1 or more'
    return '"close" or "report"'


def read_toml(path: Path, refused: type[ValueError], right: str) -> tuple[str, dict[str, Any]]:
    """Text and content of a TOML file; raises `refused` in one sentence."""
    if not path.is_file():
        there = "is no file" if path.exists() else "no such file"
        raise refused(f"{path}: {there}; it should be {right}")
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise refused(f"{path}: byte {error.start} is no UTF-8; it should be {right}") from None
    except tomllib.TOMLDecodeError as error:
        raise refused(f"{path}: {' '.join(str(error).split())}; it should be TOML, {right}") from None
    except RecursionError:
        raise refused(f"{path}: is nested too deeply; it should be {right}") from None


def line_of(path: Path, text: str, key: str, first: int = 1) -> str:
    """`gate.toml line 4` for the first line from `first` on that sets `key`; the file alone when none is seen."""
    setting = re.compile(rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    for number, line in enumerate(text.splitlines(), 1):
        if key and number >= first and setting.match(line):
            return f"{path} line {number}"
    return str(path)
