"""Is what layers use of remembered top-k lists judged rightly, and does our own memo never give a stale one?"""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from cases import memory
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import topk_ragged_memo as ask
from cases.sparse_mla.topk_ragged_memo import Cache, Inputs, Layer, MemoCase, Outputs, Part, Step
from impl.sparse_mla.topk_ragged_memo import IMPLS, Lists, TopkMemo
from oracle.sparse_mla import topk_ragged_memo as right
from reports.laws import break_of

OURS, VLLM = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run], ids=["reference", OURS.name])


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(decoded: list[int], *prefilled: list[int]) -> Step:
    """A decode token of request 0 and two prefill tokens at positions 2 and 3 of request 1."""
    return Step(
        published=(int32([decoded, *prefilled]),),
        token_to_request=int32([0, 1, 1]),
        valid=torch.ones(3, dtype=torch.bool),
        query_start=int32([0, 1, 3]),
        seq_lens=int32([9, 4]),
        tables=(int32([[5, 7], [9, 8]]),),
        decode_tokens=1,
        decode_requests=1,
    )


def two_steps(**changes: object) -> Inputs:
    """A source and a layer behind it, at two tokens per entry and two entries per block, in two steps."""
    inputs = Inputs(
        layers=(Layer(2, 2, 0), Layer(4, 2, 0)),
        caches=(Cache(ratio=2, blocks=10, table=0),),
        steps=(step([3, 0], [0, 3], [1, 2]), step([1, -1], [1, 1], [3, -1])),
        buffer=torch.full((4, 2), -1, dtype=torch.int32),
        block_size=4,
        max_model_len=8,
    )
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


def rows(outputs: Outputs) -> list[list[list[int]]]:
    split = []
    for flat, indptr in zip(outputs.flat, outputs.indptr, strict=True):
        split.append([flat[start:end].tolist() for start, end in itertools.pairwise(indptr.tolist())])
    return split


@RUNS
def test_hand_worked_script(run: object) -> None:
    outputs = run(two_steps())  # type: ignore[operator]
    # Decode: entry 3 is the second of block 7, entry 0 the first of block 5. Prefill: at position 2 one entry exists.
    first = [[[15, 10]], [[18], [19, 16]]]
    second = [[[11]], [[19], [17]]]
    assert rows(outputs) == [*first, *first, *second, *second]
    assert [one.tolist() for one in outputs.lengths] == [[2], [], [2], [], [1], [], [1], []]


@RUNS
def test_entries_beyond_the_cache_and_the_longest_sequence_are_left_out(run: object) -> None:
    # Nine blocks hold slots up to 17; sequences of at most four tokens have two entries.
    outputs = run(two_steps(caches=(Cache(2, 9, 0),), max_model_len=4))  # type: ignore[operator]
    assert rows(outputs)[:2] == [[[15, 10]], [[], []]]
    assert rows(outputs)[5] == [[], []]


@RUNS
def test_layers_of_other_ratios_have_other_lists(run: object) -> None:
    steps = tuple(
        dataclasses.replace(one, tables=(one.tables[0], int32([[5, 7, 1, 2], [9, 8, 3, 4]])))
        for one in two_steps().steps
    )
    layers = (Layer(2, 2, 0), Layer(4, 2, 1), Layer(5, 2, 0))
    outputs = run(two_steps(steps=steps, layers=layers, caches=(Cache(2, 10, 0), Cache(4, 10, 1))))  # type: ignore[operator]
    # One entry per block: entry 3 is block 2, entry 0 block 5. At position 3 one entry exists, at 2 none.
    assert rows(outputs)[2:4] == [[[2, 5]], [[], [8]]]
    assert rows(outputs)[4:6] == rows(outputs)[:2]


@RUNS
def test_a_source_that_is_not_here_is_named(run: object) -> None:
    with pytest.raises(NotImplementedError, match="layer 4: its source, layer 3, should be"):
        run(two_steps(layers=(Layer(2, 2, 0), Layer(4, 3, 0))))  # type: ignore[operator]


def test_malformed_scripts_are_named() -> None:
    with pytest.raises(ValueError, match="layer 4: should run behind its source, layer 2"):
        right.reference(two_steps(layers=(Layer(4, 2, 0), Layer(2, 2, 0))))
    with pytest.raises(ValueError, match="ratio=3: should divide the block size, 4"):
        right.reference(two_steps(caches=(Cache(3, 10, 0),)))


def test_a_layer_that_is_not_here_has_no_lists() -> None:
    with pytest.raises(KeyError):
        TopkMemo([Layer(2, 2, 0)]).lists(3, "decode", 1, lambda: (int32([]), int32([0]), int32([])))


def test_lists_are_built_once_a_step_and_key() -> None:
    built: list[int] = []

    def build() -> Lists:
        built.append(1)
        return int32([]), int32([0]), int32([])

    memo = TopkMemo([Layer(2, 2, 0), Layer(4, 2, 0), Layer(6, 2, 1)])
    for number, key in ((2, 1), (4, 1), (6, 2), (4, 2), (2, 1)):
        memo.lists(number, "decode", key, build)
    assert len(built) == 3


