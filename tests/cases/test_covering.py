"""Does the covering array cover what it says, and does its ledger tell the truth?"""

import dataclasses
import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest

import cases
import cases.case
import cases.covering as covering
from cases.case import Case, CaseError

OP = "standin.space"
WORDS = ("plain", "odd", "even")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpaceCase(Case):
    op: ClassVar[str] = OP
    heads: int = 1
    page: int = 1
    word: Literal["plain", "odd", "even"] = "plain"
    flag: bool = False
    length: int = 0


AXES: dict[str, tuple[Any, ...]] = {
    "heads": (1, 2, 3, 16),
    "page": (1, 2, 64),
    "word": WORDS,
    "flag": (False, True),
    "length": (0, 1, 5),
}


def free(case: Any) -> list[str]:
    return []


def compared(case: Any) -> list[str]:
    reasons = []
    for axis, low, high in (("heads", 1, 99), ("page", 1, 99), ("length", 0, 99)):
        if not low <= getattr(case, axis) <= high:
            reasons.append(axis)
    if case.flag and case.heads > 2:
        reasons.append(f"flag=yes, heads={case.heads}")
    if case.word == "odd" and case.page in (2, 64):
        reasons.append("odd pages")
    if case.word != "plain" and not case.flag:
        reasons.append("words need the flag")
    return reasons


def computed(case: Any) -> list[str]:
    """Arithmetic, hashing, string methods, formatting, types and axes against one another."""
    found = []
    if case.heads * case.page > 100 or (case.heads % 3 == 0 and max(case.length, case.page) < 5):
        found.append("product")
    if {"plain": 0, "odd": 1}.get(case.word, 2) == 2 and case.length > case.heads:
        found.append("look-up")
    if case.word.startswith("o") and f"{case.page}" == "1" and isinstance(case.flag, bool) and not case.flag:
        found.append("text")
    if case.heads == case.page and case.length in {1, 5}:
        found.append("equal axes")
    return found


def listed_at_once(case: Any) -> list[str]:
    """No list grows here: nothing can be given up early."""
    pairs = (("flag", case.flag and case.heads != 1), ("word", case.word == "even" and case.length == 0))
    return [name for name, bad in pairs if bad]


def delegated(case: Any) -> list[str]:
    names = ["a local list of words", "that is no list of reasons"]
    reasons = compared(case)
    if case.length == 5 and case.heads == 16:
        reasons.append(names[0])
    return reasons


Install = Callable[..., ModuleType]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def put(forbid: Callable[[Any], list[str]] = free, **other: Any) -> ModuleType:
        module = ModuleType(f"cases.{OP}")
        held = {
            "CASE": SpaceCase, "AXES": AXES, "NIGHTLY": {}, "RANDOM_CASES": 5, "REGRESSIONS": (), "forbid": forbid,
            "heavy": lambda case: False,
        }  # fmt: skip
        vars(module).update(held | other)
        monkeypatch.setitem(sys.modules, f"cases.{OP}", module)
        monkeypatch.setattr(cases, "OPS", (*cases.OPS, OP))
        monkeypatch.setattr(cases.case, "OPS", cases.OPS)
        covering._array.cache_clear()
        return module

    yield put
    covering._array.cache_clear()


