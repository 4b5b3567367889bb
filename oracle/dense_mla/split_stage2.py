"""What is the second stage of split decode, and how far from it may an implementation land?

Request b has n_b keys and s_b splits, of which

    v_b = min(s_b, ceil(n_b / granularity), exported_b)

were filled (without `exported`, the first two). Each of its rows merges its first v_b partials,

    m = max_z lse_z,   w_z = exp(lse_z - m),   out = sum_z w_z o_z / sum_z w_z,   lse = m + ln(sum_z w_z)

and is 0 with lse -inf where no split was filled. A split in which a row sees no key has lse -inf and is left out. What the
other slots hold was never written. Where the answer was packed, it is copied, and the log-sum-exp is not this stage's.

Source: the stage behind AITER's split decode without a plan (`mla_decode_fwd`), which vLLM's ROCm MLA backend takes for
small batches. The budget is that of `oracle.dense_mla.part_merge`.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.dense_mla.split_stage2 import DTYPES, Inputs, Outputs
from cases.memory import guarded, guarded_copy, moved
from cases.precision import Precision
from oracle.check import Check, bounded, exact, wrong_form
from oracle.dense_mla.part_merge import Parts, budget, merged
from oracle.dense_mla.part_merge_ways import FAULTS, Way, as_if_contiguous, compute, cut, rounded, way_of
from oracle.laws import Honest, Law, Mutant


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The merge in `dtype` (float32 or float64), a row at a time; a row without a filled split is 0 with lse -inf. A packed
    answer is copied, and its lse is NaN.

    Raises `ValueError` or `TypeError` for what is no call.
    """
    check_call(inputs)
    if inputs.answer_packed:
        return Outputs(_packed(inputs).to(dtype), torch.full(inputs.out.shape[:2], math.nan, dtype=dtype))
    return Outputs(*merged(parts_of(inputs), dtype))


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none: `ValueError` for shapes, strides and tables, `TypeError` for dtypes."""
    partials, lse, out = inputs.partials, inputs.lse, inputs.out
    if partials.dim() != 4:
        raise ValueError(f"partials={list(partials.shape)}: should be [rows, splits, heads, lanes]")
    rows, splits, heads, lanes = partials.shape
    if partials.dtype != torch.float32 or lse.dtype != torch.float32:
        raise TypeError(f"partials={partials.dtype}, lse={lse.dtype}: should be torch.float32")
    if lse.shape != (rows, splits, heads, 1):
        raise ValueError(f"lse={list(lse.shape)}: should be {[rows, splits, heads, 1]}")
    if not partials.is_contiguous() or not lse.is_contiguous():
        raise ValueError("partials and lse: should be contiguous")
    if out.shape != (rows, heads, lanes):
        raise ValueError(f"out={list(out.shape)}: should be {[rows, heads, lanes]}")
    if out.dtype not in DTYPES.values():
        raise TypeError(f"out={out.dtype}: should be bfloat16 or float16")
    requests = inputs.query_starts.shape[0] - 1
    for name in ("query_starts", "key_starts", "split_starts", "exported"):
        table = getattr(inputs, name)
        if table is None:
            continue
        if table.dtype != torch.int32:
            raise TypeError(f"{name}={table.dtype}: should be torch.int32")
        wanted = requests + (name != "exported")
        if table.shape != (wanted,):
            raise ValueError(f"{name}={list(table.shape)}: should be {[wanted]}")
    if int(inputs.query_starts[-1]) != rows:
        raise ValueError(f"query_starts ends at {int(inputs.query_starts[-1])}: should end at {rows} rows")
    if int((inputs.split_starts[1:] - inputs.split_starts[:-1]).max()) > splits:
        raise ValueError(f"split_starts: no request should have more than {splits} splits")
    if inputs.granularity < 1:
        raise ValueError(f"granularity={inputs.granularity}: should be positive")


def filled(inputs: Inputs) -> torch.Tensor:
    """How many splits of each request were filled, int64 [requests]."""
    lengths = (inputs.key_starts[1:] - inputs.key_starts[:-1]).long()
    counts = (inputs.split_starts[1:] - inputs.split_starts[:-1]).long()
    count = torch.minimum(counts, (lengths + inputs.granularity - 1) // inputs.granularity)
    return count if inputs.exported is None else torch.minimum(count, inputs.exported.long())


def parts_of(inputs: Inputs, counts: torch.Tensor | None = None) -> Parts:
    """The first `counts` splits of each request's rows as parts, all others empty; by default the filled ones."""
    counts = filled(inputs) if counts is None else counts
    rows = (inputs.query_starts[1:] - inputs.query_starts[:-1]).long()
    live = torch.arange(inputs.partials.shape[1], device=counts.device) < counts.repeat_interleave(rows)[:, None]
    exponents = torch.where(live[..., None], inputs.lse[..., 0], -math.inf)
    return Parts(inputs.partials.transpose(0, 1), exponents.transpose(0, 1))


