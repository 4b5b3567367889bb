"""Who maps tokens to the slots of their compressed records, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import cast

import torch

from cases.cache.compressed_slots import Inputs, Outputs, SlotsCase
from cases.case import Case
from impl.cache import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

MODULE = "vllm.v1.attention.backends.mla.compressor_utils"
MAP = "get_compressed_slot_mapping"

_HERE = Path(__file__).parent

_EXACT = exact_but("integers")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.cache.compressed_slots_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.cache.compressed_slots_vllm").run(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: each token looks its request up, and what writes nothing never touches the table."""
    out = inputs.out
    if out is None:
        out = torch.empty(inputs.tokens, dtype=torch.int64, device=inputs.table.device)
    out.fill_(-1)
    token = torch.arange(int(inputs.query_start[-1]), device=out.device)
    request = torch.searchsorted(inputs.query_start[1:].contiguous(), token, right=True, out_int32=False)
    position = inputs.seq_lens[request] - inputs.query_start[request + 1] + token
    writes = (position % inputs.ratio == inputs.ratio - 1) & (inputs.token_slots[: token.numel()] >= 0)
    token, request, position = token[writes], request[writes], position[writes]
    turn, ranks = inputs.interleave, inputs.ranks
    record = (position // (turn * ranks) * turn + position % turn) // inputs.ratio
    block = inputs.table[request, record // inputs.block_size].long()
    out[token] = block * inputs.block_size + record % inputs.block_size
    return Outputs(out)


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return vllm_modules.missing(MODULE, MAP)


def _key(case: Case) -> str:
    assert isinstance(case, SlotsCase)
    return f"{case.ratio} {case.block_size} {case.ranks} {case.turns}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "compressed_slots_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=functools.partial(vllm_modules.fingerprint, MODULE),
    ),
    Impl(
        name="torch-searchsorted",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "compressed_slots.py"),
    ),
)
