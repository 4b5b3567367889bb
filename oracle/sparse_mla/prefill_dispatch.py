"""Which sparse prefill calls go to AITER's OPUS kernel?

Those for which all of this holds, in any order:

    the architecture is gfx950; 1024 queries or more; the query lies on a device
    out has the query's shape, strides, dtype and device
    keys have the query's number of lanes, its dtype and its device
    the query is bfloat16 or float16; its lanes, and those of the keys, stand next to each other
    the sink is there, has exactly one float32 logit per head, and lies on the query's device

A call takes the first logits of a longer sink before it asks, and goes to OPUS only where AITER is switched on for MLA
and the kernel can be imported. 1024 is where OPUS became the faster one, not a bound of what it can do.
Source: `_can_use_aiter_sparse_prefill_opus` and `rocm_sparse_attn_prefill` of vLLM's ROCm sparse attention.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from cases.memory import map_tensors, moved
from cases.precision import Precision
from cases.sparse_mla.prefill_dispatch import FEWEST_QUERIES, Arch, Form, Inputs, Outputs, PrefillCall
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

_FLOATS = ("bfloat16", "float16")


def conditions(call: PrefillCall, arch: Arch, sliced: bool) -> Mapping[str, bool]:
    """What must hold, by name; `sliced` takes the first logits of a longer sink."""
    query, keys, out = call.query, call.keys, call.out
    sink = _first_logits(call) if sliced else call.sink
    return {
        "gfx950": arch == "gfx950",
        "enough queries": query.shape[0] >= FEWEST_QUERIES,
        "query on a device": query.device != "cpu",
        "out shape": out.shape == query.shape,
        "out strides": out.strides == query.strides,
        "out dtype": out.dtype == query.dtype,
        "out device": out.device == query.device,
        "key lanes": keys.shape[-1] == query.shape[-1],
        "keys dtype": keys.dtype == query.dtype,
        "keys device": keys.device == query.device,
        "query dtype": query.dtype in _FLOATS,
        "query lanes adjacent": query.strides[-1] == 1,
        "key lanes adjacent": keys.strides[-1] == 1,
        "sink": sink is not None,
        "sink shape": sink is None or sink.shape == (query.shape[1],),
        "sink dtype": sink is None or sink.dtype == "float32",
        "sink device": sink is None or sink.device == query.device,
        "opus at hand": call.opus or not sliced,
    }


def _first_logits(call: PrefillCall) -> Form | None:
    if call.sink is None:
        return None
    length = min(call.sink.shape[0], call.query.shape[1])
    return dataclasses.replace(call.sink, shape=(length, *call.sink.shape[1:]))


def _answer(inputs: Inputs, rule: Callable[[PrefillCall], bool]) -> Outputs:
    return Outputs(torch.tensor([rule(call) for call in inputs.calls], dtype=torch.bool))


def _dispatched(inputs: Inputs) -> Outputs:
    sliced = inputs.question == "call"
    return _answer(inputs, lambda call: all(conditions(call, inputs.arch, sliced).values()))


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Whether each call goes to OPUS; `dtype` has no say.

    Raises ValueError for a query or an out without three dimensions, and for keys without two.
    """
    del dtype
    for call in inputs.calls:
        for name, form, rank in (("query", call.query, 3), ("keys", call.keys, 2), ("out", call.out, 3)):
            if len(form.shape) != rank:
                raise ValueError(f"{name} has {len(form.shape)} dimensions: should have {rank}")
    return _dispatched(inputs)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """One check, bit for bit, which names the conditions that a call breaks."""
    del precision
    want = reference(inputs).out
    check = exact("opus", outputs.out, want, why="")
    if check.passed or len(check.where) != 1:
        return (check,)
    found = conditions(inputs.calls[check.where[0]], inputs.arch, inputs.question == "call")
    broken = [name for name, holds in found.items() if not holds]
    why = f"the call breaks: {', '.join(broken)}" if broken else "the call keeps every condition"
    return (exact("opus", outputs.out, want, why=why),)