def _packed(inputs: Inputs) -> torch.Tensor:
    return inputs.partials.view(inputs.out.dtype).flatten()[: inputs.out.numel()].view(inputs.out.shape).clone()


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The merged rows and their log-sum-exp, each within its budget before its last rounding; a packed answer bit for bit."""
    check_call(inputs)
    form = inputs.out.dtype
    if inputs.answer_packed:
        form_check = wrong_form("lse", outputs.lse, torch.empty(inputs.out.shape[:2], device="meta"))
        copied = exact("out", outputs.out, _packed(inputs), why="where nothing was split the answer is copied")
        return (copied,) if form_check is None else (copied, form_check)
    truth = budget(parts_of(inputs), precision)
    return (
        bounded("out", outputs.out, truth.out, truth.out_allowed, dtype=form, rounding=form,
                why="outside the budget of a merge in fp32"),
        bounded("lse", outputs.lse, truth.lse, truth.lse_allowed, dtype=torch.float32, rounding=torch.float32,
                why="outside the budget of a natural log-sum-exp in fp32"),
    )  # fmt: skip


def _fresh(inputs: Inputs, **changes: torch.Tensor) -> Inputs:
    """The call with some tensors replaced, in memory of its own."""
    copies = {
        name: guarded_copy(changes.get(name, getattr(inputs, name)))
        for name in ("partials", "lse", "query_starts", "key_starts", "split_starts")
    }
    rows, _, heads, lanes = copies["partials"].shape
    exported = changes.get("exported", inputs.exported)
    return Inputs(
        partials=copies["partials"],
        lse=copies["lse"],
        query_starts=copies["query_starts"],
        key_starts=copies["key_starts"],
        split_starts=copies["split_starts"],
        exported=None if exported is None else guarded_copy(exported),
        granularity=inputs.granularity,
        answer_packed=inputs.answer_packed,
        out=guarded((rows, heads, lanes), inputs.out.dtype),
    )


def _split(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit of calls in which something is merged."""
    return lambda inputs: None if inputs.answer_packed else edit(inputs)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _refilled(inputs: Inputs) -> Inputs | None:
    dead = torch.isneginf(parts_of(inputs).exponents).transpose(0, 1)
    unread = dead & ~torch.isneginf(inputs.lse[..., 0])
    if not bool(unread.any()):
        return None
    lse = torch.where(unread, 900.0, inputs.lse[..., 0])[..., None]
    return _fresh(inputs, partials=torch.where(dead[..., None], 2.0, inputs.partials), lse=lse)


def _counts_exported(inputs: Inputs) -> Inputs:
    """The number of filled splits said three times over: lengths and splits allow as many as there are."""
    count = filled(inputs)
    keys = torch.nn.functional.pad((count * inputs.granularity).cumsum(0), (1, 0)).int()
    return _fresh(inputs, exported=count.int(), key_starts=keys)


def _splits_reversed(inputs: Inputs) -> Inputs:
    """The filled splits of every row in the reverse order."""
    counts = filled(inputs).repeat_interleave((inputs.query_starts[1:] - inputs.query_starts[:-1]).long())
    place = torch.arange(inputs.partials.shape[1])
    order = torch.where(place < counts[:, None], counts[:, None] - 1 - place, place)
    rows = torch.arange(order.shape[0])[:, None]
    return _fresh(inputs, partials=inputs.partials[rows, order], lse=inputs.lse[rows, order])


