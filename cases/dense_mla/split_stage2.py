"""What do we ask of the second stage of split decode, which merges what every split of a request's keys left behind?

See `oracle.dense_mla.split_stage2` for the formula, `granularity_of` for how keys are handed to splits and `packed_answer`
for the calls in which there is nothing to merge.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int32

from cases.case import Axis, Case, outside
from cases.dense_mla.merge_parts import exponents
from cases.draw import Draw
from cases.memory import guarded, guarded_copy
from cases.production import Served

WRITABLE: tuple[str, ...] = ("out",)

DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The call: partials and log-sum-exps are contiguous, `splits` is the most any request has.

    partials: normalised outputs of the splits. lse: their natural log-sum-exps, -inf where a row sees no key of its split.
    query_starts, key_starts, split_starts: first row, key and split of each request, and the end of the last. exported: how
    many splits the first stage filled, where it says so. granularity: keys below which a request is not split further.
    answer_packed: nothing was split, and the memory of the partials begins with the answer itself, [rows, heads, lanes] in
    the dtype of `out`. out: lanes are neighbours.
    """

    partials: Float32[torch.Tensor, "rows splits heads lanes"]
    lse: Float32[torch.Tensor, "rows splits heads 1"]
    query_starts: Int32[torch.Tensor, " requests_plus_one"]
    key_starts: Int32[torch.Tensor, " requests_plus_one"]
    split_starts: Int32[torch.Tensor, " requests_plus_one"]
    exported: Int32[torch.Tensor, " requests"] | None
    granularity: int
    answer_packed: bool
    out: Float[torch.Tensor, "rows heads lanes"]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The merged rows and their natural log-sum-exp, -inf where a row has no key; without meaning where the answer was
    packed."""

    out: Float[torch.Tensor, "rows heads lanes"]
    lse: Float32[torch.Tensor, "rows heads"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCase(Case):
    """The axes of the second stage of split decode.

    queries: rows of a request. formats: of query and cache, which decide the granularity. splits: of the request that has
    most; split_counts: `ragged` gives the others fewer. lengths: keys of a request; `edges` about whole multiples of the
    granularity. exported: `fewer` in some requests than the lengths let expect; `untouched` the most there can be. masked:
    rows that see no key of their last splits, as the early rows of a block. weights: see `cases.dense_mla.merge_parts`.
    garbage: what slots hold that nobody filled; `stale` outweighs what counts.
    """

    op: ClassVar[str] = "dense_mla.split_stage2"

    requests: int = 3
    queries: int = 1
    heads: int = 8
    lanes: int = 64
    formats: Literal["bfloat16", "float8", "mixed"] = "bfloat16"
    splits: int = 4
    split_counts: Literal["equal", "ragged"] = "equal"
    lengths: Literal["edges", "short", "long", "empty", "mixed"] = "edges"
    exported: Literal["absent", "as_expected", "fewer", "untouched"] = "as_expected"
    masked: Literal["none", "last"] = "none"
    weights: Literal["near", "equal", "spread", "dominant", "underflow", "staircase", "large", "deep"] = "near"
    values: Literal["randn", "integer_exact", "onehot_exact", "cancelling", "wide"] = "randn"
    garbage: Literal["nan", "huge", "stale"] = "nan"
    output: Literal["bfloat16", "float16"] = "bfloat16"
    out_layout: Literal["contiguous", "padded"] = "contiguous"


CASE = StageCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "requests": (1, 3, 6),
    "queries": (1, 2, 3, 5, 8),
    "heads": (8, 16, 32, 64, 128, 1),
    "lanes": (64, 512, 128),
    "formats": ("bfloat16", "float8", "mixed"),
    "splits": (1, 2, 4, 7, 16),
    "split_counts": ("equal", "ragged"),
    "lengths": ("edges", "short", "long", "empty", "mixed"),
    "exported": ("absent", "as_expected", "fewer", "untouched"),
    "masked": ("none", "last"),
    "weights": ("near", "equal", "spread", "dominant", "underflow", "staircase", "large", "deep"),
    "values": ("randn", "integer_exact", "onehot_exact", "cancelling", "wide"),
    "garbage": ("nan", "huge", "stale"),
    "output": ("bfloat16", "float16"),
    "out_layout": ("contiguous", "padded"),
}

NIGHTLY: Mapping[str, tuple[Axis, ...]] = {
    "queries": (1, 2, 3, 4, 5, 6, 7, 8),
    "splits": (1, 2, 3, 4, 7, 8, 15, 16, 32),
}
RANDOM_CASES = 12

_BASE = StageCase()
REGRESSIONS: tuple[str, ...] = (
    # Several rows of a request, a number that is no power of two: each has its own answer.
    *(_BASE.varied(queries=queries, heads=1, lengths="long", values="onehot_exact").id for queries in (3, 5, 6, 7)),
    # One split and an answer that is there already, in half the bytes.
    _BASE.varied(splits=1, heads=3, queries=3).id,
    _BASE.varied(splits=1, heads=16, queries=1).id,
    # More splits than keys.
    _BASE.varied(splits=16, lengths="short", garbage="stale", exported="absent").id,
    # A request without keys among others.
    _BASE.varied(requests=6, lengths="mixed").id,
    _BASE.varied(weights="equal", values="integer_exact", lengths="long", heads=3).id,
)

PRODUCTION: tuple[Served, ...] = tuple(
    Served(CASE(requests=8, queries=queries, heads=heads, lanes=512, splits=splits))
    for queries, heads, splits in ((1, 16, 16), (1, 128, 8), (4, 16, 8), (2, 128, 4))
)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "requests": (1, 4096), "queries": (1, 64), "heads": (1, 128), "lanes": (1, 1024), "splits": (1, 64),
}  # fmt: skip


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, StageCase)
    reasons = outside(case, _BOUNDS)
    if case.splits == 1 and case.split_counts == "ragged":
        reasons.append("split_counts=ragged needs two splits")
    if case.splits == 1 and case.masked == "last":
        reasons.append("masked=last needs two splits")
    if case.splits == 1 and case.exported == "fewer":
        reasons.append("exported=fewer needs two splits")
    if case.splits == 1 and case.formats == "float8":
        reasons.append("splits=1, formats=float8: the first stage writes the answer to its place")
    if case.splits == 1 and case.queries == 4:
        reasons.append("splits=1, queries=4: the first stage writes the answer to its place")
    if case.splits == 1 and case.formats == "bfloat16" and case.heads in (8, 32):
        reasons.append(f"splits=1, heads={case.heads}: the first stage writes the answer to its place")
    return reasons


def heavy(case: Case) -> bool:
    """Whether two CPU cores need more than about a second for it."""
    assert isinstance(case, StageCase)
    return case.requests * case.queries * case.heads > 400


def granularity_of(heads: int, queries: int, formats: str) -> int:
    """The keys below which the first stage does not split a request further."""
    if (heads == 128 and formats == "float8") or (heads == 64 and formats == "bfloat16" and queries == 1):
        return 32
    return 64 if (heads in (8, 16) and queries == 1) or (heads == 8 and queries == 2) else 16


def packed_answer(heads: int, queries: int, splits: int) -> bool:
    """Whether the first stage left the answer itself: no request is split, and its kernel writes the output dtype."""
    return splits == 1 and not (heads in (8, 16) and queries == 1)


def build(case: Case) -> Inputs:
    """The inputs of a case: CPU tensors inside guarded, poisoned storages, the same bytes on every machine."""
    assert isinstance(case, StageCase)
    draw = Draw(case.seed, case.op)
    dtype = DTYPES[case.output]
    grain = granularity_of(case.heads, case.queries, case.formats)
    lengths = [_length(case, request, grain, draw) for request in range(case.requests)]
    counts = [case.splits] * case.requests
    if case.split_counts == "ragged":
        counts = [1 + (request * 5 + case.seed) % case.splits for request in range(case.requests)]
        counts[-1] = case.splits
    expected = [min(count, -(-length // grain)) for count, length in zip(counts, lengths, strict=True)]
    # A split that got no key: the first stage fills fewer than it could.
    fewer = [max(min(1, n), n - 1 - request % 2) for request, n in enumerate(expected)]
    filled = fewer if case.exported == "fewer" else expected
    exported = [case.splits] * case.requests if case.exported == "untouched" else filled
    rows = case.requests * case.queries
    live = torch.arange(case.splits) < torch.tensor(filled).repeat_interleave(case.queries)[:, None]
    shape = (case.splits, rows, case.heads)
    lse = exponents(case.weights, shape, draw).permute(1, 0, 2)
    if case.masked == "last":
        # The early rows of a block see none of the last splits' keys, but always one.
        early = (torch.arange(rows) % case.queries < case.queries - 1) | (case.queries == 1)
        last = torch.arange(case.splits) == torch.tensor(filled).repeat_interleave(case.queries)[:, None] - 1
        lse[early[:, None] & last & (torch.arange(case.splits) > 0)] = -math.inf
    values = _values(case, draw, rows)
    values[torch.isneginf(lse)] = math.nan
    lse[~live] = {"nan": math.nan, "huge": 3e38, "stale": 300.0}[case.garbage]
    values[~live] = {"nan": math.nan, "huge": 3e38, "stale": 5.0}[case.garbage]
    packed = packed_answer(case.heads, case.queries, case.splits)
    partials = guarded((rows, case.splits, case.heads, case.lanes), torch.float32)
    if packed:
        count = rows * case.heads * case.lanes
        partials.view(dtype).flatten()[:count].copy_(values[:, 0].flatten())
    else:
        partials.copy_(values)
    return Inputs(
        partials=partials,
        lse=guarded_copy(lse[..., None]),
        query_starts=guarded_copy(torch.arange(0, rows + 1, case.queries, dtype=torch.int32)),
        key_starts=guarded_copy(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)),
        split_starts=guarded_copy(torch.tensor([0, *counts]).cumsum(0).to(torch.int32)),
        exported=None if case.exported == "absent" else guarded_copy(torch.tensor(exported, dtype=torch.int32)),
        granularity=grain,
        answer_packed=packed,
        out=guarded(
            (rows, case.heads, case.lanes), dtype, gaps=(64, 8) if case.out_layout == "padded" else ()
        ),
    )  # fmt: skip


def _length(case: StageCase, request: int, grain: int, draw: Draw) -> int:
    """Keys of a request."""
    edges = (
        grain,
        grain + 1,
        2 * grain - 1,
        case.splits * grain,
        case.splits * grain + 1,
        1,
        (case.splits - 1) * grain + 1,
    )
    if case.lengths == "edges":
        return edges[(request + case.seed) % len(edges)]
    if case.lengths == "short":
        return 1 + int(draw.integers(f"length{request}", (1,), 0, 2 * grain))
    if case.lengths == "long":
        return case.splits * grain + int(draw.integers(f"length{request}", (1,), 0, 4000))
    if case.lengths == "mixed":
        return (0, 1, case.splits * grain + 3, grain)[(request + case.seed) % 4]
    return 0


def _values(case: StageCase, draw: Draw, rows: int) -> torch.Tensor:
    """The partials [rows, splits, heads, lanes]; split z of row r has a lane of its own where they are `onehot_exact`."""
    shape = (rows, case.splits, case.heads, case.lanes)
    split = torch.arange(case.splits)
    if case.values == "integer_exact":
        return draw.integers("small", shape, -127, 128).float() / 32
    if case.values == "onehot_exact":
        lane = (torch.arange(rows)[:, None] * 7 + split * 3) % case.lanes
        return (lane[..., None, None] == torch.arange(case.lanes)).float().expand(shape).clone()
    values = draw.normal_like("values", shape)
    if case.values == "cancelling":
        return (values[:, :1] + values / 64) * (1.0 - 2.0 * (split % 2))[:, None, None]
    if case.values == "wide":
        return torch.ldexp(values, draw.integers("scale", (case.splits, 1, 1), -10, 11))
    return values
