"""What must not change the answer, and which wrong answers must not pass?

Every op's module in `oracle` holds `LAWS`, a tuple of `Law`, `MUTANTS`, a tuple of `Mutant`, and `HONEST`, a tuple of
`Honest`. The first of `HONEST` is the way of computing from which the mutants depart: a mutant that equals it bit for bit
cannot be observed on that case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cases.precision import Precision


@dataclass(frozen=True)
class Law:
    """An edit of the inputs whose effect on the answer is known.

    name: its number and a few words, `M3 entries permuted`.
    claim: the sentence that a violation contradicts.
    edit: the edited inputs, a fresh copy; None when the law says nothing about these inputs.
    expect: from the first answer (and both inputs) the answer that the edited inputs must give.
    measure: `bitwise`, or `budget` when the edit moves rounding points: then both answers are judged by the reference.
    view: the part of an answer that the law speaks of.
    reshapes: the edit changes the shape of the call, by which libraries choose their kernels; where an implementation
    says that its libraries do, the law holds within the budget only.
    """

    name: str
    claim: str
    edit: Callable[[Any], Any | None]
    expect: Callable[[Any, Any, Any], Any]
    measure: Literal["bitwise", "budget"]
    view: Callable[[Any], Any] = lambda answer: answer
    reshapes: bool = False


@dataclass(frozen=True)
class Mutant:
    """A named wrong answer, as an implementation with that fault would give it.

    name: words joined by hyphens, unique in its op.
    pitfall: what goes wrong, in a clause that completes "as if ...".
    answer: the wrong outputs for these inputs; None when the fault cannot show in such a call at all.
    """

    name: str
    pitfall: str
    answer: Callable[[Any], Any | None]


@dataclass(frozen=True)
class Honest:
    """A right answer that rounds at other points than the reference: it must never be failed.

    name: what it does differently, in words joined by hyphens.
    precision: the rounding points that it declares, or what says them for a call.
    answer: the outputs for these inputs; None when this way of computing cannot serve the call.
    """

    name: str
    precision: Precision | Callable[[Any], Precision]
    answer: Callable[[Any], Any | None]

    def declared(self, inputs: Any) -> Precision:
        """The rounding points for a call."""
        return self.precision if isinstance(self.precision, Precision) else self.precision(inputs)
