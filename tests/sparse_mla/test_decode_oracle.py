"""Is the reference of sparse MLA decode right, and does its judge tell right from wrong?"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.covering import sweep_cases
from cases.memory import guarded, guarded_copy, storage_bytes
from cases.sparse_mla import decode as questions
from cases.sparse_mla.decode import AXES, DecodeCase, DecodeInputs, DecodeOutputs, Segment, build, forbid, heavy
from oracle import mxfp8
from oracle.cache import records
from oracle.sparse_mla import decode as oracle
from oracle.sparse_mla.decode_faults import HONEST, MUTANTS, Way, compute
from reports.laws import break_of, identical

BASE = DecodeCase(queries=2, heads=3, main_length=33, extra_length=31)
OURS = HONEST[0]


def _cache(rows: torch.Tensor, block: int = 2) -> torch.Tensor:
    """Rows [n, 512] as records of a cache with pages of `block` tokens, by the writer's reference."""
    blocks = -(-rows.shape[0] // block)
    flat = torch.zeros(blocks * records.page_bytes(block), dtype=torch.uint8)
    cache = flat.as_strided((blocks, block, 584), (records.page_bytes(block), 584, 1))
    records.write(rows.to(torch.bfloat16), cache, torch.arange(rows.shape[0]), "float8_e4m3fn")
    return cache


def _call(rows: torch.Tensor, entries: list[int], query: torch.Tensor, **changes: object) -> DecodeInputs:
    """One query with one segment over `rows`."""
    call = DecodeInputs(
        query=query.to(torch.bfloat16)[None],
        main=Segment(
            cache=_cache(rows),
            encoding="float8_e4m3fn",
            indices=torch.tensor(entries, dtype=torch.int32),
            indptr=torch.tensor([0, len(entries)], dtype=torch.int32),
        ),
        extra=None,
        scale=1.0,
        sink=None,
        positions=None,
        cos_sin=None,
        out=guarded((1, query.shape[0], 512), torch.bfloat16),
        out_codes=None,
        out_scales=None,
        arch="gfx950",
        compute_units=256,
        splits=1,
        adaptive=False,
        trust_extra=False,
    )
    return dataclasses.replace(call, **changes)  # type: ignore[arg-type]


def _unit(lane: int, value: float = 1.0) -> torch.Tensor:
    row = torch.zeros(512)
    row[lane] = value
    return row


# Hand-worked answers.


def test_one_key_is_its_own_answer() -> None:
    rows = torch.stack([_unit(0, 2.0), _unit(500, -3.0)])
    out = oracle.reference(_call(rows, [1], _unit(500)[None])).out
    assert torch.equal(out[0, 0], _unit(500, -3.0))


def test_two_keys_share_by_the_exponential_of_their_scores() -> None:
    # Scores ln 3 and 0: shares 3/4 and 1/4.
    rows = torch.stack([_unit(0), _unit(1, 4.0)])
    call = _call(rows, [0, 1], _unit(0)[None], scale=math.log(3.0))
    out = oracle.reference(call, torch.float64).out[0, 0]
    assert out[0] == pytest.approx(0.75)
    assert out[1] == pytest.approx(1.0)


def test_the_sink_takes_its_share_and_gives_nothing() -> None:
    # One key of score 0 and a sink of ln 3: the key's share is 1/4.
    call = _call(_unit(7, 8.0)[None], [0], torch.zeros(1, 512), sink=torch.tensor([math.log(3.0)]))
    assert oracle.reference(call, torch.float64).out[0, 0, 7] == pytest.approx(2.0, rel=1e-6)


def test_the_log_sum_exp_leaves_the_sink_out() -> None:
    rows = torch.stack([_unit(0), _unit(1)])
    call = _call(rows, [0, 1], torch.zeros(1, 512), sink=torch.tensor([100.0]))
    assert oracle.reference(call, torch.float64).lse[0, 0] == pytest.approx(math.log(2.0))


def test_duplicates_count_as_often_as_they_stand() -> None:
    rows = torch.stack([_unit(0, 3.0), _unit(1, 3.0)])
    out = oracle.reference(_call(rows, [0, 1, 0], torch.zeros(1, 512)), torch.float64).out[0, 0]
    assert (out[0], out[1]) == (pytest.approx(2.0), pytest.approx(1.0))


def test_entries_that_are_no_slots_are_skipped() -> None:
    rows = torch.stack([_unit(0, 3.0), _unit(1, 3.0)])
    entries = [-1, 2, 1, -(2**31), 2**31 - 1]
    out = oracle.reference(_call(rows, entries, torch.zeros(1, 512))).out[0, 0]
    assert torch.equal(out, _unit(1, 3.0))


def test_a_row_without_a_key_is_zero_with_or_without_a_sink() -> None:
    rows = _unit(0)[None]
    for sink in (None, torch.tensor([0.5])):
        truth = oracle.reference(_call(rows, [-1, 5], torch.ones(1, 512), sink=sink))
        assert not truth.out.any()
        assert torch.isneginf(truth.lse).all()


def test_nan_lanes_count_as_zero_in_score_and_value() -> None:
    rows = torch.stack([_unit(0, 1.0), _unit(1, 1.0)])
    call = _call(rows, [0, 1], torch.full((1, 512), 1.0))
    views = records.record_views(call.main.cache)
    views.codes[0, 0, 0] = 0x7F
    out = oracle.reference(call, torch.float64).out[0, 0]
    # The first key is all zeros now: scores 0 and 1.
    assert out[0] == 0
    assert out[1] == pytest.approx(math.e / (1 + math.e))


def test_rotation_turns_pairs_of_neighbouring_lanes_back() -> None:
    row = torch.zeros(512)
    row[448], row[449] = 3.0, 4.0
    table = torch.zeros(3, 64)
    table[:, :32] = 1.0
    # A quarter turn of the first pair at position 2: (a, b) becomes (b, -a).
    table[2, 0], table[2, 32] = 0.0, 1.0
    call = _call(row[None], [0], torch.zeros(1, 512), positions=torch.tensor([2]), cos_sin=table)
    out = oracle.reference(call).out[0, 0]
    assert (float(out[448]), float(out[449])) == (4.0, -3.0)


def test_a_dense_row_without_lengths_ends_at_its_count_of_non_negatives() -> None:
    rows = torch.stack([_unit(lane) for lane in range(8)])
    dense = torch.tensor([[5, -1, 7]], dtype=torch.int32)
    call = _call(rows, [], torch.zeros(1, 512))
    main = dataclasses.replace(call.main, indices=None, indptr=None, dense=dense)
    out = oracle.reference(dataclasses.replace(call, main=main)).out[0, 0]
    assert torch.equal(out, _unit(5))


def test_mxfp8_scale_bytes_of_known_magnitudes() -> None:
    amax = torch.tensor([0.0, 2.0**-126, 1.0, 224.0, 225.0, 448.0, 448.00003, 449.0, 3.3e38], dtype=torch.float32)
    assert mxfp8.scale_bytes(amax).tolist() == [0, 0, 119, 126, 127, 127, 128, 128, 247]


def test_mxfp8_codes_shift_with_the_numbers() -> None:
    rows = torch.linspace(-3, 5, 64)[None]
    codes, scales = mxfp8.quantise(rows)
    shifted, moved = mxfp8.quantise(rows * 8)
    assert torch.equal(codes, shifted)
    assert torch.equal(scales.int() + 3, moved.int())


# An independent formulation: scalar loops over bytes.


def _number(code: int, encoding: str) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    bias = 7 if encoding == "float8_e4m3fn" else 8
    if (encoding == "float8_e4m3fn" and code & 0x7F == 0x7F) or (encoding != "float8_e4m3fn" and code == 0x80):
        return 0.0
    size = fraction * 2.0 ** (1 - bias - 3) if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - bias)
    return -size if code & 0x80 else size


