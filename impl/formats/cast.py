"""Who casts between numbers and codes, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.formats.cast import CastCase, Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, without_triton

_HERE = Path(__file__).parent
# Values among which some exceed the largest number of a format, and those among which some are infinite.
_OVERFLOWING = ("beyond", "special", "wide")
_EXACT = exact_but("a cast: one rounding, to the format")


def _lazily(name: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        function = getattr(importlib.import_module("impl.formats.cast_triton"), name)
        return cast(Outputs, function(inputs))

    return run


def _run_torch(inputs: Inputs) -> Outputs:
    kind = getattr(torch, inputs.format)
    if inputs.direction == "encode":
        codes = inputs.source.to(kind)
        inputs.out.copy_(codes if kind == torch.bfloat16 else codes.view(torch.uint8))
    else:
        codes = inputs.source if kind == torch.bfloat16 else inputs.source.view(kind)
        inputs.out.copy_(codes.to(inputs.out.dtype))
    return Outputs(inputs.out)


def _language_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, CastCase)
    reasons = without_triton()
    if case.format in ("float8_e8m0fnu", "float4_e2m1fn"):
        reasons.append(f"format={case.format}: Triton's language has no such type")
    if case.format == "float8_e4m3fnuz" and execution == "cuda":
        reasons.append("format=float8_e4m3fnuz: Triton has no FNUZ types on NVIDIA devices")
    if case.direction == "encode" and case.format in ("float8_e4m3fn", "float8_e4m3fnuz"):
        if case.overflow != "saturate" and case.values in _OVERFLOWING:
            reasons.append(f"overflow={case.overflow}: Triton's cast saturates")
        if execution == "hip" and case.values == "special":
            reasons.append("values=special: what AMD's converts make of infinity is stated nowhere")
    return reasons


def _torch_overflow(format: str) -> str:
    """What torch's casts make of numbers beyond the largest: its e4m3fn cast saturates since 2.13."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return "saturate" if format == "float8_e4m3fn" and version >= (2, 13) else "nan"


def _torch_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, CastCase)
    del execution
    reasons = []
    if case.format == "float4_e2m1fn":
        reasons.append("format=float4_e2m1fn: torch packs two codes into a byte and has no cast")
    if case.rounding == "up":
        reasons.append("rounding=up: torch rounds to nearest")
    rule = _torch_overflow(case.format)
    fixed = case.format in ("float4_e2m1fn", "bfloat16") or case.direction == "decode"
    if not fixed and case.overflow != rule and case.values in _OVERFLOWING:
        reasons.append(f"overflow={case.overflow}: should be {rule}, the rule of this torch ({torch.__version__})")
    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, CastCase)
    return f"{case.format} {case.direction} {case.wide} {case.overflow} {case.rounding}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("run"),
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "cast_triton.py", _HERE / "codes_triton.py"),
    ),
    Impl(
        name="triton-cast",
        run=_lazily("run_language"),
        unsupported=_language_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "cast_triton.py"),
    ),
    Impl(
        name="torch-cast",
        run=_run_torch,
        unsupported=_torch_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=lambda: f"torch {torch.__version__}".encode(),
    ),
)
