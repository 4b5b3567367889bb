"""Which slots do a token's top-k positions name, on which rank of a sequence that is spread over several?

    owner(v) = (v // I) % N,   j(v) = v // (N * I) * I + v % I          N ranks, I the interleave, rank n
    slot(t, v) = table[requests[t], j // B] * block_rows + j % B        for a token that reads the cache,
                 if owner(v) = n and 0 <= requests[t] < rows of the table
    slot(t, v) = owner(v) * rank_rows + starts[p] + j                   for a token that reads a workspace
    -1 where v < 0, where j // B is no column of the table, and where a condition fails

so over all ranks every position is a slot exactly once. In the form `front` a row's slots, in any order, come before its
-1, and counts[t] is their number; in `columns_counted` each stays in its column. Source: the functions
`triton_convert_req_index_to_global_index` and `triton_filter_and_convert_dcp_index` of vLLM's sparse MLA backends, and
`_convert_req_index_to_global_index_kernel` of its ROCm backend, which has slot 0 where there is none. All of them look up
the request's row of the table without asking whether it has one.
"""

import dataclasses
from collections.abc import Callable

import msgspec
import torch

from cases.memory import guarded, moved
from cases.precision import Precision
from cases.sparse_mla.topk_to_slots import Inputs, Outputs, Workspace
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant
from oracle.sparse_mla import paging


def owner_of(positions: torch.Tensor, world_size: int, interleave: int) -> torch.Tensor:
    """The rank on which a position's key lies."""
    return positions // interleave % world_size


def key_of(positions: torch.Tensor, world_size: int, interleave: int) -> torch.Tensor:
    """The number of a position's key among the keys of its rank."""
    return positions // (world_size * interleave) * interleave + positions % interleave


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The slots of every token; `dtype` changes nothing.

    Raises ValueError for another number of requests than tokens, a rank outside the world, and an interleave that does
    not divide the block size.
    """
    del dtype
    tokens = inputs.positions.shape[0]
    if inputs.requests.numel() != tokens:
        raise ValueError(f"requests={inputs.requests.numel()}: should be one for each of {tokens} tokens")
    if not 0 <= inputs.rank < inputs.world_size:
        raise ValueError(f"rank={inputs.rank}: should be 0 to {inputs.world_size - 1}")
    if inputs.interleave < 1 or inputs.block_size % inputs.interleave:
        raise ValueError(f"interleave={inputs.interleave}: should divide block_size={inputs.block_size}")
    rows = [_row(inputs, token) for token in range(tokens)]
    return _formed(inputs, torch.stack(rows) if rows else inputs.positions.to(torch.int64))


def _row(inputs: Inputs, token: int) -> torch.Tensor:
    """The slots of one token, column by column."""
    positions = inputs.positions[token].to(torch.int64)
    request, columns = int(inputs.requests[token]), inputs.table.shape[1]
    owner = owner_of(positions, inputs.world_size, inputs.interleave)
    key = key_of(positions, inputs.world_size, inputs.interleave)
    there = (positions >= 0) & (key // inputs.block_size < columns)
    slots = torch.full_like(positions, -1)
    prefill = -1 if inputs.workspace is None else int(inputs.workspace.requests[token])
    if inputs.workspace is not None and prefill >= 0:
        slots[there] = (owner * inputs.workspace.rank_rows + inputs.workspace.starts[prefill] + key)[there]
    elif 0 <= request < inputs.table.shape[0]:
        there &= owner == inputs.rank
        blocks = inputs.table[request].to(torch.int64)[key[there] // inputs.block_size]
        slots[there] = blocks * inputs.block_rows + key[there] % inputs.block_size
    return slots


def _formed(inputs: Inputs, slots: torch.Tensor, counts: torch.Tensor | None = None) -> Outputs:
    """int64 rows of slots as the call wants them; a count is the number of a row's slots unless it is given."""
    if counts is None:
        counts = (slots >= 0).sum(1)
    if inputs.form == "front":
        slots = slots.gather(1, torch.argsort((slots < 0).to(torch.uint8), dim=1, stable=True))
    return Outputs(slots.to(torch.int32), None if inputs.form == "columns" else counts.to(torch.int32))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Counts and slots bit for bit; those in front are compared in ascending order."""
    del precision
    want = reference(inputs)
    checks = []
    if want.counts is not None:
        checks.append(exact("counts", outputs.counts, want.counts, why="a count is a whole number"))
    why = "a slot is found through the table, or is -1"
    got = outputs.slots
    if inputs.form != "front" or got is None or got.shape != want.slots.shape:
        return (*checks, exact("slots", got, want.slots, why=why))
    assert want.counts is not None
    in_order = exact("slots", _ascending(got, want.counts), _ascending(want.slots, want.counts), why=why)
    return (*checks, msgspec.structs.replace(in_order, output="slots in ascending order"))


def _ascending(slots: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The rows with as many first entries as are slots in order; the rest stays."""
    rows = slots.clone()
    for row, count in zip(rows, counts.tolist(), strict=True):
        row[:count] = row[:count].sort().values
    return rows


