"""Who maps sequences to the ranks that hold them, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dcp.local_lengths import Inputs, LocalCase, Outputs
from impl.dcp import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.local_lengths_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.local_lengths_vllm").run(inputs))


def _run_grouped(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.local_lengths_vllm").run_grouped(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: a position's index on its rank by division with rest, and a share as the index of what comes next."""
    ranks, turn, size = inputs.ranks, inputs.interleave, inputs.block_size
    rank: int | torch.Tensor = inputs.rank_tensor if inputs.form == "tensor" else inputs.rank
    lengths = inputs.lengths
    if inputs.form == "all":
        lengths, rank = lengths.unsqueeze(-1), torch.arange(ranks, device=lengths.device)
    rounds = lengths // (ranks * turn)
    left = lengths - rounds * (ranks * turn)
    shares = rounds * turn + torch.clamp(left - rank * turn, min=0, max=turn)

    slots = inputs.slots.fill_(-1)
    used = int(inputs.query_start[-1])
    position = inputs.positions[:used]
    mine = (position // turn % ranks == inputs.rank).nonzero().squeeze(1)
    position = position[mine]
    request = torch.bucketize(mine, inputs.query_start[1:].long(), right=True)
    index = position // (ranks * turn) * turn + position % turn
    slots[mine] = inputs.table[request, index // size].long() * size + index % size
    return Outputs(shares.to(torch.int32), slots)


def _vllm_reasons(module: str, name: str) -> Callable[[Case, Execution], list[str]]:
    def reasons(case: Case, execution: Execution) -> list[str]:
        del case, execution
        found = [*vllm_modules.missing(vllm_modules.UTILS, vllm_modules.LENGTHS), *vllm_modules.missing(module, name)]
        return list(dict.fromkeys(found))

    return reasons


def _key(case: Case) -> str:
    assert isinstance(case, LocalCase)
    return f"{case.ranks} {case.interleave} {case.block_size} {case.form}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "local_lengths_triton.py"),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons(vllm_modules.SLOTS, vllm_modules.SLOT_KERNEL),
        precision=_EXACT,
        compile_key=_key,
        source=vllm_modules.fingerprint(vllm_modules.UTILS, vllm_modules.SLOTS),
    ),
    Impl(
        name="vllm-triton-grouped",
        run=_run_grouped,
        unsupported=_vllm_reasons(vllm_modules.GROUPED_SLOTS, vllm_modules.GROUPED_SLOT_KERNEL),
        precision=_EXACT,
        compile_key=_key,
        source=vllm_modules.fingerprint(vllm_modules.UTILS, vllm_modules.GROUPED_SLOTS),
    ),
    Impl(
        name="torch-divided",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "local_lengths.py"),
    ),
)
