"""Are sliding-window slots judged rightly, and do our own routes list the right ones?"""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import window_slots as ask
from cases.sparse_mla.window_slots import Inputs, Outputs, WindowCase
from impl.implementation import Impl
from impl.sources import settings as sources
from impl.sparse_mla.window_slots import IMPLS
from oracle.sparse_mla import window_slots as right
from reports.laws import break_of


def drawn(choose: random.Random) -> WindowCase:
    while True:
        axes = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = WindowCase(**axes, seed=choose.randrange(99))  # type: ignore[arg-type]
        if not ask.forbid(case) and case.requests * case.queries < 60:
            return case


SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, WindowCase)]
OURS, DENSE, VLLM, ONE_LAUNCH = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run, DENSE.run], ids=["reference", OURS.name, DENSE.name])


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def two_requests(**changes: object) -> Inputs:
    """One token of a request of four, then three of a request of three, in blocks of two; asked for the latter."""
    inputs = Inputs(
        slots=torch.zeros(3, 4, dtype=torch.int32),
        lens=torch.zeros(3, dtype=torch.int32),
        gather_lens=torch.zeros(1, dtype=torch.int32),
        query_start=int32([0, 1, 4]),
        seq_lens=int32([4, 3]),
        token_to_request=int32([0, 1, 99, 1]),
        valid=torch.tensor([True, True, False, True]),
        table=int32([[5, 9, -1], [7, 2, 4]]),
        replay_start=int32([0, 0]),
        token_offset=1,
        first_prefill=1,
        window=3,
        block_size=2,
        form="causal",
    )
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


@RUNS
def test_hand_worked_windows(run: object) -> None:
    outputs = run(two_requests())  # type: ignore[operator]
    # Position 0 sees itself, slot 7 * 2; the second token is none; position 2 sees two tokens of block 7 and one of 2.
    assert outputs.slots.tolist() == [[14, -1, -1, -1], [-1, -1, -1, -1], [14, 15, 4, -1]]
    assert outputs.lens.tolist() == [1, 0, 3]
    assert outputs.gather_lens.tolist() == [3]


@RUNS
def test_a_window_leaves_out_what_lies_further_back(run: object) -> None:
    asked = two_requests(
        slots=torch.zeros(1, 3, dtype=torch.int32), lens=int32([0]), token_offset=0, first_prefill=0,
        gather_lens=int32([0, 0]),
    )  # fmt: skip
    outputs = run(asked)  # type: ignore[operator]
    # Position 3 of request 0 sees positions 1 to 3: the second place of block 5 and both of block 9.
    assert outputs.slots.tolist() == [[11, 18, 19]]
    # One query and the two tokens before it that its window reaches; three queries and none before them.
    assert outputs.gather_lens.tolist() == [3, 3]


@RUNS
def test_a_draft_token_sees_the_whole_block(run: object) -> None:
    asked = two_requests(
        form="draft", window=1, seq_lens=int32([4, 5]), slots=torch.zeros(3, 64, dtype=torch.int32),
        valid=torch.ones(4, dtype=torch.bool), token_to_request=int32([0, 1, 1, 1]),
    )  # fmt: skip
    outputs = run(asked)  # type: ignore[operator]
    # Positions 2 to 4 are the block, position 1 the window before it.
    assert outputs.slots.tolist() == [[15, 4, 5, 8] + [-1] * 60] * 3
    assert outputs.lens.tolist() == [4, 4, 4]


@RUNS
def test_a_window_starts_where_keys_were_kept(run: object) -> None:
    outputs = run(two_requests(replay_start=int32([0, 2])))  # type: ignore[operator]
    assert outputs.slots.tolist() == [[-1] * 4, [-1] * 4, [4, -1, -1, -1]]
    assert outputs.lens[0] <= 0 and outputs.lens.tolist()[1:] == [0, 1]


@RUNS
def test_queries_before_the_first_token_have_empty_rows(run: object) -> None:
    # Three queries of a request with one token lie at -2, -1 and 0.
    outputs = run(two_requests(seq_lens=int32([4, 1]), table=int32([[5, 9, -1], [7, -1, -1]])))  # type: ignore[operator]
    assert outputs.slots.tolist() == [[-1] * 4, [-1] * 4, [14, -1, -1, -1]]
    assert outputs.lens[0] <= 0 and outputs.lens.tolist()[1:] == [0, 1]
    assert outputs.gather_lens.tolist() == [3]