def _record(segment: Segment, slot: int) -> list[float]:
    data = bytes(storage_bytes(segment.cache).numpy())
    block = segment.cache.shape[1]
    page = int(segment.cache.storage_offset()) + slot // block * segment.cache.stride(0)
    place = slot % block
    lanes = []
    for lane in range(448):
        scale = data[page + 576 * block + 8 * place + lane // 64]
        lanes.append(_number(data[page + 576 * place + lane], segment.encoding) * 2.0 ** (scale - 127))
    for lane in range(64):
        at = page + 576 * place + 448 + 2 * lane
        number = float(np.array([data[at + 1] << 24 | data[at] << 16], dtype=np.uint32).view(np.float32)[0])
        lanes.append(0.0 if math.isnan(number) else number)
    return lanes


def _by_hand(inputs: DecodeInputs) -> list[list[list[float]]]:
    answer = []
    for t in range(inputs.query.shape[0]):
        keys = []
        for part in (inputs.main, *([inputs.extra] if inputs.extra else [])):
            assert part.indices is not None and part.indptr is not None
            entries = part.indices[int(part.indptr[t]) : int(part.indptr[t + 1])].tolist()
            keys += [_record(part, slot) for slot in entries if 0 <= slot < part.rows]
        rows = []
        for h in range(inputs.query.shape[1]):
            lanes = inputs.query[t, h].double().tolist()
            scores = [inputs.scale * math.fsum(a * b for a, b in zip(lanes, key, strict=True)) for key in keys]
            sink = -math.inf if inputs.sink is None else float(inputs.sink[h])
            top = max([*scores, sink])
            if not keys:
                rows.append([0.0] * 512)
                continue
            total = math.fsum([*(math.exp(score - top) for score in scores), math.exp(sink - top)])
            row = [
                math.fsum(math.exp(s - top) * key[lane] for s, key in zip(scores, keys, strict=True)) / total
                for lane in range(512)
            ]
            if inputs.positions is not None and inputs.cos_sin is not None:
                at = int(inputs.positions[t])
                for k in range(32):
                    cos, sin = float(inputs.cos_sin[at, k]), float(inputs.cos_sin[at, 32 + k])
                    a, b = row[448 + 2 * k], row[449 + 2 * k]
                    row[448 + 2 * k], row[449 + 2 * k] = a * cos + b * sin, b * cos - a * sin
            rows.append(row)
        answer.append(rows)
    return answer


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": "mixed", "invalid": "scattered"},
        {"arch": "gfx942", "main_encoding": "float8_e4m3fnuz", "values": "nan_lanes", "rotation": "spread"},
        {"values": "wide", "sink": "large", "main_block": 5, "block_stride": "odd", "form": "ragged_offset"},
        {"values": "needle", "duplicates": "across", "sink": "absent", "garbage": "huge"},
    ],
)
def test_reference_agrees_with_scalar_loops_over_the_bytes(changes: dict[str, str]) -> None:
    inputs = build(BASE.varied(main_length=5, extra_length=7, **changes))
    want = torch.tensor(_by_hand(inputs), dtype=torch.float64)
    assert torch.allclose(oracle.reference(inputs, torch.float64).out, want, rtol=1e-11, atol=1e-13)
    truth, _ = oracle.budget(inputs, OURS.precision)
    assert torch.allclose(truth.out, want, rtol=1e-11, atol=1e-13)