class MemoMachine(RuleBasedStateMachine):
    """Steps that come at any time, layers in their order, and parts that each step has or has not."""

    layers = (Layer(0, 0, 0), Layer(1, 0, 1), Layer(2, 0, 0), Layer(5, 5, 0), Layer(6, 0, 1), Layer(7, 5, 1))
    memo_type: type[TopkMemo] = TopkMemo

    def __init__(self) -> None:
        super().__init__()
        self.memo = self.memo_type(self.layers)
        self.step = 0
        self.place = len(self.layers)
        self.parts: list[Part] = []

    @rule(parts=st.sampled_from([("decode",), ("prefill",), ("decode", "prefill")]))
    def next_step(self, parts: tuple[Part, ...]) -> None:
        self.step, self.place, self.parts = self.step + 1, 0, list(parts)

    @precondition(lambda self: self.place < len(self.layers))
    @rule()
    def next_layer(self) -> None:
        layer = self.layers[self.place]
        self.place += 1
        for part in self.parts:
            fresh = int32([self.step, layer.source, len(part), layer.cache])

            def build(fresh: torch.Tensor = fresh) -> Lists:
                return fresh, fresh, fresh

            used = self.memo.lists(layer.number, part, layer.cache, build)
            assert all(torch.equal(one, fresh) for one in used)


MACHINE_SETTINGS = settings(max_examples=30, stateful_step_count=25, deadline=None, database=None)
TestMemoMachine = MemoMachine.TestCase
TestMemoMachine.settings = MACHINE_SETTINGS


class NeverCleared(TopkMemo):
    """A memo whose sources keep what the last step stored."""

    def lists(self, number, part, key, build):  # type: ignore[no-untyped-def]
        held = self._lists.setdefault((self._source[number], part), {})
        return held.setdefault(key, build())


class OneForAllSources(TopkMemo):
    """A memo that all sources share."""

    def __init__(self, layers):  # type: ignore[no-untyped-def]
        super().__init__(layers)
        self._source = {number: 0 if number != source else number for number, source in self._source.items()}


class KeyIgnored(TopkMemo):
    """A memo with one list for all caches."""

    def lists(self, number, part, key, build):  # type: ignore[no-untyped-def]
        return super().lists(number, part, 0, build)


@pytest.mark.parametrize("broken", [NeverCleared, OneForAllSources, KeyIgnored], ids=lambda kind: kind.__name__)
def test_the_machine_finds_a_memo_that_is_wrong(broken: type[TopkMemo]) -> None:
    machine = type("Broken", (MemoMachine,), {"memo_type": broken})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine, settings=settings(MACHINE_SETTINGS, max_examples=200, report_multiple_bugs=False)
        )


def test_every_law_can_be_broken() -> None:
    mutants = {mutant.name: mutant for mutant in right.MUTANTS}
    wrong = {
        "M25 first step left out": "never-cleared",
        "M25 back to the first step": "cleared-after-reading",
        "M25 other padding": "padding-listed",
    }
    inputs = ask.build(MemoCase(padded="between"))
    for law in right.LAWS:
        if law.name not in wrong:
            continue
        answer = mutants[wrong[law.name]].answer
        broken = break_of(law, inputs, answer(inputs), answer, right.judge, Precision())
        assert broken is not None and not all(check.passed for check in broken), law.name


def test_a_layer_that_changes_anothers_lists_breaks_a_law() -> None:
    def last_layer_sorts(inputs: Inputs) -> Outputs:
        outputs = right.reference(inputs)
        if len(inputs.layers) == 2:
            outputs.flat[0].zero_()
        return outputs

    inputs = two_steps()
    (law,) = (law for law in right.LAWS if law.name.startswith("T1"))
    broken = break_of(law, inputs, last_layer_sorts(inputs), last_layer_sorts, right.judge, Precision())
    assert broken is not None and not all(check.passed for check in broken)


def test_a_stale_list_names_step_and_layer() -> None:
    inputs = two_steps()
    mutants = {mutant.name: mutant for mutant in right.MUTANTS}
    outputs = mutants["never-cleared"].answer(inputs)
    failed = [str(check) for check in right.judge(inputs, outputs, Precision()) if not check.passed]  # type: ignore[arg-type]
    assert failed[0] == (
        "step 1 layer 2 decode indptr[1]=2, but should be 1: a fresh build from this step's selection; "
        "1 of 2 elements differ"
    )
    outputs = right.reference(inputs)
    assert not passes(inputs, dataclasses.replace(outputs, flat=outputs.flat[:-1]))
    outputs.lengths[0].fill_(7)
    assert not passes(inputs, outputs)


@pytest.mark.parametrize("change", ["topk", "tables", "lengths", "tokens", "valid"])
def test_steps_differ_in_what_the_case_says(change: str) -> None:
    steps = ask.build(MemoCase(change=change, steps=2, phase="prefill", tokens=20, padded="between")).steps  # type: ignore[arg-type]
    same = {
        "topk": torch.equal(steps[0].published[0], steps[1].published[0]),
        "tables": torch.equal(steps[0].tables[0], steps[1].tables[0]),
        "lengths": torch.equal(steps[0].seq_lens, steps[1].seq_lens),
        "tokens": torch.equal(steps[0].query_start, steps[1].query_start),
        "valid": torch.equal(steps[0].valid, steps[1].valid),
    }
    assert not same[change]
    if change != "tokens":
        assert all(stays for what, stays in same.items() if what != change)


@pytest.mark.vllm
def test_vllm_gives_fresh_lists(verdict: Callable[..., tuple[str, list[str]]]) -> None:
    for case in sweep_cases(ask.CASE.op, "default")[:14]:
        assert verdict(case, VLLM) == ("pass", []), case.id


@pytest.mark.vllm
def test_in_vllm_a_layer_that_runs_before_its_source_uses_the_step_before() -> None:
    inputs = two_steps(layers=(Layer(4, 2, 0), Layer(2, 2, 0)))
    for run in (VLLM.run, OURS.run):
        outputs = run(memory.on_device(inputs, "cpu"))
        # Layer 4 asks first in the second step and gets the first step's lists; the source clears them afterwards.
        assert rows(outputs)[4] == [[15, 10]]
        assert rows(outputs)[6] == [[11]]
