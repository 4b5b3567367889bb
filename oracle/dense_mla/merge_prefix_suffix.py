"""What is the merge of attention over a prefix and over a suffix, and how far from it may an implementation land?

For a token before `context` with outputs p, s and natural log-sum-exps a, b,

    m = max(a, b),   out = (e^(a - m) p + e^(b - m) s) / (e^(a - m) + e^(b - m)),   lse = m + ln(e^(a - m) + e^(b - m))

where a side with log-sum-exp -inf or +inf is empty: what it holds is left out, not multiplied by 0. A token of two empty
sides is 0 with lse -inf. All other tokens copy their suffix, output and log-sum-exp, whose +inf may stay or become -inf.
Codes stand for out / out_scale, rounded to nearest even and saturated. A log-sum-exp of NaN is outside the contract.

Source: chunked prefill of vLLM's MLA layer (`merge_attn_states`), after Ye et al., arXiv 2501.01005, section 2.2. The
budget is that of `oracle.dense_mla.part_merge`; the scale of codes adds the roundings of a reciprocal and a product.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from cases.dense_mla.merge_prefix_suffix import CODES, DTYPES, Inputs, Outputs
from cases.memory import guarded_copy, is_vast, moved
from cases.precision import Precision
from oracle.check import Check, bounded, codes, exact
from oracle.dense_mla.part_merge import U32, Parts, budget, merged
from oracle.dense_mla.part_merge_ways import FAULTS, Way, as_if_contiguous, compute, cut, rounded, way_of
from oracle.formats import numbers
from oracle.formats.numbers import FormatName
from oracle.laws import Honest, Law, Mutant

_SCALED_ROUNDINGS = 3.0


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The merge in `dtype` (float32 or float64) before its rounding, divided by the scale where codes are asked for, and the
    log-sum-exp [heads, tokens], or None where nobody asks.

    Raises `ValueError` or `TypeError` for what is no call.
    """
    check_call(inputs)
    count = context_of(inputs)
    out, lse = merged(parts_of(inputs), dtype)
    out[count:] = inputs.suffix[count:].to(dtype)
    lse[count:] = inputs.suffix_lse.T[count:].to(dtype)
    if inputs.out_scale is not None:
        out = out / inputs.out_scale.to(dtype)
    return Outputs(out, None if inputs.out_lse is None else lse.T)


def check_call(inputs: Inputs) -> None:
    """Raise for a call that is none: `ValueError` for shapes, strides and a missing or needless scale, `TypeError` for
    dtypes."""
    prefix, suffix, out = inputs.prefix, inputs.suffix, inputs.out
    if prefix.dim() != 3 or suffix.shape != prefix.shape or out.shape != prefix.shape:
        raise ValueError(
            f"prefix={list(prefix.shape)}, suffix={list(suffix.shape)}, out={list(out.shape)}: should be one"
            " [tokens, heads, lanes]"
        )
    tokens, heads, _ = prefix.shape
    if prefix.dtype not in DTYPES.values() or suffix.dtype != prefix.dtype:
        raise TypeError(f"prefix={prefix.dtype}, suffix={suffix.dtype}: should be one of bfloat16, float16 and float32")
    if out.dtype != prefix.dtype and out.dtype not in CODES.values():
        raise TypeError(f"out={out.dtype}: should be {prefix.dtype}, torch.float8_e4m3fn or torch.float8_e4m3fnuz")
    for name in ("prefix_lse", "suffix_lse", "out_lse"):
        lse = getattr(inputs, name)
        if lse is not None and lse.dtype != torch.float32:
            raise TypeError(f"{name}={lse.dtype}: should be torch.float32")
        if lse is not None and lse.shape != (heads, tokens):
            raise ValueError(f"{name}={list(lse.shape)}: should be {[heads, tokens]}")
    if (out.dtype in CODES.values()) != (inputs.out_scale is not None):
        raise ValueError(f"out={out.dtype} with out_scale={inputs.out_scale}: codes and a scale should go together")
    if heads > 1 and tokens and prefix.stride(1) != suffix.stride(1):
        raise ValueError(f"head strides {prefix.stride(1)} and {suffix.stride(1)}: should be the same")
    for name in ("prefix", "suffix", "out"):
        tensor = getattr(inputs, name)
        if tokens > 1 and tensor.stride(0) != heads * tensor.stride(1):
            raise ValueError(
                f"token stride of {name}={tensor.stride(0)}: should be {heads} head strides of {tensor.stride(1)}"
            )


