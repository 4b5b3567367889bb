"""Where do the bytes of a packed key-value record lie, what number is each lane, and which bytes does a row become?

A page of B records is one block of the cache tensor, S = stride(0) bytes from the next one; p numbers the record in it:

    byte 576p + d,          d = 0..447   the e4m3 code of lane d
    byte 576p + 448 + 2k,   k = 0..63    lane 448 + k (rotated), bfloat16, little-endian
    byte 576B + 8p + j,     j = 0..6     the E8M0 scale of lanes 64j..64j+63
    byte 576B + 8p + 7                   written 0, never used
    bytes 584B..S-1                      never written, never read

    K[d] = e4m3(code_d) * 2^(scale[d // 64] - 127)   for d < 448

and the writer, with F = 448 (OCP codes) or 224 (FNUZ codes), for a group x of 64 lanes:

    a = max(max |x|, 1e-4),  e = the smallest integer with a <= F * 2^e,  scale = e + 127,  code = rne(x * 2^-e)

Source: the `fp8_ds_mla` cache of vLLM (`quantize_and_insert_k_cache`, `dequantize_and_gather_k_cache`).
"""

from typing import NamedTuple

import torch

from cases.memory import storage_bytes
from oracle.formats import numbers
from oracle.formats.numbers import Encoding

LATENT_LANES = 512
NOPE_LANES = 448
ROPE_LANES = LATENT_LANES - NOPE_LANES
GROUP_LANES = 64
GROUPS = NOPE_LANES // GROUP_LANES

ROPE_BYTE = NOPE_LANES
DATA_BYTES = NOPE_LANES + 2 * ROPE_LANES
SCALE_BYTES = GROUPS + 1
RECORD_BYTES = DATA_BYTES + SCALE_BYTES
PAGE_ALIGNMENT = DATA_BYTES

# Groups whose largest magnitude is below this are scaled as if it were this, float32(1e-4).
AMAX_FLOOR = 1e-4

# Rows that are decoded at a time: the temporaries stay in a processor's cache.
_CHUNK_ROWS = 1024


class Views(NamedTuple):
    """Strided uint8 views into one cache, [blocks, block_size, bytes]: 448 codes, 128 bytes of RoPE lanes, 8 scales."""

    codes: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor


