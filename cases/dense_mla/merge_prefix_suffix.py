"""What do we ask of the merge of a prompt's attention over its cached prefix with that over its new tokens?

See `oracle.dense_mla.merge_prefix_suffix` for the formula.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Shaped

from cases.case import Axis, Case, outside
from cases.dense_mla.merge_parts import exponents
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

WRITABLE: tuple[str, ...] = ("out", "out_lse")

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip
CODES: Mapping[str, torch.dtype] = {
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call. The log-sum-exps are [heads, tokens] with any strides, natural; -inf and +inf mark an empty side.

    prefix, suffix: of one dtype, neighbouring lanes, the same stride from head to head, and from token to token as many of
    those as there are heads. out: so too, with a stride of its own; the dtype of the parts, or 8-bit codes. context: tokens
    before it have a prefix, the others copy their suffix; None where all have one. out_scale: one number, given with codes
    only, which stand for the answer over it. out_lse: None where nobody asks.
    """

    prefix: Float[torch.Tensor, "tokens heads lanes"]
    prefix_lse: Float32[torch.Tensor, "heads tokens"]
    suffix: Float[torch.Tensor, "tokens heads lanes"]
    suffix_lse: Float32[torch.Tensor, "heads tokens"]
    context: int | None
    out: Shaped[torch.Tensor, "tokens heads lanes"]
    out_lse: Float32[torch.Tensor, "heads tokens"] | None
    out_scale: Float32[torch.Tensor, ""] | None


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The merged tokens, and their natural log-sum-exp where it was asked for."""

    out: Shaped[torch.Tensor, "tokens heads lanes"]
    lse: Float32[torch.Tensor, "heads tokens"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCase(Case):
    """The axes of a merge of prefix and suffix.

    output: `same` as the parts', or codes. scale: of codes; `small` saturates some. context: the tokens with a prefix.
    weights: see `cases.dense_mla.merge_parts`. empty: which side has no key; `mixed` neither, one, the other and both in
    turn. mark: the log-sum-exp of an empty side. void: what an empty side holds. layout: `wide_heads` are the first lanes of
    wider heads; lse_layout: how [heads, tokens] lies in memory, `mixed` one way for the prefix and another for the suffix.
    reach: whose tokens lie beyond 2^31 elements.
    """

    op: ClassVar[str] = "dense_mla.merge_prefix_suffix"

    tokens: int = 5
    heads: int = 3
    lanes: int = 128
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    output: Literal["same", "float8_e4m3fn", "float8_e4m3fnuz"] = "same"
    scale: Literal["one", "odd", "small", "large"] = "one"
    context: Literal["none_given", "all", "some", "one", "zero"] = "some"
    weights: Literal["near", "equal", "spread", "dominant", "underflow", "large", "deep", "hairline"] = "near"
    empty: Literal["neither", "prefix", "suffix", "both", "mixed"] = "neither"
    mark: Literal["minus_infinity", "plus_infinity"] = "minus_infinity"
    void: Literal["finite", "nan"] = "finite"
    layout: Literal["contiguous", "wide_heads"] = "contiguous"
    lse_layout: Literal["contiguous", "transposed", "mixed", "spread"] = "contiguous"
    out_layout: Literal["contiguous", "wide_heads"] = "contiguous"
    out_lse: Literal["absent", "contiguous", "transposed"] = "contiguous"
    values: Literal["randn", "integer_exact", "cancelling", "wide", "subnormal"] = "randn"
    reach: Literal["near", "far_parts", "far_out"] = "near"


CASE = PrefixCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (1, 2, 5, 9),
    "heads": (1, 3, 8),
    "lanes": (128, 64, 512, 96, 5),
    "dtype": ("bfloat16", "float16", "float32"),
    "output": ("same", "float8_e4m3fn", "float8_e4m3fnuz"),
    "scale": ("one", "odd", "small", "large"),
    "context": ("none_given", "all", "some", "one", "zero"),
    "weights": ("near", "equal", "spread", "dominant", "underflow", "large", "deep", "hairline"),
    "empty": ("neither", "prefix", "suffix", "both", "mixed"),
    "mark": ("minus_infinity", "plus_infinity"),
    "void": ("finite", "nan"),
    "layout": ("contiguous", "wide_heads"),
    "lse_layout": ("contiguous", "transposed", "mixed", "spread"),
    "out_layout": ("contiguous", "wide_heads"),
    "out_lse": ("absent", "contiguous", "transposed"),
    "values": ("randn", "integer_exact", "cancelling", "wide", "subnormal"),
    "reach": ("near",),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "tokens": (1, 2, 5, 9, 64),
    "heads": (1, 3, 8, 16, 128),
    "lanes": (128, 64, 192, 256, 512, 96, 5),
}
RANDOM_CASES = 12

_BASE = PrefixCase()
_FAR = _BASE.varied(tokens=9, heads=2, lanes=64, context="all")
REGRESSIONS: tuple[str, ...] = (
    _BASE.varied(tokens=0).id,
    # What chunked prefill of a rank of eight merges, and the same with a quantised answer.
    _BASE.varied(tokens=9, heads=16, lse_layout="transposed", context="some", empty="mixed").id,
    _BASE.varied(tokens=9, heads=16, output="float8_e4m3fn", scale="odd", out_lse="absent").id,
    # Sides of keys with equal scores share exactly.
    _BASE.varied(weights="equal", values="integer_exact", dtype="float32", context="all").id,
    # An empty side whose vector is NaN.
    _BASE.varied(empty="mixed", void="nan", tokens=9).id,
    # Tokens that a product of 32 bits does not reach.
    _FAR.varied(reach="far_parts").id,
    _FAR.varied(reach="far_out").id,
)

PRODUCTION: tuple[Served, ...] = (
    *(Served(CASE(tokens=64, heads=heads, lanes=128)) for heads in (16, 128)),
    Served(CASE(tokens=64, heads=128, lanes=128, output="float8_e4m3fn", out_lse="contiguous")),
    Served(CASE(tokens=64, heads=128, lanes=128, output="float8_e4m3fnuz", out_lse="contiguous")),
    Served(CASE(tokens=64, heads=128, lanes=512)),
)


_BOUNDS: Mapping[str, tuple[int, int]] = {"tokens": (0, 1 << 16), "heads": (1, 1024), "lanes": (1, 1024)}


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, PrefixCase)
    reasons = outside(case, _BOUNDS)
    if case.scale != "one" and case.output == "same":
        reasons.append(f"scale={case.scale} needs an output of codes")
    if case.reach == "far_parts" and (case.layout != "contiguous" or case.dtype == "float32" or case.tokens < 9):
        reasons.append("reach=far_parts needs nine tokens of two-byte elements and has a layout of its own")
    if case.reach == "far_out" and (case.out_layout != "contiguous" or case.output != "same" or case.tokens < 9):
        reasons.append("reach=far_out needs nine tokens and has an out_layout of its own")
    if case.reach == "far_out" and case.dtype == "float32":
        reasons.append("reach=far_out needs elements of two bytes")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it."""
    assert isinstance(case, PrefixCase)
    return case.tokens * case.heads > 400


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, PrefixCase)
    draw = Draw(case.seed, case.op)
    dtype = DTYPES[case.dtype]
    context = {"none_given": case.tokens, "all": case.tokens, "some": case.tokens // 2, "one": 1, "zero": 0}[
        case.context
    ]
    sides = _values(case, draw)
    lse = exponents(case.weights, (2, case.heads, case.tokens), draw)
    for side, empty in enumerate(_empty(case)):
        lse[side, :, empty] = -math.inf if case.mark == "minus_infinity" else math.inf
        # A token without a prefix has a suffix, or nobody could ask for it.
        voided = empty & (torch.arange(case.tokens) < context) if side else empty
        sides[side, voided] = math.nan if case.void == "nan" else 3.0
    # Of tokens without a context nobody reads the prefix.
    sides[0, context:] = math.nan
    lse[0, :, context:] = math.nan
    parts = []
    for side in range(2):
        memory = _memory(case, dtype, case.layout, case.reach == "far_parts")
        memory.copy_(sides[side])
        parts.append(memory)
    number = {"one": 1.0, "odd": 0.37, "small": 0.004, "large": 3.7}[case.scale]
    lse_layouts = {"mixed": ("contiguous", "transposed")}.get(case.lse_layout, (case.lse_layout, case.lse_layout))
    out_dtype = dtype if case.output == "same" else CODES[case.output]
    return Inputs(
        prefix=parts[0],
        prefix_lse=_lse(lse[0], lse_layouts[0]),
        suffix=parts[1],
        suffix_lse=_lse(lse[1], lse_layouts[1]),
        context=None if case.context == "none_given" else context,
        out=_memory(case, out_dtype, case.out_layout, case.reach == "far_out"),
        out_lse=None if case.out_lse == "absent" else _lse_memory(case.heads, case.tokens, case.out_lse),
        out_scale=None if case.output == "same" else guarded_copy(torch.tensor([number]))[0],
    )


