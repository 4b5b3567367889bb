"""Who turns the attention rows that still owe their rotation, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from cases.case import Case
from cases.precision import Precision
from cases.sparse_mla.output_rows import LANES, ROPE, Inputs, OutputCase, Outputs
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons, without_triton
from impl.sparse_mla.decode import VLLM_MODULE

_HERE = Path(__file__).parent
_BLOCKS = LANES // 32
_NOPE = LANES - ROPE


def _lazily(module: str) -> Callable[[Inputs], Outputs]:
    def run(inputs: Inputs) -> Outputs:
        return cast(Outputs, importlib.import_module(f"impl.sparse_mla.{module}").run(inputs))

    return run


def turned_by_attention(inputs: Inputs) -> int:
    """Rows in front that owe nothing any more, or that somebody else will turn."""
    if inputs.turns_later:
        return inputs.rows.shape[0]
    return inputs.decode_tokens * (inputs.decode == "fused")


def settled(inputs: Inputs, turned: int) -> Outputs:
    """The outputs once the inputs' memory holds them."""
    rows = inputs.rows if inputs.codes is None else None
    return Outputs(rows, inputs.codes, inputs.scales, torch.tensor([turned]))


def zeroed(inputs: Inputs) -> Outputs:
    """What a warm-up leaves."""
    for tensor in (inputs.rows,) if inputs.codes is None else (inputs.codes.view(torch.uint8), inputs.scales):
        assert tensor is not None
        tensor.zero_()
    return settled(inputs, 0)


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: pairs as complex numbers times the conjugate of the table's, torch's own cast to fp8."""
    if inputs.warm_up:
        return zeroed(inputs)
    start = turned_by_attention(inputs)
    owed = inputs.rows[start:, : inputs.heads]
    angles = inputs.cos_sin[inputs.positions[start:].long()]
    turn = torch.complex(angles[:, : ROPE // 2], -angles[:, ROPE // 2 :])[:, None]
    pairs = torch.view_as_complex(owed[..., _NOPE:].float().unflatten(2, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * turn).flatten(2)
    if inputs.codes is None or inputs.scales is None:
        owed[..., _NOPE:] = turned.to(torch.bfloat16)
        return settled(inputs, len(owed))
    blocks = torch.cat((owed[..., :_NOPE].float(), turned), dim=2).unflatten(2, (_BLOCKS, -1))
    # 448 is 7/8 of 2^9, and frexp has mantissas from 1/2 to 1.
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1).clamp(min=2.0**-126))
    byte = (exponent - 9 + (mantissa > 0.875) + 127).clamp(0, 254)
    # A power of two in two steps: ldexp of 2^127 and more, as float32 computes it, is infinite.
    scaled = torch.ldexp(torch.ldexp(blocks, (127 - byte)[..., None] // 2), (128 - byte)[..., None] // 2)
    inputs.codes.view(torch.uint8)[start:] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    inputs.scales[start:] = byte.to(torch.uint8).flatten(1)
    return settled(inputs, len(owed))


def _run_vllm(inputs: Inputs, model: str) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.output_rows_vllm").run(inputs, model))


def _model(model: str) -> tuple[Any, tuple[str, str]]:
    layer = importlib.import_module("impl.sparse_mla.layer_vllm")
    return layer, getattr(layer, model)


def _vllm_reasons(case: Case, execution: Execution, model: str) -> list[str]:
    assert isinstance(case, OutputCase)
    del execution
    layer, found = _model(model)
    reasons = [*layer.missing(found), *without_triton()]
    if model == "V41":
        if case.decode == "plain" and case.decode_tokens:
            reasons.append("decode=plain: vLLM's V4.1 layer always asks decode to turn its rows")
        if case.turns_later:
            reasons.append("turns_later=yes: the projection of vLLM's V4.1 layer turns no rows")
        return reasons
    if case.output == "mxfp8":
        reasons.append("output=mxfp8: vLLM's V4 layer has a bfloat16 output")
    if case.decode == "plain" and case.decode_tokens and not case.turns_later:
        reasons.append("decode=plain: vLLM's V4 layer asks decode to turn its rows unless the projection does")
    return reasons


def _vllm_source(model: str) -> bytes:
    layer, found = _model(model)
    return cast(bytes, layer.fingerprint(found, VLLM_MODULE))


def _from_vllm(name: str, model: str) -> Impl:
    return Impl(
        name=name,
        run=functools.partial(_run_vllm, model=model),
        unsupported=functools.partial(_vllm_reasons, model=model),
        precision=_precision,
        compile_key=_key,
        source=functools.partial(_vllm_source, model),
    )


def _precision(case: Case, execution: Execution) -> Precision:
    del case
    return Precision(flushes=execution != "interpreter", note="float32 products and sums, fused or not")


def _key(case: Case) -> str:
    assert isinstance(case, OutputCase)
    return f"{case.arch} {case.output} {case.integers} {case.warm_up}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_lazily("output_rows_triton"),
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(
            _HERE / "output_rows.py", _HERE / "output_rows_triton.py", _HERE.parent / "quant" / "mxfp8_triton.py",
            _HERE.parent / "formats" / "codes_triton.py",
        ),
    ),
    _from_vllm("vllm-triton", "V41"),
    _from_vllm("vllm-triton-v4", "V4"),
    Impl(
        name="torch-fp8",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_precision,
        compile_key=_key,
        source=bytes_of(_HERE / "output_rows.py"),
    ),
)  # fmt: skip
