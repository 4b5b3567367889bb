"""When is a decode over segments no call, which slots does a row read, and what do query and cache count for?"""

import torch

from cases.dense_mla.segmented_decode import CODES, Inputs
from oracle.formats import numbers
from oracle.formats.numbers import FormatName, round_to_bfloat16

_FORMATS: dict[torch.dtype, FormatName] = {
    torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e4m3fnuz: "float8_e4m3fnuz",
}  # fmt: skip


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none: `ValueError` for shapes, tables and scales, `TypeError` for dtypes."""
    query, cache, out = inputs.query, inputs.cache, inputs.out
    if query.dim() != 3:
        raise ValueError(f"query={list(query.shape)}: should be [rows, heads, lanes]")
    rows, heads, lanes = query.shape
    if cache.dim() != 4 or cache.shape[2:] != (1, lanes):
        raise ValueError(f"cache={list(cache.shape)}: should be [pages, tile, 1, {lanes}]")
    for name, size in (("tile", inputs.tile), ("rank", inputs.rank), ("rope", lanes - inputs.rank)):
        if size < 1 or size & (size - 1):
            raise ValueError(f"{name}={size}: should be a power of two")
    if inputs.tile > 128:
        raise ValueError(f"tile={inputs.tile}: should be at most 128")
    if cache.dtype not in (torch.bfloat16, *CODES) or query.dtype not in (torch.bfloat16, cache.dtype):
        raise TypeError(f"query={query.dtype}, cache={cache.dtype}: should be bfloat16, or codes of one format")
    if out.shape != (rows, heads, inputs.rank):
        raise ValueError(f"out={list(out.shape)}: should be {[rows, heads, inputs.rank]}")
    if out.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"out={out.dtype}: should be bfloat16 or float16")
    for name, tensor, wanted in (("lengths", inputs.lengths, 1), ("table", inputs.table, 2)):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name}={tensor.dtype}: should be torch.int32")
        if tensor.dim() != wanted or tensor.shape[0] != rows:
            raise ValueError(f"{name}={list(tensor.shape)}: should be of {rows} rows in {wanted} dimensions")
    longest = int(inputs.lengths.max())
    if longest > inputs.table.shape[1] * inputs.tile:
        raise ValueError(f"table={list(inputs.table.shape)}: should hold the pages of {longest} keys")
    if longest > inputs.max_length:
        raise ValueError(f"max_length={inputs.max_length}: should be at least {longest}, the longest row")
    if (query.dtype in CODES) != (inputs.query_scale is not None):
        raise ValueError(f"query={query.dtype}, query_scale={inputs.query_scale}: codes and a scale should go together")
    if cache.dtype not in CODES and float(inputs.cache_scale) != 1.0:
        raise ValueError(f"cache_scale={float(inputs.cache_scale)}: should be 1 for a cache in bfloat16")


def keys_of(inputs: Inputs, row: int) -> torch.Tensor:
    """The slots of a row's keys in order, int64: page * tile + place."""
    place = torch.arange(max(0, int(inputs.lengths[row])))
    return inputs.table[row, place // inputs.tile].long() * inputs.tile + place % inputs.tile


def stored(inputs: Inputs, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the cache holds in some slots [n, lanes], without its scale."""
    return decoded(inputs.cache[slots // inputs.tile, slots % inputs.tile, 0], dtype)


def decoded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes or bfloat16 numbers in float32 or float64, exactly."""
    if values.dtype not in CODES:
        return values.to(dtype)
    return numbers.decode(values.contiguous().view(torch.uint8), _FORMATS[values.dtype], dtype)


def query_of(inputs: Inputs, row: int, dtype: torch.dtype) -> torch.Tensor:
    """The query of a row [heads, lanes]: codes times their scale, rounded to bfloat16."""
    query = inputs.query[row]
    if inputs.query_scale is None:
        return query.to(dtype)
    return round_to_bfloat16(decoded(query, torch.float32) * inputs.query_scale).to(dtype)