def _heads_reversed(inputs: Inputs) -> Inputs:
    return _fresh(inputs, partials=inputs.partials.flip(2), lse=inputs.lse.flip(2))


LAWS: tuple[Law, ...] = (
    Law("J9 unfilled slots refilled", "what a slot without keys holds does not matter", _split(_refilled), _same, "bitwise"),
    Law("J5 filled splits said otherwise", "only the least of the three counts matters", _split(_counts_exported), _same,
        "bitwise"),
    Law("J18 splits reversed", "the order of the splits moves roundings only", _split(_splits_reversed), _same, "budget"),
    Law("J2 heads reversed", "a head depends on its own partials only", _split(_heads_reversed),
        lambda first, inputs, edited: Outputs(first.out.flip(1), first.lse.flip(1)), "bitwise"),
    Law("M29 same call twice", "the same call gives the same bits", _split(lambda inputs: _fresh(inputs)), _same, "bitwise"),
)  # fmt: skip


def _finished(inputs: Inputs, parts: Parts, way: Way) -> Outputs:
    out, lse = compute(parts, way)
    return Outputs(rounded(out, inputs.out.dtype), lse)


def _answer(way: Way) -> Callable[[Inputs], Outputs]:
    def answer(inputs: Inputs) -> Outputs:
        if inputs.answer_packed:
            return Outputs(_packed(inputs), torch.full(inputs.out.shape[:2], math.nan))
        return _finished(inputs, parts_of(inputs), way)

    return answer


_RIGHT = _answer(Way())


def _counted(count: Callable[[Inputs], torch.Tensor]) -> Callable[[Inputs], Outputs | None]:
    """The answer whose filled splits are counted otherwise."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.answer_packed:
            return None
        counts = count(inputs).clamp(0, inputs.partials.shape[1])
        return _finished(inputs, parts_of(inputs, counts), Way())

    return answer


def _without_exported(inputs: Inputs) -> torch.Tensor:
    return filled(dataclasses.replace(inputs, exported=None))


def _of_splits(inputs: Inputs) -> torch.Tensor:
    return (inputs.split_starts[1:] - inputs.split_starts[:-1]).long()


def _with_grain(change: Callable[[int], int]) -> Callable[[Inputs], torch.Tensor]:
    return lambda inputs: filled(dataclasses.replace(inputs, granularity=change(inputs.granularity), exported=None))


def _rounded_down(inputs: Inputs) -> torch.Tensor:
    lengths = (inputs.key_starts[1:] - inputs.key_starts[:-1]).long()
    return torch.minimum(filled(inputs), lengths // inputs.granularity)


def _splits_of_the_first(inputs: Inputs) -> torch.Tensor:
    return torch.minimum(filled(inputs), _of_splits(inputs)[:1])


def _first_row_for_all(inputs: Inputs) -> Outputs | None:
    """Every row of a request merges the partials of its first one."""
    first = (
        inputs.query_starts[:-1].long().repeat_interleave((inputs.query_starts[1:] - inputs.query_starts[:-1]).long())
    )
    if inputs.answer_packed:
        return Outputs(_RIGHT(inputs).out[first], _RIGHT(inputs).lse[first])
    return _RIGHT(dataclasses.replace(inputs, partials=inputs.partials[first], lse=inputs.lse[first]))


def _read_as(order: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs | None]:
    """Log-sum-exps whose inner dimensions are read in another order."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.answer_packed:
            return None
        return _RIGHT(dataclasses.replace(inputs, lse=order(inputs.lse)))

    return answer


def _packed_read_as_fp32(inputs: Inputs) -> Outputs | None:
    if not inputs.answer_packed:
        return None
    return Outputs(rounded(inputs.partials[:, 0], inputs.out.dtype), _RIGHT(inputs).lse)


def _never_packed(inputs: Inputs) -> Outputs | None:
    """An answer taken for packed where it is not."""
    return None if inputs.answer_packed else Outputs(_packed(inputs), _RIGHT(inputs).lse)


