"""Which ragged top-k list must each layer use in each step?

Always what a fresh build from its source's selection of that step gives, whoever asked before:

    decode part  = ragged list of published[source][:nd]        over table[:decode requests], B // ratio, valid[:nd]
    prefill part = ragged list of published[source][nd:nd + np] with token_offset nd, num_compressed =
                   ceil(max_model_len / ratio), num_rows = blocks * (B // ratio) of the layer's cache

for nd decode and np prefill tokens, and token blocks of B; the builds are those of `oracle.sparse_mla.decode_topk_ragged`
and `oracle.sparse_mla.prefill_topk_ragged`. A memo that does so: every source owns decode[ratio] and prefill[cache]; when
the source itself asks, it first replaces the map of that part by an empty one; whoever finds nothing builds and stores.
The ratio and the cache are keys because the builds depend on them. That a step never sees the previous one's lists rests
on the source asking first.

Source: `_decode_topk_ragged` and `_prefill_topk_ragged` of vLLM's ROCm attention for DeepSeek V4.1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cases.memory import guarded_copy, moved
from cases.precision import Precision
from cases.sparse_mla import decode_topk_ragged as decode_call
from cases.sparse_mla import prefill_topk_ragged as prefill_call
from cases.sparse_mla.topk_ragged_memo import Ask, Inputs, Outputs, Step, asks, sources
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant
from oracle.sparse_mla import decode_topk_ragged, prefill_topk_ragged, ragged

# Entries, row starts and, for decode tokens, lengths.
Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where memo and builds can be got wrong; the defaults are right."""

    never_cleared: tuple[str, ...] = ()
    cleared_by_any: bool = False
    cleared_by_first_source: bool = False
    cleared_after_reading: bool = False
    keys_ignored: tuple[str, ...] = ()
    prefill_by_ratio: bool = False
    one_memo_for_all: bool = False
    before_publishing: bool = False
    padding_kept: bool = False
    part_from_front: bool = False
    offset_ignored: bool = False
    block_undivided: bool = False
    rows_unbounded: bool = False
    compressed_unbounded: bool = False
    stale_tails: bool = False


RIGHT = Faults()


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """A fresh build for every time that a layer asks; `dtype` changes nothing, since all is integers.

    Raises NotImplementedError for a layer whose source is not among the layers, and ValueError for one that runs before
    its source and for a ratio that does not divide the block size.
    """
    del dtype
    _require(inputs)
    selecting = sources(inputs)
    found = []
    for ask in asks(inputs):
        published = inputs.steps[ask.step].published[selecting.index(inputs.layers[ask.layer].source)]
        found.append(build(inputs, ask, published, RIGHT))
    return _outputs(found)


def _require(inputs: Inputs) -> None:
    numbers = [layer.number for layer in inputs.layers]
    for place, layer in enumerate(inputs.layers):
        if layer.source not in numbers:
            raise NotImplementedError(f"layer {layer.number}: its source, layer {layer.source}, should be here too")
        if numbers.index(layer.source) > place:
            raise ValueError(f"layer {layer.number}: should run behind its source, layer {layer.source}")
    for cache in inputs.caches:
        if cache.ratio < 1 or inputs.block_size % cache.ratio:
            raise ValueError(f"ratio={cache.ratio}: should divide the block size, {inputs.block_size}")


def _outputs(found: list[Lists]) -> Outputs:
    flat, indptr, lengths = zip(*found, strict=True) if found else ((), (), ())
    return Outputs(flat, indptr, lengths)


