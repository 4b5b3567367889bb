"""What is a call of sparse MLA prefill, and when is it none?"""

import dataclasses

import torch
from jaxtyping import Float, Float32, Int

DTYPES = (torch.bfloat16, torch.float16)
_INDEX_TYPES = (torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class PrefillInputs:
    """The call: each query attends over rows of one plain tensor; a row is key and value at once.

    query, kv: both bfloat16 or both float16; every stride is free. The rows that some query reads are finite, all others
    may hold anything. scale multiplies the products; sink holds natural-log logits, of which the first `heads` count.
    out: as wide as a row or as its first nope_lanes; its dtype (that of the query or float32) takes the last rounding.

    Ragged form: query t reads the rows `indices[indptr[t]:indptr[t+1]]`; `indices` may be longer than `indptr[-1]`, and
    `indptr[0]` need not be 0. Dense form: query t reads the entries among the first `lengths[t]` columns of `dense[t]`; a
    length below 0 or above the width is taken for 0 or the width, and without `lengths` the number of non-negative
    entries is the limit. Where both are given, the ragged form counts. An entry outside `[0, rows)` is skipped, and
    duplicates count as often as they stand.
    """

    query: Float[torch.Tensor, "queries heads lanes"]
    kv: Float[torch.Tensor, "rows 1 lanes"]
    scale: float
    sink: Float32[torch.Tensor, " sinks"] | None
    nope_lanes: int
    rope_lanes: int
    out: Float[torch.Tensor, "queries heads out_lanes"]
    indices: Int[torch.Tensor, " capacity"] | None = None
    indptr: Int[torch.Tensor, " queries_plus_one"] | None = None
    dense: Int[torch.Tensor, "queries width"] | None = None
    lengths: Int[torch.Tensor, " queries"] | None = None

    @property
    def rows(self) -> int:
        """Rows of `kv`."""
        return self.kv.shape[0]

    @property
    def ragged(self) -> bool:
        """Whether the ragged form counts."""
        return self.indices is not None and self.indptr is not None


@dataclasses.dataclass(frozen=True)
class PrefillOutputs:
    """The answer, and the log-sum-exp without the sink (natural logarithm, -inf without a valid key) where the
    implementation has it."""

    out: Float[torch.Tensor, "queries heads out_lanes"]
    lse: Float32[torch.Tensor, "queries heads"] | None = None


def refuse_malformed(inputs: PrefillInputs) -> None:
    """Raise ValueError or TypeError with one sentence if the inputs are no call."""
    query, kv, out, sink = inputs.query, inputs.kv, inputs.out, inputs.sink
    if query.dim() != 3:
        raise ValueError(f"query is {_form(query)}: should have three dimensions, [queries, heads, lanes]")
    queries, heads, lanes = query.shape
    if kv.dim() != 3 or kv.shape[1] != 1:
        raise ValueError(f"kv is {_form(kv)}: should be [rows, 1, lanes]")
    if query.dtype not in DTYPES or kv.dtype != query.dtype:
        raise TypeError(f"query is {_form(query)} and kv {_form(kv)}: should be both bfloat16 or both float16")
    if inputs.nope_lanes < 1 or inputs.rope_lanes < 0 or inputs.nope_lanes + inputs.rope_lanes != lanes:
        raise ValueError(
            f"nope_lanes={inputs.nope_lanes}, rope_lanes={inputs.rope_lanes}: should sum to the query's {lanes} lanes"
        )
    if kv.shape[2] != lanes:
        raise ValueError(f"kv is {_form(kv)}: should have the query's {lanes} lanes")
    if out.dim() != 3 or out.shape[:2] != query.shape[:2] or out.shape[2] not in (inputs.nope_lanes, lanes):
        raise ValueError(f"out is {_form(out)}: should be [{queries}, {heads}, {inputs.nope_lanes} or {lanes}]")
    if out.dtype not in (query.dtype, torch.float32):
        raise TypeError(f"out is {_form(out)}: should be {_name(query.dtype)} or float32")
    if sink is not None and (sink.dim() != 1 or sink.numel() < heads):
        raise ValueError(f"sink is {_form(sink)}: should hold a logit for each of {heads} heads")
    if sink is not None and sink.dtype != torch.float32:
        raise TypeError(f"sink is {_form(sink)}: should be float32")
    if inputs.ragged:
        indptr = _integers("indptr", inputs.indptr, 1)
        _integers("indices", inputs.indices, 1)
        if indptr.numel() != queries + 1:
            raise ValueError(f"indptr is {_form(indptr)}: should hold {queries + 1} for {queries} queries")
        return
    if inputs.dense is None:
        raise ValueError("indices and indptr, or dense: one form should be given")
    dense = _integers("dense", inputs.dense, 2)
    if dense.shape[0] != queries:
        raise ValueError(f"dense is {_form(dense)}: should have a row for each of {queries} queries")
    if inputs.lengths is not None and _integers("lengths", inputs.lengths, 1).numel() != queries:
        raise ValueError(f"lengths is {_form(inputs.lengths)}: should hold one for each of {queries} queries")


def _integers(name: str, tensor: torch.Tensor | None, rank: int) -> torch.Tensor:
    assert tensor is not None
    if tensor.dim() != rank:
        raise ValueError(f"{name} is {_form(tensor)}: should have {rank} dimension{'s' * (rank > 1)}")
    if tensor.dtype not in _INDEX_TYPES:
        raise TypeError(f"{name} is {_form(tensor)}: should be int32 or int64")
    return tensor


def _form(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)}{list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
