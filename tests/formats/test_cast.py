"""Are casts judged rightly: every right one passes, and every wrong one is seen?"""

import dataclasses
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from cases import memory
from cases.covering import sweep_cases
from cases.formats import cast as ask
from cases.formats.cast import CastCase, Inputs, Outputs
from cases.precision import Precision
from impl.formats.cast import IMPLS
from impl.implementation import Impl
from oracle.formats import cast as right

NUMPY_TYPES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
    "bfloat16": ml_dtypes.bfloat16,
}


SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, CastCase)]


def call(source: torch.Tensor, format: str, direction: str = "encode", **rules: str) -> Inputs:
    """A call without guards."""
    wide = torch.bfloat16 if format == "bfloat16" else torch.uint8
    out = torch.empty(source.shape, dtype=wide if direction == "encode" else torch.float32)
    rules = {"overflow": "saturate", "rounding": "nearest", **rules}
    return Inputs(source=source, out=out, format=format, direction=direction, **rules)  # type: ignore[arg-type]


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@pytest.mark.parametrize(
    ("format", "values", "codes"),
    [
        ("float8_e4m3fn", [0.0, -0.0, 2**-10, 1.5 * 2**-9, 464.0, -500.0], [0x00, 0x80, 0x00, 0x02, 0x7E, 0xFE]),
        ("float8_e4m3fnuz", [0.0, -0.0, -(2**-11), -(2**-10), 232.0, 1e9], [0x00, 0x00, 0x00, 0x81, 0x7E, 0x7F]),
        ("float4_e2m1fn", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -9.0], [0, 2, 2, 4, 4, 6, 6, 15]),
        ("float8_e8m0fnu", [0.0, 1.0, 1.49, 1.5, 3.0, 2.0**-127, 3.4e38], [0, 127, 127, 128, 129, 0, 254]),
    ],
)
def test_hand_worked_numbers_become_their_codes(format: str, values: list[float], codes: list[int]) -> None:
    assert right.reference(call(torch.tensor(values), format)).out.tolist() == codes


def test_hand_worked_codes_become_their_numbers() -> None:
    e4m3 = torch.tensor([0x08, 0x7E, 0x81, 0x01], dtype=torch.uint8)
    assert right.reference(call(e4m3, "float8_e4m3fn", "decode")).out.tolist() == [2**-6, 448.0, -(2**-9), 2**-9]
    assert right.reference(call(e4m3, "float8_e4m3fnuz", "decode")).out.tolist() == [2**-7, 224.0, -(2**-10), 2**-10]
    powers = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    *known, last = right.reference(call(powers, "float8_e8m0fnu", "decode")).out.double().tolist()
    assert known == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and math.isnan(last)


def test_bfloat16_rounds_to_even_and_keeps_infinity() -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4028234e38, math.inf, -0.0])
    want = [1.0, 1 + 2**-6, 1 + 2**-7, math.inf, math.inf, -0.0]
    got = right.reference(call(values, "bfloat16")).out
    assert got.tolist() == want and torch.signbit(got[-1])


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_the_reference_agrees_with_another_formulation(case: CastCase) -> None:
    inputs = ask.build(case)
    kind = NUMPY_TYPES[case.format]
    got = right.reference(inputs).out
    if case.direction == "decode":
        codes = (
            inputs.source.view(torch.int16).numpy().view(np.uint16)
            if case.format == "bfloat16"
            else inputs.source.numpy()
        )
        want = torch.from_numpy(codes.view(kind).astype(np.float32)).to(inputs.out.dtype)
        assert torch.equal(got.nan_to_num(1.5), want.nan_to_num(1.5))
        return
    source = inputs.source.float().numpy()
    with np.errstate(all="ignore"):
        if case.format == "float8_e8m0fnu":
            # Powers of two by logarithms in float64, away from where they could be wrong.
            mantissa, exponent = np.frexp(np.abs(source).astype(np.float64))
            up = exponent - (mantissa == 0.5) if case.rounding == "up" else exponent - (mantissa < 0.75)
            plain = np.isfinite(source) & (source != 0) & (up + 127 >= 0) & (up + 127 <= 254)
            assert np.array_equal(got.numpy()[plain], (up + 127).astype(np.uint8)[plain])
            return
        codes = source.astype(kind)
    if case.format == "bfloat16":
        assert torch.equal(got.float().nan_to_num(1.5), torch.from_numpy(codes.astype(np.float32)).nan_to_num(1.5))
        return
    plain = np.isfinite(source) & np.isfinite(codes.astype(np.float32))
    assert np.array_equal(got.numpy()[plain], codes.view(np.uint8)[plain])


