"""Which worker attends over which keys of which query rows, and which partial results belong together?

A plan is right when a persistent kernel that follows it computes every query row over all keys that the row sees. For the
tiles of `oracle.dense_mla.decode_tiles`:

    order          the workers' shares follow one another in the list of works
    coverage       every tile has a work; its works, by first key, follow one another without overlap from its first key on,
                   and end where it needs no more keys
    cuts           between the works of a tile lie whole blocks of `granularity` keys behind its first key, for that is how
                   a caller says where a batch may be cut
    remaining      of each work: keys of its request behind its last key, from which the kernel derives its mask
    scratch        a tile with one work has no scratch row; works of other tiles have one each, and no two of them, with as
                   many rows as a tile has, overlap or pass the reserved len(parts) * queries rows
    groups         of partial results: one for every tile with several works, none for others, in the order of tiles; it
                   names the tile's rows and the scratch rows of its works by first key
    group starts   begin with 0 and never fall, and behind the last tile they stay what they are
    budget         works beyond one a tile number less than the workers that the split cap leaves, of all tiles together

At which of these blocks a plan cuts is free; `oracle.dense_mla.decode_works` says where `reference` does. So is the share of
a worker: one that has all works makes a plan slow, not wrong. And a work may hold only keys that the first rows of its tile
do not see. The reference plan, whose tiles end in a work of as many keys as a request has rows, has no such work, but the
merge takes a part without a key for a row as none (`oracle.dense_mla.reduce_by_maps`).

Source: AITER's planner of version 1.2 and how its decode kernels and its reduction read a plan. Departures of that planner
which are wrong are among `MUTANTS`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from cases.dense_mla.decode_plan import Inputs, Outputs
from cases.memory import map_tensors, moved
from cases.precision import Precision
from oracle.check import Check, wrong_form
from oracle.dense_mla.decode_plan_faults import MUTANTS
from oracle.dense_mla.decode_tiles import Tile, folds, is_native, reserved, split_budget, tiles
from oracle.dense_mla.decode_works import UNDEFINED, Piece, blank, dealt, planned, written
from oracle.dense_mla.plan_check import Finding, plan_check
from oracle.laws import Honest, Law

__all__ = ["HONEST", "LAWS", "MUTANTS", "judge", "meaning", "reference"]


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The plan in its buffers; what lies behind the used part is garbage. `dtype` has no say in integers.

    A request without query rows has no work; one without keys has a work without keys, so that its rows are written.

    Raises TypeError for starts that are not contiguous int32; ValueError for starts of different length, a batch beyond the
    reserved one, heads that no kernel takes, a granularity that is no power of two, a split cap below 1, folded heads with
    requests of different numbers of rows, and buffers that cannot hold a plan.
    """
    del dtype
    _refuse(inputs)
    return planned(inputs)


def _refuse(inputs: Inputs) -> None:
    for name, starts in (("query_start", inputs.query_start), ("key_start", inputs.key_start)):
        if starts.dtype != torch.int32 or not starts.is_contiguous():
            form = "contiguous" if starts.is_contiguous() else "strided"
            raise TypeError(f"{name} is {form} {starts.dtype}: should be contiguous torch.int32")
    requests = inputs.query_start.numel() - 1
    if inputs.key_start.numel() != requests + 1:
        raise ValueError(
            f"key_start has {inputs.key_start.numel()} elements: should have {requests + 1} as query_start"
        )
    if requests > inputs.capacity_requests:
        raise ValueError(f"requests={requests}: should be {inputs.capacity_requests} or fewer, as reserved")
    if inputs.queries > inputs.capacity_queries:
        raise ValueError(f"queries={inputs.queries}: should be {inputs.capacity_queries} or fewer, as reserved")
    whole = inputs.heads % 16 == 0 and 16 <= inputs.heads <= 128
    if not whole and not (inputs.heads == 24 and is_native(inputs)):
        raise ValueError(
            f"heads={inputs.heads}: should be a multiple of 16 up to 128, or 24 where a kernel takes 24 as they are"
        )
    size = inputs.granularity
    if size < 1 or size & (size - 1):
        raise ValueError(f"granularity={size}: should be a power of two")
    if inputs.split_cap is not None and inputs.split_cap < 1:
        raise ValueError(f"split_cap={inputs.split_cap}: should be 1 or more, or None")
    rows = inputs.query_start.diff().unique().tolist()
    if folds(inputs) > 1 and len(rows) > 1:
        raise ValueError(f"requests of {rows} query rows: should have equally many where heads are folded")


