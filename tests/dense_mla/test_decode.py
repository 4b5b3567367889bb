"""Is dense MLA decode answered as worked out by hand, and does its judge tell right from wrong?"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import parse
from cases.covering import sweep_cases
from cases.dense_mla.decode import (
    AXES,
    PROBES,
    REGRESSIONS,
    WRITABLE,
    DecodeCase,
    build,
    forbid,
    heavy,
    visible_tokens,
)
from cases.dense_mla.decode_call import DecodeInputs, DecodeOutputs
from cases.memory import is_vast, on_device, trespasses
from cases.precision import Precision
from impl.dense_mla import decode_aiter, decode_rows, decode_torch, decode_triton
from impl.dense_mla.decode import IMPLS
from impl.executions.memory_watch import watch
from impl.implementation import Impl
from impl.sources import settings as sources
from oracle.check import verdict_of
from oracle.dense_mla import decode as oracle
from oracle.dense_mla.decode_call import visible
from oracle.dense_mla.decode_faults import HONEST, MUTANTS, Way, compute
from reports.laws import break_of, identical, kept

VLLM, AITER = os.environ.get("MLA_ORACLE_VLLM"), os.environ.get("MLA_ORACLE_AITER")
needs_vllm = [pytest.mark.vllm, pytest.mark.skipif(VLLM is None, reason="MLA_ORACLE_VLLM names no vLLM source tree")]
needs_aiter = [
    pytest.mark.aiter,
    pytest.mark.skipif(AITER is None, reason="MLA_ORACLE_AITER names no AITER source tree"),
]
NAMED = {impl.name: impl for impl in IMPLS}
OURS = [pytest.param(decode_triton.run, id="ours-triton"), pytest.param(decode_torch.run, id="torch-bf16")]
REFERENCE = pytest.param(oracle.reference, id="reference")
EVERYONE = [
    REFERENCE,
    *OURS,
    pytest.param(NAMED["vllm-triton"].run, id="vllm-triton", marks=needs_vllm),
    pytest.param(NAMED["aiter-triton"].run, id="aiter-triton", marks=needs_aiter),
]
Run = Callable[[DecodeInputs], DecodeOutputs]
BASE = DecodeCase()
RIGHT = HONEST[0]
BF16 = Precision(probability="bfloat16")


@pytest.fixture(autouse=True)
def _real_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(VLLM) if VLLM else None)
    monkeypatch.setattr(sources, "_aiter", Path(AITER) if AITER else None)


def call(slots: list[list[int]], query: float = 0.0, /, **changes: Any) -> DecodeInputs:
    """Requests over eight tokens in pages of two, of which token n holds n, 1 and, behind the two value lanes, n and 0.

    A row asks with `query` in its third lane, once for each of two heads; fp32 out.
    """
    qlen = changes.pop("qlen", 1)
    rows = len(slots) * qlen
    token = torch.arange(8.0)
    cache = torch.stack([token, torch.ones(8), token, torch.zeros(8)], 1).bfloat16().view(4, 2, 4)
    vector = torch.zeros(rows, 2, 4, dtype=torch.bfloat16)
    vector[..., 2] = query
    plain = DecodeInputs(
        query=vector, cache=cache, slots=torch.tensor([s for each in slots for s in each], dtype=torch.int32),
        kv_indptr=torch.tensor([0, *np.cumsum([len(each) for each in slots])], dtype=torch.int32), qlen=qlen, causal=True,
        scale=1.0, query_scale=torch.tensor(1.0), cache_scale=torch.tensor(1.0), out=torch.full((rows, 2, 2), math.nan),
        splits=2, live=len(slots),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def first_lane(answer: DecodeOutputs) -> list[float]:
    """What every row has in the first lane of its second head."""
    return [float(value) for value in answer.out[:, 1, 0]]


# Answers worked out by hand.


@pytest.mark.parametrize("run", EVERYONE)
def test_one_token_is_the_answer_and_its_score_the_log_sum_exp(run: Run) -> None:
    answer = run(call([[2]], 2.0, scale=0.25))
    assert answer.out.tolist() == [[[2.0, 1.0]] * 2]
    assert answer.lse is not None and answer.lse.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("run", EVERYONE)
def test_a_zero_query_means_over_the_listed_tokens(run: Run) -> None:
    # (2 + 3) / 2 and (4 + 5 + 0 + 1) / 4.
    answer = run(call([[2, 3], [4, 5, 0, 1]]))
    assert first_lane(answer) == [2.5, 2.5]
    assert answer.lse is not None and answer.lse[:, 0].tolist() == pytest.approx([math.log(2), math.log(4)], rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_two_tokens_share_by_the_exponential_of_their_scores(run: Run) -> None:
    # Scores 0 and ln 3: shares 1/4 and 3/4, and Z is 4.
    answer = run(call([[0, 1]], 1.0, scale=math.log(3.0)))
    assert first_lane(answer) == pytest.approx([0.75], abs=1e-3)
    assert answer.lse is not None and answer.lse.tolist() == [[pytest.approx(math.log(4), rel=1e-6)] * 2]


@pytest.mark.parametrize("run", EVERYONE)
def test_a_row_of_a_causal_block_ends_at_itself_and_one_of_another_block_does_not(run: Run) -> None:
    # Tokens 6, 7, 4, 5 in this order; the block is the last three.
    slots = [[6, 7, 4, 5]]
    assert first_lane(run(call(slots, qlen=3))) == pytest.approx([6.5, 17 / 3, 5.5], rel=1e-6)
    assert first_lane(run(call(slots, qlen=3, causal=False))) == [5.5] * 3


@pytest.mark.parametrize("run", EVERYONE)
def test_a_shard_sees_what_of_its_tokens_lies_before_a_row(run: Run) -> None:
    # Seven tokens, of which the second of two shards holds positions 1, 3 and 5; the rows are positions 4, 5 and 6.
    shard = {"global_indptr": torch.tensor([0, 7], dtype=torch.int32), "world": 2, "rank": 1, "qlen": 3}
    assert first_lane(run(call([[2, 3, 6]], **shard))) == pytest.approx([2.5, 11 / 3, 11 / 3], rel=1e-6)


@pytest.mark.parametrize("run", [REFERENCE, *OURS])
def test_a_row_that_sees_nothing_is_zero(run: Run) -> None:
    # The first block is longer than its request, the second request has no token.
    answer = run(call([[5], []], qlen=2))
    assert answer.out[0].tolist() == answer.out[2].tolist() == [[0.0, 0.0]] * 2
    assert first_lane(answer)[1] == 5.0
    assert answer.lse is not None and answer.lse[:, 0].tolist() == [-math.inf, 0.0, -math.inf, -math.inf]


@pytest.mark.parametrize("run", [REFERENCE, *OURS])
@pytest.mark.parametrize("encoding", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_both_scales_count_for_the_scores_and_the_caches_for_the_values(run: Run, encoding: torch.dtype) -> None:
    plain = call([[0, 1]], 2.0)
    inputs = dataclasses.replace(
        plain, query=plain.query.to(encoding), cache=plain.cache.to(encoding), query_scale=torch.tensor(0.5),
        cache_scale=torch.tensor(4.0), scale=math.log(3.0) / 4,
    )  # fmt: skip
    # The stored score 2 becomes 2 * 0.5 * 4 * ln 3 / 4; the stored value 1 becomes 4.
    answer = run(inputs)
    assert answer.out[0, 0].tolist() == pytest.approx([3.0, 4.0], abs=4e-3)
    assert answer.lse is not None and float(answer.lse[0, 0]) == pytest.approx(math.log(4), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_numbers_of_bf16_have_no_scale(run: Run) -> None:
    scaled = {"query_scale": torch.tensor(3.0), "cache_scale": torch.tensor(5.0)}
    assert first_lane(run(call([[4, 5]], **scaled))) == [4.5]


@pytest.mark.parametrize("run", EVERYONE)
def test_what_nobody_sees_may_be_anything(run: Run) -> None:
    inputs = call([[2, 3, 4]], 1.0, qlen=2, scale=math.log(3.0))
    before = run(inputs)
    cache = inputs.cache.clone()
    # Token 4 is the last one, which the first row does not see; 5 stands behind it in its page.
    cache.view(8, 4)[[0, 1, 4, 5, 6, 7]] = math.nan
    slots = torch.cat([inputs.slots, torch.tensor([-1, 2**31 - 1], dtype=torch.int32)])
    after = run(dataclasses.replace(inputs, cache=cache, slots=slots, out=torch.full((2, 2, 2), math.nan)))
    assert after.out[0].tolist() == before.out[0].tolist()


def test_no_requests_are_an_empty_answer() -> None:
    for run in (oracle.reference, decode_triton.run, decode_torch.run):
        answer = run(build(parse(REGRESSIONS[0])))
        assert answer.out.shape == (0, 16, 64) and answer.lse is not None and answer.lse.shape == (0, 16)


# Limits.


@pytest.mark.parametrize(
    ("length", "qlen", "world", "rank", "want"),
    [
        (10, 4, 2, 0, [4, 4, 5, 5]), (10, 4, 2, 1, [3, 4, 4, 5]), (12, 4, 2, 0, [5, 5, 6, 6]),
        (1000, 3, 8, 0, [125, 125, 125]), (1000, 3, 8, 7, [124, 124, 125]),
        (3, 8, 2, 0, [0, 0, 0, 0, 0, 1, 1, 2]), (3, 8, 2, 1, [0, 0, 0, 0, 0, 0, 1, 1]),
        # A dummy as long as makes every row of a block of four see a token of eight shards.
        (32, 4, 8, 4, [4, 4, 4, 4]), (32, 4, 8, 5, [3, 4, 4, 4]), (32, 4, 8, 7, [3, 3, 3, 4]), (0, 2, 4, 1, [0, 0]),
    ],
)  # fmt: skip
def test_limits_of_a_shard_as_worked_out(length: int, qlen: int, world: int, rank: int, want: list[int]) -> None:
    inputs = shard_of(length, qlen, world, rank)
    assert [visible(inputs, row) for row in range(qlen)] == want
    assert decode_rows.limits(inputs).tolist() == want


def shard_of(length: int, qlen: int, world: int, rank: int) -> DecodeInputs:
    """One request of zeros, of which a shard holds its share."""
    held = len(range(rank, length, world))
    return call(
        [[0] * held], qlen=qlen, world=world, rank=rank, global_indptr=torch.tensor([0, length], dtype=torch.int32)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.booleans())
def test_limits_are_those_of_positions(length: int, qlen: int, world: int, sharded: bool, causal: bool) -> None:
    mode = "round_robin" if sharded else "causal" if causal else "whole"
    case = BASE.varied(mode=mode, world=world if sharded else 1, qlen=qlen)
    total = []
    for rank, shard in enumerate(("first", "middle", "last")):
        if not sharded and rank:
            continue
        case = case.varied(shard=shard if case.world > 1 else "first")
        inputs = shard_of(length, qlen, case.world, case.rank)
        if not sharded:
            inputs = dataclasses.replace(inputs, global_indptr=None, causal=causal)
        want = [visible_tokens(case, length, inputs.slots.shape[0], token) for token in range(qlen)]
        assert [visible(inputs, row) for row in range(qlen)] == decode_rows.limits(inputs).tolist() == want
        total.append(want[-1])
    if sharded:
        ranks = [shard_of(length, qlen, world, rank) for rank in range(world)]
        for token in range(qlen):
            assert sum(visible(inputs, token) for inputs in ranks) == max(0, length - qlen + token + 1)


def test_a_table_of_pages_is_read_off_the_slots_and_refused_where_there_is_none() -> None:
    assert decode_rows.block_table(call([[4, 5, 2], [6]])).tolist() == [[2, 1], [3, 0]]
    with pytest.raises(ValueError, match="slots of request 0: should follow each other within pages of 2 tokens"):
        decode_rows.block_table(call([[5, 4]]))


# An independent formulation.


def by_hand(inputs: DecodeInputs) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Scalar loops in Python's own floats, tokens chosen by their positions."""
    flat = inputs.cache.reshape(-1, inputs.cache.shape[2]).float().double().tolist()
    query = inputs.query.float().double().tolist()
    key_scale = float(inputs.cache_scale) if inputs.cache.dtype != torch.bfloat16 else 1.0
    query_scale = float(inputs.query_scale) if inputs.query.dtype != torch.bfloat16 else 1.0
    answer, lse = np.zeros(inputs.out.shape), np.full(inputs.query.shape[:2], -math.inf)
    for row in range(inputs.live * inputs.qlen):
        b, token = divmod(row, inputs.qlen)
        low, high = inputs.kv_indptr[b : b + 2].tolist()
        offsets = inputs.kv_indptr if inputs.global_indptr is None else inputs.global_indptr
        own = int(offsets[b + 1] - offsets[b]) - inputs.qlen + token
        seen = [
            flat[slot]
            for j, slot in enumerate(inputs.slots.tolist()[low:high])
            if not inputs.causal or j * inputs.world + inputs.rank <= own
        ]
        for h in range(inputs.query.shape[1] if seen else 0):
            scale = inputs.scale * query_scale * key_scale
            scores = [scale * math.fsum(a * c for a, c in zip(query[row][h], key, strict=True)) for key in seen]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = math.fsum(weights)
            lse[row, h] = top + math.log(total)
            for lane in range(answer.shape[2]):
                answer[row, h, lane] = (
                    key_scale * math.fsum(w * k[lane] for w, k in zip(weights, seen, strict=True)) / total
                )
    return answer, lse


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": "edges", "requests": 5, "qlen": 3, "slots": "shared", "padding": "dummy"},
        {"mode": "whole", "values": "wide", "page": 1, "pages": "padded", "garbage": "huge"},
        {"mode": "round_robin", "world": 3, "shard": "middle", "qlen": 4, "kv_len": 11, "padding": "empty"},
        {"cache_dtype": "float8_e4m3fn", "quantised_query": True, "scales": "odd", "values": "plateau"},
        {"cache_dtype": "float8_e4m3fnuz", "scales": "power_of_two", "layout": "strided", "lengths": "ragged"},
    ],
)
def test_reference_agrees_with_scalar_loops(changes: dict[str, Any]) -> None:
    case = BASE.varied(**{"heads": 3, "kv_len": 9, "latent_lanes": 13, "rope_lanes": 3, **changes})
    inputs = build(case)
    out, lse = (torch.from_numpy(each) for each in by_hand(inputs))
    truth, _, asked = oracle.budget(inputs, BF16)
    for answer in (oracle.reference(inputs, torch.float64), truth):
        assert answer.lse is not None
        assert torch.allclose(answer.out, out, rtol=1e-11, atol=1e-13)
        assert torch.allclose(answer.lse, lse, rtol=1e-11, atol=1e-13)
    assert (
        asked.all(1).tolist() == asked.any(1).tolist() == [row < case.requests * case.qlen for row in range(len(asked))]
    )


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_fp32_reference_is_within_the_budget_of_fp32(data: st.DataObject) -> None:
    axes: dict[str, Any] = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    axes |= {"requests": min(axes["requests"], 2), "output": "float32", "heads": min(axes["heads"], 17)}
    case = DecodeCase(**axes, seed=data.draw(st.integers(0, 999)))
    if forbid(case) or heavy(case):
        return
    inputs = build(case)
    checks = oracle.judge(inputs, oracle.reference(inputs), Precision(probability="float32"))
    assert [str(check) for check in checks if not check.passed] == []


