"""Which heads must padded queries have, and which of a kernel's heads are the real ones?

From n heads to m >= n, rows apart:

    n = m             the queries themselves, and the kernel's answer itself
    n divides m       padded[j] = query[j // (m / n)];    real head i is the kernel's head i (m / n)
    otherwise         padded[j] = query[j % n];           real head i is the kernel's head i

for the kernel's output and its log-sum-exp alike, bit for bit. Padded queries are packed, since kernels read them so. But
where query rows have room for m heads (a row stride of m head strides) and n does not divide m, their padding heads may
be whatever lies there. Of the kernel's answer views are handed on: a copy behind the kernel is not ordered against the
exchange with other ranks. (Prefill copies into its caller's memory.) Source: `get_mla_padded_q` and its counterparts in
vLLM's AITER MLA backend. Its round-robin route takes the first n of the kernel's heads even where n divides m, which
this does not follow: for 2, 4 and 8 heads padded to 16 these are copies of the first half.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch

from cases.dense_mla.pad_heads import Inputs, Outputs
from cases.memory import guarded_copy
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

Scheme = Literal["right", "interleaved", "tiled"]


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where padding can be got wrong; the defaults are right."""

    padded: Scheme = "right"
    out: Scheme = "right"
    lse: Scheme = "right"
    zero_heads: bool = False
    last_repeated: bool = False
    turned: bool = False
    lse_left_padded: bool = False
    wrong_forms: tuple[int, ...] = ()


RIGHT = Faults()


