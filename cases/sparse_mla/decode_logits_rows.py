"""What do we ask of the bound on decode rows for which a logits buffer is reserved?

A case asks about many deployments at once, its points. See `oracle.sparse_mla.decode_logits_rows` for the bound.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int64

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded, guarded_copy

# What is known of the deployment when the buffer is sized.
LOOKUP_FAILS, NO_CONFIG, NO_SCHEDULER, SERVED = range(4)
# Stands for None where a number may be missing, and NO_DRAFTER for a deployment without speculative decoding.
MISSING, NO_DRAFTER = -1, -2


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The deployments, a point each.

    batched_tokens: tokens of the batch at hand. config: how much of the configuration can be looked up (the constants of
    this module). sequences: most sequences at a time, MISSING where the scheduler does not say. drafted: speculative
    tokens per sequence, MISSING where the drafter does not say, NO_DRAFTER without one. `out` receives the answer.
    """

    batched_tokens: Int64[torch.Tensor, " points"]
    config: Int64[torch.Tensor, " points"]
    sequences: Int64[torch.Tensor, " points"]
    drafted: Int64[torch.Tensor, " points"]
    out: Int64[torch.Tensor, " points"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The rows to reserve, of every point."""

    out: Int64[torch.Tensor, " points"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsCase(Case):
    """The axes of the bound.

    config: `served` everything is known, `partial` something is missing, `mixed` both. drafter: `absent`, `silent` (it
    does not say how many tokens), `none` (0 of them) or `some`. tokens: `many` as many as a step may have, `few` fewer
    than sequences, `edges` next to what all sequences decode at once.
    """

    op: ClassVar[str] = "sparse_mla.decode_logits_rows"

    points: int = 97
    config: Literal["served", "partial", "mixed"] = "mixed"
    drafter: Literal["absent", "silent", "none", "some"] = "some"
    tokens: Literal["many", "few", "edges"] = "edges"


CASE = RowsCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "points": (0, 1, 97),
    "config": ("served", "partial", "mixed"),
    "drafter": ("absent", "silent", "none", "some"),
    "tokens": ("many", "few", "edges"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"points": (1, 1021)}
RANDOM_CASES = 20

_BASE = RowsCase()
REGRESSIONS: tuple[str, ...] = (
    # A full context over every token of the batch would be tens of TiB.
    _BASE.varied(config="served", tokens="many").id,
    _BASE.varied(config="served").id,
    _BASE.varied(config="partial").id,
    _BASE.varied(config="served", drafter="silent", tokens="many").id,
)


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, RowsCase)
    return outside(case, {"points": (0, 100_000)})


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, RowsCase)
    return case.points > 20_000


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors in guarded storages, the same on every machine."""
    assert isinstance(case, RowsCase)
    draw = Draw(case.seed, case.op)
    shape = (case.points,)
    magnitude = draw.integers("magnitude", shape, 0, 11)
    sequences = draw.integers("sequences", shape, 0, 1 << 20) % (1 << magnitude) + 1
    known = {
        "absent": torch.full(shape, NO_DRAFTER), "silent": torch.full(shape, MISSING), "none": torch.zeros(shape),
        "some": draw.integers("drafted", shape, 1, 8),
    }  # fmt: skip
    drafted = known[case.drafter].to(torch.int64)
    at_once = sequences * (1 + drafted.clamp(min=0))
    tokens = {
        "many": draw.integers("many", shape, 8192, 16385),
        "few": draw.integers("few", shape, 0, 1 << 20) % (sequences + 1),
        "edges": (at_once + draw.integers("beside", shape, -1, 2)).clamp(min=0),
    }[case.tokens]
    # Of what is missing, every kind: the lookup, the whole configuration, the scheduler's part, its number, and a zero.
    lack = draw.integers("lack", shape, 0, 5)
    if case.config == "mixed":
        lack = torch.where(draw.chance("known", shape, 1, 2), 5, lack)
    elif case.config == "served":
        lack = torch.full(shape, 5)
    config = torch.tensor([LOOKUP_FAILS, NO_CONFIG, NO_SCHEDULER, SERVED, SERVED, SERVED])[lack]
    sequences = torch.where(lack == 3, MISSING, torch.where(lack == 4, 0, sequences))
    return Inputs(
        batched_tokens=guarded_copy(tokens), config=guarded_copy(config), sequences=guarded_copy(sequences),
        drafted=guarded_copy(drafted), out=guarded(shape, torch.int64),
    )  # fmt: skip
