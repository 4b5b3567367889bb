"""Do exactly those prefill calls go to the OPUS kernel that keep every condition?"""

import dataclasses
import os
import random
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases.case import parse
from cases.precision import Precision
from cases.sparse_mla import prefill_dispatch as ask
from cases.sparse_mla.prefill_dispatch import Arch, DispatchCase, Form, Inputs, Outputs, PrefillCall, Question, dense
from impl.sources import settings
from impl.sparse_mla.prefill_dispatch import IMPLS
from oracle.sparse_mla import prefill_dispatch as right
from reports.laws import break_of

OURS, VLLM = IMPLS


def small_sweep(count: int) -> list[DispatchCase]:
    """The regressions and some random cases."""
    choose = random.Random(11)
    cases = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, DispatchCase)]
    while len(cases) < count:
        cases.append(
            DispatchCase(
                **{axis: choose.choice(values) for axis, values in ask.AXES.items()}, seed=choose.randrange(99)
            )  # type: ignore[arg-type]
        )
    return cases


SWEEP = small_sweep(24)


def form(*shape: int, dtype: str = "bfloat16", device: ask.Device = "cuda:0") -> Form:
    return Form(shape, dense(shape), dtype, device)


def fitting(queries: int = 1024, heads: int = 16) -> PrefillCall:
    """A call that goes to OPUS on gfx950."""
    rows = form(queries, heads, 512)
    return PrefillCall(rows, form(9000, 512), rows, form(heads, dtype="float32"), opus=True)


def broken(name: str) -> PrefillCall:
    """The fitting call with one thing changed."""
    call = fitting()
    query, keys, out, sink = call.query, call.keys, call.out, call.sink
    assert sink is not None
    changes: dict[str, dict[str, object]] = {
        "one query less": {"query": form(1023, 16, 512), "out": form(1023, 16, 512)},
        "on the CPU": {name: form(*f.shape, dtype=f.dtype, device="cpu")
                       for name, f in (("query", query), ("keys", keys), ("out", out), ("sink", sink))},
        "out of 448 lanes": {"out": form(1024, 16, 448)},
        "out rows apart": {"out": Form(out.shape, dense(out.shape, (8,)), out.dtype, out.device)},
        "out in float16": {"out": dataclasses.replace(out, dtype="float16")},
        "out elsewhere": {"out": dataclasses.replace(out, device="cuda:1")},
        "keys of 576 lanes": {"keys": form(9000, 576)},
        "keys in float16": {"keys": form(9000, 512, dtype="float16")},
        "keys elsewhere": {"keys": form(9000, 512, device="cuda:1")},
        "all in float32": {name: form(*f.shape, dtype="float32")
                           for name, f in (("query", query), ("keys", keys), ("out", out))},
        "query lanes apart": {name: Form(query.shape, (16384, 1024, 2), "bfloat16", "cuda:0")
                              for name in ("query", "out")},
        "key lanes apart": {"keys": Form(keys.shape, (1024, 2), "bfloat16", "cuda:0")},
        "no sink": {"sink": None},
        "short sink": {"sink": form(15, dtype="float32")},
        "sink in bfloat16": {"sink": form(16)},
        "sink elsewhere": {"sink": form(16, dtype="float32", device="cuda:1")},
        "sink in a column": {"sink": form(16, 1, dtype="float32")},
    }  # fmt: skip
    return dataclasses.replace(call, **changes[name])  # type: ignore[arg-type]


BROKEN = (
    "one query less", "on the CPU", "out of 448 lanes", "out rows apart", "out in float16", "out elsewhere",
    "keys of 576 lanes", "keys in float16", "keys elsewhere", "all in float32", "query lanes apart", "key lanes apart",
    "no sink", "short sink", "sink in bfloat16", "sink elsewhere", "sink in a column",
)  # fmt: skip


def asked(calls: list[PrefillCall], arch: Arch = "gfx950", question: Question = "predicate") -> Inputs:
    return Inputs(tuple(calls), torch.ones(len(calls), dtype=torch.bool), arch, question)


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


RUNS = [pytest.param(right.reference, id="reference"), pytest.param(OURS.run, id="ours-host")]


@pytest.mark.parametrize("run", RUNS)
def test_a_fitting_call_goes_to_opus_on_gfx950_only(run: object) -> None:
    for question in ("predicate", "call"):
        for arch in ("gfx942", "gfx950", "other"):
            got = run(asked([fitting()], arch, question)).out.tolist()  # type: ignore[operator, arg-type]
            assert got == [arch == "gfx950"]


@pytest.mark.parametrize("run", RUNS)
def test_one_broken_condition_is_enough(run: object) -> None:
    calls = [broken(name) for name in BROKEN]
    for question in ("predicate", "call"):
        got = run(asked(calls, question=question)).out.tolist()  # type: ignore[operator, arg-type]
        assert [name for name, opus in zip(BROKEN, got, strict=True) if opus] == []


