"""Is causal prefill over FP8 casts judged rightly, and do our own kernel and what vLLM does round AITER's answer it?"""

import dataclasses
import itertools
import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dense_mla import fp8_prefill as ask
from cases.dense_mla.decode_call import DecodeInputs
from cases.dense_mla.fp8_prefill import Inputs, Outputs, PrefillCase
from cases.memory import on_device
from cases.precision import Precision
from impl.dense_mla.fp8_prefill import IMPLS
from impl.dense_mla.fp8_prefill_call import attend, planned, reduce
from impl.sources import settings as sources
from oracle.dense_mla import decode
from oracle.dense_mla import fp8_prefill as right
from reports.laws import break_of

TRITON, TORCH, VLLM, AITER = IMPLS
REGRESSIONS = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, PrefillCase)]
SINGLE = Precision(probability="exact", note="float32")


def asked(query: Any, key: Any, value: Any, starts: list[int], scale: float = 1.0) -> Inputs:
    """Numbers [tokens, heads] become the first lane of sixteen."""
    rows = [torch.tensor(one, dtype=torch.float32) for one in (query, key, value)]
    lanes = [torch.nn.functional.pad(one[..., None], (0, 15)).bfloat16() for one in rows]
    tokens, heads = rows[0].shape
    out = torch.full((tokens, heads * 16), math.nan, dtype=torch.bfloat16)
    return Inputs(
        query=lanes[0], key=lanes[1], value=lanes[2], query_start=torch.tensor(starts, dtype=torch.int32), scale=scale, out=out,
        compute_units=80,
    )  # fmt: skip


def first_lanes(run: Any, inputs: Inputs) -> list[list[float]]:
    """The first lane of every head."""
    out: torch.Tensor = run(on_device(inputs, "cpu")).out
    return [[float(number) for number in row] for row in out[:, ::16]]


def sentences(inputs: Inputs, outputs: Outputs, precision: Precision = SINGLE) -> list[str]:
    return [str(check) for check in right.judge(inputs, outputs, precision) if not check.passed]


RUNS = pytest.mark.parametrize(
    "run", [right.reference, TRITON.run, TORCH.run], ids=["reference", TRITON.name, TORCH.name]
)


@RUNS
def test_a_token_averages_what_it_sees_of_its_own_request(run: Any) -> None:
    inputs = asked([[0]] * 6, [[5]] * 6, [[8], [4], [9], [3], [16], [0]], [0, 3, 6])
    assert first_lanes(run, inputs) == [[8], [6], [7], [3], [9.5], [pytest.approx(19 / 3, rel=2**-8)]]


@RUNS
def test_keys_weigh_by_scaled_products(run: Any) -> None:
    # 1 * 4 * ln 3 / 4 is ln 3: weights 1 to 3.
    inputs = asked([[0], [1]], [[0], [4]], [[8], [16]], [0, 2], scale=math.log(3) / 4)
    assert first_lanes(run, inputs)[1] == [14]


@RUNS
def test_heads_are_separate(run: Any) -> None:
    inputs = asked([[0, 8]] * 2, [[0, -8], [0, 8]], [[2, 1], [4, 32]], [0, 2])
    assert first_lanes(run, inputs) == [[2, 1], [3, 32]]


@RUNS
@pytest.mark.parametrize(
    ("number", "cast"),
    [(1.0625, 1.0), (1.09375, 1.125), (1.1875, 1.25), (440.0, 448.0), (432.0, 448.0), (0.0009765625, 0.0)],
)
def test_numbers_are_cast_to_nearest_even(run: Any, number: float, cast: float) -> None:
    inputs = asked([[1]], [[1]], [[number]], [0, 1])
    assert first_lanes(run, inputs) == [[cast]]


@RUNS
def test_tokens_and_requests_may_be_single(run: Any) -> None:
    assert first_lanes(run, asked([[3], [4]], [[1], [2]], [[7], [9]], [0, 1, 2])) == [[7], [9]]


