"""Does every op have an answer of our own for every case, right and within its memory, and do peers say what they lack?"""

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import OPS, op_module
from cases.case import Case, case_type
from cases.covering import regressions, sweep_cases
from cases.precision import Precision
from impl.implementation import Execution, Impl, implementations
from impl.sources import settings
from reports.laws import spoken

Some = Callable[[str, int], list[Case]]
Verdict = Callable[..., tuple[str, list[str]]]
NAME = re.compile(r"(ours|torch|triton|vllm|aiter)(-[a-z0-9]+)+")
# Words on one line that a list of reasons can hold: no full stop, and nothing of an exception.
REASON = re.compile(r"(?!.*Error[:(])\S+( \S+)+(?<!\.)")
# What only a HIP build of torch can tell is asked where there is one.
ASKED: tuple[Execution, ...] = ("interpreter", "cuda")
every_op = pytest.mark.parametrize("op", OPS)


def routes(*libraries: str, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parameters for every implementation of these libraries, by the first word of its name."""
    found = {f"{op}/{impl.name}": (op, impl) for op in OPS for impl in implementations(op)}
    asked = [name for name, (_, impl) in found.items() if impl.name.split("-")[0] in libraries and name not in but]
    return pytest.mark.parametrize(("op", "impl"), [found[name] for name in asked], ids=asked)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A path that does not exist, where the user says that vLLM and AITER are."""
    path = tmp_path / "nowhere"
    monkeypatch.setattr(settings, "_vllm", path)
    monkeypatch.setattr(settings, "_aiter", path)
    return path


@every_op
def test_names_are_unique_and_say_whose_the_route_is(op: str) -> None:
    names = [impl.name for impl in implementations(op)]
    assert len(set(names)) == len(names)
    assert [name for name in names if not NAME.fullmatch(name)] == []


@every_op
def test_ours_answers_every_case_without_a_peer_and_whoever_does_not_says_why(op: str, nowhere: Path) -> None:
    for case in sweep_cases(op, "default"):
        for execution in ASKED:
            given = {impl.name: impl.unsupported(case, execution) for impl in implementations(op)}
            for name, reasons in given.items():
                assert [reason for reason in reasons if not REASON.fullmatch(reason)] == [], (name, case.id)
                assert len(set(reasons)) == len(reasons), (name, case.id)
            if execution == "interpreter":
                assert [name for name, reasons in given.items() if not reasons and name.startswith("ours-")], case.id


@routes("vllm", "aiter")
def test_a_peer_says_that_its_tree_is_not_there_or_is_another(op: str, impl: Impl, nowhere: Path, some: Some) -> None:
    for path, said in ((nowhere, "does not exist"), (nowhere.parent, "is not a")):
        settings.use_vllm(path)
        settings.use_aiter(path)
        for execution in ASKED:
            given = [impl.unsupported(case, execution) for case in some(op, 12)]
            assert all(given), execution
            # What is taken from an installation only says so.
            assert re.search(f"{said}|is not installed", " ".join(reason for reasons in given for reason in reasons)), (
                execution
            )


@routes("ours", "torch", "triton")
def test_what_a_record_keeps_of_our_own_routes_is_there(op: str, impl: Impl, some: Some) -> None:
    assert impl.source()
    for case in some(op, 20):
        assert isinstance(impl.precision(case, "interpreter"), Precision)
        assert impl.compile_key(case) == impl.compile_key(case.varied(seed=case.seed + 1)), case.id


# torch's own cast is a subject, and one of its roundings is wrong.
@routes("ours", "torch", but=("formats.cast/torch-cast",))
def test_our_own_routes_pass_the_regressions_and_a_part_of_the_sweep(
    op: str, impl: Impl, some: Some, verdict: Verdict
) -> None:
    light = [case for case in regressions(op) if not op_module("cases", op).heavy(case)]
    answered = 0
    for case in dict.fromkeys((*light, *some(op, 16))):
        if not impl.unsupported(case, "interpreter"):
            assert verdict(case, impl) == ("pass", []), case.id
            answered += 1
    assert answered


@routes("ours")
def test_our_own_kernels_keep_every_law(op: str, impl: Impl, verdict: Verdict) -> None:
    asked = set()
    for case, laws in spoken(op, sweep_cases(op, "default"), 2, 120):
        for law in laws if not impl.unsupported(case, "interpreter") else ():
            asked.add(law)
            assert verdict(case, impl, law) == ("pass", []), (law, case.id)
    assert asked == {law.name for law in op_module("oracle", op).LAWS}


def test_kernels_are_watched_whatever_their_route_is_called(verdict: Verdict) -> None:
    watches = []

    def looking(inputs: Any) -> Any:
        watches.append(importlib.import_module("impl.executions.interpreter_language").BUILDER.watch)
        return OURS.run(inputs)

    assert verdict(case_type(OP)(), replace(OURS, name="ours-kernels", run=looking)) == ("pass", [])
    assert watches != [] and None not in watches


OP = "cache.compressed_slots"
OURS, VLLM, *_ = implementations(OP)
replace = dataclasses.replace


def needy(case: Any, execution: Execution) -> list[str]:
    return ["ratio=1: needs a group"] if case.ratio == 1 else []


def one_more(inputs: Any) -> Any:
    answer = OURS.run(inputs)
    answer.slots.add_(answer.slots == answer.slots.max())
    return answer


def forgetting_a_buffer(inputs: Any) -> Any:
    answer = OURS.run(inputs)
    return answer if inputs.out is None else replace(answer, slots=answer.slots.clone().sub_(1))


def writing_its_inputs(inputs: Any) -> Any:
    answer = OURS.run(inputs)
    inputs.seq_lens.zero_()
    return answer


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (test_names_are_unique_and_say_whose_the_route_is, (OURS, OURS)),
        (test_names_are_unique_and_say_whose_the_route_is, (OURS, replace(VLLM, name="kernel"))),
        (test_ours_answers_every_case_without_a_peer_and_whoever_does_not_says_why, (replace(OURS, unsupported=needy),)),
        *(
            (
                test_ours_answers_every_case_without_a_peer_and_whoever_does_not_says_why,
                (OURS, replace(VLLM, unsupported=lambda case, on, reasons=reasons: reasons)),
            )
            for reasons in (["no"], ["It has no kernel."], ["ValueError: no kernel"], ["no kernel", "no kernel"])
        ),
    ],
)  # fmt: skip
def test_implementations_that_break_the_contract_are_seen(
    check: Callable[..., None], broken: tuple[Impl, ...], fails_for: Callable[..., None]
) -> None:
    fails_for(check, "impl", OP, "IMPLS", broken)


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (test_a_peer_says_that_its_tree_is_not_there_or_is_another, VLLM, {"unsupported": lambda case, on: ["busy"]}),
        (test_what_a_record_keeps_of_our_own_routes_is_there, OURS, {"source": lambda: b""}),
        (test_what_a_record_keeps_of_our_own_routes_is_there, OURS, {"compile_key": lambda case: case.id}),
        (test_what_a_record_keeps_of_our_own_routes_is_there, OURS, {"precision": lambda case, on: None}),
        (test_our_own_routes_pass_the_regressions_and_a_part_of_the_sweep, OURS, {"run": one_more}),
        (test_our_own_routes_pass_the_regressions_and_a_part_of_the_sweep, OURS, {"run": writing_its_inputs}),
        (test_our_own_routes_pass_the_regressions_and_a_part_of_the_sweep, OURS, {"unsupported": lambda case, on: [""]}),
        (test_our_own_kernels_keep_every_law, OURS, {"run": forgetting_a_buffer}),
        (test_our_own_kernels_keep_every_law, OURS, {"run": writing_its_inputs}),
    ],
)  # fmt: skip
def test_a_route_that_breaks_the_contract_is_seen(
    check: Callable[..., None], right: Impl, wrong: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    needed = [name for name in ("nowhere", "some", "verdict") if name in check.__code__.co_varnames]
    arguments = {name: request.getfixturevalue(name) for name in needed}
    check(OP, right, **arguments)
    with pytest.raises(AssertionError):
        check(OP, replace(right, **wrong), **arguments)
