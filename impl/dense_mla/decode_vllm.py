"""How is vLLM's own Triton kernel called for dense MLA decode?

As its MLA backends call it: every query row is a request of its own, which has its block's table of pages and the number
of tokens that the row sees; key and value scale are the layer's one, whatever the cache's type.
"""

from __future__ import annotations

import torch

from cases.dense_mla.decode_call import DecodeInputs, DecodeOutputs
from impl.dense_mla.decode import ATTEND, VLLM_MODULE
from impl.dense_mla.decode_rows import block_table, limits
from impl.sources import settings, vllm
from impl.sources.execution import execution_on


def run(inputs: DecodeInputs) -> DecodeOutputs:
    """The kernel's answer, written into the output memory of `inputs`; it raises what it raises."""
    execution = execution_on(inputs.query.device)
    fnuz = inputs.cache.dtype == torch.float8_e4m3fnuz
    loader = vllm.load(vllm.locate(settings.vllm_path()), vllm.Platform("gfx942" if fnuz else "gfx950"), execution)
    attend = loader.symbol(VLLM_MODULE, ATTEND)
    rows, heads, _ = inputs.query.shape
    latent = inputs.out.shape[2]
    cache = inputs.cache.unsqueeze(2)
    device = inputs.query.device
    lse = torch.empty((rows, heads), dtype=torch.float32, device=device)
    attend(
        inputs.query, cache, cache[..., :latent], inputs.out, lse,
        block_table(inputs).repeat_interleave(inputs.qlen, dim=0), limits(inputs),
        torch.empty((rows, heads, inputs.splits, latent + 1), dtype=torch.float32, device=device),
        inputs.splits, inputs.scale, inputs.cache.shape[1], k_scale=inputs.cache_scale, v_scale=inputs.cache_scale,
        is_mla=True,
    )  # fmt: skip
    return DecodeOutputs(inputs.out, lse)
