"""Does every op ask questions that are spelled completely, built to the same bytes anywhere, and of the form it says?"""

import dataclasses
import functools
import hashlib
import json
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from beartype.door import is_bearable
from jaxtyping import AnnotationError, Shaped, jaxtyped

from cases import OPS, op_module
from cases.case import Case, case_type, parse, read_axis, spell
from cases.covering import regressions, sweep_cases
from cases.memory import GUARD_BYTES, is_vast, map_tensors, named_tensors, owned_bytes, storage_bytes

Some = Callable[[str, int], list[Case]]
every_op = pytest.mark.parametrize("op", OPS)


def questions(op: str) -> ModuleType:
    return op_module("cases", op)


@every_op
def test_every_value_of_every_axis_is_one_of_the_case_type_and_is_asked_for(op: str) -> None:
    kind = case_type(op)
    assert kind.op == op
    assert sorted([*questions(op).AXES, "seed"]) == sorted(kind.axes())
    assert set(questions(op).NIGHTLY) <= set(questions(op).AXES)
    for axis, values in (*questions(op).AXES.items(), *questions(op).NIGHTLY.items()):
        for value in values:
            read = read_axis(kind, axis, spell(value))
            assert (type(read), read) == (type(value), value), axis
        assert len(set(values)) == len(values) > 0, axis
    asked = sweep_cases(op, "default")
    for axis, values in questions(op).AXES.items():
        assert set(values) <= {case.settings[axis] for case in asked}, axis


@every_op
def test_cases_are_spelled_completely_and_read_back(op: str) -> None:
    asked = (case_type(op)(), *sweep_cases(op, "default"))
    for case in asked:
        assert parse(case.id) == case
        assert shlex.quote(case.id) == case.id
    texts = questions(op).REGRESSIONS
    assert texts
    assert [parse(text).id for text in texts] == list(dict.fromkeys(texts))
    assert set(regressions(op)) <= set(asked)


def written(tensor: torch.Tensor) -> tuple[object, ...]:
    """All of a tensor that a case decides; its storage with guards and gaps, of a vast one the elements alone."""
    used = tensor.contiguous().reshape(-1).view(torch.uint8) if is_vast(tensor) else storage_bytes(tensor)
    digest = hashlib.sha256(used.numpy().tobytes()).hexdigest()
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), digest


@every_op
def test_inputs_are_a_pure_function_of_the_case_and_share_no_memory(op: str, some: Some) -> None:
    for case in some(op, 100):
        first, again = questions(op).build(case), questions(op).build(parse(case.id))
        assert map_tensors(first, written) == map_tensors(again, written), case.id
        for (path, one), (_, other) in zip(named_tensors(first), named_tensors(again), strict=True):
            # What is written to one call, the next must not see.
            assert not one.numel() or storage_bytes(one).data_ptr() != storage_bytes(other).data_ptr(), (path, case.id)


_DIGESTS = """
import hashlib, json, torch
from cases import OPS, op_module
from cases.covering import covering_cases
from cases.memory import is_vast, named_tensors, storage_bytes
found = {}
for op in OPS:
    for case in covering_cases(op, "smoke"):
        for path, tensor in named_tensors(op_module("cases", op).build(case)):
            used = tensor.contiguous().reshape(-1).view(torch.uint8) if is_vast(tensor) else storage_bytes(tensor)
            found[f"{path} of {case.id}"] = hashlib.sha256(used.numpy().tobytes()).hexdigest()
print(json.dumps([torch.backends.cpu.get_cpu_capability(), found]))
"""


def test_inputs_are_the_same_bytes_under_two_processor_capabilities() -> None:
    """The capabilities really differ: torch reports which one it uses."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGESTS], stdout=subprocess.PIPE, text=True,
            env={"ATEN_CPU_CAPABILITY": capability, "PATH": "", "OMP_NUM_THREADS": threads, "PYTHONPATH": "."},
        )
        for capability, threads in (("default", "1"), ("avx2", "2"))
    ]  # fmt: skip
    (default, first), (avx2, second) = (json.loads(process.communicate()[0]) for process in running)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert default != avx2 or torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def parts(value: Any, annotation: Any) -> Iterator[tuple[Any, Any]]:
    """A value with its annotation, or those of the members of a tuple of any length."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and arguments[1:] == (...,):
        yield from ((part, arguments[0]) for part in value)
    else:
        yield value, annotation


