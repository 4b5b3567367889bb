"""For how many decode rows must the logits of a paged index search have room?

    rows = min(batched tokens, sequences * (1 + drafted))

where the scheduler's most sequences are known and not 0, otherwise as many as the batch has tokens. A drafter that is not
there, or does not say, drafts 0 tokens. The buffer has a row of max_len logits for each: one row per batched token would
come to tens of TiB at a full context, and one row too few is refused once the pool is locked.
Source: `_max_decode_logits_rows` of vLLM's ROCm sparse attention.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.memory import map_tensors, moved
from cases.precision import Precision
from cases.sparse_mla.decode_logits_rows import (
    LOOKUP_FAILS,
    MISSING,
    NO_CONFIG,
    NO_DRAFTER,
    NO_SCHEDULER,
    SERVED,
    Inputs,
    Outputs,
)
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One point, None where something is not known."""

    batched_tokens: int
    sequences: int | None
    drafted: int | None


def deployments(inputs: Inputs) -> list[Deployment]:
    """The points."""
    columns = (inputs.batched_tokens, inputs.config, inputs.sequences, inputs.drafted)
    return [
        Deployment(
            tokens, sequences if config == SERVED and sequences != MISSING else None, drafted if drafted >= 0 else None
        )
        for tokens, config, sequences, drafted in zip(*(column.tolist() for column in columns), strict=True)
    ]


def rows_of(deployment: Deployment) -> int:
    """The rows of one point."""
    if not deployment.sequences:
        return deployment.batched_tokens
    return min(deployment.batched_tokens, deployment.sequences * (1 + (deployment.drafted or 0)))


