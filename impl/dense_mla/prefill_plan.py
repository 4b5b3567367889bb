"""Who plans a persistent FP8 prefill and its scratch memory, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
import importlib.util
import math
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from cases.case import Case
from cases.dense_mla.prefill_plan import Inputs, Outputs, PrefillPlanCase
from impl.dense_mla import backend_vllm
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")
_TILE, _UNIT = 256, 128

Integers = NDArray[np.int64]


def run_ours(inputs: Inputs) -> Outputs:
    """The plan of one head from the places where workers' and tiles' stretches of units begin, repeated for all heads."""
    heads, plan = kernel_heads(inputs), blank(inputs)
    clusters = math.gcd(heads, inputs.compute_units)
    workers, each = inputs.compute_units // clusters, heads // clusters
    request, first_row, last_row = _tiles(plan.rows.numpy().astype(np.int64))
    first_key, last_key = plan.rows.numpy()[request], plan.rows.numpy()[request + 1]
    tile_end = np.cumsum(-(-(last_row - first_key) // _UNIT))
    total = int(tile_end[-1]) if tile_end.size else 0
    tile_start = np.concatenate(([0], tile_end[:-1])) if tile_end.size else tile_end
    share_start = np.arange(workers) * (total // workers) + np.minimum(np.arange(workers), total % workers)
    begin = np.unique(np.concatenate((tile_start, share_start[share_start < total])))
    end = np.append(begin[1:], total)[: begin.size]
    tile = np.searchsorted(tile_start, begin, side="right") - 1
    worker = np.searchsorted(share_start, begin, side="right") - 1
    # Shares without units begin where the next one does; the last of equals owns the unit.
    is_part = np.bincount(tile, minlength=tile_end.size)[tile] > 1
    scratch = np.where(is_part, (np.cumsum(is_part) - 1) * _TILE, -1)
    keys = [first_key[tile] + (edge - tile_start[tile]) * _UNIT for edge in (begin, end)]
    stop = np.minimum(keys[1], last_key[tile])
    remaining = np.where(end == tile_end[tile], 0, last_key[tile] - stop)
    one = np.stack((request[tile], scratch, first_row[tile], last_row[tile], keys[0], stop, remaining), axis=1)

    # Per cluster and worker: its parts for the first head, then for the next one.
    parts = np.bincount(worker, minlength=workers)
    head = np.tile(np.repeat(np.arange(each), one.shape[0]), 1)
    order = np.lexsort((np.tile(np.arange(one.shape[0]), each), head, np.tile(worker, each)))
    rows, head = np.tile(one, (each, 1))[order], head[order]
    works = plan.works.numpy()
    for cluster in range(clusters):
        place = slice(cluster * rows.shape[0], (cluster + 1) * rows.shape[0])
        works[place, :7] = rows
        works[place, 7] = (head + cluster * each) * 0x10001 + 0x10000
    plan.work_start.numpy()[1:] = np.cumsum(np.tile(parts * each, clusters))

    split = np.unique(tile[is_part])
    split = split[np.argsort(first_row[split])]
    listed = [scratch[tile == number] for number in split]
    plan.group_start.numpy()[:] = sum(map(len, listed))
    plan.group_start.numpy()[: len(listed) + 1] = np.cumsum([0, *map(len, listed)])
    plan.groups.numpy()[: len(listed)] = np.stack((first_row[split], last_row[split]), axis=1)
    if listed:
        plan.parts.numpy()[: is_part.sum()] = np.concatenate(listed)
    plan.used.numpy()[:] = regions(inputs, int(is_part.sum()), int(plan.rows[-1]))
    return plan


def _tiles(rows: Integers) -> tuple[Integers, Integers, Integers]:
    """Request, first and last row of every tile, taken from both ends of a request in turn."""
    length = np.diff(rows)
    counts = -(-length // _TILE)
    request = np.repeat(np.arange(length.size), counts)
    turn = np.arange(request.size) - np.repeat(np.cumsum(counts) - counts, counts)
    number = np.where(turn % 2 == 0, turn // 2, counts[request] - 1 - turn // 2)
    first = rows[request] + number * _TILE
    return request, first, np.minimum(first + _TILE, rows[request + 1])


def kernel_heads(inputs: Inputs) -> int:
    """Heads that the kernel is given."""
    return -(-inputs.heads // 16) * 16


def blank(inputs: Inputs) -> Outputs:
    """Buffers as AITER makes them, zeros, with the rows of requests and the scratch memory for any step."""
    heads, requests = kernel_heads(inputs), inputs.max_requests
    workers = inputs.compute_units // math.gcd(heads, inputs.compute_units)
    tiles = -(-min(inputs.max_len, inputs.max_batched) // _TILE)
    parts = min(requests + workers - 1, 2 * workers - 2) * tiles
    prefills = inputs.query_start[inputs.decodes :].cpu()
    most = -(-inputs.max_batched // _TILE) + requests - 1 + inputs.compute_units
    return Outputs(
        rows=prefills - prefills[0],
        work_start=torch.zeros(inputs.compute_units + 1, dtype=torch.int32),
        works=torch.zeros(((requests + workers - 1) * tiles * heads, 8), dtype=torch.int32),
        group_start=torch.zeros(requests * tiles + 1, dtype=torch.int32),
        groups=torch.zeros((requests * tiles, 2), dtype=torch.int32),
        parts=torch.zeros(parts, dtype=torch.int32),
        used=torch.zeros(4, dtype=torch.int64),
        reserved=torch.tensor(regions(inputs, most, inputs.max_batched)),
    )


def regions(inputs: Inputs, parts: int, rows: int) -> list[int]:
    """Bytes of scratch for so many parts and rows, in units that the workspace aligns."""
    heads, lanes = kernel_heads(inputs), inputs.value_lanes
    numbers = [4 * parts * _TILE * heads * lanes, 4 * parts * _TILE * heads, 4 * rows * heads]
    numbers.append(2 * rows * heads * lanes if heads != inputs.heads else 0)
    return [(size + 255) // 256 * 256 for size in numbers]


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.prefill_plan_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return backend_vllm.missing(backend_vllm.BUILDER, backend_vllm.IMPLEMENTATION, backend_vllm.HELPER)


def _run_aiter(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.prefill_plan_aiter").run(inputs))


def _aiter_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, PrefillPlanCase)
    reasons = []
    if execution != "hip":
        reasons.append(
            f"execution={execution}: AITER's planner is compiled and asks an AMD device for its compute units"
        )
    if importlib.util.find_spec("aiter") is None:
        reasons.append("aiter is not installed")
    if execution == "hip" and torch.cuda.get_device_properties(0).multi_processor_count != case.compute_units:
        reasons.append(f"compute_units={case.compute_units}: AITER plans for those of the device")
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
        source=bytes_of(_HERE / "prefill_plan.py"),
    ),
    Impl(
        name="vllm-host",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=backend_vllm.fingerprint,
    ),
    Impl(
        name="aiter-host",
        run=_run_aiter,
        unsupported=_aiter_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "prefill_plan_aiter.py"),
    ),
)
