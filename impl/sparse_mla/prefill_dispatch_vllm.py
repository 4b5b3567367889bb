"""Which prefill calls does vLLM hand to AITER's OPUS kernel?

Its functions get stand-ins that have the form and the device of a tensor and no more, so that a call "on a GPU" can be
asked about anywhere; what they do not answer raises. For a whole call, the kernels that it may end in say who was called.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cases.sparse_mla.prefill_dispatch import Form, Inputs, Outputs, PrefillCall
from impl.sources import vllm
from impl.sparse_mla.decode import VLLM_MODULE, vllm_loader
from impl.sparse_mla.prefill_dispatch import VLLM_PREDICATE, VLLM_PREFILL

_OPUS = "_rocm_sparse_attn_prefill_ragged_aiter_opus"
_TRITON = ("_rocm_sparse_attn_prefill_ragged_triton", "_rocm_sparse_attn_prefill_triton")
_IMPORT = "_get_aiter_sparse_prefill_opus"


def run(inputs: Inputs) -> Outputs:
    """The predicate's answers, or where whole calls end up."""
    loader = vllm_loader(inputs.arch, inputs.out.device)
    predicate = loader.symbol(VLLM_MODULE, VLLM_PREDICATE)
    prefill = loader.symbol(VLLM_MODULE, VLLM_PREFILL)
    decided = []
    for call in inputs.calls:
        query, keys, out = _Described(call.query), _Described(call.keys), _Described(call.out)
        sink = None if call.sink is None else _Described(call.sink)
        if inputs.question == "predicate":
            decided.append(bool(predicate(query, keys, sink, out)))
            continue
        with _watched(loader, call) as ended_in:
            prefill(
                q=query, kv=keys.unsqueeze(1), indices=None, topk_length=None, scale=1.0, head_dim=512,
                nope_head_dim=448, rope_head_dim=64, attn_sink=sink, output=out, ragged_indices=keys,
                ragged_indptr=keys,
            )  # fmt: skip
        decided.append(ended_in == [_OPUS])
    inputs.out.copy_(torch.tensor(decided, dtype=torch.bool))
    return Outputs(inputs.out)


class _Described:
    """What can be asked of a tensor without looking into it."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self.shape = torch.Size(form.shape)
        self.ndim = len(form.shape)
        self.dtype = getattr(torch, form.dtype)
        self.device = torch.device(form.device)
        self.is_cuda = self.device.type == "cuda"

    def stride(self, dimension: int | None = None) -> Any:
        """All strides, or one."""
        return self._form.strides if dimension is None else self._form.strides[dimension]

    def unsqueeze(self, dimension: int) -> _Described:
        """With a dimension of one element inserted."""
        return self._with(lambda sizes: (*sizes[:dimension], 1, *sizes[dimension:]))

    def squeeze(self, dimension: int) -> _Described:
        """Without a dimension of one element."""
        return self._with(lambda sizes: (*sizes[:dimension], *sizes[dimension + 1 :]))

    def __getitem__(self, rows: slice) -> _Described:
        length = len(range(*rows.indices(self.shape[0])))
        return _Described(dataclasses.replace(self._form, shape=(length, *self.shape[1:])))

    def _with(self, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> _Described:
        shape, strides = change(self._form.shape), change(self._form.strides)
        return _Described(dataclasses.replace(self._form, shape=shape, strides=strides))


@contextlib.contextmanager
def _watched(loader: vllm.Loader, call: PrefillCall) -> Iterator[list[str]]:
    """For the duration of a `with`, the kernels of the prefill do nothing but note their names, and OPUS is there or not."""
    ended_in: list[str] = []

    def noting(name: str) -> Callable[..., bool]:
        def kernel(*_: object, **__: object) -> bool:
            ended_in.append(name)
            return True

        return kernel

    kernel: Any = noting("the kernel itself") if call.opus else None
    with contextlib.ExitStack() as stack:
        for name in (_OPUS, *_TRITON):
            stack.enter_context(loader.replaced(VLLM_MODULE, name, noting(name)))
        stack.enter_context(loader.replaced(VLLM_MODULE, _IMPORT, lambda: kernel))
        yield ended_in
