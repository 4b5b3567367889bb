"""Who says with how many heads the dense MLA kernels run, and what can each of them not be asked?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from cases.case import Case
from cases.dense_mla.head_counts import Inputs, Outputs
from impl.dense_mla import backend_vllm
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")

_PROBES = ("_aiter_mla_native_h24_reducer_supported", "_aiter_mla_native_h24_metadata_supported")
_ROUND_ROBIN = "_asm_dcp_verify_heads"


def _run_ours(inputs: Inputs) -> Outputs:
    """All numbers at once: bit arithmetic on multiples of 16, and a search among the round-robin kernels."""
    heads = inputs.heads
    sixteens = (heads + 15) & ~15
    native = (heads == 24) & (inputs.reducer_24 and inputs.planner_24)
    decode = torch.where(native, 24, sixteens)
    kernels = torch.tensor([16, 32, 64, 128, 0], device=heads.device)
    return Outputs(
        supported=((heads > 0) & ((heads <= 128) | (sixteens == heads))).to(torch.int64),
        decode=decode,
        prefill=sixteens,
        round_robin=kernels[torch.searchsorted(kernels[:4], heads.contiguous())],
        two_tokens=torch.isin(decode, torch.tensor([32, 64, 96, 128], device=heads.device)).to(torch.int64),
    )


def _run_vllm(inputs: Inputs) -> Outputs:
    """What vLLM's functions say where AITER's sources are as the case has them."""
    loader = backend_vllm.loader(inputs.heads.device)
    helper = loader.symbol(backend_vllm.MODULE, backend_vllm.HELPER)
    numbers = inputs.heads.tolist()

    def answers(rule: Callable[[int], int]) -> torch.Tensor:
        return torch.tensor([int(rule(heads)) for heads in numbers], dtype=torch.int64)

    with contextlib.ExitStack() as stack:
        for probe, known in zip(_PROBES, (inputs.reducer_24, inputs.planner_24), strict=True):
            stack.enter_context(loader.replaced(backend_vllm.MODULE, probe, lambda known=known: known))
        return Outputs(
            supported=answers(helper.is_valid_num_heads),
            decode=answers(helper.get_actual_mla_num_heads),
            prefill=answers(helper.get_fp8_prefill_num_heads),
            round_robin=answers(loader.symbol(backend_vllm.MODULE, _ROUND_ROBIN)),
            two_tokens=answers(helper.has_fp8_non_causal_qlen2_kernel),
        )


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return backend_vllm.missing(backend_vllm.HELPER, _ROUND_ROBIN, *_PROBES)


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=_run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "head_counts.py"),
    ),
    Impl(
        name="vllm-host",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=backend_vllm.fingerprint,
    ),
)