def meaning(outputs: Outputs) -> Outputs:
    """The answer with every row in order, for laws that do not speak of places."""
    return Outputs(outputs.slots.sort(dim=1).values, outputs.counts)


def _asked(inputs: Inputs, **changes: object) -> Inputs:
    """A call with some of its parts changed, and memory for its own answer."""
    edited = dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]
    tokens, width = edited.positions.shape
    return dataclasses.replace(
        edited, slots=guarded((tokens, width), torch.int32), counts=guarded((tokens,), torch.int32)
    )


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _tokens_reversed(inputs: Inputs) -> Inputs:
    space = inputs.workspace
    return _asked(
        inputs, positions=inputs.positions.flip(0), requests=inputs.requests.flip(0),
        workspace=None if space is None else dataclasses.replace(space, requests=space.requests.flip(0)),
    )  # fmt: skip


def _reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.slots.flip(0), None if first.counts is None else first.counts.flip(0))


def _columns_reversed(inputs: Inputs) -> Inputs:
    positions = moved(inputs.positions, inputs.positions.device)
    positions.copy_(inputs.positions.flip(1))
    return _asked(inputs, positions=positions)


def _own_part_alone(inputs: Inputs) -> Inputs | None:
    """The rank's own keys as a sequence of one rank."""
    if inputs.workspace is not None or inputs.world_size == 1:
        return None
    own = (inputs.positions >= 0) & (
        owner_of(inputs.positions, inputs.world_size, inputs.interleave) == inputs.rank
    )  # fmt: skip
    key = key_of(inputs.positions, inputs.world_size, inputs.interleave)
    return _asked(inputs, positions=torch.where(own, key, -1), world_size=1, rank=0, interleave=1)


def _requests_renamed(inputs: Inputs) -> Inputs:
    count = inputs.table.shape[0]
    known = (inputs.requests >= 0) & (inputs.requests < count)
    return _asked(
        inputs, table=inputs.table.flip(0), requests=torch.where(known, count - 1 - inputs.requests, inputs.requests)
    )


def _pages_halved(inputs: Inputs) -> Inputs | None:
    half = inputs.block_size // 2
    if inputs.block_rows != inputs.block_size or inputs.block_size % 2 or half % inputs.interleave:
        return None
    return _asked(inputs, table=paging.halved(inputs.table), block_size=half, block_rows=half)


def _other_form(inputs: Inputs) -> Inputs | None:
    if inputs.form == "columns":
        return None
    return _asked(inputs, form="front" if inputs.form == "columns_counted" else "columns_counted")


def _unused_workspace(inputs: Inputs) -> Inputs | None:
    if inputs.workspace is not None:
        return None
    nobody = torch.full((inputs.positions.shape[0],), -1, dtype=torch.int32)
    return _asked(inputs, workspace=Workspace(nobody, torch.tensor([7], dtype=torch.int32), 100))


