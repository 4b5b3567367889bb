"""How are vLLM's own merges called without its groups?

Every rank calls vLLM's function in turn, in this process, with a group that stands for all ranks. What a rank hands to the
first collective is found by a first round, which ends there; the second round gets what that collective gives. Nothing is
repaired on the way in or out.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cases.dcp.combine import Inputs, Outputs
from impl.dcp.combine import VLLM_FUNCTIONS, VLLM_MODULE
from impl.sources import vllm
from impl.sparse_mla.decode import vllm_loader


class _Handed(Exception):
    """Carries what a rank hands to its first collective out of vLLM's function."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("handed to a collective")
        self.tensor = tensor


class _Group:
    """One rank's view of a group whose other ranks run before or after it.

    handed: what every rank hands to its first collective; None in the first round. The sum of the last one is put into
    `owed` when all ranks have handed over their shares.
    """

    def __init__(self, world: int, rank: int, handed: Sequence[torch.Tensor] | None) -> None:
        self.world_size = world
        self.rank_in_group = rank
        self.device_group = self
        self.share = torch.empty(0)
        self.owed = torch.empty(0)
        self._handed = handed

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if self._handed is None:
            raise _Handed(tensor.clone())
        return torch.cat(list(self._handed), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] //= self.world_size
        self.share, self.owed = tensor, tensor.new_empty(shape)
        return self.owed

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.share, self.owed = tensor, tensor.new_empty(tensor.shape)
        return self.owed

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor, group: Any, async_op: bool) -> Any:
        """`torch.distributed`'s, for messages in runs of equal length."""
        del group, async_op
        if self._handed is None:
            raise _Handed(sent.clone())
        runs = [other.view(self.world_size, -1)[self.rank_in_group] for other in self._handed]
        received.view(self.world_size, -1).copy_(torch.stack(runs))
        return SimpleNamespace(wait=lambda: None)


def run(inputs: Inputs) -> Outputs:
    """What vLLM's function returns on every rank; it raises what it raises."""
    loader = vllm_loader("gfx950", inputs.outs.device)
    _complete(loader.symbol(VLLM_MODULE, "CorrectAttnCPOutKernel").kernel)
    world = inputs.world
    handed: list[torch.Tensor] = []
    for rank in range(world):
        try:
            answer = _called(loader, inputs, _Group(world, rank, None))
        except _Handed as carried:
            handed.append(carried.tensor)
        else:
            # A rank alone asks for nothing.
            return Outputs(*(part[None] for part in answer))
    groups = [_Group(world, rank, handed) for rank in range(world)]
    answers = [_called(loader, inputs, group) for group in groups]
    sent = None
    if inputs.mode == "all_to_all":
        rows, heads, lanes = inputs.outs.shape[1:]
        narrow = inputs.outs.element_size() == 2
        messages = torch.stack(handed).view(torch.int16 if narrow else torch.int32)
        sent = messages.view(world, world, rows, heads // world, lanes + 1 + narrow)
    else:
        _add(groups)
    outs, lses = zip(*answers, strict=True)
    return Outputs(torch.stack(outs), torch.stack(lses), sent)


def _complete(kernel: Any) -> None:
    """Give an interpreted kernel what vLLM's launcher asks a compiled one for: its compile-time parameters."""
    if not hasattr(kernel, "constexprs"):
        parameters = inspect.signature(kernel.fn).parameters.values()
        kernel.constexprs = [place for place, one in enumerate(parameters) if "constexpr" in str(one.annotation)]


def _add(groups: Sequence[_Group]) -> None:
    """Pay every rank its part of the sum, taken in the order of the ranks and in the shares' dtype."""
    total = groups[0].share.clone()
    for group in groups[1:]:
        total += group.share
    whole = groups[0].owed.shape == total.shape
    for group in groups:
        own = total if whole else total.chunk(group.world_size, dim=1)[group.rank_in_group]
        group.owed.copy_(own)


def _called(loader: vllm.Loader, inputs: Inputs, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
    rank = group.rank_in_group
    function = loader.symbol(VLLM_MODULE, VLLM_FUNCTIONS[inputs.mode])
    lengths = inputs.local_lengths
    with _distributed(loader, group):
        answer: tuple[torch.Tensor, torch.Tensor] = function(
            inputs.outs[rank],
            inputs.lses[rank],
            group,
            return_lse=True,
            is_lse_base_on_e=inputs.base == "natural",
            seq_lens=None if lengths is None else lengths[rank],
            query_start_loc=inputs.query_start,
        )
    return answer


@contextlib.contextmanager
def _distributed(loader: vllm.Loader, group: _Group) -> Iterator[None]:
    """For the duration of a `with`, the group's exchange is the one of `torch.distributed` that vLLM calls."""
    with loader.replaced(VLLM_MODULE, "dist", group):
        yield