def every_case(module: ModuleType, nightly: bool = False) -> list[SpaceCase]:
    axes = {**module.AXES, **(module.NIGHTLY if nightly else {})}
    every = (SpaceCase(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
    return [case for case in every if not module.forbid(case) and (nightly or not module.heavy(case))]


def tuples(found: list[Any], ways: int) -> set[tuple[tuple[str, Any], ...]]:
    return {
        tuple((axis, getattr(case, axis)) for axis in axes)
        for case in found
        for axes in itertools.combinations(AXES, ways)
    }


FORBIDS = pytest.mark.parametrize("forbid", [free, compared, computed, listed_at_once, delegated])


@FORBIDS
@pytest.mark.parametrize(("level", "ways"), [("smoke", 1), ("default", 2), ("nightly", 3)])
def test_every_tuple_that_brute_force_finds_possible_is_covered(
    install: Install, forbid: Any, level: Any, ways: int
) -> None:
    module = install(forbid)
    possible = every_case(module, nightly=level == "nightly")
    chosen = covering.covering_cases(OP, level)
    assert tuples(list(chosen), ways) == tuples(possible, ways)
    assert all(not module.forbid(case) for case in chosen)


@FORBIDS
def test_the_ledger_counts_what_brute_force_counts(install: Install, forbid: Any) -> None:
    module = install(forbid)
    found = covering.ledger(OP, "default", covering.covering_cases(OP, "default"))
    possible = len(tuples(every_case(module), 2))
    total = sum(len(AXES[a]) * len(AXES[b]) for a, b in itertools.combinations(AXES, 2))
    assert (found.total, found.covered, found.impossible) == (total, possible, total - possible)
    assert (found.missed, found.undecided, found.share) == (0, 0, 1.0)


@FORBIDS
def test_the_search_decides_every_triple_as_brute_force_does(install: Install, forbid: Any) -> None:
    module = install(forbid)
    possible = tuples(every_case(module), 3)
    space, rng = covering.Space(OP, "default"), random.Random(1)
    for axes in itertools.combinations(range(len(space.axes)), 3):
        for choice in itertools.product(*(range(len(space.values[axis])) for axis in axes)):
            fixed = tuple(zip(axes, choice, strict=True))
            outcome, row = space.settle(fixed, (), rng)
            named = tuple((space.axes[axis], space.values[axis][index]) for axis, index in fixed)
            assert outcome == ("possible" if named in possible else "impossible"), named
            if row is not None:
                assert space.admits(row)
                assert all(row[axis] == index for axis, index in fixed)


def test_a_dropped_case_is_missed_by_name(install: Install) -> None:
    install(compared)
    chosen = covering.covering_cases(OP, "default")
    found = covering.ledger(OP, "default", [case for case in chosen if case.heads != 16])
    assert found.missed == len(
        tuples([c for c in chosen if c.heads == 16], 2) - tuples([c for c in chosen if c.heads != 16], 2)
    )
    assert any(text.startswith("missed: heads=16,") for text in found.examples)
    assert found.share < 1


def test_a_search_that_is_cut_short_says_undecided(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(compared)
    monkeypatch.setattr(covering, "_QUESTIONS", (1,))
    monkeypatch.setattr(covering, "_GENERATOR_STRENGTH", 0)
    found = covering.ledger(OP, "default", covering.covering_cases(OP, "default"))
    assert found.undecided > 0
    assert found.covered + found.undecided + found.impossible + found.missed == found.total
    assert any(text.startswith("undecided: ") for text in found.examples)
    assert f"{found.undecided} undecided" in str(found)


def test_a_reason_that_stands_ends_the_search_below_it(install: Install) -> None:
    """What the predicate would go on to ask, twelve more questions here, must not multiply the proof."""

    def forbid(case: Any) -> list[str]:
        reasons = []
        if case.flag and case.word == "odd":
            reasons.append("the pair")
        late = ((1, 2, 3, 16)[number % 4] == case.heads and case.page > number % 3 for number in range(12))
        reasons.extend("something else" for bad in late if bad and case.length > 1)
        return reasons

    install(forbid)
    space = covering.Space(OP, "default")
    pair = ((space.axes.index("word"), 1), (space.axes.index("flag"), 1))
    assert space._search.complete(pair, (0,) * 5, 1)[0] == "impossible"


def test_heavy_cases_wait_for_the_nightly_sweep(install: Install) -> None:
    install(heavy=lambda case: case.heads * case.page > 100)
    for level in ("smoke", "default"):
        assert all(case.heads * case.page <= 100 for case in covering.covering_cases(OP, level))
    assert any(case.heads * case.page > 100 for case in covering.covering_cases(OP, "nightly"))
    assert covering.ledger(OP, "default", covering.covering_cases(OP, "default")).impossible == 3


def test_nightly_values_are_asked_at_night_only(install: Install) -> None:
    install(NIGHTLY={"heads": (1, 128)})
    assert {case.heads for case in covering.covering_cases(OP, "default")} == {1, 2, 3, 16}
    assert {case.heads for case in covering.covering_cases(OP, "nightly")} == {1, 128}


def test_cases_of_an_array_have_seeds_of_their_own(install: Install) -> None:
    install()
    first, second = (covering.covering_cases(OP, "default", seed) for seed in (0, 1))
    assert len({case.seed for case in (*first, *second)}) == len(first) + len(second)
    assert [c.varied(seed=0) for c in first] == [c.varied(seed=0) for c in second]


def test_random_cases_depend_on_the_seed_alone_and_obey(install: Install) -> None:
    module = install(computed)
    first = covering.random_cases(OP, 40, seed=3)
    assert first == covering.random_cases(OP, 40, seed=3)
    assert first[:7] == covering.random_cases(OP, 7, seed=3)
    assert first != covering.random_cases(OP, 40, seed=4)
    assert len({case.varied(seed=0) for case in first}) > 20
    assert not any(module.forbid(case) for case in first)


def test_a_needle_of_a_case_is_found_by_random_cases_too(install: Install) -> None:
    only = SpaceCase(heads=3, page=64, word="even", flag=True, length=5)

    def forbid(case: Any) -> list[str]:
        return [axis for axis in AXES if getattr(case, axis) != getattr(only, axis)]

    install(forbid)
    assert {case.varied(seed=0) for case in covering.random_cases(OP, 3, seed=0)} == {only}
    assert len(covering.covering_cases(OP, "default")) == 1


def test_a_space_without_a_case_is_an_error(install: Install) -> None:
    install(lambda case: ["never"])
    with pytest.raises(CaseError, match="no combination of AXES passes"):
        covering.covering_cases(OP, "default")


def test_regressions_are_asked_first_and_must_be_readable(install: Install) -> None:
    known = SpaceCase(heads=2, seed=77).id
    module = install(REGRESSIONS=(known,))
    every = covering.sweep_cases(OP, "default")
    assert every[0].id == known
    assert len({case.id for case in every}) == len(every)
    module.REGRESSIONS = (known.replace("heads", "hats"),)
    with pytest.raises(CaseError, match="hats"):
        covering.regressions(OP)


def test_smoke_asks_no_random_cases_and_nightly_more(install: Install) -> None:
    install()
    for level, share in (("smoke", 0), ("default", 5), ("nightly", 20)):
        assert len(covering.sweep_cases(OP, level)) <= len(covering.covering_cases(OP, level)) + share
    assert len(covering.sweep_cases(OP, "smoke")) == 4


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({**AXES, "hats": (1,)}, "hats"),
        ({**AXES, "heads": ()}, "empty or repeats"),
        ({**AXES, "heads": (1, 1)}, "empty or repeats"),
        ({**AXES, "word": ("loud",)}, "word=loud should be one of"),
    ],
)
def test_axes_that_do_not_fit_the_case_are_refused(install: Install, axes: Any, sentence: str) -> None:
    install(AXES=axes)
    with pytest.raises(CaseError, match=sentence):
        covering.covering_cases(OP, "default")


def test_an_array_is_much_smaller_than_its_space(install: Install) -> None:
    install()
    assert len(covering.covering_cases(OP, "default")) < 20


def test_arrays_do_not_depend_on_the_process() -> None:
    script = (
        "from cases.covering import sweep_cases; import hashlib;"
        "print(hashlib.sha256('\\n'.join(c.id for c in sweep_cases('formats.cast', 'default')).encode()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}, cwd=".",
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1


@pytest.mark.parametrize("op", ["formats.cast", "cache.kv_record_write", "cache.kv_gather_dequant"])
def test_every_pair_of_a_real_op_is_decided_and_covered(op: str) -> None:
    found = covering.ledger(op, "default", covering.covering_cases(op, "default"))
    assert (found.missed, found.undecided) == (0, 0), found.examples
    assert found.covered > 0
