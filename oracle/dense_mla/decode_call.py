"""What does a call of dense MLA decode say: which tokens does a row see, what stands there, what do stored numbers mean?"""

import torch

from cases.dense_mla.decode_call import QUANTISED, DecodeInputs
from oracle.formats import numbers


def listed(inputs: DecodeInputs, request: int) -> torch.Tensor:
    """The slots of a request in order, int64; raises ValueError for one that the cache has not."""
    first, last = int(inputs.kv_indptr[request]), int(inputs.kv_indptr[request + 1])
    if not 0 <= first <= last <= inputs.slots.shape[0]:
        raise ValueError(
            f"kv_indptr={first}, {last} of request {request}: should ascend within the {inputs.slots.shape[0]} slots"
        )
    slots = inputs.slots[first:last].long()
    wrong = (slots < 0) | (slots >= inputs.capacity)
    if bool(wrong.any()):
        place = int(wrong.int().argmax())
        raise ValueError(
            f"slots[{first + place}]={int(slots[place])}: should be 0 to {inputs.capacity - 1}, a slot of the cache"
        )
    return slots


def visible(inputs: DecodeInputs, row: int) -> int:
    """How many of its request's tokens a row sees: the first ones of its list, whatever the kind of block."""
    request, token = divmod(row, inputs.qlen)
    held = int(inputs.kv_indptr[request + 1]) - int(inputs.kv_indptr[request])
    if not inputs.causal:
        return held
    if inputs.global_indptr is None:
        return max(0, held - inputs.qlen + token + 1)
    length = int(inputs.global_indptr[request + 1]) - int(inputs.global_indptr[request])
    last = length - inputs.qlen + token
    # Positions rank, rank + world, ... up to `last`; none where that lies before the first.
    return min(held, max(0, (last - inputs.rank) // inputs.world + 1))


def stored(inputs: DecodeInputs, slots: torch.Tensor) -> torch.Tensor:
    """The rows in `slots` as they are stored, [n, lanes]."""
    page = inputs.cache.shape[1]
    return inputs.cache[slots // page, slots % page]


def numbers_of(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stored numbers in float32 or float64, without their scale; the codes of fp8 are decoded by table."""
    if rows.dtype == torch.bfloat16:
        return rows.to(dtype)
    encoding: numbers.Encoding = "float8_e4m3fn" if rows.dtype == torch.float8_e4m3fn else "float8_e4m3fnuz"
    return numbers.decode(rows.view(torch.uint8), encoding, dtype)


def scale_of(tensor: torch.Tensor, scale: torch.Tensor) -> float:
    """The real number of a stored 1: bf16 stores real numbers."""
    return float(scale) if tensor.dtype in QUANTISED else 1.0
