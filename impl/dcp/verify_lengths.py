"""Who counts the tokens that rows of a verify block see on one rank, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dcp.verify_lengths import Inputs, Outputs, VerifyCase
from impl.dcp import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.verify_lengths_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    helper = vllm_modules.loader_for(inputs.lengths).symbol(vllm_modules.BACKEND, vllm_modules.HELPER)
    return Outputs(
        helper.dcp_local_verify_row_lens(
            inputs.lengths, inputs.queries, inputs.ranks, inputs.rank, inputs.interleave
        )
    )  # fmt: skip


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: the last row's share, less what the rank holds of the rows behind each one."""
    turn, period = inputs.interleave, inputs.ranks * inputs.interleave
    last = inputs.lengths.to(torch.int64).unsqueeze(1)
    share = last // period * turn + (last % period - inputs.rank * turn).clamp(0, turn)
    behind = last - 1 - torch.arange(inputs.queries - 1, device=last.device)
    mine = (behind >= 0) & (behind // turn % inputs.ranks == inputs.rank)
    rows = torch.cat((share, share - mine.long().cumsum(1)), dim=1)
    return Outputs(rows.flip(1).to(torch.int32).flatten())


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return vllm_modules.missing(vllm_modules.BACKEND, vllm_modules.HELPER)


def _key(case: Case) -> str:
    assert isinstance(case, VerifyCase)
    return f"{case.length_dtype}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "verify_lengths_triton.py"),
    ),
    Impl(
        name="vllm-torch",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=vllm_modules.fingerprint(vllm_modules.BACKEND, vllm_modules.UTILS),
    ),
    Impl(
        name="torch-backwards",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "verify_lengths.py"),
    ),
)
