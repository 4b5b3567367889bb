"""Which failures are known, who answers for them, and until when?

One TOML file of `[[known]]` entries. An entry excuses nothing after the day on which it expires, never a breakage of the
harness, and no status that it does not name: without `status` it speaks of `fail` and `error` alone. What passed after the
day on which it began was not what it knew of: that is a new failure, however wide its patterns are.
"""

import datetime
import fnmatch
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

import cases as rooms
from cases.case import Case, CaseError, case_type, parse_pattern, read_axis
from reports.execute import HARNESS
from reports.plan import AGAINST
from reports.policy import line_of, read_toml
from reports.record import Record
from reports.store import Key

# What an entry may excuse.
Excusable = Literal["fail", "memory", "error", "crash", "hang", "vacuous", "unsupported"]

# holds: excuses a failure. passing: of its cases none fails and one passes. failing: its cases fail, but with a status that
# it does not name. outlived: its cases fail, and all of them passed after it began. unmatched: no judged case is its.
# elsewhere: it speaks of an op, execution or architecture that this run did not ask. expired: whatever else is true of it.
State = Literal["holds", "passing", "failing", "outlived", "unmatched", "elsewhere", "expired"]

_RIGHT = "known failures: [[known]] tables with impl, op or case, issue, owner, since, expires, why"


class KnownError(ValueError):
    """A file of known failures that cannot be used; the message names line or entry and says what would be right."""


