"""Who writes the records of the sliding window, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import torch

from cases.cache.window_record_write import Inputs, Outputs, WindowCase
from cases.case import Case
from impl.cache import rotated_records, vllm_modules
from impl.implementation import Execution, Impl, bytes_of, needs_triton, no_reasons
from impl.sources import settings, vllm

XPU = "vllm.models.deepseek_v4.xpu.xpu_qnorm_rope_kv_fp8_insert"
INSERT = "xpu_qnorm_rope_kv_fp8_insert"
COMPILED = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"

_HERE = Path(__file__).parent


def _run_ours(inputs: Inputs) -> Outputs:
    importlib.import_module("impl.cache.rotated_records_triton").write(
        inputs.rows, inputs.positions, inputs.cos_sin, inputs.slots, inputs.cache, inputs.encoding, ratio=1,
        zero_nans=False,
    )  # fmt: skip
    return Outputs(inputs.cache)


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch; tokens that write nothing are filtered out first."""
    taken = (inputs.slots >= 0).nonzero().flatten()
    rotated_records.write(
        inputs.rows[taken], inputs.positions[taken], inputs.cos_sin, inputs.slots[taken], inputs.cache, inputs.encoding,
        zero_nans=False,
    )  # fmt: skip
    return Outputs(inputs.cache)


def _run_vllm(inputs: Inputs, name: str) -> Outputs:
    routes = importlib.import_module("impl.cache.window_record_write_vllm")
    return Outputs(getattr(routes, name)(inputs))


def _xpu_reasons(case: Case, execution: Execution) -> list[str]:
    del execution
    assert isinstance(case, WindowCase)
    reasons = vllm_modules.missing(XPU, INSERT)
    if case.encoding != "float8_e4m3fn":
        reasons.append(f"encoding={case.encoding}: the route for XPU writes OCP codes only")
    return reasons


def extensions() -> list[Path]:
    """The compiled extensions of the configured vLLM, one of which registers the operator; none in a source tree."""
    source = vllm.locate(settings.vllm_path())
    return sorted((source.root / "vllm").glob("_C*.so"))


def _hip_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, WindowCase)
    reasons = list(vllm.unsupported(settings.vllm_path(), {}))
    if not reasons and not extensions():
        reasons.append(f"{vllm.locate(settings.vllm_path())} holds no compiled extension (vllm/_C*.so)")
    native = "float8_e4m3fn"
    if execution == "interpreter":
        reasons.append("the operator is compiled for a device")
    elif execution == "hip" and torch.cuda.is_available() and _architecture().startswith("gfx94"):
        native = "float8_e4m3fnuz"
    if case.encoding != native:
        reasons.append(f"encoding={case.encoding}: the operator writes {native} on this device")
    if case.block_stride == "odd":
        reasons.append("block_stride=odd: the operator stores 16 bytes at a time")
    return reasons


def _architecture() -> str:
    return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]


def _key(case: Case) -> str:
    assert isinstance(case, WindowCase)
    return f"{case.encoding} {case.block_size} {case.block_stride}"


def _compiled_source() -> bytes:
    """What identifies the compiled operator: the names, sizes and times of the extensions."""
    return b"".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns};".encode() for path in extensions())


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
        name="vllm-triton-xpu",
        run=functools.partial(_run_vllm, name="insert_by_triton"),
        unsupported=_xpu_reasons,
        precision=rotated_records.precision,
        compile_key=_key,
        source=lambda: vllm_modules.fingerprint(XPU) + vllm_modules.fingerprint(vllm_modules.V4),
    ),
    Impl(
        name="vllm-hip",
        run=functools.partial(_run_vllm, name="insert_compiled"),
        unsupported=_hip_reasons,
        precision=rotated_records.precision,
        compile_key=_key,
        source=_compiled_source,
    ),
    Impl(
        name="torch-fp8",
        run=_run_torch,
        unsupported=no_reasons,
        precision=rotated_records.precision,
        compile_key=_key,
        source=bytes_of(_HERE / "window_record_write.py", _HERE / "rotated_records.py"),
    ),
)
