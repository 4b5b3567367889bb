"""Runs one spelling of an instruction on drawn registers and compares every lane with what is stated of it."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from impl.executions.isa.single import run_lines
from tests.executions.isa import statements
from tests.executions.isa.small_floats import NAN, decode
from tests.executions.isa.statements import DESTINATION, FIRST, LANES, MASK_IN, MASK_OUT, Form, Result

VCC, EXEC = 106, 126


@dataclass
class Inputs:
    """Registers before a run, and of each lane the sources' bits, the old destination's and the mask's."""

    vgpr: np.ndarray[Any, Any]
    sgpr: np.ndarray[Any, Any]
    exec: int
    mask: int
    sources: list[list[int]]
    old: list[int]


def _put(vgpr: np.ndarray[Any, Any], first: int, lane: int, bits: int, count: int) -> None:
    for k in range(count):
        vgpr[first + k, lane] = (bits >> (32 * k)) & 0xFFFFFFFF


def draw(form: Form, *, everyone: bool) -> Inputs:
    """Inputs of a form, the same in every process. everyone: all lanes are enabled, else a random half."""
    generator = random.Random(zlib.crc32(form.line.encode()))
    ins = form.instruction
    vgpr = _noise().copy()
    sgpr = np.array([generator.getrandbits(32) for _ in range(128)], np.uint32)
    mask, enabled = generator.getrandbits(64), (1 << 64) - 1 if everyone else generator.getrandbits(64)
    for at, bits in ((VCC, mask), (MASK_IN, mask), (EXEC, enabled)):
        sgpr[at], sgpr[at + 1] = bits & 0xFFFFFFFF, bits >> 32
    shared = {k: statements.draw_source(ins.sources[k], generator) for k in form.scalars}
    for k, bits in shared.items():
        sgpr[form.scalars[k]], sgpr[form.scalars[k] + 1] = bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF
    count = 1 if ins.destination is None else ins.destination.registers
    sources, old = [], []
    for lane in range(LANES):
        lane_sources = []
        for k, source in enumerate(ins.sources):
            bits = form.constants.get(k, shared.get(k, statements.draw_source(source, generator)))
            _put(vgpr, FIRST[k], lane, bits, source.registers)
            lane_sources.append(bits)
        sources.append(lane_sources)
        if ins.accumulates and ins.destination is not None:
            _put(vgpr, DESTINATION, lane, statements.draw_source(ins.destination, generator), count)
        old.append(sum(int(vgpr[DESTINATION + k, lane]) << (32 * k) for k in range(count)))
    return Inputs(vgpr, sgpr, enabled, mask, sources, old)


@functools.cache
def _noise() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 1 << 32, (512, LANES), dtype=np.uint32)


Stated = Callable[[int, list[int], int, int], Result]


def differences(form: Form, arch: str, *, everyone: bool = True, stated: Stated | None = None) -> list[str]:
    """What differs from the statement after the form ran, one sentence a lane. Raises what the executor raises."""
    inputs = draw(form, everyone=everyone)
    wave = run_lines(arch, form.line, vgpr=inputs.vgpr, sgpr=inputs.sgpr)
    ins = form.instruction
    count = 0 if ins.destination is None else ins.destination.registers
    implicit = form.suffix in ("_e32", "_sdwa", "_dpp")
    mask_at = VCC if implicit else MASK_OUT
    mask = int(wave.sgpr[mask_at]) | int(wave.sgpr[mask_at + 1]) << 32
    found = []
    for lane in range(LANES):
        got = sum(int(wave.vgpr[DESTINATION + k, lane]) << (32 * k) for k in range(count))
        if not (inputs.exec >> lane) & 1:
            if got != (inputs.old[lane] & ((1 << (32 * count)) - 1)) and count:
                found.append(f"lane {lane} is off, but v{DESTINATION} became {got:#x}")
            if ins.mask_result and (mask >> lane) & 1:
                found.append(f"lane {lane} is off, but its mask bit is set")
            continue
        want = _wanted(form, arch, lane, inputs, stated)
        where = f"lane {lane}, sources {[hex(bits) for bits in inputs.sources[lane]]}, old {inputs.old[lane]:#x}"
        if want.mask is not None and (mask >> lane) & 1 != want.mask:
            found.append(f"{where}: mask bit {(mask >> lane) & 1}, should be {want.mask}")
        if not agrees(got, want):
            found.append(f"{where}: {got:#x}, should be {want.bits:#x} in {want.stated:#x}")
    touched = [
        k for k in range(512) if not DESTINATION <= k < DESTINATION + count and (wave.vgpr[k] != inputs.vgpr[k]).any()
    ]
    if touched:
        found.append(f"also wrote v{touched}")
    return found


def _wanted(form: Form, arch: str, lane: int, inputs: Inputs, stated: Stated | None) -> Result:
    mask = (inputs.mask >> lane) & 1
    if stated is not None:
        return stated(lane, inputs.sources[lane], inputs.old[lane], mask)
    return statements.statement(form, arch, lane, inputs.sources[lane], inputs.old[lane], mask)


_NANS = {16: (0x7C00, 0x3FF), -16: (0x7F80, 0x7F), 32: (0x7F800000, 0x7FFFFF), 64: (0x7FF << 52, (1 << 52) - 1)}


def agrees(got: int, want: Result) -> bool:
    """Whether the stated bits are right; where the statement has a quiet NaN, any quiet NaN is right (ISA says of none which)."""
    if (got ^ want.bits) & want.stated == 0:
        return True
    if want.nan_format:
        return _same_small_floats(got, want)
    if not want.nan_width:
        return False
    width = abs(want.nan_width)
    exponent, mantissa = _NANS[want.nan_width]
    for at in range(0, max(width, want.stated.bit_length()), width):
        mine, theirs, stated = ((bits >> at) & ((1 << width) - 1) for bits in (got, want.bits, want.stated))
        both_nan = all(bits & exponent == exponent and bits & mantissa for bits in (mine, theirs))
        if (mine ^ theirs) & stated and not (both_nan and _quiet(mine, mantissa) >= _quiet(theirs, mantissa)):
            return False
    return True


def _same_small_floats(got: int, want: Result) -> bool:
    codes = [((bits >> at) & 255 for bits in (got, want.bits)) for at in range(0, 32, 8)]
    return all(
        mine == theirs or all(decode(code, want.nan_format) == NAN for code in (mine, theirs)) for mine, theirs in codes
    )


def _quiet(bits: int, mantissa: int) -> bool:
    return bool(bits & ((mantissa + 1) >> 1))