@dataclasses.dataclass(frozen=True)
class _Work:
    """A row of `works` as the kernel reads it."""

    number: int
    request: int
    scratch: int
    rows: tuple[int, int]
    first_key: int
    last_key: int
    behind: int


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The lengths of the buffers, exactly, and every rule of a plan."""
    del precision
    forms = [
        wrong_form(field.name, getattr(outputs, field.name), getattr(blank(reserved(inputs)), field.name))
        for field in dataclasses.fields(Outputs)
    ]
    wrong = tuple(form for form in forms if form is not None)
    if wrong:
        return wrong
    starts = outputs.work_start.tolist()
    batch = tiles(inputs)
    order = plan_check(
        "order", len(starts), _out_of_order(starts, outputs.works.shape[0]), "the shares of workers follow one another"
    )
    if not order.passed:
        return (order,)
    works = [
        _Work(number, row[0], row[1], (row[2], row[3]), row[4], row[5], row[6])
        for number, row in enumerate(outputs.works[: starts[-1]].tolist())
    ]
    owners = {(tile.request, (tile.first_row, tile.last_row)): tile for tile in batch}
    # A request without rows needs no work, and a work of no rows does nothing.
    rowless = set(range(folds(inputs) * (inputs.query_start.numel() - 1))) - {tile.request for tile in batch}
    works = [work for work in works if not (work.request in rowless and work.rows[0] == work.rows[1])]
    by_tile: dict[Tile, list[_Work]] = {tile: [] for tile in batch}
    for work in works:
        if (work.request, work.rows) in owners:
            by_tile[owners[work.request, work.rows]].append(work)
    for own in by_tile.values():
        own.sort(key=lambda work: work.first_key)
    capacity = outputs.parts.numel() * inputs.queries
    groups = _group_starts(outputs)
    walk = plan_check("group starts", len(groups), _fallen(groups, len(batch), outputs.parts.numel()),
                      "the reduction walks all groups that are reserved")  # fmt: skip
    checks = [
        order,
        plan_check("coverage", len(batch), _uncovered(works, owners, by_tile),
                   "every query row is computed once over all keys that it sees"),
        plan_check("cuts", len(works), _uneven_cuts(inputs, by_tile), "a batch may be cut between blocks of keys"),
        plan_check("remaining", len(works), _misremaining(works, owners),
                   "the mask of a work counts from the last key of its request"),
        plan_check("scratch", len(works), _scratch_clashes(by_tile, capacity),
                   "partial results have rows of their own, and only they"),
        walk,
        plan_check("budget", len(batch), _overspent(inputs, by_tile), "the split cap is a budget of the whole batch"),
    ]  # fmt: skip
    if walk.passed:
        checks.append(
            plan_check("groups", len(batch), _misgrouped(outputs, by_tile), "what was computed apart is merged once")
        )
    return tuple(checks)


def _out_of_order(starts: list[int], reserved_works: int) -> Iterator[Finding]:
    if starts[0] != 0:
        yield Finding("work_start", 0, str(starts[0]), "0")
    for worker, (first, last) in enumerate(itertools.pairwise(starts)):
        if last < first:
            yield Finding("work_start", worker + 1, str(last), f"{first} or more, where worker {worker} begins")
    if starts[-1] > reserved_works:
        yield Finding("work_start", len(starts) - 1, str(starts[-1]), f"{reserved_works} or fewer, as reserved")


def _named(tile: Tile) -> str:
    return f"request {tile.request} tile {tile.number}"


def _uncovered(
    works: list[_Work], owners: dict[tuple[int, tuple[int, int]], Tile], by_tile: dict[Tile, list[_Work]]
) -> Iterator[Finding]:
    for work in works:
        if (work.request, work.rows) not in owners:
            own = [list(rows) for request, rows in owners if request == work.request]
            yield Finding(
                "query rows of work", work.number, f"{list(work.rows)} of request {work.request}",
                f"one of {own}" if own else "those of a request that is here",
            )  # fmt: skip
    for place, (tile, own_works) in enumerate(by_tile.items()):
        if not own_works:
            yield Finding(
                f"works of {_named(tile)}, tile",
                place,
                "none",
                f"one or more over keys {tile.first_key}..{tile.needed}",
            )
            continue
        expected = tile.first_key
        for work in own_works:
            if work.first_key != expected:
                kind = "overlap" if work.first_key < expected else "gap"
                yield Finding(f"first key of {_named(tile)}, work", work.number, str(work.first_key),
                              f"{expected}: {kind} of {abs(work.first_key - expected)} keys")  # fmt: skip
            if work.last_key < work.first_key or (len(own_works) > 1 and work.last_key == work.first_key):
                yield Finding(f"keys of {_named(tile)}, work", work.number, f"{work.first_key}..{work.last_key}",
                              "one key or more")  # fmt: skip
            expected = work.last_key
        if not tile.needed <= expected <= tile.last_key:
            yield Finding(f"last key of {_named(tile)}, work", own_works[-1].number, str(expected),
                          f"{tile.needed} to {tile.last_key}")  # fmt: skip


def _uneven_cuts(inputs: Inputs, by_tile: dict[Tile, list[_Work]]) -> Iterator[Finding]:
    for tile, works in by_tile.items():
        for work in works[1:]:
            beyond = (work.first_key - tile.first_key) % inputs.granularity
            if beyond:
                yield Finding(f"first key of {_named(tile)}, work", work.number, str(work.first_key),
                              f"{work.first_key - beyond} or {work.first_key - beyond + inputs.granularity}, "
                              f"whole blocks of {inputs.granularity} keys behind {tile.first_key}")  # fmt: skip


def _misremaining(works: list[_Work], owners: dict[tuple[int, tuple[int, int]], Tile]) -> Iterator[Finding]:
    for work in works:
        tile = owners.get((work.request, work.rows))
        if tile is not None and work.behind != tile.last_key - work.last_key:
            yield Finding(f"remaining keys of {_named(tile)}, work", work.number, str(work.behind),
                          str(tile.last_key - work.last_key))  # fmt: skip


def _scratch_clashes(by_tile: dict[Tile, list[_Work]], capacity: int) -> Iterator[Finding]:
    used: list[tuple[int, int, int, str]] = []
    for tile, works in by_tile.items():
        for work in works:
            if len(works) == 1 and work.scratch != -1:
                yield Finding(f"scratch row of {_named(tile)}, work", work.number, str(work.scratch),
                              "-1, because it is the tile's only work")  # fmt: skip
            elif len(works) > 1:
                last = work.scratch + tile.rows
                if work.scratch < 0 or last > capacity:
                    yield Finding(f"scratch row of {_named(tile)}, work", work.number, str(work.scratch),
                                  f"0 to {capacity - tile.rows}, because the tile has {len(works)} works")  # fmt: skip
                used.append((work.scratch, last, work.number, _named(tile)))
    for (_, last, number, _), (first, _, other, name) in itertools.pairwise(sorted(used)):
        if first < last:
            yield Finding(
                f"scratch row of {name}, work", other, str(first), f"{last} or more, behind those of work {number}"
            )


def _group_starts(outputs: Outputs) -> list[int]:
    return [int(start) for start in outputs.group_start.tolist()]


def _fallen(starts: list[int], count: int, capacity: int) -> Iterator[Finding]:
    if starts[0] != 0:
        yield Finding("group_start", 0, str(starts[0]), "0")
    for number, (first, last) in enumerate(itertools.pairwise(starts)):
        if last < first or last > capacity:
            yield Finding("group_start", number + 1, str(last), f"{first} to {capacity}")
        elif number >= count and last != first:
            yield Finding("group_start", number + 1, str(last), f"{first}, as behind the last tile")


def _misgrouped(outputs: Outputs, by_tile: dict[Tile, list[_Work]]) -> Iterator[Finding]:
    starts = _group_starts(outputs)
    rows, parts = outputs.groups.tolist(), outputs.parts.tolist()
    found = []
    for number, (first, last) in enumerate(itertools.pairwise(starts)):
        if last - first == 1:
            yield Finding("size of group", number, "1", "0, or 2 and more: one partial result is never merged")
        elif last > first and rows[number][0] != rows[number][1]:
            found.append((number, rows[number], parts[first:last]))
    split = [(tile, works) for tile, works in by_tile.items() if len(works) > 1]
    for (number, got_rows, got_parts), (tile, works) in zip(found, split, strict=False):
        if got_rows != [tile.first_row, tile.last_row]:
            yield Finding("query rows of group", number, str(got_rows),
                          f"{[tile.first_row, tile.last_row]}, those of {_named(tile)}")  # fmt: skip
        if got_parts != [work.scratch for work in works]:
            yield Finding("scratch rows of group", number, str(got_parts),
                          f"{[work.scratch for work in works]}, those of {_named(tile)} by first key")  # fmt: skip
    if len(found) != len(split):
        yield Finding("number of groups", len(found), str(len(found)), f"{len(split)}, one a split tile")


def _overspent(inputs: Inputs, by_tile: dict[Tile, list[_Work]]) -> Iterator[Finding]:
    allowed = split_budget(inputs)
    spent = 0
    for place, (tile, works) in enumerate(by_tile.items()):
        spent += max(0, len(works) - 1)
        if spent >= allowed:
            yield Finding(
                f"works of {_named(tile)}, tile", place, f"{spent} beyond one a tile so far", f"{allowed - 1} or fewer"
            )
            return


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    fresh = map_tensors(inputs, lambda tensor: moved(tensor, "cpu"))
    return dataclasses.replace(fresh, **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


@dataclasses.dataclass(frozen=True)
class Used:
    """The part of a plan that means something: the workers' shares, their works, and every group's rows and parts."""

    work_start: torch.Tensor
    works: torch.Tensor
    groups: torch.Tensor
    parts: torch.Tensor


def meaning(outputs: Outputs) -> Used:
    """What a kernel and its reduction read of a plan."""
    sizes = outputs.group_start.diff()
    used = sizes.nonzero()[:, 0]
    return Used(
        outputs.work_start, outputs.works[: int(outputs.work_start[-1]), :7],
        torch.cat((outputs.groups[used], sizes[used, None]), dim=1), outputs.parts[: int(outputs.group_start[-1])],
    )  # fmt: skip


def _told_or_not(inputs: Inputs) -> Inputs | None:
    rows = inputs.query_start.diff()
    return _edited(inputs, told=not inputs.told) if bool((rows == inputs.queries).all()) else None


def _more_reserved(inputs: Inputs) -> Inputs:
    return _edited(inputs, capacity_requests=inputs.capacity_requests + 3)


def _unmasked(inputs: Inputs) -> Inputs | None:
    """A batch whose tiles hold all rows of their requests, so that the mask leaves no key out."""
    alone = all(tile.of == 1 for tile in tiles(inputs))
    return _edited(inputs, mask="none" if inputs.mask == "causal" else "causal") if alone else None


def _cap_beyond_workers(inputs: Inputs) -> Inputs | None:
    return _edited(inputs, split_cap=inputs.compute_units) if inputs.split_cap is None else None


def _each_row_once(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    """Works over all keys at once, which name the same tiles."""
    del first, inputs
    batch = tiles(edited)
    return written(edited, batch, [Piece(place, 0, tile.first_key, tile.last_key) for place, tile in enumerate(batch)])


def _rows_named(outputs: Outputs) -> torch.Tensor:
    """The query rows that works name, each tile once."""
    works = outputs.works[: int(outputs.work_start[-1]), [0, 2, 3]]
    named: torch.Tensor = torch.unique(works[works[:, 1] != works[:, 2]], dim=0)
    return named


LAWS: tuple[Law, ...] = (
    Law("D1 told or not", "a batch of equally many query rows is the same batch, whether or not the planner is told",
        _told_or_not, _same, "bitwise", view=meaning),
    Law("D2 more requests reserved", "what is reserved has no say in the plan", _more_reserved, _same, "bitwise",
        view=meaning),
    Law("D3 another mask", "where every tile holds all rows of its request, the mask has no say in the plan", _unmasked,
        _same, "bitwise", view=meaning),
    Law("D4 cap beyond the workers", "a cap as large as the number of workers is none", _cap_beyond_workers, _same,
        "bitwise", view=meaning),
    Law("D5 every tile named", "works name the tiles of the batch, and nothing else", _edited, _each_row_once, "bitwise",
        view=_rows_named),
)  # fmt: skip


def _way(
    cut: Callable[[Inputs, Sequence[Tile]], list[Piece]], undefined: int = UNDEFINED
) -> Callable[[Inputs], Outputs]:
    return lambda inputs: written(inputs, tiles(inputs), cut(inputs, tiles(inputs)), undefined)


def _unsplit(inputs: Inputs, batch: Sequence[Tile]) -> list[Piece]:
    """Whole tiles in turn, each with all keys of its request."""
    workers = sorted(place % inputs.compute_units for place in range(len(batch)))
    return [
        Piece(place, worker, tile.first_key, tile.last_key)
        for place, (tile, worker) in enumerate(zip(batch, workers, strict=True))
    ]


def _halved(inputs: Inputs, batch: Sequence[Tile]) -> list[Piece]:
    """The first tiles in two halves of whole blocks, as long as the budget lasts, with no key that a tile does not need."""
    budget, worker = split_budget(inputs) - 1, 0
    pieces = []
    for place, tile in enumerate(batch):
        blocks = -(-(tile.needed - tile.first_key) // inputs.granularity)
        middle = tile.first_key + blocks // 2 * inputs.granularity
        if budget and middle > tile.first_key:
            pieces += [Piece(place, worker, tile.first_key, middle), Piece(place, worker + 1, middle, tile.needed)]
            budget, worker = budget - 1, worker + 1
        else:
            pieces.append(Piece(place, worker, tile.first_key, tile.needed))
    return pieces


_EXACT = Precision(probability="exact", note="integers")
HONEST: tuple[Honest, ...] = (
    Honest("blocks-dealt-in-order", _EXACT, _way(dealt)),
    Honest("whole-tiles", _EXACT, _way(_unsplit, undefined=0)),
    Honest("halves", _EXACT, _way(_halved, undefined=-1)),
)
