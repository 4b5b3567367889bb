"""What must the buffers of captured graphs hold after each batch?

For one batch of n requests, with the tables of `oracle.dense_mla.decode_metadata` (graphs in use, S query tokens at most)
and buffers for C requests:

    raise if n > C, or if the batch takes rows and there are fewer than n S
    qo_indptr[0..n] and kv_indptr[0..n] = the batch's, and every element behind them = their last one
    seq_lens[0..n-1] = the kernel lengths; the others stay
    one token a request, or one rank: plain.  Otherwise S >= 3 and round-robin kernels: those, else segmented ones
    round-robin: global_indptr[0..n] = the batch's, and every element behind them = its last one; otherwise it stays
    not segmented: indices = the slots of `oracle.dense_mla.expand_pages`, -1 behind them
    segmented: indices stay, and nobody is handed them; with v = max(0, L_b - S + t + 1) of the true lengths,
        row_lens[b S + t] = keys of this rank among the first v = ceil((v - rank) / W) from 0 on
        row_pages[b S + t, i] = block_table[b, i // p] p + i % p     for p pages a block and all pages that have keys
        the rows behind stay; otherwise all rows stay

A request behind the batch so has no queries and no keys. What is returned are views that begin where the buffers do, at
every step: n + 1 starts, n lengths, all indices, n S rows, or nothing. A batch's number of keys must fit into `indices`;
that is known to the device alone, and vLLM does not check it. Source: `_build_decode`, `_build_dcp_verify_row_view` and
`_fill_dcp_verify_page_table` of vLLM's AITER MLA backend.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from cases.dense_mla import decode_metadata as metadata_call
from cases.dense_mla import expand_pages as pages_call
from cases.dense_mla.graph_tables import BUFFERS, Buffers, Inputs, Outputs, Step
from cases.memory import guarded_copy, moved
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.dense_mla import decode_metadata, expand_pages
from oracle.laws import Honest, Law, Mutant

Route = Literal["plain", "round_robin", "segmented"]
_STARTS = ("qo_indptr", "kv_indptr", "global_indptr")
_ROWS = ("row_lens", "row_pages")


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where the tables can be got wrong; the defaults are right."""

    stale_tails: tuple[str, ...] = ()
    zero_tails: tuple[str, ...] = ()
    indices_not_cleared: bool = False
    long_lists_cut: bool = False
    indices_when_segmented: Literal["kept", "written", "cleared", "handed_on"] = "kept"
    global_base_lost: bool = False
    lengths_cleared: bool = False
    rows_cleared: bool = False
    step_behind: bool = False
    frozen: bool = False
    late: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    moved_on: bool = False
    whole_returned: bool = False
    too_many_pass: bool = False
    round_robin_from: int = 3
    rows_of_adjusted: bool = False
    rows_by_token: bool = False
    pages_in_blocks: bool = False
    batch: decode_metadata.Faults = decode_metadata.RIGHT


RIGHT = Faults()


def route_of(inputs: Inputs, query: int, faults: Faults = RIGHT) -> Route:
    """What decodes a batch of at most `query` tokens a request; raises RuntimeError where nothing does."""
    if inputs.world == 1 or query <= 1:
        return "plain"
    if inputs.kernels in ("round_robin", "both") and query >= faults.round_robin_from:
        return "round_robin"
    if inputs.kernels in ("segmented", "both"):
        return "segmented"
    raise RuntimeError(f"kernels={inputs.kernels}: {query} query tokens over {inputs.world} ranks should have a kernel")


@dataclasses.dataclass(frozen=True)
class _Made:
    """A step's tables: what goes to the beginning of each buffer, and which of it nobody reads."""

    route: Route
    query: int
    fronts: dict[str, torch.Tensor]
    free_pages: torch.Tensor


