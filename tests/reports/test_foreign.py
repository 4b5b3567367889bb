"""Is a function of the user's own asked and judged as an implementation is, and does it hear what is wrong?"""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from oracle.sparse_mla.decode import HONEST
from reports import CheckFailed, CheckMisuse, check, execute, foreign_cases
from reports.record import Record

DOUBLE, RAGGED, DECODE = "standin.double", "sparse_mla.ragged_from_dense", "sparse_mla.decode"
HERE = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _placed(standins: ModuleType) -> None:
    """The stand-in ops are there."""


def refused(function: Callable[[Any], Any], op: str = DOUBLE, **how: Any) -> tuple[str, tuple[Record, ...]]:
    with pytest.raises(CheckFailed) as caught:
        check(op, function, **how)
    return str(caught.value), caught.value.records


def pack(inputs: Any) -> dict[str, torch.Tensor]:
    indices = inputs.indices.flatten(1)
    keep = (torch.arange(indices.shape[1]) < inputs.lengths[:, None]) & (indices >= 0)
    if inputs.num_rows >= 0:
        keep &= indices < inputs.num_rows
    kept = indices[keep]
    inputs.flat[: len(kept)] = kept.to(torch.int32)
    inputs.indptr[:1] = 0
    inputs.indptr[1:] = keep.sum(1).cumsum(0)
    return {"flat": inputs.flat, "indptr": inputs.indptr}


def test_a_right_function_passes_and_its_records_come_back(standins: ModuleType) -> None:
    records = check(DOUBLE, standins.right)
    assert {record.status for record in records} == {"pass"}
    assert {(record.impl, record.on, record.op) for record in records} == {("right", "interpreter", DOUBLE)}
    assert len({record.case for record in records}) == len(records) > 3
    assert all(len(record.source) == 64 and record.environment.torch for record in records)


def test_more_is_asked_at_a_higher_level_and_less_with_a_pattern(standins: ModuleType) -> None:
    smoke, default = check(DOUBLE, standins.right), check(DOUBLE, standins.right, cases="default")
    assert len(smoke) < len(default)
    chosen = check(DOUBLE, standins.right, cases="default", case=["rows=5", "rows=7,sign=minus"])
    assert {record.case.partition(",wide")[0] for record in chosen} == {
        f"{DOUBLE}:rows=5,sign=plus", f"{DOUBLE}:rows=5,sign=minus", f"{DOUBLE}:rows=7,sign=minus",
    }  # fmt: skip
    (one,) = check(DOUBLE, standins.right, case=f"{DOUBLE}:rows=77,sign=plus,wide=no,seed=4")
    assert one.case.endswith("rows=77,sign=plus,wide=no,seed=4")


def test_a_failure_says_what_is_wrong_as_what_fault_and_how_to_see_it_again(standins: ModuleType) -> None:
    said, records = refused(standins.wrong, cases="default")
    headline, _, heading, sentence, again, *_ = said.splitlines()
    failed = [record for record in records if record.status == "fail"]
    assert headline == f"{DOUBLE}: {len(failed)} failed of {len(records)} cases: wrong on interpreter"
    assert heading == f"as if the last row were one too large (last-row-late): {len(failed)} of {len(failed)}"
    assert sentence == f"  {failed[0].checks[0]}"
    assert again == f"    again: check({DOUBLE!r}, wrong, case={failed[0].case!r})"
    assert refused(standins.wrong, case=failed[0].case)[0].startswith(f"{DOUBLE}: 1 failed of 1 case: ")


def test_so_many_failures_are_shown_some_of_every_kind(standins: ModuleType) -> None:
    def wrong(inputs: Any) -> Any:
        if len(inputs.x) == 5:
            raise ArithmeticError("no fives")
        return standins.wrong(inputs)

    said, records = refused(wrong, cases="default", most=2)
    assert said.count("again: ") == 2
    fives = sum(record.status == "error" for record in records)
    others = len(records) - fives
    assert f"last-row-late): {others} of {len(records)}" in said
    assert "ArithmeticError: no fives (test_foreign.py:" in said
    assert f"  and {others - 1} more" in said
    assert f"  and {fives - 1} more" in said


def test_declared_reasons_are_counted_and_nothing_judged_is_no_pass(standins: ModuleType) -> None:
    def no_fives(case: Any) -> list[str]:
        return ["rows=5: no fives"] if case.rows == 5 else []

    records = check(DOUBLE, standins.right, cases="default", unsupported=no_fives)
    assert {record.reasons for record in records if record.status == "unsupported"} == {("rows=5: no fives",)}
    said, _ = refused(standins.wrong, cases="default", unsupported=no_fives)
    declined = sum("rows=5" in record.case for record in records)
    assert f"({declined} not answered)" in said
    assert said.endswith(f"not answered: rows=5: no fives ({declined})")
    said, _ = refused(standins.right, unsupported=lambda case: ["never"])
    assert "was judged, so this is no pass: right on interpreter" in said


