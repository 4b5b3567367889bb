"""Who writes packed key-value records, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import cast

import torch

from cases.cache.kv_record_write import Inputs, Outputs, WriteCase
from cases.case import Case
from impl.cache import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz}

_EXACT = exact_but("every step but the rounding to codes is exact")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.cache.kv_record_write_triton").run(inputs))


def _run_vllm(inputs: Inputs, module: str) -> Outputs:
    routes = importlib.import_module("impl.cache.records_vllm")
    return cast(Outputs, routes.write(inputs, module))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: logarithm, division and torch's own fp8 cast; rows with negative slots are filtered out first."""
    taken = inputs.slots >= 0
    slots = inputs.slots[taken]
    rows = inputs.k[: inputs.slots.numel()][taken]
    limit = 448.0 if inputs.encoding == "float8_e4m3fn" else 224.0
    lanes = rows[:, :448].float().unflatten(1, (7, 64))
    exponent = torch.ceil(torch.log2(lanes.abs().amax(2).clamp(min=1e-4) / limit))
    scaled = (lanes / torch.exp2(exponent)[..., None]).clamp(-limit, limit)
    codes = scaled.to(_FORMATS[inputs.encoding]).view(torch.uint8).flatten(1)
    scales = torch.nn.functional.pad((exponent + 127).clamp(0, 255).to(torch.uint8), (0, 1))

    cache, block_size = inputs.cache, inputs.cache.shape[1]
    block, at = slots // block_size, slots % block_size
    start = cache.storage_offset()
    data = cache.as_strided((cache.shape[0], block_size, 576), (cache.stride(0), 576, 1), start)
    tail = cache.as_strided((cache.shape[0], block_size, 8), (cache.stride(0), 8, 1), start + 576 * block_size)
    data[block, at] = torch.cat((codes, rows[:, 448:].contiguous().view(torch.uint8)), dim=1)
    tail[block, at] = scales
    return Outputs(cache)


def _vllm_reasons(case: Case, execution: Execution, module: str) -> list[str]:
    assert isinstance(case, WriteCase)
    reasons = vllm_modules.missing(module, vllm_modules.WRITE)
    if case.encoding == "float8_e4m3fnuz" and execution == "cuda":
        reasons.append("encoding=float8_e4m3fnuz: the kernel uses Triton's FNUZ type, which NVIDIA devices do not have")
    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, WriteCase)
    return f"{case.encoding} {case.block_size} {case.block_stride}"


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
        source=bytes_of(_HERE / "kv_record_write_triton.py", _HERE.parent / "formats" / "codes_triton.py"),
    ),
    _from_vllm("vllm-triton", vllm_modules.V41),
    _from_vllm("vllm-triton-v4", vllm_modules.V4),
    Impl(
        name="torch-fp8",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "kv_record_write.py"),
    ),
)
