"""Are gathers of packed key-value records judged rightly: every right one passes, and every wrong one is seen?"""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cases import memory
from cases.cache import kv_gather_dequant as ask
from cases.cache.kv_gather_dequant import GatherCase, Inputs, Outputs
from cases.covering import sweep_cases
from cases.precision import Precision
from impl.cache.kv_gather_dequant import IMPLS
from impl.implementation import Impl
from impl.sources import settings
from oracle.cache import kv_gather_dequant as right
from oracle.cache import records

SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, GatherCase)]
OURS, VLLM, VLLM_V4, _ = IMPLS


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


def two_pages() -> Inputs:
    """Requests of 3 and 5 tokens in pages of 4; record r holds r + 1 in every NoPE lane and -r in the others."""
    cache = torch.zeros(4, 4, 584, dtype=torch.uint8)
    rows = torch.empty(16, 512, dtype=torch.bfloat16)
    rows[:, :448] = torch.arange(1, 17)[:, None].to(torch.bfloat16)
    rows[:, 448:] = -torch.arange(16)[:, None].to(torch.bfloat16)
    records.write(rows, cache, torch.arange(16), "float8_e4m3fn")
    return Inputs(
        out=torch.full((2, 7, 512), 99.0, dtype=torch.bfloat16),
        cache=cache,
        seq_lens=torch.tensor([3, 5], dtype=torch.int32),
        gather_lens=torch.tensor([2, 3], dtype=torch.int32),
        table=torch.tensor([[2, -1], [3, 1]], dtype=torch.int32),
        offset=1,
        encoding="float8_e4m3fn",
        max_gather_len=None,
    )


def test_hand_worked_rows() -> None:
    out = right.reference(two_pages()).out
    # Request 0: positions 1, 2 of block 2 are records 9, 10. Request 1: positions 2, 3 of block 3 and 0 of block 1.
    assert out[0, :, 0].tolist() == [99, 10, 11, 99, 99, 99, 99]
    assert out[0, :, 511].tolist() == [99, -9, -10, 99, 99, 99, 99]
    assert out[1, :, 447].tolist() == [99, 15, 16, 5, 99, 99, 99]
    assert out[1, :, 448].tolist() == [99, -14, -15, -4, 99, 99, 99]


