"""Are the splits of a decode merged as worked out by hand, and does the judge tell right from wrong?"""

from __future__ import annotations

import dataclasses
import math
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dense_mla.split_stage2 import (
    AXES,
    REGRESSIONS,
    WRITABLE,
    Inputs,
    Outputs,
    StageCase,
    build,
    forbid,
    granularity_of,
    packed_answer,
)
from cases.memory import on_device, trespasses
from impl.dense_mla.split_stage2 import IMPLS
from impl.executions.memory_watch import watch
from impl.implementation import Impl
from impl.sources import settings as sources
from oracle.dense_mla import split_stage2 as oracle

AITER = os.environ.get("MLA_ORACLE_AITER")
# Not every AITER tree holds the host code of its assembly kernels, where this stage lives.
HELD = AITER is not None and any((Path(AITER) / place).is_file() for place in ("mla.py", "aiter/mla.py"))
NAMED = {impl.name: impl for impl in IMPLS}
EVERYONE = [
    pytest.param(oracle.reference, id="reference"),
    pytest.param(NAMED["ours-triton"].run, id="ours-triton"),
    pytest.param(NAMED["torch-rows"].run, id="torch-rows"),
]
Run = Callable[[Inputs], Outputs]
BASE = StageCase()
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _real_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_aiter", Path(AITER) if AITER else None)


