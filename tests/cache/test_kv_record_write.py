"""Are writers of packed key-value records judged rightly: every right one passes, and every wrong one is seen?"""

import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from cases import memory
from cases.cache import kv_record_write as ask
from cases.cache.kv_record_write import Inputs, Outputs, WriteCase
from cases.covering import sweep_cases
from cases.precision import Precision
from impl.cache import vllm_modules
from impl.cache.kv_record_write import IMPLS
from impl.implementation import Impl
from impl.sources import settings
from oracle.cache import kv_record_write as right
from oracle.cache import records
from reports.laws import break_of

SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, WriteCase)]
OURS, VLLM, VLLM_V4, _ = IMPLS


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


def call(row: torch.Tensor, slot: int, block_size: int, blocks: int, encoding: str = "float8_e4m3fn") -> Inputs:
    """One row into a cache of zeros whose pages are as close as they may be."""
    stride = ask.block_stride_bytes(block_size, "page")
    cache = memory.guarded((blocks, block_size, 584), torch.uint8, gaps=(stride - 584 * block_size, 0), fill=0)
    return Inputs(row[None].to(torch.bfloat16), torch.tensor([slot]), cache, encoding)  # type: ignore[arg-type]


def flat(cache: torch.Tensor) -> torch.Tensor:
    """The bytes of a cache and its padding from its first byte on."""
    return memory.storage_bytes(cache)[int(cache.storage_offset()) :]


def scalar_record(row: list[float], encoding: str) -> tuple[list[int], list[int]]:
    """Codes and scale bytes of one row by exact fractions, looking at every code of every scale."""
    bias, limit = (7, 448) if encoding == "float8_e4m3fn" else (8, 224)
    top = 0x7E
    numbers = [
        (Fraction(code & 7, 8) + (1 if code >> 3 else 0)) * Fraction(2) ** (max(code >> 3, 1) - bias)
        for code in range(top + 1)
    ]
    codes, scales = [], []
    for group in range(7):
        lanes = row[64 * group : 64 * group + 64]
        amax = max(max(map(abs, lanes)), struct.unpack("<f", struct.pack("<f", 1e-4))[0])
        exponent = next(e for e in range(-40, 130) if Fraction(amax) <= limit * Fraction(2) ** e)
        scales.append(exponent + 127)
        for lane in lanes:
            exact = abs(Fraction(lane)) / Fraction(2) ** exponent
            code = min(range(top + 1), key=lambda c, exact=exact: (abs(numbers[c] - exact), c % 2))  # type: ignore[misc]
            negative = struct.pack(">f", lane)[0] >> 7
            codes.append(code | 0x80 if negative and (code or encoding == "float8_e4m3fn") else code)
    return codes, [*scales, 0]


def test_slot_5_of_pages_of_4_is_written_at_its_known_bytes() -> None:
    row = torch.zeros(512)
    row[0], row[447], row[448], row[511] = 448.0, -1.0, 1.0, -2.0
    inputs = call(row, slot=5, block_size=4, blocks=2)
    written = flat(right.reference(inputs).cache)
    page = 2880
    assert written[page + 576].item() == 0x7E
    # The last group's largest number is 1 = 256 * 2^-8, a scale byte of 119.
    assert written[page + 576 + 447].item() == 0xF8
    assert written[page + 1024 : page + 1026].tolist() == [0x80, 0x3F]
    assert written[page + 1150 : page + 1152].tolist() == [0x00, 0xC0]
    assert written[page + 2304 + 8 : page + 2304 + 16].tolist() == [127, 105, 105, 105, 105, 105, 119, 0]
    written[page + 576 : page + 1152] = 0
    written[page + 2312 : page + 2320] = 0
    assert not written.any()


def test_zero_groups_take_the_floor_scale() -> None:
    for encoding, byte in (("float8_e4m3fn", 105), ("float8_e4m3fnuz", 106)):
        written = flat(right.reference(call(torch.zeros(512), 0, 1, 1, encoding)).cache)
        assert written[576:584].tolist() == [byte] * 7 + [0]
        assert not written[:576].any()


def test_the_limit_itself_fits_and_its_neighbour_does_not() -> None:
    for encoding, limit in (("float8_e4m3fn", 448.0), ("float8_e4m3fnuz", 224.0)):
        for value, byte in ((limit, 127), (limit * (1 - 2**-8), 127), (limit * (1 + 2**-7), 128), (limit * 2, 128)):
            row = torch.zeros(512)
            row[70] = value
            assert flat(right.reference(call(row, 0, 1, 1, encoding)).cache)[577].item() == byte


