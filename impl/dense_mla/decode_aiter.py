"""How are AITER's kernels asked for dense MLA decode: the paged Triton one, the assembly ones, and the Gluon one?"""

from __future__ import annotations

import importlib

import torch

from cases.dense_mla.decode_call import QUANTISED, DecodeInputs, DecodeOutputs
from impl.dense_mla.decode import AITER_GLUON, AITER_MODULE, ATTEND, kernel_heads
from impl.dense_mla.decode_rows import block_table, limits
from impl.sources import aiter, settings
from impl.sources.execution import execution_on

ASSEMBLY = "aiter.mla"


def paged(inputs: DecodeInputs) -> DecodeOutputs:
    """The answer of the Triton kernel over pages: every row a request with the tokens that it sees.

    It takes another kernel on a ROCm build of torch than elsewhere, and so it does in the interpreter. Pages of one token
    are handed over as what they are, rows.
    """
    execution = execution_on(inputs.query.device)
    fnuz = inputs.cache.dtype == torch.float8_e4m3fnuz
    loader = aiter.load(aiter.locate(settings.aiter_path()), aiter.Platform("gfx942" if fnuz else "gfx950"), execution)
    attend = loader.symbol(AITER_MODULE, ATTEND)
    rows, heads, _ = inputs.query.shape
    latent = inputs.out.shape[2]
    cache = inputs.cache if inputs.cache.shape[1] == 1 else inputs.cache.unsqueeze(2)
    device = inputs.query.device
    lse = torch.empty((rows, heads), dtype=torch.float32, device=device)
    partials = torch.empty((rows, heads, inputs.splits, latent + 1), dtype=torch.float32, device=device)
    with loader.replaced(AITER_MODULE, "is_hip_", True):
        attend(
            inputs.query, cache, cache[..., :latent], inputs.out, lse,
            block_table(inputs).repeat_interleave(inputs.qlen, dim=0), limits(inputs), partials,
            inputs.splits, inputs.scale, inputs.cache.shape[1], k_scale=inputs.cache_scale, v_scale=inputs.cache_scale,
        )  # fmt: skip
    return DecodeOutputs(inputs.out, lse)


def assembly(inputs: DecodeInputs) -> DecodeOutputs:
    """The answer of the assembly kernels without a plan, as vLLM's backend asks for it, log-sum-exp included.

    Heads are padded to a multiple of 16 by repeating them, each next to itself where that comes out even; a copy of the
    rows lies as the kernels want it, and the answer is copied out of theirs.
    """
    attend = importlib.import_module(ASSEMBLY).mla_decode_fwd
    rows, heads, lanes = inputs.query.shape
    padded = kernel_heads(heads)
    head = torch.arange(padded, device=inputs.query.device)
    interleaved = padded % heads == 0
    query = inputs.query[:, head // (padded // heads) if interleaved else head % heads].contiguous()
    out = torch.empty((rows, padded, inputs.out.shape[2]), dtype=inputs.out.dtype, device=query.device)
    if inputs.qlen > 1:
        # Lanes that the kernels do not store would show what the memory held.
        out.zero_()
    blocks = torch.arange(inputs.requests + 1, dtype=torch.int32, device=query.device) * inputs.qlen
    _, lse = attend(
        query, inputs.cache.view(-1, 1, 1, lanes), out, blocks, inputs.kv_indptr, inputs.slots,
        torch.ones(inputs.requests, dtype=torch.int32, device=query.device), inputs.qlen, sm_scale=inputs.scale,
        return_lse=True, causal=inputs.causal, q_scale=inputs.query_scale, kv_scale=inputs.cache_scale,
    )  # fmt: skip
    real = slice(None, None, padded // heads) if interleaved else slice(0, heads)
    inputs.out.copy_(out[:, real])
    return DecodeOutputs(inputs.out, lse.view(rows, padded)[:, real].contiguous())


def gluon(inputs: DecodeInputs) -> DecodeOutputs:
    """The answer of the Gluon kernel, which has no argument for a block that is not causal; it raises what it raises."""
    loader = aiter.load(
        aiter.locate(settings.aiter_path()), aiter.Platform("gfx950"), execution_on(inputs.query.device)
    )
    attend = loader.symbol(*AITER_GLUON)
    query, out = inputs.query, inputs.out
    if inputs.qlen > 1:
        query, out = (tensor.unflatten(0, (inputs.requests, inputs.qlen)) for tensor in (query, out))
    latent = inputs.out.shape[2]
    cache = inputs.cache.view(-1, inputs.cache.shape[2])
    held = inputs.kv_indptr[1 : inputs.live + 1] - inputs.kv_indptr[: inputs.live]
    _, lse = attend(
        q_nope=query[..., :latent], q_pe=query[..., latent:], kv_c=cache, o=out, page_table=inputs.slots,
        seq_info=inputs.kv_indptr, sm_scale=inputs.scale, k_pe=None, kv_pe_offset=latent, use_2d_view=False,
        kv_scale=float(inputs.cache_scale) if cache.dtype in QUANTISED else 1.0,
        min_kv_seq_len=int(held.min()) if held.numel() else 1, return_lse=True,
    )  # fmt: skip
    return DecodeOutputs(inputs.out, lse.view(inputs.query.shape[:2]))
