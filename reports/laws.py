"""Does an implementation keep the laws of its op: do edits that must not matter leave its answer alone?"""

from collections.abc import Callable
from typing import Any

import torch

from cases.memory import named_tensors
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Law


def same_value(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """bool per element: equal by value, zeros of either sign and NaN of any bits among themselves; codes by bits."""
    if not first.dtype.is_floating_point or first.element_size() == 1:
        return first.contiguous().view(torch.uint8) == second.contiguous().view(torch.uint8)
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
    if edited is None:
        return None
    second = run(edited)
    if law.measure == "budget":
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
