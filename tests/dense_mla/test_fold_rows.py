"""Is the folding of query rows judged rightly, and do our own routes move the heads as worked out by hand?"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.case import parse
from cases.dense_mla import fold_rows as ask
from cases.dense_mla.fold_rows import FoldCase, Inputs, Outputs
from cases.precision import Precision
from impl.dense_mla.fold_rows import IMPLS
from oracle.dense_mla import fold_rows as right

OURS, TORCH = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run, TORCH.run], ids=["reference", OURS.name, TORCH.name])


def numbered(requests: int, groups: int, tokens: int) -> Inputs:
    """Queries whose heads hold row + head / 256, and an answer whose heads hold folded row + head / 256."""
    rows, heads = requests * tokens, 16 * groups
    query = torch.arange(rows)[:, None] + torch.arange(heads) / 256
    folded = torch.arange(rows * groups)[:, None] + torch.arange(16) / 256
    return Inputs(
        query=query.to(torch.bfloat16)[..., None].contiguous(),
        folded_out=folded.to(torch.bfloat16)[..., None].contiguous(),
        folded_lse=folded.contiguous(),
        query_tokens=tokens,
    )


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@RUNS
def test_hand_worked_rows(run: object) -> None:
    outputs = run(numbered(2, 2, 3))  # type: ignore[operator]
    # Three tokens' first 16 heads, then their others, request by request. Head 0 of a group holds head 0 or 16.
    first = outputs.folded[:, 0, 0].float()
    assert first.tolist() == [0, 1, 2, 0.0625, 1.0625, 2.0625, 3, 4, 5, 3.0625, 4.0625, 5.0625]
    assert outputs.lse[:, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert outputs.lse[:, 16].tolist() == [3, 4, 5, 9, 10, 11]
    assert outputs.lse[1, 17:19].tolist() == [4 + 1 / 256, 4 + 2 / 256]
    assert torch.equal(outputs.out[..., 0], outputs.lse.to(torch.bfloat16))


@RUNS
def test_single_tokens_fold_as_they_lie_in_memory(run: object) -> None:
    inputs = numbered(3, 4, 1)
    outputs = run(inputs)  # type: ignore[operator]
    assert torch.equal(outputs.folded, inputs.query.reshape(12, 16, 1))
    assert torch.equal(outputs.lse, inputs.folded_lse.reshape(3, 64))


@RUNS
def test_no_rows_stay_no_rows(run: object) -> None:
    outputs = run(numbered(0, 2, 3))  # type: ignore[operator]
    assert outputs.folded.shape == (0, 16, 1) and outputs.out.shape == (0, 32, 1) and outputs.lse.shape == (0, 32)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_every_head_of_every_row_has_a_place_of_its_own(requests: int, groups: int, tokens: int) -> None:
    inputs = numbered(requests, groups, tokens)
    for impl in (OURS, TORCH):
        outputs = impl.run(inputs)
        for row in range(requests * tokens):
            for head in range(16 * groups):
                request, token = divmod(row, tokens)
                group, within = divmod(head, 16)
                place = ((request * groups + group) * tokens + token, within)
                assert outputs.folded[place] == inputs.query[row, head]
                assert outputs.out[row, head] == inputs.folded_out[place]
                assert outputs.lse[row, head] == inputs.folded_lse[place]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"query": torch.zeros(6, 24, 1)}, "heads=24: should be a multiple of 16"),
        ({"query": torch.zeros(5, 32, 1)}, "rows=5: should be a multiple of the query tokens, 3"),
        ({"query_tokens": 0}, "rows=6: should be a multiple of the query tokens, 0"),
        ({"folded_out": torch.zeros(6, 16, 1)}, "folded_out=6 rows: should be 12"),
        ({"folded_lse": torch.zeros(13, 16)}, "folded_lse=13 rows: should be 12"),
    ],
)
def test_malformed_calls_are_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        right.reference(dataclasses.replace(numbered(2, 2, 3), **changes))  # type: ignore[arg-type]


def test_every_part_is_judged() -> None:
    inputs = numbered(2, 2, 3)
    for name in ("folded", "out", "lse"):
        outputs = right.reference(inputs)
        getattr(outputs, name)[-1, -1] += 1
        assert not passes(inputs, outputs), name


def test_not_a_number_keeps_its_code() -> None:
    inputs = ask.build(FoldCase(requests=7, dtype="float8_e4m3fnuz"))
    codes = inputs.query.view(torch.uint8).flatten()
    assert {0x80, 0x7F, 0xFF} <= set(codes.tolist())
    folded = OURS.run(inputs).folded.view(torch.uint8).flatten()
    assert torch.equal(folded.sort().values, codes.sort().values)


@pytest.mark.parametrize("case", ask.REGRESSIONS)
def test_our_routes_are_right(case: str) -> None:
    inputs = ask.build(parse(case))  # type: ignore[arg-type]
    for impl in (OURS, TORCH):
        assert passes(inputs, impl.run(memory.on_device(inputs, "cpu")))


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_folding_is_told_from_right(mutant: right.Mutant) -> None:
    inputs = ask.build(FoldCase())
    answer = mutant.answer(inputs)
    assert answer is not None and not passes(inputs, answer)
