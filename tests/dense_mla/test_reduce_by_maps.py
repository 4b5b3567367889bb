"""Are merges of partial attention results judged rightly, and are our own merges right?"""

import dataclasses
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dense_mla import reduce_by_maps as ask
from cases.dense_mla.reduce_by_maps import Inputs, Outputs, ReduceCase
from cases.memory import on_device
from cases.precision import Precision
from impl.dense_mla.reduce_by_maps import IMPLS
from oracle.dense_mla import reduce_by_maps as right
from reports.laws import break_of

TRITON, TORCH, AITER = IMPLS
REGRESSIONS = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, ReduceCase)]
NONE = -math.inf


def asked(
    partial: list[Any], lse: list[Any], starts: list[int], spans: list[list[int]] | None, parts: list[int],
    rows: int = 4,
) -> Inputs:  # fmt: skip
    """One head; rows hold 7 before the merge, and their log-sum-exps 5."""
    return Inputs(
        partial_out=torch.tensor(partial, dtype=torch.float32)[:, None],
        partial_lse=torch.tensor(lse, dtype=torch.float32)[:, None],
        group_start=torch.tensor(starts, dtype=torch.int32),
        groups=None if spans is None else torch.tensor(spans, dtype=torch.int32).reshape(-1, 2),
        parts=torch.tensor(parts, dtype=torch.int32),
        out=torch.full((rows, 1, len(partial[0])), 7.0, dtype=torch.bfloat16),
        lse=torch.full((rows, 1), 5.0),
    )


def run_of(run: Any, inputs: Inputs) -> Outputs:
    answer = run(on_device(inputs, "cpu"))
    assert isinstance(answer, Outputs)
    return answer


def sentences(inputs: Inputs, outputs: Outputs) -> list[str]:
    precision = Precision(probability="exact", flushes=False)
    return [str(check) for check in right.judge(inputs, outputs, precision) if not check.passed]


RUNS = pytest.mark.parametrize(
    "run", [right.reference, TRITON.run, TORCH.run], ids=["reference", TRITON.name, TORCH.name]
)


@RUNS
def test_parts_weigh_by_their_sums(run: Any) -> None:
    # Weights 1 : 3, so (1 * 4 + 3 * 8) / 4 and (1 * 0 + 3 * 4) / 4.
    inputs = asked([[4, 0], [8, 4]], [0, math.log(3)], [0, 2], [[1, 2]], [0, 1])
    answer = run_of(run, inputs)
    assert answer.out[:, 0].tolist() == [[7, 7], [7, 3], [7, 7], [7, 7]]
    assert answer.lse is not None
    assert answer.lse[:, 0].tolist() == pytest.approx([5, math.log(4), 5, 5], rel=1e-6)
    assert answer.lse[2, 0] == 5


@RUNS
def test_groups_of_one_and_none_are_left_as_they_are(run: Any) -> None:
    inputs = asked([[4], [8], [1]], [0, 0, 0], [0, 1, 1, 3], [[0, 1], [1, 2], [2, 3]], [2, 0, 1, -9, 1 << 30])
    answer = run_of(run, inputs)
    assert answer.out[:, 0, 0].tolist() == [7, 7, 6, 7]
    assert sentences(inputs, answer) == []


@pytest.mark.parametrize("unsplit", ["garbage", "rows"])
def test_a_map_may_hold_anything_for_tiles_that_were_not_split(unsplit: Any) -> None:
    inputs = ask.build(ReduceCase(split="few", unsplit=unsplit))
    assert inputs.groups is not None
    assert inputs.group_start.diff().tolist() == [1, 0, 2]
    spans = inputs.groups[:2].tolist()
    if unsplit == "garbage":
        assert spans == [[0x7B7B7B7B] * 2] * 2
        return
    first, last = inputs.groups[2].tolist()
    assert all(0 <= begin < end <= len(inputs.out) and (end <= first or begin >= last) for begin, end in spans)
    for name in ("groups-of-one-merged", "groups-of-one-lse-written", "groups-of-none-emptied"):
        wrong = next(mutant for mutant in right.MUTANTS if mutant.name == name).answer(inputs)
        assert isinstance(wrong, Outputs) and sentences(inputs, wrong), name


@RUNS
def test_rows_of_a_group_are_consecutive_scratch_rows_of_every_part(run: Any) -> None:
    partial = [[1.0], [2.0], [99.0], [3.0], [6.0], [99.0]]
    answer = run_of(run, asked(partial, [0] * 6, [0, 2], [[1, 3]], [3, 0]))
    assert answer.out[:, 0, 0].tolist() == [7, 2, 4, 7]


