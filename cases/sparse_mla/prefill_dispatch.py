"""What do we ask of the decision to hand a sparse prefill to AITER's OPUS kernel?

The decision reads the form of tensors and never their contents, so a case holds forms. It asks about many calls at once,
its points. See `oracle.sparse_mla.prefill_dispatch` for the conditions.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool

from cases.case import Axis, Case, outside
from cases.draw import Draw
from cases.memory import guarded

Arch = Literal["gfx942", "gfx950", "other"]
Device = Literal["cpu", "cuda:0", "cuda:1"]
Question = Literal["predicate", "call"]

FEWEST_QUERIES = 1024


@dataclasses.dataclass(frozen=True)
class Form:
    """What can be known of a tensor without looking into it; strides count elements, the dtype is torch's name."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """One call: query and out [queries, heads, lanes], keys [rows, lanes], the sink one logit per head, or None.

    opus: whether AITER is switched on for MLA and its OPUS kernel can be imported.
    """

    query: Form
    keys: Form
    out: Form
    sink: Form | None
    opus: bool


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The calls, a point each. question: `predicate` whether the forms fit OPUS, the sink taken as it is; `call` whether
    a prefill with these tensors goes to OPUS, which takes the first `heads` logits of a sink. `out` receives the answer.
    """

    calls: tuple[PrefillCall, ...]
    out: Bool[torch.Tensor, " points"]
    arch: Arch
    question: Question


@dataclasses.dataclass(frozen=True)
class Outputs:
    """True for the calls that go to OPUS."""

    out: Bool[torch.Tensor, " points"]


