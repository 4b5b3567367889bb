"""Who writes compressed records, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from cases.cache.compressed_record_write import CompressedCase, Inputs, Outputs
from cases.case import Case
from impl.cache import rotated_records, vllm_modules
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons

V41 = "vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache"
V4 = "vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache"
INSERT = "rope_quant_insert"
COMPRESS = "compress_norm_rope_store_triton"

_HERE = Path(__file__).parent
# What passes through a normalisation that is set to multiply by 1: nothing near the ends of float32.
_NORMALISABLE = ("randn", "zeros", "outlier", "ties", "floor")


def _run_ours(inputs: Inputs) -> Outputs:
    importlib.import_module("impl.cache.rotated_records_triton").write(
        inputs.rows, inputs.positions, inputs.cos_sin, inputs.slots, inputs.cache, "float8_e4m3fn", inputs.ratio,
        inputs.zero_nans,
    )  # fmt: skip
    return Outputs(inputs.cache)


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch; tokens that write nothing are filtered out first."""
    count, ratio = inputs.slots.numel(), inputs.ratio
    taken = ((inputs.slots >= 0) & (inputs.positions[:count] % ratio == ratio - 1)).nonzero().flatten()
    first = inputs.positions[taken] - (ratio - 1)
    rotated_records.write(
        inputs.rows[taken], first, inputs.cos_sin, inputs.slots[taken], inputs.cache, "float8_e4m3fn", inputs.zero_nans
    )
    return Outputs(inputs.cache)


def _run_vllm(inputs: Inputs, name: str) -> Outputs:
    routes = importlib.import_module("impl.cache.compressed_record_write_vllm")
    return Outputs(getattr(routes, name)(inputs))


def _v41_reasons(case: Case, execution: Execution) -> list[str]:
    del execution
    assert isinstance(case, CompressedCase)
    reasons = vllm_modules.missing(V41, INSERT)
    if case.ratio not in (1, 2):
        reasons.append(f"ratio={case.ratio}: V4.1 compresses 1 or 2 tokens")
    return reasons


def _v4_reasons(case: Case, execution: Execution) -> list[str]:
    del execution
    assert isinstance(case, CompressedCase)
    reasons = vllm_modules.missing(V4, COMPRESS)
    if case.ratio not in (4, 128):
        reasons.append(f"ratio={case.ratio}: V4 compresses 4 or 128 tokens")
    if case.values not in _NORMALISABLE:
        reasons.append(f"values={case.values}: do not pass the normalisation before the writer unchanged")
    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, CompressedCase)
    return f"{case.ratio} {case.block_size} {case.block_stride} {case.zero_nans} {case.table_layout}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=rotated_records.precision,
        compile_key=_key,
        source=rotated_records.triton_source,
    ),
    Impl(
        name="vllm-triton",
        run=functools.partial(_run_vllm, name="insert"),
        unsupported=_v41_reasons,
        precision=rotated_records.precision,
        compile_key=_key,
        source=functools.partial(vllm_modules.fingerprint, V41),
    ),
    Impl(
        name="vllm-triton-v4",
        run=functools.partial(_run_vllm, name="compress"),
        unsupported=_v4_reasons,
        precision=rotated_records.precision,
        compile_key=_key,
        source=functools.partial(vllm_modules.fingerprint, V4),
    ),
    Impl(
        name="torch-fp8",
        run=_run_torch,
        unsupported=no_reasons,
        precision=rotated_records.precision,
        compile_key=_key,
        source=bytes_of(_HERE / "compressed_record_write.py", _HERE / "rotated_records.py"),
    ),
)