@pytest.mark.parametrize("run", RUNS)
def test_what_opus_leaves_free(run: object) -> None:
    gaps = Form((1024, 16, 512), dense((1024, 16, 512), (64, 8)), "float16", "cuda:1")
    keys = Form((0, 512), (640, 1), "float16", "cuda:1")
    free = PrefillCall(gaps, keys, gaps, Form((16,), (3,), "float32", "cuda:1"), opus=True)
    assert run(asked([free, fitting(40000, 128), fitting(1024, 1)])).out.tolist() == [True] * 3  # type: ignore[operator]


@pytest.mark.parametrize("run", RUNS)
def test_a_call_cuts_a_longer_sink_and_needs_aiter(run: object) -> None:
    longer = dataclasses.replace(fitting(), sink=form(17, dtype="float32"))
    off = dataclasses.replace(fitting(), opus=False)
    assert run(asked([longer, off], question="predicate")).out.tolist() == [False, True]  # type: ignore[operator]
    assert run(asked([longer, off], question="call")).out.tolist() == [True, False]  # type: ignore[operator]


def by_tensors(call: PrefillCall) -> bool:
    """The predicate by torch's own tensors, which have a form and no memory."""
    with FakeTensorMode():
        query, keys, out, sink = (
            None if one is None else torch.empty_strided(
                one.shape, one.strides, dtype=getattr(torch, one.dtype), device=one.device
            )
            for one in (call.query, call.keys, call.out, call.sink)
        )  # fmt: skip
        assert query is not None and keys is not None and out is not None
        same = all((t.dtype, t.device) == (query.dtype, query.device) for t in (keys, out))
        ready = len(query) >= 1024 and query.is_cuda and query.element_size() == 2 and query.is_floating_point()
        forms = out.shape == query.shape and out.stride() == query.stride() and keys.size(-1) == query.size(-1)
        lanes = query.stride(-1) == keys.stride(-1) == 1
        if sink is None:
            return False
        return bool(
            same and ready and forms and lanes and sink.dtype == torch.float32 and sink.device == query.device
            and list(sink.shape) == [query.size(1)]
        )  # fmt: skip


@pytest.mark.parametrize("case", [case for case in SWEEP if case.question == "predicate"], ids=str)
def test_the_predicate_agrees_with_torch(case: DispatchCase) -> None:
    inputs = ask.build(case)
    want = [case.arch == "gfx950" and by_tensors(call) for call in inputs.calls]
    assert right.reference(inputs).out.tolist() == want


def test_strides_of_forms_are_those_of_torch() -> None:
    for shape in ((0, 3, 5), (7, 1, 512), (4, 4), (1,)):
        assert dense(shape) == torch.empty(shape).stride()


def _on(device: str, inputs: Inputs) -> Outputs:
    return Outputs(torch.tensor([call.query.device == device for call in inputs.calls], dtype=torch.bool))


def _dense_only(inputs: Inputs) -> Outputs:
    flat = [call.query.strides == dense(call.query.shape) for call in inputs.calls]
    return Outputs(torch.tensor(flat, dtype=torch.bool))


@pytest.mark.parametrize(
    ("law", "answer"),
    [
        ("O1", lambda inputs: _on("cuda:0", inputs)),
        ("O2", next(wrong for wrong in right.MUTANTS if wrong.name == "bfloat16-only").answer),
        ("O3", lambda inputs: Outputs(torch.tensor([call.keys.shape[0] < 50 for call in inputs.calls]))),
        ("O4", _dense_only),
        ("O5", lambda inputs: Outputs(torch.tensor([bool(call.sink and call.sink.strides[0] == 1) for call in inputs.calls]))),
        ("O6", lambda inputs: Outputs(torch.arange(len(inputs.calls)) == 0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_law_is_broken_by_its_fault(law: str, answer: object) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))
    inputs = ask.build(DispatchCase(broken="none"))
    checks = break_of(rule, inputs, answer(inputs), answer, right.judge, Precision())  # type: ignore[operator, arg-type]
    assert checks is not None and not all(check.passed for check in checks)


def test_a_wrong_decision_names_what_the_call_breaks() -> None:
    inputs = asked([fitting(), broken("sink elsewhere")])
    (check,) = right.judge(inputs, Outputs(torch.tensor([True, True])), Precision())
    assert str(check).startswith("opus[1]=1, but should be 0: the call breaks: sink device")
    (check,) = right.judge(inputs, Outputs(torch.tensor([False, False])), Precision())
    assert str(check).startswith("opus[0]=0, but should be 1: the call keeps every condition")


def test_calls_that_make_no_sense_are_refused() -> None:
    flat = dataclasses.replace(fitting(), query=form(1024, 512))
    with pytest.raises(ValueError, match=r"query has 2 dimensions: should have 3"):
        right.reference(asked([flat]))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(DispatchCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
def test_vllm_decides_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for case in SWEEP:
        assert VLLM.unsupported(case, "interpreter") == []
        inputs = ask.build(case)
        assert passes(inputs, VLLM.run(inputs)), case.id
