"""Which MXFP8 bytes does a row of numbers become?

Blocks of 32 lanes share a scale 2^(byte - 127):

    byte = the smallest with max(amax, 2^-126) <= 448 * 2^(byte - 127), at most 254
    code = rne_e4m3(x * 2^(127 - byte))

Source: the OCP Microscaling specification with the scale rule of vLLM's `mxfp8_e4m3_quantize`, evaluated exactly.
"""

import torch

from oracle.formats import numbers

BLOCK = 32
_FLOOR = 2.0**-126


def scale_bytes(amax: torch.Tensor) -> torch.Tensor:
    """The scale bytes, uint8, of blocks whose largest magnitude is `amax` (float32 or float64, not negative, finite)."""
    exponent = numbers.scale_exponent(amax.clamp(min=_FLOOR), 448.0)
    return (exponent + numbers.E8M0_BIAS).clamp(0, 254).to(torch.uint8)


def scaled(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`rows` [..., L] over their scale 2^(byte - 127), `scales` [..., L / 32], exactly, in float64."""
    blocks = rows.double().unflatten(-1, (-1, BLOCK))
    return torch.ldexp(blocks, 127.0 - scales.double()[..., None]).flatten(-2)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., L] and scale bytes uint8 [..., L / 32] of finite rows, L a multiple of 32."""
    scales = scale_bytes(rows.unflatten(-1, (-1, BLOCK)).abs().amax(-1))
    return numbers.encode(scaled(rows, scales), "float8_e4m3fn"), scales