def context_of(inputs: Inputs) -> int:
    """How many tokens have a prefix."""
    tokens = inputs.out.shape[0]
    return tokens if inputs.context is None else min(inputs.context, tokens)


def parts_of(inputs: Inputs) -> Parts:
    """Prefix and suffix of every token as two parts, an empty side marked -inf; without a context the suffix alone."""
    lse = torch.stack([inputs.prefix_lse.T, inputs.suffix_lse.T])
    lse = torch.where(torch.isposinf(lse), -math.inf, lse)
    lse[0, context_of(inputs) :] = -math.inf
    return Parts(torch.stack([inputs.prefix, inputs.suffix]), lse)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Merged tokens within their budget before their last rounding, copied ones bit for bit (codes: within the scale's
    roundings), and the log-sum-exp so too where it was asked for."""
    check_call(inputs)
    count = context_of(inputs)
    truth = budget(parts_of(inputs), precision)
    copied = torch.arange(inputs.out.shape[0]) >= count
    want = torch.where(copied[:, None, None], inputs.suffix.double(), truth.out)
    allowed = truth.out_allowed.masked_fill(copied[:, None, None], 0.0)
    checks: list[Check] = []
    if inputs.out_scale is not None:
        scale = inputs.out_scale.double()
        want, allowed = want / scale, allowed / scale
        allowed = allowed + _SCALED_ROUNDINGS * U32 * want.abs()
        form = _format(inputs)
        low, high = (
            numbers.decode(numbers.encode(want + side * allowed, form), form) for side in (-1, 1)
        )  # fmt: skip
        checks.append(codes("out", outputs.out, low, high, dtype=inputs.out.dtype))
    else:
        form_dtype = inputs.out.dtype
        checks.append(
            bounded("out", outputs.out, want, allowed, dtype=form_dtype, rounding=form_dtype,
                    why="outside the budget of a merge in fp32, or not the suffix where there is no prefix")
        )  # fmt: skip
    if inputs.out_lse is None:
        return tuple(checks)
    merged_lse = outputs.lse
    if merged_lse is not None and merged_lse.shape == inputs.suffix_lse.shape:
        # Either infinity marks a copied suffix as empty.
        empty = torch.isposinf(inputs.suffix_lse) & torch.isneginf(merged_lse) & copied
        known = inputs.suffix_lse.masked_fill(empty, -math.inf)
        checks.append(
            exact("copied lse", merged_lse, known.contiguous(), mask=copied,
                  why="a token without a prefix has the log-sum-exp of its suffix")
        )  # fmt: skip
        merged_lse = merged_lse.masked_fill(copied, 0.0)
    checks.append(
        bounded("lse", merged_lse, truth.lse.T.masked_fill(copied, 0.0), truth.lse_allowed.T.masked_fill(copied, 0.0),
                dtype=torch.float32, rounding=torch.float32,
                why="outside the budget of a natural log-sum-exp in fp32")
    )  # fmt: skip
    return tuple(checks)


_OTHER: dict[FormatName, FormatName] = {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e4m3fnuz": "float8_e4m3fn"}


def _format(inputs: Inputs) -> FormatName:
    return "float8_e4m3fn" if inputs.out.dtype == torch.float8_e4m3fn else "float8_e4m3fnuz"


def _laid_out(content: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The content in memory of its own that lies as the given one does."""
    memory = moved(like, like.device)
    memory.copy_(content)
    return memory


