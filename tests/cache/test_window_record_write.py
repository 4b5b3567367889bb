"""Are writers of the sliding window's records judged rightly: every right one passes, and every wrong one is seen?"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from cases import memory
from cases.cache import kv_record_write
from cases.cache import window_record_write as ask
from cases.cache.window_record_write import Inputs, Outputs, WindowCase
from cases.covering import sweep_cases
from cases.precision import Precision
from impl.cache.window_record_write import IMPLS
from impl.sources import settings
from oracle.cache import kv_record_write as plain_writer
from oracle.cache import records
from oracle.cache import window_record_write as right

EXACTLY = Precision(probability="exact", flushes=False)
_, VLLM_XPU, VLLM_HIP, _ = IMPLS


SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, WindowCase)]


def passes(inputs: Inputs, outputs: Outputs | None) -> bool:
    assert outputs is not None
    return all(check.passed for check in right.judge(inputs, outputs, EXACTLY))


def call(rows: torch.Tensor, positions: list[int], slots: list[int], encoding: str = "float8_e4m3fn") -> Inputs:
    """A call with pages of 4 in a cache of zeros, by a table of quarter turns: row p turns by p quarters."""
    quarters = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    table = quarters.repeat(4, 1)[:, :, None].expand(-1, -1, 32).flatten(1).contiguous()
    cache = memory.guarded((3, 4, 584), torch.uint8, gaps=(2880 - 4 * 584, 0), fill=0)
    return Inputs(
        rows.to(torch.bfloat16),
        torch.tensor(positions),
        table,
        torch.tensor(slots),
        cache,
        encoding,  # type: ignore[arg-type]
    )


def rope_of(cache: torch.Tensor, slot: int) -> torch.Tensor:
    return records.dequantise(cache, torch.tensor([slot]), "float8_e4m3fn")[0, 448:]


def test_each_token_is_turned_to_its_own_position() -> None:
    row = torch.zeros(4, 512)
    row[:, 448], row[:, 449] = 3.0, 2.0
    cache = right.reference(call(row, [0, 1, 2, 15], [0, 5, 11, 2])).cache
    assert rope_of(cache, 0)[:3].tolist() == [3.0, 2.0, 0.0]
    assert rope_of(cache, 5)[:3].tolist() == [-2.0, 3.0, 0.0]
    assert rope_of(cache, 11)[:3].tolist() == [-3.0, -2.0, 0.0]
    assert rope_of(cache, 2)[:3].tolist() == [2.0, -3.0, 0.0]


def test_slot_5_of_pages_of_4_is_written_at_its_known_bytes_in_both_encodings() -> None:
    row = torch.zeros(1, 512)
    row[0, 0], row[0, 64], row[0, 65], row[0, 511] = 224.0, 448.0, -0.0, -2.0
    for encoding, codes, scales in (
        ("float8_e4m3fn", [0x7E, 0x7E, 0x80], [126, 127]),
        ("float8_e4m3fnuz", [0x7E, 0x7E, 0x00], [127, 128]),
    ):
        written = memory.storage_bytes(cache := right.reference(call(row, [4], [5], encoding)).cache)
        page = int(cache.storage_offset()) + 2880
        assert written[page + 576 + torch.tensor([0, 64, 65])].tolist() == codes
        assert written[page + 2304 + 8 : page + 2304 + 10].tolist() == scales
        assert written[page + 2304 + 15].item() == 0
        assert written[page + 1150 : page + 1152].tolist() == [0x00, 0xC0]


def test_negative_slots_and_padding_rows_leave_no_trace() -> None:
    inputs = call(torch.full((5, 512), 7.0), [99, -4, 1 << 40, 2, 3], [-1, -2, -64])
    assert not right.reference(inputs).cache.any()
    assert passes(inputs, Outputs(inputs.cache))


@pytest.mark.parametrize("case", [case for case in SWEEP if case.tokens][::3], ids=str)
def test_a_rotation_lane_by_lane_and_the_plain_writer_give_the_same_record(case: WindowCase) -> None:
    inputs = ask.build(case)
    rows = inputs.rows[: case.tokens].clone()
    for token, slot in enumerate(inputs.slots.tolist()):
        if slot < 0:
            continue
        angles = inputs.cos_sin[int(inputs.positions[token])]
        for k in range(32):
            a, b = (inputs.rows[token, 448 + 2 * k + lane].float() for lane in (0, 1))
            rows[token, 448 + 2 * k] = a * angles[k] - b * angles[32 + k]
            rows[token, 449 + 2 * k] = b * angles[k] + a * angles[32 + k]
    plain = kv_record_write.Inputs(rows, inputs.slots, inputs.cache, case.encoding)
    assert passes(inputs, Outputs(plain_writer.reference(plain).cache))


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    st.integers(0, 10_000),
    st.sampled_from(["float8_e4m3fn", "float8_e4m3fnuz"]),
    st.sampled_from(["randn", "wide", "subnormal"]),
)
def test_right_answers_pass_whatever_is_fused_and_a_step_away_is_wrong(seed: int, encoding: str, values: str) -> None:
    inputs = ask.build(WindowCase(seed=seed, encoding=encoding, values=values, block_size=2))  # type: ignore[arg-type]
    for way in right.HONEST:
        assert passes(inputs, way.answer(inputs)), way.name
    answer = right.reference(inputs)
    slot = int(inputs.slots[0])
    lane = records.record_views(answer.cache).rope[slot // 2, slot % 2]
    # The second lowest bit is two steps of bfloat16: too far unless a pair cancels, or is no number.
    patterns = lane.clone().view(torch.int16)
    plain = patterns.view(torch.bfloat16).float().abs().nan_to_num(0.0, posinf=0.0) > 1e-3
    lane.copy_(torch.where(plain, patterns ^ 2, patterns).view(torch.uint8))
    assert not bool(plain.any()) or not passes(inputs, answer)


MALFORMED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rows": torch.zeros(2, 512)}, ValueError, r"rows=torch.float32\[2, 512\]: should be torch.bfloat16"),
    ({"rows": torch.zeros(2, 1024, dtype=torch.bfloat16)[:, :512]}, ValueError, "should be contiguous"),
    ({"slots": torch.tensor([1, 2, 3])}, ValueError, "3 slots for 2 rows and 2 positions"),
    ({"slots": torch.tensor([3, 3])}, ValueError, "slot 3 is written twice"),
    ({"slots": torch.tensor([3, 12])}, IndexError, "slot 12 lies beyond the cache's 12 records"),
    ({"positions": torch.tensor([0, 16])}, IndexError, "position 16: should be 0 to 15"),
    ({"positions": torch.tensor([0, -1])}, IndexError, "position -1: should be 0 to 15"),
    ({"cos_sin": torch.zeros(9, 128)}, ValueError, r"should be torch.float32\[positions, 64\]"),
    ({"cache": torch.zeros(3, 4, 576, dtype=torch.uint8)}, ValueError, r"should be torch.uint8\[blocks, block_size, 584\]"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), MALFORMED, ids=[message for _, _, message in MALFORMED])
def test_malformed_calls_are_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        right.reference(dataclasses.replace(call(torch.zeros(2, 512), [3, 4], [5, 6]), **changes))


def test_angles_that_nobody_needs_are_nan() -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        unused = torch.ones(inputs.positions.numel(), dtype=torch.bool)
        unused[: case.tokens] = inputs.slots < 0
        angles = inputs.cos_sin[inputs.positions]
        assert bool(angles[unused].isnan().all()) and not angles[~unused].isnan().any()


def test_the_compiled_operator_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path)
    (reason,) = VLLM_XPU.unsupported(WindowCase(), "interpreter")
    assert "is not a vLLM tree" in reason
    (tmp_path / "vllm" / "triton_utils").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    first, second = VLLM_HIP.unsupported(WindowCase(), "interpreter")
    assert "holds no compiled extension" in first and second == "the operator is compiled for a device"
    (tmp_path / "vllm" / "_C.abi3.so").touch()
    assert VLLM_HIP.unsupported(WindowCase(), "cuda") == []
    reasons = VLLM_HIP.unsupported(WindowCase(encoding="float8_e4m3fnuz", block_stride="odd"), "cuda")
    assert [text.split(":")[0] for text in reasons] == ["encoding=float8_e4m3fnuz", "block_stride=odd"]


@pytest.mark.vllm
def test_vllm_writes_the_right_bytes_unless_a_slot_is_below_minus_one(
    verdict: Callable[..., tuple[str, list[str]]],
) -> None:
    answered = [case for case in SWEEP[::3] if not VLLM_XPU.unsupported(case, "interpreter")]
    assert len({case.slots for case in answered}) > 2
    for case in answered:
        # Its writer skips -1 alone.
        assert (verdict(case, VLLM_XPU) == ("pass", [])) == (case.slots != "negative"), case.id
