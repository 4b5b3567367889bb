"""Are maps from tokens to compressed slots judged rightly: every right one passes, and every wrong one is seen?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from cases.cache import compressed_slots as ask
from cases.cache.compressed_slots import Inputs, Outputs, SlotsCase
from cases.covering import sweep_cases
from cases.precision import Precision
from impl.cache.compressed_slots import IMPLS
from impl.implementation import Impl
from oracle.cache import compressed_slots as right

OURS, VLLM, TORCH = IMPLS


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


def call(lengths: list[int], seq_lens: list[int], table: list[list[int]], **changes: Any) -> Inputs:
    """A call of pairs in blocks of 4 records, in which every token has a slot."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tokens = sum(lengths)
    blocks = torch.tensor(table, dtype=torch.int32).view(len(lengths), -1 if lengths else 3)
    inputs = Inputs(
        tokens=tokens, token_slots=torch.arange(tokens), query_start=bounds,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32), table=blocks, block_size=4, ratio=2, out=None, ranks=1,
        interleave=2,
    )  # fmt: skip
    return dataclasses.replace(inputs, **changes)


def slots_of(inputs: Inputs) -> list[int]:
    return right.reference(inputs).slots.tolist()


def test_the_last_token_of_each_pair_has_the_pairs_slot() -> None:
    # Positions 5..10: records 2, 3 in block 7, record 4 first in block 9; position 10 ends no pair.
    assert slots_of(call([6], [11], [[7, 9]])) == [30, -1, 31, -1, 36, -1]
    # One token each, at position 0 and at position 1.
    assert slots_of(call([1, 1], [1, 2], [[7], [3]])) == [-1, 12]


def test_ratio_1_maps_every_token_and_ratio_128_one_in_128() -> None:
    assert slots_of(call([3], [6], [[7, 9]], ratio=1)) == [31, 36, 37]
    found = slots_of(call([130], [256], [[5, 6]], ratio=128, interleave=128, block_size=1))
    assert [(token, slot) for token, slot in enumerate(found) if slot != -1] == [(1, 5), (129, 6)]


def test_tokens_without_a_slot_have_none_whatever_their_position() -> None:
    own = torch.tensor([0, -1, 5, 9])
    assert slots_of(call([4], [4], [[7]], token_slots=own)) == [-1, -1, -1, 29]
    # Warm-up: tokens, but no length. The row of the table is not looked at.
    assert slots_of(call([2, 2], [0, 2], [[-9], [1]], token_slots=torch.tensor([-1, -1, 0, 0]))) == [-1, -1, -1, 4]


def test_the_whole_buffer_is_filled_and_empty_requests_take_nothing() -> None:
    buffer = torch.full((6,), 99)
    inputs = call([0, 2, 0], [5, 2, 0], [[1], [2], [3]], out=buffer, tokens=4, token_slots=torch.arange(4))
    assert slots_of(inputs) == [-1, 8, -1, -1, -1, -1]
    assert buffer.tolist() == [99] * 6
    assert slots_of(call([], [], [], out=buffer)) == [-1] * 6


def test_slots_beyond_32_bits() -> None:
    assert slots_of(call([2], [2], [[ask.INT32_MAX]], block_size=64)) == [-1, ask.INT32_MAX * 64]


def test_two_ranks_in_turns_of_4_number_their_own_records() -> None:
    # Rank 1 of two: positions 4..7 are its first, 12..15 its second turn; records 0, 1, then 2, 3.
    own = torch.tensor([-1] * 4 + [0] * 4 + [-1] * 4 + [0] * 4)
    found = slots_of(call([16], [16], [[10]], token_slots=own, ranks=2, interleave=4))
    assert [(token, slot) for token, slot in enumerate(found) if slot != -1] == [(5, 40), (7, 41), (13, 42), (15, 43)]


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    st.integers(0, 10_000), st.sampled_from([1, 2, 4, 128]), st.sampled_from(["one", "few"]), st.booleans()
)
def test_the_reference_agrees_with_a_loop_over_tokens(seed: int, ratio: int, queries: str, warmup: bool) -> None:
    case = SlotsCase(seed=seed, ratio=ratio, queries=queries, warmup=warmup, skipped="some", block_size=2)  # type: ignore[arg-type]
    inputs = ask.build(case)
    loop = right.HONEST[1].answer(inputs)
    assert loop is not None and torch.equal(loop.slots, right.reference(inputs).slots)
    written = loop.slots[loop.slots >= 0]
    assert written.unique().numel() == written.numel()