def _answer(inputs: Inputs, rule: Callable[[Deployment], int]) -> Outputs:
    return Outputs(torch.tensor([rule(deployment) for deployment in deployments(inputs)], dtype=torch.int64))


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The rows of every point; `dtype` has no say in integers.

    Raises ValueError for a negative number of tokens, and for a config that is none of the constants.
    """
    del dtype
    if bool((inputs.batched_tokens < 0).any()):
        raise ValueError(f"batched_tokens={int(inputs.batched_tokens.min())}: should not be negative")
    if bool(((inputs.config < LOOKUP_FAILS) | (inputs.config > SERVED)).any()):
        raise ValueError(f"config={inputs.config.tolist()}: should be {LOOKUP_FAILS} to {SERVED}")
    return _answer(inputs, rows_of)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """One check, bit for bit; its sentence says which way a bound is off."""
    del precision
    want = reference(inputs).out
    check = exact("rows", outputs.out, want, why="")
    if check.passed or len(check.where) != 1:
        return (check,)
    fewer = int(outputs.out[check.where]) < int(want[check.where])
    why = "a locked pool refuses the missing rows" if fewer else "nobody can decode that many rows at once"
    return (exact("rows", outputs.out, want, why=f"{why}; {deployments(inputs)[check.where[0]]}"),)


def _edited(inputs: Inputs, **columns: torch.Tensor) -> Inputs:
    fresh = map_tensors(inputs, lambda tensor: moved(tensor, "cpu"))
    for name, values in columns.items():
        getattr(fresh, name).copy_(values)
    return fresh


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _drafts_as_sequences(inputs: Inputs) -> Inputs:
    factor = 1 + inputs.drafted.clamp(min=0)
    more = torch.where(inputs.sequences > 0, inputs.sequences * factor, inputs.sequences)
    return _edited(inputs, sequences=more, drafted=torch.zeros_like(factor))


def _no_drafts_otherwise(inputs: Inputs) -> Inputs:
    """Silent drafters go, missing ones draft 0 tokens, and those that draft 0 tokens fall silent."""
    drafted = inputs.drafted
    other = torch.where(drafted == MISSING, NO_DRAFTER, torch.where(drafted == 0, MISSING, drafted))
    return _edited(inputs, drafted=torch.where(drafted == NO_DRAFTER, 0, other))


def _unknown_otherwise(inputs: Inputs) -> Inputs:
    """What is not known is not known in another way."""
    unknown = (inputs.config != SERVED) | (inputs.sequences <= 0)
    others = torch.tensor([NO_CONFIG, NO_SCHEDULER, SERVED, LOOKUP_FAILS])
    sequences = torch.where(inputs.config == NO_SCHEDULER, 0, 5)
    return _edited(
        inputs, config=torch.where(unknown, others[inputs.config], inputs.config),
        sequences=torch.where(unknown, sequences, inputs.sequences),
    )  # fmt: skip


def _reversed(inputs: Inputs) -> Inputs:
    names = ("batched_tokens", "config", "sequences", "drafted")
    return _edited(inputs, **{name: getattr(inputs, name).flip(0) for name in names})


LAWS: tuple[Law, ...] = (
    Law("R1 drafts as sequences", "a drafted token takes a row like a sequence of its own", _drafts_as_sequences, _same,
        "bitwise"),
    Law("R2 no drafts", "no drafter, a silent one and one of 0 tokens are the same", _no_drafts_otherwise, _same,
        "bitwise"),
    Law("R3 unknown otherwise", "it does not matter why the number of sequences is not known", _unknown_otherwise, _same,
        "bitwise"),
    Law("R4 points reversed", "a point's answer does not depend on its neighbours", _reversed,
        lambda first, inputs, edited: Outputs(first.out.flip(0)), "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, rule: Callable[[Deployment], int]) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _answer(inputs, rule))


def _served(of: Callable[[int, int, int], int]) -> Callable[[Deployment], int]:
    """A rule for tokens, sequences and drafts where the sequences are known."""

    def rule(deployment: Deployment) -> int:
        if not deployment.sequences:
            return deployment.batched_tokens
        return of(deployment.batched_tokens, deployment.sequences, deployment.drafted or 0)

    return rule


def _zero_is_a_bound(deployment: Deployment) -> int:
    return 0 if deployment.sequences == 0 else rows_of(deployment)


def _unknown_is_nothing(deployment: Deployment) -> int:
    return 0 if deployment.sequences is None else rows_of(deployment)


def _silent_drafts_one(deployment: Deployment) -> int:
    drafted = 1 if deployment.drafted is None else deployment.drafted
    return rows_of(dataclasses.replace(deployment, drafted=drafted))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("rows-of-the-batch", "every token of the batch decoded", lambda deployment: deployment.batched_tokens),
    _mutant("drafts-ignored", "speculative tokens took no row", _served(lambda t, s, d: min(t, s))),
    _mutant("drafts-only", "only the speculative tokens took rows", _served(lambda t, s, d: min(t, s * max(d, 1)))),
    _mutant("drafts-added-once", "one sequence drafted", _served(lambda t, s, d: min(t, s + d))),
    _mutant("batch-ignored", "a small batch did not bound the rows", _served(lambda t, s, d: s * (1 + d))),
    _mutant("larger-bound", "the larger bound counted", _served(lambda t, s, d: max(t, s * (1 + d)))),
    _mutant("one-draft-too-many", "one token more were drafted", _served(lambda t, s, d: min(t, s * (2 + d)))),
    _mutant("zero-sequences-bound", "0 sequences were a bound", _zero_is_a_bound),
    _mutant("unknown-is-nothing", "a scheduler that does not say needed no rows", _unknown_is_nothing),
    _mutant("silent-drafter-drafts", "a drafter that does not say drafted a token", _silent_drafts_one),
)


def _in_columns(inputs: Inputs) -> Outputs:
    """All points at once."""
    known = (inputs.config == SERVED) & (inputs.sequences > 0)
    bound = inputs.sequences * (1 + inputs.drafted.clamp(min=0))
    return Outputs(torch.where(known, torch.minimum(inputs.batched_tokens, bound), inputs.batched_tokens))


HONEST: tuple[Honest, ...] = (
    Honest("point-by-point", Precision(probability="exact", note="integers"), reference),
    Honest("all-at-once", Precision(probability="exact", note="integers"), _in_columns),
)
