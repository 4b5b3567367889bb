"""What do we ask of the rules that say how many heads the dense MLA kernels run with?

A case asks about many numbers of heads at once. See `oracle.dense_mla.head_counts`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int64

from cases.case import Axis, Case
from cases.draw import Draw
from cases.memory import guarded_copy

# Query heads of models, and over how many ranks they are spread or gathered again.
_MODEL_HEADS = (128, 96, 64)
_RANKS = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """heads: numbers of query heads, some that cannot be. reducer_24, planner_24: whether the reducer and the planner of
    the decode kernels know 24 heads.
    """

    heads: Int64[torch.Tensor, " points"]
    reducer_24: bool
    planner_24: bool


@dataclasses.dataclass(frozen=True)
class Outputs:
    """For each number: 1 or 0 for whether there are kernels; heads of the decode, the prefill and the round-robin kernel
    (0 where it has none); 1 or 0 for whether the float8 kernel decodes two query tokens without a causal mask. All but
    the first mean nothing for a number below 1.
    """

    supported: Int64[torch.Tensor, " points"]
    decode: Int64[torch.Tensor, " points"]
    prefill: Int64[torch.Tensor, " points"]
    round_robin: Int64[torch.Tensor, " points"]
    two_tokens: Int64[torch.Tensor, " points"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadCountsCase(Case):
    """The axes of the numbers.

    counts: `all` from -3 to 300, `small` from 1 to 40, `models` the heads of models on a rank, and gathered from several,
    `large` next to multiples of 16 up to 4096. order: as they come, or `mixed`.
    """

    op: ClassVar[str] = "dense_mla.head_counts"

    counts: Literal["all", "small", "models", "large"] = "all"
    order: Literal["rising", "mixed"] = "rising"
    reducer_24: bool = False
    planner_24: bool = False


CASE = HeadCountsCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "counts": ("all", "small", "models", "large"),
    "order": ("rising", "mixed"),
    "reducer_24": (True, False),
    "planner_24": (True, False),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {}
RANDOM_CASES = 8

REGRESSIONS: tuple[str, ...] = tuple(
    HeadCountsCase(reducer_24=reducer, planner_24=planner).id for reducer in (False, True) for planner in (False, True)
)


def forbid(case: HeadCountsCase) -> list[str]:
    """Every reason why there is no such question: none."""
    del case
    return []


def heavy(case: HeadCountsCase) -> bool:
    """Whether the case takes more than about a second on a CPU: none does."""
    del case
    return False


def build(case: HeadCountsCase) -> Inputs:
    """The inputs of a case."""
    draw = Draw(case.seed, case.op)
    counts = {
        "all": torch.arange(-3, 301),
        "small": torch.arange(1, 41),
        "models": torch.tensor(sorted({heads // over for heads in _MODEL_HEADS for over in _RANKS})),
        "large": 16 * draw.integers("multiple", (97,), 1, 257) + draw.integers("beside", (97,), -1, 2),
    }[case.counts]
    if case.order == "mixed":
        counts = counts[draw.permutation("order", counts.numel())]
    return Inputs(heads=guarded_copy(counts), reducer_24=case.reducer_24, planner_24=case.planner_24)
