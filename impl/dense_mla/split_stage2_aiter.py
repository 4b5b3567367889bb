"""How is AITER's own second stage of split decode called?

Its kernel alone, launched as its `mla_decode_fwd` launches it behind a first stage with pages of one token; that first
stage is machine code.
"""

from __future__ import annotations

import torch

from cases.dense_mla.split_stage2 import Inputs, Outputs
from impl.dense_mla.split_stage2 import AITER_KERNEL, AITER_MODULE
from impl.sources import aiter, settings
from impl.sources.execution import execution_on


def run(inputs: Inputs) -> Outputs:
    """The kernel's answer; it raises what it raises."""
    execution = execution_on(inputs.out.device)
    loader = aiter.load(aiter.locate(settings.aiter_path()), aiter.Platform("gfx950"), execution)
    kernel = loader.symbol(AITER_MODULE, AITER_KERNEL)
    rows, splits, heads, lanes = inputs.partials.shape
    requests = inputs.query_starts.shape[0] - 1
    final = torch.empty((rows, heads), dtype=torch.float32, device=inputs.out.device)
    lse, out = inputs.lse, inputs.out
    # What the first stage is given where it does not say.
    exported = torch.full((requests,), splits, dtype=torch.int32, device=out.device)
    padded = 1 << (lanes - 1).bit_length()
    options = {} if execution == "interpreter" else {"waves_per_eu": 4}
    kernel[(requests, heads)](
        inputs.partials, lse, out, final, inputs.query_starts, inputs.key_starts,
        torch.ones((requests,), dtype=torch.int32, device=out.device), inputs.split_starts,
        exported if inputs.exported is None else inputs.exported, lse.stride(0), lse.stride(2), lse.stride(1), out.stride(0),
        out.stride(1), final.stride(0), page_size=1, KV_INDPTR_IS_PAGE_LEVEL=False, MAYBE_FINAL_OUT=inputs.answer_packed,
        HAS_FINAL_LSE=True, USE_VALID_SPLIT_COUNT_REDUCE=int(inputs.exported is not None), BATCH_NUM=requests,
        BLOCK_DV=padded, Lv=lanes, mgc=inputs.granularity, num_warps=1, num_stages=2, **options,
    )  # fmt: skip
    return Outputs(out, final)
