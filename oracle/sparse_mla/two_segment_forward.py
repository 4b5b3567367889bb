"""What is the answer of the sparse MLA forward over two packed caches, and how far from it may one land?

For query t and head h let I be the multiset of valid slots of both lists (-1 and whatever else is no slot is skipped,
duplicates count), and K_i the 512 numbers of a record. With

    s_i = scale * <q[t, h], K_i>
    Z   = sum_i exp(s_i) + exp(sink_h)                       (no sink: without the last term)
    o   = sum_i exp(s_i) * K_i / Z,   and 0 without a valid key

That is sparse MLA decode (`oracle.sparse_mla.decode`) without its rotation, for rows of prefill and decode alike: the
caller owes every row the inverse rotation and the quantisation. The budget is decode's.

Source: `triton_sparse_mla_fwd` of vLLM 0.33.0, which hands the call to AITER's `sparse_mla_fwd`. AITER's kernels differ in
ways that this op does or does not judge:

    NaN lanes            not scrubbed: selected records hold no NaN, so nothing is asked
    encoding             OCP in both caches: asked
    softmax              base 2, the scale folded after the product, or into a query rounded again: declared
    splits               values kept in bf16 by newer versions: declared
    empty rows           NaN without a sink in some kernels: wrong here, 0 is right
    entries >= slots     read out of bounds by older kernels: not asked of AITER, -1 being its only entry without a slot
    slot 0               loaded for invalid entries at weight 0, so that a NaN there poisons the row: wrong here
    invalid tiles        set the running maximum to 0, so that scores far below it vanish: wrong here

AITER's older `unified_attention_sparse_mla` is not judged: it reads plain bf16 pages through dense global slots, knows no
sink and no second list, needs heads in multiples of 16, and is documented to be wrong for rows of -1 only.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.precision import Precision
from cases.sparse_mla.decode import LANES, RECORD, DecodeInputs, DecodeOutputs, Segment
from cases.sparse_mla.two_segment_forward import Inputs, Outputs, as_decode, of_decode
from oracle.check import Check
from oracle.laws import Honest, Law, Mutant
from oracle.sparse_mla import decode

__all__ = ["HONEST", "LAWS", "MUTANTS", "judge", "reference"]

_INDEX_TYPES = (torch.int32, torch.int64)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The answer [queries, heads, 512] in `dtype` (float32 or float64), a query at a time.

    Raises `ValueError` or `TypeError` for what is no call: caches that are not uint8 [blocks, block, 584], a query that is
    not bf16 [queries, heads, 512] with lane stride 1, lists that are not int32 or int64 of one dimension on the query's
    device, an indptr without queries + 1 elements (so that swapped lists are noticed), an extra segment of which a part is
    missing, a sink without one fp32 logit a head, an output that is not bf16 in the query's shape.
    """
    _check(inputs)
    return Outputs(decode.reference(as_decode(inputs), dtype).out)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The answer against the reference, per element and in its statistics, within decode's budget."""
    if not isinstance(outputs, Outputs):
        raise TypeError(f"outputs are {type(outputs).__name__}: should be Outputs")
    checks = decode.judge(as_decode(inputs), DecodeOutputs(out=outputs.out), precision)
    return tuple(check for check in checks if check.output != "rotated_rows")


def _check(inputs: Inputs) -> None:
    query, out, sink = inputs.query, inputs.out, inputs.sink
    if query.dim() != 3 or query.shape[2] != LANES:
        raise ValueError(
            f"query={_form(query)}: should be bfloat16[queries, heads, {LANES}], as wide as a record's lanes"
        )
    if query.dtype != torch.bfloat16:
        raise TypeError(f"query={_form(query)}: should be bfloat16")
    if query.stride(2) != 1:
        raise ValueError(f"query.stride(2)={query.stride(2)}: should be 1")
    if out.shape != query.shape or out.device != query.device:
        raise ValueError(f"out={_form(out)} on {out.device}: should be as the query, {_form(query)} on {query.device}")
    if out.dtype != torch.bfloat16:
        raise TypeError(f"out={_form(out)}: should be bfloat16")
    if sink is not None and (sink.dim() != 1 or sink.numel() != query.shape[1]):
        raise ValueError(f"sink={_form(sink)}: should hold exactly one logit for each of {query.shape[1]} heads")
    if sink is not None and sink.dtype != torch.float32:
        raise TypeError(f"sink={_form(sink)}: should be float32")
    _check_segment("main", inputs.main, query)
    if inputs.extra is not None:
        _check_segment("extra", inputs.extra, query)


