"""Into how many splits must one call of sparse MLA decode cut its keys?

cu compute units, T queries, H heads, base = max(1, T * ceil(H / 16)) programs before splitting; m and e the average
entries per query of the main and the extra index tensor, their capacity over max(1, T). For s splits

    w(s)  = ceil(base * s / cu)                                          waves
    it(s) = [m > 0] ceil(ceil(m / s) / 32) + [e > 0] ceil(ceil(e / s) / 32)     key tiles a program walks

gfx942: of s = 1..16 the first that minimises w(s) * (1/s + 0.04). If it exceeds 1 and m > 0 or e > 0: the smallest s
with the same w and the same it.

gfx950: n = min(32, max(1, ceil(2 cu / base))). If base >= 16 and n > 4 and it(4) <= 3: 4. If 16 <= base < 64: with
o = max(1, floor(cu / base)) and waves = 1 if it(o) <= 9 else 2, n = min(n, max(1, floor(waves * cu / base))). If
base >= 16 and n > 1: the smallest s <= n with the same w and the same it. Otherwise n.

Adaptive (gfx950, base >= 16 and S = n > 4; otherwise S): per query, with m and e its own lengths: 4 if it(4) <= 3; else
o if base < 64 and 4 < o < S and it(o) <= 3; else S.

Unquantised cache with at most L keys a query: 1 if L < 512, else between 1 and ceil(L / 32), the rule of gfx950 there
and of gfx942 elsewhere with m = L and e = 0.

The source computes costs and averages in float64 and takes a cost as lower only if it is so by 1e-9. Fractions give the
same: two costs that differ do so by at least 1 / (25 * 16 * 15), and an average over T queries lies on a multiple of s,
or at least 1 / T from it; float64 would decide otherwise only for some 10^10 programs or entries. No two costs are
equal where they are lowest, so which of them would win shows nowhere.
Sources: `_decode_num_splits`, `_decode_gfx950_num_splits`, `_sparse_attn_decode_gfx950_partial_kernel` and
`rocm_sparse_decode_bf16_num_splits` of vLLM's ROCm backend.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import msgspec
import torch

from cases.memory import map_tensors, moved
from cases.precision import Precision
from cases.sparse_mla.decode_splits import Arch, Inputs, Outputs
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

HEADS_PER_PROGRAM = 16
KEYS_PER_TILE = 32
_OVERHEAD = Fraction(1, 25)


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where a rule can be got wrong; the defaults are right."""

    snap_down: bool = True
    snap_least: bool = True
    floor_waves: bool = False
    overhead: Fraction = _OVERHEAD
    heads_per_program: int = HEADS_PER_PROGRAM
    tile: int = KEYS_PER_TILE
    joined: bool = False
    from_lengths: bool = False
    other_arch: bool = False
    compute_units: int | None = None
    snap_tiles: bool = True
    snap_waves: bool = True
    most: int = 32
    one_wave_up: bool = False
    adaptive_always: bool = False
    adaptive_from_average: bool = False
    adaptive_never_four: bool = False
    adaptive_never_one_wave: bool = False
    adaptive_main_only: bool = False
    fewest_keys: int = 512
    beyond_tiles: bool = False


RIGHT = Faults()