def _drawn(data: st.DataObject, **fixed: object) -> DecodeCase:
    axes = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    axes |= {"queries": min(int(axes["queries"]), 2), "heads": min(int(axes["heads"]), 17)} | fixed
    return DecodeCase(**axes, seed=data.draw(st.integers(0, 999)))  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_fp32_reference_lies_within_the_budget_of_fp32(data: st.DataObject) -> None:
    case = _drawn(data)
    if forbid(case) or heavy(case):
        return
    inputs = build(case)
    single = oracle.reference(inputs)
    truth, allowed = oracle.budget(inputs, fp32_rounding())
    error = (single.out.double() - truth.out).abs()
    slack = allowed.out + 4 * 2.0**-24 * truth.out.abs() + 1e-37
    assert bool((error <= slack).all())


def fp32_rounding() -> oracle.Precision:
    """Rounding points of the fp32 reference itself."""
    return oracle.Precision(probability="float32", output="float32")


def test_another_seed_gives_another_query() -> None:
    assert not torch.equal(build(BASE).query, build(BASE.varied(seed=1)).query)


def test_slot_0_is_never_asked_for_and_holds_garbage() -> None:
    for case in (BASE, BASE.varied(values="needle", garbage="huge"), BASE.varied(duplicates="across", rows="mixed")):
        inputs = build(case)
        for part in (inputs.main, inputs.extra):
            assert part is not None and part.indices is not None
            assert not bool((part.indices == 0).any())


def test_every_kind_of_values_is_within_the_formats() -> None:
    for values in AXES["values"]:
        inputs = build(BASE.varied(values=values))
        truth = oracle.reference(inputs)
        assert torch.isfinite(truth.out).all(), values


# The judge.


@pytest.mark.parametrize("values", ["randn", "single"])
def test_a_query_rounded_again_passes_even_where_it_leaves_nothing_of_the_scores(values: str) -> None:
    """One key of all the weight beside a finite sink: the variance cancels in float64, the budget must not."""
    way = next(way for way in HONEST if way.declared(None).query == "bfloat16")
    loud = build(BASE.varied(values=values, sink="large", heads=16))
    loud = dataclasses.replace(loud, scale=loud.scale * 1000)
    checks = oracle.judge(loud, way.answer(loud), way.declared(loud))
    assert [str(check) for check in checks if not check.passed] == []


