"""Does every vector instruction do what AMD's pseudocode says, in each of its spellings, on hostile lanes?

An item is an instruction of an architecture in one encoding. Its spellings (constants, scalars, signs, op_sel, SDWA, clamp)
are those that LLVM's assembler takes. What the executor does not model it must refuse by name.
"""

from __future__ import annotations

import re

import pytest

from impl.executions.isa.coverage import modelled
from impl.executions.isa.single import run_lines
from impl.executions.isa.unsupported import UnsupportedInstruction
from tests.executions.isa import lane_runs, statements
from tests.executions.isa.assembler import accepts
from tests.executions.isa.statements import Form, forms, instructions

pytestmark = pytest.mark.machine


def _items() -> list[tuple[str, str]]:
    found = []
    for key, ins in instructions().items():
        if (
            statements.WHOLE_WAVE.match(ins.name)
            or statements.APPROXIMATE.match(ins.name)
            or statements.BY_HAND.search(ins.name)
        ):
            continue
        found += [(arch, key) for arch in statements.ARCHS if accepts(arch, forms(ins)[0].line)]
    return found


def _is_modelled(form: Form, arch: str) -> bool:
    name = form.line.split()[0].removesuffix("_e32").removesuffix("_e64").removesuffix("_sdwa")
    return arch in modelled().get(name, ())


@pytest.mark.parametrize(("arch", "key"), _items(), ids=lambda value: value.replace(" ", "-"))
def test_every_lane_is_as_stated(arch: str, key: str) -> None:
    spelled = [form for form in forms(instructions()[key]) if accepts(arch, form.line)]
    if not _is_modelled(spelled[0], arch):
        with pytest.raises(UnsupportedInstruction):
            run_lines(arch, spelled[0].line)
        return
    found = [f"{spelled[0].line}: {text}" for text in lane_runs.differences(spelled[0], arch)]
    for form in spelled:
        try:
            found += [f"{form.line}: {text}" for text in lane_runs.differences(form, arch, everyone=False)]
        except UnsupportedInstruction:
            assert form is not spelled[0], f"modelled, but refused: {form.line}"
    if "DIV_FIXUP" in key:
        found = [text for text in found if not _is_quotient_of_nan(text)]
    assert found == [], f"{len(found)} lanes differ"


def _is_quotient_of_nan(text: str) -> bool:
    """An erratum: as printed, a NaN quotient of two ordinary numbers stays, with which division would come out wrong."""
    quotient = int(re.search(r"sources \['(0x[0-9a-f]+)'", text)[1], 16)  # type: ignore[index]
    return quotient & 0x7FFFFFFF > 0x7F800000 if quotient < 1 << 32 else quotient & (1 << 63) - 1 > 0x7FF << 52
