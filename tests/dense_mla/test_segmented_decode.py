"""Is a decode over segments answered as worked out by hand, and does its judge tell right from wrong?"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dense_mla.segmented_decode import (
    AXES,
    CODES,
    REGRESSIONS,
    WRITABLE,
    Inputs,
    Outputs,
    SegmentedCase,
    build,
    forbid,
    heavy,
)
from cases.memory import is_vast, on_device, trespasses
from cases.precision import Precision
from impl.dense_mla import segmented_decode_aiter
from impl.dense_mla.segmented_decode import IMPLS
from impl.dense_mla.segmented_decode_call import plain_query, segments_for
from impl.executions.memory_watch import watch
from impl.implementation import Impl
from impl.sources import settings as sources
from oracle.dense_mla import segmented_decode as oracle
from oracle.dense_mla.segmented_decode_call import query_of
from oracle.dense_mla.segmented_decode_faults import HONEST
from reports.execute import needs_interpreter

VLLM, AITER = os.environ.get("MLA_ORACLE_VLLM"), os.environ.get("MLA_ORACLE_AITER")
needs_aiter = [
    pytest.mark.aiter,
    pytest.mark.skipif(AITER is None, reason="MLA_ORACLE_AITER names no AITER source tree"),
]
needs_both = [
    *needs_aiter,
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM is None, reason="MLA_ORACLE_VLLM names no vLLM source tree"),
]
NAMED = {impl.name: impl for impl in IMPLS}
EVERYONE = [
    pytest.param(oracle.reference, id="reference"),
    pytest.param(NAMED["ours-triton"].run, id="ours-triton"),
    pytest.param(NAMED["torch-gathered"].run, id="torch-gathered"),
    pytest.param(NAMED["aiter-triton"].run, id="aiter-triton", marks=needs_aiter),
    pytest.param(NAMED["vllm-triton"].run, id="vllm-triton", marks=needs_both),
]
Run = Callable[[Inputs], Outputs]
BASE = SegmentedCase()
NAN = math.nan


@pytest.fixture(autouse=True)
def _real_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(VLLM) if VLLM else None)
    monkeypatch.setattr(sources, "_aiter", Path(AITER) if AITER else None)


def call(query: float, lengths: list[int], tables: list[list[int]], /, slack: float = 0.0, **changes: Any) -> Inputs:
    """One head that sees lane 16, the first of the rope, over pages of 4: slot s holds s in lanes 0 and 16, 1 in lane 1."""
    rows = len(lengths)
    cache = torch.zeros(6, 4, 1, 32)
    cache[..., 0] = cache[..., 16] = torch.arange(24.0).view(6, 4, 1)
    cache[..., 1] = 1.0
    read = {table[x // 4] * 4 + x % 4 for n, table in zip(lengths, tables, strict=True) for x in range(n)}
    unread = torch.tensor([slot not in read for slot in range(24)]).view(6, 4)
    cache[unread] = slack
    vector = torch.zeros(rows, 1, 32)
    vector[..., 16] = query
    plain = Inputs(
        query=vector.bfloat16(), cache=cache.bfloat16(), lengths=torch.tensor(lengths, dtype=torch.int32),
        table=torch.tensor(tables, dtype=torch.int32), max_length=max(1, *lengths), scale=1.0, query_scale=None,
        cache_scale=torch.tensor(1.0), rank=16, compute_units=4, out=torch.full((rows, 1, 16), NAN).bfloat16(),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


# Answers worked out by hand.


@pytest.mark.parametrize("run", EVERYONE)
def test_a_zero_query_means_over_the_keys_of_its_pages(run: Run) -> None:
    # Five keys: all four of page 2, slots 8 to 11, and the first of page 5, slot 20. (8 + 9 + 10 + 11 + 20) / 5.
    answer = run(call(0.0, [5], [[2, 5, -1]]))
    assert answer.out[0, 0, :2].tolist() == [pytest.approx(11.6, rel=2**-8), 1.0]
    assert float(answer.lse[0, 0]) == pytest.approx(math.log(5.0), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_two_keys_share_by_the_exponential_of_their_scores(run: Run) -> None:
    # Scores 8 ln 3 and 9 ln 3: shares 1/4 and 3/4. The rope decides, and does not come out.
    answer = run(call(1.0, [2], [[2]], scale=math.log(3.0)))
    assert answer.out[0, 0].tolist() == [pytest.approx(8.75, rel=2**-7), 1.0, *[0.0] * 14]
    assert float(answer.lse[0, 0]) == pytest.approx(8 * math.log(3.0) + math.log(4.0), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_rows_of_one_block_see_a_key_more_each_and_none_at_all(run: Run) -> None:
    # A loud key lies in the slack of all rows but the last.
    answer = run(call(0.0, [0, 1, 2, 3], [[3]] * 4))
    assert answer.out[:, 0, 0].tolist() == [0.0, 12.0, 12.5, 13.0] and answer.lse[0, 0] == -math.inf


@pytest.mark.parametrize("run", EVERYONE[:3])
@pytest.mark.parametrize("slack", [NAN, 1e30])
def test_what_lies_behind_the_last_key_does_not_matter(run: Run, slack: float) -> None:
    answer = run(call(1.0, [1], [[4, 2**31 - 1]], slack=slack))
    assert answer.out[0, 0, :2].tolist() == [16.0, 1.0] and answer.lse[0, 0] == 16.0


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("codes", CODES)
def test_the_scale_of_the_cache_counts_in_scores_and_once_in_values(run: Run, codes: torch.dtype) -> None:
    # Stored 8 and 9, which count 2 and 2.25: the scores differ by 0.25.
    inputs = call(1.0, [2], [[2]], cache_scale=torch.tensor(0.25))
    answer = run(dataclasses.replace(inputs, cache=inputs.cache.float().to(codes), scale=4 * math.log(3.0)))
    assert answer.out[0, 0, :2].tolist() == [pytest.approx(0.25 * 8.75, rel=2**-7), 0.25]
    assert float(answer.lse[0, 0]) == pytest.approx(8 * math.log(3.0) + math.log(4.0), rel=1e-6)


def test_codes_of_a_query_are_rounded_behind_their_scale() -> None:
    # 1.125 * 0.3701 = 0.4163625, between the bf16 numbers 0.416015625 and 0.41796875.
    inputs = call(1.125, [1], [[2]], cache=torch.zeros(6, 4, 1, 32).to(CODES[0]), query_scale=torch.tensor(0.3701))
    inputs = dataclasses.replace(inputs, query=inputs.query.float().to(CODES[0]))
    assert query_of(inputs, 0, torch.float32)[0, 16] == 0.416015625
    assert torch.equal(plain_query(inputs)[0].float(), query_of(inputs, 0, torch.float32))


def test_segments_keep_every_compute_unit_busy_in_powers_of_two() -> None:
    def segments(rows: int, heads: int, length: int) -> int:
        inputs = call(0.0, [1] * rows, [[2]] * rows, query=torch.zeros(rows, heads, 32).bfloat16(), max_length=length,
                      compute_units=256, cache=torch.zeros(6, 128, 1, 32).bfloat16())  # fmt: skip
        return segments_for(inputs)

    # 24 tiles; more tiles than segments there may be; more rows than units.
    assert [segments(4, 96, 3072), segments(4, 96, 100000), segments(1100, 16, 100000), segments(1, 1, 1)] == [
        32,
        128,
        8,
        8,
    ]


# An independent formulation.


def by_hand(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scalar loops in Python's own floats."""
    rows, heads, _ = inputs.query.shape
    out, lse = torch.zeros((rows, heads, inputs.rank)).double(), torch.full((rows, heads), -math.inf).double()
    scale = float(inputs.cache_scale)
    for row in range(rows):
        for head in range(heads):
            query = inputs.query[row, head].double()
            if inputs.query_scale is not None:
                query = (inputs.query[row, head].float() * inputs.query_scale).bfloat16().double()
            scores, keys = [], []
            for x in range(max(0, int(inputs.lengths[row]))):
                stored = inputs.cache[int(inputs.table[row, x // inputs.tile]), x % inputs.tile, 0].double()
                keys.append([scale * c for c in stored.tolist()])
                scores.append(inputs.scale * math.fsum(a * c for a, c in zip(query.tolist(), keys[-1], strict=True)))
            if not scores:
                continue
            middle = sorted(scores)[len(scores) // 2]
            weights = [math.exp(score - middle) for score in scores]
            total = math.fsum(weights)
            lse[row, head] = middle + math.log(total)
            for lane in range(inputs.rank):
                out[row, head, lane] = math.fsum(w * key[lane] for w, key in zip(weights, keys, strict=True)) / total
    return out, lse


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": "mixed", "rows": 4, "length": 17}, {"values": "wide", "cache": "float8_e4m3fn", "cache_scale": "odd"},
        {"cache": "float8_e4m3fnuz", "query": "codes", "query_scale": "large", "layout": "padded", "slack": "loud"},
        {"values": "last", "pages": "shared", "tile": 1}, {"values": "onehot_exact", "length": 16, "lengths": "random"},
    ],
)  # fmt: skip
def test_reference_agrees_with_scalar_loops(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(**{"rank": 16, "heads": 2, "length": 9, **changes}))
    want, lse = by_hand(inputs)
    got = oracle.reference(inputs, torch.float64)
    assert torch.allclose(got.out, want, rtol=1e-11, atol=1e-13)
    assert torch.allclose(got.lse, lse, rtol=1e-12, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_fp32_reference_is_within_the_budget_of_fp32(data: st.DataObject) -> None:
    axes: dict[str, Any] = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    case = SegmentedCase(**axes | {"rank": 32}, seed=data.draw(st.integers(0, 999)))
    if forbid(case) or heavy(case):
        return
    inputs = build(case)
    plain = oracle.reference(inputs)
    rounded = dataclasses.replace(plain, out=plain.out.to(inputs.out.dtype))
    checks = oracle.judge(inputs, rounded, Precision(probability="float32"))
    assert [str(check) for check in checks if not check.passed] == []


def test_every_slot_that_nobody_reads_is_hostile() -> None:
    inputs = build(BASE.varied(slack="nan"))
    assert inputs.cache[0].isnan().all() and int(inputs.cache.isnan().all(-1).sum()) > inputs.tile
    last = int(inputs.lengths[-1]) - 1
    page = int(inputs.table[-1, last // inputs.tile])
    assert inputs.cache[page, last % inputs.tile].isfinite().all()
    assert inputs.cache[page, last % inputs.tile + 1].isnan().all() and (inputs.table[:, -1] < 1).any()


# The judge.


def test_one_step_fails_where_the_answer_is_exact() -> None:
    inputs = build(BASE.varied(values="uniform_exact", length=32, lengths="full"))
    right = HONEST[0].answer(inputs)
    place = tuple(int(i) for i in (right.out != 0).nonzero()[5])
    right.out.view(torch.int16)[place] += 1
    failing = [c for c in oracle.judge(inputs, right, HONEST[0].declared(inputs)) if not c.passed]
    assert [check.where for check in failing] == [place] and "bit for bit" in str(failing[0])


def test_segments_are_judged_where_they_are_shown() -> None:
    inputs = build(BASE)
    right = HONEST[1].answer(inputs)
    checks = {check.output: check for check in oracle.judge(inputs, right, HONEST[1].declared(inputs))}
    assert {"sums over masses", "maxima and masses", "maxima"} <= checks.keys()
    assert all(check.passed for check in checks.values())
    assert right.masses is not None
    right.masses[2, 1, 2] *= 1.01
    failing = [c.output for c in oracle.judge(inputs, right, HONEST[1].declared(inputs)) if not c.passed]
    assert failing == ["sums over masses", "maxima and masses"]
    checks_of_form = oracle.judge(inputs, dataclasses.replace(right, maxima=None), HONEST[1].declared(inputs))
    assert [check.output for check in checks_of_form if not check.passed] == ["maxima"]


def test_last_roundings_beside_a_key_with_nearly_all_the_weight_are_no_bias() -> None:
    # All 17 heads of the longest row lie a little below the same numbers, which bf16 has.
    inputs = build(
        BASE.varied(rows=4, heads=17, rank=32, lengths="random", cache="float8_e4m3fn", query="codes", cache_scale="half",
                    slack="zero", values="needle", layout="padded", seed=599682)
    )  # fmt: skip
    checks = oracle.judge(inputs, HONEST[-1].answer(inputs), HONEST[-1].declared(inputs))
    assert [str(check) for check in checks if not check.passed] == []


# What is no call.

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query of two dimensions": ({"query": torch.zeros(1, 32).bfloat16()}, ValueError, r"should be \[rows, heads, lanes\]"),
    "cache of other lanes": ({"cache": torch.zeros(6, 4, 1, 16).bfloat16()}, ValueError, r"should be \[pages, tile, 1, 32\]"),
    "pages of three": ({"cache": torch.zeros(6, 3, 1, 32).bfloat16()}, ValueError, "tile=3: should be a power of two"),
    "pages of 256": ({"cache": torch.zeros(2, 256, 1, 32).bfloat16()}, ValueError, "tile=256: should be at most 128"),
    "a rank of 20": ({"rank": 20}, ValueError, "rank=20: should be a power of two"),
    "no rope": ({"rank": 32}, ValueError, "rope=0: should be a power of two"),
    "a cache in fp16": ({"cache": torch.zeros(6, 4, 1, 32).half()}, TypeError, "should be bfloat16, or codes"),
    "codes over bf16": ({"query": torch.zeros(1, 1, 32).to(CODES[0])}, TypeError, "should be bfloat16, or codes"),
    "out of other heads": ({"out": torch.zeros(1, 2, 16).bfloat16()}, ValueError, r"should be \[1, 1, 16\]"),
    "out in fp32": ({"out": torch.zeros(1, 1, 16)}, TypeError, "should be bfloat16 or float16"),
    "lengths in int64": ({"lengths": torch.tensor([2])}, TypeError, "lengths=torch.int64"),
    "a table of one dimension": ({"table": torch.tensor([2]).int()}, ValueError, "in 2 dimensions"),
    "a table too narrow": ({"lengths": torch.tensor([5]).int(), "max_length": 5}, ValueError, "the pages of 5 keys"),
    "a bound too low": ({"max_length": 1}, ValueError, "max_length=1: should be at least 2"),
    "a scale for a query in bf16": ({"query_scale": torch.tensor(1.0)}, ValueError, "should go together"),
    "a scale for a cache in bf16": ({"cache_scale": torch.tensor(0.5)}, ValueError, "should be 1 for a cache in bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(what: str) -> None:
    changes, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        oracle.reference(call(1.0, [2], [[2]], **changes))


# The implementations on cases.


def judged(impl: Impl, case: SegmentedCase) -> list[str]:
    """The sentences of what failed on the interpreter."""
    inputs = build(case)
    used = on_device(inputs, "cpu")
    with watch():
        outputs = impl.run(used)
    left = trespasses(inputs, used, WRITABLE)
    return left or [str(c) for c in oracle.judge(inputs, outputs, impl.precision(case, "interpreter")) if not c.passed]


@pytest.mark.parametrize("name", ["ours-triton", "torch-gathered"])
@pytest.mark.parametrize("text", [text for text in REGRESSIONS if heavy(parse(text))], ids=lambda text: text[27:90])
def test_heavy_regressions_pass(name: str, text: str) -> None:
    assert judged(NAMED[name], parse(text)) == []


def test_a_far_call_has_pages_beyond_two_to_the_31() -> None:
    cache = build(parse(REGRESSIONS[-1])).cache
    assert is_vast(cache) and cache.stride(0) < 1 << 31 <= cache.stride(0) * (cache.shape[0] - 1)


@pytest.mark.parametrize("name", ["ours-triton", "vllm-triton", "aiter-triton"])
def test_kernels_run_in_the_corrected_interpreter(name: str) -> None:
    # As shipped, it is wrong for them, and what it gets wrong would be held against whoever wrote the kernel.
    assert needs_interpreter(NAMED[name], "interpreter")


class TestReasons:
    """What keeps AITER's kernel from answering."""

    def test_missing_trees_are_reasons(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("_vllm", "_aiter"):
            monkeypatch.setattr(sources, name, tmp_path / "nowhere")
        assert len(NAMED["aiter-triton"].unsupported(BASE, "interpreter")) == 1
        assert len(NAMED["vllm-triton"].unsupported(BASE, "interpreter")) == 2
        assert NAMED["vllm-triton"].source() == NAMED["aiter-triton"].source() == b""

    @pytest.mark.aiter
    @pytest.mark.skipif(AITER is None, reason="MLA_ORACLE_AITER names no AITER source tree")
    def test_devices_are_asked_less_than_the_interpreter(self) -> None:
        small = BASE.varied(tile=1)
        assert NAMED["aiter-triton"].unsupported(small, "interpreter") == []
        assert [r.split(":")[0] for r in NAMED["aiter-triton"].unsupported(small, "hip")] == ["tile=1"]
        assert [r.split(":")[0] for r in NAMED["aiter-triton"].unsupported(BASE, "cuda")] == ["on=cuda"]


def test_aiter_has_no_memory_for_an_answer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its segments are merged elsewhere. What it got in that place, it would write to: the query, as it is at hand.
    asked = []

    def noted(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        shape = (1, 1, 8)
        return torch.zeros(*shape, 16), torch.zeros(shape), torch.ones(shape)

    loader = SimpleNamespace(symbol=lambda module, name: noted)
    monkeypatch.setattr(segmented_decode_aiter.aiter, "locate", lambda path: None)
    monkeypatch.setattr(segmented_decode_aiter.aiter, "load", lambda source, platform, execution: loader)
    segmented_decode_aiter.merged_by_us(call(1.0, [2], [[2]]))
    ((arguments, options),) = asked
    assert arguments[2] is None and options["skip_reduce"] is True


@pytest.mark.aiter
@pytest.mark.skipif(AITER is None, reason="MLA_ORACLE_AITER names no AITER source tree")
class TestAiter:
    """What AITER's kernel does at the edge."""

    AITER = NAMED["aiter-triton"]

    def test_a_nan_behind_the_last_key_comes_out_and_leaves_the_log_sum_exp_alone(self) -> None:
        answer = self.AITER.run(call(1.0, [1], [[4]], slack=NAN))
        assert answer.out.isnan().all() and answer.lse[0, 0] == 16.0
        # What is finite there does no harm, however loud.
        assert self.AITER.run(call(1.0, [1], [[4]], slack=1e30)).out[0, 0, 0] == 16.0

    def test_where_pages_are_full_it_is_right_and_shows_its_segments(self) -> None:
        case = BASE.varied(length=128, lengths="full", cache="float8_e4m3fn", query="codes", query_scale="odd")
        assert judged(self.AITER, case) == []
        assert self.AITER.run(build(case)).sums is not None

    def test_its_page_offset_has_64_bits(self) -> None:
        case = parse(REGRESSIONS[-1])
        assert isinstance(case, SegmentedCase)
        assert judged(self.AITER, case.varied(slack="zero")) == []