# The cases.


def test_every_head_count_and_block_length_is_asked_what_is_known_exactly_by_a_row_that_sees_a_token() -> None:
    known: dict[tuple[str, object], dict[str, int]] = {}
    for case in sweep_cases("dense_mla.decode", "default"):
        assert isinstance(case, DecodeCase)
        if case.values in PROBES:
            inputs = build(case)
            most = max(visible(inputs, row) for row in range(case.requests * case.qlen))
            for axis in ("heads", "qlen", "splits", "page", "cache_dtype"):
                seen = known.setdefault((axis, getattr(case, axis)), dict.fromkeys(PROBES, 0))
                seen[case.values] = max(seen[case.values], most)
    for axis in ("heads", "qlen", "splits", "page", "cache_dtype"):
        for value in AXES[axis]:
            assert all(known[axis, value].values()), (axis, value)
            # A few of them have something to tell one token from another.
            assert sum(most > 1 for most in known[axis, value].values()) > 3, (axis, value)


def test_a_probe_without_a_token_on_its_shard_is_no_question() -> None:
    assert forbid(BASE.varied(values="needle", kv_len=0)) == [
        "values=needle needs a token on the shard, or there is no answer to know"
    ]
    last = BASE.varied(values="needle", mode="round_robin", world=8, shard="last")
    assert forbid(last.varied(kv_len=7)) and not forbid(last.varied(kv_len=8))
    assert not forbid(BASE.varied(kv_len=0))


