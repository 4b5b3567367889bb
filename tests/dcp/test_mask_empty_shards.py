"""Are exactly those rows masked to which a rank has nothing to add?"""

import os
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from cases.case import parse
from cases.dcp import mask_empty_shards as ask
from cases.dcp.mask_empty_shards import Inputs, MaskCase, Outputs
from cases.precision import Precision
from impl.dcp.mask_empty_shards import IMPLS
from impl.sources import settings
from oracle.dcp import mask_empty_shards as right

OURS, VLLM, PACKED, TORCH = IMPLS
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]
NOTHING = -float("inf")


def call(rows: int, lengths: list[int] | None, query_start: list[int] | None, heads: int = 2) -> Inputs:
    """Log-sum-exps 1, 2, ... of the rows."""
    return Inputs(
        lse=(torch.arange(rows) + 1.0)[:, None].repeat(1, heads),
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        query_start=None if query_start is None else torch.tensor(query_start, dtype=torch.int32),
    )


def masked_rows(outputs: Outputs) -> list[int]:
    """The rows that are -inf in every head; the others must be what `call` made them."""
    masked = (outputs.lse == NOTHING).all(1)
    kept = (outputs.lse == (torch.arange(len(masked)) + 1.0)[:, None]).all(1)
    assert bool((masked ^ kept).all())
    return [int(row) for row in masked.nonzero()]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("rows", "lengths", "query_start", "masked"),
    [
        # The second request has no row, the third no token, and the last row is nobody's.
        (6, [4, 9, 0], [0, 2, 2, 5], [2, 3, 4, 5]),
        (6, [0, 9, 4], [0, 2, 2, 5], [0, 1, 5]),
        (3, [1, 1, 1], [0, 1, 2, 3], []),
        (3, [0, 0, 0], [0, 1, 2, 3], [0, 1, 2]),
        # Requests without rows at both ends, empty and not.
        (3, [0, 5, 0, 5], [0, 0, 3, 3, 3], []),
        (3, [5, 0, 5, 0], [0, 0, 3, 3, 3], [0, 1, 2]),
        # A captured graph: dummies have a length and no row.
        (8, [7, 4, 4], [0, 4, 4, 4], [4, 5, 6, 7]),
        (4, [], [0], [0, 1, 2, 3]),
        (0, [], [0], []),
        (0, [3], [0, 0], []),
        (4, None, None, []),
    ],
)
def test_rows_of_requests_without_tokens_and_padding_are_masked(
    run: Any, rows: int, lengths: list[int] | None, query_start: list[int] | None, masked: list[int]
) -> None:
    assert masked_rows(run(call(rows, lengths, query_start))) == masked


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=8), st.integers(0, 3))
def test_the_mask_is_that_of_a_loop_over_rows(requests: list[tuple[int, int]], padding: int) -> None:
    bounds = [0]
    for _, count in requests:
        bounds.append(bounds[-1] + count)
    owner = [number for number, (_, count) in enumerate(requests) for _ in range(count)]
    masked = [row for row, request in enumerate(owner) if requests[request][0] == 0]
    masked += range(len(owner), len(owner) + padding)
    inputs = call(len(owner) + padding, [length for length, _ in requests], bounds)
    assert masked_rows(right.reference(inputs)) == masked


@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_kept_rows_keep_every_bit(impl: Any) -> None:
    inputs = ask.build(MaskCase(queries="four", empty="ends", layout="strided"))
    before = inputs.lse.clone().view(torch.int32)
    kept = ~right.empty_rows(inputs)
    after = impl.run(inputs).lse.clone().view(torch.int32)
    assert 0 < int(kept.sum()) < kept.numel() and torch.equal(after[kept], before[kept])


def test_another_nan_in_a_kept_row_is_seen() -> None:
    inputs = call(1, [1], [0, 1])
    bits = torch.tensor([[0x7FC00000, 0x7FC00001]], dtype=torch.int32)
    inputs.lse.view(torch.int32).copy_(bits)
    other = Outputs(torch.full_like(inputs.lse, float("nan")))
    (check,) = right.judge(inputs, other, Precision())
    assert not check.passed and check.where == (0, 1) and "keeps its bits" in str(check)


def test_a_row_that_should_be_masked_is_named() -> None:
    inputs = call(3, [1, 0], [0, 1, 2])
    (check,) = right.judge(inputs, Outputs(inputs.lse.clone()), Precision())
    assert str(check).startswith("lse[1, 0]=2, but should be -inf: the rank has nothing to add to this row")


@pytest.mark.parametrize(
    ("lengths", "query_start", "message"),
    [
        ([1], None, "query_start=None: should be given"),
        (None, [0, 1], "lengths=None: should be given"),
        ([1, 1], [0, 1], r"query_start=\[2\]: should have one entry more than lengths=\[2\]"),
        ([[1]], [0, 1], "should have one entry more"),
        ([1], [1, 1], r"query_start=\[1, 1\]: should rise from 0"),
        ([1, 1], [0, 2, 1], "should rise from 0"),
        ([1], [0, 4], "should rise from 0 to at most 3 rows"),
    ],
)
def test_calls_that_make_no_sense_are_refused(lengths: Any, query_start: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        right.reference(call(3, lengths, query_start))


def test_rows_far_apart_are_masked() -> None:
    (case,) = (case for case in map(parse, ask.REGRESSIONS) if case.settings["layout"] == "far")
    inputs = ask.build(case)  # type: ignore[arg-type]
    assert inputs.lse.stride(0) * inputs.lse.shape[0] * 4 > 1 << 31
    want = right.reference(inputs)
    assert right.judge(ask.build(case), OURS.run(inputs), Precision())[0].passed  # type: ignore[arg-type]
    assert bool((want.lse == NOTHING).any())


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    for impl in (VLLM, PACKED):
        assert "does not exist" in impl.unsupported(MaskCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
class TestRealVllm:
    """Facts about vLLM's own code."""

    @pytest.fixture(autouse=True)
    def _real_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))

    @pytest.mark.parametrize("impl", [VLLM, PACKED], ids=lambda impl: impl.name)
    def test_masking_and_packing_agree(self, impl: Any) -> None:
        for case in (
            MaskCase(heads=3, padding=1),
            MaskCase(heads=1, queries="flat_tail", padding=5, length_dtype="int64"),
        ):
            (check,) = right.judge(ask.build(case), impl.run(ask.build(case)), Precision())
            assert check.passed, case.id

    @pytest.mark.parametrize("impl", [VLLM, PACKED], ids=lambda impl: impl.name)
    def test_lengths_without_bounds_are_refused(self, impl: Any) -> None:
        for lengths, query_start in ((None, [0, 1]), ([1], None), ([1, 1], [0, 1])):
            with pytest.raises(ValueError, match="must"):
                impl.run(call(1, lengths, query_start))
