"""With how many heads do the dense MLA kernels run, for n query heads?

    supported    n > 0 and (n <= 128 or 16 divides n)
    decode       24 if n = 24 and reducer and planner both know 24 heads; otherwise 16 ceil(n / 16)
    prefill      16 ceil(n / 16), always: another pair of kernels, which 24 heads concern in nothing
    round robin  the least of 16, 32, 64, 128 that is n or more; 0 if there is none
    two tokens   decode in {32, 64, 96, 128}: only these fold to a float8 kernel of 16 heads without a causal mask

Plan and kernel must run with the same number. Source: `AiterMLAHelper` and `_asm_dcp_verify_heads` of vLLM's AITER MLA
backend.
"""

import dataclasses

import msgspec
import torch

from cases.dense_mla.head_counts import Inputs, Outputs
from cases.memory import guarded_copy
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

_NATIVE = (16, 32, 64, 128)
_TWO_TOKENS = (32, 64, 96, 128)


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where the rules can be got wrong; the defaults are right."""

    most_padded: int = 128
    zero_passes: bool = False
    multiples_only: bool = False
    any_number: bool = False
    rounded_down: bool = False
    sixteen_at_least: bool = False
    native_24: bool | None = None
    one_part_suffices: bool = False
    prefill_like_decode: bool = False
    prefill_unpadded: bool = False
    round_robin_unpadded: bool = False
    round_robin_in_sixteens: bool = False
    round_robin_below: bool = False
    round_robin_clamped: bool = False
    two_tokens: tuple[int, ...] = _TWO_TOKENS
    two_tokens_unpadded: bool = False


RIGHT = Faults()


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules for one number of heads."""

    heads: int
    reducer_24: bool
    planner_24: bool
    faults: Faults = RIGHT

    def supported(self) -> bool:
        """Whether there are kernels for the number, padded or not."""
        if self.faults.any_number:
            return self.heads > 0
        unaligned = self.heads <= self.faults.most_padded and not self.faults.multiples_only
        return self.heads > (-1 if self.faults.zero_passes else 0) and (unaligned or self.heads % 16 == 0)

    def decode(self) -> int:
        """Heads of the decode kernel."""
        both = any if self.faults.one_part_suffices else all
        native = both((self.reducer_24, self.planner_24)) if self.faults.native_24 is None else self.faults.native_24
        return 24 if self.heads == 24 and native else self._sixteens()

    def _sixteens(self) -> int:
        if self.faults.sixteen_at_least:
            return max(16, self.heads)
        return self.heads // 16 * 16 if self.faults.rounded_down else -(-self.heads // 16) * 16

    def prefill(self) -> int:
        """Heads of the prefill kernel."""
        if self.faults.prefill_unpadded:
            return self.heads
        return self.decode() if self.faults.prefill_like_decode else self._sixteens()

    def round_robin(self) -> int:
        """Heads of the round-robin kernel, 0 where it has none for so many."""
        if self.faults.round_robin_unpadded:
            return self.heads if self.heads <= _NATIVE[-1] else 0
        if self.faults.round_robin_in_sixteens:
            return -(-self.heads // 16) * 16 if self.heads <= _NATIVE[-1] else 0
        if self.faults.round_robin_below:
            return max((native for native in _NATIVE if native <= self.heads), default=0)
        beyond = _NATIVE[-1] if self.faults.round_robin_clamped else 0
        return min((native for native in _NATIVE if native >= self.heads), default=beyond)

    def two_tokens(self) -> bool:
        """Whether the float8 kernel decodes two query tokens without a causal mask."""
        return (self.heads if self.faults.two_tokens_unpadded else self.decode()) in self.faults.two_tokens


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The answers for every number; `dtype` has no say in integers."""
    del dtype
    return _answered(inputs, RIGHT)


def _answered(inputs: Inputs, faults: Faults) -> Outputs:
    each = [Rules(heads, inputs.reducer_24, inputs.planner_24, faults) for heads in inputs.heads.tolist()]

    def row(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return Outputs(
        supported=row([int(one.supported()) for one in each]),
        decode=row([one.decode() for one in each]),
        prefill=row([one.prefill() for one in each]),
        round_robin=row([one.round_robin() for one in each]),
        two_tokens=row([int(one.two_tokens()) for one in each]),
    )


_WHY = {
    "supported": "a number up to 128, or a multiple of 16",
    "decode": "the next multiple of 16, or 24 where both parts know it",
    "prefill": "the next multiple of 16",
    "round_robin": "the least of 16, 32, 64 and 128, or 0",
    "two_tokens": "only 32, 64, 96 and 128 heads of the decode kernel have one",
}


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Every answer for every number that can be, and whether it can."""
    del precision
    want = reference(inputs)
    meant = inputs.heads.cpu() > 0
    checks = []
    for name, why in _WHY.items():
        mask = None if name == "supported" else meant
        check = exact(name, getattr(outputs, name), getattr(want, name), mask=mask, why=why)
        if not check.passed and check.where:
            check = msgspec.structs.replace(check, why=f"{int(inputs.heads[check.where])} heads: {check.why}")
        checks.append(check)
    return tuple(checks)


def _with(inputs: Inputs, heads: torch.Tensor) -> Inputs:
    return dataclasses.replace(inputs, heads=guarded_copy(heads))


def _backwards(inputs: Inputs) -> Inputs:
    return _with(inputs, inputs.heads.flip(0))


def _turned(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(**{name: getattr(first, name).flip(0) for name in _WHY})


def _filled(inputs: Inputs) -> Inputs | None:
    if (inputs.reducer_24 and inputs.planner_24) or bool((inputs.heads < 1).any()):
        return None
    return _with(inputs, (inputs.heads + 15) // 16 * 16)


def _swapped(inputs: Inputs) -> Inputs:
    edited = _with(inputs, inputs.heads)
    return dataclasses.replace(edited, reducer_24=inputs.planner_24, planner_24=inputs.reducer_24)


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _numbers(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return outputs.decode, outputs.prefill, outputs.round_robin, outputs.two_tokens


LAWS: tuple[Law, ...] = (
    Law("H1 numbers backwards", "an answer does not depend on its neighbours", _backwards, _turned, "bitwise"),
    Law("H2 sixteens filled up", "heads up to the next multiple of 16 cost nothing", _filled, _same, "bitwise", _numbers),
    Law("H3 parts swapped", "reducer and planner count alike", _swapped, _same, "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, faults: Faults) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _answered(inputs, faults))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("only-multiples-supported", "a number that is no multiple of 16 had no kernel", Faults(multiples_only=True)),
    _mutant("every-number-supported", "numbers beyond 128 could be padded", Faults(any_number=True)),
    _mutant("padded-below-127-only", "no more than 126 heads could be padded", Faults(most_padded=126)),
    _mutant("no-heads-supported", "there were kernels for no heads", Faults(zero_passes=True)),
    _mutant("rounded-down", "heads were cut to a multiple of 16", Faults(rounded_down=True)),
    _mutant("sixteen-at-least", "numbers above 16 were not padded", Faults(sixteen_at_least=True)),
    _mutant("prefill-unpadded", "the prefill kernel ran with the heads there are", Faults(prefill_unpadded=True)),
    _mutant("prefill-with-24", "the prefill kernel knew 24 heads where the decode kernel does",
            Faults(prefill_like_decode=True)),
    _mutant("never-24", "no build knew 24 heads", Faults(native_24=False)),
    _mutant("always-24", "every build knew 24 heads", Faults(native_24=True)),
    _mutant("one-part-knows-24", "it sufficed that one part knows 24 heads", Faults(one_part_suffices=True)),
    _mutant("round-robin-unpadded", "the round-robin kernel ran with the heads there are",
            Faults(round_robin_unpadded=True)),
    _mutant("round-robin-in-sixteens", "the round-robin kernel ran with every multiple of 16",
            Faults(round_robin_in_sixteens=True)),
    _mutant("round-robin-from-below", "the round-robin kernel took the next lower number", Faults(round_robin_below=True)),
    _mutant("round-robin-beyond-128", "the round-robin kernel had 128 heads for more", Faults(round_robin_clamped=True)),
    _mutant("two-tokens-everywhere", "48, 80 and 112 heads decoded two tokens without a causal mask",
            Faults(two_tokens=(32, 48, 64, 80, 96, 112, 128))),
    _mutant("two-tokens-at-16", "16 heads decoded two tokens without a causal mask",
            Faults(two_tokens=(16, *_TWO_TOKENS))),
    _mutant("two-tokens-not-at-96", "96 heads did not decode two tokens without a causal mask",
            Faults(two_tokens=(32, 64, 128))),
    _mutant("two-tokens-by-given-heads", "the heads there are decided, not the kernel's", Faults(two_tokens_unpadded=True)),
)  # fmt: skip


def _by_counting_up(inputs: Inputs) -> Outputs:
    """Every number of heads is the first one, counting up, that its kernel takes."""
    rows: dict[str, list[int]] = {name: [] for name in _WHY}
    for heads in inputs.heads.tolist():
        sixteens = next(count for count in range(max(heads, 0), max(heads, 0) + 16) if count % 16 == 0)
        native = heads == 24 and inputs.reducer_24 and inputs.planner_24
        decode = heads if native else sixteens
        rows["supported"].append(int(0 < heads < 129 or (heads > 128 and heads == sixteens)))
        rows["decode"].append(decode)
        rows["prefill"].append(sixteens)
        powers = [1 << power for power in range(4, 8) if heads <= 1 << power]
        rows["round_robin"].append(powers[0] if powers else 0)
        rows["two_tokens"].append(int(decode % 32 == 0 and 0 < decode <= 128))
    return Outputs(**{name: torch.tensor(values, dtype=torch.int64) for name, values in rows.items()})


HONEST: tuple[Honest, ...] = (
    Honest("number-after-number", Precision(probability="exact"), reference),
    Honest("by-counting-up", Precision(probability="exact"), _by_counting_up),
)
