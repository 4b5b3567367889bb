"""How does a persistent decode kernel tile its query rows, and what must be reserved for its plans?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cases.dense_mla.decode_plan import Inputs

# Heads that kernels take as they are, in float8; (heads, most query rows).
_FLOAT8 = {"gfx942": {16: 99, 64: 1, 128: 99}, "gfx950": {16: 99, 32: 99, 64: 99, 128: 99}}


def _formats(inputs: Inputs) -> str:
    return inputs.query_format if inputs.query_format == inputs.cache_format else "mixed"


def _workgroup(arch: str, formats: str, heads: int, queries: int) -> int:
    """Rows times heads that a workgroup holds."""
    narrow = formats == "bfloat16" and heads <= 64 <= heads * queries and (heads * queries < 128 or heads == 48)
    narrow = narrow or (formats == "float8" and (heads, queries) == (32, 3))
    return 64 if narrow and arch == "gfx950" else 128


@dataclass(frozen=True)
class Kernel:
    """A decode kernel: how many requests of 16 heads it makes of one, and its workgroups."""

    fold: int
    heads: int
    workgroup: int
    whole: bool

    @classmethod
    def of(cls, inputs: Inputs) -> Kernel:
        """The kernel that serves a batch."""
        formats = _formats(inputs)
        if formats == "float8":
            native = inputs.queries <= _FLOAT8[inputs.arch].get(inputs.heads, 0)
        else:
            native = inputs.heads == 16 or (formats, inputs.arch) == ("bfloat16", "gfx950")
        heads = inputs.heads if native else 16
        workgroup = _workgroup(inputs.arch, formats, heads, inputs.queries)
        return cls(inputs.heads // heads, heads, workgroup, inputs.queries * inputs.heads <= workgroup)

    def tiles(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tiles of requests with so many query rows."""
        if self.whole:
            return np.minimum(rows, 1)
        if 2 * self.heads > self.workgroup:
            return rows
        return -(-rows * self.heads // self.workgroup)


class Lengths(NamedTuple):
    """Of the buffers of a plan."""

    work_start: int
    works: int
    group_start: int
    groups: int
    parts: int


def buffer_lengths(inputs: Inputs) -> Lengths:
    """What AITER reserves; raises ValueError where a plan of this batch needs more tiles a request than that."""
    heads, queries, formats = inputs.heads, inputs.capacity_queries, _formats(inputs)
    workgroup = _workgroup(inputs.arch, formats, heads, queries)
    if workgroup == 128 and heads != 16:
        known = formats == "float8" and queries <= _FLOAT8[inputs.arch].get(heads, 0)
        if heads == 32:
            known = known and queries == 4
        if (formats, inputs.arch) == ("bfloat16", "gfx950"):
            known = heads != 48 and (heads > 64 or heads * queries >= 128)
        workgroup = 128 if known else 16
    # Heads that fill more than half of a workgroup leave a row to each; float8 kernels of 128 heads come out alike.
    tiles = queries if 16 < workgroup < 2 * heads else -(-heads * queries // workgroup)
    needed = Kernel.of(inputs)
    most = int(needed.fold * needed.tiles(np.array(inputs.queries)))
    if most > tiles:
        raise ValueError(f"queries={inputs.queries}: {most} tiles a request, should be {tiles} or fewer, as reserved")
    requests, workers = inputs.capacity_requests, inputs.compute_units
    parts = min(requests + workers - 1, 2 * (workers - 1)) * tiles
    if inputs.split_cap is not None:
        parts = max(parts, requests * tiles + min(workers, inputs.split_cap * requests))
    return Lengths(workers + 1, (requests + workers - 1) * tiles, requests * tiles + 1, requests * tiles, parts)