def call(values: list[list[float]], lse: list[list[float]], keys: list[int], **changes: Any) -> Inputs:
    """Requests of as many rows as go evenly, one head of two lanes: slots hold a number, and 4 times that."""
    lane = torch.tensor(values)
    rows, splits = lane.shape
    steps = torch.arange(len(keys) + 1, dtype=torch.int32)
    plain = Inputs(
        partials=torch.stack([lane, 4 * lane], 2)[:, :, None].contiguous(),
        lse=torch.tensor(lse)[:, :, None, None],
        query_starts=steps * (rows // len(keys)),
        key_starts=torch.tensor([0, *keys]).cumsum(0).int(),
        split_starts=steps * splits,
        exported=None,
        granularity=16,
        answer_packed=False,
        out=torch.full((rows, 1, 2), NAN).bfloat16(),
    )
    return dataclasses.replace(plain, **changes)


def answer(run: Run, inputs: Inputs) -> tuple[list[float], list[float]]:
    """Every row's number and log-sum-exp."""
    outputs = run(inputs)
    return outputs.out[:, 0, 0].tolist(), outputs.lse[:, 0].tolist()


# Answers worked out by hand.


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize(
    ("keys", "exported", "mean"),
    # 17 keys at 16 a split are two splits, 48 are three, and no request has more than its four.
    [
        (1, None, 1.0),
        (16, None, 1.0),
        (17, None, 2.0),
        (48, None, 3.0),
        (1000, None, 4.0),
        (1000, 2, 2.0),
        (17, 4, 2.0),
    ],
)
def test_the_least_of_splits_lengths_and_exported_counts(
    run: Run, keys: int, exported: int | None, mean: float
) -> None:
    count = None if exported is None else torch.tensor([exported], dtype=torch.int32)
    # Of n filled slots with equal weights the mean is 1, 2, 3, 4.
    inputs = call([[1.0, 3.0, 5.0, 7.0]], [[0.5] * 4], [keys], exported=count)
    out, lse = answer(run, inputs)
    assert out == [mean] and lse == [pytest.approx(0.5 + math.log(mean), rel=1e-6)]


@pytest.mark.parametrize("run", EVERYONE)
def test_every_row_of_a_request_has_an_answer_of_its_own(run: Run) -> None:
    rows = [[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]]
    assert answer(run, call(rows, [[0.0, 0.0]] * 3, [40]))[0] == [2.0, 6.0, 10.0]


@pytest.mark.parametrize("run", EVERYONE)
def test_unfilled_slots_and_splits_without_a_visible_key_do_not_matter(run: Run) -> None:
    inputs = call(
        [[1.0, NAN, 3.0, NAN], [NAN, 2.0, INF, 9.0]], [[0.0, -INF, 0.0, NAN], [-INF, 1.5, -INF, INF]], [33, 48]
    )
    out, lse = answer(run, inputs)
    assert out == [2.0, 2.0] and lse == pytest.approx([math.log(2.0), 1.5], rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_a_request_without_keys_is_0_and_minus_infinity(run: Run) -> None:
    assert answer(run, call([[NAN], [3.0]], [[NAN], [0.25]], [0, 1])) == ([0.0, 3.0], [-INF, 0.25])


@pytest.mark.parametrize("run", EVERYONE)
def test_a_packed_answer_is_copied_from_half_the_bytes(run: Run) -> None:
    inputs = call([[NAN], [NAN]], [[0.0], [0.0]], [3, 0], answer_packed=True)
    inputs.partials.view(torch.bfloat16).flatten()[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert run(inputs).out.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_granularity_and_packing_follow_the_first_stages_kernels() -> None:
    cases = [(16, 1, "bfloat16"), (8, 2, "float8"), (16, 2, "bfloat16"), (128, 1, "float8"), (64, 1, "bfloat16")]
    assert [granularity_of(*case) for case in cases] == [64, 64, 16, 32, 32]
    assert [granularity_of(64, 2, "bfloat16"), granularity_of(64, 1, "float8"), granularity_of(128, 1, "mixed")] == [
        16
    ] * 3
    assert [packed_answer(64, 1, 1), packed_answer(16, 1, 1), packed_answer(16, 3, 1), packed_answer(64, 1, 2)] == [
        True, False, True, False,
    ]  # fmt: skip


# An independent formulation.


def by_hand(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scalar loops in Python's own floats, one split after the other as its keys come up."""
    rows, _, heads, lanes = inputs.partials.shape
    out, lse = torch.zeros((rows, heads, lanes)).double(), torch.full((rows, heads), -INF).double()
    starts, keys, splits = (t.tolist() for t in (inputs.query_starts, inputs.key_starts, inputs.split_starts))
    for request in range(len(starts) - 1):
        left, count = keys[request + 1] - keys[request], 0
        while left > 0 and count < splits[request + 1] - splits[request]:
            count, left = count + 1, left - inputs.granularity
        if inputs.exported is not None:
            count = min(count, int(inputs.exported[request]))
        for row in range(starts[request], starts[request + 1]):
            for head in range(heads):
                column = inputs.lse[row, :count, head, 0].double().tolist()
                live = [z for z in range(count) if column[z] > -INF]
                if not live:
                    continue
                total = math.fsum(math.exp(column[z] - column[live[0]]) for z in live)
                lse[row, head] = column[live[0]] + math.log(total)
                vectors = inputs.partials[row, :, head].double().tolist()
                for lane in range(lanes):
                    terms = (math.exp(column[z] - column[live[0]]) * vectors[z][lane] for z in live)
                    out[row, head, lane] = math.fsum(terms) / total
    return out, lse


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": "mixed", "requests": 6, "split_counts": "ragged"}, {"exported": "fewer", "garbage": "stale", "queries": 3},
        {"lengths": "short", "splits": 16, "exported": "absent", "garbage": "huge"}, {"masked": "last", "queries": 5},
        {"exported": "untouched", "lengths": "edges", "requests": 6, "weights": "staircase"}, {"splits": 1, "heads": 16},
    ],
)  # fmt: skip
def test_reference_agrees_with_scalar_loops(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(**{"lanes": 5, "heads": 2, **changes}))
    want, lse = by_hand(inputs)
    got = oracle.reference(inputs, torch.float64)
    assert torch.allclose(got.out, want, rtol=1e-11, atol=1e-13)
    assert torch.allclose(got.lse, lse, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_fp32_reference_is_within_the_budget(data: st.DataObject) -> None:
    axes: dict[str, Any] = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    case = StageCase(**axes | {"lanes": 64}, seed=data.draw(st.integers(0, 999)))
    if forbid(case) or case.requests * case.queries * case.heads > 200:
        return
    inputs = build(case)
    plain = oracle.reference(inputs)
    rounded = dataclasses.replace(plain, out=plain.out.to(inputs.out.dtype))
    checks = oracle.judge(inputs, rounded, oracle.HONEST[0].declared(inputs))
    assert [str(check) for check in checks if not check.passed] == []


# The judge.


def test_one_step_fails_where_the_answer_is_exact() -> None:
    for changes in ({"weights": "equal", "values": "integer_exact", "lengths": "long"}, {"splits": 1, "heads": 3}):
        inputs = build(BASE.varied(**changes))
        right = oracle.HONEST[0].answer(inputs)
        right.out.view(torch.int16)[1, 2, 3] += 1
        failing = [c for c in oracle.judge(inputs, right, oracle.HONEST[0].declared(inputs)) if not c.passed]
        assert [check.where for check in failing] == [(1, 2, 3)]


# What is no call.

PLAIN = call([[1.0, 2.0]], [[0.0, 0.0]], [32])
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "partials of three dimensions": ({"partials": torch.zeros(1, 2, 2)}, ValueError, "rows, splits, heads, lanes"),
    "partials in bf16": ({"partials": PLAIN.partials.bfloat16()}, TypeError, "should be torch.float32"),
    "an lse without its last dimension": ({"lse": torch.zeros(1, 2, 1)}, ValueError, r"should be \[1, 2, 1, 1\]"),
    "partials with gaps": ({"partials": torch.zeros(1, 2, 1, 4)[..., ::2]}, ValueError, "should be contiguous"),
    "an out of other lanes": ({"out": torch.zeros(1, 1, 3).half()}, ValueError, r"should be \[1, 1, 2\]"),
    "an out in fp32": ({"out": torch.zeros(1, 1, 2)}, TypeError, "should be bfloat16 or float16"),
    "starts in int64": ({"key_starts": torch.tensor([0, 32])}, TypeError, "key_starts=torch.int64"),
    "a count too many": ({"exported": torch.zeros(2).int()}, ValueError, r"exported=\[2\]: should be \[1\]"),
    "rows left over": ({"query_starts": torch.tensor([0, 2]).int()}, ValueError, "should end at 1 rows"),
    "more splits than slots": ({"split_starts": torch.tensor([0, 3]).int()}, ValueError, "more than 2 splits"),
    "no granularity": ({"granularity": 0}, ValueError, "granularity=0: should be positive"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(what: str) -> None:
    changes, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        oracle.reference(dataclasses.replace(PLAIN, **changes))


# The implementations on cases.


def judged(impl: Impl, case: StageCase) -> list[str]:
    """The sentences of what failed on the interpreter."""
    inputs = build(case)
    used = on_device(inputs, "cpu")
    with watch():
        outputs = impl.run(used)
    left = trespasses(inputs, used, WRITABLE)
    return left or [str(c) for c in oracle.judge(inputs, outputs, impl.precision(case, "interpreter")) if not c.passed]


STAND_IN = """
    import triton
    import triton.language as tl

    @triton.jit
    def _fwd_kernel_stage2_asm(
        Mid_O, Mid_lse, O, Final_lse, qo_indptr, kv_indptr, kv_last_page_lens, num_kv_splits_indptr, valid_split_count,
        stride_mid_ob, stride_mid_oh, stride_mid_os, stride_obs, stride_oh, stride_lse_bs, page_size: tl.constexpr,
        KV_INDPTR_IS_PAGE_LEVEL: tl.constexpr, MAYBE_FINAL_OUT: tl.constexpr, HAS_FINAL_LSE: tl.constexpr,
        USE_VALID_SPLIT_COUNT_REDUCE: tl.constexpr, BATCH_NUM, BLOCK_DV: tl.constexpr, Lv: tl.constexpr,
        mgc: tl.constexpr,
    ):
        request = tl.program_id(0)
        head = tl.program_id(1)
        lane = tl.arange(0, BLOCK_DV)
        row = tl.load(qo_indptr + request)
        last = (tl.load(valid_split_count + request) - 1) * stride_mid_os + row * stride_mid_ob + head * stride_mid_oh
        value = tl.load(Mid_O + last * Lv + lane, mask=lane < Lv)
        tl.store(O + row * stride_obs + head * stride_oh + lane, value, mask=lane < Lv)
        tl.store(Final_lse + row * stride_lse_bs + head, tl.load(Mid_lse + last) + mgc + BATCH_NUM)
"""


class TestAiter:
    """What keeps AITER's kernel from answering, and how it is called."""

    def test_a_missing_tree_and_another_device_are_reasons(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sources, "_aiter", tmp_path / "nowhere")
        reasons = NAMED["aiter-triton"].unsupported(BASE, "cuda")
        assert len(reasons) == 2 and "does not exist" in reasons[0] and reasons[1].startswith("on=cuda")
        assert NAMED["aiter-triton"].source() == b""

    def test_a_stand_in_is_handed_every_table_and_stride(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # It answers with each request's last filled slot, and adds the granularity and the requests to its log-sum-exp.
        (tmp_path / "aiter" / "ops" / "triton").mkdir(parents=True)
        (tmp_path / "aiter" / "__init__.py").touch()
        (tmp_path / "aiter" / "mla.py").write_text(textwrap.dedent(STAND_IN))
        monkeypatch.setattr(sources, "_aiter", tmp_path)
        assert NAMED["aiter-triton"].unsupported(BASE, "interpreter") == []
        inputs = call([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]], [99, 99],
                      exported=torch.tensor([2, 3], dtype=torch.int32))  # fmt: skip
        assert answer(NAMED["aiter-triton"].run, inputs) == ([2.0, 6.0], [1.5 + 18, 5.5 + 18])


@pytest.mark.aiter
@pytest.mark.skipif(not HELD, reason="MLA_ORACLE_AITER names no AITER source tree with the host code of its decode")
class TestRealAiter:
    """What AITER's kernel does at the edge."""

    AITER = NAMED["aiter-triton"]

    @pytest.mark.parametrize(
        "text", [REGRESSIONS[0], REGRESSIONS[4], REGRESSIONS[5], REGRESSIONS[6]], ids=lambda t: t[23:60]
    )
    def test_it_answers_what_has_keys(self, text: str) -> None:
        assert judged(self.AITER, parse(text)) == []

    def test_a_request_without_keys_divides_0_by_0(self) -> None:
        out, lse = answer(self.AITER.run, call([[NAN], [3.0]], [[NAN], [0.25]], [0, 1]))
        assert math.isnan(out[0]) and out[1] == 3.0 and lse == [-INF, 0.25]

    def test_it_multiplies_a_split_without_a_visible_key_by_0(self) -> None:
        out, _ = answer(self.AITER.run, call([[1.0, NAN]], [[0.0, -INF]], [32]))
        assert math.isnan(out[0])