def scalar(inputs: Inputs) -> tuple[list[list[int]], list[int], list[int]]:
    """Slots, lengths and gather lengths by asking of every position whether a row sees it."""
    starts, seq, replay = inputs.query_start.tolist(), inputs.seq_lens.tolist(), inputs.replay_start.tolist()
    rows, lens = [], []
    for row in range(inputs.slots.shape[0]):
        token, seen = row + inputs.token_offset, []
        if inputs.valid[token]:
            request = int(inputs.token_to_request[token])
            block_starts = seq[request] - (starts[request + 1] - starts[request])
            own = block_starts + token - starts[request]
            for position in range(seq[request]):
                if inputs.form == "draft":
                    visible = position >= block_starts - inputs.window
                else:
                    visible = own - inputs.window < position <= own and position >= replay[request]
                if visible:
                    number = int(inputs.table[request, position // inputs.block_size])
                    seen.append(number * inputs.block_size + position % inputs.block_size)
        lens.append(len(seen))
        rows.append(seen + [-1] * (inputs.slots.shape[1] - len(seen)))
    gather = []
    for request in range(inputs.first_prefill, len(seq)):
        queries = starts[request + 1] - starts[request]
        kept = [p for p in range(seq[request] - queries) if p >= replay[request]]
        gather.append(queries + len(kept[max(0, len(kept) - inputs.window + 1) :]))
    return rows, lens, gather


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_the_reference_agrees_with_asking_of_every_position(seed: int) -> None:
    inputs = ask.build(drawn(random.Random(seed)))
    outputs = right.reference(inputs)
    rows, lens, gather = scalar(inputs)
    assert outputs.slots.tolist() == rows
    assert outputs.lens.clamp(min=0).tolist() == lens
    assert outputs.gather_lens.tolist() == gather


def test_every_law_can_be_broken() -> None:
    mutants = {mutant.name: mutant for mutant in right.MUTANTS}
    wrong = {
        "M5": "block-ignored",
        "M6": "other-block-size",
        "M14": "table-row-of-the-row",
        "M19": "table-row-of-the-row",
        "M25": "padding-attended",
        "W1": "other-block-size",
    }
    inputs = ask.build(WindowCase(requests=4, others=0, prefix="long", invalid="none", window=5))
    for law in right.LAWS:
        answer = mutants[wrong[law.name.split()[0]]].answer
        broken = break_of(law, inputs, answer(inputs), answer, right.judge, Precision())
        assert broken is not None and not all(check.passed for check in broken), law.name


def test_how_far_below_zero_an_empty_row_says_is_free_and_nothing_else() -> None:
    inputs = two_requests(replay_start=int32([0, 2]))
    for length, free in ((0, True), (-1, True), (-1000, True), (1, False)):
        outputs = right.reference(inputs)
        outputs.lens[0] = length
        assert passes(inputs, outputs) is free
    outputs = right.reference(inputs)
    outputs.slots[0, 3] = 0
    failed = [str(check) for check in right.judge(inputs, outputs, Precision()) if not check.passed]
    assert len(failed) == 1 and failed[0].startswith("slots[0, 3]=0, but should be -1: a window is a run of positions")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"query_start": int32([0, 4])}, "query_start has 2 entries: should be 3"),
        ({"table": int32([[5, 9]])}, "table has 1 entries: should be 2"),
        ({"replay_start": int32([0])}, "replay_start has 1 entries: should be 2"),
        ({"valid": torch.ones(3, dtype=torch.bool)}, "valid has 3 entries: should be 4"),
        ({"gather_lens": int32([0, 0])}, "gather_lens has 2 entries: should be 1"),
        ({"token_offset": 2}, "3 rows from token 2 on: should be at most 4 tokens"),
        ({"valid": torch.ones(4, dtype=torch.bool)}, "token_to_request of a valid token should be 0 to 1"),
        ({"slots": torch.zeros(3, 2, dtype=torch.int32)}, "slots has 2 columns: should be 3 for row 2"),
    ],
)
def test_malformed_calls_are_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        right.reference(two_requests(**changes))


def test_far_rows_and_huge_slots_are_what_they_say() -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        if case.reach == "far":
            assert memory.is_vast(inputs.slots) and memory.is_vast(inputs.table)
        if case.slots == "huge" and bool((right.reference(inputs).slots >= 0).any()):
            assert int(right.reference(inputs).slots.max()) > 2**31 - 2**20


def test_one_launch_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    case = WindowCase(part="prefill", width="wider", requests=5, queries=40)
    words = [text.split(":")[0] for text in ONE_LAUNCH.unsupported(case, "interpreter")[1:]]
    assert words == ["part=prefill, others=2", "width=wider", "requests=5, queries=40"]
    empty = WindowCase(part="decode", requests=0, others=0, invalid="none")
    assert ONE_LAUNCH.unsupported(empty, "interpreter")[1:] == [
        "requests=0, queries=7: it takes batches that have rows"
    ]


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, ONE_LAUNCH], ids=lambda impl: impl.name)
def test_vllm_lists_the_right_slots(impl: Impl, verdict: Callable[..., tuple[str, list[str]]]) -> None:
    decoding = [case.varied(part="decode", others=0, width="exact") for case in SWEEP]
    asked = [case for case in [*SWEEP[::3], *decoding[::3]] if not ask.forbid(case)]
    answered = [case for case in asked if not impl.unsupported(case, "interpreter")]
    assert len(answered) > 8
    for case in answered:
        assert verdict(case, impl) == ("pass", []), case.id


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, ONE_LAUNCH], ids=lambda impl: impl.name)
def test_vllm_stores_negative_lengths_of_empty_rows(impl: Impl) -> None:
    inputs = Inputs(
        slots=torch.zeros(3, 3, dtype=torch.int32), lens=int32([0] * 3), gather_lens=int32([]),
        query_start=int32([0, 3]), seq_lens=int32([1]), token_to_request=int32([0, 0, 0]),
        valid=torch.ones(3, dtype=torch.bool), table=int32([[7]]), replay_start=int32([0]), token_offset=0,
        first_prefill=1, window=3, block_size=2, form="causal",
    )  # fmt: skip
    assert impl.run(inputs).lens.tolist() == [-1, 0, 1]