def test_unread_memory_is_hostile() -> None:
    inputs = build(BASE.varied(padding="dummy", page=16, kv_len=33, pages="padded"))
    used = set(inputs.slots[:66].tolist())
    assert inputs.cache.isnan().all(2).flatten().sum() == inputs.capacity - len(used)
    assert {-1, 2**31 - 1, -(2**31), inputs.capacity} <= set(inputs.slots[int(inputs.kv_indptr[-1]) :].tolist())
    # The dummies ask with NaN, over nobody's page.
    assert inputs.live == 2 and inputs.requests == 4 and inputs.query[4:].isnan().all()
    assert inputs.slots[66:70].tolist() == [0, 1, 0, 1] and inputs.cache[0].isnan().all()


def test_shared_pages_are_listed_by_all_and_future_tokens_by_none_before() -> None:
    inputs = build(BASE.varied(slots="shared", page=16, kv_len=65, future="nan"))
    first, second = inputs.slots[:65].tolist(), inputs.slots[65:130].tolist()
    assert first[:48] == second[:48] and not set(first[48:]) & set(second[48:])
    truth, _, asked = oracle.budget(inputs, BF16)
    assert asked.all(1).tolist() == asked.any(1).tolist() == [True, False, True, False]
    assert truth.out[asked].isfinite().all()