def _edited(inputs: Inputs, change: Callable[[PrefillCall], PrefillCall]) -> Inputs:
    fresh = map_tensors(inputs, lambda tensor: moved(tensor, "cpu"))
    return dataclasses.replace(fresh, calls=tuple(map(change, inputs.calls)))


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _forms(call: PrefillCall, change: Callable[[Form], Form]) -> PrefillCall:
    sink = None if call.sink is None else change(call.sink)
    return PrefillCall(change(call.query), change(call.keys), change(call.out), sink, call.opus)


def _devices_swapped(inputs: Inputs) -> Inputs:
    def other(form: Form) -> Form:
        if form.device == "cpu":
            return form
        return dataclasses.replace(form, device="cuda:1" if form.device == "cuda:0" else "cuda:0")

    return _edited(inputs, lambda call: _forms(call, other))


def _dtypes_swapped(inputs: Inputs) -> Inputs:
    swap = {"bfloat16": "float16", "float16": "bfloat16"}

    def other(form: Form) -> Form:
        return dataclasses.replace(form, dtype=swap.get(form.dtype, form.dtype))

    return _edited(inputs, lambda call: _forms(call, other))


def _more_keys(inputs: Inputs) -> Inputs:
    def change(call: PrefillCall) -> PrefillCall:
        keys = call.keys
        row, lane = keys.strides
        return dataclasses.replace(
            call, keys=dataclasses.replace(keys, shape=(keys.shape[0] + 77, keys.shape[1]), strides=(row + 3, lane))
        )

    return _edited(inputs, change)


def _rows_apart(inputs: Inputs) -> Inputs:
    def apart(form: Form) -> Form:
        return dataclasses.replace(form, strides=(form.strides[0] + 24, *form.strides[1:]))

    return _edited(inputs, lambda call: dataclasses.replace(call, query=apart(call.query), out=apart(call.out)))


def _sinks_apart(inputs: Inputs) -> Inputs:
    def change(call: PrefillCall) -> PrefillCall:
        if call.sink is None:
            return call
        return dataclasses.replace(
            call, sink=dataclasses.replace(call.sink, strides=(call.sink.strides[0] + 5, *call.sink.strides[1:]))
        )

    return _edited(inputs, change)


def _reversed(inputs: Inputs) -> Inputs:
    fresh = _edited(inputs, lambda call: call)
    return dataclasses.replace(fresh, calls=fresh.calls[::-1])


LAWS: tuple[Law, ...] = (
    Law("O1 devices swapped", "which of the devices it is does not matter", _devices_swapped, _same, "bitwise"),
    Law("O2 dtypes swapped", "bfloat16 and float16 are treated alike", _dtypes_swapped, _same, "bitwise"),
    Law("O3 more keys", "neither the number of keys nor the distance of their rows matters", _more_keys, _same, "bitwise"),
    Law("O4 rows apart", "rows may lie apart as long as query and out agree", _rows_apart, _same, "bitwise"),
    Law("O5 sinks apart", "the logits of the sink need not be adjacent", _sinks_apart, _same, "bitwise"),
    Law("O6 points reversed", "a point's answer does not depend on its neighbours", _reversed,
        lambda first, inputs, edited: Outputs(first.out.flip(0)), "bitwise"),
)  # fmt: skip


def _forgets(name: str) -> Mutant:
    """The decision without one of its conditions."""

    def answer(inputs: Inputs) -> Outputs:
        def rule(call: PrefillCall) -> bool:
            found = conditions(call, inputs.arch, inputs.question == "call")
            return all(holds for condition, holds in found.items() if condition != name)

        return _answer(inputs, rule)

    return Mutant(f"forgets-{name.replace(' ', '-')}", f"it did not matter whether this holds: {name}", answer)


