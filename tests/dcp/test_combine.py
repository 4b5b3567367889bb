"""Are merges of the answers of ranks judged rightly: every right one passes, and every wrong one is seen?"""

import dataclasses
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.case import parse
from cases.dcp import combine as ask
from cases.dcp.combine import CombineCase, Inputs, Outputs
from cases.precision import Precision
from impl.dcp import combine_call
from impl.dcp.combine import IMPLS
from impl.implementation import Impl
from impl.sources import settings as sources
from oracle.dcp import combine as right
from reports.laws import identical

OURS, TORCH, VLLM = IMPLS
EXACT = Precision(probability="exact", flushes=False)
MODES = ("all_gather_reduce_scatter", "all_gather_all_reduce", "all_to_all")
BASE = CombineCase()
PROCESSES = [
    case for case in map(parse, ask.REGRESSIONS) if isinstance(case, CombineCase) and case.ranks == "processes"
]
NEAR = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, CombineCase) and case.ranks == "one_process"]


def small_sweep(count: int) -> list[CombineCase]:
    choose = random.Random(5)
    cases = [BASE.varied(values=values, mode=mode) for values in ask.AXES["values"] for mode in MODES[::2]]
    while len(cases) < count:
        drawn: dict[str, Any] = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = CombineCase(**drawn, seed=choose.randrange(99))
        if not ask.forbid(case) and case.rows * case.heads_per_rank * case.world**2 < 200:
            cases.append(case)
    return cases


SWEEP = [*small_sweep(43), BASE.varied(mask="no_requests", values="wide")]


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, EXACT))


def call(outs: list[list[float]], lses: list[float], **changes: Any) -> Inputs:
    """One row; one head a rank of the world, all of them alike."""
    world = len(outs)
    values = torch.tensor(outs)[:, None, None].expand(world, 1, world, len(outs[0]))
    heights = torch.tensor(lses)[:, None, None].expand(world, 1, world)
    plain = Inputs(values.contiguous(), heights.contiguous(), "all_to_all", "natural")
    return dataclasses.replace(plain, **changes)


