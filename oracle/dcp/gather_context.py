"""Where do the rows of a chunk of context stand once all ranks have sent theirs?

W ranks in turns of I tokens; pr(n) = ceil(n / (W I)) I is what each rank sends for n tokens, whole turns even where it
holds fewer. For request j with n_j tokens from position s_j of a context of L_j:

    local_start_j = pr(s_j)        padded_j = pr(s_j + n_j) - local_start_j        A = sum of padded
    off_j         = padded_0 + ... + padded_(j-1)
    workspace[off_j + i]                    = this rank's row local_start_j + i of the request        0 <= i < padded_j
    workspace[C / W + q A + off_j + i]      = rank q's row local_start_j + i
    rows          = for every j, for every q: q A + off_j, ... + count_jq - 1
    count_jq      = min(max(0, tokens of L_j on rank q - local_start_j), padded_j)
    context       = gathered[rows],  gathered = workspace[C / W :]

for a workspace of C + C / W rows. Rows that a rank does not hold are sent all the same and mean nothing; `rows` leaves
them out, so it has as many entries as the chunk has tokens. Within a request the order is rank after rank, not that of
positions: attention to a context without a mask does not depend on it. Sources: `build_mla_chunked_context_metadata` and
`reorg_kvcache` of vLLM's MLA attention, `context_row_indices` and `gather_compressed_context` of its ROCm prefill.
"""

import dataclasses
import itertools
from collections.abc import Callable

import torch

