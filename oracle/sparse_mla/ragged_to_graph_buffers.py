"""What must lie in the buffers of a captured graph after each step?

For one step with T rows, entries idx[0..n-1] and starts ptr[0..T], capacity = max(T * per_row, 1):

    raise if n > capacity, or if the buffer of starts holds fewer than T + 1
    index_buffer[0..n-1] = idx,   indptr_buffer[0..T] = ptr
    returned: index_buffer[0..capacity-1], on gfx950 index_buffer[0..max(n, 1)-1];   indptr_buffer[0..T]

The returned tensors are views of the buffers that begin where the buffers do, at every step: a captured graph reads
those addresses. Readers stop at ptr[T], so what lies behind it is free; how long the returned tensor is, is not, since
on gfx950 the average length of a row is taken from it. Source: `_copy_ragged_to_graph_buffers` of vLLM's ROCm backend.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cases.memory import guarded, guarded_copy, moved
from cases.precision import Precision
from cases.sparse_mla.ragged_to_graph_buffers import Inputs, Outputs, Step
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where the copy can be got wrong; the defaults are right."""

    late_entries: bool = False
    late_starts: bool = False
    step_behind: bool = False
    new_indices: bool = False
    new_indptr: bool = False
    indices_moved_on: bool = False
    tail_valid: bool = False
    never_trimmed: bool = False
    always_trimmed: bool = False
    trimmed_to_used: bool = False
    may_be_empty: bool = False
    whole_buffer: bool = False
    truncates: bool = False
    short_starts_pass: bool = False
    empty_step_skipped: bool = False
    last_start_lost: bool = False


RIGHT = Faults()


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """What every step returns, new tensors; `dtype` changes nothing, since all is integers.

    A step that must raise is marked in `raised`. Raises ValueError for a step whose lists do not fit together: another
    number of starts than rows + 1, or starts that point behind the entries.
    """
    del dtype
    for number, step in enumerate(inputs.steps):
        if step.indptr.numel() != step.rows + 1:
            raise ValueError(f"step {number} has {step.indptr.numel()} starts: should be {step.rows + 1}")
        if int(step.indptr[-1]) > step.indices.numel():
            raise ValueError(
                f"step {number}: indptr ends at {int(step.indptr[-1])}, but should end in {step.indices.numel()} entries"
            )
    return _played(inputs, RIGHT)


def _must_raise(inputs: Inputs, step: Step) -> bool:
    return step.indices.numel() > _capacity(inputs, step) or step.rows + 1 > inputs.indptr_buffer.numel()


def _capacity(inputs: Inputs, step: Step) -> int:
    return max(step.rows * inputs.per_row, 1)


def _length(inputs: Inputs, step: Step, faults: Faults) -> int:
    """Entries of the returned tensor."""
    least = 0 if faults.may_be_empty else 1
    trimmed = inputs.arch == "gfx950" and not faults.never_trimmed
    if faults.whole_buffer:
        return inputs.index_buffer.numel()
    if trimmed or faults.always_trimmed:
        return max(int(step.indptr[-1]) if faults.trimmed_to_used else step.indices.numel(), least)
    return max(step.rows * inputs.per_row, least)


