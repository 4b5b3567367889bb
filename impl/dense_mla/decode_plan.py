"""Who plans a persistent decode, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from cases.case import Case
from cases.dense_mla.decode_plan import Inputs, Outputs, PlanCase
from impl.dense_mla.decode_plan_buffers import Kernel, buffer_lengths
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")
# Starting a tile costs a worker as much as so many blocks of keys.
_START = 16

Integers = NDArray[np.int64]


def run_ours(inputs: Inputs) -> Outputs:
    """A plan that cuts a line into equal stretches, one a worker.

    Every tile lies on the line with the cost of starting it and its blocks of keys. Where a stretch ends inside a tile, the
    tile is cut, unless one side would have no block, or the other fewer keys than the longest request has rows.
    """
    kernel, lengths = Kernel.of(inputs), buffer_lengths(inputs)
    query, key = (starts.cpu().numpy().astype(np.int64) for starts in (inputs.query_start, inputs.key_start))
    rows = np.repeat(np.diff(query), kernel.fold)
    counts = kernel.tiles(rows)
    request = np.repeat(np.arange(rows.size), counts)
    number = np.arange(request.size) - np.repeat(np.cumsum(counts) - counts, counts)
    each = -(-rows // np.maximum(counts, 1))[request]
    first_row = (np.cumsum(rows) - rows)[request] + number * each
    last_row = np.minimum(first_row + each, np.cumsum(rows)[request])
    first_key, last_key = key[request // kernel.fold], key[request // kernel.fold + 1]
    unseen = np.cumsum(rows)[request] - last_row if inputs.mask == "causal" else 0
    end = np.maximum(first_key, last_key - unseen)

    # Works begin with a tile's keys and at its cuts.
    line = _line(inputs, end - first_key, kernel.fold * (query.size - 1))
    tile = np.concatenate((np.arange(request.size), line.cut))
    begin = np.concatenate((first_key, first_key[line.cut] + line.keys_before))
    order = np.lexsort((begin, tile))
    worker = np.concatenate((line.worker, line.cut_worker))[order]
    tile, begin = tile[order], begin[order]
    stop = end[tile]
    stop[:-1] = np.where(tile[1:] == tile[:-1], begin[1:], stop[:-1])
    parts = np.bincount(tile, minlength=request.size)
    is_part = parts[tile] > 1
    scratch = np.cumsum(each[tile] * is_part) - each[tile] * is_part

    grouped = np.cumsum(parts * (parts > 1))
    plan = Outputs(
        torch.zeros(lengths.work_start, dtype=torch.int32), torch.zeros((lengths.works, 8), dtype=torch.int32),
        torch.zeros(lengths.group_start, dtype=torch.int32), torch.zeros((lengths.groups, 2), dtype=torch.int32),
        torch.zeros(lengths.parts, dtype=torch.int32),
    )  # fmt: skip
    plan.work_start.numpy()[:] = np.searchsorted(worker, np.arange(lengths.work_start))
    columns = (request[tile], np.where(is_part, scratch, -1), first_row[tile], last_row[tile], begin, stop,
               last_key[tile] - stop)  # fmt: skip
    plan.works.numpy()[: tile.size, :7] = np.stack(columns, axis=1)
    if grouped.size:
        plan.group_start.numpy()[1:] = grouped[np.minimum(np.arange(lengths.groups), grouped.size - 1)]
    plan.groups.numpy()[: request.size] = np.stack((first_row, last_row), axis=1)
    plan.parts.numpy()[: is_part.sum()] = scratch[is_part]
    return plan


class _Line(NamedTuple):
    """The worker of every tile; the tiles that are cut, once for each cut, keys in front of it, and the worker behind."""

    worker: Integers
    cut: Integers
    keys_before: Integers
    cut_worker: Integers


def _line(inputs: Inputs, keys: Integers, requests: int) -> _Line:
    workers = inputs.compute_units
    if inputs.split_cap is not None:
        workers = min(workers, inputs.split_cap * max(1, requests))
    cost = -(-keys // inputs.granularity) + _START
    start = np.cumsum(cost) - cost
    stretch = max(1, -(-int(cost.sum()) // workers))
    ends = np.arange(stretch, int(cost.sum()), stretch)
    tile = np.searchsorted(start, ends, side="right") - 1
    before = (ends - start[tile] - _START) * inputs.granularity
    useful = (before > 0) & (keys[tile] - before >= inputs.queries)
    return _Line(start // stretch, tile[useful], before[useful], ends[useful] // stretch)


def _run_aiter(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.decode_plan_aiter").run(inputs))


def _aiter_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, PlanCase)
    reasons = []
    if execution != "hip":
        reasons.append(f"execution={execution}: AITER's planner is a compiled HIP kernel and needs an AMD device")
    if importlib.util.find_spec("aiter") is None:
        reasons.append("aiter is not installed")
    if execution == "hip":
        device = torch.cuda.get_device_properties(0)
        if device.multi_processor_count != case.compute_units:
            reasons.append(
                f"compute_units={case.compute_units}: AITER plans for the device's {device.multi_processor_count}"
            )
        if not device.gcnArchName.startswith(case.arch):
            reasons.append(f"arch={case.arch}: AITER plans for the device, {device.gcnArchName}")
    return reasons


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "decode_plan.py", _HERE / "decode_plan_buffers.py"),
    ),
    Impl(
        name="aiter-hip",
        run=_run_aiter,
        unsupported=_aiter_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "decode_plan_aiter.py"),
    ),
)
