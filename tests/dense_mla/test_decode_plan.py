"""Are plans of persistent decode judged by what a kernel computes that follows them, and does our own planner keep the rules?"""

import dataclasses
import itertools
import random
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dense_mla import decode_plan as ask
from cases.dense_mla.decode_plan import Inputs, Mask, Outputs, PlanCase
from cases.precision import Precision
from impl.dense_mla.decode_plan import IMPLS
from impl.dense_mla.decode_plan_buffers import buffer_lengths
from oracle.dense_mla import decode_plan as right
from oracle.dense_mla import decode_tiles
from oracle.dense_mla.decode_works import Piece, written
from reports.laws import break_of

OURS, AITER = IMPLS
RUNS = [pytest.param(right.reference, id="reference"), pytest.param(OURS.run, id="ours-host")]


def asked(keys: list[int], rows: list[int] | int = 1, **changes: Any) -> Inputs:
    """A batch on four workers of gfx950, in float8."""
    counts = [rows] * len(keys) if isinstance(rows, int) else rows
    starts = [
        torch.nn.functional.pad(torch.tensor(values, dtype=torch.int64).cumsum(0), (1, 0)).to(torch.int32)
        for values in (counts, keys)
    ]
    most = max([1, *counts])
    inputs = Inputs(
        starts[0], starts[1], heads=16, arch="gfx950", query_format="float8", cache_format="float8", queries=most,
        told=len(set(counts)) == 1, mask="causal", split_cap=None, granularity=16, compute_units=4,
        capacity_requests=max(1, len(keys)), capacity_queries=most,
    )  # fmt: skip
    return dataclasses.replace(inputs, **changes)


def works_of(plan: Outputs) -> list[tuple[int, ...]]:
    return [tuple(row) for row in right.meaning(plan).works.tolist()]


def sentences(inputs: Inputs, plan: Outputs) -> list[str]:
    return [str(check) for check in right.judge(inputs, plan, Precision()) if not check.passed]


def drawn(count: int) -> list[PlanCase]:
    choose = random.Random(5)
    found = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, PlanCase)]
    while len(found) < count:
        axes = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = PlanCase(**axes, seed=choose.randrange(99))  # type: ignore[arg-type]
        if not ask.forbid(case):
            found.append(case)
    return found


SWEEP = drawn(60)


def test_a_long_request_is_dealt_out_behind_a_short_one() -> None:
    # Costs 3 + 16 and 63 + 16 blocks: shares of ceil(98 / 4) + 16 = 41. The first worker has 22 left, so 6 blocks.
    inputs = asked([40, 1000])
    plan = right.reference(inputs)
    assert works_of(plan) == [
        (0, -1, 0, 1, 0, 40, 0), (1, 0, 1, 2, 40, 136, 904), (1, 1, 1, 2, 136, 536, 504), (1, 2, 1, 2, 536, 936, 104),
        (1, 3, 1, 2, 936, 1040, 0),
    ]  # fmt: skip
    assert plan.work_start.tolist() == [0, 2, 3, 4, 5]
    assert plan.group_start.tolist() == [0, 0, 4]
    assert plan.parts[:4].tolist() == [0, 1, 2, 3]
    assert plan.groups[1].tolist() == [1, 2]


@pytest.mark.parametrize(("mask", "end"), [("causal", 299), ("round_robin", 300), ("none", 300)])
def test_only_a_causal_tile_is_trimmed(mask: Mask, end: int) -> None:
    # 32 heads of 8 rows fill two workgroups: two tiles of 4 rows, each 19 + 16 blocks, shares of 34.
    plan = right.reference(asked([300], 8, heads=32, mask=mask))
    assert works_of(plan) == [
        (0, 0, 0, 4, 0, 288, 12), (0, 4, 0, 4, 288, end, 300 - end), (0, 8, 4, 8, 0, 16, 284), (0, 12, 4, 8, 16, 300, 0),
    ]  # fmt: skip
    assert plan.work_start.tolist() == [0, 1, 3, 4, 4]
    assert plan.group_start.tolist() == [0, 2, *[4] * 15]
    assert plan.parts[:4].tolist() == [0, 4, 8, 12]


