"""Is this a legal call of sparse MLA decode, and which slots does each query read in the one form that kernels take?

Everything that an optimised implementation would assume silently is checked here, before a kernel runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cases.sparse_mla.decode import LANES, RECORD, ROPE, DecodeInputs, Segment
from impl.sparse_mla import splits as split_rules

ENCODINGS = ("float8_e4m3fn", "float8_e4m3fnuz")
_INDEX_TYPES = (torch.int32, torch.int64)
# Kernels divide slots in 32 bits.
_SLOT_LIMIT = 1 << 31


@dataclass(frozen=True)
class RaggedSegment:
    """One cache and the slots of each query: `indices[indptr[t]:indptr[t + 1]]`, int32 or int64, any stride.

    `indices` may be longer than `indptr[-1]`; its length is what a heuristic that cannot read `indptr` goes by.
    """

    cache: torch.Tensor
    fnuz: bool
    indices: torch.Tensor
    indptr: torch.Tensor

    @property
    def rows(self) -> int:
        """Slots in the cache."""
        return self.cache.shape[0] * self.cache.shape[1]

    @property
    def block(self) -> int:
        """Slots per page."""
        return self.cache.shape[1]


@dataclass(frozen=True)
class Call:
    """A legal call with both segments in ragged form."""

    inputs: DecodeInputs
    main: RaggedSegment
    extra: RaggedSegment | None

    @property
    def queries(self) -> int:
        """Rows of the call."""
        return self.inputs.query.shape[0]

    @property
    def heads(self) -> int:
        """Query heads of a row."""
        return self.inputs.query.shape[1]

    def split_plan(self) -> tuple[int, int, bool]:
        """Splits to launch, the count that fills the device once, and whether each query chooses its own count."""
        inputs = self.inputs
        load = split_rules.load_of(
            self.queries,
            self.heads,
            self.main.indices.numel(),
            self.extra.indices.numel() if self.extra is not None else 0,
            inputs.compute_units,
        )
        splits = inputs.splits or split_rules.split_count(inputs.arch, load)
        adaptive = split_rules.is_adaptive(inputs.arch, inputs.adaptive, load, splits)
        return splits, split_rules.one_wave_count(load, splits), adaptive


def call_of(inputs: DecodeInputs) -> Call:
    """The call behind the inputs; raises `ValueError` or `TypeError` with one sentence when there is none."""
    _check_query(inputs)
    _check_output(inputs)
    _check_rotation(inputs)
    _check_settings(inputs)
    main = _ragged("main", inputs.main, inputs.query)
    extra = _ragged("extra", inputs.extra, inputs.query) if inputs.extra is not None else None
    if inputs.trust_extra and (inputs.arch != "gfx950" or extra is None):
        raise ValueError(f"trust_extra=True: needs arch=gfx950 and an extra segment, the call is for {inputs.arch}")
    return Call(inputs, main, extra)


def ragged_from_dense(
    dense: torch.Tensor, lengths: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row the entries among the first `lengths[t]` columns that are slots of a cache of `rows`.

    Without `lengths` the number of non-negative entries is the limit, holes counted out but still passed over. Returns
    `indices` with room for all entries (-1 where none is left) and `indptr`, int64 [queries + 1].
    """
    queries, width = dense.shape
    if lengths is None:
        lengths = (dense >= 0).sum(1)
    column = torch.arange(width, device=dense.device)
    keep = (column[None, :] < lengths[:, None]) & (dense >= 0) & (dense < rows)
    kept = keep.sum(1)
    indptr = torch.zeros(queries + 1, dtype=torch.int64, device=dense.device)
    torch.cumsum(kept, 0, out=indptr[1:])
    indices = torch.full((queries * width,), -1, dtype=dense.dtype, device=dense.device)
    entries = dense[keep]
    indices[: entries.numel()] = entries
    return indices, indptr


def _check_query(inputs: DecodeInputs) -> None:
    query = inputs.query
    if query.dim() != 3 or query.shape[2] != LANES:
        raise ValueError(f"query is {_form(query)}: should be bfloat16[queries, heads, {LANES}]")
    if query.dtype != torch.bfloat16:
        raise TypeError(f"query is {_form(query)}: should be bfloat16")
    if query.stride(2) != 1:
        raise ValueError(f"query has lane stride {query.stride(2)}: should be 1")
    if inputs.sink is not None:
        if inputs.sink.dim() != 1 or inputs.sink.numel() < query.shape[1]:
            raise ValueError(f"sink is {_form(inputs.sink)}: should hold a logit for each of {query.shape[1]} heads")
        if inputs.sink.dtype != torch.float32:
            raise TypeError(f"sink is {_form(inputs.sink)}: should be float32")


