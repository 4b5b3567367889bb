"""Do plans of persistent prefill cover every key once, and is their scratch memory reserved for every step?"""

import dataclasses
import itertools
import math
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.case import parse
from cases.dense_mla import prefill_plan as ask
from cases.dense_mla.prefill_plan import Inputs, Outputs, PrefillPlanCase
from cases.precision import Precision
from impl.dense_mla.prefill_plan import IMPLS
from impl.sources import settings as sources
from oracle.dense_mla import prefill_plan as right
from reports.laws import break_of

OURS, VLLM, AITER = IMPLS
RUNS = [pytest.param(right.reference, id="reference"), pytest.param(OURS.run, id="ours-host")]


def asked(lengths: list[int], heads: int = 16, compute_units: int = 32, **changes: Any) -> Inputs:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inputs = Inputs(starts, 0, heads, 128, compute_units, max(1, len(lengths)), 8192, 16384)
    return dataclasses.replace(inputs, **changes)


def sentences(inputs: Inputs, plan: Outputs) -> list[str]:
    return [str(check) for check in right.judge(inputs, plan, Precision()) if not check.passed]


def works_of(plan: Outputs, worker: int) -> list[tuple[int, ...]]:
    first, last = plan.work_start[worker : worker + 2].tolist()
    return [tuple(work) for work in plan.works[first:last].tolist()]


def drawn(count: int) -> list[PrefillPlanCase]:
    choose = random.Random(7)
    found = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, PrefillPlanCase)]
    while len(found) < count:
        axes = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = PrefillPlanCase(**axes, seed=choose.randrange(99))  # type: ignore[arg-type]
        if not ask.forbid(case) and case.heads < 100:
            found.append(case)
    return found


SWEEP = drawn(20)


@pytest.mark.parametrize("run", RUNS)
def test_two_workers_share_six_units(run: Any) -> None:
    # 16 clusters of two workers and a head each. Tiles need 2, 3 and 1 units: three units a worker.
    plan = run(asked([300, 40]))
    for head in range(16):
        heads = head | (head + 1) << 16
        assert works_of(plan, 2 * head) == [(0, -1, 0, 256, 0, 256, 0, heads), (0, 0, 256, 300, 0, 128, 172, heads)]
        assert works_of(plan, 2 * head + 1) == [
            (0, 256, 256, 300, 128, 300, 0, heads), (1, -1, 300, 340, 300, 340, 0, heads)
        ]  # fmt: skip
    assert plan.work_start.tolist() == list(range(0, 66, 2))
    assert set(plan.group_start[1:].tolist()) == {2}
    assert plan.groups[0].tolist() == [256, 300]
    assert plan.parts[:2].tolist() == [0, 256]
    assert plan.rows.tolist() == [0, 300, 340]


@pytest.mark.parametrize("run", RUNS)
def test_a_tile_of_three_parts(run: Any) -> None:
    # Four workers; tiles need 2 and 4 units: two workers take two units, two take one.
    plan = run(asked([512], compute_units=64))
    works = [work[1:7] for worker in range(4) for work in works_of(plan, worker)]
    assert works == [
        (-1, 0, 256, 0, 256, 0), (0, 256, 512, 0, 256, 256), (256, 256, 512, 256, 384, 128), (512, 256, 512, 384, 512, 0)
    ]  # fmt: skip
    assert plan.parts[:3].tolist() == [0, 256, 512]


