"""What becomes of one case on one implementation?

The suspect runs first, on a private copy of the inputs, into poisoned memory; then the memory round its outputs is
looked at, and only then is the reference computed and the answer judged.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from cases import op_module
from cases.case import Case
from cases.memory import element_bytes, is_vast, map_tensors, named_tensors, new_memory_poisoned, trespasses
from cases.memory import on_device as moved
from cases.precision import Precision
from impl.executions.compile_time import compiling
from impl.implementation import Execution, Impl, device_of, elsewhere, machine_code_of, on_device
from impl.sources.source_tree import SourceError
from oracle.check import Check, Status, verdict_of
from oracle.laws import Mutant
from reports.form import misfit
from reports.laws import kept, law_named
from reports.record import LOST, Environment, Record, Seconds

# Begins the reason of an error that is not the suspect's: no verdict was reached, and the run is not to be trusted.
HARNESS = "the harness itself broke in "
# A mutant explains a failure when the output lies this many times closer to it than to the reference.
_CLOSER = 4.0
_DIAGNOSIS_SECONDS = 30.0
# What CUDA and HIP call the faults that a kernel itself commits; each leaves the device without an answer as well.
_KERNEL_FAULTS = (
    "illegal memory access", "illegal address", "misaligned address", "illegal instruction", "invalid program counter",
    "invalid address space", "hardware stack error", "device-side assert", "unspecified launch failure",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
    """A record with what it was made from: pristine inputs and the suspect's outputs, on the CPU, if there are any."""

    record: Record
    inputs: Any = None
    outputs: Any = None


class _Stop(Exception):
    """Ends a trial with its status and reasons."""

    def __init__(self, status: Status, *reasons: str) -> None:
        super().__init__(status)
        self.status: Status = status
        self.reasons = reasons


def execute(
    case: Case, impl: Impl, execution: Execution, environment: Environment, worker: str = "", law: str = ""
) -> Record:
    """Run and judge one case, or one law on it; whatever the suspect or the harness raises becomes a record."""
    return attempt(case, impl, execution, environment, worker, law=law).record


def attempt(
    case: Case, impl: Impl, execution: Execution, environment: Environment, worker: str = "", inputs: Any = None,
    law: str = "",
) -> Trial:  # fmt: skip
    """`execute`, keeping inputs and outputs; `inputs` stand in for the built ones. KeyboardInterrupt alone passes.

    With a law, its edited inputs are asked as well, and the two answers are held against each other; the outputs kept
    are the edited call's.
    """
    times: dict[str, float] = {}
    status: Status = "error"
    checks: tuple[Check, ...] = ()
    reasons: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()
    precision: Precision | None = None
    outputs = None
    source = fingerprint = ""
    try:
        oracle, questions = op_module("oracle", case.op), op_module("cases", case.op)
        with _blame_harness("asking what is unsupported"):
            try:
                missing = (
                    elsewhere(case, execution)
                    or impl.unsupported(case, execution)
                    or _unsupported_interpreter(impl, execution)
                    or _unsupported_machine(impl, execution)
                )
            except SourceError as mistake:
                # A mistake in the sources that were pointed at is the suspect's.
                raise _Stop("error", str(mistake)) from mistake
        if missing:
            raise _Stop("unsupported", *missing)
        with _blame_harness("describing the implementation"):
            precision = impl.precision(case, execution)
            source = hashlib.sha256(impl.source()).hexdigest()
        with _blame_harness("building the inputs"), _timed(times, "build"):
            inputs = questions.build(case) if inputs is None else inputs
            edit = law_named(case.op, law) if law else None
            edited = edit.edit(inputs) if edit is not None else None
            if edit is not None and edited is None:
                raise _Stop("unsupported", f"the law {law} says nothing about this case")
        with _timed(times, "run"), _compile_timed(times, execution):
            outputs = answer(impl, case.op, inputs, execution)
            first = outputs
            if edit is not None:
                outputs = answer(impl, case.op, edited, execution)
        with _blame_harness("looking at the outputs"):
            fingerprint = _fingerprint(outputs)
        with _blame_harness("judging"), _timed(times, "judge"):
            if edit is not None:
                checks = kept(edit, inputs, first, edited, outputs, oracle.judge, precision, impl.by_shape)
            else:
                checks = tuple(oracle.judge(inputs, outputs, precision))
            status = verdict_of(checks)
        if status == "fail" and edit is None:
            with _blame_harness("diagnosing"), _timed(times, "judge"):
                diagnosis = diagnose(oracle, inputs, outputs)
    except _Stop as stop:
        status, reasons = stop.status, stop.reasons
    record = Record(
        case=case.id,
        op=case.op,
        impl=impl.name,
        on=execution,
        law=law,
        status=status,
        checks=checks,
        reasons=reasons,
        diagnosis=diagnosis,
        precision=precision,
        environment=environment,
        seconds=Seconds(**times),
        fingerprint=fingerprint,
        source=source,
        worker=worker,
        finished=time.time(),
    )
    return Trial(record, inputs, outputs)