def test_a_far_call_has_rows_beyond_two_to_the_31_and_costs_little() -> None:
    for text in REGRESSIONS:
        case = parse(text)
        assert isinstance(case, DecodeCase)
        if case.reach != "near":
            tensor = getattr(build(case), case.reach.removeprefix("far_"))
            assert is_vast(tensor) and tensor.stride(0) < 1 << 31 <= tensor.stride(0) * (tensor.shape[0] - 1)


# The judge.


def test_mutant_names_are_unique_and_a_mutant_without_its_fault_is_the_right_way() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    inputs = build(BASE.varied(mode="round_robin", world=2))
    assert identical(compute(inputs, Way()), RIGHT.answer(inputs))


def test_one_element_off_by_one_step_fails_where_the_answer_is_exact() -> None:
    inputs = build(BASE.varied(values="uniform_exact", qlen=1, kv_len=16))
    out = RIGHT.answer(inputs).out.clone()
    place = tuple(int(i) for i in (out != 0).nonzero()[5])
    out.view(torch.int16)[place] += 1
    failing = [check for check in oracle.judge(inputs, DecodeOutputs(out), BF16) if not check.passed]
    assert [check.where for check in failing] == [place] and "bit for bit" in str(failing[0])


def test_rows_that_do_not_count_are_not_looked_at_and_empty_ones_are() -> None:
    inputs = build(BASE.varied(padding="dummy", lengths="edges"))
    right = compute(inputs, Way())
    assert right.lse is not None
    out, lse = right.out.clone(), right.lse.clone()
    out[4:], lse[4:] = math.nan, math.nan
    assert all(check.passed for check in oracle.judge(inputs, DecodeOutputs(out, lse), BF16))
    # The second request has no token.
    out[2, 3, 5] = 2.0**-20
    failing = [check for check in oracle.judge(inputs, DecodeOutputs(out, lse), BF16) if not check.passed]
    assert [(check.output, check.where) for check in failing] == [("out of rows that see nothing", (2, 3, 5))]


def test_a_missing_a_misshapen_and_a_poisoned_answer_fail() -> None:
    inputs = build(BASE)
    right = RIGHT.answer(inputs)
    for out in (None, right.out.float(), right.out[:, :2], inputs.out):
        checks = oracle.judge(inputs, dataclasses.replace(right, out=out), BF16)
        assert not all(check.passed for check in checks)


def test_a_shard_without_a_log_sum_exp_fails_and_another_block_does_not() -> None:
    for case, passes in ((BASE, True), (BASE.varied(mode="round_robin", world=2), False)):
        inputs = build(case)
        bare = dataclasses.replace(compute(inputs, Way()), lse=None)
        assert all(check.passed for check in oracle.judge(inputs, bare, BF16)) is passes


def test_a_key_that_is_rounded_must_be_declared() -> None:
    inputs = build(BASE.varied(cache_dtype="float8_e4m3fn", scales="odd", values="needle", output="float32"))
    answer = compute(inputs, Way(key="bfloat16", probability="float32"))
    undeclared = Precision(probability="float32")
    assert not all(check.passed for check in oracle.judge(inputs, answer, undeclared))
    declared = Precision(probability="float32", key="bfloat16")
    assert all(check.passed for check in oracle.judge(inputs, answer, declared))


# Laws.

SPOKEN = (
    BASE.varied(heads=3, requests=2, kv_len=17, values="integer_exact"),
    BASE.varied(heads=3, mode="whole", kv_len=17, cache_dtype="float8_e4m3fn", scales="odd"),
    BASE.varied(heads=3, mode="whole", kv_len=17, cache_dtype="float8_e4m3fnuz", padding="dummy"),
)