def by_loops(inputs: Inputs) -> np.ndarray[Any, Any]:
    """Every number by itself in float64, with the casts of another library."""
    numbers = [
        one.float().numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        for one in (inputs.query, inputs.key, inputs.value)
    ]
    query, key, value = numbers
    out = np.zeros(value.shape)
    starts = inputs.query_start.tolist()
    for row in range(len(query)):
        first = max(start for start in starts if start <= row)
        for head in range(query.shape[1]):
            scores = [math.fsum(query[row, head] * key[other, head]) * inputs.scale for other in range(first, row + 1)]
            weights = [math.exp(score - max(scores)) for score in scores]
            for lane in range(value.shape[2]):
                column = value[first : row + 1, head, lane]
                out[row, head, lane] = math.fsum(np.array(weights) * column) / math.fsum(weights)
    return out.reshape(len(query), -1)


@hypothesis_settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(ask.AXES["values"]), st.integers(1, 3))
def test_the_reference_is_softmax_attention(seed: int, values: Any, requests: int) -> None:
    inputs = ask.build(PrefillCase(heads=1, values=values, requests=requests, seed=seed))
    want = by_loops(inputs)
    largest = np.abs(inputs.value.float().numpy()).max()
    np.testing.assert_allclose(right.reference(inputs, torch.float64).out.numpy(), want, atol=1e-12 * largest)
    np.testing.assert_allclose(right.reference(inputs).out.numpy(), want, atol=3e-5 * largest)
    truth, _ = right.budget(inputs, SINGLE)
    np.testing.assert_allclose(truth.flatten(1).numpy(), want, atol=1e-12 * largest)


def test_prefill_is_decode_of_absorbed_queries() -> None:
    # A head's keys and values are lanes of the latent with a sign, and so are sums of them: all casts are exact.
    heads, latent, rope, lanes = 3, 32, 16, 16
    token = torch.arange(9.0)
    down = torch.remainder(token[:, None] * 7 + torch.arange(latent) * 5, 11) - 5
    turned = torch.remainder(token[:, None] * 3 + torch.arange(rope), 7) - 3
    query = torch.remainder(token[:, None, None] + torch.arange(heads)[:, None] * 4 + torch.arange(32) * 3, 5) - 2
    up_key, up_value = torch.zeros(heads, lanes, latent), torch.zeros(heads, lanes, latent)
    for head in range(heads):
        up_key[head, torch.arange(lanes), (torch.arange(lanes) * 3 + head) % latent] = 1.0 - 2.0 * (head % 2)
        up_value[head, torch.arange(lanes), (torch.arange(lanes) * 5 + head + 7) % latent] = 1.0
    starts = [0, 5, 6, 9]
    whole = Inputs(
        query=query.bfloat16(), key=torch.cat((torch.einsum("hlr,tr->thl", up_key, down),
                                               turned[:, None].expand(-1, heads, -1)), 2).bfloat16(),
        value=torch.einsum("hlr,tr->thl", up_value, down).bfloat16(), query_start=torch.tensor(starts, dtype=torch.int32),
        scale=0.07, out=torch.zeros(9, heads * lanes).bfloat16(), compute_units=80,
    )  # fmt: skip
    absorbed = torch.cat((torch.einsum("hlr,thl->thr", up_key, query[..., :lanes]), query[..., lanes:]), 2)
    answers = []
    for first, last in itertools.pairwise(starts):
        rows = last - first
        block = DecodeInputs(
            query=absorbed[first:last].bfloat16(), cache=torch.cat((down, turned), 1)[None].bfloat16(),
            slots=torch.arange(first, last, dtype=torch.int32), kv_indptr=torch.tensor([0, rows], dtype=torch.int32),
            qlen=rows, causal=True, scale=0.07, query_scale=torch.tensor(1.0), cache_scale=torch.tensor(1.0),
            out=torch.zeros(rows, heads, latent), splits=1, live=1,
        )  # fmt: skip
        found = decode.reference(block, torch.float64).out
        answers.append(torch.einsum("hlr,thr->thl", up_value.double(), found).flatten(1))
    np.testing.assert_allclose(
        right.reference(whole, torch.float64).out.numpy(), torch.cat(answers).numpy(), atol=1e-12
    )