def _made(inputs: Inputs, step: Step, faults: Faults) -> _Made:
    batch = step.batch
    query = decode_metadata.padded_query(batch.query_lens, batch.tokens) or max(batch.query_lens)
    route = route_of(inputs, query, faults)
    asked: metadata_call.Route = "round_robin" if inputs.world > 1 else "planned"
    call = metadata_call.Inputs(batch=batch, route=asked, world=inputs.world, graphs=True)
    tables = decode_metadata.tables(call, faults.batch)
    whole = _int32(tables.global_indptr).diff() if faults.rows_of_adjusted else batch.global_lens
    lens, pages = _rows(inputs, step, query, whole, faults) if inputs.world > 1 else (_int32([]), _int32([]))
    fronts = {
        "qo_indptr": _int32(tables.qo_indptr),
        "kv_indptr": _int32(tables.kv_indptr),
        "global_indptr": _int32(tables.global_indptr),
        "seq_lens": _int32(tables.kernel_lens),
        "row_lens": lens,
        "row_pages": pages,
    }
    free = torch.arange(pages.shape[-1]) * inputs.page_size >= lens[:, None]
    return _Made(route, query, fronts, free)


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _rows(
    inputs: Inputs, step: Step, query: int, whole: torch.Tensor, faults: Faults
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and pages of every query token."""
    token = torch.arange(query)
    seen = (whole[:, None].to(torch.int64) - query + token + 1).clamp(min=0)
    lens = (seen + inputs.world - 1 - inputs.rank) // inputs.world
    place = torch.arange(inputs.buffers.row_pages.shape[1])
    parts = inputs.block_size // inputs.page_size
    blocks = step.block_table[:, place // parts].to(torch.int64)
    pages = blocks if faults.pages_in_blocks else blocks * parts + place % parts
    pages = ((pages + 2**31) % 2**32 - 2**31).to(torch.int32)
    if faults.rows_by_token:
        return lens.t().flatten().to(torch.int32), pages.repeat(query, 1)
    return lens.flatten().to(torch.int32), pages.repeat_interleave(query, 0)


def _expanded(
    inputs: Inputs, step: Step, starts: torch.Tensor, indices: torch.Tensor, *, cleared: bool
) -> torch.Tensor:
    call = pages_call.Inputs(
        block_table=step.block_table, kv_indptr=starts, real_lengths=step.batch.seq_lens, indices=indices,
        block_size=inputs.block_size, clamped=False, extra=0, graphs=cleared,
    )  # fmt: skip
    return expand_pages.reference(call).indices


def _fits(inputs: Inputs, step: Step, made: _Made) -> bool:
    requests = len(step.batch.query_lens)
    rows = made.route != "segmented" or requests * made.query <= inputs.buffers.row_lens.numel()
    return requests < inputs.buffers.kv_indptr.numel() and rows


def _written(made: _Made) -> list[str]:
    """The buffers whose beginning a step replaces, `indices` left out."""
    extra = {"plain": (), "round_robin": ("global_indptr",), "segmented": _ROWS}[made.route]
    return ["qo_indptr", "kv_indptr", "seq_lens", *extra]


def _stepped(
    inputs: Inputs, step: Step, made: _Made, before: dict[str, torch.Tensor], faults: Faults
) -> dict[str, Any]:
    """The buffers after a step, from those before it."""
    after = {name: buffer.clone() for name, buffer in before.items()}
    for name in _written(made):
        front = made.fronts[name]
        if name == "global_indptr" and faults.global_base_lost:
            front = torch.cat((front[1:], front[-1:]))
        if name in faults.late:
            # Every other element is still the previous step's.
            front = torch.where(torch.arange(front.numel()) % 2 == 0, front, before[name][: front.numel()])
        buffer = after[name]
        front = front[: buffer.shape[0]]
        buffer[: front.shape[0]] = front
        if name in _STARTS and name not in faults.stale_tails:
            buffer[front.shape[0] :] = 0 if name in faults.zero_tails else front[-1]
    if faults.lengths_cleared:
        after["seq_lens"][made.fronts["seq_lens"].numel() :] = 0
    if faults.rows_cleared and made.route == "segmented":
        after["row_lens"][made.fronts["row_lens"].numel() :] = 0
    if made.route != "segmented" or faults.indices_when_segmented == "written":
        after["indices"] = _expanded(
            inputs, step, made.fronts["kv_indptr"], before["indices"], cleared=not faults.indices_not_cleared
        )
        if faults.long_lists_cut:
            for first, last in itertools.pairwise(made.fronts["kv_indptr"].tolist()):
                after["indices"][first + 1024 : last] = -1
    elif faults.indices_when_segmented == "cleared":
        after["indices"].fill_(-1)
    return after


def _places(inputs: Inputs, made: _Made, cursor: int, faults: Faults) -> list[list[int]]:
    places = []
    for name in BUFFERS:
        returned = name in _written(made)
        length = made.fronts[name].shape[0] if returned else 0
        if name == "indices":
            returned = made.route != "segmented" or faults.indices_when_segmented == "handed_on"
            length = inputs.buffers.indices.numel()
        if not returned:
            places.append([-2, 0])
        elif name in faults.elsewhere:
            places.append([-1, 0])
        else:
            whole = getattr(inputs.buffers, name).shape[0]
            places.append([cursor if faults.moved_on else 0, whole if faults.whole_returned else length])
    return places


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The buffers after every step, in new tensors; `dtype` changes nothing, since all is integers.

    A step that must raise is marked in `raised`, and leaves the buffers as they were. Raises ValueError for a page size
    that does not divide the block size, and for keys that do not fit into their table or into `indices`.
    """
    del dtype
    if inputs.block_size % inputs.page_size:
        raise ValueError(f"page_size={inputs.page_size}: should divide the block size, {inputs.block_size}")
    return _played(inputs, RIGHT)


def _played(inputs: Inputs, faults: Faults) -> Outputs:
    held = {name: getattr(inputs.buffers, name).clone().cpu() for name in BUFFERS}
    kept, places, raised = [], [], []
    cursor = 0
    for step in inputs.steps:
        made = _made(inputs, step, faults)
        if not _fits(inputs, step, made) and not faults.too_many_pass:
            kept.append(held)
            places.append([[-2, 0]] * len(BUFFERS))
            raised.append(1)
            continue
        if _fits(inputs, step, made) and not (faults.frozen and kept):
            before, held = held, _stepped(inputs, step, made, held, faults)
        kept.append(before if faults.step_behind else held)
        places.append(_places(inputs, made, cursor, faults))
        raised.append(0)
        cursor += len(step.batch.query_lens)
    return Outputs(
        held=tuple(Buffers(**{name: buffer.clone() for name, buffer in one.items()}) for one in kept),
        places=torch.tensor(places, dtype=torch.int64).reshape(-1, len(BUFFERS), 2),
        raised=torch.tensor(raised, dtype=torch.int64),
    )


def _free_pages(inputs: Inputs) -> list[torch.Tensor]:
    """After every step, bool over `row_pages`: True at pages that no query token's keys reach."""
    free = torch.zeros(inputs.buffers.row_pages.shape, dtype=torch.bool)
    after = []
    for step in inputs.steps:
        made = _made(inputs, step, RIGHT)
        if made.route == "segmented" and _fits(inputs, step, made):
            free = free.clone()
            free[: made.free_pages.shape[0]] = made.free_pages
        after.append(free)
    return after


_WHY = {
    "qo_indptr": "the batch's query starts, and their last one behind them",
    "kv_indptr": "the batch's key starts, and their last one behind them",
    "global_indptr": "the key starts of all ranks, and their last one behind them; untouched without round-robin kernels",
    "seq_lens": "the batch's kernel lengths, and what was there behind them",
    "indices": "the slots of the batch's keys and -1 behind them; untouched by segmented kernels",
    "row_lens": "keys of the batch's query tokens, and what was there behind them",
    "row_pages": "pages of the batch's query tokens, and what was there behind them",
}


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Which steps raised, where the returned tensors lie, and the whole buffers after every step that did not raise."""
    del precision
    want = reference(inputs)
    fits = want.raised == 0
    checks = [
        exact("raised", outputs.raised, want.raised, why="1 for a batch that does not fit into the buffers"),
        exact("places", outputs.places, want.places, mask=fits[:, None, None],
              why="graphs read the beginning of the buffers, and as much of them as the batch has"),
    ]  # fmt: skip
    for number, free in enumerate(_free_pages(inputs)):
        if not fits[number]:
            continue
        got = outputs.held[number] if len(outputs.held) == len(inputs.steps) else None
        for name, why in _WHY.items():
            mask = ~free if name == "row_pages" else None
            checks.append(
                exact(
                    f"step {number} {name}",
                    getattr(got, name, None),
                    getattr(want.held[number], name),
                    mask=mask,
                    why=why,
                )
            )
    return tuple(checks)


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    """Inputs some of which are replaced, with buffers of their own."""
    fresh = Buffers(**{name: moved(getattr(inputs.buffers, name), "cpu") for name in BUFFERS})
    return dataclasses.replace(inputs, **({"buffers": fresh} | changes))  # type: ignore[arg-type]


def _flat_tables(outputs: Outputs) -> tuple[object, ...]:
    """What every step replaces altogether."""
    return (*((one.qo_indptr, one.kv_indptr) for one in outputs.held), outputs.places, outputs.raised)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _raises(inputs: Inputs) -> bool:
    return any(not _fits(inputs, step, _made(inputs, step, RIGHT)) for step in inputs.steps)


def _first_left_out(inputs: Inputs) -> Inputs | None:
    return _edited(inputs, steps=inputs.steps[1:]) if len(inputs.steps) > 1 and not _raises(inputs) else None


def _without_first(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.held[1:], first.places[1:], first.raised[1:])


def _every_step_twice(inputs: Inputs) -> Inputs | None:
    return None if _raises(inputs) else _edited(inputs, steps=tuple(step for step in inputs.steps for _ in range(2)))


def _twice(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    held = tuple(one for one in first.held for _ in range(2))
    return Outputs(held, first.places.repeat_interleave(2, 0), first.raised.repeat_interleave(2, 0))


def _other_earlier_content(inputs: Inputs) -> Inputs | None:
    filled = {name: guarded_copy(torch.full_like(getattr(inputs.buffers, name), 3)) for name in BUFFERS}
    filled["global_indptr"][0] = 0
    return None if _raises(inputs) else _edited(inputs, buffers=Buffers(**filled))


def _tables_gathered(inputs: Inputs) -> Inputs:
    steps = (dataclasses.replace(step, block_table=guarded_copy(step.block_table)) for step in inputs.steps)
    return _edited(inputs, steps=tuple(steps))


def _meant(outputs: Outputs) -> tuple[object, ...]:
    """Everything but pages, some of which nobody reads."""
    parts = [[getattr(one, name) for name in BUFFERS if name != "row_pages"] for one in outputs.held]
    return (*map(tuple, parts), outputs.places, outputs.raised)


LAWS: tuple[Law, ...] = (
    Law("J10 first step left out", "row starts do not depend on the batches before", _first_left_out, _without_first,
        "bitwise", _flat_tables),
    Law("J10 every step twice", "a batch's tables can be built again", _every_step_twice, _twice, "bitwise", _meant),
    Law("J10 other earlier content", "row starts do not depend on what the buffers held", _other_earlier_content, _same,
        "bitwise", _flat_tables),
    Law("B37 tables gathered", "the strides of the block tables do not matter", _tables_gathered, _same, "bitwise",
        _meant),
)  # fmt: skip


def _mutant(name: str, pitfall: str, faults: Faults, applies: Callable[[Inputs], bool] = lambda inputs: True) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _played(inputs, faults) if applies(inputs) else None)


def _several_ranks(inputs: Inputs) -> bool:
    return inputs.world > 1


MUTANTS: tuple[Mutant, ...] = (
    _mutant("global-starts-stale-behind", "the global starts behind the batch were the previous step's",
            Faults(stale_tails=("global_indptr",)), _several_ranks),
    _mutant("global-starts-zero-behind", "the global starts behind the batch were 0",
            Faults(zero_tails=("global_indptr",)), _several_ranks),
    _mutant("global-base-overwritten", "the global starts began with the first request's end",
            Faults(global_base_lost=True), _several_ranks),
    _mutant("key-starts-stale-behind", "the key starts behind the batch were the previous step's",
            Faults(stale_tails=("kv_indptr",))),
    _mutant("query-starts-stale-behind", "the query starts behind the batch were the previous step's",
            Faults(stale_tails=("qo_indptr",))),
    _mutant("key-starts-zero-behind", "the key starts behind the batch were 0", Faults(zero_tails=("kv_indptr",))),
    _mutant("query-starts-zero-behind", "the query starts behind the batch were 0", Faults(zero_tails=("qo_indptr",))),
    _mutant("indices-handed-to-segmented", "segmented kernels were handed the slots of an earlier batch",
            Faults(indices_when_segmented="handed_on"), _several_ranks),
    _mutant("indices-written-for-segmented", "segmented kernels had slots built for them",
            Faults(indices_when_segmented="written"), _several_ranks),
    _mutant("indices-cleared-for-segmented", "segmented kernels had the slots cleared",
            Faults(indices_when_segmented="cleared"), _several_ranks),
    _mutant("slots-stale-behind", "the slots behind the batch were the previous step's", Faults(indices_not_cleared=True)),
    _mutant("long-lists-cut", "slots of a request from the 1024th on were left out", Faults(long_lists_cut=True)),
    _mutant("lengths-cleared-behind", "the lengths behind the batch were cleared", Faults(lengths_cleared=True)),
    _mutant("rows-cleared-behind", "the rows behind the batch were cleared", Faults(rows_cleared=True), _several_ranks),
    _mutant("one-step-behind", "a replay read the tables of the step before", Faults(step_behind=True)),
    _mutant("key-starts-late", "every other key start were still the previous step's", Faults(late=("kv_indptr",))),
    _mutant("query-starts-late", "every other query start were still the previous step's",
            Faults(late=("qo_indptr",))),
    _mutant("frozen-at-capture", "the tables stayed those of the captured batch", Faults(frozen=True)),
    _mutant("key-starts-elsewhere", "the key starts lay in new memory", Faults(elsewhere=("kv_indptr",))),
    _mutant("lengths-elsewhere", "the lengths lay in new memory", Faults(elsewhere=("seq_lens",))),
    _mutant("rows-elsewhere", "the rows lay in new memory", Faults(elsewhere=_ROWS), _several_ranks),
    _mutant("each-step-behind-the-last", "every step's tables began where the step's before end", Faults(moved_on=True)),
    _mutant("whole-buffers-returned", "kernels were handed the whole buffers", Faults(whole_returned=True)),
    _mutant("too-many-requests-pass", "a batch that does not fit were left out in silence", Faults(too_many_pass=True)),
    _mutant("round-robin-from-two", "round-robin kernels took batches of two query tokens",
            Faults(round_robin_from=2), _several_ranks),
    _mutant("rows-of-dummies", "dummies had rows with keys", Faults(rows_of_adjusted=True), _several_ranks),
    _mutant("rows-token-by-token", "rows went token by token, not request by request", Faults(rows_by_token=True),
            _several_ranks),
    _mutant("pages-in-blocks", "pages were numbered as blocks are", Faults(pages_in_blocks=True), _several_ranks),
    _mutant("dummies-without-keys", "dummies of a padded batch had no keys",
            Faults(batch=decode_metadata.Faults(dummy_length="zero"))),
    _mutant("dummies-without-global-keys", "dummies of a padded batch had no keys on all ranks together",
            Faults(batch=decode_metadata.Faults(global_dummy="given")), _several_ranks),
    _mutant("padded-batch-keeps-its-query-starts", "a padded batch had its query starts",
            Faults(batch=decode_metadata.Faults(queries="starts"))),
)  # fmt: skip


def _free_pages_cleared(inputs: Inputs) -> Outputs:
    first = _played(inputs, RIGHT)
    held = (
        dataclasses.replace(one, row_pages=torch.where(free, -1, one.row_pages))
        for one, free in zip(first.held, _free_pages(inputs), strict=True)
    )
    return Outputs(tuple(held), first.places, first.raised)


HONEST: tuple[Honest, ...] = (
    Honest("one-step-after-the-other", Precision(probability="exact"), reference),
    Honest("free-pages-cleared", Precision(probability="exact"), _free_pages_cleared),
)