def scalar_gather(inputs: Inputs) -> list[list[list[int]]]:
    """bfloat16 bit patterns of all rows by byte arithmetic, NaN as 0x7FC0."""
    data = memory.storage_bytes(inputs.cache).numpy().tobytes()
    base, stride, size = int(inputs.cache.storage_offset()), inputs.cache.stride(0), inputs.cache.shape[1]
    bias = 7 if inputs.encoding == "float8_e4m3fn" else 8
    rows = [[row.view(torch.int16).tolist() for row in request] for request in inputs.out]
    for request in range(len(rows)):
        length = int(inputs.seq_lens[request])
        count = length if inputs.gather_lens is None else int(inputs.gather_lens[request])
        for i in range(count):
            position = length - count + i
            page = base + int(inputs.table[request, position // size]) * stride
            record, scales = page + 576 * (position % size), page + 576 * size + 8 * (position % size)
            row = []
            for lane in range(448):
                code, scale = data[record + lane], data[scales + lane // 64]
                exponent, fraction = code >> 3 & 15, code & 7
                value = (fraction / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias + scale - 127)
                pattern = struct.unpack("<i", struct.pack("<f", -value if code & 0x80 else value))[0] >> 16
                not_a_number = code == 0x80 if bias == 8 else code & 0x7F == 0x7F
                row.append(0x7FC0 if not_a_number else pattern)
            row += struct.unpack("<64h", data[record + 448 : record + 576])
            rows[request][inputs.offset + i] = row
    return rows


@pytest.mark.parametrize("case", [case for case in SWEEP if case.length <= 7][:12], ids=str)
def test_the_reference_agrees_with_byte_arithmetic(case: GatherCase) -> None:
    inputs = ask.build(case)
    out = right.reference(inputs).out
    want = torch.tensor(scalar_gather(inputs), dtype=torch.int16).reshape(out.shape)
    assert torch.equal(out.contiguous().view(torch.int16), want)


def test_every_law_can_be_broken() -> None:
    inputs = ask.build(
        GatherCase(requests=3, length=65, block_size=4, block_stride="padded", hint="small", table="narrowed")
    )
    everything = ask.build(GatherCase(requests=3, length=65, block_size=4, gather="all", lengths="full"))
    mutants = {mutant.name: mutant for mutant in right.MUTANTS}
    wrong = {
        "G1 pages permuted": "unpadded-block-stride",
        "G2 batch reversed": "table-pitch-is-its-width",
        "G3 pages further apart": "unpadded-block-stride",
        "G4 lengths named": "last-token-lost",
        "G5 another hint": "hint-is-a-limit",
        "G6 table tails changed": "other-block-size",
        "G7 pad bytes changed": "rope-scaled-by-pad-byte",
    }
    for law in right.LAWS:
        asked = everything if law.name.startswith("G4") else inputs
        edited = law.edit(asked)
        first = mutants[wrong[law.name]].answer(asked)
        assert edited is not None and first is not None, law.name
        assert not passes(edited, law.expect(first, asked, edited)), law.name


def test_a_failure_names_the_lane() -> None:
    inputs = two_pages()
    outputs = right.reference(inputs)
    outputs.out[1, 3, 5] = 6
    failed = [str(check) for check in right.judge(inputs, outputs, Precision()) if not check.passed]
    assert len(failed) == 1 and failed[0].startswith("codes[1, 3, 5]=6, but should be 5: a code times a power of two")
    outputs = right.reference(inputs)
    outputs.out[0, 0, 500] = 0
    failed = [str(check) for check in right.judge(inputs, outputs, Precision()) if not check.passed]
    assert len(failed) == 1 and failed[0].startswith("other rows[0, 0, 500]=0, but should be 99")
    assert not passes(inputs, Outputs(outputs.out[:1]))


def test_nan_codes_stay_nan_and_copied_nan_keep_their_bits() -> None:
    inputs = two_pages()
    views = records.record_views(inputs.cache)
    views.codes[2, 1, 7] = 0xFF
    views.rope[2, 1, 0:2] = torch.tensor([0x12, 0x7F], dtype=torch.uint8)
    views.rope[2, 1, 1] = 0xFF
    out = right.reference(inputs).out
    assert out[0, 1, 7].isnan()
    assert out[0, 1, 448].view(torch.int16).item() == 0xFF12 - 65536
    other = out.clone()
    other[0, 1, 448] = float("nan")
    assert not passes(inputs, Outputs(other))


def test_what_is_gathered_is_there_and_has_room() -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        gathers = inputs.seq_lens if inputs.gather_lens is None else inputs.gather_lens
        assert bool((gathers <= inputs.seq_lens).all())
        assert case.requests == 0 or int(gathers.max()) + case.offset <= inputs.out.shape[1]
        assert case.table != "narrowed" or inputs.table.stride(0) > inputs.table.shape[1]


def test_our_gather_reaches_a_page_beyond_two_gibibytes() -> None:
    # A block stride of 2^30 bytes; the memory is never touched but where the record lies.
    storage = torch.empty(3 * 2**30 + 1152, dtype=torch.uint8)
    cache = storage.as_strided((4, 1, 584), (2**30, 584, 1))
    row = torch.arange(512).to(torch.bfloat16)[None]
    records.write(row, cache, torch.tensor([3]), "float8_e4m3fn")
    one = torch.ones(1, dtype=torch.int32)
    out = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    OURS.run(Inputs(out, cache, one, None, 3 * one[None], 0, "float8_e4m3fn", None))
    assert torch.equal(out[0, 0, 448:], row[0, 448:])


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path)
    (reason,) = VLLM.unsupported(GatherCase(), "interpreter")
    assert "is not a vLLM tree" in reason
    reasons = VLLM_V4.unsupported(GatherCase(encoding="float8_e4m3fnuz", table="narrowed"), "cuda")
    assert [text.split(":")[0] for text in reasons[1:]] == ["encoding=float8_e4m3fnuz"]


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_V4], ids=lambda impl: impl.name)
def test_vllm_gathers_the_right_rows(impl: Impl, verdict: Callable[..., tuple[str, list[str]]]) -> None:
    # A narrowed table is a defect of theirs, and a failure of the sweep.
    asked = [case for case in SWEEP[::6] if case.table != "narrowed" and not impl.unsupported(case, "interpreter")]
    assert len(asked) > 3
    for case in asked:
        assert verdict(case, impl) == ("pass", []), case.id