@dataclasses.dataclass(frozen=True)
class _Call:
    """The quantities of the formulas."""

    base: int
    main: Fraction
    extra: Fraction
    units: int
    faults: Faults

    def waves(self, splits: int) -> int:
        if self.faults.floor_waves:
            return max(1, self.base * splits // self.units)
        return math.ceil(Fraction(self.base * splits, self.units))

    def tiles(self, splits: int) -> int:
        segments = (self.main + self.extra,) if self.faults.joined else (self.main, self.extra)
        return sum(math.ceil(Fraction(math.ceil(part / splits), self.faults.tile)) for part in segments if part > 0)

    def same(self, a: int, b: int) -> bool:
        waves = not self.faults.snap_waves or self.waves(a) == self.waves(b)
        return waves and (not self.faults.snap_tiles or self.tiles(a) == self.tiles(b))

    def snapped(self, splits: int) -> int:
        if not self.faults.snap_down:
            return splits
        for fewer in range(1, splits) if self.faults.snap_least else range(splits - 1, 0, -1):
            if self.same(fewer, splits):
                return fewer
        return splits

    @property
    def one_wave(self) -> int:
        whole = -(-self.units // self.base) if self.faults.one_wave_up else self.units // self.base
        return max(1, whole)


def splits_gfx942(call: _Call) -> int:
    """The rule for gfx942."""
    best, best_cost = 1, None
    for s in range(1, 17):
        cost = call.waves(s) * (Fraction(1, s) + call.faults.overhead)
        if best_cost is None or cost < best_cost:
            best, best_cost = s, cost
    if best > 1 and (call.main > 0 or call.extra > 0):
        return call.snapped(best)
    return best


def splits_gfx950(call: _Call) -> int:
    """The rule for gfx950."""
    n = min(call.faults.most, max(1, math.ceil(Fraction(2 * call.units, call.base))))
    if call.base >= 16 and n > 4 and call.tiles(4) <= 3:
        return 4
    if 16 <= call.base < 64:
        waves = 1 if call.tiles(call.one_wave) <= 9 else 2
        n = min(n, max(1, waves * call.units // call.base))
    if call.base >= 16 and n > 1:
        return call.snapped(n)
    return n


def adaptive_count(call: _Call, splits: int, main: int, extra: int) -> int:
    """The split count of one query with `main` and `extra` entries where `splits` were launched."""
    if call.base < 16 and not call.faults.adaptive_always:
        return splits
    if splits <= 4:
        return splits
    query = dataclasses.replace(call, main=Fraction(main), extra=Fraction(extra))
    if call.faults.adaptive_from_average:
        query = call
    if call.faults.adaptive_main_only:
        query = dataclasses.replace(query, extra=Fraction(0))
    if query.tiles(4) <= 3 and not call.faults.adaptive_never_four:
        return 4
    one_wave = call.base < 64 and not call.faults.adaptive_never_one_wave
    if one_wave and 4 < call.one_wave < splits and query.tiles(call.one_wave) <= 3:
        return call.one_wave
    return splits


def split_count(
    rule: str, arch: Arch, units: int, point: tuple[int, int, int, int, int, int], faults: Faults = RIGHT
) -> int:
    """The answer at one point: queries, heads, main and extra capacity, main and extra length."""
    queries, heads, main_capacity, extra_capacity, main_length, extra_length = point
    over = max(1, queries)
    if faults.from_lengths:
        main_capacity, extra_capacity = main_length * over, extra_length * over
    base = max(1, queries * math.ceil(Fraction(heads, faults.heads_per_program)))
    call = _Call(
        base, Fraction(main_capacity, over), Fraction(extra_capacity, over), faults.compute_units or units, faults
    )
    on_gfx950 = (arch == "gfx950") != faults.other_arch
    if rule == "bfloat16_cache":
        if main_length < faults.fewest_keys:
            return 1
        call = dataclasses.replace(call, main=Fraction(main_length), extra=Fraction(0))
        chosen = splits_gfx950(call) if on_gfx950 else splits_gfx942(call)
        tiles = math.ceil(Fraction(main_length, faults.tile))
        return chosen if faults.beyond_tiles else max(1, min(chosen, tiles))
    if arch == "other":
        return 1
    launched = splits_gfx950(call) if on_gfx950 else splits_gfx942(call)
    return adaptive_count(call, launched, main_length, extra_length) if rule == "adaptive" else launched


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The split count of every point, exactly; `dtype` has no say in integers."""
    del dtype
    return _answer(inputs, RIGHT)


def _points(inputs: Inputs) -> list[tuple[int, int, int, int, int, int]]:
    columns = (
        inputs.queries, inputs.heads, inputs.main_capacity, inputs.extra_capacity, inputs.main_length,
        inputs.extra_length,
    )  # fmt: skip
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _answer(inputs: Inputs, faults: Faults) -> Outputs:
    counts = [split_count(inputs.rule, inputs.arch, inputs.compute_units, point, faults) for point in _points(inputs)]
    return Outputs(torch.tensor(counts, dtype=torch.int64))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """One check, bit for bit; `precision` has no say in integers."""
    del precision
    want = reference(inputs).out
    check = exact("splits", outputs.out, want, why=f"the rule {inputs.rule} of {inputs.arch} has one answer")
    if check.passed or len(check.where) != 1:
        return (check,)
    names = ("queries", "heads", "main capacity", "extra capacity", "main length", "extra length")
    point = ", ".join(f"{name} {value}" for name, value in zip(names, _points(inputs)[check.where[0]], strict=True))
    what = f"{check.why}; the call: {point}, {inputs.compute_units} compute units"
    return (msgspec.structs.replace(check, why=what),)


def _edited(inputs: Inputs, compute_units: int | None = None, **columns: torch.Tensor) -> Inputs:
    """Fresh inputs with some columns replaced."""
    fresh = map_tensors(inputs, lambda tensor: moved(tensor, "cpu"))
    for name, values in columns.items():
        getattr(fresh, name).copy_(values)
    return dataclasses.replace(fresh, compute_units=compute_units or inputs.compute_units)


def _blocks(inputs: Inputs) -> torch.Tensor:
    return (inputs.heads + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM


def _heads_as_queries(inputs: Inputs) -> Inputs:
    blocks = _blocks(inputs)
    return _edited(
        inputs,
        queries=inputs.queries * blocks,
        heads=torch.ones_like(blocks),
        main_capacity=inputs.main_capacity * torch.where(inputs.queries > 0, blocks, 1),
        extra_capacity=inputs.extra_capacity * torch.where(inputs.queries > 0, blocks, 1),
    )


def _heads_filled(inputs: Inputs) -> Inputs:
    return _edited(inputs, heads=_blocks(inputs) * HEADS_PER_PROGRAM)


def _reversed(inputs: Inputs) -> Inputs:
    names = ("queries", "heads", "main_capacity", "extra_capacity", "main_length", "extra_length")
    return _edited(inputs, **{name: getattr(inputs, name).flip(0) for name in names})


def _other_lengths(inputs: Inputs) -> Inputs | None:
    if inputs.rule != "decode":
        return None
    return _edited(inputs, main_length=inputs.main_length // 2, extra_length=inputs.extra_length + 77)


def _device_doubled(inputs: Inputs) -> Inputs | None:
    # A call without queries keeps its one program.
    if inputs.arch != "gfx942" or bool((inputs.queries == 0).any()):
        return None
    return _edited(
        inputs,
        compute_units=2 * inputs.compute_units,
        queries=2 * inputs.queries,
        main_capacity=2 * inputs.main_capacity,
        extra_capacity=2 * inputs.extra_capacity,
    )


def _unchanged(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _flipped(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.out.flip(0))


LAWS: tuple[Law, ...] = (
    Law("H1 heads as queries", "only queries times blocks of 16 heads counts", _heads_as_queries, _unchanged, "bitwise"),
    Law("H2 head blocks filled up", "a block of heads costs the same full or not", _heads_filled, _unchanged, "bitwise"),
    Law("H3 points reversed", "a point's answer does not depend on its neighbours", _reversed, _flipped, "bitwise"),
    Law("H4 lengths changed", "a launch goes by capacity, never by what is used", _other_lengths, _unchanged, "bitwise"),
    Law("H5 device doubled", "twice the programs on twice the units make the same waves", _device_doubled, _unchanged,
        "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, faults: Faults, rules: tuple[str, ...] = ()) -> Mutant:
    def answer(inputs: Inputs) -> Outputs | None:
        return _answer(inputs, faults) if not rules or inputs.rule in rules else None

    return Mutant(name, pitfall, answer)


def _always(count: Callable[[Inputs], int], name: str, pitfall: str) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: Outputs(torch.full_like(inputs.queries, count(inputs))))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("no-snap-down", "counts that save no tile and no wave were kept", Faults(snap_down=False)),
    _mutant("snap-one-step", "of the counts that are as good, the largest was taken", Faults(snap_least=False)),
    _mutant("waves-by-floor", "a wave that is not full did not count", Faults(floor_waves=True)),
    _mutant("used-entries-for-capacity", "the averages came from the entries in use", Faults(from_lengths=True),
            ("decode", "adaptive")),
    _mutant("no-overhead", "a wave cost nothing beyond its keys", Faults(overhead=Fraction(0))),
    _mutant("heads-unblocked", "every head was a program of its own", Faults(heads_per_program=1)),
    _mutant("segments-joined", "both segments were cut as one", Faults(joined=True)),
    _mutant("tile-of-64", "a key tile had 64 keys", Faults(tile=64)),
    _mutant("other-architecture", "gfx942 and gfx950 had each other's rule", Faults(other_arch=True)),
    _mutant("fallback-compute-units", "the device had 256 compute units", Faults(compute_units=256)),
    _mutant("snap-by-waves-only", "only waves decided whether fewer splits are as good", Faults(snap_tiles=False)),
    _mutant("snap-by-tiles-only", "only tiles decided whether fewer splits are as good", Faults(snap_waves=False)),
    _mutant("sixteen-at-most", "gfx950 stopped at 16 splits", Faults(most=16)),
    _mutant("one-wave-rounded-up", "the count that fills the device once was rounded up", Faults(one_wave_up=True)),
    _mutant("adaptive-in-small-calls", "calls of fewer than 16 programs chose per query too",
            Faults(adaptive_always=True), ("adaptive",)),
    _mutant("adaptive-by-average", "every query chose by the average lengths", Faults(adaptive_from_average=True),
            ("adaptive",)),
    _mutant("adaptive-never-four", "a query never chose four splits", Faults(adaptive_never_four=True), ("adaptive",)),
    _mutant("adaptive-never-one-wave", "a query never chose the count that fills the device once",
            Faults(adaptive_never_one_wave=True), ("adaptive",)),
    _mutant("adaptive-by-main-only", "a query chose by its main entries alone", Faults(adaptive_main_only=True),
            ("adaptive",)),
    _mutant("more-splits-than-tiles", "an unquantised cache was cut into more splits than it has key tiles",
            Faults(beyond_tiles=True), ("bfloat16_cache",)),
    _mutant("split-from-256", "an unquantised cache was split from 256 keys on", Faults(fewest_keys=256),
            ("bfloat16_cache",)),
    _always(lambda _: 1, "never-split", "nothing was ever split"),
)  # fmt: skip


def _in_float64(inputs: Inputs) -> Outputs:
    """The rules in binary floating point, as their source computes them."""
    counts = []
    for queries, heads, main, extra, main_length, extra_length in _points(inputs):
        over = max(1, queries)
        averages = (main / over, extra / over)
        counts.append(_float_count(inputs, max(1, queries * -(-heads // 16)), averages, (main_length, extra_length)))
    return Outputs(torch.tensor(counts, dtype=torch.int64))


def _float_count(inputs: Inputs, base: int, averages: tuple[float, float], lengths: tuple[int, int]) -> int:
    units = inputs.compute_units
    unquantised = inputs.rule == "bfloat16_cache"
    if unquantised:
        averages = (float(lengths[0]), 0.0)
    if unquantised and lengths[0] < 512:
        return 1

    def key(s: int, segments: tuple[float, float] = averages) -> tuple[int, int]:
        return -(-base * s // units), sum(math.ceil(math.ceil(part / s) / 32) for part in segments if part > 0)

    one_wave = max(1, units // base)
    if inputs.arch == "gfx950":
        n = min(32, max(1, math.ceil(2 * units / base)))
        if base >= 16 and n > 4 and key(4)[1] <= 3:
            n = 4
        else:
            if 16 <= base < 64:
                n = min(n, max(1, (1 if key(one_wave)[1] <= 9 else 2) * units // base))
            if base >= 16:
                n = next(s for s in range(1, n + 1) if key(s) == key(n))
    elif inputs.arch == "gfx942" or unquantised:
        n, lowest = 1, math.inf
        for s in range(1, 17):
            cost = key(s)[0] * (1.0 / s + 0.04)
            if cost < lowest - 1e-9:
                n, lowest = s, cost
        if any(averages):
            n = next(s for s in range(1, n + 1) if key(s) == key(n))
    else:
        n = 1
    if unquantised:
        return max(1, min(n, math.ceil(lengths[0] / 32)))
    if inputs.rule == "adaptive" and base >= 16 and n > 4:
        own = (float(lengths[0]), float(lengths[1]))
        if key(4, own)[1] <= 3:
            return 4
        if base < 64 and 4 < one_wave < n and key(one_wave, own)[1] <= 3:
            return one_wave
    return n


HONEST: tuple[Honest, ...] = (
    Honest("float64-costs", Precision(score="float64", note="costs and averages in float64"), _in_float64),
)