@contextlib.contextmanager
def _timed(times: dict[str, float], part: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        times[part] = times.get(part, 0.0) + time.perf_counter() - began


@contextlib.contextmanager
def _compile_timed(times: dict[str, float], execution: Execution) -> Iterator[None]:
    with compiling(compiles=execution != "interpreter") as spent:
        try:
            yield
        finally:
            times["compile"] = spent.seconds


@contextlib.contextmanager
def _blame_harness(doing: str) -> Iterator[None]:
    try:
        yield
    except _Stop:
        raise
    except Exception as error:
        raise _Stop("error", f"{HARNESS}{doing}: {sentence(error)}") from error


def needs_interpreter(impl: Impl, execution: Execution) -> bool:
    """Whether this implementation's kernels are Triton's and run in its interpreter; `<library>-triton...` by name."""
    return execution == "interpreter" and (impl.interpreted or "triton" in impl.name.split("-"))


def _launches_triton(impl: Impl) -> bool:
    return impl.interpreted or bool({"triton", "gluon"} & set(impl.name.split("-")))


def _can_watch(execution: Execution) -> bool:
    """Whether launches can be corrected and watched: whoever makes one, whatever its name, is held to the same rules."""
    if execution != "interpreter" or not ("triton" in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    return not importlib.import_module("impl.executions.interpreter").unsupported()


def _unsupported_interpreter(impl: Impl, execution: Execution) -> list[str]:
    if not needs_interpreter(impl, execution):
        return []
    reasons: list[str] = importlib.import_module("impl.executions.interpreter").unsupported()
    return reasons


def _unsupported_machine(impl: Impl, execution: Execution) -> list[str]:
    arch = machine_code_of(execution)
    if not arch:
        return []
    if not _launches_triton(impl):
        return [f"on={execution}: executed is the machine code of Triton kernels, and {impl.name} launches none"]
    reasons: list[str] = importlib.import_module("impl.executions.isa.triton_launch").unsupported(arch)
    return reasons


def answer(impl: Impl, op: str, inputs: Any, execution: Execution) -> Any:
    """The suspect's outputs for a private copy of the inputs; ends the trial as `memory` when others were written."""
    with _blame_harness("moving the inputs"):
        used = moved(inputs, device_of(execution))
    writable: Sequence[str] = op_module("cases", op).WRITABLE
    outputs = _run(impl, op, used, execution, writable)
    with _blame_harness("looking at the memory"):
        touched = trespasses(inputs, used, writable)
        if on_device(execution) and any(is_vast(tensor) for _, tensor in named_tensors(inputs)):
            # The allocator would keep the gigabytes of this case from the other workers of the device.
            del used
            torch.cuda.empty_cache()
    if touched:
        raise _Stop("memory", *touched)
    return outputs


def _run(impl: Impl, op: str, used: Any, execution: Execution, writable: Sequence[str]) -> Any:
    """The suspect's outputs on the CPU; whatever it raises ends the trial as `memory` or `error`."""
    violation: type[Exception] | None = None
    unmodelled: type[Exception] | None = None
    watched: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if needs_interpreter(impl, execution) or _can_watch(execution):
        with _blame_harness("repairing the interpreter"):
            importlib.import_module("impl.executions.interpreter").install()
            memory_watch = importlib.import_module("impl.executions.memory_watch")
            violation, watched = memory_watch.MemoryViolation, memory_watch.watch()
    elif machine_code_of(execution):
        with _blame_harness("preparing the machine"):
            importlib.import_module("impl.executions.isa.triton_launch").install(machine_code_of(execution))
            violation = importlib.import_module("impl.executions.isa.machine").MachineFault
            unmodelled = importlib.import_module("impl.executions.isa.unsupported").UnsupportedInstruction
    try:
        with watched, _torch_kept(), new_memory_poisoned():
            outputs = impl.run(used)
            if on_device(execution):
                torch.cuda.synchronize()
        wrong = misfit(op, outputs)
        if wrong:
            raise _Stop("error", wrong)
        strays = [] if impl.allocates else _strays(used, outputs, writable)
        if strays:
            raise _Stop("error", *strays)
        return map_tensors(outputs, lambda tensor: tensor.detach().cpu())
    except (_Stop, KeyboardInterrupt):
        raise
    except BaseException as error:
        cause = _cause(error)
        if violation is not None and isinstance(cause, violation):
            raise _Stop("memory", *(line.strip() for line in str(cause).splitlines() if line.strip())) from error
        if unmodelled is not None and isinstance(cause, unmodelled):
            raise _Stop("unsupported", f"machine code: {cause}") from error
        raise _Stop("error", sentence(cause)) from error


def _strays(used: Any, outputs: Any, writable: Sequence[str]) -> list[str]:
    """One sentence for every output that lies elsewhere than in the memory that the caller gave for it."""
    given = {path: tensor for path, tensor in named_tensors(used) if path in writable and tensor.numel()}
    return [
        f"{path}: the answer lies in memory of its own, but should lie in what the caller gave to be written"
        for path, tensor in named_tensors(outputs)
        if path in given
        # A wrong form is the judge's to tell.
        and (tensor.shape, tensor.dtype) == (given[path].shape, given[path].dtype)
        and tensor.untyped_storage().data_ptr() != given[path].untyped_storage().data_ptr()
    ]


@contextlib.contextmanager
def _torch_kept() -> Iterator[None]:
    """Undo what a suspect sets for the whole process: its successors are asked in the same one."""
    device, dtype, threads = torch.get_default_device(), torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def _cause(error: BaseException) -> BaseException:
    """What a kernel raised, where Triton's interpreter wrapped it."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def sentence(error: BaseException) -> str:
    """An exception as one sentence: its type, the first line of its message, and the line of code that raised it."""
    lines = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}{place}"


def device_is_dead(execution: Execution) -> bool:
    """Whether the device answers no more in this process, as after an illegal access; then the process must end."""
    if not on_device(execution):
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device_of(execution)).add_(1).item()
    except Exception:
        return True
    return False


def of_lost_device(record: Record) -> Record:
    """The record of an error after which the device is dead: as it is when the kernel did it, else it says so first.

    What CUDA and HIP call a fault of the kernel, an illegal access above all, is the kernel's; whatever else takes a
    device away, a reset or a broken link, or takes it before the kernel ran, is nobody's answer.
    """
    reasons = record.reasons or ("",)
    ran = not reasons[0].startswith(HARNESS)
    if ran and any(fault in reasons[0].lower() for fault in _KERNEL_FAULTS):
        return record
    first = reasons[0] if ran else f"while {reasons[0].removeprefix(HARNESS)}"
    return msgspec.structs.replace(record, reasons=(f"{LOST}{first}", *reasons[1:]))


def _fingerprint(outputs: Any) -> str:
    """SHA-256 over names, forms and bytes of all outputs in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors(outputs)):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(element_bytes(tensor).numpy().tobytes())
    return digest.hexdigest()


def diagnose(oracle: ModuleType, inputs: Any, outputs: Any) -> tuple[str, ...]:
    """Which named wrong answers a failing output equals, or else comes closest to; bounded in time.

    Where the op's oracle has `meaning(outputs)`, only what it keeps of an answer is compared.

    "as if ..." for the mutants whose answer is the output bit for bit; else "closest to: as if ..." for the one that
    lies at least four times nearer than the reference.
    """
    began = time.monotonic()
    mutants: tuple[Mutant, ...] = oracle.MUTANTS
    meaning = getattr(oracle, "meaning", lambda answer: answer)
    reference = dict(named_tensors(meaning(oracle.reference(inputs))))
    try:
        got = dict(named_tensors(meaning(outputs)))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        # An answer too malformed to say what means something in it.
        got = dict(named_tensors(outputs))
    same: list[str] = []
    nearest: tuple[float, str] | None = None
    tried = 0
    for mutant in mutants:
        if time.monotonic() - began > _DIAGNOSIS_SECONDS:
            break
        tried += 1
        try:
            answer = mutant.answer(inputs)
            wrong = {} if answer is None else dict(named_tensors(meaning(answer)))
        except Exception:
            # A diagnosis is a help; what is wrong with a mutant is found by the tests, not by a user's failing kernel.
            continue
        if answer is None:
            continue
        if got.keys() == wrong.keys() and all(_identical(got[name], wrong[name]) for name in got):
            same.append(f"as if {mutant.pitfall} ({mutant.name})")
            continue
        distance = _distance(got, wrong, reference)
        if distance is not None and (nearest is None or distance < nearest[0]):
            nearest = (distance, f"closest to: as if {mutant.pitfall} ({mutant.name})")
    cut = (f"only {tried} of {len(mutants)} wrong answers were compared in time",) if tried < len(mutants) else ()
    if same:
        return (*same, *cut)
    own = _distance(got, reference, reference)
    if nearest is not None and own is not None and nearest[0] * _CLOSER <= own:
        return (nearest[1], *cut)
    return cut


def _identical(got: torch.Tensor, wrong: torch.Tensor) -> bool:
    if got.shape != wrong.shape or (got.dtype != wrong.dtype and not got.dtype.is_floating_point):
        return False
    return torch.equal(element_bytes(got), element_bytes(wrong.to(got.dtype)))


def _distance(
    got: dict[str, torch.Tensor], other: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> float | None:
    """The largest relative RMS distance of an output; a NaN or infinity on one side only counts a million times over.

    None when the two have no output of the same shape in common.
    """
    found: list[float] = []
    for name in got.keys() & other.keys() & reference.keys():
        a, b = got[name].double(), other[name].double()
        if a.shape != b.shape or a.shape != reference[name].shape or a.numel() == 0:
            continue
        finite = reference[name].double().nan_to_num(0.0, 0.0, 0.0)
        scale = max(float(finite.square().mean().sqrt()), 1e-300)
        alike = (a == b) | (a.isnan() & b.isnan())
        off = torch.where(alike, 0.0, (a - b).abs() / scale).nan_to_num(1e6, 1e6, 1e6).clamp(max=1e6)
        found.append(float(off.square().mean().sqrt()))
    return max(found, default=None)
