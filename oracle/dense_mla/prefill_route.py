"""Which prefills of dense MLA run over FP8 casts?

Those for which all of this holds:

    configuration    gfx950; AITER has both the kernel that attends and the one that reduces; the cache's setting is `fp8`,
                     `fp8_e4m3` or `fp8_e5m2`; the model computes in bfloat16, which the kernel writes whatever it is given
    layer            up to 128 query heads, or a multiple of 16
    batch            there are prefill tokens, and none of them has a context, which the kernel would leave out

Work is planned for these and for no others; the others take the ordinary route. Where one of these should write its output
in codes of a scale, it is refused: the kernel knows no scale, and the ordinary route does.

Source: the dense ROCm MLA backend of vLLM, its metadata builder and `forward_mha`. The layer itself does not ask for the
type of the model; that the builder plans nothing keeps it from the kernel.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.dense_mla.prefill_route import ROUTES, Cache, Inputs, Outputs, Prefill
from cases.memory import guarded
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

_ORDINARY, _FLOAT8, _REFUSED = range(len(ROUTES))
_QUANTISED: tuple[Cache, ...] = ("fp8", "fp8_e4m3", "fp8_e5m2")


@dataclasses.dataclass(frozen=True)
class Faults:
    """Which conditions count, and what follows; the defaults are right."""

    ignored: frozenset[str] = frozenset()
    spelling: bool = False
    sixteens: bool = False
    planned_all: bool = False
    scale_dropped: bool = False
    scale_refused: bool = False
    never: bool = False


RIGHT = Faults()


def conditions(inputs: Inputs, batch: Prefill, faults: Faults = RIGHT) -> dict[str, bool]:
    """What must hold, by name."""
    heads = batch.heads % 16 == 0 if faults.sixteens else batch.heads <= 128 or batch.heads % 16 == 0
    return {
        "gfx950": inputs.arch == "gfx950",
        "attention kernel": inputs.attends,
        "reduction kernel": inputs.reduces,
        "float8 cache": inputs.cache == "fp8" if faults.spelling else inputs.cache in _QUANTISED,
        "bfloat16 model": inputs.model == "bfloat16",
        "heads": heads,
        "prefill tokens": batch.tokens,
        "no context": not batch.context,
    }


def _decided(inputs: Inputs, faults: Faults) -> Outputs:
    rows = []
    for batch in inputs.batches:
        found = conditions(inputs, batch, faults)
        taken = all(holds or name in faults.ignored for name, holds in found.items()) and not faults.never
        route = _FLOAT8 if taken and batch.tokens else _ORDINARY
        if batch.scaled and not faults.scale_dropped and (route == _FLOAT8 or faults.scale_refused):
            route = _REFUSED
        others = all(holds for name, holds in found.items() if name != "no context")
        planned = taken or (faults.planned_all and others)
        rows.append((int(planned), route))
    return Outputs(torch.tensor(rows, dtype=torch.int64).reshape(-1, 2))


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Plan and route of all batches; `dtype` changes nothing.

    Raises ValueError for heads that no layer has.
    """
    del dtype
    for batch in inputs.batches:
        if batch.heads < 1 or (batch.heads > 128 and batch.heads % 16):
            raise ValueError(f"heads={batch.heads}: should be 1 to 128, or a multiple of 16")
    return _decided(inputs, RIGHT)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """A check for the plans and one for the routes, which name what the first batch that goes wrong breaks."""
    del precision
    want, got = reference(inputs).out, outputs.out
    if got.shape != want.shape or got.dtype != want.dtype:
        return (exact("decisions", got, want),)
    checks = []
    for column, name in enumerate(("planned", "route")):
        mine, right = got[:, column].contiguous(), want[:, column].contiguous()
        check = exact(name, mine, right)
        if not check.passed and check.where:
            why = _why(inputs, inputs.batches[check.where[0]], int(right[check.where[0]]) if column else None)
            check = exact(name, mine, right, why=why)
        checks.append(check)
    return tuple(checks)


def _why(inputs: Inputs, batch: Prefill, route: int | None) -> str:
    broken = [name for name, holds in conditions(inputs, batch).items() if not holds]
    scaled = ", with a scaled output" if batch.scaled else ""
    word = f" ({ROUTES[route]})" if route is not None else ""
    return f"{batch.heads} heads{scaled}, {'without: ' + ', '.join(broken) if broken else 'all conditions hold'}{word}"


