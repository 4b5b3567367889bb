"""Are writers of compressed records judged rightly: every right one passes, and every wrong one is seen?"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from cases import memory
from cases.cache import compressed_record_write as ask
from cases.cache import kv_record_write
from cases.cache.compressed_record_write import CompressedCase, Inputs, Outputs
from cases.covering import sweep_cases
from cases.precision import Precision
from impl.cache.compressed_record_write import IMPLS
from impl.implementation import Impl
from impl.sources import settings
from oracle.cache import compressed_record_write as right
from oracle.cache import records

EXACTLY = Precision(probability="exact", flushes=False)
_, VLLM, VLLM_V4, _ = IMPLS


SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, CompressedCase)]


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, EXACTLY))


def call(rows: torch.Tensor, positions: list[int], slots: list[int], **changes: Any) -> Inputs:
    """A call with pages of 4 in a cache of zeros, by a table of quarter turns: row p turns by p quarters."""
    quarters = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    table = quarters.repeat(32, 1)[:, :, None].expand(-1, -1, 32).flatten(1).contiguous()
    cache = memory.guarded((3, 4, 584), torch.uint8, gaps=(2880 - 4 * 584, 0), fill=0)
    inputs = Inputs(
        rows.to(torch.bfloat16), torch.tensor(positions), table, torch.tensor(slots), cache, ratio=2, zero_nans=False
    )
    return dataclasses.replace(inputs, **changes)


def one_row(**lanes: float) -> torch.Tensor:
    row = torch.zeros(1, 512)
    for lane, value in lanes.items():
        row[0, int(lane[1:])] = value
    return row


def flat(cache: torch.Tensor) -> torch.Tensor:
    """The bytes of a cache and its padding from its first byte on."""
    return memory.storage_bytes(cache)[int(cache.storage_offset()) :]


def rope_of(cache: torch.Tensor, slot: int) -> torch.Tensor:
    return records.dequantise(cache, torch.tensor([slot]), "float8_e4m3fn")[0, 448:]


def test_position_3_of_pairs_is_written_turned_to_position_2() -> None:
    # Position 2 is half a turn, position 3 would be three quarters.
    inputs = call(one_row(_0=448.0, _447=-1.0, _448=3.0, _449=-2.0, _511=5.0), [3], [5])
    written = flat(right.reference(inputs).cache)
    page = 2880
    assert written[page + 576].item() == 0x7E
    assert written[page + 576 + 447].item() == 0xF8
    # bfloat16 -3, 2, ..., -5.
    assert written[page + 1024 : page + 1028].tolist() == [0x40, 0xC0, 0x00, 0x40]
    assert written[page + 1148 : page + 1152].tolist() == [0x00, 0x80, 0xA0, 0xC0]
    assert written[page + 2304 + 8 : page + 2304 + 16].tolist() == [127, 105, 105, 105, 105, 105, 119, 0]
    others = torch.cat([written[: page + 576], written[page + 1152 : page + 2312], written[page + 2320 : 3 * page]])
    assert not others.any()


def test_a_quarter_turn_takes_the_odd_lane_to_the_even_one_with_its_sign_changed() -> None:
    inputs = call(one_row(_448=3.0, _449=2.0), [1], [0], ratio=1)
    assert rope_of(right.reference(inputs).cache, 0)[:2].tolist() == [-2.0, 3.0]
    # Position 1 is the second of a pair: turned to position 0 it stays.
    inputs = dataclasses.replace(inputs, ratio=2)
    assert rope_of(right.reference(inputs).cache, 0)[:2].tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("ratio", "writers"),
    [(1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 126, 127]), (2, [1, 3, 5, 7, 127]), (4, [3, 7, 127]), (128, [127])],
)
def test_a_position_writes_where_the_next_one_starts_a_group(ratio: int, writers: list[int]) -> None:
    for position in [0, 1, 2, 3, 4, 5, 6, 7, 8, 126, 127]:
        inputs = call(one_row(_0=1.0), [position], [9], ratio=ratio)
        assert bool(flat(right.reference(inputs).cache).any()) == (position in writers)


def test_negative_slots_write_nothing_and_their_positions_may_be_anything() -> None:
    inputs = call(torch.ones(3, 512), [3, -7, 1 << 62], [-9, -1, -2])
    assert not flat(right.reference(inputs).cache).any()


def test_nan_and_infinity_of_the_rotated_lanes() -> None:
    row = one_row(_448=float("inf"), _449=1.0, _450=float("nan"), _451=1.0, _452=3e38, _453=-3e38)
    table = torch.full((128, 64), 0.5)
    for zero_nans in (False, True):
        inputs = call(row, [0], [0], ratio=1, cos_sin=table, zero_nans=zero_nans)
        lanes = rope_of(right.reference(inputs).cache, 0)
        assert lanes[:2].tolist() == [float("inf"), float("inf")]
        assert lanes[2:4].tolist() == [0.0, 0.0] if zero_nans else bool(lanes[2:4].isnan().all())
        assert passes(inputs, right.reference(inputs))
    # 3e38 + 3e38 is beyond bfloat16, whatever the order.
    inputs = call(row, [0], [0], ratio=1, cos_sin=torch.ones(128, 64))
    assert rope_of(right.reference(inputs).cache, 0)[4:6].tolist() == [float("inf"), 0.0]
    assert passes(inputs, right.reference(inputs, torch.float64))


def test_lanes_without_rotation_are_not_turned_and_keep_negative_zero() -> None:
    row = one_row(_0=1.0)
    row[0, 1] = -0.0
    codes = records.record_views(right.reference(call(row, [3], [1])).cache).codes[0, 1]
    assert codes[:3].tolist() == [0x78, 0x80, 0]


def scalar_rope(row: np.ndarray[Any, Any], angles: np.ndarray[Any, Any]) -> list[tuple[Fraction, Fraction]]:
    """The exact rotated lanes, each with the farthest that two rounded products and a rounded sum may be off."""
    found = []
    unit = Fraction(1, 1 << 24)
    for k in range(32):
        a, b, c, s = (Fraction(float(x)) for x in (row[448 + 2 * k], row[449 + 2 * k], angles[k], angles[32 + k]))
        for one, other in ((a * c, -b * s), (b * c, a * s)):
            found.append((one + other, unit * (abs(one) + abs(other)) * (1 + unit) + unit * abs(one + other)))
    return found


@pytest.mark.parametrize("case", [case for case in SWEEP if case.values in ("randn", "outlier", "ties")][:6], ids=str)
def test_the_reference_agrees_with_exact_fractions(case: CompressedCase) -> None:
    inputs = ask.build(case)
    after = right.reference(inputs).cache
    for token, slot in enumerate(inputs.slots.tolist()):
        if slot < 0 or (int(inputs.positions[token]) + 1) % case.ratio:
            continue
        first = int(inputs.positions[token]) - int(inputs.positions[token]) % case.ratio
        exact = scalar_rope(inputs.rows[token].float().numpy(), inputs.cos_sin[first].numpy())
        for stored, (want, off) in zip(rope_of(after, slot).tolist(), exact, strict=True):
            assert abs(Fraction(stored) - want) <= off + (abs(want) + off) / 256


def test_unrotated_parts_are_those_of_the_writer_without_rotation() -> None:
    case = CompressedCase(tokens=33, ratio=1, block_size=5, slots="skipped", values="amax_edge")
    inputs = ask.build(case)
    plain = kv_record_write.Inputs(inputs.rows, inputs.slots, inputs.cache, "float8_e4m3fn")
    cache = memory.moved(plain.cache, "cpu")
    records.write(plain.k, cache, plain.slots, plain.encoding)
    want, got = records.record_views(cache), records.record_views(right.reference(inputs).cache)
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
    assert not torch.equal(got.rope, want.rope)


def test_float64_and_float32_references_both_pass_and_differ_only_in_rotated_lanes() -> None:
    inputs = ask.build(CompressedCase(tokens=33, ratio=1, seed=4))
    narrow, wide = right.reference(inputs), right.reference(inputs, torch.float64)
    assert passes(inputs, wide)
    first, second = records.record_views(narrow.cache), records.record_views(wide.cache)
    assert torch.equal(first.codes, second.codes) and torch.equal(first.scales, second.scales)


def near_a_tie() -> Inputs:
    """1 * (1 + 2^-8) - 1 * 2^-30 lies 2^-30 below the middle of two bfloat16 numbers, well within a float32 rounding."""
    table = torch.zeros(128, 64)
    table[:, 0], table[:, 32] = 1 + 2.0**-8, 2.0**-30
    return call(one_row(_448=1.0, _449=1.0), [0], [0], ratio=1, cos_sin=table)


@pytest.mark.parametrize(
    ("pattern", "right_answer"), [(0x3F80, True), (0x3F81, True), (0x3F7F, False), (0x3F82, False)]
)
def test_a_neighbour_passes_only_within_the_bound(pattern: int, right_answer: bool) -> None:
    inputs = near_a_tie()
    answer = right.reference(inputs)
    records.record_views(answer.cache).rope[0, 0, :2] = torch.tensor([pattern & 0xFF, pattern >> 8], dtype=torch.uint8)
    assert passes(inputs, answer) == right_answer


def test_a_quarter_turn_has_no_neighbour() -> None:
    inputs = call(one_row(_448=3.0), [3], [5])
    answer = right.reference(inputs)
    records.record_views(answer.cache).rope[1, 1, 0] += 1
    (failed,) = [str(check) for check in right.judge(inputs, answer, EXACTLY) if not check.passed]
    assert failed.startswith("rope[0, 0]=-3.015625, but should be -3 bit for bit: no float32 rotation")


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    st.integers(0, 10_000), st.sampled_from([1, 2, 4]), st.sampled_from(["randn", "subnormal", "wide", "huge"])
)
def test_right_answers_pass_whatever_is_fused(seed: int, ratio: int, values: str) -> None:
    inputs = ask.build(CompressedCase(seed=seed, ratio=ratio, values=values, block_size=2))  # type: ignore[arg-type]
    for way in right.HONEST:
        answer = way.answer(inputs)
        assert answer is not None and passes(inputs, answer), way.name


def test_every_law_can_be_broken() -> None:
    asked = ask.build(
        CompressedCase(
            tokens=33, padding_rows=20, slots="skipped", block_size=4, block_stride="padded", positions="edges"
        )
    )
    wrong = {
        "R1 tokens permuted": "rows-from-the-end",
        "R2 padding changed": "rows-from-the-end",
        "R3 silent tokens dropped": "skipped-into-slot-0",
        "R4 other angles changed": "turned-to-its-own-position",
        "R5 pages further apart": "unpadded-block-stride",
        "R6 written twice": "pad-byte-left",
        "R7 lanes doubled": "scales-inverted",
        "R8 groups of one": "every-token-writes",
    }
    mutants = {mutant.name: mutant.answer for mutant in right.MUTANTS}
    for law in right.LAWS:
        edited = law.edit(asked)
        answer = mutants[wrong[law.name]]
        first, second = answer(asked), answer(edited)
        assert first is not None and second is not None
        assert not torch.equal(second.cache, law.expect(first, asked, edited).cache), law.name


MALFORMED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ratio": 0}, ValueError, "ratio=0: should be 1, 2, 4 or 128"),
    ({"ratio": 3}, ValueError, "ratio=3: should be 1, 2, 4 or 128"),
    ({"rows": torch.zeros(1, 512)}, ValueError, r"rows=torch.float32\[1, 512\]: should be torch.bfloat16"),
    ({"rows": torch.zeros(1, 448, dtype=torch.bfloat16)}, ValueError, r"should be torch.bfloat16\[rows, 512\]"),
    ({"rows": torch.zeros(2, 1024, dtype=torch.bfloat16)[:, :512]}, ValueError, "should be contiguous"),
    ({"slots": torch.tensor([1, 2])}, ValueError, "2 slots for 1 rows and 1 positions"),
    ({"rows": torch.zeros(0, 512, dtype=torch.bfloat16)}, ValueError, "1 slots for 0 rows"),
    ({"positions": torch.zeros(0, dtype=torch.int64)}, ValueError, "1 slots for 1 rows and 0 positions"),
    ({"cos_sin": torch.zeros(9, 64, dtype=torch.float64)}, ValueError, r"should be torch.float32\[positions, 64\]"),
    ({"cos_sin": torch.zeros(9, 32)}, ValueError, r"should be torch.float32\[positions, 64\]"),
    ({"cos_sin": torch.zeros(2, 64)}, IndexError, "position 2: should be 0 to 1"),
    ({"cache": torch.zeros(3, 4, 528, dtype=torch.uint8)}, ValueError, r"should be torch.uint8\[blocks, block_size, 584\]"),
    ({"slots": torch.tensor([12])}, IndexError, "slot 12 lies beyond the cache's 12 records"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), MALFORMED, ids=[message for _, _, message in MALFORMED])
def test_malformed_calls_are_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        right.reference(dataclasses.replace(call(one_row(), [3], [5]), **changes))


def test_a_slot_written_twice_is_refused_only_where_both_tokens_write() -> None:
    with pytest.raises(ValueError, match="slot 5 is written twice"):
        right.reference(call(torch.zeros(2, 512), [3, 5], [5, 5]))
    right.reference(call(torch.zeros(2, 512), [3, 4], [5, 5]))


def test_as_many_tokens_write_as_the_case_says() -> None:
    for case in SWEEP:
        writers = right.call(ask.build(case)).taken()
        if case.positions == "between" or case.slots == "all_skipped":
            assert writers.numel() == 0
        elif case.positions == "closing" and case.slots in ("dense", "scattered"):
            assert writers.numel() == case.tokens
    table = ask.build(CompressedCase(ratio=128, positions="last", tokens=1)).cos_sin
    assert table.shape[0] % 128 == 0
    assert float((table[:, :32].double().square() + table[:, 32:].double().square() - 1).abs().max()) < 2.0**-22


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path)
    first, *reasons = VLLM.unsupported(CompressedCase(ratio=4), "interpreter")
    assert "is not a vLLM tree" in first and [text.split(":")[0] for text in reasons] == ["ratio=4"]
    _, *reasons = VLLM_V4.unsupported(CompressedCase(ratio=2, values="wide"), "interpreter")
    assert [text.split(":")[0] for text in reasons] == ["ratio=2", "values=wide"]


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_V4], ids=lambda impl: impl.name)
def test_vllm_writes_the_right_bytes(impl: Impl, verdict: Callable[..., tuple[str, list[str]]]) -> None:
    answered = [case for case in SWEEP[::3] if not impl.unsupported(case, "interpreter")]
    assert len(answered) > 4
    for case in answered:
        assert verdict(case, impl) == ("pass", []), case.id


@pytest.mark.vllm
def test_vllm_of_v41_refuses_other_ratios_and_accepts_slots_that_are_written_twice() -> None:
    for ratio in (0, 3, 4):
        with pytest.raises(AssertionError):
            VLLM.run(call(one_row(), [3], [5], ratio=ratio))
    outputs = VLLM.run(call(torch.ones(2, 512), [3, 5], [5, 5]))
    assert rope_of(outputs.cache, 5).abs().eq(1).all()