def sources(heads: int, kernel_heads: int, scheme: Scheme = "right") -> list[int]:
    """For each of the kernel's heads the real head that it repeats; raises ValueError where there are fewer of them."""
    if kernel_heads < heads:
        raise ValueError(f"kernel_heads={kernel_heads}: should be at least {heads}, the heads there are")
    if _interleaved(heads, kernel_heads, scheme):
        return [j * heads // kernel_heads for j in range(kernel_heads)]
    return [j % heads for j in range(kernel_heads)]


def real_heads(heads: int, kernel_heads: int, scheme: Scheme = "right") -> list[int]:
    """For each real head the kernel's head that answers for it."""
    if _interleaved(heads, kernel_heads, scheme):
        return [i * -(-kernel_heads // heads) % kernel_heads for i in range(heads)]
    return list(range(heads))


def _interleaved(heads: int, kernel_heads: int, scheme: Scheme) -> bool:
    return scheme == "interleaved" or (scheme == "right" and kernel_heads % heads == 0)


def _free_heads(inputs: Inputs) -> bool:
    """Whether padding heads may be whatever lies in the room for them."""
    query = inputs.query
    return inputs.kernel_heads % query.shape[1] != 0 and query.stride(0) == inputs.kernel_heads * query.stride(1)


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Padded queries and real heads, in new tensors that stand for views where views are asked for; `dtype` changes
    nothing.

    Raises ValueError for a kernel with fewer heads than there are, and for an answer of another number of heads.
    """
    del dtype
    for name, answer in (("kernel_out", inputs.kernel_out), ("kernel_lse", inputs.kernel_lse)):
        if answer is not None and answer.shape[1] != inputs.kernel_heads:
            raise ValueError(f"{name}={answer.shape[1]} heads: should be {inputs.kernel_heads}, the kernel's")
    return _answered(inputs, RIGHT)


def _answered(inputs: Inputs, faults: Faults) -> Outputs:
    heads, many = inputs.query.shape[1], inputs.kernel_heads
    source = sources(heads, many, faults.padded)
    if faults.last_repeated:
        source = [min(j, heads - 1) for j in range(many)]
    if faults.turned:
        source = [*source[1:], source[0]]
    padded = _taken(inputs.query, source)
    if faults.zero_heads:
        real = real_heads(heads, many)
        padding = torch.tensor([j not in real for j in range(many)])
        padded.view(torch.uint8)[:, padding] = 0
    lse = inputs.kernel_lse
    if lse is not None:
        lse = lse.clone() if faults.lse_left_padded else _taken(lse, real_heads(heads, many, faults.lse))
    forms = [1, int(heads == many), 1, int(lse is not None)]
    for place in faults.wrong_forms:
        forms[place] = 1 - forms[place]
    return Outputs(
        padded=padded,
        out=_taken(inputs.kernel_out, real_heads(heads, many, faults.out)),
        lse=lse,
        forms=torch.tensor(forms),
    )


def _taken(tensor: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """These heads, bit for bit: packed, whatever the dtype."""
    return torch.stack([tensor[:, head] for head in heads], dim=1).contiguous()


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """All heads, bit for bit, and how they lie in memory."""
    del precision
    want = reference(inputs)
    heads, many = inputs.query.shape[1], inputs.kernel_heads
    named = torch.tensor([j < heads or not _free_heads(inputs) for j in range(many)])
    handed_on = inputs.target != "prefill"
    form_counts = torch.tensor([heads != many, heads == many, handed_on, handed_on])
    checks = [
        exact("padded", outputs.padded, want.padded, mask=named[:, None], why="every head repeats a real one"),
        exact("out", outputs.out, want.out, why="the real heads of the kernel's output"),
        exact("forms", outputs.forms, want.forms, mask=form_counts,
              why="packed queries, untouched ones where there is nothing to pad, and views of the kernel's answer"),
    ]  # fmt: skip
    if want.lse is not None:
        checks.append(exact("lse", outputs.lse, want.lse, why="the real heads of the kernel's log-sum-exp"))
    return tuple(checks)


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


def _turned_over(inputs: Inputs) -> Inputs | None:
    if _free_heads(inputs):
        return None
    lse = inputs.kernel_lse
    return _edited(
        inputs,
        query=guarded_copy(_reversed(inputs.query)),
        kernel_out=guarded_copy(_reversed(inputs.kernel_out)),
        kernel_lse=None if lse is None else guarded_copy(_reversed(lse)),
    )


def _reversed(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows.unbind(0)[::-1]) if rows.shape[0] else rows.clone()


def _rows_reversed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    lse = first.lse
    return Outputs(
        _reversed(first.padded), _reversed(first.out), None if lse is None else _reversed(lse), first.forms
    )  # fmt: skip


def _padding_heads_lost(inputs: Inputs) -> Inputs:
    """A kernel that answers for its padding heads with NaN."""
    real = real_heads(inputs.query.shape[1], inputs.kernel_heads)
    padding = torch.tensor([j not in real for j in range(inputs.kernel_heads)])
    out, lse = inputs.kernel_out.clone(), inputs.kernel_lse
    out[:, padding] = float("nan")
    if lse is not None:
        lse = lse.clone()
        lse[:, padding] = float("nan")
    return _edited(inputs, kernel_out=guarded_copy(out), kernel_lse=None if lse is None else guarded_copy(lse))


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _real_parts(outputs: Outputs) -> tuple[torch.Tensor | None, ...]:
    return tuple(part for part in (outputs.out, outputs.lse) if part is not None)


def _echoing(inputs: Inputs) -> Inputs | None:
    """A kernel that returns the beginning of every query head."""
    query, width = inputs.query, inputs.kernel_out.shape[-1]
    if query.dtype != inputs.kernel_out.dtype:
        return None
    echo = _taken(query, sources(query.shape[1], inputs.kernel_heads))[..., :width]
    return _edited(inputs, kernel_out=guarded_copy(echo))


def _echoed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return dataclasses.replace(first, out=inputs.query[..., : inputs.kernel_out.shape[-1]].contiguous())


LAWS: tuple[Law, ...] = (
    Law("J2 rows reversed", "a row's heads do not depend on its neighbours", _turned_over, _rows_reversed, "bitwise"),
    Law("J9 padding heads lost", "what the kernel answers for padding heads does not matter", _padding_heads_lost, _same,
        "bitwise", _real_parts),
    Law("J1 padded and back", "what comes back for a head is what was sent for it", _echoing, _echoed, "bitwise",
        _real_parts),
)  # fmt: skip


def _mutant(name: str, pitfall: str, faults: Faults, applies: Callable[[Inputs], bool] = lambda inputs: True) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _answered(inputs, faults) if applies(inputs) else None)


def _pads(inputs: Inputs) -> bool:
    return inputs.kernel_heads != inputs.query.shape[1]


def _hands_on(inputs: Inputs) -> bool:
    return inputs.target != "prefill"


MUTANTS: tuple[Mutant, ...] = (
    _mutant("first-heads-taken", "the real heads always stood in front", Faults(out="tiled", lse="tiled")),
    _mutant("heads-taken-in-steps", "the real heads always stood in steps", Faults(out="interleaved", lse="interleaved"),
            _pads),
    _mutant("always-tiled", "padding heads always repeated all heads in turn", Faults(padded="tiled")),
    _mutant("always-interleaved", "padding heads always stood behind the head that they repeat",
            Faults(padded="interleaved"), _pads),
    _mutant("padding-heads-zero", "padding heads held 0", Faults(zero_heads=True), _pads),
    _mutant("last-head-repeated", "padding heads repeated the last head", Faults(last_repeated=True), _pads),
    _mutant("heads-turned-by-one", "every padded head held the next one's query", Faults(turned=True)),
    _mutant("queries-not-packed", "padded queries were a view with gaps", Faults(wrong_forms=(0,)), _pads),
    _mutant("nothing-to-pad-copied", "queries that need no padding were copied", Faults(wrong_forms=(1,)),
            lambda inputs: not _pads(inputs)),
    _mutant("output-copied", "the kernel's output were copied", Faults(wrong_forms=(2,)), _hands_on),
    _mutant("lse-copied", "the kernel's log-sum-exp were copied", Faults(wrong_forms=(3,)), _hands_on),
    _mutant("lse-left-padded", "the log-sum-exp kept the kernel's heads", Faults(lse_left_padded=True),
            lambda inputs: _pads(inputs) and _hands_on(inputs)),
    _mutant("lse-of-the-first-heads", "of the log-sum-exp the first heads were taken", Faults(lse="tiled"), _hands_on),
)  # fmt: skip


def _in_reserved_room(inputs: Inputs) -> Outputs | None:
    """Queries that are padded by nothing but a longer view of their rows."""
    if not _free_heads(inputs) or inputs.query.stride(1) != inputs.query.shape[2]:
        return None
    query = inputs.query
    longer = query.as_strided((query.shape[0], inputs.kernel_heads, query.shape[2]), query.stride())
    return dataclasses.replace(_answered(inputs, RIGHT), padded=longer.clone())


HONEST: tuple[Honest, ...] = (
    Honest("head-after-head", Precision(probability="exact"), reference),
    Honest("in-reserved-room", Precision(probability="exact"), _in_reserved_room),
)