def test_laws_are_asked_too_where_they_are_wanted(standins: ModuleType) -> None:
    assert not any(record.law for record in check(DOUBLE, standins.right))
    assert any(record.law for record in check(DOUBLE, standins.right, laws=True))

    def signless(inputs: Any) -> Any:
        return standins.Outputs((2 * inputs.x).abs())

    said, records = refused(signless, case="sign=plus", laws=True, cases="default")
    assert {record.law for record in records if record.status == "fail"} == {"L1 negation"}
    assert "law L1 negation is broken: " in said
    assert "questions about laws" in said


def test_what_was_said_of_the_function_reaches_the_trial(standins: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def attempt(case: Any, impl: Any, *known: Any, **named: Any) -> Any:
        seen.append((impl.by_shape, impl.interpreted, impl.source()))
        return execute.attempt(case, impl, *known, **named)

    monkeypatch.setattr(foreign_cases, "attempt", attempt)
    check(DOUBLE, standins.right, case="rows=4", by_shape=True)
    check(DOUBLE, functools.partial(standins.right), case="rows=4")
    source = Path(str(standins.__file__)).read_bytes()
    assert dict.fromkeys(seen) == dict.fromkeys([(True, True, source), (False, True, source)])


@pytest.mark.parametrize(
    ("name", "status", "sentence"),
    [
        ("writes_outside", "memory", "bytes were written outside its elements"),
        ("writes_input", "memory", "were written though it is an input"),
    ],
)
def test_memory_is_guarded(standins: ModuleType, name: str, status: str, sentence: str) -> None:
    said, records = refused(getattr(standins, name))
    assert status in {record.status for record in records}
    assert sentence in said


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda inputs: None, "lambda returned NoneType, but should be Outputs, or a dict of flat, indptr"),
        (lambda inputs: {"flat": inputs.flat}, "returned no output 'indptr', but should be Outputs, or a dict of"),
        (lambda inputs: {**pack(inputs), "out": 1}, "returned an unknown output 'out', but should be Outputs"),
        (lambda inputs: {**pack(inputs), "flat": 3}, "lambda returned flat=int, but flat should be Tensor"),
        (lambda inputs: inputs.flat, "returned Tensor, but should be Outputs, or a dict of flat, indptr"),
    ],
)
def test_a_wrong_kind_of_answer_is_one_sentence(function: Callable[[Any], Any], sentence: str) -> None:
    said, records = refused(function, RAGGED, case="rows=2,width=6", most=1)
    assert sentence in said
    assert {record.status for record in records} == {"error"}


def test_an_answer_may_be_the_outputs_a_dict_or_any_dataclass_of_the_same_fields() -> None:
    @dataclasses.dataclass
    class Mine:
        flat: torch.Tensor
        indptr: torch.Tensor

    for function in (pack, lambda inputs: Mine(**pack(inputs))):
        assert {record.status for record in check(RAGGED, function, case="rows=2,width=6")} == {"pass"}

    def decoded(inputs: Any) -> torch.Tensor:
        return inputs.source.view(torch.float8_e8m0fnu).to(inputs.out.dtype)

    assert check("formats.cast", decoded, case="format=float8_e8m0fnu,direction=decode")