def test_every_law_can_be_broken() -> None:
    asked = ask.build(SlotsCase(requests=17, buffer="longer", skipped="some"))
    wrong = {
        "S1 buffer longer": "tail-left",
        "S2 no buffer": "buffer-counted",
        "S3 blocks raised": "block-number-as-slot",
        "S4 own slots changed": "own-slots-counted",
        "S5 more tokens skipped": "own-slots-ignored",
        "S6 requests reversed": "row-of-the-first-request",
    }
    answers: dict[str, Any] = {mutant.name: mutant.answer for mutant in right.MUTANTS}
    answers["own-slots-counted"] = lambda inputs: Outputs(right.reference(inputs).slots + inputs.token_slots.sum())
    answers["buffer-counted"] = lambda inputs: Outputs(right.reference(inputs).slots + int(inputs.out is None))
    for law in right.LAWS:
        edited = law.edit(asked)
        first, second = answers[wrong[law.name]](asked), answers[wrong[law.name]](edited)
        assert not torch.equal(second.slots, law.expect(first, asked, edited).slots), law.name


def test_a_failure_names_the_entry() -> None:
    inputs = call([2], [2], [[7]])
    (check,) = right.judge(inputs, Outputs(torch.tensor([28, 28])), Precision())
    assert str(check).startswith("slots[0]=28, but should be -1: the last token of a group has its record's slot")
    assert not passes(inputs, Outputs(torch.tensor([-1, 28], dtype=torch.int32)))


MALFORMED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ratio": 0}, ValueError, "ratio=0: should be 1, 2, 4 or 128"),
    ({"block_size": 0}, ValueError, "block_size=0, ranks=1: should be positive"),
    ({"ranks": 0}, ValueError, "block_size=4, ranks=0: should be positive"),
    ({"interleave": 3}, ValueError, "interleave=3: should be a multiple of ratio=2"),
    ({"table": torch.zeros(1, 1, dtype=torch.int32)}, ValueError, "3 query bounds and 1 table rows: should be 3 and 2"),
    ({"query_start": torch.tensor([0, 4, 2])}, ValueError, "query_start: should begin with 0 and never fall"),
    ({"tokens": 3}, ValueError, "query_start ends with 4: should be at most tokens=3"),
    ({"token_slots": torch.zeros(3, dtype=torch.int64)}, ValueError, "token_slots has 3 entries: should be 4 or more"),
    ({"token_slots": torch.full((4,), -2)}, ValueError, "token slot -2: should be -1 or more"),
    ({"out": torch.zeros(3, dtype=torch.int64)}, ValueError, "out has 3 entries: should be 4 or more"),
    ({"seq_lens": torch.tensor([2, 10])}, IndexError, "record 4 of request 1: should be in one of the 1 blocks"),
    ({"seq_lens": torch.tensor([0, 2])}, IndexError, "record -1 of request 0"),
    ({"table": torch.tensor([[-3], [1]])}, IndexError, "block -3: should not be negative"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), MALFORMED, ids=[message for _, _, message in MALFORMED])
def test_malformed_calls_are_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        right.reference(dataclasses.replace(call([2, 2], [2, 2], [[5], [1]]), **changes))


def test_padding_tokens_stand_behind_the_last_request() -> None:
    for case in sweep_cases(ask.CASE.op, "default"):
        assert isinstance(case, SlotsCase)
        inputs = ask.build(case)
        assert inputs.tokens == inputs.token_slots.numel() == int(inputs.query_start[-1]) + case.padding_tokens


@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_a_buffer_that_is_given_is_the_answer(impl: Impl) -> None:
    for buffer in ("exact", "longer"):
        inputs = ask.build(SlotsCase(buffer=buffer))
        assert inputs.out is not None and impl.run(inputs).slots is inputs.out


@pytest.mark.vllm
def test_vllm_gives_the_right_slots(verdict: Callable[..., tuple[str, list[str]]]) -> None:
    for case in sweep_cases(ask.CASE.op, "default")[::2]:
        assert verdict(case, VLLM) == ("pass", []), case.id


@pytest.mark.vllm
def test_vllm_takes_own_slots_below_minus_one_for_slots() -> None:
    outputs = VLLM.run(call([2], [2], [[7]], token_slots=torch.tensor([-2, -2])))
    assert outputs.slots.tolist() == [-1, 28]