def test_the_three_laws_can_be_broken() -> None:
    inputs = ask.build(CastCase(values="ties", count=64))
    truncated = next(mutant for mutant in right.MUTANTS if mutant.name == "rounded-toward-zero")
    first = truncated.answer(inputs)
    assert first is not None
    positional = Outputs(first.out.roll(1))
    reversed_inputs = right.LAWS[0].edit(inputs)
    assert not passes(reversed_inputs, right.LAWS[0].expect(positional, inputs, reversed_inputs))
    for law in right.LAWS[1:]:
        edited = law.edit(inputs)
        assert not passes(edited, law.expect(first, inputs, edited)), law.name


def test_a_failure_names_the_element_and_both_codes() -> None:
    inputs = call(torch.tensor([1.0, 2.0]), "float8_e4m3fn")
    (check,) = right.judge(inputs, Outputs(torch.tensor([0x38, 0x41], dtype=torch.uint8)), Precision())
    assert str(check).startswith("out[1]=65 (0x41), but should be 64 (0x40): float8_e4m3fn encode")
    (check,) = right.judge(inputs, Outputs(torch.zeros(2)), Precision())
    assert not check.passed


def test_every_tie_of_the_default_case_is_asked() -> None:
    values = set(ask.build(CastCase(count=1600)).source.abs().tolist())
    numbers = [0.0, 2**-9, 2**-8, 1.0, 1.125, 416.0, 448.0]
    assert values.issuperset((a + b) / 2 for a, b in ((0, 2**-9), (1.0, 1.125), (416.0, 448.0)))
    assert values.issuperset(numbers)


def rounds_two_smallest_powers_up(inputs: Inputs) -> bool:
    """Whether torch's E8M0 cast is asked for a number between 2^-127 and 1.5 * 2^-127, which it rounds away from."""
    size = inputs.source.double().abs()
    return inputs.format == "float8_e8m0fnu" and bool(((size > 2.0**-127) & (size < 1.5 * 2.0**-127)).any())


@pytest.mark.parametrize("impl", IMPLS[1:], ids=lambda impl: impl.name)
def test_the_casts_of_triton_and_torch_are_right_where_they_have_no_reason(
    impl: Impl, verdict: Callable[..., tuple[str, list[str]]]
) -> None:
    answered = [case for case in SWEEP if not impl.unsupported(case, "interpreter")]
    assert len(answered) > 20
    for case in answered:
        wrong = (
            impl.name == "torch-cast" and case.direction == "encode" and rounds_two_smallest_powers_up(ask.build(case))
        )
        assert wrong or verdict(case, impl) == ("pass", []), case.id


def test_reasons_name_the_axis_that_is_in_the_way() -> None:
    language, torch_cast = IMPLS[1], IMPLS[2]
    packed = CastCase(format="float4_e2m1fn")
    assert [reason.split(":")[0] for reason in language.unsupported(packed, "cuda")] == ["format=float4_e2m1fn"]
    assert language.unsupported(CastCase(format="float8_e4m3fnuz"), "cuda") == [
        "format=float8_e4m3fnuz: Triton has no FNUZ types on NVIDIA devices"
    ]
    assert language.unsupported(CastCase(format="float8_e4m3fnuz"), "hip") == []
    both = CastCase(format="float8_e8m0fnu", rounding="up", overflow="saturate", values="beyond")
    assert [reason.split(":")[0] for reason in torch_cast.unsupported(both, "cuda")] == [
        "rounding=up",
        "overflow=saturate",
    ]
    assert IMPLS[0].unsupported(both, "cuda") == []


def test_an_implementation_that_writes_past_the_end_is_seen() -> None:
    pristine = ask.build(CastCase(count=7))
    used = memory.on_device(pristine, "cpu")
    dataclasses.replace(used).out.as_strided((8,), (1,)).fill_(0)
    assert "outside its elements" in memory.trespasses(pristine, used, ask.WRITABLE)[0]