def test_a_mutant_without_its_fault_is_the_right_way() -> None:
    inputs = build(BASE)
    assert identical(dataclasses.replace(compute(inputs, Way()), lse=None), OURS.answer(inputs))


def test_a_law_can_be_broken() -> None:
    law = next(law for law in oracle.LAWS if law.name.startswith("M5"))
    inputs = build(BASE)

    def crooked(call: DecodeInputs) -> DecodeOutputs:
        return compute(call, Way(faults=frozenset({"drop-last-entry"} if call is not inputs else ())))

    checks = break_of(law, inputs, crooked(inputs), crooked, oracle.judge, OURS.precision)
    assert checks is not None
    assert not all(check.passed for check in checks)


def test_budget_laws_hold_of_the_reference_itself() -> None:
    for law in oracle.LAWS:
        if law.measure != "budget":
            continue
        for changes in ({}, {"sink": "absent"}, {"extra_length": -1, "sink": "absent"}):
            inputs = build(BASE.varied(**changes))
            edited = law.edit(inputs)
            if edited is not None:
                first, second = (oracle.reference(call, torch.float64).out for call in (inputs, edited))
                assert torch.allclose(first, second, rtol=1e-6, atol=1e-12), law.name


def test_a_missing_and_a_misshapen_answer_fail() -> None:
    inputs = build(BASE)
    right = OURS.answer(inputs)
    assert right is not None and right.out is not None
    for out in (None, right.out.float(), right.out[:, :2]):
        checks = oracle.judge(inputs, dataclasses.replace(right, out=out), OURS.precision)
        assert not all(check.passed for check in checks)


def test_one_element_off_by_one_bf16_step_fails_where_the_answer_is_exact() -> None:
    inputs = build(BASE.varied(values="single", sink="absent"))
    right = OURS.answer(inputs)
    assert right is not None and right.out is not None
    out = right.out.clone()
    place = tuple(int(i) for i in (out != 0).nonzero()[5])
    out.view(torch.int16)[place] += 1
    checks = oracle.judge(inputs, dataclasses.replace(right, out=out), OURS.precision)
    failing = [check for check in checks if not check.passed]
    assert [check.where for check in failing] == [place]
    assert "bit for bit" in str(failing[0])


def test_poisoned_output_fails() -> None:
    inputs = build(BASE)
    assert inputs.out is not None
    checks = oracle.judge(inputs, DecodeOutputs(out=inputs.out), OURS.precision)
    assert any(check.output == "out" and not check.passed and check.wrong == check.count for check in checks)


@pytest.mark.parametrize("values", AXES["values"])
@pytest.mark.parametrize("louder", [1, 10, 150])
def test_the_fp32_reference_is_a_right_answer_however_loud_the_scores(values: str, louder: int) -> None:
    inputs = build(BASE.varied(values=values, output="float32", heads=17, extra_length=65, sink="absent"))
    inputs = dataclasses.replace(inputs, scale=inputs.scale * louder)
    plain = oracle.reference(inputs)
    checks = oracle.judge(inputs, DecodeOutputs(out=plain.out, lse=plain.lse), fp32_rounding())
    assert [str(check) for check in checks if not check.passed] == []


def test_keys_whose_probabilities_share_a_rounding_cell_may_err_alike() -> None:
    # Half of 256 keys have probabilities just below a tie at 1/2, half at 1/4: all roundings go the same way.
    near = [math.log(0.5 * (1 + 0.95 * 2.0**-8)), math.log(0.25 * (1 + 0.95 * 2.0**-8))]
    rows = torch.zeros(257, 512)
    rows[:, 1:448] = torch.where(torch.arange(257)[:, None] % 2 == 0, 1.0, 0.875)
    p = torch.tensor([1.0, *(math.exp(near[i % 2]) for i in range(256))], dtype=torch.float64)
    # Scores are set by hand: the query sees one lane, whose values the cells are made of.
    call = _call(rows, list(range(257)), torch.zeros(1, 512))
    query, keys = torch.zeros(1, 512, dtype=torch.float64), rows.double()
    keys[:, 0] = p.log()
    query[0, 0] = 1.0
    answer, allowed, *_ = oracle._row(call, query, keys, torch.ones(257, dtype=torch.float64), None, OURS.precision)
    rounded = p.float().to(torch.bfloat16).double()
    got = (rounded[:, None] * keys).sum(0) / p.sum()
    assert bool(((got - answer[0]).abs() <= allowed[0]).all())
    assert float(((got - answer[0]).abs() / allowed[0])[1:448].max()) > 0.3