def test_a_law_that_changes_the_rows_of_a_call_says_so() -> None:
    # torch's batched product rounds a row one way among five others and another way among nine.
    for case in (*SPOKEN, BASE.varied(padding="empty"), BASE.varied(padding="dummy", requests=3, mode="round_robin")):
        inputs = build(case)
        for law in oracle.LAWS:
            edited = law.edit(inputs)
            if edited is not None and law.measure == "bitwise" and not law.reshapes:
                assert edited.query.shape == inputs.query.shape, (law.name, case.id)


@pytest.mark.parametrize("left", [0.0, 7.0, math.nan])
def test_within_the_budget_a_law_asks_nothing_of_heads_that_nobody_wrote(left: float) -> None:
    # NaN asks the last three heads of the edited call: what an implementation makes of it is its own affair.
    (law,) = (law for law in oracle.LAWS if law.name == "J1 padding heads")
    for case in (BASE.varied(heads=2, values="wide"), BASE.varied(lengths="edges", mode="round_robin", world=2)):
        inputs = build(case)
        edited = law.edit(inputs)
        assert edited is not None and bool(edited.query[:, -3:].isnan().all())
        answer = compute(edited, Way())
        assert answer.lse is not None
        answer.out[:, -3:], answer.lse[:, -3:] = left, left
        checks = kept(law, inputs, compute(inputs, Way()), edited, answer, oracle.judge, BF16, by_shape=True)
        assert [str(check) for check in checks if not check.passed] == []
        # The heads in front of them are asked.
        answer.out[-1, -4, 0] += 1.0
        checks = kept(law, inputs, compute(inputs, Way()), edited, answer, oracle.judge, BF16, by_shape=True)
        assert not all(check.passed for check in checks)


def test_laws_within_the_budget_hold_of_the_reference_itself() -> None:
    spoken = set()
    for law in oracle.LAWS:
        for case in SPOKEN if law.measure == "budget" else ():
            inputs = build(case)
            edited = law.edit(inputs)
            if edited is not None and "later tokens" not in law.name:
                spoken.add(law.name)
                rows = inputs.live * inputs.qlen
                first, second = (oracle.reference(each, torch.float64) for each in (inputs, edited))
                assert torch.allclose(first.out[:rows], second.out, rtol=1e-6, atol=1e-12), law.name
    assert {name.split()[0] for name in spoken} == {"J5", "J6", "J12", "J13"}


def test_the_next_rank_breaks_the_law_of_positions() -> None:
    # The shards of a block, merged by their log-sum-exp, are the block; with a wrong rank they are not.
    inputs = build(BASE.varied(heads=2, requests=1, qlen=4, kv_len=11, values="wide", page=1))
    whole = oracle.reference(inputs, torch.float64)
    for wrong in (0, 1):
        parts = []
        for rank in range(3):
            held = inputs.slots[:11][rank::3]
            shard = dataclasses.replace(
                inputs, slots=held, kv_indptr=torch.tensor([0, len(held)], dtype=torch.int32),
                global_indptr=torch.tensor([0, 11], dtype=torch.int32), world=3, rank=(rank + wrong) % 3,
            )  # fmt: skip
            parts.append(oracle.reference(shard, torch.float64))
        lse = torch.stack([part.lse for part in parts if part.lse is not None])
        weight = (lse - lse.logsumexp(0)).exp()
        merged = (torch.stack([part.out for part in parts]) * weight[..., None]).sum(0)
        assert torch.allclose(merged, whole.out, rtol=1e-12, atol=1e-14) is (wrong == 0)