def _played(inputs: Inputs, faults: Faults) -> Outputs:
    buffer = inputs.index_buffer.clone()
    starts = inputs.indptr_buffer.clone()
    indices, indptr, addresses, raised = [], [], [], []
    cursor = 0
    for step in inputs.steps:
        too_many = step.indices.numel() > _capacity(inputs, step) and not faults.truncates
        if too_many or (step.rows + 1 > starts.numel() and not faults.short_starts_pass):
            indices.append(buffer[:0].clone())
            indptr.append(starts[:0].clone())
            addresses.append((0, 0))
            raised.append(1)
            continue
        before, starts_before = buffer.clone(), starts.clone()
        if not (faults.empty_step_skipped and step.indices.numel() == 0):
            entries = step.indices[: buffer.numel()]
            buffer[: entries.numel()] = entries
            kept = min(step.rows + (0 if faults.last_start_lost else 1), starts.numel())
            starts[:kept] = step.indptr[:kept]
        length = min(_length(inputs, step, faults), buffer.numel())
        seen = before if faults.step_behind else buffer.clone()
        if faults.late_entries:
            # Every other block of four entries is still the previous step's.
            late = torch.arange(buffer.numel()) % 8 >= 4
            seen = torch.where(late, before, buffer)
        ends = starts_before if faults.step_behind or faults.late_starts else starts
        ends = ends[: step.rows + 1].clone()
        if faults.tail_valid:
            ends[-1:] = length
        indices.append(seen[:length].clone())
        indptr.append(ends)
        addresses.append((
            -1 if faults.new_indices else 4 * cursor if faults.indices_moved_on else 0,
            -1 if faults.new_indptr else 0,
        ))  # fmt: skip
        raised.append(0)
        cursor += step.indices.numel()
    return Outputs(
        tuple(indices),
        tuple(indptr),
        torch.tensor(addresses, dtype=torch.int64),
        torch.tensor(raised, dtype=torch.int64),
    )


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Which steps raised, where the returned tensors lie, and of each step the starts and the entries in use."""
    del precision
    want = reference(inputs)
    checks = [
        exact("raised", outputs.raised, want.raised, why="1 for a step that does not fit into its buffers"),
        exact(
            "addresses", outputs.addresses, want.addresses, why="a captured graph reads the beginning of the buffers"
        ),
    ]
    count = len(inputs.steps)
    for number, step in enumerate(inputs.steps):
        if _must_raise(inputs, step):
            continue
        used = torch.arange(want.indices[number].numel()) < int(step.indptr[-1])
        got = outputs.indices[number] if len(outputs.indices) == count else None
        starts = outputs.indptr[number] if len(outputs.indptr) == count else None
        checks += [
            exact(f"step {number} indptr", starts, want.indptr[number], why="the step's own starts"),
            exact(f"step {number} indices", got, want.indices[number], mask=used, why="the step's own entries"),
        ]
    return tuple(checks)


def _with(inputs: Inputs, **changes: object) -> Inputs:
    """Inputs some of which are replaced, with buffers of their own."""
    fresh: dict[str, Any] = {name: moved(getattr(inputs, name), "cpu") for name in ("index_buffer", "indptr_buffer")}
    return dataclasses.replace(inputs, **(fresh | changes))


def _in_use(outputs: Outputs) -> Outputs:
    """The answer without the entries that are free; tensors of the same lengths."""
    cut = []
    for indices, indptr in zip(outputs.indices, outputs.indptr, strict=True):
        end = int(indptr[-1]) if indptr.numel() else 0
        cut.append(torch.where(torch.arange(indices.numel()) < end, indices.cpu(), -1))
    return dataclasses.replace(outputs, indices=tuple(cut))


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _other_content(inputs: Inputs) -> Inputs:
    return _with(
        inputs,
        index_buffer=guarded_copy(torch.full_like(inputs.index_buffer, 3)),
        indptr_buffer=guarded_copy(torch.full_like(inputs.indptr_buffer, 3)),
    )


def _first_left_out(inputs: Inputs) -> Inputs | None:
    return _with(inputs, steps=inputs.steps[1:]) if len(inputs.steps) > 1 else None


def _without_first(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.indices[1:], first.indptr[1:], first.addresses[1:], first.raised[1:])


def _twice(inputs: Inputs) -> Inputs:
    return _with(inputs, steps=tuple(step for step in inputs.steps for _ in range(2)))


def _answers_twice(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(
        tuple(one for one in first.indices for _ in range(2)), tuple(one for one in first.indptr for _ in range(2)),
        first.addresses.repeat_interleave(2, 0), first.raised.repeat_interleave(2),
    )  # fmt: skip


def _more_room(inputs: Inputs) -> Inputs | None:
    # Where the starts do not fit, room for them would change the answer.
    if any(step.rows + 1 > inputs.indptr_buffer.numel() for step in inputs.steps):
        return None
    return _with(
        inputs,
        index_buffer=guarded((inputs.index_buffer.numel() + 333,), torch.int32),
        indptr_buffer=guarded((inputs.indptr_buffer.numel() + 333,), torch.int32),
    )


LAWS: tuple[Law, ...] = (
    Law("G1 other content before", "what lay in the buffers does not matter", _other_content, _same, "bitwise",
        _in_use),
    Law("G2 first step left out", "a step's lists do not depend on the steps before it", _first_left_out,
        _without_first, "bitwise", _in_use),
    Law("G3 every step twice", "a step played again gives the same", _twice, _answers_twice, "bitwise", _in_use),
    Law("G4 more room", "longer buffers change nothing", _more_room, _same, "bitwise", _in_use),
)  # fmt: skip


def _mutant(name: str, pitfall: str, **faults: Any) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _played(inputs, Faults(**faults)))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("plan-update-late", "some entries were still the previous step's when the graph ran", late_entries=True),
    _mutant("starts-update-late", "the starts were still the previous step's when the graph ran", late_starts=True),
    _mutant("one-step-behind", "the graph ran before the copy", step_behind=True),
    _mutant("indices-reallocated", "every step's entries came to lie in new memory", new_indices=True),
    _mutant("indptr-reallocated", "every step's starts came to lie in new memory", new_indptr=True),
    _mutant("indices-appended", "a step's entries were written behind the previous step's", indices_moved_on=True),
    _mutant("stale-tail-valid", "the last row reached to the end of the returned tensor", tail_valid=True),
    _mutant("trim-omitted", "gfx950 returned all that the rows may need", never_trimmed=True),
    _mutant("trimmed-elsewhere", "every architecture returned what the step filled", always_trimmed=True),
    _mutant("trimmed-to-what-is-used", "gfx950 returned the entries in use, and not the room for them",
            trimmed_to_used=True),
    _mutant("returns-nothing", "a step without entries returned an empty tensor", may_be_empty=True),
    _mutant("whole-buffer-returned", "the whole buffer were returned", whole_buffer=True),
    _mutant("overflow-truncated", "entries that do not fit were left out in silence", truncates=True),
    _mutant("short-starts-pass", "starts that do not fit were left out in silence", short_starts_pass=True),
    _mutant("empty-step-skipped", "a step without entries left the previous step's starts", empty_step_skipped=True),
    _mutant("last-start-lost", "the end of the last row were not copied", last_start_lost=True),
)  # fmt: skip


def _only_what_is_used(inputs: Inputs) -> Outputs:
    """Entries in use are written, and everything behind them is cleared."""
    answer = _played(inputs, RIGHT)
    return dataclasses.replace(answer, indices=tuple(_cleared(answer)))


def _cleared(answer: Outputs) -> Iterator[torch.Tensor]:
    for indices, indptr in zip(answer.indices, answer.indptr, strict=True):
        end = int(indptr[-1]) if indptr.numel() else 0
        yield torch.nn.functional.pad(indices[:end], (0, indices.numel() - end), value=-1)


_HONEST_WAYS: tuple[tuple[str, Callable[[Inputs], Outputs]], ...] = (
    ("copies-all-entries", reference),
    ("copies-what-is-used", _only_what_is_used),
)
HONEST: tuple[Honest, ...] = tuple(Honest(name, Precision(), answer) for name, answer in _HONEST_WAYS)