def _edited(inputs: Inputs, batches: tuple[Prefill, ...], **changes: object) -> Inputs:
    out = guarded((len(batches), 2), torch.int64)
    return dataclasses.replace(inputs, batches=batches, out=out, **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _reversed(inputs: Inputs) -> Inputs:
    return _edited(inputs, inputs.batches[::-1])


def _flipped(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.out.flip(0))


def _spelled_otherwise(inputs: Inputs) -> Inputs:
    others: dict[Cache, Cache] = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e5m2", "fp8_e5m2": "fp8", "auto": "bfloat16"}
    return _edited(inputs, inputs.batches, cache=others.get(inputs.cache, "auto"))


def _heads_padded(inputs: Inputs) -> Inputs | None:
    batches = tuple(dataclasses.replace(batch, heads=-(-batch.heads // 16) * 16) for batch in inputs.batches)
    return None if batches == inputs.batches else _edited(inputs, batches)


def _unscaled(inputs: Inputs) -> Inputs:
    return _edited(inputs, tuple(dataclasses.replace(batch, scaled=False) for batch in inputs.batches))


def _taken_after_all(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    planned, route = first.out.unbind(1)
    return Outputs(torch.stack((planned, torch.where(route == _REFUSED, _FLOAT8, route)), 1))


LAWS: tuple[Law, ...] = (
    Law("R1 batches reversed", "a batch is decided by itself", _reversed, _flipped, "bitwise"),
    Law("R2 setting spelled otherwise", "all spellings of a setting mean the same", _spelled_otherwise, _same, "bitwise"),
    Law("R3 heads padded", "heads that are padded go where those go that they are padded to", _heads_padded, _same,
        "bitwise"),
    Law("R4 outputs unscaled", "what is refused for its output's scale is taken without one", _unscaled, _taken_after_all,
        "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, *ignored: str, **faults: bool) -> Mutant:
    wrong = Faults(ignored=frozenset(ignored), **faults)
    return Mutant(name, pitfall, lambda inputs: _decided(inputs, wrong))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("float16-model-taken", "a model in float16 were one in bfloat16", "bfloat16 model"),
    _mutant("context-left-out", "tokens with a context had none", "no context"),
    _mutant("planned-for-contexts", "work were planned for tokens with a context too", planned_all=True),
    _mutant("output-scale-dropped", "a scaled output were written without its scale", scale_dropped=True),
    _mutant("scaled-outputs-refused-everywhere", "the ordinary route knew no scale either", scale_refused=True),
    _mutant("every-architecture", "the kernels ran everywhere", "gfx950"),
    _mutant("attention-kernel-not-looked-for", "AITER always had the kernel that attends", "attention kernel"),
    _mutant("reduction-kernel-not-looked-for", "AITER always had the kernel that reduces", "reduction kernel"),
    _mutant("every-cache", "the cache's type did not matter", "float8 cache"),
    _mutant("one-spelling-only", "only one spelling of the setting meant a float8 cache", spelling=True),
    _mutant("sixteens-only", "heads were not padded", sixteens=True),
    _mutant("planned-without-tokens", "work were planned for batches without prefill", "prefill tokens"),
    _mutant("never", "there were no such kernels", never=True),
)  # fmt: skip


def _by_exclusion(inputs: Inputs) -> Outputs:
    """All batches first, of which every condition takes some away."""
    count = len(inputs.batches)
    out = torch.zeros((count, 2), dtype=torch.int64)
    whole = inputs.arch == "gfx950" and inputs.attends and inputs.reduces and inputs.model == "bfloat16"
    left = set(range(count)) if whole and inputs.cache.startswith("fp8") else set()
    tests: tuple[Callable[[Prefill], bool], ...] = (lambda b: b.tokens, lambda b: not b.context)
    for test in tests:
        left = {point for point in left if test(inputs.batches[point])}
    for point in left:
        out[point] = torch.tensor((1, _REFUSED if inputs.batches[point].scaled else _FLOAT8))
    return Outputs(out)


_EXACT = Precision(probability="exact", note="decisions")
HONEST: tuple[Honest, ...] = (
    Honest("condition-by-condition", _EXACT, reference),
    Honest("by-exclusion", _EXACT, _by_exclusion),
)