@RUNS
def test_without_a_map_rows_follow_from_the_parts(run: Any) -> None:
    # Two rows a part: the second group ends in rows 2 and 3.
    partial = [[float(value)] for value in (1, 2, 3, 4, 11, 12, 13, 14)]
    answer = run_of(run, asked(partial, [0] * 8, [0, 2, 4], None, [0, 2, 4, 6]))
    assert answer.out[:, 0, 0].tolist() == [2, 3, 12, 13]


@RUNS
@pytest.mark.parametrize("empty", [NONE, math.inf, math.nan])
def test_a_part_without_a_key_is_not_read(run: Any, empty: float) -> None:
    inputs = asked([[math.nan], [3.0], [math.inf]], [empty, 2.0, empty], [0, 3], [[0, 1]], [0, 1, 2])
    answer = run_of(run, inputs)
    assert answer.out[0, 0, 0] == 3
    assert answer.lse is not None and answer.lse[0, 0] == 2


@RUNS
def test_a_row_without_a_key_is_zero_and_weighs_nothing(run: Any) -> None:
    answer = run_of(run, asked([[math.nan], [4.0]], [NONE, NONE], [0, 2], [[0, 1]], [0, 1]))
    assert answer.out[0, 0, 0] == 0
    assert answer.lse is not None and answer.lse[0, 0] == NONE


@RUNS
@pytest.mark.parametrize("level", [-300.0, 0.0, 300.0])
def test_only_differences_of_sums_matter(run: Any, level: float) -> None:
    answer = run_of(run, asked([[4.0], [8.0]], [level, level], [0, 2], [[0, 1]], [0, 1]))
    assert answer.out[0, 0, 0] == 6
    assert answer.lse is not None
    assert float(answer.lse[0, 0]) == pytest.approx(level + math.log(2), rel=1e-6)


