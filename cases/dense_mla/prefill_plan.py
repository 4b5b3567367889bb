"""What do we ask of the plan of a persistent FP8 prefill, and of the scratch memory that it is given?

See `oracle.dense_mla.prefill_plan` for the plan. What is reserved at start must hold for every step that can be scheduled.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int32, Int64

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded_copy


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A step, its decode requests in front of its prefill requests, and what a scheduler can at most form.

    query_start: the first token of every request of the step, and one more at the end. heads: of the layer, before they are
    padded for the kernel; their values have value_lanes lanes in bfloat16. A request has max_len tokens at most, a step
    max_requests requests and max_batched tokens.
    """

    query_start: Int32[torch.Tensor, " starts"]
    decodes: int
    heads: int
    value_lanes: int
    compute_units: int
    max_requests: int
    max_len: int
    max_batched: int


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The plan in its buffers, as long as they were reserved, and bytes of scratch memory.

    rows: first row of every prefill request. work_start, works, group_start, groups, parts: as
    `cases.dense_mla.decode_plan.Outputs` has them, but the last number of a work is its first head, and the head behind its
    last one times 2^16. used, reserved: bytes of the partial outputs, their log-sum-exps, the final log-sum-exps and the
    outputs of padded heads, 0 where there is none, in this step and in any.
    """

    rows: Int32[torch.Tensor, " rebased_starts"]
    work_start: Int32[torch.Tensor, " workers"]
    works: Int32[torch.Tensor, "works 8"]
    group_start: Int32[torch.Tensor, " groups_and_one"]
    groups: Int32[torch.Tensor, "groups 2"]
    parts: Int32[torch.Tensor, " parts"]
    used: Int64[torch.Tensor, " 4"]
    reserved: Int64[torch.Tensor, " 4"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlanCase(Case):
    """The axes of the plan.

    lengths: tokens of prefill requests as far as the limits allow, `single` one each, `tiles` next to a multiple of 256 rows,
    `units` next to 128 keys, `equal`, `ragged`, `skewed` one long among short ones, `full` as many as a step can have.
    """

    op: ClassVar[str] = "dense_mla.prefill_plan"

    heads: int = 16
    compute_units: int = 64
    requests: int = 2
    decodes: int = 0
    lengths: Literal["single", "tiles", "units", "equal", "ragged", "skewed", "full"] = "ragged"
    max_len: int = 4096
    max_batched: int = 2048
    spare_requests: int = 0


CASE = PrefillPlanCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "heads": (1, 8, 12, 16, 24, 32, 72, 128),
    "compute_units": (8, 32, 64, 80, 256, 304),
    "requests": (1, 2, 3, 8),
    "decodes": (0, 3),
    "lengths": ("single", "tiles", "units", "equal", "ragged", "skewed", "full"),
    "max_len": (300, 1000, 8192),
    "max_batched": (512, 2048, 8192),
    "spare_requests": (0, 5),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"requests": (1, 2, 3, 8, 33), "max_batched": (512, 2048, 8192, 16384)}
RANDOM_CASES = 24

_BASE = PrefillPlanCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    # 24 heads take a plan of 32, of which a plan of 24 differs by far.
    _BASE.varied(heads=24, compute_units=256, requests=1, lengths="full", max_batched=512).id,
    # Requests that together exceed the longest one.
    _BASE.varied(heads=12, requests=8, lengths="full", max_len=300).id,
    # Tiles of one row behind full ones, as many as there can be.
    _BASE.varied(requests=8, lengths="tiles", max_batched=8192, compute_units=256).id,
    # Prefill behind decode.
    _BASE.varied(requests=3, decodes=3, lengths="skewed").id,
    # No worker for every unit, and a worker for every cluster only.
    _BASE.varied(lengths="single", compute_units=304).id,
    _BASE.varied(heads=128, compute_units=32, lengths="equal").id,
)

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "heads": (1, 1024), "compute_units": (1, 1024), "requests": (1, 1024), "decodes": (0, 1024), "max_len": (1, 1 << 20),
    "max_batched": (1, 1 << 20), "spare_requests": (0, 1024),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such step exists."""
    assert isinstance(case, PrefillPlanCase)
    reasons = outside(case, _BOUNDS)
    if case.heads > 128 and case.heads % 16:
        reasons.append(f"heads={case.heads}: should be 128 or fewer, or a multiple of 16")
    if case.max_batched < case.requests + 3 * case.decodes:
        reasons.append(f"max_batched={case.max_batched}: should leave a token for every request")
    return reasons


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, PrefillPlanCase)
    return case.requests * case.heads > 2048


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, PrefillPlanCase)
    draw = Draw(case.seed, case.op)
    decoded = draw.integers("decoded", (case.decodes,), 1, 4)
    longest = min(case.max_len, case.max_batched)
    wanted = _lengths(case, draw, longest)
    left = case.max_batched - int(decoded.sum())
    taken = []
    for place, length in enumerate(wanted.tolist()):
        # Every request behind gets a token at least.
        taken.append(max(1, min(length, longest, left - (case.requests - 1 - place))))
        left -= taken[-1]
    counts = torch.cat((decoded, torch.tensor(taken)))
    return Inputs(
        query_start=guarded_copy(torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)), decodes=case.decodes,
        heads=case.heads, value_lanes=128, compute_units=case.compute_units,
        max_requests=case.requests + case.decodes + case.spare_requests, max_len=case.max_len, max_batched=case.max_batched,
    )  # fmt: skip


def _lengths(case: PrefillPlanCase, draw: Draw, longest: int) -> torch.Tensor:
    shape = (case.requests,)
    if case.lengths == "single":
        return torch.ones(shape, dtype=torch.int64)
    if case.lengths == "full":
        return torch.full(shape, longest)
    if case.lengths == "equal":
        return torch.full(shape, 1 + max(1, longest // 3))
    ragged = draw.integers("ragged", shape, 1, 1 + longest)
    if case.lengths == "tiles":
        return draw.integers("tiles", shape, 1, 5) * 256 + draw.integers("beside", shape, -1, 2)
    if case.lengths == "units":
        return draw.integers("units", shape, 1, 7) * 128 + draw.integers("beside", shape, -1, 2)
    if case.lengths == "skewed":
        return torch.where(torch.arange(case.requests) == case.requests - 1, longest, ragged % 20 + 1)
    return ragged
