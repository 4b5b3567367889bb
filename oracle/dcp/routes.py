"""Which kernel does a batch of dense MLA decode go to, and what are planner and kernel told?

W ranks in turns of I tokens, H query heads over all ranks, S queries a request, Q a quantised cache. First the
configuration:

    rows possible      W > 1 and I == 1 and the kernel can be imported
    round robin        W > 1 and I == 1 and there is a drafter and gfx950; by the older rules only if it is selected.
                       It runs at 16, 32, 64 or 128 heads, the fewest that hold H; with more than 128 the older rules
                       refuse, the newer ones do so only if rows are impossible too, and go by rows otherwise.
    generic            by the newer rules on gfx942, W > 1 and I == 1, where rows do not fit into its shared memory:
                       quantised with H > 64, otherwise tiles of 128 tokens; or where rows are impossible. Those that
                       do not fit are not possible any more.
    most queries       1 + drafted tokens, or twice as many drafted where drafting is parallel; 1 where W > 1 and none of
                       the three is there (for rows: before the shared memory is looked at)

then the batch:

    route       plain if W == 1, S == 1 or not causal; else round robin if configured and S >= 3; else generic; else
                segmented rows; else the batch is refused. A plain kernel masks by local indices, which is wrong for a
                causal block of several queries over turns.
    gluon       H < 16, not Q, gfx950, mode not `asm`, at most 2 GiB of one layer's cache, and W == 1 (it returns no
                log-sum-exp, which ranks need): for S == 1 if 16 % H == 0 or the mode is `gluon`; for S > 1 if causal.
    plan        no gluon, no rows of their own, S <= most queries, and not causal or H >= 16 or S <= 4 or Q.
                Heads: the kernel's of round robin, else H rounded up to 16. Causal is what the batch is, but False for
                round robin, whose kernel masks by itself. The split cap is the number of compute units wherever round
                robin is configured, 0 elsewhere; the call of that kernel is told the same one.
    refused     not causal, S == 2, Q, unless H rounded up to 16 is 32, 64, 96 or 128

Rows of their own: pages are tiles (`oracle.dcp.verify_pages`) for segmented rows and blocks for the generic kernel; the
bound is the longest row of the batch and at least 1, or with graphs ceil(longest model / (W I)) I.
Source: the AITER MLA backend of vLLM's ROCm platform. There the gluon kernel for one query is taken with several ranks
too, whose merge then finds no log-sum-exp.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.dcp.routes import COLUMNS, REFUSALS, ROUTES, Batch, Configuration, Inputs, Outputs, served
from cases.memory import guarded
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.dcp.shards import held
from oracle.dcp.verify_pages import tile
from oracle.laws import Honest, Law, Mutant

_PLAIN, _SEGMENTED, _ROUND_ROBIN, _GENERIC = range(len(ROUTES))
_LARGEST_CACHE = 1 << 31


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where decisions can be got wrong; the defaults are right."""

    always_plain: bool = False
    interleaved_rows: bool = False
    round_robin_from: int = 3
    round_robin_anywhere: bool = False
    round_robin_undrafted: bool = False
    round_robin_never: bool = False
    selector_ignored: bool = False
    heads_never_refused: bool = False
    lone_rank_routed: bool = False
    memory_ignored: bool = False
    memory_for_all: bool = False
    generic_last: bool = False
    generic_in_tiles: bool = False
    masked_blocks_plain_only: bool = False
    most_queries_of_one: bool = False
    drafted_once: bool = False
    most_queries_kept: bool = False
    gluon_quantised: bool = False
    gluon_unbounded: bool = False
    gluon_below_bound: bool = False
    gluon_by_all_layers: bool = False
    gluon_of_ranks: bool = False
    gluon_verify_of_ranks: bool = False
    gluon_unmasked: bool = False
    gluon_anywhere: bool = False
    gluon_verify_divides: bool = False
    gluon_never_divides: bool = False
    gluon_of_sixteen: bool = False
    mode_as_spelled: bool = False
    no_mode_is_asm: bool = False
    plan_from_sixteen: bool = False
    plan_of_several: bool = False
    plan_of_rows: bool = False
    plan_any_length: bool = False
    plan_short_only: bool = False
    plan_quantised_short: bool = False
    plan_masked: bool = False
    plan_round_robin_masked: bool = False
    plan_heads_given: bool = False
    plan_heads_of_plain: bool = False
    cap_forgotten: bool = False
    cap_of_round_robin_only: bool = False
    cap_of_every_call: bool = False
    two_never_refused: bool = False
    two_always_refused: bool = False
    two_refused_unquantised: bool = False
    bound_floored: bool = False
    bound_not_raised: bool = False
    bound_of_the_sequence: bool = False
    bound_of_the_batch: bool = False