@pytest.mark.parametrize("run", RUNS)
def test_several_heads_of_a_cluster_share_scratch_rows(run: Any) -> None:
    # 32 heads on 16 units: 16 clusters of one worker and two heads each.
    plan = run(asked([300], heads=32, compute_units=48))
    works = [work[1:2] + work[4:6] + (work[7] & 0xFFFF,) for worker in range(3) for work in works_of(plan, worker)]
    assert works == [
        (-1, 0, 256, 0), (-1, 0, 256, 1), (0, 0, 256, 0), (0, 0, 256, 1), (256, 256, 300, 0), (256, 256, 300, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("lengths", "heads", "parts"),
    [([512], 16, 6), ([512], 24, 6), ([512], 32, 6), ([1], 16, 0), ([256], 16, 2), ([257], 16, 5), ([4096] * 4, 16, 0),
     ([8175], 16, 0)],
)  # fmt: skip
def test_parts_on_256_units(run: Any, lengths: list[int], heads: int, parts: int) -> None:
    plan = run(asked(lengths, heads, 256))
    assert int(plan.group_start[-1]) == parts
    assert plan.used[0] == parts * 256 * -(-heads // 16) * 16 * 128 * 4


@pytest.mark.parametrize("run", RUNS)
def test_a_narrow_plan_needs_four_times_the_parts_of_a_padded_one(run: Any) -> None:
    inputs = asked([512], 24, 256, max_len=512)
    assert run(inputs).parts.numel() == 16
    # 24 of 256 have a common divisor of 8, so 32 workers a cluster; 32 have eight.
    assert (min(1 + 31, 62) * 2, min(1 + 7, 14) * 2) == (64, 16)
    assert right._blank(inputs, right.Faults(padded_heads="native_24")).parts.numel() == 64


@pytest.mark.parametrize("run", RUNS)
def test_bytes_that_are_reserved(run: Any) -> None:
    inputs = asked([5], 12, 80, max_requests=3, max_batched=1000)
    count = 4 + 3 - 1 + 80
    assert run(inputs).reserved.tolist() == [
        count * 256 * 16 * 128 * 4,
        count * 256 * 16 * 4,
        64000,
        1000 * 16 * 128 * 2,
    ]
    assert run(inputs).used.tolist() == [0, 0, 512, 5 * 16 * 128 * 2]
    assert run(dataclasses.replace(inputs, heads=16)).reserved[3] == 0


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 40), st.sampled_from([300, 2048, 16384]), st.sampled_from([1, 16, 40]))
def test_every_step_fits_what_is_reserved(data: st.DataObject, requests: int, budget: int, heads: int) -> None:
    lengths: list[int] = []
    for _ in range(data.draw(st.integers(1, requests))):
        left = budget - sum(lengths)
        if left:
            lengths.append(
                data.draw(st.one_of(st.integers(1, min(left, 300)), st.sampled_from([1, min(left, 257), left])))
            )
    units = data.draw(st.sampled_from([1, 16, 80, 256, 304]))
    inputs = asked(lengths, heads, units, max_requests=requests, max_len=budget, max_batched=budget)
    parts = 1 + max((part.scratch for part in right._dealt(inputs, right.RIGHT)), default=-256) // 256
    workers = units // math.gcd(-(-heads // 16) * 16, units)
    assert parts <= min(sum(-(-length // 256) for length in lengths) + workers - 1, 2 * (workers - 1))
    now, most = right.used(inputs, parts), right.reserved(inputs)
    assert all(one <= other for one, other in zip(now, most, strict=True))


def test_without_a_part_for_every_worker_the_workspace_would_grow() -> None:
    inputs = asked([257], 16, 256, max_len=257, max_batched=257)
    plan = right.reference(inputs)
    assert int(plan.group_start[-1]) == 5
    assert plan.used[0] <= plan.reserved[0]
    assert plan.used[0] > right.reserved(inputs, right.Faults(reserved_tiles="without_workers"))[0]


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"decodes": 2}, ValueError, "decodes=2: should be less than the 2 requests"),
        ({"max_requests": 1}, ValueError, "requests=2: should be 1 or fewer"),
        ({"max_batched": 60}, ValueError, "tokens=70: should be 60 or fewer"),
        ({"max_len": 30}, ValueError, "a request of 40 tokens: should have 30 or fewer"),
        ({"heads": 136}, ValueError, "heads=136: should be 1 to 128, or a multiple of 16"),
        ({"heads": 0}, ValueError, "heads=0: should be"),
        ({"query_start": torch.tensor([0, 30, 70])}, TypeError, "query_start is torch.int64: should be torch.int32"),
    ],
)  # fmt: skip
def test_steps_that_make_no_sense_are_refused(changes: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        right.reference(asked([30, 40], **changes))


def seen(inputs: Inputs, plan: Outputs) -> dict[tuple[int, int], list[int]]:
    """The keys that each head and row attends to, as a kernel finds them that reads works and reduces groups."""
    starts = plan.rows.tolist()
    found: dict[tuple[int, int], list[int]] = {}
    scratch: dict[tuple[int, int], list[int]] = {}
    for request, place, low, high, first, last, _, heads in plan.works[: int(plan.work_start[-1])].tolist():
        for head in range(heads % 65536, heads // 65536):
            for row in range(low, high):
                keys = [key for key in range(first, last) if key <= row and key >= starts[request]]
                if place < 0:
                    assert (head, row) not in found
                    found[head, row] = keys
                else:
                    assert (head, place + row - low) not in scratch
                    scratch[head, place + row - low] = keys
    for number, (first, last) in enumerate(itertools.pairwise(plan.group_start.tolist())):
        for row in range(*plan.groups[number].tolist()) if last > first else ():
            for head in range(-(-inputs.heads // 16) * 16):
                bases = plan.parts[first:last].tolist()
                found[head, row] = [
                    key for base in bases for key in scratch[head, base + row - int(plan.groups[number, 0])]
                ]
    return found


@pytest.mark.parametrize(
    ("lengths", "heads", "units"), [([300, 1, 140], 16, 80), ([520], 1, 48), ([257, 256], 24, 32), ([2], 16, 304)]
)
def test_every_row_sees_its_keys_once(lengths: list[int], heads: int, units: int) -> None:
    inputs = asked(lengths, heads, units)
    starts = [0, *itertools.accumulate(lengths)]
    for run in (right.reference, OURS.run):
        found = seen(inputs, run(inputs))
        for first, last in itertools.pairwise(starts):
            for row in range(first, last, 7):
                assert all(sorted(found[head, row]) == list(range(first, row + 1)) for head in (0, heads - 1))


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_ours_passes_and_keeps_the_laws(case: PrefillPlanCase) -> None:
    inputs = ask.build(case)
    assert sentences(inputs, OURS.run(inputs)) == []
    for law in right.LAWS:
        checks = break_of(law, inputs, OURS.run(inputs), OURS.run, right.judge, Precision())
        assert checks is None or all(check.passed for check in checks), law.name


@pytest.mark.parametrize(
    ("law", "faults"),
    [("P1", {"rebased": False}), ("P2", {"padded_heads": "unpadded"}), ("P3", {"visiting": "from_the_end"}),
     ("P4", {"visiting": "in_order"})],
)  # fmt: skip
def test_a_law_is_broken_by_its_fault(law: str, faults: Any) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))

    def faulty(inputs: Inputs) -> Outputs:
        # The last two know nothing of what they should not, so their faults are made to depend on it.
        known = {"P3": inputs.max_batched > 20000, "P4": int(inputs.query_start.diff()[-1]) > 0}.get(law, True)
        return right._planned(inputs, right.Faults(**faults) if known else right.RIGHT)

    inputs = asked([40, 900, 700], 24, 64, decodes=1)
    checks = break_of(rule, inputs, faulty(inputs), faulty, right.judge, Precision())
    assert checks is not None and not all(check.passed for check in checks)


def test_sentences_name_head_and_rows() -> None:
    inputs = asked([300, 40])
    plan = right.reference(inputs)
    plan.works[2, 4] = 127
    assert sentences(inputs, plan)[0].startswith("keys of head 0 rows 256.., work[2]=127..300, but should be 128 on")
    plan = right.reference(inputs)
    plan.works[1, 1] = -1
    assert sentences(inputs, plan)[0].startswith("scratch rows of head 0, tile at row[256]=[-1, 256], but should be")
    plan = right.reference(inputs)
    plan.used[0] = plan.reserved[0] + 256
    assert sentences(inputs, plan)[0].startswith("bytes of region[0]=")


def test_aiter_says_why_it_cannot_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AITER.unsupported(PrefillPlanCase(), "interpreter")[0].startswith("execution=interpreter: AITER's planner")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=304))
    assert AITER.unsupported(PrefillPlanCase(), "hip")[-1] == "compute_units=64: AITER plans for those of the device"


