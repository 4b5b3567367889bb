"""Which wrong plans of a decode batch must be refused?

Three kinds: tiles of another batch than the one asked, works that do not cover the tiles, and buffers that do not say what
the works need. The first of them are what AITER's planner of version 1.2 does.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cases.dense_mla.decode_plan import Inputs, Outputs
from oracle.dense_mla.decode_tiles import FOLDED_HEADS, Sizes, Tile, folds, reserved, split_budget, tiles
from oracle.dense_mla.decode_works import Piece, blank, dealt, planned, written
from oracle.laws import Mutant

_Tiles = list[Tile]
_Pieces = list[Piece]


def _of_tiles(change: Callable[[Inputs, _Tiles], _Tiles | None]) -> Callable[[Inputs], Outputs | None]:
    """The reference plan of other tiles, as far as the buffers of the batch hold it."""

    def answer(inputs: Inputs) -> Outputs | None:
        batch = change(inputs, tiles(inputs))
        return None if batch is None else _fitted(inputs, batch, dealt(inputs, batch))

    return answer


def _of_works(change: Callable[[Inputs, _Tiles, _Pieces], _Pieces | None]) -> Callable[[Inputs], Outputs | None]:
    """The right tiles with other works."""

    def answer(inputs: Inputs) -> Outputs | None:
        batch = tiles(inputs)
        pieces = change(inputs, batch, dealt(inputs, batch))
        return None if pieces is None else _fitted(inputs, batch, pieces)

    return answer


def _of_buffers(change: Callable[[Inputs, Outputs], Outputs | None]) -> Callable[[Inputs], Outputs | None]:
    """The reference plan, written wrongly."""
    return lambda inputs: change(inputs, planned(inputs))


def _fitted(inputs: Inputs, batch: Sequence[Tile], pieces: Sequence[Piece]) -> Outputs | None:
    sizes = reserved(inputs)
    counts = [sum(1 for _ in group) for _, group in itertools.groupby(sorted(piece.tile for piece in pieces))]
    parts = sum(count for count in counts if count > 1)
    fits = len(pieces) <= sizes.works and len(batch) <= sizes.groups and parts <= sizes.parts
    return written(inputs, batch, pieces) if fits else None


def _changed(tile: Tile, **changes: Any) -> Tile:
    return dataclasses.replace(tile, **changes)


def _taken_to(cut: Callable[[Inputs, Tile], int | None]) -> Callable[[Inputs, _Tiles], _Tiles | None]:
    """Tiles whose keys end elsewhere; None where they end in the right range after all."""

    def change(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
        ends = [cut(inputs, tile) for tile in batch]
        if all(end is None or tile.needed <= end <= tile.last_key for tile, end in zip(batch, ends, strict=True)):
            return None
        return [
            tile if end is None else _changed(tile, taken=max(tile.first_key, end))
            for tile, end in zip(batch, ends, strict=True)
        ]

    return change


def _one_too_few(inputs: Inputs, tile: Tile) -> int | None:
    del inputs
    return tile.needed - 1 if tile.needed > tile.first_key else None


def _by_rows(inputs: Inputs, tile: Tile) -> int | None:
    return tile.last_key - (tile.of - 1 - tile.number) * tile.rows if inputs.mask == "causal" else None


def _as_if_causal(inputs: Inputs, tile: Tile) -> int | None:
    return tile.last_key - (tile.of - 1 - tile.number) if inputs.mask != "causal" else None


def _folded_and_trimmed(inputs: Inputs, tile: Tile) -> int | None:
    ratio = folds(inputs)
    if ratio == 1 or inputs.mask != "causal" or not inputs.told:
        return None
    return tile.last_key - max(0, tile.of - 1 - tile.first_row // ratio % inputs.queries)


def _without_own_key(inputs: Inputs, tile: Tile) -> int | None:
    rows = tile.last_row - tile.first_row
    return tile.needed - rows if inputs.mask == "causal" and tile.needed - rows > tile.first_key else None


def _asked(**changes: Any) -> Callable[[Inputs, _Tiles], _Tiles | None]:
    """The tiles of a call with other arguments."""

    def change(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
        other = tiles(dataclasses.replace(inputs, **changes))
        return None if other == batch else other

    return change


def _of_one_query(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
    starts = torch.arange(inputs.query_start.numel(), dtype=torch.int32)
    return _asked(query_start=starts, queries=1)(inputs, batch)


def _in_pages(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
    starts = torch.nn.functional.pad(-(-inputs.key_start.diff() // 64), (1, 0)).cumsum(0).to(torch.int32)
    return _asked(key_start=starts)(inputs, batch)


def _unfolded(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
    ratio = folds(inputs)
    return None if ratio == 1 else [tile for tile in batch if tile.request < len(batch) // ratio]


def _keys_of_folded(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
    """Keys of the request that has a folded request's number, the last one's where there is none."""
    if folds(inputs) == 1:
        return None
    starts = inputs.key_start.tolist()
    found = []
    for tile in batch:
        number = min(tile.request, len(starts) - 2)
        found.append(_changed(tile, first_key=starts[number], last_key=starts[number + 1], taken=starts[number + 1]))
    return found


def _rows_beyond(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
    """Rows by the starts of unfolded requests, and what lies behind them, taken for the last start."""
    if folds(inputs) == 1 or inputs.told:
        return None
    starts = inputs.query_start.tolist()
    starts += [starts[-1]] * len(batch)
    found = []
    for tile in batch:
        first = starts[tile.request] + tile.number * tile.rows
        last = min(first + tile.rows, starts[tile.request + 1])
        found.append(_changed(tile, first_row=first, last_row=max(first, last)))
    return found


def _keys_from_zero(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
    del inputs
    return [
        _changed(tile, first_key=0, last_key=tile.last_key - tile.first_key, taken=tile.taken - tile.first_key)
        for tile in batch
    ]


def _rows_whole(inputs: Inputs, batch: _Tiles) -> _Tiles | None:
    del inputs
    return [_changed(tile, last_row=tile.first_row + tile.rows) for tile in batch]


def _last_tiles_without_work(inputs: Inputs, batch: _Tiles, right: _Pieces) -> _Pieces | None:
    """The worker's share computed as if every request had one tile, where nobody says how many it has."""
    del right
    if inputs.told or all(tile.of == 1 for tile in batch):
        return None
    return dealt(inputs, batch, [tile for tile in batch if tile.number == 0])