from cases.dcp.gather_context import Inputs, Outputs, alignment
from cases.memory import guarded, guarded_copy, map_tensors, moved
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.dcp.shards import held, index_of, rank_of
from oracle.laws import Honest, Law, Mutant


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where the gathering can be got wrong; the defaults are right."""

    padded_by_tokens: bool = False
    padded_by_first_rank: bool = False
    ranks_within_requests: bool = False
    offsets_restart: bool = False
    counts_of_the_chunk: bool = False
    counts_unbounded: bool = False
    counts_padded: bool = False
    rows_by_position: bool = False
    reads_from_the_start: bool = False
    own_rows_only: bool = False
    ranks_reversed: bool = False
    ranks_from_own: bool = False
    blocks_of_one_rank: bool = False
    blocks_of_first_request: bool = False
    place_of_the_chunk: bool = False
    gathered_behind_local: bool = False
    gathered_first: bool = False
    local_forgotten: bool = False
    context_with_padding: bool = False


RIGHT = Faults()


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Per request: rows that each rank sends, where they start on it, where in a slab, and how many count of each rank."""

    padded: list[int]
    local_starts: list[int]
    offsets: list[int]
    counts: list[list[int]]

    @property
    def slab(self) -> int:
        """Rows that each rank sends."""
        return sum(self.padded)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The plan, the workspace and the context; `dtype` changes nothing, since rows are moved as they are.

    In the workspace, rows that mean nothing are left alone. Raises ValueError for a rank that is none, turns that do not
    divide the block, a chunk that starts or ends between multiples of block and round, or outside its context, a
    workspace that is not divided by the ranks or too small, and a table with too few columns; IndexError for a block that
    is none.
    """
    del dtype
    check(inputs)
    return _gathered(inputs, RIGHT)


def check(inputs: Inputs) -> None:
    """Raises what `reference` says of calls that are malformed in themselves."""
    ranks, turn, size = inputs.ranks, inputs.interleave, inputs.block_size
    if not 0 <= inputs.rank < ranks:
        raise ValueError(f"rank={inputs.rank}: should be 0 to {ranks - 1}")
    if turn < 1 or size % turn:
        raise ValueError(f"interleave={turn}: should divide block_size={size}")
    step = alignment(ranks, turn, size)
    spans = zip(inputs.contexts, inputs.starts, inputs.lengths, strict=True)
    for request, (context, start, length) in enumerate(spans):
        end = start + length
        if start % step:
            raise ValueError(f"start={start}: should be a multiple of {step}")
        if not 0 <= start <= end <= context:
            raise ValueError(f"start={start}, length={length}: should lie in a context of {context}")
        if end % step and end != context:
            raise ValueError(f"end={end}: should be a multiple of {step}, or the context's {context}")
        columns = -(-end // (size * ranks))
        if inputs.table.shape[1] < columns:
            raise ValueError(f"table has {inputs.table.shape[1]} columns: should hold {end} tokens")
        used, blocks = inputs.table[request, start // (size * ranks) : columns].tolist(), inputs.caches[0].shape[0]
        if any(not 0 <= block < blocks for block in used):
            raise IndexError(f"blocks={used}: should be 0 to {blocks - 1}")
    rows = inputs.workspace.shape[0]
    slab = _planned(inputs, RIGHT).slab
    if rows % (ranks + 1) or rows // (ranks + 1) < slab:
        raise ValueError(f"workspace={rows} rows: should be {ranks + 1} times {slab} or more")


def _padded(inputs: Inputs, tokens: int, wrong: Faults) -> int:
    if wrong.padded_by_tokens:
        return -(-tokens // inputs.ranks)
    if wrong.padded_by_first_rank:
        return _held(inputs, tokens, 0)
    return -(-tokens // (inputs.ranks * inputs.interleave)) * inputs.interleave


def _held(inputs: Inputs, tokens: int, rank: int) -> int:
    return int(held(torch.tensor(tokens), rank, inputs.ranks, inputs.interleave))


def _planned(inputs: Inputs, wrong: Faults) -> _Plan:
    padded, local_starts, counts = [], [], []
    for context, start, length in zip(inputs.contexts, inputs.starts, inputs.lengths, strict=True):
        local_start = _padded(inputs, start, wrong)
        rows = _padded(inputs, start + length, wrong) - local_start
        total = length if wrong.counts_of_the_chunk else context
        shares = [_held(inputs, total, rank) - local_start for rank in range(inputs.ranks)]
        if wrong.counts_padded:
            shares = [rows] * inputs.ranks
        if not wrong.counts_unbounded:
            shares = [min(share, rows) for share in shares]
        padded.append(rows)
        local_starts.append(local_start)
        counts.append([max(0, share) for share in shares])
    offsets = list(itertools.accumulate(padded, initial=0))[:-1]
    return _Plan(padded, local_starts, [0] * len(offsets) if wrong.offsets_restart else offsets, counts)


def _rows(inputs: Inputs, plan: _Plan, wrong: Faults) -> torch.Tensor:
    """Where each row of the chunk stands among the gathered ones, int64."""
    rows = []
    for request, counts in enumerate(plan.counts):
        for rank, count in enumerate(counts):
            first = rank * plan.slab + plan.offsets[request]
            if wrong.ranks_within_requests:
                first = plan.offsets[request] * inputs.ranks + rank * plan.padded[request]
            rows.append(first + torch.arange(count))
        if wrong.rows_by_position and rows:
            position = inputs.starts[request] + torch.arange(inputs.lengths[request])
            owner = rank_of(position, inputs.ranks, inputs.interleave)
            place = index_of(position, inputs.ranks, inputs.interleave) - plan.local_starts[request]
            rows[-len(counts) :] = [owner * plan.slab + plan.offsets[request] + place]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def _source(
    inputs: Inputs, plan: _Plan, request: int, place: torch.Tensor, wrong: Faults
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and places in them of the rows that a rank sends as a request's `place`-th."""
    index = place if wrong.reads_from_the_start else plan.local_starts[request] + place
    size = inputs.block_size
    column = index // (size * inputs.ranks) if wrong.blocks_of_one_rank else index // size
    within = place % size if wrong.place_of_the_chunk else index % size
    return inputs.table[0 if wrong.blocks_of_first_request else request].long()[column], within


