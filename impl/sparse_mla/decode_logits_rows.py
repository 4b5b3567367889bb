"""Who bounds the decode rows that a logits buffer is reserved for, and what can each of them not be asked?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from cases.case import Case
from cases.sparse_mla.decode_logits_rows import (
    LOOKUP_FAILS,
    MISSING,
    NO_CONFIG,
    NO_DRAFTER,
    NO_SCHEDULER,
    SERVED,
    Inputs,
    Outputs,
)
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons
from impl.sources import settings, vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader, vllm_source

VLLM_BOUND = "_max_decode_logits_rows"

_EXACT = exact_but("integers")


def run_ours(inputs: Inputs) -> Outputs:
    """The least of the bounds that hold: the batch's tokens, and where sequences are known, what they decode at once."""
    bounds = [inputs.batched_tokens]
    tokens_each = torch.where(inputs.drafted > 0, inputs.drafted + 1, 1)
    unbounded = torch.iinfo(torch.int64).max
    served = inputs.config.eq(SERVED) & inputs.sequences.gt(0)
    bounds.append((inputs.sequences * tokens_each).masked_fill(~served, unbounded))
    inputs.out.copy_(torch.stack(bounds).amin(dim=0))
    return Outputs(inputs.out)


def run_vllm(inputs: Inputs) -> Outputs:
    """vLLM's bound, told the configuration of each point."""
    loader = vllm_loader("gfx950", inputs.out.device)
    bound = loader.symbol(VLLM_MODULE, VLLM_BOUND)
    columns = (inputs.batched_tokens, inputs.config, inputs.sequences, inputs.drafted)
    rows = []
    for tokens, config, sequences, drafted in zip(*(column.tolist() for column in columns), strict=True):

        def lookup(known: tuple[int, int, int] = (config, sequences, drafted)) -> object:
            return _configuration(*known)

        with loader.replaced(VLLM_MODULE, "get_current_vllm_config", lookup):
            rows.append(bound(tokens))
    inputs.out.copy_(torch.tensor(rows, dtype=torch.int64))
    return Outputs(inputs.out)


def _configuration(config: int, sequences: int, drafted: int) -> object:
    """What the lookup of vLLM's configuration finds; it raises where it does so in vLLM."""
    if config == LOOKUP_FAILS:
        raise AssertionError("no configuration is current")
    if config == NO_CONFIG:
        return None
    scheduler = SimpleNamespace(max_num_seqs=None if sequences == MISSING else sequences)
    drafter = SimpleNamespace(num_speculative_tokens=None if drafted == MISSING else drafted)
    return SimpleNamespace(
        scheduler_config=None if config == NO_SCHEDULER else scheduler,
        speculative_config=None if drafted == NO_DRAFTER else drafter,
    )


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return vllm.unsupported(settings.vllm_path(), {VLLM_MODULE: [VLLM_BOUND]})


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(Path(__file__)),
    ),
    Impl(
        name="vllm-host",
        run=run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=vllm_source,
    ),
)