def by_loops(inputs: Inputs) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Every element by itself, as the softmax over all keys of all parts would have it."""
    out = inputs.out.double().numpy().copy()
    assert inputs.lse is not None and inputs.groups is not None
    lse = inputs.lse.double().numpy().copy()
    for number in range(inputs.group_start.numel() - 1):
        parts = inputs.parts[int(inputs.group_start[number]) : int(inputs.group_start[number + 1])].tolist()
        if len(parts) < 2:
            continue
        first, last = inputs.groups[number].tolist()
        for row in range(first, last):
            for head in range(out.shape[1]):
                pairs = []
                for part in parts:
                    own = float(inputs.partial_lse[part + row - first, head])
                    if own > NONE:
                        pairs.append((own, inputs.partial_out[part + row - first, head].double().numpy()))
                whole = np.logaddexp.reduce([own for own, _ in pairs]) if pairs else NONE
                lse[row, head] = whole
                out[row, head] = sum((np.exp(own - whole) * value for own, value in pairs), 0 * out[row, head])
    return out, lse


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["none", "minus_infinity", "nan", "rows"]),
    st.sampled_from(["randn", "wide"]),
)
def test_the_reference_is_the_softmax_over_all_parts(seed: int, holes: Any, values: Any) -> None:
    case = ReduceCase(heads=2, lanes=8, groups=3, rows=2, holes=holes, values=values, seed=seed)
    inputs = ask.build(case)
    inputs.out.fill_(1)
    assert inputs.lse is not None
    inputs.lse.fill_(2)
    out, lse = by_loops(inputs)
    wide = dataclasses.replace(inputs, out=inputs.out.double())
    exact = right._merged(wide, torch.float64)
    np.testing.assert_allclose(exact.out.numpy(), out, rtol=1e-6, atol=1e-12)
    single = right.reference(inputs)
    assert single.lse is not None
    np.testing.assert_allclose(single.lse.double().numpy(), lse, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(single.out.double().numpy(), out, rtol=2.0**-8, atol=1e-6)
    assert sentences(inputs, single) == []


@pytest.mark.parametrize(
    ("law", "wrong"),
    [("R1", "first-part-only"), ("R2", "map-ignored"), ("R3", "one-part-more"), ("R4", "weights-of-the-first-head"),
     ("R5", "maximum-from-zero")],
)  # fmt: skip
def test_a_law_is_broken_by_its_fault(law: str, wrong: str) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))
    mutant = next(mutant for mutant in right.MUTANTS if mutant.name == wrong).answer

    def answer(inputs: Inputs) -> Outputs:
        if law == "R5":
            # Rounding to a grid of its own is not linear.
            merged = right.reference(inputs)
            return dataclasses.replace(merged, out=(merged.out * 3).round() / 3)
        return mutant(inputs) or right.reference(inputs)

    def broken(case: ReduceCase) -> bool:
        inputs = ask.build(case)
        checks = break_of(rule, inputs, answer(inputs), answer, right.judge, Precision())
        return checks is not None and not all(check.passed for check in checks)

    base = ReduceCase(split="three", ragged=False, scratch="dense")
    assert any(broken(case) for case in (base, base.varied(ragged=True), base.varied(groups=7, split="mixed")))


def test_a_dominating_part_is_judged_bit_for_bit() -> None:
    inputs = ask.build(ReduceCase(values="dominating", split="three", dtype="float16"))
    answer = right.reference(inputs)
    assert sentences(inputs, answer) == []
    group = next(right.groups_of(inputs))
    place = answer.out[group.first, 0].view(torch.int16)
    place[3] += 1
    assert "bit for bit" in sentences(inputs, answer)[0]


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"partial_out": torch.zeros(2, 1, 1, dtype=torch.float16)}, TypeError, "partial_out is torch.float16: should be"),
        ({"out": torch.zeros(4, 1, 1)}, TypeError, "out is torch.float32: should be torch.bfloat16 or torch.float16"),
        ({"parts": torch.zeros(2, dtype=torch.int64)}, TypeError, "parts is torch.int64: should be torch.int32"),
        ({"partial_out": torch.zeros(2, 1, 2)[:, :, ::2]}, ValueError, "strided: should be contiguous"),
        ({"partial_lse": torch.zeros(2, 3)}, ValueError, r"partial_lse has shape \[2, 3\]: should have \[2, 1\]"),
        ({"out": torch.zeros(4, 2, 1).bfloat16()}, ValueError, r"out has rows of \[2, 1\]: should have \[1, 1\]"),
        ({"groups": torch.zeros((2, 2), dtype=torch.int32)}, ValueError, "groups has 2 rows: should have 1"),
        ({"groups": torch.tensor([[3, 5]], dtype=torch.int32)}, ValueError, r"rows 3..5: should lie in 0..4"),
        ({"parts": torch.tensor([0, 2], dtype=torch.int32)}, ValueError, r"parts at \[0, 2\]: should lie in 0..2"),
    ],
)  # fmt: skip
def test_calls_that_make_no_sense_are_refused(changes: Any, error: type[Exception], sentence: str) -> None:
    inputs = asked([[4], [8]], [0, 0], [0, 2], [[0, 1]], [0, 1])
    with pytest.raises(error, match=sentence):
        right.reference(dataclasses.replace(inputs, **changes))


def test_aiter_says_why_it_cannot_answer() -> None:
    reasons = AITER.unsupported(ReduceCase(heads=80, lanes=128), "interpreter")
    assert reasons[0].startswith("execution=interpreter: AITER's reduction is a compiled HIP kernel")
    assert reasons[-1] == (
        "heads=80 lanes=128: AITER's reduction is compiled for 1, 2, 4, 8, 10, 16, 32, 40, 48, 64, 96, 128 heads"
    )
    assert not any("compiled for" in reason for reason in AITER.unsupported(ReduceCase(heads=80, lanes=512), "hip"))


def test_aiter_is_asked_as_its_decode_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(
        partial: Any, lse: Any, starts: Any, groups: Any, parts: Any, rows: int, splits: int, *out: Any
    ) -> None:
        asked_for.append((rows, splits))
        answer = right.reference(Inputs(partial, lse, starts, groups, parts, *out))
        out[0].copy_(answer.out)
        out[1].copy_(answer.lse)

    asked_for: list[tuple[int, int]] = []
    module = ModuleType("aiter")
    module.mla_reduce_v1 = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", module)
    inputs = asked([[4], [8], [4], [8]], [0, 0, 0, 0], [0, 0, 2], [[9, 99], [0, 2]], [0, 2])
    assert sentences(inputs, AITER.run(on_device(inputs, "cpu"))) == []
    bare = asked([[4], [8], [4], [8]], [0, 0, 0, 0], [0, 2], None, [0, 2])
    assert sentences(bare, AITER.run(on_device(bare, "cpu"))) == []
    assert asked_for == [(2, 0), (2, 0)]