def test_parts_by_the_size_of_the_batch_keep_the_budget_and_break_a_law() -> None:
    # ROCm/aiter#4364: neighbours in the batch change into how many parts a row is cut, and so how it is rounded.
    inputs = build(BASE.varied(heads=2, requests=3, qlen=1, kv_len=130, splits=16, output="float32"))
    (alone,) = (law for law in oracle.LAWS if law.name == "J8 a request alone")
    ways: dict[str, Run] = {
        "by the batch": lambda asked: compute(asked, Way(parts=16 // asked.requests)),
        "by the call": lambda asked: compute(asked, Way()),
    }
    kept = {}
    for name, run in ways.items():
        assert all(check.passed for check in oracle.judge(inputs, run(inputs), BF16))
        checks = break_of(alone, inputs, run(inputs), run, oracle.judge, BF16)
        assert checks is not None
        kept[name] = all(check.passed for check in checks)
    assert kept == {"by the batch": False, "by the call": True}


# What is no call.

_ZEROS = torch.zeros(1, 2, 4)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query of two dimensions": ({"query": torch.zeros(2, 4).bfloat16()}, ValueError, "three dimensions"),
    "cache of two dimensions": ({"cache": torch.zeros(8, 4).bfloat16()}, ValueError, "three dimensions"),
    "lanes apart": ({"query": torch.zeros(1, 2, 8).bfloat16()[..., ::2]}, ValueError, "lane stride 2: should be 1"),
    "cache of other lanes": ({"cache": torch.zeros(4, 2, 5).bfloat16()}, ValueError, "should have the query's 4 lanes"),
    "cache of fp16": ({"cache": torch.zeros(4, 2, 4).half()}, TypeError, "should be bfloat16, float8_e4m3fn or"),
    "query of fp16": ({"query": _ZEROS.half()}, TypeError, "should be bfloat16 or of the cache's type"),
    "fp8 query over bf16": ({"query": _ZEROS.to(torch.float8_e4m3fn)}, TypeError, "or of the cache's type"),
    "out wider than a token": ({"out": torch.zeros(1, 2, 5)}, ValueError, r"should be \[1, 2, 1 to 4\]"),
    "out of other heads": ({"out": torch.zeros(1, 3, 2)}, ValueError, r"should be \[1, 2, 1 to 4\]"),
    "out of fp16": ({"out": torch.zeros(1, 2, 2).half()}, TypeError, "should be bfloat16 or float32"),
    "blocks that do not come out even": ({"qlen": 2, "query": torch.zeros(3, 2, 4).bfloat16(),
                                          "out": torch.zeros(3, 2, 2)}, ValueError, "qlen=2: should be a positive divisor"),
    "blocks of nothing": ({"query": _ZEROS.bfloat16(), "qlen": 0}, ValueError, "qlen=0: should be a positive divisor"),
    "too few offsets": ({"kv_indptr": torch.zeros(1).int()}, ValueError, "should hold 2 for 1 requests"),
    "long offsets": ({"kv_indptr": torch.zeros(2).long()}, TypeError, "should be int32 of one dimension"),
    "long slots": ({"slots": torch.zeros(2).long()}, TypeError, "should be int32 of one dimension"),
    "scales of several": ({"cache_scale": torch.ones(2)}, TypeError, "should be one float32"),
    "no part": ({"splits": 0}, ValueError, "splits=0: should be 1 or more"),
    "more live than there are": ({"live": 2}, ValueError, "live=2: should be 0 to 1"),
    "no shard": ({"world": 0}, ValueError, "world=0: should be 1 or more"),
    "rank beyond the shards": ({"world": 2, "rank": 2}, ValueError, "rank=2: should be 0 to 1"),
    "negative rank": ({"rank": -1}, ValueError, "rank=-1: should be 0 to 0"),
    "shard of a whole block": ({"causal": False, "global_indptr": torch.zeros(2).int()}, ValueError, "should be left out"),
    "shard of a block by its own lengths": ({"world": 2, "qlen": 2, "query": torch.zeros(2, 2, 4).bfloat16(),
                                             "out": torch.zeros(2, 2, 2)}, ValueError, "should have the global lengths"),
    "global lengths of others": ({"global_indptr": torch.zeros(3).int()}, ValueError, "should hold 2 for 1 requests"),
}  # fmt: skip


@pytest.mark.parametrize("run", [REFERENCE, *OURS])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(run: Run, what: str) -> None:
    changes, error, sentence = REFUSED[what]
    inputs = dataclasses.replace(call([[1]], 1.0), **changes)
    with pytest.raises(error, match=sentence):
        run(inputs)


def test_the_reference_refuses_slots_that_the_cache_has_not() -> None:
    with pytest.raises(ValueError, match=r"slots\[1\]=8: should be 0 to 7, a slot of the cache"):
        oracle.reference(call([[1, 8]]))
    with pytest.raises(ValueError, match="kv_indptr=0, 3 of request 0: should ascend within the 2 slots"):
        oracle.reference(call([[1, 2]], kv_indptr=torch.tensor([0, 3], dtype=torch.int32)))


# The implementations on cases.


def judged(impl: Impl, case: DecodeCase) -> tuple[str, list[str]]:
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


def test_a_row_of_our_kernel_depends_on_nothing_but_what_it_sees() -> None:
    inputs = build(BASE.varied(heads=2, requests=2, qlen=1, kv_len=130, splits=3))
    together = decode_triton.run(on_device(inputs, "cpu"))
    alone = dataclasses.replace(
        inputs,
        query=inputs.query[:1],
        out=inputs.out[:1],
        kv_indptr=inputs.kv_indptr[:2],
        slots=inputs.slots[:130],
        live=1,
    )
    assert torch.equal(decode_triton.run(on_device(alone, "cpu")).out, together.out[:1])


def test_nan_codes_of_fp8_stay_nan_in_our_kernel() -> None:
    for encoding, code in ((torch.float8_e4m3fn, 0x7F), (torch.float8_e4m3fn, 0xFF), (torch.float8_e4m3fnuz, 0x80)):
        inputs = call([[3]])
        cache = inputs.cache.to(encoding)
        cache.view(torch.uint8)[1, 1, 1] = code
        answer = decode_triton.run(dataclasses.replace(inputs, cache=cache))
        assert answer.out[0, 0].isnan().tolist() == [True, True]


def test_the_compile_key_tells_apart_what_is_compiled_apart() -> None:
    key = NAMED["ours-triton"].compile_key
    assert key(BASE) == key(BASE.varied(seed=5, values="wide"))
    assert key(BASE) != key(BASE.varied(mode="whole")) and key(BASE) != key(BASE.varied(rope_lanes=0))


class TestAssembly:
    """What keeps AITER's assembly kernels from answering, and how they are called."""

    PRODUCTION = BASE.varied(latent_lanes=512, rope_lanes=64)

    @pytest.fixture
    def gfx(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        """Makes the machine one of AMD's, with AITER."""

        def become(name: str) -> None:
            device = types.SimpleNamespace(gcnArchName=f"{name}:sramecc+:xnack-")
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: device)
            monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())

        return become

    def test_it_needs_its_device_and_its_library(self) -> None:
        reasons = NAMED["aiter-asm"].unsupported(self.PRODUCTION, "interpreter")
        assert [reason.split(":")[0] for reason in reasons] == ["on=interpreter", "aiter is not installed"]

    @pytest.mark.parametrize(
        ("arch", "changes", "start"),
        [
            ("gfx950", {}, None), ("gfx942", {"heads": 17}, None), ("gfx950", {"mode": "whole", "qlen": 3}, None),
            ("gfx950", {"cache_dtype": "float8_e4m3fn", "quantised_query": True}, None),
            ("gfx950", {"mode": "whole", "qlen": 2, "heads": 25, "cache_dtype": "float8_e4m3fn"}, None),
            ("gfx90a", {}, "on=hip"), ("gfx950", {"rope_lanes": 0}, "512+0 lanes"),
            ("gfx950", {"heads": 129}, "heads=129"), ("gfx950", {"output": "float32"}, "output=float32"),
            ("gfx950", {"pages": "padded"}, "the kernels read one flat cache"),
            ("gfx950", {"cache_dtype": "float8_e4m3fnuz"}, "cache_dtype=float8_e4m3fnuz"),
            ("gfx942", {"cache_dtype": "float8_e4m3fn"}, "cache_dtype=float8_e4m3fn"),
            ("gfx950", {"mode": "round_robin"}, "mode=round_robin"), ("gfx942", {"mode": "whole"}, "mode=whole"),
            ("gfx950", {"mode": "whole", "heads": 16, "cache_dtype": "float8_e4m3fn"}, "heads=16"),
        ],
    )  # fmt: skip
    def test_every_restriction_is_a_reason(
        self, gfx: Callable[[str], None], arch: str, changes: dict[str, Any], start: str | None
    ) -> None:
        gfx(arch)
        reasons = NAMED["aiter-asm"].unsupported(self.PRODUCTION.varied(**changes), "hip")
        assert len(reasons) == (start is not None) and all(reason.startswith(str(start)) for reason in reasons)

    @pytest.mark.parametrize(("heads", "want"), [(2, 16), (12, 16), (17, 32), (48, 48)])
    def test_heads_are_padded_on_the_way_in_and_cut_on_the_way_out(
        self, monkeypatch: pytest.MonkeyPatch, heads: int, want: int
    ) -> None:
        def mla_decode_fwd(q, kv, o, qo, kv_indptr, slots, last, qlen, **asked):  # type: ignore[no-untyped-def]
            assert q.shape[1] == want and q.is_contiguous() and kv.shape[1:3] == (1, 1)
            assert qo.tolist() == [0, 2, 4] and last.tolist() == [1, 1] and qlen == 2 and asked["causal"]
            assert not o.any() and asked["return_lse"] and asked["sm_scale"] == inputs.scale
            flat = dataclasses.replace(
                inputs, query=q, cache=kv.view(-1, 1, kv.shape[-1]), kv_indptr=kv_indptr, slots=slots, out=o
            )
            answer = decode_torch.run(flat)
            return o, answer.lse

        inputs = build(BASE.varied(heads=heads))
        monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
        standin = types.ModuleType("aiter.mla")
        standin.mla_decode_fwd = mla_decode_fwd  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "aiter.mla", standin)
        answer = decode_aiter.assembly(inputs)
        assert answer.out is inputs.out
        assert all(check.passed for check in oracle.judge(inputs, answer, BF16))