def build(inputs: Inputs, ask: Ask, selected: torch.Tensor, faults: Faults) -> Lists:
    """The lists of one part of a step, from the top-k positions of all its tokens."""
    step, cache = inputs.steps[ask.step], inputs.caches[inputs.layers[ask.layer].cache]
    decoded, total = step.decode_tokens, step.valid.numel()
    size = inputs.block_size if faults.block_undivided else inputs.block_size // cache.ratio
    valid = torch.ones_like(step.valid) if faults.padding_kept else step.valid
    requests, table = step.token_to_request, step.tables[cache.table]
    if faults.padding_kept:
        requests = requests.clamp(0, step.seq_lens.numel() - 1)
    if ask.part == "decode":
        local = selected[:decoded]
        answer = decode_topk_ragged.reference(
            decode_call.Inputs(
                local=local, requests=requests, table=table, block_size=size, valid=valid[:decoded], holes="kept",
                flat=_none(), indptr=_none(), lengths=_none(),
            )
        )  # fmt: skip
        return answer.flat, answer.indptr, answer.lengths
    first = 0 if faults.part_from_front else decoded
    compressed = 1 << 20 if faults.compressed_unbounded else -(-inputs.max_model_len // cache.ratio)
    listed = prefill_topk_ragged.reference(
        prefill_call.Inputs(
            local=selected[first : first + total - decoded], requests=requests, query_start=step.query_start,
            seq_lens=_long(step) if faults.stale_tails else step.seq_lens, valid=valid, table=table,
            block_size=size, ratio=cache.ratio, num_compressed=compressed,
            token_offset=0 if faults.offset_ignored else decoded,
            num_rows=-1 if faults.rows_unbounded else cache.blocks * (inputs.block_size // cache.ratio),
            flat=_none(), indptr=_none(),
        )
    )  # fmt: skip
    return listed.flat, listed.indptr, _none()


def _none() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32)


def _long(step: Step) -> torch.Tensor:
    return step.seq_lens + (1 << 20)


def _remembered(inputs: Inputs, faults: Faults) -> Outputs:
    """The memo, step by step, over a buffer that sources overwrite."""
    buffer = torch.full_like(inputs.buffer, -1)
    memo: dict[tuple[str, int], dict[int, Lists]] = {}
    found = []
    first_source = sources(inputs)[0]
    for ask in asks(inputs):
        layer, step = inputs.layers[ask.layer], inputs.steps[ask.step]
        before = buffer.clone()
        if ask.publishes is not None:
            buffer[: step.valid.numel()] = step.published[ask.publishes]
        owner = first_source if faults.one_memo_for_all else layer.source
        clears = layer.number == layer.source or faults.cleared_by_any
        if faults.cleared_by_first_source:
            clears = layer.number == first_source
        if ask.part in faults.never_cleared:
            clears = False
        held = memo.setdefault((ask.part, owner), {})
        key = inputs.caches[layer.cache].ratio if ask.part == "decode" or faults.prefill_by_ratio else layer.cache
        if ask.part in faults.keys_ignored:
            key = 0
        kept = held.get(key) if faults.cleared_after_reading else None
        if clears:
            held = memo[ask.part, owner] = {}
        used = kept or held.get(key)
        if used is None:
            selected = before if faults.before_publishing and ask.publishes is not None else buffer
            used = build(inputs, ask, selected[: step.valid.numel()], faults)
        if kept is None:
            held[key] = used
        found.append(used)
    return _outputs(found)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Of every list that was asked for, the row starts, the entries in use, the capacity and, for decode, lengths."""
    del precision
    want = reference(inputs)
    checks: list[Check] = []
    script = list(asks(inputs))
    whole = len(outputs.flat) == len(outputs.indptr) == len(outputs.lengths) == len(script)
    for number, ask in enumerate(script):
        layer = inputs.layers[ask.layer].number
        name = f"step {ask.step} layer {layer} {ask.part}"
        flat, indptr = want.flat[number], want.indptr[number]
        got = (outputs.flat[number], outputs.indptr[number], outputs.lengths[number]) if whole else (None, None, None)
        used = torch.arange(flat.numel()) < int(indptr[-1])
        checks += [
            exact(f"{name} indptr", got[1], indptr, why="a fresh build from this step's selection"),
            exact(f"{name} flat", got[0], flat, mask=used, why="a fresh build from this step's selection"),
        ]
        if ask.part == "decode":
            checks.append(exact(f"{name} lengths", got[2], want.lengths[number], why="entries of each row"))
    return tuple(checks)


def _with(inputs: Inputs, **changes: object) -> Inputs:
    """Inputs some of which are replaced, with a buffer of their own."""
    fresh: dict[str, Any] = {"buffer": moved(inputs.buffer, "cpu"), **changes}
    return dataclasses.replace(inputs, **fresh)


def _in_use(outputs: Outputs) -> Outputs:
    """The answer with everything behind the last row blanked."""
    flat = [
        ragged.with_tail(one.cpu(), starts.cpu(), -1) for one, starts in zip(outputs.flat, outputs.indptr, strict=True)
    ]
    return dataclasses.replace(outputs, flat=tuple(flat))


def _chosen(first: Outputs, numbers: list[int]) -> Outputs:
    return Outputs(
        tuple(first.flat[number] for number in numbers), tuple(first.indptr[number] for number in numbers),
        tuple(first.lengths[number] for number in numbers),
    )  # fmt: skip


def _first_left_out(inputs: Inputs) -> Inputs | None:
    return _with(inputs, steps=inputs.steps[1:]) if len(inputs.steps) > 1 else None


def _later(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return _chosen(first, [number for number, ask in enumerate(asks(inputs)) if ask.step > 0])


def _back_again(inputs: Inputs) -> Inputs:
    return _with(inputs, steps=(*inputs.steps, inputs.steps[0]))


def _and_the_first(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    script = list(asks(inputs))
    return _chosen(first, [*range(len(script)), *(number for number, ask in enumerate(script) if ask.step == 0)])


def _last_layer_left_out(inputs: Inputs) -> Inputs | None:
    last = inputs.layers[-1]
    return _with(inputs, layers=inputs.layers[:-1]) if last.source != last.number else None


def _others(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    return _chosen(
        first, [number for number, ask in enumerate(asks(inputs)) if ask.layer < len(edited.layers)]
    )  # fmt: skip


def _padding_changed(inputs: Inputs) -> Inputs:
    """Other positions in the rows of tokens that are none."""
    steps = []
    for step in inputs.steps:
        published = tuple(
            guarded_copy(torch.where(step.valid[:, None], one, 3).to(torch.int32)) for one in step.published
        )
        steps.append(dataclasses.replace(step, published=published))
    return _with(inputs, steps=tuple(steps))


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


LAWS: tuple[Law, ...] = (
    Law("M25 first step left out", "a step's lists do not depend on the steps before it", _first_left_out, _later,
        "bitwise", _in_use),
    Law("M25 back to the first step", "a step that comes again gives its lists again", _back_again, _and_the_first,
        "bitwise", _in_use),
    Law("M25 other padding", "rows of tokens that are none do not matter", _padding_changed, _same, "bitwise",
        _in_use),
    Law("T1 last layer left out", "a layer that uses lists changes nobody's", _last_layer_left_out, _others, "bitwise",
        _in_use),
)  # fmt: skip


def _mutant(name: str, pitfall: str, **faults: Any) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _remembered(inputs, Faults(**faults)))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("never-cleared", "the source kept what the last step had stored", never_cleared=("decode", "prefill")),
    _mutant("decode-not-cleared", "the source cleared the prefill lists only", never_cleared=("decode",)),
    _mutant("prefill-not-cleared", "the source cleared the decode lists only", never_cleared=("prefill",)),
    _mutant("cleared-by-the-first-source", "only the model's first source cleared its lists",
            cleared_by_first_source=True),
    _mutant("cleared-after-reading", "the source used what the last step had stored, and cleared it then",
            cleared_after_reading=True),
    _mutant("cleared-by-any-layer", "every layer cleared the lists, and built from what the buffer then held",
            cleared_by_any=True),
    _mutant("shared-across-ratios", "layers of all ratios shared one decode list", keys_ignored=("decode",)),
    _mutant("shared-across-caches", "layers of all caches shared one prefill list", keys_ignored=("prefill",)),
    _mutant("prefill-by-ratio", "caches of one ratio shared a prefill list", prefill_by_ratio=True),
    _mutant("one-memo-for-all-sources", "all sources shared one memo", one_memo_for_all=True),
    _mutant("built-before-publishing", "the source built its lists from what the buffer held before its selection",
            before_publishing=True),
    _mutant("padding-listed", "every token were valid", padding_kept=True),
    _mutant("prefill-from-the-front", "the prefill tokens' rows were the first of the buffer", part_from_front=True),
    _mutant("token-offset-ignored", "the prefill tokens were the first of the batch", offset_ignored=True),
    _mutant("block-size-undivided", "a block held as many entries as tokens", block_undivided=True),
    _mutant("rows-unbounded", "entries beyond the layer's cache were listed", rows_unbounded=True),
    _mutant("compressed-unbounded", "positions beyond the longest sequence were listed", compressed_unbounded=True),
    _mutant("stale-tails", "prefill rows had all their columns, however few keys exist", stale_tails=True),
)  # fmt: skip


def _with_other_tails(inputs: Inputs) -> Outputs:
    answer = _remembered(inputs, RIGHT)
    flat = [ragged.with_tail(one, starts, -5) for one, starts in zip(answer.flat, answer.indptr, strict=True)]
    return dataclasses.replace(answer, flat=tuple(flat))


_WAYS: tuple[tuple[str, Callable[[Inputs], Outputs]], ...] = (
    ("remembered", lambda inputs: _remembered(inputs, RIGHT)),
    ("fresh-builds", reference),
    ("other-tails", _with_other_tails),
)
HONEST: tuple[Honest, ...] = tuple(Honest(name, Precision(), answer) for name, answer in _WAYS)