def test_a_rest_shorter_than_the_rows_is_taken_along() -> None:
    # Costs 20 + 16 and 3 + 16 blocks: shares of 19 + 16. After 19 blocks two keys are left, fewer than the three rows.
    plan = right.reference(asked([306, 48], 3, compute_units=3))
    assert works_of(plan) == [(0, -1, 0, 3, 0, 306, 0), (1, -1, 3, 6, 306, 354, 0)]
    assert plan.work_start.tolist() == [0, 1, 2, 2]
    # With two rows they are a part of their own, and the next request fits with two of its three blocks.
    plan = right.reference(asked([306, 48], 2, compute_units=3))
    assert works_of(plan) == [
        (0, 0, 0, 2, 0, 304, 2), (0, 2, 0, 2, 304, 306, 0), (1, 4, 2, 4, 306, 338, 16), (1, 6, 2, 4, 338, 354, 0),
    ]  # fmt: skip
    assert plan.work_start.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("run", RUNS)
def test_a_request_without_keys_has_a_work_and_one_without_rows_none(run: Any) -> None:
    works = works_of(run(asked([0, 50, 0, 0], [1, 1, 0, 1])))
    assert [(work[0], work[2], work[3], work[4], work[5]) for work in works] == [
        (0, 0, 1, 0, 0), (1, 1, 2, 0, 50), (3, 2, 3, 50, 50)
    ]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_nobody_asks_nobody_works(run: Any) -> None:
    plan = run(asked([]))
    assert plan.work_start.tolist() == [0] * 5
    assert plan.group_start.tolist() == [0, 0]


def test_the_cap_is_a_budget_of_the_batch() -> None:
    # Four requests of at most four parts: the long one alone gets sixteen of the sixteen.
    plan = right.reference(asked([131072, 1, 1, 1], compute_units=256, split_cap=4))
    assert sum(1 for work in works_of(plan) if work[0] == 0) == 16
    assert len(works_of(right.reference(asked([131072, 1, 1, 1], compute_units=256)))) > 200


@pytest.mark.parametrize(
    ("heads", "arch", "formats", "queries", "fold", "tiles"),
    [
        (16, "gfx950", "float8", 8, 1, 1), (16, "gfx950", "float8", 9, 1, 2), (16, "gfx950", "bfloat16", 5, 1, 2),
        (16, "gfx950", "bfloat16", 8, 1, 1), (32, "gfx950", "float8", 3, 1, 2), (32, "gfx950", "float8", 4, 1, 1),
        (48, "gfx950", "bfloat16", 2, 1, 2), (48, "gfx950", "float8", 2, 3, 1), (64, "gfx950", "bfloat16", 3, 1, 2),
        (96, "gfx950", "bfloat16", 2, 1, 2), (64, "gfx942", "float8", 1, 1, 1), (64, "gfx942", "float8", 2, 4, 1),
        (128, "gfx942", "float8", 3, 1, 3), (32, "gfx942", "bfloat16", 9, 2, 2), (24, "gfx950", "bfloat16", 3, 1, 2),
        (32, "gfx950", "mixed", 1, 2, 1),
    ],
)  # fmt: skip
def test_tiles_of_a_request(heads: int, arch: Any, formats: str, queries: int, fold: int, tiles: int) -> None:
    both: Any = ("bfloat16", "float8") if formats == "mixed" else (formats, formats)
    inputs = asked([99], queries, heads=heads, arch=arch, query_format=both[0], cache_format=both[1])
    assert decode_tiles.folds(inputs) == fold
    assert decode_tiles.tiles_of_request(inputs, queries) == tiles
    assert [tile.last_row for tile in decode_tiles.tiles(inputs)][-1] == fold * queries
    assert len(decode_tiles.tiles(inputs)) == fold * tiles


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        # One tile a request: 256 workers and 8 requests.
        ({}, (257, 263, 9, 8, 263)),
        # The cap leaves 8 + min(256, 32), which is less than without it.
        ({"split_cap": 4}, (257, 263, 9, 8, 263)),
        # Few workers: 2 * 3 partial results without a cap, 8 + 4 with one.
        ({"compute_units": 4}, (5, 11, 9, 8, 6)),
        ({"compute_units": 4, "split_cap": 4}, (5, 11, 9, 8, 12)),
        # Without a kernel of their own, 48 heads of 2 rows are reserved as six tiles of 16.
        ({"heads": 48, "capacity_queries": 2}, (257, 1578, 49, 48, 1578)),
        ({"heads": 128, "capacity_queries": 4}, (257, 1052, 33, 32, 1052)),
        ({"compute_units": 1}, (2, 8, 9, 8, 0)),
    ],
)  # fmt: skip
def test_buffers_are_as_long_as_the_library_makes_them(changes: Any, sizes: tuple[int, ...]) -> None:
    inputs = asked([5], compute_units=256, capacity_requests=8)
    inputs = dataclasses.replace(inputs, **changes)
    assert tuple(decode_tiles.reserved(inputs)) == sizes
    assert tuple(buffer_lengths(inputs)) == sizes
    assert [len(buffer) for buffer in dataclasses.astuple(right.reference(inputs))] == list(sizes)