def _instead(name: str, pitfall: str, condition: str, rule: Callable[[PrefillCall], bool]) -> Mutant:
    """The decision with one of its conditions replaced."""

    def answer(inputs: Inputs) -> Outputs:
        def decide(call: PrefillCall) -> bool:
            found = conditions(call, inputs.arch, inputs.question == "call")
            return all({**found, condition: rule(call)}.values())

        return _answer(inputs, decide)

    return Mutant(name, pitfall, answer)


def _sliced_otherwise(inputs: Inputs) -> Outputs:
    sliced = inputs.question == "call"

    def rule(call: PrefillCall) -> bool:
        found = conditions(call, inputs.arch, not sliced)
        return all({**found, "opus at hand": call.opus or not sliced}.values())

    return _answer(inputs, rule)


def _is_dense(form: Form) -> bool:
    step = 1
    for size, stride in zip(reversed(form.shape), reversed(form.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= max(size, 1)
    return True


def _same_but_for_single_sizes(call: PrefillCall) -> bool:
    pairs = zip(call.query.shape, call.query.strides, call.out.strides, strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in pairs)


_NAMES = (
    "gfx950", "enough queries", "query on a device", "out shape", "out strides", "out dtype", "out device", "key lanes",
    "keys dtype", "keys device", "query dtype", "query lanes adjacent", "key lanes adjacent", "sink", "sink shape",
    "sink dtype", "sink device", "opus at hand",
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = (
    *map(_forgets, _NAMES),
    _instead("more-than-1024", "OPUS got more than 1024 queries only", "enough queries",
             lambda call: call.query.shape[0] > FEWEST_QUERIES),
    _instead("from-1023", "OPUS got 1023 queries too", "enough queries",
             lambda call: call.query.shape[0] >= FEWEST_QUERIES - 1),
    _instead("bfloat16-only", "OPUS took bfloat16 only", "query dtype", lambda call: call.query.dtype == "bfloat16"),
    _instead("dense-query-only", "query rows may not lie apart", "out strides",
             lambda call: call.out.strides == call.query.strides and _is_dense(call.query)),
    _instead("strides-of-single-heads-ignored", "strides of sizes of one did not count", "out strides",
             _same_but_for_single_sizes),
    _instead("sink-long-enough", "a sink that is too long fitted", "sink shape",
             lambda call: call.sink is None or call.sink.shape[0] >= call.query.shape[1]),
    Mutant("sink-sliced-in-the-other-question", "the sink were sliced by the predicate and not by the call",
           _sliced_otherwise),
    Mutant("never", "OPUS were never used", lambda inputs: _answer(inputs, lambda call: False)),
)  # fmt: skip


def _by_pairs(inputs: Inputs) -> Outputs:
    """The same by comparing whole descriptions."""

    def rule(call: PrefillCall) -> bool:
        query, heads = call.query, call.query.shape[1]
        logits = call.sink
        if inputs.question == "call":
            if not call.opus:
                return False
            if logits is not None and logits.shape[0] > heads:
                logits = dataclasses.replace(logits, shape=(heads, *logits.shape[1:]))
        if inputs.arch != "gfx950" or query.shape[0] < FEWEST_QUERIES or query.device == "cpu":
            return False
        if call.out != query or query.dtype not in _FLOATS or logits is None:
            return False
        row = (query.shape[-1], 1, query.dtype, query.device)
        if (call.keys.shape[-1], call.keys.strides[-1], call.keys.dtype, call.keys.device) != row:
            return False
        return query.strides[-1] == 1 and dataclasses.replace(logits, strides=()) == Form(
            (heads,), (), "float32", query.device
        )

    return _answer(inputs, rule)


HONEST: tuple[Honest, ...] = (
    Honest("all-conditions", Precision(probability="exact", note="a decision"), reference),
    Honest("whole-forms", Precision(probability="exact", note="a decision"), _by_pairs),
)