def _check_output(inputs: DecodeInputs) -> None:
    queries, heads, _ = inputs.query.shape
    out, codes, scales = inputs.out, inputs.out_codes, inputs.out_scales
    if (codes is None) != (scales is None):
        raise ValueError("out_codes and out_scales: both should be given, or neither")
    if (out is None) == (codes is None):
        raise ValueError("out and out_codes: exactly one of them should be given")
    for name, tensor, shape in (
        ("out", out, (queries, heads, LANES)),
        ("out_codes", codes, (queries, heads * LANES)),
        ("out_scales", scales, (queries, heads * (LANES // 32))),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {_form(tensor)}: should have the shape {list(shape)}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has lane stride {tensor.stride(-1)}: should be 1")
        if tensor.device != inputs.query.device:
            raise ValueError(f"{name} is on {tensor.device}: should be on the query's {inputs.query.device}")
    if out is not None and out.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"out is {_form(out)}: should be bfloat16 or float32")
    if codes is not None and codes.dtype != torch.float8_e4m3fn:
        raise TypeError(f"out_codes is {_form(codes)}: should be float8_e4m3fn")
    if scales is not None and scales.dtype != torch.uint8:
        raise TypeError(f"out_scales is {_form(scales)}: should be uint8")
    if codes is not None and inputs.positions is None:
        raise ValueError("out_codes without positions: quantised rows should be rotated first")
    if codes is not None and inputs.arch != "gfx950":
        raise ValueError(f"arch={inputs.arch}: out_codes needs gfx950")


def _check_rotation(inputs: DecodeInputs) -> None:
    positions, table = inputs.positions, inputs.cos_sin
    if positions is None:
        return
    if table is None:
        raise ValueError("positions without cos_sin: the rotation should have its table")
    if table.dim() != 2 or table.shape[1] != ROPE or table.stride(1) != 1:
        raise ValueError(f"cos_sin is {_form(table)}: should be float32[positions, {ROPE}] with lane stride 1")
    if table.dtype != torch.float32:
        raise TypeError(f"cos_sin is {_form(table)}: should be float32")
    if positions.dtype not in _INDEX_TYPES:
        raise TypeError(f"positions is {_form(positions)}: should be int32 or int64")
    if tuple(positions.shape) != (inputs.query.shape[0],):
        raise ValueError(f"positions is {_form(positions)}: should hold one for each query of {inputs.query.shape[0]}")
    if positions.numel():
        lowest, highest = int(positions.min()), int(positions.max())
        if not 0 <= lowest <= highest < table.shape[0]:
            raise ValueError(f"positions reach from {lowest} to {highest}: should be 0 to {table.shape[0] - 1}")


def _check_settings(inputs: DecodeInputs) -> None:
    if inputs.arch not in ("gfx942", "gfx950", "other"):
        raise ValueError(f"arch={inputs.arch!r}: should be gfx942, gfx950 or other")
    if inputs.splits < 0:
        raise ValueError(f"splits={inputs.splits}: should be positive, or 0 for the heuristic")
    if inputs.compute_units < 1:
        raise ValueError(f"compute_units={inputs.compute_units}: should be at least 1")


def _ragged(name: str, segment: Segment, query: torch.Tensor) -> RaggedSegment:
    cache = segment.cache
    if cache.dim() != 3 or cache.shape[2] != RECORD:
        raise ValueError(f"{name}.cache is {_form(cache)}: should be uint8[blocks, block, {RECORD}]")
    if cache.dtype != torch.uint8:
        raise TypeError(f"{name}.cache is {_form(cache)}: should be uint8")
    if cache.stride(2) != 1 or (cache.shape[1] > 1 and cache.stride(1) != RECORD):
        raise ValueError(f"{name}.cache has strides {cache.stride()}: a page should be contiguous, (any, {RECORD}, 1)")
    if cache.shape[0] > 1 and (cache.stride(0) % 2 or cache.stride(0) < cache.shape[1] * RECORD):
        raise ValueError(
            f"{name}.cache has page stride {cache.stride(0)}: should be even and at least {cache.shape[1] * RECORD}"
        )
    if cache.data_ptr() % 2:
        raise ValueError(f"{name}.cache starts at an odd address: bfloat16 lanes should be aligned")
    if segment.encoding not in ENCODINGS:
        raise ValueError(f"{name}.encoding={segment.encoding!r}: should be {' or '.join(ENCODINGS)}")
    if segment.rows >= _SLOT_LIMIT:
        raise ValueError(f"{name}.cache has {segment.rows} slots: should be fewer than 2^31")
    fnuz = segment.encoding == "float8_e4m3fnuz"
    if segment.indices is None and segment.indptr is None and segment.dense is not None:
        dense, lengths = segment.dense, segment.lengths
        _check_indices(f"{name}.dense", dense, 2)
        if dense.shape[0] != query.shape[0]:
            raise ValueError(f"{name}.dense is {_form(dense)}: should have a row for each of {query.shape[0]} queries")
        if lengths is not None:
            _check_indices(f"{name}.lengths", lengths, 1)
            if lengths.numel() != query.shape[0]:
                raise ValueError(
                    f"{name}.lengths is {_form(lengths)}: should hold one for each of {query.shape[0]} queries"
                )
        indices, indptr = ragged_from_dense(dense, lengths, segment.rows)
        return RaggedSegment(cache, fnuz, indices, indptr)
    if segment.indices is None or segment.indptr is None:
        raise ValueError(f"{name}: should have indices and indptr, or dense")
    _check_indices(f"{name}.indices", segment.indices, 1)
    _check_indices(f"{name}.indptr", segment.indptr, 1)
    if segment.indptr.numel() != query.shape[0] + 1:
        raise ValueError(
            f"{name}.indptr is {_form(segment.indptr)}: should hold {query.shape[0] + 1} for {query.shape[0]} queries"
        )
    return RaggedSegment(cache, fnuz, segment.indices, segment.indptr.contiguous())


def _check_indices(name: str, tensor: torch.Tensor, rank: int) -> None:
    if tensor.dim() != rank:
        raise ValueError(f"{name} is {_form(tensor)}: should have {rank} dimension{'s' * (rank > 1)}")
    if tensor.dtype not in _INDEX_TYPES:
        raise TypeError(f"{name} is {_form(tensor)}: should be int32 or int64")


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
