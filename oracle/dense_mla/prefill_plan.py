"""Which worker attends over which keys of which query rows of a prefill, and how much scratch memory does that take?

A layer's h heads become H = 16 ceil(h / 16). With C = gcd(H, compute units) clusters of X = units / C workers, each cluster
has H / C heads, and all heads get the same schedule. Query rows of a request come in tiles of 256, the last one shorter,
taken in the order 0, n-1, 1, n-2, ...; a tile that ends at row e of its request needs its first e keys, u = ceil(e / 128)
units. Of all U units, worker x of a cluster takes floor(U / X), the first U mod X one more, in the order of requests and
tiles, and does so for every head of its cluster before the next worker begins:

    (request, scratch row or -1, first row, last row, first key, last key, remaining, first head | last head << 16)

A tile that several workers share has parts, whose scratch rows are 256 times a number that counts parts over all tiles, the
same for every head. The last part of a tile ends with its last unit or its request, and says that nothing remains; the
others say how many keys of their request remain. Groups of parts are ordered by rows, parts by scratch row. Workers are
numbered by cluster first.

Scratch for p parts in t rows takes, each rounded up to 256 bytes, p 256 H v and p 256 H numbers of four bytes, t H of four,
and with padded heads t H v of two. For any step t is at most max_batched, and p at most

    ceil(max_batched / 256) + max_requests - 1 + compute units

Sources: `get_ps_metadata_info_v1` and `get_ps_metadata_v1` of AITER, and what vLLM's dense ROCm MLA backend reserves and
asks of its workspace.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from cases.dense_mla.prefill_plan import Inputs, Outputs
from cases.memory import INTEGER_POISON, map_tensors, moved
from cases.precision import Precision
from oracle.check import Check, exact, wrong_form
from oracle.dense_mla.plan_check import Finding, plan_check
from oracle.laws import Honest, Law, Mutant

TILE, UNIT = 256, 128
_UNDEFINED = int.from_bytes(bytes([INTEGER_POISON] * 4), "little")


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where a planner can go wrong; the defaults are right."""

    padded_heads: str = "sixteens"
    reserved_heads: str = "sixteens"
    rebased: bool = True
    numbered_with_decodes: bool = False
    visiting: str = "from_both_ends"
    causal: bool = True
    unit: int = UNIT
    more_units: str = "first"
    workers: str = "by_cluster"
    scratch_per_head: bool = False
    scratch_rows: int = TILE
    first_part_final: bool = False
    all_partial: bool = False
    ends: str = "with_unit"
    remaining: str = "of_parts"
    heads_to: int = 0
    groups: str = "by_rows"
    parts_reversed: bool = False
    tail: str = "flat"
    counted: str = "parts"
    reserved_tiles: str = "all"
    final_by_max_len: bool = False
    padded_output: bool = True
    aligned: bool = True


RIGHT = Faults()


class Tile(NamedTuple):
    """Query rows of a request, the keys it needs, and the request's keys; all counted from the first prefill row."""

    request: int
    first_row: int
    last_row: int
    needed: int
    first_key: int
    last_key: int