# A stand-in of the Gluon kernel: it repeats the first token that every row sees, and what it was given as log-sum-exp.
GLUON = """
    import torch

    def mla_gluon(
        q_nope, q_pe, kv_c, o, page_table, seq_info, sm_scale, k_pe=None, kv_pe_offset=512, use_2d_view=True,
        kv_scale=1.0, min_kv_seq_len=1, return_lse=False,
    ):
        assert k_pe is None and kv_pe_offset == q_nope.shape[-1] and not use_2d_view and return_lse
        assert kv_c.dim() == 2 and q_pe.shape[:-1] == q_nope.shape[:-1] == o.shape[:-1] and min_kv_seq_len == 1
        for b in range(q_nope.shape[0]):
            o[b] = kv_c[page_table[seq_info[b]].long(), : o.shape[-1]].to(o.dtype) * kv_scale
        return o, torch.full(q_nope.shape[:-1], sm_scale)
    """


class TestGluon:
    """What keeps AITER's Gluon kernel from answering, and how it is called."""

    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        where = tmp_path / "aiter" / "ops" / "triton" / "gluon"
        where.mkdir(parents=True)
        (tmp_path / "aiter" / "__init__.py").touch()
        (where / "mla_gluon.py").write_text(textwrap.dedent(GLUON))
        monkeypatch.setattr(sources, "_aiter", tmp_path)
        monkeypatch.setattr("impl.sources.aiter.refuse_mismatch", lambda execution: None)
        return tmp_path

    @pytest.mark.parametrize("qlen", [1, 2])
    def test_blocks_become_a_dimension_and_pages_rows(self, tree: Path, qlen: int) -> None:
        inputs = call([[6], [3]], qlen=qlen, scale=0.5)
        answer = decode_aiter.gluon(inputs)
        assert answer.out is inputs.out and first_lane(answer) == [6.0] * qlen + [3.0] * qlen
        assert answer.lse is not None and answer.lse.tolist() == [[0.5, 0.5]] * (2 * qlen)

    def test_a_missing_tree_is_a_reason(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "_aiter", tmp_path / "nowhere")
        for name in ("aiter-triton", "aiter-gluon"):
            assert any("does not exist" in reason for reason in NAMED[name].unsupported(BASE, "interpreter"))
            assert NAMED[name].source() == b""

    @pytest.mark.parametrize(
        ("changes", "count"),
        [
            ({}, 0), ({"heads": 96, "qlen": 4}, 0), ({"mode": "whole", "qlen": 1}, 0), ({"page": 1, "pages": "padded"}, 0),
            ({"cache_dtype": "float8_e4m3fn", "scales": "odd"}, 0), ({"heads": 64, "requests": 64}, 0),
            ({"rope_lanes": 0}, 1), ({"cache_dtype": "float8_e4m3fn", "quantised_query": True}, 1),
            ({"cache_dtype": "float8_e4m3fnuz"}, 1), ({"mode": "whole"}, 1), ({"mode": "round_robin"}, 1),
            ({"pages": "padded"}, 1), ({"heads": 64}, 1), ({"heads": 112}, 1), ({"heads": 128, "requests": 64,
             "cache_dtype": "float8_e4m3fn"}, 1),
        ],
    )  # fmt: skip
    def test_every_restriction_is_a_reason(self, tree: Path, changes: dict[str, Any], count: int) -> None:
        case = BASE.varied(latent_lanes=512, rope_lanes=64).varied(**changes)
        reasons = NAMED["aiter-gluon"].unsupported(case, "interpreter")
        assert len(reasons) == 1 + count and "Triton's interpreter cannot run" in reasons[0]
        assert NAMED["aiter-gluon"].unsupported(case, "cuda")[0].startswith("on=cuda")
        assert NAMED["aiter-gluon"].source() != b""

    def test_its_parts_are_kept_in_the_outputs_type(self) -> None:
        assert NAMED["aiter-gluon"].precision(BASE, "hip").partial == "bfloat16"


