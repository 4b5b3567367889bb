"""What must the metadata of a dense MLA decode batch say?

q_b query tokens, n_b keys on this rank and L_b on all W ranks, for requests b = 0 .. B - 1, and T rows of queries:

    U = T / B where B divides T, U >= 2, T > sum(q), some q_b = 0, and every q_b > 0 is U and stands before every q_b = 0;
        otherwise 0. A batch with U > 0 is padded uniform
    S = U if padded uniform, otherwise max(q)
    kernel length m_b = S if padded uniform and q_b = 0, otherwise n_b
    kv_indptr = 0, m_0, m_0 + m_1, ...                      one page per token, so every last page holds 1
    qo_indptr = 0, S, 2 S, ... if padded uniform, or if S = 1 and no graphs are in use; otherwise the query starts
    global_indptr = 0, M_0, M_0 + M_1, ...                  M_b = S W if padded uniform and q_b = 0, otherwise L_b
    uniform = S if padded uniform or every q_b = S, otherwise -1
    least_kv = 1, but for a verifying Gluon kernel (S > 1) min m_b, over q_b > 0 only if padded uniform (1 if there is none)

S W is the one global length of which every rank holds exactly S. The lengths that are kept beside global_indptr are the
L_b themselves: who gives each query token a row of its own takes 0 keys from a dummy. Source: `_build_decode` and
`_uniform_padded_mtp_qo_len` of vLLM's AITER MLA backend, whose caller never hands it a batch without requests; here
that gives empty tables and S = 0.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from cases.dense_mla.decode_metadata import Inputs, Outputs
from cases.memory import guarded_copy
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where metadata can be got wrong; the defaults are right."""

    never_padded: bool = False
    remainder_ignored: bool = False
    one_token_suffices: bool = False
    no_dummy_needed: bool = False
    longest_suffices: bool = False
    longest_ignored: bool = False
    holes_allowed: bool = False
    dummy_length: Literal["query", "zero", "one", "given"] = "query"
    dummies_by_length: bool = False
    live_overwritten: bool = False
    global_dummy: Literal["spread", "query", "given"] = "spread"
    global_kept_adjusted: bool = False
    page: int = 1
    from_given: bool = False
    shifted: bool = False
    global_shifted: bool = False
    queries: Literal["right", "starts", "uniform"] = "right"
    one_token_as_starts: bool = False
    least: Literal["right", "all", "given", "one", "longest"] = "right"
    uniform: Literal["right", "never", "always", "first"] = "right"
    planned_for_one: bool = False


RIGHT = Faults()


def uniform_starts(requests: int, query: int) -> list[int]:
    """0, S, 2 S, ... B S; raises ValueError for less than one query token."""
    if query < 1:
        raise ValueError(f"query={query}: should be at least 1")
    return [query * b for b in range(requests + 1)]


def padded_query(query_lens: Sequence[int], tokens: int, faults: Faults = RIGHT) -> int:
    """U of the formulas: the query tokens that every request is padded to, or 0."""
    requests = len(query_lens)
    if not requests or tokens <= sum(query_lens) or faults.never_padded:
        return 0
    query, remainder = divmod(tokens, requests)
    live = [length for length in query_lens if length > 0]
    longest = max(live, default=query)
    conditions = (
        remainder == 0 or faults.remainder_ignored,
        query >= 2 or faults.one_token_suffices,
        len(live) < requests or faults.no_dummy_needed,
        longest == query or faults.longest_ignored,
        all(length == longest for length in live) or faults.longest_suffices,
        all(length > 0 for length in query_lens[: len(live)]) or faults.holes_allowed,
    )
    return query if all(conditions) else 0


@dataclasses.dataclass(frozen=True)
class Tables:
    """The metadata in Python's integers, in the order of `Outputs`; None for what the route has no use for."""

    padded_query: int
    query: int
    uniform: int | None
    least_kv: int
    qo_indptr: list[int]
    kernel_lens: list[int]
    kv_indptr: list[int]
    last_page_lens: list[int]
    global_indptr: list[int]
    global_lens: list[int]


