"""Who lists the cache slots of sliding windows, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.sparse_mla.window_slots import Inputs, Outputs, WindowCase
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons, without_triton
from impl.sources import settings, vllm

WINDOWS = "vllm.v1.attention.backends.mla.sparse_swa"
KERNELS = {"causal": "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", "draft": "_COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL"}
GATHER = "_COMPUTE_PREFILL_METADATA_KERNEL"
ONE_LAUNCH = "vllm.models.deepseek_v41.amd.ops.swa_decode_meta"
LAUNCH = "launch"
# The one-launch form holds a batch in registers; its caller hands larger ones to the other form.
_MOST_ROWS = 32

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.window_slots_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.window_slots_vllm").run(inputs))


def _run_one_launch(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.window_slots_vllm").run_one_launch(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch without a loop: a grid of rows and columns, indexed through the table at once."""
    rows, columns = inputs.slots.shape
    span = slice(inputs.token_offset, inputs.token_offset + rows)
    valid = inputs.valid[span]
    request = torch.where(valid, inputs.token_to_request[span], 0).long()
    queries = inputs.query_start.diff()
    before = inputs.seq_lens - queries
    reach = (before - inputs.replay_start).clamp(min=0).clamp(max=inputs.window - 1)
    inputs.gather_lens.copy_((queries + reach)[inputs.first_prefill :])
    if not rows:
        return Outputs(inputs.slots, inputs.lens, inputs.gather_lens)
    if not inputs.seq_lens.numel():
        inputs.slots.fill_(-1)
        inputs.lens.fill_(0)
        return Outputs(inputs.slots, inputs.lens, inputs.gather_lens)
    token = torch.arange(span.start, span.stop, device=inputs.lens.device, dtype=torch.int32)
    position = before[request] + token - inputs.query_start[request]
    if inputs.form == "draft":
        start, end = (before[request] - inputs.window).clamp(min=0), inputs.seq_lens[request]
    else:
        start = torch.maximum((position - inputs.window + 1).clamp(min=0), inputs.replay_start[request])
        end = position + 1
    end = torch.where(valid, torch.maximum(end, start), start)
    seen = start[:, None] + torch.arange(columns, device=inputs.lens.device, dtype=torch.int32)
    block = torch.div(seen, inputs.block_size, rounding_mode="floor").clamp(max=inputs.table.shape[1] - 1)
    number = inputs.table[request[:, None], block.long()]
    slot = number * inputs.block_size + seen % inputs.block_size
    inputs.slots.copy_(torch.where(seen < end[:, None], slot, -1))
    inputs.lens.copy_(end - start)
    return Outputs(inputs.slots, inputs.lens, inputs.gather_lens)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, WindowCase)
    del execution
    names = [KERNELS[case.form], GATHER]
    return [*vllm.unsupported(settings.vllm_path(), {WINDOWS: names}), *without_triton()]


def _one_launch_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, WindowCase)
    del execution
    reasons = [*vllm.unsupported(settings.vllm_path(), {ONE_LAUNCH: [LAUNCH]}), *without_triton()]
    if case.part == "prefill" or case.others > 0:
        reasons.append(f"part={case.part}, others={case.others}: it takes batches without prefill")
    if case.form == "causal" and case.width == "wider":
        reasons.append("width=wider: it takes index tensors as wide as the window")
    most = case.requests * case.queries + (3 if case.invalid == "padding" else 0)
    if most > _MOST_ROWS:
        reasons.append(f"requests={case.requests}, queries={case.queries}: it takes batches of up to {_MOST_ROWS} rows")
    if most == 0:
        reasons.append(f"requests={case.requests}, queries={case.queries}: it takes batches that have rows")
    return reasons


def _fingerprint(*modules: str) -> bytes:
    return vllm.locate(settings.vllm_path()).fingerprint(modules).encode()


def _key(case: Case) -> str:
    assert isinstance(case, WindowCase)
    return f"{case.form} {case.window} {case.block_size} {case.width} {case.queries}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "window_slots_triton.py"),
    ),
    Impl(
        name="torch-dense",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "window_slots.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=lambda: _fingerprint(WINDOWS),
    ),
    Impl(
        name="vllm-triton-one-launch",
        run=_run_one_launch,
        unsupported=_one_launch_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=lambda: _fingerprint(ONE_LAUNCH),
    ),
)