WRITABLE: tuple[str, ...] = ("out",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchCase(Case):
    """The axes of the decision.

    points: calls in the case. queries: `few`, `edge` next to the fewest that OPUS gets, `many`. broken: how many of the
    conditions a call breaks, each time others. layout: `strided` leaves gaps between query rows, in `out` likewise.
    sink: as long as there are heads, or in `longer` up to three logits longer.
    """

    op: ClassVar[str] = "sparse_mla.prefill_dispatch"

    arch: Literal["gfx942", "gfx950", "other"] = "gfx950"
    question: Literal["predicate", "call"] = "predicate"
    points: int = 101
    queries: Literal["few", "edge", "many"] = "many"
    broken: Literal["none", "one", "two"] = "one"
    layout: Literal["contiguous", "strided"] = "contiguous"
    sink: Literal["fitting", "longer"] = "fitting"


CASE = DispatchCase

AXES: Mapping[str, tuple[Axis, ...]] = {
    "arch": ("gfx942", "gfx950", "other"),
    "question": ("predicate", "call"),
    "points": (0, 1, 101),
    "queries": ("few", "edge", "many"),
    "broken": ("none", "one", "two"),
    "layout": ("contiguous", "strided"),
    "sink": ("fitting", "longer"),
}
NIGHTLY: Mapping[str, tuple[Axis, ...]] = {"points": (1, 503)}
RANDOM_CASES = 20

_BASE = DispatchCase()
REGRESSIONS: tuple[str, ...] = (
    _BASE.id,
    _BASE.varied(question="call").id,
    _BASE.varied(question="call", sink="longer", broken="none").id,
    _BASE.varied(sink="longer", broken="none").id,
    _BASE.varied(queries="edge", broken="none").id,
    _BASE.varied(layout="strided", broken="none").id,
    _BASE.varied(arch="gfx942", broken="none").id,
)


def forbid(case: Case) -> list[str]:
    """Every reason why no such call exists."""
    assert isinstance(case, DispatchCase)
    return outside(case, {"points": (0, 100_000)})


def heavy(case: Case) -> bool:
    """Whether it takes more than a few seconds on two CPU cores."""
    assert isinstance(case, DispatchCase)
    return case.points > 1000


def build(case: Case) -> Inputs:
    """The inputs of a case, the same on every machine."""
    assert isinstance(case, DispatchCase)
    draw = Draw(case.seed, case.op)
    calls = tuple(_call(case, draw.within(str(number))) for number in range(case.points))
    return Inputs(calls, guarded((case.points,), torch.bool, fill=1), case.arch, case.question)


def dense(shape: tuple[int, ...], gaps: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The strides of a row-major tensor with `gaps` unused elements after each run, outermost first."""
    strides, step = [1], 1
    padded = [*gaps, *([0] * (len(shape) - 1 - len(gaps)))]
    for size, gap in zip(reversed(shape[1:]), reversed(padded), strict=True):
        step = step * max(1, size) + gap
        strides.insert(0, step)
    return tuple(strides)


def _call(case: DispatchCase, draw: Draw) -> PrefillCall:
    def pick(name: str, *values: int) -> int:
        return values[int(draw.integers(name, (1,), 0, len(values)))]

    queries = {
        "few": pick("few", 0, 1, 7, 512, 1000),
        "edge": FEWEST_QUERIES + pick("edge", -1, 0, 0, 0, 1),
        "many": pick("many", 1024, 1025, 2048, 8192, 40000),
    }[case.queries]
    heads, lanes = pick("heads", 1, 8, 16, 64, 128), pick("lanes", 512, 128, 576)
    dtype = ("bfloat16", "float16")[pick("dtype", 0, 1)]
    gaps = (pick("row gap", 0, 64, 8), pick("head gap", 0, 8)) if case.layout == "strided" else ()
    query = Form((queries, heads, lanes), dense((queries, heads, lanes), gaps), dtype, "cuda:0")
    rows = (pick("rows", 0, 1, 4096), lanes)
    logits = heads + (pick("logits", 1, 2, 3) if case.sink == "longer" else 0)
    call = PrefillCall(
        query=query,
        keys=Form(rows, dense(rows, (pick("key gap", 0, 16),)), dtype, "cuda:0"),
        out=query,
        sink=Form((logits,), (pick("sink stride", 1, 2),), "float32", "cuda:0"),
        opus=True,
    )
    order = draw.permutation("fault", len(_FAULTS)).tolist()
    for number in order[: ("none", "one", "two").index(case.broken)]:
        call = _FAULTS[number](call, pick("variant", 0, 1))
    return call


def _all(call: PrefillCall, **changes: str) -> PrefillCall:
    """The call with query, keys and out changed alike."""
    query, keys, out = (dataclasses.replace(form, **changes) for form in (call.query, call.keys, call.out))  # type: ignore[arg-type]
    return dataclasses.replace(call, query=query, keys=keys, out=out)


def _everything_on_cpu(call: PrefillCall, variant: int) -> PrefillCall:
    sink = call.sink and dataclasses.replace(call.sink, device="cpu")
    return dataclasses.replace(_all(call, device="cpu"), sink=sink)


def _lane_stride(form: Form, stride: int) -> Form:
    return dataclasses.replace(form, strides=tuple(stride * step for step in form.strides))


def _out(call: PrefillCall, **changes: object) -> PrefillCall:
    return dataclasses.replace(call, out=dataclasses.replace(call.out, **changes))  # type: ignore[arg-type]


def _keys(call: PrefillCall, **changes: object) -> PrefillCall:
    return dataclasses.replace(call, keys=dataclasses.replace(call.keys, **changes))  # type: ignore[arg-type]


def _sink(call: PrefillCall, **changes: object) -> PrefillCall:
    if call.sink is None:
        return call
    return dataclasses.replace(call, sink=dataclasses.replace(call.sink, **changes))  # type: ignore[arg-type]


def _narrow_out(call: PrefillCall, variant: int) -> PrefillCall:
    """An output of fewer lanes, or of one row less."""
    queries, heads, lanes = call.out.shape
    shape = (queries, heads, lanes - 64) if variant else (max(queries - 1, 0), heads, lanes)
    return _out(call, shape=shape)


def _other_strides(call: PrefillCall, variant: int) -> PrefillCall:
    """Rows or heads of the output further apart than those of the query."""
    row, head, lane = call.out.strides
    return _out(call, strides=(row + 64, head, lane) if variant else (row + 8 * call.out.shape[1], head + 8, lane))


def _lone_head(call: PrefillCall, variant: int) -> PrefillCall:
    """One head, whose stride differs although it moves no element."""
    one = dataclasses.replace(call.query, shape=(call.query.shape[0], 1, call.query.shape[2]))
    row, head, lane = one.strides
    out = dataclasses.replace(one, strides=(row, head + 8 * (variant + 1), lane))
    return _sink(dataclasses.replace(call, query=one, out=out), shape=(1,), strides=(1,))


def _wide_lanes(call: PrefillCall, variant: int) -> PrefillCall:
    return dataclasses.replace(call, query=_lane_stride(call.query, 2), out=_lane_stride(call.out, 2))


_FAULTS: tuple[Callable[[PrefillCall, int], PrefillCall], ...] = (
    _everything_on_cpu,
    _narrow_out,
    _other_strides,
    _lone_head,
    _wide_lanes,
    lambda call, variant: _keys(call, shape=(call.keys.shape[0], call.keys.shape[1] + (64 if variant else -64))),
    lambda call, variant: _all(call, dtype="float32" if variant else "float8_e4m3fn"),
    lambda call, variant: _keys(call, dtype="float32" if variant else "float8_e4m3fn"),
    lambda call, variant: _out(call, dtype="float32" if variant else "float8_e4m3fn"),
    lambda call, variant: _keys(call, device="cuda:1" if variant else "cpu"),
    lambda call, variant: _out(call, device="cuda:1" if variant else "cpu"),
    lambda call, variant: dataclasses.replace(call, keys=_lane_stride(call.keys, 2)),
    lambda call, variant: dataclasses.replace(call, sink=None),
    lambda call, variant: dataclasses.replace(call, opus=False),
    lambda call, variant: _sink(call, shape=(call.query.shape[1] - 1,), strides=(1,)),
    lambda call, variant: _sink(call, shape=(call.query.shape[1] + 1,), strides=(1,)),
    lambda call, variant: _sink(call, shape=(call.query.shape[1], 1), strides=(1, 1)),
    lambda call, variant: _sink(call, dtype="float64" if variant else call.query.dtype),
    lambda call, variant: _sink(call, device="cuda:1" if variant else "cpu"),
)