def _check_segment(name: str, part: Segment, query: torch.Tensor) -> None:
    cache = part.cache
    if part.indices is None or part.indptr is None:
        raise ValueError(f"{name}: should have a cache, indices and indptr, all three")
    if cache.dim() != 3 or cache.shape[2] != RECORD:
        raise ValueError(f"{name}.cache={_form(cache)}: should be uint8[blocks, block, {RECORD}]")
    if cache.dtype != torch.uint8:
        raise TypeError(f"{name}.cache={_form(cache)}: should be uint8")
    if part.encoding != "float8_e4m3fn":
        raise ValueError(f"{name}.encoding={part.encoding}: should be float8_e4m3fn in both caches")
    for what, tensor in ((f"{name}.indices", part.indices), (f"{name}.indptr", part.indptr)):
        if tensor.dim() != 1:
            raise ValueError(f"{what}={_form(tensor)}: should have one dimension")
        if tensor.dtype not in _INDEX_TYPES:
            raise TypeError(f"{what}={_form(tensor)}: should be int32 or int64")
        if tensor.device != query.device:
            raise ValueError(f"{what} on {tensor.device}: should be on the query's {query.device}")
    if part.indptr.numel() != query.shape[0] + 1:
        raise ValueError(
            f"{name}.indptr={_form(part.indptr)}: should hold {query.shape[0] + 1} offsets; are the lists swapped?"
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _answered(answer: Callable[[DecodeInputs], DecodeOutputs | None]) -> Callable[[Inputs], Outputs | None]:
    """A way of answering decode as a way of answering this op."""

    def run(inputs: Inputs) -> Outputs | None:
        found = answer(as_decode(inputs))
        return None if found is None else Outputs(found.out)

    return run


def _law(law: Law) -> Law:
    """A law of decode as a law of this op."""

    def edit(inputs: Inputs) -> Inputs | None:
        edited = law.edit(as_decode(inputs))
        return None if edited is None else of_decode(edited)

    def expect(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
        found = law.expect(DecodeOutputs(out=first.out), as_decode(inputs), as_decode(edited))
        return Outputs(found.out)

    def view(answer: Outputs) -> Outputs:
        return Outputs(law.view(DecodeOutputs(out=answer.out)).out)

    return dataclasses.replace(law, edit=edit, expect=expect, view=view)


# These speak of other forms of a list, of another encoding, of the rotation, and of the adaptive split count.
_LAWS_OF_DECODE_ONLY = ("M2 ", "M12 ", "M15 ", "M16 ")
LAWS: tuple[Law, ...] = tuple(_law(law) for law in decode.LAWS if not law.name.startswith(_LAWS_OF_DECODE_ONLY))

# Faults that need what this op does not have: dense lists, NaN in selected records, a sink that is too long, a rotation, a
# quantised output, a returned log-sum-exp, an adaptive split count, a promise about the extra cache.
_FAULTS_OF_DECODE_ONLY = (
    "one-encoding-for-both-caches", "nan-not-scrubbed", "nan-not-scrubbed-in-main", "nan-not-scrubbed-in-extra",
    "nan-not-scrubbed-in-rope", "nan-scrubbed-in-scores-only", "trust-reaches-the-main-cache", "holes-do-not-count",
    "tail-beyond-length-attended", "chunks-of-inactive-splits-lost", "sink-of-other-heads",
    "sum-of-rounded-probabilities", "log-sum-exp-in-base-2", "rows-left-unrotated", "says-rotated", "rotated-but-not-said",
    "position-of-the-next-row", "positions-from-0", "rotated-forward", "rotated-twice", "angles-in-bfloat16",
    "rotated-from-bfloat16", "cos-and-sin-swapped", "first-lanes-rotated", "halves-paired",
    "even-lane-stored-before-odd-reads", "quantised-from-bfloat16", "scale-over-16-lanes", "scale-over-64-lanes",
    "scale-byte-for-the-number-above", "scale-exponent-rounded-down", "divided-by-a-flushed-scale",
    "scales-ordered-by-block",
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = tuple(
    dataclasses.replace(mutant, answer=_answered(mutant.answer))
    for mutant in decode.MUTANTS
    if mutant.name not in _FAULTS_OF_DECODE_ONLY
)

HONEST: tuple[Honest, ...] = tuple(dataclasses.replace(way, answer=_answered(way.answer)) for way in decode.HONEST)