def page_bytes(block_size: int) -> int:
    """The bytes from one page to the next when nothing else lies between them: a multiple of 576."""
    return -(-block_size * RECORD_BYTES // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def record_views(cache: torch.Tensor) -> Views:
    """The parts of every record of a cache [blocks, block_size, 584], uint8, with its real block stride; no copy.

    RoPE lanes come as bytes, since an odd block stride leaves bfloat16 elements unaligned. Raises `ValueError` for a
    cache of another form.
    """
    if cache.dtype != torch.uint8 or cache.dim() != 3 or cache.shape[2] != RECORD_BYTES:
        raise ValueError(f"cache is {cache.dtype}{list(cache.shape)}: should be torch.uint8[blocks, block_size, 584]")
    blocks, block_size, _ = cache.shape
    if cache.stride()[1:] != (RECORD_BYTES, 1) and block_size > 1:
        raise ValueError(f"cache strides are {cache.stride()}: a page should be contiguous, (any, 584, 1)")
    base, step = cache.storage_offset(), cache.stride(0)

    def part(first: int, pitch: int, count: int) -> torch.Tensor:
        return cache.as_strided((blocks, block_size, count), (step, pitch, 1), base + first)

    return Views(
        codes=part(0, DATA_BYTES, NOPE_LANES),
        rope=part(ROPE_BYTE, DATA_BYTES, 2 * ROPE_LANES),
        scales=part(DATA_BYTES * block_size, SCALE_BYTES, SCALE_BYTES),
    )


def dequantise(
    cache: torch.Tensor, slots: torch.Tensor, encoding: Encoding, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The rows [n, 512] that the records in `slots` stand for, in float32, float64 or bfloat16.

    `slots` is int32 or int64 [n], slot = block * block_size + place; repeats are allowed. Exact in float32; to bfloat16
    rounded to nearest even (exact for every scale byte that the writer emits). NaN codes stay NaN and scale byte 255 is
    infinity: cleaning them away belongs to those ops that do so. Raises `IndexError` for a slot outside the cache.
    """
    record_views(cache)
    blocks, block_size = int(cache.shape[0]), int(cache.shape[1])
    slots = slots.to(device=cache.device, dtype=torch.int64)
    if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= blocks * block_size):
        raise IndexError(
            f"slots reach from {int(slots.min())} to {int(slots.max())}: the cache has {blocks * block_size}"
        )
    place = slots % block_size
    page = (slots - place) // max(block_size, 1) * cache.stride(0) + int(cache.storage_offset())
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty((slots.numel(), LATENT_LANES), dtype=dtype, device=cache.device)
    powers = numbers.e8m0_decode(torch.arange(256, device=cache.device).to(torch.uint8), compute, all_ones="infinity")
    for start in range(0, slots.numel(), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        data = gather_bytes(cache, page[rows] + place[rows] * DATA_BYTES, DATA_BYTES)
        scale_bytes = gather_bytes(cache, page[rows] + DATA_BYTES * block_size + place[rows] * SCALE_BYTES, SCALE_BYTES)
        scales = powers[scale_bytes[:, :GROUPS].to(torch.int32)]
        grouped = (data.shape[0], GROUPS, GROUP_LANES)
        lanes = numbers.decode(data[:, :NOPE_LANES], encoding, compute).view(grouped)
        rope = data[:, ROPE_BYTE:].contiguous().view(torch.bfloat16)
        if dtype == torch.bfloat16:
            out[rows, :NOPE_LANES] = numbers.round_to_bfloat16(lanes.mul_(scales[..., None])).view(-1, NOPE_LANES)
            out[rows, NOPE_LANES:] = rope
        else:
            torch.mul(lanes, scales[..., None], out=out[rows, :NOPE_LANES].unflatten(1, (GROUPS, GROUP_LANES)))
            out[rows, NOPE_LANES:] = numbers.decode(rope, "bfloat16", compute)
    return out


def gather_bytes(cache: torch.Tensor, offsets: torch.Tensor, count: int) -> torch.Tensor:
    """`count` bytes from each byte offset into the storage of `cache`: uint8 [n, count]. Offsets are int64."""
    flat = storage_bytes(cache)
    for word in (torch.int64, torch.int32, torch.int16):
        size = word.itemsize
        if count % size == 0 and cache.stride(0) % size == 0 and cache.storage_offset() % size == 0:
            break
    else:
        word, size = torch.uint8, 1
    usable = flat.numel() // size * size
    words = flat[:usable].view(word)
    places = words.numel() - count // size + 1
    windows = words.as_strided((max(places, 0), count // size), (1, 1))
    return windows[offsets // size].view(torch.uint8)


def quantise(rows: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes uint8 [n, 448] and scale bytes uint8 [n, 8], the last one 0, of bfloat16 rows [n, 512].

    Finite rows; -0 is 0x80 in OCP codes and 0x00 in FNUZ codes.
    """
    lanes = rows[:, :NOPE_LANES].to(torch.float32).unflatten(1, (GROUPS, GROUP_LANES))
    limit = numbers.SCALED_MAXIMUM[encoding]
    floor = torch.tensor(AMAX_FLOOR, dtype=torch.float32, device=rows.device)
    amax = torch.maximum(lanes.abs().amax(dim=2), floor)
    exponent = numbers.scale_exponent(amax, limit)
    # 2^-e needs float64: e reaches 120, and 2^-e * x must not pass through float32 subnormals.
    scaled = torch.ldexp(lanes.double(), -exponent[..., None].double())
    codes = numbers.encode(scaled.clamp(-limit, limit), encoding)
    scales = torch.zeros((rows.shape[0], SCALE_BYTES), dtype=torch.uint8, device=rows.device)
    scales[:, :GROUPS] = (exponent + numbers.E8M0_BIAS).clamp(0, 255).to(torch.uint8)
    return codes.flatten(1), scales


def write(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, encoding: Encoding) -> None:
    """Writes row t of `k` as the record in slot `slots[t]`, in place; negative slots are skipped.

    `k` is bfloat16 [rows, 512] with at least as many rows as slots; rows beyond them are padding. Slots are unique.
    Raises `ValueError` for another form of `k` or too few rows, `IndexError` for a slot beyond the cache.
    """
    if k.dtype != torch.bfloat16 or k.dim() != 2 or k.shape[1] != LATENT_LANES:
        raise ValueError(f"k is {k.dtype}{list(k.shape)}: should be torch.bfloat16[rows, 512]")
    if slots.numel() > k.shape[0]:
        raise ValueError(f"{slots.numel()} slots for {k.shape[0]} rows of k")
    views = record_views(cache)
    blocks, block_size, _ = cache.shape
    if slots.numel() and int(slots.max()) >= blocks * block_size:
        raise IndexError(f"slot {int(slots.max())} lies beyond the cache's {blocks * block_size} records")
    taken = (slots >= 0).nonzero().flatten()
    target = slots[taken].to(torch.int64)
    rows = k[taken]
    codes, scales = quantise(rows, encoding)
    at = (target // block_size, target % block_size)
    views.codes[at] = codes
    views.rope[at] = rows[:, NOPE_LANES:].contiguous().view(torch.uint8)
    views.scales[at] = scales
