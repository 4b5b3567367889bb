"""Which bfloat16 rows must a gather of packed key-value records leave?

    out[b, offset + i] = bf16(record at table[b, p // B], place p % B),  p = seq_lens[b] - g + i,  i = 0..g-1
    g = gather_lens[b], or seq_lens[b]

with the record's numbers as in `oracle.cache.records` (layout and source there). NaN codes give NaN: nothing is cleaned
away here. All other rows stay as they were.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cases.cache.kv_gather_dequant import Inputs, Outputs
from cases.memory import guarded, moved, storage_bytes
from cases.precision import Precision
from oracle.cache import records
from oracle.cache.records import DATA_BYTES, GROUPS, NOPE_LANES, RECORD_BYTES, SCALE_BYTES
from oracle.check import Check, exact
from oracle.formats import numbers
from oracle.formats.numbers import Encoding
from oracle.laws import Honest, Law, Mutant

# From request, position and column of its block to slot numbers.
_Slots = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The output rows as they must be afterwards, a copy; `dtype` changes nothing, since bfloat16 is the op's own."""
    del dtype
    out = moved(inputs.out, inputs.out.device)
    for request, row, slots in _gathered(inputs):
        out[request, row : row + slots.numel()] = records.dequantise(
            inputs.cache, slots, inputs.encoding, torch.bfloat16
        )
    return Outputs(out)