@pytest.mark.parametrize("values", ["onehot", "uniform", "limits"])
def test_a_budget_of_float8_weights_is_wider_and_still_sees_a_lost_key(values: Any) -> None:
    narrow = Precision(probability="float8_e4m3fn")
    inputs = ask.build(PrefillCase(heads=1, values=values, lengths="equal"))
    exactly, widely = (right.budget(inputs, precision)[1].out for precision in (SINGLE, narrow))
    assert bool((widely >= exactly).all())
    assert values == "uniform" or bool((widely > 2 * exactly).any())
    lost: Any = next(mutant for mutant in right.MUTANTS if mutant.name == "own-token-not-seen")
    assert sentences(inputs, lost.answer(inputs), narrow) != []


@pytest.mark.parametrize(
    ("law", "mutant"),
    [("F1", "next-token-seen"), ("F2", "no-mask"), ("F3", "values-of-the-first-head"), ("F4", "prefix-of-heads-in-turn"),
     ("F5", "own-token-not-seen"), ("F6", "requests-together"), ("F7", "next-token-seen")],
)  # fmt: skip
def test_a_law_is_broken_by_its_fault(law: str, mutant: str) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))
    answer: Any = next(wrong for wrong in right.MUTANTS if wrong.name == mutant).answer
    whole = law == "F2"

    def faulty(inputs: Inputs) -> Outputs:
        # Without a mask in one request alone nothing changes, so the fault is made to see all requests.
        if whole:
            return right._stored(
                inputs, right._attended(inputs, torch.float64, right.Faults(masked=False, separate=False))
            )
        return answer(inputs)  # type: ignore[no-any-return]

    inputs = ask.build(PrefillCase(heads=4, requests=3, lengths="equal"))
    checks = break_of(rule, inputs, faulty(inputs), faulty, right.judge, SINGLE)
    assert checks is not None and not all(check.passed for check in checks)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 8, 12, 16, 24])
