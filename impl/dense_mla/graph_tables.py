"""Who builds the tables that captured graphs read, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias, cast

import torch

from cases.case import Case
from cases.dense_mla.graph_tables import BUFFERS, Buffers, Inputs, Outputs, Step
from impl.dense_mla import backend_vllm
from impl.dense_mla.batch_shape import BatchShape, shape_of
from impl.implementation import Execution, Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")

# What a step hands on, by the name of the buffer that it should lie in; what is missing is not handed on.
Returned: TypeAlias = Mapping[str, torch.Tensor]


def play(inputs: Inputs, update: Callable[[Step], Returned]) -> Outputs:
    """Every step in its order; buffers and what was returned are looked at before the next one runs."""
    held, places, raised = [], [], []
    for step in inputs.steps:
        returned: Returned = {}
        try:
            returned = update(step)
        except (ValueError, RuntimeError) as error:
            # Faults of the memory watch and of a device are RuntimeErrors of their own kinds, and no refusal.
            if type(error) not in (ValueError, RuntimeError):
                raise
            raised.append(1)
        else:
            raised.append(0)
        held.append(Buffers(**{name: getattr(inputs.buffers, name).clone() for name in BUFFERS}))
        places.append([_place(returned.get(name), getattr(inputs.buffers, name)) for name in BUFFERS])
    return Outputs(tuple(held), torch.tensor(places), torch.tensor(raised))


def _place(tensor: torch.Tensor | None, buffer: torch.Tensor) -> list[int]:
    if tensor is None:
        return [-2, 0]
    if tensor.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
        return [-1, 0]
    return [int(tensor.storage_offset() - buffer.storage_offset()), tensor.shape[0]]


def refuse(inputs: Inputs, step: Step) -> tuple[BatchShape, str]:
    """The shape of a step's batch and what decodes it; raises ValueError where it does not fit into the buffers, and
    RuntimeError where nothing decodes it."""
    shape = shape_of(step.batch.query_lens, step.batch.tokens)
    requests = len(step.batch.query_lens)
    room, rows = inputs.buffers.seq_lens.numel(), inputs.buffers.row_lens.numel()
    if requests > room:
        raise ValueError(f"{requests} requests: should be at most {room}")
    route = "plain"
    if inputs.world > 1 and shape.query > 1:
        if inputs.kernels in ("round_robin", "both") and shape.query >= 3:
            route = "round_robin"
        elif inputs.kernels in ("segmented", "both"):
            route = "segmented"
        else:
            raise RuntimeError(f"{shape.query} query tokens over {inputs.world} ranks should have a kernel")
    if route == "segmented" and requests * shape.query > rows:
        raise ValueError(f"{requests * shape.query} rows: should be at most {rows}")
    return shape, route


def handed_on(inputs: Inputs, shape: BatchShape, route: str, requests: int) -> dict[str, torch.Tensor]:
    """The views of the buffers that the batch's kernels are handed."""
    buffers = inputs.buffers
    views = {
        "qo_indptr": buffers.qo_indptr[: requests + 1],
        "kv_indptr": buffers.kv_indptr[: requests + 1],
        "seq_lens": buffers.seq_lens[:requests],
    }
    if route == "round_robin":
        views["global_indptr"] = buffers.global_indptr[: requests + 1]
    if route == "segmented":
        rows = requests * shape.query
        return views | {"row_lens": buffers.row_lens[:rows], "row_pages": buffers.row_pages[:rows]}
    return views | {"indices": buffers.indices}


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: copies into slices of the buffers, and fills behind them."""
    buffers = inputs.buffers

    def starts_of(buffer: torch.Tensor, starts: torch.Tensor) -> None:
        buffer.narrow(0, 0, starts.numel()).copy_(starts)
        buffer[starts.numel() :] = starts[-1]

    def summed(lengths: torch.Tensor) -> torch.Tensor:
        return torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))

    def update(step: Step) -> Returned:
        shape, route = refuse(inputs, step)
        batch, requests = step.batch, len(step.batch.query_lens)
        keys, whole, queries = batch.seq_lens, batch.global_lens, batch.query_start
        if shape.padded:
            dummy = batch.query_start.diff() == 0
            keys = keys.masked_fill(dummy, shape.query)
            whole = whole.masked_fill(dummy, shape.query * inputs.world)
            queries = shape.query * torch.arange(requests + 1, dtype=torch.int32, device=keys.device)
        buffers.seq_lens.narrow(0, 0, requests).copy_(keys)
        starts_of(buffers.kv_indptr, summed(keys))
        starts_of(buffers.qo_indptr, queries)
        if route == "round_robin":
            starts_of(buffers.global_indptr, summed(whole))
        views = handed_on(inputs, shape, route, requests)
        if route == "segmented":
            token = torch.arange(shape.query, device=keys.device)
            seen = (batch.global_lens[:, None] - (shape.query - 1) + token).clamp(min=0)
            lens = torch.div(seen + (inputs.world - 1 - inputs.rank), inputs.world, rounding_mode="floor")
            views["row_lens"].copy_(lens.flatten())
            parts = inputs.block_size // inputs.page_size
            part = torch.arange(parts, dtype=torch.int32, device=keys.device)
            pages = (step.block_table[:, :, None] * parts + part).flatten(1)[:, : buffers.row_pages.shape[1]]
            views["row_pages"].unflatten(0, (requests, shape.query)).copy_(pages[:, None])
        else:
            buffers.indices.fill_(-1)
            position = torch.arange(int(keys.max()), device=keys.device)
            slots = step.block_table[:, position // inputs.block_size] * inputs.block_size
            slots = slots + (position % inputs.block_size).to(torch.int32)
            used = slots[position < keys[:, None]]
            buffers.indices.narrow(0, 0, used.numel()).copy_(used)
        return views

    return play(inputs, update)


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.graph_tables_triton").run(inputs))


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.graph_tables_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    return [*backend_vllm.missing(backend_vllm.BUILDER), *needs_triton(case, execution)]


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(
            _HERE / "graph_tables_triton.py", _HERE / "batch_tables_triton.py", _HERE / "expand_pages_triton.py",
            _HERE / "batch_shape.py", _HERE / "graph_tables.py",
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=backend_vllm.fingerprint,
    ),
    Impl(
        name="torch-copy",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "graph_tables.py", _HERE / "batch_shape.py"),
    ),
)  # fmt: skip