def test_flushed_subnormal_lanes_are_right_where_flushing_is_declared_and_only_there() -> None:
    row = torch.zeros(512)
    row[450] = 2.0**-130
    call = _call(row[None], [0], torch.zeros(1, 512))
    flushed = DecodeOutputs(out=torch.zeros(1, 1, 512, dtype=torch.bfloat16))
    for flushes in (True, False):
        precision = oracle.Precision(output="bfloat16", flushes=flushes)
        assert all(check.passed for check in oracle.judge(call, flushed, precision)) is flushes


def test_a_sink_shorter_than_the_heads_is_refused() -> None:
    inputs = dataclasses.replace(build(BASE), sink=guarded_copy(torch.zeros(2)))
    with pytest.raises(ValueError, match="should be at least 3"):
        oracle.reference(inputs)


def test_far_pages_and_rows_lie_more_than_two_gigabytes_behind_the_first() -> None:
    caches = build(BASE.varied(heads=1, reach="caches", block_stride="odd"))
    for part in (caches.main, caches.extra):
        assert part is not None and part.indices is not None
        far = part.cache.stride(0) * (part.cache.shape[0] - 1)
        assert part.cache.stride(0) < 2**31 <= far and far % 2 == 0
        # Some entry stands in the last page.
        assert bool((part.indices // part.cache.shape[1] == part.cache.shape[0] - 1).any())
    rows = build(BASE.varied(heads=1, queries=5, reach="rows"))
    for tensor in (rows.query, rows.out):
        assert tensor is not None and tensor.stride(0) < 2**31 <= 4 * tensor.stride(0)
    assert forbid(BASE.varied(reach="rows", queries=4)) and forbid(BASE.varied(reach="caches", extra_length=513))


def test_far_and_near_answers_are_the_same() -> None:
    near = oracle.reference(build(BASE.varied(queries=5, heads=1, main_block=16, extra_block=16)))
    for reach in ("caches", "rows"):
        far = oracle.reference(build(BASE.varied(queries=5, heads=1, main_block=16, extra_block=16, reach=reach)))
        assert torch.equal(near.out, far.out)


def test_scores_far_below_zero_are_what_their_name_says() -> None:
    inputs = build(BASE.varied(values="below", sink="absent"))
    truth = oracle.reference(inputs)
    assert bool((truth.lse < -100).all())
    assert float(truth.out.abs().amax()) > 1


def test_a_trusted_extra_cache_holds_no_nan_where_the_main_one_does() -> None:
    inputs = build(BASE.varied(values="nan_lanes", trust_extra=True))
    assert inputs.extra is not None
    raw = [
        records.dequantise(part.cache, torch.arange(part.rows), part.encoding).isnan().any()
        for part in (inputs.main, inputs.extra)
    ]
    assert [bool(found) for found in raw] == [True, False]


def test_the_other_encoding_holds_in_both_directions() -> None:
    law = next(law for law in oracle.LAWS if law.name.startswith("M12"))
    for encoding, other in (("float8_e4m3fn", "float8_e4m3fnuz"), ("float8_e4m3fnuz", "float8_e4m3fn")):
        inputs = build(BASE.varied(arch="gfx942", main_encoding=encoding))
        edited = law.edit(inputs)
        assert edited is not None and edited.main.encoding == other
        assert torch.equal(oracle.reference(inputs).out, oracle.reference(edited).out)
        wrong = next(mutant for mutant in MUTANTS if mutant.name == "main-in-the-other-encoding")
        checks = break_of(law, inputs, OURS.answer(inputs), wrong.answer, oracle.judge, OURS.precision)
        assert checks is not None and not all(check.passed for check in checks)


def test_impossible_calls_are_refused_with_every_reason() -> None:
    case = DecodeCase(output="mxfp8", arch="gfx942", adaptive=True, extra_length=-1, trust_extra=True)
    reasons = forbid(case)
    assert len(reasons) == 3
    assert any("mxfp8" in reason for reason in reasons)


def test_the_default_sweep_asks_for_every_kind_of_values_and_every_output() -> None:
    asked = sweep_cases("sparse_mla.decode", "smoke", 0)
    for axis in ("values", "output", "sink", "heads", "splits"):
        assert {getattr(case, axis) for case in asked} >= set(AXES[axis]), axis
    assert questions.CASE is DecodeCase
