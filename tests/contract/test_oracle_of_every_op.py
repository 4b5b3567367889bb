"""Does every op's judge pass what is right, catch every wrong answer it names, and do its laws hold and have teeth?"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from cases import OPS, op_module
from cases.case import Case
from cases.covering import sweep_cases
from cases.memory import trespasses
from cases.precision import Precision
from oracle.check import Check
from oracle.laws import Honest, Law
from reports.laws import kept, law_named, spoken

Some = Callable[[str, int], list[Case]]
Bench = Callable[[str, Any], Any]
HYPHENATED = re.compile(r"[a-z0-9]+(-[a-z0-9.+]+)*")
every_op = pytest.mark.parametrize("op", OPS)


def oracle(op: str) -> ModuleType:
    return op_module("oracle", op)


def build(case: Case) -> Any:
    return op_module("cases", case.op).build(case)


def failed(checks: Iterable[Check]) -> list[str]:
    return [str(check) for check in checks if not check.passed]


def right_of(op: str) -> Honest:
    """The way of computing from which the mutants depart."""
    way: Honest = oracle(op).HONEST[0]
    return way


@every_op
def test_names_are_unique_and_clauses_end_their_sentence(op: str) -> None:
    laws, mutants, honest = oracle(op).LAWS, oracle(op).MUTANTS, oracle(op).HONEST
    assert laws and mutants and honest
    for named in (laws, mutants, honest):
        names = [one.name for one in named]
        assert len(set(names)) == len(names)
    assert [one.name for one in (*mutants, *honest) if not HYPHENATED.fullmatch(one.name)] == []
    # "as if ..." goes on in the middle of a sentence; a claim is contradicted at its end.
    assert [one.name for one in mutants if not re.fullmatch(r"(?![A-Z][a-z]+\b)\S.+[^.\s]", one.pitfall)] == []
    assert [law.name for law in laws if not re.fullmatch(r"[A-Z][0-9]+ \S.+[^.\s]", f"{law.name} {law.claim}")] == []
    assert (oracle(op).__doc__ or "").strip()


@every_op
def test_the_reference_leaves_its_inputs_alone_and_says_the_same_again(
    op: str, some: Some, same_bits: Callable[[Any, Any], bool]
) -> None:
    for case in some(op, 40):
        inputs = build(case)
        assert same_bits(oracle(op).reference(inputs), oracle(op).reference(inputs)), case.id
        assert trespasses(build(case), inputs, ()) == [], case.id


@every_op
def test_right_answers_pass_and_leave_their_inputs_alone(op: str, some: Some, bench: Bench) -> None:
    answered = set()
    for case in some(op, max(12, 90 // len(oracle(op).HONEST))):
        inputs = build(case)
        with bench(op, inputs) as judging:
            for way in oracle(op).HONEST:
                answer = way.answer(inputs)
                if answer is None:
                    assert way is not right_of(op), case.id
                    continue
                answered.add(way.name)
                checks = judging.judge(answer, way.declared(inputs))
                assert checks, (way.name, case.id)
                assert failed(checks) == [], (way.name, case.id)
        assert trespasses(build(case), inputs, ()) == [], case.id
    assert answered == {way.name for way in oracle(op).HONEST}


@every_op
def test_laws_hold_of_the_right_way_and_speak_in_the_default_sweep(op: str) -> None:
    # Its answers to both calls are held against the reference, so of the reference too.
    right, asked = right_of(op), set()
    for case, names in spoken(op, sweep_cases(op, "default"), 4, 120):
        inputs = build(case)
        first = right.answer(inputs)
        for law in [law_named(op, name) for name in names]:
            asked.add(law.name)
            edited = law.edit(inputs)
            second, precision = right.answer(edited), right.declared(edited)
            checks = oracle(op).judge(edited, second, precision)
            if law.measure == "bitwise":
                checks += kept(law, inputs, first, edited, second, oracle(op).judge, precision)
            assert failed(checks) == [], (law.name, case.id)
        assert trespasses(build(case), inputs, ()) == [], case.id
    assert asked == {law.name for law in oracle(op).LAWS}


def bends(op: str, law: Law, case: Case, bench: Bench) -> bool:
    """Whether some wrong answer to the edited call alone breaks the law."""
    inputs = build(case)
    edited = law.edit(inputs)
    right, first = right_of(op), right_of(op).answer(inputs)
    precision = right.declared(edited)
    with bench(op, edited) as judging:

        def judge(_: Any, outputs: Any, declared: Precision) -> tuple[Check, ...]:
            checks: tuple[Check, ...] = judging.judge(outputs, declared)
            return checks

        for mutant in oracle(op).MUTANTS:
            wrong = mutant.answer(edited)
            if wrong is not None and failed(kept(law, inputs, first, edited, wrong, judge, precision)):
                return True
    return False


@every_op
def test_every_law_is_broken_by_a_fault_that_comes_with_the_edit(op: str, bench: Bench) -> None:
    unbroken = {law.name: law for law in oracle(op).LAWS}
    for case, names in spoken(op, sweep_cases(op, "default"), 4, 120):
        for name in unbroken.keys() & names:
            if bends(op, unbroken[name], case, bench):
                del unbroken[name]
    assert not unbroken


@every_op
def test_every_mutant_is_caught_where_the_right_way_passes(op: str, some: Some, bench: Bench) -> None:
    right = right_of(op)
    alive = {mutant.name: mutant for mutant in oracle(op).MUTANTS}
    for case in some(op, 400):
        if not alive:
            break
        inputs = build(case)
        precision = right.declared(inputs)
        with bench(op, inputs) as judging:
            assert failed(judging.judge(right.answer(inputs), precision)) == [], case.id
            for name, mutant in list(alive.items()):
                wrong = mutant.answer(inputs)
                if wrong is not None and failed(judging.judge(wrong, precision)):
                    del alive[name]
        assert trespasses(build(case), inputs, ()) == [], case.id
    assert not alive


OP = "cache.compressed_slots"
way, law, mutant = oracle(OP).HONEST[0], oracle(OP).LAWS[0], oracle(OP).MUTANTS[0]
replace = dataclasses.replace


def writing_its_inputs(inputs: Any) -> Any:
    answer = way.answer(inputs)
    inputs.token_slots.add_(1)
    return answer


def zeros_for_none(inputs: Any) -> Any:
    answer = way.answer(inputs)
    return replace(answer, slots=answer.slots.clamp(min=0))


calls: list[int] = []


def drifting(inputs: Any) -> Any:
    calls.append(0)
    answer = way.answer(inputs)
    return replace(answer, slots=answer.slots + len(calls) % 2)


BREAKS: dict[Callable[..., None], list[tuple[str, object]]] = {
    test_names_are_unique_and_clauses_end_their_sentence: [
        ("LAWS", ()),
        ("LAWS", (law, law)),
        ("LAWS", (replace(law, name="buffer longer"),)),
        ("LAWS", (replace(law, claim="it does not matter."),)),
        ("MUTANTS", (mutant, mutant)),
        ("MUTANTS", (replace(mutant, name="Tail left"),)),
        ("MUTANTS", (replace(mutant, pitfall="The tail was left"),)),
        ("HONEST", (way, way)),
    ],
    test_the_reference_leaves_its_inputs_alone_and_says_the_same_again: [
        ("reference", writing_its_inputs),
        ("reference", drifting),
    ],
    test_right_answers_pass_and_leave_their_inputs_alone: [
        ("HONEST", (way, replace(way, name="writing", answer=writing_its_inputs))),
        ("HONEST", (way, replace(way, name="wrong", answer=zeros_for_none))),
        ("HONEST", (way, replace(way, name="silent", answer=lambda inputs: None))),
        ("judge", lambda inputs, outputs, precision: ()),
    ],
    test_laws_hold_of_the_right_way_and_speak_in_the_default_sweep: [
        ("LAWS", (replace(law, name="S9 never", edit=lambda inputs: None),)),
        ("LAWS", (replace(law, expect=lambda first, inputs, edited: first),)),
    ],
    test_every_law_is_broken_by_a_fault_that_comes_with_the_edit: [
        ("LAWS", (replace(law, view=lambda answer: ()),)),
        ("MUTANTS", (replace(mutant, answer=lambda inputs: None),)),
    ],
    test_every_mutant_is_caught_where_the_right_way_passes: [
        ("MUTANTS", (replace(mutant, answer=way.answer),)),
        ("MUTANTS", (mutant, replace(mutant, name="silent", answer=lambda inputs: None))),
        ("MUTANTS", (mutant, replace(mutant, name="writing", answer=writing_its_inputs))),
        ("HONEST", (replace(way, answer=zeros_for_none),)),
    ],
}


@pytest.mark.parametrize(
    ("check", "name", "broken"), [(check, *fault) for check, faults in BREAKS.items() for fault in faults]
)
def test_an_op_that_breaks_the_contract_is_seen(
    check: Callable[..., None], name: str, broken: object, fails_for: Callable[..., None]
) -> None:
    fails_for(check, "oracle", OP, name, broken)


def test_a_bench_works_out_once_what_answers_are_held_against(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    reference = oracle(OP).reference

    def counted(inputs: Any) -> Any:
        asked.append(inputs)
        return reference(inputs)

    monkeypatch.setattr(oracle(OP), "reference", counted)
    inputs = build(next(case for case in sweep_cases(OP, "default") if build(case).seq_lens.numel() > 1))
    right, precision = way.answer(inputs), way.declared(inputs)
    wrong = replace(right, slots=right.slots + 1)
    asked.clear()
    with bench(OP, inputs) as judging:
        verdicts = [bool(failed(judging.judge(answer, precision))) for answer in (right, wrong, right, wrong)]
    assert verdicts == [False, True, False, True]
    assert len(asked) == 1


def test_a_judge_that_writes_what_it_holds_answers_against_is_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writing(inputs: Any, outputs: Any, precision: Precision) -> tuple[Check, ...]:
        oracle(OP).reference(inputs).slots.add_(1)
        return ()

    monkeypatch.setattr(oracle(OP), "judge", writing)
    inputs = build(next(case for case in sweep_cases(OP, "default") if build(case).seq_lens.numel() > 1))
    with pytest.raises(AssertionError), bench(OP, inputs) as judging:
        judging.judge(way.answer(inputs), way.declared(inputs))
