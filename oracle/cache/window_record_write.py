"""Which bytes must lie in the cache after tokens were written as records of the sliding window?

Token t writes if slots[t] >= 0. Its record is that of the row with its last 64 lanes rotated to positions[t] in float32
and rounded to bfloat16, which rounds none of the others:

    a = max(max |x|, 1e-4),  e = the smallest integer with a <= F * 2^e,  scale = e + 127,  code = rne(x * 2^-e)

for each group x of 64 of the first 448 lanes, F = 448 for OCP and 224 for FNUZ codes. All other bytes stay. Rotation and
its bound: `oracle.cache.rotated_records`; layout: `oracle.cache.records`. Source: the key-value half of vLLM's compiled
`fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`, FNUZ on gfx942 and OCP elsewhere.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.cache.window_record_write import Inputs, Outputs
from cases.precision import Precision
from oracle.cache import rotated_faults, rotated_records
from oracle.cache.rotated_records import Write
from oracle.check import Check
from oracle.laws import Honest, Law, Mutant


def call(inputs: Inputs) -> Write:
    """The call put plainly; raises what `rotated_records.check_form` and `rotated_records.checked` refuse."""
    rotated_records.check_form(inputs.rows, inputs.positions, inputs.cos_sin, inputs.slots)
    return rotated_records.checked(_put(inputs, inputs.positions))


def _put(inputs: Inputs, positions: torch.Tensor) -> Write:
    at = positions[: inputs.slots.numel()]
    return Write(inputs.rows, inputs.slots, at, inputs.cos_sin, inputs.cache, inputs.encoding)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The cache as it must be afterwards, a copy; the rotation is computed in `dtype`, all else is exact.

    Raises what `call` raises, and `ValueError` or `IndexError` for another form of cache and a slot beyond it.
    """
    return Outputs(rotated_records.written(call(inputs), dtype=dtype))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Codes, scales and what nobody writes bit for bit, rotated lanes within a float32 rotation's bound."""
    return rotated_records.judge(call(inputs), outputs.cache, precision)


LAWS: tuple[Law, ...] = rotated_faults.laws(call, Outputs)


def _turned_to(position: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    def answer(inputs: Inputs) -> Outputs:
        at = position(inputs.positions).clamp(0, inputs.cos_sin.shape[0] - 1)
        return Outputs(rotated_records.written(_put(inputs, at)))

    return answer


def _padded_positions(inputs: Inputs) -> Outputs | None:
    extra = inputs.positions.numel() - inputs.slots.numel()
    return _turned_to(lambda positions: positions[extra:])(inputs) if extra else None


def _all_lanes_rotated(inputs: Inputs) -> Outputs:
    """The rotation takes the first 448 lanes for pairs as well, by the same angles."""
    write = call(inputs)
    rows = write.rows.clone()
    taken = write.taken()
    pieces = rows[taken, :448].float().unflatten(1, (7, 64)).flatten(0, 1)
    angles = write.cos_sin[write.at[taken]].repeat_interleave(7, dim=0)
    rows[taken, :448] = rotated_records.rotated(pieces, angles).to(torch.bfloat16).view(-1, 448)
    return Outputs(rotated_records.written(dataclasses.replace(write, rows=rows)))


MUTANTS: tuple[Mutant, ...] = (
    Mutant("turned-to-the-next-position", "tokens were turned one position too far", _turned_to(lambda p: p + 1)),
    Mutant("turned-to-the-index", "the index in the batch were the position",
           _turned_to(lambda p: torch.arange(p.numel(), device=p.device))),
    Mutant("turned-to-the-pair", "tokens were turned to the first position of their pair",
           _turned_to(lambda p: p // 2 * 2)),
    Mutant("positions-in-32-bit-words", "positions were read as int32",
           _turned_to(lambda p: p.view(torch.int32)[: p.numel()].long())),
    Mutant("positions-from-the-end", "the last positions were used, padding included", _padded_positions),
    Mutant("all-lanes-rotated", "all lanes were rotated", _all_lanes_rotated),
    *rotated_faults.mutants(call, Outputs, fnuz=True, zero_nans=False),
)  # fmt: skip

HONEST: tuple[Honest, ...] = rotated_faults.honest(call, Outputs)