@pytest.mark.parametrize(
    ("heads", "formats", "queries", "most"),
    [(16, "bfloat16", 5, 8), (16, "bfloat16", 7, 8), (32, "bfloat16", 3, 4), (32, "float8", 3, 4)],
)
def test_buffers_for_more_rows_can_hold_fewer_tiles(heads: int, formats: Any, queries: int, most: int) -> None:
    inputs = asked([50], queries, heads=heads, query_format=formats, cache_format=formats, capacity_queries=most)
    assert decode_tiles.tiles_of_request(inputs, queries) == 2
    for run in (right.reference, OURS.run):
        with pytest.raises(ValueError, match=f"queries={queries}: 2 tiles a request, should be 1 or fewer"):
            run(inputs)
    assert sentences(dataclasses.replace(inputs, capacity_queries=queries), right.reference(
        dataclasses.replace(inputs, capacity_queries=queries))) == []  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"heads": 40}, ValueError, "heads=40: should be a multiple of 16"),
        ({"heads": 24}, ValueError, "heads=24: should be a multiple of 16"),
        ({"heads": 144}, ValueError, "heads=144: should be a multiple of 16 up to 128"),
        ({"granularity": 12}, ValueError, "granularity=12: should be a power of two"),
        ({"split_cap": 0}, ValueError, "split_cap=0: should be 1 or more, or None"),
        ({"capacity_requests": 1}, ValueError, "requests=2: should be 1 or fewer, as reserved"),
        ({"queries": 9}, ValueError, "queries=9: should be 2 or fewer, as reserved"),
        ({"key_start": torch.zeros(4, dtype=torch.int32)}, ValueError, "key_start has 4 elements: should have 3"),
        ({"key_start": torch.zeros(3)}, TypeError, "key_start is contiguous torch.float32: should be contiguous"),
        ({"query_start": torch.zeros(6, dtype=torch.int32)[::2]}, TypeError, "query_start is strided torch.int32"),
        ({"heads": 48, "query_start": torch.tensor([0, 1, 3], dtype=torch.int32)}, ValueError, r"requests of \[1, 2\]"),
    ],
)  # fmt: skip
def test_calls_that_make_no_sense_are_refused(changes: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        right.reference(asked([4, 5], 2, **changes))


def executed(inputs: Inputs, plan: Outputs) -> list[list[int]] | None:
    """The keys that each query row of the plan attends to, as kernel and reduction find them; None where nothing tells.

    A worker does its works one by one. A row of a work sees the work's keys, except for those behind its own position,
    which counts back from the end of the request. What has a scratch row is only seen by whom a group sends it to.
    """
    fold = decode_tiles.folds(inputs)
    query = inputs.query_start.tolist()
    rows = [row for row in (query[k + 1] - query[k] for k in range(len(query) - 1)) for _ in range(fold)]
    first = [0, *itertools.accumulate(rows)]
    seen: list[list[int] | None] = [None] * first[-1]
    scratch: dict[int, list[int]] = {}
    starts = plan.work_start.tolist()
    for begin, end in itertools.pairwise(starts):
        for request, place, low, high, key, last, behind, _ in plan.works[begin:end].tolist():
            for row in range(low, high):
                bound = last
                if inputs.mask == "causal":
                    bound = min(last, last + behind - (rows[request] - 1 - (row - first[request])))
                keys = list(range(key, max(key, bound)))
                if place < 0:
                    seen[row] = [*(seen[row] or []), *keys]
                else:
                    scratch[place + row - low] = keys
    for number, (begin, end) in enumerate(itertools.pairwise(plan.group_start.tolist())):
        if end - begin > 1:
            low, high = plan.groups[number].tolist()
            for row in range(low, high):
                seen[row] = [
                    key for base in plan.parts[begin:end].tolist() for key in scratch.get(base + row - low, [-1])
                ]
    return None if any(keys is None for keys in seen) else [sorted(keys or []) for keys in seen]


def visible(inputs: Inputs) -> list[list[int]]:
    """The keys that each query row sees."""
    fold = decode_tiles.folds(inputs)
    query, key = inputs.query_start.tolist(), inputs.key_start.tolist()
    found = []
    for number in range(len(query) - 1):
        count = query[number + 1] - query[number]
        for _ in range(fold):
            for row in range(count):
                hidden = count - 1 - row if inputs.mask == "causal" else 0
                found.append(list(range(key[number], max(key[number], key[number + 1] - hidden))))
    return found


def cut(inputs: Inputs, *cuts: int, workers: Sequence[int] | None = None) -> Outputs:
    """A plan of the batch's only tile, cut at these keys."""
    (tile,) = decode_tiles.tiles(inputs)
    ends = [tile.first_key, *cuts, tile.needed]
    places = workers or range(len(ends) - 1)
    pieces = [Piece(0, worker, *keys) for worker, keys in zip(places, itertools.pairwise(ends), strict=True)]
    return written(inputs, [tile], pieces)


def test_a_batch_is_cut_between_blocks() -> None:
    inputs = asked([100], granularity=32)
    assert sentences(inputs, cut(inputs, 32, 64)) == []
    (sentence,) = sentences(inputs, cut(inputs, 32, 48))
    assert sentence == (
        "first key of request 0 tile 0, work[2]=48, but should be 32 or 64, whole blocks of 32 keys behind 0: "
        "a batch may be cut between blocks of keys (cuts, 1 breaches)"
    )


def test_a_work_may_hold_only_keys_that_first_rows_do_not_see() -> None:
    # Of 34 keys the first of four rows sees 31.
    inputs = asked([34], 4)
    plan = cut(inputs, 32)
    assert sentences(inputs, plan) == []
    assert executed(inputs, plan) == visible(inputs)


def test_one_worker_may_do_it_all() -> None:
    inputs = asked([100])
    assert sentences(inputs, cut(inputs, 32, 64, workers=(0, 0, 0))) == []


SMALL = [case for case in SWEEP if case.lengths in ("short", "edges", "gaps", "empty") and case.requests < 9][:24]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_kernel_that_follows_a_right_plan_sees_every_key_once(case: PlanCase) -> None:
    inputs = ask.build(case)
    for answer in (OURS.run, *(honest.answer for honest in right.HONEST)):
        plan = answer(inputs)
        assert sentences(inputs, plan) == []
        assert executed(inputs, plan) == visible(inputs)


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4), st.integers(1, 9), st.sampled_from([16, 32, 64]),
    st.sampled_from(["causal", "none", "round_robin"]), st.integers(1, 6), st.data(),
)  # fmt: skip
def test_a_plan_changed_at_one_place_passes_only_if_it_still_computes_the_same(
    keys: list[int], rows: int, heads: int, mask: Mask, workers: int, data: st.DataObject
) -> None:
    keys = [max(count, rows) if mask == "causal" and count else count for count in keys]
    inputs = asked(keys, rows, heads=heads, mask=mask, compute_units=workers)
    plan = data.draw(st.sampled_from([right.reference, OURS.run]))(inputs)
    assert sentences(inputs, plan) == []
    buffers = {"works": plan.works[: int(plan.work_start[-1]), :7], "parts": plan.parts[: int(plan.group_start[-1])],
               "group_start": plan.group_start, "groups": plan.groups, "work_start": plan.work_start}  # fmt: skip
    buffer = buffers[data.draw(st.sampled_from([name for name, one in buffers.items() if one.numel()]))]
    place = data.draw(st.integers(0, buffer.numel() - 1))
    flat = buffer.reshape(-1) if buffer.is_contiguous() else None
    row, column = divmod(place, 7) if flat is None else (0, 0)
    change = data.draw(st.sampled_from([-16, -1, 1, 2, 16]))
    if flat is None:
        buffer[row, column] += change
    else:
        flat[place] += change
    if sentences(inputs, plan) == []:
        assert executed(inputs, plan) == visible(inputs)