def test_a_prefix_of_heads_padded_in_turn_repeats_heads(heads: int) -> None:
    out = torch.arange(heads * 1.0)[None, :, None]
    prefix, spread = (right._through_padding(out, how)[0, :, 0].tolist() for how in ("prefix", "spread"))
    assert (prefix == list(range(heads))) == (heads not in (2, 4, 8))
    # In blocks, a stride of 16 // heads takes heads out of turn, unless it is 1.
    assert (spread == list(range(heads))) == (heads not in (3, 5, 6))
    if heads == 8:
        assert prefix == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"query": torch.zeros(2, 1, 16, dtype=torch.float16)}, TypeError, "query is torch.float16: should be torch.bfloat16"),
        # A kernel that writes bfloat16 through a raw pointer takes neither a model in float16 nor an output in codes.
        ({"out": torch.zeros(2, 16, dtype=torch.float16)}, TypeError, "out is torch.float16: should be torch.bfloat16"),
        ({"out": torch.zeros(2, 16).to(torch.float8_e4m3fn)}, TypeError, "out is torch.float8_e4m3fn: should be"),
        # More keys than queries: a context in front, which is merged elsewhere.
        ({"key": torch.zeros(5, 1, 16).bfloat16(), "value": torch.zeros(5, 1, 16).bfloat16()}, ValueError,
         r"query \[2, 1, 16\], key \[5, 1, 16\], value \[5, 1, 16\]: should have the same tokens"),
        ({"query_start": torch.tensor([0, 2])}, TypeError, "query_start is torch.int64: should be torch.int32"),
        ({"key": torch.zeros(2, 1, 17).bfloat16()}, ValueError, r"key \[2, 1, 17\].*: should have the same tokens and heads"),
        ({"out": torch.zeros(2, 17).bfloat16()}, ValueError, r"out has shape \[2, 17\]: should have \[2, 16\]"),
        ({"query_start": torch.tensor([3, 5], dtype=torch.int32)}, ValueError, r"query_start=\[3, 5\]: should rise from 0 to 2"),
        ({"value": torch.full((2, 1, 16), 480.0).bfloat16()}, ValueError, "value has numbers beyond 448"),
    ],
)  # fmt: skip
def test_calls_that_make_no_sense_are_refused(changes: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        right.reference(dataclasses.replace(asked([[1], [1]], [[1], [1]], [[1], [1]], [0, 2]), **changes))


def test_stand_ins_that_follow_a_plan_give_the_answer() -> None:
    inputs = ask.build(PrefillCase(heads=1, requests=1, lengths="tiles", compute_units=256))
    plan = planned(inputs)
    parts = int(plan.group_start[-1])
    assert parts > 2
    query, key, value = (
        one.to(torch.float8_e4m3fn).expand(-1, 16, -1) for one in (inputs.query, inputs.key, inputs.value)
    )
    partial_out, partial_lse = torch.full((parts * 256, 16, 32), math.nan), torch.full((parts * 256, 16), math.nan)
    out = torch.full((len(inputs.out), 16, 32), math.nan, dtype=torch.bfloat16)
    slots = torch.arange(len(out), dtype=torch.int32)
    attend(query, key, value, plan.rows, plan.rows, slots, plan.work_start, plan.works, 0, inputs.scale, True, partial_out,
           partial_lse, out)  # fmt: skip
    # Every tile is split, and of some parts the first rows of a tile see nothing.
    assert bool(torch.isnan(out).all()) and bool(torch.isnan(partial_out).any())
    reduce(partial_out, partial_lse, plan.group_start, plan.groups, plan.parts, 256, 0, out, None)
    assert sentences(inputs, Outputs(out[:, 5].contiguous())) == []


def test_others_say_why_they_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    assert "is not a vLLM tree" in VLLM.unsupported(PrefillCase(), "interpreter")[0]
    assert VLLM.unsupported(PrefillCase(), "hip")[-1] == "execution=hip: stand-ins for AITER's kernels run on the CPU"
    reasons = AITER.unsupported(PrefillCase(heads=72), "interpreter")
    assert reasons[0] == "execution=interpreter: AITER's FP8 prefill kernel is assembly for gfx950"
    assert reasons[-2:] == [
        "width=small: AITER's kernel has 192 lanes of queries and 128 of values",
        "heads=72: AITER's reduction is not compiled for 80 heads of 128 lanes",
    ]
    device = SimpleNamespace(gcnArchName="gfx950:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert not any("gfx950" in reason for reason in AITER.unsupported(PrefillCase(), "hip"))


@pytest.mark.parametrize("heads", [2, 12, 16])
def test_aiter_is_asked_with_padded_heads_and_a_plan(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("aiter")
    module.mla_prefill_ps_asm_fwd, module.mla_reduce_v1 = attend, reduce  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", module)
    inputs = ask.build(PrefillCase(heads=heads))
    assert sentences(inputs, AITER.run(on_device(inputs, "cpu"))) == []


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("case", REGRESSIONS[:5], ids=str)
def test_vllm_pads_and_takes_out_the_real_heads(case: PrefillCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    inputs = ask.build(case)
    assert sentences(inputs, VLLM.run(on_device(inputs, "cpu"))) == []


def edited_tree(root: Path, copy: Path, module: str, old: str, new: str) -> Path:
    """A tree of links to another one, with a module of its own, in which `old` is `new`."""
    here, there = root, copy
    parts = module.split("/")
    for part in parts:
        there.mkdir()
        for found in here.iterdir():
            if found.name != part:
                (there / found.name).symlink_to(found)
        here, there = here / part, there / part
    text = here.read_text("utf-8")
    assert old in text
    there.write_text(text.replace(old, new), "utf-8")
    return copy


@pytest.mark.vllm
@needs_vllm
def test_a_prefix_slice_as_vllm_had_it_is_caught_where_heads_are_padded_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(os.environ["MLA_ORACLE_VLLM"])
    strided = "out_3d[:, :: nhead // _real_nhead, :]"
    module = "vllm/v1/attention/backends/mla/rocm_aiter_mla.py"
    before = edited_tree(root, tmp_path / "before", module, strided, "out_3d[:, :_real_nhead, :]")
    monkeypatch.setattr(sources, "_vllm", before)
    mutant: Any = next(mutant for mutant in right.MUTANTS if mutant.name == "prefix-of-heads-in-turn")
    for heads in (2, 4, 8, 12):
        case = PrefillCase(heads=heads)
        assert VLLM.unsupported(case, "interpreter") == []
        inputs = ask.build(case)
        outputs = VLLM.run(on_device(inputs, "cpu"))
        assert (sentences(inputs, outputs) == []) == (heads == 12)
        if heads != 12:
            assert torch.equal(outputs.out, mutant.answer(inputs).out)
