"""What do we ask of the scratch memory that prefill takes from a pool which is locked after a warm-up?

See `oracle.sparse_mla.prefill_workspace` for what a layer asks for and how the pool hands it out.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int64

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded_copy

Arch = Literal["gfx942", "gfx950", "other"]

# The compress ratios of the layers that share the pool, in the order of their warm-up.
MODELS: Mapping[str, tuple[int, ...]] = {
    "window_only": (0,), "ratio_1": (1,), "ratio_2": (2,), "ratio_128": (128,), "growing": (0, 2, 1),
    "shrinking": (1, 2, 0), "pooled": (0, 128, 4, 128),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A pool's life: every layer asks once in the warm-up, the pool is locked, then come the asks of real steps.

    ratios: tokens per compressed record of each layer, 0 for a layer without a compressed cache. layers, tokens: which
    layer asks in a real step, and for how many prefill tokens. gathers: whether layers gather their keys into the
    workspace; those that read the caches in place do not. A row has lanes numbers, a query row heads times lanes.
    """

    ratios: Int64[torch.Tensor, " model"]
    layers: Int64[torch.Tensor, " steps"]
    tokens: Int64[torch.Tensor, " steps"]
    arch: Arch
    gathers: bool
    chunk_size: int
    window: int
    max_len: int
    max_batched: int
    heads: int
    lanes: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The asks in order, those of the warm-up first.

    gathered, rows: the shapes of the gather buffer and of the bfloat16 rows of the MXFP8 output, zeros where a layer does
    not ask for one. starts: at which byte of the pool each of the two lies, -1 where it is not there. needed: bytes that
    the ask takes of the pool. granted: 1, or 0 where the locked pool refuses, which then hands out nothing.
    """

    gathered: Int64[torch.Tensor, "asks 3"]
    rows: Int64[torch.Tensor, "asks 3"]
    starts: Int64[torch.Tensor, "asks 2"]
    needed: Int64[torch.Tensor, " asks"]
    granted: Int64[torch.Tensor, " asks"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkspaceCase(Case):
    """The axes of the pool.

    model: the layers, `growing` and `shrinking` warm up the one with the longest records last and first. steps: asks
    after the warm-up. tokens: `few`, `limit` exactly as many as a step may have, `beyond` more than that, `mixed` all of
    them. lanes: numbers in a row; with 40, views end between the pool's 256-byte marks.
    """

    op: ClassVar[str] = "sparse_mla.prefill_workspace"

    model: Literal["window_only", "ratio_1", "ratio_2", "ratio_128", "growing", "shrinking", "pooled"] = "growing"
    arch: Literal["gfx942", "gfx950", "other"] = "gfx950"
    gathers: bool = True
    chunk_size: int = 4
    window: int = 128
    max_len: int = 8191
    max_batched: int = 512
    heads: int = 8
    lanes: int = 512
    steps: int = 6
    tokens: Literal["few", "limit", "beyond", "mixed"] = "mixed"


CASE = WorkspaceCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "model": tuple(MODELS),
    "arch": ("gfx942", "gfx950", "other"),
    "gathers": (True, False),
    "chunk_size": (1, 4),
    "window": (1, 128),
    "max_len": (1, 1000, 8191, 1 << 20),
    "max_batched": (1, 512, 16384),
    "heads": (1, 8, 17, 128),
    "lanes": (512, 40),
    "steps": (0, 1, 6),
    "tokens": ("few", "limit", "beyond", "mixed"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"steps": (0, 1, 6, 40)}
RANDOM_CASES = 20

_BASE = WorkspaceCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(model="shrinking", lanes=40, chunk_size=1, heads=1).id,
    _BASE.varied(gathers=False, tokens="mixed").id,
    _BASE.varied(model="pooled", max_len=1 << 20, heads=128, max_batched=16384).id,
    _BASE.varied(arch="gfx942", model="ratio_128").id,
    _BASE.varied(arch="other", gathers=False, steps=0).id,
)

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "chunk_size": (1, 64), "window": (1, 1 << 16), "max_len": (1, 1 << 24), "max_batched": (1, 1 << 20),
    "heads": (1, 1024), "lanes": (1, 1024), "steps": (0, 4096),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, WorkspaceCase)
    reasons = outside(case, _BOUNDS)
    if case.steps > 0 and not case.gathers and case.arch != "gfx950":
        reasons.append(f"arch={case.arch}: a layer that does not gather has no MXFP8 output there, so asks for nothing")
    return reasons


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, WorkspaceCase)
    return case.steps > 500


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, WorkspaceCase)
    draw = Draw(case.seed, case.op)
    ratios = torch.tensor(MODELS[case.model])
    layers = draw.integers("layers", (case.steps,), 0, len(ratios))
    few = draw.integers("few", (case.steps,), 1, max(case.max_batched, 1) + 1)
    beyond = case.max_batched + draw.integers("beyond", (case.steps,), 1, 3 * case.max_batched + 2)
    kind = draw.integers("kind", (case.steps,), 0, 3)
    if case.tokens != "mixed":
        kind = torch.full((case.steps,), ("few", "limit", "beyond").index(case.tokens))
    limit = torch.full((case.steps,), case.max_batched)
    tokens = torch.where(kind == 0, few, torch.where(kind == 1, limit, beyond))
    return Inputs(
        ratios=guarded_copy(ratios), layers=guarded_copy(layers), tokens=guarded_copy(tokens), arch=case.arch,
        gathers=case.gathers, chunk_size=case.chunk_size, window=case.window, max_len=case.max_len,
        max_batched=case.max_batched, heads=case.heads, lanes=case.lanes,
    )  # fmt: skip
