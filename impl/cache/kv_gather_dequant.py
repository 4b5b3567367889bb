"""Who gathers packed key-value records into bfloat16 rows, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import cast

import torch

from cases.cache.kv_gather_dequant import GatherCase, Inputs, Outputs
from cases.case import Case
from impl.cache import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz}

_EXACT = exact_but("every step is exact")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.cache.kv_gather_dequant_triton").run(inputs))


def _run_vllm(inputs: Inputs, module: str) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.cache.records_vllm").gather(inputs, module))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: indexed reads of both regions and torch's own fp8 cast, one request after the other."""
    cache, block_size = inputs.cache, inputs.cache.shape[1]
    start = cache.storage_offset()
    data = cache.as_strided((cache.shape[0], block_size, 576), (cache.stride(0), 576, 1), start)
    tail = cache.as_strided((cache.shape[0], block_size, 8), (cache.stride(0), 8, 1), start + 576 * block_size)
    lengths = inputs.seq_lens.tolist()
    gathers = lengths if inputs.gather_lens is None else inputs.gather_lens.tolist()
    for request, (length, gather) in enumerate(zip(lengths, gathers, strict=True)):
        position = torch.arange(length - gather, length, device=cache.device)
        at = (inputs.table[request].long()[position // block_size], position % block_size)
        bytes_read = data[at]
        codes = bytes_read[:, :448].contiguous().view(_FORMATS[inputs.encoding]).float().unflatten(1, (7, 64))
        scales = torch.exp2(tail[at][:, :7].float() - 127.0)
        rows = inputs.out[request, inputs.offset : inputs.offset + gather]
        rows[:, :448] = (codes * scales[..., None]).flatten(1).to(torch.bfloat16)
        rows[:, 448:] = bytes_read[:, 448:].contiguous().view(torch.bfloat16)
    return Outputs(inputs.out)


def _vllm_reasons(case: Case, execution: Execution, module: str) -> list[str]:
    assert isinstance(case, GatherCase)
    reasons = vllm_modules.missing(module, vllm_modules.GATHER)
    if case.encoding == "float8_e4m3fnuz" and execution == "cuda":
        reasons.append("encoding=float8_e4m3fnuz: the kernel uses Triton's FNUZ type, which NVIDIA devices do not have")
    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, GatherCase)
    return f"{case.encoding} {case.block_size} {case.block_stride} {case.gather == 'all'}"


def _from_vllm(name: str, module: str) -> Impl:
    return Impl(
        name=name,
        run=functools.partial(_run_vllm, module=module),
        unsupported=functools.partial(_vllm_reasons, module=module),
        precision=_EXACT,
        compile_key=_key,
        source=functools.partial(vllm_modules.fingerprint, module),
    )


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "kv_gather_dequant_triton.py", _HERE.parent / "formats" / "codes_triton.py"),
    ),
    _from_vllm("vllm-triton", vllm_modules.V41),
    _from_vllm("vllm-triton-v4", vllm_modules.V4),
    Impl(
        name="torch-fp8",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "kv_gather_dequant.py"),
    ),
)
