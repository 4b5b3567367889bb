"""Are grouped MXFP8 products judged rightly: every right one passes, and every wrong one is seen?"""

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
from cases.precision import Precision
from cases.quant import mxfp8_bmm as ask
from cases.quant.mxfp8_bmm import BmmCase, Inputs, Outputs
from impl.executions import memory_watch
from impl.implementation import Impl
from impl.quant.mxfp8_bmm import IMPLS
from impl.quant.mxfp8_bmm_call import tile_for
from impl.sources import settings as sources
from oracle.quant import mxfp8_bmm as right
from reports.laws import break_of

OURS, VLLM, TORCH = IMPLS
EXACT = Precision(flushes=False)


def small_sweep(count: int) -> list[BmmCase]:
    """Random cases of little work, and the probes of every kind of value."""
    choose = random.Random(3)
    base = BmmCase(tokens=17, layout="strided")
    cases = [base.varied(values=values, scales="one") for values in ask.AXES["values"]]
    cases += [
        base.varied(form="row", scales="extreme", rank=48),
        base.varied(tokens=130, groups=1, scales="wide", width=512),
    ]
    cases.append(base.varied(tokens=40, groups=2, values="onehot_exact"))
    while len(cases) < count:
        drawn: dict[str, Any] = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = BmmCase(**drawn, seed=choose.randrange(99))
        work = case.tokens * case.groups * case.rank * case.width
        if not ask.forbid(case) and work <= 1 << 21:
            cases.append(case)
    return cases


SWEEP = small_sweep(22)
EDGES = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, BmmCase) and case.reach == "near"]
FAR = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, BmmCase) and case.reach != "near"]


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, EXACT))


def exact_answer(inputs: Inputs) -> Outputs:
    answer = right.HONEST[0].answer(inputs)
    assert isinstance(answer, Outputs)
    return answer


def by_hand(**changes: Any) -> Inputs:
    """One token, two groups of 16 columns: 1 at lane 3 of the first slice, -1.5 at the last lane of the second."""
    a = torch.zeros(1, 2048, dtype=torch.uint8)
    a[0, 3], a[0, 2047] = 0x38, 0xBC
    weight = torch.zeros(32, 1024, dtype=torch.uint8)
    # 2 in column 1 of group 0; 448 and the smallest subnormal, 2^-9, in columns 0 and 15 of group 1.
    weight[1, 3], weight[16, 1023], weight[31, 1023] = 0x40, 0x7E, 0x01
    a_scale = torch.full((1, 64), 127, dtype=torch.uint8)
    a_scale[0, 0], a_scale[0, 63] = 130, 126
    weight_scale = torch.full((32, 32), 127, dtype=torch.uint8)
    weight_scale[1, 0], weight_scale[31, 31] = 120, 136
    fields: dict[str, Any] = {
        "a": a.view(torch.float8_e4m3fn), "a_scale": a_scale, "weight": weight.view(torch.float8_e4m3fn),
        "weight_scale": weight_scale, "groups": 2, "rank": 16, "out": torch.zeros(1, 32, dtype=torch.bfloat16),
    }  # fmt: skip
    return Inputs(**{**fields, **changes})


def test_hand_worked_products() -> None:
    out = right.reference(by_hand()).out[0]
    assert out.nonzero().flatten().tolist() == [1, 16, 31]
    # 1 * 2^3 * 2 * 2^-7, -1.5 / 2 * 448, -1.5 / 2 * 2^-9 * 2^9.
    assert out[[1, 16, 31]].tolist() == [0.125, -336.0, -0.75]


def test_hand_worked_scale_blocks() -> None:
    # 64 columns of ones over 1024 ones; scale 2 for the first 32 rows of the weight and 8 for the others.
    ones = torch.full((1, 1024), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[128], [130]], dtype=torch.uint8).expand(2, 32).contiguous()
    inputs = by_hand(
        a=ones, a_scale=torch.full((1, 32), 127, dtype=torch.uint8), weight=ones.expand(64, 1024).contiguous(),
        weight_scale=scale, groups=1, rank=64, out=torch.zeros(1, 64, dtype=torch.bfloat16),
    )  # fmt: skip
    assert right.reference(inputs).out[0].tolist() == [2048.0] * 32 + [8192.0] * 32