LAWS: tuple[Law, ...] = (
    Law("S1 tokens reversed", "a token's slots do not depend on its neighbours", _tokens_reversed, _reversed, "bitwise",
        meaning),
    Law("S2 columns reversed", "a position's slot does not depend on its column", _columns_reversed, _same, "bitwise",
        meaning),
    Law("S3 own part alone", "a rank's part of a sequence is a sequence of its own", _own_part_alone, _same, "bitwise",
        meaning),
    Law("S4 requests renamed", "a request's number means its table row only", _requests_renamed, _same, "bitwise",
        meaning),
    Law("S5 blocks halved", "smaller blocks in the same places move no slot", _pages_halved, _same, "bitwise", meaning),
    Law("S6 the other counted form", "moving slots to the front loses and adds none", _other_form, _same, "bitwise",
        meaning),
    Law("S7 a workspace that nobody reads", "it changes nothing", _unused_workspace, _same, "bitwise", meaning),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Where a row can be got wrong; the defaults are right. What is read outside a table is read at its edge."""

    world: Callable[[Inputs], int] = lambda inputs: inputs.world_size
    interleave: Callable[[Inputs], int] = lambda inputs: inputs.interleave
    rank: Callable[[Inputs], int] = lambda inputs: inputs.rank
    request: Callable[[Inputs, int], int] = lambda inputs, token: int(inputs.requests[token])
    block_rows: Callable[[Inputs], int] = lambda inputs: inputs.block_rows
    prefill: Callable[[int], int] = lambda prefill: prefill
    key: Callable[[Inputs, torch.Tensor], torch.Tensor] | None = None
    bound_key: Callable[[Inputs, torch.Tensor, torch.Tensor], torch.Tensor] = lambda inputs, positions, key: key
    columns_more: int = 0
    lowest: int = 0
    filtered: bool = True
    strays_read: bool = False
    workspace_filtered: bool = False
    workspace_starts: bool = True
    workspace_ranks: bool = True


def _row_by(rule: _Rule, inputs: Inputs, token: int) -> torch.Tensor:
    positions = inputs.positions[token].to(torch.int64)
    request = rule.request(inputs, token)
    world, interleave = rule.world(inputs), rule.interleave(inputs)
    owner, key = owner_of(positions, world, interleave), key_of(positions, world, interleave)
    if rule.key is not None:
        key = rule.key(inputs, positions)
    columns = inputs.table.shape[1] + rule.columns_more
    there = (positions >= rule.lowest) & (rule.bound_key(inputs, positions, key) // inputs.block_size < columns)
    own = there & (owner == rule.rank(inputs))
    slots = torch.full_like(positions, -1)
    space = inputs.workspace
    prefill = -1 if space is None else rule.prefill(int(space.requests[token]))
    if space is not None and prefill >= 0:
        base = owner * space.rank_rows * rule.workspace_ranks + space.starts[prefill] * rule.workspace_starts
        there = own if rule.workspace_filtered else there
        slots[there] = paging.wrapped((base + key)[there])
    elif rule.strays_read or 0 <= request < inputs.table.shape[0]:
        there = own if rule.filtered else there
        blocks = inputs.table[min(max(request, 0), inputs.table.shape[0] - 1)].to(torch.int64)
        block = blocks[(key[there] // inputs.block_size).clamp(max=blocks.numel() - 1)]
        slots[there] = paging.wrapped(block * rule.block_rows(inputs) + key[there] % inputs.block_size)
    return slots


def _by(inputs: Inputs, rule: _Rule) -> torch.Tensor:
    rows = [_row_by(rule, inputs, token) for token in range(inputs.positions.shape[0])]
    return torch.stack(rows) if rows else inputs.positions.to(torch.int64)


def _mutant(name: str, pitfall: str, rule: _Rule) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _formed(inputs, _by(inputs, rule)))


def _edited(name: str, pitfall: str, edit: Callable[[Inputs, torch.Tensor], Outputs | None]) -> Mutant:
    """A fault in what becomes of the right slots."""
    return Mutant(name, pitfall, lambda inputs: edit(inputs, _by(inputs, _Rule())))


def _slot_0(inputs: Inputs, slots: torch.Tensor) -> Outputs:
    return _formed(inputs, slots.clamp(min=0))


def _before_first_block(inputs: Inputs, slots: torch.Tensor) -> Outputs:
    """Position -1 through the table's first column, as a division towards 0 finds it."""
    known = inputs.requests.clamp(0, inputs.table.shape[0] - 1).to(torch.int64)
    before = paging.wrapped(inputs.table[known, :1].to(torch.int64) * inputs.block_rows - 1)
    return _formed(inputs, torch.where(inputs.positions == -1, before, slots))


def _given_counts(
    count: Callable[[Inputs, torch.Tensor], torch.Tensor],
) -> Callable[[Inputs, torch.Tensor], Outputs | None]:
    def answer(inputs: Inputs, slots: torch.Tensor) -> Outputs | None:
        return None if inputs.form == "columns" else _formed(inputs, slots, count(inputs, slots))

    return answer


def _in_place(inputs: Inputs, slots: torch.Tensor) -> Outputs | None:
    if inputs.form != "front":
        return None
    return _formed(dataclasses.replace(inputs, form="columns_counted"), slots)


def _moved_up(inputs: Inputs, slots: torch.Tensor) -> Outputs | None:
    if inputs.form != "columns_counted":
        return None
    return _formed(dataclasses.replace(inputs, form="front"), slots)


def _unfilled(inputs: Inputs, slots: torch.Tensor) -> Outputs | None:
    """Behind the slots in front stands what stood in the column before."""
    if inputs.form != "front":
        return None
    right = _formed(inputs, slots)
    return Outputs(torch.where(right.slots < 0, slots.to(torch.int32), right.slots), right.counts)


def _cut_at_count(inputs: Inputs, slots: torch.Tensor) -> Outputs | None:
    """Of each row as many columns as it has slots, holes among them."""
    if inputs.form == "columns":
        return None
    kept = torch.arange(slots.shape[1]) < (slots >= 0).sum(1, keepdim=True)
    return _formed(inputs, torch.where(kept, slots, -1))


def _first_tile(inputs: Inputs, slots: torch.Tensor) -> Outputs:
    slots[:, 1024:] = -1
    return _formed(inputs, slots)


def _wrong_pitch(inputs: Inputs) -> Outputs | None:
    table = paging.without_pitch(inputs.table)
    return None if table is None else _formed(inputs, _by(dataclasses.replace(inputs, table=table), _Rule()))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("gather-no-row-bound", "a request beyond the table's rows had the row next to it", _Rule(strays_read=True)),
    _mutant("gather-no-column-bound", "a position beyond the table's columns lay in the last one",
            _Rule(columns_more=1 << 31)),
    _mutant("column-bound-off-by-one", "the table had a column more", _Rule(columns_more=1)),
    _mutant("bound-by-position", "the table's columns bounded positions of the whole sequence",
            _Rule(bound_key=lambda inputs, positions, key: positions)),
    _mutant("no-owner-filter", "positions of other ranks lay in this rank's cache", _Rule(filtered=False)),
    _mutant("interleave-assumed-1", "ranks took turns position by position", _Rule(interleave=lambda inputs: 1)),
    _mutant("interleave-is-a-block", "ranks took turns block by block", _Rule(interleave=lambda inputs: inputs.block_size)),
    _mutant("one-rank-for-all", "there were one rank", _Rule(world=lambda inputs: 1, rank=lambda inputs: 0)),
    _mutant("another-rank", "the next rank's positions were this one's",
            _Rule(rank=lambda inputs: (inputs.rank + 1) % inputs.world_size)),
    _mutant("position-for-key", "a rank's cache held the positions of all ranks",
            _Rule(key=lambda inputs, positions: positions)),
    _mutant("place-in-group-lost", "a key's number were its position divided by the number of ranks",
            _Rule(key=lambda inputs, positions: positions // inputs.world_size)),
    _edited("clamp-minus1-to-slot0", "what has no slot were slot 0", _slot_0),
    _edited("minus1-through-the-table", "position -1 were the slot before the request's first block",
            _before_first_block),
    _mutant("position-0-dropped", "position 0 were none", _Rule(lowest=1)),
    _mutant("pages-adjacent", "nothing lay between blocks", _Rule(block_rows=lambda inputs: inputs.block_size)),
    _mutant("first-request-for-all", "all tokens belonged to request 0", _Rule(request=lambda inputs, token: 0)),
    _mutant("token-for-request", "a token's number named its table row", _Rule(request=lambda inputs, token: token)),
    _mutant("workspace-ignored", "prefill tokens read the cache", _Rule(prefill=lambda prefill: -1)),
    _mutant("workspace-for-all", "decode tokens read the first request's keys in the workspace",
            _Rule(prefill=lambda prefill: max(prefill, 0))),
    _mutant("workspace-starts-ignored", "every request's keys began at the workspace's first row",
            _Rule(workspace_starts=False)),
    _mutant("workspace-ranks-ignored", "the keys of all ranks began at the same row", _Rule(workspace_ranks=False)),
    _mutant("workspace-filtered", "a workspace held this rank's keys only", _Rule(workspace_filtered=True)),
    _edited("positions-counted", "the counts were those of the positions, whoever owns them",
            _given_counts(lambda inputs, slots: (inputs.positions >= 0).sum(1))),
    _edited("columns-counted", "the counts were the rows' width",
            _given_counts(lambda inputs, slots: torch.full((slots.shape[0],), slots.shape[1]))),
    _edited("count-is-a-limit", "as many columns as a row has slots were looked at", _cut_at_count),
    _edited("not-moved-to-the-front", "slots stayed in their columns", _in_place),
    _edited("moved-to-the-front", "slots moved to the front where they should stay", _moved_up),
    _edited("tail-not-filled", "behind the slots in front stood what stood there before", _unfilled),
    _edited("first-tile-only", "columns from the 1024th on had no slot", _first_tile),
    Mutant("table-pitch-is-its-width", "the rows of a narrowed table lay one behind the other", _wrong_pitch),
)  # fmt: skip


def _all_at_once(inputs: Inputs) -> Outputs:
    """Matrices instead of rows; slots in front stand in descending order."""
    positions, rows = inputs.positions.to(torch.int64), inputs.table.shape[0]
    group, place = positions // inputs.interleave, positions % inputs.interleave
    owner = group % inputs.world_size
    key = group // inputs.world_size * inputs.interleave + place
    request = inputs.requests.to(torch.int64)[:, None]
    column = key // inputs.block_size
    there = (positions >= 0) & (column < inputs.table.shape[1])
    cached = there & (owner == inputs.rank) & (request >= 0) & (request < rows)
    block = inputs.table.to(torch.int64)[request.clamp(0, rows - 1), torch.where(cached, column, 0)]
    slots = torch.where(cached, block * inputs.block_rows + key % inputs.block_size, -1)
    if inputs.workspace is not None:
        prefill = inputs.workspace.requests.to(torch.int64)[:, None]
        start = inputs.workspace.starts.to(torch.int64)[prefill.clamp(min=0)]
        gathered = torch.where(there, owner * inputs.workspace.rank_rows + start + key, -1)
        slots = torch.where(prefill >= 0, gathered, slots)
    if inputs.form == "front":
        slots = slots.sort(dim=1, descending=True).values
    return _formed(inputs, slots)


HONEST: tuple[Honest, ...] = (
    Honest("one-token-after-the-other", Precision(probability="exact"), reference),
    Honest("all-at-once", Precision(probability="exact"), _all_at_once),
)