# By hand: 1 / (1 + e^-1) and 1 / (1 + 2^-1), 1 + ln(1 + e^-1) and 1 + log2(1 + 2^-1).
@pytest.mark.parametrize(
    ("base", "share", "height"), [("natural", 0.7310585786, 1.3132616875), ("two", 2 / 3, 1.5849625007)]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_gap_of_one_weighs_by_the_base(mode: Any, base: Any, share: float, height: float) -> None:
    inputs = call([[1.0, 8.0], [0.0, -8.0]], [1.0, 0.0], base=base, mode=mode)
    merged = right.reference(inputs, torch.float64)
    assert torch.allclose(merged.out, torch.tensor([share, 16 * share - 8], dtype=torch.float64), atol=1e-9)
    assert merged.lse is not None
    assert torch.allclose(merged.lse, torch.tensor(height, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("nothing", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("mode", MODES)
def test_an_empty_rank_is_left_out_whatever_it_holds(mode: Any, nothing: float) -> None:
    inputs = call([[math.nan, math.inf], [3.0, -5.0]], [nothing, 700.25], mode=mode)
    merged = right.reference(inputs)
    assert merged.lse is not None
    assert bool((merged.out == torch.tensor([3.0, -5.0])).all()) and bool((merged.lse == 700.25).all())


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_are_all_empty_give_0_and_minus_infinity(mode: Any) -> None:
    merged = right.reference(call([[math.nan], [math.inf]], [-math.inf, math.nan], mode=mode))
    assert merged.lse is not None
    assert bool((merged.out == 0).all()) and bool((merged.lse == -math.inf).all())


def test_one_rank_alone_is_not_touched() -> None:
    inputs = call([[math.nan, 2.0]], [math.inf])
    merged = right.reference(inputs)
    assert identical(merged, Outputs(inputs.outs, inputs.lses))
    assert passes(inputs, Outputs(inputs.outs.clone(), inputs.lses.clone()))
    assert not passes(inputs, Outputs(torch.zeros_like(inputs.outs), inputs.lses.clone()))


@pytest.mark.parametrize(
    ("word", "low", "high"),
    [(0x3F800000, 0x0000, 0x3F80), (0xFF800000, 0x0000, 0xFF80), (0x7FC01234, 0x1234, 0x7FC0), (0x3F807FFF, 0x7FFF, 0x3F80)],
)  # fmt: skip
def test_a_message_carries_the_low_half_and_then_the_high_half(word: int, low: int, high: int) -> None:
    lses = torch.tensor([word - (1 << 32) if word >> 31 else word], dtype=torch.int32).view(torch.float32)
    inputs = Inputs(
        torch.zeros((2, 1, 2, 3), dtype=torch.float16), lses.expand(2, 1, 2).contiguous(), "all_to_all", "natural"
    )
    packed = TORCH.run(memory.on_device(inputs, "cpu")).sent
    for message in (right.message(inputs), packed):
        assert message is not None
        assert (message[..., 3:].long() & 0xFFFF).unique(dim=-2).flatten()[:2].tolist() == [low, high]


def test_every_rank_has_its_run_of_heads_or_all_of_them() -> None:
    outs = torch.arange(6.0)[None, None, :, None].expand(3, 1, 6, 1).contiguous()
    inputs = Inputs(outs, torch.zeros(3, 1, 6), "all_gather_reduce_scatter", "natural")
    assert torch.allclose(right.reference(inputs).out.flatten(1), torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
    whole = right.reference(dataclasses.replace(inputs, mode="all_gather_all_reduce"))
    assert torch.allclose(whole.out.flatten(1), torch.arange(6.0).expand(3, 6))


def test_lengths_name_the_empty_rows_of_a_rank() -> None:
    """Requests of 2, 0 and 3 rows and a row of padding; the last request has no keys here, the one without rows has."""
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    lengths = torch.tensor([[4, 9, 0], [1, 0, 7]], dtype=torch.int32)
    inputs = Inputs(
        torch.ones(2, 6, 2, 1), torch.zeros(2, 6, 2), "all_to_all", "natural", "one_process", lengths, starts
    )
    known = torch.isfinite(right.known_lses(inputs))
    assert known[0, :, 0].tolist() == [True, True, False, False, False, False]
    assert known[1, :, 0].tolist() == [True, True, True, True, True, False]
    for rank in range(2):
        empty = combine_call.empty_rows(6, lengths[rank], starts)
        assert empty is not None and (empty == 0).tolist() == known[rank, :, 0].tolist()


def by_hand(inputs: Inputs) -> tuple[list[Any], list[Any]]:
    """A scalar at a time, in Python's floats."""
    world, rows, heads, lanes = inputs.outs.shape
    unit = 1.0 if inputs.base == "natural" else math.log(2)
    outs, heights = [], []
    for row in range(rows):
        for head in range(heads):
            live = []
            for rank in range(world):
                height = float(inputs.lses[rank, row, head])
                known = math.isfinite(height)
                if inputs.local_lengths is not None and inputs.query_start is not None:
                    mine = [b for b in range(inputs.local_lengths.shape[1])
                            if inputs.query_start[b] <= row < inputs.query_start[b + 1]]  # fmt: skip
                    known = known and bool(mine) and int(inputs.local_lengths[rank, mine[0]]) > 0
                if known:
                    live.append((height * unit, inputs.outs[rank, row, head].tolist()))
            peak = max((height for height, _ in live), default=0.0)
            total = sum(math.exp(height - peak) for height, _ in live)
            weights = [math.exp(height - peak) / total for height, _ in live]
            outs.append(
                [sum(w * own[lane] for w, (_, own) in zip(weights, live, strict=True)) for lane in range(lanes)]
            )
            heights.append((peak + math.log(total)) / unit if live else -math.inf)
    return outs, heights


@pytest.mark.parametrize("case", [case for case in SWEEP if case.lanes == 32 and case.world > 1][:12], ids=str)
def test_the_reference_agrees_with_scalars(case: CombineCase) -> None:
    inputs = ask.build(case)
    outs, heights = by_hand(inputs)
    merged = right.reference(inputs, torch.float64)
    rows, heads = inputs.outs.shape[1:3]
    want = right.shared(torch.tensor(outs, dtype=torch.float64).view(rows, heads, case.lanes), inputs)
    assert torch.allclose(merged.out, want, rtol=1e-9, atol=1e-9, equal_nan=True)
    height = right.shared(torch.tensor(heights, dtype=torch.float64).view(rows, heads), inputs)
    assert merged.lse is not None and torch.allclose(merged.lse, height, rtol=1e-12)


@pytest.mark.parametrize("case", SWEEP[::4], ids=str)
def test_float32_and_float64_agree(case: CombineCase) -> None:
    inputs = ask.build(case)
    narrow, wide = right.reference(inputs), right.reference(inputs, torch.float64)
    assert torch.allclose(narrow.out.double(), wide.out, rtol=2e-4, atol=1e-4, equal_nan=True)
    assert narrow.lse is not None and wide.lse is not None
    assert torch.allclose(narrow.lse.double(), wide.lse, rtol=1e-6, atol=1e-5, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(
    heights=st.lists(
        st.floats(-300, 300, width=32) | st.sampled_from([-math.inf, math.inf, math.nan]), min_size=2, max_size=8
    ),
    mode=st.sampled_from(MODES),
)
def test_a_merge_lies_among_what_is_merged(heights: list[float], mode: Any) -> None:
    inputs = call([[float(rank)] for rank in range(len(heights))], heights, mode=mode)
    live = [rank for rank, height in enumerate(heights) if math.isfinite(height)]
    merged = TORCH.run(memory.on_device(inputs, "cpu"))
    assert passes(inputs, merged)
    low, high = (min(live), max(live)) if live else (0, 0)
    assert low - 1e-3 <= float(merged.out.min()) and float(merged.out.max()) <= high + 1e-3
    assert merged.lse is not None and float(merged.lse.max()) >= max(
        (heights[rank] for rank in live), default=-math.inf
    )


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda i: dataclasses.replace(i, outs=i.outs[:, :, :7], lses=i.lses[:, :, :7]), ValueError,
         "heads=7: should be a multiple of world=4"),
        (lambda i: dataclasses.replace(i, outs=i.outs.double()), ValueError,
         "dtype of outs=float64: should be bfloat16, float16 or float32"),
        (lambda i: dataclasses.replace(i, outs=i.outs.to(torch.float8_e4m3fn)), ValueError, "dtype of outs=float8_e4m3fn"),
        (lambda i: dataclasses.replace(i, outs=i.outs[0]), ValueError, "should be .world, rows, heads, lanes."),
        (lambda i: dataclasses.replace(i, outs=i.outs[:0]), ValueError, "with a rank or more"),
        (lambda i: dataclasses.replace(i, lses=i.lses.half()), TypeError, "dtype of lses=float16: should be float32"),
        (lambda i: dataclasses.replace(i, lses=i.lses.mT), ValueError, "shape of lses=.4, 8, 3.: should be .4, 3, 8."),
        (lambda i: dataclasses.replace(i, query_start=None), ValueError, "local_lengths is given alone"),
        (lambda i: dataclasses.replace(i, local_lengths=None), ValueError, "query_start is given alone"),
        (lambda i: dataclasses.replace(i, query_start=i.query_start[:-1]), ValueError, "shape of query_start"),
        (lambda i: dataclasses.replace(i, local_lengths=i.local_lengths[0]), ValueError, "shape of local_lengths"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_refused(edit: Any, error: type[Exception], message: str) -> None:
    inputs = edit(ask.build(BASE.varied(mask="given")))
    with pytest.raises(error, match=message):
        right.reference(inputs)


@pytest.mark.parametrize(
    "edit",
    [
        lambda i: dataclasses.replace(i, outs=i.outs[:, :, :7], lses=i.lses[:, :, :7]),
        lambda i: dataclasses.replace(i, outs=i.outs.double()),
        lambda i: dataclasses.replace(i, query_start=None),
    ],
)
@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_ours_refuses_it_too(impl: Impl, edit: Any) -> None:
    with pytest.raises(ValueError, match="should be"):
        impl.run(edit(ask.build(BASE.varied(mask="given"))))


@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_ours_passes_what_is_heavy_and_was_wrong_once(impl: Impl) -> None:
    (case,) = filter(ask.heavy, NEAR)
    inputs = ask.build(case)
    assert passes(inputs, impl.run(memory.on_device(inputs, "cpu")))


@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_real_ranks_answer_as_one_process_does(case: CombineCase) -> None:
    inputs = ask.build(case)
    between = TORCH.run(inputs)
    within = TORCH.run(dataclasses.replace(inputs, ranks="one_process"))
    assert passes(inputs, between)
    # More than two bfloat16 shares are summed in an order of the library's own, unless all sums are exact.
    if case.world == 2 or case.mode == "all_to_all" or case.lses in ("powers", "dominating"):
        assert identical(between, within)
        assert between.sent is None or torch.equal(between.sent, right.message(inputs))


@pytest.mark.parametrize("mode", MODES)
def test_kernels_of_real_ranks_answer_as_those_of_one_process(mode: Any) -> None:
    inputs = ask.build(BASE.varied(world=2, mode=mode, ranks="processes", empty="scattered", mask="given"))
    within = dataclasses.replace(memory.on_device(inputs, "cpu"), ranks="one_process")
    assert identical(OURS.run(inputs), OURS.run(within))


def test_more_ranks_than_devices_are_no_group() -> None:
    case = BASE.varied(ranks="processes", world=8)
    assert TORCH.unsupported(case, "interpreter") == []
    assert "8 ranks need a device each" in TORCH.unsupported(case, "cuda")[0]


VLLM_TREE = os.environ.get("MLA_ORACLE_VLLM")
needs_vllm = pytest.mark.skipif(not VLLM_TREE, reason="MLA_ORACLE_VLLM names no vLLM tree")


@pytest.fixture
def vllm() -> Any:
    sources.use_vllm(Path(VLLM_TREE or ""))
    yield VLLM
    sources.use_vllm(None)


@pytest.mark.vllm
@needs_vllm
def test_vllm_merges_rightly(vllm: Impl) -> None:
    asked = 0
    for case in [*SWEEP[::2], *NEAR]:
        if case.world > 1 and case.mask != "no_requests" and not vllm.unsupported(case, "interpreter"):
            inputs = ask.build(case)
            assert passes(inputs, vllm.run(memory.on_device(inputs, "cpu"))), case.id
            asked += 1
    assert asked > 10


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("mode", MODES[:2])
def test_vllm_cannot_gather_from_one_rank(vllm: Impl, mode: Any) -> None:
    """It takes the answer of a rank alone for a pair of answer and log-sum-exp."""
    case = BASE.varied(world=1, mode=mode)
    with pytest.raises(ValueError, match="too many values to unpack"):
        vllm.run(ask.build(case))
    two_rows = ask.build(case.varied(rows=2, heads_per_rank=1))
    assert not passes(two_rows, vllm.run(two_rows))


@pytest.mark.vllm
@needs_vllm
def test_vllm_gathers_from_a_power_of_two_of_ranks_only(vllm: Impl) -> None:
    case = BASE.varied(world=3, mode="all_gather_all_reduce")
    assert any("a power of two of ranks" in reason for reason in vllm.unsupported(case, "interpreter"))
    with pytest.raises(Exception, match="power of 2"):
        vllm.run(ask.build(case))


@pytest.mark.vllm
@needs_vllm
def test_vllm_uses_up_the_answers_it_gathers(vllm: Impl) -> None:
    inputs = ask.build(BASE.varied(mode="all_gather_reduce_scatter"))
    used = memory.on_device(inputs, "cpu")
    vllm.run(used)
    assert not torch.equal(used.outs, inputs.outs)
    assert not memory.trespasses(inputs, used, ask.WRITABLE)
