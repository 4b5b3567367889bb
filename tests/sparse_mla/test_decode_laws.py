"""Do our own kernels keep the laws of sparse MLA decode, in the interpreter?"""

import dataclasses

import pytest
import torch

from cases.memory import guarded, on_device
from cases.sparse_mla.decode import DecodeCase, DecodeInputs, DecodeOutputs, build
from impl.implementation import implementations
from oracle import mxfp8
from oracle.laws import Law
from oracle.sparse_mla import decode as oracle
from reports.laws import break_of

OURS = next(impl for impl in implementations("sparse_mla.decode") if impl.name == "ours-triton")
BASE = DecodeCase(queries=2, heads=3, main_length=33, extra_length=31, splits=3)
CALLS = (
    {},
    {"sink": "absent", "rows": "ragged"},
    {"sink": "minus_infinity", "rotation": "spread"},
    {"extra_length": -1, "values": "needle"},
    {"arch": "gfx942", "sink": "absent"},
    {"output": "float32", "values": "single"},
)


def _run(inputs: DecodeInputs) -> DecodeOutputs:
    answer: DecodeOutputs = OURS.run(on_device(inputs, "cpu"))
    return answer


@pytest.mark.parametrize("law", oracle.LAWS, ids=lambda law: law.name)
def test_ours_keeps_the_law(law: Law) -> None:
    spoken = 0
    for changes in CALLS:
        case = BASE.varied(**changes)
        inputs = build(case)
        precision = OURS.precision(case, "interpreter")
        checks = break_of(law, inputs, _run(inputs), _run, oracle.judge, precision)
        if checks is not None:
            spoken += 1
            assert [str(check) for check in checks if not check.passed] == [], case.id
    assert spoken


def test_the_mxfp8_epilogue_is_the_quantised_fp32_row_bit_for_bit() -> None:
    for values in ("randn", "single", "outlier"):
        case = BASE.varied(values=values, rotation="spread", output="mxfp8", queries=3)
        inputs = build(case)
        plain = dataclasses.replace(inputs, out=guarded((3, 3, 512), torch.float32), out_codes=None, out_scales=None)
        rows = _run(plain).out
        answer = _run(inputs)
        assert rows is not None and answer.codes is not None and answer.scales is not None
        codes, scales = mxfp8.quantise(rows.reshape(3, -1))
        assert torch.equal(answer.scales, scales)
        decoded = answer.codes.view(torch.uint8)
        # The sign of a zero is free.
        assert torch.equal(torch.where(decoded == 0x80, 0, decoded), torch.where(codes == 0x80, 0, codes))
