"""Which edits of a merge have a known effect on its answer?

An edit returns fresh inputs and leaves the given ones alone. `expect` turns the first answer into the one that the edited
call must give.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.dcp.combine import Inputs, Outputs
from cases.memory import guarded_copy, is_vast
from oracle.laws import Law


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    return first


def _without_messages(answer: Outputs) -> Outputs:
    return Outputs(answer.out, answer.lse)


@dataclasses.dataclass(frozen=True)
class Messages:
    """What was sent, where an implementation shows it."""

    sent: torch.Tensor | None


def _messages(answer: Outputs) -> Messages:
    return Messages(answer.sent)


def _edits(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit, for calls of several ranks whose memory can be copied."""
    return lambda inputs: None if inputs.world == 1 or is_vast(inputs.outs) else edit(inputs)


def _one_order(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit, where every element is summed in the same order: a library's may depend on an element's place."""

    def edited(inputs: Inputs) -> Inputs | None:
        free = inputs.ranks == "processes" and inputs.world > 2 and inputs.mode != "all_to_all"
        return None if free else edit(inputs)

    return edited


def _known(inputs: Inputs) -> torch.Tensor:
    """bool [world, rows, heads]: where a rank's own log-sum-exp says that it had keys."""
    return torch.isfinite(inputs.lses)


def _empties_restated(inputs: Inputs) -> Inputs | None:
    """Every rank that says that it had no key says so in another way."""
    known = _known(inputs)
    if bool(known.all()):
        return None
    number = torch.arange(known.numel()).view(known.shape) % 3
    other = torch.tensor([-math.inf, math.inf, math.nan])[number]
    return dataclasses.replace(inputs, lses=guarded_copy(torch.where(known, inputs.lses, other)))


def _empties_littered(inputs: Inputs) -> Inputs | None:
    """What empty ranks hold for an answer becomes something else."""
    known = _known(inputs)
    if bool(known.all()):
        return None
    lanes = torch.arange(inputs.outs.shape[-1])
    litter = torch.where(lanes % 2 == 0, math.nan, 7.0).to(inputs.outs.dtype)
    return dataclasses.replace(inputs, outs=guarded_copy(torch.where(known[..., None], inputs.outs, litter)))


def _lengths_scaled(inputs: Inputs) -> Inputs | None:
    if inputs.local_lengths is None or not inputs.local_lengths.numel():
        return None
    return dataclasses.replace(inputs, local_lengths=guarded_copy(inputs.local_lengths * 5))


def _lengths_said_by_the_ranks(inputs: Inputs) -> Inputs | None:
    """No lengths, and the ranks that they make empty say it themselves."""
    lengths, starts = inputs.local_lengths, inputs.query_start
    if lengths is None or starts is None:
        return None
    lses = guarded_copy(inputs.lses)
    lses[:, int(starts[-1]) :] = -math.inf
    for rank, request in (lengths == 0).nonzero().tolist():
        lses[rank, int(starts[request]) : int(starts[request + 1])] = -math.inf
    return dataclasses.replace(inputs, lses=lses, local_lengths=None, query_start=None)


def _sent(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit, for calls that send messages."""
    return lambda inputs: edit(inputs) if inputs.mode == "all_to_all" else None


def _any_bits(inputs: Inputs) -> Inputs | None:
    """Any low halves, and of ranks that say that they had no key any bits of an infinity or a NaN."""
    if inputs.local_lengths is not None:
        return None
    drawn = (torch.arange(inputs.lses.numel()) * 0x9E3779B1 + 0x7F81).view(inputs.lses.shape) & 0xFFFFFFFF
    held = inputs.lses.contiguous().view(torch.int32).long() & ~0xFFFF
    bits = torch.where(_known(inputs), held | (drawn & 0xFFFF), drawn - (1 << 31) | 0x7F800000)
    return dataclasses.replace(inputs, lses=guarded_copy(bits.to(torch.int32)).view(torch.float32))


def _bits_replaced(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    """The messages with the lanes that they had and the bits of the new log-sum-exps."""
    if first.sent is None:
        return first
    words = edited.lses.view(torch.int32)
    if first.sent.dtype == torch.int16:
        halves = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], -1)
        carried = torch.where(halves >= 1 << 15, halves - (1 << 16), halves).to(torch.int16)
    else:
        carried = words[..., None]
    runs = carried.unflatten(2, (inputs.world, -1)).movedim(2, 1).to(first.sent.device)
    lanes = inputs.outs.shape[-1]
    return Outputs(first.out, first.lse, torch.cat([first.sent[..., :lanes], runs], -1))


def _compacted(inputs: Inputs) -> Inputs:
    """The same numbers in memory with other strides."""
    lses = guarded_copy(inputs.lses.view(torch.int32), gaps=(2, 1)).view(torch.float32)
    return dataclasses.replace(inputs, outs=guarded_copy(inputs.outs, gaps=(4, 2, 2)), lses=lses)


def _negated(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, outs=guarded_copy(-inputs.outs))


def _negative(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    return Outputs(-first.out, first.lse)


def _heads_reversed(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, outs=guarded_copy(inputs.outs.flip(2)), lses=guarded_copy(inputs.lses.flip(2)))


def _reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    out, lse = first.out.flip(2), first.lse.flip(2) if first.lse is not None else None
    if inputs.mode != "all_gather_all_reduce":
        # The last head of all now is the first rank's first.
        out, lse = out.flip(0), lse.flip(0) if lse is not None else None
    return Outputs(out, lse)


def _rows_reversed(inputs: Inputs) -> Inputs | None:
    if inputs.query_start is not None:
        return None
    return dataclasses.replace(inputs, outs=guarded_copy(inputs.outs.flip(1)), lses=guarded_copy(inputs.lses.flip(1)))


def _rows_turned(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    return Outputs(first.out.flip(1), first.lse.flip(1) if first.lse is not None else None)


def _ranks_permuted(inputs: Inputs) -> Inputs:
    """Another rank holds each shard; who owns which heads stays."""
    lengths = None if inputs.local_lengths is None else guarded_copy(inputs.local_lengths.flip(0))
    return dataclasses.replace(
        inputs, outs=guarded_copy(inputs.outs.flip(0)), lses=guarded_copy(inputs.lses.flip(0)), local_lengths=lengths
    )


def _in_one_process(inputs: Inputs) -> Inputs | None:
    """The ranks of processes, where no order of a sum is the library's: two ranks, or none that sums."""
    if inputs.ranks == "one_process" or (inputs.world > 2 and inputs.mode != "all_to_all"):
        return None
    return dataclasses.replace(inputs, ranks="one_process")


def _bitwise(
    name: str, claim: str, edit: Callable[[Inputs], Inputs | None],
    expect: Callable[[Outputs, Inputs, Inputs], Outputs] = _same,
) -> Law:  # fmt: skip
    return Law(name, claim, _edits(edit), expect, "bitwise", _without_messages)


LAWS: tuple[Law, ...] = (
    _bitwise("M1 empties restated", "-inf, +inf and NaN all say that a rank had no key", _empties_restated),
    _bitwise("M2 empties littered", "what an empty rank holds is not used", _empties_littered),
    _bitwise("M3 lengths scaled", "of a local length it matters only whether it is 0", _lengths_scaled),
    _bitwise("M4 lengths left out", "a length of 0 says the same as a log-sum-exp of -inf", _lengths_said_by_the_ranks),
    _bitwise("M5 other strides", "strides do not matter", _compacted),
    _bitwise("M6 answers negated", "the merge is linear in the answers, and rounding is symmetric", _negated, _negative),
    _bitwise("M7 heads reversed", "heads do not see each other", _one_order(_heads_reversed), _reversed),
    _bitwise("M8 rows reversed", "rows do not see each other", _one_order(_rows_reversed), _rows_turned),
    _bitwise("M9 ranks in one process", "where nobody chooses an order, real ranks answer as one process does",
             _in_one_process),
    Law("M10 shards permuted", "a merge does not depend on who holds which shard", _edits(_ranks_permuted), _same,
        "budget", _without_messages),
    Law("M11 other bits", "a message carries the bits of a log-sum-exp, whatever they mean", _edits(_sent(_any_bits)),
        _bits_replaced, "bitwise", _messages),
    Law("M12 lengths in messages", "a length of 0 sends what a log-sum-exp of -inf sends",
        _edits(_sent(_lengths_said_by_the_ranks)), _same, "bitwise", _messages),
)  # fmt: skip
