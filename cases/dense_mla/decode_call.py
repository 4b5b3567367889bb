"""What is a call of dense MLA decode, and when is it none?"""

import dataclasses

import torch
from jaxtyping import Float, Float32, Int32

QUANTISED = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """The call: blocks of `qlen` query rows, one block a request, attend over the cached tokens of their request.

    query: row b * qlen + t is token t of request b; row and head strides are free. cache: a token's lanes are its key,
    the first of them its value, as many as `out` has; the pages may lie apart. slots: request b lists the tokens
    `slots[kv_indptr[b]:kv_indptr[b + 1]]`, the block's own last; slot s is place s % page of block s // page. `slots`
    may be longer than `kv_indptr[-1]`, and what stands behind, like every row that no request lists, may be anything.
    causal: token t of a block does not see the block's later tokens. Otherwise every row sees all of its request's.
    global_indptr, world, rank: the cache is one of `world` shards, whose token j stands at position j * world + rank of
    the request; the request is as long as the difference of two neighbours in global_indptr.
    scale: the model's, for scores of real numbers. query_scale, cache_scale: the real number of a stored one of fp8; they
    say nothing of bf16. splits: into how many parts a request's tokens may be cut, no more. live: the first so many
    requests count, the others fill a captured graph and their rows may come out as anything.
    """

    query: Float[torch.Tensor, "rows heads lanes"]
    cache: Float[torch.Tensor, "blocks page lanes"]
    slots: Int32[torch.Tensor, " capacity"]
    kv_indptr: Int32[torch.Tensor, " requests_plus_one"]
    qlen: int
    causal: bool
    scale: float
    query_scale: Float32[torch.Tensor, ""]
    cache_scale: Float32[torch.Tensor, ""]
    out: Float[torch.Tensor, "rows heads latent"]
    splits: int
    live: int
    global_indptr: Int32[torch.Tensor, " requests_plus_one"] | None = None
    world: int = 1
    rank: int = 0

    @property
    def requests(self) -> int:
        """Blocks of rows."""
        return self.kv_indptr.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Slots of the cache."""
        return self.cache.shape[0] * self.cache.shape[1]


@dataclasses.dataclass(frozen=True)
class DecodeOutputs:
    """The answer, and the log-sum-exp of the scores (natural logarithm, -inf for a row that sees nothing).

    A shard's answer cannot be merged without it; elsewhere an implementation may leave it out.
    """

    out: Float[torch.Tensor, "rows heads latent"]
    lse: Float32[torch.Tensor, "rows heads"] | None = None


def refuse_malformed(inputs: DecodeInputs) -> None:
    """Raise ValueError or TypeError with one sentence if the inputs are no call; no value of a tensor is looked at."""
    query, cache, out = inputs.query, inputs.cache, inputs.out
    for name, tensor in (("query", query), ("cache", cache), ("out", out)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} is {_form(tensor)}: should have three dimensions")
        if tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise ValueError(f"{name} has lane stride {tensor.stride(2)}: should be 1")
    rows, heads, lanes = query.shape
    if cache.shape[2] != lanes:
        raise ValueError(f"cache is {_form(cache)}: should have the query's {lanes} lanes")
    if cache.dtype not in (torch.bfloat16, *QUANTISED):
        raise TypeError(f"cache is {_form(cache)}: should be bfloat16, float8_e4m3fn or float8_e4m3fnuz")
    if query.dtype not in (torch.bfloat16, cache.dtype):
        raise TypeError(f"query is {_form(query)}: should be bfloat16 or of the cache's type")
    if out.shape[:2] != query.shape[:2] or not 1 <= out.shape[2] <= lanes:
        raise ValueError(f"out is {_form(out)}: should be [{rows}, {heads}, 1 to {lanes}]")
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"out is {_form(out)}: should be bfloat16 or float32")
    if inputs.qlen < 1 or rows % inputs.qlen:
        raise ValueError(f"qlen={inputs.qlen}: should be a positive divisor of the {rows} rows")
    requests = rows // inputs.qlen
    _check_offsets("kv_indptr", inputs.kv_indptr, requests)
    if inputs.slots.dtype != torch.int32 or inputs.slots.dim() != 1:
        raise TypeError(f"slots is {_form(inputs.slots)}: should be int32 of one dimension")
    for name, scale in (("query_scale", inputs.query_scale), ("cache_scale", inputs.cache_scale)):
        if scale.dtype != torch.float32 or scale.dim() != 0:
            raise TypeError(f"{name} is {_form(scale)}: should be one float32")
    if inputs.splits < 1:
        raise ValueError(f"splits={inputs.splits}: should be 1 or more")
    if not 0 <= inputs.live <= requests:
        raise ValueError(f"live={inputs.live}: should be 0 to {requests}, the requests")
    _check_shard(inputs, requests)


def _check_shard(inputs: DecodeInputs, requests: int) -> None:
    if inputs.world < 1:
        raise ValueError(f"world={inputs.world}: should be 1 or more")
    if not 0 <= inputs.rank < inputs.world:
        raise ValueError(f"rank={inputs.rank}: should be 0 to {inputs.world - 1}, below world")
    if inputs.global_indptr is not None:
        _check_offsets("global_indptr", inputs.global_indptr, requests)
        if not inputs.causal:
            raise ValueError("causal=False: global_indptr should be left out, since every row sees the whole shard")
    elif inputs.world > 1 and inputs.causal and inputs.qlen > 1:
        raise ValueError(f"world={inputs.world} without global_indptr: a causal block should have the global lengths")


def _check_offsets(name: str, offsets: torch.Tensor, requests: int) -> None:
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise TypeError(f"{name} is {_form(offsets)}: should be int32 of one dimension")
    if offsets.shape[0] != requests + 1:
        raise ValueError(f"{name} is {_form(offsets)}: should hold {requests + 1} for {requests} requests")


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
