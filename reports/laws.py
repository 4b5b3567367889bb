"""Does an implementation keep the laws of its op: do edits that must not matter leave its answer alone?"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cases import op_module
from cases.case import Case
from cases.memory import element_bytes, named_tensors
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Law


def same_value(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """bool per element: equal by value, zeros of either sign and NaN of any bits among themselves; codes by bits."""
    if not first.dtype.is_floating_point or first.element_size() == 1:
        return element_bytes(first) == element_bytes(second)
    return (first == second) | (torch.isnan(first) & torch.isnan(second))


def identical(first: object, second: object) -> bool:
    """Whether two answers hold the same tensors, element for element."""
    ones, others = dict(named_tensors(first)), dict(named_tensors(second))
    return ones.keys() == others.keys() and all(
        ones[name].shape == others[name].shape and bool(same_value(ones[name], others[name]).all()) for name in ones
    )


def break_of(
    law: Law,
    inputs: Any,
    first: Any,
    run: Callable[[Any], Any],
    judge: Callable[[Any, Any, Precision], tuple[Check, ...]],
    precision: Precision,
) -> tuple[Check, ...] | None:
    """The checks of the edited call: None when the law says nothing about it.

    `run` answers edited inputs, `first` is the answer to `inputs`. A bitwise law compares the two answers; a law within
    the budget judges the edited answer by the reference of the edited inputs, which the law holds of by itself.
    """
    edited = law.edit(inputs)
    return None if edited is None else kept(law, inputs, first, edited, run(edited), judge, precision)


def kept(
    law: Law,
    inputs: Any,
    first: Any,
    edited: Any,
    second: Any,
    judge: Callable[[Any, Any, Precision], tuple[Check, ...]],
    precision: Precision,
    by_shape: bool = False,
) -> tuple[Check, ...]:
    """The checks of a law, given the answers to the inputs and to the edited inputs.

    by_shape: the implementation's libraries choose their kernels by the shape of the call.
    """
    if law.measure == "budget" or (law.reshapes and by_shape):
        return judge(edited, second, precision)
    want = dict(named_tensors(law.view(law.expect(first, inputs, edited))))
    got = dict(named_tensors(law.view(second)))
    checks = []
    for name, expected in want.items():
        found = got.get(name)
        if found is not None and found.shape == expected.shape and bool(same_value(found, expected).all()):
            checks.append(Check(output=name, measure="exact", use=0.0, count=expected.numel()))
        else:
            checks.append(exact(name, found, expected, why=f"law {law.name}: {law.claim}"))
    return tuple(checks)


def law_named(op: str, name: str) -> Law:
    """The law of an op by its name; raises ValueError with the names that there are."""
    laws: Sequence[Law] = op_module("oracle", op).LAWS
    for law in laws:
        if law.name == name:
            return law
    raise ValueError(f"{op} has no law {name!r}: its laws are {', '.join(law.name for law in laws) or 'none'}")


def spoken(op: str, cases: Sequence[Case], wanted: int, most: int) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Cases with the laws of `op` that say something about them, until each law has had `wanted` of them.

    The cases are walked in strides, so that those tried first are unlike; no more than `most` are built. A case in
    whose answer something has no elements is passed over: nothing keeps a law most easily.
    """
    left = {law.name: wanted for law in op_module("oracle", op).LAWS}
    questions = op_module("cases", op)
    stride = next(k for k in (37, 41, 43, 47, 53, 1) if k == 1 or len(cases) % k)
    for place in range(min(len(cases), most)):
        if not left:
            return
        case = cases[place * stride % len(cases)]
        inputs = questions.build(case)
        outputs = [tensor for path, tensor in named_tensors(inputs) if path in questions.WRITABLE]
        if not all(tensor.numel() for tensor in outputs):
            continue
        names = tuple(
            law.name for law in op_module("oracle", op).LAWS if law.name in left and law.edit(inputs) is not None
        )
        for name in names:
            left[name] -= 1
            if not left[name]:
                del left[name]
        if names:
            yield case, names