def fields_of(owner: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and annotation of every field of a dataclass."""
    hints = typing.get_type_hints(type(owner))
    for field in dataclasses.fields(owner):
        for value, annotation in parts(getattr(owner, field.name), hints[field.name]):
            yield field.name, value, annotation


def misfits(*owners: Any, numbers: dict[str, Any]) -> list[str]:
    """The fields whose dtype or shape is not what their annotation says; an axis has one length in all owners.

    A product of axes is looked at once its factors are known, from other fields or from the case's own `numbers`.
    """
    wrong: list[str] = []
    with jaxtyped("context"):
        waiting = [field for owner in owners for field in fields_of(owner)]
        for known in ({}, numbers):
            for axis, length in known.items():
                isinstance(torch.empty(length, device="meta"), Shaped[torch.Tensor, f" {axis}"])
            later = []
            for name, value, annotation in waiting:
                try:
                    if not is_bearable(value, annotation):
                        wrong.append(f"{name}={getattr(value, 'dtype', value)}{list(getattr(value, 'shape', ()))}")
                except AnnotationError:
                    later.append((name, value, annotation))
            waiting = later
    for owner in owners:
        for _, value, _ in fields_of(owner):
            if dataclasses.is_dataclass(value):
                wrong += misfits(value, numbers=numbers)
    return wrong


@every_op
def test_inputs_and_right_answers_have_the_form_that_is_annotated(op: str, some: Some) -> None:
    right = op_module("oracle", op).HONEST[0]
    for case in some(op, 40):
        numbers = {axis: value for axis, value in case.settings.items() if type(value) is int and value >= 0}
        inputs = questions(op).build(case)
        assert misfits(inputs, numbers=numbers) == [], case.id
        assert misfits(inputs, right.answer(inputs), numbers=numbers) == [], case.id


@every_op
def test_writable_names_tensors_that_lie_in_guards_of_their_own(op: str, some: Some) -> None:
    paths = questions(op).WRITABLE
    unseen = set(paths)
    for case in some(op, 60):
        tensors = dict(named_tensors(questions(op).build(case)))
        for path in [path for path in paths if path in tensors]:
            unseen.discard(path)
            storage = storage_bytes(tensors[path]).data_ptr()
            assert storage not in [storage_bytes(other).data_ptr() for name, other in tensors.items() if name != path]
            if tensors[path].numel() and not is_vast(tensors[path]):
                owned = owned_bytes(tensors[path])
                places = owned.nonzero().flatten()
                assert int(places[0]) >= GUARD_BYTES, (path, case.id)
                assert int(places[-1]) < owned.numel() - GUARD_BYTES, (path, case.id)
    assert len(set(paths)) == len(paths)
    assert not unseen


OP = "cache.compressed_slots"
ask = questions(OP)
build = ask.build


def drawn_anew(case: Case) -> Any:
    inputs = build(case)
    inputs.seq_lens.copy_(torch.randint(0, 99, inputs.seq_lens.shape))
    return inputs


def without_guards(case: Case) -> Any:
    inputs = build(case)
    return inputs if inputs.out is None else dataclasses.replace(inputs, out=inputs.out.clone())


def wide_lengths(case: Case) -> Any:
    inputs = build(case)
    return dataclasses.replace(inputs, seq_lens=inputs.seq_lens.long())


def a_table_row_too_many(case: Case) -> Any:
    inputs = build(case)
    return dataclasses.replace(inputs, table=torch.cat((inputs.table, inputs.table[:1])))


BREAKS: dict[Callable[..., None], list[tuple[str, object]]] = {
    test_every_value_of_every_axis_is_one_of_the_case_type_and_is_asked_for: [
        ("AXES", {**ask.AXES, "hats": (1,)}),
        ("AXES", {**ask.AXES, "ratio": (1, 77)}),
        ("AXES", {**ask.AXES, "warmup": (0, 1)}),
        ("NIGHTLY", {"hats": (1,)}),
    ],
    test_cases_are_spelled_completely_and_read_back: [
        ("REGRESSIONS", ask.REGRESSIONS[:1] * 2),
        ("REGRESSIONS", (f" {ask.REGRESSIONS[0]}",)),
    ],
    test_inputs_are_a_pure_function_of_the_case_and_share_no_memory: [
        ("build", drawn_anew),
        ("build", functools.cache(build)),
    ],
    test_inputs_and_right_answers_have_the_form_that_is_annotated: [
        ("build", wide_lengths),
        ("build", a_table_row_too_many),
    ],
    test_writable_names_tensors_that_lie_in_guards_of_their_own: [
        ("build", without_guards),
        ("WRITABLE", ("out", "answer")),
        ("WRITABLE", ("out", "out")),
    ],
}


@pytest.mark.parametrize(
    ("check", "name", "broken"), [(check, *fault) for check, faults in BREAKS.items() for fault in faults]
)
def test_an_op_that_breaks_the_contract_is_seen(
    check: Callable[..., None], name: str, broken: object, fails_for: Callable[..., None]
) -> None:
    fails_for(check, "cases", OP, name, broken)