def _empty_opening_a_worker_lost(inputs: Inputs, batch: _Tiles, right: _Pieces) -> _Pieces | None:
    del inputs, batch
    lost = {
        after
        for before, after in itertools.pairwise(right)
        if after.first_key == after.last_key and after.worker != before.worker
    }
    return [piece for piece in right if piece not in lost] if lost else None


def _empty_lost(inputs: Inputs, batch: _Tiles, right: _Pieces) -> _Pieces | None:
    del inputs, batch
    return [piece for piece in right if piece.last_key > piece.first_key]


def _without_cap(inputs: Inputs, batch: _Tiles, right: _Pieces) -> _Pieces | None:
    del right
    return dealt(dataclasses.replace(inputs, split_cap=None), batch) if inputs.split_cap else None


def _cap_of_each(inputs: Inputs, batch: _Tiles, right: _Pieces) -> _Pieces | None:
    """Every tile in as many parts as the cap says, where that is more than the workers can have."""
    del right
    if inputs.split_cap is None:
        return None
    found = []
    for place, tile in enumerate(batch):
        step = -(-(tile.taken - tile.first_key) // inputs.split_cap)
        cuts = [*range(tile.first_key, tile.taken, max(1, step)), tile.taken] if step else [tile.first_key, tile.taken]
        found += [Piece(place, 0, first, last) for first, last in itertools.pairwise(cuts)]
    if len(found) - len(batch) < split_budget(inputs):
        return None
    return [
        dataclasses.replace(piece, worker=number * inputs.compute_units // len(found))
        for number, piece in enumerate(found)
    ]


def _second_parts(shift: int) -> Callable[[Inputs, _Tiles, _Pieces], _Pieces | None]:
    """Every part but the first of its tile begins so many keys elsewhere."""

    def change(inputs: Inputs, batch: _Tiles, right: _Pieces) -> _Pieces | None:
        del inputs
        return [
            piece if piece.first_key == batch[piece.tile].first_key
            else dataclasses.replace(piece, first_key=piece.first_key + shift)
            for piece in right
        ]  # fmt: skip

    return change


def _twice(inputs: Inputs, batch: _Tiles, right: _Pieces) -> _Pieces | None:
    del inputs, batch
    return [right[0], *right] if right else None


def _remaining(count: Callable[[Inputs, Tile, int], int]) -> Callable[[Inputs, Outputs], Outputs]:
    """Remaining keys of a work from its last key, computed in another way."""

    def change(inputs: Inputs, plan: Outputs) -> Outputs:
        owners = {(tile.request, tile.first_row): tile for tile in tiles(inputs)}
        for work in plan.works[: int(plan.work_start[-1])]:
            work[6] = count(inputs, owners[int(work[0]), int(work[2])], int(work[5]))
        return plan

    return change


def _of_trimmed(inputs: Inputs, tile: Tile, last: int) -> int:
    del inputs
    return tile.taken - last


def _none_left(inputs: Inputs, tile: Tile, last: int) -> int:
    del inputs, tile, last
    return 0


def _in_blocks(inputs: Inputs, tile: Tile, last: int) -> int:
    return -(-(tile.last_key - last) // inputs.granularity)


def _split_works(plan: Outputs) -> list[int]:
    return [number for number, work in enumerate(plan.works[: int(plan.work_start[-1])].tolist()) if work[1] >= 0]


def _group_of_one(inputs: Inputs, plan: Outputs) -> Outputs | None:
    """The first whole tile gets a scratch row behind all others and a group for its only part."""
    del inputs
    alone = [number for number in range(int(plan.work_start[-1])) if int(plan.works[number, 1]) < 0]
    used = int(plan.group_start[-1])
    if not alone or used >= plan.parts.numel():
        return None
    work = plan.works[alone[0]]
    rows = work[2:4].clone()
    behind = [int(start) for start in plan.works[: int(plan.work_start[-1]), 1]]
    work[1] = max([0, *(row + 16 for row in behind if row >= 0)])
    ends = plan.groups[:, 0].tolist()
    sizes = plan.group_start.diff().tolist()
    place = sum(1 for end, size in zip(ends, sizes, strict=True) if size and end < int(rows[0]))
    before = [number for number, size in enumerate(sizes) if size][:place]
    group = before[-1] + 1 if before else 0
    while group < len(sizes) - 1 and sizes[group]:
        group += 1
    at = int(plan.group_start[group])
    plan.parts[at + 1 : used + 1] = plan.parts[at:used].clone()
    plan.parts[at] = work[1]
    plan.groups[group] = rows
    plan.group_start[group + 1 :] += 1
    return plan


def _rows_renumbered(number: Callable[[Inputs, int, int], int]) -> Callable[[Inputs, Outputs], Outputs | None]:
    """Scratch rows by the place of a part and the rows of a tile, in works and parts alike."""

    def change(inputs: Inputs, plan: Outputs) -> Outputs | None:
        split = _split_works(plan)
        if not split:
            return None
        renamed = {}
        for place, work in enumerate(split):
            renamed[int(plan.works[work, 1])] = plan.works[work, 1] = number(inputs, place, int(plan.works[work, 1]))
        used = int(plan.group_start[-1])
        plan.parts[:used] = torch.tensor([int(renamed[row]) for row in plan.parts[:used].tolist()], dtype=torch.int32)
        return plan

    return change


def _last_part_final(inputs: Inputs, plan: Outputs) -> Outputs | None:
    split = _split_works(plan)
    if not split:
        return None
    plan.works[split[-1], 1] = -1
    return plan


def _parts(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs, Outputs], Outputs | None]:
    def edit(inputs: Inputs, plan: Outputs) -> Outputs | None:
        del inputs
        for first, last in itertools.pairwise(plan.group_start.tolist()):
            plan.parts[first:last] = change(plan.parts[first:last].clone())
        return plan

    return edit


def _group_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs, Outputs], Outputs | None]:
    def edit(inputs: Inputs, plan: Outputs) -> Outputs | None:
        del inputs
        used = plan.group_start.diff().nonzero()[:, 0]
        plan.groups[used] = change(plan.groups[used].clone())
        return plan

    return edit