def test_aiter_is_asked_as_vllm_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = asked([40, 900, 300], 12, 64, decodes=1)
    want = right.reference(inputs)
    buffers = (want.work_start, want.works, want.group_start, want.groups, want.parts)
    asked_for: list[Any] = []

    def described(**named: Any) -> list[tuple[Any, torch.dtype]]:
        asked_for.append(named)
        return [((2,), torch.int64), *((buffer.shape, torch.int32) for buffer in buffers)]

    def fill(rows: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor, *arguments: Any, **named: Any) -> None:
        asked_for.append((rows.tolist(), keys.tolist(), lengths.tolist(), *arguments[:2], named))
        for mine, found in zip(arguments[3:], buffers, strict=True):
            mine.copy_(found)

    stand_in = ModuleType("aiter")
    stand_in.get_ps_metadata_info_v1, stand_in.get_ps_metadata_v1 = described, fill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", stand_in)
    assert sentences(inputs, AITER.run(inputs)) == []
    assert asked_for == [
        {"batch_size": 3, "num_head_k": 16, "max_qlen": 8192, "qlen_granularity": 256},
        ([0, 900, 1200], [0, 900, 1200], [900, 300], 1, 16,
         {"qhead_granularity": 1, "qlen_granularity": 256, "kvlen_granularity": 128, "block_size": 1, "is_causal": True}),
    ]  # fmt: skip


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    assert "is not a vLLM tree" in VLLM.unsupported(PrefillPlanCase(), "interpreter")[0]


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
def test_vllm_plans_for_padded_heads_and_reserves_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for case in SWEEP:
        assert VLLM.unsupported(case, "interpreter") == []
        inputs = ask.build(case)
        assert sentences(inputs, VLLM.run(inputs)) == [], case.id
