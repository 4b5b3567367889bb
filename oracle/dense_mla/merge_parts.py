"""What is the merge of attention parts, and how far from it may an implementation land?

    m = max_i lse_i,   w_i = exp(lse_i - m),   out = sum_i w_i o_i / sum_i w_i,   lse = m + ln(sum_i w_i)

for each row and head, over the parts i that are not empty. A part is empty where its lse is -inf, +inf or NaN: some
kernels mark so a part in which a row sees no key. What an empty part holds is left out, not multiplied by 0; a NaN in a
part that is not empty goes through. A row whose parts are all empty is 0, with lse -inf. A part that is not empty holds
finite numbers or NaN, however little it weighs.

Source: the log-sum-exp merge of split attention (Ye et al., arXiv 2501.01005, section 2.2), as the decode and
context-parallel routes of vLLM's ROCm MLA backend use it. The budget is that of `oracle.dense_mla.part_merge`.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from cases.dense_mla.merge_parts import DTYPES, Inputs, Outputs
from cases.memory import guarded, guarded_copy, is_vast, moved
from cases.precision import Precision
from oracle.check import Check, bounded
from oracle.dense_mla.part_merge import Parts, budget, merged
from oracle.dense_mla.part_merge_ways import FAULTS, Way, as_if_contiguous, compute, cut, rounded, way_of
from oracle.formats.numbers import round_to_bfloat16
from oracle.laws import Honest, Law, Mutant


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The merge in `dtype` (float32 or float64), a row at a time; a row without a part is 0 with lse -inf.

    Raises `ValueError` or `TypeError` for what is no call.
    """
    check_call(inputs)
    return Outputs(*merged(parts_of(inputs), dtype))


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none: `ValueError` for shapes, `TypeError` for dtypes."""
    parts, lse, out = inputs.parts, inputs.lse, inputs.out
    if parts.dim() != 4 or parts.shape[0] < 1:
        raise ValueError(f"parts={list(parts.shape)}: should be [parts, rows, heads, lanes] with a part")
    if parts.dtype not in DTYPES.values():
        raise TypeError(f"parts={parts.dtype}: should be bfloat16, float16 or float32")
    if lse.shape != parts.shape[:3]:
        raise ValueError(f"lse={list(lse.shape)}: should be {list(parts.shape[:3])}")
    if lse.dtype != torch.float32:
        raise TypeError(f"lse={lse.dtype}: should be torch.float32")
    if out.shape != parts.shape[1:]:
        raise ValueError(f"out={list(out.shape)}: should be {list(parts.shape[1:])}")
    if out.dtype not in (parts.dtype, torch.float32):
        raise TypeError(f"out={out.dtype}: should be {parts.dtype} or torch.float32")


def parts_of(inputs: Inputs) -> Parts:
    """The parts with every mark of emptiness as -inf."""
    return Parts(inputs.parts, torch.where(torch.isfinite(inputs.lse), inputs.lse, -math.inf))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """The merged rows and their log-sum-exp, each within its budget before its last rounding."""
    check_call(inputs)
    truth = budget(parts_of(inputs), precision)
    form = inputs.out.dtype
    return (
        bounded("out", outputs.out, truth.out, truth.out_allowed, dtype=form, rounding=form,
                why="outside the budget of a merge in fp32"),
        bounded("lse", outputs.lse, truth.lse, truth.lse_allowed, dtype=torch.float32, rounding=torch.float32,
                why="outside the budget of a natural log-sum-exp in fp32"),
    )  # fmt: skip


def _fresh(inputs: Inputs, parts: torch.Tensor, lse: torch.Tensor) -> Inputs:
    """A call with these parts in memory of its own, with the strides of the given call where the shape is the same."""
    out = guarded(parts.shape[1:], inputs.out.dtype)
    return Inputs(parts=_laid_out(parts, inputs.parts), lse=_laid_out(lse, inputs.lse), out=out)


def _laid_out(content: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if content.shape != like.shape:
        return guarded_copy(content)
    memory = moved(like, like.device)
    memory.copy_(content)
    return memory


def _near(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit of calls with rows that fit into memory."""

    def careful(inputs: Inputs) -> Inputs | None:
        vast = is_vast(inputs.parts) or is_vast(inputs.out)
        return edit(inputs) if inputs.parts.shape[1] and not vast else None

    return careful


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _with_empty_parts(inputs: Inputs, at: int) -> Inputs:
    """A part of NaN marked -inf, one of infinities marked NaN and one of zeros marked +inf, in front of part `at`."""
    shape = (3, *inputs.parts.shape[1:])
    content = torch.tensor([math.nan, math.inf, 0.0]).reshape(3, 1, 1, 1).expand(shape).to(inputs.parts.dtype)
    marks = torch.tensor([-math.inf, math.nan, math.inf]).reshape(3, 1, 1).expand(shape[:3])
    return _fresh(
        inputs, torch.cat([inputs.parts[:at], content, inputs.parts[at:]]),
        torch.cat([inputs.lse[:at], marks, inputs.lse[at:]]),
    )  # fmt: skip


