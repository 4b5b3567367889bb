"""Who answers sparse MLA prefill over packed caches, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from cases.case import Case
from cases.precision import Precision
from cases.sparse_mla.prefill_call import PrefillOutputs
from cases.sparse_mla.prefill_chunked import ChunkedCase
from cases.sparse_mla.prefill_chunked_call import ChunkedInputs
from impl.cache import vllm_modules
from impl.implementation import (
    PRODUCTS,
    Execution,
    Impl,
    bytes_of,
    implementations,
    needs_triton,
    no_reasons,
    without_triton,
)
from impl.sources import settings, vllm
from impl.sparse_mla import prefill_driver, prefill_torch
from impl.sparse_mla.decode import VLLM_MODULE
from impl.sparse_mla.prefill import VLLM_PREFILL

VLLM_COMBINE = "combine_topk_swa_indices"

_HERE = Path(__file__).parent
_DRIVER = (_HERE / "prefill_driver.py", _HERE / "prefill_call.py", _HERE / "decode_call.py")
_VLLM = {VLLM_MODULE: (VLLM_PREFILL,), vllm_modules.V41: (vllm_modules.GATHER, VLLM_COMBINE)}


def _run_ours(inputs: ChunkedInputs) -> PrefillOutputs:
    gather = importlib.import_module("impl.cache.kv_gather_dequant_triton").run
    attend = importlib.import_module("impl.sparse_mla.prefill_triton").run
    return prefill_driver.drive(inputs, gather, attend)


def _run_torch(inputs: ChunkedInputs) -> PrefillOutputs:
    gather = next(impl.run for impl in implementations("cache.kv_gather_dequant") if impl.name == "torch-fp8")
    return prefill_driver.drive(inputs, gather, prefill_torch.run)


def _run_vllm(inputs: ChunkedInputs) -> PrefillOutputs:
    return cast(PrefillOutputs, importlib.import_module("impl.sparse_mla.prefill_chunked_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, ChunkedCase)
    reasons = [*without_triton(), *vllm.unsupported(settings.vllm_path(), _VLLM)]
    if case.window_encoding == "float8_e4m3fnuz" and execution == "cuda":
        reasons.append("window_encoding=float8_e4m3fnuz: vLLM's gather uses Triton's FNUZ type, which NVIDIA lacks")
    return reasons


def _vllm_source() -> bytes:
    return vllm.locate(settings.vllm_path()).fingerprint(list(_VLLM)).encode()


def _precision(case: Case, execution: Execution) -> Precision:
    """The rounding points of every implementation here: gathering is exact, and they differ in tiles only."""
    del case
    return Precision(
        probability="bfloat16",
        exponential_ulps=1.0 if execution == "interpreter" else 8.0,
        flushes=execution != "interpreter",
        note=f"{PRODUCTS[execution]}; sums fp32; exp(score - max) to bf16 for the values only",
    )


def _compile_key(case: Case) -> str:
    assert isinstance(case, ChunkedCase)
    parts = (
        case.window_encoding, case.window_block, case.compressed_block, case.block_stride, case.ratio, case.width,
        case.window, case.sink == "absent", case.output, case.layout,
    )  # fmt: skip
    return "/".join(str(part) for part in parts)


def _torch_key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_precision,
        compile_key=_compile_key,
        source=bytes_of(
            *_DRIVER, _HERE / "prefill_triton.py", _HERE.parent / "cache" / "kv_gather_dequant_triton.py",
            _HERE.parent / "formats" / "codes_triton.py",
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_precision,
        compile_key=_compile_key,
        source=_vllm_source,
    ),
    Impl(
        name="torch-gathered",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_precision,
        compile_key=_torch_key,
        by_shape=True,
        source=bytes_of(*_DRIVER, _HERE / "prefill_torch.py", _HERE.parent / "cache" / "kv_gather_dequant.py"),
    ),
)  # fmt: skip
