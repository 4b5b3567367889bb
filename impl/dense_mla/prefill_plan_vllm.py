"""How does vLLM have a prefill planned, and what memory does it reserve and ask for?

Its metadata builder makes buffers, rebases requests and calls AITER's sizes and planner, for which ours stand in; its
attention asks for scratch. A workspace that only takes notes is handed to both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from cases.dense_mla.prefill_plan import Inputs, Outputs
from impl.dense_mla import backend_vllm
from impl.dense_mla.prefill_plan import blank, run_ours

_WORKSPACE = "vllm.v1.worker.workspace"


class _Torch:
    """torch without a device: host memory is not pinned, and events have nothing to wait for."""

    cuda = SimpleNamespace(
        Event=lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None),
        current_device=lambda: torch.device("cpu"),
    )

    @staticmethod
    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        del pin_memory
        return torch.zeros(*shape, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Notes:
    """A workspace that notes what it is asked for, in bytes as they are aligned, and hands out nothing real."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def get_simultaneous(self, *shapes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        self.bytes = [-(-math.prod(shape) * dtype.itemsize // 256) * 256 for shape, dtype in shapes]
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]

    @property
    def regions(self) -> torch.Tensor:
        """Bytes of the four regions, 0 for one that is not asked for."""
        return torch.tensor([*self.bytes, *[0] * (4 - len(self.bytes))])


@contextlib.contextmanager
def _serving(
    loader: backend_vllm.BackendLoader, inputs: Inputs, notes: _Notes, planned: list[Inputs]
) -> Iterator[None]:
    def described(*, batch_size: int, num_head_k: int, max_qlen: int, qlen_granularity: int) -> Any:
        assert qlen_granularity == 256
        own = _told(inputs, inputs.query_start[:1], num_head_k, batch_size, max_qlen)
        buffers = blank(own)
        sizes = [(tuple(getattr(buffers, name).shape), torch.int32) for name in _BUFFERS]
        # Of one dimension, sizes are numbers.
        return [((2,), torch.int64), *((shape if len(shape) > 1 else shape[0], dtype) for shape, dtype in sizes)]

    def plan(
        rows: torch.Tensor,
        keys: torch.Tensor,
        lengths: torch.Tensor,
        ratio: int,
        heads: int,
        *rest: Any,
        **options: Any,
    ) -> None:
        expected = {
            "qhead_granularity": 1,
            "qlen_granularity": 256,
            "kvlen_granularity": 128,
            "block_size": 1,
            "is_causal": True,
        }
        assert ratio == 1 and torch.equal(rows, keys) and torch.equal(rows.diff(), lengths) and options == expected
        own = _told(inputs, rows, heads, max(1, len(lengths)), max(1, int(rows[-1])))
        planned.append(own)
        made = run_ours(own)
        for buffer, name in zip(rest[1:], _BUFFERS, strict=True):
            found = getattr(made, name)
            count = min(len(buffer), len(found))
            buffer[:count] = found[:count]
            if name == "group_start":
                buffer[count:] = found[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(loader.compute_units(inputs.compute_units))
        stack.enter_context(backend_vllm.aiter_is(get_ps_metadata_info_v1=described, get_ps_metadata_v1=plan))
        stack.enter_context(loader.replaced(backend_vllm.MODULE, "torch", _Torch()))
        stack.enter_context(loader.replaced(_WORKSPACE, "current_workspace_manager", lambda: notes))
        yield


_BUFFERS = ("work_start", "works", "group_start", "groups", "parts")


def _told(inputs: Inputs, rows: torch.Tensor, heads: int, requests: int, longest: int) -> Inputs:
    """What a call of AITER's says, in our words."""
    return Inputs(
        query_start=rows, decodes=0, heads=heads, value_lanes=inputs.value_lanes, compute_units=inputs.compute_units,
        max_requests=requests, max_len=longest, max_batched=longest,
    )  # fmt: skip


def run(inputs: Inputs) -> Outputs:
    """vLLM's plan and memory; it raises what it raises."""
    loader = backend_vllm.loader(torch.device("cpu"))
    notes, planned = _Notes(), list[Inputs]()
    dimensions = SimpleNamespace(v_head_dim=inputs.value_lanes)
    builder = backend_vllm.instance(loader, backend_vllm.BUILDER, num_heads=inputs.heads, mla_dims=dimensions)
    prefills = inputs.query_start[inputs.decodes :] - inputs.query_start[inputs.decodes]
    longest = int(prefills.diff().max())
    metadata = SimpleNamespace(
        num_decodes=inputs.decodes, prefill=SimpleNamespace(query_start_loc=prefills, max_query_len=longest)
    )
    with _serving(loader, inputs, notes, planned):
        builder._init_fp8_prefill_ps_buffers(
            inputs.max_requests, min(inputs.max_len, inputs.max_batched), inputs.max_batched, torch.bfloat16,
            torch.device("cpu"),
        )  # fmt: skip
        reserved = notes.regions
        builder._build_fp8_prefill_ps_metadata(metadata, SimpleNamespace(query_start_loc_cpu=inputs.query_start))
        _attend(loader, inputs, metadata)
    return Outputs(
        rows=planned[-1].query_start, work_start=metadata.fp8_prefill_work_indptr, works=metadata.fp8_prefill_work_info_set,
        group_start=metadata.fp8_prefill_reduce_indptr, groups=metadata.fp8_prefill_reduce_final_map,
        parts=metadata.fp8_prefill_reduce_partial_map, used=notes.regions, reserved=reserved,
    )  # fmt: skip


def _attend(loader: backend_vllm.BackendLoader, inputs: Inputs, metadata: SimpleNamespace) -> None:
    """A layer's call on tensors without memory, for the scratch that it asks for."""

    def nothing(*arguments: object) -> None:
        del arguments

    rows = int(inputs.query_start[-1] - inputs.query_start[inputs.decodes])
    layer = backend_vllm.instance(
        loader, backend_vllm.IMPLEMENTATION, num_heads=inputs.heads, v_head_dim=inputs.value_lanes, scale=1.0,
        _fp8_prefill_one_scale=torch.ones(()), _mla_prefill_ps_asm_fwd=nothing, _mla_reduce_v1=nothing,
    )  # fmt: skip
    query = torch.empty((rows, inputs.heads, 192), dtype=torch.bfloat16, device="meta")
    value = query[..., : inputs.value_lanes]
    out = torch.empty((rows, inputs.heads * inputs.value_lanes), dtype=torch.bfloat16, device="meta")
    layer._mla_fp8_prefill_attn(query, query, value, metadata, out)