def _alone(inputs: Inputs) -> Inputs | None:
    return _with_empty_parts(inputs, 0) if inputs.parts.shape[0] == 1 else None


def _empty_parts_inside(inputs: Inputs) -> Inputs:
    return _with_empty_parts(inputs, inputs.parts.shape[0] // 2)


def _refilled(inputs: Inputs) -> Inputs | None:
    """Other content and another mark for every empty part."""
    empty = ~torch.isfinite(inputs.lse)
    if not bool(empty.any()):
        return None
    parts = inputs.parts.clone()
    parts[empty] = 7.0
    return _fresh(inputs, parts, torch.where(empty, -math.inf, inputs.lse))


def _first_merged_before(inputs: Inputs) -> Inputs | None:
    """The first two parts merged into one, in fp32."""
    if inputs.parts.shape[0] < 3 or inputs.parts.dtype != torch.float32:
        return None
    head = dataclasses.replace(parts_of(inputs), values=inputs.parts[:2], exponents=parts_of(inputs).exponents[:2])
    out, lse = merged(head, torch.float64)
    # Rounding what is merged to fp32 moves weights by as much; only modest log-sum-exps keep that within the budget.
    if bool((lse[torch.isfinite(lse)].abs() > 64).any()) or not bool(torch.isfinite(out).all()):
        return None
    return _fresh(
        inputs, torch.cat([out.float()[None], inputs.parts[2:]]), torch.cat([lse.float()[None], inputs.lse[2:]])
    )


def _moved_up(inputs: Inputs) -> Inputs | None:
    """Every log-sum-exp higher by 4; only where that is exact."""
    known = inputs.lse[torch.isfinite(inputs.lse)]
    if not bool(((known + 4 - known == 4) & (known + 4 - 4 == known)).all()):
        return None
    return _fresh(inputs, inputs.parts, inputs.lse + 4)


def _doubled(inputs: Inputs) -> Inputs | None:
    live = inputs.parts[torch.isfinite(inputs.lse)].abs()
    small = live[live > 0]
    # A tiny product may be rounded as a subnormal, and a sum of tiny ones too.
    if small.numel() and (float(small.min()) < 2.0**-12 or float(small.max()) > 2.0**12):
        return None
    apart = parts_of(inputs).exponents
    top = apart.amax(0)
    if bool(((apart - top < -40) & ~torch.isneginf(apart)).any()):
        return None
    return _fresh(
        inputs, torch.where(torch.isfinite(inputs.lse)[..., None], inputs.parts * 2, inputs.parts), inputs.lse
    )


def _above_subnormals(answer: Outputs) -> Outputs:
    """Numbers that cancellation left so small that fp16 rounds them as subnormals, as zeros."""
    least = 2.0**-12 if answer.out.dtype == torch.float16 else 2.0**-100
    return Outputs(torch.where(answer.out.abs() < least, 0.0, answer.out), answer.lse)


def _taken(inputs: Inputs, dimension: int) -> Inputs:
    return _fresh(inputs, inputs.parts.flip(dimension), inputs.lse.flip(dimension))


LAWS: tuple[Law, ...] = (
    Law("J18 empty parts about one", "a part among empty ones is the answer", _near(_alone), _same, "bitwise"),
    Law("J18 empty parts inserted", "an empty part has no effect", _near(_empty_parts_inside), _same, "budget"),
    Law("J9 empty parts refilled", "what an empty part holds does not matter", _near(_refilled), _same, "bitwise"),
    Law("J18 parts reversed", "the order of the parts moves roundings only",
        _near(lambda inputs: _taken(inputs, 0)), _same, "budget"),
    Law("J5 two parts merged before", "parts may be merged in steps", _near(_first_merged_before), _same, "budget"),
    Law("J12 log-sum-exps moved up", "a constant added to all log-sum-exps is added to the answer's", _near(_moved_up),
        lambda first, inputs, edited: Outputs(first.out, first.lse + 4), "budget"),
    Law("J11 parts doubled", "twice the parts give twice the answer", _near(_doubled),
        lambda first, inputs, edited: Outputs(first.out * 2, first.lse), "bitwise", _above_subnormals),
    Law("J8 rows reversed", "a row depends on its own parts only", _near(lambda inputs: _taken(inputs, 1)),
        lambda first, inputs, edited: Outputs(first.out.flip(0), first.lse.flip(0)), "bitwise"),
    Law("J2 heads reversed", "a head depends on its own parts only", _near(lambda inputs: _taken(inputs, 2)),
        lambda first, inputs, edited: Outputs(first.out.flip(1), first.lse.flip(1)), "bitwise"),
    Law("M29 same call twice", "the same call gives the same bits",
        _near(lambda inputs: _fresh(inputs, inputs.parts, inputs.lse)), _same, "bitwise"),
)  # fmt: skip


def _answer(way: Way) -> Callable[[Inputs], Outputs]:
    def answer(inputs: Inputs) -> Outputs:
        out, lse = compute(parts_of(inputs), way)
        return Outputs(rounded(out, inputs.out.dtype), lse)

    return answer


_RIGHT = _answer(Way())


def _with_parts(change: Callable[[Inputs], Parts]) -> Callable[[Inputs], Outputs]:
    """The right merge of parts that are read wrongly."""

    def answer(inputs: Inputs) -> Outputs:
        out, lse = compute(change(inputs), Way())
        return Outputs(rounded(out, inputs.out.dtype), lse)

    return answer


def _marked(inputs: Inputs, what: str) -> Parts:
    """Log-sum-exps of which one mark is not understood."""
    lse = inputs.lse
    kept = torch.isposinf(lse) if what == "plus_infinity" else torch.isnan(lse)
    return Parts(inputs.parts, torch.where(kept, lse, torch.where(torch.isfinite(lse), lse, -math.inf)))


def _nan_weighs_as_0(inputs: Inputs) -> Parts:
    return Parts(inputs.parts, torch.where(torch.isnan(inputs.lse), 0.0, parts_of(inputs).exponents))


def _lse_order_confused(inputs: Inputs) -> Parts:
    """[rows, heads] read as [heads, rows]."""
    parts, rows, heads = inputs.lse.shape
    return Parts(inputs.parts, parts_of(inputs).exponents.transpose(1, 2).reshape(parts, rows, heads))


def _strides_ignored(name: str) -> Callable[[Inputs], Outputs | None]:
    def answer(inputs: Inputs) -> Outputs | None:
        tensor = getattr(inputs, name)
        if tensor.is_contiguous() or is_vast(tensor):
            return None
        return _RIGHT(dataclasses.replace(inputs, **{name: as_if_contiguous(tensor)}))

    return answer


def _out_strides_ignored(inputs: Inputs) -> Outputs | None:
    if inputs.out.is_contiguous() or is_vast(inputs.out):
        return None
    memory = moved(inputs.out, inputs.out.device)
    right = _RIGHT(inputs)
    as_if_contiguous(memory).copy_(right.out)
    return Outputs(memory.contiguous(), right.lse)


def _beyond(name: str) -> Callable[[Inputs], Outputs | None]:
    """Offsets of 32 bits: what lies beyond is read as NaN, or not written."""

    def answer(inputs: Inputs) -> Outputs | None:
        tensor = getattr(inputs, name)
        if not is_vast(tensor):
            return None
        late = torch.arange(tensor.shape[0]) * tensor.stride(0) >= 1 << 31
        if name == "parts":
            values = inputs.parts.clone()
            values[late] = math.nan
            return _RIGHT(dataclasses.replace(inputs, parts=values))
        right = _RIGHT(inputs)
        return Outputs(right.out.masked_fill(late[:, None, None], math.nan), right.lse)

    return answer


def _narrowed(inputs: Inputs, step: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Outputs | None:
    if inputs.out.dtype == torch.float32:
        return None
    right = compute(parts_of(inputs), Way())
    return Outputs(step(right[0], inputs.out.dtype), right[1])


def _each_part_rounded(inputs: Inputs) -> Outputs | None:
    """Each weighted part rounded to the parts' dtype before they are added."""
    parts = parts_of(inputs)
    if inputs.parts.dtype == torch.float32:
        return None
    total = compute(parts, Way())[1]
    weight = torch.where(torch.isneginf(parts.exponents), 0.0, (parts.exponents - total).exp())
    terms = rounded(weight[..., None] * inputs.parts.float(), inputs.parts.dtype).float()
    out = torch.where(weight[..., None] == 0, 0.0, terms).sum(0)
    return Outputs(rounded(out, inputs.out.dtype), total)


def _through_bfloat16(inputs: Inputs) -> Outputs | None:
    if inputs.out.dtype == torch.bfloat16:
        return None
    right = compute(parts_of(inputs), Way())
    return Outputs(round_to_bfloat16(right[0]).to(inputs.out.dtype), right[1])


# Reports of faults that have been seen: vllm-project/vllm#47079 (lse-in-base-2), sgl-project/sglang#40903
# (exponents-taken-for-the-other-base), vllm-project/vllm#39148 (both-neg-inf), #15492 (plus-infinity-kept), ROCm/aiter#3641
# (empty-split-nonzero), #4420 (empty-parts-multiplied-by-0), ROCm/ATOM#1152 (nan-to-num-everywhere), NVIDIA/cutlass#2274
# (combine-no-max-shift), vllm-project/vllm#54639 (lse-none).
MUTANTS: tuple[Mutant, ...] = (
    *(Mutant(name, pitfall, _answer(way_of(name))) for name, pitfall in FAULTS.items()),
    Mutant("lse-none", "no log-sum-exp were returned", lambda inputs: Outputs(_RIGHT(inputs).out, None)),  # type: ignore[arg-type]
    Mutant("plus-infinity-kept", "a log-sum-exp of +inf were one of a part with keys",
           _with_parts(lambda inputs: _marked(inputs, "plus_infinity"))),
    Mutant("nan-kept", "a log-sum-exp of NaN were one of a part with keys",
           _with_parts(lambda inputs: _marked(inputs, "nan"))),
    Mutant("nan-weighs-as-0", "a log-sum-exp of NaN were 0", _with_parts(_nan_weighs_as_0)),
    Mutant("lse-read-heads-first", "the log-sum-exps of a part were [heads, rows]", _with_parts(_lse_order_confused)),
    Mutant("part-strides-ignored", "the parts were contiguous", _strides_ignored("parts")),
    Mutant("lse-strides-ignored", "the log-sum-exps were contiguous", _strides_ignored("lse")),
    Mutant("out-strides-ignored", "the output were contiguous", _out_strides_ignored),
    Mutant("parts-i32", "the offset of a part had 32 bits, and what lies there were NaN", _beyond("parts")),
    Mutant("out-row-i32", "the offset of an output row had 32 bits, so that late rows were not written", _beyond("out")),
    Mutant("output-truncated", "the output were cut off instead of rounded", lambda inputs: _narrowed(inputs, cut)),
    Mutant("output-through-bfloat16", "the output were rounded to bf16 on its way", _through_bfloat16),
    Mutant("each-part-rounded", "each weighted part were rounded to the parts' type before the sum", _each_part_rounded),
)  # fmt: skip

_PLAIN = Precision(probability="exact", systematic_ulps=0.0, exponential_ulps=2.0, flushes=False)

HONEST: tuple[Honest, ...] = (
    Honest("two-passes", _PLAIN, _RIGHT),
    Honest("running-and-rescaled", _PLAIN, _answer(Way(order="running"))),
    Honest("running-backwards", _PLAIN, _answer(Way(order="running", backwards=True))),
    Honest("weights-divided-first", _PLAIN, _answer(Way(order="shared_first"))),
    Honest("weights-against-the-rounded-lse", Precision(probability="exact", systematic_ulps=2.0, flushes=False),
           _answer(Way(order="anchored"))),
)  # fmt: skip
