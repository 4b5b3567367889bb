"""Is sparse MLA prefill answered as worked out by hand, and does its judge tell right from wrong?"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import parse
from cases.memory import is_vast, on_device, trespasses
from cases.precision import Precision
from cases.sparse_mla.prefill import AXES, REGRESSIONS, WRITABLE, PrefillCase, build, forbid, heavy
from cases.sparse_mla.prefill_call import PrefillInputs, PrefillOutputs
from impl.executions.memory_watch import watch
from impl.implementation import Impl
from impl.sources import settings as sources
from impl.sparse_mla import prefill_torch, prefill_triton
from impl.sparse_mla.prefill import IMPLS
from oracle.check import verdict_of
from oracle.laws import Law
from oracle.sparse_mla import prefill as oracle
from oracle.sparse_mla.prefill_faults import HONEST, MUTANTS, Way, compute
from reports.laws import break_of, identical

TREE = os.environ.get("MLA_ORACLE_VLLM")
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree"),
]
NAMED = {impl.name: impl for impl in IMPLS}
OURS = [pytest.param(prefill_triton.run, id="ours-triton"), pytest.param(prefill_torch.run, id="torch-gathered")]
EVERYONE = [
    pytest.param(oracle.reference, id="reference"),
    *OURS,
    pytest.param(NAMED["vllm-triton"].run, id="vllm-triton", marks=needs_vllm),
]
Run = Callable[[PrefillInputs], PrefillOutputs]
BASE = PrefillCase(queries=2, heads=3, length=33)
RIGHT = HONEST[0]


@pytest.fixture(autouse=True)
def _real_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(TREE) if TREE else None)


def rows(count: int = 8, lanes: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Row r holds r in the first lane, 1 in all others."""
    kv = torch.ones(count, 1, lanes)
    kv[:, 0, 0] = torch.arange(count)
    return kv.to(dtype)