def _requests_of_groups(inputs: Inputs, plan: Outputs) -> Outputs | None:
    ends = {(tile.first_row): tile.first_row - tile.number * tile.rows + inputs.queries for tile in tiles(inputs)}
    for group in plan.group_start.diff().nonzero()[:, 0].tolist():
        plan.groups[group, 1] = ends[int(plan.groups[group, 0])]
    return plan


def _tail(value: Callable[[Outputs, int], int]) -> Callable[[Inputs, Outputs], Outputs | None]:
    """Starts of groups behind the last tile."""

    def edit(inputs: Inputs, plan: Outputs) -> Outputs | None:
        first = len(tiles(inputs)) + 1
        plan.group_start[first:] = value(plan, first)
        return plan

    return edit


def _last_group_lost(inputs: Inputs, plan: Outputs) -> Outputs | None:
    del inputs
    used = plan.group_start.diff().nonzero()[:, 0]
    if not len(used):
        return None
    plan.group_start[int(used[-1]) + 1 :] = plan.group_start[int(used[-1])].clone()
    return plan


def _idle_workers_begin_again(inputs: Inputs, plan: Outputs) -> Outputs | None:
    del inputs
    total = plan.work_start[-1].clone()
    idle = (plan.work_start == total).nonzero()[1:]
    if not len(idle) or not int(total):
        return None
    plan.work_start[idle] = 0
    return plan