def _fresh(inputs: Inputs, **changes: torch.Tensor) -> Inputs:
    """The call with some of its numbers replaced, in memory of its own with the same strides."""
    laid = {
        name: _laid_out(changes.get(name, getattr(inputs, name)), getattr(inputs, name))
        for name in ("prefix", "prefix_lse", "suffix", "suffix_lse")
    }
    return Inputs(
        prefix=laid["prefix"],
        prefix_lse=laid["prefix_lse"],
        suffix=laid["suffix"],
        suffix_lse=laid["suffix_lse"],
        context=inputs.context,
        out=moved(inputs.out, inputs.out.device),
        out_lse=None if inputs.out_lse is None else moved(inputs.out_lse, inputs.out_lse.device),
        out_scale=inputs.out_scale,
    )


def _careful(edit: Callable[[Inputs], Inputs | None]) -> Callable[[Inputs], Inputs | None]:
    """The edit of calls that have tokens, which fit into memory."""

    def careful(inputs: Inputs) -> Inputs | None:
        vast = any(is_vast(tensor) for tensor in (inputs.prefix, inputs.out))
        return edit(inputs) if inputs.out.shape[0] and not vast else None

    return careful


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _sides_swapped(inputs: Inputs) -> Inputs | None:
    count = context_of(inputs)
    if count < inputs.out.shape[0]:
        return None
    return _fresh(
        inputs, prefix=inputs.suffix, suffix=inputs.prefix, prefix_lse=inputs.suffix_lse, suffix_lse=inputs.prefix_lse
    )


def _marks_swapped(inputs: Inputs) -> Inputs | None:
    """-inf for +inf and +inf for -inf, where a token is merged."""
    count = context_of(inputs)
    changes = {}
    for name in ("prefix_lse", "suffix_lse"):
        lse = getattr(inputs, name).clone()
        lse[:, :count] = torch.where(torch.isinf(lse[:, :count]), -lse[:, :count], lse[:, :count])
        changes[name] = lse
    if not any(bool(torch.isinf(lse[:, :count]).any()) for lse in changes.values()):
        return None
    return _fresh(inputs, **changes)


def _unread_prefix_refilled(inputs: Inputs) -> Inputs | None:
    count = context_of(inputs)
    if count == inputs.out.shape[0]:
        return None
    prefix, lse = inputs.prefix.clone(), inputs.prefix_lse.clone()
    prefix[count:], lse[:, count:] = 7.0, 1e30
    return _fresh(inputs, prefix=prefix, prefix_lse=lse)


def _emptied_prefix(inputs: Inputs) -> Inputs:
    """No token has a key in its prefix: then the suffix is the answer."""
    return dataclasses.replace(
        _fresh(
            inputs, prefix=torch.zeros_like(inputs.prefix), prefix_lse=torch.full_like(inputs.prefix_lse, -math.inf)
        ), context=None,
    )  # fmt: skip


def _no_context(inputs: Inputs) -> Inputs:
    return dataclasses.replace(_fresh(inputs), context=0)


def _emptied(inputs: Inputs) -> Inputs | None:
    """Only where the whole call is such: the first answer is then known from its suffix."""
    prefix_empty = torch.isinf(inputs.prefix_lse[:, : context_of(inputs)]).all()
    suffix_empty = torch.isinf(inputs.suffix_lse).any()
    return _no_context(inputs) if bool(prefix_empty) and not bool(suffix_empty) else None


def _moved_up(inputs: Inputs) -> Inputs | None:
    for lse in (inputs.prefix_lse, inputs.suffix_lse):
        known = lse[torch.isfinite(lse)]
        if not bool(((known + 4 - known == 4) & (known + 4 - 4 == known)).all()):
            return None
    return _fresh(inputs, prefix_lse=inputs.prefix_lse + 4, suffix_lse=inputs.suffix_lse + 4)


def _higher(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.out, None if first.lse is None else first.lse + 4)


def _heads_reversed(inputs: Inputs) -> Inputs:
    return _fresh(
        inputs, prefix=inputs.prefix.flip(1), suffix=inputs.suffix.flip(1), prefix_lse=inputs.prefix_lse.flip(0),
        suffix_lse=inputs.suffix_lse.flip(0),
    )  # fmt: skip


