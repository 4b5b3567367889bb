"""Are the segments of a decode merged as worked out by hand, and does the judge tell right from wrong?"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dense_mla.merge_segments import (
    AXES,
    REGRESSIONS,
    Inputs,
    Outputs,
    SegmentCase,
    active_segments,
    build,
    forbid,
    heavy,
)
from impl.dense_mla.merge_segments import IMPLS
from impl.sources import settings as sources
from oracle.dense_mla import merge_segments as oracle

TREE = os.environ.get("MLA_ORACLE_VLLM")
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree"),
]
NAMED = {impl.name: impl for impl in IMPLS}
EVERYONE = [
    pytest.param(oracle.reference, id="reference"),
    pytest.param(NAMED["ours-triton"].run, id="ours-triton"),
    pytest.param(NAMED["torch-means"].run, id="torch-means"),
    pytest.param(NAMED["vllm-triton"].run, id="vllm-triton", marks=needs_vllm),
]
Run = Callable[[Inputs], Outputs]
BASE = SegmentCase()
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _real_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(TREE) if TREE else None)


def call(sums: list[float], maxima: list[float], masses: list[float], length: int, tile: int = 1) -> Inputs:
    """One row and head of two lanes: each segment holds its sum, and its sum times 4; fp32 out."""
    lane = torch.tensor(sums)
    return Inputs(
        sums=torch.stack([lane, 4 * lane], 1)[None, None].contiguous(),
        maxima=torch.tensor([[maxima]]),
        masses=torch.tensor([[masses]]),
        lengths=torch.tensor([length], dtype=torch.int32),
        tile=tile,
        out=torch.full((1, 1, 2), NAN),
    )


def answer(run: Run, *arguments: Any, **more: Any) -> tuple[float, float]:
    """The merged value and log-sum-exp."""
    outputs = run(call(*arguments, **more))
    first, second = outputs.out[0, 0].tolist()
    assert second == pytest.approx(4 * first, rel=1e-6)
    return first, float(outputs.lse[0, 0])


# Answers worked out by hand.


@pytest.mark.parametrize("run", EVERYONE)
def test_two_segments_of_one_key(run: Run) -> None:
    # Weights 1/2 and 1: (0.5 * 1 + 3) / 1.5 = 7/3, and 2^1 * 1.5 = 3.
    out, lse = answer(run, [1.0, 3.0], [0.0, 1.0], [1.0, 1.0], 2)
    assert out == pytest.approx(7 / 3, rel=1e-6) and lse == pytest.approx(math.log(3.0), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_masses_weigh_and_sums_do_not_weigh_twice(run: Run) -> None:
    # (6 + 2 * 10) / (3 + 2 * 2) = 26/7, at 2^4 times 7 over 2.
    out, lse = answer(run, [6.0, 10.0], [3.0, 4.0], [3.0, 2.0], 2)
    assert out == pytest.approx(26 / 7, rel=1e-6) and lse == pytest.approx(math.log(8 * 7.0), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
def test_a_segment_that_was_not_written_is_not_read(run: Run) -> None:
    # Of four segments of single tiles of 16, 17 keys fill the first and reach into the second.
    rest = [NAN, INF]
    out, lse = answer(run, [2.0, 4.0, *rest], [5.0, 5.0, *rest], [1.0, 1.0, *rest], 17, tile=16)
    assert out == 3.0 and lse == pytest.approx(6 * math.log(2.0), rel=1e-6)


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("length", [0, -1, -(2**31)])
def test_a_row_without_keys_is_0_and_minus_infinity(run: Run, length: int) -> None:
    assert answer(run, [NAN, 1.0], [NAN, 900.0], [NAN, 1.0], length) == (0.0, -INF)


@pytest.mark.parametrize("run", EVERYONE)
def test_a_row_without_mass_is_0_and_minus_infinity(run: Run) -> None:
    assert answer(run, [0.0, 0.0], [3.0, -1.0], [0.0, 0.0], 2) == (0.0, -INF)


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("what", ["sums", "masses", "maxima"])
def test_a_nan_in_a_segment_that_counts_goes_through(run: Run, what: str) -> None:
    inputs = call([1.0, 3.0], [0.0, 1.0], [1.0, 1.0], 2)
    getattr(inputs, what)[0, 0, 1] = NAN
    assert run(inputs).out.isnan().all()


@pytest.mark.parametrize(
    ("length", "segments", "tile", "active"),
    [
        (0, 8, 16, 0), (-3, 8, 16, 0), (1, 8, 16, 1), (16, 8, 16, 1), (17, 8, 16, 2), (128, 8, 16, 8),
        # One key more than 8 tiles: two tiles a segment, so that 9 tiles need 5 segments.
        (129, 8, 16, 5), (256, 8, 16, 8), (257, 8, 16, 6), (300, 8, 16, 7), (37, 8, 16, 3), (2, 2, 1, 2), (3, 2, 1, 2),
        (3072, 32, 128, 24), (100000, 128, 128, 112),
    ],
)  # fmt: skip
def test_active_segments(length: int, segments: int, tile: int, active: int) -> None:
    assert active_segments(length, segments, tile) == active


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.sampled_from([1, 2, 8, 32, 128]), st.sampled_from([1, 16, 64, 128]))
def test_active_segments_hold_every_key_and_none_is_empty(length: int, segments: int, tile: int) -> None:
    active = active_segments(length, segments, tile)
    tiles = -(-length // tile)
    # The segment spans that leave no key out and fit into the segments there are: the smallest is taken.
    span = next(span for span in range(1, tiles + 1) if span * segments >= tiles)
    assert (active - 1) * span * tile < length <= active * span * tile and active <= segments


@pytest.mark.parametrize("run", EVERYONE[:3])
def test_no_rows_are_an_empty_answer(run: Run) -> None:
    outputs = run(build(parse(REGRESSIONS[0])))
    assert outputs.out.shape == (0, 3, 64) and outputs.lse.shape == (0, 3)


# An independent formulation.


def by_hand(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scalar loops in Python's own floats: whatever tile a segment has, all its keys lie below the row's length."""
    rows, heads, segments, rank = inputs.sums.shape
    out, lse = torch.zeros((rows, heads, rank), dtype=torch.float64), torch.full((rows, heads), -INF).double()
    for row in range(rows):
        length, span = int(inputs.lengths[row]), inputs.tile
        while span * segments < length:
            span += inputs.tile
        written = [g for g in range(segments) if g * span < length]
        for head in range(heads):
            maxima, masses = inputs.maxima[row, head].double().tolist(), inputs.masses[row, head].double().tolist()
            top = max((maxima[g] for g in written), default=0.0)
            total = math.fsum(2.0 ** (maxima[g] - top) * masses[g] for g in written)
            if total == 0:
                continue
            lse[row, head] = math.log(total) + top * math.log(2.0)
            sums = inputs.sums[row, head].double().tolist()
            for lane in range(rank):
                out[row, head, lane] = math.fsum(2.0 ** (maxima[g] - top) * sums[g][lane] for g in written) / total
    return out, lse


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 23, "heads": 1, "garbage": "stale"}, {"weights": "staircase", "values": "wide", "lengths": "full"},
        {"weights": "underflow", "lengths": "uneven", "masses": "zero"}, {"lengths": "below", "rows": 5},
        {"values": "cancelling", "lengths": "random", "garbage": "huge", "segments": 16},
    ],
)  # fmt: skip
def test_reference_agrees_with_scalar_loops(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(**{"rank": 4, "tile": 4, **changes}))
    want, lse = by_hand(inputs)
    got = oracle.reference(inputs, torch.float64)
    assert torch.allclose(got.out, want, rtol=1e-11, atol=1e-13)
    assert torch.allclose(got.lse, lse, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_fp32_reference_and_running_merges_are_within_the_budget(data: st.DataObject) -> None:
    axes: dict[str, Any] = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    case = SegmentCase(**axes | {"output": "float32", "rank": 32}, seed=data.draw(st.integers(0, 999)))
    if forbid(case) or heavy(case):
        return
    inputs = build(case)
    for given_answer in (oracle.reference(inputs), oracle.HONEST[1].answer(inputs)):
        checks = oracle.judge(inputs, given_answer, oracle.HONEST[0].declared(inputs))
        assert [str(check) for check in checks if not check.passed] == []


# The judge.


def test_one_step_fails_where_the_answer_is_exact() -> None:
    inputs = build(BASE.varied(weights="equal", masses="one", values="integer_exact", lengths="full"))
    right = oracle.HONEST[0].answer(inputs)
    right.out.view(torch.int16)[1, 2, 3] += 1
    failing = [c for c in oracle.judge(inputs, right, oracle.HONEST[0].declared(inputs)) if not c.passed]
    assert [check.where for check in failing] == [(1, 2, 3)] and "bit for bit" in str(failing[0])


# What is no call.

PLAIN = call([1.0, 2.0], [0.0, 0.0], [1.0, 1.0], 2)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "sums of three dimensions": ({"sums": torch.zeros(1, 2, 2)}, ValueError, "rows, heads, segments, rank"),
    "three segments": ({"sums": torch.zeros(1, 1, 3, 2)}, ValueError, "segments=3: should be a power of two"),
    "a rank of three": ({"sums": torch.zeros(1, 1, 2, 3)}, ValueError, "rank=3: should be a power of two"),
    "a tile of 48": ({"tile": 48}, ValueError, "tile=48: should be a power of two"),
    "no tile": ({"tile": 0}, ValueError, "tile=0: should be a power of two"),
    "sums in bf16": ({"sums": torch.zeros(1, 1, 2, 2).bfloat16()}, TypeError, "should be torch.float32"),
    "maxima of other segments": ({"maxima": torch.zeros(1, 1, 4)}, ValueError, r"maxima=\[1, 1, 4\]: should be"),
    "masses with gaps": ({"masses": torch.zeros(1, 1, 4)[..., ::2]}, ValueError, "contiguous"),
    "lengths in int64": ({"lengths": torch.tensor([2])}, TypeError, "should be torch.int32"),
    "lengths of other rows": ({"lengths": torch.zeros(2).int()}, ValueError, r"lengths=\[2\]: should be \[1\]"),
    "an out of other lanes": ({"out": torch.zeros(1, 1, 3)}, ValueError, r"should be \[1, 1, 2\]"),
    "an out in fp64": ({"out": torch.zeros(1, 1, 2).double()}, TypeError, "bfloat16, float16 or float32"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(what: str) -> None:
    changes, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        oracle.reference(dataclasses.replace(PLAIN, **changes))


# The implementations on cases.


def test_our_kernel_counts_segments_of_a_row_as_long_as_int32_allows() -> None:
    inputs = call([1.0, 3.0], [0.0, 0.0], [1.0, 1.0], 2**31 - 1, tile=64)
    assert NAMED["ours-triton"].run(inputs).out[0, 0, 0] == 2.0 == oracle.reference(inputs).out[0, 0, 0]