def _in_other_buffers(lengths: Callable[[Inputs, Sizes], Sizes | None]) -> Callable[[Inputs], Outputs | None]:
    """The right plan in buffers of other lengths, cut off where it does not fit."""

    def answer(inputs: Inputs) -> Outputs | None:
        sizes = lengths(inputs, reserved(inputs))
        if sizes is None:
            return None
        plan, other = planned(inputs), blank(sizes)
        for name in (field.name for field in dataclasses.fields(Outputs)):
            old, new = getattr(plan, name), getattr(other, name)
            length = min(len(old), len(new))
            new[:length] = old[:length]
        return other

    return answer


def _reserved_for(**changes: Any) -> Callable[[Inputs, Sizes], Sizes | None]:
    def lengths(inputs: Inputs, sizes: Sizes) -> Sizes | None:
        del sizes
        # Nothing but the bound counts, so that a step of one query row may be asked.
        return reserved(dataclasses.replace(inputs, queries=1, **changes))

    return lengths


def _for_this_batch(inputs: Inputs, sizes: Sizes) -> Sizes | None:
    del sizes
    requests = inputs.query_start.numel() - 1
    return _reserved_for(capacity_requests=requests)(inputs, reserved(inputs)) if requests else None


def _parts_by_cap(inputs: Inputs, sizes: Sizes) -> Sizes | None:
    if inputs.split_cap is None:
        return None
    return sizes._replace(parts=sizes.groups * min(inputs.compute_units, inputs.split_cap))


def _past_the_last_request(inputs: Inputs, plan: Outputs) -> Outputs | None:
    """Where all requests end at the same key, a search for the one that holds a key finds none."""
    requests = inputs.query_start.numel() - 1
    if not requests or bool((inputs.key_start.diff() > 0).any()):
        return None
    plan.works[: int(plan.work_start[-1]), 0] = folds(inputs) * requests
    return plan


def _without_batch_name(inputs: Inputs, plan: Outputs) -> Outputs:
    ratio = folds(inputs)
    plan.works[: int(plan.work_start[-1]), 0] //= ratio
    return plan


