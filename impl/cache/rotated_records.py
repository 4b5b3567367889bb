"""How does plain torch rotate rows and write them as packed records, and which rounding points do such writers have?"""

from __future__ import annotations

from pathlib import Path

import torch

from cases.case import Case
from cases.precision import Precision
from impl.implementation import Execution, bytes_of

_HERE = Path(__file__).parent
_FORMATS = {"float8_e4m3fn": (torch.float8_e4m3fn, 448.0), "float8_e4m3fnuz": (torch.float8_e4m3fnuz, 224.0)}

triton_source = bytes_of(_HERE / "rotated_records_triton.py", _HERE.parent / "formats" / "codes_triton.py")
torch_source = bytes_of(_HERE / "rotated_records.py")


def precision(case: Case, execution: Execution) -> Precision:
    """Rotated in float32, and nothing else rounds but to codes; a device may flush subnormal numbers."""
    del case
    return Precision(probability="exact", flushes=execution != "interpreter", note="only the rotation rounds")


def write(
    rows: torch.Tensor, at: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor,
    encoding: str, zero_nans: bool,
) -> None:  # fmt: skip
    """Writes row i, turned by row `at[i]` of the table, to slot `slots[i]`: logarithm, division, torch's own casts."""
    kind, limit = _FORMATS[encoding]
    lanes = rows[:, :448].float().unflatten(1, (7, 64))
    exponent = torch.ceil(torch.log2(lanes.abs().amax(2).clamp(min=1e-4) / limit))
    codes = (lanes / torch.exp2(exponent)[..., None]).clamp(-limit, limit).to(kind).view(torch.uint8).flatten(1)
    scales = torch.nn.functional.pad((exponent + 127).clamp(0, 255).to(torch.uint8), (0, 1))

    pairs = rows[:, 448:].float().unflatten(1, (32, 2))
    cos, sin = cos_sin[at].unflatten(1, (2, 32)).unbind(1)
    turned = torch.addcmul(pairs * cos[..., None], pairs.flip(2), torch.stack([-sin, sin], 2)).flatten(1)
    if zero_nans:
        turned = torch.where(turned.isnan(), 0.0, turned)

    block_size, start = cache.shape[1], cache.storage_offset()
    place = (slots // block_size, slots % block_size)
    data = cache.as_strided((cache.shape[0], block_size, 576), (cache.stride(0), 576, 1), start)
    tail = cache.as_strided((cache.shape[0], block_size, 8), (cache.stride(0), 8, 1), start + 576 * block_size)
    data[place] = torch.cat((codes, turned.to(torch.bfloat16).view(torch.uint8)), dim=1)
    tail[place] = scales
