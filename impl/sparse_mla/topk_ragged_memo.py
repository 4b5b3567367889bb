"""Who remembers ragged top-k lists for the layers of an index source, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias, cast

import torch

from cases.case import Case
from cases.sparse_mla import decode_topk_ragged as decode_call
from cases.sparse_mla import prefill_topk_ragged as prefill_call
from cases.sparse_mla.topk_ragged_memo import Ask, Inputs, Layer, Outputs, Part, asks
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons, without_triton
from impl.sparse_mla import decode_topk_ragged, indices_vllm, layer_vllm, prefill_topk_ragged

_HERE = Path(__file__).parent
_EXACT = exact_but("integers")

# Entries, row starts and, for decode tokens, lengths.
Lists: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TopkMemo:
    """The lists that the layers of a rank use, remembered by the layer that selects for them.

    Raises NotImplementedError for a layer whose source is not among the layers: nobody would ever clear its lists.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._source = {layer.number: layer.source for layer in layers}
        for number, source in self._source.items():
            if source not in self._source:
                raise NotImplementedError(f"layer {number}: its source, layer {source}, should be on this rank too")
        self._lists: dict[tuple[int, Part], dict[int, Lists]] = {}

    def lists(self, number: int, part: Part, key: int, build: Callable[[], Lists]) -> Lists:
        """What layer `number` uses: `build()`, or what that gave a layer of the same source with the same key.

        key: all on which a build depends besides the source's selection and the step, which is the ratio for decode
        tokens and the cache for prefill tokens. The source forgets a part whenever it asks for it, so it must be the
        first to ask in a step. Raises KeyError for a number that is no layer's.
        """
        source = self._source[number]
        if number == source:
            self._lists[source, part] = {}
        held = self._lists.setdefault((source, part), {})
        if key not in held:
            held[key] = build()
        return held[key]


def play(inputs: Inputs, used: Callable[[Ask], Lists]) -> Outputs:
    """The whole script; what `used` says is copied, without what lies behind the last row, before the next layer asks."""
    found = []
    for ask in asks(inputs):
        if ask.publishes is not None:
            selected = inputs.steps[ask.step].published[ask.publishes]
            inputs.buffer[: selected.shape[0]].copy_(selected)
        entries, starts, rows = (tensor.clone() for tensor in used(ask))
        found.append((indices_vllm.without_leftovers(entries, starts), starts, rows))
    flat, indptr, lengths = zip(*found, strict=True) if found else ((), (), ())
    return Outputs(flat, indptr, lengths)


def _run_ours(inputs: Inputs) -> Outputs:
    memo = TopkMemo(inputs.layers)

    def used(ask: Ask) -> Lists:
        layer = inputs.layers[ask.layer]
        key = inputs.caches[layer.cache].ratio if ask.part == "decode" else layer.cache
        return memo.lists(layer.number, ask.part, key, lambda: _built(inputs, ask))

    return play(inputs, used)


def _built(inputs: Inputs, ask: Ask) -> Lists:
    """The lists of one part from what the buffer holds, by the plain torch routes."""
    step, cache = inputs.steps[ask.step], inputs.caches[inputs.layers[ask.layer].cache]
    first = 0 if ask.part == "decode" else step.decode_tokens
    last = step.decode_tokens if ask.part == "decode" else step.valid.numel()
    local = inputs.buffer[first:last]
    size = inputs.block_size // cache.ratio
    memory = local.new_empty(local.numel()), local.new_empty(local.shape[0] + 1), local.new_empty(local.shape[0])
    if ask.part == "decode":
        decoded = _torch_route(decode_topk_ragged.IMPLS).run(
            decode_call.Inputs(
                local, step.token_to_request, step.tables[cache.table], size, step.valid[:last], "kept", *memory
            )
        )
        return decoded.flat, decoded.indptr, decoded.lengths
    listed = _torch_route(prefill_topk_ragged.IMPLS).run(
        prefill_call.Inputs(
            local, step.token_to_request, step.query_start, step.seq_lens, step.valid, step.tables[cache.table],
            size, cache.ratio, -(-inputs.max_model_len // cache.ratio), first, cache.blocks * size, *memory[:2],
        )
    )  # fmt: skip
    return listed.flat, listed.indptr, local.new_empty(0)


def _torch_route(impls: tuple[Impl, ...]) -> Impl:
    return next(impl for impl in impls if impl.name == "torch-gather")


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.topk_ragged_memo_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return [*layer_vllm.missing(layer_vllm.V41), *without_triton()]


def _key(case: Case) -> str:
    return (
        f"{case.settings['topk']} {case.settings['block_size']} {case.settings['ratio']} {case.settings['structure']}"
    )


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=_run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(
            _HERE / "topk_ragged_memo.py", _HERE / "decode_topk_ragged.py", _HERE / "prefill_topk_ragged.py"
        ),
    ),
    Impl(
        name="vllm-triton",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=lambda: layer_vllm.fingerprint(layer_vllm.V41, "vllm.v1.attention.ops.rocm_aiter_mla_sparse"),
    ),
)
