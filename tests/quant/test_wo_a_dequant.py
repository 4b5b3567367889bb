"""Are dequantised output projections judged rightly: every right one passes, and every wrong one is seen?"""

import dataclasses
import math
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.case import parse
from cases.precision import Precision
from cases.quant import wo_a_dequant as ask
from cases.quant.wo_a_dequant import DequantCase, Inputs, Outputs, Projection
from impl.executions import memory_watch
from impl.implementation import Impl
from impl.quant.wo_a_dequant import IMPLS
from impl.quant.wo_a_dequant_call import Kept, Module, exponent_bytes
from impl.sources import settings as sources
from oracle.quant import wo_a_dequant as right
from reports.laws import break_of, identical

OURS, VLLM, TORCH = IMPLS
EXACT = Precision()


def small_sweep(count: int) -> list[DequantCase]:
    """The regressions and some random cases."""
    choose = random.Random(4)
    cases = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, DequantCase)]
    while len(cases) < count:
        drawn: dict[str, Any] = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = DequantCase(**drawn, seed=choose.randrange(99))
        if not ask.forbid(case):
            cases.append(case)
    return cases


SWEEP = small_sweep(48)


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, EXACT))


def by_hand(**changes: Any) -> Inputs:
    """Two groups of 2 rows and 4 columns, a scale for each row and two columns."""
    codes = torch.tensor([[0x38, 0x40, 0xB8, 0x00], [0x7E, 0x01, 0x44, 0x38]] * 2, dtype=torch.uint8)
    scale = torch.tensor([[127, 128], [126, 120], [130, 127], [0, 255]], dtype=torch.uint8)
    module = Projection(codes.view(torch.float8_e4m3fn), scale, None, False)
    other = Projection(torch.full((4, 4), 0x30, dtype=torch.uint8).view(torch.float8_e4m3fn), None, None, False)
    fields: dict[str, Any] = {
        "module": module, "changed": other.weight, "other": other, "groups": 2, "rank": 2, "width": 4,
    }  # fmt: skip
    return Inputs(**{**fields, **changes})


def test_hand_worked_weights() -> None:
    answer = right.reference(by_hand())
    infinity = math.inf
    assert answer.first.tolist() == [
        [[1.0, 2.0, -2.0, 0.0], [224.0, 2.0**-10, 3 * 2.0**-7, 2.0**-7]],
        [[8.0, 16.0, -1.0, 0.0], [448 * 2.0**-127, 0.0, infinity, infinity]],
    ]
    assert answer.other.tolist() == [[[0.5] * 4] * 2] * 2
    assert answer.kept.tolist() == [1]
    assert answer.powers is not None and answer.powers.tolist() == [1]
    assert answer.exponents is not None and answer.exponents.tolist() == [[127, 128], [126, 120], [130, 127], [0, 255]]


def test_exponent_bytes_0_and_255_depend_on_the_dtype() -> None:
    inputs = by_hand()
    scale = inputs.module.weight_scale_inv
    assert scale is not None
    module = dataclasses.replace(inputs.module, weight_scale_inv=scale.view(torch.float8_e8m0fnu))
    first = right.reference(dataclasses.replace(inputs, module=module)).first
    assert first[1, 1].tolist() == [0.0, 0.0, math.inf, math.inf]
    # A code of 0 under an infinite scale is NaN.
    codes = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    first = right.reference(dataclasses.replace(inputs, module=dataclasses.replace(module, weight=codes))).first
    assert first[1, 1].isnan().tolist() == [False, False, True, True]


def test_a_product_is_rounded_twice() -> None:
    # 1.125 times (1 + s) is below half-way between two bfloat16 numbers, and on it in fp32; half-way goes to even.
    middle = 291 << 15
    mantissa = (8 * middle + 4) // 9
    assert 0 < abs(9 * mantissa - 8 * middle) < 4
    exact_up = 9 * mantissa > 8 * middle
    scale = torch.full((4, 4), mantissa * 2.0**-23)
    codes = torch.full((4, 4), 0x39, dtype=torch.uint8).view(torch.float8_e4m3fn)
    module = Projection(codes, scale, None, False)
    got = float(right.reference(by_hand(module=module)).first[0, 0, 0])
    even = 292 if 291 // 2 % 2 else 290
    assert got == even * 2.0**15 * 2.0**-23
    assert exact_up == (even == 290), "the exact product would round the other way"


