"""`mla-oracle replay`: what happens in one case?"""

import dataclasses
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.markup import escape
from safetensors import SafetensorError

import cases as rooms
from cases.case import parse
from impl.implementation import Execution
from reports.capsule import read_capsule, write_capsule
from reports.commands.shared import (
    AiterOption,
    ImplOption,
    Misuse,
    OnOption,
    VllmOption,
    application,
    console_of,
    executions_of,
    exists,
    use_trees,
)  # fmt: skip
from reports.commands.terminal import show_record
from reports.environment import environment
from reports.execute import HARNESS, attempt
from reports.plan import AGAINST, chosen_impls, find_impl
from reports.replaying import Trees

T = TypeVar("T")


@application.command()
def replay(
    what: Annotated[str, typer.Argument(metavar="ID|CAPSULE", help="A case id, or a capsule file.")],
    impl: ImplOption = None,
    on: OnOption = None,
    law: Annotated[str, typer.Option("--law", help="Ask about this law of the op instead of the answer.")] = "",
    vllm: VllmOption = None,
    aiter: AiterOption = None,
    save: Annotated[Path | None, typer.Option("--save", help="Keep the trial as a capsule in this new file.")] = None,
) -> int:
    """Run one case again in this process, and explain it; a crash is a crash, and a hang hangs.

    The interpreter and another execution in one call have a process each.
    """
    is_file = exists(what) or (":" not in what and what.endswith(".safetensors"))
    before = read_capsule(Path(what))[0] if is_file else None
    case = parse(before.case if before is not None else what)
    executions = executions_of(on) if on or before is None else executions_of([before.on])
    names = chosen_impls((case.op,), tuple(impl or ((before.impl,) if before is not None else ())))
    asked = law or (before.law if before is not None else "")
    if asked and asked not in (named := [each.name for each in rooms.op_module("oracle", case.op).LAWS]):
        raise Misuse(f"--law {asked}: {case.op} has the laws {', '.join(named) or 'none'}")
    trees = use_trees(vllm, aiter)
    if save is not None and (save.exists() or not save.resolve().parent.is_dir()):
        raise Misuse(f"--save {save}: should name a new file in a directory that exists")
    if save is not None and len(names) * len(executions) != 1:
        raise Misuse(f"--save {save}: needs one --impl and one --on, these are {len(names)} and {len(executions)}")
    question = _Question(what, names, asked, trees, is_file, save)
    # Kernels are decorated once in a process: for the interpreter, or for the compiler.
    apart = len(executions) > 1 and "interpreter" in executions
    ask = _ask_alone if apart else _ask
    worst, judged = 0, False
    for execution in executions:
        found = ask(question, execution)
        worst, judged = max(worst, found[0]), judged or found[1]
    return worst if judged else max(worst, 1)


@dataclasses.dataclass(frozen=True)
class _Question:
    """What is asked of one execution after another; what: a case id, or a capsule where `is_file`."""

    what: str
    impls: Sequence[str]
    law: str
    trees: Trees
    is_file: bool
    save: Path | None


def _ask(question: _Question, execution: Execution) -> tuple[int, bool]:
    """Ask in this process: the exit code of the worst answer, and whether any was judged."""
    if execution == "interpreter":
        # Read by Triton when a kernel is decorated, and nothing has imported it yet.
        os.environ["TRITON_INTERPRET"] = "1"
    before, inputs = read_capsule(Path(question.what)) if question.is_file else (None, None)
    case = parse(before.case if before is not None else question.what)
    trees, console = question.trees, console_of()
    here = environment(execution, trees.vllm, trees.aiter)
    worst, judged = 0, False
    for name in question.impls:
        trial = attempt(case, find_impl(case.op, name), execution, here, inputs=inputs, law=question.law)
        show_record(trial.record, console, trees)
        if before is not None and before.fingerprint and (name, execution) == (before.impl, before.on):
            same = trial.record.fingerprint == before.fingerprint
            console.print(f"  its outputs are {'the same as' if same else 'not those'} in the capsule")
        if question.save is not None:
            try:
                console.print(f"  kept in {write_capsule(question.save, trial)}")
            except (OSError, SafetensorError) as error:
                raise Misuse(f"--save {question.save}: {error}; it should be a place with room to write") from error
        broke = any(reason.startswith(HARNESS) for reason in trial.record.reasons)
        worst = max(worst, 3 if broke else 1 if trial.record.status in AGAINST else 0)
        judged |= trial.record.status != "unsupported"
    return worst, judged


def _ask_alone(question: _Question, execution: Execution) -> tuple[int, bool]:
    """`_ask`, in a process of its own; one that dies is a crash, and is told."""
    found = answer_alone(_ask_afresh, question, execution)
    if isinstance(found, int):
        console_of().print(escape(f"{question.what}\ncrash on {execution}: its process {_ending(found)}"), style="bold")
        return 1, True
    return found


def _ask_afresh(question: _Question, execution: Execution) -> tuple[int, bool]:
    """`_ask` in a process in which nothing was chosen yet."""
    os.environ.pop("TRITON_INTERPRET", None)
    use_trees(question.trees.vllm, question.trees.aiter)
    return _ask(question, execution)


def answer_alone(ask: Callable[..., T], *words: object) -> T | int:
    """What a function answers in a new process; where that ends without an answer, its exit code."""
    sys.stdout.flush()
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(sending, ask, *words))
    process.start()
    sending.close()
    try:
        found: T = receiving.recv()
    except EOFError:
        process.join()
        return process.exitcode or 0
    finally:
        process.terminate()
        process.join()
    return found


def _tell(sending: Connection, ask: Callable[..., object], *words: object) -> None:
    sending.send(ask(*words))


def _ending(code: int) -> str:
    return f"died with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