def call(entries: list[int], query: float, /, **changes: Any) -> PrefillInputs:
    """One query of one head that sees the first of four lanes, over `entries` of `rows()`; fp32 out."""
    vector = torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    vector[..., 0] = query
    plain = PrefillInputs(
        query=vector, kv=rows(), scale=1.0, sink=None, nope_lanes=3, rope_lanes=1, out=torch.full((1, 1, 4), math.nan),
        indices=torch.tensor(entries, dtype=torch.int32), indptr=torch.tensor([0, len(entries)], dtype=torch.int32),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def dense(columns: list[list[int]], lengths: list[int] | None) -> dict[str, Any]:
    """The changes to `call` that make it a dense one."""
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    return {"indices": None, "indptr": None, "dense": torch.tensor(columns, dtype=torch.int32), "lengths": given}


# Answers worked out by hand.


@pytest.mark.parametrize("run", EVERYONE)
def test_one_row_is_the_answer(run: Run) -> None:
    assert run(call([3], 2.0)).out[0, 0].tolist() == [3.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("run", EVERYONE)
def test_a_zero_query_means_over_all_entries_as_often_as_they_stand(run: Run) -> None:
    # (1 + 3 + 3 + 5) / 4; -1 and 8 are no rows.
    out = run(call([1, -1, 3, 3, 8, 5, 2**31 - 1, -(2**31)], 0.0)).out
    assert out[0, 0].tolist() == [3.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("run", EVERYONE)
def test_a_sink_as_loud_as_the_row_takes_half_and_is_not_scaled(run: Run) -> None:
    # The score is 3 * 2 * 0.25 = 1.5.
    out = run(call([3], 2.0, scale=0.25, sink=torch.tensor([1.5, 1e4]))).out
    assert out[0, 0].tolist() == pytest.approx([1.5, 0.5, 0.5, 0.5], abs=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_two_rows_share_by_the_exponential_of_their_scores(run: Run) -> None:
    # Scores 0 and ln 3: shares 1/4 and 3/4, and 3/4 of the larger one's rounding at most.
    out = run(call([0, 1], 1.0, scale=math.log(3.0))).out
    assert out[0, 0].tolist() == pytest.approx([0.75, 1.0, 1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize("run", EVERYONE)
def test_the_leading_lanes_alone_may_be_asked_for(run: Run) -> None:
    assert run(call([5], 1.0, out=torch.full((1, 1, 3), math.nan))).out[0, 0].tolist() == [5.0, 1.0, 1.0]


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("sink", [None, torch.tensor([-math.inf]), torch.tensor([20.0])], ids=["no", "-inf", "20"])
@pytest.mark.parametrize("entries", [[], [-1, 99] * 40], ids=["empty", "invalid"])
def test_without_a_valid_entry_the_answer_is_zero(run: Run, entries: list[int], sink: torch.Tensor | None) -> None:
    answer = run(call(entries, 1.0, sink=sink))
    assert not answer.out.any() and (answer.lse is None or answer.lse.tolist() == [[-math.inf]])


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize(
    ("columns", "lengths", "mean"),
    [
        ([[2, 4, 7]], [2], 3.0),
        ([[2, -1, 4]], [3], 3.0),
        # Without lengths, two entries that are not negative mean the first two columns.
        ([[5, -1, 7]], None, 5.0),
        ([[2, 4]], [9], 3.0),
        ([[2, 4]], [-1], 0.0),
        ([[2, 8, 2**31 - 1, 4]], [4], 3.0),
    ],
)
def test_a_dense_row_ends_at_its_length(
    run: Run, columns: list[list[int]], lengths: list[int] | None, mean: float
) -> None:
    assert run(call([], 0.0, **dense(columns, lengths))).out[0, 0, 0] == mean


@pytest.mark.parametrize("run", EVERYONE)
def test_the_ragged_form_counts_where_both_are_given(run: Run) -> None:
    both = dense([[2, 4]], [2]) | {"indices": torch.tensor([9, 6, 9]), "indptr": torch.tensor([1, 2])}
    assert run(call([], 0.0, **both)).out[0, 0, 0] == 6.0


@pytest.mark.parametrize("run", EVERYONE)
def test_fp16_keeps_three_bits_more_than_bf16(run: Run) -> None:
    kv = rows(dtype=torch.float16)
    kv[3, 0, 1] = 1 + 2.0**-10
    out = run(call([3], 1.0, query=torch.ones(1, 1, 4).half(), kv=kv, out=torch.full((1, 1, 4), math.nan).half())).out
    assert out[0, 0].tolist() == [3.0, 1 + 2.0**-10, 1.0, 1.0]


@pytest.mark.parametrize("run", OURS)
def test_the_log_sum_exp_leaves_the_sink_out(run: Run) -> None:
    answer = run(call([3, 3], 2.0, scale=0.25, sink=torch.tensor([1.5])))
    assert answer.lse is not None and answer.lse.tolist() == [[pytest.approx(1.5 + math.log(2), rel=1e-6)]]


@pytest.mark.parametrize("run", [*OURS, EVERYONE[0]])
def test_no_queries_are_an_empty_answer(run: Run) -> None:
    for text in REGRESSIONS[:2]:
        answer = run(build(parse(text)))
        assert answer.out.shape == (0, 16, 512) and answer.lse is not None and answer.lse.shape == (0, 16)


# An independent formulation.


def by_hand(inputs: PrefillInputs) -> np.ndarray[Any, Any]:
    """Scalar loops in Python's own floats."""
    kv, query = inputs.kv.double().tolist(), inputs.query.double().tolist()
    answer = np.zeros(inputs.out.shape)
    for t in range(inputs.query.shape[0]):
        if inputs.indices is not None and inputs.indptr is not None:
            entries = inputs.indices.tolist()[int(inputs.indptr[t]) : int(inputs.indptr[t + 1])]
        else:
            assert inputs.dense is not None
            entries = inputs.dense[t].tolist()
            known = sum(entry >= 0 for entry in entries)
            limit = known if inputs.lengths is None else int(inputs.lengths[t])
            entries = [entry for column, entry in enumerate(entries) if column < limit]
        keys = [kv[entry][0] for entry in entries if 0 <= entry < len(kv)]
        for h in range(inputs.query.shape[1] if keys else 0):
            scores = [inputs.scale * math.fsum(a * b for a, b in zip(query[t][h], key, strict=True)) for key in keys]
            sink = -math.inf if inputs.sink is None else float(inputs.sink[h])
            top = max(*scores, sink) if len(scores) > 1 else max(scores[0], sink)
            shares = [math.exp(score - top) for score in scores]
            total = math.fsum([*shares, math.exp(sink - top)])
            for lane in range(answer.shape[2]):
                answer[t, h, lane] = math.fsum(s * key[lane] for s, key in zip(shares, keys, strict=True)) / total
    return answer


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": "mixed", "invalid": "scattered", "form": "ragged_offset", "queries": 4},
        {"dtype": "float16", "values": "wide", "sink": "large", "form": "overlong", "rows": "mixed", "queries": 4},
        {"values": "needle", "duplicates": "within", "sink": "absent", "garbage": "huge", "form": "counted"},
        {"out_lanes": "nope", "query_layout": "heads_first", "kv_layout": "spread", "integers": "int64"},
        {"integers": "wide", "invalid": "middle", "sink": "longer", "form": "ragged"},
    ],
)
def test_reference_agrees_with_scalar_loops(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(**{"length": 9, "nope_lanes": 13, "rope_lanes": 3, **changes}))
    want = torch.from_numpy(by_hand(inputs))
    for out in (oracle.reference(inputs, torch.float64).out, oracle.budget(inputs, RIGHT.declared(inputs))[0].out):
        assert torch.allclose(out, want, rtol=1e-11, atol=1e-13)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_fp32_reference_is_within_the_budget_of_fp32(data: st.DataObject) -> None:
    axes: dict[str, Any] = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    axes |= {"queries": min(axes["queries"], 2), "output": "float32"}
    case = PrefillCase(**axes, seed=data.draw(st.integers(0, 999)))
    if forbid(case) or heavy(case):
        return
    inputs = build(case)
    checks = oracle.judge(inputs, oracle.reference(inputs), Precision(probability="float32"))
    assert [str(check) for check in checks if not check.passed] == []


def test_unread_rows_and_row_0_hold_garbage_and_the_last_row_is_read() -> None:
    for case in (BASE, BASE.varied(values="needle", form="ragged", invalid="front"), BASE.varied(dtype="float16")):
        inputs = build(case)
        given = inputs.dense if inputs.dense is not None else inputs.indices
        assert given is not None and inputs.kv[0].isnan().all()
        assert (given == inputs.rows - 1).any() and inputs.kv[-1].isfinite().all()


def test_a_far_call_has_rows_beyond_two_to_the_31_and_costs_little() -> None:
    for name in ("query", "kv", "out"):
        case = next(parse(text) for text in REGRESSIONS if f"reach=far_{name}," in text)
        tensor = getattr(build(case), name)
        assert is_vast(tensor) and tensor.stride(0) < 1 << 31 <= tensor.stride(0) * (tensor.shape[0] - 1)


# The judge.


def precision_of(inputs: PrefillInputs) -> Precision:
    """What a kernel that rounds probabilities to the rows' type declares."""
    return Precision(probability="float16" if inputs.query.dtype == torch.float16 else "bfloat16")


def test_mutant_names_are_unique_and_a_mutant_without_its_fault_is_the_right_way() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    inputs = build(BASE)
    assert identical(dataclasses.replace(compute(inputs, Way()), lse=None), RIGHT.answer(inputs))


def test_one_element_off_by_one_step_fails_where_the_answer_is_exact() -> None:
    for dtype in ("bfloat16", "float16"):
        inputs = build(BASE.varied(values="single", sink="absent", dtype=dtype))
        right = RIGHT.answer(inputs)
        out = right.out.clone()
        place = tuple(int(i) for i in (out != 0).nonzero()[5])
        out.view(torch.int16)[place] += 1
        failing = [c for c in oracle.judge(inputs, PrefillOutputs(out), precision_of(inputs)) if not c.passed]
        assert [check.where for check in failing] == [place] and "bit for bit" in str(failing[0])


def test_a_missing_a_misshapen_and_a_poisoned_answer_fail() -> None:
    inputs = build(BASE)
    right = RIGHT.answer(inputs)
    for out in (None, right.out.float(), right.out[:, :2], inputs.out):
        checks = oracle.judge(inputs, dataclasses.replace(right, out=out), RIGHT.declared(inputs))
        assert not all(check.passed for check in checks)


# Laws.

SPOKEN = (
    {"form": "ragged"}, {"form": "ragged", "sink": "absent", "values": "needle"}, {"sink": "minus_infinity"},
    {"dtype": "float16", "form": "ragged", "out_lanes": "nope", "kv_layout": "padded"},
    {"form": "counted", "invalid": "middle", "rows": "ragged", "nope_lanes": 96, "rope_lanes": 0},
)  # fmt: skip


@pytest.mark.parametrize("law", oracle.LAWS, ids=lambda law: law.name)
def test_the_law_is_kept_by_torchs_products(law: Law) -> None:
    # They may round otherwise in another shape; the rest is bit for bit.
    if law.measure == "bitwise" and not law.name.startswith(("M9", "M29")):
        law = dataclasses.replace(law, measure="budget")
    spoken = 0
    for changes in SPOKEN:
        inputs = build(BASE.varied(**changes))

        def run(edited: PrefillInputs) -> PrefillOutputs:
            return NAMED["torch-gathered"].run(on_device(edited, "cpu"))

        checks = break_of(law, inputs, run(inputs), run, oracle.judge, precision_of(inputs))
        if checks is not None:
            spoken += 1
            assert [str(check) for check in checks if not check.passed] == [], changes
    assert spoken


def test_budget_laws_hold_of_the_reference_itself() -> None:
    for law in oracle.LAWS:
        for changes in SPOKEN[:3] if law.measure == "budget" else ():
            inputs = build(BASE.varied(**changes))
            edited = law.edit(inputs)
            if edited is not None:
                first, second = (oracle.reference(each, torch.float64).out for each in (inputs, edited))
                assert torch.allclose(first, second, rtol=1e-6, atol=1e-12), law.name


def test_a_law_can_be_broken() -> None:
    law = next(law for law in oracle.LAWS if law.name.startswith("M5"))
    inputs = build(BASE.varied(form="ragged"))

    def crooked(edited: PrefillInputs) -> PrefillOutputs:
        return compute(edited, Way(faults=frozenset({"drop-last-entry"} if edited is not inputs else ())))

    checks = break_of(law, inputs, crooked(inputs), crooked, oracle.judge, RIGHT.declared(inputs))
    assert checks is not None and not all(check.passed for check in checks)


# What is no call.

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query of two dimensions": ({"query": torch.zeros(1, 4).bfloat16()}, ValueError, "three dimensions"),
    "kv of two dimensions": ({"kv": rows()[:, 0]}, ValueError, r"kv is bfloat16\[8, 4\]: should be \[rows, 1, lanes\]"),
    "kv with two rows an entry": ({"kv": torch.zeros(8, 2, 4).bfloat16()}, ValueError, r"\[rows, 1, lanes\]"),
    "kv of other lanes": ({"kv": rows(lanes=5)}, ValueError, "should have the query's 4 lanes"),
    "two types": ({"kv": rows(dtype=torch.float16)}, TypeError, "both bfloat16 or both float16"),
    "fp32": ({"kv": rows().float(), "query": torch.zeros(1, 1, 4)}, TypeError, "both bfloat16 or both float16"),
    "lanes that do not sum up": ({"nope_lanes": 4}, ValueError, "nope_lanes=4, rope_lanes=1: should sum"),
    "no leading lanes": ({"nope_lanes": 0, "rope_lanes": 4}, ValueError, "should sum"),
    "negative lanes": ({"nope_lanes": 5, "rope_lanes": -1}, ValueError, "should sum"),
    "out of another width": ({"out": torch.zeros(1, 1, 2)}, ValueError, r"should be \[1, 1, 3 or 4\]"),
    "out of other heads": ({"out": torch.zeros(1, 2, 4)}, ValueError, r"should be \[1, 1, 3 or 4\]"),
    "out of the other type": ({"out": torch.zeros(1, 1, 4).half()}, TypeError, "should be bfloat16 or float32"),
    "sink shorter than the heads": ({"sink": torch.zeros(0)}, ValueError, "a logit for each of 1 heads"),
    "sink in fp64": ({"sink": torch.zeros(1).double()}, TypeError, "should be float32"),
    "no list": ({"indices": None}, ValueError, "one form should be given"),
    "indices of two dimensions": ({"indices": torch.tensor([[0]])}, ValueError, "should have 1 dimension"),
    "float indices": ({"indices": torch.tensor([0.0])}, TypeError, "should be int32 or int64"),
    "indptr too short": ({"indptr": torch.tensor([0])}, ValueError, "should hold 2 for 1 queries"),
    "dense of one dimension": ({**dense([[0]], None), "dense": torch.tensor([0])}, ValueError, "2 dimensions"),
    "too many dense rows": (dense([[0], [1]], None), ValueError, "a row for each of 1 queries"),
    "too many lengths": (dense([[0]], [1, 1]), ValueError, "one for each of 1 queries"),
}


@pytest.mark.parametrize("run", [EVERYONE[0], *OURS])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(run: Run, what: str) -> None:
    changes, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        run(call([1], 1.0, **changes))


# The implementations on cases.


def judged(impl: Impl, case: PrefillCase) -> tuple[str, list[str]]:
    """The status of a case on the interpreter, and the sentences of what failed."""
    inputs = build(case)
    used = on_device(inputs, "cpu")
    with watch():
        outputs = impl.run(used)
    left = trespasses(inputs, used, WRITABLE)
    if left:
        return "memory", left
    checks = oracle.judge(inputs, outputs, impl.precision(case, "interpreter"))
    return verdict_of(checks), [str(check) for check in checks if not check.passed]


@pytest.mark.parametrize("name", ["ours-triton", "torch-gathered"])
@pytest.mark.parametrize("text", [text for text in REGRESSIONS if heavy(parse(text))], ids=lambda text: text[19:])
def test_heavy_regressions_pass(name: str, text: str) -> None:
    assert judged(NAMED[name], parse(text)) == ("pass", [])


def test_the_compile_key_tells_apart_what_is_compiled_apart() -> None:
    key = NAMED["ours-triton"].compile_key
    assert key(BASE) == key(BASE.varied(seed=5, values="wide"))
    assert key(BASE) != key(BASE.varied(sink="absent")) and key(BASE) != key(BASE.varied(rope_lanes=0))


class TestOpus:
    """What keeps AITER's kernel from answering."""

    def reasons(self, **changes: Any) -> list[str]:
        return NAMED["aiter-opus"].unsupported(BASE.varied(**changes), "interpreter")

    def test_it_needs_its_device_and_its_library(self) -> None:
        assert [reason.split(":")[0] for reason in self.reasons()] == ["on=interpreter", "aiter is not installed"]

    @pytest.mark.parametrize(
        "changes",
        [
            {"nope_lanes": 512}, {"out_lanes": "nope"}, {"output": "float32"}, {"sink": "absent"},
            {"query_layout": "padded"}, {"form": "ragged", "invalid": "front"}, {"form": "ragged", "rows": "mixed"},
            {"kv_layout": "spread"}, {"reach": "far_query", "queries": 3},
        ],
    )  # fmt: skip
    def test_every_restriction_is_a_reason(self, changes: dict[str, Any]) -> None:
        assert len(self.reasons(**changes)) == 3

    def test_a_long_sink_odd_heads_and_dense_holes_are_none(self) -> None:
        assert len(self.reasons(sink="longer", heads=17, invalid="front", kv_layout="padded", reach="far_kv")) == 2


@pytest.mark.vllm
@pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree")
class TestVllm:
    """What vLLM's kernel does with calls at the edge."""

    VLLM = NAMED["vllm-triton"]

    def far(self, name: str) -> PrefillCase:
        return next(parse(text) for text in REGRESSIONS if f"reach=far_{name}," in text)

    @pytest.mark.parametrize("name", ["query", "out"])
    def test_its_query_and_output_offsets_have_32_bits(self, name: str) -> None:
        with pytest.raises(Exception, match="out-of-bounds") as caught:
            judged(self.VLLM, self.far(name))
        assert f"argument {'q' if name == 'query' else 'out'}_ptr" in str(caught.value)

    def test_its_row_offset_has_64(self) -> None:
        assert judged(self.VLLM, self.far("kv")) == ("pass", [])

    @pytest.mark.parametrize("form", ["ragged", "dense"])
    def test_it_takes_the_low_32_bits_of_an_entry(self, form: str) -> None:
        status, _ = judged(self.VLLM, BASE.varied(integers="wide", invalid="scattered", form=form))
        assert status == "fail"
        inputs = call([0], 1.0, indices=torch.tensor([2**32 + 5]))
        assert self.VLLM.run(inputs).out[0, 0, 0] == 5.0

    def test_a_dense_call_without_queries_raises_and_a_ragged_one_does_not(self) -> None:
        ragged, columns = (build(parse(text)) for text in REGRESSIONS[:2])
        assert self.VLLM.run(ragged).out.shape == (0, 16, 512)
        with pytest.raises(RuntimeError, match="reshape"):
            self.VLLM.run(columns)

    def test_a_nan_in_a_row_that_is_read_becomes_zeros(self) -> None:
        kv = rows()
        kv[3, 0, 1] = math.nan
        assert self.VLLM.run(call([3], 1.0, kv=kv)).out[0, 0].tolist() == [0.0] * 4