def _sender(inputs: Inputs, rank: int, wrong: Faults) -> int:
    """Whose rows stand where rank `rank`'s should."""
    if wrong.own_rows_only:
        return inputs.rank
    if wrong.ranks_reversed:
        return inputs.ranks - 1 - rank
    return (inputs.rank + rank) % inputs.ranks if wrong.ranks_from_own else rank


def _gathered(inputs: Inputs, wrong: Faults) -> Outputs:
    plan = _planned(inputs, wrong)
    answer = inputs.workspace.clone()
    # As bytes, which rows of every dtype are.
    workspace = answer.view(torch.uint8)
    ranks, share = inputs.ranks, answer.shape[0] // (inputs.ranks + 1)
    behind = plan.slab if wrong.gathered_behind_local else 0 if wrong.gathered_first else share
    local = workspace[ranks * share :] if wrong.gathered_first else workspace
    # What no rank holds is what the workspace held.
    gathered = workspace[:1].repeat(max(ranks * plan.slab, 1), 1)
    for request, (counts, offset) in enumerate(zip(plan.counts, plan.offsets, strict=True)):
        for rank, count in enumerate(counts):
            place = torch.arange(min(count, plan.padded[request]), device=workspace.device)
            block, within = _source(inputs, plan, request, place, wrong)
            # Only a wrong answer meets blocks that are none.
            known = (block >= 0) & (block < inputs.caches[0].shape[0])
            place, block, within = place[known], block[known], within[known]
            at = rank * plan.slab + offset + place
            gathered[at] = inputs.caches[_sender(inputs, rank, wrong)].view(torch.uint8)[block, within]
            fitting = at[behind + at < workspace.shape[0]]
            workspace[behind + fitting] = gathered[fitting]
            if rank == inputs.rank and not wrong.local_forgotten:
                local[offset + place] = inputs.caches[inputs.rank].view(torch.uint8)[block, within]
    rows = _rows(inputs, plan, wrong)
    taken = torch.arange(rows.numel()) if wrong.context_with_padding else rows.clamp(max=gathered.shape[0] - 1)
    return Outputs(
        padded=torch.tensor(plan.padded, dtype=torch.int64),
        local_starts=torch.tensor(plan.local_starts, dtype=torch.int64),
        rows=rows.to(torch.int32),
        workspace=answer,
        context=gathered[taken].view(answer.dtype),
    )


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The plan, the rows' places and the context bit for bit, and the workspace where it holds a token's row."""
    del precision
    want = reference(inputs)
    return (
        exact("padded", outputs.padded, want.padded, why="every rank sends whole turns"),
        exact("local_starts", outputs.local_starts, want.local_starts, why="what was sent before is whole turns too"),
        exact("rows", outputs.rows, want.rows, why="rank after rank, without the rows that a rank does not hold"),
        exact("workspace", outputs.workspace, want.workspace, mask=_meaningful(inputs)[:, None],
              why="the rank's own rows first, then a slab of every rank's"),
        exact("context", outputs.context, want.context, why="rows are moved as they are"),
    )  # fmt: skip


def _meaningful(inputs: Inputs) -> torch.Tensor:
    """Which rows of the workspace hold a token's row, bool."""
    plan = _planned(inputs, RIGHT)
    rows = inputs.workspace.shape[0]
    mask = torch.zeros(rows, dtype=torch.bool, device=inputs.workspace.device)
    found = _rows(inputs, plan, RIGHT)
    mask[rows // (inputs.ranks + 1) + found] = True
    own = found[(found >= inputs.rank * plan.slab) & (found < (inputs.rank + 1) * plan.slab)]
    mask[own - inputs.rank * plan.slab] = True
    return mask


def _edited(inputs: Inputs, rows: int | None = None, **changes: object) -> Inputs:
    """The call with something changed, and a workspace of its own."""
    shape = (inputs.workspace.shape[0] if rows is None else rows, inputs.workspace.shape[1])
    return dataclasses.replace(inputs, workspace=guarded(shape, inputs.workspace.dtype), **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _without_workspace(outputs: Outputs) -> Outputs:
    """The answer but for the workspace, some rows of which mean nothing."""
    return dataclasses.replace(outputs, workspace=outputs.workspace[:0])


def _blocks_reversed(inputs: Inputs) -> Inputs | None:
    """Block b is block n - 1 - b, in every cache and in the table."""
    if any(cache.untyped_storage().nbytes() > 1 << 28 for cache in inputs.caches):
        return None
    count = inputs.caches[0].shape[0]
    known = (inputs.table >= 0) & (inputs.table < count)
    table = torch.where(known, count - 1 - inputs.table, inputs.table)
    return _edited(
        inputs, caches=tuple(guarded_copy(_flipped(cache)) for cache in inputs.caches), table=guarded_copy(table)
    )


def _flipped(cache: torch.Tensor) -> torch.Tensor:
    """The blocks in reverse order; as bytes, which every dtype can be moved as."""
    return cache.contiguous().view(torch.uint8).flip(0).view(cache.dtype)


def _another_rank(inputs: Inputs) -> Inputs:
    return _edited(inputs, rank=(inputs.rank + 1) % inputs.ranks)


def _more_room(inputs: Inputs) -> Inputs:
    return _edited(inputs, rows=inputs.workspace.shape[0] + 4 * (inputs.ranks + 1))


def _requests_reversed(inputs: Inputs) -> Inputs | None:
    if len(inputs.contexts) < 2:
        return None
    return _edited(
        inputs, contexts=inputs.contexts[::-1], starts=inputs.starts[::-1], lengths=inputs.lengths[::-1],
        table=guarded_copy(inputs.table.flip(0)),
    )  # fmt: skip


def _of_requests(outputs: Outputs) -> Outputs:
    """What does not depend on where other requests stand."""
    return dataclasses.replace(_without_workspace(outputs), rows=outputs.rows[:0])


def _in_that_order(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    parts = first.context.view(torch.uint8).split(list(inputs.lengths))[::-1]
    context = torch.cat(parts).view(first.context.dtype)
    return dataclasses.replace(
        first, padded=first.padded.flip(0), local_starts=first.local_starts.flip(0), context=context
    )


def _longer_contexts(inputs: Inputs) -> Inputs | None:
    """A chunk that ends with a whole round does not ask how long the context goes on."""
    step = alignment(inputs.ranks, inputs.interleave, inputs.block_size)
    ends = [start + length for start, length in zip(inputs.starts, inputs.lengths, strict=True)]
    if not ends or any(end % step for end in ends):
        return None
    return _edited(inputs, contexts=tuple(context + 5 for context in inputs.contexts))


def _stale_workspace(inputs: Inputs) -> Inputs:
    fresh = map_tensors(inputs, lambda tensor: moved(tensor, "cpu"))
    fresh.workspace.view(torch.uint8).fill_(0x11)
    return fresh


LAWS: tuple[Law, ...] = (
    Law("G1 blocks reversed", "which block holds a token does not matter", _blocks_reversed, _same, "bitwise",
        _without_workspace),
    Law("G2 another rank", "every rank ends up with the same context", _another_rank, _same, "bitwise",
        _without_workspace),
    Law("G3 more room", "a larger workspace changes no place in the gathered rows", _more_room, _same, "bitwise",
        _without_workspace),
    Law("G4 requests reversed", "each request is gathered by itself", _requests_reversed, _in_that_order, "bitwise",
        _of_requests),
    Law("G5 longer contexts", "what comes behind a whole round is not asked about", _longer_contexts, _same, "bitwise",
        _without_workspace),
    Law("G6 stale workspace", "what the workspace held before does not matter", _stale_workspace, _same, "bitwise",
        _without_workspace),
)  # fmt: skip


def _mutant(name: str, pitfall: str, **faults: bool) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _gathered(inputs, Faults(**faults)))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("padded-token-by-token", "ranks sent no whole turns", padded_by_tokens=True),
    _mutant("padded-to-the-first-rank", "every rank sent as many rows as the first one holds",
            padded_by_first_rank=True),
    _mutant("ranks-within-requests", "the ranks' rows of each request stood next to each other",
            ranks_within_requests=True),
    _mutant("offsets-restart", "every request stood at the front of a slab", offsets_restart=True),
    _mutant("counts-of-the-chunk", "a rank's rows were counted in the chunk alone", counts_of_the_chunk=True),
    _mutant("counts-unbounded", "rows behind the chunk were counted", counts_unbounded=True),
    _mutant("padding-counted", "rows that a rank does not hold were kept", counts_padded=True),
    _mutant("rows-by-position", "rows stood in the order of positions", rows_by_position=True),
    _mutant("chunk-from-the-start", "every chunk were gathered from its context's start", reads_from_the_start=True),
    _mutant("own-rows-for-all", "every rank had sent this rank's rows", own_rows_only=True),
    _mutant("ranks-reversed", "the last rank's slab came first", ranks_reversed=True),
    _mutant("slabs-from-own", "the slabs began with this rank's", ranks_from_own=True),
    _mutant("column-over-all-ranks", "a block held the tokens of all ranks", blocks_of_one_rank=True),
    _mutant("blocks-of-the-first-request", "all requests used the first row of the table",
            blocks_of_first_request=True),
    _mutant("place-in-the-chunk", "the first row of a chunk stood at the front of a block", place_of_the_chunk=True),
    _mutant("gathered-behind-local", "gathered rows began where the rank's own ended", gathered_behind_local=True),
    _mutant("gathered-first", "gathered rows stood before the rank's own", gathered_first=True),
    _mutant("local-rows-forgotten", "the rank's own rows were gathered only", local_forgotten=True),
    _mutant("context-with-padding", "the context were the first rows that were gathered", context_with_padding=True),
)  # fmt: skip


def _position_by_position(inputs: Inputs) -> Outputs:
    """Every token by its position: it is sent by its owner, and a stable sort by owner puts the request in order."""
    turn, ranks, size = inputs.interleave, inputs.ranks, inputs.block_size
    period = turn * ranks
    padded = [-(-n // period) * turn for n in inputs.lengths]
    offsets, slab = list(itertools.accumulate(padded, initial=0)), sum(padded)
    workspace = moved(inputs.workspace, inputs.workspace.device)
    share = workspace.shape[0] // (ranks + 1)
    # Rows of padding have something else in them than the reference leaves there.
    workspace.view(torch.uint8).fill_(0x22)
    rows: list[int] = []
    for request, (start, length) in enumerate(zip(inputs.starts, inputs.lengths, strict=True)):
        found = []
        for position in range(start, start + length):
            owner = position // turn % ranks
            index = position // period * turn + position % turn
            place = offsets[request] + index - start // ranks
            row = inputs.caches[owner][int(inputs.table[request, index // size]), index % size]
            workspace[share + owner * slab + place] = row
            if owner == inputs.rank:
                workspace[place] = row
            found.append(owner * slab + place)
        rows += sorted(found)
    where = torch.tensor(rows, dtype=torch.int64)
    return Outputs(
        padded=torch.tensor(padded, dtype=torch.int64),
        local_starts=torch.tensor([start // ranks for start in inputs.starts], dtype=torch.int64),
        rows=where.to(torch.int32),
        workspace=workspace,
        context=workspace[share + where],
    )


_WAYS: tuple[tuple[str, Callable[[Inputs], Outputs]], ...] = (
    ("rank-by-rank", reference),
    ("position-by-position", _position_by_position),
)
HONEST: tuple[Honest, ...] = tuple(
    Honest(name, Precision(probability="exact", note="rows are moved"), answer) for name, answer in _WAYS
)