def test_names_and_retained_scales() -> None:
    ones = torch.full((4, 4), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    two, four = (torch.full((2, 1), byte, dtype=torch.uint8) for byte in (128, 129))

    def weight(inverse: Any, plain: Any, scheme: bool = False, of: torch.Tensor = ones) -> float:
        return float(right.dequantised(Projection(of, inverse, plain, scheme), 2, 2, 4)[0, 0, 0])

    assert [weight(two, four), weight(None, four), weight(two, None), weight(None, None)] == [2, 4, 2, 1]
    assert [weight(two, four, scheme=True), weight(two, None, scheme=True)] == [4, 1]
    assert weight(two, four, of=ones.to(torch.bfloat16)) == 1


def scalar_weight(module: Projection, inputs: Inputs, group: int, row: int, column: int) -> int:
    """One element's bfloat16 pattern by byte arithmetic in Python, NaN as 0x7FC0."""
    number = group * inputs.rank + row
    if module.weight.dtype == torch.bfloat16:
        return int(module.weight.view(torch.int16)[number, column]) & 0xFFFF
    code = int(module.weight.view(torch.uint8)[number, column])
    bias = 7 if module.weight.dtype == torch.float8_e4m3fn else 8
    exponent, fraction = code >> 3 & 15, code & 7
    value = (fraction / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
    if (code & 0x7F == 0x7F) if bias == 7 else code == 0x80:
        return 0x7FC0
    scale = module.weight_scale if module.per_block_scheme else module.weight_scale_inv
    scale = module.weight_scale if scale is None else scale
    factor = 1.0
    if scale is not None:
        place = (number * scale.shape[0] // module.weight.shape[0], column * scale.shape[1] // inputs.width)
        if scale.dtype == torch.float32:
            factor = float(scale[place])
        else:
            byte = int(scale.view(torch.uint8)[place])
            factor = math.inf if byte == 255 else 2.0 ** (byte - 127)
            if byte == 0 and scale.dtype == torch.float8_e8m0fnu:
                factor = 0.0
    if value == 0 and math.isinf(factor):
        return 0x7FC0
    product = (-value if code & 0x80 else value) * factor
    try:
        bits = int.from_bytes(struct.pack("<f", product), "little")
    except OverflowError:
        bits = 0xFF800000 if product < 0 else 0x7F800000
    size = bits & 0x7FFFFFFF
    return (bits >> 31 << 15) | ((size + 0x7FFF + (size >> 16 & 1)) >> 16)


@pytest.mark.parametrize("case", SWEEP[:24], ids=str)
def test_the_reference_agrees_with_byte_arithmetic(case: DequantCase) -> None:
    inputs = ask.build(case)
    answer = right.reference(inputs)
    choose = random.Random(case.seed)
    for module, weight in ((inputs.module, answer.first), (inputs.other, answer.other)):
        for _ in range(40):
            place = (choose.randrange(case.groups), choose.randrange(case.rank), choose.randrange(case.width))
            assert int(weight.view(torch.int16)[place]) & 0xFFFF == scalar_weight(module, inputs, *place), place


def test_the_reference_says_the_same_in_float64() -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        assert identical(right.reference(inputs), right.reference(inputs, torch.float64)), case.id


def test_exponent_bytes_by_hand() -> None:
    def bytes_of(*scales: float) -> list[int] | None:
        answers = [of(torch.tensor([scales])) for of in (right.exponent_bytes, exponent_bytes)]
        lists = [None if answer is None else answer[0].tolist() for answer in answers]
        assert lists[0] == lists[1]
        return lists[0]

    assert bytes_of(1.0, 2.0, 0.25, 2.0**-127, 2.0**-126, 2.0**127) == [127, 128, 125, 0, 1, 254]
    for other in (1.5, 1 + 2.0**-23, 1 - 2.0**-24, 2.0**-128, 0.0, -0.0, -2.0, math.inf, math.nan):
        assert bytes_of(1.0, other) is None, other
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = torch.tensor([[0, 1, 127, 255]], dtype=torch.uint8).view(dtype)
        for of in (right.exponent_bytes, exponent_bytes):
            answer = of(scale)
            assert answer is not None and answer.tolist() == [[0, 1, 127, 255]]


def test_every_law_can_be_broken() -> None:
    bytes_ = DequantCase(name="plain")
    retained = DequantCase(weight="bfloat16")
    wrong: dict[str, tuple[DequantCase, str]] = {
        "D1 a scale for each row": (bytes_, "blocks-of-32"),
        "D2 exponents as another dtype": (bytes_, "exponent-by-dtype"),
        "D3 exponents as numbers": (bytes_, "exponent-as-number"),
        "D4 scale renamed": (bytes_, "plain-name-unknown"),
        "D5 groups joined": (bytes_, "scale-groups-interleaved"),
        "D6 scale left behind": (retained, "dequantised-twice"),
    }
    answers = {mutant.name: mutant.answer for mutant in right.MUTANTS}
    answers["exponent-by-dtype"] = lambda inputs: (
        answers["bias-128"](inputs) if inputs.module.weight_scale.dtype == torch.uint8 else right.reference(inputs)
    )
    for law in right.LAWS:
        case, name = wrong[law.name]
        inputs = ask.build(case)
        checks = break_of(law, inputs, answers[name](inputs), answers[name], right.judge, EXACT)
        assert checks is not None and not all(check.passed for check in checks), law.name


def test_a_failure_names_the_element() -> None:
    inputs = by_hand()
    answer = right.reference(inputs)
    answer.first[1, 0, 2] = -1.5
    failed = [str(check) for check in right.judge(inputs, answer, EXACT) if not check.passed]
    assert len(failed) == 1 and failed[0].startswith(
        "first[1, 0, 2]=-1.5, but should be -1: the weight of the first call"
    )
    assert not passes(inputs, dataclasses.replace(right.reference(inputs), other=answer.other[:1]))


def test_a_weight_that_is_bfloat16_keeps_its_nan() -> None:
    patterns = torch.full((4, 4), 0x7FA5, dtype=torch.int16)
    module = Projection(patterns.view(torch.bfloat16), None, None, False)
    inputs = by_hand(module=module)
    answer = right.reference(inputs)
    assert bool((answer.first.view(torch.int16) == 0x7FA5).all())
    answer.first[0, 0, 0] = float("nan")
    assert not passes(inputs, answer)


def test_the_two_modules_differ_and_strided_rows_lie_apart() -> None:
    for case in SWEEP[:8]:
        first = ask.build(case)
        assert not identical(first.module, first.other)
        assert (first.module.weight.stride(0) > case.width) == (case.layout == "strided")


@pytest.mark.parametrize("impl", [OURS, TORCH], ids=lambda impl: impl.name)
def test_implementations_dequantise_and_keep(impl: Impl) -> None:
    for case in SWEEP[:14]:
        pristine = ask.build(case)
        used = memory.on_device(pristine, "cpu")
        with memory_watch.watch():
            outputs = impl.run(used)
        assert memory.trespasses(pristine, used, ask.WRITABLE) == [], case.id
        checks = right.judge(pristine, outputs, EXACT)
        assert all(check.passed for check in checks), (case.id, [str(check) for check in checks])
        for law in right.LAWS if case is SWEEP[1] else ():
            kept = break_of(law, pristine, outputs, impl.run, right.judge, EXACT) or ()
            assert all(check.passed for check in kept), law.name


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 3), rank=st.integers(1, 40), width=st.integers(1, 40),
    weight=st.sampled_from(ask.AXES["weight"]), scale=st.sampled_from(ask.AXES["scale"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_ours_is_right_on_odd_shapes(**axes: Any) -> None:
    inputs = ask.build(DequantCase(block_rows=axes["rank"], block_columns=1, layout="strided", **axes))
    assert passes(inputs, OURS.run(inputs))


def test_a_kept_weight_goes_with_its_module() -> None:
    made: list[int] = []

    def dequantise(weight: torch.Tensor, scale: torch.Tensor | None, shape: tuple[int, int, int]) -> torch.Tensor:
        made.append(1)
        return weight.float().view(shape)

    kept = Kept(dequantise)
    projection = by_hand().other
    for _ in range(2):
        module = Module(projection)
        assert kept.weight(module, (2, 2, 4)) is kept.weight(module, (2, 2, 4))
        del module
    assert len(made) == 2


BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rank": 3}, ValueError, r"weight=\[4, 4\]: should be \[6, 4\]"),
    ({"width": 8}, ValueError, r"weight=\[4, 4\]: should be \[4, 8\]"),
    ({"scale": torch.zeros(3, 2, dtype=torch.uint8)}, ValueError, "rows of scale=3: should be 2 times a divisor of 2"),
    ({"scale": torch.zeros(6, 2, dtype=torch.uint8)}, ValueError, "rows of scale=6: should be 2 times a divisor of 2"),
    ({"scale": torch.zeros(4, 3, dtype=torch.uint8)}, ValueError, "columns of scale=3: should be a divisor of 4"),
    ({"scale": torch.zeros(4, 2, dtype=torch.int32)}, TypeError, "scale=torch.int32: should be one of|should be torch"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_CALLS, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("answer", [right.reference, OURS.run, TORCH.run], ids=["reference", "ours", "torch"])
def test_malformed_calls_raise(answer: Any, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    changes = dict(changes)
    if "scale" in changes:
        changes["module"] = dataclasses.replace(by_hand().module, weight_scale_inv=changes.pop("scale"))
    with pytest.raises(kind, match=message):
        answer(by_hand(**changes))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    (reason, *_) = VLLM.unsupported(DequantCase(), "interpreter")
    assert "is not a vLLM tree" in reason


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Impl:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    return VLLM


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
def test_vllm_dequantises_rightly_and_keeps(vllm: Impl) -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        assert passes(inputs, vllm.run(inputs)), case.id


@pytest.mark.vllm
@needs_vllm
def test_vllm_guesses_blocks_that_do_not_divide(vllm: Impl) -> None:
    # 300 rows in blocks of 128 have 3 scales; the guess is 100 rows each, so row 100 has the second scale already.
    codes = torch.full((300, 4), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[127], [128], [129]], dtype=torch.uint8)
    module = Projection(codes, scale, None, False)
    inputs = Inputs(module, codes, module, 1, 300, 4)
    first = vllm.run(inputs).first
    assert first[0, :, 0].tolist() == [1.0] * 100 + [2.0] * 100 + [4.0] * 100