RIGHT = Faults()


def round_robin_heads(heads: int) -> int:
    """The head count at which the round-robin kernel runs, or 0 where it has none."""
    return next((native for native in (16, 32, 64, 128) if native >= heads), 0)


def kernel_heads(heads: int) -> int:
    """The head count of the other kernels: the next multiple of 16."""
    return -(-heads // 16) * 16


@dataclasses.dataclass(frozen=True)
class _Configured:
    """What a configuration and a number of heads decide; `refused` where there can be no server."""

    refused: int
    most_queries: int
    rows: bool
    round_robin: int
    generic: bool


def _configured(given: Configuration, heads: int, wrong: Faults) -> _Configured:
    sharded = given.ranks > 1 and (given.interleave == 1 or wrong.interleaved_rows)
    rows = sharded and given.segmented
    round_robin = sharded and (given.drafted > 0 or wrong.round_robin_undrafted)
    round_robin = round_robin and (given.arch == "gfx950" or wrong.round_robin_anywhere) and not wrong.round_robin_never
    if given.rules == "selector" and not wrong.selector_ignored:
        round_robin = round_robin and given.selector == "asm"
    native = round_robin_heads(heads) if round_robin else 0
    refused = round_robin and not native and (given.rules == "selector" or not rows)
    fits, generic = True, False
    if given.rules == "automatic":
        if (given.arch == "gfx942" or wrong.memory_for_all) and not wrong.memory_ignored:
            fits = heads <= 64 if given.cache == "float8" else tile(given.block_size) < 128
        generic = sharded and given.arch == "gfx942" and not (rows and fits)
    most = 1 + given.drafted * (2 if given.parallel and not wrong.drafted_once else 1)
    if wrong.most_queries_of_one:
        most = 1
    newer_generic = given.rules == "automatic" and sharded and given.arch == "gfx942"
    if given.ranks > 1 and not (rows or round_robin or newer_generic) and not wrong.most_queries_kept:
        most = 1
    return _Configured(int(refused and not wrong.heads_never_refused), most, rows and fits, native, generic)


def _route(given: Configuration, batch: Batch, known: _Configured, wrong: Faults) -> int | None:
    """The route, or None where there is none."""
    if given.ranks == 1 and not wrong.lone_rank_routed:
        return _PLAIN
    if batch.queries == 1 or (not batch.causal and not wrong.masked_blocks_plain_only) or wrong.always_plain:
        return _PLAIN
    if known.round_robin and batch.queries >= wrong.round_robin_from:
        return _ROUND_ROBIN
    if known.generic and not (wrong.generic_last and given.segmented):
        return _GENERIC
    return _SEGMENTED if known.rows or (wrong.generic_last and given.segmented) else None


def _gluon(given: Configuration, batch: Batch, wrong: Faults) -> int:
    """0, 1 for the kernel of one query, 2 for the one of several."""
    mode = given.mode if given.mode or not wrong.no_mode_is_asm else "asm"
    mode = (mode or "auto") if wrong.mode_as_spelled else (mode or "auto").lower()
    size = None if given.blocks is None else given.blocks * given.block_bytes
    if size is not None and wrong.gluon_by_all_layers:
        size *= given.layers
    bounded = size is None or size <= _LARGEST_CACHE - wrong.gluon_below_bound or wrong.gluon_unbounded
    small = batch.heads < 16 or (wrong.gluon_of_sixteen and batch.heads == 16)
    there = given.arch == "gfx950" or wrong.gluon_anywhere
    if not (small and bounded and there) or (given.cache == "float8" and not wrong.gluon_quantised) or mode == "asm":
        return 0
    divides = 16 % batch.heads == 0 or mode == "gluon"
    if batch.queries == 1:
        return int((divides or wrong.gluon_never_divides) and (given.ranks == 1 or wrong.gluon_of_ranks))
    if not (batch.causal or wrong.gluon_unmasked) or not (divides or not wrong.gluon_verify_divides):
        return 0
    return 2 * (given.ranks == 1 or wrong.gluon_verify_of_ranks)


def _planned(given: Configuration, batch: Batch, most: int, wrong: Faults) -> bool:
    """Whether the plan gate is open, apart from route and kernel."""
    quantised = given.cache == "float8" and not wrong.plan_quantised_short
    unmasked = not batch.causal and not wrong.plan_short_only
    opened = unmasked or batch.heads >= 16 or batch.queries <= 4 or quantised or wrong.plan_any_length
    if wrong.plan_from_sixteen:
        opened = batch.heads >= 16
    return opened and (batch.queries > 1 or not wrong.plan_of_several) and batch.queries <= most


def _bound(given: Configuration, lengths: tuple[int, ...], wrong: Faults) -> int:
    period = given.ranks * given.interleave
    rest = 0 if wrong.bound_floored else period - 1
    share = (given.longest_model + rest) // period * given.interleave
    if given.graphs and not wrong.bound_of_the_batch:
        return given.longest_model if wrong.bound_of_the_sequence else share
    longest = max(lengths)
    if not wrong.bound_of_the_sequence:
        longest = int(held(torch.tensor(longest), 0, given.ranks, given.interleave))
    return max(longest, 0 if wrong.bound_not_raised else 1)


def decide(given: Configuration, lengths: tuple[int, ...], batch: Batch, wrong: Faults = RIGHT) -> tuple[int, ...]:
    """The answer to one batch, in the order of `COLUMNS`."""
    nothing = (0,) * (len(COLUMNS) - 1)
    known = _configured(given, batch.heads, wrong)
    if known.refused:
        return (1, *nothing)
    route = _route(given, batch, known, wrong)
    if route is None:
        return (2, *nothing)
    quantised = given.cache == "float8" or wrong.two_refused_unquantised
    served_two = kernel_heads(batch.heads) in (32, 64, 96, 128) and not wrong.two_always_refused
    if not batch.causal and batch.queries == 2 and quantised and not served_two and not wrong.two_never_refused:
        return (3, *nothing)
    own_rows, turns = route in (_SEGMENTED, _GENERIC), route == _ROUND_ROBIN
    gluon = _gluon(given, batch, wrong)
    plan = not gluon and not (own_rows and not wrong.plan_of_rows)
    plan = plan and _planned(given, batch, known.most_queries, wrong)
    page = given.block_size if route == _GENERIC and not wrong.generic_in_tiles else tile(given.block_size)
    heads = known.round_robin if turns and not wrong.plan_heads_of_plain else kernel_heads(batch.heads)
    causal = batch.causal and (not turns or wrong.plan_round_robin_masked)
    cap = given.compute_units if known.round_robin and not wrong.cap_forgotten else 0
    return (
        0, known.most_queries, route, page * own_rows, _bound(given, lengths, wrong) if own_rows else 0, gluon, int(plan),
        (batch.heads if wrong.plan_heads_given else heads) * plan, (causal or wrong.plan_masked) * plan, turns * plan,
        cap * plan * (turns or not wrong.cap_of_round_robin_only), known.round_robin * turns,
        cap * (turns or wrong.cap_of_every_call),
    )  # fmt: skip


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The decisions for all batches; `dtype` changes nothing.

    Raises ValueError for a selector that is none, no rank, turns of no token, a head count that the backend does not
    take or that the ranks do not share, and blocks of no query.
    """
    del dtype
    _require(inputs)
    return _decided(inputs, RIGHT)


def _require(inputs: Inputs) -> None:
    given = inputs.configuration
    if given.selector not in ("asm", "segmented"):
        raise ValueError(f"selector={given.selector!r}: should be asm or segmented")
    if given.ranks < 1 or given.interleave < 1:
        raise ValueError(f"ranks={given.ranks}, interleave={given.interleave}: should be 1 or more")
    for batch in inputs.batches:
        if not served(batch.heads) or batch.heads % given.ranks:
            raise ValueError(
                f"heads={batch.heads}: should be up to 128 or a multiple of 16, and {given.ranks} times those of a rank"
            )
        if batch.queries < 1:
            raise ValueError(f"queries={batch.queries}: should be 1 or more")


def _decided(inputs: Inputs, wrong: Faults) -> Outputs:
    rows = [decide(inputs.configuration, inputs.lengths, batch, wrong) for batch in inputs.batches]
    return Outputs(torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(COLUMNS)))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """A check for every column, which names the first batch that goes wrong; of refused batches only that they are."""
    del precision
    want = reference(inputs).out
    got = outputs.out
    if got.shape != want.shape or got.dtype != want.dtype:
        return (exact("decisions", got, want),)
    decided = want[:, 0] == 0
    checks = []
    for column, name in enumerate(COLUMNS):
        mask = torch.ones_like(decided) if name == "refused" else decided
        mine, right = got[:, column].contiguous(), want[:, column].contiguous()
        check = exact(name, mine, right, mask=mask)
        if not check.passed and check.where:
            check = exact(
                name, mine, right, mask=mask, why=_why(inputs, check.where[0], name, int(right[check.where[0]]))
            )
        checks.append(check)
    return tuple(checks)


def _why(inputs: Inputs, point: int, name: str, want: int) -> str:
    batch = inputs.batches[point]
    mask = "causal" if batch.causal else "unmasked"
    meaning = {"refused": REFUSALS, "route": ROUTES}.get(name, ())
    word = f" ({meaning[want]})" if meaning else ""
    return f"{batch.heads} heads, {batch.queries} {mask} queries{word}"


def _with(inputs: Inputs, batches: tuple[Batch, ...] | None = None, **changes: object) -> Inputs:
    chosen = inputs.batches if batches is None else batches
    return Inputs(
        configuration=dataclasses.replace(inputs.configuration, **changes),  # type: ignore[arg-type]
        lengths=inputs.lengths, batches=chosen, out=guarded((len(chosen), len(COLUMNS)), torch.int64),
    )  # fmt: skip


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _reversed(inputs: Inputs) -> Inputs:
    return _with(inputs, inputs.batches[::-1])


def _in_that_order(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.out.flip(0))


def _other_layers(inputs: Inputs) -> Inputs:
    return _with(inputs, layers=inputs.configuration.layers + 1000)


def _other_spelling(inputs: Inputs) -> Inputs | None:
    mode = inputs.configuration.mode
    return _with(inputs, mode=mode.swapcase() if mode else "Auto") if mode != "" else None


def _no_blocks_yet(inputs: Inputs) -> Inputs | None:
    given = inputs.configuration
    if given.blocks is None or given.blocks * given.block_bytes > _LARGEST_CACHE:
        return None
    return _with(inputs, blocks=None)


def _other_half_precision(inputs: Inputs) -> Inputs | None:
    other = {"bfloat16": "float16", "float16": "bfloat16"}.get(inputs.configuration.cache)
    return _with(inputs, cache=other) if other else None


def _turns_of_a_lone_rank(inputs: Inputs) -> Inputs | None:
    return _with(inputs, interleave=64) if inputs.configuration.ranks == 1 else None


def _other_split_cap(inputs: Inputs) -> Inputs:
    return _with(inputs, compute_units=inputs.configuration.compute_units + 48)


def _that_cap(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    out = first.out.clone()
    for name in ("plan_split_cap", "call_split_cap"):
        column = out[:, COLUMNS.index(name)]
        column[column == inputs.configuration.compute_units] = edited.configuration.compute_units
    return Outputs(out)


LAWS: tuple[Law, ...] = (
    Law("R1 batches reversed", "a batch is decided by itself", _reversed, _in_that_order, "bitwise"),
    Law("R2 more layers", "one layer's cache counts, not all of them", _other_layers, _same, "bitwise"),
    Law("R3 mode spelled otherwise", "a mode in capitals is the same mode", _other_spelling, _same, "bitwise"),
    Law("R4 size not known yet", "an unknown size is within bounds", _no_blocks_yet, _same, "bitwise"),
    Law("R5 other half precision", "caches that are not quantised are treated alike", _other_half_precision, _same,
        "bitwise"),
    Law("R6 turns of a lone rank", "a single rank takes no turns", _turns_of_a_lone_rank, _same, "bitwise"),
    Law("R7 other compute units", "the cap is the number of compute units, and nothing else depends on it",
        _other_split_cap, _that_cap, "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, **faults: bool | int) -> Mutant:
    def answer(inputs: Inputs) -> Outputs:
        wrong = _decided(inputs, Faults(**faults))  # type: ignore[arg-type]
        # What a refused batch would have been decided is nobody's answer.
        refused = _decided(inputs, RIGHT).out[:, :1] != 0
        code = torch.zeros_like(wrong.out)
        code[:, 0] = wrong.out[:, 0]
        return Outputs(torch.where(refused, code, wrong.out))

    return Mutant(name, pitfall, answer)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("plain-for-causal-blocks", "a causal block over several ranks went to the plain kernel", always_plain=True),
    _mutant("turns-of-many-tokens-accepted", "rows and round robin took turns of more than one token",
            interleaved_rows=True),
    _mutant("round-robin-of-two-queries", "two queries went to the round-robin kernel", round_robin_from=2),
    _mutant("round-robin-from-four", "three queries did not go to the round-robin kernel", round_robin_from=4),
    _mutant("round-robin-on-every-architecture", "other architectures had the round-robin kernel",
            round_robin_anywhere=True),
    _mutant("round-robin-without-drafter", "the round-robin kernel were configured without a drafter",
            round_robin_undrafted=True),
    _mutant("round-robin-never", "there were no round-robin kernel", round_robin_never=True),
    _mutant("selector-ignored", "the older rules chose round robin by themselves", selector_ignored=True),
    _mutant("heads-never-refused", "too many heads for round robin were refused by no rules", heads_never_refused=True),
    _mutant("lone-rank-routed", "a single rank needed a route for several queries", lone_rank_routed=True),
    _mutant("shared-memory-ignored", "rows fitted into every shared memory", memory_ignored=True),
    _mutant("shared-memory-of-gfx942-everywhere", "every architecture had as little shared memory as gfx942",
            memory_for_all=True),
    _mutant("rows-before-generic", "rows that do not fit were taken all the same", generic_last=True),
    _mutant("generic-pages-of-tiles", "the generic kernel walked tiles", generic_in_tiles=True),
    _mutant("unmasked-blocks-routed", "a block without mask needed a route of its own", masked_blocks_plain_only=True),
    _mutant("sized-for-one-query", "only single queries were decoded", most_queries_of_one=True),
    _mutant("parallel-drafts-counted-once", "a parallel drafter added its tokens once", drafted_once=True),
    _mutant("several-queries-without-route", "ranks without a route decoded several queries", most_queries_kept=True),
    _mutant("gluon-for-quantised", "gluon read a quantised cache", gluon_quantised=True),
    _mutant("gluon-beyond-2-gib", "gluon read a cache of any size", gluon_unbounded=True),
    _mutant("gluon-below-2-gib-only", "a cache of exactly 2 GiB were beyond the bound", gluon_below_bound=True),
    _mutant("gluon-by-all-layers", "the caches of all layers together were bounded", gluon_by_all_layers=True),
    _mutant("gluon-without-log-sum-exp", "a rank decoded with the kernel that returns no log-sum-exp",
            gluon_of_ranks=True),
    _mutant("gluon-verify-of-ranks", "a rank checked drafts with gluon", gluon_verify_of_ranks=True),
    _mutant("gluon-unmasked", "gluon took a block without mask", gluon_unmasked=True),
    _mutant("gluon-on-every-architecture", "other architectures had gluon", gluon_anywhere=True),
    _mutant("gluon-verify-by-divisors", "gluon checked drafts only where the heads divide 16", gluon_verify_divides=True),
    _mutant("gluon-for-all-heads", "gluon decoded heads that do not divide 16 unasked", gluon_never_divides=True),
    _mutant("gluon-for-sixteen-heads", "gluon took 16 heads", gluon_of_sixteen=True),
    _mutant("mode-as-spelled", "a mode in capitals were none", mode_as_spelled=True),
    _mutant("no-mode-is-asm", "without a mode gluon were never taken", no_mode_is_asm=True),
    _mutant("plan-from-sixteen-heads", "padded heads had no plan", plan_from_sixteen=True),
    _mutant("plan-for-several-queries-only", "single queries had no plan", plan_of_several=True),
    _mutant("plan-for-rows", "queries in rows of their own had a plan", plan_of_rows=True),
    _mutant("plan-for-long-padded-blocks", "more than four queries of padded heads had a plan", plan_any_length=True),
    _mutant("no-plan-for-long-unmasked-blocks", "more than four queries without mask had no plan", plan_short_only=True),
    _mutant("no-plan-for-long-quantised-blocks", "more than four queries over a quantised cache had no plan",
            plan_quantised_short=True),
    _mutant("plan-always-masked", "every plan were causal", plan_masked=True),
    _mutant("round-robin-plan-masked", "the plan of the round-robin kernel were causal", plan_round_robin_masked=True),
    _mutant("plan-of-unpadded-heads", "the plan had the heads of the call", plan_heads_given=True),
    _mutant("round-robin-plan-of-plain-heads", "the plan of the round-robin kernel had the heads of the plain one",
            plan_heads_of_plain=True),
    _mutant("split-cap-forgotten", "nothing were told of a split cap", cap_forgotten=True),
    _mutant("split-cap-of-round-robin-plans-only", "plain plans were told of no split cap",
            cap_of_round_robin_only=True),
    _mutant("split-cap-of-every-call", "plain calls were told of the split cap", cap_of_every_call=True),
    _mutant("two-unmasked-never-refused", "two queries without mask had a kernel at any head count",
            two_never_refused=True),
    _mutant("two-unmasked-always-refused", "two queries without mask had no kernel at any head count",
            two_always_refused=True),
    _mutant("two-unmasked-refused-unquantised", "two queries without mask had no kernel for other caches either",
            two_refused_unquantised=True),
    _mutant("row-bound-of-zero", "dummies made the longest row one of no token", bound_not_raised=True),
    _mutant("row-bound-floored", "ranks shared the longest model without a rest", bound_floored=True),
    _mutant("row-bound-of-the-sequence", "the longest row were that of all ranks", bound_of_the_sequence=True),
    _mutant("row-bound-of-the-batch", "graphs were told of the batch's longest row", bound_of_the_batch=True),
)  # fmt: skip


def _with_refusals_filled(inputs: Inputs) -> Outputs:
    """Something else where nothing is decided."""
    out = _decided(inputs, RIGHT).out
    other = torch.full_like(out, 7)
    other[:, 0] = out[:, 0]
    return Outputs(torch.where(out[:, :1] == 0, out, other))


_WAYS: tuple[tuple[str, Callable[[Inputs], Outputs]], ...] = (
    ("batch-by-batch", reference),
    ("refusals-filled", _with_refusals_filled),
)
HONEST: tuple[Honest, ...] = tuple(
    Honest(name, Precision(probability="exact", note="decisions"), answer) for name, answer in _WAYS
)