def _empty(case: PrefixCase) -> list[torch.Tensor]:
    """For prefix and suffix, bool [tokens]: which tokens see no key there."""
    kind = (torch.arange(case.tokens) + case.seed) % 4
    every = torch.ones(case.tokens, dtype=torch.bool)
    sides = {
        "neither": (~every, ~every), "prefix": (every, ~every), "suffix": (~every, every), "both": (every, every),
        "mixed": ((kind == 1) | (kind == 3), (kind == 2) | (kind == 3)),
    }  # fmt: skip
    return list(sides[case.empty])


def _values(case: PrefixCase, draw: Draw) -> torch.Tensor:
    """Prefix and suffix [2, tokens, heads, lanes] in fp32, before they are rounded to the dtype."""
    shape = (2, case.tokens, case.heads, case.lanes)
    values = draw.normal_like("values", shape)
    if case.values == "integer_exact":
        return draw.integers("small", shape, -127, 128).float() / 32
    if case.values == "cancelling":
        return (values[:1] + values / 64) * torch.tensor([1.0, -1.0])[:, None, None, None]
    if case.values == "wide":
        return torch.ldexp(values, draw.integers("scale", (2, case.tokens, 1, 1), -10, 11))
    if case.values == "subnormal":
        return values * {"float16": 2.0**-18, "bfloat16": 2.0**-126, "float32": 2.0**-126}[case.dtype]
    return values


def _memory(case: PrefixCase, dtype: torch.dtype, layout: str, far: bool) -> torch.Tensor:
    """Guarded, poisoned memory in which heads lie evenly, across tokens too."""
    tokens, heads, lanes = case.tokens, case.heads, case.lanes
    if far:
        return guarded((tokens, heads, lanes), dtype, gaps=(0, -(-(1 << 31) // ((tokens - 1) * heads)) - lanes))
    if layout == "wide_heads":
        return guarded((tokens, heads, lanes), dtype, gaps=(0, 64))
    return guarded((tokens, heads, lanes), dtype)


def _lse(values: torch.Tensor, layout: str) -> torch.Tensor:
    memory = _lse_memory(values.shape[0], values.shape[1], layout)
    memory.copy_(values)
    return memory


def _lse_memory(heads: int, tokens: int, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return guarded((tokens, heads), torch.float32, gaps=(3,)).T
    if layout == "spread":
        return guarded((heads, 2 * tokens), torch.float32, gaps=(5,))[:, ::2]
    return guarded((heads, tokens), torch.float32)
