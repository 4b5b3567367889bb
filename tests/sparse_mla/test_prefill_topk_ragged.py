"""Are the slot lists of prefill tokens judged rightly: every right list passes, and every wrong one is seen?"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies

from cases import memory
from cases.case import CaseError, parse
from cases.precision import Precision
from cases.sparse_mla import decode_topk_ragged as decoding
from cases.sparse_mla import prefill_topk_ragged as ask
from cases.sparse_mla.prefill_topk_ragged import Inputs, Outputs, PrefillTopkCase
from impl.executions import memory_watch
from impl.executions.memory_watch import MemoryViolation
from impl.implementation import Impl
from impl.sources import settings as sources
from impl.sparse_mla.prefill_topk_ragged import IMPLS
from oracle.sparse_mla import decode_topk_ragged, ragged
from oracle.sparse_mla import prefill_topk_ragged as right
from reports.laws import break_of

OURS, VLLM, TORCH = IMPLS
Run = Callable[[Inputs], Outputs]
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]
REAL = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


def small_sweep(count: int) -> list[PrefillTopkCase]:
    """The regressions and some random cases."""
    choose = random.Random(1)
    cases = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, PrefillTopkCase)]
    while len(cases) < count:
        case = PrefillTopkCase(
            **{axis: choose.choice(values) for axis, values in ask.AXES.items()}, seed=choose.randrange(99)
        )  # type: ignore[arg-type]
        if not ask.forbid(case) and case.rows * case.width < 10_000:
            cases.append(case)
    return cases


SWEEP = small_sweep(50)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(local: list[list[int]], valid: list[bool], num_rows: int = -1, num_compressed: int = 12) -> Inputs:
    """A call with blocks of 4 keys and a ratio of 2 after two decode tokens, those of request 0.

    Request 1 is the next three tokens, at positions 5, 6, 7 of 8, and has blocks 20, 21, 22; request 2 is the rest of
    up to two tokens, at positions 0 and 1 of 2, and has blocks 30, 31, 32.
    """
    rows = torch.tensor(local, dtype=torch.int32)
    return Inputs(
        local=rows, requests=int32(0, 0, 1, 1, 1, 2, 2), query_start=int32(0, 2, 5, 7), seq_lens=int32(9, 8, 2),
        valid=torch.tensor([True, True, *valid]),
        table=torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]], dtype=torch.int32), block_size=4, ratio=2,
        num_compressed=num_compressed, token_offset=2, num_rows=num_rows,
        flat=memory.guarded((rows.numel(),), torch.int32), indptr=memory.guarded((len(local) + 1,), torch.int32),
    )  # fmt: skip


def lists(outputs: Outputs) -> list[list[int]]:
    return [row.tolist() for row in ragged.split(outputs.flat, outputs.indptr)]


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


ROWS = [[2, -1, 9, 5], [0, 1, 12, 3], [11, 0, 1, 3], [0, 0, 0, 0], [4, 0, 0, 0]]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_lists(run: Run) -> None:
    # Positions 5, 6, 7 have 3, 3, 4 keys; positions 0, 1 have none and one.
    inputs = call(ROWS, [True] * 5)
    outputs = run(inputs)
    assert lists(outputs) == [[82, 89], [80, 81], [91, 80, 81, 83], [], [124]]
    assert outputs.indptr.tolist() == [0, 2, 4, 8, 8, 9]
    assert outputs.flat.shape == (20,)
    assert lists(run(call(ROWS, [True, False, True, True, False], num_rows=89))) == [[82], [], [80, 81, 83], [], []]
    assert lists(run(call(ROWS, [True] * 5, num_compressed=9))) == [[82], [80, 81], [80, 81, 83], [], [124]]


@pytest.mark.parametrize("run", RUNS)
def test_a_position_below_0_has_no_keys(run: Run) -> None:
    # Request 1 has a sequence of one token and a query of three: positions -2, -1 and 0.
    inputs = dataclasses.replace(call(ROWS, [True] * 5), seq_lens=int32(9, 1, 2), ratio=1)
    assert lists(run(inputs)) == [[], [], [91], [120], [124, 120]]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (3, 0)])
def test_nothing_gives_empty_rows(run: Run, shape: tuple[int, int]) -> None:
    inputs = dataclasses.replace(
        call(ROWS, [True] * 5), local=torch.empty(shape, dtype=torch.int32), flat=torch.empty(0, dtype=torch.int32),
        indptr=torch.full((shape[0] + 1,), 77, dtype=torch.int32),
    )  # fmt: skip
    outputs = run(inputs)
    assert outputs.indptr.tolist() == [0] * (shape[0] + 1)
    assert passes(inputs, outputs)


def test_bad_calls_are_refused() -> None:
    inputs = call(ROWS, [True] * 5)
    for name in ("ratio", "block_size"):
        with pytest.raises(ValueError, match=f"{name}=0: should be 1 or more"):
            right.reference(dataclasses.replace(inputs, **{name: 0}))
    with pytest.raises(ValueError, match="requests=6: should be one for each of 7 tokens, or more"):
        right.reference(dataclasses.replace(inputs, requests=inputs.requests[:6]))
    with pytest.raises(ValueError, match="valid=3: should be one for each of 7 tokens, or more"):
        right.reference(dataclasses.replace(inputs, valid=inputs.valid[:3]))


def scalar(inputs: Inputs) -> list[list[int]]:
    """The slots, position by position; a token's own position is counted from its request's first token."""
    found = []
    for row, positions in enumerate(inputs.local.tolist()):
        token, slots = row + inputs.token_offset, []
        if inputs.valid[token]:
            request = int(inputs.requests[token])
            tokens_after = int(inputs.query_start[request + 1]) - 1 - token
            tokens_so_far = int(inputs.seq_lens[request]) - tokens_after
            for column, position in enumerate(positions):
                exists = (column + 1) * inputs.ratio <= tokens_so_far
                if exists and 0 <= position < inputs.num_compressed:
                    block, place = divmod(position, inputs.block_size)
                    slot = int(inputs.table[request, block]) * inputs.block_size + place
                    if inputs.num_rows < 0 or slot < inputs.num_rows:
                        slots.append(slot)
        found.append(slots)
    return found


@pytest.mark.parametrize("case", [case for case in SWEEP if case.rows * case.width < 5_000], ids=str)
def test_the_reference_agrees_with_scalar_loops(case: PrefillTopkCase) -> None:
    inputs = ask.build(case)
    assert lists(right.reference(inputs)) == scalar(inputs)


@settings(max_examples=40, deadline=None)
@given(strategies.data())
def test_any_positions_are_listed_alike(data: strategies.DataObject) -> None:
    width = data.draw(strategies.integers(1, 5))
    row = strategies.lists(strategies.integers(-3, 14), min_size=width, max_size=width)
    rows = data.draw(strategies.lists(row, min_size=5, max_size=5))
    valid = data.draw(strategies.lists(strategies.booleans(), min_size=5, max_size=5))
    inputs = dataclasses.replace(
        call(rows, valid, data.draw(strategies.sampled_from([-1, 83, 125]))),
        seq_lens=int32(5, data.draw(strategies.integers(0, 12)), data.draw(strategies.integers(0, 12))),
        ratio=data.draw(strategies.sampled_from([1, 2, 3])),
    )
    assert lists(right.reference(inputs)) == scalar(inputs)
    for impl in (OURS, TORCH):
        assert passes(inputs, impl.run(inputs)), impl.name


@pytest.mark.parametrize(
    "case", [case for case in SWEEP if case.bound == "absent" and case.compressed == "all" and case.rows], ids=str
)
def test_rows_cut_to_their_keys_are_listed_as_in_decode(case: PrefillTopkCase) -> None:
    inputs = ask.build(case)
    listed = right.reference(inputs)
    batch = slice(inputs.token_offset, inputs.token_offset + case.rows)
    local = inputs.local.clone()
    for row in range(case.rows):
        if inputs.valid[row + inputs.token_offset]:
            local[row, max(0, right.keys_of(inputs, row + inputs.token_offset)) :] = -1
    local[local >= inputs.num_compressed] = -1
    decoded = decode_topk_ragged.reference(
        decoding.Inputs(
            local, inputs.requests[batch], inputs.table, inputs.block_size, inputs.valid[batch], "removed", listed.flat,
            listed.indptr, listed.indptr,
        )
    )  # fmt: skip
    assert torch.equal(decoded.indptr, listed.indptr)
    assert torch.equal(decoded.flat, listed.flat)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("P1", "stale-tails-listed"),
        ("P2", "validity-ignored"),
        ("P3", "offset-ignored"),
        ("P4", "offset-ignored"),
        ("P5", "position-0-dropped"),
        ("P6", "compressed-limit-ignored"),
    ],
)
def test_every_law_can_be_broken(law: str, fault: str) -> None:
    case = PrefillTopkCase(padded="between", token_offset=40, compressed="tight", block_size=2)
    inputs = ask.build(case)
    mutant = next(mutant for mutant in right.MUTANTS if mutant.name == fault)

    def run(asked: Inputs) -> Outputs:
        # A fault that shows with blocks of one size only.
        answer = None if law == "P5" and asked.block_size == 1 else mutant.answer(asked)
        return answer or right.reference(asked)

    (named,) = [each for each in right.LAWS if each.name.startswith(law)]
    broken = break_of(named, inputs, run(inputs), run, right.judge, Precision())
    assert broken is not None and not all(check.passed for check in broken)


def test_what_stands_behind_the_last_slot_is_free() -> None:
    inputs = call(ROWS, [True] * 5)
    want = right.reference(inputs)
    other = dataclasses.replace(want, flat=ragged.with_tail(want.flat, want.indptr, 5))
    assert passes(inputs, other)
    other.flat[1] = 5
    failed = [str(check) for check in right.judge(inputs, other, Precision()) if not check.passed]
    assert len(failed) == 1 and failed[0].startswith("flat[1]=5, but should be 89: ")


def test_inputs_fit_the_op() -> None:
    for case in SWEEP:
        first = ask.build(case)
        assert int(first.query_start[-1]) == case.token_offset + case.rows == first.requests.numel()
        assert first.num_compressed <= first.table.shape[1] * case.block_size
        assert case.context == "warmup" or bool((first.seq_lens >= first.query_start.diff()).all())


def test_impossible_cases_are_named() -> None:
    reasons = ask.forbid(PrefillTopkCase(rows=2, layout="far", padding="stray"))
    assert reasons == ["layout=far: needs three rows and a column", "padding=stray: needs padded rows"]
    with pytest.raises(CaseError, match="should be 1 to"):
        parse(PrefillTopkCase(ratio=0).id)


@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_implementations_list_the_right_slots(impl: Impl) -> None:
    for case in SWEEP[:16]:
        pristine = ask.build(case)
        used = memory.on_device(pristine, "cpu")
        with memory_watch.watch():
            outputs = impl.run(used)
        assert memory.trespasses(pristine, used, ask.WRITABLE) == [], case.id
        checks = right.judge(pristine, outputs, impl.precision(case, "interpreter"))
        assert all(check.passed for check in checks), (case.id, [str(check) for check in checks])


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    (reason,) = VLLM.unsupported(PrefillTopkCase(), "interpreter")
    assert "is not a vLLM tree" in reason


@pytest.fixture
def real_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))


@pytest.mark.vllm
@REAL
@pytest.mark.usefixtures("real_vllm")
def test_vllm_lists_the_right_slots_of_a_batch_without_stray_requests() -> None:
    for case in SWEEP[:12]:
        if case.rows and case.padding == "stale" and case.layout != "far":
            inputs = ask.build(case)
            assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu"))), case.id


@pytest.mark.vllm
@REAL
@pytest.mark.usefixtures("real_vllm")
def test_vllm_reads_outside_the_batch_for_padding_with_a_stray_request() -> None:
    inputs = ask.build(PrefillTopkCase(padded="tail", padding="stray"))
    with memory_watch.watch(), pytest.raises(Exception) as raised:
        VLLM.run(memory.on_device(inputs, "cpu"))
    cause: BaseException | None = raised.value
    while cause is not None and not isinstance(cause, MemoryViolation):
        cause = cause.__cause__
    assert cause is not None and "out-of-bounds load" in str(cause)


@pytest.mark.vllm
@REAL
@pytest.mark.usefixtures("real_vllm")
def test_vllm_has_no_answer_for_no_rows() -> None:
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        VLLM.run(ask.build(PrefillTopkCase(rows=0)))