def test_our_planner_keeps_the_rules_on_random_batches() -> None:
    choose = random.Random(1)
    for number in range(150):
        keys = [
            choose.choice([0, choose.randrange(40), choose.randrange(3000)]) for _ in range(choose.randrange(1, 12))
        ]
        rows = choose.randrange(1, 10)
        inputs = asked(
            [max(count, rows) if count else 0 for count in keys], rows, heads=choose.choice([16, 32, 64, 128]),
            compute_units=choose.choice([1, 2, 7, 80]), split_cap=choose.choice([None, 1, 3]),
        )  # fmt: skip
        for run in (right.reference, OURS.run):
            assert sentences(inputs, run(inputs)) == [], number


def test_ours_spreads_a_long_request_over_all_workers() -> None:
    plan = OURS.run(asked([131072], compute_units=80))
    assert plan.work_start.tolist() == list(range(81))
    assert max(work[5] - work[4] for work in works_of(plan)) <= 16 * (1 + (131072 // 16 + 16) // 80)


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_ours_passes_and_keeps_the_laws(case: PlanCase) -> None:
    inputs = ask.build(case)
    assert sentences(inputs, OURS.run(inputs)) == []
    for law in right.LAWS:
        checks = break_of(law, inputs, OURS.run(inputs), OURS.run, right.judge, Precision())
        assert checks is None or all(check.passed for check in checks), law.name


@pytest.mark.parametrize(
    ("law", "mutant"),
    [("D1", "last-tiles-without-work"), ("D2", "reserved-for-this-batch"), ("D3", "own-keys-dropped"), ("D4", "cap-ignored"),
     ("D5", "empty-requests-skipped")],
)  # fmt: skip
def test_a_law_is_broken_by_its_fault(law: str, mutant: str) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))
    answer = next(wrong for wrong in right.MUTANTS if wrong.name == mutant).answer

    def faulty(inputs: Inputs) -> Outputs:
        if mutant == "cap-ignored":
            # A planner that takes any cap for one of a single worker.
            capped = dataclasses.replace(inputs, compute_units=1) if inputs.split_cap else inputs
            return right.reference(capped)
        if mutant == "reserved-for-this-batch":
            return right.reference(dataclasses.replace(inputs, compute_units=inputs.capacity_requests))
        return answer(inputs) or right.reference(inputs)

    def broken(case: PlanCase) -> bool:
        inputs = ask.build(case)
        checks = break_of(rule, inputs, faulty(inputs), faulty, right.judge, Precision())
        return checks is not None and not all(check.passed for check in checks)

    assert any(broken(case) for case in SWEEP if case.split_cap == 0 and case.requests)