class Known(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known failure.

    impl, op, on, arch, law: shell patterns; arch is the record's architecture, `gfx950`. Without `law` the entry speaks
    of answers, not of laws; `*` is both. case: a case id, or axis=value|value,... as in `--case`. issue: an address.
    since, expires: days; the last day on which the entry excuses anything is `expires`. It speaks of what already failed on
    the day `since`.
    """

    impl: str
    op: str = "*"
    case: str = ""
    on: str = "*"
    arch: str = "*"
    law: str = ""
    status: Excusable | tuple[Excusable, ...] = ("fail", "error")
    issue: str
    owner: str
    since: datetime.date
    expires: datetime.date
    why: str

    @property
    def statuses(self) -> tuple[Excusable, ...]:
        """The statuses that the entry excuses."""
        return (self.status,) if isinstance(self.status, str) else self.status


KEYS = tuple(field.name for field in msgspec.structs.fields(Known))


@dataclass(frozen=True)
class Entry:
    """A known failure, the file and line where it begins, and what its case pattern asks for."""

    known: Known
    file: Path
    line: int
    wanted: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def place(self) -> str:
        """`known.toml line 12`."""
        return f"{self.file} line {self.line}" if self.line else str(self.file)

    def __str__(self) -> str:
        known = self.known
        limits = (
            ("op", known.op, "*"), ("case", known.case, ""), ("on", known.on, "*"), ("arch", known.arch, "*"),
            ("law", known.law, ""),
        )  # fmt: skip
        said = "".join(f" {name} {word}" for name, word, free in limits if word != free)
        return f"{known.impl}{said} ({', '.join(known.statuses)}; {known.owner}, {known.issue})"


@dataclass(frozen=True)
class Use:
    """What became of one entry in a run.

    excused: the failures it excuses, or would if it had not expired. otherwise: its cases that fail with a status that it
    does not name. outlived: those that passed after it began, which it does not excuse. passing: its cases that pass.
    """

    entry: Entry
    state: State
    excused: tuple[Record, ...] = ()
    otherwise: tuple[Record, ...] = ()
    outlived: tuple[Record, ...] = ()
    passing: int = 0


@dataclass(frozen=True)
class Overlap:
    """Two entries that speak of the same failures: of `shared` of the run, or, word for word, of any."""

    first: Entry
    second: Entry
    shared: int
    duplicate: bool


@dataclass(frozen=True)
class Application:
    """What the known failures say of a run.

    excuses: the entry that excuses the record of a key. outlived: of records of which only entries speak that are older
    than the day on which the case passed, the first of them.
    """

    excuses: Mapping[Key, Entry]
    outlived: Mapping[Key, Entry]
    uses: tuple[Use, ...]
    overlaps: tuple[Overlap, ...]


def counted_as(record: Record) -> str:
    """The status as rules count it: a lost device is a crash, whatever the record calls it."""
    return "crash" if record.infrastructure and record.status == "error" else record.status


def read_known(path: Path, today: datetime.date | None = None) -> tuple[Entry, ...]:
    """The entries of a file; raises `KnownError`, in one sentence that names the line of the entry where it is seen.

    today: the day, in UTC, on which entries must have begun.
    """
    day = today or datetime.datetime.now(datetime.UTC).date()
    text, raw = read_toml(path, KnownError, _RIGHT)
    for key in raw:
        if key != "known":
            raise KnownError(f"{line_of(path, text, key)}: unknown key {key!r}; the file holds [[known]] tables only")
    tables: Any = raw.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise KnownError(f"{line_of(path, text, 'known')}: known is no list of tables; it should be {_RIGHT}")
    heads = [n for n, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*known\s*\]\]", line)]
    lines = heads if len(heads) == len(tables) else [0] * len(tables)
    return tuple(
        _entry(path, text, number, line, table, day)
        for number, (line, table) in enumerate(zip(lines, tables, strict=True), 1)
    )


def _entry(path: Path, text: str, number: int, line: int, table: dict[str, Any], today: datetime.date) -> Entry:
    def refuse(key: str, sentence: str) -> KnownError:
        # Without its head's line an entry is named by its number: its keys may stand anywhere.
        place = (
            f"{path} entry {number}"
            if not line
            else line_of(path, text, key, line)
            if key in table
            else f"{path} line {line}"
        )
        return KnownError(f"{place}: {sentence}")

    for key in table:
        if key not in KEYS:
            raise refuse(key, f"unknown key {key!r}; the keys of an entry are {', '.join(KEYS)}")
    try:
        known = msgspec.convert(table, Known)
    except msgspec.ValidationError as error:
        sentence, _, place = str(error).partition(" - at `$")
        key = re.split(r"[.\[`]", place.removeprefix("."))[0]
        lacking = re.search(r"required field `(\w+)`", sentence)
        if lacking:
            raise refuse("", f"lacks {lacking[1]}: {_right(lacking[1])}") from None
        raise refuse(key, f"{key}: {sentence}; it should be {_right(key)}") from None
    for key in ("impl", "op", "on", "arch", "owner", "why", "issue"):
        if not getattr(known, key).strip():
            raise refuse(key, f"{key} is empty; it should be {_right(key)}")
    if not re.fullmatch(r"https?://[^\s/]+\S*", known.issue):
        raise refuse("issue", f"issue: {known.issue!r} is no address; it should be {_right('issue')}")
    if not known.statuses:
        raise refuse("status", f"status is empty; it should be {_right('status')}")
    if known.expires < known.since:
        raise refuse("expires", f"expires {known.expires}, before it began on {known.since}; it should be a later day")
    # East of Greenwich the next day begins earlier.
    if known.since > today + datetime.timedelta(days=1):
        raise refuse(
            "since", f"since {known.since} is still to come; it should be the day on which the failure was first seen"
        )
    try:
        wanted = tuple(sorted(parse_pattern(known.case).items())) if known.case else ()
    except CaseError as error:
        raise refuse("case", f"case: {error}; it should be {_right('case')}") from None
    own, colon, _ = known.case.partition(":")
    if colon and own not in rooms.OPS:
        raise refuse("case", f"case: unknown op {own!r}; the ops are {', '.join(rooms.OPS)}")
    fitting = [op for op in rooms.OPS if _pattern(known.op).match(op) and (not colon or op == own)]
    impossible = _impossible(wanted, fitting)
    if impossible:
        raise refuse("case", f"case: {impossible}")
    # A seed alone sets no case apart: every case has one.
    narrows = colon or any(axis != "seed" for axis, _ in wanted)
    if not narrows and len(fitting) == len(rooms.OPS):
        raise refuse("op", "excuses everything of its implementation; it should name an op or a case")
    families = dict.fromkeys(op.partition(".")[0] for op in fitting)
    if not narrows and len(families) > 1:
        raise refuse(
            "op",
            f"op: {known.op!r} fits ops of {', '.join(families)}; it should fit those of one family, or name a case",
        )
    if not narrows and len(fitting) > 1 and not set(AGAINST) - set(known.statuses):
        raise refuse(
            "status",
            f"status: excuses every status of {len(fitting)} ops; it should name an op, a case or the statuses that were seen",
        )
    return Entry(known, path, line, wanted)


def _impossible(wanted: Iterable[tuple[str, tuple[str, ...]]], ops: Sequence[str]) -> str:
    """The sentence about a word that no case of the ops can have on an axis of theirs; empty where there is none.

    An axis that none of them has may be one of an old record.
    """
    for axis, words in wanted:
        having = [kind for kind in map(case_type, ops) if axis in kind.axes()]
        for word in words if having else ():
            refusals = [_refusal(kind, axis, word) for kind in having]
            if all(refusals):
                return (
                    refusals[0] if len(having) == 1 else f"none of {len(having)} ops has {axis}={word}: {refusals[0]}"
                )
    return ""


def _refusal(kind: type[Case], axis: str, word: str) -> str:
    """Why a word is none of an op's axis; empty where it is one."""
    try:
        read_axis(kind, axis, word)
    except CaseError as error:
        return str(error)
    return ""


def _right(key: str) -> str:
    """What a key of an entry should hold."""
    words = {
        "impl": "an implementation or a pattern, such as vllm-*",
        "op": "an op or a pattern, such as sparse_mla.*",
        "case": "a case id, or axis=value|value,... as in --case",
        "status": "one or a list of fail, memory, error, crash, hang, vacuous, unsupported",
        "issue": "the address of an issue, https://...",
        "owner": "who answers for it",
        "since": "a day, 2026-01-31",
        "expires": "a day, 2026-01-31",
        "why": "what is wrong, in a sentence",
    }
    return words.get(key, "a name or a pattern")


@functools.lru_cache(maxsize=4096)
def _pattern(word: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(word))


def _speaks_of(entry: Entry, place: tuple[str, str, str, str, str]) -> bool:
    """Whether the entry's patterns fit an op, implementation, execution, architecture and law."""
    known = entry.known
    words = (known.op, known.impl, known.on, known.arch, known.law)
    own, colon, _ = known.case.partition(":")
    return (not colon or own == place[0]) and all(
        _pattern(word).match(name) for word, name in zip(words, place, strict=True)
    )


def _words_of(case: str) -> Mapping[str, str]:
    """What an id says of each axis; an old id may name axes that no op has any more."""
    return dict(part.partition("=")[::2] for part in case.partition(":")[2].split(","))


def _fits(entry: Entry, case: str, known: dict[str, Mapping[str, str]]) -> bool:
    """Whether the case has what the pattern asks for; `known` keeps the words of ids that were asked about."""
    if not entry.wanted:
        return True
    words = known.get(case)
    if words is None:
        words = known[case] = _words_of(case)
    return all(words.get(axis) in wanted for axis, wanted in entry.wanted)


def apply(
    entries: Sequence[Entry],
    records: Iterable[Record],
    today: datetime.date,
    passed: Mapping[Key, datetime.date] | None = None,
) -> Application:
    """What the entries say of the records, on that day. passed: the day on which the case of a key passed before."""
    passed = passed or {}
    by_place: dict[tuple[str, str, str, str, str], list[Record]] = {}
    for record in records:
        place = (record.op, record.impl, record.on, record.environment.arch, record.law)
        by_place.setdefault(place, []).append(record)
    excuses: dict[Key, Entry] = {}
    older_only: dict[Key, Entry] = {}
    words: dict[str, Mapping[str, str]] = {}
    uses: list[Use] = []
    holders: dict[Key, list[int]] = {}
    for number, entry in enumerate(entries):
        expired = today > entry.known.expires
        places = [place for place in by_place if _speaks_of(entry, place)]
        found = [record for place in places for record in by_place[place] if _fits(entry, record.case, words)]
        excused: list[Record] = []
        otherwise: list[Record] = []
        outlived: list[Record] = []
        passing = 0
        for record in found:
            status = counted_as(record)
            if status in entry.known.statuses and not any(why.startswith(HARNESS) for why in record.reasons):
                holders.setdefault(record.key, []).append(number)
                older = not expired and entry.known.since < passed.get(record.key, datetime.date.min)
                (outlived if older else excused).append(record)
                if not expired:
                    (older_only if older else excuses).setdefault(record.key, entry)
            elif status in AGAINST:
                otherwise.append(record)
            elif status == "pass":
                passing += 1
        state: State = (
            "expired" if expired
            else "holds" if excused
            else "outlived" if outlived
            else "failing" if otherwise
            else "passing" if passing
            else "elsewhere" if not found and _is_elsewhere(entry, by_place)
            else "unmatched"
        )  # fmt: skip
        uses.append(Use(entry, state, tuple(excused), tuple(otherwise), tuple(outlived), passing))
    alone = {key: entry for key, entry in older_only.items() if key not in excuses}
    return Application(excuses, alone, tuple(uses), _overlaps(entries, holders))


def _is_elsewhere(entry: Entry, places: Iterable[tuple[str, str, str, str, str]]) -> bool:
    """Whether the entry speaks of ops that there are, or of executions or architectures, that this run did not ask."""
    known = entry.known
    own, colon, _ = known.case.partition(":")
    ops = [op for op in rooms.OPS if _pattern(known.op).match(op) and (not colon or op == own)]
    asked = list(places)
    if not any(_pattern(known.on).match(on) and _pattern(known.arch).match(arch) for _, _, on, arch, _ in asked):
        return True
    return bool(ops) and not any(op in ops for op, *_ in asked)


def _overlaps(entries: Sequence[Entry], holders: Mapping[Key, Sequence[int]]) -> tuple[Overlap, ...]:
    shared: dict[tuple[int, int], int] = {}
    for numbers in holders.values():
        for pair in itertools.combinations(numbers, 2):
            shared[pair] = shared.get(pair, 0) + 1
    seen: dict[tuple[object, ...], int] = {}
    duplicates: set[tuple[int, int]] = set()
    for number, entry in enumerate(entries):
        known = entry.known
        own = known.case.partition(":")[0] if ":" in known.case else ""
        spelled = (known.impl, known.op, own, entry.wanted, known.on, known.arch, known.law, frozenset(known.statuses))
        first = seen.setdefault(spelled, number)
        if first != number:
            duplicates.add((first, number))
    return tuple(
        Overlap(entries[a], entries[b], shared.get((a, b), 0), (a, b) in duplicates)
        for a, b in sorted(shared.keys() | duplicates)
    )