def _out_strides_ignored(inputs: Inputs) -> Outputs | None:
    if inputs.out.is_contiguous():
        return None
    memory = moved(inputs.out, inputs.out.device)
    right = _RIGHT(inputs)
    as_if_contiguous(memory).copy_(right.out)
    return Outputs(memory.contiguous(), right.lse)


def _truncated(inputs: Inputs) -> Outputs | None:
    if inputs.answer_packed:
        return None
    out, lse = compute(parts_of(inputs), Way())
    return Outputs(cut(out, inputs.out.dtype), lse)


def _skipped_on_empty(inputs: Inputs) -> Outputs | None:
    """A row without a filled split is not stored."""
    if inputs.answer_packed:
        return None
    right = _RIGHT(inputs)
    empty = torch.isneginf(right.lse)
    return Outputs(torch.where(empty[..., None], moved(inputs.out, "cpu"), right.out), right.lse)


# Reports of faults that have been seen: ROCm/aiter#2720 (first-row-of-a-request-for-all), #3641 (splits-alone-count),
# #4350 (one-slot-too-many), vllm-project/vllm#37442 (store-skipped-where-empty), vllm-project/vllm#54639 (lse-none).
MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(name, pitfall, _answer(way_of(name)))
        for name, pitfall in FAULTS.items()
        if name != "nan-to-num-everywhere"
    ),
    Mutant("splits-alone-count", "every split of a request were filled", _counted(_of_splits)),
    Mutant("all-slots-read", "every slot were filled",
           _counted(lambda inputs: torch.full_like(filled(inputs), inputs.partials.shape[1]))),
    Mutant("one-slot-too-many", "one slot more were filled", _counted(lambda inputs: filled(inputs) + 1)),
    Mutant("exported-count-ignored", "what the first stage says of its splits were ignored", _counted(_without_exported)),
    Mutant("exported-count-alone", "what the first stage says of its splits alone counted",
           _counted(lambda inputs: filled(inputs) if inputs.exported is None else inputs.exported.long())),
    Mutant("granularity-halved", "requests were split at half the granularity", _counted(_with_grain(lambda g: g // 2))),
    Mutant("granularity-doubled", "requests were split at twice the granularity",
           _counted(lambda inputs: torch.minimum(filled(inputs), _with_grain(lambda g: 2 * g)(inputs)))),
    Mutant("filled-splits-rounded-down", "a split that is not full were left out", _counted(_rounded_down)),
    Mutant("splits-of-the-first-request", "all requests had the splits of the first one", _counted(_splits_of_the_first)),
    Mutant("requests-shifted", "every request had the filled splits of the one behind it",
           _counted(lambda inputs: filled(inputs).roll(-1))),
    Mutant("first-row-of-a-request-for-all", "every row of a request merged the partials of its first one",
           _first_row_for_all),
    Mutant("lse-read-heads-first", "log-sum-exps were [heads, splits]",
           _read_as(lambda lse: lse.reshape(lse.shape[0], lse.shape[2], lse.shape[1], 1).transpose(1, 2).contiguous())),
    Mutant("packed-answer-read-as-fp32", "a packed answer were fp32", _packed_read_as_fp32),
    Mutant("partials-taken-for-packed", "partials were a packed answer", _never_packed),
    Mutant("out-strides-ignored", "the output were contiguous", _out_strides_ignored),
    Mutant("output-truncated", "the output were cut off instead of rounded", _truncated),
    Mutant("store-skipped-where-empty", "a row without a filled split were not stored", _skipped_on_empty),
    Mutant("lse-none", "no log-sum-exp were returned", lambda inputs: Outputs(_RIGHT(inputs).out, None)),  # type: ignore[arg-type]
)  # fmt: skip

_PLAIN = Precision(probability="exact", systematic_ulps=0.0, exponential_ulps=2.0, flushes=False)

HONEST: tuple[Honest, ...] = (
    Honest("two-passes", _PLAIN, _RIGHT),
    Honest("running-and-rescaled", _PLAIN, _answer(Way(order="running"))),
    Honest("running-backwards", _PLAIN, _answer(Way(order="running", backwards=True))),
    Honest("weights-divided-first", _PLAIN, _answer(Way(order="shared_first"))),
)