def test_a_rounding_that_was_not_declared_is_named_and_can_be_declared() -> None:
    answer = next(way for way in HONEST if way.name == "scaled-query-in-bf16").answer
    case = (
        "sparse_mla.decode:arch=gfx950,compute_units=256,queries=1,heads=8,main_length=17,extra_length=-1,rows=full,"
        "invalid=none,duplicates=none,splits=0,adaptive=no,sink=moderate,main_encoding=float8_e4m3fn,"
        "extra_encoding=float8_e4m3fn,main_block=64,extra_block=64,block_stride=page,form=ragged,integers=int32,"
        "rotation=none,output=bfloat16,layout=contiguous,trust_extra=no,values=randn,garbage=nan,reach=near,seed=0"
    )
    said, _ = refused(answer, DECODE, case=case)
    assert "judged by the rounding points score float32, query exact, " in said
    assert "1 of the 1 failures looked at would pass with precision={'query': 'bfloat16'}: if your kernel " in said
    for declared in ({"query": "bfloat16"}, lambda asked: {"query": "bfloat16"} if asked.heads else None):
        (record,) = check(DECODE, answer, case=case, precision=declared)
        assert record.status == "pass"
        assert record.precision is not None
        # What is not declared stays as our own kernel's on this execution.
        assert (record.precision.query, record.precision.exponential_ulps) == ("bfloat16", 1.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"op": "nope"}, "unknown op 'nope': the ops are formats.cast, "),
        ({"function": 3}, "3 is no function: should take the inputs of standin.double"),
        (
            {"function": lambda query, cache: None},
            "lambda(query, cache) cannot be called with one argument: should take the inputs of standin.double, an object",
        ),
        ({"cases": "loud"}, "cases='loud': should be one of smoke, default, nightly"),
        ({"case": "rows=3"}, "case pattern 'rows=3': no smoke case has rows=3; there are "),
        ({"case": "rows"}, "case pattern: 'rows' is not axis=value"),
        ({"case": "hats=1"}, "case pattern 'hats=1': no axis 'hats' in standin.double"),
        ({"case": f"{DOUBLE}:rows=4,seed=0"}, "standin.double: the id lacks sign, wide"),
        ({"case": "formats.cast:count=1"}, "is about formats.cast, but should be about standin.double"),
        ({"case": 3}, "case=3: should be a case id or axis=value|value,..., or a list of them"),
        ({"case": [3]}, "case=3: should be a case id, or axis=value|value,..."),
        ({"on": "moon"}, "on='moon': should be one of interpreter, cuda, hip"),
        ({"on": "hip"}, "on='hip': torch "),
        ({"precision": 3}, "precision=3: should be a dict of rounding points"),
        ({"precision": {"quarry": "bfloat16"}}, "precision has no rounding point 'quarry': there are score, query"),
        ({"precision": {"query": "bf16"}}, "precision={'query': 'bf16'}: Invalid enum value 'bf16'"),
        ({"precision": lambda case: case.hats}, "precision raised AttributeError for standin.double:"),
        ({"unsupported": 3}, "unsupported=3: should be a function of a case that returns a list of reasons"),
        ({"unsupported": lambda case: "no"}, "unsupported returned 'no': should be a list of reasons"),
        ({"unsupported": lambda case: 1 / 0}, "unsupported raised ZeroDivisionError for standin.double:"),
        ({"most": 0}, "most=0: should be a number of failures to show, 1 or more"),
    ],
)
def test_a_misuse_is_one_sentence(standins: ModuleType, arguments: dict[str, Any], sentence: str) -> None:
    how = {"op": DOUBLE, "function": standins.right, **arguments}
    with pytest.raises(CheckMisuse) as caught:
        check(how.pop("op"), how.pop("function"), **how)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("nonsense", "not a case id: 'nonsense'"),
        (f"{RAGGED}:rows=4,seed=0", f"{RAGGED}: the id lacks width, form, "),
    ],
)
def test_a_case_asked_alone_is_read_like_every_id(standins: ModuleType, case: str, sentence: str) -> None:
    answer = foreign_cases.answer(DOUBLE, standins.right, {}, lambda case, name: "", (case,), contextlib.nullcontext)
    assert answer.misuse.startswith(sentence)


def test_a_device_is_not_asked_of_kernels_that_are_interpreted(
    standins: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_cases, "unavailable", lambda on: [])
    with pytest.raises(CheckMisuse, match="on=cuda: TRITON_INTERPRET should not be set"):
        check(DOUBLE, standins.right, on="cuda")


def test_nothing_is_judged_in_an_interpreter_that_cannot_be_corrected(
    standins: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "triton 9.9.0: the faithful interpreter covers 3.6 to 3.9"
    monkeypatch.setattr(foreign_cases.interpreter, "unsupported", lambda: [reason])
    said, records = refused(standins.right)
    assert f"not answered: {reason} ({len(records)})" in said


def test_after_the_device_died_nothing_more_is_asked(standins: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_cases, "device_is_dead", lambda on: True)
    said, records = refused(lambda inputs: 1 / 0)
    assert len(records) == 1
    assert "the device answers no more after this case, so no other was asked" in said


def test_an_interrupt_is_the_users(standins: ModuleType) -> None:
    def interrupted(inputs: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(DOUBLE, interrupted)


def test_the_import_costs_nothing() -> None:
    script = (
        "import sys; from reports import check, CheckFailed; "
        "found = {'torch', 'numpy', 'pytest', 'msgspec', 'cases', 'impl', 'oracle'} & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(HERE)})


OF_A_USER = """
import pytest


def untouched(inputs):
    return {"flat": inputs.flat, "indptr": inputs.indptr}


def test_records(oracle_check):
    with pytest.raises(pytest.fail.Exception) as caught:
        oracle_check("sparse_mla.ragged_from_dense", untouched, case="width=6")
    assert "fail" in {record.status for record in caught.value.records}
    assert all(record.op == "sparse_mla.ragged_from_dense" for record in caught.value.records)


def test_misuse(oracle_check):
    with pytest.raises(pytest.fail.Exception) as caught:
        oracle_check("sparse_mla.nothing", untouched)
    assert caught.value.records == ()
"""


def test_a_failure_of_the_fixture_has_its_records(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(OF_A_USER)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    done = subprocess.run(
        [*command, "-p", "reports.mla_oracle_pytest"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
