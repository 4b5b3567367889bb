"""How do those who answer sparse MLA decode answer the forward over two packed caches?

By decoding without a rotation: no kernel of its own is needed. What this op refuses and decode takes is refused here.
"""

from __future__ import annotations

import importlib
from typing import cast

import torch

from cases.sparse_mla.decode import DecodeOutputs
from cases.sparse_mla.two_segment_forward import Inputs, Outputs, as_decode


def ours(inputs: Inputs) -> Outputs:
    """The answer of our own kernels; raises `ValueError` or `TypeError`."""
    return _decoded(_refuse(inputs), "decode_triton")


def vllm(inputs: Inputs) -> Outputs:
    """The answer of vLLM's decode wrapper; it raises what it raises."""
    return _decoded(inputs, "decode_vllm")


def plain(inputs: Inputs) -> Outputs:
    """The answer of plain torch with a kernel's rounding points; raises `ValueError` or `TypeError`."""
    return _decoded(_refuse(inputs), "decode_torch")


def _decoded(inputs: Inputs, module: str) -> Outputs:
    answer = cast(DecodeOutputs, importlib.import_module(f"impl.sparse_mla.{module}").run(as_decode(inputs)))
    return Outputs(answer.out)


def _refuse(inputs: Inputs) -> Inputs:
    heads = inputs.query.shape[1]
    if inputs.sink is not None and inputs.sink.numel() != heads:
        raise ValueError(f"sink has {inputs.sink.numel()} logits: should have exactly one for each of {heads} heads")
    if inputs.out.dtype != torch.bfloat16:
        raise TypeError(f"out is {inputs.out.dtype}: should be torch.bfloat16")
    for name, part in (("main", inputs.main), ("extra", inputs.extra)):
        if part is None:
            continue
        if part.indices is None or part.indptr is None:
            raise ValueError(f"{name}: should have a cache, indices and indptr, all three")
        if part.encoding != "float8_e4m3fn":
            raise ValueError(f"{name}.encoding={part.encoding}: should be float8_e4m3fn in both caches")
    return inputs
