"""How does vLLM decide which kernel a batch of dense MLA decode goes to?

Its metadata builder is constructed and asked for the metadata of every batch; what the builder tells AITER's planner, and
what it hands to the kernels, is the answer. The base class, AITER and the groups of ranks are stand-ins.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cases.dcp.routes import COLUMNS, MOST_REQUESTS, ROUTES, Batch, Configuration, Inputs, Outputs
from impl.dcp import vllm_modules
from impl.sources import vllm

_WORDS = {"plain": "plain", "segmented": "segmented", "cprr": "round_robin", "triton": "generic"}
_CACHES = {"bfloat16": "auto", "float16": "auto", "float8": "fp8_e4m3"}
_LANES = 576
# Tests of what the message says tell the refusals apart.
_REFUSALS = {"DCP-gathered heads": 1, "multi-token verify requires": 2, "2-token": 3}


def run(inputs: Inputs) -> Outputs:
    """The decisions of the builder for all batches."""
    given = inputs.configuration
    loader = vllm_modules.loader_for(inputs.out, given.arch)
    builders: dict[int, Any] = {}
    with _serving(loader, given) as planned:
        for point, batch in enumerate(inputs.batches):
            planned.clear()
            try:
                if batch.heads not in builders:
                    builders[batch.heads] = _built(loader, given, batch.heads // given.ranks)
                found = _decided(builders[batch.heads], inputs, batch, planned)
            except (ValueError, RuntimeError) as error:
                found = {"refused": next(code for words, code in _REFUSALS.items() if words in str(error))}
            inputs.out[point] = torch.tensor([found.get(name, 0) for name in COLUMNS])
    return Outputs(inputs.out)


class _Other:
    """A module with some of its attributes replaced."""

    def __init__(self, module: Any, **replaced: object) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Launched:
    """A kernel whose launches do nothing: which slots a batch reads is not asked here."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


@contextlib.contextmanager
def _serving(loader: vllm.Loader, given: Configuration) -> Iterator[dict[str, Any]]:
    """For the duration of a `with`, what the builder asks of a server; yields what the planner is told last."""
    planned: dict[str, Any] = {}
    # Whether AITER can be found is asked while the module is loaded, before the stand-in is there.
    loader.symbol(vllm_modules.BACKEND, vllm_modules.BUILDER)

    def plan(
        indptr: object, kv: object, last: object, heads: int, kv_heads: int, causal: bool, *_: object, **more: Any
    ) -> None:
        planned.update(heads=heads, causal=causal, **more)

    aiter = ModuleType("aiter")
    aiter.dtypes = SimpleNamespace(fp8="fp8", fp16="fp16", bf16="bf16")  # type: ignore[attr-defined]
    aiter.get_mla_metadata_info_v1 = lambda *_, **__: ((1, torch.int32),) * 6  # type: ignore[attr-defined]
    aiter.get_mla_metadata_v1 = plan  # type: ignore[attr-defined]
    device = SimpleNamespace(multi_processor_count=given.compute_units)
    replaced = {
        "torch": _Other(torch, cuda=SimpleNamespace(get_device_properties=lambda _: device)),
        "get_dcp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=given.ranks),
        "_segmented_mla_decode_supported": lambda: given.segmented,
        "_expand_page_indices_kernel": _Launched(),
        "AiterMLADecodeMetadata": SimpleNamespace,
    }
    settings = {"VLLM_ROCM_AITER_MLA_ASM_PADDING": given.mode, "VLLM_ROCM_AITER_MLA_DCP_VERIFY": given.selector}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {"aiter": aiter}))
        stack.enter_context(loader.environment(**settings))
        stack.enter_context(loader.compute_units(given.compute_units))
        for name, value in replaced.items():
            stack.enter_context(loader.replaced(vllm_modules.BACKEND, name, value))
        yield planned


def _built(loader: vllm.Loader, given: Configuration, heads: int) -> Any:
    """The metadata builder of one rank with these query heads."""
    drafter = SimpleNamespace(num_speculative_tokens=given.drafted, parallel_drafting=given.parallel)
    dtype = torch.float16 if given.cache == "float16" else torch.bfloat16
    spec = SimpleNamespace(
        block_size=given.block_size,
        dtype=dtype,
        page_size_bytes=given.block_bytes,
        cache_dtype_str=_CACHES[given.cache],
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=given.ranks, cp_kv_cache_interleave_size=given.interleave
        ),
        speculative_config=drafter if given.drafted else None,
        use_v2_model_runner=False,
        model_config=SimpleNamespace(dtype=dtype, max_model_len=given.longest_model),
        scheduler_config=SimpleNamespace(max_num_seqs=MOST_REQUESTS, max_num_batched_tokens=2048),
        cache_config=SimpleNamespace(cache_dtype=_CACHES[given.cache], num_gpu_blocks=given.blocks),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: given.graphs)
        ),
        heads_of_a_rank=heads,
    )  # fmt: skip
    builder = loader.symbol(vllm_modules.BACKEND, vllm_modules.BUILDER)
    return builder(spec, ["layer"], config, torch.device("cpu"))


def _decided(builder: Any, inputs: Inputs, batch: Batch, planned: dict[str, Any]) -> dict[str, int]:
    """The columns that are not 0, read off the metadata and the planner's arguments."""
    given, requests = inputs.configuration, len(inputs.lengths)
    lengths = torch.tensor(inputs.lengths, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32) * batch.queries
    columns = -(-given.longest_model // given.block_size) + 1
    builder._decode_causal = batch.causal
    decode = builder._build_decode(
        block_table_tensor=torch.zeros(requests, columns, dtype=torch.int32),
        seq_lens_device=lengths // given.ranks,
        max_seq_len=max(inputs.lengths),
        query_start_loc_cpu=starts,
        query_start_loc_device=starts,
        num_decode_tokens=requests * batch.queries,
        max_query_len=batch.queries,
        dcp_tot_seq_lens_device=lengths if given.ranks > 1 else None,
    )
    rows = decode.dcp_verify
    found = {
        "most_queries": builder._mtp_decode_qlen, "route": ROUTES.index(_WORDS[decode.dcp_route.value]),
        "gluon": 1 if decode.use_gluon_decode else 2 * decode.use_gluon_verify,
        "call_heads": decode.asm_decode_num_heads, "call_split_cap": decode.mla_num_kv_splits,
    }  # fmt: skip
    if rows is not None:
        found |= {"page_size": rows.page_size, "row_bound": rows.max_kv_seq_len}
    if planned:
        found |= {
            "plan": 1, "plan_heads": planned["heads"], "plan_causal": int(planned["causal"]),
            "plan_round_robin": int(planned.get("is_cp_round_robin", False)),
            "plan_split_cap": planned.get("max_split_per_batch", 0),
        }  # fmt: skip
    return found
