"""Is a case id complete, and is every wrong one refused with what would be right?"""

import dataclasses
import sys
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
import cases.case
from cases import OPS, UnknownOp, op_module, ops_named
from cases.case import (
    Case,
    CaseError,
    impossible,
    is_optional,
    matches,
    parse,
    parse_pattern,
    read_axis,
    spell,
)

OP = "standin.spelled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpelledCase(Case):
    op: ClassVar[str] = OP
    heads: int = 16
    word: Literal["plain", "odd-one", "2.5", "e+3"] = "plain"
    size: Literal[1, 2, 64] = 2
    flag: bool = False


def forbid(case: Any) -> list[str]:
    reasons = ["heads should not be negative"] if case.heads < 0 else []
    return [*reasons, "flag=yes needs size=64"] if case.flag and case.size != 64 else reasons


@pytest.fixture(autouse=True)
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(f"cases.{OP}")
    vars(module).update(CASE=SpelledCase, forbid=forbid)
    monkeypatch.setitem(sys.modules, f"cases.{OP}", module)
    monkeypatch.setattr(cases, "OPS", (*OPS, OP))
    monkeypatch.setattr(cases.case, "OPS", cases.OPS)


def test_an_id_spells_every_axis_defaults_too_and_the_seed_last() -> None:
    assert SpelledCase().id == "standin.spelled:heads=16,word=plain,size=2,flag=no,seed=0"
    assert str(SpelledCase(flag=True, seed=9)) == "standin.spelled:heads=16,word=plain,size=2,flag=yes,seed=9"


@given(
    heads=st.integers(0, 10**17),
    word=st.sampled_from(["plain", "odd-one", "2.5", "e+3"]),
    size=st.sampled_from([1, 2, 64]),
    flag=st.booleans(),
    seed=st.integers(0, 10**17),
)
def test_an_id_is_read_back_as_the_case(heads: int, word: Any, size: Any, flag: bool, seed: int) -> None:
    case = SpelledCase(heads=heads, word=word, size=64 if flag else size, flag=flag, seed=seed)
    assert read_back(case.id) == case


def test_space_round_an_id_is_passed_over() -> None:
    assert read_back(f"  {SpelledCase().id}\n") == SpelledCase()


def read_back(text: str) -> Case:
    # hypothesis runs many examples within one test, so the patched house is asked through the module.
    return cases.case.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not a case id"),
        ("standin.spelled", "an id reads op:axis=value"),
        ("no.such:heads=1", "the ops are .*standin.spelled"),
        ("standin.spelled:", "'' is not axis=value"),
        ("standin.spelled:heads=16", "lacks word, size, flag, seed"),
        (
            "standin.spelled:heads=16,word=plain,size=2,flag=no,seed=0,hats=1",
            "no axis 'hats': its axes are heads, word",
        ),
        ("standin.spelled:heads=16,heads=3,word=plain,size=2,flag=no,seed=0", "heads is given twice"),
        ("standin.spelled:heads=many,word=plain,size=2,flag=no,seed=0", "heads=many is not an integer"),
        ("standin.spelled:heads=1e3,word=plain,size=2,flag=no,seed=0", "heads=1e3 is not an integer"),
        (
            "standin.spelled:heads=9999999999999999999,word=plain,size=2,flag=no,seed=0",
            "heads=9999999999999999999 is too large, should have at most 18 digits",
        ),
        ("standin.spelled:heads=16,word=loud,size=2,flag=no,seed=0", "should be one of plain, odd-one, 2.5"),
        ("standin.spelled:heads=16,word=plain,size=3,flag=no,seed=0", "should be one of 1, 2, 64"),
        ("standin.spelled:heads=16,word=plain,size=2,flag=True,seed=0", "flag=True should be yes or no"),
        ("standin.spelled:heads=16|17,word=plain,size=2,flag=no,seed=0", "is not an integer"),
        ("standin.spelled:heads=16,word=plain,size=2,flag=yes,seed=0", "impossible case: flag=yes needs size=64"),
        ("standin.spelled:heads=-1,word=plain,size=2,flag=no,seed=0", "impossible case: heads should not be negative"),
        ("standin.spelled:heads=16;rm,word=plain", "is not axis=value"),
        ("standin.spelled:__class__=1", "no axis|is not axis"),
    ],
)
def test_a_wrong_id_is_refused_with_what_would_be_right(text: str, sentence: str) -> None:
    with pytest.raises(CaseError, match=sentence):
        parse(text)


def test_a_long_wrong_id_is_not_repeated_whole() -> None:
    with pytest.raises(CaseError) as caught:
        parse("x" * 5000)
    assert "x" * 70 in str(caught.value)
    assert "x" * 90 not in str(caught.value)


def test_a_varied_case_changes_what_was_named_and_nothing_else() -> None:
    case = SpelledCase(seed=4)
    assert case.varied(heads=3, flag=True) == SpelledCase(heads=3, flag=True, seed=4)
    assert case == SpelledCase(seed=4)
    with pytest.raises(CaseError, match="no axis 'hats'"):
        case.varied(hats=3)
    with pytest.raises(CaseError, match="word=loud should be one of"):
        case.varied(word="loud")


def test_a_boolean_is_no_number_and_a_number_no_boolean() -> None:
    assert (spell(True), spell(False), spell(1)) == ("yes", "no", "1")
    with pytest.raises(CaseError):
        SpelledCase().varied(flag=1)
    with pytest.raises(CaseError):
        SpelledCase().varied(heads=True)


def test_an_axis_of_another_kind_is_a_mistake_of_the_op() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class FloatCase(Case):
        op: ClassVar[str] = "standin.float"
        scale: float = 1.0

    with pytest.raises(TypeError, match="an axis is an int, a bool or a Literal"):
        read_axis(FloatCase, "scale", "1.0")


def test_patterns_match_by_the_spelled_value() -> None:
    case = SpelledCase(heads=128)
    for text, fits in (
        ("heads=128", True),
        ("heads=16|128", True),
        ("heads=16", False),
        ("heads=0128", False),
        ("flag=no,word=plain", True),
        ("flag=no,word=odd-one", False),
        ("hats=1", False),
        ("standin.spelled:size=2", True),
        (case.id, True),
    ):
        assert matches(case, parse_pattern(text)) is fits, text


@pytest.mark.parametrize("text", ["", "heads", "heads=", "heads=1|", "=1", "heads=1,heads=2", "heads==1", "he ads=1"])
def test_a_wrong_pattern_is_refused(text: str) -> None:
    with pytest.raises(CaseError, match="case pattern"):
        parse_pattern(text)


def test_every_reason_is_given_at_once() -> None:
    assert len(impossible(SpelledCase(heads=-1, flag=True))) == 2


def test_ops_are_named_by_themselves_or_by_their_family() -> None:
    assert ops_named("formats.cast") == ("formats.cast",)
    assert set(ops_named("sparse_mla")) == {op for op in OPS if op.startswith("sparse_mla.")}
    with pytest.raises(UnknownOp, match=r"known families are .*sparse_mla"):
        ops_named("sparse")
    with pytest.raises(UnknownOp, match="known ops are"):
        op_module("oracle", "os.path")


def test_optional_annotations_are_told_apart() -> None:
    assert is_optional(int | None)
    assert not is_optional(int | str)
    assert not is_optional(int)