def test_the_tile_table_edge_by_edge() -> None:
    table = {
        0: (16, 16, 1024, 2, 3), 64: (16, 16, 1024, 2, 3), 65: (32, 16, 1024, 2, 3), 128: (32, 16, 1024, 2, 3),
        129: (32, 32, 512, 2, 3), 256: (32, 32, 512, 2, 3), 257: (64, 32, 512, 2, 3), 512: (64, 32, 512, 2, 3),
        513: (64, 64, 512, 4, 2), 1024: (64, 64, 512, 4, 2), 1025: (64, 64, 256, 4, 2), 2048: (64, 64, 256, 4, 2),
        2049: (64, 64, 256, 2, 1), 3072: (64, 64, 256, 2, 1), 3073: (128, 128, 256, 8, 2),
        4096: (128, 128, 256, 8, 2), 4097: (128, 128, 128, 4, 2), 1 << 20: (128, 128, 128, 4, 2),
    }  # fmt: skip
    for work, tile in table.items():
        assert ask.tile_of(work) == tile == tile_for(work, 1), work
    # Either factor of the work counts.
    assert tile_for(16, 4) == ask.tile_of(64) and tile_for(33, 2) == ask.tile_of(66)


def scalar_product(inputs: Inputs, token: int, column: int) -> float:
    """One element by byte arithmetic in Python floats, which add exactly here or in float64."""

    def number(code: int) -> float:
        exponent, fraction = code >> 3 & 15, code & 7
        size = math.nan if code & 0x7F == 0x7F else (fraction / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        return -size if code & 0x80 else size

    width = inputs.weight.shape[1]
    group = column // inputs.rank
    row = inputs.a.view(torch.uint8)[token, group * width : (group + 1) * width].tolist()
    weight = inputs.weight.view(torch.uint8)[column].tolist()
    a_scale = inputs.a_scale[token, group * width // 32 : (group + 1) * width // 32].tolist()
    weight_scale = inputs.weight_scale[column * inputs.weight_scale.shape[0] // inputs.weight.shape[0]].tolist()
    terms = [
        number(row[k]) * number(weight[k]) * 2.0 ** (a_scale[k // 32] + weight_scale[k // 32] - 254)
        for k in range(width)
    ]
    return math.nan if any(map(math.isnan, terms)) else math.fsum(terms)


@pytest.mark.parametrize("case", SWEEP[::2], ids=str)
def test_the_reference_agrees_with_byte_arithmetic(case: BmmCase) -> None:
    inputs = ask.build(case)
    wide = right.reference(inputs, torch.float64).out
    narrow = right.reference(inputs).out
    budget = right.budget(inputs, EXACT)
    choose = random.Random(case.seed)
    for _ in range(min(6, wide.numel())):
        token, column = choose.randrange(wide.shape[0]), choose.randrange(wide.shape[1])
        want = scalar_product(inputs, token, column)
        got = float(wide[token, column])
        assert (math.isnan(want) and math.isnan(got)) or math.isclose(
            got, want, rel_tol=1e-12, abs_tol=1e-9 * abs(want)
        )
        if not math.isnan(want):
            # The reference in fp32 keeps the budget that it grants.
            assert abs(float(narrow[token, column]) - want) <= float(budget[token, column]) + 1e-12 * abs(want)


@pytest.mark.parametrize(
    "case", [BmmCase(values="integer_exact", scales="one"), BmmCase(values="onehot_exact")], ids=str
)
def test_probes_are_judged_bit_for_bit(case: BmmCase) -> None:
    inputs = ask.build(case)
    assert not right.budget(inputs, EXACT).any()
    outputs = exact_answer(inputs)
    place = tuple(int(i) for i in (outputs.out != 0).nonzero()[5])
    outputs.out.view(torch.int16)[place] += 1
    failed = [check for check in right.judge(inputs, outputs, EXACT) if not check.passed]
    assert len(failed) == 1 and failed[0].where == place and "bit for bit" in str(failed[0])


def test_a_lone_product_is_exact_under_any_scales() -> None:
    inputs = ask.build(BmmCase(values="onehot_exact", scales="extreme"))
    assert not right.budget(inputs, EXACT).any()


def test_the_budget_shrinks_with_the_products_that_are_not_zero() -> None:
    inputs = ask.build(BmmCase(scales="wide"))
    a = inputs.a.view(torch.uint8).clone()
    a.unflatten(1, (2, -1))[..., 40:] = 0
    few = dataclasses.replace(inputs, a=a.view(torch.float8_e4m3fn))
    assert bool((right.budget(few, EXACT) < 0.3 * right.budget(inputs, EXACT)).all())


def test_every_law_can_be_broken() -> None:
    two = ask.build(BmmCase(tokens=18, groups=3, rank=64, width=1024, layout="strided"))
    mutants = {mutant.name: mutant for mutant in right.MUTANTS}
    wrong = {
        "M24 scales repeated": "scale-rows-confused",
        "M14 rows reversed": "scale-pitch-is-its-width",
        "M28 another tile": "rows-unwritten",
        "M29 output memory zeroed": "rows-unwritten",
        "M10 powers traded": "row-scale-as-number",
        "M11 rows doubled": "row-scale-as-number",
        "B1 groups reversed": "first-slice-for-all",
    }
    for law in right.LAWS:
        answer = mutants[wrong[law.name]].answer
        checks = break_of(law, two, answer(two), answer, right.judge, EXACT)
        assert checks is not None and not all(check.passed for check in checks), law.name


def test_torchs_products_keep_the_laws() -> None:
    inputs = ask.build(SWEEP[0])
    precision = TORCH.precision(SWEEP[0], "interpreter")
    first = TORCH.run(memory.on_device(inputs, "cpu"))
    kept = [break_of(law, inputs, first, TORCH.run, right.judge, precision) for law in right.LAWS]
    assert any(kept) and [str(check) for checks in kept for check in checks or () if not check.passed] == []


@pytest.mark.parametrize("case", [case for case in EDGES if ask.heavy(case)][-1:], ids=str)
def test_ours_is_right_at_the_last_edge_of_the_tile_table(case: BmmCase) -> None:
    inputs = ask.build(case)
    checks = right.judge(inputs, OURS.run(inputs), OURS.precision(case, "interpreter"))
    assert all(check.passed for check in checks), [str(check) for check in checks]
    assert [check.output for check in checks] == ["out", "tile"]


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(0, 5), rank=st.sampled_from([16, 32, 48]), values=st.sampled_from(ask.AXES["values"]),
    scales=st.sampled_from(ask.AXES["scales"]), form=st.sampled_from(["block", "row"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_ours_is_right_on_whatever_is_drawn(**axes: Any) -> None:
    case = BmmCase(groups=1, **axes)
    if ask.forbid(case):
        return
    inputs = ask.build(case)
    assert passes(inputs, OURS.run(inputs)), case.id


def test_no_tokens_give_an_empty_product() -> None:
    inputs = ask.build(BmmCase(tokens=0))
    for answer in (exact_answer(inputs), OURS.run(inputs), TORCH.run(inputs)):
        assert answer.out.shape == (0, 64)
        assert passes(inputs, answer)


BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"a": torch.zeros(1, 2048)}, TypeError, "a=torch.float32: should be torch.float8_e4m3fn"),
    ({"weight": torch.zeros(32, 1024, dtype=torch.float8_e4m3fnuz)}, TypeError, "weight=torch.float8_e4m3fnuz"),
    ({"a_scale": torch.zeros(1, 64, dtype=torch.int32)}, TypeError, "a_scale=torch.int32: should be torch.uint8"),
    ({"weight_scale": torch.zeros(32, 32)}, TypeError, "weight_scale=torch.float32: should be torch.uint8"),
    ({"a": torch.zeros(1, 4096, dtype=torch.float8_e4m3fn)[:, ::2]}, ValueError, "last stride of a=2: should be 1"),
    ({"groups": 3}, ValueError, "columns of a=2048: should be"),
    ({"rank": 24}, ValueError, "rows of weight=32: should be"),
    ({"weight_scale": torch.zeros(16, 32, dtype=torch.uint8)}, ValueError, "rows of weight_scale=16: should be 32"),
    ({"weight_scale": torch.zeros(1, 32, dtype=torch.uint8)}, ValueError, "rank=16: should be a multiple of 32"),
    ({"weight_scale": torch.zeros(32, 31, dtype=torch.uint8)}, ValueError, "columns of weight_scale=31: should be 32"),
    ({"a_scale": torch.zeros(1, 63, dtype=torch.uint8)}, ValueError, r"a_scale=\[1, 63\]: should be \[1, 64\]"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_CALLS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("answer", [right.reference, OURS.run, TORCH.run], ids=["reference", "ours", "torch"])
def test_malformed_calls_raise(answer: Any, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        answer(by_hand(**changes))


@pytest.mark.parametrize(
    ("rank", "width", "message"),
    [(24, 1024, "rank=24: should be a multiple of 16"), (32, 1056, "width=1056: should be a multiple of 1024"),
     (32, 1008, "width=1008: should be a multiple of")],
)  # fmt: skip
@pytest.mark.parametrize("answer", [right.reference, OURS.run, TORCH.run], ids=["reference", "ours", "torch"])
def test_shapes_that_no_tile_divides_raise(answer: Any, rank: int, width: int, message: str) -> None:
    def zeros(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.uint8).view(dtype)

    inputs = Inputs(
        a=zeros(1, width, torch.float8_e4m3fn), a_scale=zeros(1, width // 32, torch.uint8),
        weight=zeros(rank, width, torch.float8_e4m3fn), weight_scale=zeros(rank, width // 32, torch.uint8),
        groups=1, rank=rank, out=torch.zeros(1, rank, dtype=torch.bfloat16),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        answer(inputs)


def test_the_wrong_form_fails() -> None:
    inputs = ask.build(BmmCase())
    outputs = exact_answer(inputs)
    assert not passes(inputs, Outputs(outputs.out.float()))
    assert not passes(inputs, Outputs(outputs.out[:, :-1]))
    assert not passes(inputs, Outputs(outputs.out, torch.tensor([16, 16, 1024])))


def test_strided_rows_lie_apart_and_no_scale_is_nan() -> None:
    for case in SWEEP[:6]:
        inputs = ask.build(case)
        assert (inputs.a.stride(0) > inputs.a.shape[1]) == (case.layout == "strided")
        assert int(inputs.a_scale.max()) < 255 and int(inputs.weight_scale.max()) < 255


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    (reason,) = VLLM.unsupported(BmmCase(), "interpreter")
    assert "is not a vLLM tree" in reason


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Impl:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    return VLLM


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
def test_vllm_multiplies_rightly_with_the_right_tiles(vllm: Impl) -> None:
    for case in [*SWEEP[:8], *EDGES[1::4]]:
        inputs = ask.build(case)
        with memory_watch.watch():
            outputs = vllm.run(inputs)
        assert outputs.tile is not None and passes(inputs, outputs), case.id


@pytest.mark.vllm
@needs_vllm
def test_vllm_drops_a_tail_of_lanes_silently(vllm: Impl) -> None:
    inputs = ask.build(BmmCase(tokens=1, groups=1, width=2048))
    short = dataclasses.replace(
        inputs, a=inputs.a[:, :1056], a_scale=inputs.a_scale[:, :33], weight=inputs.weight[:, :1056],
        weight_scale=inputs.weight_scale[:, :33],
    )  # fmt: skip
    shorter = dataclasses.replace(
        inputs, a=inputs.a[:, :1024], a_scale=inputs.a_scale[:, :32], weight=inputs.weight[:, :1024],
        weight_scale=inputs.weight_scale[:, :32],
    )  # fmt: skip
    assert torch.equal(vllm.run(short).out, vllm.run(shorter).out)


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("case", FAR[:2], ids=str)
def test_vllm_counts_rows_in_32_bits(vllm: Impl, case: BmmCase) -> None:
    with pytest.raises(Exception, match="out-of-bounds load in _mxfp8_wo_a_bmm_kernel"), memory_watch.watch():
        vllm.run(ask.build(case))