def padded(heads: int, rule: str = "sixteens") -> int:
    """The kernel's heads."""
    if rule == "native_24" and heads == 24:
        return 24
    if rule == "sixteen_or_more":
        return max(16, heads)
    return heads if rule == "unpadded" else 16 * -(-heads // 16)


def starts_of(inputs: Inputs, faults: Faults = RIGHT) -> list[int]:
    """The first row of every prefill request, and one more."""
    starts: list[int] = inputs.query_start.tolist()[inputs.decodes :]
    return [start - starts[0] for start in starts] if faults.rebased else starts


def tiles(inputs: Inputs, faults: Faults = RIGHT) -> list[Tile]:
    """All tiles in the order in which they are dealt out."""
    found = []
    for request, (first, last) in enumerate(itertools.pairwise(starts_of(inputs, faults))):
        own = list(range(first, last, TILE))
        if faults.visiting == "from_both_ends":
            own = [own[place // 2] if place % 2 == 0 else own[-1 - place // 2] for place in range(len(own))]
        elif faults.visiting == "from_the_end":
            own.reverse()
        number = request + (inputs.decodes if faults.numbered_with_decodes else 0)
        for row in own:
            end = min(row + TILE, last)
            found.append(Tile(number, row, end, end - first if faults.causal else last - first, first, last))
    return found


class _Part(NamedTuple):
    worker: int
    tile: int
    scratch: int
    first_key: int
    last_key: int
    remaining: int


def _dealt(inputs: Inputs, faults: Faults) -> list[_Part]:
    """The parts of one head, worker by worker of a cluster."""
    batch = tiles(inputs, faults)
    heads = padded(inputs.heads, faults.padded_heads)
    workers = inputs.compute_units // math.gcd(heads, inputs.compute_units)
    units = [-(-tile.needed // faults.unit) for tile in batch]
    each, more = divmod(sum(units), workers)
    found: list[_Part] = []
    place, done, scratch = 0, 0, 0
    for worker in range(workers):
        lucky = worker < more if faults.more_units == "first" else worker >= workers - more
        capacity = each + lucky
        while place < len(batch) and capacity:
            tile, left = batch[place], units[place] - done
            taken = min(left, capacity)
            first = tile.first_key + done * faults.unit
            finishes = taken == left
            last = min(first + taken * faults.unit, tile.last_key)
            if finishes and faults.ends == "with_request":
                last = tile.last_key
            row = -1
            if not (finishes and done == 0) or faults.all_partial:
                row, scratch = faults.scratch_rows * scratch, scratch + 1
            if faults.first_part_final and done == 0:
                row = -1
            remaining = 0 if finishes and faults.remaining == "of_parts" else tile.last_key - last
            found.append(_Part(worker, place, row, first, last, 0 if faults.remaining == "never" else remaining))
            place, done = (place + 1, 0) if finishes else (place, done + taken)
            capacity -= taken
    return found


def _planned(inputs: Inputs, faults: Faults = RIGHT) -> Outputs:
    batch, dealt = tiles(inputs, faults), _dealt(inputs, faults)
    heads = padded(inputs.heads, faults.padded_heads)
    clusters = math.gcd(heads, inputs.compute_units)
    workers, each = inputs.compute_units // clusters, heads // clusters
    works: list[list[int]] = []
    work_start = [0]
    partial = 1 + max((part.scratch for part in dealt), default=-1) // TILE
    order = [(cluster, worker) for cluster in range(clusters) for worker in range(workers)]
    if faults.workers == "by_worker":
        order.sort(key=lambda pair: pair[1])
    for cluster, worker in order:
        own = [part for part in dealt if part.worker == worker]
        for head in range(cluster * each, cluster * each + each):
            for part in own:
                tile = batch[part.tile]
                scratch = part.scratch
                if faults.scratch_per_head and scratch >= 0:
                    scratch += head * partial * TILE
                works.append([tile.request, scratch, tile.first_row, tile.last_row, part.first_key, part.last_key,
                              part.remaining, head | (head + 1 - faults.heads_to) << 16])  # fmt: skip
        work_start.append(len(works))
    return _written(inputs, works, work_start, faults)


def _written(inputs: Inputs, works: list[list[int]], work_start: list[int], faults: Faults) -> Outputs:
    buffers = _blank(inputs, faults)
    groups: dict[tuple[int, int], set[int]] = {}
    for work in works:
        if work[1] >= 0:
            groups.setdefault((work[2], work[3]), set()).add(work[1])
    ordered = list(groups) if faults.groups == "by_work" else sorted(groups)
    parts = [sorted(groups[rows], reverse=faults.parts_reversed) for rows in ordered]
    ends = list(itertools.accumulate(map(len, parts), initial=0))
    buffers.group_start[:] = ends[-1] if faults.tail == "flat" else 0
    _fill(buffers.group_start, ends)
    _fill(buffers.groups, [list(rows) for rows in ordered])
    _fill(buffers.parts, [row for own in parts for row in own])
    _fill(buffers.works, works)
    _fill(buffers.work_start, work_start)
    buffers.used[:] = torch.tensor(used(inputs, ends[-1] if faults.counted == "parts" else len(ordered), faults))
    return buffers


def _fill(buffer: torch.Tensor, values: Any) -> None:
    """The front of a buffer; a wrong plan may be longer than its buffer, and is cut off."""
    rows = torch.tensor(values, dtype=torch.int32)[: len(buffer)]
    if rows.numel():
        buffer[: len(rows)] = rows


def _blank(inputs: Inputs, faults: Faults = RIGHT) -> Outputs:
    """Buffers that nobody filled."""
    heads, units = padded(inputs.heads, faults.padded_heads), inputs.compute_units
    workers = units // math.gcd(heads, units)
    each = -(-min(inputs.max_len, inputs.max_batched) // TILE)
    requests = inputs.max_requests
    count = requests * each
    parts = min(requests + workers - 1, 2 * (workers - 1)) * each
    works = (requests + workers - 1) * each * heads

    def buffer(*shape: int) -> torch.Tensor:
        return torch.full(shape, _UNDEFINED, dtype=torch.int32)

    return Outputs(
        rows=torch.tensor(starts_of(inputs, faults), dtype=torch.int32), work_start=buffer(units + 1), works=buffer(works, 8),
        group_start=buffer(count + 1), groups=buffer(count, 2), parts=buffer(parts), used=torch.zeros(4, dtype=torch.int64),
        reserved=torch.tensor(reserved(inputs, faults)),
    )  # fmt: skip


def _regions(inputs: Inputs, parts: int, rows: int, faults: Faults) -> list[int]:
    heads = padded(inputs.heads, faults.reserved_heads)
    lanes = inputs.value_lanes
    padding = 2 * rows * heads * lanes if heads > inputs.heads and faults.padded_output else 0
    sizes = [4 * parts * TILE * heads * lanes, 4 * parts * TILE * heads, 4 * rows * heads, padding]
    return [-(-size // 256) * 256 if faults.aligned else size for size in sizes]


def used(inputs: Inputs, parts: int, faults: Faults = RIGHT) -> list[int]:
    """Bytes of each region in a step with so many parts."""
    starts = starts_of(inputs)
    return _regions(inputs, parts, starts[-1], faults)


def reserved(inputs: Inputs, faults: Faults = RIGHT) -> list[int]:
    """Bytes of each region that hold for any step."""
    tokens = inputs.max_batched
    count = -(-tokens // TILE)
    if faults.reserved_tiles != "without_requests":
        count += inputs.max_requests - 1
    if faults.reserved_tiles != "without_workers":
        count += inputs.compute_units
    sizes = _regions(inputs, count, tokens, faults)
    if faults.final_by_max_len:
        sizes[2] = _regions(inputs, count, inputs.max_len, faults)[2]
    return sizes


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Plan and scratch memory; what lies behind the used part of a buffer is garbage. `dtype` has no say in integers.

    A request without tokens has no work.

    Raises TypeError for starts that are not int32, and ValueError for a step without prefill requests, beyond the limits,
    and for heads that no kernel takes.
    """
    del dtype
    if inputs.query_start.dtype != torch.int32:
        raise TypeError(f"query_start is {inputs.query_start.dtype}: should be torch.int32")
    requests = inputs.query_start.numel() - 1
    if not 0 <= inputs.decodes < requests:
        raise ValueError(f"decodes={inputs.decodes}: should be less than the {requests} requests")
    if requests > inputs.max_requests:
        raise ValueError(f"requests={requests}: should be {inputs.max_requests} or fewer")
    if inputs.query_start[-1] > inputs.max_batched:
        raise ValueError(f"tokens={int(inputs.query_start[-1])}: should be {inputs.max_batched} or fewer")
    if max(inputs.query_start.diff().tolist()) > inputs.max_len:
        raise ValueError(
            f"a request of {max(inputs.query_start.diff().tolist())} tokens: should have {inputs.max_len} or fewer"
        )
    if inputs.heads < 1 or (inputs.heads > 128 and inputs.heads % 16):
        raise ValueError(f"heads={inputs.heads}: should be 1 to 128, or a multiple of 16")
    return _planned(inputs)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """What any kernel and workspace need of a plan, then the plan itself, which is settled."""
    del precision
    want = reference(inputs)
    forms = [
        wrong_form(field.name, getattr(outputs, field.name), getattr(want, field.name))
        for field in dataclasses.fields(Outputs)
    ]
    wrong = tuple(form for form in forms if form is not None)
    if wrong:
        return wrong
    total, parts = int(want.work_start[-1]), int(want.group_start[-1])
    groups = int(want.group_start.diff().count_nonzero())
    works = outputs.works[: max(0, min(int(outputs.work_start[-1]), len(outputs.works)))].tolist()
    exactly = (("rows", None), ("work_start", None), ("works", total), ("group_start", None), ("groups", groups),
               ("parts", parts), ("used", None), ("reserved", None))  # fmt: skip
    return (
        plan_check(
            "coverage", len(works), _uncovered(inputs, works), "every head sees every key that a row needs, once"
        ),
        plan_check("scratch", len(works), _clashes(works), "parts have scratch rows of their own, and only they"),
        plan_check("workspace", 4, _grown(outputs), "the workspace does not grow once a model runs"),
        *(
            exact(name, getattr(outputs, name)[:count], getattr(want, name)[:count], why="the plan is settled")
            for name, count in exactly
        ),
    )


def _uncovered(inputs: Inputs, works: list[list[int]]) -> Iterator[Finding]:
    owners = {(tile.request, tile.first_row, tile.last_row): tile for tile in tiles(inputs)}
    found: dict[tuple[int, Tile], list[tuple[int, int, int]]] = {
        (head, tile): [] for head in range(padded(inputs.heads)) for tile in owners.values()
    }
    for number, (request, _, first_row, last_row, first, last, _, heads) in enumerate(works):
        tile = owners.get((request, first_row, last_row))
        if tile is None:
            yield Finding(
                "tile of work", number, f"rows {first_row}..{last_row} of request {request}", "one of the step's"
            )
            continue
        for head in range(heads & 0xFFFF, heads >> 16):
            if (head, tile) in found:
                found[head, tile].append((first, last, number))
    for (head, tile), parts in found.items():
        expected = tile.first_key
        for first, last, number in sorted(parts):
            if first != expected or last <= first:
                yield Finding(f"keys of head {head} rows {tile.first_row}.., work", number, f"{first}..{last}",
                              f"{expected} on")  # fmt: skip
            expected = last
        if not tile.first_key + tile.needed <= expected <= tile.last_key:
            yield Finding(f"keys of head {head}, tile at row", tile.first_row, f"up to {expected}",
                          f"up to {tile.first_key + tile.needed} to {tile.last_key}")  # fmt: skip


def _clashes(works: list[list[int]]) -> Iterator[Finding]:
    parts: dict[tuple[int, int], dict[int, int]] = {}
    for work in works:
        own = parts.setdefault((work[7] & 0xFFFF, work[2]), {})
        own[work[4]] = work[1]
    rows: dict[int, set[int]] = {}
    for (head, row), own in parts.items():
        if (len(own) == 1) != (-1 in own.values()) or (len(own) > 1 and -1 in own.values()):
            yield Finding(f"scratch rows of head {head}, tile at row", row, str(sorted(own.values())),
                          "-1 for the only work of a tile, others for parts")  # fmt: skip
        for scratch in own.values():
            if scratch >= 0:
                rows.setdefault(scratch, set()).add(row)
    for number, scratch in enumerate(sorted(rows)):
        if scratch != number * TILE or len(rows[scratch]) > 1:
            yield Finding("scratch row of part", number, f"{scratch} of tiles at rows {sorted(rows[scratch])}",
                          f"{number * TILE} of one tile")  # fmt: skip


def _grown(outputs: Outputs) -> Iterator[Finding]:
    for region, (now, most) in enumerate(zip(outputs.used.tolist(), outputs.reserved.tolist(), strict=True)):
        if now > most:
            yield Finding("bytes of region", region, str(now), f"{most} or fewer, as reserved")


def meaning(outputs: Outputs) -> Outputs:
    """The answer without what lies behind the used part of its buffers."""
    groups = int(outputs.group_start.diff().count_nonzero())
    return dataclasses.replace(
        outputs, works=outputs.works[: int(outputs.work_start[-1])], group_start=outputs.group_start[: groups + 1],
        groups=outputs.groups[:groups], parts=outputs.parts[: int(outputs.group_start[-1])],
    )  # fmt: skip


def _schedule(outputs: Outputs) -> Outputs:
    """The used part of the plan, without its memory."""
    nothing = torch.zeros(4, dtype=torch.int64)
    return dataclasses.replace(meaning(outputs), used=nothing, reserved=nothing)


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    fresh = map_tensors(inputs, lambda tensor: moved(tensor, "cpu"))
    return dataclasses.replace(fresh, **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _without_decodes(inputs: Inputs) -> Inputs | None:
    if not inputs.decodes:
        return None
    starts = inputs.query_start[inputs.decodes :]
    return _edited(inputs, query_start=(starts - starts[0]).clone(), decodes=0)


def _heads_padded(inputs: Inputs) -> Inputs | None:
    heads = padded(inputs.heads)
    return None if heads == inputs.heads else _edited(inputs, heads=heads)


def _more_reserved(inputs: Inputs) -> Inputs:
    return _edited(
        inputs, max_requests=inputs.max_requests + 2, max_len=2 * inputs.max_len, max_batched=2 * inputs.max_batched
    )


def _empty_appended(inputs: Inputs) -> Inputs:
    more = torch.cat((inputs.query_start, inputs.query_start[-1:]))
    return _edited(inputs, query_start=more, max_requests=inputs.max_requests + 1)


def _and_an_empty_one(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return dataclasses.replace(first, rows=torch.cat((first.rows, first.rows[-1:])))


LAWS: tuple[Law, ...] = (
    Law("P1 without decode", "what decodes in the step has no say in the plan of what prefills", _without_decodes, _same,
        "bitwise", view=meaning),
    Law("P2 heads padded", "heads are planned as those that they are padded to", _heads_padded, _same, "bitwise",
        view=_schedule),
    Law("P3 more reserved", "what is reserved has no say in the plan", _more_reserved, _same, "bitwise", view=_schedule),
    Law("P4 empty request appended", "a request without tokens has no work", _empty_appended, _and_an_empty_one, "bitwise",
        view=_schedule),
)  # fmt: skip


def _mutant(name: str, pitfall: str, **faults: Any) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _planned(inputs, Faults(**faults)))


def _idle_last(inputs: Inputs) -> Outputs:
    """Starts of workers' shares as if the last share were lost."""
    plan = _planned(inputs)
    plan.work_start[-1] = plan.work_start[-2].clone()
    return plan


MUTANTS: tuple[Mutant, ...] = (
    _mutant("planned-for-unpadded-heads", "the plan were made for the layer's heads", padded_heads="unpadded"),
    _mutant("planned-for-native-24", "24 heads had a kernel of their own, as in decode", padded_heads="native_24"),
    _mutant("planned-for-sixteen-or-more", "heads above 16 were not padded", padded_heads="sixteen_or_more"),
    _mutant("scratch-for-unpadded-heads", "scratch were reserved for the layer's heads", reserved_heads="unpadded"),
    _mutant("not-rebased", "rows and keys were counted from the step's first token", rebased=False),
    _mutant("requests-numbered-with-decodes", "requests were numbered in the whole step", numbered_with_decodes=True),
    _mutant("tiles-in-order", "tiles were dealt out in the order of rows", visiting="in_order"),
    _mutant("tiles-from-the-end", "the last tiles were dealt out first", visiting="from_the_end"),
    _mutant("no-mask", "every tile needed all keys of its request", causal=False),
    _mutant("units-of-64", "a unit had 64 keys", unit=64),
    _mutant("units-of-256", "a unit had as many keys as a tile has rows", unit=256),
    _mutant("last-workers-take-more", "the last workers took the units left over", more_units="last"),
    _mutant("workers-across-clusters", "neighbouring workers belonged to different clusters", workers="by_worker"),
    _mutant("scratch-per-head", "every head had scratch rows of its own", scratch_per_head=True),
    _mutant("scratch-rows-of-128", "a part took 128 scratch rows", scratch_rows=128),
    _mutant("first-part-final", "the first part of a tile wrote the final rows", first_part_final=True),
    _mutant("whole-tiles-partial", "tiles of one worker were parts too", all_partial=True),
    _mutant("ends-with-request", "the last part of a tile took all keys of its request", ends="with_request"),
    _mutant("remaining-always-told", "finished tiles told what remains of their request", remaining="always"),
    _mutant("remaining-never-told", "no part told what remains of its request", remaining="never"),
    _mutant("last-head-included", "the last head of a work were its own", heads_to=1),
    _mutant("groups-by-work", "groups stood in the order of works", groups="by_work"),
    _mutant("parts-reversed", "parts of a group stood in reverse", parts_reversed=True),
    _mutant("group-tail-zero", "starts of groups behind the last one were zero", tail="zero"),
    _mutant("groups-counted", "scratch were asked for groups, not for parts", counted="groups"),
    _mutant("reserved-without-requests", "every step had one ragged tile at most", reserved_tiles="without_requests"),
    _mutant("reserved-without-workers", "no tile were split", reserved_tiles="without_workers"),
    _mutant("reserved-by-longest-request", "a step had no more tokens than its longest request", final_by_max_len=True),
    _mutant("padded-output-forgotten", "outputs of padded heads needed no memory", padded_output=False),
    _mutant("regions-not-aligned", "regions began where the last one ended", aligned=False),
    Mutant("last-share-lost", "the last worker had nothing to do", _idle_last),
)  # fmt: skip


def _by_stretches(inputs: Inputs) -> Outputs:
    """All units on a line: parts are what stretches of workers and tiles have in common."""
    batch = tiles(inputs)
    heads = padded(inputs.heads)
    clusters = math.gcd(heads, inputs.compute_units)
    workers, each = inputs.compute_units // clusters, heads // clusters
    ends = list(itertools.accumulate((-(-tile.needed // UNIT) for tile in batch), initial=0))
    total = ends[-1]
    cuts = [total // workers * worker + min(worker, total % workers) for worker in range(workers + 1)]
    common = sorted({*ends, *cuts})
    stretches = [
        (
            max(w for w in range(workers) if cuts[w] <= low),
            max(t for t in range(len(batch)) if ends[t] <= low),
            low,
            high,
        )
        for low, high in itertools.pairwise(common)
    ]
    counts = [sum(1 for stretch in stretches if stretch[1] == place) for place in range(len(batch))]
    scratch = itertools.count(0, TILE)
    rows = [next(scratch) if counts[place] > 1 else -1 for _, place, _, _ in stretches]
    works, work_start = [], [0]
    for cluster in range(clusters):
        for worker in range(workers):
            for head in range(cluster * each, (cluster + 1) * each):
                for row, (own, place, low, high) in zip(rows, stretches, strict=True):
                    if own == worker:
                        tile = batch[place]
                        first, last = (
                            min(tile.first_key + (edge - ends[place]) * UNIT, tile.last_key) for edge in (low, high)
                        )
                        remaining = 0 if high == ends[place + 1] else tile.last_key - last
                        works.append([tile.request, row, tile.first_row, tile.last_row, first, last, remaining,
                                      (head + 1) * 65536 + head])  # fmt: skip
            work_start.append(len(works))
    return _written(inputs, works, work_start, RIGHT)


_EXACT = Precision(probability="exact", note="integers")
HONEST: tuple[Honest, ...] = (
    Honest("dealt-unit-by-unit", _EXACT, _planned),
    Honest("stretches-of-a-line", _EXACT, _by_stretches),
)
