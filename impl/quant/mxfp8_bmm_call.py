"""Is this a grouped MXFP8 product that can be answered, and with which tile is it launched?"""

from __future__ import annotations

import bisect

import torch

from cases.quant.mxfp8_bmm import LANES, Inputs

# Rows, columns and lanes of a tile, warps, stages; from this much work on, in units of tokens times groups.
_FROM = (0, 65, 129, 257, 513, 1025, 2049, 3073, 4097)
_TILES = (
    (16, 16, 1024, 2, 3),
    (32, 16, 1024, 2, 3),
    (32, 32, 512, 2, 3),
    (64, 32, 512, 2, 3),
    (64, 64, 512, 4, 2),
    (64, 64, 256, 4, 2),
    (64, 64, 256, 2, 1),
    (128, 128, 256, 8, 2),
    (128, 128, 128, 4, 2),
)


def tile_for(tokens: int, groups: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and lanes of a tile, warps and stages."""
    return _TILES[bisect.bisect_right(_FROM, tokens * groups) - 1]


def checked(inputs: Inputs) -> int:
    """How many rows of the weight share a scale, 32 or 1; raises `ValueError` or `TypeError` for a call that is none."""
    for name in ("a", "weight"):
        if getattr(inputs, name).dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name}={getattr(inputs, name).dtype}: should be torch.float8_e4m3fn")
    for name in ("a_scale", "weight_scale"):
        if getattr(inputs, name).dtype != torch.uint8:
            raise TypeError(f"{name}={getattr(inputs, name).dtype}: should be torch.uint8")
    for name in ("a", "weight", "a_scale", "weight_scale", "out"):
        tensor = getattr(inputs, name)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"last stride of {name}={tensor.stride(-1)}: should be 1")
    tokens, columns = inputs.a.shape
    rows, width = inputs.weight.shape
    if columns != inputs.groups * width:
        raise ValueError(f"columns of a={columns}: should be groups times columns of weight, {inputs.groups} * {width}")
    if rows != inputs.groups * inputs.rank:
        raise ValueError(f"rows of weight={rows}: should be groups times rank, {inputs.groups} * {inputs.rank}")
    _, tile_columns, tile_lanes, _, _ = tile_for(tokens, inputs.groups)
    if width % tile_lanes:
        raise ValueError(f"width={width}: should be a multiple of {tile_lanes}, or its tail is in no tile")
    if inputs.rank % tile_columns:
        raise ValueError(f"rank={inputs.rank}: should be a multiple of {tile_columns}, or a tile lies in two groups")
    if tuple(inputs.a_scale.shape) != (tokens, columns // LANES):
        raise ValueError(f"a_scale={list(inputs.a_scale.shape)}: should be {[tokens, columns // LANES]}")
    scale_rows, scale_columns = inputs.weight_scale.shape
    if scale_columns != width // LANES:
        raise ValueError(f"columns of weight_scale={scale_columns}: should be {width // LANES}")
    if scale_rows == rows:
        return 1
    if scale_rows * LANES != rows:
        raise ValueError(f"rows of weight_scale={scale_rows}: should be {rows}, or {rows / LANES:g} of 32 rows each")
    if inputs.rank % LANES:
        raise ValueError(f"rank={inputs.rank}: should be a multiple of {LANES}, or a scale block lies in two groups")
    return LANES
