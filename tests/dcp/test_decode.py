"""Is decode over a sharded cache judged rightly: every right one passes, and every wrong one is seen?"""

import dataclasses
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dcp import decode as ask
from cases.dcp.decode import DecodeCase, Inputs, Outputs
from cases.memory import is_vast
from cases.precision import Precision
from impl.dcp import decode_call
from impl.dcp.decode import IMPLS
from impl.implementation import Impl
from impl.sources import settings as sources
from oracle.dcp import decode as right
from oracle.dcp import decode_faults
from oracle.dense_mla.decode_call import visible
from reports.laws import identical

OURS, TORCH, VLLM = IMPLS
DECLARED = Precision(exponential_ulps=2.0, flushes=False)
BASE = DecodeCase()
MODES = ("all_gather_reduce_scatter", "all_gather_all_reduce", "all_to_all")
LISTED = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, DecodeCase)]
PROCESSES = [case for case in LISTED if case.ranks == "processes"]


def small_sweep(count: int) -> list[DecodeCase]:
    choose = random.Random(7)
    cases = [BASE.varied(values=values, world=world) for values in ask.AXES["values"] for world in (2, 3)]
    cases.append(BASE.varied(cache_dtype="float8_e4m3fn", values="wide"))
    while len(cases) < count:
        drawn: dict[str, Any] = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = DecodeCase(**drawn, seed=choose.randrange(99))
        if not ask.forbid(case) and case.requests * case.qlen * case.world <= 24:
            cases.append(case)
    return cases


SWEEP = small_sweep(26)


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, DECLARED))