def test_sentences_name_request_tile_and_work() -> None:
    inputs = asked([40, 1000])
    plan = right.reference(inputs)
    plan.works[2, 4] = 130
    assert sentences(inputs, plan)[0].startswith(
        "first key of request 1 tile 0, work[2]=130, but should be 136: overlap of 6 keys"
    )
    plan = right.reference(inputs)
    plan.works[0, 1] = 9
    assert sentences(inputs, plan)[0].startswith(
        "scratch row of request 0 tile 0, work[0]=9, but should be -1, because it is the tile's only work"
    )
    plan = right.reference(inputs)
    plan.work_start[2] = 1
    assert sentences(inputs, plan)[0].startswith(
        "work_start[2]=1, but should be 2 or more, where worker 1 begins: the shares of workers follow one another"
    )


def test_what_lies_behind_the_used_part_is_not_read() -> None:
    inputs = asked([40, 1000], capacity_requests=5)
    plan = right.reference(inputs)
    plan.works[5:] = 3
    plan.parts[4:] = 0
    plan.groups[0] = 77
    assert sentences(inputs, plan) == []


def test_works_of_no_rows_do_no_harm() -> None:
    inputs = asked([50, 0], [1, 0])
    plan = right.reference(inputs)
    plan.works[1] = torch.tensor([1, -1, 1, 1, 50, 50, 0, 0])
    plan.work_start[1:] = 2
    assert sentences(inputs, plan) == []


