"""What do we ask of the padding of query heads to what a kernel takes, and of the way back?

Kernels exist for few numbers of heads. Queries get more heads, and of what the kernel returns the real heads are taken.
See `oracle.dense_mla.pad_heads`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int64, Shaped

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import far_gap, guarded, guarded_copy
from cases.production import Served

Target = Literal["decode", "round_robin", "prefill", "double", "odd"]
ROUND_ROBIN_HEADS = (16, 32, 64, 128)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}
# Width of a query head and of an output head.
_WIDTHS = {"small": (48, 32), "latent": (576, 512), "odd": (27, 19)}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Both ways of one call: queries on their way to a kernel of `kernel_heads` heads, and what it returned.

    query: any strides but for its last one, which is 1. kernel_out, kernel_lse: a kernel's answer for all of its heads;
    prefill has no log-sum-exp. target: whose number of heads it is; `double` and `odd` are nobody's.
    """

    query: Shaped[torch.Tensor, "rows heads width"]
    kernel_out: Float[torch.Tensor, "rows kernel_heads out_width"]
    kernel_lse: Float32[torch.Tensor, "rows kernel_heads"] | None
    kernel_heads: int
    target: Target


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The padded queries, the real heads of the kernel's answer, and how they lie in memory.

    forms: 1 or 0 for: the padded queries are packed, they are the memory of the given ones, `out` is a view of the
    kernel's, `lse` is.
    """

    padded: Shaped[torch.Tensor, "rows kernel_heads width"]
    out: Float[torch.Tensor, "rows heads out_width"]
    lse: Float32[torch.Tensor, "rows heads"] | None
    forms: Int64[torch.Tensor, " 4"]


WRITABLE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PadCase(Case):
    """The axes of the padding.

    target: the kernel that sets the number of heads, or twice the heads, or one more than that. width: of the heads.
    layout: `row_gaps` and `head_gaps` memory between rows and heads; `reserved` rows with room for the kernel's heads;
    `wide_reserved` the same, with gaps between the heads; `far` rows 2^31 elements apart in all.
    """

    op: ClassVar[str] = "dense_mla.pad_heads"

    rows: int = 3
    heads: int = 12
    target: Literal["decode", "round_robin", "prefill", "double", "odd"] = "decode"
    width: Literal["small", "latent", "odd"] = "small"
    dtype: Literal["bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fnuz"] = "bfloat16"
    layout: Literal["contiguous", "row_gaps", "head_gaps", "reserved", "wide_reserved", "far"] = "contiguous"


CASE = PadCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "rows": (0, 1, 3, 33),
    "heads": (1, 2, 8, 12, 16, 24, 65, 96),
    "target": ("decode", "round_robin", "prefill", "double", "odd"),
    "width": ("small", "latent", "odd"),
    "dtype": ("bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fnuz"),
    "layout": ("contiguous", "row_gaps", "head_gaps", "reserved"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "heads": (1, 2, 3, 4, 6, 8, 12, 15, 16, 17, 24, 32, 48, 64, 65, 80, 96, 112, 127, 128),
}
RANDOM_CASES = 12

_BASE = PadCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(heads=8).id,
    _BASE.varied(heads=96, target="round_robin").id,
    # Real heads of the round-robin kernel that do not stand in front.
    _BASE.varied(heads=2, target="round_robin").id,
    _BASE.varied(heads=4, target="round_robin").id,
    _BASE.varied(heads=8, target="round_robin").id,
    _BASE.varied(heads=8, target="prefill", dtype="float8_e4m3fn").id,
    _BASE.varied(heads=24, target="prefill", dtype="float8_e4m3fn").id,
    _BASE.varied(heads=12, layout="wide_reserved").id,
    _BASE.varied(heads=12, layout="far").id,
)

PRODUCTION: tuple[Served, ...] = (
    Served(PadCase(rows=128, heads=12, width="latent")),
    Served(PadCase(rows=128, heads=24, width="latent", target="round_robin")),
    Served(PadCase(rows=128, heads=24, width="latent", target="prefill", dtype="float8_e4m3fn")),
    Served(PadCase(rows=128, heads=24, width="latent", target="prefill", dtype="float8_e4m3fnuz")),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"rows": (0, 1 << 14), "heads": (1, 1 << 10)}


def forbid(case: PadCase) -> list[str]:
    """Every reason why no such call exists."""
    reasons = outside(case, _BOUNDS)
    if case.target == "round_robin" and case.heads > 128:
        reasons.append(f"heads={case.heads}: no round-robin kernel has so many")
    if case.target == "prefill" and case.dtype not in ("float8_e4m3fn", "float8_e4m3fnuz"):
        reasons.append(f"dtype={case.dtype}: the prefill kernel takes float8")
    if case.layout == "far" and (case.rows < 3 or case.dtype == "float32"):
        reasons.append("layout=far: needs three rows, and elements of one or two bytes")
    return reasons


def heavy(case: PadCase) -> bool:
    """Whether the case takes more than about a second in an interpreter."""
    return case.rows * case.heads > 10_000


def kernel_heads(target: Target, heads: int) -> int:
    """How many heads a target takes for so many real ones."""
    if target == "double":
        return 2 * heads
    if target == "odd":
        return 2 * heads + 1
    if target == "round_robin":
        return next(native for native in ROUND_ROBIN_HEADS if native >= heads)
    return -(-heads // 16) * 16


def build(case: PadCase) -> Inputs:
    """The inputs of a case; every element is any bit pattern, NaN codes and infinities among them."""
    draw = Draw(case.seed, case.op)
    many = kernel_heads(case.target, case.heads)
    width, out_width = _WIDTHS[case.width]
    gaps: tuple[int, ...] = {
        "contiguous": (),
        "row_gaps": (24,),
        "head_gaps": (0, 5),
        "reserved": ((many - case.heads) * width,),
        "wide_reserved": ((many - case.heads) * 2 * width, width),
        "far": (),
    }[case.layout]
    if case.layout == "far":
        gaps = (far_gap(case.rows, case.heads * width),)
    return Inputs(
        query=_bits(draw, "query", (case.rows, case.heads, width), _DTYPES[case.dtype], gaps),
        kernel_out=_bits(draw, "out", (case.rows, many, out_width), torch.bfloat16),
        kernel_lse=None if case.target == "prefill" else _bits(draw, "lse", (case.rows, many), torch.float32),
        kernel_heads=many,
        target=case.target,
    )


def _bits(
    draw: Draw, name: str, shape: tuple[int, ...], dtype: torch.dtype, gaps: tuple[int, ...] = ()
) -> torch.Tensor:
    wide = draw.integers(name, (*shape[:-1], shape[-1] * dtype.itemsize), 0, 256).to(torch.uint8)
    if 0 in shape:
        return guarded(shape, dtype, gaps=gaps)
    return guarded_copy(wide.view(dtype), gaps=gaps)