def two_ranks(length: int, qlen: int) -> Inputs:
    """One head a rank, one lane of value and key each; position p holds the value p and the key p, a block a page of 2."""
    blocks = -(-length // 4)
    caches = torch.full((2, blocks + 1, 2, 2), math.nan)
    for position in range(length):
        caches[position % 2, position // 4 + 1, position // 2 % 2] = float(position)
    return Inputs(
        query=torch.tensor([[0.0, 1.0], [0.0, 0.0]])[:, None, None].expand(2, qlen, 1, 2).bfloat16(),
        caches=caches.bfloat16(),
        table=torch.arange(1, blocks + 1, dtype=torch.int32)[None],
        lengths=torch.tensor([length], dtype=torch.int32),
        qlen=qlen,
        latent=1,
        scale=1.0,
        cache_scale=torch.ones(()),
        mode="all_to_all",
        live=1,
    )


@pytest.mark.parametrize("run", [right.reference, TORCH.run, OURS.run], ids=["reference", TORCH.name, OURS.name])
def test_five_positions_by_hand(run: Any) -> None:
    """Rows of a block of two over five positions see four and five of them; rank 1's head has equal scores."""
    answer = run(two_ranks(5, 2))
    assert answer.lse is not None
    weights = [math.exp(p) for p in range(5)]
    for row, seen in ((0, 4), (1, 5)):
        total = sum(weights[:seen])
        mean = sum(p * weights[p] for p in range(seen)) / total
        assert float(answer.out[0, row, 0, 0]) == pytest.approx(mean, rel=0.01)
        assert float(answer.lse[0, row, 0]) == pytest.approx(math.log(total), rel=1e-6)
        assert float(answer.out[1, row, 0, 0]) == pytest.approx((seen - 1) / 2, rel=0.01)
        assert float(answer.lse[1, row, 0]) == pytest.approx(math.log(seen), rel=1e-6)


@pytest.mark.parametrize("run", [right.reference, TORCH.run, OURS.run], ids=["reference", TORCH.name, OURS.name])
def test_rows_before_the_first_token_see_nothing(run: Any) -> None:
    answer = run(two_ranks(2, 5))
    assert answer.lse is not None
    assert torch.isneginf(answer.lse[..., 0]).tolist() == [[True, True, True, False, False]] * 2
    assert bool((answer.out[:, :3] == 0).all()) and float(answer.out[1, 4, 0, 0]) == 0.5


def test_the_last_token_of_a_ladder_is_the_answer_bit_for_bit() -> None:
    inputs = ask.build(BASE.varied(values="ladder", world=3, heads_per_rank=1))
    answer = TORCH.run(inputs)
    for b, length in enumerate(inputs.lengths.tolist()):
        for t in range(inputs.qlen):
            position = length - inputs.qlen + t
            block = int(inputs.table[b, position // (4 * 3)])
            token = inputs.caches[position % 3, block, position // 3 % 4, : inputs.latent]
            assert torch.equal(answer.out[:, b * inputs.qlen + t, 0], token.expand(3, -1))


def by_hand(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Every head of every row, a token at a time, in Python's floats."""
    world, rows, own, _ = inputs.query.shape
    page = inputs.caches.shape[2]
    out = torch.zeros((world, rows, own, inputs.latent), dtype=torch.float64)
    lse = torch.full((world, rows, own), -math.inf, dtype=torch.float64)
    factor = float(inputs.cache_scale) if inputs.caches.dtype != torch.bfloat16 else 1.0
    for rank in range(world):
        for row in range(inputs.live * inputs.qlen):
            b, t = divmod(row, inputs.qlen)
            seen = []
            for p in range(int(inputs.lengths[b]) - inputs.qlen + t + 1):
                block = int(inputs.table[b, p // (page * world)])
                seen.append([factor * x for x in inputs.caches[p % world, block, p // world % page].double().tolist()])
            for head in range(own):
                query = inputs.query[rank, row, head].double().tolist()
                scores = [inputs.scale * sum(x * y for x, y in zip(query, token, strict=True)) for token in seen]
                if not scores:
                    continue
                weights = [math.exp(score - max(scores)) for score in scores]
                total = sum(weights)
                lse[rank, row, head] = max(scores) + math.log(total)
                for lane in range(inputs.latent):
                    pairs = zip(weights, seen, strict=True)
                    out[rank, row, head, lane] = sum(w * token[lane] for w, token in pairs) / total
    return out, lse


SCALAR = [
    *[case for case in SWEEP if case.kv_len <= 17 and case.qlen <= 4][:7],
    *(
        BASE.varied(cache_dtype=encoding, padding=padding, requests=1, kv_len=5, qlen=2, values="wide")
        for encoding, padding in (("float8_e4m3fnuz", "dummy"), ("float8_e4m3fn", "empty"))
    ),
]


@pytest.mark.parametrize("case", SCALAR, ids=str)
def test_the_reference_agrees_with_scalars(case: DecodeCase) -> None:
    inputs = ask.build(case)
    out, lse = by_hand(inputs)
    wide, narrow = right.reference(inputs, torch.float64), right.reference(inputs)
    assert wide.lse is not None and narrow.lse is not None
    # The scale of the cache is a float32 number in both.
    assert torch.allclose(wide.out, out, rtol=1e-9, atol=1e-9) and torch.allclose(wide.lse, lse, rtol=1e-9, atol=1e-9)
    assert torch.allclose(narrow.out.double(), out, rtol=1e-3, atol=1e-4)
    assert torch.allclose(narrow.lse.double(), lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    world=st.sampled_from([1, 2, 3, 4, 7, 8]), kv_len=st.integers(1, 30), qlen=st.integers(1, 8),
    page=st.sampled_from([1, 2, 5]), mode=st.sampled_from(MODES), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_number_of_ranks_answers_as_one_does(
    world: int, kv_len: int, qlen: int, page: int, mode: Any, seed: int
) -> None:
    case = BASE.varied(
        world=world, kv_len=kv_len, qlen=qlen, page=page, mode=mode, seed=seed, requests=1, heads_per_rank=1,
        values="ladder",
    )  # fmt: skip
    inputs = ask.build(case)
    assert passes(inputs, TORCH.run(inputs))


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_a_rank_that_takes_itself_for_the_next_is_seen(world: int) -> None:
    wrong = next(mutant for mutant in right.MUTANTS if mutant.name == "place-of-the-next-rank")
    for values in ("ladder", "randn"):
        inputs = ask.build(BASE.varied(world=world, values=values, requests=1, kv_len=12))
        assert passes(inputs, decode_faults.compute(inputs, decode_faults.Way()))
        answer = wrong.answer(inputs)
        assert answer is not None and not passes(inputs, answer)


def test_dummies_are_hostile_and_show_every_row_a_token_on_every_rank() -> None:
    case = BASE.varied(padding="dummy", world=3, qlen=4, requests=1, page=4)
    inputs = ask.build(case)
    assert inputs.live == 1 and inputs.lengths.tolist() == [17, 12, 12]
    assert bool(inputs.query[:, 4:].isnan().all()) and not bool(inputs.query[:, :4].isnan().any())
    assert inputs.table[1:, 0].tolist() == [0, 0] and bool(inputs.caches[:, 0].isnan().all())
    plan = decode_call.Plan("", "", 3, "all_to_all", 4, 1, 64, 1.0)
    for rank, shard in enumerate(decode_call.shards(inputs)):
        call = decode_call.local_call(plan, shard, decode_call.all_heads(inputs.query), rank)
        assert [visible(call, row) > 0 for row in range(4, 12)] == [True] * 8
        assert decode_call.starts(plan, shard).tolist() == [0, 4, 4, 4]


@pytest.mark.parametrize("padding", ["empty", "dummy"])
@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_requests_that_do_not_count_change_nothing_and_are_not_looked_at(impl: Impl, padding: Any) -> None:
    for mode in MODES:
        case = BASE.varied(mode=mode, values="ladder", qlen=2)
        inputs = ask.build(case.varied(padding=padding))
        answer, alone = impl.run(inputs), impl.run(ask.build(case))
        assert answer.lse is not None and alone.lse is not None
        assert torch.equal(answer.out[:, :4], alone.out) and torch.equal(answer.lse[:, :4], alone.lse)
        for left in (0.0, math.nan):
            answer.out[:, 4:], answer.lse[:, 4:] = left, left
            assert passes(inputs, answer)
        answer.out[0, 3] += 1.0
        assert not passes(inputs, answer)


def test_blocks_of_a_far_cache_lie_beyond_two_to_the_31_and_a_request_has_the_last() -> None:
    far = [case for case in LISTED if case.reach == "far_cache"]
    assert far
    for case in far:
        inputs = ask.build(case)
        blocks, stride = inputs.caches.shape[1], inputs.caches.stride(1)
        assert is_vast(inputs.caches) and stride < 1 << 31 <= stride * (blocks - 1)
        assert blocks - 1 in inputs.table[:, : -(-case.kv_len // case.world)].tolist()[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reach": "far_cache", "world": 3}, "world=3: should be 1 or 2 with reach=far_cache"),
        ({"reach": "far_cache", "ranks": "processes"}, "ranks=processes: a cache of gigabytes"),
        ({"values": "ladder", "cache_dtype": "float8_e4m3fnuz"}, "values=ladder: needs a bfloat16 cache"),
    ],
)
def test_what_is_no_question_says_why(changes: dict[str, Any], reason: str) -> None:
    (said,) = ask.forbid(BASE.varied(**changes))
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda i: dataclasses.replace(i, qlen=3), ValueError, "rows=8: should be 2 requests of qlen=3"),
        (lambda i: dataclasses.replace(i, qlen=0), ValueError, "should be 2 requests of qlen=0"),
        (lambda i: dataclasses.replace(i, caches=i.caches[:1]), ValueError, "shape of caches=.1, .* should be .2, blocks"),
        (lambda i: dataclasses.replace(i, query=i.query[0]), ValueError, "should be .world, rows, heads, lanes."),
        (lambda i: dataclasses.replace(i, query=i.query.half()), TypeError, "query=torch.float16"),
        (lambda i: dataclasses.replace(i, table=i.table[:1]), ValueError, "shape of table=.1, .*: should be .2, width."),
        (lambda i: dataclasses.replace(i, latent=81), ValueError, "latent=81: should be 1 to 80"),
        (lambda i: dataclasses.replace(i, lengths=i.lengths + 90), ValueError, "lengths=107: should be at most"),
        (lambda i: dataclasses.replace(i, live=3), ValueError, "live=3: should be 0 to 2, the requests"),
        (lambda i: dataclasses.replace(i, table=i.table + 99), ValueError, "block of position 0 of request 0="),
    ],
)  # fmt: skip
def test_what_is_no_call_is_refused(edit: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        right.reference(edit(ask.build(BASE)))


@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_ours_refuses_rows_that_are_no_blocks(impl: Impl) -> None:
    inputs = ask.build(BASE)
    with pytest.raises(ValueError, match="rows=8: should be 2 requests of qlen=3"):
        impl.run(dataclasses.replace(inputs, qlen=3))
    with pytest.raises(ValueError, match="caches of 1 ranks: should be of 2"):
        impl.run(dataclasses.replace(inputs, caches=inputs.caches[:1]))


@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_real_ranks_answer_as_one_process_does(case: DecodeCase) -> None:
    inputs = ask.build(case)
    between = TORCH.run(inputs)
    within = TORCH.run(dataclasses.replace(inputs, ranks="one_process"))
    assert passes(inputs, between)
    if case.world <= 2 or case.mode == "all_to_all" or case.values == "ladder":
        assert identical(between, within)


def test_kernels_of_real_ranks_answer_as_those_of_one_process() -> None:
    inputs = ask.build(BASE.varied(ranks="processes", mode="all_gather_reduce_scatter"))
    assert identical(OURS.run(inputs), OURS.run(dataclasses.replace(inputs, ranks="one_process")))


def test_a_rank_holds_the_tokens_of_its_positions() -> None:
    """Five and two tokens on two ranks, pages of two places: a block is four positions."""
    shard = decode_call.Shard(
        torch.zeros(2, 1, 4), torch.zeros(9, 2, 4), torch.tensor([[7, 3], [5, -1]], dtype=torch.int32),
        torch.tensor([5, 2], dtype=torch.int32), torch.ones(()),
    )  # fmt: skip
    plan = decode_call.Plan("", "", 2, "all_to_all", 1, 2, 2, 1.0)
    first, second = (decode_call.local_call(plan, shard, shard.query, rank) for rank in range(2))
    assert first.slots.tolist() == [14, 15, 6, 10] and first.kv_indptr.tolist() == [0, 3, 4]
    assert second.slots.tolist() == [14, 15, 10] and second.kv_indptr.tolist() == [0, 2, 3]
    assert first.global_indptr is not None and first.global_indptr.tolist() == [0, 5, 7]


VLLM_TREE = os.environ.get("MLA_ORACLE_VLLM")
needs_vllm = pytest.mark.skipif(not VLLM_TREE, reason="MLA_ORACLE_VLLM names no vLLM tree")


@pytest.fixture
def vllm() -> Any:
    sources.use_vllm(Path(VLLM_TREE or ""))
    yield VLLM
    sources.use_vllm(None)


@pytest.mark.vllm
@needs_vllm
def test_vllm_decodes_rightly_over_several_ranks(vllm: Impl) -> None:
    asked = 0
    for case in [*SWEEP[:2], *SWEEP[6::3]]:
        if case.world > 1 and not vllm.unsupported(case, "interpreter"):
            inputs = ask.build(case)
            checks = right.judge(inputs, vllm.run(inputs), vllm.precision(case, "interpreter"))
            assert all(check.passed for check in checks), case.id
            asked += 1
    assert asked > 3


@pytest.mark.vllm
@needs_vllm
def test_vllm_alone_answers_nan_where_a_row_sees_nothing(vllm: Impl) -> None:
    """A merge leaves such an answer out; one rank has no merge."""
    alone = ask.build(BASE.varied(world=1, kv_len=3, requests=1))
    answer = vllm.run(alone)
    assert answer.lse is not None
    assert bool(torch.isneginf(answer.lse[0, 0]).all()) and bool(torch.isnan(answer.out[0, 0]).all())
    several = ask.build(BASE.varied(world=2, kv_len=3, requests=1))
    assert passes(several, vllm.run(several))