@pytest.mark.parametrize("case", [case for case in SWEEP if 0 < case.tokens <= 7][:6], ids=str)
def test_the_reference_agrees_with_exact_fractions(case: WriteCase) -> None:
    inputs = ask.build(case)
    after = right.reference(inputs).cache
    untouched = torch.ones(after.shape[:2], dtype=torch.bool)
    size, stride = case.block_size, after.stride(0)
    written = flat(after)
    for row, slot in list(zip(inputs.k, inputs.slots.tolist(), strict=False))[:2]:
        if slot < 0:
            continue
        codes, scales = scalar_record(row.tolist(), case.encoding)
        page, place = slot // size * stride, slot % size
        assert written[page + 576 * place : page + 576 * place + 448].tolist() == codes
        assert written[page + 576 * size + 8 * place : page + 576 * size + 8 * place + 8].tolist() == scales
        rope = written[page + 576 * place + 448 : page + 576 * place + 576].view(torch.int16)
        assert torch.equal(rope, row[448:].view(torch.int16))
    for slot in inputs.slots.tolist():
        if slot >= 0:
            untouched[slot // size, slot % size] = False
    for block, place in untouched.nonzero().tolist()[:20]:
        at = block * stride + 576 * place
        assert torch.equal(written[at : at + 576], flat(inputs.cache)[at : at + 576])


def test_every_law_can_be_broken() -> None:
    inputs = ask.build(WriteCase(tokens=7, slots="skipped", block_size=4, block_stride="padded"))
    wrong = {
        # A writer whose answer depends on what the law says does not matter.
        "W1 tokens permuted": "rows-from-the-end",
        "W2 padding rows changed": "rows-from-the-end",
        "W3 skipped rows dropped": "negative-slots-wrap",
        "W4 pages further apart": "unpadded-block-stride",
        "W5 written twice": "pad-byte-left",
        "W6 lanes doubled": "fnuz-limit-240",
        "W7 already quantised": "exponent-floored",
    }
    mutants = {mutant.name: mutant for mutant in right.MUTANTS}
    for law in right.LAWS:
        asked = inputs
        if law.name.startswith("W6"):
            asked = ask.build(WriteCase(tokens=7, encoding="float8_e4m3fnuz", values="amax_edge"))
            asked.k[:, :448] = asked.k[:, :448].clamp(-1e20, 1e20)
        first = mutants[wrong[law.name]].answer(asked)
        assert first is not None
        broken = break_of(law, asked, first, right.reference, right.judge, Precision())
        assert broken is not None and not all(check.passed for check in broken), law.name


def test_a_failure_names_the_byte() -> None:
    inputs = call(torch.ones(512), slot=1, block_size=2, blocks=1)
    outputs = right.reference(inputs)
    flat(outputs.cache)[2 * 576 + 8 + 7] = 9
    failed = [str(check) for check in right.judge(inputs, outputs, Precision()) if not check.passed]
    assert len(failed) == 1
    assert failed[0].startswith("scales[0, 1, 7]=9 (0x09), but should be 0 (0x00): the scale is the smallest")
    assert not passes(inputs, Outputs(outputs.cache[:, :1]))


def test_slots_are_unique_and_in_the_cache() -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        written = inputs.slots[inputs.slots >= 0]
        assert written.unique().numel() == written.numel()
        assert inputs.slots.numel() == case.tokens and inputs.k.shape[0] == case.tokens + case.padding_rows
        assert written.numel() == 0 or int(written.max()) < inputs.cache.shape[0] * inputs.cache.shape[1]


def test_our_writer_reaches_a_page_beyond_two_gibibytes() -> None:
    # A block stride of 2^30 bytes; the memory is never touched but where the record lies.
    storage = torch.empty(3 * 2**30 + 1152, dtype=torch.uint8)
    cache = storage.as_strided((4, 1, 584), (2**30, 584, 1))
    row = torch.arange(512).to(torch.bfloat16)[None]
    OURS.run(Inputs(row, torch.tensor([3]), cache, "float8_e4m3fn"))
    assert torch.equal(records.dequantise(cache, torch.tensor([3]), "float8_e4m3fn")[0, 448:], row[0, 448:].float())


def test_a_writer_that_takes_a_negative_slot_for_an_address_is_seen() -> None:
    pristine = ask.build(WriteCase(slots="negative", block_size=4))
    used = memory.on_device(pristine, "cpu")
    slot = next(slot for slot in used.slots.tolist() if slot < 0)
    at = int(used.cache.storage_offset()) + 576 * slot
    memory.storage_bytes(used.cache)[at : at + 8] = 0
    assert "outside its elements" in memory.trespasses(pristine, used, ask.WRITABLE)[0]


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path)
    (reason,) = VLLM.unsupported(WriteCase(), "interpreter")
    assert "is not a vLLM tree" in reason
    reasons = VLLM_V4.unsupported(WriteCase(encoding="float8_e4m3fnuz", k_layout="strided"), "cuda")
    assert [text.split(":")[0] for text in reasons[1:]] == ["encoding=float8_e4m3fnuz"]
    assert VLLM_V4.unsupported(WriteCase(encoding="float8_e4m3fnuz"), "hip") == reasons[:1]


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_V4], ids=lambda impl: impl.name)
def test_vllm_writes_the_right_bytes_unless_a_slot_is_below_minus_one(
    impl: Impl, verdict: Callable[..., tuple[str, list[str]]]
) -> None:
    assert vllm_modules.missing(vllm_modules.V41, vllm_modules.WRITE) == []
    # Negative slots and a strided k are defects of theirs, and failures of the sweep.
    kind = [case for case in SWEEP[::3] if case.slots != "negative" and case.k_layout != "strided"]
    asked = [case for case in kind if not impl.unsupported(case, "interpreter")]
    assert len(asked) > 5
    for case in asked:
        assert verdict(case, impl) == ("pass", []), case.id
