"""What do we ask of the decision to run a prefill of dense MLA over FP8 casts?

The decision depends on a configuration and the form of a batch, never on what tensors hold. A case is a configuration; its
points are all batches and numbers of heads. See `oracle.dense_mla.prefill_route` for the conditions.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Int64

from cases.case import Axis, Case
from cases.memory import guarded

Arch = Literal["gfx942", "gfx950", "other"]
Cache = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
Model = Literal["bfloat16", "float16"]
ROUTES = ("ordinary", "float8", "refused")


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A batch of a layer: its query heads, whether there are prefill tokens, whether some of them have a context in the
    cache, and whether the output is wanted in codes of a scale."""

    heads: int
    tokens: bool
    context: bool
    scaled: bool


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The batches, a point each.

    attends, reduces: whether AITER has the kernel that attends and the one that reduces. cache: as the setting is spelled.
    model: the type of activations. `out` receives the answer.
    """

    arch: Arch
    attends: bool
    reduces: bool
    cache: Cache
    model: Model
    batches: tuple[Prefill, ...]
    out: Int64[torch.Tensor, "points 2"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """For each point 1 or 0 for whether the work of FP8 kernels is planned, and a code of `ROUTES` for where the prefill
    goes, `ordinary` where there are no prefill tokens."""

    out: Int64[torch.Tensor, "points 2"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillRouteCase(Case):
    """The axes of the decision.

    kernels: which of AITER's two kernels there are. heads: of the layer, `few` 1 to 15, `many` 16 to 128, `large` multiples
    of 16 beyond.
    """

    op: ClassVar[str] = "dense_mla.prefill_route"

    arch: Literal["gfx942", "gfx950", "other"] = "gfx950"
    kernels: Literal["both", "attention", "reduction", "none"] = "both"
    cache: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "fp8"
    model: Literal["bfloat16", "float16"] = "bfloat16"
    heads: Literal["few", "many", "large"] = "many"


CASE = PrefillRouteCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "arch": ("gfx942", "gfx950", "other"),
    "kernels": ("both", "attention", "reduction", "none"),
    "cache": ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "model": ("bfloat16", "float16"),
    "heads": ("few", "many", "large"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {}
RANDOM_CASES = 0

_BASE = PrefillRouteCase()
REGRESSIONS: tuple[str, ...] = (
    *(_BASE.varied(heads=heads).id for heads in ("few", "many", "large")),
    *(_BASE.varied(cache=cache).id for cache in ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")),
    # Whose bytes a kernel would take for those of another type.
    _BASE.varied(model="float16").id,
    *(_BASE.varied(arch=arch).id for arch in ("gfx942", "other")),
    *(_BASE.varied(kernels=kernels).id for kernels in ("attention", "reduction", "none")),
)
_HEADS: Mapping[str, tuple[int, ...]] = {
    "few": (1, 2, 6, 8, 12, 15),
    "many": (16, 17, 24, 32, 48, 72, 80, 127, 128),
    "large": (144, 256),
}


def forbid(case: PrefillRouteCase) -> list[str]:
    """Every reason why there is no such configuration: none."""
    del case
    return []


def heavy(case: PrefillRouteCase) -> bool:
    """Whether it takes more than a few seconds on two CPU cores: no case does."""
    del case
    return False


def build(case: PrefillRouteCase) -> Inputs:
    """The inputs of a case: every batch that the configuration can meet."""
    forms = [(True, context, scaled) for context in (False, True) for scaled in (False, True)]
    batches = tuple(
        Prefill(heads, *form) for heads in _HEADS[case.heads] for form in (*forms, (False, False, False))
    )  # fmt: skip
    return Inputs(
        arch=case.arch,
        attends=case.kernels in ("both", "attention"),
        reduces=case.kernels in ("both", "reduction"),
        cache=case.cache,
        model=case.model,
        batches=batches,
        out=guarded((len(batches), 2), torch.int64),
    )