def _gathered(inputs: Inputs) -> list[tuple[int, int, torch.Tensor]]:
    """Request, first output row, and the slots of its gathered positions."""
    block_size = inputs.cache.shape[1]
    lengths = inputs.seq_lens.tolist()
    gathers = lengths if inputs.gather_lens is None else inputs.gather_lens.tolist()
    found = []
    for request, (length, gather) in enumerate(zip(lengths, gathers, strict=True)):
        position = torch.arange(length - gather, length, device=inputs.table.device)
        block = inputs.table[request].to(torch.int64)[position // block_size]
        found.append((request, inputs.offset, block * block_size + position % block_size))
    return found


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The gathered lanes and the rows that must stay, bit for bit but for the choice of NaN where a code is NaN."""
    del precision
    want = reference(inputs).out
    got = outputs.out
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return (exact("out", got, want),)
    gathered = torch.zeros(want.shape[:2], dtype=torch.bool)
    for request, row, slots in _gathered(inputs):
        gathered[request, row : row + slots.numel()] = True
    nan = torch.full((), float("nan"), dtype=want.dtype)
    nope, rope = slice(0, NOPE_LANES), slice(NOPE_LANES, None)
    return (
        exact(
            "codes", torch.where(torch.isnan(got[..., nope]), nan, got[..., nope]),
            torch.where(torch.isnan(want[..., nope]), nan, want[..., nope]), mask=gathered[..., None],
            why="a code times a power of two is exact in bfloat16",
        ),
        exact("rope", got[..., rope], want[..., rope], mask=gathered[..., None], why="bfloat16 lanes are copied"),
        exact("other rows", got, want, mask=~gathered[..., None], why="rows that are not gathered stay as they were"),
    )  # fmt: skip


def _fresh(inputs: Inputs, **changes: object) -> Inputs:
    """Inputs some of which are replaced, with output memory of their own."""
    fresh: dict[str, Any] = {"out": moved(inputs.out, inputs.out.device), **changes}
    return dataclasses.replace(inputs, **fresh)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _pages_permuted(inputs: Inputs) -> Inputs:
    """Blocks change places, and the tables follow; garbage columns stay garbage."""
    blocks = inputs.cache.shape[0]
    cache = moved(inputs.cache, inputs.cache.device)
    cache.copy_(inputs.cache.flip(0))
    real = _real_columns(inputs)
    return _fresh(inputs, cache=cache, table=torch.where(real, blocks - 1 - inputs.table, inputs.table))


def _real_columns(inputs: Inputs) -> torch.Tensor:
    block_size = inputs.cache.shape[1]
    used = (inputs.seq_lens.to(torch.int64) + block_size - 1) // block_size
    return torch.arange(inputs.table.shape[1])[None, :] < used[:, None]


def _batch_reversed(inputs: Inputs) -> Inputs | None:
    gathers = inputs.gather_lens
    return _fresh(
        inputs, seq_lens=inputs.seq_lens.flip(0), table=inputs.table.flip(0),
        gather_lens=None if gathers is None else gathers.flip(0),
    )  # fmt: skip


def _wider_pages(inputs: Inputs) -> Inputs:
    blocks, block_size, width = inputs.cache.shape
    cache = guarded((blocks, block_size, width), torch.uint8, gaps=(inputs.cache.stride(0) + 576, 0), fill=0xFF)
    cache.copy_(inputs.cache)
    return _fresh(inputs, cache=cache)


def _lengths_named(inputs: Inputs) -> Inputs | None:
    return _fresh(inputs, gather_lens=inputs.seq_lens.clone()) if inputs.gather_lens is None else None


def _other_hint(inputs: Inputs) -> Inputs:
    return _fresh(inputs, max_gather_len=None if inputs.max_gather_len is not None else 1)


def _garbage_changed(inputs: Inputs) -> Inputs:
    return _fresh(inputs, table=torch.where(_real_columns(inputs), inputs.table, -77).to(torch.int32))


def _pad_bytes_changed(inputs: Inputs) -> Inputs:
    cache = moved(inputs.cache, inputs.cache.device)
    records.record_views(cache).scales[..., GROUPS] = 3
    return _fresh(inputs, cache=cache)


LAWS: tuple[Law, ...] = (
    Law("G1 pages permuted", "where in the cache a block lies does not matter", _pages_permuted, _same, "bitwise"),
    Law(
        "G2 batch reversed", "a request's rows depend on its own tables and lengths only", _batch_reversed,
        lambda first, inputs, edited: Outputs(first.out.flip(0)), "bitwise",
    ),
    Law("G3 pages further apart", "the block stride moves pages and changes no row", _wider_pages, _same, "bitwise"),
    Law("G4 lengths named", "without gather_lens everything is gathered", _lengths_named, _same, "bitwise"),
    Law("G5 another hint", "the launch hint changes nothing", _other_hint, _same, "bitwise"),
    Law("G6 table tails changed", "columns beyond the last block are not used", _garbage_changed, _same, "bitwise"),
    Law("G7 pad bytes changed", "the eighth scale byte is not used", _pad_bytes_changed, _same, "bitwise"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Reader:
    """What a reader believes about the record."""

    token_pitch: int = DATA_BYTES
    rope: int = NOPE_LANES
    scale_pitch: int = SCALE_BYTES
    scales_behind_data: bool = False
    unpadded_blocks: bool = False
    scale_of_lane: int = 64
    scaled_rope: bool = False
    big_endian: bool = False
    float16: bool = False
    scrub: bool = False
    bias: int = 127
    other_encoding: bool = False
    narrow_offsets: bool = False


def _read(inputs: Inputs, slots: torch.Tensor, reader: _Reader) -> torch.Tensor:
    """bfloat16 rows [n, 512] by byte addresses; bytes beyond the storage are 0."""
    flat = storage_bytes(inputs.cache)
    block_size = inputs.cache.shape[1]
    stride = RECORD_BYTES * block_size if reader.unpadded_blocks else inputs.cache.stride(0)
    place = slots % block_size
    away = slots // block_size * stride
    if reader.narrow_offsets:
        away = (away + (1 << 31)) % (1 << 32) - (1 << 31)
    page = int(inputs.cache.storage_offset()) + away
    scale_base = page + DATA_BYTES * block_size + place * reader.scale_pitch
    if reader.scales_behind_data:
        scale_base = page + place * DATA_BYTES + DATA_BYTES

    def bytes_at(start: torch.Tensor, count: int) -> torch.Tensor:
        address = start[:, None] + torch.arange(count)
        taken = flat[address.clamp(0, flat.numel() - 1)]
        return torch.where((address >= 0) & (address < flat.numel()), taken, 0).to(torch.uint8)

    codes = bytes_at(page + place * reader.token_pitch, NOPE_LANES)
    rope = bytes_at(page + place * reader.token_pitch + reader.rope, 128)
    scales = numbers.e8m0_decode(bytes_at(scale_base, SCALE_BYTES), torch.float64, all_ones="infinity")
    encoding = inputs.encoding
    if reader.other_encoding:
        encoding = _other(encoding)
    group = (torch.arange(NOPE_LANES) // reader.scale_of_lane).clamp(max=GROUPS)
    lanes = numbers.decode(codes, encoding, torch.float64) * scales[:, group] * 2.0 ** (127 - reader.bias)
    if reader.big_endian:
        rope = rope.unflatten(1, (64, 2)).flip(2).flatten(1)
    tail = rope.contiguous().view(torch.float16 if reader.float16 else torch.bfloat16)
    if reader.float16 or reader.scaled_rope:
        tail = (tail.double() * (scales[:, GROUPS:] if reader.scaled_rope else 1.0)).to(torch.bfloat16)
    if reader.scrub:
        lanes = lanes.nan_to_num(0.0, float("inf"), -float("inf"))
    return torch.cat((numbers.round_to_bfloat16(lanes), tail), dim=1)


def _other(encoding: Encoding) -> Encoding:
    return "float8_e4m3fn" if encoding == "float8_e4m3fnuz" else "float8_e4m3fnuz"


def _read_as(reader: _Reader) -> Callable[[Inputs], Outputs]:
    def answer(inputs: Inputs) -> Outputs:
        out = moved(inputs.out, inputs.out.device)
        for request, row, slots in _gathered(inputs):
            out[request, row : row + slots.numel()] = _read(inputs, slots, reader)
        return Outputs(out)

    return answer


def _from_start(inputs: Inputs) -> Outputs | None:
    """The first tokens instead of the last."""
    if inputs.gather_lens is None:
        return None
    out = moved(inputs.out, inputs.out.device)
    first = reference(_fresh(inputs, seq_lens=inputs.gather_lens.clone())).out
    out.copy_(first)
    return Outputs(out)


def _offset_ignored(inputs: Inputs) -> Outputs | None:
    return reference(_fresh(inputs, offset=0)) if inputs.offset else None


def _gather_ignored(inputs: Inputs) -> Outputs | None:
    """The whole sequence, as far as there are rows."""
    if inputs.gather_lens is None:
        return None
    room = inputs.out.shape[1] - inputs.offset
    lengths = inputs.seq_lens.clamp(max=room)
    return reference(_fresh(inputs, seq_lens=lengths, gather_lens=None))


def _last_token_lost(inputs: Inputs) -> Outputs:
    gathers = inputs.seq_lens if inputs.gather_lens is None else inputs.gather_lens
    return reference(
        _fresh(inputs, seq_lens=(inputs.seq_lens - 1).clamp(min=0), gather_lens=(gathers - 1).clamp(min=0))
    )


def _wrong_pitch(inputs: Inputs) -> Outputs | None:
    """Rows of the table one behind the other, whatever lies between; numbers outside the cache read block 0."""
    requests, columns = inputs.table.shape
    if requests < 2 or inputs.table.stride(0) == columns:
        return None
    table = inputs.table.as_strided((requests, columns), (columns, 1))
    table = torch.where((table >= 0) & (table < inputs.cache.shape[0]), table, 0).to(torch.int32)
    return reference(_fresh(inputs, table=table))


def _hint_obeyed(inputs: Inputs) -> Outputs | None:
    """The hint as a limit."""
    if inputs.max_gather_len is None:
        return None
    gathers = inputs.seq_lens if inputs.gather_lens is None else inputs.gather_lens
    kept = gathers.clamp(max=inputs.max_gather_len)
    return reference(_fresh(inputs, seq_lens=inputs.seq_lens - gathers + kept, gather_lens=kept))


def _other_block_size(inputs: Inputs) -> Outputs | None:
    """Positions divided by twice the block size, as with another cache's."""
    block_size = inputs.cache.shape[1]
    out = moved(inputs.out, inputs.out.device)
    lengths = inputs.seq_lens.tolist()
    gathers = lengths if inputs.gather_lens is None else inputs.gather_lens.tolist()
    records_held = inputs.cache.shape[0] * block_size
    for request, (length, gather) in enumerate(zip(lengths, gathers, strict=True)):
        position = torch.arange(length - gather, length)
        block = inputs.table[request].to(torch.int64)[position // (2 * block_size)]
        slots = (block * 2 * block_size + position % (2 * block_size)).clamp(0, records_held - 1)
        out[request, inputs.offset : inputs.offset + gather] = records.dequantise(
            inputs.cache, slots, inputs.encoding, torch.bfloat16
        )
    return Outputs(out)


def _rows_after_cleared(inputs: Inputs) -> Outputs:
    """The rest of each request's rows set to zero."""
    out = reference(inputs).out
    for request, row, slots in _gathered(inputs):
        out[request, row + slots.numel() :] = 0
    return Outputs(out)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("other-encoding", "the codes were decoded as the other e4m3 format", _read_as(_Reader(other_encoding=True))),
    Mutant("token-pitch-584", "records lay 584 bytes apart", _read_as(_Reader(token_pitch=RECORD_BYTES))),
    Mutant(
        "scales-behind-data",
        "the scales stood behind their own record's data",
        _read_as(_Reader(scales_behind_data=True)),
    ),
    Mutant("scale-pitch-7", "the scales of a record took 7 bytes", _read_as(_Reader(scale_pitch=7))),
    Mutant(
        "scale-of-32-lanes", "the scale's number were the lane's divided by 32", _read_as(_Reader(scale_of_lane=32))
    ),
    Mutant(
        "scale-of-128-lanes", "the scale's number were the lane's divided by 128", _read_as(_Reader(scale_of_lane=128))
    ),
    Mutant(
        "rope-scaled-by-pad-byte",
        "the RoPE lanes were multiplied by the eighth scale",
        _read_as(_Reader(scaled_rope=True)),
    ),
    Mutant("unpadded-block-stride", "blocks lay 584 bytes a record apart", _read_as(_Reader(unpadded_blocks=True))),
    Mutant("other-block-size", "positions were divided by twice the block size", _other_block_size),
    Mutant("rope-at-512", "the RoPE lanes started at byte 512", _read_as(_Reader(rope=512))),
    Mutant("rope-big-endian", "the RoPE lanes were read high byte first", _read_as(_Reader(big_endian=True))),
    Mutant("rope-as-float16", "the RoPE lanes were read as float16", _read_as(_Reader(float16=True))),
    Mutant("scale-bias-128", "the scale's bias were 128", _read_as(_Reader(bias=128))),
    Mutant("nan-scrubbed", "NaN codes were cleaned to 0", _read_as(_Reader(scrub=True))),
    Mutant("offsets-of-32-bits", "block offsets wrapped at 2^31 bytes", _read_as(_Reader(narrow_offsets=True))),
    Mutant("gathered-from-the-start", "the first tokens were gathered instead of the last", _from_start),
    Mutant("offset-ignored", "rows were written from row 0 on", _offset_ignored),
    Mutant("gather-lens-ignored", "the whole sequence were gathered", _gather_ignored),
    Mutant("last-token-lost", "the last token of each request were left out", _last_token_lost),
    Mutant("table-pitch-is-its-width", "the rows of a narrowed block table lay one behind the other", _wrong_pitch),
    Mutant("hint-is-a-limit", "the launch hint limited the gather", _hint_obeyed),
    Mutant("rows-after-cleared", "the rows behind the gathered ones were cleared", _rows_after_cleared),
)


def _by_float64(inputs: Inputs) -> Outputs:
    """Through float64, with every NaN another one than the reference's."""
    out = moved(inputs.out, inputs.out.device)
    for request, row, slots in _gathered(inputs):
        wide = records.dequantise(inputs.cache, slots, inputs.encoding, torch.float64)
        narrow = numbers.round_to_bfloat16(wide)
        narrow[torch.isnan(narrow)] = torch.tensor([-1], dtype=torch.int16).view(torch.bfloat16)
        narrow[:, NOPE_LANES:] = records.dequantise(inputs.cache, slots, inputs.encoding, torch.bfloat16)[
            :, NOPE_LANES:
        ]
        out[request, row : row + slots.numel()] = narrow
    return Outputs(out)


HONEST: tuple[Honest, ...] = (Honest("another-nan", Precision(), _by_float64),)