def tables(inputs: Inputs, faults: Faults = RIGHT) -> Tables:
    """The metadata of a batch, with faults or without."""
    batch = inputs.batch
    lens, given = list(batch.query_lens), batch.seq_lens.tolist()
    requests = len(lens)
    whole = batch.global_lens.tolist()
    padded = padded_query(lens, batch.tokens, faults)
    query = padded or max(lens, default=0)
    dummy = [padded > 0 and length == 0 for length in (given if faults.dummies_by_length else lens)]
    instead = {"query": query, "zero": 0, "one": 1}
    kernel = [
        query if faults.live_overwritten and padded else
        instead.get(faults.dummy_length, length) if is_dummy else length
        for length, is_dummy in zip(given, dummy, strict=True)
    ]  # fmt: skip
    spread = {"spread": query * inputs.world, "query": query}
    adjusted = [
        spread.get(faults.global_dummy, length) if is_dummy else length
        for length, is_dummy in zip(whole, dummy, strict=True)
    ]
    round_robin = inputs.route == "round_robin"
    kept = adjusted if faults.global_kept_adjusted else whole
    counted = given if faults.from_given else kernel
    return Tables(
        padded_query=padded,
        query=1 if faults.planned_for_one else query,
        uniform=None if inputs.route == "gluon" else _uniform(lens, query, padded, faults),
        least_kv=_least(kernel, given, lens, padded, faults) if inputs.route == "gluon" and query > 1 else 1,
        qo_indptr=_query_starts(inputs, query, padded, faults),
        kernel_lens=kernel,
        kv_indptr=_sums([-(-length // faults.page) for length in counted], faults.shifted),
        last_page_lens=[(length - 1) % faults.page + 1 for length in kernel] if requests else [],
        global_indptr=_sums(adjusted, faults.global_shifted) if round_robin else [],
        global_lens=kept if round_robin else [],
    )


def _sums(lengths: list[int], shifted: bool) -> list[int]:
    """0 and the running sums; shifted, the running sums from the first element on."""
    sums = list(itertools.accumulate(lengths))
    return [*sums, *sums[-1:]] if shifted and sums else [0, *sums]


def _query_starts(inputs: Inputs, query: int, padded: int, faults: Faults) -> list[int]:
    one_token = query == 1 and not inputs.graphs and not faults.one_token_as_starts
    uniform = padded > 0 or one_token
    if faults.queries != "right":
        uniform = faults.queries == "uniform"
    starts: list[int] = inputs.batch.query_start.tolist()
    return uniform_starts(len(starts) - 1, query) if uniform and query else starts


def _uniform(lens: list[int], query: int, padded: int, faults: Faults) -> int:
    if faults.uniform == "always":
        return query
    if faults.uniform == "first" and lens:
        return query if lens[0] == query else -1
    if faults.uniform == "never" and padded:
        return -1
    return query if padded or all(length == query for length in lens) else -1


def _least(kernel: list[int], given: list[int], lens: list[int], padded: int, faults: Faults) -> int:
    if faults.least == "one":
        return 1
    counted = given if faults.least == "given" else kernel
    live = [length for length, tokens in zip(counted, lens, strict=True) if tokens > 0 or not padded]
    if faults.least in ("all", "given"):
        live = counted
    return (max if faults.least == "longest" else min)(live, default=1)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The metadata, in new tensors; `dtype` changes nothing, since all is integers.

    Raises ValueError where the device's query starts are not those of the host's query lengths, or lengths are missing.
    """
    del dtype
    batch = inputs.batch
    starts = [0, *itertools.accumulate(batch.query_lens)]
    if batch.query_start.tolist() != starts:
        raise ValueError(f"query_start={batch.query_start.tolist()}: should be {starts}, as the host has it")
    for name, lengths in (("seq_lens", batch.seq_lens), ("global_lens", batch.global_lens)):
        if lengths.numel() != len(batch.query_lens):
            raise ValueError(f"{name}={lengths.numel()} lengths: should be {len(batch.query_lens)}")
    return _outputs(tables(inputs))


def _outputs(made: Tables) -> Outputs:
    def one(value: int | None) -> torch.Tensor:
        return torch.tensor([] if value is None else [value], dtype=torch.int64)

    def row(values: list[int]) -> torch.Tensor:
        return ((torch.tensor(values, dtype=torch.int64) + 2**31) % 2**32 - 2**31).to(torch.int32)

    return Outputs(
        padded_query=one(made.padded_query),
        query=one(made.query),
        uniform=one(made.uniform),
        least_kv=one(made.least_kv),
        qo_indptr=row(made.qo_indptr),
        kernel_lens=row(made.kernel_lens),
        kv_indptr=row(made.kv_indptr),
        last_page_lens=row(made.last_page_lens),
        global_indptr=row(made.global_indptr),
        global_lens=row(made.global_lens),
    )


_WHY = {
    "padded_query": "the query tokens that every request is padded to, or 0",
    "query": "the query tokens of the longest request",
    "uniform": "what the planner is told that every request has",
    "least_kv": "a lower bound of the numbers of keys",
    "qo_indptr": "where every request's queries begin",
    "kernel_lens": "a dummy of a padded batch has as many keys as queries",
    "kv_indptr": "where every request's keys begin, a page each",
    "last_page_lens": "a page holds one token",
    "global_indptr": "where every request's keys of all ranks begin",
    "global_lens": "the true lengths, dummies included",
}


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Everything, bit for bit."""
    del precision
    want = reference(inputs)
    return tuple(exact(name, getattr(outputs, name), getattr(want, name), why=why) for name, why in _WHY.items())


def _edited(inputs: Inputs, *, graphs: bool | None = None, **changes: object) -> Inputs:
    batch = dataclasses.replace(inputs.batch, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(inputs, batch=batch, graphs=inputs.graphs if graphs is None else graphs)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _padded(inputs: Inputs) -> int:
    return padded_query(inputs.batch.query_lens, inputs.batch.tokens)


def _real(inputs: Inputs) -> torch.Tensor:
    """bool [requests]: the requests whose own lengths count."""
    return torch.tensor([length > 0 or not _padded(inputs) for length in inputs.batch.query_lens], dtype=torch.bool)


def _other_dummies(inputs: Inputs) -> Inputs | None:
    if not _padded(inputs):
        return None
    return _edited(inputs, seq_lens=guarded_copy(torch.where(_real(inputs), inputs.batch.seq_lens, 12345)))


def _one_key_more(inputs: Inputs) -> Inputs | None:
    lengths = inputs.batch.seq_lens
    if int(lengths.sum()) > 2**30 or inputs.route == "gluon":
        return None
    return _edited(inputs, seq_lens=guarded_copy(lengths + _real(inputs).to(torch.int32)))


def _starts_moved(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    more = _real(inputs).to(torch.int32)
    moved = torch.nn.functional.pad(more.cumsum(0), (1, 0)).to(torch.int32)
    return dataclasses.replace(first, kernel_lens=first.kernel_lens + more, kv_indptr=first.kv_indptr + moved)


def _one_dummy_more(inputs: Inputs) -> Inputs | None:
    batch, query = inputs.batch, _padded(inputs)
    if not query:
        return None

    def longer(values: torch.Tensor, last: int) -> torch.Tensor:
        return guarded_copy(torch.cat((values, values.new_tensor([last]))))

    return _edited(
        inputs,
        query_lens=(*batch.query_lens, 0),
        query_start=longer(batch.query_start, int(batch.query_start[-1])),
        seq_lens=longer(batch.seq_lens, 0),
        global_lens=longer(batch.global_lens, 0),
        tokens=batch.tokens + query,
    )


def _with_dummy(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    query = _padded(inputs)

    def longer(values: torch.Tensor, last: int) -> torch.Tensor:
        return torch.cat((values, values.new_tensor([last])))

    def further(starts: torch.Tensor, step: int) -> torch.Tensor:
        return longer(starts, int(starts[-1]) + step) if starts.numel() else starts

    round_robin = inputs.route == "round_robin"
    return dataclasses.replace(
        first,
        qo_indptr=further(first.qo_indptr, query),
        kernel_lens=longer(first.kernel_lens, query),
        kv_indptr=further(first.kv_indptr, query),
        last_page_lens=longer(first.last_page_lens, 1),
        global_indptr=further(first.global_indptr, query * inputs.world),
        global_lens=longer(first.global_lens, 0) if round_robin else first.global_lens,
    )


def _other_execution(inputs: Inputs) -> Inputs | None:
    """Whether graphs are in use shows in the query starts of single tokens only."""
    if max(inputs.batch.query_lens, default=0) == 1:
        return None
    return _edited(inputs, graphs=not inputs.graphs)


def _gathered(inputs: Inputs) -> Inputs | None:
    batch = inputs.batch
    return _edited(
        inputs,
        query_start=guarded_copy(batch.query_start),
        seq_lens=guarded_copy(batch.seq_lens),
        global_lens=guarded_copy(batch.global_lens),
    )


LAWS: tuple[Law, ...] = (
    Law("J15 other dummies", "what a padded batch's dummies held does not matter", _other_dummies, _same, "bitwise"),
    Law("J15 one dummy more", "a further dummy changes nothing for the others", _one_dummy_more, _with_dummy, "bitwise"),
    Law("D1 one key more", "a key more moves the starts behind it by one", _one_key_more, _starts_moved, "bitwise"),
    Law("D2 graphs or none", "tables do not depend on graphs", _other_execution, _same, "bitwise"),
    Law("B120 lengths gathered", "the strides of the lengths do not matter", _gathered, _same, "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, faults: Faults, applies: Callable[[Inputs], bool] = lambda inputs: True) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _outputs(tables(inputs, faults)) if applies(inputs) else None)


def _of(route: str) -> Callable[[Inputs], bool]:
    return lambda inputs: inputs.route == route


def _packed(inputs: Inputs) -> Outputs | None:
    """Lengths read one behind the other, whatever lies between them."""
    lengths = inputs.batch.seq_lens
    if lengths.numel() < 2 or lengths.stride(0) == 1:
        return None
    return _outputs(tables(_edited(inputs, seq_lens=lengths.as_strided(lengths.shape, (1,)))))


def _two_pass(inputs: Inputs, behind: str) -> Outputs | None:
    """The batch as if one of its tables came from another description of it."""
    made = tables(inputs)
    other = tables(inputs, Faults(never_padded=True))
    return _outputs(dataclasses.replace(made, **{behind: getattr(other, behind)})) if made.padded_query else None


MUTANTS: tuple[Mutant, ...] = (
    _mutant("padding-not-seen", "no batch were ever padded", Faults(never_padded=True)),
    _mutant("rows-need-not-divide", "rows that do not divide evenly were padding", Faults(remainder_ignored=True)),
    _mutant("one-token-is-padding", "requests of one token were padded", Faults(one_token_suffices=True)),
    _mutant("more-rows-than-tokens-suffice", "rows that divide evenly were padding, with dummies or without",
            Faults(no_dummy_needed=True, longest_ignored=True)),
    _mutant("a-shorter-request-passes", "only the longest request had to have the padded length",
            Faults(longest_suffices=True)),
    _mutant("any-equal-length-passes", "requests of another equal length were padded", Faults(longest_ignored=True)),
    _mutant("live-after-dummy-passes", "dummies could stand anywhere", Faults(holes_allowed=True)),
    _mutant("dummy-without-keys", "a dummy had no keys", Faults(dummy_length="zero")),
    _mutant("dummy-with-one-key", "a dummy had one key", Faults(dummy_length="one")),
    _mutant("dummy-keeps-its-length", "a dummy had the keys that its row held before", Faults(dummy_length="given")),
    _mutant("dummies-by-their-keys", "a request without keys were a dummy", Faults(dummies_by_length=True)),
    _mutant("every-request-a-dummy", "every request of a padded batch had as many keys as queries",
            Faults(live_overwritten=True)),
    _mutant("dummy-without-global-keys", "a dummy had no keys on all ranks together",
            Faults(global_dummy="given"), _of("round_robin")),
    _mutant("dummy-has-its-local-keys", "a dummy had as many keys on all ranks as on one",
            Faults(global_dummy="query"), _of("round_robin")),
    _mutant("true-lengths-overwritten", "the lengths kept beside were those of the row starts",
            Faults(global_kept_adjusted=True), _of("round_robin")),
    _mutant("global-starts-shifted", "the row starts over all ranks lacked their 0",
            Faults(global_shifted=True), _of("round_robin")),
    _mutant("key-starts-shifted", "the row starts of the keys lacked their 0", Faults(shifted=True)),
    _mutant("key-starts-of-given-lengths", "the row starts came from the lengths as they were given",
            Faults(from_given=True)),
    _mutant("page-size-leaks", "keys were counted in pages of 16", Faults(page=16)),
    _mutant("query-starts-kept", "a padded batch had its query starts", Faults(queries="starts")),
    _mutant("query-starts-always-uniform", "every request had as many queries as the longest", Faults(queries="uniform")),
    _mutant("single-tokens-by-their-starts", "without graphs, single tokens went by the query starts",
            Faults(one_token_as_starts=True)),
    _mutant("dummies-bound-the-keys", "dummies counted for the lower bound", Faults(least="all"), _of("gluon")),
    _mutant("given-lengths-bound-the-keys", "the lower bound came from the lengths as they were given",
            Faults(least="given"), _of("gluon")),
    _mutant("bound-always-one", "the lower bound were always 1", Faults(least="one"), _of("gluon")),
    _mutant("bound-is-the-longest", "the lower bound were the longest request", Faults(least="longest"), _of("gluon")),
    _mutant("padded-is-not-uniform", "a padded batch were not uniform", Faults(uniform="never")),
    _mutant("always-uniform", "every batch were uniform", Faults(uniform="always")),
    _mutant("uniform-by-the-first", "a batch were uniform if its first request is as long as the longest",
            Faults(uniform="first")),
    _mutant("planned-for-one-token", "every request had one query token", Faults(planned_for_one=True)),
    Mutant("lengths-read-packed", "lengths lay one behind the other", _packed),
    Mutant("query-of-the-unpadded-batch", "the longest request were looked for before padding",
           lambda inputs: _two_pass(inputs, "query")),
)  # fmt: skip


def _in_tensors(inputs: Inputs) -> Outputs:
    """All requests at once, in torch."""
    batch = inputs.batch
    lens = torch.tensor(batch.query_lens, dtype=torch.int64)
    count, rows = lens.numel(), batch.tokens
    query = rows // max(count, 1)
    longest = int(lens.max()) if count else 0
    live = lens > 0
    prefix = bool((live[1:] <= live[:-1]).all())
    same = bool((lens[live] == query).all())
    padded = count > 0 and query * count == rows and rows > int(lens.sum()) and query >= 2
    padded = padded and prefix and same and not bool(live.all())
    query = query if padded else longest
    real = live if padded else torch.ones_like(live)
    kernel = torch.where(real, batch.seq_lens, query)
    spread = torch.where(real, batch.global_lens, query * inputs.world)
    starts = batch.query_start.to(torch.int64)
    if padded or (query == 1 and not inputs.graphs):
        starts = torch.arange(count + 1) * query
    least = torch.ones(1, dtype=torch.int64)
    if inputs.route == "gluon" and query > 1 and bool(real.any()):
        least = kernel[real].amin().reshape(1).to(torch.int64)
    uniform = torch.tensor([query if padded or bool((lens == query).all()) else -1])
    nothing = torch.empty(0, dtype=torch.int32)
    round_robin = inputs.route == "round_robin"

    def sums(lengths: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0)).to(torch.int32)

    return Outputs(
        padded_query=torch.tensor([query if padded else 0]),
        query=torch.tensor([query]),
        uniform=uniform[: 0 if inputs.route == "gluon" else 1],
        least_kv=least,
        qo_indptr=starts.to(torch.int32),
        kernel_lens=kernel.to(torch.int32),
        kv_indptr=sums(kernel),
        last_page_lens=torch.ones(count, dtype=torch.int32),
        global_indptr=sums(spread) if round_robin else nothing,
        global_lens=batch.global_lens.clone() if round_robin else nothing,
    )


HONEST: tuple[Honest, ...] = (
    Honest("one-request-after-the-other", Precision(probability="exact"), reference),
    Honest("in-tensors", Precision(probability="exact"), _in_tensors),
)