def test_aiter_says_why_it_cannot_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = AITER.unsupported(PlanCase(), "interpreter")
    assert reasons[0] == "execution=interpreter: AITER's planner is a compiled HIP kernel and needs an AMD device"
    device = SimpleNamespace(multi_processor_count=304, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert AITER.unsupported(PlanCase(), "hip")[-2:] == [
        "compute_units=80: AITER plans for the device's 304", "arch=gfx950: AITER plans for the device, gfx942:sramecc+",
    ]  # fmt: skip


def test_aiter_is_asked_as_vllm_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: dict[str, Any] = {}
    inputs = asked([40, 1000], 2, told=False, split_cap=3, mask="round_robin")
    want = right.reference(inputs)

    def described(*arguments: Any, **named: Any) -> list[tuple[Any, torch.dtype]]:
        asked_for["sizes"] = (arguments, named)
        return [((2,), torch.int64), *((buffer.shape, torch.int32) for buffer in dataclasses.astuple(want))]

    def fill(*arguments: Any, **named: Any) -> None:
        asked_for["plan"] = (arguments[3:6], named)
        _, works, work_start, group_start, groups, parts = arguments[6:]
        for mine, found in zip((work_start, works, group_start, groups, parts), dataclasses.astuple(want), strict=True):
            mine.copy_(found)

    stand_in = ModuleType("aiter")
    stand_in.dtypes = SimpleNamespace(bf16="bf16", fp8="fp8")  # type: ignore[attr-defined]
    stand_in.get_mla_metadata_info_v1 = described  # type: ignore[attr-defined]
    stand_in.get_mla_metadata_v1 = fill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", stand_in)
    assert sentences(inputs, AITER.run(inputs)) == []
    assert asked_for["sizes"] == (
        (2, 2, 16, "fp8", "fp8"), {"is_sparse": False, "fast_mode": True, "max_split_per_batch": 3}
    )  # fmt: skip
    assert asked_for["plan"] == (
        (16, 1, False),
        {"page_size": 1, "kv_granularity": 16, "max_seqlen_qo": 2, "uni_seqlen_qo": -1, "fast_mode": True,
         "dtype_q": "fp8", "dtype_kv": "fp8", "max_split_per_batch": 3, "is_cp_round_robin": True},
    )  # fmt: skip
