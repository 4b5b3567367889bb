"""Does every byte of a packed record lie where the format says, and stand for the number that it should?"""

import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from oracle.cache import records
from oracle.formats.numbers import Encoding

ENCODINGS: tuple[Encoding, ...] = ("float8_e4m3fn", "float8_e4m3fnuz")


def empty_cache(blocks: int, block_size: int, extra: int = 0, lead: int = memory.GUARD_BYTES) -> torch.Tensor:
    """A cache of 0xA5 bytes whose pages lie `extra` bytes further apart than they need to."""
    stride = records.page_bytes(block_size) + extra
    gap = stride - block_size * records.RECORD_BYTES
    return memory.guarded((blocks, block_size, 584), torch.uint8, gaps=(gap, 0), fill=0xA5, lead=lead)


def page(cache: torch.Tensor, block: int) -> torch.Tensor:
    """The flat bytes of one page, its padding included."""
    return cache.as_strided((cache.stride(0),), (1,), cache.storage_offset() + block * cache.stride(0))


def scalar_row(data: bytes, block_size: int, place: int, encoding: Encoding) -> list[float]:
    """One record as numbers, with byte arithmetic on a page."""
    row = []
    bias = 7 if encoding == "float8_e4m3fn" else 8
    for lane in range(448):
        code = data[576 * place + lane]
        scale = data[576 * block_size + 8 * place + lane // 64]
        exponent, fraction = (code >> 3) & 15, code & 7
        number = Fraction(fraction, 8) + (1 if exponent else 0)
        number *= Fraction(2) ** (max(exponent, 1) - bias + scale - 127)
        row.append(float(-number if code & 0x80 else number))
    for lane in range(64):
        low, high = data[576 * place + 448 + 2 * lane : 576 * place + 450 + 2 * lane]
        row.append(struct.unpack("<f", bytes([0, 0, low, high]))[0])
    return row


@pytest.mark.parametrize(
    ("block_size", "size"),
    [(1, 1152), (2, 1728), (4, 2880), (16, 9792), (32, 19008), (64, 37440), (128, 74880), (256, 149760)],
)
def test_page_sizes_are_the_known_ones(block_size: int, size: int) -> None:
    assert records.page_bytes(block_size) == size


def test_slot_5_of_pages_of_4_lies_at_its_known_bytes() -> None:
    cache = empty_cache(2, 4, extra=576)
    stride = cache.stride(0)
    views = records.record_views(cache)
    base = cache.storage_offset() + stride
    assert views.codes[1, 1].storage_offset() == base + 576
    assert views.rope[1, 1].storage_offset() == base + 1024
    assert views.scales[1, 1].storage_offset() == base + 2304 + 8
    assert [part.shape[2] for part in views] == [448, 128, 8]


@pytest.mark.parametrize(("encoding", "byte"), [("float8_e4m3fn", 105), ("float8_e4m3fnuz", 106)], ids=["ocp", "fnuz"])
def test_a_row_of_zeros_becomes_the_floor_scale_and_zero_codes(encoding: Encoding, byte: int) -> None:
    cache = empty_cache(1, 2)
    records.write(torch.zeros(1, 512, dtype=torch.bfloat16), cache, torch.tensor([1]), encoding)
    flat = page(cache, 0)
    assert flat[576 : 2 * 576].eq(0).all()
    assert flat[2 * 576 + 8 : 2 * 576 + 16].tolist() == [byte] * 7 + [0]
    untouched = torch.cat((flat[:576], flat[1152 : 1152 + 8], flat[1152 + 16 :]))
    assert untouched.eq(0xA5).all()


@pytest.mark.parametrize(
    ("amax", "encoding", "scale", "code"),
    [
        (448.0, "float8_e4m3fn", 127, 0x7E), (450.0, "float8_e4m3fn", 128, 0x76), (446.0, "float8_e4m3fn", 127, 0x7E),
        (224.0, "float8_e4m3fnuz", 127, 0x7E), (225.0, "float8_e4m3fnuz", 128, 0x76), (1.0, "float8_e4m3fn", 119, 0x78),
        (240.0, "float8_e4m3fnuz", 128, 0x77), (-1.0, "float8_e4m3fn", 119, 0xF8),
        (3.3895313892515355e38, "float8_e4m3fn", 247, 0x78), (3.3895313892515355e38, "float8_e4m3fnuz", 248, 0x78),
    ],
)  # fmt: skip
def test_a_lone_lane_is_written_as_worked_out_by_hand(amax: float, encoding: Encoding, scale: int, code: int) -> None:
    row = torch.zeros(1, 512, dtype=torch.bfloat16)
    row[0, 130] = amax
    cache = empty_cache(1, 1)
    records.write(row, cache, torch.tensor([0]), encoding)
    flat = page(cache, 0)
    assert flat[130].item() == code
    assert flat[576 + 2].item() == scale


def test_negative_zero_has_a_code_in_ocp_only_and_rope_lanes_keep_their_bits() -> None:
    row = torch.full((1, 512), -0.0, dtype=torch.bfloat16)
    row[0, 448:] = torch.arange(-32, 32).to(torch.int16).view(torch.bfloat16)
    for encoding, code in (("float8_e4m3fn", 0x80), ("float8_e4m3fnuz", 0x00)):
        cache = empty_cache(1, 1)
        records.write(row, cache, torch.tensor([0]), encoding)
        assert page(cache, 0)[:448].eq(code).all()
        assert page(cache, 0)[448:576].tolist() == list(struct.pack("<64h", *range(-32, 32)))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("block_size", "extra", "lead"), [(1, 0, 256), (4, 576, 256), (5, 2, 256), (4, 1, 257), (2, 4, 258)]
)
def test_every_record_decodes_as_byte_arithmetic_says(
    encoding: Encoding, block_size: int, extra: int, lead: int
) -> None:
    cache = empty_cache(3, block_size, extra, lead)
    generator = torch.Generator().manual_seed(block_size + extra)
    for block in range(3):
        flat = page(cache, block)
        flat[: 584 * block_size] = torch.randint(0, 256, (584 * block_size,), generator=generator, dtype=torch.uint8)
        codes = records.record_views(cache).codes[block]
        codes[(codes & 0x7F) == 0x7F] = 0x11
        codes[codes == 0x80] = 0x91
        scales = records.record_views(cache).scales[block]
        scales[:] = scales % 240
    slots = torch.tensor([3 * block_size - 1, 0, block_size, 0])
    got = records.dequantise(cache, slots, encoding, torch.float64)
    for row, slot in zip(got, slots.tolist(), strict=True):
        data = bytes(page(cache, slot // block_size).tolist())
        want = torch.tensor(scalar_row(data, block_size, slot % block_size, encoding), dtype=torch.float64)
        assert torch.equal(row.nan_to_num(1.5), want.nan_to_num(1.5))
    single = records.dequantise(cache, slots.int(), encoding)
    assert torch.equal(single.double().nan_to_num(), got.nan_to_num())


def test_nan_codes_stay_nan_and_scale_255_is_infinity() -> None:
    cache = empty_cache(1, 2)
    views = records.record_views(cache)
    views.codes[:] = 0x38
    views.rope[:] = 0
    views.scales[:] = 127
    views.codes[0, 0, :3] = torch.tensor([0x7F, 0x80, 0xFF], dtype=torch.uint8)
    views.scales[0, 1, 3] = 255
    views.scales[:, :, 7] = 255
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        ocp = records.dequantise(cache, torch.tensor([0, 1]), "float8_e4m3fn", dtype)
        fnuz = records.dequantise(cache, torch.tensor([0]), "float8_e4m3fnuz", dtype)
        assert ocp[0, :3].isnan().tolist() == [True, False, True] and ocp[0, 1] == 0
        assert fnuz[0, 1].isnan() and fnuz[0, [0, 2]].tolist() == [240.0, -240.0]
        assert ocp[1, 192:256].isinf().all() and ocp[1, :192].eq(1).all() and ocp[1, 256:448].eq(1).all()
        assert ocp[:, 448:].eq(0).all()


def test_a_slot_beyond_two_gibibytes_is_found() -> None:
    # A block stride of 2^30 bytes: the fourth block starts at 3 * 2^30, past every 32-bit offset.
    storage = torch.empty(3 * 2**30 + 1152, dtype=torch.uint8)
    cache = storage.as_strided((4, 1, 584), (2**30, 584, 1))
    row = torch.arange(512).to(torch.bfloat16)[None]
    records.write(row, cache, torch.tensor([3]), "float8_e4m3fn")
    assert storage[3 * 2**30 + 448 : 3 * 2**30 + 576].view(torch.bfloat16).tolist() == row[0, 448:].tolist()
    assert records.dequantise(cache, torch.tensor([3]), "float8_e4m3fn")[0, 448:].tolist() == row[0, 448:].tolist()


def test_chunks_do_not_change_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = empty_cache(4, 4)
    rows = (torch.arange(16 * 512).reshape(16, 512) % 251 - 125).to(torch.bfloat16)
    records.write(rows, cache, torch.arange(16), "float8_e4m3fnuz")
    slots = torch.arange(16).flip(0)
    for dtype in (torch.float32, torch.bfloat16):
        whole = records.dequantise(cache, slots, "float8_e4m3fnuz", dtype)
        monkeypatch.setattr(records, "_CHUNK_ROWS", 3)
        assert torch.equal(records.dequantise(cache, slots, "float8_e4m3fnuz", dtype), whole)
        monkeypatch.undo()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(ENCODINGS), st.sampled_from([-126, -20, 0, 1, 50, 118]))
def test_a_written_row_decodes_within_half_a_step_and_writes_itself_again(
    seed: int, encoding: Encoding, power: int
) -> None:
    integers = torch.randint(-255, 256, (2, 512), generator=torch.Generator().manual_seed(seed))
    rows = torch.ldexp(integers.double(), torch.tensor(float(power))).to(torch.bfloat16)
    cache = empty_cache(1, 2)
    slots = torch.arange(2)
    records.write(rows, cache, slots, encoding)
    got = records.dequantise(cache, slots, encoding, torch.float64)
    assert torch.equal(got[:, 448:], rows.double()[:, 448:])
    groups = got[:, :448].unflatten(1, (7, 64)), rows.double()[:, :448].unflatten(1, (7, 64))
    step = torch.maximum(groups[1].abs().amax(2, keepdim=True), torch.tensor(1e-4)) * 2.0**-14
    assert ((groups[0] - groups[1]).abs() <= 2.0**-4 * groups[1].abs() + step).all()
    records.write(records.dequantise(cache, slots, encoding, torch.bfloat16), cache, slots, encoding)
    assert torch.equal(records.dequantise(cache, slots, encoding, torch.float64), got)


def test_bfloat16_rows_hold_the_same_numbers_as_float32_rows() -> None:
    codes = torch.arange(256).to(torch.uint8)
    cache = empty_cache(245, 1)
    views = records.record_views(cache)
    views.codes[:, 0, :256] = codes
    views.codes[:, 0, 256:] = 0
    views.rope[:] = 0
    views.scales[:, 0] = (torch.arange(245)[:, None] + 2).to(torch.uint8)
    for encoding in ENCODINGS:
        wide = records.dequantise(cache, torch.arange(2, 245), encoding)
        narrow = records.dequantise(cache, torch.arange(2, 245), encoding, torch.bfloat16)
        assert torch.equal(narrow.float().nan_to_num(1.5), wide.nan_to_num(1.5))


def test_negative_slots_and_rows_beyond_the_slots_write_nothing() -> None:
    cache = empty_cache(2, 2)
    before = memory.storage_bytes(cache).clone()
    records.write(torch.ones(5, 512, dtype=torch.bfloat16), cache, torch.tensor([-1, -7, -(2**40)]), "float8_e4m3fn")
    records.write(torch.ones(5, 512, dtype=torch.bfloat16), cache, torch.tensor([], dtype=torch.int64), "float8_e4m3fn")
    assert torch.equal(memory.storage_bytes(cache), before)


def test_what_cannot_be_answered_is_refused() -> None:
    cache = empty_cache(2, 2)
    row = torch.ones(1, 512, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match="slot 4"):
        records.write(row, cache, torch.tensor([4]), "float8_e4m3fn")
    with pytest.raises(IndexError, match="from -1 to 0"):
        records.dequantise(cache, torch.tensor([-1, 0]), "float8_e4m3fn")
    with pytest.raises(ValueError, match="2 slots for 1 rows"):
        records.write(row, cache, torch.tensor([0, 1]), "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"should be torch\.bfloat16"):
        records.write(row.float(), cache, torch.tensor([0]), "float8_e4m3fn")
    with pytest.raises(ValueError, match="584"):
        records.record_views(torch.zeros(2, 2, 528, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        records.record_views(torch.zeros(2, 2, 600, dtype=torch.uint8)[:, :, :584])