# What the kernels of others do with calls at the edge.


def far(name: str, page: int = 16) -> DecodeCase:
    """The regression whose rows or pages lie far apart."""
    return next(
        case
        for case in map(parse, REGRESSIONS)
        if isinstance(case, DecodeCase) and case.reach == f"far_{name}" and case.page == page
    )


@pytest.mark.parametrize(
    "name", [pytest.param("vllm-triton", marks=needs_vllm), pytest.param("aiter-triton", marks=needs_aiter)]
)
class TestPagedKernels:
    """vLLM's kernel over pages, and AITER's, which comes from it."""

    @pytest.mark.parametrize(
        "changes",
        [
            {}, {"mode": "round_robin", "world": 3, "shard": "middle", "kv_len": 65, "qlen": 3}, {"mode": "whole"},
            {"heads": 17, "cache_dtype": "float8_e4m3fn", "scales": "odd"}, {"splits": 5, "values": "uniform_exact"},
            {"cache_dtype": "float8_e4m3fnuz", "page": 64}, {"future": "nan", "padding": "dummy", "layout": "strided"},
        ],
    )  # fmt: skip
    def test_cases_pass(self, name: str, changes: dict[str, Any]) -> None:
        assert judged(NAMED[name], BASE.varied(**changes)) == ("pass", [])

    def test_a_row_that_sees_nothing_becomes_nan_with_the_right_log_sum_exp(self, name: str) -> None:
        answer = NAMED[name].run(call([[4], []], qlen=2))
        assert answer.out[[0, 2, 3]].isnan().all() and answer.out[1, 0].tolist() == [4.0, 1.0]
        assert answer.lse is not None and answer.lse[:, 0].tolist() == [-math.inf, 0.0, -math.inf, -math.inf]

    def test_one_head_adds_its_scores_up_in_bf16(self, name: str) -> None:
        # 512 + 1 is no number of bf16. Two heads take matrix products, and keep it.
        for heads, want in ((1, 512.0), (2, 513.0)):
            inputs = call([[2]], 1.0)
            query = torch.tensor([256.0, 1.0, 0.0, 0.0]).bfloat16().expand(1, heads, 4).contiguous()
            inputs = dataclasses.replace(inputs, query=query, out=torch.zeros(1, heads, 2))
            lse = NAMED[name].run(inputs).lse
            assert lse is not None and lse.tolist() == [[want] * heads]

    @pytest.mark.parametrize("operand", ["query", "out"])
    def test_offsets_of_rows_have_32_bits(self, name: str, operand: str) -> None:
        with pytest.raises(Exception, match="out-of-bounds"):
            judged(NAMED[name], far(operand))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.vllm
@pytest.mark.skipif(VLLM is None, reason="MLA_ORACLE_VLLM names no vLLM source tree")
def test_offsets_of_pages_have_64_bits_in_vllm(page: int) -> None:
    assert judged(NAMED["vllm-triton"], far("cache", page)) == ("pass", [])


@pytest.mark.aiter
@pytest.mark.skipif(AITER is None, reason="MLA_ORACLE_AITER names no AITER source tree")
class TestRealAiter:
    """Where AITER's kernel over pages departs from vLLM's."""

    def test_offsets_of_tokens_have_32_bits(self) -> None:
        with pytest.raises(Exception, match="argument K_Buffer"):
            judged(NAMED["aiter-triton"], far("cache", 1))

    def test_pages_are_taken_to_be_adjacent(self) -> None:
        status, sentences = judged(NAMED["aiter-triton"], BASE.varied(pages="padded", values="needle"))
        assert status == "fail" and "=nan" in sentences[0]

    def test_rows_of_576_lanes_go_head_by_head(self) -> None:
        case = BASE.varied(latent_lanes=512, rope_lanes=64, requests=1, qlen=1, kv_len=17, heads=2)
        assert judged(NAMED["aiter-triton"], case) == ("pass", [])
        assert NAMED["aiter-triton"].precision(case, "interpreter").query == "bfloat16"
        assert NAMED["vllm-triton"].precision(case, "interpreter").query == "exact"