MUTANTS: tuple[Mutant, ...] = (
    Mutant("last-tiles-without-work", "the workers' share were computed before anybody knew the rows of requests",
           _of_works(_last_tiles_without_work)),
    Mutant("folded-rows-indexed-beyond", "rows of folded requests were looked up by their folded number",
           _of_tiles(_rows_beyond)),
    Mutant("folded-tiles-trimmed", "tiles of folded heads were trimmed by their row's place in the batch",
           _of_tiles(_taken_to(_folded_and_trimmed))),
    Mutant("empty-request-without-work", "a request without keys that opens a worker had no work",
           _of_works(_empty_opening_a_worker_lost)),
    Mutant("empty-requests-skipped", "requests without keys had no work", _of_works(_empty_lost)),
    Mutant("search-past-the-last-request", "works named the request behind the last one where no request has keys",
           _of_buffers(_past_the_last_request)),
    Mutant("first-work-dropped", "the first work were missing", _of_works(lambda inputs, batch, right: right[1:])),
    Mutant("last-work-dropped", "the last work were missing", _of_works(lambda inputs, batch, right: right[:-1])),
    Mutant("work-twice", "the first work were done twice", _of_works(_twice)),
    Mutant("parts-overlap", "parts began a block before the one before them ended", _of_works(_second_parts(-16))),
    Mutant("parts-overlap-by-one", "parts began a key before the one before them ended", _of_works(_second_parts(-1))),
    Mutant("parts-leave-a-gap", "parts began a key behind the end of the one before them", _of_works(_second_parts(1))),
    Mutant("trimmed-by-one-more", "tiles ended a key before what their last row sees",
           _of_tiles(_taken_to(_one_too_few))),
    Mutant("trimmed-by-rows", "tiles were trimmed by as many keys as whole tiles of rows follow",
           _of_tiles(_taken_to(_by_rows))),
    Mutant("trimmed-without-mask", "tiles were trimmed although the kernel masks by global positions, or not at all",
           _of_tiles(_taken_to(_as_if_causal))),
    Mutant("own-keys-dropped", "query rows did not see the keys of their own tile", _of_tiles(_taken_to(_without_own_key))),
    Mutant("keys-from-zero", "keys were counted from the first of their request", _of_tiles(_keys_from_zero)),
    Mutant("keys-of-folded-number", "keys of folded requests were looked up by their folded number",
           _of_tiles(_keys_of_folded)),
    Mutant("rows-beyond-the-request", "the last tile of a request held as many rows as the others",
           _of_tiles(_rows_whole)),
    Mutant("heads-not-folded", "the first 16 heads stood for all", _of_tiles(_unfolded)),
    Mutant("request-not-folded", "works named the request as it was before its heads were folded",
           _of_buffers(_without_batch_name)),
    Mutant("planned-for-one-query", "every request had one query row", _of_tiles(_of_one_query)),
    Mutant("planned-for-bfloat16", "nobody passed the formats of query and cache",
           _of_tiles(_asked(query_format="bfloat16", cache_format="bfloat16"))),
    Mutant("planned-for-128-heads", "the plan were made for 128 heads", _of_tiles(_asked(heads=128))),
    Mutant("planned-for-16-heads", "the plan were made for 16 heads", _of_tiles(_asked(heads=FOLDED_HEADS))),
    Mutant("lengths-in-pages", "lengths were divided by a page of 64 keys", _of_tiles(_in_pages)),
    Mutant("cap-ignored", "the split cap were not passed on", _of_works(_without_cap)),
    Mutant("cap-of-each-request", "every request could be split as often as the cap says", _of_works(_cap_of_each)),
    Mutant("nothing-remains", "no work had keys behind it", _of_buffers(_remaining(_none_left))),
    Mutant("remaining-of-trimmed", "remaining keys ended where the tile does", _of_buffers(_remaining(_of_trimmed))),
    Mutant("remaining-in-blocks", "remaining keys were counted in blocks", _of_buffers(_remaining(_in_blocks))),
    Mutant("group-of-one", "a tile with one work had a scratch row and a group", _of_buffers(_group_of_one)),
    Mutant("scratch-rows-counted-in-parts", "every part took one scratch row",
           _of_buffers(_rows_renumbered(lambda inputs, place, row: place))),
    Mutant("scratch-row-shared", "all parts had the same scratch row",
           _of_buffers(_rows_renumbered(lambda inputs, place, row: 0))),
    Mutant("scratch-beyond-capacity", "scratch rows began behind the reserved ones",
           _of_buffers(_rows_renumbered(lambda inputs, place, row: row + reserved(inputs).parts * inputs.queries))),
    Mutant("last-part-final", "the last part wrote the final rows", _of_buffers(_last_part_final)),
    Mutant("parts-reversed", "groups listed their parts from the last one on", _of_buffers(_parts(lambda rows: rows.flip(0)))),
    Mutant("parts-repeated", "groups listed their first part over and over",
           _of_buffers(_parts(lambda rows: rows[:1].expand_as(rows)))),
    Mutant("groups-rotated", "groups ended in the rows of the next one",
           _of_buffers(_group_rows(lambda rows: rows.roll(1, 0)))),
    Mutant("groups-of-whole-requests", "groups ended in all rows behind their first one", _of_buffers(_requests_of_groups)),
    Mutant("group-tail-zero", "starts of groups behind the last tile were zero", _of_buffers(_tail(lambda plan, first: 0))),
    Mutant("group-tail-stale", "starts of groups behind the last tile were those of a larger batch",
           _of_buffers(_tail(lambda plan, first: int(plan.group_start[first - 1]) + 1))),
    Mutant("last-group-lost", "the last split tile had no group", _of_buffers(_last_group_lost)),
    Mutant("idle-workers-begin-again", "workers without work began with the first work",
           _of_buffers(_idle_workers_begin_again)),
    Mutant("reserved-for-one-query", "buffers were reserved for one query row",
           _in_other_buffers(_reserved_for(capacity_queries=1))),
    Mutant("reserved-for-this-batch", "buffers were reserved for the batch at hand", _in_other_buffers(_for_this_batch)),
    Mutant("reserved-for-16-heads", "buffers were reserved for 16 heads", _in_other_buffers(_reserved_for(heads=16))),
    Mutant("reserved-for-bfloat16", "buffers were reserved for bfloat16",
           _in_other_buffers(_reserved_for(query_format="bfloat16", cache_format="bfloat16"))),
    Mutant("reserved-without-cap", "buffers were reserved without the split cap",
           _in_other_buffers(_reserved_for(split_cap=None))),
    Mutant("reserved-by-cap-of-each-tile", "every tile could take all that the cap allows", _in_other_buffers(_parts_by_cap)),
)  # fmt: skip
