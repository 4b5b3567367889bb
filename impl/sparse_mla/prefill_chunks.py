"""Who groups the prefill requests of a step into chunks, and what can each of them not be asked?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cases.case import Case
from cases.sparse_mla.prefill_chunks import Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons
from impl.sources import settings, vllm
from impl.sparse_mla.decode import vllm_loader

VLLM_MODULE = "vllm.v1.attention.backends.mla.sparse_swa"
VLLM_METADATA = "DeepseekSparseSWAMetadata"

_EXACT = exact_but("integers")


def run_ours(inputs: Inputs) -> Outputs:
    """The plan by searching, from each chunk's start on, for the last request up to which the area is kept.

    Rows per request are running maxima, so that the area grows with the number of requests and can be searched.
    """
    ratio = inputs.ratio if inputs.gathers_compressed else 0
    seq, query = (lengths.cpu().numpy().astype(np.int64) for lengths in (inputs.seq_lens, inputs.query_lens))
    records = seq // ratio if ratio else np.zeros_like(seq)
    gathered = query + np.clip(seq - query, 0, inputs.window - 1)
    reserved = inputs.window + inputs.max_batched + (-(-inputs.max_len // ratio) if ratio else 0)
    chunks = []
    start = 0
    while start < seq.size:
        widest = (np.maximum.accumulate(records[start:]), np.maximum.accumulate(gathered[start:]))
        area = np.arange(1, seq.size - start + 1) * (widest[0] + widest[1])
        count = max(1, int(np.searchsorted(area, inputs.chunk_size * reserved, side="right")))
        rows = [int(most[count - 1]) for most in widest]
        chunks.append((start, start + count, rows[0], rows[0] + rows[1]))
        start += count
    return Outputs(torch.tensor(chunks, dtype=torch.int64).reshape(-1, 4))


def run_vllm(inputs: Inputs) -> Outputs:
    """The plan of vLLM's window metadata."""
    loader = vllm_loader("gfx950", inputs.seq_lens.device)
    nothing = torch.empty(0, dtype=torch.int32)
    metadata = loader.symbol(VLLM_MODULE, VLLM_METADATA)(
        block_table=nothing, slot_mapping=nothing, block_size=64, num_prefills=inputs.seq_lens.numel(),
        prefill_seq_lens_cpu=inputs.seq_lens.cpu(), prefill_query_lens_cpu=inputs.query_lens.cpu(),
        prefill_window_size=inputs.window, prefill_max_model_len=inputs.max_len,
        prefill_max_num_batched_tokens=inputs.max_batched,
    )  # fmt: skip
    flag = {} if inputs.has_compressed is None else {"has_compressed": inputs.has_compressed}
    plan = metadata.get_prefill_chunk_plan(compress_ratio=inputs.ratio, prefill_chunk_size=inputs.chunk_size, **flag)
    return Outputs(torch.tensor(plan, dtype=torch.int64).reshape(-1, 4))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return vllm.unsupported(settings.vllm_path(), {VLLM_MODULE: [VLLM_METADATA]})


def _vllm_source() -> bytes:
    return vllm.locate(settings.vllm_path()).fingerprint([VLLM_MODULE]).encode()


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
        source=_vllm_source,
    ),
)