def _flipped_heads(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    out = (
        first.out.view(torch.uint8).flip(1).view(first.out.dtype)
        if first.out.element_size() == 1
        else first.out.flip(1)
    )
    return Outputs(out, None if first.lse is None else first.lse.flip(0))


def _lse_relaid(inputs: Inputs) -> Inputs:
    """Log-sum-exps the other way round in memory."""
    turned: dict[str, Any] = {name: guarded_copy(getattr(inputs, name).T).T for name in ("prefix_lse", "suffix_lse")}
    return dataclasses.replace(_fresh(inputs), **turned)


LAWS: tuple[Law, ...] = (
    Law("J18 sides swapped", "prefix and suffix are merged alike", _careful(_sides_swapped), _same, "budget"),
    Law("J18 empty prefix is no context", "a suffix whose prefix is empty is the answer", _careful(_emptied), _same,
        "bitwise", lambda answer: _zeros_unsigned(answer)),
    Law("J9 marks swapped", "either infinity marks an empty side", _careful(_marks_swapped), _same, "bitwise"),
    Law("J9 unread prefix refilled", "a prefix that a token has not does not matter", _careful(_unread_prefix_refilled),
        _same, "bitwise"),
    Law("J12 log-sum-exps moved up", "a constant added to all log-sum-exps is added to the answer's", _careful(_moved_up),
        _higher, "budget"),
    Law("J2 heads reversed", "a head depends on its own sides only", _careful(_heads_reversed), _flipped_heads, "bitwise"),
    Law("J9 log-sum-exps laid out otherwise", "strides of the log-sum-exps do not matter", _careful(_lse_relaid), _same,
        "bitwise"),
    Law("M29 same call twice", "the same call gives the same bits", _careful(lambda inputs: _fresh(inputs)), _same,
        "bitwise"),
)  # fmt: skip


def _zeros_unsigned(answer: Outputs) -> Outputs:
    """Without the sign of zeros, which a sum with 0 may lose."""
    wide = answer.out.float()
    return Outputs(torch.where(wide == 0, 0.0, wide), answer.lse)


@dataclasses.dataclass(frozen=True)
class _Ending:
    """How merged tokens become the answer; the defaults are right."""

    context: Callable[[Inputs], int] = context_of
    finish: Callable[[torch.Tensor, Inputs], torch.Tensor] | None = None
    copied_from: str = "suffix"


def _finished(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """fp32 numbers as they are stored."""
    if inputs.out_scale is None:
        return rounded(out, inputs.out.dtype)
    return _coded(_over(out, inputs), inputs)


def _scale(inputs: Inputs) -> torch.Tensor:
    assert inputs.out_scale is not None
    return inputs.out_scale


def _over(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Numbers over the scale, by way of its reciprocal."""
    return out * (1.0 / _scale(inputs))


def _coded(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return numbers.encode(out, _format(inputs)).view(inputs.out.dtype)


_TWO_PASSES = Way()
_RIGHT_ENDING = _Ending()


def _answer(
    way: Way = _TWO_PASSES, ending: _Ending = _RIGHT_ENDING, parts: Callable[[Inputs], Parts] = parts_of
) -> Callable[[Inputs], Outputs]:
    def answer(inputs: Inputs) -> Outputs:
        count = ending.context(inputs)
        out, lse = compute(parts(inputs), way)
        source, source_lse = getattr(inputs, ending.copied_from), getattr(inputs, f"{ending.copied_from}_lse")
        out[count:], lse[count:] = source[count:].float(), source_lse.T[count:]
        finish = ending.finish or _finished
        return Outputs(finish(out, inputs), None if inputs.out_lse is None else lse.T.contiguous())

    return answer


_RIGHT = _answer()


def _coded_only(change: Callable[[torch.Tensor, Inputs], torch.Tensor]) -> Callable[[Inputs], Outputs | None]:
    """An answer whose codes are made otherwise."""
    return lambda inputs: _answer(ending=_Ending(finish=change))(inputs) if inputs.out_scale is not None else None


def _cut(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return cut(out, inputs.out.dtype)


def _plus_infinity_kept(inputs: Inputs) -> Parts:
    lse = torch.stack([inputs.prefix_lse.T, inputs.suffix_lse.T])
    lse[0, context_of(inputs) :] = -math.inf
    return Parts(torch.stack([inputs.prefix, inputs.suffix]), lse)


def _everything_merged(inputs: Inputs) -> Outputs | None:
    """Tokens without a prefix merged with what lies there."""
    if context_of(inputs) == inputs.out.shape[0]:
        return None
    return _RIGHT(dataclasses.replace(inputs, context=None))


def _indexed(turn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Outputs]:
    """Log-sum-exps read otherwise, of both sides."""

    def answer(inputs: Inputs) -> Outputs:
        turned: dict[str, Any] = {name: turn(getattr(inputs, name)) for name in ("prefix_lse", "suffix_lse")}
        return _RIGHT(dataclasses.replace(inputs, **turned))

    return answer


def _strides_of_the_prefix(inputs: Inputs) -> Outputs | None:
    """The suffix's log-sum-exps read with the strides of the prefix's."""
    if inputs.suffix_lse.stride() == inputs.prefix_lse.stride():
        return None
    heads, tokens = inputs.suffix_lse.shape
    turned = as_if_contiguous(inputs.suffix_lse.T if inputs.suffix_lse.T.is_contiguous() else inputs.suffix_lse)
    return _RIGHT(dataclasses.replace(inputs, suffix_lse=turned.reshape(heads, tokens)))


def _ignored(*names: str) -> Callable[[Inputs], Outputs | None]:
    def answer(inputs: Inputs) -> Outputs | None:
        given = [getattr(inputs, name) for name in names]
        if all(tensor.is_contiguous() for tensor in given) or any(is_vast(tensor) for tensor in given):
            return None
        packed: dict[str, Any] = {n: as_if_contiguous(t) for n, t in zip(names, given, strict=True)}
        return _RIGHT(dataclasses.replace(inputs, **packed))

    return answer


def _out_strides_ignored(inputs: Inputs) -> Outputs | None:
    if inputs.out.is_contiguous() or is_vast(inputs.out):
        return None
    memory = moved(inputs.out, inputs.out.device)
    right = _RIGHT(inputs)
    as_if_contiguous(memory).view(torch.uint8).copy_(right.out.view(torch.uint8))
    return Outputs(memory.contiguous(), right.lse)


def _beyond(name: str) -> Callable[[Inputs], Outputs | None]:
    """Offsets of 32 bits: what lies beyond is read as NaN, or not written."""

    def answer(inputs: Inputs) -> Outputs | None:
        tensor = getattr(inputs, name)
        if not is_vast(tensor):
            return None
        place = torch.arange(tensor.shape[0])[:, None] * tensor.stride(0) + torch.arange(
            tensor.shape[1]
        ) * tensor.stride(1)
        late = (place >= 1 << 31)[..., None]
        if name != "out":
            return _RIGHT(dataclasses.replace(inputs, **{name: tensor.masked_fill(late, math.nan)}))
        right = _RIGHT(inputs)
        return Outputs(right.out.masked_fill(late, math.nan), right.lse)

    return answer


# Reports of faults that have been seen: sgl-project/sglang#40903 (exponents-taken-for-the-other-base),
# vllm-project/vllm#47079 (lse-in-base-2), #39148 (both-neg-inf), #15492 (plus-infinity-kept).
MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(name, pitfall, _answer(way_of(name)))
        for name, pitfall in FAULTS.items()
        if name not in ("nan-to-num-everywhere", "exponents-of-the-first-row", "empty-row-lse-finite")
    ),
    Mutant("plus-infinity-kept", "a log-sum-exp of +inf were one of a side with keys", _answer(parts=_plus_infinity_kept)),
    Mutant("tokens-beyond-the-context-merged", "tokens without a prefix were merged with what lies there",
           _everything_merged),
    Mutant("context-off-by-one", "the last token with a prefix copied its suffix",
           _answer(ending=_Ending(context=lambda inputs: max(0, context_of(inputs) - 1)))),
    Mutant("context-ignored-by-the-copy", "every token copied its suffix", _answer(ending=_Ending(context=lambda inputs: 0))),
    Mutant("prefix-copied", "tokens without a prefix copied it instead of their suffix",
           _answer(ending=_Ending(copied_from="prefix"))),
    Mutant("lse-read-tokens-first", "the log-sum-exps were [tokens, heads]",
           _indexed(lambda lse: lse.reshape(lse.shape[1], lse.shape[0]).T)),
    Mutant("lse-taken-for-contiguous", "the log-sum-exps were contiguous", _ignored("prefix_lse", "suffix_lse")),
    Mutant("suffix-lse-with-the-strides-of-the-prefix", "both log-sum-exps had the strides of the prefix's",
           _strides_of_the_prefix),
    Mutant("heads-taken-for-contiguous", "prefix and suffix were contiguous", _ignored("prefix", "suffix")),
    Mutant("out-strides-ignored", "the output were contiguous", _out_strides_ignored),
    Mutant("output-truncated", "the output were cut off instead of rounded",
           lambda inputs: _answer(ending=_Ending(finish=_cut))(inputs)
           if inputs.out.dtype in (torch.bfloat16, torch.float16) else None),
    Mutant("scale-multiplied", "codes stood for the answer times the scale",
           _coded_only(lambda out, inputs: _coded(out * _scale(inputs), inputs))),
    Mutant("scale-left-out", "codes had no scale", _coded_only(_coded)),
    Mutant("codes-not-saturated", "numbers beyond the largest code became NaN", _coded_only(
        lambda out, inputs: numbers.encode(_over(out, inputs), _format(inputs), "nan").view(inputs.out.dtype))),
    Mutant("codes-clamped-at-the-other-maximum", "codes of one format were clamped at the largest of the other",
           _coded_only(lambda out, inputs: _coded(_over(out, inputs).clamp(-240, 240), inputs))),
    Mutant("codes-of-the-other-format", "codes were those of the other 8-bit format", _coded_only(
        lambda out, inputs: numbers.encode(_over(out, inputs), _OTHER[_format(inputs)]).view(inputs.out.dtype))),
    Mutant("codes-through-the-parts-type", "the merge were rounded to the parts' type before it became codes", _coded_only(
        lambda out, inputs: _finished(rounded(out, inputs.prefix.dtype).float(), inputs))),
    Mutant("prefix-i32", "offsets into the prefix had 32 bits, and what lies there were NaN", _beyond("prefix")),
    Mutant("suffix-i32", "offsets into the suffix had 32 bits, and what lies there were NaN", _beyond("suffix")),
    Mutant("out-i32", "offsets into the output had 32 bits, so that late heads were not written", _beyond("out")),
)  # fmt: skip

_PLAIN = Precision(probability="exact", systematic_ulps=0.0, exponential_ulps=2.0, flushes=False)


def _divided(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return _finished(out, inputs) if inputs.out_scale is None else _coded(out / _scale(inputs), inputs)


def _copied_marks_cleaned(inputs: Inputs) -> Outputs:
    right = _RIGHT(inputs)
    return (
        right if right.lse is None else Outputs(right.out, torch.where(torch.isposinf(right.lse), -math.inf, right.lse))
    )


HONEST: tuple[Honest, ...] = (
    Honest("two-passes", _PLAIN, _RIGHT),
    Honest("running-and-rescaled", _PLAIN, _answer(Way(order="running"))),
    Honest("running-backwards-and-divided", _PLAIN,
           _answer(Way(order="running", backwards=True), _Ending(finish=_divided))),
    Honest("weights-divided-first", _PLAIN, _answer(Way(order="shared_first"))),
    Honest("copied-marks-cleaned", _PLAIN, _copied_marks_cleaned),
)  # fmt: skip
